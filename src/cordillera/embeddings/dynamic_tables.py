"""Embedding tables that grow with their ids: any 64-bit id, no collisions, the kernels of static tables.

A :class:`~cordillera.embeddings.dynamic_ids.IdMap` gives every id a row; the rows of all tables lie in one flat weight
in the order in which their ids were admitted, and are looked up and updated as those of
:class:`~cordillera.embeddings.tables.EmbeddingTables` are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from cordillera.data.ranking.features import ANY_ID, FeatureSpec
from cordillera.embeddings.dynamic_ids import DynamicRowsConfig, IdMap
from cordillera.embeddings.table_deltas import TableDelta
from cordillera.embeddings.tables import EmbeddingTables, TablesConfig
from cordillera.errors import CheckpointError, DataError, DependencyError, TrainingError
from cordillera.kernels.embeddings.lookup import Lookup, embedding_bag
from cordillera.kernels.embeddings.update import available_backends
from cordillera.kernels.host_memory import on_huge_pages

_MOST_RESERVED = 1 << 20  # rows of a table for which memory is reserved
_IDS = "ids."  # prefix of the map's tensors in a state dict


class DynamicTables(EmbeddingTables):
    """:class:`EmbeddingTables` for ids of any value, whose rows are made when ids are admitted.

    Lookups in training mode count ids and admit them; lookups in evaluation mode change nothing. An id without a row
    reads and trains the shared row of its table, which begins with zeros. An id's initial row depends on the seed of
    ``generator``, on the table and on the id alone, so it does not depend on the order of arrival, and a row that is
    evicted and admitted again begins anew. Updates are those of ``EmbeddingTables``, bit for bit. ``update`` evicts
    every ``dynamic.evict_every`` updates. Rows looked up two or more updates ago may have been evicted, so a backward
    pass must not wait longer than one update.

    Weight and optimizer state double when they are full, which copies them once; ``memory_bytes`` counts what is
    reserved. ``state_dict`` holds the rows in use, the ids with their counts, and the evicted ids.

    Attributes:
        weight: Rows of all tables, ``float32 [capacity, D]``; first the shared rows in the order of the tables.
        ids: Map from ids to rows.
        seed: Seed of initial rows, ``int64 []``.
        dynamic: Admission and eviction.

    Args:
        features: Names, tables and pooling of the sparse features. The size of a table is the ``n`` of
            ``uniform_by_rows``, and memory is reserved for as many ids, up to a million; it is no limit.
        embedding_dim: Width ``D`` of a row.
        config: Optimizer, back end, and ``dynamic``: admission and eviction. None for every id at its first occurrence,
            for ever.
        init: ``uniform_by_rows`` or a standard deviation, as in ``EmbeddingTables``.
        generator: Source of the seed. Default: the global one.

    Raises:
        DataError: A feature names an unknown table, a table has no rows, or ``uniform_by_rows`` is to divide by the
            rows of a table of any ids.
        DependencyError: Numba is missing, rows are in few bits or behind a cache, or the device is not a CPU.
    """

    seed: Tensor
    _takes_any_id = True

    def __init__(
        self,
        features: FeatureSpec,
        embedding_dim: int,
        config: TablesConfig,
        *,
        init: float | Literal["uniform_by_rows"] = "uniform_by_rows",
        generator: torch.Generator | None = None,
    ) -> None:
        obstacle = available_backends()["numba"]
        if obstacle is not None or config.are_encoded:
            raise DependencyError(
                obstacle or "rows that grow are kept in float32, without a cache",
                where="DynamicTables",
                remedy="use static tables" if obstacle else "use rows = 'fp32' and cache = 0",
            )
        endless = [name for name, rows in features.tables.items() if rows == ANY_ID]
        if endless and init == "uniform_by_rows":
            raise DataError(
                f"'uniform_by_rows' needs the number of ids of table {endless[0]!r}, which has no num_embeddings",
                where="model.embedding_init",
                remedy="set a standard deviation, such as 0.05, or num_embeddings",
            )
        self.dynamic = config.dynamic or DynamicRowsConfig()
        kept = {name: min(rows, _MOST_RESERVED) for name, rows in features.tables.items()}
        self._sizes = features.tables
        super().__init__(replace(features, tables=kept), embedding_dim, config, init=init, generator=generator)

    def _make_rows(self, init: float | Literal["uniform_by_rows"], generator: torch.Generator | None) -> None:
        sizes = self._sizes
        self._normal, self._columns = init != "uniform_by_rows", self.embedding_dim
        self._scales = np.array(
            [math.sqrt(1 / rows) if init == "uniform_by_rows" else init for rows in sizes.values()], np.float64
        )
        seed = torch.initial_seed() if generator is None else generator.initial_seed()
        self.register_buffer("seed", torch.tensor(seed & (2**63 - 1)))
        tables = max(1, len(sizes))
        self._stamped: list[Tensor] = []  # rows looked up, and stamped, since the last update
        self.ids = IdMap(tables, self.dynamic, capacity=tables + self.num_rows)
        weight = on_huge_pages(torch.zeros(self.ids.capacity, self.embedding_dim))
        self.weight = nn.Parameter(weight)
        self._make_state(weight)
        self._table_of = torch.tensor([list(sizes).index(feature.table) for feature in self.features.sparse])
        self._no_starts = torch.zeros(len(self.features.sparse), dtype=torch.int64)
        self.num_rows = self.ids.num_rows
        _ = self.backend  # raise errors now rather than after the first batch

    def _look_up(
        self, values: Tensor, offsets: Tensor | None, value_weights: Tensor | None, dtype: torch.dtype
    ) -> Lookup:
        count = len(self.features.sparse)
        bags = values.numel() if offsets is None else offsets.numel() - 1
        bounds = torch.arange(count + 1) * (bags // count)
        if offsets is not None:
            bounds = offsets[bounds].to(torch.int64)
        if not values.numel():
            rows = torch.empty(0, dtype=torch.int64)
        elif self.training:
            self.ids.clock = self.step
            rows, new = self.ids.find_or_insert(values, bounds, self._table_of)
            self._begin_rows(new)
        else:
            rows = self.ids.find(values, bounds, self._table_of, shared=True)
        limits = torch.full_like(self._no_starts, self.weight.shape[0])
        found = embedding_bag(
            self.weight,
            rows,
            offsets,
            value_weights,
            self._no_starts,
            limits,
            dtype=dtype,
            backend=self.backend,
        )
        if self.training:
            self._stamped = [*self._stamped[-1:], found.rows]  # one or several is all that matters
        return found

    def _begin_rows(self, new: Tensor) -> None:
        """Make room for all rows, and give new rows their initial values and state."""
        if self.ids.capacity > self.weight.shape[0]:
            self._resize(self.ids.capacity)
        if not new.numel():
            return
        self.num_rows = self.ids.num_rows
        from cordillera.kernels.embeddings.numba_id_map import draw_new_rows  # Numba is loaded only where it is used

        draw_new_rows(
            self.weight.detach().numpy(),
            new.numpy(),
            self.ids._row_ids,
            self.ids._row_tables,
            int(self.seed),
            self._scales,
            self._normal,
            self._columns,
        )
        for tensor in self._state().values():
            tensor.numpy()[new.numpy()] = self.config.initial_accumulator if self.config.name != "adam" else 0.0

    def _resize(self, capacity: int) -> None:
        """Change the number of rows in memory; rows that are lost must not be in use."""

        def resized(tensor: Tensor) -> Tensor:
            larger = on_huge_pages(torch.zeros((capacity, *tensor.shape[1:]), dtype=tensor.dtype))
            kept = min(capacity, tensor.shape[0])
            larger[:kept] = tensor[:kept]
            return larger

        self.weight.data = resized(self.weight.detach())
        for name, tensor in self._state().items():
            setattr(self, name, resized(tensor))

    def _apply_gradients(self, merged: Any, learning_rate: float) -> None:
        super()._apply_gradients(merged, learning_rate)
        self.ids.clock = self.step
        stamped, self._stamped = self._stamped, []
        if len(stamped) != 1 or stamped[0].data_ptr() != merged.rows.data_ptr():  # looked up before the last update
            self.ids.touch(merged.rows)
        if self.step % self.dynamic.evict_every == 0:
            self.evict()

    def evict(self) -> int:
        """Drop the rows and counts that ``dynamic`` lets go, and return the number of rows dropped.

        ``update`` calls it every ``dynamic.evict_every`` updates. Rows that the last update used stay.

        Raises:
            TrainingError: Gradients wait for ``update``.
        """
        if self._pending:
            raise TrainingError("gradients wait for an update", where="DynamicTables", remedy="call update() first")
        self.ids.clock = self.step
        rows = self.ids.evict()
        self.weight.detach()[rows] = 0.0
        for tensor in self._state().values():
            tensor[rows] = 0.0
        self.num_rows = self.ids.num_rows
        return rows.numel()

    def table(self, name: str) -> Tensor:
        """Return a copy of the rows of one table, ``[N, D]``, in the order of :meth:`ids_of`.

        Raises:
            DataError: There is no such table.
        """
        self._place_of(name)
        return self.weight.detach()[self.ids.ids_of(list(self._starts).index(name))[1]]

    def shared_row(self, name: str) -> Tensor:
        """Return a copy of the row ``[D]`` that the other ids of one table share.

        Raises:
            DataError: There is no such table.
        """
        self._place_of(name)
        return self.weight.detach()[list(self._starts).index(name)].clone()

    def ids_of(self, name: str) -> Tensor:
        """Return the ids of one table that have a row of their own, ``int64 [N]``, in the order of their rows.

        Raises:
            DataError: There is no such table.
        """
        self._place_of(name)
        return self.ids.ids_of(list(self._starts).index(name))[0]

    def clear_columns(self, first: int) -> None:
        """Set the columns from ``first`` on to zero, in all rows and in rows that are made later."""
        self._columns = min(self._columns, first)
        super().clear_columns(first)

    def memory_bytes(self) -> dict[str, int]:
        """Return the bytes of ``rows``, of the ``optimizer`` state, and of the ids, with keys prefixed by ``ids_``."""
        return {**super().memory_bytes(), **{f"ids_{name}": count for name, count in self.ids.memory_bytes().items()}}

    def delta(self, since: int) -> TableDelta:
        """Return what changed after update ``since``: rows with their ids and state, counts, and evicted ids.

        Raises:
            CheckpointError: ``since`` lies in the future, or evicted ids are not kept that long.
            TrainingError: Gradients wait for ``update``.
        """
        if self._pending:
            raise TrainingError("gradients wait for an update", where="DynamicTables", remedy="call update() first")
        self.ids.clock = self.step
        tensors = self.ids.changes(since)
        rows = tensors["rows"]
        for name, tensor in {"weight": self.weight.detach(), **self._state()}.items():
            tensors[name] = tensor[rows]
        return TableDelta(since, self.step, self._identity(), tensors)

    def apply_delta(self, delta: TableDelta) -> None:
        """Bring tables at update ``delta.base`` to update ``delta.version``, bit for bit, evicted rows included.

        Raises:
            CheckpointError: The tables are at another update or are other tables, or the changes contradict
                themselves; the tables are then as they were.
        """
        if delta.base != self.step or delta.version < delta.base or self._pending:
            raise CheckpointError(
                f"changes lead from update {delta.base} to {delta.version}, the tables are at update {self.step}",
                where="DynamicTables",
                remedy="apply deltas in the order in which they were made, without gaps",
            )
        if delta.identity != self._identity():
            raise CheckpointError(
                f"changes are of tables {delta.identity}, these are {self._identity()}", where="DynamicTables"
            )
        own = {"weight": self.weight.detach(), **self._state()}
        for name, tensor in own.items():
            given, count = delta.tensors.get(name), delta.tensors["rows"].numel() if "rows" in delta.tensors else 0
            if given is None or given.shape != (count, *tensor.shape[1:]) or given.dtype != tensor.dtype:
                raise CheckpointError(f"{name} of the changed rows is missing or misshapen", where="DynamicTables")
        self.ids.clock = self.step
        self.ids.load(self.ids.changed(delta.tensors, delta.base))
        self.ids.clock = self.step = delta.version
        self._begin_rows(torch.empty(0, dtype=torch.int64))
        free = self.ids._free
        for name, tensor in {"weight": self.weight.detach(), **self._state()}.items():
            tensor[delta.tensors["rows"]] = delta.tensors[name]
            tensor[free] = 0.0
        self.num_rows = self.ids.num_rows

    def _identity(self) -> dict[str, Any]:
        return {
            "tables": list(self.features.tables),
            "embedding_dim": self.embedding_dim,
            "optimizer": self.config.name,
            "seed": int(self.seed),
        }

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        used = self.ids.used
        for name in ("weight", *self._state_names):
            destination[prefix + name] = destination[prefix + name][:used]
        for name, tensor in self.ids.state().items():
            destination[prefix + _IDS + name] = tensor

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing: Any,
        unexpected: Any,
        errors: Any,
    ) -> None:
        state = {
            name: state_dict[prefix + _IDS + name] for name in self.ids.state() if prefix + _IDS + name in state_dict
        }
        own = {name: state_dict.get(prefix + name) for name in ("weight", *self._state_names)}
        used = state["row_ids"].numel() if "row_ids" in state else -1
        for name, tensor in own.items():
            expected = (used, *getattr(self, name).shape[1:])
            if tensor is None or tensor.shape != expected:
                found = "missing" if tensor is None else list(tensor.shape)
                raise CheckpointError(
                    f"{name} must be {list(expected)}, is {found}", where="DynamicTables", remedy="load its own tables"
                )
        self.ids.load(state)
        self._pending = []
        self._resize(used)
        without = {key: value for key, value in state_dict.items() if not key.startswith(prefix + _IDS)}
        super()._load_from_state_dict(without, prefix, local_metadata, strict, missing, unexpected, errors)
        self._resize(self.ids.capacity)
        self.num_rows = self.ids.num_rows

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> DynamicTables:
        moved = fn(torch.empty(0))
        if moved.device.type != "cpu" or moved.dtype != torch.float32:
            raise DependencyError(
                f"rows that grow are kept in float32 on a CPU, not in {moved.dtype} on {moved.device}",
                where="DynamicTables",
            )
        super()._apply(fn, recurse)
        return self

    def _misplaced(self, sparse: Any, position: int) -> DataError:
        return DataError(f"id {int(sparse.values[position])} was given no row", where="DynamicTables")
