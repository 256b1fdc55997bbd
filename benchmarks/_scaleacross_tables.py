"""Recommendation models in the planner: beside published rates, and a model of 12T parameters in two buildings."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from cordillera import topology as clusters
from cordillera.cost import calibration_for
from cordillera.planning import workloads
from cordillera.planning.ranking.explorer import RecommenderExplorer
from cordillera.planning.ranking.workload import Recommender, Tables

# facebookresearch/dlrm, torchrec_dlrm/README, 2022: devices, batch, records a second on one host of A100 of 40 GB, in
# TF32 as PyTorch had it then.
PUBLISHED = ((8, 2_048, 284_615), (4, 16_384, 1_458_176), (8, 16_384, 1_671_168), (8, 65_536, 5_373_952))
A100_40GB = {"device.memory_bytes": 42.9e9, "device.memory_bytes_per_s": 1555e9, "device.matrix_flops_per_s": 156e12}
CRITEO_ROWS = (
    45833188, 36746, 17245, 7413, 20243, 3, 7114, 1441, 62, 29275261, 1572176, 345138, 10, 2209, 11267, 128, 4, 974,
    14, 48937457, 11316796, 40094537, 452104, 12606, 104, 35,
)  # fmt: skip
NEO_SAMPLES_PER_S, NEO_BATCH = 1.7e6, 65_536  # model F on 128 A100 (Mudigere et al. 2022)
DEVICES = (1_024, 4_096)
CHANGES: dict[str, dict[str, float]] = {
    "as it is": {},
    "1:7": {"region.oversubscription": 7.0},
    "1:14": {"region.oversubscription": 14.0},
    "100 km": {"region.distance_km": 100.0},
    "500 km": {"region.distance_km": 500.0},
}
MESSAGES = {"with_messages": 1e-6, "without_messages": 0.0}  # seconds of a device for a message of an exchange


def recommenders(console: Console, quick: bool) -> dict[str, Any]:
    """Simulate steps of recommendation models."""
    rates = [_beside_published(*row) for row in (PUBLISHED[:1] if quick else PUBLISHED)]
    table = Table(title="steps of a DLRM on one host of A100 beside published ones", title_justify="left")
    for heading in ("devices", "batch", "published", "simulated", "off by"):
        table.add_column(heading, justify="right")
    for row in rates:
        seconds = [f"{1e3 * row[key]:.2f} ms" for key in ("published_s", "simulated_s")]
        table.add_row(str(row["devices"]), f"{row['batch']:,}", *seconds, f"{row['off']:+.0%}")
    console.print(table)
    neo = _neo()
    console.print(f"if all tables of 12T parameters were in the devices' memory: {neo:.1f} times Neo's published rate")
    gains = []
    for devices in DEVICES[:1] if quick else DEVICES:
        for name, changes in list(CHANGES.items())[: 1 if quick else None]:
            row = {"devices": devices, "change": name, "changes": changes}
            row |= {key: _gain(devices, changes, seconds) for key, seconds in MESSAGES.items()}
            gains.append(row)
            console.print(f"{devices:,} devices, {name}: {row['with_messages']:.2f}, {row['without_messages']:.2f}")
    return {
        "evidence": "simulated",
        "published": rates,
        "times_neo": neo,
        "gains": gains,
    }


def criteo(batch: int) -> Recommender:
    """Return the model of that table: one id a table, dot products, SGD."""
    return Recommender(
        tables=tuple(Tables(rows=rows, dim=128) for rows in CRITEO_ROWS),
        dense=13,
        bottom=(512, 256, 128),
        top=(1024, 1024, 512, 256, 1),
        batch=batch,
        optimizer_bytes=0,
        dense_bytes=8,
    )


def _beside_published(devices: int, batch: int, records_per_s: float) -> dict[str, Any]:
    host = clusters.load("a100-node").changed(A100_40GB)
    simulated = RecommenderExplorer(criteo(batch), host, devices=devices).production().seconds
    published = batch / records_per_s
    return {
        "devices": devices,
        "batch": batch,
        "published_s": published,
        "simulated_s": simulated,
        "off": simulated / published - 1,
    }


def _large() -> Recommender:
    work = workloads.load("dlrm-12t")
    assert isinstance(work, Recommender)
    return work


def _neo() -> float:
    """Return the simulated rate over the published one, with memory that those devices did not have."""
    memory = {"device.memory_bytes_per_s": 1555e9, "device.memory_bytes": 400e9}
    cluster = clusters.load("selene").changed({"building.members": 16, **memory})
    work = _large().model_copy(update={"batch": NEO_BATCH})
    return RecommenderExplorer(work, cluster).production().samples_per_s / NEO_SAMPLES_PER_S


def _gain(devices: int, changes: dict[str, float], message_s: float) -> float:
    """Return the seconds of the production-like plan of 12T parameters over those of the best plan."""
    cluster = clusters.load("two-buildings").changed({"pod.members": devices // 128, **changes})
    constants = calibration_for(cluster.device).model_copy(update={"message_s": message_s})
    explorer = RecommenderExplorer(_large(), cluster, constants, devices=devices)
    return explorer.production().seconds / explorer.explore().best.seconds
