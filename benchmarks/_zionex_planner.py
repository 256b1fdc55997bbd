"""Planned placements of MLPerf's tables and of many tables, beside those of TorchRec's planner."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import numpy as np
from _zionex_peer import missing, quiet

from cordillera.partition import imbalance
from cordillera.planning import workloads
from cordillera.planning.ranking.placer import PlacementConfig, place
from cordillera.planning.ranking.table_cost import TableProfile
from cordillera.planning.ranking.workload import Recommender

SIZES = (2, 4, 8, 16)
CAP = 1.3  # memory of a rank, in equal shares of all tables
MANY_TABLES, MANY_RANKS, REPEATS = 1_000, 128, 5
# TorchRec's sharding types by what we let it cut; with none its planner chooses among all that it has
PEER_CUTS = {
    "columns": ("table_wise", "column_wise", "table_column_wise"),
    "rows": ("table_wise", "row_wise"),
    "any": (),
}


def _tables(hot: bool) -> tuple[dict[str, TableProfile], int]:
    """Return MLPerf's tables, with one lookup of a sample each or with those of the multi-hot data, and the batch."""
    workload = workloads.load("dlrm-dcnv2")
    assert isinstance(workload, Recommender)
    profiles = {
        f"table {i}": TableProfile(one.rows, one.dim, one.lookups if hot else 1.0)
        for i, one in enumerate(workload.tables)
    }
    return profiles, workload.batch


def _bytes(profiles: dict[str, TableProfile]) -> float:
    return sum(one.rows * (4.0 * one.columns + 4) for one in profiles.values())


def _many() -> dict[str, TableProfile]:
    random = np.random.default_rng(0)
    rows = (10 ** random.uniform(2, 7.5, MANY_TABLES)).astype(int)
    columns = random.choice([16, 32, 64, 128], MANY_TABLES)
    lookups = 10 ** random.uniform(0, 1.5, MANY_TABLES)
    return {f"table {i}": TableProfile(int(rows[i]), int(columns[i]), float(lookups[i])) for i in range(MANY_TABLES)}


class _Shard(NamedTuple):
    """A part of a table on one rank, and the number of its copies, which share the lookups."""

    table: TableProfile
    rows: int
    columns: int
    rank: int
    copies: int


def _loads(shards: list[_Shard], size: int) -> dict[str, float]:
    """Return the largest lookup bytes and memory of a rank, in multiples of the mean."""
    lookups, memory = np.zeros(size), np.zeros(size)
    for one in shards:
        lookups[one.rank] += one.table.lookups * one.rows / one.table.rows * one.columns / one.copies
        memory[one.rank] += one.rows * (4.0 * one.columns + 4)
    return {"lookups": imbalance(lookups), "memory": imbalance(memory), "parts": len(shards)}


def _ours(profiles: dict[str, TableProfile], size: int, batch: int, cuts: tuple[Any, ...]) -> dict[str, float]:
    room = CAP * _bytes(profiles) / size / 1e9
    began = time.process_time()
    found = place(profiles, size, PlacementConfig(memory_gb=room, cuts=cuts), batch=batch)
    seconds = time.process_time() - began
    parts = found.placement.parts
    shards = [
        _Shard(profiles[one.table], one.rows, one.columns, rank, len(one.ranks)) for one in parts for rank in one.ranks
    ]
    return _loads(shards, size) | {"processor_seconds": seconds}


def _peer(profiles: dict[str, TableProfile], size: int, batch: int, kinds: tuple[str, ...]) -> dict[str, float]:
    """Return the loads of TorchRec's plan for as many GPUs, whose memory has the same cap."""
    import torch
    import torchrec
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
    from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation

    configs = [
        torchrec.EmbeddingBagConfig(
            name=name, embedding_dim=one.columns, num_embeddings=one.rows, feature_names=[f"feature of {name}"]
        )
        for name, one in profiles.items()
    ]
    limits = {
        name: ParameterConstraints(
            sharding_types=list(kinds) or None, compute_kernels=["fused"], pooling_factors=[one.lookups]
        )
        for name, one in profiles.items()
    }
    # TorchRec counts activations too, so that its cap is a GPU's
    room = max(int(CAP * _bytes(profiles) / size), 80 * 2**30)
    sharder = EmbeddingBagCollectionSharder(fused_params={"optimizer": _rowwise_adagrad()})
    with quiet():
        planner = EmbeddingShardingPlanner(
            topology=Topology(world_size=size, local_world_size=min(size, 8), compute_device="cuda", hbm_cap=room),
            batch_size=batch // size,
            constraints=limits,
            storage_reservation=FixedPercentageStorageReservation(0.0),
        )
        module = torchrec.EmbeddingBagCollection(configs, device=torch.device("meta"))
        began = time.process_time()
        plan = planner.plan(module, [sharder])
        seconds = time.process_time() - began
    shards = [
        _Shard(profiles[name], *shard.shard_sizes, shard.placement.rank(), 1)
        for of_module in plan.plan.values()
        for name, parameter in of_module.items()
        for shard in parameter.sharding_spec.shards
    ]
    return _loads(shards, size) | {"processor_seconds": seconds}


def _rowwise_adagrad() -> Any:
    """Return row-wise Adagrad as FBGEMM names it."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType

    return EmbOptimType.EXACT_ROWWISE_ADAGRAD


def measure_planner(quick: bool) -> dict[str, Any]:
    """Return imbalances of MLPerf's tables on some ranks, and the time to place many tables."""
    reason = missing()
    rows = []
    for hot in (False, True):
        profiles, batch = _tables(hot)
        for size in SIZES[:1] if quick else SIZES:
            row: dict[str, Any] = {"case": "multi-hot" if hot else "1 id", "ranks": size, "peers": {}}
            row["ours"] = _ours(profiles, size, batch, ("columns", "rows"))
            row["columns"] = _ours(profiles, size, batch, ("columns",))
            for cut, kinds in PEER_CUTS.items() if reason is None else ():
                try:
                    row["peers"][cut] = _peer(profiles, size, batch, kinds)
                except Exception as error:  # the planner's errors have no common class
                    row["peers"][cut] = {"reason": str(error).splitlines()[0][:200]}
            rows.append(row)
    many = _many()
    seconds = sorted(
        _ours(many, MANY_RANKS, 65_536, ("columns", "rows"))["processor_seconds"]
        for _ in range(1 if quick else REPEATS)
    )
    return {
        "rows": rows,
        "cap": CAP,
        "many": {"tables": MANY_TABLES, "ranks": MANY_RANKS, "processor_seconds": seconds},
        "missing": reason,
        "notes": [
            "lookups and memory: largest load of a rank divided by the mean, computed from the plans alike",
            f"our ranks have {CAP} equal shares of memory; TorchRec's, which counts activations too, a GPU's 80 GiB "
            "where that is more",
        ],
    }
