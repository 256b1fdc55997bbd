"""Figures of kernels for ragged data in the documentation."""

from __future__ import annotations

import hashlib
import json
import statistics
from pathlib import Path
from typing import Any

from _figures import Figures, judged, results, span, table

_NAMES = {"dense": "dense products", "padded": "padded, fused", "nested": "nested tensors", "fbgemm": "FBGEMM"}
_POLICIES = ("ABY", "AB", "AB8", "X")
_MODELS = {"hstu": "HSTU", "target-attention": "target attention", "dnn": "DNN", "dlrm": "DLRM"}


def _ratio(row: dict[str, Any], kind: str, peer: str) -> float:
    return float(row[kind]["times_faster"][peer]["median"])


def _sizes(row: dict[str, Any]) -> str:
    return ", ".join(str(row[key]) for key in ("batch", "heads", "width", "longest"))


def speed() -> str:
    """Return how many times faster ragged attention is than each other way, forward and with the backward pass."""
    lines = []
    for row in results("jagged_attention-speed")["rows"]:
        ratios = [f"{_ratio(row, 'forward', peer):.2f}, {_ratio(row, 'both', peer):.2f}" for peer in _NAMES]
        lines.append([row["kind"], _sizes(row), f"{row['fill']:.2f}, {row['fill_squared']:.2f}", *ratios])
    return table(["lengths", "B, H, D, N", "fill, squared", *_NAMES.values()], lines)


def _uniform() -> list[dict[str, Any]]:
    return [row for row in results("jagged_attention-speed")["rows"] if row["kind"] == "uniform"]


def over_uniform(kind: str, peer: str) -> str:
    """Return the ratios at uniform lengths."""
    return span([_ratio(row, kind, peer) for row in _uniform()], ".2f")


def memory() -> str:
    """Return the bytes of other ways in multiples of ours."""
    lines = []
    for row in results("jagged_attention-memory")["rows"]:
        ours = row["bytes"]["ours"]
        for peer in ("dense", "padded"):
            ratios = [f"{row['bytes'][peer][key] / ours[key]:.2f}" for key in ("kept", "forward", "both")]
            lines.append([_sizes(row), f"{row['fill']:.2f}", _NAMES[peer], *ratios])
    headings = ["B, H, D, N", "fill", "beside", "kept for the backward pass", "peak, forward", "peak, both"]
    return table(headings, lines)


def windows() -> str:
    """Return how many times faster windows are than causal attention, by length."""
    found = results("jagged_attention-window")
    lines = [
        [f"{row['longest']:,}", *(f"{row['times_faster'][name]['median']:.2f}" for name in ("window", "semi-local"))]
        for row in found["rows"]
    ]
    return table(["length", f"window of {found['window']}", "with global positions"], lines)


def window_slope() -> str:
    """Return the power of the length that the time with a window grows with."""
    return f"{results('jagged_attention-window')['slopes']['window']:.2f}"


def histories() -> str:
    """Return how many times faster training steps on long histories are than those of padded models."""
    lines = []
    for row in results("jagged_attention-histories")["rows"]:
        model = _MODELS[row["model"]] + (f", window of {row['window']}" if row["window"] else "")
        for name, ratio in row["times_faster"].items():
            fills = f"{row['fill']:.2f}, {row['fill_squared']:.2f}"
            sizes = (str(row["requests"]), f"{row['longest']:,}")
            lines.append([model, *sizes, fills, name, f"{ratio['median']:.2f}", f"{row['apart'][name]:.0e}"])
    return table(["model", "requests", "longest", "fill, squared", "padded", "times as fast", "losses apart"], lines)


def quality() -> str:
    """Return test NE and AUC of models, and what reading histories changes, with 95 % intervals over seeds."""
    logs = {"movielens-100k": "MovieLens-100K", "planted": "planted order"}
    lines = []
    for row in results("jagged_attention-quality")["rows"]:
        means = [f"{statistics.mean(run[key] for run in row['runs']):.4f}" for key in ("ne", "auc")]
        changes = [
            f"{change['percent']:+.2f} % ({change['low']:+.2f} to {change['high']:+.2f})"
            for change in row["change"].values()
        ]
        lines.append([logs[row["log"]], _MODELS[row["model"]], *means, *(changes or ["", ""])])
    return table(["log", "model", "NE", "AUC", "NE beside the DNN", "NE beside DLRM"], lines)


def moe_memory() -> str:
    """Return the bytes of grouped products in multiples of those of our policies."""
    lines = []
    for row in results("moe-memory")["rows"]:
        sizes = ", ".join(str(row[key]) for key in ("tokens", "width", "hidden", "experts", "choices"))
        kept = [f"{row['kept']['grouped'] / row['kept'][policy]:.2f}" for policy in _POLICIES]
        alive = [f"{row['peak']['grouped'] / row['peak'][policy]:.2f}" for policy in ("AB", "X")]
        lines.append([sizes, "SwiGLU" if row["gated"] else "SiLU", *kept, *alive])
    headings = [*(f"kept, {policy}" for policy in _POLICIES), "peak, AB", "peak, X"]
    return table(["tokens, d, h, E, k", "expert", *headings], lines)


def moe_missed() -> str:
    """Return which targets of bytes are reached, and by how much the others are missed."""
    content = results("moe-memory")
    asked, missed = content["asked"], []
    for row in content["rows"]:
        times = {policy: row["kept"]["grouped"] / row["kept"][policy] for policy in ("AB", "AB8", "X")}
        wanted = {**asked, "AB": asked["AB, one choice"]} if row["choices"] == 1 else asked
        sizes = ", ".join(str(row[key]) for key in ("tokens", "width", "hidden", "experts", "choices"))
        expert = "SwiGLU" if row["gated"] else "SiLU"
        for policy, value in times.items():
            if value < wanted[policy]:
                missed.append(f"`{policy}` at {sizes} with {expert} ({value:.2f} of {wanted[policy]:g})")
    return f"reached, except by {' and by '.join(missed)}" if missed else "all reached"


def moe_speed() -> str:
    """Return how many times as fast our policies are as grouped products and as a loop."""
    lines = []
    for row in results("moe-speed")["rows"]:
        sizes = ", ".join(str(row[key]) for key in ("tokens", "width", "hidden", "experts", "choices"))
        ratios = [f"{row['times_faster']['grouped'][policy]['median']:.2f}" for policy in _POLICIES]
        loop = f"{row['times_faster']['loop']['AB']['median']:.2f}"
        lines.append([sizes, f"{row['routing']}, {row['fullest']:.1f}", *ratios, loop])
    return table(["tokens, d, h, E, k", "routing, fullest", *_POLICIES, "AB beside a loop"], lines)


def moe_loop() -> str:
    """Return in how many cases `AB` is as many times as fast as a loop as was asked."""
    return judged([row["times_faster"]["loop"]["AB"]["median"] for row in results("moe-speed")["rows"]], 1.2)


def moe_finer() -> str:
    """Return the MiB that are kept as experts become finer."""
    lines = []
    for row in results("moe-finer")["rows"]:
        kept = [f"{row['kept'][name] / 2**20:.2f}" for name in (*_POLICIES, "grouped")]
        lines.append([str(row["experts"]), str(row["choices"]), str(row["hidden"]), *kept])
    return table(["experts", "choices", "h", *_POLICIES, "grouped products"], lines)


def finer_digest() -> str:
    """Return a digest of what the picture of finer experts shows."""
    return hashlib.sha256(json.dumps(results("moe-finer")["rows"]).encode()).hexdigest()[:16]


def draw_finer(path: Path) -> None:
    """Draw the bytes that are kept as experts become finer."""
    from cordillera.training.scaling.power_law import save_figure

    save_figure(_draw_finer, [path])


def _draw_finer() -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.6, 4.2), layout="constrained")
    axes = figure.subplots()
    rows = results("moe-finer")["rows"]
    experts = [row["experts"] for row in rows]
    for name, marker in zip((*_POLICIES, "grouped"), "os^Dv", strict=True):
        kept = [row["kept"][name] / 2**20 for row in rows]
        axes.plot(experts, kept, marker=marker)
        label = "grouped products" if name == "grouped" else name
        axes.annotate(label, (experts[-1], kept[-1]), xytext=(8, 0), textcoords="offset points", va="center")
    axes.set_xscale("log", base=2)
    axes.set_xticks(experts, [f"{row['experts']} x {row['hidden']}" for row in rows])
    axes.set_xlim(experts[0] * 0.9, experts[-1] * 1.9)
    axes.set_ylim(0)
    axes.set_xlabel("Experts x their width")
    axes.set_ylabel("Kept for the backward pass, MiB")
    axes.set_title("Finer experts with the same work for a token, measured", loc="left")
    return figure


def moe_mean(policy: str, kept: bool = False) -> str:
    """Return the geometric mean of the speed beside grouped products, if freed memory is returned or ``kept``."""
    content = results("moe-speed")
    return f"{(content['kept_memory'] if kept else content)['mean'][policy]:.2f}"


def moe_quality() -> str:
    """Return losses of Llamas with and without experts, and how unevenly experts are chosen."""
    lines = []
    for row in results("moe-quality")["rows"]:
        imbalance = [f"{row['experts']['imbalance'][key]:.2f}" for key in ("steps", "training text", "held-out text")]
        losses = [f"{row[name]['loss']:.4f}" for name in ("dense", "experts")]
        lines.append([str(row["seed"]), *losses, f"{row['difference']:+.4f}", *imbalance])
    headings = ["seed", "dense", "experts", "difference", "imbalance, single steps", "ten steps", "held-out text"]
    return table(headings, lines)


def moe_balance(key: str) -> str:
    """Return whether the ``key`` imbalance of every seed is as small as was asked."""
    found = results("moe-quality")
    return judged([-row["experts"]["imbalance"][key] for row in found["rows"]], -found["asked"]["imbalance"])


def moe_change() -> str:
    """Return the mean difference of the losses with its 95 % interval."""
    change = results("moe-quality")["change"]
    return f"{change['value']:+.3f} ({change['low']:+.3f} to {change['high']:+.3f})"


def moe_loss() -> str:
    """Return the changes of the loss by keeping products in 8 bits."""
    return span([100 * row["change"] for row in results("moe-loss")["rows"]], "+.2f") + " %"


FIGURES: Figures = {
    "moe-memory": moe_memory,
    "moe-missed": moe_missed,
    "moe-speed": moe_speed,
    "moe-finer": moe_finer,
    "moe-loss": moe_loss,
    "moe-mean-ab": lambda: moe_mean("AB"),
    "moe-mean-x": lambda: moe_mean("X"),
    "moe-kept-ab": lambda: moe_mean("AB", kept=True),
    "moe-kept-x": lambda: moe_mean("X", kept=True),
    "moe-target": lambda: judged([results("moe-speed")["mean"][name] for name in ("AB", "X")], 1.15),
    "moe-kept-target": lambda: judged(
        [results("moe-speed")["kept_memory"]["mean"][name] for name in ("AB", "X")], 1.15
    ),
    "moe-loop-target": moe_loop,
    "moe-quality": moe_quality,
    "moe-change": moe_change,
    "moe-balance-steps": lambda: moe_balance("steps"),
    "moe-balance-ten": lambda: moe_balance("training text"),
    "moe-balance-held-out": lambda: moe_balance("held-out text"),
    "jagged-histories": histories,
    "jagged-quality": quality,
    "jagged-speed": speed,
    "jagged-memory": memory,
    "jagged-windows": windows,
    "jagged-window-slope": window_slope,
    "jagged-dense-forward": lambda: over_uniform("forward", "dense"),
    "jagged-dense-both": lambda: over_uniform("both", "dense"),
    "jagged-padded-forward": lambda: over_uniform("forward", "padded"),
    "jagged-padded-both": lambda: over_uniform("both", "padded"),
}
