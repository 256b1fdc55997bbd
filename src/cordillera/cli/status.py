"""``cordillera status``."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cordillera.cli._show import AsJson, CommandOutput, Field, Sheet, to_type
from cordillera.numbers import duration, size_text

if TYPE_CHECKING:
    from cordillera.reports.runs_status import RunState, SavedCheckpoint

_DEFAULT = Path("runs")


def status(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(help="Runs, or folders of runs such as that of a sweep. Default: the folder runs."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the progress of runs and what to do next.

    A single run is shown with its checkpoints. Nothing is written.
    """
    from cordillera.reports.runs_status import run_states, saved_checkpoints

    folders = _folders(runs)
    found = run_states(folders)
    with CommandOutput(as_json) as answer:
        if not found and not as_json:
            answer.say(_none(_DEFAULT))
            return
        answer.tables(runs=_runs(found))
        if runs == folders and len(folders) == 1:
            saved = saved_checkpoints(folders[0])
            if saved or as_json:
                answer.tables(checkpoints=_checkpoints(saved))
            elif not found[0].state.startswith("search"):
                answer.say("no checkpoint yet")
            for line in _details(found[0]):
                answer.say(line)


def _folders(named: Sequence[Path] | None) -> list[Path]:
    """Return the folders to show; what is neither a run nor a folder of runs stays, and is then named in an error."""
    from cordillera.reports.runs_status import is_run, runs_in

    if not named:
        return runs_in(_DEFAULT) if _DEFAULT.is_dir() else []
    found = []
    for place in named:
        is_parent = place.is_dir() and not is_run(place)
        found += (runs_in(place) if is_parent else []) or [place]
    return found


def _none(folder: Path) -> str:
    """Return what to do where a folder holds no run itself: show those of its studies, or train one."""
    from cordillera.reports.runs_status import is_run

    inside = sorted(folder.glob("*/*/recipe.toml"))
    studies = dict.fromkeys(one.parent.parent for one in inside if is_run(one.parent))
    if studies:
        return f"there are no runs directly in the folder {folder}; `{to_type('status', *studies)}` shows its studies"
    return f"there are no runs in the folder {folder}; `cordillera train RECIPE` makes one"


def _runs(states: Sequence[RunState]) -> Sheet:
    """Return a table of runs, without columns that would be empty."""
    has = {key: any(getattr(one, key) not in (None, "") for one in states) for key in ("loss", "ne", "why")}
    table = Sheet(
        None,
        Field("run"),
        Field("model"),
        Field("state"),
        Field("step", form="{:,}"),
        Field("steps", "of", form="{:,}"),
        Field("loss", form="{:.4f}", shown=has["loss"]),
        Field("ne", "NE", form="{:.4f}", shown=has["ne"]),
        Field("age", "newest record", form=lambda seconds: f"{duration(seconds)} ago", right=True),
        Field("bytes", "size", form=size_text, right=True),
        Field("why", shown=len(states) > 1 and has["why"]),
        Field("process", shown=False),
        Field("next", shown=False),
    )
    for one in states:
        values = (one.folder, one.model, one.state, one.step, one.steps, one.loss, one.ne, one.age, one.bytes)
        table.add(*values, one.why, one.process, one.next)
    return table


def _checkpoints(saved: Sequence[SavedCheckpoint]) -> Sheet:
    table = Sheet(
        "checkpoints",
        Field("step", form="{:,}"),
        Field("bytes", "size", form=size_text, right=True),
        Field("written", form=lambda seconds: f"{datetime.fromtimestamp(seconds):%Y-%m-%d %H:%M:%S}", right=True),
    )
    for one in saved:
        table.add(*one)
    return table


def _details(one: RunState) -> list[str]:
    """Return the reason of a failure, the process that writes the run, and what to do next."""
    lines = [one.why] if one.why else []
    if one.process:
        saves = "" if one.state.startswith("search") else "; after SIGTERM it saves a checkpoint and ends"
        lines.append(f"process {one.process} writes it{saves}")
    return lines + ([f"  -> {one.next}"] if one.next else [])
