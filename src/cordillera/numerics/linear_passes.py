"""The pipeline for few rows: a pass that quantises, torch's integer product, a pass that requantises."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from cordillera.kernels.numba_requantize import dequantize_pass, quantize_pass, requantize_pass
from cordillera.numerics.integer_linear import LinearWeight
from cordillera.numerics.linear_engines import saturates

_MOST_VALUES = 1 << 16  # of an input and an output: one thread passes over them
_MOST_WEIGHTS = 1 << 19  # with more of them, and more rows than one, torch's fused layer has the better product


class LinearPasses:
    """A layer with a fixed input scale, for batches of which :meth:`takes` says so.

    Args:
        weight: Of the layer, symmetric.
        scale: Of the input.
        zero_point: Of the input.
        relu: Whether negative results become zero.
    """

    def __init__(self, weight: LinearWeight, scale: float, zero_point: int, *, relu: bool) -> None:
        self.relu = relu
        self._transposed = weight.codes.t()
        self._zero_point = zero_point
        single = torch.tensor(scale)
        self._reciprocal = float(1.0 / single)
        bias = torch.zeros_like(weight.scale) if weight.bias is None else weight.bias
        unit = weight.scale * single
        self._unit, self._bias, self._shift = unit.numpy(), bias.numpy(), (bias / unit).numpy()
        self._offset = (zero_point * weight.column_offset).int().numpy()
        self._multipliers: dict[float, object] = {}

    @staticmethod
    def suit(weight: LinearWeight) -> bool:
        """Whether a weight can be multiplied so, on this machine.

        Args:
            weight: Of the layer.
        """
        return weight.zero_point is None and bool(weight.codes.numel()) and _product_is_exact()

    def most_rows(self) -> int:
        """Rows up to which this is the faster pipeline."""
        inner, outputs = self._transposed.shape
        return min(_MOST_VALUES // max(inner, outputs), _MOST_VALUES) if inner * outputs <= _MOST_WEIGHTS else 1

    def codes(self, x: Tensor) -> Tensor | None:
        """The input quantised, ``uint8 [M, K]``; None if it is not finite.

        Args:
            x: ``float32 [M, K]``, contiguous.
        """
        codes, finite = quantize_pass(x, self._reciprocal, self._zero_point)
        return codes if finite else None

    def values(self, codes: Tensor) -> Tensor:
        """The output in ``float32 [M, N]``.

        Args:
            codes: Of the input.
        """
        sums = torch._int_mm(codes, self._transposed)
        return dequantize_pass(sums, self._offset, self._unit, self._bias, relu=self.relu)

    def requantized(self, codes: Tensor, scale: float, zero_point: int) -> Tensor:
        """The output in ``uint8 [M, N]``.

        Args:
            codes: Of the input.
            scale: Of the output.
            zero_point: Of the output.
        """
        multiplier = self._multipliers.get(scale)
        if multiplier is None:
            multiplier = self._multipliers[scale] = (torch.from_numpy(self._unit) / torch.tensor(scale)).numpy()
        sums = torch._int_mm(codes, self._transposed)
        return requantize_pass(sums, self._offset, self._shift, multiplier, zero_point, relu=self.relu)


@lru_cache(maxsize=1)
def _product_is_exact() -> bool:
    """Whether this torch multiplies uint8 by int8 at all, and does not saturate where sums of pairs are large."""
    if saturates():
        return False
    codes, weight = torch.full((1, 64), 255, dtype=torch.uint8), torch.full((16, 64), 127, dtype=torch.int8)
    try:
        return bool((torch._int_mm(codes, weight.t()) == 255 * 127 * 64).all())
    except RuntimeError:
        return False
