"""``cordillera bench ncclx``: every part runs and writes what the documentation quotes."""

from __future__ import annotations

from pathlib import Path

import ncclx
import pytest
from _blame_incidents import FAULTS
from _transport_exchange import shares

from tests.benchmarks.programs import part_of

pytestmark = pytest.mark.slow


def test_rows_go_to_other_ranks_and_back_whatever_carries_them(tmp_path: Path) -> None:
    figures = part_of(ncclx, "exchanges", tmp_path)
    (row,) = figures["rows"]
    assert row["against dynamic"]["median"] == 1.0
    assert shares(4, 4096) == [2048, 683, 683, 682]


def test_blame_counts_incidents_by_kind(tmp_path: Path) -> None:
    figures = part_of(ncclx, "blame", tmp_path)
    assert set(FAULTS) < set(figures["kinds"])
    assert figures["healthy"]["blamed"] == 0
    assert set(figures["torch"]) == set(FAULTS)
