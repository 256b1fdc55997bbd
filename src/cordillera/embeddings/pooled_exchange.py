"""Exchange of sums of bags: ids go to the ranks that hold rows, and one vector of each bag comes back.

A rank sends the lengths of its bags and their ids to the ranks that hold parts of a table; a rank that holds some of
the rows gets its share of every bag. Holders sum the bags of all ranks by one lookup and return a vector of each. The
asking rank places vectors of columns beside each other and adds those of rows in the order of parts. Gradients of bags
return on the same way, and holders apply the gradients of all ranks' bags by one exact update, in the order of ranks.
Traffic thus grows with the number of ids and of bags, whereas :mod:`cordillera.embeddings.exchange` sends each distinct
row. :func:`choose_pooled` predicts for which tables this takes fewer bytes.

The mean of a bag is taken, and its gradient divided, by the asking rank. Weights of values travel with their ids.

Source: Mudigere et al. 2022 (arXiv 2104.05158), section 4.2.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from cordillera.data.ranking.features import FeatureSpec
from cordillera.distributed.codecs.coders import Coder
from cordillera.distributed.collectives import Arrival, Collectives, exchange_parts
from cordillera.embeddings.exchange import RankLayout, RowRequest, RowsInTransit, send_frames
from cordillera.embeddings.gradients.pending import PendingGradient
from cordillera.errors import PlanError
from cordillera.jagged import JaggedBatch, offsets_from_lengths, slice_samples
from cordillera.kernels.embeddings.lookup import embedding_bag
from cordillera.planning.ranking.placement import Placement

_HEADERS, _IDS, _WEIGHTS, _SUMS, _GRADIENTS = range(11, 16)  # tags of messages; those of rows are below
_NUMBERS = 3  # numbers of a header before its counts: samples, whether bags hold one value, whether values have weights
_LENGTH_BYTES, _VALUE_BYTES = 4, 4
_ROW_ID_BYTES = 8  # bytes of an id in the exchange of rows


class _Section(NamedTuple):
    """Bags of one table in one part, which one rank asks another for.

    Attributes:
        place: Position of the part in the placement.
        features: Positions of the table's features.
        rows: First row of the part in its table, and the row after its last one.
        columns: First column and the column after the last one.
        has_all_rows: Whether the part has all rows of the table.
        block: Block of the holder in which the part is.
        shift: Number that makes an id of the table a row of the block.
    """

    place: int
    features: tuple[int, ...]
    rows: tuple[int, int]
    columns: tuple[int, int]
    has_all_rows: bool
    block: int
    shift: int

    @property
    def width(self) -> int:
        """Number of columns."""
        return self.columns[1] - self.columns[0]

    def has_lengths(self, one_hot: bool) -> bool:
        """Whether lengths are sent, given whether every bag of the batch holds one value."""
        return not (one_hot and self.has_all_rows)


class _BagValues(NamedTuple):
    """Values of one feature that lie in some rows: ids, ``[n]``, their weights or None, and lengths, ``[B]``."""

    ids: Tensor
    weights: Tensor | None
    lengths: Tensor


class _Served(NamedTuple):
    """Bags of all ranks in one block of this rank, in the order of ranks, parts, features and samples.

    Attributes:
        rows: Rows of the block, ``int64 [T]``.
        offsets: First position of each bag, ``int64 [N + 1]``; None for one row in every bag.
        weights: Factor of each row, ``float32 [T]``, or None for ones.
        bags: Number of bags of each rank.
    """

    rows: Tensor
    offsets: Tensor | None
    weights: Tensor | None
    bags: list[int]


@dataclass
class BagRequest:
    """The bags of one batch, and what other ranks ask this one for in the same exchange.

    Attributes:
        sparse: Samples of this rank.
        factors: Factor of each bag of the features with mean pooling, ``float32 [F, B]``; None for ones.
        headers: Header from each rank: samples, flags and the number of ids of each section.
        ids: Lengths and ids from each rank.
        weights: Weights of the values from each rank.
        served: Bags of all ranks by block, once :meth:`BagExchange.wait` was called.
    """

    sparse: JaggedBatch
    factors: Tensor | None
    headers: list[list[int]]
    ids: Arrival[list[Tensor]]
    weights: Arrival[list[Tensor]]
    served: list[_Served] | None = None


class BatchRequest(NamedTuple):
    """Requests of a batch.

    Attributes:
        values: Values of the batch, by which it is recognised.
        request: Request to the ranks that hold them for the rows of features that take rows.
        inverse: Position of each of their values' rows in the request, ``int64 [T]``.
        offsets: First position of each bag in ``inverse``; None for one value in every bag.
        value_weights: Factor of each value, ``[T]``, or None for ones.
        bags: Request for sums of bags of all other features; None where there are none.
    """

    values: Tensor
    request: RowRequest
    inverse: Tensor
    offsets: Tensor | None
    value_weights: Tensor | None
    bags: BagRequest | None


class BagExchange:
    """Exchanges sums of bags of the tables that a placement names in ``pooled``; all ranks make the same calls.

    Args:
        placement: Placement of all tables.
        features: Features and tables.
        starts: Number of the first row of each table.
        links: The ranks of the placement.

    Attributes:
        features: Positions of the features of these tables, ascending.
    """

    def __init__(self, placement: Placement, features: FeatureSpec, starts: dict[str, int], links: Collectives) -> None:
        self.links = links
        self._of_table: dict[str, tuple[int, ...]] = {}
        for i, feature in enumerate(features.sparse):
            if feature.table in placement.pooled:
                self._of_table[feature.table] = (*self._of_table.get(feature.table, ()), i)
        self.features = sorted(i for places in self._of_table.values() for i in places)
        self._means = [i for i in self.features if features.sparse[i].pooling == "mean"]
        layouts = [RankLayout.of(placement, starts, rank) for rank in range(links.size)]
        self._shapes = layouts[links.rank].shapes
        self._asked = [self._sections(placement, layouts[rank], links.rank, rank) for rank in range(links.size)]
        self._served = [self._sections(placement, layouts[links.rank], rank, links.rank) for rank in range(links.size)]
        self._dtype = _id_dtype(placement)

    def _sections(self, placement: Placement, layout: RankLayout, asker: int, holder: int) -> list[_Section]:
        """Return what ``asker`` asks ``holder`` for, by block and part."""
        found = []
        for i, own in layout.parts.items():
            part = placement.parts[i]
            if part.table not in self._of_table or part.rank_for(asker, placement.size) != holder:
                continue
            found.append(
                _Section(
                    i,
                    self._of_table[part.table],
                    (part.first_row, part.first_row + part.rows),
                    (part.first_column, part.first_column + part.columns),
                    part.rows == placement.tables[part.table][0],
                    own.block,
                    own.start - part.first_row,
                )
            )
        return sorted(found, key=lambda one: (one.block, one.place))

    def misplaced(self, sparse: JaggedBatch, num_rows: Tensor) -> int:
        """Return the first position of ``sparse.values`` whose id, of these features, does not lie in its table, or -1.

        ``num_rows`` are the rows of each feature's table, ``[F]``.
        """
        for f, (low, high) in _values_of(sparse, self.features).items():
            ids, rows = sparse.values[low:high], int(num_rows[f])
            if len(ids) and not (int(ids.min()) >= 0 and int(ids.max()) < rows):
                return low + int(((ids < 0) | (ids >= rows)).nonzero()[0])
        return -1

    def ask(self, sparse: JaggedBatch) -> BagRequest:
        """Send lengths and ids of a batch, which lie in their tables, to the ranks that hold the rows.

        Returns:
            The request; ids of other ranks may still be in transit.
        """
        samples, one_hot, weighted = len(sparse), sparse.one_hot, sparse.weights is not None
        shares = self._shares(sparse)
        headers, bodies, weights = [], [], []
        for sections in self._asked:
            given = [(one, [shares[f, one.rows] for f in one.features]) for one in sections]
            counts = [sum(len(share.ids) for share in found) for _, found in given]
            header = [samples, int(one_hot), int(weighted), *counts] if sections else []
            headers.append(torch.tensor(header, dtype=torch.int64))
            bodies.append(self._body(given, one_hot, samples, sum(counts)))
            of_values = [share.weights.float() for _, found in given for share in found if share.weights is not None]
            weights.append(torch.cat(of_values) if of_values else torch.empty(0))
        sizes = [_NUMBERS + len(sections) if sections else 0 for sections in self._served]
        told = [one.tolist() for one in exchange_parts(self.links, "bag counts", headers, sizes, _HEADERS).wait()]
        lengths = [self._lengths(*both) for both in zip(self._served, told, strict=True)]
        counts = [sum(header[_NUMBERS:]) for header in told]
        expected = [sum(of_rank) + count for of_rank, count in zip(lengths, counts, strict=True)]
        ids = exchange_parts(self.links, "bag ids", bodies, expected, _IDS)
        expected = [count if header and header[2] else 0 for header, count in zip(told, counts, strict=True)]
        found = exchange_parts(self.links, "bag weights", weights, expected, _WEIGHTS)
        return BagRequest(sparse, self._factors(sparse), told, ids, found)

    @staticmethod
    def _lengths(sections: list[_Section], header: list[int]) -> list[int]:
        """Number of lengths that belong to each section of a message."""
        return [header[0] * len(one.features) if one.has_lengths(bool(header[1])) else 0 for one in sections]

    def _shares(self, sparse: JaggedBatch) -> dict[tuple[int, tuple[int, int]], _BagValues]:
        """Return the values of each feature that lie in the rows of each section that this rank asks for."""
        samples, offsets = len(sparse), sparse.offsets
        values = _values_of(sparse, self.features)
        found: dict[tuple[int, tuple[int, int]], _BagValues] = {}
        for section in (one for sections in self._asked for one in sections):
            for f in section.features:
                if (f, section.rows) in found:
                    continue
                low, high = values[f]
                ids, edges = sparse.values[low:high], offsets[f * samples : (f + 1) * samples + 1]
                weights = None if sparse.weights is None else sparse.weights[low:high]
                if section.has_all_rows:
                    found[f, section.rows] = _BagValues(ids, weights, edges.diff())
                    continue
                is_in = (ids >= section.rows[0]) & (ids < section.rows[1])
                lengths = offsets_from_lengths(is_in).index_select(0, edges - low).diff()
                weights = None if weights is None else weights[is_in]
                found[f, section.rows] = _BagValues(ids[is_in], weights, lengths)
        return found

    def _body(self, given: list[tuple[_Section, list[_BagValues]]], one_hot: bool, samples: int, count: int) -> Tensor:
        """Join the lengths of all sections, then their ids as rows of the holder's blocks."""
        lengths = [share.lengths for section, found in given if section.has_lengths(one_hot) for share in found]
        body = torch.empty(len(lengths) * samples + count, dtype=self._dtype)
        at = 0
        for one in lengths:
            body[at : at + samples].copy_(one)
            at += samples
        for section, found in given:
            for share in found:
                end = at + len(share.ids)
                torch.add(share.ids, section.shift, out=body[at:end])
                at = end
        return body

    def _factors(self, sparse: JaggedBatch) -> Tensor | None:
        if sparse.one_hot or not self._means:  # the mean of one value is the value
            return None
        return sparse.lengths.view(len(sparse.keys), -1).clamp(min=1).float().reciprocal()

    def wait(self, request: BagRequest) -> list[_Served]:
        """Wait until the ids of all ranks have arrived, and return the bags in each block of this rank."""
        if request.served is None:
            request.served = self._by_block(request.headers, request.ids.wait(), request.weights.wait())
        return request.served

    def _by_block(self, headers: list[list[int]], bodies: list[Tensor], weights: list[Tensor]) -> list[_Served]:
        size = self.links.size
        rows: list[list[Tensor]] = [[] for _ in self._shapes]
        lengths: list[list[Tensor]] = [[] for _ in self._shapes]
        factors: list[list[Tensor]] = [[] for _ in self._shapes]
        bags = [[0] * size for _ in self._shapes]
        has_lengths, weighted = [False] * len(self._shapes), any(header and header[2] for header in headers)
        for rank, (sections, header) in enumerate(zip(self._served, headers, strict=True)):
            counts, start = self._lengths(sections, header), 0
            at = sum(counts)
            first = at
            for section, count, values in zip(sections, counts, header[_NUMBERS:], strict=True):
                own, number = section.block, header[0] * len(section.features)
                lengths[own].append(bodies[rank][start : start + count] if count else torch.ones(number))
                has_lengths[own] |= count > 0
                rows[own].append(bodies[rank][at : at + values])
                if weighted:
                    given = weights[rank][at - first : at - first + values]
                    factors[own].append(given if header[2] else torch.ones(values))
                bags[own][rank] += number
                start, at = start + count, at + values
        found = []
        for own in range(len(self._shapes)):
            offsets = None
            if has_lengths[own]:
                offsets = offsets_from_lengths(torch.cat([one.to(self._dtype) for one in lengths[own]]))
            joined = torch.cat(rows[own]).to(torch.int64) if rows[own] else torch.empty(0, dtype=torch.int64)
            found.append(_Served(joined, offsets, torch.cat(factors[own]) if factors[own] else None, bags[own]))
        return found

    def send_sums(
        self, request: BagRequest, blocks: Sequence[Tensor], backend: str, coder: Coder | None = None
    ) -> RowsInTransit:
        """Sum the bags of all ranks and start to send the sums to them.

        Args:
            request: Request of this rank.
            blocks: Rows of each block of this rank.
            backend: Back end of the lookup.
            coder: Function that returns the codec of a part; None to send sums as they are. All ranks pass one or none.

        Raises:
            PlanError: If a rank asks for rows that this one does not hold.
        """
        by_rank = self.sum_bags(request, blocks, backend)
        samples = len(request.sparse)
        sizes = [sum(samples * len(one.features) * one.width for one in sections) for sections in self._asked]
        if coder is None:
            return exchange_parts(self.links, "bags", [_flat(found) for found in by_rank], sizes, _SUMS)
        coded = []
        for sections, header, found in zip(self._served, request.headers, by_rank, strict=True):
            cut: list[tuple[int, Tensor]] = []
            for section in sections:
                number = header[0] * len(section.features)
                block = found[section.block]
                cut.append((section.place, block[:number]))
                found[section.block] = block[number:]
            coded.append(cut)
        return send_frames(self.links, "bags", coded, coder, [len(sections) for sections in self._asked], sizes)

    def sum_bags(self, request: BagRequest, blocks: Sequence[Tensor], backend: str) -> list[list[Tensor]]:
        """Sum the bags of all ranks; see :meth:`send_sums` for ``request``, ``blocks``, ``backend`` and errors.

        Returns:
            For each rank, the sums of its bags in each block, ``float32 [bags, columns]``, in the order of parts,
            features and samples.
        """
        by_rank: list[list[Tensor]] = [[] for _ in range(self.links.size)]
        for served, weight in zip(self.wait(request), blocks, strict=True):
            first, rows = torch.zeros(1, dtype=torch.int64), torch.tensor([len(weight)])
            sums = embedding_bag(
                weight, served.rows, served.offsets, served.weights, first, rows, dtype=torch.float32, backend=backend
            )
            if sums.misplaced >= 0:
                raise PlanError(
                    "another rank asked for rows that this one does not hold",
                    where=f"rank {self.links.rank}",
                    remedy="give all ranks the same placement",
                )
            for found, of_rank in zip(by_rank, sums.output.view(-1, weight.shape[1]).split(served.bags), strict=True):
                found.append(of_rank)
        return by_rank

    def place_sums(self, request: BagRequest, received: Sequence[Tensor], output: Tensor) -> None:
        """Put sums of bags that have arrived into ``output``, ``float32 [B, F, D]``; other features keep their values.

        Parts with a table's first row are copied, all others added, in the order of parts. ``received`` are the numbers
        that each rank sent for the ``request``.
        """
        samples = len(request.sparse)
        found = []
        for sections, values in zip(self._asked, received, strict=True):
            at = 0
            for section in sections:
                end = at + len(section.features) * samples * section.width
                found.append((section, values[at:end].view(len(section.features), samples, section.width)))
                at = end
        for section, sums in sorted(found, key=lambda one: (one[0].rows[0] > 0, one[0].place)):
            for f, of_feature in zip(section.features, sums, strict=True):
                target = output[:, f, slice(*section.columns)]
                if section.rows[0]:
                    target.add_(of_feature)
                else:
                    target.copy_(of_feature)
        for f in self._means if request.factors is not None else ():
            output[:, f].mul_(request.factors[f].unsqueeze(1))  # type: ignore[index]

    def send_gradients(self, request: BagRequest, gradient: Tensor) -> Arrival[list[Tensor]]:
        """Start to send the ``gradient`` of a request's bags, ``[B, F, D]``, to the ranks that hold their rows.

        The ``request`` is that of the lookup.
        """
        samples, factors = len(request.sparse), request.factors
        means = set(self._means if factors is not None else ())
        sent = []
        for sections in self._asked:
            values = torch.empty(sum(len(one.features) * one.width for one in sections) * samples)
            at = 0
            for section in sections:
                for f in section.features:
                    end = at + samples * section.width
                    target, source = (
                        values[at:end].view(samples, section.width),
                        gradient[:, f, slice(*section.columns)],
                    )
                    if f in means:
                        torch.mul(source, factors[f].unsqueeze(1), out=target)  # type: ignore[index]
                    else:
                        target.copy_(source)
                    at = end
            sent.append(values)
        sizes = [
            sum(served.bags[rank] * width for served, (_, width) in zip(self.wait(request), self._shapes, strict=True))
            for rank in range(self.links.size)
        ]
        return exchange_parts(self.links, "gradients of bags", sent, sizes, _GRADIENTS)

    def by_block(self, request: BagRequest, received: Sequence[Tensor]) -> dict[int, PendingGradient]:
        """Return the gradients that have arrived for the rows of each block, in the order of ranks.

        ``received`` are the numbers that each rank sent for the ``request``.
        """
        found, starts = {}, [0] * self.links.size
        for block, (served, (_, width)) in enumerate(zip(self.wait(request), self._shapes, strict=True)):
            pieces = []
            for rank, bags in enumerate(served.bags):
                end = starts[rank] + bags * width
                pieces.append(received[rank][starts[rank] : end])
                starts[rank] = end
            if len(served.rows):
                gradient = _flat(pieces).view(-1, 1, width)
                found[block] = PendingGradient(served.rows, served.offsets, served.weights, gradient)
        return found


def choose_pooled(placement: Placement, features: FeatureSpec, batches: Iterable[JaggedBatch]) -> tuple[str, ...]:
    """Return the tables for which sums of bags take fewer bytes than rows, counted over whole batches.

    The samples of a batch are divided equally among the ranks of the placement. Only what crosses between ranks counts.
    Rows take, for each distinct row of a rank, an id of 8 bytes, the row and its gradient. Sums take an id of 4 bytes
    (of 8 if all tables have 2**31 rows or more) for each value, and for each bag its length, the sum and its gradient;
    of a table that is cut in rows, every holder takes and returns them. The result depends on the arguments alone.

    Args:
        placement: Placement of all tables.
        features: Features and tables.
        batches: Some batches of the data.
    """
    of_rows, of_bags = Counter[str](), Counter[str]()
    ids_of: dict[str, list[str]] = {}
    for feature in features.sparse:
        ids_of.setdefault(feature.table, []).append(feature.name)
    for batch in batches:
        for rank in range(placement.size):
            samples = len(batch)
            own = slice_samples(batch, samples * rank // placement.size, samples * (rank + 1) // placement.size)
            for table, names in ids_of.items():
                ids = torch.cat([own[name].values for name in names])
                both = _bytes(placement, table, rank, own, ids, len(names) * len(own))
                of_rows[table] += both[0]
                of_bags[table] += both[1]
    return tuple(table for table in placement.tables if of_bags[table] < of_rows[table])


def _bytes(placement: Placement, table: str, rank: int, own: JaggedBatch, ids: Tensor, bags: int) -> tuple[int, int]:
    """Return the bytes that the samples of a rank cause for a table: sent as rows, and as sums of bags."""
    distinct, of_rows, of_bags = ids.unique(), 0, 0
    of_id = _dtype_bytes(placement) + (0 if own.weights is None else _VALUE_BYTES)
    for part in placement.parts_by_table[table]:
        if part.rank_for(rank, placement.size) == rank:
            continue
        first, end = part.first_row, part.first_row + part.rows
        is_single = own.one_hot and part.rows == placement.tables[table][0]
        vector = 2 * _VALUE_BYTES * part.columns
        of_rows += int(((distinct >= first) & (distinct < end)).sum()) * (_ROW_ID_BYTES + vector)
        of_bags += int(((ids >= first) & (ids < end)).sum()) * of_id
        of_bags += bags * ((0 if is_single else _LENGTH_BYTES) + vector)
    return of_rows, of_bags


def _id_dtype(placement: Placement) -> torch.dtype:
    """Type of lengths and ids in transit; no block of a rank has more rows than all tables."""
    return torch.int32 if sum(rows for rows, _ in placement.tables.values()) < 2**31 else torch.int64


def _dtype_bytes(placement: Placement) -> int:
    return 4 if _id_dtype(placement) == torch.int32 else 8


def _values_of(sparse: JaggedBatch, features: Sequence[int]) -> Mapping[int, tuple[int, int]]:
    """Return the first position of each feature's values, and the one after the last."""
    samples = len(sparse)
    bounds = sparse.offsets[::samples].tolist() if samples else [0] * (len(sparse.keys) + 1)
    return {f: (bounds[f], bounds[f + 1]) for f in features}


def _flat(pieces: Sequence[Tensor]) -> Tensor:
    """Join tensors as one vector, without a copy of a single one."""
    flat = [one.reshape(-1) for one in pieces]
    return flat[0] if len(flat) == 1 else torch.cat(flat) if flat else torch.empty(0)
