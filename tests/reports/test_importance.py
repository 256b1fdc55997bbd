"""Importance of features, beside scores of frames whose columns were permuted, and its section of the report."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import polars as pl
import pytest

import cordillera
from cordillera import workflows
from cordillera.errors import CordilleraError, DataError, RunError
from cordillera.recipe import load
from cordillera.run import Run
from tests.cli.conftest import RECIPE, write_log


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on a log in which only the device tells something."""
    folder = tmp_path_factory.mktemp("importance")
    path = folder / "small.toml"
    path.write_text(RECIPE.format(path=write_log(folder / "log.csv", rows=2000)))
    common = ["training.epochs=4", "training.precision='fp32'", "threads=1", f"data.cache_dir={folder / 'cache'}"]
    return workflows.train(load(path, common), folder / "run").run.folder


def ne_of(scores: np.ndarray, labels: np.ndarray) -> float:
    loss = -np.mean(np.where(labels == 1, np.log(scores), np.log1p(-scores)))
    rate = labels.mean()
    return float(loss / -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate)))


def test_it_is_the_rise_of_ne_of_permuted_columns(trained: Path) -> None:
    found = {one.feature: one for one in workflows.importance(trained, repeats=3, seed=4)}
    assert list(found) == sorted(found, key=lambda name: -found[name].ne)
    assert next(iter(found)) == "device"
    assert found["device"].low > 0.01 > abs(found["user"].ne)
    model, log = cordillera.load_model(trained), pl.read_csv(trained.parent / "log.csv")[1800:]
    labels, draw = log["click"].to_numpy(), np.random.default_rng(4)
    base = ne_of(model.predict(log), labels)
    draw.permutation(len(log))  # the samples, all of them
    for name in ("price", "user", "device", "seen"):
        rises = []
        for _ in range(3):
            order = draw.permutation(len(log))
            rises.append(ne_of(model.predict(log.with_columns(log[name][order.tolist()])), labels) - base)
        assert found[name].ne == pytest.approx(np.mean(rises), abs=1e-5), name
        half = 4.302652729911275 * np.std(rises, ddof=1) / 3**0.5
        assert found[name].high - found[name].ne == pytest.approx(half, abs=1e-5)
    content = Run(trained).read_json("importance.json")
    assert content["rows"] == 200
    assert content["ne"]["click"] == pytest.approx(base, abs=1e-5)


def test_the_report_shows_it_and_names_a_damaged_file(trained: Path) -> None:
    workflows.importance(trained, repeats=2, rows=100)
    page = (trained / "report.html").read_text()
    assert "Importance of features" in page
    assert "Rise of the NE of 100 samples of the test split" in page
    section = page[page.index("Importance of features") :]
    assert section.index("device") < section.index("user")
    step = Run(trained).read_json("evaluation.json")["step"]
    assert f"Weights of step {step:,}." in section
    content = Run(trained).read_json("importance.json")
    for measured, said in ((1, f"Weights of step 1; the results above are of step {step:,}"), (None, "")):
        Run(trained).write_json("importance.json", content | {"step": measured})
        page = workflows.report(trained).read_text()
        assert said in page
        assert ("Weights of step" in page) == bool(said)
    Run(trained).write_json("importance.json", {"split": "test"})
    with pytest.raises(DataError, match="is not an importance of features"):
        workflows.report(trained)
    (trained / "importance.json").unlink()
    workflows.report(trained)
    assert "Importance of features" not in (trained / "report.html").read_text()


def test_what_cannot_be_measured_is_refused(trained: Path) -> None:
    cases: list[tuple[dict[str, object], type[CordilleraError], str]] = [
        ({"split": "tset"}, RunError, "split: must be one of train"),
        ({"repeats": 1}, DataError, "must be at least 2"),
        ({"rows": 0}, DataError, "must be at least 1"),
    ]
    for changes, kind, why in cases:
        with pytest.raises(kind, match=why):
            workflows.importance(trained, **changes)  # type: ignore[arg-type]
