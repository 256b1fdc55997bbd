"""Bytes that autograd keeps for the backward pass, and the largest number of bytes alive at once, on any device.

Both count storages, each once, however many tensors share it, and leave out those that were there before: weights and
inputs.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class SavedBytes:
    """Context that counts the bytes of the tensors that autograd saves within it.

    Args:
        without: Tensors that are not counted: weights, and whatever the caller keeps anyway.

    Example:
        >>> with SavedBytes(without=layer.parameters()) as saved:
        ...     loss = layer(x).sum()
        >>> saved.total
    """

    def __init__(self, without: Iterable[Tensor] = ()) -> None:
        self._without = {_place(tensor) for tensor in without}
        self._found: dict[int, int] = {}
        self._kept: list[Tensor] = []  # keeps storages alive, so that no address is reused
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._keep, lambda tensor: tensor)

    @property
    def total(self) -> int:
        """Bytes of all storages saved so far."""
        return sum(self._found.values())

    def _keep(self, tensor: Tensor) -> Tensor:
        if _place(tensor) not in self._without:
            self._found[_place(tensor)] = tensor.untyped_storage().nbytes()
            self._kept.append(tensor.detach())
        return tensor

    def __enter__(self) -> SavedBytes:
        self._hooks.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hooks.__exit__(kind, error, trace)
        self._kept.clear()


class PeakBytes(TorchDispatchMode):
    """Context that follows the storages that operators of torch allocate within it.

    Memory that kernels allocate by other means is not seen; those of Cordillera take theirs from torch.

    Attributes:
        now: Bytes alive.
        peak: The most so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._alive: dict[int, weakref.ref[Any]] = {}
        self._before: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, Tensor) and _place(tensor) not in self._alive:
                self._leave_out(tensor)
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._follow(tensor)
        return out

    def _leave_out(self, tensor: Tensor) -> None:
        place = _place(tensor)

        def gone(_: Any) -> None:  # another storage may take its place
            self._before.pop(place, None)

        self._before[place] = weakref.ref(tensor.untyped_storage(), gone)

    def _follow(self, tensor: Tensor) -> None:
        storage, place = tensor.untyped_storage(), _place(tensor)
        if place in self._alive or place in self._before or not storage.nbytes():
            return
        size = storage.nbytes()

        def gone(_: Any) -> None:
            self._alive.pop(place, None)
            self.now -= size

        self._alive[place] = weakref.ref(storage, gone)
        self.now += size
        self.peak = max(self.peak, self.now)


def _place(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
