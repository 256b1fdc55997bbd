"""Prioritised exchange against the plain one: every bit of every step, whatever two batches share."""

from __future__ import annotations

from functools import partial
from itertools import groupby
from typing import Any

import pytest
import torch
from torch import Tensor

from cordillera.distributed.collectives import Collectives
from cordillera.distributed.ledger import Ledger
from cordillera.embeddings.prioritised_tables import PrioritisedEmbeddingTables
from cordillera.embeddings.sharded_tables import ShardedEmbeddingTables
from cordillera.errors import PlanError
from cordillera.jagged import JaggedBatch
from tests.distributed.processes import found_by, needs_gloo
from tests.embeddings.test_sharded_tables import DIM, RULES, SPEC, STEPS, bounds, config, placements, samples, share

WAYS = {2: ("rows", "grid"), 4: ("whole", "columns", "rows", "grid", "one rank has all")}  # by ranks
USED = {2: ("rowwise_adagrad", "adam"), 4: RULES}
KINDS = ("all differ", "random", "all equal", "changing")  # what a batch shares with the one before


def batches(kind: str, rank: int, size: int) -> list[tuple[JaggedBatch, Tensor]]:
    found = []
    for step in range(STEPS):
        is_equal = kind == "all equal" or (kind == "changing" and step < 9)
        batch, gradient = samples(0 if is_equal else step)
        if kind == "all differ" or (
            kind == "changing" and not is_equal
        ):  # even rows in even steps, odd ones in odd steps
            rows = torch.tensor([41, 7, 41, 3]).repeat_interleave(batch.offsets[::12].diff())
            values = (batch.values // 2 * 2 + step % 2).clamp(max=rows - 1)
            values = torch.where(values % 2 == step % 2, values, (values - 1).clamp(min=0))
            batch = JaggedBatch(batch.keys, values, batch.offsets)
        first, end = bounds(step, size)[rank : rank + 2]
        found.append((share(batch, first, end), gradient[first:end]))
    return found


def trained(tables: ShardedEmbeddingTables, steps: list[tuple[JaggedBatch, Tensor]], ahead: int) -> dict[str, Any]:
    outputs, shares, choices = [], [], []
    for batch, _ in steps[:ahead]:
        tables.prefetch(batch)
    for step, (batch, gradient) in enumerate(steps):
        for following, _ in steps[step + ahead : step + ahead + 1]:
            tables.prefetch(following)
        output = tables(batch)
        outputs.append(output.detach())
        if step % 5 != 3:  # a step without it
            tables.advance()
        output.backward(gradient)
        if step == 6:  # a batch whose gradient is dropped
            tables.discard()
        else:
            tables.update(1.0 - step / 40)
        if step % 7 == 4:  # an evaluation in between
            with torch.no_grad():
                outputs.append(tables(steps[0][0]))
        if isinstance(tables, PrioritisedEmbeddingTables):
            shares.append(tables.collisions)
            choices.append(tables.is_prioritised)
    return {"outputs": outputs, "state": dict(tables.state_dict()), "shares": shares, "choices": choices}


def together(size: int, rank: int, folder: str) -> dict[Any, Any]:
    links = Collectives(None, Ledger(), 60.0)
    result: dict[Any, Any] = {}
    for way in WAYS[size]:
        for rule in USED[size]:
            for kind in KINDS if way in ("rows", "grid") else KINDS[1:2]:
                for tables in (ShardedEmbeddingTables, PrioritisedEmbeddingTables):
                    made = tables(
                        SPEC,
                        DIM,
                        config(rule),
                        placements(size)[way],
                        links,
                        generator=torch.Generator().manual_seed(3),
                    )
                    if isinstance(made, PrioritisedEmbeddingTables):
                        made.look_every = 2
                        if kind != "changing":
                            made.leave_at = 1.0  # all steps are prioritised
                    ahead = 2 if kind in ("random", "changing") else 1
                    result[way, rule, kind, tables.__name__] = trained(made, batches(kind, rank, size), ahead)
    try:
        PrioritisedEmbeddingTables(SPEC, DIM, config("sgd"), placements(size)["copied"], links)
    except PlanError as error:
        result["copies"] = str(error)
    return result


@pytest.fixture(scope="module", params=[pytest.param(size, marks=pytest.mark.slow) for size in (2, 4)])
def executed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[Any, Any]]:
    return found_by(request.param, tmp_path_factory.mktemp("tables"), partial(together, request.param), 240)


@needs_gloo
def test_outputs_weights_and_moments_are_those_of_plain_exchange(executed: dict[int, Any]) -> None:
    compared = 0
    for found in executed.values():
        for key, prioritised in found.items():
            if key == "copies" or key[3] != "PrioritisedEmbeddingTables":
                continue
            plain = found[(*key[:3], "ShardedEmbeddingTables")]
            for step, (ours, theirs) in enumerate(zip(prioritised["outputs"], plain["outputs"], strict=True)):
                assert torch.equal(ours, theirs), (key, step)
            for name, tensor in plain["state"].items():
                assert torch.equal(prioritised["state"][name], tensor), (key, name)
            compared += 1
    assert compared == len(executed) * len(USED[len(executed)]) * (len(WAYS[len(executed)]) - 2 + 2 * len(KINDS))


def rows_of(kind: str, rank: int, size: int, step: int) -> set[tuple[str, int]]:
    """Distinct rows, with their tables, that a rank's samples look up in a step."""
    batch = batches(kind, rank, size)[step][0]
    return {(feature.table, row) for feature in SPEC.sparse for row in batch[feature.name].values.tolist()}


@needs_gloo
def test_rows_that_both_batches_look_up_are_counted(executed: dict[int, Any]) -> None:
    size, step = len(executed), 14
    for rank, found in executed.items():
        for kind in KINDS[:3]:
            before = set().union(*(rows_of(kind, one, size, step) for one in range(size)))
            after = rows_of(kind, rank, size, step + 1)
            expected = len(after), len(after & before)
            assert found["rows", "adam", kind, "PrioritisedEmbeddingTables"]["shares"][step] == expected, (rank, kind)
    counted = [
        found["rows", "adam", kind, "PrioritisedEmbeddingTables"]["shares"][step]
        for found in executed.values()
        for kind in KINDS[:3]
    ]
    assert any(0 < both < asked for asked, both in counted)
    assert any(1 < both == asked for asked, both in counted)


@needs_gloo
def test_steps_are_plain_while_most_rows_are_in_both_batches(executed: dict[int, Any]) -> None:
    for found in executed.values():
        choices = found["rows", "adam", "changing", "PrioritisedEmbeddingTables"]["choices"]
        assert [choice for choice, _ in groupby(choices)] == [True, False, True]
        assert choices == executed[0]["rows", "adam", "changing", "PrioritisedEmbeddingTables"]["choices"]


@needs_gloo
def test_copies_are_refused(executed: dict[int, Any]) -> None:
    assert all("no copies" in found["copies"] for found in executed.values())
