"""Jobs of two replicas that meet hundreds of random faults, and what one process makes of their logs of commits."""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from _replica_history import Replay, check_history, committed, weights_of
from _results import FinishedPieces
from rich.console import Console
from rich.table import Table

import cordillera
from cordillera.distributed.fault_tolerance.events import read_events
from cordillera.recipe import LanguageRecipe, dump, validate
from cordillera.run import Run

SEEDS, FAULTS, LEAST_STEPS = (1, 2, 3), 200, 1000
EVERY_S, SECONDS, FACTOR = 3.0, (0.2, 3.0), 4.0
KINDS = {
    "kill": 3.0, "stop": 2.0, "slow": 1.0, "cut": 2.0, "full-disk": 1.0, "kill-coordinator": 1.0,
    "pause-coordinator": 1.0, "corrupt-checkpoint": 0.5,
}  # fmt: skip
_ENDS_S = 60.0  # from the last fault to the end of the job
_OF_ONE = ("kill", "stop", "slow", "cut", "full-disk")  # faults of one replica


def recipe(seed: int) -> LanguageRecipe:
    """Return the recipe of two replicas of one process each; every step compares digests of all weights."""
    sizes = {"layers": 2, "hidden": 64, "heads": 2, "kv_heads": 1, "ffn": 128, "vocabulary": 264, "context": 256}
    content: dict[str, Any] = {
        "device": "cpu",
        "threads": 1,
        "seed": seed,
        "data": {"path": "python-library", "tokenizer": "bytes"},
        "packing": {"tokens": 1024, "context": 256, "microbatches": 4},
        "model": {"name": "llama", **sizes},
        "training": {
            "steps": 10**6, "log_every": 100, "evaluate_every": None, "checkpoint_every": 25, "keep_checkpoints": 3,
        },
        "fault_tolerance": {
            "replicas": 2, "deadline_s": 1.0, "compare_every": 1, "start_s": 20.0, "retries": 1000,
        },
    }  # fmt: skip
    found = validate(content)
    assert isinstance(found, LanguageRecipe)
    return found


def plan(seed: int, count: int) -> str:
    """Return the plan of faults as TOML."""
    kinds = ", ".join(f"{name} = {weight}" for name, weight in KINDS.items())
    return (
        f"seed = {seed}\n[random]\ncount = {count}\nevery_s = {EVERY_S}\nseconds = {list(SECONDS)}\n"
        f"factor = {FACTOR}\nkinds = {{ {kinds} }}\n"
    )


def _command(folder: Path, name: str, *words: str) -> subprocess.Popen[bytes]:
    """Start a command of the code that this process has loaded."""
    paths = os.pathsep.join([str(Path(cordillera.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    with open(folder / f"{name}.log", "wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "cordillera", *words],
            cwd=folder, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, "PYTHONPATH": paths},
        )  # fmt: skip


def run(folder: Path, seed: int, count: int) -> None:
    """Run one job with its faults in ``folder``.

    Raises:
        RuntimeError: If it did not survive them.
    """
    made, seconds = recipe(seed), (count + 30) * EVERY_S + 120
    folder.mkdir()
    (folder / "recipe.toml").write_text(dump(made))
    (folder / "plan.toml").write_text(plan(seed, count))
    training = _command(folder, "train", "train", "recipe.toml", "--run", "run", "--quiet")
    try:
        until = time.monotonic() + 120
        while not list(folder.glob("run/checkpoints/step-*")):  # before, nothing goes on when all replicas are lost
            if time.monotonic() > until or training.poll() is not None:
                raise RuntimeError(_said(folder))
            time.sleep(0.1)
        chaos = _command(folder, "chaos", "chaos", "run", "--plan", "plan.toml", "--wait", "60")
        try:
            code = chaos.wait(seconds)
        finally:
            chaos.kill()
            chaos.wait()
        if code or training.poll() is not None:
            raise RuntimeError(_said(folder))
        _wait_until_whole(folder, time.time(), time.monotonic() + _ENDS_S)
        training.send_signal(signal.SIGINT)
        training.wait(_ENDS_S)
    finally:
        training.kill()
        training.wait()


def _wait_until_whole(folder: Path, after: float, until: float) -> None:
    """Wait for a step that both replicas commit after a time."""
    while time.monotonic() < until:
        time.sleep(1)
        events = [event for event in read_events(folder / "run") if event["at"] > after]
        if any(e.get("outcome") == "committed" and len(e["participants"]) == 2 for e in events):
            return
    raise RuntimeError(f"no step of both replicas after the last fault: {_said(folder)}")


def _said(folder: Path) -> str:
    return "\n".join(path.read_text() for path in sorted(folder.glob("*.log")))


def examined(folder: Path, seed: int, count: int) -> dict[str, Any]:
    """Return what the events of a job say, and whether one process trains the same weights.

    Raises:
        RuntimeError: If there were fewer faults than planned.
    """
    history, found = committed(folder / "run"), judged(read_events(folder / "run"))
    if sum(found["faults"].values()) < count:
        raise RuntimeError(f"{found['faults']} of {count} faults: {_said(folder)}")
    check_history(history, len(history))
    torch.set_num_threads(1)
    replay = Replay(recipe(seed))
    replay.follow(history)
    wanted, weights = replay.weights(), weights_of(Run(folder / "run"))
    found |= {"steps": len(history), "alone": _alone(history)}
    return {**found, "equal": all(torch.equal(weights[name], one) for name, one in wanted.items())}


def _alone(history: Sequence[dict[str, Any]]) -> float:
    """Return the share of steps that one replica trained."""
    return statistics.fmean(len(event["participants"]) == 1 for event in history)


def judged(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what the events of a job say of its faults and of what they cost."""
    faults = [event for event in events if event["kind"] == "fault"]
    times = sorted(event["at"] for event in events if event.get("outcome") == "committed")
    rollbacks = [event for event in events if event["kind"] == "rollback"]
    return {
        "faults": dict(Counter(event["what"] for event in faults)),
        "ended": sum(event["kind"] == "ended" for event in events),
        "unexplained": unexplained(events),
        "discarded": sum(event.get("outcome") == "discarded" for event in events),
        "rollbacks": len(rollbacks),
        "longest_s": max(b - a for a, b in pairwise(times)),
        "median_s": statistics.median(b - a for a, b in pairwise(times)),
    }


def unexplained(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the ends of replicas' processes before which nothing happened to them since they were started."""
    struck, found = dict[str, bool](), []
    for event in sorted(events, key=lambda event: event["at"]):
        if event["kind"] == "fault" and event["what"] in _OF_ONE:
            struck[event["replica"]] = True
        elif event["kind"] == "ended":
            if not struck.get(event["replica"]):
                found.append(event)
            struck[event["replica"]] = False
    return found


def survival(console: Console, quick: bool, pieces: FinishedPieces) -> dict[str, Any]:
    """Let jobs meet their faults, and train their histories again in one process."""
    seeds, count = (SEEDS[:1], 5) if quick else (SEEDS, FAULTS)
    table = Table(title=f"2 replicas and {count} random faults (measured)", title_justify="left")
    headings = ("seed", "faults", "steps", "alone", "given up", "rollbacks", "no step for", "unexplained", "replay")
    for heading in headings:
        table.add_column(heading)
    results = []
    for seed in seeds:
        key = {"seed": seed, "faults": count, "every_s": EVERY_S, "kinds": KINDS}
        if (found := pieces.get(key)) is None:
            with tempfile.TemporaryDirectory() as shared:
                folder = Path(shared, "job")
                run(folder, seed, count)
                found = examined(folder, seed, count)
            pieces.add(key, found)
        results.append({"seed": seed, **found})
        table.add_row(
            str(seed), str(sum(found["faults"].values())), f"{found['steps']:,}", f"{found['alone']:.0%}",
            str(found["discarded"]), str(found["rollbacks"]), f"{found['longest_s']:.1f} s",
            str(len(found["unexplained"])), "equal to the bit" if found["equal"] else "DIFFERS",
        )  # fmt: skip
    console.print(table)
    return {
        "evidence": "measured",
        "faults": count,
        "every_s": EVERY_S,
        "kinds": KINDS,
        "least_steps": LEAST_STEPS,
        "results": results,
        "notes": [
            "two replicas of one process each; every step compares digests of all weights",
            "the replay trains the committed steps in one process, from the seed of the weights on",
        ],
    }
