"""Effects of faults on a plan: a slow device, varying latencies, a lost domain.

Lost planes, narrower links and packet losses are changes of the cluster (:meth:`cordillera.topology.Topology.changed`),
under which the unchanged plan is simulated.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cordillera.errors import PlanError
from cordillera.planning.language.explorer import Explorer, divisible
from cordillera.planning.language.plans import Exploration, Plan
from cordillera.planning.language.step import (
    optimizer_seconds,
    reduced,
    reductions,
    simulate_step,
    stage_seconds,
    ways,
)
from cordillera.planning.pipeline.simulator import Way, simulate_late
from cordillera.planning.search import ALL, USABLE_MEMORY, SearchDimension
from cordillera.topology import Topology

DRAWS = 10_000
_MOST = 1_000_000  # largest factor and jitter, so that times stay finite
_MEANS = {
    "--slow": "how many times as long a device computes",
    "--jitter": "what is added to a latency on average, as a part of it",
}
_AS_GOOD = 0.95  # least device seconds that fewer devices are assumed to need, as a share of those before


@dataclass(frozen=True)
class Case:
    """A departure from the plan, and the resulting step.

    Attributes:
        what: Departure from the plan, in words.
        seconds: Seconds of a step.
        devices: Number of devices that take part in the step.
        note: Further remarks, in words.
        figures: The same facts for programs.
    """

    what: str
    seconds: float
    devices: int
    note: str = ""
    figures: dict[str, Any] = field(default_factory=dict)

    def speed(self, before: float) -> float:
        """Return the change of steps per second since a step took ``before`` seconds; 0.01 is 1 % faster."""
        return round(before / self.seconds - 1, 4) + 0.0  # never -0.0

    def to_json(self) -> dict[str, Any]:
        """Return the values for ``plan.json``."""
        return asdict(self)


def check(slow: float | None = None, jitter: float | None = None) -> None:
    """Check the factor ``slow`` of :func:`slow_device` and the ``jitter`` of :func:`jittered`; None passes.

    Raises:
        PlanError: If a value is too small, too large or not finite.
    """
    for name, value, least in (("--slow", slow, 1), ("--jitter", jitter, 0)):
        if value is not None and not least <= value <= _MOST:
            raise PlanError(f"{value:g} is not from {least} to {_MOST:,}", where=name, remedy=_MEANS[name])


def again(explorer: Explorer, plan: Plan, change: str, topology: Topology) -> Case:
    """Simulate an unchanged ``plan`` of ``explorer`` on a changed ``topology``; ``change`` describes the change."""
    step = explorer.again(plan, topology)
    needed, room = explorer.fullest(plan, step, topology)
    note = ""
    if needed > USABLE_MEMORY * room:
        note = f"but it needs {needed / 1e9:.3g} GB on a device of {room / 1e9:.3g} GB"
        note += f", of which {100 * USABLE_MEMORY:.0f} % may be taken"
    return Case(change, step.seconds, plan.layout.devices, note, {"kind": "change"})


def slow_device(explorer: Explorer, plan: Plan, factor: float) -> Case:
    """Simulate one device that computes ``factor`` times as long, at the place where it does most harm.

    The tensor-parallel devices beside it wait in their collectives, so its whole pipeline rank is slow; other ranks
    wait for messages; other copies of the model wait to reduce gradients. The step is therefore that of the copy that
    holds the device, and lies between the step of ``plan``, which ``explorer`` found, and ``factor`` times that.

    Raises:
        PlanError: If the factor is below 1 or too large.
    """
    check(slow=factor)
    job = explorer.job(plan.layout, plan.order, plan.network)
    by_rank = [simulate_step(job, plan.schedule, {rank: factor}) for rank in range(plan.schedule.ranks)]
    seconds = [step.seconds for step in by_rank]
    worst, least = int(np.argmax(seconds)), int(np.argmin(seconds))
    note = (
        f"in pipeline rank {worst}, where it costs most; {seconds[least]:.3f} s in rank {least}, where it costs least"
    )
    return Case(
        f"one device {factor:g} times as slow",
        seconds[worst],
        plan.layout.devices,
        note if plan.schedule.ranks > 1 else "",
        {"kind": "slow", "factor": factor, "seconds_by_rank": seconds, "parts": by_rank[worst].parts},
    )


def jittered(explorer: Explorer, plan: Plan, jitter: float, draws: int = DRAWS, seed: int = 0) -> NDArray[np.float64]:
    """Simulate steps of one copy of the model with varying latencies; return their sorted seconds: ``[draws]``.

    Every message is later than the network's latency by an exponentially distributed time with mean ``jitter`` times
    the latency, as a queue of random arrivals delays packets. A message of several tensor- and context-parallel devices
    arrives with the last of their parts. The many hops of a collective average out, so each is later by the mean:
    that of gradients, of sharded weights, of tensor and context parallelism, and of experts. Reductions slow messages
    and collectives inside stages in the plan's step but not here, so only differences between steps from this function
    are meaningful. The ``explorer`` found the ``plan``; ``seed`` is the seed of the random times.

    Raises:
        PlanError: If the jitter is negative, too large or not finite.
    """
    check(jitter=jitter)
    job, schedule = explorer.job(plan.layout, plan.order, plan.network, late=jitter), plan.schedule
    generator = np.random.default_rng(seed)
    parts = plan.layout.tensor * plan.layout.context

    def late(way: Way) -> NDArray[np.float64]:
        if jitter * way.latency == 0:
            return np.zeros(draws)
        last = generator.random(draws) ** (1.0 / parts)  # distributed like the largest of ``parts`` uniform draws
        return -jitter * way.latency * np.log1p(-last)

    keep = [{*reductions(job, schedule, rank), len(actions) - 1} for rank, actions in enumerate(schedule.actions)]
    times = simulate_late(schedule, stage_seconds(job, schedule), ways(job), late, keep)
    ends = [
        reduced(job, schedule, rank, times[rank].__getitem__) + optimizer_seconds(job, schedule, rank)
        for rank in range(schedule.ranks)
    ]
    return np.sort(np.broadcast_to(np.max(np.broadcast_arrays(*ends), axis=0), draws))


def jitter(explorer: Explorer, plan: Plan, part: float, draws: int = DRAWS, seed: int = 0) -> Case:
    """Return the median and the 99th percentile of a step with varying latencies.

    All copies of the model wait for the last of them, so the quantile ``q`` of a step with ``D`` copies is the quantile
    ``q ** (1 / D)`` of one copy. The arguments ``explorer``, ``plan``, ``draws`` and ``seed`` are those of
    :func:`jittered`, and ``part`` is its jitter.

    Raises:
        PlanError: If ``part`` is negative, too large or not finite.
    """
    steps = jittered(explorer, plan, part, draws, seed)
    steady = float(jittered(explorer, plan, 0.0, 1)[0])
    p50, p99 = (
        plan.seconds + (float(np.quantile(steps, q ** (1.0 / plan.layout.data), method="higher")) - steady)
        for q in (0.5, 0.99)
    )
    return Case(
        f"latencies {100 * part:.0f} % longer on average, each by chance",
        p50,
        plan.layout.devices,
        f"at the median; {p99:.3f} s or more in one step of a hundred (p99)",
        {"kind": "jitter", "jitter": part, "p50": p50, "p99": p99, "draws": draws, "seed": seed},
    )


def replan(
    explorer: Explorer,
    plan: Plan,
    topology: Topology,
    only: Iterable[SearchDimension] = ALL,
    progress: Callable[[str], None] | None = None,
) -> tuple[Explorer, Exploration]:
    """Search again on the rest of a cluster, ``topology``, with as many devices as can be used well.

    If the batch and the layers cannot be divided over all remaining devices, or only into a pipeline of awkward length,
    fewer are used: the number whose best layout is estimated to be the fastest. Numbers are tried from the largest down
    until no smaller one could be faster with each device as productive as in ``plan``, which ``explorer`` found on the
    whole cluster. Only the dimensions in ``only`` are searched; ``progress`` is called with a sentence from time to
    time.

    Raises:
        PlanError: If no number of devices can be planned.
    """
    chunks, products = {1, plan.layout.chunks}, explorer.cost.products
    workload = explorer.workload
    if plan.layout.fp8 != workload.fp8:  # a user's own layout may set it
        workload = workload.model_copy(update={"fp8": plan.layout.fp8})
        explorer = Explorer(
            workload, explorer.topology, explorer.calibration, products=products, devices=explorer.devices
        )
    before = explorer.outlook(chunks) * explorer.devices
    ranked: list[tuple[float, int, Explorer]] = []
    most = min(explorer.devices, topology.devices)
    numbers = sorted(one for one in divisible(workload, topology) if most / 2 <= one <= most)
    for devices in reversed(numbers):
        if ranked and _AS_GOOD * before / devices > min(ranked)[0]:
            break
        one = Explorer(workload, topology, explorer.calibration, products=products, devices=devices, progress=progress)
        estimate = one.outlook(chunks)
        if math.isfinite(estimate):
            ranked.append((estimate, -devices, one))
    for _, _, one in sorted(ranked, key=lambda entry: entry[:2]):
        try:
            return one, one.explore(only)
        except PlanError:  # there is no production-like plan to start from
            continue
    raise PlanError(f"{most:,} devices are left, no plan is possible on them", where=topology.name)


def survivors(topology: Topology, domain: str) -> Topology:
    """Return a cluster, ``topology``, without one ``domain``: ``building``, or ``building:1`` for the second of them.

    Raises:
        PlanError: If there is no such domain, or nothing else.
    """
    level, colon, number = domain.partition(":")
    if colon and not re.fullmatch("[0-9]{1,18}", number):
        raise PlanError("is not a domain", where=domain, remedy="write level or level:number, as building:1")
    return topology.without(level, int(number or 0))


def _without_host(topology: Topology, domain: str) -> Topology | None:
    """Return a cluster without the host of a lost device, whose other devices fit no layout well; None otherwise."""
    level, _, number = domain.partition(":")
    if level != "device" or len(topology.sizes[0]) == 1:
        return None
    host = int(np.searchsorted(np.cumsum(topology.sizes[0]), int(number or 0), side="right"))
    return topology.without(topology.levels[0].name, host)


def lost(
    explorer: Explorer,
    plan: Plan,
    domain: str,
    only: Iterable[SearchDimension] = ALL,
    progress: Callable[[str], None] | None = None,
) -> Case:
    """Search for a new plan after a ``domain``, in the notation of :func:`survivors`, is lost.

    The other arguments, ``explorer``, ``plan``, ``only`` and ``progress``, are those of :func:`replan`.

    Raises:
        PlanError: If there is no such domain, or no plan without it.
        KeyboardInterrupt: If the search was interrupted.
    """
    left, tried = survivors(explorer.topology, domain), list[tuple[Explorer, Exploration, str]]()
    problems: list[PlanError] = []
    for topology, how in ((left, ""), (_without_host(explorer.topology, domain), "; the rest of its host is not used")):
        if topology is None:
            continue
        try:
            after, found = replan(explorer, plan, topology, only, progress)
        except PlanError as error:  # the other way may have a plan
            problems.append(error)
            continue
        if found.interrupted:
            raise KeyboardInterrupt  # a partial search could be mistaken for the best plan
        tried.append((after, found, how))
    if not tried:
        raise problems[0]
    after, found, how = min(tried, key=lambda one: one[1].best.seconds)
    best, before = found.best, explorer.topology.devices
    note = f"by a new search on {after.devices:,} devices ({best.layout}, {best.schedule.name})"
    if after.devices < min(explorer.devices, left.devices):
        note += f"; batch and layers are not divided as well over all {left.devices:,} that are left"
    gone = before - left.devices
    note += f"{how}; {gone:,} of {before:,} devices ({100 * gone / before:.2f} %) are gone"
    return Case(
        f"{domain} lost",
        best.seconds,
        after.devices,
        note,
        {"kind": "lost", "devices_left": left.devices, "devices_gone": gone, "plan": best.to_json()},
    )
