"""Linear layers of a few rows, as in text generation: bfloat16 weights are read once, at the speed of memory.

Torch's product of one row with a bfloat16 matrix on CPUs reads the matrix at a third of that speed. Here products are
summed in float32 and rounded once. One thread makes each sum, in an order that depends on its length alone, so results
are the same, bit for bit, for any number of threads and of rows: a token has the same logits whether it is computed
alone or beside drafted ones.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cordillera.kernels.compiling import compiled
from cordillera.kernels.dense.bf16_tiles import SIDE, STEP, available, tile_of_four, tile_of_one
from cordillera.kernels.numba_support import array, narrow, pool, threads_for, widen_to_single

MOST_ROWS = 16
"""Largest number of rows that are computed here; torch's product is faster for more."""


# Sums in several lanes need permission to reorder. The loop stores nothing, so the code does not depend on addresses.
@compiled(parallel=True, fastmath={"reassoc", "contract"})
def _products(x: Any, weight: Any, out: Any, threads: int) -> None:
    rows, inner = x.shape
    outputs = weight.shape[0]
    zero = np.uint16(0)  # has the type of the results
    for chunk in numba.prange(threads):
        for i in range(outputs * chunk // threads, outputs * (chunk + 1) // threads):
            for row in range(rows):
                total = np.float32(0.0)
                for j in range(inner):
                    total += widen_to_single(weight[i, j]) * x[row, j]
                out[row, i] = narrow(total, zero)


@compiled(parallel=True)
def _products_by_tiles(x: Any, weight: Any, out: Any, threads: int) -> None:
    """The same by :mod:`~cordillera.kernels.dense.bf16_tiles`."""
    rows, inner = x.shape
    outputs, bytes_of_row, steps = weight.shape[0], 2 * inner, inner // STEP
    of_x, of_weight = np.int64(x.ctypes.data), np.int64(weight.ctypes.data)
    blocks = -(-outputs // SIDE)
    zero = np.uint16(0)
    for chunk in numba.prange(threads):
        sums = np.empty((SIDE, SIDE), np.float32)
        of_sums = np.int64(sums.ctypes.data)
        for block in range(blocks * chunk // threads, blocks * (chunk + 1) // threads):
            first = SIDE * block
            count = min(SIDE, outputs - first)
            for row in range(0, rows, SIDE):
                some = min(SIDE, rows - row)
                start = of_x + row * bytes_of_row
                if count == SIDE:
                    tile_of_four(
                        some,
                        start,
                        bytes_of_row,
                        of_weight + first * bytes_of_row,
                        bytes_of_row,
                        steps,
                        of_sums,
                        4 * SIDE,
                    )
                else:
                    for i in range(count):
                        own = of_weight + (first + i) * bytes_of_row
                        tile_of_one(some, start, bytes_of_row, own, bytes_of_row, steps, of_sums + 4 * i, 4 * SIDE)
                for r in range(some):
                    for i in range(count):
                        out[row + r, first + i] = narrow(sums[r, i], zero)


def few_rows_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Compute ``x weight^T`` for few rows on a CPU, without gradients.

    Args:
        x: Input, ``bfloat16 [n, inner]``.
        weight: Weight, ``bfloat16 [outputs, inner]``, contiguous.

    Returns:
        ``bfloat16 [n, outputs]``.
    """
    out = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype)
    if out.numel():
        threads = threads_for(weight.numel())
        x, weight = x.detach().contiguous(), weight.detach()
        with pool(threads):
            if x.shape[1] % STEP == 0 and available():
                _products_by_tiles(array(x), array(weight), array(out), threads)
            else:
                _products(x.float().numpy(), array(weight), array(out), threads)
    return out


class FewRowsLinear(nn.Linear):
    """Linear layer without bias over an existing weight; few rows are computed by :func:`few_rows_linear`.

    Args:
        weight: Parameter ``[outputs, inner]`` that the layer shares.
    """

    def __init__(self, weight: Tensor) -> None:
        super().__init__(weight.shape[1], weight.shape[0], bias=False, device="meta")
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        # torch computes gradients, other dtypes and devices, and matrices of many rows.
        few = x.dtype == torch.bfloat16 == self.weight.dtype and x.dim() == 2 and len(x) <= MOST_ROWS
        if few and x.device.type == "cpu" and not torch.is_grad_enabled():
            return few_rows_linear(x, self.weight)
        return F.linear(x, self.weight)
