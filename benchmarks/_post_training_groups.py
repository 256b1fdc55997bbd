"""A small Llama that solves a part of its problems, and goes on by its own right answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from _post_training_language import train_recipe
from rich.console import Console


def groups(console: Console, quick: bool, folder: Path) -> dict[str, Any]:
    """Train ``arithmetic-sft``, then ``arithmetic-grpo`` from it, and return the shares of solved problems."""
    sft = train_recipe("arithmetic-sft", folder, ["training.steps=4"] if quick else [], console)
    start = f"training.start={folder / 'arithmetic-sft'}"
    steps = ["training.steps=2", "data.held_out=0.01"] if quick else []
    grpo = train_recipe("arithmetic-grpo", folder, [*steps, start], console)
    for one in grpo["evaluations"]:
        console.print(f"step {one['step']}: {one['solved']:.1%} of {one['units']} held-out problems solved")
    return {"evidence": "measured", "sft": sft, "grpo": grpo}
