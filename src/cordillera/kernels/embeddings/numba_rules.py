"""The optimizers' rules for one row of an embedding table, compiled by Numba."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from cordillera.kernels.compiling import compiled
from cordillera.kernels.numba_support import narrow, sum_of_squares, widen

RULES = {"sgd": 0, "adagrad": 1, "rowwise_adagrad": 2, "adam": 3}


@compiled(forceinline=True)
def step_row(
    rule: int, row: int, target: Any, reduced: Any, first_state: Any, second_state: Any, learning_rate: float,
    eps: float, weight_decay: float, beta1: float, beta2: float, correction1: float, correction2: float,
) -> None:  # fmt: skip
    """Run one step of the optimizer, a value of ``RULES``, on one row, in float64, rounded at the end.

    Args:
        row: Number of the row, which locates its state.
        target: Weights of the row, ``[D]``.
        reduced: Gradient of the row, ``float64 [D]``; overwritten.
        first_state: First tensor of ``init_state``, flat, as ``second_state`` is the second.
    """
    dim, zero = target.size, target[0]
    if weight_decay != 0.0:
        for d in range(dim):
            reduced[d] += weight_decay * widen(target[d])
    if rule == 0:
        for d in range(dim):
            target[d] = narrow(widen(target[d]) - learning_rate * reduced[d], zero)
    elif rule == 1:
        sums = first_state[row * dim : (row + 1) * dim]
        for d in range(dim):
            square = widen(sums[d]) + reduced[d] * reduced[d]
            sums[d] = narrow(square, zero)
            change = reduced[d] / (np.sqrt(square) + eps)
            target[d] = narrow(widen(target[d]) - learning_rate * change, zero)
    elif rule == 2:
        square = widen(first_state[row]) + sum_of_squares(reduced) / dim
        first_state[row] = narrow(square, zero)
        factor = learning_rate / (np.sqrt(square) + eps)
        for d in range(dim):
            target[d] = narrow(widen(target[d]) - factor * reduced[d], zero)
    else:
        root2 = np.sqrt(correction2)
        firsts = first_state[row * dim : (row + 1) * dim]
        seconds = second_state[row * dim : (row + 1) * dim]
        for d in range(dim):
            first = beta1 * widen(firsts[d]) + (1 - beta1) * reduced[d]
            second = beta2 * widen(seconds[d]) + (1 - beta2) * reduced[d] * reduced[d]
            firsts[d] = narrow(first, zero)
            seconds[d] = narrow(second, zero)
            change = (first / correction1) / (np.sqrt(second) / root2 + eps)
            target[d] = narrow(widen(target[d]) - learning_rate * change, zero)


def state_arrays(state: dict[str, Tensor], dtype: torch.dtype) -> list[Any]:
    """Return an optimizer's state as two flat arrays, with empty ones of ``dtype`` for missing tensors."""
    stored = [tensor.view(-1).numpy() for tensor in state.values()]
    return stored + [torch.empty(0, dtype=dtype).numpy()] * (2 - len(stored))
