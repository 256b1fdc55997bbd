"""L2 by occurrences is that of a loss with the squares of all looked-up rows, differentiated by autograd."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from cordillera.data.ranking.features import FeatureSpec, SparseFeature
from cordillera.embeddings import tables as tables_module
from cordillera.embeddings.dynamic_ids import DynamicRowsConfig
from cordillera.embeddings.dynamic_tables import DynamicTables
from cordillera.embeddings.sharded_tables import ShardedEmbeddingTables
from cordillera.embeddings.tables import EmbeddingTables, TablesConfig
from cordillera.errors import PlanError, RecipeError, TrainingError
from cordillera.jagged import JaggedBatch, JaggedTensor
from cordillera.planning.ranking.placement import Placement, TablePart
from cordillera.recipe import load
from cordillera.workflows.ranking import train

from .test_tables import BACKENDS, OPTIMIZERS, SPEC, batch, dense_lookup, tables

RATE, EPS = 0.1, 1e-8
STEPS = 3


def all_looked_up(weights: dict[str, Tensor], sparse: JaggedBatch) -> Tensor:
    """Sum of the squares of every row that a batch looks up, as often as it does."""
    found = [weights[feature.table][sparse[feature.name].values].square().sum() for feature in SPEC.sparse]
    return torch.stack(found).sum()


def dense_rule(name: str, weights: list[Tensor], decay: float) -> Callable[[], Any]:
    """One step of a dense optimizer on the tables, with the gradients that autograd has left."""
    if name == "sgd":
        return torch.optim.SGD(weights, RATE, weight_decay=decay).step
    if name == "adagrad":
        return torch.optim.Adagrad(weights, RATE, eps=EPS, weight_decay=decay).step
    if name == "adam":
        return torch.optim.Adam(weights, RATE, eps=EPS, weight_decay=decay).step
    sums = [torch.zeros(len(one), dtype=torch.float64) for one in weights]

    def step() -> None:
        for weight, total in zip(weights, sums, strict=True):
            gradient = weight.grad + decay * weight.detach()
            total += gradient.square().mean(1)
            weight.data -= RATE * gradient / (total.sqrt() + EPS).unsqueeze(1)

    return step


@pytest.mark.cases(2)
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("decay", [0.0, 0.2])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_updates_equal_those_of_the_loss_with_the_squares_of_all_looked_up_rows(
    optimizer: str, backend: str, decay: float, weighted: bool
) -> None:
    if backend == "fbgemm" and (decay or optimizer == "adam"):
        pytest.skip("FBGEMM has no kernel for it")
    is_double = backend != "fbgemm"
    model = tables(optimizer, backend, l2=0.7, weight_decay=decay, eps=EPS)
    model = model.double() if is_double else model
    copies = {name: model.table(name).double().clone().requires_grad_() for name in SPEC.tables}
    step = dense_rule(optimizer, list(copies.values()), decay)
    size = 40
    for seed in range(STEPS):
        sparse = batch(seed, size, weighted)
        for table, rows in SPEC.tables.items():  # a dense optimizer moves all rows, so all are looked up
            held = [sparse[one.name].values for one in SPEC.sparse if one.table == table]
            assert len(torch.cat(held).unique()) == rows
        direction = torch.randn(size, 4, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        for one in copies.values():
            one.grad = None
        loss = (dense_lookup(copies, sparse) * direction).sum() / size
        (loss + 0.7 / 2 * all_looked_up(copies, sparse) / size).backward()
        step()
        output = model(sparse)
        (output * direction.to(output.dtype)).sum().div(size).backward()
        model.update()
    expected = torch.cat([copies[name].detach() for name in SPEC.tables])
    bounds = {"rtol": 1e-11, "atol": 1e-12} if is_double else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(model.weight.detach().double(), expected, **bounds)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_passes_before_an_update_are_one_larger_batch(optimizer: str) -> None:
    apart, together = (tables(optimizer, l2=0.5).double() for _ in range(2))
    first, second = batch(1, 5), batch(2, 7)
    for sparse in (first, second):
        apart(sparse).square().sum().backward()
    lists = {name: first[name].to_lists() + second[name].to_lists() for name in ("item", "user", "history", "tags")}
    whole = JaggedBatch.from_features({name: JaggedTensor.from_lists(rows) for name, rows in lists.items()})
    together(whole).square().sum().backward()
    apart.update()
    together.update()
    torch.testing.assert_close(apart.weight, together.weight, rtol=1e-12, atol=1e-13)


def test_it_grows_with_occurrences_and_weight_decay_does_not() -> None:
    """Row 1 occurs once and row 2 five times in three samples; the loss itself has no gradient."""
    spec = FeatureSpec((), (SparseFeature("a", "t", is_list=True),), {"t": 4}, ("y",))
    lists = torch.tensor([1, 2, 2, 2, 2, 2]), torch.tensor([0, 2, 6, 6])
    for key, shares in (("l2", [0.0, 0.3 / 3, 0.3 * 5 / 3, 0.0]), ("weight_decay", [0.0, 0.3, 0.3, 0.0])):
        config = TablesConfig.model_validate({"name": "sgd", "learning_rate": 1.0, key: 0.3})
        model = EmbeddingTables(spec, 2, config, init=1.0)
        before = model.weight.detach().clone()
        (model(JaggedBatch(("a",), *lists)).sum() * 0).backward()
        model.update()
        torch.testing.assert_close(model.weight.detach(), before * (1 - torch.tensor(shares))[:, None])


def test_rows_looked_up_one_by_one_count_beside_the_batch() -> None:
    model = tables("sgd", l2=0.4).double()
    before = model.weight.detach().clone()
    sparse, ids = batch(3, 6), torch.tensor([4, 4, 0])
    (0 * model(sparse).sum() + 0 * model.unpooled("item", ids).sum()).backward()
    model.update()
    looked_up = [sparse["item"].values, sparse["history"].values, ids]
    looked_up += [9 + sparse["user"].values, 14 + sparse["tags"].values]
    counts = torch.bincount(torch.cat(looked_up), minlength=18)
    torch.testing.assert_close(model.weight.detach(), before * (1 - 0.1 * 0.4 / 6 * counts)[:, None])
    model.unpooled("item", ids).sum().backward()
    with pytest.raises(TrainingError, match="no batch of samples"):
        model.update()


def test_gradients_in_bfloat16_keep_the_term_in_float32() -> None:
    model = tables("sgd", l2=0.7)
    before = model.weight.detach().clone()
    sparse = batch(0, 6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = model(sparse)
    assert output.dtype == torch.bfloat16
    (output.sum() * 0).backward()
    model.update()
    looked_up = [sparse["item"].values, sparse["history"].values, 9 + sparse["user"].values, 14 + sparse["tags"].values]
    counts = torch.bincount(torch.cat(looked_up), minlength=18)
    torch.testing.assert_close(model.weight.detach(), before * (1 - 0.1 * 0.7 / 6 * counts)[:, None], rtol=1e-6, atol=0)


def test_dynamic_tables_know_it_and_their_counts_of_use_do_not() -> None:
    spec = FeatureSpec((), (SparseFeature("a", "t", is_list=True),), {"t": 50}, ("y",))
    made = {}
    for l2 in (0.0, 0.6):
        config = TablesConfig(name="sgd", learning_rate=1.0, l2=l2, dynamic=DynamicRowsConfig(min_count=1))
        model = DynamicTables(spec, 2, config, init=1.0, generator=torch.Generator().manual_seed(1))
        sparse = JaggedBatch(("a",), torch.tensor([40, 7, 7, 7]), torch.tensor([0, 2, 4]))
        model(sparse).sum().backward()
        model.update()
        made[l2] = dict(zip(model.ids_of("t").tolist(), model.table("t"), strict=True)), model.ids.state()
    plain, decayed = made[0.0][0], made[0.6][0]
    for place, times in ((40, 1), (7, 3)):
        drawn = plain[place] + times  # the gradient of a sum is the number of occurrences
        torch.testing.assert_close(decayed[place], plain[place] - 0.6 * times / 2 * drawn)
    for name, state in made[0.0][1].items():
        assert torch.equal(state, made[0.6][1][name]), name


def test_without_it_nothing_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(tables_module, "with_l2", fail)
    model = tables("adam")
    model(batch()).sum().backward()
    model.update()
    model = tables("adam", l2=0.1)
    model(batch()).sum().backward()
    with pytest.raises(AssertionError):
        model.update()


@pytest.mark.parametrize(
    "options", [{"rows": "int8"}, {"rows": "fp16"}, {"cache": 0.5}, {"cache": 0.5, "storage": "file"}, {"l2": -1.0}]
)
def test_rows_of_other_kinds_and_negative_factors_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="l2"):
        TablesConfig.model_validate({"l2": 0.1, **options})


def test_several_processes_and_slices_are_refused_by_name(tmp_path: Any) -> None:
    shapes = {name: (rows, 3) for name, rows in SPEC.tables.items()}
    placement = Placement(1, shapes, tuple(TablePart(name, 0, rows, 0, 3, (0,)) for name, (rows, _) in shapes.items()))
    links: Any = SimpleNamespace(size=1, rank=0)
    with pytest.raises(PlanError, match="l2"):
        ShardedEmbeddingTables(SPEC, 3, TablesConfig(l2=0.1), placement, links)
    model = tables(l2=0.1)
    model(batch()).sum().backward()
    with pytest.raises(TrainingError, match=r"tables\.l2"):
        model.reduce_pending()
    for more in ("parallel.processes=2", "training.slices=2"):
        with pytest.raises(RecipeError, match=r"tables\.l2"):
            train(load("movielens-fm", ["tables.l2=0.1", "training.precision='fp32'", more]), tmp_path / more)
