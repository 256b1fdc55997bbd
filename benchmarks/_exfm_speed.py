"""A step of training a student with a teacher's scores, beside one without."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from _ranking_batches import criteo_batches, criteo_features
from _tables import print_notes, print_rows
from _timing import interleave, times_faster
from rich.console import Console

from cordillera.data.ranking.features import RankingBatch
from cordillera.embeddings.tables import TablesConfig
from cordillera.models.ranking import MODELS, build
from cordillera.run import Run
from cordillera.training.ranking.config import LogWindow, TrainingConfig
from cordillera.training.ranking.trainer import Trainer

BATCH, ROWS = 1024, 10_000
ROUNDS, CALLS = 31, 4
MODELS_TIMED: dict[str, dict[str, Any]] = {
    "dnn": {"embedding_dim": 16, "mlp": (512, 256)},
    "dcn": {"embedding_dim": 16, "mlp": (512, 256)},
    "wukong": {"embedding_dim": 32},
}
KINDS: dict[str, dict[str, Any]] = {
    "no teacher": {"head": "none"},
    "serving heads": {"head": "serving"},
    "auxiliary heads": {"head": "auxiliary"},
    "auxiliary heads, adapter": {"head": "auxiliary", "adapter": True},
}


class _Batches:
    """A loader that is never asked."""

    def __len__(self) -> int:
        return 1

    def epoch(self, epoch: int = 0, start: int = 0) -> Iterator[RankingBatch]:
        yield from ()


def _steps(model: str, folder: Path) -> dict[str, Callable[[], object]]:
    """Return whole steps by kind of teacher; each has a model of its own."""
    features = criteo_features(ROWS)
    draw = torch.Generator().manual_seed(2)
    batches = [
        replace(batch, teacher=torch.randn(BATCH, 1, generator=draw)) for batch in criteo_batches(features, 8, BATCH)
    ]

    def step_of(kind: str, teacher: dict[str, Any]) -> Callable[[], object]:
        torch.manual_seed(1)
        network = build(MODELS[model].Config(**MODELS_TIMED[model]), features, TablesConfig())
        trainer = Trainer(
            TrainingConfig.model_validate({"precision": "fp32", "log_every": 10**9, "teacher": teacher}),
            network,
            _Batches(),  # type: ignore[arg-type]
            None,
            Run.create(folder / f"{model}-{kind}", "name = 'speed'\n"),
            tasks=features.tasks,
            device=torch.device("cpu"),
        )
        network.train()
        following, window = cycle(batches), LogWindow()

        def step() -> None:
            batch = next(following)
            trainer._step(batch, (batch,), window)

        return step

    return {kind: step_of(kind, teacher) for kind, teacher in KINDS.items()}


def speed(console: Console, quick: bool) -> dict[str, Any]:
    """Time whole steps in turn."""
    results, rows = [], []
    for model in list(MODELS_TIMED)[:1] if quick else MODELS_TIMED:
        rounds, calls = (2, 1) if quick else (ROUNDS, CALLS)
        with tempfile.TemporaryDirectory() as folder:
            timings = interleave(_steps(model, Path(folder)), rounds=rounds, calls=calls, warmup=2)
        plain = timings["no teacher"]
        for kind, timing in timings.items():
            ratio = times_faster(plain, timing)
            results.append({"model": model, "kind": kind, "over plain": ratio.to_json(), **timing.to_json()})
            cells = [
                f"{1e3 * timing.spread.median:.1f} ms",
                f"{ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f})",
            ]
            rows.append([model, kind, *cells])
    print_rows(console, "a step of a student", ["model", "teacher", "time", "times without"], rows, "measured")
    notes = [f"batch {BATCH}, 26 tables of {ROWS:,} rows, float32; forward, backward and update"]
    print_notes(console, notes)
    return {"evidence": "measured", "results": results, "notes": notes}
