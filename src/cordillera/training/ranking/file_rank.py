"""Training in one process of a ranking model whose tables lie in a file: rows are fetched ahead, and checkpointed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from cordillera.data.ranking.features import RankingBatch
from cordillera.embeddings.file_tables import FileTables
from cordillera.embeddings.row_file import ROW_FILES
from cordillera.errors import CordilleraError
from cordillera.models.ranking.base import RankingModel
from cordillera.training import checkpoints
from cordillera.training.ranking.ranks import OneRank
from cordillera.training.ranking.scoring import ROWS


class FileRank(OneRank):
    """A training in a single process with tables in a file.

    The rows of the next batch are read while the present one is computed. A checkpoint holds a copy of the file, which
    is made a part at a time.

    Args:
        tables: Tables of the model.
    """

    def __init__(self, tables: FileTables) -> None:
        self.tables = tables
        self._following: RankingBatch | None = None

    def shares(self, batches: Iterable[RankingBatch]) -> Iterator[tuple[RankingBatch, RankingBatch]]:
        """Iterate over batches, one behind what is read."""
        ahead = iter(batches)
        batch = next(ahead, None)
        while batch is not None:
            self._following = next(ahead, None)
            yield batch, batch
            batch = self._following

    @contextlib.contextmanager
    def computing(self, step: int, batch: RankingBatch) -> Iterator[None]:
        """Begin to read the rows of the next batch once those of ``batch`` have been looked up."""
        following = self._following
        if following is None:
            yield
            return
        hook = self.tables.register_forward_hook(lambda *_: self.tables.prefetch(following.sparse))
        try:
            yield
        finally:
            hook.remove()

    def save(
        self,
        folder: Path,
        model: RankingModel,
        tensors: dict[str, Tensor],
        state: dict[str, Any],
        refuse: Callable[[str], CordilleraError],
    ) -> None:
        """Write a checkpoint with a copy of the file."""

        def add_rows(target: Path) -> list[str]:
            self.tables.flush()
            if (found := self.tables.not_finite()) is not None:
                raise refuse(found)
            self.tables.save(target / ROWS)
            return [f"{ROWS}/{name}" for name in ROW_FILES]

        checkpoints.save(folder, tensors, state, add_rows)
