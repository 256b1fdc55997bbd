"""The search for the best plan of a recommendation model: placement of tables, order of a step, network settings.

Sizes of groups follow from the cluster's levels, tables are dealt out for each, and every layout is simulated under
every schedule: a step has so few operations that nothing needs to be estimated first.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import product
from typing import Any

import numpy as np

from cordillera.cost import Calibration, CostModel, calibration_for
from cordillera.errors import PlanError
from cordillera.planning.language.explorer import ALL, SearchDimension, production_network, tuned_network
from cordillera.planning.network.settings import NetworkSettings
from cordillera.planning.ranking.step import (
    INSIDE,
    Exchange,
    Reduction,
    TableJob,
    TableLayout,
    TableSchedule,
    TableStep,
    local_samples,
)
from cordillera.planning.ranking.workload import Placement, Recommender, copied, place_tables
from cordillera.topology import Topology

USABLE = 0.94  # of a device's memory; the rest is the runtime's
GRAINS = (math.inf, 1.0, 0.5)
COPIED_ROWS = (0, 1_000, 100_000)
REDUCTIONS: tuple[Reduction, ...] = ("whole", "split", "last")
_BUCKET = 25 * 2**20  # bytes of gradients that PyTorch's data parallelism reduces at a time
SCHEDULES = tuple(
    TableSchedule(prefetch, late, reduction, chunks)
    for prefetch, late, reduction, chunks in product((True, False), (False, True), REDUCTIONS, (1, 2, 4))
    if prefetch or not late
)


@dataclass(frozen=True)
class TablePlan:
    """One way to run a job, and what it is predicted to take.

    Attributes:
        layout: Groups, copies and how fine tables are cut.
        schedule: Order of a step.
        network: Settings by level.
        dealt: Where every part of a table lies in its group.
        step: Simulated.
        samples: Of a step, over all devices.
        flops: Of the model's own arithmetic in a step.
        peak: FLOPs per second of all devices' matrix engines.
    """

    layout: TableLayout
    schedule: TableSchedule
    network: Mapping[str, NetworkSettings]
    dealt: Placement
    step: TableStep
    samples: int
    flops: float
    peak: float

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self.step.seconds

    @property
    def samples_per_s(self) -> float:
        """Of all devices."""
        return self.samples / self.seconds

    @property
    def across(self) -> str:
        """The dimension that crosses the outermost links."""
        return self.layout.across

    @property
    def utilisation(self) -> float:
        """Model FLOPs over what the devices could have done (MFU)."""
        return self.flops / (self.seconds * self.peak)

    @property
    def cut(self) -> str:
        """How tables are cut, in words."""
        words = {"whole": "whole", "columns": "in columns", "rows": "in rows", "both": "in rows and columns"}
        return ", ".join(f"{count} {words[way]}" for way, count in self.dealt.ways().items() if count)

    def to_json(self) -> dict[str, Any]:
        """All that a training run needs to take the plan, but where the parts lie, and the prediction."""
        grain = self.layout.grain
        return {
            "layout": asdict(self.layout) | {"grain": grain if math.isfinite(grain) else None},
            "mesh": {
                "names": list(reversed(self.layout.order)),
                "sizes": [{"tables": self.layout.group, "copies": self.layout.copies}[n] for n in self.layout.order][
                    ::-1
                ],
            },
            "tables": self.dealt.ways(),
            "schedule": asdict(self.schedule),
            "network": {name: asdict(one) for name, one in self.network.items()},
            "seconds": self.seconds,
            "samples_per_s": self.samples_per_s,
            "parts": self.step.parts,
            "memory": self.step.memory,
            "exchanged_bytes": self.step.crossed,
            "bytes_of_a_device": self.step.volumes,
            "utilisation": self.utilisation,
            "evidence": "simulated",
        }

    def placement(self) -> list[dict[str, int]]:
        """Every part of a table and its device within a group."""
        pairs = zip(self.dealt.shards, self.dealt.devices.tolist(), strict=True)
        return [shard._asdict() | {"device": device} for shard, device in pairs]


@dataclass
class TableExploration:
    """What a search found.

    Attributes:
        plans: Best first, the best schedule and settings of every layout.
        searched: Which dimensions were free.
        layouts: That were tried.
        simulated: Steps that were simulated.
        dropped: Reasons, with how many layouts each dropped.
        seconds: That the search took.
        interrupted: Whether it was stopped before its end.
    """

    plans: list[TablePlan] = field(default_factory=list)
    searched: tuple[SearchDimension, ...] = ALL
    layouts: int = 0
    simulated: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    interrupted: bool = False

    @property
    def best(self) -> TablePlan:
        """The fastest.

        Raises:
            PlanError: If nothing fits, with the reasons.
        """
        if not self.plans:
            reasons = "; ".join(reason for reason, _ in self.dropped.most_common(4))
            raise PlanError(
                f"no plan is possible ({reasons})", remedy="more devices, devices with more memory, or smaller tables"
            )
        return self.plans[0]


def group_sizes(topology: Topology, devices: int) -> list[int]:
    """Sizes of groups that the levels suggest: whole domains of each, halves and multiples by two of them.

    Args:
        topology: The cluster.
        devices: How many are used.
    """
    found = {1, devices}
    for sizes in topology.sizes:
        for size in {sizes[0], -(-devices // sizes[0])}:  # groups as large as a domain, and one device of each domain
            one = size
            while one <= devices:
                found.add(one)
                one *= 2
    return sorted(one for one in found if devices % one == 0)


class RecommenderExplorer:
    """A search over one recommendation model and one cluster.

    Args:
        workload: What is trained.
        topology: On what.
        calibration: Constants of the cost model; None for those that ship for the device.
        devices: How many are used; None for all.
        progress: Called with a sentence now and then.
    """

    def __init__(
        self,
        workload: Recommender,
        topology: Topology,
        calibration: Calibration | None = None,
        *,
        devices: int | None = None,
        progress: Callable[[str], None] | None = None,
    ) -> None:
        self.workload, self.topology = workload, topology
        self.cost = CostModel(topology.device, calibration or calibration_for(topology.device))
        self.devices = devices or topology.devices
        if self.devices > topology.devices:
            raise PlanError(
                f"{self.devices:,} devices are asked for, the cluster has {topology.devices:,}", where=topology.name
            )
        self.samples = local_samples(workload, self.devices)
        self._progress = progress or (lambda text: None)
        self._limit = USABLE * topology.device.memory_bytes
        self._dealt: dict[tuple[int, float, int], Placement | str] = {}
        self._production: TablePlan | None = None

    def place_tables(self, layout: TableLayout) -> Placement:
        """Deal out the tables of a group.

        Args:
            layout: Its size, and how fine tables are cut.

        Raises:
            PlanError: If they do not fit.
        """
        key = (layout.group, layout.grain, layout.copied_rows)
        if key not in self._dealt:
            try:
                self._dealt[key] = self._deal(layout)
            except PlanError as error:
                self._dealt[key] = error.what
        found = self._dealt[key]
        if isinstance(found, str):
            raise PlanError(found)
        return found

    def _deal(self, layout: TableLayout) -> Placement:
        work, top, constants = self.workload, self.topology, self.cost.calibration
        empty = Placement(work, (), np.zeros(0, dtype=np.int64), layout.group)
        fixed = TableJob(work, top, layout, empty, self.cost).fixed_memory()
        ids = sum(one.count * one.lookups * work.id_bytes for one in work.tables)
        values = work.width * (work.forward_bytes + work.backward_bytes)
        buffers = 2 * self.samples * (2 * ids + 2 * values)  # twice the mean of what exchanges need
        wire = top.device.nic_bytes_per_s * constants.network
        if layout.group <= min(top.sizes[0]):
            wire = top.member_bytes_per_s(0, 0) * constants.port
        worth = top.device.memory_bytes_per_s * constants.memory / wire
        room = max(self._limit - sum(fixed.values()) - buffers, 1.0)
        return place_tables(work, layout.group, room, worth, layout.grain, layout.copied_rows)

    def job(
        self,
        layout: TableLayout,
        network: Mapping[str, NetworkSettings],
        topology: Topology | None = None,
        exchange: Exchange | None = None,
    ) -> TableJob:
        """A layout on the cluster.

        Args:
            layout: How the job is cut.
            network: Settings by level.
            topology: Another cluster than the one that tables were dealt out for; None for the same.
            exchange: Of the same groups on that cluster, if there is one already.
        """
        return TableJob(
            self.workload, topology or self.topology, layout, self.place_tables(layout), self.cost, network, exchange
        )

    def _plan(self, job: TableJob, schedule: TableSchedule) -> TablePlan:
        work = self.workload
        peak = self.devices * self.cost.device.matrix_flops_per_s
        step = job.step(schedule)
        return TablePlan(job.layout, schedule, job.network or {}, job.dealt, step, work.batch, work.flops, peak)

    def production(self) -> TablePlan:
        """The baseline: how recommendation models are trained in one building, taken to several.

        Tables over all devices, none twice (Neo, TorchRec), ids of the next batch exchanged beside the computation,
        dense gradients reduced beside the rest of the step, all at once or, where they are more than 25 MiB, in two
        parts (PyTorch's buckets), the library's own network settings. How fine tables are cut and which are copied to
        every device is the best under these rules, as a sharding planner would find it.

        Raises:
            PlanError: If nothing fits.
        """
        if self._production is None:
            found = TableExploration()
            network = production_network(self.topology)
            many = self.workload.dense_parameters * self.workload.gradient_bytes > _BUCKET
            schedule = TableSchedule(reduction="split" if many else "whole")
            for layout in self._cuts(self.devices, INSIDE[0]):
                self._simulate(layout, [network], [schedule], found)
            found.plans.sort(key=lambda plan: plan.seconds)
            self._production = found.best
        return self._production

    def again(self, plan: TablePlan, topology: Topology) -> TableStep:
        """A plan as it is, on another cluster: what a change of the network would do to it.

        Args:
            plan: Layout, placement, schedule and settings stay.
            topology: With as many devices at least.
        """
        cost = CostModel(topology.device, self.cost.calibration)
        job = TableJob(self.workload, topology, plan.layout, plan.dealt, cost, plan.network)
        return job.step(plan.schedule)

    def _cuts(self, group: int, order: tuple[Any, Any]) -> Iterator[TableLayout]:
        """Layouts of a group, one for each different way to deal out tables, or to fail."""
        seen: list[tuple[Any, ...]] = []
        for rows, grain in product(COPIED_ROWS, GRAINS):
            layout = TableLayout(group, self.devices // group, order, grain, rows)
            try:
                way: tuple[Any, ...] = (copied(self.workload, rows), self.place_tables(layout).shards)
            except PlanError as error:
                way = (error.what,)
            if way not in seen:
                seen.append(way)
                yield layout

    def _layouts(self) -> Iterator[TableLayout]:
        for group in group_sizes(self.topology, self.devices):
            orders = INSIDE if 1 < group < self.devices else INSIDE[:1]
            for order in orders:
                yield from self._cuts(group, order)

    def _simulate(
        self,
        layout: TableLayout,
        networks: list[dict[str, NetworkSettings]],
        schedules: Iterable[TableSchedule],
        found: TableExploration,
    ) -> None:
        """Add the best plan of a layout."""
        found.layouts += 1
        try:
            self.place_tables(layout)
        except PlanError as error:
            found.dropped[error.what] += 1
            return
        best: TablePlan | None = None
        exchange = Exchange(self.topology, layout.group, layout.copies, layout.order)
        for network in networks:
            job = self.job(layout, network, exchange=exchange)
            for schedule in schedules:
                if schedule.chunks > self.samples:
                    continue
                needed = sum(job.memory(schedule).values())
                if needed > self._limit:
                    over = (needed - self._limit) / 1e9
                    found.dropped[f"tables over {layout.group:,} devices: {over:,.1f} GB more than a device has"] += 1
                    continue
                if best is not None and job.bound(schedule) >= best.seconds:
                    continue
                plan = self._plan(job, schedule)
                found.simulated += 1
                if best is None or plan.seconds < best.seconds:
                    best = plan
        if best is not None:
            found.plans.append(best)

    def explore(self, only: Iterable[SearchDimension] = ALL) -> TableExploration:
        """Search; what is not searched is as in :meth:`production`, which is among what is tried.

        An interrupt (Ctrl-C) ends the search with what was found until then.

        Args:
            only: Dimensions that are free. Placement: groups, their place on the cluster, how tables are cut;
                scheduling: order of a step, chunks; network: settings of every level.
        """
        begin = time.perf_counter()
        free = tuple(one for one in ALL if one in set(only))
        found = TableExploration(searched=free)
        base = self.production()
        networks = [production_network(self.topology)]
        if "network" in free:
            networks.append(tuned_network(self.topology))
        schedules = SCHEDULES if "scheduling" in free else (base.schedule,)
        try:
            for layout in self._layouts() if "placement" in free else [base.layout]:
                self._simulate(layout, networks, schedules, found)
                self._progress(f"{found.simulated:,} steps simulated")
        except KeyboardInterrupt:
            found.interrupted = True
            found.plans.append(base)
        found.plans.sort(key=lambda plan: plan.seconds)
        found.seconds = time.perf_counter() - begin
        return found
