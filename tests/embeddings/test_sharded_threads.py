"""Sharded tables of ranks that are threads, against the tables of one process."""

from __future__ import annotations

import pytest
import torch
from _virtual_ranks import run_ranks

from cordillera.distributed.collectives import Collectives
from cordillera.errors import DataError
from tests.embeddings.test_sharded_batches import Pair
from tests.embeddings.test_sharded_tables import DIM, RULES, placements, samples

PLACEMENTS = placements(2)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", PLACEMENTS)
def test_steps_are_those_of_one_process(rule: str, name: str) -> None:
    def work(links: Collectives) -> float:
        pair = Pair(links, rule, PLACEMENTS[name])
        for step in range(4):
            pair.step(step)
        pair.step(4, 5)  # two backward passes, one update
        return pair.difference()

    assert max(run_ranks(2, work)) < 1e-6


@pytest.mark.parametrize("name", PLACEMENTS)
def test_what_a_state_dict_lacks_or_has_in_another_shape_is_named(name: str) -> None:
    def work(links: Collectives) -> None:
        tables = Pair(links, "adam", PLACEMENTS[name]).two
        state = tables.state_dict()
        found = tables.load_state_dict({"_extra_state": state["_extra_state"]}, strict=False)
        assert sorted(found.missing_keys) == sorted(key for key in state if key != "_extra_state")
        state["weight"] = state["weight"][:-1]
        with pytest.raises(RuntimeError, match=rf"size mismatch for weight: \(\d+, {DIM}\) is not \(\d+, {DIM}\)"):
            tables.load_state_dict(state)

    run_ranks(2, work)


@pytest.mark.parametrize("name", PLACEMENTS)
def test_gradients_that_are_discarded_and_columns_that_are_cleared(name: str) -> None:
    def work(links: Collectives) -> tuple[float, bool]:
        pair = Pair(links, "rowwise_adagrad", PLACEMENTS[name])
        pair.step(0)
        batch, gradient = samples(1)
        for tables, own, given in ((pair.one, batch, gradient), (pair.two, pair.own(batch), pair.mine(gradient))):
            tables(own).backward(given)
            assert tables.num_pending > 0
            tables.discard()
            assert tables.num_pending == 0
        pair.step(2)
        fresh = Pair(links, "rowwise_adagrad", PLACEMENTS[name])
        fresh.one.clear_columns(DIM - 3)
        fresh.two.clear_columns(DIM - 3)
        cleared = fresh.two.state_dict()["weight"]
        same = torch.equal(cleared, fresh.one.state_dict()["weight"]) and not cleared[:, DIM - 3 :].any()
        return pair.difference(), same and bool(cleared[:, : DIM - 3].any())

    for difference, same in run_ranks(2, work):
        assert difference < 1e-6
        assert same


def test_ids_beyond_a_table_are_refused_by_the_rank_that_has_them() -> None:
    def work(links: Collectives) -> None:
        pair = Pair(links, "sgd", PLACEMENTS["rows"] if "rows" in PLACEMENTS else next(iter(PLACEMENTS.values())))
        batch = pair.own(samples(0)[0])
        for wrong in (-1, 10**9):
            values = batch.values.clone()
            values[0] = wrong
            with pytest.raises(DataError, match="row"):
                pair.two(type(batch)(batch.keys, values, batch.offsets, batch.weights))

    run_ranks(2, work)
