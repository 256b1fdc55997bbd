"""More tensor ranks than key-value heads, against plain training in one process, and their checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from cordillera.distributed.collectives import Collectives
from cordillera.distributed.dtensors import local
from cordillera.distributed.ledger import Ledger
from cordillera.distributed.mesh import ParallelConfig, ProcessMesh
from cordillera.distributed.tensor_parallel import JOINED, PARTED, TensorRanks
from cordillera.errors import PlanError
from cordillera.models.language.checkpoints import load
from cordillera.models.language.llama import LlamaConfig
from cordillera.models.language.parallelize import check_fit
from cordillera.training.checkpoints import folder_of
from cordillera.training.language.checkpoints import ShardedCheckpoints
from cordillera.training.language.engine import LanguageEngine
from tests.distributed.processes import found_by, needs_gloo
from tests.distributed.test_language_meshes import (
    TRAINING,
    counts,
    deviation,
    iteration,
    mesh,
    plainly_trained,
    trained,
    wholes,
)

STEPS = 3
BASE: dict[str, Any] = {"layers": 2, "hidden": 32, "ffn": 48, "vocabulary": 96, "context": 64}
ONE = LlamaConfig(heads=8, kv_heads=1, head_dim=8, **BASE)
TWO = LlamaConfig(heads=4, kv_heads=2, **BASE)
THREE = LlamaConfig(heads=6, kv_heads=3, head_dim=4, tied=True, **BASE)
BOTH = TWO.model_copy(update={"attention_bias": True, "head_norms": True, "rotary_dim": TWO.head_width // 2})
ODD = LlamaConfig(heads=2, kv_heads=1, head_dim=6, **BASE)  # three rows on a rank, which two shards do not divide
DEEP = TWO.model_copy(update={"kv_heads": 1, "layers": 4})
MESHES: dict[str, tuple[LlamaConfig, ParallelConfig]] = {
    "one head, tensor 4": (ONE, mesh(tensor=4)),
    "two heads, tensor 4, sequence": (TWO, mesh(tensor=4, sequence=True, recompute="full")),
    "odd, tensor 2 x shard 2": (ODD, mesh(tensor=2, shard=2)),
    "one head, tensor 2 x context 2": (DEEP, mesh(tensor=2, context=2)),
    "one head, tensor 2 x pipeline 2, split backward": (DEEP, mesh(tensor=2, pipeline=2, schedule="zero_bubble")),
    "one head, replicate 2 x tensor 2, tensor outermost": (
        TWO.model_copy(update={"kv_heads": 1}),
        mesh(tensor=2, replicate=2, order=("data", "context", "pipeline", "tensor")),
    ),
    "biases and norms, two heads, tensor 4": (BOTH, mesh(tensor=4)),
    "biases and norms, two heads, tensor 4, sequence": (BOTH, mesh(tensor=4, sequence=True)),
    "three heads, tensor 6": (THREE, mesh(tensor=6)),
}
OF_CHECKPOINTS = {1: mesh(), 2: mesh(tensor=2), 4: mesh(tensor=4), 8: mesh(tensor=8)}
TOKENS = range(4)


def work(rank: int, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {
        name: trained(config, model, TRAINING, counts(STEPS))
        for name, (model, config) in MESHES.items()
        if config.world == dist.get_world_size()
    }
    if dist.get_world_size() == 4:
        found |= {f"joined {tokens}": joined(rank, tokens) for tokens in TOKENS}
        found["rows"] = held_rows()
        half = TRAINING.model_copy(update={"precision": "bf16"})
        found["half"] = trained(mesh(tensor=4), TWO, half, counts(STEPS))
    return found


def columns(rank: int, tokens: int, seed: int, width: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(100 * seed + 10 * rank + tokens)
    return torch.randn(tokens, width, generator=generator, dtype=torch.float64)


def joined(rank: int, tokens: int) -> dict[str, Any]:
    """What ranks of two pairs have of their pair, the gradient of a rank's own part, and what was sent."""
    place = ProcessMesh(mesh(tensor=4))
    ledger = Ledger()
    pair = Collectives(place.tensor_neighbours(2), ledger, 30.0)
    ranks = TensorRanks(init_device_mesh("cpu", (4,)), pair, neighbours=pair)
    own = columns(rank, tokens, 1).requires_grad_()
    whole = ranks.join(own)
    (gradient,) = torch.autograd.grad(whole, own, columns(rank, tokens, 2, 6))
    return {"whole": whole.detach(), "gradient": gradient, "bytes": ledger.total().bytes}


def held_rows() -> dict[str, int]:
    engine = LanguageEngine(TRAINING, ONE, ProcessMesh(mesh(tensor=4)))
    attention = engine.stages[0].blocks[0].attention
    return {name: local(getattr(attention, name).weight).numel() for name in ("query", "key", "value")}


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[int, dict[str, Any]]]:
    """What each process found, by their number and its rank."""
    found = {}
    for size in (4, 6):
        found[size] = found_by(size, tmp_path_factory.mktemp(f"heads-{size}"), work, 120)
    return found


def check(ranks: list[dict[str, Any]], model: LlamaConfig, steps: int) -> None:
    """Compare losses, gradients and their norms with those of one process, up to the rounding of sums in float32."""
    expected = plainly_trained(model, TRAINING, steps=steps)
    total, targets = expected["evaluated"]
    for found in ranks:
        assert found["losses"] == pytest.approx(expected["losses"], abs=1e-5, rel=0)
        assert found["norms"][0] == pytest.approx(expected["norms"][0], rel=1e-6)
        assert found["norms"] == pytest.approx(expected["norms"], rel=1e-4)
        assert found["evaluated"][0] / targets == pytest.approx(total / targets, abs=1e-6, rel=0)
        for key, tensor in found["gradients"].items():
            assert deviation(tensor, expected["gradients"][key.split()[1]]) < 1e-5, key
        assert {JOINED, PARTED} <= found["traffic"].keys()
    assert {key.split()[1] for found in ranks for key in found["gradients"]} == set(expected["gradients"])


@needs_gloo
@pytest.mark.slow
@pytest.mark.parametrize("name", MESHES)
def test_ranks_that_share_heads_train_as_one_process_does(
    executed: dict[int, dict[int, dict[str, Any]]], name: str
) -> None:
    model, config = MESHES[name]
    check([rank[name] for rank in executed[config.world].values()], model, STEPS)


@needs_gloo
@pytest.mark.slow
def test_half_precision_trains_nearly_as_single(executed: dict[int, dict[int, dict[str, Any]]]) -> None:
    expected = plainly_trained(TWO, TRAINING)["losses"][:STEPS]
    for found in (rank["half"] for rank in executed[4].values()):
        assert found["losses"] == pytest.approx(expected, abs=0.03)
        assert found["losses"] != pytest.approx(expected, abs=1e-6)
        assert {tensor.dtype for tensor in found["gradients"].values()} == {torch.float32}


@needs_gloo
@pytest.mark.slow
@pytest.mark.parametrize("tokens", TOKENS)
def test_columns_are_joined_and_their_gradients_summed(
    executed: dict[int, dict[int, dict[str, Any]]], tokens: int
) -> None:
    for rank, found in ((rank, one[f"joined {tokens}"]) for rank, one in executed[4].items()):
        pair = (rank // 2 * 2, rank // 2 * 2 + 1)
        assert torch.equal(found["whole"], torch.cat([columns(one, tokens, 1) for one in pair], 1))
        total = sum(columns(one, tokens, 2, 6) for one in pair)
        assert isinstance(total, Tensor)
        torch.testing.assert_close(found["gradient"], total.chunk(2, 1)[rank % 2])
        assert found["bytes"] == 2 * tokens * 3 * 8  # a part forwards and one backwards


@needs_gloo
@pytest.mark.slow
def test_no_weight_is_held_twice(executed: dict[int, dict[int, dict[str, Any]]]) -> None:
    for found in executed[4].values():
        for name, rows in found["rows"].items():
            assert 4 * rows == 32 * 8 * (8 if name == "query" else 1), name


def resume(rank: int, folder: str) -> dict[str, Any]:
    """Train from the checkpoint of step 2 in the folder beside, or from the start, and save there."""
    size = dist.get_world_size()
    place = ProcessMesh(OF_CHECKPOINTS[size])
    engine = LanguageEngine(TRAINING, ONE, place, seed=size)
    kept = ShardedCheckpoints(Path(folder).parent / "kept", place)
    found: dict[str, Any] = {}
    if kept.restore(engine) is None:
        for step in range(2):
            engine.step(iteration(step))
        kept.save(engine, {"step": 2})
        kept.wait()
    found["state"] = {
        f"{key} {name}": tensor.full_tensor().detach().clone()  # type: ignore[attr-defined]
        for name, parameter in engine.stages[0].named_parameters()
        for key, tensor in {"weight": parameter, **engine.optimizer.state[parameter]}.items()
        if key != "step"
    }
    found["losses"] = [engine.step(iteration(step)).loss for step in range(2, 5)]
    if size == 8:  # for who reads whole models
        kept.save(engine, {"step": 5})
        kept.wait()
        found["end"] = wholes(engine, lambda weight: weight.detach())
    return found


@needs_gloo
@pytest.mark.slow
def test_checkpoints_are_read_by_any_number_of_tensor_ranks(tmp_path: Path) -> None:
    found = {}
    for size in (4, 1, 2, 8):
        folder = tmp_path / str(size)
        folder.mkdir()
        by_rank = found_by(size, folder, resume, 120)
        found[size] = by_rank[0]
        assert all(rank["losses"] == found[size]["losses"] for rank in by_rank.values())
    for size in (1, 2, 8):
        assert found[size]["state"].keys() == found[4]["state"].keys()
        for name, tensor in found[4]["state"].items():
            assert torch.equal(found[size]["state"][name], tensor), name
        assert found[size]["losses"] == pytest.approx(found[4]["losses"], abs=1e-5, rel=0)
    config, model = load(folder_of(tmp_path / "kept", 5))
    assert config == ONE
    for name, weight in model.named_parameters():
        assert torch.equal(weight, found[8]["end"][f"0 {name}"]), name


@given(kv_heads=st.integers(1, 8), queries=st.integers(1, 4), tensor=st.integers(2, 16), half=st.integers(1, 6))
def test_what_fits_is_whole_heads_or_equal_parts_of_one(kv_heads: int, queries: int, tensor: int, half: int) -> None:
    heads, width = kv_heads * queries * tensor, 2 * half
    model = LlamaConfig(**BASE | {"ffn": tensor, "vocabulary": tensor}, heads=heads, kv_heads=kv_heads, head_dim=width)
    whole = kv_heads % tensor == 0
    shared = tensor % kv_heads == 0 and width % (tensor // kv_heads) == 0
    if whole or shared:
        check_fit(model, ParallelConfig(tensor=tensor))
        return
    with pytest.raises(PlanError) as error:
        check_fit(model, ParallelConfig(tensor=tensor))
    if tensor % kv_heads:
        assert f"kv_heads ({kv_heads}) and tensor ({tensor}): neither divides the other" in str(error.value)
    else:
        assert f"the width of a head ({width}) is not divisible by the {tensor // kv_heads} ranks" in str(error.value)
