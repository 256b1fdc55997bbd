"""Quantised layers in a file: safetensors with a SHA-256 of everything, checked before anything is used."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from cordillera.errors import NumericsError
from cordillera.numerics.integer_linear import make_weight
from cordillera.numerics.quantized_linear import LinearConfig, QuantizedLinear
from cordillera.numerics.quantized_mlp import QuantizedMLP
from cordillera.numerics.quantizers import AffineParameters

_KIND = "cordillera quantized linear 1"
_REMEDY = "write the file again from the layers in float32, or use those"


def save_quantized(model: QuantizedLinear | QuantizedMLP, path: str | Path) -> None:
    """Write a layer or a chain, beside its place and renamed.

    Args:
        model: The layer or the chain.
        path: Of the file.
    """
    layers = list(model._chain) if isinstance(model, QuantizedMLP) else [model]
    described = {
        "chain": isinstance(model, QuantizedMLP),
        "layers": [{"relu": layer.relu, "config": asdict(layer.config)} for layer in layers],
    }
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    text = json.dumps(described, sort_keys=True)
    beside = Path(path).with_name(Path(path).name + ".part")
    save_file(tensors, beside, {"kind": _KIND, "layers": text, "sha256": _digest(text, tensors)})
    os.replace(beside, path)


def load_quantized(path: str | Path) -> QuantizedLinear | QuantizedMLP:
    """Read what :func:`save_quantized` wrote, and pack it for this machine.

    Args:
        path: Of the file.

    Raises:
        NumericsError: If it is not such a file, or not the same as when it was written.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no dictionary)
    except (SafetensorError, OSError, ValueError) as error:
        raise NumericsError(
            f"no readable file of quantised layers: {error}", where=str(path), remedy=_REMEDY
        ) from error
    if metadata.get("kind") != _KIND:
        raise NumericsError("the file holds no quantised layers", where=str(path))
    if metadata.get("sha256") != _digest(metadata.get("layers", ""), tensors):
        raise NumericsError("the file is corrupt: its SHA-256 differs", where=str(path), remedy=_REMEDY)
    try:
        described = json.loads(metadata["layers"])
        if not described["chain"]:
            return _layer(tensors, "", described["layers"][0])
        layers = [_layer(tensors, f"layers.{i}.", layer) for i, layer in enumerate(described["layers"])]
        return QuantizedMLP(layers, _parameters(tensors, "output"))
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise NumericsError(f"the file describes no layers: {error!r}", where=str(path), remedy=_REMEDY) from error


def _digest(text: str, tensors: dict[str, Tensor]) -> str:
    content = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        content.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        content.update(tensor.contiguous().numpy().tobytes())
    return content.hexdigest()


def _parameters(tensors: dict[str, Tensor], prefix: str) -> AffineParameters | None:
    scale = tensors.get(f"{prefix}_scale")
    return None if scale is None else AffineParameters(scale, tensors[f"{prefix}_zero_point"])


def _layer(tensors: dict[str, Tensor], prefix: str, described: dict[str, Any]) -> QuantizedLinear:
    part = {name: tensors.get(prefix + name) for name in ("zero_point", "bias", "float_weight", "digest")}
    weight = make_weight(tensors[f"{prefix}codes"], tensors[f"{prefix}scale"], part["zero_point"], part["bias"])
    layer = QuantizedLinear(
        weight,
        _parameters(tensors, f"{prefix}input"),
        relu=described["relu"],
        config=LinearConfig(**described["config"]),
        float_weight=part["float_weight"],
    )
    assert part["digest"] is not None
    layer.digest.copy_(torch.as_tensor(part["digest"]))
    layer.verify()
    return layer
