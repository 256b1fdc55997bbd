"""Tiles of sums of products of uint8 with int8, by the VNNI instructions of AVX-512.

A register holds sixteen sums. ``vpdpbusd`` adds to each four products of uint8 with int8, without saturation. Weights
are stored in the order in which they are read: blocks of sixteen outputs; in a block, for each group of four inputs,
the four weights of each output.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from torch import Tensor

from cordillera.kernels.compiling import compiled
from cordillera.kernels.numba_support import has_instructions

_LANES = 16  # sums in a register
_BLOCKS = 4  # registers of weights that are read in turn
WIDTH = _LANES * _BLOCKS  # outputs of a tile
ROWS = 6  # rows of a tile: 24 of 32 registers hold sums


@lru_cache(maxsize=1)
def available() -> bool:
    """Return whether this processor has the instructions; without them, nothing in this file may be compiled."""
    return has_instructions("avx512vnni") and torch.cpu._is_vnni_supported()


def _tile(rows: int) -> Any:
    """Make a function of addresses that stores sums of products, ``int32 [rows, 64]``; see :func:`sums_of_tile`."""

    @intrinsic
    def tile(typing_context: Any, codes: Any, stride: Any, weights: Any, inner: Any, sums: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            first, stride, weights, inner, sums = arguments
            word, wide = ir.IntType(32), ir.IntType(64)
            vector = ir.VectorType(word, _LANES)
            multiply = builder.module.declare_intrinsic(
                "llvm.x86.avx512.vpdpbusd.512", (), ir.FunctionType(vector, [vector, vector, vector])
            )
            bytes_of_block = builder.mul(inner, wide(64))
            before = builder.block
            loop, done = builder.append_basic_block("sum"), builder.append_basic_block("store")
            builder.cbranch(builder.icmp_signed(">", inner, wide(0)), loop, done)
            zero = ir.Constant(vector, [0] * _LANES)

            builder.position_at_end(loop)
            step = builder.phi(wide)
            step.add_incoming(wide(0), before)
            totals = [[builder.phi(vector) for _ in range(_BLOCKS)] for _ in range(rows)]
            blocks = []
            for block in range(_BLOCKS):
                offset = builder.add(builder.mul(bytes_of_block, wide(block)), builder.mul(step, wide(64)))
                pointer = builder.inttoptr(builder.add(weights, offset), vector.as_pointer())
                blocks.append(builder.load(pointer, align=1))
            added = []
            for row in range(rows):
                offset = builder.add(builder.mul(stride, wide(row)), builder.mul(step, wide(4)))
                four = builder.load(builder.inttoptr(builder.add(first, offset), word.as_pointer()), align=1)
                lane = builder.insert_element(ir.Constant(vector, ir.Undefined), four, word(0))
                spread = builder.shuffle_vector(lane, lane, ir.Constant(ir.VectorType(word, _LANES), [0] * _LANES))
                added.append([builder.call(multiply, [totals[row][b], spread, blocks[b]]) for b in range(_BLOCKS)])
            following = builder.add(step, wide(1))
            end = builder.block
            step.add_incoming(following, end)
            for row in range(rows):
                for block in range(_BLOCKS):
                    totals[row][block].add_incoming(zero, before)
                    totals[row][block].add_incoming(added[row][block], end)
            builder.cbranch(builder.icmp_signed("<", following, inner), loop, done)

            builder.position_at_end(done)
            for row in range(rows):
                for block in range(_BLOCKS):
                    total = builder.phi(vector)
                    total.add_incoming(zero, before)
                    total.add_incoming(added[row][block], end)
                    added[row][block] = total
            for row in range(rows):
                for block in range(_BLOCKS):
                    address = builder.add(sums, wide((row * _BLOCKS + block) * 64))
                    builder.store(added[row][block], builder.inttoptr(address, vector.as_pointer()), align=1)
            return context.get_dummy_value()

        return types.none(types.int64, types.int64, types.int64, types.int64, types.int64), generate

    return tile


_tile_1, _tile_2, _tile_3, _tile_4, _tile_5, _tile_6 = (_tile(rows) for rows in range(1, ROWS + 1))


@compiled()
def sums_of_tile(rows: Any, codes: Any, stride: Any, weights: Any, groups: Any, sums: Any) -> None:
    """Compute the sums of 1 to 6 rows with 64 outputs; ``codes``, ``weights`` and ``sums`` are addresses.

    Args:
        stride: Bytes from row to row of the codes, ``uint8``.
        weights: Address of the first block, ``int8 [4, groups, 16, 4]``, of groups of four inputs.
        sums: Address of ``int32 [rows, 64]``.
    """
    if rows == 6:
        _tile_6(codes, stride, weights, groups, sums)
    elif rows == 5:
        _tile_5(codes, stride, weights, groups, sums)
    elif rows == 4:
        _tile_4(codes, stride, weights, groups, sums)
    elif rows == 3:
        _tile_3(codes, stride, weights, groups, sums)
    elif rows == 2:
        _tile_2(codes, stride, weights, groups, sums)
    else:
        _tile_1(codes, stride, weights, groups, sums)


def pack(codes: Tensor) -> Tensor:
    """Reorder weights ``int8 [N, K]`` for the kernel: ``int8 [ceil(N / 64) 4, ceil(K / 4), 16, 4]``, zero-padded."""
    outputs, inner = codes.shape
    groups, blocks = -(-inner // 4), -(-outputs // WIDTH) * _BLOCKS
    padded = torch.zeros(blocks * _LANES, groups * 4, dtype=torch.int8)
    padded[:outputs, :inner] = codes
    return padded.view(blocks, _LANES, groups, 4).transpose(1, 2).contiguous()
