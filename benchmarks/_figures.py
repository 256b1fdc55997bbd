"""Result files for the figures of the documentation, and the form in which figures are written."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
Figures = dict[str, Callable[[], str]]


@lru_cache(maxsize=64)
def results(name: str) -> Any:
    """Return the content of a result file, which must not be of a quick run."""
    path = RESULTS / f"{name}.json"
    found = json.loads(path.read_text(encoding="utf-8"))
    if found["quick"]:
        raise ValueError(f"{path}: was measured with --quick, so its figures mean nothing")
    return found


def is_measured(name: str) -> bool:
    """Return whether there is a result file; until there is, its block says how to make it."""
    return (RESULTS / f"{name}.json").exists()


def processor(name: str) -> str:
    """Return the processor of a result file with its vector instructions."""
    machine = results(name)["machine"]
    return f"{machine['processor']} with {machine['instructions']}"


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [list(headings), ["---"] * len(headings), *map(list, rows)]
    return "\n".join(f"| {' | '.join(cells)} |" if cells[0] else f"| | {' | '.join(cells[1:])} |" for cells in lines)


def spread(times: dict[str, float]) -> tuple[str, str]:
    """Return the cells of a median and of its quartiles."""
    return f"{times['median']:.2f}", f"{times['low']:.2f} to {times['high']:.2f}"


def span(values: Iterable[float], form: str) -> str:
    """Return the least and the largest of some values."""
    found = list(values)
    return f"{min(found):{form}} to {max(found):{form}}"


def percent(share: float, form: str) -> str:
    """Return a share as a percentage, with the space that the documentation puts before the sign."""
    return f"{100 * share:{form}} %"


def listed(names: Sequence[str]) -> str:
    """Return names as an English list."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def judged(values: Iterable[float], least: float) -> str:
    """Return whether values are at least what was asked: ``reached``, ``missed`` or ``reached by 2 of 3``."""
    found = [value >= least for value in values]
    return "reached" if all(found) else f"reached by {sum(found)} of {len(found)}" if any(found) else "missed"


def of_all(true: Sequence[bool], noun: str) -> str:
    """Return ``all 3 cases`` or ``2 of 3 cases``."""
    return f"all {len(true)} {noun}" if all(true) else f"{sum(true)} of {len(true)} {noun}"
