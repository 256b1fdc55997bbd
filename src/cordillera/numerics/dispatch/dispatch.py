"""Choice of the fastest kernel that is accurate enough for each layer, product and size (Dispatch of LoKA).

Every candidate is run on inputs drawn from a probe's statistics and compared with float64. Candidates that pass are
timed in turn, quantisation included. The result is a :class:`PrecisionPlan`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field, field_validator
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
    """Accuracy bounds of kernels, and effort spent on measuring them.

    Attributes:
        sqnr_db: Minimum signal-to-noise ratio in dB.
        median_relative: Maximum median relative error.
        faster: Minimum speed-up over fp32 for a kernel to be chosen.
        rows: Numbers of input rows for which kernels are chosen; each stands for all sizes down to the next smaller
            one.
        draws: Number of inputs drawn to judge a layer's kernels.
        judged_rows: Number of rows of each drawn input.
        rounds: Number of times that a kernel is timed, in turn with the others; the median counts.
        kernels: Names of the candidates; empty for all.
        seed: Seed of the drawn inputs.
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

    @field_validator("rows")
    @classmethod
    def _differ(cls, rows: tuple[int, ...]) -> tuple[int, ...]:
        if len({bucket(one) for one in rows}) < len(rows):
            raise ValueError("numbers of rows are rounded up to powers of two, which must differ")
        return rows


@dataclass(frozen=True)
class Trial:
    """Result of one candidate on one product.

    Attributes:
        accuracy: Worst accuracy over the drawn inputs; None if the candidate was not run.
        milliseconds: Median time; NaN if the candidate was not timed.
        refused: Reason why the candidate was refused; empty if it passed.
    """

    kernel: str
    accuracy: Accuracy | None = None
    milliseconds: float = math.nan
    refused: str = ""


@dataclass(frozen=True)
class Product:
    """Matrix product to compute: the weight of a layer and a source of typical inputs.

    Attributes:
        weight: Weight as the kernel takes it, ``[N, K]``.
        bias: Bias ``[N]``, or None.
        draw: Function from a number of rows and a generator to inputs ``[rows, K]``.
        calibration: Input rows for choosing quantisation ranges, or None.
    """

    site: str
    of: Pass
    weight: Tensor
    bias: Tensor | None
    draw: Callable[[int, torch.Generator], Tensor]
    calibration: Tensor | None = None


def judge(product: Product, kernel: Kernel, config: DispatchConfig) -> Accuracy:
    """Return the worst accuracy of a ``kernel`` over inputs drawn by ``config`` for a ``product``, against float64."""
    exact_weight = product.weight.double()
    worst: Accuracy | None = None
    for draw in range(config.draws):
        x = product.draw(config.judged_rows, torch.Generator().manual_seed(config.seed + draw))
        reference = x.double() @ exact_weight.T
        if product.bias is not None:
            reference += product.bias.double()
        found = Accuracy.of(kernel(x), reference)
        worst = found if worst is None else worst.worse(found)
    assert worst is not None
    return worst


def refusal(one: Candidate, found: Accuracy, config: DispatchConfig) -> str:
    """Return why ``one``, of the accuracy ``found``, does not keep the bounds of ``config`` or cannot be timed.

    The result is empty if it can be used.
    """
    if found.sqnr_db < config.sqnr_db or found.median_relative > config.median_relative:
        return f"{found.sqnr_db:.1f} dB, median relative error {found.median_relative:.2g}"
    return "emulated here: no time to go by" if one.emulated else ""


@contextmanager
def skipped(one: Candidate, refused: dict[str, str]) -> Iterator[None]:
    """Skip a candidate that cannot compute a layer (a weight beyond its format, a size beyond its accumulators).

    Args:
        one: Candidate to skip; errors of the fp32 reference are raised.
        refused: Reasons by name of the candidate, to which the reason is added.
    """
    try:
        yield
    except (NumericsError, RuntimeError, ValueError, TypeError, IndexError) as error:
        if one.name == "fp32":
            raise
        what = error.what if isinstance(error, NumericsError) else str(error).split("\n")[0]
        refused[one.name] = f"cannot take it: {what}"


def try_all(product: Product, candidates: Sequence[Candidate], config: DispatchConfig) -> dict[int, list[Trial]]:
    """Judge the candidates once, and time those that pass for every number of rows.

    Args:
        product: Product with its weight and inputs.
        candidates: Candidates; fp32 must be among them.
        config: Accuracy bounds, counts, and numbers of rows.
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
    for rows in config.rows:
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
    """Return the median seconds of a call for each candidate, timed in turn on changing inputs."""
    generator = torch.Generator().manual_seed(config.seed)
    size = 4 * rows * product.weight.shape[1]
    inputs = [product.draw(rows, generator) for _ in range(max(2, min(8, _CACHE_BYTES // max(1, size))))]

    def calls(one: Candidate) -> Callable[[int], Any]:
        return lambda turn: kernels[one.name](inputs[turn % len(inputs)])

    return median_seconds({one.name: calls(one) for one in candidates}, config.rounds)


def median_seconds(calls: Mapping[str, Callable[[int], Any]], rounds: int) -> dict[str, float]:
    """Return the median seconds of a call for each contender, timed in turn.

    Args:
        calls: Functions by name; each is given an increasing number by which it can choose its input.
        rounds: Number of values for each contender, each the mean of as many calls as the first one makes in 2 ms.
    """
    names = list(calls)
    began = time.perf_counter()
    for turn in range(2):
        calls[names[0]](turn)
    repeats = max(1, min(64, int(2e-3 / max(1e-7, (time.perf_counter() - began) / 2))))
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds + 1):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            # Threads of the previous contender spin for a while, which would slow down a short call.
            began = time.perf_counter()
            while time.perf_counter() - began < _SETTLE_S:
                calls[name](turn)
            began = time.perf_counter()
            for repeat in range(repeats):
                calls[name](turn + repeat + 1)
            if turn:
                seconds[name].append((time.perf_counter() - began) / repeats)
    return {name: sorted(values)[len(values) // 2] for name, values in seconds.items()}


def choose(product: Product, rows: int, trials: Sequence[Trial], config: DispatchConfig) -> KernelChoice:
    """Return the fastest of the trials of a product's candidates that passed, or fp32 if it is not sufficiently faster.

    Args:
        product: Product that was tried.
        rows: Number of rows.
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
    """Return the candidates that cannot compute some layers, by the trials of each layer.

    Returns:
        Number of layers by candidate and reason.
    """
    found: dict[str, dict[str, int]] = {}
    for of_layer in trials.values():
        for kernel, reason in dict.fromkeys((t.kernel, t.refused) for t in of_layer if t.refused and not t.accuracy):
            reasons = found.setdefault(kernel, {})
            reasons[reason] = reasons.get(reason, 0) + 1
    return found


@dataclass
class Profile:
    """A plan with all trials behind it, by site, product and number of rows."""

    plan: PrecisionPlan
    trials: dict[tuple[str, Pass, int], list[Trial]] = field(default_factory=dict)

    def uniform_milliseconds(self) -> dict[str, float]:
        """Return the total time of every kernel that is accurate enough everywhere, if it were used everywhere."""
        times: dict[str, list[float]] = {}
        for trials in self.trials.values():
            for trial in trials:
                times.setdefault(trial.kernel, []).append(trial.milliseconds)
        return {name: sum(taken) for name, taken in times.items() if math.isfinite(sum(taken))}

    def skipped(self) -> dict[str, dict[str, int]]:
        """Return the candidates that cannot compute some products: the number of layers by candidate and reason."""
        return skipped_layers(
            {
                site: [t for key, trials in self.trials.items() if key[0] == site for t in trials]
                for site in self.plan.sites
            }
        )

    def geometric_mean(self) -> float:
        """Return the geometric mean of the speed-ups over fp32."""
        ratios = [math.log(choice.expected.get("times_fp32", 1.0)) for choice in self.plan.choices]
        return math.exp(sum(ratios) / len(ratios))


def forward_products(
    model: nn.Module,
    statistics: Mapping[str, RowStatistics],
    only: Sequence[str] = (),
    without: Sequence[str] = (),
    calibration: Mapping[str, Tensor] | None = None,
) -> list[Product]:
    """Return the forward products of a trained model's linear layers, with inputs drawn from a probe's statistics.

    Args:
        model: Trained model.
        statistics: Statistics of each layer's inputs.
        only: Patterns of layers to include; empty for all.
        without: Patterns of layers to leave out.
        calibration: Recorded input rows of each layer; None to draw them too.

    Raises:
        NumericsError: If a layer was not probed, was probed with another number of inputs, or is float64.
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
    """Try every candidate on every product, and choose the kernels.

    Args:
        products: Products of a model.
        config: Bounds, sizes and counts.
        device: Device on which the products run.
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
    """Linear layer computed by the kernels that a plan has for its name; for scoring only, as it has no gradient.

    Inputs may have any floating-point dtype, which the output shares; the computation is in float32 or less. Calls with
    more rows than the plan covers are computed in fp32, with the unchanged weight, and counted in ``unplanned``.
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
    """Return a model's linear layers by name, after checking that they match a plan.

    Raises:
        NumericsError: If the ``plan`` names a layer that the ``model`` lacks or has with another size.
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


def planned(model: nn.Module, plan: PrecisionPlan) -> dict[str, nn.Module]:
    """Modules with which a plan replaces a model's linear layers, by name.

    Args:
        model: Trained model, which is not changed.
        plan: Plan for this model and machine.

    Raises:
        NumericsError: If the plan is for training, for other weights or another machine, or names a layer that the
            model lacks or has with another size.
    """
    plan.check_purpose("scoring")
    own = planned_sites(model, plan)
    layers = {name: own[name] for name in plan.sites}
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


def apply(model: nn.Module, plan: PrecisionPlan) -> nn.Module:
    """Replace a model's linear layers, in place, by modules with the plan's kernels.

    The arguments ``model`` and ``plan`` and the errors are those of :func:`planned`.

    Returns:
        The model.
    """
    for name, module in planned(model, plan).items():
        replace(model, name, module)
    return model
