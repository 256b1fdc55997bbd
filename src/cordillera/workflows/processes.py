"""What workflows report from the processes that they start, and the number of threads of each of these.

Progress goes to the caller one line or step at a time. The number of threads is chosen when a run begins and kept when
it is resumed, because results depend on it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cordillera.distributed.job.launch import tell
from cordillera.errors import RunError
from cordillera.files import is_there, read_json_object
from cordillera.kernels.threads import MOST_THREADS, choose_threads, usable_cores
from cordillera.run import Run, write_atomically

THREADS_FILE = "threads.json"
"""Name of the file in a run's folder that records its number of threads if the recipe does not set one."""

LOADED = ("torch.distributed.fsdp", "numba", "torch._dynamo", "cordillera.training.language.replicated")
"""Modules that ranks of a training need and take long to load; none of them loads polars, which starts threads."""

Say = Callable[[str], object]
"""Function that takes one line of text."""

OnStep = Callable[[dict[str, Any], Any, int], None]
"""Function that takes the newest record of a training, its progress and its total number of steps."""


def silent(text: str) -> None:
    """Ignore the text."""


def to_launcher(rank: int) -> tuple[OnStep | None, Say]:
    """Return functions that send what rank 0 reports to the process that launched it; other ranks report nothing."""
    if rank > 0:
        return None, silent
    return lambda *step: tell(("step", *step)), lambda text: tell(("say", text))


def from_ranks(on_step: OnStep | None, say: Say) -> Callable[[tuple[Any, ...]], None]:
    """Return the function that passes on what rank 0 sends by :func:`to_launcher`."""

    def hear(message: tuple[Any, ...]) -> None:
        kind, *content = message
        if kind == "say":
            say(*content)
        elif on_step is not None:
            on_step(*content)

    return hear


def threads_of(wanted: int | None, say: Say, *, folder: Path | str | None = None, processes: int = 1) -> int:
    """Return the number of threads of each process of a run.

    Args:
        wanted: Value of ``threads`` in the recipe; None to choose a number.
        say: Function called with the reason for the choice, if there is one.
        folder: Folder of a resumed run, which keeps its number of threads if this machine has as many processors.
        processes: Number of processes of the run on this machine, among which threads are divided.
    """
    if wanted is not None:
        return wanted
    kept = None if folder is None else _kept(Path(folder) / THREADS_FILE, processes)
    if kept is not None:
        return kept
    chosen = choose_threads()
    if chosen.why:
        say(f"threads: {chosen.why}")
    return max(1, chosen.count // processes)


def keep_threads(run: Run, threads: int, processes: int = 1) -> None:
    """Record the number of threads of each of a run's processes in ``threads.json``."""
    content = {"threads": threads, "processes": processes}
    write_atomically(run.folder / THREADS_FILE, json.dumps(content, indent=2) + "\n")


def _kept(file: Path, processes: int) -> int | None:
    if not is_there(file):
        return None
    remedy = "delete the file: the number is chosen anew"
    found = read_json_object(file, error=RunError, remedy=remedy)
    threads = found.get("threads")
    if not isinstance(threads, int) or isinstance(threads, bool) or not 1 <= threads <= MOST_THREADS:
        what = f"threads is {threads!r}, not a number from 1 to {MOST_THREADS}"
        raise RunError(what, where=str(file), remedy=remedy)
    fits = found.get("processes") == processes and threads * processes <= max(usable_cores(), processes)
    return threads if fits else None
