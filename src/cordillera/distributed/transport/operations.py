"""Operations of a communicator: the tasks that send to and receive from other ranks, and their dependencies.

A plan (:mod:`cordillera.planning.network.collective_plans`) says what all ranks do; :func:`program` derives what one
rank does. Its transfers wait for each other only where they touch the same chunk.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from cordillera.distributed.transport.signatures import Signature, kind_of
from cordillera.planning.network.collective_plans import CollectivePlan, Transfer

ReduceFunction: TypeAlias = Callable[..., Any]
"""A function of two tensors with an argument ``out``, as :func:`torch.add`."""


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a contiguous tensor, as uint8 of one dimension that shares its memory."""
    if not tensor.numel():  # an empty tensor may have a stride of 0
        return torch.empty(0, dtype=torch.uint8)
    return (tensor.detach() if tensor.requires_grad else tensor).view(-1).view(torch.uint8)


@dataclass(eq=False, slots=True)
class Task:
    """A part of an operation.

    Attributes:
        needs: Number of tasks that must be done before this one begins.
        then: Tasks that need this one.
        is_done: Whether it is done.
        operation: The operation that it is a part of.
    """

    needs: int = 0
    then: list[Task] = field(default_factory=list)
    is_done: bool = False
    operation: TransportOperation = field(init=False)

    def after(self, *others: Task) -> None:
        """Make this task begin after others."""
        for other in others:
            other.then.append(self)
        self.needs += len(others)


@dataclass(eq=False, slots=True)
class PeerTask(Task):
    """What passes between this rank and another one.

    Attributes:
        peer: The other rank; ``ANY_RANK`` until a message from any rank has come.
        index: Number of the transfer, which both ranks know; of a message that is taken, it follows from the order in
            which messages were posted.
        views: Where its bytes lie here, uint8.
    """

    peer: int = -1
    index: int = 0
    views: Sequence[Tensor] = ()

    @property
    def size(self) -> int:
        """Number of its bytes."""
        return self.views[0].numel() if len(self.views) == 1 else sum(view.numel() for view in self.views)

    @property
    def key(self) -> tuple[int, int, int]:
        """Identifier of the transfer among those between the two ranks."""
        return kind_of(self.operation.signature), self.operation.sequence, self.index

    def spans(self) -> list[tuple[int, int]]:
        """Return addresses and lengths of its bytes."""
        return [(view.data_ptr(), view.numel()) for view in self.views]


@dataclass(eq=False, slots=True)
class Offer(PeerTask):
    """Bytes that another rank takes.

    Attributes:
        place: Byte at which they begin in a window of the other rank, if they are put there.
    """

    place: int | None = None


@dataclass(eq=False, slots=True)
class Take(PeerTask):
    """Task that receives bytes from another rank.

    Attributes:
        reduce: Reduction of the received and the present elements; None to overwrite the present ones.
        dtype: Type of the elements.
        make: Function that returns the destination for a number of bytes, or None to refuse that number; for messages
            whose size only the other rank knows.
        sources: Ranks that may send a message from any rank, without those that are gone.
    """

    reduce: ReduceFunction | None = None
    dtype: torch.dtype = torch.uint8
    make: Callable[[int], Tensor | None] | None = None
    sources: set[int] = field(default_factory=set)


@dataclass(eq=False, slots=True)
class Local(Task):
    """A computation of this rank alone.

    Attributes:
        run: Function that performs the computation.
    """

    run: Callable[[], Any] = lambda: None


@dataclass(eq=False, slots=True)
class TransportOperation:
    """A collective, or a message, as one rank sees it.

    Attributes:
        name: Name of the collective for messages, such as ``all_reduce``.
        signature: Properties on which the ranks must agree.
        tasks: Tasks of this rank.
        result: Tensors that the caller receives.
        bytes: Bytes of the tensors of this rank.
        timeout_s: Seconds after which it is given up.
        is_message: Whether only two ranks take part, and ``sequence`` is a tag, or the number of a window.
        is_passive: Whether this rank did not post it, as another one puts something into a window.
        follows: Messages, posted earlier, all of whose tasks come first.
        sequence: Number among the collectives of the communicator.
        finish: Function that runs after all tasks, before the caller is notified.
        posted_s: When it was posted, on the monotonic clock.
        told: Function that is called once the operation is done or aborted.
        error: Why it was given up.
        is_done: Whether the caller may go on.
        left: Number of tasks that are not done.
    """

    name: str
    signature: Signature
    tasks: list[Task]
    result: Sequence[Tensor] = ()
    bytes: int = 0
    timeout_s: float = 300.0
    is_message: bool = False
    is_passive: bool = False
    follows: Sequence[TransportOperation] = ()
    sequence: int = -1
    finish: Callable[[], Any] | None = None
    posted_s: float = field(default_factory=time.monotonic)
    told: list[Callable[[], None]] = field(default_factory=list)
    error: Exception | None = None
    is_done: bool = False
    left: int = field(init=False)

    def __post_init__(self) -> None:
        self.left = len(self.tasks)
        for task in self.tasks:
            task.operation = self

    @property
    def deadline_s(self) -> float:
        """When it is given up, on the monotonic clock."""
        return self.posted_s + self.timeout_s

    @property
    def title(self) -> str:
        """Name for messages."""
        if self.is_message:
            return f"{self.name} of tag {self.sequence}" if self.name == "message" else self.name
        return f"{self.name} {self.sequence}"


@dataclass(frozen=True)
class ProgramStep:
    """A transfer of a program.

    Attributes:
        gives: Whether this rank offers the chunks; otherwise it takes them.
        peer: The other rank.
        index: Number of the transfer in the plan.
        chunks: Numbers of the chunks.
        reduces: Whether what is taken is added.
        needs: Places, in the program, of the steps that come first.
    """

    gives: bool
    peer: int
    index: int
    chunks: tuple[int, ...]
    reduces: bool
    needs: tuple[int, ...]


def program(plan: CollectivePlan, rank: int) -> tuple[ProgramStep, ...]:
    """Return the program of a rank in a plan; see :func:`programs`."""
    return programs(plan, (rank,))[rank]


def programs(plan: CollectivePlan, ranks: Iterable[int] | None = None) -> dict[int, tuple[ProgramStep, ...]]:
    """Return what ranks do in a plan.

    A chunk is offered after what was written to it, and written after the others have taken what was offered of it.
    Contributions to a chunk are added in the order of the plan, so the bits do not depend on the order of arrival.

    Args:
        plan: A plan that :func:`~cordillera.planning.network.collective_plans.verify` has proved.
        ranks: The ranks; by default all.
    """
    made = {rank: _Program() for rank in (range(plan.ranks) if ranks is None else ranks)}
    index = 0
    for transfers in plan.steps:
        for number, sent in enumerate(transfers, index):
            if (source := made.get(sent.source)) is not None:
                source.give(number, sent)
        for number, sent in enumerate(transfers, index):
            if (target := made.get(sent.target)) is not None:
                target.take(number, sent)
        index += len(transfers)
    return {rank: tuple(one.steps) for rank, one in made.items()}


class _Program:
    """A program that is being derived.

    Attributes:
        steps: Its steps until now.
    """

    def __init__(self) -> None:
        self.steps: list[ProgramStep] = []
        self._written: dict[int, int] = {}  # last step that wrote each chunk
        self._offered: dict[int, list[int]] = {}  # steps that have offered each chunk since it was written

    def give(self, number: int, sent: Transfer) -> None:
        needs = tuple(sorted({self._written[chunk] for chunk in sent.chunks if chunk in self._written}))
        for chunk in sent.chunks:
            self._offered.setdefault(chunk, []).append(len(self.steps))
        self.steps.append(ProgramStep(True, sent.target, number, sent.chunks, False, needs))

    def take(self, number: int, sent: Transfer) -> None:
        first = {self._written[chunk] for chunk in sent.chunks if chunk in self._written}
        first |= {step for chunk in sent.chunks for step in self._offered.pop(chunk, [])}
        for chunk in sent.chunks:
            self._written[chunk] = len(self.steps)
        self.steps.append(ProgramStep(False, sent.source, number, sent.chunks, sent.reduces, tuple(sorted(first))))


def tasks_of(
    steps: Sequence[ProgramStep], chunks: Sequence[Tensor], dtype: torch.dtype, reduce: ReduceFunction | None = None
) -> list[Task]:
    """Return the tasks of a program on memory.

    Args:
        steps: The program.
        chunks: Where each chunk lies, uint8.
        dtype: Type of the elements.
        reduce: Function that reduces two values to one.
    """
    tasks: list[Task] = []
    for step in steps:
        views = [chunks[chunk] for chunk in step.chunks]
        task = (
            Offer(peer=step.peer, index=step.index, views=views)
            if step.gives
            else Take(
                peer=step.peer, index=step.index, views=views, reduce=reduce if step.reduces else None, dtype=dtype
            )
        )
        task.after(*(tasks[need] for need in step.needs))
        tasks.append(task)
    return tasks
