"""Codecs of the rows that ranks exchange in training: the recipe's codec, or one per table by measured cost.

Feng et al. 2024 (arXiv 2407.04272) select the coder of each table that is fastest on a given link. Here ranks measure
during their first lookups: every candidate encodes and decodes the rows that are sent, while raw bytes travel, whose
time is the link's. All ranks add up the same numbers in the same order and so make the same choice.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from statistics import median
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from cordillera.distributed.codecs.bounds import BoundDecay, classes_by_cardinality
from cordillera.distributed.codecs.choice import CodecChoice, LinkCost, MeasuredName, choose_codecs
from cordillera.distributed.codecs.codecs import Bounded, Codec, Distinct, Half, IntegerRows, Raw
from cordillera.distributed.codecs.selection import RAW, CodecRecord, record
from cordillera.distributed.collectives import Collectives, exchange_parts
from cordillera.distributed.ledger import Traffic
from cordillera.planning.ranking.placement import Placement

CodecName = Literal[
    "raw", "fp16", "bf16", "int8", "int4", "distinct", "bounded", "bounded-fast", "auto", "auto-bounded"
]
"""Codec of exchanged rows (:mod:`cordillera.distributed.codecs.codecs`), or the set that a measurement selects from."""

Coder = Callable[[int], Codec]
"""Function that returns the codec of a part by its position in the placement."""

Coders = Callable[[int], Coder | None]
"""Function that returns the coder of a training lookup by the number of updates before it; None for raw rows.

All ranks call it once for each lookup.
"""

WARM_UP, MEASURED = 2, 6
"""Lookups that are not measured, because kernels are compiled in them, and lookups that are."""

_EXCHANGED = ("rows", "bags")  # ledger names of encoded exchanges
_PINGS = 9
_PING = 64  # tag of messages; those of exchanges are smaller


class TableBounds(NamedTuple):
    """Error bounds of all tables, as shares of the range of the sent values, and their decay over updates.

    Attributes:
        bounds: Bound of each table after the decay.
        decay: Multiple of the bounds by the number of updates.
    """

    bounds: dict[str, float]
    decay: BoundDecay

    @classmethod
    def of(cls, placement: Placement, scale: float, iterations: int) -> TableBounds:
        """Return ``scale`` times the bounds of the classes of a ``placement``'s tables, by their numbers of rows.

        They fall from twice these values over ``iterations`` updates.
        """
        kinds = classes_by_cardinality([rows for rows, _ in placement.tables.values()])
        bounds = {table: scale * kind.bound for table, kind in zip(placement.tables, kinds, strict=True)}
        return cls(bounds, BoundDecay(iterations))

    def codec(self, name: str, table: str, step: int) -> Codec:
        """Return the codec of a table by its ``name``, after ``step`` updates."""
        if name in ("bounded", "bounded-fast"):
            return Bounded(self.bounds[table] * self.decay.multiplier(step), fast=name == "bounded-fast")
        return Distinct() if name == "distinct" else Raw()


def named_coders(name: CodecName, placement: Placement, *, scale: float, iterations: int) -> Coders | None:
    """Return the coders of one codec for all tables, or None for rows as they are.

    Args:
        name: Codec, not one of ``auto`` and ``auto-bounded``.
        placement: Placement of the tables.
        scale: Factor of all error bounds.
        iterations: Updates over which bounds fall from twice their values.
    """
    fixed: dict[str, Codec] = {
        "fp16": Half(torch.float16),
        "bf16": Half(torch.bfloat16),
        "int8": IntegerRows(8),
        "int4": IntegerRows(4),
        "distinct": Distinct(),
    }
    if name == "raw":
        return None
    if name in fixed:
        return lambda step: lambda place: fixed[name]
    bounds = TableBounds.of(placement, scale, iterations)
    return lambda step: lambda place: bounds.codec(name, placement.parts[place].table, step)


class _MeasuredRows(Raw):
    """Raw bytes; beside them, every candidate encodes and decodes the same rows, once."""

    def __init__(self, measure: Callable[[Tensor], None]) -> None:
        self._measure = measure

    def encode(self, tensor: Tensor) -> Tensor:
        self._measure(tensor)
        return super().encode(tensor)


class MeasuredCoders:
    """Coders chosen by measured cost: the first lookups send raw frames, all later ones use the choice.

    Args:
        name: ``auto`` for codecs without loss, ``auto-bounded`` for codecs within an error bound as well.
        placement: Placement of the tables.
        links: The ranks. Their ledger holds the times of the exchange of ``rows``.
        bounds: Error bounds; their values after the decay are measured.
        choice: Choice that was made before; nothing is measured then.
        on_choice: Function that is called on every rank with the choice, before a row is sent by it.
        clock: Function that returns seconds.

    Attributes:
        choice: Choice, or None before it is made.
    """

    def __init__(
        self,
        name: MeasuredName,
        placement: Placement,
        links: Collectives,
        bounds: TableBounds,
        *,
        choice: CodecChoice | None = None,
        on_choice: Callable[[CodecChoice], None] = lambda choice: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.name, self.placement, self.links, self.bounds = name, placement, links, bounds
        self.choice, self._on_choice, self._clock = choice, on_choice, clock
        self._codecs = (RAW, "distinct") + (("bounded", "bounded-fast") if name == "auto-bounded" else ())
        self._records = {(table, codec): CodecRecord() for table in placement.tables for codec in self._codecs}
        self._lookups = 0
        self._before = Traffic()
        self._exchanges: list[Traffic] = []

    def __call__(self, step: int) -> Coder | None:
        """Return the coder of a lookup; see :data:`Coders`.

        The call after the last measured lookup exchanges the measurements and makes the choice.
        """
        if self.choice is None:
            self._note_exchange()
            if self._lookups <= WARM_UP + MEASURED:
                return self._measuring
            self.choice = self._agreed(step)
            self._on_choice(self.choice)
        if step < self.choice.from_step or self.choice.is_raw:
            return None
        names, parts = self.choice.codecs, self.placement.parts
        return lambda place: self.bounds.codec(names[parts[place].table], parts[place].table, step)

    def _note_exchange(self) -> None:
        """Record the cost of the exchange of rows since the previous lookup, if that lookup was measured."""
        traffic = self.links.ledger.traffic
        now, before = sum((traffic.get(name, Traffic()) for name in _EXCHANGED), Traffic()), self._before
        if self._lookups > WARM_UP:
            exposed = now.exposed_seconds - before.exposed_seconds
            self._exchanges.append(Traffic(now.calls - before.calls, now.bytes - before.bytes, exposed_seconds=exposed))
        self._before = now
        self._lookups += 1

    def _measuring(self, place: int) -> Codec:
        table = self.placement.parts[place].table

        def measure(rows: Tensor) -> None:
            for name in self._codecs:
                found = record(self.bounds.codec(name, table, self.bounds.decay.iterations), rows, self._clock)
                if self._lookups > WARM_UP:
                    self._records[table, name] = self._records[table, name].plus(found)

        return _MeasuredRows(measure)

    def _agreed(self, step: int) -> CodecChoice:
        """Return the choice from the measurements of all ranks."""
        latency = self._latency()
        calls = median(one.calls for one in self._exchanges)
        own = [latency, calls, median(one.bytes for one in self._exchanges)]
        own.append(median(one.exposed_seconds - one.calls * latency for one in self._exchanges))
        own += [number for found in self._records.values() for number in found]
        gathered = self.links.all_gather("costs of codecs", torch.tensor([own], dtype=torch.float64)).tolist()
        records: dict[str, dict[str, CodecRecord]] = {table: {} for table in self.placement.tables}
        for i, (table, name) in enumerate(self._records):
            parts = [CodecRecord(*of_rank[4 + 4 * i : 8 + 4 * i]) for of_rank in gathered]
            for part in parts:
                records[table][name] = records[table].get(name, CodecRecord()).plus(part)
        slowest, most_bytes = max(one[3] for one in gathered), max(one[2] for one in gathered)
        rate = most_bytes / slowest if slowest > 0 and most_bytes else math.inf
        link = LinkCost(rate, max(one[0] for one in gathered), round(MEASURED * sum(one[1] for one in gathered)))
        return choose_codecs(self.name, step, records, link)

    def _latency(self) -> float:
        """Return the seconds of an exchange of one number, by this rank's clock: the median after the first."""
        seconds = []
        one = [torch.zeros(1)] * self.links.size
        for _ in range(_PINGS):
            began = time.perf_counter()
            exchange_parts(self.links, "pings", one, [1] * self.links.size, _PING).wait()
            seconds.append(time.perf_counter() - began)
        return median(seconds[1:])
