"""Counters and times of text services, in Prometheus' form."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cordillera.serving.language.engine import Engine

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_LABEL = ("model",)


class TextMetrics(Collector):
    """Counters of the texts of one or more models.

    Args:
        registry: Where the metrics are registered.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._engines: dict[str, Engine] = {}
        registry.register(self)
        self._ended = Counter("cordillera_texts", "Texts that ended.", ("model", "finish"), registry=registry)
        self._first, self._between, self._whole = (
            Histogram(f"cordillera_{name}_seconds", meaning, _LABEL, registry=registry, buckets=_SECONDS)
            for name, meaning in (
                ("time_to_first_token", "Time from a request to its first token."),
                ("inter_token_latency", "Time between the tokens of a text."),
                ("e2e_request_latency", "Time from a request to the end of a text."),
            )
        )

    def watch(self, model: str, engine: Engine) -> None:
        """Report the numbers of an engine with the others."""
        self._engines[model] = engine

    def token(self, model: str, *, first: float | None, between: float | None) -> None:
        """Take note of a token: seconds since its request if it is the first one, else since the one before it."""
        if first is not None:
            self._first.labels(model).observe(first)
        if between is not None:
            self._between.labels(model).observe(between)

    def ended(self, model: str, finish: str, seconds: float) -> None:
        """Take note of a text that ended ``seconds`` after its request."""
        self._ended.labels(model, finish).inc()
        self._whole.labels(model).observe(seconds)

    def collect(self) -> Iterable[Metric]:
        """Yield the numbers of engines as they are now."""
        for name, meaning, of in (
            ("num_requests_running", "Texts that are being read or written.", lambda engine: engine.running),
            ("num_requests_waiting", "Texts that wait.", lambda engine: engine.waiting),
            ("kv_cache_usage", "Share of the pages of keys and values that texts hold.", _usage),
        ):
            gauge = GaugeMetricFamily(f"cordillera_{name}", meaning, labels=_LABEL)
            for model, engine in self._engines.items():
                gauge.add_metric([model], of(engine))
            yield gauge
        for name, meaning in (
            ("passes", "Passes over texts that are being written."),
            ("prompt_tokens", "Tokens of prompts."),
            ("shared_tokens", "Tokens of prompts that were not read again."),
            ("tokens", "Generated tokens."),
            ("drafted", "Drafted tokens that were checked."),
            ("accepted", "Drafted tokens that were right."),
            ("set_aside", "Times that a text had to wait for memory."),
        ):
            counter = CounterMetricFamily(f"cordillera_{name}", meaning, labels=_LABEL)
            for model, engine in self._engines.items():
                counter.add_metric([model], getattr(engine.counts, name))
            yield counter


def _usage(engine: Engine) -> float:
    return engine.pages_in_use / engine.pages
