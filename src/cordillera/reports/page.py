"""Pages from the templates of this package: self-contained HTML files without scripts that load nothing.

Templates escape every value except charts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from cordillera.errors import printable
from cordillera.numbers import shown
from cordillera.reports.charts import seconds_text
from cordillera.run import Run, write_atomically

_TEMPLATES = Environment(
    loader=PackageLoader("cordillera.reports"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)


def fill(template: str, **values: Any) -> str:
    """Return the page of a template: ``name`` stands for ``name.html.jinja``.

    Control characters of names, and marks that change the direction of text, are shown as escapes.
    """
    # number() is unique on the page: charts need ids
    page = _TEMPLATES.get_template(f"{template}.html.jinja").render(number=itertools.count(1).__next__, **values)
    return printable(page, lines=True)


def write(run: Run, text: str) -> Path:
    """Write a run's ``report.html`` and return its path."""
    target = run.folder / "report.html"
    write_atomically(target, text)
    return target


def part(content: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    """Return a nested object of a file's content by its keys, outermost first; empty if there is none."""
    found: Any = content
    for key in keys:
        found = found.get(key) if isinstance(found, Mapping) else None
    return found if isinstance(found, dict) else {}


# Formatting of numbers


def fixed(value: float, digits: int = 4) -> str:
    """Return a number with ``digits`` digits after the point, or a word if it is not finite."""
    if math.isnan(value):
        return "undefined"
    if math.isinf(value):
        return "infinite" if value > 0 else "-infinite"
    text = f"{value:.{digits}f}"
    return text if float(text) else text.lstrip("-")


def known(value: float, form: str) -> str:
    """Return a number in a ``form`` of :meth:`str.format`; empty if it is not finite."""
    return form.format(value) if math.isfinite(value) else ""


def whole(value: float, unknown: str = "unknown") -> str:
    """Return a count with commas; ``unknown`` if it is not finite."""
    return known(value, "{:,.0f}") or unknown


def duration(seconds: float) -> str:
    """Return a time in its two largest units."""
    if not math.isfinite(seconds):
        return "unknown time"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"


def count(value: Any) -> str:
    """Return a ``value`` of a file as text; whole numbers have commas."""
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else plain(value)


def plain(value: Any) -> str:
    """Return a ``value`` of a file as text on one line; empty for None."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        between = "; " if any(isinstance(entry, dict) for entry in value.values()) else ", "
        return between.join(f"{key} {count(entry)}" for key, entry in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(str(entry) for entry in value)
    return f"{value:g}" if isinstance(value, float) else str(value)


_TEMPLATES.filters.update(
    count=count,
    number=lambda value, form=",": format(value, form),
    part=part,
    plain=plain,
    shown=shown,
    seconds=seconds_text,
)
