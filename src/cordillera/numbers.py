"""Formatting of numbers."""

from __future__ import annotations

import math


def compact(value: float) -> str:
    """Format a count for an axis or a card: ``950``, ``12.3k``, ``4M``, ``1.7G``, ``2e19``."""
    if not math.isfinite(value):
        return "n/a"
    if abs(value) >= 999.5e12:
        return f"{value:.3g}".replace("e+", "e")
    for limit, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit * 0.9995:
            return f"{float(f'{value / limit:.3g}'):g}{suffix}"
    return f"{float(f'{value:.3g}'):g}"


def counted(count: int, noun: str) -> str:
    """Return a count with its noun, given in the singular: ``1 step``, ``1,200 steps``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def shown(value: float, decimals: int) -> str:
    """Return a number with ``decimals`` decimals, or with two significant digits if it is smaller than they show."""
    return f"{value:.{decimals}f}" if value == 0 or abs(value) >= 10**-decimals else f"{value:.2g}"


def millions(value: float) -> str:
    """Return a rate as text, in millions if it is that large."""
    return f"{value / 1e6:.2f} M" if value >= 1e6 else f"{value:,.0f}"


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


def in_gigabytes(size: float) -> str:
    """Return a number of bytes in GB, without the unit: ``2,414``, or with three digits below a hundred: ``75.4``."""
    return f"{size / 1e9:,.0f}" if size >= 100e9 else f"{size / 1e9:.3g}"


def size_text(size: float) -> str:
    """Return a number of bytes in the largest unit that it fills: ``999 B``, ``1.54 kB``, ``2.5 MB``, ``4 GB``."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= 0.9995 * scale:
            return f"{size / scale:.3g} {unit}"
    return f"{size:.0f} B"
