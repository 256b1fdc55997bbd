"""Common parts of all checkpoint formats: names, shapes, the order of numbers within heads."""

from __future__ import annotations

import re
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import ValidationError
from torch import Tensor

from cordillera.data.files import file_beside, folder_beside
from cordillera.errors import CheckpointError, DataError, NumericsError
from cordillera.kernels.dense.packed_rows import PackedRows
from cordillera.mistakes import explain
from cordillera.models.language.llama import Llama, LlamaConfig
from cordillera.numerics.quantization.packed_linear import pack_rows

_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class Source(ABC):
    """Opened checkpoint with verified names, shapes and dtypes."""

    path: Path
    config: LlamaConfig
    layout: str
    """Name of the format."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype | None:
        """Dtype of the stored matrices; None for codes, or several dtypes."""

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
        """Return a matrix of :class:`Llama` in codes of at most ``bits`` bits, from the file if it has such codes.

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
        if (found := self.whole.get(module)) is None:
            _, number, rest = module.split(".", 2)
            found = f"{self.blocks}.{number}.{self.block[rest]}"
        return found if found.endswith(".bias") else f"{found}.weight"


class FusedRows(NamedTuple):
    """Rows of one stored matrix that hold several of a model, as in Phi-3.

    Attributes:
        name: Name of the matrix, by our names.
        first: Number of the first row of a parameter.
        rows: Number of rows of the matrix.
    """

    name: str
    first: int
    rows: int


def is_like_phi3(config: LlamaConfig) -> bool:
    """Return whether positions are such as only Phi-3 and its successors have them."""
    is_long = config.rope_scaling is not None and config.rope_scaling.rope_type == "longrope"
    return is_long or config.rotary_width < config.head_width


def check_parts(config: LlamaConfig, where: str | Path) -> None:
    """Refuse parts that no published model has together, and so no layout for other programs."""
    found = {
        "biases": config.attention_bias,
        "norms of heads": config.head_norms,
        "experts": config.experts is not None,
        "positions of Phi-3": is_like_phi3(config),
        "another scaling of positions": is_like_phi3(config)
        and config.rope_scaling is not None
        and not config.rope_scaling.short_factor,
    }
    names = [name for name, has in found.items() if has]
    if len(names) > 1 and names != ["norms of heads", "experts"]:  # Qwen3-MoE
        raise CheckpointError(f"{' and '.join(names)} together are of no model of this layout", where=str(where))


_FUSED = {"attention": ("query", "key", "value"), "feed_forward": ("gate", "up")}


def fused_rows(config: LlamaConfig, name: str) -> FusedRows | None:
    """Return where a parameter lies where queries, keys and values are one matrix, like gates and what they gate."""
    *block, module, matrix, _ = f"....{name}".split(".")
    if matrix not in _FUSED.get(module, ()):
        return None
    sizes = {"query": config.heads * config.head_width, "gate": config.ffn, "up": config.ffn}
    rows = [sizes.get(part, config.kv_heads * config.head_width) for part in _FUSED[module]]
    first = sum(rows[: _FUSED[module].index(matrix)])
    return FusedRows(f"{'.'.join(block).lstrip('.')}.{module}.fused.weight", first, sum(rows))


def fused_names(name: str) -> list[str]:
    """Return the parameters in a matrix that begins with this one: itself if it lies alone, none if it is not first."""
    module, matrix, end = f"..{name}".rsplit(".", 3)[1:]
    parts = _FUSED.get(module, ())
    if matrix not in parts:
        return [name]
    before = name.removesuffix(f"{matrix}.{end}")
    return [f"{before}{part}.{end}" for part in parts] if matrix == parts[0] else []


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
def new_folder(folder: Path, size: int = 0, overwrite: bool = False) -> Iterator[Path]:
    """Yield a temporary folder that becomes ``folder`` if the block ends without an error.

    Args:
        folder: Folder that is absent or empty now.
        size: Bytes that will be written, for which there must be room.
        overwrite: Whether ``folder`` may also hold a checkpoint, which is removed once the new one is complete.

    Raises:
        CheckpointError: If the folder holds anything else, or the disk is full or read-only.
    """
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir()) and not (overwrite and _is_checkpoint(folder))):
        raise CheckpointError(
            "is a file or holds more than a checkpoint" if overwrite else "is not empty",
            where=str(folder),
            remedy="choose a new folder, or delete this one",
        )
    _check_room(folder, size)
    with written_to(folder), folder_beside(folder, replaces=overwrite) as beside:
        yield beside


@contextmanager
def new_file(path: Path, size: int = 0, overwrite: bool = False) -> Iterator[Path]:
    """Yield the path of a temporary file that becomes the file at ``path`` if the block ends without an error.

    Args:
        path: File that is absent now.
        size: Bytes that will be written, for which there must be room.
        overwrite: Whether the file may be there; it is replaced once the new one is complete.

    Raises:
        CheckpointError: If there is something at the path, or the disk is full or read-only.
    """
    if path.is_dir() or (path.exists() and not overwrite):
        raise CheckpointError(
            "is a folder" if path.is_dir() else "exists already",
            where=str(path),
            remedy="choose another name" if path.is_dir() else "choose another name, or delete this one",
        )
    _check_room(path, size)
    with written_to(path), file_beside(path) as beside:
        yield beside


_WEIGHTS = re.compile(r"(model|pytorch_model|consolidated)[\w.-]*\.(safetensors|bin|pth)")
_BESIDE_WEIGHTS = re.compile(
    r"(config|generation_config|params|checksums|(model\.safetensors|pytorch_model\.bin)\.index|tokenizer"
    r"|tokenizer_config|special_tokens_map|added_tokens|vocab|chat_template|preprocessor_config)\.json"
    r"|chat_template\.jinja|tokenizer\.model|vocab\.txt|merges\.txt|(README|LICENSE|USE_POLICY)[\w.]*|\.gitattributes"
)


def _is_checkpoint(folder: Path) -> bool:
    """Return whether a folder holds a whole checkpoint and no other file, which would be lost with it."""
    if any(path.is_dir() for path in folder.iterdir()):
        return False
    names = {path.name for path in folder.iterdir()}
    weights = {name for name in names if _WEIGHTS.fullmatch(name)}
    is_whole = bool(weights and names & {"config.json", "params.json"})
    return is_whole and all(_BESIDE_WEIGHTS.fullmatch(name) for name in names - weights)


def _check_room(path: Path, size: int) -> None:
    parent = next(one for one in path.absolute().parents if one.exists())
    free = shutil.disk_usage(parent).free
    if size > free:
        raise CheckpointError(
            f"takes {size / 1e9:,.2f} GB, the disk has {free / 1e9:,.2f} GB left", where=str(path), remedy="free space"
        )


@contextmanager
def written_to(path: Path) -> Iterator[None]:
    """Turn errors of what is written to a folder or file at ``path`` into a CheckpointError."""
    try:
        yield
    except DataError as error:
        if not isinstance(error.__cause__, OSError):
            raise
        raise CheckpointError(error.what, where=error.where, remedy="free space, or choose another place") from error
    except (OSError, RuntimeError) as error:  # torch.save raises RuntimeError if the disk is full
        raise CheckpointError(f"cannot be written ({error})", where=str(path), remedy="free space") from error
