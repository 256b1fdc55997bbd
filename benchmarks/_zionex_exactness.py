"""Weights and moments after some steps over processes, against those of one process; TorchRec's beside them."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _processes import Ended, run_processes
from _zionex_cases import SMALL, SMALL_DIM, WAYS, placement, share, share_of_values, small_batch
from _zionex_peer import SEQUENCES, TorchRecTables, missing, quiet
from torch import Tensor

from cordillera.distributed.collectives import Collectives
from cordillera.distributed.ledger import Ledger
from cordillera.embeddings.sharded_tables import ShardedEmbeddingTables
from cordillera.embeddings.tables import EmbeddingTables, TablesConfig

SENT = ("rows", "bags")
RULES = ("sgd", "adagrad", "rowwise_adagrad", "adam")
RATE, STEPS, SIZES = 0.05, 20, (2, 4)
TARGET = 1e-6
DEADLINE_S = 600.0
# TorchRec's sharding types that belong to a way; those that it does not offer on CPUs have a reason
PEERS = {
    "whole": ("table-wise",),
    "columns": ("column-wise", "table-column-wise"),
    "rows": ("row-wise", SEQUENCES),
    "grid": (),
    "copied": ("data-parallel",),
    "two groups": (),
}
REASONS = {
    "grid": "TorchRec's grid cuts rows within a host and is not offered on CPUs",
    "two groups": "TorchRec's DMPCollection averages the weights of groups after their own updates: another result",
}
_KINDS = [kind for kinds in PEERS.values() for kind in kinds]


def _config(rule: str) -> TablesConfig:
    return TablesConfig(name=rule, learning_rate=RATE)


def _drawn(rule: str) -> EmbeddingTables:
    return EmbeddingTables(SMALL, SMALL_DIM, _config(rule), generator=torch.Generator().manual_seed(3))


def _alone(rule: str, steps: int) -> dict[str, Tensor]:
    """Return weights and moments of one process."""
    tables = _drawn(rule)
    for step in range(steps):
        batch, gradient, _ = small_batch(step)
        tables(batch).backward(gradient)
        tables.update()
    return _tensors(tables)


def _tensors(tables: EmbeddingTables) -> dict[str, Tensor]:
    return {key: value for key, value in tables.state_dict().items() if key != "_extra_state"}


def _ours(way: str, sent: str, rule: str, steps: int, links: Collectives) -> dict[str, Tensor]:
    cut = placement(way, SMALL.tables, SMALL_DIM, links.size)
    cut = replace(cut, pooled=tuple(SMALL.tables) if sent == "bags" else ())
    tables = ShardedEmbeddingTables.of(_drawn(rule), cut, links)
    for step in range(steps):
        batch, gradient, _ = small_batch(step)
        tables(share(batch, links.rank, links.size)).backward(gradient.tensor_split(links.size)[links.rank])
        tables.update()
    return _tensors(tables)


def _peer(kind: str, rule: str, steps: int) -> list[tuple[str, int, int, Tensor]] | str:
    """Return this rank's parts of TorchRec's tables, or the reason for which they are not offered."""
    tables: TorchRecTables | None = None
    reason = "refused on another rank"
    try:
        tables = TorchRecTables(SMALL, SMALL_DIM, rule, RATE, kind)
    except (AssertionError, NotImplementedError) as error:
        reason = str(error)
    # a rank without tables refuses nothing
    refused = torch.tensor(int(tables is None))
    dist.all_reduce(refused, dist.ReduceOp.MAX)
    if tables is None or refused:
        return reason
    drawn = _drawn(rule)
    tables.load({name: drawn.table(name) for name in SMALL.tables})
    rank, size = tables.rank, tables.size
    for step in range(steps):
        batch, pooled, of_values = small_batch(step)
        if kind == SEQUENCES:
            gradient = share_of_values(batch, of_values, rank, size)
        else:
            gradient = tables.order(pooled.tensor_split(size)[rank])
        tables.step(share(batch, rank, size), gradient * size)
    return [(one.table, one.first_row, one.first_column, one.weight) for one in tables.shards()]


def _on_rank(steps: int, rules: tuple[str, ...], rank: int, folder: str) -> dict[str, Any]:
    """Train in every way, and return this rank's parts of TorchRec's tables; our tables are gathered by rank 0."""
    found: dict[str, Any] = {"ours": {}, "peer": {}, "refused": {}, "missing": missing()}
    links = Collectives(None, Ledger(), 60.0)
    for rule in rules:
        for way, sent in product(WAYS, SENT) if links.size > 1 else ():
            state = _ours(way, sent, rule, steps, links)
            found["ours"][f"{way}, {sent}, {rule}"] = state if rank == 0 else {}
        for kind in _KINDS if found["missing"] is None else ():
            with quiet():
                parts = _peer(kind, rule, steps)
            found["refused" if isinstance(parts, str) else "peer"][f"{kind}, {rule}"] = parts
    dist.barrier()
    return found


def _launch(size: int, steps: int, rules: tuple[str, ...]) -> Ended:
    with tempfile.TemporaryDirectory() as folder:
        ended = run_processes(size, Path(folder), partial(_on_rank, steps, rules), DEADLINE_S)
    if any(ended.codes):
        raise RuntimeError(f"processes ended with {ended.codes}: {ended.said}")
    return ended


def _assembled(ended: Ended, name: str) -> dict[str, Tensor]:
    """Return TorchRec's whole tables, put together from the parts of all ranks."""
    whole = {table: torch.full((rows, SMALL_DIM), torch.nan) for table, rows in SMALL.tables.items()}
    for found in ended.found.values():
        for table, row, column, weight in found["peer"][name]:
            whole[table][row : row + weight.shape[0], column : column + weight.shape[1]] = weight
    return whole


def _difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the largest difference, relative to 1 or the expected value; NaN counts as a difference."""
    if found.keys() != expected.keys():
        raise RuntimeError(f"{sorted(found)} are not {sorted(expected)}")
    most = 0.0
    for key, one in expected.items():
        off = (found[key].double() - one.double()).abs() / one.double().abs().clamp(min=1.0)
        if not bool(off.isfinite().all()):
            raise RuntimeError(f"{key} is not finite")
        most = max(most, float(off.max()))
    return most


def measure_exactness(quick: bool) -> dict[str, Any]:
    """Return differences for every way, rule and number of ranks."""
    steps = 3 if quick else STEPS
    sizes = SIZES[:1] if quick else SIZES
    expected = {rule: _alone(rule, steps) for rule in RULES}
    one = _launch(1, steps, RULES)
    absent = one.found[0]["missing"]
    unsharded = {name: _assembled(one, name) for name in one.found[0]["peer"]}
    rows: list[dict[str, Any]] = []
    for size in sizes:
        ended = _launch(size, steps, RULES)
        first = ended.found[0]
        for way in WAYS:
            for rule in RULES:
                moments = {key: tensor for key, tensor in expected[rule].items() if key != "weight"}
                off: dict[str, dict[str, float | None]] = {}
                for sent in SENT:
                    found = first["ours"][f"{way}, {sent}, {rule}"]
                    weight = _difference({"weight": found.pop("weight")}, {"weight": expected[rule]["weight"]})
                    off[sent] = {"weight": weight, "moments": _difference(found, moments) if moments else None}
                peers = {}
                for kind in PEERS[way]:
                    name = f"{kind}, {rule}"
                    if name in unsharded:
                        peers[kind] = {"weight": _difference(_assembled(ended, name), unsharded[name])}
                    else:
                        peers[kind] = {"reason": absent or first["refused"][name]}
                rows.append(
                    {
                        "way": way,
                        "rule": rule,
                        "ranks": size,
                        **off["rows"],
                        "bags": off["bags"],
                        "peers": peers or {"nothing alike": {"reason": REASONS[way]}},
                    }
                )
    worst = max(max(one["weight"], one["moments"] or 0.0) for row in rows for one in (row, row["bags"]))
    drifts = [
        peer["weight"]
        for row in rows
        for kind, peer in row["peers"].items()
        if kind == "column-wise" and row["rule"] == "rowwise_adagrad" and "weight" in peer
    ]
    return {
        "evidence": "measured",
        "steps": steps,
        "learning_rate": RATE,
        "tables": dict(SMALL.tables),
        "embedding_dim": SMALL_DIM,
        "rows": rows,
        "worst": worst,
        "target": TARGET,
        "reached": worst <= TARGET,
        "peer_column_drift": max(drifts) if drifts else None,
        "notes": [
            "ours sends rows of all tables, and, under `bags`, sums of bags of all tables",
            "differences are relative to max(1, |x|); gradients are given, so that no model hides or repeats them",
            "TorchRec's are of weights, against its own result in one process; its row-wise pooled tables run over "
            "Gloo with a plan made by hand, although its planner offers them on GPUs only",
            "data-parallel tables of TorchRec have dense gradients and torch's optimizers",
        ],
    }
