"""``cordillera bench bfloat16`` with tiny trainings: every part runs and writes what docs quote."""

from __future__ import annotations

import json
from typing import Any

import bfloat16
import pytest

from cordillera.reports.ranking.comparison import SeedMean, mean_interval
from tests.benchmarks.programs import run


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("results")
    run(bfloat16, folder, "--threads", "1")
    return {part: json.loads((folder / f"bfloat16-{part}.json").read_text()) for part in ("accuracy", "split")}


@pytest.mark.slow
def test_all_variants_are_trained_on_both_data_sets_and_paired(results: dict[str, Any]) -> None:
    content = results["accuracy"]
    assert content["quick"] is True
    found = {(row["data"], row["variant"]): row for row in content["results"]}
    assert found.keys() == {(data, variant) for data in bfloat16.DATA for variant in bfloat16.VARIANTS}
    for data in bfloat16.DATA:
        base = found[data, "float32"]
        assert base["relative_ne_percent"] == [0.0]
        other = found[data, "no master, toward zero"]
        assert other["relative_ne_percent"][0] == pytest.approx(100 * (other["ne"][0] / base["ne"][0] - 1))
        assert len({tuple(found[data, variant]["ne"]) for variant in bfloat16.VARIANTS}) == len(bfloat16.VARIANTS)


@pytest.mark.slow
def test_halves_are_compared_bit_by_bit(results: dict[str, Any]) -> None:
    content = results["split"]
    assert content["reached"] is True
    assert all(row["numbers"] > 10_000 and row["different"] == 0 for row in content["results"])


def test_verdicts_follow_from_the_intervals() -> None:
    better, worse = mean_interval([-0.3, -0.2, -0.25]), mean_interval([0.3, 0.2, 0.25])
    assert bfloat16._verdict("master, nearest even", SeedMean(0.04, -0.1, 0.18, 5)) == "within 0.05 %: yes"
    assert bfloat16._verdict("master, nearest even", better) == "within 0.05 %: no"
    assert bfloat16._verdict("no master, nearest even", worse) == "measurably worse: yes"
    assert bfloat16._verdict("no master, nearest even", better) == "measurably worse: no"
    assert bfloat16._verdict("float32", better) == ""
