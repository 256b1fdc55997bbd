"""Tables over several processes on unusual batches, and between runs: against the tables of one process."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from _virtual_ranks import run_ranks
from torch import Tensor

from cordillera.data.ranking.features import FeatureSpec, SparseFeature
from cordillera.distributed.collectives import Collectives
from cordillera.distributed.ledger import Ledger
from cordillera.embeddings.sharded_tables import ShardedEmbeddingTables
from cordillera.embeddings.tables import EmbeddingTables
from cordillera.errors import DataError, TrainingError
from cordillera.jagged import JaggedBatch, slice_samples
from cordillera.planning.ranking.placement import Placement, TablePart
from tests.distributed.processes import found_by, needs_gloo
from tests.embeddings.test_sharded_tables import (
    DIM,
    RULES,
    SPEC,
    bounds,
    config,
    part,
    placements,
    samples,
    share,
    whole,
)


def another() -> Placement:
    """Tables cut in columns, of which one is copied."""
    return placements(2)["two groups"]


class Pair:
    """Tables of two processes and those of one, with the same weights."""

    def __init__(self, links: Collectives, rule: str, placement: Placement, spec: FeatureSpec = SPEC) -> None:
        self.rank, settings = links.rank, config(rule)
        self.one = EmbeddingTables(spec, DIM, settings, generator=torch.Generator().manual_seed(3))
        self.two = ShardedEmbeddingTables.of(self.one, placement, links)

    def own(self, batch: JaggedBatch) -> JaggedBatch:
        """Return this rank's samples: five on the first, seven on the second."""
        return slice_samples(batch, *((0, 5), (5, 12))[self.rank])

    def mine(self, tensor: Tensor) -> Tensor:
        """Return the same samples of a tensor."""
        return tensor[0:5] if self.rank == 0 else tensor[5:12]

    def step(self, *steps: int) -> None:
        """Run several backward passes and one update."""
        for step in steps:
            batch, gradient = samples(step)
            self.one(batch).backward(gradient)
            self.two(self.own(batch)).backward(self.mine(gradient))
        self.one.update()
        self.two.update()

    def difference(self) -> float:
        """Return the largest difference of weights and moments, relative where they are above 1."""
        one, two = self.one.state_dict(), self.two.state_dict()
        assert one.keys() == two.keys()
        return max(float(((one[key] - two[key]).abs() / one[key].abs().clamp(min=1)).max()) for key in one)


def prefetched(links: Collectives) -> dict[str, Any]:
    """Compare lookups whose ids were sent one or two steps ahead with others, and forgotten ones."""
    plain, ahead = (Pair(links, "adam", another()) for _ in range(2))
    batches = [(plain.own(batch), plain.mine(gradient)) for batch, gradient in map(samples, range(8))]
    same = []
    ahead.two.prefetch(batches[7][0])
    ahead.two.prefetch(batches[6][0])
    ahead.two.forget()
    ahead.two.prefetch(batches[0][0])
    for step, (batch, gradient) in enumerate(batches[:-1]):
        ahead.two.prefetch(batches[step + 1][0])
        validation = plain.own(samples(50 + step)[0])
        with torch.inference_mode():  # another lookup, while ids of later ones are in transit
            same.append(torch.equal(ahead.two(validation), plain.two(validation)))
        outputs = [tables.two(batch) for tables in (plain, ahead)]
        same.append(torch.equal(*outputs))
        for tables, output in zip((plain, ahead), outputs, strict=True):
            output.backward(gradient)
            tables.two.update()
    ahead.two.forget()
    one, two = (tables.two.state_dict() for tables in (plain, ahead))
    return {"outputs": same, "state": [torch.equal(one[key], two[key]) for key in one]}


def accumulated(links: Collectives) -> dict[str, Any]:
    """Make several backward passes before an update, and discard some."""
    found = {}
    for rule in ("rowwise_adagrad", "adam"):
        pair = Pair(links, rule, another())
        pair.step(1, 2, 3)
        pair.step(4)
        found[rule] = pair.difference()
    batch, gradient = samples(5)
    pair.two(pair.own(batch)).backward(pair.mine(gradient))
    waiting = pair.two.num_pending, pair.two.pending_rows().tolist() == sorted(set(pair.two.pending_rows().tolist()))
    pair.two.discard()
    pair.two.update()
    found |= {"discarded": pair.difference(), "waiting": waiting, "left": pair.two.num_pending, "step": pair.two.step}
    return found


def weighted(links: Collectives) -> float:
    """Return the largest difference of outputs and weights with weights of values."""
    pair = Pair(links, "sgd", another())
    batch, gradient = samples(1)
    batch = replace(batch, weights=torch.rand(len(batch.values), generator=torch.Generator().manual_seed(2)))
    one, two = pair.one(batch), pair.two(pair.own(batch))
    one.backward(gradient)
    two.backward(pair.mine(gradient))
    pair.one.update()
    pair.two.update()
    return max(pair.difference(), float((pair.mine(one) - two).detach().abs().max()))


def one_hot(links: Collectives) -> float:
    """Return the largest difference of weights after batches of one value in each bag."""
    spec = FeatureSpec(
        (), (SparseFeature("a", "items"), SparseFeature("b", "users")), {"items": 41, "users": 7}, ("y",)
    )
    placement = Placement(2, {"items": (41, DIM), "users": (7, DIM)}, (
        TablePart("items", 0, 20, 0, DIM, (1,)), TablePart("items", 20, 21, 0, DIM, (0,)), whole("users", 0, 1),
    ))  # fmt: skip
    pair = Pair(links, "adagrad", placement, spec)
    draw = torch.Generator().manual_seed(links.size)
    for _ in range(3):
        values = torch.cat([torch.randint(rows, (12,), generator=draw) for rows in (41, 7)])
        batch = JaggedBatch(("a", "b"), values, torch.arange(25), one_hot=True)
        gradient = torch.randn(12, 2, DIM, generator=draw)
        pair.one(batch).backward(gradient)
        pair.two(pair.own(batch)).backward(pair.mine(gradient))
        pair.one.update()
        pair.two.update()
    return pair.difference()


def empty(links: Collectives) -> dict[str, Any]:
    """Look up and update without any sample, on all ranks."""
    found = {}
    for rule in RULES:
        pair = Pair(links, rule, placements(2)["grid"])
        pair.step(1)
        none = slice_samples(samples(2)[0], 0, 0)
        outputs = pair.one(none), pair.two(none)
        for output in outputs:
            output.sum().backward()
        pair.one.update()
        pair.two.update()
        found[rule] = [list(outputs[0].shape), list(outputs[1].shape), pair.one.step - pair.two.step, pair.difference()]
    return found


def mistaken(links: Collectives) -> dict[str, Any]:
    """Return the errors of wrong batches on one rank, and the difference after training goes on."""
    pair, said = Pair(links, "sgd", placements(2)["rows"]), []
    batch = pair.own(samples(1)[0])
    if links.rank == 1:
        for value in (41, -1, 1 << 40):
            values = batch.values.clone()
            values[3] = value
            for act in (pair.two, pair.two.prefetch):
                try:
                    act(replace(batch, values=values))
                except DataError as error:
                    said.append(str(error))
        for wrong in (
            replace(batch, keys=("user", "item", *batch.keys[2:])),
            slice_samples(JaggedBatch((), batch.values[:0], batch.offsets[:1]), 0, 0),
        ):
            try:
                pair.two(wrong)
            except DataError as error:
                said.append(str(error))
        try:
            pair.two(replace(batch, weights=torch.ones(len(batch.values), requires_grad=True)))
        except TrainingError as error:
            said.append(str(error))
        try:
            pair.two.table("nowhere")
        except DataError as error:
            said.append(str(error))
    pair.step(1)
    return {"said": said, "difference": pair.difference()}


def exchanged(links: Collectives) -> dict[str, Any]:
    """Return whether weights and moments pass unchanged from one to two processes, over placements, and back."""
    found: dict[str, Any] = {}
    for rule in RULES:
        pair = Pair(links, rule, another())
        for step in range(3):
            pair.step(step)
        state = pair.one.state_dict()
        pair.two.load_state_dict(state)
        again = ShardedEmbeddingTables(SPEC, DIM, config(rule), placements(2)["grid"], links)
        again.load_state_dict(pair.two.state_dict())
        back = EmbeddingTables(SPEC, DIM, config(rule))
        back.load_state_dict(again.state_dict())
        found[rule] = {key: torch.equal(tensor, back.state_dict()[key]) for key, tensor in state.items()}
        assert back.step == again.step == 3
        assert torch.equal(again.table("users"), back.table("users"))
    wrong = []
    for change in (
        lambda s: s.pop("weight"),
        lambda s: s.update(weight=s["weight"][1:]),
        lambda s: s.update(sum=s["weight"]),
    ):
        broken = Pair(links, "rowwise_adagrad", another()).two
        given = broken.state_dict()
        change(given)
        try:
            broken.load_state_dict(given)
        except RuntimeError as error:
            wrong.append(str(error))
    return found | {"wrong": wrong}


def spoilt(links: Collectives) -> dict[str, Any]:
    """Return the rows that are not finite after NaN in the gradient of one sample, and those that it looks up."""
    found = {}
    for name in ("grid", "two groups", "copied"):
        for rule in ("sgd", "rowwise_adagrad"):
            pair = Pair(links, rule, placements(2)[name])
            batch, gradient = samples(3)
            gradient[8, 2, 5] = torch.nan  # a column of `history` of one sample, which the second rank has
            pair.two(pair.own(batch)).backward(pair.mine(gradient))
            pair.two.update()
            rows = (~pair.two.table("items").isfinite().all(1)).nonzero().flatten().tolist()
            others = [pair.two.table(table).isfinite().all().item() for table in ("users", "tags")]
            found[name, rule] = rows, sorted(set(batch["history"].to_lists()[8])), others
    return found


def halved(links: Collectives) -> dict[str, Any]:
    """Return the dtypes of a lookup under autocast, and the difference to one process."""
    pair, (batch, gradient) = Pair(links, "sgd", another()), samples(1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        one, two = pair.one(batch), pair.two(pair.own(batch))
    one.backward(gradient.bfloat16())
    two.backward(pair.mine(gradient).bfloat16())
    pair.one.update()
    pair.two.update()
    return {
        "dtypes": [str(one.dtype), str(two.dtype)],
        "same": torch.equal(pair.mine(one), two),
        "difference": pair.difference(),
    }


def without_parts(links: Collectives) -> dict[str, Any]:
    """Train with all tables on the other rank."""
    pair = Pair(links, "adam", placements(2)["one rank has all"])
    pair.step(1)
    pair.step(2)
    difference = pair.difference()
    first_columns = pair.two.table("items")[:, :4].clone()
    pair.two.clear_columns(4)
    cleared = pair.two.table("items")
    return {
        "bytes": pair.two.memory_bytes(),
        "difference": difference,
        "cleared": bool((cleared[:, 4:] == 0).all()) and torch.equal(cleared[:, :4], first_columns),
    }


def counted(links: Collectives) -> dict[str, Any]:
    """Return bytes and messages of one step, by name, and the distinct ids of each table on each rank."""
    pair = Pair(links, "sgd", placements(2)["columns"])
    links.ledger.clear()
    pair.step(1)
    found = {name: [one.calls, one.bytes, one.messages] for name, one in links.ledger.traffic.items()}
    batch = samples(1)[0]
    distinct = []
    for first, end in ((0, 5), (5, 12)):
        lists = {
            key: batch[key].values[batch[key].offsets[first] : batch[key].offsets[end]].tolist() for key in batch.keys
        }
        distinct.append([len({*lists["item"], *lists["history"]}), len(set(lists["user"])), len(set(lists["tags"]))])
    return {"traffic": found, "distinct": distinct}


CASES = (prefetched, accumulated, weighted, one_hot, empty, mistaken, exchanged, spoilt, halved, without_parts, counted)


def all_cases(links: Collectives) -> dict[str, Any]:
    return {case.__name__: case(links) for case in CASES}


def cases(rank: int, folder: str) -> dict[str, Any]:
    return all_cases(Collectives(None, Ledger(), 120.0))


@pytest.fixture(scope="module", params=["threads", pytest.param("processes", marks=pytest.mark.slow)])
def on_two(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """Results of all cases, on both ranks."""
    if request.param == "threads":
        return dict(enumerate(run_ranks(2, all_cases, 60.0)))
    return found_by(2, tmp_path_factory.mktemp("cases"), cases, 240)


@needs_gloo
def test_ids_sent_ahead_change_no_bit(on_two: dict[int, Any]) -> None:
    for found in on_two.values():
        assert all(found["prefetched"]["outputs"])
        assert all(found["prefetched"]["state"])


@needs_gloo
def test_several_backward_passes_count_as_one_batch_and_may_be_discarded(on_two: dict[int, Any]) -> None:
    for found in on_two.values():
        accumulated = found["accumulated"]
        assert max(accumulated["rowwise_adagrad"], accumulated["adam"], accumulated["discarded"]) < 1e-6
        assert (accumulated["waiting"], accumulated["left"], accumulated["step"]) == ((1, True), 0, 2)


@needs_gloo
@pytest.mark.parametrize("name", ["weighted", "one_hot"])
def test_weights_of_values_and_single_values_are_those_of_one_process(on_two: dict[int, Any], name: str) -> None:
    for found in on_two.values():
        assert found[name] < 1e-6


@needs_gloo
def test_an_update_without_any_sample_is_that_of_one_process(on_two: dict[int, Any]) -> None:
    for found in on_two.values():
        for shape, same_shape, steps, difference in found["empty"].values():
            assert shape == same_shape == [0, 4, DIM]
            assert steps == 0
            assert difference < 1e-6


@needs_gloo
def test_a_wrong_batch_on_one_rank_is_named_before_anything_is_sent(on_two: dict[int, Any]) -> None:
    said = on_two[1]["mistaken"]["said"]
    ids = [
        f"feature 'item': id {value} of sample 3 does not lie in table 'items', which has rows 0 to 40"
        for value in (41, -1, 1 << 40)
    ]
    for text, start in zip(said[:6], [one for one in ids for _ in range(2)], strict=True):
        assert text.startswith(start)
    assert "expected the sparse features ['item', 'user', 'history', 'tags'], got ['user', 'item'" in said[6]
    assert "got []" in said[7]
    assert "gradients with respect to the values' weights" in said[8]
    assert "no table 'nowhere'" in said[9]
    assert len(said) == 10
    assert max(found["mistaken"]["difference"] for found in on_two.values()) < 1e-6


@needs_gloo
def test_weights_and_moments_pass_between_one_and_two_processes_bit_for_bit(on_two: dict[int, Any]) -> None:
    for found in on_two.values():
        wrong = found["exchanged"].pop("wrong")
        assert all(same for state in found["exchanged"].values() for same in state.values())
        for text, words in zip(
            wrong, ("Missing key", "size mismatch for weight", "size mismatch for sum"), strict=True
        ):
            assert words in text


@needs_gloo
def test_nan_reaches_only_the_rows_of_its_sample(on_two: dict[int, Any]) -> None:
    for found in on_two.values():
        for rows, expected, others in found["spoilt"].values():
            assert expected
            assert rows == expected
            assert others == [True, True]


@needs_gloo
def test_under_autocast_lookups_are_in_bfloat16(on_two: dict[int, Any]) -> None:
    for found in on_two.values():
        assert found["halved"]["dtypes"] == ["torch.bfloat16"] * 2
        assert found["halved"]["same"]
        assert found["halved"]["difference"] < 1e-6


@needs_gloo
def test_a_rank_may_hold_nothing(on_two: dict[int, Any]) -> None:
    rows = 41 + 7 + 3
    assert on_two[0]["without_parts"]["bytes"] == {"rows": 0, "optimizer": 0}
    assert on_two[1]["without_parts"]["bytes"] == {"rows": 4 * rows * DIM, "optimizer": 2 * 4 * rows * DIM}
    assert all(found["without_parts"]["difference"] < 1e-6 for found in on_two.values())
    assert all(found["without_parts"]["cleared"] for found in on_two.values())


@needs_gloo
def test_every_distinct_row_crosses_once_to_each_holder_of_its_columns(on_two: dict[int, Any]) -> None:
    """`items` is cut in halves of four columns, `users` is on rank 1, `tags` on rank 0; ids take 8 bytes, values 4."""
    asks = [("items", "users"), ("items", "tags")]  # what each rank asks the other for
    width = {"items": 4, "users": 8, "tags": 8}
    for rank, found in on_two.items():
        distinct = [
            dict(zip(("items", "users", "tags"), counts, strict=True)) for counts in found["counted"]["distinct"]
        ]
        own, other = (distinct[one] for one in (rank, 1 - rank))
        assert found["counted"]["traffic"] == {
            "lookup counts": [1, 8 * 2, 1],
            "lookup ids": [1, 8 * sum(own[table] for table in asks[rank]), 1],
            "rows": [1, 4 * sum(other[table] * width[table] for table in asks[1 - rank]), 1],
            "gradients": [1, 4 * sum(own[table] * width[table] for table in asks[rank]), 1],
        }


SIZES = (4, 3, 2, 1, 4)


def cut_over(size: int, turn: int) -> Placement:
    """A placement over any number of ranks, another one at every turn."""
    cut = [round(i * 41 / size) for i in range(size + 1)]
    copies = tuple(range(size))
    items = [part("items", (cut[i], cut[i + 1]), (0, DIM), (i + turn) % size) for i in range(size)]
    if turn % 2:
        items = [part("items", (0, 41), (0, 4), 0), part("items", (0, 41), (4, 8), size - 1)]
    parts = (*items, whole("users", *(copies if turn % 2 else [size - 1])), whole("tags", 0))
    return Placement(size, {table: (rows, DIM) for table, rows in SPEC.tables.items()}, parts)


def handed_over(size: int, turn: int, rule: str, saved: str, rank: int, folder: str) -> dict[str, Any]:
    """Load the tables of other processes, train four steps more and return the state before and after."""
    tables = ShardedEmbeddingTables(SPEC, DIM, config(rule), cut_over(size, turn), Collectives(None, Ledger(), 120.0))
    tables.load_state_dict(torch.load(saved, weights_only=True))
    before = {key: tensor.clone() for key, tensor in tables.state_dict().items()}
    for step in range(4 * turn, 4 * turn + 4):
        batch, gradient = samples(step)
        first, end = bounds(step, size)[rank : rank + 2] if size > 1 else (0, 12)
        tables(share(batch, first, end)).backward(gradient[first:end])
        tables.update()
    return {"before": before, "after": tables.state_dict()}


@needs_gloo
@pytest.mark.slow
@pytest.mark.parametrize("rule", ["rowwise_adagrad", "adam"])
def test_tables_go_on_over_other_numbers_of_processes(tmp_path: Path, rule: str) -> None:
    one = EmbeddingTables(SPEC, DIM, config(rule), generator=torch.Generator().manual_seed(3))
    state: dict[str, Tensor] = {key: tensor.clone() for key, tensor in one.state_dict().items()}
    for turn, size in enumerate(SIZES):
        (folder := tmp_path / str(turn)).mkdir()
        torch.save(state, folder / "state")
        by_rank = found_by(size, folder, partial(handed_over, size, turn, rule, str(folder / "state")), 240)
        for found in by_rank.values():
            for key, tensor in state.items():
                assert torch.equal(found["before"][key], tensor), (turn, key)
                assert torch.equal(found["after"][key], by_rank[0]["after"][key]), (turn, key)
        state = by_rank[0]["after"]
    for step in range(4 * len(SIZES)):
        batch, gradient = samples(step)
        one(batch).backward(gradient)
        one.update()
    for key, tensor in one.state_dict().items():
        torch.testing.assert_close(state[key], tensor, rtol=1e-6, atol=1e-6)
