"""Checkpoints of a ranking model in several processes: each writes its parts of the tables, and rank 0 all else.

The form of the files is in :mod:`cordillera.training.checkpoints`. Parts are written from the tables themselves,
without a copy of them, so training waits. Only the first copy of a part is written.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cordillera.data.sealed import SealedFolder
from cordillera.distributed.collectives import Collectives
from cordillera.distributed.tensor_parts import part_file
from cordillera.embeddings.tables import EmbeddingTables
from cordillera.errors import CordilleraError
from cordillera.models.ranking.base import RankingModel
from cordillera.training.checkpoints import STATE, TABLES, TENSORS, Checkpoint, folder_of, load, not_finite
from cordillera.training.optimizers import embedding_tables
from cordillera.training.sharded_checkpoints import PartToWrite, RankCheckpoints, WritingRanks


class TableCheckpoints(RankCheckpoints):
    """The checkpoints of one training of a ranking model over several ranks.

    Args:
        folder: Folder of the checkpoints, the same for all ranks.
        links: The ranks.
    """

    def __init__(self, folder: Path, links: Collectives) -> None:
        def exchange(numbers: Any) -> Tensor:
            return links.all_gather("checkpoint", torch.tensor(numbers, dtype=torch.float64)).view(links.size, -1)

        super().__init__(folder, WritingRanks(links.rank, links.size, links.deadline_s, exchange), asynchronous=False)

    def save(
        self,
        model: RankingModel,
        tensors: dict[str, Tensor],
        state: dict[str, Any],
        refuse: Callable[[str], CordilleraError],
    ) -> None:
        """Write a checkpoint; all ranks call it together.

        Args:
            model: Model whose tables are written.
            tensors: All other tensors by name, equal on every rank.
            state: Plain JSON values, equal on every rank; ``state["step"]`` names the checkpoint.
            refuse: Function that makes the error for a weight or moment that is NaN or infinite, from its description.

        Raises:
            CordilleraError: From ``refuse``; then nothing is written.
            RunError: If the disk is full or read-only. Earlier checkpoints are intact.
        """
        parts = []
        if self.ranks.rank == 0:
            for name, tensor in tensors.items():
                parts.append(PartToWrite(TENSORS, name, (0,) * tensor.dim(), tensor.detach()))
        file, turns = part_file(TABLES, self.ranks.rank), Counter[str]()
        found = None
        for name, tables in embedding_tables(model).items():
            for box in tables.boxes():
                key = f"model.{name}.{box.name}"
                found = found or not_finite({key: box.values})
                if box.is_first:
                    turns[key] += 1
                    own = file if turns[key] == 1 else file.replace(".", f"-{turns[key]}.")
                    parts.append(PartToWrite(own, key, box.offsets, box.values))
        self.agree(None if found is None else refuse(found))
        self.begin(int(state["step"]), parts, {STATE: json.dumps(state, allow_nan=False)})

    def load(self, step: int | None = None) -> Checkpoint | None:
        """Read a checkpoint, after the ranks have verified every byte of it together; None if there is none.

        Args:
            step: Step of the checkpoint, equal on every rank. Default: the newest step.

        Raises:
            CheckpointError: If a file is missing or differs from its checksum; the message names it.
        """
        chosen = self.newest() if step is None else step
        if chosen is None:
            return None

        def verify(folder: SealedFolder) -> None:
            self.verify_share(folder, folder.sizes)

        return self.together(lambda: load(folder_of(self.folder, chosen), verify))


def state_without_rows(model: RankingModel) -> dict[str, Tensor]:
    """Return the state dict of a model without the rows of its tables and their moments."""
    found: dict[str, Tensor] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        prefix = f"{name}." if name else ""
        if isinstance(module, EmbeddingTables):
            found[f"{prefix}_extra_state"] = module.get_extra_state()
        else:
            module._save_to_state_dict(found, prefix, False)
    return found
