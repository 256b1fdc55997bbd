"""Simulated failures against closed forms, published rates, and the sum of their parts."""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fault_tolerance import LLAMA3_CAUSES, LLAMA3_DAYS, LLAMA3_DEVICES, llama3_seconds_between_failures
from typer.testing import CliRunner

from cordillera.cli.app import app
from cordillera.distributed.fault_tolerance.effective_time import (
    best_checkpoint_interval,
    effective_with_checkpoints,
    effective_with_replicas,
)
from cordillera.distributed.fault_tolerance.simulator import FaultyJob, TimeUse, simulate_faults
from cordillera.errors import PlanError
from cordillera.workflows.scaling import study_faults

DAY = 86_400.0
PUBLISHED = {"detect_s": 60.0, "resume_s": 110.0, "queue": True}  # 3 minutes with the half of a step that is lost


def mean_effective(job: FaultyJob, days: float = 8.0, runs: int = 2) -> float:
    return sum(simulate_faults(job, days * DAY, seed).effective for seed in range(runs)) / runs


def parts(use: TimeUse) -> float:
    return use.useful + use.redone + use.stalled + use.absent + use.saving


@pytest.mark.cases(2)
@pytest.mark.parametrize("policy", ["restart", "replicas", "decoupled"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"queue": True},
        {"together": 0.5, "rejoin_s": 30.0},
        {"consensus_s": 9.0, "detect_s": 60.0},
        {"save_s": 10.0, "between_s": 60.0},
        {"replicas": 1},
        {"replicas": 2, "together": 1.0},
        {"step_s": 1e4},
    ],
    ids=str,
)
def test_the_parts_of_the_time_add_up(policy: Any, changes: dict[str, Any]) -> None:
    use = simulate_faults(FaultyJob(policy, **changes), 5 * DAY, 1)
    assert parts(use) == pytest.approx(use.elapsed, abs=1e-3)
    assert min(use.useful, use.redone, use.stalled, use.absent, use.saving) >= 0
    assert use.elapsed >= 5 * DAY
    assert use.failures > 0


@pytest.mark.parametrize("policy", ["restart", "replicas", "decoupled"])
def test_without_failures_only_agreements_and_checkpoints_cost(policy: Any) -> None:
    use = simulate_faults(FaultyJob(policy, between_s=1e12), DAY, 1)
    assert use.effective == pytest.approx(1)
    assert use.failures == 0
    assert simulate_faults(FaultyJob(between_s=1e12, consensus_s=5.0), DAY, 1).effective == pytest.approx(20 / 25, 1e-3)


def test_a_seed_gives_the_same_run() -> None:
    assert simulate_faults(FaultyJob(), DAY, 3) == simulate_faults(FaultyJob(), DAY, 3)
    assert simulate_faults(FaultyJob(), DAY, 3) != simulate_faults(FaultyJob(), DAY, 4)


@pytest.mark.slow
def test_published_rates_of_98304_devices() -> None:
    """44 % with restarts of ten minutes, 80 % with a stall of three (FT-HSDP, abstract)."""
    assert mean_effective(FaultyJob("restart", queue=True)) == pytest.approx(0.44, abs=0.03)
    assert mean_effective(FaultyJob(**PUBLISHED)) == pytest.approx(0.80, abs=0.03)
    assert effective_with_replicas(1080, 180, 600, 12) == pytest.approx((8 + 7 * 11 / 12) / 18)
    assert mean_effective(FaultyJob()) >= 0.92


def test_restarts_that_begin_anew_leave_the_time_without_a_failure_in_it() -> None:
    """A job works at a time if no failure came in the recovery before it: e^(-10/18)."""
    assert mean_effective(FaultyJob("restart")) == pytest.approx(math.exp(-600 / 1080), abs=0.02)


@pytest.mark.parametrize("queue", [False, True])
def test_a_job_whose_repairs_take_longer_than_its_failures_let_it_ends_without_useful_time(queue: bool) -> None:
    """Recoveries that never end are given up at the end of the simulated time."""
    use = simulate_faults(FaultyJob("restart", between_s=5, repair_s=7200, queue=queue), 86_400, 0)
    assert use.useful < 60
    assert use.stalled == pytest.approx(use.elapsed, abs=60)
    assert use.elapsed == pytest.approx(86_400)
    assert effective_with_replicas(300, 1, 7200, 4) == 0


@pytest.mark.parametrize(("recovery", "save", "expected"), [(300, 10, 0.932), (600, 10, 0.906), (600, 60, 0.850)])
def test_checkpoints_follow_the_closed_form(recovery: float, save: float, expected: float) -> None:
    between = llama3_seconds_between_failures(LLAMA3_DEVICES)
    interval = best_checkpoint_interval(between, save)
    formula = effective_with_checkpoints(between, recovery, interval, save)
    assert formula == pytest.approx(expected, abs=0.001)
    job = FaultyJob("restart", between_s=between, repair_s=recovery, save_s=save, interval_s=interval)
    assert mean_effective(job, days=300) == pytest.approx(formula, abs=0.01)


def test_failures_come_as_often_as_those_of_llama_3() -> None:
    between = llama3_seconds_between_failures(LLAMA3_DEVICES)
    job = FaultyJob("decoupled", between_s=between)
    for seed in range(5):
        assert abs(simulate_faults(job, LLAMA3_DAYS * DAY, seed).failures - sum(LLAMA3_CAUSES.values())) <= 61


@pytest.mark.slow
def test_a_job_whose_replicas_have_all_failed_loses_what_its_last_checkpoint_lacks() -> None:
    job = FaultyJob(replicas=1, between_s=20_000.0, interval_s=1_000.0)
    use = simulate_faults(job, 200 * DAY, 1)
    assert use.redone / use.failures == pytest.approx(job.interval_s / 2, rel=0.1)


def test_more_failures_and_longer_stalls_leave_less() -> None:
    by_rate = [mean_effective(FaultyJob(between_s=seconds), days=0.7, runs=1) for seconds in (300, 1000, 3000, 10_000)]
    assert by_rate == sorted(by_rate)
    by_stall = [mean_effective(FaultyJob(detect_s=seconds), days=0.7, runs=1) for seconds in (300, 60, 10, 0)]
    assert by_stall == sorted(by_stall)
    naive, overlapped = (mean_effective(FaultyJob(consensus_s=seconds), days=0.7, runs=1) for seconds in (9.0, 0.7))
    assert overlapped - naive > 0.2


def test_decoupled_learners_lose_their_own_time_only() -> None:
    job = FaultyJob("decoupled")
    expected = 1 - (job.repair_s + job.merge_steps * job.step_s / 2) / job.between_s / job.replicas
    assert mean_effective(job) == pytest.approx(expected, abs=0.02)


def test_a_study_has_a_row_for_each_policy_and_number_of_replicas() -> None:
    rows = study_faults(FaultyJob(), devices=[8_192, 98_304], replicas=[4, 12], days=0.5, runs=2)
    assert [(row.devices, row.job.policy, row.job.replicas) for row in rows[:5]] == [
        (8_192, "restart", 1), (8_192, "replicas", 4), (8_192, "replicas", 12), (8_192, "decoupled", 4),
        (8_192, "decoupled", 12),
    ]  # fmt: skip
    assert rows[0].job.between_s == pytest.approx(12 * 1080)
    for row in rows:
        assert row.effective.low <= row.effective.value <= row.effective.high
        assert row.effective.value == pytest.approx(row.shares["useful"])
        assert row.formula == pytest.approx(row.effective.value, abs=0.2)
    rows = study_faults(FaultyJob(consensus_s=9.0), replicas=[12], days=2, runs=2)
    assert rows[1].formula == pytest.approx(rows[1].effective.value, abs=0.03)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: FaultyJob(between_s=0.0),
        lambda: FaultyJob(step_s=math.nan),
        lambda: FaultyJob(repair_s=-1.0),
        lambda: FaultyJob(together=1.5),
        lambda: FaultyJob(replicas=0),
        lambda: simulate_faults(FaultyJob(), math.inf, 0),
        lambda: study_faults(FaultyJob(), runs=1),
        lambda: study_faults(FaultyJob(), replicas=[0]),
        lambda: study_faults(FaultyJob(), devices=[4], replicas=[12]),
        lambda: best_checkpoint_interval(100.0, 0.0),
    ],
)
def test_settings_are_checked(wrong: Callable[[], object]) -> None:
    with pytest.raises(PlanError):
        wrong()


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("--step", "0"), ("--between", "0"), ("--between", "-1"), ("--days", "-2"), ("--days", "nan")),
        *(("--devices", "0"), ("--replicas", "0"), ("--together", "3"), ("--detect", "-1"), ("--save", "-1")),
    ],
)
def test_what_cannot_be_simulated_is_refused_with_its_option(option: str, value: str) -> None:
    ran = CliRunner().invoke(app, ["simulate-faults", "--days", "1", "--runs", "2", option, value])
    assert ran.exit_code == 2
    assert f"Invalid value for '{option}'" in ran.output


def test_a_plot_that_cannot_be_written_is_refused_before_the_simulation(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    ran = CliRunner().invoke(app, ["simulate-faults", "--plot", str(tmp_path / "file" / "x.png")])
    assert "x.png: cannot be written" in str(ran.exception)
    assert not ran.output


def test_intervals_of_shares_end_at_one(tmp_path: Path) -> None:
    rows = study_faults(FaultyJob(repair_s=2000.0), devices=[500], replicas=[4], days=3, runs=3)
    assert all(0 <= row.effective.low <= row.effective.value <= row.effective.high <= 1 for row in rows)
    assert any(row.effective.high == 1 for row in rows)


def test_the_command_prints_draws_and_writes_json(tmp_path: Path) -> None:
    some = ["simulate-faults", "--days", "0.2", "--runs", "2"]
    plot = tmp_path / "new" / "rates.svg"
    ran = CliRunner().invoke(app, some, env={"COLUMNS": "200"})
    assert ran.exit_code == 0, ran.output
    assert "98,304" in ran.output
    assert "decoupled" in ran.output
    assert "no failure happened" not in ran.output
    quiet = CliRunner().invoke(app, [*some, "--devices", "8", "--replicas", "2"])
    assert "no failure happened in these runs: give more --days or --runs" in quiet.output
    ran = CliRunner().invoke(app, [*some, "--devices", "16384", "--devices", "98304", "--plot", str(plot)])
    drawn = [text for text in ET.fromstring(plot.read_text()).itertext() if text.strip()]
    assert {"16,384", "98,304"} <= {text.strip() for text in drawn}
    assert not any("$" in text for text in drawn)
    ran = CliRunner().invoke(app, [*some, "--devices", "8", "--replicas", "2", "--plot", str(tmp_path / "rates.png")])
    assert (tmp_path / "rates.png").read_bytes().startswith(b"\x89PNG"), ran.output
    ran = CliRunner().invoke(app, [*some, "--json", "--replicas", "3"])
    rows = json.loads(ran.output)
    assert [row["job"]["policy"] for row in rows] == ["restart", "replicas", "decoupled"]
    assert rows[1]["job"]["replicas"] == 3
    longer = [*some, "--days", "1", "--replicas", "2", "--replicas", "16", "--save", "30"]
    ran = CliRunner().invoke(app, longer, env={"COLUMNS": "200"})
    assert "98,304 devices: 16 replicas lose least\n" in ran.output
    every = best_checkpoint_interval(FaultyJob().between_s, 30.0) / 60
    assert f"a restart loses least with checkpoints every {every:.1f} min" in ran.output
    ran = CliRunner().invoke(app, [*some, "--plot", "rates.txt"])
    assert isinstance(ran.exception, PlanError)
    assert "name a .png or an .svg" in str(ran.exception)


def test_steps_of_milliseconds_are_simulated_together_and_lose_as_much() -> None:
    rates = {}
    for step in ("0.3", "0.9", "1.2"):
        some = ["simulate-faults", "--days", "0.1", "--runs", "2", "--step", step, "--consensus", "0", "--json"]
        rates[step] = [row["effective"]["value"] for row in json.loads(CliRunner().invoke(app, some).output)]
    assert rates["0.3"] == pytest.approx(rates["1.2"], abs=0.01)  # four steps as one
    assert rates["0.9"] == pytest.approx(rates["1.2"], abs=0.01)
    said = CliRunner().invoke(app, ["simulate-faults", "--days", "0.01", "--runs", "2", "--step", "0.3"])
    assert "4 steps of 0.3 s are simulated as one, which a failure loses as a whole" in said.output


def test_steps_below_a_second_leave_as_many_between_merges() -> None:
    some = ["simulate-faults", "--days", "0.1", "--runs", "2", "--replicas", "2", "--json"]
    for step, grouped in (("20", 1), ("0.5", 2), ("0.01", 100), ("0.001", 1000)):
        ran = CliRunner().invoke(app, [*some, "--step", step])
        job = json.loads(ran.output)[-1]["job"]
        assert (job["policy"], job["merge_steps"]) == ("decoupled", max(1, 100 // grouped))
        assert job["step_s"] == pytest.approx(grouped * float(step))
