"""NDCG, recall and MRR of groups go from the recipe to what commands print and write, and may end a training."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .conftest import RECIPE, write_log


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(RECIPE.format(path=write_log(tmp_path / "log.csv", rows=2000)))
    return path


def test_the_first_of_each_group_are_printed_recorded_and_reported(cli, recipe, tmp_path):
    run = tmp_path / "run"
    options = ("training.ranking_k=3", "training.stop_on=ndcg", "training.patience=2", "training.epochs=40")
    trained = cli("train", recipe, "--run", run, *(part for one in options for part in ("--set", one)))
    assert trained.code == 0, trained.err
    assert "the top 3 of each group by score" in trained.out
    lines = [line for line in trained.out.splitlines()[:6] if not line.startswith("data: ")]
    assert max(map(len, lines)) <= 80
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = [one["tasks"]["click"] for one in records if one["kind"] == "evaluation"]
    best = max(range(len(found)), key=lambda place: found[place]["ndcg"])
    assert len(found) == best + 3 < 40
    written = json.loads((run / "evaluation.json").read_text())["tasks"]["click"]
    assert (written["metrics"]["ranking_k"], written["metrics"]["ranking_groups"] > 20) == (3.0, True)
    assert {"ndcg", "recall", "mrr"} <= written["intervals"].keys()
    assert f"NDCG {written['metrics']['ndcg']:.4f}" in (run / "report.html").read_text()
    printed = cli("evaluate", run, "--json")
    assert json.loads(printed.out)["tasks"]["click"]["metrics"] == written["metrics"]
    table = cli("evaluate", run, "--file", tmp_path / "log.csv").out
    assert ["task", "NDCG@3", "recall@3", "MRR@3", "groups", "without", "a", "positive"] in [
        line.split() for line in table.splitlines()
    ]


def test_data_without_groups_has_no_such_table_and_refuses_to_stop_on_their_metrics(cli, recipe, tmp_path):
    recipe.write_text(recipe.read_text().replace('group = "user"\n', ""))
    trained = cli("train", recipe, "--run", tmp_path / "run", "--set", "training.epochs=1")
    assert (trained.code, "NDCG" in trained.out) == (0, False)
    assert "NDCG" not in (tmp_path / "run" / "report.html").read_text()
    for metric in ("gauc", "ndcg", "recall", "mrr"):
        refused = cli("train", recipe, "--run", tmp_path / metric, "--set", f"training.stop_on={metric}")
        assert refused.code != 0
        assert f"training.stop_on: {metric} is of groups, and the data has none" in refused.err
    wrong = cli("train", recipe, "--run", tmp_path / "wrong", "--set", "training.stop_on=calibration")
    assert "training.stop_on" in wrong.err
