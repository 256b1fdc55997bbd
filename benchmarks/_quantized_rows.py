"""Embedding rows in 8, 4 and 2 bits compared with torch's own, and emulated sums of products in int16."""

from __future__ import annotations

from typing import Any

import torch
from _accumulate16 import (
    BITS,
    LARGEST_DENSITY,
    accumulate16,
    choose_accumulation,
    integer_product16,
    never_saturates,
    split_outliers,
)
from _timing import interleave, times_faster
from torch import Tensor

from cordillera.numerics.quantization.integer_linear import integer_product, quantize_weight
from cordillera.numerics.quantization.rows import dequantize_rows, quantize_rows, row_bytes

_PREPACK = {8: "embedding_bag_byte_prepack", 4: "embedding_bag_4bit_prepack", 2: "embedding_bag_2bit_prepack"}
_UNPACK = {8: "embedding_bag_byte_unpack", 4: "embedding_bag_4bit_unpack", 2: "embedding_bag_2bit_unpack"}
_SPILLS = (8, 32, 64, 256)


def _relative(rows: Tensor, bits: int, x: Tensor) -> float:
    back = dequantize_rows(rows, bits, x.shape[1]).double()
    return float((back - x.double()).norm() / x.double().norm())


def measure_rows(rounds: int, *, quick: bool = False) -> dict[str, Any]:
    """Measure bytes, errors and time of fused rows, over tiny tables if ``quick``."""
    count, dims = (50, (16,)) if quick else (20_000, (16, 64, 128))
    rows = []
    for distribution in ("normal",) if quick else ("normal", "laplace"):
        for dim in dims:
            generator = torch.Generator().manual_seed(dim)
            x = torch.randn(count, dim, generator=generator)
            if distribution == "laplace":
                uniform = torch.rand(count, dim, generator=generator).clamp(1e-6, 1 - 1e-6) - 0.5
                x = -uniform.sign() * (1 - 2 * uniform.abs()).log()
            rows += [_rows_row(x, bits, distribution, rounds) for bits in (8, 4, 2)]
    four = [row["greedy_over_minmax"] for row in rows if row["bits"] == 4 and row["dim"] in (64, dims[-1])]
    return {
        "evidence": "measured",
        "conditions": {"rows": count, "rounds": rounds, "threads": torch.get_num_threads()},
        "values": {"rows": rows, "largest_greedy_over_minmax_of_4_bits": max(four), "target_at_most": 0.92},
        "notes": [
            "Errors are relative L2 norms. Torch's greedy rows are choose_qparams_optimized's; ours keep the best "
            "range of the whole path and refit scale and bias to the codes.",
            "Bytes hold scale and bias. The win of eight and four bits on this CPU is memory, not the time of lookups.",
        ],
    }


def _rows_row(x: Tensor, bits: int, distribution: str, rounds: int) -> dict[str, Any]:
    prepack, unpack = getattr(torch.ops.quantized, _PREPACK[bits]), getattr(torch.ops.quantized, _UNPACK[bits])
    packed = quantize_rows(x, bits)
    dim = x.shape[1]
    same = torch.equal(packed, prepack(x)) and torch.equal(dequantize_rows(packed, bits, dim), unpack(packed))
    plain = _relative(packed, bits, x)
    greedy = theirs = None
    if bits != 8:
        greedy = _relative(quantize_rows(x, bits, method="greedy"), bits, x)
        theirs = _relative(prepack(x[:2000], optimized_qparams=True), bits, x[:2000])
        theirs *= plain / _relative(packed[:2000], bits, x[:2000])  # their search is slow, so a part is used
    timings = interleave({"ours": lambda: quantize_rows(x, bits), "torch": lambda: prepack(x)}, rounds=rounds)
    return {
        "distribution": distribution,
        "bits": bits,
        "dim": dim,
        "bytes": row_bytes(dim, bits),
        "float32_over_bytes": 4 * dim / row_bytes(dim, bits),
        "same_bytes_as_torch": same,
        "minmax": plain,
        "greedy": greedy,
        "torch_greedy": theirs,
        "greedy_over_minmax": None if greedy is None else greedy / plain,
        "times_as_fast_as_torch": times_faster(timings["ours"], timings["torch"]).to_json(),
    }


def measure_accumulate16(*, quick: bool = False) -> dict[str, Any]:
    """Measure outliers and saturations of int16 sums, and the choices without any saturation."""
    outputs, inner, count = (16, 64, 8) if quick else (256, 512, 64)
    rows = []
    for kind in ("normal", "laplace", "one large weight a row"):
        for activations in ("dense", "after ReLU"):
            rows.append(_accumulate_row(kind, activations, outputs, inner, count))
    return {
        "evidence": "emulated",
        "conditions": {"outputs": outputs, "inner": inner, "rows": count, "weights": "symmetric, one scale an output"},
        "values": {"rows": rows, "largest_density": LARGEST_DENSITY},
        "notes": [
            "No time is measured: int16 sums pay on processors without VNNI only. Saturations are clips of a pair or "
            "of the accumulator on held-out activations, of outputs x inner / 2 x rows x 2 possible ones.",
        ],
    }


def _accumulate_row(kind: str, activations: str, outputs: int, inner: int, count: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(outputs, inner, generator=generator)
    if kind == "laplace":
        values = values * torch.randn(outputs, inner, generator=generator).abs()
    if kind == "one large weight a row":
        values[:, 0] = 4 * values.abs().amax(1)
    weight = quantize_weight(values, None)

    def draw() -> Tensor:
        x = torch.randn(count, inner, generator=generator) * 40 + (128 if activations == "dense" else 0)
        return x.round().clamp(0, 255).to(torch.uint8)

    calibration, held_out = draw(), draw()
    grid = []
    for bits in BITS:
        main, outliers = split_outliers(weight.codes, bits)
        density = float((outliers != 0).float().mean())
        for spill in _SPILLS:
            clips = accumulate16(held_out, main, spill)[1]
            grid.append(
                {"bits": bits, "spill": spill, "density": density, "saturations": clips,
                 "never": never_saturates(bits, spill)}
            )  # fmt: skip
    chosen = choose_accumulation(weight, [calibration])
    result: dict[str, Any] = {"weights": kind, "activations": activations, "grid": grid, "chosen": None}
    if chosen is not None:
        product, clips = integer_product16(held_out, 128, weight, chosen)
        exact = integer_product(held_out, 128, weight)
        result["chosen"] = {
            "bits": chosen.bits, "spill": chosen.spill, "density": chosen.density, "saturations_held_out": clips,
            "largest_error_held_out": int((product - exact).abs().max()),
        }  # fmt: skip
    return result
