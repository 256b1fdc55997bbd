"""Formats of rows of embedding tables: their bytes, and bounds on their errors.

==========  ==============  =========================================================================
format      bytes a row     a row ``w`` of smallest and largest number ``a`` and ``b`` is kept as
==========  ==============  =========================================================================
``fp32``    ``4 D``         itself
``fp16``    ``2 D``         float16; numbers beyond 65504 are refused
``int8``    ``D + 8``       codes ``(w - a) / s`` with ``s = (b - a) / 255``, float32 ``s`` and ``a``
``int4``    ``D / 2 + 4``   codes ``(w - a) / s`` with ``s = (b - a) / 15``, float16 ``s`` and ``a``
``int2``    ``D / 4 + 4``   codes ``(w - a) / s`` with ``s = (b - a) / 3``, float16 ``s`` and ``a``; not trained in
==========  ==============  =========================================================================

Decoded, a number of an integer format is off by at most ``s / 2`` after nearest and by less than ``s`` after stochastic
rounding (``int4`` with nearest rounding adds the rounding of ``a`` and ``s`` to float16: ``(1 / 2 + 15 / 2048) s +
|a| / 2048``). Rows of one number are kept exactly, in ``int4`` if it is a float16. The layouts are FBGEMM's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from cordillera.errors import NumericsError
from cordillera.kernels.embeddings.cached_rows import FORMATS, NOT_FINITE, ROUNDINGS

RowKind = Literal["fp32", "fp16", "int8", "int4"]
ServedKind = Literal["fp32", "fp16", "int8", "int4", "int2"]
RowRounding = Literal["nearest", "stochastic"]


@dataclass(frozen=True)
class RowFormat:
    """A storage format of rows: its name, its bits of a number, and the bytes of a row's scale and bias."""

    name: ServedKind
    bits: int
    row_parameters: int

    def row_bytes(self, dim: int) -> int:
        """Return the number of bytes of a row of width ``dim``, which must fill its bytes."""
        if dim * self.bits % 8:
            raise NumericsError(
                f"{8 // self.bits} numbers of {self.name} share a byte, so rows need "
                f"{'an even width' if self.bits == 4 else 'a width that 4 divides'}, got {dim}",
                where=f"tables.rows = {self.name!r}",
                remedy="choose another embedding_dim, or rows = 'int8'",
            )
        return dim * self.bits // 8 + self.row_parameters


ROW_FORMATS: dict[str, RowFormat] = {
    form.name: form
    for form in (RowFormat("fp32", 32, 0), RowFormat("fp16", 16, 0), RowFormat("int8", 8, 8), RowFormat("int4", 4, 4))
}

SERVED_FORMATS = ROW_FORMATS | {"int2": RowFormat("int2", 2, 4)}
"""Formats of trained tables for scoring (:mod:`cordillera.embeddings.quantized_tables`)."""


def encode_rows(
    rows: Tensor,
    form: RowFormat,
    *,
    rounding: RowRounding = "nearest",
    seed: int = 0,
    table: int = 0,
    first_row: int = 0,
    update: int = 0,
    name: str = "rows",
) -> Tensor:
    """Encode neighbouring rows of a table, ``float32 [N, D]`` on the CPU, as ``uint8 [N, form.row_bytes(D)]``.

    Random numbers depend on ``seed`` and on table, row, column and update alone
    (:mod:`cordillera.kernels.embeddings.numba_random`).

    Raises:
        NumericsError: a row holds NaN, infinity or numbers that the format cannot hold; the message names it.
    """
    count, dim = rows.shape
    rows = rows.detach().to(torch.float32).contiguous()
    target = torch.empty(count, form.row_bytes(dim), dtype=torch.uint8)
    if not rows.numel():
        return target.zero_()
    from cordillera.kernels.embeddings.numba_rows import encode_block  # Numba is loaded only where it is used
    from cordillera.kernels.numba_support import pool, threads_for

    threads = threads_for(rows.numel())
    with pool(threads):
        bad, why = encode_block(
            FORMATS[form.name],
            ROUNDINGS[rounding],
            rows.numpy(),
            target.numpy(),
            seed,
            table,
            first_row,
            update,
            threads,
        )
    if bad >= 0:
        raise misfit(rows[int(bad)], form, f"row {first_row + int(bad)} of table {name!r}", finite=why != NOT_FINITE)
    return target


def decode_rows(payload: Tensor, form: RowFormat, dim: int) -> Tensor:
    """Decode rows ``uint8 [N, form.row_bytes(dim)]`` on the CPU to ``float32 [N, dim]``."""
    if payload.dim() != 2 or payload.shape[1] != form.row_bytes(dim) or payload.dtype != torch.uint8:
        raise NumericsError(
            f"{form.name} rows of width {dim} are uint8 [N, {form.row_bytes(dim)}], got {payload.dtype} "
            f"{list(payload.shape)}",
            where="decode_rows",
        )
    target = torch.empty(payload.shape[0], dim)
    if target.numel():
        from cordillera.kernels.embeddings.numba_rows import decode_block
        from cordillera.kernels.numba_support import pool, threads_for

        threads = threads_for(target.numel())
        with pool(threads):
            decode_block(FORMATS[form.name], payload.contiguous().numpy(), target.numpy(), threads)
    return target


def misfit(row: Tensor, form: RowFormat, where: str, *, finite: bool) -> NumericsError:
    """Return the error for a row that a format cannot hold; ``finite`` if its values are merely too large."""
    if not finite:
        column = int((~row.isfinite()).nonzero()[0])
        return NumericsError(f"column {column} is {float(row[column])}", where=where, remedy="repair the row")
    limit = {"int4": "a bias or a scale", "fp16": "a number", "int8": "a scale"}[form.name]
    most = "largest float32" if form.name == "int8" else "largest float16, 65504"
    return NumericsError(
        f"{limit} of its {form.name} form would be above the {most}: its numbers lie between {float(row.min()):g} and "
        f"{float(row.max()):g}",
        where=where,
        remedy="choose rows = 'int8' or 'fp32', or a lower tables.learning_rate",
    )
