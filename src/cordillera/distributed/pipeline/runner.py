"""Execution of a pipeline schedule on a process group: the same schedule object that the planner simulates.

Every process of a ``torch.distributed`` group (Gloo) is one rank of the schedule. A rank takes its actions in order,
each as soon as its inputs have arrived. A message leaves when the action that produces it ends. Sends never delay
computation, and the messages between an ordered pair of ranks leave in the order in which they were produced, as in
:mod:`cordillera.planning.pipeline.simulator`. :class:`Throttle` emulates slow links. Every step records when its
actions started and ended, so that an executed step can be compared with a simulated one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from cordillera.distributed.ledger import Ledger
from cordillera.distributed.pipeline.mail import MAIL_DTYPES, MOST_DIMENSIONS, Mail, MailMessage, StageLinks
from cordillera.distributed.pipeline.split_backward import ForwardState, SplitBackward, accumulate, split_backward
from cordillera.errors import PlanError
from cordillera.planning.pipeline.schedules import Action, Kind, Schedule


@dataclass(frozen=True)
class Recording:
    """Start and end of the actions of a rank in a step, in the schedule's order, in seconds since all ranks were ready.

    An action starts after its inputs have arrived, and ends when its message is handed over.
    """

    rank: int
    starts: NDArray[np.float64]
    ends: NDArray[np.float64]


class ExecutedStep(NamedTuple):
    """Result of a step.

    Attributes:
        losses: Loss of each microbatch, ``[m]``, not divided by ``m``; None except on the rank of the last stage.
    """

    losses: Tensor | None
    recording: Recording


class PipelineRunner:
    """One rank of a pipeline that takes training steps by a schedule.

    A stage is a module that takes one tensor, and further arguments that its rank supplies, and returns one
    floating-point tensor on the CPU. The shape is the same for every microbatch and step; the ranks on both sides of a
    boundary agree on it with the first message. Only the leading dimension may differ, if :meth:`step` is given that of
    each microbatch.

    Gradients of the mean or the sum of the microbatches' losses are added to the parameters' ``.grad`` by each backward
    action. The caller clears them and steps the optimizer. If a backward is split, ``I`` computes the gradients of
    intermediate results, and ``W`` computes those of the weights from them. Nothing is computed twice unless a stage
    uses a weight in two places; hooks on intermediate tensors then run in both actions. The first stage computes no
    gradient of inputs that do not require one, so all of its split backward is in ``W``. ``B`` and ``W`` free the
    activations.

    A schedule that has only forwards yields losses and keeps nothing for a backward.

    The actions of a joined pair run one after the other, each as soon as its own inputs have arrived. To compare with a
    simulation, simulate the schedule without these marks (``Action.joined``).

    Args:
        schedule: Schedule that passes :meth:`Schedule.check`, the same on every rank.
        stages: Modules of this rank's stages, by stage.
        loss: Function from the last stage's output and a microbatch's target to a scalar; called only on the last
            stage's rank.
        group: Process group whose ranks are the schedule's ranks; None for the default group.
        link: Slow links to emulate: a mapping from pairs of ranks of the group, or a function of both ranks. None, or a
            missing pair, leaves the link as it is. Each rank applies the links that begin at it.
        deadline_s: Longest time of one wait for another rank, in seconds; must exceed the longest step.
        reduction: Reduction of the microbatches' losses: ``mean`` or ``sum``.
        before: Function called with each action before it is taken, when its inputs have arrived.
        ledger: Ledger that counts the messages; its waiting time includes the gaps of the schedule. None to count
            nothing.

    Raises:
        PlanError: If schedule, stages and group do not match.
    """

    def __init__(
        self,
        schedule: Schedule,
        stages: Mapping[int, nn.Module],
        loss: Callable[[Tensor, Tensor], Tensor],
        group: dist.ProcessGroup | None = None,
        link: StageLinks | None = None,
        deadline_s: float = 300.0,
        reduction: Literal["mean", "sum"] = "mean",
        before: Callable[[Action], None] | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise PlanError("there is no process group", where="group", remedy="torch.distributed.init_process_group")
        if not (math.isfinite(deadline_s) and deadline_s > 0):
            raise PlanError(f"{deadline_s} s", where="deadline_s", remedy="a finite time above 0")
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        if rank < 0:
            raise PlanError("this process is not a member", where="group")
        if size != schedule.ranks:
            raise PlanError(
                f"the schedule {schedule.name} is for {schedule.ranks} ranks, the group has {size}", where="group"
            )
        schedule.check()
        wanted = schedule.stages_of(rank)
        for stage in wanted:
            if stage not in stages:
                raise PlanError(f"stage {stage} of rank {rank} is missing", where="stages", remedy=f"give {wanted}")
        for stage in stages:
            if stage not in wanted:
                raise PlanError(f"stage {stage} is not on rank {rank}", where="stages", remedy=f"give {wanted}")
        self.schedule, self.rank = schedule, rank
        self._stages, self._loss, self._failed = dict(stages), loss, False
        self._divisor = schedule.microbatches if reduction == "mean" else 1
        self._before = before or (lambda action: None)
        self._mail = Mail(schedule, rank, group, link, deadline_s, ledger or Ledger())
        self._held: dict[tuple[int, int], ForwardState | SplitBackward] = {}
        self._passed: dict[tuple[Kind, int, int], Tensor] = {}  # between two stages of this rank

    def step(
        self,
        inputs: Sequence[Tensor] = (),
        targets: Sequence[Tensor] = (),
        arguments: Sequence[tuple[Any, ...]] | None = None,
        rows: Sequence[int] | None = None,
    ) -> ExecutedStep:
        """Run the forwards and, if the schedule has them, the backwards of all microbatches; every rank must call it.

        Args:
            inputs: One tensor for each microbatch, needed on the rank of the first stage. The gradient of an input that
                requires one is added to its ``.grad``.
            targets: One tensor for each microbatch, needed on the rank of the last stage.
            arguments: One tuple for each microbatch of further arguments for this rank's stages; None for no arguments.
            rows: Leading dimension of the stages' outputs for each microbatch, the same on every rank; may be 0. None
                if it is the same for all.

        Raises:
            PlanError: If the number of microbatches is wrong, or a stage's result cannot be sent.
            PeerError: If another rank does not respond in time. The runner and its group cannot be used afterwards.
        """
        holders, count = self.schedule.rank_of, self.schedule.microbatches
        for name, given, holder in (("inputs", inputs, holders[0]), ("targets", targets, holders[-1])):
            if holder == self.rank and len(given) != count:
                raise PlanError(f"{len(given)} microbatches, the schedule has {count}", where=name)
        for name, own in (("arguments", arguments), ("rows", rows)):
            if own is not None and len(own) != count:
                raise PlanError(f"{len(own)} microbatches, the schedule has {count}", where=name)
        if self._failed:
            raise PlanError("an earlier step failed", where="step", remedy="make a new group and a new runner")
        self._failed = True  # reset once the step is done
        try:
            with torch.set_grad_enabled(torch.is_grad_enabled() and not self.schedule.only_forward):
                done = self._run(inputs, targets, arguments or [()] * count, rows)
        finally:
            self._mail.abandon()
            self._held.clear()
            self._passed.clear()
        self._failed = False
        return done

    def _run(
        self,
        inputs: Sequence[Tensor],
        targets: Sequence[Tensor],
        arguments: Sequence[tuple[Any, ...]],
        rows: Sequence[int] | None,
    ) -> ExecutedStep:
        actions = self.schedule.actions[self.rank]
        starts, ends = np.zeros(len(actions)), np.zeros(len(actions))
        losses: dict[int, Tensor] = {}
        origin = self._mail.begin(rows)
        for i, action in enumerate(actions):
            starts[i], ends[i] = self._take(action, inputs, targets, arguments[action.microbatch], losses)
        self._mail.finish()
        ordered = torch.stack([losses[i] for i in range(len(losses))]) if losses else None
        return ExecutedStep(ordered, Recording(self.rank, starts - origin, ends - origin))

    def _take(
        self,
        action: Action,
        inputs: Sequence[Tensor],
        targets: Sequence[Tensor],
        arguments: tuple[Any, ...],
        losses: dict[int, Tensor],
    ) -> tuple[float, float]:
        """Take one action as soon as its inputs have arrived, and return its start and end."""
        kind, stage, microbatch = action[:3]
        last = self.schedule.stages - 1
        result: Tensor | None = None
        if kind is Kind.FORWARD:
            given = self._from(kind, stage - 1, action) if stage else inputs[microbatch]
            start = time.perf_counter()
            self._before(action)
            forward = ForwardState(given.detach().requires_grad_(stage > 0 or given.requires_grad))
            result = forward.output = self._stages[stage](forward.input, *arguments)
            if stage == last:
                loss = self._loss(forward.output, targets[microbatch])
                if not isinstance(loss, Tensor) or loss.dim():
                    raise PlanError("the loss of a microbatch is not a scalar tensor", where="loss")
                losses[microbatch] = loss.detach()
                forward.output = loss / self._divisor
            if not self.schedule.only_forward:
                self._held[stage, microbatch] = forward
        elif kind is Kind.WEIGHT:
            start = time.perf_counter()
            self._before(action)
            self._held.pop((stage, microbatch)).weights()
        else:
            gradient = self._from(Kind.BACKWARD, stage + 1, action) if stage < last else None
            start = time.perf_counter()
            self._before(action)
            held = self._held.pop((stage, microbatch))
            assert isinstance(held, ForwardState)
            if kind is Kind.INPUT:
                self._held[stage, microbatch], result = split_backward(held, gradient)
            else:
                result = held.backward(gradient)
            del held  # a whole backward frees the activations within its own time
            if stage == 0 and result is not None:
                accumulate(inputs[microbatch], result)
        end = time.perf_counter()
        self._pass_on(action, result, end)
        return start, end

    def _from(self, kind: Kind, stage: int, action: Action) -> Tensor:
        """Return the input of an action that another stage produces."""
        if self.schedule.rank_of[stage] == self.rank:
            return self._passed.pop((kind, stage, action.microbatch))
        return self._mail.receive(MailMessage(kind, stage, action.microbatch))

    def _pass_on(self, action: Action, result: Tensor | None, end: float) -> None:
        """Hand the result of an action to the stage that needs it."""
        kind, stage, microbatch = action[:3]
        if kind is Kind.WEIGHT:
            return
        message = MailMessage(Kind.FORWARD if kind is Kind.FORWARD else Kind.BACKWARD, stage, microbatch)
        if not 0 <= message.to_stage < self.schedule.stages:
            return
        if not isinstance(result, Tensor) or result.dtype not in MAIL_DTYPES or result.dim() > MOST_DIMENSIONS:
            kinds = ", ".join(str(dtype).removeprefix("torch.") for dtype in MAIL_DTYPES)
            raise PlanError(
                "what it gives cannot be passed on",
                where=f"stage {stage}",
                remedy=f"a tensor of {kinds} with at most {MOST_DIMENSIONS} dimensions",
            )
        if self.schedule.rank_of[message.to_stage] == self.rank:
            self._passed[message] = result.detach()
        else:
            self._mail.send(message, result.detach().contiguous(), end)
