"""Plans of faults: the kind, time and target of each fault in a job of replicas.

A plan lists faults or the distribution to draw them from. Open choices are drawn from the plan's seed, so that the
same plan injects the same faults into the same processes after the same steps.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from cordillera.errors import PlanError
from cordillera.files import TOML_BYTES, parse_toml, read_text
from cordillera.mistakes import explain, known_keys

FaultKind: TypeAlias = Literal[
    "kill", "stop", "slow", "cut", "full-disk", "kill-coordinator", "pause-coordinator", "corrupt-checkpoint"
]

_OF_RANKS = ("kill", "stop", "slow", "cut", "full-disk")
_LASTING = ("stop", "slow", "full-disk", "pause-coordinator")  # faults that need a duration
_AT_ONCE = ("kill", "cut", "kill-coordinator")
_MOST_FAULTS = 1_000
_MOST_SECONDS = 86_400.0


class Fault(BaseModel):
    """One fault.

    Attributes:
        what: ``kill`` ends a process by SIGKILL. ``stop`` stops it, and lets it go on after ``seconds``. ``slow`` stops
            it again and again, so that it runs in one part of ``factor`` of the time. ``cut`` ends its network
            connections. ``full-disk`` lets it write to no file. ``kill-coordinator`` and ``pause-coordinator`` kill
            and stop the coordinator. ``corrupt-checkpoint`` flips one bit in the newest complete checkpoint.
        replica: Name of the replica, such as ``r1``; drawn if it is left out.
        rank: Process of the replica; drawn if it is left out.
        at_step: Step after whose commit the fault comes; without it, time counts from the start of the injection.
        after_s: Seconds from there to the fault.
        seconds: How long it lasts. A corrupt checkpoint is mended after this time; without it, it stays corrupt.
        factor: How many times as long a slow process takes.
        place: Which byte of the checkpoint's files, from 0 (the first) to 1; drawn if it is left out.
        bit: Which bit of this byte; drawn if it is left out.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    what: FaultKind
    replica: str | None = None
    rank: int | None = Field(None, ge=0)
    at_step: int | None = Field(None, ge=0)
    after_s: float = Field(0.0, ge=0, le=_MOST_SECONDS, allow_inf_nan=False)
    seconds: float | None = Field(None, gt=0, le=_MOST_SECONDS, allow_inf_nan=False)
    factor: float | None = Field(None, gt=1, le=1000, allow_inf_nan=False)
    place: float | None = Field(None, ge=0, lt=1)
    bit: int | None = Field(None, ge=0, le=7)

    @model_validator(mode="after")
    def _fits(self) -> Fault:
        if self.what in _LASTING and self.seconds is None:
            raise ValueError(f"{self.what} needs seconds")
        if self.what == "slow" and self.factor is None:
            raise ValueError("slow needs factor")
        unfit = {
            "seconds": self.what in _AT_ONCE and self.seconds is not None,
            "factor": self.what != "slow" and self.factor is not None,
            "replica": self.what not in _OF_RANKS and self.replica is not None,
            "rank": self.what not in _OF_RANKS and self.rank is not None,
            "place": self.what != "corrupt-checkpoint" and self.place is not None,
            "bit": self.what != "corrupt-checkpoint" and self.bit is not None,
        }
        if wrong := [name for name, is_unfit in unfit.items() if is_unfit]:
            raise ValueError(f"{self.what} has no {' and no '.join(wrong)}")
        return self

    @property
    def target(self) -> str:
        """Target of the fault, in words."""
        if self.what in _OF_RANKS:
            replica = "a replica" if self.replica is None else self.replica
            return replica if self.rank is None else f"{replica} rank {self.rank}"
        return "the newest checkpoint" if self.what == "corrupt-checkpoint" else "the coordinator"


class RandomFaults(BaseModel):
    """How faults are drawn.

    Attributes:
        count: Number of faults; fewer if the job ends before.
        every_s: Mean time between faults in seconds; times between them are exponentially distributed.
        every_steps: Mean number of steps between faults, distributed alike.
        within_s: A fault after a step comes up to this many seconds later, so that it hits any part of a step.
        kinds: Weight of each kind. Disks are full and checkpoints corrupt only where this names them.
        seconds: Shortest and longest time that a fault lasts, in seconds.
        factor: How many times as long a slow process takes.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    count: int = Field(_MOST_FAULTS, ge=1, le=_MOST_FAULTS)
    every_s: float | None = Field(None, gt=0, le=_MOST_SECONDS, allow_inf_nan=False)
    every_steps: float | None = Field(None, gt=0, le=1e9, allow_inf_nan=False)
    within_s: float = Field(1.0, ge=0, le=_MOST_SECONDS, allow_inf_nan=False)
    kinds: dict[FaultKind, float] = {
        "kill": 1.0, "stop": 1.0, "slow": 1.0, "cut": 1.0, "kill-coordinator": 1.0, "pause-coordinator": 1.0,
    }  # fmt: skip
    seconds: tuple[float, float] = (1.0, 5.0)
    factor: float = Field(4.0, gt=1, le=1000, allow_inf_nan=False)

    @model_validator(mode="after")
    def _is_possible(self) -> RandomFaults:
        if (self.every_s is None) == (self.every_steps is None):
            raise ValueError("needs either every_s or every_steps")
        if not all(0 < weight < 1e9 for weight in self.kinds.values()) or not self.kinds:
            raise ValueError("kinds need weights above 0")
        if not 0 < self.seconds[0] <= self.seconds[1] <= _MOST_SECONDS:
            raise ValueError("seconds are the shortest and the longest time, above 0")
        return self


class FaultPlan(BaseModel):
    """A plan of faults, either listed or drawn.

    Attributes:
        seed: Seed of all that is drawn.
        fault: Faults, in any order.
        random: How faults are drawn.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    seed: int = Field(0, ge=0)
    fault: tuple[Fault, ...] = Field((), max_length=_MOST_FAULTS)
    random: RandomFaults | None = None

    @model_validator(mode="after")
    def _has_one(self) -> FaultPlan:
        if bool(self.fault) == (self.random is not None):
            raise ValueError("needs either [[fault]] or [random]")
        return self


def read_fault_plan(path: Path | str) -> FaultPlan:
    """Read a plan from a TOML file.

    Raises:
        PlanError: If the file cannot be read, or is no plan; the message names the place of every mistake.
    """
    text = read_text(path, error=PlanError, limit=TOML_BYTES)
    content = parse_toml(text, str(path), error=PlanError)
    try:
        return FaultPlan.model_validate(content)
    except ValidationError as error:
        entries: Any = error.errors()
        found = explain(entries, lambda at: known_keys(FaultPlan, at), "plan")
        count = "1 mistake" if len(found) == 1 else f"{len(found)} mistakes"
        listing = "\n".join(f"  {place}: {message}" for place, message in found)
        raise PlanError(f"{count} in the plan\n{listing}", where=str(path)) from error


def drawn(plan: FaultPlan, replicas: Sequence[str], ranks: int) -> list[Fault]:
    """Return the faults of a plan with all that is open drawn; equal for equal arguments.

    Args:
        plan: Plan.
        replicas: Names of the job's replicas.
        ranks: Number of processes of each replica.

    Raises:
        PlanError: If the plan names a replica or a rank that the job does not have.
    """
    if plan.random is not None:
        faults = _random(plan.random, random.Random(f"{plan.seed} faults"))
    else:
        faults = list(plan.fault)
    found = []
    for number, fault in enumerate(faults):
        # One generator per fault, so that a change of one fault does not change the others.
        chance = random.Random(f"{plan.seed} {number}")
        if fault.replica is not None and fault.replica not in replicas:
            raise PlanError(
                f"there is no replica {fault.replica!r}", where=f"fault[{number}].replica",
                remedy=f"the job has {', '.join(replicas)}",
            )  # fmt: skip
        if fault.rank is not None and fault.rank >= ranks:
            raise PlanError(
                f"there is no rank {fault.rank}", where=f"fault[{number}].rank",
                remedy=f"replicas have {ranks} processes, from 0 on",
            )  # fmt: skip
        of_replica, of_rank, of_place, of_bit = (chance.random() for _ in range(4))
        choices: dict[str, Any] = {}
        if fault.what in _OF_RANKS:
            choices = {"replica": replicas[int(of_replica * len(replicas))], "rank": int(of_rank * ranks)}
        elif fault.what == "corrupt-checkpoint":
            choices = {"place": of_place, "bit": int(of_bit * 8)}
        is_open = {name: value for name, value in choices.items() if getattr(fault, name) is None}
        found.append(fault.model_copy(update=is_open))
    return found


def _random(how: RandomFaults, chance: random.Random) -> list[Fault]:
    """Draw what comes and when."""
    found, at = [], 0.0
    names, weights = list(how.kinds), list(how.kinds.values())
    for _ in range(how.count):
        at += chance.expovariate(1 / (how.every_s or how.every_steps or 1.0))
        (what,) = chance.choices(names, weights)
        later, lasting = chance.random() * how.within_s, chance.uniform(*how.seconds)
        if how.every_s is None:
            when = {"at_step": 1 + int(at), "after_s": later}
        elif at > _MOST_SECONDS:
            break
        else:
            when = {"after_s": at}
        values = {
            **when,
            "seconds": lasting if what in _LASTING else None,
            "factor": how.factor if what == "slow" else None,
        }
        found.append(Fault.model_validate({"what": what, **values}))
    return found
