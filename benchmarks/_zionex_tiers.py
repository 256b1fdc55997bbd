"""Speed of tables in a file beside those in memory, and of dynamic tables beside those of fixed size."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _ranking_batches import criteo_batches, criteo_features
from _timing import Spread, Timing, interleave, times_faster
from torch import Tensor, nn
from torch.nn import functional

from cordillera.data.ranking.features import FeatureSpec, RankingBatch
from cordillera.embeddings.dynamic_tables import DynamicTables
from cordillera.embeddings.file_tables import FileTables
from cordillera.embeddings.tables import EmbeddingTables, MadeTablesConfig, TablesConfig
from cordillera.kernels.host_memory import keep_freed_memory
from cordillera.models.ranking import build
from cordillera.models.ranking.dlrm import DLRMConfig
from cordillera.training.optimizers import build_adamw, embedding_tables

RULE, RATE = "rowwise_adagrad", 0.01
CACHE, TIMES_MEMORY = 0.1, 4  # share of the rows in lines, and bytes of the tables in multiples of the memory given
FILE_TARGET, DYNAMIC_TARGET = 0.3, 1.25
SIZES = {"rows": 40_000, "dim": 128, "batch": 2048, "warmup": 24, "rounds": 24}
QUICK = {"rows": 2_000, "dim": 16, "batch": 64, "warmup": 2, "rounds": 2}
BOTTOM, TOP = (512, 256), (1024, 1024, 512, 256)  # MLPerf's DLRM; the bottom MLP ends with the width of a row
DYNAMIC_DIMS = (32, 128)
PAGE = mmap.PAGESIZE
_DROPPED = 1 << 22  # bytes of the file whose pages are dropped at a time


class Pages:
    """Pages of a file that the system keeps in memory, limited as by a machine with less memory.

    Args:
        tables: Tables in the file.
        most: Largest number of pages.

    Attributes:
        largest: Largest number of pages that :meth:`limit` left; above ``most`` if the system kept some.
    """

    def __init__(self, tables: FileTables, most: int) -> None:
        self.most, self.largest, self._records = most, 0, tables.file.records
        self._bytes = tables.memory_bytes()["file"]
        self._found = np.zeros(-(-self._bytes // PAGE), np.uint8)
        self._file = os.open(tables.file.folder / "rows.bin", os.O_RDWR)
        self._library, self._hand = ctypes.CDLL(None, use_errno=True), 0

    @staticmethod
    def obstacle() -> str | None:
        """Return the reason for which pages cannot be counted and dropped here, or None."""
        return None if sys.platform.startswith("linux") else "only Linux drops single pages of files"

    def count(self) -> int:
        """Return the number of pages in memory."""
        start, size = ctypes.c_void_p(self._records.ctypes.data), ctypes.c_size_t(self._bytes)
        if self._library.mincore(start, size, ctypes.c_void_p(self._found.ctypes.data)):
            raise OSError(ctypes.get_errno(), "mincore failed")
        return int((self._found & 1).sum())

    def limit(self) -> None:
        """Write pages to the disk and drop them, those first that were dropped longest ago, until few enough remain."""
        remaining = self.count()
        for _ in range(-(-self._bytes // _DROPPED)):
            if remaining <= self.most:
                break
            size = min(_DROPPED, self._bytes - self._hand)
            self._drop(self._hand, size)
            self._hand = (self._hand + size) % self._bytes
            remaining = self.count()
        self.largest = max(self.largest, remaining)

    def _drop(self, first: int, size: int) -> None:
        start = ctypes.c_void_p(self._records.ctypes.data + first)
        self._library.madvise(start, ctypes.c_size_t(size), mmap.MADV_DONTNEED)
        wait_and_write = 1 | 2 | 4
        self._library.sync_file_range(self._file, ctypes.c_int64(first), ctypes.c_int64(size), wait_and_write)
        os.posix_fadvise(self._file, first, size, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


class Contender:
    """A model, or tables alone, that takes one batch after another.

    Args:
        model: DLRM; None for a step of the tables alone.
        tables: Its tables.
        batches: Batches of the steps.
        gradients: Gradients of the tables' output, for steps of the tables alone.
        pages: Limit of the pages in memory; None for no limit.
    """

    def __init__(
        self,
        model: nn.Module | None,
        tables: EmbeddingTables,
        batches: list[RankingBatch],
        gradients: list[Tensor],
        pages: Pages | None = None,
    ) -> None:
        self.model, self.tables, self.batches, self.gradients, self.pages = model, tables, batches, gradients, pages
        self.taken, self.output = 0, torch.empty(0)
        self.optimizer = None
        if model is not None:
            self.optimizer = build_adamw(model, learning_rate=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)

    def __call__(self) -> None:
        """Take a step, and keep its output."""
        batch, tables = self.batches[self.taken % len(self.batches)], self.tables
        self.taken += 1
        following = self.batches[self.taken % len(self.batches)]
        hook = None
        if isinstance(tables, FileTables):
            hook = tables.register_forward_hook(lambda *_: tables.prefetch(following.sparse))
        if self.model is None or self.optimizer is None:
            output = tables(batch.sparse)
            output.backward(self.gradients[self.taken % len(self.gradients)])
            tables.update()
        else:
            assert batch.labels is not None
            output = self.model(batch)
            functional.binary_cross_entropy_with_logits(output, batch.labels).backward()
            self.optimizer.step()
            tables.update()
            self.optimizer.zero_grad(set_to_none=True)
        if hook is not None:
            hook.remove()
        if self.pages is not None:
            self.pages.limit()
        self.output = output.detach()


def _config(**options: Any) -> TablesConfig:
    return TablesConfig.model_validate({"name": RULE, "learning_rate": RATE, **options})


def _models(
    case: str, features: FeatureSpec, dim: int, quick: bool, make: Callable[..., EmbeddingTables]
) -> tuple[nn.Module | None, EmbeddingTables]:
    """Return a model and its tables, equal for all kinds of tables, or None and tables alone."""
    torch.manual_seed(3)
    if case == "tables":
        return None, make(features, dim, _config())
    bottom, top = ((8,), (8,)) if quick else (BOTTOM, TOP)
    made = DLRMConfig(name="dlrm", embedding_dim=dim, bottom_mlp=(*bottom, dim), top_mlp=top)
    model = build(made, features, MadeTablesConfig.of(_config(), make))
    ((_, tables),) = embedding_tables(model).items()
    return model, tables


def _same(file: FileTables, memory: EmbeddingTables) -> bool:
    return all(torch.equal(file.table(name), memory.table(name)) for name in memory.features.tables)


def _pages_a_second(tables: FileTables, pages: Pages) -> float:
    """Return how many pages of the disk are read in a second, by rows on random ones."""
    every = PAGE // (4 * tables.file.width) + 1
    rows = np.sort(np.random.default_rng(5).choice(tables.num_rows // every, 4_000, replace=False)) * every
    most, pages.most = pages.most, 0
    pages.limit()
    pages.most = most
    before, began = pages.count(), time.perf_counter()
    tables.file.read(rows, [np.empty((rows.size, tables.file.width), np.float32)], np.arange(rows.size))
    seconds = time.perf_counter() - began
    return (pages.count() - before) / seconds


def _in_file(case: str, limited: bool, sizes: dict[str, int], folder: Path, quick: bool) -> dict[str, Any]:
    """Return the speed of a step with tables in a file, relative to one with tables in memory."""
    features, steps = criteo_features(sizes["rows"]), sizes["warmup"] + sizes["rounds"]
    batches = criteo_batches(features, steps + 1, sizes["batch"])
    draw = torch.Generator().manual_seed(4)
    gradients = [torch.randn(sizes["batch"], len(features.sparse), sizes["dim"], generator=draw) for _ in range(2)]
    place = folder / f"{case}-{'limited' if limited else 'kept'}"

    def make_file(*arguments: Any, **options: Any) -> FileTables:
        return FileTables(*arguments[:2], _config(cache=CACHE), place, **options)

    model, memory = _models(case, features, sizes["dim"], quick, EmbeddingTables)
    other, file = _models(case, features, sizes["dim"], quick, make_file)
    assert isinstance(file, FileTables)
    held = file.memory_bytes()
    whole = sum(memory.memory_bytes().values())
    own = held["lines"] + held["cache"]
    pages = Pages(file, max(1, (whole // TIMES_MEMORY - own) // PAGE)) if limited else None
    contenders = {
        "memory": Contender(model, memory, batches, gradients),
        "file": Contender(other, file, batches, gradients, pages),
    }
    equal = True
    for _ in range(sizes["warmup"]):
        contenders["memory"](), contenders["file"]()
        equal = equal and torch.equal(contenders["memory"].output, contenders["file"].output)
    before = dict(file.statistics)
    found = interleave(contenders, rounds=sizes["rounds"], warmup=0)
    taken = {name: (file.statistics[name] - before[name]) / sizes["rounds"] for name in before}
    equal = equal and torch.equal(contenders["memory"].output, contenders["file"].output)
    row: dict[str, Any] = {
        "case": case,
        "pages": "limited" if limited else "kept",
        "evidence": "emulated" if limited else "measured",
        "bytes": whole,
        "bytes_in_memory": own,
        "equal": bool(equal and _same(file, memory)),
        "speed": times_faster(found["file"], found["memory"]).to_json(),
        "seconds": {name: timing.to_json() for name, timing in found.items()},
        "rows_a_step": taken,
        "lookups": sizes["batch"] * len(features.sparse),
    }
    if pages is not None:
        row["pages_left"] = {"largest": pages.largest, "most": pages.most}
        row["pages_a_second"] = _pages_a_second(file, pages) if sizes["rows"] > QUICK["rows"] else None
        pages.close()
    file.close()
    return row


def _dynamic(dim: int, sizes: dict[str, int]) -> dict[str, Any]:
    """Return the time of a step with dynamic tables in multiples of one with tables of fixed size, for known ids."""
    features = criteo_features(sizes["rows"])
    few = criteo_batches(features, 8, sizes["batch"])
    fresh = criteo_batches(features, sizes["rounds"], sizes["batch"], seed=9)
    draw = torch.Generator().manual_seed(4)
    gradients = [torch.randn(sizes["batch"], len(features.sparse), dim, generator=draw) for _ in range(2)]
    generator = torch.Generator().manual_seed(6)
    fixed = EmbeddingTables(features, dim, _config(), generator=generator)
    dynamic = DynamicTables(features, dim, _config(dynamic={}), generator=generator)
    found: dict[str, Any] = {"dim": dim}
    for name, batches in (("known", few), ("new", fresh)):
        contenders = {
            "fixed": Contender(None, fixed, batches, gradients),
            "dynamic": Contender(None, dynamic, batches, gradients),
        }
        before = dynamic.ids.num_rows
        warmup = 2 * len(few) if name == "known" else 0
        times = interleave(contenders, rounds=sizes["rounds"], warmup=warmup)
        if warmup:
            before = dynamic.ids.num_rows
        admitted = (dynamic.ids.num_rows - before) / sizes["rounds"]
        found[name] = {
            "cost": _cost(times["dynamic"], times["fixed"]),
            "seconds": {one: timing.to_json() for one, timing in times.items()},
            "admitted_a_step": admitted,
        }
    return found


def _cost(dynamic: Timing, fixed: Timing) -> dict[str, float]:
    return Spread.of([mine / theirs for mine, theirs in zip(dynamic.seconds, fixed.seconds, strict=True)]).to_json()


def measure_tiers(quick: bool, folder: Path) -> dict[str, Any]:
    """Return speeds and costs of both kinds of tables; files are made in ``folder``."""
    sizes = QUICK if quick else SIZES
    keep_freed_memory()  # as the trainer does, for all contenders
    obstacle = Pages.obstacle()
    rows = [
        _in_file(case, limited, sizes, folder, quick)
        for case in ("tables", "DLRM")
        for limited in ((False,) if obstacle else (False, True))
    ]
    return {
        "sizes": sizes,
        "cache": CACHE,
        "times_memory": TIMES_MEMORY,
        "file": rows,
        "file_target": FILE_TARGET,
        "dynamic": [_dynamic(dim, sizes) for dim in DYNAMIC_DIMS],
        "dynamic_target": DYNAMIC_TARGET,
        "missing": obstacle,
        "notes": [
            "26 tables, one id each a sample by Zipf's law with exponent 1.05, scattered as by hashing; row-wise "
            "Adagrad",
            f"in a file: {CACHE:.0%} of the rows in a cache; kept: the system may keep the whole file in memory as "
            f"well; limited (emulated): pages are written and dropped after every step, in its time, until cache and "
            f"pages take 1/{TIMES_MEMORY} of the tables' bytes",
            "tables: lookup, backward pass and update of the tables alone; DLRM: a whole step in float32",
            "dynamic: the same ids and gradients as for tables of fixed size; known: all ids have rows; new: "
            "some get one",
        ],
    }
