"""``cordillera bench dmt`` with few rows and seeds."""

from __future__ import annotations

from pathlib import Path

import dmt
import numpy as np
import pytest

from tests.benchmarks.programs import part_of


def test_purity_is_the_share_of_features_in_place() -> None:
    assert dmt.purity([1, 1, 0, 0], [0, 0, 1, 1]) == 1
    assert dmt.purity([0, 0, 1, 1, 2, 2], [0, 0, 1, 2, 2, 2]) == pytest.approx(5 / 6)
    assert sorted(np.bincount(dmt.random_towers(10, 4, 0)).tolist()) == [2, 2, 3, 3]


@pytest.mark.slow
def test_planted_groups_are_looked_for(tmp_path: Path) -> None:
    content = part_of(dmt, "partition", tmp_path)
    assert [one["noise"] for one in content["made"]] == list(dmt.NOISES)
    assert content["made"][0]["recovered"] == content["made"][0]["seeds"] == 2
    assert all(one["fullest"] <= 1 + 1e-9 for one in [*content["made"], *content["trained"]])


@pytest.mark.slow
def test_models_with_and_without_towers_are_compared(tmp_path: Path) -> None:
    content = part_of(dmt, "quality", tmp_path)
    (row,) = content["rows"]
    assert row["learned"]["mean"] == pytest.approx(row["runs"][0]["learned"] - row["runs"][0]["none"])
    assert row["runs"][0]["learned compression"] >= 2
