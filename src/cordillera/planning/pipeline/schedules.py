"""Pipeline schedules: for every rank, the list of its actions in order.

The planner simulates a schedule (:mod:`cordillera.planning.pipeline.simulator`), processes execute it, and it can be
written in the notation of ``torch.distributed.pipelining``. Stages are numbered along the model. A rank holds one stage
or several (chunks); its messages to other ranks follow from the order of the stages.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from cordillera.errors import PlanError


class Kind(str, Enum):
    """Kind of an action, with the letters of ``torch.distributed.pipelining``."""

    FORWARD = "F"
    BACKWARD = "B"  # the whole backward
    INPUT = "I"  # the gradient of the stage's input alone
    WEIGHT = "W"  # the gradient of the stage's weights alone

    __str__ = str.__str__


class Action(NamedTuple):
    """One action of a rank.

    Attributes:
        kind: Kind of the action.
        stage: Stage, counted from 0 along the model.
        microbatch: Microbatch, counted from 0.
        joined: Whether a kernel may run the action together with the one before it (``OVERLAP_F_B``); the second of the
            two carries the mark.
    """

    kind: Kind
    stage: int
    microbatch: int
    joined: bool = False

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}"


F, B, I, W = Kind.FORWARD, Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT  # noqa: E741 (the field's letters)


@dataclass(frozen=True)
class Schedule:
    """The actions of every rank, in order.

    Attributes:
        name: Name of the family, with its parameters.
        microbatches: ``m``, number of microbatches.
        rank_of: Rank that holds each stage; ranks are ``0..P-1``.
        actions: Actions of each rank, in order.
    """

    name: str
    microbatches: int
    rank_of: tuple[int, ...]
    actions: tuple[tuple[Action, ...], ...]

    @property
    def ranks(self) -> int:
        """``P``, number of ranks."""
        return len(self.actions)

    @property
    def stages(self) -> int:
        """Number of stages: ``P`` times the chunks of a rank."""
        return len(self.rank_of)

    @cached_property
    def splits_backward(self) -> bool:
        """Whether any backward is done in two parts."""
        return any(action.kind is I for action in self)

    @cached_property
    def only_forward(self) -> bool:
        """Whether there is no backward."""
        return all(action.kind is F for action in self)

    def forwards(self, microbatches: int) -> Schedule:
        """Return a schedule of forwards alone on the same ranks, for evaluation; no rank waits longer than it must.

        The number of ``microbatches`` is at least 1 and need not be that of this schedule.
        """
        _positive(microbatches=microbatches)
        every = sorted((m + stage, stage, m) for stage in range(self.stages) for m in range(microbatches))
        actions = [
            tuple(Action(F, stage, m) for _, stage, m in every if self.rank_of[stage] == rank)
            for rank in range(self.ranks)
        ]
        return Schedule(f"forwards of {self.name}", microbatches, self.rank_of, tuple(actions))

    def __iter__(self) -> Iterator[Action]:
        return (action for actions in self.actions for action in actions)

    def stages_of(self, rank: int) -> list[int]:
        """Return the stages that a rank holds, in order."""
        return [stage for stage, holder in enumerate(self.rank_of) if holder == rank]

    def check(self) -> None:
        """Check that the schedule can be executed.

        Every pair of stage and microbatch must have, on the rank that holds the stage, one forward and one backward.
        The backward may be split, with the weights' part after the input's. Alternatively, all pairs have a forward and
        none has a backward. No set of ranks may wait for one another.

        Raises:
            PlanError: If the schedule cannot be executed; the message names the first wrong action and its rank.
        """
        seen: Counter[tuple[Kind, int, int]] = Counter()
        for rank, actions in enumerate(self.actions):
            for action in actions:
                place = f"schedule {self.name}, rank {rank}, action {action}"
                if not 0 <= action.stage < self.stages or not 0 <= action.microbatch < self.microbatches:
                    raise PlanError("there is no such stage or microbatch", where=place)
                if self.rank_of[action.stage] != rank:
                    raise PlanError(f"the stage is on rank {self.rank_of[action.stage]}", where=place)
                key = (action.kind, action.stage, action.microbatch)
                if seen[key]:
                    raise PlanError("it is done twice", where=place)
                seen[key] += 1
        complete = ("F",) if self.only_forward else ("FB", "FIW")
        for stage in range(self.stages):
            for microbatch in range(self.microbatches):
                have = "".join(kind.value for kind in Kind if seen[kind, stage, microbatch])
                if have not in complete:
                    raise PlanError(
                        f"microbatch {microbatch} of stage {stage} has {' and '.join(have) or 'nothing'}",
                        where=f"schedule {self.name}",
                        remedy="each needs F and B, or F, I and W, or all of them F alone",
                    )
        self.linear_order()

    def linear_order(self) -> list[tuple[int, Action]]:
        """Return all actions with their ranks in one order that respects every rank's list and every dependency.

        Raises:
            PlanError: If ranks wait for one another.
        """
        done: set[tuple[Kind, int, int]] = set()
        position = [0] * self.ranks
        order: list[tuple[int, Action]] = []
        left = sum(map(len, self.actions))
        while left:
            before = left
            for rank, actions in enumerate(self.actions):
                while position[rank] < len(actions):
                    action = actions[position[rank]]
                    if not all(need in done for need in self.needs(action)):
                        break
                    done.add(action[:3])
                    order.append((rank, action))
                    position[rank] += 1
                    left -= 1
            if left == before:
                waiting = ", ".join(
                    f"rank {rank} for {actions[position[rank]]}"
                    for rank, actions in enumerate(self.actions)
                    if position[rank] < len(actions)
                )
                raise PlanError(f"ranks wait for one another: {waiting}", where=f"schedule {self.name}")
        return order

    def needs(self, action: Action) -> list[tuple[Kind, int, int]]:
        """Return the actions on any rank that must be finished before an action."""
        kind, stage, microbatch = action[:3]
        if kind is F:
            return [(F, stage - 1, microbatch)] if stage else []
        if kind is W:
            return [(I, stage, microbatch)]
        needs = [(F, stage, microbatch)]
        if stage + 1 < self.stages:
            needs.append((self._passes_back(stage + 1, microbatch), stage + 1, microbatch))
        return needs

    @cached_property
    def _split(self) -> frozenset[tuple[int, int]]:
        return frozenset((action.stage, action.microbatch) for action in self if action.kind is I)

    def _passes_back(self, stage: int, microbatch: int) -> Kind:
        return I if (stage, microbatch) in self._split else B

    def live(self, rank: int) -> list[int]:
        """Return how many forwards a rank holds activations of after each of its actions, over all its stages.

        The whole backward frees them or, if it is split, the weights' part.
        """
        held, counts = 0, []
        for action in self.actions[rank]:
            held += 1 if action.kind is F else -1 if action.kind in (B, W) else 0
            counts.append(held)
        return counts

    def peak(self, rank: int) -> int:
        """Return the largest number of forwards whose activations a rank holds at a time."""
        return self._peaks[rank]

    def most_kept(self, rank: int, sizes: Sequence[float]) -> float:
        """Return the peak of what ``rank`` keeps for the backward pass, given the ``sizes`` of each stage's forward."""
        stages = self.stages_of(rank)
        if len({sizes[stage] for stage in stages}) == 1:
            return self.peak(rank) * sizes[stages[0]]
        held = most = 0.0
        for action in self.actions[rank]:
            size = sizes[action.stage]
            held += size if action.kind is F else -size if action.kind in (B, W) else 0.0
            most = max(most, held)
        return most

    @cached_property
    def _peaks(self) -> list[int]:
        return [max(self.live(rank), default=0) for rank in range(self.ranks)]

    def to_csv(self) -> str:
        """Return one line for each rank in the notation of torch's ``PipelineScheduleMulti`` (``compute_only``)."""
        lines = []
        for actions in self.actions:
            words: list[str] = []
            for action in actions:
                if action.joined:
                    words[-1] = f"({words[-1]};{action})OVERLAP_F_B"
                else:
                    words.append(str(action))
            lines.append(",".join(words))
        return "\n".join(lines) + "\n"

    @classmethod
    def from_csv(cls, text: str, name: str = "file") -> Schedule:
        """Read the output of :meth:`to_csv`, ``text``, as a schedule called ``name``, and check it.

        Raises:
            PlanError: If a word is not an action or the schedule cannot be executed; the message names the line and the
                word.
        """
        ranks: list[tuple[Action, ...]] = []
        for number, line in enumerate(text.splitlines(), 1):
            actions: list[Action] = []
            for word in filter(None, (part.strip() for part in line.split(","))):
                pair = re.fullmatch(r"\((\w+);(\w+)\)OVERLAP_F_B", word)
                for part in pair.groups() if pair else [word]:
                    match = re.fullmatch(r"([0-9]{1,9})([FBIW])([0-9]{1,9})", part)
                    if match is None:
                        raise PlanError(
                            f"{word[:40]!r} is not an action",
                            where=f"schedule {name}, line {number}",
                            remedy="write stage, one of F, B, I, W, and microbatch, as in 3F0",
                        )
                    joined = pair is not None and part == pair.groups()[1]
                    actions.append(Action(Kind(match[2]), int(match[1]), int(match[3]), joined))
            ranks.append(tuple(actions))
        holder = {action.stage: rank for rank, actions in enumerate(ranks) for action in actions}
        stages = max(holder, default=-1) + 1
        if not stages or len(holder) != stages:
            raise PlanError("stages are missing", where=f"schedule {name}", remedy="stages count from 0 without gaps")
        microbatches = 1 + max(action.microbatch for actions in ranks for action in actions)
        schedule = cls(name, microbatches, tuple(holder[stage] for stage in range(stages)), tuple(ranks))
        schedule.check()
        return schedule


def _positive(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise PlanError(f"{value} is too few", where=name, remedy="at least 1")


def _in_loops(ranks: int, chunks: int) -> tuple[int, ...]:
    return tuple(stage % ranks for stage in range(ranks * chunks))


def _in_a_v(ranks: int) -> tuple[int, ...]:
    return tuple(range(ranks)) + tuple(reversed(range(ranks)))


def gpipe(ranks: int, microbatches: int) -> Schedule:
    """Make a schedule of all forwards of ``microbatches`` on ``ranks``, then all backwards (Huang et al. 2019)."""
    _positive(ranks=ranks, microbatches=microbatches)
    actions = (tuple(Action(kind, rank, i) for kind in (F, B) for i in range(microbatches)) for rank in range(ranks))
    return Schedule("gpipe", microbatches, _in_loops(ranks, 1), tuple(actions))


def one_forward_one_backward(ranks: int, microbatches: int, extra_warmup: Sequence[int] | None = None) -> Schedule:
    """1F1B: a rank starts with as many forwards as there are ranks after it, then alternates.

    Source: Narayanan et al. 2019 (PipeDream), in its flushing form. With ``extra_warmup``, ranks run further ahead,
    which hides the latency of slow boundaries (:func:`warmup_for_latency`) and costs as many more live microbatches.

    Args:
        ranks: ``P``, number of ranks.
        microbatches: ``m``, number of microbatches.
        extra_warmup: Number of additional forwards of each rank before its first backward. It must not grow from one
            rank to the next, because a rank would then wait for forwards that its predecessor holds back.

    Raises:
        PlanError: If ``extra_warmup`` would block the pipeline.
    """
    _positive(ranks=ranks, microbatches=microbatches)
    extra = list(extra_warmup) if extra_warmup is not None else [0] * ranks
    if len(extra) != ranks or any(w < 0 for w in extra) or any(a < b for a, b in pairwise(extra)):
        raise PlanError(
            f"{extra} is not one number of forwards for each of {ranks} ranks that never grows along the pipeline",
            where="extra_warmup",
        )
    actions = []
    for rank in range(ranks):
        forwards, backwards = [[Action(kind, rank, i) for i in range(microbatches)] for kind in (F, B)]
        actions.append(_alternate(forwards, backwards, ranks - 1 - rank + extra[rank]))
    name = "1f1b" if not any(extra) else f"1f1b, warm-up +{'+'.join(map(str, extra))}"
    return Schedule(name, microbatches, _in_loops(ranks, 1), tuple(actions))


def warmup_for_latency(latencies: Sequence[float], forward: float, backward: float) -> list[int]:
    """Return extra forwards of each of ``P`` ranks that hide the latency of slow boundaries in 1F1B.

    A boundary of one-way latency ``d`` is hidden by ``ceil(2 d / (t_F + t_B))`` more forwards on every rank before it;
    several boundaries add up. The step then takes ``(m + P - 1)(t_F + t_B) + 2 sum(d)``, if there are enough
    microbatches. They are the fewest that do for every number of microbatches ``m``: with fewer between two ranks, each
    microbatch waits. Few microbatches end before that adds up, and fewer forwards may do for them;
    :func:`cordillera.planning.pipeline.tuning.tuned` finds such schedules.

    Args:
        latencies: One-way latency of each boundary between neighbouring ranks, seconds: ``P - 1`` values.
        forward: ``t_F``, seconds of the forward of a stage.
        backward: ``t_B``, seconds of the backward of a stage.
    """
    period = forward + backward
    extra = [0]
    for latency in reversed(latencies):
        ratio = 2 * latency / period
        whole = round(ratio)
        extra.append(extra[-1] + (whole if abs(ratio - whole) < 1e-9 else int(ratio) + 1))
    return extra[::-1]


def interleaved(ranks: int, microbatches: int, chunks: int, group: int | None = None) -> Schedule:
    """Interleaved 1F1B: a rank holds several chunks and passes groups of microbatches through each in turn.

    Source: Narayanan et al. 2021 (Megatron-LM); the size of the groups is Llama 3's ``N`` (Grattafiori et al. 2024,
    section 3.3.2), tunable between depth first (``N = P``) and breadth first (``N = m``).

    Args:
        ranks: ``P``, number of ranks.
        microbatches: ``m``, number of microbatches.
        chunks: ``v``, stages per rank; with 1 the result is 1F1B.
        group: ``N``, number of microbatches that pass a chunk in a row; None for ``P``. There are ``m // N`` groups, as
            equal as possible. Groups of fewer than ``P`` would wait for themselves and are refused.

    Raises:
        PlanError: If ``group`` is too small.
    """
    _positive(ranks=ranks, microbatches=microbatches, chunks=chunks)
    if chunks == 1:
        return one_forward_one_backward(ranks, microbatches)
    size = min(group or ranks, microbatches)
    if size < min(ranks, microbatches):
        raise PlanError(
            f"groups of {size} microbatches are smaller than the pipeline", where="group", remedy=f"{ranks}"
        )
    count = microbatches // size
    ends = [microbatches * i // count for i in range(count + 1)]
    groups = [range(first, last) for first, last in pairwise(ends)]
    actions = []
    for rank in range(ranks):
        forwards = [Action(F, chunk * ranks + rank, i) for part in groups for chunk in range(chunks) for i in part]
        backwards = [
            Action(B, chunk * ranks + rank, i) for part in groups for chunk in reversed(range(chunks)) for i in part
        ]
        ahead = (chunks - 1) * max(map(len, groups)) + 2 * (ranks - 1 - rank)
        actions.append(_alternate(forwards, backwards, ahead))
    name = f"interleaved, {chunks} chunks" + (f", groups of {size}" if size != ranks else "")
    return Schedule(name, microbatches, _in_loops(ranks, chunks), tuple(actions))


def _alternate(forwards: Sequence[Action], backwards: Sequence[Action], ahead: int) -> tuple[Action, ...]:
    """Return ``ahead`` forwards, then alternating forwards and backwards, then the remaining backwards."""
    ahead = min(ahead, len(forwards))
    actions = list(forwards[:ahead])
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        actions += [forward, backward]
    return (*actions, *backwards[len(forwards) - ahead :])


def breadth_first(ranks: int, microbatches: int, chunks: int) -> Schedule:
    """Looped breadth first: all ``microbatches`` pass a chunk before the next one.

    Each of ``ranks`` holds ``chunks`` stages. Source: Lamy-Poirier 2023.
    """
    _positive(ranks=ranks, microbatches=microbatches, chunks=chunks)
    stages = [[chunk * ranks + rank for chunk in range(chunks)] for rank in range(ranks)]
    actions = (
        tuple(Action(F, stage, i) for stage in own for i in range(microbatches))
        + tuple(Action(B, stage, i) for stage in reversed(own) for i in reversed(range(microbatches)))
        for own in stages
    )
    return Schedule(f"breadth first, {chunks} chunks", microbatches, _in_loops(ranks, chunks), tuple(actions))


def zero_bubble(ranks: int, microbatches: int, ahead: int = 1, extra_warmup: Sequence[int] | None = None) -> Schedule:
    """ZB-H1 and ZB-H2: 1F1B with delayed weight gradients that fill the bubbles.

    A rank runs ahead by ``ahead`` forwards for each rank after it, and keeps back ``ahead`` weight gradients for each
    rank before it. With 1 (H1) it holds at most ``P`` microbatches, like the first rank of 1F1B. With 2 (H2) it holds
    at most ``2 P - 1``, and no rank is idle between its first and its last action if all times are equal. One step that
    ends together on all ranks takes ``3 m + P - 1`` in either; H2 saves time only if the next step may begin rank by
    rank. Source: Qi et al. 2024 (Zero Bubble), section 2.

    Args:
        ranks: ``P``, number of ranks.
        microbatches: ``m``, number of microbatches.
        ahead: 1 for H1, 2 for H2.
        extra_warmup: Number of additional forwards of each rank before its first backward, as in
            :func:`one_forward_one_backward`.

    Raises:
        PlanError: If ``extra_warmup`` would block the pipeline.
    """
    _positive(ranks=ranks, microbatches=microbatches, ahead=ahead)
    further = extra_warmup or [0] * ranks
    extra = [(ahead - 1) * (ranks - 1 - rank) + more for rank, more in enumerate(further)]
    actions = []
    for rank, whole in enumerate(one_forward_one_backward(ranks, microbatches, extra).actions):
        own: list[Action] = []
        waiting: list[Action] = []
        for action in whole:
            if action.kind is F:
                own.append(action)
                continue
            own.append(action._replace(kind=I))
            waiting.append(action._replace(kind=W))
            if len(waiting) > ahead * rank:
                own.append(waiting.pop(0))
        actions.append((*own, *waiting))
    name = f"zero bubble H{ahead}" + (f", warm-up +{'+'.join(map(str, further))}" if any(further) else "")
    return Schedule(name, microbatches, _in_loops(ranks, 1), tuple(actions))


def _counted(kind: Kind, stage: int) -> Callable[[], Action]:
    numbers = iter(range(1 << 62))
    return lambda: Action(kind, stage, next(numbers))


def zero_bubble_v(ranks: int, microbatches: int) -> Schedule:
    """ZBV: two chunks per rank, folded like a V, without bubbles and with the memory of 1F1B.

    For fewer ``microbatches`` than ``2 P - 1``, with ``P`` the number of ``ranks``, the schedule for ``2 P - 1``
    without the missing ones is used. Source: Qi et al. 2024 (Pipeline Parallelism with Controllable Memory), section 4.
    """
    _positive(ranks=ranks, microbatches=microbatches)
    planned = max(microbatches, 2 * ranks - 1)
    actions = []
    for rank in range(ranks):
        down, up = rank, 2 * ranks - 1 - rank
        made = {(kind, stage): _counted(kind, stage) for kind in (F, I, W) for stage in (down, up)}

        def do(*work: tuple[Kind, int], made: dict[tuple[Kind, int], Callable[[], Action]] = made) -> list[Action]:
            return [made[each]() for each in work]

        plan: list[Action] = []
        for _ in range(2 * (ranks - rank) - 1):
            plan += do((F, down))
        for _ in range(rank):
            plan += do((F, up), (F, down))
        for _ in range(ranks - rank):
            plan += do((F, up), (I, up), (W, up))
        for i in range(planned - ranks):
            if i < planned - (2 * ranks - 1 - rank):
                plan += do((F, down))
            plan += do((I, down), (W, down), (F, up), (I, up), (W, up))
        for _ in range(rank):
            plan += do((I, down), (I, up))
        for _ in range(ranks - rank):
            plan += do((I, down), (W, down))
        plan += do(*[(W, up)] * rank, *[(W, down)] * rank)
        actions.append(tuple(action for action in plan if action.microbatch < microbatches))
    return Schedule("ZBV", microbatches, _in_a_v(ranks), tuple(actions))


def dual_pipe_v(ranks: int, microbatches: int) -> Schedule:
    """DualPipeV: two chunks per rank, folded like a V, with forwards and backwards of different chunks in pairs.

    Source: DeepSeek-AI 2024 (DualPipe), in its V-shaped half.

    Raises:
        PlanError: If there are fewer ``microbatches`` than twice the ``ranks``.
    """
    _positive(ranks=ranks, microbatches=microbatches)
    if microbatches < 2 * ranks:
        raise PlanError(
            f"{microbatches} microbatches are too few for {ranks} ranks", where="DualPipeV", remedy=f"{2 * ranks}"
        )
    actions = []
    for rank in range(ranks):
        down, up, after = rank, 2 * ranks - 1 - rank, ranks - 1 - rank
        forward = {stage: _counted(F, stage) for stage in (down, up)}
        back = {stage: _counted(B, stage) for stage in (down, up)}  # replaced by I and W if it is split
        held: list[Action] = []  # delayed weight gradients
        plan: list[Action] = []

        def split(stage: int, held: list[Action] = held, back: dict[int, Callable[[], Action]] = back) -> Action:
            whole = back[stage]()
            held.append(whole._replace(kind=W))
            return whole._replace(kind=I)

        plan += [forward[down]() for _ in range(2 * after)]
        for _ in range(rank + 1):
            plan += [forward[down](), forward[up]()]
        for _ in range(after):
            plan += [split(up), held.pop(0), forward[up]()]
        for i in range(microbatches - 2 * ranks + rank + 1):
            apart = i == 0 and rank == ranks - 1  # the last rank's two chunks are neighbours
            plan += [forward[down](), back[up]()._replace(joined=not apart)]
            plan += [forward[up](), back[down]()._replace(joined=True)]
        for _ in range(after):
            plan += [back[up](), forward[up](), back[down]()._replace(joined=True)]
        both = [up, down] * (rank + 1)
        plan += [back[stage]() for stage in both[: rank + 1]]
        plan += [split(stage) for stage in both[rank + 1 :]]
        for _ in range(after):
            if held:
                plan.append(held.pop(0))
            plan.append(split(down))
        actions.append((*plan, *held))
    return Schedule("DualPipeV", microbatches, _in_a_v(ranks), tuple(actions))
