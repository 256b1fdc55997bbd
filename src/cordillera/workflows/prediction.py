"""Scores of a ranking model for the samples of a file or in memory, and the scorer that gives them to requests."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import secrets
import tempfile
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow.parquet
import torch
from numpy.typing import NDArray

from cordillera.data.paths import expand_paths
from cordillera.data.ranking.encoding import Encoder
from cordillera.data.ranking.features import FeatureSpec
from cordillera.data.ranking.frames import FrameLike, frame_of
from cordillera.data.ranking.logs.columns import RowPlace
from cordillera.data.ranking.rows import read_rows
from cordillera.data.ranking.unseen import LEAST_ROWS, InputCheck
from cordillera.embeddings.dynamic_tables import DynamicTables
from cordillera.errors import DataError, RunError
from cordillera.files import make_folders, read_json_object, remove_made
from cordillera.kernels.repeatable import products_repeat
from cordillera.models.ranking.base import RankingModel
from cordillera.models.ranking.sequence import SequenceModel
from cordillera.recipe import RankingRecipe
from cordillera.run import Run, disk_errors, next_path, remove_folder
from cordillera.serving.ranking import export as exports
from cordillera.serving.ranking import quantized_model
from cordillera.serving.ranking.scorer import RowScorer, probabilities
from cordillera.training.ranking.scoring import select_device
from cordillera.workflows.processes import silent, threads_of
from cordillera.workflows.trained import (
    card_of,
    features_of,
    model_of,
    recipe_of,
    restore_model,
    warn_of_status,
    with_threads,
)

PREDICTIONS = "predictions"
"""Folder in a run's folder with the scores of :func:`predict`, if they are written nowhere else."""


def predict(
    run: Run | Path | str,
    file: Path | str,
    out: Path | str | None = None,
    *,
    batch_size: int = 8192,
    quantized: bool = False,
    planned: bool = False,
    on_rows: Callable[[int], None] | None = None,
) -> tuple[Path, int]:
    """Score a file of samples by a ``run``, ``batch_size`` at a time, and write the scores with the samples' ids.

    Args:
        file: CSV, TSV or Parquet file with the columns of the training data, folder, pattern or address; labels are not
            needed.
        out: Path of the scores, ending in ``.csv`` or ``.parquet``. Default: ``predictions/NAME.csv`` in the run's
            folder, with the name of ``file``, or ``NAME-2.csv`` and so on if that exists. The columns are the schema's
            ``ids``, then ``score`` (or ``score_TASK`` for several tasks): probabilities in float64. The file appears
            only when it is complete.
        quantized: Whether to score with the model that ``cordillera quantize`` made from the run.
        planned: Whether to score with the kernels that ``cordillera probe`` chose for the run.
        on_rows: Function called with the number of rows that are scored so far.

    Returns:
        Path of the scores and the number of rows.

    Raises:
        DataError: If the file cannot be read, lacks a column, or holds a value that training would have refused.
        NumericsError: If a logit is NaN or infinite; the message names the sample.
        RunError: If the scores cannot be written; no part of them remains.
    """
    run = run if isinstance(run, Run) else Run(run)
    target = _default_target(run, str(file)) if out is None else _checked_target(str(file), Path(out))
    with _opened_scorer(run, quantized=quantized, planned=planned) as (recipe, one):
        encoder, tasks = one.encoder, one.tasks
        inputs = InputCheck(encoder, card_of(run)["data"]["facts"])
        names = ["score"] if len(tasks) == 1 else [f"score_{task}" for task in tasks]
        _check_columns([*encoder.schema.ids, *names], target)
        rows, first = 0, dict[str, pl.DataType]()
        with _Writer(target) as writer:
            for frame, place in read_rows(str(file), recipe.data, encoder.schema, labels=False):
                encoded = encoder.encode(frame, where=place, labels=False)
                inputs.update(encoded)
                scores = probabilities(one.finite_logits(encoded, place, batch_size))
                ids = frame.select(name for name in encoder.schema.ids if name in frame.columns)
                first = first if rows else dict(ids.schema)
                _check_ids(ids, first, place, target)
                columns = [*ids, *(pl.Series(name, scores[:, i]) for i, name in enumerate(names))]
                writer.write(pl.DataFrame(columns))
                rows += len(frame)
                if on_rows is not None:
                    on_rows(rows)
            writer.finish()
    inputs.warn(str(file))
    return target, rows


def _check_columns(names: Sequence[str], target: Path) -> None:
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        raise RunError(
            f"would have two columns called {repeated[0]!r}, which data.schema.ids of the run names",
            where=str(target),
            remedy="`cordillera.load_model(run).predict(frame)` returns the scores alone",
        )


def _check_ids(ids: pl.DataFrame, first: Mapping[str, pl.DataType], place: RowPlace, target: Path) -> None:
    """Check that the ids of a file are those of the ``first`` one: CSV holds ids of several types in a column."""
    for name in {**first, **ids.schema}:
        here, before = ids.schema.get(name), first.get(name)
        if (here is None) != (before is None) or (target.suffix == ".parquet" and here != before):
            raise DataError(
                f"the id '{name}' is {here or 'missing'}, and {before or 'missing'} in the files before",
                where=place.source,
                remedy="give all files the same ids in one type, or score them one by one",
            )


class TrainedModel:
    """A trained ranking model in memory, from :func:`load_model`.

    ::

        model = cordillera.load_model("runs/clicks")
        frame["score"] = model.predict(frame)

    Attributes:
        run: Run that it was loaded from.
        columns: Names of the columns that it reads.
        tasks: Names of its tasks.
        module: The model as a module of torch, whose inputs are those of :class:`~cordillera.RankingBatch`.
    """

    def __init__(self, run: Run, scorer: RowScorer) -> None:
        schema = scorer.encoder.schema
        self._facts = card_of(run)["data"]["facts"]
        self.run, self._scorer, self._lock = run, scorer, threading.Lock()
        self.columns = tuple(one.name for one in (*schema.dense, *schema.categorical, *schema.lists))
        self.tasks, self.module = scorer.tasks, scorer.model

    def __repr__(self) -> str:
        name = self.run.read_json("model.json")["name"]
        return f"<{name} of {self.run.folder}: {len(self.columns)} columns, tasks {', '.join(self.tasks)}>"

    def predict(self, rows: FrameLike, *, batch_size: int = 8192) -> NDArray[np.float64]:
        """Return the probabilities of rows, bit for bit equal to those of :func:`~cordillera.predict`.

        Calls of several threads run one after another. With at least
        :data:`~cordillera.data.ranking.unseen.LEAST_ROWS` rows, a call warns if far more ids are blank or unknown to
        the model than in the validation rows, or if numbers look like those of another unit.

        Args:
            rows: ``pandas.DataFrame``, ``polars.DataFrame``, Arrow table, dict of columns, or list of dicts, one for
                each row. Blanks are None, or NaN in pandas. Columns that are not among :attr:`columns` are ignored.
                Columns of text and of truth values are read as numbers where the model takes numbers, as in files;
                requests to a server and exported programs refuse both.
            batch_size: Largest number of rows that are computed at a time; scores do not depend on it.

        Returns:
            Probabilities ``[N]``; of several tasks ``[N, tasks]``, in the order of :attr:`tasks`.

        Raises:
            DataError: If it is no table, a column is missing, or a value is one that training would have refused; the
                row is named.
            NumericsError: If a logit is NaN or infinite.
        """
        if batch_size < 1:
            raise DataError(f"must be at least 1, got {batch_size}", where="batch_size")
        frame, place = frame_of(rows, self.columns), RowPlace("rows", 0)
        with self._lock:
            encoded = self._scorer.encoder.encode(frame, where=place, labels=False)
            scores = probabilities(self._scorer.finite_logits(encoded, place, batch_size))
        if len(frame) >= LEAST_ROWS:
            inputs = InputCheck(self._scorer.encoder, self._facts)
            inputs.update(encoded)
            inputs.warn("rows")
        return scores[:, 0] if len(self.tasks) == 1 else scores

    def embeddings(self, feature: str) -> pl.DataFrame:
        """Return the embeddings that a feature looks up.

        Returns:
            A row for each row of its table: ``id`` (text; ``<other>`` for ids without a row of their own) and
            ``embedding``, a ``float32`` array of the table's width.

        Raises:
            DataError: If the feature has no table, or the table's rows come and go (dynamic tables).
        """
        encoder = self._scorer.encoder
        if isinstance(self.module.tables, DynamicTables):
            raise DataError("has a dynamic table, whose rows have no fixed ids", where=f"feature '{feature}'")
        ids = encoder.names(feature)
        table = next(one.table for one in encoder.features.sparse if one.name == feature)
        rows = self.module.tables.table(table).float().cpu().numpy()
        return pl.DataFrame(
            {"id": ids, "embedding": rows}, schema={"id": pl.String, "embedding": pl.Array(pl.Float32, rows.shape[1])}
        )


def load_model(run: Run | Path | str, *, quantized: bool = False) -> TrainedModel:
    """Load the model of a finished ranking ``run``, to score tables in memory.

    Args:
        quantized: Whether to load the model that ``cordillera quantize`` made from the run.

    Raises:
        CheckpointError: If there is no checkpoint or no quantised model, or it is corrupt.
        RunError: If it is no run, or a run of a language model, which :func:`~cordillera.load_language_model` loads.
    """
    run = run if isinstance(run, Run) else Run(run)
    scorer = open_scorer(run, quantized=quantized)
    warn_of_status(run)
    return TrainedModel(run, scorer)


def export(run: Run | Path | str, out: Path | str | None = None, *, compiled: bool = False, onnx: bool = False) -> Path:
    """Write the model of a finished ranking ``run`` as a program of torch that runs without this library.

    The folder holds ``model.pt2`` (:func:`torch.export.load`), ``schema.json`` with the vocabularies, and ``score.py``,
    which scores rows with both. In float32, scores equal those of :func:`~cordillera.predict`
    within 1e-6.

    Args:
        out: Folder to write. Default: ``export`` in the run's folder. One that exists is replaced.
        compiled: Whether to write a package of AOTInductor too (``model-compiled.pt2``), which needs a C++ compiler.
        onnx: Whether to write a program of ONNX too (``model.onnx``), in float32, which ``onnxscript`` exports and
            ``onnxruntime`` runs.

    Returns:
        The folder.

    Raises:
        DependencyError: If ``onnx`` is set and the exporter is not installed.
        RunError: If the folder holds something else, or the model looks up rows in a way of its own or emulates a
            format.
        CheckpointError: If there is no checkpoint, or it is corrupt.
    """
    run = run if isinstance(run, Run) else Run(run)
    recipe, encoder = recipe_of(run), Encoder.load(run.folder / "encoder")
    target = Path(out) if out is not None else run.folder / "export"
    if target.exists() and not _is_export(target):
        raise RunError("exists and is no export", where=str(target), remedy="name another folder with --out")
    if recipe.training.emulate is not None:
        raise RunError(
            "computes in an emulated format, which an export does not hold",
            where=str(run.folder),
            remedy="use load_model(run).predict",
        )
    features = features_of(run, encoder)
    _, model = restore_model(run, features, torch.device("cpu"))
    if type(model).look_up not in (RankingModel.look_up, SequenceModel.look_up):
        raise RunError(
            f"{type(model).__name__} has a look_up of its own, which an export does not hold",
            where=str(run.folder),
            remedy="compute it in forward, or use load_model(run).predict",
        )
    with disk_errors(target, "free some space, or name a folder on another disk with --out"):
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as folder:
            exports.write_export(Path(folder), encoder, model, recipe.training.precision, compiled=compiled, onnx=onnx)
            remove_folder(target)
            Path(folder).chmod(0o755)
            Path(folder).rename(target)
            Path(folder).mkdir()  # the folder to remove at the end
    return target


def _is_export(folder: Path) -> bool:
    try:
        return "programs" in read_json_object(folder / exports.SCHEMA)
    except DataError:
        return False


def open_scorer(run: Run | Path | str, *, quantized: bool = False, planned: bool = False) -> RowScorer:
    """Load the scorer of a finished ``run``; its scores equal those of :func:`~cordillera.predict` bit for bit.

    Args:
        quantized: Whether to score with the model that ``cordillera quantize`` made from the run.
        planned: Whether to score with the kernels that ``cordillera probe`` chose for the run; torch must then have the
            number of threads that the plan was measured with.

    Raises:
        CheckpointError: If there is no checkpoint or no quantised model, or it is corrupt.
        NumericsError: If there is no plan, or it does not fit.
        RunError: If the run is of a language model or unfinished, or both ``quantized`` and ``planned`` are given.
    """
    run = run if isinstance(run, Run) else Run(run)
    scorer = _load(run, recipe_of(run), quantized, planned)
    if scorer.device.type == "cpu" and not products_repeat():
        warnings.warn(
            "torch multiplied before cordillera was imported, or MKL_CBWR is set: the last bits of scores may depend "
            "on the rows beside them; import cordillera first",
            stacklevel=2,
        )
    return scorer


@contextlib.contextmanager
def _opened_scorer(run: Run, *, quantized: bool, planned: bool) -> Iterator[tuple[RankingRecipe, RowScorer]]:
    """Load the recipe and the scorer of a run, and set the run's number of threads within the region.

    ``quantized`` and ``planned`` are those of :func:`open_scorer`.
    """
    recipe = recipe_of(run)
    warn_of_status(run)
    # A plan is valid for the number of threads that it was measured with.
    with with_threads(recipe.threads if planned else threads_of(recipe.threads, silent)):
        yield recipe, _load(run, recipe, quantized, planned)


def _load(run: Run, recipe: RankingRecipe, quantized: bool, planned: bool) -> RowScorer:
    if quantized and planned:
        raise RunError(
            "a quantised model has no plan of kernels", where=str(run.folder), remedy="choose one of the two"
        )
    device = select_device(recipe.device)
    encoder = Encoder.load(run.folder / "encoder")
    return _scorer_of(run, recipe, encoder, features_of(run, encoder), device, quantized=quantized, planned=planned)


def _scorer_of(
    run: Run,
    recipe: RankingRecipe,
    encoder: Encoder,
    features: FeatureSpec,
    device: torch.device,
    *,
    quantized: bool,
    planned: bool,
) -> RowScorer:
    cpu, training = torch.device("cpu"), recipe.training
    if quantized:
        made_of = quantized_model.origin(run, use_best=training.patience is not None)
        folder = run.folder / quantized_model.FOLDER
        model, _ = quantized_model.load(folder, model_of(recipe, features), made_of)
        return RowScorer(encoder, model, features.tasks, cpu, quantized_model.precision_of(folder))
    if planned:
        from cordillera.workflows.probing import load_planned

        _, model = restore_model(run, features, cpu)
        model, most = load_planned(run, model)
        return RowScorer(encoder, model, features.tasks, cpu, "fp32", fixed=most)
    _, model = restore_model(run, features, device)
    return RowScorer(encoder, model, features.tasks, device, training.precision, emulate=training.emulate)


def _default_target(run: Run, file: str) -> Path:
    """Return where scores go: into the run's folder, because a file among samples would be read with them later."""
    parts = Path(file.partition("://")[2] or file).absolute().parts
    whole = [part for part in parts[1:] if not any(mark in part for mark in "*?[")]
    name = whole[-1].split(".")[0] if whole else ""
    return next_path(run.folder / PREDICTIONS, name or "scores", ".csv")


def _checked_target(file: str, target: Path) -> Path:
    if target.suffix not in (".csv", ".parquet"):
        raise DataError(f"must end in .csv or .parquet, got {target.suffix!r}", where=str(target))
    samples = () if "://" in file else expand_paths(file)
    if target.resolve() in [sample.resolve() for sample in samples]:
        raise DataError("would overwrite the samples", where=str(target), remedy="name another file with --out")
    return target


class _Writer:
    """Writes frames to a ``.csv`` or ``.parquet`` file that appears only when it is complete."""

    def __init__(self, target: Path) -> None:
        self.target = target
        self.temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
        self.parquet: pyarrow.parquet.ParquetWriter | None = None
        self.made: list[Path] = []
        for left in target.parent.glob(f".{glob.escape(target.name)}.*.tmp"):
            with contextlib.suppress(OSError), open(left, "rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails if a process still writes it
                left.unlink()
        with self._errors():
            make_folders(target.parent, self.made)
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
        remove_made(self.made)  # unless the file is in it
        if self.parquet is not None:
            with contextlib.suppress(OSError):
                self.parquet.close()  # the file has been removed
        with contextlib.suppress(OSError):
            self.file.close()
