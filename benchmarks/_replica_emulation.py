"""Twelve replicas whose time is pressed sixty to one: what share of it is useful, by how a failure is met.

A minute of the published job is a second here. Computing is a sleep; processes, failures, agreement, sums of a megabyte
and the transfer of the state are real.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from _results import FinishedPieces
from rich.console import Console
from rich.table import Table
from torch import Tensor

from cordillera.distributed.fault_tolerance.coordination import FaultToleranceConfig, Membership, initial_commit
from cordillera.distributed.fault_tolerance.events import FOLDER, EventLog, read_events
from cordillera.distributed.fault_tolerance.launcher import ReplicaLauncher
from cordillera.distributed.fault_tolerance.replica import Replica, ReplicaPlace
from cordillera.distributed.job.job import join_job
from cordillera.distributed.job.launch import LaunchConfig, launch
from cordillera.distributed.mesh import ParallelConfig, ProcessMesh
from cordillera.errors import CordilleraError

REPLICAS, STEP_S, BETWEEN_S, REPAIR_S = 12, 1 / 3, 18.0, 10.0  # 20 s, 18 min and 10 min, pressed
PUBLISHED_STALL_S = 3.0
FIRST = 0.2  # part of a period after which its failure comes, early enough that the repair ends in the same period
ELEMENTS = 1 << 18
SECONDS, SECONDS_QUICK = 108.0, 8.0
TARGETS = {"restart": (0.41, 0.47), "published stall": (0.77, 0.83), "ours": (0.88, 1.0)}
_PACE_S = 0.05


@dataclass(frozen=True)
class Pressed:
    """A pressed job.

    Attributes:
        seconds: Length of the job.
        stall_s: Seconds that each survivor waits after a step that was given up.
        replicas: Number of replicas, of one process each.
    """

    seconds: float
    stall_s: float = 0.0
    replicas: int = REPLICAS


class _Counted:
    """State of a replica: a vector, and the number of steps that were added to it."""

    def __init__(self) -> None:
        self.vector, self.count = torch.zeros(ELEMENTS), 0

    def tensors(self) -> Mapping[str, Tensor]:
        return {"vector": self.vector}

    def facts(self) -> Any:
        return self.count

    def install(self, tensors: Mapping[str, Tensor], facts: Any) -> None:
        self.vector.copy_(tensors["vector"])
        self.count = int(facts)


def _wait_for_repair(folder: str, name: str) -> None:
    """Wait until the replacement of a replica that was killed is there, by the pressed time."""
    path = Path(folder, f"{name}.due")
    if path.exists():
        time.sleep(max(0.0, float(path.read_text()) - time.time()))


def _compute(until: float) -> None:
    time.sleep(max(0.0, until - time.time()))


def _replica(rank: int, place: ReplicaPlace, job: Pressed, folder: str, ends: float) -> int:
    """Train as one replica until the time ``ends``."""
    with join_job():
        state, events = _Counted(), EventLog(Path(folder, FOLDER, f"{place.name}.jsonl"))
        config = FaultToleranceConfig(replicas=job.replicas, deadline_s=5.0)
        mesh = ProcessMesh(ParallelConfig())
        _wait_for_repair(folder, place.name)
        with Replica(place, config, mesh, state, initial_commit(place.configuration)) as replica:
            Path(folder, f"{place.name}.pid").write_text(str(os.getpid()))
            computed, is_over = -1, False
            while not is_over:
                membership = replica.begin()
                if replica.contributes and computed != state.count:
                    _compute(time.time() + STEP_S)
                    computed = state.count
                is_over = _step(replica, state, membership, events, ends, job.stall_s)
        return state.count


def _step(
    replica: Replica, state: _Counted, membership: Membership, events: EventLog, ends: float, stall_s: float
) -> bool:
    """Add up and commit; return whether the job is over."""
    stop, vector = torch.tensor([float(time.time() > ends)]), torch.ones(ELEMENTS)
    is_well = replica.agree(replica.add(stop) and replica.add(vector))
    if not is_well:
        replica.discard()
        time.sleep(stall_s)
        return False
    with replica.committing():
        state.vector += vector / len(membership.participants)
        state.count += 1
    facts = {"step": state.count, "participants": list(membership.participants), "seconds": replica.seconds}
    events.write("step", outcome="committed", **facts)
    return float(stop) > 0


def _fail_now_and_then(folder: str, job: Pressed, is_over: threading.Event) -> int:
    """Kill a replica each time a pressed failure is due; return how many."""
    generator, killed, began = random.Random(3), 0, None
    while not is_over.wait(_PACE_S):
        joined = {path.stem: path for path in Path(folder).glob("*.pid")}
        if began is None:
            began = time.time() if len(joined) == job.replicas else None
            continue
        if time.time() < began + (killed + FIRST) * BETWEEN_S:
            continue
        victim = generator.choice(sorted(joined))
        due = Path(folder, f"{victim}.due")
        due.write_text(str(time.time() + REPAIR_S))
        try:
            os.kill(int(joined[victim].read_text()), signal.SIGKILL)
            killed += 1
        except ProcessLookupError:  # it has ended by itself, as at the end of the job: that is no failure
            due.unlink(missing_ok=True)
        joined[victim].unlink(missing_ok=True)
    return killed


def _with_replicas(job: Pressed) -> dict[str, Any]:
    """Run a job whose other replicas go on, and return the share of useful time."""
    with tempfile.TemporaryDirectory() as folder:
        ends = time.time() + job.seconds + 10.0  # starting the processes comes first
        tolerance = FaultToleranceConfig(replicas=job.replicas, deadline_s=5.0, retries=1000)
        launcher = ReplicaLauncher(
            _replica, 1, (job, folder, ends), tolerance=tolerance, configuration="pressed", folder=Path(folder),
            config=LaunchConfig(threads=1),
        )  # fmt: skip
        is_over, failures = threading.Event(), list[int]()
        thread = threading.Thread(target=lambda: failures.append(_fail_now_and_then(folder, job, is_over)))
        thread.start()
        try:
            launcher.run()
        finally:
            is_over.set()
            thread.join()
        steps = {e["step"]: e for e in read_events(Path(folder)) if e["kind"] == "step"}
    return _share(list(steps.values()), job, failures[0])


def _share(steps: list[dict[str, Any]], job: Pressed, failures: int) -> dict[str, Any]:
    """Return the useful time over whole periods between failures; a step is worth what it takes without failures."""
    steps.sort(key=lambda event: event["at"])
    step_s = statistics.median(later["at"] - earlier["at"] for earlier, later in itertools.pairwise(steps))
    begins, ends = steps[0]["at"], steps[-1]["at"]
    periods = max(1, int((ends - begins) / BETWEEN_S))
    last = min(ends, begins + periods * BETWEEN_S)
    counted = [event for event in steps[1:] if event["at"] <= last]
    useful = sum(len(event["participants"]) for event in counted) * step_s
    return {
        "effective": useful / (job.replicas * (last - begins)),
        "seconds": last - begins,
        "step_s": step_s,
        "steps": len(counted),
        "failures": failures,
    }


def _synchronous(rank: int, folder: str, due: float, replicas: int) -> None:
    """Train as one rank of a job in which every rank fails with any other."""
    import torch.distributed as dist

    with join_job():
        time.sleep(max(0.0, due - time.time()))
        vector, path = torch.ones(ELEMENTS), Path(folder, "steps.txt")
        dist.barrier()
        Path(folder, f"{rank}.pid").write_text(str(os.getpid()))
        while True:
            time.sleep(STEP_S)
            dist.all_reduce(vector)
            if rank == 0:
                with open(path, "a", encoding="ascii") as file:
                    file.write(f"{time.time()}\n")


def _with_restarts(job: Pressed) -> dict[str, Any]:
    """Run a job that a failure stops as a whole; it goes on after its last step, as if each were saved for nothing."""
    began, failures, due = None, 0, 0.0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "steps.txt")
        while began is None or time.time() < began + job.seconds:
            is_over = threading.Event()

            def fail(over: threading.Event = is_over, number: int = failures) -> None:
                nonlocal began
                while not path.exists() and not over.wait(_PACE_S):
                    pass
                began = began or time.time()
                while not over.wait(_PACE_S):
                    ready = Path(folder, "1.pid")
                    if time.time() > began + (number + FIRST) * BETWEEN_S and ready.exists():
                        os.kill(int(ready.read_text()), signal.SIGKILL)
                        return

            thread = threading.Thread(target=fail)
            thread.start()
            config = LaunchConfig(threads=1, deadline_s=30.0)
            try:
                launch(_synchronous, job.replicas, (folder, due, job.replicas), config=config)
            except CordilleraError:
                assert began is not None
                due = began + (failures + FIRST) * BETWEEN_S + REPAIR_S
                failures += 1
                for ready in Path(folder).glob("*.pid"):
                    ready.unlink()
            finally:
                is_over.set()
                thread.join()
        everyone = [f"r{number}" for number in range(job.replicas)]
        times = map(float, path.read_text().split())
        return _share([{"at": at, "participants": everyone} for at in times], job, failures)


def _apart(name: str, job: Pressed) -> dict[str, Any]:
    """Run a job in a process whose main module is empty, as each rank that starts imports that module again."""
    code = "import sys; sys.path.insert(0, sys.argv[1]); import _replica_emulation; _replica_emulation.be_apart()"
    words = (name, json.dumps(asdict(job)))
    done = subprocess.run(
        [sys.executable, "-c", code, str(Path(__file__).parent), *words],
        stdout=subprocess.PIPE, text=True, check=True, timeout=job.seconds + 120,
    )  # fmt: skip
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def be_apart() -> None:
    """Run the job that the command line names, and print what it found."""
    name, job = sys.argv[2], Pressed(**json.loads(sys.argv[3]))
    print(json.dumps(_with_restarts(job) if name == "restart" else _with_replicas(job)))


def emulated(console: Console, quick: bool, pieces: FinishedPieces) -> dict[str, Any]:
    """Run the job by each policy."""
    seconds = SECONDS_QUICK if quick else SECONDS
    replicas = 3 if quick else REPLICAS
    jobs = {
        "restart": Pressed(seconds, replicas=replicas),
        "published stall": Pressed(seconds, PUBLISHED_STALL_S, replicas),
        "ours": Pressed(seconds, replicas=replicas),
    }
    table = Table(title=f"{replicas} replicas, a minute in a second (emulated)", title_justify="left")
    for heading in ("a failure is met by", "effective", "asked", "failures", "steps"):
        table.add_column(heading)
    results = {}
    for name, job in jobs.items():
        key = {"job": name, "seconds": seconds, "replicas": replicas}
        if (found := pieces.get(key)) is None:
            found = _apart(name, job)
            pieces.add(key, found)
        results[name] = found
        low, high = TARGETS[name]
        asked = f"{low:.2f} to {high:.2f}" if high < 1 else f"{low:.2f} at least"
        table.add_row(name, f"{found['effective']:.3f}", asked, str(found["failures"]), str(found["steps"]))
    console.print(table)
    return {
        "evidence": "emulated",
        "replicas": replicas,
        "step_s": STEP_S,
        "between_s": BETWEEN_S,
        "repair_s": REPAIR_S,
        "targets": {name: list(one) for name, one in TARGETS.items()},
        "results": results,
        "notes": [
            "computing is a sleep; processes, failures, sums, agreement and transfers of the state are real",
            "a step is worth what it takes in the same job without failures, communication included",
        ],
    }
