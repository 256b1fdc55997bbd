"""The whole pipeline of a layer in one kernel, for few rows; around torch's own there are ten microseconds."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cordillera.kernels import vnni_linear
from cordillera.numerics.integer_linear import LinearWeight

_MOST_PRODUCTS = 1 << 24  # that one thread makes sooner than torch's kernel does with one
_MANY_WEIGHTS = 1 << 20  # they come from a shared cache, which one thread alone cannot read at its full speed


class FusedLinear:
    """A layer in :mod:`cordillera.kernels.vnni_linear`.

    Args:
        weight: Of the layer; :meth:`suits` says whether it can be.
        input: Scale and zero point of the input; None lets every batch choose its own.
        relu: Whether negative results become zero.
    """

    def __init__(self, weight: LinearWeight, input: tuple[float, int] | None, *, relu: bool) -> None:
        self._relu, self._products, self._dynamic = relu, weight.codes.numel(), input is None
        scale, self._zero_point = input or (1.0, 1)
        single = torch.tensor(scale)
        self._reciprocal = float(1.0 / single)
        bias = torch.zeros_like(weight.scale) if weight.bias is None else weight.bias
        unit = weight.scale * single
        self._weights = vnni_linear.pack(weight.codes)
        self._unit, self._bias, self._shift = unit.numpy(), bias.numpy(), (bias / unit).numpy()
        self._offset = (self._zero_point * weight.column_offset).int().numpy()
        self._multipliers: dict[float, Any] = {}

    @staticmethod
    def suits(weight: LinearWeight) -> bool:
        """Whether this machine has the instructions, and the weight is symmetric and not empty.

        Args:
            weight: Of the layer.
        """
        return vnni_linear.available() and weight.zero_point is None and bool(weight.codes.numel())

    def most_rows(self) -> int:
        """Rows up to which this is the faster kernel, beside torch's with the threads that are set now."""
        threads = torch.get_num_threads()
        if threads > 1 and self._products >= _MANY_WEIGHTS:
            return 0
        # What two threads share is done in half the time, and what they start with is a larger part of it.
        return _MOST_PRODUCTS // threads**2 // self._products

    def __call__(self, x: Tensor) -> Tensor | None:
        """From values to values.

        Args:
            x: ``float32 [M, K]``, contiguous.

        Returns:
            ``float32 [M, N]``; None if ``x`` is not finite, or its own range overflows float32.
        """
        if self._dynamic:
            return vnni_linear.dynamic_linear(x, self._weights, self._offset, self._unit, self._bias, relu=self._relu)
        return vnni_linear.linear(
            x, self._reciprocal, self._zero_point, self._weights, self._offset, self._unit, self._bias, relu=self._relu
        )

    def codes(self, x: Tensor) -> Any | None:
        """The input quantised; None if it is not finite.

        Args:
            x: ``float32 [M, K]``, contiguous.
        """
        return vnni_linear.quantize(x, self._reciprocal, self._zero_point)

    def requantized(self, codes: Any, scale: float, zero_point: int) -> Any:
        """From codes to codes, an array of at least N columns.

        Args:
            codes: Of :meth:`codes`, or of this method of the layer before.
            scale: Of the output.
            zero_point: Of the output.
        """
        multiplier = self._multipliers.get(scale)
        if multiplier is None:
            multiplier = self._multipliers[scale] = (torch.from_numpy(self._unit) / torch.tensor(scale)).numpy()
        return vnni_linear.to_codes(
            codes, self._weights, self._offset, self._shift, multiplier, zero_point, relu=self._relu
        )

    def values(self, codes: Any) -> Tensor:
        """From codes to values, ``float32 [M, N]``.

        Args:
            codes: Of :meth:`codes`, or of :meth:`requantized` of the layer before.
        """
        return vnni_linear.to_values(codes, self._weights, self._offset, self._unit, self._bias, relu=self._relu)
