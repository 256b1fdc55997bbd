"""Commands as processes: what launchers say to them, closed terminals, kills, links that go down."""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import sys
import time
from pathlib import Path
from unittest.mock import patch

import pytest

from cordillera.run import Run
from cordillera.training import checkpoints
from tests.cli.test_language_commands import RECIPE, write_text
from tests.distributed.processes import needs_gloo
from tests.distributed.test_slurm import TASK

pytestmark = [needs_gloo, pytest.mark.skipif(sys.platform == "win32", reason="no signals there")]


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    monkeypatch.setenv("CORDILLERA_CACHE", str(tmp_path / "cache"))
    write_text(tmp_path / "text.jsonl")
    (tmp_path / "small.toml").write_text(RECIPE)
    return tmp_path / "small.toml"


def test_a_rank_without_a_job_does_not_silence_a_command(cli, monkeypatch):
    spoken = cli("recipe", "list").out
    assert spoken
    monkeypatch.setenv("RANK", "3")
    assert cli("recipe", "list").out == spoken
    monkeypatch.setenv("WORLD_SIZE", "x")
    assert cli("recipe", "list").out == spoken
    for name, value in {"WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    assert cli("recipe", "list").out == ""
    monkeypatch.setenv("RANK", "0")
    assert cli("recipe", "list").out == spoken


@pytest.mark.slow
def test_a_run_whose_terminal_is_closed_is_saved(recipe, tmp_path):
    process, terminal = pty.fork()
    if process == 0:
        endless = ("--run", "closed", "--set", "training.steps=100000")
        os.chdir(tmp_path)
        source = str(Path(__file__).parents[2] / "src")
        environment = dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=source)
        os.execve(sys.executable, [sys.executable, "-m", "cordillera", "train", str(recipe), *endless], environment)
    try:
        until, folder = time.monotonic() + 240, tmp_path / "closed/checkpoints"
        os.set_blocking(terminal, False)
        while not folder.is_dir() or not checkpoints.steps(folder):
            assert time.monotonic() < until
            with contextlib.suppress(BlockingIOError, OSError):
                os.read(terminal, 65_536)
            time.sleep(0.02)
        before = checkpoints.steps(folder)[-1]
        os.close(terminal)
        while (ended := os.waitpid(process, os.WNOHANG)) == (0, 0):
            assert time.monotonic() < until
            time.sleep(0.02)
        assert os.waitstatus_to_exitcode(ended[1]) == 130
        newest = checkpoints.steps(folder)[-1]
        assert newest > before
        status = Run(tmp_path / "closed").status()
        assert (status.ended, status.step) == ("interrupted", newest)
    finally:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)


@pytest.mark.parametrize(
    "words",
    [
        ["isoflop", "llama-debug", "--budget", "1e9"],
        ["sweep", "movielens-wukong", *["--size", "model.layers=2"] * 3],
        ["search", "movielens-wukong", "--space", "small"],
    ],
    ids=lambda words: words[0],
)
def test_tasks_do_not_all_begin_a_study(cli, tmp_path, words):
    with patch.dict(os.environ, {**TASK, "SLURM_PROCID": "0"}):
        failed = cli(*words)
    assert (failed.code, failed.out) == (2, "")
    assert "a study starts its own processes; a launcher has started this one" in failed.err
    assert not (tmp_path / "runs").exists()


def test_processes_to_be_tuned_are_those_of_srun(cli):
    with patch.dict(os.environ, {**TASK, "SLURM_PROCID": "0"}):
        failed = cli("tune-collectives", "rules.toml", "--nproc", 4)
    assert failed.code == 2
    assert "--nproc: the launcher has started 16 processes, not 4" in failed.err
