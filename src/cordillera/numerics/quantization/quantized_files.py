"""Files of quantised layers."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from cordillera.errors import NumericsError
from cordillera.numerics.quantization.integer_linear import make_weight
from cordillera.numerics.quantization.quantized_linear import LinearConfig, QuantizedLinear
from cordillera.numerics.quantization.quantized_mlp import QuantizedMLP
from cordillera.numerics.quantization.quantizers import AffineParameters
from cordillera.tensor_files import read_tensors, write_tensors

_KIND = "cordillera quantized linear 1"
_REMEDY = "write the file again from the layers in float32, or use those"


def save_quantized(model: QuantizedLinear | QuantizedMLP, path: str | Path) -> None:
    """Write a layer or a chain to a file, which is replaced atomically.

    Raises:
        NumericsError: If the file cannot be written.
    """
    layers = list(model._chain) if isinstance(model, QuantizedMLP) else [model]
    described = {
        "chain": isinstance(model, QuantizedMLP),
        "layers": [{"relu": layer.relu, "config": asdict(layer.config)} for layer in layers],
    }
    write_tensors(Path(path), _KIND, model.state_dict(), described)


def load_quantized(path: str | Path) -> QuantizedLinear | QuantizedMLP:
    """Read a file of :func:`save_quantized`, and pack the layers for this machine.

    Raises:
        NumericsError: If it is not such a file, or its content has changed.
    """
    tensors, described = read_tensors(Path(path), _KIND, _REMEDY)
    try:
        if not described["chain"]:
            return _layer(tensors, "", described["layers"][0])
        layers = [_layer(tensors, f"layers.{i}.", layer) for i, layer in enumerate(described["layers"])]
        return QuantizedMLP(layers, _parameters(tensors, "output"))
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, RuntimeError) as error:
        raise NumericsError(f"the file describes no layers: {error!r}", where=str(path), remedy=_REMEDY) from error


def _parameters(tensors: dict[str, Tensor], prefix: str) -> AffineParameters | None:
    scale = tensors.get(f"{prefix}_scale")
    return None if scale is None else AffineParameters(scale, tensors[f"{prefix}_zero_point"])


def _layer(tensors: dict[str, Tensor], prefix: str, described: dict[str, Any]) -> QuantizedLinear:
    part = {name: tensors.get(prefix + name) for name in ("zero_point", "bias", "float_weight")}
    weight = make_weight(tensors[f"{prefix}codes"], tensors[f"{prefix}scale"], part["zero_point"], part["bias"])
    layer = QuantizedLinear(
        weight,
        _parameters(tensors, f"{prefix}input"),
        relu=described["relu"],
        config=LinearConfig(**described["config"]),
        float_weight=part["float_weight"],
    )
    layer.digest.copy_(tensors[f"{prefix}digest"])
    layer.verify()
    return layer
