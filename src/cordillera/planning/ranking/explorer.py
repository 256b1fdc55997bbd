"""The search for the best plan of a recommendation model: placement of tables, order of a step, network settings.

Sizes of groups follow from the levels of the cluster, tables are dealt out for each, and every layout is simulated
under every schedule. A step has so few operations that no estimate is needed first.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

from cordillera.cost import Calibration, CostModel
from cordillera.errors import PlanError
from cordillera.numbers import counted, in_gigabytes
from cordillera.planning.network.settings import NetworkSettings, production_network, tuned_network
from cordillera.planning.ranking.exchange import INSIDE, Exchange, Reduction, TableLayout, TableSchedule
from cordillera.planning.ranking.step import TableJob, TableStep, fixed_memory, local_samples
from cordillera.planning.ranking.workload import PlacedTables, Recommender, copied, place_tables
from cordillera.planning.search import ALL, ClusterSearch, SearchDimension, SearchResult
from cordillera.topology import Topology

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
    """One way to run a job, with its predicted step.

    Attributes:
        layout: Groups, copies and the cutting of tables.
        schedule: Order of the operations of a step.
        network: Network settings by level.
        dealt: Placement of every part of a table in its group.
        step: The simulated step.
        samples: Samples per step, over all devices.
        flops: FLOPs of the model's own arithmetic in a step.
        peak: FLOPs per second of all devices' matrix engines.
    """

    layout: TableLayout
    schedule: TableSchedule
    network: Mapping[str, NetworkSettings]
    dealt: PlacedTables
    step: TableStep
    samples: int
    flops: float
    peak: float

    @property
    def seconds(self) -> float:
        """Time of a step in seconds."""
        return self.step.seconds

    @property
    def samples_per_s(self) -> float:
        """Samples per second of all devices."""
        return self.samples / self.seconds

    @property
    def across(self) -> str:
        """Name of the dimension that crosses the outermost links."""
        return self.layout.across

    @property
    def utilisation(self) -> float:
        """Model FLOPs as a fraction of the peak of all devices (MFU)."""
        return self.flops / (self.seconds * self.peak)

    @property
    def cut(self) -> str:
        """Number of tables cut in each way, and of those copied to every device, in words."""
        words = {"whole": "whole", "columns": "in columns", "rows": "in rows", "both": "in rows and columns"}
        words["copied"] = "on every device"
        return ", ".join(f"{count} {words[way]}" for way, count in self._ways().items() if count)

    def _ways(self) -> dict[str, int]:
        """Return how many tables are cut in each way, and how many are copied to every device."""
        everywhere = copied(self.dealt.workload, self.layout.copied_rows)
        return {**self.dealt.ways(), "copied": sum(one.count for one in everywhere)}

    def to_json(self) -> dict[str, Any]:
        """Return the prediction and all that a training run needs to follow the plan, except the placement."""
        grain, sizes = self.layout.grain, self.layout.sizes
        return {
            "layout": asdict(self.layout) | {"grain": grain if math.isfinite(grain) else None},
            "mesh": {"names": list(reversed(sizes)), "sizes": list(reversed(sizes.values()))},
            "tables": self._ways(),
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
        """Return every part of a table and its device within a group; tables copied to every device have none."""
        pairs = zip(self.dealt.shards, self.dealt.devices.tolist(), strict=True)
        return [shard._asdict() | {"device": device} for shard, device in pairs]


@dataclass
class TableExploration(SearchResult[TablePlan]):
    """Result of a search, with the best schedule and settings of every layout.

    Attributes:
        layouts: Number of layouts that were tried.
    """

    layouts: int = 0

    def no_plan(self) -> PlanError:
        """Return the error that nothing fits, with the reasons."""
        reasons = "; ".join(reason for reason, _ in self.dropped.most_common(4))
        return PlanError(
            f"no plan is possible ({reasons})", remedy="more devices, devices with more memory, or smaller tables"
        )


def group_sizes(topology: Topology, devices: int) -> list[int]:
    """Return the sizes of groups that the levels suggest: whole domains, and their halves and multiples by two.

    They divide the ``devices`` in use of the cluster ``topology``.
    """
    found = {1, devices}
    for sizes in topology.sizes:
        for size in {sizes[0], -(-devices // sizes[0])}:  # groups as large as a domain, and one device of each domain
            one = size
            while one <= devices:
                found.add(one)
                one *= 2
    return sorted(one for one in found if devices % one == 0)


def _check_kind(topology: Topology, devices: int) -> None:
    """Check that the first ``devices`` of ``topology`` are of the cluster's own kind."""
    if topology.kind_of[:devices].any():
        raise PlanError(
            "recommendation models are planned for one kind of devices",
            where=topology.name,
            remedy="leave groups out, or --devices that are all of the cluster's own kind",
        )


class RecommenderExplorer(ClusterSearch[Recommender]):
    """A search over one recommendation model and one cluster; arguments are as in :class:`ClusterSearch`."""

    def __init__(
        self,
        workload: Recommender,
        topology: Topology,
        calibration: Calibration | None = None,
        *,
        devices: int | None = None,
        progress: Callable[[str], None] | None = None,
    ) -> None:
        super().__init__(workload, topology, calibration, devices=devices, progress=progress)
        _check_kind(topology, self.devices)
        self.samples = local_samples(workload, self.devices)
        self._dealt: dict[tuple[int, float, int], PlacedTables | str] = {}
        self._production: TablePlan | None = None

    def place_tables(self, layout: TableLayout) -> PlacedTables:
        """Place the tables of a group; the layout gives its size and how tables are cut.

        Raises:
            PlanError: If the tables do not fit.
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

    def _deal(self, layout: TableLayout) -> PlacedTables:
        work, top, constants = self.workload, self.topology, self.cost.calibration
        fixed = fixed_memory(work, self.samples, copied(work, layout.copied_rows))
        ids = sum(one.count * one.lookups * work.id_bytes for one in work.tables)
        values = work.width * (work.forward_bytes + work.backward_bytes)
        buffers = 2 * self.samples * (2 * ids + 2 * values)  # twice the mean need of the exchanges
        wire = top.device.nic_bytes_per_s * constants.network
        if layout.group <= min(top.sizes[0]):
            wire = top.member_bytes_per_s(0, 0) * constants.port
        worth = top.device.memory_bytes_per_s * constants.memory / wire
        room = max(self.usable_memory - sum(fixed.values()) - buffers, 1.0)
        return place_tables(work, layout.group, room, worth, layout.grain, layout.copied_rows)

    def job(
        self, layout: TableLayout, network: Mapping[str, NetworkSettings], exchange: Exchange | None = None
    ) -> TableJob:
        """Return the job of a ``layout`` on the cluster, with the settings ``network`` by level.

        An existing ``exchange`` of the same groups can be given; None to make one.
        """
        return TableJob(self.workload, self.topology, layout, self.place_tables(layout), self.cost, network, exchange)

    def production(self) -> TablePlan:
        """Return the baseline: recommendation training as practised in one building, applied to several.

        Tables are cut over all devices without copies (Neo, TorchRec); ids of the next batch are exchanged during the
        computation; dense gradients are reduced beside the rest of the step, all at once or, above 25 MiB, in two parts
        (PyTorch's buckets); the network settings are the library's own. The cutting of tables and the choice of copied
        tables are the best under these rules, as a sharding planner would find them.

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
            found.sort()
            self._production = found.best
        return self._production

    def again(self, plan: TablePlan, topology: Topology) -> TableStep:
        """Simulate an unchanged ``plan`` on another ``topology`` of at least as many devices.

        Raises:
            PlanError: If devices of another kind than the cluster's own come into use.
        """
        _check_kind(topology, plan.layout.devices)
        cost = CostModel(topology.device, self.cost.calibration)
        job = TableJob(self.workload, topology, plan.layout, plan.dealt, cost, plan.network)
        return job.step(plan.schedule)

    def fullest(self, plan: TablePlan, step: TableStep, topology: Topology) -> tuple[float, float]:
        """Return the bytes that ``step`` of a ``plan`` takes on the fullest device of ``topology``, and its own."""
        return step.memory_bytes, topology.device.memory_bytes

    def _cuts(self, group: int, order: tuple[Any, Any]) -> Iterator[TableLayout]:
        """Iterate over layouts of a group, one for each distinct placement of tables or failure."""
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
        found.layouts += 1
        try:
            self.place_tables(layout)
        except PlanError as error:
            found.dropped[error.what] += 1
            return
        best: TablePlan | None = None
        work, peak = self.workload, self.devices * self.cost.device.matrix_flops_per_s
        exchange = Exchange(self.topology, layout.group, layout.copies, layout.order)
        for network in networks:
            job = self.job(layout, network, exchange=exchange)
            for schedule in schedules:
                if schedule.chunks > self.samples:
                    continue
                needed = sum(job.memory(schedule).values())
                if needed > self.usable_memory:
                    over, among = in_gigabytes(needed - self.usable_memory), counted(layout.group, "device")
                    found.dropped[f"tables over {among}: {over} GB more than a device has"] += 1
                    continue
                if best is not None and job.bound(schedule) >= best.seconds:
                    continue
                step = job.step(schedule)
                found.simulated += 1
                if best is None or step.seconds < best.seconds:
                    best = TablePlan(layout, schedule, network, job.dealt, step, work.batch, work.flops, peak)
        if best is not None:
            found.plans.append(best)

    def explore(self, only: Iterable[SearchDimension] = ALL) -> TableExploration:
        """Search for the best plan; dimensions that are not searched are as in :meth:`production`.

        The baseline is among the plans tried. An interrupt (Ctrl-C) ends the search and keeps what was found.

        Args:
            only: Dimensions to search. Placement: groups, their place on the cluster, how tables are cut; scheduling:
                order of a step, chunks; network: settings of every level.
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
        found.sort()
        found.seconds = time.perf_counter() - begin
        return found
