"""Changes of dynamic tables between two updates, in memory and in a file with a checksum."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from cordillera.errors import CheckpointError, NumericsError
from cordillera.tensor_files import read_tensors, write_tensors

_KIND = "changes of dynamic embedding tables"
_REMEDY = "write the changes again, or copy the whole state"


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

    @property
    def num_bytes(self) -> int:
        """Number of bytes of all tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())


def write_delta(path: Path | str, delta: TableDelta) -> None:
    """Write a ``delta`` to a file at ``path``, under a temporary name that is then changed.

    Raises:
        NumericsError: If the file cannot be written.
        RunError: If the disk is full or read-only.
    """
    content = {"base": delta.base, "version": delta.version, "identity": delta.identity}
    write_tensors(Path(path), _KIND, delta.tensors, content)


def read_delta(path: Path | str) -> TableDelta:
    """Read the delta in a file at ``path`` and verify its checksum.

    Raises:
        CheckpointError: If there is no such file, it holds something else, or it has changed since it was written.
    """
    try:
        tensors, content = read_tensors(Path(path), _KIND, _REMEDY)
        base, version, identity = content["base"], content["version"], content["identity"]
    except NumericsError as error:
        raise CheckpointError(error.what, where=error.where, remedy=error.remedy) from error
    except (KeyError, TypeError) as error:
        raise CheckpointError("names no versions", where=str(path), remedy=_REMEDY) from error
    return TableDelta(base, version, identity, tensors)
