"""Linear layers of a few rows, as in text generation: bfloat16 weights are read once, at the speed of memory.

Torch's product of one row with a bfloat16 matrix on CPUs reads the matrix at a third of that speed. Here products are
summed in float32 and rounded once. One thread makes each sum, in an order that depends on its length alone, so results
are the same, bit for bit, for any number of threads and of rows.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cordillera.kernels.compiling import compiled
from cordillera.kernels.numba_support import array, narrow, pool, threads_for, widen_to_single

MOST_ROWS = 4
"""Largest number of rows for which this product is faster than torch's."""


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
        with pool(threads):
            _products(x.detach().float().contiguous().numpy(), array(weight.detach()), array(out), threads)
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
