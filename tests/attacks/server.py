"""A process that has imported the library and forks for every command, since imports take longer than most attacks.

It reads one request a line, as JSON, and answers each with one line. Nothing of the library runs in it, so that a fork
finds no thread that holds a lock.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import importlib
import json
import os
import resource
import select
import signal
import sys
import threading
import time
from typing import Any

LIMITS = {"data": resource.RLIMIT_DATA, "files": resource.RLIMIT_NOFILE, "size": resource.RLIMIT_FSIZE}


IMPORTED = ("cordillera.cli.app", "cordillera.workflows.language", "cordillera.workflows.prediction",
            "cordillera.workflows.ranking", "cordillera.reports.ranking.run", "cordillera.reports.language.run",
            "cordillera.workflows.evaluation", "numba.typed", "pyarrow.compute", "torch._dynamo",
            "torch.utils.tensorboard")  # fmt: skip
"""What most commands import, which takes longer than what they do."""


def _import_library() -> None:
    for name in IMPORTED:
        with contextlib.suppress(ImportError):  # not all of it is needed everywhere
            importlib.import_module(name)
    from numba.core.registry import cpu_target

    for context in (cpu_target.typing_context, cpu_target.target_context):
        context.refresh()  # what it imports by the first kernel


def _become_command(request: dict[str, Any]) -> None:
    """Run the command of a request in this process, which ends with it."""
    os.setpgid(0, 0)
    os.chdir(request["folder"])
    os.environ.update(request["environment"])
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", closefd=False, buffering=1)  # noqa: SIM115
    faulthandler.enable(file=2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for name, value in request["limits"].items():
        if name == "own files":
            resource.setrlimit(resource.RLIMIT_NOFILE, (value, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        else:
            resource.setrlimit(LIMITS[name], (value, value))
    if request["clock"]:
        _let_clock_jump(request["clock"])
    from cordillera.cli import main

    sys.argv = ["cordillera", *request["arguments"]]
    main()


def _let_clock_jump(seconds: float) -> None:
    """Set the wall clock forwards and backwards by turns, as an administrator or a time server may."""
    true, calls = time.time, [0]

    def jumping() -> float:
        calls[0] += 1
        return true() + seconds * (1, -1, 0)[calls[0] % 3]

    time.time = jumping
    time.time_ns = lambda: int(jumping() * 1e9)  # type: ignore[assignment]


def _drain(pipes: list[int], texts: list[bytes], wait: float) -> None:
    """Read what a command has printed; its output is no file, which a limit of sizes would cut."""
    ready, _, _ = select.select(pipes, [], [], wait)
    for pipe in ready:
        block = os.read(pipe, 1 << 16)
        texts[pipes.index(pipe)] += block
        if not block:
            time.sleep(wait)


def _run(request: dict[str, Any]) -> dict[str, Any]:
    """Run a command in a child; end it, and whatever it has started, at its deadline."""
    began, ends = time.monotonic(), [os.pipe(), os.pipe()]
    deadline = request["seconds"] * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
    child = os.fork()
    if child == 0:
        for number, (_, inside) in enumerate(ends, 1):
            os.dup2(inside, number)
        for pair in ends:
            for end in pair:
                os.close(end)
        os._exit(_status(request))
    for _, inside in ends:
        os.close(inside)
    with contextlib.suppress(OSError):
        os.setpgid(child, child)
    pipes, texts, hung, found = [outside for outside, _ in ends], [b"", b""], False, 0
    while not found:
        _drain(pipes, texts, 0.01)
        if not hung and time.monotonic() - began > deadline:
            hung = True
            os.kill(child, signal.SIGABRT)  # faulthandler tells where it hung
            time.sleep(0.5)
            os.killpg(child, signal.SIGKILL)
        found, status, usage = os.wait4(child, os.WNOHANG)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # what it left behind
    while select.select(pipes, [], [], 0)[0]:
        sizes = list(map(len, texts))
        _drain(pipes, texts, 0)
        if sizes == list(map(len, texts)):
            break
    for pipe in pipes:
        os.close(pipe)
    out, err = (text.decode(errors="replace") for text in texts)
    code, seconds = os.waitstatus_to_exitcode(status), time.monotonic() - began
    processor = usage.ru_utime + usage.ru_stime
    return {"code": code, "out": out, "err": err, "hung": hung, "seconds": seconds, "memory": usage.ru_maxrss << 10,
            "processor": processor}  # fmt: skip


def _status(request: dict[str, Any]) -> int:
    """Run a command as Python would at its end: exit functions run, what is buffered is written."""
    status = 70
    try:
        _become_command(request)
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    with contextlib.suppress(BaseException):
        sys.stdout.flush()
        sys.stderr.flush()
    return status


def serve() -> None:
    """Answer requests until standard input ends."""
    _import_library()
    print(json.dumps({"ready": os.getpid()}), flush=True)
    for line in sys.stdin:
        print(json.dumps(_run(json.loads(line))), flush=True)


if __name__ == "__main__":
    serve()
