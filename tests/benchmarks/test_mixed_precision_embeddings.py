"""The benchmark of rows in few bits: who is compared, when a target is reached, and that every byte is counted."""

from __future__ import annotations

from pathlib import Path

import mixed_precision_embeddings
import pytest
import torch
from _mixed_precision_quality import GRID, INT4, INT8, JUDGED, NEAREST, NO_CACHE_NEAREST, SGD, _judge, train
from _mixed_precision_speed import OURS

from cordillera.cli import bench
from cordillera.data.ranking.datasets import DataConfig, prepare
from cordillera.data.ranking.logs.synthetic import SyntheticConfig
from cordillera.embeddings.tables import TablesConfig
from tests.benchmarks.programs import part_of


def test_the_command_finds_it() -> None:
    assert "mixed-precision-embeddings" in bench.programs()


def test_every_contender_is_a_recipes_tables_section() -> None:
    for options in [*GRID.values(), *OURS.values()]:
        assert TablesConfig.model_validate({**SGD, **options}).are_encoded == bool(options)
    assert not JUDGED["fp32"]
    assert set(JUDGED) <= set(GRID)


@pytest.mark.parametrize(
    ("name", "loss", "reached"),
    [
        (INT8, 0.0005, True),
        (INT8, 0.0006, False),
        (INT4, 0.0015, True),
        (INT4, 0.0016, False),
        (NEAREST, 0.0101, True),
        (NEAREST, 0.0099, False),
        (NO_CACHE_NEAREST, 0.016, True),
        (NO_CACHE_NEAREST, 0.014, False),
        ("fp32", 0.0, None),
    ],
)
def test_targets_are_those_promised(name, loss, reached) -> None:
    losses = {INT8: [0.0], INT4: [0.001], NEAREST: [0.1], NO_CACHE_NEAREST: [0.1], "fp32": [0.0]}
    assert _judge(name, {**losses, name: [loss]})[1] is reached


@pytest.mark.slow
def test_a_training_is_a_function_of_its_seed(tmp_path) -> None:
    log = SyntheticConfig(rows=3000, dense=2, categorical=3, lists=0, smallest_vocabulary=50, largest_vocabulary=90)
    splits = prepare(DataConfig(dataset="synthetic", synthetic=log, cache_dir=str(tmp_path)))
    before = torch.get_rng_state()
    tables = TablesConfig(rows="int4", cache=0.2)
    first, second, other = (train(splits, tables, seed, 1) for seed in (1, 1, 2))
    torch.set_rng_state(before)
    assert first["ne"] == second["ne"] != other["ne"]
    assert first["hit_rate"] == second["hit_rate"]
    assert 0 < first["hit_rate"] < 1
    assert train(splits, TablesConfig(), 1, 1)["hit_rate"] is None


@pytest.mark.slow
def test_memory_adds_up_and_stays_below_its_target(tmp_path: Path) -> None:
    content = part_of(mixed_precision_embeddings, "memory", tmp_path)
    assert content["evidence"] == "measured"
    assert len(content["results"]) == 4 * len(OURS)
    for entry in content["results"]:
        assert entry["bytes"] == sum(entry["parts"].values())
        assert entry["fp32_bytes"] >= 26 * content["conditions"]["rows"] * 64 * 4
        if entry["target_at_most"] is not None:
            assert entry["share"] <= entry["target_at_most"]
    assert {entry["optimizer"] for entry in content["results"]} == {"sgd", "rowwise_adagrad", "adagrad", "adam"}
