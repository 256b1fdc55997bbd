"""Report of an injection: effects of bit flips on a model, and advice on protection."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from cordillera.numbers import duration
from cordillera.reports import page
from cordillera.reports.heat_maps import heat_map
from cordillera.training.ranking.evaluation import number

_FEW = 8  # faults at a bit position, below which their shares are rough
_GOAL = 0.9  # part of the wrong outputs that protection should remove


def _percent(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return "undefined"
    return f"{100 * value:.3g} %" if value else "0 %"


def _between(rate: dict[str, Any]) -> str:
    return f"{_percent(rate['low'])} to {_percent(rate['high'])}"


def _ranges(bits: Sequence[int]) -> str:
    """Format positions in any order, as in ``27 to 30, 31``."""
    texts = []
    for _, run in itertools.groupby(enumerate(sorted(bits)), key=lambda pair: pair[1] - pair[0]):
        group = [bit for _, bit in run]
        texts.append(f"{group[0]} to {group[-1]}" if len(group) > 1 else f"{group[0]}")
    return ", ".join(texts)


def advice(components: Sequence[dict[str, Any]]) -> list[str]:
    """Return sentences on what to protect, and the gain, for faults that hit every bit of the weights alike.

    Bit positions of ``components``, results of ``Vulnerability.to_json``, are protected in descending order of their
    rate until nine of ten wrong outputs are removed.
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
        most = max(number(one["pvf"]["high"]) for one in measured)
        return [f"No fault made an output wrong. At 95 % confidence the PVF is below {_percent(most)} everywhere."]
    lines = [
        f"A fault anywhere in these weights makes an output wrong with a probability of {_percent(harm / bits)}: "
        "their PVF (parameter vulnerability factor)."
    ]
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
            f"costs {cost / 8:,.0f} bytes ({_percent(cost / bits)} of these weights) and removes "
            f"{_percent(gain / harm)} of the wrong outputs."
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
            f"makes an output wrong with a probability of at most {_percent(one['pvf']['high'])}."
        )
    fewest = min(entry["injections"] for *_, entry in places)
    if fewest < _FEW:
        lines.append(f"Some bit positions were hit {fewest} times only, so that all of this is rough: inject more.")
    return lines


def injection_page(content: dict[str, Any]) -> str:
    """Return the HTML page of an injection campaign from the content of ``injection.json``."""
    components = content["components"]
    return page.fill(
        "injection",
        name=f"{content['run']}: bit flips",
        content=content,
        tried=sum(one["injections"] for one in components),
        components=[(one, _row(one)) for one in components],
        maps=_maps(components),
        seconds=duration(content["seconds"]),
    )


def _row(one: dict[str, Any]) -> tuple[str, ...]:
    return (
        one["name"],
        f"{one['bits'] / 8:,.0f}",
        f"{one['injections']:,}",
        _percent(one["pvf"]["value"]),
        _between(one["pvf"]),
        _percent(one["silent"]["value"]),
        _percent(one["detected"]["value"]),
        _percent(one["parts"].get("exponent", {}).get("share_of_pvf")),
    )


def _maps(components: Sequence[dict[str, Any]]) -> list[tuple[str, str, Markup]]:
    """Return names of layouts of bits, captions, and drawings of the rates of each component's bits."""
    maps = []
    for layout in dict.fromkeys(entry["layout"] for one in components for entry in one["positions"]):
        rows: dict[str, dict[int, float]] = {}
        parts: dict[int, str] = {}
        for one in components:
            found = {entry["bit"]: entry for entry in one["positions"] if entry["layout"] == layout}
            if found:
                rows[one["name"]] = {bit: number(entry["pvf"]["value"]) for bit, entry in found.items()}
                parts |= {bit: entry["part"] for bit, entry in found.items()}
        caption = (
            f"How often a fault at each bit of a {layout} makes an output wrong; the highest bit is on the left. "
            "Colours are logarithmic; an empty cell had no wrong output."
        )
        maps.append((layout, caption, heat_map(f"PVF by bit of {layout}. {caption}", rows, parts)))
    return maps
