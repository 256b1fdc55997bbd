"""Training of what sees: only the encoder and the adapter change, and only answers are learned."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from cordillera.data.language.shape_images import CHANCE, ShapeQuestion, draw_shapes
from cordillera.data.tokenizers.byte_level import byte_tokenizer
from cordillera.errors import DataError, TrainingError
from cordillera.models.language.llama import Llama, LlamaConfig
from cordillera.models.language.vision import NO_IMAGE, VisionConfig, VisionLlama
from cordillera.training.language.vision import (
    VisionTrainingConfig,
    answer_questions,
    answer_tokens,
    evaluate_vision,
    teach_answers,
    train_vision,
)

FEW = VisionTrainingConfig(steps=3, images=2, warmup_steps=1, evaluation_images=2)
QUESTIONS = [ShapeQuestion("shape", "What shape is it?", "cross", 1), ShapeQuestion("both", "Is it?", "no", 0)]


def small(seed: int = 0, **settings: Any) -> VisionLlama:
    shapes = {"layers": 2, "hidden": 32, "heads": 2, "kv_heads": 1, "ffn": 64, "vocabulary": 264, "context": 64}
    language = Llama(LlamaConfig(**{**shapes, **settings}, tied=True))
    language.init_weights(seed)
    with torch.no_grad():
        language.embedding.weight.mul_(10)  # a tied head of small weights cannot be sure of anything
    model = VisionLlama(language, VisionConfig(patch=8, layers=1, hidden=32, heads=2, ffn=64, every=2))
    model.init_weights(seed)
    return model


def test_targets_are_the_answers_alone() -> None:
    batch = answer_tokens(QUESTIONS)
    tokenizer = byte_tokenizer()
    assert tokenizer.decode(batch.tokens.tolist()) == (
        "<|begin_of_text|>Is it? no<|end_of_text|><|begin_of_text|>What shape is it? cross<|end_of_text|>"
    )
    assert batch.image_of.tolist() == [0, 1]
    learned = batch.targets[batch.targets >= 0]
    assert tokenizer.decode(learned.tolist()) == "no<|end_of_text|>cross<|end_of_text|>"
    for place in (batch.targets >= 0).nonzero().flatten().tolist():
        assert batch.targets[place] == batch.tokens[place + 1]


def test_a_whole_text_has_a_target_for_all_but_its_last_token() -> None:
    batch = answer_tokens(QUESTIONS, whole=True)
    last = torch.zeros(len(batch.tokens), dtype=torch.bool)
    last[batch.offsets[1:] - 1] = True
    assert torch.equal(batch.targets == -100, last)
    assert torch.equal(batch.targets[:-1][~last[:-1]], batch.tokens[1:][~last[:-1]])


def test_a_short_training_lowers_the_loss_and_leaves_the_language_model_as_it_is() -> None:
    model = small()
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    batch = answer_tokens(draw_shapes(3, 9)[1])
    with torch.inference_mode():
        alone = model.model(batch.tokens, batch.offsets)
    steps: list[int] = []
    config = FEW.model_copy(update={"steps": 20, "learning_rate": 2e-2})
    report = train_vision(model, config, lambda step, loss: steps.append(step))
    assert steps == list(range(1, 21))
    assert np.mean(report.losses[-5:]) < 0.7 * report.losses[0]
    for name, weight in model.named_parameters():
        assert torch.equal(weight, before[name]) == name.startswith("model."), name
    images = torch.from_numpy(draw_shapes(3, 9)[0])
    with torch.inference_mode():
        seen = model(batch.tokens, batch.offsets, images, batch.image_of)
        unseen = model(batch.tokens, batch.offsets, images, torch.full_like(batch.image_of, NO_IMAGE))
    assert torch.equal(unseen, alone)
    assert not torch.equal(seen, alone)
    assert set(report.seeing) == set(report.blind) == set(CHANCE)
    assert all(rate.low <= rate.rate <= rate.high and rate.asked == 2 for rate in report.seeing.values())


def test_the_same_seed_gives_the_same_weights() -> None:
    first, second = small(), small()
    for model in (first, second):
        train_vision(model, FEW)
    for name, weight in first.seeing().items():
        assert torch.equal(weight, second.seeing()[name])


def test_a_language_model_learns_the_form_of_answers_by_text() -> None:
    model = small()
    model.model.requires_grad_(True)
    losses = teach_answers(model.model, FEW.model_copy(update={"steps": 30, "learning_rate": 1e-2}))
    assert losses[-1] < 0.6 * losses[0]


def test_steps_that_are_not_finite_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = small(), [0]
    before = {name: weight.clone() for name, weight in model.seeing().items()}

    def spoiled(*given: Any, **options: Any) -> torch.Tensor:
        calls[0] += 1
        return torch.nan * original(*given, **options) if calls[0] == 1 else original(*given, **options)

    original = F.cross_entropy
    monkeypatch.setattr(F, "cross_entropy", spoiled)
    report = train_vision(model, FEW.model_copy(update={"steps": 2}))
    assert report.skipped == 1
    assert np.isnan(report.losses[0])
    assert all(bool(weight.isfinite().all()) for weight in model.seeing().values())
    assert not all(torch.equal(weight, before[name]) for name, weight in model.seeing().items())
    with torch.no_grad():
        model.adapters[0].attention_gate.fill_(torch.inf)
        model.adapters[0].output.weight.fill_(torch.nan)
    with pytest.raises(TrainingError, match="2 steps in a row"):
        train_vision(model, FEW.model_copy(update={"max_skipped": 2}))


def test_a_vocabulary_without_bytes_is_refused() -> None:
    with pytest.raises(DataError, match="vocabulary of 100 tokens"):
        train_vision(small(vocabulary=100), FEW)


def test_a_language_model_with_an_adapter_is_not_taught_by_text() -> None:
    with pytest.raises(DataError, match="no weight requires gradients"):
        teach_answers(small().model, FEW)


def test_answers_are_text() -> None:
    images = torch.from_numpy(draw_shapes(2, 1)[0])
    found = answer_questions(small(), ["What shape is it?", "Is it?"], images, [1, NO_IMAGE])
    assert len(found) == 2
    assert all(isinstance(one, str) for one in found)


def test_evaluations_are_the_same_every_time() -> None:
    model = small()
    for shown in ("own", "other", "none"):
        assert evaluate_vision(model, 3, shown=shown) == evaluate_vision(model, 3, shown=shown)
