"""Report of an injection: effects of bit flips on a model, and advice on protection."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from html import escape
from typing import Any

from cordillera.reports import page as report_page
from cordillera.reports.charts import heat_map

_GOAL = 0.9  # part of the wrong outputs that protection should remove


def _percent(value: float) -> str:
    if not math.isfinite(value):
        return "undefined"
    return f"{100 * value:.3g} %" if value else "0 %"


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)


def _between(rate: dict[str, Any]) -> str:
    return f"{_percent(_number(rate['low']))} to {_percent(_number(rate['high']))}"


def _ranges(bits: Sequence[int]) -> str:
    """Format positions in any order, as in ``27 to 30, 31``."""
    texts = []
    for _, run in itertools.groupby(enumerate(sorted(bits)), key=lambda pair: pair[1] - pair[0]):
        group = [bit for _, bit in run]
        texts.append(f"{group[0]} to {group[-1]}" if len(group) > 1 else f"{group[0]}")
    return ", ".join(texts)


def advice(components: Sequence[dict[str, Any]]) -> list[str]:
    """Return sentences on what to protect, and the gain, for faults that hit every bit of the weights alike.

    Bit positions are protected in descending order of their rate until nine of ten wrong outputs are removed.

    Args:
        components: Results of ``Vulnerability.to_json``.
    """
    measured = [one for one in components if one["injections"]]
    bits = sum(one["bits"] for one in measured)
    if not bits:
        return ["Nothing was injected: there is nothing to say."]
    places = [
        (entry["pvf"]["value"], entry["share_of_bits"] * one["bits"], one["name"], entry)
        for one in measured
        for entry in one["positions"]
    ]
    harm = math.fsum(rate * size for rate, size, _, _ in places)
    if not harm:
        most = max(_number(one["pvf"]["high"]) for one in measured)
        return [f"No fault made an output wrong. At 95 % confidence the PVF is below {_percent(most)} everywhere."]
    lines = [f"A fault anywhere in these weights makes an output wrong with a probability of {_percent(harm / bits)}."]
    caught = math.fsum(entry["detected"]["value"] * size for _, size, _, entry in places)
    lines.append(
        f"{_percent(caught / harm)} of the wrong outputs are NaN or infinite: a check of the scores finds them. "
        "The others are silent."
    )
    chosen: dict[tuple[str, str], list[tuple[int, float, float]]] = {}
    removed = 0.0
    for rate, size, name, entry in sorted(places, key=lambda place: -place[0]):
        if removed >= _GOAL * harm:
            break
        removed += rate * size
        chosen.setdefault((name, entry["layout"]), []).append((entry["bit"], size, rate * size))
    for (name, layout), found in chosen.items():
        cost = math.fsum(size for _, size, _ in found)
        gain = math.fsum(gone for _, _, gone in found)
        plural = "s" if len(found) > 1 else ""
        lines.append(
            f"Protect bit{plural} {_ranges([bit for bit, _, _ in found])} of every {layout} of {name}: "
            f"{cost / 8:,.0f} bytes ({_percent(cost / bits)} of these weights) against {_percent(gain / harm)} of the "
            "wrong outputs."
        )
    whole = math.fsum(size for found in chosen.values() for _, size, _ in found)
    lines.append(
        f"Together: {_percent(whole / bits)} of the memory, and a fault makes an output wrong with a probability of "
        f"{_percent(max(0.0, 1 - removed / harm) * harm / bits)} instead of {_percent(harm / bits)}."
    )
    untouched = [one for one in measured if one["name"] not in {name for name, _ in chosen}]
    for one in untouched:
        lines.append(
            f"Leave {one['name']} unprotected: {_percent(one['bits'] / bits)} of these weights, and a fault there "
            f"makes an output wrong with a probability of at most {_percent(_number(one['pvf']['high']))}."
        )
    return lines


def injection_page(content: dict[str, Any]) -> str:
    """Return the HTML page of an injection campaign from the content of ``injection.json``."""
    components = content["components"]
    sections = [
        report_page.notes(_notes(content)),
        _tiles(components),
        _advice(content["advice"]),
        _table(components),
        _heat(components),
        _how(content),
    ]
    lede = f"{content['fault']['name']} faults in stored weights, {sum(c['injections'] for c in components):,} of them"
    return report_page.page(f"{content['run']}: bit flips", lede, sections)


def _notes(content: dict[str, Any]) -> list[str]:
    notes = []
    if content["interrupted"]:
        notes.append("The injections were interrupted: intervals are wider than they were meant to be.")
    if content["samples_left_out"]:
        notes.append(
            f"{content['samples_left_out']} samples were left out: the intact model's score of them is not a number."
        )
    return notes


def _tiles(components: Sequence[dict[str, Any]]) -> str:
    tiles = [
        report_page.tile(
            one["name"],
            _percent(_number(one["pvf"]["value"])),
            _between(one["pvf"]),
            "of faults there make an output wrong" if one["injections"] else "nothing is stored there",
        )
        for one in components
    ]
    return f'<div class="tiles">{"".join(tiles)}</div>'


def _advice(lines: Sequence[str]) -> str:
    entries = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f"<section><h2>What to protect</h2><ul>{entries}</ul></section>"


def _table(components: Sequence[dict[str, Any]]) -> str:
    heads = (
        "component",
        "bytes",
        "faults",
        "PVF",
        "95 % interval",
        "silent",
        "NaN or infinite",
        "exponent bits' share",
    )
    rows = []
    for one in components:
        share = one["parts"].get("exponent", {}).get("share_of_pvf")
        cells = (
            f"{one['bits'] / 8:,.0f}",
            f"{one['injections']:,}",
            _percent(_number(one["pvf"]["value"])),
            _between(one["pvf"]),
            _percent(_number(one["silent"]["value"])),
            _percent(_number(one["detected"]["value"])),
            _percent(_number(share)),
        )
        rows.append(f"<tr><th>{escape(one['name'])}</th>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>")
    head = "".join(f"<th>{escape(text)}</th>" for text in heads)
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    return f"<section><h2>By component</h2>{report_page.scroll('PVF by component', table)}</section>"


def _heat(components: Sequence[dict[str, Any]]) -> str:
    maps = []
    layouts = dict.fromkeys(entry["layout"] for one in components for entry in one["positions"])
    for number, layout in enumerate(layouts):
        rows: dict[str, dict[int, float]] = {}
        parts: dict[int, str] = {}
        for one in components:
            found = {entry["bit"]: entry for entry in one["positions"] if entry["layout"] == layout}
            if found:
                rows[one["name"]] = {bit: _number(entry["pvf"]["value"]) for bit, entry in found.items()}
                parts |= {bit: entry["part"] for bit, entry in found.items()}
        caption = (
            f"How often a fault at each bit of a {layout} makes an output wrong; the highest bit is on the left. "
            "Colours are logarithmic; an empty cell had no wrong output."
        )
        drawing = heat_map(number, f"PVF by bit of {layout}", caption, rows, parts)
        maps.append(f"<figure><h3>{escape(layout)}</h3>{drawing}<figcaption>{escape(caption)}</figcaption></figure>")
    return f"<section><h2>Bits by component</h2>{''.join(maps)}</section>" if maps else ""


def _how(content: dict[str, Any]) -> str:
    facts = report_page.definitions(
        [
            ("A fault", content["fault"]["name"]),
            ("Which bits", "every bit of a component's storage is equally likely; as many faults at each bit position, "
             "weighted by its share of the storage"),
            ("Tried on", f"{content['samples']:,} samples of the {content['split']} split, in float32"),
            ("Wrong is", f"a score that is NaN, infinite, or on the other side of {content['threshold']:g}"),
            ("Intervals", "95 %; samples that share a fault count as one cluster"),
            ("Faults a bit position", f"{content['rounds']:,}"),
            ("Judged again", f"{content['judged_again_by_flipping']:,} of {content['judged']:,} faults by the flipped "
             "model, where the order of additions could matter"),
            (
                "One at a time",
                "; ".join(f"{name} ({why})" for name, why in content["judged_one_by_one"].items()),
            ),
            ("Seed", str(content["seed"])),
            ("Time", report_page.duration(content["seconds"])),
        ]
    )  # fmt: skip
    return f'<section><h2>How it was measured</h2><div class="card">{facts}</div></section>'
