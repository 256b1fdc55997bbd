"""``cordillera bench fsdp`` with small models: every part runs, agrees with its formulas and writes what docs quote."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.processes import needs_gloo

ROOT = Path(__file__).parents[2]


def run(part: str, folder: Path) -> dict[str, Any]:
    command = [sys.executable, str(ROOT / "benchmarks/fsdp.py"), "--quick", "--part", part]
    done = subprocess.run(
        [*command, "--results", str(folder)], capture_output=True, text=True, timeout=200, cwd=folder, check=False
    )
    assert done.returncode == 0, done.stderr
    content: dict[str, Any] = json.loads((folder / f"fsdp-{part}.json").read_text())
    assert content["quick"] is True
    return content


@pytest.mark.slow
def test_memory_is_that_of_the_law(tmp_path: Path) -> None:
    content = run("memory", tmp_path)
    assert content["reached"] is True
    assert {(row["world"], row["wrapping"]) for row in content["rows"]} >= {(8, "every block"), (512, "all blocks")}
    for row in content["rows"]:
        assert row["parameter_bytes"] == row["law_bytes"]
        assert row["collectives"] == row["collectives_by_formula"]


@needs_gloo
@pytest.mark.slow
def test_traffic_is_that_of_the_formulas(tmp_path: Path) -> None:
    content = run("traffic", tmp_path)
    assert content["reached"] is True
    rows = {name: row["across_hosts_bytes"] for name, row in content["rows"].items()}
    assert max(rows["hybrid"]) < max(rows["replicated"]) < max(rows["fully sharded"])
