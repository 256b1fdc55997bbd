"""Scores of a ranking model for the samples of a file."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import secrets
from pathlib import Path

import polars as pl
import pyarrow.parquet

from cordillera.data.ranking.rows import read_rows
from cordillera.data.ranking.unseen import UnseenCount
from cordillera.errors import DataError
from cordillera.run import Run, disk_errors
from cordillera.serving.ranking.scorer import probabilities
from cordillera.workflows.scorers import opened_scorer
from cordillera.workflows.trained import card_of


def predict(
    run: Run | Path | str,
    file: Path | str,
    out: Path | str | None = None,
    *,
    batch_size: int = 8192,
    quantized: bool = False,
    planned: bool = False,
) -> tuple[Path, int]:
    """Score a file of samples by a ``run``, ``batch_size`` at a time, and write the scores with the samples' ids.

    Args:
        file: CSV, TSV or Parquet file with the columns of the training data; labels are not needed.
        out: Path of the scores, ending in ``.csv`` or ``.parquet``. Default: ``FILE-scores.csv`` beside ``file``. The
            columns are the schema's ``ids``, then ``score`` (or ``score_TASK`` for several tasks): probabilities in
            float64. The file appears only when it is complete.
        quantized: Whether to score with the model that ``cordillera quantize`` made from the run.
        planned: Whether to score with the kernels that ``cordillera probe`` chose for the run.

    Returns:
        Path of the scores and the number of rows.

    Raises:
        DataError: If the file cannot be read, lacks a column, or holds a value that training would have refused.
        NumericsError: If a logit is NaN or infinite; the message names the sample.
        RunError: If the scores cannot be written; no part of them remains.
    """
    run = run if isinstance(run, Run) else Run(run)
    file = Path(file)
    target = _checked_target(file, out)
    with opened_scorer(run, quantized=quantized, planned=planned) as (recipe, scorer):
        encoder, tasks = scorer.encoder, scorer.tasks
        unseen = UnseenCount(encoder, card_of(run)["data"]["facts"])
        names = ["score"] if len(tasks) == 1 else [f"score_{task}" for task in tasks]
        rows = 0
        with _Writer(target) as writer:
            for frame, place in read_rows(str(file), recipe.data, encoder.schema):
                encoded = encoder.encode(frame, where=place, labels=False)
                unseen.update(encoded)
                scores = probabilities(scorer.finite_logits(encoded, place, batch_size))
                columns = [frame[name] for name in encoder.schema.ids if name in frame.columns]
                columns += [pl.Series(name, scores[:, i]) for i, name in enumerate(names)]
                writer.write(pl.DataFrame(columns))
                rows += len(frame)
            writer.finish()
    unseen.warn(str(file))
    return target, rows


def _checked_target(file: Path, out: Path | str | None) -> Path:
    target = Path(out) if out is not None else file.with_name(f"{file.name.split('.')[0]}-scores.csv")
    if target.suffix not in (".csv", ".parquet"):
        raise DataError(f"must end in .csv or .parquet, got {target.suffix!r}", where=str(target))
    if target.resolve() == file.resolve():
        raise DataError("would overwrite the samples", where=str(target), remedy="name another file with --out")
    if not target.parent.is_dir():
        raise DataError("the folder does not exist", where=str(target.parent), remedy="make it first")
    return target


class _Writer:
    """Writes frames to a ``.csv`` or ``.parquet`` file that appears only when it is complete."""

    def __init__(self, target: Path) -> None:
        self.target = target
        self.temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
        self.parquet: pyarrow.parquet.ParquetWriter | None = None
        for left in target.parent.glob(f".{glob.escape(target.name)}.*.tmp"):
            with contextlib.suppress(OSError), open(left, "rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails if a process still writes it
                left.unlink()
        with self._errors():
            self.file = open(self.temporary, "xb")  # noqa: SIM115 (closed in __exit__)
            fcntl.flock(self.file, fcntl.LOCK_SH)

    def __enter__(self) -> _Writer:
        return self

    def _errors(self) -> contextlib.AbstractContextManager[None]:
        return disk_errors(self.target, "free some space, or name a file on another disk with --out")

    def write(self, frame: pl.DataFrame) -> None:
        with self._errors():
            if self.target.suffix == ".csv":
                self.file.write(frame.write_csv(include_header=self.file.tell() == 0).encode())
                return
            table = frame.to_arrow()
            if self.parquet is None:
                self.parquet = pyarrow.parquet.ParquetWriter(self.file, table.schema)
            self.parquet.write_table(table)

    def finish(self) -> None:
        with self._errors():
            if self.parquet is not None:
                self.parquet.close()
            self.file.flush()
            os.fsync(self.file.fileno())
            os.replace(self.temporary, self.target)

    def __exit__(self, *exception: object) -> None:
        with contextlib.suppress(OSError):
            self.temporary.unlink()
        if self.parquet is not None:
            with contextlib.suppress(OSError):
                self.parquet.close()  # the file has been removed
        with contextlib.suppress(OSError):
            self.file.close()
