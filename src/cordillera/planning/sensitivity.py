"""Step times of plans over distances between buildings and over oversubscription."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from cordillera.planning.changes import with_changes
from cordillera.topology import Topology

DISTANCES_KM = (0.0, 10.0, 50.0, 100.0, 250.0, 500.0, 1000.0, 2000.0)
OVERSUBSCRIPTIONS = (1.0, 2.0, 2.8, 4.0, 7.0, 14.0)


@dataclass(frozen=True)
class Sensitivity:
    """Effects of network changes on unchanged plans.

    Attributes:
        distances: Seconds at each of :data:`DISTANCES_KM`, by plan.
        oversubscriptions: Seconds at each of :data:`OVERSUBSCRIPTIONS` of the outermost level, by plan; links of that
            level that differ keep their rates.
        upgrades: Changes in words, each with the seconds of the best plan after it.
    """

    distances: dict[str, list[float]]
    oversubscriptions: dict[str, list[float]]
    upgrades: list[tuple[str, float]]


class _Repeats(Protocol):
    """An explorer of plans for a language or a recommendation model."""

    topology: Topology
    devices: int

    def again(self, plan: Any, topology: Topology) -> Any: ...


def sensitivity(explorer: _Repeats, plans: Mapping[str, Any]) -> Sensitivity | None:
    """Simulate ``plans`` on changed networks of the cluster of ``explorer``; None if nothing crosses its outer links.

    The plans are given by name, the best one first.
    """
    topology = explorer.topology
    last = len(topology.levels) - 1
    if not last or topology.shared_level(0, explorer.devices - 1) < last:
        return None
    outer = topology.levels[-1].name
    far = [topology.changed({f"{outer}.distance_km": km}) for km in DISTANCES_KM]
    narrow = [
        topology.changed({f"{outer}.oversubscription": by, f"{outer}.bytes_per_s": None}) for by in OVERSUBSCRIPTIONS
    ]
    best = next(iter(plans.values()))
    host, kind = topology.levels[0].name, f" of {topology.device.name}" if topology.groups else ""
    cards = f"twice the rate of network cards{kind} and of links that follow from it"
    upgrades = {
        f"twice the bandwidth within each {host}": with_changes(topology, {f"{host}.bytes_per_s": "*=2"}),
        cards: topology.changed({"device.nic_bytes_per_s": "*=2"}),
    }
    for name in (level.name for level in topology.levels[1:]):
        faster = with_changes(topology, {f"{name}.bytes_per_s": "*=2"})
        upgrades[f"twice the capacity of links into each {name}"] = faster
        upgrades[f"half the latency within each {name}"] = topology.changed({f"{name}.latency_s": "/=2"})
    return Sensitivity(
        {name: [explorer.again(plan, one).seconds for one in far] for name, plan in plans.items()},
        {name: [explorer.again(plan, one).seconds for one in narrow] for name, plan in plans.items()},
        [(words, explorer.again(best, one).seconds) for words, one in upgrades.items()],
    )
