"""Cost of embedding tables placed over ranks: bytes that every rank moves and sends in a step, and the seconds of that.

A step has three phases, which collectives separate: lookup, exchange and update. Every phase lasts as long as on the
rank that has most to do. All bytes are counted; the rates at which they move are given.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from cordillera.errors import PlanError
from cordillera.partition import imbalance
from cordillera.planning.ranking.placement import Placement
from cordillera.planning.ranking.workload import LENGTH_BYTES, Array, update_traffic
from cordillera.topology import Topology

Indices = NDArray[np.int64]
TableOptimizer = Literal["sgd", "adagrad", "rowwise_adagrad", "adam"]
STATE_BYTES: Mapping[str, tuple[float, float]] = {
    "sgd": (0.0, 0.0),
    "adagrad": (0.0, 4.0),
    "rowwise_adagrad": (4.0, 0.0),
    "adam": (0.0, 8.0),
}
"""Bytes of optimizer state for each row, which every column part holds again, and for each value."""

PHASES = ("lookup", "exchange", "update")
"""Parts of a step that the placement of tables determines."""

_ID_BYTES, _VALUE_BYTES = 8.0, 4.0  # bytes of an id; bytes of a value of a pooled embedding or its gradient
_LINE = 64.0  # least bytes of memory that a lookup moves: a cache line
_PAGE = 4096.0  # least bytes that a lookup reads from a file
_MISS_POWER = 0.1  # a cache of 5 % of the rows then serves 74 % of the lookups; LFU measured with Zipf 1.05: 73 %


@dataclass(frozen=True)
class TableProfile:
    """An embedding table and its traffic.

    Attributes:
        rows: Number of rows.
        columns: Number of columns: the length of an embedding.
        lookups: Mean number of ids of a sample (pooling factor).
        distinct: Share of the lookups of a step that are of different rows, above 0 and at most 1.
        weight_bytes: Bytes of a stored value.
        optimizer: Name of the update rule, which determines the bytes of its state.
    """

    rows: int
    columns: int
    lookups: float = 1.0
    distinct: float = 1.0
    weight_bytes: float = 4.0
    optimizer: TableOptimizer = "rowwise_adagrad"


@dataclass(frozen=True)
class TableRates:
    """Bytes per second at which a rank moves the data of tables.

    The defaults are those of processes on one machine with processors alone; only their ratios influence a placement.

    Attributes:
        memory: Rate of a rank's memory.
        link: Rate in each direction at which a rank exchanges data with the ranks of its group.
        copies: Rate in each direction at which it exchanges data with the other copies.
        file: Rate of the file system.
    """

    memory: float = 10e9
    link: float = 3e9
    copies: float = 3e9
    file: float = 1e9

    def __post_init__(self) -> None:
        for name in ("memory", "link", "copies", "file"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise PlanError(f"{getattr(self, name)} is no rate", where=f"rates.{name}", remedy="bytes per second")

    @classmethod
    def of(cls, topology: Topology, size: int, copies: int = 1) -> TableRates:
        """Return the rates on a cluster, one device for each rank.

        Ranks are on consecutive devices, so that groups are as close together as possible. All ranks of a group
        exchange data with all others at the same time; the slowest level of links determines the rate.

        Args:
            topology: The cluster.
            size: Number of ranks.
            copies: Number of groups, each with all tables.

        Raises:
            PlanError: If the cluster has fewer devices.
        """
        if size > topology.devices:
            raise PlanError(f"{size:,} ranks need as many devices", where=topology.name, remedy=f"{topology.devices:,}")
        group = size // copies
        return cls(
            memory=topology.device.memory_bytes_per_s,
            link=_exchange_rate(topology, 1, group),
            copies=_exchange_rate(topology, group, size),
        )


def _exchange_rate(topology: Topology, near: int, far: int) -> float:
    """Return the rate of an exchange among ``far`` devices in which each device skips its ``near`` nearest devices."""
    others = far - near
    if others < 1:
        return topology.member_bytes_per_s(0, 0)
    host = topology.sizes[0][0]
    inside = max(min(host, far) - near, 0)
    slowest = max(inside / topology.member_bytes_per_s(0, 0), (others - inside) / topology.device.nic_bytes_per_s)
    for level in range(1, len(topology.levels)):
        member = topology.sizes[level - 1][0]
        if member < far:
            leaving = far - max(member, near)
            slowest = max(slowest, leaving * member / topology.member_bytes_per_s(level, 0))
    return others / slowest


@dataclass(frozen=True)
class TableLoads:
    """Load of every rank by its parts of tables, in a step.

    Attributes:
        lookup_bytes: Bytes of the rows that a rank looks up: ``[size]``.
        seconds: Time of lookup, exchange and update on every rank: ``[size, 3]``.
        memory_bytes: Bytes of rows and optimizer state in memory: ``[size]``.
        file_bytes: Bytes of rows and optimizer state in files: ``[size]``.
    """

    lookup_bytes: Array
    seconds: Array
    memory_bytes: Array
    file_bytes: Array

    @property
    def step_seconds(self) -> float:
        """Predicted time of the tables in a step: the sum over phases of the slowest rank's time."""
        return float(self.seconds.max(0).sum())

    @property
    def lookup_imbalance(self) -> float:
        """Lookup bytes of the rank with most, divided by the mean."""
        return imbalance(self.lookup_bytes)

    @property
    def memory_imbalance(self) -> float:
        """Memory of the fullest rank, divided by the mean."""
        return imbalance(self.memory_bytes)


class TableCosts:
    """Bytes and seconds of parts of tables.

    Args:
        tables: Tables by name.
        rates: Rates of memory, links and files.
        file_cache: Share of the rows of a table in a file that a cache keeps in memory.

    Raises:
        PlanError: If there is no table, or a value of a table is out of range.
    """

    def __init__(self, tables: Mapping[str, TableProfile], rates: TableRates, file_cache: float = 0.0) -> None:
        if not tables:
            raise PlanError("there are no tables", where="tables", remedy="at least one table")
        for name, one in tables.items():
            _check(name, one)
        self.names, self.rates, self.file_cache = tuple(tables), rates, file_cache
        listed = list(tables.values())
        self.rows: Indices = np.array([one.rows for one in listed], dtype=np.int64)
        self.columns: Indices = np.array([one.columns for one in listed], dtype=np.int64)
        self.lookups = np.array([one.lookups for one in listed], dtype=np.float64)
        self.distinct = np.array([one.distinct for one in listed], dtype=np.float64)
        self.weight_bytes = np.array([one.weight_bytes for one in listed], dtype=np.float64)
        state = np.array([STATE_BYTES[one.optimizer] for one in listed], dtype=np.float64)
        self.row_state, self.value_state = state[:, 0], state[:, 1]

    def bytes(self, table: Indices, rows: Indices, columns: Indices) -> Array:
        """Return the bytes of parts with their optimizer state: ``[P]``.

        Args:
            table: Position of the table of each part: ``[P]``.
            rows: Number of rows of each part: ``[P]``.
            columns: Number of columns of each part: ``[P]``.
        """
        value = self.weight_bytes[table] + self.value_state[table]
        return np.asarray(rows * (columns * value + self.row_state[table]), dtype=np.float64)

    def lookup_bytes(self, table: Indices, rows: Indices, columns: Indices, samples: float) -> Array:
        """Return the bytes of rows that a number of samples look up in parts: ``[P]``.

        Args:
            table: Position of the table of each part: ``[P]``.
            rows: Number of rows of each part: ``[P]``.
            columns: Number of columns of each part: ``[P]``.
            samples: Number of samples.
        """
        share = rows / self.rows[table]
        found = samples * self.lookups[table] * share * columns * self.weight_bytes[table]
        return np.asarray(found, dtype=np.float64)

    def seconds(
        self, table: Indices, rows: Indices, columns: Indices, in_file: NDArray[np.bool_], batch: float, size: int,
        copies: int,
    ) -> Array:  # fmt: skip
        """Return the seconds of a step for parts, one rank's copy of each: ``[P, 3]``, by :data:`PHASES`.

        Ids go to the owner of a part, pooled embeddings back and gradients to the owner again; a row part sends sums
        of its own (Neo, arXiv 2104.05158). With several copies, all make the update of the whole batch and stay equal:
        copies sum the gradient of a whole part, or gather ids and gradients of pooled embeddings; the cheaper way is
        taken.

        Args:
            table: Position of the table of each part: ``[P]``.
            rows: Number of rows of each part: ``[P]``.
            columns: Number of columns of each part: ``[P]``.
            in_file: Whether the rows of each part are in a file: ``[P]``.
            batch: Samples of a step, over all ranks.
            size: Number of ranks.
            copies: Number of copies of each part.
        """
        samples, group, rates = batch / copies, size // copies, self.rates
        weight, state = self.weight_bytes[table], self.row_state[table] + columns * self.value_state[table]
        lookups = self.lookups[table] * rows / self.rows[table]
        distinct = lookups * self.distinct[table]
        read = lookups * (np.maximum(columns * weight, _LINE) + _ID_BYTES) + columns * _VALUE_BYTES
        pooled, ids = columns * _VALUE_BYTES, lookups * _ID_BYTES
        sent = (2 * pooled + ids + LENGTH_BYTES) * (group - 1) / group
        zero = np.zeros(len(columns))
        moved = update_traffic(distinct, columns.astype(np.float64), weight, 0.0) + 2 * distinct * state
        moved = moved + update_traffic(lookups - distinct, columns.astype(np.float64), zero, 0.0)
        whole = rows * columns * _VALUE_BYTES
        # both divided by (copies - 1)
        summed, gathered = 2 * whole / copies, samples * (pooled + ids)
        streamed = rows * (columns * (_VALUE_BYTES + 2 * weight) + 2 * state)
        several = copies > 1
        update = np.where(
            several & (summed < gathered), samples * moved + streamed, copies * samples * moved if several else 0.0
        )
        update = update if several else samples * moved
        synchronised = (copies - 1) * np.minimum(summed, gathered)
        missed = distinct * (1 - self.file_cache**_MISS_POWER) * np.maximum(columns * weight + state, _PAGE)
        waited = np.where(in_file, missed, 0.0) / rates.file
        found = [
            samples * (read / rates.memory + waited),
            samples * sent / rates.link + synchronised / rates.copies,
            update / rates.memory + copies * samples * waited,
        ]
        return np.stack(np.broadcast_arrays(*found), axis=1)


def table_loads(
    placement: Placement,
    tables: Mapping[str, TableProfile],
    batch: float,
    rates: TableRates | None = None,
    file_cache: float = 0.0,
) -> TableLoads:
    """Return the load of every rank under a placement, however it was made.

    Args:
        placement: Placement of the tables.
        tables: Traffic of every table of the placement, by name.
        batch: Samples of a step, over all ranks.
        rates: Rates of memory, links and files; None for the defaults.
        file_cache: Share of the rows of a part in a file that a cache keeps in memory.

    Raises:
        PlanError: If a table is missing or has another shape than in the placement, or a value is out of range.
    """
    costs = TableCosts(tables, rates or TableRates(), file_cache)
    for name, shape in placement.tables.items():
        if name not in tables or (tables[name].rows, tables[name].columns) != shape:
            raise PlanError("the placement is of other tables", where=f"table {name!r}", remedy="tables of equal shape")
    at = {name: i for i, name in enumerate(costs.names)}
    size = placement.size
    seconds, lookup, memory, file = np.zeros((size, 3)), np.zeros(size), np.zeros(size), np.zeros(size)
    for copies in sorted({len(part.ranks) for part in placement.parts}):
        parts = [part for part in placement.parts if len(part.ranks) == copies]
        table = np.array([at[part.table] for part in parts], dtype=np.int64)
        rows = np.array([part.rows for part in parts], dtype=np.int64)
        columns = np.array([part.columns for part in parts], dtype=np.int64)
        in_file = np.array([part.tier == "file" for part in parts])
        held = costs.bytes(table, rows, columns)
        for ranks in np.array([part.ranks for part in parts], dtype=np.int64).T:
            np.add.at(seconds, ranks, costs.seconds(table, rows, columns, in_file, batch, size, copies))
            np.add.at(lookup, ranks, costs.lookup_bytes(table, rows, columns, batch / copies))
            np.add.at(memory, ranks, np.where(in_file, costs.file_cache * held, held))
            np.add.at(file, ranks, np.where(in_file, held, 0.0))
    return TableLoads(lookup, seconds, memory, file)


def _check(name: str, one: TableProfile) -> None:
    where = f"table {name!r}"
    for key in ("rows", "columns"):
        if type(getattr(one, key)) is not int or not 1 <= getattr(one, key) < 1 << 50:
            raise PlanError(f"{key} = {getattr(one, key)!r}", where=where, remedy="a whole number from 1")
    if not 0 <= one.lookups <= 1e9:
        raise PlanError(f"lookups = {one.lookups}", where=where, remedy="a finite number, at least 0")
    if not 1e-3 <= one.weight_bytes <= 1e3:
        raise PlanError(f"weight_bytes = {one.weight_bytes}", where=where, remedy="the bytes of a value, such as 4")
    if not 0 < one.distinct <= 1:
        raise PlanError(f"distinct = {one.distinct}", where=where, remedy="above 0 and at most 1")
    if one.optimizer not in STATE_BYTES:
        raise PlanError(f"there is no optimizer {one.optimizer!r}", where=where, remedy=", ".join(STATE_BYTES))
