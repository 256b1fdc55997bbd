"""Products, sums, softmax and differences of ragged data without padding, each with its gradient.

A ragged operand is packed: rows ``[T, ...]`` of ``B`` samples with ``offsets [B + 1]``, as in :mod:`cordillera.jagged`;
sample ``b`` has ``l`` rows, and what has a number for each pair of them is packed too, ``[sum of l squared]``, pair by
pair in the order of rows. Everything is made of torch's operators, so that it runs on any device, in any floating-point
dtype, under autograd; products are made sample by sample.

Source: the operators of Jagged Flash Attention's feature interactions (Xu et al. 2024, arXiv 2409.15373), as FBGEMM's
``sll`` package names them; where FBGEMM truncates to a longest length, an error is raised here.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from cordillera.errors import DataError

Along = Literal["last", "first"]


def jagged_dense_product(x: Tensor, offsets: Tensor, y: Tensor) -> Tensor:
    """Multiply the rows of each sample by a matrix of it: ``x [T, D]``, ``y [B, D, F]`` to ``[T, F]``.

    Raises:
        DataError: Shapes and ``offsets`` do not fit together.
    """
    lengths = _lengths(offsets, x, "x")
    if y.dim() != 3 or len(y) != len(lengths) or x.dim() != 2 or y.shape[1] != x.shape[1]:
        raise DataError(f"needs [{len(lengths)}, D, F] for x {tuple(x.shape)}, got {tuple(y.shape)}", where="y")
    pieces = [rows @ matrix for rows, matrix in zip(x.split(lengths), y.unbind(), strict=True)]
    return torch.cat([x.new_zeros(0, y.shape[2]), *pieces])


def jagged_product(x: Tensor, y: Tensor, offsets: Tensor) -> Tensor:
    """Multiply transposed rows of each sample by others of it: ``x [T, D]``, ``y [T, F]`` to ``[B, D, F]``.

    With one column in ``x`` it pools the rows of ``y`` by weights.

    Raises:
        DataError: Shapes and ``offsets`` do not fit together.
    """
    lengths = _both(x, y, offsets)
    pieces = [a.T @ b for a, b in zip(x.split(lengths), y.split(lengths), strict=True)]
    return torch.stack(pieces) if pieces else x.new_zeros(0, x.shape[1], y.shape[1])


def pair_products(x: Tensor, y: Tensor, offsets: Tensor) -> Tensor:
    """Multiply rows of ``x`` by rows of ``y`` of the same sample: ``[T, D]``, ``[T, D]`` to ``[sum of l squared]``.

    Raises:
        DataError: Shapes and ``offsets`` do not fit together.
    """
    lengths = _both(x, y, offsets)
    if x.shape != y.shape:
        raise DataError(f"needs the shape of x, {tuple(x.shape)}, got {tuple(y.shape)}", where="y")
    pieces = [(a @ b.T).flatten() for a, b in zip(x.split(lengths), y.split(lengths), strict=True)]
    return torch.cat([x.new_zeros(0), *pieces])


def pairs_times_rows(pairs: Tensor, y: Tensor, offsets: Tensor, *, transpose: bool = False) -> Tensor:
    """Multiply the square of each sample by its rows: ``[sum of l squared]``, ``[T, D]`` to ``[T, D]``.

    Args:
        pairs: Square matrices of all samples, packed.
        y: Rows.
        offsets: Offsets of the rows, integers ``[B + 1]``.
        transpose: Whether squares are transposed first.

    Raises:
        DataError: Shapes and offsets do not fit together.
    """
    lengths = _lengths(offsets, y, "y")
    pieces = []
    for square, rows in zip(_squares(pairs, lengths), y.split(lengths), strict=True):
        pieces.append((square.T if transpose else square) @ rows)
    return torch.cat([y.new_zeros(0, *y.shape[1:]), *pieces])


def jagged_softmax(x: Tensor, offsets: Tensor) -> Tensor:
    """Compute a softmax over the rows of each sample, column by column: ``[T, F]`` to ``[T, F]``.

    Raises:
        DataError: ``offsets`` do not fit ``x``.
    """
    return torch.cat([x[:0], *(rows.softmax(0) for rows in x.split(_lengths(offsets, x, "x")))])


def pair_softmax(pairs: Tensor, offsets: Tensor, along: Along = "last") -> Tensor:
    """Compute a softmax over one side of the square of each sample: ``[sum of l squared]`` to the same.

    Args:
        pairs: Square matrices of all samples, packed.
        offsets: Offsets of the rows, integers ``[B + 1]``.
        along: ``last``: each row of the matrix sums to one; ``first``: each column sums to one.

    Raises:
        DataError: Squares and offsets do not fit together, or ``along`` is something else.
    """
    if along not in ("last", "first"):
        raise DataError(f"must be 'last' or 'first', got {along!r}", where="along")
    side = -1 if along == "last" else 0
    return torch.cat([pairs[:0], *(one.softmax(side).flatten() for one in _squares(pairs, _sizes(offsets)))])


def add_dense(x: Tensor, offsets: Tensor, y: Tensor) -> Tensor:
    """Add the rows of a padded tensor to the rows of each sample: ``x [T, F]``, ``y [B, N, F]`` to ``[T, F]``.

    Raises:
        DataError: Shapes and ``offsets`` do not fit together; ``N`` must be no less than the longest length.
    """
    lengths = _lengths(offsets, x, "x")
    if y.dim() != 3 or len(y) != len(lengths) or y.shape[2:] != x.shape[1:] or y.shape[1] < max(lengths, default=0):
        raise DataError(
            f"of shape {tuple(y.shape)} does not fit x {tuple(x.shape)} with lengths up to {max(lengths, default=0)}",
            where="y",
        )
    return x + torch.cat([y.new_zeros(0, *y.shape[2:]), *(one[:n] for one, n in zip(y.unbind(), lengths, strict=True))])


def multiply_pairs(pairs: Tensor, offsets: Tensor, mask: Tensor) -> Tensor:
    """Multiply the square of each sample by the beginning of a ``mask [N, N]``: ``[sum of l squared]`` to the same.

    The mask has a gradient too.

    Raises:
        DataError: ``pairs`` and ``offsets`` do not fit together, or the mask is smaller than the longest sample.
    """
    lengths = _sizes(offsets)
    longest = max(lengths, default=0)
    if mask.dim() != 2 or min(mask.shape) < longest:
        raise DataError(f"needs at least [{longest}, {longest}], got {tuple(mask.shape)}", where="mask")
    squares = _squares(pairs, lengths)
    return torch.cat([pairs[:0], *((one * mask[:n, :n]).flatten() for one, n in zip(squares, lengths, strict=True))])


def padded_pairs(pairs: Tensor, offsets: Tensor, padding: float = 0.0) -> Tensor:
    """Pad the square matrix of each sample to the largest one: ``[sum of l squared]`` to ``[B, N, N]``.

    Args:
        pairs: Square matrices of all samples, packed.
        offsets: Offsets of the rows, integers ``[B + 1]``.
        padding: Value outside the matrices.

    Raises:
        DataError: Squares and offsets do not fit together.
    """
    lengths = _sizes(offsets)
    longest, found = max(lengths, default=0), [pairs.new_zeros(0, 0, 0)]
    for one, n in zip(_squares(pairs, lengths), lengths, strict=True):
        rest = longest - n
        found.append(torch.nn.functional.pad(one, (0, rest, 0, rest), value=padding)[None])
    return torch.cat(found[1:]) if lengths else found[0]


def prepend(x: Tensor, offsets: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
    """Prepend one row to each sample: ``[T, ...]``, ``[B, ...]`` to ``[T + B, ...]`` and its offsets.

    Args:
        x: Rows.
        offsets: Integers ``[B + 1]``.
        first: Row of each sample.

    Raises:
        DataError: Shapes and offsets do not fit together.
    """
    lengths = _lengths(offsets, x, "x")
    if len(first) != len(lengths) or first.shape[1:] != x.shape[1:]:
        raise DataError(f"needs [{len(lengths)}, ...] as x {tuple(x.shape)}, got {tuple(first.shape)}", where="first")
    of_row = torch.repeat_interleave(torch.tensor(lengths, dtype=torch.int64, device=x.device))
    after = offsets.long() + torch.arange(len(offsets), device=offsets.device)
    places = torch.cat([torch.arange(len(of_row), device=x.device) + of_row + 1, after[:-1]])
    order = torch.empty_like(places).index_copy_(0, places, torch.arange(len(places), device=x.device))
    return torch.cat([x, first]).index_select(0, order), after.to(offsets.dtype)


def differences(x: Tensor, offsets: Tensor) -> Tensor:
    """Subtract the later values of each sample from its earlier ones: ``[T]`` to ``[sum of (l - 1) squared]``.

    For a sample ``a``, the square ``a[:-1, None] - a[None, 1:]``; a sample of fewer than two values has none.

    Raises:
        DataError: ``offsets`` do not fit ``x``, or ``x`` has columns.
    """
    if x.dim() != 1:
        raise DataError(f"needs one dimension, got {tuple(x.shape)}", where="x")
    pieces = ((a[:-1, None] - a[None, 1:]).flatten() for a in x.split(_lengths(offsets, x, "x")))
    return torch.cat([x[:0], *pieces])


def _sizes(offsets: Tensor) -> list[int]:
    """Lengths of the samples."""
    if offsets.dim() != 1 or offsets.numel() < 1 or offsets.dtype not in (torch.int32, torch.int64):
        raise DataError(
            f"must be int32 or int64 of one dimension with at least one entry, got {offsets.dtype} of shape "
            f"{tuple(offsets.shape)}",
            where="offsets",
        )
    lengths: list[int] = offsets.diff().tolist()
    if int(offsets[0]) or min(lengths, default=0) < 0:
        raise DataError("must start at 0 and not decrease", where="offsets")
    return lengths


def _lengths(offsets: Tensor, x: Tensor, name: str) -> list[int]:
    """Lengths of the samples of ``x``, whose rows they must be."""
    lengths = _sizes(offsets)
    if sum(lengths) != len(x):
        raise DataError(f"has {len(x)} rows, the offsets end at {sum(lengths)}", where=name)
    return lengths


def _both(x: Tensor, y: Tensor, offsets: Tensor) -> list[int]:
    for name, one in (("x", x), ("y", y)):
        if one.dim() != 2:
            raise DataError(f"needs two dimensions, got {tuple(one.shape)}", where=name)
        _lengths(offsets, one, name)
    return _sizes(offsets)


def _squares(pairs: Tensor, lengths: list[int]) -> list[Tensor]:
    """Squares ``[l, l]`` of the samples."""
    sizes = [n * n for n in lengths]
    if pairs.dim() != 1 or len(pairs) != sum(sizes):
        raise DataError(f"needs {sum(sizes)} numbers for the offsets, got {tuple(pairs.shape)}", where="pairs")
    return [one.view(n, n) for one, n in zip(pairs.split(sizes), lengths, strict=True)]
