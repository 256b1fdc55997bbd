"""The folder of one run.

A run knows where its files lie and writes them so that a crash leaves no partial file; it does not interpret their
content. Layout::

    recipe.toml      the resolved recipe
    environment.json machine and library versions
    status.json      progress of training and the way it ended
    metrics.jsonl    one JSON object a line, in chronological order
    checkpoints/     see cordillera.training.checkpoints
    tensorboard/     event files
    tracked.json     ids that MLflow or Weights & Biases gave to the run, if its recipe names one
    encoder/         the fitted vocabularies and transforms
    predictions/     scores that were written nowhere else
    evaluation.json, model.json, report.html

JSON files and the lines of ``metrics.jsonl`` end with a checksum of their own, which readers verify.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import math
import os
import platform
import shlex
import shutil
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import IO, Any

from pydantic import BaseModel, ValidationError

from cordillera.errors import RunError
from cordillera.files import (
    TOML_BYTES,
    at_home,
    is_there,
    left_behind,
    parse_sealed,
    parse_toml,
    read_sealed,
    read_text,
    replacing,
    sealed_json,
)
from cordillera.mistakes import flat_values

_LIBRARIES = ("torch", "numpy", "numba", "fbgemm-gpu-cpu", "fbgemm-gpu", "polars", "pyarrow", "triton", "pydantic")

SEARCH_FILE = "search.json"
"""File with the settings of a search, whose folder holds candidates and no run."""

MAY_CHANGE = (
    *("name", "description", "device", "threads", "track", "parallel", "fault_tolerance"),
    *("data.path", "data.validation_path", "data.test_path"),  # content is compared separately
    *("data.sources", "data.validation", "data.tokenizer"),
    *("data.cache_dir", "data.processes", "data.prefetch", "data.evaluation_batch_size"),
    *("training.log_every", "training.evaluate_every", "training.evaluation_tokens", "training.checkpoint_every"),
    *("training.keep_checkpoints", "training.asynchronous", "training.max_skipped"),
)
"""Keys and sections of a recipe that may be changed before a run is resumed."""

MAY_GROW = ("training.epochs", "training.max_steps", "training.steps")
"""Keys that may also be changed if learning rates do not depend on the number of steps."""

_LOCK_TRIES, _LOCK_PAUSE_S = 3, 0.02
_METRICS_BYTES = 1 << 30  # largest metrics.jsonl that is read


def _plain(value: Any) -> Any:
    """Make a value fit for strict JSON: numbers that are not finite become null, which readers take as undefined."""
    if isinstance(value, dict):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


@contextlib.contextmanager
def disk_errors(path: Path, remedy: str | None = None) -> Iterator[None]:
    """Raise system errors while ``path`` is written, such as a full or read-only disk, as :class:`RunError`.

    The default ``remedy`` is advice for files of a run.

    Raises:
        RunError: If the file cannot be written.
    """
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            full = "the file is larger than may be" if error.errno == errno.EFBIG else "the disk is full"
            raise RunError(
                f"{full}; what was being written has been removed, earlier files are intact",
                where=str(path),
                remedy=remedy or "free some space, then give the command again; a training goes on with --resume",
            ) from error
        raise RunError(
            f"cannot be written: {error.strerror or error}",
            where=str(path),
            remedy=remedy or "choose a folder that can be written",
        ) from error


def write_atomically(path: Path, text: str, *, new: bool = False) -> None:
    """Write a text file so that readers see the old one or the new one (see :func:`cordillera.files.replacing`).

    With ``new``, the ``text`` is refused if ``path`` exists, so that only one of several processes creates the file.

    Raises:
        RunError: If the file cannot be written, or exists although ``new`` is set.
    """
    with disk_errors(path):
        try:
            with replacing(path, new=new) as beside:
                beside.write_text(text, encoding="utf-8")
        except FileExistsError:
            raise RunError("is being made by another process", where=str(path.parent)) from None


def recipe_state(recipe: BaseModel) -> dict[str, Any]:
    """Return a recipe as plain JSON values, for the state of a checkpoint."""
    state: dict[str, Any] = json.loads(recipe.model_dump_json(by_alias=True))
    return state


def check_recipe(saved: Any, recipe: BaseModel, where: Path) -> None:
    """Check that a checkpoint was written with the present recipe.

    Args:
        saved: Result of :func:`recipe_state` when the checkpoint was written; None for checkpoints of earlier versions,
            which are accepted.
        recipe: Present recipe of the run, with the differences that :func:`kept_changes` allows.
        where: Path of the recipe, for errors.

    Raises:
        RunError: If other keys differ; the message names all of them with both values.
    """
    if saved is None:
        return
    remedy = "put the earlier values back, or start a new run with the changed recipe"
    try:
        before = type(recipe).model_validate(saved)  # keys newer than the run get their defaults
    except ValidationError as error:
        raise RunError(
            "is of another kind or version than the checkpoint's", where=str(where), remedy=remedy
        ) from error
    if changed := kept_changes(before, recipe):
        raise RunError(
            f"has changed since the checkpoint was written: {'; '.join(changed)}", where=str(where), remedy=remedy
        )


def kept_changes(before: BaseModel, now: BaseModel) -> list[str]:
    """Return what differs between the recipe ``before`` and that ``now``, and must not in a resumed run.

    Each is a key with both values. Keys of :data:`MAY_CHANGE` and :data:`MAY_GROW` may differ.
    """
    old, new = (flat_values(recipe_state(recipe)) for recipe in (before, now))
    free: tuple[str, ...] = MAY_CHANGE
    if new.get("objective.name") == "dpo":  # what is evaluated needs log-probabilities of the first model
        free = tuple(key for key in free if key != "training.evaluation_tokens")
    if new.get("training.decay") in ("none", "plateau") and not new.get("training.warmup_fraction"):
        free += MAY_GROW
    changed = [
        key
        for key in {**old, **new}
        if old.get(key) != new.get(key) and not any(key == one or key.startswith(f"{one}.") for one in free)
    ]
    causes = {"decay": ("none", "plateau"), "warmup_fraction": (0.0,)}
    given = {key: value for key, no in causes.items() if (value := new.get(f"training.{key}", no[0])) not in no}
    because = " and ".join(f"training.{key} is {json.dumps(value)}" for key, value in given.items())
    why = f" (learning rates depend on it, as {because})"
    return [
        f"{key}: {json.dumps(old.get(key))} -> {json.dumps(new.get(key))}{why if key in MAY_GROW else ''}"
        for key in changed
    ]


def describe_environment() -> dict[str, Any]:
    """Return the machine, versions and threads, which a reader needs to judge the figures of a run."""
    versions = {}
    for library in _LIBRARIES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[library] = metadata.version(library)
    processor = platform.processor() or platform.machine()
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
        processor = names[0] if names else processor
    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "processor": processor,
        "cores": os.cpu_count(),
        "libraries": versions,
    }


@dataclass(frozen=True)
class RunStatus:
    """Progress of a run's training.

    Attributes:
        ended: The way in which training ended: ``finished``, ``early`` (patience ran out), ``exhausted`` (the text
            ended), ``interrupted`` or ``failed``; None while it runs, and after it was killed.
        step: Last step once training has ended; before, the step at which the status was written.
        steps: Number of steps of the whole training.
        why: Error that ended training; empty without one.
        records: Number of records in ``metrics.jsonl`` when the status was written.
        saved: Step of the newest checkpoint when the status was read; None without one. It is not in ``status.json``.
    """

    ended: str | None
    step: int
    steps: int
    why: str = ""
    records: int = 0
    saved: int | None = None

    @property
    def is_complete(self) -> bool:
        """Whether training was completed: all steps were taken, patience ran out, or the text ended."""
        return self.ended in ("finished", "early", "exhausted")

    @property
    def warning(self) -> str:
        """Warning for readers of the run's figures; empty for a complete run."""
        place = f"step {self.step:,} of {self.steps:,}"
        if self.is_complete:
            return ""
        if self.ended == "failed":
            return f"This run is not finished: training failed at {place}. {self.why}".rstrip()
        if self.ended == "interrupted":
            return f"This run is not finished: training was interrupted at {place}; it can be resumed."
        newest = "it has no checkpoint"
        if self.saved is not None:
            newest = f"its newest checkpoint is of step {self.saved:,} of {self.steps:,}"
        return f"This run is not finished: training runs, or was killed; {newest}."


def _take_lock(file: IO[str]) -> None:
    """Lock an open file; a reader of :meth:`Run.writer` holds it for an instant, so a lock that is held is tried again.

    Raises:
        BlockingIOError: If another process holds the lock.
    """
    for _ in range(_LOCK_TRIES):
        with contextlib.suppress(BlockingIOError):
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        time.sleep(_LOCK_PAUSE_S)
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


class Run:
    """The folder of one run.

    Args:
        folder: Existing run folder; :meth:`create` makes one.
        of_search: Whether the folder may be that of a search, which holds a recipe, records and a page, but no model.

    Raises:
        RunError: If the folder does not exist or holds no ``recipe.toml``, or is that of a search.
    """

    def __init__(self, folder: Path | str, *, of_search: bool = False) -> None:
        if not isinstance(folder, str | Path):
            raise RunError(f"the folder of a run is needed, got {type(folder).__name__}", where="run")
        self.folder = at_home(folder)
        self._is_held = False
        if not (self.folder / "recipe.toml").is_file():
            raise RunError(
                "is not a run folder (it holds no recipe.toml)",
                where=str(self.folder),
                remedy="name a folder that `cordillera train` made; `cordillera status` shows them",
            )
        if not of_search and is_there(self.folder / SEARCH_FILE):
            raise RunError(
                "is the folder of a search, which holds recipes and no model",
                where=str(self.folder),
                remedy=f"train a recipe of {self.folder / 'front'}; to go on with the search, give its "
                "`cordillera search` command again",
            )

    @classmethod
    def create(cls, folder: Path | str, recipe: str) -> Run:
        """Make a run folder with a resolved ``recipe`` as TOML; missing parents of ``folder`` are made.

        Raises:
            RunError: If the folder exists and is not empty, or cannot be written.
        """
        folder = at_home(folder)
        recipe_file = folder / "recipe.toml"
        begun = check_new_folder(folder)
        with disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            for leftover in begun:
                leftover.unlink(missing_ok=True)
        # Written first: with a recipe the run can be resumed, without one the folder can be used again.
        write_atomically(recipe_file, recipe, new=True)
        write_atomically(folder / "environment.json", sealed_json(describe_environment()))
        with disk_errors(folder):
            (folder / "checkpoints").mkdir(exist_ok=True)
        return cls(folder)

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r})"

    @property
    def name(self) -> str:
        """Name of the folder."""
        return self.folder.resolve().name

    @property
    def recipe_file(self) -> Path:
        """Path of the resolved recipe."""
        return self.folder / "recipe.toml"

    @property
    def checkpoints(self) -> Path:
        """Path of the folder that holds checkpoints."""
        return self.folder / "checkpoints"

    def saved_steps(self) -> list[int]:
        """Return the steps of the run's complete checkpoints, ascending."""
        return sorted(int(path.name[5:]) for path in self.checkpoints.glob("step-*") if path.name[5:].isdecimal())

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the run's lock for writing; the error in a second process names the process that holds it.

        The thread that holds the lock through this object may take it again. Temporary files that killed processes left
        in the folder are removed.

        Raises:
            RunError: If another process holds the lock.
        """
        if self._is_held:
            yield
            return
        path = self.folder / ".lock"
        with contextlib.ExitStack() as stack:
            with disk_errors(path):
                file = stack.enter_context(open(path, "a+", encoding="utf-8"))
            try:
                _take_lock(file)
            except BlockingIOError as error:
                file.seek(0)
                raise RunError(
                    f"another process (pid {file.read().strip() or 'unknown'}) is writing this run",
                    where=str(self.folder),
                    remedy="wait for it, or stop it first",
                ) from error
            except OSError as error:
                warnings.warn(
                    f"{self.folder}: this file system has no locks ({error.strerror}); start one process at a time",
                    stacklevel=3,
                )
            with disk_errors(path):
                file.truncate(0)
                file.write(str(os.getpid()))
                file.flush()
                for leftover in left_behind(self.folder):
                    leftover.unlink(missing_ok=True)
            self._is_held = True
            try:
                yield
            finally:
                self._is_held = False

    def writer(self) -> str | None:
        """Return the id of the live process that holds the run's lock; empty if none does, None if it is not known.

        It is unknown where the lock cannot be read or the file system has no locks. Nothing is written.
        """
        try:
            with open(self.folder / ".lock", encoding="utf-8", errors="replace") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    return file.read(32).strip() or "unknown"
        except FileNotFoundError:
            return ""
        except OSError:
            return None
        return ""

    def log(self, record: dict[str, Any]) -> None:
        """Append one record to ``metrics.jsonl``; numbers that are not finite are written as null."""
        path = self.folder / "metrics.jsonl"
        with disk_errors(path), open(path, "ab", buffering=0) as file:
            size, rest = file.tell(), sealed_json(_plain(record), line=True).encode()
            try:
                while rest:  # a disk that fills up writes a part first
                    rest = rest[file.write(rest) :]
            except OSError:
                file.truncate(size)
                raise

    def metrics(self) -> list[dict[str, Any]]:
        """Return all records of ``metrics.jsonl`` except an incomplete last line, as after a crash.

        Raises:
            RunError: If a line is not a JSON object or does not match its checksum, or there are fewer or more records
                than a finished training has written.
        """
        status = self.status()  # read first, because training may end at any moment
        path = self.folder / "metrics.jsonl"
        lines: list[str] = []
        if is_there(path):
            lines = read_text(path, error=RunError, limit=_METRICS_BYTES, remedy="restore the file").split("\n")
        remedy = "restore the file or delete that line"
        del lines[-1:]  # text after the last line break
        records = [
            parse_sealed(f"{line}\n", f"{path}, line {number}", line=True, error=RunError, remedy=remedy)
            for number, line in enumerate(lines, 1)
        ]
        if status is not None and status.is_complete and len(records) != status.records:
            raise RunError(
                f"holds {len(records):,} whole records, {status.records:,} were written",
                where=str(path),
                remedy="restore the file",
            )
        return records

    def rewind_metrics(self, step: int, without: str | None = None) -> None:
        """Remove the records after a step, so that a resumed run does not record a step twice.

        Args:
            step: Step from which the run continues.
            without: Kind of records to remove at every step.
        """

        def stays(record: dict[str, Any]) -> bool:
            at = record.get("step", 0)
            return isinstance(at, int) and at <= step and record.get("kind", "") != without

        kept = "".join(sealed_json(record, line=True) for record in self.metrics() if stays(record))
        # First: a kill in between would otherwise leave a finished status with fewer records, which counts as damage.
        if (status := self.status()) is not None:
            self.write_status(None, step, status.steps)
        write_atomically(self.folder / "metrics.jsonl", kept)

    def write_status(self, ended: str | None, step: int, steps: int, why: str = "") -> None:
        """Write ``status.json``; see :class:`RunStatus` for ``ended``, ``step``, ``steps`` and ``why``."""
        path, records = self.folder / "metrics.jsonl", 0
        if is_there(path):
            with open(path, "rb") as file:
                records = sum(line.endswith(b"\n") for line in file)
        content = asdict(RunStatus(ended, step, steps, why, records))
        del content["saved"]
        self.write_json("status.json", content)

    def write_failure(self, why: str) -> None:
        """Write into ``status.json`` why training failed, unless it was completed or another process trains the run."""
        with contextlib.suppress(RunError), self.lock():
            status = self.status()
            if status is not None and not status.is_complete:
                self.write_status("failed", status.step, status.steps, why)

    def status(self) -> RunStatus | None:
        """Return the progress of training; None for a run without ``status.json``.

        Raises:
            RunError: If ``status.json`` is damaged.
        """
        path = self.folder / "status.json"
        if not is_there(path):
            return None
        content = read_sealed(path, error=RunError, remedy="restore the file")
        kinds = {"ended": str | None, "step": int, "steps": int, "why": str, "records": int}
        if any(name not in content or not isinstance(content[name], kind) for name, kind in kinds.items()):
            raise RunError("does not say how far training came", where=str(path), remedy="restore the file")
        return RunStatus(**{name: content[name] for name in kinds}, saved=max(self.saved_steps(), default=None))

    def write_json(self, name: str, content: Mapping[str, Any]) -> Path:
        """Write an object as the file ``name`` of the folder; its last key, ``seal``, is a checksum of the others.

        Numbers in ``content`` that are not finite become null.
        """
        path = self.folder / name
        write_atomically(path, sealed_json(_plain(content)))
        return path

    def read_json(self, name: str) -> dict[str, Any]:
        """Read a JSON file of the folder, without its checksum.

        Raises:
            RunError: If the file does not exist, is not a JSON object, or does not match its checksum.
        """
        path = self.folder / name
        if not is_there(path):
            raise RunError("does not exist yet", where=str(path), remedy="let the run finish first")
        return read_sealed(path, error=RunError, remedy="restore the file")


def check_new_folder(folder: Path, command: str = "train") -> list[Path]:
    """Check that a run can be created in ``folder``; return files left by a process that was killed early.

    Args:
        folder: Folder, which need not exist.
        command: Command that would resume an existing run.

    Raises:
        RunError: If the folder exists and is not empty.
    """
    folder = at_home(folder)
    begun = left_behind(folder, "recipe.toml")
    if folder.exists() and (not folder.is_dir() or set(folder.iterdir()) - set(begun)):
        if _failed_at_once(folder):
            raise RunError(
                "already exists; its training failed, and it holds no checkpoint",
                where=str(folder),
                remedy="delete it, name another folder for the run, or begin it again with --resume",
            )
        is_run = (folder / "recipe.toml").is_file() and not (folder / SEARCH_FILE).is_file()
        go_on = f", or go on with `{shlex.join(['cordillera', command, str(folder), '--resume'])}`" if is_run else ""
        raise RunError("already exists", where=str(folder), remedy=f"name another folder for the run{go_on}")
    return begun


def _failed_at_once(folder: Path) -> bool:
    """Whether a folder is that of a run whose training failed before its first checkpoint."""
    try:
        status = Run(folder).status()
    except RunError:  # no run, the run of a search, or a damaged one
        return False
    has_checkpoints = (folder / "checkpoints").is_dir() and any((folder / "checkpoints").iterdir())
    return status is not None and status.ended == "failed" and not has_checkpoints


def check_no_run(recipe: str, command: str) -> None:
    """Check that a ``recipe``, as a user named it, is not the folder of a run, which a ``command`` would go on with.

    Raises:
        RunError: If it is, or is the folder of a search.
    """
    if (at_home(recipe) / "recipe.toml").is_file():
        Run(recipe)  # or the folder of a search
        remedy = f"continue it with `{shlex.join(['cordillera', command, str(at_home(recipe)), '--resume'])}`"
        raise RunError("is a run folder", where=recipe, remedy=remedy)


def next_path(parent: Path, name: str, ending: str = "") -> Path:
    """Return the first of ``name``, ``name-2``, ... with this ``ending`` that does not exist in ``parent``."""
    path, number = parent / f"{name}{ending}", 2
    while is_there(path):
        path, number = parent / f"{name}-{number}{ending}", number + 1
    return path


def remove_folder(folder: Path) -> None:
    """Delete a folder and all its content, from its name on: what a kill leaves does not pass for the whole folder.

    A folder that does not exist is ignored; of a link, the link alone goes.
    """
    if folder.is_symlink():
        with contextlib.suppress(OSError):
            return folder.unlink()
    if not folder.name.startswith("."):
        with contextlib.suppress(OSError):
            folder = folder.rename(folder.with_name(f".{folder.name}.{os.getpid()}.tmp"))
    shutil.rmtree(folder, ignore_errors=True)


def read_recipe(run: Run) -> tuple[str, dict[str, Any]]:
    """Read the recipe of a run; return its text and the parsed values.

    Raises:
        DataError: If the file is missing or not TOML.
    """
    text = read_text(run.recipe_file, limit=TOML_BYTES)
    return text, parse_toml(text, str(run.recipe_file))


def read_object(path: Path) -> dict[str, Any]:
    """Read the object of a run's JSON file, without its checksum; empty if the file does not exist.

    Raises:
        DataError: If the file is not a JSON object, or does not match its checksum.
    """
    return read_sealed(path, remedy="restore the file") if is_there(path) else {}
