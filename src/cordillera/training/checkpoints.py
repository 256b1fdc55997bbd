"""Checkpoints that are complete or absent, and verified before use.

A checkpoint is a folder ``step-000001234`` with ``tensors.safetensors`` (weights, optimizer moments, random state),
``state.json`` (counters) and ``checksums.json`` (SHA-256 of the other files). It is written under a hidden name,
flushed to the disk and renamed, so a folder of that name is a complete checkpoint. Nothing is ever unpickled.

Where several processes train a ranking model, the rows of its tables and their moments are not in
``tensors.safetensors``. ``tables-NNNNN.safetensors`` holds the parts that process ``NNNNN`` wrote
(``tables-NNNNN-2.safetensors`` its second part of a table, and so on), each named ``model.TABLES.weight.TABLE``
or ``model.TABLES.MOMENT.TABLE`` and with its position in the table (:mod:`cordillera.distributed.tensor_parts`). Any
number of processes can read either form. Where tables lie in a file, the folder ``rows`` holds a copy of it
(:mod:`cordillera.embeddings.row_file`).
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from cordillera.data.files import checksum, is_intact
from cordillera.data.sealed import SealedFolder
from cordillera.distributed.tensor_parts import Parts
from cordillera.errors import CheckpointError
from cordillera.files import read_json_object, read_sealed, sealed_json
from cordillera.run import disk_errors, remove_folder
from cordillera.tensor_files import save_file

_CHUNK = 1 << 18  # elements that are checked at a time; they fit into a cache

TENSORS, STATE = "tensors.safetensors", "state.json"
"""Names of files in the folder of a checkpoint."""

TABLES = "tables"
"""First part of the names of the files with parts of tables."""

_CHECKSUMS = "checksums.json"
_REMEDY = "use an earlier checkpoint: delete this folder and resume, or restore it from a copy"


@dataclass(frozen=True)
class Checkpoint:
    """Content of a checkpoint.

    Attributes:
        folder: Its folder.
        tensors: Tensors by dotted name, memory-mapped on the CPU.
        state: Plain values.
        tables: Parts of tables, if these are in files of their own; None if ``tensors`` holds whole tables.
    """

    folder: Path
    tensors: dict[str, Tensor]
    state: dict[str, Any]
    tables: Parts | None = None

    @property
    def step(self) -> int:
        """Number of training steps done when it was written."""
        return int(self.state["step"])


def set_aside_if_corrupt(parent: Path) -> tuple[Path, int] | None:
    """Rename the newest checkpoint of a run to ``corrupt-step-N-1`` if it is corrupt and there is an earlier one.

    Args:
        parent: Folder of the run's checkpoints.

    Returns:
        The new path, and the step of the checkpoint that is the newest now; None if nothing was renamed.
    """
    found = steps(parent)
    if len(found) < 2:
        return None
    newest = folder_of(parent, found[-1])
    if _is_corrupt(newest):
        others = (newest.with_name(f"corrupt-{newest.name}-{number}") for number in itertools.count(1))
        aside = next(path for path in others if not path.exists())
        with disk_errors(aside):
            newest.replace(aside)
        return aside, found[-2]
    return None


def _is_corrupt(folder: Path) -> bool:
    """Whether a file of a checkpoint, which one process or several wrote, is missing or differs from its checksum."""
    try:
        sums = read_sealed(folder / _CHECKSUMS, error=CheckpointError, remedy=_REMEDY)
        if sums and all(isinstance(entry, str) for entry in sums.values()):
            return not all((folder / name).is_file() and is_intact(folder / name, sums[name]) for name in sums)
        sealed = SealedFolder(folder)
        for name in sealed.sizes:
            sealed.verify(name)
    except CheckpointError:
        return True
    return False


def flush(path: Path) -> None:
    """Wait until the content of a file, or the list of files of a folder, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_tensors(path: Path, tensors: dict[str, Tensor], header: dict[str, str] | None = None) -> None:
    """Write contiguous ``tensors`` on the CPU to a safetensors file at ``path``, with ``header`` as metadata.

    Raises:
        OSError: If the file cannot be written.
    """
    try:
        save_file(tensors, path, header)
    except SafetensorError as error:
        # The library reports a failed write as its own error; the cause (errno 28: no space) is in its text.
        code = 28 if "os error 28" in str(error).lower() or "no space" in str(error).lower() else 5
        raise OSError(code, str(error)) from error
    if header:
        _sort_header(path)


def _sort_header(path: Path) -> None:
    """Sort the metadata of a safetensors file, whose order the library varies from process to process."""
    with open(path, "r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        content = json.loads(file.read(size))
        content["__metadata__"] = dict(sorted(content["__metadata__"].items()))
        text = json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()
        if len(text) > size:
            raise OSError(errno.EIO, "the header of a safetensors file was written in an unknown form")
        file.seek(8)
        file.write(text.ljust(size))


def folder_of(parent: Path, step: int) -> Path:
    """Return the path of a step's checkpoint in the folder ``parent``."""
    return parent / f"step-{step:09d}"


def steps(parent: Path) -> list[int]:
    """Return the steps of the complete checkpoints in a folder, ascending."""
    return sorted(int(path.name[5:]) for path in parent.glob("step-*") if path.name[5:].isdigit())


def save(
    parent: Path,
    tensors: dict[str, Tensor],
    state: dict[str, Any],
    more: Callable[[Path], Iterable[str]] = lambda folder: (),
) -> Path:
    """Write a checkpoint into ``parent``, the folder of all checkpoints, and return its folder.

    Args:
        tensors: Tensors by name; copies are made only of those that are not contiguous.
        state: Plain JSON values; ``state["step"]`` names the checkpoint.
        more: Function that is given the folder under its temporary name, with both files in it, writes further files
            into it, and returns their names. If it raises an error, there is no checkpoint.

    Raises:
        RunError: If the disk is full or read-only. Earlier checkpoints are intact.
    """
    target = folder_of(parent, int(state["step"]))
    temporary = parent / f".{target.name}.{os.getpid()}.tmp"
    with disk_errors(target):
        try:
            remove_folder(temporary)
            temporary.mkdir(parents=True)
            plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
            write_tensors(temporary / TENSORS, plain)
            (temporary / STATE).write_text(json.dumps(state, allow_nan=False), encoding="utf-8")
            names = (TENSORS, STATE, *more(temporary))
            sums = {name: checksum(temporary / name) for name in names}
            (temporary / _CHECKSUMS).write_text(sealed_json(sums), encoding="utf-8")
            for name in (*names, _CHECKSUMS):
                flush(temporary / name)
            remove_folder(target)
            os.rename(temporary, target)
            flush(parent)
        finally:
            remove_folder(temporary)
    return target


def _checksums(folder: Path) -> dict[str, str] | SealedFolder:
    """Return the SHA-256 of the files of one process's checkpoint by name, or the folder of several processes."""
    path = folder / _CHECKSUMS
    sums = read_sealed(path, error=CheckpointError, remedy=_REMEDY)
    for name in (TENSORS, STATE):
        if name not in sums:
            raise CheckpointError(f"holds no checksum of {name}", where=str(path), remedy=_REMEDY)
    if not all(isinstance(entry, str) for entry in sums.values()):
        return SealedFolder(folder)
    return sums


def digest(folder: Path) -> str:
    """Return the SHA-256, computed at the time of writing, that identifies the tensors of a checkpoint.

    Raises:
        CheckpointError: If the checksums are missing or damaged.
    """
    sums = _checksums(folder)
    digests = sums if isinstance(sums, dict) else sums.digests
    of_tensors = sorted((name, one) for name, one in digests.items() if name != STATE)
    if isinstance(sums, dict) and len(of_tensors) == 1:
        return sums[TENSORS]
    return hashlib.sha256(json.dumps(of_tensors).encode()).hexdigest()


def load(folder: Path, verify: Callable[[SealedFolder], None] | None = None) -> Checkpoint:
    """Read a checkpoint after verifying every byte of it.

    Args:
        folder: Folder of the checkpoint.
        verify: Function that verifies a folder that several processes wrote. Default: all of its files, here.

    Raises:
        CheckpointError: If a file is missing or differs from its checksum; the message names it.
    """
    sums = _checksums(folder)
    if isinstance(sums, SealedFolder):
        if verify is None:
            for name in sums.sizes:
                sums.verify(name)
        else:
            verify(sums)
        files = sorted(name for name in sums.sizes if name.startswith(f"{TABLES}-"))
        return Checkpoint(folder, load_file(folder / TENSORS), sums.read_json(STATE), Parts(folder, files))
    for name, wanted in sums.items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"is missing from the folder {folder.name}", where=str(path), remedy=_REMEDY)
        if not is_intact(path, wanted):
            raise CheckpointError(
                f"is corrupt: its contents do not match the checksum written with it into the folder {folder.name}",
                where=str(path),
                remedy=_REMEDY,
            )
    state = read_json_object(folder / STATE, error=CheckpointError, remedy=_REMEDY)
    return Checkpoint(folder, load_file(folder / TENSORS), state)


def not_finite(tensors: Mapping[str, Tensor]) -> str | None:
    """Describe tensors with NaN or infinity; return None if all are finite. Tensors are read once and not copied."""
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or not tensor.numel():
            continue
        if tensor.dtype.itemsize == 1:  # torch has no minimum of 8-bit floats
            tensor = tensor.float()
        for first, chunk in enumerate(tensor.detach().reshape(-1).split(_CHUNK)):
            low, high = torch.aminmax(chunk)
            if not bool(torch.isfinite(low) & torch.isfinite(high)):
                inside = int((~torch.isfinite(chunk)).nonzero()[0])
                return f"element {first * _CHUNK + inside} of {name} is {float(chunk[inside])}"
    return None


def prune(parent: Path, keep: set[int]) -> None:
    """Delete the checkpoints in ``parent`` whose steps are not in ``keep``, and leftovers of unfinished writes."""
    for step in steps(parent):
        if step not in keep:
            remove_folder(folder_of(parent, step))
    for leftover in parent.glob(".step-*.tmp"):
        remove_folder(leftover)


def pack(value: Any, path: str) -> tuple[Any, dict[str, Tensor]]:
    """Separate nested dicts and lists (``value``) into plain JSON values and tensors, named after ``path``.

    Returns:
        The value with every tensor replaced by ``{"__tensor__": name}`` and every number that is not finite by
        ``{"__number__": text}``, and the tensors by name.
    """
    if isinstance(value, Tensor):
        return {"__tensor__": path}, {path: value}
    tensors: dict[str, Tensor] = {}
    if isinstance(value, dict):
        plain: Any = {}
        for key, entry in value.items():
            plain[key], more = pack(entry, f"{path}.{key}")
            tensors |= more
        return plain, tensors
    if isinstance(value, list | tuple):
        plain = []
        for number, entry in enumerate(value):
            packed, more = pack(entry, f"{path}.{number}")
            plain.append(packed)
            tensors |= more
        return plain, tensors
    if isinstance(value, float) and not math.isfinite(value):
        return {"__number__": repr(value)}, tensors
    return value, tensors


def unpack(value: Any, tensors: dict[str, Tensor]) -> Any:
    """Undo :func:`pack` of ``value``; ``tensors`` are copied, because a checkpoint's tensors are memory-mapped."""
    if isinstance(value, dict):
        if set(value) == {"__tensor__"}:
            return tensors[value["__tensor__"]].clone()
        if set(value) == {"__number__"}:
            return float(value["__number__"])
        return {key: unpack(entry, tensors) for key, entry in value.items()}
    if isinstance(value, list):
        return [unpack(entry, tensors) for entry in value]
    return value


def random_state() -> dict[str, Tensor]:
    """Return the state of torch's random generators, as tensors for a checkpoint."""
    state = {"random.cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["random.cuda"] = torch.cuda.get_rng_state()
    return state


def restore_random_state(tensors: dict[str, Tensor]) -> None:
    """Restore torch's random generators from :func:`random_state`."""
    torch.set_rng_state(tensors["random.cpu"].clone())
    if torch.cuda.is_available() and "random.cuda" in tensors:
        torch.cuda.set_rng_state(tensors["random.cuda"].clone())
