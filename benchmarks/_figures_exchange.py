"""Figures of sharded tables, prioritised exchange and codecs in the documentation."""

from __future__ import annotations

from functools import partial
from typing import Any

from _figures import Figures, percent, results, span, table


def _exposed() -> Any:
    return results("freescale-exposed")


def freescale_rows() -> str:
    """Return exposed time and steps of both exchanges, by share of collisions."""
    rows = [
        [
            percent(row["collisions"], ".0f"),
            f"{row['fallen']:.1f}",
            f"{row['faster']:.2f}",
            f"{1e3 * row['synchronous_exposed']:.1f} ms",
            f"{1e3 * row['prioritised_exposed']:.1f} ms",
        ]
        for row in _exposed()["rows"]
    ]
    headings = ["collisions", "exposed time, times less", "step, times faster", "plain exposed", "prioritised exposed"]
    return table(headings, rows)


def freescale_conditions() -> str:
    """Return the emulated link and the computation beside it."""
    given = _exposed()["conditions"]
    forward, backward = given["computation_s"]
    return (
        f"{given['ranks']} processes, {given['rows_of_batch']:,} distinct rows of {given['dim']} numbers a batch, "
        f"links of {given['bytes_per_s'] / 1e6:.0f} MB/s and {1e3 * given['latency_s']:g} ms, "
        f"{1e3 * (forward + backward):.0f} ms of computation a step"
    )


def freescale_fit() -> str:
    """Return R squared of a line through exposed times."""
    return f"{_exposed()['fit']:.3f}"


def freescale_target() -> str:
    """Return the fall of exposed time at 5 % collisions beside the target."""
    found = _exposed()
    (row,) = (one for one in found["rows"] if one["share"] == 0.05)
    asked = found["asked"]["fallen"]
    return f"{row['fallen']:.1f} times ({asked:g} asked{'' if row['fallen'] >= asked else ', not reached'})"


def freescale_all() -> str:
    """Return the ratio of steps where all rows collide."""
    return f"{_exposed()['rows'][-1]['faster']:.2f}"


def freescale_equal() -> str:
    """Return whether both exchanges gave equal weights."""
    equal = [row["equal"] for row in _exposed()["rows"]]
    return "all" if all(equal) else f"{sum(equal)} of {len(equal)}"


_CODERS = ("bounded", "bounded-fast", "zstd-19 of codes", "max(vector-LZ, Huffman)", "distinct", "int8", "fp16")


def _codecs() -> Any:
    return results("compression-codecs")["results"]


def compression_ratios() -> str:
    """Return the ratio of every coder, by source of the rows."""
    rows = [[name, *(f"{one['harmonic_mean_ratio'][name]:.2f}" for one in _codecs())] for name in _CODERS]
    return table(["coder", *(one["source"] for one in _codecs())], rows)


def compression_over(key: str) -> str:
    """Return how many times smaller the best codec is than a baseline, over all sources."""
    return span([one[key] for one in _codecs()], ".2f")


def compression_rate(kind: str) -> str:
    """Return the rates of the fast codec over all sources, in MB/s."""
    return span([one["bytes_per_s"]["bounded-fast"][kind]["median"] / 1e6 for one in _codecs()], ",.0f")


FIGURES: Figures = {
    "freescale-rows": freescale_rows,
    "freescale-conditions": freescale_conditions,
    "freescale-fit": freescale_fit,
    "freescale-equal": freescale_equal,
    "freescale-target": freescale_target,
    "freescale-all": freescale_all,
    "compression-ratios": compression_ratios,
    "compression-zstandard": partial(compression_over, "times_zstandard"),
    "compression-hybrid": partial(compression_over, "times_hybrid"),
    "compression-encode": partial(compression_rate, "encode"),
    "compression-decode": partial(compression_rate, "decode"),
}
