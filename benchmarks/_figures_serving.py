"""Figures of the server in the documentation."""

from __future__ import annotations

from _figures import Figures, results, table


def _milliseconds(one: dict[str, float]) -> str:
    return f"{1e3 * one['p50']:.0f}, {1e3 * one['p99']:.0f} ms"


def arrivals() -> str:
    """Return rates and times of requests that arrive at random."""
    rows = [
        [
            str(row["texts"]),
            f"{row['tokens_per_s']['off']:.1f}",
            f"{row['tokens_per_s']['ngram']:.1f}",
            f"{row['ngram_over_off']:.2f}",
            f"{row['over_transformers']:.2f}",
            f"{row['first_ngram']['p50']:.2f}, {row['first_ngram']['p99']:.2f} s",
            _milliseconds(row["between_off"]),
            _milliseconds(row["between_ngram"]),
        ]
        for row in results("serving-arrivals")["results"]
    ]
    return table(
        [
            "texts at a time",
            "off, tokens/s",
            "drafts, tokens/s",
            "drafts over off",
            "over transformers, one by one",
            "first token (p50, p99)",
            "between tokens, off (p50, p99)",
            "with drafts",
        ],
        rows,
    )


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
    "serving-arrivals": arrivals,
    "serving-requests": lambda: str(results("serving-arrivals")["requests"]),
    "serving-tokens": lambda: str(results("serving-arrivals")["new_tokens"]),
    "serving-gap": lambda: f"{results('serving-arrivals')['gap']:g}",
    "serving-scores": scores,
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
