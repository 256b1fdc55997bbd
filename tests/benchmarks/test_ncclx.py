"""``cordillera bench ncclx``: every part runs and writes what the documentation quotes."""

from __future__ import annotations

from pathlib import Path

import ncclx
import pytest
from _blame_incidents import FAULTS

from tests.benchmarks.programs import part_of


@pytest.mark.slow
def test_blame_counts_incidents_by_kind(tmp_path: Path) -> None:
    figures = part_of(ncclx, "blame", tmp_path)
    assert set(FAULTS) < set(figures["kinds"])
    assert figures["healthy"]["blamed"] == 0
    assert set(figures["torch"]) == set(FAULTS)
