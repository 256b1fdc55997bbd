"""Checkpoints of many processes: written on any mesh, read on any other; what is wrong is one error on all ranks.

Four processes are started once; the first one, two, three or four of them become one mesh after the other.
"""

from __future__ import annotations

import errno
import functools
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.tensor import DTensor

from cordillera.distributed.dtensors import local
from cordillera.distributed.mesh import ParallelConfig, ProcessMesh
from cordillera.errors import CordilleraError
from cordillera.models.language.checkpoints import load
from cordillera.models.language.llama import LlamaConfig
from cordillera.training import sharded_checkpoints
from cordillera.training.language.checkpoints import ShardedCheckpoints
from cordillera.training.language.engine import LanguageConfig, LanguageEngine, PackedTokens
from tests.distributed.processes import found_by, needs_gloo

# Numbers of rows that ranks do not divide, and fewer rows than ranks.
MODEL = LlamaConfig(layers=4, hidden=26, heads=4, kv_heads=2, head_dim=6, ffn=6, vocabulary=62, context=64, tied=True)
PARAMETERS, WEIGHTS = 11_206, 38
TRAINING = LanguageConfig(learning_rate=3e-3)
MESHES: dict[int, dict[str, dict[str, Any]]] = {
    1: {"one process": {}},
    2: {
        "shard 2": {"shard": 2},
        "tensor 2": {"tensor": 2},
        "pipeline 2": {"pipeline": 2},
        "pipeline 2, folded": {"pipeline": 2, "schedule": "zero_bubble_v"},
    },
    3: {"shard 3": {"shard": 3}},
    4: {
        "context 2 x shard 2": {"context": 2, "shard": 2},
        "replicate 2 x shard 2": {"replicate": 2, "shard": 2},
        "tensor 2 x shard 2": {"tensor": 2, "shard": 2},
        "tensor 2 x replicate 2": {"tensor": 2, "replicate": 2},
        "pipeline 2 x tensor 2": {"pipeline": 2, "tensor": 2},
        "pipeline 2 x shard 2, interleaved": {"pipeline": 2, "shard": 2, "schedule": "interleaved", "chunks": 2},
    },
}
SIZES = {name: size for size, meshes in MESHES.items() for name in meshes}
NAMES = list(SIZES)
PAIRS = [
    (writer, reader)
    for i, writer in enumerate(NAMES)
    for j, reader in enumerate(NAMES)
    if writer != reader and (i + 2 * j) % 4 == 0  # every mesh writes for several, and reads of several
]
ORDER = (1, 2, 3, 4, 3, 2, 1)  # smaller ones come back for what larger ones have written
STATE = {"step": 2, "rate": 0.1, "queue": [[1, 2], []], "none": None}


def mesh(name: str) -> ProcessMesh:
    return ProcessMesh(ParallelConfig(**MESHES[SIZES[name]][name], deadline_s=60))


def iteration(seed: int) -> list[PackedTokens]:
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.tensor([0, 5, 6, 13])
    return [PackedTokens(torch.randint(0, 62, (13,), generator=generator), offsets) for _ in range(2)]


def trained(engine: LanguageEngine, first: int, steps: int) -> list[tuple[Any, ...]]:
    return [tuple(engine.step(iteration(seed))) for seed in range(first, first + steps)]


def held(engine: LanguageEngine) -> dict[str, Tensor]:
    """Weights, moments and counts of steps, as this process has them."""
    return {
        f"{number} {key} {name}": tensor.detach()
        for number, stage in engine.stages.items()
        for name, parameter in stage.named_parameters()
        for key, tensor in {"weight": parameter, **engine.optimizer.state[parameter]}.items()
    }


def wholes(engine: LanguageEngine) -> dict[str, Tensor]:
    """The same, gathered without any checkpoint, and whichever stage holds them."""
    found = {}
    for key, tensor in held(engine).items():
        found[key.split(" ", 1)[1]] = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return found


def parts(engine: LanguageEngine) -> dict[str, Tensor]:
    return {key: local(tensor).clone() for key, tensor in held(engine).items()}


def differing(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    assert found.keys() == expected.keys()
    return [name for name, tensor in found.items() if not torch.equal(tensor, expected[name])]


def differing_from_wholes(engine: LanguageEngine, expected: dict[str, Tensor]) -> list[str]:
    """What is not as expected, by the way in which a stage takes whole weights."""
    found, wrong = parts(engine), []
    for kind in ("weight", "exp_avg", "exp_avg_sq"):
        for number, stage in engine.stages.items():
            stage.fill(lambda name, _, kind=kind: expected[f"{kind} {name}"])
            for name, parameter in stage.named_parameters():
                if not torch.equal(found[f"{number} {kind} {name}"], local(parameter)):
                    wrong.append(f"{kind} {name}")
                if found[f"{number} step {name}"] != expected[f"step {name}"]:
                    wrong.append(f"step {name}")
    return wrong


def write(name: str, folder: Path) -> dict[str, Any]:
    """Save while training goes on, then resume."""
    place = mesh(name)
    engine = LanguageEngine(TRAINING, MODEL, place)
    trained(engine, 0, 2)
    engine.skipped = 1
    checkpoints = ShardedCheckpoints(folder / name, place)
    expected = parts(engine)
    (folder / name).mkdir(exist_ok=True)
    torch.save(wholes(engine), folder / name / f"wholes-{dist.get_rank()}.pt")
    checkpoints.save(engine, STATE)
    after = trained(engine, 2, 3)
    checkpoints.wait()
    again = LanguageEngine(TRAINING, MODEL, place, seed=1)
    restored = ShardedCheckpoints(folder / name, place).restore(again)
    return {
        "state": restored,
        "counters": (again.steps, again.skipped),
        "restored": differing(parts(again), expected),
        "reports": (trained(again, 2, 3), after),
        "ended": differing(parts(again), parts(engine)),
        "bytes": checkpoints.bytes,
        "last": checkpoints.last,
    }


def read(reader: str, writers: list[str], folder: Path) -> dict[str, list[str]]:
    """What differs when this mesh loads what others wrote."""
    place = mesh(reader)
    engine = LanguageEngine(TRAINING, MODEL, place, seed=1)
    found = {}
    for writer in writers:
        expected: dict[str, Tensor] = {}
        for rank in range(SIZES[writer]):
            expected |= torch.load(folder / writer / f"wholes-{rank}.pt", weights_only=True)
        ShardedCheckpoints(folder / writer, place).restore(engine)
        found[f"{writer} -> {reader}"] = differing_from_wholes(engine, expected)
    return found


def run_all(rank: int, folder: str) -> dict[str, Any]:
    dist.destroy_process_group()
    root = Path(folder)
    found: dict[str, Any] = {"written": {}, "read": {}}
    for turn, size in enumerate(ORDER):
        if rank >= size:
            continue
        dist.init_process_group("gloo", init_method=f"file://{folder}/{turn}", rank=rank, world_size=size)
        is_first = turn < len(MESHES)
        for name in MESHES[size]:
            if is_first:
                found["written"][name] = write(name, root)
        for name in MESHES[size]:
            writers = [one for one, reader in PAIRS if reader == name and (SIZES[one] <= size) == is_first]
            found["read"] |= read(name, writers, root)
        if size == 4:
            found["torch"] = {
                name: read_by_torch(name, root) for name in ("tensor 2 x shard 2", "pipeline 2 x tensor 2")
            }
        if size == 2 and is_first:
            found["trouble"] = run_trouble(rank, root)
        dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{folder}/last", rank=rank, world_size=4)
    return found


def read_by_torch(name: str, folder: Path) -> list[str]:
    """What differs when torch's own reader fills the cut tensors of another mesh's checkpoint."""
    engine = LanguageEngine(TRAINING, MODEL, mesh(name), seed=1)
    ShardedCheckpoints(folder / "replicate 2 x shard 2", engine.mesh).restore(engine)
    expected, wrong = parts(engine), []
    for number, stage in engine.stages.items():
        weights = {key: torch.zeros_like(tensor) for key, tensor in stage.named_parameters()}
        reader = HuggingFaceStorageReader(str(folder / "replicate 2 x shard 2" / "step-000000002"))
        dcp.load(weights, storage_reader=reader, no_dist=True)
        wrong += [
            key for key, tensor in weights.items() if not torch.equal(local(tensor), expected[f"{number} weight {key}"])
        ]
    return wrong


def refused(make: Callable[[], object]) -> str:
    with pytest.raises(CordilleraError) as error:
        make()
    return f"{type(error.value).__name__}: {error.value}"


def run_trouble(rank: int, root: Path) -> dict[str, Any]:
    """What goes wrong on one of two ranks."""
    place = mesh("shard 2")
    engine = LanguageEngine(TRAINING, MODEL, place)
    good = ShardedCheckpoints(root / "trouble", place)
    good.save(engine, {"step": 1})
    good.wait()
    write_tensors, release = sharded_checkpoints.write_tensors, threading.Event()

    def full(*given: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def stuck(*given: Any) -> None:
        release.wait(20)
        write_tensors(*given)

    def failed(instead: Callable[..., None], deadline_s: float | None = None) -> str:
        checkpoints = ShardedCheckpoints(root / "trouble", place, deadline_s=deadline_s)
        with mock.patch.object(sharded_checkpoints, "write_tensors", instead if rank == 1 else write_tensors):
            checkpoints.save(engine, {"step": 2})
            return refused(checkpoints.wait)

    found: dict[str, Any] = {"full": failed(full), "stuck": failed(stuck, 1.0)}
    dist.barrier()
    release.set()
    found["state"] = refused(lambda: good.save(engine, {"step": 3, "place": rank}))
    found["absent"] = refused(lambda: good.restore(engine, 7))
    for damage, change in DAMAGES.items():
        if rank == 0:
            shutil.copytree(root / "trouble", root / damage)
            change(root / damage / "step-000000001")
        dist.barrier()
        found[damage] = refused(lambda damage=damage: ShardedCheckpoints(root / damage, place).restore(engine))
    found["left"] = sorted(path.name for path in (root / "trouble").iterdir())
    found["good"] = good.restore(engine)
    good.asynchronous = False
    good.save(engine, {"step": 4})  # one that failed stands in nobody's way
    found["steps"] = good.steps()
    return found


def flip(name: str, folder: Path) -> None:
    content = bytearray((folder / name).read_bytes())
    content[-5] ^= 1
    (folder / name).write_bytes(content)


def truncate(name: str, folder: Path) -> None:
    (folder / name).write_bytes((folder / name).read_bytes()[:-5])


DAMAGES: dict[str, Callable[[Path], object]] = {
    "corrupt by rank 1": functools.partial(flip, "weights-00001.safetensors"),
    "corrupt by rank 0": functools.partial(flip, "weights-00000.safetensors"),
    "corrupt checksums": functools.partial(flip, "checksums.json"),
    "truncated": functools.partial(truncate, "weights-00000.safetensors"),
    "missing": lambda folder: (folder / "weights-00001.safetensors").unlink(),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("meshes")


@pytest.fixture(scope="module")
def executed(folder: Path) -> dict[int, dict[str, Any]]:
    """What each process found, by its rank."""
    return found_by(4, folder, run_all, 200)


@needs_gloo
@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_training_resumes_bit_for_bit_from_what_was_saved_while_it_went_on(
    executed: dict[int, dict[str, Any]], name: str
) -> None:
    for rank in range(SIZES[name]):
        found = executed[rank]["written"][name]
        assert (found["state"], found["counters"], found["last"]) == (STATE, (2, 1), 2)
        assert (found["restored"], found["ended"]) == ([], [])
        again, uninterrupted = found["reports"]
        assert again == uninterrupted


@needs_gloo
@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_number_is_written_once(executed: dict[int, dict[str, Any]], folder: Path, name: str) -> None:
    assert executed[0]["written"][name]["bytes"] == 4 * (3 * PARAMETERS + WEIGHTS)
    files = list((folder / name / "step-000000002").glob("*.safetensors"))
    assert 12 * PARAMETERS < sum(file.stat().st_size for file in files) < 12 * PARAMETERS + 30_000 * SIZES[name]
    holding = {file.name for file in files if file.name.startswith("weights-")}
    assert len(holding) == SIZES[name]  # copies share the work


@needs_gloo
@pytest.mark.slow
@pytest.mark.parametrize(("writer", "reader"), PAIRS)
def test_any_mesh_reads_what_another_wrote_bit_for_bit(
    executed: dict[int, dict[str, Any]], writer: str, reader: str
) -> None:
    for rank in range(SIZES[reader]):
        assert executed[rank]["read"][f"{writer} -> {reader}"] == []


@needs_gloo
@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_no_processes_are_needed_to_read_the_weights(
    executed: dict[int, dict[str, Any]], folder: Path, name: str
) -> None:
    config, model = load(folder / name / "step-000000002")
    assert config == MODEL
    expected: dict[str, Tensor] = {}
    for rank in range(SIZES[name]):
        expected |= torch.load(folder / name / f"wholes-{rank}.pt", weights_only=True)
    for key, parameter in model.named_parameters():
        assert torch.equal(parameter, expected[f"weight {key}"])


@needs_gloo
@pytest.mark.slow
def test_torch_reads_the_files_into_cut_tensors(executed: dict[int, dict[str, Any]]) -> None:
    for found in executed.values():
        assert found["torch"] == {"tensor 2 x shard 2": [], "pipeline 2 x tensor 2": []}


@needs_gloo
@pytest.mark.slow
@pytest.mark.parametrize(
    ("trouble", "said"),
    [
        ("full", "RunError: .*step-000000002: the disk is full"),
        ("stuck", "CheckpointError: .*step-000000002: rank 1 did not come to the end of writing within 1 s"),
        ("state", "CheckpointError: step 3: rank 1 was given another state than rank 0"),
        ("absent", r"CheckpointError: .*step-000000007: there is no such checkpoint\n  -> steps there are: 1"),
        ("corrupt by rank 1", "CheckpointError: .*/weights-00001.safetensors: is corrupt"),
        ("corrupt by rank 0", "CheckpointError: .*/weights-00000.safetensors: is corrupt"),
        ("corrupt checksums", "CheckpointError: .*/checksums.json: does not fit its checksum"),
        ("truncated", "CheckpointError: .*/weights-00000.safetensors: has .* bytes"),
        ("missing", "CheckpointError: .*/weights-00001.safetensors: is missing"),
    ],
)
def test_what_goes_wrong_on_one_rank_is_one_error_on_all(
    executed: dict[int, dict[str, Any]], trouble: str, said: str
) -> None:
    first, second = (executed[rank]["trouble"][trouble] for rank in range(2))
    assert first == second
    with pytest.raises(AssertionError, match=said):
        raise AssertionError(first)


@needs_gloo
@pytest.mark.slow
def test_a_write_that_failed_leaves_earlier_checkpoints_and_nothing_else(executed: dict[int, dict[str, Any]]) -> None:
    for rank in range(2):
        found = executed[rank]["trouble"]
        assert (found["left"], found["good"], found["steps"]) == (["step-000000001"], {"step": 1}, [1, 4])
