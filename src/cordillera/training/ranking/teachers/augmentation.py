"""Augmentation of streams: labels that arrive late are joined to their events, and a teacher scores each event once.

Source: ExFM (arXiv 2502.17494), data augmentation service: the streams of all students are one shared data set, the
teacher is called once for each example while its labels are awaited, and students read their part. Order, watermarks
and the protocol of commits are ours.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, model_validator

from cordillera.data.ranking.features import Schema
from cordillera.data.ranking.logs.columns import RowPlace, groups_of
from cordillera.data.ranking.stream.config import EventStreamConfig, JoinConfig, StreamName, check_stream_schema
from cordillera.data.ranking.stream.join import END, LabelJoin
from cordillera.data.ranking.stream.parts import StreamFolder
from cordillera.data.ranking.stream.sources import FileSource
from cordillera.errors import DataError
from cordillera.training.ranking.teachers.past import PastConfig, PastEmbeddings
from cordillera.training.ranking.teachers.versions import EMBEDDING, LearningTeacherConfig, StreamTeacher


class AugmentationConfig(BaseModel):
    """Streams, their teacher, and where the augmented examples go.

    Attributes:
        out: Folder of the augmented examples: ``out/STREAM/*.parquet``.
        schema_: Roles of the columns (``schema`` in a file); the first of ``ids`` identifies events.
        join: How events meet their labels.
        streams: Files by the name of their stream.
        teacher: Teacher that learns from the streams. None with ``teacher_run``.
        teacher_run: Folder of a finished run that scores all events.
        past: Embeddings of the teacher for past events of the same ``schema.group``. Default: none.
        chunk_rows: Number of rows that are read at a time, and after which all is saved.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    out: str
    schema_: Schema = Field(alias="schema")
    join: JoinConfig
    streams: dict[StreamName, EventStreamConfig] = Field(min_length=1)
    teacher: LearningTeacherConfig | None = None
    teacher_run: str | None = None
    past: PastConfig | None = None
    chunk_rows: int = Field(65_536, ge=1, le=2**24)

    @model_validator(mode="after")
    def _fits(self) -> AugmentationConfig:
        check_stream_schema(self.schema_)
        if (self.teacher is None) == (self.teacher_run is None):
            raise ValueError("give either [teacher], which learns, or teacher_run, which is finished")
        if self.join.unlabelled == "missing" and not self.schema_.missing_labels:
            raise ValueError("join.unlabelled = 'missing' needs schema.missing_labels = true")
        if self.past is not None and self.schema_.group is None:
            raise ValueError("past events are those of a group: name schema.group")
        if self.past is not None and self.past.label not in (None, *self.schema_.labels):
            raise ValueError(f"past.label {self.past.label!r} is no label")
        if reserved := sorted({"state", "versions"} & set(self.streams)):
            raise ValueError(f"a stream cannot be named {reserved[0]!r}")
        return self


@dataclass
class AugmentationProgress:
    """What augmentation has done until now.

    Attributes:
        counts: Numbers of rows, as in :class:`~cordillera.data.ranking.stream.join.LabelJoin`.
        calls: Number of events that the teacher has scored, by version.
        examples: Number of examples written, by stream.
        waiting: Number of events that are not complete.
        watermark: Time until which everything has been read, in seconds; None before the first row.
        awaited: Source whose rows are awaited, with its time; empty if everything is written.
        is_finished: Whether all windows were closed.
    """

    counts: dict[str, int] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    examples: dict[str, int] = field(default_factory=dict)
    waiting: int = 0
    watermark: int | None = None
    awaited: str = ""
    is_finished: bool = False


class Augmentation:
    """One pass over the files of streams, which can end and go on at any row.

    Args:
        config: Settings.
        teacher: Teacher.
        folder: Folder of the examples, which must be locked.
    """

    def __init__(self, config: AugmentationConfig, teacher: StreamTeacher, folder: StreamFolder) -> None:
        self.config, self.teacher, self.folder = config, teacher, folder
        self.join = LabelJoin(config.schema_, tuple(config.streams), config.join)
        self.sources: dict[str, tuple[str, bool, FileSource]] = {}
        for name, stream in config.streams.items():
            paths = {"events": stream.events, "labels": stream.labels}
            for kind, given in paths.items():
                if given is not None:
                    title = f"streams.{name}.{kind}"
                    source = FileSource(title, given, config.schema_, stream.format, config.chunk_rows)
                    self.sources[title] = name, kind == "events", source
        self.past = None if config.past is None else PastEmbeddings(config.past, config.join.window_s)
        self.progress = AugmentationProgress(examples=dict.fromkeys(config.streams, 0))
        self.watermark = -END
        self._restore()

    def _restore(self) -> None:
        found = self.folder.restore()
        if found is None:
            return
        frames, state = found
        asked = self._identity()
        if state["identity"] != asked:
            changed = sorted(key.rstrip("_") for key in asked if state["identity"].get(key) != asked[key])
            raise DataError(
                f"was made with other settings of {', '.join(changed) or 'its streams'}",
                where=str(self.folder.folder),
                remedy="name another folder with out, or restore the settings",
            )
        self.join.load_state(frames, state["counts"])
        self.teacher.load_state({k.removeprefix("teacher_"): v for k, v in frames.items()}, state["teacher"])
        if self.past is not None:
            self.past.load_frame(frames["past"])
        for title, position in state["sources"].items():
            self.sources[title][2].load_state(position)
        self.watermark = state["watermark"]
        self.progress = AugmentationProgress(**state["progress"])

    def _identity(self) -> dict[str, Any]:
        """Return the settings that examples depend on."""
        settings = self.config.model_dump(mode="json", exclude={"out", "chunk_rows"})
        for stream in settings["streams"].values():
            del stream["student"]
        return settings

    def run(self, *, finish: bool = False, on_step: Callable[[AugmentationProgress], None] | None = None) -> None:
        """Read all rows that there are, and write the examples that are complete.

        Args:
            finish: Whether no more files will come, so that all windows are closed at the end.
            on_step: Function that is called after every commit.

        Raises:
            DataError: If a file is wrong; what was read before it is saved.
        """
        for _, are_events, source in self.sources.values():
            if finish or (are_events and not self.progress.counts):
                source.check()
        ended: set[str] = set()
        while len(ended) < len(self.sources):
            # the source that holds the watermark back; without it nothing can be completed
            title = min(self.sources, key=lambda one: (one in ended, self._time(one)))
            least = min(map(self._time, self.sources))
            if not finish and self._time(title) > least:
                break
            piece = self.sources[title][2].next()
            if piece is None:
                ended.add(title)
                continue
            if self.progress.is_finished:
                raise DataError(
                    "was finished, and cannot take new rows",
                    where=str(self.folder.folder),
                    remedy="augment into another folder, and give --finish only when no more files will come",
                )
            self._read(title, *piece)
            known = [END if finish and one in ended else self._time(one) for one in self.sources]
            self._advance(min(known), on_step)
        if finish and not self.progress.is_finished:
            self.progress.is_finished = True
            self._advance(END, on_step)
        slowest = min(self.sources, key=self._time)
        self.progress.awaited = slowest if self.progress.waiting and not self.progress.is_finished else ""

    def _time(self, title: str) -> int:
        """Return the watermark of a source."""
        latest = self.sources[title][2].latest
        return -END if latest is None else latest - self.config.join.lateness_s

    def _read(self, title: str, frame: pl.DataFrame, place: Any) -> None:
        stream, are_events, source = self.sources[title]
        if are_events:
            config = self.config.streams[stream]
            latest = self.join.add_events(stream, frame, place, self.watermark, config.label_timestamp)
        else:
            latest = self.join.add_labels(frame, place, self.watermark)
        source.latest = latest if source.latest is None else max(source.latest, latest)

    def _advance(self, watermark: int, on_step: Callable[[AugmentationProgress], None] | None) -> None:
        """Complete all that is complete at a watermark, and save."""
        self.watermark = max(self.watermark, watermark)
        join, time = self.join, self.join.time
        ready = join.ready(self.watermark)
        join.hold(ready)
        complete = join.complete(self.watermark)
        self.teacher.learn(complete)  # before scoring: a version scores all events from its time on
        if len(ready):
            scores = self.teacher.score(ready, ready[time].to_numpy())
            complete, join.scored = (_filled(frame, scores, ready, join.id) for frame in (complete, join.scored))
        if self.past is not None:
            columns = self.past.columns(*self._keys(ready), complete, *self._keys(complete))
            added = ready.select(join.id).with_columns(columns) if len(ready) else ready
            complete, join.scored = (_filled(frame, added, ready, join.id) for frame in (complete, join.scored))
            complete = complete.drop(EMBEDDING, strict=False)
        parts = {name: join.of_stream(complete, name) for name in self.config.streams}
        self._commit(parts)
        if on_step is not None:
            on_step(self.progress)

    def _keys(self, events: pl.DataFrame) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return times and groups of events."""
        if not len(events):
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        group = self.config.schema_.group or ""
        return events[self.join.time].to_numpy(), groups_of(events[group], group, RowPlace("events of a stream"))

    def _commit(self, parts: dict[str, pl.DataFrame]) -> None:
        progress = self.progress
        for name, part in parts.items():
            progress.examples[name] += len(part)
        frames, counts = self.join.to_state()
        of_teacher, state = self.teacher.to_state()
        if self.past is not None:
            frames = frames | {"past": self.past.to_frame()}
        progress.counts, progress.calls = counts, dict(state["calls"])
        progress.waiting = len(self.join.unscored) + len(self.join.scored)
        progress.watermark = None if abs(self.watermark) >= END else self.watermark
        content = {
            "identity": self._identity(),
            "counts": counts,
            "teacher": state,
            "sources": {title: source.to_state() for title, (_, _, source) in self.sources.items()},
            "watermark": self.watermark,
            "progress": asdict(progress) | {"awaited": ""},
        }
        self.folder.commit(frames | {f"teacher_{name}": one for name, one in of_teacher.items()}, content, parts)


def _filled(frame: pl.DataFrame, added: pl.DataFrame, ready: pl.DataFrame, key: str) -> pl.DataFrame:
    """Return a frame with the columns of ``added`` that ``ready`` has not, for the events that are in it."""
    names = [name for name in added.columns if name not in ready.columns]
    if not len(frame) or not names:
        return frame
    joined = frame.join(added.select(key, *names), on=key, how="left", maintain_order="left", suffix="__new")
    both = [name for name in names if name in frame.columns]
    joined = joined.with_columns(pl.coalesce(name, f"{name}__new").alias(name) for name in both)
    return joined.drop([f"{name}__new" for name in both])
