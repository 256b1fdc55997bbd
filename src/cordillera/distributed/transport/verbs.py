"""Operations that torch.distributed lacks: an exchange whose sizes only the senders know, and windows.

Sources: NCCLX (arXiv 2510.20171), whose all-to-all reads its sizes on the device when it runs; here the offer of a part
says how large it is, and the other rank makes room for it then. Windows have the verbs of torchcomms: put, signal and
wait_signal.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cordillera.distributed.transport.communicator import checked_timeout
from cordillera.distributed.transport.operations import Local, Offer, Take, Task, TransportOperation, as_bytes
from cordillera.distributed.transport.process_group import OperationWork, TransportProcessGroup
from cordillera.distributed.transport.signatures import signed
from cordillera.distributed.transport.tensors import checked, copied
from cordillera.errors import PlanError

_SIGNALS = -(1 << 30)  # tags of signals, by window; those of messages are not negative


def all_to_all_dynamic(
    group: TransportProcessGroup, parts: Sequence[Tensor], *, most_rows: int | None = None, options: Any = None
) -> tuple[dist.Work, list[Tensor]]:
    """Send each rank a part whose number of rows only this rank knows.

    Nothing is padded, and no sizes are exchanged before.

    Args:
        group: Ranks that exchange; all of them call this.
        parts: Part ``[n, ...]`` for each rank, contiguous and on the CPU, equal but for ``n``.
        most_rows: Most rows that another rank may send; None for any number.
        options: Options of torch.distributed's all-to-all, of which the timeout counts.

    Returns:
        The work, and the list of the parts of all ranks, which is filled once the work is done. This rank's own part is
        not copied.

    Raises:
        PlanError: If the parts are not acceptable. Waiting raises a TransportError if those of another rank are not.
    """
    own = parts[group.rank()] if len(parts) == group.size() else None
    if own is None or any(part.shape[1:] != own.shape[1:] or part.dtype != own.dtype for part in parts):
        raise PlanError(
            f"parts are {[list(part.shape) for part in parts]} for {group.size()} ranks",
            where="all_to_all_dynamic",
            remedy="a part for each rank, with equal types and equal sizes but the first",
        )
    row = own.new_empty(1, *own.shape[1:])
    if not row.nbytes:
        raise PlanError("rows without numbers cannot be counted", where="all_to_all_dynamic")
    found = list(parts)

    def make(peer: int, size: int) -> Tensor | None:
        rows, rest = divmod(size, row.nbytes)
        if rest or (most_rows is not None and rows > most_rows):
            return None
        found[peer] = own.new_empty(rows, *own.shape[1:])
        return found[peer]

    tasks: list[Task] = []
    for peer in range(group.size()):
        if peer != group.rank():
            tasks.append(Offer(peer=peer, views=[as_bytes(parts[peer])]))
            tasks.append(Take(peer=peer, make=partial(make, peer)))
    return group.run("all_to_all_dynamic", tasks, [], own.dtype, options), found


class Window:
    """Memory of every rank of a group that the others write to, without a call of the rank that it belongs to.

    All ranks make and close it together. What is put is in the other rank's memory once that rank has a signal, which
    comes behind all that was put before; until then it must not use what others write to.

    >>> window = Window(group, torch.zeros(1024))  # doctest: +SKIP
    >>> window.put(torch.ones(10), 1, offset=20)  # doctest: +SKIP
    >>> window.signal(1)  # doctest: +SKIP

    Args:
        group: Ranks that write to each other's memory.
        tensor: Memory of this rank, contiguous and on the CPU; sizes may differ between ranks, types not.

    Attributes:
        tensor: The memory.

    Raises:
        PlanError: If the tensor is not acceptable, or is of another type than those of other ranks.
        TransportError: If a rank does not come in time.
    """

    def __init__(self, group: TransportProcessGroup, tensor: Tensor) -> None:
        checked([tensor])
        self.tensor, self._group = tensor, group
        self._communicator, self._rank = group.communicator, group.rank()
        self._number = self._communicator.window_number()
        self._puts: defaultdict[int, list[TransportOperation]] = defaultdict(list)  # puts that may still run, by rank
        self._counts: defaultdict[int, itertools.count[int]] = defaultdict(itertools.count)
        signature, windows = signed("put", tensor.dtype), self._communicator.windows
        opened = Local(run=lambda: windows.update({self._number: (as_bytes(tensor), signature)}))
        shapes = torch.empty(group.size(), 2, dtype=torch.int64)
        shapes[self._rank] = torch.tensor([tensor.numel(), signature.dtype])
        exchanged = self._exchanged([as_bytes(one) for one in shapes])
        for task in exchanged:
            task.after(opened)
        group.run("window", [opened, *exchanged], [], torch.int64, None).wait()
        self._sizes, dtypes = shapes[:, 0].tolist(), shapes[:, 1].tolist()
        self._is_open = True
        if len(set(dtypes)) > 1:
            self.close()
            raise PlanError(
                f"ranks give tensors of {len(set(dtypes))} types", where="window", remedy="one type on all ranks"
            )

    def put(
        self, tensor: Tensor, rank: int, offset: int = 0, *, async_op: bool = False, timeout: timedelta | None = None
    ) -> dist.Work | None:
        """Write a tensor into the memory of a rank.

        Args:
            tensor: What is written, contiguous, on the CPU, of the type of the window. It must not change before the
                work is done.
            rank: The rank, of the group; this one is possible, too.
            offset: Element of the other rank's memory at which it begins.
            async_op: Whether to return at once.
            timeout: Longest time; None for that of the group.

        Returns:
            The work if ``async_op``, which is done once the tensor may change; otherwise None.

        Raises:
            PlanError: If it does not fit, or an argument is not acceptable.
            TransportError: If it was given up; the group then is, too.
        """
        checked([tensor])
        timeout_s = self._check(rank, timeout)
        if tensor.dtype != self.tensor.dtype:
            raise PlanError(f"{tensor.dtype} cannot be put into one of {self.tensor.dtype}", where="window")
        if not 0 <= offset <= self._sizes[rank] - tensor.numel():
            raise PlanError(
                f"{tensor.numel():,} elements at {offset:,} do not fit in the {self._sizes[rank]:,} of rank {rank}",
                where="window",
            )
        task: Task = (
            copied(tensor, self.tensor.detach().view(-1)[offset : offset + tensor.numel()])
            if rank == self._rank
            else Offer(
                peer=rank, index=next(self._counts[rank]), views=[as_bytes(tensor)], place=offset * tensor.itemsize
            )
        )
        puts = self._puts[rank] = self._running(rank)
        operation = self._operation("put", task, tensor, self._number, timeout_s)
        puts.append(operation)
        return self._begin(operation, async_op)

    def signal(self, rank: int, *, async_op: bool = False, timeout: timedelta | None = None) -> dist.Work | None:
        """Signal a rank that all previous puts into its window are complete.

        Args:
            rank: The other rank.
            async_op: Whether to return at once; the signal then waits for what is being put.
            timeout: Longest time; None for that of the group.

        Returns:
            The work if ``async_op``; otherwise None.

        Raises:
            PlanError: If an argument is not acceptable.
            TransportError: If it was given up; the group then is, too.
        """
        timeout_s = self._check(rank, timeout, other=True)
        none, tag = torch.empty(0, dtype=torch.uint8), _SIGNALS - self._number
        task = Offer(peer=rank, index=self._communicator.message_number(rank, tag), views=[none])
        operation = self._operation("signal", task, none, tag, timeout_s)
        operation.follows = self._running(rank)
        return self._begin(operation, async_op)

    def wait_signal(self, rank: int, *, async_op: bool = False, timeout: timedelta | None = None) -> dist.Work | None:
        """Wait for the next signal of a rank; each is waited for once.

        Args:
            rank: The other rank.
            async_op: Whether to return at once, with a work to wait for.
            timeout: Longest time; None for that of the group.

        Returns:
            The work if ``async_op``; otherwise None.

        Raises:
            PlanError: If an argument is not acceptable.
            TransportError: If it does not come in time; the group is then given up.
        """
        timeout_s = self._check(rank, timeout, other=True)
        none = torch.empty(0, dtype=torch.uint8)
        task = Take(peer=rank, views=[none])
        return self._begin(self._operation("wait_signal", task, none, _SIGNALS - self._number, timeout_s), async_op)

    def close(self) -> None:
        """End all access to the window. All ranks must call this; it waits for all of them. A second call does nothing.

        Raises:
            TransportError: If a rank does not come in time.
        """
        if not self._is_open:
            return
        self._is_open = False
        for put in [put for puts in self._puts.values() for put in puts]:
            self._communicator.wait(put)
        none = torch.empty(0, dtype=torch.uint8)
        exchanged = self._exchanged([none] * self._group.size())
        closed = Local(run=lambda: self._communicator.windows.pop(self._number, None))
        closed.after(*exchanged)
        self._group.run("window", [*exchanged, closed], [], torch.int64, None).wait()

    def __enter__(self) -> Window:
        return self

    def __exit__(self, kind: object, *rest: object) -> None:
        if kind is None:  # otherwise other ranks may not come
            self.close()

    def _exchanged(self, parts: Sequence[Tensor]) -> list[Task]:
        """Return the tasks of giving the part of this rank to all, and of taking theirs."""
        tasks: list[Task] = []
        for peer in range(self._group.size()):
            if peer != self._rank:
                tasks.append(Offer(peer=peer, views=[parts[self._rank]]))
                tasks.append(Take(peer=peer, views=[parts[peer]]))
        return tasks

    def _check(self, rank: int, timeout: timedelta | None, *, other: bool = False) -> float:
        """Return the longest time, in seconds."""
        if not self._is_open:
            raise PlanError("it is closed", where="window")
        if not 0 <= rank < self._group.size() or (other and rank == self._rank):
            raise PlanError(
                f"rank is {rank}", where="window", remedy=f"another one of the {self._group.size()} of the group"
            )
        return self._communicator.timeout_s if timeout is None else checked_timeout(timeout.total_seconds())

    def _running(self, rank: int) -> list[TransportOperation]:
        return [put for put in self._puts[rank] if not put.is_done]

    def _operation(self, name: str, task: Task, tensor: Tensor, sequence: int, timeout_s: float) -> TransportOperation:
        return TransportOperation(
            name, signed("put" if name == "put" else "message", tensor.dtype), [task], [tensor], tensor.nbytes,
            timeout_s=timeout_s, is_message=True, sequence=sequence,
        )  # fmt: skip

    def _begin(self, operation: TransportOperation, async_op: bool) -> dist.Work | None:
        self._communicator.start(operation, in_background=async_op)
        if async_op:
            return OperationWork(self._communicator, operation)
        self._communicator.wait(operation)
        return None
