"""Keys and values of sequences during generation, so that each token is computed once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from cordillera.errors import DataError
from cordillera.kernels.attention.decoding import decode_attention, is_supported
from cordillera.kernels.attention.documents import continued_attention
from cordillera.models.language.llama import Core, LlamaConfig


class KVCache:
    """Cache for ``B`` sequences of up to ``capacity`` tokens, allocated at once; sequences may differ in length.

    One call of the model with the cache adds any number of tokens to each sequence: the whole prompt, one token, a few
    drafted ones, or none (an empty document).

    Attributes:
        lengths: Number of tokens in each sequence.
        keys: Keys of each layer, ``[B, kv_heads, capacity, D]``.
    """

    def __init__(
        self,
        config: LlamaConfig,
        sequences: int,
        capacity: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        shape = (sequences, config.kv_heads, capacity, config.head_width)
        self.capacity = capacity
        self.lengths = [0] * sequences
        self.keys = [torch.empty(shape, dtype=dtype, device=device) for _ in range(config.layers)]
        self.values = [torch.empty(shape, dtype=dtype, device=device) for _ in range(config.layers)]

    def extend(self, offsets: Tensor, parents: Sequence[Sequence[int]] | None = None) -> Extension:
        """Prepare for adding document ``b`` of a row of tokens to sequence ``b``.

        Args:
            offsets: Offsets at which documents begin, followed by ``T``, ``int64 [B + 1]``.
            parents: For each new token of each document the place, among them, of the one that it follows, which comes
                earlier; -1 for the last token of the cached sequence. A token sees the cached sequence, its ancestors
                and itself. None where each token follows the one before it.

        Raises:
            DataError: If the number of documents is not that of sequences, a parent does not come before its child, or
                a sequence would exceed the capacity.
        """
        bounds = offsets.tolist()
        added = [b - a for a, b in pairwise(bounds)]
        if len(added) != len(self.lengths):
            raise DataError(f"{len(added)} documents for {len(self.lengths)} cached sequences", where="KVCache")
        totals = [old + new for old, new in zip(self.lengths, added, strict=True)]
        if totals and max(totals) > self.capacity:
            worst = totals.index(max(totals))
            raise DataError(
                f"sequence {worst} would hold {totals[worst]} tokens, there is room for {self.capacity}",
                where="KVCache",
                remedy="make the cache with a greater capacity, or generate fewer tokens",
            )
        if parents is not None and (
            [len(one) for one in parents] != added
            or any(not -1 <= parent < place for one in parents for place, parent in enumerate(one))
        ):
            raise DataError("each new token needs a parent before it", where="KVCache", remedy="order trees by depth")
        return Extension(self, bounds, totals, parents)

    def branching(self, parents: Sequence[Sequence[int]]) -> Branching:
        """Return this cache as the model takes it for one call whose tokens have ``parents``, as in :meth:`extend`."""
        return Branching(self, parents)

    def keep(self, lengths: Sequence[int], places: Sequence[Sequence[int]] | None = None) -> None:
        """Keep the first ``lengths`` tokens of each sequence, and of those after them the ones at ``places``.

        Places count from the first token that is not kept, and increase; None for none. What is kept moves together:
        the tokens must follow each other, as a path of a tree does.

        Raises:
            DataError: If a sequence holds fewer tokens.
        """
        chosen = [list(one) for one in places] if places is not None else [[] for _ in lengths]
        if len(lengths) != len(self.lengths) or len(chosen) != len(lengths):
            raise DataError(f"cannot cut {len(self.lengths)} sequences to {len(lengths)}", where="KVCache")
        for new, old, kept in zip(lengths, self.lengths, chosen, strict=True):
            if not 0 <= new <= old or kept != sorted(set(kept)) or any(not 0 <= place < old - new for place in kept):
                raise DataError(
                    f"cannot cut sequences of {self.lengths} tokens to {list(lengths)} and {chosen}", where="KVCache"
                )
        for sequence, (start, kept) in enumerate(zip(lengths, chosen, strict=True)):
            if kept != list(range(len(kept))):
                found = torch.tensor(kept, device=self.keys[0].device) + start
                for part in (*self.keys, *self.values):
                    part[sequence, :, start : start + len(kept)] = part[sequence, :, found]
        self.lengths = [start + len(kept) for start, kept in zip(lengths, chosen, strict=True)]


class Branching:
    """A cache whose next tokens form trees; see :meth:`KVCache.branching`."""

    def __init__(self, cache: KVCache, parents: Sequence[Sequence[int]]) -> None:
        self._cache, self._parents = cache, parents

    def extend(self, offsets: Tensor) -> Extension:
        """Prepare for adding the trees, as :meth:`KVCache.extend` does."""
        return self._cache.extend(offsets, self._parents)


class Extension:
    """One addition to a cache: layers store and attend through :meth:`core`, and :meth:`commit` makes it permanent.

    Until then the cache does not change, so a call that fails can be repeated.

    Attributes:
        positions: Position of each new token in its sequence, ``int64 [T]``.
    """

    def __init__(
        self, cache: KVCache, bounds: list[int], totals: list[int], parents: Sequence[Sequence[int]] | None
    ) -> None:
        self._cache, self._totals = cache, totals
        keys, lengths = cache.keys[0], cache.lengths
        added = [b - a for a, b in pairwise(bounds)]
        if parents is None:
            depths = [torch.arange(new) for new in added]
        else:
            depths = [torch.tensor(_depths(one), dtype=torch.int64) for one in parents]
        self.positions = torch.cat([old + depth for old, depth in zip(lengths, depths, strict=True)]).to(keys.device)
        # A few tokens go to the kernel for them, other sequences to torch.
        few = [new > 0 and is_supported(keys, new) and not torch.is_grad_enabled() for new in added]
        self._few = torch.tensor([(b, bounds[b], added[b], lengths[b]) for b, own in enumerate(few) if own])
        self._seen = torch.zeros(bounds[-1], max((new for new, own in zip(added, few, strict=True) if own), default=0))
        self._seen = self._seen.bool()
        for b, own in enumerate(few):
            if own:
                self._seen[bounds[b] : bounds[b + 1], : added[b]] = _seen(
                    added[b], None if parents is None else parents[b]
                )
        self._runs: list[tuple[slice, slice, int, int, Tensor | None]] = []
        for first, count, start, new, total in _runs(bounds, totals):
            if not few[first]:
                trees = None
                if parents is not None:
                    trees = torch.stack([_seen(new, one) for one in parents[first : first + count]]).to(keys.device)
                self._runs.append((slice(first, first + count), slice(start, start + count * new), new, total, trees))

    def core(self, layer: int) -> Core:
        """Return a layer's attention core that stores the new keys and values, and attends to all of the sequences."""
        keys, values = self._cache.keys[layer], self._cache.values[layer]

        def attend(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor) -> Tensor:
            if len(self._few):
                out = decode_attention(q, k, v, keys, values, self._few, self._seen)
            else:
                out = torch.empty_like(q, memory_format=torch.contiguous_format)
            for held, rows, new, total, seen in self._runs:
                for store, part in ((keys, k), (values, v)):
                    store[held, :, total - new : total] = part[rows].unflatten(0, (-1, new)).transpose(1, 2)
                own = q[rows].unflatten(0, (-1, new))  # [sequences, new, H, D]
                out[rows] = continued_attention(own, keys[held, :, :total], values[held, :, :total], seen).flatten(0, 1)
            return out

        return attend

    def commit(self) -> None:
        """Add the new tokens to their sequences."""
        self._cache.lengths = self._totals


def _runs(bounds: list[int], totals: list[int]) -> Iterator[tuple[int, int, int, int, int]]:
    """Group neighbouring sequences that add and then hold the same numbers of tokens, so that one call serves them.

    A group is its first sequence, number of sequences, start in the row, and tokens that each adds, and holds.
    """
    first = 0
    for last in range(len(totals)):
        added = bounds[first + 1] - bounds[first]
        following = last + 1
        if following < len(totals) and (bounds[following + 1] - bounds[following], totals[following]) == (
            added,
            totals[first],
        ):
            continue
        if added:
            yield first, following - first, bounds[first], added, totals[first]
        first = following


def _depths(parents: Sequence[int]) -> list[int]:
    """Number of ancestors among the new tokens of each of them."""
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return depths


def _seen(count: int, parents: Sequence[int] | None) -> Tensor:
    """Which new tokens each of them sees, ``bool [count, count]``: itself and its ancestors."""
    if parents is None:
        return torch.ones(count, count, dtype=torch.bool).tril_()
    seen = np.eye(count, dtype=np.bool_)
    for place, parent in enumerate(parents):
        if parent >= 0:
            seen[place] |= seen[parent]
    return torch.from_numpy(seen)
