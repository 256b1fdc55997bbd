"""Chains of linear layers whose activations stay in uint8 between the layers, calibrated on a few batches."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cordillera.errors import NumericsError
from cordillera.numerics.formats.formats import INTEGERS
from cordillera.numerics.quantization.engines import all_finite
from cordillera.numerics.quantization.fixed_dtypes import FixedDtypes
from cordillera.numerics.quantization.integer_linear import UINT8
from cordillera.numerics.quantization.quantized_linear import (
    LinearConfig,
    QuantizedLinear,
    plain,
    take_out_nonfinite,
    widened,
)
from cordillera.numerics.quantization.quantizers import AffineParameters, check_finite, check_parameters
from cordillera.numerics.quantization.range_estimators import RunningHistogram, estimate


class QuantizedMLP(FixedDtypes):
    """Chain of linear layers from ``float32 [..., K]`` to ``float32 [..., N]``, with activations in uint8 between them.

    Args:
        layers: Layers with static scales for their inputs; the output of each is the input of the next.
        output: Scale and zero point of the last output, which is then uint8 as well; None to compute it in float32.

    Attributes:
        nonfinite_rows: Number of rows with NaN or infinity that were set aside so far.

    Raises:
        NumericsError: If the layers do not fit each other.
    """

    output_scale: Tensor | None
    output_zero_point: Tensor | None

    def __init__(self, layers: Iterable[QuantizedLinear], output: AffineParameters | None = None) -> None:
        super().__init__()
        layers = list(layers)
        self.layers = nn.ModuleList(layers)
        self.nonfinite_rows = 0
        self._chain: list[QuantizedLinear] = list(layers)
        chain = self._chain
        if not chain or any(layer._input is None for layer in chain):
            raise NumericsError("a chain needs layers whose inputs have scales", where="layers")
        for i, (layer, following) in enumerate(pairwise(chain)):
            if layer.out_features != following.in_features:
                message = f"{layer.out_features} outputs for {following.in_features} inputs"
                raise NumericsError(message, where=f"layers {i} and {i + 1}")
        # all layers must use codes of one form
        if any(layer._fused is None for layer in chain) and len({type(layer._engine) for layer in chain}) > 1:
            for layer in chain:
                layer.config = replace(layer.config, backend="reference")
                layer.pack()
        self.register_buffer("output_scale", None if output is None else output.scale.reshape(()).float())
        zero = None if output is None else 0 if output.zero_point is None else int(output.zero_point)
        self.register_buffer("output_zero_point", None if zero is None else torch.tensor(zero, dtype=torch.int32))
        self._read_scales()
        self.register_load_state_dict_post_hook(lambda module, keys: module._read_scales())

    def _read_scales(self) -> None:
        self._scales = [layer._input for layer in self._chain if layer._input is not None]
        fused = [layer._fused for layer in self._chain if layer._fused is not None]
        self._fused = fused if len(fused) == len(self._chain) else []
        self._output: tuple[float, int] | None = None
        if self.output_scale is not None and self.output_zero_point is not None:
            check_parameters(self.output_scale, self.output_zero_point, UINT8, where="output")
            self._output = (float(self.output_scale), int(self.output_zero_point))

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype != torch.float32:
            return self.forward(widened(x)).to(x.dtype)
        chain = self._chain
        rows = x.reshape(x.shape[:-1].numel(), x.shape[-1]) if x.dim() != 2 else x
        if rows.shape[1] != chain[0].in_features:
            raise NumericsError(f"{list(x.shape)} inputs for {chain[0].in_features}", where="x")
        rows = plain(rows)
        y = self._fuse(rows, self._output is None)
        if y is not None:
            y = y if self._output is None else _values(y, *self._output)
        elif all_finite(rows):
            y = self._run(rows)
        else:
            rows, bad = take_out_nonfinite(rows, chain[0].config)
            self.nonfinite_rows += int(bad.sum())
            y = self.forward(rows).masked_fill(bad[:, None], torch.nan)
        return y if x.dim() == 2 else y.view(*x.shape[:-1], -1)

    def codes(self, x: Tensor) -> Tensor:
        """Return the codes ``uint8 [M, N]`` of the last output for finite ``x``, ``float32 [M, K]``.

        Raises:
            NumericsError: If the last output has no scale, or ``x`` has another shape or dtype or is not finite.
        """
        if self._output is None:
            raise NumericsError("the last output has no scale", where="output", remedy="give it one")
        inner = self._chain[0].in_features
        if x.dtype != torch.float32 or x.dim() != 2 or x.shape[1] != inner:
            raise NumericsError(f"expected float32 [M, {inner}], not {x.dtype} {list(x.shape)}", where="x")
        x = plain(x)
        codes = self._fuse(x, False)
        if codes is not None:
            return codes
        if not all_finite(x):
            check_finite(x, "x")
        return self._chain[-1]._engine.plain(self._codes(x, [*self._scales, self._output]))

    def _fuse(self, x: Tensor, to_values: bool) -> Tensor | None:
        """Run the chain in fused kernels; None if there are none or a value is not finite."""
        if not self._fused or not x.shape[0]:
            return None
        scales = self._scales[1:] if self._output is None else [*self._scales[1:], self._output]
        if not scales:
            return self._fused[0](x)
        y = x
        for layer, scale in zip(self._fused, scales, strict=False):
            codes = layer.requantized(y, *scale)
            if codes is None:
                return None
            y = codes
        if to_values:
            return self._fused[-1].values(y)
        outputs = self._chain[-1].out_features
        return y if y.shape[1] == outputs else y[:, :outputs]

    def _codes(self, x: Tensor, scales: list[tuple[float, int]]) -> Tensor:
        """Return the codes of the last layer; ``scales`` are that of ``x``, then those of the layers' outputs."""
        codes = self._chain[0]._engine.codes(x, *scales[0])
        for layer, given, wanted in zip(self._chain, scales, scales[1:], strict=False):
            codes = layer._engine.from_codes(codes, *given, *wanted, layer.relu)
        return codes

    def _run(self, x: Tensor) -> Tensor:
        last = self._chain[-1]
        if self._output is not None:
            return last._engine.values(self._codes(x, [*self._scales, self._output]), *self._output)
        scale, zero_point = self._scales[-1]
        if len(self._chain) > 1:
            # quantising the values again yields the same codes
            x = last._engine.values(self._codes(x, self._scales), scale, zero_point)
        return last._engine.from_float(x, scale, zero_point, last.relu)


def quantize_mlp(
    model: nn.Sequential,
    batches: Iterable[Tensor],
    *,
    config: LinearConfig | None = None,
    quantize_output: bool = False,
    name: str = "mlp",
) -> QuantizedMLP:
    """Calibrate a chain of linear layers and ReLUs on some batches, and quantise it.

    Args:
        model: ``Linear`` and ``ReLU`` modules; ``Dropout`` and ``Identity`` are dropped, as at inference.
        batches: Typical inputs, ``float32 [B, K]``.

    Raises:
        NumericsError: If the model holds other modules, there is no batch, or a weight or an activation is not finite.
    """
    config = config or LinearConfig()
    linears, relus = _chain(model, name)
    histograms = [RunningHistogram() for _ in range(len(linears) + 1)]
    with torch.no_grad():
        for batch in batches:
            y = batch.reshape(batch.shape[:-1].numel(), batch.shape[-1]).float()
            histograms[0].update(y, f"{name}: batch")
            for i, (linear, relu) in enumerate(zip(linears, relus, strict=True)):
                y = F.linear(y, linear.weight.float(), None if linear.bias is None else linear.bias.float())
                y = y.relu_() if relu else y
                histograms[i + 1].update(y, f"{name}: output of layer {i}")
    if not histograms[0].total and linears[0].in_features:
        raise NumericsError("there is nothing to calibrate with", where=f"{name}: batches")
    codes = INTEGERS["uint7"] if config.narrow else UINT8
    scales = [estimate(histogram, codes, config.estimator) for histogram in histograms]
    layers = [
        QuantizedLinear.from_linear(linear, scale, relu=relu, config=config, name=f"{name}: weight of layer {i}")
        for i, (linear, scale, relu) in enumerate(zip(linears, scales, relus, strict=False))
    ]
    return QuantizedMLP(layers, scales[-1] if quantize_output else None)


def _chain(model: nn.Sequential, name: str) -> tuple[list[nn.Linear], list[bool]]:
    """Return the linear layers, and whether a ReLU follows each."""
    linears: list[nn.Linear] = []
    relus: list[bool] = []
    for i, module in enumerate(model):
        if isinstance(module, nn.Linear):
            linears.append(module)
            relus.append(False)
        elif isinstance(module, nn.ReLU) and linears:
            relus[-1] = True
        elif not isinstance(module, (nn.Dropout, nn.Identity)):
            remedy = "quantise the chains of Linear and ReLU between such modules"
            raise NumericsError(f"module {i} is {type(module).__name__}", where=name, remedy=remedy)
    if not linears:
        raise NumericsError("it holds no linear layer", where=name)
    return linears, relus


def _values(codes: Tensor, scale: float, zero_point: int) -> Tensor:
    return (codes.float() - zero_point) * scale
