"""Common parts of the searches for plans: dimensions, the part of a cluster in use, and results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, Literal, Protocol, TypeVar

from cordillera.cost import Calibration, CostModel, Products, alike, calibration_for
from cordillera.errors import PlanError
from cordillera.topology import Topology

SearchDimension = Literal["placement", "scheduling", "network"]
ALL: tuple[SearchDimension, ...] = ("placement", "scheduling", "network")

USABLE_MEMORY = 0.94
"""Usable part of a device's memory; the runtime takes the rest."""


class TimedPlan(Protocol):
    """A plan whose time of a step is known."""

    @property
    def seconds(self) -> float:
        """Time of a step in seconds."""


_Plan = TypeVar("_Plan", bound=TimedPlan)
_Workload = TypeVar("_Workload")


@dataclass
class SearchResult(Generic[_Plan]):
    """Plans that a search found, with counts of what it tried.

    Attributes:
        plans: Simulated plans, best first.
        searched: Dimensions that were searched.
        simulated: Number of steps that were simulated.
        dropped: Number of layouts dropped for each reason.
        seconds: Duration of the search in seconds.
        interrupted: Whether the search was stopped before its end.
    """

    plans: list[_Plan] = field(default_factory=list)
    searched: tuple[SearchDimension, ...] = ALL
    simulated: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    interrupted: bool = False

    @property
    def best(self) -> _Plan:
        """The fastest plan.

        Raises:
            PlanError: If no plan fits, with the reasons and what would help.
        """
        if not self.plans:
            raise self.no_plan()
        return self.plans[0]

    def sort(self) -> None:
        """Bring the plans into their order, the fastest first."""
        self.plans.sort(key=lambda plan: plan.seconds)

    def no_plan(self) -> PlanError:
        """Return the error that nothing fits."""
        raise NotImplementedError


def cost_models(
    topology: Topology, devices: int, calibration: Calibration | None = None, products: Products | None = None
) -> dict[int, CostModel]:
    """Return the cost models of the kinds of devices among the first ``devices`` of ``topology``.

    Args:
        topology: The cluster.
        devices: Number of devices in use.
        calibration: Constants of the cluster's own device; None for those shipped for it. Others have those shipped.
        products: Matrix products measured on the cluster's own device; None to use the constants alone.

    Returns:
        Models by position in the cluster's ``kinds``.
    """
    used = sorted(set(topology.kind_of[:devices].tolist()))
    own = {kind: calibration_for(topology.kinds[kind]) for kind in used}
    if calibration is not None and 0 in own:
        own[0] = calibration
    constants = alike(list(own.values())) if len(used) > 1 else list(own.values())
    return {
        kind: CostModel(topology.kinds[kind], one, None if kind else products)
        for kind, one in zip(used, constants, strict=True)
    }


class ClusterSearch(Generic[_Workload]):
    """A search for the best plan of one workload on one cluster.

    Args:
        workload: Workload to train.
        topology: Cluster to train on.
        calibration: Constants of the cost model; None for those shipped for the device.
        products: Matrix products measured on the device; None to use the constants alone.
        devices: Number of devices in use; None for all.
        progress: Function called with a sentence from time to time.

    Attributes:
        costs: Cost models of the kinds of devices in use, by position in the cluster's ``kinds``.
        cost: The first of them.
        usable_memory: Bytes of the smallest device in use that a plan may take.

    Raises:
        PlanError: If the cluster has fewer devices than are asked for.
    """

    def __init__(
        self,
        workload: _Workload,
        topology: Topology,
        calibration: Calibration | None = None,
        *,
        products: Products | None = None,
        devices: int | None = None,
        progress: Callable[[str], None] | None = None,
    ) -> None:
        self.workload, self.topology, self.calibration = workload, topology, calibration
        self.devices = devices or topology.devices
        if self.devices > topology.devices:
            raise PlanError(
                f"{self.devices:,} devices are asked for, the cluster has {topology.devices:,}",
                where=topology.name,
                remedy=f"{topology.devices:,} at most",
            )
        self.costs = cost_models(topology, self.devices, calibration, products)
        self.cost = next(iter(self.costs.values()))
        self._progress = progress or (lambda text: None)
        self.usable_memory = USABLE_MEMORY * min(one.device.memory_bytes for one in self.costs.values())

    @property
    def constants(self) -> str:
        """Origin of the constants and their error, in words, for each kind of device in use."""
        if len(self.costs) == 1:
            return self.cost.calibration.described
        words = "; ".join(f"{one.device.name}: {one.calibration.provenance}" for one in self.costs.values())
        return f"{words}; several kinds of devices were not measured together, and the error is not known"
