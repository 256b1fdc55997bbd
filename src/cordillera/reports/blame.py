"""Drawing of the ranks of a job that hangs or is slow: who is to blame, who waits."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from cordillera.distributed.tracing.causes import Blame, RootCause, label, named
from cordillera.run import disk_errors
from cordillera.training.scaling.power_law import save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_OTHERS, _WAITS, _BLAMED, _ABSENT = "#dde2e8", "#e8c468", "#c0392b", "#ffffff"
_MEMBERS = "#2c6fbb"
_NUMBERED = 512  # ranks up to which the cells have numbers
_LISTED = 8  # causes in the legend


def plot_blame(found: Blame, path: Path) -> None:
    """Draw all ranks in a grid, row by row, with those to blame and those that wait in colours of their own.

    Members of communicators in which others wait have a frame, and ranks of a deadlock are connected by arrows.

    Args:
        found: The causes.
        path: File to write; its suffix chooses the format (``.png``, ``.svg``).

    Raises:
        RunError: If the file cannot be written.
    """
    with disk_errors(path, "name another file with --plot"):
        path.parent.mkdir(parents=True, exist_ok=True)
        save_figure(lambda: _draw(found), [path])


def _draw(found: Blame) -> Figure:
    import numpy as np
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    count = max([found.ranks, *(rank + 1 for rank in (*found.victims, *found.culprits, *found.absent))])
    columns = 1 << math.ceil(math.log2(max(1.0, math.sqrt(count))))
    rows = math.ceil(count / columns)
    kinds = np.zeros(rows * columns)
    kinds[count:] = 3
    kinds[list(found.absent)] = 3
    kinds[list(found.victims)] = 1
    kinds[list(found.culprits)] = 2
    figure = Figure(figsize=(7.6, min(9.0, 1.6 + 6.0 * rows / columns)), layout="constrained")
    axes = figure.subplots()
    axes.pcolormesh(
        kinds.reshape(rows, columns),
        cmap=ListedColormap([_OTHERS, _WAITS, _BLAMED, _ABSENT]),
        vmin=-0.5,
        vmax=3.5,
        edgecolors="white",
        linewidth=0.5,
    )
    axes.set_aspect("equal")
    axes.invert_yaxis()
    axes.set_axis_off()
    if count <= _NUMBERED:
        for rank in range(count):
            place = rank % columns + 0.5, rank // columns + 0.5
            color = "white" if kinds[rank] == 2 else "black"
            axes.text(*place, str(rank), ha="center", va="center", fontsize=6, color=color)
    for cause in found.causes[:_LISTED]:
        _mark(axes, cause, columns)
    handles = [Patch(color=_BLAMED, label=_legend(cause)) for cause in found.causes[:_LISTED]]
    if found.victims:
        many = len(found.victims)
        handles.append(Patch(color=_WAITS, label=f"{many:,} {'rank waits' if many == 1 else 'ranks wait'} for others"))
    gone = {*found.absent} - {*found.victims, *found.culprits}
    if gone:
        handles.append(Patch(facecolor=_ABSENT, edgecolor="#8a96a3", label=f"{len(gone):,} without a trace"))
    left = found.ranks - len(found.victims) - len(found.culprits) - len(gone)
    if left > 0:
        handles.append(Patch(color=_OTHERS, label=f"{left:,} {'other' if left == 1 else 'others'}"))
    axes.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, 0.0), fontsize=8, frameon=False)
    return figure


def _legend(cause: RootCause) -> str:
    who = f"to blame: {named(cause.ranks, 4)}" if cause.ranks else "cannot be told"
    return f"{who} ({cause.kind}" + (f", {label(cause.communicator)})" if cause.communicator else ")")


def _mark(axes: Axes, cause: RootCause, columns: int) -> None:
    """Frame the members of a communicator, unless they are all ranks, and connect the ranks of a deadlock."""
    from matplotlib.patches import FancyArrowPatch, Rectangle

    members = cause.communicator.ranks if cause.communicator else ()
    if len(members) <= 64:
        for rank in members:
            place = rank % columns + 0.04, rank // columns + 0.04
            axes.add_patch(Rectangle(place, 0.92, 0.92, fill=False, edgecolor=_MEMBERS, linewidth=1.2))
    circle = cause.circle
    for rank, following in zip(circle, (*circle[1:], *circle[:1]), strict=True):
        ends = [(one % columns + 0.5, one // columns + 0.5) for one in (rank, following)]
        axes.add_patch(FancyArrowPatch(*ends, arrowstyle="-|>", mutation_scale=9, connectionstyle="arc3,rad=0.2"))
