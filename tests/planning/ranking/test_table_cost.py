"""Costs of placed tables: counted bytes, checked by hand and against simpler sums."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from cordillera import topology
from cordillera.errors import PlanError
from cordillera.kernels.embeddings.update import SparseOptimizer, init_state
from cordillera.planning.ranking.placement import Placement, TablePart
from cordillera.planning.ranking.table_cost import STATE_BYTES, TableCosts, TableProfile, TableRates, table_loads

RATES = TableRates(memory=1.0, link=1.0, copies=1.0, file=1.0)


def test_state_has_the_size_that_the_update_makes() -> None:
    for name, (of_row, of_value) in STATE_BYTES.items():
        state = init_state(SparseOptimizer(name=name), torch.empty(5, 12))
        assert sum(one.numel() * one.element_size() for one in state.values()) == 5 * (of_row + 12 * of_value)


def test_bytes_of_a_whole_table_are_counted() -> None:
    """Ten samples with two lookups on two ranks, 32 columns: read, sent to the other rank, updated."""
    tables = {"a": TableProfile(100, 32, 2.0, distinct=0.5)}
    placement = Placement(2, {"a": (100, 32)}, (TablePart("a", 0, 100, 0, 32, (1,)),))
    loads = table_loads(placement, tables, 10, RATES)
    assert loads.lookup_bytes.tolist() == [0, 10 * 2 * 32 * 4]
    assert loads.memory_bytes.tolist() == [0, 100 * (32 * 4 + 4)]
    lookup = 10 * (2 * (32 * 4 + 8) + 32 * 4)
    exchange = 10 * (2 * 32 * 4 + 2 * 8 + 4) / 2  # half of the samples are the owner's
    update = 10 * (2 * (32 * 4 + 64) + 1 * (2 * 32 * 4 + 2 * 4))
    assert loads.seconds.tolist() == [[0, 0, 0], [lookup, exchange, update]]
    assert loads.step_seconds == lookup + exchange + update
    assert loads.lookup_imbalance == loads.memory_imbalance == 2.0


def test_cuts_divide_what_they_should() -> None:
    tables = {"a": TableProfile(1000, 64, 3.0)}
    costs = TableCosts(tables, RATES)
    table, none = np.zeros(1, dtype=np.int64), np.zeros(1, dtype=bool)

    def seconds(rows: int, columns: int) -> np.ndarray:
        return np.asarray(costs.seconds(table, np.array([rows]), np.array([columns]), none, 80, 4, 1)[0])

    whole, rows, columns = seconds(1000, 64), seconds(500, 64), seconds(1000, 32)
    assert rows[2] == pytest.approx(whole[2] / 2)  # rows divide the update exactly, columns not the sorting of ids
    assert whole[2] / 2 < columns[2] < whole[2]
    assert columns[1] < rows[1] < whole[1]  # a row part sends sums of all columns
    assert costs.bytes(table, np.array([500]), np.array([64])) * 2 == costs.bytes(
        table, np.array([1000]), np.array([64])
    )


def test_copies_cost_what_keeps_them_equal() -> None:
    small, large = TableProfile(10, 16, 1.0), TableProfile(1_000_000, 16, 1.0)
    none, table = np.zeros(1, dtype=bool), np.zeros(1, dtype=np.int64)
    for one, summed in ((small, True), (large, False)):
        costs = TableCosts({"a": one}, RATES)
        found = costs.seconds(table, np.array([one.rows]), np.array([16]), none, 4000, 4, 4)[0]
        expected = 2 * one.rows * 16 * 4 * 3 / 4 if summed else 3 * 1000 * (16 * 4 + 8)
        assert found[1] == pytest.approx(expected)


def test_a_file_saves_memory_and_costs_time() -> None:
    tables = {"a": TableProfile(1000, 16)}
    kept = Placement(1, {"a": (1000, 16)}, (TablePart("a", 0, 1000, 0, 16, (0,)),))
    moved = Placement(1, {"a": (1000, 16)}, (kept.parts[0]._replace(tier="file"),))
    memory, file = table_loads(kept, tables, 10), table_loads(moved, tables, 10, file_cache=0.1)
    assert file.memory_bytes == pytest.approx(0.1 * memory.memory_bytes)
    assert file.file_bytes == memory.memory_bytes
    assert file.step_seconds > memory.step_seconds


def test_rates_come_from_the_slowest_level_of_a_cluster() -> None:
    cluster = (
        topology.load("two-buildings")
        if "two-buildings" in topology.shipped()
        else topology.load(next(iter(topology.shipped())))
    )
    host = cluster.sizes[0][0]
    inside, outside = TableRates.of(cluster, host), TableRates.of(cluster, 4 * host)
    assert inside.link == cluster.member_bytes_per_s(0, 0)
    assert outside.link < inside.link
    groups = TableRates.of(cluster, 4 * host, copies=4)
    assert groups.link == inside.link
    assert groups.copies <= cluster.device.nic_bytes_per_s * (1 + 1e-9)
    with pytest.raises(PlanError, match="as many devices"):
        TableRates.of(cluster, cluster.devices + 1)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"rows": 0}, "rows = 0"),
        ({"rows": 2.5}, "rows = 2.5"),
        ({"columns": -4}, "columns = -4"),
        ({"lookups": math.nan}, "lookups = nan"),
        ({"lookups": -1.0}, "lookups = -1"),
        ({"lookups": math.inf}, "lookups = inf"),
        ({"distinct": 0.0}, "distinct = 0"),
        ({"distinct": math.nan}, "distinct = nan"),
        ({"weight_bytes": 0.0}, "weight_bytes = 0"),
        ({"optimizer": "lion"}, "no optimizer 'lion'"),
    ],
)
def test_tables_that_are_none_are_refused_by_name(values: dict[str, float], words: str) -> None:
    with pytest.raises(PlanError, match=words) as error:
        TableCosts({"good": TableProfile(10, 8), "bad": TableProfile(**{"rows": 10, "columns": 8} | values)}, RATES)  # type: ignore[arg-type]
    assert "'bad'" in str(error.value)


def test_no_tables_other_tables_and_rates_that_are_none_are_refused() -> None:
    with pytest.raises(PlanError, match="no tables"):
        TableCosts({}, RATES)
    placement = Placement(1, {"a": (3, 8)}, (TablePart("a", 0, 3, 0, 8, (0,)),))
    for tables in ({"b": TableProfile(3, 8)}, {"a": TableProfile(4, 8)}):
        with pytest.raises(PlanError, match="other tables"):
            table_loads(placement, tables, 10)
    for rate in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(PlanError, match=r"rates\.link"):
            TableRates(link=rate)
