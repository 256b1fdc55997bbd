"""Experts over meshes of processes against the same training in one process."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from cordillera.distributed.expert_parallel import CHOSEN, ROUTED
from cordillera.distributed.mesh import ParallelConfig, ProcessMesh
from cordillera.errors import PlanError
from cordillera.models.language.llama import LlamaConfig
from cordillera.models.language.moe import ExpertsConfig, ExpertTraining
from cordillera.models.language.parallelize import check_fit
from cordillera.numerics.emulation.emulation import EmulationConfig
from cordillera.training.language.checkpoints import ShardedCheckpoints
from cordillera.training.language.engine import LanguageConfig, LanguageEngine, check_experts
from cordillera.training.language.gradients import EXPERTS
from tests.distributed.processes import found_by, needs_gloo, run_processes
from tests.distributed.test_language_meshes import iteration

MODEL = LlamaConfig(
    layers=2, hidden=32, heads=4, kv_heads=2, ffn=24, vocabulary=64, context=64,
    experts=ExpertsConfig(count=4, chosen=2, shared=8),
)  # fmt: skip
EVEN = ExpertTraining(bias_rate=0.05, balance_loss=0.02, z_loss=0.001)
BIASED = ExpertTraining(bias_rate=0.05, keeps="X")
STEPS = 20


def mesh(**sizes: Any) -> ParallelConfig:
    return ParallelConfig(deadline_s=60, **sizes)


# a mesh and the settings of its training; the first of each setting is what the others are compared with
CASES: dict[str, tuple[int, ParallelConfig, ExpertTraining]] = {
    "one process": (1, mesh(), EVEN),
    "one process, biased": (1, mesh(), BIASED),
    "recompute": (1, mesh(recompute="full"), EVEN),
    "recompute feed-forward": (1, mesh(recompute="selective"), EVEN),
    "gather, shard 2": (2, mesh(shard=2), EVEN),
    "exchange, shard 2": (2, mesh(shard=2, experts="exchange"), EVEN),
    "exchange, shard 2, recompute": (2, mesh(shard=2, experts="exchange", recompute="full"), EVEN),
    "exchange, context 2": (2, mesh(context=2, experts="exchange"), BIASED),
    "pipeline 2": (2, mesh(pipeline=2), EVEN),
    "exchange, shard 4": (4, mesh(shard=4, experts="exchange"), EVEN),
    "exchange, replicate 2 x shard 2": (4, mesh(replicate=2, shard=2, experts="exchange"), EVEN),
    "exchange, pipeline 2 x shard 2": (4, mesh(pipeline=2, shard=2, experts="exchange"), EVEN),
    "exchange, context 2 x shard 2": (4, mesh(context=2, shard=2, experts="exchange"), BIASED),
}
FEW = ("exchange, shard 2", "gather, shard 2")


def whole(tensor: Tensor) -> Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.full_tensor().detach().clone()


def trained(config: ParallelConfig, experts: ExpertTraining, steps: int) -> dict[str, Any]:
    training = LanguageConfig(learning_rate=3e-3, clip=0.8, loss_rows=7, experts=experts)
    engine = LanguageEngine(training, MODEL, ProcessMesh(config))
    named = {name: weight for stage in engine.stages.values() for name, weight in stage.named_parameters()}
    found: dict[str, Any] = {"reports": []}
    for step in range(steps):
        loss, targets = engine.backward(iteration(step, (3, 1, 2, 1)[step % 4]))
        if step == 0:
            found["gradients"] = {name: whole(weight.grad) for name, weight in named.items() if weight.grad is not None}
        found["reports"].append(engine.update(loss, targets)._asdict())
    found["evaluated"] = engine.evaluate(iteration(77, 3))
    found["end"] = {name: whole(weight) for name, weight in named.items()}
    found["sent"] = set(engine.ledger.traffic)
    return found


def run_cases(rank: int, folder: str, steps: int, names: tuple[str, ...]) -> dict[str, Any]:
    torch.set_num_threads(1)
    return {name: trained(*CASES[name][1:], steps) for name in names if CASES[name][0] == dist.get_world_size()}


def run_all(rank: int, folder: str) -> dict[str, Any]:
    return run_cases(rank, folder, STEPS, tuple(CASES))


def run_few(rank: int, folder: str) -> dict[str, Any]:
    return run_cases(rank, folder, 3, FEW)


def run_alone(rank: int, folder: str) -> dict[str, Any]:
    return run_cases(rank, folder, 3, ("one process",))


def compare(found: dict[str, Any], expected: dict[str, Any]) -> None:
    ours, theirs = found["reports"], expected["reports"]
    assert [report["loss"] for report in ours] == pytest.approx([one["loss"] for one in theirs], abs=1e-5, rel=0)
    assert [report["gradient_norm"] for report in ours] == pytest.approx(
        [one["gradient_norm"] for one in theirs], rel=1e-4
    )
    assert [report["expert_imbalance"] for report in ours] == [one["expert_imbalance"] for one in theirs]
    assert all(report["expert_imbalance"] >= 1 for report in ours)
    for name, gradient in found["gradients"].items():
        difference = (gradient - expected["gradients"][name]).abs().max()
        assert difference < 1e-5 * expected["gradients"][name].abs().max(), name
    for name, weight in found["end"].items():
        if name.endswith("router.bias"):
            assert torch.equal(weight, expected["end"][name])
            assert weight.any()
    total, targets = expected["evaluated"]
    assert found["evaluated"][1] == targets
    assert found["evaluated"][0] == pytest.approx(total, rel=1e-5)


@pytest.mark.slow
@needs_gloo
def test_two_processes_train_as_one_does(tmp_path: Path) -> None:
    """Tokens go to the ranks of their experts, or the weights of experts to all ranks; three steps."""
    for size in "12":
        (tmp_path / size).mkdir()
    alone = run_processes(1, tmp_path / "1", run_alone, 120)
    ended = run_processes(2, tmp_path / "2", run_few, 120)
    assert alone.codes + ended.codes == [0] * 3, ended.said
    for found in ended.found.values():
        for name in FEW:
            compare(found[name], alone.found[0]["one process"])
        assert {ROUTED, CHOSEN} <= found["exchange, shard 2"]["sent"]
        assert not {ROUTED, CHOSEN} & found["gather, shard 2"]["sent"]


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    def of(size: int) -> dict[int, dict[str, Any]]:
        return found_by(size, tmp_path_factory.mktemp(f"experts-{size}"), run_all, 280)

    with ThreadPoolExecutor(2) as pool:
        found = dict(zip((1, 2, 4), pool.map(of, (1, 2, 4)), strict=True))
    return {name: [one[name] for one in found[case[0]].values()] for name, case in CASES.items()}


@needs_gloo
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith("one process")])
def test_a_mesh_trains_as_one_process_does(executed: dict[str, list[dict[str, Any]]], name: str) -> None:
    reference = "one process" if CASES[name][2] == EVEN else "one process, biased"
    for found in executed[name]:
        compare(found, executed[reference][0])
        assert (EXPERTS in found["sent"]) == ("replicate" in name)
    assert set().union(*(found["end"] for found in executed[name])) == set(executed[reference][0]["end"])


def resumed(rank: int, folder: str) -> dict[str, Any]:
    """Train four steps, or two, and two more from the checkpoint."""
    torch.set_num_threads(1)
    found = {}
    config = mesh(shard=2, experts="exchange")
    training = LanguageConfig(learning_rate=3e-3, experts=EVEN)
    for way, stops in {"whole": (4,), "resumed": (2, 4)}.items():
        step = 0
        for stop in stops:
            engine = LanguageEngine(training, MODEL, ProcessMesh(config), seed=step)
            checkpoints = ShardedCheckpoints(Path(folder) / way, engine.mesh)
            if step:
                assert checkpoints.restore(engine) == {"step": step}
            for number in range(step, stop):
                engine.step(iteration(number))
            step = stop
            checkpoints.save(engine, {"step": step})
            checkpoints.wait()
        found[way] = {name: whole(weight) for name, weight in engine.stages[0].named_parameters()}
    return found


@needs_gloo
@pytest.mark.slow
def test_what_is_resumed_has_the_same_bits(tmp_path: Path) -> None:
    for found in found_by(2, tmp_path, resumed, 120).values():
        assert found["whole"].keys() == found["resumed"].keys()
        for name, weight in found["whole"].items():
            assert torch.equal(weight, found["resumed"][name]), name
        assert any(weight.any() for name, weight in found["whole"].items() if name.endswith("router.bias"))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"tensor": 2}, "experts are not split by matrices, and tensor is 2"),
        ({"shard": 3, "experts": "exchange"}, "4 experts are not divisible by shard x context"),
    ],
)
def test_meshes_that_do_not_fit_are_refused(sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        check_fit(MODEL, mesh(**sizes))


@pytest.mark.parametrize(
    ("training", "sizes", "message"),
    [
        ({}, {"pipeline": 2, "schedule": "zero_bubble"}, "zero_bubble splits backwards"),
        ({"experts": EVEN}, {"context": 2}, "is over whole documents, and context is 2"),
        ({"emulate": EmulationConfig(format="bf16")}, {}, "no number format is emulated"),
    ],
)
def test_settings_that_do_not_go_with_experts_are_refused(
    training: dict[str, Any], sizes: dict[str, Any], message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        check_experts(LanguageConfig(**training), MODEL, mesh(**sizes))
