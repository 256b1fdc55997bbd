"""A teacher scores each event of a stream once, from what was known before it, whatever the chunks and the kills."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl
import pytest
import torch
from numpy.typing import NDArray

from cordillera.data.ranking.encoding import Encoder
from cordillera.data.ranking.features import CategoricalFeature, DenseFeature, Schema
from cordillera.data.ranking.stream.parts import StreamFolder
from cordillera.embeddings.tables import TablesConfig
from cordillera.errors import DataError, TrainingError
from cordillera.files import read_sealed
from cordillera.models.ranking import build
from cordillera.training import checkpoints
from cordillera.training.ranking.scoring import load_weights
from cordillera.training.ranking.teachers.augmentation import Augmentation, AugmentationConfig
from cordillera.training.ranking.teachers.past import PastConfig, PastEmbeddings
from cordillera.training.ranking.teachers.versions import (
    FixedTeacher,
    LearningTeacher,
    LearningTeacherConfig,
    ScoringModel,
)
from cordillera.workflows.streams.augmentation import augment

pytestmark = pytest.mark.usefixtures("without_flushes")

SOURCE = Path(__file__).parents[2] / "src"
STREAMS, TASKS = ("home", "feed"), ("click", "buy")
WINDOW, LATENESS, EVERY = 60, 10, 100

SCHEMA = Schema(
    dense=(DenseFeature(name="price", transform="log"),),
    categorical=(
        CategoricalFeature(name="shop", encoding="hash", num_embeddings=20),
        CategoricalFeature(name="place", encoding="identity", num_embeddings=7),
    ),
    labels=TASKS,
    timestamp="time",
    group="user",
    ids=("event",),
)
MODEL: dict[str, Any] = {"name": "dnn", "embedding_dim": 2, "mlp": [4], "dropout": 0.2}
LARGER: dict[str, Any] = {"name": "dnn", "embedding_dim": 16, "mlp": [64, 32]}


def events_of(count: int, seed: int = 1) -> pl.DataFrame:
    """Events with labels and the time of their labels, in order of time; some at the same time."""
    rng = np.random.default_rng(seed)
    times = np.sort(rng.integers(0, count, count))
    shop, price = rng.integers(0, 30, count), np.round(rng.lognormal(0, 1, count), 3)
    return pl.DataFrame(
        {
            "event": [f"e{number}" for number in rng.permutation(count)],
            "time": times,
            "price": price,
            "shop": [f"s{one}" for one in shop],
            "place": rng.integers(0, 7, count),
            "user": rng.integers(0, 25, count),
            "click": (rng.random(count) < 0.2 + 0.4 * (shop % 3 == 0)).astype(np.int64),
            "buy": (rng.random(count) < 0.1 + 0.3 * (price > 1)).astype(np.int64),
            "known": times + rng.integers(0, WINDOW + 20, count),
        }
    )


def late(frame: pl.DataFrame, rng: np.random.Generator) -> pl.DataFrame:
    """The rows in an order in which none is later than the lateness allows."""
    keys = pl.Series("key", frame["time"] + rng.uniform(0, LATENESS, len(frame)))
    return frame.with_columns(keys).sort("key").drop("key")


def write_streams(events: pl.DataFrame, folder: Path, seed: int = 1) -> dict[str, dict[str, str]]:
    """Write two streams, which share two fifths of the events, with labels in files of their own."""
    rng = np.random.default_rng(seed)
    where = rng.random(len(events))
    members = {"home": where < 0.7, "feed": where > 0.3}
    for stream, is_in in members.items():
        own = events.filter(pl.Series(is_in))
        rows = late(own.drop(*TASKS, "known"), rng)
        labels = late(own.select("event", pl.col("known").alias("time"), *TASKS).filter(pl.col("click") >= 0), rng)
        for kind, frame in (("events", rows), ("labels", labels)):
            (folder / kind / stream).mkdir(parents=True, exist_ok=True)
            half = len(frame) // 2
            frame[:half].write_parquet(folder / kind / stream / "1.parquet")
            frame[half:].write_parquet(folder / kind / stream / "2.parquet")
    return {
        name: {"events": str(folder / "events" / name), "labels": str(folder / "labels" / name)} for name in STREAMS
    }


def settings(folder: Path, streams: Any, out: str = "out", **changes: Any) -> dict[str, Any]:
    """Content of a file of streams."""
    teacher = {"model": MODEL, "publish_every": EVERY, "batch_size": 32, "learning_rate": 0.02}
    join = {"window_s": WINDOW, "lateness_s": LATENESS}
    return {
        "out": str(folder / out),
        "schema": changes.get("schema", SCHEMA).model_dump(mode="json"),
        "streams": streams,
        "join": {**join, **changes.get("join", {})},
        "teacher": {**teacher, **changes.get("teacher", {})},
        "past": {"events": 4} | changes.get("past", {}),
        "chunk_rows": changes.get("chunk", 500),
    }


def go(content: dict[str, Any], *, finish: bool = True) -> Any:
    return augment(AugmentationConfig.model_validate(content), finish=finish).progress


def written(out: Path, stream: str) -> pl.DataFrame:
    return pl.concat([pl.read_parquet(part) for part in sorted((out / stream).glob("*.parquet"))])


def all_written(out: Path) -> pl.DataFrame:
    """Every event once, in order of time and id."""
    return pl.concat([written(out, stream) for stream in STREAMS]).unique("event").sort("time", "event")


def same(left: pl.DataFrame, right: pl.DataFrame) -> None:
    """Equal to the bit: NaN and the sign of zeros count as well."""
    assert left.schema == right.schema
    assert len(left) == len(right)
    for name in left.columns:
        one, other = left[name], right[name]
        if one.dtype.is_float():
            bits = pl.UInt32 if one.dtype == pl.Float32 else pl.UInt64
            one, other = one.reinterpret(dtype=bits), other.reinterpret(dtype=bits)
        assert one.to_list() == other.to_list(), name


def state_of(out: Path) -> dict[str, Any]:
    (folder,) = [path for path in (out / "state").iterdir() if path.name.isdigit()]
    content: dict[str, Any] = read_sealed(folder / "state.json", required=True)["content"]
    return content


def content_of(out: Path, without: str = "?") -> dict[str, bytes]:
    found = {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*") if path.is_file()}
    return {name: content for name, content in found.items() if not name.startswith(without)}


class Run(NamedTuple):
    """A finished run: its events, files, settings, folder and progress."""

    events: pl.DataFrame
    folder: Path
    streams: dict[str, dict[str, str]]
    out: Path
    progress: Any


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """800 events, read in chunks of 500 rows."""
    folder = tmp_path_factory.mktemp("whole")
    events = events_of(800)
    streams = write_streams(events, folder)
    progress = go(settings(folder, streams))
    return Run(events, folder, streams, folder / "out", progress)


# Chunks and times -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("model", [MODEL, LARGER], ids=["tiny", "larger"])
def test_scores_do_not_depend_on_chunks_to_the_bit(whole: Run, tmp_path: Path, model: dict[str, Any]) -> None:
    outs = [(whole.out, whole.progress)] if model is MODEL else []
    for chunk in (64,) if outs else (64, 2**20):
        progress = go(settings(tmp_path, whole.streams, f"{chunk}", chunk=chunk, teacher={"model": model}))
        outs.append((tmp_path / f"{chunk}", progress))
    for out, progress in outs[1:]:
        for stream in STREAMS:
            same(written(outs[0][0], stream), written(out, stream))
        assert progress.calls == outs[0][1].calls
        assert progress.examples == outs[0][1].examples
        assert state_of(out)["teacher"]["versions"] == state_of(outs[0][0])["teacher"]["versions"]


def test_files_that_come_later_are_scored_as_all_at_once(whole: Run, tmp_path: Path) -> None:
    sources = [Path(folder) for entry in whole.streams.values() for folder in entry.values()]
    streams = {name: {kind: str(tmp_path / kind / name) for kind in entry} for name, entry in whole.streams.items()}
    for number in (1, 2):
        for source in sources:
            place = tmp_path / source.relative_to(whole.folder)
            place.mkdir(parents=True, exist_ok=True)
            shutil.copy(source / f"{number}.parquet", place / f"{number}.parquet")
        progress = go(settings(tmp_path, streams), finish=False)
    assert 0 < progress.waiting < 200
    go(settings(tmp_path, streams))
    for stream in STREAMS:
        same(written(tmp_path / "out", stream), written(whole.out, stream))
    assert state_of(tmp_path / "out")["teacher"] == state_of(whole.out)["teacher"]


def test_every_event_is_written_and_scored_once(whole: Run) -> None:
    counts = {}
    for stream in STREAMS:
        given = pl.concat(pl.read_parquet(path) for path in Path(whole.streams[stream]["events"]).iterdir())
        found = written(whole.out, stream)
        assert sorted(found["event"]) == sorted(given["event"])
        assert found["event"].is_unique().all()
        counts[stream] = len(found)
    assert whole.progress.examples == counts
    every = all_written(whole.out)
    scored = every.filter(pl.col("teacher_version").is_not_null())
    calls = dict(scored.group_by("teacher_version").len().rows())
    assert {int(version): count for version, count in whole.progress.calls.items()} == calls
    both = written(whole.out, "home").join(written(whole.out, "feed"), on="event")  # one score in all streams
    assert len(both) > 250
    for name in [*TASKS, *(name for name in every.columns if name.startswith("teacher_"))]:
        assert both[name].to_list() == both[f"{name}_right"].to_list()
    late_labels = whole.events["known"] > whole.events["time"] + WINDOW
    expected = whole.events.with_columns(pl.when(~late_labels).then(task).otherwise(0).alias(task) for task in TASKS)
    joined = every.join(expected, on="event", suffix="_given")
    assert all(joined[task].to_list() == joined[f"{task}_given"].to_list() for task in TASKS)


def test_a_version_knows_only_labels_from_before_its_events(whole: Run) -> None:
    every, versions = all_written(whole.out), state_of(whole.out)["teacher"]["versions"]
    assert len(versions) == len(every) // EVERY == 8
    until, published = {}, []
    for number, version in enumerate(versions, 1):
        learnt = every[(number - 1) * EVERY : number * EVERY]
        until[number] = learnt["time"].max() + WINDOW  # type: ignore[operator]
        assert version == {"examples": number * EVERY, "learnt_until": until[number], "published": until[number] + 1}
        published.append(until[number])
    for event in every.rows(named=True):
        newest = sum(time < event["time"] for time in published)
        assert event["teacher_version"] == (newest or None)
        assert event["teacher_learnt_until"] == until.get(newest)
        assert (event["teacher_click"] is None) == (event["teacher_buy"] is None) == (newest == 0)
        if newest:
            assert event["teacher_learnt_until"] < event["time"]
    times = every.group_by("teacher_version").agg(
        pl.col("time").min().alias("first"), pl.col("time").max().alias("last")
    )
    ordered = times.drop_nulls().sort("teacher_version")
    assert len(ordered) >= 6
    assert (ordered["first"][1:] - ordered["last"][:-1] < WINDOW).all()  # windows of events of two versions overlap


def test_a_lag_delays_versions(whole: Run, tmp_path: Path) -> None:
    """They learn from the same examples, and score later events."""
    go(settings(tmp_path, whole.streams, teacher={"lag_s": 45}))
    every, versions = all_written(tmp_path / "out"), state_of(tmp_path / "out")["teacher"]["versions"]
    for ours, theirs in zip(versions, state_of(whole.out)["teacher"]["versions"], strict=True):
        assert ours == {**theirs, "published": theirs["published"] + 45}
    scored = every.drop_nulls("teacher_version")
    assert (scored["time"] - scored["teacher_learnt_until"]).min() == 46
    for path in sorted((whole.out / "versions").glob("step-*/*.safetensors")):
        assert path.read_bytes() == (tmp_path / "out" / path.relative_to(whole.out)).read_bytes()


def test_nothing_from_after_an_event_is_in_what_the_teacher_says_of_it(whole: Run, tmp_path: Path) -> None:
    """All later events, and all labels that become known later, may be others."""
    time = 500
    after, later = pl.col("time") >= time, pl.col("known") >= time
    events = whole.events.with_columns(
        pl.when(after).then(pl.col("price") * 3).otherwise("price").alias("price"),
        pl.when(after).then(6 - pl.col("place")).otherwise("place").alias("place"),
        *(pl.when(later).then(1 - pl.col(task)).otherwise(task).alias(task) for task in TASKS),
    )
    go(settings(tmp_path, write_streams(events, tmp_path)))
    ours, theirs = all_written(tmp_path / "out"), all_written(whole.out)
    names = ["event", *(name for name in ours.columns if name.startswith("teacher_"))]
    same(ours.filter(pl.col("time") < time).select(names), theirs.filter(pl.col("time") < time).select(names))
    assert ours["teacher_click"].to_list() != theirs["teacher_click"].to_list()


# Past events ----------------------------------------------------------------------------------------------------------


def version_of(out: Path, number: int, model: dict[str, Any] = MODEL) -> ScoringModel:
    """A version, built from its files."""
    encoder = Encoder.load(out / "versions" / "encoder")
    config = LearningTeacherConfig.model_validate({"model": model})
    network = build(config.model, encoder.features, TablesConfig())
    load_weights(network, checkpoints.load(checkpoints.folder_of(out / "versions", number * EVERY)))
    return ScoringModel(encoder, network.eval(), TASKS, "fp32")


def embeddings_of(out: Path, every: pl.DataFrame) -> dict[str, NDArray[np.float64]]:
    """The representation of every scored event by the version that scored it."""
    found: dict[str, NDArray[np.float64]] = {}
    for (number,), part in every.drop_nulls("teacher_version").group_by("teacher_version"):
        version = version_of(out, int(number))
        batch = version.encoder.encode(part, labels=False).batch()
        with torch.inference_mode():
            shared = version.model.represent(batch.dense, version.model.look_up(batch))
            scores = version.model.heads(shared)
        for place, task in enumerate(TASKS):
            np.testing.assert_allclose(part[f"teacher_{task}"], scores[:, place], rtol=1e-5, atol=1e-6)
        found |= dict(zip(part["event"], shared.double().numpy(), strict=True))
    return found


def numbers_of(row: bytes) -> NDArray[np.float64]:
    """A row of 8-bit numbers: codes, scale and bias."""
    scale, bias = np.frombuffer(row[-8:], np.float32).astype(np.float64)
    return np.frombuffer(row[:-8], np.uint8) * scale + bias


@pytest.mark.parametrize(
    ("past", "join"),
    [({}, {}), ({"events": 50, "label": "click"}, {}), ({"events": 2, "label": "buy"}, {"unlabelled": "missing"})],
    ids=["newest", "clicked", "bought or unknown"],
)
def test_past_events_are_those_whose_labels_were_complete_before(
    whole: Run, tmp_path: Path, past: dict[str, Any], join: dict[str, Any]
) -> None:
    out, most, label = whole.out, past.get("events", 4), past.get("label")
    if past:
        out = tmp_path / "out"
        schema = SCHEMA.model_copy(update={"missing_labels": True}) if join else SCHEMA
        go(settings(tmp_path, whole.streams, past=past, join=join, schema=schema))
    every = all_written(out)
    embeddings, told, largest = embeddings_of(out, every), 0, 0
    of_user: dict[int, list[dict[str, Any]]] = {}
    for event in every.rows(named=True):
        of_user.setdefault(event["user"], []).append(event)
    for event in every.rows(named=True):
        before = [one for one in of_user[event["user"]] if one["time"] + WINDOW < event["time"]]
        counted = [one for one in before if one["event"] in embeddings and (label is None or one[label] == 1)][-most:]
        assert event["teacher_past_events"] == len(counted)
        if not counted:
            assert event["teacher_past"] is None
            assert event["teacher_past_version"] is None
            continue
        assert event["teacher_past_version"] == min(one["teacher_version"] for one in counted)
        rows = np.stack([embeddings[one["event"]] for one in counted])
        found, mean = numbers_of(event["teacher_past"]), rows.mean(0)
        error = (np.ptp(rows, axis=1).mean() / 255 + np.ptp(found) / 255) / 2
        np.testing.assert_allclose(found, mean, rtol=0, atol=error + 1e-6 * (1 + np.abs(rows).max()))
        told, largest = told + 1, max(largest, len(counted))
    assert told > 200
    assert largest == most if most < 10 else largest > 5


@pytest.mark.parametrize("width", [4, 5, 7])
def test_the_past_may_hold_one_event_of_any_width(width: int) -> None:
    values = np.arange(width, dtype=np.uint8)
    row = values.tobytes() + np.array([0.5, -1], np.float32).tobytes()
    complete = pl.DataFrame({"teacher_embedding": [row], "teacher_version": [1]})
    past = PastEmbeddings(PastConfig(events=3), window_s=10)
    nothing = np.zeros(0, np.int64)
    past.columns(nothing, nothing, complete, np.array([100]), np.array([1]))
    again = PastEmbeddings(PastConfig(events=3), window_s=10)
    again.load_frame(past.to_frame())
    for one in (past, again):
        found, count, _ = one.columns(np.array([200]), np.array([1]), complete[:0], nothing, nothing)
        assert count.to_list() == [1]
        np.testing.assert_allclose(numbers_of(found[0]), values * 0.5 - 1, atol=0.01)


# Versions -------------------------------------------------------------------------------------------------------------

DYNAMIC = SCHEMA.model_copy(
    update={
        "categorical": (
            CategoricalFeature(name="shop", encoding="hash"),
            CategoricalFeature(name="place", encoding="identity"),
        )
    }
)


def teacher_of(folder: Path, config: dict[str, Any], schema: Schema) -> LearningTeacher:
    content = {"model": MODEL, "publish_every": EVERY, "batch_size": 32, "learning_rate": 0.02, **config}
    return LearningTeacher(LearningTeacherConfig.model_validate(content), schema, WINDOW, folder, embeds=True)


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    "config",
    [
        {"model": {**MODEL, "dropout": 0.0}},
        {"model": {**MODEL, "dropout": 0.5, "norm": "batch"}, "passes": 2},
        {"tables": {"rows": "int8"}},
        {"precision": "bf16", "weight_decay": 0.1},
        pytest.param({"tables": {"dynamic": {"min_count": 2, "max_age": 4, "evict_every": 3}}}, marks=pytest.mark.slow),
    ],
    ids=["plain", "dropout", "8 bits", "bf16", "dynamic"],
)
def test_a_restored_teacher_goes_on_to_the_same_bits(tmp_path: Path, config: dict[str, Any]) -> None:
    schema = DYNAMIC if "dynamic" in config.get("tables", {}) else SCHEMA
    events = events_of(500).with_columns(pl.col(task).cast(pl.UInt8) for task in TASKS).drop("known")
    steady, restored = (
        teacher_of(tmp_path / "steady", config, schema),
        teacher_of(tmp_path / "restored", config, schema),
    )
    torch.manual_seed(3)
    for start in range(0, 500, 40):
        part = events[start : start + 40]
        later = part.with_columns(pl.col("time") + WINDOW + 1)
        found = []
        for teacher in (steady, restored):
            torch.rand(start % 3)  # the state of the process's random numbers is of no importance
            teacher.learn(part)
            found.append(teacher.score(later, later["time"].to_numpy()))
        same(*found)
        frames, state = restored.to_state()
        for name, frame in frames.items():
            frame.write_parquet(tmp_path / f"{name}.parquet")
        restored = teacher_of(tmp_path / "restored", config, schema)
        frames = {name: pl.read_parquet(tmp_path / f"{name}.parquet") for name in frames}
        restored.load_state(frames, json.loads(json.dumps(state)))
    assert steady.versions == restored.versions
    assert steady.calls == restored.calls
    assert len(steady.versions) == 5
    for number in range(1, 6):
        ours, theirs = (
            checkpoints.load(checkpoints.folder_of(tmp_path / name, number * EVERY)).tensors
            for name in ("steady", "restored")
        )
        assert ours.keys() == theirs.keys()
        assert all(ours[name].numpy().tobytes() == theirs[name].numpy().tobytes() for name in ours)


def test_a_teacher_leaves_the_random_numbers_of_others_alone(tmp_path: Path) -> None:
    torch.manual_seed(5)
    state = torch.get_rng_state()
    teacher = teacher_of(tmp_path, {}, SCHEMA)
    events = events_of(250).drop("known")
    teacher.learn(events)
    teacher.score(events, events["time"].to_numpy() + 1000)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_fixed_teacher_refuses_events_from_before_its_training(whole: Run, tmp_path: Path) -> None:
    version = version_of(whole.out, 3)
    until = state_of(whole.out)["teacher"]["versions"][2]["learnt_until"]
    every = all_written(whole.out).select(*SCHEMA.columns, "event")
    teacher = FixedTeacher(version, 3, until, "the run")
    later = every.filter(pl.col("time") >= until)
    found = teacher.score(later, later["time"].to_numpy())
    assert teacher.calls == {"3": len(later)}
    assert set(found["teacher_version"]) == {3}
    assert set(found["teacher_learnt_until"]) == {until}
    own = found.join(all_written(whole.out).filter(pl.col("teacher_version") == 3), on="event", suffix="_whole")
    assert len(own) > 50
    np.testing.assert_allclose(own["teacher_click"], own["teacher_click_whole"], rtol=1e-5, atol=1e-6)
    early = later.with_columns(time=pl.when(pl.int_range(pl.len()) == 5).then(until - 1).otherwise("time"))
    words = f"was trained on samples until {until}, an event is of {until - 1}"
    with pytest.raises(DataError, match=words) as raised:
        teacher.score(early, early["time"].to_numpy())
    assert raised.value.where == "the run"
    assert teacher.calls == {"3": len(later)}
    with_window = FixedTeacher(version, 3, until - 60, "the run", 60)
    assert set(with_window.score(later, later["time"].to_numpy())["teacher_learnt_until"]) == {until}
    with pytest.raises(DataError, match=f"was trained on samples until {until - 60}, an event is of {until - 1}"):
        with_window.score(early, early["time"].to_numpy())
    without = FixedTeacher(version, 3, None, "the run").score(early, early["time"].to_numpy())
    assert without["teacher_learnt_until"].null_count() == len(early)
    content = settings(tmp_path, whole.streams, chunk=100)
    config = AugmentationConfig.model_validate({**content, "teacher": None, "teacher_run": "the run", "past": None})
    folder = StreamFolder(tmp_path / "out", STREAMS)
    with folder.lock(), pytest.raises(DataError, match=f"was trained on samples until {until}"):
        Augmentation(config, FixedTeacher(version, 3, until, "the run"), folder).run()
    assert not list((tmp_path / "out").glob("*/*.parquet"))


@pytest.mark.parametrize("batch_size", [32, 512])
def test_a_teacher_that_diverges_is_one_error_and_leaves_the_folder_as_it_was(tmp_path: Path, batch_size: int) -> None:
    """What was complete before is there; with one step for each version, scores are not finite before the loss is."""
    teacher = {"learning_rate": 1e38, "batch_size": batch_size, "model": {**MODEL, "dropout": 0.0}}
    content = settings(tmp_path, write_streams(events_of(600), tmp_path), chunk=50, teacher=teacher)
    out, kept = tmp_path / "out", dict[str, bytes]()

    def keep(progress: Any) -> None:
        kept.clear()
        kept.update(content_of(out, without="versions/"))

    for _ in range(2):
        with pytest.raises(TrainingError, match="not finite") as raised:
            augment(AugmentationConfig.model_validate(content), finish=True, on_step=keep)
        assert str(raised.value).count("not finite") == 1
        assert content_of(out, without="versions/") == kept
        assert state_of(out)["teacher"] == {"versions": [], "calls": {}}
    assert 0 < len(all_written(out)) < EVERY


def test_what_a_failed_first_call_left_is_not_used(tmp_path: Path) -> None:
    """Its settings may be corrected, as nothing was saved under them."""
    events_of(500).drop("known").write_parquet(tmp_path / "events.parquet")
    streams = {"home": {"events": str(tmp_path / "events.parquet")}}
    with pytest.raises(TrainingError, match="not finite"):
        go(settings(tmp_path, streams, teacher={"learning_rate": 1e38}))
    assert not list((tmp_path / "out" / "state").iterdir())
    schema = SCHEMA.model_copy(update={"dense": (DenseFeature(name="price", transform="none"),)})
    for out in ("out", "fresh"):
        go(settings(tmp_path, streams, out, schema=schema))
    same(written(tmp_path / "out", "home"), written(tmp_path / "fresh", "home"))


# Kills ----------------------------------------------------------------------------------------------------------------

LOADED = """
import json, os, shutil, signal, sys, traceback
import pyarrow.compute, scipy.linalg, torch._dynamo
from numba.core.registry import cpu_target
import cordillera.kernels.dense.numba_layers, cordillera.kernels.embeddings.numba_backend
from cordillera.workflows.streams.augmentation import AugmentationConfig, augment

renames = (os.replace, os.rename)

def counted(act):
    def wrapped(*args, **kwargs):
        global operations
        operations += 1
        is_named = act in renames and request["rename"] and request["rename"] in str(args[0])
        if operations == request["operation"] or is_named:
            os.kill(os.getpid(), signal.SIGKILL)
        return act(*args, **kwargs)
    return wrapped

cpu_target.target_context.refresh(), cpu_target.typing_context.refresh()
print("ready", flush=True)
for line in sys.stdin:
    request = json.loads(line)
    child = os.fork()
    if child == 0:
        code, operations = 1, 0
        try:
            output = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1), os.dup2(output, 2)
            os.replace, os.rename, shutil.rmtree = counted(os.replace), counted(os.rename), counted(shutil.rmtree)
            os.fsync = counted(lambda descriptor: None)  # the machine stays
            augment(AugmentationConfig.model_validate(request["config"]), finish=True)
            print(operations)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(code)
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Loaded:
    """A process that has loaded the libraries, and augments in copies of itself, which do not load them again."""

    def __init__(self, folder: Path) -> None:
        self.log = folder / "log.txt"
        self.process = subprocess.Popen(
            [sys.executable, "-c", LOADED],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"},
            text=True,
        )
        assert self._line() == "ready"

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def go(self, config: dict[str, Any], *, seconds: float = 60.0, operation: int = 0, rename: str = "") -> int:
        """Augment; the exit status.

        The process is killed after some seconds, or before an operation on the disk, by its number or by a part of the
        name of the file or folder that is renamed.
        """
        assert self.process.stdin is not None
        request = {"config": config, "log": str(self.log), "operation": operation, "rename": rename}
        print(json.dumps(request), file=self.process.stdin, flush=True)
        child = int(self._line())
        until = time.monotonic() + seconds
        while Path(f"/proc/{child}").exists():
            if time.monotonic() >= until:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
                break
            time.sleep(0.002)
        code = int(self._line())
        assert code in (0, -signal.SIGKILL), self.log.read_text()
        return code


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loaded]:
    one = Loaded(tmp_path_factory.mktemp("loaded"))
    yield one
    assert one.process.stdin is not None
    one.process.stdin.close()
    one.process.wait(60)


needs_proc = pytest.mark.skipif(not Path("/proc/self").exists(), reason="only Linux tells whether a process runs")


@needs_proc
@pytest.mark.slow
@pytest.mark.parametrize("moments", ["clock", "operations"])
def test_an_augmentation_that_is_killed_at_any_moment_goes_on_as_if_it_never_was(
    tmp_path: Path, loaded: Loaded, moments: str, fuzz_inputs: Callable[[int], int]
) -> None:
    rng, wanted = random.Random(1), fuzz_inputs(20 if moments == "clock" else 6)
    streams = write_streams(events_of(600), tmp_path)
    of_run = {"chunk": 60, "teacher": {"model": MODEL}}
    loaded.go(settings(tmp_path, streams, "first", **of_run))  # may compile, which those after it do not
    begun = time.monotonic()
    assert loaded.go(settings(tmp_path, streams, "whole", **of_run)) == 0
    seconds, operations = time.monotonic() - begun, int(loaded.log.read_text())
    expected, state = {stream: written(tmp_path / "whole", stream) for stream in STREAMS}, state_of(tmp_path / "whole")
    files = {name: content for name, content in content_of(tmp_path / "whole").items() if name.startswith("versions/")}
    assert len(state["teacher"]["versions"]) == 6
    kills = runs = 0
    while kills < wanted:
        out = tmp_path / f"run{runs}"
        config = settings(tmp_path, streams, out.name, **of_run)
        for _ in range(min(5, wanted - kills)):
            if moments == "clock":
                code = loaded.go(config, seconds=rng.uniform(0.0, 0.6) * seconds)
            else:
                code = loaded.go(config, operation=rng.randint(1, operations // 2))
            kills += code != 0
            if code == 0:
                break
        assert loaded.go(config) == 0
        for stream in STREAMS:
            found = written(out, stream)
            assert found["event"].is_unique().all()
            same(found, expected[stream])
        ours = state_of(out)
        assert ours["progress"] == state["progress"]
        assert ours["teacher"] == state["teacher"]
        scored = all_written(out).drop_nulls("teacher_version")
        calls = dict(scored.group_by(pl.col("teacher_version").cast(pl.String)).len().rows())
        assert ours["teacher"]["calls"] == calls
        held = content_of(out)
        assert {name: held.get(name) for name in files} == files
        shutil.rmtree(out)
        runs += 1


@needs_proc
@pytest.mark.slow
def test_kills_leave_nothing_that_nobody_would_miss(tmp_path: Path, loaded: Loaded) -> None:
    config = settings(tmp_path, write_streams(events_of(400), tmp_path), chunk=60)
    for name in (
        "state/.0000000",
        "versions/.encoder",
        ".step-000000100",
        ".part-",
        "state/.0000001",
        ".step-000000200",
    ):
        assert loaded.go(config, rename=name) == -signal.SIGKILL
        assert [path for path in (tmp_path / "out").rglob(".*") if name in str(path)]
    assert loaded.go(config) == 0
    assert [str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob(".*")] == [".lock"]
