"""The folder that holds everything about one run.

A run knows where things lie and how they are written so that a crash leaves no half file; it knows nothing of what is
in them. Layout::

    recipe.toml      the resolved recipe
    environment.json machine and library versions
    metrics.jsonl    one JSON object a line, in the order in which things happened
    checkpoints/     see cordillera.training.checkpoints
    tensorboard/     event files
    encoder/         the fitted vocabularies and transforms
    evaluation.json, model.json, report.html
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import platform
import shutil
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from cordillera.errors import CordilleraError

_LIBRARIES = ("torch", "numpy", "numba", "fbgemm-gpu-cpu", "fbgemm-gpu", "polars", "pyarrow", "triton", "pydantic")

MAY_CHANGE = (
    *("name", "description", "device", "threads", "parallel"),
    *("data.path", "data.sources", "data.validation", "data.tokenizer"),  # the content is compared by itself
    *("data.cache_dir", "data.processes", "data.prefetch", "data.evaluation_batch_size"),
    *("training.log_every", "training.evaluate_every", "training.evaluation_tokens", "training.checkpoint_every"),
    *("training.keep_checkpoints", "training.asynchronous", "training.max_skipped"),
)
"""Keys and sections of a recipe that may be others when a run is resumed."""

MAY_GROW = ("training.epochs", "training.max_steps", "training.steps")
"""Keys that may be others too where learning rates do not depend on the number of steps."""


class RunError(CordilleraError):
    """A run folder is missing, incomplete or in use."""


def _plain(value: Any) -> Any:
    """Make a value fit for strict JSON: what is not finite becomes null, which readers take as undefined."""
    if isinstance(value, dict):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn a full or read-only disk, met while writing ``path``, into an error that says so."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise RunError(
                "the disk is full; what was being written has been removed, earlier files are intact",
                where=str(path),
                remedy="free some space, then go on with --resume",
            ) from error
        if error.errno in (errno.EACCES, errno.EROFS, errno.EPERM):
            raise RunError(
                f"cannot be written: {error.strerror}", where=str(path), remedy="choose another --run folder"
            ) from error
        raise


def write_atomically(path: Path, text: str) -> None:
    """Write ``text`` beside ``path`` and rename it, so that readers see the old file or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with disk_errors(path):
        try:
            with open(temporary, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def recipe_state(recipe: BaseModel) -> dict[str, Any]:
    """What the state of a checkpoint holds of the ``recipe`` that it was trained with: plain JSON values."""
    state: dict[str, Any] = json.loads(recipe.model_dump_json(by_alias=True))
    return state


def check_recipe(saved: Any, recipe: BaseModel, where: Path) -> None:
    """Refuse to go on from a checkpoint with another recipe.

    Args:
        saved: What :func:`recipe_state` gave when the checkpoint was written; None of checkpoints that are older.
        recipe: That stands in the run's folder now; what :data:`MAY_CHANGE` and :data:`MAY_GROW` list may differ.
        where: The recipe's file, which errors name.

    Raises:
        RunError: other keys differ; all of them are named, with both values.
    """
    if saved is None:
        return
    remedy = "put the earlier values back, or start a new run with the changed recipe"
    try:
        before = _flat(recipe_state(type(recipe).model_validate(saved)))  # keys that are new since have their defaults
    except ValidationError as error:
        raise RunError(
            "is of another kind or version than the checkpoint's", where=str(where), remedy=remedy
        ) from error
    now = _flat(recipe_state(recipe))
    free: tuple[str, ...] = MAY_CHANGE
    if now.get("training.decay") == "none" and not now.get("training.warmup_fraction"):
        free += MAY_GROW
    changed = [
        f"{key}: {json.dumps(before.get(key))} -> {json.dumps(now.get(key))}"
        for key in {**before, **now}
        if before.get(key) != now.get(key) and not any(key == one or key.startswith(f"{one}.") for one in free)
    ]
    if changed:
        raise RunError(
            f"has changed since the checkpoint was written: {'; '.join(changed)}", where=str(where), remedy=remedy
        )


def _flat(content: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values by dotted key."""
    found: dict[str, Any] = {}
    for key, value in content.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}": value}
    return found


def describe_environment() -> dict[str, Any]:
    """What a later reader needs to judge this run's figures: machine, versions, threads."""
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


class Run:
    """One run's folder.

    Args:
        folder: An existing run folder; :meth:`create` makes one.

    Raises:
        RunError: the folder does not exist or holds no ``recipe.toml``.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self._is_held = False
        if not (self.folder / "recipe.toml").is_file():
            raise RunError(
                "is not a run folder (it holds no recipe.toml)",
                where=str(self.folder),
                remedy="name a folder that `cordillera train` made; `ls runs` shows them",
            )

    @classmethod
    def create(cls, folder: Path | str, recipe: str) -> Run:
        """Make a run folder.

        Args:
            folder: Its path; parents are made.
            recipe: The resolved recipe as TOML.

        Raises:
            RunError: the folder exists and is not empty, or cannot be written.
        """
        folder = Path(folder)
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise RunError(
                "already exists", where=str(folder), remedy="choose another --run folder, or continue with --resume"
            )
        with disk_errors(folder):
            (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
        write_atomically(folder / "environment.json", json.dumps(describe_environment(), indent=2) + "\n")
        write_atomically(folder / "recipe.toml", recipe)
        return cls(folder)

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.folder.resolve().name

    @property
    def recipe_file(self) -> Path:
        """Path of the resolved recipe."""
        return self.folder / "recipe.toml"

    @property
    def checkpoints(self) -> Path:
        """Path of the folder that holds checkpoints."""
        return self.folder / "checkpoints"

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the run for writing; a second process that tries is told who holds it.

        What holds it already through this object may hold it again, from the same thread.

        Raises:
            RunError: another process holds it.
        """
        import fcntl

        if self._is_held:
            yield
            return
        path = self.folder / ".lock"
        with disk_errors(path), open(path, "a+", encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                file.seek(0)
                raise RunError(
                    f"another process (pid {file.read().strip() or 'unknown'}) is writing this run",
                    where=str(self.folder),
                    remedy="wait for it, or stop it first",
                ) from error
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
            self._is_held = True
            try:
                yield
            finally:
                self._is_held = False

    def log(self, record: dict[str, Any]) -> None:
        """Append one record to ``metrics.jsonl``; numbers that are not finite are written as null."""
        path = self.folder / "metrics.jsonl"
        with disk_errors(path), open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(_plain(record), allow_nan=False) + "\n")

    def metrics(self) -> list[dict[str, Any]]:
        """All records of ``metrics.jsonl``. A last line cut short by a crash is left out.

        Raises:
            RunError: a line other than the last is not JSON.
        """
        path = self.folder / "metrics.jsonl"
        if not path.exists():
            return []
        lines = path.read_text(encoding="utf-8").splitlines()
        records = []
        for number, line in enumerate(lines, 1):
            try:
                records.append(json.loads(line))
            except json.JSONDecodeError as error:
                if number == len(lines):
                    break
                raise RunError(
                    "is not JSON", where=f"{path}, line {number}", remedy="restore the file or delete that line"
                ) from error
        return records

    def rewind_metrics(self, step: int) -> None:
        """Drop records after a step, so that a resumed run does not log the same step twice."""
        kept = [record for record in self.metrics() if record.get("step", 0) <= step]
        text = "".join(json.dumps(record, allow_nan=False) + "\n" for record in kept)
        write_atomically(self.folder / "metrics.jsonl", text)

    def write_json(self, name: str, content: Any) -> Path:
        """Write ``content`` as the JSON file ``name`` of the folder; numbers that are not finite become null."""
        path = self.folder / name
        write_atomically(path, json.dumps(_plain(content), indent=2, allow_nan=False) + "\n")
        return path

    def read_json(self, name: str) -> Any:
        """Read a JSON file of the folder.

        Raises:
            RunError: it does not exist or is not JSON.
        """
        path = self.folder / name
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise RunError("does not exist yet", where=str(path), remedy="let the run finish first") from error
        except json.JSONDecodeError as error:
            raise RunError(f"is not JSON: {error}", where=str(path), remedy="restore the file") from error


def next_folder(parent: Path, name: str) -> Path:
    """The first of ``name``, ``name-2``, ``name-3``, ... that does not exist in ``parent``."""
    folder, number = parent / name, 2
    while folder.exists():
        folder, number = parent / f"{name}-{number}", number + 1
    return folder


def remove_folder(folder: Path) -> None:
    """Delete a folder and all in it; not an error if it is gone."""
    shutil.rmtree(folder, ignore_errors=True)
