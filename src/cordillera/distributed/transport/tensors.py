"""What tensors an operation of the backend may have, how they are reduced, and into which parts they are cut."""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cordillera.distributed.transport.exchanges import OperationFailed
from cordillera.distributed.transport.operations import Local, Offer, ReduceFunction, Take, Task, as_bytes
from cordillera.errors import PlanError

_REDUCTIONS: dict[str, tuple[str, ReduceFunction]] = {
    "SUM": ("sum", torch.add),
    "AVG": ("avg", torch.add),
    "PRODUCT": ("product", torch.mul),
    "MIN": ("min", torch.minimum),
    "MAX": ("max", torch.maximum),
    "BAND": ("band", torch.bitwise_and),
    "BOR": ("bor", torch.bitwise_or),
    "BXOR": ("bxor", torch.bitwise_xor),
}


def checked(tensors: Sequence[Tensor], *, several: bool = False) -> list[Tensor]:
    """Return tensors that can be carried.

    Raises:
        PlanError: If they cannot.
    """
    if not tensors or (not several and len(tensors) != 1):
        raise PlanError(f"got {len(tensors)} tensors", where="tensors", remedy="one tensor a rank")
    for tensor in tensors:
        if tensor.device.type != "cpu":
            raise PlanError(
                f"a tensor on {tensor.device} cannot be carried", where="tensors",
                remedy='the backend serves CPUs; "cpu:gloo,cuda:nccl" serves both',
            )  # fmt: skip
        if tensor.layout != torch.strided or not tensor.is_contiguous():
            raise PlanError("a tensor that is not contiguous cannot be carried", where="tensors")
    return list(tensors)


def reduction_of(opts: Any, *dtypes: torch.dtype) -> tuple[str, ReduceFunction]:
    """Return name and function of a reduction.

    Raises:
        PlanError: If it is not supported, or torch cannot compute it with one of the types.
    """
    op = getattr(opts, "reduceOp", dist.ReduceOp.SUM)
    for name, (called, reduce) in _REDUCTIONS.items():
        if op == getattr(dist.ReduceOp, name):
            for dtype in dtypes:
                if not _computes(name, dtype):
                    raise PlanError(f"{name} of {dtype} is not supported", where="op")
            return called, reduce
    raise PlanError(f"{op} is not supported", where="op", remedy=", ".join(_REDUCTIONS))


@functools.lru_cache(256)
def _computes(name: str, dtype: torch.dtype) -> bool:
    """Whether torch can reduce elements of a type."""
    called, reduce = _REDUCTIONS[name]
    one = torch.zeros(1, dtype=torch.uint8).repeat(dtype.itemsize).view(dtype)
    try:
        reduce(one, one, out=one)
        average(called, [one], 1)()
    except RuntimeError:
        return False
    return True


def average(name: str, tensors: Sequence[Tensor], size: int) -> Callable[[], None]:
    """Return what divides the sums in ``tensors`` by the number of ranks, ``size``, if ``name`` is ``avg``."""

    def divide() -> None:
        if name == "avg":
            for tensor in tensors:
                tensor.detach().div_(size)

    return divide


def copied(source: Tensor, target: Tensor) -> Local:
    """Return the task of copying a tensor to where it belongs on the same rank."""
    if source.dtype != target.dtype or source.numel() != target.numel():
        raise PlanError(
            f"{source.numel():,} elements of {source.dtype} do not fit in {target.numel():,} of {target.dtype}",
            where="tensors",
        )
    return Local(run=lambda: target.detach().view(-1).copy_(source.detach().reshape(-1)))


def split_evenly(tensor: Tensor, count: int) -> list[Tensor]:
    """Return equal parts of a tensor."""
    if tensor.numel() % count:
        raise PlanError(f"{tensor.numel():,} elements cannot be divided among {count} ranks", where="tensors")
    return list(tensor.detach().reshape(-1).chunk(count)) if tensor.numel() else [tensor.detach().reshape(-1)] * count


def split_rows(tensor: Tensor, sizes: list[int] | None, count: int) -> list[Tensor]:
    """Return the parts of a tensor along its first dimension."""
    if not sizes:
        if len(tensor) % count:
            raise PlanError(f"{len(tensor)} rows cannot be divided among {count} ranks", where="all_to_all")
        sizes = [len(tensor) // count] * count
    if len(sizes) != count or sum(sizes) != len(tensor) or min(sizes) < 0:
        raise PlanError(f"split sizes {sizes} do not divide {len(tensor)} rows among {count} ranks", where="all_to_all")
    return list(tensor.detach().split(sizes))


def refuse_overlaps(
    collective: str,
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor] = (),
    kept: Sequence[tuple[Tensor, Tensor]] = (),
) -> None:
    """Refuse buffers that would be written while others read or write them.

    Args:
        collective: Name of the collective.
        outputs: What it writes.
        inputs: What it reads, which may overlap each other.
        kept: Inputs with the outputs that they are copied to on the same rank; the two may be one place.

    Raises:
        PlanError: If outputs overlap each other, or an output overlaps an input other than the one it is a copy of.
    """
    written = sorted((*_span(output), number) for number, output in enumerate(outputs) if output.nbytes)
    for (_, end, first), (begin, _, second) in itertools.pairwise(written):
        if begin < end:
            raise PlanError(
                f"outputs {min(first, second)} and {max(first, second)} overlap in memory",
                where=collective,
                remedy="give each its own memory",
            )
    in_place = {_span(source) for source, target in kept if _span(source) == _span(target)}
    begins = [begin for begin, _, _ in written]
    for number, one in enumerate(inputs):
        begin, end = span = _span(one)
        at = bisect.bisect_left(begins, end) - 1  # the last output that begins before the input ends
        if begin < end and at >= 0 and written[at][1] > begin and span not in in_place:
            raise PlanError(
                f"input {number} overlaps output {written[at][2]} in memory",
                where=collective,
                remedy="give the outputs memory of their own; only what a rank keeps may lie where it is already",
            )


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return the addresses of the first byte of a contiguous tensor and of the one behind its last."""
    return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes


def sparse_sum(tensor: Tensor, rank: int, peers: Sequence[int]) -> tuple[list[Task], Callable[[], None]]:
    """Return the tasks that sum sparse tensors of all ranks in place, and the step after them.

    Every rank receives the indices and values of all others, whose number only these know, and adds them in the order
    of the ranks, so that all have the same bits.

    Args:
        tensor: Sparse COO tensor of this rank.
        rank: This rank.
        peers: The other ranks.

    Raises:
        PlanError: If the tensor is not a sparse COO tensor on the CPU.
    """
    if tensor.layout != torch.sparse_coo or tensor.device.type != "cpu":
        raise PlanError(f"a tensor of {tensor.layout} on {tensor.device} cannot be carried", where="tensors")
    own = tensor.detach().coalesce()
    head = torch.tensor([own.sparse_dim(), *own.shape])
    parts = [head, own.indices().t().contiguous(), own.values().contiguous()]
    found = {rank: [as_bytes(part) for part in parts]}
    tasks: list[Task] = []
    for peer in peers:
        found[peer] = [as_bytes(torch.empty_like(head))]
        tasks += [Offer(peer=peer, index=index, views=[mine]) for index, mine in enumerate(found[rank])]
        tasks.append(Take(peer=peer, views=[found[peer][0]]))
        for index in (1, 2):
            found[peer].append(torch.empty(0, dtype=torch.uint8))
            tasks.append(Take(peer=peer, index=index, make=functools.partial(_made, found[peer], index)))

    def add() -> None:
        for peer in sorted(found):
            if (theirs := found[peer][0].view(torch.int64).tolist()) != head.tolist():
                raise OperationFailed(
                    f"rank {peer} of the group sums a sparse tensor of {theirs[1:]} with {theirs[0]} sparse "
                    f"dimensions, rank {rank} one of {list(own.shape)} with {own.sparse_dim()}"
                )
        indices = [found[peer][1].view(torch.int64).view(-1, own.sparse_dim()) for peer in sorted(found)]
        values = [
            found[peer][2].view(own.dtype).view(len(rows), *own.values().shape[1:])
            for peer, rows in zip(sorted(found), indices, strict=True)
        ]
        total = torch.sparse_coo_tensor(torch.cat(indices).t(), torch.cat(values), own.shape, check_invariants=True)
        with torch.no_grad():  # a detached sparse tensor would be another one
            tensor.copy_(total.coalesce())

    return tasks, add


def _made(parts: list[Tensor], index: int, size: int) -> Tensor:
    parts[index] = torch.empty(size, dtype=torch.uint8)
    return parts[index]
