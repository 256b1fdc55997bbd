"""Prioritised exchange against the plain one: every bit of every step, whatever two batches share."""

from __future__ import annotations

from functools import partial
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
from tests.distributed.processes import needs_gloo, run_processes
from tests.embeddings.test_sharded_tables import DIM, RULES, SPEC, STEPS, bounds, config, placements, samples, share

WAYS = {2: ("rows", "grid"), 4: ("whole", "columns", "rows", "grid", "one rank has all")}  # by ranks
USED = {2: ("rowwise_adagrad", "adam"), 4: RULES}
KINDS = ("all differ", "random", "all equal")  # what a batch shares with the one before


def batches(kind: str, rank: int, size: int) -> list[tuple[JaggedBatch, Tensor]]:
    found = []
    for step in range(STEPS):
        batch, gradient = samples(0 if kind == "all equal" else step)
        if kind == "all differ":  # even rows in even steps, odd ones in odd steps
            rows = torch.tensor([41, 7, 41, 3]).repeat_interleave(batch.offsets[::12].diff())
            values = (batch.values // 2 * 2 + step % 2).clamp(max=rows - 1)
            values = torch.where(values % 2 == step % 2, values, (values - 1).clamp(min=0))
            batch = JaggedBatch(batch.keys, values, batch.offsets)
        first, end = bounds(step, size)[rank : rank + 2]
        found.append((share(batch, first, end), gradient[first:end]))
    return found


def trained(tables: ShardedEmbeddingTables, steps: list[tuple[JaggedBatch, Tensor]]) -> dict[str, Any]:
    outputs, shares = [], []
    tables.prefetch(steps[0][0])
    for step, (batch, gradient) in enumerate(steps):
        if step + 1 < len(steps):
            tables.prefetch(steps[step + 1][0])
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
    return {"outputs": outputs, "state": dict(tables.state_dict()), "shares": shares}


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
                    result[way, rule, kind, tables.__name__] = trained(made, batches(kind, rank, size))
    try:
        PrioritisedEmbeddingTables(SPEC, DIM, config("sgd"), placements(size)["copied"], links)
    except PlanError as error:
        result["copies"] = str(error)
    return result


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def executed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[Any, Any]]:
    ended = run_processes(request.param, tmp_path_factory.mktemp("tables"), partial(together, request.param), 240)
    assert ended.codes == [0] * request.param, ended.said
    return ended.found


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


@needs_gloo
def test_rows_that_both_batches_look_up_are_counted(executed: dict[int, Any]) -> None:
    for found in executed.values():
        last = {kind: found["rows", "adam", kind, "PrioritisedEmbeddingTables"]["shares"][-4] for kind in KINDS}
        assert last["all equal"][0] == last["all equal"][1]
        assert last["random"][1] <= last["random"][0]
        assert last["all differ"][1] <= 1 < last["all differ"][0] or last["all differ"][0] <= 1


@needs_gloo
def test_copies_are_refused(executed: dict[int, Any]) -> None:
    assert all("no copies" in found["copies"] for found in executed.values())
