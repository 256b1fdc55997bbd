"""Embedding tables cut over the processes of a job, exact to the tables of one process.

Every rank holds its parts of a :class:`~cordillera.planning.ranking.placement.Placement`, looks up its own samples
through :mod:`cordillera.embeddings.exchange`, and updates each of its rows once per step with the gradients of all
ranks' samples, in the order of ranks. Copies of a part receive each other's gradients and make the same update, so that
they stay equal, bit for bit. Row-wise Adagrad of a row that is cut in columns uses the squares of all its columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from cordillera.data.ranking.features import FeatureSpec
from cordillera.distributed.collectives import Collectives
from cordillera.embeddings.exchange import Chosen, Coder, RowExchange, RowRequest, RowRoutes
from cordillera.embeddings.tables import EmbeddingTables, TablesConfig, draw_rows
from cordillera.errors import DataError, PlanError, TrainingError
from cordillera.jagged import JaggedBatch
from cordillera.kernels.embeddings.lookup import embedding_bag, linearise
from cordillera.kernels.embeddings.update import SparseOptimizer, choose_backend, init_state, sparse_update
from cordillera.planning.ranking.placement import Placement

_CHUNK = 1 << 14  # rows that are drawn at a time; a multiple of the blocks of torch's generator
_PLAIN = SparseOptimizer(name="sgd")


class _Asked(NamedTuple):
    """Request for the rows of a batch.

    Attributes:
        values: Values of the batch, by which it is recognised.
        request: Request to the ranks that hold the rows.
        inverse: Position of each value's row in the request, ``int64 [T]``.
        value_weights: Factor of each value, ``[T]``, or None for ones.
    """

    values: Tensor
    request: RowRequest
    inverse: Tensor
    value_weights: Tensor | None


class _Waiting(NamedTuple):
    """Request, bags and output gradient ``[B, F, D]`` of one backward pass, kept for the next update."""

    asked: _Asked
    offsets: Tensor | None
    grad: Tensor


class _Part(NamedTuple):
    """A part that this rank holds: its position in the placement, first row of all tables, and first row in a block."""

    place: int
    first_row: int
    block: int
    start: int


class _KeepRequest(torch.autograd.Function):
    """Gives the output of a lookup a place in the graph; the backward pass keeps its gradient for the update."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        output: Tensor,
        tables: ShardedEmbeddingTables,
        asked: _Asked,
        offsets: Tensor | None,
    ) -> Tensor:
        ctx.tables, ctx.lookup = tables, (asked, offsets)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:
        if torch.is_grad_enabled():
            raise TrainingError(
                "second derivatives through embedding tables are not supported",
                where="ShardedEmbeddingTables",
                remedy="call backward without create_graph",
            )
        asked, offsets = ctx.lookup
        ctx.tables._waiting.append(_Waiting(asked, offsets, grad))
        return (None,) * 5


class ShardedEmbeddingTables(EmbeddingTables):
    """:class:`EmbeddingTables` of which each process holds the parts that a placement gives to it.

    All ranks call :meth:`forward` and :meth:`update` equally often and in the same order; a rank whose data have ended
    passes empty batches. With the same samples over all ranks as one process has in its batch, weights and the
    optimizer's state are those of :class:`EmbeddingTables` up to the rounding of gradients that are sent in float32.
    Two runs are equal, bit for bit. There is no ``weight``.

    Attributes:
        coder: Function that returns the codec in which rows of a part (its position in the placement) travel in
            training; None to send them as they are. Lookups without gradients are always exact.

    Args:
        features: Names, tables and pooling of the sparse features.
        embedding_dim: Width ``D`` of a row.
        config: Optimizer and back end; ``rows`` must be ``fp32`` and ``cache`` 0.
        placement: Placement of all tables of ``features`` over the ranks of ``links``, in memory.
        links: The ranks.
        init: Distribution of initial rows, those of :class:`EmbeddingTables`; every rank draws all rows and keeps its
            own.
        generator: Source of random numbers, equal on every rank. Default: the global one.

    Raises:
        PlanError: If the placement is of other tables or another number of ranks.
        DataError: a feature names an unknown table, or a table has no rows.
    """

    def __init__(
        self,
        features: FeatureSpec,
        embedding_dim: int,
        config: TablesConfig,
        placement: Placement,
        links: Collectives,
        *,
        init: float | Literal["uniform_by_rows"] = "uniform_by_rows",
        generator: torch.Generator | None = None,
    ) -> None:
        shapes = {name: (rows, embedding_dim) for name, rows in features.tables.items()}
        placement.check(shapes, links.size)
        if config.are_encoded:
            raise PlanError(
                "tables over several processes are kept in fp32 and without a cache",
                where="tables",
                remedy="set rows = 'fp32' and cache = 0",
            )
        self.placement, self.links = placement, links
        self.coder: Coder | None = None
        self._asked: list[_Asked] = []
        self._waiting: list[_Waiting] = []
        super().__init__(features, embedding_dim, config, init=init, generator=generator)

    @classmethod
    def of(cls, tables: EmbeddingTables, placement: Placement, links: Collectives) -> ShardedEmbeddingTables:
        """Return tables over the ranks of ``links`` with the rows of ``tables``, which all ranks have drawn equally.

        Raises:
            PlanError: If the placement is of other tables or another number of ranks.
        """
        spare = torch.Generator().manual_seed(0)
        cut = cls(tables.features, tables.embedding_dim, tables.config, placement, links, init=0.0, generator=spare)
        cut._read("rows", tables.weight.detach())
        return cut

    def _make_rows(self, init: float | Literal["uniform_by_rows"], generator: torch.Generator | None) -> None:
        self.anchor = nn.Parameter(torch.empty(0))
        self._routes = RowRoutes(self.placement, self._starts, self.links.rank)
        self._exchange = RowExchange(self._routes, self.links)
        self._parts: dict[int, _Part] = {}
        widths: list[int] = []
        rows: list[int] = []
        for i, part in enumerate(self.placement.parts):
            if self.links.rank not in part.ranks:
                continue
            if part.columns not in widths:
                widths.append(part.columns)
                rows.append(0)
            block = widths.index(part.columns)
            self._parts[i] = _Part(i, self._starts[part.table] + part.first_row, block, rows[block])
            rows[block] += part.rows
        self._blocks = len(widths)
        for block, (width, count) in enumerate(zip(widths, rows, strict=True)):
            weight = torch.empty(count, width)
            self.register_buffer(f"rows_{block}", weight, persistent=False)
            for name, state in init_state(self.config, weight).items():
                self.register_buffer(f"{name}_{block}", state, persistent=False)
        self._draw(init, generator)

    def _draw(self, init: float | Literal["uniform_by_rows"], generator: torch.Generator | None) -> None:
        for table, count in self.features.tables.items():
            for first in range(0, count, _CHUNK):
                drawn = torch.empty(min(_CHUNK, count - first), self.embedding_dim)
                draw_rows(drawn, count, init, generator)
                self._put(self._rows_of, table, first, drawn)

    def _rows_of(self, part: _Part) -> Tensor:
        """Return the weights of a part, ``[rows, columns]``."""
        return self._cut(part, getattr(self, f"rows_{part.block}"))

    def _cut(self, part: _Part, block: Tensor) -> Tensor:
        return block[part.start : part.start + self.placement.parts[part.place].rows]

    def _put(self, of_part: Any, table: str, first: int, values: Tensor) -> None:
        """Copy rows of a table, ``[n, D]`` or ``[n]`` from row ``first`` on, into the parts that this rank holds."""
        for own in self._parts.values():
            part = self.placement.parts[own.place]
            low, high = max(part.first_row, first), min(part.first_row + part.rows, first + len(values))
            if part.table != table or low >= high:
                continue
            given = values[low - first : high - first]
            if given.dim() == 2:
                given = given[:, part.first_column : part.first_column + part.columns]
            of_part(own)[low - part.first_row : high - part.first_row].copy_(given)

    @property
    def backend(self) -> str:
        """Name of the back end in use."""
        return choose_backend(self.config.backend, self.config, self.anchor)

    @property
    def _in_graph(self) -> Tensor:
        return self.anchor

    @property
    def num_pending(self) -> int:
        """Number of backward passes whose gradients wait for :meth:`update`."""
        return len(self._waiting)

    def prefetch(self, sparse: JaggedBatch) -> None:
        """Start to exchange the ids of a batch while something else is computed; :meth:`forward` finds them.

        All ranks call it equally often and in the same order. Every batch is looked up after it, in the same order. Of
        a batch that is given two lookups ahead, no exchange of ids is waited for if :meth:`advance` is called.

        Raises:
            DataError: the keys are not those of the features, or an id does not lie in its table.
        """
        if self._keys:  # models without sparse features look nothing up
            self._asked.append(self._ask(sparse))

    def forget(self) -> None:
        """Discard batches that were prefetched and will not be looked up; all ranks call it together."""
        for asked in self._asked:
            asked.request.wait()
        self._asked = []

    def forward(self, sparse: JaggedBatch) -> Tensor:
        """Look up and pool every feature of this rank's samples; see :meth:`EmbeddingTables.forward`."""
        device = self.anchor.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else torch.float32
        if sparse.weights is not None and sparse.weights.requires_grad:
            raise TrainingError(
                "gradients with respect to the values' weights are not supported", where="ShardedEmbeddingTables"
            )
        offsets = None if sparse.one_hot else sparse.offsets
        is_asked = bool(self._asked) and self._asked[0].values is sparse.values
        asked = self._asked.pop(0) if is_asked else self._ask(sparse)
        coder = self.coder if torch.is_grad_enabled() else None
        with torch.no_grad():
            found = self._fetch(asked.request, coder)
            zeros = torch.zeros_like(self._first_row)
            output = embedding_bag(
                found,
                asked.inverse,
                offsets,
                asked.value_weights,
                zeros,
                zeros + len(found),
                dtype=dtype,
                backend=self.backend,
            ).output
        if torch.is_grad_enabled() and self.anchor.requires_grad:
            output = _KeepRequest.apply(self.anchor, output, self, asked, offsets)
        return output

    @torch.no_grad()
    def _ask(self, sparse: JaggedBatch) -> _Asked:
        if tuple(sparse.keys) != self._keys:
            raise DataError(
                f"expected the sparse features {list(self._keys)}, got {list(sparse.keys)}",
                where="ShardedEmbeddingTables",
                remedy="encode the data with the run's own encoder",
            )
        rows, value_weights = sparse.values, None
        if len(sparse):
            value_weights = self._value_weights(sparse)
            offsets = None if sparse.one_hot else sparse.offsets
            rows, misplaced = linearise(rows, offsets, self._first_row, self._num_rows)
            if misplaced >= 0:
                raise self._misplaced(sparse, misplaced)
        distinct, inverse = torch.unique(rows, return_inverse=True)
        return _Asked(sparse.values, self._exchange.ask(distinct, self._take_notes()), inverse, value_weights)

    def _take_notes(self) -> tuple[int, ...]:
        """Return numbers to be summed over ranks beside the next request; equally many on every rank."""
        return ()

    def _fetch(self, request: RowRequest, coder: Coder | None) -> Tensor:
        """Answer all ranks' requests and return the rows of this rank's, ``float32 [U, D]``."""
        request.wait()
        found = torch.empty(len(request.distinct), self.embedding_dim)
        rows = self._exchange.send_rows(request, self._rows_by_id, coder=coder)
        self._exchange.place_rows(request, rows.wait(), found)
        return found

    def _rows_by_id(self, place: int, ids: Tensor) -> Tensor:
        own = self._parts[place]
        return self._rows_of(own).index_select(0, ids - own.first_row)

    def advance(self) -> None:
        """Send the ids of batches that were prefetched; called between the forward and the backward pass."""
        for asked in self._asked:
            asked.request.send_ids()

    def update(self, learning_rate_scale: float = 1.0) -> None:
        """Apply pending gradients of all ranks, once per distinct row; see :meth:`EmbeddingTables.update`."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        self.step += 1
        self._apply_gathered(self._gather(waiting), self.step, self.config.learning_rate * learning_rate_scale)

    def _apply_gathered(self, gathered: dict[int, tuple[Tensor, Tensor]], step: int, rate: float) -> None:
        """Update rows of parts with gradients of all ranks that look up in them."""
        self._add_copies(gathered)
        if self.config.name == "rowwise_adagrad" and self._cuts_columns():
            self._update_together(gathered, step, rate)
            return
        for block, rows, gradient in self._by_block(gathered):
            self._apply_rows(self.config, block, rows, gradient, step, rate)

    def _by_block(self, gathered: dict[int, tuple[Tensor, Tensor]]) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Iterate over blocks with their rows and gradients, in the order of parts."""
        for block in range(self._blocks):
            found = [(own, *gathered[i]) for i, own in self._parts.items() if own.block == block and i in gathered]
            if found:
                rows = torch.cat([rows + own.start for own, rows, _ in found])
                yield block, rows, torch.cat([gradient for _, _, gradient in found])

    def _apply_rows(
        self, rule: SparseOptimizer, block: int, rows: Tensor, gradient: Tensor, step: int, rate: float
    ) -> None:
        state = {name: getattr(self, f"{name}_{block}") for name in self._names(rule)}
        sparse_update(
            rule,
            getattr(self, f"rows_{block}"),
            state,
            rows,
            None,
            gradient,
            learning_rate=rate,
            step=step,
            backend=self.config.backend,
        )

    @staticmethod
    def _names(rule: SparseOptimizer) -> list[str]:
        return list(init_state(rule, torch.empty(1, 1)))

    def _gather(self, waiting: list[_Waiting]) -> dict[int, tuple[Tensor, Tensor]]:
        """Exchange gradients; return rows of each part, counted from its first, with theirs, in the order of ranks."""
        found = []
        for one in waiting:
            request = one.asked.request
            found.append((request, self._exchange.send_gradients(request, self._summed(one)).wait(), None))
        return self._by_part(found)

    def _by_part(
        self, given: Sequence[tuple[RowRequest, Sequence[Tensor], Chosen | None]]
    ) -> dict[int, tuple[Tensor, Tensor]]:
        """Join the gradients that arrived for some or all rows of requests, by part."""
        rows: dict[int, list[Tensor]] = {i: [] for i in self._parts}
        gradients: dict[int, list[Tensor]] = {i: [] for i in self._parts}
        for request, received, chosen in given:
            for rank, values in enumerate(received):
                start = 0
                for span, ids in self._exchange.served(request, rank, chosen):
                    end = start + len(ids) * span.columns
                    rows[span.part].append(ids - self._parts[span.part].first_row)
                    gradients[span.part].append(values[start:end].view(-1, span.columns))
                    start = end
        return {i: (torch.cat(rows[i]), torch.cat(gradients[i])) for i in self._parts if rows[i]}

    def _summed(self, one: _Waiting) -> Tensor:
        """Return the gradient of each row of a request, summed over this rank's bags: ``float32 [U, D]``."""
        asked = one.asked
        rows = len(asked.request.distinct)
        return _sums(asked.inverse, one.offsets, one.grad, asked.value_weights, rows, torch.float32)

    def _add_copies(self, gathered: dict[int, tuple[Tensor, Tensor]]) -> None:
        """Add what the other copies of a part have gathered, in the order of copies."""
        copied = [i for i in self._parts if len(self.placement.parts[i].ranks) > 1]
        if not any(len(part.ranks) > 1 for part in self.placement.parts):
            return
        own: dict[int, tuple[Tensor, Tensor]] = {}
        for i in copied:
            rows, gradient = gathered[i]
            distinct, inverse = torch.unique(rows, return_inverse=True)
            own[i] = (distinct, _sums(inverse, None, gradient.unsqueeze(1), None, len(distinct), torch.float32))
        size = self.links.size
        shared = [[i for i in copied if rank in self.placement.parts[i].ranks] for rank in range(size)]
        shared[self.links.rank] = []
        lengths = [torch.tensor([len(own[i][0]) for i in of_rank], dtype=torch.int64) for of_rank in shared]
        told = self._exchange.share("copied rows of each part", lengths, [len(one) for one in shared])
        empty = torch.empty(0)
        rows_sent = [torch.cat([own[i][0] for i in one]) if one else empty.long() for one in shared]
        sent = [torch.cat([own[i][1].reshape(-1) for i in one]) if one else empty for one in shared]
        rows_got = self._exchange.share("copied rows", rows_sent, [int(one.sum()) for one in told])
        widths = [[self.placement.parts[i].columns for i in one] for one in shared]
        values = [int((n * torch.tensor(w, dtype=torch.int64)).sum()) for n, w in zip(told, widths, strict=True)]
        got = self._exchange.share("gradients of copies", sent, values)
        found: dict[int, dict[int, tuple[Tensor, Tensor]]] = {i: {self.links.rank: own[i]} for i in copied}
        for rank, of_rank in enumerate(shared):
            counts = told[rank].tolist()
            blocks = got[rank].split([n * w for n, w in zip(counts, widths[rank], strict=True)])
            for i, ids, block, width in zip(of_rank, rows_got[rank].split(counts), blocks, widths[rank], strict=True):
                found[i][rank] = (ids, block.view(-1, width))
        for i, of_part in found.items():
            ordered = [of_part[rank] for rank in self.placement.parts[i].ranks]
            gathered[i] = (torch.cat([rows for rows, _ in ordered]), torch.cat([values for _, values in ordered]))

    def _cuts_columns(self) -> bool:
        return any(part.columns < self.embedding_dim for part in self.placement.parts)

    def _update_together(self, gathered: dict[int, tuple[Tensor, Tensor]], step: int, rate: float) -> None:
        """Update by row-wise Adagrad, with the mean square of each row's gradient over all of its columns."""
        reduced: dict[int, tuple[Tensor, Tensor]] = {}
        part_rows: dict[int, Tensor] = {}
        squares: dict[int, Tensor] = {}
        for block, rows, gradient in self._by_block(gathered):
            distinct, inverse = torch.unique(rows, return_inverse=True)
            summed = _sums(inverse, None, gradient.unsqueeze(1), None, len(distinct), torch.float64)
            if self.config.weight_decay:
                summed += self.config.weight_decay * getattr(self, f"rows_{block}").index_select(0, distinct)
            reduced[block], square = (distinct, summed), summed.square().sum(1)
            for i, own in self._parts.items():
                if own.block == block:
                    ends = torch.tensor([own.start, own.start + self.placement.parts[i].rows])
                    first, end = torch.searchsorted(distinct, ends).tolist()
                    part_rows[i], squares[i] = distinct[first:end] - own.start, square[first:end]
        totals = self._add_columns(part_rows, squares)
        for block, (distinct, summed) in reduced.items():
            added = torch.cat([totals[i] for i, own in self._parts.items() if own.block == block])
            sums = getattr(self, f"sum_{block}")
            total = sums.index_select(0, distinct).double() + added / self.embedding_dim
            sums.index_copy_(0, distinct, total.to(sums.dtype))
            change = summed / (total.sqrt() + self.config.eps).unsqueeze(1)
            self._apply_rows(_PLAIN, block, distinct, change, step, rate)

    def _add_columns(self, rows: dict[int, Tensor], squares: dict[int, Tensor]) -> dict[int, Tensor]:
        """Sum values of rows, ``[n]`` of each part, over the parts with the other columns of these rows."""
        size, routes = self.links.size, self._routes
        bounds = {
            i: torch.searchsorted(found + self._parts[i].first_row, routes.edges).tolist() for i, found in rows.items()
        }
        sent, sizes = [], []
        for rank in range(size):
            given = [squares[j][bounds[j][k] : bounds[j][k + 1]] for k, _, j in routes.needed_by[rank]]
            sent.append(torch.cat(given) if given else torch.empty(0, dtype=torch.float64))
            sizes.append(sum(bounds[i][k + 1] - bounds[i][k] for k, i, _ in routes.needed_from[rank]))
        got = self._exchange.share("squares of gradients", sent, sizes)
        columns = {(i, k): {i: squares[i][bounds[i][k] : bounds[i][k + 1]]} for i in rows for k in self._ranges_of(i)}
        for rank, values in enumerate(got):
            start = 0
            for k, i, j in routes.needed_from[rank]:
                end = start + bounds[i][k + 1] - bounds[i][k]
                columns[i, k][j] = values[start:end]
                start = end
        totals = {i: torch.zeros_like(one) for i, one in squares.items()}
        for (i, k), of_part in columns.items():
            for j in sorted(of_part, key=lambda j: self.placement.parts[j].first_column):
                totals[i][bounds[i][k] : bounds[i][k + 1]] += of_part[j]
        return totals

    def _ranges_of(self, place: int) -> range:
        span = self._routes.spans[place]
        return range(span.first, span.end)

    def pending_rows(self) -> Tensor:
        """Return the rows of this rank's samples that the next :meth:`update` changes: int64, distinct, ascending."""
        if not self._waiting:
            return torch.empty(0, dtype=torch.int64)
        return torch.cat([one.asked.request.distinct for one in self._waiting]).unique()

    def discard(self) -> None:
        """Discard the gradients that wait for :meth:`update`."""
        self._waiting = []

    def table(self, name: str) -> Tensor:
        """Return a copy of one table, ``float32 [rows, D]``, gathered from all ranks; all ranks call it together."""
        self._place_of(name)
        return next(self._whole("rows", [name]))

    def clear_columns(self, first: int) -> None:
        """Set the columns from ``first`` on to zero, in all rows."""
        for own in self._parts.values():
            part = self.placement.parts[own.place]
            if part.first_column + part.columns > first:
                self._rows_of(own)[:, max(0, first - part.first_column) :] = 0

    def memory_bytes(self) -> dict[str, int]:
        """Return the bytes of the ``rows`` and of the ``optimizer`` state on this rank."""
        of = {
            name: sum(getattr(self, f"{name}_{block}").nbytes for block in range(self._blocks))
            for name in self._stored().values()
        }
        return {"rows": of.pop("rows"), "optimizer": sum(of.values())}

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Write whole tables, as :class:`EmbeddingTables` does; all ranks call it together."""
        for key, name in self._stored().items():
            found = list(self._whole(name, list(self.features.tables)))
            destination[prefix + key] = torch.cat(found) if found else torch.empty(self._shape(name))
        destination[prefix + "_extra_state"] = self.get_extra_state()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        """Read this rank's parts of whole tables."""
        missing, errors = rest[2], rest[4]
        for key, name in self._stored().items():
            given = state_dict.get(prefix + key)
            shape = self._shape(name)
            if given is None:
                missing.append(prefix + key)
            elif tuple(given.shape) != shape:
                errors.append(f"size mismatch for {prefix}{key}: {tuple(given.shape)} is not {shape}")
            else:
                self._read(name, given)
        self.set_extra_state(state_dict[prefix + "_extra_state"])

    def _read(self, name: str, given: Tensor) -> None:
        for table, count in self.features.tables.items():
            start = self._starts[table]
            self._put(lambda own: self._cut(own, getattr(self, f"{name}_{own.block}")), table, 0,
                      given[start : start + count])  # fmt: skip

    def _stored(self) -> dict[str, str]:
        """Names of the weight and the state in a state dict, with the names of this module's blocks of them."""
        return {"weight": "rows"} | {name: name for name in self._names(self.config)}

    def _shape(self, name: str) -> tuple[int, ...]:
        """Shape of the weight or of a state of all tables."""
        return (self.num_rows,) if self._is_per_row(name) else (self.num_rows, self.embedding_dim)

    def _is_per_row(self, name: str) -> bool:
        return name == "sum" and self.config.name == "rowwise_adagrad"

    def _whole(self, name: str, tables: list[str]) -> Iterator[Tensor]:
        """Iterate over whole tables of weights or of a state; the first copy of every part is taken."""
        for table in tables:
            rows = self.features.tables[table]
            whole: Tensor | None = None
            parts = [i for i, part in enumerate(self.placement.parts) if part.table == table]
            own = [i for i in parts if self.placement.parts[i].ranks[0] == self.links.rank]
            pieces = [self._cut(self._parts[i], getattr(self, f"{name}_{self._parts[i].block}")) for i in own]
            mine = torch.cat([piece.reshape(-1) for piece in pieces]) if pieces else torch.empty(0)
            got = self._exchange.share(f"table {name}", [mine] * self.links.size)
            for rank, values in enumerate(got):
                at = 0
                for i in parts:
                    part = self.placement.parts[i]
                    if part.ranks[0] != rank:
                        continue
                    per_row = self._is_per_row(name)
                    size = part.rows * (1 if per_row else part.columns)
                    block = values[at : at + size]
                    at += size
                    if whole is None:
                        whole = torch.empty((rows,) if per_row else (rows, self.embedding_dim))
                    cut = whole[part.first_row : part.first_row + part.rows]
                    if per_row:
                        cut.copy_(block)
                    else:
                        cut[:, part.first_column : part.first_column + part.columns] = block.view(part.rows, -1)
            assert whole is not None
            yield whole


def _sums(
    rows: Tensor, offsets: Tensor | None, grad: Tensor, value_weights: Tensor | None, count: int, dtype: torch.dtype
) -> Tensor:
    """Return the sum of the gradients of each of ``count`` rows, in ascending order of positions."""
    sums = torch.zeros(count, grad.shape[-1], dtype=dtype)
    if count:
        sparse_update(
            _PLAIN, sums, {}, rows, offsets, grad, value_weights, learning_rate=-1.0, step=1
        )  # 0 - (-1) * sum
    return sums
