"""Lookup, gradient and update of embedding tables on a GPU, beside EmbeddingBag with torch's sparse optimizers."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from _gpu_timing import interleave_on_gpu, peak_bytes
from _ranking_batches import criteo_batches, criteo_features
from _timing import Spread, times_faster
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from cordillera.data.ranking.features import FeatureSpec
from cordillera.embeddings.tables import EmbeddingTables, TablesConfig
from cordillera.jagged import JaggedBatch

ROUNDS, BATCHES = 7, 4
RATE, EPS = 0.01, 1e-8
AGREEMENT = 1e-5  # difference of a lookup after two updates, relative to our own
RULES = ("sgd", "adagrad")
CASES = ((100_000, 32, 4096), (100_000, 32, 32768), (200_000, 64, 32768))  # rows of a table, width, samples
QUICK = ((1000, 16, 64),)
ONE, MANY = "one EmbeddingBag", "26 EmbeddingBags"

TableUpdate = Callable[[JaggedBatch, Tensor], Tensor]


def ours(features: FeatureSpec, width: int, rule: str, backend: str) -> tuple[TableUpdate, Tensor]:
    """Return our tables' step, and their rows."""
    config = TablesConfig.model_validate({"name": rule, "learning_rate": RATE, "eps": EPS, "backend": backend})
    tables = EmbeddingTables(features, width, config).cuda()

    def update(sparse: JaggedBatch, gradient: Tensor) -> Tensor:
        out = tables(sparse)
        out.backward(gradient)
        tables.update()
        return out.detach()

    return update, tables.weight.detach()


def one_bag(features: FeatureSpec, width: int, rule: str) -> tuple[TableUpdate, Tensor]:
    """Return the step of one ``EmbeddingBag`` that holds all tables, with torch's sparse optimizer, and its rows."""
    sizes = torch.tensor(list(features.tables.values()))
    first = (sizes.cumsum(0) - sizes).cuda()[:, None]
    bag = nn.EmbeddingBag(int(sizes.sum()), width, mode="sum", sparse=True, device="cuda")
    optimizer = _optimizer(rule, [bag.weight])

    def update(sparse: JaggedBatch, gradient: Tensor) -> Tensor:
        batch = sparse.batch_size
        ids = (sparse.values.view(len(sizes), batch) + first).t().reshape(-1)
        starts = torch.arange(ids.numel(), device=ids.device)
        optimizer.zero_grad(set_to_none=True)
        out = bag(ids, starts).view(batch, len(sizes), width)
        out.backward(gradient)
        optimizer.step()
        return out.detach()

    return update, bag.weight.detach()


def many_bags(features: FeatureSpec, width: int, rule: str) -> tuple[TableUpdate, Tensor]:
    """Return the step of one ``EmbeddingBag`` for each table, with torch's sparse optimizer, and the first one's rows.

    Rows of all tables lie in one tensor, so that they can be filled together.
    """
    sizes = list(features.tables.values())
    flat = torch.zeros(sum(sizes), width, device="cuda")
    bags = [nn.EmbeddingBag.from_pretrained(part, freeze=False, mode="sum", sparse=True) for part in flat.split(sizes)]
    optimizer = _optimizer(rule, [bag.weight for bag in bags])

    def update(sparse: JaggedBatch, gradient: Tensor) -> Tensor:
        batch = sparse.batch_size
        ids, starts = sparse.values.view(len(bags), batch), torch.arange(batch, device=flat.device)
        optimizer.zero_grad(set_to_none=True)
        out = torch.stack([bag(ids[i], starts) for i, bag in enumerate(bags)], 1)
        out.backward(gradient)
        optimizer.step()
        return out.detach()

    return update, flat


def _optimizer(rule: str, weights: list[nn.Parameter]) -> torch.optim.Optimizer:
    if rule == "sgd":
        return torch.optim.SGD(weights, lr=RATE)
    return torch.optim.Adagrad(weights, lr=RATE, eps=EPS)


def _row(rows: int, width: int, batch: int, rule: str, rounds: int) -> dict[str, Any]:
    features = criteo_features(rows)
    batches = [one.sparse.to("cuda") for one in criteo_batches(features, BATCHES, batch)]
    gradients = [torch.randn(batch, len(features.sparse), width, device="cuda") * 1e-2 for _ in batches]
    makers: dict[str, Callable[[], tuple[TableUpdate, Tensor]]] = {
        "ours": partial(ours, features, width, rule, "triton"),
        "torch back end": partial(ours, features, width, rule, "torch"),
        ONE: partial(one_bag, features, width, rule),
        MANY: partial(many_bags, features, width, rule),
    }
    start = torch.rand(sum(features.tables.values()), width, device="cuda") - 0.5
    calls: dict[str, Callable[[], object]] = {}
    seen: dict[str, Tensor] = {}
    for name, make in makers.items():
        update, weight = make()
        weight.copy_(start)
        for _ in range(2):
            update(batches[0], gradients[0])
        seen[name] = update(batches[0], gradients[0])  # shows both updates
        endless = itertools.cycle(zip(batches, gradients, strict=True))
        calls[name] = lambda update=update, endless=endless: update(*next(endless))  # type: ignore[misc]
    own = seen["ours"]
    differences = {name: float((one - own).norm() / own.norm()) for name, one in seen.items() if name != "ours"}
    assert max(differences.values()) < AGREEMENT, differences
    timings = interleave_on_gpu(calls, rounds=rounds)
    distinct = [int(sum(ids.unique().numel() for ids in one.values.view(-1, batch))) for one in batches]
    return {
        "rows": rows, "width": width, "batch": batch, "rule": rule, "tables": len(features.tables),
        "distinct": sum(distinct) / len(distinct), "differences": differences,
        "seconds": {name: timing.to_json() for name, timing in timings.items()},
        "times_faster": {
            name: times_faster(timings["ours"], timing).to_json() for name, timing in timings.items() if name != "ours"
        },
        "peak_bytes": {name: peak_bytes(call) for name, call in calls.items()},
        "samples_per_s": Spread.of([batch / one for one in timings["ours"].seconds]).to_json(),
    }  # fmt: skip


def measure_embeddings(console: Console, quick: bool) -> dict[str, Any]:
    """Measure lookup, gradient and update of 26 tables in float32, and print the ratios."""
    found = []
    table = Table(title="lookup and update, times as fast as (measured)", title_justify="left")
    for heading in ("rows, width, batch", "rule", "torch back end", ONE, MANY, "ours ms", "peak beside ours"):
        table.add_column(heading)
    for rows, width, batch in QUICK if quick else CASES:
        for rule in RULES:
            row = _row(rows, width, batch, rule, 2 if quick else ROUNDS)
            found.append(row)
            peaks = row["peak_bytes"]
            table.add_row(
                f"{rows:,}, {width}, {batch:,}", rule,
                *(f"{row['times_faster'][name]['median']:.2f}" for name in ("torch back end", ONE, MANY)),
                f"{1e3 * row['seconds']['ours']['seconds']['median']:.2f}", f"{peaks[ONE] / peaks['ours']:.2f}",
            )  # fmt: skip
            torch.cuda.empty_cache()
    console.print(table)
    return {"evidence": "measured", "dtype": "float32", "rounds": 2 if quick else ROUNDS, "rows": found}
