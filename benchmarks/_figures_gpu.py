"""Figures of one GPU in the documentation."""

from __future__ import annotations

from typing import Any

from _figures import Figures, percent, results, spread, table

_PEERS = {
    "torch back end": "our plain torch",
    "one EmbeddingBag": "one EmbeddingBag",
    "26 EmbeddingBags": "26 EmbeddingBags",
}


def machine(part: str) -> str:
    """Return the GPU that a part was measured on, with the versions of torch and CUDA."""
    found = results(f"gpu-{part}")["machine"]
    return f"{found['gpu']['name']}, torch {found['libraries']['torch']}, CUDA {found['gpu']['cuda']}"


def experts() -> str:
    """Return how many times as fast layers of experts are as other ways, and the peak memory of these."""
    lines = []
    for row in results("gpu-experts")["rows"]:
        sizes = ", ".join(str(row[key]) for key in ("tokens", "width", "hidden", "experts", "choices"))
        grouped = [f"{row['times_faster']['grouped'][policy]['median']:.2f}" for policy in ("ABY", "AB", "AB8", "X")]
        others = [f"{row['times_faster'][peer]['AB']['median']:.2f}" for peer in ("loop", "capacity")]
        peaks = [f"{row['peak'][peer] / row['peak']['AB']:.2f}" for peer in ("grouped", "capacity")]
        rate = f"{row['flops_per_s'] / 1e12:.0f}"
        lines.append([sizes, f"{row['routing']}, {row['fullest']:.1f}", *grouped, *others, *peaks, rate])
    headings = ["ABY", "AB", "AB8", "X", "AB, loop", "AB, capacity", "peak, grouped", "peak, capacity", "TFLOP/s"]
    return table(["tokens, d, h, E, k", "routing, fullest", *headings], lines)


def embeddings() -> str:
    """Return how many times as fast lookup and update of tables are as other ways."""
    lines = []
    for row in results("gpu-embeddings")["rows"]:
        ratios = [f"{row['times_faster'][peer]['median']:.2f}" for peer in _PEERS]
        milliseconds = f"{1e3 * row['seconds']['ours']['seconds']['median']:.2f} ms"
        lines.append([f"{row['rows']:,}, {row['width']}, {row['batch']:,}", row["rule"], *ratios, milliseconds])
    return table(["rows, width, samples", "rule", *(f"beside {name}" for name in _PEERS.values()), "our time"], lines)


def language() -> str:
    """Return tokens a second, utilisation and peak memory of Llamas trained by us and by transformers."""
    found = results("gpu-training")["language"]
    lines = []
    for name, rate in found["tokens_per_s"].items():
        mfu: dict[str, Any] = found["mfu"]
        lines.append(
            [
                name, f"{rate['median']:,.0f}", f"{rate['low']:,.0f} to {rate['high']:,.0f}", percent(mfu[name], ".1f"),
                f"{found['peak_bytes'][name] / 2**30:.1f}",
            ]
        )  # fmt: skip
    return table(["trainer", "tokens/s", "quartiles", "MFU", "peak, GiB"], lines)


def language_ratio(peer: str) -> str:
    """Return our speed in multiples of a peer's."""
    return f"{results('gpu-training')['language']['times_faster'][peer]['median']:.2f}"


def ranking() -> str:
    """Return samples a second of ranking models, over our tables and over torch's."""
    lines = []
    for row in results("gpu-training")["ranking"]:
        rates = [f"{rate['median']:,.0f}" for rate in row["samples_per_s"].values()]
        lines.append([row["model"], *rates, *spread(row["times_faster"])])
    return table(["model", "samples/s", "over torch's tables", "times as fast", "quartiles"], lines)


FIGURES: Figures = {
    "gpu-experts": experts,
    "gpu-experts-machine": lambda: machine("experts"),
    "gpu-embeddings": embeddings,
    "gpu-embeddings-machine": lambda: machine("embeddings"),
    "gpu-language": language,
    "gpu-language-machine": lambda: machine("training"),
    "gpu-language-plain": lambda: language_ratio("transformers"),
    "gpu-language-compiled": lambda: language_ratio("transformers, compiled"),
    "gpu-language-weights": lambda: f"{results('gpu-training')['language']['parameters'] / 1e6:.0f}",
    "gpu-ranking": ranking,
    "gpu-ranking-machine": lambda: machine("training"),
}
