"""The best split of a budget of training FLOPs into parameters and tokens, from runs of several budgets.

Runs of one budget differ in size alone: small models see many tokens, large ones few. A second-degree polynomial of the
loss over the logarithm of tokens has its minimum at the optimal number of tokens for that budget (Grattafiori et al.
2024, section 3.2.1, figure 2; after Hoffmann et al. 2022, section 3.2). The growth of the minima with compute is fitted
in :mod:`cordillera.training.scaling.isoflop_laws`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cordillera.errors import DataError
from cordillera.numbers import compact
from cordillera.run import Run
from cordillera.training.ranking.evaluation import number

_Floats = NDArray[np.float64]
FEWEST_SIZES = 3
# Largest factor by which one more round of runs should exceed the trained range.
_REACH = 4.0
QUANTITIES = {"tokens": "tokens", "parameters": "parameters", "non_embedding": "parameters without embeddings"}


def amount(value: float) -> str:
    """Format a number of tokens or parameters: ``950``, ``12.3k``, ``1.7B``."""
    return compact(value).replace("G", "B")


def power(value: float) -> str:
    """Format a number of FLOPs: ``3.8e25``. Whole steps match a budget to a few thousandths, which are not shown."""
    texts = [f"{value:.{digits}e}".replace("e+0", "e").replace("e+", "e").replace("e-0", "e-") for digits in range(3)]
    return next((text for text in texts if abs(float(text) - value) <= 5e-3 * value), texts[-1])


@dataclass(frozen=True)
class IsoFlopRun:
    """Trained language model.

    Attributes:
        compute: Training FLOPs of the whole run; without attention if ``counts_attention`` is false.
        parameters: Number of parameters; a tied head counts once.
        non_embedding: Number of parameters outside the embedding and the head.
        loss: Loss on held-out documents, nats per token; not finite if training diverged.
    """

    name: str
    compute: float
    parameters: int
    non_embedding: int
    tokens: int
    loss: float
    counts_attention: bool = True


@dataclass(frozen=True)
class Optimum:
    """Best split of a budget, at the minimum of the parabola.

    Attributes:
        parameters: Number of parameters of a model that takes this number of tokens for the budget, interpolated
            between runs.
        non_embedding: Number of such parameters outside the embedding and the head.
    """

    tokens: float
    parameters: float
    non_embedding: float
    loss: float


@dataclass(frozen=True)
class IsoFlopCurve:
    """The runs of one budget and their parabola ``loss = c0 + c1 x + c2 x^2``, ``x = log10(tokens) - centre``.

    Attributes:
        budget: Geometric mean of the runs' FLOPs.
        runs: Runs that were fitted, in ascending order of tokens.
        left_out: Reason for each run that was not fitted, by name.
        coefficients: ``c0, c1, c2``; empty if there are too few sizes.
        optimum: The optimum; None if the curve shows none.
        refusal: Reason why the curve shows none, and which runs to add.
    """

    budget: float
    runs: list[IsoFlopRun]
    left_out: dict[str, str]
    centre: float
    coefficients: list[float]
    optimum: Optimum | None
    refusal: str | None = None

    def predict(self, tokens: Any) -> _Floats:
        """Return the parabola at ``tokens`` (an array or a number)."""
        x = np.log10(np.asarray(tokens, dtype=np.float64)) - self.centre
        c0, c1, c2 = self.coefficients
        return c0 + c1 * x + c2 * x * x

    @property
    def range(self) -> tuple[int, int]:
        """Smallest and largest number of tokens of a run."""
        return self.runs[0].tokens, self.runs[-1].tokens


def isoflops(runs: Sequence[IsoFlopRun], *, tolerance: float = 0.1) -> list[IsoFlopCurve]:
    """Group runs by budget, fit a parabola to each group, and return the curves in ascending order of budget.

    Runs that diverged, and copies of a run, are left out and named. A curve shows no optimum, and says so, if it has
    fewer than three sizes, opens downwards, or has its minimum outside the trained range.

    Args:
        runs: Runs of any budgets, in any order.
        tolerance: Largest relative gap between the FLOPs of consecutive runs of one budget.

    Raises:
        DataError: If there are no runs, a number of one is not positive, some count attention and some do not, or runs
            of one group spread too far to have one budget.
    """
    if not runs:
        raise DataError("there are no runs", where="IsoFLOP", remedy="train some, in several sizes for each budget")
    for run in runs:
        for key in ("compute", "parameters", "non_embedding", "tokens"):
            value = getattr(run, key)
            if not (math.isfinite(value) and value > 0):
                raise DataError(f"{key} must be above 0, got {value}", where=f"IsoFLOP run {run.name}")
    if len({run.counts_attention for run in runs}) > 1:
        raise DataError(
            "some runs count the FLOPs of attention and some do not; they have no budget in common",
            where="IsoFLOP",
            remedy="measure all runs the same way",
        )
    ordered = sorted(runs, key=lambda run: (run.compute, run.tokens, run.name))
    groups = [[ordered[0]]]
    for run in ordered[1:]:
        if run.compute > groups[-1][-1].compute * (1 + tolerance):
            groups.append([])
        groups[-1].append(run)
    return [_curve(group, tolerance) for group in groups]


def _curve(group: list[IsoFlopRun], tolerance: float) -> IsoFlopCurve:
    low, high = group[0].compute, group[-1].compute
    if high > low * (1 + tolerance) ** 2:
        raise DataError(
            f"{len(group)} runs from {power(low)} to {power(high)} FLOPs follow one another too closely to be told "
            "apart as budgets, and spread too far to be one",
            where="IsoFLOP",
            remedy="choose budgets at least twice as large as one another, or a smaller tolerance",
        )
    kept, left_out = _sort_out(group)
    budget = float(np.exp(np.mean(np.log([run.compute for run in kept or group]))))
    sizes = len({run.tokens for run in kept})
    if sizes < FEWEST_SIZES:
        refusal = (
            f"{sizes} {'size is' if sizes == 1 else 'sizes are'} too few for a parabola; train at least "
            f"{FEWEST_SIZES - sizes} more at this budget, better {FEWEST_SIZES + 2 - sizes}"
        )
        return IsoFlopCurve(budget, kept, left_out, math.nan, [], None, refusal)
    x = np.log10([run.tokens for run in kept])
    centre = float(x.mean())
    loss = np.array([run.loss for run in kept])
    coefficients = projection(x - centre) @ loss
    curve = IsoFlopCurve(budget, kept, left_out, centre, coefficients.tolist(), None)
    return _with_optimum(curve)


def _sort_out(group: list[IsoFlopRun]) -> tuple[list[IsoFlopRun], dict[str, str]]:
    kept: list[IsoFlopRun] = []
    left_out: dict[str, str] = {}
    seen: dict[tuple[float, ...], str] = {}
    for run in sorted(group, key=lambda run: (run.tokens, run.name)):
        numbers = (run.compute, run.parameters, run.tokens, run.loss)
        if not math.isfinite(run.loss):
            left_out[run.name] = "diverged: its loss is not finite"
        elif numbers in seen:
            left_out[run.name] = f"equals {seen[numbers]} in every number: a copy, or the same run given twice"
        else:
            seen[numbers] = run.name
            kept.append(run)
    return kept, left_out


def design(x: _Floats) -> _Floats:
    """Return the powers 0 to 2 of ``x [n]``: ``[n, 3]``."""
    return np.stack([np.ones_like(x), x, x * x], axis=-1)


def projection(x: _Floats) -> _Floats:
    """Return the matrix that maps losses at ``x [n]`` to the coefficients of their parabola: ``[3, n]``."""
    return np.asarray(np.linalg.pinv(design(x)), dtype=np.float64)


def _with_optimum(curve: IsoFlopCurve) -> IsoFlopCurve:
    c0, c1, c2 = curve.coefficients
    fewest, most = curve.range
    if c2 <= 0:
        best = min(curve.runs, key=lambda run: run.loss).tokens
        advice = "train more sizes, farther apart: the loss differs too little between these"
        if best in (fewest, most):
            advice = _beyond(curve, most * _REACH if best == most else fewest / _REACH)
        return replace(curve, refusal=f"its parabola opens downwards, so it has no minimum; {advice}")
    # An optimum 100 times beyond the runs is only known to be far away.
    place = curve.centre - c1 / (2 * c2)
    bounded = min(max(place, math.log10(fewest) - 2), math.log10(most) + 2)
    tokens = 10.0**bounded
    if not fewest <= tokens <= most:
        if tokens > most:
            relation, aim = f"above the most of a run ({amount(most)})", min(1.5 * tokens, most * _REACH)
        else:
            relation, aim = f"below the fewest of a run ({amount(fewest)})", max(tokens / 1.5, fewest / _REACH)
        about = "about" if bounded == place else "beyond"
        refusal = f"its minimum would lie at {about} {amount(tokens)} tokens, {relation}: outside what was trained"
        return replace(curve, refusal=f"{refusal}; {_beyond(curve, aim)}")
    at = np.array(math.log(tokens))
    optimum = Optimum(
        tokens=tokens,
        parameters=float(np.exp(along(curve.runs, "parameters", at))),
        non_embedding=float(np.exp(along(curve.runs, "non_embedding", at))),
        loss=c0 - c1 * c1 / (4 * c2),
    )
    return replace(curve, optimum=optimum)


def _beyond(curve: IsoFlopCurve, tokens: float) -> str:
    """Return which runs to add outside the trained range."""
    is_more = tokens > curve.range[1]
    end = curve.runs[-1] if is_more else curve.runs[0]
    kind, bound = ("smaller", "down") if is_more else ("larger", "up")
    parameters = end.parameters * end.tokens / tokens
    if parameters < end.parameters - end.non_embedding:
        return (
            f"the vocabulary alone takes {amount(end.parameters - end.non_embedding)} parameters of the smallest "
            "model: take a larger budget, or a smaller vocabulary"
        )
    return (
        f"train {kind} models at this budget too, {bound} to about {amount(parameters)} parameters on "
        f"{amount(tokens)} tokens"
    )


def along(runs: Sequence[IsoFlopRun], quantity: str, log_tokens: _Floats) -> _Floats:
    """Return the logarithm of a ``quantity`` (a key of :data:`QUANTITIES`) along a budget's ``runs`` at ``log_tokens``.

    Natural logarithms of tokens may have any shape. Between and beyond runs of at least two sizes, it is linear.
    """
    x, place = np.unique(np.log([run.tokens for run in runs]), return_inverse=True)
    y = np.bincount(place, weights=np.log([getattr(run, quantity) for run in runs])) / np.bincount(place)
    segment = np.clip(np.searchsorted(x, log_tokens) - 1, 0, x.size - 2)
    slope = (y[segment + 1] - y[segment]) / (x[segment + 1] - x[segment])
    return y[segment] + slope * (log_tokens - x[segment])


def measure_language(runs: Sequence[Run]) -> list[IsoFlopRun]:
    """Read compute, size, tokens and held-out loss of finished language runs.

    Compute is the recorded FLOPs per token, with the document mask, times the tokens. If a run has no such records,
    FLOPs of all runs are counted without attention instead: the two are never mixed.

    Args:
        runs: Runs with ``model.json``, ``evaluation.json`` and ``metrics.jsonl``.

    Raises:
        RunError: If a file is missing or damaged.
        DataError: If a run is not of a language model, or a file lacks a number.
    """
    found = [_measure(run) for run in runs]
    counted = [
        replace(run, compute=rate * run.tokens, counts_attention=True) for run, rate in found if rate is not None
    ]
    return counted if len(counted) == len(found) else [run for run, _ in found]


def _measure(run: Run) -> tuple[IsoFlopRun, float | None]:
    """Return a run with FLOPs without attention, and the true FLOPs per token if they were recorded."""
    card, evaluation = run.read_json("model.json"), run.read_json("evaluation.json")
    if evaluation.get("kind") != "language":
        raise DataError(
            "is not of a language model", where=str(run.folder), remedy="cordillera sweep fits runs of recommenders"
        )
    try:
        config = card["config"]
        embeddings = config["vocabulary"] * config["hidden"] * (1 if config["tied"] else 2)
        parameters, tokens = int(card["parameters"]), int(evaluation["tokens"])
        plain = float(card["flops_per_token"]) * tokens
        loss = number(evaluation["loss"])
    except KeyError as error:
        raise DataError(f"does not hold {error}", where=str(run.folder)) from error
    entry = IsoFlopRun(run.name, plain, parameters, parameters - embeddings, tokens, loss, counts_attention=False)
    # A resumed or unfinished window is timed only in part, so FLOPs and tokens of the same seconds are used.
    flops = timed = 0.0
    for record in run.metrics():
        if record.get("kind") == "train" and record.get("flops_per_second") and record.get("tokens_per_second"):
            flops += record["flops_per_second"] * record["seconds"]
            timed += record["tokens_per_second"] * record["seconds"]
    return entry, flops / timed if timed else None
