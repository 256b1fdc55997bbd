"""Embedding tables that live in one flat weight, are looked up together and updated by one fused exact kernel.

No dense gradient is ever made. The backward pass only keeps the gradient of the output; ``update`` then reduces it to
one gradient per distinct row and applies the optimizer to these rows, in place
(``cordillera.kernels.embeddings.update``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import torch
from pydantic import ConfigDict, Field, model_validator
from torch import Tensor, nn

from cordillera.data.ranking.features import ANY_ID, FeatureSpec
from cordillera.embeddings.cache import CachePolicy
from cordillera.embeddings.dynamic_ids import DynamicRowsConfig
from cordillera.embeddings.gradients.pending import PendingGradient, merge_pending, with_l2
from cordillera.embeddings.row_formats import RowKind, RowRounding
from cordillera.errors import CheckpointError, DataError, TrainingError
from cordillera.jagged import JaggedBatch
from cordillera.kernels.embeddings.lookup import Lookup, embedding_bag
from cordillera.kernels.embeddings.update import (
    EmbeddingBackend,
    SparseOptimizer,
    choose_backend,
    init_state,
    sparse_update,
    sum_by_row,
)
from cordillera.kernels.host_memory import on_huge_pages


class TablesConfig(SparseOptimizer):
    """Storage and update of embedding tables: the recipe's ``[tables]`` section.

    Attributes:
        backend: Kernels to use; ``auto`` takes the fastest that is installed (see ``sparse_update``). Rows in few bits
            and caches have kernels of their own, ``numba``.
        rows: Storage format of rows: ``fp32``, ``fp16``, ``int8`` or ``int4``. Formats other than ``fp32`` need a CPU.
        rounding: Rounding of updated rows to the storage format: ``stochastic`` is right on average, ``nearest`` loses
            changes of less than half a step.
        cache: Share of the rows that a cache keeps in float32; 0 for no cache.
        cache_policy: Rows that the cache keeps: those updated most often (``lfu``) or last (``lru``).
        storage: Place of rows and optimizer state: ``memory``, or ``file``, a file in the run's folder of which
            ``cache``, above 0, is in memory (``FileTables``).
        l2: Factor of L2 regularisation by occurrences: the loss gains ``l2 / 2`` times the squares of the numbers of
            every looked-up row, summed over all of a batch's ids, those of lists one by one, and divided by the number
            of its samples. A row that a batch of ``B`` samples holds ``n`` times thus has ``G += l2 * n / B * w``
            before the rule, in proportion to how often it occurs, whereas ``weight_decay`` adds ``weight_decay * w``
            once in each step, however often. Not for rows in few bits, behind a cache, in a file or of several
            processes.
        dynamic: Section ``[tables.dynamic]``: admission and eviction of rows that are made when their ids appear
            (``DynamicTables``). None for tables of fixed size.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    backend: EmbeddingBackend = "auto"
    rows: RowKind = "fp32"
    rounding: RowRounding = "stochastic"
    cache: float = Field(0.0, ge=0, le=1, allow_inf_nan=False)
    cache_policy: CachePolicy = "lfu"
    storage: Literal["memory", "file"] = "memory"
    l2: float = Field(0.0, ge=0, allow_inf_nan=False)
    dynamic: DynamicRowsConfig | None = None

    @property
    def are_encoded(self) -> bool:
        """Whether rows are kept in few bits or behind a cache (``CachedEmbeddingTables``)."""
        return self.rows != "fp32" or self.cache > 0

    @model_validator(mode="after")
    def _has_kernels(self) -> TablesConfig:
        if self.are_encoded and self.backend not in ("auto", "numba"):
            raise ValueError(
                f"backend {self.backend!r} has no kernels for rows = {self.rows!r} with cache = {self.cache:g}; use "
                "backend = 'auto'"
            )
        if self.storage == "file" and (self.rows != "fp32" or self.cache <= 0):
            raise ValueError("rows in a file are in float32 behind a cache in memory: set rows = 'fp32' and cache > 0")
        if self.l2 and (self.are_encoded or self.storage == "file"):
            raise ValueError(
                "l2 is for rows in float32 in memory, without a cache: set rows = 'fp32', cache = 0 and storage = "
                "'memory', or use weight_decay"
            )
        if self.dynamic is not None and (self.are_encoded or self.storage == "file"):
            raise ValueError(
                "rows that are made when ids appear are in float32 in memory, without a cache: set rows = 'fp32', "
                "cache = 0 and storage = 'memory', or leave out dynamic"
            )
        return self


class TableBox(NamedTuple):
    """Part of a table's weight, or of its optimizer's state, that a process holds.

    Attributes:
        name: Name of the weight or state, and of the table: ``weight.TABLE``.
        offsets: First row, and for a matrix first column.
        values: The rows themselves, ``float32``; writing to them writes to the table.
        is_first: Whether no process of lower rank holds a copy.
    """

    name: str
    offsets: tuple[int, ...]
    values: Tensor
    is_first: bool = True


class _KeepGradient(torch.autograd.Function):
    """Gives a lookup's output a place in the graph; the backward pass keeps the gradient and passes none on."""

    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor,
        output: Tensor,
        tables: EmbeddingTables,
        rows: Tensor,
        offsets: Tensor | None,
        value_weights: Tensor | None,
        samples: int,
    ) -> Tensor:
        ctx.tables, ctx.lookup, ctx.samples = tables, (rows, offsets, value_weights), samples
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:
        if torch.is_grad_enabled():  # create_graph=True: second derivatives would silently lack the tables' part
            raise TrainingError(
                "second derivatives through embedding tables are not supported",
                where="EmbeddingTables",
                remedy="call backward without create_graph",
            )
        rows, offsets, value_weights = ctx.lookup
        ctx.tables._pending.append(PendingGradient(rows, offsets, value_weights, grad, ctx.samples))
        return (None,) * 7


class EmbeddingTables(nn.Module):
    """The embedding tables of a ranking model.

    A training step is ``loss(model(batch)).backward()``, then ``tables.update()``. Several backward passes before an
    update count as one larger batch: their gradients are reduced together and every row is updated once.
    ``weight.grad`` stays None, so dense optimizers and gradient clipping ignore the tables. Gradients with respect to
    the values' weights and second derivatives are not supported. Gradients are used unscaled: a loss must not be
    scaled (``bfloat16`` needs no scale).

    Attributes:
        weight: All tables, one after another in the order of ``features.tables``, ``float32 [R, D]``.
        step: Number of updates so far.

    Args:
        features: Names, tables and pooling of the sparse features. ``mean`` divides a bag's (weighted) sum by its
            number of values; an empty bag gives zeros.
        embedding_dim: Width ``D`` of a row.
        config: Optimizer and back end. Rows in few bits, behind a cache, in a file, or made when ids appear, are other
            classes: :func:`cordillera.embeddings.cached_tables.make_tables` chooses among them.
        init: ``uniform_by_rows`` draws a table of ``n`` rows from U(-sqrt(1/n), sqrt(1/n)) (Naumov et al. 2019); a
            number is the standard deviation of a normal distribution.
        generator: Source of random numbers. Default: the global one.

    Raises:
        DataError: a feature names an unknown table, a table has no rows or columns, or the configuration is that of
            another class.
        DependencyError: the requested back end cannot be used.
    """

    _first_row: Tensor
    _num_rows: Tensor
    _is_mean: Tensor
    _takes_any_id = False  # whether tables may have the size ANY_ID

    def __init__(
        self,
        features: FeatureSpec,
        embedding_dim: int,
        config: TablesConfig,
        *,
        init: float | Literal["uniform_by_rows"] = "uniform_by_rows",
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        if embedding_dim < 1:
            raise DataError(f"embedding_dim must be at least 1, got {embedding_dim}", where="EmbeddingTables")
        if self.__class__ is EmbeddingTables and (
            config.are_encoded or config.dynamic is not None or config.storage == "file"
        ):
            raise DataError(
                "keeps its rows in float32 in memory, which rows, cache, dynamic and storage = 'file' do not ask for",
                where="EmbeddingTables",
                remedy="call make_tables of cordillera.embeddings.cached_tables, which chooses the class",
            )
        _check_features(features, self._takes_any_id)
        self.features, self.embedding_dim, self.config = features, embedding_dim, config
        self.step = 0
        self._pending: list[PendingGradient] = []
        self._reduced = 0  # number of pending gradients that are already sums of a backward pass
        starts, total = {}, 0
        for table, rows in features.tables.items():
            starts[table] = total
            total += rows
        self._starts, self.num_rows = starts, total
        self._state_names: list[str] = []
        self._make_rows(init, generator)
        first_row = torch.tensor([starts[feature.table] for feature in features.sparse], dtype=torch.int64)
        num_rows = torch.tensor([features.tables[feature.table] for feature in features.sparse], dtype=torch.int64)
        is_mean = torch.tensor([feature.pooling == "mean" for feature in features.sparse], dtype=torch.bool)
        self.register_buffer("_first_row", first_row, persistent=False)
        self.register_buffer("_num_rows", num_rows, persistent=False)
        self.register_buffer("_is_mean", is_mean, persistent=False)
        self._keys = tuple(feature.name for feature in features.sparse)
        self._any_mean = bool(is_mean.any())

    def _make_rows(self, init: float | Literal["uniform_by_rows"], generator: torch.Generator | None) -> None:
        """Make initial rows and the optimizer's state."""
        weight = on_huge_pages(torch.empty(self.num_rows, self.embedding_dim))
        # one table at a time and in place: no second copy of a table's size
        for table, rows in self.features.tables.items():
            start = self._starts[table]
            draw_rows(weight[start : start + rows], rows, init, generator)
        self.weight = nn.Parameter(weight)
        self._make_state(weight)
        # complain now rather than after the first batch; on GPUs, where it is moved, if that is meant
        choose_backend(self.config.backend, self.config, weight, "cuda" if self.config.backend == "triton" else None)

    def _make_state(self, weight: Tensor) -> None:
        for name, tensor in init_state(self.config, weight).items():
            self.register_buffer(name, on_huge_pages(tensor))
            self._state_names.append(name)

    @property
    def backend(self) -> str:
        """Name of the back end in use, after ``auto`` has been resolved for the weight's device and dtype."""
        return choose_backend(self.config.backend, self.config, self.weight)

    @property
    def num_weights(self) -> int:
        """Number of trained values in all tables."""
        return self.num_rows * self.embedding_dim

    @property
    def _in_graph(self) -> Tensor:
        """Tensor that represents the tables in autograd's graph, with the dtype and device of lookups."""
        return self.weight

    @property
    def num_pending(self) -> int:
        """Number of backward passes whose gradients wait for :meth:`update`."""
        return len(self._pending)

    def forward(self, sparse: JaggedBatch) -> Tensor:
        """Look up and pool every feature of a batch, to ``[B, F, D]`` in the dtype of the weight, or in autocast's.

        Args:
            sparse: Ids of the features, in their order. Offsets are trusted: those that are not of the project's own
                data should go through :meth:`~cordillera.jagged.JaggedBatch.validate` first.

        Raises:
            DataError: the keys are not those of the features, ids are not integers, a batch that says ``one_hot`` is
                not, or an id does not lie in its table.
            TrainingError: the values' weights require gradients.
        """
        if tuple(sparse.keys) != self._keys:
            raise DataError(
                f"expected the sparse features {list(self._keys)}, got {list(sparse.keys)}",
                where="EmbeddingTables",
                remedy="encode the data with the run's own encoder",
            )
        if sparse.values.ndim != 1 or sparse.values.dtype not in (torch.int64, torch.int32):
            raise DataError(_not_ids(sparse.values), where="EmbeddingTables")
        if sparse.one_hot and len(sparse.values) != len(sparse.offsets) - 1:
            raise DataError(
                f"one_hot is set, but {len(sparse.offsets) - 1} bags hold {len(sparse.values)} ids",
                where="EmbeddingTables",
            )
        tables = self._in_graph
        device = tables.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else tables.dtype
        if not self._keys:
            return tables.new_empty((0, 0, self.embedding_dim), dtype=dtype)
        if sparse.weights is not None and sparse.weights.requires_grad:
            raise TrainingError(
                "gradients with respect to the values' weights are not supported", where="EmbeddingTables"
            )
        offsets = None if sparse.one_hot else sparse.offsets
        value_weights = self._value_weights(sparse)
        with torch.no_grad():
            output, rows, misplaced = self._look_up(sparse.values, offsets, value_weights, dtype)
        if misplaced >= 0:
            raise self._misplaced(sparse, misplaced)
        if torch.is_grad_enabled() and tables.requires_grad:
            output = _KeepGradient.apply(tables, output, self, rows, offsets, value_weights, sparse.batch_size)
        return output

    def unpooled(self, feature: str, ids: Tensor) -> Tensor:
        """Look up one row for each id, ``[T, D]`` in the dtype of a forward pass; differentiable as a forward pass is.

        Args:
            feature: A sparse feature.
            ids: Ids of its table, integers ``[T]``.

        Raises:
            DataError: There is no such feature, ids are not integers, an id does not lie in its table, or these tables
                give sums of bags only: those that are trained in few bits, behind a cache, in a file, dynamic, or of
                several processes.
        """
        if feature not in self._keys:
            raise DataError(f"no sparse feature {feature!r}", where="EmbeddingTables", remedy=f"one of {self._keys}")
        if ids.ndim != 1 or ids.dtype not in (torch.int64, torch.int32):
            raise DataError(_not_ids(ids), where=f"feature {feature!r}")
        place = self._keys.index(feature)
        tables, own = self._in_graph, slice(place, place + 1)
        device = tables.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else tables.dtype
        with torch.no_grad():
            output, rows, misplaced = self._unpooled(own, ids, dtype)
        if misplaced >= 0:
            of_feature = JaggedBatch((feature,), ids, torch.arange(ids.numel() + 1), one_hot=True)
            raise self._misplaced(of_feature, misplaced)
        if torch.is_grad_enabled() and tables.requires_grad:
            output = _KeepGradient.apply(tables, output, self, rows, None, None, 0)
        return output[:, 0]

    def _unpooled(self, own: slice, ids: Tensor, dtype: torch.dtype) -> Lookup:
        if type(self) is not EmbeddingTables:
            raise DataError(
                f"the model reads rows of histories, and {type(self).__name__} gives sums of bags",
                where="tables",
                remedy="rows = 'fp32', cache = 0, storage = 'memory', no tables.dynamic, and one process",
            )
        first_row, num_rows = self._first_row[own], self._num_rows[own]
        return embedding_bag(self.weight, ids, None, None, first_row, num_rows, dtype=dtype, backend=self.backend)

    def _look_up(
        self, values: Tensor, offsets: Tensor | None, value_weights: Tensor | None, dtype: torch.dtype
    ) -> Lookup:
        return embedding_bag(
            self.weight,
            values,
            offsets,
            value_weights,
            self._first_row,
            self._num_rows,
            dtype=dtype,
            backend=self.backend,
        )

    @property
    def _is_read_directly(self) -> bool:
        """Whether a backward pass has put a gradient into ``weight``, which tables elsewhere than in memory lack."""
        weight = self._parameters.get("weight")
        return weight is not None and weight.grad is not None

    def update(self, learning_rate_scale: float = 1.0) -> None:
        """Apply pending gradients, once per distinct row, with the learning rate times ``learning_rate_scale``.

        Raises:
            TrainingError: If a model read ``weight`` itself, whose gradient nothing would apply.
        """
        if self._is_read_directly:
            raise TrainingError(
                "a model has read weight itself, and its gradient would be lost",
                where="EmbeddingTables",
                remedy="look rows up by calling the tables, or by unpooled(feature, ids)",
            )
        pending, self._pending, self._reduced = self._pending, [], 0
        if not pending:
            return
        self.step += 1
        self._apply_gradients(merge_pending(pending), self.config.learning_rate * learning_rate_scale)

    def _apply_gradients(self, merged: PendingGradient, learning_rate: float) -> None:
        if self.config.l2:
            merged = with_l2(merged, self.weight.detach(), self.config.l2)
        sparse_update(
            self.config,
            self.weight.detach(),
            self._state(),
            merged.rows,
            merged.offsets,
            merged.grad,
            merged.value_weights,
            learning_rate=learning_rate,
            step=self.step,
            backend=self.config.backend,
        )

    def _state(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in self._state_names}

    def reduce_pending(self) -> None:
        """Sum the gradients of the last backward pass to one of each distinct row, rounded to float32; on CPUs.

        Gradients of several backward passes are then added in their order by :meth:`update`, however many occurrences
        of a row each of them has.

        Raises:
            TrainingError: ``config.l2`` is not 0: these sums do not contain how often a row occurred.
        """
        if self.config.l2:
            raise TrainingError("needs all occurrences of a row at once", where="tables.l2", remedy="set it to 0")
        if len(self._pending) == self._reduced:
            return
        one = merge_pending(self._pending[self._reduced :])
        del self._pending[self._reduced :]
        self._reduced += 1
        distinct, summed = sum_by_row(one.rows, one.offsets, one.grad, one.value_weights, self.num_rows, torch.float32)
        self._pending.append(PendingGradient(distinct, None, None, summed.unsqueeze(1)))

    def pending_rows(self) -> Tensor:
        """Return the rows that the next :meth:`update` changes: int64, distinct, ascending."""
        if not self._pending:
            return torch.empty(0, dtype=torch.int64, device=self._in_graph.device)
        return torch.cat([item.rows.to(torch.int64) for item in self._pending]).unique()

    def discard(self) -> None:
        """Discard the gradients that wait for :meth:`update`."""
        self._pending, self._reduced = [], 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard the gradients that wait for :meth:`update`, whatever ``set_to_none`` is.

        ``zero_grad`` of a model around the tables, or of an optimizer, does not.
        """
        self.discard()

    def table(self, name: str) -> Tensor:
        """Return one table, a view ``[rows, D]`` of ``weight`` outside the graph; writing to it writes to the table.

        Raises:
            DataError: there is no such table.
        """
        start, rows = self._place_of(name)
        return self.weight.detach()[start : start + rows]

    def clear_columns(self, first: int) -> None:
        """Set the columns from ``first`` on to zero, in all rows."""
        self.weight.detach()[:, first:] = 0

    def memory_bytes(self) -> dict[str, int]:
        """Return the bytes of the ``rows`` and of the ``optimizer`` state."""
        return {"rows": _bytes(self.weight), "optimizer": sum(map(_bytes, self._state().values()))}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the weight and of every state of each whole table, by the names of boxes."""
        empty = torch.empty(0, self.embedding_dim)
        stored = {"weight": empty, **init_state(self.config, empty)}
        return {
            f"{name}.{table}": (rows, *tensor.shape[1:])
            for name, tensor in stored.items()
            for table, rows in self.features.tables.items()
        }

    def boxes(self) -> Iterator[TableBox]:
        """Iterate over what this process holds of every table; of several processes, all call it together."""
        for name, tensor in {"weight": self.weight.detach(), **self._state()}.items():
            for table, rows in self.features.tables.items():
                start = self._starts[table]
                values = tensor[start : start + rows]
                yield TableBox(f"{name}.{table}", (0,) * tensor.dim(), values)

    def _place_of(self, name: str) -> tuple[int, int]:
        """First row and number of rows of a table."""
        if name not in self._starts:
            raise DataError(f"no table {name!r}", where="EmbeddingTables", remedy=f"one of {list(self._starts)}")
        return self._starts[name], self.features.tables[name]

    def get_extra_state(self) -> Tensor:
        """Return the step count, for ``state_dict``."""
        return torch.tensor(self.step, dtype=torch.int64)

    def set_extra_state(self, state: Any) -> None:
        """Restore the step count from a state dict.

        Raises:
            CheckpointError: the count is negative.
        """
        step = int(state)
        if step < 0:
            raise CheckpointError(f"the step count must be at least 0, got {step}", where="EmbeddingTables")
        self.step = step

    def extra_repr(self) -> str:
        """Describe the tables for ``repr``."""
        return (
            f"{len(self.features.tables)} tables, {self.num_rows} rows of {self.embedding_dim}, "
            f"{len(self._keys)} features, optimizer={self.config.name}, backend={self.config.backend}"
        )

    def _value_weights(self, sparse: JaggedBatch) -> Tensor | None:
        if sparse.one_hot or not self._any_mean:  # the mean of one value is the value
            return sparse.weights
        lengths = sparse.lengths.to(torch.int64)
        divisors = lengths.view(len(self._keys), -1).clamp(min=1).masked_fill(~self._is_mean.unsqueeze(1), 1)
        shares = divisors.view(-1).to(self._in_graph.dtype).reciprocal()
        shares = torch.repeat_interleave(shares, lengths, output_size=sparse.values.numel())
        return shares if sparse.weights is None else shares * sparse.weights

    def _misplaced(self, sparse: JaggedBatch, position: int) -> DataError:
        batch = sparse.batch_size
        bag = int(torch.searchsorted(sparse.offsets, position, right=True)) - 1
        feature = self.features.sparse[self._keys.index(sparse.keys[bag // batch])]
        rows = self.features.tables[feature.table]
        return DataError(
            f"id {int(sparse.values[position])} of sample {bag % batch} does not lie in table {feature.table!r}, "
            f"which has rows 0 to {rows - 1}",
            where=f"feature {feature.name!r}",
            remedy="encode the data with the run's own encoder, or enlarge num_embeddings",
        )


def _not_ids(ids: Tensor) -> str:
    return f"ids must be int64 or int32 [T], got {ids.dtype} of shape {list(ids.shape)}"


def draw_rows(
    block: Tensor, table_rows: int, init: float | Literal["uniform_by_rows"], generator: torch.Generator | None
) -> None:
    """Draw rows of a table of ``table_rows`` into ``block``, by ``init`` and ``generator``, None for the global one."""
    if init == "uniform_by_rows":
        bound = math.sqrt(1 / table_rows)
        block.uniform_(-bound, bound, generator=generator)
    else:
        block.normal_(0.0, init, generator=generator)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _check_features(features: FeatureSpec, any_id: bool) -> None:
    for table, rows in features.tables.items():
        if rows == ANY_ID and not any_id:
            raise DataError(
                "its ids are any numbers of 63 bits, and a table of fixed size has a row for each",
                where=f"table {table!r}",
                remedy="give its features num_embeddings, or set tables.dynamic",
            )
        if rows < 1:
            raise DataError(f"a table needs at least one row, got {rows}", where=f"table {table!r}")
    for feature in features.sparse:
        if feature.table not in features.tables:
            raise DataError(
                f"its table {feature.table!r} is not among {list(features.tables)}", where=f"feature {feature.name!r}"
            )


class OutlinedTables(EmbeddingTables):
    """Tables without data, to count the operations of a model; lookups return zeros."""

    def _make_rows(self, init: float | Literal["uniform_by_rows"], generator: torch.Generator | None) -> None:
        self.anchor = nn.Parameter(torch.empty(0))

    @property
    def _in_graph(self) -> Tensor:
        return self.anchor

    def forward(self, sparse: JaggedBatch) -> Tensor:
        """Return zeros ``float32 [B, F, D]``."""
        return torch.zeros(sparse.batch_size, len(self._keys), self.embedding_dim)

    def unpooled(self, feature: str, ids: Tensor) -> Tensor:
        """Return zeros ``float32 [T, D]`` for the ``ids`` of a ``feature``."""
        return torch.zeros(ids.numel(), self.embedding_dim)

    def clear_columns(self, first: int) -> None:
        """Do nothing: there are no rows."""


class MadeTablesConfig(TablesConfig):
    """Configuration of a model's tables with the function that makes them in place of the tables of one process.

    Attributes:
        make: Function that is called as :func:`~cordillera.embeddings.cached_tables.make_tables`, with a configuration
            that does not name it. It draws as many random numbers as the tables of one process, so that the rest of the
            model is initialised alike.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    make: Callable[..., EmbeddingTables]

    @classmethod
    def of(cls, config: TablesConfig, make: Callable[..., EmbeddingTables]) -> MadeTablesConfig:
        """Return ``config`` with a function ``make``."""
        return cls(**config.model_dump(), make=make)

    @property
    def plain(self) -> TablesConfig:
        """Configuration without the function."""
        return TablesConfig(**self.model_dump(exclude={"make"}))
