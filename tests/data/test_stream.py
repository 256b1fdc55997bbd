"""Streams joined with late labels equal loops over dictionaries, whatever the chunks, the order and the files.

The reference, :func:`expected`, holds all rows at once and knows no watermark, chunk or file.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from numpy.typing import NDArray
from pydantic import ValidationError

from cordillera.data.ranking.features import CategoricalFeature, DenseFeature, Schema, TeacherColumns
from cordillera.data.ranking.logs.columns import RowPlace
from cordillera.data.ranking.stream import sources as stream_sources
from cordillera.data.ranking.stream.config import EventStreamConfig, JoinConfig
from cordillera.data.ranking.stream.join import END, LabelJoin
from cordillera.data.ranking.stream.parts import StreamFolder
from cordillera.data.ranking.stream.sources import FileSource
from cordillera.errors import DataError
from cordillera.training.ranking.teachers.augmentation import Augmentation, AugmentationConfig, AugmentationProgress
from tests.fuzzing import flips

pytestmark = pytest.mark.usefixtures("without_flushes")

STREAMS, TASKS = ("home", "feed", "mail"), ("click", "buy")
KINDS = {
    "event": pl.String,
    "time": pl.Int64,
    "price": pl.Float64,
    "shop": pl.String,
    "user": pl.Int64,
    "click": pl.Int64,
    "buy": pl.Int64,
    "known": pl.Int64,
}
FEATURES = ("price", "shop", "user")
UNLABELLED = ("zero", "missing", "drop")

Row = dict[str, Any]


def schema_of(unlabelled: str = "zero") -> Schema:
    return Schema(
        dense=(DenseFeature(name="price", transform="none"),),
        categorical=(CategoricalFeature(name="shop", encoding="hash", num_embeddings=20),),
        labels=TASKS,
        missing_labels=unlabelled == "missing",
        timestamp="time",
        group="user",
        ids=("event",),
    )


@dataclass
class Made:
    """Rows of events and of labels by stream."""

    events: dict[str, list[Row]] = field(default_factory=lambda: {name: [] for name in STREAMS})
    labels: dict[str, list[Row]] = field(default_factory=lambda: {name: [] for name in STREAMS})


def make(rng: random.Random, count: int, window: int) -> Made:
    """Events, 40 % of them in several streams, and labels at every interesting moment, in any order."""
    made = Made()
    for number in range(count):
        time = rng.randrange(4 * count)
        held = rng.sample(STREAMS, 1 if rng.random() < 0.6 else rng.randint(2, 3))
        event = {"event": f"e{number}", "time": time, "shop": f"s{rng.randrange(9)}", "user": rng.randrange(12)}
        for stream in held:
            row = {**event, "price": number + STREAMS.index(stream) / 4}
            made.events[stream] += [row] * (2 if rng.random() < 0.15 else 1)
        for _ in range(rng.choice((0, 0, 1, 1, 2, 4))):
            later = rng.choice((0, 1, window, window + 1, rng.randint(0, window), window + rng.randint(1, 200)))
            label = {"event": event["event"], "time": time + later}
            for _ in range(rng.choice((1, 1, 1, 2))):  # several of one time
                values = {task: rng.choice((0, 1, None)) for task in TASKS}
                made.labels[rng.choice(STREAMS)].append({**label, **values})
    for number in range(count // 10):
        row = {"event": f"unknown{number}", "time": rng.randrange(5 * count), "click": 1, "buy": None}
        made.labels[rng.choice(STREAMS)].append(row)
    return made


def in_time(rows: list[Row], lateness: int, rng: random.Random) -> list[Row]:
    """The rows in a random order in which none is later than the lateness allows."""
    mixed = rng.sample(rows, len(rows))
    keyed = [(row["time"] + rng.uniform(0, lateness) * rng.choice((0, 0, 1)), row) for row in mixed]
    return [row for _, row in sorted(keyed, key=lambda one: one[0])]


def expected(made: Made, window: int, unlabelled: str = "zero", until: float = float("inf")) -> dict[str, list[Row]]:
    """The examples of events whose window is over before a time."""
    events: dict[str, Row] = {}
    streams: dict[str, set[str]] = {}
    for stream in STREAMS:
        for row in made.events[stream]:
            events.setdefault(row["event"], row)
            streams.setdefault(row["event"], set()).add(stream)
    newest: dict[tuple[str, str], tuple[int, int]] = {}
    for rows in made.labels.values():
        for row in rows:
            event = events.get(row["event"])
            if event is None or row["time"] > event["time"] + window:
                continue
            for task in TASKS:
                if row[task] is not None:
                    key, found = (row["event"], task), (row["time"], row[task])
                    newest[key] = max(newest.get(key, found), found)
    examples: dict[str, list[Row]] = {stream: [] for stream in STREAMS}
    for name, event in sorted(events.items(), key=lambda item: (item[1]["time"], item[0])):
        if event["time"] + window >= until:
            continue
        labels = {task: newest[name, task][1] if (name, task) in newest else None for task in TASKS}
        if unlabelled == "drop" and labels == dict.fromkeys(TASKS):
            continue
        if unlabelled == "zero":
            labels = {task: value or 0 for task, value in labels.items()}
        for stream in streams[name]:
            kept = {key: event[key] for key in ("event", "time", *FEATURES)}
            examples[stream].append({**kept, **labels})
    return examples


def frame_of(rows: list[Row]) -> pl.DataFrame:
    names = [name for name in KINDS if name in rows[0]]
    return pl.DataFrame({name: pl.Series([row[name] for row in rows], dtype=KINDS[name]) for name in names})


def write(rows: list[Row], path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".csv":
        frame_of(rows).write_csv(path)
    else:
        frame_of(rows).write_parquet(path)
    return path


class NoTeacher:
    """A teacher that says nothing."""

    def learn(self, examples: pl.DataFrame) -> None:
        pass

    def score(self, events: pl.DataFrame, times: NDArray[np.int64]) -> pl.DataFrame:
        return events

    def to_state(self) -> tuple[dict[str, pl.DataFrame], dict[str, Any]]:
        return {}, {"calls": {}}

    def load_state(self, frames: dict[str, pl.DataFrame], state: dict[str, Any]) -> None:
        pass


@dataclass
class Work:
    """Augmentation of the files in one folder, by a teacher that says nothing."""

    folder: Path
    window: int = 20
    lateness: int = 0
    unlabelled: str = "zero"
    chunk: int = 2**20
    streams: dict[str, Row] | None = None
    out: str = "out"

    def config(self) -> AugmentationConfig:
        streams: dict[str, Row] = self.streams or {
            name: {"events": str(self.folder / "events" / name), "labels": str(self.folder / "labels" / name)}
            for name in STREAMS
        }
        join = {"window_s": self.window, "lateness_s": self.lateness, "unlabelled": self.unlabelled}
        return AugmentationConfig.model_validate(
            {
                "out": str(self.folder / self.out),
                "schema": schema_of(self.unlabelled),
                "join": join,
                "streams": streams,
                "teacher_run": "none",
                "chunk_rows": self.chunk,
            }
        )

    def go(self, *, finish: bool = True) -> AugmentationProgress:
        config = self.config()
        folder = StreamFolder(Path(config.out), tuple(config.streams))
        with folder.lock():
            work = Augmentation(config, NoTeacher(), folder)
            work.run(finish=finish)
        return work.progress

    def examples(self, stream: str) -> list[Row]:
        found: list[Row] = []
        for part in sorted((self.folder / self.out / stream).glob("*.parquet")):
            found += pl.read_parquet(part).rows(named=True)
        return found

    def all_examples(self) -> dict[str, list[Row]]:
        return {stream: self.examples(stream) for stream in STREAMS}

    def content(self) -> dict[str, bytes]:
        """All files of the folder, with their content."""
        place = self.folder / self.out
        return {str(path.relative_to(place)): path.read_bytes() for path in place.rglob("*") if path.is_file()}


def write_all(made: Made, folder: Path, lateness: int, rng: random.Random, files: int = 2) -> None:
    """Write the rows of each source to several files, in a new order."""
    for kind, sources in (("events", made.events), ("labels", made.labels)):
        shutil.rmtree(folder / kind, ignore_errors=True)
        for stream, rows in sources.items():
            ordered = in_time(rows, lateness, rng)
            ends = sorted(rng.sample(range(1, len(ordered)), files - 1))
            for number, (first, last) in enumerate(zip([0, *ends], [*ends, len(ordered)], strict=True)):
                write(ordered[first:last], folder / kind / stream / f"{number:03d}.parquet")


def join_in_pieces(
    made: Made, config: JoinConfig, rng: random.Random, rows: int
) -> tuple[dict[str, list[Row]], LabelJoin]:
    """Join rows in pieces of any size, of sources in any order; now and then all that waits is saved and read."""
    schema = schema_of(config.unlabelled)
    join = LabelJoin(schema, STREAMS, config)
    left = {("events", name): in_time(made.events[name], config.lateness_s, rng) for name in STREAMS}
    left |= {("labels", name): in_time(made.labels[name], config.lateness_s, rng) for name in STREAMS}
    latest = dict.fromkeys(left, -END)
    watermark, found = -END, {stream: list[Row]() for stream in STREAMS}
    while left:
        kind, stream = source = rng.choice(list(left))
        count = rng.randint(1, rows)
        piece, left[source] = left[source][:count], left[source][count:]
        if kind == "events":
            newest = join.add_events(stream, frame_of(piece), RowPlace(stream), watermark)
        else:
            newest = join.add_labels(frame_of(piece), RowPlace(stream), watermark)
        latest[source] = max(latest[source], newest)
        left = {key: value for key, value in left.items() if value}
        watermark = max(watermark, min(latest.values()) - config.lateness_s) if left else END
        join.hold(join.ready(watermark))
        complete = join.complete(watermark)
        for name in STREAMS:
            found[name] += join.of_stream(complete, name).rows(named=True)
        if rng.random() < 0.2:
            frames, counts = join.to_state()
            join = LabelJoin(schema, STREAMS, config)
            join.load_state(frames, counts)
    return found, join


@pytest.mark.cases(1)
@pytest.mark.parametrize("unlabelled", UNLABELLED)
def test_joined_streams_are_those_of_loops(unlabelled: Any, fuzz_inputs: Callable[[int], int]) -> None:
    for seed in range(fuzz_inputs(4)):
        rng = random.Random(seed)
        window, lateness = rng.choice((0, 1, 20, 100)), rng.choice((0, 1, 15, 200))
        made = make(rng, 40, window)
        config = JoinConfig(window_s=window, lateness_s=lateness, unlabelled=unlabelled)
        found, join = join_in_pieces(made, config, rng, rng.choice((2, 10, 40, 1000)))
        assert found == expected(made, window, unlabelled), f"seed {seed}"
        assert not len(join.unscored)
        assert not len(join.scored)
        assert not len(join.labels)


def test_all_rows_are_counted(fuzz_inputs: Callable[[int], int]) -> None:
    for seed in range(fuzz_inputs(2)):
        rng = random.Random(seed)
        made = make(rng, 40, 20)
        rows = [row for stream in made.events.values() for row in stream]
        times = {row["event"]: row["time"] for row in rows}
        labels = [row for stream in made.labels.values() for row in stream]
        labels = [row for row in labels if any(row[task] is not None for task in TASKS)]
        useless = sum(row["time"] > times.get(row["event"], -END) + 20 for row in labels)
        _, join = join_in_pieces(made, JoinConfig(window_s=20, lateness_s=15), rng, rng.choice((2, 10, 1000)))
        assert join.counts["events"] == len(rows)
        assert join.counts["duplicates"] == len(rows) - len(times)
        assert join.counts["examples"] == len(times)
        assert join.counts["labels"] == len(labels)
        assert join.counts["labels_after_window"] + join.counts["labels_without_event"] == useless
        assert join.counts["late_events"] == join.counts["late_labels"] == 0


@pytest.mark.cases(1)
@pytest.mark.parametrize("unlabelled", UNLABELLED)
def test_what_is_written_does_not_depend_on_chunks_or_on_the_order_of_rows(tmp_path: Path, unlabelled: str) -> None:
    rng = random.Random(UNLABELLED.index(unlabelled))
    made = make(rng, 50, 20)
    for files, chunk in enumerate((10, 64, 2**20), 1):
        write_all(made, tmp_path, 15, rng, files)
        work = Work(tmp_path, 20, 15, unlabelled, chunk, out=f"{chunk}")
        progress = work.go()
        assert work.all_examples() == expected(made, 20, unlabelled), f"chunks of {chunk}"
        assert progress.examples == {stream: len(work.examples(stream)) for stream in STREAMS}
        assert progress.waiting == 0
        assert progress.is_finished


@pytest.mark.parametrize("chunk", [10, 2**20])
def test_files_that_come_later_give_the_same_as_all_at_once(tmp_path: Path, chunk: int) -> None:
    rng = random.Random(chunk)
    made = make(rng, 40, 20)
    write_all(made, tmp_path / "all", 15, rng, files=3)
    files = [path.relative_to(tmp_path / "all") for path in (tmp_path / "all").rglob("*.parquet")]
    work = Work(tmp_path / "later", 20, 15, chunk=chunk)
    for path in files:
        (tmp_path / "later" / path.parent).mkdir(parents=True, exist_ok=True)
    read: list[Path] = []
    first = {path: path.parts[0] == "events" and path.name == "000.parquet" for path in files}
    for path in sorted(files, key=lambda one: (not first[one], one.name, rng.random())):  # each day in any order
        shutil.copy(tmp_path / "all" / path, tmp_path / "later" / path)
        read.append(path)
        if len(read) < len(STREAMS):
            continue
        progress = work.go(finish=False)
        assert not progress.is_finished
        latest = dict.fromkeys({one.parent for one in files}, -END)
        for one in read:
            latest[one.parent] = max(latest[one.parent], *pl.read_parquet(tmp_path / "all" / one)["time"])
        until = min(latest.values()) - 15
        assert progress.watermark == (None if -END in latest.values() else until)
        assert work.all_examples() == expected(made, 20, until=until)
        assert bool(progress.awaited) == bool(progress.waiting)
    work.go()
    assert work.all_examples() == expected(made, 20)
    before = work.content()
    work.go()
    assert work.content() == before


def test_a_second_call_without_new_files_changes_nothing(tmp_path: Path) -> None:
    rng = random.Random(1)
    write_all(make(rng, 30, 20), tmp_path, 0, rng)
    work = Work(tmp_path, 20, chunk=10)
    first = work.go(finish=False)
    before = work.content()
    second = work.go(finish=False)
    assert work.content() == before
    assert (second.counts, second.examples, second.waiting) == (first.counts, first.examples, first.waiting)


@pytest.mark.cases(2)
@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("chunk", [4, 2**20])
def test_labels_may_stand_in_the_rows_of_events(tmp_path: Path, later: bool, chunk: int) -> None:
    """With the event's time they always count, with another one if it lies within the window."""
    rng = random.Random(chunk)
    made = make(rng, 50, 20)
    for stream in STREAMS:
        made.events[stream] = [
            {
                **row,
                **{task: rng.choice((0, 1, None)) for task in TASKS},
                **({"known": row["time"] + rng.choice((0, 1, 20, 21, 90))} if later else {}),
            }
            for row in made.events[stream]
        ]
    streams = {name: {"events": str(tmp_path / "events" / name)} for name in STREAMS}
    if later:
        streams = {name: {**entry, "label_timestamp": "known"} for name, entry in streams.items()}
    made.labels = {
        stream: [{**row, "time": row.get("known", row["time"])} for row in rows] for stream, rows in made.events.items()
    }
    for stream in STREAMS:
        write(in_time(made.events[stream], 15, rng), tmp_path / "events" / stream / "1.parquet")
    work = Work(tmp_path, 20, 15, chunk=chunk, streams=streams)
    work.go()
    assert work.all_examples() == expected(made, 20)


def test_labels_in_rows_and_in_files_of_one_stream_count_together(tmp_path: Path) -> None:
    event = {"event": "a", "time": 10, "price": 1.0, "shop": "s", "user": 1, "click": 1, "buy": 0}
    write([event, {**event, "event": "b"}], tmp_path / "events.parquet")
    write([{"event": "a", "time": 12, "click": 0, "buy": None}], tmp_path / "labels.parquet")
    sources = {"events": str(tmp_path / "events.parquet"), "labels": str(tmp_path / "labels.parquet")}
    work = Work(tmp_path, streams={"home": sources})
    work.go()
    assert [(row["event"], row["click"], row["buy"]) for row in work.examples("home")] == [("a", 0, 0), ("b", 1, 0)]


def test_the_newest_label_within_the_window_counts_by_task() -> None:
    events = [{"event": one, "time": 100, "price": 1.0, "shop": "s", "user": 1} for one in "abcde"]
    given: dict[str, list[tuple[int, int | None, int | None]]] = {
        "a": [(100, 1, None), (105, 0, None), (103, 1, 1)],  # the newest of each task, in any order of rows
        "b": [(110, 1, None), (111, 0, 1)],  # the window's last second, and the one after it
        "c": [(105, 0, 1), (105, 1, 0)],  # of two at one time the larger
        "d": [(111, 1, 1)],
        "e": [],
    }
    labels = [{"event": one, "time": t, "click": c, "buy": b} for one, found in given.items() for t, c, b in found]
    join = LabelJoin(schema_of(), STREAMS, JoinConfig(window_s=10, unlabelled="missing"))
    join.add_events("home", frame_of(events), RowPlace("events"), -END)
    join.add_labels(frame_of(labels), RowPlace("labels"), -END)
    join.hold(join.ready(END))
    found = join.of_stream(join.complete(END), "home")
    assert list(zip(found["event"], found["click"], found["buy"], strict=True)) == [
        ("a", 0, 1),
        ("b", 1, None),
        ("c", 1, 1),
        ("d", None, None),
        ("e", None, None),
    ]


def test_an_event_of_several_streams_has_the_values_of_the_first_one(tmp_path: Path) -> None:
    event = {"event": "a", "time": 10, "shop": "s", "user": 1}
    for number, stream in enumerate(STREAMS[::-1]):
        write([{**event, "price": float(number)}] * 2, tmp_path / f"{stream}.parquet")
    streams = {stream: {"events": str(tmp_path / f"{stream}.parquet")} for stream in STREAMS}
    work = Work(tmp_path, streams=streams, chunk=1)
    progress = work.go()
    assert work.all_examples() == {stream: [{**event, "price": 2.0, "click": 0, "buy": 0}] for stream in STREAMS}
    assert progress.counts["duplicates"] == 5


def test_text_files_give_the_examples_of_parquet(tmp_path: Path) -> None:
    rng = random.Random(1)
    made = make(rng, 60, 20)
    for kind, sources in (("events", made.events), ("labels", made.labels)):
        for stream, rows in sources.items():
            write(in_time(rows, 15, rng), tmp_path / kind / stream / "1.csv")
    work = Work(tmp_path, 20, 15, chunk=30)
    work.go()
    found = {
        stream: [{**row, "price": float(row["price"]), "user": int(row["user"])} for row in rows]
        for stream, rows in work.all_examples().items()
    }
    assert found == expected(made, 20)


# Files ----------------------------------------------------------------------------------------------------------------


def source_of(paths: str | tuple[str, ...], rows: int = 100) -> FileSource:
    return FileSource("streams.home.events", paths, schema_of(), None, rows)


def rest_of(source: FileSource) -> list[tuple[str, str]]:
    """Id and place of all rows that a source still gives."""
    found = []
    while (piece := source.next()) is not None:
        frame, place = piece
        found += [(str(one), Path(place.at(row, "event")).name) for row, one in enumerate(frame["event"])]
    return found


def events_of(names: str, first: int = 1) -> list[Row]:
    return [
        {"event": name, "time": first + number, "price": 1.0, "shop": "s", "user": 1}
        for number, name in enumerate(names)
    ]


@pytest.mark.parametrize("rows", [1, 3, 4, 100])
def test_every_row_is_read_once_from_any_position_on(tmp_path: Path, rows: int) -> None:
    write(events_of("abcdefg"), tmp_path / "1.parquet")
    write(events_of("hi"), tmp_path / "2.csv")
    write(events_of("jklmn"), tmp_path / "3.parquet")
    every = [(one, f"1.parquet, row {i}, column 'event'") for i, one in enumerate("abcdefg", 1)]
    every += [(one, f"2.csv, line {i}, column 'event'") for i, one in enumerate("hi", 2)]  # the first names the columns
    every += [(one, f"3.parquet, row {i}, column 'event'") for i, one in enumerate("jklmn", 1)]
    source, read = source_of(str(tmp_path), rows), 0
    while True:
        state = json.loads(json.dumps(source.to_state()))
        other = source_of(str(tmp_path), 2)
        other.load_state(state)
        assert rest_of(other) == every[read:]
        piece = source.next()
        if piece is None:
            break
        assert len(piece[0]) <= rows
        read += len(piece[0])
    assert read == len(every)


def test_files_may_come_later(tmp_path: Path) -> None:
    source = source_of(str(tmp_path))
    assert source.next() is None
    write(events_of("ab"), tmp_path / "1.parquet")
    assert [row[0] for row in rest_of(source)] == ["a", "b"]
    assert source.next() is None
    write(events_of("c"), tmp_path / "2.parquet")
    write(events_of("d"), tmp_path / "3.parquet")
    assert [row[0] for row in rest_of(source)] == ["c", "d"]


def test_hours_without_events_are_many_files_without_rows(tmp_path: Path) -> None:
    write(events_of("a"), tmp_path / "b.parquet")
    pl.read_parquet(tmp_path / "b.parquet").clear().write_parquet(tmp_path / "a0000.parquet")
    for number in range(1, sys.getrecursionlimit() + 100):
        os.link(tmp_path / "a0000.parquet", tmp_path / f"a{number:04}.parquet")
    assert rest_of(source_of(str(tmp_path / "*.parquet"))) == [("a", "b.parquet, row 1, column 'event'")]


def test_files_that_were_read_must_stay_as_they_were(tmp_path: Path) -> None:
    for name in "bc":
        write(events_of(name * 3), tmp_path / f"{name}.parquet")
    source = source_of(str(tmp_path))
    rest_of(source)
    kept = (tmp_path / "b.parquet").read_bytes()
    write(events_of("b" * 50), tmp_path / "b.parquet")
    with pytest.raises(DataError, match="has changed since it was read") as raised:
        source.next()
    assert raised.value.where == str(tmp_path / "b.parquet")
    (tmp_path / "b.parquet").unlink()
    with pytest.raises(
        DataError, match=r"file 1 of streams\.home\.events was .*b\.parquet, and now it is .*c\.parquet"
    ):
        source.next()
    (tmp_path / "b.parquet").write_bytes(kept)
    assert source.next() is None
    write(events_of("a"), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"file 1 of .* was .*b\.parquet, and now it is .*a\.parquet"):
        source.next()


def later_file(folder: Path) -> None:
    """A new file whose name stands before that of the file that was read last."""
    write(events_of("uvwxyz", 50), folder / "a.parquet")


def other_content(folder: Path) -> None:
    """Other rows in the file that was read last."""
    write(events_of("uvwxyz", 50), folder / "b.parquet")


@pytest.mark.parametrize("change", [later_file, other_content])
@pytest.mark.parametrize("chunk", [3, 100])
def test_the_file_read_last_must_stay_as_it_was_too(tmp_path: Path, change: Callable[[Path], None], chunk: int) -> None:
    """Else rows of another file are taken for read, and are in no example."""
    write(events_of("abcd"), tmp_path / "events" / "b.parquet")
    work = Work(tmp_path, 5, chunk=chunk, streams={"home": {"events": str(tmp_path / "events")}})
    work.go(finish=False)
    change(tmp_path / "events")
    with pytest.raises(DataError):
        work.go()


# Bad input ------------------------------------------------------------------------------------------------------------

EVENTS = frame_of([{"event": f"e{i}", "time": 10 * i, "price": i / 2, "shop": "s", "user": i % 3} for i in range(1, 9)])
LABELS = frame_of([{"event": f"e{i}", "time": 10 * i + 3, "click": i % 2, "buy": 0} for i in range(1, 9)])


def planted(frame: pl.DataFrame, column: str, value: Any, kind: Any = None) -> pl.DataFrame:
    """The frame with a value in row 4."""
    values = frame[column].to_list()
    values[3] = value
    return frame.with_columns(pl.Series(column, values, dtype=kind or frame[column].dtype, strict=False))


def run_bad(folder: Path, events: pl.DataFrame, labels: pl.DataFrame, chunk: int, suffix: str = "parquet") -> Work:
    for name, frame in (("events", events), ("labels", labels)):
        if suffix == "csv":
            frame.write_csv(folder / f"{name}.csv")
        else:
            frame.write_parquet(folder / f"{name}.parquet")
    sources = {name: str(folder / f"{name}.{suffix}") for name in ("events", "labels")}
    return Work(folder, 20, chunk=chunk, streams={"home": sources})


BAD: dict[str, tuple[str, str, Any, Any, str]] = {
    "blank id": ("events", "event", None, None, "the id of an event is blank"),
    "empty id": ("events", "event", "", None, "the id of an event is blank"),
    "broken id": ("events", "event", 1.5, pl.Float64, r"1\.5 is not an id"),
    "blank id of a label": ("labels", "event", None, None, "the id of an event is blank"),
    "blank time": ("events", "time", None, None, "a timestamp is blank"),
    "NaN time": ("events", "time", float("nan"), pl.Float64, "nan is not a timestamp"),
    "infinite time": ("events", "time", float("inf"), pl.Float64, "inf is not a timestamp"),
    "time in words": ("events", "time", "noon", pl.String, "'noon' is not a time"),
    "time far off": ("events", "time", 2**62, None, f"{2**62} is no time in seconds"),
    "blank time of a label": ("labels", "time", None, None, "a timestamp is blank"),
    "NaN time of a label": ("labels", "time", float("nan"), pl.Float64, "nan is not a timestamp"),
    "infinite number": ("events", "price", float("inf"), None, "a dense value is infinite"),
    "NaN": ("events", "price", float("nan"), None, "a dense value is NaN"),
    "number in words": ("events", "price", "much", pl.String, "'much' is not a number"),
    "label 2": ("labels", "click", 2, None, "a label is 2, labels must be 0 or 1"),
    "label 0.5": ("labels", "buy", 0.5, pl.Float64, r"a label is 0\.5, labels must be 0 or 1"),
}


@pytest.mark.cases(6)
@pytest.mark.parametrize("case", list(BAD))
def test_a_wrong_value_is_one_error_with_file_and_row(tmp_path: Path, case: str) -> None:
    kind, column, value, dtype, words = BAD[case]
    events, labels = EVENTS, LABELS
    if column == "event" and dtype is not None:  # all ids are numbers then
        events, labels = (one.with_columns(pl.col("event").str.slice(1).cast(dtype)) for one in (events, labels))
    events = planted(events, column, value, dtype) if kind == "events" else events
    labels = planted(labels, column, value, dtype) if kind == "labels" else labels
    work = run_bad(tmp_path, events, labels, 3)  # the row is the first one of a chunk
    with pytest.raises(DataError, match=words) as raised:
        work.go()
    assert raised.value.where == f"{tmp_path / kind}.parquet, row 4, column '{column}'"
    assert raised.value.remedy


@pytest.mark.parametrize("kind", ["events", "labels"])
def test_times_in_another_unit_are_refused_unless_the_schema_names_it(tmp_path: Path, kind: str) -> None:
    """Read as seconds they would leave no label in its window."""
    frames = {"events": EVENTS, "labels": LABELS}
    frames[kind] = frames[kind].with_columns(pl.col("time") * 1000 + 1_700_000_000_000)
    with pytest.raises(DataError, match="in seconds, and these look like ms") as raised:
        run_bad(tmp_path, frames["events"], frames["labels"], 3).go()
    assert raised.value.where == f"{tmp_path / kind}.parquet, row 1, column 'time'"
    assert '"ms"' in str(raised.value.remedy)


@pytest.mark.parametrize(
    ("kind", "column"),
    [*(("events", one) for one in ("event", "time", "price", "shop", "user")), ("labels", "event"), ("labels", "time")],
)
def test_a_missing_column_is_one_error_with_the_file(tmp_path: Path, kind: str, column: str) -> None:
    frames = {"events": EVENTS, "labels": LABELS}
    frames[kind] = frames[kind].drop(column)
    with pytest.raises(DataError, match=f"column '{column}' is missing") as raised:
        run_bad(tmp_path, frames["events"], frames["labels"], 3).go()
    assert raised.value.where == f"{tmp_path / kind}.parquet"


def test_files_of_labels_need_one_column_of_labels(tmp_path: Path) -> None:
    run_bad(tmp_path, EVENTS, LABELS.drop("buy"), 3).go()
    shutil.rmtree(tmp_path / "out")
    with pytest.raises(DataError, match="column 'click' is missing") as raised:
        run_bad(tmp_path, EVENTS, LABELS.drop(TASKS), 3).go()
    assert raised.value.where == f"{tmp_path / 'labels.parquet'}"


def test_a_column_of_another_type_is_one_error(tmp_path: Path) -> None:
    """Text and numbers go together, other types do not."""
    write(events_of("abcd"), tmp_path / "events" / "1.parquet")
    frame = frame_of(events_of("efgh", 10))
    frame.with_columns(pl.concat_list("shop")).write_parquet(tmp_path / "events" / "2.parquet")
    work = Work(tmp_path, 5, chunk=2, streams={"home": {"events": str(tmp_path / "events")}})
    with pytest.raises(DataError, match="a column is of another type than in the rows before") as raised:
        work.go()
    assert raised.value.where == str(tmp_path / "events" / "2.parquet")


@pytest.mark.parametrize("chunk", [1, 3, 100])
@pytest.mark.parametrize("early", [1, 15])
def test_a_label_before_its_event_is_a_leak(tmp_path: Path, chunk: int, early: int) -> None:
    labels = planted(LABELS, "event", "e5" if early == 15 else "e4")
    labels = planted(labels, "time", 35 if early == 15 else 39)  # of 50 and of 40
    with pytest.raises(DataError, match="the label of event") as raised:
        run_bad(tmp_path, EVENTS, labels, chunk).go()
    assert raised.value.where == f"{tmp_path / 'labels.parquet'}, row 4, column 'time'"


def test_a_label_of_days_before_its_event_is_the_same_with_all_chunks(tmp_path: Path) -> None:
    first = {"event": "e4", "time": -200_000, "click": 1, "buy": 1}
    labels = pl.concat([frame_of([first]), LABELS])
    found = []
    for chunk in (1, 3, 100):
        (tmp_path / f"{chunk}").mkdir()
        work = run_bad(tmp_path / f"{chunk}", EVENTS, labels, chunk)
        try:
            work.go()
            found.append("no error")
        except DataError as error:
            found.append(error.what)
    assert len(set(found)) == 1, found


@pytest.mark.parametrize("chunk", [1, 3, 100])
@pytest.mark.parametrize("in_another", [False, True])
def test_an_id_with_two_times_is_one_error(tmp_path: Path, chunk: int, in_another: bool) -> None:
    """The second one comes while the first one waits for its labels."""
    rows = EVENTS.rows(named=True)
    twice = [*rows[:4], {**rows[2], "time": 42}, *rows[4:]]
    write(rows if in_another else twice, tmp_path / "home.parquet")
    write(twice, tmp_path / "feed.parquet")
    streams = {name: {"events": str(tmp_path / f"{name}.parquet")} for name in ("home", "feed")}
    with pytest.raises(DataError, match="the event 'e3' has the times 30 and 42") as raised:
        Work(tmp_path, 20, chunk=chunk, streams=streams).go()
    assert raised.value.where is not None
    assert raised.value.where.endswith(".parquet, row 5, column 'time'")


def test_an_id_that_comes_again_when_its_event_is_complete_is_another_event(tmp_path: Path) -> None:
    """As long as the event is held, it is an error."""
    rows = EVENTS.rows(named=True)
    for chunk in (1, 3, 100):
        write([*rows, {**rows[1], "time": 85}], tmp_path / f"{chunk}" / "home.parquet")
        streams = {"home": {"events": str(tmp_path / f"{chunk}" / "home.parquet")}}
        work = Work(tmp_path / f"{chunk}", 20, chunk=chunk, streams=streams)
        if chunk == 100:
            with pytest.raises(DataError, match="the event 'e2' has the times 20 and 85"):
                work.go()
            continue
        work.go()
        assert [row["time"] for row in work.examples("home") if row["event"] == "e2"] == [20, 85]


def test_an_id_with_two_times_at_once_is_one_error(tmp_path: Path) -> None:
    rows = EVENTS.rows(named=True)
    write([*rows[:3], {**rows[2], "time": 29}, *rows[3:]], tmp_path / "home.parquet")
    streams = {"home": {"events": str(tmp_path / "home.parquet")}}
    work = Work(tmp_path, 20, 5, chunk=2, streams=streams)
    with pytest.raises(DataError, match="the event 'e3' has the times 29 and 30") as raised:
        work.go()
    assert raised.value.where == f"{tmp_path / 'home.parquet'}, row 3, column 'time'"


@pytest.mark.parametrize("case", ["time", "leak"])
def test_errors_of_text_files_name_the_line(tmp_path: Path, case: str) -> None:
    work = run_bad(tmp_path, EVENTS, LABELS, 100, "csv")
    kind = "events" if case == "time" else "labels"
    lines = (tmp_path / f"{kind}.csv").read_text().splitlines()
    lines[4] = "e4,,2.0,s,1" if case == "time" else "e4,39,1,0"
    lines[2:2] = ["", ""]  # row 4, the fifth line, is the seventh now
    (tmp_path / f"{kind}.csv").write_text("\n".join(lines) + "\n")
    with pytest.raises(DataError) as raised:
        work.go()
    assert raised.value.where == f"{tmp_path / kind}.csv, line 7, column 'time'"


def test_a_corrected_file_is_read_on(tmp_path: Path) -> None:
    """What was read before the error is saved, and is not read again."""
    work = run_bad(tmp_path, planted(EVENTS, "price", float("inf")), LABELS, 1)
    work.window = 5
    with pytest.raises(DataError, match="infinite"):
        work.go()
    assert [row["event"] for row in work.examples("home")] == ["e1", "e2"]
    EVENTS.write_parquet(tmp_path / "events.parquet")
    progress = work.go()
    assert [row["event"] for row in work.examples("home")] == [f"e{i}" for i in range(1, 9)]
    assert progress.counts["events"] == 8


def test_rows_that_are_too_late_are_left_out_and_counted() -> None:
    """One of the watermark's second is in time, one a second older is not."""
    join = LabelJoin(schema_of(), STREAMS, JoinConfig(window_s=20))
    join.add_events("home", frame_of(events_of("ab", 74)), RowPlace("events"), watermark=75)
    assert join.unscored["event"].to_list() == ["b"]
    labels = [{"event": "c", "time": time, "click": 1, "buy": 0} for time in (54, 55)]
    join.add_labels(frame_of(labels), RowPlace("labels"), watermark=75)
    assert join.labels["time"].to_list() == [55]
    assert join.counts["late_events"] == join.counts["late_labels"] == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"window": 30}, "other settings of join"),
        ({"lateness": 1}, "other settings of join"),
        ({"unlabelled": "missing"}, "other settings of join, schema"),
        ({"streams": {"home": {"events": "elsewhere"}}}, "other settings of streams"),
    ],
)
def test_a_folder_of_other_settings_is_refused(tmp_path: Path, change: Row, words: str) -> None:
    work = run_bad(tmp_path, EVENTS, LABELS, 3)
    work.go(finish=False)
    before = work.content()
    with pytest.raises(DataError, match=words) as raised:
        Work(**{**work.__dict__, **change}).go()
    assert raised.value.where == str(tmp_path / "out")
    assert work.content() == before
    Work(**{**work.__dict__, "chunk": 5}).go()  # no example depends on it


def test_a_finished_folder_takes_no_more_rows(tmp_path: Path) -> None:
    write(events_of("abcd"), tmp_path / "events" / "1.parquet")
    work = Work(tmp_path, 5, streams={"home": {"events": str(tmp_path / "events")}})
    work.go()
    before = work.content()
    for finish in (True, False):
        assert work.go(finish=finish).is_finished
    assert work.content() == before
    write(events_of("efgh", 10), tmp_path / "events" / "2.parquet")
    for finish in (True, False):
        with pytest.raises(DataError, match="was finished, and cannot take new rows") as raised:
            work.go(finish=finish)
        assert raised.value.where == str(tmp_path / "out")
    assert work.content() == before


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"timestamp": None}, r"name schema\.timestamp"),
        ({"ids": ()}, r"first in schema\.ids"),
        ({"teacher": TeacherColumns(scores={"click": "score"})}, r"leave schema\.teacher"),
    ],
)
def test_schemas_without_time_or_id_are_refused(tmp_path: Path, change: Row, words: str) -> None:
    config = Work(tmp_path).config()
    schema = Schema.model_validate({**schema_of().model_dump(), **change})
    with pytest.raises(ValidationError, match=words):
        AugmentationConfig.model_validate({**config.model_dump(exclude={"schema_"}), "schema": schema})


@pytest.mark.parametrize("name", ["teacher_age", "__join_row"])
def test_columns_that_only_augmentation_makes_are_refused(tmp_path: Path, name: str) -> None:
    content = Work(tmp_path).config().model_dump(exclude={"schema_"})
    dense = (DenseFeature(name=name),)
    with pytest.raises(ValidationError, match=name):
        AugmentationConfig.model_validate({**content, "schema": schema_of().model_copy(update={"dense": dense})})


@pytest.mark.parametrize(
    "change",
    [{"dense": (DenseFeature(name="time"),)}, {"group": "event"}, {"ids": ("event", "time")}],
    ids=["time is a number", "id is the group", "time is an id"],
)
def test_a_column_may_have_several_roles(change: Row) -> None:
    join = LabelJoin(schema_of().model_copy(update=change), ("home",), JoinConfig(window_s=5))
    join.add_events("home", EVENTS, RowPlace("events"), -END)
    join.hold(join.ready(END))
    found = join.of_stream(join.complete(END), "home")
    assert found["event"].to_list() == EVENTS["event"].to_list()
    assert found["time"].to_list() == EVENTS["time"].to_list()


def test_streams_without_events_are_one_error(tmp_path: Path) -> None:
    """Labels may come later, until the last call."""
    (tmp_path / "events").mkdir()
    (tmp_path / "labels").mkdir()
    sources = {name: str(tmp_path / name) for name in ("events", "labels")}
    work = Work(tmp_path, streams={"home": sources})
    with pytest.raises(DataError, match="holds no files") as raised:
        work.go(finish=False)
    assert raised.value.where == str(tmp_path / "events")
    EVENTS.write_parquet(tmp_path / "events" / "1.parquet")
    assert work.go(finish=False).waiting == 8
    with pytest.raises(DataError, match="holds no files") as raised:
        work.go()
    assert raised.value.where == str(tmp_path / "labels")
    LABELS.write_parquet(tmp_path / "labels" / "1.parquet")
    work.go()
    assert [row["click"] for row in work.examples("home")] == LABELS["click"].to_list()


def test_labels_have_one_place() -> None:
    with pytest.raises(ValidationError, match="label_timestamp is for labels in the rows of the events"):
        EventStreamConfig(events="a", labels="b", label_timestamp="c")


# The folder -----------------------------------------------------------------------------------------------------------


def commit(folder: StreamFolder, number: int) -> None:
    """A commit whose content tells its number; the second one has no part for ``feed``."""
    frame = pl.DataFrame({"number": [number] * 3})
    empty = pl.DataFrame({"number": []}, schema={"number": pl.Int64})
    parts = {"home": frame, "feed": empty if number == 2 else frame, "mail": empty}
    folder.commit({"waits": frame, "nothing": pl.DataFrame()}, {"number": number}, parts)


def opened(place: Path) -> tuple[StreamFolder, Any]:
    folder = StreamFolder(place, STREAMS)
    with folder.lock():
        return folder, folder.restore()


def parts_of(place: Path) -> dict[str, list[int]]:
    """Numbers of the commits whose parts there are, by stream; each part holds what it was given."""
    found = {}
    for stream in STREAMS:
        paths = sorted(path for path in (place / stream).iterdir())
        found[stream] = [int(path.name[5:13]) for path in paths]
        for path, number in zip(paths, found[stream], strict=True):
            assert path.name == f"part-{number:08d}.parquet"
            assert pl.read_parquet(path)["number"].to_list() == [number] * 3
    return found


def test_commits_are_read_again(tmp_path: Path) -> None:
    assert opened(tmp_path)[1] is None
    for number in range(1, 4):
        folder, _ = opened(tmp_path)
        commit(folder, number)
        frames, content = opened(tmp_path)[1]
        assert content == {"number": number}
        assert frames["waits"]["number"].to_list() == [number] * 3
        assert frames["nothing"].shape == (0, 0)
    assert parts_of(tmp_path) == {"home": [1, 2, 3], "feed": [1, 3], "mail": []}
    assert [path.name for path in (tmp_path / "state").iterdir()] == ["00000003"]


class Cut:
    """Stops whatever runs at one of its operations on the disk, before or after it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left, self.is_after = -1, False
        places = [(os, "replace"), (os, "rename"), (os, "fsync"), (os, "open"), (shutil, "rmtree")]
        for owner, name in [*places, (pl.DataFrame, "write_parquet"), (Path, "mkdir"), (Path, "unlink")]:
            monkeypatch.setattr(owner, name, self._wrapped(getattr(owner, name)))

    def _wrapped(self, act: Any) -> Any:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if self.left < 0:
                return act(*args, **kwargs)
            self.left -= 1
            if self.left < 0 and not self.is_after:
                raise KeyboardInterrupt
            result = act(*args, **kwargs)
            if self.left < 0:
                raise KeyboardInterrupt
            return result

        return wrapped


def test_a_part_that_cannot_be_renamed_is_there_at_the_next_opening(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = opened(tmp_path)
    commit(folder, 1)
    rename = os.replace

    def full(source: Path, target: Path) -> None:
        if Path(target).name == "part-00000002.parquet":
            raise OSError(errno.ENOSPC, "no space")
        rename(source, target)

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(DataError, match="full"):
        commit(folder, 2)
    monkeypatch.setattr(os, "replace", rename)
    _, (_, content) = opened(tmp_path)
    assert content["number"] == 2
    assert parts_of(tmp_path) == {"home": [1, 2], "feed": [1], "mail": []}


def test_a_commit_that_is_cut_off_anywhere_is_whole_or_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So is opening the folder afterwards."""
    folder, _ = opened(tmp_path / "start")
    commit(folder, 1)
    cut, operations, seen = Cut(monkeypatch), 0, set()
    for is_after in (False, True):
        for at in range(100):
            place = tmp_path / f"{is_after}{at}"
            shutil.copytree(tmp_path / "start", place)
            folder, _ = opened(place)
            cut.left, cut.is_after = at, is_after
            try:
                commit(folder, 2)
                was_cut = False
            except KeyboardInterrupt:
                was_cut = True
            cut.left = at // 2 if was_cut else -1
            with contextlib.suppress(KeyboardInterrupt):
                opened(place)
            cut.left = -1
            folder, (frames, content) = opened(place)
            seen.add(content["number"])
            assert frames["waits"]["number"].to_list() == [content["number"]] * 3
            newest = content["number"]
            assert parts_of(place) == {"home": [1, 2][:newest], "feed": [1], "mail": []}
            for number in range(newest + 1, 4):
                commit(folder, number)
            opened(place)
            assert parts_of(place) == {"home": [1, 2, 3], "feed": [1, 3], "mail": []}
            assert [path.name for path in (place / "state").iterdir()] == ["00000003"]
            if not was_cut:
                operations = at
                break
    assert operations > 8
    assert seen == {1, 2}


def test_what_belongs_to_no_commit_is_removed_and_nothing_else(tmp_path: Path) -> None:
    folder, _ = opened(tmp_path)
    for number in (1, 2):
        commit(folder, number)
    ours = ["home/.part-00000003.parquet.tmp", "home/part-00000003.parquet", "feed/part-00000009.parquet"]
    theirs = ["home/run/part-00000009.parquet", "home/notes.txt", "versions/part-00000009.parquet"]
    for name in (*ours, *theirs):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    shutil.copytree(tmp_path / "state" / "00000002", tmp_path / "state" / "00000001")
    opened(tmp_path)
    assert not [name for name in ours if (tmp_path / name).exists()]
    assert [name for name in theirs if (tmp_path / name).exists()] == theirs
    assert [path.name for path in (tmp_path / "state").iterdir()] == ["00000002"]


def test_a_damaged_state_is_one_error(tmp_path: Path, fuzz_inputs: Callable[[int], int]) -> None:
    rng = random.Random(1)
    folder, _ = opened(tmp_path)
    commit(folder, 1)
    files = sorted((tmp_path / "state" / "00000001").iterdir())
    assert [path.name for path in files] == ["nothing.parquet", "state.json", "waits.parquet"]
    for path in files:
        kept = path.read_bytes()
        changed = [flips(kept, rng) for _ in range(fuzz_inputs(60))]
        for content in [*changed, kept[:-1], kept[: len(kept) // 2], b"", kept + b"x", None]:
            if content is None:
                path.unlink()
            else:
                path.write_bytes(content)
            with pytest.raises(DataError) as raised:
                opened(tmp_path)
            assert str(path) in str(raised.value)
            assert "delete the folder and augment again" in str(raised.value)
        path.write_bytes(kept)
    assert parts_of(tmp_path) == {"home": [1], "feed": [1], "mail": []}
    opened(tmp_path)


def test_a_missing_part_is_one_error(tmp_path: Path) -> None:
    folder, _ = opened(tmp_path)
    commit(folder, 1)
    (tmp_path / "feed" / "part-00000001.parquet").unlink()
    with pytest.raises(DataError, match="part is missing") as raised:
        opened(tmp_path)
    assert raised.value.where == str(tmp_path / "feed" / "part-00000001.parquet")


HOLDER = """
import fcntl, os, sys
descriptor = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
fcntl.flock(descriptor, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


def test_one_process_at_a_time_writes(tmp_path: Path) -> None:
    work = run_bad(tmp_path, EVENTS, LABELS, 3)
    work.go(finish=False)
    before = work.content()
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "out" / ".lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(DataError, match="another process writes into it") as raised:
            work.go()
        assert raised.value.where == str(tmp_path / "out")
        holder.stdin.close()
        assert holder.wait(30) == 0
    assert work.content() == before
    work.go()
    assert len(work.examples("home")) == 8


def test_a_file_without_rows_is_no_error(tmp_path: Path) -> None:
    """An hour may pass without an event."""
    EVENTS.head(4).write_parquet(tmp_path / "a.parquet")
    EVENTS.head(0).write_parquet(tmp_path / "b.parquet")
    EVENTS.tail(4).write_parquet(tmp_path / "c.parquet")
    work = Work(tmp_path, 5, chunk=3, streams={"home": {"events": str(tmp_path / "*.parquet")}})
    assert work.go().counts["events"] == 8
    assert [row["event"] for row in work.examples("home")] == [f"e{i}" for i in range(1, 9)]


def test_files_are_listed_once_a_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A year of hourly files would otherwise be listed thousands of times."""
    for name in range(20):
        write(events_of("abc"), tmp_path / f"{name:02d}.parquet")
    listed: list[Any] = []
    expand = stream_sources.expand_paths
    monkeypatch.setattr(stream_sources, "expand_paths", lambda paths: listed.append(paths) or expand(paths))
    source = source_of(str(tmp_path), 2)
    rest_of(source)
    assert len(listed) == 2  # at the begin, and for files that came meanwhile
