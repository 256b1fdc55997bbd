"""Members of a group that compute far slower than the others: ratios of times of the same steps, and their spread."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_WINDOW = 100  # steps that are looked at
_FEWEST = 5  # steps that a straggler has taken part in
_FACTOR = 1.2  # least factor of a straggler
_SPREADS = 3.0  # least distance of its factor from 1, in standard deviations of the others' ratios
_TO_DEVIATION = 1.4826  # ratio of standard deviation to median absolute deviation of a normal distribution


@dataclass(frozen=True)
class Straggler:
    """Member that is far slower than the others.

    Attributes:
        name: Name of the member.
        factor: Median of its time over the median time of the others, in the same steps.
        steps: Number of steps that this was measured in.
    """

    name: str
    factor: float
    steps: int


def find_stragglers(times: Sequence[Mapping[str, float]]) -> list[Straggler]:
    """Return the members that are far slower than the others in the last 100 steps of several members, slowest first.

    The factor of such a member is above 1.2, and above 1 by three standard deviations of the ratios of the others, as
    the median absolute deviation estimates them.

    Args:
        times: Time of each member for the same amount of work, above 0, by step.
    """
    ratios: dict[str, list[float]] = defaultdict(list)
    for step in [one for one in times if len(one) > 1][-_WINDOW:]:
        for name, time in step.items():
            ratios[name].append(time / statistics.median(other for key, other in step.items() if key != name))
    found = []
    for name, own in ratios.items():
        others = [ratio for key, one in ratios.items() if key != name for ratio in one]
        middle, factor = statistics.median(others), statistics.median(own)
        spread = _TO_DEVIATION * statistics.median(abs(ratio - middle) for ratio in others)
        if len(own) >= _FEWEST and factor > max(_FACTOR, 1 + _SPREADS * spread):
            found.append(Straggler(name, factor, len(own)))
    return sorted(found, key=lambda one: -one.factor)
