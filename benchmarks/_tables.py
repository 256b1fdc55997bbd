"""Tables for readers: ratios first, peers side by side."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table


def _verdict(value: float, target: float | None) -> str:
    if target is None:
        return ""
    return f"{target:g} {'reached' if value >= target else '[bold red]missed[/]'}"


def print_ratios(console: Console, title: str, figures: dict[str, Any]) -> None:
    """Print the ratios of ``Figures.to_json`` in a table with a title, then its rates, then its notes."""
    if figures["ratios"]:
        table = Table(title=f"{title} (measured)", title_justify="left")
        for heading, side in (
            ("case", "left"),
            ("ours", "left"),
            ("beside", "left"),
            ("times as fast", "right"),
            ("quartiles", "right"),
            ("at least", "left"),
        ):
            table.add_column(heading, justify=side)  # type: ignore[arg-type]
        for ratio in figures["ratios"]:
            times = ratio["times"]
            table.add_row(
                ratio["case"],
                ratio["ours"],
                ratio["peer"],
                f"{times['median']:.2f}",
                f"{times['low']:.2f} to {times['high']:.2f}",
                _verdict(times["median"], ratio["target"]),
            )
        console.print(table)
    if figures["rates"]:
        table = Table(title="rates (measured)", title_justify="left")
        table.add_column("case")
        table.add_column("contender")
        table.add_column("median", justify="right")
        table.add_column("quartiles", justify="right")
        for entry in figures["rates"]:
            rate = entry["rate"]
            table.add_row(
                entry["case"],
                entry["name"],
                f"{rate['median']:,.0f} {entry['unit']}",
                f"{rate['low']:,.0f} to {rate['high']:,.0f}",
            )
        console.print(table)
    print_notes(console, figures["notes"])


def print_rows(
    console: Console, title: str, headings: list[str], rows: list[list[str]], evidence: str = "measured"
) -> None:
    """Print a table of text cells, with the first two columns left-aligned and the others right-aligned."""
    table = Table(title=f"{title} ({evidence})", title_justify="left")
    for i, heading in enumerate(headings):
        table.add_column(heading, justify="left" if i < 2 else "right")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def print_notes(console: Console, notes: list[str]) -> None:
    """Print notes for the reader, one per line."""
    for note in notes:
        console.print(f"  {note}", markup=False)
