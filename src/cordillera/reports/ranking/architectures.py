"""Page of an architecture search: the front of NE and FLOPs, where candidates died, and the best graphs."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from markupsafe import Markup
from pydantic import ValidationError

from cordillera.mistakes import flat_values
from cordillera.models.ranking.graphs.config import DENSE, EMBEDDINGS, GraphConfig
from cordillera.numbers import duration
from cordillera.reports import page
from cordillera.reports.charts import Axis, Figure, Series, box, drawing, figure, padded, stroke, write_text

_DRAWN = 3  # graphs of the front
_MANY = 20  # least number of architectures for clipping the worst
_ROOM = 0.05
_WIDTH, _HEIGHT, _GAP_X, _GAP_Y = 132.0, 40.0, 22.0, 34.0
_LANE = 4.0  # width of an edge that passes a row

_MEANINGS = {
    "settings": "no valid recipe",
    "shape": "could not be built, or gave wrong scores",
    "budget": "more FLOPs or parameters than allowed",
    "reach": "no gradient reaches some feature",
    "future": "the score of a sample depends on later samples",
    "sample": "worse than without training after a small share of the data",
    "training": "training failed",
    "process": "its process ended, or took too long",
}


def search_page(
    name: str,
    description: str,
    entries: Sequence[Mapping[str, Any]],
    front: Sequence[str],
    settings: Mapping[str, Any],
    judged: Mapping[str, tuple[float, Sequence[float]]] | None = None,
    banner: str = "",
) -> str:
    """Return the HTML page of a search.

    Args:
        name: Name of the search.
        description: What is searched, in a sentence.
        entries: Candidates in order: ``name``, ``origin``, ``overrides`` and the fields of a trial.
        front: Names of the candidates of the front, by FLOPs.
        settings: Settings by name.
        judged: Mean NE of the validation split over new seeds, and NE of the test split of each, by the name of the
            candidate.
        banner: Warning at the top; empty for none.
    """
    judged = judged or {}
    finished = [one for one in entries if one["stage"] == "finished"]
    by_name = {one["name"]: one for one in finished}
    best = [by_name[one] for one in front]
    died = Counter(one["stage"] for one in entries if one["stage"] != "finished")
    seeds = max((len(tested) for _, tested in judged.values()), default=0)
    chosen = any(chosen_settings(one["overrides"]) for one in best)
    return page.fill(
        "architectures",
        name=name,
        lede=description,
        banner=banner,
        tiles=_tiles(entries, finished, best),
        charts=[_front_chart(finished, best, judged), _path(entries)],
        front=[_row(one, judged if seeds else {}, chosen) for one in reversed(best)],
        seeds=seeds,
        chosen=chosen,
        graphs=[(one["name"], _told(one), drawn) for one in reversed(best) if (drawn := _drawn(one))][:_DRAWN],
        deaths=[(f"{stage}: {count:,}", _death(entries, stage)) for stage, count in died.items()],
        settings=[(key.replace("_", " "), page.plain(value)) for key, value in settings.items()],
    )


def _tiles(
    entries: Sequence[Mapping[str, Any]], finished: Sequence[Mapping[str, Any]], best: Sequence[Mapping[str, Any]]
) -> list[tuple[str, str, str, str]]:
    tiles = [
        ("tried", f"{len(entries):,}", "", "architectures"),
        ("trained", f"{len(finished):,}", "", "the others died" if len(finished) < len(entries) else "all of them"),
    ]
    if best:
        lowest = min(best, key=lambda one: one["ne"])
        tiles.append(("lowest NE", f"{lowest['ne']:.4f}", _interval(lowest), "validation split; chosen by it"))
    seconds = math.fsum(one.get("seconds", 0.0) for one in entries)
    return [*tiles, ("time of trials", duration(seconds), "", "of one thread each")]


def _interval(entry: Mapping[str, Any]) -> str:
    low, high = entry.get("low"), entry.get("high")
    return "" if low is None or high is None else f"{low:.4f} to {high:.4f}"


def chosen_settings(overrides: Mapping[str, Any]) -> str:
    """Return a candidate's keys of the recipe with their values in one line; those of a graph, which is drawn, not."""
    model = overrides.get("model")
    is_graph = isinstance(model, Mapping) and model.get("name") == "graph"
    kept = {key: value for key, value in overrides.items() if not (key == "model" and is_graph)}
    return ", ".join(f"{key} = {json.dumps(value)}" for key, value in flat_values(kept).items())


def _row(
    entry: Mapping[str, Any], judged: Mapping[str, tuple[float, Sequence[float]]], chosen: bool
) -> tuple[str, ...]:
    again: tuple[str, ...] = ()
    if judged:
        mean, found = judged.get(entry["name"], (math.inf, ()))
        shown = (f"{mean:.4f}", f"{fmean(found):.4f}", f"{min(found):.4f} to {max(found):.4f}") if found else None
        again = shown or ("", "", "")
    return (
        entry["name"], *([chosen_settings(entry["overrides"])] if chosen else []), f"{entry['ne']:.4f}",
        _interval(entry), *again, f"{entry['flops']:,}", f"{entry['parameters']:,}", entry["origin"],
    )  # fmt: skip


def _told(entry: Mapping[str, Any]) -> str:
    return f"NE {entry['ne']:.4f}, {entry['flops']:,} FLOPs an example"


def _death(entries: Sequence[Mapping[str, Any]], stage: str) -> str:
    """Return what dying at a stage means, with the first candidate's reason."""
    first = next(one for one in entries if one["stage"] == stage)
    return f"{_MEANINGS.get(stage, 'died')}; the first: {first.get('why', '')}"


def _front_chart(
    finished: Sequence[Mapping[str, Any]],
    best: Sequence[Mapping[str, Any]],
    judged: Mapping[str, tuple[float, Sequence[float]]],
) -> Figure | None:
    known = [one for one in finished if one["flops"] > 0]
    if not known or not best:
        return None
    titles = [f"{one['name']}: {_told(one)}" for one in known]
    # Clip the axis at the 90th percentile of many: outliers would hide the differences that matter.
    lowest, values = min(one["ne"] for one in known), sorted(one["ne"] for one in known)
    top = max(values[int(0.9 * (len(values) - 1)) if len(values) >= _MANY else -1], lowest + 1e-3)
    low, high = padded([lowest, top])
    flops = [one["flops"] for one in known]
    series = [
        Series("all architectures", "s1", flops, [one["ne"] for one in known], "dots", titles),
        Series("front", "s0", [one["flops"] for one in best], [one["ne"] for one in best], "both"),
    ]
    of_test = [(one["flops"], fmean(judged[one["name"]][1])) for one in best if judged.get(one["name"], ((), ()))[1]]
    if of_test:
        xs, ys = [flops for flops, _ in of_test], [ne for _, ne in of_test]
        series.append(Series("front on the test split, new seeds", "s2", xs, ys, "dots"))
        low, high = padded([min(lowest, *ys), max(top, *ys)])
    left_out = sum(one["ne"] > high for one in known)
    caption = "Lower and further left is better." + (f" Above the top: {left_out:,}." if left_out else "")
    x = Axis.log(min(flops) / (1 + _ROOM), max(flops) * (1 + _ROOM))
    return figure("NE and FLOPs", series, ("FLOPs an example", "NE"), caption, x=x, y=Axis((low, high)))


def _path(entries: Sequence[Mapping[str, Any]]) -> Figure | None:
    numbers, lowest, least = [], [], math.inf
    for one in entries:
        least = min(least, one.get("ne", math.inf))
        if math.isfinite(least):
            numbers.append(float(one["number"] + 1))
            lowest.append(least)
    if len(numbers) < 2:
        return None
    low, high = padded([min(lowest), max(max(lowest), min(lowest) + 1e-3)])
    series = [Series("lowest NE so far", "s0", numbers, lowest)]
    caption = "Lowest NE on the validation split among all tried until then."
    return figure("Progress", series, ("architectures tried", "NE"), caption, y=Axis((low, high)))


def _drawn(entry: Mapping[str, Any]) -> Markup | None:
    """Return a drawing of a candidate that is a graph, else None."""
    model = entry["overrides"].get("model")
    if not isinstance(model, Mapping) or model.get("name") != "graph":
        return None
    try:
        return draw_graph(GraphConfig.model_validate(model))
    except ValidationError:
        return None


def _placed(
    depth: Mapping[str, int], edges: Sequence[tuple[str, str]]
) -> tuple[dict[str, tuple[float, float]], list[tuple[str, str]], float]:
    """Place the ends of edges in rows by their depth, below what they read, with a lane where an edge passes a row.

    Returns:
        Left upper corner of each box and lane, pairs of those that follow each other, and the width of all.
    """
    rows: dict[int, list[str]] = {}
    for name in dict.fromkeys(name for edge in edges for name in edge):
        rows.setdefault(depth[name], []).append(name)
    links: list[tuple[str, str]] = []
    for number, (source, target) in enumerate(edges):
        lanes = {level: f"{number}.{level}" for level in range(depth[source] + 1, depth[target])}
        for level, lane in lanes.items():
            rows[level].append(lane)
        links += itertools.pairwise([source, *lanes.values(), target])
    sizes = {name: _WIDTH if name in depth else _LANE for names in rows.values() for name in names}
    widths = {level: sum(sizes[name] + _GAP_X for name in names) for level, names in rows.items()}
    width = max(widths.values()) + _GAP_X
    places: dict[str, tuple[float, float]] = {}
    for row, level in enumerate(sorted(rows)):
        if row:  # order nodes by the mean position of their inputs
            above = {name: fmean(places[one][0] for one, other in links if other == name) for name in rows[level]}
            rows[level].sort(key=above.__getitem__)
        x = (width - widths[level] + _GAP_X) / 2
        for name in rows[level]:
            places[name] = x, 8 + row * (_HEIGHT + _GAP_Y)
            x += sizes[name] + _GAP_X
    return places, links, width


def draw_graph(config: GraphConfig) -> Markup:
    """Return a drawing of a graph, inputs at the top, each node below those that it reads."""
    depth: dict[str, int] = {DENSE: 0, EMBEDDINGS: 0}
    for node in config.ordered():
        depth[node.name] = 1 + max(depth[name] for name in node.inputs)
    depth["heads"] = 1 + max(depth.values())
    edges = [(name, node.name) for node in config.nodes for name in node.inputs]
    edges += [(name, "heads") for name in config.output]
    places, links, width = _placed(depth, edges)
    sizes = {
        node.name: f"{node.op}, width {node.width}" if node.gives_vector else f"{node.op}, {node.rows} rows"
        for node in config.nodes
    }
    middle = {name: x + (_WIDTH if name in depth else _LANE) / 2 for name, (x, _) in places.items()}
    parts = [
        stroke((middle[above], middle[below]), (places[above][1] + _HEIGHT, places[below][1]), "axis")
        for above, below in links
    ]
    lanes = {name: y for name, (_, y) in places.items() if name not in depth}
    parts += [stroke((middle[name], middle[name]), (y, y + _HEIGHT), "axis") for name, y in lanes.items()]
    vectors = {DENSE, *(node.name for node in config.nodes if node.gives_vector)}
    for name, (x, y) in ((name, place) for name, place in places.items() if name in depth):
        style = "s3" if name == "heads" else "s0" if name in vectors else "s2"
        parts.append(box(x, y, _WIDTH, _HEIGHT, f"node {style}", sizes.get(name, name)))
        parts.append(write_text(x + _WIDTH / 2, y + (17 if name in sizes else 24), name, style="callout"))
        if name in sizes:
            parts.append(write_text(x + _WIDTH / 2, y + 32, sizes[name]))
    height = 8 + max(y for _, y in places.values()) + _HEIGHT
    told = "; ".join(f"{node.name} is {sizes[node.name]} of {', '.join(node.inputs)}" for node in config.ordered())
    return drawing(width, height, f"Graph: {told}; heads read {', '.join(config.output)}", parts, class_="graph")
