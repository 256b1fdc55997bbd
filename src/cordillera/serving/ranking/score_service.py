"""Scores of a model for the requests of many callers."""

from __future__ import annotations

import copy
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from cordillera.data.ranking.encoding import EncodedRows
from cordillera.errors import DataError
from cordillera.serving.ranking.ablation import ablatable, ablated, effects
from cordillera.serving.ranking.micro_batcher import MicroBatcher
from cordillera.serving.ranking.row_reader import Columns, RequestPlace, RowError, RowReader, row_error
from cordillera.serving.ranking.score_metrics import ScoreMetrics
from cordillera.serving.ranking.scorer import RowScorer, probabilities


class ScoreServiceConfig(BaseModel):
    """Limits of a service of scores.

    Attributes:
        max_rows: Number of rows from which a batch takes no further request.
        max_queue_rows: Largest number of rows that wait; further requests are refused.
        max_request_rows: Largest number of rows of a request.
        max_explained_rows: Largest number of rows of a request for explanations; fewer if they would not fit the queue.
        timeout: Seconds after which a request that still waits is dropped.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_rows: int = Field(1024, ge=1)
    max_queue_rows: int = Field(16_384, ge=1)
    max_request_rows: int = Field(4096, ge=1)
    max_explained_rows: int = Field(64, ge=1)
    timeout: float = Field(10.0, gt=0)


@dataclass(frozen=True)
class ScoreRequest:
    """Checked rows of a request.

    Attributes:
        rows: Rows as :class:`~cordillera.serving.ranking.row_reader.RowReader` reads them; those of several requests
            become a frame together, because making one takes as long for a row as for many.
        explain: Whether the effects of features are wanted.
    """

    rows: Columns | pl.DataFrame
    explain: bool = False

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.rows) if isinstance(self.rows, pl.DataFrame) else len(next(iter(self.rows.values())))


@dataclass(frozen=True)
class RowScores:
    """Scores of the rows of a request.

    Attributes:
        scores: Probabilities, ``float64 [N, tasks]``.
        logits: Their logits, ``float64 [N, tasks]``.
        unknown: Number of ids of each row that the model does not know, ``int64 [N]``, by feature with a vocabulary;
            features without such ids are left out, and blanks do not count.
        effects: Effects of features, ``float64 [features, N, tasks]``; None if they were not wanted.
    """

    scores: NDArray[np.float64]
    logits: NDArray[np.float64]
    unknown: dict[str, NDArray[np.int64]]
    effects: NDArray[np.float64] | None = None


class ScoreService:
    """A model whose rows are read, scored in batches with those of other requests, and explained.

    Args:
        name: Name of the model in requests and metrics.
        scorer: Scorer, which only this service calls.
        config: Limits; None for the defaults.
        metrics: Metrics that several services may share; None for none.
        facts: Facts on the weights, among them ``run``, the name of its folder, and ``step``; None if nothing is known.
    """

    def __init__(
        self,
        name: str,
        scorer: RowScorer,
        config: ScoreServiceConfig | None = None,
        metrics: ScoreMetrics | None = None,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        self.name, self.scorer, self.metrics, self.facts = name, scorer, metrics, facts or {}
        self.config = config or ScoreServiceConfig()
        scorer.encoder.index()
        self.reader = RowReader(scorer.encoder, self.config.max_request_rows)
        self.tasks, self.explained = scorer.tasks, ablatable(scorer.encoder)
        self._batcher = MicroBatcher[ScoreRequest, RowScores](
            self._compute,
            max_rows=self.config.max_rows,
            max_queue_rows=self.config.max_queue_rows,
            on_batch=None if metrics is None else metrics.batch_rows.labels(name).observe,
        )
        if metrics is not None:
            metrics.watch_queue(name, lambda: self._batcher.queue_rows)

    @property
    def max_explained_rows(self) -> int:
        """Largest number of rows of a request for explanations; each waits as one row and one for each feature."""
        return min(self.config.max_explained_rows, self.config.max_queue_rows // (1 + len(self.explained)))

    def read(self, rows: object, *, explain: bool = False) -> ScoreRequest:
        """Check the rows of a request, JSON objects, and with ``explain`` whether they are few enough.

        Raises:
            RowError: If a row is not valid, or there are too many.
            DataError: If rows to explain can never fit the queue.
        """
        if explain and isinstance(rows, list) and len(rows) > self.config.max_explained_rows:
            raise RowError(
                f"at most {self.config.max_explained_rows} rows are explained at a time, got {len(rows)}",
                code="too_many_rows", where="rows", remedy="send several requests", status=413,
            )  # fmt: skip
        if explain and isinstance(rows, list) and len(rows) > self.max_explained_rows:
            raise DataError(
                f"at most {self.max_explained_rows} rows are explained at a time, got {len(rows)}: with each of "
                f"{len(self.explained)} features left out, more would not fit the queue",
                where="rows",
                remedy="send fewer rows, or score them without explain",
            )
        return ScoreRequest(self.reader.read_objects(rows), explain)

    def read_arrow(self, body: bytes) -> ScoreRequest:
        """Check the rows of a request in Arrow's IPC format.

        Raises:
            RowError: If they are not valid, or there are too many.
        """
        return ScoreRequest(self.reader.read_arrow(body))

    def submit(self, request: ScoreRequest, *, timeout: float | None = None) -> Future[RowScores]:
        """Queue a request and return the future of its scores, dropped after ``timeout`` seconds (None: the default).

        The future may fail with :class:`RowError`, ``NumericsError`` or ``DeadlineError``.

        Raises:
            OverloadError: If the queue has no room.
            ClosedError: If the service has been closed.
        """
        deadline = time.monotonic() + (self.config.timeout if timeout is None else timeout)
        count = len(request) * (1 + len(self.explained) * request.explain)
        return self._batcher.submit(request, count, deadline=deadline)

    def describe(self) -> dict[str, Any]:
        """Return the columns that rows need, an example, tasks and limits, for people and forms."""
        return {
            "object": "score.schema",
            "model": self.name,
            "columns": self.reader.describe(),
            "example": self.reader.example(),
            "tasks": list(self.tasks),
            "explained": self.explained,
            "max_rows": self.config.max_request_rows,
            "max_explained_rows": self.max_explained_rows,
        }

    def lent(self, on_end: Callable[[], object]) -> ScoreService:
        """Return an object that is used in place of this one; ``on_end`` is called when nothing refers to it any more.

        So a service that has been replaced is closed after the last request that was to be answered by it. ``on_end``
        may be called by any thread, at any time.
        """
        found = copy.copy(self)
        weakref.finalize(found, on_end).atexit = False
        return found

    def close(self, timeout: float | None = None) -> bool:
        """Refuse further requests, score those that wait, and return whether that ended within ``timeout`` seconds."""
        return self._batcher.close(timeout)

    def _compute(self, requests: Sequence[ScoreRequest]) -> list[RowScores]:
        scorer, place = self.scorer, RequestPlace()
        frame = self.reader.frame([request.rows for request in requests])
        try:
            rows = scorer.encoder.encode(frame, where=place, labels=False)
        except DataError as error:
            raise row_error(error) from error
        unknown = self._unknown(frame, rows)
        ends = np.cumsum([len(one) for one in requests])
        parts = [slice(end - len(one), end) for end, one in zip(ends.tolist(), requests, strict=True)]
        explained = np.concatenate(
            [np.arange(part.start, part.stop) for part, one in zip(parts, requests, strict=True) if one.explain]
            or [np.zeros(0, dtype=np.int64)]
        )
        logits = scorer.finite_logits(rows, place)
        found = None
        if len(explained):
            without = scorer.finite_logits(ablated(rows.take(explained), scorer.encoder), place)
            found = np.zeros((len(self.explained), *logits.shape))
            found[:, explained] = effects(logits[explained], without)
        scores = probabilities(logits)
        if self.metrics is not None:
            self.metrics.count(self.name, rows.blanks, unknown, self.tasks, scores)
        return [
            RowScores(
                scores[part],
                logits[part],
                {name: counts[part] for name, counts in unknown.items() if counts[part].any()},
                found[:, part] if found is not None and one.explain else None,
            )
            for part, one in zip(parts, requests, strict=True)
        ]

    def _unknown(self, frame: pl.DataFrame, rows: EncodedRows) -> dict[str, NDArray[np.int64]]:
        """Count the ids of each row that have no row of their own in a vocabulary; blanks do not count."""
        schema, known = self.scorer.encoder.schema, self.scorer.encoder.vocabularies
        found: dict[str, NDArray[np.int64]] = {}
        for index, single in enumerate(schema.categorical):
            absent = rows.ids[:, index] == 0
            if (single.table or single.name) in known and absent.any():
                given = (frame[single.name].fill_null("") != "").to_numpy()
                found[single.name] = (absent & given).astype(np.int64)
        for entries, (values, offsets) in zip(schema.lists, rows.lists, strict=True):
            if (entries.table or entries.name) in known:
                before = np.concatenate([[0], np.cumsum(values == 0)])
                found[entries.name] = before[offsets[1:]] - before[offsets[:-1]]
        return found
