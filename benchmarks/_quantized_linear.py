"""Linear layers and chains in eight bits, compared with float32, bfloat16 and the same arithmetic unfused."""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from _quantized_mlp import QuantizedMLP, quantize_mlp
from _timing import Spread, Timing, interleave, times_faster
from torch import Tensor, nn
from torch.nn import functional as F

from cordillera.numerics.quantization.engines import Int8Engine
from cordillera.numerics.quantization.integer_linear import UINT8, LinearWeight, integer_product, requantize
from cordillera.numerics.quantization.quantized_linear import QuantizedLinear
from cordillera.numerics.quantization.quantizers import AffineParameters, choose_affine

# Rows, outputs, inputs: first those of the dossier's table, then extracts of FBGEMM's own benchmark.
TABLE = (
    (1, 1024, 256),
    (1, 4096, 1024),
    (6, 2048, 512),
    (20, 4096, 1024),
    (102, 1024, 512),
    (256, 1024, 1024),
    (1568, 1024, 512),
    (1024, 2048, 2048),
)
WEIGHTS = ((256, 256), (1024, 512), (4096, 2048))
SHAPES = (*TABLE, *((rows, *weight) for weight in WEIGHTS for rows in (1, 6, 10, 20, 102)))
QUICK = ((1, 64, 32), (6, 64, 48))

AT_LEAST_MEAN, AT_LEAST_ROWS, AT_LEAST_ANY, AT_LEAST_UNFUSED = 5.0, 2.0, 0.9, 1.5
FEW_ROWS = 6
LEAST_DECIBELS = 30.0
MOST_APART = 1e-4
_SETTLE_S = 0.01
_ROUND_S = 2e-3  # least seconds of a contender's share of a round
_INPUTS = 4  # inputs that calls use in turn, so that none is in the nearest cache


@dataclass
class _Case:
    """One shape with its layers for all contenders."""

    inputs: list[Tensor]
    weight: Tensor
    bias: Tensor
    static: QuantizedLinear
    dynamic: QuantizedLinear
    chain: QuantizedMLP
    output: tuple[float, int]

    @classmethod
    def make(cls, rows: int, outputs: int, inner: int, seed: int = 0) -> _Case:
        torch.manual_seed(seed)
        inputs = [torch.randn(rows, inner) for _ in range(_INPUTS)]
        linear = nn.Linear(inner, outputs)
        with torch.no_grad():
            y = torch.cat([F.linear(x, linear.weight, linear.bias).relu() for x in inputs])
        together = torch.cat(inputs)
        given = choose_affine(together.min(), together.max(), UINT8)
        wanted = choose_affine(y.min(), y.max(), UINT8)
        static = QuantizedLinear.from_linear(linear, given, relu=True)
        dynamic = QuantizedLinear.from_linear(linear, None, relu=True)
        assert wanted.zero_point is not None
        return cls(
            inputs, linear.weight.detach(), linear.bias.detach(), static, dynamic, QuantizedMLP([static], wanted),
            (float(wanted.scale), int(wanted.zero_point)),
        )  # fmt: skip

    def contenders(self) -> dict[str, Callable[[], object]]:
        scale, zero_point = self.static._input or (1.0, 0)
        weight, engine = self.static.weight, self.static._engine
        fused = self.static._fused
        if fused is not None:
            codes = [fused.codes(x) for x in self.inputs]
            multiply = partial(fused.requantized, scale=self.output[0], zero_point=self.output[1])
        else:
            codes = [engine.codes(x, scale, zero_point) for x in self.inputs]
            multiply = partial(_from_codes, engine, scale, zero_point, self.output)
        halves = [x.bfloat16() for x in self.inputs]
        half_weight, half_bias = self.weight.bfloat16(), self.bias.bfloat16()
        unfused = unfused_linear(weight, scale, zero_point, self.output)
        turn = itertools.count()

        def each(function: Callable[[Any], object], over: list[Any]) -> Callable[[], object]:
            return lambda: function(over[next(turn) % _INPUTS])

        return {
            "float32": each(lambda x: F.relu(F.linear(x, self.weight, self.bias)), self.inputs),
            "bfloat16": each(lambda x: F.relu(F.linear(x, half_weight, half_bias)), halves),
            "static": each(self.static, self.inputs),
            "dynamic": each(self.dynamic, self.inputs),
            "fused": each(self.chain.codes, self.inputs),
            "codes": each(multiply, codes),
            "unfused": each(unfused, self.inputs),
        }

    def apart(self) -> tuple[int, int, int]:
        """Return how many codes differ from the integer reference, the largest difference, and how many there are."""
        scale, zero_point = self.static._input or (1.0, 0)
        wanted = AffineParameters(torch.tensor(self.output[0]), torch.tensor(self.output[1]))
        x = self.inputs[0]
        codes = self.static._engine.plain(self.static._engine.codes(x, scale, zero_point))
        product = integer_product(codes, zero_point, self.static.weight)
        reference = requantize(product, self.static.weight, scale, wanted, relu=True)
        difference = (reference.int() - self.chain.codes(x).int()).abs()
        return int((difference > 0).sum()), int(difference.max()), difference.numel()


def _from_codes(engine: Int8Engine, scale: float, zero_point: int, output: tuple[float, int], codes: Tensor) -> Tensor:
    return engine.from_codes(codes, scale, zero_point, *output, True)


def unfused_linear(
    weight: LinearWeight, scale: float, zero_point: int, output: tuple[float, int]
) -> Callable[[Tensor], Tensor]:
    """Return the same function in separate passes: torch's quantiser, integer product and requantisation.

    It maps ``float32 [M, K]`` to ``uint8 [M, N]``, with ReLU. The transpose and the offsets of the weight are prepared
    beforehand; ``output`` is the scale and zero point of the result.
    """
    transposed = weight.codes.t()
    unit = weight.scale * scale
    multiplier = unit / output[0]
    assert weight.bias is not None
    shift = weight.bias / unit - zero_point * weight.column_offset.float()

    def run(x: Tensor) -> Tensor:
        codes = torch.quantize_per_tensor(x, scale, zero_point, torch.quint8).int_repr()
        values = torch._int_mm(codes, transposed).float()
        values.add_(shift).mul_(multiplier).round_().add_(output[1]).clamp_(output[1], 255)
        return values.to(torch.uint8)

    return run


def _calls(contender: Callable[[], object]) -> int:
    timing = interleave({"once": contender}, rounds=3, warmup=3)["once"]
    return max(1, int(_ROUND_S / timing.spread.median))


def measure_linear(rounds: int, *, quick: bool = False) -> dict[str, Any]:
    """Measure one layer with bias and ReLU for every shape, or for tiny shapes if ``quick``."""
    rows: list[dict[str, Any]] = []
    apart = elements = worst = 0
    for shape in QUICK if quick else SHAPES:
        case = _Case.make(*shape)
        different, largest, count = case.apart()
        apart, elements, worst = apart + different, elements + count, max(worst, largest)
        contenders = case.contenders()
        calls = 1 if quick else _calls(contenders["float32"])
        timings = interleave(contenders, rounds=rounds, calls=calls, warmup=3, settle_s=_SETTLE_S)
        rows.append(_row(shape, timings))
    means = {
        f"{name}_over_{peer}": statistics.geometric_mean([row["times"][name][peer]["median"] for row in rows])
        for name, peer in (
            ("static", "float32"), ("dynamic", "float32"), ("fused", "float32"), ("codes", "float32"),
            ("bfloat16", "float32"), ("fused", "unfused"),
        )
    }  # fmt: skip
    many = [row for row in rows if row["shape"][0] >= FEW_ROWS]
    return {
        "evidence": "measured",
        "conditions": {"rounds": rounds, "threads": torch.get_num_threads(), "relu": True, "bias": True},
        "values": {
            "rows": rows,
            "geometric_means": means,
            "least_static_over_float32": min(row["times"]["static"]["float32"]["median"] for row in rows),
            "least_static_over_float32_of_six_rows": min(row["times"]["static"]["float32"]["median"] for row in many),
            "least_fused_over_unfused": min(row["times"]["fused"]["unfused"]["median"] for row in rows),
            "targets": {
                "mean": AT_LEAST_MEAN, "six_rows": AT_LEAST_ROWS, "any": AT_LEAST_ANY, "unfused": AT_LEAST_UNFUSED,
                "apart": MOST_APART,
            },
            "random": measure_random(rounds, count=2 if quick else 60),
            "elements_apart": apart,
            "elements": elements,
            "largest_apart": worst,
        },
        "notes": [
            "static: float32 in and out, ranges known beforehand, inputs looked through for NaN and infinity, tiny "
            "products in float32; dynamic: the range of each batch.",
            "fused: float32 in, uint8 out; codes: uint8 in and out, as between the layers of a chain; unfused: "
            "quantize_per_tensor, _int_mm, requantisation in torch, without a look for NaN.",
            f"{apart} of {elements} codes differ from the reference in whole numbers, by {worst} at most.",
        ],
    }  # fmt: skip


def measure_random(rounds: int, *, count: int = 60) -> dict[str, Any]:
    """Measure layers of ``count`` shapes that nobody chose: each side is between 1 and 2,048, its logarithm uniform."""
    draw = random.Random(0)
    rows: list[dict[str, Any]] = []
    for _ in range(count):
        shape = round(2 ** draw.uniform(0, 11)), round(2 ** draw.uniform(0, 11)), round(2 ** draw.uniform(0, 11))
        case = _Case.make(*shape)
        linear = nn.Linear(shape[2], shape[1]).requires_grad_(False)
        linear.weight.copy_(case.weight)
        linear.bias.copy_(case.bias)
        every, turn = case.contenders(), itertools.count()
        contenders = {
            "float32": partial(_of_layer, linear, case.inputs, turn),
            "static": every["static"],
            "dynamic": every["dynamic"],
        }
        timings = interleave(
            contenders, rounds=rounds, calls=_calls(contenders["float32"]), warmup=3, settle_s=_SETTLE_S
        )
        times = {name: times_faster(timings[name], timings["float32"]).to_json() for name in ("static", "dynamic")}
        rows.append({"shape": shape, "times": times})
    medians = {name: [row["times"][name]["median"] for row in rows] for name in ("static", "dynamic")}
    return {
        "rows": rows,
        "geometric_means": {name: statistics.geometric_mean(values) for name, values in medians.items()},
        "least": {name: min(values) for name, values in medians.items()},
        "below": {name: sum(value < AT_LEAST_ANY for value in values) for name, values in medians.items()},
    }


def _of_layer(linear: nn.Linear, inputs: list[Tensor], turn: Iterator[int]) -> Tensor:
    return F.relu(linear(inputs[next(turn) % _INPUTS]))


def _row(shape: tuple[int, int, int], timings: dict[str, Timing]) -> dict[str, Any]:
    def against(name: str, peer: str) -> dict[str, float]:
        return times_faster(timings[name], timings[peer]).to_json()

    ours = ("static", "dynamic", "fused", "codes", "bfloat16")
    return {
        "shape": list(shape),
        "seconds": {name: timing.spread.to_json() for name, timing in timings.items()},
        "times": {name: {"float32": against(name, "float32"), "unfused": against(name, "unfused")} for name in ours},
    }


def measure_mlp(rounds: int, *, quick: bool = False) -> dict[str, Any]:
    """Measure time and signal to noise of three uint8 layers against float32, with random and trained weights."""
    sizes = (32, 48, 32, 16) if quick else (512, 1024, 512, 256)
    rows = []
    for batch in (8,) if quick else (6, 20, 102, 256, 1024):
        for trained in (False, True):
            rows.append(_mlp_row(sizes, batch, trained, rounds, quick))
    return {
        "evidence": "measured",
        "conditions": {"rounds": rounds, "threads": torch.get_num_threads(), "sizes": list(sizes)},
        "values": {
            "rows": rows,
            "least_decibels": min(row["decibels"] for row in rows),
            "target_decibels": LEAST_DECIBELS,
            "geometric_mean": statistics.geometric_mean([row["times"]["median"] for row in rows]),
        },
        "notes": ["Ranges of least squared error from batches that are not those measured; the output is uint8 too."],
    }


def _mlp_row(sizes: tuple[int, ...], batch: int, trained: bool, rounds: int, quick: bool) -> dict[str, Any]:
    torch.manual_seed(batch)
    modules: list[nn.Module] = []
    for inner, outputs in pairwise(sizes):
        modules += [nn.Linear(inner, outputs), nn.ReLU()]
    model = nn.Sequential(*modules[:-1])
    if trained:
        _train(model, 20 if quick else 200)
    data = [torch.randn(batch, sizes[0]) for _ in range(_INPUTS)]
    quantized = quantize_mlp(model, [torch.randn(512, sizes[0]) for _ in range(2)], quantize_output=True)
    turn = itertools.count()
    with torch.no_grad():
        exact = torch.cat([model(x) for x in data]).double()
        found = torch.cat([quantized(x) for x in data]).double()
        contenders: dict[str, Callable[[], object]] = {
            "float32": lambda: model(data[next(turn) % _INPUTS]),
            "uint8": lambda: quantized(data[next(turn) % _INPUTS]),
        }
        calls = 1 if quick else _calls(contenders["float32"])
        timings = interleave(contenders, rounds=rounds, calls=calls, warmup=3, settle_s=_SETTLE_S)
    times: Spread = times_faster(timings["uint8"], timings["float32"])
    return {
        "batch": batch,
        "trained": trained,
        "decibels": float(20 * (exact.norm() / (found - exact).norm()).log10()),
        "times": times.to_json(),
        "seconds": {name: timing.spread.to_json() for name, timing in timings.items()},
    }


def _train(model: nn.Sequential, steps: int) -> None:
    """Train a regression on a planted function, so that weights are not random."""
    first, last = model[0], model[-1]
    assert isinstance(first, nn.Linear)
    assert isinstance(last, nn.Linear)
    planted = torch.randn(first.in_features, last.out_features) / first.in_features**0.5
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(steps):
        x = torch.randn(128, first.in_features)
        loss = F.mse_loss(model(x), (x @ planted).abs())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
