"""Run folders as training leaves them, made without training."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cordillera.data.ranking.features import RankingBatch
from cordillera.jagged import JaggedBatch
from cordillera.run import Run
from cordillera.training.ranking.evaluation import Evaluation, evaluate

RECIPE = """name = "{name}"
description = "{description}"
seed = {seed}
device = "auto"

[data]
dataset = "movielens-100k"
split = "time"
batch_size = 1024

[model]
name = "{model}"
layers = 2

[tables]
optimizer = "rowwise_adagrad"

[training]
epochs = 8
precision = "fp32"
patience = 2
"""


def no_sparse() -> JaggedBatch:
    return JaggedBatch((), torch.empty(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))


def click_data(seed: int, examples: int, tasks: int, skill: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Logits ``[N, tasks]`` and labels drawn from ``skill`` of them."""
    random = np.random.default_rng(seed)
    logits = random.normal(-1.0, 1.1, size=(examples, tasks))
    labels = random.random(logits.shape) < 1 / (1 + np.exp(-skill * logits + 0.2))
    return logits.astype(np.float32), labels.astype(np.float32)


def batches(
    logits: np.ndarray, labels: np.ndarray, size: int = 512, groups: np.ndarray | None = None
) -> Iterator[RankingBatch]:
    """Batches whose dense columns are their logits."""
    for start in range(0, len(logits), size):
        part = slice(start, start + size)
        yield RankingBatch(
            dense=torch.from_numpy(logits[part]),
            sparse=no_sparse(),
            labels=torch.from_numpy(labels[part]),
            groups=None if groups is None else torch.from_numpy(groups[part]),
        )


def make_evaluation(
    tasks: Sequence[str] = ("click",), seed: int = 0, examples: int = 4000, skill: float = 1.0, users: int = 150
) -> Evaluation:
    logits, labels = click_data(seed, examples, len(tasks), skill)
    random = np.random.default_rng(seed + 1)
    ages = ["18-24", "25-34", "35-44", "45-49", "50-55", "56+", "under 18"]
    codes = random.choice(len(ages), size=examples, p=[0.25, 0.3, 0.2, 0.1, 0.08, 0.06, 0.01])
    genres = [f"genre {index}" for index in range(18)]
    return evaluate(
        lambda batch: batch.dense,
        batches(logits, labels, groups=random.integers(0, users, examples)),
        tasks,
        segments={"age": (codes, ages), "genre": (random.integers(0, 18, examples), genres)},
    )


def make_run(
    folder: Path,
    tasks: Sequence[str] = ("click",),
    *,
    seed: int = 0,
    model: str = "wukong",
    skill: float = 1.0,
    description: str = "Two layers on a laptop",
    steps: int = 600,
    evaluation: Evaluation | None = None,
    flops: int = 1_200_000,
) -> Run:
    """A finished run of 600 steps and 8 validations, of which the sixth was best."""
    folder.mkdir(parents=True)
    recipe = RECIPE.format(name=folder.name, description=description, seed=seed, model=model)
    (folder / "recipe.toml").write_text(recipe)
    random = np.random.default_rng(seed)
    lines: list[dict[str, Any]] = []
    for step in range(5, steps + 1, 5):
        loss = 0.55 + 0.25 * math.exp(-step / 60) - 0.00005 * step + random.normal(0, 0.008)
        speed = 61_000 + random.normal(0, 2500) - (20_000 if step < 15 else 0)
        lines.append(
            {
                "kind": "train",
                "step": step,
                "epoch": step * 8 // steps,
                "examples": step * 1024,
                "loss": loss,
                "gradient_norm": 0.4,
                "learning_rate": 1e-3,
                "examples_per_second": speed,
                "data_fraction": max(0.0, random.normal(0.04, 0.01)),
                "seconds": 5 * 1024 / speed,
            }
        )
        if step % (steps // 8) == 0:
            round_ = step * 8 // steps
            values = {
                task: {"ne": 0.93 - 0.02 * round_ + 0.0018 * round_**2 + 0.01 * t, "auc": 0.68 + 0.005 * round_}
                for t, task in enumerate(tasks)
            }
            lines.append(
                {
                    "kind": "evaluation",
                    "split": "validation",
                    "step": step,
                    "epoch": round_,
                    "examples": step * 1024,
                    "tasks": values,
                    "seconds": 0.3,
                }
            )
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    evaluation = evaluation or make_evaluation(tasks, seed=seed, skill=skill)
    (folder / "evaluation.json").write_text(evaluation.to_json())
    card = {
        "name": model,
        "config": {"name": model, "layers": 2, "embedding_dim": 16, "mlp": [256, 256]},
        "parameters": 412_345,
        "embedding_parameters": 61_824,
        "forward_macs": flops // 6,
        "forward_flops": flops // 3,
        "training_flops": flops,
        "tables": {"user_id": 944, "item_id": 1683, "genre": 19},
        "tasks": list(tasks),
        "dense_features": ["age"],
        "sparse_features": ["user_id", "item_id", "history"],
        "data": {
            "fingerprint": "3f1a9c0be2d4",
            "examples": {"train": 80_000, "validation": 10_000, "test": 10_000},
            "facts": {
                "name": "MovieLens-100K",
                "source": "GroupLens Research, University of Minnesota",
                "terms": "For research; no redistribution without permission; cite Harper and Konstan 2015.",
                "positives": {"train": dict.fromkeys(tasks, 0.554), "test": dict.fromkeys(tasks, 0.5312)},
                "warnings": ["312 of 10,000 test rows have items that were never seen in training."],
            },
        },
    }
    (folder / "model.json").write_text(json.dumps(card))
    environment = {
        "python": "3.11.7",
        "platform": "Linux-6.1-x86_64",
        "processor": "AMD EPYC",
        "cores": 2,
        "libraries": {"torch": "2.13.0+cpu", "numpy": "2.4.6", "fbgemm-gpu-cpu": "1.8.0"},
    }
    (folder / "environment.json").write_text(json.dumps(environment))
    return Run(folder)
