"""``cordillera bench ncclx``: what NCCLX's tools for large jobs find, on simulated incidents."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import typer
from _blame_study import study
from _program import Program
from rich.console import Console


class Part(str, enum.Enum):
    """What is measured."""

    blame = "blame"


PARTS: dict[Part, Callable[[Console, bool], dict[str, Any]]] = {Part.blame: study}

main = Program(
    "ncclx",
    PARTS,
    "Let the analysis of traces find who is to blame for simulated hangs, beside torch's own analysis.",
).command()


if __name__ == "__main__":
    typer.run(main)
