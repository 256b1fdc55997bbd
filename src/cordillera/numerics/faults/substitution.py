"""Substitution of a weight, or of one of its rows, while a model runs.

Python's override of torch's functions intercepts every operator that a model calls. So a weight can be replaced where
it is read, without a copy of the model; within :func:`torch.vmap`, by a batch of corrupted weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from cordillera.numerics.faults.bit_flips import Region

_CONVOLUTIONS = (F.conv1d, F.conv2d, F.conv3d)


def _is_rowwise(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensor: Tensor) -> bool:
    """Whether each row of the tensor makes separate outputs: the weight of a linear layer, a convolution or a table."""
    if len(args) < 2 or args[1] is not tensor or any(a is tensor for a in (args[0], *args[2:], *kwargs.values())):
        return False
    if function in _CONVOLUTIONS:
        groups = args[6] if len(args) > 6 else kwargs.get("groups", 1)
        return bool(groups == 1) and args[0].ndim == tensor.ndim
    if function is F.embedding:
        return not (any(args[3:]) or any(kwargs.get(key) for key in ("max_norm", "scale_grad_by_freq", "sparse")))
    return function is F.linear and tensor.ndim == 2


class Trace(TorchFunctionMode):
    """Record of the tensors that operators read, and of the number of values that they computed."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0
        self._readers: dict[int, list[bool]] = {}
        self._kept: list[Tensor] = []  # keeps tensors alive, as their ids would be reused

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        made = _tensors(result)
        for tensor in _tensors((args, kwargs)) if made else ():  # no tensors: only a shape or a device was read
            if id(tensor) not in self._readers:
                self._kept.append(tensor)
            self._readers.setdefault(id(tensor), []).append(_is_rowwise(func, args, kwargs, tensor))
        self.numbers += sum(tensor.numel() for tensor in made)
        return result

    def reads(self, region: Region) -> bool:
        """Whether an operator read the tensor of a region."""
        return id(region.owner) in self._readers

    def has_rows(self, region: Region) -> bool:
        """Whether a fault of the region corrupts one row, and every operator that reads the tensor is row-wise."""
        plain = region.is_whole and region.layout.width == 8 * region.owner.dtype.itemsize
        return plain and region.owner.ndim > 1 and all(self._readers.get(id(region.owner), [False]))


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return [tensor for entry in value.values() for tensor in _tensors(entry)]
    if isinstance(value, list | tuple):
        return [tensor for entry in value for tensor in _tensors(entry)]
    return []


class Substitute(TorchFunctionMode):
    """Replacement of a tensor by another of the same shape and dtype wherever operators read it."""

    def __init__(self, tensor: Tensor, other: Tensor) -> None:
        super().__init__()
        self.tensor, self.other = tensor, other

    def _swap(self, value: Any) -> Any:
        if value is self.tensor:
            return self.other
        if isinstance(value, dict):
            return {key: self._swap(entry) for key, entry in value.items()}
        if type(value) in (list, tuple):
            return type(value)(self._swap(entry) for entry in value)
        return value

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*self._swap(args), **self._swap(kwargs or {}))


class Rows(TorchFunctionMode):
    """Replacement of one row of a weight wherever operators for which ``Trace.has_rows`` is true read it.

    The rows of all faults of a batch are multiplied at once if the other operand does not depend on the fault.

    Args:
        row: Row that each fault hits, ``int64 [M]``.
        rows: Corrupted row of each fault, ``[M, ...]``.
        fault: Number of the fault within :func:`torch.vmap`.
    """

    def __init__(self, weight: Tensor, row: Tensor, rows: Tensor, fault: Tensor) -> None:
        super().__init__()
        self.weight, self.row, self.rows, self.fault = weight, row, rows, fault

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not _tensors(result) or not any(tensor is self.weight for tensor in _tensors((args, kwargs))):
            return result
        fault = self.fault.reshape(1)
        hit = self.row.index_select(0, fault)  # [1]
        if func is F.embedding:
            is_hit = (args[0] == hit).unsqueeze(-1)
            return torch.where(is_hit, self.rows.index_select(0, fault)[0], result)
        values = args[0]
        bias = kwargs.get("bias", args[2] if len(args) > 2 else None)
        rows, biases, chosen = self.rows, None if bias is None else bias[self.row], fault
        if torch._C._functorch.is_batchedtensor(values):  # the weight is used twice, so only rows of this fault apply
            rows = rows.index_select(0, fault)
            biases = None if biases is None else biases.index_select(0, fault)
            chosen = torch.zeros(1, dtype=torch.int64, device=values.device)
        rest = {key: value for key, value in kwargs.items() if key not in ("bias", "weight")}
        channel = -1 if func is F.linear else 1
        outputs = func(values, rows, biases, *args[3:], **rest).index_select(channel, chosen)
        is_hit = torch.arange(self.weight.shape[0], device=hit.device) == hit
        if channel == 1:
            is_hit = is_hit.reshape(-1, *[1] * (result.ndim - 2))
        return torch.where(is_hit, outputs, result)
