"""Files of tensors that several processes write, each the parts that it holds.

A part is a box of its tensor. The header of a safetensors file gives the position of each part in its tensor in the
format of :mod:`torch.distributed.checkpoint`, whose ``HuggingFaceStorageReader`` can read such files too.
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

_INFORMATION, _OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"
_REMEDY = "delete this folder and use an earlier checkpoint, or restore it from a copy"


def part_file(kind: str, rank: int) -> str:
    """Return the file name of process ``rank`` for one ``kind`` of tensors."""
    return f"{kind}-{rank:05d}.safetensors"


def describe_parts(offsets: Mapping[str, Sequence[int]]) -> dict[str, str]:
    """Return the metadata of a file's header, from the offsets of each tensor's part in the whole."""
    return {
        "format": "pt",
        "DCP_VERSION": "1.0",
        _INFORMATION: json.dumps({name: {_OFFSETS: list(offset)} for name, offset in offsets.items()}),
    }


class TensorBox(NamedTuple):
    """Box of a tensor that a file holds, with the offset of its first number in the whole tensor by dimension."""

    file: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def ends(self) -> tuple[int, ...]:
        """Offset after its last number, by dimension."""
        return tuple(offset + size for offset, size in zip(self.offsets, self.sizes, strict=True))


class Parts:
    """Tensors, with their whole shapes by name, that lie in several files part by part."""

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
        """Copy the box of tensor ``name`` at ``offsets`` into ``out``, of the box's shape and any dtype and device."""
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
            for name in opened.keys():  # noqa: SIM118 -- not a dict
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
