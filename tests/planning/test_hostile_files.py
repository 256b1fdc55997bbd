"""Cluster, workload and schedule files that nobody meant: clean errors in bounded time, or finite predictions."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from cordillera import topology
from cordillera.cost import CostModel, calibration_for
from cordillera.errors import CordilleraError
from cordillera.planning import workloads
from cordillera.planning.language import workload
from cordillera.planning.language.job import PlannedJob
from cordillera.planning.language.workload import Layout
from cordillera.planning.network.mesh import Mesh
from cordillera.planning.network.settings import production_network, tuned_network
from cordillera.planning.pipeline.schedules import Schedule, interleaved
from cordillera.planning.ranking.exchange import TableLayout, TableSchedule
from cordillera.planning.ranking.explorer import RecommenderExplorer
from cordillera.planning.ranking.workload import Recommender
from cordillera.topology import Topology
from tests.fuzzing import damaged, survives
from tests.planning.flows import route

CLUSTER = """
description = "two rooms"
[device]
name = "A100 SXM4 80GB"
matrix_flops_per_s = 312e12
memory_bytes = 80e9
memory_bytes_per_s = 2039e9
nic_bytes_per_s = 25e9
processors = 108
[[levels]]
name = "host"
members = 8
bytes_per_s = 300e9
latency_s = 2e-6
[[levels]]
name = "room"
members = [5, 3]
latency_s = 5e-6
planes = 8
[[levels]]
name = "site"
members = 2
oversubscription = 4.0
latency_s = 50e-6
distance_km = 12
planes_lost = 0
loss_rate = 1e-4
[[links]]
level = "room"
member = 3
bytes_per_s = 1e9
"""
EXPERTS = """
sequence = 8192
batch = 2048
weight_bytes = 2
[model]
layers = 48
hidden = 5120
heads = 40
kv_heads = 8
head_dim = 128
ffn = 16384
gated = true
vocabulary = 202048
fused_attention = true
[model.experts]
count = 128
active = 1
ffn = 8192
shared_ffn = 8192
every = 2
"""
TABLES = """
batch = 65536
dense = 13
bottom = [512, 256, 128]
interaction = "cross"
top = [1024, 1]
forward_bytes = 2
[cross]
layers = 3
rank = 512
[[tables]]
count = 3
rows = 4000000
dim = 128
lookups = 3
[[tables]]
rows = 39060
dim = 128
weight_bytes = 2
"""
WORDS = [
    b"0", b"-1", b"nan", b"inf", b"-inf", b"1e308", b"1e-308", b"1e8", b"4611686018427387904", b"1000000000", b"true",
    b'"8"', b"[1, 2]", b"[]", b"{}", b'"', b"'''", b"[[levels]]\n", b"[[tables]]\n", b"[model]\n",
    b"1979-05-27", b"\\u001b[2J", b"\x1b[2J", b"name = \"[/x]\"\n", b"e3", b"e9", b"000000", b".", b"\n", b"#", b"=",
    "é\u202e".encode(),
]  # fmt: skip


VALUES = [
    b"0", b"1", b"2", b"3", b"7", b"64", b"1000", b"4096", b"65536", b"100000", b"1048576", b"16777216", b"4294967296",
    b"1125899906842624", b"4611686018427387904", b"1e-300", b"1e-6", b"0.001", b"0.5", b"0.999999", b"1e6", b"1e12",
    b"1e24", b"1e300", b"[1]", b"[512, 512]", b"-1", b"true", b'"dot"', b'"concat"',
]  # fmt: skip


def other_values(content: bytes, rng: random.Random) -> bytes:
    """The content with one to six values replaced by extreme ones."""
    lines = content.split(b"\n")
    places = [place for place, line in enumerate(lines) if b" = " in line]
    for place in rng.sample(places, rng.randint(1, 6)):
        lines[place] = lines[place].split(b" = ")[0] + b" = " + rng.choice(VALUES)
    return b"\n".join(lines)


def _finite(**numbers: float) -> None:
    for name, number in numbers.items():
        assert math.isfinite(number), (name, number)
        assert number > 0, (name, number)


def predict(job: workload.Workload, cluster: Topology) -> None:
    """A step on few devices: refused, or finite."""
    cost = CostModel(cluster.device, calibration_for(cluster.device))
    for network in (None, production_network(cluster), tuned_network(cluster)):
        for layout in (Layout(), Layout(tensor=2, pipeline=2, data=2, shards=2, chunks=2, sequence_parallel=True)):
            if layout.devices <= cluster.devices and not layout.problems(job):
                found = PlannedJob(job, Mesh.of(cluster, layout), layout, cost, network).estimate()
                _finite(seconds=found.seconds, memory=found.memory_bytes, utilisation=found.utilisation)
                assert all(0 <= part < math.inf for part in found.parts.values()), found.parts


def predict_tables(job: Recommender, cluster: Topology) -> None:
    """A step on few devices: refused, or finite."""
    explorer = RecommenderExplorer(job, cluster, devices=min(8, cluster.devices))
    layout = TableLayout(explorer.devices)
    step = explorer.job(layout, production_network(cluster)).step(TableSchedule())
    _finite(seconds=step.seconds, memory=step.memory_bytes)
    assert all(0 <= part < math.inf for part in step.parts.values()), step.parts


def read_cluster(path: Path) -> None:
    """Read a cluster and use all of it."""
    cluster = topology.load(path)
    last = cluster.devices - 1
    assert cluster.sizes[-1] == (cluster.devices,)
    resources, latency = route(cluster, 0, last)
    assert math.isfinite(latency)
    for resource in resources:
        _finite(capacity=float(cluster.capacities[resource]))
    predict(workloads.load("llama3-8b"), cluster)  # type: ignore[arg-type]
    predict_tables(workloads.load("dlrm-dcnv2"), cluster)  # type: ignore[arg-type]


def read_workload(path: Path) -> None:
    """Read a workload and predict its step."""
    job = workloads.load(path)
    cluster = topology.load("a100-node")
    if isinstance(job, Recommender):
        predict_tables(job, cluster)
    else:
        predict(job, cluster)


@pytest.mark.parametrize(
    ("texts", "read"), [([CLUSTER], read_cluster), ([EXPERTS, TABLES], read_workload)], ids=["clusters", "workloads"]
)
def test_damaged_files_are_refused_or_predicted_with_finite_numbers(
    tmp_path: Path, fuzz_inputs: Callable[[int], int], texts: list[str], read: Callable[[Path], None]
) -> None:
    rng = random.Random(0)
    accepted = 0
    for number in range(fuzz_inputs(150)):
        text = rng.choice(texts).encode()
        content = damaged(text, rng, WORDS) if number % 3 == 0 else other_values(text, rng)
        path = tmp_path / "input.toml"
        path.write_bytes(content)
        found = survives(lambda path=path: read(path), f"input {number}: {content!r}")  # type: ignore[misc]
        accepted += not isinstance(found, CordilleraError)
    assert accepted  # some files are still good


def test_damaged_schedules_are_refused_or_checked(fuzz_inputs: Callable[[int], int]) -> None:
    text, rng = interleaved(4, 8, 2).to_csv(), random.Random(0)
    words = [
        b"0F0",
        b"99999999999F0",
        b"0F99999999999",
        b"(0F0;0B0)OVERLAP_F_B",
        b",",
        b"\n",
        "²F1".encode(),
        b"9" * 12,
    ]
    for number in range(fuzz_inputs(150)):
        content = damaged(text.encode(), rng, words).decode("utf-8", "replace")
        found = survives(lambda content=content: Schedule.from_csv(content), f"input {number}: {content!r}")  # type: ignore[misc]
        if isinstance(found, Schedule):
            found.check()
