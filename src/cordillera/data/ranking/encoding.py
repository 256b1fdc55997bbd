"""Encoding of a log's columns as the numbers that models read: vocabularies, hashes, dense transforms.

An ``Encoder`` is fitted on the training rows only, holds everything that it learnt as plain arrays, and is saved as
JSON and Parquet with checksums.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch

from cordillera.data.ahead import map_ahead, reading_threads
from cordillera.data.files import checksum, is_intact, write_bytes
from cordillera.data.ranking.features import (
    ANY_ID,
    CategoricalFeature,
    DenseFeature,
    FeatureSpec,
    RankingBatch,
    Schema,
    SparseFeature,
)
from cordillera.data.ranking.fitting import DenseFit, ValueCounts, counted, transformed
from cordillera.data.ranking.frames import parquet_bytes
from cordillera.data.ranking.logs.columns import (
    MISSING,
    WHOLE,
    RowPlace,
    column_of,
    dense_of,
    first_of,
    flatten,
    groups_of,
    hash_strings,
    ids_of,
    labels_of,
    refuse_large,
    teacher_of,
    timestamps_of,
    weights_of,
    with_numbers,
    without_point,
)
from cordillera.errors import DataError
from cordillera.files import read_sealed, sealed_json
from cordillera.jagged import JaggedBatch, offsets_of, ragged_positions

_REMEDY = "delete the folder and prepare the data again"
_FEW = 65_536  # most ids of a column that are looked up one by one in an index
_FORMAT = 2


@dataclass(frozen=True)
class EncodedRows:
    """Encoded rows in memory, one array per kind of column; a cache stores them and batches are made of them.

    Attributes:
        dense: Dense values, ``float32 [N, num_dense]``.
        ids: Table-local rows, ``int64 [N, single ids]``, in the order of the spec's features that are not lists.
        lists: Values ``int64 [T]`` and offsets ``int64 [N + 1]`` of each list feature.
        labels: ``uint8 [N, tasks]``, or None.
        weights: Sample weights, ``float32 [N]``, or None.
        groups: ``int64 [N]``, or None.
        timestamps: Seconds, ``int64 [N]``, or None.
        teacher: Logits of a teacher, ``float32 [N, tasks]``, NaN where it has none; or None.
        blanks: Number of blank values by column.
    """

    features: FeatureSpec
    dense: np.ndarray
    ids: np.ndarray
    lists: tuple[tuple[np.ndarray, np.ndarray], ...]
    labels: np.ndarray | None = None
    weights: np.ndarray | None = None
    groups: np.ndarray | None = None
    timestamps: np.ndarray | None = None
    teacher: np.ndarray | None = None
    blanks: dict[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.dense)

    def take(self, rows: np.ndarray) -> EncodedRows:
        """Return the rows at the given positions, in that order, without the counts of blanks."""
        lists = []
        for values, offsets in self.lists:
            lengths = np.diff(offsets)[rows]
            lists.append((values[ragged_positions(offsets[rows], lengths)], offsets_of(lengths)))

        def some(column: np.ndarray | None) -> np.ndarray | None:
            return None if column is None else column[rows]

        return EncodedRows(
            self.features,
            self.dense[rows],
            self.ids[rows],
            tuple(lists),
            some(self.labels),
            some(self.weights),
            some(self.groups),
            some(self.timestamps),
            some(self.teacher),
        )

    def take_blocks(self, rows: np.ndarray, block: int, least: int = 0) -> EncodedRows:
        """Return the rows at the given positions, and copies of the last one up to a multiple of ``block`` rows.

        There are at least ``least`` rows.
        """
        count = -(-max(len(rows), least) // block) * block
        return self.take(np.concatenate([rows, np.full(count - len(rows), rows[-1])]))

    def batch(self) -> RankingBatch:
        """Return all rows as one batch."""
        lists = [(values, np.diff(offsets)) for values, offsets in self.lists]
        columns = (self.labels, self.weights, self.groups, self.timestamps)
        return assemble(self.features, self.dense, self.ids, lists, *columns, teacher=self.teacher)


_one_hot_offsets: dict[int, torch.Tensor] = {}


def _offsets_of_ones(count: int) -> torch.Tensor:
    if count not in _one_hot_offsets:
        if len(_one_hot_offsets) > 16:
            _one_hot_offsets.clear()
        _one_hot_offsets[count] = torch.arange(count + 1)
    return _one_hot_offsets[count]


def assemble(
    features: FeatureSpec,
    dense: np.ndarray,
    ids: np.ndarray,
    lists: Sequence[tuple[np.ndarray, np.ndarray]],
    labels: np.ndarray | None = None,
    weights: np.ndarray | None = None,
    groups: np.ndarray | None = None,
    timestamps: np.ndarray | None = None,
    rows: np.ndarray | None = None,
    teacher: np.ndarray | None = None,
) -> RankingBatch:
    """Make a batch; everything is copied, so the arrays may be memory maps.

    Arrays are ``dense [B, num_dense]``, ``ids [B, single ids]``, ``labels`` and ``teacher [B, tasks]``, and
    ``weights``, ``groups``, ``timestamps`` (seconds) and ``rows`` (positions in the split), each ``[B]``. ``lists``
    holds values ``[T]`` and lengths ``[B]`` of each list feature of ``features``.
    """
    size, singles = ids.shape
    total = size * singles + sum(len(values) for values, _ in lists)
    values = np.empty(total, dtype=np.int64)
    # Ids are sample-major on disk, so that a shuffled batch touches few pages, and feature-major in the batch.
    values[: size * singles].reshape(singles, size)[...] = ids.T
    at = size * singles
    for entries, _ in lists:
        values[at : at + len(entries)] = entries
        at += len(entries)
    if lists:
        lengths = np.concatenate([np.ones(size * singles, dtype=np.int64), *(counts for _, counts in lists)])
        offsets = torch.from_numpy(offsets_of(lengths))
    else:
        offsets = _offsets_of_ones(size * singles)
    keys = tuple(feature.name for feature in features.sparse)

    def tensor(column: np.ndarray | None, kind: type) -> torch.Tensor | None:
        return None if column is None else torch.from_numpy(np.array(column, dtype=kind))

    targets = tensor(labels, np.float32)
    if targets is not None:
        targets.masked_fill_(targets == MISSING, torch.nan)
    return RankingBatch(
        dense=torch.from_numpy(np.array(dense, dtype=np.float32)),
        sparse=JaggedBatch(keys, torch.from_numpy(values), offsets, one_hot=not lists),
        labels=targets,
        weights=tensor(weights, np.float32),
        groups=tensor(groups, np.int64),
        timestamps=tensor(timestamps, np.int64),
        rows=tensor(rows, np.int64),
        teacher=tensor(teacher, np.float32),
    )


@dataclass(frozen=True)
class _SeenRows:
    """What an encoder learns from a chunk of training rows.

    Attributes:
        rows: Number of rows.
        numbers: Values of each dense feature and which of them are blank.
        counts: Tables and the counts of the values of one of their features.
    """

    rows: int
    numbers: dict[str, tuple[np.ndarray, np.ndarray]]
    counts: list[tuple[str, pl.DataFrame]]


def _placed(chunks: Iterable[pl.DataFrame | tuple[pl.DataFrame, RowPlace]]) -> Iterator[tuple[pl.DataFrame, RowPlace]]:
    row = 1
    for chunk in chunks:
        frame, place = chunk if isinstance(chunk, tuple) else (chunk, RowPlace("training rows", row))
        yield frame, place
        row += len(frame)


def _seen(schema: Schema, chunk: tuple[pl.DataFrame, RowPlace]) -> _SeenRows:
    frame, place = chunk
    frame = with_numbers(frame, schema, place)
    numbers = {one.name: dense_of(column_of(frame, one.name, place), one, place) for one in schema.numbers}
    counts = []
    for single in schema.categorical:
        if single.encoding == "vocabulary":
            values = ids_of(column_of(frame, single.name, place), single.name, place)
            counts.append((single.table or single.name, counted(values)))
    singles = {one.table or one.name for one in schema.categorical}
    for entries in schema.lists:
        name = entries.table or entries.name
        if entries.encoding == "vocabulary" and name not in singles:
            flat, _ = flatten(column_of(frame, entries.name, place), entries, place)
            counts.append((name, counted(flat)))
    return _SeenRows(len(frame), numbers, counts)


class Encoder:
    """Converts rows of a log to numbers, with vocabularies and transforms fitted on the training rows.

    Attributes:
        schema: Roles of the columns.
        features: Names and table sizes, as models need them.
        vocabularies: Values of each table that has a vocabulary; the value at position ``i`` has row ``i + 1``.
        dense_state: Fitted numbers of each dense feature's transform, and ``fill``, the value that replaces a blank.
        rows: Number of training rows that the encoder was fitted on.
        whole: Names of the tables whose ids were whole numbers in all training rows, and of all tables without a
            vocabulary; text such as ``42.0`` is the id ``42`` there.
    """

    def __init__(
        self,
        schema: Schema,
        vocabularies: dict[str, pl.Series],
        dense_state: dict[str, dict[str, Any]],
        rows: int,
        whole: Iterable[str],
    ) -> None:
        self.schema, self.vocabularies, self.dense_state, self.rows = schema, vocabularies, dense_state, rows
        self.whole = frozenset(whole)
        tables: dict[str, int] = {}
        for feature in (*schema.categorical, *schema.lists):
            name = feature.table or feature.name
            if feature.encoding == "vocabulary":
                tables[name] = len(vocabularies[name]) + 1
            else:
                tables[name] = feature.num_embeddings or ANY_ID
        sparse = [SparseFeature(f.name, f.table or f.name) for f in schema.categorical]
        sparse += [SparseFeature(f.name, f.table or f.name, f.pooling, is_list=True) for f in schema.lists]
        self.features = FeatureSpec(tuple(f.name for f in schema.numbers), tuple(sparse), tables, schema.labels)
        self._numbers = schema.numbers
        self._lookup = {
            name: pl.DataFrame({"value": values, "row": np.arange(1, len(values) + 1, dtype=np.int64)})
            for name, values in vocabularies.items()
        }
        self._index: dict[str, dict[str | None, int]] = {}
        self._quantiles = {
            name: np.asarray(state["quantiles"]) for name, state in dense_state.items() if "quantiles" in state
        }

    @staticmethod
    def needs_fit(schema: Schema) -> bool:
        """Return whether a schema needs numbers from rows: a vocabulary, a scale, or the mean that fills blanks."""
        return any(f.encoding == "vocabulary" for f in (*schema.categorical, *schema.lists)) or any(
            f.transform != "none" or f.missing == "mean" for f in schema.numbers
        )

    @classmethod
    def fit(
        cls,
        schema: Schema,
        chunks: Iterable[pl.DataFrame | tuple[pl.DataFrame, RowPlace]],
        known: Encoder | None = None,
    ) -> Encoder:
        """Learn vocabularies and scales of a ``schema`` from training rows in one pass and bounded memory.

        Args:
            chunks: Training rows, as frames or as frames with their places (for errors).
            known: Encoder of earlier rows with the same features. Its scales are kept, and so are the rows of its ids;
                new ids get the rows after them.

        Raises:
            DataError: a missing column, a wrong type, an infinite value; with file, row and column. Or ``known`` is of
                other features.
        """
        if known is not None:
            known.check_features(schema)
        dense = {feature.name: DenseFit(feature) for feature in schema.numbers}
        counts: dict[str, ValueCounts] = {}
        rows = 0
        for seen in map_ahead(partial(_seen, schema), _placed(chunks), threads=reading_threads()):
            for name, numbers in seen.numbers.items():
                dense[name].update(*numbers)
            for name, values in seen.counts:
                counts.setdefault(name, ValueCounts()).add(values)
            rows += seen.rows
        vocabularies, whole = {}, set()
        for feature in (*schema.categorical, *schema.lists):
            name = feature.table or feature.name
            if feature.encoding != "vocabulary":
                whole.add(name)
            elif name not in vocabularies:
                before = pl.Series("value", [], dtype=pl.String) if known is None else known.vocabularies[name]
                may_be_whole = known is None or name in known.whole or not len(before)
                limits = feature.min_count, feature.num_embeddings
                found = counts.get(name, ValueCounts()).vocabulary(*limits, before, may_be_whole)
                vocabularies[name] = found[0]
                whole |= {name} if found[1] else set()
        if known is not None:
            return cls(schema, vocabularies, known.dense_state, known.rows + rows, whole)
        return cls(schema, vocabularies, {name: fit.result() for name, fit in dense.items()}, rows, whole)

    def check_features(self, schema: Schema) -> None:
        """Refuse a ``schema`` whose features differ from the encoder's.

        Raises:
            DataError: a feature is missing, new, or has other settings; it is named.
        """
        own, other = (
            {one.name: one for one in (*of.dense, *of.categorical, *of.lists)} for of in (self.schema, schema)
        )
        differs = [name for name in {**own, **other} if own.get(name) != other.get(name)]
        if differs:
            what = "is no feature" if differs[0] not in own else "is missing" if differs[0] not in other else "differs"
            raise DataError(
                f"feature '{differs[0]}' {what} beside the run that data.encoder or training.start names",
                where="data.schema",
                remedy="take the features of that run's recipe, or train from the beginning",
            )

    def encode(
        self,
        frame: pl.DataFrame,
        *,
        where: str | RowPlace = "rows",
        labels: bool = True,
    ) -> EncodedRows:
        """Encode the rows of a frame.

        Args:
            frame: Columns by the schema's names. Text and numbers are both accepted for numbers and ids.
            where: Name of the file or data set, or the place of the rows, for errors.
            labels: Whether to read labels, weights and timestamps. If False, as for predictions, groups are read only
                if the frame holds them.

        Raises:
            DataError: a column is missing or of a wrong type, a label is neither 0 nor 1, a dense value is infinite, or
                an id or a weight is out of range; file, row and column are named.
        """
        place = RowPlace(where) if isinstance(where, str) else where
        schema, blanks = self.schema, {}
        frame, numbers = with_numbers(frame, schema, place), self._numbers
        dense = np.empty((len(frame), len(numbers)), dtype=np.float32)
        for index, number in enumerate(numbers):
            values, blank = dense_of(column_of(frame, number.name, place), number, place)
            blanks[number.name] = int(blank.sum())
            dense[:, index] = self._dense_values(number, values, blank, place)
        ids = np.empty((len(frame), len(schema.categorical)), dtype=np.int64)
        for index, single in enumerate(schema.categorical):
            series = column_of(frame, single.name, place)
            ids[:, index], blanks[single.name] = self._rows(series, single, place)
        lists = []
        for feature in schema.lists:
            flat, lengths = flatten(
                column_of(frame, feature.name, place), feature, place, (feature.table or feature.name) in self.whole
            )
            blanks[feature.name] = int((lengths == 0).sum())
            entry_rows = np.repeat(np.arange(len(frame)), lengths)
            lists.append((self._rows(flat, feature, place, entry_rows)[0], offsets_of(lengths)))
        targets = weights = groups = timestamps = teacher = None
        if labels:
            targets = np.empty((len(frame), len(schema.labels)), dtype=np.uint8)
            for index, label in enumerate(schema.labels):
                targets[:, index] = labels_of(
                    column_of(frame, label, place), label, place, may_miss=schema.missing_labels
                )
            if schema.weight is not None:
                weights = weights_of(column_of(frame, schema.weight, place), schema.weight, place)
        if schema.group is not None and (labels or schema.group in frame.columns):
            groups = groups_of(column_of(frame, schema.group, place), schema.group, place)
        if labels and schema.timestamp is not None:
            times = column_of(frame, schema.timestamp, place)
            timestamps = timestamps_of(times, schema.timestamp, place, schema.timestamp_unit)
        if labels and schema.teacher is not None:
            teacher = teacher_of(frame, schema.teacher, schema.labels, timestamps, place)
        return EncodedRows(
            self.features, dense, ids, tuple(lists), targets, weights, groups, timestamps, teacher, blanks
        )

    def index(self) -> Encoder:
        """Index the vocabularies, so that encoding a few rows does not read them whole, and return the encoder.

        The index takes about a hundred bytes for each value.
        """
        for name, values in self.vocabularies.items():
            self._index[name] = {value: row for row, value in enumerate(values.to_list(), 1)}
        return self

    def gives_same_rows(self, other: Encoder) -> bool:
        """Return whether another encoder has the same tables, vocabularies and transforms, so that weights fit both."""
        return (
            self.features.tables == other.features.tables
            and self.vocabularies.keys() == other.vocabularies.keys()
            and self.dense_state.keys() == other.dense_state.keys()
            and all(values.equals(other.vocabularies[name]) for name, values in self.vocabularies.items())
            and all(
                state.keys() == other.dense_state[name].keys()
                and all(np.allclose(value, other.dense_state[name][key], 1e-9, 0) for key, value in state.items())
                for name, state in self.dense_state.items()
            )
        )

    def unseen(self, rows: EncodedRows) -> dict[str, tuple[int, int]]:
        """Count ids that share row 0, and all ids, by feature with a vocabulary; blank list entries do not count."""
        found = {}
        singles = [feature for feature in self.features.sparse if not feature.is_list]
        for index, single in enumerate(singles):
            if single.table in self.vocabularies:
                found[single.name] = (int((rows.ids[:, index] == 0).sum()), len(rows))
        lists = [feature for feature in self.features.sparse if feature.is_list]
        for feature, (values, _) in zip(lists, rows.lists, strict=True):
            if feature.table in self.vocabularies:
                found[feature.name] = (int((values == 0).sum()), len(values))
        return found

    def _dense_values(
        self, feature: DenseFeature, values: np.ndarray, blank: np.ndarray, place: RowPlace
    ) -> np.ndarray:
        state = self.dense_state[feature.name]
        if feature.transform == "quantile":
            quantiles = self._quantiles[feature.name]
            left = np.searchsorted(quantiles, values, side="left")
            right = np.searchsorted(quantiles, values, side="right")
            result = (left + right) / (2.0 * len(quantiles))
        else:
            result = transformed(values, feature.transform)
            if feature.transform != "none":
                result = (result - state["mean"]) / state["scale"]
        result = np.where(blank, state["fill"], result)
        refuse_large(result, values, feature.name, place)
        return result

    def _rows(
        self, series: pl.Series, feature: CategoricalFeature, place: RowPlace, entry_rows: np.ndarray | None = None
    ) -> tuple[np.ndarray, int]:
        """Table rows ``int64 [N]`` of one column's values, and the number of blank values."""
        table = feature.table or feature.name
        if feature.encoding == "identity":
            return self._identity(series, feature, place, entry_rows), 0
        text = ids_of(series, feature.name, place, entry_rows, whole=table in self.whole)
        if feature.encoding == "vocabulary" and table in self._index and len(text) <= _FEW:
            row_of = self._index[table]
            return np.array([row_of.get(value, 0) for value in text], dtype=np.int64), text.null_count()
        if feature.encoding == "vocabulary":
            joined = text.to_frame("value").join(self._lookup[table], on="value", how="left", maintain_order="left")
            return joined["row"].fill_null(0).to_numpy(), text.null_count()
        size = self.features.tables[table]
        present = text.is_not_null().to_numpy()
        rows = np.zeros(len(text), dtype=np.int64)
        if size > 1:
            hashed = hash_strings(text.drop_nulls(), table) % np.uint64(size - 1)
            rows[present] = hashed.astype(np.int64) + 1
        return rows, text.null_count()

    def _identity(
        self, series: pl.Series, feature: CategoricalFeature, place: RowPlace, entry_rows: np.ndarray | None
    ) -> np.ndarray:
        def at(entry: int) -> str:
            return place.at(entry if entry_rows is None else entry_rows[entry], feature.name)

        size = self.features.tables[feature.table or feature.name]
        larger = "" if size == ANY_ID else "raise num_embeddings or "
        remedy = f'ids must be whole numbers from 0 to {size - 1}; {larger}use encoding = "vocabulary"'
        if not series.dtype.is_integer():
            text = without_point(ids_of(series, feature.name, place, entry_rows).str.strip_chars())
            series = text.cast(pl.Int64, strict=False)
            wrong = (series.is_null() & text.is_not_null()).to_numpy()
            if wrong.any():
                row = first_of(wrong)
                raise DataError(f"{text[row]!r} is not a whole number", where=at(row), remedy=remedy)
        blank = series.is_null().to_numpy()
        if blank.any():
            raise DataError("an id is blank", where=at(first_of(blank)), remedy=remedy)
        values = series.to_numpy()
        outside = (values < 0) | (values >= size)
        if outside.any():
            row = first_of(outside)
            raise DataError(f"id {values[row]} is outside the table of {size} rows", where=at(row), remedy=remedy)
        return values.astype(np.int64)

    def names(self, feature: str) -> list[str]:
        """Return the id of each row of a feature's table; row 0 of a vocabulary is ``<other>``.

        Raises:
            DataError: the feature has no embedding table.
        """
        table = next((f.table for f in self.features.sparse if f.name == feature), None)
        if table is None:
            names = [f.name for f in self.features.sparse]
            raise DataError(f"'{feature}' is not an embedded feature", remedy=f"choose one of {', '.join(names)}")
        if table in self.vocabularies:
            return ["<other>", *self.vocabularies[table].to_list()]
        return [str(row) for row in range(self.features.tables[table])]

    def save(self, folder: Path) -> None:
        """Write ``encoder.json`` and ``vocabularies.parquet`` into a folder that exists.

        Raises:
            DataError: the folder cannot be written.
        """
        path = folder / "vocabularies.parquet"
        tables = [name for name, values in self.vocabularies.items() for _ in range(len(values))]
        values = pl.concat([pl.Series("value", [], dtype=pl.String), *self.vocabularies.values()])
        write_bytes(path, parquet_bytes(pl.DataFrame({"table": pl.Series(tables, dtype=pl.String), "value": values})))
        content = {
            "format": _FORMAT,
            "schema": self.schema.model_dump(mode="json"),
            "rows": self.rows,
            "dense": self.dense_state,
            "tables": list(self.vocabularies),
            "whole": sorted(self.whole),
            "vocabularies_sha256": checksum(path),
        }
        write_bytes(folder / "encoder.json", sealed_json(content).encode())

    @classmethod
    def load(cls, folder: Path) -> Encoder:
        """Read and verify an encoder written by :meth:`save`.

        Raises:
            DataError: a file is missing, of another version, or does not match its checksum.
        """
        content = read_sealed(folder / "encoder.json", required=True, remedy=_REMEDY)
        path = folder / "vocabularies.parquet"
        if content.get("format") not in (1, _FORMAT):
            raise DataError(f"encoder format {content.get('format')}, this version reads {_FORMAT}", where=str(folder))
        if not is_intact(path, content["vocabularies_sha256"]):
            raise DataError(
                "the vocabularies are missing or damaged: checksum does not fit",
                where=str(path),
                remedy=_REMEDY,
            )
        frame = pl.read_parquet(path, glob=False)
        vocabularies = {name: frame.filter(pl.col("table") == name)["value"] for name in content["tables"]}
        # Format 1 did not say which tables hold whole numbers.
        whole = (
            content["whole"]
            if "whole" in content
            else [name for name, values in vocabularies.items() if len(values) and values.str.contains(WHOLE).all()]
        )
        return cls(Schema.model_validate(content["schema"]), vocabularies, content["dense"], content["rows"], whole)
