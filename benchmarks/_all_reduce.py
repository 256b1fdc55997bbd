"""Sums over processes that may end, beside Gloo's in the same processes, and how fast all learn that one has ended."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _processes import run_processes, slowest_seconds
from _timing import Spread, Timing, times_faster
from rich.console import Console
from rich.table import Table

from cordillera.distributed.fault_tolerance.all_reduce import CHUNK_BYTES, WINDOW, AllReduce, ReduceAborted, RingMember

PROCESSES, MEBIBYTES = (2, 3, 4), (1, 4, 16, 64)
TARGETS = {"memory": {1: 2.0, 4: 3.0, 16: 3.0, 64: 2.0}, "sockets": {16: 1.0, 64: 1.0}}
ROUNDS, CALLED_BYTES, LEAST_CALLS = 15, 16 << 20, 3  # one value is the mean of calls in succession
ABORTS, KILLS, DEADLINE_S = 20, 3, 30.0
TRANSPORTS = ("memory", "sockets")


def _connected(one: AllReduce, epoch: int) -> AllReduce:
    addresses: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(addresses, one.address)
    ring = [RingMember(str(rank), address) for rank, address in enumerate(addresses)]
    one.connect(epoch, ring, str(dist.get_rank()), [member.name for member in ring], DEADLINE_S)
    return one


def _sum_in_turn(rank: int, folder: str, mebibytes: tuple[int, ...], rounds: int) -> dict[str, list[float]]:
    """Seconds of each contender and size; the last of each list is the peak of bytes on their way."""
    ours = {name: _connected(AllReduce("benchmark", b"token", transport=name), 0) for name in TRANSPORTS}  # type: ignore[arg-type]
    seconds: dict[str, list[float]] = {}
    world = dist.get_world_size()
    total = world * (world + 1) / 2
    for size in mebibytes:
        original = torch.full((size << 18,), float(rank + 1))
        tensor, calls = original.clone(), max(LEAST_CALLS, CALLED_BYTES // original.nbytes)
        contenders = {"gloo": lambda number, tensor=tensor: dist.all_reduce(tensor)}
        for name, one in ours.items():
            contenders[name] = lambda number, one=one, tensor=tensor: one.reduce(
                tensor, step=number, bucket=0, deadline_s=DEADLINE_S
            )
        names = list(contenders)
        for turn in range(-1, rounds):
            for name in names[turn % 3 :] + names[: turn % 3]:
                tensor.copy_(original)
                dist.barrier()
                begin = time.perf_counter()
                for number in range(calls):
                    contenders[name](number)
                spent = time.perf_counter() - begin
                if not bool((tensor == tensor[0]).all()) or not 1 <= tensor[0] / total / world ** (calls - 1) < 1.001:
                    raise AssertionError(f"{name} gave another sum")
                if turn >= 0:
                    seconds.setdefault(f"{name} {size}", []).append(spent / calls)
    for name, one in ours.items():
        seconds[f"peak {name}"] = [float(one.peak_in_flight_bytes)]
        one.close()
    return seconds


def _abort(rank: int, folder: str, rounds: int, transport: str) -> dict[str, list[float]]:
    """Seconds after an abort of the first process, at which each other one raises."""
    one = AllReduce("benchmark", b"token", transport=transport)  # type: ignore[arg-type]
    found = []
    for turn in range(rounds):
        _connected(one, turn)
        tensor, at = torch.zeros(1 << 20), 0.0
        dist.barrier()
        if rank == 0:
            time.sleep(0.02)
            at = time.monotonic()
            one.abort("benchmark")
        else:
            try:
                one.reduce(tensor, step=0, bucket=0, deadline_s=DEADLINE_S)
            except ReduceAborted:
                at = time.monotonic()
        times: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(times, at)
        found.append(at - times[0])
    one.close()
    return {"seconds": found}


def _kill(rank: int, folder: str, transport: str) -> dict[str, Any]:
    one = _connected(AllReduce("benchmark", b"token", transport=transport), 0)  # type: ignore[arg-type]
    tensor = torch.zeros(4 << 20)
    if rank == 0:
        one.reduce(tensor, step=0, bucket=0, deadline_s=DEADLINE_S)
        Path(folder, "killed").write_text(repr(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        for step in range(1000):
            one.reduce(tensor, step=step, bucket=0, deadline_s=DEADLINE_S)
    except ReduceAborted:
        return {"at": time.monotonic()}
    raise AssertionError("a process was killed, and its sums went on")


def _seconds_after_kill(size: int, transport: str) -> float:
    with tempfile.TemporaryDirectory() as folder:
        ended = run_processes(size, Path(folder), partial(_kill, transport=transport), 60)
        if len(ended.found) != size - 1:
            raise RuntimeError(f"processes ended with {ended.codes}: {ended.said}")
        began = float(Path(folder, "killed").read_text())
    return max(one["at"] for one in ended.found.values()) - began


def _speed(size: int, mebibytes: tuple[int, ...], rounds: int) -> tuple[list[dict[str, Any]], dict[str, float]]:
    work = partial(_sum_in_turn, mebibytes=mebibytes, rounds=rounds)
    seconds = slowest_seconds(size, work, 600)
    rows = []
    for mebibyte in mebibytes:
        timings = {name: Timing(name, seconds[f"{name} {mebibyte}"]) for name in ("gloo", *TRANSPORTS)}
        row: dict[str, Any] = {"processes": size, "mebibytes": mebibyte, "gloo": timings["gloo"].spread.to_json()}
        for name in TRANSPORTS:
            row[name] = timings[name].spread.to_json()
            row[f"{name} against gloo"] = times_faster(timings[name], timings["gloo"]).to_json()
            row[f"{name} target"] = TARGETS[name].get(mebibyte)
        rows.append(row)
    return rows, {name: seconds[f"peak {name}"][0] for name in TRANSPORTS}


def _print(console: Console, rows: list[dict[str, Any]]) -> None:
    table = Table(title="sums of float32 over processes (measured)", title_justify="left")
    for heading in (
        "processes",
        "MiB",
        "gloo ms",
        "memory ms",
        "sockets ms",
        "memory is",
        "target",
        "sockets is",
        "target",
    ):
        table.add_column(heading)
    for row in rows:
        cells = [str(row["processes"]), str(row["mebibytes"])]
        cells += [f"{row[name]['median'] * 1e3:.2f}" for name in ("gloo", *TRANSPORTS)]
        for name in TRANSPORTS:
            ratio, target = row[f"{name} against gloo"], row[f"{name} target"]
            cells.append(f"{ratio['median']:.2f}x ({ratio['low']:.2f} to {ratio['high']:.2f})")
            cells.append("" if target is None else f"{target:g}x")
        table.add_row(*cells)
    console.print(table)


def all_reduce(console: Console, quick: bool) -> dict[str, Any]:
    """Time sums beside Gloo's in the same processes, and how long after an end the others know of it."""
    processes, mebibytes, rounds = ((2,), (1, 4), 3) if quick else (PROCESSES, MEBIBYTES, ROUNDS)
    rows, peaks = [], []
    for size in processes:
        found, peak = _speed(size, mebibytes, rounds)
        rows += found
        peaks.append({"processes": size, **peak})
    _print(console, rows)
    for peak in peaks:
        console.print(
            f"{peak['processes']} processes: at most {peak['memory']:,.0f} bytes on their way through memory, "
            f"{peak['sockets']:,.0f} through sockets; the window has {CHUNK_BYTES * WINDOW:,}"
        )
    ends = []
    for name in TRANSPORTS:
        size = processes[-1]
        aborts = slowest_seconds(size, partial(_abort, rounds=3 if quick else ABORTS, transport=name), 60)["seconds"]
        kills = [_seconds_after_kill(size, name) for _ in range(1 if quick else KILLS)]
        spreads = {"abort": Spread.of(aborts).to_json(), "kill": Spread.of(kills).to_json()}
        ends.append({"processes": size, "transport": name, "worst_s": max(aborts + kills), **spreads})
        console.print(
            f"{name}: the others know of an abort after {spreads['abort']['median'] * 1e3:.1f} ms, of a kill after "
            f"{spreads['kill']['median'] * 1e3:.1f} ms, of the slowest after {ends[-1]['worst_s'] * 1e3:.1f} ms"
        )
    return {
        "evidence": "measured",
        "window_bytes": CHUNK_BYTES * WINDOW,
        "rows": rows,
        "peaks": peaks,
        "ends": ends,
        "notes": ["ratios: medians and quartiles over rounds, of the slowest process of each round"],
    }
