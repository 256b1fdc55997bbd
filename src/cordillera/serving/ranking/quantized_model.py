"""Quantised ranking models: made from a trained model, written to a folder and read from it.

A folder holds ``model.safetensors`` (rows, weights and scales in the layout of the kernels) and ``quantized.json`` (the
format of each table and layer, the origin of the model, the reference of calibration, and the digests of both files).
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from cordillera.data.files import checksum, is_intact
from cordillera.embeddings.quantized_tables import QuantizedTables
from cordillera.errors import CheckpointError, NumericsError
from cordillera.files import read_json_object, read_sealed, read_text, sealed_json
from cordillera.models.ranking.base import RankingModel
from cordillera.numerics.dispatch.candidates import CANDIDATES
from cordillera.numerics.dispatch.stored_linear import StoredLinear
from cordillera.numerics.formats.cast_checks import self_test
from cordillera.numerics.formats.precision import Precision
from cordillera.numerics.inference.drift import DriftReference
from cordillera.numerics.sites import replace, sites
from cordillera.run import Run, disk_errors, write_atomically
from cordillera.training import checkpoints
from cordillera.training.checkpoints import write_tensors

SCHEMA = 3
FOLDER = "quantized"
"""Name of the folder of a run's quantised model."""
_TENSORS, _RECORD = "model.safetensors", "quantized.json"
_REMEDY = "cordillera quantize RUN makes it anew"


def quantize_model(
    model: RankingModel,
    tables: Mapping[str, str],
    layers: Mapping[str, str],
    rows: Mapping[str, Tensor],
    made: dict[tuple[str, str], Tensor] | None = None,
) -> RankingModel:
    """Return a copy of a trained model on a CPU with other formats of tables' rows and kernels of linear layers.

    Tables and layers that are not named stay as they are. Some kernels are calibrated on ``rows``, the inputs of
    layers. ``made`` caches encoded tables by name and format.
    """
    whole = model.tables
    try:
        model.tables = torch.nn.Identity()  # type: ignore[assignment]  # not copied, because tables may be most of the memory
        found = copy.deepcopy(model)
    finally:
        model.tables = whole
    found.tables = QuantizedTables.of(whole, {name: tables.get(name, "fp32") for name in whole.features.tables}, made)
    linear = sites(found)
    for name, kernel in layers.items():
        _place(found, name, StoredLinear.of(linear[name], kernel, rows.get(name)))
    return found.eval().requires_grad_(False)


def _place(model: RankingModel, name: str, layer: StoredLinear) -> None:
    """Replace a layer; a ReLU that follows it becomes part of it."""
    parent, _, last = name.rpartition(".")
    siblings = model.get_submodule(parent)
    replace(model, name, layer)
    if not isinstance(siblings, torch.nn.Sequential):
        return
    after = int(last) + 1
    if after < len(siblings) and isinstance(siblings[after], torch.nn.ReLU):
        layer.relu, siblings[after] = True, torch.nn.Identity()


def size_bytes(model: torch.nn.Module) -> int:
    """Return the bytes of all parameters and buffers that are saved with a model."""
    return sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values() if tensor.numel())


def origin(run: Run, *, use_best: bool) -> dict[str, str]:
    """Return the origin of a run's quantised model: digests of its encoder and of its best or newest checkpoint."""
    steps = checkpoints.steps(run.checkpoints)
    if not steps:
        raise CheckpointError(
            "holds no checkpoint, so that nothing tells whose quantised model lies beside it",
            where=str(run.checkpoints), remedy="keep the checkpoint that it was made of, or train again",
        )  # fmt: skip
    newest = checkpoints.folder_of(run.checkpoints, steps[-1])
    best = read_json_object(newest / "state.json", error=CheckpointError).get("best_step")
    folder = checkpoints.folder_of(run.checkpoints, best) if use_best and isinstance(best, int) else newest
    digest = checkpoints.digest(folder)
    encoder = run.folder / "encoder" / "encoder.json"
    text = read_text(encoder, error=CheckpointError)
    return {"checkpoint": digest, "encoder": hashlib.sha256(text.encode()).hexdigest()}


def save(
    folder: Path,
    model: RankingModel,
    seen: DriftReference,
    made_of: Mapping[str, str],
    facts: Mapping[str, Any],
    precision: Precision = "fp32",
) -> None:
    """Write a quantised model to a folder, which is created if absent and replaced if present.

    Loading requires the :func:`origin` ``made_of``. ``seen`` is the reference of calibration, ``facts`` are for
    readers, ``precision`` is that of layers without a quantised kernel.
    """
    tensors = {name: t.contiguous() for name, t in model.state_dict().items() if isinstance(t, Tensor) and t.numel()}
    temporary = folder / f".{_TENSORS}.tmp"
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            write_tensors(temporary, tensors)
            digest = checksum(temporary)
            (folder / _RECORD).unlink(missing_ok=True)  # invalidates the old model until the new one is complete
            temporary.replace(folder / _TENSORS)
        finally:
            temporary.unlink(missing_ok=True)
    record: dict[str, Any] = {
        "schema": SCHEMA,
        "made_of": dict(made_of),
        "tables": getattr(model.tables, "kinds", {}),
        "layers": {n: m.kernel for n, m in model.named_modules() if isinstance(m, StoredLinear)},
        "tensors": digest,
        "precision": precision,
        "seen": seen.to_json(),
        "facts": dict(facts),
    }
    write_atomically(folder / _RECORD, sealed_json(record))


def read_record(folder: Path) -> dict[str, Any]:
    """Return the record of a quantised model."""
    path = folder / _RECORD
    if not path.is_file():
        raise CheckpointError("holds no quantised model", where=str(folder), remedy="cordillera quantize RUN makes one")
    record = read_sealed(path, required=True, schema=SCHEMA, error=CheckpointError, remedy=_REMEDY)
    kinds = {"made_of": dict, "tables": dict, "layers": dict, "seen": dict, "tensors": str, "precision": str}
    for name, kind in kinds.items():
        if not isinstance(record.get(name), kind):
            raise CheckpointError(f"is damaged: {name} is no {kind.__name__}", where=str(path), remedy=_REMEDY)
    return record


def precision_of(folder: Path) -> Precision:
    """Return the precision of the layers of a quantised model that have no kernel of their own."""
    return "bf16" if read_record(folder).get("precision") == "bf16" else "fp32"


def load(folder: Path, model: RankingModel, made_of: Mapping[str, str]) -> tuple[RankingModel, DriftReference]:
    """Return the quantised model of a folder and its reference of calibration.

    Tables and layers of ``model``, of the run's recipe, are replaced; ``made_of`` is the :func:`origin` of the run.
    """
    self_test()
    record = read_record(folder)
    for part in dict.fromkeys((*record["made_of"], *made_of)):
        if record["made_of"].get(part) != made_of.get(part):
            raise CheckpointError(
                f"was made of another {part} than that of this run", where=str(folder), remedy=_REMEDY
            )
    try:
        return _load(folder, model, record)
    except (NumericsError, RuntimeError) as error:
        what = error.what if isinstance(error, NumericsError) else str(error)
        raise CheckpointError(f"does not fit the run's model: {what}", where=str(folder), remedy=_REMEDY) from error


def _load(folder: Path, model: RankingModel, record: Mapping[str, Any]) -> tuple[RankingModel, DriftReference]:
    path = folder / _TENSORS
    if not is_intact(path, record["tensors"]):
        raise CheckpointError(
            "is damaged: its checksum differs" if path.is_file() else "is missing", where=str(path),
            remedy=_REMEDY,
        )  # fmt: skip
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise CheckpointError(f"is damaged: {error}", where=str(path), remedy=_REMEDY) from error
    model.tables = QuantizedTables(model.tables.features, model.tables.embedding_dim, record["tables"])
    linear, placed = sites(model), list[StoredLinear]()
    for name, kernel in record["layers"].items():
        if name not in linear or kernel not in CANDIDATES:
            raise CheckpointError(
                f"names the layer {name!r} with the kernel {kernel!r}, which is not here", where=str(folder),
                remedy=_REMEDY,
            )  # fmt: skip
        prefix = f"{name}.stored_"
        stored = {key.removeprefix(prefix): t for key, t in tensors.items() if key.startswith(prefix)}
        if "weight" not in stored:
            raise CheckpointError(f"has no weight of {name!r}", where=str(path), remedy=_REMEDY)
        layer = StoredLinear(kernel, stored, tensors.get(f"{name}.bias"))
        if (layer.in_features, layer.out_features) != (linear[name].in_features, linear[name].out_features):
            raise CheckpointError(f"has a layer {name!r} of another size", where=str(path), remedy=_REMEDY)
        _place(model, name, layer)
        placed.append(layer)
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    missing = [name for name in missing if not name.endswith("_extra_state") and model.state_dict()[name].numel()]
    if missing or unexpected:
        raise CheckpointError(
            f"does not fit the run's model: {[*missing, *unexpected][0]}", where=str(path), remedy=_REMEDY
        )
    for layer in placed:
        layer.prepare()
    return model.eval().requires_grad_(False), DriftReference.from_json(record["seen"])
