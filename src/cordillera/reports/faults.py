"""Studies of failures: effective training time over sizes of clusters, policies and numbers of replicas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cordillera.distributed.fault_tolerance.simulator import FaultyJob
from cordillera.reports.ranking.comparison import SeedMean
from cordillera.run import disk_errors
from cordillera.training.scaling.power_law import save_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class FaultStudyRow:
    """Simulated runs of one job.

    Attributes:
        devices: Size of the cluster.
        job: Job with its failures.
        effective: Mean share of useful time over the runs, with its 95 % interval.
        shares: Mean shares of the time, by the categories of ``TimeUse``.
        failures: Mean number of failures of a run.
        formula: Share of useful time by a closed form, which neglects failures during recoveries.
    """

    devices: int
    job: FaultyJob
    effective: SeedMean
    shares: dict[str, float]
    failures: float
    formula: float


def plot_fault_study(rows: Sequence[FaultStudyRow], path: Path) -> None:
    """Draw the effective time over the number of devices, a line for each policy and number of replicas.

    The suffix of ``path`` chooses the format (``.png``, ``.svg``).

    Raises:
        RunError: If the file cannot be written.
    """
    with disk_errors(path, "name another file with --plot"):
        path.parent.mkdir(parents=True, exist_ok=True)
        save_figure(lambda: _draw(rows), [path])


def _draw(rows: Sequence[FaultStudyRow]) -> Figure:
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, NullFormatter, PercentFormatter, StrMethodFormatter

    figure = Figure(figsize=(7.6, 4.6), layout="constrained")
    axes = figure.subplots()
    lines: dict[str, list[FaultStudyRow]] = {}
    for row in rows:
        name = row.job.policy if row.job.policy == "restart" else f"{row.job.policy}, {row.job.replicas}"
        lines.setdefault(name, []).append(row)
    styles = {"restart": "-", "replicas": "-", "decoupled": "--"}
    for name, line in lines.items():
        values = [row.effective.value for row in line]
        errors = [[row.effective.value - row.effective.low for row in line],
                  [row.effective.high - row.effective.value for row in line]]  # fmt: skip
        axes.errorbar([row.devices for row in line], values, yerr=errors, label=name, marker="o", markersize=4,
                      linestyle=styles[line[0].job.policy], capsize=2)  # fmt: skip
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator(sorted({row.devices for row in rows})))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_ylim(0, 1)
    axes.set_xlabel("devices")
    axes.set_ylabel("effective training time (simulated)")
    axes.grid(color="#dde2e8", linewidth=0.8)
    axes.legend(fontsize=9, loc="lower left", title="policy, replicas")
    return figure
