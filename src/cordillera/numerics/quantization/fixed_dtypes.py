"""Base of modules that store codes and scales, which must not be rounded when the model is cast."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

from cordillera.errors import NumericsError

Module = TypeVar("Module", bound="FixedDtypes")


class FixedDtypes(nn.Module):
    """Module whose buffers move to other devices but keep their dtypes, as ``model.half()`` would round its scales."""

    def _apply(self: Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Module:
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, buffer in before.items():
            now = self._buffers[name]
            if buffer is not None and now is not None and now.dtype != buffer.dtype:
                self._buffers[name] = buffer.to(now.device)
        return self


def refuse_double(weight: Tensor, where: str) -> None:
    """Raise an error for a float64 weight, as reducing its precision must be requested explicitly."""
    if weight.dtype == torch.float64:
        raise NumericsError(
            "is float64, which no kernel here computes in", where=where,
            remedy="cast it with .float() if its precision is not needed",
        )  # fmt: skip
