"""The backend of torch.distributed in real processes, some of which are killed."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from cordillera.distributed.collectives import Collectives
from cordillera.distributed.expert_parallel import ExpertRanks
from cordillera.distributed.ledger import Ledger
from cordillera.distributed.transport.frames import Connection
from cordillera.distributed.transport.peer_memory import PeerMemory
from cordillera.distributed.transport.process_group import BACKEND, TransportOptions, register
from cordillera.distributed.transport.progress import TransportError
from cordillera.errors import PeerError
from tests.distributed.processes import Ended, needs_gloo, run_processes

pytestmark = needs_gloo
DEADLINE_S = 10.0


def ours(path: Any = "auto", ranks: list[int] | None = None) -> Any:
    register()
    return dist.new_group(
        ranks,
        backend=BACKEND,
        pg_options=TransportOptions(path),
        timeout=timedelta(seconds=DEADLINE_S),
        use_local_synchronization=ranks is not None,
    )


def equal_to_gloo(rank: int) -> list[str]:
    wrong = []
    for path in ("auto", "sockets"):
        group = ours(path)
        for length in (1, 1000, 300_001):
            for dtype in (torch.int64, torch.float32, torch.bfloat16):
                x = torch.arange(length).remainder(50).add(rank).to(dtype)
                mine, theirs = x.clone(), x.clone()
                dist.all_reduce(mine, group=group)
                dist.all_reduce(theirs)
                if not torch.equal(mine, theirs):
                    wrong.append(f"all_reduce {path} {length} {dtype}")
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, {"rank": rank}, group=group)
        if found != [{"rank": other} for other in range(dist.get_world_size())]:
            wrong.append(f"objects {found}")
        dist.destroy_process_group(group)
    return wrong


def experts_on_both(rank: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(40 + 30 * rank, 16, generator=generator, requires_grad=True)
    experts = torch.rand(len(x), 6, generator=generator).topk(2).indices
    experts[:20] = torch.tensor([4, 5])  # much for the last rank
    gates = torch.rand(len(x), 2, generator=generator)
    weights = [torch.randn(2, *shape, generator=generator) for shape in ((16, 8), (8, 16), (16, 8))]
    found: dict[str, Any] = {}
    for name, group in {"gloo": None, "auto": ours(), "sockets": ours("sockets")}.items():
        ledger = Ledger()
        out = ExpertRanks(Collectives(group, ledger, 20.0), 6)(x, experts, gates, *weights, policy="AB")
        (gradient,) = torch.autograd.grad(out.square().sum(), x)
        found[name] = [out.detach(), gradient], ledger.total().bytes
    return found


def disagreeing(rank: int) -> str:
    """What the ranks 0 and 1 say, each of which waits for another exchange."""
    links = Collectives(ours(ranks=[0, 1]), Ledger(), DEADLINE_S)
    try:
        (links.all_reduce if rank else links.all_gather)("rows", torch.ones(9))
    except PeerError as error:
        return error.what
    return ""


def together(rank: int, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {"wrong": equal_to_gloo(rank), "experts": experts_on_both(rank)}
    found["said"] = disagreeing(rank) if rank < 2 else ""
    dist.barrier()  # no rank goes while others are at work
    return found


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """Three processes that did all of it, since their start takes most of the time."""
    return run_processes(3, tmp_path_factory.mktemp("together"), together, 120)


def test_sums_of_small_numbers_equal_those_of_gloo_to_the_bit(ended: Ended) -> None:
    assert {rank: found["wrong"] for rank, found in ended.found.items()} == {0: [], 1: [], 2: []}, ended.said


def test_tokens_go_to_experts_and_back_as_on_gloo_to_the_bit(ended: Ended) -> None:
    assert set(ended.found) == {0, 1, 2}, ended.said
    for of_rank in ended.found.values():
        (wanted, counted), *others = of_rank["experts"].values()
        for tensors, passed in others:
            assert all(map(torch.equal, tensors, wanted))
            assert passed < counted  # no sizes before


def test_what_ranks_do_instead_of_an_exchange_is_said_by_its_error(ended: Ended) -> None:
    said = " ".join(found["said"] for found in ended.found.values())
    assert "all_gather of float32, rank" in said or "all_reduce of float32 (sum), rank" in said, (said, ended.said)
    assert said.count(", while rows were exchanged") == 2


def killed_at(rank: int, folder: str, event: int, path: str) -> dict[str, Any]:
    """Sum until rank 1 is killed at an event: a connection, a frame that is sent, or memory that is read."""
    group, count = ours(path), [0]

    def dying(original: Any) -> Any:
        def call(*arguments: Any) -> Any:
            if rank == 1:
                if count[0] == event:
                    Path(folder, "killed").write_text(repr(time.monotonic()))
                    os.kill(os.getpid(), signal.SIGKILL)
                count[0] += 1
            return original(*arguments)

        return call

    Connection.__init__ = dying(Connection.__init__)  # type: ignore[method-assign]
    Connection.send = dying(Connection.send)  # type: ignore[method-assign]
    PeerMemory.read = dying(PeerMemory.read)  # type: ignore[method-assign]
    tensor, at, said = torch.ones(1 << 18), 0.0, ""
    try:
        for _ in range(50):
            dist.all_reduce(tensor, group=group)
    except TransportError as error:
        at, said = time.monotonic(), error.what
    survivors = dist.new_group([0, 2], backend=BACKEND, use_local_synchronization=True)
    left = torch.ones(1 << 18)
    dist.all_reduce(left, group=survivors)
    Path(folder, f"{rank}.done").touch()
    while not all(Path(folder, f"{other}.done").exists() for other in (0, 2)):
        time.sleep(0.01)
    torch.save({"at": at, "said": said, "left": float(left.sum())}, f"{folder}/{rank}.pt")
    os._exit(0)  # gloo would wait for the rank that was killed


@pytest.mark.cases(2)
@pytest.mark.parametrize("path", ["auto", "sockets"])
@pytest.mark.parametrize(
    "event", [0, 3, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow),
              pytest.param(5, marks=pytest.mark.slow), 8, pytest.param(21, marks=pytest.mark.slow)]
)  # fmt: skip
def test_when_a_rank_is_killed_the_others_know_in_time_and_go_on_without_it(
    event: int, path: str, tmp_path: Path
) -> None:
    ended = run_processes(3, tmp_path, partial(killed_at, event=event, path=path), 120)
    assert ended.codes[1] == -signal.SIGKILL, ended.said
    assert set(ended.found) == {0, 2}, ended.said
    began = float((tmp_path / "killed").read_text())
    for found in ended.found.values():
        assert "rank 1" in found["said"]
        assert found["at"] - began < DEADLINE_S
        assert found["left"] == 2.0 * (1 << 18)
