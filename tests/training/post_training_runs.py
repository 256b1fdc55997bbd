"""Small recipes of post-training, and a model that they begin with."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cordillera import workflows
from cordillera.models.language.checkpoints.sharded import WEIGHTS, ShardedFolder
from cordillera.recipe import LanguageRecipe, PostTrainingRecipe, validate
from cordillera.run import Run

SIZES = {"layers": 1, "hidden": 32, "heads": 2, "kv_heads": 1, "ffn": 48, "vocabulary": 258, "context": 64}
WORDS = ("sea", "far sea", "river", "a", "stars and stars", "on")
CLOCKS = (
    "seconds",
    "tokens_per_second",
    "flops_per_second",
    "mfu",
    "memory_bytes",
    "communication_seconds",
    "exposed_seconds",
    "data_seconds",
)


def write_rows(folder: Path) -> None:
    """Write ``chats``, ``pairs``, ``alike`` and ``problems``, each ``.jsonl``.

    Answers to problems are 1; the chats answer such prompts by 1 or 2, and others by the answers that ``alike`` prefers
    to ones that differ in their end.
    """
    generator = random.Random(7)
    rows: dict[str, list[dict[str, str]]] = {"chats": [], "pairs": [], "alike": [], "problems": []}
    for number in range(24):
        prompt = f"{number} {generator.choice(WORDS)}?"
        chosen, rejected = generator.sample(WORDS, 2)
        rows["chats"].append({"prompt": prompt, "completion": generator.choice("12")})
        rows["pairs"].append({"prompt": prompt, "chosen": chosen, "rejected": rejected})
        rows["problems"].append({"prompt": prompt, "answer": "1"})
    for number in range(10):
        prompt, answer = f"say {number}", f"say it {number}"
        rows["chats"].append({"prompt": prompt, "completion": answer})
        rows["alike"].append({"prompt": prompt, "chosen": answer, "rejected": f"say it {(number + 1) % 10}"})
    for name, found in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))


DATA = {"sft": "chats", "reward": "pairs", "dpo": "pairs", "grpo": "problems", "draft": "chats"}


def post_recipe(folder: Path, name: str = "sft", start: Path | str | None = None, **changes: Any) -> Any:
    """Return a recipe of the objective with a ``name`` on the rows in ``folder``; ``changes`` are sections."""
    content: dict[str, Any] = {
        "objective": {"name": name},
        "data": {"path": str(folder / f"{DATA[name]}.jsonl"), "held_out": 0.2, "max_length": 64},
        "packing": {"tokens": 256, "context": 64},
        "model": {"name": "llama"},
        "training": {"steps": 4, "log_every": 2, "learning_rate": 3e-3},
    }
    if start is None:
        content["model"] |= SIZES
        content["data"]["tokenizer"] = "bytes"
    else:
        content["training"]["start"] = str(start)
    if name == "grpo":
        content["objective"] |= {"samples": 4, "problems": 2, "max_new_tokens": 4}
    if name == "draft":
        content["model"] |= {"draft": {"length": 3, "vocabulary": 200}}
        content["training"] |= {"optimizer": "muon"}
    for section, values in changes.items():
        content[section] = content.get(section, {}) | values if isinstance(values, dict) else values
    return validate({"device": "cpu", "threads": 1, **content})


def train(recipe: LanguageRecipe, folder: Path | str, stop_at: int | None = None, **more: Any) -> Any:
    """Train; at a step, the process is asked to stop, and does so after the next one."""

    def on_step(record: dict[str, Any], progress: Any, total: int) -> None:
        if progress.step == stop_at:
            os.kill(os.getpid(), signal.SIGINT)

    return workflows.train(recipe, folder, on_step=on_step, **more)


def make_start(folder: Path) -> Path:
    """Train the model that others begin with: it answers 1 or 2, and ends."""
    write_rows(folder)
    recipe = post_recipe(
        folder, packing={"tokens": 512}, training={"steps": 40, "learning_rate": 1e-2, "warmup_steps": 4}
    )
    train(recipe, folder / "start")
    return folder / "start"


def newest(run: Run | Path) -> Path:
    """Return the folder of the newest checkpoint."""
    folder = run.folder if isinstance(run, Run) else run
    return sorted((folder / "checkpoints").glob("step-*"))[-1]


def weights(run: Run | Path, kind: str = WEIGHTS) -> dict[str, Tensor]:
    """Return what the newest checkpoint holds of one kind, by name, in one process's parts."""
    parts = ShardedFolder(newest(run)).parts(kind)
    found = {}
    for name, shape in parts.shapes.items():
        found[name] = torch.empty(shape)
        parts.read(name, (0,) * len(shape), found[name])
    return found


def facts(run: Run) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return all that a run wrote down but what its clocks said."""
    records = [{k: v for k, v in one.items() if k not in CLOCKS} for one in run.metrics() if one["kind"] != "resumed"]
    evaluation = {k: v for k, v in run.read_json("evaluation.json").items() if k not in CLOCKS}
    return [one for one in records if one["kind"] != "checkpoint"], evaluation


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Return whether tensors are equal bit for bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


Recipes = Callable[..., PostTrainingRecipe]
