"""Set-associative cache of float32 rows, with the exact count of its cost.

A row belongs to one set of 32 lines, chosen by a hash of its number; any line of the set may hold it. When a batch's
update brings a row that is in no line, ``lru`` gives it the line whose row has not been updated for the longest time,
and ``lfu`` the line whose row fewest updates have used, if the newcomer has been used by more. Rows of the same
batch never displace each other: one that finds its set full of them stays outside.

Source: Yang et al. 2020 (arXiv 2010.11305); 32 ways as in FBGEMM's cache. That only updates admit rows is our choice:
evaluation reads through the cache and leaves it unchanged.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn

from cordillera.errors import CheckpointError
from cordillera.kernels.embeddings.cached_rows import EMPTY, EVENTS, WAYS

CachePolicy = Literal["lru", "lfu"]

_AGE_EVERY = 1024  # updates between halvings of lfu counts, so that formerly popular rows are evicted


class RowCache(nn.Module):
    """Lines of a cache with their tags and counters; a checkpoint keeps all of them.

    Attributes:
        lines: ``float32 [slots, D]``.
        tags: Row that a line holds, -1 for none, ``int32 [slots]``.
        ranks: Last update of a line (``lru``), or number of updates that used its row, at most 255 (``lfu``),
            ``int32 [slots]``.
        states: 1 where a line differs from its encoded row, ``uint8 [slots]``.
        counts: Number of updates that used each row outside the cache, at most 255, ``uint8 [rows]`` (empty for
            ``lru``).
        events: Sums of :meth:`statistics`, ``int64 [5]``.

    Args:
        share: Number of lines as a share of the rows; rounded up to whole sets. 0 for no cache.

    Raises:
        CheckpointError: a loaded state is one that no cache of these rows can be in.
    """

    lines: Tensor
    tags: Tensor
    ranks: Tensor
    states: Tensor
    counts: Tensor
    events: Tensor

    def __init__(self, rows: int, dim: int, share: float, policy: CachePolicy) -> None:
        super().__init__()
        slots = math.ceil(math.ceil(share * rows) / WAYS) * WAYS
        self.policy, self.rows = policy, rows
        self.register_buffer("lines", torch.zeros(slots, dim))
        self.register_buffer("tags", torch.full((slots,), EMPTY, dtype=torch.int32))
        self.register_buffer("ranks", torch.zeros(slots, dtype=torch.int32))
        self.register_buffer("states", torch.zeros(slots, dtype=torch.uint8))
        counted = rows if policy == "lfu" and slots else 0
        self.register_buffer("counts", torch.zeros(counted, dtype=torch.uint8))
        self.register_buffer("events", torch.zeros(len(EVENTS), dtype=torch.int64))

    def _load_from_state_dict(self, *arguments: Any) -> None:
        super()._load_from_state_dict(*arguments)
        held = self.tags[self.tags != EMPTY]
        # Kernels write to the rows that tags name, so wrong tags would corrupt memory.
        if held.numel() and not 0 <= int(held.min()) <= int(held.max()) < self.rows:
            what = f"a line holds row {int(held.min() if held.min() < 0 else held.max())} of {self.rows}"
        elif held.unique().numel() < held.numel():
            what = "two lines hold one row"
        elif bool((self.states > 1).any()):
            what = f"a line is in state {int(self.states.max())}"
        else:
            return
        raise CheckpointError(f"{what}, which no cache is in", where="tables.cache", remedy="resume from another step")

    @property
    def slots(self) -> int:
        """Number of lines."""
        return self.tags.numel()

    def age(self, step: int) -> None:
        """Halve the counts of ``lfu`` every 1024 updates, by the number of the last update."""
        if self.policy == "lfu" and self.slots and step % _AGE_EVERY == 0:
            self.ranks.bitwise_right_shift_(1)
            self.counts.bitwise_right_shift_(1)

    def statistics(self) -> dict[str, int]:
        """Return counts over the distinct rows of all updates so far.

        ``hits``: rows that were in a line. ``admissions``: rows that were given one. ``evictions``: rows that lost
        theirs to these. ``write_backs``: evicted rows that had changed and were encoded. ``spills``: rows that were
        updated outside the cache.
        """
        return dict(zip(EVENTS, self.events.tolist(), strict=True))

    def memory_bytes(self) -> dict[str, int]:
        """Return the bytes of ``lines``, ``tags``, ``ranks``, ``states``, ``counts`` and ``events``."""
        return {name: buffer.numel() * buffer.element_size() for name, buffer in self.named_buffers()}
