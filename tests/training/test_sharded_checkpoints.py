"""Checkpoints of a training in many processes: on any mesh the same, complete or absent, verified byte by byte.

Four processes are started once; groups of one to four of them become one mesh after the other.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.tensor import DTensor

from cordillera.distributed.mesh import ParallelConfig, ProcessMesh
from cordillera.errors import CheckpointError, CordilleraError
from cordillera.models.language.checkpoints import load
from cordillera.models.language.llama import LlamaConfig
from cordillera.training import sharded_checkpoints
from cordillera.training.language import LanguageConfig, LanguageEngine, PackedTokens
from cordillera.training.sharded_checkpoints import ShardedCheckpoints
from tests.distributed.processes import needs_gloo, run_processes

# Rows that no number of ranks divides, and fewer of them than ranks.
MODEL = LlamaConfig(
    layers=4, hidden=26, heads=4, kv_heads=2, head_dim=6, ffn=6, vocabulary=62, context=64, tied=True
)
TRAINING = LanguageConfig(learning_rate=3e-3)
MESHES: dict[int, dict[str, dict[str, Any]]] = {
    1: {"one process": {}},
    2: {
        "shard 2": {"shard": 2},
        "replicate 2": {"replicate": 2},
        "context 2": {"context": 2},
        "tensor 2": {"tensor": 2},
        "pipeline 2": {"pipeline": 2},
        "pipeline 2, folded": {"pipeline": 2, "schedule": "zero_bubble_v"},
    },
    3: {"shard 3": {"shard": 3}, "pipeline 3": {"pipeline": 3}},
    4: {
        "shard 4": {"shard": 4},
        "replicate 2 x shard 2": {"replicate": 2, "shard": 2},
        "tensor 2 x shard 2": {"tensor": 2, "shard": 2},
        "tensor 2 x replicate 2": {"tensor": 2, "replicate": 2},
        "tensor 2 x context 2": {"tensor": 2, "context": 2},
        "pipeline 2 x tensor 2": {"pipeline": 2, "tensor": 2},
        "pipeline 2 x shard 2, interleaved": {"pipeline": 2, "shard": 2, "schedule": "interleaved", "chunks": 2},
        "pipeline 4": {"pipeline": 4},
    },
}
NAMES = [name for meshes in MESHES.values() for name in meshes]
STATE = {"step": 2, "rate": 0.1, "queue": [[1, 2], []], "none": None}


def mesh(**sizes: Any) -> ProcessMesh:
    return ProcessMesh(ParallelConfig(**{"deadline_s": 30.0, **sizes}))


def iteration(seed: int) -> list[PackedTokens]:
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.tensor([0, 5, 6, 13])
    return [PackedTokens(torch.randint(0, 62, (13,), generator=generator), offsets) for _ in range(2)]


def engine_of(place: ProcessMesh, seed: int = 0, model: LlamaConfig = MODEL) -> LanguageEngine:
    return LanguageEngine(TRAINING, model, place, seed)


def trained(engine: LanguageEngine, first: int, steps: int) -> list[Any]:
    return [tuple(engine.step(iteration(seed))) for seed in range(first, first + steps)]


def wholes(engine: LanguageEngine) -> dict[str, Tensor]:
    """Weights and moments of this process's stages, gathered without any checkpoint."""
    found = {}
    for stage in engine.stages.values():
        for name, parameter in stage.named_parameters():
            state = engine.optimizer.state[parameter]
            for key, tensor in {"": parameter, **state}.items():
                whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
                found[f"{name} {key}"] = whole.detach().clone()
    return found


def differing(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    return [name for name, tensor in found.items() if not torch.equal(tensor, expected[name])]


def of_ranks(folder: Path, size: int) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for rank in range(size):
        found |= torch.load(folder / f"wholes-{rank}.pt", weights_only=True)
    return found


def refused(make: Callable[[], object]) -> str:
    with pytest.raises(CordilleraError) as error:
        make()
    return str(error.value)


def write(name: str, folder: Path) -> dict[str, Any]:
    """Save while training goes on, then resume."""
    size = dist.get_world_size()
    place = mesh(**MESHES[size][name])
    engine = engine_of(place)
    trained(engine, 0, 2)
    own = folder / name
    checkpoints = ShardedCheckpoints(own, place)
    expected = wholes(engine)
    checkpoints.save(engine, STATE)
    after = trained(engine, 2, 3)
    checkpoints.wait()
    ended = wholes(engine)
    torch.save(expected, own / f"wholes-{dist.get_rank()}.pt")
    again = engine_of(place, seed=1)
    state = checkpoints.restore(again)
    return {
        "state": state == STATE,
        "resumed": differing(wholes(again), expected),
        "reports": trained(again, 2, 3) == after,
        "ended": differing(wholes(again), ended),
        "steps": again.steps,
        "bytes": checkpoints.bytes,
    }


def read(names: list[str], folder: Path, sizes: dict[str, int]) -> dict[str, list[str]]:
    """Load on every mesh of this size what others wrote; what differs."""
    found = {}
    for name, sizes_of in MESHES[dist.get_world_size()].items():
        place = mesh(**sizes_of)
        engine = engine_of(place, seed=1)
        for other in names:
            ShardedCheckpoints(folder / other, place).restore(engine)
            found[f"{other} -> {name}"] = differing(wholes(engine), of_ranks(folder / other, sizes[other]))
    return found


def run_all(rank: int, folder: str) -> dict[str, Any]:
    dist.destroy_process_group()
    found: dict[str, Any] = {"written": {}, "read": {}, "seconds": {}}
    sizes = {name: size for size, meshes in MESHES.items() for name in meshes}
    for turn, size in enumerate((1, 2, 3, 4, 3, 2, 1)):
        if rank < size:
            dist.init_process_group("gloo", init_method=f"file://{folder}/{turn}", rank=rank, world_size=size)
            began = time.perf_counter()
            if turn < 4:
                found["written"] |= {name: write(name, Path(folder)) for name in MESHES[size]}
                found["seconds"][f"write {size}"] = time.perf_counter() - began
            # larger ones come back to read what was written after them
            others = [name for name in NAMES if (sizes[name] <= size) == (turn < 4)]
            found["read"] |= read(others, Path(folder), sizes)
            found["seconds"][f"{turn} {size}"] = time.perf_counter() - began
            dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{folder}/last", rank=rank, world_size=4)
    return found


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("sharded")
    ended = run_processes(4, folder, run_all, 200)
    assert ended.codes == [0] * 4, ended.said
    print(ended.found[0]["seconds"])
    return folder, ended.found


@needs_gloo
def test_x(executed: Any) -> None:
    for rank in executed[1].values():
        print(rank["written"])
        print({k:v for k,v in rank["read"].items() if v}, len(rank["read"]))
