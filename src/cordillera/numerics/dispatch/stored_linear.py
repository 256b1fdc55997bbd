"""Linear layer for scoring, stored with as many bits as its kernel needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from cordillera.errors import NumericsError
from cordillera.numerics.dispatch.candidates import Kernel, Shape, StoredWeight, candidate
from cordillera.numerics.quantization.fixed_dtypes import FixedDtypes, refuse_double


class StoredLinear(FixedDtypes):
    """``x W^T + b`` by one kernel, without gradient; takes any floating-point dtype and returns ``float32``."""

    def __init__(self, kernel: str, stored: Mapping[str, Tensor], bias: Tensor | None, relu: bool = False) -> None:
        super().__init__()
        self.kernel, self.relu = kernel, relu
        self.bias: Tensor | None
        self._names = list(stored)
        for name, tensor in stored.items():
            self.register_buffer(f"stored_{name}", tensor)
        self.register_buffer("bias", bias)
        self._run: Kernel | None = None
        weight = stored["weight"]
        self.out_features = len(weight)
        self.in_features = weight.shape[1] * (2 if kernel == "int4 weights" else 1)

    @classmethod
    def of(cls, linear: nn.Linear, kernel: str, rows: Tensor | None = None) -> StoredLinear:
        """Store a trained layer for a kernel, with calibration rows ``[R, K]`` if the kernel needs them.

        Raises:
            NumericsError: If the weight is not finite, is float64 or does not fit the format, rows are missing, or the
                kernel does not support layers of this size.
        """
        one = candidate(kernel)
        refuse_double(linear.weight, "StoredLinear")
        outputs, inputs = linear.weight.shape
        reason = one.supports(Shape(1, outputs, inputs), linear.weight.device)
        if reason is not None:
            raise NumericsError(f"{kernel}: {reason}", where="StoredLinear", remedy="keep this layer in fp32")
        if one.calibrated and rows is None:
            raise NumericsError(f"{kernel} needs rows to calibrate on", where="StoredLinear")
        bias = None if linear.bias is None else linear.bias.detach().float().clone()
        return cls(kernel, one.store(linear.weight, rows if one.calibrated else None), bias)

    @property
    def nbytes(self) -> int:
        """Number of bytes of the stored weight and the bias."""
        return sum(buffer.nbytes for buffer in self.buffers())

    def prepare(self) -> Kernel:
        """Return the kernel, which is created from the stored weight at the first call."""
        if self._run is None:
            stored: StoredWeight = {name: getattr(self, f"stored_{name}") for name in self._names}
            try:
                self._run = candidate(self.kernel).load(stored, self.bias, self.relu)
            except (KeyError, RuntimeError, ValueError, TypeError) as error:
                raise NumericsError(
                    f"{self.kernel} does not take {sorted(stored)}: {error!r}", where="StoredLinear"
                ) from error
        return self._run

    def forward(self, x: Tensor) -> Tensor:
        run = self.prepare()
        if x.shape[-1] != self.in_features:
            raise NumericsError(f"{list(x.shape)} inputs for {self.in_features}", where="x")
        rows = x.reshape(x.shape[:-1].numel(), self.in_features).float()
        with torch.autocast(x.device.type, enabled=False):
            return run(rows).reshape(*x.shape[:-1], self.out_features)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> StoredLinear:
        self._run = None  # the kernel may hold tensors that move
        return super()._apply(fn, recurse)

    def _load_from_state_dict(self, *arguments: Any) -> None:
        super()._load_from_state_dict(*arguments)
        self._run = None  # the kernel was created from the previous weight

    def extra_repr(self) -> str:
        """Return the settings that ``repr`` shows."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, kernel={self.kernel}, relu={self.relu}"
        )
