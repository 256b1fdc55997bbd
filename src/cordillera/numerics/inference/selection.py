"""Choice of the parts of a model that are kept in fewer bits, under a budget of quality, in few evaluations.

The search follows low-precision recommendation inference (arXiv 2105.12676): it starts with every part at its cheapest,
and then the parts that cost most quality for what they save move back towards full precision until the budget is met.
One evaluation of each part alone measures its cost in quality; bisection finds how many parts must move back. So ``n``
parts take about ``n + log2(n) + 1`` evaluations of the whole model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from cordillera.errors import NumericsError

BUDGET = 2e-4
"""Default budget: largest relative change of quality."""


class Part(NamedTuple):
    """Table or layer of a model.

    Attributes:
        options: Options from the cheapest to full precision, which is the last.
        costs: Cost of each option, in one unit for all parts, such as bytes or time.
    """

    name: str
    options: tuple[str, ...]
    costs: tuple[float, ...]


class Change(NamedTuple):
    """Relative change of quality compared with full precision, with its confidence interval; higher is worse."""

    mean: float
    low: float
    high: float


Evaluate = Callable[[Mapping[str, str]], Change]
"""Function from the options of the parts that are not at full precision to the change of quality."""


@dataclass(frozen=True)
class Evaluated:
    """One evaluation of the search.

    Attributes:
        options: Options of the parts that were not at full precision.
        cost: Total cost of all parts.
    """

    options: dict[str, str]
    change: Change
    cost: float


@dataclass(frozen=True)
class Selection:
    """Result of a search.

    Attributes:
        options: Option of every part.
        evaluated: All evaluations, in order.
        alone: Change of quality of each part alone at its cheapest, if it was evaluated.
        cost: Total cost of the options.
        full_cost: Total cost of full precision.
    """

    options: dict[str, str]
    evaluated: tuple[Evaluated, ...]
    alone: dict[str, Change]
    cost: float
    full_cost: float

    def without(self, parts: Sequence[Part], options: Mapping[str, str]) -> Selection:
        """Return the selection with other ``options`` of some of its ``parts``; the others stay in full precision."""
        chosen = {part.name: options.get(part.name, "fp32") for part in parts}
        cost = sum(part.costs[part.options.index(chosen[part.name])] for part in parts)
        return replace(self, options=chosen, cost=cost)


def sweep_evaluations(parts: Sequence[Part]) -> int:
    """Return the number of evaluations of a sweep that tries every option of every one of a model's parts alone."""
    return sum(len(part.options) - 1 for part in parts)


def select(parts: Sequence[Part], evaluate: Evaluate, budget: float) -> Selection:
    """Find the cheapest options whose estimated change of quality is within the budget.

    Args:
        parts: Parts of a model.
        evaluate: Function that evaluates the model with options; for ``n`` parts with up to ``m`` options it is called
            at most ``n + m + log2(n)`` times.
        budget: Largest estimate of a change; 0 or more.

    Raises:
        NumericsError: If a part has no option or another number of costs, or the budget is negative.
    """
    check_budget(budget)
    for part in parts:
        if not part.options or len(part.options) != len(part.costs):
            raise NumericsError(f"{len(part.options)} options, {len(part.costs)} costs", where=part.name)
    full = {part.name: len(part.options) - 1 for part in parts}
    tried: list[Evaluated] = []

    def run(levels: Mapping[str, int]) -> Change:
        options = {p.name: p.options[levels[p.name]] for p in parts if levels[p.name] != full[p.name]}
        for one in tried:
            if one.options == options:
                return one.change
        if not options:
            return Change(0.0, 0.0, 0.0)
        tried.append(Evaluated(options, evaluate(options), _cost(parts, levels)))
        return tried[-1].change

    def ended(levels: Mapping[str, int], alone: dict[str, Change]) -> Selection:
        options = {part.name: part.options[levels[part.name]] for part in parts}
        return Selection(options, tuple(tried), alone, _cost(parts, levels), _cost(parts, full))

    levels = dict.fromkeys(full, 0)
    if run(levels).mean <= budget:
        return ended(levels, {})
    alone = {part.name: run({**full, part.name: 0}) for part in parts if full[part.name]}

    def worth(part: Part) -> float:
        """Return the quality lost per unit of cost saved by a part; parts that lose nothing come last."""
        return alone[part.name].mean / max(part.costs[-1] - part.costs[0], 1e-12)

    worst = sorted((part for part in parts if part.name in alone), key=lambda part: (-worth(part), part.name))
    while True:

        def raised(count: int, levels: Mapping[str, int] = levels) -> dict[str, int]:
            first = {part.name for part in worst[:count]}
            return {name: min(full[name], level + (name in first)) for name, level in levels.items()}

        if run(raised(len(worst))).mean > budget:  # not enough, even if all parts move back one step
            levels = raised(len(worst))
            if levels == full:
                return ended(full, alone)
            continue
        low, high = 0, len(worst)
        while high - low > 1:
            middle = (low + high) // 2
            if run(raised(middle)).mean <= budget:
                high = middle
            else:
                low = middle
        return ended(raised(high), alone)


def check_budget(budget: float) -> None:
    """Check a budget, the largest estimate of a change.

    Raises:
        NumericsError: If it is negative, NaN or infinite.
    """
    if not 0 <= budget < math.inf:
        raise NumericsError(f"is {budget}", where="budget", remedy="0 or more, relative: 0.0002 is 0.02 %")


def _cost(parts: Sequence[Part], levels: Mapping[str, int]) -> float:
    return sum(part.costs[levels[part.name]] for part in parts)
