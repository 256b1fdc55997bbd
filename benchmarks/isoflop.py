"""Scaling laws of tiny language models, by ``cordillera isoflop``: ``cordillera bench isoflop``."""

from __future__ import annotations

import enum
import json
from pathlib import Path
from typing import Any

import typer
from _program import Program
from rich.console import Console

from cordillera import workflows

BUDGETS, TOKENS_PER_PARAMETER = (1e11, 3e11, 1e12), 80.0
FEW = (2e9, 6e9, 2e10)
CHANGES = (
    "threads=1",
    "packing.tokens=2048",
    "packing.context=256",
    "training.precision=fp32",
    "training.evaluate_every=none",
)
QUICK = ("packing.tokens=512", "packing.context=128", "training.evaluation_tokens=512")


class Part(str, enum.Enum):
    """Parts of the benchmark."""

    tiny = "tiny"


def _tiny(console: Console, quick: bool, folder: Path) -> dict[str, Any]:
    """Train ``llama-debug`` in several sizes for each of three budgets, and fit the best split."""
    outcome = workflows.isoflop(
        "llama-debug",
        FEW if quick else BUDGETS,
        sizes=3 if quick else 6,
        tokens_per_parameter=TOKENS_PER_PARAMETER,
        overrides=(*CHANGES, *(QUICK if quick else ())),
        folder=folder / "isoflop",
        say=console.print,
    )
    console.print(outcome.study.to_table())
    console.print(outcome.study.summary)
    return {"evidence": "measured", "changes": CHANGES, "study": json.loads(outcome.study.to_json())}


main = Program(
    "isoflop",
    {Part.tiny: _tiny},
    "Fit the best split of compute into parameters and tokens, on tiny models: an hour on a core.",
).command()


if __name__ == "__main__":
    typer.run(main)
