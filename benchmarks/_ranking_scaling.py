"""NE against training FLOPs on a synthetic log with known best NE: Wukong, DLRM and DCN-V2 on the same axes."""

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from _results import FinishedPieces, train_to_the_end
from _tables import print_notes, print_rows
from rich.console import Console

from cordillera.data.ranking.cache import Splits
from cordillera.data.ranking.datasets import DataConfig, prepare
from cordillera.data.ranking.loader import Loader
from cordillera.data.ranking.logs.synthetic import SyntheticConfig
from cordillera.embeddings.tables import TablesConfig
from cordillera.models import flops
from cordillera.models.ranking import ModelConfig, build
from cordillera.models.ranking.dcn import DCNConfig
from cordillera.models.ranking.dlrm import DLRMConfig
from cordillera.models.ranking.lr import LRConfig
from cordillera.models.ranking.wukong import WukongConfig
from cordillera.run import Run
from cordillera.training.ranking.config import TrainingConfig
from cordillera.training.ranking.metrics import RankingMetrics
from cordillera.training.ranking.scoring import scorer
from cordillera.training.ranking.trainer import Trainer
from cordillera.training.scaling.power_law import MeasuredRun, plot, study

EMBEDDING_DIM = 16
BATCH_SIZE = 1024
LEARNING_RATES = (1e-3, 2e-3, 4e-3)
TABLE_RATES = (0.1,)
LEAST_CLOSED = 0.8
SIZES: dict[str, list[ModelConfig]] = {
    "Wukong": [
        WukongConfig(
            embedding_dim=EMBEDDING_DIM,
            layers=layers,
            fmb_embeddings=n,
            lcb_embeddings=n,
            rank=rank,
            fmb_mlp=mlp,
            top_mlp=top,
            dense_mlp=(),
            dense_embeddings=13,
        )
        for layers, n, rank, mlp, top in (
            (1, 2, 1, (4,), (8,)),
            (1, 4, 2, (16,), (16,)),
            (1, 8, 4, (64,), (64,)),
            (2, 8, 8, (128,), (64,)),
            (2, 16, 8, (256,), (128,)),
            (2, 16, 16, (512,), (256,)),
        )
    ],
    "DLRM": [
        DLRMConfig(embedding_dim=EMBEDDING_DIM, bottom_mlp=(32,), top_mlp=top)
        for top in ((4,), (16,), (64,), (128, 64), (256, 256), (512, 512))
    ],
    "DCN-V2": [
        DCNConfig(embedding_dim=EMBEDDING_DIM, cross_layers=layers, low_rank=rank, mlp=mlp)
        for layers, rank, mlp in (
            (1, 2, (4,)),
            (1, 4, (16,)),
            (1, 16, (64,)),
            (2, 32, (128, 64)),
            (2, 64, (256, 256)),
            (3, 128, (512, 512)),
        )
    ],
}


def _train(config: ModelConfig, splits: Splits, rate: float, table_rate: float, seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = build(config, splits.features, TablesConfig(learning_rate=table_rate))
    training = TrainingConfig(epochs=1, learning_rate=rate, warmup_fraction=0.1, decay="linear", final_rate=0.02)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        run = Run.create(Path(folder) / "run", "")
        loader = Loader(splits.train, BATCH_SIZE, shuffle="none")
        tasks, device = splits.features.tasks, torch.device("cpu")
        train_to_the_end(Trainer(training, model, loader, None, run, tasks=tasks, device=device))
    seconds = time.perf_counter() - began
    score = scorer(model, torch.device("cpu"), training.precision)
    found = {}
    for split in ("validation", "test"):
        metrics = RankingMetrics()
        for batch in Loader(getattr(splits, split), 8192).epoch():
            assert batch.labels is not None
            metrics.update(score(batch)[:, 0], batch.labels[:, 0])
        measures = metrics.compute()
        found[split] = {key: measures[key] for key in ("ne", "auc", "calibration")}
    counted = flops.count(model, splits.train.batch(slice(0, 64)))
    return {**found, **counted.to_dict(), "seconds": seconds}


def measure_scaling(console: Console, pieces: FinishedPieces, *, quick: bool) -> dict[str, Any]:
    """Train every size once over the data with several seeds, and fit NE against FLOPs.

    Every size of every kind gets the same trials of learning rates with the first seed; the best ones on the validation
    split are also used for the other seeds. Figures are of the test split. ``quick`` uses few rows and two sizes.
    """
    rows, seeds = (60_000, 1) if quick else (1_250_000, 2)
    sizes = {name: configs[:3] if quick else configs for name, configs in SIZES.items()}
    splits = prepare(DataConfig(dataset="synthetic", synthetic=SyntheticConfig(rows=rows, lists=0)))
    bayes = float(splits.facts["bayes_ne"])

    def train(name: str, config: ModelConfig, rate: float, table_rate: float, seed: int) -> dict[str, Any]:
        key = {
            "data": splits.folder.name,
            "sizes": config.model_dump(mode="json"),
            "rate": rate,
            "table_rate": table_rate,
            "seed": seed,
            "batch_size": BATCH_SIZE,
        }
        found = pieces.get(key)
        if found is None:
            found = _train(config, splits, rate, table_rate, seed)
            pieces.add(key, found)
            console.print(
                f"  {name} {found['training_flops']:,} FLOPs an example, rates {rate:g} {table_rate:g}, seed {seed}: "
                f"test NE {found['test']['ne']:.4f}, {found['seconds']:.0f} s"
            )
        return found

    def best_rates(name: str, config: ModelConfig) -> tuple[float, float]:
        grid = [(rate, table_rate) for rate in LEARNING_RATES for table_rate in TABLE_RATES]
        return min(grid, key=lambda pair: train(name, config, *pair, 1)["validation"]["ne"])

    lr = LRConfig()
    lr_rates = best_rates("LR", lr)
    lr_ne = statistics.fmean(train("LR", lr, *lr_rates, seed)["test"]["ne"] for seed in range(1, seeds + 1))
    series, table = {}, []
    notes = [
        f"{len(splits.train):,} training rows, one pass; LR reaches NE {lr_ne:.4f}, the best possible is {bayes:.4f}"
    ]
    for name, configs in sizes.items():
        points = []
        for config in configs:
            rates = best_rates(name, config)
            runs = [train(name, config, *rates, seed) for seed in range(1, seeds + 1)]
            ne = [run["test"]["ne"] for run in runs]
            mean = statistics.fmean(ne)
            closed = (lr_ne - mean) / (lr_ne - bayes)
            points.append(
                {
                    "training_flops": runs[0]["training_flops"],
                    "parameters": runs[0]["parameters"],
                    "rates": rates,
                    "ne": ne,
                    "auc": [run["test"]["auc"] for run in runs],
                    "gap_closed": closed,
                    "config": config.model_dump(mode="json"),
                }
            )
            deviation = f"{statistics.stdev(ne):.4f}" if len(ne) > 1 else ""
            table.append(
                [
                    name,
                    f"{runs[0]['training_flops']:,}",
                    f"{mean:.4f}",
                    deviation,
                    f"{closed:.1%}",
                    f"{runs[0]['seconds']:.0f}",
                ]
            )
        series[name] = {"points": points}
    headings = ["model", "training FLOPs an example", "test NE", "sd", "gap to the best closed", "s"]
    print_rows(console, "NE against FLOPs", headings, table)
    measurements = [
        MeasuredRun(name, point["training_flops"], value, seed)
        for name, entry in series.items()
        for point in entry["points"]
        for seed, value in enumerate(point["ne"], 1)
    ]
    plain, above = study(measurements), study(measurements, floor=bayes)
    for name, entry in series.items():
        span = entry["points"][-1]["training_flops"] / entry["points"][0]["training_flops"]
        entry["laws"] = {}
        for kind, result in (("NE", plain), ("NE above the best possible", above)):
            law = result.laws.get(name)
            text = law.summary if law is not None else f"no law ({result.failures[name]})"
            notes.append(f"{name}, {kind}, over {span:.0f} times the FLOPs: {text}")
            entry["laws"][kind] = None if law is None else asdict(law)
    closed = series["Wukong"]["points"][-1]["gap_closed"]
    notes.append(
        f"the largest Wukong closes {closed:.1%} of the gap between LR and the best (at least {LEAST_CLOSED:.0%})"
    )
    print_notes(console, notes)
    pictures = [pieces.path.with_name(f"ranking-scaling.{kind}") for kind in ("svg", "png")]
    plot(plain, pictures, bayes=bayes, references={"LR": lr_ne}, title="One pass over a made log, measured")
    console.print(f"plot: {', '.join(map(str, pictures))}")
    return {
        "evidence": "measured",
        "conditions": {
            "training_rows": len(splits.train),
            "batch_size": BATCH_SIZE,
            "seeds": seeds,
            "learning_rates_tried": LEARNING_RATES,
            "table_rates_tried": TABLE_RATES,
        },
        "bayes_ne": bayes,
        "lr_ne": lr_ne,
        "series": series,
        "notes": notes,
    }
