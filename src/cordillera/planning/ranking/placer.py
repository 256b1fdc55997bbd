"""Placement of embedding tables over ranks: how every table is cut, and which rank gets which part.

Proposals cut tables more and more finely. Parts are assigned to ranks (:mod:`cordillera.planning.ranking.assignment`),
then parts of the slowest ranks are cut again and moved, and the proposal with the least predicted time wins (Neo, arXiv
2104.05158: cuts, greedy and largest-differencing placement). Nothing depends on the order of tables, on time or on
chance, so that all ranks find the same placement.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from cordillera.errors import PlanError
from cordillera.planning.ranking.assignment import (
    assign,
    improve,
    loads_by_rank,
    slowest_sum,
    square_weights,
    weigh_exchanges,
)
from cordillera.planning.ranking.placement import COLUMN_MULTIPLE, Placement, TablePart
from cordillera.planning.ranking.table_cost import (
    PHASES,
    Indices,
    TableCosts,
    TableLoads,
    TableProfile,
    TableRates,
    table_loads,
)
from cordillera.planning.ranking.workload import Array
from cordillera.topology import Numeric

_GRAINS = (1.5, 1.0, 0.7, 0.5, 0.25)  # largest cost of a part in equal shares of a rank
_FINER = (1, 2, 4, 8)  # parts of a rank's memory: large parts leave gaps into which the last do not fit
_ROOMS = (
    1.05,
    1.12,
    1.2,
    1.3,
    1.5,
    2.0,
    3.0,
    5.0,
    10.0,
    math.inf,
)  # rooms tried, in the least room into which the tables fit
_FEW_ROOMS = (1.1, 1.5, math.inf)
_NEAR = 1.005  # ratio to the mean below which a placement is not improved further
_MOST_PARTS = 1 << 17
_FEW = 4096  # parts times ranks up to which all rooms are tried and every proposal is improved, not only the best
_PATIENCE = 3  # consecutive cuts without a gain before the search stops, as later exchanges may gain
_CUT_WAYS = 32  # sizes tried when a part is cut again


class PlacementConfig(BaseModel):
    """How tables may be placed over ranks.

    Attributes:
        cuts: Directions in which tables may be cut; with both, a table may be cut in columns and these in rows.
        memory_gb: Memory of every rank for tables and their optimizer state, in GB (10^9 bytes); null for any.
        copies: Number of groups of ranks, each with all tables (2D parallelism); it divides the number of ranks.
        copied_rows: Largest number of rows of a table that may be copied to all ranks, where that costs less time.
        least_columns: Least columns of a part that is cut in columns, a multiple of 4.
        file_cache: Share of the rows that a cache in memory keeps of a table in a file. Tables are only in files if
            memory does not suffice, those with the fewest lookups per byte first; 0 allows none.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    cuts: tuple[Literal["columns", "rows"], ...] = ("columns", "rows")
    memory_gb: Annotated[float, Numeric, Field(gt=0, allow_inf_nan=False)] | None = None
    copies: Annotated[int, Numeric, Field(ge=1)] = 1
    copied_rows: Annotated[int, Numeric, Field(ge=0)] = 10_000
    least_columns: Annotated[int, Numeric, Field(ge=COLUMN_MULTIPLE, multiple_of=COLUMN_MULTIPLE)] = 16
    file_cache: Annotated[float, Numeric, Field(ge=0, lt=1, allow_inf_nan=False)] = 0.0


@dataclass(frozen=True)
class PlannedPlacement:
    """A placement with its predicted load and the reason for the place of every table.

    Attributes:
        placement: Parts of the tables and their ranks.
        loads: Predicted load of every rank.
        reasons: Reason for the way in which each table is placed, by name.
    """

    placement: Placement
    loads: TableLoads
    reasons: Mapping[str, str]

    def explain(self) -> str:
        """Return the placement in words: the loads of the ranks, then a line for every table."""
        loads = self.loads
        phases = ", ".join(
            f"{name} {1e3 * seconds:,.2f}" for name, seconds in zip(PHASES, loads.seconds.max(0), strict=True)
        )
        lines = [
            f"{len(self.placement.tables):,} tables in {len(self.placement.parts):,} parts on "
            f"{self.placement.size:,} ranks: {1e3 * loads.step_seconds:,.2f} ms a step ({phases})",
            f"fullest rank {loads.memory_bytes.max() / 1e9:,.2f} GB, {loads.memory_imbalance:.3f} times the mean; "
            f"most lookups {loads.lookup_imbalance:.3f} times the mean",
        ]
        return "\n".join(lines + [f"{name}: {reason}" for name, reason in self.reasons.items()])


class _Parts(NamedTuple):
    """Parts as sizes, ``[P]`` each: a table consists of strips of columns, a strip of parts with some of its rows."""

    table: Indices
    strip: Indices
    rows: Indices
    columns: Indices

    def cut(self, part: int, rows: int, columns: int) -> _Parts:
        """Return the parts with ``part`` reduced to ``rows`` and ``columns``; its remainder becomes the last part."""
        table, strip, own_rows, own_columns = (int(values[part]) for values in self)
        in_columns = columns < own_columns
        left = (
            table,
            int(self.strip.max()) + 1 if in_columns else strip,
            own_rows if in_columns else own_rows - rows,
            own_columns - columns if in_columns else own_columns,
        )
        found = _Parts(*(np.append(values, one) for values, one in zip(self, left, strict=True)))
        found.rows[part], found.columns[part] = rows, columns
        return found


def place(
    tables: Mapping[str, TableProfile],
    size: int,
    config: PlacementConfig | None = None,
    *,
    batch: int,
    rates: TableRates | None = None,
) -> PlannedPlacement:
    """Place embedding tables over ranks so that the slowest rank takes as little time as possible.

    Equal arguments give equal placements, in any order of the tables. More memory never gives a longer predicted time
    as long as no table is in a file.

    Args:
        tables: Tables and their traffic, by name.
        size: Number of ranks.
        config: Ways in which tables may be placed; None for the defaults.
        batch: Samples of a step, over all ranks.
        rates: Rates of memory, links and files, :meth:`TableRates.of` for those of a cluster; None for the defaults.

    Raises:
        PlanError: If a value is out of range, or the tables do not fit; the message names the table that is larger than
            the memory of all ranks, and says how many GB are missing.
    """
    config, rates = config or PlacementConfig(), rates or TableRates()
    if size < 1 or batch < 1:
        raise PlanError(f"{size} ranks and {batch} samples", where="placement", remedy="at least 1 of each")
    if size % config.copies:
        raise PlanError(f"{config.copies} copies do not divide {size} ranks", where="placement.copies")
    ordered = {name: tables[name] for name in sorted(tables)}
    search = _Search(TableCosts(ordered, rates, config.file_cache), size, config, float(batch))
    best: tuple[TableLoads, Placement] | None = None
    for everywhere in search.copied_sets():
        for parts in search.solutions(everywhere):
            placement = Placement(size, {name: (one.rows, one.columns) for name, one in tables.items()}, parts)
            loads = table_loads(placement, ordered, batch, rates, config.file_cache)
            if best is None or loads.step_seconds < best[0].step_seconds:
                best = loads, placement
    if best is None:
        raise PlanError(
            f"the parts of tables leave gaps into which the last do not fit, with {search.room / 1e9:,.3g} GB a rank",
            where="placement",
            remedy="more memory_gb, more ranks, cuts in rows and columns, or file_cache",
        )
    reasons = search.reasons(best[1])
    return PlannedPlacement(best[1], best[0], {name: reasons[name] for name in tables})


class _Search:
    """Search for the placement of one set of tables in one group of ranks."""

    def __init__(self, costs: TableCosts, size: int, config: PlacementConfig, batch: float) -> None:
        self.costs, self.size, self.config, self.batch = costs, size, config, batch
        self.group = size // config.copies
        self.every = np.arange(len(costs.names), dtype=np.int64)
        self.whole = costs.bytes(self.every, costs.rows, costs.columns)
        self.room = math.inf if config.memory_gb is None else config.memory_gb * 1e9
        self.in_file = self._files()
        self.seconds = self._seconds(_Parts(self.every, self.every, costs.rows, costs.columns))

    def _seconds(self, parts: _Parts, copies: int | None = None) -> Array:
        in_file = self.in_file[parts.table]
        return self.costs.seconds(
            parts.table, parts.rows, parts.columns, in_file, self.batch, self.size, copies or self.config.copies
        )

    def _bytes(self, parts: _Parts) -> Array:
        held = self.costs.bytes(parts.table, parts.rows, parts.columns)
        return np.where(self.in_file[parts.table], self.config.file_cache * held, held)

    def _files(self) -> NDArray[np.bool_]:
        """Choose the tables in files: as few as possible, those with the fewest lookups per byte first.

        Raises:
            PlanError: If tables do not fit and may not be in files.
        """
        found, room = np.zeros(len(self.whole), dtype=bool), self.room * self.group
        if self.whole.sum() <= room * (1 + 1e-9):
            return found
        if self.config.file_cache:
            read = self.costs.lookup_bytes(self.every, self.costs.rows, self.costs.columns, 1.0)
            order = np.argsort(read / self.whole, kind="stable")
            saved = np.cumsum((1 - self.config.file_cache) * self.whole[order])
            # parts leave small gaps
            needed = np.searchsorted(saved, self.whole.sum() - 0.95 * room) + 1
            found[order[:needed]] = True
            if needed <= len(order) and np.where(found, self.config.file_cache, 1.0) @ self.whole <= room:
                return found
        largest = int(self.whole.argmax())
        name, ranks = self.costs.names[largest], f"{self.group:,} ranks of {self.room / 1e9:,.3g} GB"
        remedy = "more memory_gb, more ranks, fewer copies" + ("" if self.config.file_cache else ", or file_cache")
        over = (self.whole[largest] - room) / 1e9
        if over > 0 and not self.config.file_cache:
            raise PlanError(
                f"{self.whole[largest] / 1e9:,.3g} GB are {over:,.3g} GB more than {ranks} hold",
                where=f"table {name!r}",
                remedy=remedy,
            )
        raise PlanError(
            f"the tables have {self.whole.sum() / 1e9:,.3g} GB, {(self.whole.sum() - room) / 1e9:,.3g} GB more than "
            f"{ranks} hold; the largest is {name!r} with {self.whole[largest] / 1e9:,.3g} GB",
            where="placement",
            remedy=remedy,
        )

    def copied_sets(self) -> list[NDArray[np.bool_]]:
        """Return sets of tables to copy to all ranks: those that save time on average, and none."""
        none = np.zeros(len(self.whole), dtype=bool)
        if self.group == 1:
            return [none]
        whole = _Parts(self.every, self.every, self.costs.rows, self.costs.columns)
        copied = self._seconds(whole, self.size).sum(1)
        cheaper = (copied < self.seconds.sum(1) / self.group) & (self.costs.rows <= self.config.copied_rows)
        cheaper &= ~self.in_file
        return [cheaper, none] if cheaper.any() else [none]

    def solutions(self, everywhere: NDArray[np.bool_]) -> Iterator[tuple[TablePart, ...]]:
        """Iterate over parts with some tables on every rank; over none if the others do not fit beside them.

        Rooms from a fixed series are tried, from the least into which the tables fit to the largest that a rank has.
        The series does not depend on the memory of a rank, so that with more memory nothing better is missed.
        """
        room = (self.room - self.whole[everywhere].sum()) * (1 + 1e-9)
        placed = self.every[~everywhere]
        if self.group == 1 or not len(placed):
            parts = _Parts(placed, placed, self.costs.rows[placed], self.costs.columns[placed])
            if self._bytes(parts).sum() <= room:
                yield self._laid_out(parts, np.zeros(len(placed), dtype=np.int64), everywhere)
            return
        bound = float(self.seconds[placed].sum()) / self.group
        tightest = self._tightest(placed)
        if tightest is None or tightest[2] > room:
            return
        least_room = tightest[2]
        found: tuple[_Parts, Indices, float] | None = self._refined(tightest[0], tightest[1], least_room, bound)
        most_room = float(self.whole[placed].sum()) * (1 + 1e-9)
        for factor in _ROOMS if len(placed) * self.group <= _FEW else _FEW_ROOMS:
            if found is not None:
                yield self._laid_out(found[0], found[1], everywhere)
            limit = min(factor * least_room, most_room)
            if limit > room or (found is not None and found[2] <= bound * _NEAR):
                return
            found = self._within(placed, limit, bound)
        if found is not None:
            yield self._laid_out(found[0], found[1], everywhere)

    def _tightest(self, placed: Indices) -> tuple[_Parts, Indices, float] | None:
        """Return parts and ranks with the least bytes on the fullest rank, and these bytes."""
        share = float(self._bytes(_Parts(placed, placed, self.costs.rows[placed], self.costs.columns[placed])).sum())
        share /= self.group
        best: tuple[_Parts, Indices, float] | None = None
        for finer in _FINER:
            parts = self._cut(placed, math.inf, share / finer)
            if parts is None:
                continue
            held = self._bytes(parts)
            places = assign(held[:, None], held, self.group, math.inf)
            if places is None:
                continue
            places = improve(held[:, None], held, places, self.group, math.inf)
            most = float(loads_by_rank(held[:, None], places, self.group).max())
            if best is None or most < best[2] * (1 - 1e-3):
                best = parts, places, most
            if best[2] <= share * _NEAR:
                break
        return best

    def _within(self, placed: Indices, room: float, bound: float) -> tuple[_Parts, Indices, float] | None:
        """Return the best parts and ranks within some room for a rank, and their time; None if none fits."""
        for finer in _FINER:
            found: list[tuple[_Parts, Indices, float]] = []
            for grain in _GRAINS:
                parts = self._cut(placed, grain, room / finer)
                places = None if parts is None else assign(self._seconds(parts), self._bytes(parts), self.group, room)
                known = parts is not None and any(_equal(parts, one[0]) for one in found)
                if parts is not None and places is not None and not known:
                    found.append((parts, places, slowest_sum(loads_by_rank(self._seconds(parts), places, self.group))))
            found.sort(key=lambda one: one[2])
            for i, (parts, places, _) in enumerate(found):
                found[i] = self._refined(parts, places, room, bound)
                if found[i][2] <= bound * _NEAR or len(parts.table) * self.group > _FEW:
                    return min(found[: i + 1], key=lambda one: one[2])
            if found:
                return min(found, key=lambda one: one[2])
        return None

    def _cut(self, placed: Indices, grain: float, room: float) -> _Parts | None:
        """Cut tables so that no part takes more than ``grain`` equal shares of a phase, nor more than ``room`` bytes.

        Columns are cut first, which divides every cost; rows for what is left, which does not divide sending.
        """
        costs, cuts = self.costs, self.config.cuts
        share = self.seconds[placed].sum(0) / self.group
        relative = np.divide(
            self.seconds[placed], share, out=np.zeros((len(placed), len(share))), where=share > 0
        )  # [T, phases]
        wanted = np.ceil(relative.max(1) / grain - 1e-9)
        rows, columns = costs.rows[placed], costs.columns[placed]
        whole = self._bytes(_Parts(placed, placed, rows, columns))
        most = np.maximum(columns // self.config.least_columns, 1) if "columns" in cuts else np.ones_like(columns)
        wide = np.clip(np.maximum(wanted, np.ceil(whole / room - 1e-9)), 1, most).astype(np.int64)
        strips = -(-columns // (wide * COLUMN_MULTIPLE)) * COLUMN_MULTIPLE
        strips = np.minimum(strips, columns)
        deep = np.ones_like(rows)
        if "rows" in cuts:
            held = self._bytes(_Parts(placed, placed, rows, strips))
            divided = np.maximum(relative[:, 0], relative[:, 2])
            by_time = np.where(divided > relative[:, 1], np.ceil(divided / wide / grain - 1e-9), 1)
            deep = np.maximum(np.ceil(held / room - 1e-9), np.minimum(by_time, self.group))
            deep = np.clip(deep, 1, rows).astype(np.int64)
        if float((wide * deep).sum()) > _MOST_PARTS:
            return None
        return _even_parts(placed, rows, columns, wide, deep)

    def _refined(self, parts: _Parts, places: Indices, room: float, bound: float) -> tuple[_Parts, Indices, float]:
        """Improve the places of parts, and cut parts of the slowest ranks again, as long as that helps."""
        costs, held = self._seconds(parts), self._bytes(parts)
        places = improve(costs, held, places, self.group, room)
        weights = square_weights(costs, held)
        time, score = _score(costs, held, places, self.group, weights)
        best, patience = (parts, places, time), _PATIENCE
        for _ in range(min(4 * self.group + 8, max(8, 20_000 // len(costs)))):
            found = self._split(parts, places, costs, held, room, weights)
            if found is None or best[2] <= bound * _NEAR or not patience:
                break
            parts, places = found
            costs, held = self._seconds(parts), self._bytes(parts)
            places = improve(costs, held, places, self.group, room, 30)
            new, new_score = _score(costs, held, places, self.group, weights)
            better = new <= time * (1 + 1e-12) and new_score < score - 1e-6 * time
            patience = _PATIENCE if better else patience - 1
            if better:
                best, time, score = (parts, places, new), new, new_score
        return best

    def _split(
        self, parts: _Parts, places: Indices, costs: Array, held: Array, room: float, weights: Array
    ) -> tuple[_Parts, Indices] | None:
        """Cut the part of a slowest rank that helps most when a piece of it goes elsewhere; None if none helps."""
        everything = np.concatenate([costs, held[:, None]], axis=1)
        loads = loads_by_rank(everything, places, self.group)
        best: tuple[float, tuple[int, int, int], int, int] | None = None
        for rank in dict.fromkeys(loads[:, :-1].argmax(0).tolist()):
            options = list(self._pieces(parts, np.flatnonzero(places == rank)))
            if not options:
                continue
            part, rows, columns = np.array(options, dtype=np.int64).T
            stays = _Parts(parts.table[part], part, rows, columns)
            in_columns = columns < parts.columns[part]
            goes = stays._replace(
                rows=np.where(in_columns, rows, parts.rows[part] - rows),
                columns=np.where(in_columns, parts.columns[part] - columns, columns),
            )
            kept, moved = (
                np.concatenate([self._seconds(one), self._bytes(one)[:, None]], axis=1) for one in (stays, goes)
            )
            others, there, times, squares = weigh_exchanges(
                everything, places, loads, rank, everything[part] - kept, moved, room * (1 + 1e-9), weights
            )
            score = times + squares
            i, j = divmod(int(score.argmin()), len(others))
            if math.isfinite(score[i, j]) and (best is None or score[i, j] < best[0]):
                best = float(score[i, j]), options[i], int(others[j]), int(there[j])
        if best is None:
            return None
        _, (one, own_rows, own_columns), other, target = best
        places = np.append(places, target)
        if other >= 0:
            places[other] = places[one]
        return parts.cut(one, own_rows, own_columns), places

    def _pieces(self, parts: _Parts, own: Indices) -> Iterable[tuple[int, int, int]]:
        """Iterate over ways to cut parts in two: the part, and the rows and columns that stay."""
        least, ways = self.config.least_columns, _CUT_WAYS if len(parts.table) * self.group <= _FEW else _CUT_WAYS // 4
        for part in own.tolist():
            table, rows, columns = int(parts.table[part]), int(parts.rows[part]), int(parts.columns[part])
            widths = range(least, columns - least + 1, COLUMN_MULTIPLE)
            if "columns" in self.config.cuts and rows == self.costs.rows[table] and widths:
                step = -(-len(widths) // ways)
                yield from ((part, rows, width) for width in widths[::step])
            elif "rows" in self.config.cuts and rows > 1:
                kept = {rows * i // ways for i in range(1, ways)} - {0}
                yield from ((part, some, columns) for some in sorted(kept))

    def _laid_out(self, parts: _Parts, places: Indices, everywhere: NDArray[np.bool_]) -> tuple[TablePart, ...]:
        """Give parts their first rows and columns; what one rank holds side by side becomes one part."""
        found, copies, group = list[TablePart](), self.config.copies, self.group
        of_table: dict[int, dict[int, list[tuple[int, int, int]]]] = {}
        for table, strip, rows, columns, rank in zip(*(one.tolist() for one in (*parts, places)), strict=True):
            of_table.setdefault(table, {}).setdefault(strip, []).append((rank, rows, columns))
        for table in self.every.tolist():
            name, rows, columns = self.costs.names[table], int(self.costs.rows[table]), int(self.costs.columns[table])
            if everywhere[table]:
                found.append(TablePart(name, 0, rows, 0, columns, tuple(range(self.size))))
                continue
            tier: Literal["memory", "file"] = "file" if self.in_file[table] else "memory"
            for first_row, height, first_column, width, rank in _rectangles(list(of_table[table].values())):
                ranks = tuple(copy * group + rank for copy in range(copies))
                found.append(TablePart(name, first_row, height, first_column, width, ranks, tier))
        return tuple(found)

    def reasons(self, placement: Placement) -> dict[str, str]:
        """Return the reason for each table's placement, in words."""
        read = self.costs.lookup_bytes(self.every, self.costs.rows, self.costs.columns, 1.0)
        shares = read / (read.sum() or 1.0)
        time = self.seconds.sum(1) / (self.seconds.sum() or 1.0)
        found = {}
        for at, name in enumerate(self.costs.names):
            parts = placement.parts_by_table[name]
            held = _gigabytes(float(self.whole[at]))
            why = _why(self, at, parts, float(time[at]))
            way = placement.way(name)
            if len(parts) > 1:
                way = f"{len(parts)} parts {way.split(',')[0]}"
            if len(parts[0].ranks) < self.size or self.size == 1:
                ranks = sorted({rank for part in parts for rank in part.ranks})
                some = ", ".join(str(rank) for rank in ranks[:8]) + (", ..." if len(ranks) > 8 else "")
                way += f" on rank{'s' if len(ranks) > 1 else ''} {some}"
            file = ", in a file" if parts[0].tier == "file" else ""
            found[name] = f"{way}{file}: {held}, {100 * shares[at]:.2g} % of the lookups; {why}"
        return found


def _why(search: _Search, at: int, parts: tuple[TablePart, ...], time: float) -> str:
    """Return the reason for the parts of the table at position ``at``, which takes the share ``time`` of all time."""
    group, whole, room = search.group, float(search.whole[at]), search.room
    if parts[0].tier == "file":
        return "memory does not suffice, and it is among those with the fewest lookups per byte"
    if len(parts[0].ranks) == search.size > search.config.copies:
        copied = _Parts(*(np.array([value]) for value in (at, at, search.costs.rows[at], search.costs.columns[at])))
        milliseconds = 1e3 * float(search._seconds(copied, search.size).sum())
        alone = 1e3 * float(search.seconds[at].sum()) / group
        return f"equal copies take {milliseconds:.2g} ms of every rank, {alone:.2g} ms if it were divided"
    if len(parts) == 1:
        fits = "one rank holds all" if group == 1 else "it fits on a rank, and costs no more than a rank's equal share"
        return fits if time <= 1 / group or group == 1 else "no cut that is allowed takes less time"
    if whole > room:
        return f"it does not fit in the {_gigabytes(room)} of one rank"
    over = search.seconds[at] / np.maximum(search.seconds.sum(0) / group, 1e-300)
    if over.max() > 1:
        return f"it takes {over.max():.2f} times a rank's equal share of {PHASES[int(over.argmax())]}"
    return "its parts make the loads of ranks equal"


def _equal(parts: _Parts, others: _Parts) -> bool:
    return all(np.array_equal(one, other) for one, other in zip(parts, others, strict=True))


def _score(costs: Array, held: Array, places: Indices, ranks: int, weights: Array) -> tuple[float, float]:
    """Return the time of the slowest ranks, and the same plus the weighted squares of all loads."""
    loads = loads_by_rank(np.concatenate([costs, held[:, None]], axis=1), places, ranks)
    time = slowest_sum(loads[:, :-1])
    return time, time + float((loads**2 * weights).sum())


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:,.3g} GB" if size >= 1e8 else f"{size / 1e6:,.3g} MB"


def _even_parts(placed: Indices, rows: Indices, columns: Indices, wide: Indices, deep: Indices) -> _Parts:
    """Cut each table into ``wide`` strips of columns, and each of these into ``deep`` parts, as equal as possible."""
    table = np.repeat(placed, wide)
    units = -(-columns // COLUMN_MULTIPLE)
    at = np.arange(len(table)) - np.repeat(np.cumsum(wide) - wide, wide)  # position of a strip in its table
    count, unit = np.repeat(wide, wide), np.repeat(units, wide)
    ends = np.minimum((at + 1) * unit // count * COLUMN_MULTIPLE, np.repeat(columns, wide))
    widths = ends - at * unit // count * COLUMN_MULTIPLE
    strips, depth = np.arange(len(table)), np.repeat(deep, wide)
    height = np.repeat(rows, wide)
    strip = np.repeat(strips, depth)
    row = np.arange(len(strip)) - np.repeat(np.cumsum(depth) - depth, depth)
    height, depth = np.repeat(height, depth), np.repeat(depth, depth)
    heights = (row + 1) * height // depth - row * height // depth
    return _Parts(table[strip], strip, heights, widths[strip])


def _rectangles(strips: list[list[tuple[int, int, int]]]) -> Iterable[tuple[int, int, int, int, int]]:
    """Iterate over first row, rows, first column, columns and rank of the parts of a table.

    Args:
        strips: Rank, rows and columns of the parts of every strip of columns.
    """
    whole: dict[int, int] = {}  # columns on each rank of strips that are not cut in rows
    for strip in strips:
        if len(strip) == 1:
            rank, height, width = strip[0]
            whole[rank] = whole.get(rank, 0) + width
    joined: list[list[tuple[int, int, int]]] = [strip for strip in strips if len(strip) > 1]
    height = sum(rows for _, rows, _ in strips[0])
    joined += [[(rank, height, whole[rank])] for rank in sorted(whole)]
    # the strip whose width is no multiple of four is the last one
    joined.sort(key=lambda strip: bool(strip[0][2] % COLUMN_MULTIPLE))
    first_column = 0
    for strip in joined:
        of_rank: dict[int, int] = {}
        for rank, rows, _ in strip:
            of_rank[rank] = of_rank.get(rank, 0) + rows
        first_row, width = 0, strip[0][2]
        for rank in sorted(of_rank):
            yield first_row, of_rank[rank], first_column, width, rank
            first_row += of_rank[rank]
        first_column += width
