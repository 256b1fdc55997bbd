"""``cordillera bench rankitect`` with few trials: every part runs and writes what the docs quote."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import rankitect
from _rankitect_fronts import compared
from _rankitect_table import SEARCHERS, read_table
from _results import RESULTS

from cordillera import recipe as recipes
from cordillera.workflows.architectures.trials import with_overrides
from tests.benchmarks.programs import part_of


@pytest.mark.slow
def test_a_table_has_the_ne_of_every_seed(tmp_path: Path) -> None:
    found = part_of(rankitect, "table", tmp_path)
    assert len(found["rows"]) == 4
    for genome, name, ne, flops, parameters in found["rows"]:
        assert len(genome) == 8
        assert len(name) == 16
        assert len(ne) == 2
        assert all(0.5 < one < 2 for one in ne)
        assert flops > 0
        assert parameters > 0


def test_the_committed_table_is_of_the_whole_space() -> None:
    found = read_table()
    names = {found.space.identify(genome) for genome in found.space.enumerate()}
    assert set(found.scores) == names
    assert len(names) >= 300
    assert all(math.isfinite(score.ne) and score.flops > 0 for score in found.scores.values())
    assert len(found.top) == round(len(names) / 100)


@pytest.mark.parametrize("searcher", ["evolution", "predictor"])
def test_searchers_beat_random_search_on_the_table(searcher: str) -> None:
    found, repeats = read_table(), 3
    expected = (len(found.scores) + 1) / (len(found.top) + 1)  # of random search without repetition
    counts = [found.until_top(searcher, seed)[0] for seed in range(repeats)]
    assert all(counts)
    assert sum(counts) / repeats < expected / 2


def test_searchers_are_judged_by_the_table(tmp_path: Path) -> None:
    found = part_of(rankitect, "searchers", tmp_path)
    assert [one["searcher"] for one in found["results"]] == list(SEARCHERS)
    for one in found["results"]:
        assert all(1 <= count <= found["architectures"] for count in one["evaluations"])
        regret = list(one["regret"].values())
        assert regret == sorted(regret, reverse=True)


@pytest.mark.slow
def test_shared_weights_are_compared_with_the_table(tmp_path: Path) -> None:
    found = part_of(rankitect, "shared", tmp_path)
    assert found["equal"]["equal"] == found["equal"]["compared"] > 0
    assert next(one["steps"] for one in found["results"]) == 0
    for one in found["results"]:
        assert -1 <= one["tau"] <= 1
        assert len(one["shared"]) == len(one["alone"]) == one["architectures"]


def test_hypervolumes_are_of_the_test_split() -> None:
    simple = {"flops": 100, "test": [0.9, 0.9]}
    large = {"flops": 10_000, "test": [0.8, 0.7]}
    better = {"flops": 1_000, "test": [0.7, 0.8]}
    found = compared([simple, large], [better], 1.0, 100_000)
    base = 0.1 * math.log(1_000) + 0.15 * math.log(10)  # of the mean, in NE times the logarithm of FLOPs
    assert found["found"]["ratio"] == pytest.approx(0.25 * math.log(100) / base)
    assert found["both"]["ratio"] == pytest.approx((0.1 * math.log(1_000) + 0.15 * math.log(100)) / base)
    assert found["both"]["of_seeds"][0] == pytest.approx(
        (0.1 * math.log(1_000) + 0.2 * math.log(100)) / (0.1 * math.log(1_000) + 0.1 * math.log(10))
    )
    nothing = compared([simple], [better], 0.9, 100_000)
    assert math.isnan(nothing["both"]["ratio"])


@pytest.mark.slow
def test_what_is_found_is_judged_beside_hand_made_models(tmp_path: Path) -> None:
    (found,) = part_of(rankitect, "fronts", tmp_path)["results"]
    for side in ("hand_made", "found"):
        flops = [one["flops"] for one in found[side]]
        assert flops == sorted(flops)
        chosen = [one for one in found[side] if one["chosen"]]
        means = [sum(one["validation"]) / len(one["validation"]) for one in chosen]
        assert means == sorted(means, reverse=True)
        assert chosen[0]["flops"] == flops[0]
        assert all(len(one["test"]) == 2 for one in found[side])
    assert [one["ne"] for one in found["hypervolume"]][1] == 1
    assert all(one["both"]["ratio"] is None or one["both"]["ratio"] >= 1 for one in found["hypervolume"])
    assert found["searches"]["found"]["trials"] == len(found["searches"]["found"]["rows"]) == 8


def test_the_shipped_graph_is_on_record() -> None:
    content = json.loads((RESULTS / "rankitect-fronts.json").read_text())
    record = next(one for one in content["results"] if one["data"] == "synthetic")
    shipped = recipes.load("synthetic-graph")
    found = [with_overrides(record["recipe"], one["overrides"]) for one in record["found"] if one["chosen"]]
    for section in ("data", "model", "tables", "training"):
        assert getattr(shipped, section) in [getattr(one, section) for one in found]


def test_searches_took_at_most_two_hours_on_two_cores() -> None:
    for one in json.loads((RESULTS / "rankitect-fronts.json").read_text())["results"]:
        assert one["searches"]["found"]["thread_seconds"] < 2 * 2 * 3600
