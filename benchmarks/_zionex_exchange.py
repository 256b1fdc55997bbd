"""Bytes, messages and time of a step of tables over two processes, beside the pooled exchange of TorchRec."""

from __future__ import annotations

import gc
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _processes import run_processes
from _timing import Timing, times_faster
from _zionex_cases import LONGEST, click_batches, click_features, placement, share
from _zionex_peer import EPS, TorchRecTables, counted, missing, quiet

from cordillera.data.ranking.features import FeatureSpec
from cordillera.distributed.collectives import Collectives
from cordillera.distributed.ledger import Ledger
from cordillera.embeddings.pooled_exchange import choose_pooled
from cordillera.embeddings.sharded_tables import ShardedEmbeddingTables
from cordillera.embeddings.tables import EmbeddingTables, TablesConfig
from cordillera.jagged import JaggedBatch
from cordillera.kernels.host_memory import keep_freed_memory

RANKS, BATCH, DIM, ROWS = 2, 2048, 32, 100_000
KINDS = {"whole": "table-wise", "columns": "column-wise", "rows": "row-wise"}
CASES = {"1 id": 1, f"1 to {LONGEST} ids": LONGEST}
RULE, RATE = "rowwise_adagrad", 0.01
BATCHES, WARMUP = 4, 2
OURS, PEER = ("rows", "bags"), "TorchRec"  # what ours sends: rows, or sums of bags
DEADLINE_S = 3600.0
LENGTH_BYTES, ID_BYTES, VALUE_BYTES = 4, 8, 4


def pooled_bytes(
    kind: str, batch: JaggedBatch, features: FeatureSpec, dim: int, rank: int, size: int
) -> dict[str, int]:
    """Return the bytes that a rank sends in one step of TorchRec's pooled exchange, by formula.

    Lengths and ids go to the ranks that hold the features' tables (``table-wise``), to all (``column-wise``) or to the
    ranks that hold the rows (``row-wise``). Sums of bags return by an all-to-all, or by a reduce-scatter of partial
    sums over all bags; gradients go the opposite way.

    Args:
        kind: Kind of sharding.
        batch: Samples of this rank; all ranks have equally many.
        features: Features with a table each.
        dim: Columns.
        rank: This rank.
        size: Number of ranks.
    """
    others, bags, samples = size - 1, len(batch.lengths), len(batch)
    if kind == "table-wise":
        away = [i for i in range(len(batch.keys)) if i % size != rank]
        own = len(batch.keys) - len(away)
        ids = sum(int(batch.lengths.view(-1, samples)[i].sum()) for i in away)
        lengths, output, gradient = len(away) * samples, own * samples * dim * others, len(away) * samples * dim
    elif kind == "column-wise":
        ids, lengths = len(batch.values) * others, bags * others
        output = gradient = bags * (dim // size) * others
    else:
        (rows,) = set(features.tables.values())
        ids = int((batch.values // -(-rows // size) != rank).sum())
        lengths = bags * others
        output = gradient = bags * dim * others
    return {
        "ids": ids * ID_BYTES,
        "lengths": lengths * LENGTH_BYTES,
        "output": output * VALUE_BYTES,
        "gradient": gradient * VALUE_BYTES,
    }


class _Contenders:
    """Both tables with the same weights, on one rank, and the steps that both take."""

    def __init__(self, way: str, features: FeatureSpec, batches: list[JaggedBatch], links: Collectives) -> None:
        config = TablesConfig(name=RULE, learning_rate=RATE, eps=EPS)
        draw = torch.Generator().manual_seed(1)
        cut = placement(way, features.tables, DIM, links.size)
        self.chosen = choose_pooled(cut, features, batches)
        drawn = EmbeddingTables(features, DIM, config, generator=draw)
        pooled = {"rows": (), "bags": tuple(features.tables)}
        self.ours = {sent: ShardedEmbeddingTables.of(drawn, replace(cut, pooled=pooled[sent]), links) for sent in OURS}
        self.batches = [share(batch, links.rank, links.size) for batch in batches]
        self.gradients = [torch.randn(len(one), len(one.keys), DIM, generator=draw) for one in self.batches]
        self.steps: dict[str, Callable[[int], None]] = {sent: partial(self._step, self.ours[sent]) for sent in OURS}
        if missing() is None:
            self._add_peer(way, features)

    def _add_peer(self, way: str, features: FeatureSpec) -> None:
        peer = TorchRecTables(features, DIM, RULE, RATE, KINDS[way])
        peer.load({name: self.ours["rows"].table(name) for name in features.tables})
        # lengths in 32 bits, as TorchRec's own examples have them, halve what it sends of them
        given = [replace(one, offsets=one.offsets.int()) for one in self.batches]
        gradients = [peer.order(one) * peer.size for one in self.gradients]
        with torch.no_grad():
            pooled = peer.forward(given[0]).values()
            for sent, ours in self.ours.items():
                off = float((pooled - peer.order(ours(self.batches[0]))).abs().max())
                if off > 1e-5:
                    raise RuntimeError(f"TorchRec's output differs by {off:g} from ours ({way}, {sent})")
        self.steps[PEER] = lambda i: peer.step(given[i % len(given)], gradients[i % len(given)])

    def _step(self, ours: ShardedEmbeddingTables, i: int) -> None:
        i %= len(self.batches)
        ours(self.batches[i]).backward(self.gradients[i])
        ours.update()


def _timed(steps: dict[str, Callable[[int], None]], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Return seconds by the clock and by this rank's processor, of each contender in every round."""
    found: dict[str, dict[str, list[float]]] = {name: {"wall": [], "processor": []} for name in steps}
    names = list(steps)
    for i in range(rounds):
        gc.collect()
        for name in names[i % len(names) :] + names[: i % len(names)]:
            dist.barrier()
            began, processor = time.perf_counter(), time.process_time()
            steps[name](i)
            found[name]["processor"].append(time.process_time() - processor)
            dist.barrier()
            found[name]["wall"].append(time.perf_counter() - began)
    return found


def _traffic(step: Callable[[int], None], ledger: Ledger) -> dict[str, dict[str, float]]:
    """Return bytes and messages of a step, by name; the mean over all batches."""
    ledger.clear()
    for i in range(BATCHES):
        step(i)
    return {
        name: {"bytes": one.bytes / BATCHES, "messages": one.messages / BATCHES} for name, one in ledger.traffic.items()
    }


def _on_rank(rank: int, folder: str) -> dict[str, Any]:
    settings = json.loads(Path(folder, "settings.json").read_text())
    features = click_features(settings["rows"])
    keep_freed_memory()  # as the trainer does, for all contenders
    found: dict[str, Any] = {"missing": missing()}
    for case, longest in CASES.items():
        batches = click_batches(features, BATCHES, settings["batch"], longest)
        for way, kind in KINDS.items():
            links = Collectives(None, Ledger(), 300.0)
            with quiet():
                both = _Contenders(way, features, batches, links)
                for step in both.steps.values():
                    for i in range(WARMUP):
                        step(i)
                traffic = {sent: _traffic(both.steps[sent], links.ledger) for sent in OURS}
                sent: dict[str, float] = {}
                if PEER in both.steps:
                    with counted() as counts:
                        for i in range(BATCHES):
                            both.steps[PEER](i)
                    sent = {
                        "bytes": sum(counts.bytes.values()) / BATCHES,
                        "messages": sum(counts.messages.values()) / BATCHES,
                    }
                formulas = [pooled_bytes(kind, one, features, DIM, rank, links.size) for one in both.batches]
                found[f"{case}, {way}"] = {
                    "traffic": traffic,
                    "chosen": len(both.chosen) / len(features.tables),
                    "peer": sent,
                    "formula": {key: sum(one[key] for one in formulas) / BATCHES for key in formulas[0]},
                    "values": sum(len(one.values) for one in both.batches) / BATCHES,
                    "seconds": _timed(both.steps, settings["rounds"]),
                }
            del both
    return found


def _timings(ranks: list[dict[str, Any]], name: str, clock: str) -> Timing:
    """Return the time of the slowest rank in every round."""
    rounds = zip(*(rank["seconds"][name][clock] for rank in ranks), strict=True)
    return Timing(name, [max(one) for one in rounds])


def _row(case: str, way: str, sent: str, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return bytes and messages of the rank that sends most bytes, and times of the slowest."""
    traffic = [rank["traffic"][sent] for rank in ranks]
    ours = [{key: sum(one[key] for one in of_rank.values()) for key in ("bytes", "messages")} for of_rank in traffic]
    share = ranks[0]["chosen"]  # of the tables for which sums of bags are predicted to take fewer bytes
    row: dict[str, Any] = {
        "case": case,
        "way": way,
        "kind": KINDS[way],
        "sent": sent,
        "chosen": share if sent == "bags" else 1 - share,
        "ids": max(rank["values"] for rank in ranks),
        "bytes": max(one["bytes"] for one in ours),
        "messages": max(one["messages"] for one in ours),
        "bytes_by_name": {name: max(of_rank[name]["bytes"] for of_rank in traffic) for name in traffic[0]},
        "formula_bytes": max(sum(rank["formula"].values()) for rank in ranks),
        "formula": [rank["formula"] for rank in ranks],
        "seconds": {"ours": _timings(ranks, sent, "wall").to_json()},
    }
    row["bytes_over_formula"] = row["formula_bytes"] / row["bytes"]
    if not ranks[0]["peer"]:
        return row
    for key in ("bytes", "messages"):
        row[f"peer_{key}"] = max(rank["peer"][key] for rank in ranks)
    row["times_fewer_bytes"] = row["peer_bytes"] / row["bytes"]
    row["seconds"][PEER] = _timings(ranks, PEER, "wall").to_json()
    row["times_as_fast"] = {
        clock: times_faster(_timings(ranks, sent, clock), _timings(ranks, PEER, clock)).to_json()
        for clock in ("wall", "processor")
    }
    return row


def measure_exchange(quick: bool) -> dict[str, Any]:
    """Return bytes, messages and times of a step for every way and both lengths of bags."""
    settings = {"rows": 2_000, "batch": 64, "rounds": 2} if quick else {"rows": ROWS, "batch": BATCH, "rounds": 24}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "settings.json").write_text(json.dumps(settings))
        ended = run_processes(RANKS, Path(folder), _on_rank, DEADLINE_S)
    if any(ended.codes):
        raise RuntimeError(f"processes ended with {ended.codes}: {ended.said}")
    ranks = [found for _, found in sorted(ended.found.items())]
    rows = [
        _row(case, way, sent, [rank[f"{case}, {way}"] for rank in ranks])
        for case in CASES
        for way in KINDS
        for sent in OURS
    ]
    return {
        "evidence": "measured",
        "rows_per_table": settings["rows"],
        "batch": settings["batch"],
        "ranks": RANKS,
        "threads_per_rank": 1,
        "embedding_dim": DIM,
        "rule": RULE,
        "missing": ranks[0]["missing"],
        "rows": rows,
        "notes": [
            "a step is lookup, backward and update of tables alone, ids not sent in advance; two processes of one "
            "thread on one machine, so that bytes cost little",
            "ours sends rows or sums of bags of all tables; `chosen` is the share of tables for which this takes fewer "
            "bytes, as parallel.pool = 'auto' predicts them",
            "bytes and messages are of the rank that sends most; times are of the slowest rank",
            "TorchRec's bytes are those of its collectives; row-wise: what a reduce-scatter and an all-gather need at "
            "least, not what Gloo puts on the wire",
        ],
    }
