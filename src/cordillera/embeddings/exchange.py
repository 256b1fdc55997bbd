"""Exchange of ids, rows and gradients between the ranks that look up and the ranks that hold parts of tables.

A rank looks up its samples in three exchanges: how many ids it asks each rank for, the ids, and back come the rows.
Every distinct id of a batch is sent once to each rank that holds columns of its row, and every row comes back once;
bags are summed where their samples are. After the backward pass each row's gradient, summed over the rank's samples,
returns on the same way. Traffic thus grows with the number of distinct rows, not with the length of bags.

Source: Mudigere et al. 2022 (arXiv 2104.05158), section 4.2, for the exchange of lengths, then values; that bags are
summed by the asking rank is a choice of this library.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cordillera.distributed.codecs.codecs import decode
from cordillera.distributed.codecs.coders import Coder
from cordillera.distributed.collectives import Arrival, Collectives, exchange_parts
from cordillera.planning.ranking.placement import Placement

_COUNTS, _IDS, _COLLISIONS, _FRAMES, _ROWS, _GRADIENTS, _LENGTHS, _SHARES = range(1, 9)  # tags of messages


class RowSpan(NamedTuple):
    """Rows that one part contributes to an answer: consecutive ranges, in some columns.

    Attributes:
        part: Position of the part in the placement.
        first: First range.
        end: Range after the last one.
        first_column: First column.
        columns: Number of columns.
    """

    part: int
    first: int
    end: int
    first_column: int
    columns: int


class PartOnRank(NamedTuple):
    """A part that a rank holds.

    Attributes:
        place: Position of the part in the placement.
        first_row: First row, counted over all tables.
        block: Block of the rank in which the rows are; a block has all parts of one number of columns.
        start: First row of the part in the block.
    """

    place: int
    first_row: int
    block: int
    start: int


class RankLayout(NamedTuple):
    """Parts of one rank by their positions in the placement, and the shape ``(rows, columns)`` of its blocks."""

    parts: dict[int, PartOnRank]
    shapes: list[tuple[int, int]]

    @classmethod
    def of(cls, placement: Placement, starts: dict[str, int], rank: int) -> RankLayout:
        """Return the layout of a rank; ``starts`` are the first rows of the tables."""
        parts: dict[int, PartOnRank] = {}
        rows: dict[int, int] = {}  # first free row of the block with these columns
        for i, part in enumerate(placement.parts):
            if rank in part.ranks:
                start = rows.setdefault(part.columns, 0)
                block = list(rows).index(part.columns)
                parts[i] = PartOnRank(i, starts[part.table] + part.first_row, block, start)
                rows[part.columns] += part.rows
        return cls(parts, [(count, columns) for columns, count in rows.items()])


class RowRoutes:
    """The ranks that hold each row, as seen by one rank; a pure function of a placement.

    Rows of tables whose bags are summed by their holders are not asked for. Rows of all tables are numbered one table
    after another. Ranges of rows are cut wherever a part of a table begins.

    Args:
        placement: Placement of all tables.
        starts: Number of the first row of each table.
        rank: This rank.

    Attributes:
        edges: First row of each range, and the number of all rows: ``int64 [K + 1]``.
        asked: Ranges that this rank asks each rank for, ascending.
        served: Ranges that each rank asks this one for, ascending.
        asked_spans: Spans that each rank answers this one with.
        served_spans: Spans that this rank answers each rank with.
        needed_from: For each rank, ``(range, part, other part)``: it holds the other part of rows of which this rank
            holds a part. Row-wise rules need values of all columns.
        needed_by: For each rank, the same with the roles of both ranks exchanged.
    """

    def __init__(self, placement: Placement, starts: dict[str, int], rank: int) -> None:
        cuts = set(starts.values())
        cuts |= {starts[part.table] + part.first_row for part in placement.parts}
        cuts.add(sum(rows for rows, _ in placement.tables.values()))
        self.placement, self.rank, self.size = placement, rank, placement.size
        self.edges = torch.tensor(sorted(cuts), dtype=torch.int64)
        at = {int(edge): i for i, edge in enumerate(self.edges)}
        spans = []
        for i, part in enumerate(placement.parts):
            first = starts[part.table] + part.first_row
            spans.append(RowSpan(i, at[first], at[first + part.rows], part.first_column, part.columns))
        self.spans = spans
        self._places = {part: i for i, part in enumerate(placement.parts)}
        ranks = range(self.size)
        self.asked_spans = [self._spans(rank, holder) for holder in ranks]
        self.served_spans = [self._spans(asker, rank) for asker in ranks]
        self.asked = [_ranges(found) for found in self.asked_spans]
        self.served = [_ranges(found) for found in self.served_spans]
        self.needed_from = [self._neighbours(rank, holder) for holder in ranks]
        self.needed_by = [self._neighbours(asker, rank) for asker in ranks]

    @property
    def ranges(self) -> int:
        """Number of ranges of rows."""
        return len(self.edges) - 1

    def _spans(self, asker: int, holder: int) -> list[RowSpan]:
        found = []
        for span in self.spans:
            part = self.placement.parts[span.part]
            if part.table not in self.placement.pooled and part.rank_for(asker, self.size) == holder:
                found.append(span)
        return found

    def _neighbours(self, asker: int, holder: int) -> list[tuple[int, int, int]]:
        """Return range, part and other part where ``asker`` has a part and ``holder`` other columns of its rows."""
        found = []
        for parts in self.placement.parts_by_table.values():
            for part, other in product(parts, parts) if len(parts) > 1 else ():
                if part is other or asker not in part.ranks or other.rank_for(asker, self.size) != holder:
                    continue
                i, j = self._places[part], self._places[other]
                common = range(max(self.spans[i].first, self.spans[j].first), min(self.spans[i].end, self.spans[j].end))
                found += [(k, i, j) for k in common]
        return sorted(found)


@dataclass
class RowRequest:
    """The rows that one batch needs, and what other ranks ask this one for in the same exchange.

    Attributes:
        exchange: Exchange that this request belongs to.
        distinct: Rows of this rank's batch, ``int64 [U]``, distinct and ascending.
        bounds: First position of each range in ``distinct``, and ``U``.
        told: Counts of each rank's ids and notes, in transit.
        counts: Number of ids by asking rank and range; zeros for ranges that a rank does not ask for: ``[ranks, K]``.
            Known after :meth:`send_ids`.
        notes: Sum of the notes of all ranks, equal on all of them. Known after :meth:`send_ids`.
        ids: Ids that each rank asks for, ranges one after another. Known after :meth:`wait`.
        has_sent: Whether :meth:`send_ids` was called.
        has_arrived: Whether :meth:`wait` was called.
    """

    exchange: RowExchange
    distinct: Tensor
    bounds: list[int]
    told: Arrival[list[Tensor]]
    counts: np.ndarray = field(init=False)
    notes: list[int] = field(init=False)
    ids: Arrival[list[Tensor]] = field(init=False)
    has_sent: bool = False
    has_arrived: bool = False

    def send_ids(self) -> None:
        """Send the ids to the ranks that hold their rows, once the counts of all ranks have arrived."""
        if self.has_sent:
            return
        routes, told = self.exchange.routes, self.told.wait()
        self.has_sent = True
        self.counts = np.zeros((routes.size, routes.ranges), dtype=np.int64)
        for rank, (ranges, numbers) in enumerate(zip(routes.served, told, strict=True)):
            self.counts[rank, ranges] = numbers[: len(ranges)].numpy()
        notes = [numbers[len(ranges) :] for ranges, numbers in zip(routes.served, told, strict=True)]
        self.notes = torch.stack(notes).sum(0).tolist()
        edges = self.bounds
        sent = [
            _joined([self.distinct[edges[k] : edges[k + 1]] for k in ranges], self.distinct) for ranges in routes.asked
        ]
        self.ids = exchange_parts(self.exchange.links, "lookup ids", sent, self.counts.sum(1).tolist(), _IDS)

    def wait(self) -> None:
        """Wait until the ids of all ranks have arrived."""
        self.send_ids()
        if not self.has_arrived:
            self.ids.wait()
        self.has_arrived = True


class Chosen(NamedTuple):
    """Some rows of a request, as its askers and its holders see them.

    Attributes:
        asked: For each rank, a mask of the ids that this rank asks it for.
        served: For each rank, a mask of the ids that it asks this rank for.
    """

    asked: list[Tensor]
    served: list[Tensor]

    def others(self) -> Chosen:
        """Return the rows of the request that are not chosen."""
        return Chosen([~mask for mask in self.asked], [~mask for mask in self.served])


class Comparing(NamedTuple):
    """Two requests that are being compared (:meth:`RowExchange.compare`)."""

    earlier: list[Tensor]
    later: list[Tensor]
    sizes: list[tuple[int, int]]
    arrival: Arrival[list[Tensor]]

    def wait(self) -> tuple[Chosen, Chosen]:
        """Return the rows of the earlier and of the later request that are in both."""
        masks = [given.bool().split(list(both)) for given, both in zip(self.arrival.wait(), self.sizes, strict=True)]
        return Chosen([one for one, _ in masks], self.earlier), Chosen([other for _, other in masks], self.later)


class CodedRows(NamedTuple):
    """Rows in transit as frames: their lengths by rank, most bytes when decoded, and the rows of this rank itself."""

    arrival: Arrival[list[Tensor]]
    lengths: list[list[int]]
    most: list[int]
    own: Tensor

    def wait(self) -> list[Tensor]:
        """Wait for the frames and return the numbers of each rank's rows, ``float32``, one row after another.

        Raises:
            DataError: If a frame is damaged.
        """
        found = []
        for rank, (received, lengths) in enumerate(zip(self.arrival.wait(), self.lengths, strict=True)):
            if rank == self.arrival.links.rank:
                found.append(self.own)
                continue
            frames = [frame for frame in received.split(lengths) if len(frame)]
            found.append(_joined([decode(one, most_bytes=self.most[rank]).reshape(-1) for one in frames], self.own))
        return found


RowsInTransit = Arrival[list[Tensor]] | CodedRows


def send_frames(
    links: Collectives,
    name: str,
    blocks: Sequence[Sequence[tuple[int, Tensor]]],
    coder: Coder,
    counts: Sequence[int],
    sizes: Sequence[int],
) -> CodedRows:
    """Start to send rows as frames, one for each block; this rank's own rows stay as they are.

    Args:
        links: Ranks that exchange.
        name: Name of the data.
        blocks: For each rank, its blocks of rows ``[n, columns]``, each with the position of its part.
        coder: Function that returns the codec of a part.
        counts: Number of blocks that each rank sends to this one.
        sizes: Number of values of these blocks together.
    """
    frames = [
        [rows.new_empty(0, dtype=torch.uint8) if rank == links.rank or not len(rows) else
         coder(place).encode(rows) for place, rows in of_rank]
        for rank, of_rank in enumerate(blocks)
    ]  # fmt: skip
    own = _joined([rows.reshape(-1) for _, rows in blocks[links.rank]], torch.empty(0))
    told = [torch.tensor([len(frame) for frame in of_rank], dtype=torch.int64) for of_rank in frames]
    lengths = [one.tolist() for one in exchange_parts(links, "frame lengths", told, counts, _FRAMES).wait()]
    sent = [_joined(of_rank, torch.empty(0, dtype=torch.uint8)) for of_rank in frames]
    arrival = exchange_parts(links, name, sent, [sum(one) for one in lengths], _ROWS)
    return CodedRows(arrival, lengths, [4 * size for size in sizes], own)


class RowExchange:
    """Exchanges rows and gradients along the routes of a placement; all ranks make the same calls.

    Args:
        routes: Routes of this rank.
        links: The ranks of the placement.
    """

    def __init__(self, routes: RowRoutes, links: Collectives) -> None:
        self.routes, self.links = routes, links

    def ask(self, distinct: Tensor, notes: Sequence[int] = ()) -> RowRequest:
        """Start to ask the ranks that hold rows for them.

        Args:
            distinct: Row numbers, ``int64 [U]``, distinct and ascending.
            notes: Numbers that are summed over ranks, equally many on each.

        Returns:
            The request, of which only the numbers of ids are in transit.
        """
        routes = self.routes
        bounds = torch.searchsorted(distinct, routes.edges.to(distinct.device)).tolist()
        lengths, noted = torch.tensor(bounds, dtype=torch.int64).diff(), torch.tensor(notes, dtype=torch.int64)
        given = [torch.cat([lengths[ranges], noted]) for ranges in routes.asked]
        counts = [len(ranges) + len(notes) for ranges in routes.served]
        return RowRequest(self, distinct, bounds, exchange_parts(self.links, "lookup counts", given, counts, _COUNTS))

    def common(self, earlier: RowRequest, later: RowRequest) -> tuple[list[Tensor], list[Tensor]]:
        """Return masks of this rank's own rows in two requests that are asked for, by any rank, in both.

        There is one mask for each asking rank, of the earlier and of the later request; their ids have arrived.
        """
        before, after = torch.cat(earlier.ids.result), torch.cat(later.ids.result)
        return [torch.isin(ids, after) for ids in earlier.ids.result], [
            torch.isin(ids, before) for ids in later.ids.result
        ]

    def compare(self, earlier: RowRequest, later: RowRequest) -> Comparing:
        """Start to send each rank the rows that both of its two requests contain, as :meth:`common` finds them.

        A rank learns this of the rows that it asks for; holders know it at once.
        """
        served_before, served_after = self.common(earlier, later)
        sent = [torch.cat(both).to(torch.uint8) for both in zip(served_before, served_after, strict=True)]
        sizes = [(self._asked_ids(earlier, rank), self._asked_ids(later, rank)) for rank in range(self.routes.size)]
        arrival = exchange_parts(self.links, "collisions", sent, [sum(both) for both in sizes], _COLLISIONS)
        return Comparing(served_before, served_after, sizes, arrival)

    def send_rows(
        self,
        request: RowRequest,
        read: Callable[[int, Tensor], Tensor],
        chosen: Chosen | None = None,
        coder: Coder | None = None,
    ) -> RowsInTransit:
        """Start to send rows to the ranks that asked for them.

        Args:
            request: Request whose ids have arrived.
            read: Function that returns rows, ``[n, columns]``, of a part (its position in the placement) by their ids.
            chosen: Rows to send; None for all.
            coder: Function that returns the codec of a part; None to send rows as they are. All ranks pass one or none.
        """
        blocks = [
            [(span.part, read(span.part, ids)) for span, ids in self.served(request, rank, chosen)]
            for rank in range(self.routes.size)
        ]
        if coder is None:
            sent = [_joined([rows.reshape(-1) for _, rows in of_rank], torch.empty(0)) for of_rank in blocks]
            return exchange_parts(self.links, "rows", sent, self._asked_values(request, chosen), _ROWS)
        spans = [len(one) for one in self.routes.asked_spans]
        return send_frames(self.links, "rows", blocks, coder, spans, self._asked_values(request, chosen))

    def place_rows(
        self, request: RowRequest, values: Sequence[Tensor], found: Tensor, chosen: Chosen | None = None
    ) -> None:
        """Copy arrived rows to their places in ``found``, the rows of ``request.distinct``: ``float32 [U, D]``."""
        for rank, received in enumerate(values):
            start = 0
            for span, places in self._asked(request, rank, chosen):
                count = places.stop - places.start if isinstance(places, slice) else len(places)
                block = received[start : start + count * span.columns].view(count, span.columns)
                columns = found[:, span.first_column : span.first_column + span.columns]
                if isinstance(places, slice):
                    columns[places] = block
                else:
                    columns.index_copy_(0, places, block)
                start += count * span.columns

    def send_gradients(
        self, request: RowRequest, gradient: Tensor, chosen: Chosen | None = None
    ) -> Arrival[list[Tensor]]:
        """Start to send the gradients of a request's rows, ``[U, D]``, to the ranks that hold them.

        ``chosen`` are the rows whose gradients are sent; None for all.
        """
        sent, sizes = [], []
        for rank in range(self.routes.size):
            blocks = []
            for span, places in self._asked(request, rank, chosen):
                columns = gradient[:, span.first_column : span.first_column + span.columns]
                chosen_rows = columns[places] if isinstance(places, slice) else columns.index_select(0, places)
                blocks.append(chosen_rows.reshape(-1))
            sent.append(_joined(blocks, gradient.new_empty(0)))
            sizes.append(sum(len(ids) * span.columns for span, ids in self.served(request, rank, chosen)))
        return exchange_parts(self.links, "gradients", sent, sizes, _GRADIENTS)

    def served(self, request: RowRequest, rank: int, chosen: Chosen | None = None) -> list[tuple[RowSpan, Tensor]]:
        """Return the ids, ``int64 [n]``, that ``rank`` asks each span of this rank for; of ``chosen`` rows only."""
        ranges, ids = self.routes.served[rank], request.ids.result[rank]
        ends = np.concatenate([[0], np.cumsum(request.counts[rank, ranges])])
        places, found = {k: i for i, k in enumerate(ranges)}, []
        for span in self.routes.served_spans[rank]:
            part = slice(ends[places[span.first]], ends[places[span.end - 1] + 1])
            found.append((span, ids[part] if chosen is None else ids[part][chosen.served[rank][part]]))
        return found

    def _asked(self, request: RowRequest, rank: int, chosen: Chosen | None) -> list[tuple[RowSpan, slice | Tensor]]:
        """Return the positions in ``request.distinct`` of the rows that this rank asks each span of ``rank`` for."""
        bounds, found = request.bounds, []
        starts, start = {}, 0
        for k in self.routes.asked[rank]:
            starts[k] = start
            start += bounds[k + 1] - bounds[k]
        for span in self.routes.asked_spans[rank]:
            first, end = bounds[span.first], bounds[span.end]
            places: slice | Tensor = slice(first, end)
            if chosen is not None:
                mask = chosen.asked[rank][starts[span.first] : starts[span.first] + end - first]
                places = mask.nonzero()[:, 0] + first
            found.append((span, places))
        return found

    def _asked_ids(self, request: RowRequest, rank: int) -> int:
        return sum(request.bounds[k + 1] - request.bounds[k] for k in self.routes.asked[rank])

    def _asked_values(self, request: RowRequest, chosen: Chosen | None) -> list[int]:
        sizes = []
        for rank in range(self.routes.size):
            found = self._asked(request, rank, chosen)
            sizes.append(
                sum((at.stop - at.start if isinstance(at, slice) else len(at)) * span.columns for span, at in found)
            )
        return sizes

    def add_columns(self, rows: dict[int, Tensor], values: dict[int, Tensor]) -> dict[int, Tensor]:
        """Sum per-row values over all column parts of a row, in column order.

        Args:
            rows: Rows of each part of this rank, numbered over all tables, ascending; equal in parts with equal rows.
            values: A value of each row, ``[n]``, by part.
        """
        routes, parts = self.routes, self.routes.placement.parts
        bounds = {i: torch.searchsorted(found, routes.edges).tolist() for i, found in rows.items()}
        sent, sizes = [], []
        for rank in range(routes.size):
            given = [values[j][bounds[j][k] : bounds[j][k + 1]] for k, _, j in routes.needed_by[rank]]
            sent.append(_joined(given, torch.empty(0, dtype=torch.float64)))
            sizes.append(sum(bounds[i][k + 1] - bounds[i][k] for k, i, _ in routes.needed_from[rank]))
        got = self.share("squares of gradients", sent, sizes)
        spans = [routes.spans[i] for i in rows]
        columns = {
            (one.part, k): {one.part: values[one.part][bounds[one.part][k] : bounds[one.part][k + 1]]}
            for one in spans
            for k in range(one.first, one.end)
        }
        for rank, received in enumerate(got):
            start = 0
            for k, i, j in routes.needed_from[rank]:
                end = start + bounds[i][k + 1] - bounds[i][k]
                columns[i, k][j] = received[start:end]
                start = end
        totals = {i: torch.zeros_like(one) for i, one in values.items()}
        for (i, k), of_part in columns.items():
            for j in sorted(of_part, key=lambda j: parts[j].first_column):
                totals[i][bounds[i][k] : bounds[i][k + 1]] += of_part[j]
        return totals

    def share(self, name: str, parts: Sequence[Tensor], counts: Sequence[int] | None = None) -> list[Tensor]:
        """Send a part to each rank and return one from each; lengths are exchanged first unless ``counts`` are known.

        Args:
            name: Name of the data.
            parts: Part for each rank, ``[n, ...]``.
            counts: Length of each rank's part for this one.
        """
        if counts is None:
            lengths = [torch.tensor([len(part)]) for part in parts]
            told = exchange_parts(self.links, f"{name} counts", lengths, [1] * self.routes.size, _LENGTHS).wait()
            counts = [int(one) for one in told]
        return exchange_parts(self.links, name, parts, counts, _SHARES).wait()


def _ranges(spans: Sequence[RowSpan]) -> list[int]:
    """Return the ranges that spans cover, ascending, each once."""
    return sorted({k for span in spans for k in range(span.first, span.end)})


def _joined(pieces: Sequence[Tensor], like: Tensor) -> Tensor:
    return torch.cat(list(pieces)) if pieces else like.new_empty(0)
