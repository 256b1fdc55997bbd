"""How long the replicas that are left stand still when one fails, beside torchft and a restart from checkpoints."""

from __future__ import annotations

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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from _peers import PeerUnavailable
from _replica_peers import (
    BLOCKS,
    CHECKPOINT_EVERY,
    DEFAULT,
    HIDDEN,
    LAUNCH,
    MICROBATCHES,
    REPLICAS,
    ROWS,
    SHARDS,
    TUNED,
    WIDTH,
    Cells,
    PeerJob,
    TorchftJob,
    Training,
    check_torchft,
    commit_log,
    processes_of_job,
    train_hybrid,
)
from _results import FinishedPieces
from _timing import Spread
from rich.console import Console
from rich.table import Table
from torch import Tensor

from cordillera.distributed.fault_tolerance.coordination import Commit, FaultToleranceConfig, Membership, initial_commit
from cordillera.distributed.fault_tolerance.events import FOLDER
from cordillera.distributed.fault_tolerance.launcher import ReplicaLauncher, replica_names
from cordillera.distributed.fault_tolerance.replica import Replica, ReplicaPlace, digest_of
from cordillera.distributed.job.job import join_job
from cordillera.distributed.mesh import ParallelConfig, ProcessMesh
from cordillera.files import parse_sealed

TOLERANCE = FaultToleranceConfig(replicas=REPLICAS, deadline_s=0.5, grace_s=0.25)
TARGETS = {"kill_s": 0.5, "freeze_s": TOLERANCE.deadline_s + 0.5, "overhead": 1.03, "rejoin_steps": 1.0, "discarded": 1}
MEASURED_ELSEWHERE = {"torchft": 5.28, "torchft, tuned": [1.08, 1.36]}  # seconds after a kill, on another machine
SETTLED = 12  # steps at full strength before a fault and at the end
BLOCK, PAIRS = 10, 7  # steps of one job, before the other has its turn
FROZEN_S = 1.0  # after the others go on, until a frozen replica is ended
LIMIT_S = 60.0
ROUNDS = 3

FaultKind = Literal["kill", "freeze", "freeze one"]


@dataclass(frozen=True)
class Fault:
    """What happens to a replica.

    Attributes:
        kind: ``kill`` ends one rank, ``freeze`` stops all ranks of a replica, ``freeze one`` stops one.
        victim: Number of the replica.
        rank: Rank within it.
        share: When, as a share of a step after a commit of the replica.
    """

    kind: FaultKind
    victim: int
    rank: int
    share: float


# Our replicas


class OurRank:
    """One rank of a replica, which trains until it is asked to end.

    Args:
        place: How the replica reaches its job.
        folder: Folder of the log and of the cells.
    """

    def __init__(self, rank: int, place: ReplicaPlace, folder: str) -> None:
        self._rank, self._place, self._cells = rank, place, Cells(folder)
        self._number = replica_names(REPLICAS).index(place.name) * SHARDS + rank
        self._log = commit_log(folder, place.name, rank)
        self._mesh = ProcessMesh(ParallelConfig(shard=SHARDS, deadline_s=LAUNCH.deadline_s))
        self._training = Training(self._mesh.weights, rank, self._enter)
        self._iteration, self._is_over = 0, False
        self._computed: tuple[Commit, int] | None = None
        self._flat = torch.zeros(sum(one.numel() for one in self._training.gradients()) + 1)

    def run(self) -> list[float]:
        """Train; return the digests of the weights of all ranks at the end."""
        self._training.backward(0)  # the first one takes longer than others, which would wait for it
        self._training.optimizer.zero_grad()
        commit = initial_commit(self._place.configuration)
        with Replica(self._place, TOLERANCE, self._mesh, self, commit) as replica:
            self._log.write("joined", step=replica.held.step, processes=processes_of_job())
            while True:
                self._enter("waiting")
                self._cells.wait(replica.held.step + 1)
                membership = replica.begin()
                if not self._is_over:
                    self._attempt(replica, membership)
                elif replica.agree(replica.add(torch.zeros(1))):
                    digests = self._mesh.exchange([digest_of(self._training.tensors())])
                    self._log.write("ended", digests=digests.flatten().tolist())
                    return digests.flatten().tolist()
                else:
                    replica.discard()

    def _attempt(self, replica: Replica, membership: Membership) -> None:
        head, count = membership.head, len(membership.participants)
        if replica.contributes:
            wanted = (head, self._iteration + membership.participants.index(self._place.name))
            if self._computed != wanted:  # it is there if the same part was computed for a step that was given up
                self._training.optimizer.zero_grad()
                self._training.backward(wanted[1])
            self._computed = wanted
        self._enter("reduce")
        gradients = self._training.gradients()
        parts = self._flat[:-1].split([one.numel() for one in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            part.view_as(gradient).copy_(gradient)
        self._flat[-1] = self._cells.is_stopping
        is_summed = replica.add(self._flat)
        self._enter("vote")
        if not replica.agree(is_summed):
            replica.discard()
            self._tell("discarded", membership, replica)
            return
        self._computed = None
        with replica.committing():
            for gradient, part in zip(gradients, parts, strict=True):
                torch.div(part.view_as(gradient), count, out=gradient)
            self._training.update()
            self._iteration += count
            self._is_over = bool(self._flat[-1] > 0)
        self._tell("committed", membership, replica)

    def _tell(self, outcome: str, membership: Membership, replica: Replica) -> None:
        count = len(membership.participants)
        seconds = dict(replica.seconds)
        self._log.write(
            "step", outcome=outcome, step=membership.head.step + 1, participants=count, epoch=membership.epoch,
            members=len(membership.members), seconds=seconds,
        )  # fmt: skip

    def _enter(self, phase: str) -> None:
        self._cells.enter(self._number, phase)

    def tensors(self) -> Mapping[str, Tensor]:
        """Return live tensors by name."""
        return self._training.tensors()

    def facts(self) -> Any:
        """Return what else is equal on all replicas."""
        return {"iteration": self._iteration, "is_over": self._is_over}

    def install(self, tensors: Mapping[str, Tensor], facts: Any) -> None:
        """Take over the state of another replica."""
        self._training.install(tensors)
        self._iteration, self._is_over, self._computed = facts["iteration"], facts["is_over"], None


def train_ours(rank: int, place: ReplicaPlace, folder: str) -> list[float]:
    """Train as one rank of a replica."""
    with join_job():
        return OurRank(rank, place, folder).run()


class OurJob:
    """A job of replicas, which ends when its cells say so."""

    def __init__(self, folder: Path) -> None:
        self._cells = Cells(folder)
        self._launcher = ReplicaLauncher(
            train_ours, SHARDS, (str(folder),), tolerance=TOLERANCE, configuration="stalls", folder=folder,
            config=LAUNCH,
        )  # fmt: skip
        self._thread = threading.Thread(target=self._launcher.run)
        self._thread.start()

    def end(self) -> None:
        """Let the job end, or end its processes if it does not."""
        self._cells.stop()
        self._thread.join(20)
        self._launcher._stop = 2  # signals reach launchers in the main thread only
        self._thread.join()


# Faults


class _Job(Protocol):
    def end(self) -> None: ...


class Watch:
    """What the log of commits of a job says, while it grows."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._read = folder / FOLDER, dict[str, int]()
        self.events: dict[str, list[dict[str, Any]]] = {}

    def look(self) -> None:
        """Read what was written since."""
        for path in self._folder.glob("r[0-9]*.jsonl"):
            with path.open("rb") as file:
                file.seek(self._read.get(path.stem, 0))
                whole = file.read().rpartition(b"\n")[0]
            self._read[path.stem] = self._read.get(path.stem, 0) + len(whole) + bool(whole)
            for line in whole.decode().splitlines():
                event = parse_sealed(f"{line}\n", str(path), line=True)
                self.events.setdefault(path.stem, []).append(event)

    def commits(self, name: str, after: float = 0.0) -> list[dict[str, Any]]:
        """Return the committed steps that a replica wrote after a time."""
        found = self.events.get(name, [])
        return [event for event in found if event.get("outcome") == "committed" and event["at"] > after]

    def processes(self, name: str, after: float = 0.0) -> list[int]:
        """Return the newest processes of a replica that have joined after a time; none if there are none."""
        joined = [e for e in self.events.get(name, []) if e["kind"] == "joined" and e["at"] > after]
        return list(joined[-1]["processes"]) if joined else []

    def until(self, is_so: Callable[[], Any], what: str) -> None:
        """Look until something is so.

        Raises:
            TimeoutError: If it is not within a minute.
        """
        until = time.monotonic() + LIMIT_S
        while not is_so():
            if time.monotonic() > until:
                raise TimeoutError(f"{what} did not come about within {LIMIT_S:g} s")
            time.sleep(0.002)
            self.look()


def _normal(watch: Watch, name: str, before: float) -> float:
    """Return the median seconds of the last steps before a time."""
    times = [event["at"] for event in watch.commits(name) if event["at"] <= before][-SETTLED:]
    return statistics.median(b - a for a, b in pairwise(times))


def _strike(watch: Watch, cells: Cells, names: list[str], fault: Fault) -> dict[str, Any]:
    """Cause a fault and wait until the job is whole again; return when it came, and where the victim was."""
    victim = names[fault.victim % len(names)]
    survivor = names[(fault.victim + 1) % len(names)]

    def is_whole(after: float) -> bool:
        commits = [watch.commits(name, after)[-SETTLED:] for name in names]
        return all(len(c) == SETTLED and all(e["participants"] == REPLICAS for e in c) for c in commits)

    began = time.time()
    watch.until(lambda: is_whole(began), "full strength")
    normal, count = _normal(watch, victim, time.time()), len(watch.commits(victim))
    watch.until(lambda: len(watch.commits(victim)) > count, "a step")
    time.sleep(fault.share * normal)
    processes = watch.processes(victim)
    rank = fault.rank if len(names) > 1 else fault.victim * SHARDS + fault.rank
    phase = cells.phase(fault.victim * SHARDS + fault.rank)
    at = time.time()
    for process in processes if fault.kind == "freeze" else processes[rank : rank + 1]:
        os.kill(process, signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)
    watch.look()
    last = watch.commits(survivor)[-1]["step"]
    if len(names) > 1:
        watch.until(lambda: any(e["participants"] < REPLICAS for e in watch.commits(survivor, at)), "a step alone")
    if fault.kind != "kill":
        time.sleep(FROZEN_S)
        for process in processes:
            os.kill(process, signal.SIGKILL)
    watch.until(lambda: watch.processes(victim, at), "a replacement")
    joined = time.time()
    if len(names) == 1:
        watch.until(lambda: any(e["step"] > last + 1 for e in watch.commits(victim, joined)), "the lost steps")
    watch.until(lambda: is_whole(joined), "full strength")
    return {**asdict(fault), "phase": phase, "at": at, "victim": victim, "survivor": survivor}


def measured(watch: Watch, struck: Mapping[str, Any], is_restart: bool) -> dict[str, Any]:
    """Return what a fault cost, from the survivors' log; seconds are from the signal, less a normal step.

    A step that the survivors commit with the victim after the signal does not count as one after the failure.
    """
    at, name = struck["at"], struck["survivor"]
    normal = _normal(watch, name, at)
    after = watch.commits(name, at)
    before = watch.commits(name)[: -len(after)]
    joined = next(e["at"] for e in watch.events[struck["victim"]] if e["kind"] == "joined" and e["at"] > at)
    found = {key: struck[key] for key in ("kind", "rank", "share", "phase", "survivor")} | {"step_s": normal}
    if is_restart:
        last = max(e["step"] for e in watch.commits(name) if e["at"] < joined)
        first = next(e for e in after if e["at"] > joined)
        again = next(e for e in after if e["at"] > joined and e["step"] > last)
        found |= {"stall_s": first["at"] - at - normal, "regained_s": again["at"] - at - normal}
        return found | {"redone": last - first["step"] + 1, "joined_s": joined - at, "whole_s": again["at"] - at}
    alone = next(e for e in after if e["participants"] < REPLICAS)
    whole = next(e for e in after if e["participants"] == REPLICAS and e["at"] > joined)
    place = after.index(whole)
    times = [before[-1]["at"], *(e["at"] for e in after[: place + 4])]
    gaps = {e: b - a for e, (a, b) in enumerate(pairwise(times))}
    first_alone = after.index(alone)
    failing, later = [gaps[i] for i in range(first_alone + 1)], [g for i, g in gaps.items() if i > first_alone]
    discarded = [e for e in watch.events[name] if e.get("outcome") == "discarded" and at < e["at"] < whole["at"]]
    return found | {
        "stall_s": alone["at"] - at - normal,
        "gap_s": max(failing) - normal,
        "joined_s": joined - at,
        "whole_s": whole["at"] - at,
        "rejoin_steps": max(later) / normal - 1,
        "discarded": sum(e["at"] < alone["at"] for e in discarded),
        "discarded_in_all": len(discarded),
    }


def _names(stack: str) -> list[str]:
    return ["r0"] if stack == "restart" else replica_names(REPLICAS)


def _job(stack: str, folder: Path) -> _Job:
    if stack == "ours":
        return OurJob(folder)
    if stack in ("restart", "native"):
        return PeerJob(train_hybrid, REPLICAS * SHARDS, ["r0"], (str(folder), stack == "restart"))
    return TorchftJob(folder, TUNED if stack == "torchft, tuned" else DEFAULT)


def faulty_run(stack: str, faults: list[Fault]) -> dict[str, Any]:
    """Run a job with faults; return what each cost, and whether all replicas held the same weights at the end."""
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        cells, watch = Cells(folder), Watch(folder)
        cells.allow(1 << 40)
        job = _job(stack, folder)
        try:
            struck = [_strike(watch, cells, _names(stack), fault) for fault in faults]
        finally:
            job.end()
        watch.look()
        found = [measured(watch, one, stack == "restart") for one in struck]
        ends = [e["digests"] for events in watch.events.values() for e in events if e["kind"] == "ended"]
        return {"faults": found, "equal": len(ends) == REPLICAS and ends[0] == ends[1] if stack == "ours" else None}


# Without faults


def fault_free_run(pairs: int) -> dict[str, Any]:
    """Time steps of ours and of native hybrid sharding in turn; return a value for each block of steps.

    ``phases`` are the median seconds of what ours does beside computing.
    """
    with tempfile.TemporaryDirectory() as path:
        folders = {name: Path(path, name) for name in ("ours", "native")}
        for folder in folders.values():
            folder.mkdir()
        cells = {name: Cells(folder) for name, folder in folders.items()}
        watches = {name: Watch(folder) for name, folder in folders.items()}
        jobs = {}
        try:
            for name, folder in folders.items():
                jobs[name] = _job(name, folder)
            found: dict[str, list[float]] = {"ours": [], "native": []}
            for pair in range(-1, pairs):
                for name in sorted(found, reverse=bool(pair % 2)):
                    seconds = _block(cells[name], watches[name], (pair + 2) * BLOCK)
                    if pair >= 0:
                        found[name].append(seconds)
        finally:
            for job in jobs.values():
                job.end()
        own = [event["seconds"] for event in watches["ours"].commits("r0")[BLOCK:]]
        phases = {name: statistics.median(one.get(name, 0.0) for one in own) for name in own[-1]}
        return {**found, "phases": phases}


def _block(cells: Cells, watch: Watch, until: int) -> float:
    """Let a job train up to a step; return the median seconds between its commits."""
    cells.allow(until)
    watch.until(lambda: any(e["step"] >= until for e in watch.commits("r0")), f"step {until}")
    times = [e["at"] for e in watch.commits("r0") if e["step"] > until - BLOCK]
    return statistics.median(b - a for a, b in pairwise(times))


# The part

_APART = "import sys; sys.path.insert(0, sys.argv[1]); import _replica_stalls; _replica_stalls.be_apart(*sys.argv[2:])"


def apart(function: Literal["faulty_run", "fault_free_run"], *arguments: Any) -> dict[str, Any]:
    """Run a function in a process that has no program of its own, which all ranks would load again.

    Raises:
        TimeoutError: If what it waits for does not come about.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "found")
        words = [str(Path(__file__).parent), function, json.dumps(arguments), str(path)]
        done = subprocess.run([sys.executable, "-c", _APART, *words], stdout=subprocess.DEVNULL)
        if not path.exists():
            raise RuntimeError(f"a run ended with {done.returncode}; what it said is above")
        found: dict[str, Any] = json.loads(path.read_text())
    if "late" in found:
        raise TimeoutError(found["late"])
    return found


def be_apart(function: str, arguments: str, path: str) -> None:
    """Be the process of :func:`apart`."""
    given = json.loads(arguments)
    try:
        if function == "faulty_run":
            found: dict[str, Any] = faulty_run(given[0], [Fault(**one) for one in given[1]])
        else:
            found = fault_free_run(*given)
    except TimeoutError as error:
        found = {"late": str(error)}
    Path(path).write_text(json.dumps(found))


def _plan(rounds: int, quick: bool) -> Iterator[tuple[str, list[Fault]]]:
    """Return the runs of all stacks, in turn over rounds, and in each one without faults.

    The places of faults within a step are spread evenly.
    """
    draw = random.Random(0)
    for number in range(rounds):

        def faults(kinds: list[FaultKind], number: int = number) -> list[Fault]:
            count = rounds * len(kinds)
            found = []
            for place, kind in enumerate(kinds):
                share = (number * len(kinds) + place + draw.random()) / count
                found.append(Fault(kind, (number + place) % REPLICAS, (number // 2 + place) % SHARDS, share))
            return found

        if quick:
            yield "ours", faults(["kill", "freeze"])
        else:
            yield "ours", faults(["kill", "kill", "kill"])
            yield "ours", faults(["freeze", "freeze one"])
            yield "torchft, tuned", faults(["kill", "kill"])
            yield "torchft, tuned", faults(["freeze"])
            yield "torchft", faults(["kill"])
            if number % 2 == 0:
                yield "torchft", faults(["freeze"])
            yield "restart", faults(["kill"])
        yield "ours and native", []


def _row(stack: str, kind: str, faults: list[dict[str, Any]]) -> dict[str, Any]:
    """Return medians, quartiles and the worst of the figures of one stack and one kind of fault."""
    row: dict[str, Any] = {"stack": stack, "kind": kind, "count": len(faults)}
    for name in ("stall_s", "gap_s", "regained_s", "joined_s", "whole_s", "rejoin_steps", "discarded", "step_s"):
        values = [float(one[name]) for one in faults if name in one]
        if values:
            row[name] = Spread.of(values).to_json() | {"worst": max(values)}
    return row


def _print(console: Console, rows: list[dict[str, Any]]) -> None:
    table = Table(title="what a failure costs the others (measured)", title_justify="left")
    headings = (
        "stack",
        "fault",
        "times",
        "stall s",
        "worst",
        "regained s",
        "whole again s",
        "rejoin steps",
        "discarded",
    )
    for heading in headings:
        table.add_column(heading)
    for row in rows:
        cells = [row["stack"], row["kind"], str(row["count"])]
        for name, part, digits in (
            ("stall_s", "median", 2), ("stall_s", "worst", 2), ("regained_s", "median", 1), ("whole_s", "median", 1),
            ("rejoin_steps", "worst", 2), ("discarded", "worst", 0),
        ):  # fmt: skip
            cells.append(f"{row[name][part]:.{digits}f}" if name in row else "")
        table.add_row(*cells)
    console.print(table)


def _reached(rows: list[dict[str, Any]], ratio: float, equal: bool) -> dict[str, bool]:
    """Return which targets ours reaches; faults count by the worst."""
    own = {row["kind"]: row for row in rows if row["stack"] == "ours"}

    def worst(name: str) -> float:
        return max(row[name]["worst"] for row in own.values())

    return {
        "kill": own["kill"]["stall_s"]["worst"] <= TARGETS["kill_s"],
        "freeze": max(row["stall_s"]["worst"] for k, row in own.items() if k != "kill") <= TARGETS["freeze_s"],
        "overhead": ratio <= TARGETS["overhead"],
        "rejoin": worst("rejoin_steps") <= TARGETS["rejoin_steps"],
        "discarded": worst("discarded") <= TARGETS["discarded"],
        "equal weights": equal,
    }


def _left_out(console: Console, quick: bool) -> dict[str, str]:
    """Return the stacks that are left out with the reason."""
    try:
        if not quick:
            check_torchft()
    except PeerUnavailable as error:
        console.print(f"torchft: left out, {error}", markup=False)
        return {"torchft": str(error)}
    return {}


def _run(console: Console, key: dict[str, Any], function: Literal["faulty_run", "fault_free_run"], *given: Any) -> Any:
    try:
        return apart(function, *given)
    except TimeoutError as error:
        console.print(f"{key}: {error}", markup=False)
        return {"faults": [], "equal": False, "failed": str(error)}


def stalls(console: Console, quick: bool, pieces: FinishedPieces) -> dict[str, Any]:
    """Time how long the others stand still when a replica fails, and what all this costs without failures."""
    left_out = _left_out(console, quick)
    runs: list[dict[str, Any]] = []
    free: list[dict[str, Any]] = []
    for stack, faults in _plan(1 if quick else ROUNDS, quick):
        if stack.startswith("torchft") and left_out:
            continue
        key = {"stack": stack, "faults": [asdict(fault) for fault in faults]} if faults else {"fault free": len(free)}
        run = pieces.get(key)
        if run is None:
            function, *given = (
                ("faulty_run", stack, key["faults"]) if faults else ("fault_free_run", 2 if quick else PAIRS)
            )
            run = _run(console, key, function, *given)
            pieces.add(key, run)
        if faults:
            runs.append({"stack": stack, **run})
        else:
            free.append(run)
    return _report(console, runs, free) | {"left_out": left_out}


def _report(console: Console, runs: list[dict[str, Any]], free: list[dict[str, Any]]) -> dict[str, Any]:
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for run in runs:
        for one in run["faults"]:
            groups.setdefault((run["stack"], one["kind"]), []).append(one)
    rows = [_row(stack, kind, found) for (stack, kind), found in groups.items()]
    ratios = Spread.of(
        [a / b for run in free if "ours" in run for a, b in zip(run["ours"], run["native"], strict=True)]
    )
    equal = all(run["equal"] for run in runs if run["stack"] == "ours")
    reached = _reached(rows, ratios.median, equal)
    _print(console, rows)
    console.print(
        f"without faults, a step of ours takes {ratios.median:.3f} times one of torch's hybrid sharding "
        f"({ratios.low:.3f} to {ratios.high:.3f}, {ratios.count} pairs of {BLOCK} steps)"
    )
    console.print(f"reached: {', '.join(name for name, one in reached.items() if one)}")
    console.print(f"missed: {', '.join(name for name, one in reached.items() if not one) or 'nothing'}")
    return {
        "evidence": "measured",
        "targets": TARGETS,
        "reached": reached,
        "measured_elsewhere": MEASURED_ELSEWHERE,
        "model": {"width": WIDTH, "hidden": HIDDEN, "blocks": BLOCKS, "rows": ROWS, "microbatches": MICROBATCHES},
        "mesh": {"replicas": REPLICAS, "shards": SHARDS},
        "tolerance": TOLERANCE.model_dump(),
        "torchft": {"default": asdict(DEFAULT), "tuned": asdict(TUNED)},
        "checkpoint_every": CHECKPOINT_EVERY,
        "rows": rows,
        "overhead": ratios.to_json(),
        "fault_free": free,
        "runs": runs,
        "notes": [
            "stall: from the signal to the first step that the others commit without the victim, less a normal step",
            "gap: the longest time between two commits until then, less a normal step",
            "whole again: from the signal to the first step with a replacement that contributes",
            "rejoin: the longest of the others' later steps, up to the fourth with the replacement, less a normal one",
        ],
    }
