"""Gloo processes for benchmarks and tests: each does the same work and leaves its results in a file."""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

_UNCONNECTED, _ATTEMPTS = "connectFullMesh failed", 3


def _end_with_parent() -> None:
    """End this process when its parent ends, because a killed parent cannot end its children."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _process(rank: int, size: int, folder: str, work: Callable[[int, str], dict[str, Any]], deadline: float) -> None:
    torch.set_num_threads(1)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    if loopback:
        os.environ["GLOO_SOCKET_IFNAME"] = loopback
    try:
        # A rank that has nothing to do waits for the others as long as they may take.
        limit = timedelta(seconds=max(60.0, deadline))
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size, timeout=limit)
        torch.save(work(rank, folder), f"{folder}/{rank}.pt")
        dist.destroy_process_group()
    except BaseException:
        Path(folder, f"{rank}.txt").write_text(traceback.format_exc())
        raise


@dataclass
class Ended:
    """Results of processes.

    Attributes:
        found: Results of the processes that succeeded, by rank.
        codes: Exit codes.
        said: Errors of the processes.
    """

    found: dict[int, dict[str, Any]]
    codes: list[int | None]
    said: str


def run_processes(
    size: int,
    folder: Path,
    work: Callable[[int, str], dict[str, Any]],
    deadline: float,
    preload: Sequence[str] = (),
) -> Ended:
    """Run processes until they end or the deadline passes.

    If Gloo cannot connect them, which happens occasionally on a busy machine, they are started again.

    Args:
        size: Number of processes.
        folder: Folder of their results.
        work: Function that each process calls with its rank and the folder.
        deadline: Time limit in seconds.
        preload: Modules that are loaded once by a process from which all are forked, because loading takes seconds.
    """
    context: Any = mp.get_context("spawn")
    if preload and sys.platform == "linux":  # elsewhere, libraries may not survive a fork
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(list(preload))
    for _ in range(_ATTEMPTS - 1):
        ended = _run(context, size, folder, work, deadline)
        if _UNCONNECTED not in ended.said:
            return ended
        for path in (folder / "store", *folder.glob("[0-9]*.txt"), *folder.glob("[0-9]*.pt")):
            path.unlink(missing_ok=True)
    return _run(context, size, folder, work, deadline)


def slowest_seconds(
    size: int, work: Callable[[int, str], dict[str, list[float]]], deadline: float
) -> dict[str, list[float]]:
    """Return the seconds of the slowest process for each name and round; see :func:`run_processes`.

    Raises:
        RuntimeError: If one of them failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        ended = run_processes(size, Path(folder), work, deadline)
    if len(ended.found) < size:
        raise RuntimeError(f"processes ended with {ended.codes}: {ended.said}")
    ranks = ended.found.values()
    return {name: [max(parts) for parts in zip(*(r[name] for r in ranks), strict=True)] for name in ended.found[0]}


def _said(folder: Path) -> str:
    return "\n".join(path.read_text() for path in sorted(folder.glob("*.txt")))


def _run(context: Any, size: int, folder: Path, work: Callable[[int, str], dict[str, Any]], deadline: float) -> Ended:
    processes = [
        context.Process(target=_process, args=(rank, size, str(folder), work, deadline), daemon=True)
        for rank in range(size)
    ]
    until = time.monotonic() + deadline
    try:
        for process in processes:
            process.start()
        while any(process.is_alive() for process in processes) and time.monotonic() < until:
            for process in processes:
                process.join(0.05)
            if any(process.exitcode for process in processes) and _UNCONNECTED in _said(folder):
                break
    finally:
        codes = [process.exitcode for process in processes]
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join(10)
    found = {
        rank: torch.load(folder / f"{rank}.pt", weights_only=True)
        for rank in range(size)
        if (folder / f"{rank}.pt").exists()
    }
    return Ended(found, codes, _said(folder))
