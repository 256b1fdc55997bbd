"""Small Llamas, drawn at random."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from cordillera.models.language.llama import Llama, LlamaConfig

MakeLlama = Callable[..., Llama]


@pytest.fixture
def make_llama() -> MakeLlama:
    """Builds a Llama of two layers whose weights are larger than at the start of training, so that all of it matters.

    Settings of the Config are given by name, the dtype as ``dtype``.
    """

    def make(dtype: torch.dtype = torch.float32, seed: int = 0, **settings: Any) -> Llama:
        shapes = {"layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 48, "vocabulary": 61, "context": 64}
        with torch.device("meta"):
            model = Llama(LlamaConfig(**{**shapes, **settings}))
        model.to(dtype).to_empty(device="cpu")
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                mean, deviation = (1.0, 0.1) if parameter.dim() == 1 else (0.0, 0.25)
                parameter.copy_(mean + deviation * torch.randn(parameter.shape, generator=generator))
        return model

    return make
