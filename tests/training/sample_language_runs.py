"""Folders of language runs as training leaves them, made without training."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from cordillera.distributed.mesh import ParallelConfig
from cordillera.run import Run

RECIPE = """name = "{name}"
description = "Long documents on four processes"
seed = 0

[model]
name = "llama"

[training]
steps = {steps}
clip = 1.0
precision = "bf16"

[parallel]
shard = 2
context = 2
"""

Record = dict[str, Any]


def make_records(steps: int, every: int = 10, seed: int = 0) -> list[Record]:
    """Training, a validation, a checkpoint every tenth of it, two skipped steps and a resumption."""
    random = np.random.default_rng(seed)
    records: list[Record] = []
    skipped = 0
    for step in range(every, steps + 1, every):
        tokens = step * 131_072
        loss = 1.9 + 8.6 * (1 + step / (0.002 * steps)) ** -0.55
        if step == steps // (2 * every) * every:
            for broken in (step - 3, step - 2):
                skipped += 1
                records.append(
                    {"kind": "skipped", "step": broken, "tokens": tokens, "loss": None, "gradient_norm": None}
                )
        speed = 48_000 + random.normal(0, 900) - (9000 if step <= 2 * every else 0)
        seconds = every * 131_072 / speed
        records.append(
            {
                "kind": "train",
                "step": step,
                "tokens": tokens,
                "documents": step * 61,
                "loss": loss + random.normal(0, 0.02),
                "gradient_norm": 0.35 + 6 * math.exp(-step / (0.02 * steps)) + abs(random.normal(0, 0.05)),
                "learning_rate": 3e-4
                * min(1.0, step / (0.05 * steps))
                * (0.55 + 0.45 * math.cos(math.pi * step / steps)),
                "targets": every * 131_000,
                "skipped": skipped,
                "seconds": seconds,
                "steps": every,
                "tokens_per_second": speed,
                "flops_per_second": speed * 8.4e8,
                "mfu": speed * 8.4e8 / 1e14,
                "imbalance": 1.03 + abs(random.normal(0, 0.015)),
                "delay": 0.5 + random.normal(0, 0.03),
                "memory_bytes": int(6.1e9 + 4e7 * random.random()),
                "communication_seconds": 0.21 * seconds,
                "exposed_seconds": 0.06 * seconds,
                "data_seconds": 0.011 * seconds,
            }
        )
        if step % (steps // 10) == 0:
            place = {"step": step, "tokens": tokens}
            records.append({"kind": "checkpoint", "step": step, "seconds": 1.4, "bytes": 1_620_000_000})
            records.append({"kind": "evaluation", "split": "validation", **place, **make_evaluation(loss + 0.06)})
        if step == steps * 7 // 10:
            records.append({"kind": "resumed", "step": step, "world": 4})
    return records


def make_evaluation(loss: float) -> Record:
    return {
        "loss": loss,
        "perplexity": math.exp(loss),
        "bits_per_byte": loss / math.log(2) / 4.4,
        "targets": 1_048_576,
        "seconds": 21.0,
    }


def make_model(**sizes: int) -> Record:
    mesh = ParallelConfig(**(sizes or {"shard": 2, "context": 2}))
    return {
        "name": "llama",
        "config": {
            "name": "llama", "layers": 30, "hidden": 576, "heads": 9, "kv_heads": 3, "head_dim": None, "ffn": 1536,
            "vocabulary": 49_152, "context": 8192, "tied": True, "norm_eps": 1e-5, "rope_theta": 1e5,
            "rope_scaling": None,
        },
        "parameters": 134_515_008,
        "flops_per_token": 807_090_048,
        "mesh": mesh.model_dump(mode="json"),
        "world": mesh.world,
        "data": {
            "label": "letters",
            "tokenizer": {"name": "smollm2", "fingerprint": "3f1a9c0be2d4", "vocab_size": 49_152},
            "sources": [
                {
                    "path": "letters/*.txt",
                    "folder": "/cache/letters", "documents": 411_833, "tokens": 1_712_345_678,
                    "report": {"documents": 420_000, "kept": 412_345, "dropped": {"empty": 7655, "near_duplicate": 0}},
                },
            ],
            "weights": None,
            "held_out": [{"documents": 512, "tokens": 1_049_088}],
        },
    }  # fmt: skip


def write_records(run: Run, records: list[Record]) -> None:
    """Write records as a run does, but quickly: what is not finite is null."""
    plain = ({k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in r.items()} for r in records)
    (run.folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in plain))
    if (status := run.status()) is not None:
        run.write_status(status.ended, status.step, status.steps)


def make_language_run(folder: Path, steps: int = 1000, records: list[Record] | None = None) -> Run:
    """A finished run."""
    folder.mkdir(parents=True)
    (folder / "recipe.toml").write_text(RECIPE.format(name=folder.name, steps=steps))
    run = Run(folder)
    records = make_records(steps) if records is None else records
    write_records(run, records)
    final = {"kind": "language", "split": "validation", "step": steps, "tokens": steps * 131_072}
    run.write_json("evaluation.json", final | make_evaluation(1.9 + 0.36))
    run.write_json("model.json", make_model())
    environment = {
        "python": "3.11.7",
        "platform": "Linux-6.1-x86_64",
        "processor": "AMD EPYC",
        "cores": 64,
        "libraries": {"torch": "2.13.0+cpu", "numpy": "2.4.6"},
    }
    run.write_json("environment.json", environment)
    run.write_status("finished", steps, steps)
    return run
