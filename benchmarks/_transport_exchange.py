"""Rows that go to the ranks of their experts and back, of sizes that only senders know, beside padded exchanges."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from _processes import slowest_seconds
from _timing import Timing, times_faster
from _transport_speed import groups_in_turn, in_turn
from rich.console import Console
from rich.table import Table
from torch import Tensor

from cordillera.distributed.transport.verbs import all_to_all_dynamic

PROCESSES, TOKENS, HIDDEN = (2, 3, 4), (256, 4096), 256  # tokens of a rank; float32
ROUNDS, CALLS = 15, 10
IMBALANCE, TARGET = 2.0, 1.3  # the busiest rank receives twice the mean
NAMES = ("padded", "sizes before", "dynamic", "gloo, padded")


def shares(ranks: int, tokens: int) -> list[int]:
    """Return how many of a rank's tokens go to each rank: the first one receives :data:`IMBALANCE` times the mean."""
    first = min(tokens, round(IMBALANCE * tokens / ranks))
    rest, more = divmod(tokens - first, ranks - 1)
    return [first, *(rest + (number < more) for number in range(ranks - 1))]


def _there_and_back(group: Any, parts: list[Tensor], sizes: list[int], padded: int, way: str) -> list[Tensor]:
    """Send parts to their ranks and back; ``padded`` rows for each, or as many as there are."""
    rank, ranks = dist.get_rank(), len(parts)
    if way == "dynamic":
        work, come = all_to_all_dynamic(group, parts)
        work.wait()
        work, back = all_to_all_dynamic(group, come)
        work.wait()
        return back
    rows = [padded] * ranks if way == "padded" else sizes
    come_rows = [padded] * ranks if way == "padded" else [sizes[rank]] * ranks
    if way == "sizes before":
        table = torch.empty(ranks * ranks, dtype=torch.int64)
        dist.all_gather_single(table, torch.tensor(sizes), group=group)
        come_rows = table.view(ranks, ranks)[:, rank].tolist()
    come = parts[0].new_empty(sum(come_rows), HIDDEN)
    given = parts[0].new_empty(sum(rows), HIDDEN)
    for part, place in zip(parts, given.split(rows), strict=True):
        place[: len(part)] = part
    dist.all_to_all_single(come, given, come_rows, rows, group=group)
    dist.all_to_all_single(given, come, rows, come_rows, group=group)
    return [one[: len(part)] for one, part in zip(given.split(rows), parts, strict=True)]


def _exchanged(rank: int, folder: str, tokens: tuple[int, ...], rounds: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    with groups_in_turn() as groups:
        for count in tokens:
            sizes = shares(dist.get_world_size(), count)
            parts = list(torch.randn(count, HIDDEN).split(sizes))
            results: dict[str, list[Tensor]] = {}

            def call(name: str, parts: Any = parts, sizes: Any = sizes, results: Any = results) -> None:
                group = groups["gloo" if name.startswith("gloo") else "memory"]
                results[name] = _there_and_back(group, parts, sizes, max(sizes), name.removeprefix("gloo, "))

            def check(name: str, parts: Any = parts, results: Any = results) -> None:
                if not all(map(torch.equal, results[name], parts)):
                    raise AssertionError(f"{name} gave other rows back")

            for name, seconds in in_turn({name: partial(call, name) for name in NAMES}, CALLS, rounds, check).items():
                found[f"{name} {count}"] = seconds
    return found


def exchanges(console: Console, quick: bool) -> dict[str, Any]:
    """Time rows that go to other ranks and back, the busiest of which receives twice the mean."""
    processes, tokens, rounds = ((2,), (64,), 3) if quick else (PROCESSES, TOKENS, ROUNDS)
    rows = []
    for size in processes:
        seconds = slowest_seconds(size, partial(_exchanged, tokens=tokens, rounds=rounds), 600)
        for count in tokens:
            timings = {name: Timing(name, seconds[f"{name} {count}"]) for name in NAMES}
            row: dict[str, Any] = {
                "processes": size,
                "tokens": count,
                "target": TARGET if count == max(tokens) else None,
            }
            row |= {name: timing.spread.to_json() for name, timing in timings.items()}
            for name in NAMES:
                row[f"against {name}"] = times_faster(timings["dynamic"], timings[name]).to_json()
            rows.append(row)
    table = Table(title="rows to other ranks and back (measured)", title_justify="left")
    for heading in ("processes", "tokens", *(f"{name} ms" for name in NAMES), "beside padded", "asked", "sizes before"):
        table.add_column(heading)
    for row in rows:
        cells = [str(row["processes"]), f"{row['tokens']:,}", *(f"{row[name]['median'] * 1e3:.3f}" for name in NAMES)]
        ratio = row["against padded"]
        cells.append(f"{ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})")
        cells += [f"{row['target']:g}" if row["target"] else "", f"{row['against sizes before']['median']:.2f}"]
        table.add_row(*cells)
    console.print(table)
    return {
        "evidence": "measured",
        "imbalance": IMBALANCE,
        "hidden": HIDDEN,
        "rows": rows,
        "notes": ["ratios: medians and quartiles over rounds, of the slowest process of each round; one thread each"],
    }
