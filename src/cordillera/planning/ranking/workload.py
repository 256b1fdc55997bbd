"""Recommendation models: their tables and dense layers, and the placement of tables on the devices of a group.

Tables are cut over devices; dense layers are copied to all of them (DLRM, arXiv 1906.00091). A table is whole on a
device, cut in columns, cut in rows, or copied to every device like a dense layer: the four ways of Neo (arXiv
2104.05158). All figures are counted; none is fitted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, product
from typing import Annotated, Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, model_validator

from cordillera.errors import PlanError
from cordillera.numbers import counted, in_gigabytes
from cordillera.partition import NOWHERE, divisors, list_scheduling
from cordillera.topology import Label, Numeric, Words

# Limits that keep the cost and the results of a prediction finite: tables, columns and layers are visited in turn.
MOST_TABLES = 100_000
MOST_PARTS = 200_000
TableCount = Annotated[int, Numeric, Field(ge=1, le=1 << 24)]
PositiveBytes = Annotated[float, Numeric, Field(ge=0.001, le=1e6, allow_inf_nan=False)]
Array = NDArray[np.float64]
Number = TypeVar("Number", float, Array)

LENGTH_BYTES = 4  # bytes of a sample's number of ids in a table, sent with the ids
NARROWEST = 32  # least columns of a shard: below a line of 128 bytes a lookup moves more than it uses
_GRADIENT_BYTES = 4  # bytes of a value of a table's gradient
# A radix sort of ids with their positions, so that a row is updated once: four passes, eight bits each, of eight bytes
# that are read and written.
_SORT_TRAFFIC = 64.0


class Tables(BaseModel):
    """A group of equal embedding tables.

    Attributes:
        count: Number of tables.
        rows: Number of rows of each table.
        dim: Number of columns: the length of an embedding.
        lookups: Mean number of ids of a sample in each table (pooling factor).
        weight_bytes: Bytes of a stored value.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    count: TableCount = 1
    rows: Annotated[int, Numeric, Field(ge=1, le=1 << 50)]
    dim: Annotated[int, Numeric, Field(ge=1, le=1 << 16)]
    lookups: PositiveBytes = 1.0
    weight_bytes: PositiveBytes = 4.0


class Cross(BaseModel):
    """Cross layers of low rank (DCN-V2).

    Attributes:
        layers: Number of layers.
        rank: Width between the two matrices of a layer.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    layers: Annotated[int, Numeric, Field(ge=1, le=1_000)]
    rank: TableCount


class Recommender(BaseModel):
    """A training job of a recommendation model.

    Attributes:
        name: Display name.
        description: Description in one sentence.
        source: Origin of the figures.
        tables: Groups of equal tables.
        dense: Number of numeric features.
        bottom: Widths of the layers that numeric features pass; empty without such features.
        interaction: ``dot`` multiplies all pairs of embeddings, at least one, ``concat`` concatenates them, ``cross``
            concatenates them and applies cross layers.
        cross: Cross layers, for ``interaction = "cross"``.
        top: Widths of the layers after the interaction.
        batch: Samples per step, over all devices.
        id_bytes: Bytes of an id when sent.
        forward_bytes: Bytes of a value of a pooled embedding when sent.
        backward_bytes: Bytes of a value of its gradient when sent.
        gradient_bytes: Bytes of the gradient of a dense parameter when reduced.
        optimizer_bytes: Bytes of the optimizer state of a table's row; 4 for row-wise Adagrad.
        dense_bytes: Bytes of a dense parameter: weight, gradient and optimizer state.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Label = "workload"
    description: Words = ""
    source: Words = ""
    tables: tuple[Tables, ...] = Field(min_length=1, max_length=10_000)
    dense: Annotated[int, Numeric, Field(ge=0, le=1 << 24)] = 0
    bottom: Annotated[tuple[TableCount, ...], Field(fail_fast=True)] = Field(default=(), max_length=1_000)
    interaction: Literal["dot", "concat", "cross"] = "dot"
    cross: Cross | None = None
    top: Annotated[tuple[TableCount, ...], Field(fail_fast=True)] = Field(min_length=1, max_length=1_000)
    batch: Annotated[int, Numeric, Field(ge=1, le=1 << 40)]
    id_bytes: PositiveBytes = 8.0
    forward_bytes: PositiveBytes = 4.0
    backward_bytes: PositiveBytes = 4.0
    gradient_bytes: PositiveBytes = 4.0
    optimizer_bytes: Annotated[float, Numeric, Field(ge=0, le=1e6, allow_inf_nan=False)] = 4.0
    dense_bytes: PositiveBytes = 16.0

    @model_validator(mode="after")
    def _fits_together(self) -> Recommender:
        problems = []
        if (tables := sum(one.count for one in self.tables)) > MOST_TABLES:
            problems.append(f"{tables:,} tables, at most {MOST_TABLES:,} can be planned")
        if bool(self.dense) != bool(self.bottom):
            problems.append("dense features and a bottom net need each other: give both or none")
        if (self.interaction == "cross") != (self.cross is not None):
            problems.append('interaction "cross" and [cross] need each other: give both or none')
        widths = {one.dim for one in self.tables} | set(self.bottom[-1:])
        if self.interaction == "dot" and len(widths) > 1:
            problems.append(
                f'interaction "dot" needs embeddings of one width, not {", ".join(map(str, sorted(widths)))}'
            )
        if problems:
            raise ValueError("; ".join(problems))
        return self

    @model_validator(mode="after")
    def _has_pairs(self) -> Recommender:
        if self.interaction == "dot" and self.vectors < 2:
            raise ValueError(
                'interaction "dot" multiplies pairs of vectors, and one table without dense features gives one vector; '
                'write interaction = "concat"'
            )
        return self

    @property
    def vectors(self) -> int:
        """Number of vectors in the interaction: embeddings and the result of the bottom net."""
        return sum(one.count for one in self.tables) + bool(self.bottom)

    @property
    def width(self) -> int:
        """Width of all embeddings and the result of the bottom net, concatenated."""
        return sum(one.count * one.dim for one in self.tables) + sum(self.bottom[-1:])

    @cached_property
    def bottom_layers(self) -> list[tuple[int, int]]:
        """Input and output widths of every layer of the bottom net."""
        return list(zip((self.dense, *self.bottom), self.bottom, strict=False))

    @cached_property
    def top_layers(self) -> list[tuple[int, int]]:
        """Input and output widths of every layer after the lookups: cross layers, then the top net."""
        width, layers = self.width, []
        if self.interaction == "dot":
            width = sum(self.bottom[-1:]) + self.vectors * (self.vectors - 1) // 2
        elif self.cross is not None:
            layers = [(width, self.cross.rank), (self.cross.rank, width)] * self.cross.layers
        return layers + list(zip((width, *self.top), self.top, strict=False))

    @cached_property
    def dense_parameters(self) -> int:
        """Number of parameters of the dense layers, without biases."""
        return sum(inputs * outputs for inputs, outputs in self.bottom_layers + self.top_layers)

    @cached_property
    def products(self) -> int:
        """Number of multiplications in the forward of a sample: layers and dot products."""
        pairs = self.vectors * (self.vectors - 1) // 2 if self.interaction == "dot" else 0
        return self.dense_parameters + pairs * self.tables[0].dim

    @property
    def flops(self) -> float:
        """FLOPs of the model's own arithmetic in a step, forward and backward; lookups count as none."""
        return 6.0 * self.batch * self.products


class Shard(NamedTuple):
    """A rectangle of a table.

    Attributes:
        table: Position of its group of tables in the workload.
        copy: Position of the table in its group.
        first_row: First row of the shard.
        rows: Number of rows.
        first_column: First column of the shard.
        columns: Number of columns.
    """

    table: int
    copy: int
    first_row: int
    rows: int
    first_column: int
    columns: int


def copied(workload: Recommender, rows: int) -> tuple[Tables, ...]:
    """Return the tables of ``workload`` with at most ``rows`` rows, which are on every device; none for 0."""
    return tuple(one for one in workload.tables if one.rows <= rows)


@dataclass(frozen=True)
class PlacedTables:
    """Tables placed on the devices of one group.

    Attributes:
        workload: Model with the tables.
        shards: Parts of tables.
        devices: Device of each shard: ``[S]``.
        size: Number of devices of the group.
    """

    workload: Recommender
    shards: tuple[Shard, ...]
    devices: NDArray[np.int64]
    size: int

    @cached_property
    def rows(self) -> Array:
        """Number of rows of every shard: ``[S]``."""
        return np.array([one.rows for one in self.shards], np.float64)

    @cached_property
    def columns(self) -> Array:
        """Number of columns of every shard: ``[S]``."""
        return np.array([one.columns for one in self.shards], np.float64)

    @cached_property
    def lookups(self) -> Array:
        """Mean number of lookups of a sample in every shard: ``[S]``."""
        tables = self.workload.tables
        found = [tables[one.table].lookups * one.rows / tables[one.table].rows for one in self.shards]
        return np.array(found, np.float64)

    @cached_property
    def weight_bytes(self) -> Array:
        """Bytes of a value in every shard: ``[S]``."""
        return np.array([self.workload.tables[one.table].weight_bytes for one in self.shards], np.float64)

    def by_device(self, values: Array) -> Array:
        """Sum ``values`` of the shards, ``[S]``, over every device: ``[size]``."""
        return np.asarray(np.bincount(self.devices, values, minlength=self.size), dtype=np.float64)

    @cached_property
    def memory(self) -> Array:
        """Bytes of every device's tables: ``[size]``."""
        return self.by_device(self.rows * self.columns * self.weight_bytes)

    @cached_property
    def optimizer(self) -> Array:
        """Bytes of every device's optimizer state: ``[size]``; each column part of a table has its own."""
        return self.by_device(self.rows * self.workload.optimizer_bytes)

    @cached_property
    def sent_columns(self) -> Array:
        """Values that every device sends for a sample: ``[size]``; each row part of a table sends a sum."""
        return self.by_device(self.columns)

    @cached_property
    def received(self) -> Array:
        """Bytes of ids and their counts that every device receives for a sample: ``[size]``.

        Each column part of a table receives its own copy.
        """
        return self.by_device(self.lookups * self.workload.id_bytes + LENGTH_BYTES)

    @cached_property
    def read(self) -> Array:
        """Bytes of memory that a sample's lookups move on every device: ``[size]``."""
        moved = self.lookups * (self.columns * self.weight_bytes + self.workload.id_bytes)
        return self.by_device(moved + self.columns * self.workload.forward_bytes)

    @cached_property
    def update(self) -> Array:
        """Bytes of memory that a sample's update moves in every shard, with each lookup counted: ``[S]``."""
        return update_traffic(self.lookups, self.columns, self.weight_bytes, self.workload.optimizer_bytes)

    def synchronised(self, samples: float, copies: int) -> tuple[Array, Array, Array]:
        """Return what every device exchanges with the other copies of its tables, and what its update then moves.

        All copies make the update of the whole batch and stay equal. The gradient of a small shard is summed over
        copies like that of a dense layer; for other shards, the copies gather ids and gradients of pooled embeddings.
        The cheaper way is taken. A group has ``samples`` samples of a step, and there are ``copies`` of the tables.

        Returns:
            For every device: bytes of gradients that are reduced, bytes that each copy contributes to the gathering,
            and bytes of memory that the update moves, ``[size]`` each.
        """
        work = self.workload
        if copies == 1:
            none = np.zeros(self.size)
            return none, none, self.by_device(samples * self.update)
        whole = self.rows * self.columns * _GRADIENT_BYTES
        parts = samples * (self.columns * work.backward_bytes + self.lookups * work.id_bytes)
        small = 2.0 * whole / copies < parts  # both sides are divided by (copies - 1)
        streamed = self.rows * (self.columns * (_GRADIENT_BYTES + 2.0 * self.weight_bytes) + 2.0 * work.optimizer_bytes)
        moved = np.where(small, samples * self.update + streamed, copies * samples * self.update)
        return (
            self.by_device(np.where(small, whole, 0.0)),
            self.by_device(np.where(small, 0.0, parts)),
            self.by_device(moved),
        )

    def ways(self) -> dict[str, int]:
        """Return how many tables are whole, cut in columns, cut in rows, or both."""
        # keys: whether a table is cut in rows, and whether in columns
        words = {(False, False): "whole", (False, True): "columns", (True, False): "rows", (True, True): "both"}
        found = dict.fromkeys(words.values(), 0)
        for shard in self.shards:
            if shard.first_row == shard.first_column == 0:  # count a table by its first part
                table = self.workload.tables[shard.table]
                found[words[shard.rows < table.rows, shard.columns < table.dim]] += 1
        return found


def update_traffic(lookups: Number, columns: Number, weight_bytes: Number, optimizer_bytes: float) -> Number:
    """Return the bytes of memory that the fused backward and update of a sample's lookups move.

    A sample has ``lookups`` in a table of ``columns`` columns, with ``weight_bytes`` bytes per weight and
    ``optimizer_bytes`` per row. The gradient is read once per lookup; the row and its optimizer state are read and
    written; ids are sorted. Rows that several samples share are counted for each sample, because the number of distinct
    rows is unknown without the ids.
    """
    row = columns * (_GRADIENT_BYTES + 2.0 * weight_bytes) + 2.0 * optimizer_bytes + _SORT_TRAFFIC
    return lookups * row


def _columns(table: Tables, parts: int) -> int:
    """Return the number of equal column parts: ``parts`` or more, none narrower than :data:`NARROWEST`."""
    possible = [one for one in divisors(table.dim) if table.dim // one >= NARROWEST]
    return next((one for one in possible if one >= parts), possible[-1] if possible else 1)


def place_tables(
    workload: Recommender, size: int, room: float, worth: float, grain: float, copied_rows: int = 0
) -> PlacedTables:
    """Cut tables and give the parts to the devices of a group, the costliest first to the least loaded device.

    A table is cut if it does not fit on a device, or if it costs more than ``grain`` times a device's equal share of
    all tables: in columns as long as they stay :data:`NARROWEST` wide, then in rows. Cutting in rows does not reduce
    sending; where sending costs more than looking up, rows are cut for memory only.

    Args:
        workload: Model with the tables.
        size: Number of devices of the group.
        room: Bytes of a device for tables and optimizer state.
        worth: Bytes of memory that are moved while one byte is sent.
        grain: Largest cost of a part in equal shares of a device; infinite to cut for memory alone.
        copied_rows: Tables with at most this many rows are on all devices and are not placed.

    Raises:
        PlanError: If the tables do not fit; the message says how much memory is missing.
    """
    everywhere = copied(workload, copied_rows)
    costs: list[tuple[float, float]] = []  # costs per sample in bytes of memory: looking up, sending
    for one in workload.tables:
        moved = one.lookups * one.dim * one.weight_bytes
        moved += update_traffic(one.lookups, float(one.dim), one.weight_bytes, workload.optimizer_bytes)
        costs.append((moved, worth * one.dim * (workload.forward_bytes + workload.backward_bytes)))
    tables = [(i, one) for i, one in enumerate(workload.tables) if one not in everywhere]
    share = sum(one.count * sum(costs[i]) for i, one in tables) / size
    needed = sum(one.count * one.rows * (one.dim * one.weight_bytes + workload.optimizer_bytes) for _, one in tables)
    missing = needed - room * size
    if missing > 0:
        raise PlanError(f"tables over {counted(size, 'device')}: {in_gigabytes(missing)} GB do not fit")
    for finer in (1, 2, 4, 8):  # parts nearly as large as a device waste memory
        shards: list[tuple[float, float, Shard]] = []
        for i, _ in tables:
            shards += _parts(workload, i, costs[i], share * grain, room / finer, size)
            if len(shards) > MOST_PARTS:
                raise PlanError(f"tables over {counted(size, 'device')}: more than {MOST_PARTS:,} parts")
        dearest = sorted(range(len(shards)), key=lambda at: (-shards[at][0], at))
        largest = sorted(range(len(shards)), key=lambda at: (-shards[at][1], at))
        for order in (dearest, largest):  # the second if the first leaves no room for the last part
            loads, sizes = [shards[at][0] for at in order], [shards[at][1] for at in order]
            places = list_scheduling(loads, size, sizes, room * (1 + 1e-9))
            if NOWHERE not in places:
                return PlacedTables(workload, tuple(shards[at][2] for at in order), places, size)
    raise PlanError(f"tables over {counted(size, 'device')}: parts leave gaps into which the last do not fit")


def _parts(
    workload: Recommender, table: int, costs: tuple[float, float], limit: float, room: float, size: int
) -> list[tuple[float, float, Shard]]:
    """Return cost, bytes and rectangle of the parts of a group of tables, given by its position.

    ``costs`` are those of a sample, looking up and sending; no part costs more than ``limit`` or is larger than
    ``room``.
    """
    one, (up, sent) = workload.tables[table], costs
    fits = math.ceil(one.rows * (one.dim * one.weight_bytes + workload.optimizer_bytes) / room)
    wide = _columns(one, max(fits, math.ceil((up + sent) / limit)))
    row = one.dim / wide * one.weight_bytes + workload.optimizer_bytes
    deep = math.ceil(one.rows * row / room)
    if up > sent and (up + sent) / wide > limit:
        deep = max(deep, math.ceil(up / wide / max(limit - sent / wide, limit / 2)))
    deep = min(deep, one.rows, size)
    if one.count * wide * deep > MOST_PARTS:
        raise PlanError(f"tables over {counted(size, 'device')}: more than {MOST_PARTS:,} parts")
    width, edges = one.dim // wide, [round(i * one.rows / deep) for i in range(deep + 1)]
    found = []
    for copy, (first, end), column in product(range(one.count), pairwise(edges), range(wide)):
        cost = up / wide * (end - first) / one.rows + sent / wide
        found.append((cost, (end - first) * row, Shard(table, copy, first, end - first, column * width, width)))
    return found
