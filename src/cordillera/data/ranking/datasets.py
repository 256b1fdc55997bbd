"""Data sets of click logs: configuration, splits, and prepared data in a cache."""

from __future__ import annotations

import hashlib
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import polars as pl
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from cordillera.data.ahead import map_ahead, reading_threads
from cordillera.data.files import cache_folder, checksum, folder_beside
from cordillera.data.paths import expand_paths
from cordillera.data.ranking.cache import FORMAT, SPLITS, CacheWriter, Splits, TrueEntropy, open_splits
from cordillera.data.ranking.encoding import EncodedRows, Encoder
from cordillera.data.ranking.features import Schema
from cordillera.data.ranking.logs import adult, movielens
from cordillera.data.ranking.logs.click_logs import (
    CRITEO_COLUMNS,
    ClickLog,
    FileFormat,
    FileLog,
    RowChunk,
    avazu_schema,
    avazu_times,
    criteo_schema,
    format_of,
    log_times,
    unit_of_log,
)
from cordillera.data.ranking.logs.columns import RowPlace, splitmix64, timestamps_of
from cordillera.data.ranking.logs.histories import HistoriesConfig, HistoriesLog
from cordillera.data.ranking.logs.own import Condition, OwnLog, TimeForm, check_form_keys, form_of
from cordillera.data.ranking.logs.synthetic import SyntheticConfig, SyntheticLog
from cordillera.errors import DataError
from cordillera.mistakes import text_of

Split = Literal["time", "order", "random", "files"]


_Separator = Annotated[
    str, text_of(r"[\t !#-/:-@\[-`{-~]", "one tabulator, space or punctuation mark other than a double quote")
]


class DataConfig(BaseModel):
    """Data set of a run, its splits and its batches: the recipe's ``[data]`` section.

    Attributes:
        dataset: Name of a data set (``cordillera data list``). None for logs of your own.
        path: File, folder or pattern, or several of them: logs of your own, or a downloaded Criteo or Avazu log.
        validation_path: Files of the validation split, as ``path``. All rows of ``path`` are then training rows.
        test_path: Files of the test split, likewise.
        format: Format of the files. Default: the format that the file names imply.
        separator: Character between the fields of text files. Default: a comma, in TSV files a tabulator.
        null_values: Words that stand for no value in dense features and labels, such as ``NA``.
        decimal_comma: Whether text in dense features has a comma before the decimals, such as ``12,5``.
        timestamp_format: Form of the timestamps, such as ``%d/%m/%Y %H:%M``. Default: dates with the year first, or
            numbers.
        positive: Conditions by the names of labels that are not 0 and 1, such as ``>= 4`` or ``= yes``: where the
            column meets its condition the label is 1, elsewhere 0.
        schema_: Role of each column (``schema`` in a recipe). Required without ``dataset``.
        split: ``time`` (by timestamp: training before validation before test; rows of one second stay together),
            ``order`` (by position), ``random`` (by a hash of position and ``split_seed``), ``files`` (by
            ``validation_path`` and ``test_path``). Default: the data set's own; for logs of your own ``files`` if there
            are such paths, ``time`` if the schema has a timestamp, else ``random``.
        fractions: Shares of training, validation and test rows.
        split_seed: Seed of the random split.
        unordered: Treatment of rows that are earlier than the row before, in a split by time: ``refuse`` (an error that
            names the line) or ``sort`` (each split is brought into time order).
        encoder: Run whose vocabularies and transforms are kept; ids that it does not know get rows after those that it
            knows. Default: none, or the run of ``training.start``.
        tasks: Labels to learn. Default: all.
        batch_size: Number of rows in a training batch.
        evaluation_batch_size: Number of rows in a batch of validation or test.
        shuffle: Order of training batches: ``none``, ``blocks``, ``global`` (see ``Loader``).
        prefetch: Number of batches that are read ahead.
        cache_dir: Folder of prepared data. Default: ``$CORDILLERA_CACHE``, else ``~/.cache/cordillera``.
        synthetic: Settings of the synthetic log.
        histories: Settings of the synthetic log of requests with long histories.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    dataset: str | None = None
    path: str | tuple[str, ...] | None = None
    validation_path: str | tuple[str, ...] | None = None
    test_path: str | tuple[str, ...] | None = None
    format: FileFormat | None = None
    separator: _Separator | None = None
    null_values: tuple[str, ...] = ()
    decimal_comma: bool = False
    timestamp_format: TimeForm | None = None
    positive: dict[str, Condition] = {}
    schema_: Schema | None = Field(None, alias="schema")
    split: Split | None = None
    fractions: tuple[float, float, float] = (0.8, 0.1, 0.1)
    split_seed: int = Field(0, ge=0, lt=2**64)
    unordered: Literal["refuse", "sort"] = "refuse"
    encoder: str | None = None
    tasks: tuple[str, ...] | None = None
    batch_size: int = Field(1024, ge=1, le=2**26)
    evaluation_batch_size: int = Field(8192, ge=1, le=2**26)
    shuffle: Literal["none", "blocks", "global"] = "global"
    prefetch: int = Field(1, ge=0, le=1024)
    cache_dir: str | None = None
    synthetic: SyntheticConfig = SyntheticConfig()
    histories: HistoriesConfig = HistoriesConfig()

    @property
    def label(self) -> str:
        """Name of the data for messages: the data set's name, or the path of your own logs."""
        return self.dataset or (self.path if isinstance(self.path, str) else ", ".join(map(str, self.path or ())))

    @field_validator("fractions")
    @classmethod
    def _fractions_add_up(cls, value: tuple[float, float, float]) -> tuple[float, float, float]:
        if not (min(value) >= 0 and value[0] > 0 and abs(sum(value) - 1) <= 1e-9):
            raise ValueError(f"fractions must be at least 0, of training more than 0, and add up to 1, got {value}")
        return value

    @model_validator(mode="after")
    def _files_fit(self) -> DataConfig:
        given = [key for key in ("validation_path", "test_path") if getattr(self, key) is not None]
        if given and self.path is None:
            raise ValueError(f"{given[0]} needs path, the files of the training split")
        if given and self.split not in (None, "files"):
            raise ValueError(f"{given[0]} does not go with split = {self.split!r}; leave one of them out")
        if self.split == "files" and not given:
            raise ValueError("split = 'files' needs validation_path or test_path")
        return self

    @model_validator(mode="after")
    def _form_is_of_own_logs(self) -> DataConfig:
        check_form_keys(self, self.dataset, self.schema_)
        return self

    @model_validator(mode="after")
    def _source_is_one(self) -> DataConfig:
        if self.dataset is None:
            if self.path is None or self.schema_ is None:
                raise ValueError("name a dataset, or give path and schema of your own logs")
            return self
        if self.dataset not in DATASETS:
            raise ValueError(f"unknown dataset '{self.dataset}', choose one of {', '.join(DATASETS)}")
        entry = DATASETS[self.dataset]
        if self.schema_ is not None and not entry.needs_files:
            raise ValueError(f"dataset '{self.dataset}' brings its own schema; leave dataset out for logs of your own")
        if self.path is not None and not entry.needs_files:
            raise ValueError(f"dataset '{self.dataset}' brings its own rows; leave dataset out for logs of your own")
        if self.path is None and entry.needs_files:
            raise ValueError(f"dataset '{self.dataset}' cannot be fetched; {entry.source}, and name it by data.path")
        return self


@dataclass(frozen=True)
class Dataset:
    """Entry of the list of data sets.

    Attributes:
        summary: Description in one line.
        source: Origin.
        terms: Terms of use.
        split: Default split.
        schema: Function that returns the schema for a configuration.
        open: Function that returns the raw rows for a configuration and a cache folder, and fetches them if need be;
            None for files that a person downloads and names by ``path``.
        described: Function that returns the log without its rows; None if that takes the rows.
        format: Format of downloaded files, as they are published.
        header: Their columns, the label first; None if their first line names them.
        prepare: Function applied to every frame of them (:class:`FileLog`).
    """

    summary: str
    source: str
    terms: str
    split: Split
    schema: Callable[[DataConfig], Schema]
    open: Callable[[DataConfig, Path], ClickLog] | None = None
    described: Callable[[], ClickLog] | None = None
    format: FileFormat = "csv"
    header: tuple[str, ...] | None = None
    prepare: Callable[[pl.DataFrame, RowPlace], pl.DataFrame] | None = None

    @property
    def needs_files(self) -> bool:
        """Whether a person must download the files and give their path."""
        return self.open is None


def _paths(config: DataConfig) -> tuple[tuple[Path, ...], ...]:
    """Return the files of each split, or all files as training files."""
    given = (config.path, config.validation_path, config.test_path)
    found = tuple(() if path is None else expand_paths(path) for path in given)
    names = [file for files in found for file in files]
    twice = next((file for file in names if names.count(file) > 1), None)
    if twice is not None:
        raise DataError("the file is named twice", where=str(twice), remedy="a row belongs to one split: name it once")
    return found


def _encoder_folder(config: DataConfig) -> Path:
    folder = Path(config.encoder or "").expanduser() / "encoder"
    if not (folder / "encoder.json").is_file():
        what = "is no run of a ranking model" if folder.parent.is_dir() else "there is no such folder"
        remedy = "correct data.encoder, or training.start, which sets it"
        raise DataError(what, where=str(config.encoder), remedy=remedy)
    return folder


def _open_own(config: DataConfig) -> ClickLog:
    paths = [file for files in _paths(config) for file in files]
    assert config.schema_ is not None
    kind = config.format or format_of(paths)
    facts = {"source": "your own files"}
    return OwnLog(config.schema_, tuple(paths), kind, facts=facts, **form_of(config), separator=config.separator)


DATASETS: dict[str, Dataset] = {
    "movielens-100k": Dataset(
        "100,000 film ratings; likes to predict, with histories, in time order",
        movielens.SOURCE,
        movielens.TERMS,
        "time",
        lambda config: movielens.schema(),
        lambda config, cache: movielens.load(cache),
        movielens.described,
    ),
    "adult": Dataset(
        "48,842 people of a census; income, marital status and hours of work to predict",
        adult.SOURCE,
        adult.TERMS,
        "random",
        lambda config: adult.schema(),
        lambda config, cache: adult.load(cache),
        adult.described,
    ),
    "synthetic": Dataset(
        "a made click log of any size, whose best possible normalised entropy is known",
        "made",
        "none: the rows are made",
        "order",
        lambda config: config.synthetic.log_schema(),
        lambda config, cache: SyntheticLog(config.synthetic),
    ),
    "histories": Dataset(
        "made requests of several candidates with histories of up to 8,192 entries; what decides is known",
        "made",
        "none: the rows are made",
        "time",
        lambda config: config.histories.log_schema(),
        lambda config, cache: HistoriesLog(config.histories),
    ),
    "criteo": Dataset(
        "45 million ad impressions: 13 counts, 26 ids (train.txt of the display advertising challenge)",
        "Criteo Labs: download train.txt from https://ailab.criteo.com/ressources/",
        "Criteo: non-commercial use; read the terms where you download it",
        "order",
        lambda config: criteo_schema(),
        format="tsv",
        header=CRITEO_COLUMNS,
    ),
    "avazu": Dataset(
        "40 million ad impressions of ten days: 21 ids (train.gz of the click-through challenge)",
        "Avazu on Kaggle: download train.gz from https://www.kaggle.com/c/avazu-ctr-prediction/data",
        "the competition's rules; read them where you download it",
        "time",
        lambda config: avazu_schema(),
        prepare=avazu_times,
    ),
}
"""Data sets by name."""


def open_log(config: DataConfig) -> ClickLog:
    """Open the raw rows of a configuration; fetch them if need be."""
    if config.dataset is None:
        return _open_own(config)
    entry = DATASETS[config.dataset]
    if entry.open is not None:
        return entry.open(config, cache_folder(config.cache_dir))
    schema, kind = config.schema_ or entry.schema(config), config.format or entry.format
    facts = {"source": entry.source, "terms": entry.terms}
    files = tuple(file for files in _paths(config) for file in files)
    return FileLog(schema, files, kind, entry.header, entry.prepare, facts, separator=config.separator)


def with_unit(log: ClickLog) -> ClickLog:
    """Return a log whose schema names the unit of its timestamps, inferred from its first rows if need be."""
    if not isinstance(log, FileLog) or log.schema.timestamp is None or log.schema.timestamp_unit is not None:
        return log
    if (unit := unit_of_log(log)) == "s":
        return log
    schema = log.schema.model_copy(update={"timestamp_unit": unit})
    return replace(log, schema=schema, facts={**log.facts, "timestamp_unit": unit})


def _split_kind(config: DataConfig, schema: Schema) -> Split:
    if config.split is not None:
        return config.split
    if config.validation_path is not None or config.test_path is not None:
        return "files"
    if config.dataset is not None:
        return DATASETS[config.dataset].split
    return "time" if schema.timestamp is not None else "random"


class Splitter:
    """Assigns the rows of a log to splits, chunk by chunk in the order of the log."""

    def __init__(self, config: DataConfig, log: ClickLog) -> None:
        self.config, self.kind = config, _split_kind(config, log.schema)
        self.position = 0
        self.bounds: tuple[int, int] = (0, 0)
        self.column, self.unit = log.schema.timestamp or "", log.schema.timestamp_unit
        if self.kind == "files":
            self.split_of = {str(file): split for split, files in enumerate(_paths(config)) for file in files}
        elif self.kind == "time":
            if log.schema.timestamp is None:
                raise DataError(
                    "a split by time needs timestamps",
                    where="data.split",
                    remedy='name the timestamp column in the schema, or set split to "order" or "random"',
                )
            self.bounds = self._times(log)
        elif self.kind == "order":
            column = log.schema.timestamp or log.schema.labels[0]
            rows = sum(len(frame) for frame, _ in log.chunks([column]))
            train, validation, _ = config.fractions
            self.bounds = (round(train * rows), round((train + validation) * rows))

    def _times(self, log: ClickLog) -> tuple[int, int]:
        parts: list[pl.DataFrame] = []
        latest = None
        for times, place in log_times(log):
            if self.config.unordered == "refuse" and len(times):
                series = times.to_numpy()
                before = np.concatenate([[series[0] if latest is None else latest], series[:-1]])
                earlier = series < before
                if earlier.any():
                    row = int(earlier.argmax())
                    raise DataError(
                        f"timestamp {series[row]} is earlier than that of the row before, {before[row]}",
                        where=place.at(row, self.column),
                        remedy='sort the file by time, or set data.unordered = "sort"',
                    )
                latest = series[-1]
            parts.append(times.to_frame("time").group_by("time").len(name="rows"))
            if len(parts) >= 16:
                parts = [pl.concat(parts).group_by("time").agg(pl.col("rows").sum())]
        if not parts:
            raise DataError("there are no rows", where="data")
        total = pl.concat(parts).group_by("time").agg(pl.col("rows").sum()).sort("time")
        ends = np.cumsum(total["rows"].to_numpy().astype(np.int64))
        train, validation, _ = self.config.fractions
        stamps = total["time"].to_numpy()

        def bound(share: float) -> int:
            # The first timestamp outside. Rows of one second stay together, so the share is met only approximately.
            inside = int(np.argmin(np.abs(np.concatenate([[0], ends]) - share * ends[-1])))
            return int(stamps[inside]) if inside < len(stamps) else int(stamps[-1]) + 1

        return bound(train), bound(train + validation) if validation else bound(train)

    def __call__(self, frame: pl.DataFrame, timestamps: np.ndarray | None, place: RowPlace) -> np.ndarray:
        """Split numbers ``[N]`` of the next rows: 0 for training, 1 for validation, 2 for test."""
        first, self.position = self.position, self.position + len(frame)
        if self.kind == "files":
            return np.full(len(frame), self.split_of[place.source], dtype=np.int8)
        if self.kind == "time":
            keys = timestamps
            assert keys is not None
        elif self.kind == "order":
            keys = np.arange(first, first + len(frame))
        else:
            mixed = splitmix64(
                splitmix64(np.array([self.config.split_seed], dtype=np.uint64))
                + np.arange(first, first + len(frame), dtype=np.uint64)
            )
            keys = (mixed >> np.uint64(11)).astype(np.float64) / 2.0**53
            train, validation, _ = self.config.fractions
            return (keys >= train).astype(np.int8) + (keys >= train + validation) * (validation + train < 1)
        # A bound of 2**63 does not fit into int64; no row lies beyond it.
        splits = [keys >= bound if bound < 2**63 else np.zeros(len(keys), dtype=bool) for bound in self.bounds]
        return splits[0].astype(np.int8) + splits[1].astype(np.int8)

    def of(self, frame: pl.DataFrame, place: RowPlace) -> np.ndarray:
        """Split numbers ``[N]`` of the next rows, with the timestamps read from ``frame``; ``place`` is for errors."""
        return self(frame, self.times(frame, place) if self.kind == "time" else None, place)

    def times(self, frame: pl.DataFrame, place: RowPlace) -> np.ndarray:
        """Return the timestamps ``int64 [N]`` of a ``frame`` in seconds; ``place`` locates its rows in errors."""
        return timestamps_of(frame[self.column], self.column, place, self.unit)

    def restart(self) -> None:
        """Return to the first row."""
        self.position = 0


def _key(config: DataConfig, log: ClickLog, format: int = FORMAT) -> str:
    schema = log.schema.model_dump(mode="json")
    for added in ("missing_labels", "teacher", "timestamp_unit"):  # copies from before there were these keys stay valid
        if not schema[added]:
            del schema[added]
    for feature in schema["dense"]:
        if feature["width"] == 1:
            del feature["width"]
    choices = {
        "format": format,
        "log": log.fingerprint(),
        "schema": schema,
        "split": _split_kind(config, log.schema),
        "fractions": config.fractions,
        "seed": config.split_seed,
        "unordered": config.unordered,
    }
    if choices["split"] == "files":
        choices["files"] = [len(files) for files in _paths(config)]
    if config.separator is not None:
        choices["separator"] = config.separator
    if config.encoder is not None:
        choices["encoder"] = checksum(_encoder_folder(config) / "encoder.json")
    return hashlib.sha256(json.dumps(choices, sort_keys=True).encode()).hexdigest()[:16]


def prepare(config: DataConfig, *, progress: bool = True, verify: bool = True) -> Splits:
    """Fetch, split, encode and cache the data set of ``config``, showing ``progress``; a second call opens the copy.

    A first pass fits the encoder on the training rows alone; a second pass writes the columns. Memory is bounded by the
    vocabularies, not by the rows.

    Args:
        verify: Whether to compare every file with its checksum (:func:`~cordillera.data.ranking.cache.open_splits`).

    Raises:
        DataError: the data is wrong; the error names file, row, column and remedy, and nothing is left half written.
    """
    log = _CachedLog(config)
    folders, name = cache_folder(config.cache_dir) / "prepared", config.dataset or "own"
    folder = folders / f"{name}-{log.key()}"
    if not (folder / "meta.json").exists():
        earlier = folders / f"{name}-{log.key(FORMAT - 1)}"
        if earlier.exists():
            warnings.warn(
                f"{config.label}: is prepared anew, as an earlier version read rows less strictly; its copy in "
                f"{earlier} can be deleted",
                stacklevel=2,
            )
        _build(config, log.open(), folder, progress)
    return open_splits(folder, config.tasks, verify=verify)


class _CachedLog:
    """Opens a log at most once, and not at all where its key is known without it."""

    def __init__(self, config: DataConfig) -> None:
        self.config = config
        self.log: ClickLog | None = None

    def open(self) -> ClickLog:
        if self.log is None:
            self.log = open_log(self.config)
        return self.log

    def key(self, format: int = FORMAT) -> str:
        entry = DATASETS.get(self.config.dataset or "")
        if entry is None or entry.described is None:
            return _key(self.config, self.open(), format)
        # The version alone describes the log, so a prepared data set opens without reading the rows.
        return _key(self.config, entry.described(), format)


# One piece: the encoder, the files and the checks rest on one reading of an unchanged log, or nothing is kept.
def _build(config: DataConfig, log: ClickLog, folder: Path, progress: bool) -> None:
    console = Console(stderr=True, quiet=not progress)
    before = log.fingerprint()
    log = with_unit(log)
    name = config.dataset or "your files"
    if config.dataset is not None and log.facts.get("source") != "made":
        console.print(f"{name}: {log.facts.get('source')}\nterms: {log.facts.get('terms')}", highlight=False)
    if "timestamp_unit" in log.facts:
        unit = f"timestamps of '{log.schema.timestamp}' are in {log.facts['timestamp_unit']} since 1970"
        console.print(f"{unit}, by their size; set data.schema.timestamp_unit otherwise", highlight=False)
    bar = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        TextColumn("{task.completed:,.0f} rows"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not (progress and sys.stderr.isatty()),
    )
    with bar:
        splitter = Splitter(config, log)
        columns = [*log.schema.columns, *((log.probability,) if log.probability else ())]
        known = None if config.encoder is None else Encoder.load(_encoder_folder(config))
        encoder, rows_in_all = Encoder.fit(log.schema, (), known), None
        if Encoder.needs_fit(log.schema):
            task = bar.add_task(f"fitting {name}", total=None)

            def timed(chunk: RowChunk) -> tuple[pl.DataFrame, RowPlace, np.ndarray | None]:
                _require(chunk[0], log.schema, chunk[1].source)
                return *chunk, splitter.times(*chunk) if splitter.kind == "time" else None

            def training_rows() -> Iterator[RowChunk]:
                for frame, place, times in map_ahead(timed, log.chunks(columns), threads=reading_threads()):
                    bar.advance(task, len(frame))
                    inside = np.flatnonzero(splitter(frame, times, place) == 0)
                    if len(inside):
                        yield frame[inside], place.of_rows(inside)

            encoder = Encoder.fit(log.schema, training_rows(), known)
            splitter.restart()
            rows_in_all = bar.tasks[task].completed
            bar.remove_task(task)
        with folder_beside(folder) as beside:
            writer = CacheWriter(beside, encoder)
            try:
                task = bar.add_task(f"writing {name}", total=rows_in_all)
                truth = TrueEntropy() if log.probability else None

                def encoded(chunk: RowChunk) -> tuple[pl.DataFrame, RowPlace, EncodedRows]:
                    _require(chunk[0], log.schema, chunk[1].source)
                    return *chunk, encoder.encode(chunk[0], where=chunk[1])

                for frame, place, rows in map_ahead(encoded, log.chunks(columns), threads=reading_threads()):
                    membership = splitter(frame, rows.timestamps, place)
                    for number, split in enumerate(SPLITS):
                        chosen = np.flatnonzero(membership == number)
                        if not len(chosen):
                            continue
                        part = rows if len(chosen) == len(frame) else rows.take(chosen)
                        writer.append(split, part)
                        if truth is not None and log.probability and part.labels is not None:
                            truth.update(split, frame[log.probability].to_numpy()[chosen], part.labels[:, 0])
                    writer.add_blanks(rows.blanks)
                    bar.advance(task, len(frame))
                if log.fingerprint() != before:
                    raise DataError(
                        "the files changed while they were read", where=config.label, remedy="wait until they are whole"
                    )
                _check(config, writer)
                facts = {**log.facts, "name": name, "split": splitter.kind, "warnings": writer.warnings()}
                if truth is not None:
                    facts |= truth.facts()
                writer.finish(facts)
            except BaseException:
                writer.abandon()
                raise
    for warning in facts["warnings"]:
        warnings.warn(f"{name}: {warning}", stacklevel=3)


def _require(frame: pl.DataFrame, schema: Schema, source: str) -> None:
    missing = [column for column in schema.columns if column not in frame.columns]
    if missing:
        raise DataError(
            f"column '{missing[0]}' is missing; there are {frame.columns}",
            where=source,
            remedy="give the file this column; the recipe of a new run may name another one in data.schema, or none",
        )


def _check(config: DataConfig, writer: CacheWriter) -> None:
    shares: tuple[float, ...] = config.fractions
    if config.validation_path is not None or config.test_path is not None:
        shares = (1, config.validation_path is not None, config.test_path is not None)
    for split, fraction in zip(SPLITS, shares, strict=True):
        if fraction > 0 and writer.rows[split] == 0:
            raise DataError(
                f"the {split} split is empty ({sum(writer.rows.values())} rows in all)",
                where=config.label,
                remedy="give more rows or other fractions; rows of one time need data.split = 'random' or 'order'",
            )
    if writer.weighted is not None and writer.weighted == 0:
        raise DataError(
            f"all {writer.rows['train']} training weights of '{writer.encoder.schema.weight}' are 0",
            where=config.label,
            remedy="give rows weights above 0, or take the weight out of the schema",
        )
    counts = zip(writer.encoder.schema.labels, writer.positives["train"], writer.labelled["train"], strict=True)
    for task, positives, labelled in counts:
        if positives in (0, labelled):
            raise DataError(
                f"all {labelled} training labels of '{task}' are {int(positives > 0)}: one class only",
                where=config.label,
                remedy="check how the label is made, or how the rows are split; a model needs both classes",
            )
