"""Communication within a process group, with deadlines, errors that name the awaited rank, and a ledger."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from cordillera.distributed.ledger import Ledger, Traffic
from cordillera.errors import PeerError, PlanError

# torch 2.13 renamed these functions and warns about the old names
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_Result = TypeVar("_Result")


@dataclass
class Arrival(Generic[_Result]):
    """Messages of other ranks in transit into ``result``.

    Each of ``works`` waits for one rank; ``sent`` keeps the tensors of this rank until they are delivered.
    """

    result: _Result
    works: list[tuple[dist.Work, int]]
    links: Collectives
    name: str
    traffic: Traffic
    sent: list[Tensor]
    started: float = field(default_factory=time.perf_counter)

    def wait(self) -> _Result:
        """Wait for the messages and return the result.

        Raises:
            PeerError: If a rank sends or receives nothing in time, or its connection broke.
        """
        began = time.perf_counter()
        for work, peer in self.works:
            self.links.wait(work, f"rank {peer}", peer, self.name)
        ended = time.perf_counter()
        spent = Traffic(seconds=ended - self.started, exposed_seconds=ended - began)
        self.links.ledger.record(self.name, self.traffic + spent)
        return self.result


class Collectives:
    """Collectives and messages among the ``size`` ranks of a process group; this process is ``rank``.

    All of them are recorded in the ledger and named in errors by a ``name``, and raise a
    :class:`~cordillera.errors.PeerError` if a rank does not respond in time or a connection broke.

    Args:
        group: Process group; None for the default group.
        deadline_s: Longest time of one wait on CPUs, in seconds. On CUDA the timeout of the group applies.

    Raises:
        PlanError: If there is no process group, or this process is not in it.
    """

    def __init__(self, group: dist.ProcessGroup | None, ledger: Ledger, deadline_s: float) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise PlanError("there is no process group", where="group", remedy="torch.distributed.init_process_group")
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise PlanError("this process is not a member", where="group")
        self.group, self.ledger, self.deadline_s = group, ledger, deadline_s

    def all_gather(self, name: str, part: Tensor) -> Tensor:
        """Concatenate the equally long parts ``part [n, ...]`` of all ranks under a ``name``."""
        whole = part.new_empty(self.size * len(part), *part.shape[1:])
        return self._collective(name, all_gather_single, whole, part, part)

    def reduce_scatter(self, name: str, whole: Tensor) -> Tensor:
        """Sum ``whole [ranks * n, ...]`` over the ranks under a ``name``; return this rank's ``n`` rows."""
        part = whole.new_empty(len(whole) // self.size, *whole.shape[1:])
        return self._collective(name, reduce_scatter_single, part, whole, part)

    def all_reduce(self, name: str, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """Sum a contiguous ``tensor``, or reduce it by ``op``, over the ranks, in place, under a ``name``."""
        if self.size == 1 or not tensor.numel():
            return tensor
        others = self.size - 1
        sent = 2 * others * tensor.nbytes // self.size  # traffic of a reduce-scatter and an all-gather
        self._wait_for(name, lambda: dist.all_reduce(tensor, op, group=self.group, async_op=True), sent, 2 * others)
        return tensor

    def all_to_all(self, name: str, parts: Sequence[Tensor], tag: int) -> list[Tensor]:
        """Send a part to each rank under a ``name`` and ``tag``, and return a part from each; errors name the rank.

        This rank's own part is returned unchanged. ``parts`` holds one tensor ``[n, ...]`` for each rank, of any
        length ``n``; every rank must send this rank ``len(parts[rank])`` rows.
        """
        own = parts[self.rank]
        if self.size == 1:
            return [own]
        received = [own if rank == self.rank else torch.empty_like(own) for rank in range(self.size)]
        others = [rank for rank in range(self.size) if rank != self.rank]
        sends = [(rank, parts[rank].contiguous()) for rank in others if parts[rank].numel()]
        arrivals = [(rank, received[rank]) for rank in others if own.numel()]
        spent = Traffic(1, sum(part.nbytes for _, part in sends), len(sends))
        self._messages(name, sends, arrivals, tag, received, spent).wait()
        return received

    def pass_on(self, name: str, held: Tensor, rows: int, tag: int) -> Arrival[Tensor]:
        """Start to send ``held [n, ...]`` to the next rank and to receive ``rows`` from the previous one.

        Both messages bear ``name`` and ``tag``. An empty tensor is not sent, as the other side knows its size. Waiting
        for the arrival raises errors as well.
        """
        after, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        held = held.contiguous()
        tensor = held.new_empty(rows, *held.shape[1:])
        sends = [(after, held)] if held.numel() else []
        arrivals = [(before, tensor)] if tensor.numel() else []
        return self._messages(name, sends, arrivals, tag, tensor, Traffic(1, held.nbytes, len(sends)))

    def _messages(
        self,
        name: str,
        sends: list[tuple[int, Tensor]],
        arrivals: list[tuple[int, Tensor]],
        tag: int,
        result: _Result,
        traffic: Traffic,
    ) -> Arrival[_Result]:
        # Issue both in one batch, as NCCL requires: separate calls could deadlock.
        operations = [dist.P2POp(dist.isend, x, group=self.group, tag=tag, group_peer=peer) for peer, x in sends]
        operations += [dist.P2POp(dist.irecv, x, group=self.group, tag=tag, group_peer=peer) for peer, x in arrivals]
        peers = [peer for peer, _ in (*sends, *arrivals)]
        try:
            works = dist.batch_isend_irecv(operations) if operations else []
        except RuntimeError as error:
            named = " or ".join(map(str, dict.fromkeys(reversed(peers))))
            raise self._broken(f"rank {named}", peers[-1], name) from error
        # NCCL returns one handle for all operations
        waits = list(zip(works, peers, strict=False))
        return Arrival(result, waits, self, name, traffic, [x for _, x in sends])

    def _collective(self, name: str, function: Any, result: Tensor, given: Tensor, part: Tensor) -> Tensor:
        if self.size == 1 or not part.numel():
            return result.copy_(given)
        others, given = self.size - 1, given.contiguous()
        start = partial(function, result, given, group=self.group, async_op=True)
        self._wait_for(name, start, others * part.nbytes, others)
        return result

    def _wait_for(self, name: str, start: Callable[[], Any], sent: int, messages: int) -> None:
        started = time.perf_counter()
        try:
            work = start()
        except RuntimeError as error:
            raise self._broken("another rank", None, name) from error
        self.wait(work, "another rank", None, name)
        seconds = time.perf_counter() - started
        self.ledger.record(name, Traffic(1, sent, messages, seconds, seconds))

    def wait(self, work: dist.Work, whom: str, peer: int | None, name: str) -> None:
        """Wait for ``work`` until the deadline; errors name ``name``, the data, and ``whom`` (a ``peer`` or None)."""
        started = time.perf_counter()
        try:
            if "nccl" in dist.get_backend(self.group):
                work.wait()  # a timeout would make the host wait for the device
            else:
                work.wait(timedelta(seconds=self.deadline_s))
        except RuntimeError as error:
            if time.perf_counter() - started >= self.deadline_s:
                raise PeerError(
                    f"{whom} did not exchange {name} within {self.deadline_s:g} s",
                    peer=peer,
                    where=f"rank {self.rank}",
                    remedy="see what the other ranks do, or give a longer deadline_s",
                ) from error
            raise self._broken(whom, peer, name) from error

    def _broken(self, whom: str, peer: int | None, name: str) -> PeerError:
        """Return the error for the exception that is being handled."""
        return PeerError(
            f"{reason_of(sys.exception(), whom)}, while {name} were exchanged",
            peer=peer,
            where=f"rank {self.rank}",
            remedy="see what the other ranks say",
        )


def reason_of(error: BaseException | None, whom: str) -> str:
    """Return why an exchange with ``whom`` failed with an ``error``: backends other than our own give no reason."""
    return error.what if isinstance(error, PeerError) else f"the connection to {whom} broke"


def exchange_unknown_parts(links: Collectives, name: str, parts: Sequence[Tensor], tag: int) -> list[Tensor]:
    """Send a part to each rank and return one from each; only senders know how long they are.

    Where the backend is our own, the sizes travel with the parts; otherwise they are gathered before.

    Args:
        links: Ranks that exchange.
        name: Name of the data, for the ledger and for errors.
        parts: Part for each rank, ``[n, ...]``, equal but for ``n``. This rank's own part is returned unchanged.
        tag: Number that tells these messages from others in transit.

    Raises:
        PeerError: If a rank does not respond in time.
    """
    group: Any = links.group or dist.group.WORLD
    if links.size > 1 and dist.get_backend(group) == "cordillera":
        from cordillera.distributed.transport.verbs import all_to_all_dynamic

        sent, found = [part.contiguous() for part in parts], list[Tensor]()

        def start() -> dist.Work:
            nonlocal found
            work, found = all_to_all_dynamic(group, sent)
            return work

        others = [part.nbytes for rank, part in enumerate(sent) if rank != links.rank]
        links._wait_for(name, start, sum(others), len(others))
        return found
    counts = torch.tensor([len(part) for part in parts], device=parts[links.rank].device)
    table = links.all_gather(name, counts).view(links.size, -1)
    return exchange_parts(links, name, parts, table[:, links.rank].tolist(), tag).wait()


def exchange_parts(
    links: Collectives, name: str, parts: Sequence[Tensor], counts: Sequence[int], tag: int
) -> Arrival[list[Tensor]]:
    """Start to send a part to each rank and to receive one from each, of any lengths.

    Args:
        links: Ranks that exchange.
        name: Name of the data, for the ledger and for errors.
        parts: Part for each rank, ``[n, ...]``, equal but for ``n``. This rank's own part is returned unchanged.
        counts: Length of the part that each rank sends to this one.
        tag: Number that tells these messages from others in transit; messages of one tag arrive in order.

    Returns:
        The part from each rank, once waited for. Waiting raises a PeerError if a rank does not respond in time.
    """
    received = [
        part if rank == links.rank else part.new_empty(count, *part.shape[1:])
        for rank, (part, count) in enumerate(zip(parts, counts, strict=True))
    ]
    others = [rank for rank in range(links.size) if rank != links.rank]
    sends = [(rank, parts[rank].contiguous()) for rank in others if parts[rank].numel()]
    arrivals = [(rank, received[rank]) for rank in others if received[rank].numel()]
    traffic = Traffic(1, sum(part.nbytes for _, part in sends), len(sends))
    return links._messages(name, sends, arrivals, tag, received, traffic)
