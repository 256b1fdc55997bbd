"""Scores of the weights of a run: counted by feature and task, and named in each answer."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextvars import ContextVar
from typing import Any
from urllib.parse import quote

import numpy as np
import polars as pl
from numpy.typing import NDArray

from cordillera.data.ranking.encoding import EncodedRows
from cordillera.serving.ranking.run_metrics import RunMetrics
from cordillera.serving.ranking.score_metrics import ScoreMetrics
from cordillera.serving.ranking.score_service import RowScores, ScoreRequest, ScoreService, ScoreServiceConfig
from cordillera.serving.ranking.scorer import RowScorer

_weights: ContextVar[dict[str, Any] | None] = ContextVar("weights", default=None)


def noting_weights() -> dict[str, Any]:
    """Return a dict that gets the facts of the weights to which this request goes, if it asks for scores."""
    found: dict[str, Any] = {}
    _weights.set(found)
    return found


def weights_headers(facts: Mapping[str, Any]) -> list[tuple[bytes, bytes]]:
    """Return the headers of an answer that name the run, percent-encoded, and the step of weights with these facts."""
    return [(f"cordillera-{key}".encode(), quote(str(facts[key])).encode()) for key in ("run", "step")]


class RunService(ScoreService):
    """A service of scores that knows which weights it holds, counts what they are given, and takes no truth values.

    Args:
        name: Name of the model in requests and metrics.
        scorer: Scorer, which only this service calls.
        config: Limits; None for the defaults.
        metrics: Metrics that several services may share; None for none.
        run_metrics: Metrics of ids, blanks and probabilities, which several services may share; None for none.
        facts: Facts on the weights, among them ``run``, the name of its folder, and ``step``.
    """

    def __init__(
        self,
        name: str,
        scorer: RowScorer,
        config: ScoreServiceConfig | None = None,
        metrics: ScoreMetrics | None = None,
        run_metrics: RunMetrics | None = None,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        self.facts, self.run_metrics = dict(facts or {}), run_metrics
        self._blanks: dict[str, int] = {}
        super().__init__(name, scorer, config, metrics)

    def read(self, rows: object, *, explain: bool = False) -> ScoreRequest:
        """Check the rows of a request, JSON objects, and with ``explain`` whether they are few enough.

        Raises:
            RowError: If a row is not valid, or there are too many.
        """
        found = super().read(rows, explain=explain)
        assert isinstance(rows, list)
        self.reader.refuse_truth_values(rows)
        return found

    def submit(self, request: ScoreRequest, *, timeout: float | None = None) -> Future[RowScores]:
        """Queue a request and return the future of its scores, as a service without facts does.

        Args:
            request: Checked rows.
            timeout: Seconds after which the request is dropped; None for the default.

        Raises:
            OverloadError: If the queue has no room.
            ClosedError: If the service has been closed.
        """
        if (noted := _weights.get()) is not None:
            noted.update(self.facts)
        return super().submit(request, timeout=timeout)

    def lent(self, on_end: Callable[[], object]) -> RunService:
        """Return an object that is used in place of this one; ``on_end`` is called when nothing refers to it any more.

        So a service that has been replaced is closed after the last request that was to be answered by it. ``on_end``
        may be called by any thread, at any time.
        """
        found = copy.copy(self)
        weakref.finalize(found, on_end).atexit = False
        return found

    def _compute(self, requests: Sequence[ScoreRequest]) -> list[RowScores]:
        found = super()._compute(requests)
        if self.run_metrics is not None:
            scores = np.concatenate([one.scores for one in found])
            self.run_metrics.count(self.name, self._blanks, [one.unknown for one in found], self.tasks, scores)
        return found

    def _unknown(self, frame: pl.DataFrame, rows: EncodedRows) -> dict[str, NDArray[np.int64]]:
        self._blanks = rows.blanks or {}
        return super()._unknown(frame, rows)
