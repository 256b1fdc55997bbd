"""The planner compared with measured step times, Calculon and its own baselines: ``cordillera bench scaleacross``."""

from __future__ import annotations

import enum
import importlib.util
import itertools
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch.distributed as dist
import typer
from _executed_schedules import (
    BACKWARD,
    FORWARD,
    MICROBATCHES,
    SLOW,
    families,
    simulated_seconds,
    take_turns,
    timelines,
)
from _peers import PeerUnavailable
from _processes import run_processes
from _program import Program
from _scaleacross_peers import Calculon
from _scaleacross_tables import recommenders
from _timing import Spread
from rich.console import Console
from rich.table import Table

from cordillera import topology as clusters
from cordillera.cost import Calibration, CostModel
from cordillera.planning import calibration, workloads
from cordillera.planning.language.explorer import Explorer
from cordillera.planning.language.job import PlannedJob
from cordillera.planning.language.plans import Plan
from cordillera.planning.language.step import simulate_step
from cordillera.planning.language.workload import Layout
from cordillera.planning.network.mesh import Mesh
from cordillera.planning.pipeline.schedules import Schedule, one_forward_one_backward, zero_bubble
from cordillera.planning.pipeline.simulator import StageSeconds, Way, simulate
from cordillera.planning.pipeline.solver import optimal
from cordillera.planning.pipeline.tuning import tuned
from cordillera.planning.search import ALL

MEASURED = Path(__file__).resolve().parents[2] / "shared" / "data" / "megatron_multi_node_iteration_ms.csv"
REGION_KM = 2000.0  # a round trip of 20 ms

# Every point of the grid: workload, cluster, sizes of its levels, devices, sequences per step; and its changes.
CHANGES: list[dict[str, float]] = [
    {"region.oversubscription": 2.8, "region.distance_km": 0.0},
    {"region.oversubscription": 7.0, "region.distance_km": 0.0},
    {"region.oversubscription": 2.8, "region.distance_km": REGION_KM},
    {"region.oversubscription": 112.0, "region.distance_km": REGION_KM},
    {"region.oversubscription": 1000.0, "region.distance_km": REGION_KM, "region.loss_rate": 1e-5},
]
SIZES: list[tuple[str, str, dict[str, float], int, int]] = [
    ("llama3-70b", "two-buildings", {"building.members": 1, "pod.members": 32}, 1_024, 512),
    ("llama3-405b", "two-buildings", {"building.members": 1, "pod.members": 128}, 4_096, 512),
    ("moe-400b", "two-buildings", {"building.members": 1, "pod.members": 128}, 4_096, 2048),
    ("llama3-405b", "llama4-region", {"region.members": 4, "building.members": 8, "zone.members": 128}, 65_536, 2048),
]


class Part(str, enum.Enum):
    """Parts of the benchmark."""

    accuracy = "accuracy"
    speed = "speed"
    grid = "grid"
    solver = "solver"
    executed = "executed"
    recommenders = "recommenders"


class Case(NamedTuple):
    """A pipeline step: stages with forwards of 1 and backwards of 2, whole or in halves.

    Attributes:
        ranks: ``P``, number of ranks.
        microbatches: ``m``, number of microbatches.
        placement: ``one`` stage per rank, two in a ``loop`` or two in a ``v``.
        latency: One-way latency of the slow boundaries, in forwards.
        slow: Slow boundaries: the one in the ``middle``, or ``all``.
        split: Whether backwards are done in two parts.
        spare: Number of live microbatches for which a rank has room beyond ``P``; None for no limit.
    """

    ranks: int
    microbatches: int
    placement: str
    latency: float
    slow: str
    split: bool
    spare: int | None

    @property
    def rank_of(self) -> tuple[int, ...]:
        once = tuple(range(self.ranks))
        return {"one": once, "loop": once * 2, "v": once + once[::-1]}[self.placement]

    def way(self, source: int, target: int) -> Way:
        crosses = (source < self.ranks // 2) != (target < self.ranks // 2)
        return Way(self.latency if crosses or self.slow == "all" else 0.0)

    @property
    def problem(self) -> tuple[Any, ...]:
        """First arguments of :func:`tuned` and :func:`optimal`."""
        stages = len(self.rank_of)
        room = None if self.spare is None else [(self.ranks + self.spare) * stages // self.ranks] * self.ranks
        return self.rank_of, self.microbatches, StageSeconds.equal(stages, 1, 2), self.way, room, self.split

    def seconds(self, schedule: Schedule) -> float:
        return simulate(schedule, StageSeconds.equal(len(self.rank_of), 1, 2), self.way).seconds


SMALL = [
    case
    for case in itertools.starmap(
        Case,
        itertools.product(
            (2, 3, 4), range(4, 9), ("one", "loop", "v"), (0.0, 0.25, 0.5, 1.0, 2.0, 4.0), ("middle", "all"),
            (False, True), (None, 0, 2),
        ),
    )
    if case.slow == "middle" or (case.ranks > 2 and case.latency)  # otherwise both are equal
]  # fmt: skip
LARGE = [
    Case(8, 16, placement, latency, "middle", split, 0)
    for placement, latency in (("one", 0.0), ("one", 2.0), ("one", 4.0), ("loop", 2.0))
    for split in (False, True)
]


def _split(rows: list[calibration.MeasuredStep], models: set[str]) -> list[calibration.MeasuredStep]:
    return [row for row in rows if row.model in models]


def _figures(rows: list[calibration.MeasuredStep], seconds: list[float]) -> dict[str, Any]:
    everything = calibration.accuracy(rows, seconds)
    small = [(row, value) for row, value in zip(rows, seconds, strict=True) if row.layout.tensor <= 8]
    return {
        "rows": everything.rows,
        "error": everything.error,
        "median": everything.median,
        "error_tensor_to_8": calibration.accuracy(*map(list, zip(*small, strict=True))).error,  # type: ignore[arg-type]
        "tau": everything.tau,
        "tau_by_model": everything.tau_by_model,
        "regret": everything.regret,
        "regret_by_model": everything.regret_by_model,
        "error_by_model": everything.error_by_model,
    }


def _accuracy(console: Console, quick: bool) -> dict[str, Any]:
    rows, cluster = calibration.read(MEASURED), clusters.load("a100-four-cards")

    def predicted(constants: Calibration, of: list[calibration.MeasuredStep]) -> list[float]:
        cost = CostModel(cluster.device, constants)
        return [calibration.predict(row, cluster, cost).seconds for row in of]

    fitted = calibration.fit(_split(rows, {"18.4", "39.1"}), cluster)
    smaller = calibration.fit(_split(rows, {"3.6", "18.4"}), cluster)
    largest = _split(rows, {"39.1"})
    found: dict[str, Any] = {"ours": _figures(rows, predicted(fitted, rows))}
    found["ours, fitted on 3.6B and 18.4B, on 39.1B"] = _figures(largest, predicted(smaller, largest))
    notes = []
    try:
        peer = Calculon(cluster.device.nic_bytes_per_s / 1e9)
        theirs = [peer.seconds(row) for row in rows]
        found["Calculon"] = _figures(rows, theirs)
        found["Calculon, on 39.1B"] = _figures(
            largest, [t for row, t in zip(rows, theirs, strict=True) if row in largest]
        )
    except PeerUnavailable as reason:
        notes.append(f"Calculon was left out: {reason}")
    useful = sum(row.workload.flops for row in rows) / sum(row.seconds * row.layout.devices for row in rows)
    constant = [row.workload.flops / useful / row.layout.devices for row in rows]
    found["one rate for all"] = _figures(rows, constant)
    table = Table(title="predicted against measured steps (vTrain, A100)", title_justify="left")
    for heading in ("", "rows", "error", "TP to 8", "rank correlation", "regret"):
        table.add_column(heading)
    for name, one in found.items():
        table.add_row(
            name, str(one["rows"]), f"{one['error']:.2%}", f"{one['error_tensor_to_8']:.2%}", f"{one['tau']:.3f}",
            f"{one['regret']:.3f}",
        )  # fmt: skip
    console.print(table)
    return {"evidence": "measured steps (published with vTrain), predicted here", "constants": fitted.model_dump(),
            "figures": found, "notes": notes}  # fmt: skip


_STEP_OF_MANY = """
import json, resource, time
from cordillera import topology
from cordillera.cost import CostModel, calibration_for
from cordillera.planning import workloads
from cordillera.planning.language.job import PlannedJob
from cordillera.planning.network.mesh import Mesh
from cordillera.planning.pipeline.schedules import interleaved
from cordillera.planning.language.step import simulate_step
from cordillera.planning.language.workload import Layout
began = time.perf_counter()
cluster = topology.load("llama4-region").changed({"region.members": 4, "zone.members": 256})
job = workloads.load("llama3-405b").model_copy(update={"batch": 16384})
layout = Layout(tensor=8, pipeline=16, data=1024, shards=1024, chunks=7, sequence_parallel=True, overlap_gradients=True)
assert layout.devices == cluster.devices == 131072, (layout.devices, cluster.devices)
one = PlannedJob(job, Mesh.of(cluster, layout), layout, CostModel(cluster.device, calibration_for(cluster.device)))
step = simulate_step(one, interleaved(16, one.microbatches, 7))
peak = [line for line in open("/proc/self/status") if line.startswith("VmHWM")][0].split()[1]
print(json.dumps({"seconds": time.perf_counter() - began, "peak_bytes": int(peak) * 1024, "step": step.seconds}))
"""


def _growth(quick: bool) -> dict[str, Any]:
    """Return seconds of a simulated step for distinct pipeline ranks and for devices, and their growth."""
    job = workloads.load("llama3-405b")

    def seconds(ranks: int, zone: int) -> float:
        spent = []
        for _ in range(1 if quick else 5):
            began = time.perf_counter()  # a new cluster each time, so that nothing is cached
            cluster = clusters.load("llama4-region").changed({"region.members": 4, "zone.members": zone})
            data = cluster.devices // 8 // ranks
            layout = Layout(tensor=8, pipeline=ranks, data=data, shards=data, overlap_gradients=True)
            work = job.model_copy(update={"batch": 128 * data})
            one = PlannedJob(work, Mesh.of(cluster, layout), layout, CostModel(cluster.device, Calibration()))
            simulate_step(one, one_forward_one_backward(ranks, one.microbatches))
            spent.append(time.perf_counter() - began)
        return min(spent)

    over_ranks = {ranks: seconds(ranks, 256) for ranks in (8, 16, 32, 64)}
    over_devices = {zone * 512: seconds(16, zone) for zone in (32, 64, 128, 256)}

    def exponent(found: dict[int, float]) -> float:
        return float(np.polyfit(np.log(list(found)), np.log(list(found.values())), 1)[0])

    return {
        "by_ranks": {str(n): s for n, s in over_ranks.items()},
        "by_devices": {str(n): s for n, s in over_devices.items()},
        "exponent_ranks": exponent(over_ranks),
        "exponent_devices": exponent(over_devices),
    }


def _speed(console: Console, quick: bool) -> dict[str, Any]:
    import json

    rows, cluster = calibration.read(MEASURED), clusters.load("a100-four-cards")
    cost = CostModel(cluster.device, Calibration())
    contenders: dict[str, Callable[[], object]] = {
        "ours": lambda: [calibration.predict(row, cluster, cost).seconds for row in rows]
    }
    notes = []
    try:
        peer = Calculon(cluster.device.nic_bytes_per_s / 1e9)
        contenders["Calculon"] = lambda: [peer.seconds(row) for row in rows]
    except PeerUnavailable as reason:
        notes.append(f"Calculon was left out: {reason}")
    for run in contenders.values():
        run()
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(3 if quick else 15):
        for name, run in contenders.items():
            began = time.perf_counter()
            run()
            rates[name].append(len(rows) / (time.perf_counter() - began))
    values: dict[str, Any] = {"evaluations_per_s": {name: Spread.of(one).to_json() for name, one in rates.items()}}
    if "Calculon" in rates:
        ratio = Spread.of([a / b for a, b in zip(rates["ours"], rates["Calculon"], strict=True)])
        values["times_calculon"] = ratio.to_json()
        console.print(f"evaluations a second: {ratio.median:.1f} times Calculon's (20 asked)")
    values["growth"] = growth = _growth(quick)
    console.print(
        f"seconds of a simulated step grow as distinct ranks to the {growth['exponent_ranks']:.2f} "
        f"and devices to the {growth['exponent_devices']:.2f}"
    )
    explorer = Explorer(workloads.load("llama3-405b"), clusters.load("two-buildings"))
    found = explorer.explore(keep=2 if quick else 16)
    values["joint_search"] = {"seconds": found.seconds, "estimated": found.estimated, "simulated": found.simulated}
    console.print(f"joint search, 405B on 24,576 devices in two buildings: {found.seconds:.1f} s (60 asked)")
    done = subprocess.run(
        [sys.executable, "-c", _STEP_OF_MANY], capture_output=True, text=True, check=True, timeout=300
    )
    values["step_of_131072"] = json.loads(done.stdout)
    one = values["step_of_131072"]
    console.print(
        f"a step of 131,072 devices: {one['seconds']:.1f} s (10 asked), {one['peak_bytes'] / 2**30:.2f} GiB (2)"
    )
    return {"evidence": "measured", "values": values, "notes": notes}


def _grid(console: Console, quick: bool) -> dict[str, Any]:
    points = []
    table = Table(title="step time, simulated, and how many times the baseline", title_justify="left")
    for heading in ("workload", "cluster", "change", "production", *ALL, "joint", "x production", "x best single"):
        table.add_column(heading)
    grid = [(*size, changes) for size in SIZES for changes in CHANGES]
    for model, cluster, sizes, devices, batch, changes in grid[:1] if quick else grid:
        topology = clusters.load(cluster).changed({**sizes, **changes})
        if topology.devices != devices:
            raise RuntimeError(f"{cluster} has {topology.devices} devices, the grid says {devices}")
        explorer = Explorer(workloads.load(model).model_copy(update={"batch": batch}), topology)
        base = explorer.production()
        found = explorer.explore(keep=2 if quick else 16)
        alone, joint = found.alone, found.best
        single = min(plan.seconds for plan in alone.values())
        points.append(
            {
                "workload": model,
                "cluster": cluster,
                "devices": devices,
                "batch": batch,
                "changes": changes,
                "production": _described(base),
                "alone": {name: _described(plan) for name, plan in alone.items()},
                "joint": _described(joint),
                "times_production": base.seconds / joint.seconds,
                "times_best_single": single / joint.seconds,
                "search_seconds": found.seconds,
            }
        )
        last = points[-1]
        change = ", ".join(f"{key.partition('.')[2]} {value:g}" for key, value in changes.items())
        table.add_row(
            model, cluster, change, f"{base.seconds:.2f} s", *(f"{alone[name].seconds:.2f} s" for name in ALL),
            f"{joint.seconds:.2f} s", f"{last['times_production']:.2f}", f"{last['times_best_single']:.2f}",
        )  # fmt: skip
        console.print(
            f"{model} on {cluster}, {change}: {last['times_production']:.2f}, {last['times_best_single']:.2f} "
            f"({found.seconds:.0f} s)"
        )
    console.print(table)
    means = {
        name: float(np.exp(np.mean([np.log(point[name]) for point in points])))
        for name in ("times_production", "times_best_single")
    }
    return {"evidence": "simulated", "geometric_means": means, "points": points}


def _described(plan: Plan) -> dict[str, Any]:
    return {
        "seconds": plan.seconds,
        "layout": str(plan.layout),
        "recompute": plan.layout.recompute,
        "schedule": plan.schedule.name,
        "across": plan.across,
    }


def _compared(case: Case, limit_s: float) -> dict[str, Any]:
    began = time.perf_counter()
    ours = case.seconds(tuned(*case.problem))
    took = time.perf_counter() - began
    solved = optimal(*case.problem, time_limit_s=limit_s)
    return {
        "case": case._asdict(),
        "tuned": ours,
        "solver": solved.seconds,
        "bound": solved.bound,
        "proven": solved.optimal,
        "above_solver": ours / solved.seconds - 1,
        "above_bound": ours / solved.bound - 1,
        "tuned_took_seconds": took,
    }


def _summary(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Summarise comparisons. The solver starts from our schedule, so only a proven optimum is a fair reference."""
    return {
        "cases": len(found),
        "proven": sum(one["proven"] for one in found),
        "equal": sum(one["proven"] and one["above_solver"] <= 1e-9 for one in found),
        "worst_above_solver": max(one["above_solver"] for one in found),
        "worst_above_bound": max(one["above_bound"] for one in found),
        "slowest_seconds": max(one["tuned_took_seconds"] for one in found),
    }


def _solver(console: Console, quick: bool) -> dict[str, Any]:
    tuned(*SMALL[0]._replace(latency=1.0, split=True, spare=0).problem)  # compiles
    sample = random.Random(0).sample(SMALL, 4 if quick else 80)
    found = [_compared(case, 1.0 if quick else 30.0) for case in sample]
    classes = {"all": found}
    for latency in sorted({case.latency for case in sample}):
        classes[f"latency {latency:g}"] = [one for one in found if one["case"]["latency"] == latency]
    large = []
    for case in LARGE[:1] if quick else LARGE:
        one = _compared(case, 1.0 if quick else 20.0)
        if case.split and case.placement == "one":
            one["above_zero_bubble"] = one["tuned"] / case.seconds(zero_bubble(case.ranks, case.microbatches)) - 1
        large.append(one)
    table = Table(title="schedules by rules beside CP-SAT's, simulated", title_justify="left")
    for heading in ("", "cases", "proven", "equal to proven", "worst above CP-SAT", "above its bound", "slowest"):
        table.add_column(heading)
    for placement in ("one", "loop"):
        some = [one for one in large if one["case"]["placement"] == placement]
        classes[f"8 ranks, 16 microbatches, {placement}"] = some
    summaries = {name: _summary(some) for name, some in classes.items() if some}
    for name, one in summaries.items():
        table.add_row(
            name, str(one["cases"]), str(one["proven"]), str(one["equal"]), f"{one['worst_above_solver']:.2%}",
            f"{one['worst_above_bound']:.2%}", f"{one['slowest_seconds']:.1f} s",
        )  # fmt: skip
    console.print(table)
    return {"evidence": "simulated", "of": len(SMALL), "summaries": summaries, "small": found, "large": large}


def _executed(console: Console, quick: bool) -> dict[str, Any]:
    rounds, rows = 1 if quick else 7, []
    for ranks in MICROBATCHES:
        schedules = families(ranks)[-1 if quick else 0 :]
        simulated = [simulated_seconds(schedule) for schedule in schedules]
        deadline = 120 + 3 * (1 + rounds) * sum(simulated)
        with tempfile.TemporaryDirectory() as folder:
            work = partial(take_turns, schedules=schedules, rounds=rounds)
            ended = run_processes(ranks, Path(folder), work, deadline)
        if ended.codes != [0] * ranks:
            raise RuntimeError(f"{ranks} processes ended with {ended.codes} within {deadline:.0f} s\n{ended.said}")
        for schedule, expected in zip(schedules, simulated, strict=True):
            steps = timelines(schedule, [ended.found[rank][schedule.name] for rank in range(ranks)])
            seconds = [step.seconds for step in steps]
            spread = Spread.of(seconds)
            rows.append(
                {
                    "family": schedule.name,
                    "processes": ranks,
                    "microbatches": schedule.microbatches,
                    "simulated": expected,
                    "executed": spread.to_json(),
                    "rounds": seconds,
                    "ratio": spread.median / expected,
                }
            )
    table = Table(title="steps executed on processes (emulated links) beside simulated", title_justify="left")
    for heading in ("family", "processes", "simulated", "executed, median", "ratio"):
        table.add_column(heading, justify="left" if heading == "family" else "right")
    for row in rows:
        table.add_row(
            row["family"], str(row["processes"]), f"{row['simulated']:.3f} s", f"{row['executed']['median']:.3f} s",
            f"{row['ratio']:.3f}",
        )  # fmt: skip
    console.print(table)
    off = [row["ratio"] - 1 for row in rows]
    console.print(f"executed over simulated: {min(off):+.1%} to {max(off):+.1%} (10 % asked)")
    return {
        "evidence": "emulated",
        "seconds_of_a_rank": {"forward": FORWARD, "backward": BACKWARD},
        "slow_boundary": {"latency_s": SLOW.latency_s, "bytes_per_s": SLOW.bytes_per_s},
        "off": {"least": min(off), "most": max(off)},
        "rows": rows,
    }


PARTS: dict[Part, Callable[[Console, bool], dict[str, Any]]] = {
    Part.accuracy: _accuracy,
    Part.speed: _speed,
    Part.grid: _grid,
    Part.solver: _solver,
    Part.executed: _executed,
    Part.recommenders: recommenders,
}


def _left_out(part: Part) -> str | None:
    if part in (Part.accuracy, Part.speed) and not MEASURED.exists():
        return f"{MEASURED} (vTrain's measurements, MIT) is not here"
    if part is Part.solver and importlib.util.find_spec("ortools") is None:
        return "OR-tools is not installed"
    if part is Part.executed and not (dist.is_available() and dist.is_gloo_available()):
        return "torch was built without Gloo"
    return None


main = Program(
    "scaleacross",
    PARTS,
    "Measure the planner: against measured and executed steps, Calculon, CP-SAT and baselines, and its own speed.",
    left_out=_left_out,
).command()


if __name__ == "__main__":
    typer.run(main)
