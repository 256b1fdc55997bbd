"""Rates that pairs of devices attain on a cluster under its network settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cordillera.cost import CostModel
from cordillera.planning.network.contention import Slowdown
from cordillera.planning.network.mesh import Edges, Mesh, SharedLink
from cordillera.planning.network.settings import NetworkSettings, possible


class Fabric:
    """Rates that pairs of devices of a mesh attain.

    Args:
        mesh: Placement of a job's ranks.
        cost: Cost model of the devices.
        network: Settings of each level above hosts, by name; None for links without losses or waiting.
        late: Time by which every hop of a collective is later on average, as a part of its latency.
    """

    def __init__(
        self,
        mesh: Mesh,
        cost: CostModel,
        network: Mapping[str, NetworkSettings] | None = None,
        late: float = 0.0,
    ) -> None:
        self.mesh, self.cost, self.network, self.late = mesh, cost, network, late

    def _late(self, edges: Edges) -> Edges:
        """Return edges whose hops are late; their rate is computed without it."""
        return edges._replace(latency=edges.latency * (1.0 + self.late)) if self.late else edges

    def rate(self, edges: Edges) -> float:
        """Return the rate that pairs of devices attain, bytes/s."""
        if edges.level == 0:
            return edges.bytes_per_s * self.cost.calibration.port
        rate, settings = edges.bytes_per_s * self.cost.calibration.network, self.settings(edges)
        if settings is None:
            return rate
        level = self.mesh.topology.levels[edges.level]
        return settings.rate(rate, edges.latency, level.loss_rate, level.planes)

    def settings(self, edges: Edges) -> NetworkSettings | None:
        """Return the settings of the level that pairs cross; None within hosts and without network settings.

        What the links of the level lack is replaced.
        """
        if self.network is None or edges.level < 1:
            return None
        level = self.mesh.topology.levels[edges.level]
        return possible(self.network[level.name], level)

    def copied(self, edges: Edges) -> float:
        """Return the part of a device's processors that messages between pairs occupy while they are sent."""
        settings = self.settings(edges)
        return 0.0 if settings is None else settings.processors

    def slowdown(self, links: Sequence[SharedLink], edges: Edges, rings: Edges) -> Slowdown:
        """Return how pairs of ``edges`` and of ``rings`` slow each other on the ``links`` that both use.

        The pairs of ``edges`` go first if their level's settings give messages priority.
        """
        settings, constants = self.settings(edges), self.cost.calibration
        usable = [(link, constants.network if link.level else constants.port) for link in links]
        goes_first = settings is not None and settings.classes == "messages"
        return Slowdown.on(usable, self.rate(edges), self.rate(rings), goes_first)
