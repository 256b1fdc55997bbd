"""Faults of real processes, and whom the traces that the others wrote blame."""

from __future__ import annotations

import os
import random
import signal
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from cordillera.distributed.tracing.blame import blame
from cordillera.distributed.tracing.flight_recorder import read_traces
from cordillera.distributed.transport.process_group import BACKEND, register
from cordillera.distributed.transport.progress import TransportError
from cordillera.distributed.transport.tracer import TRACES
from tests.distributed.processes import needs_gloo, run_processes

RANKS, STEPS = 4, 10
LIMIT_S, PATIENCE_S = 3.0, 60.0  # of operations from the fault on, and before, as a machine may stand still
KINDS = ("killed", "stopped", "outside", "mismatch", "swapped", "slow")
COMPUTES_S = 0.04


def struck(kind: str, seed: int) -> tuple[int, int]:
    """The rank that fails, and the step in which it does."""
    chance = random.Random(f"{kind} {seed}")
    return chance.randrange(RANKS), chance.randrange(3, STEPS)


def wait_for_ends(folder: str, ranks: list[int]) -> None:
    """Wait until ranks have given up."""
    while not all(Path(folder, f"{rank}.done").exists() for rank in ranks):
        time.sleep(0.01)


def train(rank: int, folder: str, kind: str, seed: int) -> dict[str, Any]:
    """Compute, and sum in pairs and over all ranks, step by step, until a rank fails or all are done."""
    os.environ[TRACES] = str(Path(folder, "traces"))
    register()
    limit = timedelta(seconds=PATIENCE_S)
    members = {"pair": [rank & 2, rank | 1], "far": [rank & 1, rank | 2], "all": list(range(RANKS))}
    made = {
        name: dist.new_group(ranks, backend=BACKEND, timeout=limit, use_local_synchronization=True, group_desc=name)
        for name, ranks in members.items()
    }
    tensor, (victim, at) = torch.ones(100 if seed % 2 else 30_000), struck(kind, seed)
    others = [other for other in range(RANKS) if other != victim]
    Path(folder, f"{rank}.pid").write_text(str(os.getpid()))
    dist.barrier()  # on Gloo: on a busy machine, processes may start further apart than an operation may take
    try:
        for step in range(STEPS):
            time.sleep(COMPUTES_S * (3 if kind == "slow" and rank == victim else 1))
            names, given = ["pair", "far", "all"], tensor
            if step == at and kind != "slow":
                dist.barrier()  # or a rank that the machine held up would count as one that does not come
                for group in made.values():
                    group.set_timeout(timedelta(seconds=LIMIT_S))
            if rank == victim and step == at:
                if kind == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                elif kind == "stopped":
                    os.kill(os.getpid(), signal.SIGSTOP)
                elif kind == "outside":
                    wait_for_ends(folder, others)
                elif kind == "mismatch":
                    time.sleep(0.3)  # so that others have called it
                    given = torch.ones(len(tensor) + 1)
                elif kind == "swapped":
                    names = ["all", "pair", "far"]
            for name in names:
                dist.all_reduce(given if name == "all" else tensor, group=made[name])
    except TransportError as error:
        said = str(error)
    else:
        said = "nothing"
        dist.destroy_process_group()
    Path(folder, f"{rank}.done").touch()
    if kind == "stopped" and rank == others[0]:
        wait_for_ends(folder, others)
        os.kill(int(Path(folder, f"{victim}.pid").read_text()), signal.SIGKILL)
    torch.save({"said": said}, f"{folder}/{rank}.pt")
    os._exit(0)  # Gloo would wait for the rank that failed


@needs_gloo
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", KINDS)
def test_the_rank_that_failed_is_blamed(kind: str, seed: int, tmp_path: Path) -> None:
    victim, _ = struck(kind, seed)
    ended = run_processes(RANKS, tmp_path, partial(train, kind=kind, seed=seed), 120)
    assert {other for other in range(RANKS) if other != victim} <= set(ended.found), ended.said
    found = blame(read_traces(tmp_path / "traces"))
    most = 2 if kind == "mismatch" else 1  # of two that differ, both are named if no other has called it yet
    wanted = victim in found.culprits and len(found.culprits) <= most
    assert wanted, (found, {rank: one["said"] for rank, one in ended.found.items()})
