"""Encoders against plain Python, and every fault of a value."""

from __future__ import annotations

import json
import math
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cordillera.data.ranking.encoding import Encoder
from cordillera.data.ranking.features import CategoricalFeature, DenseFeature, ListFeature, Schema
from cordillera.data.ranking.logs.columns import RowPlace, hash_strings
from cordillera.errors import DataError

_MASK = (1 << 64) - 1


def _hash(text: str, salt: str) -> int:
    """FNV-1a and SplitMix64, one byte at a time."""
    state = 0xCBF29CE484222325
    for byte in (salt + text).encode():
        state = ((state ^ byte) * 0x100000001B3) & _MASK
    z = (state + 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


@settings(max_examples=50)
@given(
    st.lists(st.text(max_size=12).filter(lambda text: "\x00" not in text), min_size=1, max_size=20), st.text(max_size=4)
)
def test_hashes_equal_their_definition_whatever_else_is_in_the_column(texts: list[str], salt: str) -> None:
    expected = [_hash(text, salt) for text in texts]
    assert hash_strings(pl.Series(texts, dtype=pl.String), salt).tolist() == expected


def test_hashes_never_change() -> None:
    assert hash_strings(pl.Series(["", "a", "1234567890", "héllo"]), "shop").tolist() == [
        _hash(text, "shop") for text in ("", "a", "1234567890", "héllo")
    ]


def test_vocabulary_rows_follow_falling_counts_and_rare_values_share_row_zero(
    frame: pl.DataFrame, schema: Schema
) -> None:
    encoder = Encoder.fit(schema, [frame])
    counts = Counter(frame["user"].to_list())
    kept = sorted((value for value in counts if counts[value] >= 2), key=lambda value: (-counts[value], value))
    rows = {value: row for row, value in enumerate(kept, start=1)}
    encoded = encoder.encode(frame)
    assert encoder.features.tables["user"] == len(kept) + 1
    assert encoded.ids[:, 0].tolist() == [rows.get(value, 0) for value in frame["user"]]
    values, offsets = encoded.lists[1]
    # A list that shares the table uses the vocabulary of the single ids.
    assert values.tolist() == [rows.get(value, 0) for entries in frame["seen"] for value in entries]
    assert np.diff(offsets).tolist() == frame["seen"].list.len().to_list()


def test_lists_keep_their_last_entries_and_drop_blanks() -> None:
    schema = Schema(lists=(ListFeature(name="tags", max_length=2),), labels=("y",))
    frame = pl.DataFrame({"tags": ["a|b|c", "", None, "||c", "a||b|"], "y": [0, 1, 0, 1, 0]})
    encoder = Encoder.fit(schema, [frame])
    names = encoder.names("tags")
    values, offsets = encoder.encode(frame).lists[0]
    bags = [[names[value] for value in values[start:end]] for start, end in pairwise(offsets)]
    assert bags == [["b", "c"], [], [], ["c"], ["a", "b"]]


@pytest.mark.cases(1)
@pytest.mark.parametrize("chunk", [1, 7, 333, 2_000])
def test_fitting_does_not_depend_on_chunks(frame: pl.DataFrame, schema: Schema, chunk: int) -> None:
    frame = frame.head(300) if chunk == 1 else frame
    whole = Encoder.fit(schema, [frame])
    parts = Encoder.fit(schema, (frame.slice(start, chunk) for start in range(0, len(frame), chunk)))
    assert whole.vocabularies.keys() == parts.vocabularies.keys()
    assert all(whole.vocabularies[name].equals(parts.vocabularies[name]) for name in whole.vocabularies)
    np.testing.assert_allclose(whole.encode(frame).dense, parts.encode(frame).dense, rtol=1e-6, atol=1e-6)


def test_dense_transforms_are_what_they_say(frame: pl.DataFrame, schema: Schema) -> None:
    dense = Encoder.fit(schema, [frame]).encode(frame).dense
    price = np.log1p(frame["price"].to_numpy())
    np.testing.assert_allclose(dense[:, 0], (price - price.mean()) / price.std(), rtol=1e-5, atol=1e-6)
    present = frame["age"].is_not_null().to_numpy()
    age = frame["age"].drop_nulls().to_numpy().astype(float)
    np.testing.assert_allclose(dense[present, 1], (age - age.mean()) / age.std(), rtol=1e-5, atol=1e-6)
    assert (dense[~present, 1] == 0).all()
    ranks = frame["rank"].rank().to_numpy() / len(frame)
    np.testing.assert_allclose(dense[:, 2], ranks, atol=2e-3)


@pytest.mark.parametrize(
    ("dense", "encoding", "needs"),
    [
        ({}, "hash", False),
        ({"transform": "standardise"}, "hash", True),
        ({"missing": "mean"}, "hash", True),
        ({}, "vocabulary", True),
    ],
)
def test_what_must_be_learned_from_rows_is_known(dense: dict[str, Any], encoding: Any, needs: bool) -> None:
    size = {"num_embeddings": 10} if encoding == "hash" else {}
    schema = Schema(
        dense=(DenseFeature(name="x", **{"transform": "none", "missing": "zero", **dense}),),
        categorical=(CategoricalFeature(name="y", encoding=encoding, **size),),
        labels=("click",),
    )
    assert Encoder.needs_fit(schema) is needs


def test_a_blank_becomes_the_mean_of_the_training_rows() -> None:
    schema = Schema(dense=(DenseFeature(name="x", transform="none"),), labels=("y",))
    frame = pl.DataFrame({"x": [1.0, None, 4.0], "y": [0, 1, 0]})
    assert Encoder.fit(schema, [frame]).encode(frame).dense[:, 0].tolist() == [1.0, 2.5, 4.0]


def test_a_saved_encoder_encodes_alike(tmp_path: Path, frame: pl.DataFrame, schema: Schema) -> None:
    encoder = Encoder.fit(schema, [frame])
    encoder.save(tmp_path)
    again = Encoder.load(tmp_path)
    assert again.features == encoder.features
    for left, right in zip(_arrays(encoder, frame), _arrays(again, frame), strict=True):
        np.testing.assert_array_equal(left, right)


def _arrays(encoder: Encoder, frame: pl.DataFrame) -> list[np.ndarray]:
    rows = encoder.encode(frame)
    arrays = [rows.dense, rows.ids, *(part for pair in rows.lists for part in pair)]
    return [*arrays, *(a for a in (rows.labels, rows.weights, rows.groups, rows.timestamps) if a is not None)]


@pytest.mark.parametrize("name", ["encoder.json", "vocabularies.parquet"])
def test_a_flipped_byte_of_a_saved_encoder_is_refused_by_name(
    tmp_path: Path, frame: pl.DataFrame, schema: Schema, name: str
) -> None:
    Encoder.fit(schema, [frame]).save(tmp_path)
    content = bytearray((tmp_path / name).read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=name):
        Encoder.load(tmp_path)


def test_a_saved_encoder_holds_no_pickle(tmp_path: Path, frame: pl.DataFrame, schema: Schema) -> None:
    Encoder.fit(schema, [frame]).save(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["encoder.json", "vocabularies.parquet"]
    json.loads((tmp_path / "encoder.json").read_bytes())


def test_predicting_needs_no_labels_weights_groups_or_times(frame: pl.DataFrame, schema: Schema) -> None:
    encoder = Encoder.fit(schema, [frame])
    batch = encoder.encode(frame.drop("click", "buy", "weight", "time"), labels=False).batch()
    assert batch.labels is None
    assert batch.weights is None
    assert batch.timestamps is None
    batch.sparse.validate()


FAULTS = [
    ("click", 2, "labels must be 0 or 1"),
    ("click", None, "a label is blank"),
    ("click", math.nan, "labels must be 0 or 1"),
    ("price", math.inf, "infinite"),
    ("price", math.nan, "NaN"),
    ("price", "cheap", "'cheap' is not a number"),
    ("weight", -0.5, "weights must be 0 or from"),
    ("weight", math.nan, "weights must be 0 or from"),
    ("time", None, "timestamp is blank"),
    ("time", math.inf, "not a timestamp"),
    ("place", -1, "id -1 is outside the table of 7 rows"),
    ("place", 7, "id 7 is outside the table of 7 rows"),
    ("place", None, "an id is blank"),
    ("place", "x", "'x' is not a whole number"),
    ("user", 1.5, "is not an id"),
]


@pytest.mark.parametrize(("column", "value", "message"), FAULTS)
def test_a_bad_value_is_named_with_file_line_column_and_remedy(
    frame: pl.DataFrame, schema: Schema, column: str, value: object, message: str
) -> None:
    encoder = Encoder.fit(schema, [frame])
    values = frame[column].to_list()
    values[41] = value
    if column == "user":
        values = [value if row == 41 else 1.0 for row in range(len(frame))]
    broken = frame.with_columns(
        pl.Series(column, values, strict=False) if not isinstance(value, str) else _text(column, values)
    )
    with pytest.raises(DataError, match=message) as caught:
        encoder.encode(broken, where=RowPlace("clicks.csv", 2, "line"))
    assert f"clicks.csv, line 43, column '{column}'" in str(caught.value)
    assert caught.value.remedy


def _text(column: str, values: list[object]) -> pl.Series:
    return pl.Series(column, [None if value is None else str(value) for value in values])


def test_an_entry_of_a_list_out_of_range_names_its_row() -> None:
    schema = Schema(lists=(ListFeature(name="seen", encoding="identity", num_embeddings=5),), labels=("y",))
    frame = pl.DataFrame({"seen": [[1, 2], [], [3, 5]], "y": [0, 1, 0]})
    with pytest.raises(DataError, match="id 5 is outside the table of 5 rows") as caught:
        Encoder.fit(schema, []).encode(frame, where="x.parquet")
    assert "row 3, column 'seen'" in str(caught.value)


def test_nan_is_a_blank_only_when_asked(frame: pl.DataFrame) -> None:
    schema = Schema(dense=(DenseFeature(name="x", transform="none", nan="missing", missing="zero"),), labels=("y",))
    frame = pl.DataFrame({"x": [1.0, math.nan, 3.0], "y": [0, 1, 0]})
    assert Encoder.fit(schema, [frame]).encode(frame).dense[:, 0].tolist() == [1.0, 0.0, 3.0]


def test_a_blank_is_refused_when_asked() -> None:
    schema = Schema(dense=(DenseFeature(name="x", missing="refuse"),), labels=("y",))
    with pytest.raises(DataError, match="a dense value is blank"):
        Encoder.fit(schema, [pl.DataFrame({"x": [1.0, None], "y": [0, 1]})])


@pytest.mark.parametrize("column", ["price", "user", "tags", "click", "weight", "time"])
def test_a_missing_column_is_named(frame: pl.DataFrame, schema: Schema, column: str) -> None:
    encoder = Encoder.fit(schema, [frame])
    with pytest.raises(DataError, match=f"column '{column}' is missing"):
        encoder.encode(frame.drop(column))


def test_features_that_share_a_table_must_agree() -> None:
    with pytest.raises(ValueError, match="share the table 'item'"):
        Schema(
            categorical=(CategoricalFeature(name="item", min_count=2),),
            lists=(ListFeature(name="seen", table="item"),),
            labels=("y",),
        )


@pytest.mark.parametrize("kind", [pl.Int32, pl.Float64, pl.String])
def test_ids_mean_the_same_as_numbers_and_as_text(kind: type[pl.DataType]) -> None:
    schema = Schema(
        categorical=(
            CategoricalFeature(name="a"),
            CategoricalFeature(name="b", encoding="hash", num_embeddings=1_000),
            CategoricalFeature(name="c", encoding="identity", num_embeddings=10),
        ),
        labels=("y",),
    )
    frame = pl.DataFrame({"a": [3, 1, 3], "b": [7, 8, 9], "c": [0, 9, 4], "y": [0, 1, 0]})
    encoder = Encoder.fit(schema, [frame])
    other = frame.with_columns(pl.col("a", "b", "c").cast(pl.Int64).cast(kind))
    np.testing.assert_array_equal(encoder.encode(other).ids, encoder.encode(frame).ids)
