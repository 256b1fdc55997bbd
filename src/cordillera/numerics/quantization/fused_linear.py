"""Quantised layer in one kernel, which saves the ten microseconds of torch's calls."""

from __future__ import annotations

import torch
from torch import Tensor

from cordillera.kernels.dense import vnni_linear, vnni_tiles
from cordillera.numerics.quantization.integer_linear import LinearWeight


class FusedLinear:
    """Layer computed by :mod:`cordillera.kernels.dense.vnni_linear`, for a weight that :meth:`suits`.

    Without ``input``, a scale and a zero point, these are chosen for every batch.
    """

    def __init__(self, weight: LinearWeight, input: tuple[float, int] | None, *, relu: bool) -> None:
        self._relu, self._weight, self._dynamic = relu, weight, input is None
        self._scale, self._zero_point = input or (1.0, 1)
        single = torch.tensor(self._scale)
        self._reciprocal = float(1.0 / single)
        self._unit = weight.scale * single
        self._bias = torch.zeros_like(weight.scale) if weight.bias is None else weight.bias
        self._layer = vnni_linear.Layer(weight.codes, weight.scale, self._bias)
        self._to_codes: dict[float, vnni_linear.Layer] = {}

    @staticmethod
    def suits(weight: LinearWeight) -> bool:
        """Whether this machine has the instructions, and the weight is symmetric and not empty."""
        return vnni_tiles.available() and weight.zero_point is None and bool(weight.codes.numel())

    def __call__(self, x: Tensor) -> Tensor | None:
        """Compute ``float32 [M, N]`` from a contiguous ``x``, ``float32 [M, K]``.

        Returns None if ``x`` is not finite, or a range chosen for the batch overflows float32.
        """
        if self._dynamic:
            return self._layer.dynamic(x, relu=self._relu)
        return self._layer.values(x, self._scale, self._reciprocal, self._zero_point, relu=self._relu)

    def codes(self, x: Tensor) -> Tensor | None:
        """Quantise a contiguous ``x``, ``float32 [M, K]``, to ``uint8`` of at least K columns; None if not finite."""
        return vnni_linear.quantize(x, self._reciprocal, self._zero_point)

    def requantized(self, x: Tensor, scale: float, zero_point: int) -> Tensor | None:
        """Compute codes of the output, ``uint8`` of at least N columns; None if values are not finite.

        ``x`` is contiguous ``float32 [M, K]``, or codes of :meth:`codes` or of this method of the previous layer.
        """
        layer = self._to_codes.get(scale)
        if layer is None:
            factor, term = self._unit / torch.tensor(scale), self._bias / self._unit
            layer = vnni_linear.Layer(self._weight.codes, factor, term, self._layer.weights)
            self._to_codes[scale] = layer
        return layer.codes(x, self._reciprocal, self._zero_point, zero_point, relu=self._relu)

    def values(self, codes: Tensor) -> Tensor:
        """Compute values, ``float32 [M, N]``, from codes of :meth:`codes` or of :meth:`requantized` before."""
        return self._layer.values_of_codes(codes, self._scale, self._zero_point, relu=self._relu)
