"""Prometheus metrics of scoring."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
_SECONDS = (0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1.0, 2.0, 4.0, 8.0)


class ScoreMetrics:
    """Counts, sizes and times of requests for scores, by model.

    Attributes:
        requests: Requests by how they ended.
        rows: Rows that were scored.
        batch_rows: Rows of each batch.
        seconds: Time of each answered request, from its arrival to its answer.
        queue_rows: Rows that wait.
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

    def watch_queue(self, model: str, rows: Callable[[], float]) -> None:
        """Take the number of waiting rows of a ``model`` from a function when it is asked for."""
        self.queue_rows.labels(model).set_function(rows)
