"""Dense weights in parts over processes: gradients of one process, memory and bytes by formula."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from cordillera.data.ranking.features import FeatureSpec, RankingBatch, SparseFeature
from cordillera.distributed.fsdp.sharding_law import Unit, sent_bytes
from cordillera.distributed.fsdp.traffic import GATHERED, REDUCED, SCATTERED
from cordillera.distributed.ledger import Ledger
from cordillera.embeddings.tables import TablesConfig
from cordillera.errors import PlanError
from cordillera.jagged import JaggedBatch
from cordillera.models.ranking import build
from cordillera.models.ranking.base import RankingModel
from cordillera.models.ranking.dhen import DHENConfig
from cordillera.models.ranking.wukong import WukongConfig
from cordillera.training.optimizers import build_adamw, dense_parameters
from cordillera.training.ranking.sharded_dense import dense_units, shard_dense
from tests.distributed.processes import found_by, needs_gloo

pytestmark = pytest.mark.slow

BATCH, SIZE = 12, 4
WAYS = {"full": (1, 4), "hybrid": (2, 2)}  # hosts, and shards
FEATURES = FeatureSpec(
    dense=("age",),
    sparse=(SparseFeature("user", "user"), SparseFeature("item", "item")),
    tables={"user": 20, "item": 30},
    tasks=("click",),
)
MODELS = {
    "dhen": DHENConfig(
        embedding_dim=8, layers=2, modules=("attention", "linear", "cross"), embeddings=4, top_mlp=(16,)
    ),
    "wukong": WukongConfig(embedding_dim=8, layers=2),
}


def model_of(name: str) -> RankingModel:
    torch.manual_seed(3)
    return build(MODELS[name], FEATURES, TablesConfig())


def batch_of(first: int = 0, end: int = BATCH) -> RankingBatch:
    draw = torch.Generator().manual_seed(5)
    dense = torch.randn(BATCH, 1, generator=draw)
    ids = torch.stack([torch.randint(0, rows, (BATCH,), generator=draw) for rows in (20, 30)])
    count = end - first
    sparse = JaggedBatch(("user", "item"), ids[:, first:end].reshape(-1), torch.arange(2 * count + 1), one_hot=True)
    labels = (torch.rand(BATCH, 1, generator=draw) < 0.5).float()
    return RankingBatch(dense=dense[first:end], sparse=sparse, labels=labels[first:end])


def take_step(model: RankingModel, batch: RankingBatch) -> dict[str, torch.Tensor]:
    """Take a step by the summed loss; return gradients and weights, whole."""
    optimizer = build_adamw(model, learning_rate=1e-3, betas=(0.9, 0.999), eps=1e-4, weight_decay=0.1)
    assert batch.labels is not None
    torch.nn.functional.binary_cross_entropy_with_logits(model(batch), batch.labels, reduction="sum").backward()
    found = {}
    for name, one in dense_parameters(model).items():
        if one.grad is not None and not isinstance(one, DTensor) and dist.is_initialized():
            dist.all_reduce(one.grad)  # as training does with all gradients that are whole
        found[f"gradient {name}"] = whole(one.grad) if one.grad is not None else torch.zeros(())
    optimizer.step()
    return found | {name: whole(one.detach()) for name, one in dense_parameters(model).items()}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def sharded(rank: int, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for way, (hosts, _) in WAYS.items():
        for name in MODELS:
            model, ledger = model_of(name), Ledger()
            mesh = shard_dense(model, way, SIZE, hosts, 60.0, ledger)  # type: ignore[arg-type]
            assert mesh is not None
            assert mesh.size() == SIZE
            own = batch_of(BATCH * rank // SIZE, BATCH * (rank + 1) // SIZE)
            tensors = take_step(model, own)
            held = sum(one.to_local().numel() for one in model.parameters() if isinstance(one, DTensor))
            units = sum(isinstance(module, FSDPModule) for module in model.modules())
            traffic = {kind: one.bytes for kind, one in ledger.traffic.items()}
            found[f"{way} {name}"] = {"tensors": tensors, "held": held, "units": units, "traffic": traffic}
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    found = found_by(SIZE, tmp_path_factory.mktemp("ranks"), sharded, 120.0)
    return [found[rank] for rank in range(SIZE)]


@needs_gloo
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_gradients_and_weights_are_those_of_one_process(ranks: list[dict[str, Any]], way: str, name: str) -> None:
    expected = take_step(model_of(name), batch_of())
    for found in ranks:
        tensors = found[f"{way} {name}"]["tensors"]
        assert tensors.keys() == expected.keys()
        for key, tensor in expected.items():
            torch.testing.assert_close(tensors[key], tensor, rtol=1e-5, atol=1e-5, msg=f"{key} differs")
            assert torch.equal(tensors[key], ranks[0][f"{way} {name}"]["tensors"][key])


@needs_gloo
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_memory_and_traffic_are_those_of_the_formula(ranks: list[dict[str, Any]], way: str, name: str) -> None:
    model, (hosts, shards) = model_of(name), WAYS[way]
    parts = [[weight for weight in unit.parameters() if weight.dim() > 1] for unit in dense_units(model)]
    inside = {weight for of_unit in parts for weight in of_unit}
    root = Unit.of(one.shape for one in dense_parameters(model).values() if one.dim() > 1 and one not in inside)
    units = [Unit.of(one.shape for one in of_unit) for of_unit in parts]
    sent = sent_bytes(units, shards, hosts, root)
    for found in ranks:
        one = found[f"{way} {name}"]
        assert one["held"] <= sum(unit.shard(shards) for unit in (root, *units))
        assert one["traffic"].get(GATHERED, 0) == sent.all_gathers
        assert one["traffic"].get(SCATTERED, 0) == sent.reduce_scatters
        assert one["traffic"].get(REDUCED, 0) == sent.all_reduces
        assert one["units"] == len(units) + 1
    held = sum(found[f"{way} {name}"]["held"] for found in ranks)
    assert held == hosts * sum(unit.elements for unit in (root, *units))
    assert len(units) > 3  # stacked layers are units of their own


def test_what_cannot_be_sharded_is_refused() -> None:
    with pytest.raises(PlanError, match="3 hosts do not divide 4 processes"):
        shard_dense(model_of("dhen"), "hybrid", 4, 3, 60.0)
    assert shard_dense(model_of("dhen"), "replicated", 4, 2, 60.0) is None
