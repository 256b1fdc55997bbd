"""Embedding tables in a file, with a cache of fixed size in memory: tables larger than the machine's memory.

A batch's rows are brought to memory before they are looked up and stay there until they are updated; all others may lie
in the file alone. Lookup and update are the kernels of :class:`~cordillera.embeddings.tables.EmbeddingTables`, on the
rows in memory, so results are the same, bit for bit, whatever the cache.

Source: Mudigere et al. 2022 (arXiv 2104.05158), section 4.1.3, the software-managed cache over slower memory.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from cordillera.data.ranking.features import FeatureSpec
from cordillera.embeddings.row_file import RowFile
from cordillera.embeddings.tables import EmbeddingTables, TablesConfig, draw_rows
from cordillera.errors import CheckpointError, DataError, DependencyError, TrainingError
from cordillera.jagged import JaggedBatch
from cordillera.kernels.embeddings.cached_rows import EMPTY, WAYS
from cordillera.kernels.embeddings.lookup import Lookup, embedding_bag, linearise
from cordillera.kernels.embeddings.update import available_backends, init_state, sparse_update
from cordillera.kernels.host_memory import on_huge_pages

_CHUNK = 1 << 14  # rows at a time while tables are made; a multiple of the blocks of torch's generator
_MOST_ROWS = 2**31 - 1
_AGE_EVERY = 1024  # updates between halvings of the counts of lfu, as in `RowCache`
_ROOM = 1024  # lines beside the cache at first
# Distinct rows for the next lookup that have no line, ascending, and copies of their numbers.
_NOTHING_AHEAD: tuple[Any, list[Any]] = (np.empty(0, np.int64), [])


class FileTables(EmbeddingTables):
    """:class:`EmbeddingTables` whose rows and optimizer state lie in a file, behind a cache in memory.

    The cache has ``config.cache`` times as many lines as there are rows, in sets of 32 lines. A batch's rows that find
    no line are held beside the cache until ``update`` or ``discard``; updated ones are then written to the file. Room
    for them doubles when it is full, which copies the cache once. ``memory_bytes`` counts both. The system may keep
    pages of the file in memory that it does not need otherwise; these are not counted.

    The file is what a checkpoint of the rows is: ``flush`` makes its content that of the last update, and ``save``
    copies it elsewhere while training goes on. A folder with such a file is opened as of its last flush, also after a
    crash or a full disk. ``state_dict`` holds no rows. Arguments and errors are those of ``EmbeddingTables``, besides:

    Args:
        config: Optimizer, ``cache`` (above 0) and ``cache_policy``; ``rows = "fp32"``.
        folder: Folder of the file. If it holds one, training goes on from it, and ``init`` is not used.
        read_only: Whether the folder holds a file that is only looked up, as other processes may do meanwhile.

    Raises:
        CheckpointError: The folder holds other tables, or a damaged file.
        DataError: There are no tables.
        DependencyError: Numba is missing, the configuration is not as above, or the device is not a CPU.
        RunError: The disk is full.
    """

    def __init__(
        self,
        features: FeatureSpec,
        embedding_dim: int,
        config: TablesConfig,
        folder: Path | str,
        *,
        read_only: bool = False,
        init: float | Literal["uniform_by_rows"] = "uniform_by_rows",
        generator: torch.Generator | None = None,
    ) -> None:
        obstacle = available_backends()["numba"]
        if obstacle is not None or config.rows != "fp32" or config.cache <= 0:
            raise DependencyError(
                obstacle or "tables in a file are kept in float32 behind a cache",
                where="FileTables",
                remedy="use rows = 'fp32' and cache > 0",
            )
        if not features.tables:
            raise DataError("there are no tables to put into a file", where="FileTables", remedy="keep it in memory")
        self._folder, self._read_only = folder, read_only
        super().__init__(features, embedding_dim, config, init=init, generator=generator)

    def _make_rows(self, init: float | Literal["uniform_by_rows"], generator: torch.Generator | None) -> None:
        config, dim = self.config, self.embedding_dim
        if self.num_rows > _MOST_ROWS:
            raise DependencyError(f"at most {_MOST_ROWS:,} rows, got {self.num_rows:,}", where="FileTables")
        self.anchor = nn.Parameter(torch.empty(0))
        shapes = {"weight": (dim,)} | {
            name: tensor.shape[1:] for name, tensor in init_state(config, torch.empty(1).expand(1, dim)).items()
        }
        self._shapes = shapes
        width = sum(shape[0] if shape else 1 for shape in shapes.values())
        identity = {"tables": dict(self.features.tables), "embedding_dim": dim, "optimizer": config.name}
        self.file = RowFile(self._folder, self.num_rows, width, identity, read_only=self._read_only)
        self.step = self.file.step
        self._is_new = self.file.is_new
        if self._is_new:
            self._draw(init, generator)
        sets = -(-int(np.ceil(config.cache * self.num_rows)) // WAYS)
        self.slots = sets * WAYS
        self._tags = np.full((sets, WAYS), EMPTY, np.int32)
        self._pins, self._uses = np.zeros(self.slots, np.int32), np.zeros(self.slots, np.int32)
        self._counts = np.zeros(self.num_rows if config.cache_policy == "lfu" else 0, np.uint8)
        self._dirty = np.zeros(self.slots, np.bool_)
        self._lines: dict[str, Tensor] = {}
        self._resize(self.slots + _ROOM)
        self._outside = np.empty(0, np.int64)  # rows beside the cache, whose lines follow those of the cache
        self._ahead = _NOTHING_AHEAD
        self._held: tuple[Tensor, Tensor] | None = None  # rows of the last training lookup and their slots
        self._worker: ThreadPoolExecutor | None = None
        self._fetching: Future[None] | None = None
        self._saving: Future[None] | None = None
        self._events = {"hits": 0, "reads": 0, "writes": 0, "outside": 0}
        self._zeros = torch.zeros(len(self.features.sparse), dtype=torch.int64)

    def _draw(self, init: float | Literal["uniform_by_rows"], generator: torch.Generator | None) -> None:
        """Write initial rows and state to the file, a few at a time."""
        for name, rows in self.features.tables.items():
            for first in range(0, rows, _CHUNK):
                count = min(rows - first, _CHUNK)
                block = torch.empty(count, self.embedding_dim)
                draw_rows(block, rows, init, generator)
                state = [t.view(count, -1) for t in init_state(self.config, block).values()]
                start = self._starts[name] + first
                self.file.records[start : start + count] = torch.cat([block, *state], 1).numpy()
        self.file.commit(0)

    @property
    def backend(self) -> str:
        """Name of the kernels in use."""
        return "numba"

    @property
    def _in_graph(self) -> Tensor:
        return self.anchor

    @property
    def statistics(self) -> dict[str, int]:
        """Counts so far, by name.

        ``hits``: values of training lookups that were found in lines. ``reads``, ``writes``: rows that were read from
        and written to the file. ``outside``: rows that found no line in training.
        """
        return dict(self._events)

    def memory_bytes(self) -> dict[str, int]:
        """Return the bytes of ``lines`` (rows and state), ``cache`` (tags and counters) and ``file`` (on the disk)."""
        counters = (self._tags, self._pins, self._uses, self._counts, self._dirty, self._outside)
        return {
            "lines": sum(4 * tensor.numel() for tensor in self._lines.values()),
            "cache": sum(array.nbytes for array in counters) + self.file.memory_bytes(),
            "file": 4 * self.num_rows * self.file.width,
        }

    def prefetch(self, sparse: JaggedBatch) -> None:
        """Begin to read the rows of the next batch, in a thread; lines that the present batch uses are not given away.

        Call it after the lookup of the present batch. The next lookup or flush waits for it, and raises its errors.
        """
        self._wait()
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, "rows-of-next-batch")
        offsets = None if sparse.one_hot else sparse.offsets
        rows, misplaced = linearise(sparse.values.to(torch.int64), offsets, self._first_row, self._num_rows)
        if misplaced < 0 and rows.numel():  # the lookup refuses misplaced ids
            self._fetching = self._worker.submit(self._fetch, rows.numpy(), self.step + 2, self.step + 1)

    def _fetch(self, rows: Any, stamp: int, oldest: int) -> None:
        wanted = np.setdiff1d(rows[self._find(rows, stamp)[1]], self._outside)  # others are written by the update
        refused = wanted[self._place(wanted, stamp, oldest) < 0]
        copies = [np.empty((refused.size, part.shape[1]), np.float32) for part in self._parts()]
        self.file.read(refused, copies, np.arange(refused.size))
        self._events["reads"] += refused.size
        self._ahead = (refused, copies)

    def _wait(self) -> None:
        fetching, self._fetching = self._fetching, None
        if fetching is not None:
            fetching.result()

    def _look_up(
        self, values: Tensor, offsets: Tensor | None, value_weights: Tensor | None, dtype: torch.dtype
    ) -> Lookup:
        rows, misplaced = linearise(values.to(torch.int64), offsets, self._first_row, self._num_rows)
        if misplaced >= 0:
            return Lookup(values.new_empty(0), rows, misplaced)
        self._wait()
        outside = self._outside
        slots = self._bring(rows, self.step + 1 if self.training else 0)
        weight = self._lines["weight"]
        limits = torch.full_like(self._zeros, weight.shape[0])
        found = embedding_bag(
            weight, slots, offsets, value_weights, self._zeros, limits, dtype=dtype, backend=self.backend
        )
        if self.training:
            self._held = (rows, slots)
        else:
            self._outside = outside
        return Lookup(found.output, rows, -1)

    def _find(self, rows: Any, stamp: int) -> tuple[Any, Any]:
        """Slots of rows, -1 for those in no line, and the positions of these; lines found are pinned for ``stamp``."""
        slots, missing = np.empty(rows.size, np.int64), np.empty(rows.size, np.int64)
        count = _kernels().hold(self._tags, rows, stamp, self._pins, self._uses, slots, missing)
        return slots, missing[:count]

    def _place(self, rows: Any, stamp: int, oldest: int) -> Any:
        """Bring distinct rows to lines; return the slot of each, -1 for those whose set has no line to give away."""
        slots, driven_out = np.empty(rows.size, np.int64), np.empty(rows.size, np.int64)
        by_use = self.config.cache_policy == "lfu"
        _kernels().place(
            self._tags, rows, stamp, oldest, by_use, self._pins, self._uses, self._counts, slots, driven_out
        )
        placed = slots >= 0
        lost = (driven_out != EMPTY) & self._dirty[slots]
        self._write(driven_out[lost], slots[lost])
        self._read(rows[placed], slots[placed])
        self._dirty[slots[placed]] = False
        return slots

    def _bring(self, values: Tensor, stamp: int) -> Tensor:
        """Bring all rows to memory and return their slots; with a ``stamp`` of 0, without a change of the cache."""
        rows = values.numpy()
        slots, missing = self._find(rows, stamp)
        self._events["hits"] += (rows.size - missing.size) * (stamp > 0)
        if missing.size:
            wanted, inverse = np.unique(rows[missing], return_inverse=True)
            places = self._position_outside(wanted)
            unknown = places < 0
            copied = _positions(self._ahead[0], wanted)
            new = unknown & (copied < 0)
            if stamp and new.any():
                places[new] = self._place(wanted[new], stamp, stamp)
                unknown = places < 0
            fresh = wanted[unknown]
            if fresh.size:
                begin = self.slots + self._outside.size
                self._resize(begin + fresh.size)
                places[unknown] = np.arange(begin, begin + fresh.size)
                self._outside = np.concatenate([self._outside, fresh])
                self._take(fresh, copied[unknown], places[unknown])
                self._events["outside"] += fresh.size * (stamp > 0)
            slots[missing] = places[inverse]
        if stamp:
            self._ahead = _NOTHING_AHEAD
        return torch.from_numpy(slots)

    def _take(self, rows: Any, copied: Any, slots: Any) -> None:
        """Bring rows to lines, from the copies that were read ahead or, where ``copied`` is -1, from the file."""
        kept = copied >= 0
        for part, source in zip(self._parts(), self._ahead[1], strict=False):
            _kernels().copy_rows(source, copied[kept], 0, part, slots[kept], 0, part.shape[1])
        self._read(rows[~kept], slots[~kept])

    def _position_outside(self, rows: Any) -> Any:
        """Slots of rows that are held beside the cache, -1 for others."""
        order = np.argsort(self._outside, kind="stable")
        places = _positions(self._outside[order], rows)
        held = places >= 0
        places[held] = self.slots + order[places[held]]
        return places

    def _apply_gradients(self, merged: Any, learning_rate: float) -> None:
        held, self._held = self._held, None
        if held is not None and held[0].data_ptr() == merged.rows.data_ptr():
            slots = held[1]
        else:
            self._wait()
            slots = self._bring(merged.rows, self.step)
        grad = merged.grad if merged.grad.dim() == 3 else merged.grad.unsqueeze(1)
        state = {name: line for name, line in self._lines.items() if name != "weight"}
        sparse_update(
            self.config, self._lines["weight"], state, slots, merged.offsets, grad, merged.value_weights,
            learning_rate=learning_rate, step=self.step, backend="numba",
        )  # fmt: skip
        inside = slots.numpy()
        self._dirty[inside[inside < self.slots]] = True
        if self._outside.size:
            self._wait()
            self._write(self._outside, np.arange(self.slots, self.slots + self._outside.size))
            self._outside = self._outside[:0]
        if self.config.cache_policy == "lfu" and self.step % _AGE_EVERY == 0:
            self._wait()
            self._uses >>= 1
            self._counts >>= 1

    def discard(self) -> None:
        """Discard the gradients that wait for :meth:`update`."""
        super().discard()
        self._wait()
        self._held, self._outside, self._ahead = None, self._outside[:0], _NOTHING_AHEAD

    def flush(self) -> None:
        """Write all changed rows to the file, and commit the state of the last update.

        Raises:
            RunError: The disk is full; the file is as of the last flush when it is opened again.
            TrainingError: Gradients wait for ``update``.
        """
        if self._pending:
            raise TrainingError("gradients wait for an update", where="FileTables", remedy="call update() first")
        self._wait()
        if self._saving is not None:
            self._saving.result()
            self._saving = None
        changed = np.flatnonzero(self._dirty)
        self._write(self._tags.reshape(-1)[changed].astype(np.int64), changed)
        self._dirty[:] = False
        self.file.commit(self.step)

    def save(self, folder: Path | str, *, wait: bool = True) -> Future[None]:
        """Flush, then copy the file to another folder; without ``wait``, in a thread while training continues.

        Returns:
            The copy under way, whose ``result()`` waits and raises its errors; the next ``flush`` waits for it too.

        Raises:
            RunError: The disk is full.
            TrainingError: Gradients wait for ``update``.
        """
        self.flush()
        worker = ThreadPoolExecutor(1, "copy-of-rows")
        self._saving = copying = worker.submit(self.file.copy, folder)
        worker.shutdown(wait=False)
        if wait:
            copying.result()
        return copying

    def not_finite(self) -> str | None:
        """Describe a number in the file, as of the last flush, that is NaN or infinite; None if all are finite."""
        for name, rows in self.features.tables.items():
            for first in range(0, rows, _CHUNK):
                start, count = self._starts[name] + first, min(rows - first, _CHUNK)
                block = self.file.records[start : start + count]
                wrong = np.flatnonzero(~np.isfinite(block).all(1))
                if wrong.size:
                    values = block[wrong[0]]
                    return f"row {first + wrong[0]} of table {name!r} holds {values[~np.isfinite(values)][0]}"
        return None

    def load(self, folder: Path | str) -> None:
        """Load all rows, their state and the step count from the file in another folder.

        Raises:
            CheckpointError: The folder holds other tables, a damaged file, or none.
            RunError: The disk is full, or the tables are only read.
        """
        self.discard()
        if self._saving is not None:
            self._saving.result()
            self._saving = None
        self.file.replace(folder)
        self.step = self.file.step
        self._tags[:] = EMPTY
        for array in (self._pins, self._uses, self._counts, self._dirty):
            array[:] = 0

    def table(self, name: str) -> Tensor:
        """Return a copy of one table, ``float32 [rows, D]``; writing to it changes nothing."""
        start, rows = self._place_of(name)
        return self._part("weight", start, rows)

    def _part(self, part: str, start: int, rows: int) -> Tensor:
        self._wait()
        names = list(self._shapes)
        widths = [shape[0] if shape else 1 for shape in self._shapes.values()]
        first = sum(widths[: names.index(part)])
        block = torch.from_numpy(
            np.array(self.file.records[start : start + rows, first : first + widths[names.index(part)]])
        )
        held = np.flatnonzero((self._tags.reshape(-1) >= start) & (self._tags.reshape(-1) < start + rows))
        lines = self._lines[part].view(self._lines[part].shape[0], -1)
        block[self._tags.reshape(-1)[held].astype(np.int64) - start] = lines[held]
        return block.view(rows, *self._shapes[part])

    def clear_columns(self, first: int) -> None:
        """Set columns from ``first`` on to zero in a new file; an opened file keeps its rows.

        Raises:
            TrainingError: Rows were looked up.
        """
        if not self._is_new:
            return
        if self.step or (self._tags != EMPTY).any():
            raise TrainingError("columns are cleared before the first lookup", where="FileTables")
        for start in range(0, self.num_rows, _CHUNK):
            self.file.records[start : start + _CHUNK, first : self.embedding_dim] = 0
        self.file.commit(0)

    def close(self) -> None:
        """Close the file, without a flush; the tables cannot be used any more."""
        self._wait()
        if self._worker is not None:
            self._worker.shutdown()
        self.file.close()

    def _resize(self, lines: int) -> None:
        """Make room for a number of lines, at least."""
        now = self._lines["weight"].shape[0] if self._lines else 0
        if now >= lines:
            return
        if now:
            lines = max(lines, self.slots + 2 * (now - self.slots))
        for name, shape in self._shapes.items():
            tensor = on_huge_pages(torch.zeros((lines, *shape)))
            if name in self._lines:
                tensor[: self._lines[name].shape[0]] = self._lines[name]
            self._lines[name] = tensor

    def _parts(self) -> list[Any]:
        return [line.view(line.shape[0], -1).numpy() for line in self._lines.values()]

    def _read(self, rows: Any, slots: Any) -> None:
        self.file.read(rows, self._parts(), slots)
        self._events["reads"] += rows.size

    def _write(self, rows: Any, slots: Any) -> None:
        if rows.size:
            self.file.write(rows, self._parts(), slots)
            self._events["writes"] += rows.size

    def set_extra_state(self, state: Any) -> None:
        """Restore the step count from a state dict; it must equal the step count of the file.

        Raises:
            CheckpointError: The count is negative, or the file is as of another update.
        """
        step = self.step
        super().set_extra_state(state)
        if self.step != step:
            found, self.step = self.step, step
            raise CheckpointError(
                f"the state is of update {found}, the file of update {step}",
                where=f"FileTables in {self.file.folder}",
                remedy="open the folder that save() wrote at that update",
            )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FileTables:
        moved = fn(torch.empty(0))
        if moved.device.type != "cpu" or moved.dtype != torch.float32:
            raise DependencyError(
                f"tables in a file are in float32 on a CPU, not in {moved.dtype} on {moved.device}", where="FileTables"
            )
        super()._apply(fn, recurse)
        return self


def _positions(ascending: Any, wanted: Any) -> Any:
    """Positions of wanted numbers in ascending distinct ones, -1 for those that are not there."""
    if not ascending.size:
        return np.full(wanted.size, -1, np.int64)
    at = np.searchsorted(ascending, wanted).clip(max=ascending.size - 1)
    return np.where(ascending[at] == wanted, at, -1)


def _kernels() -> Any:
    return import_module("cordillera.kernels.embeddings.numba_file_rows")  # compiled where they are first used
