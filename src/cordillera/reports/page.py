"""What the reports of all runs are made of: one HTML page that needs nothing else, its parts, and the files they show.

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

POINTS = 400  # of a line; more would only make the file larger

# Files


def part(content: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    """Nested object within the content of a file; empty if there is none.

    Args:
        content: Content of the file.
        *keys: Keys from the outermost object to the nested one.
    """
    found: Any = content
    for key in keys:
        found = found.get(key) if isinstance(found, Mapping) else None
    return found if isinstance(found, dict) else {}


def write(run: Run, page: str) -> Path:
    """Write a run's ``report.html``.

    Args:
        run: The run.
        page: HTML.

    Returns:
        The file's path.
    """
    target = run.folder / "report.html"
    write_atomically(target, page)
    return target


# Texts of numbers


def figure(value: float, digits: int = 4) -> str:
    """A number in words if it is not finite, else with so many ``digits`` after the point.

    Args:
        value: The number.
        digits: After the point.
    """
    if math.isnan(value):
        return "undefined"
    return ("infinite" if value > 0 else "-infinite") if math.isinf(value) else f"{value:.{digits}f}"


def whole(value: float, unknown: str = "unknown") -> str:
    """A count with commas.

    Args:
        value: The count.
        unknown: What stands for one that is not finite.
    """
    return f"{value:,.0f}" if math.isfinite(value) else unknown


def duration(seconds: float) -> str:
    """A time in its two largest units.

    Args:
        seconds: The time.
    """
    if not math.isfinite(seconds):
        return "unknown time"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"


def count(value: Any) -> str:
    """A ``value`` of a file as text; whole numbers with commas."""
    return f"{value:,}" if isinstance(value, int) else plain(value)


def plain(value: Any) -> str:
    """A ``value`` of a file as text on one line; nothing for None."""
    if value is None:
        return ""
    if isinstance(value, dict):
        return ", ".join(f"{key} {count(entry)}" for key, entry in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(str(entry) for entry in value)
    return f"{value:g}" if isinstance(value, float) else str(value)


# Parts of a page


def page(name: str, lede: str, sections: Iterable[str], *styles: str) -> str:
    """A whole page.

    Args:
        name: Name of the run.
        lede: One line about it.
        sections: HTML; empty ones are left out.
        *styles: Style sheets of this package that are used beside the reports' own.
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
    """A headline figure.

    Args:
        name: What it is.
        value: The figure.
        bounds: What stands right below it: an interval, or figures that belong to it.
        meaning: How to read it.
    """
    return (
        f'<dl class="tile"><dt>{escape(name)}</dt>'
        f'<dd class="value">{escape(value)}</dd><dd class="range">{escape(bounds)}</dd>'
        f'<dd class="small soft">{escape(meaning)}</dd></dl>'
    )


def banner(run: Run) -> str:
    """Banner that says at the top of a report that the run is not finished; empty for a finished run.

    Args:
        run: The run.
    """
    status = run.status()
    text = "" if status is None else status.warning
    return f'<p class="banner" role="alert">{escape(text)}</p>' if text else ""


def notes(texts: Sequence[str]) -> str:
    """What a reader must know first, one note a text.

    Args:
        texts: The notes.
    """
    if not texts:
        return ""
    entries = "".join(f"<li>{escape(text)}</li>" for text in texts)
    return f'<ul class="notes" aria-label="Notes">{entries}</ul>'


def definitions(pairs: Iterable[tuple[str, str]]) -> str:
    """Terms and what they are.

    Args:
        pairs: Term and text; those without a text are left out.
    """
    rows = "".join(f"<dt>{escape(term)}</dt><dd>{escape(text)}</dd>" for term, text in pairs if text)
    return f"<dl>{rows}</dl>"


def scroll(label: str, table: str) -> str:
    """A table that scrolls by itself where it is wider than the page, by keyboard as well.

    Args:
        label: What it is, for those who cannot see it.
        table: HTML.
    """
    return f'<div class="scroll" tabindex="0" role="group" aria-label="{escape(label)}">{table}</div>'


class Pictures:
    """The charts of one page, numbered: ids in a page differ."""

    def __init__(self) -> None:
        self._drawn = 0

    def draw(self, heading: str, chart: Chart, caption: str, key: str = "") -> str:
        """A chart with heading and caption.

        Args:
            heading: Above it.
            chart: The drawing.
            caption: Below it.
            key: HTML after the caption: which series is what.
        """
        self._drawn += 1
        drawing = chart.svg(self._drawn)
        return f"<figure><h3>{escape(heading)}</h3>{drawing}<figcaption>{escape(caption)}{key}</figcaption></figure>"


def thin(xs: Sequence[float], ys: Sequence[float]) -> tuple[list[float], list[float], int]:
    """Means of so many neighbours that a line has at most a few hundred points; NaN in a mean stays NaN.

    Args:
        xs: X coordinates of the points.
        ys: Likewise.

    Returns:
        The means' coordinates, and of how many points each is.
    """
    size = -(-len(xs) // POINTS) or 1
    chunks = [(xs[i : i + size], ys[i : i + size]) for i in range(0, len(xs), size)]
    return [sum(a) / len(a) for a, _ in chunks], [sum(b) / len(b) for _, b in chunks], size


def framed(values: Sequence[float]) -> tuple[tuple[float, float], bool]:
    """The range of a vertical axis, and whether some values leave it.

    The first losses of an untrained model can dwarf the rest; the frame then follows the bulk.

    Args:
        values: To be drawn; those that are not finite do not count.
    """
    finite = sorted(value for value in values if math.isfinite(value))
    bulk = finite[: max(1, int(len(finite) * 0.97))]
    cut = bool(finite) and finite[-1] - bulk[0] > 3 * (bulk[-1] - bulk[0]) > 0
    return padded(bulk if cut else finite), cut


def reproduction(recipe: str, command: str = "cordillera train recipe.toml", about: str = "") -> str:
    """How to train the same again.

    Args:
        recipe: Resolved, as TOML.
        command: Command that trains it.
        about: HTML on where it was trained.
    """
    return (
        "<section><h2>How to reproduce</h2><p>Save the recipe below as <code>recipe.toml</code>. It is resolved: every "
        f"value that was used stands in it, the seed included.</p><pre>{escape(command)}</pre>{about}"
        f"<details><summary>Resolved recipe</summary><pre>{escape(recipe)}</pre></details></section>"
    )
