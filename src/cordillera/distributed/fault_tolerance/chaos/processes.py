"""Processes of a running job, found by the process ids in its events, and signals that reach no other process.

The system reuses process ids. Four facts keep a signal from a process that reuses an id:

1. A signal goes through a descriptor of the process (``pidfd_open``), not to an id. A descriptor always refers to the
   same process; once this has ended, signals have no effect.
2. The descriptor belongs to the process that wrote its id into an event. It had the id when it wrote; a process that
   began before that moment and has the id now is therefore the same one.
3. If the clock was set since, or the folder lies on a machine or in a container with other ids, that comparison proves
   nothing. So a rank also has the name that its launcher gives it, its parent or the parent of that is
   the launcher, and the launcher is the process that has the lock of this run open.
4. All this was read from the descriptor's process: it still ran after the reads, so no other process had its id.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import resource
import select
import signal
import socket
import time
from pathlib import Path
from typing import NamedTuple

from cordillera.errors import DependencyError, RunError

_NAME = 15  # longest process name on Linux
_LOCK = ".lock"
_PIDFD_GETFD = 438  # number of the system call, on all machines
_NO_PROCESS = (errno.ESRCH, errno.EINVAL, errno.ENOENT)  # the latter two: the number is of a thread


class JobProcess:
    """A process identified so that a signal never reaches another one that reuses its id.

    Args:
        pid: Process id.

    Raises:
        ProcessLookupError: If there is no such process.
        DependencyError: If the system has no descriptors of processes.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._holders: set[object] = set()
        self._fillers: set[object] = set()
        self._file_limit: int | None = None  # limit before the descriptors were used up
        self._is_killed = False
        try:
            self._descriptor = os.pidfd_open(pid)
        except (AttributeError, OSError) as error:
            if getattr(error, "errno", None) in _NO_PROCESS:
                raise ProcessLookupError(pid) from error
            raise DependencyError(
                "this system has no descriptors of processes (pidfd)", remedy="use Linux 5.3 or later"
            ) from error

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)

    @property
    def is_running(self) -> bool:
        """Whether it has not ended and was not killed through this object; a stopped process runs."""
        if self._is_killed:  # it is about to end; a further kill must hit its successor
            return False
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        return not poll.poll(0)

    def send(self, number: signal.Signals) -> bool:
        """Send a signal; return False if the process has ended.

        Raises:
            RunError: If it is of another user.
        """
        if not self.is_running:
            return False
        try:
            signal.pidfd_send_signal(self._descriptor, number)
        except ProcessLookupError:
            return False
        except PermissionError as error:
            raise RunError(f"process {self.pid} belongs to another user") from error
        self._is_killed = number == signal.SIGKILL
        return True

    def cut(self) -> int:
        """End the network connections of the process, as if a machine between had dropped them; return how many.

        Raises:
            RunError: If the system does not allow it.
        """
        found = 0
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            for entry in os.scandir(f"/proc/{self.pid}/fd"):
                with contextlib.suppress(OSError):
                    if os.readlink(entry.path).startswith("socket:"):
                        found += self._cut(int(entry.name))
        return found

    def _cut(self, number: int) -> bool:
        """End a connection of the process; return False if the socket with this number is none."""
        call = ctypes.CDLL(None, use_errno=True).syscall
        own = call(_PIDFD_GETFD, self._descriptor, number, 0)
        if own < 0:
            code = ctypes.get_errno()
            if code in (errno.EPERM, errno.ENOSYS):
                raise RunError(
                    f"connections of process {self.pid} cannot be cut ({os.strerror(code)})",
                    remedy="run as the administrator, or set kernel.yama.ptrace_scope to 0",
                )
            return False
        with socket.socket(fileno=own) as shared:
            is_listening = shared.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if shared.family not in (socket.AF_INET, socket.AF_INET6) or is_listening:
                return False
            shared.shutdown(socket.SHUT_RDWR)
        return True

    def fill_disk(self, who: object) -> bool:
        """Make all writes of the process fail until every caller of this has called :meth:`empty_disk`.

        Returns:
            False if the process has ended.

        Raises:
            RunError: If it is of another user.
        """
        self._fillers.add(who)
        before = self._limit_files(0)
        if self._file_limit is None:
            self._file_limit = before
        return before is not None

    def empty_disk(self, who: object) -> None:
        """Allow writes of the process again, unless another caller has filled its disk."""
        self._fillers.discard(who)
        if not self._fillers and self._file_limit is not None:
            self._limit_files(self._file_limit)
            self._file_limit = None

    def _limit_files(self, size: int) -> int | None:
        """Limit the size of files that the process writes; return the limit before, or None if it has ended.

        There is no such call for a descriptor: that the process runs is looked up just before.
        """
        try:
            before, most = resource.prlimit(self.pid, resource.RLIMIT_FSIZE)
            if self.is_running:
                resource.prlimit(self.pid, resource.RLIMIT_FSIZE, (size, most))
                return before
        except ProcessLookupError:
            pass
        except PermissionError as error:
            raise RunError(f"process {self.pid} belongs to another user") from error
        return None

    def hold(self, who: object) -> bool:
        """Stop the process until everybody who holds it has released it; return False if it has ended."""
        self._holders.add(who)
        return self.send(signal.SIGSTOP)

    def release(self, who: object) -> None:
        """Continue the process unless another caller holds it; no effect if ``who`` does not hold it."""
        if who in self._holders:
            if len(self._holders) == 1:
                self.send(signal.SIGCONT)
            self._holders.discard(who)


class _Facts(NamedTuple):
    name: str
    parent: int
    began: float  # seconds since 1970


def _facts(pid: int) -> _Facts:
    """Read name, parent and start time of a process."""
    text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    before, _, after = text.rpartition(")")
    fields = after.split()
    since_boot = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    boot = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    return _Facts(before.partition("(")[2], int(fields[1]), boot + since_boot)


def find_process(pid: int, *, written: float, launcher: JobProcess, name: str | None = None) -> JobProcess | None:
    """Return the process of a job that an event is of, or None if it has ended.

    Args:
        pid: Its number in the event.
        written: Time at which the event was written, in seconds since 1970.
        launcher: Launcher of the job.
        name: Name that its launcher gives it; None if it gives none.
    """
    try:
        process = JobProcess(pid)
        found = _facts(pid)
        parents = (found.parent, _facts(found.parent).parent if found.parent else 0)
    except (OSError, OverflowError, ValueError, IndexError):
        return None
    is_it = found.began <= written and launcher.pid in parents and (name is None or found.name == name[:_NAME])
    return process if is_it and launcher.is_running and process.is_running else None


class JobLock:
    """The lock of a run, which the launcher of its job has open as long as the job runs.

    Args:
        folder: Folder of the run.

    Attributes:
        launcher: Process that has the lock open.
        taken: Time at which it took the lock, in seconds since 1970.

    Raises:
        LookupError: If nobody has it open.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / _LOCK
        try:
            self.taken = self._path.stat().st_mtime
            self.launcher = JobProcess(int(self._path.read_text(encoding="ascii")))
        except (OSError, OverflowError, ValueError) as error:
            raise LookupError(str(self._path)) from error
        if not self.is_held:
            raise LookupError(str(self._path))

    @property
    def is_held(self) -> bool:
        """Whether the launcher has it open.

        Raises:
            RunError: If the launcher is of another user.
        """
        folder = f"/proc/{self.launcher.pid}/fd"
        try:
            wanted, names = self._path.stat(), os.listdir(folder)
        except PermissionError as error:
            raise RunError("the job belongs to another user", where=str(self._path.parent)) from error
        except OSError:
            return False
        for name in names:
            with contextlib.suppress(OSError):
                if os.path.samestat(wanted, os.stat(f"{folder}/{name}")):
                    return self.launcher.is_running
        return False
