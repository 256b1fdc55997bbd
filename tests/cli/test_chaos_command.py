"""``cordillera chaos``: what it prints, and what it refuses; tests/distributed/test_chaos.py tests what it does."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cordillera.run import Run
from tests.distributed.test_chaos import Job, job, sleeps  # noqa: F401

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="signals go through pidfd")


def _after_a_fault(job: Job, call: Callable[[], object]) -> None:  # noqa: F811
    """Call a function once a fault was done."""

    def wait() -> None:
        while not job.told():
            time.sleep(0.01)
        call()

    threading.Thread(target=wait, daemon=True).start()


def test_a_plan_is_done_and_printed(cli: Any, job: Job) -> None:  # noqa: F811
    Path("plan.toml").write_text(
        '[[fault]]\nwhat = "stop"\nreplica = "r0"\nseconds = 0.2\n'
        '[[fault]]\nwhat = "kill"\nreplica = "r1"\nrank = 0\nat_step = 7\n'
    )
    _after_a_fault(job, lambda: job.step(7))
    result = cli("chaos", job.run.folder, "--plan", "plan.toml")
    assert result.code == 0, result.err
    first, second, last = result.out.splitlines()
    assert f"step 0      stop r0 rank 0 for 0.2 s (process {job.processes['r0'].pid})" in first
    assert f"step 7      kill r1 rank 0 (process {job.processes['r1'].pid})" in second
    assert last == "2 of 2 faults were done"
    assert job.processes["r1"].wait(10) == -signal.SIGKILL
    assert sleeps(job.processes["r0"])


def test_options_make_a_plan(cli: Any, job: Job) -> None:  # noqa: F811
    options = ("--kill", "r1", "--kill", "coordinator", "--stop", "r0", "--seconds", 0.2)
    result = cli("chaos", job.run.folder, *options)
    assert result.code == 0, result.err
    assert [line.split()[4] for line in result.out.splitlines()[:3]] == ["kill", "kill-coordinator", "stop"]
    assert job.processes["coordinator"].wait(10) == -signal.SIGKILL


def test_an_interruption_says_how_far_it_came(cli: Any, job: Job) -> None:  # noqa: F811
    _after_a_fault(job, lambda: os.kill(os.getpid(), signal.SIGINT))
    result = cli("chaos", job.run.folder, "--stop", "r0", "--seconds", 60)
    assert result.code == 130
    assert "interrupted: 1 of 1 faults were done; what was stopped goes on" in result.err
    assert sleeps(job.processes["r0"])


def test_what_cannot_be_done_is_refused(cli: Any, job: Job) -> None:  # noqa: F811
    def said(*words: object) -> str:
        result = cli("chaos", *words)
        assert result.code == 2
        return str(result.err)

    run = job.run.folder
    assert "needs either a plan, or --kill and --stop" in said(run)
    assert "there is no replica 'r7'" in said(run, "--kill", "r7")
    assert "--seconds: -1 s is not a time" in said(run, "--stop", "r0", "--seconds", -1)
    Path("plan.toml").write_text('[[fault]]\nwhat = "kill"\nreplika = "r0"\n')
    printed = said(run, "--plan", "plan.toml")
    assert "plan.toml: 1 mistake in the plan" in printed
    assert "fault[0].replika: is not a key here; did you mean 'replica'?" in printed
    assert "is not a run folder" in said("runs/none", "--kill", "r0")
    over = Run.create("runs/over", "[fault_tolerance]\nreplicas = 2\n")
    over.write_status("finished", 12, 12)
    assert "its job is over: finished at step 12" in said("runs/over", "--kill", "r0")
    Run.create("runs/alone", "[fault_tolerance]\nreplicas = 1\n")
    assert "is not trained by replicas" in said("runs/alone", "--kill", "r0")
