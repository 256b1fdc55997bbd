"""All blocks of a decoder for a few bfloat16 rows on a CPU, in one call.

A small model's block has some thirty operations, each of which takes longer to call than to compute. Here the threads
start once and go through norms, products, attention and residual sums of all blocks together. Numbers are rounded to
bfloat16 where the modules round them; sums have an order that depends on their length alone, so that a row's result
does not depend on those beside it.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any, NamedTuple

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from torch import Tensor, nn

from cordillera.kernels.attention.decoding import (
    attend_from,
    attention_items,
    attention_scratch,
    score_scale,
    store_group,
)
from cordillera.kernels.attention.numba_tiles import FAST, ONE, exp2
from cordillera.kernels.compiling import compiled
from cordillera.kernels.dense.bf16_amx import OUTPUTS, release_tiles, shape_tiles, tile_shapes
from cordillera.kernels.dense.bf16_amx import available as amx_available
from cordillera.kernels.dense.bf16_tiles import available
from cordillera.kernels.dense.few_rows import MOST_ROWS
from cordillera.kernels.dense.packed_rows import PackedRows
from cordillera.kernels.dense.tiled_products import (
    WHOLE,
    outputs_of,
    pair_rows,
    scratch_memory,
    scratch_of,
    takes,
)
from cordillera.kernels.numba_support import array, borrowed, narrow, pool, threads_for, widen_to_single
from cordillera.kernels.phases import finish, phase_counters, take, wait

NORMS = ("attention_norm", "feed_forward_norm")
"""Norms of a block."""
LAYERS = (
    *(f"attention.{name}" for name in ("query", "key", "value", "output")),
    *(f"feed_forward.{name}" for name in ("gate", "up", "down")),
)
"""Linear layers of a block."""
EXTRAS = tuple(f"attention.{name}" for name in ("query_bias", "key_bias", "value_bias", "query_norm", "key_norm"))
"""Optional parameters of a block: biases of the first three layers, norms of each head of the first two."""

_HIGHEST, _TO_TWO = np.float32(127.0), np.float32(-1.4426950408889634)
_BITS = np.uint16(0)  # has the type of bfloat16's bits
_PHASES = 6  # phases of a block


class PagedRows(NamedTuple):
    """Keys and values to which a few new tokens are added, and which they see.

    Attributes:
        data: Keys and values, ``[layers, 2, pages, G, page, D]``.
        sequences: As for :func:`~cordillera.kernels.attention.decoding.decode_attention`, like the next two; every row
            belongs to one.
        tables: Pages of each sequence.
        seen: Which new tokens each new token sees.
    """

    data: Tensor
    sequences: Tensor
    tables: Tensor
    seen: Tensor


@intrinsic
def _load(typing_context: Any, address: Any, number: Any) -> Any:
    """Load the bits of the bfloat16 at index ``number`` from ``address``."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], ir.IntType(16).as_pointer())
        return builder.load(builder.gep(pointer, [arguments[1]]), align=2)

    return types.uint16(types.int64, types.int64), generate


@compiled(fastmath={"reassoc", "contract"})
def _square_sum(row: Any) -> Any:
    total = np.float32(0.0)
    for j in range(len(row)):
        value = widen_to_single(row[j])
        total += value * value
    return total


@compiled()
def _normalize(x: Any, weight: Any, eps: Any, out: Any) -> None:
    """RMSNorm of rows; ``weight`` is an address."""
    rows, inner = x.shape
    for row in range(rows):
        scale = ONE / np.sqrt(_square_sum(x[row]) / np.float32(inner) + eps)
        for j in range(inner):
            value = narrow(widen_to_single(x[row, j]) * scale, _BITS)
            out[row, j] = narrow(widen_to_single(value) * widen_to_single(_load(weight, j)), _BITS)


@compiled()
def _add_bias(bias: Any, out: Any, column: Any) -> None:
    """Add sixteen numbers at an address to as many columns of rows."""
    for row in range(len(out)):
        own = out[row, column : column + OUTPUTS]
        for i in range(OUTPUTS):
            own[i] = narrow(widen_to_single(own[i]) + widen_to_single(_load(bias, i)), _BITS)


@compiled()
def _rotate(heads: Any, cos: Any, sin: Any, halves: Any) -> None:
    """Rotate the first ``2 half`` numbers of heads of one position, by way of memory ``float32 [2, half]``."""
    half, first, second = len(cos), halves[0], halves[1]
    for head in range(len(heads)):
        low, high = heads[head, :half], heads[head, half:]
        for j in range(half):
            first[j], second[j] = widen_to_single(low[j]), widen_to_single(high[j])
        for j in range(half):
            low[j] = narrow(first[j] * cos[j] - second[j] * sin[j], _BITS)
            high[j] = narrow(second[j] * cos[j] + first[j] * sin[j], _BITS)


@compiled(fastmath=FAST)
def _gate(gates: Any, ups: Any, out: Any, column: Any) -> None:
    """Store ``silu(gate) * up`` of ``[rows, 16]``; below -88, a gate becomes 1e-38 of its size in place of 0."""
    for row in range(len(out)):
        own = out[row, column : column + OUTPUTS]
        for i in range(OUTPUTS):
            gate, up = widen_to_single(gates[row, i]), widen_to_single(ups[row, i])
            power = gate * _TO_TWO
            power = _HIGHEST if power > _HIGHEST else power  # NaN stays
            gated = narrow(gate / (ONE + exp2(power)), _BITS)
            own[i] = narrow(widen_to_single(gated) * up, _BITS)


@compiled()
def _add(x: Any, more: Any, out: Any, column: Any) -> None:
    """Store the sum of sixteen columns of ``x`` and ``more [rows, 16]``."""
    for row in range(len(x)):
        own, before = out[row, column : column + OUTPUTS], x[row, column : column + OUTPUTS]
        for i in range(OUTPUTS):
            own[i] = narrow(widen_to_single(before[i]) + widen_to_single(more[row, i]), _BITS)


@compiled()
def _pieces(blocks: Any, threads: Any) -> Any:
    """Return the number of blocks per piece, with one piece per thread, and the number of pieces.

    More and shorter pieces would interrupt the streams of weights too often.
    """
    size = (blocks + threads - 1) // threads
    return size, (blocks + size - 1) // size


# Each function below is the work of one thread in a phase. The inputs do not change until all pieces are done, so a
# thread reads them only after it has taken a piece: a late thread, which gets none, could see writes of later phases.


@compiled()
def _project(
    x: Any, norm: Any, eps: Any, layers: Any, biases: Any, scratch: Any, normed: Any, out: Any, shapes: Any,
    counters: Any, phase: Any, threads: Any,
) -> None:  # fmt: skip
    """Compute queries, keys and values ``out [rows, (H + 2 G) D]`` of the norm of ``x``; ``biases`` are addresses."""
    width = layers[:, 3].sum()
    size, pieces = _pieces(width // OUTPUTS, threads)
    out = out.reshape((len(x), width))
    piece, flat = take(counters, phase), out.reshape(-1)
    if piece < pieces:
        _normalize(x, norm, eps, normed)
        pair_rows(normed, scratch, shapes)
    while piece < pieces:
        for block in range(piece * size, min(width // OUTPUTS, (piece + 1) * size)):
            n, own = 0, block
            while own >= layers[n, 3] // OUTPUTS:
                own -= layers[n, 3] // OUTPUTS
                n += 1
            outputs_of(layers[n], own, normed, scratch, flat, OUTPUTS * block, width, shapes)
            if biases[n]:
                _add_bias(biases[n] + 2 * OUTPUTS * own, out, OUTPUTS * block)
        finish(counters, phase)
        piece = take(counters, phase)
    wait(counters, phase, pieces)


@compiled()
def _store(
    heads: Any, norms: Any, eps: Any, cos: Any, sin: Any, data: Any, sequences: Any, tables: Any, halves: Any,
    counters: Any, phase: Any,
) -> None:  # fmt: skip
    """Rotate queries and keys of ``heads [rows, H + 2 G, D]``, and store keys and values; a piece is a sequence.

    Queries and keys are normalised before, by weights at two addresses, unless these are 0.
    """
    groups = data.shape[2]
    rotated = heads.shape[1] - groups
    sequence = take(counters, phase)
    while sequence < len(sequences):
        start = sequences[sequence, 0]
        for row in range(start, start + sequences[sequence, 1]):
            if norms[0]:
                queries, keys = heads[row, : rotated - groups], heads[row, rotated - groups : rotated]
                _normalize(queries, norms[0], eps, queries)
                _normalize(keys, norms[1], eps, keys)
            _rotate(heads[row, :rotated], cos[row], sin[row], halves)
        k, v = heads[:, rotated - groups : rotated], heads[:, rotated:]
        for group in range(groups):
            store_group(k, v, data[0], data[1], sequences[sequence], tables[sequence], group)
        finish(counters, phase)
        sequence = take(counters, phase)
    wait(counters, phase, len(sequences))


@compiled()
def _attend(
    heads: Any, data: Any, sequences: Any, tables: Any, seen: Any, scale: Any, items: Any, memory: Any, out: Any,
    counters: Any, phase: Any,
) -> None:  # fmt: skip
    """Attention ``out [rows, H, D]`` of rotated ``heads``."""
    q, item = heads[:, : out.shape[1]], take(counters, phase)
    while item < len(items):
        s, group, first = items[item]
        sequence, table = sequences[s], tables[s]
        attend_from(q, data[0], data[1], sequence, table, seen, scale, group, first, memory, out)
        finish(counters, phase)
        item = take(counters, phase)
    wait(counters, phase, len(items))


@compiled()
def _expand(
    x: Any, norm: Any, eps: Any, layers: Any, scratch: Any, normed: Any, found: Any, out: Any, shapes: Any,
    counters: Any, phase: Any, threads: Any,
) -> None:  # fmt: skip
    """Compute the gated inputs ``out [rows, ffn]`` of the last layer, of the norm of ``x``."""
    blocks = layers[0, 3] // OUTPUTS
    size, pieces = _pieces(blocks, threads)
    piece = take(counters, phase)
    if piece < pieces:
        _normalize(x, norm, eps, normed)
        pair_rows(normed, scratch, shapes)
    while piece < pieces:
        for block in range(piece * size, min(blocks, (piece + 1) * size)):
            for n in range(2):
                outputs_of(layers[n], block, normed, scratch, found[n].reshape(-1), 0, OUTPUTS, shapes)
            _gate(found[0], found[1], out, OUTPUTS * block)
        finish(counters, phase)
        piece = take(counters, phase)
    wait(counters, phase, pieces)


@compiled()
def _close(
    x: Any, before: Any, layer: Any, scratch: Any, found: Any, out: Any, tapped: Any, tap: Any, shapes: Any,
    counters: Any, phase: Any, threads: Any,
) -> None:  # fmt: skip
    """Compute ``out = before + x @ weight.T``, and ``tapped[tap]`` of it unless ``tap`` is -1."""
    blocks = layer[3] // OUTPUTS
    size, pieces = _pieces(blocks, threads)
    piece = take(counters, phase)
    if piece < pieces:
        pair_rows(x, scratch, shapes)
    while piece < pieces:
        for block in range(piece * size, min(blocks, (piece + 1) * size)):
            outputs_of(layer, block, x, scratch, found[0].reshape(-1), 0, OUTPUTS, shapes)
            _add(before, found[0], out, OUTPUTS * block)
            if tap >= 0:
                _add(before, found[0], tapped[tap], OUTPUTS * block)
        finish(counters, phase)
        piece = take(counters, phase)
    wait(counters, phase, pieces)


@compiled()
def _go_through(
    rows: Any, weights: Any, cached: Any, taps: Any, counters: Any, shapes: Any, scratch: Any, memory: Any, threads: Any
) -> None:
    """Compute one thread's share of all blocks; the arrays of :func:`_blocks` are borrowed."""
    x, y, heads, attended, inner = rows
    (norms, eps, layers, extras), (tapped, of_block), (normed, found, halves, attention) = weights, taps, memory
    data, sequences, tables, seen, cos, sin, scale, items = cached
    flat = attended.reshape(len(x), -1)
    for n in range(len(layers)):
        phase, own, kept, extra = _PHASES * n, layers[n], data[n], extras[n]
        _project(x, norms[n, 0], eps, own[:3], extra[:3], scratch, normed, heads, shapes, counters, phase, threads)
        _store(heads, extra[3:], eps, cos, sin, kept, sequences, tables, halves, counters, phase + 1)
        _attend(heads, kept, sequences, tables, seen, scale, items, attention, attended, counters, phase + 2)
        _close(flat, x, own[3], scratch, found, y, tapped, -1, shapes, counters, phase + 3, threads)
        _expand(y, norms[n, 1], eps, own[4:6], scratch, normed, found, inner, shapes, counters, phase + 4, threads)
        _close(inner, y, own[6], scratch, found, x, tapped, of_block[n], shapes, counters, phase + 5, threads)


@compiled()
def _begin(
    x: Any, buffers: Any, weights: Any, cached: Any, taps: Any, counters: Any, shapes: Any, memory: Any, threads: Any,
    normed: Any, found: Any, halves: Any, queries: Any, outputs: Any, keys: Any, items: Any,
) -> None:  # fmt: skip
    """Borrow all arrays, which the caller keeps, and do one thread's share."""
    y, heads, attended, inner = buffers
    (norms, eps, layers, extras), (tapped, of_block) = weights, taps
    data, sequences, tables, seen, cos, sin, scale = cached
    if shapes is not None:
        shape_tiles(np.int64(shapes.ctypes.data))
    _go_through(
        (borrowed(x), borrowed(y), borrowed(heads), borrowed(attended), borrowed(inner)),
        (borrowed(norms), eps, borrowed(layers), borrowed(extras)),
        (
            borrowed(data), borrowed(sequences), borrowed(tables), borrowed(seen), borrowed(cos), borrowed(sin), scale,
            borrowed(items),
        ),
        (borrowed(tapped), borrowed(of_block)),
        borrowed(counters),
        shapes,
        scratch_of(borrowed(memory), len(x), max(x.shape[1], inner.shape[1], attended.shape[1] * attended.shape[2])),
        (borrowed(normed), borrowed(found), borrowed(halves), (borrowed(queries), borrowed(outputs), borrowed(keys))),
        threads,
    )  # fmt: skip
    if shapes is not None:
        release_tiles()


@compiled(parallel=True)
def _blocks(
    x: Any, buffers: Any, weights: Any, cached: Any, taps: Any, counters: Any, shapes: Any, memory: Any, threads: int
) -> None:
    """Replace ``x [rows, hidden]`` by the output of the last block.

    Args:
        buffers: Memory for residual sums, heads, attention's results and the last layer's inputs.
        weights: Addresses of norms' weights, the constant in their roots, descriptions of layers, and addresses of
            :data:`EXTRAS`, 0 for those that there are not.
        cached: Fields of :class:`PagedRows`, cosines and sines of positions, and the factor of scores.
        taps: Memory for blocks' outputs, and the place in it of each block's, or -1.
        counters: Counters of all phases.
        shapes: Configuration of AMX's tiles; None without AMX.
        memory: Memory of :func:`~cordillera.kernels.dense.tiled_products.scratch_memory`.
    """
    for thread in numba.prange(threads):
        normed, found = np.empty_like(x), np.empty((2, len(x), OUTPUTS), np.uint16)
        attended, data, cos = buffers[2], cached[0], cached[4]
        halves = np.empty((2, cos.shape[1]), np.float32)
        queries, outputs, keys = attention_scratch(attended.shape[2])
        items = attention_items(cached[1], data.shape[3], attended.shape[1] // data.shape[3])
        _begin(
            x, buffers, weights, cached, taps, counters, shapes, memory[thread], threads, normed, found, halves,
            queries, outputs, keys, items,
        )  # fmt: skip


def _described(layer: nn.Module) -> tuple[list[int], dict[str, Tensor]] | None:
    """Return a layer's description as kernels take it, and its weights by name; None if there is none."""
    tensors = {name: tensor for name, tensor in layer.named_buffers(recurse=False) if name in ("codes", "scales")}
    if len(tensors) == 2:
        packed = PackedRows(tensors["codes"], tensors["scales"])
        row, shape = packed.description, packed.shape
    elif isinstance(layer, nn.Linear) and layer.bias is None and layer.weight.dtype == torch.bfloat16:
        tensors, shape = {"weight": layer.weight}, (layer.weight.shape[0], layer.weight.shape[1])
        row = [layer.weight.data_ptr(), 0, WHOLE, shape[0]]
    else:
        return None
    return (row, tensors) if takes(*shape) and all(one.is_contiguous() for one in tensors.values()) else None


class _Described:
    """Weights of a block where kernels find them.

    Attributes:
        norms: Addresses of the norms' weights.
        layers: Descriptions of the linear layers.
        extras: Addresses of :data:`EXTRAS`, 0 for those that there are not.
    """

    def __init__(self, blocks: nn.ModuleList, number: int) -> None:
        block = blocks[number]
        self.norms, self.layers, self.extras = list[int](), list[list[int]](), list[int]()
        # what lies under a name in a dictionary: modules and tensors
        self._held: tuple[list[Any], list[Any], list[Any]] = ([blocks._modules], [str(number)], [block])
        self._weights, self._places = list[Tensor](), list[int]()
        self._memory = list[Tensor]()  # keeps the tensors at these addresses alive, even if layers get other weights
        for name in (*NORMS, *LAYERS, *EXTRAS):
            module = block
            if name in EXTRAS and not hasattr(block.get_submodule("attention"), name.rpartition(".")[2]):
                self.extras.append(0)
                continue
            for part in name.split("."):
                holder, module = module, module.get_submodule(part)
                self._hold(holder._modules, part, module)
            if name in NORMS or name in EXTRAS:
                weight = module.get_parameter("weight")
                if weight.dtype == torch.bfloat16 and weight.is_contiguous():
                    (self.norms if name in NORMS else self.extras).append(weight.data_ptr())
                    self._keep(module, {"weight": weight})
            elif (found := _described(module)) is not None:
                self.layers.append(found[0])
                self._keep(module, found[1])

    def _keep(self, module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            self._hold(module._parameters if name in module._parameters else module._buffers, name, tensor)
            self._weights.append(tensor)
            self._places.append(tensor.data_ptr())
            self._memory.append(tensor.detach())

    def _hold(self, *held: Any) -> None:
        for some, one in zip(self._held, held, strict=True):
            some.append(one)

    @property
    def is_whole(self) -> bool:
        """Whether all layers are described."""
        found = len(self.norms), len(self.layers), len(self.extras)
        return found == (len(NORMS), len(LAYERS), len(EXTRAS))

    def is_right(self) -> bool:
        """Return whether layers and their weights are still where they were."""
        dictionaries, names, expected = self._held
        are_there = all(map(operator.is_, map(dict.get, dictionaries, names), expected))
        return are_there and list(map(Tensor.data_ptr, self._weights)) == self._places


class DecoderBlocks:
    """What computes blocks for up to 32 rows; if layers or weights of a block are replaced later, it takes none.

    Args:
        blocks: Blocks with :data:`NORMS`, and :data:`EXTRAS` if there are any, in bfloat16, and :data:`LAYERS` in
            bfloat16 or packed, on a CPU.
        eps: Constant that is added to the mean square in norms.
    """

    def __init__(self, blocks: nn.ModuleList, eps: float) -> None:
        self._described, self._eps = [_Described(blocks, number) for number in range(len(blocks))], np.float32(eps)
        are_right = all(one.is_whole for one in self._described)
        self._layers, self._norms, self._extras = (
            np.array([getattr(one, name) for one in self._described], np.int64) if are_right else None
            for name in ("layers", "norms", "extras")
        )

    def takes(self, x: Tensor, cached: PagedRows | None, layers: range) -> bool:
        """Return whether rows ``[T, hidden]`` go through the blocks with these numbers here."""
        return (
            cached is not None
            and self._layers is not None
            and 0 < len(x) <= MOST_ROWS
            and x.dtype == cached.data.dtype == torch.bfloat16
            and not torch.is_grad_enabled()
            and all(self._described[number].is_right() for number in layers)
            and available()
        )

    def __call__(
        self,
        x: Tensor,
        table: tuple[Tensor, Tensor],
        cached: PagedRows,
        layers: range,
        taps: dict[int, Tensor] | None = None,
    ) -> Tensor:
        """Return the output of the last of the blocks, ``[T, hidden]``.

        Args:
            x: Input of the first block, ``bfloat16 [T, hidden]``.
            table: Cosines and sines of the rows' positions, ``float32 [T, R / 2]`` each; the first ``R`` numbers of a
                head turn.
            cached: Keys and values of the blocks; those of the rows are stored.
            layers: Numbers of the blocks.
            taps: Dictionary whose keys are numbers of blocks; their outputs become its values.
        """
        assert self._layers is not None
        assert self._norms is not None
        assert self._extras is not None
        weights, norms, extras = (
            found[layers.start : layers.stop] for found in (self._layers, self._norms, self._extras)
        )
        tapped = [number for number in layers if taps is not None and number in taps]
        outputs = torch.empty((len(tapped), *x.shape), dtype=torch.bfloat16)
        of_block = np.array([tapped.index(number) if number in tapped else -1 for number in layers])
        rows, width, (query, key) = len(x), cached.data.shape[-1], weights[0, :2, 3]
        sizes = [(x.shape[1],), ((query + 2 * key) // width, width), (query // width, width), (weights[0, 4, 3],)]
        buffers = tuple(np.empty((rows, *size), np.uint16) for size in sizes)
        found, shapes = x.clone(memory_format=torch.contiguous_format), tile_shapes(rows) if amx_available() else None
        threads, counters = threads_for(weights[0, 4, 3] * x.shape[1]), phase_counters(_PHASES * len(layers))
        memory = scratch_memory(threads, rows, int(max(weights[0, 4, 3], x.shape[1], query)))
        kept = (*(array(part) for part in (*cached, *table)), score_scale(width))
        with pool(threads):
            _blocks(
                array(found), buffers, (norms, self._eps, weights, extras), kept, (array(outputs), of_block), counters,
                shapes, memory, threads,
            )  # fmt: skip
        if taps is not None:
            taps.update(zip(tapped, outputs, strict=True))
        return found
