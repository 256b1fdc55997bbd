"""The fastest kernel that is accurate enough, layer by layer, product by product, size by size: LoKA's Dispatch.

Every candidate is run on inputs drawn from what a probe saw, and judged against float64; what passes is timed, in turn
with the others, quantisation included. The outcome is a :class:`PrecisionPlan`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn
from torch.nn import functional as F

from cordillera.errors import NumericsError
from cordillera.numerics.dispatch.accuracy import Accuracy
from cordillera.numerics.dispatch.candidates import Candidate, Kernel, Shape, candidate, chosen
from cordillera.numerics.dispatch.plan import KernelChoice, Pass, PrecisionPlan, bucket, machine, weights_digest
from cordillera.numerics.dispatch.row_statistics import RowStatistics
from cordillera.numerics.quantization.fixed_dtypes import refuse_double
from cordillera.numerics.sites import replace, sites

_SETTLE_S = 0.003
_CACHE_BYTES = 64 * 2**20


class DispatchConfig(BaseModel):
    """What a kernel has to keep, and how carefully that is looked at.

    Attributes:
        sqnr_db: The least signal-to-noise ratio, dB.
        median_relative: The largest median relative error.
        faster: Times as fast as fp32 that a kernel must be to be taken at all.
        rows: Numbers of input rows, for each of which kernels are chosen; each stands for all down to the one below.
        draws: Inputs that are drawn a layer to judge its kernels.
        judged_rows: Rows of each.
        rounds: Times that a kernel is timed, in turn with the others; the median counts.
        kernels: Candidates to choose from; none for all.
        seed: Seed of the draws.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    sqnr_db: float = Field(30.0, allow_inf_nan=False)
    median_relative: float = Field(0.05, gt=0)
    faster: float = Field(1.05, gt=0)
    rows: tuple[Annotated[int, Field(ge=1)], ...] = Field((256,), min_length=1)
    draws: int = Field(4, ge=1)
    judged_rows: int = Field(256, ge=1)
    rounds: int = Field(9, ge=1)
    kernels: tuple[str, ...] = ()
    seed: int = 0


@dataclass(frozen=True)
class Trial:
    """One candidate on one product.

    Attributes:
        kernel: Its name.
        accuracy: The worst of its draws; None where it was not run.
        milliseconds: Median; not a number where it was not timed.
        refused: Why it was not taken; empty if it passed.
    """

    kernel: str
    accuracy: Accuracy | None = None
    milliseconds: float = math.nan
    refused: str = ""


@dataclass(frozen=True)
class Product:
    """What is to be computed: the weight of a layer, and inputs like those that it gets.

    Attributes:
        site: The layer's name.
        of: Which of its products.
        weight: ``[N, K]`` as the kernel takes it.
        bias: ``[N]`` or None.
        draw: Gives ``[rows, K]`` for a number of rows and a generator.
        once: Whether the weight stays, so that packing it costs nothing.
        calibration: Rows for ranges; None where there are none.
    """

    site: str
    of: Pass
    weight: Tensor
    bias: Tensor | None
    draw: Callable[[int, torch.Generator], Tensor]
    once: bool = True
    calibration: Tensor | None = None


def judge(product: Product, kernel: Kernel, config: DispatchConfig) -> Accuracy:
    """The worst accuracy of a kernel over several drawn inputs, against float64.

    Args:
        product: With its weight and inputs.
        kernel: Packed with that weight.
        config: How many draws, of how many rows.
    """
    exact_weight = product.weight.double()
    worst: Accuracy | None = None
    for draw in range(config.draws):
        x = product.draw(config.judged_rows, torch.Generator().manual_seed(config.seed + draw))
        reference = x.double() @ exact_weight.T
        if product.bias is not None:
            reference += product.bias.double()
        found = Accuracy.of(kernel(x), reference)
        if worst is None or found.sqnr_db < worst.sqnr_db:
            worst = found
    assert worst is not None
    return worst


def refusal(one: Candidate, found: Accuracy, config: DispatchConfig) -> str:
    """Why a candidate cannot be taken for its accuracy; empty where it can.

    Args:
        one: The candidate.
        found: Its accuracy.
        config: Bounds.
    """
    if found.sqnr_db < config.sqnr_db or found.median_relative > config.median_relative:
        return f"{found.sqnr_db:.1f} dB, median relative error {found.median_relative:.2g}"
    return "emulated here: no time to go by" if one.emulated else ""


@contextmanager
def skipped(one: Candidate, refused: dict[str, str]) -> Iterator[None]:
    """Skip a candidate that cannot compute a layer (a weight beyond its format, a size beyond its accumulators).

    Args:
        one: Candidate to skip. Errors of the reference candidate are raised.
        refused: Reasons by name of the candidate, to which the reason is added.
    """
    try:
        yield
    except (NumericsError, RuntimeError, ValueError, TypeError, IndexError) as error:
        if one.name == "fp32":
            raise
        what = error.what if isinstance(error, NumericsError) else str(error).split("\n")[0]
        refused[one.name] = f"cannot take it: {what}"


def try_all(
    product: Product, candidates: Sequence[Candidate], config: DispatchConfig, timed_rows: Sequence[int] | None = None
) -> dict[int, list[Trial]]:
    """Judge candidates once, and time those that pass for every number of rows.

    Args:
        product: With its weight and inputs.
        candidates: The reference among them.
        config: Bounds and counts.
        timed_rows: Numbers of rows; None for the config's.
    """
    accuracy: dict[str, Accuracy] = {}
    kernels: dict[str, Kernel] = {}
    refused: dict[str, str] = {}
    n, k = product.weight.shape
    for one in candidates:
        reason = one.supports(Shape(config.judged_rows, n, k), product.weight.device)
        if reason is None and one.calibrated and product.calibration is None:
            reason = "needs inputs to calibrate on"
        if reason is not None:
            refused[one.name] = reason
            continue
        with skipped(one, refused):
            kernels[one.name] = one.pack(product.weight, product.bias, product.calibration)
            accuracy[one.name] = found = judge(product, kernels[one.name], config)
            if reason := refusal(one, found, config):
                refused[one.name] = reason
    if "fp32" not in accuracy:
        raise NumericsError("fp32 must be among the candidates", where="dispatch")
    refused.pop("fp32", None)
    trials = {}
    for rows in config.rows if timed_rows is None else timed_rows:
        passing = [one for one in candidates if one.name not in refused]
        seconds = _timed(product, passing, kernels, rows, config)
        trials[rows] = [
            Trial(
                one.name,
                accuracy.get(one.name),
                1e3 * seconds[one.name] if one.name in seconds else math.nan,
                refused.get(one.name, ""),
            )
            for one in candidates
        ]
    return trials


def _timed(
    product: Product, candidates: Sequence[Candidate], kernels: Mapping[str, Kernel], rows: int, config: DispatchConfig
) -> dict[str, float]:
    """Median seconds of a call, of each in turn, never twice in a row on the same input."""
    generator = torch.Generator().manual_seed(config.seed)
    size = 4 * rows * product.weight.shape[1]
    inputs = [product.draw(rows, generator) for _ in range(max(2, min(8, _CACHE_BYTES // max(1, size))))]

    def calls(one: Candidate) -> Callable[[int], Any]:
        kernel = kernels[one.name] if product.once else partial(_pack_and_run, one, product)
        return lambda turn: kernel(inputs[turn % len(inputs)])

    return median_seconds({one.name: calls(one) for one in candidates}, config.rounds)


def median_seconds(calls: Mapping[str, Callable[[int], Any]], rounds: int) -> dict[str, float]:
    """Median seconds of a call, of each contender in turn.

    Args:
        calls: By name; each is given a number that grows, to choose its input by.
        rounds: Values a contender, each the mean of as many calls as the first one makes in two milliseconds.
    """
    names = list(calls)
    began = time.perf_counter()
    for turn in range(2):
        calls[names[0]](turn)
    repeats = max(1, min(64, int(2e-3 / max(1e-7, (time.perf_counter() - began) / 2))))
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds + 1):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            # Threads of the contender before look for work for a while, which a short call would pay for.
            began = time.perf_counter()
            while time.perf_counter() - began < _SETTLE_S:
                calls[name](turn)
            began = time.perf_counter()
            for repeat in range(repeats):
                calls[name](turn + repeat + 1)
            if turn:
                seconds[name].append((time.perf_counter() - began) / repeats)
    return {name: sorted(values)[len(values) // 2] for name, values in seconds.items()}


def _pack_and_run(one: Candidate, product: Product, x: Tensor) -> Tensor:
    return one.pack(product.weight, product.bias, product.calibration)(x)


def choose(product: Product, rows: int, trials: Sequence[Trial], config: DispatchConfig) -> KernelChoice:
    """The fastest trial that passed, if it is faster than fp32 by enough.

    Args:
        product: What was tried.
        rows: The number of rows.
        trials: Trials of every candidate.
        config: Bounds.
    """
    reference = next(trial for trial in trials if trial.kernel == "fp32")
    passed = [
        t
        for t in trials
        if not t.refused and t is not reference and reference.milliseconds > config.faster * t.milliseconds
    ]
    best = min(
        passed,
        key=lambda t: (t.milliseconds, t.accuracy.median_relative if t.accuracy else math.inf, t.kernel),
        default=reference,
    )
    why = ""
    if best is reference:
        accurate = [t for t in trials if not t.refused and t is not reference]
        why = "no other is faster" if accurate else "no other is accurate enough"
    n, k = product.weight.shape
    expected: dict[str, Any] = {"ms": best.milliseconds, "times_fp32": reference.milliseconds / best.milliseconds}
    if best.accuracy is not None:
        expected["accuracy"] = best.accuracy.to_json()
    return KernelChoice(
        product.site, product.of, bucket(rows), n, k, best.kernel, why, expected, _range(product.calibration)
    )


def _range(rows: Tensor | None) -> tuple[float, float] | None:
    return None if rows is None or not rows.numel() else (float(rows.min()), float(rows.max()))


def skipped_layers(trials: Mapping[str, Sequence[Trial]]) -> dict[str, dict[str, int]]:
    """Candidates that cannot compute some layers: the reasons of each, with the number of layers.

    Args:
        trials: Trials of each layer, by name.
    """
    found: dict[str, dict[str, int]] = {}
    for of_layer in trials.values():
        for kernel, reason in dict.fromkeys((t.kernel, t.refused) for t in of_layer if t.refused and not t.accuracy):
            reasons = found.setdefault(kernel, {})
            reasons[reason] = reasons.get(reason, 0) + 1
    return found


@dataclass
class Profile:
    """A plan with all that was tried for it.

    Attributes:
        plan: The choices.
        trials: Trials of each site, product and number of rows.
    """

    plan: PrecisionPlan
    trials: dict[tuple[str, Pass, int], list[Trial]] = field(default_factory=dict)

    def uniform_milliseconds(self) -> dict[str, float]:
        """Total time of every kernel that is accurate enough everywhere, were it taken everywhere."""
        times: dict[str, list[float]] = {}
        for trials in self.trials.values():
            for trial in trials:
                times.setdefault(trial.kernel, []).append(trial.milliseconds)
        return {name: sum(taken) for name, taken in times.items() if math.isfinite(sum(taken))}

    def skipped(self) -> dict[str, dict[str, int]]:
        """Candidates that cannot compute some products: the reasons of each, with the number of layers."""
        return skipped_layers(
            {
                site: [t for key, trials in self.trials.items() if key[0] == site for t in trials]
                for site in self.plan.sites
            }
        )

    def geometric_mean(self) -> float:
        """Times as fast as fp32, over all that was tried."""
        ratios = [math.log(choice.expected.get("times_fp32", 1.0)) for choice in self.plan.choices]
        return math.exp(sum(ratios) / len(ratios))


def forward_products(
    model: nn.Module,
    statistics: Mapping[str, RowStatistics],
    only: Sequence[str] = (),
    without: Sequence[str] = (),
    calibration: Mapping[str, Tensor] | None = None,
) -> list[Product]:
    """Forward products of a trained model's linear layers, with inputs drawn from what a probe saw.

    Args:
        model: Trained.
        statistics: Statistics of each layer's inputs.
        only: Patterns of layers; none for all.
        without: Patterns of layers to leave out.
        calibration: Rows that each layer was given; None to draw them too.

    Raises:
        NumericsError: a layer was not probed, or with other inputs, or is float64.
    """
    found = []
    for name, module in sites(model, only, without).items():
        if name not in statistics or statistics[name].count < 2:
            skipped = statistics[name].skipped if name in statistics else 0
            why = f": {skipped} batches held NaN or infinity" if skipped else ""
            raise NumericsError(
                f"{name} was not probed{why}", where="forward_products", remedy="probe the model on its own data first"
            )
        if statistics[name].features != module.in_features:
            raise NumericsError(
                f"{name} has {module.in_features} inputs, its statistics {statistics[name].features}",
                where="forward_products", remedy="probe this model",
            )  # fmt: skip
        drawn = statistics[name].sample
        rows = (calibration or {}).get(name)
        if rows is None:
            rows = drawn(1024, torch.Generator().manual_seed(20_260_510))
        refuse_double(module.weight, name)
        bias = None if module.bias is None else module.bias.detach().float()
        found.append(Product(name, "forward", module.weight.detach().float(), bias, drawn, calibration=rows))
    return found


def profile(products: Sequence[Product], config: DispatchConfig, device: torch.device | str = "cpu") -> Profile:
    """Try every candidate on every product, and choose.

    Args:
        products: Products of a model.
        config: Bounds, sizes and counts.
        device: On which they run.
    """
    candidates = chosen(config.kernels or None)
    choices, trials = [], {}
    for product in products:
        for rows, found in try_all(product, candidates, config).items():
            trials[product.site, product.of, rows] = found
            choices.append(choose(product, rows, found, config))
    bound = {"sqnr_db": config.sqnr_db, "median_relative": config.median_relative}
    weights = weights_digest({product.site: (product.weight, product.bias) for product in products})
    names = tuple(one.name for one in candidates)
    return Profile(PrecisionPlan(tuple(choices), machine(device), bound, config.seed, weights, kernels=names), trials)


class DispatchedLinear(nn.Module):
    """A linear layer computed by the kernels of a plan, for scoring: it has no gradient.

    Calls take any floating-point dtype, compute in float32 or less, and give that dtype back.

    Attributes:
        weight: As it was, ``[N, K]``: fp32 is the way out for sizes that the plan has none for.
        bias: Likewise.
        unplanned: Calls with more rows than the plan knows, which were computed in fp32.

    Args:
        linear: The layer.
        name: Its name in the plan.
        plan: With choices for it.
    """

    def __init__(self, linear: nn.Linear, name: str, plan: PrecisionPlan) -> None:
        super().__init__()
        refuse_double(linear.weight, name)
        self.weight, self.bias = linear.weight, linear.bias
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.unplanned = 0
        choices = sorted((c for c in plan.choices if (c.site, c.of) == (name, "forward")), key=lambda c: c.rows)
        packed: dict[str, Kernel] = {}
        for choice in choices:
            if choice.kernel not in packed:
                one = candidate(choice.kernel)
                packed[choice.kernel] = one.pack(
                    linear.weight.detach().float(),
                    None if linear.bias is None else linear.bias.detach().float(),
                    choice.calibration,
                )
        self._kernels = [(choice.rows, packed[choice.kernel]) for choice in choices]

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] != self.in_features:
            raise NumericsError(f"{list(x.shape)} inputs for {self.in_features}", where="x")
        rows = x.reshape(x.shape[:-1].numel(), self.in_features).float()
        kernel = next((own for most, own in self._kernels if len(rows) <= most), None)
        if kernel is None:
            self.unplanned += 1
            bias = None if self.bias is None else self.bias.float()
            return F.linear(x.float(), self.weight.float(), bias).to(x.dtype)
        return kernel(rows).reshape(*x.shape[:-1], self.out_features).to(x.dtype)


def planned_sites(model: nn.Module, plan: PrecisionPlan) -> dict[str, nn.Linear]:
    """A model's linear layers, if they are those of a plan.

    Args:
        model: Any.
        plan: For this model.

    Raises:
        NumericsError: the plan names a layer that the model does not have, or has of another size.
    """
    own = sites(model)
    for choice in plan.choices:
        if choice.site not in own:
            raise NumericsError(f"the model has no layer {choice.site!r}", where="plan", remedy="make the plan anew")
        here = tuple(own[choice.site].weight.shape)
        if (choice.outputs, choice.inputs) != here:
            raise NumericsError(
                f"{choice.site} is {here}, the plan's {(choice.outputs, choice.inputs)}",
                where="plan",
                remedy="make the plan anew for this model",
            )
    return own


def planned(model: nn.Module, plan: PrecisionPlan, allow_stale: bool = False) -> dict[str, nn.Module]:
    """Modules with which a plan replaces a model's linear layers, by name.

    Args:
        model: Trained model, which is not changed.
        plan: Plan for this model and machine.
        allow_stale: Whether to accept a plan that was made on another device, with other threads or libraries.

    Raises:
        NumericsError: the plan is for training, for other weights or another machine, or names a layer that the model
            lacks or has with another size.
    """
    plan.check_purpose("scoring")
    own = planned_sites(model, plan)
    layers = {name: own[name] for name in plan.sites}
    if not allow_stale:
        plan.check_machine(next((layer.weight.device for layer in layers.values()), torch.device("cpu")))
    for name, layer in layers.items():
        refuse_double(layer.weight, name)
    if plan.weights != weights_digest({name: (layer.weight, layer.bias) for name, layer in layers.items()}):
        raise NumericsError(
            "was made for other weights",
            where="plan",
            remedy="make the plan anew: `cordillera probe RUN`, or profile()",
        )
    return {name: DispatchedLinear(layer, name, plan) for name, layer in layers.items()}


def apply(model: nn.Module, plan: PrecisionPlan, allow_stale: bool = False) -> nn.Module:
    """Replace a model's linear layers by modules with the plan's kernels.

    Args:
        model: Trained model, which is changed in place.
        plan: Plan for this model and machine.
        allow_stale: Whether to accept a plan that was made on another device, with other threads or libraries.

    Returns:
        The model.

    Raises:
        NumericsError: the plan is for training, for other weights or another machine, or names a layer that the model
            lacks or has with another size.
    """
    for name, module in planned(model, plan, allow_stale).items():
        replace(model, name, module)
    return model
