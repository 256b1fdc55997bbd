"""Attention over documents that are spread over ranks, for training, equal to attention on one rank.

Every rank has the queries, keys and values of its own tokens
(:class:`~cordillera.distributed.context.shard_plan.ShardPlan`). ``all_gather`` brings all keys and values to every
rank, and a reduce-scatter returns their gradients: it is simple and takes one collective each way, but memory for all
tokens' keys and values. ``ring`` passes keys and values from rank to rank while each rank attends to those that it
holds, and merges the results by log-sum-exp; in the backward, their gradients travel along. Both skip pairs of chunks
that do not see each other, and neither pads a document.

Source: all-gather as in Grattafiori et al. 2024 (arXiv 2407.21783), section 3.3.2, and Wang et al. 2025 (arXiv
2503.17924); the ring as in Liu et al. 2023 (arXiv 2310.01889), with the log-sum-exp of all keys in the backward.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from pydantic import BaseModel, ConfigDict, Field, field_validator
from torch import Tensor
from torch.autograd.function import once_differentiable

from cordillera.distributed.collectives import Arrival, Collectives
from cordillera.distributed.context.shard_plan import ShardPlan
from cordillera.distributed.job.environment import checked_deadline
from cordillera.distributed.ledger import Ledger
from cordillera.errors import PlanError
from cordillera.kernels.attention.merge import merge
from cordillera.kernels.attention.partial import AttentionBackend, attention_backward, partial_attention
from cordillera.kernels.attention.relation import RowBlock, blocks_between


class ContextParallelConfig(BaseModel):
    """Settings for sharing attention among ranks.

    Attributes:
        transport: Transport of keys and values: ``all_gather`` or ``ring``.
        backend: Backend of :func:`cordillera.kernels.attention.partial.partial_attention`.
        deadline_s: Longest time of one wait for other ranks on CPUs, in seconds. On CUDA the timeout of the process
            group applies.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    transport: Literal["all_gather", "ring"] = "all_gather"
    backend: AttentionBackend = "auto"
    deadline_s: float = Field(300.0, gt=0, allow_inf_nan=False)

    _is_deadline = field_validator("deadline_s")(checked_deadline)


class ContextParallelAttention:
    """Attention core for models whose tokens are spread over the ranks of a group.

    Call :meth:`use` with a plan before each forward, the same on every rank; a backward uses the plan of its forward.

    Args:
        group: Process group whose ranks are those of the plans; None for the default group.

    Raises:
        PlanError: If there is no process group, or this process is not in it.
    """

    Config = ContextParallelConfig

    def __init__(
        self, config: ContextParallelConfig, group: dist.ProcessGroup | None = None, ledger: Ledger | None = None
    ) -> None:
        self.config, self.ledger = config, Ledger() if ledger is None else ledger
        self._links = Collectives(group, self.ledger, config.deadline_s)
        self.rank, self.size = self._links.rank, self._links.size
        self._share: _Share | None = None
        self._checked: Tensor | None = None

    def use(self, plan: ShardPlan, device: torch.device | str = "cpu") -> None:
        """Attend by a ``plan`` of tensors on ``device`` from now on; every rank must call it.

        Raises:
            PlanError: If the plan is for another number of ranks, or ranks have different plans.
            PeerError: If a rank does not call it in time.
        """
        if plan.size != self.size:
            raise PlanError(f"is for {plan.size} ranks, the group has {self.size}", where="shard plan")
        digest = torch.tensor([zlib.crc32(plan.to_json().encode())], device=device)
        digests = self._links.all_gather("plans", digest).tolist()
        others = [rank for rank in range(self.size) if digests[rank] != digests[self.rank]]
        if others:
            raise PlanError(
                f"rank {self.rank} and rank {others[0]} have different ones",
                where="shard plan",
                remedy="make it from the same lengths, by the same mode and latency, on every rank",
            )
        self._share = _Share.of(plan, self.rank, self._links, self.config, torch.device(device))
        self._checked = None

    @property
    def plan(self) -> ShardPlan:
        """Plan in use."""
        return self._used().plan

    def shard(self, tokens: Tensor) -> Tensor:
        """Return this rank's part of a tensor of one row for each token in document order, ``[T, ...]``."""
        if len(tokens) != sum(self.plan.lengths):
            raise PlanError(f"{len(tokens)} tokens, the plan has {sum(self.plan.lengths)}", where="tokens")
        return tokens[torch.from_numpy(self.plan.indices(self.rank)).to(tokens.device)]

    def positions(self) -> Tensor:
        """Return the positions of this rank's tokens in their documents, ``int64 [T_local]``, for rotary embeddings."""
        return torch.from_numpy(self.plan.positions(self.rank))

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor | None = None) -> Tensor:
        """Return the attention of this rank's tokens to all tokens before them in their documents, ``[T_local, H, D]``.

        Args:
            q: Queries of the tokens of :meth:`shard`, ``[T_local, H, D]``.
            k: Keys, ``[T_local, KV, D]``.
            v: Values, ``[T_local, KV, D]``.
            offsets: Offsets of all documents, ``[B + 1]``, as models pass them on; used only to check the plan.

        Raises:
            PlanError: If the tensors do not match the plan in use.
            PeerError: If another rank does not respond in time. The group cannot be used afterwards.
        """
        share = self._used()
        if not len(q) == len(k) == len(v) == share.plan.tokens[self.rank]:
            raise PlanError(
                f"{len(q)} queries, {len(k)} keys and {len(v)} values; the plan has "
                f"{share.plan.tokens[self.rank]} tokens for rank {self.rank}",
                where="attention",
                remedy="shard what the model reads",
            )
        if offsets is not None and offsets is not self._checked:
            if offsets.tolist() != share.plan.offsets.tolist():
                raise PlanError("are not the plan's", where="offsets", remedy="use the plan of this batch")
            self._checked = offsets  # all layers pass the same tensor, and on CUDA reading it would stall each of them
        function = _AllGather if self.config.transport == "all_gather" else _Ring
        out: Tensor = function.apply(q, k, v, share)
        return out

    def _used(self) -> _Share:
        if self._share is None:
            raise PlanError("there is no plan yet", where="attention", remedy="call use(plan)")
        return self._share


@dataclass(frozen=True)
class _Share:
    """Rank's part of a plan, and its links to the other ranks."""

    plan: ShardPlan
    rank: int
    links: Collectives
    backend: AttentionBackend
    rows: Tensor  # [T]: place of each token of the document order among the ranks' equally long, padded parts
    longest: int  # length of those parts

    @classmethod
    def of(
        cls, plan: ShardPlan, rank: int, links: Collectives, config: ContextParallelConfig, device: torch.device
    ) -> _Share:
        longest = max(plan.tokens)
        padded = [torch.arange(count) + rank * longest for rank, count in enumerate(plan.tokens)]
        rows = torch.cat(padded)[torch.from_numpy(plan.restore)]
        return cls(plan, rank, links, config.backend, rows.to(device), longest)

    def blocks_with(self, source: int) -> list[RowBlock]:
        """Return the blocks in which this rank's queries see the keys of a rank."""
        return blocks_between(self.plan.ranks[self.rank], self.plan.ranks[source])

    def blocks_with_all(self) -> list[RowBlock]:
        """Return the blocks in which this rank's queries see all keys in document order."""
        documents = [(document, 0, length) for document, length in enumerate(self.plan.lengths)]
        return blocks_between(self.plan.ranks[self.rank], documents)


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, share: _Share) -> Tensor:
        part = _filled_up(torch.cat([k, v], 1), share.longest)
        gathered = share.links.all_gather("keys and values", part)
        keys, values = gathered[share.rows].chunk(2, 1)
        out, lse = partial_attention(q, keys, values, share.blocks_with_all(), backend=share.backend)
        ctx.save_for_backward(q, keys, values, out, lse)
        ctx.share = share
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        q, keys, values, out, lse = ctx.saved_tensors
        share: _Share = ctx.share
        blocks = share.blocks_with_all()
        dq, dk, dv = attention_backward(dout, q, keys, values, out, lse, blocks, backend=share.backend)
        grads = dk.new_zeros(share.longest * share.plan.size, 2 * dk.shape[1], dk.shape[2])
        grads[share.rows] = torch.cat([dk, dv], 1)
        own = share.links.reduce_scatter("their gradients", grads)[: len(q)]
        return dq.to(q.dtype), *(x.to(q.dtype) for x in own.chunk(2, 1)), None


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, share: _Share) -> Tensor:
        plan, rank, links = share.plan, share.rank, share.links
        held = torch.cat([k, v], 1)
        pieces: list[tuple[Tensor, Tensor]] = [partial_attention(q, k, v, "empty", backend=share.backend)]
        for step in range(plan.size):
            source, following = (rank - step) % plan.size, (rank - step - 1) % plan.size
            arriving = None
            if step + 1 < plan.size:
                arriving = links.pass_on("keys and values", held, plan.tokens[following], 2 * step)
            blocks = share.blocks_with(source)
            if blocks:
                keys, values = held.chunk(2, 1)
                pieces = [merge([*pieces, partial_attention(q, keys, values, blocks, backend=share.backend)])]
            if arriving is not None:
                held = arriving.wait()
        out, lse = pieces[0]
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.share = share
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        share: _Share = ctx.share
        plan, rank, links = share.plan, share.rank, share.links
        held = torch.cat([k, v], 1)
        dq = torch.zeros(q.shape, dtype=lse.dtype, device=q.device)
        gradients: Arrival[Tensor] | None = (
            None  # gradients of the current keys and values, from the ranks that had them before
        )
        for step in range(plan.size):
            source, following = (rank - step) % plan.size, (rank - step - 1) % plan.size
            arriving = None
            if step + 1 < plan.size:
                arriving = links.pass_on("keys and values again", held, plan.tokens[following], 2 * step)
            blocks = share.blocks_with(source)
            if blocks:
                keys, values = held.chunk(2, 1)
                part, dk, dv = attention_backward(dout, q, keys, values, out, lse, blocks, backend=share.backend)
                dq += part
                own = torch.cat([dk, dv], 1)
            else:
                own = torch.zeros(held.shape, dtype=lse.dtype, device=q.device)
            if gradients is not None:
                own += gradients.wait()
            # In the last step, the next rank owns these keys, so their gradients return to it.
            if plan.size > 1:
                gradients = links.pass_on("their gradients", own, plan.tokens[following], 2 * step + 1)
            if arriving is not None:
                held = arriving.wait()
        if gradients is not None:
            own = gradients.wait()
        return dq.to(q.dtype), *(x.to(q.dtype) for x in own.chunk(2, 1)), None


def _filled_up(x: Tensor, rows: int) -> Tensor:
    """Pad with zeros to a number of rows."""
    return x if len(x) == rows else torch.cat([x, x.new_zeros(rows - len(x), *x.shape[1:])])
