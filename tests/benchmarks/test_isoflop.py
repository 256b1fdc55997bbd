"""``cordillera bench isoflop`` with few points: it runs and writes what the docs quote."""

from __future__ import annotations

from pathlib import Path

import isoflop
import pytest
from isoflop import FEW

from tests.benchmarks.programs import part_of

pytestmark = pytest.mark.slow


def test_a_study_of_tiny_models_trains_every_size(tmp_path: Path) -> None:
    study = part_of(isoflop, "tiny", tmp_path)["study"]
    assert [round(curve["budget"] / least, 1) for curve, least in zip(study["curves"], FEW, strict=True)] == [1.0] * 3
    for curve in study["curves"]:
        assert len(curve["runs"]) >= 2
        assert len({run["parameters"] for run in curve["runs"]}) == len(curve["runs"])
        assert all(0 < run["loss"] < 6 for run in curve["runs"])
