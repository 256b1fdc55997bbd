"""Keys and values of sequences during generation, so that each token is computed once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from cordillera.errors import DataError
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

    def extend(self, offsets: Tensor) -> Extension:
        """Prepare for adding document ``b`` of a row of tokens to sequence ``b``.

        Documents begin at ``offsets``, followed by ``T``, ``int64 [B + 1]``.

        Raises:
            DataError: If the number of documents is not that of sequences, or a sequence would exceed the capacity.
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
        return Extension(self, bounds, totals)

    def truncate(self, lengths: Sequence[int]) -> None:
        """Keep the first ``lengths`` tokens of each sequence, and drop ends such as rejected draft tokens.

        Raises:
            DataError: If a sequence holds fewer tokens.
        """
        if len(lengths) != len(self.lengths) or any(
            not 0 <= new <= old for new, old in zip(lengths, self.lengths, strict=False)
        ):
            raise DataError(f"cannot cut sequences of {self.lengths} tokens to {list(lengths)}", where="KVCache")
        self.lengths = list(lengths)


class Extension:
    """One addition to a cache: layers store and attend through :meth:`core`, and :meth:`commit` makes it permanent.

    Until then the cache does not change, so a call that fails can be repeated.

    Attributes:
        positions: Position of each new token in its sequence, ``int64 [T]``.
    """

    def __init__(self, cache: KVCache, bounds: list[int], totals: list[int]) -> None:
        self._cache, self._totals = cache, totals
        self._runs = list(_runs(bounds, totals))
        device = cache.keys[0].device
        added = torch.tensor([b - a for a, b in pairwise(bounds)], dtype=torch.int64)
        starts = torch.tensor(bounds[:-1], dtype=torch.int64)
        shift = torch.tensor(cache.lengths, dtype=torch.int64) - starts  # from the index in the row to the position
        self._sequence = torch.arange(len(totals)).repeat_interleave(added).to(device)  # [T]
        self.positions = (torch.arange(bounds[-1]) + shift.repeat_interleave(added)).to(device)

    def core(self, layer: int) -> Core:
        """Return a layer's attention core that stores the new keys and values, and attends to all of the sequences."""
        keys, values = self._cache.keys[layer], self._cache.values[layer]

        def attend(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor) -> Tensor:
            keys[self._sequence, :, self.positions] = k
            values[self._sequence, :, self.positions] = v
            parts = []
            for first, count, start, added, total in self._runs:
                rows = q[start : start + count * added].unflatten(0, (count, added))  # [count, added, H, D]
                held = slice(first, first + count)
                parts.append(continued_attention(rows, keys[held, :, :total], values[held, :, :total]).flatten(0, 1))
            return torch.cat(parts) if parts else torch.zeros_like(q)

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
