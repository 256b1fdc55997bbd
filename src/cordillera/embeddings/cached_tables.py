"""Embedding tables whose rows are kept in few bits, with a cache of float32 rows for those that matter most.

Almost all rows of a large table are looked up rarely. They are kept in 8, 4 or 16 bits a number, and only the rows
in the cache in 32. A row in the cache takes its many small updates without loss; any other is decoded, updated
in float32 and encoded again, with stochastic rounding, so that updates smaller than a step of its scale are kept on
average instead of vanishing. The optimizer's state stays in float32.

Source: Yang et al. 2020, "Mixed-precision embedding using a cache" (arXiv 2010.11305).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any, Literal

import torch
from torch import Tensor, nn

from cordillera.data.ranking.features import FeatureSpec
from cordillera.embeddings.cache import RowCache
from cordillera.embeddings.dynamic_tables import DynamicTables
from cordillera.embeddings.row_formats import ROW_FORMATS, encode_rows
from cordillera.embeddings.tables import EmbeddingTables, MadeTablesConfig, TablesConfig, draw_rows
from cordillera.errors import DependencyError, NumericsError, TrainingError
from cordillera.kernels.embeddings.cached_rows import FORMATS, WAYS, CachedRows
from cordillera.kernels.embeddings.lookup import Lookup
from cordillera.kernels.embeddings.update import Update, available_backends
from cordillera.kernels.host_memory import on_huge_pages

_CHUNK = 1 << 14  # rows in float32 at a time while tables are made; a multiple of the blocks of torch's generator
_MOST_ROWS = 2**31 - 1


class CachedEmbeddingTables(EmbeddingTables):
    """:class:`EmbeddingTables` with rows in few bits and a cache; the training loop sees no difference.

    There is no ``weight``. Lookups read through the cache and change nothing; ``update`` admits rows, evicts others and
    rounds. With ``rows = "fp32"`` results are those of ``EmbeddingTables`` with the ``numba`` back end, bit for bit,
    whatever the cache. Stochastic rounding depends on the seed of ``generator`` and on table, row, column and step
    alone. ``state_dict`` holds everything that results depend on, the cache included. Arguments are those of
    :class:`EmbeddingTables`; initial rows are drawn and then encoded.

    Attributes:
        payload: All rows as they were last encoded, ``uint8 [R, row bytes]``.
        cache: Lines, tags and counters.
        anchor: An empty parameter that stands for the rows in autograd's graph; ``requires_grad_(False)`` freezes them.
    """

    payload: Tensor
    _seed: Tensor
    _first_rows: Tensor

    def __init__(
        self,
        features: FeatureSpec,
        embedding_dim: int,
        config: TablesConfig,
        *,
        init: float | Literal["uniform_by_rows"] = "uniform_by_rows",
        generator: torch.Generator | None = None,
    ) -> None:
        self.form = ROW_FORMATS[config.rows]
        self.form.row_bytes(embedding_dim)
        obstacle = available_backends()["numba"]
        if obstacle is not None:
            raise DependencyError(obstacle, where=f"tables.rows = {config.rows!r}", remedy="use rows = 'fp32'")
        super().__init__(features, embedding_dim, config, init=init, generator=generator)

    def _make_rows(self, init: float | Literal["uniform_by_rows"], generator: torch.Generator | None) -> None:
        dim, config = self.embedding_dim, self.config
        if self.num_rows > _MOST_ROWS:
            raise NumericsError(
                f"at most {_MOST_ROWS:,} rows fit the cache's tags, got {self.num_rows:,}", where="tables.cache"
            )
        self.anchor = nn.Parameter(torch.empty(0))
        seed = torch.initial_seed() if generator is None else generator.initial_seed()
        self.register_buffer("_seed", torch.tensor(seed & (2**63 - 1)))
        first_rows = torch.tensor(list(self._starts.values()), dtype=torch.int64)
        self.register_buffer("_first_rows", first_rows, persistent=False)
        self.register_buffer(
            "payload", on_huge_pages(torch.empty(self.num_rows, self.form.row_bytes(dim), dtype=torch.uint8))
        )
        for name, start, stop in self._chunks():
            block = torch.empty(stop - start, dim)
            draw_rows(block, self.features.tables[name], init, generator)
            self._encode(name, start, block)
        self.cache = RowCache(self.num_rows, dim, config.cache, config.cache_policy)
        self._make_state(torch.empty(1).expand(self.num_rows, dim))

    @property
    def backend(self) -> str:
        """Name of the kernels in use."""
        return "numba"

    @property
    def _in_graph(self) -> Tensor:
        return self.anchor

    def table(self, name: str) -> Tensor:
        """Return a copy of one table, ``float32 [rows, D]``, read through the cache; writing to it changes nothing."""
        start, rows = self._place_of(name)
        return self._read(start, rows)

    def clear_columns(self, first: int) -> None:
        """Set columns from ``first`` on to zero, as exactly as the rows' format can; refused once rows were updated."""
        if self.step:
            raise TrainingError("columns are cleared before the first update", where="CachedEmbeddingTables")
        for name, start, stop in self._chunks():
            block = self._read(start, stop - start)
            block[:, first:] = 0
            self._encode(name, start, block)

    def memory_bytes(self) -> dict[str, int]:
        """Return the bytes of ``payload`` (codes), ``row_parameters`` (scales, biases), the cache and ``optimizer``.

        Keys of the cache are those of :meth:`RowCache.memory_bytes`, prefixed with ``cache_``.
        """
        parameters = self.num_rows * self.form.row_parameters
        return {
            "payload": self.payload.numel() - parameters,
            "row_parameters": parameters,
            **{f"cache_{name}": count for name, count in self.cache.memory_bytes().items()},
            "optimizer": sum(tensor.numel() * tensor.element_size() for tensor in self._state().values()),
        }

    def extra_repr(self) -> str:
        """Describe the tables for ``repr``."""
        config = self.config
        rows = f"rows={config.rows}, rounding={config.rounding}"
        return f"{super().extra_repr()}, {rows}, cache={config.cache:g} ({config.cache_policy})"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> CachedEmbeddingTables:
        moved = fn(torch.empty(0))
        require_cpu(self.config, moved.device)
        if moved.dtype != torch.float32:
            raise DependencyError(
                f"optimizer and cache compute in float32, not {moved.dtype}", where="CachedEmbeddingTables"
            )
        super()._apply(fn, recurse)
        return self

    def _chunks(self) -> Iterator[tuple[str, int, int]]:
        """Table, first row and end of pieces that are small beside the tables."""
        for name, rows in self.features.tables.items():
            for first in range(0, rows, _CHUNK):
                yield name, self._starts[name] + first, self._starts[name] + min(rows, first + _CHUNK)

    def _encode(self, name: str, start: int, block: Tensor) -> None:
        self.payload[start : start + len(block)] = encode_rows(
            block,
            self.form,
            rounding=self.config.rounding,
            seed=int(self._seed),
            table=list(self._starts).index(name),
            first_row=start - self._starts[name],
            name=name,
        )

    def _read(self, start: int, rows: int) -> Tensor:
        kernels, support = _kernels("lookup"), import_module("cordillera.kernels.numba_support")
        block = torch.empty(rows, self.embedding_dim)
        threads = support.threads_for(block.numel())
        with support.pool(threads):
            kernels.read_rows(
                FORMATS[self.form.name],
                self.payload.numpy(),
                self.cache.lines.numpy(),
                self.cache.tags.view(-1, WAYS).numpy(),
                start,
                block.numpy(),
                threads,
            )
        return block

    def _store(self) -> CachedRows:
        cache, config = self.cache, self.config
        return CachedRows(
            config.rows,
            config.rounding,
            config.cache_policy,
            self.embedding_dim,
            self.payload,
            cache.lines,
            cache.tags,
            cache.ranks,
            cache.states,
            cache.counts,
            cache.events,
            self._first_rows,
            int(self._seed),
        )

    def _look_up(
        self, values: Tensor, offsets: Tensor | None, value_weights: Tensor | None, dtype: torch.dtype
    ) -> Lookup:
        found: Lookup = _kernels("lookup").lookup(
            self._store(), values, offsets, value_weights, self._first_row, self._num_rows, dtype
        )
        return found

    def _apply_gradients(self, merged: Any, learning_rate: float) -> None:
        grad = merged.grad if merged.grad.dim() == 3 else merged.grad.unsqueeze(1)
        call = Update(
            self.config,
            self.anchor.detach(),
            self._state(),
            merged.rows,
            merged.offsets,
            grad.detach(),
            merged.value_weights,
            learning_rate,
            self.step,
        )
        bad = _kernels("update").update(self._store(), call)
        self.cache.age(self.step)
        if bad is not None:
            raise self._refused(bad.row, bad.gradient)

    def _refused(self, row: int, gradient: bool) -> Exception:
        name = max((name for name, start in self._starts.items() if start <= row), key=lambda name: self._starts[name])
        where = f"row {row - self._starts[name]} of table {name!r}, update {self.step}"
        if gradient:
            return TrainingError(
                "its gradient is not finite; the row was left as it was",
                where=where,
                remedy="lower training.learning_rate or tables.learning_rate; the last checkpoint is intact",
            )
        return NumericsError(
            f"its new numbers are not finite, or too large for {self.form.name} rows; the row was left as it was",
            where=where,
            remedy="lower tables.learning_rate, or choose rows = 'int8' or 'fp32'; the last checkpoint is intact",
        )


def _kernels(of: str) -> Any:
    return import_module(f"cordillera.kernels.embeddings.numba_cached_{of}")  # compiled where they are first used


def require_cpu(config: TablesConfig, device: torch.device) -> None:
    """Refuse to put tables whose rows are in few bits, behind a cache or dynamic on a device other than a CPU."""
    if config.dynamic is not None and device.type != "cpu":
        raise DependencyError(
            f"rows that are made when ids appear are kept on CPUs, not on {str(device)!r}",
            where="tables.dynamic",
            remedy="set device = 'cpu', or leave out tables.dynamic",
        )
    if config.are_encoded and device.type != "cpu":
        raise DependencyError(
            f"rows = {config.rows!r} with cache = {config.cache:g} is kept on CPUs, not on {str(device)!r}",
            where="tables",
            remedy="set device = 'cpu', or rows = 'fp32' and cache = 0",
        )


def make_tables(
    features: FeatureSpec,
    embedding_dim: int,
    config: TablesConfig,
    *,
    init: float | Literal["uniform_by_rows"] = "uniform_by_rows",
    generator: torch.Generator | None = None,
) -> EmbeddingTables:
    """Create the tables of a configuration; see their classes for the arguments and errors.

    Raises:
        DependencyError: If rows are stored in a file; pass a ``MadeTablesConfig`` that knows the folder.
    """
    if isinstance(config, MadeTablesConfig):
        return config.make(features, embedding_dim, config.plain, init=init, generator=generator)
    if config.storage == "file":
        raise DependencyError(
            "tables in a file are trained, evaluated and used for predictions, and nothing else",
            where="tables.storage",
            remedy="train with storage = 'memory' where memory suffices",
        )
    kind: type[EmbeddingTables] = CachedEmbeddingTables if config.are_encoded else EmbeddingTables
    if config.dynamic is not None:
        kind = DynamicTables
    return kind(features, embedding_dim, config, init=init, generator=generator)
