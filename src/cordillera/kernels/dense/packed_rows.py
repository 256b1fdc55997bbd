"""Linear layers whose weights are codes of four or eight bits in groups of 32 inputs, with a scale each.

A weight is ``code * scale``, of four bits ``code * scale + least``, rounded to bfloat16 as it is read; products are
those of :mod:`~cordillera.kernels.dense.few_rows` with these weights, to the bit, on x86 processors with AVX2. Codes
are those of GGUF's formats Q4_0, Q4_1 and Q8_0, so that such a file's weights are neither rounded again nor unpacked in
memory. A pass over few rows then reads a third or a half of the bytes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np
import torch
from torch import Tensor

from cordillera.kernels.compiling import compiled
from cordillera.kernels.dense.bf16_amx import OUTPUTS
from cordillera.kernels.dense.bf16_amx import available as amx_available
from cordillera.kernels.dense.bf16_tiles import available
from cordillera.kernels.dense.few_rows import MOST_ROWS, few_rows_linear, many_rows_linear
from cordillera.kernels.dense.tiled_products import GROUP, multiply, scale_bytes, unpack_groups
from cordillera.kernels.numba_support import array, pool, threads_for


class PackedRows(NamedTuple):
    """Codes of a weight ``[outputs, inner]``.

    Attributes:
        codes: Codes, ``uint8 [outputs, inner / 32, 16]`` of four bits from 0 to 15, the first 16 inputs of a group in
            the lower halves of the bytes; or ``int8 [outputs, inner / 32, 32]``.
        scales: Scale of each group, and for codes of four bits what is added to its weights, ``float16 [outputs, inner
            / 32, 2]``, or ``[outputs, inner / 32, 1]``.
    """

    codes: Tensor
    scales: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of outputs and inputs."""
        return self.codes.shape[0], GROUP * self.codes.shape[1]

    @property
    def description(self) -> list[int]:
        """What :func:`~cordillera.kernels.dense.tiled_products.products` takes."""
        return [self.codes.data_ptr(), self.scales.data_ptr(), _bits(self.codes), len(self.codes)]


def is_fast() -> bool:
    """Return whether products are as fast as with bfloat16 weights on this machine."""
    return available()


@compiled(parallel=True)
def _unpack_all(codes: Any, scales: Any, bits: Any, out: Any, threads: int) -> None:
    outputs, groups = scales.shape[0], scales.shape[1]
    of_out, of_codes, of_scales = np.int64(out.ctypes.data), np.int64(codes.ctypes.data), np.int64(scales.ctypes.data)
    blocks = outputs // OUTPUTS
    for chunk in numba.prange(threads):
        wide = np.empty((OUTPUTS, groups, 2), np.float32)
        for block in range(blocks * chunk // threads, blocks * (chunk + 1) // threads):
            place, of_wide = OUTPUTS * block * groups, np.int64(wide.ctypes.data)
            own, to = of_codes + 4 * bits * place, of_out + 2 * GROUP * place
            unpack_groups(bits, own, of_scales + scale_bytes(bits) * place, OUTPUTS * groups, of_wide, to)


def unpacked(packed: PackedRows) -> Tensor:
    """Return the weights, ``bfloat16 [outputs, inner]``."""
    codes, scales = packed
    if available():
        out = torch.empty(packed.shape, dtype=torch.bfloat16)
        threads = threads_for(out.numel())
        with pool(threads):
            _unpack_all(array(codes), array(scales.view(torch.uint16)), _bits(codes), array(out), threads)
        return out
    if _bits(codes) == 4:
        codes = torch.cat([codes & 15, codes >> 4], -1)
    scale, *least = scales.float()[..., None].unbind(2)
    weights = codes.float() * scale
    return (weights + least[0] if least else weights).view(packed.shape).bfloat16()


def packed_linear(x: Tensor, packed: PackedRows) -> Tensor:
    """Compute ``x weight^T`` on a CPU, without gradients.

    Args:
        x: Input, ``bfloat16 [n, inner]``.
        packed: Weight.

    Returns:
        ``bfloat16 [n, outputs]``.
    """
    if len(x) > MOST_ROWS or not available():
        weight = unpacked(packed)
        return few_rows_linear(x, weight) if len(x) <= MOST_ROWS else many_rows_linear(x, weight)
    out = torch.empty(len(x), packed.shape[0], dtype=x.dtype)
    if out.numel():
        multiply(x.contiguous(), np.array([packed.description], np.int64), out, by_amx=amx_available())
    return out


def _bits(codes: Tensor) -> int:
    return 4 if codes.dtype == torch.uint8 else 8
