"""Changes of a run with dynamic tables between two steps, in a file with which a copy of the run follows it.

The file holds the changed rows and the evicted ids of the tables
(:class:`~cordillera.embeddings.table_deltas.TableDelta`) and all other tensors of the later checkpoint, which are small
beside the tables. The checkpoint that is made of it is equal to the later checkpoint, bit for bit; otherwise none is
made.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cordillera.data.files import checksum
from cordillera.embeddings.dynamic_tables import DynamicTables
from cordillera.embeddings.table_deltas import TableDelta
from cordillera.errors import CheckpointError, NumericsError
from cordillera.tensor_files import read_tensors, write_tensors
from cordillera.training import checkpoints
from cordillera.training.checkpoints import TENSORS, Checkpoint

_KIND = "changes of a run"
_TABLES, _OTHERS = "tables.", "others."  # prefixes of the tensors in the file
_OWN = "model.tables."  # prefix of the tables' tensors in a checkpoint
_REMEDY = "make the file again with `cordillera delta make`"


def write_run_delta(path: Path | str, tables: DynamicTables, checkpoint: Checkpoint, since: int) -> TableDelta:
    """Write what changed after step ``since`` up to a ``checkpoint`` to a file at ``path``.

    Args:
        path: Path of the file.
        tables: Tables with the state of the checkpoint.
        checkpoint: Later checkpoint.
        since: Number of steps of the earlier one, which need not exist any more.

    Returns:
        The changes of the tables.

    Raises:
        CheckpointError: If nothing lies between the steps, evicted ids are not kept that long, or a step changed no
            rows, so that steps are not the updates of the tables.
        NumericsError: If the file cannot be written.
        RunError: If the disk is full or read-only.
    """
    if tables.step != checkpoint.step:
        raise CheckpointError(
            f"the tables were updated {tables.step:,} times in {checkpoint.step:,} steps",
            where=str(checkpoint.folder),
            remedy="copy the whole checkpoint",
        )
    if not 0 <= since < checkpoint.step:
        raise CheckpointError(
            f"changes lead from an earlier step to step {checkpoint.step:,}, not from step {since:,}",
            where=str(checkpoint.folder),
        )
    delta = tables.delta(since)
    tensors = {f"{_TABLES}{name}": tensor for name, tensor in delta.tensors.items()}
    for name, tensor in checkpoint.tensors.items():
        if not name.startswith(_OWN):
            tensors[f"{_OTHERS}{name}"] = tensor
    content = {
        "base": delta.base,
        "version": delta.version,
        "identity": delta.identity,
        "digest": checkpoints.digest(checkpoint.folder),
        "state": checkpoint.state,
    }
    write_tensors(Path(path), _KIND, tensors, content)
    return delta


class RunDelta:
    """The file of :func:`write_run_delta`, after its checksum was verified.

    Attributes:
        path: Path of the file.
        tables: Changes of the tables.
        state: State of the later checkpoint.

    Raises:
        CheckpointError: If there is no such file, it holds something else, or it has changed since it was written.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        try:
            tensors, content = read_tensors(self.path, _KIND, _REMEDY)
            self._digest, self.state = str(content["digest"]), dict[str, Any](content["state"])
            changed = {name.removeprefix(_TABLES): one for name, one in tensors.items() if name.startswith(_TABLES)}
            self.tables = TableDelta(int(content["base"]), int(content["version"]), content["identity"], changed)
        except NumericsError as error:
            raise CheckpointError(error.what, where=error.where, remedy=error.remedy) from error
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError("names no steps", where=str(path), remedy=_REMEDY) from error
        self._others = {name.removeprefix(_OTHERS): one for name, one in tensors.items() if name.startswith(_OTHERS)}

    def apply(self, tables: DynamicTables, folder: Path) -> Path:
        """Write the later checkpoint below ``folder``, the folder of all checkpoints, and return its path.

        Args:
            tables: Tables with the state of the earlier checkpoint, updated in place to the later one.
            folder: Folder of the checkpoints.

        Raises:
            CheckpointError: If the earlier checkpoint is not the base of the file; nothing is written.
            RunError: If the disk is full or read-only.
        """
        tables.apply_delta(self.tables)
        tensors = self._others | {f"{_OWN}{name}": tensor for name, tensor in tables.state_dict().items()}

        def compare(written: Path) -> tuple[str, ...]:
            if checksum(written / TENSORS) != self._digest:
                raise CheckpointError(
                    f"leads from another checkpoint of step {self.tables.base:,}; nothing was changed",
                    where=str(self.path),
                    remedy="apply the files of one run, in their order, to a copy of that run",
                )
            return ()

        return checkpoints.save(folder, tensors, self.state, compare)
