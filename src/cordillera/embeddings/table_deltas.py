"""Changes of dynamic tables between two updates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class TableDelta:
    """What changed in dynamic tables after one update, up to another.

    Attributes:
        base: Number of updates of the tables to which the changes apply.
        version: Number of updates of the tables after the changes.
        identity: What the tables must be: ``tables`` (names), ``embedding_dim``, ``optimizer`` and ``seed``.
        tensors: ``rows int64 [N]``, the changed rows, ascending, with ``row_ids int64 [N]``, ``row_tables int32 [N]``,
            ``row_marks int32 [N, 2]``, ``weight float32 [N, D]`` and the optimizer's state by name; ids without a row,
            ``candidate_ids`` and ``candidate_payloads int64 [C]``; evicted ids, ``removed_ids int64``,
            ``removed_tables int32``, ``removed_rows int64`` (-1 for ids that had none) and ``removed_stamps int64``,
            each ``[E]``; ``used int64 [1]``, the number of rows.
    """

    base: int
    version: int
    identity: dict[str, Any]
    tensors: dict[str, Tensor]
