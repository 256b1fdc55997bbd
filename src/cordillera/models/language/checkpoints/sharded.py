"""Cordillera's own layout of distributed training: parts of tensors, as each process holds them.

A folder ``step-000000123`` holds ``weights-NNNNN.safetensors`` and ``optimizer-NNNNN.safetensors`` of process ``NNNNN``
(none for a process that holds no part of its own), ``model.json`` (the shapes), ``state.json`` (counters) and
``checksums.json`` (SHA-256 and size of all other files, and its own SHA-256). Weights have the names of the whole
model; a moment is ``optimizer.NAME.exp_avg``. The header of a file gives the position of each part in its tensor in the
format of :mod:`torch.distributed.checkpoint`, whose ``HuggingFaceStorageReader`` can read such folders too. That
module's own layout is not used because it stores a pickle beside the tensors, and a pickle may contain code.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from cordillera.data.sealed import SealedFolder
from cordillera.distributed.tensor_parts import Parts
from cordillera.errors import CheckpointError
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
_REMEDY = "delete this folder and use an earlier checkpoint, or restore it from a copy"


class ShardedFolder(SealedFolder):
    """Folder of a step, whose files are checked for their recorded sizes."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        for name in (MODEL, STATE):
            if name not in self.sizes:
                raise CheckpointError(f"is missing from {path.name}", where=str(path / name), remedy=_REMEDY)

    @property
    def config(self) -> LlamaConfig:
        """Configuration of the model."""
        return make_config(self.path / MODEL, self.read_json(MODEL))

    def parts(self, kind: str) -> Parts:
        """Open the files of one kind, :data:`WEIGHTS` or :data:`OPTIMIZER`, without verifying their checksums."""
        return Parts(self.path, sorted(name for name in self.sizes if name.startswith(f"{kind}-")))


def check_weights(parts: Parts, config: LlamaConfig) -> None:
    """Raise CheckpointError if a weight is missing, has another shape, or has no place in the model."""
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
    """Weights of a folder that a distributed training wrote; a file is verified when it is first read."""

    layout = "Cordillera"
    dtype = torch.float32

    def __init__(self, path: Path) -> None:
        self.path = path
        self._folder = ShardedFolder(path)
        self._folder.read_json(STATE)  # not needed here, but raises an error if the file is damaged
        self.config = self._folder.config
        self._weights = self._folder.parts(WEIGHTS)
        check_weights(self._weights, self.config)

    def name_of(self, name: str) -> str:
        return name

    def read(self, name: str, out: Tensor) -> None:
        for file in {part.file for part in self._weights.parts[name]}:
            self._folder.verify_once(file)
        self._weights.read(name, [0] * out.dim(), out)
