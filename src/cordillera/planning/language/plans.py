"""Plans of a language model's training job, and what a search finds."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from cordillera.errors import PlanError
from cordillera.planning.language.step import SimulatedStep
from cordillera.planning.language.workload import Layout
from cordillera.planning.network.settings import NetworkSettings
from cordillera.planning.pipeline.schedules import Schedule

SearchDimension = Literal["placement", "scheduling", "network"]
ALL: tuple[SearchDimension, ...] = ("placement", "scheduling", "network")


@dataclass(frozen=True)
class Plan:
    """One way to run a job, with its predicted step.

    Attributes:
        layout: Degrees of parallelism.
        order: Order of the dimensions on the cluster, innermost first.
        network: Network settings by level.
        schedule: Schedule of the pipeline.
        step: The simulated step.
        flops: FLOPs of the model's own arithmetic in a step.
        peak: FLOPs per second of all devices' matrix engines.
    """

    layout: Layout
    order: tuple[str, ...]
    network: Mapping[str, NetworkSettings]
    schedule: Schedule
    step: SimulatedStep
    flops: float
    peak: float

    @property
    def seconds(self) -> float:
        """Time of a step in seconds."""
        return self.step.seconds

    @property
    def utilisation(self) -> float:
        """Model FLOPs as a fraction of the peak of all devices (MFU)."""
        return self.flops / (self.seconds * self.peak)

    @property
    def across(self) -> str:
        """Name of the dimension that crosses the outermost links."""
        sizes = {name: getattr(self.layout, name) for name in self.order}
        return next((name for name in reversed(self.order) if sizes[name] > 1), "none")

    def to_json(self) -> dict[str, Any]:
        """Return the prediction and all that a training run needs to follow the plan."""
        return {
            "layout": asdict(self.layout),
            "mesh": {"names": list(reversed(self.order)), "sizes": [getattr(self.layout, n) for n in self.order][::-1]},
            "network": {name: asdict(one) for name, one in self.network.items()},
            "schedule": {"name": self.schedule.name, "csv": self.schedule.to_csv()},
            "seconds": self.seconds,
            "parts": self.step.parts,
            "memory": list(self.step.memory),
            "utilisation": self.utilisation,
            "evidence": "simulated",
        }


@dataclass
class Exploration:
    """Result of a search.

    Attributes:
        plans: Simulated plans, best first, at most one for each layout and order.
        searched: Dimensions that were searched.
        estimated: Number of layouts that were ranked by estimate.
        simulated: Number of steps that were simulated.
        dropped: Number of layouts dropped for each reason.
        seconds: Duration of the search in seconds.
        interrupted: Whether the search was stopped before its end.
        alone: Best plan of each dimension searched alone, if more than one was searched.
        least_memory: Bytes on the fullest device of the layout that needed least, among those that did not fit.
        enough: Number of devices that can be planned instead, if the requested number cannot.
    """

    plans: list[Plan] = field(default_factory=list)
    searched: tuple[SearchDimension, ...] = ALL
    estimated: int = 0
    simulated: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    interrupted: bool = False
    least_memory: float = math.inf
    enough: int | None = None
    alone: dict[SearchDimension, Plan] = field(default_factory=dict)

    def take(self, dimension: SearchDimension, smaller: Exploration) -> None:
        """Add the results of a search of one ``dimension``; ``smaller`` includes the plan that it began with."""
        self.plans += smaller.plans
        self.alone[dimension] = min(smaller.plans, key=lambda plan: plan.seconds)
        self.estimated += smaller.estimated
        self.simulated += smaller.simulated
        self.dropped += smaller.dropped
        self.least_memory = min(self.least_memory, smaller.least_memory)

    @property
    def best(self) -> Plan:
        """The fastest plan.

        Raises:
            PlanError: If no plan fits, with the reasons and the smallest change that would help.
        """
        if not self.plans:
            reasons = "; ".join(f"{count:,} layouts: {reason}" for reason, count in self.dropped.most_common(4))
            remedy = "a batch that the number of devices divides, or another number of devices"
            if self.enough is not None:
                remedy += f": {self.enough:,} would do"
            if math.isfinite(self.least_memory):
                remedy = (
                    f"the layout that needs least takes {self.least_memory / 1e9:,.0f} GB on a device: devices with "
                    f"{self.least_memory / USABLE_MEMORY / 1e9:,.0f} GB, or more of them"
                    + (f": {self.enough:,} would do" if self.enough is not None else "")
                )
            raise PlanError(f"no plan is possible ({reasons or 'nothing was tried'})", remedy=remedy)
        return self.plans[0]


USABLE_MEMORY = 0.94  # usable part of a device's memory; the runtime takes the rest
