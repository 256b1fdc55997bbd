"""``cordillera bench SYSTEM``: a system's headline figures, peers side by side, on this machine."""

from __future__ import annotations

import contextlib
import difflib
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer

import cordillera
from cordillera.errors import CordilleraError, Interrupted

# Arguments after SYSTEM belong to the benchmark's own program.
CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True}
_LISTING, _RECORDER = "_stale.py", "_recorder.py"
_REMEDY = "benchmarks are part of the source checkout, not of the installed package: "
_REMEDY += "clone the repository and run this command in it"


def _searched_folders() -> str:
    return ", ".join(str(folder) for folder in folders())


def folders() -> list[Path]:
    """Return the folders to search for benchmarks: the source checkout of this package, then the current folder."""
    checkout = Path(cordillera.__file__).resolve().parents[2]
    found = [checkout / "benchmarks"] if (checkout / "pyproject.toml").is_file() else []
    return [*found, Path.cwd() / "benchmarks"]


def programs() -> dict[str, Path]:
    """Return the benchmark programs by the name of their system."""
    found: dict[str, Path] = {}
    for folder in folders():
        for path in sorted(folder.glob("*.py")) if (folder / _RECORDER).is_file() else ():
            if not path.name.startswith("_"):
                found.setdefault(path.stem.replace("_", "-"), path)
    return found


def bench(
    context: typer.Context,
    system: Annotated[
        str | None, typer.Argument(metavar="SYSTEM", help="What to measure, for instance `ranking`.")
    ] = None,
    stale: Annotated[
        bool, typer.Option("--stale", help="List result files whose code has changed since; exit status 1 if any has.")
    ] = False,
) -> None:
    """Measure a system beside its peers.

    Options after SYSTEM go to its benchmark (`bench ranking -- --help`).
    """
    available = programs()
    if not available:
        raise CordilleraError("there are no benchmarks", where=_searched_folders(), remedy=_REMEDY)
    if stale:
        if system is not None or context.args:
            raise CordilleraError("takes no SYSTEM and no other option", where="--stale")
        listing = next((folder / _LISTING for folder in folders() if (folder / _LISTING).is_file()), None)
        if listing is None:
            raise CordilleraError("there is no list of their figures", where=_searched_folders(), remedy=_REMEDY)
        raise typer.Exit(subprocess.run([sys.executable, str(listing)]).returncode)
    if system is None:
        raise CordilleraError("is missing", where="SYSTEM", remedy=f"one of {', '.join(available)}, or --stale")
    if system not in available:
        close = difflib.get_close_matches(system, available, 1)
        remedy = f"did you mean {close[0]}?" if close else f"one of {', '.join(available)}"
        raise CordilleraError(f"there is no benchmark {system!r}", where="SYSTEM", remedy=remedy)
    program = available[system]
    command = [sys.executable, str(program.with_name(_RECORDER)), str(program), *context.args]
    try:
        raise typer.Exit(_finished(command))
    except KeyboardInterrupt:
        remedy = "measure the others with --part; long ones go on after the pieces that they have finished"
        where = f"bench {system}"
        raise Interrupted("only finished parts have result files", where=where, remedy=remedy) from None


def _finished(command: list[str]) -> int:
    """Run a benchmark and return its exit status; neither processes of it nor temporary files stay behind.

    It does not hear of Ctrl-C, after which a training would save and return, and its benchmark take that for the end.
    """

    def stop(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    heard = [one for one in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(one) != signal.SIG_IGN]
    before = {one: signal.signal(one, stop) for one in heard}
    try:
        with tempfile.TemporaryDirectory(prefix="cordillera-", ignore_cleanup_errors=True) as scratch:
            benchmark = subprocess.Popen(command, env={**os.environ, "TMPDIR": scratch}, start_new_session=True)
            try:
                while benchmark.poll() is None:  # a signal does not always interrupt `wait`
                    time.sleep(0.2)
                return benchmark.returncode
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(benchmark.pid, signal.SIGKILL)
                benchmark.wait()
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
