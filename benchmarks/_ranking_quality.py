"""Quality of ranking models: ours and FuxiCTR's on real data, and ensembles of modules and single modules.

Both sides get the same encoded rows, sizes, batch size, number of tuning trials over a space of the same three kinds of
settings (learning rate; the tables' L2 regularisation; dropout), a tenth of the rate after each epoch without a lower
validation log loss, early stopping on it with the same patience, and the same seeds. The settings are chosen on the
validation split; the test split is scored once per seed. Metrics of both sides are computed by the same code.
"""

from __future__ import annotations

import itertools
import math
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _peers import PeerUnavailable
from _ranking_peers import fuxictr_batch, fuxictr_model
from _results import FinishedPieces, train_to_the_end
from _tables import print_notes, print_rows
from rich.console import Console
from torch import Tensor

from cordillera.data.ranking.cache import ClickDataset, Splits
from cordillera.data.ranking.datasets import DataConfig, prepare
from cordillera.data.ranking.features import FeatureSpec
from cordillera.data.ranking.loader import Loader
from cordillera.embeddings.tables import TablesConfig
from cordillera.kernels.threads import usable_cores
from cordillera.models.ranking import ModelConfig, build
from cordillera.models.ranking.base import RankingModel
from cordillera.models.ranking.dcn import DCNConfig
from cordillera.models.ranking.dhen import DHENConfig
from cordillera.models.ranking.dlrm import DLRMConfig
from cordillera.models.ranking.wukong import WukongConfig
from cordillera.numerics.formats.precision import Precision
from cordillera.reports.ranking.comparison import mean_interval
from cordillera.run import Run
from cordillera.training.ranking.config import TrainingConfig
from cordillera.training.ranking.metrics import RankingMetrics
from cordillera.training.ranking.scoring import scorer
from cordillera.training.ranking.trainer import Trainer

EMBEDDING_DIM = 16
BATCH_SIZE = 1024
EVALUATION_BATCH_SIZE = 8192
PATIENCE = 2
MAX_EPOCHS = 15
WITHIN = 0.002
DATA = {
    "movielens-100k": DataConfig(dataset="movielens-100k"),
    "adult": DataConfig(dataset="adult", tasks=("income",)),
}
MODELS: dict[str, tuple[ModelConfig, str, dict[str, Any]]] = {
    "DLRM": (
        DLRMConfig(embedding_dim=EMBEDDING_DIM, embedding_init=0.01, bottom_mlp=(64,), top_mlp=(128, 64)),
        "DLRM",
        {"bottom_mlp_units": [64], "top_mlp_units": [128, 64], "interaction_op": "dot"},
    ),
    "DCN-V2": (
        DCNConfig(embedding_dim=EMBEDDING_DIM, embedding_init=0.01, cross_layers=2, mlp=(128, 64), dense_vectors=True),
        "DCNv2",
        {"num_cross_layers": 2, "parallel_dnn_hidden_units": [128, 64], "model_structure": "parallel"},
    ),
    "Wukong": (
        WukongConfig(
            embedding_dim=EMBEDDING_DIM,
            layers=2,
            fmb_embeddings=8,
            lcb_embeddings=8,
            rank=8,
            fmb_mlp=(128,),
            top_mlp=(128,),
            dense_mlp=(),
        ),
        "WuKong",
        {
            "num_wukong_layers": 2,
            "fmb_features": 8,
            "lcb_features": 8,
            "fmp_rank_k": 8,
            "fmb_mlp_units": [128],
            "mlp_hidden_units": [128],
        },
    ),
}
DROPOUTS = (0.0, 0.1, 0.2, 0.4)


def _log_uniform(share: float, low: float, high: float) -> float:
    return float(f"{math.exp(math.log(low) + share * (math.log(high) - math.log(low))):.3g}")


def settings_of(trial: int, side: str) -> dict[str, float]:
    """Return the settings of one tuning trial for ``ours`` or ``FuxiCTR``, from the same draws from the unit cube.

    They are ``learning_rate`` and ``dropout``, with ``table_weight_decay`` (ours: L2 on the rows of a batch) or
    ``embedding_regularizer`` (FuxiCTR: L2 over the whole tables).
    """
    first, second, third = np.random.default_rng([2024, trial]).random(3)
    settings = {
        "learning_rate": _log_uniform(first, 3e-4, 1e-2),
        "dropout": DROPOUTS[int(third * len(DROPOUTS))],
    }
    if side == "ours":
        return {**settings, "table_weight_decay": _log_uniform(second, 1e-3, 1e-1)}
    return {**settings, "embedding_regularizer": _log_uniform(second, 1e-6, 1e-1)}


def _measures(logits: Tensor, labels: Tensor) -> dict[str, float]:
    metrics = RankingMetrics()
    metrics.update(logits, labels)
    found = metrics.compute()
    return {key: found[key] for key in ("auc", "ne", "log_loss", "calibration")}


def _scores(model: Any, dataset: ClickDataset, precision: Precision) -> tuple[Tensor, Tensor]:
    score = scorer(model, torch.device("cpu"), precision)
    logits, labels = [], []
    for batch in Loader(dataset, EVALUATION_BATCH_SIZE).epoch():
        assert batch.labels is not None
        logits.append(score(batch)[:, 0])
        labels.append(batch.labels[:, 0])
    return torch.cat(logits), torch.cat(labels)


def fit_ours(
    config: ModelConfig, splits: Splits, settings: Mapping[str, float], seed: int, epochs: int = MAX_EPOCHS
) -> tuple[RankingModel, dict[str, Any]]:
    """Train one of our models with the public trainer, with settings from :func:`settings_of`.

    Returns the model, and validation and test measures, epochs, seconds and parameters outside the tables.
    """
    torch.manual_seed(seed)
    update: dict[str, Any] = {"dropout": settings["dropout"]}
    if isinstance(config, WukongConfig):
        update["dense_embeddings"] = len(splits.features.dense)  # as many as FuxiCTR's
    rate = settings["learning_rate"]
    tables = TablesConfig(name="adam", learning_rate=rate, weight_decay=settings["table_weight_decay"])
    model = build(config.model_copy(update=update), splits.features, tables)
    training = TrainingConfig(epochs=epochs, learning_rate=rate, decay="plateau", patience=PATIENCE)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            training,
            model,
            Loader(splits.train, BATCH_SIZE, shuffle="global", seed=seed),
            Loader(splits.validation, EVALUATION_BATCH_SIZE),
            Run.create(Path(folder) / "run", ""),
            tasks=splits.features.tasks,
            device=torch.device("cpu"),
        )
        report = train_to_the_end(trainer)
    seconds = time.perf_counter() - began
    in_tables = sum(parameter.numel() for parameter in model.tables.parameters())
    return model, {
        "validation": _measures(*_scores(model, splits.validation, training.precision)),
        "test": _measures(*_scores(model, splits.test, training.precision)),
        "epochs": report.progress.step / len(trainer.training),
        "seconds": seconds,
        "parameters": sum(parameter.numel() for parameter in model.parameters()) - in_tables,
    }


def train_ours(
    config: ModelConfig, splits: Splits, settings: Mapping[str, float], seed: int, epochs: int = MAX_EPOCHS
) -> dict[str, Any]:
    """Return the measures of :func:`fit_ours`."""
    return fit_ours(config, splits, settings, seed, epochs)[1]


class _InMemory:
    """Batches for FuxiCTR's ``fit`` from columns in memory, permuted again each epoch."""

    def __init__(self, columns: dict[str, Tensor], batch_size: int, *, shuffle: bool, seed: int = 0) -> None:
        self.columns, self.batch_size, self.shuffle = columns, batch_size, shuffle
        self.rows = len(next(iter(columns.values())))
        self.generator = torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        return -(-self.rows // self.batch_size)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        order = torch.randperm(self.rows, generator=self.generator) if self.shuffle else torch.arange(self.rows)
        for part in order.split(self.batch_size):
            yield {name: column[part] for name, column in self.columns.items()}


def _columns(dataset: ClickDataset, features: FeatureSpec, list_lengths: Mapping[str, int]) -> dict[str, Tensor]:
    return fuxictr_batch(dataset.batch(slice(0, len(dataset))), features, list_lengths=list_lengths)


def train_fuxictr(
    name: str,
    options: dict[str, Any],
    splits: Splits,
    settings: Mapping[str, float],
    seed: int,
    epochs: int = MAX_EPOCHS,
) -> dict[str, Any]:
    """Train one of FuxiCTR's models by its own ``fit``: Adam, clipping, rate cut on plateaus, early stopping.

    Args:
        name: Name of the model in the model zoo.
        options: Sizes of the model.
        splits: The data.
        settings: Result of :func:`settings_of`.
        seed: Seed of weights, order and dropout.
        epochs: Largest number of epochs.

    Raises:
        PeerUnavailable: If FuxiCTR or its model zoo is absent.
    """
    torch.manual_seed(seed)
    features = splits.features
    list_lengths = {feature.name: feature.max_length for feature in splits.encoder.schema.lists}
    dropout = settings["dropout"]
    dropouts = (
        {"top_mlp_dropout": dropout, "bottom_mlp_dropout": dropout} if name == "DLRM" else {"net_dropout": dropout}
    )
    with tempfile.TemporaryDirectory() as folder:
        model = fuxictr_model(
            name,
            features,
            learning_rate=settings["learning_rate"],
            folder=Path(folder),
            list_lengths=list_lengths,
            embedding_dim=EMBEDDING_DIM,
            embedding_regularizer=settings["embedding_regularizer"],
            monitor="logloss",
            monitor_mode="min",
            early_stop_patience=PATIENCE,
            **dropouts,
            **options,
        )
        train = _InMemory(_columns(splits.train, features, list_lengths), BATCH_SIZE, shuffle=True, seed=seed)
        parts = {
            part: _InMemory(_columns(dataset, features, list_lengths), EVALUATION_BATCH_SIZE, shuffle=False)
            for part, dataset in (("validation", splits.validation), ("test", splits.test))
        }
        began = time.perf_counter()
        model.fit(train, epochs=epochs, validation_data=parts["validation"])
        seconds = time.perf_counter() - began
    found: dict[str, Any] = {}
    for part, batches in parts.items():
        # FuxiCTR returns float32 probabilities; one rounded to 0 or 1 would have no finite logit.
        probabilities = torch.from_numpy(model.predict(batches)).clamp(1e-7, 1 - 1e-7)
        found[part] = _measures(torch.logit(probabilities), batches.columns[features.tasks[0]])
    in_tables = sum(p.numel() for n, p in model.named_parameters() if "embedding_layer" in n and p.shape[0] > 1)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return {
        **found,
        "epochs": model._total_steps / len(train),
        "seconds": seconds,
        "parameters": trained - in_tables,
    }


def _spread(values: list[float]) -> str:
    deviation = statistics.stdev(values) if len(values) > 1 else math.nan
    return f"{statistics.fmean(values):.4f} ± {deviation:.4f}"


def _mean(pieces: list[dict[str, Any]], key: str, split: str = "test") -> float:
    return statistics.fmean(piece[split][key] for piece in pieces)


def measure_quality(console: Console, pieces: FinishedPieces, *, quick: bool) -> dict[str, Any]:
    """Tune and train DLRM, DCN-V2 and Wukong, ours and FuxiCTR's, on MovieLens-100K and Adult.

    An interrupted measurement continues from the finished ``pieces``. ``quick`` uses one trial and one seed.
    """
    trials, seeds, epochs = (1, 1, 1) if quick else (8, 5, MAX_EPOCHS)
    notes: list[str] = []
    rows, results = [], []
    for data, config in DATA.items():
        splits = prepare(config)
        for model, (ours, peer, options) in MODELS.items():
            finals: dict[str, list[dict[str, Any]]] = {}
            chosen: dict[str, dict[str, float]] = {}
            for side in ("ours", "FuxiCTR"):

                def train(
                    settings: dict[str, float],
                    seed: int,
                    side: str = side,
                    ours: ModelConfig = ours,
                    peer: str = peer,
                    options: dict[str, Any] = options,
                    splits: Splits = splits,
                    data: str = data,
                ) -> dict[str, Any]:
                    sizes = ours.model_dump(mode="json") if side == "ours" else {"name": peer, **options}
                    key = {
                        "data": splits.folder.name,
                        "name": data,
                        "side": side,
                        "sizes": sizes,
                        "settings": settings,
                        "seed": seed,
                        "epochs": epochs,
                    }
                    found = pieces.get(key)
                    if found is None:
                        if side == "ours":
                            found = train_ours(ours, splits, settings, seed, epochs)
                        else:
                            found = train_fuxictr(peer, options, splits, settings, seed, epochs)
                        pieces.add(key, found)
                        console.print(
                            f"  {data} {sizes['name']} {side} seed {seed}: validation NE "
                            f"{found['validation']['ne']:.4f}, test AUC {found['test']['auc']:.4f}, "
                            f"{found['epochs']:.0f} epochs, {found['seconds']:.1f} s"
                        )
                    return found

                try:
                    tried = {trial: train(settings_of(trial, side), 100 + trial) for trial in range(trials)}
                    best = min(tried, key=lambda trial: tried[trial]["validation"]["ne"])
                    chosen[side] = settings_of(best, side)
                    finals[side] = [train(chosen[side], seed) for seed in range(1, seeds + 1)]
                except PeerUnavailable as reason:
                    notes.append(f"{data} {model}: FuxiCTR was left out: {reason}")
            result, row = _beside(data, model, finals, chosen)
            results.append(result)
            rows.append(row)
    headings = ["data", "model", "AUC ours - FuxiCTR", "AUC ours", "AUC FuxiCTR", "NE ours", "NE FuxiCTR"]
    headings += ["calibration", "beside", f"at least -{WITHIN}"]
    print_rows(console, "quality on the test split, mean and standard deviation over seeds", headings, rows)
    print_notes(console, notes)
    return {
        "evidence": "measured",
        "conditions": {
            "trials": trials,
            "seeds": seeds,
            "batch_size": BATCH_SIZE,
            "embedding_dim": EMBEDDING_DIM,
            "max_epochs": epochs,
            "tables": "Adam with the dense learning rate on both sides; ours on the rows of a batch, theirs on all",
            "patience": PATIENCE,
            "plateau": "a tenth of the rate after each epoch without a lower log loss on the validation split",
            "stopped_on": "validation log loss (NE)",
            "space": {
                "learning_rate": [3e-4, 1e-2],
                "dropout": DROPOUTS,
                "ours: table_weight_decay": [1e-3, 1e-1],
                "FuxiCTR: embedding_regularizer": [1e-6, 1e-1],
            },
        },
        "results": results,
        "notes": notes,
    }


def _beside(
    data: str, model: str, finals: dict[str, list[dict[str, Any]]], chosen: dict[str, dict[str, float]]
) -> tuple[dict[str, Any], list[str]]:
    summary: dict[str, Any] = {"data": data, "model": model, "settings": chosen, "sides": {}}
    for side, found in finals.items():
        measures = {}
        for key in ("auc", "ne", "log_loss", "calibration"):
            values = [piece["test"][key] for piece in found]
            deviation = statistics.stdev(values) if len(values) > 1 else None
            measures[key] = {"mean": statistics.fmean(values), "sd": deviation, "seeds": values}
        seconds = statistics.fmean(piece["seconds"] for piece in found)
        summary["sides"][side] = {**measures, "parameters": found[0]["parameters"], "seconds": seconds}
    ours, theirs = finals["ours"], finals.get("FuxiCTR")
    cells = [data, model]
    if theirs is None:
        auc, ne = _spread([p["test"]["auc"] for p in ours]), _spread([p["test"]["ne"] for p in ours])
        return summary, [*cells, "", auc, "", ne, "", f"{_mean(ours, 'calibration'):.3f}", "", ""]
    difference = _mean(ours, "auc") - _mean(theirs, "auc")
    summary["auc_difference"] = difference
    for key in ("auc", "ne"):
        cells += [_spread([p["test"][key] for p in side]) for side in (ours, theirs)]
    cells.insert(2, f"{difference:+.4f}")
    cells += [f"{_mean(side, 'calibration'):.3f}" for side in (ours, theirs)]
    return summary, [*cells, "reached" if difference >= -WITHIN else "[bold red]missed[/]"]


# Ensembles of modules

MODULES = ("linear", "attention", "cross", "mlp", "fm")
DHEN_ROWS = 16


def _dhen(modules: tuple[str, ...], layers: int, top: int = 64) -> DHENConfig:
    return DHENConfig.model_validate(
        {
            "embedding_dim": EMBEDDING_DIM,
            "layers": layers,
            "modules": modules,
            "embeddings": DHEN_ROWS // len(modules),
            "module_mlp": (64,),
            "dense_mlp": (),
            "dense_embeddings": 13,
            "top_mlp": (top,),
        }
    )


def _dense_parameters(config: DHENConfig, features: FeatureSpec) -> int:
    model = build(config, features, TablesConfig())
    in_tables = sum(parameter.numel() for parameter in model.tables.parameters())
    return sum(parameter.numel() for parameter in model.parameters()) - in_tables


def _equalised(modules: tuple[str, ...], layers: int, features: FeatureSpec, parameters: int) -> DHENConfig:
    """Return the ensemble whose top MLP is wide enough for about ``parameters`` parameters outside the tables."""
    narrow = _dense_parameters(_dhen(modules, layers, 1), features)
    one_more = _dense_parameters(_dhen(modules, layers, 2), features) - narrow
    return _dhen(modules, layers, max(1, 1 + round((parameters - narrow) / one_more)))


def _paired_gain(worse: list[dict[str, Any]], better: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the decrease of test NE from the first to the second, paired by seed, with a 95 % interval."""
    gains = [one["test"]["ne"] - other["test"]["ne"] for one, other in zip(worse, better, strict=True)]
    estimate = mean_interval(gains)
    interval = [estimate.low, estimate.high] if estimate.count > 1 else None
    return {"mean": estimate.value, "interval": interval, "seeds": gains}


def measure_dhen(console: Console, pieces: FinishedPieces, *, quick: bool) -> dict[str, Any]:
    """Compare single modules and pairs, one layer and two, with equal numbers of parameters outside the tables.

    Every ensemble gets the same number of tuning trials over the same draws. Settings, and then the best single module
    and the best pair, are chosen on the validation split; the test split is scored once per seed. ``quick`` uses one
    trial, one seed and two modules.
    """
    trials, seeds, epochs = (1, 1, 1) if quick else (6, 5, MAX_EPOCHS)
    modules = MODULES[:2] if quick else MODULES
    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(usable_cores(), spawn, torch.set_num_threads, (1,))
    try:
        results = [_dhen_on(_Ensembles(data, epochs, pool, pieces, console), trials, seeds, modules) for data in DATA]
    finally:
        pool.shutdown(cancel_futures=True)  # after an error, trainings that have not begun do not begin
    return {
        "evidence": "measured",
        "conditions": {"trials": trials, "seeds": seeds, "batch_size": BATCH_SIZE, "max_epochs": epochs},
        "results": results,
    }


@cache
def _splits(data: str) -> Splits:
    return prepare(DATA[data])


def trained_ensemble(
    data: str, sizes: Mapping[str, Any], settings: Mapping[str, float], seed: int, epochs: int
) -> dict[str, Any]:
    """Return the measures of :func:`fit_ours`, in a process of one thread."""
    return train_ours(DHENConfig.model_validate(sizes), _splits(data), settings, seed, epochs)


class _Ensembles:
    """Trainings of ensembles on one data set, one on each core, of which finished ones are kept."""

    def __init__(
        self, data: str, epochs: int, pool: ProcessPoolExecutor, pieces: FinishedPieces, console: Console
    ) -> None:
        self.data, self.splits = data, _splits(data)
        self._epochs, self._pool, self._pieces, self.console = epochs, pool, pieces, console

    def __call__(self, wanted: Sequence[tuple[DHENConfig, Mapping[str, float], int]]) -> list[dict[str, Any]]:
        """Return the measures of trainings: ensemble, settings and seed of each."""
        keys = [
            {
                "data": self.splits.folder.name,
                "sizes": config.model_dump(mode="json"),
                "settings": dict(settings),
                "seed": seed,
                "epochs": self._epochs,
            }
            for config, settings, seed in wanted
        ]
        left = {
            self._pool.submit(
                trained_ensemble, self.data, key["sizes"], key["settings"], key["seed"], self._epochs
            ): key
            for key in keys
            if self._pieces.get(key) is None
        }
        for one in as_completed(left):
            key, found = left[one], one.result()
            self._pieces.add(key, found)
            self.console.print(
                f"  {self.data} {' + '.join(key['sizes']['modules'])}, {key['sizes']['layers']} layers, seed "
                f"{key['seed']}: validation NE {found['validation']['ne']:.4f}, test NE {found['test']['ne']:.4f}, "
                f"{found['seconds']:.1f} s"
            )
        return [self._pieces.get(key) for key in keys]  # type: ignore[misc]


def _dhen_on(train: _Ensembles, trials: int, seeds: int, modules: Sequence[str]) -> dict[str, Any]:
    features, data = train.splits.features, train.data
    singles = [(name,) for name in modules]
    pairs = list(itertools.combinations(modules, 2))
    parameters = max(_dense_parameters(_dhen(names, 2), features) for names in [*singles, *pairs])

    found: dict[tuple[tuple[str, ...], int], list[dict[str, Any]]] = {}
    chosen: dict[tuple[tuple[str, ...], int], dict[str, float]] = {}

    def tune_and_train(ensembles: Sequence[tuple[str, ...]], layers: int) -> None:
        configs = {names: _equalised(names, layers, features, parameters) for names in ensembles}
        draws = [settings_of(trial, "ours") for trial in range(trials)]
        tried = iter(train([(one, draw, 100 + at) for one in configs.values() for at, draw in enumerate(draws)]))
        for names in ensembles:
            reached = [next(tried)["validation"]["ne"] for _ in draws]
            chosen[names, layers] = draws[reached.index(min(reached))]
        runs = iter(train([(one, chosen[names, layers], seed)
                           for names, one in configs.items() for seed in range(1, seeds + 1)]))  # fmt: skip
        for names in ensembles:
            found[names, layers] = [next(runs) for _ in range(seeds)]

    def best(choices: list[tuple[str, ...]]) -> tuple[str, ...]:
        return min(choices, key=lambda names: _mean(found[names, 1], "ne", "validation"))

    tune_and_train([*singles, *pairs], 1)
    single, pair = best(singles), best(pairs)
    tune_and_train([pair], 2)
    rows, results = [], []
    for names, layers in sorted(found, key=lambda choice: _mean(found[choice], "ne")):
        runs = found[names, layers]
        results.append(
            {
                "modules": names,
                "layers": layers,
                "parameters": runs[0]["parameters"],
                "settings": chosen[names, layers],
                "validation_ne": _mean(runs, "ne", "validation"),
                "test": {key: [run["test"][key] for run in runs] for key in ("ne", "auc", "calibration")},
            }
        )
        rows.append(
            [
                " + ".join(names),
                str(layers),
                f"{_mean(runs, 'ne', 'validation'):.4f}",
                _spread([run["test"]["ne"] for run in runs]),
                _spread([run["test"]["auc"] for run in runs]),
                f"{runs[0]['parameters']:,}",
            ]
        )
    headings = ["modules", "layers", "validation NE", "test NE", "test AUC", "parameters"]
    print_rows(train.console, f"DHEN on {data} at equal parameters", headings, rows)
    of_pair = _paired_gain(found[single, 1], found[pair, 1])
    of_layer = _paired_gain(found[pair, 1], found[pair, 2])
    notes = [f"chosen on validation: best single module {single[0]}, best pair {' + '.join(pair)}"]
    for what, gain in (
        ("the best pair is lower than the best single module's", of_pair),
        ("two layers of that pair is lower than one layer's", of_layer),
    ):
        spread = "" if gain["interval"] is None else "; 95 %: {:+.4f} to {:+.4f}".format(*gain["interval"])
        notes.append(f"test NE of {what} by {gain['mean']:+.4f} (paired seeds: {seeds}{spread})")
    print_notes(train.console, notes)
    return {
        "data": data,
        "parameters": parameters,
        "best_single": single,
        "best_pair": pair,
        "pair_gain_ne": of_pair,
        "layer_gain_ne": of_layer,
        "ensembles": results,
        "notes": notes,
    }
