"""Tasks of ``srun`` form one job, and nothing else of SLURM does."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from cordillera.distributed.job.environment import place_in_job
from cordillera.distributed.job.slurm import adopt_slurm, is_first_on_machine
from cordillera.errors import PlanError
from cordillera.run import Run
from tests.cli.test_language_commands import RECIPE, spawn, write_text
from tests.distributed.processes import needs_gloo

TASK = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "16",
    "SLURM_STEP_NODELIST": "node[07-08]",
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
}


def test_a_task_has_its_rank_and_finds_the_first_node() -> None:
    given = dict(TASK)
    adopt_slurm(given)
    place = place_in_job(given)
    assert place is not None
    assert (place.rank, place.size, place.local_rank, place.address) == (9, 16, 1, "node07")
    assert place.port == 20_000 + 31 * 4711 % 10_000
    other = {**TASK, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "MASTER_PORT": "29500"}
    adopt_slurm(other)
    assert (other["RANK"], other["MASTER_ADDR"], other["MASTER_PORT"]) == ("0", "node07", "29500")


@pytest.mark.parametrize(("visible", "local"), [("3", "0"), ("0,1,2,3", "1"), ("", "1"), ("GPU-4711", "0")])
def test_a_task_that_sees_its_own_gpu_only_takes_that(visible: str, local: str) -> None:
    given = {**TASK, "CUDA_VISIBLE_DEVICES": visible}
    adopt_slurm(given)
    assert given["LOCAL_RANK"] == local


@pytest.mark.parametrize("visible", ["3", "0,1,2,3", ""])
def test_the_first_task_of_a_machine_alone_is_the_first(visible: str) -> None:
    for local in range(4):
        given = {**TASK, "SLURM_LOCALID": str(local), "CUDA_VISIBLE_DEVICES": visible}
        adopt_slurm(given)
        assert is_first_on_machine(given) is (local == 0)


def test_the_first_process_of_another_launcher_has_the_local_rank_0() -> None:
    agent = {**TASK, "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "0"}  # one torchrun a machine
    for local in range(8):
        given = {**agent, "RANK": str(8 + local), "WORLD_SIZE": "16", "LOCAL_RANK": str(local)}
        assert is_first_on_machine(given) is (local == 0)
        assert is_first_on_machine({"RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": str(local)}) is (local == 0)


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("one", "one"),
        ("one,two", "one"),
        ("node[003,007-9]", "node003"),
        ("node[07-09,12],gpu1", "node07"),
        ("rack[1-2]n[3-4].local,x", "rack1n3.local"),
    ],
)
def test_the_first_of_a_list_of_hosts(hosts: str, first: str) -> None:
    given = {**TASK, "SLURM_STEP_NODELIST": hosts}
    adopt_slurm(given)
    assert given["MASTER_ADDR"] == first


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"SLURM_JOB_ID": "4711", "SLURM_NTASKS": "16", "SLURM_PROCID": "0"},  # the script of sbatch
        {**TASK, "SLURM_STEP_NUM_TASKS": "1"},
        {**TASK, "RANK": "3"},
        {**TASK, "WORLD_SIZE": "3"},
    ],
)
def test_other_processes_keep_their_environment(given: dict[str, str]) -> None:
    before = dict(given)
    adopt_slurm(given)
    assert given == before


@pytest.mark.parametrize(
    ("name", "value"),
    [("SLURM_PROCID", ""), ("SLURM_STEP_NUM_TASKS", "two"), ("SLURM_JOB_ID", "-1"), ("SLURM_STEP_NODELIST", ",")],
)
def test_a_task_that_does_not_know_its_place_is_refused(name: str, value: str) -> None:
    with pytest.raises(PlanError, match=name):
        adopt_slurm({**TASK, name: value})


@needs_gloo
@pytest.mark.slow
def test_two_tasks_train_one_run(tmp_path: Path) -> None:
    write_text(tmp_path / "text.jsonl")
    (tmp_path / "small.toml").write_text(RECIPE)
    job = {**TASK, "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_ID": "17"}
    command = [sys.executable, "-m", "cordillera", "train", "small.toml", "-q"]
    tasks = [
        spawn(command, tmp_path, {**job, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}) for rank in range(2)
    ]
    said = [task.communicate(timeout=240)[0] for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0], said
    (folder,) = (tmp_path / "runs").iterdir()
    assert Run(folder).read_json("model.json")["mesh"]["shard"] == 2
    assert "finished after" in said[0]
    assert said[1] == ""
