"""``cordillera bench fsdp`` with small models: every part runs, agrees with its formulas and writes what docs quote."""

from __future__ import annotations

from pathlib import Path

import fsdp
import pytest

from tests.benchmarks.programs import part_of
from tests.distributed.processes import needs_gloo

pytestmark = pytest.mark.slow


def test_memory_is_that_of_the_law(tmp_path: Path) -> None:
    content = part_of(fsdp, "memory", tmp_path)
    assert content["reached"] is True
    assert {(row["world"], row["wrapping"]) for row in content["rows"]} >= {(8, "every block"), (512, "all blocks")}
    for row in content["rows"]:
        assert row["parameter_bytes"] == row["law_bytes"]
        assert row["collectives"] == row["collectives_by_formula"]


@needs_gloo
def test_traffic_is_that_of_the_formulas(tmp_path: Path) -> None:
    content = part_of(fsdp, "traffic", tmp_path)
    assert content["reached"] is True
    rows = {name: row["across_hosts_bytes"] for name, row in content["rows"].items()}
    assert max(rows["hybrid"]) < max(rows["replicated"]) < max(rows["fully sharded"])


@needs_gloo
def test_hybrid_sharding_has_the_memory_and_bytes_of_the_formulas(tmp_path: Path) -> None:
    content = part_of(fsdp, "dhen", tmp_path)
    for way, row in content["rows"].items():
        assert row["held_bytes"][0] == max(row["held_bytes"]) == row["held_by_formula"], way  # others may lack a row
        assert row["whole_bytes"] == [row["whole_by_formula"]] * 4, way
        assert row["across_hosts_bytes"] == row["across_hosts_by_formula"], way
    assert content["loss_difference"] < 1e-6
    full, hybrid = (sum(content["rows"][way]["across_hosts_bytes"]) for way in ("full", "hybrid"))
    assert hybrid < full / 2
