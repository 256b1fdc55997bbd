"""A step of several tasks on one trunk: gradients added up, balanced, and of the shared parameters for each task."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from _multibalance_peers import is_torchjd_there
from _tables import print_notes, print_rows
from _timing import interleave, times_faster
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional

from cordillera.models.ranking.heads import Heads
from cordillera.models.ranking.interactions import MLP
from cordillera.training.ranking.tasks.loss_balance import BalanceConfig, LossBalancer
from cordillera.training.ranking.tasks.losses import task_losses

TASKS, BATCH, INPUTS, TRUNK, HEAD = (2, 4, 8, 16), 1024, 256, (1024, 512, 256), (32,)
ROUNDS, CALLS = 31, 4


class _Model(nn.Module):
    def __init__(self, tasks: int) -> None:
        super().__init__()
        self.trunk = MLP(INPUTS, TRUNK)
        self.heads = Heads([str(task) for task in range(tasks)], TRUNK[-1], HEAD)


def _by_parameters(model: _Model, inputs: Tensor, labels: Tensor, aggregator: Any) -> None:
    """Compute gradients of the trunk's parameters for each task, one after another, and aggregate them by torchjd."""
    from torchjd.autojac import jac_to_grad, mtl_backward

    representation = model.trunk(inputs)
    losses = [
        functional.binary_cross_entropy_with_logits(tower(representation)[:, 0], labels[:, task])
        for task, tower in enumerate(model.heads.towers)
    ]
    mtl_backward(losses, features=representation, parallel_chunk_size=1)
    jac_to_grad(model.trunk.parameters(), aggregator)


def _steps(tasks: int) -> dict[str, Callable[[], object]]:
    """Return whole steps, forward to update, by method; each has a model of its own."""
    torch.manual_seed(1)
    inputs, labels = torch.randn(BATCH, INPUTS), torch.randint(0, 2, (BATCH, tasks)).float()

    def step_of(mode: Any = None, aggregator: Any = None) -> Callable[[], object]:
        torch.manual_seed(2)
        model = _Model(tasks)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        balancer = None if mode is None else LossBalancer(BalanceConfig(mode=mode), model.heads.tasks)
        model.heads.share = None if balancer is None else balancer.share

        def differentiate() -> None:
            losses, _ = task_losses(model.heads(model.trunk(inputs)), labels, None, None)
            if balancer is not None:
                balancer.expect(losses)
            losses.sum().backward()

        def step() -> None:
            if aggregator is None:
                differentiate()
            else:
                _by_parameters(model, inputs, labels, aggregator)
            optimizer.step()
            optimizer.zero_grad()

        return step

    found = {
        "plain sum": step_of(),
        "balanced, equal": step_of("equal"),
        "balanced, min-norm": step_of("min-norm"),
    }
    if is_torchjd_there():
        from torchjd.aggregation import MGDA, UPGrad

        found["MGDA on shared parameters"] = step_of(aggregator=MGDA())
        found["UPGrad on shared parameters"] = step_of(aggregator=UPGrad())
    return found


def speed(console: Console, quick: bool) -> dict[str, Any]:
    """Time whole steps in turn."""
    results, rows = [], []
    for tasks in TASKS[:1] if quick else TASKS:
        rounds, calls = (2, 1) if quick else (ROUNDS, CALLS)
        timings = interleave(_steps(tasks), rounds=rounds, calls=calls, warmup=2)
        plain = timings["plain sum"]
        for name, timing in timings.items():
            ratio = times_faster(plain, timing)
            results.append({"tasks": tasks, "method": name, "over plain": ratio.to_json(), **timing.to_json()})
            cells = [
                f"{1e3 * timing.spread.median:.1f} ms",
                f"{ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f})",
            ]
            rows.append([str(tasks), name, *cells])
    print_rows(console, "a step", ["tasks", "method", "time", "times a plain sum"], rows, "measured")
    notes = [
        f"batch {BATCH}, trunk {INPUTS}-{'-'.join(map(str, TRUNK))}, heads {TRUNK[-1]}-{HEAD[0]}-1, float32, AdamW"
    ]
    print_notes(console, notes)
    return {"evidence": "measured", "results": results, "notes": notes}
