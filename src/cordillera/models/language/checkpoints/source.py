"""What all formats of checkpoints have in common: names, shapes, the order of numbers within heads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from cordillera.data.files import folder_beside
from cordillera.errors import CheckpointError
from cordillera.models.language.llama import Llama, LlamaConfig
from cordillera.toml_files import explain

_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class Source(ABC):
    """An opened checkpoint whose names, shapes and dtypes have been found right.

    Attributes:
        path: Path that was opened.
        config: Configuration of the model that it holds.
    """

    path: Path
    config: LlamaConfig

    @property
    def files(self) -> list[Path]:
        """Files without checksums, whose content can only be compared with earlier content."""
        return []

    @abstractmethod
    def name_of(self, name: str) -> str:
        """What the format calls a parameter.

        Args:
            name: Name of the tensor in :class:`~cordillera.models.language.llama.Llama`.
        """

    @abstractmethod
    def read(self, name: str, out: Tensor) -> None:
        """Copy one parameter; several threads may do so at once.

        Args:
            name: Name of the tensor in :class:`~cordillera.models.language.llama.Llama`.
            out: Takes the values, in its own dtype and on its own device.

        Raises:
            CheckpointError: the values cannot be what they claim to be.
        """


@dataclass(frozen=True)
class Names:
    """How a format calls parameters.

    Attributes:
        whole: Our names of modules outside of blocks, to theirs.
        blocks: What precedes the number of a block.
        block: Our names of modules within a block, to theirs.
    """

    whole: Mapping[str, str]
    blocks: str
    block: Mapping[str, str]

    def __call__(self, name: str) -> str:
        module = name.removesuffix(".weight")
        if module in self.whole:
            return f"{self.whole[module]}.weight"
        _, number, rest = module.split(".", 2)
        return f"{self.blocks}.{number}.{self.block[rest]}.weight"


@dataclass(frozen=True)
class StoredTensor:
    """What a file says about one of its tensors.

    Attributes:
        file: File that holds the tensor.
        shape: Stored shape.
        dtype: Stored data type.
    """

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype


def parameter_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of all parameters of a model with this ``config``, by our names."""
    with torch.device("meta"):
        return {name: tuple(parameter.shape) for name, parameter in Llama(config).named_parameters()}


def check_architecture(model: LlamaConfig, checkpoint: LlamaConfig, where: Path) -> None:
    """Refuse a checkpoint that computes something else than the model; only the length of the context may differ.

    Args:
        model: To be loaded into.
        checkpoint: What is stored.
        where: The checkpoint.

    Raises:
        CheckpointError: Names the first difference.
    """
    ours, theirs = model.model_dump(), checkpoint.model_dump()
    differing = [name for name in ours if name not in ("context", "head_dim") and ours[name] != theirs[name]]
    if differing or model.head_width != checkpoint.head_width:
        name = differing[0] if differing else "head_dim"
        raise CheckpointError(
            f"{name} is {theirs[name]}, that of the model is {ours[name]}",
            where=str(where),
            remedy="load a checkpoint of the same architecture, or make the model from its config",
        )


def check_shape(name: str, stored: StoredTensor, shape: tuple[int, ...], hint: str = "") -> None:
    """Refuse a tensor whose shape is not what the configuration says.

    Args:
        name: Name in the format.
        stored: Shape in the file.
        shape: Shape by the configuration.
        hint: Hint at another cause.

    Raises:
        CheckpointError: they differ.
    """
    if stored.shape != shape:
        raise CheckpointError(
            f"tensor {name} has shape {stored.shape}, the configuration makes it {shape}",
            where=str(stored.file),
            remedy=hint or "the configuration or this file belongs to another model",
        )


def check_dtypes(tensors: Mapping[str, StoredTensor]) -> None:
    """Refuse anything but floating point of one kind; norms, one-dimensional, may be float32 beside 16-bit matrices.

    Args:
        tensors: All tensors, by the names of the format.

    Raises:
        CheckpointError: a tensor is of another dtype.
    """
    matrices = [stored.dtype for stored in tensors.values() if len(stored.shape) > 1]
    for name, stored in tensors.items():
        allowed = {matrices[0], torch.float32} if len(stored.shape) == 1 else {matrices[0]}
        if stored.dtype not in _FLOATS:
            raise CheckpointError(
                f"tensor {name} is {stored.dtype}, which needs scales to be read",
                where=str(stored.file),
                remedy="load the checkpoint that is not quantised, or one in the GGUF format",
            )
        if stored.dtype not in allowed:
            raise CheckpointError(
                f"tensor {name} is {stored.dtype} among {matrices[0]}: parts of two checkpoints?",
                where=str(stored.file),
                remedy="download or convert it again, with all weights in one dtype",
            )


def missing(
    name: str, where: Path, remedy: str = "the file is incomplete: download or convert it again"
) -> CheckpointError:
    """The error for a tensor that should be in a file.

    Args:
        name: Name in the format.
        where: The file.
        remedy: Advice on what to do.
    """
    return CheckpointError(f"tensor {name} is not there", where=str(where), remedy=remedy)


def make_config(where: Path, values: Mapping[str, Any]) -> LlamaConfig:
    """A Config out of what a file says.

    Args:
        where: The file.
        values: Ours by name.

    Raises:
        CheckpointError: the values are not possible together.
    """
    try:
        config = LlamaConfig.model_validate(values)
    except ValidationError as error:
        problems = explain(error.errors(), lambda path: (), whole="shapes")
        raise CheckpointError(
            "; ".join(f"{path}: {what}" for path, what in problems),
            where=str(where),
            remedy="the file is damaged, or describes another kind of model",
        ) from error
    if config.head_width * config.heads == config.hidden:  # files may say what follows anyway
        config = config.model_copy(update={"head_dim": None})
    return config


def interleaved_to_halves(weight: Tensor, out: Tensor) -> None:
    """Reorder the rows of query or key heads from neighbouring pairs (Meta, GGUF) to pairs half a head apart (ours).

    Args:
        weight: ``[heads, D, hidden]``.
        out: Takes the result, of the same shape.
    """
    out.unflatten(1, (2, -1)).copy_(weight.unflatten(1, (-1, 2)).transpose(1, 2))


def halves_to_interleaved(weight: Tensor) -> Tensor:
    """The inverse of :func:`interleaved_to_halves`: a new tensor of the shape of ``weight``, ``[heads, D, hidden]``."""
    return weight.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A folder to fill that becomes ``folder`` if the block ends well.

    Raises:
        CheckpointError: there is something in ``folder`` already, or writing failed.
    """
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise CheckpointError("is not empty", where=str(folder), remedy="choose a new folder, or delete this one")
    with folder_beside(folder) as beside:
        try:
            yield beside
        except (OSError, RuntimeError) as error:  # what torch.save says about a full disk
            raise CheckpointError(f"cannot be written ({error})", where=str(folder), remedy="free space") from error
