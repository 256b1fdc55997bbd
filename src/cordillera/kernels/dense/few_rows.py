"""Linear layers of a few rows, as in text generation: bfloat16 weights are read once, at the speed of memory.

Torch's product of one row with a bfloat16 matrix on CPUs reads the matrix at a third of that speed. Here products are
summed in float32 and rounded once. One thread makes each sum, in an order that depends on its length alone, so results
are the same, bit for bit, for any number of threads and of rows: a token has the same logits whether it is computed
alone or beside drafted ones. Where the processor has AMX, a pass over 32 rows reads each weight once and computes with
it once; elsewhere rows are computed four at a time.

In float32, MKL computes one to three rows by other code than more, in another order. Rows of zeros make them four, so
that their bits are those of the same rows among many; see :mod:`~cordillera.kernels.repeatable`.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cordillera.kernels.compiling import compiled
from cordillera.kernels.dense.bf16_amx import available as amx_available
from cordillera.kernels.dense.bf16_tiles import (
    SIDE,
    STEP,
    available,
    fetched,
    lay_out,
    multiplies_pairs,
    tile_of_four,
    tile_of_one,
)
from cordillera.kernels.dense.tiled_products import WHOLE, multiply, takes
from cordillera.kernels.numba_support import array, narrow, pool, threads_for, widen_to_single
from cordillera.kernels.repeatable import LEAST_ROWS

MOST_ROWS = 32
"""Largest number of rows that are computed here."""


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
    """The same by :mod:`~cordillera.kernels.dense.bf16_tiles`, of rows as its tiles take them."""
    rows, inner = x.shape
    outputs, x_row, of_row, steps = weight.shape[0], x.itemsize * inner, 2 * inner, inner // STEP
    of_x, of_weight, of_out = np.int64(x.ctypes.data), np.int64(weight.ctypes.data), np.int64(out.ctypes.data)
    blocks = (outputs + SIDE - 1) // SIDE
    for chunk in numba.prange(threads):
        for block in range(blocks * chunk // threads, blocks * (chunk + 1) // threads):
            first = SIDE * block
            for row in range(0, rows, SIDE):
                some, own = min(SIDE, rows - row), of_x + row * x_row
                place, weights = of_out + 2 * (row * outputs + first), of_weight + first * of_row
                if first + SIDE <= outputs:
                    ahead, step = fetched(weights, of_row, SIDE, row, rows)
                    tile_of_four(some, own, x_row, weights, of_row, steps, place, 2 * outputs, ahead, step)
                else:
                    for i in range(outputs - first):
                        of_one = of_weight + (first + i) * of_row
                        tile_of_one(some, own, x_row, of_one, of_row, steps, place + 2 * i, 2 * outputs)


def few_rows_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Compute ``x weight^T`` for few rows on a CPU, without gradients.

    Args:
        x: Input, ``bfloat16 [n, inner]``.
        weight: Weight, ``bfloat16 [outputs, inner]``, contiguous.

    Returns:
        ``bfloat16 [n, outputs]``.
    """
    return _multiply(x, array(weight.detach()))


def _multiply(x: Tensor, weight: Any) -> Tensor:
    """The same with the array of a weight."""
    out = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype)
    if out.numel():
        threads, x = threads_for(weight.size), x.detach().contiguous()
        is_even = x.shape[1] % STEP == 0
        if takes(*weight.shape) and len(x) <= MOST_ROWS and amx_available():
            multiply(x, np.array([(weight.ctypes.data, 0, WHOLE, len(weight))], np.int64), out, by_amx=True)
            return out
        by_tiles = is_even and available()
        rows, found = array(x) if by_tiles and multiplies_pairs() else x.float().numpy(), array(out)
        if by_tiles and not multiplies_pairs():
            lay_out(array(x), rows)
        with pool(threads):
            (_products_by_tiles if by_tiles else _products)(rows, weight, found, threads)
    return out


_MULTIPLE = 32  # rows are padded to a multiple: torch compiles and caches code for each number of rows


def many_rows_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Compute ``x weight^T`` for ``bfloat16`` on a CPU, for any number of rows, in torch."""
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        more = -len(x) % _MULTIPLE
        if x.dim() != 2 or not more:
            return F.linear(x, weight)
        return F.linear(F.pad(x, (0, 0, 0, more)), weight)[: len(x)]
    # Without AVX-512, torch multiplies bfloat16 without vectors, at a seventh of the speed of float32.
    return F.linear(x.float(), weight.float()).to(x.dtype)


class FewRowsLinear(nn.Linear):
    """Linear layer without bias over an existing weight; a row's result does not depend on how few rows there are.

    In bfloat16, few rows are computed by :func:`few_rows_linear`.

    Args:
        weight: Parameter ``[outputs, inner]`` that the layer shares.
    """

    def __init__(self, weight: Tensor) -> None:
        super().__init__(weight.shape[1], weight.shape[0], bias=False, device="meta")
        self.weight = weight
        self._array: tuple[int, Any] = (0, None)  # address and array of the weight, cached as costly to make

    def forward(self, x: Tensor) -> Tensor:
        is_single = x.dtype == torch.float32 == self.weight.dtype and x.device.type == "cpu"
        if is_single and x.dim() == 2 and 0 < len(x) < LEAST_ROWS:
            return F.linear(F.pad(x, (0, 0, 0, LEAST_ROWS - len(x))), self.weight)[: len(x)]
        is_half = x.dtype == torch.bfloat16 == self.weight.dtype and x.device.type == "cpu"
        if not is_half or torch.is_grad_enabled():
            return F.linear(x, self.weight)
        if x.dim() == 2 and len(x) <= MOST_ROWS:
            address = self.weight.data_ptr()
            if self._array[0] != address:
                self._array = (address, array(self.weight.detach()))
            return _multiply(x, self._array[1])
        return many_rows_linear(x, self.weight)


def use_few_rows(module: nn.Module) -> None:
    """Replace the linear layers without bias inside a module by :class:`FewRowsLinear`, in place."""
    for inner in list(module.modules()):
        for name, child in inner.named_children():
            if type(child) is nn.Linear and child.bias is None:
                setattr(inner, name, FewRowsLinear(child.weight))
