"""Folders as trainings in many processes leave them, written without any."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from cordillera.data.files import checksum
from cordillera.distributed.tensor_parts import describe_parts
from cordillera.files import sealed_json
from cordillera.models.language.llama import Llama

Boxes = dict[str, tuple[tuple[int, ...], Tensor]]


def grid(tensor: Tensor, cuts: list[list[int]]) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """Boxes between cuts along every dimension, and where they begin; empty ones are left out."""
    bounds = [sorted({0, *inner, size}) for inner, size in zip(cuts, tensor.shape, strict=True)]
    for corner in itertools.product(*(list(itertools.pairwise(bound)) for bound in bounds)):
        box = tensor[tuple(slice(*pair) for pair in corner)].contiguous()
        if box.numel():
            yield tuple(first for first, _ in corner), box


def write_parts(path: Path, boxes: Boxes) -> None:
    offsets = {name: offset for name, (offset, _) in boxes.items()}
    save_file({name: box for name, (_, box) in boxes.items()}, path, describe_parts(offsets))


def seal(folder: Path) -> Path:
    """Write the checksums of what lies in a folder."""
    (folder / "checksums.json").unlink(missing_ok=True)
    files = {path.name: {"sha256": checksum(path), "bytes": path.stat().st_size} for path in sorted(folder.iterdir())}
    (folder / "checksums.json").write_text(sealed_json(files))
    return folder


def write_step(folder: Path, model: Llama, ranks: int = 3, **moments: Tensor) -> Path:
    """A model whose tensors are cut by rows over ``ranks`` files."""
    folder.mkdir()
    files: list[dict[str, Boxes]] = [{"weights": {}, "optimizer": {}} for _ in range(ranks)]
    tensors: Mapping[str, Tensor] = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for name, tensor in (tensors | moments).items():
        rows = -(-len(tensor) // ranks)
        cuts = [list(range(0, len(tensor), rows)), *([] for _ in tensor.shape[1:])]
        for rank, box in enumerate(grid(tensor, cuts)):
            files[rank]["optimizer" if name in moments else "weights"][name] = box
    for rank, kinds in enumerate(files):
        for kind, boxes in kinds.items():
            if boxes:
                write_parts(folder / f"{kind}-{rank:05d}.safetensors", boxes)
    (folder / "model.json").write_text(model.config.model_dump_json())
    (folder / "state.json").write_text(json.dumps({"state": {"step": 7}}))
    return seal(folder)
