"""Sharded tables for steps of several slices: weights do not change within a step, so rows are fetched ahead.

Between two updates, every row that a slice looks up has its final value before the slice begins. The rows of the next
slice of a step therefore travel while the present one is computed. Only those of a step's first slice are waited for.

Source: NestPipe (arXiv 2604.06956) for the window in which tables are frozen.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cordillera.distributed.codecs.coders import Coder
from cordillera.embeddings.exchange import RowRequest, RowsInTransit
from cordillera.embeddings.sharded_tables import ShardedEmbeddingTables
from cordillera.errors import PlanError, TrainingError


class FrozenWindowTables(ShardedEmbeddingTables):
    """:class:`ShardedEmbeddingTables` whose steps have several lookups and backward passes before one update.

    The gradients of a row are summed over its occurrences in a lookup, and these sums are added in the order of ranks
    and, within a rank, of backward passes, also where a part has copies. If every rank computes consecutive slices of a
    batch, the rows and the state after an update do not depend on the number of ranks or the placement, bit for bit.
    Arguments are those of :class:`ShardedEmbeddingTables`.

    Raises:
        PlanError: If the placement cuts columns and the rule is ``rowwise_adagrad``, whose sum of squares over the
            columns of a row would be made in another order; if it asks for sums of bags; or if it does not fit the
            tables or the ranks.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._ahead: tuple[RowRequest, RowsInTransit] | None = None
        if self.config.name == "rowwise_adagrad" and self._cuts_columns():
            raise PlanError(
                "the placement cuts columns, over which row-wise Adagrad sums squares in another order",
                where="parallel.placement",
                remedy="use a placement with whole rows, another rule of tables, or training.slices = 1",
            )
        if self.placement.pooled:
            raise PlanError(
                "slices send rows; the placement asks for sums of bags",
                where="parallel.pool",
                remedy="set parallel.pool = 'rows', or training.slices = 1",
            )

    @torch.no_grad()
    def fetch_ahead(self) -> None:
        """Start to send the rows of the next lookup, which no update precedes; all ranks call it together.

        The lookup was announced by :meth:`prefetch`. Rows for which a codec is chosen at each lookup are not sent
        ahead.
        """
        if self._asked and self.coders is None:
            request = self._asked[0].request
            request.wait()
            self._ahead = (request, self._exchange.send_rows(request, self._rows_by_id))

    def _fetch(self, request: RowRequest, coder: Coder | None) -> Tensor:
        ahead = self._ahead
        if ahead is None or ahead[0] is not request:
            return super()._fetch(request, coder)
        self._ahead = None
        found = torch.empty(len(request.distinct), self.embedding_dim)
        self._exchange.place_rows(request, ahead[1].wait(), found)
        return found

    def _to_copies(self, rows: Tensor, gradient: Tensor, count: int) -> tuple[Tensor, Tensor]:
        return rows, gradient

    def update(self, learning_rate_scale: float = 1.0) -> None:
        """Apply pending gradients of all ranks; see :meth:`EmbeddingTables.update`.

        Raises:
            TrainingError: If rows are on their way that the update changes.
        """
        if self._ahead is not None:
            raise TrainingError(
                "rows that were fetched ahead have not been looked up",
                where="FrozenWindowTables",
                remedy="look up every batch of a step before its update",
            )
        super().update(learning_rate_scale)

    def forget(self) -> None:
        """Discard batches that were prefetched and will not be looked up; all ranks call it together."""
        if self._ahead is not None:
            self._ahead[1].wait()
        self._ahead = None
        super().forget()
