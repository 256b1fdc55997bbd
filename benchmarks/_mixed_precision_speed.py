"""Memory saved and time spent by table rows in few bits, compared with float32 rows and FBGEMM."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from _peers import PeerUnavailable
from _ranking_batches import criteo_batches, criteo_features
from _ranking_peers import fbgemm_update
from _ranking_speed import SMALLEST_JUDGED, Figures, Ratio, _cycle
from _timing import interleave, times_faster
from torch import Tensor

from cordillera.data.ranking.features import FeatureSpec
from cordillera.embeddings.cached_tables import CachedEmbeddingTables, make_tables
from cordillera.embeddings.tables import EmbeddingTables, TablesConfig
from cordillera.kernels.embeddings.update import available_backends
from cordillera.kernels.host_memory import keep_freed_memory
from cordillera.models.ranking import build
from cordillera.models.ranking.dlrm import DLRMConfig
from cordillera.training.optimizers import build_adamw
from cordillera.training.ranking.config import TrainingConfig
from cordillera.training.ranking.scoring import autocast
from cordillera.training.ranking.tasks.losses import weighted_loss

EMBEDDING_DIM = 64
BATCH_SIZE = 4096
RATE = 0.01
LEAST_SPEED = 0.4
MOST_MEMORY = 0.35
INT8, INT4, INT8_ALONE = "int8 + 5% cache", "int4 + 1% cache", "int8, no cache"
FBGEMM, NUMBA, MODULE = "fp32 (fbgemm)", "fp32 (numba)", "FBGEMM module, fp32"
DLRM_SIZES = DLRMConfig(embedding_dim=EMBEDDING_DIM, bottom_mlp=(512, 256, 64), top_mlp=(512, 256))
OURS: dict[str, dict[str, Any]] = {
    INT8: {"rows": "int8", "cache": 0.05},
    "int8 + 5% cache, lru": {"rows": "int8", "cache": 0.05, "cache_policy": "lru"},
    INT4: {"rows": "int4", "cache": 0.01},
    INT8_ALONE: {"rows": "int8"},
}


def _tables(features: FeatureSpec, **options: Any) -> EmbeddingTables:
    config = TablesConfig.model_validate({"learning_rate": RATE, **options})
    return make_tables(features, EMBEDDING_DIM, config, generator=torch.Generator().manual_seed(0))


def _update_of(tables: EmbeddingTables) -> Callable[[Any, Tensor], Tensor]:
    def update(sparse: Any, gradient: Tensor) -> Tensor:
        out = tables(sparse)
        out.backward(gradient)
        tables.update()
        return out.detach()

    return update


def measure_memory(rows: int) -> dict[str, Any]:
    """Compare the bytes of 26 tables, with optimizer state and everything else, with those of float32 rows.

    The sum over parts must equal the storage that the module holds.
    """
    features = criteo_features(rows)
    entries = []
    for optimizer in ("sgd", "rowwise_adagrad", "adagrad", "adam"):
        whole = sum(_tables(features, name=optimizer).memory_bytes().values())
        for name, options in OURS.items():
            tables = _tables(features, name=optimizer, **options)
            parts = tables.memory_bytes()
            held = sum(
                tensor.untyped_storage().nbytes()
                for key, tensor in tables.state_dict().items()
                if key not in ("_seed", "_extra_state")
            )
            if sum(parts.values()) != held:
                raise RuntimeError(f"{name}: {sum(parts.values())} bytes are counted, {held} are held")
            judged = name.startswith(INT8) and optimizer in ("sgd", "rowwise_adagrad")
            entries.append(
                {
                    "optimizer": optimizer,
                    "rows": name,
                    "bytes": held,
                    "parts": parts,
                    "fp32_bytes": whole,
                    "share": held / whole,
                    "times_smaller": whole / held,
                    "target_at_most": MOST_MEMORY if judged else None,
                }
            )
            del tables
            gc.collect()
    return {
        "evidence": "measured",
        "conditions": {"tables": 26, "rows": rows, "embedding_dim": EMBEDDING_DIM},
        "results": entries,
        "notes": ["fp32 rows and rows in few bits both count their optimizer's state, in float32"],
    }


def measure_updates(rows: list[int], rounds: int, calls: int) -> Figures:
    """Measure forward, backward and update of 26 tables with row-wise Adagrad; a value is the mean of ``calls``
    updates.
    """
    figures = Figures(
        {
            "tables": 26,
            "embedding_dim": EMBEDDING_DIM,
            "batch_size": BATCH_SIZE,
            "ids": "Zipf 1.05, one a bag",
            "optimizer": "row-wise Adagrad",
            "rounds": rounds,
            "calls_a_round": calls,
        }
    )
    for size in rows:
        case = f"tables alone, {size:,} rows"
        features = criteo_features(size)
        batches = criteo_batches(features, 8, BATCH_SIZE)
        gradients = [torch.randn(BATCH_SIZE, 26, EMBEDDING_DIM) * 1e-3 for _ in batches]
        ours = {name: _tables(features, **options) for name, options in OURS.items()}
        ours |= {f"fp32 ({name})": _tables(features, backend=name) for name in _backends(figures)}
        updates: dict[str, Callable[[Any, Tensor], Tensor]] = {name: _update_of(t) for name, t in ours.items()}
        try:
            updates[MODULE] = fbgemm_update(features, EMBEDDING_DIM, RATE)[0]
        except PeerUnavailable as reason:
            figures.notes.append(f"{MODULE} was left out: {reason}")
        pairs = list(zip((batch.sparse for batch in batches), gradients, strict=True))
        timings = interleave(
            {name: _cycle(update, pairs) for name, update in updates.items()}, rounds=rounds, calls=calls, warmup=8
        )
        figures.add_rates(case, timings, BATCH_SIZE)
        for name in OURS:
            for peer in (FBGEMM, MODULE):
                if peer in timings:
                    figures.ratios.append(
                        Ratio(name, peer, case, times_faster(timings[name], timings[peer]), _target(size))
                    )
        for name, tables in ours.items():
            if isinstance(tables, CachedEmbeddingTables):
                figures.values.setdefault("events", {})[f"{case}: {name}"] = tables.cache.statistics()
        del ours, updates
        gc.collect()
    return figures


def _target(rows: int) -> float | None:
    return LEAST_SPEED if rows >= SMALLEST_JUDGED else None


def _backends(figures: Figures) -> list[str]:
    found = []
    for name in ("fbgemm", "numba"):
        why = available_backends()[name]
        if why is None:
            found.append(name)
        elif f"our back end {name} was left out: {why}" not in figures.notes:
            figures.notes.append(f"our back end {name} was left out: {why}")
    return found


class _Training:
    """A DLRM with its optimizers, and the training step of ``cordillera train``."""

    def __init__(self, features: FeatureSpec, tables: TablesConfig) -> None:
        torch.manual_seed(0)
        keep_freed_memory()
        defaults = TrainingConfig()
        self.model = build(DLRM_SIZES, features, tables)
        self.optimizer = build_adamw(
            self.model,
            learning_rate=defaults.learning_rate,
            betas=defaults.betas,
            eps=defaults.eps,
            weight_decay=defaults.weight_decay,
        )

    def step(self, batch: Any, precision: str) -> None:
        with autocast(torch.device("cpu"), precision):
            logits = self.model(batch)
        loss, _ = weighted_loss(logits, batch.labels, batch.weights, None)
        loss.backward()
        self.optimizer.step()
        self.model.tables.update()
        self.optimizer.zero_grad(set_to_none=True)


def measure_training(rows: int, rounds: int, calls: int, figures: Figures) -> None:
    """Add rates of whole training steps of a DLRM, in the default precision and in float32, to ``figures``."""
    features = criteo_features(rows)
    batches = criteo_batches(features, 8, BATCH_SIZE)
    contenders = {name: OURS[name] for name in (INT8, INT4)}
    contenders |= {f"fp32 ({name})": {"backend": name} for name in _backends(figures)}
    made = {
        name: _Training(features, TablesConfig.model_validate({"learning_rate": RATE, **options}))
        for name, options in contenders.items()
    }
    for precision in ("bf16", "fp32"):
        case = f"DLRM in {precision}, {rows:,} rows"
        timings = interleave(
            {name: _cycle(one.step, [(batch, precision) for batch in batches]) for name, one in made.items()},
            rounds=rounds,
            calls=calls,
            warmup=2,
        )
        figures.add_rates(case, timings, BATCH_SIZE)
        for name in (INT8, INT4):
            if FBGEMM in timings:
                figures.ratios.append(
                    Ratio(name, FBGEMM, case, times_faster(timings[name], timings[FBGEMM]), _target(rows))
                )
