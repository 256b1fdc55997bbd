"""Which parts of a model may be kept in fewer bits, under a budget of quality, in few evaluations.

The loop of low-precision recommendation inference (arXiv 2105.12676): everything at its cheapest, then the parts that
cost most quality for what they save go back towards full precision until the budget is met. One evaluation of a part
alone says what it costs; how many have to go back is found by bisection, so that ``n`` parts take about
``n + log2(n) + 1`` evaluations of the whole model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cordillera.errors import NumericsError

BUDGET = 2e-4
"""Default budget: largest change of quality."""


class Part(NamedTuple):
    """A table or a layer.

    Attributes:
        name: Its name.
        options: From the cheapest to full precision, which comes last.
        costs: Of the options, in any one unit: bytes, or time.
    """

    name: str
    options: tuple[str, ...]
    costs: tuple[float, ...]


class Change(NamedTuple):
    """A quality beside that of full precision, relative, higher being worse.

    Attributes:
        mean: Estimate.
        low: Of its confidence interval.
        high: Likewise.
    """

    mean: float
    low: float
    high: float


Evaluate = Callable[[Mapping[str, str]], Change]
"""From an option for each part that is not at full precision."""


@dataclass(frozen=True)
class Evaluated:
    """One evaluation of the search.

    Attributes:
        options: Of the parts that were not at full precision.
        change: Of quality.
        cost: Of all parts.
    """

    options: dict[str, str]
    change: Change
    cost: float


@dataclass(frozen=True)
class Selection:
    """What a search found.

    Attributes:
        options: Of every part.
        evaluated: All evaluations, in order.
        alone: What each part costs alone at its cheapest, where it was looked at.
        cost: Of the options.
        full_cost: Of full precision.
    """

    options: dict[str, str]
    evaluated: tuple[Evaluated, ...]
    alone: dict[str, Change]
    cost: float
    full_cost: float


def sweep_evaluations(parts: Sequence[Part]) -> int:
    """Evaluations of a sweep that tries every option of every part alone.

    Args:
        parts: Of a model.
    """
    return sum(len(part.options) - 1 for part in parts)


def select(parts: Sequence[Part], evaluate: Evaluate, budget: float) -> Selection:
    """The cheapest options found whose estimated change of quality keeps the budget.

    Args:
        parts: Of a model.
        evaluate: Of the model with options; for ``n`` parts with up to ``m`` options it is called at most
            ``n + m + log2(n)`` times.
        budget: Largest estimate of a change; 0 or more.

    Raises:
        NumericsError: a part has no option, or costs that do not go with them, or the budget is negative.
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
        """Quality that a part costs for what it saves; those that cost nothing come last."""
        return alone[part.name].mean / max(part.costs[-1] - part.costs[0], 1e-12)

    worst = sorted((part for part in parts if part.name in alone), key=lambda part: (-worth(part), part.name))
    while True:

        def raised(count: int, levels: Mapping[str, int] = levels) -> dict[str, int]:
            first = {part.name for part in worst[:count]}
            return {name: min(full[name], level + (name in first)) for name, level in levels.items()}

        if run(raised(len(worst))).mean > budget:  # not enough, even if all go back one step
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
    """Refuse a budget that is none.

    Args:
        budget: Largest estimate of a change.

    Raises:
        NumericsError: it is negative, NaN or infinite.
    """
    if not 0 <= budget < math.inf:
        raise NumericsError(f"is {budget}", where="budget", remedy="0 or more, relative: 0.0002 is 0.02 %")


def _cost(parts: Sequence[Part], levels: Mapping[str, int]) -> float:
    return sum(part.costs[levels[part.name]] for part in parts)
