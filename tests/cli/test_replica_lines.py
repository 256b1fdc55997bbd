"""What happens to replicas is said while they train."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from cordillera.cli import _replicas
from cordillera.distributed.fault_tolerance.events import FOLDER, EventLog


def test_a_loss_and_its_end_are_told_once_and_calm_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_replicas, "_POLL_S", 0.01)
    launcher, coordinator = (EventLog(tmp_path / FOLDER / f"{name}.jsonl") for name in ("launcher", "coordinator"))
    launcher.write("ended", replica="r0", attempt=1, why="of the run before")
    said: list[str] = []
    with _replicas.replicas_told(tmp_path, said.append):
        launcher.write("coordinator", process=1, port=2)
        launcher.write("started", replica="r1", attempt=1)
        coordinator.write("epoch", epoch=1, step=0, members=["r0", "r1"])
        coordinator.write("epoch", epoch=2, step=3, members=["r0", "r1"])
        launcher.write("ended", replica="r1", attempt=1, why="rank 0 was ended by SIGKILL")
        with open(tmp_path / FOLDER / "launcher.jsonl", "ab") as file:
            file.write(b'not JSON\n{"kind": "ended"')  # the second is cut off
    assert said == ["r1 ended: rank 0 was ended by SIGKILL"]
    with _replicas.replicas_told(tmp_path / "new", said.append):  # of which there is no folder yet
        coordinator = EventLog(tmp_path / "new" / FOLDER / "coordinator.jsonl")
        coordinator.write("epoch", epoch=1, step=0, members=["r0", "r1"])
        coordinator.write("epoch", epoch=2, step=1_003, members=["r0"])
        coordinator.write("epoch", epoch=3, step=1_005, members=[])
        coordinator.write("epoch", epoch=4, step=1_010, members=["r0", "r1"])
        coordinator.write("epoch", epoch=5, step=1_011)  # two that are damaged
        coordinator.write("epoch", epoch=6, members=["r0"])
        launcher = EventLog(tmp_path / "new" / FOLDER / "launcher.jsonl")
        launcher.write("started", replica="r1", attempt=2)
        launcher.write("given up", replica="r1", why="it ended 3 times")
        launcher.write("coordinator ended", code=-9)
    assert sorted(said[1:]) == [
        "r1 is not started again: it ended 3 times",
        "r1 is started again",
        "step 1,003: training goes on with r0",
        "step 1,005: training goes on with no replica",
        "step 1,010: training goes on with r0, r1",
        "the coordinator ended and is started again",
    ]


def test_a_coordinator_that_was_stopped_goes_on_where_replicas_look_for_it(cli, monkeypatch) -> None:
    report = SimpleNamespace(ended="interrupted", progress=SimpleNamespace(step=1_200))

    def coordinated(recipe, folder, **options):
        return SimpleNamespace(run=SimpleNamespace(folder=folder), report=report)

    monkeypatch.setattr("cordillera.workflows.language.coordinate", coordinated)
    begun = ("coordinate", "llama-debug", "--run", "my run", "--replicas", 2)
    told = "interrupted at step 1,200; everything is saved\n  -> continue with: cordillera coordinate 'my run' --resume"
    for options, more in (((), ""), (("--listen", "0.0.0.0:29400"), " --listen 0.0.0.0:29400")):
        stopped = cli(*begun, *options)
        assert (stopped.code, stopped.out) == (130, f"{told}{more}\n"), stopped.err
