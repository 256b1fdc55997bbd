"""Keys and values of sequences under generation, so that each token is computed once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from cordillera.errors import DataError
from cordillera.kernels.attention.documents import continued_attention
from cordillera.models.language.llama import Core, LlamaConfig


class KVCache:
    """Room for ``B`` sequences of up to ``capacity`` tokens, taken at once; sequences may differ in length.

    One call of the model with the cache adds any number of tokens to each sequence: the whole prompt, one token, a
    few drafted ones, or none (an empty document).

    Args:
        config: The model's.
        sequences: ``B``.
        capacity: Tokens of the longest sequence.
        dtype: Of the model's activations.
        device: The model's.

    Attributes:
        lengths: Tokens in each sequence.
        keys: One ``[B, kv_heads, capacity, D]`` a layer.
        values: As ``keys``.
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

        Args:
            offsets: ``int64 [B + 1]``, where documents begin in the row, and ``T``.

        Raises:
            DataError: the number of documents is not that of sequences, or a sequence would pass the capacity.
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
        """Forget the ends of sequences, such as drafted tokens that were refused.

        Args:
            lengths: Tokens to keep of each sequence.

        Raises:
            DataError: a sequence does not hold as many.
        """
        if len(lengths) != len(self.lengths) or any(
            not 0 <= new <= old for new, old in zip(lengths, self.lengths, strict=False)
        ):
            raise DataError(f"cannot cut sequences of {self.lengths} tokens to {list(lengths)}", where="KVCache")
        self.lengths = list(lengths)


class Extension:
    """One addition to a cache: layers store and attend through :meth:`core`, and :meth:`commit` makes it count.

    Until then the cache is as it was, so a call that fails half-way can be repeated.

    Args:
        cache: What is added to.
        bounds: Where documents begin in the row of tokens, and ``T``.
        totals: Tokens of each sequence afterwards.

    Attributes:
        positions: ``int64 [T]``, of each new token in its sequence.
    """

    def __init__(self, cache: KVCache, bounds: list[int], totals: list[int]) -> None:
        self._cache, self._totals = cache, totals
        self._runs = list(_runs(bounds, totals))
        device = cache.keys[0].device
        added = torch.tensor([b - a for a, b in pairwise(bounds)], dtype=torch.int64)
        starts = torch.tensor(bounds[:-1], dtype=torch.int64)
        shift = torch.tensor(cache.lengths, dtype=torch.int64) - starts  # from the place in the row to the position
        self._sequence = torch.arange(len(totals)).repeat_interleave(added).to(device)  # [T]
        self.positions = (torch.arange(bounds[-1]) + shift.repeat_interleave(added)).to(device)

    def core(self, layer: int) -> Core:
        """What takes the place of a layer's attention core: it stores keys and values, then attends to all of them.

        Args:
            layer: Number of the layer.
        """
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
        """Count the new tokens as part of their sequences."""
        self._cache.lengths = self._totals


def _runs(bounds: list[int], totals: list[int]) -> Iterator[tuple[int, int, int, int, int]]:
    """Neighbouring sequences that add as many tokens and then hold as many, so that one call serves them.

    Yields:
        The first sequence, how many, where they start in the row, tokens that each adds, tokens that each holds.
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
