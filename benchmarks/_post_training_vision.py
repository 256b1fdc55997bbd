"""A small Llama that learns to see shapes beside one that stays as it is, for the part ``vision``.

A language model of bytes learns by text alone what questions and answers look like. Then an image encoder and layers of
cross-attention are trained on freshly drawn images, while the language model is not. Right answers to questions about
held-out images are counted with the images, without them, and with those of other questions.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from _tables import print_notes
from rich.console import Console
from rich.table import Table

from cordillera.data.language.shape_images import draw_shapes
from cordillera.models.language.llama import Llama, LlamaConfig
from cordillera.models.language.vision import VisionConfig, VisionLlama
from cordillera.training.language.vision import (
    AnswerRate,
    VisionTrainingConfig,
    answer_tokens,
    evaluate_vision,
    teach_answers,
    train_vision,
)

LANGUAGE = LlamaConfig(layers=4, hidden=64, heads=4, kv_heads=2, ffn=192, vocabulary=264, context=256, tied=True)
VISION = VisionConfig()
TEXT = VisionTrainingConfig(steps=150, images=16, warmup_steps=20)
TRAINING = VisionTrainingConfig(evaluation_images=500)
TARGET = 0.95  # of questions about shape and colour


def run_vision(console: Console, quick: bool) -> dict[str, Any]:
    """Teach the language model, train encoder and adapter, and count right answers to held-out questions."""
    few = {"steps": 3, "images": 2, "evaluation_images": 4}
    text, training = (one.model_copy(update=few if quick else {}) for one in (TEXT, TRAINING))
    language = Llama(LANGUAGE)
    language.init_weights()
    began = time.perf_counter()
    text_losses = teach_answers(language, text)
    text_seconds = time.perf_counter() - began
    alone = _logits(language)
    model = VisionLlama(language, VISION)
    model.init_weights()
    report = train_vision(model, training)
    changed = not torch.equal(_logits(language), alone)
    ways = {
        "image": report.seeing,
        "no image": report.blind,
        "image of another question": evaluate_vision(model, training.evaluation_images, training.seed, shown="other"),
    }
    table = Table(title="answers to held-out questions that are right (measured)")
    for heading in ("question", *ways, "chance"):
        table.add_column(heading)
    for kind, rate in report.seeing.items():
        table.add_row(kind, *(_shown(found[kind]) for found in ways.values()), f"{rate.chance:.1%}")
    console.print(table)
    notes = [
        f"{training.steps} steps of {training.images} images with 3 questions each in {report.seconds:.0f} s, "
        f"{report.processor_seconds:.0f} s of a processor",
        "logits of text alone " + ("have changed" if changed else "are the same to the bit before and after"),
    ]
    print_notes(console, notes)
    return {
        "evidence": "measured",
        "target": TARGET,
        "answers": {way: {kind: rate._asdict() for kind, rate in found.items()} for way, found in ways.items()},
        "text_changed": changed,
        "text": {"steps": text.steps, "seconds": text_seconds, "loss": text_losses[-1]},
        "steps": training.steps,
        "images_of_a_step": training.images,
        "skipped": report.skipped,
        "seconds": report.seconds,
        "processor_seconds": report.processor_seconds,
        "loss": report.losses[-1],
        "parameters": {
            "language model": sum(one.numel() for one in language.parameters()),
            "encoder": sum(one.numel() for one in model.encoder.parameters()),
            "adapter": sum(one.numel() for one in model.adapters.parameters()),
        },
        "notes": notes,
    }


@torch.inference_mode()
def _logits(language: Llama) -> torch.Tensor:
    """Logits of all questions about some scenes, without images."""
    batch = answer_tokens(draw_shapes(50, 5)[1])
    return language(batch.tokens, batch.offsets)


def _shown(rate: AnswerRate) -> str:
    return f"{rate.rate:.1%} ({rate.low:.1%} to {rate.high:.1%})"
