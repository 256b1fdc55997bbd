"""Training of an image encoder and an adapter on questions about images, beside a frozen language model.

Source: Grattafiori et al. 2024, section 7.2: the encoder and the adapter are trained, the language model is not. Images
are drawn anew in every step (:mod:`cordillera.data.language.shape_images`), each with its three questions, and the loss
is that of the answers' tokens. :func:`teach_answers` first teaches a small language model by text alone what answers
look like; it cannot know which one is right.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn
from torch.nn import functional as F

from cordillera.data.language.shape_images import (
    CHANCE,
    QuestionKind,
    ShapeQuestion,
    ask,
    draw_scenes,
    draw_shapes,
)
from cordillera.data.tokenizers.byte_level import byte_tokenizer
from cordillera.errors import DataError, TrainingError
from cordillera.intervals import wilson_interval
from cordillera.jagged import offsets_from_lengths
from cordillera.models.language.llama import Llama
from cordillera.models.language.vision import NO_IMAGE, VisionLlama, answer
from cordillera.training.optimizers import build_adamw, schedule

VisionStepCallback = Callable[[int, float], None]
"""Function that is called after every step with the number of steps and the loss."""

Shown = Literal["own", "other", "none"]

_IGNORED = -100  # targets that are not counted
_LONGEST_ANSWER = 12  # tokens
_TEXT, _TRAINING, _HELD_OUT = 0, 1, 2  # streams of a seed
_TOGETHER = 100  # images whose questions are answered together


class VisionTrainingConfig(BaseModel):
    """Settings of training an encoder and an adapter, or of teaching a language model the form of answers.

    Attributes:
        steps: Number of updates.
        images: Number of images of a step, with three questions each.
        learning_rate: Peak rate of AdamW.
        betas: Decay rates of AdamW's two moments.
        eps: Term added to AdamW's denominator.
        weight_decay: Decoupled weight decay, not applied to norms and gates.
        clip: Largest norm of all gradients together.
        warmup_steps: Number of steps over which the rate rises linearly from zero; it falls like a cosine afterwards.
        final_rate: Factor of the rate after the last step.
        max_skipped: Number of skipped steps in a row after which training ends with an error.
        seed: Seed of the images and questions.
        evaluation_images: Number of held-out images, with three questions each.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    steps: int = Field(900, ge=1, le=10**9)
    images: int = Field(32, ge=1, le=10**6)
    learning_rate: float = Field(3e-3, ge=0, allow_inf_nan=False)
    betas: tuple[float, float] = (0.9, 0.98)
    eps: float = Field(1e-8, gt=0, allow_inf_nan=False)
    weight_decay: float = Field(0.05, ge=0, allow_inf_nan=False)
    clip: float = Field(1.0, gt=0, allow_inf_nan=False)
    warmup_steps: int = Field(100, ge=0)
    final_rate: float = Field(0.02, ge=0, le=1)
    max_skipped: int = Field(10, ge=1)
    seed: int = Field(0, ge=0)
    evaluation_images: int = Field(400, ge=1, le=10**6)


class AnswerRate(NamedTuple):
    """Answers to held-out questions of one kind.

    Attributes:
        right: Number of answers that are right, letter by letter.
        asked: Number of questions.
        rate: Share of right answers.
        low: Lower bound of the rate's Wilson interval of 95 %.
        high: Upper bound of the interval.
        chance: Rate that is expected without the image.
    """

    right: int
    asked: int
    rate: float
    low: float
    high: float
    chance: float


@dataclass
class VisionReport:
    """How a training ended.

    Attributes:
        losses: Mean loss of every step over the targets, nats; NaN or infinite for skipped ones.
        skipped: Number of steps that left the weights unchanged, because the loss or a gradient was not finite.
        seconds: Wall time of the steps, without evaluation.
        processor_seconds: Time that processors spent on the steps, which other work on the machine changes less.
        seeing: Answers to questions about held-out images.
        blind: Answers to the same questions without the images.
    """

    losses: list[float] = field(default_factory=list)
    skipped: int = 0
    seconds: float = 0.0
    processor_seconds: float = 0.0
    seeing: dict[QuestionKind, AnswerRate] = field(default_factory=dict)
    blind: dict[QuestionKind, AnswerRate] = field(default_factory=dict)


class AnswerTokens(NamedTuple):
    """Questions with their answers in one row of ``T`` tokens.

    Attributes:
        tokens: Tokens, ``int64 [T]``.
        offsets: Offsets at which documents begin, followed by ``T``, ``int64 [B + 1]``.
        targets: Token that follows each token, ``int64 [T]``; -100 where it is not learned.
        image_of: Number of the image of each document, ``int64 [B]``.
    """

    tokens: Tensor
    offsets: Tensor
    targets: Tensor
    image_of: Tensor


def answer_tokens(questions: Sequence[ShapeQuestion], *, whole: bool = False) -> AnswerTokens:
    """Encode questions and their answers as bytes: begin of text, question, space, answer, end of text.

    Args:
        questions: Questions, one a document; short ones come first, as attention takes equal lengths together.
        whole: Whether the tokens of questions are learned too, and not those of answers alone.
    """
    tokenizer = byte_tokenizer()
    questions = sorted(questions, key=lambda one: len(one.text) + len(one.answer))
    prompts = _prompts([one.text for one in questions])
    answers = tokenizer.encode_batch([one.answer for one in questions], eos=True)
    tokens: list[int] = []
    targets: list[int] = []
    for prompt, words in zip(prompts, answers, strict=True):
        tokens += [*prompt, *words]
        targets += [*(prompt[1:] if whole else [_IGNORED] * (len(prompt) - 1)), *words, _IGNORED]
    lengths = torch.tensor([len(a) + len(b) for a, b in zip(prompts, answers, strict=True)])
    image_of = torch.tensor([one.image for one in questions])
    return AnswerTokens(torch.tensor(tokens), offsets_from_lengths(lengths), torch.tensor(targets), image_of)


def teach_answers(model: Llama, config: VisionTrainingConfig, on_step: VisionStepCallback | None = None) -> list[float]:
    """Teach a language model of bytes by text alone what questions and answers look like, and return the losses.

    A new scene is drawn for every question, so that each answer of a kind is equally likely: the model learns the
    words, and that none is more likely than another.

    Args:
        model: Language model, which is changed; its vocabulary has at least the 258 tokens of bytes.
        config: Settings; ``images`` is the number of scenes of a step.
        on_step: Function that is called after every step.

    Raises:
        DataError: If the vocabulary is too small, or no weight requires gradients, as in a :class:`VisionLlama`.
        TrainingError: If too many steps in a row were not finite.
    """
    _check_vocabulary(model)
    if not any(weight.requires_grad for weight in model.parameters()):
        raise DataError("no weight requires gradients", where="model", remedy="teach it before an adapter is added")
    report = VisionReport()

    def loss(step: int) -> Tensor:
        random = np.random.default_rng([config.seed, _TEXT, step])
        batch = answer_tokens(ask(draw_scenes(config.images, random), random), whole=True)
        return F.cross_entropy(model(batch.tokens, batch.offsets), batch.targets)

    _train(model, config, loss, report, on_step)
    return report.losses


def train_vision(
    model: VisionLlama, config: VisionTrainingConfig, on_step: VisionStepCallback | None = None
) -> VisionReport:
    """Train the encoder and the adapter of a model to answer questions about images, and evaluate it.

    Steps that are not finite leave the weights as they are.

    Args:
        model: Model of bytes with ``float32`` weights, whose encoder and adapter are changed.
        config: Settings.
        on_step: Function that is called after every step.

    Raises:
        DataError: If the vocabulary of the language model is too small, or the images are.
        TrainingError: If too many steps in a row were not finite.
    """
    _check_vocabulary(model.model)
    model.model.requires_grad_(False)
    report = VisionReport()

    def loss(step: int) -> Tensor:
        images, questions = draw_shapes(config.images, [config.seed, _TRAINING, step], model.config.image)
        batch = answer_tokens(questions)
        learned = batch.targets != _IGNORED
        hidden = model.hidden(batch.tokens, batch.offsets, model.patches(torch.from_numpy(images)), batch.image_of)
        return F.cross_entropy(model.model.logits(hidden[learned]), batch.targets[learned])

    _train(model, config, loss, report, on_step)
    report.seeing = evaluate_vision(model, config.evaluation_images, config.seed)
    report.blind = evaluate_vision(model, config.evaluation_images, config.seed, shown="none")
    return report


def evaluate_vision(
    model: VisionLlama, images: int, seed: int = 0, *, shown: Shown = "own"
) -> dict[QuestionKind, AnswerRate]:
    """Evaluate a model's greedy answers to questions about held-out images; count correct ones by kind of question.

    Args:
        model: Model of bytes.
        images: Number of images, with three questions each.
        seed: Seed; images differ from those of a training with the same seed.
        shown: Image shown with each question: its ``own``, the image of an ``other`` question, or ``none``.

    Raises:
        DataError: If the images are too small, or logits are not finite.
    """
    right = dict.fromkeys(CHANCE, 0)
    for first in range(0, images, _TOGETHER):
        count = min(_TOGETHER, images - first)
        drawn, questions = draw_shapes(count, [seed, _HELD_OUT, first], model.config.image)
        number_of = {"own": range(count), "other": [*range(1, count), 0], "none": [NO_IMAGE] * count}[shown]
        image_of = [number_of[one.image] for one in questions]
        found = answer_questions(model, [one.text for one in questions], torch.from_numpy(drawn), image_of)
        for question, words in zip(questions, found, strict=True):
            right[question.kind] += words == question.answer
    return {
        kind: AnswerRate(count, images, count / images, *wilson_interval(count / images, images), CHANCE[kind])
        for kind, count in right.items()
    }


def answer_questions(
    model: VisionLlama, questions: Sequence[str], images: Tensor, image_of: Sequence[int]
) -> list[str]:
    """Answer questions as texts by a model of bytes, greedily.

    Args:
        model: Model of bytes.
        questions: Questions.
        images: Images, ``float32 [I, 3, S, S]``.
        image_of: Number of the image of each question; -1 for none.

    Raises:
        DataError: If images have another shape or dtype or are not finite; an image does not exist; or logits are not
            finite.
    """
    tokenizer = byte_tokenizer()
    found = answer(model, _prompts(questions), images, torch.tensor(image_of), _LONGEST_ANSWER, tokenizer.stop_ids)
    return [tokenizer.decode([token for token in ids if token < tokenizer.vocab_size]) for ids in found]


def _prompts(questions: Sequence[str]) -> list[list[int]]:
    return byte_tokenizer().encode_batch([f"{text} " for text in questions], bos=True)


def _check_vocabulary(model: Llama) -> None:
    needed = byte_tokenizer().vocab_size
    if model.config.vocabulary < needed:
        raise DataError(
            f"the vocabulary of {model.config.vocabulary} tokens is too small for bytes",
            where="model",
            remedy=f"a model with at least {needed}",
        )


def _train(
    module: nn.Module,
    config: VisionTrainingConfig,
    loss_of: Callable[[int], Tensor],
    report: VisionReport,
    on_step: VisionStepCallback | None,
) -> None:
    """Update the weights of ``module`` that require gradients, ``config.steps`` times; fill the ``report``."""
    optimizer = build_adamw(
        module,
        learning_rate=config.learning_rate,
        betas=config.betas,
        eps=config.eps,
        weight_decay=config.weight_decay,
    )
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    began, busy, stale = time.perf_counter(), time.process_time(), 0
    for step in range(config.steps):
        factor = schedule(step, config.steps, warmup=config.warmup_steps, decay="cosine", floor=config.final_rate)
        for group in optimizer.param_groups:
            group["lr"] = factor * config.learning_rate
        optimizer.zero_grad()
        loss = loss_of(step)
        loss.backward()
        norm = float(nn.utils.clip_grad_norm_(weights, config.clip))
        report.losses.append(float(loss.detach()))
        if math.isfinite(norm) and math.isfinite(report.losses[-1]):
            optimizer.step()
            stale = 0
        else:
            stale, report.skipped = stale + 1, report.skipped + 1
        if stale >= config.max_skipped:
            raise TrainingError(
                f"{stale} steps in a row gave a loss or gradients that are not finite",
                where=f"step {step + 1}",
                remedy="begin anew with a lower learning_rate or more warmup_steps",
            )
        if on_step is not None:
            on_step(step + 1, report.losses[-1])
    optimizer.zero_grad()
    report.seconds, report.processor_seconds = time.perf_counter() - began, time.process_time() - busy
