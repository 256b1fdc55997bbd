"""Scores of a teacher and dense features of several numbers, from files to batches."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from pydantic import ValidationError

from cordillera.data.ranking.datasets import _key, prepare
from cordillera.data.ranking.encoding import Encoder
from cordillera.data.ranking.features import CategoricalFeature, DenseFeature, Schema, TeacherColumns
from cordillera.data.ranking.loader import Loader
from cordillera.data.ranking.logs.click_logs import FrameLog
from cordillera.errors import DataError
from cordillera.numerics.quantization.rows import dequantize_rows, quantize_rows

from .conftest import config, write

TASKS = ("click", "buy")


def schema_of(**changes: Any) -> Schema:
    return Schema.model_validate(
        {
            "dense": (DenseFeature(name="x", transform="standardise"),),
            "categorical": (CategoricalFeature(name="user"),),
            "labels": TASKS,
            "timestamp": "time",
            "teacher": TeacherColumns(scores={"click": "t_click"}, learnt_until="known"),
            **changes,
        }
    )


def frame_of(rows: int = 300) -> pl.DataFrame:
    random = np.random.default_rng(1)
    logits = random.standard_normal(rows).round(3)
    return pl.DataFrame(
        {
            "x": random.standard_normal(rows),
            "user": random.integers(0, 9, rows),
            "click": random.integers(0, 2, rows),
            "buy": random.integers(0, 2, rows),
            "time": 1_000 + np.arange(rows),
            "known": [None if row % 3 == 0 else 900 + row for row in range(rows)],
            "t_click": [None if row % 3 == 0 else float(logits[row]) for row in range(rows)],
        }
    )


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
@pytest.mark.parametrize("tasks", [None, ("buy", "click"), ("buy",)])
def test_scores_reach_batches_in_the_order_of_the_tasks(tmp_path: Path, suffix: str, tasks: Any) -> None:
    frame = frame_of()
    settings = config(write(frame, tmp_path / f"log.{suffix}"), schema_of(), tmp_path, tasks=tasks)
    splits = prepare(settings)
    loader = Loader(splits.train, 64, shuffle="global", seed=3)
    expected = frame["t_click"].cast(pl.Float64).fill_null(math.nan).to_numpy()
    for batch in loader.epoch():
        assert batch.teacher is not None
        assert batch.rows is not None
        names = tasks or TASKS
        assert batch.teacher.shape == (len(batch), len(names))
        for place, name in enumerate(names):
            wanted = expected[batch.rows.numpy()] if name == "click" else np.full(len(batch), math.nan)
            np.testing.assert_allclose(batch.teacher[:, place].numpy(), wanted, rtol=1e-6)
        assert batch.to("cpu").teacher is not None
        half = batch.select(lambda column: column[:5], batch.sparse)
        assert torch.equal(half.teacher.isnan(), batch.teacher[:5].isnan())
    assert splits.train.teacher is not None


def test_probabilities_become_logits(tmp_path: Path) -> None:
    frame = frame_of(6).with_columns(t_click=pl.Series([0.0, 1.0, 0.5, 0.9, 1e-3, None]), known=pl.lit(None))
    schema = schema_of(teacher=TeacherColumns(scores={"click": "t_click"}, kind="probability"))
    rows = Encoder.fit(schema, [frame]).encode(frame)
    assert rows.teacher is not None
    expected = [-20.0, 20.0, 0.0, math.log(9.0), math.log(1e-3 / 0.999), math.nan]
    np.testing.assert_allclose(rows.teacher[:, 0], expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("kind", "value", "said"),
    [
        ("logit", math.nan, "a teacher's score is nan"),
        ("logit", math.inf, "a teacher's score is inf"),
        ("probability", -0.1, "a teacher's score is -0.1"),
        ("probability", 1.5, "a teacher's score is 1.5"),
        ("probability", math.nan, "a teacher's score is nan"),
    ],
)
def test_a_damaged_score_is_refused_with_its_place(tmp_path: Path, kind: str, value: float, said: str) -> None:
    scores = [0.5] * 20
    scores[13] = value
    frame = frame_of(20).with_columns(t_click=pl.Series(scores), known=pl.lit(0))
    schema = schema_of(teacher=TeacherColumns.model_validate({"scores": {"click": "t_click"}, "kind": kind}))
    with pytest.raises(DataError, match=f"{said}.*") as error:
        prepare(config(write(frame, tmp_path / "log.parquet"), schema, tmp_path))
    assert "log.parquet, row 14, column 't_click'" in str(error.value)


def test_a_score_of_a_teacher_that_knew_the_future_is_refused(tmp_path: Path) -> None:
    frame = frame_of(40)
    known = frame["known"].to_list()
    known[17] = frame["time"][17] + 1
    with pytest.raises(DataError, match="learnt from labels until 1018, the sample is of 1017") as error:
        prepare(config(write(frame.with_columns(known=pl.Series(known)), tmp_path / "log.csv"), schema_of(), tmp_path))
    assert "line 19, column 'known'" in str(error.value)
    known[17] = frame["time"][17]
    prepare(config(write(frame.with_columns(known=pl.Series(known)), tmp_path / "good.csv"), schema_of(), tmp_path))


def test_prediction_needs_no_teacher() -> None:
    frame = frame_of()
    encoder = Encoder.fit(schema_of(), [frame])
    assert encoder.encode(frame.select("x", "user"), labels=False).teacher is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"teacher": {"scores": {"view": "t"}}}, "names what is no label"),
        ({"teacher": {"scores": {"click": "x"}}}, "cannot be features or labels"),
        ({"teacher": {"scores": {"click": "t"}, "learnt_until": "known"}, "timestamp": None}, "name the timestamp"),
        ({"teacher": {"scores": {}}}, "at least 1 item"),
    ],
)
def test_roles_that_contradict_each_other_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        schema_of(**changes)


def test_prepared_data_of_earlier_schemas_is_still_found(tmp_path: Path) -> None:
    schema = schema_of(teacher=None)
    settings = config(tmp_path / "log.csv", schema, tmp_path)
    log = FrameLog(schema, frame_of(), "log")
    content = schema.model_dump(mode="json")
    for feature in content["dense"]:
        del feature["width"]
    del content["teacher"], content["missing_labels"], content["timestamp_unit"]
    choices = {
        "format": 2,
        "log": log.fingerprint(),
        "schema": content,
        "split": "time",
        "fractions": settings.fractions,
        "seed": 0,
        "unordered": "refuse",
    }
    assert _key(settings, log) == hashlib.sha256(json.dumps(choices, sort_keys=True).encode()).hexdigest()[:16]


# Dense features of several numbers

VECTORS = Schema(
    dense=(DenseFeature(name="x", transform="none"), DenseFeature(name="v", transform="none", missing="zero", width=3)),
    labels=("click",),
)


def vectors_of(kind: str, values: np.ndarray) -> pl.Series:
    if kind == "list":
        return pl.Series("v", values.tolist(), dtype=pl.List(pl.Float64))
    if kind == "array":
        return pl.Series("v", values.tolist(), dtype=pl.Array(pl.Float32, 3))
    rows = quantize_rows(torch.from_numpy(values).float(), 8).numpy()
    return pl.Series("v", [row.tobytes() for row in rows], dtype=pl.Binary)


@pytest.mark.parametrize("kind", ["list", "array", "rows of 8 bits"])
def test_numbers_of_a_list_are_features_of_their_own(kind: str, tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal((50, 3))
    column = vectors_of(kind, values).to_list()
    column[7] = None
    frame = pl.DataFrame(
        {"x": np.arange(50.0), "v": pl.Series(column, dtype=vectors_of(kind, values).dtype), "click": np.arange(50) % 2}
    )
    splits = prepare(config(write(frame, tmp_path / "log.parquet"), VECTORS, tmp_path, split="order"))
    assert splits.features.dense == ("x", "v[0]", "v[1]", "v[2]")
    (batch,) = Loader(splits.train, 1000).epoch()
    expected = values
    if kind.startswith("rows"):
        expected = dequantize_rows(quantize_rows(torch.from_numpy(values).float(), 8), 8, 3).numpy()
    expected = expected.copy()
    expected[7] = 0.0
    np.testing.assert_allclose(batch.dense[:, 1:].numpy(), expected[:40], rtol=1e-6)
    np.testing.assert_array_equal(batch.dense[:, 0].numpy(), np.arange(40.0))


def test_each_number_has_a_scale_of_its_own() -> None:
    values = np.random.default_rng(0).standard_normal((200, 3)) * [1.0, 10.0, 100.0] + [0.0, 5.0, -7.0]
    schema = Schema(dense=(DenseFeature(name="v", transform="standardise", width=3),), labels=("click",))
    frame = pl.DataFrame({"v": vectors_of("list", values), "click": np.arange(200) % 2})
    found = Encoder.fit(schema, [frame]).encode(frame).dense
    np.testing.assert_allclose(found, (values - values.mean(0)) / values.std(0), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("column", "said"),
    [
        (pl.Series("v", [[1.0, 2.0, 3.0], [1.0, 2.0]]), "not of 3 numbers"),
        (pl.Series("v", [[1.0, 2.0, 3.0], [1.0, None, 2.0]]), "a blank among its numbers"),
        (pl.Series("v", [[1.0, 2.0, 3.0], [1.0, math.nan, 2.0]]), "NaN"),
        (pl.Series("v", [b"\0" * 11, b"\0" * 10], dtype=pl.Binary), "not of 11 bytes"),
        (pl.Series("v", [1.0, 2.0]), "not lists of 3 numbers"),
    ],
)
def test_a_list_of_another_length_is_refused_with_its_place(column: pl.Series, said: str, tmp_path: Path) -> None:
    frame = pl.DataFrame({"x": [0.0, 1.0], "v": column, "click": [0, 1]})
    with pytest.raises(DataError, match=said) as error:
        prepare(config(write(frame, tmp_path / "log.parquet"), VECTORS, tmp_path, fractions=(1.0, 0.0, 0.0)))
    assert "log.parquet" in str(error.value)
    if "lists of" not in said:
        assert "row 2" in str(error.value)
