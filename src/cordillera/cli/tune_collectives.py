"""``cordillera tune-collectives``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cordillera.cli._show import AsJson

if TYPE_CHECKING:
    from cordillera.distributed.collective_tuning import PlanTiming

_SIZES = [4 << 10, 32 << 10, 256 << 10, 2 << 20, 16 << 20, 64 << 20]


def tune_collectives(
    file: Annotated[Path, typer.Argument(help="The .toml file that is written.")],
    nproc: Annotated[
        int | None,
        typer.Option(min=2, help="Processes on this machine; a launcher starts those of several. Default: 2."),
    ] = None,
    sizes: Annotated[list[int] | None, typer.Option("--bytes", min=4, help="Bytes to time; may be repeated.")] = None,
    seconds: Annotated[float, typer.Option(min=0.01, help="Longest time for a collective of one size.")] = 2.0,
    as_json: AsJson = False,
) -> None:
    """Measure which plans collectives of the backend cordillera take.

    Plans (direct, rings, doubling, hierarchical) take turns. Another one than usual is chosen if it is 5 % faster in
    the median, and no slower in three of four rounds. CORDILLERA_TUNING=FILE lets jobs follow the file.
    """
    from cordillera.cli._show import CommandOutput, Field, Sheet
    from cordillera.distributed.collective_tuning import rules_of, write_tuning
    from cordillera.distributed.job.environment import place_in_job
    from cordillera.distributed.job.job import join_job
    from cordillera.distributed.job.launch import LaunchConfig, launch
    from cordillera.distributed.job.slurm import adopt_slurm
    from cordillera.errors import PlanError
    from cordillera.files import check_writable
    from cordillera.workflows.processes import from_ranks

    if file.suffix != ".toml":
        raise PlanError(f"cannot write rules into {file.name}", where="FILE", remedy="name a .toml")
    check_writable(file)
    adopt_slurm()
    place = place_in_job()
    if place is not None and nproc not in (None, place.size):
        raise PlanError(f"the launcher has started {place.size} processes, not {nproc}", where="--nproc")
    asked = sorted(set(sizes or _SIZES))
    with CommandOutput(as_json) as answer:
        say = answer.notes.print
        if place is None:
            config, ranks = LaunchConfig(threads=1, backend="cordillera", deadline_s=60.0), nproc or 2
            found = launch(_launched, ranks, (asked, seconds), config=config, hear=from_ranks(None, say))
        else:
            with join_job(backend="cordillera", deadline_s=60.0) as job:
                found, ranks = _measure(asked, seconds, say), job.size
                if job.rank > 0:
                    return
        tuning = rules_of(found, ranks)
        write_tuning(tuning, file, [f"Plans over {ranks} ranks, measured by `cordillera tune-collectives`."])
        sheet = Sheet(
            f"Plans over {ranks} ranks",
            Field("collective"),
            Field("bytes", form="{:,}"),
            Field("usual"),
            Field("usual_ms", "ms", "{:.2f}"),
            Field("plan"),
            Field("plan_ms", "ms", "{:.2f}"),
        )
        for one in found:
            usual, chosen = one.seconds[one.usual] * 1e3, one.seconds[one.chosen] * 1e3
            sheet.add(one.collective, one.size, one.usual, usual, one.chosen, chosen)
        answer.tables(plans=sheet)
        answer.say(f"Rules in {file}; jobs follow them with CORDILLERA_TUNING={file}", file=str(file))


def _launched(rank: int, sizes: list[int], seconds: float) -> list[PlanTiming]:
    from cordillera.workflows.processes import to_launcher

    return _measure(sizes, seconds, to_launcher(rank)[1])


def _measure(sizes: list[int], seconds: float, say: Callable[[str], object]) -> list[PlanTiming]:
    """Time all plans as one of the ranks."""
    from typing import get_args

    import torch.distributed as dist

    from cordillera.distributed.collective_tuning import TunedCollective, time_plans

    group: Any = dist.GroupMember.WORLD
    found = []
    for collective in get_args(TunedCollective):
        say(f"timing {collective}")
        found += [time_plans(group, collective, size, seconds=seconds) for size in sizes]
    return found
