"""Devices, precisions and checkpoints of models that score samples."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cordillera.data.ranking.features import RankingBatch
from cordillera.distributed.dtensors import is_dtensor
from cordillera.distributed.tensor_parts import Parts
from cordillera.embeddings.file_tables import FileTables
from cordillera.errors import CheckpointError, DependencyError
from cordillera.models.ranking.base import RankingModel
from cordillera.numerics.emulation.emulation import EmulatedProducts, EmulationConfig
from cordillera.numerics.emulation.scaling import LossScale
from cordillera.numerics.formats.precision import Precision
from cordillera.run import Run
from cordillera.training import checkpoints
from cordillera.training.optimizers import embedding_tables
from cordillera.training.ranking.sharded_dense import cut_like

ROWS = "rows"
"""Name of the folder with the rows of tables in a file, in the folders of runs and checkpoints."""

_ROWS = 1 << 16  # rows of tables that are read at a time


def select_device(name: str) -> torch.device:
    """Return the device that a recipe's ``device`` names; ``auto`` takes a GPU if there is one.

    Raises:
        DependencyError: If the device is not available.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise DependencyError(
            "no CUDA device is usable here", where=f"device = {name!r}", remedy="use device = 'auto' or 'cpu'"
        )
    return device


def autocast(device: torch.device, precision: Precision) -> contextlib.AbstractContextManager[Any]:
    """Return the autocast region of a precision on a device: bfloat16 for ``bf16``, nothing for ``fp32``."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bf16")


def emulated(
    emulate: EmulationConfig | None, step: int = 0, loss_scale: LossScale | None = None
) -> contextlib.AbstractContextManager[EmulatedProducts | None]:
    """Return the region of training step ``step`` in which products are emulated; an empty one if ``emulate`` is None.

    A ``loss_scale`` of None means 1.
    """
    if emulate is None:
        return contextlib.nullcontext()
    return EmulatedProducts(emulate, step, 1.0 if loss_scale is None else loss_scale.value)


def scorer(
    model: RankingModel, device: torch.device, precision: Precision, emulate: EmulationConfig | None = None
) -> Callable[[RankingBatch], Tensor]:
    """Return a function from a batch to logits without gradients: ``float32 [B, tasks]`` on the CPU.

    The ``model`` lies on ``device``, is in evaluation mode, and computes in ``precision``, with the format to
    ``emulate`` or None.
    """

    def score(batch: RankingBatch) -> Tensor:
        was_training = model.training
        model.eval()
        try:
            with torch.inference_mode(), autocast(device, precision), emulated(emulate):
                return model(batch.to(device)).float().cpu()
        finally:
            model.train(was_training)

    return score


def load_weights(model: RankingModel, checkpoint: checkpoints.Checkpoint) -> None:
    """Load the weights of a checkpoint into a model.

    Raises:
        CheckpointError: If the checkpoint is of another model; the message names the first difference.
    """
    saved = {k[len("model.") :]: v for k, v in checkpoint.tensors.items() if k.startswith("model.")}
    own = {name: one for name, one in model.named_parameters() if is_dtensor(one)}
    for module in embedding_tables(model).values():
        if isinstance(module, FileTables) and module.file.folder != checkpoint.folder / ROWS:
            module.load(checkpoint.folder / ROWS)
    try:
        saved = {key: cut_like(own[key], one) if key in own else one for key, one in saved.items()}
        if checkpoint.tables is None:
            model.load_state_dict(saved)
        else:
            _load_parts(model, saved, checkpoint.tables)
    except (RuntimeError, KeyError, ValueError) as error:
        raise CheckpointError(
            f"holds another model: {str(error).splitlines()[-1].strip()}",
            where=str(checkpoint.folder),
            remedy="use the recipe that stands in the run's folder",
        ) from error


@torch.no_grad()
def _load_parts(model: RankingModel, saved: dict[str, Tensor], parts: Parts) -> None:
    """Load tensors outside of tables, and of tables the parts that this process holds, whatever parts were saved."""
    tables, shapes = embedding_tables(model), dict[str, tuple[int, ...]]()
    for name, module in tables.items():
        shapes |= {f"model.{name}.{key}": shape for key, shape in module.shapes().items()}
    for key in sorted({*shapes, *parts.shapes}):
        if parts.shapes.get(key) != shapes.get(key):
            raise ValueError(f"{key} has the shape {parts.shapes.get(key)}, in the model {shapes.get(key)}")
    found = model.load_state_dict(saved, strict=False)
    absent = [key for key in found.missing_keys if not any(key.startswith(f"{name}.") for name in tables)]
    if absent or found.unexpected_keys:
        raise ValueError(f"differs in {', '.join([*absent, *found.unexpected_keys])}")
    for name, module in tables.items():
        for box in module.boxes():
            for first in range(0, len(box.values), _ROWS):
                offsets = (box.offsets[0] + first, *box.offsets[1:])
                parts.read(f"model.{name}.{box.name}", offsets, box.values[first : first + _ROWS])


def best_checkpoint(run: Run, *, use_best: bool) -> checkpoints.Checkpoint:
    """Load the final weights of a finished ``run``: with ``use_best`` the best ones in validation, else the newest.

    Raises:
        CheckpointError: If there is none, or it is corrupt.
    """
    available = checkpoints.steps(run.checkpoints)
    if not available:
        raise CheckpointError(
            "holds no checkpoint", where=str(run.checkpoints), remedy="train first: `cordillera train RECIPE`"
        )
    newest = checkpoints.load(checkpoints.folder_of(run.checkpoints, available[-1]))
    best = newest.state.get("best_step")
    if not use_best or best in (None, newest.step):
        return newest
    return checkpoints.load(checkpoints.folder_of(run.checkpoints, int(best)))
