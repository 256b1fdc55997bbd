"""``cordillera delta``: changes of a run's dynamic tables, for copies of the run that follow it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True)


@app.command()
def make(
    run: Annotated[Path, typer.Argument(help="A run with dynamic tables.")],
    since: Annotated[int, typer.Option("--from", min=0, help="Step of the checkpoint that the copy has.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Where the changes go.")],
    to: Annotated[
        int | None, typer.Option(help="Step of the checkpoint to reach. Default: the one that `predict` uses.")
    ] = None,
) -> None:
    """Write what changed between two steps of a run: rows, evicted ids and all other weights."""
    from cordillera import workflows
    from cordillera.cli._show import echo

    made = workflows.make_delta(run, out, since=since, to=to)
    ids = made.tensors["removed_ids"].numel()
    echo(
        f"steps {made.base:,} to {made.version:,}: {made.tensors['rows'].numel():,} of {int(made.tensors['used']):,} "
        f"rows, {ids:,} ids removed, {out.stat().st_size:,} bytes: {out}"
    )


@app.command()
def apply(
    run: Annotated[Path, typer.Argument(help="A copy of the run's folder, with a checkpoint.")],
    file: Annotated[Path, typer.Argument(help="A file of `cordillera delta make`.")],
) -> None:
    """Make a run's later checkpoint from an earlier one and a file of changes, bit for bit."""
    from cordillera import workflows
    from cordillera.cli._show import echo

    echo(f"made {workflows.apply_delta(run, file)}")
