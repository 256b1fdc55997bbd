"""``cordillera bench zionex`` with few steps and small tables: it runs, is exact, and writes what the docs quote."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import zionex
from _zionex_cases import SMALL, SMALL_DIM, WAYS, click_batches, click_features, placement, share
from _zionex_exchange import DIM, pooled_bytes

from tests.benchmarks.programs import part_of
from tests.distributed.processes import needs_gloo

LONG = ("1 to 20 ids", "whole", "bags")


def _has_torchrec(content: dict[str, object]) -> bool:
    return content["missing"] is None


@pytest.mark.parametrize("size", [2, 4])
def test_every_way_uses_all_ranks(size: int) -> None:
    for way in WAYS:
        cut = placement(way, SMALL.tables, SMALL_DIM, size)
        assert all(cut.parts_on(rank) for rank in range(size) if (way, size) != ("whole", 4) or rank < 3), way


@pytest.mark.parametrize("longest", [1, 5])
def test_bags_have_every_length_equally_often_and_shares_are_equal(longest: int) -> None:
    features = click_features(50)
    (batch,) = click_batches(features, 1, 64, longest)
    batch.validate()
    assert int(batch.lengths.min()) == 1
    assert int(batch.lengths.max()) == longest
    own = share(batch, 1, 2)
    assert len(own) == 32
    assert torch.equal(own["c3"].values, batch["c3"].values[-len(own["c3"].values) :])


def test_formula_of_the_pooled_exchange() -> None:
    features = click_features(50)
    (batch,) = click_batches(features, 1, 32, 1)
    whole = pooled_bytes("table-wise", batch, features, DIM, 0, 2)
    assert whole == {"ids": 13 * 32 * 8, "lengths": 13 * 32 * 4, "output": 13 * 32 * 128, "gradient": 13 * 32 * 128}
    columns = pooled_bytes("column-wise", batch, features, DIM, 0, 4)
    assert columns == {"ids": 3 * 26 * 32 * 8, "lengths": 3 * 26 * 32 * 4} | dict.fromkeys(
        ("output", "gradient"), 3 * 26 * 32 * 32
    )
    rows = [pooled_bytes("row-wise", batch, features, DIM, rank, 2) for rank in range(2)]
    assert sum(one["ids"] for one in rows) == 26 * 32 * 8
    assert rows[0]["output"] == rows[0]["gradient"] == 26 * 32 * 128


@pytest.mark.slow
def test_placements_are_weighed_alike(tmp_path: Path) -> None:
    content = part_of(zionex, "planner", tmp_path)
    assert {row["case"] for row in content["rows"]} == {"1 id", "multi-hot"}
    for row in content["rows"]:
        assert row["ranks"] == 2
        assert 1 <= row["ours"]["lookups"] <= 1.02
        assert 1 <= row["ours"]["memory"] <= content["cap"]
        peers = [one for one in row["peers"].values() if "lookups" in one]
        assert len(peers) == (3 if _has_torchrec(content) else 0)
        assert all(one["lookups"] >= 1 and one["memory"] >= 1 for one in peers)
    assert len(content["many"]["processor_seconds"]) == 1


@pytest.mark.slow
def test_tiers_are_exact_and_timed(tmp_path: Path) -> None:
    content = part_of(zionex, "tiers", tmp_path)
    modes = ["kept"] if content["missing"] else ["kept", "limited"]
    assert [(row["case"], row["pages"]) for row in content["file"]] == [
        (case, mode) for case in ("tables", "DLRM") for mode in modes
    ]
    for row in content["file"]:
        assert row["equal"] is True
        assert row["bytes_in_memory"] < row["bytes"] / content["times_memory"]
        assert row["speed"]["median"] > 0
        assert row["rows_a_step"]["reads"] > 0
    for row in content["dynamic"]:
        assert row["known"]["admitted_a_step"] == 0
        assert row["new"]["admitted_a_step"] > 0
        assert row["known"]["cost"]["median"] > 0


@needs_gloo
@pytest.mark.slow
def test_results_are_those_of_one_process(tmp_path: Path) -> None:
    content = part_of(zionex, "exactness", tmp_path)
    assert content["reached"] is True
    rows = {(row["way"], row["rule"]): row for row in content["rows"]}
    assert len(rows) == len(WAYS) * 4
    peer = rows["columns", "rowwise_adagrad"]["peers"]["column-wise"]
    if "weight" in peer:
        assert peer["weight"] > 1e-3  # one second moment for each part of a row
        assert rows["whole", "rowwise_adagrad"]["peers"]["table-wise"]["weight"] < 1e-6
        assert "reason" in rows["whole", "adam"]["peers"]["table-wise"]


@needs_gloo
@pytest.mark.slow
def test_traffic_is_compared(tmp_path: Path) -> None:
    content = part_of(zionex, "exchange", tmp_path)
    assert len(content["rows"]) == 12
    assert all(row["chosen"] == 0 for row in content["rows"] if (row["case"], row["sent"]) == ("1 id", "bags"))
    assert all(row["chosen"] > 0 for row in content["rows"] if (row["case"], row["way"], row["sent"]) == LONG)
    for row in content["rows"]:
        assert row["bytes"] == pytest.approx(sum(row["bytes_by_name"].values()), rel=0.2)
        assert row["seconds"]["ours"]["seconds"]["median"] > 0
        if (
            row["sent"] == "bags" and row["case"] != "1 id"
        ):  # ids take 4 bytes and not 8; counts, and squares of columns
            expected = max(sum(one.values()) - one["ids"] / 2 for one in row["formula"])
            squares = row["bytes_by_name"].get("squares of gradients", 0)
            assert expected < row["bytes"] - squares < expected + 1_000
        if _has_torchrec(content):
            # what TorchRec sends besides: the sizes of its messages
            assert row["formula_bytes"] < row["peer_bytes"] < row["formula_bytes"] + 1_000
