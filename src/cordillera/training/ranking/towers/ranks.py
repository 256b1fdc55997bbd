"""Ranks of hosts that each compute a tower of the model for the samples of all hosts.

A rank computes the tower of its host for the samples of its peers, the ranks with its position on all hosts, and all
other layers for its own samples. Gradients of a tower are summed within its host and only that host updates it; every
rank keeps the other towers as they were at the last checkpoint.

Source: Disaggregated Multi-Tower (arXiv 2403.00877); how towers that other hosts train are kept is a choice of this
library.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from cordillera.data.ranking.balance import SampleBalance
from cordillera.distributed.collectives import exchange_parts
from cordillera.distributed.job.watchdog import Watchdog
from cordillera.distributed.towers import TowerExchange
from cordillera.models.ranking.base import RankingModel
from cordillera.models.ranking.towers import TowerModules
from cordillera.training.ranking.ranks import ManyRanks
from cordillera.training.ranking.towers.placing import check_tower_placement, tower_layout, towers_of
from cordillera.training.ranking.towers.tables import TowerTables

_NORMS, _WEIGHTS = 31, 32  # tags of messages; those of the exchange by towers are below


class TowerRanks(ManyRanks):
    """Ranks that exchange embeddings by towers. The exchange becomes a part of the ``model`` of every rank.

    Args:
        model: Model with :class:`~cordillera.models.ranking.towers.TowerModules`, as ``towers``, and
            :class:`~cordillera.training.ranking.towers.tables.TowerTables`.
        hosts: Number of hosts, and of towers, each with equally many consecutive ranks.
        watchdog: Watchdog of the job, which signals reach.
        balance: Division of the samples of a batch (:func:`~cordillera.data.ranking.balance.divide`).
        of_sample: Cost of a sample beside that of its ids, in ids, for ``variable``.

    Attributes:
        exchange: Exchange with the module of this rank's tower, if towers have modules.

    Raises:
        PlanError: If a table is not whole on a rank of its tower's host.
    """

    def __init__(
        self,
        model: RankingModel,
        hosts: int,
        watchdog: Watchdog,
        balance: SampleBalance = "none",
        of_sample: float = 1.0,
    ) -> None:
        tables, modules = model.tables, model.towers
        assert isinstance(tables, TowerTables)
        assert isinstance(modules, TowerModules)
        super().__init__(tables, watchdog, balance, of_sample)
        check_tower_placement(tables.placement, towers_of(model), hosts, "placement")
        layout = tower_layout(tables.placement, tables.features, hosts)
        self.host, self.towers = self.rank // layout.ranks_per_host, list(modules.towers)
        own = self.towers[self.host] if self.towers else None
        outputs, dim = (modules.outputs_by_tower, modules.dim) if self.towers else (None, None)
        self.exchange = TowerExchange(layout, self.links, own, outputs, dim)
        modules.exchange = lambda pooled: self.exchange(pooled, tables.samples)

    def sum_step(self, parameters: Iterable[Tensor], losses: Sequence[float], stop: threading.Event) -> float:
        """Sum gradients of ``parameters``: of this host's tower over its ranks, others and ``losses`` over all ranks.

        A request to ``stop`` that has reached any rank until now is then seen by all.
        """
        own = set(self.exchange.parameters())
        total = super().sum_step([one for one in parameters if one not in own], losses, stop)
        self.exchange.sum_gradients()
        return total

    def clip(self, parameters: Iterable[Tensor], largest: float | None = None) -> float:
        """Return the norm of the gradients of ``parameters`` and of all other towers; scale to ``largest`` if above."""
        own = set(self.exchange.parameters())
        if not own:
            return super().clip(parameters, largest)
        given = [one for one in parameters if one.grad is not None]
        norms = [
            torch.nn.utils.get_total_norm(
                [one.grad for one in given if (one in own) == is_own and one.grad is not None]
            )
            for is_own in (False, True)
        ]
        told = exchange_parts(self.links, "norms of tower gradients", [norms[1].view(1)] * self.size, [1] * self.size,
                              _NORMS).wait()  # fmt: skip
        norm = torch.linalg.vector_norm(torch.cat([norms[0].view(1), *told[:: self.exchange.layout.ranks_per_host]]))
        if largest is not None:
            torch.nn.utils.clip_grads_with_norm_(given, largest, norm)
        return float(norm)

    @torch.no_grad()
    def refresh(self, optimizer: torch.optim.Optimizer) -> None:
        """Fetch the weights and moments of all other towers from this rank's peers, whose hosts train them."""
        if not self.towers:
            return
        peers = self.exchange.layout.peers(self.rank)
        held = _kept(self.towers[self.host], optimizer)
        own = torch.cat([tensor.reshape(-1) for one in held for tensor in one.values()])
        sizes = [sum(tensor.numel() for one in _like(tower, held) for tensor in one.values()) for tower in self.towers]
        parts, counts = [own.new_empty(0)] * self.size, [0] * self.size
        for peer, count in zip(peers, sizes, strict=True):
            parts[peer], counts[peer] = own, count
        found = exchange_parts(self.links, "weights of towers", parts, counts, _WEIGHTS).wait()
        for tower, peer in zip(self.towers, peers, strict=True):
            if peer == self.rank:
                continue
            start = 0
            for weight, shaped in zip(tower.parameters(), _like(tower, held), strict=True):
                for name, tensor in shaped.items():
                    values = found[peer][start : start + tensor.numel()].view_as(tensor)
                    start += tensor.numel()
                    if name:
                        optimizer.state[weight][name] = values.clone()
                    else:
                        weight.copy_(values)


def _kept(tower: nn.Module, optimizer: torch.optim.Optimizer) -> list[dict[str, Tensor]]:
    """Return each weight of a tower, under an empty name, with its moments by name."""
    return [{"": weight, **optimizer.state.get(weight, {})} for weight in tower.parameters()]


def _like(tower: nn.Module, held: list[dict[str, Tensor]]) -> list[dict[str, Any]]:
    """Return tensors of the shapes that :func:`_kept` has for a tower; moments are those of another one, ``held``."""
    names = held[0]
    return [{name: weight if names[name].dim() else names[name] for name in names} for weight in tower.parameters()]
