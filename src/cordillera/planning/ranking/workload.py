"""Recommendation models: tables and dense layers, and how tables are cut and dealt out over the devices of a group.

Tables are cut over devices, dense layers are copied to all of them (DLRM, arXiv 1906.00091). A table is whole on a
device, cut in columns, cut in rows, or copied to every device like a dense layer: the four ways of Neo (arXiv
2104.05158). Everything here is counted, nothing is fitted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, model_validator

from cordillera.errors import PlanError
from cordillera.partition import NOWHERE, divisors, list_scheduling
from cordillera.topology import Label, Numeric, Words

# Limits that keep the cost of a prediction and its results finite: tables, columns and layers are visited one by one.
MOST_TABLES = 100_000
MOST_PARTS = 200_000
TableCount = Annotated[int, Numeric, Field(ge=1, le=1 << 24)]
PositiveBytes = Annotated[float, Numeric, Field(ge=0.001, le=1e6, allow_inf_nan=False)]
Array = NDArray[np.float64]
Number = TypeVar("Number", float, Array)

LENGTH_BYTES = 4  # how many ids a sample has in a table, as it is sent with them
NARROWEST = 32  # columns of a shard: below a line of 128 bytes a lookup moves more than it uses
_GRADIENT_BYTES = 4  # of a value of a table's gradient
# A radix sort of ids with their places, so that a row is updated once: four passes, eight bits each, of eight bytes
# that are read and written.
_SORT_TRAFFIC = 64.0


class Tables(BaseModel):
    """Embedding tables that are alike.

    Attributes:
        count: How many.
        rows: Number of rows of each.
        dim: Columns: the length of an embedding.
        lookups: Ids of a sample in each, a mean (pooling factor).
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
        name: For people.
        description: One sentence.
        source: Origin of the figures.
        tables: Groups of tables that are alike.
        dense: Features that are numbers.
        bottom: Widths of the layers that they pass; empty without such features.
        interaction: ``dot`` takes the products of all pairs of embeddings, ``concat`` puts them side by side, ``cross``
            passes them through cross layers then.
        cross: The cross layers.
        top: Widths of the layers after the interaction.
        batch: Samples of a step, over all devices.
        id_bytes: Bytes of an id when sent.
        forward_bytes: Bytes of a value of a pooled embedding when sent.
        backward_bytes: Bytes of a value of its gradient when sent.
        gradient_bytes: Bytes of the gradient of a dense parameter when reduced.
        optimizer_bytes: Bytes of a row's optimizer state; 4 for row-wise Adagrad.
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

    @property
    def vectors(self) -> int:
        """That meet in the interaction: embeddings, and the bottom net's result."""
        return sum(one.count for one in self.tables) + bool(self.bottom)

    @property
    def width(self) -> int:
        """Of all embeddings side by side, the bottom net's result among them."""
        return sum(one.count * one.dim for one in self.tables) + sum(self.bottom[-1:])

    @cached_property
    def bottom_layers(self) -> list[tuple[int, int]]:
        """Inputs and outputs of every layer of the bottom net."""
        return list(zip((self.dense, *self.bottom), self.bottom, strict=False))

    @cached_property
    def top_layers(self) -> list[tuple[int, int]]:
        """Inputs and outputs of every layer after the lookups: cross layers, then the top net."""
        width, layers = self.width, []
        if self.interaction == "dot":
            width = sum(self.bottom[-1:]) + self.vectors * (self.vectors - 1) // 2
        elif self.cross is not None:
            layers = [(width, self.cross.rank), (self.cross.rank, width)] * self.cross.layers
        return layers + list(zip((width, *self.top), self.top, strict=False))

    @cached_property
    def dense_parameters(self) -> int:
        """Of the layers, biases left out."""
        return sum(inputs * outputs for inputs, outputs in self.bottom_layers + self.top_layers)

    @property
    def table_parameters(self) -> int:
        """Of all tables."""
        return sum(one.count * one.rows * one.dim for one in self.tables)

    @property
    def table_bytes(self) -> float:
        """Of all tables with their optimizer state."""
        return sum(one.count * one.rows * (one.dim * one.weight_bytes + self.optimizer_bytes) for one in self.tables)

    @cached_property
    def products(self) -> int:
        """Multiplications of a sample's forward: layers and dot products."""
        pairs = self.vectors * (self.vectors - 1) // 2 if self.interaction == "dot" else 0
        return self.dense_parameters + pairs * self.tables[0].dim

    @property
    def flops(self) -> float:
        """Of a step by the model's own arithmetic, forward and backward; lookups are none."""
        return 6.0 * self.batch * self.products


class Shard(NamedTuple):
    """A rectangle of a table.

    Attributes:
        table: Position of its group of tables in the workload.
        copy: Which of the group.
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
    """Tables that every device has, as they are small.

    Args:
        workload: With tables.
        rows: Most of such a table; 0 for none.
    """
    return tuple(one for one in workload.tables if one.rows <= rows)


@dataclass(frozen=True)
class Placement:
    """Tables as they lie on the devices of one group.

    Attributes:
        workload: With tables.
        shards: Rectangles of tables.
        devices: Device of each shard, ``[S]``.
        size: Devices of the group.
    """

    workload: Recommender
    shards: tuple[Shard, ...]
    devices: NDArray[np.int64]
    size: int

    def _each(self, values: list[float]) -> Array:
        return np.array(values, dtype=np.float64)

    @cached_property
    def rows(self) -> Array:
        """Of every shard."""
        return self._each([one.rows for one in self.shards])

    @cached_property
    def columns(self) -> Array:
        """Of every shard."""
        return self._each([one.columns for one in self.shards])

    @cached_property
    def lookups(self) -> Array:
        """Of a sample in every shard, a mean."""
        tables = self.workload.tables
        return self._each([tables[one.table].lookups * one.rows / tables[one.table].rows for one in self.shards])

    @cached_property
    def weight_bytes(self) -> Array:
        """Of a value in every shard."""
        return self._each([self.workload.tables[one.table].weight_bytes for one in self.shards])

    def by_device(self, values: Array) -> Array:
        """Sums over the shards of every device: ``[size]``.

        Args:
            values: Values of every shard.
        """
        return np.asarray(np.bincount(self.devices, values, minlength=self.size), dtype=np.float64)

    @cached_property
    def memory(self) -> Array:
        """Bytes of every device's tables: ``[size]``."""
        return self.by_device(self.rows * self.columns * self.weight_bytes)

    @cached_property
    def optimizer(self) -> Array:
        """Bytes of every device's optimizer state: ``[size]``; a table cut in columns has it once a part."""
        return self.by_device(self.rows * self.workload.optimizer_bytes)

    @cached_property
    def sent_columns(self) -> Array:
        """Values that every device sends of a sample: ``[size]``; each part of a table cut in rows sends a sum."""
        return self.by_device(self.columns)

    @cached_property
    def received(self) -> Array:
        """Bytes of a sample that every device gets, ids and how many: ``[size]``; to each part in columns anew."""
        return self.by_device(self.lookups * self.workload.id_bytes + LENGTH_BYTES)

    @cached_property
    def read(self) -> Array:
        """Bytes of memory that a sample's lookups move on every device: ``[size]``."""
        moved = self.lookups * (self.columns * self.weight_bytes + self.workload.id_bytes)
        return self.by_device(moved + self.columns * self.workload.forward_bytes)

    @cached_property
    def update(self) -> Array:
        """Bytes of memory that a sample's update moves in every shard, each row once a lookup: ``[S]``."""
        return update_traffic(self.lookups, self.columns, self.weight_bytes, self.workload.optimizer_bytes)

    def synchronised(self, samples: float, copies: int) -> tuple[Array, Array, Array]:
        """What every device exchanges with the other copies of its tables, and what its update moves then.

        All copies make the update of the whole batch and stay equal. A small shard's gradient is added up over copies
        like a dense layer's; of others the copies gather ids and gradients of pooled embeddings, whatever is less.

        Args:
            samples: Number of samples of a step in one group.
            copies: Number of copies of the tables.

        Returns:
            Bytes of gradients that are reduced, bytes that each copy contributes to the gathering, and bytes of memory
            that the update moves, of every device.
        """
        work = self.workload
        if copies == 1:
            none = np.zeros(self.size)
            return none, none, self.by_device(samples * self.update)
        whole = self.rows * self.columns * _GRADIENT_BYTES
        parts = samples * (self.columns * work.backward_bytes + self.lookups * work.id_bytes)
        small = 2.0 * whole / copies < parts  # both times (copies - 1)
        streamed = self.rows * (self.columns * (_GRADIENT_BYTES + 2.0 * self.weight_bytes) + 2.0 * work.optimizer_bytes)
        moved = np.where(small, samples * self.update + streamed, copies * samples * self.update)
        return (
            self.by_device(np.where(small, whole, 0.0)),
            self.by_device(np.where(small, 0.0, parts)),
            self.by_device(moved),
        )

    def ways(self) -> dict[str, int]:
        """How many tables are whole, cut in columns, cut in rows, or both."""
        found = {"whole": 0, "columns": 0, "rows": 0, "both": 0}
        for shard in self.shards:
            if shard.first_row or shard.first_column:
                continue  # count a table by its first part
            table = self.workload.tables[shard.table]
            in_rows, in_columns = shard.rows < table.rows, shard.columns < table.dim
            found[
                "both" if in_rows and in_columns else "rows" if in_rows else "columns" if in_columns else "whole"
            ] += 1
        return found


def update_traffic(lookups: Number, columns: Number, weight_bytes: Number, optimizer_bytes: float) -> Number:
    """Bytes of memory that the backward of a sample's lookups moves, fused with the optimizer.

    The gradient is read once a lookup; the row is read and written, and so is its optimizer state; ids are sorted. Rows
    that several samples share are counted for each: without the ids nobody knows how many they are.

    Args:
        lookups: Number of lookups of a sample.
        columns: Number of columns of the table.
        weight_bytes: Of a value.
        optimizer_bytes: Of a row.
    """
    row = columns * (_GRADIENT_BYTES + 2.0 * weight_bytes) + 2.0 * optimizer_bytes + _SORT_TRAFFIC
    return lookups * row


def _columns(table: Tables, parts: int) -> int:
    """Parts in columns, where so many parts are wanted: all alike, none narrower than :data:`NARROWEST`."""
    possible = [one for one in divisors(table.dim) if table.dim // one >= NARROWEST]
    return next((one for one in possible if one >= parts), possible[-1] if possible else 1)


def _cut(table: Tables, columns: int, rows: int) -> Iterator[tuple[int, int, int, int]]:
    """First row, rows, first column and columns of every part, as :class:`Shard` has them."""
    width, edges = table.dim // columns, [round(i * table.rows / rows) for i in range(rows + 1)]
    for i in range(rows):
        for j in range(columns):
            yield edges[i], edges[i + 1] - edges[i], j * width, width


def place_tables(
    workload: Recommender, size: int, room: float, worth: float, grain: float, copied_rows: int = 0
) -> Placement:
    """Cut tables and give the parts to the devices of a group, the dearest first to the device with least to do.

    A table is cut where it does not fit on a device, or where it costs more than a device's equal share of all tables
    times ``grain``: in columns as far as they stay :data:`NARROWEST` wide, then in rows. Rows are cut for memory only
    where sending, which that does not make less, costs more than looking up.

    Args:
        workload: With tables.
        size: Devices of the group.
        room: Bytes of a device for tables and optimizer state.
        worth: Bytes of memory that are moved while one byte is sent.
        grain: Grain of the equal share; infinite to cut for memory alone.
        copied_rows: Tables of so many rows or fewer are on all devices and not dealt out.

    Raises:
        PlanError: If they do not fit, with how much is missing.
    """
    everywhere = copied(workload, copied_rows)
    costs: list[tuple[float, float]] = []  # of a sample, in bytes of memory: looking up, sending
    for one in workload.tables:
        moved = one.lookups * one.dim * one.weight_bytes
        moved += update_traffic(one.lookups, float(one.dim), one.weight_bytes, workload.optimizer_bytes)
        costs.append((moved, worth * one.dim * (workload.forward_bytes + workload.backward_bytes)))
    tables = [(i, one) for i, one in enumerate(workload.tables) if one not in everywhere]
    share = sum(one.count * sum(costs[i]) for i, one in tables) / size
    missing = (
        sum(one.count * one.rows * (one.dim * one.weight_bytes + workload.optimizer_bytes) for _, one in tables)
        - room * size
    )
    if missing > 0:
        raise PlanError(f"tables over {size:,} devices: {missing / 1e9:,.0f} GB do not fit")
    for finer in (1, 2, 4, 8):  # parts nearly as large as a device leave gaps
        shards: list[tuple[float, float, Shard]] = []
        for i, _ in tables:
            shards += _parts(workload, i, costs[i], share * grain, room / finer, size)
            if len(shards) > MOST_PARTS:
                raise PlanError(f"tables over {size:,} devices: more than {MOST_PARTS:,} parts")
        dearest = sorted(range(len(shards)), key=lambda at: (-shards[at][0], at))
        largest = sorted(range(len(shards)), key=lambda at: (-shards[at][1], at))
        for order in (dearest, largest):  # where the first leaves no place for the last
            loads, sizes = [shards[at][0] for at in order], [shards[at][1] for at in order]
            places = list_scheduling(loads, size, sizes, room * (1 + 1e-9))
            if NOWHERE not in places:
                return Placement(workload, tuple(shards[at][2] for at in order), places, size)
    raise PlanError(f"tables over {size:,} devices: parts leave gaps into which the last do not fit")


def _parts(
    workload: Recommender, table: int, costs: tuple[float, float], limit: float, room: float, size: int
) -> list[tuple[float, float, Shard]]:
    """Parts of a group of tables: cost, bytes and the rectangle.

    Args:
        workload: With tables.
        table: Position of the group of tables.
        costs: Costs of a sample: looking up, sending.
        limit: Most that a part costs.
        room: Most bytes of a part.
        size: Devices.
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
        raise PlanError(f"tables over {size:,} devices: more than {MOST_PARTS:,} parts")
    found = []
    for copy in range(one.count):
        for first_row, rows, first_column, columns in _cut(one, wide, deep):
            cost = up / wide * rows / one.rows + sent / wide
            found.append((cost, rows * row, Shard(table, copy, first_row, rows, first_column, columns)))
    return found
