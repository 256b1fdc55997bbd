"""Sharded tables of ranks that are threads, against the tables of one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from _virtual_ranks import run_ranks

from cordillera.data.ranking.features import FeatureSpec, SparseFeature
from cordillera.distributed.collectives import Collectives
from cordillera.embeddings.prioritised_tables import FrozenWindowTables, PrioritisedEmbeddingTables
from cordillera.embeddings.sharded_tables import ShardedEmbeddingTables
from cordillera.embeddings.tables import EmbeddingTables
from cordillera.errors import DataError
from cordillera.jagged import JaggedBatch, slice_samples
from cordillera.planning.ranking.placement import Placement, TablePart
from tests.embeddings.test_sharded_batches import Pair
from tests.embeddings.test_sharded_tables import DIM, RULES, SPEC, config, placements, samples

PLACEMENTS = placements(2)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", PLACEMENTS)
def test_several_backward_passes_before_an_update_are_those_of_one_process(rule: str, name: str) -> None:
    def work(links: Collectives) -> float:
        pair = Pair(links, rule, PLACEMENTS[name])
        pair.step(0)
        pair.step(4, 5)
        return pair.difference()

    assert max(run_ranks(2, work)) < 1e-6


@pytest.mark.parametrize("init", ["uniform_by_rows", 0.1])
@pytest.mark.parametrize("rows", [1, 15, 16_383, 16_384, 16_385, 40_000])
def test_new_rows_are_those_of_one_process(rows: int, init: Any) -> None:
    """They are drawn 16,384 at a time, by every rank, which keeps its own."""
    tables = {"before": 20, "large": rows, "after": 3}
    spec = FeatureSpec((), tuple(SparseFeature(name, name) for name in tables), tables, ("click",))
    parts = [TablePart(name, 0, count, 4 * rank, 4, (rank,)) for name, count in tables.items() for rank in range(2)]
    placement = Placement(2, {name: (count, 8) for name, count in tables.items()}, tuple(parts))
    one = EmbeddingTables(spec, 8, config("sgd"), init=init, generator=torch.Generator().manual_seed(9))

    def work(links: Collectives) -> torch.Tensor:
        draw = torch.Generator().manual_seed(9)
        made = ShardedEmbeddingTables(spec, 8, config("sgd"), placement, links, init=init, generator=draw)
        return made.state_dict()["weight"]

    for weight in run_ranks(2, work):
        assert torch.equal(weight, one.state_dict()["weight"])


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


@pytest.mark.parametrize("tables", [tuple(SPEC.tables), ("items",)], ids=["all", "one"])
@pytest.mark.parametrize("name", PLACEMENTS)
def test_sums_of_bags_train_as_one_process_does(name: str, tables: tuple[str, ...]) -> None:
    def work(links: Collectives) -> float:
        pair = Pair(links, "rowwise_adagrad", replace(PLACEMENTS[name], pooled=tables))
        pair.step(0)
        pair.step(1, 2)
        return pair.difference()

    assert max(run_ranks(2, work)) < 1e-6


class CollidingBatches:
    """Ids of which a share is in the batch before as well; the share is none, some or all for 10 steps each."""

    def __init__(self, rank: int, samples: int = 16, rows: int = 400) -> None:
        self.draw, self.rank, self.samples, self.rows = torch.Generator().manual_seed(rank), rank, samples, rows
        self.before = torch.randint(rows, (samples,), generator=self.draw)

    def next(self, step: int) -> tuple[JaggedBatch, torch.Tensor]:
        kept = (0, self.samples // 4, self.samples)[step // 10 % 3]
        fresh = torch.randint(self.rows // 2, (self.samples - kept,), generator=self.draw) * 2 + step % 2
        self.before = torch.cat([self.before[:kept], fresh])
        batch = JaggedBatch(("item",), self.before, torch.arange(self.samples + 1), one_hot=True)
        return batch, torch.randn(self.samples, 1, DIM, generator=self.draw)


@pytest.mark.cases(1)
@pytest.mark.parametrize("rule", ["sgd", "rowwise_adagrad", "adam"])
def test_sixty_steps_of_prioritised_exchange_have_the_bits_of_plain_ones(rule: str) -> None:
    spec = FeatureSpec((), (SparseFeature("item", "items"),), {"items": 400}, ("click",))
    parts = tuple(TablePart("items", 200 * rank, 200, 0, DIM, (rank,)) for rank in range(2))
    placement = Placement(2, {"items": (400, DIM)}, parts)

    def work(links: Collectives) -> tuple[dict[str, Any], set[bool]]:
        found: dict[str, Any] = {}
        modes: set[bool] = set()
        for kind in (ShardedEmbeddingTables, PrioritisedEmbeddingTables):
            made = kind(spec, DIM, config(rule), placement, links, generator=torch.Generator().manual_seed(3))
            source = CollidingBatches(links.rank)
            ahead = [source.next(step) for step in range(2)]
            for batch, _ in ahead:
                made.prefetch(batch)
            losses = []
            for step in range(60):
                if step + 2 < 60:
                    ahead.append(source.next(step + 2))
                    made.prefetch(ahead[-1][0])
                batch, target = ahead.pop(0)
                output = made(batch)
                made.advance()
                loss = (output - target).square().sum()
                loss.backward()
                made.update()
                losses.append(loss.detach())
                modes.add(getattr(made, "is_prioritised", True))
            found[kind.__name__] = {"losses": torch.stack(losses), **made.state_dict()}
        return found, modes

    for found, modes in run_ranks(2, work, 60.0):
        plain, prioritised = found.values()
        assert plain.keys() == prioritised.keys()
        for key, tensor in plain.items():
            assert torch.equal(torch.as_tensor(tensor), torch.as_tensor(prioritised[key])), key
        assert plain["losses"][:10].mean() != plain["losses"][-10:].mean()
        assert modes == {True, False}  # where all rows collide, steps become plain


class Calls:
    """Counts the calls of a function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.count = function, 0

    def __call__(self, *arguments: Any) -> Any:
        self.count += 1
        return self.function(*arguments)


@pytest.mark.parametrize("rule", RULES)
def test_gradients_of_slices_that_are_sent_early_give_the_same_bits(rule: str) -> None:
    """Two slices a rank and step; a step whose gradients are discarded after they were sent changes nothing."""

    def work(links: Collectives) -> tuple[dict[str, Any], dict[str, Any], float]:
        pair = Pair(links, rule, PLACEMENTS["rows"])
        found = []
        for is_early in (True, False):
            made = FrozenWindowTables.of(Pair(links, rule, PLACEMENTS["rows"]).one, PLACEMENTS["rows"], links)
            sent = Calls(made._exchange.send_gradients)
            made._exchange.send_gradients = sent  # type: ignore[method-assign]
            for step, is_kept in enumerate((True, False, True)):
                batch, gradient = samples(step)
                own, mine = pair.own(batch), pair.mine(gradient)
                sent.count = 0
                for first, end in ((0, 2), (2, len(own))):
                    made(slice_samples(own, first, end)).backward(mine[first:end])
                    if is_early:
                        made.send_gradients()
                assert sent.count == 2 * is_early
                if is_kept:
                    made.update()
                    assert sent.count == 2
                    if is_early:
                        pair.one(batch).backward(gradient)
                        pair.one.update()
                else:
                    made.discard()
                assert made.num_pending == 0
            found.append(made.state_dict())
        one = pair.one.state_dict()["weight"]
        return *found, float((found[0]["weight"] - one).abs().max())

    for early, late, difference in run_ranks(2, work):
        assert difference < 1e-6
        for key, tensor in early.items():
            assert torch.equal(torch.as_tensor(tensor), torch.as_tensor(late[key])), key


@pytest.mark.parametrize(("common", "stays", "returns"), [(7, True, False), (8, True, False), (9, False, False)])
def test_a_share_at_a_limit_keeps_the_exchange(common: int, stays: bool, returns: bool) -> None:
    def work(links: Collectives) -> tuple[bool, bool, bool, bool]:
        tables = PrioritisedEmbeddingTables.of(Pair(links, "sgd", PLACEMENTS["rows"]).one, PLACEMENTS["rows"], links)
        tables._choose(10, common)
        after = tables.is_prioritised
        tables.is_prioritised = False
        tables._choose(10, common)
        still = tables.is_prioritised
        tables._choose(0, 0)  # nothing was counted
        kept = tables.is_prioritised
        tables._choose(10, 6)
        return after, still, kept, tables.is_prioritised

    assert run_ranks(2, work) == [(stays, returns, returns, True)] * 2


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
