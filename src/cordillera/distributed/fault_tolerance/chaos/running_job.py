"""A running job of replicas as its events show it: which step it is at, and which processes it has.

Files of events grow all the time. Each look reads what was added since the last one, and parses the few lines of it
that tell of processes, and the last step.
"""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import Any

from cordillera.distributed.fault_tolerance.chaos.processes import JobLock, JobProcess, find_process
from cordillera.distributed.fault_tolerance.events import FOLDER
from cordillera.errors import RunError
from cordillera.files import parse_sealed
from cordillera.run import Run, read_recipe

_AGAIN_S = 0.1
_CHUNK = 1 << 20
_SEEN = (b'{"kind": "joined"', b'{"kind": "started"', b'{"kind": "coordinator"')
_STEP, _COMMITTED = b'{"kind": "step"', b'"outcome": "committed"'


class EventTail:
    """Reader of the events appended to a file.

    Args:
        path: File, which may not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._read = 0

    def added(self) -> list[dict[str, Any]]:
        """Return the events of processes since the last call, and the last committed step.

        Raises:
            RunError: If a line is damaged.
        """
        try:
            if self.path.stat().st_size <= self._read:
                return []
            with open(self.path, "rb") as file:
                return self._parsed(file)
        except FileNotFoundError:
            return []

    def _parsed(self, file: Any) -> list[dict[str, Any]]:
        found, step = [], b""
        rest = b""
        file.seek(self._read)
        while chunk := file.read(_CHUNK):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                self._read += len(line) + 1
                if line.startswith(_SEEN):
                    found.append(self._event(line))
                elif line.startswith(_STEP) and _COMMITTED in line:
                    step = line
        return [*found, self._event(step)] if step else found

    def _event(self, line: bytes) -> dict[str, Any]:
        text = line.decode("utf-8", errors="replace") + "\n"
        return parse_sealed(text, str(self.path), line=True, required=True, error=RunError)


class RunningJob:
    """A job of replicas that runs on this machine.

    Args:
        run: Run that it trains.

    Attributes:
        step: Newest committed step that was seen.
        ranks: Number of processes of each replica; 0 until a replica has joined.

    Raises:
        RunError: If it does not run, or is not one of replicas.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.step = self.ranks = 0
        _, recipe = read_recipe(run)
        tolerance = recipe.get("fault_tolerance")
        replicas = tolerance.get("replicas", 1) if isinstance(tolerance, dict) else 1
        if replicas < 2 and not (run.folder / FOLDER).is_dir():
            raise RunError(
                "is not trained by replicas", where=str(run.folder), remedy="train it with --replicas 2 or more"
            )
        try:
            self._lock = JobLock(run.folder)
        except LookupError:
            raise _not_running(run) from None
        self._tails: dict[str, EventTail] = {}
        self._ranks: dict[tuple[str, int], tuple[int, float]] = {}
        self._coordinator: tuple[int, float] | None = None
        self._names: set[str] = set()
        self._found: dict[tuple[int, float], JobProcess] = {}

    @property
    def replicas(self) -> list[str]:
        """Names of its replicas."""
        return sorted(self._names)

    @property
    def is_over(self) -> bool:
        """Whether it has ended."""
        return not self._lock.is_held

    def look(self) -> None:
        """Read the events written since the last call."""
        for name in ("launcher", *self._names):
            tail = self._tails.setdefault(name, EventTail(self.run.folder / FOLDER / f"{name}.jsonl"))
            for event in tail.added():
                if event["at"] >= self._lock.taken:  # skips events of an earlier job that this one resumes
                    self._take(name, event)

    def _take(self, writer: str, event: dict[str, Any]) -> None:
        if event["kind"] == "started":
            self._names.add(event["replica"])
        elif event["kind"] == "coordinator":
            if event["process"] == self._lock.launcher.pid:
                raise RunError(
                    "its replicas were started elsewhere, so that nothing shows which processes are theirs",
                    where=str(self.run.folder),
                    remedy="faults are injected into jobs of `cordillera train --replicas N`",
                )
            self._coordinator = event["process"], event["at"]
        elif event["kind"] == "joined":
            self.ranks = len(event["processes"])
            for rank, process in enumerate(event["processes"]):
                self._ranks[writer, rank] = process, event["at"]
        if event["kind"] in ("joined", "step"):
            self.step = max(self.step, event["step"])

    def rank(self, replica: str, rank: int) -> JobProcess | None:
        """Return a process of a replica; None while it does not run."""
        return self._process(self._ranks.get((replica, rank)), f"cordillera {rank}")

    def coordinator(self) -> JobProcess | None:
        """Return the coordinator; None while it does not run."""
        return self._process(self._coordinator, None)

    def _process(self, told: tuple[int, float] | None, name: str | None) -> JobProcess | None:
        """Return the process of an event, the same object for each event, as the object tracks its holders."""
        if told is None:
            return None
        if told not in self._found:
            found = find_process(told[0], written=told[1], launcher=self._lock.launcher, name=name)
            if found is None:
                return None
            newest = {*self._ranks.values(), self._coordinator}
            self._found = {key: one for key, one in self._found.items() if key in newest} | {told: found}
        found = self._found[told]
        return found if found.is_running else None


def find_job(folder: Path, wait_s: float = 0.0) -> RunningJob:
    """Return the job that trains a run, once its first replica has joined.

    Args:
        folder: Folder of the run.
        wait_s: Longest time in seconds until it begins.

    Raises:
        RunError: If there is no such run, it is not one of replicas, or it does not run any more or in time.
    """
    until = time.monotonic() + wait_s
    while True:
        try:
            job = RunningJob(Run(folder))
            break
        except RunError:
            if time.monotonic() >= until:
                raise
        time.sleep(_AGAIN_S)
    while True:
        job.look()
        if job.ranks:
            return job
        if job.is_over:
            raise _not_running(job.run)
        time.sleep(_AGAIN_S)


def _not_running(run: Run) -> RunError:
    status = run.status()
    if status is not None and status.ended is not None:
        how = f"its job is over: {status.ended} at step {status.step:,}"
    else:
        how = "no process on this machine trains it"
    remedy = f"start it first, or go on with `cordillera train {shlex.quote(str(run.folder))} --resume`"
    return RunError(how, where=str(run.folder), remedy=remedy)
