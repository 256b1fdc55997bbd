"""Prometheus metrics of scoring."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector

from cordillera.data.ranking.encoding import Encoder

BOUNDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99)
"""Upper bounds of the buckets of probabilities."""

_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
_SECONDS = (0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1.0, 2.0, 4.0, 8.0)


class ScoreMetrics:
    """Counts, sizes and times of requests for scores, by model; what models were given, answered, and hold.

    Attributes:
        requests: Requests by how they ended.
        rows: Rows that were scored.
        batch_rows: Rows of each batch.
        seconds: Time of each answered request, from its arrival to its answer.
        queue_rows: Rows that wait.
        unknown: Ids that a model does not know, by feature.
        blanks: Blank values and empty lists, by feature.
        probabilities: Probabilities by task.
        info: 1 for the run and the step whose weights answer.
        reloads: Reloads by how they ended.
        last_reload: Whether the last reload succeeded, 1 or 0; 1 before the first.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        model, prefix = ("model",), "cordillera_score"
        self.requests = Counter(f"{prefix}_requests", "Requests for scores.", ("model", "status"), registry=registry)
        self.rows = Counter(f"{prefix}_rows", "Rows that were scored.", model, registry=registry)
        self.batch_rows = Histogram(
            f"{prefix}_batch_rows", "Rows that were scored together.", model, registry=registry, buckets=_ROWS
        )
        self.seconds = Histogram(
            f"{prefix}_request_seconds", "Seconds of a request.", model, registry=registry, buckets=_SECONDS
        )
        self.queue_rows = Gauge(f"{prefix}_queue_rows", "Rows that wait.", model, registry=registry)
        of_feature = ("model", "feature")
        self.unknown = Counter(f"{prefix}_unknown_ids", "Ids that training did not see.", of_feature, registry=registry)
        self.blanks = Counter(f"{prefix}_blanks", "Blank values and empty lists.", of_feature, registry=registry)
        self.probabilities = ProbabilityHistogram(f"{prefix}_probability", "Probabilities of scored rows.")
        registry.register(self.probabilities)
        self.info = Gauge(f"{prefix}_model_info", "Weights that answer.", ("model", "run", "step"), registry=registry)
        self.reloads = Counter(f"{prefix}_reloads", "Reloads of models.", ("model", "status"), registry=registry)
        self.last_reload = Gauge(
            f"{prefix}_last_reload_successful", "Whether the last reload succeeded.", ("model",), registry=registry
        )
        self._shown: dict[str, tuple[str, str, str]] = {}

    def watch_queue(self, model: str, rows: Callable[[], float]) -> None:
        """Take the number of waiting rows of a ``model`` from a function when it is asked for."""
        self.queue_rows.labels(model).set_function(rows)

    def show(self, model: str, facts: Mapping[str, Any], encoder: Encoder) -> None:
        """Name the ``run`` and ``step`` in ``facts`` as those of a ``model``; counts by feature begin at 0.

        Args:
            model: Name of the model.
            facts: Facts on its weights.
            encoder: Encoder of the run, which has the features.
        """
        labels = model, str(facts["run"]), str(facts["step"])
        self.info.labels(*labels).set(1)
        if (before := self._shown.get(model)) not in (None, labels):
            self.info.remove(*before)
        self._shown[model] = labels
        self.last_reload.labels(model).set(1)
        schema = encoder.schema
        for feature in (*schema.numbers, *schema.categorical, *schema.lists):
            self.blanks.labels(model, feature.name)
        for feature in (*schema.categorical, *schema.lists):
            if (feature.table or feature.name) in encoder.vocabularies:
                self.unknown.labels(model, feature.name)

    def note_reload(self, model: str, *, is_done: bool) -> None:
        """Count a reload of a ``model`` that ``is_done``, or failed."""
        self.reloads.labels(model, "ok" if is_done else "error").inc()
        self.last_reload.labels(model).set(is_done)

    def count(
        self,
        model: str,
        blanks: Mapping[str, int],
        unknown: Mapping[str, NDArray[np.int64]],
        tasks: Sequence[str],
        scores: NDArray[np.float64],
    ) -> None:
        """Count a batch that was scored.

        Args:
            model: Name of the model.
            blanks: Number of blanks by feature.
            unknown: Number of ids of each row that the model does not know, by feature.
            tasks: Names of the tasks.
            scores: Probabilities ``[N, tasks]``.
        """
        for feature, number in blanks.items():
            if number:
                self.blanks.labels(model, feature).inc(number)
        for feature, counts in unknown.items():
            self.unknown.labels(model, feature).inc(int(counts.sum()))
        self.probabilities.observe(model, tasks, scores)


class ProbabilityHistogram(Collector):
    """Histogram of probabilities by model and task that takes whole batches.

    Args:
        name: Name of the metric.
        text: What it measures.
    """

    def __init__(self, name: str, text: str) -> None:
        self._name, self._text, self._lock = name, text, threading.Lock()
        self._counts: dict[tuple[str, str], NDArray[np.int64]] = {}
        self._sums: dict[tuple[str, str], float] = {}

    def observe(self, model: str, tasks: Sequence[str], scores: NDArray[np.float64]) -> None:
        """Add the probabilities ``scores``, ``[N, tasks]``, of a ``model`` with these ``tasks``."""
        places = np.searchsorted(BOUNDS, scores, side="left")
        for column, task in enumerate(tasks):
            found = np.bincount(places[:, column], minlength=len(BOUNDS) + 1)
            with self._lock:
                self._counts[model, task] = self._counts.get((model, task), 0) + found
                self._sums[model, task] = self._sums.get((model, task), 0.0) + float(scores[:, column].sum())

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """Yield the histogram."""
        family = HistogramMetricFamily(self._name, self._text, labels=["model", "task"])
        with self._lock:
            found = [(key, counts.cumsum().tolist(), self._sums[key]) for key, counts in self._counts.items()]
        for key, counts, total in found:
            ends = [*map(str, BOUNDS), "+Inf"]
            family.add_metric(list(key), list(zip(ends, counts, strict=True)), sum_value=total)
        yield family
