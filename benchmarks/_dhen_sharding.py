"""DHEN's dense weights over two hosts of two ranks, sharded over all or within hosts, on links of an emulated rate."""

from __future__ import annotations

import tempfile
import time
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _processes import run_processes
from torch.distributed.tensor import DTensor
from torch.nn.functional import binary_cross_entropy_with_logits

from cordillera.data.ranking.features import FeatureSpec, RankingBatch, SparseFeature
from cordillera.distributed.fsdp.sharding_law import Unit, bytes_across_hosts, parameter_memory, sent_bytes
from cordillera.distributed.fsdp.traffic import record_weight_traffic
from cordillera.distributed.ledger import Ledger, Traffic
from cordillera.embeddings.tables import TablesConfig
from cordillera.jagged import JaggedBatch
from cordillera.models.ranking import build
from cordillera.models.ranking.base import RankingModel
from cordillera.models.ranking.dhen import DHENConfig
from cordillera.training.optimizers import build_adamw, dense_parameters
from cordillera.training.ranking.sharded_dense import dense_units, shard_dense

HOSTS, SHARDS = 2, 2
RANKS = HOSTS * SHARDS
WAYS = ("full", "hybrid")
# The paper's ratio of NVLink to RoCE for a GPU is 600 GB/s to 25 GB/s.
INSIDE_BYTES_PER_S, ACROSS_BYTES_PER_S = 2.4e9, 100e6
FEATURES, DIM, BATCH = 26, 64, 16  # few samples of a rank, because four processes share the cores
ROUNDS, STEPS = 7, 2
TARGET = 1.2
DEADLINE_S = 500.0
CONFIG = DHENConfig(
    embedding_dim=DIM,
    layers=4,
    modules=("attention", "linear", "mlp"),
    embeddings=16,
    module_mlp=(256,),
    top_mlp=(256,),
)


class PacedLedger(Ledger):
    """Ledger that lets a rank wait after a collective until its links would have sent the bytes."""

    paced = True

    def record(self, name: str, traffic: Traffic) -> None:
        super().record(name, traffic)
        across = traffic.bytes_across_hosts
        needed = across / ACROSS_BYTES_PER_S + (traffic.bytes - across) / INSIDE_BYTES_PER_S
        if self.paced:
            time.sleep(max(0.0, needed - traffic.seconds))


class _WholeWeights:
    """Largest bytes of matrices that a rank holds whole, looked at whenever a part of the model has computed."""

    def __init__(self, model: RankingModel) -> None:
        self.most = 0
        self._matrices = [
            (module, name)
            for part, module in model.named_modules()
            for name, weight in module.named_parameters(recurse=False)
            if weight.dim() > 1 and not part.startswith("tables")
        ]
        for module in {module for module, _ in self._matrices}:
            module.register_forward_hook(lambda *_: self._look())
            module.register_full_backward_hook(lambda *_: self._look())

    def _look(self) -> None:
        held = (getattr(module, name) for module, name in self._matrices)
        whole = sum(weight.nbytes for weight in held if not isinstance(weight, DTensor))
        self.most = max(self.most, whole)


def _model(config: DHENConfig) -> RankingModel:
    names = [f"c{i}" for i in range(FEATURES)]
    features = FeatureSpec(
        dense=("x",),
        sparse=tuple(SparseFeature(name, name) for name in names),
        tables=dict.fromkeys(names, 1000),
        tasks=("click",),
    )
    torch.manual_seed(0)
    return build(config, features, TablesConfig())


def _batch(rank: int) -> RankingBatch:
    draw = torch.Generator().manual_seed(rank)
    ids = torch.randint(0, 1000, (FEATURES * BATCH,), generator=draw)
    sparse = JaggedBatch(tuple(f"c{i}" for i in range(FEATURES)), ids, torch.arange(len(ids) + 1), one_hot=True)
    labels = (torch.rand(BATCH, 1, generator=draw) < 0.3).float()
    return RankingBatch(dense=torch.randn(BATCH, 1, generator=draw), sparse=sparse, labels=labels)


class _Trained:
    """A model on one rank, sharded in one way."""

    def __init__(self, way: str, rank: int, config: DHENConfig) -> None:
        self.model, self.batch, self.ledger = _model(config), _batch(rank), PacedLedger()
        self.whole = _WholeWeights(self.model)
        mesh = shard_dense(self.model, way, RANKS, HOSTS, 60.0)  # type: ignore[arg-type]
        assert mesh is not None
        record_weight_traffic(self.model, mesh, self.ledger, SHARDS)
        self.optimizer = build_adamw(self.model, learning_rate=1e-3, betas=(0.9, 0.999), eps=1e-4, weight_decay=0.0)
        self.losses: list[float] = []

    @property
    def held(self) -> int:
        """Bytes of this rank's parts of all matrices."""
        return sum(one.to_local().nbytes for one in self.model.parameters() if isinstance(one, DTensor))

    def step(self) -> None:
        assert self.batch.labels is not None
        loss = binary_cross_entropy_with_logits(self.model(self.batch), self.batch.labels) / RANKS
        loss.backward()
        vectors = [one.grad for one in self.model.parameters() if not isinstance(one, DTensor) and one.grad is not None]
        flat = torch.cat([gradient.reshape(-1) for gradient in vectors])
        dist.all_reduce(flat)
        for gradient, part in zip(vectors, flat.split([one.numel() for one in vectors]), strict=True):
            gradient.copy_(part.view_as(gradient))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.losses.append(float(loss.detach()))


def _measured(rank: int, folder: str) -> dict[str, Any]:
    warnings.filterwarnings("ignore", "Full backward hook is firing")
    rounds = int(Path(folder, "rounds").read_text())
    config = CONFIG if rounds > 1 else CONFIG.model_copy(update={"layers": 1, "module_mlp": (16,)})
    ways = {way: _Trained(way, rank, config) for way in WAYS}
    seconds: dict[str, list[float]] = {f"{way}, {link}": [] for way in WAYS for link in ("paced", "as it is")}
    for one in ways.values():
        one.step()
    for _ in range(rounds):
        for way, one in ways.items():
            for link in ("paced", "as it is"):
                one.ledger.paced = link == "paced"
                one.ledger.clear()
                dist.barrier()
                began = time.perf_counter()
                for _ in range(STEPS):
                    one.step()
                dist.barrier()
                seconds[f"{way}, {link}"].append((time.perf_counter() - began) / STEPS)
    traffic = {way: {kind: asdict(found) for kind, found in one.ledger.traffic.items()} for way, one in ways.items()}
    return {
        "seconds": seconds,
        "traffic": traffic,
        "held": {way: one.held for way, one in ways.items()},
        "whole": {way: one.whole.most for way, one in ways.items()},
        "losses": {way: one.losses for way, one in ways.items()},
        "config": config.model_dump(),
    }


def units_of(model: RankingModel) -> tuple[list[Unit], Unit]:
    """Return the units and the root of a model that is not sharded yet."""
    parts = [[weight for weight in unit.parameters() if weight.dim() > 1] for unit in dense_units(model)]
    inside = {weight for of_unit in parts for weight in of_unit}
    others = [one for one in dense_parameters(model).values() if one.dim() > 1 and one not in inside]
    return [Unit.of(one.shape for one in of_unit) for of_unit in parts], Unit.of(one.shape for one in others)


def measure_sharding(quick: bool) -> dict[str, Any]:
    """Return step times, memory and bytes of both ways, beside the formulas."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "rounds").write_text("1" if quick else str(ROUNDS))
        ended = run_processes(RANKS, Path(folder), _measured, DEADLINE_S)
    if any(ended.codes):
        raise RuntimeError(f"processes ended with {ended.codes}: {ended.said}")
    found = [ended.found[rank] for rank in range(RANKS)]
    units, root = units_of(_model(DHENConfig(**found[0]["config"])))
    rows = {}
    for way, (shards, replicas) in zip(WAYS, ((RANKS, 1), (SHARDS, HOSTS)), strict=True):
        sent = sent_bytes(units, shards, replicas, root)
        across = bytes_across_hosts(sent, shards, replicas, SHARDS)
        law = parameter_memory(units, shards, root)
        read = [sum(one["bytes_across_hosts"] for one in of_rank["traffic"][way].values()) / STEPS for of_rank in found]
        rows[way] = {
            "seconds": {
                link: [max(of_rank["seconds"][f"{way}, {link}"][i] for of_rank in found)
                       for i in range(len(found[0]["seconds"][f"{way}, {link}"]))]
                for link in ("paced", "as it is")
            },
            "held_bytes": [of_rank["held"][way] for of_rank in found],
            "held_by_formula": law.sharded,
            "whole_bytes": [of_rank["whole"][way] for of_rank in found],
            "whole_by_formula": law.gathered,
            "across_hosts_bytes": read,
            "across_hosts_by_formula": across,
        }  # fmt: skip
    losses = [of_rank["losses"] for of_rank in found]
    apart = max(abs(a - b) for of_rank in losses for a, b in zip(of_rank["full"], of_rank["hybrid"], strict=True))
    ratios = {
        link: [a / b for a, b in zip(rows["full"]["seconds"][link], rows["hybrid"]["seconds"][link], strict=True)]
        for link in ("paced", "as it is")
    }
    return {
        "evidence": "emulated",
        "hosts": HOSTS,
        "ranks_per_host": SHARDS,
        "inside_bytes_per_s": INSIDE_BYTES_PER_S,
        "across_bytes_per_s": ACROSS_BYTES_PER_S,
        "weight_bytes": 4 * sum(unit.elements for unit in (root, *units)),
        "model": found[0]["config"],
        "rows": rows,
        "times_as_fast": ratios,
        "loss_difference": apart,
        "target": TARGET,
        "notes": [
            "hosts are pairs of processes on one machine; after a collective each rank waits until links of the given "
            "rates would have sent its bytes, in rings; nothing overlaps with computation",
        ],
    }
