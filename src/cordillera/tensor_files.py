"""Files of tensors and metadata: safetensors with a SHA-256 over every byte, verified before use."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch as safetensors_torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from cordillera.errors import NumericsError
from cordillera.files import parse_json
from cordillera.run import disk_errors

_KEY, _BLANK = "sha256 of the file", b"0" * 64
_HEADER_BYTES = 100_000_000  # the limit of the format's own library


def save_file(tensors: Mapping[str, Tensor], path: Path | str, metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file that the process's umask decides who may read; the library's own are for the user alone.

    Args:
        tensors: Contiguous tensors, by name.
        path: Path of the file.
        metadata: Text by name.

    Raises:
        SafetensorError: If the file cannot be written.
    """
    with open(path, "wb") as file:
        mode = os.fstat(file.fileno()).st_mode
    safetensors_torch.save_file(dict(tensors), path, metadata)
    os.chmod(path, mode & 0o777)


def write_tensors(path: Path, kind: str, tensors: Mapping[str, Tensor], content: Any) -> None:
    """Write a file to a temporary name and rename it.

    Args:
        path: Path of the file.
        kind: Kind of the file, which :func:`read_tensors` requires.
        tensors: Tensors on the CPU, by name.
        content: JSON values without NaN and infinity.

    Raises:
        NumericsError: If the file cannot be written.
        RunError: If the disk is full or read-only.
    """
    text = json.dumps(content, allow_nan=False)
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with disk_errors(path):
            save_file(tensors, beside, {"kind": kind, "content": text, _KEY: _BLANK.decode()})
            digest, place = _digest(beside)
            with open(beside, "rb+") as file:
                file.seek(place)
                file.write(digest.encode())
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, path)
    except (OSError, SafetensorError, ValueError) as error:
        raise NumericsError(f"could not be written: {error}", where=str(path)) from error
    finally:
        beside.unlink(missing_ok=True)


def read_tensors(path: Path, kind: str, remedy: str) -> tuple[dict[str, Tensor], Any]:
    """Read the tensors and the content of a file from :func:`write_tensors`; errors give advice, ``remedy``.

    Raises:
        NumericsError: If there is no such file at ``path``, it is not of this ``kind``, or it has changed since it was
            written.
    """
    where = str(path)
    if not path.is_file():
        raise NumericsError("there is no such file", where=where, remedy=remedy)
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("kind") != kind:
                found = metadata.get("kind", "another kind of file")
                raise NumericsError(f"is no {kind!r}, but {found!r}", where=where, remedy=remedy)
            if metadata.get(_KEY) != _digest(path)[0]:
                earlier = _KEY not in metadata and "sha256" in metadata
                why = "was written by an earlier version" if earlier else "is damaged: its SHA-256 differs"
                raise NumericsError(why, where=where, remedy=remedy)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no dictionary)
    except (SafetensorError, OSError, ValueError) as error:
        raise NumericsError(f"is damaged: {error}", where=where, remedy=remedy) from error
    return tensors, parse_json(metadata.get("content", ""), where, error=NumericsError, remedy=remedy)


def _digest(path: Path) -> tuple[str, int]:
    """Return the SHA-256 of a file with zeros in place of the digest in its header, and the digest's position.

    Raises:
        ValueError: If the header is truncated, or holds no digest or several.
    """
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if size > min(_HEADER_BYTES, path.stat().st_size - 8):
            raise ValueError("its header is cut")
        header = bytearray(size.to_bytes(8, "little") + file.read(size))
        mark = f'"{_KEY}":"'.encode()
        place = header.find(mark) + len(mark)
        if header.count(mark) != 1 or header[place + len(_BLANK) : place + len(_BLANK) + 1] != b'"':
            raise ValueError("its header has no digest")
        header[place : place + len(_BLANK)] = _BLANK
        digest = hashlib.sha256(header)
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest(), place
