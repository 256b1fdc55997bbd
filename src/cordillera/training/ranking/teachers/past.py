"""A teacher's embeddings of past events as features of later ones.

Source: LoopFM (arXiv 2605.29280, abstract): intermediate embeddings of a foundation model for past events are inputs of
smaller models, which a distilled score alone cannot replace. Here an event is given the mean over the newest events of
its group whose labels were complete before it; the choice of a mean, and of 8-bit rows, is ours.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from cordillera.numerics.quantization.rows import dequantize_rows, quantize_rows
from cordillera.training.ranking.teachers.versions import EMBEDDING, VERSION

PAST, PAST_EVENTS, PAST_VERSION = "teacher_past", "teacher_past_events", "teacher_past_version"
"""Columns of augmented events: mean embedding, number of events in it, and the oldest version of the teacher in it."""


class PastConfig(BaseModel):
    """Embeddings of past events.

    Attributes:
        events: Largest number of events of a group in the mean, the newest ones.
        label: Label that must be 1 for an event to count. Default: all events count.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    events: int = Field(50, ge=1, le=10**4)
    label: str | None = None


class _PastEvent(NamedTuple):
    """Embedding of one event: its row of 8-bit numbers, these numbers, and the version of the teacher."""

    row: bytes
    values: NDArray[np.float32]
    version: int


class PastEmbeddings:
    """Embeddings of the newest complete events of every group.

    Args:
        config: Settings.
        window_s: Seconds after an event in which its labels count.
    """

    def __init__(self, config: PastConfig, window_s: int) -> None:
        self.config, self.window_s = config, window_s
        self._groups: dict[int, deque[_PastEvent]] = {}

    def columns(
        self,
        times: NDArray[np.int64],
        groups: NDArray[np.int64],
        complete: pl.DataFrame,
        complete_times: NDArray[np.int64],
        complete_groups: NDArray[np.int64],
    ) -> list[pl.Series]:
        """Return the columns of events, in order of time, and keep the events that have become complete since.

        Args:
            times: Times of the events, ``[N]``, ascending.
            groups: Groups of the events, ``[N]``.
            complete: Events that are complete, with embeddings and labels, in order of time.
            complete_times: Their times.
            complete_groups: Their groups.
        """
        known = (complete_times + self.window_s).tolist()  # their labels are there after that
        waiting = self._past_events(complete)
        means: list[NDArray[np.float64] | None] = []
        counts, versions, at = np.zeros(len(times), np.uint32), list[int | None](), 0
        for place, time in enumerate(times.tolist()):
            while at < len(known) and known[at] < time:
                self._keep(int(complete_groups[at]), waiting[at])
                at += 1
            own = self._groups.get(int(groups[place]), ())
            counts[place] = len(own)
            means.append(np.mean([event.values for event in own], axis=0, dtype=np.float64) if own else None)
            versions.append(min(event.version for event in own) if own else None)
        for rest in range(at, len(known)):
            self._keep(int(complete_groups[rest]), waiting[rest])
        return [
            pl.Series(PAST, _packed(means), dtype=pl.Binary),
            pl.Series(PAST_EVENTS, counts),
            pl.Series(PAST_VERSION, versions, dtype=pl.Int32),
        ]

    def _past_events(self, complete: pl.DataFrame) -> list[_PastEvent | None]:
        """Return the events that count, None for those without an embedding or with another label."""
        if not len(complete) or EMBEDDING not in complete.columns:
            return [None] * len(complete)
        label, rows = self.config.label, complete[EMBEDDING].to_list()
        counts = [True] * len(rows) if label is None else (complete[label] == 1).fill_null(False).to_list()
        versions, kept = complete[VERSION].to_list(), [row for row in rows if row is not None]
        values = iter(_unpacked(kept))
        found = [None if row is None else _PastEvent(row, next(values), versions[i]) for i, row in enumerate(rows)]
        return [event if event is not None and counts[i] else None for i, event in enumerate(found)]

    def _keep(self, group: int, event: _PastEvent | None) -> None:
        if event is not None:
            self._groups.setdefault(group, deque(maxlen=self.config.events)).append(event)

    def to_frame(self) -> pl.DataFrame:
        """Return all that is kept."""
        flat = [(group, event) for group, events in self._groups.items() for event in events]
        columns = {
            "group": pl.Series([group for group, _ in flat], dtype=pl.Int64),
            "version": pl.Series([event.version for _, event in flat], dtype=pl.Int32),
            "row": pl.Series([event.row for _, event in flat], dtype=pl.Binary),
        }
        return pl.DataFrame(columns)

    def load_frame(self, frame: pl.DataFrame) -> None:
        """Go on from :meth:`to_frame`."""
        self._groups = {}
        values = _unpacked(frame["row"].to_list())
        for group, version, row, one in zip(frame["group"], frame["version"], frame["row"], values, strict=True):
            self._keep(group, _PastEvent(row, one, version))


def _packed(means: Sequence[NDArray[np.float64] | None]) -> list[bytes | None]:
    """Return vectors as rows of 8-bit numbers."""
    kept = [mean for mean in means if mean is not None]
    if not kept:
        return [None] * len(means)
    rows = iter(quantize_rows(torch.from_numpy(np.stack(kept)).float(), 8).numpy())
    return [None if mean is None else next(rows).tobytes() for mean in means]


def _unpacked(rows: Sequence[bytes]) -> NDArray[np.float32]:
    """Return the numbers of rows of equal width."""
    if not rows:
        return np.zeros((0, 0), np.float32)
    codes = torch.from_numpy(np.frombuffer(b"".join(rows), np.uint8).reshape(len(rows), -1).copy())
    found: NDArray[np.float32] = dequantize_rows(codes, 8, codes.shape[1] - 8).numpy()
    return found
