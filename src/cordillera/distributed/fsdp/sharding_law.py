"""What sharded weights cost by formula: memory of a rank, collectives of a step, bytes that leave a host.

A *unit* is what is gathered at once: in this project a block, and the root with everything outside blocks. Over ``F``
shards a rank holds ``1 / F`` of every unit all the time, and the whole of the root and of one more unit while it
computes. torch cuts every parameter along its first dimension into equal parts, the last of which are filled up or
empty, so that a unit of few rows over many ranks takes more than its share; this is counted.

Source: Zhao et al. 2023 (FSDP, arXiv 2304.11277), sections 3.2.1 and 3.2.2; the rest is how torch's ``fully_shard``
does it. The paper's hybrid traffic, ``2 M (W - 1) / (G W)``, is approximate; a ring over ``H = W / G`` hosts sends
``2 (M / G) (H - 1) / H``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cordillera.errors import PlanError


@dataclass(frozen=True)
class Unit:
    """Parameters that are gathered together.

    Attributes:
        shapes: Of each parameter, with at least one dimension.
    """

    shapes: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def of(cls, shapes: Iterable[Sequence[int]]) -> Unit:
        """A unit of these parameters.

        Args:
            shapes: Of each parameter.

        Raises:
            PlanError: If one has no dimension to be cut along.
        """
        taken = tuple(tuple(shape) for shape in shapes)
        if () in taken:
            raise PlanError("a parameter without dimensions cannot be sharded", where="unit", remedy="shape (1,)")
        return cls(taken)

    @property
    def elements(self) -> int:
        """Of all parameters, without padding."""
        return sum(math.prod(shape) for shape in self.shapes)

    def shard(self, shards: int) -> int:
        """Elements that a rank holds: those of the first rank, to which others are filled up in collectives.

        Args:
            shards: Ranks that share the unit.
        """
        return sum(-(-shape[0] // shards) * math.prod(shape[1:]) for shape in self.shapes)

    def gathered(self, shards: int) -> int:
        """Elements that exist where the unit is gathered, padding included.

        Args:
            shards: Ranks that share the unit.
        """
        return shards * self.shard(shards)


_NO_ROOT = Unit()


@dataclass(frozen=True)
class ParameterMemory:
    """The most that parameters take on a rank, bytes; without what collectives take in passing.

    Attributes:
        sharded: A rank's part of all units.
        gathered: Whole units beside it.
    """

    sharded: int
    gathered: int

    @property
    def total(self) -> int:
        """Both."""
        return self.sharded + self.gathered


def parameter_memory(
    units: Sequence[Unit],
    shards: int,
    root: Unit = _NO_ROOT,
    reshards: bool = True,
    sharded_bytes: int = 4,
    gathered_bytes: int = 4,
) -> ParameterMemory:
    """Parameters on a rank at the worst moment of a step: ``sum / F + root + max``.

    The root is gathered before the first unit computes and needed until the last has its gradients, whether or not it
    is freed between forward and backward.

    With one shard nothing is sent, and torch copies what it would gather.

    Args:
        units: What is gathered one after another.
        shards: ``F``, ranks that share them.
        root: What is gathered around all of them; empty for the law as published, ``sum / F + max``.
        reshards: Whether a unit is freed after its forward; else all of them are whole when the backward begins.
        sharded_bytes: Of an element that a rank keeps.
        gathered_bytes: Of an element in the precision that units compute in.
    """
    whole = [unit.gathered(shards) for unit in units]
    beside = root.gathered(shards) + (max(whole, default=0) if reshards else sum(whole))
    return ParameterMemory(sharded_bytes * sum(unit.shard(shards) for unit in (root, *units)), gathered_bytes * beside)


@dataclass(frozen=True)
class CollectiveCounts:
    """How many a rank takes part in, or what it sends in them, by kind.

    Attributes:
        all_gathers: Of weights.
        reduce_scatters: Of gradients, within the shards.
        all_reduces: Of a rank's part of the gradients, over the replicas.
    """

    all_gathers: int
    reduce_scatters: int
    all_reduces: int


def collectives(
    units: int, shards: int, replicas: int = 1, has_root: bool = True, reshards: bool = True, microbatches: int = 1
) -> CollectiveCounts:
    """Collectives of a step: ``2 N + 1`` all-gathers for ``N`` units and the root, ``N + 1`` reductions of each kind.

    Gradients are reduced with the last of several microbatches. Units that do not reshard stay whole until then.

    Args:
        units: ``N``, without the root.
        shards: Ranks that share a unit; 1 for weights that are whole everywhere.
        replicas: Groups of such ranks.
        has_root: Whether the root has parameters of its own; they stay whole from forward to backward.
        reshards: Whether a unit is freed after its forward, and everything after each backward.
        microbatches: Forwards and backwards of a step.
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
    """Bytes that a rank sends in a step, by kind, in rings; padding included, each call rounded down.

    Args:
        units: As in :func:`parameter_memory`.
        shards: As in :func:`collectives`.
        replicas: As in :func:`collectives`.
        root: As in :func:`parameter_memory`.
        reshards: As in :func:`collectives`.
        microbatches: As in :func:`collectives`.
        gathered_bytes: Of an element of a weight on the wire.
        gradient_bytes: Of an element of a gradient on the wire.
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
    """What each rank sends to a rank on another host, in rings that visit ranks in rising order.

    Shards are consecutive ranks and fill hosts from the first. A rank sends all it sends to the next of its ring. With
    ``M`` bytes of weights over ``W`` ranks, ``G`` on a host, ``H`` hosts, reduced with as many bytes: where weights are
    whole everywhere, the last rank of a host sends ``2 M (W - 1) / W`` out of it; fully sharded ``3 M (W - 1) / W``;
    sharded within hosts every rank sends ``2 (M / G) (H - 1) / H``.

    Args:
        sent: By each rank, from :func:`sent_bytes`.
        shards: Ranks that share a unit.
        replicas: Groups of such ranks.
        ranks_per_host: Consecutive ranks on one host.

    Returns:
        By rank.
    """
    world, found = shards * replicas, []
    for rank in range(world):
        group = rank // shards
        within = group * shards + (rank + 1) % shards
        over = (rank + shards) % world
        leaves = [rank // ranks_per_host != other // ranks_per_host for other in (within, over)]
        found.append(leaves[0] * (sent.all_gathers + sent.reduce_scatters) + leaves[1] * sent.all_reduces)
    return found
