"""Cache of keys and values of long conversations, spread over the ranks of a group, exact in every turn.

Each rank runs the model on its part of the new tokens. Only attention needs other ranks: either keys and values
(``pass_kv``) or queries (``pass_q``) travel around a ring while each rank attends to what it holds. With queries, an
all-to-all returns partial outputs to their ranks. Tokens cached in earlier turns stay where they are. Messages contain
only what ranks hold, without padding.

Source: Yang et al. 2024 (arXiv 2411.01783), algorithms 2 to 4 and equation 4.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from pydantic import BaseModel, ConfigDict, Field, field_validator
from torch import Tensor

from cordillera.distributed.collectives import Collectives
from cordillera.distributed.context.ring_cost import AttentionShape, RingCost, Transport
from cordillera.distributed.context.turns import Turn, next_turn
from cordillera.distributed.job.environment import checked_deadline
from cordillera.distributed.ledger import Ledger
from cordillera.errors import DataError, PlanError
from cordillera.kernels.attention.merge import merge
from cordillera.kernels.attention.partial import AttentionBackend, partial_attention

_HOME, _TURN = 1, 3  # tags of partial outputs and of turns; steps of the ring have even tags


class ContextCacheConfig(BaseModel):
    """Settings for sharing conversations among ranks.

    Attributes:
        transport: What travels around the ring: ``pass_kv``, ``pass_q``, or ``auto`` for the cheaper one in each turn.
        cost: Cost model by which ``auto`` chooses; must be the same on every rank.
        backend: Backend of :func:`cordillera.kernels.attention.partial.partial_attention`.
        deadline_s: Longest time of one wait for other ranks on CPUs, in seconds. On CUDA the timeout of the process
            group applies.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    transport: Literal["auto", "pass_kv", "pass_q"] = "auto"
    cost: RingCost = RingCost()
    backend: AttentionBackend = "auto"
    deadline_s: float = Field(300.0, gt=0, allow_inf_nan=False)

    _is_deadline = field_validator("deadline_s")(checked_deadline)


@dataclass(frozen=True)
class CacheShape:
    """Dimensions of a cache, for at most ``capacity`` tokens of a conversation on all ranks together."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    sequences: int
    capacity: int
    dtype: torch.dtype = torch.float32
    device: torch.device | str = "cpu"


class ContextCache:
    """Cache for a model, spread over the ranks of a group.

    A turn begins with :meth:`shard`, on every rank with the same tokens. The model then reads this rank's tokens with
    the offsets of all, and :meth:`gather_last` collects the last rows of all sequences. Memory grows with the number of
    tokens that a rank holds. Methods raise a PeerError if a rank does not respond in time.

    Args:
        group: Process group of the ranks; None for the default group.

    Attributes:
        turn: Latest turn; None before the first.
        transport: What travels around the ring in the latest turn.

    Raises:
        PlanError: If there is no process group, or this process is not in it.
    """

    Config = ContextCacheConfig

    def __init__(
        self,
        config: ContextCacheConfig,
        shape: CacheShape,
        group: dist.ProcessGroup | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        self.config, self.shape, self.ledger = config, shape, Ledger() if ledger is None else ledger
        self._links = Collectives(group, self.ledger, config.deadline_s)
        self.rank, self.size = self._links.rank, self._links.size
        self.turn: Turn | None = None
        self.transport: Transport = "pass_kv"
        self._open = False  # whether the model has yet to read the turn
        self._owners = [np.zeros(0, np.int32) for _ in range(shape.sequences)]  # rank of each token
        self._room = 0  # allocated rows of a sequence
        self._layers = [self._empty(0) for _ in range(shape.layers)]  # [sequences, room, 2 * kv_heads, head_dim]

    @property
    def lengths(self) -> list[int]:
        """Number of tokens of each sequence, on all ranks together."""
        return [len(owners) for owners in self._owners]

    @property
    def held(self) -> list[list[int]]:
        """Number of tokens whose keys and values each rank holds, ``[ranks][sequences]``."""
        counts = [np.bincount(owners, minlength=self.size).tolist() for owners in self._owners]
        return [[of_sequence[rank] for of_sequence in counts] for rank in range(self.size)]

    def shard(self, tokens: Tensor, offsets: Tensor) -> Tensor:
        """Begin a turn, and return this rank's part of the new tokens.

        Args:
            tokens: New tokens of all sequences one after another, ``int64 [T]``.
            offsets: Offsets at which the sequences' tokens begin, followed by ``T``, ``int64 [B + 1]``; a sequence may
                add none.

        Returns:
            Tokens of this rank, ``int64 [T_local]``; may be empty.

        Raises:
            DataError: If the number of sequences is not the cache's, a sequence would exceed the capacity, or there is
                no token.
            PlanError: If ranks were given different tokens, or hold different sequences.
        """
        added = [b - a for a, b in pairwise(offsets.tolist())]
        if len(added) != self.shape.sequences or sum(added) != len(tokens):
            raise DataError(
                f"{len(tokens)} tokens of {len(added)} sequences, offsets end at {sum(added)}, the cache has "
                f"{self.shape.sequences} sequences",
                where="ContextCache",
            )
        if not len(tokens):
            raise DataError("there is no new token", where="ContextCache")
        for sequence, (old, new) in enumerate(zip(self.lengths, added, strict=True)):
            if old + new > self.shape.capacity:
                raise DataError(
                    f"sequence {sequence} would hold {old + new} tokens, there is room for {self.shape.capacity}",
                    where="ContextCache",
                    remedy="make the cache with a greater capacity, or add fewer tokens",
                )
        turn = next_turn(added, self.held)
        transport = self._choose(turn)
        told = f"{turn} {transport} {tokens.tolist()}"
        digest = torch.tensor([zlib.crc32(told.encode())], device=self.shape.device)
        # Send separate messages, so that every other rank can name a rank that does not respond.
        digests = self._links.all_to_all("turns", [digest] * self.size, _TURN)
        others = [rank for rank in range(self.size) if not torch.equal(digests[rank], digest)]
        if others:
            raise PlanError(
                f"rank {self.rank} and rank {others[0]} were given different tokens or hold different ones",
                where="turn",
                remedy="give every rank the same tokens and the same config",
            )
        self.turn, self.transport, self._open = turn, transport, True
        return tokens[torch.from_numpy(turn.plan.indices(self.rank)).to(tokens.device)]

    def extend(self, offsets: Tensor) -> _Reading:
        """Prepare for reading the turn that :meth:`shard` began with the same offsets; called by models.

        Raises:
            PlanError: If no turn was begun, or one with other offsets.
        """
        if self.turn is None or not self._open or self.turn.plan.offsets.tolist() != offsets.tolist():
            raise PlanError("no turn with these offsets was begun", where="offsets", remedy="call shard first")
        turn, sequences = self.turn, range(self.shape.sequences)
        self._make_room(max((turn.held[self.rank][b] + turn.added[self.rank][b] for b in sequences), default=0))
        return _Reading(self, turn)

    def gather_last(self, hidden: Tensor) -> Tensor:
        """Return the outputs ``[n, width]`` of the last tokens of the ``n`` sequences with new ones on every rank.

        Sequences are in their order. ``hidden [T_local, width]`` are the outputs for this rank's tokens of the latest
        turn.

        Raises:
            PlanError: If there was no turn, or the number of rows is not that of its tokens.
        """
        if self.turn is None or len(hidden) != self.turn.plan.tokens[self.rank]:
            raise PlanError(f"{len(hidden)} rows are not this turn's tokens", where="gather_last")
        lasts = [self.turn.last(rank) for rank in range(self.size)]
        longest = max(map(len, lasts))
        part = hidden.new_zeros(longest, *hidden.shape[1:])
        part[: len(lasts[self.rank])] = hidden[list(lasts[self.rank].values())]
        whole = self._links.all_gather("last rows", part)
        places = {b: rank * longest + row for rank, last in enumerate(lasts) for row, b in enumerate(last)}
        return whole[[places[sequence] for sequence in self.turn.active]]

    def of_first_rank(self, name: str, x: Tensor) -> Tensor:
        """Return the first rank's tensor ``x``, small and of one shape on all ranks, exchanged as ``name``."""
        return self._links.all_gather(name, x)[: len(x)]

    def truncate(self, lengths: Sequence[int]) -> None:
        """Keep the first tokens of every sequence, on every rank alike; 0 frees a sequence for another conversation.

        The ranks' numbers of tokens may then be less balanced until new tokens fill the gaps.

        Raises:
            DataError: If a sequence holds fewer tokens.
        """
        if len(lengths) != len(self._owners) or any(
            not 0 <= new <= old for new, old in zip(lengths, self.lengths, strict=False)
        ):
            raise DataError(f"cannot cut sequences of {self.lengths} tokens to {list(lengths)}", where="ContextCache")
        # a rank's rows of a sequence are in order of position, so the first ones are kept
        self._owners = [owners[:length] for owners, length in zip(self._owners, lengths, strict=True)]
        self._open = False

    def _choose(self, turn: Turn) -> Transport:
        if self.config.transport != "auto":
            return self.config.transport
        size, wide = self.shape.dtype.itemsize, torch.promote_types(self.shape.dtype, torch.float32).itemsize
        heads = AttentionShape(self.shape.heads, self.shape.kv_heads, self.shape.head_dim, size, wide)
        return self.config.cost.choose(heads, turn.plan.lengths, turn.cached, self.size)

    def _empty(self, room: int) -> Tensor:
        shape = (self.shape.sequences, room, 2 * self.shape.kv_heads, self.shape.head_dim)
        # zeros, because kernels take a slower path if any value is not finite
        return torch.zeros(shape, dtype=self.shape.dtype, device=self.shape.device)

    def _make_room(self, rows: int) -> None:
        if rows <= self._room:
            return
        room = min(max(rows, 2 * self._room), self.shape.capacity)
        for layer, old in enumerate(self._layers):
            self._layers[layer] = self._empty(room)
            self._layers[layer][:, : self._room] = old
        self._room = room


class _Reading:
    """Reading of one turn by the model's layers; the cache does not change before :meth:`commit`."""

    def __init__(self, cache: ContextCache, turn: Turn) -> None:
        self._cache, self._turn, self._links = cache, turn, cache._links
        rank, size, device = cache.rank, cache.size, cache.shape.device
        documents = turn.plan.documents(rank)
        counts = turn.added[rank]
        within = np.concatenate([np.zeros(0, np.int64), *(np.arange(count) for count in counts)])
        self._sequence = torch.from_numpy(documents).to(device)  # [T_local], like the next two
        self._row = torch.from_numpy(within + np.array(turn.held[rank], np.int64)[documents]).to(device)
        self.positions = torch.from_numpy(turn.positions(rank)).to(device)
        in_place = [b * cache._room for b in range(cache.shape.sequences)]
        if cache.transport == "pass_kv":
            starts = [in_place if source == rank else turn.packed(source) for source in range(size)]
            self._blocks = [turn.blocks(rank, source, starts[source]) for source in range(size)]
        else:
            self._blocks = [turn.blocks(source, rank, in_place) for source in range(size)]

    def core(self, layer: int) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
        """Return the function that replaces the attention core of a layer."""
        stored = self._cache._layers[layer]

        def attend(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor) -> Tensor:
            stored[self._sequence, self._row] = torch.cat([k, v], 1)
            ring = self._pass_kv if self._cache.transport == "pass_kv" else self._pass_q
            return ring(q, stored).to(q.dtype)

        return attend

    def few_rows(self) -> None:
        """Return None: keys and values of other ranks pass by in each layer."""

    def commit(self) -> None:
        """Add the new tokens to their sequences."""
        cache, plan = self._cache, self._turn.plan
        owners = np.empty(sum(plan.lengths), np.int32)
        for rank in range(plan.size):
            owners[plan.indices(rank)] = rank
        new = [owners[first:last] for first, last in pairwise(plan.offsets.tolist())]
        cache._owners = [np.concatenate(pair) for pair in zip(cache._owners, new, strict=True)]
        cache._open = False

    def _pass_kv(self, q: Tensor, stored: Tensor) -> Tensor:
        """Attend while the keys and values of all ranks pass by (algorithm 2)."""
        turn, rank, size = self._turn, self._cache.rank, self._cache.size
        here = stored.flatten(0, 1)
        counts = [turn.held[rank][b] + turn.added[rank][b] for b in turn.active]
        held = here
        if size > 1:
            held = torch.cat([stored[b, :count] for b, count in zip(turn.active, counts, strict=True)])
        pieces = []
        for step in range(size):
            source, following = (rank - step) % size, (rank - step - 1) % size
            arriving = None
            if step + 1 < size:
                arriving = self._links.pass_on("keys and values", held, turn.rows(following), 2 * step)
            pieces.append(self._piece(q, held if step else here, source))
            if arriving is not None:
                held = arriving.wait()
        return merge(pieces)[0]

    def _pass_q(self, q: Tensor, stored: Tensor) -> Tensor:
        """Attend while the queries of all ranks pass by, and return partial outputs to their ranks (algorithm 3)."""
        turn, rank, size = self._turn, self._cache.rank, self._cache.size
        here = stored.flatten(0, 1)
        held = q
        pieces: dict[int, tuple[Tensor, Tensor]] = {}
        for step in range(size):
            source, following = (rank - step) % size, (rank - step - 1) % size
            arriving = None
            if step + 1 < size:
                arriving = self._links.pass_on("queries", held, turn.plan.tokens[following], 2 * step)
            pieces[source] = self._piece(held, here, source)
            if arriving is not None:
                held = arriving.wait()
        in_order = [pieces[source] for source in range(size)]
        parts = [torch.cat([_bytes(out), _bytes(lse[..., None])], -1) for out, lse in in_order]
        home = self._links.all_to_all("partial outputs", parts, _HOME)
        width = q.shape[-1] * q.element_size()
        wide = pieces[rank][1].dtype
        return merge([(_numbers(x[..., :width], q.dtype), _numbers(x[..., width:], wide)[..., 0]) for x in home])[0]

    def _piece(self, q: Tensor, held: Tensor, other: int) -> tuple[Tensor, Tensor]:
        keys, values = held.chunk(2, 1)
        return partial_attention(q, keys, values, self._blocks[other], backend=self._cache.config.backend)


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def _numbers(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.contiguous().view(dtype)
