"""Balancing of tasks: what scales, NaN and other tasks change, and what they never do."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from scipy.optimize import minimize
from torch import Tensor

from cordillera.embeddings.tables import TablesConfig
from cordillera.errors import TrainingError
from cordillera.models.ranking import MODELS, build
from cordillera.models.ranking.heads import Heads
from cordillera.reports.ranking.balance import balance
from cordillera.reports.ranking.material import Material
from cordillera.training.ranking.config import TrainingConfig
from cordillera.training.ranking.tasks.loss_balance import BalanceConfig, LossBalancer, heads_to_balance
from cordillera.training.ranking.tasks.losses import task_losses
from cordillera.training.ranking.tasks.simplex import min_norm_weights, preferred_weights

from .conftest import FEATURES, MemoryLoader

MODES = ("equal", "min-norm", "preferred")
SHARED = ("dnn", "dlrm", "mmoe", "ple")


def products_of(tasks: int, length: int, seed: int) -> np.ndarray:
    vectors = np.random.default_rng(seed).standard_normal((tasks, length))
    return vectors @ vectors.T


@given(st.integers(1, 12), st.integers(1, 12), st.integers(0, 10**6))
def test_min_norm_weights_are_optimal(tasks: int, length: int, seed: int) -> None:
    products = products_of(tasks, length, seed)
    weights = min_norm_weights(products)
    assert weights.min() >= 0
    assert weights.sum() == pytest.approx(1.0, abs=1e-12)
    slopes, size = products @ weights, products.diagonal().max()
    assert (slopes >= weights @ slopes - 1e-9 * size).all()  # the conditions of Karush, Kuhn and Tucker
    used = weights > 1e-9
    np.testing.assert_allclose(slopes[used], weights @ slopes, atol=1e-7 * size)


@given(st.integers(0, 10**6))
def test_min_norm_weights_are_those_of_a_general_solver(seed: int) -> None:
    products = products_of(5, 7, seed)
    weights = min_norm_weights(products)
    found = minimize(
        lambda w: 0.5 * w @ products @ w,
        np.full(5, 0.2),
        jac=lambda w: products @ w,
        bounds=[(0, 1)] * 5,
        constraints={"type": "eq", "fun": lambda w: w.sum() - 1, "jac": lambda w: np.ones(5)},
        method="SLSQP",
        options={"ftol": 1e-14, "maxiter": 500},
    )
    ours, theirs = 0.5 * weights @ products @ weights, float(found.fun)
    assert ours <= theirs + 1e-6 * products.diagonal().max()


@given(st.floats(0.01, 100), st.floats(0.01, 100), st.floats(-1, 1))
def test_two_tasks_have_the_closed_form(one: float, two: float, cosine: float) -> None:
    both = cosine * math.sqrt(one * two)
    products = np.array([[one, both], [both, two]])
    weights = min_norm_weights(products)
    apart = one + two - 2 * both
    expected = min(1.0, max(0.0, (two - both) / apart)) if apart > 1e-9 * (one + two) else weights[0]
    assert weights[0] == pytest.approx(expected, abs=1e-6)
    if cosine < 0:  # no task gets worse
        assert (products @ weights >= -1e-9 * (one + two)).all()


@given(st.integers(2, 10), st.floats(0.01, 100), st.integers(0, 10**6))
def test_preferred_weights_are_stationary(tasks: int, strength: float, seed: int) -> None:
    products = products_of(tasks, 6, seed)
    preference = np.random.default_rng(seed).uniform(0.1, 1.0, tasks)
    preference /= preference.sum()
    weights = preferred_weights(products, preference, strength)
    assert weights.min() > 0
    assert weights.sum() == pytest.approx(1.0, abs=1e-12)
    slopes = products @ weights + strength * np.log(weights / preference)
    assert np.ptp(slopes) <= 1e-6 * (strength + products.diagonal().max())


def test_weights_of_nothing_and_of_equal_tasks() -> None:
    np.testing.assert_array_equal(min_norm_weights(np.zeros((3, 3))), np.full(3, 1 / 3))
    assert min_norm_weights(np.ones((4, 4))).sum() == pytest.approx(1.0)
    preference = np.array([0.5, 0.3, 0.2])
    np.testing.assert_allclose(preferred_weights(np.ones((3, 3)), preference, 0.1), preference, atol=1e-12)


def model_of(name: str, tasks: tuple[str, ...] = FEATURES.tasks, **sizes: Any) -> Any:
    torch.manual_seed(1)
    kind = MODELS[name].Config
    given_sizes = {"embedding_dim": 4, "mlp": (32,), "bottom_mlp": (8, 4), "top_mlp": (32,), "head_mlp": (16,), **sizes}
    features = FEATURES.__class__(FEATURES.dense, FEATURES.sparse, FEATURES.tables, tasks)
    config = kind(**{key: value for key, value in given_sizes.items() if key in kind.model_fields})
    return build(config, features, TablesConfig(name="sgd", learning_rate=0.1))


def gradients(
    model: Any, labels: Tensor, config: BalanceConfig | None, factors: Tensor | None = None, steps: int = 1
) -> tuple[dict[str, Tensor], LossBalancer | None]:
    """Gradients of all weights, tables as dense ones, after the last of some equal steps."""
    balancer = None if config is None else LossBalancer(config, model.heads.tasks)
    model.heads.share = None if balancer is None else balancer.share
    (batch,) = MemoryLoader(1, 24).epoch()
    for _ in range(steps):
        dense = batch.dense.clone()
        embeddings = model.look_up(batch).detach().requires_grad_()
        model.zero_grad()
        losses, _ = task_losses(model.score(dense, embeddings), labels, None, factors)
        if balancer is not None:
            balancer.expect(losses)
        losses.sum().backward()
    found = {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
    return found | {"embeddings": embeddings.grad}, balancer


def labels_of(tasks: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 2, (24, tasks), generator=torch.Generator().manual_seed(seed)).float()


@pytest.mark.parametrize("name", SHARED)
@pytest.mark.parametrize("mode", MODES)
def test_one_task_is_trained_as_without_balancing_to_the_bit(name: str, mode: Any) -> None:
    labels = labels_of(1)
    plain, _ = gradients(model_of(name, ("click",)), labels, None, steps=3)
    balanced, _ = gradients(model_of(name, ("click",)), labels, BalanceConfig(mode=mode), steps=3)
    assert plain.keys() == balanced.keys()
    assert all(torch.equal(plain[key], balanced[key]) for key in plain)


@pytest.mark.parametrize("name", SHARED)
@pytest.mark.parametrize("mode", MODES)
def test_heads_are_trained_as_without_balancing_to_the_bit(name: str, mode: Any) -> None:
    labels, factors = labels_of(2), torch.tensor([1.0, 100.0])
    plain, _ = gradients(model_of(name), labels, None, factors)
    balanced, _ = gradients(model_of(name), labels, BalanceConfig(mode=mode), factors)
    heads = [key for key in plain if key.startswith("heads.")]
    assert heads
    assert all(torch.equal(plain[key], balanced[key]) for key in heads)
    assert not torch.equal(plain["embeddings"], balanced["embeddings"])


@pytest.mark.parametrize("name", SHARED)
@pytest.mark.parametrize("mode", MODES)
def test_a_factor_of_a_loss_changes_nothing_of_what_is_shared(name: str, mode: Any) -> None:
    labels, config = labels_of(2), BalanceConfig(mode=mode, scale="click")
    model = model_of(name)
    expected, _ = gradients(model, labels, config, steps=3)
    shared = [key for key in expected if not key.startswith("heads.")]
    for factor in (2.0**10, 2.0**-10):
        found, _ = gradients(model, labels, config, torch.tensor([1.0, factor]), steps=3)
        assert all(torch.equal(found[key], expected[key]) for key in shared)
    found, _ = gradients(model, labels, config, torch.tensor([1.0, 1000.0]), steps=3)
    for key in shared:
        torch.testing.assert_close(found[key], expected[key], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("mode", MODES)
def test_the_first_step_has_the_lengths_of_the_definition(mode: Any) -> None:
    labels, model = labels_of(3), model_of("dnn", ("a", "b", "c"))
    (batch,) = MemoryLoader(1, 24).epoch()
    parts, given_parts = [], []
    for task in range(3):
        found, _ = gradients(model_of("dnn", ("a", "b", "c")), labels, None, torch.eye(3)[task] * 10.0**task)
        parts.append(found["embeddings"].double())
    representation = model.represent(batch.dense, model.look_up(batch)).detach().requires_grad_()
    losses, _ = task_losses(model.heads(representation), labels, None, torch.tensor([1.0, 10.0, 100.0]))
    for task in range(3):
        (gradient,) = torch.autograd.grad(losses[task], representation, retain_graph=True)
        given_parts.append(gradient.double().flatten().numpy())
    lengths = np.array([np.linalg.norm(one) for one in given_parts])
    units = np.array([one / length for one, length in zip(given_parts, lengths, strict=True)])
    weights = {
        "equal": np.full(3, 1 / 3),
        "min-norm": min_norm_weights(units @ units.T),
        "preferred": preferred_weights(units @ units.T, np.full(3, 1 / 3), 1.0),
    }[mode]
    expected = sum(
        3 * weight * lengths.mean() / length * part
        for weight, length, part in zip(weights, lengths, parts, strict=True)
    )
    found, balancer = gradients(
        model_of("dnn", ("a", "b", "c")), labels, BalanceConfig(mode=mode), torch.tensor([1.0, 10.0, 100.0])
    )
    torch.testing.assert_close(found["embeddings"].double(), expected, rtol=1e-4, atol=1e-7)
    assert balancer is not None
    assert balancer.magnitude("c") == pytest.approx(lengths[2], rel=1e-5)  # also with a decay of 0.9


def test_equal_tasks_have_the_gradient_of_the_plain_sum() -> None:
    model, labels = model_of("dnn"), labels_of(1).expand(-1, 2).contiguous()
    model.heads.towers[1].load_state_dict(model.heads.towers[0].state_dict())
    plain, _ = gradients(model, labels, None)
    for mode in MODES:
        balanced, _ = gradients(model, labels, BalanceConfig.model_validate({"mode": mode}))
        torch.testing.assert_close(balanced["embeddings"], plain["embeddings"])
    mixed, _ = gradients(
        model_of("dnn"), labels_of(2), BalanceConfig(mode="equal", share=0.0), torch.tensor([1.0, 9.0])
    )
    plain, _ = gradients(model_of("dnn"), labels_of(2), None, torch.tensor([1.0, 9.0]))
    torch.testing.assert_close(mixed["embeddings"], plain["embeddings"])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_task_that_is_not_finite_never_touches_the_others(mode: Any, bad: float) -> None:
    labels, config = labels_of(2), BalanceConfig(mode=mode)
    model = model_of("dnn")
    with torch.no_grad():
        model.heads.towers[1].layers[-1].bias.fill_(bad)
    found, balancer = gradients(model, labels, config, steps=2)
    alone, _ = gradients(model_of("dnn"), labels, config, torch.tensor([1.0, 0.0]), steps=2)
    assert balancer is not None
    assert balancer.newest.is_left_out.tolist() == [False, True]
    assert balancer.record()["left_out"] == {"buy": 2}
    for key in alone:
        if not key.startswith("heads.towers.1"):
            assert torch.equal(found[key], alone[key])


def test_a_task_without_gradients_counts_for_nothing() -> None:
    labels = labels_of(2)
    found, balancer = gradients(model_of("dnn"), labels, BalanceConfig(mode="min-norm"), torch.tensor([1.0, 0.0]))
    plain, _ = gradients(model_of("dnn"), labels, None, torch.tensor([1.0, 0.0]))
    assert torch.equal(found["embeddings"], plain["embeddings"])
    assert balancer is not None
    assert balancer.magnitude("buy") == 0.0
    assert balancer.record()["magnitudes"].keys() == {"click"}


def test_a_trainer_leaves_out_a_task_and_says_so(make_trainer: Any) -> None:
    trainer = make_trainer(model="dnn", balance={"mode": "equal"})
    heads = trainer.model.heads
    with torch.no_grad():
        heads.towers[1].layers[-1].bias.fill_(math.inf)
    before = [one.clone() for one in heads.of_task(1)]
    with pytest.raises(TrainingError, match="is inf after step 10"):  # a checkpoint holds no such weights
        trainer.fit()
    assert all(torch.equal(a, b) for a, b in zip(before, heads.of_task(1), strict=True))
    records = trainer.run.metrics()
    assert {"kind": "left out", "step": 1, "epoch": 0, "tasks": ["buy"]} in records
    logged = [record for record in records if record["kind"] == "train"]
    assert logged[0]["balance"]["left_out"] == {"buy": 3}
    assert math.isfinite(logged[0]["loss"])
    assert all(bool(torch.isfinite(one).all()) for one in heads.of_task(0))
    shown = balance(Material(trainer.run))
    assert "buy was left out of 9 steps" in shown["text"]


def test_the_report_names_tasks_that_conflict(make_trainer: Any) -> None:
    loader = MemoryLoader(10)
    loader.spoil = lambda number, batch: replace(
        batch, labels=torch.stack([batch.labels[:, 0], 1 - batch.labels[:, 0]], 1)
    )
    trainer = make_trainer(model="dnn", loader=loader, balance={"mode": "equal"})
    heads = trainer.model.heads
    heads.towers[1].load_state_dict(heads.towers[0].state_dict())
    trainer.fit()
    shown = balance(Material(trainer.run))
    assert shown["text"].startswith("Conflicting tasks: click and buy (mean cosine -")
    assert [one.heading for one in shown["charts"]] == [
        "Magnitudes of gradients", "Factors of gradients", "Cosines between tasks",
    ]  # fmt: skip


def mean_by_gate(outputs: list[Tensor], gate: torch.nn.Module, inputs: Tensor) -> Tensor:
    shares = torch.softmax(gate(inputs), dim=1)
    return sum(shares[:, [place]] * output for place, output in enumerate(outputs))  # type: ignore[return-value]


def test_experts_and_gates_are_those_of_the_papers() -> None:
    (batch,) = MemoryLoader(1, 24).epoch()
    mmoe = model_of("mmoe", experts=3).double()
    embeddings = mmoe.look_up(batch).double()
    x = mmoe.flatten(batch.dense.double(), embeddings)
    outputs = [expert(x) for expert in mmoe.experts]
    expected = [
        tower(mean_by_gate(outputs, gate, x)) for tower, gate in zip(mmoe.heads.towers, mmoe.heads.gates, strict=True)
    ]
    torch.testing.assert_close(mmoe.score(batch.dense.double(), embeddings), torch.cat(expected, 1))

    ple = model_of("ple", shared_experts=2, task_experts=3, levels=2).double()
    embeddings = ple.look_up(batch).double()
    x = ple.flatten(batch.dense.double(), embeddings)
    first, last = ple.levels
    shared = [expert(x) for expert in first.shared]
    own = [[expert(x) for expert in experts] for experts in first.of_tasks]
    inputs = [mean_by_gate([*own[task], *shared], first.gates[task], x) for task in range(2)]
    common = mean_by_gate([*own[0], *own[1], *shared], first.gates[2], x)
    shared = [expert(common) for expert in last.shared]
    expected = []
    for task in range(2):
        outputs = [*(expert(inputs[task]) for expert in last.of_tasks[task]), *shared]
        expected.append(ple.heads.towers[task](mean_by_gate(outputs, ple.heads.gates[task], inputs[task])))
    torch.testing.assert_close(ple.score(batch.dense.double(), embeddings), torch.cat(expected, 1))


def test_a_missing_label_adds_nothing_to_its_task() -> None:
    generator = torch.Generator().manual_seed(3)
    logits, weights = torch.randn(24, 2, generator=generator), torch.rand(24, generator=generator)
    labels = labels_of(2)
    some = labels.clone()
    some[::3, 1] = math.nan
    logits.requires_grad_()
    losses, total = task_losses(logits, some, weights, torch.tensor([1.0, 3.0]))
    known = torch.arange(24) % 3 > 0
    each = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="none")
    expected = torch.stack([(each[:, 0] * weights).sum(), 3 * (each[:, 1] * weights)[known].sum()]) / weights.sum()
    torch.testing.assert_close(losses, expected)
    assert total == pytest.approx(float(weights.sum()))
    losses.sum().backward()
    assert logits.grad is not None
    assert float(logits.grad[::3, 1].abs().max()) == 0.0


def without_some_labels(number: int, batch: Any) -> Any:
    labels = batch.labels.clone()
    labels[number % 3 :: 3, 1] = math.nan
    if number % 4 == 1:
        labels[:, 0] = math.nan
    return replace(batch, labels=labels)


@pytest.mark.cases(1)
@pytest.mark.parametrize("mode", ["none", *MODES])
def test_a_training_with_missing_labels_goes_on_and_resumes(make_trainer: Any, mode: str) -> None:
    loader = MemoryLoader(10)
    loader.spoil = without_some_labels
    options = {"model": "mmoe", "loader": loader, "balance": {"mode": mode}, "progressive": True, "checkpoint_every": 4}
    whole = make_trainer("whole", **options)
    whole.validation.spoil = without_some_labels
    assert whole.fit().ended == "finished"
    records = [r for r in whole.run.metrics() if r["kind"] == "evaluation"]
    assert all(r["tasks"]["buy"]["examples"] == 128 for r in records)  # of 192
    assert all(r["tasks"]["click"]["examples"] == 128 for r in records)
    assert not [r for r in whole.run.metrics() if r["kind"] == "left out"]
    first = make_trainer("parts", **options)
    first.validation.spoil = without_some_labels
    first.on_step = lambda record, progress, total: first.stop() if progress.step == 7 else None
    first.fit()
    second = make_trainer("parts", **options)
    second.validation.spoil = without_some_labels
    second.resume()
    second.fit()
    ours, theirs = second.model.state_dict(), whole.model.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_all_tasks_that_are_not_finite_end_the_training(make_trainer: Any) -> None:
    trainer = make_trainer(model="dnn", balance={"mode": "equal"})
    with torch.no_grad():
        trainer.model.mlp.layers[0].bias.fill_(math.nan)
    with pytest.raises(TrainingError, match="the loss became nan"):
        trainer.fit()


@pytest.mark.cases(1)
@pytest.mark.parametrize("model", ["dlrm", "mmoe", "ple"])
def test_a_balanced_run_that_was_stopped_resumes_to_the_same_bits(make_trainer: Any, model: str) -> None:
    options = {"model": model, "balance": {"mode": "min-norm"}, "checkpoint_every": 4}
    whole = make_trainer("whole", **options)
    whole.fit()
    first = make_trainer("parts", **options)
    first.on_step = lambda record, progress, total: first.stop() if progress.step == 7 else None
    first.fit()
    second = make_trainer("parts", **options)
    assert second.resume()
    second.fit()
    ours, theirs = second.model.state_dict(), whole.model.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    found = [[r.get("balance") for r in run.metrics() if r["kind"] == "train"] for run in (whole.run, second.run)]
    assert found[0] == found[1]
    assert found[0][0]["cosines"].keys() == {"click, buy"}


@pytest.mark.parametrize("name", ["lr", "fm"])
def test_models_without_a_shared_representation_are_refused(name: str) -> None:
    with pytest.raises(TrainingError, match="share no representation"):
        heads_to_balance(model_of(name).heads)


@pytest.mark.parametrize(
    ("given_config", "said"),
    [
        ({"mode": "equal", "preference": {"click": 0.0}}, "must be above 0"),
        ({"mode": "min-norm", "preference": {"click": 2.0}}, "has no effect"),
        ({"mode": "fair"}, "mode"),
    ],
)
def test_settings_without_sense_are_refused(given_config: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        BalanceConfig.model_validate(given_config)


@pytest.mark.parametrize("more", [{"slices": 2}, {"compile": True}])
def test_what_does_not_go_with_balancing_is_refused(more: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="does not go with"):
        TrainingConfig.model_validate({"precision": "fp32", "balance": {"mode": "equal"}, **more})


@pytest.mark.parametrize("changes", [{"scale": "view"}, {"preference": {"view": 1.0}}])
def test_an_unknown_task_is_named_with_those_that_there_are(changes: dict[str, Any]) -> None:
    with pytest.raises(TrainingError, match=r"view.*\n.*\['click', 'buy'\]"):
        LossBalancer(BalanceConfig(mode="equal", **changes), FEATURES.tasks)


@pytest.mark.parametrize("name", SHARED)
def test_what_only_one_task_depends_on_is_named(name: str) -> None:
    model = model_of(name)
    assert isinstance(model.heads, Heads)
    found, _ = gradients(model, labels_of(2), None, torch.tensor([1.0, 0.0]))
    names = {id(parameter): key for key, parameter in model.named_parameters()}
    for parameter in model.heads.of_task(1):
        assert float(found[names[id(parameter)]].abs().max()) == 0.0
    own = {id(parameter) for parameter in model.heads.of_task(0)}
    assert any(float(found[names[one]].abs().max()) > 0 for one in own)
