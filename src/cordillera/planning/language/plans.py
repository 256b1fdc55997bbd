"""Plans of a language model's training job, and results of a search."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from cordillera.errors import PlanError
from cordillera.numbers import counted, in_gigabytes
from cordillera.planning.language.step import SimulatedStep
from cordillera.planning.language.workload import Layout
from cordillera.planning.network.settings import NetworkSettings
from cordillera.planning.pipeline.schedules import Schedule
from cordillera.planning.search import USABLE_MEMORY, SearchDimension, SearchResult


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
        peak: FLOPs per second of all devices' matrix engines, in 16 bits.
        error: Mean error of predictions with the constants, relative to the measured time of the steps behind them;
            None if it is not known, as in FP8.
    """

    layout: Layout
    order: tuple[str, ...]
    network: Mapping[str, NetworkSettings]
    schedule: Schedule
    step: SimulatedStep
    flops: float
    peak: float
    error: float | None = None

    @property
    def seconds(self) -> float:
        """Time of a step in seconds."""
        return self.step.seconds

    @property
    def error_s(self) -> float | None:
        """Error bar of :attr:`seconds`, by which a prediction is off on average; None if it is not known."""
        return None if self.error is None else self.error * self.seconds

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
            "error": self.error,
            "parts": self.step.parts,
            "memory": list(self.step.memory),
            "utilisation": self.utilisation,
            "evidence": "simulated",
        }


def _at_least(size: float) -> str:
    """Return bytes in GB, rounded up so that they suffice: to whole ones, or to two digits where they are few."""
    step = 1e9 if size >= 10e9 else 10.0 ** (math.floor(math.log10(size)) - 1)
    enough = math.ceil(size / step * (1 - 1e-9)) * step / 1e9  # a product's rounding error takes no further step
    return f"{enough:,.0f}" if size >= 10e9 else f"{enough:.2g}"


@dataclass
class Exploration(SearchResult[Plan]):
    """Result of a search, with at most one plan for each layout and order.

    Attributes:
        estimated: Number of layouts that were ranked by estimate.
        alone: Best plan of each dimension searched alone, if more than one was searched.
        own: Plans of a person's own layouts, as stated, also those that do not fit the memory; empty after a search.
        least_memory: Bytes on the fullest device of the layout that needed least, among those that did not fit.
        enough: Number of devices that can be planned instead, if the requested number cannot.
    """

    estimated: int = 0
    least_memory: float = math.inf
    enough: int | None = None
    alone: dict[SearchDimension, Plan] = field(default_factory=dict)
    own: list[Plan] = field(default_factory=list)

    def take(self, dimension: SearchDimension, smaller: Exploration) -> None:
        """Add the results of a search of one ``dimension``; ``smaller`` includes the plan that it began with."""
        self.plans += smaller.plans
        self.alone[dimension] = min(smaller.plans, key=lambda plan: plan.seconds)
        self.estimated += smaller.estimated
        self.simulated += smaller.simulated
        self.dropped += smaller.dropped
        self.least_memory = min(self.least_memory, smaller.least_memory)

    def no_plan(self) -> PlanError:
        """Return the error that nothing fits, with the reasons and the smallest change that would help."""
        reasons = "; ".join(f"{counted(count, 'layout')}: {reason}" for reason, count in self.dropped.most_common(4))
        remedy = "a batch that the number of devices divides, or another number of devices"
        if self.enough is not None:
            remedy += f": {self.enough:,} would do"
        if math.isfinite(self.least_memory):
            remedy = (
                f"the layout that needs least takes {in_gigabytes(self.least_memory)} GB on a device: devices with "
                f"{_at_least(self.least_memory / USABLE_MEMORY)} GB ({100 * (1 - USABLE_MEMORY):.0f} % stay free), or "
                "more of them" + (f": {self.enough:,} would do" if self.enough is not None else "")
            )
        return PlanError(f"no plan is possible ({reasons or 'nothing was tried'})", remedy=remedy)
