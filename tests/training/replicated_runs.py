"""Runs of two replicas: faults that come while both train, and what their events say meanwhile.

How many steps a fault takes follows from the machine. A run that has faults is therefore one of :data:`ENDLESS` steps,
and is asked to stop once they are over.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cordillera import workflows
from cordillera.distributed.fault_tolerance.events import FOLDER, read_events
from cordillera.recipe import LanguageRecipe
from cordillera.training.checkpoints import steps

ENDLESS = 10**6
BOTH = ["r0", "r1"]
_SECONDS = 120.0


def eventually(is_so: Callable[[], bool], what: str) -> None:
    """Wait until something is so; fail, and say ``what`` is not, after far longer than a busy machine takes."""
    until = time.monotonic() + _SECONDS
    while not is_so():
        assert time.monotonic() < until, what
        time.sleep(0.02)


def processes_of(folder: Path, replica: str) -> list[int]:
    """Processes of the newest start of a replica."""
    joined = [e for e in read_events(folder) if e["kind"] == "joined" and e["writer"] == replica]
    return [int(one) for one in joined[-1]["processes"]]


def starts(folder: Path, replica: str) -> int:
    """How often a replica has joined its job."""
    path = folder / FOLDER / f"{replica}.jsonl"
    return path.read_bytes().count(b'{"kind": "joined"') if path.exists() else 0


def taken(folder: Path, replica: str) -> tuple[int, list[str]]:
    """Step that a replica has just committed, and who took part; 0 and nobody if its last event is another.

    Only the end of its events is read: reading all of them takes long.
    """
    path = folder / FOLDER / f"{replica}.jsonl"
    if not path.exists():
        return 0, []
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - 2000))
        lines = [line for line in file.read().splitlines(keepends=True) if line.endswith(b"}\n")]
    event = json.loads(lines[-1]) if lines and lines[-1].startswith(b'{"kind": "step"') else {"outcome": None}
    return (event["step"], event["participants"]) if event["outcome"] == "committed" else (0, [])


def together(folder: Path, after: int = 0) -> bool:
    """Whether both replicas took part in the last step of each, which comes later than one."""
    return all(step > after and names == BOTH for step, names in (taken(folder, name) for name in BOTH))


def training(recipe: LanguageRecipe, folder: str, faults: list[tuple[int, Callable[[Path], None]]]) -> Any:
    """Train, and do each of ``faults`` in turn once both replicas have committed its step together."""
    done, failed, is_over = [], [], threading.Event()

    def inject() -> None:
        place = Path(folder)
        try:
            for step, fault in faults:
                eventually(lambda at=step: is_over.is_set() or together(place, at - 1), f"no step {step} of both")
                if is_over.is_set():
                    return
                done.append(step)
                fault(place)
        except BaseException as error:
            failed.append(error)
            if not is_over.is_set():
                stop(place)  # or a run without end would go on

    thread = threading.Thread(target=inject)
    thread.start()
    try:
        return workflows.train(recipe, folder)
    finally:
        is_over.set()
        thread.join()
        if failed:
            raise failed[0]
        assert len(done) == len(faults), "a fault did not come to pass"


def stop(folder: Path) -> None:
    """Ask the job, which is this process, to stop."""
    os.kill(os.getpid(), signal.SIGINT)


def kill(folder: Path, *replicas: str, rank: int = 0) -> None:
    """Kill a process of each of some replicas."""
    processes = [processes_of(folder, name)[rank] for name in replicas]
    for one in processes:
        os.kill(one, signal.SIGKILL)


def kill_and_await(folder: Path, *replicas: str, rank: int = 0, after: int = 0) -> None:
    """Kill some replicas, and wait until new processes of them train with the others, later than a step."""
    before = {name: starts(folder, name) for name in replicas}
    kill(folder, *replicas, rank=rank)
    eventually(
        lambda: all(starts(folder, name) > count for name, count in before.items()) and together(folder, after),
        f"{' and '.join(replicas)} did not come back",
    )


def newest_checkpoint(folder: Path) -> int:
    """Step of the newest checkpoint in a run's folder; more than there are if there is none."""
    return max(steps(folder / "checkpoints"), default=ENDLESS)


def freeze(folder: Path, *replicas: str, newest: Callable[[Path], int] = newest_checkpoint) -> int:
    """Stop the processes of some replicas after the newest checkpoint, so that none is written any more.

    They have committed at least two steps since, the first of which their coordinator knows.

    Args:
        newest: Function that returns the step of the newest checkpoint.

    Returns:
        That step.
    """
    processes = [processes_of(folder, name)[0] for name in replicas]

    def is_between() -> bool:
        for one in processes:
            os.kill(one, signal.SIGSTOP)
        if min(taken(folder, name)[0] for name in replicas) > newest(folder) + 1:
            return True
        for one in processes:
            os.kill(one, signal.SIGCONT)
        return False

    eventually(is_between, "there was no moment between two checkpoints")
    return newest(folder)
