"""Threads beside other processes: ``cordillera bench threads``.

Measures steps of a DLRM, a Wukong and a Llama in float32, and batches scored by a chain of int8 layers, each in its own
process: with the threads that Cordillera chooses by default, with given numbers of threads, and with the defaults of
torch and OpenMP; once without other load, and once beside two processes that compute. Writes
``results/threads-neighbours.json``.
"""

from __future__ import annotations

import enum
import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from _machine import busy
from _results import RESULTS, make_console, write_part
from _tables import print_notes
from _timing import Timing, times_faster
from rich.console import Console
from rich.table import Table

from cordillera.kernels.threads import usable_cores

WORKER = Path(__file__).resolve().parent / "_thread_worker.py"
NEIGHBOURS = (0, 2)
LEAST_BESIDE, LEAST_ALONE = 0.8, 1.0
DEADLINE_S = 300.0
# A process that ends with its parent, however the parent ends.
COMPUTE = """
import os, sys, threading
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
while True: pass
"""
SETTINGS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


class Workload(str, enum.Enum):
    """Workloads to run."""

    dlrm = "dlrm"
    wukong = "wukong"
    llama = "llama"
    int8 = "int8"


class _Worker:
    """A process that takes steps on request."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        ready = select.select([self._process.stdout], [], [], DEADLINE_S)[0]
        line = self._process.stdout.readline() if ready else ""
        if not line:
            raise RuntimeError("a worker ended" if ready else f"a worker said nothing for {DEADLINE_S:g} s")
        found: dict[str, Any] = json.loads(line)
        return found

    def seconds(self, duration: float) -> float:
        """Return the seconds of a step, over about ``duration`` seconds."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{duration}\n")
        self._process.stdin.flush()
        found = self.answer()
        return float(found["seconds"]) / int(found["steps"])


@contextmanager
def _started(workload: str, threads: str, quick: bool) -> Iterator[_Worker]:
    environment = {name: value for name, value in os.environ.items() if name not in SETTINGS}
    process = subprocess.Popen(
        [sys.executable, str(WORKER), workload, threads, "quick" if quick else "whole"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip
    try:
        yield _Worker(process)
    finally:
        assert process.stdin is not None
        process.stdin.close()  # ends the process
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def _neighbours(count: int) -> Iterator[None]:
    others = [subprocess.Popen([sys.executable, "-c", COMPUTE], stdin=subprocess.PIPE) for _ in range(count)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def measure_case(workload: str, neighbours: int, quick: bool) -> dict[str, Any]:
    """Measure steps of a :class:`Workload` with all settings in turn, beside ``neighbours`` processes that compute."""
    cores = usable_cores()
    counts = [str(count) for count in ((cores,) if quick else sorted({1, max(1, cores // 2), cores}))]
    rounds, duration = (2, 0.05) if quick else (15, 0.4)
    with _neighbours(neighbours), ExitStack() as stack:
        workers = {name: stack.enter_context(_started(workload, name, quick)) for name in (*counts, "library")}
        for worker in workers.values():
            worker.answer()
        # the others wait now, so that it does not count them as neighbours
        workers["default"] = stack.enter_context(_started(workload, "default", quick))
        chosen = workers["default"].answer()
        seconds: dict[str, list[float]] = {name: [] for name in workers}
        names = list(workers)
        for turn in range(rounds):
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                seconds[name].append(workers[name].seconds(duration))
    timings = {name: Timing(name, values) for name, values in seconds.items()}
    best = min(counts, key=lambda name: timings[name].spread.median)
    return {
        "workload": workload,
        "neighbours": neighbours,
        "threads": chosen["threads"],
        "chosen": chosen["chosen"],
        "best": int(best),
        "times_best": times_faster(timings["default"], timings[best]).to_json(),
        "times_library": times_faster(timings["default"], timings["library"]).to_json(),
        "seconds": {name: timing.spread.to_json() for name, timing in timings.items()},
    }


def _measure(console: Console, workloads: list[str], quick: bool) -> dict[str, Any]:
    load = busy()
    if load is not None and load > 1:
        console.print(f"warning: {load:g} processes were busy here in the last minute; measure on a quiet machine")
    rows = [measure_case(workload, count, quick) for count in NEIGHBOURS[quick:] for workload in workloads]
    table = Table(title="steps with the default settings (measured)", title_justify="left")
    for heading in ("workload", "beside", "threads", "times the best number", "times the library's", "quartiles"):
        table.add_column(heading)
    for row in rows:
        of_best, of_library = row["times_best"], row["times_library"]
        table.add_row(
            row["workload"], f"{row['neighbours']} processes", str(row["threads"]),
            f"{of_best['median']:.2f} ({row['best']})", f"{of_library['median']:.2f}",
            f"{of_library['low']:.2f} to {of_library['high']:.2f}",
        )  # fmt: skip
    console.print(table)
    notes = [
        f"asked: at least {LEAST_BESIDE:g} times as fast as the best number of threads beside two processes, and no "
        "slower than the library left alone where nothing else runs",
        "default: threads and waiting as Cordillera chooses; library: torch imported first, which spins as it likes",
    ]
    print_notes(console, notes)
    return {
        "evidence": "measured",
        "cores": usable_cores(),
        "targets": {"times_best_beside_two": LEAST_BESIDE, "times_library_alone": LEAST_ALONE},
        "rows": rows,
        "notes": notes,
    }


def main(
    workload: Annotated[
        list[Workload] | None, typer.Option("--workload", help="What to run; repeat it for several. Default: all.")
    ] = None,
    quick: Annotated[bool, typer.Option(help="Few points: shows that it works, its figures mean nothing.")] = False,
    results: Annotated[Path | None, typer.Option(help="Folder of the result file.")] = None,
) -> None:
    """Measure training and scoring beside processes that compute."""
    console = make_console()
    folder = results or (RESULTS / "quick" if quick else RESULTS)
    workloads = [one.value for one in workload or Workload]
    write_part(console, folder, "threads", "neighbours", quick, partial(_measure, console, workloads, quick))


if __name__ == "__main__":
    typer.run(main)
