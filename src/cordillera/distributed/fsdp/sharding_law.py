"""Cost of sharded weights by formula: memory of a rank, collectives of a step, bytes that leave a host.

A *unit* is a set of parameters that are gathered at once: in Cordillera a block, or the root with everything outside
blocks. With ``F`` shards, a rank always holds ``1 / F`` of every unit, and the whole of the root and of one more unit
while it computes. torch splits every parameter along its first dimension into equal parts, of which the last are padded
or empty, so a unit of few rows over many ranks takes more than its share; the formulas include this.

Source: Zhao et al. 2023 (FSDP, arXiv 2304.11277), sections 3.2.1 and 3.2.2; the rest follows torch's ``fully_shard``.
The paper's hybrid traffic, ``2 M (W - 1) / (G W)``, is approximate; a ring over ``H = W / G`` hosts sends ``2 (M / G)
(H - 1) / H``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cordillera.errors import PlanError


@dataclass(frozen=True)
class Unit:
    """Parameters that are gathered together, by their shapes of at least one dimension each."""

    shapes: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def of(cls, shapes: Iterable[Sequence[int]]) -> Unit:
        """Return a unit of parameters of these shapes.

        Raises:
            PlanError: If a parameter has no dimension along which to split it.
        """
        taken = tuple(tuple(shape) for shape in shapes)
        if () in taken:
            raise PlanError("a parameter without dimensions cannot be sharded", where="unit", remedy="shape (1,)")
        return cls(taken)

    @property
    def elements(self) -> int:
        """Number of elements of all parameters, without padding."""
        return sum(math.prod(shape) for shape in self.shapes)

    def shard(self, shards: int) -> int:
        """Return the number of elements of the first of the ranks, to which the others are padded in collectives."""
        return sum(-(-shape[0] // shards) * math.prod(shape[1:]) for shape in self.shapes)

    def gathered(self, shards: int) -> int:
        """Return the number of elements of the gathered unit, including padding."""
        return shards * self.shard(shards)


_NO_ROOT = Unit()


@dataclass(frozen=True)
class ParameterMemory:
    """Peak memory of parameters on a rank in bytes, without temporary memory of collectives.

    Attributes:
        sharded: Bytes of a rank's part of all units.
        gathered: Bytes of whole units that exist at the same time.
    """

    sharded: int
    gathered: int

    @property
    def total(self) -> int:
        """Sum of both."""
        return self.sharded + self.gathered


def parameter_memory(
    units: Sequence[Unit],
    shards: int,
    root: Unit = _NO_ROOT,
    reshards: bool = True,
    sharded_bytes: int = 4,
    gathered_bytes: int = 4,
) -> ParameterMemory:
    """Return the peak memory of parameters on a rank in a step: ``sum / F + root + max``.

    The root is gathered before the first unit computes and needed until the last has its gradients, whether or not it
    is freed between forward and backward.

    With one shard nothing is sent, and torch copies what it would gather.

    Args:
        units: Units that are gathered one after another.
        shards: Number ``F`` of ranks that share the units.
        root: Unit that is gathered around all of them; empty for the published law ``sum / F + max``.
        reshards: Whether a unit is freed after its forward; otherwise all of them are whole when the backward begins.
        sharded_bytes: Bytes of an element that a rank keeps.
        gathered_bytes: Bytes of an element in the precision in which units compute.
    """
    whole = [unit.gathered(shards) for unit in units]
    beside = root.gathered(shards) + (max(whole, default=0) if reshards else sum(whole))
    return ParameterMemory(sharded_bytes * sum(unit.shard(shards) for unit in (root, *units)), gathered_bytes * beside)


@dataclass(frozen=True)
class CollectiveCounts:
    """Numbers of collectives of a rank, or bytes that it sends in them, by kind.

    Attributes:
        all_gathers: Collectives that gather weights.
        reduce_scatters: Collectives that reduce gradients within the shards.
        all_reduces: Collectives that reduce a rank's part of the gradients over the replicas.
    """

    all_gathers: int
    reduce_scatters: int
    all_reduces: int


def collectives(
    units: int, shards: int, replicas: int = 1, has_root: bool = True, reshards: bool = True, microbatches: int = 1
) -> CollectiveCounts:
    """Return the number of collectives of a step by kind.

    There are ``2 N + 1`` all-gathers for ``N`` units and the root, and ``N + 1`` reductions of each kind. Gradients are
    reduced with the last of several microbatches. Units that do not reshard stay whole until then.

    Args:
        units: Number ``N`` of units, without the root.
        shards: Number of ranks that share a unit; 1 for weights that are whole everywhere.
        replicas: Number of groups of such ranks.
        has_root: Whether the root has parameters of its own; they stay whole from forward to backward.
        reshards: Whether a unit is freed after its forward, and everything after each backward.
        microbatches: Number of forwards and backwards of a step.
    """
    all_units = units + has_root
    gathers = microbatches * (2 * units + has_root) if reshards else all_units
    return CollectiveCounts(
        gathers if shards > 1 else 0, all_units if shards > 1 else 0, all_units if replicas > 1 else 0
    )


def sent_bytes(
    units: Sequence[Unit],
    shards: int,
    replicas: int = 1,
    root: Unit = _NO_ROOT,
    reshards: bool = True,
    microbatches: int = 1,
    gathered_bytes: int = 4,
    gradient_bytes: int = 4,
) -> CollectiveCounts:
    """Return the bytes that a rank sends in a step, by kind, in rings, with padding; each call is rounded down.

    Args:
        units: Units that are gathered one after another.
        shards: Number of ranks that share a unit.
        replicas: Number of groups of such ranks.
        root: Unit that is gathered around all of them.
        reshards: Whether a unit is freed after its forward.
        microbatches: Number of forwards and backwards of a step.
        gathered_bytes: Bytes of an element of a weight in messages.
        gradient_bytes: Bytes of an element of a gradient in messages.
    """
    parts, root_part = [unit.shard(shards) for unit in units], root.shard(shards)
    gathered = microbatches * (2 * sum(parts) + root_part) if reshards else sum(parts) + root_part
    reduced = [gradient_bytes * part for part in (root_part, *parts)]
    return CollectiveCounts(
        (shards - 1) * gathered_bytes * gathered,
        (shards - 1) * sum(reduced),
        sum(2 * (replicas - 1) * part // replicas for part in reduced),
    )


def bytes_across_hosts(sent: CollectiveCounts, shards: int, replicas: int, ranks_per_host: int) -> list[int]:
    """Return the bytes that each rank sends to a rank on another host, in rings that visit ranks in ascending order.

    Shards are consecutive ranks and fill hosts from the first. A rank sends all its messages to the next rank of its
    ring. Consider ``M`` bytes of weights over ``W`` ranks, ``G`` on a host, ``H`` hosts, reduced with as many bytes. If
    weights are whole everywhere, the last rank of a host sends ``2 M (W - 1) / W`` out of it; fully sharded, ``3 M (W -
    1) / W``; sharded within hosts, every rank sends ``2 (M / G) (H - 1) / H``.

    Args:
        sent: Bytes that each rank sends, from :func:`sent_bytes`.
        shards: Number of ranks that share a unit.
        replicas: Number of groups of such ranks.
        ranks_per_host: Number of consecutive ranks on one host.
    """
    world, found = shards * replicas, []
    for rank in range(world):
        group = rank // shards
        within = group * shards + (rank + 1) % shards
        over = (rank + shards) % world
        leaves = [rank // ranks_per_host != other // ranks_per_host for other in (within, over)]
        found.append(leaves[0] * (sent.all_gathers + sent.reduce_scatters) + leaves[1] * sent.all_reduces)
    return found
