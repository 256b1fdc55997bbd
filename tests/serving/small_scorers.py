"""Rows of every kind of feature, an encoder fitted on them, and scorers of small models with random weights."""

from __future__ import annotations

import random
from typing import Any

import polars as pl
import torch

from cordillera.data.ranking.encoding import Encoder
from cordillera.data.ranking.features import Schema
from cordillera.embeddings.tables import TablesConfig
from cordillera.models.ranking import MODELS, build
from cordillera.numerics.formats.precision import Precision
from cordillera.serving.ranking.scorer import RowScorer

SCHEMA = Schema.model_validate(
    {
        "dense": [
            {"name": "price"},
            {"name": "age", "transform": "standardise", "missing": "refuse"},
            {"name": "rank", "transform": "quantile", "missing": "zero"},
        ],
        "categorical": [
            {"name": "user"},
            {"name": "item", "table": "items"},
            {"name": "device", "encoding": "hash", "num_embeddings": 50},
            {"name": "slot", "encoding": "identity", "num_embeddings": 8},
        ],
        "lists": [{"name": "seen", "table": "items", "max_length": 20}, {"name": "tags"}],
        "labels": ["click"],
    }
)
SIZES: dict[str, dict[str, Any]] = {
    "lr": {},
    "fm": {"embedding_dim": 5},
    "dnn": {"mlp": (33, 17)},
    "dlrm": {"embedding_dim": 10, "bottom_mlp": (33,), "top_mlp": (65, 7)},
    "dcn": {"embedding_dim": 7, "mlp": (33,), "cross_layers": 2},
    "dhen": {
        "embedding_dim": 10, "embeddings": 3, "module_mlp": (9,), "top_mlp": (33,), "dense_mlp": (7,),
        "modules": ("linear", "dot", "attention", "cross", "convolution", "mlp", "fm"),
    },
    "wukong": {"embedding_dim": 10, "fmb_mlp": (33,), "top_mlp": (17,)},
    "rankmixer": {"embedding_dim": 9, "tokens": 3, "width": 6, "expansion": 2},
    "target-attention": {"sequences": ("seen",), "candidate": "item", "embedding_dim": 65, "mlp": (33,)},
    "hstu": {"sequences": ("seen",), "candidate": "item", "embedding_dim": 65, "mlp": (33,)},
}  # fmt: skip


def row(generator: random.Random) -> dict[str, Any]:
    """A row as a JSON object, with blanks and ids that are in no vocabulary."""
    seen = [generator.randrange(45) for _ in range(generator.randrange(12))]
    return {
        "price": None if generator.random() < 0.1 else generator.lognormvariate(2, 2),
        "age": generator.uniform(10, 90),
        "rank": generator.gauss(0, 3),
        "user": f"u{generator.randrange(60)}",
        "item": generator.randrange(45),
        "device": generator.choice(["phone", "tablet", "", "a television"]),
        "slot": generator.randrange(8),
        "seen": seen,
        "tags": [generator.choice("abcdefgh") for _ in range(generator.randrange(3))],
        "click": generator.randrange(2),
    }


def rows(count: int, seed: int = 0) -> list[dict[str, Any]]:
    generator = random.Random(seed)
    return [row(generator) for _ in range(count)]


def frame_of(found: list[dict[str, Any]]) -> pl.DataFrame:
    return pl.DataFrame(found, infer_schema_length=None)


def encoder(tasks: tuple[str, ...] = ("click",)) -> Encoder:
    """Fitted on rows of fewer users and items than there are."""
    known = [one for one in rows(300, seed=1) if int(one["user"][1:]) < 50 and one["item"] < 40]
    schema = SCHEMA.model_copy(update={"labels": tasks})
    return Encoder.fit(schema, [frame_of(known)])


def scorer(
    name: str, precision: Precision = "fp32", tasks: tuple[str, ...] = ("click",), seed: int = 0, **sizes: Any
) -> RowScorer:
    """A scorer of random weights that are large enough for scores to differ."""
    fitted = encoder(tasks)
    torch.manual_seed(seed)
    model = build(MODELS[name].Config(**{**SIZES[name], **sizes}), fitted.features, TablesConfig())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return RowScorer(fitted, model.eval(), tasks, torch.device("cpu"), precision)
