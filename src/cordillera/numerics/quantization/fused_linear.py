"""The whole pipeline of a layer in one kernel; around torch's own there are ten microseconds."""

from __future__ import annotations

import torch
from torch import Tensor

from cordillera.kernels.dense import vnni_linear, vnni_tiles
from cordillera.numerics.quantization.integer_linear import LinearWeight


class FusedLinear:
    """A layer in :mod:`cordillera.kernels.dense.vnni_linear`.

    Args:
        weight: Of the layer; :meth:`suits` says whether it can be.
        input: Scale and zero point of the input; None lets every batch choose its own.
        relu: Whether negative results become zero.
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
        """Whether this machine has the instructions, and the weight is symmetric and not empty.

        Args:
            weight: Of the layer.
        """
        return vnni_tiles.available() and weight.zero_point is None and bool(weight.codes.numel())

    def __call__(self, x: Tensor) -> Tensor | None:
        """From values to values.

        Args:
            x: ``float32 [M, K]``, contiguous.

        Returns:
            ``float32 [M, N]``; None if ``x`` is not finite, or its own range overflows float32.
        """
        if self._dynamic:
            return self._layer.dynamic(x, relu=self._relu)
        return self._layer.values(x, self._scale, self._reciprocal, self._zero_point, relu=self._relu)

    def codes(self, x: Tensor) -> Tensor | None:
        """The input quantised, ``uint8`` of at least K columns; None if it is not finite.

        Args:
            x: ``float32 [M, K]``, contiguous.
        """
        return vnni_linear.quantize(x, self._reciprocal, self._zero_point)

    def requantized(self, x: Tensor, scale: float, zero_point: int) -> Tensor | None:
        """From values or codes to codes, ``uint8`` of at least N columns; None if values are not finite.

        Args:
            x: ``float32 [M, K]``, contiguous, or of :meth:`codes`, or of this method of the layer before.
            scale: Of the output.
            zero_point: Of the output.
        """
        layer = self._to_codes.get(scale)
        if layer is None:
            factor, term = self._unit / torch.tensor(scale), self._bias / self._unit
            layer = vnni_linear.Layer(self._weight.codes, factor, term, self._layer.weights)
            self._to_codes[scale] = layer
        return layer.codes(x, self._reciprocal, self._zero_point, zero_point, relu=self._relu)

    def values(self, codes: Tensor) -> Tensor:
        """From codes to values, ``float32 [M, N]``.

        Args:
            codes: Of :meth:`codes`, or of :meth:`requantized` of the layer before.
        """
        return self._layer.values_of_codes(codes, self._scale, self._zero_point, relu=self._relu)
