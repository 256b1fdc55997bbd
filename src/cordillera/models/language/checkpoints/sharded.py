"""Our own layout, of trainings in many processes: parts of tensors, as each process holds them.

A folder ``step-000000123`` holds ``weights-NNNNN.safetensors`` and ``optimizer-NNNNN.safetensors`` of process ``NNNNN``
(one that holds nothing alone has none), ``model.json`` (the shapes), ``state.json`` (counters) and ``checksums.json``
(SHA-256 and size of all others, and of itself). Weights have the names of the whole model; a moment is
``optimizer.NAME.exp_avg``. Where a part lies in the whole is in its file's header, in the words of
:mod:`torch.distributed.checkpoint`, whose ``HuggingFaceStorageReader`` reads such folders too. Its own layout is not
used, since that keeps a pickle beside the tensors, and a pickle may be code.
"""

from __future__ import annotations

import hashlib
import json
import math
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from cordillera.data.files import checksum, unsealed
from cordillera.errors import CheckpointError, DataError
from cordillera.files import parse_json
from cordillera.models.language.checkpoints.source import (
    Source,
    Stored,
    check_shape,
    make_config,
    missing,
    parameter_shapes,
)
from cordillera.models.language.llama import LlamaConfig

CHECKSUMS, MODEL, STATE = "checksums.json", "model.json", "state.json"
WEIGHTS, OPTIMIZER = "weights", "optimizer"
_INFORMATION, _OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"
_REMEDY = "delete this folder and use an earlier checkpoint, or restore it from a copy"


def part_file(kind: str, rank: int) -> str:
    """The file of one process.

    Args:
        kind: :data:`WEIGHTS` or :data:`OPTIMIZER`.
        rank: Of the process.
    """
    return f"{kind}-{rank:05d}.safetensors"


def describe_parts(offsets: Mapping[str, Sequence[int]]) -> dict[str, str]:
    """What a file's header says beside shapes.

    Args:
        offsets: Of each tensor's part in the whole.
    """
    return {
        "format": "pt",
        "DCP_VERSION": "1.0",
        _INFORMATION: json.dumps({name: {_OFFSETS: list(offset)} for name, offset in offsets.items()}),
    }


class Part(NamedTuple):
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
        folder: Of the files.
        files: Their names.

    Attributes:
        parts: Of each tensor, by name.
        shapes: Of whole tensors, by name.

    Raises:
        CheckpointError: A file is damaged, or parts of a tensor are missing.
    """

    def __init__(self, folder: Path, files: Sequence[str]) -> None:
        self.folder = folder
        self.parts: dict[str, list[Part]] = {}
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
            name: Of the tensor.
            offsets: Of the box's first number in the whole, by dimension.
            out: Takes the values, in its own dtype and on its own device; it has the box's shape.

        Raises:
            CheckpointError: Some of it is not there, or not a number.
        """
        out.fill_(math.nan)
        wanted = Part("", tuple(offsets), tuple(out.shape))
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
            information = json.loads(opened.metadata()[_INFORMATION])
            for name in opened.keys():  # noqa: SIM118 -- it is no dict
                header = opened.get_slice(name)
                sizes, offsets = tuple(header.get_shape()), tuple(information[name][_OFFSETS])
                if len(offsets) != len(sizes) or any(type(offset) is not int or offset < 0 for offset in offsets):
                    raise ValueError(f"offsets of {name} are {offsets}")
                if header.get_dtype() != "F32":
                    raise ValueError(f"{name} is {header.get_dtype()}, not F32")
                self.parts.setdefault(name, []).append(Part(file, offsets, sizes))
                if len(self.parts[name][0].sizes) != len(sizes):
                    raise ValueError(f"{name} has {len(sizes)} dimensions, elsewhere others")
        except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"is truncated or damaged ({error})", where=str(path), remedy=_REMEDY) from error
        return opened


def _box(low: Sequence[int], high: Sequence[int], origin: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(first - zero, last - zero) for first, last, zero in zip(low, high, origin, strict=True))


class ShardedFolder:
    """A folder whose files are all there and as long as they should be; their bytes are verified when asked for.

    Args:
        path: The folder.

    Attributes:
        path: Likewise.
        sizes: Bytes of each file, by its name.

    Raises:
        CheckpointError: A file is missing, or of another length; the message names it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            content = unsealed(path / CHECKSUMS)
            self._sums = {str(name): str(entry["sha256"]) for name, entry in content.items()}
            self.sizes = {str(name): int(entry["bytes"]) for name, entry in content.items()}
        except DataError as error:
            raise CheckpointError(error.what, where=error.where, remedy=_REMEDY) from error
        except (OSError, AttributeError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError("does not name files", where=str(path / CHECKSUMS), remedy=_REMEDY) from error
        for name, size in self.sizes.items():
            file = path / name
            if Path(name).name != name:
                raise CheckpointError(f"names {name}, outside of the folder", where=str(path / CHECKSUMS))
            if not file.is_file():
                raise CheckpointError("is missing", where=str(file), remedy=_REMEDY)
            if file.stat().st_size != size:
                raise CheckpointError(
                    f"has {file.stat().st_size:,} bytes, {size:,} were written", where=str(file), remedy=_REMEDY
                )
        for name in (MODEL, STATE):
            if name not in self.sizes:
                raise CheckpointError("is missing", where=str(path / name), remedy=_REMEDY)

    def verify(self, name: str) -> None:
        """Compare a file with its checksum.

        Args:
            name: Of the file.

        Raises:
            CheckpointError: They differ.
        """
        if checksum(self.path / name) != self._sums[name]:
            raise self._corrupt(name)

    def read_json(self, name: str) -> dict[str, Any]:
        """What a verified JSON file holds.

        Args:
            name: Of the file.

        Raises:
            CheckpointError: It differs from its checksum.
        """
        content = (self.path / name).read_bytes()
        if hashlib.sha256(content).hexdigest() != self._sums[name]:
            raise self._corrupt(name)
        found = parse_json(content, str(self.path / name), error=CheckpointError, remedy=_REMEDY)
        if not isinstance(found, dict):
            raise CheckpointError("is not a JSON object", where=str(self.path / name), remedy=_REMEDY)
        return found

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

    def _corrupt(self, name: str) -> CheckpointError:
        return CheckpointError(
            "is corrupt: its contents do not match the checksum written with it",
            where=str(self.path / name),
            remedy=_REMEDY,
        )


def check_weights(parts: Parts, config: LlamaConfig) -> None:
    """Refuse weights that are not those of a model.

    Args:
        parts: Of the weights.
        config: The model's.

    Raises:
        CheckpointError: A weight is missing, of another shape, or has no place in the model.
    """
    expected = parameter_shapes(config)
    for name, shape in expected.items():
        if name not in parts.shapes:
            raise missing(name, parts.folder, _REMEDY)
        file = parts.folder / parts.parts[name][0].file
        check_shape(name, Stored(file, parts.shapes[name], torch.float32), shape)
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
        self._folder.read_json(STATE)  # not needed here, but a folder with a damaged file is not to be trusted
        self.config = self._folder.config
        self._weights = self._folder.parts(WEIGHTS)
        check_weights(self._weights, self.config)
        self._locks = {name: threading.Lock() for name in self._folder.sizes}
        self._verified: set[str] = set()

    def name_of(self, name: str) -> str:
        return name

    def read(self, name: str, out: Tensor) -> None:
        for file in {part.file for part in self._weights.parts[name]}:
            with self._locks[file]:
                if file not in self._verified:
                    self._folder.verify(file)
                    self._verified.add(file)
        self._weights.read(name, [0] * out.dim(), out)
