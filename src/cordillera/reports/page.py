"""Parts of the reports of all runs: self-contained HTML pages, and the files that they show.

A page has no scripts and loads nothing. Functions that return HTML escape every string that they are given.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from cordillera.reports.charts import Chart, padded
from cordillera.run import Run, write_atomically

POINTS = 400  # points of a line; more would only make the file larger

# Files


def part(content: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    """Return a nested object of a file's content by its keys, outermost first; empty if there is none."""
    found: Any = content
    for key in keys:
        found = found.get(key) if isinstance(found, Mapping) else None
    return found if isinstance(found, dict) else {}


def write(run: Run, page: str) -> Path:
    """Write a run's ``report.html`` and return its path."""
    target = run.folder / "report.html"
    write_atomically(target, page)
    return target


# Formatting of numbers


def figure(value: float, digits: int = 4) -> str:
    """Return a number with ``digits`` digits after the point, or a word if it is not finite."""
    if math.isnan(value):
        return "undefined"
    return ("infinite" if value > 0 else "-infinite") if math.isinf(value) else f"{value:.{digits}f}"


def whole(value: float, unknown: str = "unknown") -> str:
    """Return a count with commas; ``unknown`` if it is not finite."""
    return f"{value:,.0f}" if math.isfinite(value) else unknown


def duration(seconds: float) -> str:
    """Return a time in its two largest units."""
    if not math.isfinite(seconds):
        return "unknown time"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"


def count(value: Any) -> str:
    """Return a ``value`` of a file as text; whole numbers have commas."""
    return f"{value:,}" if isinstance(value, int) else plain(value)


def plain(value: Any) -> str:
    """Return a ``value`` of a file as text on one line; empty for None."""
    if value is None:
        return ""
    if isinstance(value, dict):
        return ", ".join(f"{key} {count(entry)}" for key, entry in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(str(entry) for entry in value)
    return f"{value:g}" if isinstance(value, float) else str(value)


# Parts of a page


def page(name: str, lede: str, sections: Iterable[str], *styles: str) -> str:
    """Return a whole page.

    Args:
        name: Name of the run.
        lede: Introductory line of text.
        sections: HTML; empty sections are left out.
        *styles: Style sheets of this package in addition to the common one.
    """
    files = resources.files("cordillera.reports")
    style = "".join(files.joinpath(one).read_text(encoding="utf-8") for one in ("report_style.css", *styles))
    body = "\n".join(section for section in sections if section)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="color-scheme" content="light dark">
<title>{escape(name)}: training report</title>
<style>
{style}</style>
</head>
<body>
<header>
<h1>{escape(name)}</h1>
<p class="lede">{escape(lede)}</p>
</header>
<main>
{body}
</main>
<footer>Written by Cordillera from the files of this run.</footer>
</body>
</html>
"""


def tile(name: str, value: str, bounds: str, meaning: str) -> str:
    """Return a headline figure with its ``bounds`` (or related figures) and its ``meaning`` for the reader."""
    return (
        f'<dl class="tile"><dt>{escape(name)}</dt>'
        f'<dd class="value">{escape(value)}</dd><dd class="range">{escape(bounds)}</dd>'
        f'<dd class="small soft">{escape(meaning)}</dd></dl>'
    )


def banner(run: Run) -> str:
    """Return a banner that says that the run is not finished; empty for a finished run."""
    status = run.status()
    text = "" if status is None else status.warning
    return f'<p class="banner" role="alert">{escape(text)}</p>' if text else ""


def notes(texts: Sequence[str]) -> str:
    """Return a list of notes; empty without any."""
    if not texts:
        return ""
    entries = "".join(f"<li>{escape(text)}</li>" for text in texts)
    return f'<ul class="notes" aria-label="Notes">{entries}</ul>'


def definitions(pairs: Iterable[tuple[str, str]]) -> str:
    """Return a list of terms with their texts; terms without a text are left out."""
    rows = "".join(f"<dt>{escape(term)}</dt><dd>{escape(text)}</dd>" for term, text in pairs if text)
    return f"<dl>{rows}</dl>"


def scroll(label: str, table: str) -> str:
    """Return a ``table`` in HTML that scrolls by itself if it is wider than the page, by keyboard as well.

    Args:
        label: Name of the table for screen readers.
        table: HTML.
    """
    return f'<div class="scroll" tabindex="0" role="group" aria-label="{escape(label)}">{table}</div>'


class Pictures:
    """The numbered charts of one page, so that ids in the page differ."""

    def __init__(self) -> None:
        self._drawn = 0

    def draw(self, heading: str, chart: Chart, caption: str, key: str = "") -> str:
        """Return a chart with heading and caption, and a ``key`` in HTML that explains the series."""
        self._drawn += 1
        drawing = chart.svg(self._drawn)
        return f"<figure><h3>{escape(heading)}</h3>{drawing}<figcaption>{escape(caption)}{key}</figcaption></figure>"


def thin(xs: Sequence[float], ys: Sequence[float]) -> tuple[list[float], list[float], int]:
    """Replace neighbouring points by their means, so that a line has at most :data:`POINTS` points.

    NaN in a mean stays NaN.

    Returns:
        X and Y coordinates of the means, and the number of points in each.
    """
    size = -(-len(xs) // POINTS) or 1
    chunks = [(xs[i : i + size], ys[i : i + size]) for i in range(0, len(xs), size)]
    return [sum(a) / len(a) for a, _ in chunks], [sum(b) / len(b) for _, b in chunks], size


def framed(values: Sequence[float]) -> tuple[tuple[float, float], bool]:
    """Return the range of a vertical axis, and whether some values leave it.

    The first losses of an untrained model can dwarf the rest; the range then follows the bulk. Values that are not
    finite do not count.
    """
    finite = sorted(value for value in values if math.isfinite(value))
    bulk = finite[: max(1, int(len(finite) * 0.97))]
    cut = bool(finite) and finite[-1] - bulk[0] > 3 * (bulk[-1] - bulk[0]) > 0
    return padded(bulk if cut else finite), cut


def reproduction(recipe: str, command: str = "cordillera train recipe.toml", about: str = "") -> str:
    """Return the section on how to train the run again; ``about`` is HTML about its machine."""
    return (
        "<section><h2>How to reproduce</h2><p>Save the recipe below as <code>recipe.toml</code>. It is resolved: every "
        f"value that was used stands in it, the seed included.</p><pre>{escape(command)}</pre>{about}"
        f"<details><summary>Resolved recipe</summary><pre>{escape(recipe)}</pre></details></section>"
    )
