"""Sums of bags that come from the ranks that hold rows, against the tables of one process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from cordillera import recipe as recipes
from cordillera.data.ranking.features import FeatureSpec, SparseFeature
from cordillera.distributed.codecs.codecs import Distinct, Half
from cordillera.distributed.collectives import Collectives
from cordillera.distributed.ledger import Ledger
from cordillera.embeddings.pooled_exchange import choose_pooled
from cordillera.embeddings.prioritised_tables import PrioritisedEmbeddingTables
from cordillera.errors import DataError, PlanError
from cordillera.jagged import JaggedBatch, JaggedTensor, offsets_from_lengths
from cordillera.planning.ranking.placement import Placement
from cordillera.workflows import ranking
from tests.distributed.processes import found_by, needs_gloo
from tests.embeddings.test_sharded_batches import Pair
from tests.embeddings.test_sharded_tables import (  # fmt: skip
    DIM,
    RULES,
    SPEC,
    STEPS,
    alone,
    bounds,
    config,
    part,
    placements,
    samples,
    share,
    trained,
    whole,
)

SOME = ("items",)
WAYS = tuple(placements(2))


def pooled(size: int, way: str, tables: tuple[str, ...] = tuple(SPEC.tables)) -> Placement:
    return replace(placements(size)[way], pooled=tables)


def settings(size: int) -> Iterator[tuple[str, tuple[str, ...], str, float]]:
    """Ways, pooled tables, rules and weight decays that are trained over ``size`` processes."""
    for way in WAYS:
        has_all = size > 2 or way in ("columns", "grid", "two groups")
        for rule in RULES if has_all else ("rowwise_adagrad",):
            yield way, tuple(SPEC.tables), rule, 0.0
        yield way, SOME, "rowwise_adagrad", 0.0
    yield "grid", tuple(SPEC.tables), "rowwise_adagrad", 0.1


def weights_of(batch: JaggedBatch, step: int) -> JaggedBatch:
    draw = torch.Generator().manual_seed(step)
    return replace(batch, weights=torch.rand(len(batch.values), generator=draw) * 2 - 0.5)


def weighted(links: Collectives) -> dict[str, float]:
    """Return the largest differences with weights of values, also where only one rank has them."""
    found = {}
    for way in ("grid", "rows", "two groups"):
        for tables in (tuple(SPEC.tables), SOME, ("users", "tags")):
            pair = Pair(links, "rowwise_adagrad", pooled(2, way, tables))
            for step in range(4):
                batch, gradient = samples(step)
                batch = weights_of(batch, step)
                own = pair.own(batch)
                if step == 3:  # ones on the second rank, which gives none
                    where = torch.arange(12).repeat(4).repeat_interleave(batch.lengths)
                    batch = replace(batch, weights=torch.where(where < 5, batch.weights, torch.ones(())))
                    own = pair.own(batch) if links.rank == 0 else replace(pair.own(batch), weights=None)
                one, two = pair.one(batch), pair.two(own)
                found[f"{way} {tables} {step} output"] = float((pair.mine(one) - two).abs().max())
                one.backward(gradient)
                two.backward(pair.mine(gradient))
                pair.one.update()
                pair.two.update()
            found[f"{way} {tables}"] = pair.difference()
    return found


def several(links: Collectives) -> dict[str, Any]:
    """Make several backward passes before an update, discard one, and look ahead."""
    found: dict[str, Any] = {}
    for rule in ("rowwise_adagrad", "adam"):
        for tables in (tuple(SPEC.tables), SOME):
            pair = Pair(links, rule, pooled(2, "two groups", tables))
            pair.step(1, 2, 3)
            pair.two.prefetch(pair.own(samples(9)[0]))
            pair.two.forget()
            batch, gradient = samples(4)
            own = pair.own(batch)
            pair.two.prefetch(own)
            with torch.no_grad():
                other = pair.own(samples(5)[0])
                found[f"{rule} {tables} ahead"] = float(
                    (pair.two(other) - pair.mine(pair.one(samples(5)[0]))).abs().max()
                )
            pair.one(batch).backward(gradient)
            pair.two(own).backward(pair.mine(gradient))
            expected = torch.cat([pair.own(samples(4)[0])[key].values + first for key, first in (
                ("item", 0), ("user", 41), ("history", 0), ("tags", 48))]).unique()  # fmt: skip
            assert torch.equal(pair.two.pending_rows(), expected)
            pair.one.update()
            pair.two.update()
            pair.two(pair.own(batch)).backward(pair.mine(gradient))
            pair.two.discard()
            pair.two.update()
            found[f"{rule} {tables}"] = pair.difference()
    return found


def single(links: Collectives) -> float:
    """Return the difference after batches of one value in each bag, on one rank or on both without lengths."""
    spec = FeatureSpec(
        (),
        (SparseFeature("a", "items", pooling="mean"), SparseFeature("b", "users")),
        {"items": 41, "users": 7},
        ("y",),
    )
    parts = (part("items", (0, 20), (0, DIM), 1), part("items", (20, 41), (0, DIM), 0), whole("users", 0))
    pair = Pair(
        links, "adagrad", Placement(2, {"items": (41, DIM), "users": (7, DIM)}, parts, ("items", "users")), spec
    )
    draw = torch.Generator().manual_seed(links.size)
    for step in range(4):
        values = torch.cat([torch.randint(rows, (12,), generator=draw) for rows in (41, 7)])
        batch = JaggedBatch(("a", "b"), values, torch.arange(25), one_hot=True)
        gradient = torch.randn(12, 2, DIM, generator=draw)
        own = pair.own(batch)
        if step == 3 and links.rank == 0:
            own = replace(own, one_hot=False)
        pair.one(batch).backward(gradient)
        pair.two(own).backward(pair.mine(gradient))
        pair.one.update()
        pair.two.update()
    return pair.difference()


def coded(links: Collectives) -> dict[str, Any]:
    """Return differences of outputs from exact ones with codecs of sums, in training and in evaluation."""
    found = {}
    for name, codec in (("distinct", Distinct()), ("fp16", Half(torch.float16))):
        pair = Pair(links, "sgd", pooled(2, "grid"))
        pair.two.coder = lambda place, codec=codec: codec
        batch, _ = samples(1)
        exact = pair.mine(pair.one(batch)).detach()
        off = (pair.two(pair.own(batch)).detach() - exact).abs().max()
        with torch.no_grad():
            evaluated = (pair.two(pair.own(batch)) - exact).abs().max()
        found[name] = float(off), float(evaluated)
    return found


def halved(links: Collectives) -> tuple[str, float, float]:
    """Return the dtype of a lookup under autocast, and differences to one process."""
    pair, (batch, gradient) = Pair(links, "sgd", pooled(2, "grid")), samples(1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        one, two = pair.one(batch), pair.two(pair.own(batch))
    one.backward(gradient.bfloat16())
    two.backward(pair.mine(gradient).bfloat16())
    pair.one.update()
    pair.two.update()
    return str(two.dtype), float((pair.mine(one) - two).abs().max() / one.abs().max()), pair.difference()


def mistaken(links: Collectives) -> dict[str, Any]:
    """Return the errors of ids that lie in no table, in tables of both kinds, and the difference afterwards."""
    pair, said = Pair(links, "sgd", pooled(2, "rows", SOME)), []
    for feature, value in (("history", 41), ("history", -1), ("user", 7), ("tags", 1 << 40)):
        batch = pair.own(samples(1)[0])
        values, f = batch.values.clone(), batch.keys.index(feature)
        values[int(batch.offsets[(f + 1) * len(batch)]) - 1] = value
        try:
            if links.rank == 1:
                pair.two(replace(batch, values=values))
        except DataError as error:
            said.append(str(error).split(" of sample")[0] + error.what[error.what.index(" does not lie") :])
    pair.step(1)
    return {"said": said, "difference": pair.difference()}


def spoilt(links: Collectives) -> dict[str, Any]:
    """Return the rows that are not finite after NaN in the gradient of one sample, and those that it looks up."""
    found = {}
    for way in ("grid", "two groups", "copied", "rows"):
        for rule in ("sgd", "rowwise_adagrad"):
            pair = Pair(links, rule, pooled(2, way))
            batch, gradient = samples(3)
            gradient[8, 2, 5] = torch.nan
            pair.two(pair.own(batch)).backward(pair.mine(gradient))
            pair.two.update()
            rows = (~pair.two.table("items").isfinite().all(1)).nonzero().flatten().tolist()
            others = [pair.two.table(table).isfinite().all().item() for table in ("users", "tags")]
            found[way, rule] = rows, sorted(set(batch["history"].to_lists()[8])), others
    return found


def counted(links: Collectives) -> dict[str, list[int]]:
    """Return bytes and messages of one step, by name."""
    pair = Pair(links, "sgd", pooled(2, "columns"))
    links.ledger.clear()
    pair.step(1)
    return {name: [one.bytes, one.messages] for name, one in links.ledger.traffic.items() if one.messages}


CASES = (weighted, several, single, coded, halved, mistaken, spoilt, counted)


def together(size: int, rank: int, folder: str) -> dict[Any, Any]:
    links = Collectives(None, Ledger(), 60.0)
    result: dict[Any, Any] = {}
    for way, tables, rule, decay in settings(size):
        result[way, tables, rule, decay] = trained(
            pooled(size, way, tables), links, rank, config(rule, weight_decay=decay)
        )
    result["again"] = trained(pooled(size, "grid"), links, rank, config("rowwise_adagrad"))
    if size == 2:
        result |= {case.__name__: case(links) for case in CASES}
    try:
        PrioritisedEmbeddingTables(SPEC, DIM, config("sgd"), pooled(size, "whole"), links)
    except PlanError as error:
        result["prioritised"] = str(error)
    return result


@pytest.fixture(scope="module", params=[pytest.param(size, marks=pytest.mark.slow) for size in (2, 4)])
def executed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[Any, Any]]:
    size = request.param
    return found_by(size, tmp_path_factory.mktemp("tables"), partial(together, size), 240)


@needs_gloo
def test_outputs_weights_and_moments_are_those_of_one_process(executed: dict[int, Any]) -> None:
    used = list(settings(len(executed)))
    expected = {(rule, decay): alone(rule, weight_decay=decay) for rule, decay in {one[2:] for one in used}}
    for rank, found in executed.items():
        for setting in used:
            state, outputs = expected[setting[2:]]
            ours = found[setting]
            assert ours["state"].keys() == state.keys()
            for key, tensor in state.items():
                torch.testing.assert_close(
                    ours["state"][key], tensor, rtol=1e-6, atol=1e-6, msg=lambda m, at=(setting, key): f"{at}: {m}"
                )
            assert ours["step"] == STEPS
            for step, output in enumerate(outputs):
                first, end = bounds(step, len(executed))[rank : rank + 2]
                torch.testing.assert_close(ours["outputs"][step], output[first:end], rtol=0, atol=1e-6)


@needs_gloo
def test_two_runs_and_all_ranks_are_equal_to_the_bit(executed: dict[int, Any]) -> None:
    first = executed[0]["grid", tuple(SPEC.tables), "rowwise_adagrad", 0.0]
    for rank, found in executed.items():
        for key, tensor in found["again"]["state"].items():
            assert torch.equal(tensor, first["state"][key])
        outputs = found["grid", tuple(SPEC.tables), "rowwise_adagrad", 0.0]["outputs"]
        assert all(map(torch.equal, found["again"]["outputs"], outputs)), rank


@needs_gloo
def test_prioritised_exchange_refuses_sums(executed: dict[int, Any]) -> None:
    assert all("prioritised exchange sends rows" in found["prioritised"] for found in executed.values())


def on_two(executed: dict[int, Any], name: str) -> list[Any]:
    if len(executed) != 2:
        pytest.skip("runs over two processes")
    return [found[name] for found in executed.values()]


@needs_gloo
def test_weights_of_values_and_single_values_are_those_of_one_process(executed: dict[int, Any]) -> None:
    for found in on_two(executed, "weighted"):
        assert {name: off for name, off in found.items() if not off < 1e-6} == {}
    assert max(on_two(executed, "single")) < 1e-6


@needs_gloo
def test_several_backward_passes_and_batches_sent_ahead(executed: dict[int, Any]) -> None:
    for found in on_two(executed, "several"):
        assert {name: off for name, off in found.items() if not off < 1e-6} == {}


@needs_gloo
def test_codecs_write_sums_in_training_and_evaluations_are_exact(executed: dict[int, Any]) -> None:
    for found in on_two(executed, "coded"):
        assert max(found["distinct"]) < 1e-6
        assert 1e-6 < found["fp16"][0] < 1e-2
        assert found["fp16"][1] < 1e-6


@needs_gloo
def test_under_autocast_lookups_are_in_bfloat16(executed: dict[int, Any]) -> None:
    for dtype, off, difference in on_two(executed, "halved"):
        assert dtype == "torch.bfloat16"
        assert off <= 2**-8  # a sum that is rounded twice may be one unit off
        assert difference < 1e-6


@needs_gloo
def test_ids_that_lie_in_no_table_are_named_before_anything_is_sent(executed: dict[int, Any]) -> None:
    first, second = on_two(executed, "mistaken")
    assert first["said"] == []
    assert second["said"] == [
        "feature 'history': id 41 does not lie in table 'items', which has rows 0 to 40",
        "feature 'history': id -1 does not lie in table 'items', which has rows 0 to 40",
        "feature 'user': id 7 does not lie in table 'users', which has rows 0 to 6",
        "feature 'tags': id 1099511627776 does not lie in table 'tags', which has rows 0 to 2",
    ]
    assert max(first["difference"], second["difference"]) < 1e-6


@needs_gloo
def test_nan_reaches_only_the_rows_of_its_sample(executed: dict[int, Any]) -> None:
    for found in on_two(executed, "spoilt"):
        for rows, expected, others in found.values():
            assert expected
            assert rows == expected
            assert others == [True, True]


@needs_gloo
def test_ids_and_one_vector_of_each_bag_cross(executed: dict[int, Any]) -> None:
    """`items` is cut in halves of four columns, `users` is on rank 1, `tags` on rank 0; all numbers take 4 bytes."""
    batch = samples(1)[0]
    asks = [("item", "history", "user"), ("item", "history", "tags")]  # what each rank asks the other for
    width = {"item": 4, "history": 4, "user": 8, "tags": 8}
    own = [share(batch, *both) for both in ((0, 5), (5, 12))]
    for rank, found in enumerate(on_two(executed, "counted")):
        ids = sum(len(own[rank][key].values) for key in asks[rank])
        returned = 4 * len(own[1 - rank]) * sum(width[key] for key in asks[1 - rank])
        assert found == {
            "bag counts": [8 * (3 + 2), 1],
            "bag ids": [4 * (3 * len(own[rank]) + ids), 1],
            "bags": [returned, 1],
            "gradients of bags": [4 * len(own[rank]) * sum(width[key] for key in asks[rank]), 1],
        }


def lists(rows: int, count: int, length: int, seed: int) -> JaggedTensor:
    values = torch.randint(rows, (count * length,), generator=torch.Generator().manual_seed(seed))
    return JaggedTensor(values, offsets_from_lengths(torch.full((count,), length)))


def chosen(rows: int, length: int, *, cut: bool = False, size: int = 2) -> bool:
    """Whether bags of a table with so many rows are summed, in a batch of 64 samples."""
    spec = FeatureSpec((), (SparseFeature("a", "t", is_list=True),), {"t": rows}, ("y",))
    parts = (part("t", (0, rows), (0, DIM), 0),)
    if cut:
        parts = (part("t", (0, rows // 2), (0, DIM), 0), part("t", (rows // 2, rows), (0, DIM), size - 1))
    placement = Placement(size, {"t": (rows, DIM)}, parts)
    return choose_pooled(placement, spec, [JaggedBatch.from_features({"a": lists(rows, 64, length, 1)})]) == ("t",)


def test_long_bags_of_different_rows_are_summed_where_rows_lie() -> None:
    assert chosen(10_000, 20)
    assert chosen(10_000, 20, cut=True)
    assert not chosen(10_000, 20, size=1)  # nothing crosses
    assert not chosen(5, 20)  # five rows take less than 32 sums
    assert not chosen(10_000, 1, cut=True)  # each of two holders would return a vector of each bag


def test_the_choice_is_that_of_the_bytes_by_hand() -> None:
    """Rank 1 asks rank 0: 32 bags of 3 values of `distinct` rows; a row takes 8 + 64 bytes, a bag 4 + 64, an id 4."""
    batch = JaggedBatch.from_features({"a": lists(40, 64, 3, 2)})
    distinct = len(batch.values[96:].unique())
    assert (distinct * 72 > 32 * 68 + 96 * 4) == chosen_of(batch, 40)
    few = replace(batch, values=batch.values % 30)
    assert (len(few.values[96:].unique()) * 72 > 32 * 68 + 96 * 4) == chosen_of(few, 40)
    assert chosen_of(batch, 40) != chosen_of(few, 40)


def chosen_of(batch: JaggedBatch, rows: int) -> bool:
    spec = FeatureSpec((), (SparseFeature("a", "t", is_list=True),), {"t": rows}, ("y",))
    placement = Placement(2, {"t": (rows, DIM)}, (part("t", (0, rows), (0, DIM), 0),))
    return bool(choose_pooled(placement, spec, [batch]))


def test_a_placement_keeps_the_tables_whose_bags_are_summed() -> None:
    placement = pooled(2, "grid", SOME)
    assert Placement.from_json(placement.to_json()) == placement
    earlier: dict[str, Any] = {key: value for key, value in placement.to_json().items() if key != "pooled"}
    assert Placement.from_json(earlier) == placements(2)["grid"]
    with pytest.raises(PlanError, match="no table 'nowhere'"):
        pooled(2, "grid", ("nowhere",))


@pytest.mark.parametrize(
    ("keys", "summed"),
    [
        (["parallel.pool=rows"], ()),
        (["parallel.pool=bags"], tuple(SPEC.tables)),
        (["parallel.pool=auto", "parallel.exchange=prioritised"], ()),
    ],
)
def test_a_recipe_says_which_bags_are_summed(keys: list[str], summed: tuple[str, ...]) -> None:
    recipe: Any = recipes.load("synthetic-dlrm", ["parallel.processes=2", *keys])
    unread: Any = None  # neither model nor data are looked at
    assert ranking._pooled(recipe, placements(2)["rows"], unread, unread) == summed
    assert ranking._pooled(recipe, Placement(2, {}, ()), unread, unread) == ()
