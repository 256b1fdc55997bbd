"""Disaggregated Multi-Tower: learned towers and models that compress in them: ``cordillera bench dmt``.

``partition`` recovers planted groups of features, from embeddings that are made and from those of trained models.
``quality`` compares models with towers of compression 4 with the same models without, on MovieLens-100K, on the
synthetic log of the recipes (13 dense and 26 categorical features, as Criteo's) and on a log whose features interact
within planted blocks. ``exchange`` compares the exchange by towers with the flat one.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import scipy.optimize
import torch
import typer
from _dmt_exchange import run as measure_exchange
from _program import Program
from _ranking_quality import MODELS, fit_ours
from _results import FinishedPieces
from _tables import print_notes
from rich.console import Console
from rich.table import Table

from cordillera.data.ranking.cache import Splits
from cordillera.data.ranking.datasets import DataConfig, prepare
from cordillera.data.ranking.features import CategoricalFeature, Schema
from cordillera.data.ranking.loader import Loader
from cordillera.data.ranking.logs.synthetic import SyntheticConfig
from cordillera.models.ranking.base import RankingModel
from cordillera.models.ranking.towers import TowersConfig
from cordillera.planning.ranking.towers import Similarities, TowerPlan, plan_towers
from cordillera.reports.ranking.comparison import mean_interval

BLOCKS, EACH, IDS, RANK = 4, 6, 40, 3
ROWS, SYNTHETIC_ROWS = 150_000, 300_000
COMPRESSION, DIM = 4.0, 8
RATES = {"learning_rate": 2e-3, "dropout": 0.2}
# with the recipes' decay of MovieLens, a DLRM learns nothing of products alone
SETTINGS = {
    "movielens-100k": RATES | {"table_weight_decay": 1e-2},
    "synthetic": RATES | {"table_weight_decay": 1e-4},
    "planted blocks": RATES | {"table_weight_decay": 1e-4},
}
CONFIGS = {name: one[0].model_copy(update={"embedding_init": 0.05}) for name, one in MODELS.items()}
PROBE = "Wukong"  # whose embeddings show the planted blocks best (--part partition)
TOWERS = {"movielens-100k": 2, "synthetic": 4, "planted blocks": BLOCKS}
SEEDS = 3
SEEDS_OF = {"movielens-100k": 10, "synthetic": 5, "planted blocks": SEEDS}
KINDS = {"DLRM": "linear", "DCN-V2": "cross", "Wukong": "linear"}
EPOCHS, SAMPLES = 4, 8192
NOISES, PLANTS, FOUND = (0.4, 0.8, 1.2), 20, 19
WITHIN = 0.001  # asked: AUC with towers less AUC without


class Part(str, enum.Enum):
    """Parts of the benchmark."""

    partition = "partition"
    quality = "quality"
    exchange = "exchange"


def made_embeddings(noise: float, seed: int, samples: int = 300, dim: int = 8) -> tuple[np.ndarray, np.ndarray]:
    """Return embeddings ``[samples, F, dim]`` whose blocks share a direction in each sample, and the blocks ``[F]``."""
    draw = np.random.default_rng([11, seed])
    block = draw.permutation(np.repeat(np.arange(BLOCKS), EACH))
    shared = draw.standard_normal((samples, BLOCKS, dim))[:, block]
    shared = shared * draw.choice([-1, 1], (samples, len(block), 1)) * draw.uniform(0.5, 1, (len(block), 1))
    return shared + noise * draw.standard_normal(shared.shape), block


def planted_log(folder: Path, rows: int) -> Splits:
    """Return a log whose clicks depend on products of pairs of features of one block, for blocks of neighbours."""
    draw = np.random.default_rng(2024)
    fields = BLOCKS * EACH
    popularity = 1 / np.arange(1, IDS + 1)
    ids = draw.choice(IDS, (rows, fields), p=popularity / popularity.sum())
    latent = draw.standard_normal((fields, IDS, RANK))
    logits = np.zeros(rows)
    for block in range(BLOCKS):
        members = range(block * EACH, (block + 1) * EACH)
        vectors = np.stack([latent[field][ids[:, field]] for field in members], 1)
        score = np.square(vectors.sum(1)).sum(1) - np.square(vectors).sum((1, 2))
        logits += (score - score.mean()) / score.std()
    clicks = (draw.random(rows) < 1 / (1 + np.exp(1 - 1.2 * logits))).astype(np.int64)
    names = [f"C{field}" for field in range(fields)]
    path = folder / f"planted-{rows}.parquet"
    pl.DataFrame({name: ids[:, at].astype(str) for at, name in enumerate(names)} | {"click": clicks}).write_parquet(
        path
    )
    schema = Schema(categorical=tuple(CategoricalFeature(name=name) for name in names), labels=("click",))
    return prepare(DataConfig(path=str(path), schema=schema, split="random", cache_dir=str(folder / "cache")))


def planned(model: RankingModel, splits: Splits, towers: int, seed: int) -> TowerPlan:
    """Return towers by the embeddings of a trained model on rows of the training split; loads are rows and lookups."""
    features = splits.features.sparse
    found, seen = Similarities(len(features)), 0
    with torch.no_grad():
        for batch in Loader(splits.train, 1024, shuffle="global", seed=seed).epoch():
            found.add(model.tables(batch.sparse).float().numpy())
            seen += len(batch)
            if seen >= SAMPLES:
                break
    tables = [feature.table for feature in features]
    rows = [float(splits.features.tables[name]) * (name not in tables[:at]) for at, name in enumerate(tables)]
    return plan_towers([one.name for one in features], tables, found.mean(), {"rows": rows}, towers, seed=seed)


def purity(towers: Sequence[int], blocks: Sequence[int]) -> float:
    """Return the share of features in the tower of their block, for the best pairing of towers with blocks."""
    overlap = np.zeros((max(towers) + 1, max(blocks) + 1))
    np.add.at(overlap, (np.array(towers), np.array(blocks)), 1)
    first, second = scipy.optimize.linear_sum_assignment(-overlap)
    return float(overlap[first, second].sum() / len(towers))


def random_towers(count: int, towers: int, seed: int) -> list[int]:
    """Return towers of as equal a number of features as possible, at random."""
    return np.random.default_rng([5, seed]).permutation(np.arange(count) % towers).tolist()


def _fullest(plan: TowerPlan) -> float:
    """Return the largest load of a tower relative to its bound."""
    return max(max(plan.tower_loads(name)) / bound for name, bound in plan.bounds.items() if bound)


def _partition(console: Console, quick: bool, folder: Path) -> dict[str, Any]:
    seeds, rows = (2, 4000) if quick else (PLANTS, ROWS)
    blocks = [field // EACH for field in range(BLOCKS * EACH)]
    found = []
    for noise in NOISES:
        plans = []
        for seed in range(seeds):
            embeddings, block = made_embeddings(noise, seed)
            names = [str(at) for at in range(len(block))]
            similarities = Similarities(len(block))
            similarities.add(embeddings)
            work = np.random.default_rng(seed).uniform(0.9, 1.1, len(block)).tolist()
            plans.append((plan_towers(names, names, similarities.mean(), {"work": work}, BLOCKS, seed=seed), block))
        found.append(
            {
                "noise": noise,
                "recovered": sum(purity(plan.towers, block.tolist()) == 1 for plan, block in plans),
                "seeds": seeds,
                "purity": float(np.mean([purity(plan.towers, block.tolist()) for plan, block in plans])),
                "fullest": max(_fullest(plan) for plan, _ in plans),
            }
        )
    splits, trained = planted_log(folder, rows), []
    for name, seed in itertools.product(("DLRM",) if quick else MODELS, range(1 if quick else SEEDS)):
        model, measures = fit_ours(CONFIGS[name], splits, SETTINGS["planted blocks"], seed, 1 if quick else EPOCHS)
        plan = planned(model, splits, BLOCKS, seed)
        inside, across = plan.mean_similarity()
        trained.append(
            {
                "probe": name, "seed": seed, "auc": measures["test"]["auc"], "purity": purity(plan.towers, blocks),
                "inside": inside, "across": across, "stress": plan.stress, "fullest": _fullest(plan),
            }
        )  # fmt: skip
    chance = float(np.mean([purity(random_towers(len(blocks), BLOCKS, seed), blocks) for seed in range(1000)]))
    table = Table(title=f"{BLOCKS} planted groups of {EACH} features (measured)", title_justify="left")
    for heading in ("embeddings", "recovered whole", "features in place", "fullest tower, of its bound"):
        table.add_column(heading, justify="right")
    for one in found:
        told = f"made, noise {one['noise']:g}"
        table.add_row(told, f"{one['recovered']} of {seeds}", f"{one['purity']:.1%}", f"{one['fullest']:.1%}")
    for name in dict.fromkeys(one["probe"] for one in trained):
        own = [one for one in trained if one["probe"] == name]
        whole = f"{sum(one['purity'] == 1 for one in own)} of {len(own)}"
        place = f"{np.mean([one['purity'] for one in own]):.1%}"
        table.add_row(f"trained {name}", whole, place, f"{max(one['fullest'] for one in own):.1%}")
    table.add_row("at random", "", f"{chance:.1%}", "")
    console.print(table)
    return {"evidence": "measured", "made": found, "trained": trained, "at_random": chance, "asked": FOUND}


def _groups(splits: Splits, pieces: FinishedPieces, key: dict[str, Any]) -> dict[str, list[list[str]]]:
    """Return learned and random towers: names of each tower's features. The probe is a Wukong of the same seed."""
    done = pieces.get(key | {"model": "probe"})
    if done is not None:
        return done
    probe, _ = fit_ours(CONFIGS[PROBE], splits, key["settings"], key["seed"], key["epochs"])
    plan = planned(probe, splits, key["towers"], key["seed"])
    drawn: list[list[str]] = [[] for _ in range(key["towers"])]
    for name, tower in zip(plan.features, random_towers(len(plan.features), key["towers"], key["seed"]), strict=True):
        drawn[tower].append(name)
    found = {"learned": [list(group) for group in plan.groups()], "random": drawn}
    pieces.add(key | {"model": "probe"}, found)
    return found


def _variants(splits: Splits, pieces: FinishedPieces, key: dict[str, Any]) -> dict[str, float]:
    """Return the test AUC of a model without towers, with learned ones and with random ones, from one seed."""
    done = pieces.get(key)
    if done is not None:
        return done
    config, name = CONFIGS[key["model"]], key["model"]
    _, plain = fit_ours(config, splits, key["settings"], key["seed"], key["epochs"])
    found = {"none": plain["test"]["auc"]}
    for variant, groups in _groups(splits, pieces, key).items():
        given = TowersConfig(groups=groups, kind=KINDS[name], compression=COMPRESSION, dim=DIM)
        changed = config.model_copy(update={"towers": given})
        model, measures = fit_ours(changed, splits, key["settings"], key["seed"], key["epochs"])
        found[variant] = measures["test"]["auc"]
        entering = len(splits.features.sparse) * config.embedding_dim
        found[f"{variant} compression"] = entering / (model.towers.outputs * model.towers.dim)
    pieces.add(key, found)
    return found


def _quality(console: Console, quick: bool, folder: Path, pieces: FinishedPieces) -> dict[str, Any]:
    seeds, epochs = (dict.fromkeys(SEEDS_OF, 1), 1) if quick else (SEEDS_OF, EPOCHS)
    logs = {"planted blocks": planted_log(folder, 4000 if quick else ROWS)}
    if not quick:
        synthetic = DataConfig(dataset="synthetic", synthetic=SyntheticConfig(rows=SYNTHETIC_ROWS, lists=0))
        logs = {
            "movielens-100k": prepare(DataConfig(dataset="movielens-100k")),
            "synthetic": prepare(synthetic),
            **logs,
        }
    rows = []
    for data, splits in logs.items():
        for name in ("DLRM",) if quick else MODELS:
            runs = []
            for seed in range(seeds[data]):
                key = {"data": data, "model": name, "seed": seed, "epochs": epochs, "rows": len(splits.train)}
                key |= {"towers": TOWERS[data], "compression": COMPRESSION, "dim": DIM, "settings": SETTINGS[data]}
                runs.append(_variants(splits, pieces, key))
            row: dict[str, Any] = {"data": data, "model": name, "kind": KINDS[name], "runs": runs}
            for variant in ("learned", "random"):
                change = mean_interval([run[variant] - run["none"] for run in runs])
                row[variant] = {"mean": change.value, "low": change.low, "high": change.high}
            rows.append(row)
    table = Table(title=f"test AUC with towers of compression {COMPRESSION:g} (measured)", title_justify="left")
    for heading in ("data", "model", "without", "learned towers", "random towers", "compression"):
        table.add_column(heading, justify="left" if heading in ("data", "model") else "right")
    for row in rows:
        mean = {key: float(np.mean([run[key] for run in row["runs"]])) for key in row["runs"][0]}
        changes = (f"{row[variant]['mean']:+.4f}" for variant in ("learned", "random"))
        table.add_row(row["data"], row["model"], f"{mean['none']:.4f}", *changes, f"{mean['learned compression']:.2f}")
    console.print(table)
    ahead = [run["learned"] > run["random"] for row in rows for run in row["runs"]]
    notes = [f"learned towers are ahead of random ones in {sum(ahead)} of {len(ahead)} runs"]
    print_notes(console, notes)
    conditions = {
        "compression": COMPRESSION,
        "dim": DIM,
        "epochs": epochs,
        "seeds": seeds,
        "settings": SETTINGS,
        "towers": TOWERS,
        "probe": PROBE,
    }
    return {"evidence": "measured", "conditions": conditions, "rows": rows, "asked": WITHIN, "notes": notes}


main = Program(
    "dmt",
    {Part.partition: _partition, Part.quality: _quality, Part.exchange: measure_exchange},
    "Measure learned towers of features, the quality of models that compress in them, and the exchange by towers.",
    threads=1,
    fresh=True,
).command()


if __name__ == "__main__":
    typer.run(main)
