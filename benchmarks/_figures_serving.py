"""Figures of the server in the documentation."""

from __future__ import annotations

from functools import partial

from _figures import Figures, processor, results, table

_WAYS = {
    "single": "the model alone, row after row",
    "batched": "in one process, batched",
    "http": "over HTTP",
    "http, unbatched": "over HTTP, one row a batch",
}


def scores() -> str:
    """Return requests a second for scores."""
    rows = [
        [
            _WAYS[name],
            f"{one['requests_per_second']['median']:,.0f}",
            f"{one['times_single']['median']:.2f}",
            f"{1e3 * one['p50_s']:.1f}, {1e3 * one['p99_s']:.1f} ms",
        ]
        for name, one in results("serving-scores")["contenders"].items()
    ]
    return table(["way", "requests a second", "times the first", "latency (p50, p99)"], rows)


def _fp8(kind: str) -> str:
    return f"{results('serving-fp8')['results'][kind]['divergence']:.4f}"


FIGURES: Figures = {
    "serving-scores": scores,
    "serving-processor": partial(processor, "serving-scores"),
    "soak-processor": partial(processor, "serving-soak"),
    "soak-answers": lambda: f"{results('serving-soak')['answered']:,}",
    "soak-minutes": lambda: f"{results('serving-soak')['seconds'] / 60:.0f}",
    "soak-clients": lambda: str(results("serving-soak")["clients"]),
    "soak-wrong": lambda: str(results("serving-soak")["crossed"] + results("serving-soak")["lost"]),
    "soak-cancelled": lambda: f"{results('serving-soak')['cancelled']:,}",
    "soak-refused": lambda: f"{results('serving-soak')['bad_refused'] + results('serving-soak')['overloaded']:,}",
    "soak-memory": lambda: ", ".join(f"{size:,.0f}" for size in results("serving-soak")["memory"]),
    "soak-health": lambda: f"{1e3 * results('serving-soak')['health_p99']:.1f}",
    "serving-pipeline": lambda: f"{results('serving-pipeline')['times']['two']:.2f}",
    "serving-pipeline-half": lambda: f"{results('serving-pipeline')['times']['two of half']:.2f}",
    "serving-pipeline-texts": lambda: str(results("serving-pipeline")["texts"]),
    "serving-fp8-rows": lambda: _fp8("rows"),
    "serving-fp8-unbounded": lambda: _fp8("rows without bound"),
    "serving-fp8-tensor": lambda: _fp8("tensor"),
    "serving-fp8-largest": lambda: f"{results('serving-fp8')['largest']:,.0f}",
    "serving-fp8-smaller": lambda: f"{results('serving-fp8')['smaller']} of {results('serving-fp8')['texts']}",
    "serving-fp8-planted": lambda: f"{results('serving-fp8')['planted']['bounded']:.2f}",
    "serving-fp8-planted-unbounded": lambda: f"{results('serving-fp8')['planted']['unbounded']:.2f}",
}
