"""Watchdog over the processes of a job: if a rank ends, stops or hangs, the job ends with one error that names it.

A thread writes this process's heartbeats to the job's store and reads those of the others
(:mod:`cordillera.distributed.job.heartbeats`). Python cannot interrupt a thread that waits in a collective. So an error
is raised the next time the training loop reports its position, or in place of the error with which the collective ends.
If neither happens in time, the process is ended at once.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType

import torch
import torch.distributed as dist

from cordillera.distributed.job.heartbeats import Beat, HeartbeatBoard, Verdict, named
from cordillera.distributed.job.store import JobStore, StoreError, StoreSilent
from cordillera.errors import CordilleraError, PeerError, RankError

ABANDONED = 75
"""Exit code of a process that was ended because another failed; in sysexits.h it means that a retry may succeed."""

JOIN_S = 60.0
"""Seconds after which a process that has not joined counts as missing."""

_SILENT_S = 3.0  # seconds without a heartbeat after which a rank counts as dead, once a connection broke
_EXPLAIN_S = 15.0  # longest wait for such evidence
_LOOK_S = 0.02
_MOST_LOOK_S = 0.25
_IDLE = 0.02  # share of processor time below which a thread counts as stalled
_TORCH = str(Path(torch.__file__).parent) + os.sep
_COLLECTIVES = str(Path(dist.__file__).parent) + os.sep
_STANDARD = str(Path(os.__file__).parent) + os.sep
_ROOM = str(Path(__file__).parents[1]) + os.sep
_TRANSPORT = _ROOM + "transport" + os.sep


@dataclass(frozen=True)
class WatchdogConfig:
    """Time limits of a watchdog.

    Attributes:
        deadline_s: Longest time from the moment at which a process stops, or stands still while others wait for it, to
            the end of the job, in seconds.
        join_s: Longest time until all processes have joined, in seconds.
    """

    deadline_s: float = 300.0
    join_s: float = JOIN_S

    @property
    def beat_s(self) -> float:
        """Seconds between two heartbeats of a process."""
        return min(1.0, self.deadline_s / 20)

    @property
    def grace_s(self) -> float:
        """Seconds between the discovery of an error and the end of a process that did not raise it."""
        return min(3.0, self.deadline_s / 8)

    @property
    def patience_s(self) -> float:
        """Seconds without a heartbeat or progress after which a process counts as lost, so that the deadline is met."""
        return self.deadline_s - self.grace_s - 2 * self.beat_s


class Watchdog:
    """This process's part in the watchdog, active within a ``with`` statement.

    Args:
        store: Store that all processes of the job reach, used by this job and attempt only.
        size: Number of processes; with one, there is nothing to watch.
        host: Holder of the store, as named in errors.
        stop: Event that a request to stop sets; None for a new one.
        abandon: Function that ends this process at once with an error that its main thread did not raise; None to print
            the error and exit with code :data:`ABANDONED`.

    Attributes:
        stop: Event that is set when the processes are asked to stop. Each process is notified at a different moment, so
            they must agree on the step after which they stop.
    """

    Config = WatchdogConfig

    def __init__(
        self,
        config: WatchdogConfig,
        store: JobStore,
        rank: int,
        size: int,
        *,
        host: str = "rank 0",
        stop: threading.Event | None = None,
        abandon: Callable[[RankError], None] | None = None,
    ) -> None:
        self.config, self.stop = config, threading.Event() if stop is None else stop
        self._rank, self._size, self._host, self._abandon = rank, size, host, abandon or _abandon
        self._store, self._beat_s = store, config.beat_s
        self._main = threading.get_ident()
        self._where, self._moves, self._beats, self._life = "at its beginning", 0, 0, 0
        self._lived: tuple[int, float] = (0, 0.0)
        self._error: RankError | None = None
        self._lock = threading.Lock()
        self._left = threading.Event()
        self._answered = time.monotonic()
        self._board = HeartbeatBoard(store, size, config.patience_s, config.join_s)
        self._threads = [
            threading.Thread(target=keep, name=f"cordillera {name}", daemon=True)
            for keep, name in ((self._keep_beating, "heartbeats"), (self._keep_guard, "guard"))
        ]

    @property
    def should_stop(self) -> bool:
        """Whether this process was asked to stop; the others may not have been notified yet."""
        return self.stop.is_set()

    def at(self, where: str) -> None:
        """Report the position of the main thread, such as ``step 12, forward``, which shows that it makes progress.

        Raises:
            RankError: If a rank was lost without which the job cannot continue.
        """
        self._where = f"at {where}"
        self._moves += 1
        if self._error is not None:
            raise self._error

    def late(self, seconds: float = 10.0) -> list[str]:
        """Describe the ranks that are silent, or that others wait for, for at least this many seconds."""
        with self._lock:
            return [self._board.describe(rank) for rank in self._board.late(seconds)]

    def meet(self, name: str) -> None:
        """Wait until every process has reached a place; each name of a place is used only once.

        Raises:
            RankError: If a process does not reach it.
        """
        try:
            self._store.set(f"meet/{name}/{self._rank}", True)
            self._wait_for_flags(f"meet/{name}", float("inf"))
        except StoreError as error:
            raise self.lost_store(error) from error

    def leave(self) -> None:
        """Wait until all processes have reached their ends, and stop watching.

        Later failures of this process do not affect the others.

        Raises:
            RankError: If a process does not reach its end.
        """
        self.at("its end")
        self.meet("end")
        self._end_threads()
        with contextlib.suppress(StoreError):  # the first process to leave may have ended the store
            self._store.set(f"gone/{self._rank}", True)
            if self._rank == 0:
                self._wait_for_flags("gone", _EXPLAIN_S)

    def _wait_for_flags(self, name: str, seconds: float) -> None:
        """Wait until every process has set its flag, for at most ``seconds``."""
        left, until, pause = set(range(self._size)), time.monotonic() + seconds, _LOOK_S
        while True:
            ranks = sorted(left)
            flags = self._store.read([f"{name}/{rank}" for rank in ranks])
            left -= {rank for rank, flag in zip(ranks, flags, strict=True) if flag is True}
            if not left or time.monotonic() > until:
                return
            if self._error is not None and seconds == float("inf"):
                raise self._error
            time.sleep(pause)
            pause = min(1.1 * pause, _MOST_LOOK_S)

    @contextlib.contextmanager
    def explaining(self) -> Iterator[None]:
        """Convert communication errors within a ``with`` statement to errors that name the rank.

        Raises:
            RankError: In place of the error that torch raises when a collective breaks.
        """
        try:
            yield
        except RankError:
            raise
        except (PeerError, RuntimeError) as error:
            if self._size == 1 or not (isinstance(error, PeerError) or _is_of_communication(error)):
                raise
            raise self.explain(error) from error

    def explain(self, error: Exception) -> CordilleraError:
        """Return an error that names the rank behind a broken collective; waits some seconds for evidence."""
        is_late = any(word in str(error).lower() for word in ("timed out", "timeout", " within "))
        until = time.monotonic() + (3 * self._beat_s + 1 if is_late else _EXPLAIN_S)
        while time.monotonic() < until:
            with self._lock:
                silent = self._board.silent(max(_SILENT_S, 3 * self._beat_s))
            if self._error is None and silent:
                self._found(self._ended(silent))
            if self._error is not None:
                return self._error
            time.sleep(_LOOK_S)
        if isinstance(error, PeerError) and error.peer is not None:
            return error  # nothing more is known
        with self._lock:
            suspects = self._board.suspects()
            verdict = self._board.blame(self.config.patience_s) if is_late and suspects else None
        if verdict is not None:
            self._found(verdict)
            assert self._error is not None
            return self._error
        return RankError(
            "the connection to another rank broke, but all ranks still send heartbeats",
            where=f"rank {self._rank}",
            remedy=f"look at the other ranks' logs; torch says: {str(error).splitlines()[0]}",
        )

    def __enter__(self) -> Watchdog:
        if self._size > 1:
            self._beat()
            self._answered = time.monotonic()
            for thread in self._threads:
                thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._left.is_set() or self._size == 1:
            return
        self._end_threads()  # before the failure is reported: the verdict of other ranks must not end this process
        if error is not None and self._error is None and not isinstance(error, RankError):
            said = (str(error).splitlines() or [""])[0]
            what = f"rank {self._rank} failed: {type(error).__name__}: {said}"
            with contextlib.suppress(StoreError):
                self.tell(Verdict((self._rank,), what, f"see what rank {self._rank} says", is_own=True))

    def _end_threads(self) -> None:
        """End the heartbeat threads, then the guard, which ends the process if the heartbeats do not stop."""
        self._left.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join()

    def _keep_beating(self) -> None:
        try:
            while not self._left.wait(self._beat_s):
                self._beat()
                with self._lock:
                    self._board.look()
                    verdict = self._board.verdict or self._board.judge()
                if verdict is not None and self._error is None:
                    self._found(verdict)
                self._answered = time.monotonic()
        except StoreError as error:
            if not self._left.is_set():
                self._error = self._error or self.lost_store(error)
        finally:
            self._answered = float("inf")

    def _keep_guard(self) -> None:
        """End this process if it does not end by itself; calls nothing that can block."""
        state, since = (False, False), 0.0
        looked = time.monotonic()
        while not self._left.is_set() or self._threads[0].is_alive():
            time.sleep(min(0.1, self._beat_s))
            now = time.monotonic()
            if now - looked > min(5.0, self.config.deadline_s / 2):  # this process itself was suspended
                self._answered += now - looked
            looked = now
            if self._error is None and now - self._answered > self.config.patience_s:
                self._error = self.lost_store(StoreSilent(f"did not answer for {self.config.patience_s:g} s"))
            before, state = state, (self._error is not None, self._left.is_set())
            since = now if state != before else since
            if self._error is not None and now - since > self.config.grace_s:
                self._abandon(self._error)

    def _beat(self) -> None:
        used = _processor_seconds(self._main)
        if self._moves != self._lived[0] or used - self._lived[1] > _IDLE * self._beat_s:
            self._life += 1
        self._lived = self._moves, used
        self._beats += 1
        place, waits = _place(sys._current_frames().get(self._main))
        self._board.beat(self._rank, Beat(self._beats, self._life, self._moves, f"{self._where}{place}", waits))

    def _found(self, verdict: Verdict) -> None:
        """Publish a verdict, and adopt the first one that was published."""
        try:
            told = self.tell(verdict)
        except StoreError:
            told = verdict
        self._error = self._error or told.error()

    def tell(self, verdict: Verdict) -> Verdict:
        """Publish why the job cannot continue; return the first verdict that any process published."""
        with self._lock:
            return self._board.verdict or self._board.accuse(verdict)

    def _ended(self, ranks: list[int]) -> Verdict:
        places = "; ".join(self._board.describe(rank) for rank in ranks)
        return Verdict(tuple(ranks), f"{named(ranks)} ended or stopped: {places}", f"see why {named(ranks)} ended")

    def lost_store(self, error: StoreError) -> RankError:
        """Return the error of a job whose store has ended or does not answer."""
        if isinstance(error, StoreSilent):
            how, remedy = str(error), f"see what {self._host} does, and whether the link to it is up"
        else:
            how, remedy = "has ended", f"see why {self._host} ended"
        ranks = (0,) if self._host == "rank 0" else ()
        return Verdict(ranks, f"{self._host}, which holds the job's store, {how}", remedy).error()


def _abandon(error: RankError) -> None:
    try:
        print(f"error: {error}", file=sys.stderr, flush=True)
    finally:  # even if the terminal is gone
        os._exit(ABANDONED)


def _is_of_communication(error: RuntimeError) -> bool:
    return isinstance(error, (dist.DistError, StoreError, PeerError)) or any(
        word in str(error) for word in ("gloo", "NCCL", "by peer")
    )


def _processor_seconds(thread: int) -> float:
    """Return the processor time that a thread has used; 0 if the system does not report it."""
    if not hasattr(time, "pthread_getcpuclockid"):
        return 0.0
    return time.clock_gettime(time.pthread_getcpuclockid(thread))


def _place(frame: FrameType | None) -> tuple[str, bool]:
    """Return the innermost line outside torch and the standard library, and whether it waits for other ranks."""
    waits = False
    while frame is not None:
        file = frame.f_code.co_filename
        waits = waits or file.startswith((_COLLECTIVES, _ROOM, _TRANSPORT))
        is_foreign = file.startswith((_TORCH, _TRANSPORT, __file__, "<")) or (
            file.startswith(_STANDARD) and "site-packages" not in file
        )
        if not is_foreign:
            return f" ({Path(file).name}:{frame.f_lineno}, in {frame.f_code.co_name})", waits
        frame = frame.f_back
    return "", waits
