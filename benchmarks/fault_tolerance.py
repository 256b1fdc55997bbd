"""Effective training time with failures: ``cordillera bench fault-tolerance``."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import typer
from _all_reduce import all_reduce
from _program import Program
from _replica_convergence import convergence
from _replica_emulation import emulated
from _replica_stalls import stalls
from _replica_survival import survival
from rich.console import Console
from rich.table import Table

from cordillera.distributed.fault_tolerance.effective_time import (
    best_checkpoint_interval,
    effective_with_checkpoints,
)
from cordillera.distributed.fault_tolerance.simulator import FaultyJob, simulate_faults
from cordillera.reports.faults import FaultStudyRow
from cordillera.workflows.scaling import study_faults

PUBLISHED = FaultyJob(detect_s=60.0, resume_s=110.0, queue=True)  # with half a step that is lost, three minutes
DAYS, RUNS, TARGET = 30.0, 4, 0.92
REPLICAS, SIZES = (4, 8, 12, 16, 24), (8_192, 16_384, 32_768, 65_536, 98_304, 131_072)
CHECKPOINTS = ((300.0, 10.0), (600.0, 10.0), (600.0, 60.0), (1200.0, 60.0))  # seconds of recovery, of a save
CHECKPOINT_DAYS = 300.0
LLAMA3_DEVICES, LLAMA3_DAYS = 16_384, 54.0
LLAMA3_CAUSES: Mapping[str, int] = {
    "faulty GPU": 148,
    "HBM3 memory": 72,
    "software": 54,
    "network switch or cable": 35,
    "host maintenance": 32,
    "GPU SRAM": 19,
    "GPU system processor": 17,
    "network interface": 7,
    "collective watchdog": 7,
    "silent data corruption": 6,
    "GPU thermal or sensor": 6,
    "SSD": 3,
    "power supply": 3,
    "server chassis": 2,
    "IO expansion board": 2,
    "dependency": 2,
    "CPU": 2,
    "system memory": 2,
}
"""Unexpected interruptions of the pre-training of Llama 3 405B, by cause.

Source: Grattafiori et al. 2024, section 3.3.4 and Table 5.
"""


class Part(str, enum.Enum):
    """Parts of the benchmark."""

    simulated = "simulated"
    all_reduce = "all-reduce"
    emulated = "emulated"
    stalls = "stalls"
    survival = "survival"
    convergence = "convergence"


def llama3_seconds_between_failures(devices: int) -> float:
    """Return the mean seconds between failures at the failure rate per device of Llama 3's training."""
    rate = sum(LLAMA3_CAUSES.values()) / (LLAMA3_DAYS * 86_400 * LLAMA3_DEVICES)
    return 1 / (rate * devices)


def _row(row: FaultStudyRow) -> dict[str, Any]:
    return {
        "devices": row.devices,
        "policy": row.job.policy,
        "replicas": row.job.replicas,
        "effective": row.effective.value,
        "low": row.effective.low,
        "high": row.effective.high,
        "formula": row.formula,
        "shares": row.shares,
    }


def _checkpoints(days: float, runs: int) -> list[dict[str, float]]:
    """Restarts at the rate of Llama 3's failures, beside the closed form."""
    between, found = llama3_seconds_between_failures(LLAMA3_DEVICES), []
    for recovery, save in CHECKPOINTS:
        interval = best_checkpoint_interval(between, save)
        job = FaultyJob("restart", between_s=between, repair_s=recovery, save_s=save, interval_s=interval)
        rates = [simulate_faults(job, days * 86_400, seed).effective for seed in range(runs)]
        formula = effective_with_checkpoints(between, recovery, interval, save)
        found.append(
            {
                "recovery_s": recovery,
                "save_s": save,
                "interval_s": interval,
                "effective": sum(rates) / runs,
                "formula": formula,
            }
        )
    return found


def simulated(console: Console, quick: bool) -> dict[str, Any]:
    """Simulate the published job, the one that this library aims at, and others in between."""
    days, runs = (1.0, 2) if quick else (DAYS, RUNS)
    ours = FaultyJob()
    studies: dict[str, list[FaultStudyRow]] = {
        "published": study_faults(PUBLISHED, days=days, runs=runs),
        "published, begun anew": study_faults(replace(PUBLISHED, queue=False), days=days, runs=runs),
        "consensus of 9 s": study_faults(replace(PUBLISHED, consensus_s=9.0), days=days, runs=runs),
        "stall of 1 s": study_faults(ours, replicas=REPLICAS, days=days, runs=runs),
        "two at once": study_faults(replace(ours, together=0.1), days=days, runs=runs),
        "sizes": study_faults(ours, devices=SIZES, days=days, runs=runs),
    }
    between = llama3_seconds_between_failures(LLAMA3_DEVICES)
    counts = [
        simulate_faults(FaultyJob("decoupled", between_s=between), LLAMA3_DAYS * 86_400, seed).failures
        for seed in range(runs)
    ]
    checkpoints = _checkpoints(days if quick else CHECKPOINT_DAYS, runs)
    table = Table(title=f"effective training time (simulated, {runs} runs of {days:g} days)", title_justify="left")
    for heading in ("job", "devices", "policy", "replicas", "effective", "95 %", "formula"):
        table.add_column(heading)
    for name, rows in studies.items():
        for row in rows:
            table.add_row(
                name, f"{row.devices:,}", row.job.policy, str(row.job.replicas), f"{row.effective.value:.1%}",
                f"{row.effective.low:.1%} to {row.effective.high:.1%}", f"{row.formula:.1%}",
            )  # fmt: skip
    console.print(table)
    console.print(f"failures in {LLAMA3_DAYS:g} days: {counts} simulated, {sum(LLAMA3_CAUSES.values())} published")
    for one in checkpoints:
        console.print(
            f"recovery {one['recovery_s']:.0f} s, save {one['save_s']:.0f} s, every {one['interval_s'] / 60:.1f} min: "
            f"{one['effective']:.1%} simulated, {one['formula']:.1%} by the closed form"
        )
    return {
        "evidence": "simulated",
        "days": days,
        "runs": runs,
        "target": TARGET,
        "studies": {name: [_row(row) for row in rows] for name, rows in studies.items()},
        "failures": counts,
        "checkpoints": checkpoints,
        "notes": [],
    }


main = Program(
    "fault_tolerance",
    {
        Part.simulated: simulated,
        Part.all_reduce: all_reduce,
        Part.emulated: emulated,
        Part.stalls: stalls,
        Part.survival: survival,
        Part.convergence: convergence,
    },
    "Simulate large jobs with failures, and time what lets the others go on.",
).command()


if __name__ == "__main__":
    typer.run(main)
