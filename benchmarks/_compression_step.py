"""Steps of tables over two processes whose rows travel in codecs, over emulated and over this machine's links."""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from _compression_tables import TERABYTE, drawn_ids, rows_of
from _emulated_links import EmulatedLinks
from _processes import run_processes
from _timing import Timing, times_faster
from _zionex_cases import placement
from torch import Tensor

from cordillera.data.ranking.features import FeatureSpec, SparseFeature
from cordillera.distributed.codecs.coders import MEASURED, WARM_UP, Coders, MeasuredCoders, TableBounds, named_coders
from cordillera.distributed.collectives import Collectives
from cordillera.distributed.ledger import Ledger, Traffic
from cordillera.embeddings.sharded_tables import ShardedEmbeddingTables
from cordillera.embeddings.tables import EmbeddingTables, TablesConfig
from cordillera.jagged import JaggedBatch
from cordillera.kernels.host_memory import keep_freed_memory
from cordillera.planning.ranking.placement import Placement

RANKS, BATCH, DIM, MOST_ROWS = 2, 1024, 64, 50_000
LATENCY_S = 1e-4
RATES = {"40 Mb/s": 5e6, "100 Mb/s": 12.5e6, "1 Gb/s": 125e6}
FAST = "loopback"
SHARE = 0.313  # of rows' exchange in a raw step, the paper's; gradients, as many bytes, take as long
FORWARD = 1 / 3  # of the computation
CODECS = ("raw", "distinct", "fp16", "int8", "bounded-fast", "bounded", "auto-bounded")
ON_FAST = ("raw", "auto", "auto-bounded")
BATCHES, FIRST = 8, WARM_UP + MEASURED + 2  # steps before those that are timed
ROUNDS, FAST_ROUNDS = BATCHES, 8 * BATCHES  # every batch equally often
FASTER, LOST = 1.38, 0.03  # asked


def _features(most_rows: int) -> FeatureSpec:
    tables = {f"t{i}": min(rows, most_rows) for i, rows in enumerate(TERABYTE)}
    return FeatureSpec((), tuple(SparseFeature(name, name) for name in tables), tables, ("click",))


def _trained_tables(features: FeatureSpec) -> EmbeddingTables:
    """Return tables with rows as after a training (:func:`_compression_tables.rows_of`), equal on every rank."""
    whole = EmbeddingTables(features, DIM, TablesConfig(name="sgd", learning_rate=1e-4), init=0.0)
    rng, first = np.random.default_rng(0), 0
    for rows in features.tables.values():
        drawn = rows_of(np.arange(rows), rows, DIM, rng).astype(np.float32)
        whole.weight.data[first : first + rows] = torch.from_numpy(drawn)
        first += rows
    return whole


def _batches(features: FeatureSpec, rank: int, samples: int) -> list[JaggedBatch]:
    rng = np.random.default_rng([1, rank])
    found = []
    for _ in range(BATCHES):
        ids = np.concatenate([drawn_ids(rows, samples, rng) for rows in features.tables.values()])
        offsets = torch.arange(len(ids) + 1)
        found.append(JaggedBatch(tuple(features.tables), torch.from_numpy(ids), offsets, one_hot=True))
    return found


def _compute(seconds: float, work: Tensor) -> None:
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        work @ work


class _Contender:
    """Tables whose rows travel in one codec, and their steps.

    Attributes:
        seconds: Time of each timed step.
        rows: Traffic of rows in the timed steps.
    """

    def __init__(self, name: str, whole: EmbeddingTables, cut: Placement, links: Collectives) -> None:
        self.name, self.links = name, links
        self.tables = ShardedEmbeddingTables.of(whole, cut, links)
        self.tables.coders = self._coders(name, cut, links)
        self.steps = 0
        self.seconds: list[float] = []
        self.rows = Traffic()

    @staticmethod
    def _coders(name: Any, cut: Placement, links: Collectives) -> Coders | None:
        if name.startswith("auto"):
            return MeasuredCoders(name, cut, links, TableBounds.of(cut, 1.0, 0))
        return named_coders(name, cut, scale=1.0, iterations=0)

    def step(self, batches: list[JaggedBatch], gradient: Tensor, compute: Callable[[float], None]) -> None:
        """Take one step; ids of the next batch are sent before it, as the trainer does."""
        if not self.steps:
            self.tables.prefetch(batches[0])
        batch, following = (batches[(self.steps + i) % len(batches)] for i in range(2))
        before = self.links.ledger.traffic.get("rows", Traffic())
        dist.barrier()
        began = time.perf_counter()
        self.tables.prefetch(following)
        output = self.tables(batch)
        compute(FORWARD)
        output.backward(gradient)
        compute(1 - FORWARD)
        self.tables.update()
        dist.barrier()
        self.seconds.append(time.perf_counter() - began)
        now = self.links.ledger.traffic["rows"]
        spent = Traffic(bytes=now.bytes - before.bytes, exposed_seconds=now.exposed_seconds - before.exposed_seconds)
        self.rows = self.rows + spent
        self.steps += 1

    def forget(self) -> None:
        """Forget the steps taken so far."""
        self.seconds, self.rows = [], Traffic()

    def found(self) -> dict[str, Any]:
        """Return seconds of the timed steps, bytes and exposed seconds of rows in one, and codecs by their number."""
        coders = self.tables.coders
        used = coders.choice.codecs.values() if isinstance(coders, MeasuredCoders) and coders.choice else ()
        return {
            "seconds": self.seconds,
            "bytes": self.rows.bytes / len(self.seconds),
            "exposed": self.rows.exposed_seconds / len(self.seconds),
            "codecs": dict(Counter(used)),
        }


def _most(value: float) -> float:
    """Return the largest value of all ranks."""
    tensor = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return float(tensor)


def _padding(raw: _Contender, run: Callable[[], None]) -> float:
    """Return the seconds of computation with which the exchange of raw rows is ``SHARE`` of a step."""
    for _ in range(2):
        run()
    raw.forget()
    for _ in range(5):
        run()
    found = raw.found()
    exchange, step = _most(found["exposed"]), _most(sorted(found["seconds"])[2])
    return max(0.0, exchange / SHARE - step)


def _on_link(link: str, rank: int, whole: EmbeddingTables, batches: list[JaggedBatch], rounds: int) -> dict[str, Any]:
    """Time all codecs in turn on one link, on one rank."""
    cut = placement("rows", whole.features.tables, DIM, RANKS)
    gradient = 1e-3 * torch.randn(len(batches[0]), len(whole.features.sparse), DIM)
    work, made = torch.randn(128, 128), []
    for name in ON_FAST if link == FAST else CODECS:
        ledger = Ledger()
        links = (
            Collectives(None, ledger, 300.0)
            if link == FAST
            else EmulatedLinks(ledger, 300.0, bytes_per_s=RATES[link], latency_s=LATENCY_S)
        )
        made.append(_Contender(name, whole, cut, links))
    seconds = 0.0

    def compute(share: float) -> None:
        _compute(share * seconds, work)

    if link != FAST:
        seconds = _padding(made[0], lambda: made[0].step(batches, gradient, compute))
    for i in range(FIRST + rounds):
        if i == FIRST:
            for one in made:
                one.forget()
        for one in made[i % len(made) :] + made[: i % len(made)]:
            one.step(batches, gradient, compute)
    found = {one.name: one.found() for one in made}
    for one in made:
        one.tables.forget()
        if isinstance(one.links, EmulatedLinks):
            one.links.close()
    return {"computation_s": seconds, "codecs": found}


def _on_rank(rank: int, folder: str, *, quick: bool) -> dict[str, Any]:
    keep_freed_memory()  # as the trainer does
    features = _features(500 if quick else MOST_ROWS)
    whole = _trained_tables(features)
    batches = _batches(features, rank, 64 if quick else BATCH)
    rounds = dict.fromkeys(RATES, 2 if quick else ROUNDS) | {FAST: 3 if quick else FAST_ROUNDS}
    return {link: _on_link(link, rank, whole, batches, count) for link, count in rounds.items()}


def _row(link: str, name: str, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a codec's steps on a link, of the slowest rank, beside those with raw rows."""

    def timing(of: str) -> Timing:
        rounds = zip(*(rank[link]["codecs"][of]["seconds"] for rank in ranks), strict=True)
        return Timing(of, [max(one) for one in rounds])

    own = [rank[link]["codecs"][name] for rank in ranks]
    raw_bytes = sum(rank[link]["codecs"]["raw"]["bytes"] for rank in ranks)
    return {
        "link": link,
        "evidence": "measured" if link == FAST else "emulated",
        "codec": name,
        "seconds": timing(name).to_json(),
        "times_faster": times_faster(timing(name), timing("raw")).to_json(),
        "bytes": max(one["bytes"] for one in own),
        "ratio": raw_bytes / sum(one["bytes"] for one in own),
        "exposed": max(one["exposed"] for one in own),
        "codecs": own[0]["codecs"],
    }


def measure_step(quick: bool) -> dict[str, Any]:
    """Return times of a step with each codec on every link, and the shares of the exchange."""
    with tempfile.TemporaryDirectory() as folder:
        ended = run_processes(RANKS, Path(folder), partial(_on_rank, quick=quick), 900)
    if ended.codes != [0] * RANKS:
        raise RuntimeError(ended.said)
    ranks = [found for _, found in sorted(ended.found.items())]
    rows = [_row(link, name, ranks) for link, found in ranks[0].items() for name in found["codecs"]]
    shares = {}
    for row in rows:
        if row["codec"] == "raw":
            shares[row["link"]] = row["exposed"] / row["seconds"]["seconds"]["median"]
    return {
        "evidence": "emulated",
        "conditions": {
            "ranks": RANKS,
            "samples_per_rank": BATCH,
            "tables": len(TERABYTE),
            "most_rows": MOST_ROWS,
            "dim": DIM,
            "latency_s": LATENCY_S,
            "bytes_per_s": RATES,
            "computation_s": {link: found["computation_s"] for link, found in ranks[0].items()},
        },
        "share_of_exchange": shares,
        "rows": rows,
        "asked": {"times_faster": FASTER, "share": SHARE, "lost": LOST},
        "notes": [
            f"links of {', '.join(RATES)} are emulated: a token bucket in each sender paces real messages; "
            f"{FAST} is this machine's, measured",
            "computation of a fixed time is added to every step so that the exchange of raw rows takes the paper's "
            "31.3 % of it; gradients, equally many bytes, are never coded; on the loopback nothing is added",
            "the cardinalities are those of Criteo Terabyte, cut to 50,000 rows; rows are drawn as after training",
            f"the steps in which auto measures ({WARM_UP + MEASURED}) are not timed",
        ],
    }
