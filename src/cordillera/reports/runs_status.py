"""State of runs: how far each is, whether a process writes it, what it takes on the disk, and what to do next.

Nothing is written and no model is read, so that a list of many runs takes little time, also while they train.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from cordillera.errors import CordilleraError, RunError
from cordillera.files import is_there, parse_sealed
from cordillera.run import SEARCH_FILE, Run, RunStatus, read_recipe

_ENDED = {
    "finished": "finished",
    "early": "stopped early",
    "exhausted": "text ended",
    "interrupted": "interrupted",
    "failed": "failed",
}
_BLOCK = 1 << 16  # bytes of metrics.jsonl that are read at once, from its end
_MOST = 1 << 20  # bytes of metrics.jsonl in which the newest loss and NE are looked for
_REMEDY = "restore the file or delete that line"


class SavedCheckpoint(NamedTuple):
    """A checkpoint on the disk.

    Attributes:
        step: Step after which it was written.
        bytes: Size of its files.
        written: Time at which it was complete, in seconds since 1970.
    """

    step: int
    bytes: int
    written: float


@dataclass(frozen=True)
class RunState:
    """State of one run; values that are not known are None.

    Attributes:
        folder: Folder of the run.
        model: Name of the model in its recipe.
        state: ``running``, ``killed``, ``running or killed`` (its lock cannot be read), ``finished``, ``stopped early``
            (patience ran out), ``text ended``, ``interrupted``, ``failed``, ``not begun``, ``unknown`` (records without
            a status) or ``damaged``; of a search, after ``search: ``, also ``space exhausted``.
        step: Last step that was recorded, or of a search the number of trained candidates.
        steps: Number of steps of the whole training, or of candidates.
        loss: Loss of training in the newest record that has one.
        ne: Normalised entropy on the validation split, or in a window of a stream, in the newest record that has it;
            the mean over tasks.
        age: Seconds since the newest record was written.
        bytes: Size of all files in the folder.
        process: Id of the process that writes the run, on its machine.
        why: Error that ended training, or what is damaged.
        next: What to do next: a command, or advice for a damaged run; empty while it runs.
    """

    folder: Path
    model: str | None = None
    state: str = "damaged"
    step: int | None = None
    steps: int | None = None
    loss: float | None = None
    ne: float | None = None
    age: float | None = None
    bytes: int = 0
    process: str | None = None
    why: str = ""
    next: str = ""


def runs_in(folder: Path | str) -> list[Path]:
    """Return the run folders directly in a ``folder``, by name; searches count as runs.

    Raises:
        RunError: If the folder cannot be read.
    """
    try:
        found = [Path(entry.path) for entry in os.scandir(folder)]
    except OSError as error:
        raise RunError(
            f"cannot be read: {error.strerror}", where=str(folder), remedy="name a folder of runs"
        ) from error
    return sorted(one for one in found if is_run(one))


def is_run(folder: Path) -> bool:
    """Return whether a ``folder`` is that of a run or search, and not one in which a recipe was only written."""
    begun = ("environment.json", "status.json", "checkpoints", ".lock", SEARCH_FILE)
    try:
        return (folder / "recipe.toml").is_file() and any((folder / name).exists() for name in begun)
    except PermissionError:  # a folder of somebody else
        return False


def run_states(folders: Iterable[Path | str]) -> list[RunState]:
    """Return the states of runs; what is damaged in one is in its ``why`` and does not keep others from being read.

    Args:
        folders: Folders of runs or searches.

    Raises:
        RunError: If a folder is not that of a run.
    """
    return [_state(Run(folder, of_search=True)) for folder in folders]


def saved_checkpoints(folder: Path | str) -> list[SavedCheckpoint]:
    """Return the complete checkpoints of the run in a ``folder``, by step.

    Raises:
        RunError: If it is not the folder of a run.
    """
    found, run = [], Run(folder, of_search=True)
    for step in run.saved_steps():
        place = run.checkpoints / f"step-{step:09d}"
        with contextlib.suppress(FileNotFoundError):  # training deletes older ones
            found.append(SavedCheckpoint(step, _size(place), place.stat().st_mtime))
    return found


def _state(run: Run) -> RunState:
    found = RunState(run.folder, bytes=_size(run.folder))
    try:
        found = replace(found, model=_model(run))
        process = run.writer()  # before the status, which a training writes before it gives its lock back
        status, records = run.status(), _Newest.of(run)
    except CordilleraError as error:
        return replace(found, why=_said(error, run.folder), next=error.remedy or "")
    is_search = is_there(run.folder / SEARCH_FILE)
    state = _word(status, process, records)
    state = "space exhausted" if is_search and state == _ENDED["exhausted"] else state
    step = records.step
    if status is not None:
        has_ended = status.ended is not None and not process
        step = status.step if has_ended else max(status.step, records.step or 0, status.saved or 0)
    return replace(
        found,
        state=f"search: {state}" if is_search else state,
        step=step,
        steps=None if status is None else status.steps,
        loss=records.loss,
        ne=records.ne,
        age=records.age,
        process=process or None,
        why="" if status is None or process else status.why,
        next=_next(run.folder, status, process, is_search),
    )


def _word(status: RunStatus | None, process: str | None, records: _Newest) -> str:
    if process:
        return "running"
    if status is None:
        return "not begun" if records.age is None else "unknown"
    if status.ended is None:
        return "killed" if process == "" else "running or killed"
    return _ENDED.get(status.ended, status.ended)


def _next(folder: Path, status: RunStatus | None, process: str | None, is_search: bool) -> str:
    """Return the command that goes on with a run, or that shows what is in it; empty while it runs."""
    if process:
        return ""
    if status is None or not status.is_complete:
        if is_search:
            return "give the command of the search again"
        return shlex.join(["cordillera", "train", str(folder), "--resume"])
    return shlex.join(["cordillera", "report", str(folder)])


def _model(run: Run) -> str | None:
    section = read_recipe(run)[1].get("model")
    name = section.get("name") if isinstance(section, dict) else None
    return name if isinstance(name, str) else None


def _said(error: CordilleraError, folder: Path) -> str:
    """Return an error in one line, with its file as a name in the run's folder."""
    place = (error.where or "").removeprefix(f"{folder}/")
    return " ".join(f"{place}: {error.what}".split())


def _size(folder: Path) -> int:
    """Return the bytes of all files below a folder, each once; those that are deleted meanwhile count nothing."""
    seen, total, left = set[tuple[int, int]](), 0, [str(folder)]
    while left:
        with contextlib.suppress(OSError), os.scandir(left.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    left.append(entry.path)
                    continue
                with contextlib.suppress(OSError):
                    found = entry.stat(follow_symlinks=False)
                    if (found.st_dev, found.st_ino) not in seen:
                        seen.add((found.st_dev, found.st_ino))
                        total += found.st_size
    return total


class _Newest(NamedTuple):
    """What the newest records of a run hold."""

    step: int | None = None
    loss: float | None = None
    ne: float | None = None
    age: float | None = None

    @classmethod
    def of(cls, run: Run) -> _Newest:
        """Read ``metrics.jsonl`` from its end until loss and NE are found.

        Raises:
            RunError: If a line is damaged.
        """
        path, found = run.folder / "metrics.jsonl", cls()
        if not is_there(path):
            return found
        try:
            found = found._replace(age=max(0.0, time.time() - path.stat().st_mtime))
            for line in _lines_from_end(path):
                record = parse_sealed(f"{line}\n", f"{path}, near its end", line=True, error=RunError, remedy=_REMEDY)
                found = found._with(record)
                if found.loss is not None and (found.ne is not None or "tokens" in record):
                    break
        except OSError as error:
            raise RunError(f"cannot be read ({error.strerror})", where=str(path), remedy=_REMEDY) from error
        return found

    def _with(self, record: dict[str, Any]) -> _Newest:
        """Add what an older record holds and newer ones do not."""
        step = record.get("step")
        found = self if self.step is not None or type(step) is not int else self._replace(step=step)
        kind, tasks = record.get("kind"), record.get("tasks")
        if kind == "train" and found.loss is None and isinstance(record.get("loss"), int | float):
            found = found._replace(loss=record["loss"])
        if kind in ("evaluation", "progressive") and found.ne is None and isinstance(tasks, dict):
            named = [one.get("ne") for one in tasks.values() if isinstance(one, dict)]
            values = [float(one) for one in named if isinstance(one, int | float)]
            if values and len(values) == len(tasks):
                found = found._replace(ne=sum(values) / len(values))
        return found


def _lines_from_end(path: Path) -> Iterator[str]:
    """Yield the whole lines of a file from the last to the first, as far as :data:`_MOST` bytes go."""
    with open(path, "rb") as file:
        end = file.seek(0, os.SEEK_END)
        least, rest, is_whole = max(0, end - _MOST), b"", False
        while end > least:
            begin = max(least, end - _BLOCK)
            file.seek(begin)
            rest, *lines = (file.read(end - begin) + rest).split(b"\n")
            if lines and not is_whole:
                del lines[-1]  # text after the last line break, which a writer has not finished
                is_whole = True
            yield from (line.decode("utf-8", "replace") for line in reversed(lines))
            end = begin
        if rest and is_whole and least == 0:
            yield rest.decode("utf-8", "replace")
