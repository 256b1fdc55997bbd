"""Choice of kernels for the three products of a linear layer's training step (Dispatch of LoKA).

The forward, the gradient of the input and the gradient of the weight each have their own kernel. Weights change with
every step and gradients are always new, so every time includes packing. Inputs and output gradients are drawn from the
probe's statistics, independently: a weight's gradient then sums only noise, so that no kernel is judged too favourably.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cordillera.errors import NumericsError
from cordillera.numerics.dispatch.accuracy import Accuracy
from cordillera.numerics.dispatch.candidates import Candidate, Shape, chosen
from cordillera.numerics.dispatch.dispatch import (
    DispatchConfig,
    Product,
    Profile,
    Trial,
    choose,
    median_seconds,
    refusal,
    skipped,
)
from cordillera.numerics.dispatch.plan import PASSES, Pass, PrecisionPlan, machine, weights_digest
from cordillera.numerics.dispatch.row_statistics import RowStatistics
from cordillera.numerics.sites import sites


def exact(of: Pass, first: Tensor, second: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute a product in the operands' dtype, by the calls that ``nn.Linear`` and its backward make.

    Args:
        first: Input ``[M, K]`` for ``forward``, otherwise the gradient of the output ``[M, N]``.
        second: Weight ``[N, K]``, or for ``weight_gradient`` the input.
    """
    if of == "forward":
        return F.linear(first, second, bias)
    return first.mm(second) if of == "input_gradient" else first.t().mm(second)


def by_kernel(one: Candidate, of: Pass, first: Tensor, second: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute a float32 product of :func:`exact` by a candidate, packing included."""
    if one.name == "fp32":
        return exact(of, first, second, bias)
    left, right = (first, second) if of == "forward" else (first, second.t())
    if of == "weight_gradient":
        left = first.t()
    return one.pack(right.contiguous(), bias, None)(left.contiguous())


def unusable(one: Candidate, of: Pass, first: torch.Size, second: torch.Size, device: torch.device) -> str | None:
    """Return why a candidate cannot compute a product of operands of these shapes; None if it can."""
    if one.calibrated:
        return "ranges of one moment do not hold while a model is trained"
    (m, k), n = first, second[0]
    if of != "forward":
        n = second[1]
    if of == "weight_gradient":
        m, k = k, m
    return one.supports(Shape(m, n, k), device)


@dataclass(frozen=True)
class TrainedLayer:
    """Layer, with functions from a number of rows and a generator to its inputs ``[rows, K]`` and output gradients."""

    site: str
    weight: Tensor
    bias: Tensor | None
    inputs: Callable[[int, torch.Generator], Tensor]
    gradients: Callable[[int, torch.Generator], Tensor]

    def operands(self, of: Pass, rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor | None]:
        """Draw both operands of a product for ``rows`` rows of a batch; the third value is the bias or None."""
        if of == "forward":
            return self.inputs(rows, generator), self.weight, self.bias
        gradient = self.gradients(rows, generator)
        return gradient, self.weight if of == "input_gradient" else self.inputs(rows, generator), None


def trained_layers(
    model: nn.Module, inputs: Mapping[str, RowStatistics], gradients: Mapping[str, RowStatistics]
) -> list[TrainedLayer]:
    """Return a model's linear layers with a probe's statistics of their inputs and output gradients."""
    found = []
    for name, module in sites(model).items():
        for what, statistics in (("inputs", inputs), ("gradients", gradients)):
            if name not in statistics or statistics[name].count < 2:
                raise NumericsError(
                    f"{what} of {name} were not probed", where="trained_layers",
                    remedy="probe training steps with ProbeConfig(gradients=True)",
                )  # fmt: skip
        bias = None if module.bias is None else module.bias.detach().float()
        weight = module.weight.detach().float()
        found.append(TrainedLayer(name, weight, bias, inputs[name].sample, gradients[name].sample))
    return found


def try_product(
    layer: TrainedLayer, of: Pass, candidates: Sequence[Candidate], config: DispatchConfig
) -> dict[int, list[Trial]]:
    """Judge candidates, which include fp32, once on a product, and time those that pass for every number of rows."""
    accuracy: dict[str, Accuracy] = {}
    refused: dict[str, str] = {}
    device = layer.weight.device
    for draw in range(config.draws):
        first, second, bias = layer.operands(of, config.judged_rows, torch.Generator().manual_seed(config.seed + draw))
        reference = exact(of, first.double(), second.double(), None if bias is None else bias.double())
        for one in candidates:
            if reason := unusable(one, of, first.shape, second.shape, device):
                refused[one.name] = reason
                continue
            with skipped(one, refused):
                found = Accuracy.of(by_kernel(one, of, first, second, bias), reference)
                accuracy[one.name] = accuracy.get(one.name, found).worse(found)
    for one in candidates:
        if (
            one.name in accuracy
            and one.name not in ("fp32", *refused)
            and (reason := refusal(one, accuracy[one.name], config))
        ):
            refused[one.name] = reason
    trials = {}
    for rows in config.rows:
        here = dict(refused)
        generator = torch.Generator().manual_seed(config.seed)
        drawn = [layer.operands(of, rows, generator) for _ in range(2)]
        for one in candidates:
            if reason := unusable(one, of, drawn[0][0].shape, drawn[0][1].shape, device):
                here.setdefault(one.name, reason)
        passing = [one for one in candidates if one.name not in here]
        seconds = median_seconds({one.name: partial(_run, one, of, drawn) for one in passing}, config.rounds)
        trials[rows] = [
            Trial(
                one.name,
                accuracy.get(one.name),
                1e3 * seconds[one.name] if one.name in seconds else math.nan,
                here.get(one.name, ""),
            )
            for one in candidates
        ]
    return trials


def _run(one: Candidate, of: Pass, drawn: Sequence[tuple[Tensor, Tensor, Tensor | None]], turn: int) -> Any:
    return by_kernel(one, of, *drawn[turn % len(drawn)])


def profile_training(layers: Sequence[TrainedLayer], config: DispatchConfig) -> Profile:
    """Try every candidate on all three products of every layer, and choose the kernels."""
    candidates = chosen(config.kernels or None)
    choices, trials = [], {}
    for layer in layers:
        for of in PASSES:
            product = Product(layer.site, of, layer.weight, layer.bias, layer.inputs)
            for rows, found in try_product(layer, of, candidates, config).items():
                trials[layer.site, of, rows] = found
                choices.append(choose(product, rows, found, config))
    bound = {"sqnr_db": config.sqnr_db, "median_relative": config.median_relative}
    weights = weights_digest({layer.site: (layer.weight, layer.bias) for layer in layers})
    names = tuple(one.name for one in candidates)
    plan = PrecisionPlan(tuple(choices), machine(), bound, config.seed, weights, "training", kernels=names)
    return Profile(plan, trials)
