"""Recognise tensors and modules that are sharded over ranks, without importing the libraries that make them.

Importing ``torch.distributed.tensor`` and ``torch.distributed.fsdp`` takes a second of processor time. Where nothing
has imported them, nothing is cut; so the other modules import them only inside of functions that cut something.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs


def is_dtensor(value: object) -> TypeIs[DTensor]:
    """Return whether a value is a tensor that is cut over ranks."""
    return _is_a(value, "torch.distributed.tensor", "DTensor")


def is_sharded(module: object) -> TypeIs[FSDPModule]:
    """Return whether the weights of a module were sharded by ``fully_shard``."""
    return _is_a(module, "torch.distributed.fsdp", "FSDPModule")


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, with its gradient; a plain tensor is returned whole."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def _is_a(value: object, module: str, name: str) -> bool:
    kind: Any = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(value, kind)
