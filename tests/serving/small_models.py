"""A small Llama with random weights and its tokenizer, in a folder as models are published."""

from __future__ import annotations

from pathlib import Path

import torch

from cordillera.data.tokenizers.load import load_tokenizer
from cordillera.models.language.checkpoints import save_hugging_face
from cordillera.models.language.llama import Llama, LlamaConfig
from tests.data.vocabularies import write_json

CONTEXT = 96


def write_model(
    folder: Path, seed: int = 0, head_dim: int | None = None, tied: bool = True, context: int = CONTEXT
) -> Path:
    """Write the folder; its weights are large, so that greedy text varies.

    With heads of 32 numbers (``head_dim``), the engine keeps keys and values in pages, and shares those of prompts.
    """
    folder.mkdir()
    write_json(folder)
    size = load_tokenizer(folder).vocab_size
    config = LlamaConfig(
        layers=2,
        hidden=32,
        heads=4,
        kv_heads=2,
        head_dim=head_dim,
        ffn=48,
        vocabulary=size,
        context=context,
        tied=tied,
    )
    model = Llama(config)
    model.init_weights(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(12)
    weights = folder / "saved"
    save_hugging_face(model, weights)
    for file in weights.iterdir():
        file.rename(folder / file.name)
    weights.rmdir()
    return folder


def greedy(folder: Path, ids: list[int], count: int) -> str:
    """Text that follows, one token at a time, everything computed anew."""
    from cordillera.models.language.checkpoints import load

    _, model = load(folder)
    tokenizer = load_tokenizer(folder)
    tokens = list(ids)
    while len(tokens) < min(len(ids) + count, CONTEXT):
        with torch.no_grad():
            logits = model(torch.tensor(tokens), torch.tensor([0, len(tokens)]))[-1]
        tokens.append(int(logits.argmax()))
        if tokens[-1] in tokenizer.stop_ids:
            break
    return tokenizer.decode(tokens[len(ids) :], skip_special=True)
