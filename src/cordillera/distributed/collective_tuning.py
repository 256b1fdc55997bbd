"""Which plan a collective of the backend ``cordillera`` follows, by its bytes and ranks; measured for a machine.

Source: the tuner files of NCCL and NCCLX (arXiv 2510.20171), which choose by collective, ranks and bytes.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Protocol, TypeAlias

import torch
import torch.distributed as dist
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator
from torch import Tensor

from cordillera.errors import PlanError
from cordillera.files import parse_toml, read_text, write
from cordillera.mistakes import explain
from cordillera.planning.network.collective_algorithms import (
    direct_all_gather,
    doubling_all_gather,
    hierarchical_all_gather,
    ring_all_gather,
)
from cordillera.planning.network.collective_plans import CollectivePlan

TUNING = "CORDILLERA_TUNING"
"""Environment variable with the file of :class:`CollectiveTuning`, which must be the same on all ranks."""

GATHERED = "gathered"
"""Plan of an all-reduce in which every rank gathers all tensors and adds them itself."""

MOST_RANKS = 1 << 17
"""Largest number of ranks in a rule, about that of the largest jobs."""

TunedCollective: TypeAlias = Literal["all_reduce", "all_gather", "reduce_scatter"]
PlanName: TypeAlias = Annotated[
    str, StringConstraints(pattern="^(direct|ring|bidirectional|doubling|hierarchical-[1-9][0-9]{0,5}|gathered)$")
]

_GAIN = 1.05  # least speedup over the default plan for another one to be chosen
_MOST_GATHERED = 4 << 20  # largest all-reduce, in bytes, for which gathering all data is timed as well


class TunedGroup(Protocol):
    """Group to time: a :class:`~cordillera.distributed.transport.process_group.TransportProcessGroup`.

    Attributes:
        tuning: Its rules.
    """

    tuning: CollectiveTuning

    def size(self) -> int:
        """Return the number of ranks."""
        ...

    def barrier(self) -> dist.Work:
        """Wait for all ranks."""
        ...

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """Reduce ``tensors`` by ``opts``."""
        ...

    def all_gather_single(self, output: Tensor, input: Tensor) -> dist.Work:
        """Gather ``input`` in ``output``."""
        ...

    def reduce_scatter_single(self, output: Tensor, input: Tensor) -> dist.Work:
        """Reduce ``input`` and scatter it into ``output``."""
        ...


class TuningRule(BaseModel):
    """One rule.

    Attributes:
        collective: ``all_reduce``, ``all_gather`` or ``reduce_scatter``.
        ranks: Number of ranks of the group, at most :data:`MOST_RANKS`.
        most_bytes: Most bytes for which it holds: of the whole tensor that a rank ends with, or, of a reduce-scatter,
            begins with.
        plan: ``direct`` (all exchange with all), ``ring``, ``bidirectional`` (a ring in both directions), ``doubling``
            (recursive halving and doubling), ``hierarchical-N`` (between groups of N consecutive ranks, then within
            them), or, of an all-reduce, ``gathered`` (each rank gathers everything and adds it).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    collective: TunedCollective
    ranks: int = Field(ge=1, le=MOST_RANKS)
    most_bytes: int = Field(ge=0, lt=1 << 63)
    plan: PlanName

    @model_validator(mode="after")
    def _fits(self) -> TuningRule:
        group = self.plan.removeprefix("hierarchical-")
        if group.isdecimal() and self.ranks % int(group):
            raise ValueError(f"there is no plan {self.plan} over {self.ranks:,} ranks, which is no multiple of {group}")
        if self.plan == GATHERED and self.collective != "all_reduce":
            raise ValueError(f"{self.collective} cannot be {GATHERED}")
        return self


class CollectiveTuning(BaseModel):
    """Rules by which collectives choose their plans.

    Attributes:
        rules: The rules. For a call, the one with the smallest ``most_bytes`` holds among those of its collective and
            number of ranks that are not below its bytes. Without one, an all-reduce of at most 32 KiB is gathered, and
            everything else is direct.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    rules: tuple[TuningRule, ...] = ()

    def plan(self, collective: TunedCollective, ranks: int, size: int) -> str:
        """Return the plan of a ``collective`` over a number of ``ranks``, of ``size`` bytes."""
        fitting = [
            rule
            for rule in self.rules
            if (rule.collective, rule.ranks) == (collective, ranks) and size <= rule.most_bytes
        ]
        if fitting:
            return min(fitting, key=lambda rule: rule.most_bytes).plan
        return GATHERED if collective == "all_reduce" and size <= 32 << 10 else "direct"


def gather_plan(name: str, ranks: int) -> CollectivePlan:
    """Return the all-gather of a plan; the other collectives are derived from it.

    Raises:
        PlanError: If there is no plan ``name`` over ``ranks`` ranks.
    """
    try:
        if name.startswith("hierarchical-"):
            return hierarchical_all_gather(ranks, int(name.removeprefix("hierarchical-")))
        return _GATHERS[name](ranks)
    except (KeyError, ValueError) as error:
        raise PlanError(f"there is no plan {name} over {ranks} ranks ({error})", where="tuning") from error


_GATHERS: dict[str, Callable[[int], CollectivePlan]] = {
    "direct": direct_all_gather,
    "ring": ring_all_gather,
    "bidirectional": functools.partial(ring_all_gather, bidirectional=True),
    "doubling": doubling_all_gather,
    GATHERED: direct_all_gather,
}


def read_tuning(path: Path) -> CollectiveTuning:
    """Read rules.

    Args:
        path: A TOML file with tables ``[[rules]]`` of the keys of :class:`TuningRule`.

    Raises:
        PlanError: If it cannot be read, or a rule is not acceptable.
    """
    try:
        return CollectiveTuning.model_validate(parse_toml(read_text(path, error=PlanError), str(path), error=PlanError))
    except ValidationError as error:
        place, message = explain(error.errors(), lambda at: list(TuningRule.model_fields) if at else ["rules"])[0]
        raise PlanError(f"{place} {message}", where=str(path)) from error


@functools.cache
def tuning_of_environment() -> CollectiveTuning:
    """Return the rules of the file that :data:`TUNING` names; none without it.

    Raises:
        PlanError: As :func:`read_tuning` does.
    """
    path = os.environ.get(TUNING)
    return read_tuning(Path(path)) if path else CollectiveTuning()


def write_tuning(tuning: CollectiveTuning, path: Path, comments: Sequence[str] = ()) -> None:
    """Write rules as TOML.

    Args:
        tuning: The rules.
        path: The file, which is replaced at once.
        comments: Lines before them.

    Raises:
        PlanError: If it cannot be written.
    """
    lines = [f"# {line}" for line in comments]
    for rule in tuning.rules:
        lines += ["", "[[rules]]", *(f"{key} = {json.dumps(value)}" for key, value in rule.model_dump().items())]
    write({path: "\n".join(lines) + "\n"})


class PlanTiming(NamedTuple):
    """What one collective of one size took.

    Attributes:
        collective: The collective.
        size: Bytes, as in :attr:`TuningRule.most_bytes`.
        seconds: Median time of the slowest rank, by plan.
        chosen: The plan to take.
    """

    collective: TunedCollective
    size: int
    seconds: dict[str, float]
    chosen: str

    @property
    def usual(self) -> str:
        """Plan without rules."""
        return next(iter(self.seconds))


def candidates(collective: TunedCollective, ranks: int, size: int) -> list[str]:
    """Return the plans of a ``collective`` over ``ranks`` that are timed at a ``size``, the usual one first."""
    found = ["direct", "ring", "bidirectional", "doubling"] if ranks > 2 else ["direct"]
    found += [f"hierarchical-{group}" for group in range(2, ranks) if ranks % group == 0]
    if collective == "all_reduce" and size <= _MOST_GATHERED:
        found.append(GATHERED)
    usual = CollectiveTuning().plan(collective, ranks, size)
    return sorted(found, key=lambda name: name != usual)


def time_plans(
    group: TunedGroup, collective: TunedCollective, size: int, *, rounds: int = 15, seconds: float = 2.0
) -> PlanTiming:
    """Time the plans of a collective, in turn; all ranks call this.

    Args:
        group: Ranks of a group of the backend ``cordillera``, with rules to set.
        collective: The collective.
        size: Bytes, at least four a rank.
        rounds: Most rounds, in each of which every plan runs once.
        seconds: Seconds after which no further round begins.

    Returns:
        The times. A plan other than the usual one is chosen if it is 5 % faster in the median of the rounds, and no
        slower in three of four.

    Raises:
        TransportError: If a rank does not come in time.
    """
    ranks, kept = group.size(), group.tuning
    names = candidates(collective, ranks, size)
    run = _call(group, collective, size)
    taken: list[list[float]] = []
    begin = time.monotonic()
    try:
        for number in range(-1, rounds):  # the first one opens connections
            row = [0.0] * len(names)
            for at in range(len(names)):
                at = (at + number) % len(names)
                rule = TuningRule(collective=collective, ranks=ranks, most_bytes=1 << 62, plan=names[at])
                group.tuning = CollectiveTuning(rules=(rule,))
                group.barrier().wait()
                called = time.perf_counter()
                run()
                row[at] = time.perf_counter() - called
            if number >= 0:
                taken.append(row)
            late = torch.tensor([float(time.monotonic() - begin > seconds)])
            group.tuning = CollectiveTuning()
            group.allreduce([late], dist.AllreduceOptions()).wait()  # all stop after the same round
            if late.item() and taken:
                break
        slowest = torch.tensor(taken, dtype=torch.float64)
        maximum = dist.AllreduceOptions()
        maximum.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
        group.allreduce([slowest], maximum).wait()
    finally:
        group.tuning = kept
    ratios = slowest[:, :1] / slowest
    gains, worse = ratios.median(dim=0).values.tolist(), ratios.quantile(0.25, dim=0).tolist()
    best = max(range(len(names)), key=lambda at: gains[at])
    medians = dict(zip(names, slowest.median(dim=0).values.tolist(), strict=True))
    return PlanTiming(collective, size, medians, names[best] if gains[best] >= _GAIN and worse[best] >= 1 else names[0])


def _call(group: TunedGroup, collective: TunedCollective, size: int) -> Callable[[], object]:
    """Return what runs a collective once."""
    whole = torch.ones(max(1, size // 4 // group.size()) * group.size())
    part = torch.ones(len(whole) // group.size())
    if collective == "all_reduce":
        return lambda: group.allreduce([whole], dist.AllreduceOptions()).wait()
    if collective == "all_gather":
        return lambda: group.all_gather_single(whole, part).wait()
    return lambda: group.reduce_scatter_single(part, whole).wait()


def rules_of(timings: Sequence[PlanTiming], ranks: int) -> CollectiveTuning:
    """Return rules that follow ``timings`` over ``ranks``; between two sizes, they change at the geometric mean."""
    rules: list[TuningRule] = []
    for collective, found in itertools.groupby(timings, key=lambda one: one.collective):
        ordered = sorted(found, key=lambda one: one.size)
        ends = [math.isqrt(one.size * following.size) for one, following in itertools.pairwise(ordered)]
        for one, end, following in zip(ordered, [*ends, 1 << 62], [*ordered[1:], None], strict=True):
            if following is None or following.chosen != one.chosen:
                rules.append(TuningRule(collective=collective, ranks=ranks, most_bytes=end, plan=one.chosen))
    return CollectiveTuning(rules=tuple(rules))
