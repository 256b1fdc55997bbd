"""Tensors and what is said of them: safetensors with a SHA-256 of everything, checked before anything is used."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from cordillera.errors import NumericsError
from cordillera.run import disk_errors


def write_tensors(path: Path, kind: str, tensors: Mapping[str, Tensor], content: Any) -> None:
    """Write a file beside its place and rename it.

    Args:
        path: Of the file.
        kind: What :func:`read_tensors` asks for.
        tensors: By name; on the CPU.
        content: What JSON can hold of it, without NaN and infinity.

    Raises:
        NumericsError: It cannot be written.
        RunError: The disk is full or does not let itself be written to.
    """
    text = json.dumps(content, allow_nan=False)
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with disk_errors(path):
            save_file(tensors, beside, {"kind": kind, "content": text, "sha256": _digest(text, tensors)})
            with open(beside, "rb+") as file:
                os.fsync(file.fileno())
            os.replace(beside, path)
    except (OSError, SafetensorError) as error:
        raise NumericsError(f"could not be written: {error}", where=str(path)) from error
    finally:
        beside.unlink(missing_ok=True)


def read_tensors(path: Path, kind: str, remedy: str) -> tuple[dict[str, Tensor], Any]:
    """Read what :func:`write_tensors` wrote.

    Args:
        path: Of the file.
        kind: That it must be of.
        remedy: What to do where it is not there, of another kind or damaged.

    Returns:
        Tensors by name, and the content.

    Raises:
        NumericsError: There is no such file, it is of another kind, or not the same as when it was written.
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
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no dictionary)
    except (SafetensorError, OSError, ValueError) as error:
        raise NumericsError(f"is damaged: {error}", where=where, remedy=remedy) from error
    text = metadata.get("content", "")
    if metadata.get("sha256") != _digest(text, tensors):
        raise NumericsError("is damaged: its SHA-256 differs", where=where, remedy=remedy)
    return tensors, json.loads(text)


def _digest(text: str, tensors: Mapping[str, Tensor]) -> str:
    content = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        content.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        content.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return content.hexdigest()
