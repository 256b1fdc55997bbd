"""Embedding tables for scoring, each in its own format of 2 to 32 bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from cordillera.data.ranking.features import FeatureSpec
from cordillera.embeddings.row_formats import SERVED_FORMATS, ServedKind, decode_rows
from cordillera.embeddings.tables import EmbeddingTables, TablesConfig
from cordillera.errors import NumericsError, TrainingError
from cordillera.kernels.embeddings.cached_rows import FORMATS
from cordillera.kernels.embeddings.lookup import Lookup
from cordillera.kernels.embeddings.numba_mixed_rows import MixedRows, lookup
from cordillera.numerics.quantization.rows import quantize_rows

_ALIGNMENT = 64
_LARGEST_FP16 = 65504.0


class QuantizedTables(EmbeddingTables):
    """:class:`EmbeddingTables` for lookups only, on CPUs.

    Rows are in FBGEMM's fused layouts, tables one after another at multiples of 64 bytes.

    Attributes:
        payload: Memory of all tables, ``uint8 [bytes]``.
    """

    payload: Tensor

    def __init__(self, features: FeatureSpec, embedding_dim: int, kinds: Mapping[str, str]) -> None:
        for table in features.tables:
            if kinds.get(table) not in get_args(ServedKind):
                raise NumericsError(
                    f"has the format {kinds.get(table)!r}", where=f"table {table!r}",
                    remedy=f"one of {', '.join(get_args(ServedKind))}",
                )  # fmt: skip
        self.kinds = {table: kinds[table] for table in features.tables}
        super().__init__(features, embedding_dim, TablesConfig())
        tables = [feature.table for feature in features.sparse]

        def of_features(values: Mapping[str, int]) -> Tensor:
            return torch.tensor([values[table] for table in tables], dtype=torch.int64)

        self._places = (
            of_features({table: FORMATS[kind] for table, kind in self.kinds.items()}),
            of_features(self._first_byte),
            of_features(self._row_bytes),
        )

    def _make_rows(self, init: float | Literal["uniform_by_rows"], generator: torch.Generator | None) -> None:
        self._row_bytes = {t: SERVED_FORMATS[kind].row_bytes(self.embedding_dim) for t, kind in self.kinds.items()}
        self._first_byte, total = {}, 0
        for table, rows in self.features.tables.items():
            self._first_byte[table] = total
            total += -(-rows * self._row_bytes[table] // _ALIGNMENT) * _ALIGNMENT
        self.register_buffer("payload", torch.zeros(total, dtype=torch.uint8))
        # Tells autocast and the graph the device of lookups; nothing is trained.
        self.anchor = nn.Parameter(torch.empty(0), requires_grad=False)

    @classmethod
    def of(
        cls, tables: EmbeddingTables, kinds: Mapping[str, str], made: dict[tuple[str, str], Tensor] | None = None
    ) -> QuantizedTables:
        """Convert trained tables to other formats.

        Args:
            kinds: Format of every table; rows of 4 and 2 bits get greedy ranges.
            made: Tables that were encoded before, by name and format; newly encoded ones except those of fp32 are
                added.
        """
        found = cls(tables.features, tables.embedding_dim, kinds)
        for name in tables.features.tables:
            key = name, found.kinds[name]
            rows = None if made is None else made.get(key)
            if rows is None:
                rows = encoded(tables.table(name), found.kinds[name], name)
                if made is not None and found.kinds[name] != "fp32":
                    made[key] = rows
            found.rows_of(name).copy_(rows)
        return found

    def rows_of(self, name: str) -> Tensor:
        """Return a view of one table's encoded rows, ``uint8 [rows, row bytes]``."""
        _, rows = self._place_of(name)
        start, size = self._first_byte[name], self._row_bytes[name]
        return self.payload[start : start + rows * size].view(rows, size)

    def table(self, name: str) -> Tensor:
        """Return one table decoded, as a copy ``float32 [rows, D]``."""
        return decode_rows(self.rows_of(name), SERVED_FORMATS[self.kinds[name]], self.embedding_dim)

    @property
    def backend(self) -> str:
        """Name of the kernels in use."""
        return "numba"

    @property
    def _in_graph(self) -> Tensor:
        return self.anchor

    def _look_up(
        self, values: Tensor, offsets: Tensor | None, value_weights: Tensor | None, dtype: torch.dtype
    ) -> Lookup:
        kinds, first_byte, row_bytes = self._places
        rows = MixedRows(self.payload, kinds, first_byte, row_bytes, self._num_rows, self.embedding_dim)
        return lookup(rows, values, offsets, value_weights, dtype)

    def _unpooled(self, own: slice, ids: Tensor, dtype: torch.dtype) -> Lookup:
        kinds, first_byte, row_bytes = (part[own] for part in self._places)
        rows = MixedRows(self.payload, kinds, first_byte, row_bytes, self._num_rows[own], self.embedding_dim)
        return lookup(rows, ids, None, None, dtype)

    def update(self, learning_rate_scale: float = 1.0) -> None:
        """Raise :class:`TrainingError`: these tables are not trained."""
        raise TrainingError("quantised tables are for scoring; train the run that they were made of", where="tables")

    def clear_columns(self, first: int) -> None:
        """Raise :class:`TrainingError`: these tables are not trained."""
        self.update()

    def memory_bytes(self) -> dict[str, int]:
        """Return the bytes of all rows with their parameters, alignment included."""
        return {"rows": self.payload.numel()}

    def extra_repr(self) -> str:
        """Describe the tables for ``repr``."""
        return ", ".join(f"{name}: {kind}" for name, kind in self.kinds.items())


def encoded(rows: Tensor, kind: str, name: str, method: Literal["minmax", "greedy"] = "greedy") -> Tensor:
    """Encode rows ``float32 [R, D]`` of table ``name`` as ``uint8 [R, row bytes]``; ``method`` chooses ranges.

    Raises:
        NumericsError: a row holds NaN, infinity, or a number that the format cannot keep, or has an unsuitable width.
    """
    form = SERVED_FORMATS[kind]
    form.row_bytes(rows.shape[1])
    if form.row_parameters:
        bits = form.bits
        return quantize_rows(rows, bits, method="minmax" if bits == 8 else method, name=f"table {name!r}")
    bad = ~torch.isfinite(rows) if kind == "fp32" else ~(rows.abs() <= _LARGEST_FP16)
    if bool(bad.any()):
        row, column = (int(i) for i in bad.nonzero()[0])
        raise NumericsError(
            f"row {row}, column {column} is {float(rows[row, column]):g}, which {kind} cannot keep",
            where=f"table {name!r}",
        )
    return rows.to(torch.float16 if kind == "fp16" else torch.float32).contiguous().view(torch.uint8)
