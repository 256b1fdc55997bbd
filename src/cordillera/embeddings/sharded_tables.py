"""Embedding tables cut over the processes of a job, exact to the tables of one process.

Every rank holds its parts of a :class:`~cordillera.planning.ranking.placement.Placement`, looks up its own samples
through :mod:`cordillera.embeddings.exchange`, or :mod:`cordillera.embeddings.pooled_exchange` for tables that the
placement names in ``pooled``, and updates each of its rows once per step with the gradients of all
ranks' samples, in the order of ranks. Copies of a part receive each other's gradients and make the same update, so that
they stay equal, bit for bit. Row-wise Adagrad of a row that is cut in columns uses the squares of all its columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from cordillera.data.ranking.features import FeatureSpec
from cordillera.distributed.codecs.coders import Coder, Coders
from cordillera.distributed.collectives import Collectives
from cordillera.embeddings.exchange import Chosen, PartOnRank, RankLayout, RowExchange, RowRequest, RowRoutes
from cordillera.embeddings.gradients.pending import PendingGradient, merge_pending
from cordillera.embeddings.pooled_exchange import BagExchange, BatchRequest
from cordillera.embeddings.tables import (
    EmbeddingTables,
    TableBox,
    TablesConfig,
    draw_rows,
)
from cordillera.errors import DataError, PlanError, TrainingError
from cordillera.jagged import JaggedBatch, choose_features
from cordillera.kernels.embeddings.lookup import embedding_bag, linearise
from cordillera.kernels.embeddings.update import (
    SparseOptimizer,
    choose_backend,
    distinct_rows,
    init_state,
    sparse_update,
    sum_by_row,
)
from cordillera.planning.ranking.placement import Placement

_CHUNK = 1 << 14  # rows that are drawn at a time; a multiple of the blocks of torch's generator
_PLAIN = SparseOptimizer(name="sgd")


class Waiting(NamedTuple):
    """Requests and output gradient ``[B, F, D]`` of one backward pass, kept for the next update."""

    asked: BatchRequest
    grad: Tensor


class _KeepRequest(torch.autograd.Function):
    """Gives the output of a lookup a place in the graph; the backward pass keeps its gradient for the update."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, output: Tensor, tables: Any, asked: BatchRequest) -> Tensor:
        ctx.tables, ctx.asked = tables, asked
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:
        if torch.is_grad_enabled():
            raise TrainingError(
                "second derivatives through embedding tables are not supported",
                where="ShardedEmbeddingTables",
                remedy="call backward without create_graph",
            )
        ctx.tables._waiting.append(Waiting(ctx.asked, grad))
        return (None,) * 4


class ShardedEmbeddingTables(EmbeddingTables):
    """:class:`EmbeddingTables` sharded over processes by a placement.

    All ranks call :meth:`forward` and :meth:`update` equally often and in the same order; a rank whose data have ended
    passes empty batches. With the same samples over all ranks as one process has in its batch, weights and the
    optimizer's state are those of :class:`EmbeddingTables` up to the rounding of gradients that are sent in float32.
    Two runs are equal, bit for bit. There is no ``weight``.

    Attributes:
        coders: Function that returns the codecs in which rows travel in training; None to send them as they are.
            Lookups without gradients are always exact.

    Args:
        features: Names, tables and pooling of the sparse features.
        embedding_dim: Width ``D`` of a row.
        config: Optimizer and back end; ``rows`` must be ``fp32``, ``cache`` and ``l2`` 0.
        placement: Placement of all tables of ``features`` over the ranks of ``links``, in memory.
        links: The ranks.
        init: Distribution of initial rows, those of :class:`EmbeddingTables` to the bit; every rank draws all rows,
            some at a time, and keeps its own.
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
        if config.are_encoded or config.l2:
            raise PlanError(
                "tables over several processes are kept in fp32, without a cache and without l2",
                where="tables",
                remedy="set rows = 'fp32', cache = 0 and l2 = 0",
            )
        self.placement, self.links = placement, links
        self.coders: Coders | None = None
        self.coder: Coder | None = None  # coder of the current training lookup
        self._asked: list[BatchRequest] = []
        self._waiting: list[Waiting] = []
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
        self._bags = BagExchange(self.placement, self.features, self._starts, self.links)
        self._by_rows = [i for i in range(len(self.features.sparse)) if i not in self._bags.features]
        layout = RankLayout.of(self.placement, self._starts, self.links.rank)
        self._parts, self._blocks = layout.parts, len(layout.shapes)
        for block, shape in enumerate(layout.shapes):
            weight = torch.empty(shape)
            self.register_buffer(f"rows_{block}", weight, persistent=False)
            for name, state in init_state(self.config, weight).items():
                self.register_buffer(f"{name}_{block}", state, persistent=False)
        self._draw(init, generator)

    def _draw(self, init: float | Literal["uniform_by_rows"], generator: torch.Generator | None) -> None:
        for table, count in self.features.tables.items():
            for first in range(0, max(1, count - count % _CHUNK), _CHUNK):  # the last chunk has the rest as well,
                # because torch draws fewer than 16 normal numbers in another way
                rows = _CHUNK if count - first >= 2 * _CHUNK else count - first
                drawn = torch.empty(rows, self.embedding_dim)
                draw_rows(drawn, count, init, generator)
                self._put(self._rows_of, table, first, drawn)

    def _rows_of(self, part: PartOnRank) -> Tensor:
        """Return the weights of a part, ``[rows, columns]``."""
        return self._cut(part, getattr(self, f"rows_{part.block}"))

    def _cut(self, part: PartOnRank, block: Tensor) -> Tensor:
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
            if asked.bags is not None:
                self._bags.wait(asked.bags)
        self._asked = []

    def forward(self, sparse: JaggedBatch) -> Tensor:
        """Look up and pool every feature of this rank's samples; see :meth:`EmbeddingTables.forward`."""
        device = self.anchor.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else torch.float32
        if sparse.weights is not None and sparse.weights.requires_grad:
            raise TrainingError(
                "gradients with respect to the values' weights are not supported", where="ShardedEmbeddingTables"
            )
        is_asked = bool(self._asked) and self._asked[0].values is sparse.values
        asked = self._asked.pop(0) if is_asked else self._ask(sparse)
        if self.coders is not None and torch.is_grad_enabled():
            self.coder = self.coders(self.step)
        coder = self.coder if torch.is_grad_enabled() else None
        with torch.no_grad():
            output = self._find_bags(asked, len(sparse), coder, dtype)
        if torch.is_grad_enabled() and self.anchor.requires_grad:
            output = _KeepRequest.apply(self.anchor, output, self, asked)
        return output

    def _find_bags(self, asked: BatchRequest, samples: int, coder: Coder | None, dtype: torch.dtype) -> Tensor:
        """Return the sums of all bags, ``[B, F, D]``: of rows that are fetched, and those that holders have made."""
        if asked.bags is None:
            return self._sum_rows(asked, coder, dtype)
        blocks = [getattr(self, f"rows_{block}") for block in range(self._blocks)]
        arrival = self._bags.send_sums(asked.bags, blocks, self.backend, coder)
        output = torch.empty(samples, len(self._keys), self.embedding_dim)
        asked.request.wait()
        if self._by_rows:
            output.index_copy_(1, torch.tensor(self._by_rows), self._sum_rows(asked, coder, torch.float32))
        self._bags.place_sums(asked.bags, arrival.wait(), output)
        return output.to(dtype)

    def _sum_rows(self, asked: BatchRequest, coder: Coder | None, dtype: torch.dtype) -> Tensor:
        found = self._fetch(asked.request, coder)
        zeros = torch.zeros(len(self._by_rows), dtype=torch.int64)
        return embedding_bag(
            found,
            asked.inverse,
            asked.offsets,
            asked.value_weights,
            zeros,
            zeros + len(found),
            dtype=dtype,
            backend=self.backend,
        ).output

    @torch.no_grad()
    def _ask(self, sparse: JaggedBatch) -> BatchRequest:
        if tuple(sparse.keys) != self._keys:
            raise DataError(
                f"expected the sparse features {list(self._keys)}, got {list(sparse.keys)}",
                where="ShardedEmbeddingTables",
                remedy="encode the data with the run's own encoder",
            )
        if (misplaced := self._bags.misplaced(sparse, self._num_rows)) >= 0:
            raise self._misplaced(sparse, misplaced)
        has_weights = self._by_rows and len(sparse)
        chosen = replace(sparse, weights=self._value_weights(sparse)) if has_weights else sparse
        if self._bags.features:
            chosen = choose_features(chosen, self._by_rows)
        rows, offsets = chosen.values, None if sparse.one_hot else chosen.offsets
        if len(chosen):
            rows, misplaced = linearise(rows, offsets, self._first_row[self._by_rows], self._num_rows[self._by_rows])
            if misplaced >= 0:
                raise self._misplaced(chosen, misplaced)
        distinct, inverse = distinct_rows(rows, self.num_rows)
        request = self._exchange.ask(distinct, self._take_notes())
        bags = self._bags.ask(sparse) if self._bags.features else None
        return BatchRequest(sparse.values, request, inverse, offsets, chosen.weights, bags)

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
        rate = self.config.learning_rate * learning_rate_scale
        self._apply_gathered(self._gather(waiting), self.step, rate, self._gather_bags(waiting))

    def _apply_gathered(
        self,
        gathered: dict[int, tuple[Tensor, Tensor]],
        step: int,
        rate: float,
        of_bags: Mapping[int, PendingGradient] = MappingProxyType({}),
    ) -> None:
        """Update rows with gradients of all ranks that look up in them: of rows, by part, and of bags, by block."""
        if any(len(part.ranks) > 1 for part in self.placement.parts):
            gathered |= self._rows_of_bags(of_bags)
            of_bags = {}
            self._add_copies(gathered)
        given = [*self._by_block(gathered), *of_bags.items()]
        if self.config.name == "rowwise_adagrad" and self._cuts_columns():
            self._update_together(given, step, rate)
            return
        for block, one in given:
            self._apply_rows(self.config, block, one, step, rate)

    def _by_block(self, gathered: dict[int, tuple[Tensor, Tensor]]) -> Iterator[tuple[int, PendingGradient]]:
        """Iterate over blocks with their rows and gradients, in the order of parts."""
        for block in range(self._blocks):
            found = [(own, *gathered[i]) for i, own in self._parts.items() if own.block == block and i in gathered]
            if found:
                rows = torch.cat([rows + own.start for own, rows, _ in found])
                gradient = torch.cat([gradient for _, _, gradient in found])
                yield block, PendingGradient(rows, None, None, gradient.unsqueeze(1))

    def _rows_of_bags(self, of_bags: Mapping[int, PendingGradient]) -> dict[int, tuple[Tensor, Tensor]]:
        """Sum gradients of bags, by block, to one gradient per row, by part, for parts of pooled tables."""
        found = {}
        for block, one in of_bags.items():
            distinct, summed = self._summed_rows(block, one, torch.float32)
            for i, own in self._parts.items():
                if own.block == block and self.placement.parts[i].table in self.placement.pooled:
                    of_part = self._slice_of(own, distinct)
                    found[i] = (distinct[of_part] - own.start, summed[of_part])
        return found

    def _summed_rows(self, block: int, one: PendingGradient, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the distinct rows of a block, ascending, and the sum of the gradients of each, ``[U, columns]``."""
        rows = len(getattr(self, f"rows_{block}"))
        return sum_by_row(one.rows, one.offsets, one.grad, one.value_weights, rows, dtype)

    def _slice_of(self, own: PartOnRank, distinct: Tensor) -> slice:
        """Return the positions of a part's rows among ascending rows of its block."""
        ends = torch.tensor([own.start, own.start + self.placement.parts[own.place].rows])
        return slice(*torch.searchsorted(distinct, ends).tolist())

    def _apply_rows(self, rule: SparseOptimizer, block: int, one: PendingGradient, step: int, rate: float) -> None:
        sparse_update(
            rule,
            getattr(self, f"rows_{block}"),
            {name: getattr(self, f"{name}_{block}") for name in self._names(rule)},
            one.rows,
            one.offsets,
            one.grad,
            one.value_weights,
            learning_rate=rate,
            step=step,
            backend=self.config.backend,
        )

    @staticmethod
    def _names(rule: SparseOptimizer) -> list[str]:
        return list(init_state(rule, torch.empty(1, 1)))

    def _gather(self, waiting: list[Waiting]) -> dict[int, tuple[Tensor, Tensor]]:
        """Exchange gradients; return rows of each part, counted from its first, with theirs, in the order of ranks."""
        found = []
        for one in waiting:
            request = one.asked.request
            found.append((request, self._exchange.send_gradients(request, self._summed(one)).wait(), None))
        return self._by_part(found)

    def _gather_bags(self, waiting: list[Waiting]) -> dict[int, PendingGradient]:
        """Exchange gradients of bags; return the gradients of each block, in the order of backward passes and ranks."""
        found: dict[int, list[PendingGradient]] = {}
        for one in waiting:
            if one.asked.bags is not None:
                arrived = self._bags.send_gradients(one.asked.bags, one.grad).wait()
                for block, of_block in self._bags.by_block(one.asked.bags, arrived).items():
                    found.setdefault(block, []).append(of_block)
        return {block: merge_pending(of_block) for block, of_block in found.items()}

    def _by_part(
        self, given: Sequence[tuple[RowRequest, Sequence[Tensor], Chosen | None]]
    ) -> dict[int, tuple[Tensor, Tensor]]:
        """Join the gradients that arrived for some or all rows of requests, by part."""
        rows: dict[int, list[Tensor]] = {i: [] for i in self._parts}
        gradients: dict[int, list[Tensor]] = {i: [] for i in self._parts}
        for rank in range(self.links.size):  # order of samples: by rank, then by backward pass
            for request, received, chosen in given:
                values, start = received[rank], 0
                for span, ids in self._exchange.served(request, rank, chosen):
                    end = start + len(ids) * span.columns
                    rows[span.part].append(ids - self._parts[span.part].first_row)
                    gradients[span.part].append(values[start:end].view(-1, span.columns))
                    start = end
        return {i: (torch.cat(rows[i]), torch.cat(gradients[i])) for i in self._parts if rows[i]}

    def _summed(self, one: Waiting) -> Tensor:
        """Return the gradient of each row of a request, summed over this rank's bags: ``float32 [U, D]``."""
        asked, grad = one.asked, one.grad
        if asked.bags is not None:
            grad = grad.index_select(1, torch.tensor(self._by_rows, dtype=torch.int64))
        rows = len(asked.request.distinct)
        return sum_by_row(asked.inverse, asked.offsets, grad, asked.value_weights, rows, torch.float32)[1]

    def _add_copies(self, gathered: dict[int, tuple[Tensor, Tensor]]) -> None:
        """Add the gradients that the other copies of a part have gathered, in the order of copies."""
        copied = [i for i in self._parts if len(self.placement.parts[i].ranks) > 1]
        own: dict[int, tuple[Tensor, Tensor]] = {}
        for i in copied:
            part = self.placement.parts[i]
            rows, gradient = gathered.get(i, (torch.empty(0, dtype=torch.int64), torch.empty(0, part.columns)))
            own[i] = self._to_copies(rows, gradient, part.rows)
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

    def _to_copies(self, rows: Tensor, gradient: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return the message from a copy of a part of ``count`` rows to the others: rows with one gradient each."""
        return sum_by_row(rows, None, gradient, None, count, torch.float32)

    def _cuts_columns(self) -> bool:
        return any(part.columns < self.embedding_dim for part in self.placement.parts)

    def _update_together(self, given: Sequence[tuple[int, PendingGradient]], step: int, rate: float) -> None:
        """Update by row-wise Adagrad, with the mean square of each row's gradient over all of its columns.

        No two of ``given`` have rows of one part.
        """
        reduced: list[tuple[int, Tensor, Tensor, list[int]]] = []
        part_rows = {i: torch.empty(0, dtype=torch.int64) for i in self._parts}
        squares = {i: torch.empty(0, dtype=torch.float64) for i in self._parts}
        for block, one in given:
            distinct, summed = self._summed_rows(block, one, torch.float64)
            if self.config.weight_decay:
                summed += self.config.weight_decay * getattr(self, f"rows_{block}").index_select(0, distinct)
            square, parts = summed.square().sum(1), []
            for i, own in self._parts.items():
                of_part = self._slice_of(own, distinct) if own.block == block else slice(0, 0)
                if of_part.start < of_part.stop:
                    part_rows[i], squares[i] = distinct[of_part] - own.start + own.first_row, square[of_part]
                    parts.append(i)
            reduced.append((block, distinct, summed, parts))
        totals = self._exchange.add_columns(part_rows, squares)
        for block, distinct, summed, parts in reduced:
            if not parts:
                continue
            added = torch.cat([totals[i] for i in parts])
            sums = getattr(self, f"sum_{block}")
            total = sums.index_select(0, distinct).double() + added / self.embedding_dim
            sums.index_copy_(0, distinct, total.to(sums.dtype))
            change = summed / (total.sqrt() + self.config.eps).unsqueeze(1)
            self._apply_rows(_PLAIN, block, PendingGradient(distinct, None, None, change.unsqueeze(1)), step, rate)

    def pending_rows(self) -> Tensor:
        """Return the rows of this rank's samples that the next :meth:`update` changes: int64, distinct, ascending."""
        if not self._waiting:
            return torch.empty(0, dtype=torch.int64)
        found = [one.asked.request.distinct for one in self._waiting]
        places = self._bags.features
        for bags in (one.asked.bags for one in self._waiting if one.asked.bags is not None):
            chosen = choose_features(bags.sparse, places)
            found.append(linearise(chosen.values, chosen.offsets, self._first_row[places], self._num_rows[places])[0])
        return torch.cat(found).unique()

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

    def boxes(self) -> Iterator[TableBox]:
        """Iterate over this rank's parts of every table; all ranks call it together."""
        self._settle()
        for key, name in self._stored().items():
            for i, own in self._parts.items():
                part, values = self.placement.parts[i], self._cut(own, getattr(self, f"{name}_{own.block}"))
                offsets = (part.first_row, part.first_column)[: values.dim()]
                # Per-row values are taken from the part with the first columns.
                is_first = part.ranks[0] == self.links.rank and (values.dim() == 2 or not part.first_column)
                yield TableBox(f"{key}.{part.table}", offsets, values, is_first)

    def _settle(self) -> None:
        """Finish updates that are under way; there are none here."""

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
        self._settle()
        for table in tables:
            whole = torch.empty(self.features.tables[table], *self._shape(name)[1:])
            parts = [(i, part) for i, part in enumerate(self.placement.parts) if part.table == table]
            held = [self._parts[i] for i, part in parts if part.ranks[0] == self.links.rank]
            mine = [self._cut(own, getattr(self, f"{name}_{own.block}")).reshape(-1) for own in held]
            got = self._exchange.share(f"table {name}", [torch.cat([torch.empty(0), *mine])] * self.links.size)
            for rank, values in enumerate(got):
                cuts = []
                for part in (part for _, part in parts if part.ranks[0] == rank):
                    cut = whole[part.first_row : part.first_row + part.rows]
                    cuts.append(cut if self._is_per_row(name) else cut[:, part.first_column :][:, : part.columns])
                for cut, block in zip(cuts, values.split([cut.numel() for cut in cuts]), strict=True):
                    cut.copy_(block.view_as(cut))
            yield whole
