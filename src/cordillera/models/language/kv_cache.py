"""Keys and values of sequences during generation, so that each token is computed once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from cordillera.errors import DataError
from cordillera.kernels.attention.decoding import MOST_TOKENS, decode_attention, is_supported
from cordillera.kernels.attention.documents import continued_attention
from cordillera.kernels.dense.decoder_rows import PagedRows
from cordillera.models.language.llama import Core, LlamaConfig

PAGE = 16
"""Tokens of a page."""


class KVCache:
    """Cache for ``B`` sequences of up to ``capacity`` tokens each, whose memory is allocated at once.

    Sequences hold pages of 16 tokens, which they take when they grow and give back when they are cleared. Several may
    hold a page; one that writes into it then takes a copy. Where torch computes attention (on GPUs, in other dtypes
    than bfloat16 and float32, for widths of heads that are no multiples of 32), a page is as long as a sequence can be.
    One call of the model with the cache adds any number of tokens to each sequence: the whole prompt, one token, a few
    drafted ones, or none (an empty document).

    Args:
        room: Number of tokens for which there is memory, rounded up to pages of each sequence; None for ``B`` times the
            capacity.

    Attributes:
        lengths: Number of tokens in each sequence.
    """

    def __init__(
        self,
        config: LlamaConfig,
        sequences: int,
        capacity: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        room: int | None = None,
    ) -> None:
        self.capacity = capacity
        self.lengths = [0] * sequences
        self.decodes = is_supported(dtype, torch.device(device), config.head_width)
        self.page = PAGE if self.decodes else max(1, capacity)
        pages = sequences * self.pages_for(capacity)
        if room is not None:
            pages = min(pages, self.pages_for(room))
        self._free = list(range(pages))[::-1]
        self._holders = [0] * pages
        self.tables: list[list[int]] = [[] for _ in range(sequences)]
        shape = (config.layers, 2, pages, config.kv_heads, self.page, config.head_width)
        self.data = torch.empty(shape, dtype=dtype, device=device)

    def pages_for(self, tokens: int) -> int:
        """Return the number of pages that ``tokens`` tokens of a sequence take."""
        return -(-tokens // self.page)

    @property
    def free_pages(self) -> int:
        """Number of pages that nothing holds."""
        return len(self._free)

    def read(self, layer: int, sequence: int) -> tuple[Tensor, Tensor]:
        """Return a copy of the keys and values of a sequence in a layer, each ``[kv_heads, length, D]``."""
        found = self.data[layer][:, self.tables[sequence]]  # [2, pages, G, page, D]
        keys, values = found.transpose(1, 2).flatten(2, 3)[:, :, : self.lengths[sequence]]
        return keys, values

    def clear(self, sequence: int) -> None:
        """Empty a sequence and give its pages back."""
        self.lengths[sequence] = 0
        self.release(self.tables[sequence])
        self.tables[sequence] = []

    def hold(self, pages: Sequence[int]) -> None:
        """Keep pages of a sequence as they are, until they are released as often as they were held."""
        for page in pages:
            self._holders[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Give up pages; those that nothing else holds are free."""
        for page in reversed(pages):
            self._holders[page] -= 1
            if not self._holders[page]:
                self._free.append(page)

    def share(self, sequence: int, pages: Sequence[int], length: int) -> None:
        """Let an empty sequence begin with the ``length`` tokens that pages hold."""
        self.hold(pages)
        self.tables[sequence], self.lengths[sequence] = list(pages), length

    def unload(self, sequence: int) -> tuple[Tensor, int]:
        """Empty a sequence; return its keys and values and its length, for :meth:`load`."""
        length = self.lengths[sequence]
        content = self.data[:, :, self.tables[sequence][: self.pages_for(length)]]
        self.clear(sequence)
        return content, length

    def load(self, sequence: int, content: Tensor, length: int) -> None:
        """Give an empty sequence ``content`` and ``length`` of one that was unloaded, in pages that are free."""
        self.tables[sequence] = [self._take() for _ in range(content.shape[2])]
        self.data[:, :, self.tables[sequence]] = content
        self.lengths[sequence] = length

    def _take(self) -> int:
        page = self._free.pop()
        self._holders[page] = 1
        return page

    def pages_needed(self, sequence: int, tokens: int) -> int:
        """Return the number of free pages that a sequence needs to grow by ``tokens`` tokens."""
        own, length = self.tables[sequence], self.lengths[sequence]
        return max(0, self.pages_for(length + tokens) - len(own)) + self._writes_to_shared(sequence, tokens)

    def _writes_to_shared(self, sequence: int, tokens: int) -> bool:
        """Whether new tokens begin in a page that something else holds too."""
        own, begun = self.tables[sequence], self.lengths[sequence] // self.page
        return tokens > 0 and begun < len(own) and self._holders[own[begun]] > 1

    def extend(self, offsets: Tensor, parents: Sequence[Sequence[int]] | None = None) -> Extension:
        """Prepare for adding document ``b`` of a row of tokens to sequence ``b``.

        Args:
            offsets: Offsets at which documents begin, followed by ``T``, ``int64 [B + 1]``.
            parents: For each new token of each document the place, among them, of the one that it follows, which comes
                earlier; -1 for the last token of the cached sequence. A token sees the cached sequence, its ancestors
                and itself. None where each token follows the one before it.

        Raises:
            DataError: If the number of documents is not that of sequences, a parent does not come before its child, a
                sequence would exceed the capacity, or there are not enough free pages.
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
        active = [sequence for sequence, new in enumerate(added) if new]
        needed = [self.pages_needed(sequence, added[sequence]) for sequence in active]
        if sum(needed) > len(self._free):
            raise DataError(
                f"{sum(needed)} more pages are needed, {len(self._free)} are free",
                where="KVCache",
                remedy="make the cache with more room, or clear a sequence",
            )
        if parents is not None and (
            [len(one) for one in parents] != added
            or any(not -1 <= parent < place for one in parents for place, parent in enumerate(one))
        ):
            raise DataError("each new token needs a parent before it", where="KVCache", remedy="order trees by depth")
        for sequence in active:
            table = self.tables[sequence]
            if self._writes_to_shared(sequence, added[sequence]):
                begun = self.lengths[sequence] // self.page
                copy = self._take()
                self.data[:, :, copy] = self.data[:, :, table[begun]]
                self.release([table[begun]])
                table[begun] = copy
            table += [self._take() for _ in range(self.pages_for(totals[sequence]) - len(table))]
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
        moved = [
            (table, start + place, start + number)
            for table, start, kept in zip(self.tables, lengths, chosen, strict=True)
            for number, place in enumerate(kept)
            if place != number
        ]
        if moved:
            found = [
                torch.tensor([(table[move[n] // self.page], move[n] % self.page) for table, *move in moved])
                for n in (0, 1)
            ]
            (pages, slots), (new_pages, new_slots) = (one.to(self.data.device).unbind(1) for one in found)
            self.data[:, :, new_pages, :, new_slots] = self.data[:, :, pages, :, slots]
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
        device = cache.data.device
        active = [(b, last - first) for b, (first, last) in enumerate(pairwise(bounds)) if last > first]
        positions = list[int]()
        for b, new in active:
            old = cache.lengths[b]
            positions += range(old, old + new) if parents is None else [old + depth for depth in _depths(parents[b])]
        self.positions = torch.tensor(positions, dtype=torch.int64, device=device)
        # A few tokens of a sequence go to the kernel for them, others to torch.
        may_decode = cache.decodes and not torch.is_grad_enabled()
        few = {b: new for b, new in active if new <= MOST_TOKENS and may_decode}
        self._few = torch.tensor([(bounds[b], new, cache.lengths[b]) for b, new in few.items()], dtype=torch.int64)
        seen = np.zeros((bounds[-1], max(few.values(), default=0)), np.bool_)
        tables = np.zeros((len(few), max((len(cache.tables[b]) for b in few), default=0)), np.int64)
        for number, (b, new) in enumerate(few.items()):
            seen[bounds[b] : bounds[b + 1], :new] = _seen(new, None if parents is None else parents[b])
            tables[number, : len(cache.tables[b])] = cache.tables[b]
        self._seen, self._tables = torch.from_numpy(seen), torch.from_numpy(tables)
        heads, page = cache.data.shape[3], cache.page
        self._runs: list[tuple[slice, int, int, Tensor, slice | None, Tensor | None, Tensor]] = []
        for first, count, start, new, total in _runs(bounds, totals) if len(few) < len(active) else ():
            if first not in few:
                trees, held = None, slice(first, first + count)
                if parents is not None:
                    trees = torch.from_numpy(np.stack([_seen(new, one) for one in parents[held]])).to(device)
                pages = torch.tensor([table[: cache.pages_for(total)] for table in cache.tables[held]], device=device)
                places = torch.arange(total - new, total, device=device)
                # Row of each head of each token, in a layer's keys or values seen as a table.
                rows = pages[:, places // page, None] * heads + torch.arange(heads, device=device)
                slots = (rows * page + (places % page)[:, None]).flatten()
                new_rows = slice(start, start + count * new)
                self._runs.append((new_rows, new, total, pages, _block(pages), trees, slots))

    def core(self, layer: int) -> Core:
        """Return a layer's attention core that stores the new keys and values, and attends to all of the sequences."""
        keys, values = self._cache.data[layer, 0], self._cache.data[layer, 1]

        def attend(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor) -> Tensor:
            if len(self._few):
                out = decode_attention(q, k, v, keys, values, self._few, self._tables, self._seen)
            else:
                out = torch.empty_like(q, memory_format=torch.contiguous_format)
            for rows, new, total, pages, block, seen, slots in self._runs:
                own_q, *own = (part[rows].unflatten(0, (-1, new)) for part in (q, k, v))  # [sequences, new, heads, D]
                held = []
                for store, part in zip((keys, values), own, strict=True):
                    store.view(-1, store.shape[-1]).index_copy_(0, slots, part.detach().reshape(-1, store.shape[-1]))
                    if new == total:
                        held.append(part.transpose(1, 2))
                    elif block is not None:
                        held.append(store[block, :, :total])
                    else:
                        held.append(store[pages].transpose(1, 2).flatten(2, 3)[:, :, :total])
                out[rows] = continued_attention(own_q, held[0], held[1], seen).flatten(0, 1)
            return out

        return attend

    def few_rows(self) -> PagedRows | None:
        """Return what the tokens are added to in one call for all layers; None unless each sequence gets a few."""
        if self._runs or not len(self._few):
            return None
        return PagedRows(self._cache.data, self._few, self._tables, self._seen)

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


def _block(pages: Tensor) -> slice | None:
    """The pages of sequences that have one each, if they are neighbours, as a slice."""
    first, count = int(pages[0, 0]), len(pages)
    return (
        slice(first, first + count)
        if pages[:, 0].tolist() == list(range(first, first + count)) and pages.shape[1] == 1
        else None
    )


def _depths(parents: Sequence[int]) -> list[int]:
    """Number of ancestors among the new tokens of each of them."""
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return depths


def _seen(count: int, parents: Sequence[int] | None) -> np.ndarray:
    """Which new tokens each of them sees, ``bool [count, count]``: itself and its ancestors."""
    if parents is None:
        return np.tri(count, dtype=np.bool_)
    seen = np.eye(count, dtype=np.bool_)
    for place, parent in enumerate(parents):
        if parent >= 0:
            seen[place] |= seen[parent]
    return seen
