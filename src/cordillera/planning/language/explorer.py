"""The search for the best plan: placement, schedule and network settings, together or one of them alone.

The problem is that of ScaleAcross Explorer (arXiv 2605.24326), of which only the abstract and summaries were available;
the search is our own. Layouts are enumerated. Those that are impossible or do not fit are dropped with the reason, the
rest are ranked by the analytic estimate, and the best are simulated under every schedule that fits the memory.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import gcd
from typing import Any

from cordillera.errors import PlanError
from cordillera.partition import divisors
from cordillera.planning.language.job import PlannedJob
from cordillera.planning.language.own_layout import OwnLayout
from cordillera.planning.language.plans import Exploration, Plan
from cordillera.planning.language.step import SimulatedStep, families, held, simulate_step, stage_seconds, ways
from cordillera.planning.language.workload import PRODUCTION_ORDER, Layout, Recompute, Workload
from cordillera.planning.network.mesh import Mesh
from cordillera.planning.network.settings import NetworkSettings, production_network, tuned_network
from cordillera.planning.pipeline.problem import Problem
from cordillera.planning.pipeline.schedules import Schedule
from cordillera.planning.pipeline.tuning import shortest
from cordillera.planning.search import ALL, USABLE_MEMORY, ClusterSearch, SearchDimension, cost_models
from cordillera.topology import Device, Topology

ORDERS = (PRODUCTION_ORDER, ("tensor", "context", "data", "pipeline"), ("tensor", "pipeline", "context", "data"))
_FIXED = {"interleaved", "1f1b"}  # schedules if scheduling is not searched
_DEPENDENT = {"shards", "chunks", "sequence_parallel"}  # fields that depend on the degrees
MICROBATCHES = (1, 2, 4, 8)  # sequences per microbatch
_NEIGHBOURS = 4  # neighbours of a plan in each respect that the local search tries
_SHORTEST_PART = 2048  # least tokens of a sequence on a device if sequences are cut
_EFFORT = 0.25  # effort for making a schedule, relative to a search of schedules alone
_LITTLE = 0.005  # relative distance to the bound below which a plan keeps its schedule
_MOST_ACTIONS = 300_000  # forward passes of a simulated step; memory and time grow with their number
_MOST_TENSOR = 8  # largest tensor degree of the baseline, as in large jobs, even on larger hosts
_FREELY = 64  # layouts simulated for a baseline if none follows the rules


def _computes_alike(one: Device, other: Device) -> bool:
    """Return whether products that were measured on one device hold for another."""
    keys = ("name", "matrix_flops_per_s", "memory_bytes_per_s", "processors")
    return all(getattr(one, key) == getattr(other, key) for key in keys)


def _lengthy(layout: Layout, order: Sequence[str]) -> tuple[str, ...]:
    """Return an order without the dimensions of size 1; equal results place the ranks equally."""
    return tuple(name for name in order if getattr(layout, name) > 1)


def _distinct(plans: Iterable[Plan]) -> list[Plan]:
    """Return the best plan of those that place the ranks and cut the job equally, best first."""
    found: dict[tuple[Layout, tuple[str, ...]], Plan] = {}
    for plan in sorted(plans, key=lambda plan: plan.seconds):
        found.setdefault((plan.layout, _lengthy(plan.layout, plan.order)), plan)
    return list(found.values())


def _respect(plan: Plan, job: PlannedJob) -> str | None:
    """Return the one respect in which a job differs from a plan, or None.

    Two degrees, with what depends on them, count as one respect.
    """
    one, other = vars(plan.layout), vars(job.layout)
    differing = {name for name in one if one[name] != other[name]}
    if plan.order != job.mesh.order:
        return None if differing else "order"
    degrees = differing & set(PRODUCTION_ORDER)
    if len(degrees) == 2 and differing - degrees <= _DEPENDENT:
        return "degrees"
    if differing and differing <= {"shards", "shard_weights", "shard_gradients"}:
        return "sharding"
    return differing.pop() if len(differing) == 1 else None


def _powers(limit: int) -> list[int]:
    return [1 << i for i in range(limit.bit_length()) if 1 << i <= limit]


def _divisors(number: int, limit: int) -> list[int]:
    return [one for one in divisors(number) if one <= limit]


def inner_degrees(workload: Workload, host: int) -> list[tuple[int, int]]:
    """Return the pairs of tensor and context degrees to try; they determine a device's work for a layer.

    Tensor parallelism of the ``workload`` stays within the ``host`` devices of a host.
    """
    return list(product(_powers(host), _powers(max(1, workload.sequence // _SHORTEST_PART))))


def expert_degrees(workload: Workload) -> list[int]:
    """Return the numbers of devices over which to spread the experts of a layer."""
    experts = workload.model.experts
    return [1] if experts is None else _powers(experts.count)


def layouts(workload: Workload, topology: Topology, devices: int) -> Iterator[Layout]:
    """Iterate over the layouts of a ``workload`` on a number of ``devices``.

    Tensor, context and expert degrees are powers of two; tensor parallelism stays within a host of ``topology``;
    pipelines may have any length.
    """
    model = workload.model
    experts = expert_degrees(workload)
    recomputes: tuple[Recompute, ...] = ("none", "selective", "full")
    degrees = [
        (tensor, context, pipeline)
        for tensor, context in inner_degrees(workload, min(topology.sizes[0]))
        if devices % (tensor * context) == 0
        for pipeline in _divisors(devices // (tensor * context), model.layers)
    ]
    for tensor, context, pipeline in degrees:
        data = devices // (tensor * context * pipeline)
        most = model.layers // pipeline
        chunked = set(_powers(most)) | (set(_divisors(most, most)) if model.layers % pipeline == 0 else set())
        # one layer for each stage, and an embedding alone at one end or both
        chunked |= {(model.layers + ends) // pipeline for ends in (1, 2) if not (model.layers + ends) % pipeline}
        for chunks, microbatch, recompute in product(sorted(chunked), MICROBATCHES, recomputes):
            if (pipeline == 1 and chunks > 1) or workload.batch % (data * microbatch):
                continue
            for expert in experts:
                if data % expert:
                    continue
                plain = Layout(
                    tensor=tensor,
                    context=context,
                    expert=expert,
                    pipeline=pipeline,
                    data=data,
                    shards=data,
                    chunks=chunks,
                    microbatch=microbatch,
                    sequence_parallel=tensor > 1,
                    recompute=recompute,
                    overlap_gradients=True,
                    fp8=workload.fp8,
                )
                yield plain
                if pipeline > 1 and data > 1:
                    yield replace(plain, shard_gradients=True)
                for shards in _shards(topology, plain):
                    yield replace(plain, shards=shards, shard_weights=True)


def _shards(topology: Topology, layout: Layout) -> list[int]:
    """Return the numbers of copies over which weights may be cut: all, or those in a domain of some level (HSDP)."""
    inside = layout.tensor * layout.context
    found = {layout.data} - {1}
    for least in topology.least_sizes[:-1]:
        for stride in (inside, inside * layout.pipeline):
            copies, rest = divmod(least, stride)
            if copies > 1 and not rest and layout.data % copies == 0 and copies % layout.expert == 0:
                found.add(copies)
    return sorted(found)


def divisible(workload: Workload, topology: Topology) -> set[int]:
    """Return the numbers of devices of ``topology`` over which batch and layers of ``workload`` can be divided."""
    powers = _powers(max(topology.sizes[0]) * max(1, workload.sequence // _SHORTEST_PART))
    copies = _divisors(workload.batch, topology.devices)
    flat = {a * b for a, b in product(powers, copies) if a * b <= topology.devices}
    return {one * p for one in flat for p in range(1, min(workload.model.layers, topology.devices // one) + 1)}


class Explorer(ClusterSearch[Workload]):
    """A search over one language model and one cluster."""

    _production: Plan | None = None

    def job(
        self,
        layout: Layout,
        order: Sequence[str],
        network: Mapping[str, NetworkSettings],
        shared: dict[Any, Any] | None = None,
        late: float = 0.0,
    ) -> PlannedJob:
        """Return the job of a ``layout`` on the cluster, with its dimensions in ``order``, innermost first.

        ``network`` holds the settings by level. ``shared`` caches what jobs with the same settings have in common; it
        is filled. ``late`` is that of :class:`~cordillera.planning.network.fabric.Fabric`.
        """
        mesh = Mesh.of(self.topology, layout, order)
        return PlannedJob(self.workload, mesh, layout, self.costs, network, shared, late)

    def production(self) -> Plan:
        """Return the baseline: the best known practice, applied to this cluster.

        It is the faster of two. The first are the layouts with which others trained the model
        (:attr:`~cordillera.planning.language.workload.Workload.published`), with as many copies as the devices hold.
        The second follows the rules of large jobs in one building: tensor parallelism over the devices of a host, 8 at
        most; a microbatch is one sequence; a pipeline rank has four chunks if the layers allow it; the length of the
        pipeline and the recomputation are the best under these rules, as an engineer would choose them. In both, data
        parallelism is outermost, with copies across buildings; the schedule is interleaved 1F1B; the network settings
        are the library's own. If nothing fits, the rules for degrees and chunks are dropped.

        Raises:
            PlanError: If nothing fits.
        """
        if self._production is None:
            found = self._baselines()
            published = map(self._simulated_as_published, dict.fromkeys(self._published()))
            found.plans += [plan for plan in published if plan is not None]
            found.sort()
            if not found.plans:
                found = self._baselines(by_the_rules=False)
            if not found.plans:
                found.enough = self._enough(more=math.isfinite(found.least_memory))
            self._production = found.best
        return self._production

    @property
    def base_source(self) -> str:
        """Where the layout of :meth:`production` comes from, in words."""
        layout = self.production().layout
        same = [
            entry for entry, scaled in zip(self.workload.published, self._scaled(), strict=True) if scaled == layout
        ]
        if same:
            entry = min(same, key=lambda one: abs(one.devices - self.devices))
            precision = "in 16 bits " if layout.fp8 != "none" else ""
            return f"{layout}, published {precision}for {entry.devices:,} devices ({entry.source})"
        if self._follows_the_rules(layout):
            return f"{layout}, the best under the rules of large jobs in one building"
        return f"{layout}, the fastest that fits; none does by the rules of large jobs in one building"

    def _follows_the_rules(self, layout: Layout) -> bool:
        """Return whether a layout is one of those by rule of :meth:`production`."""
        tensor = _largest(gcd(self.workload.model.heads, self.devices), min(_MOST_TENSOR, *self.topology.sizes[0]))
        degrees = (layout.tensor, layout.context, layout.microbatch)
        return degrees == (tensor, 1, 1) and layout.chunks == self._fixed_chunks(layout)

    def _scaled(self) -> list[Layout | None]:
        """Return the published layouts scaled to all devices; None for a layout that does not divide their number."""
        found: list[Layout | None] = []
        for entry in self.workload.published:
            one = entry.layout
            data, rest = divmod(self.devices, one.tensor * one.context * one.pipeline)
            shards = data if one.shards == one.data else one.shards
            layout = replace(one, data=data, shards=shards, fp8=self.workload.fp8)
            found.append(None if rest or not data or layout.problems(self.workload) else layout)
        return found

    def _published(self) -> list[Layout]:
        return [layout for layout in self._scaled() if layout is not None]

    def _simulated_as_published(self, layout: Layout) -> Plan | None:
        """Return the plan of a published layout, or None if it does not fit the memory."""
        job = self.job(layout, PRODUCTION_ORDER, production_network(self.topology))
        return self._simulated(job, _FIXED, Exploration())

    def _enough(self, more: bool) -> int | None:
        """Return the number of devices nearest to the requested one that can be planned, or None.

        If more are needed, the number is doubled first.
        """
        numbers = sorted(divisible(self.workload, self.topology), key=lambda one: (abs(one - self.devices), -one))
        if more:
            doubled = [self.devices << i for i in range(1, 32) if self.devices << i <= self.topology.devices]
            numbers = [*doubled, *(one for one in numbers if one > self.devices)]
        for one in numbers[:16]:
            other = Explorer(self.workload, self.topology, self.calibration, products=self.cost.products, devices=one)
            if other._baselines().plans or any(map(other._simulated_as_published, other._published())):
                return one
        return None

    def _baselines(self, by_the_rules: bool = True) -> Exploration:
        """Return the layouts that follow the rules of the baseline, with their schedule, best first."""
        found = Exploration()
        network, shared = production_network(self.topology), {}  # type: ignore[var-annotated]
        tensor = _largest(gcd(self.workload.model.heads, self.devices), min(_MOST_TENSOR, *self.topology.sizes[0]))
        jobs = []
        for layout in self._possible(found):
            if by_the_rules and (
                (layout.tensor, layout.context, layout.microbatch) != (tensor, 1, 1)
                or layout.chunks != self._fixed_chunks(layout)
            ):
                continue
            job = self.job(layout, PRODUCTION_ORDER, network, shared)
            if by_the_rules or self._holds(job, found):
                jobs.append(job)
        if not by_the_rules:
            jobs = sorted(jobs, key=lambda job: job.estimate().seconds)[:_FREELY]
        for job in jobs:
            plan = self._simulated(job, _FIXED, found)
            if plan is not None:
                found.plans.append(plan)
        found.sort()
        return found

    def _fixed_chunks(self, layout: Layout) -> int:
        if layout.pipeline == 1:
            return 1
        return max(one for one in (1, 2, 4) if one * layout.pipeline <= self.workload.model.layers)

    def again(self, plan: Plan, topology: Topology) -> SimulatedStep:
        """Simulate an unchanged ``plan`` on another ``topology`` of at least as many devices."""
        mesh, costs = Mesh.of(topology, plan.layout, plan.order), self.costs
        used = set(topology.kind_of[: plan.layout.devices].tolist())  # more or fewer members bring others into use
        if topology.kinds != self.topology.kinds or used != set(self.costs):
            products = self.cost.products if _computes_alike(topology.device, self.topology.device) else None
            costs = cost_models(topology, plan.layout.devices, self.calibration, products)
        return simulate_step(PlannedJob(self.workload, mesh, plan.layout, costs, plan.network), plan.schedule)

    def evaluate(self, own: OwnLayout) -> Plan:
        """Simulate a person's own layout, whether or not it fits the memory; see :meth:`fits`.

        Raises:
            PlanError: If the layout cannot run the schedule, or the step has too many actions.
        """
        network = tuned_network if own.network == "tuned" else production_network
        job = self.job(own.layout, own.order, network(self.topology))
        where = f"layout {own.text}"
        if job.microbatches * job.layout.stages > _MOST_ACTIONS:
            raise PlanError(
                f"{job.microbatches:,} microbatches of {job.layout.stages} stages are more than {_MOST_ACTIONS:,} "
                "actions of a pipeline rank's group, the most that is simulated",
                where=where,
                remedy="larger microbatches or fewer chunks",
            )
        makers = families(job)
        name = own.schedule or ("1f1b" if own.layout.chunks == 1 else "interleaved")
        make = {key.lower(): maker for key, maker in makers.items()}.get(name.lower())
        if make is None:
            known = ", ".join(makers) or "none: chunks above 1 need a pipeline"
            raise PlanError(f"cannot run the schedule {name[:40]!r}", where=where, remedy=f"it can run {known}")
        return self._plan(job, make())

    def evaluate_all(self, stated: Iterable[OwnLayout]) -> Exploration:
        """Simulate layouts as they are ``stated``; the plans of the result are those that fit the memory.

        Raises:
            PlanError: As from :meth:`evaluate`.
        """
        begin = time.perf_counter()
        found = Exploration(searched=())
        for own in stated:
            found.own.append(self.evaluate(own))
            found.simulated += 1
        found.plans = [plan for plan in found.own if self.fits(plan)]
        found.sort()
        if len(found.own) > len(found.plans):
            found.dropped["needs more memory than a device has"] = len(found.own) - len(found.plans)
        found.seconds = time.perf_counter() - begin
        return found

    def fits(self, plan: Plan) -> bool:
        """Return whether every device of a ``plan`` has the memory."""
        limits = self.limits(Mesh.of(self.topology, plan.layout, plan.order))
        return all(sum(rank.values()) <= limit for rank, limit in zip(plan.step.memory, limits, strict=True))

    def fullest(self, plan: Plan, step: SimulatedStep, topology: Topology) -> tuple[float, float]:
        """Return the bytes needed and available on the device of ``topology`` that lacks the most memory in ``step``.

        The ``step`` is that of ``plan``.
        """
        room = Mesh.of(topology, plan.layout, plan.order).memory
        needed = [sum(rank.values()) for rank in step.memory]
        return max(zip(needed, room, strict=True), key=lambda both: both[0] - USABLE_MEMORY * both[1])

    def limits(self, mesh: Mesh) -> list[float]:
        """Return the bytes that a plan may take on a device of each pipeline rank of ``mesh``."""
        return [USABLE_MEMORY * size for size in mesh.memory]

    def _plan(self, job: PlannedJob, schedule: Schedule) -> Plan:
        step = simulate_step(job, schedule)
        # None for several kinds of devices too; no measured step had FP8, experts or sharded weights
        is_alike = job.layout.fp8 == "none" and self.workload.model.experts is None and not job.layout.shard_weights
        error = self.cost.calibration.error if is_alike else None
        return Plan(
            job.layout, job.mesh.order, job.network or {}, schedule, step, self.workload.flops, job.mesh.peak, error
        )

    def _possible(self, found: Exploration) -> Iterator[Layout]:
        for layout in layouts(self.workload, self.topology, self.devices):
            problems = layout.problems(self.workload)
            if problems:
                found.dropped[problems[0]] += 1
            else:
                yield layout

    def _simulated(self, job: PlannedJob, only: set[str] | None, found: Exploration) -> Plan | None:
        """Return the plan with the best schedule of a layout that fits the memory, or None."""
        best: Plan | None = None
        if job.busiest >= min((plan.seconds for plan in found.plans), default=float("inf")):
            found.dropped["computes for longer than a plan that was found"] += 1
            return None
        if job.microbatches * job.layout.stages > _MOST_ACTIONS:
            found.dropped[f"more than {_MOST_ACTIONS:,} actions (microbatches times stages)"] += 1
            return None
        limits = self.limits(job.mesh)
        for name, make in families(job).items():
            if only is not None and name not in only:
                continue
            schedule = make()
            needed = [sum(rank.values()) for rank in held(job, schedule)]
            if any(size > limit for size, limit in zip(needed, limits, strict=True)):
                found.dropped[f"{name} needs more memory than a device has"] += 1
                found.least_memory = min(found.least_memory, max(needed))
                continue
            plan = self._plan(job, schedule)
            found.simulated += 1
            if best is None or plan.seconds < best.seconds:
                best = plan
        return best

    def _with_its_own(self, plan: Plan) -> Plan | None:
        """Return a plan with a schedule made for it, or None if there is nothing to gain."""
        job = self.job(plan.layout, plan.order, plan.network)
        schedule, room = plan.schedule, self.limits(job.mesh)
        limits = []
        for rank in range(schedule.ranks):
            stages = schedule.stages_of(rank)
            largest = max(job.kept[stage] for stage in stages)
            fit = bisect_right(
                range(1, len(stages) * schedule.microbatches + 1),
                room[rank],
                key=lambda live, stages=stages, size=largest: sum(job.held(stages, live * size).values()),  # type: ignore[misc]
            )
            if fit < len(stages):  # unequal stages may still fit, which this bound does not detect
                return None
            limits.append(fit)
        problem = Problem.of(
            schedule.rank_of, schedule.microbatches, stage_seconds(job, schedule), ways(job), limits, split=True
        )
        if plan.step.timeline.seconds <= (1 + _LITTLE) * problem.bound:
            return None
        own = shortest(problem, _EFFORT)
        return replace(plan, schedule=own, step=simulate_step(job, own))

    def explore(self, only: Iterable[SearchDimension] = ALL, *, keep: int = 16, improve: int = 2) -> Exploration:
        """Search for the best plan; dimensions that are not searched are as in :meth:`production`.

        If more than one dimension is free, each is searched alone first, so that a search is never worse than a smaller
        one. An interrupt (Ctrl-C) ends the search and keeps what was found.

        Args:
            only: Dimensions to search. Placement: degrees and which dimension crosses which links; scheduling: order of
                microbatches, chunks, microbatch size, recomputation; network: settings of every level.
            keep: Number of layouts of each order that are simulated.
            improve: Number of the best plans that get schedules of their own, if scheduling is searched.
        """
        begin = time.perf_counter()
        free = tuple(one for one in ALL if one in set(only))
        found = Exploration(searched=free)
        base = self.production()
        found.plans.append(base)
        try:
            for one in free if len(free) > 1 else ():
                self._progress(f"searching {one} alone")
                alone = Exploration(plans=[base])
                try:
                    self._search((one,), base, alone, keep, improve)
                finally:
                    found.take(one, alone)
            self._progress(f"searching {', '.join(free)}")
            self._search(free, base, found, keep, improve)
        except KeyboardInterrupt:
            found.interrupted = True
        found.plans = _distinct(found.plans)
        found.seconds = time.perf_counter() - begin
        return found

    def _search(
        self, free: tuple[SearchDimension, ...], base: Plan, found: Exploration, keep: int, improve: int
    ) -> None:
        network = tuned_network(self.topology) if "network" in free else dict(base.network)
        orders: list[tuple[str, ...]] = [base.order]
        if "placement" in free:
            cut = self.workload.sequence > _SHORTEST_PART
            orders = [one for one in ORDERS if cut or one[:2] == ("tensor", "context")]
        schedules = None if "scheduling" in free else _FIXED
        ranked: dict[tuple[str, ...], list[tuple[float, int, PlannedJob]]] = {order: [] for order in orders}
        shared: dict[Any, Any] = {}
        seen: set[tuple[Layout, tuple[str, ...]]] = set()
        for layout in self._possible(found):
            if not self._allowed(layout, base.layout, free):
                continue
            for order in orders:
                way = (layout, _lengthy(layout, order))
                if way in seen:
                    continue
                seen.add(way)
                job = self.job(layout, order, network, shared)
                if not self._holds(job, found):
                    break  # no order fits
                found.estimated += 1
                ranked[order].append((job.estimate().seconds, len(ranked[order]), job))
                if found.estimated % 500 == 0:
                    self._progress(f"{found.estimated:,} layouts estimated")
        tried: dict[tuple[Layout, tuple[str, ...]], Plan | None] = {}

        def simulated(job: PlannedJob) -> Plan | None:
            key = (job.layout, job.mesh.order)
            if key not in tried:
                tried[key] = self._simulated(job, schedules, found)
                found.plans += [plan for plan in [tried[key]] if plan is not None]
                self._progress(f"{found.simulated:,} steps simulated")
            return tried[key]

        for order in orders:
            ranked[order].sort(key=lambda entry: entry[:2])
            fit = 0
            for _, _, job in ranked[order][: 4 * keep]:
                fit += simulated(job) is not None
                if fit == keep:
                    break
        everything = sorted((entry for order in orders for entry in ranked[order]), key=lambda entry: entry[:2])
        self._climb([job for _, _, job in everything], simulated, [plan for plan in tried.values() if plan])
        best = [plan for plan in _distinct(found.plans) if plan.layout.pipeline > 1] if schedules is None else []
        for plan in best[:improve]:
            self._progress(f"a schedule made for {plan.layout}")
            own = self._with_its_own(plan)
            if own is not None:
                found.simulated += 1
                found.plans.append(own)

    def outlook(self, chunks: Collection[int]) -> float:
        """Return the estimated seconds of the fastest of a few layouts that fit, or infinity if none does.

        The layouts have one sequence per microbatch and one of the given numbers of chunks per pipeline rank, and do
        not shard weights.
        """
        best, network, shared = math.inf, tuned_network(self.topology), {}  # type: ignore[var-annotated]
        for layout in self._possible(Exploration()):
            if layout.microbatch == 1 and layout.chunks in chunks and not layout.shard_weights:
                job = self.job(layout, PRODUCTION_ORDER, network, shared)
                if self._lacking(job) <= 0.0:
                    best = min(best, job.estimate().seconds)
        return best

    def _climb(
        self, jobs: Sequence[PlannedJob], simulated: Callable[[PlannedJob], Plan | None], begin: Sequence[Plan]
    ) -> None:
        """Move from the best plan to a better neighbour, as long as there is one.

        Neighbours differ in one respect; ``jobs`` are tried in the order of their estimates. The estimate that chose
        the first plans ignores latencies and knows one schedule only; this search corrects it.
        """
        best = min(begin, key=lambda plan: plan.seconds, default=None)
        better = best
        while better is not None:
            best, better = better, None
            tried: Counter[str] = Counter()
            for job in jobs:
                respect = _respect(best, job)
                if respect is None or tried[respect] == _NEIGHBOURS:
                    continue
                tried[respect] += 1
                plan = simulated(job)
                if plan is not None and plan.seconds < (better or best).seconds:
                    better = plan

    def _holds(self, job: PlannedJob, found: Exploration) -> bool:
        """Return whether devices have the memory under some schedule; if not, record it."""
        lacking = self._lacking(job)
        if lacking > 0.0:
            found.dropped["needs more memory than a device has"] += 1
            found.least_memory = min(found.least_memory, self.usable_memory + lacking)
        return lacking <= 0.0

    def _lacking(self, job: PlannedJob) -> float:
        """Return the bytes that devices lack under the schedule that holds least: ZBV for two chunks, or 1F1B."""
        part = 2 / 3 if job.layout.chunks == 2 else 1.0
        return max(
            sum(rank.values()) - (1 - part) * rank["activations"] - limit
            for rank, limit in zip(job.memory, self.limits(job.mesh), strict=True)
        )

    def _allowed(self, layout: Layout, base: Layout, free: Sequence[SearchDimension]) -> bool:
        same = []
        if "placement" not in free:
            same += ["tensor", "context", "expert", "pipeline", "data", "shards", "shard_weights", "shard_gradients"]
        if "scheduling" not in free:
            same += ["microbatch"]
            if "placement" not in free:
                same += ["chunks", "recompute"]
            elif layout.chunks != self._fixed_chunks(layout):
                return False  # a pipeline of another size that follows the same rule
        return all(getattr(layout, name) == getattr(base, name) for name in same)


def _largest(of: int, limit: int) -> int:
    return max(one for one in _powers(limit) if of % one == 0)
