"""Map from any 64-bit id to a row of a growing table: no collisions, admission by count, eviction by age or use.

A hashed vocabulary lets several ids share a row by chance. Here every id that was seen often enough has a row of its
own. Rows are numbered in the order in which ids are admitted; evicted rows are used again, the lowest first. What a
sequence of calls gives depends on these calls alone, not on threads.

Source: Liu et al. 2022, "Monolith" (arXiv 2209.07663), section 2.2: collisionless tables, filters by count, expiry.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from cordillera.errors import CheckpointError, DataError, TrainingError
from cordillera.kernels.host_memory import on_huge_pages

_MOST_CLOCK = 2**31 - 2
_MOST_TABLES = 2**16 - 2
_FULL = 0.6  # share of the entries above which the map doubles


class DynamicRowsConfig(BaseModel):
    """Admission and eviction of the rows of dynamic tables.

    Attributes:
        min_count: Number of occurrences in training after which an id gets a row of its own, 1 to 255; until then it
            shares a row with all such ids of its table.
        max_age: Number of updates without the id after which its row, or its count, is dropped; None for never.
        max_rows: Number of rows of all tables that an eviction leaves; None for any number. Between evictions tables
            may be larger.
        evict_by: Rows that go first when there are more than ``max_rows``: those used by the fewest updates (``use``)
            or not used for the most updates (``age``). Rows that the last update used stay.
        evict_every: Number of updates between evictions.
        keep_removed: Number of updates for which the ids of evicted rows are kept, so that deltas can name them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    min_count: int = Field(1, ge=1, le=255)
    max_age: int | None = Field(None, ge=1)
    max_rows: int | None = Field(None, ge=1)
    evict_by: Literal["age", "use"] = "age"
    evict_every: int = Field(1000, ge=1)
    keep_removed: int = Field(100_000, ge=0)


class IdRows(NamedTuple):
    """Result of :meth:`IdMap.find_or_insert`.

    Attributes:
        rows: Row of every id, ``int64 [T]``.
        new: Rows that ids were given in this call, in this order, ``int64 [N]``.
    """

    rows: Tensor
    new: Tensor


class IdMap:
    """Rows of the ids of several tables. Ids of different tables never share a row.

    Rows ``0`` to ``num_tables - 1`` are the shared rows of the tables. Memory: 16 bytes an entry of the map, of which
    between three and six tenths are filled once it has grown, and 20 bytes a row; both double when they are
    full, at a cost of some tens of nanoseconds an entry.

    Attributes:
        clock: Number of updates so far, which the owner sets; calls stamp what they change with ``clock + 1``.
        num_tables: Number of tables.

    Args:
        num_tables: Number of tables, at most 65,534.
        config: Admission and eviction.
        capacity: Number of rows, shared ones included, for which memory is reserved.

    Raises:
        DataError: If the number of tables is out of range.
    """

    def __init__(self, num_tables: int = 1, config: DynamicRowsConfig | None = None, *, capacity: int = 1024) -> None:
        if not 1 <= num_tables <= _MOST_TABLES:
            raise DataError(f"num_tables must be 1 to {_MOST_TABLES:,}, got {num_tables:,}", where="IdMap")
        self.num_tables, self.config, self.clock = num_tables, config or DynamicRowsConfig(), 0
        capacity = max(capacity, num_tables)
        self._row_ids, self._row_tables = np.zeros(capacity, np.int64), np.full(capacity, -1, np.int32)
        self._marks = _marks(capacity)  # last stamp, number of updates that used the row
        self._row_tables[:num_tables] = np.arange(num_tables)
        self._free = np.empty(0, np.int64)
        self._counters = np.array([num_tables, 0, 0, 0], np.int64)
        self._words = _empty_map(_entries(capacity))
        self._removed = _no_removed()

    @property
    def used(self) -> int:
        """Number of rows up to the last one ever used, including shared rows."""
        return int(self._counters[0])

    @property
    def capacity(self) -> int:
        """Number of rows for which memory is reserved."""
        return self._row_ids.size

    @property
    def num_rows(self) -> int:
        """Number of rows in use, shared rows included."""
        return self.used - int(self._counters[1])

    def memory_bytes(self) -> dict[str, int]:
        """Return the bytes of the ``map``, of the ``rows``' ids, tables and counts, and of the ``removed`` ids."""
        rows = self._row_ids.nbytes + self._row_tables.nbytes + self._marks.nbytes + self._free.nbytes
        return {"map": self._words.nbytes, "rows": rows, "removed": sum(a.nbytes for a in self._removed.values())}

    def find(
        self, ids: Tensor, bounds: Tensor | None = None, tables: Tensor | None = None, *, shared: bool = False
    ) -> Tensor:
        """Return the rows of ids, ``int64 [T]``; nothing changes.

        Args:
            ids: ``int64`` or ``uint64 [T]`` on the CPU, any values.
            bounds: ``int64 [P + 1]`` from 0 to ``T``, ascending: ``ids[bounds[i]:bounds[i + 1]]`` are of table
                ``tables[i]``. None if all ids are of table 0.
            tables: ``int64 [P]`` in ``[0, num_tables)``; None with ``bounds`` None.
            shared: Whether ids without a row get the shared row of their table instead of -1.

        Raises:
            DataError: If a dtype or a shape is not one of these.
        """
        return self._find(*self._arguments(ids, bounds, tables), shared)

    def find_or_insert(self, ids: Tensor, bounds: Tensor | None = None, tables: Tensor | None = None) -> IdRows:
        """Count ids, give those that have been seen ``min_count`` times a row of their own, and return all rows.

        Every occurrence counts. Within one call all occurrences of an id get the same row. Ids that have no row yet get
        the shared row of their table. ``ids``, ``bounds`` and ``tables`` are those of :meth:`find`, and so are errors.

        Raises:
            TrainingError: If the number of updates or of rows does not fit the map.
        """
        if not 0 <= self.clock < _MOST_CLOCK:
            raise TrainingError(f"the number of updates must be below {_MOST_CLOCK:,}", where="IdMap")
        from cordillera.kernels.numba_support import threads_for  # Numba is loaded only where it is used

        kernels = _kernels()
        keys, ends, parts = self._arguments(ids, bounds, tables)
        stamp = self.clock + 1
        if threads_for(keys.size) == 1:
            rows = torch.empty(keys.size, dtype=torch.int64)
            kernels.find_and_mark(self._words, keys, ends, parts, rows.numpy(), self._marks, stamp)
        else:
            rows = self._find(keys, ends, parts, False)
            kernels.mark_used(rows.numpy()[rows.numpy() >= 0], self._marks, stamp)
        missing = np.flatnonzero(rows.numpy() < 0)
        new = np.empty(missing.size, np.int64)
        self._counters[kernels.NEW] = done = 0
        while done < missing.size:
            limit = int(_FULL * self._words.size // 2)
            done = kernels.admit(
                self._words, keys, ends, parts, missing, done, self.config.min_count, stamp, limit,
                rows.numpy(), self._row_ids, self._row_tables, self._marks, self._free, self._counters, new,
            )  # fmt: skip
            if done < missing.size:
                self._grow(limit)
        if missing.size and self.config.min_count > 1:  # ids without a row, and those that were given one later
            kernels.resolve(self._words, keys, ends, parts, missing, rows.numpy())
        kernels.mark_used(rows.numpy()[missing], self._marks, stamp)
        return IdRows(rows, torch.from_numpy(new[: self._counters[kernels.NEW]].copy()))

    def touch(self, rows: Tensor) -> None:
        """Record that update number ``clock`` changed ``rows``, ``int64 [N]``."""
        _kernels().mark_changed(rows.contiguous().numpy(), self._marks, self.clock)

    def evict(self) -> Tensor:
        """Drop the rows and counts that the configuration lets go, and return the rows, ascending ``int64 [N]``."""
        config, first, used = self.config, self.num_tables, self.used
        rows = np.flatnonzero(self._row_tables[first:used] >= 0) + first
        stamps, uses = self._marks[rows, 0], self._marks[rows, 1]
        candidate_ids, payloads = self._candidates()
        gone, lost = np.zeros(rows.size, np.bool_), np.zeros(payloads.size, np.bool_)
        if config.max_age is not None:
            gone = self.clock - stamps > config.max_age
            lost = self.clock - (payloads & _kernels().STAMP_MASK) > config.max_age
        if config.max_rows is not None:
            order = np.lexsort((rows, stamps, uses) if config.evict_by == "use" else (rows, uses, stamps))
            order = order[~gone[order] & (stamps[order] < self.clock)]
            gone[order[: max(0, rows.size - int(gone.sum()) - config.max_rows)]] = True
        if gone.any() or lost.any():
            rows = rows[gone]
            self._remove(rows, candidate_ids[lost], payloads[lost])
            self._row_ids[rows], self._row_tables[rows], self._marks[rows] = 0, -1, 0
            self._rebuild(self._words.size // 2, candidate_ids[~lost], payloads[~lost])
        else:
            rows = rows[:0]
        return torch.from_numpy(rows)

    def ids_of(self, table: int) -> tuple[Tensor, Tensor]:
        """Return the ids of a table that have a row, ``int64 [N]``, and their rows, ascending ``int64 [N]``."""
        first = self.num_tables
        rows = np.flatnonzero(self._row_tables[first : self.used] == table) + first
        return torch.from_numpy(self._row_ids[rows]), torch.from_numpy(rows)

    def count_rows(self) -> list[int]:
        """Return the number of rows of every table, shared rows included."""
        tables = self._row_tables[: self.used]
        return np.bincount(tables[tables >= 0], minlength=self.num_tables).tolist()

    def state(self) -> dict[str, Tensor]:
        """Return copies of everything that results depend on, as tensors; equal states give equal tensors.

        ``row_ids [used]`` and ``row_tables [used]`` (-1 where a row is free); ``row_marks [used, 2]`` (last stamp and
        number of updates that used the row); ``candidate_ids [C]`` and ``candidate_payloads [C]`` (ids without a row,
        with count and stamp); ``removed_ids``, ``removed_tables``, ``removed_rows`` (-1 for ids that had none) and
        ``removed_stamps [E]``.
        """
        used = self.used
        ids, payloads = self._candidates()
        arrays = {
            "row_ids": self._row_ids[:used],
            "row_tables": self._row_tables[:used],
            "row_marks": self._marks[:used],
            "candidate_ids": ids,
            "candidate_payloads": payloads,
            **self._removed,
        }
        return {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}

    def load(self, state: dict[str, Tensor]) -> None:
        """Restore a state from :meth:`state`; the ``clock`` is the owner's.

        Raises:
            CheckpointError: If a tensor is missing, or the state is one that no map of these tables is in; the map is
                then as it was.
        """
        arrays = self._checked(state)
        used, capacity = arrays["row_ids"].size, self.capacity
        capacity = max(capacity, used)
        before = dict(vars(self))
        self._row_ids, self._row_tables = np.zeros(capacity, np.int64), np.full(capacity, -1, np.int32)
        self._marks = _marks(capacity)
        self._row_ids[:used], self._row_tables[:used] = arrays["row_ids"], arrays["row_tables"]
        self._marks[:used] = arrays["row_marks"]
        self._counters = np.array([used, 0, 0, 0], np.int64)
        self._removed = {name: arrays[name] for name in self._removed}
        count = used + arrays["candidate_ids"].size
        if self._rebuild(_entries(count), arrays["candidate_ids"], arrays["candidate_payloads"]):
            vars(self).update(before)
            raise _impossible("an id stands twice in its table")

    def changes(self, since: int) -> dict[str, Tensor]:
        """Return what changed after update ``since``: rows with their ids, counts of ids without a row, removed ids.

        Names are those of :meth:`state`, with ``rows [N]``, the changed rows in ascending order, and ``used [1]``.

        Raises:
            CheckpointError: If ``since`` lies in the future, or removed ids are not kept that long.
        """
        if not 0 <= since <= self.clock or self.clock - since > self.config.keep_removed:
            raise CheckpointError(
                f"removed ids are kept for {self.config.keep_removed:,} updates and this is update {self.clock:,}; "
                f"changes since update {since:,} are not known",
                where="IdMap",
                remedy="copy the whole state, or raise keep_removed",
            )
        used, stamp_mask = self.used, _kernels().STAMP_MASK
        state = self.state()
        rows = torch.from_numpy(np.flatnonzero(self._marks[:used, 0] > since))
        changes = {"rows": rows, "used": torch.tensor([used])}
        changes |= {name: state[name][rows] for name in ("row_ids", "row_tables", "row_marks")}
        recent = (state["candidate_payloads"] & stamp_mask) > since
        changes |= {name: state[name][recent] for name in ("candidate_ids", "candidate_payloads")}
        after = state["removed_stamps"] > since
        return changes | {name: state[name][after] for name in self._removed}

    def changed(self, changes: dict[str, Tensor], since: int) -> dict[str, Tensor]:
        """Return the state, for :meth:`load`, after ``changes`` since update ``since`` of another map of this state.

        Raises:
            CheckpointError: If a tensor is missing or names a row outside the map.
        """
        kernels = _kernels()
        if any(name not in changes for name in (*_DTYPES, "rows", "used")) or changes["used"].numel() != 1:
            raise _impossible("a tensor is missing")
        state, used, rows = self.state(), int(changes["used"]), changes["rows"]
        if used < self.num_tables or (rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < used):
            raise _impossible("a changed row lies outside the table")
        removed = self._of_pairs(changes["removed_ids"], changes["removed_tables"])
        tables = state["row_tables"].clone()
        evicted = _contains(removed, state["row_ids"], tables.clamp(min=0)) & (tables >= 0)
        evicted[: self.num_tables] = False
        for name, blank in (("row_ids", 0), ("row_tables", -1), ("row_marks", 0)):
            state[name][evicted] = blank
            resized = torch.full((used, *state[name].shape[1:]), blank, dtype=state[name].dtype)
            kept = min(used, state[name].shape[0])
            resized[:kept] = state[name][:kept]
            resized[rows] = changes[name]
            state[name] = resized
        tables = ((state["candidate_payloads"] >> kernels.TABLE_SHIFT) - 1).to(torch.int32)
        new_tables = ((changes["candidate_payloads"] >> kernels.TABLE_SHIFT) - 1).to(torch.int32)
        own = rows >= self.num_tables
        known = self._of_pairs(
            torch.cat([changes["row_ids"][own], changes["candidate_ids"], changes["removed_ids"]]),
            torch.cat([changes["row_tables"][own], new_tables, changes["removed_tables"]]),
        )
        stay = ~_contains(known, state["candidate_ids"], tables)
        for name in ("candidate_ids", "candidate_payloads"):
            state[name] = torch.cat([state[name][stay], changes[name]])
        before = state["removed_stamps"] <= since
        for name in self._removed:
            state[name] = torch.cat([state[name][before], changes[name]])
        return state

    def _of_pairs(self, ids: Tensor, tables: Tensor) -> Any:
        """Make a map that holds pairs of an id and a table."""
        if ids.shape != tables.shape:
            raise _impossible("ids and tables differ in number")
        words = _empty_map(_entries(ids.numel()))
        payloads = (tables.to(torch.int64) + 1 << _kernels().TABLE_SHIFT).numpy()
        _kernels().enter(words, ids.contiguous().numpy(), payloads)
        return words

    def _arguments(self, ids: Tensor, bounds: Tensor | None, tables: Tensor | None) -> tuple[Any, Any, Any]:
        if ids.dtype not in (torch.int64, torch.uint64) or ids.dim() != 1 or ids.device.type != "cpu":
            raise DataError(
                f"ids must be int64 or uint64 [T] on the CPU, got {ids.dtype} {list(ids.shape)} on {ids.device}",
                where="IdMap",
            )
        keys = ids.contiguous().view(torch.int64).numpy()
        if bounds is None or tables is None:
            return keys, np.array([0, keys.size]), np.zeros(1, np.int64)
        ends, parts = bounds.contiguous().numpy(), tables.contiguous().numpy()
        fits = ends.dtype == parts.dtype == np.int64 and ends.shape == (parts.size + 1,)
        fits = fits and ends[0] == 0 and ends[-1] == keys.size and bool((ends[1:] >= ends[:-1]).all())
        if not fits or (parts.size and not 0 <= parts.min() <= parts.max() < self.num_tables):
            raise DataError(
                f"bounds must be int64, ascending, from 0 to {keys.size}, and tables one int64 a part, 0 to "
                f"{self.num_tables - 1}",
                where="IdMap",
            )
        return keys, ends, parts

    def _find(self, keys: Any, ends: Any, parts: Any, shared: bool) -> Tensor:
        from cordillera.kernels.numba_support import pool, threads_for  # Numba is loaded only where it is used

        rows = torch.empty(keys.size, dtype=torch.int64)
        threads = threads_for(keys.size)
        if threads == 1:  # no other thread is woken
            _kernels().find_between(self._words, keys, ends, parts, shared, rows.numpy(), 0, keys.size)
            return rows
        with pool(threads):
            _kernels().find_rows(self._words, keys, ends, parts, shared, rows.numpy(), threads)
        return rows

    def _grow(self, limit: int) -> None:
        """Double the rows, or the entries if ``limit`` of them are filled."""
        if self._counters[_kernels().FILLED] >= limit:
            self._rebuild(self._words.size, *self._candidates())
        if self._counters[_kernels().FREE] == 0 and self.used == self.capacity:
            more = self.capacity
            if 2 * more > 2**31:
                raise TrainingError("a map holds at most 2,147,483,648 rows", where="IdMap", remedy="set max_rows")
            self._row_ids = np.concatenate([self._row_ids, np.zeros(more, np.int64)])
            self._row_tables = np.concatenate([self._row_tables, np.full(more, -1, np.int32)])
            marks = _marks(self.capacity)
            marks[: len(self._marks)] = self._marks
            self._marks = marks

    def _rebuild(self, entries: int, candidate_ids: Any, payloads: Any) -> int:
        """Rebuild the map and the free rows from rows and candidates; return the number of duplicate ids."""
        kernels, used = _kernels(), self.used
        words = _empty_map(entries)
        tables = self._row_tables[:used].astype(np.int64)
        of_rows = np.where(tables >= 0, (tables + 1) << kernels.TABLE_SHIFT | np.arange(used), 0)
        of_rows[: self.num_tables] = 0
        twice = kernels.enter(words, self._row_ids[:used], of_rows) + kernels.enter(words, candidate_ids, payloads)
        self._words = words
        self._free = np.flatnonzero(tables < 0)[::-1].copy()  # the lowest is taken first
        self._counters[kernels.FREE] = self._free.size
        self._counters[kernels.FILLED] = np.count_nonzero(of_rows) + payloads.size
        return int(twice)

    def _candidates(self) -> tuple[Any, Any]:
        """Ids without a row and their payloads, ordered by table and id."""
        kernels = _kernels()
        ids, payloads = self._words[::2], self._words[1::2]
        chosen = (payloads & kernels.CANDIDATE) != 0
        ids, payloads = ids[chosen], payloads[chosen]
        order = np.lexsort((ids, payloads >> kernels.TABLE_SHIFT))
        return ids[order], payloads[order]

    def _remove(self, rows: Any, candidate_ids: Any, payloads: Any) -> None:
        """Record removed ids, and forget those that are older than ``keep_removed`` updates."""
        tables = (payloads >> _kernels().TABLE_SHIFT) - 1
        new = {
            "removed_ids": np.concatenate([self._row_ids[rows], candidate_ids]),
            "removed_tables": np.concatenate([self._row_tables[rows], tables.astype(np.int32)]),
            "removed_rows": np.concatenate([rows, np.full(payloads.size, -1)]),
            "removed_stamps": np.full(rows.size + payloads.size, self.clock + 1),
        }
        recent = self._removed["removed_stamps"] > self.clock - self.config.keep_removed
        self._removed = {name: np.concatenate([old[recent], new[name]]) for name, old in self._removed.items()}

    def _checked(self, state: dict[str, Tensor]) -> dict[str, Any]:
        """Return a state as arrays, after checks that protect memory."""
        kernels, first = _kernels(), self.num_tables
        for name, dtype in _DTYPES.items():
            if name not in state or state[name].dtype != dtype:
                raise _impossible(f"{name} is missing or not {dtype}")
        arrays = {name: state[name].cpu().contiguous().numpy().copy() for name in _DTYPES}
        sizes = {name: array.shape for name, array in arrays.items()}
        used = arrays["row_ids"].size
        shapes_fit = sizes["row_ids"] == sizes["row_tables"] == (used,) and sizes["row_marks"] == (used, 2)
        shapes_fit = shapes_fit and sizes["candidate_ids"] == sizes["candidate_payloads"]
        if not shapes_fit or len({sizes[name] for name in self._removed}) != 1:
            raise _impossible("tensors differ in number")
        tables, payloads = arrays["row_tables"], arrays["candidate_payloads"]
        if used < first or (tables[:first] != np.arange(first)).any() or (tables < -1).any() or (tables >= first).any():
            raise _impossible(f"its rows are not of {first} tables")
        of = (payloads >> kernels.TABLE_SHIFT) - 1
        if (payloads & kernels.CANDIDATE == 0).any() or (of < 0).any() or (of >= first).any():
            raise _impossible("an id without a row has no count")
        return arrays


_DTYPES = {
    "row_ids": torch.int64,
    "row_tables": torch.int32,
    "row_marks": torch.int32,
    "candidate_ids": torch.int64,
    "candidate_payloads": torch.int64,
    "removed_ids": torch.int64,
    "removed_tables": torch.int32,
    "removed_rows": torch.int64,
    "removed_stamps": torch.int64,
}


def _no_removed() -> dict[str, Any]:
    return {
        "removed_ids": np.empty(0, np.int64),
        "removed_tables": np.empty(0, np.int32),
        "removed_rows": np.empty(0, np.int64),
        "removed_stamps": np.empty(0, np.int64),
    }


def _entries(needed: int) -> int:
    """Return the number of entries of a map for a number of ids, a power of two."""
    return max(4, 1 << int(needed / _FULL).bit_length())


def _empty_map(entries: int) -> Any:
    return on_huge_pages(torch.zeros(2 * entries, dtype=torch.int64)).numpy()


def _marks(rows: int) -> Any:
    return on_huge_pages(torch.zeros((rows, 2), dtype=torch.int32)).numpy()


def _contains(words: Any, ids: Tensor, tables: Tensor) -> Tensor:
    found = torch.zeros(ids.numel(), dtype=torch.bool)
    _kernels().contains(words, ids.contiguous().numpy(), tables.contiguous().numpy(), found.numpy())
    return found


def _impossible(what: str) -> CheckpointError:
    return CheckpointError(
        f"{what}, which no map of ids is in", where="IdMap", remedy="resume from another step, or take a new delta"
    )


def _kernels() -> Any:
    return import_module("cordillera.kernels.embeddings.numba_id_map")  # compiled where they are first used
