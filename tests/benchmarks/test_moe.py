"""``cordillera bench moe`` with few tokens: all ways compute the same, and bytes follow their formulas."""

from __future__ import annotations

from pathlib import Path

import moe
import pytest

from tests.benchmarks.programs import part_of


@pytest.mark.slow
def test_bytes_are_compared(tmp_path: Path) -> None:
    rows = part_of(moe, "memory", tmp_path)["rows"]
    assert [row["gated"] for row in rows] == [True, False]
    for row in rows:
        routed = row["tokens"] * row["choices"]
        products = (2 if row["gated"] else 1) * 4 * routed * row["hidden"]
        assert row["kept"]["AB"] - row["kept"]["X"] == products
        assert row["kept"]["ABY"] - row["kept"]["AB"] == 4 * routed * row["hidden"]
        assert row["kept"]["grouped"] > row["kept"]["ABY"]


@pytest.mark.parametrize("part", [pytest.param("speed", marks=pytest.mark.slow), "finer", "loss"])
def test_every_part_runs(part: str, tmp_path: Path) -> None:
    content = part_of(moe, part, tmp_path)
    assert content["rows"]
