"""Exchange of pooled embeddings by towers: first within hosts, then between ranks of equal position on their hosts.

Rank ``r = h * L + l`` is rank ``l`` of host ``h``, for ``H`` hosts of ``L`` ranks. The features whose tables the ranks
of host ``h`` hold are tower ``h``. Rank ``r`` has ``n[r]`` samples and holds ``f[r]`` features of width ``D``; tower
``h`` has ``F[h]`` features. Ranks with one ``l`` are peers; they have ``P[l]`` samples together. All ranks make these
steps, in which samples are always in the order of the ranks that they belong to:

| step of rank (h, l) | result |
| --- | --- |
| 1. look up own features for the samples of all ranks | `[sum(n), f[r], D]` |
| 2. bring the samples of each position's peers together | `L` parts `[P[l'], f[r], D]` |
| 3. send part `l'` to rank `(h, l')` | `L` parts `[P[l], f[h, l'], D]` |
| 4. concatenate over features, in ascending order | `[P[l], F[h], D]` |
| 5. apply the module of the tower | `[P[l], O[h], D']` |
| 6. send the samples of rank `(h', l)` to it | `H` parts `[n[r], O[h'], D']` |
| 7. concatenate over towers; without modules, restore the order of all features | `[n[r], sum(O), D']` |

The backward pass makes the transposed steps in the opposite order. The flat exchange replaces steps 2 to 6 by one
exchange among all ranks. Both copy numbers and compute none, so that without modules their results and gradients are
equal bit for bit. In step 6 a rank sends as many bytes to other hosts as in the flat exchange if its tower does not
compress, summed over the ranks of a host, in ``H - 1`` messages instead of ``(H - 1) * L``.

Source: Disaggregated Multi-Tower (arXiv 2403.00877), the semantic-preserving tower transform. The paper has no public
code; the order of samples and the ways of messages are a derivation of this library.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from cordillera.distributed.collectives import Collectives, exchange_parts
from cordillera.errors import PlanError

_FLAT, _LOCAL, _PEERS, _SUMS = 21, 23, 25, 27  # tags of messages; gradients and gathers have the next one


@dataclass(frozen=True)
class TowerLayout:
    """Features that each rank of a job looks up. The features of a host are a tower.

    Attributes:
        hosts: Number ``H`` of hosts, of equally many ranks.
        features: Positions of the features of each rank, from 0 to the number of features less 1. Any rank, but no
            host, may have none.

    Raises:
        PlanError: If ranks cannot be divided over hosts, a tower is empty, or a feature is on no rank or on several.
    """

    hosts: int
    features: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if self.hosts < 1 or not self.features or len(self.features) % self.hosts:
            raise PlanError(
                f"{len(self.features)} ranks cannot be divided over {self.hosts} hosts",
                where="towers",
                remedy="choose a number of hosts that divides the number of ranks",
            )
        empty = [str(host) for host in range(self.hosts) if not self.tower(host)]
        if empty:
            raise PlanError(
                f"no feature is in the tower of host {', '.join(empty)}",
                where="towers",
                remedy="use fewer hosts, or give every host a feature",
            )
        given = list(chain.from_iterable(self.features))
        if sorted(given) != list(range(len(given))):
            raise PlanError(
                "features are not on one rank each",
                where="towers",
                remedy="name every position from 0 to the number of features less 1 once",
            )

    @classmethod
    def of(cls, towers: Sequence[Sequence[int]], ranks_per_host: int) -> TowerLayout:
        """Return the layout of given towers, one for each host with ``ranks_per_host`` ranks, shared out evenly."""
        if ranks_per_host < 1:
            raise PlanError(f"{ranks_per_host} ranks on a host", where="towers", remedy="at least 1")
        features: list[tuple[int, ...]] = []
        for tower in towers:
            own = sorted(tower)
            ends = [len(own) * i // ranks_per_host for i in range(ranks_per_host + 1)]
            features += [tuple(own[ends[i] : ends[i + 1]]) for i in range(ranks_per_host)]
        return cls(len(towers), tuple(features))

    @property
    def ranks_per_host(self) -> int:
        """Number ``L`` of ranks of a host."""
        return len(self.features) // self.hosts

    def host_ranks(self, host: int) -> range:
        """Return the ranks of a host."""
        return range(host * self.ranks_per_host, (host + 1) * self.ranks_per_host)

    def peers(self, rank: int) -> range:
        """Return the ranks, one of each host, with the position of ``rank`` on its host."""
        return range(rank % self.ranks_per_host, len(self.features), self.ranks_per_host)

    def tower(self, host: int) -> list[int]:
        """Return the features of a host, ascending; the module of the tower gets them in this order."""
        return sorted(chain.from_iterable(self.features[rank] for rank in self.host_ranks(host)))


class _Transfer(NamedTuple):
    """A message from each rank to each other one; any message may be empty.

    Attributes:
        links: Ranks.
        ranks_per_host: Number of ranks of a host.
        name: Name of the data. The ledger has it with ``within hosts`` and with ``between hosts``.
        tag: Tag of the messages; gradients have the next one.
        sent: Shapes of the messages to all ranks.
        received: Shapes of the messages from all ranks.
    """

    links: Collectives
    ranks_per_host: int
    name: str
    tag: int
    sent: Sequence[Sequence[int]]
    received: Sequence[Sequence[int]]

    def back(self) -> _Transfer:
        """Return the transfer of gradients."""
        return self._replace(name=f"gradients of {self.name}", tag=self.tag + 1, sent=self.received, received=self.sent)

    def move(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Send parts to all other ranks, and return those from them; messages of both kinds travel together."""
        links = self.links
        host = links.rank // self.ranks_per_host
        flat, counts = [part.reshape(-1) for part in parts], [prod(shape) for shape in self.received]
        found = [part.new_empty(0) for part in flat]
        legs = []
        for kind, is_within in (("within", True), ("between", False)):
            ranks = [
                rank
                for rank in range(links.size)
                if rank != links.rank and (rank // self.ranks_per_host == host) is is_within
            ]
            if any(flat[rank].numel() or counts[rank] for rank in ranks):
                given = [part if rank in ranks else part[:0] for rank, part in enumerate(flat)]
                sizes = [count if rank in ranks else 0 for rank, count in enumerate(counts)]
                legs.append((ranks, exchange_parts(links, f"{self.name} {kind} hosts", given, sizes, self.tag)))
        for ranks, arrival in legs:
            received = arrival.wait()
            for rank in ranks:
                found[rank] = received[rank]
        return [part.view(*shape) for part, shape in zip(found, self.received, strict=True)]


class _Moved(torch.autograd.Function):
    """Messages of all ranks; the backward pass returns their gradients."""

    @staticmethod
    def forward(ctx: Any, transfer: _Transfer, anchor: Tensor, *parts: Tensor) -> tuple[Tensor, ...]:
        ctx.transfer = transfer
        return tuple(transfer.move(parts))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (None, None, *ctx.transfer.back().move(grads))


class _Reordered(torch.autograd.Function):
    """Features in another order, ``[B, F, D]``. Gradients are copied, so that zeros keep their signs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return x.index_select(1, order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.index_select(1, ctx.saved_tensors[0].argsort()), None


def _ascending(x: Tensor, features: Sequence[int]) -> Tensor:
    """Return embeddings ``[B, F, D]`` of ``features`` in ascending order of these."""
    order = sorted(range(len(features)), key=features.__getitem__)
    if order == list(range(len(features))):
        return x
    return _Reordered.apply(x, torch.tensor(order, device=x.device))


class _Ranks(NamedTuple):
    """Ranks between which parts are exchanged so that gradients return."""

    layout: TowerLayout
    links: Collectives

    def exchange(
        self, name: str, tag: int, parts: Mapping[int, Tensor], shapes: Mapping[int, Sequence[int]]
    ) -> list[Tensor]:
        """Send parts to some ranks and return the parts from these, of given shapes, in their order."""
        rank, like = self.links.rank, next(iter(parts.values()))
        none = like.new_empty(0)
        sent = [parts[other] if other in parts and other != rank else none for other in range(self.links.size)]
        received = [shapes[other] if other in shapes and other != rank else (0,) for other in range(self.links.size)]
        transfer = _Transfer(self.links, self.layout.ranks_per_host, name, tag, [part.shape for part in sent], received)
        # a rank whose own parts need no gradient returns those of others all the same
        anchor = torch.empty(0, requires_grad=torch.is_grad_enabled())
        moved = _Moved.apply(transfer, anchor, *sent)
        return [parts[rank] if other == rank else moved[other] for other in shapes]

    def check(self, pooled: Tensor, samples: Sequence[int]) -> None:
        ranks, features = len(self.layout.features), len(self.layout.features[self.links.rank])
        if len(samples) != ranks or pooled.dim() != 3 or pooled.shape[:2] != (sum(samples), features):
            raise PlanError(
                f"pooled embeddings have the shape {list(pooled.shape)}, expected [{sum(samples)}, {features}, D] "
                f"for {len(samples)} numbers of samples and {ranks} ranks",
                where=f"rank {self.links.rank}",
            )


def _checked(layout: TowerLayout, links: Collectives) -> _Ranks:
    if len(layout.features) != links.size:
        raise PlanError(
            f"the layout is of {len(layout.features)} ranks, the job has {links.size}",
            where="towers",
            remedy="make the layout for the ranks of this job",
        )
    return _Ranks(layout, links)


class TowerExchange(nn.Module):
    """Exchange of embeddings by towers, with the module of this rank's tower between its two parts.

    All ranks call :meth:`forward`, the backward pass and :meth:`sum_gradients` equally often and in the same order.
    Ranks of a host start with equal weights of ``tower``, and keep them equal by the sum of their gradients.

    Args:
        layout: Features of the ranks.
        links: The ranks; consecutive ones are on one host.
        tower: Module of this rank's tower, ``[B, F_t, D] -> [B, O_t, D']``, for features in ascending order. None on
            all ranks for no modules.
        outputs: Number ``O_t`` of embeddings that leave each tower, if there are modules.
        dim: Width ``D'`` of these, if there are modules.

    Raises:
        PlanError: If the layout is of another number of ranks, or ``outputs`` or ``dim`` is not given for every tower.
    """

    def __init__(
        self,
        layout: TowerLayout,
        links: Collectives,
        tower: nn.Module | None = None,
        outputs: Sequence[int] | None = None,
        dim: int | None = None,
    ) -> None:
        super().__init__()
        self._ranks = _checked(layout, links)
        self.layout, self.links, self.tower = layout, links, tower
        if tower is not None and (dim is None or outputs is None or len(outputs) != layout.hosts):
            raise PlanError(
                "every rank has to know the outputs of all towers",
                where="towers",
                remedy=f"give dim, and the number of embeddings of each of the {layout.hosts} towers",
            )
        self.outputs = [len(layout.tower(host)) for host in range(layout.hosts)] if outputs is None else list(outputs)
        self.dim = dim

    def forward(self, pooled: Tensor, samples: Sequence[int]) -> Tensor:
        """Exchange embeddings and compress them in towers.

        Args:
            pooled: Embeddings of this rank's features for the samples of all ranks, ``[sum(n), f, D]``.
            samples: Number ``n`` of samples of each rank.

        Returns:
            What all towers computed for this rank's samples, ``[n, sum(O_t), D']``, tower by tower. Without modules,
            embeddings of all features in their order, ``[n, F, D]``.

        Raises:
            PlanError: If a shape does not fit the layout, or the module returns another shape than it was said to.
            PeerError: If a rank does not respond in time, or a connection broke.
        """
        layout, rank, ranks = self.layout, self.links.rank, self._ranks
        ranks.check(pooled, samples)
        host = rank // layout.ranks_per_host
        blocks, peers = pooled.split(list(samples)), layout.peers(rank)
        parts = {to: torch.cat([blocks[peer] for peer in layout.peers(to)]) for to in layout.host_ranks(host)}
        count, dim = sum(samples[peer] for peer in peers), pooled.shape[2]
        shapes: dict[int, Sequence[int]] = {to: (count, len(layout.features[to]), dim) for to in parts}
        found = torch.cat(ranks.exchange("embeddings of towers", _LOCAL, parts, shapes), 1)  # [P, F_t, D]
        found = _ascending(found, [one for local in layout.host_ranks(host) for one in layout.features[local]])
        if self.tower is not None and self.dim is not None:
            found, dim = self.tower(found), self.dim
            if found.shape != (count, self.outputs[host], dim):
                raise PlanError(
                    f"the module of tower {host} returned {list(found.shape)}, "
                    f"expected {[count, self.outputs[host], dim]}",
                    where=f"rank {rank}",
                )
        parts = dict(zip(peers, found.split([samples[peer] for peer in peers]), strict=True))
        shapes = {peer: (samples[rank], self.outputs[at], dim) for at, peer in enumerate(peers)}
        found = torch.cat(ranks.exchange("outputs of towers", _PEERS, parts, shapes), 1)  # [n, sum(O_t), D']
        if self.tower is not None:
            return found
        return _ascending(found, [one for at in range(layout.hosts) for one in layout.tower(at)])

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Sum gradients of the tower's weights over the ranks of its host, in place and in the order of ranks.

        The samples of all ranks have passed through these ranks, so that this is the gradient of the sum of all ranks'
        losses, as an all-reduce among all ranks is for the weights outside of towers. If a caller divides the
        latter, for instance by the number of all ranks, it must divide these by the same number.
        """
        weights = [weight for weight in self.parameters() if weight.requires_grad]
        layout, rank = self.layout, self.links.rank
        members = layout.host_ranks(rank // layout.ranks_per_host)
        if not weights or len(members) == 1:
            return
        flat = torch.cat([(torch.zeros_like(x) if x.grad is None else x.grad).reshape(-1) for x in weights])
        parts = dict(zip(members, flat.tensor_split(len(members)), strict=True))
        shapes: dict[int, Sequence[int]] = dict.fromkeys(members, parts[rank].shape)
        total = torch.stack(self._ranks.exchange("tower gradients", _SUMS, parts, shapes)).sum(0)
        shapes = {member: part.shape for member, part in parts.items()}
        sums = self._ranks.exchange("tower gradients", _SUMS + 1, dict.fromkeys(members, total), shapes)
        for weight, found in zip(weights, torch.cat(sums).split([x.numel() for x in weights]), strict=True):
            weight.grad = found.view_as(weight).clone()
