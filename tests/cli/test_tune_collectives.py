"""``cordillera tune-collectives``: what it writes and prints, and what it refuses; jobs follow its file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cordillera.distributed.collective_tuning import read_tuning
from tests.distributed.processes import needs_gloo


@needs_gloo
def test_rules_are_written_and_a_job_follows_them(cli: Any, tmp_path: Path) -> None:
    file = tmp_path / "new" / "rules.toml"
    result = cli("tune-collectives", file, "--bytes", 4096, "--seconds", "0.01", "--json")
    assert result.code == 0, result.err
    document = json.loads(result.out)
    assert [one["collective"] for one in document["plans"]] == ["all_reduce", "all_gather", "reduce_scatter"]
    tuning = read_tuning(file)
    for one in document["plans"]:
        assert tuning.plan(one["collective"], 2, 4096) == one["plan"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["rules.txt"], "name a .toml"),
        (["rules.toml", "--nproc", "1"], "--nproc"),
        (["rules.toml", "--bytes", "0"], "--bytes"),
        (["rules.toml", "--seconds", "0"], "--seconds"),
    ],
)
def test_wrong_arguments_are_named(cli: Any, words: list[str], said: str) -> None:
    result = cli("tune-collectives", *words)
    assert result.code != 0
    assert said in result.err
