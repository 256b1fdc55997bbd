"""Ranks that are threads of one process: the code of real ranks runs for many of them without a network."""

from __future__ import annotations

import queue
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from cordillera.distributed.collectives import Arrival, Collectives
from cordillera.distributed.ledger import Ledger, Traffic
from cordillera.errors import PeerError

_Found = TypeVar("_Found")
_Boxes = dict[tuple[int, int, int], "queue.SimpleQueue[Tensor]"]


class _Receipt:
    """A message that arrives in a box."""

    def __init__(self, box: queue.SimpleQueue[Tensor], tensor: Tensor) -> None:
        self.box, self.tensor = box, tensor


class VirtualRanks(Collectives):
    """:class:`Collectives` of one of ``size`` threads. Messages are copied through ``boxes`` that all threads share."""

    def __init__(self, rank: int, size: int, boxes: _Boxes, deadline_s: float) -> None:
        self.rank, self.size, self.group = rank, size, None
        self.ledger, self.deadline_s, self.boxes = Ledger(), deadline_s, boxes

    def _box(self, source: int, to: int, tag: int) -> queue.SimpleQueue[Tensor]:
        return self.boxes.setdefault((source, to, tag), queue.SimpleQueue())

    def _messages(
        self,
        name: str,
        sends: list[tuple[int, Tensor]],
        arrivals: list[tuple[int, Tensor]],
        tag: int,
        result: Any,
        traffic: Traffic,
    ) -> Arrival[Any]:
        for peer, tensor in sends:
            self._box(self.rank, peer, tag).put(tensor.detach().clone())
        works: list[tuple[Any, int]] = [
            (_Receipt(self._box(peer, self.rank, tag), tensor), peer) for peer, tensor in arrivals
        ]
        return Arrival(result, works, self, name, traffic, [])

    def wait(self, work: Any, whom: str, peer: int | None, name: str) -> None:
        """Copy a message once it is in its box; errors tell ``name``, the data, and ``whom``."""
        try:
            found = work.box.get(timeout=self.deadline_s)
        except queue.Empty:
            raise PeerError(f"{whom} did not exchange {name}", peer=peer, where=f"rank {self.rank}") from None
        if found.shape != work.tensor.shape or found.dtype != work.tensor.dtype:
            raise RuntimeError(f"{name} from {whom}: {found.shape} {found.dtype}, not {work.tensor.shape}")
        work.tensor.copy_(found)

    def all_reduce(self, name: str, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """Sum a ``tensor`` over the ranks, in place and in their order, under a ``name``."""
        if op != dist.ReduceOp.SUM:
            raise NotImplementedError("virtual ranks only sum")
        parts = self.all_to_all(name, [tensor.reshape(-1)] * self.size, 0)
        return tensor.copy_(torch.stack(parts).sum(0).view_as(tensor))


def run_ranks(size: int, work: Callable[[Collectives], _Found], deadline_s: float = 20.0) -> list[_Found]:
    """Return what ``work`` returns on each rank. An error of a rank comes before those of ranks that waited for it."""
    boxes: _Boxes = {}
    with ThreadPoolExecutor(size) as threads:
        running = [threads.submit(work, VirtualRanks(rank, size, boxes, deadline_s)) for rank in range(size)]
    errors = [one.exception() for one in running if one.exception() is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, PeerError)):
        assert error is not None
        raise error
    return [one.result() for one in running]
