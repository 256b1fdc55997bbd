"""Files of drafters: weights of a :class:`~cordillera.models.language.draft_model.DraftModel` without its model."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from cordillera.errors import CheckpointError, NumericsError
from cordillera.mistakes import explain
from cordillera.models.language.checkpoints.source import Source
from cordillera.models.language.draft_model import DRAFT, DraftConfig, DraftModel
from cordillera.models.language.llama import Llama, LlamaConfig, make_drafter
from cordillera.tensor_files import read_tensors, write_tensors

_KIND = "drafter"
_ROWS = 1024  # rows of the embedding that identify a model
_REMEDY = "export it again from its run: cordillera export-drafter RUN FILE"


class DrafterFile(NamedTuple):
    """Content of a file of a drafter.

    Attributes:
        path: Path of the file.
        draft: Settings of the drafter.
        tensors: Weights, ``bfloat16``, by their name in the drafter.
        model: Digest of the model that it was trained for.
        facts: Facts on its training.
    """

    path: Path
    draft: DraftConfig
    tensors: dict[str, Tensor]
    model: str
    facts: dict[str, Any]


def write_drafter(source: Source, path: Path, facts: Mapping[str, Any]) -> None:
    """Write the drafter of a checkpoint to a file, in ``bfloat16``.

    Args:
        source: Checkpoint of a model with a drafter.
        path: Path of the file.
        facts: Facts on its training, as JSON values.

    Raises:
        CheckpointError: If the checkpoint has no drafter.
        NumericsError: If the file cannot be written.
        RunError: If the disk is full or read-only.
    """
    config = source.config
    if config.draft is None:
        raise CheckpointError(
            "has no drafter", where=str(source.path), remedy="train one: cordillera train smollm2-draft"
        )
    with torch.device("meta"):
        shapes = {name: tuple(weight.shape) for name, weight in make_drafter(config).named_parameters()}
    tensors = {}
    for name, shape in shapes.items():
        whole = torch.empty(shape)
        source.read(DRAFT + name, whole)
        tensors[name] = whole.bfloat16()
    embedding = torch.empty(config.vocabulary, config.hidden)
    source.read("embedding.weight", embedding)
    content = {"draft": config.draft.model_dump(mode="json"), "model": _digest(embedding), "facts": dict(facts)}
    write_tensors(path, _KIND, tensors, content)


def read_drafter(path: Path) -> DrafterFile:
    """Read a file of :func:`write_drafter`.

    Raises:
        CheckpointError: If there is no such file, or it is damaged.
    """
    try:
        tensors, content = read_tensors(path, _KIND, _REMEDY)
        draft = DraftConfig.model_validate(content["draft"])
        return DrafterFile(path, draft, tensors, content["model"], content["facts"])
    except NumericsError as error:
        raise CheckpointError(error.what, where=error.where, remedy=error.remedy) from error
    except ValidationError as error:
        place, what = explain(error.errors(), lambda at: ())[0]
        raise CheckpointError(f"holds no drafter: {place} {what}", where=str(path), remedy=_REMEDY) from error
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"holds no drafter: {error}", where=str(path), remedy=_REMEDY) from error


def drafter_of(file: DrafterFile, model: Llama) -> DraftModel:
    """Return the drafter of a file, in the dtype and on the device of the model that it is for.

    Raises:
        CheckpointError: If it was trained for another model, or weights are missing, of another shape, or not finite.
    """
    weight, where = model.embedding.weight, str(file.path)
    if not is_for(file, model):
        raise CheckpointError(
            "was trained for another model", where=where, remedy="use it with that one, or draft by ngram"
        )
    with torch.device("meta"):
        drafter = make_drafter(_with_draft(model.config, file.draft))
    expected = {name: tuple(parameter.shape) for name, parameter in drafter.named_parameters()}
    found = {name: tuple(tensor.shape) for name, tensor in file.tensors.items()}
    if found != expected:
        wrong = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
        raise CheckpointError(f"tensor {wrong[0]} does not fit the model", where=where, remedy=_REMEDY)
    for name, tensor in file.tensors.items():
        if not tensor.isfinite().all():
            raise CheckpointError(f"tensor {name} holds NaN or infinity", where=where, remedy=_REMEDY)
    weights = {name: tensor.to(weight.device, weight.dtype) for name, tensor in file.tensors.items()}
    drafter.load_state_dict(weights, assign=True)
    return drafter.eval().requires_grad_(False)


def is_for(file: DrafterFile, model: Llama) -> bool:
    """Return whether a drafter was trained for a model, or for one with its embeddings."""
    weight = model.embedding.weight
    return file.draft.vocabulary <= len(weight) and file.model == _digest(weight)


def _with_draft(config: LlamaConfig, draft: DraftConfig) -> LlamaConfig:
    return config.model_copy(update={"draft": draft, "scores": False})


def _digest(embedding: Tensor | nn.Parameter) -> str:
    """Return a digest of the first rows of a model's embedding, equal for all dtypes that hold bfloat16's numbers."""
    rows = embedding.detach()[:_ROWS].to("cpu", torch.float32).to(torch.bfloat16)
    return hashlib.sha256(rows.contiguous().view(torch.int16).numpy().tobytes()).hexdigest()
