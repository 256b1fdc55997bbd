"""Replicas of a language model: what is trained on while some of them fail, and that it is what one process trains."""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from _replica_history import Replay, check_history, committed, weights_of
from typer.testing import CliRunner

from cordillera import workflows
from cordillera.cli.app import app
from cordillera.data.language.prefetch import IterationsAhead
from cordillera.distributed.dtensors import local
from cordillera.distributed.fault_tolerance.chaos.processes import JobProcess
from cordillera.distributed.fault_tolerance.coordination import FaultToleranceConfig, Membership, initial_commit
from cordillera.distributed.fault_tolerance.events import read_events
from cordillera.distributed.fault_tolerance.launcher import ReplicaLauncher, ReplicaService, job_identity
from cordillera.distributed.fault_tolerance.replica import ReplicaPlace
from cordillera.distributed.job.launch import LaunchConfig
from cordillera.distributed.mesh import ProcessMesh
from cordillera.errors import CordilleraError, DataError, Interrupted, PlanError, RankError, RunError
from cordillera.recipe import LanguageRecipe, dump, validate
from cordillera.run import Run
from cordillera.training.checkpoints import folder_of, steps
from cordillera.training.language.checkpoints import ShardedCheckpoints
from cordillera.training.language.engine import LanguageEngine
from cordillera.training.language.replicated import ReplicatedTrainer
from cordillera.workflows.language import batches_of, coordinate, prepare
from tests.distributed.processes import needs_gloo
from tests.training.replicated_runs import (
    BOTH,
    ENDLESS,
    eventually,
    freeze,
    kill,
    kill_and_await,
    newest_checkpoint,
    processes_of,
    starts,
    stop,
    taken,
    together,
    training,
)

pytestmark = needs_gloo


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes a recipe of two replicas, with changes by section."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CORDILLERA_CACHE", str(tmp_path / "cache"))
    generator = random.Random(5)
    lines = ("far sea " * (1 + int(generator.paretovariate(0.8)) % 20) for _ in range(300))
    Path("text.jsonl").write_text("".join(json.dumps({"text": f"{n} {line}"}) + "\n" for n, line in enumerate(lines)))
    sizes = {"layers": 2, "hidden": 64, "heads": 2, "kv_heads": 1, "ffn": 128, "vocabulary": 258, "context": 256}

    def made(**changes: dict[str, Any]) -> LanguageRecipe:
        content: dict[str, dict[str, Any]] = {
            "data": {"path": "text.jsonl", "tokenizer": "bytes", "held_out": 0.1},
            "packing": {"tokens": 1024, "context": 256, "microbatches": 4},
            "model": {"name": "llama", **sizes},
            "training": {"steps": 40, "log_every": 10, "clip": None, "checkpoint_every": 15},
            "fault_tolerance": {"replicas": 2, "deadline_s": 1.0, "compare_every": 1, "start_s": 20.0},
        }
        for section, values in changes.items():
            content[section] = content.get(section, {}) | values
        found = validate({"device": "cpu", "threads": 1, **content})
        assert isinstance(found, LanguageRecipe)
        return found

    return made


def replayed(recipe: LanguageRecipe, history: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Weights after the steps of a history, trained one after the other by this process."""
    torch.set_num_threads(1)
    replay = Replay(recipe)
    replay.follow(history)
    return replay.weights()


def test_without_faults_it_is_what_one_process_trains(recipe: Any) -> None:
    patient = {"deadline_s": 30.0, "grace_s": 30.0, "start_s": 120.0}  # nobody is left out of a step
    training = {"steps": 5, "evaluate_every": 2, "log_every": 4}
    made = recipe(packing={"tokens": 256}, training=training, fault_tolerance=patient)
    outcome = workflows.train(made, "run")
    history = committed(Path("run"))
    check_history(history, 5)
    assert {event["epoch"] for event in history} == {1}
    assert all(event["participants"] == ["r0", "r1"] for event in history)
    found, wanted = weights_of(outcome.run), replayed(made, history)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in found)
    assert outcome.report.ended == "finished"
    assert outcome.report.progress.step == 5
    records = [(one["kind"], one["step"]) for one in outcome.run.metrics()]
    assert len(records) == len(set(records))
    assert {("train", 4), ("train", 5), ("evaluation", 2), ("evaluation", 4), ("checkpoint", 5)} <= set(records)
    assert outcome.run.status().is_complete


@pytest.mark.slow
def test_killed_replicas_change_nothing_but_who_takes_part(recipe: Any) -> None:
    made = recipe(training={"steps": ENDLESS})
    faults = [(10, lambda folder: kill_and_await(folder, "r1")), (20, lambda folder: kill_and_await(folder, "r0"))]
    outcome = training(made, "run", [*faults, (30, stop)])
    history = committed(Path("run"))
    check_history(history, outcome.report.progress.step)
    alone = [event["participants"] for event in history if len(event["participants"]) == 1]
    assert ["r0"] in alone
    assert ["r1"] in alone
    found, wanted = weights_of(outcome.run), replayed(made, history)
    assert all(torch.equal(found[name], wanted[name]) for name in found)
    ended = [event for event in read_events(Path("run")) if event["kind"] == "ended"]
    assert [event["replica"] for event in ended] == ["r1", "r0"]


@pytest.mark.slow
def test_a_stopped_replica_is_left_behind_and_catches_up(recipe: Any) -> None:
    def leave_behind(folder: Path) -> None:
        process = processes_of(folder, "r1")[0]
        os.kill(process, signal.SIGSTOP)
        eventually(lambda: taken(folder, "r0")[1] == ["r0"], "the other takes no step alone")
        os.kill(process, signal.SIGCONT)
        eventually(lambda: together(folder), "it does not catch up")

    outcome = training(recipe(training={"steps": ENDLESS}), "run", [(10, leave_behind), (20, stop)])
    history = committed(Path("run"))
    check_history(history, outcome.report.progress.step)
    assert ["r0"] in [event["participants"] for event in history]
    assert not [event for event in read_events(Path("run")) if event["kind"] == "ended"]  # it was never started anew


@pytest.mark.slow
def test_a_coordinator_that_is_killed_comes_back_and_no_step_is_lost(recipe: Any) -> None:
    def coordinators(folder: Path) -> list[int]:
        return [event["process"] for event in read_events(folder) if event["kind"] == "coordinator"]

    def end(folder: Path) -> None:
        before = coordinators(folder)
        os.kill(before[-1], signal.SIGKILL)
        eventually(lambda: len(coordinators(folder)) > len(before), "it does not come back")

    outcome = training(recipe(training={"steps": ENDLESS}), "run", [(10, end), (50, end), (90, stop)])
    check_history(committed(Path("run")), outcome.report.progress.step)
    events = read_events(Path("run"))
    assert sum(event["kind"] == "coordinator" for event in events) == 3
    assert not [event for event in events if event["kind"] in ("ended", "rollback")]
    assert outcome.report.ended == "interrupted"


@pytest.mark.slow
@pytest.mark.parametrize("replica", ["r0", "r1"])
def test_cut_connections_are_made_anew(recipe: Any, replica: str) -> None:
    def cut(folder: Path) -> None:
        assert JobProcess(processes_of(folder, replica)[0]).cut() >= 2  # to the coordinator and to the other replica
        reached = max(taken(folder, name)[0] for name in BOTH) + 1  # which may have been summed before
        eventually(lambda: together(folder, reached), "no step of both follows")

    made = recipe(training={"steps": ENDLESS})
    outcome = training(made, "run", [(10, cut), (30, cut), (50, stop)])
    history = committed(Path("run"))
    check_history(history, outcome.report.progress.step)
    # those to its launcher are not, which a rank may notice when the job is over
    last = history[-1]["at"]
    assert not [event for event in read_events(Path("run")) if event["kind"] == "ended" and event["at"] < last]
    found, wanted = weights_of(outcome.run), replayed(made, history)
    assert all(torch.equal(found[name], wanted[name]) for name in found)


@pytest.mark.slow
def test_a_disk_that_is_full_in_a_save_ends_its_replica_and_no_step_is_lost(recipe: Any) -> None:
    """Every file of the replica is full from step 8 on; the checkpoint after step 10 is its first large one."""

    def fill(folder: Path) -> None:
        process, before = processes_of(folder, "r0")[0], starts(folder, "r0")  # of two, the first one saves
        _, most = resource.prlimit(process, resource.RLIMIT_FSIZE)
        resource.prlimit(process, resource.RLIMIT_FSIZE, (100_000, most))
        eventually(lambda: starts(folder, "r0") > before and together(folder), "it does not come back")

    made = recipe(training={"steps": ENDLESS, "checkpoint_every": 10})
    outcome = training(made, "run", [(8, fill), (30, stop)])
    history, reached = committed(Path("run")), outcome.report.progress.step
    check_history(history, reached)
    (ended,) = [event for event in read_events(Path("run")) if event["kind"] == "ended"]
    assert ended["replica"] == "r0"
    assert steps(outcome.run.checkpoints)[-1] == reached
    assert not list(outcome.run.checkpoints.glob("*.part*"))
    found, wanted = weights_of(outcome.run), replayed(made, history)
    assert all(torch.equal(found[name], wanted[name]) for name in found)


@pytest.mark.slow
def test_a_rank_of_a_replica_takes_the_whole_replica_with_it(recipe: Any) -> None:
    made = recipe(parallel={"shard": 2}, training={"steps": ENDLESS}, fault_tolerance={"deadline_s": 2.0})
    faults = [
        (8, lambda folder: kill_and_await(folder, "r0", rank=1)),
        (16, lambda folder: kill_and_await(folder, "r1", rank=0)),
        (24, stop),
    ]
    outcome = training(made, "run", faults)
    history = committed(Path("run"))
    check_history(history, outcome.report.progress.step)
    assert {len(event["participants"]) for event in history} == {1, 2}
    assert outcome.report.ended == "interrupted"
    found, wanted = weights_of(outcome.run), replayed(made, history)
    assert all(torch.allclose(found[name], wanted[name], rtol=1e-5, atol=1e-6) for name in found)


@pytest.mark.slow
def test_all_replicas_at_once_go_on_from_the_newest_checkpoint(recipe: Any) -> None:
    newest = []

    def all_at_once(folder: Path) -> None:
        newest.append(freeze(folder, *BOTH))
        kill_and_await(folder, *BOTH)

    made = recipe(training={"steps": ENDLESS, "checkpoint_every": 10, "asynchronous": False})
    outcome = training(made, "run", [(12, all_at_once), (25, stop)])
    history = committed(Path("run"))
    check_history(history, outcome.report.progress.step)
    events = read_events(Path("run"))
    assert [event["kept"]["step"] for event in events if event["kind"] == "rollback"] == newest
    found, wanted = weights_of(outcome.run), replayed(made, history)
    assert all(torch.equal(found[name], wanted[name]) for name in found)


@pytest.mark.slow
def test_a_replica_that_was_left_behind_goes_on_when_the_other_is_lost(recipe: Any) -> None:
    """It holds less than was committed, and is neither given up nor trusted with more than it holds."""

    def leave_behind(folder: Path) -> None:
        (left,), before = processes_of(folder, "r0"), starts(folder, "r1")
        os.kill(left, signal.SIGSTOP)
        eventually(lambda: taken(folder, "r1")[1] == ["r1"], "the other takes no step alone")
        reached = taken(folder, "r1")[0]
        eventually(lambda: taken(folder, "r1")[0] >= reached + 8, "the other does not go on")
        freeze(folder, "r1")
        kill(folder, "r1")
        os.kill(left, signal.SIGCONT)
        eventually(lambda: starts(folder, "r1") > before and together(folder), "they do not come together")

    made = recipe(training={"steps": ENDLESS, "checkpoint_every": 5, "asynchronous": False})
    outcome = training(made, "run", [(12, leave_behind), (25, stop)])
    history = committed(Path("run"))
    check_history(history, outcome.report.progress.step)
    kinds = [event["kind"] for event in read_events(Path("run"))]
    assert "rollback" in kinds
    assert "given up" not in kinds
    found, wanted = weights_of(outcome.run), replayed(made, history)
    assert all(torch.equal(found[name], wanted[name]) for name in found)


@pytest.mark.slow
def test_a_damaged_checkpoint_is_passed_over(recipe: Any) -> None:
    newest = []

    def damage_and_kill(folder: Path) -> None:
        newest.append(freeze(folder, *BOTH))
        path = next(folder_of(folder / "checkpoints", newest[0]).glob("*.safetensors"))
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
        kill_and_await(folder, *BOTH, after=newest[0])  # which is written anew

    made = recipe(training={"steps": ENDLESS, "checkpoint_every": 8, "asynchronous": False})
    outcome = training(made, "run", [(17, damage_and_kill), (25, stop)])
    history = committed(Path("run"))
    check_history(history, outcome.report.progress.step)
    events = read_events(Path("run"))
    assert {event["step"] for event in events if event["kind"] == "damaged"} == {*newest}
    assert [event["kept"]["step"] for event in events if event["kind"] == "rollback"] == [newest[0] - 8]
    found, wanted = weights_of(outcome.run), replayed(made, history)
    assert all(torch.equal(found[name], wanted[name]) for name in found)


@pytest.mark.slow
@pytest.mark.parametrize("damaged", [1, 2])
def test_the_newest_checkpoint_of_any_disk_that_verifies_wins(recipe: Any, damaged: int) -> None:
    """All replicas save after step 12 to disks of their own, one of them after step 10 to the run's folder."""
    kept = []

    def newest_of_disks(folder: Path) -> int:
        """Step of the newest of both disks; more than there are if the run's folder or one of them has a newer one."""
        found = [steps(path)[-1:] for path in Path("disks").glob("*/r?")]
        (step,) = found[0] if len(found) == 2 and found[0] == found[1] != [] else [0]
        return step if step > newest_checkpoint(folder) else ENDLESS

    def damage_and_kill(folder: Path) -> None:
        newest = freeze(folder, *BOTH, newest=newest_of_disks)
        kept.append(newest if damaged == 1 else newest_checkpoint(folder))
        for path in sorted(Path("disks").glob(f"*/r?/step-*{newest}/weights*"))[:damaged]:
            content = bytearray(path.read_bytes())
            content[-1] ^= 1
            path.write_bytes(content)
        kill_and_await(folder, *BOTH, after=newest)

    training_keys = {"steps": ENDLESS, "checkpoint_every": 10, "asynchronous": False}
    made = recipe(training=training_keys, fault_tolerance={"local_folder": "disks", "local_every": 12})
    outcome = training(made, "run", [(14, damage_and_kill), (25, stop)])
    history = committed(Path("run"))
    check_history(history, outcome.report.progress.step)
    events = read_events(Path("run"))
    assert [event["kept"]["step"] for event in events if event["kind"] == "rollback"] == kept
    found, wanted = weights_of(outcome.run), replayed(made, history)
    assert all(torch.equal(found[name], wanted[name]) for name in found)
    assert not list(Path("disks").iterdir())  # the run's folder has the last step


def test_a_new_run_in_the_folder_of_an_old_one_is_another(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    first = job_identity(folder)
    assert job_identity(folder) == first
    (folder / "replicas" / "identity").unlink()
    assert job_identity(folder) != first


@pytest.mark.slow
def test_a_constant_batch_is_shared_out_among_those_that_are_there(recipe: Any) -> None:
    made = recipe(training={"steps": ENDLESS}, fault_tolerance={"batch": "constant"})
    outcome = training(made, "run", [(10, lambda folder: kill_and_await(folder, "r1")), (20, stop)])
    history = committed(Path("run"))
    check_history(history, outcome.report.progress.step)
    assert {event["iterations"] for event in history} == {2}
    assert ["r0"] in [event["participants"] for event in history]
    found, wanted = weights_of(outcome.run), replayed(made, history)
    assert all(torch.equal(found[name], wanted[name]) for name in found)


@pytest.mark.slow
def test_a_job_that_was_asked_to_stop_goes_on_where_it_stood(recipe: Any) -> None:
    made = recipe(training={"steps": ENDLESS, "decay": "none", "checkpoint_every": None})
    first = training(made, "run", [(10, stop)])
    assert first.report.ended == "interrupted"
    reached = first.report.progress.step
    assert reached >= 10
    before = committed(Path("run"))
    second = workflows.train(first.run, changes=[f"training.steps={reached + 40}"])
    assert second.report.ended == "finished"
    history = before + [e for e in committed(Path("run")) if e["step"] > reached]
    check_history(history, reached + 40)
    found, wanted = weights_of(second.run), replayed(made, history)
    assert all(torch.equal(found[name], wanted[name]) for name in found)


@pytest.mark.slow
@pytest.mark.parametrize("later_s", [0.2, 1.0])
def test_a_job_that_is_stopped_while_a_replica_starts_again_ends_as_it_was_saved(recipe: Any, later_s: float) -> None:
    def kill_and_stop(folder: Path) -> None:
        kill(folder, "r1")
        time.sleep(later_s)
        stop(folder)

    made = recipe(training={"steps": ENDLESS, "decay": "none", "checkpoint_every": 15})
    first = training(made, "run", [(20, kill_and_stop)])
    reached, before = first.report.progress.step, committed(Path("run"))
    assert first.report.ended == "interrupted"
    assert (before[-1]["step"], steps(first.run.checkpoints)[-1]) == (reached, reached)
    second = workflows.train(first.run, changes=[f"training.steps={reached + 20}"])
    history = before + [event for event in committed(Path("run")) if event["step"] > reached]
    check_history(history, reached + 20)
    found, wanted = weights_of(second.run), replayed(made, history)
    assert all(torch.equal(found[name], wanted[name]) for name in found)


def _command(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "cordillera", *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


@pytest.mark.slow
def test_a_coordinator_that_is_stopped_alone_says_how_to_go_on(recipe: Any) -> None:
    Path("own.toml").write_text(dump(recipe()))
    coordinator = _command("coordinate", "own.toml", "--run", "a run", "--listen", "0.0.0.0:0")
    assert coordinator.stdout is not None
    port = next(line for line in coordinator.stdout if line.startswith("coordinator:")).rpartition(":")[2].strip()
    to_type = f"  -> cordillera train 'a run' --coordinator {socket.gethostname()}:{port} --replica r0\n"
    assert next(coordinator.stdout) == to_type
    with socket.create_connection(("127.0.0.1", int(port)), timeout=120) as stranger:
        assert stranger.recv(1)  # it serves only now, and then ends in good order
    coordinator.terminate()
    said = coordinator.communicate(timeout=120)[0]
    assert "interrupted: a run: the coordinator was stopped before the replicas had ended" in said
    assert "`cordillera coordinate 'a run' --resume --listen 0.0.0.0:0`" in said
    assert coordinator.returncode == 130
    assert Run("a run").status().ended == "failed"


@pytest.mark.parametrize(
    ("listen", "again"),
    [("127.0.0.1:0", "cordillera coordinate 'a run' --resume"),
     ("0.0.0.0:0", "cordillera coordinate 'a run' --resume --listen 0.0.0.0:0")],
)  # fmt: skip
def test_replicas_find_a_coordinator_again_that_goes_on(
    recipe: Any, monkeypatch: pytest.MonkeyPatch, listen: str, again: str
) -> None:
    monkeypatch.setattr(ReplicaService, "serve", lambda service, is_over: service._coordinator.close())
    with pytest.raises(Interrupted) as stopped:
        coordinate(recipe(), "a run", listen=listen)
    assert stopped.value.remedy == f"go on with `{again}`"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run"], "run: is a run folder\n  -> continue it with `cordillera coordinate run --resume`"),
        (["own.toml", "--run", "run"], "go on with `cordillera coordinate run --resume`"),
        (["own.toml", "--run", "new", "--replicas", "66"], "fault_tolerance.replicas: are too many for a ring: set 65"),
        (["own.toml", "--run", "new", "--listen", "nonsense"], "listen: 'nonsense' is no HOST:PORT"),
        (["own.toml", "--run", "new", "--listen", "127.0.0.1:99999"], "listen: '127.0.0.1:99999' is no HOST:PORT"),
    ],
)
def test_what_cannot_be_coordinated_leaves_no_folder(recipe: Any, arguments: list[str], message: str) -> None:
    Run.create("run", dump(recipe()))
    Path("own.toml").write_text(dump(recipe()))
    found = CliRunner().invoke(app, ["coordinate", *arguments])
    assert message in str(found.exception)
    assert not Path("new").exists()
    assert not Path("runs").exists()


@pytest.mark.slow
def test_replicas_that_are_started_by_hand_find_their_coordinator(recipe: Any) -> None:
    made = recipe(training={"steps": 150, "checkpoint_every": 50})
    Path("own.toml").write_text(dump(made))
    coordinator = _command("coordinate", "own.toml", "--run", "run")
    replicas: dict[str, subprocess.Popen[str]] = {}
    try:
        assert coordinator.stdout is not None
        address = next(line.split()[1] for line in coordinator.stdout if line.startswith("coordinator:"))
        assert Path("run/replicas/secret").stat().st_mode & 0o077 == 0
        for name in ("r0", "r1"):
            replicas[name] = _command("train", "run", "--replica", name, "--coordinator", address, "--quiet")
        eventually(lambda: together(Path("run"), 19), "they take no 20 steps")
        refused = CliRunner().invoke(app, ["chaos", "run", "--kill", "r1"])  # nothing shows which processes are theirs
        assert "its replicas were started elsewhere" in str(refused.exception)
        replicas["r1"].terminate()  # it leaves; the other goes on
        assert "r1: interrupted at step" in replicas["r1"].communicate(timeout=120)[0]
        replicas["r1"] = _command("train", "run", "--replica", "r1", "--coordinator", address, "--quiet")
        said = {name: one.communicate(timeout=120)[0] for name, one in replicas.items()}
        assert "r0: finished at step 150" in said["r0"]
        told = coordinator.communicate(timeout=120)[0]
        assert coordinator.returncode == 0
        for line in ("held-out text: loss ", "finished after 150 steps in ", f"report: {Path('run/report.html')}"):
            assert line in told
    finally:
        for one in (coordinator, *replicas.values()):
            one.kill()
            one.wait()
    history = committed(Path("run"))
    check_history(history, 150)
    assert {1, 2} == {len(event["participants"]) for event in history}
    found, wanted = weights_of(Run("run")), replayed(made, history)
    assert all(torch.equal(found[name], wanted[name]) for name in found)
    assert Run("run").status().is_complete
    assert (Path("run") / "evaluation.json").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--replica", "r7", "--coordinator", "127.0.0.1:9"], "there is no replica r7"),
        (["--replica", "r0"], "--replica and --coordinator: go together"),
        (["--replica", "r0", "--coordinator", "nonsense"], "coordinator: 'nonsense' is no HOST:PORT"),
        (["--replica", "r0", "--coordinator", "127.0.0.1:9"], "holds no secret of a job"),
    ],
)
def test_a_replica_that_cannot_join_says_why(recipe: Any, arguments: list[str], message: str) -> None:
    Run.create("run", dump(recipe()))
    found = CliRunner().invoke(app, ["train", "run", *arguments])
    assert found.exit_code != 0
    assert message in str(found.exception) + found.output


@pytest.mark.slow
def test_a_text_that_ends_between_replicas_is_trained_to_its_end(recipe: Any) -> None:
    made = recipe(data={"epochs": 1}, training={"steps": 10_000})
    outcome = workflows.train(made, "run")
    history = committed(Path("run"))
    check_history(history, outcome.report.progress.step)
    assert outcome.report.ended == "exhausted"
    alone = validate(json.loads(made.model_dump_json(by_alias=True)) | {"fault_tolerance": {}})
    assert workflows.train(alone, "alone").report.progress.tokens == outcome.report.progress.tokens


@pytest.mark.slow
def test_without_a_checkpoint_nobody_begins_anew_in_silence(recipe: Any) -> None:
    def all_at_once(folder: Path) -> None:
        for process in [processes_of(folder, name)[0] for name in BOTH]:
            os.kill(process, signal.SIGSTOP)  # or the first might be back before the second is killed
        kill(folder, *BOTH)

    with pytest.raises(PlanError, match="replicas hold step 0 at most; there is no checkpoint"):
        training(recipe(training={"checkpoint_every": None, "steps": ENDLESS}), "run", [(5, all_at_once)])
    assert Run("run").status().ended == "failed"
    assert [event["kind"] for event in read_events(Path("run"))].count("given up") == 2


def _dies(rank: int, place: ReplicaPlace, how: str) -> None:
    if how == "error":
        raise DataError("the text is empty", where="text")
    if how == "full":
        raise RunError("the disk is full", where=f"checkpoints/{os.getpid()}")
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize(("how", "starts"), [("killed", 3), ("full", 3), ("error", 1)])
def test_a_replica_that_always_fails_is_given_up(tmp_path: Path, how: str, starts: int) -> None:
    tolerance = FaultToleranceConfig(replicas=2, retries=2)
    launcher = ReplicaLauncher(
        _dies, 1, (how,), tolerance=tolerance, configuration="c", folder=tmp_path, config=LaunchConfig(threads=1)
    )
    kind = {"killed": RankError, "full": RunError, "error": DataError}[how]
    with pytest.raises(kind, match=r"the text is empty|the disk is full|SIGKILL"):
        launcher.run()
    kinds = [event["kind"] for event in read_events(tmp_path)]
    assert kinds.count("started") == kinds.count("ended") == 2 * starts
    assert kinds.count("given up") == 2


class Sums:
    """What a trainer sees of its replica: sums of which some are given up, at their second tensor."""

    contributes, is_last = True, False

    def __init__(self, failures: int) -> None:
        self.seconds: dict[str, float] = {}
        self.failures, self.added, self.discarded = failures, 0, 0

    def add(self, tensor: torch.Tensor) -> bool:
        self.added += 1
        return self.added % 2 == 1 or self.discarded == self.failures

    def discard(self) -> None:
        self.discarded += 1

    def committing(self) -> Any:
        return contextlib.nullcontext()


@pytest.mark.parametrize(("name", "backwards"), [("r0", 1), ("r1", 2)])
def test_a_step_that_is_given_up_leaves_neither_fewer_nor_more_microbatches(
    recipe: Any, name: str, backwards: int, tmp_path: Path
) -> None:
    """Gradients of several microbatches are kept for the next try if it is of the same text, and else made anew."""
    made = recipe(packing={"tokens": 512}, fault_tolerance={"compare_every": None})
    mesh = ProcessMesh(made.parallel)
    engines = [LanguageEngine(made.training, made.model, mesh, made.seed) for _ in range(2)]
    checkpoints = ShardedCheckpoints(tmp_path / "checkpoints", mesh, False)
    batches, place = batches_of(made, prepare(made)), ReplicaPlace(name, "", b"", "job")
    trainer = ReplicatedTrainer(
        made.training, engines[0], batches, checkpoints, place=place, tolerance=made.fault_tolerance
    )
    calls, backward = [], engines[0].backward
    engines[0].backward = lambda own: (calls.append(len(own)), backward(own))[1]  # type: ignore[method-assign]
    head = initial_commit("job")
    trainer._replica = sums = Sums(failures=2)  # type: ignore[assignment]
    for epoch, members in enumerate([("r0", "r1"), ("r0", "r1"), (name,)], 1):
        membership = Membership(epoch, head, members, {})
        trainer._attempt(membership, trainer.ahead.look(len(members)), 0.0)
    assert sums.discarded == 2
    assert trainer.progress.step == 1
    assert len(calls) == backwards
    assert min(calls) > 1
    (first,) = IterationsAhead(batches_of(made, prepare(made))).look(1)
    engines[1].step(first.microbatches, trainer.tolerance.rate_factor(1))
    for own, other in zip(*(one.stages[0].parameters() for one in engines), strict=True):
        assert torch.equal(local(own.data), local(other.data))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"training": {"optimizer": "muon"}}, r"training\.optimizer: replicas hold the moments of adamw"),
        ({"model": {"experts": {"count": 2, "chosen": 1}}}, r"model\.experts: experts are balanced within one replica"),
    ],
)
def test_what_does_not_go_with_replicas_is_refused_before_they_start(recipe: Any, change: Any, message: str) -> None:
    with pytest.raises(CordilleraError, match=message):
        workflows.train(recipe(**change), "run")
    assert not Path("run").exists()


def test_rates_and_batches_follow_the_share_that_is_there() -> None:
    config = FaultToleranceConfig(replicas=12, rate="sqrt")
    assert [round(config.rate_factor(n), 4) for n in (12, 11, 9, 8)] == [1.0, 0.9574, 0.866, 0.8165]
    assert FaultToleranceConfig(replicas=4, rate="linear").rate_factor(3) == 0.75
    assert FaultToleranceConfig(replicas=4).rate_factor(1) == 1.0
    assert FaultToleranceConfig(replicas=4, batch="constant").iterations(3) == 4
    assert FaultToleranceConfig(replicas=4).iterations(3) == 3
    with pytest.raises(ValueError, match="least"):
        FaultToleranceConfig(replicas=2, least=3)
