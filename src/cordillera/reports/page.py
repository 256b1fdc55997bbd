"""Pages from the templates of this package: self-contained HTML files without scripts that load nothing.

Templates escape every value except charts.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from cordillera.errors import printable
from cordillera.numbers import millions, shown
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


def folded(rows: Sequence[tuple[str, ...]], first: int, most: int) -> dict[str, Any]:
    """Return the ``first`` rows, later ones up to ``most`` in all, and the number of those left out."""
    return {"first": rows[:first], "later": rows[first:most], "left_out": max(0, len(rows) - most)}


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
    millions=millions,
    number=lambda value, form=",": format(value, form),
    part=part,
    plain=plain,
    shown=shown,
    seconds=seconds_text,
)
