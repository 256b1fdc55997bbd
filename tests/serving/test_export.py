"""An exported model scores raw ids as ``predict`` does, in a process that cannot import this library."""

from __future__ import annotations

import contextlib
import json
import math
import random
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

import cordillera
from cordillera import workflows
from cordillera.errors import DependencyError, RunError
from cordillera.recipe import load, validate
from cordillera.serving.ranking import export, standalone
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


def scores_of(program: str, folder: Path, place: Path) -> list[list[float]]:
    """Scores of the rows in ``place/rows.json`` by a process that cannot import this library."""
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder), str(place / "rows.json")],
        capture_output=True, text=True, timeout=300, cwd=place,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    scores: list[list[float]] = json.loads(done.stdout.splitlines()[-1])
    return scores


@pytest.fixture(scope="module")
def bought(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run of one task of the two, and its export."""
    run = train(tmp_path_factory.mktemp("bought"), {"name": "dcn", "mlp": [8]}, tasks=("buy",))
    return run, workflows.export(run, run.parent / "there" / "model")


@pytest.mark.cases(2)
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
    operations = set(re.findall(rb"torch\.ops\.(\w+)", (folder / "model.pt2").read_bytes()))
    assert {b"aten"} <= operations <= {b"aten", b"higher_order"}  # of torch alone


@pytest.mark.slow
def test_a_process_without_this_library_scores(bought: tuple[Path, Path], tmp_path: Path) -> None:
    run, folder = bought
    rows = log_of(tmp_path / "other.parquet", rows=30, seed=4)
    (tmp_path / "rows.json").write_text(json.dumps(rows.to_dicts()))
    found = np.array(scores_of(ALONE, folder, tmp_path))
    assert np.abs(found[:, 0] - cordillera.load_model(run).predict(rows)).max() <= 1e-6


@pytest.mark.slow
def test_bfloat16_is_exported_as_it_is(tmp_path: Path) -> None:
    run = train(tmp_path, {"name": "dcn", "mlp": [8]}, "bf16")
    rows = log_of(tmp_path / "other.parquet", rows=60, seed=5)
    found = np.array(Scorer(cordillera.export(run)).predict(rows.to_dicts()))
    assert np.abs(found - cordillera.load_model(run).predict(rows)).max() <= 4e-3  # a step of bfloat16


def test_values_that_training_refuses_are_refused(bought: tuple[Path, Path], tmp_path: Path) -> None:
    one, row = Scorer(bought[1]), log_of(tmp_path / "other.parquet", rows=1, seed=6).to_dicts()[0]
    assert len(one.predict([{**row, "plain": math.nan}])) == 1  # nan = "missing"
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"long": math.inf}, "long: inf is infinite"),
        ({"long": math.nan}, "long: NaN"),
        ({"raw": None}, "raw: is blank"),
        ({"pair": [1.0]}, "pair: 1 numbers, 2 are expected"),
        ({"slot": 5}, "slot: 5 is no id from 0 to 4"),
        ({"slot": None}, "slot: None is no id"),
        ({"user": 1.5}, "user: 1.5 is not an id"),
        ({"long": "12.5"}, "long: must be a number, got text; write numbers without quotation marks"),
        ({"long": True}, "long: must be a number, got a truth value"),
        ({"long": [1.0]}, "long: must be a number, got list"),
        ({"pair": [1.0, "2"]}, "pair: must be a number, got text"),
        ({"pair": 1.0}, "pair: 1 numbers, 2 are expected"),
        ({"long": 10**400}, "long: must be a number that fits into 64 bits"),
        ({"tags": 5}, "tags: must be a list of ids, got int"),
        ({"raw": 1e300}, "row 0: the score is NaN"),
    ]
    for change, why in wrong:
        with pytest.raises(ValueError, match=why):
            one.predict([{**row, **change}])
    with pytest.raises(ValueError, match="row 1 must be a dict, got int"):
        one.predict([row, 5])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="row 1 has no 'word'; give every column, None for a blank"):
        one.predict([row, {key: value for key, value in row.items() if key != "word"}])


def test_a_run_in_an_emulated_format_is_not_exported(bought: tuple[Path, Path], tmp_path: Path) -> None:
    run = Path(shutil.copytree(bought[0], tmp_path / "run"))
    recipe = (run / "recipe.toml").read_text()
    (run / "recipe.toml").write_text(recipe + "\n[training.emulate]\nformat = 'bf16'\n")
    with pytest.raises(RunError, match="computes in an emulated format"):
        cordillera.export(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_damaged_export_is_refused_by_name(bought: tuple[Path, Path], tmp_path: Path) -> None:
    folder, draw = shutil.copytree(bought[1], tmp_path / "model"), random.Random(1)
    for name in ("schema.json", "model.pt2"):
        content = (folder / name).read_bytes()
        places = draw.sample(range(len(content)), 30)
        flipped = [content[:at] + bytes([content[at] ^ 1 << at % 8]) + content[at + 1 :] for at in places]
        damaged = [*flipped, content[:1000], content[:-2], b"", b"[]", content * 2]
        for change in damaged:
            (folder / name).write_bytes(change)
            with contextlib.suppress(ValueError):
                if json.loads(change) == json.loads(content):  # a flipped space
                    continue
            with pytest.raises(ValueError, match=name.replace(".", r"\.")):
                Scorer(folder)
        (folder / name).write_bytes(content)
    Scorer(folder, "./model.pt2")
    with pytest.raises((ValueError, OSError)):
        Scorer(folder, "model.onnx")
    (folder / "model.pt2").write_bytes(content + b" ")
    with pytest.raises(ValueError, match=r"model\.pt2 is damaged or of another export"):
        Scorer(folder)


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "tables", [{"rows": "int8"}, {"rows": "int4", "cache": 0.2}, {"storage": "file", "cache": 0.2}]
)
def test_tables_in_few_bits_or_in_a_file_are_exported(tmp_path: Path, tables: dict[str, Any]) -> None:
    path = tmp_path / "small.toml"
    path.write_text(RECIPE.format(path=write_log(tmp_path / "log.csv", rows=300)))
    keys = {"training.max_steps": 4, "training.precision": "fp32", "data.cache_dir": str(tmp_path / "cache")}
    recipe = load(path, keys | {f"tables.{key}": value for key, value in tables.items()})
    run = workflows.train(recipe, tmp_path / "run").run
    rows = pl.read_csv(tmp_path / "log.csv").head(50)
    found = np.array(Scorer(cordillera.export(run)).predict(rows.to_dicts()))
    assert np.abs(found[:, 0] - cordillera.load_model(run).predict(rows)).max() <= 1e-6


HISTORIES: dict[str, dict[str, Any]] = {
    "target-attention": {},
    "hstu": {},
    "hstu with a window": {"window": 2, "positions": 3, "blocks": 3},
}
"""Models of histories, by what is set."""


@pytest.mark.slow
@pytest.mark.parametrize("name", HISTORIES)
def test_models_of_histories_score_as_predict(tmp_path: Path, name: str) -> None:
    histories = {"sequences": ["seen"], "candidate": "user", "embedding_dim": 4, "mlp": [8]}
    run = train(tmp_path, {"name": name.partition(" ")[0], **histories, **HISTORIES[name]})
    one, rows = Scorer(cordillera.export(run)), log_of(tmp_path / "other.parquet", rows=120, seed=3)
    expected, found = cordillera.load_model(run).predict(rows), np.array(one.predict(rows.to_dicts()))
    assert rows["seen"].null_count()
    assert np.abs(found - expected).max() <= 1e-6
    assert np.abs(np.array(one.predict(rows.to_dicts()[:1])) - expected[:1]).max() <= 1e-6
    shuffled = [{**row, "seen": None if row["seen"] is None else "|".join(sorted(row["seen"].split("|"), reverse=True))}
                for row in rows.to_dicts()]  # fmt: skip
    assert np.abs(np.array(one.predict(shuffled)) - expected).max() > 1e-6  # their order matters


@pytest.mark.slow
def test_dynamic_tables_are_exported_with_their_ids(tmp_path: Path) -> None:
    log_of(tmp_path / "log.parquet")
    any_id = [{"name": "user", "min_count": 2}, {"name": "word"}, {"name": "hashed", "encoding": "hash"},
              {"name": "slot", "encoding": "identity"}]  # fmt: skip
    recipe = validate(
        {
            "data": {
                "path": str(tmp_path / "log.parquet"), "batch_size": 50, "cache_dir": str(tmp_path / "cache"),
                "schema": {**SCHEMA, "categorical": any_id},
            },
            "model": {"name": "dcn", "mlp": [8], "embedding_init": 0.05},
            "training": {"epochs": 2, "precision": "fp32", "learning_rate": 0.01},
            "tables": {"learning_rate": 0.1, "dynamic": {"min_count": 2, "max_age": 3, "evict_every": 2}},
        }
    )  # fmt: skip
    run = workflows.train(recipe, tmp_path / "run").run
    rows = log_of(tmp_path / "other.parquet", rows=120, seed=3)
    one, expected = Scorer(cordillera.export(run)), cordillera.load_model(run).predict(rows)
    assert np.abs(np.array(one.predict(rows.to_dicts())) - expected).max() <= 1e-6
    kept = one.schema["ids"]["hashed"]
    assert kept
    assert any(one > 2**40 for one in kept)  # hashes of 63 bits
    new = [{**row, "hashed": f"new {number}"} for number, row in enumerate(rows.to_dicts()[:9])]
    found = cordillera.load_model(run).predict(pl.DataFrame(new, schema=rows.schema))
    assert np.abs(np.array(one.predict(new)) - found).max() <= 1e-6


@pytest.mark.slow
def test_a_compiled_package_scores_as_the_program(tmp_path: Path) -> None:
    run = train(tmp_path, {"name": "dcn", "mlp": [8]})
    folder = workflows.export(run, compiled=True)
    rows = log_of(tmp_path / "other.parquet", rows=20, seed=7).to_dicts()
    expected, found = (Scorer(folder, name).predict(rows) for name in ("model.pt2", "model-compiled.pt2"))
    assert np.abs(np.array(found) - np.array(expected)).max() <= 1e-6


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name if name in ("dcn", "mmoe") else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]
)
def test_every_model_scores_as_predict_by_onnx(tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str) -> None:
    pytest.importorskip("onnxscript", reason="the exporter of ONNX is not installed")
    pytest.importorskip("onnxruntime", reason="ONNX Runtime is not installed")
    run = train(tmp_path, {"name": name, **MODELS[name]})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        folder = workflows.export(run, onnx=True)
    assert capfd.readouterr() == ("", "")
    assert sorted(path.name for path in folder.iterdir()) == ["model.onnx", "model.pt2", "schema.json", "score.py"]
    rows = log_of(tmp_path / "other.parquet", rows=120, seed=3)
    expected = cordillera.load_model(run).predict(rows)
    one = Scorer(folder, "model.onnx")
    assert np.abs(np.array(one.predict(rows.to_dicts())) - expected).max() <= 1e-6
    assert np.abs(np.array(one.predict(rows.to_dicts()[:1])) - expected[:1]).max() <= 1e-6
    assert one.predict([]) == []


@pytest.mark.slow
def test_onnx_without_torch(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript", reason="the exporter of ONNX is not installed")
    pytest.importorskip("onnxruntime", reason="ONNX Runtime is not installed")
    run = train(tmp_path, {"name": "dcn", "mlp": [8]}, "bf16")
    rows = log_of(tmp_path / "other.parquet", rows=30, seed=4)
    (tmp_path / "rows.json").write_text(json.dumps(rows.to_dicts()))
    folder = workflows.export(run, onnx=True)
    text = ALONE.replace('"pydantic")', '"pydantic", "torch")').replace(
        "(sys.argv[1]).", '(sys.argv[1], "model.onnx").'
    )
    found = np.array(scores_of(text, folder, tmp_path))
    assert np.abs(found - cordillera.load_model(run).predict(rows)).max() <= 4e-3  # a step of bfloat16


def test_without_the_exporter_onnx_is_refused(bought: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    run, _ = bought
    monkeypatch.setattr(export, "find_spec", lambda name: None)
    with pytest.raises(DependencyError, match="onnx: the exporter of ONNX is not installed"):
        workflows.export(run, onnx=True)
    assert not (run / "export").exists()


def test_the_scorer_imports_nothing_until_it_loads_a_program() -> None:
    lines = Path(standalone.__file__).read_text().splitlines()
    imports = {line.split()[1].split(".")[0] for line in lines if line.startswith(("import ", "from "))}
    assert imports == {"__future__", "hashlib", "json", "math", "collections", "pathlib", "typing"}
