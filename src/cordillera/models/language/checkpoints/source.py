"""Common parts of all checkpoint formats: names, shapes, the order of numbers within heads."""

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
from cordillera.errors import CheckpointError, NumericsError
from cordillera.kernels.dense.packed_rows import PackedRows
from cordillera.models.language.llama import Llama, LlamaConfig
from cordillera.numerics.quantization.packed_linear import pack_rows
from cordillera.toml_files import explain

_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class Source(ABC):
    """Opened checkpoint with verified names, shapes and dtypes."""

    path: Path
    config: LlamaConfig

    @property
    def files(self) -> list[Path]:
        """Files without checksums, whose content can only be compared with earlier content."""
        return []

    @abstractmethod
    def name_of(self, name: str) -> str:
        """Return the format's name of a parameter of :class:`~cordillera.models.language.llama.Llama`."""

    @abstractmethod
    def read(self, name: str, out: Tensor) -> None:
        """Copy a parameter of :class:`Llama` into ``out``, of any dtype and device; many threads may do so at once."""

    @property
    def has_codes(self) -> bool:
        """Whether all matrices are stored in codes that :meth:`packed` keeps as they are."""
        return False

    def packed(self, name: str, shape: tuple[int, int], bits: int) -> PackedRows:
        """Return a matrix of :class:`Llama` in codes of at most ``bits`` bits: those of the file, if it has such.

        Raises:
            CheckpointError: If the matrix is not finite.
        """
        weight = torch.empty(shape)
        self.read(name, weight)
        try:
            return pack_rows(weight, bits)
        except NumericsError as error:
            raise CheckpointError(
                f"tensor {self.name_of(name)} {error.what}", where=str(self.path), remedy="load in bfloat16"
            ) from error


@dataclass(frozen=True)
class Names:
    """A format's names of modules by ours, outside of blocks and within a block, and the prefix of a block's number."""

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
    """Description of a tensor in a file."""

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype


def parameter_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all parameters of a model with this ``config``, by our names."""
    with torch.device("meta"):
        return {name: tuple(parameter.shape) for name, parameter in Llama(config).named_parameters()}


def trained_names(config: LlamaConfig) -> set[str]:
    """Return the names of the parameters that training changes."""
    with torch.device("meta"):
        return {name for name, parameter in Llama(config).named_parameters() if parameter.requires_grad}


def check_architecture(model: LlamaConfig, checkpoint: LlamaConfig, where: Path) -> None:
    """Refuse a checkpoint whose architecture differs from a model's in more than the length of the context."""
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
    """Refuse a tensor without the shape that follows from the configuration."""
    if stored.shape != shape:
        raise CheckpointError(
            f"tensor {name} has shape {stored.shape}, the configuration makes it {shape}",
            where=str(stored.file),
            remedy=hint or "the configuration or this file belongs to another model",
        )


def check_dtypes(tensors: Mapping[str, StoredTensor]) -> None:
    """Refuse tensors of several or integer dtypes; one-dimensional ones may be float32 beside 16-bit matrices."""
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
    """Return the error for a tensor that is missing in a file."""
    return CheckpointError(f"tensor {name} is not there", where=str(where), remedy=remedy)


def make_config(where: Path, values: Mapping[str, Any]) -> LlamaConfig:
    """Create a configuration from values of a file."""
    try:
        config = LlamaConfig.model_validate(values)
    except ValidationError as error:
        problems = explain(error.errors(), lambda path: (), whole="shapes")
        raise CheckpointError(
            "; ".join(f"{path}: {what}" for path, what in problems),
            where=str(where),
            remedy="the file is damaged, or describes another kind of model",
        ) from error
    if config.head_width * config.heads == config.hidden:  # files may give the width although it is the default
        config = config.model_copy(update={"head_dim": None})
    return config


def interleaved_to_halves(weight: Tensor, out: Tensor) -> None:
    """Reorder rows of ``[heads, D, hidden]`` from neighbouring pairs (Meta, GGUF) to pairs half a head apart (ours)."""
    out.unflatten(1, (2, -1)).copy_(weight.unflatten(1, (-1, 2)).transpose(1, 2))


def halves_to_interleaved(weight: Tensor) -> Tensor:
    """Invert :func:`interleaved_to_halves`: return a new tensor of the shape of ``weight``, ``[heads, D, hidden]``."""
    return weight.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder that becomes ``folder``, absent or empty now, if the block ends without an error."""
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise CheckpointError("is not empty", where=str(folder), remedy="choose a new folder, or delete this one")
    with folder_beside(folder) as beside:
        try:
            yield beside
        except (OSError, RuntimeError) as error:  # torch.save raises RuntimeError if the disk is full
            raise CheckpointError(f"cannot be written ({error})", where=str(folder), remedy="free space") from error
