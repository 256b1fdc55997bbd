"""Result files of benchmarks: a JSON file per part, and a log of finished pieces for interrupted parts."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from _machine import fingerprint
from _recorder import recording
from _sources import code_behind
from rich.console import Console

if TYPE_CHECKING:
    from cordillera.training.ranking.config import TrainingOutcome
    from cordillera.training.ranking.trainer import Trainer

RESULTS = Path(__file__).resolve().parent / "results"


def _finite(value: Any) -> Any:
    """Replace NaN and infinity, which JSON lacks, by null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(key): _finite(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(entry) for entry in value]
    return value


def write_json(path: Path, content: dict[str, Any]) -> Path:
    """Write a result file to a temporary name and rename it; numbers that are not finite become null."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".part")
    beside.write_text(json.dumps(_finite(content), indent=2, allow_nan=False) + "\n")
    os.replace(beside, path)
    return path


def make_console() -> Console:
    """Return a console whose tables keep their columns without a terminal."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 160
    return console


def write_part(
    console: Console,
    folder: Path,
    system: str,
    part: str,
    quick: bool,
    measure: Callable[[], dict[str, Any]],
    **conditions: str,
) -> None:
    """Measure a part of a benchmark and write its figures with the machine's fingerprint.

    The committed results are written from a clean checkout only, so that the commit that they name is what was
    measured; ``--results FOLDER`` of every benchmark takes figures of other code.

    Args:
        console: Console that shows the path of the file.
        folder: Folder of result files.
        system: Name of the benchmark in file names.
        part: Name of the part in file names.
        quick: Whether the figures are meaningless.
        measure: Function that returns the figures.
        conditions: Conditions of the measurement besides the machine.
    """
    if folder.resolve() == RESULTS and fingerprint()["uncommitted_changes"]:
        console.print(f"{RESULTS}: takes figures of committed code only: commit first, or give --results FOLDER")
        raise SystemExit(2)
    began, record = time.perf_counter(), folder / f"{system}-{part}.ran"
    finished = record.with_suffix(".jsonl")  # of an earlier, interrupted run, whose code counts as well
    if not finished.exists():
        record.unlink(missing_ok=True)
    with recording(record):
        figures = measure()
    content = {
        "system": system,
        "part": part,
        "quick": quick,
        "seconds": time.perf_counter() - began,
        "machine": fingerprint(),
        **conditions,
        **figures,
        "code": code_behind(record),
    }
    if not finished.exists():
        record.unlink()
    console.print(f"{part}: written to {write_json(folder / f'{system}-{part}.json', content)}\n")


class FinishedPieces:
    """A log of finished pieces of a long benchmark, one JSON line each.

    A piece is known by its key, which must name everything that its value depends on. An interrupted benchmark that is
    started again continues after the finished pieces. An incomplete last line is dropped.

    Args:
        path: Path of the log, which is created with the first piece.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._values: dict[str, Any] = {}
        if not path.exists():
            return
        for line in path.read_text().splitlines():
            try:
                entry = json.loads(line)
            except json.JSONDecodeError:
                continue
            self._values[self._name(entry["key"])] = entry["value"]

    @staticmethod
    def _name(key: dict[str, Any]) -> str:
        return json.dumps(key, sort_keys=True)

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: dict[str, Any]) -> Any | None:
        """Return the value of a finished piece, or None."""
        return self._values.get(self._name(key))

    def add(self, key: dict[str, Any], value: Any) -> None:
        """Record a finished piece."""
        value = _finite(value)
        self._values[self._name(key)] = value
        self.path.parent.mkdir(parents=True, exist_ok=True)
        text = self.path.read_text() if self.path.exists() else ""
        torn = "" if not text or text.endswith("\n") else "\n"
        with self.path.open("a") as log:
            log.write(torn + json.dumps({"key": key, "value": value}, allow_nan=False) + "\n")

    def clear(self) -> None:
        """Delete all pieces."""
        self._values.clear()
        self.path.unlink(missing_ok=True)


def train_to_the_end(trainer: Trainer) -> TrainingOutcome:
    """Train, and raise an interruption, so that a training cut short does not count as a finished piece.

    Raises:
        KeyboardInterrupt: If a signal stopped the training, which the trainer treats as a request to resume later.
    """
    report = trainer.fit()
    if report.ended == "interrupted":
        raise KeyboardInterrupt
    return report
