"""``cordillera blame``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cordillera.cli._show import AsJson

if TYPE_CHECKING:
    from cordillera.distributed.tracing.causes import RootCause

BLAMED = 3
"""Exit status if a rank or an operation is to blame."""


def blame(
    traces: Annotated[
        Path, typer.Argument(help="A folder with a trace of each rank, in the form of torch's Flight Recorder.")
    ],
    after: Annotated[
        float | None,
        typer.Option(
            min=0, help="Seconds after which a wait is a stall. Default: ten times the longest of the traces."
        ),
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the ranks into this .png or .svg.")] = None,
    as_json: AsJson = False,
) -> None:
    """Find the ranks that a hang or slowness comes from.

    The exit status is 3 if something is to blame.

    Traces of all ranks are compared: who has not joined an operation, who called it differently, who waits for whom,
    and whose computation takes longer than that of the others. Ranks that only wait for others are counted.
    """
    from cordillera.cli._show import check_plot, console, print_json
    from cordillera.distributed.tracing.blame import blame as find
    from cordillera.distributed.tracing.cause_text import describe
    from cordillera.distributed.tracing.flight_recorder import read_traces

    check_plot(plot)
    found = find(read_traces(traces), stalled_after_s=after)
    if plot is not None:
        from cordillera.reports.blame import plot_blame

        plot_blame(found, plot)
    if as_json:
        causes = [_plain(cause) for cause in found.causes]
        answer = {"causes": causes, "victims": len(found.victims), "ranks": found.ranks, "absent": found.absent}
        print_json({**answer, "notes": found.notes, "plot": plot})
    else:
        out = console()
        for number, paragraph in enumerate(describe(found)):
            if number:
                out.print()
            out.print(paragraph)
        if plot is not None:
            out.print(f"plot: {plot}")
    if found.causes:
        raise typer.Exit(BLAMED)


def _plain(cause: RootCause) -> dict[str, Any]:
    """Return a cause for JSON, with the communicator by its name."""
    from cordillera.distributed.tracing.cause_text import describe_cause

    communicator = cause.communicator
    return {
        "kind": cause.kind,
        "ranks": cause.ranks,
        "certain": cause.certain,
        "communicator": communicator and communicator.name,
        "description": communicator and communicator.description,
        "op": cause.op,
        "sequence": cause.sequence,
        "waited_s": cause.waited_s,
        "waiting": cause.waiting,
        "factor": cause.factor,
        "circle": cause.circle,
        "facts": cause.facts,
        "text": describe_cause(cause),
    }
