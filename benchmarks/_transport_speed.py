"""Collectives and messages of the backend ``cordillera``, beside Gloo's in the same processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from _processes import slowest_seconds
from _timing import Timing, times_faster
from rich.console import Console
from rich.table import Table

from cordillera.distributed.transport.process_group import BACKEND, TransportOptions, register

PROCESSES, KIBIBYTES = (2, 3, 4), (4, 64, 1024, 4096, 16384, 65536)
ROUNDS, CALLED_BYTES, MOST_CALLS = 15, 32 << 20, 50  # one value is the mean of calls in succession
TARGETS = {1024: 2.0, 4096: 3.0, 16384: 3.0, 65536: 2.0}  # all-reduce of two processes against Gloo
MESSAGE_TARGETS = {4: 1.0, 1024: 1.5, 4096: 1.5, 16384: 1.5, 65536: 1.5}
NAMES = ("gloo", "memory", "sockets")


@contextmanager
def groups_in_turn() -> Iterator[dict[str, Any]]:
    """Groups of all processes by the way in which bytes pass."""
    register()
    groups = {
        "gloo": dist.group.WORLD,
        "memory": dist.new_group(backend=BACKEND),
        "sockets": dist.new_group(backend=BACKEND, pg_options=TransportOptions(path="sockets")),
    }
    yield groups
    for name in ("memory", "sockets"):
        dist.destroy_process_group(groups[name])


def in_turn(calls: dict[str, Callable[[], Any]], count: int, rounds: int, check: Callable[[str], None]) -> Any:
    """Return the seconds of one call of each contender, by round."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for turn in range(-1, rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            dist.barrier()
            begin = time.perf_counter()
            for _ in range(count):
                calls[name]()
            spent = time.perf_counter() - begin
            check(name)
            if turn >= 0:
                seconds[name].append(spent / count)
    return seconds


def _count(bytes_: int) -> int:
    return max(2, min(MOST_CALLS, CALLED_BYTES // bytes_))


def _reduced(rank: int, folder: str, kibibytes: tuple[int, ...], rounds: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    with groups_in_turn() as groups:
        for size in kibibytes:
            tensor = torch.ones(size << 8)
            count = _count(tensor.nbytes)

            def check(name: str, tensor: torch.Tensor = tensor, count: int = count) -> None:
                wanted = float(dist.get_world_size()) ** count  # powers of three are rounded
                if not bool((tensor == tensor[0]).all()) or not 0.999 < tensor[0] / wanted < 1.001:
                    raise AssertionError(f"{name} gave another sum")
                tensor.fill_(1.0)

            calls = {name: partial(dist.all_reduce, tensor, group=group) for name, group in groups.items()}
            for name, seconds in in_turn(calls, count, rounds, check).items():
                found[f"{name} {size}"] = seconds
    return found


def _passed(rank: int, folder: str, kibibytes: tuple[int, ...], rounds: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    with groups_in_turn() as groups:
        for size in kibibytes:
            tensor, answer = torch.full((size << 8,), float(rank + 1)), torch.zeros(1)
            count = _count(tensor.nbytes)

            def there_and_back(group: Any, tensor: torch.Tensor = tensor, answer: torch.Tensor = answer) -> None:
                first, second = (dist.send, dist.recv) if rank == 0 else (dist.recv, dist.send)
                first(tensor, 1 - rank, group=group)
                second(answer, 1 - rank, group=group)

            def check(name: str, tensor: torch.Tensor = tensor) -> None:
                if rank == 1 and not bool((tensor == 1).all()):
                    raise AssertionError(f"{name} gave other bytes")
                tensor.fill_(float(rank + 1))

            calls = {name: partial(there_and_back, group) for name, group in groups.items()}
            for name, seconds in in_turn(calls, count, rounds, check).items():
                found[f"{name} {size}"] = seconds
    return found


def _rows(seconds: dict[str, list[float]], size: int, kibibytes: tuple[int, ...], targets: Any) -> list[dict[str, Any]]:
    rows = []
    for kibibyte in kibibytes:
        timings = {name: Timing(name, seconds[f"{name} {kibibyte}"]) for name in NAMES}
        row: dict[str, Any] = {"processes": size, "kibibytes": kibibyte, "target": targets.get(kibibyte)}
        row |= {name: timing.spread.to_json() for name, timing in timings.items()}
        row["memory against gloo"] = times_faster(timings["memory"], timings["gloo"]).to_json()
        row["sockets against gloo"] = times_faster(timings["sockets"], timings["gloo"]).to_json()
        row["memory against sockets"] = times_faster(timings["memory"], timings["sockets"]).to_json()
        rows.append(row)
    return rows


def _print(console: Console, title: str, rows: list[dict[str, Any]]) -> None:
    table = Table(title=f"{title} (measured)", title_justify="left")
    for heading in ("processes", "KiB", *(f"{name} ms" for name in NAMES), "memory is", "asked", "sockets is"):
        table.add_column(heading)
    for row in rows:
        cells = [str(row["processes"]), f"{row['kibibytes']:,}"]
        cells += [f"{row[name]['median'] * 1e3:.3f}" for name in NAMES]
        ratio = row["memory against gloo"]
        cells.append(f"{ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})")
        cells += [f"{row['target']:g}" if row["target"] else "", f"{row['sockets against gloo']['median']:.2f}"]
        table.add_row(*cells)
    console.print(table)


def _found(console: Console, title: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    _print(console, title, rows)
    return {
        "evidence": "measured",
        "rows": rows,
        "notes": ["ratios: medians and quartiles over rounds, of the slowest process of each round; one thread each"],
    }


def collectives(console: Console, quick: bool) -> dict[str, Any]:
    """Time sums of float32 in place."""
    processes, kibibytes, rounds = ((2,), (64, 1024), 3) if quick else (PROCESSES, KIBIBYTES, ROUNDS)
    rows = []
    for size in processes:
        seconds = slowest_seconds(size, partial(_reduced, kibibytes=kibibytes, rounds=rounds), 600)
        rows += _rows(seconds, size, kibibytes, TARGETS if size == 2 else {})
    return _found(console, "sums over processes", rows)


def messages(console: Console, quick: bool) -> dict[str, Any]:
    """Time a message to another process and an answer of one number."""
    kibibytes, rounds = ((64, 1024), 3) if quick else (KIBIBYTES, ROUNDS)
    seconds = slowest_seconds(2, partial(_passed, kibibytes=kibibytes, rounds=rounds), 600)
    return _found(console, "a message and its answer", _rows(seconds, 2, kibibytes, MESSAGE_TARGETS))
