"""Events of several streams joined with labels that arrive later, in time order.

A source's rows of times before its *watermark*, the latest time read less the lateness, are all there. Whatever happens
here is a function of event times and of the least watermark of all sources: results do not depend on how files are cut
into chunks, or on the order of rows that are not later than the lateness allows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import polars as pl

from cordillera.data.ranking.features import Schema
from cordillera.data.ranking.logs.columns import (
    RowPlace,
    column_of,
    dense_of,
    ids_of,
    labels_of,
    timestamps_of,
    unit_of,
    with_numbers,
)
from cordillera.data.ranking.stream.config import JoinConfig
from cordillera.errors import DataError

_EARLY_S = 86_400  # longest time by which a label that precedes its event is recognised

END = 2**61
"""Watermark at which no more rows come."""

_OWN = "__join_"  # prefix of columns that only the join needs
_MEMBER = f"{_OWN}in:"  # prefix of columns that mark the streams of an event
_ORDER, _FILE, _ROW = f"{_OWN}order", f"{_OWN}file", f"{_OWN}row"  # columns with the origin of an event's row
_EVENT, _TIMES = f"{_OWN}event", f"{_OWN}times"


class LabelJoin:
    """Events that wait for their time to be complete, and then for their labels.

    Args:
        schema: Columns of the events; the first of ``ids`` identifies events.
        streams: Names of the streams.
        config: Settings.

    Attributes:
        unscored: Events at or after the newest watermark, one row for each id.
        scored: Events before the watermark, which wait for their labels; columns may be added to them.
        labels: Labels of events that are not complete.
        counts: Numbers of rows: ``events`` and ``labels`` read, ``duplicates`` of events merged, ``late_events`` and
            ``late_labels`` dropped, ``labels_after_window``, ``labels_without_event``, ``examples`` taken.
    """

    def __init__(self, schema: Schema, streams: Sequence[str], config: JoinConfig) -> None:
        assert schema.timestamp is not None
        self.schema, self.streams, self.config = schema, tuple(streams), config
        self.id, self.time = schema.ids[0], schema.timestamp
        self._early_s = max(config.window_s, _EARLY_S)
        self.unscored, self.scored, self.labels = pl.DataFrame(), pl.DataFrame(), pl.DataFrame()
        self.counts: Counter[str] = Counter()
        features = [feature.name for feature in (*schema.dense, *schema.categorical, *schema.lists)]
        others = [name for name in (*schema.ids[1:], schema.group, schema.weight) if name is not None]
        self._kept = [name for name in dict.fromkeys((*features, *others)) if name not in (self.id, self.time)]

    def add_events(
        self, stream: str, frame: pl.DataFrame, place: RowPlace, watermark: int, label_timestamp: str | None = None
    ) -> int:
        """Add rows of a stream's events, and their labels if these have columns in them; return their latest time.

        Args:
            watermark: The newest one, before these rows; earlier rows are dropped and counted.
            label_timestamp: Column with the time of the labels; None for that of the event.

        Raises:
            DataError: If a column is missing, a value is wrong, or an id has two times.
        """
        ids, times = self._keys(frame, place)
        latest = int(times.max())
        frame = with_numbers(frame, self.schema, place)
        for number in self.schema.numbers:
            dense_of(column_of(frame, number.name, place), number, place)
        new = pl.DataFrame({self.id: ids, self.time: times})
        new = new.with_columns(column_of(frame, name, place) for name in self._kept)
        new = new.with_columns(pl.lit(name == stream).alias(_MEMBER + name) for name in self.streams)
        order = pl.lit(self.streams.index(stream), dtype=pl.Int32).alias(_ORDER)
        new = new.with_columns(order, *_places_of(place, len(frame)))
        held = [name for name in self.schema.labels if name in frame.columns]
        if held:
            known = times if label_timestamp is None else self._times(frame, label_timestamp, place)
            self._add_labels(ids, known, frame, held, place)
        is_late = times < watermark
        self.counts["events"] += len(new)
        self.counts["late_events"] += int(is_late.sum())
        self._refuse_other_times(new)
        new = new.filter(~is_late)
        self.unscored = self._merged(_concat([self.unscored, new], place))
        return latest

    def _refuse_other_times(self, events: pl.DataFrame) -> None:
        """Refuse ids of events that wait for their labels, with another time."""
        if not len(self.scored):
            return
        waiting = self.scored.select(self.id, pl.col(self.time).alias(_EVENT))
        both = events.join(waiting, on=self.id, how="inner").filter(pl.col(self.time) != pl.col(_EVENT))
        if len(both):
            row = both.sort(_FILE, _ROW).row(0, named=True)
            self._refuse_times(row[self.id], sorted((row[_EVENT], row[self.time])), row[_FILE], row[_ROW])

    def _refuse_times(self, name: str, times: Sequence[int], file: str, row: int) -> None:
        raise DataError(
            f"the event '{name}' has the times {times[0]} and {times[1]}",
            where=f"{file} {row}, column '{self.time}'",
            remedy=f"'{self.id}' must name one event, with the same time in every stream",
        )

    def _merged(self, events: pl.DataFrame) -> pl.DataFrame:
        """Return one row for each id, with the streams of all of its rows."""
        if not len(events) or not events[self.id].is_duplicated().any():
            return events
        members = [pl.col(_MEMBER + name).max() for name in self.streams]
        found = events.group_by(self.id).agg(*members, pl.col(self.time).n_unique().alias(_TIMES))
        if (found[_TIMES] > 1).any():
            wrong = found.filter(pl.col(_TIMES) > 1)[self.id].sort()[0]
            rows = events.filter(pl.col(self.id) == wrong).sort(self.time)
            times = rows[self.time].to_list()
            self._refuse_times(wrong, (times[0], times[-1]), rows[_FILE][-1], rows[_ROW][-1])
        kept = events.sort(_ORDER, _FILE, _ROW).unique(self.id, keep="first", maintain_order=True)
        self.counts["duplicates"] += len(events) - len(kept)
        names = [_MEMBER + name for name in self.streams]
        return kept.drop(names).join(found.select(self.id, *names), on=self.id, how="left").select(events.columns)

    def add_labels(self, frame: pl.DataFrame, place: RowPlace, watermark: int) -> int:
        """Add rows of labels, and return their latest time.

        Args:
            watermark: The newest one, before these rows; rows of complete events are dropped and counted.

        Raises:
            DataError: If the id, the time or every label is missing, or a value is wrong.
        """
        ids, times = self._keys(frame, place)
        held = [name for name in self.schema.labels if name in frame.columns]
        if not held:
            column_of(frame, self.schema.labels[0], place)
        is_late = times < watermark - self.config.window_s
        self.counts["late_labels"] += int(is_late.sum())
        self._add_labels(ids, times, frame, held, place, ~is_late)
        return int(times.max())

    def _add_labels(
        self,
        ids: pl.Series,
        times: np.ndarray,
        frame: pl.DataFrame,
        names: Sequence[str],
        place: RowPlace,
        keep: np.ndarray | None = None,
    ) -> None:
        new = pl.DataFrame({self.id: ids, self.time: times})
        for name in self.schema.labels:
            values: Any = pl.lit(None, dtype=pl.UInt8)
            if name in names:
                found = labels_of(column_of(frame, name, place), name, place, may_miss=True)
                values = pl.Series(found).replace(255, None)
            new = new.with_columns(values.alias(name))
        new = new.with_columns(*_places_of(place, len(frame)))
        known = pl.any_horizontal(pl.col(name).is_not_null() for name in self.schema.labels)
        new = new.filter(known if keep is None else known & pl.Series(keep))
        self.counts["labels"] += len(new)
        self.labels = _concat([self.labels, new], place)

    def ready(self, watermark: int) -> pl.DataFrame:
        """Take the events before the watermark that were not taken yet, in order of time and id."""
        if not len(self.unscored):
            return self.unscored
        is_ready = pl.col(self.time) < watermark
        found = self.unscored.filter(is_ready).sort(self.time, self.id)
        self.unscored = self.unscored.filter(~is_ready)
        return found

    def hold(self, events: pl.DataFrame) -> None:
        """Keep events that were taken by :meth:`ready` until their labels arrive."""
        if len(events):
            self.scored = pl.concat([self.scored, events], how="diagonal_relaxed") if len(self.scored) else events

    def complete(self, watermark: int) -> pl.DataFrame:
        """Return the events whose window is over before the watermark, with their labels, in order of time and id.

        Raises:
            DataError: If a label is earlier than its event.
        """
        if not len(self.scored):
            self._forget_labels(watermark)
            return self.scored
        is_due = pl.col(self.time) < watermark - self.config.window_s
        due = self.scored.filter(is_due).sort(self.time, self.id)
        self.scored = self.scored.filter(~is_due)
        due = self._with_labels(due)
        self._forget_labels(watermark)
        self.counts["examples"] += len(due)
        return due

    def _with_labels(self, events: pl.DataFrame) -> pl.DataFrame:
        tasks, config = self.schema.labels, self.config
        if not len(self.labels):
            events = events.with_columns(pl.lit(None, dtype=pl.UInt8).alias(task) for task in tasks)
        else:
            keys = events.select(self.id, pl.col(self.time).alias(_EVENT))
            hits = self.labels.join(keys, on=self.id, how="inner")
            # labels of long before their event may have been forgotten, and count as those of none
            hits = hits.filter(pl.col(self.time) >= pl.col(_EVENT) - self._early_s)
            early = hits.filter(pl.col(self.time) < pl.col(_EVENT))
            if len(early):
                row = early.sort(_FILE, _ROW).row(0, named=True)
                raise DataError(
                    f"the label of event '{row[self.id]}' is of {row[self.time]}, the event of {row[_EVENT]}",
                    where=f"{row[_FILE]} {row[_ROW]}, column '{self.time}'",
                    remedy="a label that is known before its event is a leak; correct the times",
                )
            inside = hits.filter(pl.col(self.time) <= pl.col(_EVENT) + config.window_s)
            self.counts["labels_after_window"] += len(hits) - len(inside)
            for task in tasks:
                newest = inside.filter(pl.col(task).is_not_null()).sort(self.time, task)
                newest = newest.select(self.id, task).unique(self.id, keep="last", maintain_order=True)
                events = events.join(newest, on=self.id, how="left", maintain_order="left")
            self.labels = self.labels.join(keys, on=self.id, how="anti")
        if config.unlabelled == "zero":
            return events.with_columns(pl.col(task).fill_null(0) for task in tasks)
        if config.unlabelled == "drop":
            return events.filter(pl.any_horizontal(pl.col(task).is_not_null() for task in tasks))
        return events

    def _forget_labels(self, watermark: int) -> None:
        """Drop labels whose event would be complete by now, had it come.

        They are kept for a while longer, so that a label which is earlier than its event is found.
        """
        if len(self.labels):
            oldest = watermark - self.config.window_s - self._early_s
            kept = self.labels.filter(pl.col(self.time) >= oldest)
            self.counts["labels_without_event"] += len(self.labels) - len(kept)
            self.labels = kept

    def of_stream(self, examples: pl.DataFrame, stream: str) -> pl.DataFrame:
        """Return the rows of a stream: its id, time, features, labels, and the columns that were added."""
        if not len(examples):
            return plain(examples)
        found = plain(examples.filter(pl.col(_MEMBER + stream)))
        first = [self.id, self.time, *self._kept, *self.schema.labels]
        return found.select(*first, *(name for name in found.columns if name not in first))

    def _keys(self, frame: pl.DataFrame, place: RowPlace) -> tuple[pl.Series, np.ndarray]:
        ids = ids_of(column_of(frame, self.id, place), self.id, place, whole=True)
        if ids.null_count():
            row = int(ids.is_null().arg_max() or 0)
            raise DataError("the id of an event is blank", where=place.at(row, self.id), remedy="give every row its id")
        return ids, self._times(frame, self.time, place)

    def _times(self, frame: pl.DataFrame, name: str, place: RowPlace) -> np.ndarray:
        times = timestamps_of(column_of(frame, name, place), name, place, self.schema.timestamp_unit)
        if (np.abs(times) >= END // 4).any():
            row = int(np.argmax(np.abs(times) >= END // 4))
            raise DataError(
                f"{times[row]} is no time in seconds", where=place.at(row, name), remedy="give times in seconds"
            )
        if self.schema.timestamp_unit is None and (unit := unit_of(times)) != "s":  # later rows may differ
            raise DataError(
                f"times since 1970 are read in seconds, and these look like {unit}",
                where=place.at(0, name),
                remedy=f'set schema.timestamp_unit = "{unit}", or "s" if it is right',
            )
        return times

    def to_state(self) -> tuple[dict[str, pl.DataFrame], dict[str, Any]]:
        """Return all that waits, as frames, and the counts."""
        return {"unscored": self.unscored, "scored": self.scored, "labels": self.labels}, dict(self.counts)

    def load_state(self, frames: dict[str, pl.DataFrame], counts: dict[str, Any]) -> None:
        """Go on from :meth:`to_state`."""
        self.unscored, self.scored, self.labels = frames["unscored"], frames["scored"], frames["labels"]
        self.counts = Counter(counts)


def plain(frame: pl.DataFrame) -> pl.DataFrame:
    """Return a frame without the columns that only the join needs."""
    return frame.drop([name for name in frame.columns if name.startswith(_OWN)])


def _places_of(place: RowPlace, count: int) -> list[pl.Expr | pl.Series]:
    """Return columns with the places of rows: file and unit, and number."""
    kept = np.arange(count) if place.kept is None else place.kept
    file = pl.lit(f"{place.source}, {place.unit}").alias(_FILE)
    return [file, pl.Series(_ROW, (place.first_row + kept).astype(np.int64))]


def _concat(frames: Sequence[pl.DataFrame], place: RowPlace) -> pl.DataFrame:
    """Join frames of one set of columns; numbers of several types become those that hold all."""
    filled = [frame for frame in frames if len(frame)]
    if not filled:
        return frames[-1]
    try:
        return pl.concat([frame.select(filled[0].columns) for frame in filled], how="vertical_relaxed")
    except pl.exceptions.PolarsError as error:
        raise DataError(
            f"a column is of another type than in the rows before ({error})",
            where=place.source,
            remedy="write the column in one type in all files",
        ) from error
