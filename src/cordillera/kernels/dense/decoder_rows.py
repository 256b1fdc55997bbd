"""The parts of a transformer's block around its attention, for a few bfloat16 rows on a CPU: one call each.

A small model's block has some thirty operations, each of which takes longer to call than to compute. Here norm,
products, rotation and residual sums of a block are two calls. Numbers are rounded to bfloat16 where the modules round
them; sums have an order that depends on their length alone, so that a row's result does not depend on those beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from cordillera.kernels.attention.numba_tiles import FAST, ONE, exp2
from cordillera.kernels.compiling import compiled
from cordillera.kernels.dense.bf16_amx import available as amx_available
from cordillera.kernels.dense.bf16_amx import tile_shapes
from cordillera.kernels.dense.bf16_tiles import available
from cordillera.kernels.dense.few_rows import MOST_ROWS
from cordillera.kernels.dense.tiled_products import GROUP, WHOLE, products, takes
from cordillera.kernels.numba_support import array, narrow, pool, threads_for, widen_to_single

_HIGHEST, _TO_TWO = np.float32(127.0), np.float32(-1.4426950408889634)
_BITS = np.uint16(0)  # has the type of bfloat16's bits


@compiled(fastmath={"reassoc", "contract"})
def _square_sum(row: Any) -> Any:
    total = np.float32(0.0)
    for j in range(len(row)):
        value = widen_to_single(row[j])
        total += value * value
    return total


@compiled()
def _normalize(x: Any, weight: Any, eps: Any, out: Any) -> None:
    rows, inner = x.shape
    for row in range(rows):
        scale = ONE / np.sqrt(_square_sum(x[row]) / np.float32(inner) + eps)
        for j in range(inner):
            value = narrow(widen_to_single(x[row, j]) * scale, _BITS)
            out[row, j] = narrow(widen_to_single(value) * widen_to_single(weight[j]), _BITS)


@compiled()
def _add(x: Any, more: Any, out: Any) -> None:
    rows, inner = x.shape
    for row in range(rows):
        for j in range(inner):
            out[row, j] = narrow(widen_to_single(x[row, j]) + widen_to_single(more[row * inner + j]), _BITS)


@compiled(fastmath=FAST)
def _gate(both: Any, out: Any) -> None:
    """``silu(gate) * up`` of ``both [2 x rows x inner]``; below -88, a gate becomes 1e-38 of its size in place of 0."""
    rows, inner = out.shape
    for row in range(rows):
        for j in range(inner):
            gate, up = widen_to_single(both[row * inner + j]), widen_to_single(both[(rows + row) * inner + j])
            power = gate * _TO_TWO
            power = _HIGHEST if power > _HIGHEST else power  # NaN stays
            gated = narrow(gate / (ONE + exp2(power)), _BITS)
            out[row, j] = narrow(widen_to_single(gated) * up, _BITS)


@compiled()
def _before_attention(
    x: Any, norm: Any, eps: Any, layers: Any, cos: Any, sin: Any, out: Any, shapes: Any, threads: int
) -> None:
    """Queries, keys and values of rows, one after the other; queries and keys are rotated."""
    rows, half = len(x), cos.shape[1]
    normed = np.empty_like(x)
    _normalize(x, norm, eps, normed)
    products(normed, layers, out, shapes, threads)
    start = 0
    for n in range(2):
        heads = layers[n, 3] // (2 * half)
        for row in range(rows):
            for _ in range(heads):
                for j in range(half):
                    a, b = widen_to_single(out[start + j]), widen_to_single(out[start + half + j])
                    out[start + j] = narrow(a * cos[row, j] - b * sin[row, j], _BITS)
                    out[start + half + j] = narrow(b * cos[row, j] + a * sin[row, j], _BITS)
                start += 2 * half


@compiled()
def _after_attention(
    x: Any, attended: Any, norm: Any, eps: Any, output: Any, wide: Any, down: Any, out: Any, shapes: Any, threads: int
) -> None:
    """Output projection, feed-forward net and both residual sums."""
    rows = len(x)
    found, normed = np.empty(x.size, np.uint16), np.empty_like(x)
    products(attended, output, found, shapes, threads)
    _add(x, found, out)
    _normalize(out, norm, eps, normed)
    both = np.empty(2 * rows * wide[0, 3], np.uint16)
    products(normed, wide, both, shapes, threads)
    inner = np.empty((rows, wide[0, 3]), np.uint16)
    _gate(both, inner)
    products(inner, down, found, shapes, threads)
    _add(out, found, out)


def _described(layers: Sequence[nn.Module]) -> tuple[Any, list[Tensor]] | None:
    """Return the descriptions of layers as kernels take them, and their weights; None if there is none."""
    rows, tensors = [], list[Tensor]()
    for layer in layers:
        buffers = dict(layer.named_buffers(recurse=False))
        if buffers.keys() == {"codes", "scales"}:
            codes, scales = buffers["codes"], buffers["scales"]
            bits, shape = 4 if codes.dtype == torch.uint8 else 8, (codes.shape[0], GROUP * codes.shape[1])
            tensors += [codes, scales]
            rows.append((codes.data_ptr(), scales.data_ptr(), bits, shape[0]))
        elif isinstance(layer, nn.Linear) and layer.bias is None and layer.weight.dtype == torch.bfloat16:
            shape = (layer.weight.shape[0], layer.weight.shape[1])
            tensors.append(layer.weight)
            rows.append((layer.weight.data_ptr(), 0, WHOLE, shape[0]))
        else:
            return None
        if not takes(*shape) or not all(tensor.is_contiguous() for tensor in tensors):
            return None
    return np.array(rows, np.int64), tensors


def _addresses(norms: Sequence[Tensor], layers: Sequence[nn.Module]) -> list[int]:
    """Return the addresses of weights or codes; 0 where there is neither."""
    found = [norm.data_ptr() for norm in norms]
    for layer in layers:
        weight, codes = layer._parameters.get("weight"), layer._buffers.get("codes")
        stored = codes if weight is None else weight
        found.append(0 if stored is None else stored.data_ptr())
    return found


class DecoderRows:
    """What computes a block for up to 32 rows, but for its attention.

    Args:
        norms: Weights of the norms before attention and before the feed-forward net, ``bfloat16 [hidden]``.
        eps: Constant that is added to the mean square in both.
        layers: Linear layers of query, key, value, output, gate, up and down, in bfloat16 or packed.
    """

    def __init__(self, norms: tuple[Tensor, Tensor], eps: float, layers: Sequence[nn.Module]) -> None:
        self._norms, self._eps = [array(norm.detach()) for norm in norms], np.float32(eps)
        self._addresses = _addresses(norms, layers)
        found = [_described(layers[part]) for part in (slice(0, 3), slice(3, 4), slice(4, 6), slice(6, 7))]
        described = [one for one in found if one is not None]
        self._described = [one[0] for one in described] if len(described) == len(found) else None
        self._outputs = [int(count) for count in described[0][0][:, 3]] if described else []
        self._wide = int(described[-2][0][0, 3]) if self._described is not None else 0
        # keeps the memory at these addresses, also if the layers get other weights
        self._tensors = [tensor.detach() for one in described for tensor in one[1]]

    def takes(self, x: Tensor, norms: tuple[Tensor, Tensor], layers: Sequence[nn.Module]) -> bool:
        """Return whether rows are computed here: few ones, by weights that are where they were."""
        return (
            self._described is not None
            and 0 < len(x) <= MOST_ROWS
            and x.dtype == torch.bfloat16
            and not torch.is_grad_enabled()
            and _addresses(norms, layers) == self._addresses
            and available()
        )

    def before(self, x: Tensor, table: tuple[Tensor, Tensor]) -> list[Tensor]:
        """Return queries, keys and values of rows ``[T, hidden]``, each ``[T, heads, D]``."""
        assert self._described is not None
        layers, rows, width = self._described[0], len(x), 2 * table[0].shape[1]
        out = torch.empty(rows * sum(self._outputs), dtype=torch.bfloat16)
        threads, cos, sin = threads_for(out.numel() * x.shape[1]), *(array(part) for part in table)
        rows_of_x, shapes = array(x.contiguous()), tile_shapes(rows) if amx_available() else None
        with pool(threads):
            _before_attention(rows_of_x, self._norms[0], self._eps, layers, cos, sin, array(out), shapes, threads)
        return [part.view(rows, -1, width) for part in out.split([rows * count for count in self._outputs])]

    def after(self, x: Tensor, attended: Tensor) -> Tensor:
        """Return the output of the block ``[T, hidden]``, of its input and of what attention gave, ``[T, H, D]``."""
        assert self._described is not None
        _, output, wide, down = self._described
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        threads = threads_for(self._wide * x.shape[1])
        shapes, parts = tile_shapes(len(x)) if amx_available() else None, (x.contiguous(), attended.flatten(1))
        rows, found = (array(part) for part in parts)
        with pool(threads):
            _after_attention(rows, found, self._norms[1], self._eps, output, wide, down, array(out), shapes, threads)
        return out
