"""Floating-point operations of a module."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode


@runtime_checkable
class CountsFlops(Protocol):
    """Module whose work is no matrix product and that counts it itself."""

    def flops(self, *inputs: Tensor) -> int:
        """Return the operations of a forward pass on these inputs."""
        ...


def forward_flops(module: nn.Module, *inputs: Any) -> int:
    """Count the floating-point operations of one forward pass, without gradients.

    Matrix products and convolutions are counted (``torch.utils.flop_counter``), and what modules with a method
    ``flops`` say of themselves, such as the sums and squares of factorisation machines; lookups, norms and activations
    are not.

    Args:
        module: Module, in the mode in which it is to be counted.
        inputs: Arguments of the call.
    """
    told: list[int] = []

    def add(counting: nn.Module, given: tuple[Tensor, ...], result: Tensor) -> None:
        assert isinstance(counting, CountsFlops)
        told.append(counting.flops(*given))

    hooks = [one.register_forward_hook(add) for one in module.modules() if isinstance(one, CountsFlops)]
    try:
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            module(*inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return counter.get_total_flops() + sum(told)
