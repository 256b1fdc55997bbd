"""Our own layout, of trainings in many processes: parts of tensors, as each process holds them.

A folder ``step-000000123`` holds ``weights-NNNNN.safetensors`` and ``optimizer-NNNNN.safetensors`` of process ``NNNNN``
(one that holds nothing alone has none), ``model.json`` (the shapes), ``state.json`` (counters) and ``checksums.json``
(SHA-256 and size of all others, and of itself). Weights have the names of the whole model; a moment is
``optimizer.NAME.exp_avg``. Where a part lies in the whole is in its file's header, in the words of
:mod:`torch.distributed.checkpoint`, whose ``HuggingFaceStorageReader`` reads such folders too. Its own layout is not
used, since that keeps a pickle beside the tensors, and a pickle may be code.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from cordillera.errors import CheckpointError
from cordillera.files import parse_json
from cordillera.models.language.checkpoints.sealed import SealedFolder
from cordillera.models.language.checkpoints.source import (
    Source,
    StoredTensor,
    check_shape,
    make_config,
    missing,
    parameter_shapes,
)
from cordillera.models.language.llama import LlamaConfig

MODEL, STATE = "model.json", "state.json"
WEIGHTS, OPTIMIZER = "weights", "optimizer"
_INFORMATION, _OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"
_REMEDY = "delete this folder and use an earlier checkpoint, or restore it from a copy"


def part_file(kind: str, rank: int) -> str:
    """The file of one process.

    Args:
        kind: :data:`WEIGHTS` or :data:`OPTIMIZER`.
        rank: Rank of the process.
    """
    return f"{kind}-{rank:05d}.safetensors"


def describe_parts(offsets: Mapping[str, Sequence[int]]) -> dict[str, str]:
    """What a file's header says beside shapes.

    Args:
        offsets: Offsets of each tensor's part in the whole.
    """
    return {
        "format": "pt",
        "DCP_VERSION": "1.0",
        _INFORMATION: json.dumps({name: {_OFFSETS: list(offset)} for name, offset in offsets.items()}),
    }


class TensorBox(NamedTuple):
    """A box of a tensor.

    Attributes:
        file: Name of the one that holds it.
        offsets: Of its first number in the whole, by dimension.
        sizes: By dimension.
    """

    file: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def ends(self) -> tuple[int, ...]:
        """One past its last number, by dimension."""
        return tuple(offset + size for offset, size in zip(self.offsets, self.sizes, strict=True))


class Parts:
    """Tensors that lie in several files, part by part.

    Args:
        folder: Folder of the files.
        files: Their names.

    Attributes:
        parts: Parts of each tensor, by name.
        shapes: Shapes of whole tensors, by name.

    Raises:
        CheckpointError: A file is damaged, or parts of a tensor are missing.
    """

    def __init__(self, folder: Path, files: Sequence[str]) -> None:
        self.folder = folder
        self.parts: dict[str, list[TensorBox]] = {}
        self._opened = {file: self._open(file) for file in files}
        self.shapes = {
            name: tuple(max(ends) for ends in zip(*(part.ends for part in parts), strict=True))
            for name, parts in self.parts.items()
        }
        for name, parts in self.parts.items():
            found, wanted = sum(math.prod(part.sizes) for part in parts), math.prod(self.shapes[name])
            if found != wanted:
                raise CheckpointError(
                    f"of tensor {name}, {found} numbers of {wanted} are there", where=str(folder), remedy=_REMEDY
                )

    def read(self, name: str, offsets: Sequence[int], out: Tensor) -> None:
        """Copy a box of a tensor.

        Args:
            name: Name of the tensor.
            offsets: Offsets of the box's first number in the whole, by dimension.
            out: Takes the values, in its own dtype and on its own device; it has the box's shape.

        Raises:
            CheckpointError: Some of it is not there, or not a number.
        """
        out.fill_(math.nan)
        wanted = TensorBox("", tuple(offsets), tuple(out.shape))
        for part in self.parts[name]:
            low = [max(pair) for pair in zip(wanted.offsets, part.offsets, strict=True)]
            high = [min(pair) for pair in zip(wanted.ends, part.ends, strict=True)]
            if all(first < last for first, last in zip(low, high, strict=True)):
                stored = self._opened[part.file].get_slice(name)[_box(low, high, part.offsets)]
                out[_box(low, high, wanted.offsets)].copy_(stored)
        if out.numel() and not all(bound.isfinite() for bound in torch.aminmax(out)):
            files = ", ".join(sorted({part.file for part in self.parts[name]}))
            raise CheckpointError(
                f"tensor {name} holds NaN or infinity, or lacks a part",
                where=f"{self.folder} ({files})",
                remedy=_REMEDY,
            )

    def _open(self, file: str) -> Any:
        path = self.folder / file
        try:
            opened = safe_open(path, framework="pt")
            information = parse_json(
                opened.metadata()[_INFORMATION], f"{path}, {_INFORMATION}", error=CheckpointError, remedy=_REMEDY
            )
            for name in opened.keys():  # noqa: SIM118 -- it is no dict
                header = opened.get_slice(name)
                sizes, offsets = tuple(header.get_shape()), tuple(information[name][_OFFSETS])
                if len(offsets) != len(sizes) or any(type(offset) is not int or offset < 0 for offset in offsets):
                    raise ValueError(f"offsets of {name} are {offsets}")
                if header.get_dtype() != "F32":
                    raise ValueError(f"{name} is {header.get_dtype()}, not F32")
                self.parts.setdefault(name, []).append(TensorBox(file, offsets, sizes))
                if len(self.parts[name][0].sizes) != len(sizes):
                    raise ValueError(f"{name} has {len(sizes)} dimensions, elsewhere others")
        except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"is truncated or damaged ({error})", where=str(path), remedy=_REMEDY) from error
        return opened


def _box(low: Sequence[int], high: Sequence[int], origin: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(first - zero, last - zero) for first, last, zero in zip(low, high, origin, strict=True))


class ShardedFolder(SealedFolder):
    """Folder of a step, whose files are present with their recorded lengths.

    Args:
        path: Path of the folder.

    Raises:
        CheckpointError: A file is missing or has another length; the message names it.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        for name in (MODEL, STATE):
            if name not in self.sizes:
                raise CheckpointError("is missing", where=str(path / name), remedy=_REMEDY)

    @property
    def config(self) -> LlamaConfig:
        """Of the model.

        Raises:
            CheckpointError: It is not possible, or damaged.
        """
        return make_config(self.path / MODEL, self.read_json(MODEL))

    def parts(self, kind: str) -> Parts:
        """Open the files of one kind; what they hold is not verified.

        Args:
            kind: :data:`WEIGHTS` or :data:`OPTIMIZER`.

        Raises:
            CheckpointError: As :class:`Parts`.
        """
        return Parts(self.path, sorted(name for name in self.sizes if name.startswith(f"{kind}-")))


def check_weights(parts: Parts, config: LlamaConfig) -> None:
    """Refuse weights that are not those of a model.

    Args:
        parts: Parts of the weights.
        config: The model's.

    Raises:
        CheckpointError: A weight is missing, of another shape, or has no place in the model.
    """
    expected = parameter_shapes(config)
    for name, shape in expected.items():
        if name not in parts.shapes:
            raise missing(name, parts.folder, _REMEDY)
        file = parts.folder / parts.parts[name][0].file
        check_shape(name, StoredTensor(file, parts.shapes[name], torch.float32), shape)
    unknown = sorted(parts.shapes.keys() - expected.keys())
    if unknown:
        file = parts.folder / parts.parts[unknown[0]][0].file
        raise CheckpointError(f"tensor {unknown[0]} (of {len(unknown)}) has no place in the model", where=str(file))


class Sharded(Source):
    """The weights of a folder that a training wrote, read without its processes.

    A file is verified when something of it is first read.

    Args:
        path: The folder of a step.

    Raises:
        CheckpointError: Anything is missing, truncated, of the wrong shape or dtype.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._folder = ShardedFolder(path)
        self._folder.read_json(STATE)  # not needed here, but a folder with a damaged file is refused
        self.config = self._folder.config
        self._weights = self._folder.parts(WEIGHTS)
        check_weights(self._weights, self.config)

    def name_of(self, name: str) -> str:
        return name

    def read(self, name: str, out: Tensor) -> None:
        for file in {part.file for part in self._weights.parts[name]}:
            self._folder.verify_once(file)
        self._weights.read(name, [0] * out.dim(), out)
