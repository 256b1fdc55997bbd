"""The ledger of sharded weights against the formulas: four processes, two hosts, three ways to share."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
import torch
from _fsdp_models import make_stage, units_of
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from cordillera.distributed.fsdp.sharding_law import CollectiveCounts, bytes_across_hosts, collectives, sent_bytes
from cordillera.distributed.fsdp.traffic import GATHERED, REDUCED, SCATTERED, record_weight_traffic
from cordillera.distributed.ledger import Ledger, Traffic
from cordillera.distributed.mesh import ParallelConfig, ProcessMesh
from cordillera.errors import PlanError
from cordillera.models.language.llama import LlamaConfig
from cordillera.models.language.parallelize import parallelize, reduce_after
from tests.distributed.processes import Ended, needs_gloo, run_processes

pytestmark = pytest.mark.slow

RANKS_PER_HOST = 2
EVEN = LlamaConfig(layers=3, hidden=32, heads=4, kv_heads=2, ffn=64, vocabulary=64)
UNEVEN = LlamaConfig(layers=2, hidden=18, heads=3, kv_heads=1, ffn=25, vocabulary=51, tied=True)
# by name: model, shards, replicas, whether blocks are freed between forward and backward, microbatches
CASES: dict[str, tuple[LlamaConfig, int, int, bool, int]] = {
    "replicated": (EVEN, 1, 4, True, 1),
    "sharded": (EVEN, 4, 1, True, 1),
    "hybrid": (EVEN, 2, 2, True, 1),
    "kept": (EVEN, 4, 1, False, 2),
    "microbatches": (EVEN, 2, 2, True, 3),
    "uneven": (UNEVEN, 4, 1, True, 1),
    "uneven hybrid": (UNEVEN, 2, 2, False, 2),
}
BESIDE_PLAIN = ("hybrid", "uneven")  # computed again without a ledger
KINDS = {GATHERED: "all_gathers", SCATTERED: "reduce_scatters", REDUCED: "all_reduces"}


def gradients(case: tuple[LlamaConfig, int, int, bool, int], ledger: Ledger | None) -> list[Tensor]:
    """Of a step, whole."""
    config, shards, replicas, reshards, microbatches = case
    parallel = ParallelConfig(shard=shards, replicate=replicas, reshard_after_forward=reshards, deadline_s=30)
    mesh = ProcessMesh(parallel)
    stage = make_stage(config, 0, 1, 1)
    parallelize(stage, mesh)
    stage.init_weights(seed=1)
    if ledger is not None:
        record_weight_traffic(stage, mesh.weights, ledger, RANKS_PER_HOST)
    for number in range(microbatches):
        reduce_after(stage, number == microbatches - 1, reshards)
        tokens = (torch.arange(8) + mesh.rank + number) % config.vocabulary
        stage(tokens, torch.tensor([0, 5, 8]), None, tokens.roll(-1)).backward()
    found = []
    for weight in stage.parameters():
        assert isinstance(weight.grad, DTensor)
        found.append(weight.grad.full_tensor())
    return found


def work(rank: int, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, case in CASES.items():
        ledger = Ledger()
        recorded = gradients(case, ledger)
        plain = gradients(case, None) if name in BESIDE_PLAIN else []
        found[name] = {
            "traffic": {kind: asdict(traffic) for kind, traffic in ledger.traffic.items()},
            "equal": [torch.equal(one, other) for one, other in zip(recorded, plain, strict=False)],
            "weights": len(recorded),
            "norms": [float(gradient.norm()) for gradient in recorded],
        }
    return found


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    done = run_processes(4, tmp_path_factory.mktemp("traffic"), work, 120)
    assert done.codes == [0] * 4, done.said
    return done


def expected(name: str) -> tuple[CollectiveCounts, CollectiveCounts, list[int]]:
    """Counts, bytes of a rank, and each rank's bytes across hosts."""
    config, shards, replicas, reshards, microbatches = CASES[name]
    units, root = units_of(make_stage(config, 0, 1, 1))
    sent = sent_bytes(units, shards, replicas, root, reshards, microbatches)
    counts = collectives(len(units), shards, replicas, True, reshards, microbatches)
    return counts, sent, bytes_across_hosts(sent, shards, replicas, RANKS_PER_HOST)


@needs_gloo
@pytest.mark.parametrize("name", CASES)
def test_the_ledger_is_what_the_formulas_say(ended: Ended, name: str) -> None:
    counts, sent, across = expected(name)
    for rank, found in ended.found.items():
        traffic = {kind: Traffic(**values) for kind, values in found[name]["traffic"].items()}
        for kind, field in KINDS.items():
            one = traffic.get(kind, Traffic())
            assert (one.calls, one.bytes) == (getattr(counts, field), getattr(sent, field)), (rank, kind)
            assert 0 <= one.exposed_seconds <= one.seconds < 120
            assert (one.seconds > 0) == (one.calls > 0)
        assert sum(one.bytes_across_hosts for one in traffic.values()) == across[rank], rank


@needs_gloo
@pytest.mark.parametrize("name", BESIDE_PLAIN)
def test_recording_changes_no_gradient(ended: Ended, name: str) -> None:
    for found in ended.found.values():
        assert found[name]["equal"] == [True] * found[name]["weights"]
        assert all(norm > 0 for norm in found[name]["norms"])


@needs_gloo
def test_hybrid_sharding_spares_the_links_between_hosts(ended: Ended) -> None:
    across = {
        name: [
            sum(traffic["bytes_across_hosts"] for traffic in found[name]["traffic"].values())
            for _, found in sorted(ended.found.items())
        ]
        for name in ("replicated", "sharded", "hybrid")
    }
    units, root = units_of(make_stage(EVEN, 0, 1, 1))
    size = 4 * sum(unit.elements for unit in (root, *units))
    root_again = 4 * root.elements  # the root is gathered once, not twice
    assert max(across["replicated"]) == 2 * size * 3 / 4
    assert max(across["sharded"]) == (3 * size - root_again) * 3 / 4
    assert across["hybrid"] == [2 * (size / 2) * 1 / 2] * 4
    assert sum(across["hybrid"]) < sum(across["replicated"]) < sum(across["sharded"])


def test_a_model_that_is_not_sharded_is_refused() -> None:
    with pytest.raises(PlanError, match="no module is sharded"):
        record_weight_traffic(nn.Linear(2, 2), None, Ledger())  # type: ignore[arg-type]
