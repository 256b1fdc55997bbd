"""FBGEMM's pipeline in Python, measured: ``cordillera bench fbgemm`` or ``python benchmarks/fbgemm.py``.

Parts: ``linear`` (one layer beside float32, bfloat16 and unfused int8), ``mlp`` (three layers in uint8 throughout),
``rows`` (embedding rows of 8, 4 and 2 bits), ``accumulate16`` (sums in int16, emulated). Each writes
``results/fbgemm-PART.json``.
"""

from __future__ import annotations

import enum
import warnings
from collections.abc import Callable
from typing import Any

import _quantized_linear
import _quantized_rows
import torch
import typer
from _program import Program
from _tables import print_notes, print_rows
from rich.console import Console


class Part(str, enum.Enum):
    """Parts of the benchmark."""

    linear = "linear"
    mlp = "mlp"
    rows = "rows"
    accumulate16 = "accumulate16"


def _times(spread: dict[str, float]) -> str:
    return f"{spread['median']:.2f}"


def _verdict(value: float, target: float) -> str:
    return f"{value:.2f} (at least {target:g} {'reached' if value >= target else 'missed'})"


def _linear(console: Console, quick: bool) -> dict[str, Any]:
    figures = _quantized_linear.measure_linear(3 if quick else 15, quick=quick)
    values = figures["values"]
    columns = ("static", "dynamic", "fused", "codes", "bfloat16")
    print_rows(
        console,
        "one layer with bias and ReLU, times as fast as float32",
        ["rows, outputs, inputs", "float32, microseconds", *columns, "fused over unfused"],
        [
            [
                ", ".join(map(str, row["shape"])),
                f"{row['seconds']['float32']['median'] * 1e6:,.0f}",
                *(_times(row["times"][name]["float32"]) for name in columns),
                _times(row["times"]["fused"]["unfused"]),
            ]
            for row in values["rows"]
        ],
    )
    targets, means = values["targets"], values["geometric_means"]
    for label, value, target in (
        ("static over float32, geometric mean", means["static_over_float32"], targets["mean"]),
        ("fused over float32, geometric mean", means["fused_over_float32"], targets["mean"]),
        ("codes over float32, geometric mean", means["codes_over_float32"], targets["mean"]),
        ("static over float32, least of six rows or more", values["least_static_over_float32_of_six_rows"],
         targets["six_rows"]),
        ("static over float32, least", values["least_static_over_float32"], targets["any"]),
        ("fused over unfused, geometric mean", means["fused_over_unfused"], targets["unfused"]),
    ):  # fmt: skip
        console.print(f"  {label}: {_verdict(value, target)}")
    chance = values["random"]
    for name in ("static", "dynamic"):
        console.print(
            f"  {name}, {len(chance['rows'])} shapes by chance: {chance['geometric_means'][name]:.2f} in the geometric "
            f"mean, least {_verdict(chance['least'][name], targets['any'])}, {chance['below'][name]} below"
        )
    print_notes(console, figures["notes"])
    return figures


def _mlp(console: Console, quick: bool) -> dict[str, Any]:
    figures = _quantized_linear.measure_mlp(3 if quick else 15, quick=quick)
    values = figures["values"]
    print_rows(
        console,
        f"three layers {figures['conditions']['sizes']} in uint8 throughout",
        ["batch", "weights", "decibels", "times as fast as float32"],
        [
            [
                str(row["batch"]),
                "trained" if row["trained"] else "initial",
                f"{row['decibels']:.1f}",
                _times(row["times"]),
            ]
            for row in values["rows"]
        ],
    )
    console.print(f"  least decibels: {_verdict(values['least_decibels'], values['target_decibels'])}")
    print_notes(console, figures["notes"])
    return figures


def _rows(console: Console, quick: bool) -> dict[str, Any]:
    figures = _quantized_rows.measure_rows(3 if quick else 9, quick=quick)

    def percent(value: float | None) -> str:
        return "" if value is None else f"{value:.2%}"

    print_rows(
        console,
        "embedding rows with their scale and bias",
        ["values", "bits x dim", "bytes", "float32 / bytes", "torch's bytes", "min-max error", "greedy",
         "torch's greedy", "times as fast as torch"],
        [
            [
                row["distribution"],
                f"{row['bits']} x {row['dim']}",
                str(row["bytes"]),
                f"{row['float32_over_bytes']:.2f}",
                "same" if row["same_bytes_as_torch"] else "DIFFERENT",
                percent(row["minmax"]),
                percent(row["greedy"]),
                percent(row["torch_greedy"]),
                _times(row["times_as_fast_as_torch"]),
            ]
            for row in figures["values"]["rows"]
        ],
    )  # fmt: skip
    print_notes(console, figures["notes"])
    return figures


def _accumulate16(console: Console, quick: bool) -> dict[str, Any]:
    figures = _quantized_rows.measure_accumulate16(quick=quick)
    lines = []
    for row in figures["values"]["rows"]:
        chosen = row["chosen"]
        shown = [cell for cell in row["grid"] if cell["spill"] == 64]
        lines.append(
            [
                row["weights"],
                row["activations"],
                *(f"{cell['density']:.2%}: {cell['saturations']:,}" for cell in shown),
                "int32"
                if chosen is None
                else f"{chosen['bits']} bits, spill {chosen['spill']}, {chosen['density']:.2%}",
                "" if chosen is None else f"{chosen['saturations_held_out']}",
            ]
        )
    headings = [f"{bits} bits" for bits in _quantized_rows.BITS]
    print_rows(
        console,
        "int16 sums that spill every 64 products: outliers and saturations",
        ["weights", "activations", *headings, "chosen", "saturations held out"],
        lines,
        evidence="emulated",
    )
    print_notes(console, figures["notes"])
    return figures


PARTS: dict[Part, Callable[[Console, bool], dict[str, Any]]] = {
    Part.linear: torch.no_grad()(_linear),
    Part.mlp: _mlp,  # trains
    Part.rows: torch.no_grad()(_rows),
    Part.accumulate16: torch.no_grad()(_accumulate16),
}


def _prepare() -> dict[str, str]:
    warnings.filterwarnings("ignore", message="torch.quantize_per_tensor")  # deprecated, but its kernels need it
    return {}


main = Program(
    "fbgemm",
    PARTS,
    "Measure eight-bit linear layers, embedding rows and int16 sums beside float32, bfloat16 and torch's own.",
    part_help="What to measure; repeat it for several. Default: all.",
    quick_help="Tiny sizes: shows that it works, its figures mean nothing.",
    threads=2,
    prepare=_prepare,
).command()


if __name__ == "__main__":
    typer.run(main)
