"""Page of a run of replicas: what share of their time was useful, all of them over time, and every fault."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from cordillera.distributed.fault_tolerance.events import FOLDER, read_events
from cordillera.distributed.fault_tolerance.goodput import (
    COORDINATOR,
    INJECTED,
    TIME_PARTS,
    Goodput,
    ReplicaFault,
    TimePart,
    TimeSpan,
    account,
)
from cordillera.errors import RunError
from cordillera.numbers import duration
from cordillera.reports import page
from cordillera.reports.charts import (
    Axis,
    Figure,
    Mark,
    Series,
    Span,
    figure,
    framed,
    gantt,
    nice_ticks,
    seconds_text,
    stacked_bar,
)
from cordillera.run import Run, read_recipe, write_atomically

REPLICAS_PAGE = "replicas.html"
"""File in the folder of a run of replicas: their page."""

_STYLES: dict[TimePart, str] = {
    "useful": "f0", "redone": "f4", "stalled": "f5", "paused": "f1", "absent": "f3", "starting": "f7",
}  # fmt: skip
_MEANINGS: dict[TimePart, str] = {
    "useful": "computing steps of the final model",
    "redone": "computing steps that were discarded or rolled back",
    "stalled": "waiting for others, or catching up",
    "paused": "evaluations, checkpoints, records",
    "absent": "ended, or left out",
    "starting": "until the first connection",
}
_PIXELS = 850  # width of a lane
_BINS = 200  # points of lines of many replicas
_VISIBLE = 3  # pixels of the shortest span that is drawn by itself
_COLUMN, _SHADES = 6, 16  # pixels of a column of shorter ones, steps of its heights
_MOST_LINES = 4  # replicas that have lines of their own in charts
_Point = tuple[float, float, int]  # time, value, step
_SHOWN, _MOST = 12, 300  # rows of tables at once, and behind a fold


def write_replicas_page(run: Run) -> Path:
    """Write ``replicas.html`` into the folder of a ``run`` of replicas, and return its path.

    The page reads ``recipe.toml`` and the events in the folder ``replicas``.

    Raises:
        RunError: If there are no events, some are missing or damaged, or the page cannot be written.
    """
    _, recipe = read_recipe(run)
    replicas = page.part(recipe, "fault_tolerance").get("replicas")
    if not isinstance(replicas, int) or replicas < 2:
        raise RunError("fault_tolerance.replicas is not above 1", where=str(run.recipe_file))
    path = run.folder / REPLICAS_PAGE
    write_atomically(path, render_replicas(run.name, read_account(run, replicas)))
    return path


def read_account(run: Run, replicas: int) -> Goodput:
    """Return the account of the events of a ``run`` that is configured for a number of ``replicas``.

    Raises:
        RunError: If there are no events, or some are missing or damaged.
    """
    try:
        return account(read_events(run.folder), replicas)
    except RunError as error:
        place = str(run.folder / FOLDER)
        raise RunError(error.what, where=f"{place}, {error.where}" if error.where else place) from error


def render_replicas(name: str, found: Goodput) -> str:
    """Return the page of an account as HTML text."""
    return page.fill(
        "replicas",
        name=name,
        lede=f"{len(found.times):,} replicas over {duration(found.elapsed_s)}",
        tiles=_tiles(found),
        key=_key(found),
        timeline=_timeline(found),
        charts=_charts(found),
        time=_parts(found),
        faults=page.folded([_fault_row(one) for one in found.faults], _SHOWN, _MOST),
        stragglers=[(one.name, f"{one.factor:.2f} times", f"{one.steps:,}") for one in found.stragglers],
        messages=page.folded([(duration(one.at), one.who, one.text) for one in sorted(found.messages)], _SHOWN, _MOST),
    )


def _unit(seconds: float) -> tuple[str, float]:
    """Return the unit of an axis of ``seconds`` seconds, and the unit's length in seconds."""
    return ("h", 3600.0) if seconds >= 10_800 else ("min", 60.0) if seconds >= 300 else ("s", 1.0)


def _brief(seconds: float, unknown: str) -> str:
    """Return a time that may be short."""
    return seconds_text(seconds) if seconds < 60 else duration(seconds) if math.isfinite(seconds) else unknown


def _fault_row(one: ReplicaFault) -> tuple[str, ...]:
    away = _brief(one.away_s, "" if one.replica == COORDINATOR else "not back")
    return duration(one.at), one.replica, _brief(one.stall_s, "no later step"), away, one.what


def _tiles(found: Goodput) -> list[tuple[str, ...]]:
    """Return names, values, bounds and meanings of the headline figures."""
    degraded = f"{100 * found.degraded:.1f} % while some were away" if found.degraded > 0 else "all with every replica"
    dropped = [
        *([f"rolled back: {found.rolled_back:,}"] if found.rolled_back else []),
        *([f"attempts given up: {found.discarded:,}"] if found.discarded else []),
    ]
    ends = sum(one.replica != COORDINATOR for one in found.faults)
    others = len(found.faults) - ends
    whom = f"replicas: {ends:,}" + (f", coordinator: {others:,}" if others else "")
    each = f"{seconds_text(found.step_s)} each (median)" if math.isfinite(found.step_s) else ""
    stall = _brief(found.mean_stall_s, "no later step" if found.faults else "none")
    return [
        ("goodput", f"{100 * found.goodput:.1f} %", degraded, "useful share of the time of all replicas"),
        ("steps", f"{found.steps:,}", ", ".join(dropped), each),
        ("faults", f"{len(found.faults):,}", whom if found.faults else "", ""),
        ("mean stall", stall, "", "that a fault cost the other replicas" if found.faults else ""),
    ]


# Timeline


def _key(found: Goodput) -> list[tuple[str, str]]:
    """Return styles and names of what the timeline shows."""
    key: list[tuple[str, str]] = [(_STYLES[part], part) for part in TIME_PARTS if found.share(part) > 0]
    sizes = {len(one.members) < len(found.times) for one in found.epochs}
    key += [("f6", "all members")] if False in sizes else []
    key += [("f2", "fewer members")] if True in sizes else []
    key += [("fault", "fault")] if found.faults else []
    if any(one.text.startswith(INJECTED) for one in found.messages):
        key.append(("injected", "injected fault"))
    if any(one.who == COORDINATOR and not one.text.startswith(INJECTED) for one in found.messages):
        key.append(("event", "message of the coordinator"))
    return key + ([("resumed", "job resumed")] if len(found.launches) > 1 else [])


def _timeline(found: Goodput) -> Markup:
    """Draw a lane for each replica and one for the epochs of the coordinator, with marks of faults and epochs."""
    names = list(found.times)
    whole = found.elapsed_s or 1.0
    pixel = whole / _PIXELS
    rows: list[tuple[str, Iterator[Span]]] = [(name, _drawn(found.spans[name], pixel)) for name in names]
    rows.append(("members", _members(found, whole)))
    marks = [Mark(0, len(rows), at, "resumed", f"resumed after {duration(at)}") for at in found.launches[1:]]
    for one in found.faults:
        row = len(names) if one.replica == COORDINATOR else names.index(one.replica)
        marks.append(Mark(row, row + 1, one.at, "fault", f"{one.replica}, {duration(one.at)}: {one.what}"))
    for at, who, text in found.messages:
        row = names.index(who) if who in names else len(names)
        if text.startswith(INJECTED):
            marks.append(Mark(row, row + 1, at, "injected", f"{who}, {duration(at)}: {text}"))
        elif who == COORDINATOR:
            marks.append(Mark(len(names), len(rows), at, "event", f"{duration(at)}: {text}"))
    height = 34.0 if len(rows) <= 8 else 24.0 if len(rows) <= 16 else 18.0
    label = f"Time of {len(names)} replicas over {duration(whole)}, with {len(found.faults)} faults"
    unit, size = _unit(whole)
    ticks = [(value * size, f"{value:g} {unit}" if value else "0") for value in nice_ticks(0.0, whole / size)]
    return gantt(label, rows, whole, height, numbered=True, marks=marks, ticks=ticks)


def _drawn(spans: Sequence[TimeSpan], pixel: float) -> Iterator[Span]:
    """Yield the spans of a lane; stretches of short ones become columns, or are left to the span before."""
    least = _VISIBLE * pixel
    drawn: list[TimeSpan | list[TimeSpan]] = []
    for is_long, group in itertools.groupby(spans, key=lambda one: one.end - one.start >= least):
        found = list(group)
        last = drawn[-1] if drawn else None
        if not is_long and isinstance(last, TimeSpan) and found[-1].end - found[0].start < least:
            drawn[-1] = last._replace(end=found[-1].end)
        elif not is_long:
            drawn.append(found)
        else:
            if isinstance(last, TimeSpan) and last.part == found[0].part:
                drawn[-1] = last._replace(end=found.pop(0).end)
            drawn += found
    for one in drawn:
        if isinstance(one, TimeSpan):
            yield Span(one.start, one.end, _STYLES[one.part])
        else:
            yield from _columns(one, pixel)


def _columns(spans: Sequence[TimeSpan], pixel: float) -> Iterator[Span]:
    """Yield columns for spans that follow each other: the height of a part is its share, useful time is at the foot."""
    begin, end = spans[0].start, spans[-1].end
    count = max(1, round((end - begin) / pixel / _COLUMN))
    width = (end - begin) / count
    sums: list[dict[TimePart, float]] = [dict.fromkeys(TIME_PARTS, 0.0) for _ in range(count)]
    for one in spans:
        for place in range(int((one.start - begin) / width), min(int((one.end - begin) / width) + 1, count)):
            left, right = begin + place * width, begin + (place + 1) * width
            sums[place][one.part] += max(0.0, min(one.end, right) - max(one.start, left))
    rounded = [tuple(round(one[part] / width * _SHADES) for part in TIME_PARTS) for one in sums]
    at = 0
    for shares, group in itertools.groupby(rounded):
        until, low, whole = at + len(list(group)), 0.0, sum(shares)
        for part, share in reversed(list(zip(TIME_PARTS, shares, strict=True))):
            if share:
                high = low + share / whole
                yield Span(begin + at * width, begin + until * width, _STYLES[part], low=low, high=high)
                low = high
        at = until


def _members(found: Goodput, whole: float) -> Iterator[Span]:
    """Yield the numbers of members over time; epochs of the same number follow each other as one."""
    starts = itertools.groupby(found.epochs, key=lambda one: (one.launch, len(one.members)))
    groups = [(key, list(group)) for key, group in starts]
    ends = [*(group[0].at for _, group in groups[1:]), whole]
    for ((launch, members), group), end in zip(groups, ends, strict=False):
        until = min(end, *found.launches[launch + 1 : launch + 2], whole)
        first, last = group[0], group[-1]
        epochs = f"epoch {first.epoch}" if first is last else f"epochs {first.epoch} to {last.epoch}"
        text = f"{epochs} from step {first.step + 1:,}: {', '.join(first.members)}"
        style = "f6" if members == len(found.times) else "f2"
        yield Span(first.at, until, style, text if len(groups) <= _MOST else "", str(members))


# Charts and tables


def _charts(found: Goodput) -> list[Figure | None]:
    """Return the times of steps and of their computation; with many replicas, those of the fastest and slowest."""
    unit, size = _unit(found.elapsed_s)
    labels = f"time of the job ({unit})", "s"
    texts = (
        "Time of useful steps, in which replicas wait for each other.",
        "Computation of useful steps, without waiting.",
    )
    drawn: list[Figure | None] = []
    for heading, key, text in zip(("Step", "Computation"), ("all", "compute"), texts, strict=True):
        points = {
            name: [
                (one.at / size, one.seconds[key], one.step)
                for one in attempts
                if one.is_useful and one.contributes and not one.is_short and key in one.seconds
            ]
            for name, attempts in found.attempts.items()
        }
        series = _lines(points) if len(points) <= _MOST_LINES else _range(points, found.elapsed_s / size)
        limits, is_cut = framed([value for one in series for value in one.ys])
        y = Axis((0.0, limits[1] if limits[1] > 0 else 1.0))
        caption = text + (" Some leave the frame." if is_cut else "")
        drawn.append(figure(heading, series, labels, caption, x=Axis((0.0, found.elapsed_s / size or 1.0)), y=y))
    return drawn


def _lines(points: Mapping[str, Sequence[_Point]]) -> list[Series]:
    """Return the line of each replica, with a gap where it did not take part."""
    found = []
    for number, (name, line) in enumerate(points.items()):
        xs, ys, last = list[float](), list[float](), None
        for at, value, step in line:
            if last is not None and step > last + 2:  # the attempt after a discarded one is not among them
                xs.append(at)
                ys.append(math.nan)
            xs.append(at)
            ys.append(value)
            last = step
        found.append(Series(name, f"s{number}", xs, ys))
    return found


def _range(points: Mapping[str, Sequence[_Point]], until: float) -> list[Series]:
    """Return the shortest, median and longest of the replicas' times, which are means over short spans of time."""
    means: dict[int, list[float]] = defaultdict(list)
    for line in points.values():
        for place, group in itertools.groupby(line, key=lambda one: int(one[0] / (until or 1.0) * _BINS)):
            means[place].append(statistics.fmean(value for _, value, _ in group))
    places = sorted(means)
    xs = [(place + 0.5) / _BINS * until for place in places]
    kinds: dict[str, tuple[str, Callable[[Sequence[float]], float]]] = {
        "slowest replica": ("s1", max),
        "median": ("s0", statistics.median),
        "fastest": ("s2", min),
    }
    return [
        Series(name, style, xs, [float(of(means[place])) for place in places]) for name, (style, of) in kinds.items()
    ]


def _parts(found: Goodput) -> dict[str, Any]:
    """Return the parts of the time of all replicas as a bar with rows, and those of each replica as a table."""
    sums = {part: math.fsum(times[part] for times in found.times.values()) for part in TIME_PARTS}
    shown = [part for part in TIME_PARTS if sums[part] > 0]
    rows = [
        (_STYLES[part], part.capitalize(), _MEANINGS[part], duration(sums[part]), f"{100 * found.share(part):.1f} %")
        for part in shown
    ]
    label = " ".join(["Where the time goes.", *(f"{name}: {share}." for _, name, _, _, share in rows)])
    each = [
        (name, *(duration(times[part]) for part in shown), f"{100 * times['useful'] / (found.elapsed_s or 1.0):.1f} %")
        for name, times in found.times.items()
    ]
    return {
        "bar": stacked_bar(label, [(_STYLES[part], sums[part]) for part in shown]),
        "rows": rows,
        "heads": ["Replica", *(part.capitalize() for part in shown), "Useful share"],
        "each": each,
    }
