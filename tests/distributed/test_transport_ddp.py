"""DistributedDataParallel of torch on the backend, beside Gloo: hooks, sparse gradients, ranks with unequal inputs."""

from __future__ import annotations

import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from cordillera.distributed.transport.process_group import BACKEND, register
from tests.distributed.processes import needs_gloo, run_processes

pytestmark = [needs_gloo, pytest.mark.slow]


class Small(nn.Module):
    """Rows of a table, and two layers of which one may stay unused."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.rows = nn.EmbeddingBag(30, 8, sparse=sparse, mode="sum")
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 1)
        self.counted = nn.BatchNorm1d(8)

    def forward(self, ids: Tensor, skips: bool) -> Tensor:
        x = self.counted(self.rows(ids))
        out: Tensor = self.second(x if skips else torch.relu(self.first(x)))
        return out


def trained(group: Any, rank: int, kind: str) -> list[Tensor]:
    """Parameters and buffers after a few steps."""
    torch.manual_seed(3)
    sparse = kind == "sparse"
    unused = {"find_unused_parameters": True} if kind == "unused" else {}
    model = DistributedDataParallel(Small(sparse).double(), process_group=group, bucket_cap_mb=1, **unused)
    hooks = {
        "allreduce": default_hooks.allreduce_hook,
        "fp16": default_hooks.fp16_compress_hook,
    }
    if kind in hooks:
        model.register_comm_hook(group, hooks[kind])
    if kind == "powersgd":
        state = powerSGD_hook.PowerSGDState(group, start_powerSGD_iter=2, min_compression_rate=0.1)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(rank)
    steps = 4 + (rank if kind == "uneven" else 0)

    def step(number: int) -> None:
        ids = torch.randint(0, 30, (6, 3), generator=generator)
        model(ids, kind == "unused" and number % 2 == rank % 2).square().mean().backward()

    with warnings.catch_warnings(), Join([model], enable=kind == "uneven"):
        warnings.simplefilter("ignore")
        for number in range(steps):
            if kind == "accumulated" and number % 2 == 0:
                with model.no_sync():
                    step(number)
                continue
            step(number)
            optimizer.step()
            optimizer.zero_grad()
    return [one.detach().clone() for one in model.module.state_dict().values()]


def coalesced(group: Any, rank: int) -> list[Tensor]:
    sums = [torch.full((size,), float(rank + 1)) for size in (3, 20_000)]
    with dist._coalescing_manager(group):
        for one in sums:
            dist.all_reduce(one, group=group)
    wholes = [torch.empty(3 * size) for size in (2, 9_000)]
    with dist._coalescing_manager(group, async_ops=True) as manager:
        for whole in wholes:
            dist.all_gather_into_tensor(whole, torch.full((len(whole) // 3,), float(rank)), group=group)
    manager.wait()
    return [*sums, *wholes]


KINDS = ("plain", "unused", "uneven", "accumulated", "sparse", "allreduce", "fp16", "powersgd")


def on_both(rank: int, folder: str) -> dict[str, Any]:
    register()
    ours = dist.new_group(backend=BACKEND, timeout=timedelta(seconds=30))
    wrong = []
    for kind in KINDS:
        mine, theirs = trained(ours, rank, kind), trained(dist.new_group(), rank, kind)
        exact = kind not in ("fp16", "powersgd")
        if not all(torch.allclose(a, b, rtol=1e-9 if exact else 1e-2, atol=1e-9 if exact else 1e-2)
                   for a, b in zip(mine, theirs, strict=True)):  # fmt: skip
            wrong.append(kind)
        parts: list[Any] = [None] * 3
        dist.all_gather_object(parts, [one for one in mine if one.dtype == torch.float64][:5], group=ours)
        if not all(torch.equal(a, b) for part in parts for a, b in zip(part, parts[0], strict=True)):
            wrong.append(f"{kind} differs between ranks")
    wanted = [torch.full((3,), 6.0), torch.full((20_000,), 6.0)]
    wanted += [torch.arange(3.0).repeat_interleave(size) for size in (2, 9_000)]
    if not all(map(torch.equal, coalesced(ours, rank), wanted)):
        wrong.append("coalesced")
    return {"wrong": wrong}


def test_data_parallel_training_is_that_on_gloo_and_equal_on_all_ranks(tmp_path: Path) -> None:
    ended = run_processes(3, tmp_path, on_both, 120)
    assert set(ended.found) == {0, 1, 2}, ended.said
    assert [found["wrong"] for found in ended.found.values()] == [[], [], []]
