"""Prepared data on disk: one memory-mapped file per kind of column and split.

A prepared data set is one folder: ``meta.json`` (rows, sizes, checksums, facts), the encoder, and for each split
``SPLIT-dense.bin``, ``SPLIT-ids.bin`` (both sample-major), ``SPLIT-list0.bin`` with ``SPLIT-list0-offsets.bin``, and so
on. The folder is written beside its final place and renamed, so it is either complete or absent.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from cordillera.data.files import checksum, disk_errors, is_intact, write_bytes
from cordillera.data.ranking.encoding import EncodedRows, Encoder, assemble
from cordillera.data.ranking.features import FeatureSpec, RankingBatch
from cordillera.data.ranking.logs.columns import MISSING
from cordillera.errors import DataError
from cordillera.files import read_sealed, sealed_json
from cordillera.jagged import offsets_of, ragged_positions

FORMAT = 2
SPLITS = ("train", "validation", "test")
_REMEDY = "delete the folder and prepare the data again"


def _write(file: BinaryIO, array: np.ndarray) -> None:
    file.write(np.ascontiguousarray(array).data)


@dataclass(frozen=True)
class _StoredColumn:
    """File of a split: suffix of its name, dtype, and number of values in a row (None for the entries of a list)."""

    suffix: str
    dtype: str
    width: int | None = 1


def _columns(features: FeatureSpec, present: dict[str, bool]) -> list[_StoredColumn]:
    wide = "int64" if max(features.tables.values(), default=0) > 2**31 - 1 else "int32"
    lists = [feature for feature in features.sparse if feature.is_list]
    columns = [_StoredColumn("dense", "float32", len(features.dense))]
    columns.append(_StoredColumn("ids", wide, len(features.sparse) - len(lists)))
    columns.append(_StoredColumn("labels", "uint8", len(features.tasks)))
    for index in range(len(lists)):
        columns += [_StoredColumn(f"list{index}", wide, None), _StoredColumn(f"list{index}-offsets", "int64")]
    kinds = {"weights": "float32", "groups": "int64", "timestamps": "int64"}
    if present["teacher"]:
        columns.append(_StoredColumn("teacher", "float32", len(features.tasks)))
    return columns + [_StoredColumn(name, kind) for name, kind in kinds.items() if present[name]]


class CacheWriter:
    """Writes the splits of one data set into a folder, chunk by chunk, and counts what reports and checks need."""

    def __init__(self, folder: Path, encoder: Encoder) -> None:
        schema = encoder.schema
        self.folder, self.encoder = folder, encoder
        present = {
            "weights": schema.weight is not None,
            "groups": schema.group is not None,
            "timestamps": schema.timestamp is not None,
            "teacher": schema.teacher is not None,
        }
        self.columns = _columns(encoder.features, present)
        self.files: dict[str, BinaryIO] = {}
        self.rows = dict.fromkeys(SPLITS, 0)
        self.entries: dict[str, int] = {}
        self.positives = {split: [0] * len(schema.labels) for split in SPLITS}
        self.labelled = {split: [0] * len(schema.labels) for split in SPLITS}
        self.times: dict[str, list[int]] = {}
        self.ordered = dict.fromkeys(SPLITS, True)
        self.blanks: dict[str, int] = {}
        self.unseen: dict[str, dict[str, int]] = {split: {} for split in SPLITS}
        self.weighted: float | None = None if schema.weight is None else 0.0
        self._low: dict[str, float] = {}
        self._high: dict[str, float] = {}

    def _file(self, name: str) -> BinaryIO:
        if name not in self.files:
            self.files[name] = open(self.folder / f"{name}.bin", "wb", buffering=1 << 20)  # noqa: SIM115 (closed in close)
        return self.files[name]

    def append(self, split: str, rows: EncodedRows) -> None:
        """Add ``rows``, encoded with the writer's encoder, to a ``split``: ``train``, ``validation`` or ``test``.

        Raises:
            DataError: the disk is full or cannot be written.
        """
        arrays: dict[str, np.ndarray | None] = {
            "dense": rows.dense,
            "ids": rows.ids,
            "labels": rows.labels,
            "weights": rows.weights,
            "groups": rows.groups,
            "timestamps": rows.timestamps,
            "teacher": rows.teacher,
        }
        first = self.rows[split] == 0
        for index, (values, offsets) in enumerate(rows.lists):
            key = f"{split}-list{index}"
            arrays[f"list{index}"] = values
            shifted = offsets + self.entries.get(key, 0)
            arrays[f"list{index}-offsets"] = shifted if first else shifted[1:]
            self.entries[key] = int(shifted[-1])
        with disk_errors(self.folder):
            for column in self.columns:
                array = arrays[column.suffix]
                if array is not None:
                    _write(self._file(f"{split}-{column.suffix}"), array.astype(column.dtype, copy=False))
        self._count(split, rows)

    def _count(self, split: str, rows: EncodedRows) -> None:
        self.rows[split] += len(rows)
        if rows.labels is not None:
            for counts, found in ((self.positives, rows.labels == 1), (self.labelled, rows.labels != MISSING)):
                counts[split] = [old + int(new) for old, new in zip(counts[split], found.sum(axis=0), strict=True)]
        if rows.timestamps is not None and len(rows):
            low, high = int(rows.timestamps.min()), int(rows.timestamps.max())
            known = self.times.get(split)
            self.ordered[split] &= bool((np.diff(rows.timestamps) >= 0).all())
            self.ordered[split] &= known is None or int(rows.timestamps[0]) >= known[1]
            self.times[split] = [min(known[0], low), max(known[1], high)] if known else [low, high]
        singles = [feature for feature in rows.features.sparse if not feature.is_list]
        for name, (count, _) in self.encoder.unseen(rows).items():
            self.unseen[split][name] = self.unseen[split].get(name, 0) + count
        if split == "train" and rows.weights is not None and self.weighted is not None:
            self.weighted += float(rows.weights.sum(dtype=np.float64))
        if split == "train" and len(rows):
            for array, names in ((rows.dense, rows.features.dense), (rows.ids, [f.name for f in singles])):
                for name, low, high in zip(names, array.min(axis=0), array.max(axis=0), strict=True):
                    self._low[name] = min(self._low.get(name, float(low)), float(low))
                    self._high[name] = max(self._high.get(name, float(high)), float(high))

    def add_blanks(self, blanks: dict[str, int]) -> None:
        """Add numbers of blank values, by column."""
        for name, count in blanks.items():
            self.blanks[name] = self.blanks.get(name, 0) + count

    def warnings(self) -> list[str]:
        """Return a sentence for each feature that has one value in all training rows or is an empty list in all."""
        constant = [name for name in self._low if self._low[name] == self._high[name]]
        lists = [feature.name for feature in self.encoder.features.sparse if feature.is_list]
        empty = [name for index, name in enumerate(lists) if self.entries.get(f"train-list{index}", 0) == 0]
        tells = "in all training rows and tells nothing; take it out of the schema"
        return [f"feature '{name}' has one value {tells}" for name in constant] + [
            f"list feature '{name}' is empty {tells}" for name in empty
        ]

    def close(self) -> None:
        """Close the files; errors of the disk are raised as ``DataError``."""
        for file in self.files.values():
            with disk_errors(self.folder):
                file.close()

    def abandon(self) -> None:
        """Close the files of a folder that is to be deleted, ignoring errors."""
        for file in self.files.values():
            try:
                file.close()
            except OSError:
                continue

    def finish(self, facts: dict[str, Any]) -> None:
        """Bring every split into time order, and write ``meta.json`` with sizes, checksums and ``facts`` fit for JSON.

        Raises:
            DataError: the disk is full or cannot be written.
        """
        with disk_errors(self.folder):
            for split in SPLITS:
                for column in self.columns:
                    file = self._file(f"{split}-{column.suffix}")
                    if column.suffix.endswith("-offsets") and self.rows[split] == 0:
                        _write(file, np.zeros(1, dtype=np.int64))
        self.close()
        for split in SPLITS:
            if not self.ordered[split]:
                self._sort(split)
        self.encoder.save(self.folder)
        with disk_errors(self.folder):
            files = {
                f"{split}-{column.suffix}.bin": {
                    "bytes": os.path.getsize(self.folder / f"{split}-{column.suffix}.bin"),
                    "sha256": checksum(self.folder / f"{split}-{column.suffix}.bin"),
                }
                for split in SPLITS
                for column in self.columns
            }
        meta = {
            "format": FORMAT,
            "rows": self.rows,
            "columns": [[column.suffix, column.dtype, column.width] for column in self.columns],
            "files": files,
            "positives": self.positives,
            "labelled": self.labelled,
            "times": self.times,
            "blanks": self.blanks,
            "unseen": self.unseen,
            "entries": self._list_entries(),
            "facts": facts,
        }
        write_bytes(self.folder / "meta.json", sealed_json(meta).encode())

    def _list_entries(self) -> dict[str, dict[str, int]]:
        lists = [feature.name for feature in self.encoder.features.sparse if feature.is_list]
        return {
            split: {name: self.entries.get(f"{split}-list{index}", 0) for index, name in enumerate(lists)}
            for split in SPLITS
        }

    def _sort(self, split: str) -> None:
        """Order a split's rows by time, stably, with one column in memory at a time."""
        order = np.argsort(np.fromfile(self.folder / f"{split}-timestamps.bin", dtype=np.int64), kind="stable")
        for column in self.columns:
            path = self.folder / f"{split}-{column.suffix}.bin"
            if column.suffix.endswith("-offsets"):
                continue
            array: np.ndarray = np.fromfile(path, dtype=column.dtype)
            if column.width is None:
                beside = self.folder / f"{split}-{column.suffix}-offsets.bin"
                offsets = np.fromfile(beside, dtype=np.int64)
                lengths = np.diff(offsets)[order]
                array = array[ragged_positions(offsets[:-1][order], lengths)]
                self._replace(beside, offsets_of(lengths))
            elif column.width:
                array = array.reshape(-1, column.width)[order]
            self._replace(path, array)

    def _replace(self, path: Path, array: np.ndarray) -> None:
        with disk_errors(path), open(path, "wb") as file:
            _write(file, array)


class ClickDataset:
    """One split of a prepared data set, memory-mapped; :func:`~cordillera.data.ranking.datasets.prepare` opens it.

    Attributes:
        features: Names and sizes of the features; ``features.tasks`` may be a selection of the tasks on disk.
        split: ``train``, ``validation`` or ``test``.
    """

    def __init__(
        self,
        folder: Path,
        split: str,
        encoder: Encoder,
        meta: dict[str, Any],
        tasks: tuple[str, ...] | None = None,
    ) -> None:
        spec = encoder.features
        chosen = spec.tasks if tasks is None else tasks
        self.split, self._encoder = split, encoder
        self.features = FeatureSpec(spec.dense, spec.sparse, spec.tables, chosen)
        self._tasks = None if chosen == spec.tasks else [spec.tasks.index(task) for task in chosen]
        self._rows = int(meta["rows"][split])
        arrays: dict[str, np.ndarray] = {}
        for suffix, dtype, width in meta["columns"]:
            path = folder / f"{split}-{suffix}.bin"
            flat = np.memmap(path, dtype=dtype, mode="r") if path.stat().st_size else np.empty(0, dtype=dtype)
            arrays[suffix] = flat.view(np.ndarray)
            if suffix in ("dense", "ids", "labels", "teacher"):
                arrays[suffix] = arrays[suffix].reshape(self._rows, width)
        self._dense, self._ids, self._labels = arrays["dense"], arrays["ids"], arrays["labels"]
        self._weights, self._groups = arrays.get("weights"), arrays.get("groups")
        self._timestamps, self._teacher = arrays.get("timestamps"), arrays.get("teacher")
        count = sum(feature.is_list for feature in spec.sparse)
        self._lists = [(arrays[f"list{index}"], arrays[f"list{index}-offsets"]) for index in range(count)]

    def __len__(self) -> int:
        return self._rows

    @property
    def labels(self) -> np.ndarray:
        """Labels, ``uint8 [N, tasks]``."""
        return self._of_tasks(self._labels)

    @property
    def teacher(self) -> np.ndarray | None:
        """Logits of a teacher, ``float32 [N, tasks]``, NaN where it has none; None without a teacher."""
        return None if self._teacher is None else self._of_tasks(self._teacher)

    def _of_tasks(self, column: np.ndarray) -> np.ndarray:
        return column if self._tasks is None else column[:, self._tasks]

    @property
    def timestamps(self) -> np.ndarray | None:
        """Timestamps in seconds, ``int64 [N]``, or None."""
        return self._timestamps

    def batch(self, rows: slice | np.ndarray) -> RankingBatch:
        """Read ``rows``, a slice or positions ``int64 [B]``, in their order; the batch shares no memory with the file.

        Raises:
            DataError: a position lies outside of the split.
        """
        if isinstance(rows, slice):
            first, last, step = rows.indices(self._rows)
            if step != 1:
                return self.batch(np.arange(first, last, step))
            last = max(first, last)
            rows = slice(first, last)
            positions = np.arange(first, last, dtype=np.int64)
            lists = []
            for values, offsets in self._lists:
                bounds = offsets[first : last + 1]
                lists.append((values[bounds[0] : bounds[-1]], np.diff(bounds)))
        else:
            positions = np.asarray(rows, dtype=np.int64)
            if len(positions) and (positions.min() < 0 or positions.max() >= self._rows):
                raise DataError(f"rows must lie in [0, {self._rows})", where=f"the {self.split} split")
            rows = positions
            lists = []
            for values, offsets in self._lists:
                starts = offsets.take(positions, mode="clip")
                lengths = offsets.take(positions + 1, mode="clip") - starts
                lists.append((values.take(ragged_positions(starts, lengths), mode="clip"), lengths))

        def read(column: np.ndarray) -> np.ndarray:
            # The positions are known to be inside; "clip" avoids a second check.
            return column[rows] if isinstance(rows, slice) else column.take(rows, axis=0, mode="clip")

        return assemble(
            self.features,
            read(self._dense),
            read(self._ids),
            lists,
            self._of_tasks(read(self._labels)),
            None if self._weights is None else read(self._weights),
            None if self._groups is None else read(self._groups),
            None if self._timestamps is None else read(self._timestamps),
            positions,
            None if self._teacher is None else self._of_tasks(read(self._teacher)),
        )

    def segments(self, name: str) -> tuple[np.ndarray, list[str]]:
        """Return the values of a categorical feature (not a list) in every row.

        These are ``int64 [N]`` positions in a list of names, and that list; position 0 of a vocabulary is ``<other>``.

        Raises:
            DataError: there is no such feature.
        """
        singles = [feature.name for feature in self.features.sparse if not feature.is_list]
        if name not in singles:
            raise DataError(f"'{name}' is not a categorical feature", remedy=f"choose one of {', '.join(singles)}")
        return self._ids[:, singles.index(name)].astype(np.int64), self._encoder.names(name)


class TrueEntropy:
    """Normalised entropy of the true probabilities of a synthetic log, by split."""

    def __init__(self) -> None:
        self.sums = {split: np.zeros(4) for split in SPLITS}

    def update(self, split: str, probability: np.ndarray, labels: np.ndarray) -> None:
        """Add rows of a ``split``: the true ``probability`` and the ``labels`` of each, ``[N]``."""
        p = np.clip(probability.astype(np.float64), 1e-15, 1 - 1e-15)
        loss = -np.where(labels == 1, np.log(p), np.log1p(-p)).sum()
        expected = -(p * np.log(p) + (1 - p) * np.log1p(-p)).sum()
        self.sums[split] += [len(labels), float(labels.sum()), loss, expected]

    def facts(self) -> dict[str, Any]:
        """Return the entropies, for the facts of the prepared data."""

        def entropy(split: str, which: int) -> float | None:
            rows, positives, *losses = self.sums[split]
            rate = positives / rows if rows else 0.0
            if not 0 < rate < 1:
                return None
            return float(losses[which] / rows / -(rate * np.log(rate) + (1 - rate) * np.log1p(-rate)))

        return {
            "bayes_ne": entropy("test", 0),
            "bayes_ne_expected": entropy("test", 1),
            "bayes_ne_by_split": {split: entropy(split, 0) for split in SPLITS},
        }


@dataclass(frozen=True)
class Splits:
    """A prepared data set.

    Attributes:
        train: Rows that models learn from; the encoder was fitted on these alone.
        validation: Rows for early stopping and the choice of settings.
        test: Rows for the reported figures.
        encoder: Encoder that turns further rows of the same kind into batches.
        folder: Folder that holds the prepared data.
        facts: Facts of the data set: ``name``, ``source``, ``terms``, ``warnings``, ``positives`` (rate by split and
            task), ``blanks`` (rate by column), ``unseen`` (rate of row 0 by split and feature; for lists, the rate
            among their entries), ``times`` (first and last by split); for synthetic data also ``bayes_ne``,
            the normalised entropy of the true probabilities on the test split.
    """

    train: ClickDataset
    validation: ClickDataset
    test: ClickDataset
    encoder: Encoder
    folder: Path
    facts: dict[str, Any]

    @property
    def features(self) -> FeatureSpec:
        """Names and sizes of the features, as models need them."""
        return self.train.features

    @property
    def segments(self) -> tuple[str, ...]:
        """Categorical features by which reports break metrics down."""
        return self.encoder.schema.segments


def hold_same_rows(one: Path, other: Path) -> bool:
    """Return whether the folders ``one`` and ``other`` hold the same prepared rows, by the checksums of their files."""
    try:
        files, others = (read_sealed(folder / "meta.json", required=True)["files"] for folder in (one, other))
    except (DataError, KeyError):
        return False
    return bool(files == others)


def open_splits(folder: Path, tasks: tuple[str, ...] | None = None, *, verify: bool = True) -> Splits:
    """Open the data set prepared in a ``folder``.

    Args:
        tasks: Labels to keep, in this order. Default: all.
        verify: Whether to compare every file with its checksum, which reads 1 to 2 GB a second. Sizes and the checksums
            of ``meta.json`` and of the encoder are always compared.

    Raises:
        DataError: a file is missing, has the wrong size or does not match its checksum, or a task is unknown.
    """
    meta = read_sealed(folder / "meta.json", required=True, remedy=_REMEDY)
    if meta.get("format") != FORMAT:
        found = f"cache format {meta.get('format')}, this version reads {FORMAT}"
        raise DataError(found, where=str(folder), remedy=_REMEDY)
    for name, entry in meta["files"].items():
        path = folder / name
        size = path.stat().st_size if path.exists() else None
        if size != entry["bytes"]:
            found = "is missing" if size is None else f"has {size} bytes"
            raise DataError(f"the file {found}, {entry['bytes']} were written", where=str(path), remedy=_REMEDY)
        if verify and not is_intact(path, entry["sha256"]):
            raise DataError("the file is damaged: checksum does not fit", where=str(path), remedy=_REMEDY)
    encoder = Encoder.load(folder)
    known = encoder.features.tasks
    if tasks is not None:
        unknown = [task for task in tasks if task not in known]
        if unknown or not tasks or len(set(tasks)) != len(tasks):
            raise DataError(f"tasks must be a choice of {list(known)}, got {list(tasks)}", where="data.tasks")

    def rate(count: int, rows: int) -> float | None:
        return count / rows if rows else None

    rows = meta["rows"]
    labelled = meta.get("labelled") or {split: [rows[split]] * len(known) for split in SPLITS}
    facts = {
        **meta["facts"],
        "rows": rows,
        "positives": {
            split: {
                task: rate(count, total)
                for task, count, total in zip(known, meta["positives"][split], labelled[split], strict=True)
            }
            for split in SPLITS
        },
        "blanks": {name: rate(count, sum(rows.values())) for name, count in meta["blanks"].items()},
        "unseen": {
            split: {
                name: rate(count, meta["entries"][split].get(name, rows[split]))
                for name, count in meta["unseen"][split].items()
            }
            for split in SPLITS
        },
        "times": meta["times"],
    }
    make: Callable[[str], ClickDataset] = lambda split: ClickDataset(folder, split, encoder, meta, tasks)  # noqa: E731
    return Splits(make("train"), make("validation"), make("test"), encoder, folder, facts)
