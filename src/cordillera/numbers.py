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
    """Return a count with its noun, of which ``noun`` is the singular: ``1 step``, ``1,200 steps``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def shown(value: float, decimals: int) -> str:
    """Return a number with so many ``decimals``, or with two digits where these would show less than one."""
    return f"{value:.{decimals}f}" if value == 0 or abs(value) >= 10**-decimals else f"{value:.2g}"
