"""Prometheus metrics of the weights that score: their run, their ids and blanks, their probabilities, reloads."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector

from cordillera.data.ranking.encoding import Encoder

BOUNDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99)
"""Upper bounds of the buckets of probabilities."""


class RunMetrics:
    """What models were given and what they answered, and which weights they hold.

    Attributes:
        unknown: Ids that a model does not know, by feature.
        blanks: Blank values and empty lists, by feature.
        probabilities: Probabilities by task.
        info: 1 for the run and the step whose weights answer.
        reloads: Reloads by how they ended.
        last_reload: Whether the last reload succeeded, 1 or 0; 1 before the first.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        of_feature, prefix = ("model", "feature"), "cordillera_score"
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
        unknown: Sequence[Mapping[str, NDArray[np.int64]]],
        tasks: Sequence[str],
        scores: NDArray[np.float64],
    ) -> None:
        """Count a batch that was scored.

        Args:
            model: Name of the model.
            blanks: Number of blanks by feature.
            unknown: Numbers of ids of each row that the model does not know, by feature, for each request.
            tasks: Names of the tasks.
            scores: Probabilities ``[N, tasks]``.
        """
        for feature, number in blanks.items():
            if number:
                self.blanks.labels(model, feature).inc(number)
        for of_request in unknown:
            for feature, counts in of_request.items():
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
