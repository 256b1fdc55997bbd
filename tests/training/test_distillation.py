"""Learning from a teacher: what its scores change in a student, and what they never touch."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor
from torch.nn import functional

from cordillera.data.ranking.features import RankingBatch
from cordillera.errors import CheckpointError, TrainingError
from cordillera.models.ranking.heads import Heads
from cordillera.training import checkpoints
from cordillera.training.ranking.config import TrainingConfig
from cordillera.training.ranking.tasks.losses import task_losses
from cordillera.training.ranking.teachers.distillation import Distiller, StudentAdapter, TeacherConfig

from .conftest import MemoryLoader

ADAMW = {"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
AUXILIARY = {"head": "auxiliary", "weight": 3.0, "gradient_scale": 2.0}


def taught(number: int, batch: RankingBatch) -> RankingBatch:
    """Give samples a teacher's logits, with some missing."""
    draw = torch.Generator().manual_seed(number)
    logits = 2 * torch.randn(len(batch), 2, generator=draw)
    logits[number % 3 :: 5, 1] = math.nan
    logits[number % 4 :: 7, 0] = math.nan
    return replace(batch, teacher=logits)


def loader_of(batches: int = 10, **options: Any) -> MemoryLoader:
    loader = MemoryLoader(batches, **options)
    loader.spoil = taught
    return loader


def mean(logits: Tensor, targets: Tensor) -> Tensor:
    return task_losses(logits, targets, None, None)[0]


def example(size: int = 24, seed: int = 0) -> tuple[Heads, Tensor, RankingBatch]:
    """Heads, a representation with a gradient, and samples."""
    torch.manual_seed(seed)
    heads = Heads(("click", "buy"), 6, (5,))
    batch = taught(seed, next(iter(MemoryLoader(1, size).epoch())))
    return heads, torch.randn(size, 6, requires_grad=True), batch


def distiller_of(heads: Heads, **config: Any) -> Distiller:
    return Distiller(TeacherConfig.model_validate({"head": "auxiliary", **config}), heads, 2, ADAMW)


def same_weights(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)


# What the student serves


@pytest.mark.cases(1)
@pytest.mark.parametrize("model", ["dlrm", "mmoe", "ple", "wukong"])
@pytest.mark.parametrize("silent", [{"weight": 0.0}, {"gradient_scale": 0.0}, {"gradient_scale": 0.0, "adapter": True}])
def test_a_teacher_without_weight_leaves_the_student_as_it_is_to_the_bit(
    make_trainer: Any, model: str, silent: dict[str, Any]
) -> None:
    plain = make_trainer("plain", model=model, loader=loader_of(), gradient_clip=0.5)
    plain.fit()
    config = {"head": "auxiliary", **silent}
    found = make_trainer("taught", model=model, loader=loader_of(), gradient_clip=0.5, teacher=config)
    found.fit()  # with dropout
    assert same_weights(found.model.state_dict(), plain.model.state_dict())
    losses = [[r["loss"] for r in t.run.metrics() if r["kind"] == "train"] for t in (plain, found)]
    assert losses[0] == losses[1]


def test_a_student_is_saved_and_served_with_the_weights_of_one_without_a_teacher(make_trainer: Any) -> None:
    plain = make_trainer("plain", loader=loader_of())
    plain.fit()
    found = make_trainer("taught", loader=loader_of(), teacher={**AUXILIARY, "adapter": True})
    found.fit()
    saved = [checkpoints.load(checkpoints.folder_of(t.run.checkpoints, 20)).tensors for t in (plain, found)]
    of_model = [{name: one.shape for name, one in part.items() if name.startswith("model.")} for part in saved]
    assert of_model[0] == of_model[1]
    assert not same_weights(found.model.state_dict(), plain.model.state_dict())
    assert any(name.startswith("teacher.") for name in saved[1])
    assert not any(name.startswith("teacher.") for name in saved[0])


def test_serving_heads_never_see_the_teacher() -> None:
    heads, representation, batch = example()
    distiller = distiller_of(heads, adapter=True)
    losses = distiller.losses(representation, heads(representation), batch, mean)
    whole = losses.student.sum() + losses.adapter.sum()
    found = torch.autograd.grad(whole, list(heads.parameters()), allow_unused=True)
    assert all(one is None for one in found)
    copies = torch.autograd.grad(losses.student.sum(), list(distiller.copies.parameters()), retain_graph=False)
    assert all(float(one.abs().max()) > 0 for one in copies)


def test_with_serving_heads_the_teacher_reaches_them() -> None:
    heads, representation, batch = example()
    distiller = Distiller(TeacherConfig(head="serving", weight=2.0), heads, 2, ADAMW)
    logits = heads(representation)
    losses = distiller.losses(representation, logits, batch, mean)
    torch.testing.assert_close(losses.student, 2.0 * mean(logits, batch.teacher.sigmoid()))
    assert not list(distiller.parameters())
    assert all(one is not None for one in torch.autograd.grad(losses.student.sum(), list(heads.parameters())))


# Definitions


@pytest.mark.parametrize("scale", [1.0, 5.0])
def test_the_loss_is_that_of_the_definition(scale: float) -> None:
    heads, representation, batch = example()
    distiller = distiller_of(heads, weight=10.0, label_scale=scale)
    found = distiller.losses(representation, heads(representation), batch, mean).student
    logits, teacher = heads(representation).double(), batch.teacher.double()  # copies begin as the serving heads
    target = (scale * teacher.sigmoid()).clamp(max=1.0)
    for task in range(2):
        known = ~teacher[:, task].isnan()
        each = functional.binary_cross_entropy_with_logits(logits[known, task], target[known, task], reduction="sum")
        each = each.detach()
        assert float(found[task].detach()) == pytest.approx(10.0 * float(each) / len(batch), rel=1e-5)


def test_the_gradient_of_the_representation_is_scaled_and_that_of_the_heads_is_not() -> None:
    heads, representation, batch = example()
    found = []
    for factor in (1.0, 20.0):
        distiller = distiller_of(heads, gradient_scale=factor)
        loss = distiller.losses(representation, heads(representation), batch, mean).student.sum()
        found.append(torch.autograd.grad(loss, [representation, *distiller.parameters()]))
    torch.testing.assert_close(20.0 * found[0][0], found[1][0])
    assert all(torch.equal(one, other) for one, other in zip(found[0][1:], found[1][1:], strict=True))


def test_a_teacher_that_knows_the_labels_gives_the_loss_of_the_labels() -> None:
    heads, representation, batch = example()
    batch = replace(batch, teacher=100.0 * (2 * batch.labels - 1))
    logits = heads(representation)
    found = distiller_of(heads).losses(representation, logits, batch, mean).student
    torch.testing.assert_close(found, mean(logits, batch.labels))


def test_samples_without_a_score_have_no_part_in_the_loss() -> None:
    heads, representation, batch = example()
    distiller = distiller_of(heads, adapter=True)
    losses = distiller.losses(representation, heads(representation), batch, mean)
    (gradient,) = torch.autograd.grad(losses.student.sum(), representation)
    unknown = batch.teacher.isnan().all(1)
    assert 0 < int(unknown.sum()) < len(batch) or not unknown.any()
    for task in range(2):
        loss = distiller.losses(representation, heads(representation), batch, mean).student[task]
        (gradient,) = torch.autograd.grad(loss, representation)
        missing = batch.teacher[:, task].isnan()
        assert float(gradient[missing].abs().max()) == 0.0
        assert float(gradient[~missing].abs().min(1).values.max()) > 0.0
    nothing = replace(batch, teacher=torch.full_like(batch.teacher, math.nan))
    losses = distiller.losses(representation, heads(representation), nothing, mean)
    assert float(losses.student.detach().abs().max()) == 0.0
    assert float(losses.adapter.detach().abs().max()) == 0.0


# The adapter


def test_an_adapter_begins_as_the_identity() -> None:
    logits = 5 * torch.randn(100, 3)
    assert torch.equal(StudentAdapter(3, (16,))(logits), logits)


def test_adapter_and_student_never_update_each_other() -> None:
    heads, representation, batch = example()
    distiller = distiller_of(heads, adapter=True)
    assert distiller.adapter is not None
    losses = distiller.losses(representation, heads(representation), batch, mean)
    own = list(distiller.adapter.parameters())
    others = [representation, *heads.parameters(), *distiller.copies.parameters()]
    assert all(g is None for g in torch.autograd.grad(losses.student.sum(), own, allow_unused=True, retain_graph=True))
    assert all(g is None for g in torch.autograd.grad(losses.adapter.sum(), others, allow_unused=True))


@pytest.mark.cases(1)
@pytest.mark.parametrize("offset", [1.0, -2.0])
def test_an_adapter_finds_a_constant_offset(offset: float) -> None:
    heads, _, _ = example()
    distiller = distiller_of(heads, adapter=True)
    draw, base = torch.Generator().manual_seed(1), next(iter(MemoryLoader(1, 512).epoch()))
    for _ in range(400):
        true = 1.5 * torch.randn(512, 2, generator=draw)
        labels = (torch.rand(512, 2, generator=draw) < true.sigmoid()).float()
        batch = replace(base, labels=labels, teacher=true + offset)
        representation = torch.zeros(512, 6)
        distiller.losses(representation, heads(representation), batch, mean).adapter.sum().backward()
        distiller.update(0.0, None)
    assert distiller.adapter is not None
    probe = torch.tensor([[-1.0, -1.0], [0.0, 0.0], [1.0, 1.0]])
    corrected = distiller.adapter(probe + offset).detach()
    torch.testing.assert_close(corrected, probe, atol=0.2, rtol=0)


# Training


@pytest.mark.cases(1)
@pytest.mark.parametrize("model", ["dlrm", "mmoe"])
def test_a_taught_run_that_was_stopped_resumes_to_the_same_bits(make_trainer: Any, model: str) -> None:
    options: dict[str, Any] = {
        "model": model,
        "teacher": {**AUXILIARY, "adapter": True},
        "balance": {"mode": "min-norm"},
        "checkpoint_every": 4,
        "patience": 9,
        "progressive": True,
    }
    whole = make_trainer("whole", loader=loader_of(), **options)
    whole.fit()
    first = make_trainer("parts", loader=loader_of(), **options)
    first.on_step = lambda record, progress, total: first.stop() if progress.step == 7 else None
    first.fit()
    second = make_trainer("parts", loader=loader_of(), **options)
    assert second.resume()
    second.fit()
    assert same_weights(second.model.state_dict(), whole.model.state_dict())
    assert same_weights(second.distiller.tensors(), whole.distiller.tensors())
    keys = ("loss", "teacher_loss", "adapter_loss")
    found = [[[r[key] for key in keys] for r in t.run.metrics() if r["kind"] == "train"] for t in (whole, second)]
    assert found[0] == found[1]
    assert all(loss > 0 for record in found[0] for loss in record)


def test_auxiliary_heads_learn_the_teacher(make_trainer: Any) -> None:
    def with_truth(number: int, batch: RankingBatch) -> RankingBatch:
        click = 0.2 + 0.5 * (batch.sparse["id"].values % 3 == 0)
        return replace(batch, teacher=torch.logit(torch.stack([click, torch.full_like(click, 0.3)], 1)))

    loader = MemoryLoader(40)
    loader.spoil = with_truth
    trainer = make_trainer(loader=loader, model="dnn", teacher={"head": "auxiliary"})
    trainer.fit()
    losses = [record["teacher_loss"] for record in trainer.run.metrics() if record["kind"] == "train"]
    chances = torch.tensor([0.7, 0.2, 0.2, 0.3, 0.3, 0.3])
    least = float(functional.binary_cross_entropy(chances, chances, reduction="sum")) / 3
    assert least < losses[-1] < 1.05 * least < losses[0]


@pytest.mark.parametrize("progressive", [False, True])
def test_batches_without_a_teacher_are_refused(make_trainer: Any, progressive: bool) -> None:
    with pytest.raises(TrainingError, match="no scores of a teacher"):
        make_trainer(teacher=AUXILIARY, progressive=progressive).fit()


def test_a_teacher_that_is_not_finite_ends_the_training(make_trainer: Any) -> None:
    loader = MemoryLoader(10)
    loader.spoil = lambda number, batch: replace(batch, teacher=torch.full((64, 2), math.inf if number == 3 else 0.0))
    trainer = make_trainer(loader=loader, teacher={"head": "auxiliary", "adapter": True})
    with pytest.raises(TrainingError, match=r"the loss became .* at step 4"):
        trainer.fit()


@pytest.mark.parametrize("name", ["lr", "fm"])
def test_models_without_heads_take_no_auxiliary_ones(make_trainer: Any, name: str) -> None:
    with pytest.raises(TrainingError, match="no heads on a representation"):
        make_trainer(model=name, loader=loader_of(), teacher=AUXILIARY)
    make_trainer("serving", model=name, loader=loader_of(), teacher={"head": "serving"}).fit()


def test_a_checkpoint_of_other_heads_is_refused(make_trainer: Any) -> None:
    make_trainer("one", loader=loader_of(), teacher=AUXILIARY).fit()
    with pytest.raises(CheckpointError, match="holds other heads for a teacher"):
        make_trainer("one", loader=loader_of(), teacher={**AUXILIARY, "adapter": True}).resume()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"teacher": {"head": "serving", "adapter": True}}, "adapter is of auxiliary heads"),
        ({"teacher": {"gradient_scale": 2.0}}, "gradient_scale is of auxiliary heads"),
        ({"teacher": {"head": "auxiliary", "label_scale": 0.0}}, "greater than 0"),
        ({"teacher": {"weight": 2.0}}, "weight has no effect without heads that learn: set head"),
        ({"teacher": {"label_scale": 2.0}}, "label_scale has no effect without heads"),
        ({"teacher": {"head": "auxiliary", "adapter_mlp": [8]}}, "adapter_mlp is of the adapter: set adapter = true"),
        ({"teacher": {"head": "serving", "adapter_weight": 2.0}}, "adapter_weight is of the adapter"),
        ({"teacher": {"adapter_learning_rate": 1.0}}, "adapter_learning_rate is of the adapter"),
        ({"teacher": {"head": "auxiliary"}, "slices": 2}, "does not go with slices"),
        ({"teacher": {"head": "serving"}, "compile": True}, "does not go with compile"),
        ({"teacher": {"head": "serving"}, "balance": {"mode": "equal"}}, "set teacher.head = 'auxiliary'"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        TrainingConfig.model_validate({"precision": "fp32", **given})
