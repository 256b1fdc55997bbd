"""Embedding tables whose holders look up the samples of all ranks, for the exchange by towers.

Ids go to the ranks that hold the tables, as for sums of bags (:mod:`cordillera.embeddings.pooled_exchange`), but the
sums stay there: the exchange of :mod:`cordillera.distributed.towers` takes them through the towers to the ranks of the
samples, and their gradients back.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cordillera.distributed.codecs.coders import Coder
from cordillera.embeddings.gradients.pending import PendingGradient, merge_pending
from cordillera.embeddings.pooled_exchange import BatchRequest
from cordillera.embeddings.sharded_tables import ShardedEmbeddingTables
from cordillera.errors import PlanError
from cordillera.jagged import JaggedBatch
from cordillera.training.ranking.towers.placing import held_features


class TowerTables(ShardedEmbeddingTables):
    """:class:`ShardedEmbeddingTables` that return the embeddings of the features they hold, for all ranks' samples.

    :meth:`forward` takes the samples of this rank and returns ``[sum(n), f, D]`` for the ``n`` samples of each rank, in
    the order of ranks, and the ``f`` features of the tables that this rank holds, in the order of
    :func:`~cordillera.training.ranking.towers.placing.held_features`. The gradient of that, which the exchange by
    towers returns, is all that an update needs. Arguments are those of :class:`ShardedEmbeddingTables`.

    Attributes:
        samples: Number ``n`` of samples of each rank in the last lookup.

    Raises:
        PlanError: If a table is cut or copied, bags of a table are not summed by its holder, or the placement does not
            fit the tables or the ranks.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        placement, given = self.placement, self.features.sparse
        cut = len(placement.parts) > len(placement.tables) or any(len(part.ranks) > 1 for part in placement.parts)
        if cut or set(placement.pooled) != set(placement.tables):
            raise PlanError(
                "towers need whole tables, each on one rank that sums its bags",
                where="parallel.placement",
                remedy="set parallel.placement = 'auto', or parallel.exchange = 'plain'",
            )
        self.samples: list[int] = []
        self._held = held_features(placement, self.features, self.links.rank)
        self._held_means = torch.tensor([given[i].pooling == "mean" for i in self._held], dtype=torch.bool)
        self._own_samples = 0

    def _ask(self, sparse: JaggedBatch) -> BatchRequest:
        self._own_samples = len(sparse)
        return super()._ask(sparse)

    def _take_notes(self) -> tuple[int, ...]:
        """Return this rank's number of samples at its position, and 0 elsewhere; the sum gives all ranks' numbers."""
        return tuple(self._own_samples if rank == self.links.rank else 0 for rank in range(self.links.size))

    def _find_bags(self, asked: BatchRequest, samples: int, coder: Coder | None, dtype: torch.dtype) -> Tensor:
        """Return the embeddings of held features for the samples of all ranks."""
        asked.request.wait()
        self.samples, features = asked.request.notes, len(self._held)
        if asked.bags is not None:
            self._bags.wait(asked.bags)  # also without tables, as this completes the sending of this rank's ids
        if asked.bags is None or not features:
            return torch.empty(sum(self.samples), 0, self.embedding_dim, dtype=dtype)
        block = self.get_buffer("rows_0")  # whole tables are equally wide, so they form one block
        by_rank = [sums for (sums,) in self._bags.sum_bags(asked.bags, [block], self.backend)]
        factors = self._mean_factors(asked)
        found = []
        for rank, (count, sums) in enumerate(zip(self.samples, by_rank, strict=True)):
            if factors is not None:
                sums = sums * factors[rank].unsqueeze(1)
            found.append(sums.view(features, count, self.embedding_dim).transpose(0, 1))
        return torch.cat(found).to(dtype)  # [sum(n), f, D]

    def _mean_factors(self, asked: BatchRequest) -> list[Tensor] | None:
        """Return a factor of each rank's bags, one over the length for means, else one; None for ones only."""
        assert asked.bags is not None
        (served,) = self._bags.wait(asked.bags)
        if served.offsets is None or not self._held_means.any():
            return None
        shares = served.offsets.diff().clamp(min=1).float().reciprocal().split(served.bags)
        found = []
        for count, share in zip(asked.request.notes, shares, strict=True):
            found.append(torch.where(self._held_means.repeat_interleave(count), share, 1.0))
        return found

    def _gather(self, waiting: Any) -> dict[int, tuple[Tensor, Tensor]]:
        """Return no rows: all gradients are of bags."""
        return {}

    def _gather_bags(self, waiting: Any) -> dict[int, PendingGradient]:
        """Return the gradients of all ranks' bags, in the order of backward passes and ranks."""
        found = []
        for one in waiting:
            if one.asked.bags is None or not self._held:
                continue
            (served,), factors = self._bags.wait(one.asked.bags), self._mean_factors(one.asked)
            pieces = []
            for rank, of_rank in enumerate(one.grad.split(one.asked.request.notes)):  # [n, f, D]
                piece = of_rank.transpose(0, 1).reshape(-1, self.embedding_dim).float()
                pieces.append(piece if factors is None else piece * factors[rank].unsqueeze(1))
            if len(served.rows):
                gradient = torch.cat(pieces).unsqueeze(1)
                found.append(PendingGradient(served.rows, served.offsets, served.weights, gradient))
        return {0: merge_pending(found)} if found else {}
