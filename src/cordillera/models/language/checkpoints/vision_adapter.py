"""Files of what makes a language model see: weights of the encoder and the adapter, without the language model's."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from pydantic import ValidationError

from cordillera.errors import CheckpointError
from cordillera.mistakes import explain
from cordillera.models.language.llama import Llama
from cordillera.models.language.vision import VisionConfig, VisionLlama
from cordillera.tensor_files import read_tensors, write_tensors

_KIND, _REMEDY = "adapter of a language model that sees", "save it again with save_vision"


def save_vision(path: Path, model: VisionLlama) -> None:
    """Save the encoder and the adapter of ``model`` as safetensors with their Config, without the language model.

    The file at ``path`` also holds a SHA-256 of the language model's weights.

    Raises:
        NumericsError: If the file cannot be written.
        RunError: If the disk is full or read-only.
    """
    tensors = {name: weight.detach().cpu() for name, weight in model.seeing().items()}
    content = {"config": model.config.model_dump(), "language model": _fingerprint(model.model)}
    write_tensors(path, _KIND, tensors, content)


def load_vision(path: Path, model: Llama) -> VisionLlama:
    """Load an encoder and an adapter for the language model that they were trained with.

    Args:
        path: File of :func:`save_vision`.
        model: The language model, with the same weights as then. They no longer require gradients afterwards.

    Raises:
        CheckpointError: If the file belongs to another language model, or its content does not fit together.
        NumericsError: If there is no such file, it is of another kind, or it has changed since it was written.
    """
    tensors, content = read_tensors(path, _KIND, _REMEDY)
    try:
        config = VisionConfig.model_validate(content["config"])
        fingerprint = content["language model"]
    except ValidationError as error:
        place, what = explain(error.errors(), lambda at: ())[0]
        raise CheckpointError(
            f"its content is not understood: {place} {what}", where=str(path), remedy=_REMEDY
        ) from error
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"its content is not understood: {error}", where=str(path), remedy=_REMEDY) from error
    if fingerprint != _fingerprint(model):
        raise CheckpointError(
            "belongs to a language model with other weights",
            where=str(path),
            remedy="load it with the weights that it was trained beside",
        )
    found = VisionLlama(model, config)
    expected = found.seeing()
    if {name: one.shape for name, one in tensors.items()} != {name: one.shape for name, one in expected.items()}:
        raise CheckpointError("its weights are not those of its Config", where=str(path), remedy=_REMEDY)
    with torch.no_grad():
        for name, weight in expected.items():
            weight.copy_(tensors[name])
    return found


def _fingerprint(model: Llama) -> str:
    """Return a SHA-256 of the names, dtypes and bytes of all weights."""
    digest = hashlib.sha256()
    for name, weight in model.named_parameters():
        digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}".encode())
        digest.update(weight.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()
