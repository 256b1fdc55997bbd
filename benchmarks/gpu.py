"""One GPU: ``cordillera bench gpu``.

``attention`` compares attention over ragged histories with torch's padded and packed attention; ``experts`` layers of
experts with grouped products, a loop and a fixed capacity; ``embeddings`` lookup and update of tables with EmbeddingBag
and torch's sparse optimizers; ``training`` steps of a Llama with those of transformers, and steps of ranking models
with those over torch's tables. Times are between events of the GPU, in turn. Without a GPU, every part is left out.
"""

from __future__ import annotations

import enum
from typing import Any

import typer
from _gpu_attention import measure_attention
from _gpu_embeddings import measure_embeddings
from _gpu_experts import measure_experts
from _gpu_timing import without_gpu
from _gpu_training import measure_training
from _program import Program


class Part(str, enum.Enum):
    """Parts of the benchmark."""

    attention = "attention"
    experts = "experts"
    embeddings = "embeddings"
    training = "training"


def _left_out(part: Any) -> str | None:
    return without_gpu()


PARTS = {
    Part.attention: measure_attention,
    Part.experts: measure_experts,
    Part.embeddings: measure_embeddings,
    Part.training: measure_training,
}

main = Program(
    "gpu",
    PARTS,
    "Compare attention, experts, embedding tables and training steps with those of torch, on one GPU.",
    left_out=_left_out,
).command()


if __name__ == "__main__":
    typer.run(main)
