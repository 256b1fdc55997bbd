"""Checkpoints that are written while training goes on: complete or absent, whatever happens meanwhile."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from cordillera.distributed.mesh import ParallelConfig, ProcessMesh
from cordillera.distributed.tensor_parts import describe_parts
from cordillera.errors import CheckpointError, RunError
from cordillera.models.language.checkpoints import load
from cordillera.models.language.llama import LlamaConfig
from cordillera.training import sharded_checkpoints
from cordillera.training.language.checkpoints import ShardedCheckpoints
from cordillera.training.language.engine import LanguageConfig, LanguageEngine, PackedTokens
from tests.distributed.processes import needs_gloo
from tests.fuzzing import flips
from tests.models.language.sharded_folders import seal

pytestmark = [needs_gloo, pytest.mark.usefixtures("one_thread")]
MODEL = LlamaConfig(layers=2, hidden=16, heads=2, kv_heads=1, ffn=24, vocabulary=31, context=32)


def engine_of(seed: int = 0, **shapes: Any) -> LanguageEngine:
    mesh = ProcessMesh(ParallelConfig(deadline_s=10))
    return LanguageEngine(LanguageConfig(), MODEL.model_copy(update=shapes), mesh, seed)


def step(engine: LanguageEngine, seed: int = 0) -> None:
    tokens = torch.randint(0, 31, (9,), generator=torch.Generator().manual_seed(seed))
    engine.step([PackedTokens(tokens, torch.tensor([0, 9]))])


def weights(engine: LanguageEngine) -> list[Tensor]:
    return [parameter.to_local().detach().clone() for parameter in engine.stages[0].parameters()]  # type: ignore[operator]


def equal(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def saved(folder: Path, *steps: int) -> tuple[LanguageEngine, ShardedCheckpoints]:
    engine = engine_of()
    checkpoints = ShardedCheckpoints(folder, engine.mesh, asynchronous=False)
    for number in steps:
        step(engine, number)
        checkpoints.save(engine, {"step": number})
    return engine, checkpoints


class Held:
    """Writing that waits until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go, write = threading.Event(), sharded_checkpoints.write_tensors

        def held(*given: Any) -> None:
            assert self.go.wait(30)
            write(*given)

        monkeypatch.setattr(sharded_checkpoints, "write_tensors", held)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, checkpoints = saved(tmp_path, 1)
    checkpoints.asynchronous = True
    at_save, held = weights(engine), Held(monkeypatch)
    checkpoints.save(engine, {"step": 2})
    step(engine)
    assert checkpoints.steps() == [1]
    assert not equal(weights(engine), at_save)
    held.go.set()
    checkpoints.wait()
    assert checkpoints.steps() == [1, 2]
    again = engine_of(seed=1)
    assert ShardedCheckpoints(tmp_path, again.mesh).restore(again) == {"step": 2}
    assert equal(weights(again), at_save)


def test_a_save_waits_for_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of()
    checkpoints, held = ShardedCheckpoints(tmp_path, engine.mesh), Held(monkeypatch)
    checkpoints.save(engine, {"step": 1})
    threading.Timer(0.3, held.go.set).start()
    checkpoints.save(engine, {"step": 2})
    assert 1 in checkpoints.steps()
    checkpoints.wait()
    checkpoints.wait()
    assert checkpoints.steps() == [1, 2]


def test_weights_that_an_evaluation_left_gathered_are_saved_and_restored(tmp_path: Path) -> None:
    engine, checkpoints = saved(tmp_path)
    step(engine)

    def evaluate(of: LanguageEngine) -> float:
        tokens = torch.arange(9)
        with torch.no_grad():
            return float(of.stages[0](tokens, torch.tensor([0, 9]), None, tokens))

    loss = evaluate(engine)
    checkpoints.save(engine, {"step": 1})
    again = engine_of(seed=1)
    assert evaluate(again) != loss
    checkpoints.restore(again)
    assert evaluate(again) == loss


def test_a_step_that_was_saved_before_is_replaced(tmp_path: Path) -> None:
    engine, checkpoints = saved(tmp_path, 1)
    step(engine)
    checkpoints.save(engine, {"step": 1})
    again = engine_of(seed=1)
    checkpoints.restore(again)
    assert equal(weights(again), weights(engine))
    assert names(tmp_path) == ["step-000000001"]


def test_the_newest_is_restored_or_the_one_asked_for_or_none(tmp_path: Path) -> None:
    engine, checkpoints = saved(tmp_path)
    before = weights(engine)
    assert checkpoints.restore(engine) is None
    assert (checkpoints.last, checkpoints.steps()) == (None, [])
    assert equal(weights(engine), before)
    checkpoints.save(engine, {"step": 0})  # before any update: without moments
    step(engine)
    checkpoints.save(engine, {"step": 10})
    assert checkpoints.restore(engine, 0) == {"step": 0}
    assert checkpoints.last == 0
    assert equal(weights(engine), before)
    assert engine.steps == 0
    assert not any(engine.optimizer.state.values())
    assert checkpoints.restore(engine) == {"step": 10}
    with pytest.raises(CheckpointError, match=r"step-000000007: there is no such checkpoint\n.*: 0, 10"):
        checkpoints.restore(engine, 7)


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("shapes", "said"),
    [
        ({"layers": 3}, "layers is 2, that of the model is 3"),
        ({"vocabulary": 32}, "vocabulary is 31, that of the model is 32"),
        ({"tied": True}, "tied is False, that of the model is True"),
        ({"rope_theta": 10_000.0}, "rope_theta is 500000.0, that of the model is 10000.0"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path, shapes: dict[str, Any], said: str) -> None:
    saved(tmp_path, 1)
    other = engine_of(**shapes)
    before = weights(other)
    with pytest.raises(CheckpointError, match=said):
        ShardedCheckpoints(tmp_path, other.mesh).restore(other)
    assert equal(weights(other), before)


def test_a_context_of_another_length_is_not_another_model(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    longer = engine_of(context=64)
    assert ShardedCheckpoints(tmp_path, longer.mesh).restore(longer) == {"step": 1}


def moment(name: str, change: Callable[[Tensor], Tensor | None]) -> Callable[[Path], None]:
    """Change one of the optimizer's tensors, with the checksums; None takes it away."""

    def damage(folder: Path) -> None:
        path = folder / "optimizer-00000.safetensors"
        tensors = load_file(path)
        new = change(tensors.pop(name))
        if new is not None:
            tensors[name] = new
        save_file(tensors, path, describe_parts({key: [0] * tensor.dim() for key, tensor in tensors.items()}))
        seal(folder)

    return damage


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (moment("optimizer.norm.weight.exp_avg", lambda t: None), "tensor optimizer.norm.weight.exp_avg is not there"),
        (moment("optimizer.norm.weight.step", lambda t: None), "tensor optimizer.norm.weight.step is not there"),
        (
            moment("optimizer.norm.weight.exp_avg_sq", lambda t: t[:5].clone()),
            r"optimizer.norm.weight.exp_avg_sq has shape \(5,\), not \(16,\)",
        ),
        (moment("optimizer.norm.weight.exp_avg", lambda t: t * torch.nan), "optimizer.norm.weight.exp_avg holds NaN"),
    ],
)
def test_moments_that_are_wrong_are_refused(tmp_path: Path, damage: Callable[[Path], None], said: str) -> None:
    engine, checkpoints = saved(tmp_path, 1)
    damage(tmp_path / "step-000000001")
    with pytest.raises(CheckpointError, match=said):
        checkpoints.restore(engine)


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    "name", ["optimizer-00000.safetensors", "weights-00000.safetensors", "state.json", "model.json"]
)
@pytest.mark.parametrize("where", [0.0, 0.4, 0.999])
def test_one_flipped_bit_anywhere_is_refused_by_name(tmp_path: Path, name: str, where: float) -> None:
    engine, checkpoints = saved(tmp_path, 1)
    path = tmp_path / "step-000000001" / name
    content = bytearray(path.read_bytes())
    content[int(where * len(content))] ^= 4
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{name}: is corrupt"):
        checkpoints.restore(engine)


def test_any_flip_or_cut_of_any_file_is_refused_by_its_name(tmp_path: Path, fuzz_inputs: Callable[[int], int]) -> None:
    engine, checkpoints = saved(tmp_path, 1)
    folder, rng = tmp_path / "step-000000001", random.Random(1)
    for name in names(folder):
        path = folder / name
        content = path.read_bytes()
        for number in range(fuzz_inputs(25)):
            path.write_bytes(flips(content, rng) if number % 5 else content[: rng.randrange(len(content))])
            with pytest.raises(CheckpointError, match=name):
                checkpoints.restore(engine)
            if not name.startswith("optimizer"):  # whose bytes are not read to generate text
                with pytest.raises(CheckpointError, match=name):
                    load(folder)
        path.write_bytes(content)
    assert checkpoints.restore(engine) == {"step": 1}


@pytest.mark.parametrize("kind", ["weights", "moments"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_is_never_saved_and_the_last_checkpoint_stays(
    tmp_path: Path, kind: str, value: float
) -> None:
    engine, checkpoints = saved(tmp_path, 1)
    good = weights(engine)
    weight = engine.stages[0].norm.weight
    broken = weight if kind == "weights" else engine.optimizer.state[weight]["exp_avg_sq"]
    with torch.no_grad():
        broken.to_local()[3] = value
    checkpoints.asynchronous = True
    with pytest.raises(CheckpointError, match=rf"{kind} of step 2 are not finite.*step 1 is kept") as error:
        checkpoints.save(engine, {"step": 2})
    assert "norm.weight" in str(error.value)
    assert names(tmp_path) == ["step-000000001"]
    assert checkpoints.restore(engine) == {"step": 1}
    assert equal(weights(engine), good)


def test_the_same_training_writes_the_same_bytes(tmp_path: Path) -> None:
    """The library that writes tensors shuffles what a file says beside them."""
    found = []
    for number in range(8):
        saved(tmp_path / str(number), 1)
        files = (tmp_path / str(number) / "step-000000001").iterdir()
        found.append({path.name: path.read_bytes() for path in files})
    assert all(files == found[0] for files in found)


def test_nothing_of_a_checkpoint_is_a_pickle(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    for path in (tmp_path / "step-000000001").iterdir():
        if path.suffix != ".safetensors":
            json.loads(path.read_text())
    assert names(tmp_path / "step-000000001") == [
        "checksums.json",
        "model.json",
        "optimizer-00000.safetensors",
        "state.json",
        "weights-00000.safetensors",
    ]


@pytest.mark.parametrize("call", ["write_tensors", "write_atomically", "flush"])
def test_a_full_disk_leaves_earlier_checkpoints_and_nothing_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    engine, checkpoints = saved(tmp_path, 1)
    before = weights(engine)
    checkpoints.asynchronous = True

    def full(*given: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(sharded_checkpoints, call, full)
        checkpoints.save(engine, {"step": 2})
        with pytest.raises(RunError, match="disk is full"):
            checkpoints.wait()
        checkpoints.save(engine, {"step": 3})
        with pytest.raises(RunError, match="step-000000003: the disk is full"):
            checkpoints.save(engine, {"step": 4})
    assert names(tmp_path) == ["step-000000001"]
    step(engine)
    checkpoints.restore(engine)
    assert equal(weights(engine), before)
    checkpoints.save(engine, {"step": 5})
    checkpoints.wait()
    assert checkpoints.steps() == [1, 5]


def test_pruning_keeps_what_it_is_told_to_and_what_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, checkpoints = saved(tmp_path, 1, 2, 3, 4)
    (tmp_path / ".step-000000009.0123456789ab.tmp").mkdir()
    checkpoints.prune({1, 3, 4})
    assert names(tmp_path) == ["step-000000001", "step-000000003", "step-000000004"]
    checkpoints.asynchronous, held = True, Held(monkeypatch)
    checkpoints.save(engine, {"step": 5})
    checkpoints.prune({5})
    assert checkpoints.steps() == [4]  # the newest that is whole
    held.go.set()
    checkpoints.wait()
    checkpoints.prune({5})
    assert names(tmp_path) == ["step-000000005"]


def kill_everywhere(root: str) -> None:
    """Save step 2 beside step 1 again and again, killed when the disk is touched for the first time, the second, ..."""
    import torch._dynamo  # as optimizers do at their first step: once, before all processes are forked

    torch.set_num_threads(1)

    def save(folder: Path, number: int, touches: int) -> None:
        engine = engine_of()
        step(engine)
        left = touches

        def count(event: str, given: tuple[Any, ...]) -> None:
            nonlocal left
            if given and str(folder) in str(given[0]) and event in ("open", "os.mkdir", "os.rename", "os.remove"):
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)
        if touches < 0:  # in the middle of a file, of which Python does not know
            sharded_checkpoints.write_tensors = lambda path, *_: (
                path.write_bytes(b"\0" * 1000),
                os.kill(os.getpid(), signal.SIGKILL),
            )
        ShardedCheckpoints(folder, engine.mesh, asynchronous=False).save(engine, {"step": number})

    def in_process(*given: Any) -> bool:
        process = os.fork()
        if process == 0:
            save(*given)
            os._exit(0)
        return os.waitpid(process, 0)[1] != 0

    assert not in_process(Path(root) / "1", 1, 0)
    touches, killed = -2, True
    while killed:
        touches += 1
        folder = Path(root) / f"touch {touches}"
        shutil.copytree(Path(root) / "1", folder)
        killed = in_process(folder, 2, touches) or touches == 0


@pytest.mark.slow
def test_killed_at_any_moment_there_is_a_whole_checkpoint_or_none(tmp_path: Path) -> None:
    code = f"from {__name__} import kill_everywhere; kill_everywhere({str(tmp_path)!r})"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, timeout=150, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    folders = sorted(tmp_path.glob("touch *"), key=lambda path: int(path.name.split()[1]))
    assert len(folders) > 12
    found, engine = [], engine_of()
    for folder in folders:
        checkpoints = ShardedCheckpoints(folder, engine.mesh)
        found.append(checkpoints.steps())
        assert checkpoints.restore(engine) == {"step": found[-1][-1]}
        for number in found[-1]:
            load(folder / f"step-{number:09d}")
        checkpoints.prune(set(found[-1]))
        assert names(folder) == [f"step-{number:09d}" for number in found[-1]]
    assert found[0] == [1]
    assert found[1] == [1, 2]  # not killed
    is_whole = [steps == [1, 2] for steps in found[2:]]
    assert is_whole == sorted(is_whole)
    assert 5 < is_whole.index(True) < len(is_whole)
