"""Tables over several processes against the tables of one process, for every way to cut a table."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from _virtual_ranks import run_ranks
from torch import Tensor

from cordillera.data.ranking.features import FeatureSpec, SparseFeature
from cordillera.distributed.collectives import Collectives
from cordillera.distributed.ledger import Ledger
from cordillera.embeddings.sharded_tables import ShardedEmbeddingTables
from cordillera.embeddings.tables import EmbeddingTables, TablesConfig
from cordillera.jagged import JaggedBatch, JaggedTensor
from cordillera.planning.ranking.placement import Placement, TablePart
from tests.distributed.processes import asked_for, found_by, needs_gloo

DIM, STEPS, RATE = 8, 10, 0.05
RULES = ("sgd", "adagrad", "rowwise_adagrad", "adam")
SPEC = FeatureSpec(
    dense=(),
    sparse=(
        SparseFeature("item", "items"),
        SparseFeature("user", "users"),
        SparseFeature("history", "items", pooling="mean", is_list=True),
        SparseFeature("tags", "tags", pooling="sum", is_list=True),
    ),
    tables={"items": 41, "users": 7, "tags": 3},
    tasks=("click",),
)


def part(table: str, rows: tuple[int, int], columns: tuple[int, int], *ranks: int) -> TablePart:
    return TablePart(table, rows[0], rows[1] - rows[0], columns[0], columns[1] - columns[0], ranks)


def whole(table: str, *ranks: int) -> TablePart:
    return part(table, (0, SPEC.tables[table]), (0, DIM), *ranks)


def placements(size: int) -> dict[str, Placement]:
    """Each way to cut tables, over ``size`` ranks (2 or 4)."""
    last = size - 1
    everywhere = tuple(range(size))
    groups = (0, size // 2)  # one rank in each half
    others = (size // 2 - 1, size - 1)
    cut = [round(i * 41 / size) for i in range(size + 1)]
    ways = {
        "whole": (whole("items", 0), whole("users", last), whole("tags", last)),
        "columns": (
            part("items", (0, 41), (0, 4), 0),
            part("items", (0, 41), (4, 8), last),
            whole("users", last),
            whole("tags", 0),
        ),
        "rows": (
            *(part("items", (cut[i], cut[i + 1]), (0, 8), i) for i in range(size)),
            whole("users", 0),
            whole("tags", 0),
        ),
        "grid": (
            part("items", (0, 20), (0, 4), 0),
            part("items", (20, 41), (0, 4), last),
            part("items", (0, 33), (4, 8), last),
            part("items", (33, 41), (4, 8), 0),
            part("users", (0, 3), (0, 8), last),
            part("users", (3, 7), (0, 8), 0),
            whole("tags", 0),
        ),
        "copied": tuple(whole(table, *everywhere) for table in SPEC.tables),
        "some copied": (whole("items", 0), whole("users", *everywhere), whole("tags", *everywhere)),
        "two groups": (
            part("items", (0, 41), (0, 4), *groups),
            part("items", (0, 41), (4, 8), *others),
            whole("users", *others),
            part("tags", (0, 2), (0, 8), *groups),
            part("tags", (2, 3), (0, 8), *others),
        ),
        "one rank has all": tuple(whole(table, last) for table in SPEC.tables),
    }
    shapes = {table: (rows, DIM) for table, rows in SPEC.tables.items()}
    return {name: Placement(size, shapes, parts) for name, parts in ways.items()}


def samples(step: int, size: int = 12) -> tuple[JaggedBatch, Tensor]:
    """A global batch with empty, short and long bags, and the gradient of its output."""
    draw = torch.Generator().manual_seed(step)

    def bags(rows: int, longest: int) -> JaggedTensor:
        counts = torch.randint(0, longest + 1, (size,), generator=draw).tolist()
        return JaggedTensor.from_lists([torch.randint(rows, (n,), generator=draw).tolist() for n in counts])

    def single(rows: int) -> JaggedTensor:
        return JaggedTensor(torch.randint(rows, (size,), generator=draw), torch.arange(size + 1))

    features = {"item": single(41), "user": single(7), "history": bags(41, 5), "tags": bags(3, 2)}
    return JaggedBatch.from_features(features), torch.randn(size, len(SPEC.sparse), DIM, generator=draw)


def share(batch: JaggedBatch, first: int, end: int) -> JaggedBatch:
    rows = {key: batch[key].to_lists()[first:end] for key in batch.keys}
    return JaggedBatch.from_features({key: JaggedTensor.from_lists(lists) for key, lists in rows.items()})


def bounds(step: int, size: int, count: int = 12) -> list[int]:
    """First sample of each rank: uneven, sometimes none, and in the last steps none at all on rank 0."""
    draw = torch.Generator().manual_seed(1000 + step)
    cuts = torch.randint(0, count + 1, (size - 1,), generator=draw).sort().values.tolist()
    if step >= STEPS - 3:
        cuts[0] = 0
    return [0, *sorted(cuts), count]


def config(rule: str, **options: Any) -> TablesConfig:
    return TablesConfig(name=rule, learning_rate=RATE, **options)


def alone(rule: str, **options: Any) -> tuple[dict[str, Tensor], list[Tensor]]:
    tables = EmbeddingTables(SPEC, DIM, config(rule, **options), generator=torch.Generator().manual_seed(3))
    outputs = []
    for step in range(STEPS):
        batch, gradient = samples(step)
        output = tables(batch)
        outputs.append(output.detach())
        output.backward(gradient)
        tables.update(1.0 - step / 40)
    state = {"weight": tables.weight.detach()} | {name: getattr(tables, name) for name in tables._state_names}
    return state, outputs


def together(asked: list[tuple[str, str]], rank: int, folder: str) -> dict[str, Any]:
    return train_all(asked, Collectives(None, Ledger(), 60.0))


def train_all(asked: list[tuple[str, str]], links: Collectives) -> dict[str, Any]:
    result: dict[Any, Any] = {}
    rank, ways = links.rank, placements(links.size)
    for name, rule in asked:
        for decay in (0.0, 0.1) if name in ("columns", "grid") else (0.0,):
            result[name, rule, decay] = trained(ways[name], links, rank, config(rule, weight_decay=decay))
    result["again"] = trained(ways["grid"], links, rank, config("rowwise_adagrad"))
    return result


def trained(placement: Placement, links: Collectives, rank: int, settings: TablesConfig) -> dict[str, Any]:
    tables = ShardedEmbeddingTables(SPEC, DIM, settings, placement, links, generator=torch.Generator().manual_seed(3))
    worst = []
    for step in range(STEPS):
        batch, gradient = samples(step)
        first, end = bounds(step, placement.size)[rank : rank + 2]
        output = tables(share(batch, first, end))
        worst.append(output.detach())
        output.backward(gradient[first:end])
        tables.update(1.0 - step / 40)
    state = tables.state_dict()
    assert int(state.pop("_extra_state")) == STEPS
    return {"outputs": worst, "state": state, "step": tables.step}


@pytest.fixture(scope="module", params=["threads", *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4))])
def executed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[Any, Any]]:
    """Results of placements and rules: of two ranks that are threads, or of two or four processes."""
    asked = sorted(asked_for(request, "name", "rule") | {("grid", "rowwise_adagrad")})
    if request.param == "threads":
        return dict(enumerate(run_ranks(2, partial(train_all, asked), 60.0)))
    size = request.param
    return found_by(size, tmp_path_factory.mktemp("tables"), partial(together, asked), 180)


@pytest.mark.cases(2)
@needs_gloo
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", list(placements(2)))
def test_weights_and_moments_are_those_of_one_process(executed: dict[int, Any], name: str, rule: str) -> None:
    for decay in (0.0, 0.1) if name in ("columns", "grid") else (0.0,):
        expected, outputs = alone(rule, weight_decay=decay)
        for rank, found in executed.items():
            state = found[name, rule, decay]["state"]
            assert state.keys() == expected.keys()
            for key, tensor in expected.items():
                torch.testing.assert_close(state[key], tensor, rtol=1e-6, atol=1e-6, msg=lambda m, k=key: f"{k}: {m}")
            assert found[name, rule, decay]["step"] == STEPS
            for step, output in enumerate(outputs):
                first, end = bounds(step, len(executed))[rank : rank + 2]
                torch.testing.assert_close(
                    found[name, rule, decay]["outputs"][step], output[first:end], rtol=0, atol=1e-6
                )


@needs_gloo
def test_two_runs_are_equal_to_the_bit_and_so_are_all_ranks(executed: dict[int, Any]) -> None:
    first = executed[0]["grid", "rowwise_adagrad", 0.0]["state"]
    for found in executed.values():
        for key, tensor in found["again"]["state"].items():
            assert torch.equal(tensor, first[key])
