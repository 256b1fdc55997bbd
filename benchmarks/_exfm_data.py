"""Streams, teachers and students of the benchmark of ExFM: Adult, MovieLens-100K, and made ones that drift."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from cordillera import recipe as recipes
from cordillera import workflows
from cordillera.data.files import cache_folder
from cordillera.data.ranking.datasets import DataConfig, open_log
from cordillera.data.ranking.encoding import Encoder
from cordillera.data.ranking.features import Schema
from cordillera.recipe import RankingRecipe
from cordillera.serving.ranking.scorer import RowScorer
from cordillera.training.ranking.teachers.augmentation import AugmentationConfig
from cordillera.workflows.prediction import open_scorer

TASK, SCORE = "label", "teacher_label"
STREAMS = {
    "drama": ("Drama",),
    "action": ("Action", "Adventure", "Sci-Fi", "Thriller"),
    "comedy": ("Comedy", "Romance", "Children's", "Musical"),
}
WINDOW_S, DELAY_S = 60, 60  # users of MovieLens rate dozens of films in one sitting
OF_ITEM_AND_USER = ("user_id", "item_id", "age_bucket", "gender", "occupation", "release_year", "hour", "weekday")
_DRIFT_ROWS, _DRIFT_FIELDS, _DRIFT_IDS = 60_000, 12, 20


@dataclass(frozen=True)
class Students:
    """Samples of students with a teacher's logits.

    Attributes:
        path: Parquet file; ``teacher_label`` holds the logits.
        schema: Columns of the students.
        split: Split of the file, as in ``data.split``.
        fractions: Shares of the splits.
        progressive: Whether students learn from a stream, in one pass.
        epochs: Number of passes.
    """

    path: Path
    schema: dict[str, Any]
    split: str
    fractions: tuple[float, float, float]
    progressive: bool
    epochs: int = 1

    def recipe(
        self, seed: int, teacher: dict[str, Any] | None = None, *, quick: bool = False, path: Path | None = None
    ) -> RankingRecipe:
        """Return the recipe of a student.

        Args:
            teacher: Keys of ``[training.teacher]``; None for a student without a teacher.
            path: Samples to take in place of the own ones.
        """
        schema = dict(self.schema)
        if teacher is not None:
            schema["teacher"] = {"scores": {TASK: SCORE}}
        content = {
            "name": "student",
            "seed": seed,
            "threads": 1,
            "data": {
                "path": str(path or self.path),
                "schema": schema,
                "split": self.split,
                "fractions": self.fractions,
                "batch_size": 128,
                "shuffle": "none" if self.progressive else "global",
            },
            "model": {"name": "dnn", "embedding_dim": 8, "mlp": [32, 16]},
            "tables": {"learning_rate": 0.05},
            "training": {
                "epochs": self.epochs,
                "learning_rate": 2e-3,
                "precision": "fp32",
                "decay": "none" if self.progressive else "linear",  # so that the last weights have settled
                "progressive": self.progressive,
                "progressive_window": 2_000,
                "teacher": teacher or {"head": "none"},
                "max_steps": 4 if quick else None,
            },
        }
        found = recipes.validate(content)
        assert isinstance(found, RankingRecipe)
        return found

    def with_offset(self, offset: float) -> Path:
        """Return the samples with all of the teacher's logits off by a number."""
        path = self.path.with_name(f"{self.path.stem}-off-{offset:g}.parquet")
        if not path.exists():
            frame = pl.read_parquet(self.path, glob=False).with_columns(pl.col(SCORE) + offset)
            beside = path.with_suffix(".tmp")
            frame.write_parquet(beside)
            beside.rename(path)
        return path


def _folder() -> Path:
    found = cache_folder(None) / "prepared" / "exfm"
    found.mkdir(parents=True, exist_ok=True)
    return found


def score_rows(run: Path, frame: pl.DataFrame) -> NDArray[np.float64]:
    """Return the logits ``[N]`` of a run of one task for the rows of a frame."""
    scorer: RowScorer = open_scorer(run)
    encoder: Encoder = scorer.encoder
    logits: NDArray[np.float64] = scorer.logits(encoder.encode(frame, labels=False))[:, 0]
    return logits


@cache
def adult(quick: bool) -> Students:
    """Return the students of Adult: 40 % of the people; another 60 % taught the teacher, which sees all features."""
    log = open_log(DataConfig.model_validate({"dataset": "adult"}))
    frame = pl.concat([part for part, _ in log.chunks()]).rename({"income": TASK})
    order = np.random.default_rng(0).permutation(len(frame))
    frame = frame[order[:2_000]] if quick else frame[order]
    schema = log.schema.model_copy(update={"labels": (TASK,), "segments": (), "ids": ()})
    content = schema.model_dump(mode="json", exclude_defaults=True)
    cut = round(0.6 * len(frame))
    folder = _folder() / f"adult-{len(frame)}"
    path = folder / "students.parquet"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        frame[:cut].write_parquet(folder / "teacher.parquet")
        run = _teacher_of_adult(folder / "teacher.parquet", content, quick)
        own = frame[cut:]
        own = own.with_columns(pl.Series(SCORE, score_rows(run, own)))
        own.write_parquet(folder / "students.tmp")
        (folder / "students.tmp").rename(path)
    return Students(path, content, "order", (0.5, 0.1, 0.4), progressive=False, epochs=3)


def _teacher_of_adult(path: Path, schema: dict[str, Any], quick: bool) -> Path:
    content = {
        "name": "teacher",
        "threads": 2,
        "data": {"path": str(path), "schema": schema, "split": "random", "fractions": (0.9, 0.1, 0.0)},
        "model": {"name": "dcn", "embedding_dim": 16, "mlp": [256, 128], "dropout": 0.2},
        "tables": {"learning_rate": 0.02},
        "training": {"epochs": 1 if quick else 20, "patience": 3, "precision": "fp32", "weight_decay": 0.01},
    }
    recipe = recipes.validate(content)
    assert isinstance(recipe, RankingRecipe)
    run = path.parent / "teacher"
    shutil.rmtree(run, ignore_errors=True)
    workflows.train(recipe, run)
    return run


def movielens_frame() -> tuple[pl.DataFrame, Schema]:
    """Return all ratings with what was known before each, an id each, and their schema."""
    log = open_log(DataConfig.model_validate({"dataset": "movielens-100k"}))
    frame = pl.concat([part for part, _ in log.chunks()]).rename({"like": TASK})
    return frame.with_columns(id=pl.format("{}-{}", "user_id", "item_id")), log.schema


def write_streams(folder: Path, rows: int | None = None) -> AugmentationConfig:
    """Write events and labels of the three streams of MovieLens, and return the settings of their augmentation.

    A film of several genres is in several streams. Labels come within a minute, not in the order of the events.
    """
    frame, schema = movielens_frame()
    frame = frame if rows is None else frame.head(rows)
    delays = np.random.default_rng(0).integers(0, DELAY_S, len(frame))
    frame = frame.with_columns(label_time=pl.col("timestamp") + pl.Series(delays))
    streams: dict[str, Any] = {}
    for name, genres in STREAMS.items():
        own = frame.filter(pl.any_horizontal(pl.col("genres").str.contains(one, literal=True) for one in genres))
        own.drop(TASK, "label_time").write_parquet(folder / f"{name}-events.parquet")
        labels = own.select("id", pl.col("label_time").alias("timestamp"), TASK)
        labels.sort("timestamp", maintain_order=True).write_parquet(folder / f"{name}-labels.parquet")
        paths = {kind: str(folder / f"{name}-{kind}.parquet") for kind in ("events", "labels")}
        streams[name] = paths
    content = schema.model_dump(mode="json", exclude_defaults=True)
    hashed = {"encoding": "hash", "min_count": 1}
    for feature in (*content["categorical"], *content["lists"]):
        if feature["name"] == "user_id":
            feature |= {**hashed, "num_embeddings": 4_000}
        elif feature.get("table") == "item_id":
            feature |= {**hashed, "num_embeddings": 8_000}
    content |= {"labels": [TASK], "ids": ["id"], "segments": []}
    return AugmentationConfig.model_validate(
        {
            "out": str(folder / "augmented"),
            "schema": content,
            "join": {"window_s": WINDOW_S},
            "streams": streams,
            "past": {"events": 50},
            "teacher": {
                "publish_every": 5_000 if rows is None else 300,
                "batch_size": 256,
                "learning_rate": 2e-3,
                "model": {"name": "dnn", "embedding_dim": 16, "mlp": [256, 64, 32]},
                "tables": {"learning_rate": 0.05},
            },
        }
    )


@cache
def movielens(quick: bool) -> Students:
    """Return the students of the stream of dramas; their teacher learns from three streams before each rating."""
    folder = _folder() / ("movielens-quick" if quick else "movielens")
    path = folder / "students.parquet"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as place:
            workflows.augment(write_streams(Path(place), 5_000 if quick else None), finish=True)
            frame = pl.read_parquet(f"{place}/augmented/drama/*.parquet")
        frame = frame.filter(pl.col(SCORE).is_not_null())
        frame.write_parquet(folder / "students.tmp")
        (folder / "students.tmp").rename(path)
    content = movielens_frame()[1].model_dump(mode="json", exclude_defaults=True)
    schema = {
        "dense": content["dense"],
        "categorical": [_hashed(one) for one in content["categorical"] if one["name"] in OF_ITEM_AND_USER],
        "lists": [one for one in content["lists"] if one["name"] == "genres"],
        "labels": [TASK],
        "timestamp": "timestamp",
        "group": "user_id",
    }
    return Students(path, schema, "time", (0.8, 0.1, 0.1), progressive=True)


def _hashed(feature: dict[str, Any]) -> dict[str, Any]:
    sizes = {"user_id": 4_000, "item_id": 8_000}
    if feature["name"] not in sizes:
        return feature
    return {"name": feature["name"], "encoding": "hash", "num_embeddings": sizes[feature["name"]]}


def drifting(seed: int, lag: float, quick: bool = False) -> Students:
    """Write a stream whose truth turns with time, and the logits of a teacher that knows the truth of some time ago.

    Every id of every field has two numbers, of which the logit takes a mixture that turns by half a circle over the
    stream; the base rate rises and falls. The teacher is exact but for its lag.

    Args:
        seed: Seed of the numbers and of the rows.
        lag: Share of the stream by which the teacher is late.
    """
    rows = 2_000 if quick else _DRIFT_ROWS
    path = _folder() / f"drift-{rows}-{lag:g}-{seed}.parquet"
    names = [f"C{field}" for field in range(_DRIFT_FIELDS)]
    schema = {
        "categorical": [{"name": name, "encoding": "identity", "num_embeddings": _DRIFT_IDS} for name in names],
        "labels": [TASK],
        "timestamp": "timestamp",
    }
    if not path.exists():
        random = np.random.default_rng([seed, 1])
        values = random.standard_normal((2, _DRIFT_FIELDS, _DRIFT_IDS)) / np.sqrt(_DRIFT_FIELDS / 2)
        ids = random.integers(0, _DRIFT_IDS, (rows, _DRIFT_FIELDS))
        parts = values[:, np.arange(_DRIFT_FIELDS), ids].sum(-1)  # [2, rows]

        def truth(time: NDArray[np.float64]) -> NDArray[np.float64]:
            angle = np.pi * time
            base = -1.0 + 0.8 * np.sin(4 * np.pi * time)
            found: NDArray[np.float64] = base + np.cos(angle) * parts[0] + np.sin(angle) * parts[1]
            return found

        time = np.arange(rows) / rows
        clicks = random.random(rows) < 1 / (1 + np.exp(-truth(time)))
        columns: dict[str, Any] = {name: ids[:, field] for field, name in enumerate(names)}
        columns |= {"timestamp": np.arange(rows), TASK: clicks.astype(np.uint8), SCORE: truth(time - lag)}
        pl.DataFrame(columns).write_parquet(path)
    return Students(path, schema, "time", (0.8, 0.1, 0.1), progressive=True)
