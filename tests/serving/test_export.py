"""An exported model scores raw ids as ``predict`` does, in a process that cannot import this library."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

import cordillera
from cordillera import workflows
from cordillera.errors import RunError
from cordillera.recipe import load, validate
from cordillera.serving.ranking import standalone
from cordillera.serving.ranking.standalone import Scorer
from tests.cli.conftest import RECIPE, write_log

ALONE = """
import importlib.abc, json, sys

class Block(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("cordillera", "polars", "pyarrow", "numba", "pydantic"):
            raise ImportError(name + " is blocked")

sys.meta_path.insert(0, Block())
sys.path.insert(0, sys.argv[1])
import score
rows = json.load(open(sys.argv[2]))
print(json.dumps(score.Scorer(sys.argv[1]).predict(rows)))
"""

MODELS: dict[str, dict[str, Any]] = {
    "lr": {},
    "fm": {"embedding_dim": 4},
    "dnn": {"mlp": [8]},
    "dlrm": {"bottom_mlp": [8], "top_mlp": [8]},
    "dcn": {"mlp": [8]},
    "dhen": {"embeddings": 4, "top_mlp": [8]},
    "wukong": {"fmb_embeddings": 2, "lcb_embeddings": 2, "rank": 2, "fmb_mlp": [8], "top_mlp": [8]},
    "rankmixer": {},
    "mmoe": {},
    "ple": {},
    "graph": {},
}
"""Models that are exported, small."""


def log_of(path: Path, rows: int = 400, seed: int = 0) -> pl.DataFrame:
    """A log with every kind of feature, and blanks of all of them."""
    draw = np.random.default_rng(seed)

    def holes(values: list[Any]) -> list[Any]:
        return [None if one < 0.1 else value for one, value in zip(draw.random(rows), values, strict=True)]

    frame = pl.DataFrame(
        {
            "long": holes(draw.lognormal(0, 2, rows).tolist()),
            "plain": holes(draw.normal(5, 3, rows).tolist()),
            "ranked": holes(draw.normal(0, 1, rows).tolist()),
            "raw": draw.random(rows),
            "pair": [draw.random(2).tolist() for _ in range(rows)],
            "user": holes(draw.integers(0, 40, rows).tolist()),
            "word": holes(draw.choice(["ä", "b", "42.0", "007"], rows).tolist()),
            "hashed": holes([f"h{one}" for one in draw.integers(0, 500, rows)]),
            "slot": draw.integers(0, 5, rows),
            "seen": holes(["|".join(map(str, draw.integers(0, 40, draw.integers(0, 9)))) for _ in range(rows)]),
            "tags": [[f"t{one}" for one in draw.integers(0, 9, draw.integers(0, 4))] for _ in range(rows)],
            "click": draw.integers(0, 2, rows),
            "buy": draw.integers(0, 2, rows),
        }
    )
    frame.write_parquet(path)
    return frame


SCHEMA: dict[str, Any] = {
    "labels": ["click", "buy"],
    "dense": [
        {"name": "long", "transform": "log"},
        {"name": "plain", "transform": "standardise", "nan": "missing"},
        {"name": "ranked", "transform": "quantile"},
        {"name": "raw", "transform": "none", "missing": "refuse"},
        {"name": "pair", "transform": "standardise", "width": 2},
    ],
    "categorical": [
        {"name": "user", "min_count": 2},
        {"name": "word"},
        {"name": "hashed", "encoding": "hash", "num_embeddings": 50},
        {"name": "slot", "encoding": "identity", "num_embeddings": 5},
    ],
    "lists": [
        {"name": "seen", "table": "user", "min_count": 2, "max_length": 5},
        {"name": "tags", "pooling": "sum"},
    ],
}


def train(folder: Path, model: dict[str, Any], precision: str = "fp32", **data: Any) -> Path:
    log_of(folder / "log.parquet")
    recipe = validate(
        {
            "data": {
                "path": str(folder / "log.parquet"), "batch_size": 50, "cache_dir": str(folder / "cache"),
                "schema": SCHEMA, **data,
            },
            "model": model,
            "training": {"epochs": 2, "precision": precision, "learning_rate": 0.01},
            "tables": {"learning_rate": 0.1},
        }
    )  # fmt: skip
    return workflows.train(recipe, folder / "run").run.folder


@pytest.mark.parametrize("name", MODELS)
def test_every_model_scores_as_predict(tmp_path: Path, name: str) -> None:
    run = train(tmp_path, {"name": name, **MODELS[name]})
    folder = cordillera.export(run)
    assert sorted(path.name for path in folder.iterdir()) == ["model.pt2", "schema.json", "score.py"]
    rows = log_of(tmp_path / "other.parquet", rows=120, seed=3)
    expected = cordillera.load_model(run).predict(rows)
    one = Scorer(folder)
    assert one.tasks == ["click", "buy"]
    found = np.array(one.predict(rows.to_dicts()))
    assert np.abs(found - expected).max() <= 1e-6
    assert expected.std() > 1e-3
    some = rows.to_dicts()[:1]
    assert np.abs(np.array(one.predict(some)) - expected[:1]).max() <= 1e-6
    assert one.predict([]) == []


def test_a_process_without_this_library_scores(tmp_path: Path) -> None:
    run = train(tmp_path, {"name": "dcn", "mlp": [8]}, tasks=("buy",))
    folder = workflows.export(run, tmp_path / "there" / "model")
    rows = log_of(tmp_path / "other.parquet", rows=30, seed=4)
    (tmp_path / "rows.json").write_text(json.dumps(rows.to_dicts()))
    done = subprocess.run(
        [sys.executable, "-c", ALONE, str(folder), str(tmp_path / "rows.json")],
        capture_output=True, text=True, timeout=300, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = np.array(json.loads(done.stdout.splitlines()[-1]))
    assert np.abs(found[:, 0] - cordillera.load_model(run).predict(rows)).max() <= 1e-6


def test_bfloat16_is_exported_as_it_is(tmp_path: Path) -> None:
    run = train(tmp_path, {"name": "dcn", "mlp": [8]}, "bf16")
    rows = log_of(tmp_path / "other.parquet", rows=60, seed=5)
    found = np.array(Scorer(cordillera.export(run)).predict(rows.to_dicts()))
    assert np.abs(found - cordillera.load_model(run).predict(rows)).max() <= 4e-3  # a step of bfloat16


def test_values_that_training_refuses_are_refused(tmp_path: Path) -> None:
    run = train(tmp_path, {"name": "lr"})
    one, row = Scorer(cordillera.export(run)), log_of(tmp_path / "other.parquet", rows=1, seed=6).to_dicts()[0]
    assert len(one.predict([{**row, "plain": math.nan}])) == 1  # nan = "missing"
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"long": math.inf}, "long: inf is infinite"),
        ({"long": math.nan}, "long: NaN"),
        ({"raw": None}, "raw: is blank"),
        ({"pair": [1.0]}, "pair: 1 numbers, 2 are expected"),
        ({"slot": 5}, "slot: 5 is no id from 0 to 4"),
        ({"slot": None}, "slot: None is no id"),
        ({"user": 1.5}, "user: 1.5 is not an id"),
    ]
    for change, why in wrong:
        with pytest.raises(ValueError, match=why):
            one.predict([{**row, **change}])
    with pytest.raises(KeyError, match="word"):
        one.predict([{key: value for key, value in row.items() if key != "word"}])


def test_what_cannot_be_exported_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "small.toml"
    path.write_text(RECIPE.format(path=write_log(tmp_path / "log.csv", rows=300)))
    common = ["training.max_steps=2", f"data.cache_dir={tmp_path / 'cache'}"]
    lists = "data.schema.lists=[{name='seen', table='user'}]"
    histories = [*common, lists, "model={name='hstu', sequences=['seen'], candidate='user', embedding_dim=4}"]
    run = workflows.train(load(path, histories), tmp_path / "histories").run
    with pytest.raises(RunError, match="reads histories in order"):
        workflows.export(run)
    few = workflows.train(load(path, [*common, "tables.rows='int8'"]), tmp_path / "few").run
    with pytest.raises(RunError, match="has tables in few bits"):
        workflows.export(few)
    assert not (run.folder / "export").exists()


@pytest.mark.slow
def test_a_compiled_package_scores_as_the_program(tmp_path: Path) -> None:
    run = train(tmp_path, {"name": "dcn", "mlp": [8]})
    folder = workflows.export(run, compiled=True)
    rows = log_of(tmp_path / "other.parquet", rows=20, seed=7).to_dicts()
    one = Scorer(folder)
    expected = one.predict(rows)
    one.program = torch._inductor.aoti_load_package(str(folder / "model-compiled.pt2"))
    assert np.abs(np.array(one.predict(rows)) - np.array(expected)).max() <= 1e-6


def test_the_scorer_imports_torch_only() -> None:
    lines = Path(standalone.__file__).read_text().splitlines()
    imports = {line.split()[1].split(".")[0] for line in lines if line.startswith(("import ", "from "))}
    assert imports == {"__future__", "json", "math", "collections", "pathlib", "typing", "torch"}
