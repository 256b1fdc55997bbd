"""Training over meshes of processes against plain training in one process.

Processes are started once for each number of them, train over many meshes, and write what they found to files; the
tests read those.
"""

from __future__ import annotations

import copy
import functools
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from cordillera.data.language.batches import PackedTokens
from cordillera.distributed import tensor_parallel
from cordillera.distributed.dtensors import local
from cordillera.distributed.fsdp.traffic import GATHERED, REDUCED, SCATTERED
from cordillera.distributed.mesh import ParallelConfig, ProcessMesh
from cordillera.distributed.pipeline.mail import PASSED_ON
from cordillera.distributed.vocabulary_loss import EXCHANGED, IGNORED
from cordillera.errors import CheckpointError, CordilleraError, PlanError
from cordillera.models.language.llama import Llama, LlamaConfig
from cordillera.models.language.parallelize import check_fit
from cordillera.models.language.stages import cut_layers, cut_model
from cordillera.training.language import gradients as language_gradients
from cordillera.training.language.engine import AGREED, LanguageConfig, LanguageEngine, next_tokens
from tests.distributed.processes import found_by, needs_gloo

pytestmark = pytest.mark.usefixtures("one_thread")

MODEL = LlamaConfig(layers=4, hidden=32, heads=4, kv_heads=2, ffn=48, vocabulary=64, context=64)
TIED = MODEL.model_copy(update={"tied": True})
TRAINING = LanguageConfig(learning_rate=3e-3, clip=0.8, loss_rows=7)
UNCLIPPED = TRAINING.model_copy(update={"clip": None})
UNEVEN = {"heads": 12, "kv_heads": 3, "head_dim": 8}
STEPS = 8
PRECISIONS = ("fp32", "bf16")
HELD_OUT = (77, 3)  # seed and microbatches of what is evaluated


def mesh(**sizes: Any) -> ParallelConfig:
    return ParallelConfig(deadline_s=60, **sizes)


MESHES: dict[int, dict[str, ParallelConfig]] = {
    4: {
        "shard 4": mesh(shard=4),
        "replicate 2 x shard 2": mesh(replicate=2, shard=2),
        "context 4": mesh(context=4),
        "tensor 2 x shard 2": mesh(tensor=2, shard=2),
        "replicate 2 x tensor 2": mesh(tensor=2, replicate=2),
        "tensor 2 x context 2": mesh(tensor=2, context=2),
        "context 2 x shard 2": mesh(context=2, shard=2),
        "context 2 x shard 2, context outermost": mesh(
            context=2, shard=2, order=("tensor", "data", "pipeline", "context")
        ),
        "context 2 x replicate 2": mesh(context=2, replicate=2),
        "pipeline 4": mesh(pipeline=4),
        "pipeline 2 x shard 2": mesh(pipeline=2, shard=2),
        "pipeline 2 x shard 2, pipeline outermost": mesh(
            pipeline=2, shard=2, order=("tensor", "context", "data", "pipeline"), reshard_after_forward=True
        ),
        "pipeline 2 x shard 2, zero bubble": mesh(pipeline=2, shard=2, schedule="zero_bubble_v"),
        "pipeline 2 x replicate 2": mesh(pipeline=2, replicate=2),
        "pipeline 2 x context 2": mesh(pipeline=2, context=2, recompute="full"),
        "pipeline 2 x tensor 2": mesh(pipeline=2, tensor=2),
        "tied, pipeline 2 x shard 2": mesh(pipeline=2, shard=2),
        "sequence over tensor 2 x shard 2": mesh(tensor=2, shard=2, sequence=True),
        "sequence over tensor 2 x context 2, recompute": mesh(tensor=2, context=2, sequence=True, recompute="full"),
        "tied, sequence over tensor 2 x pipeline 2": mesh(pipeline=2, tensor=2, sequence=True),
        "biases and norms, pipeline 2 x tensor 2": mesh(pipeline=2, tensor=2),
    },
    3: {"shard 3": mesh(shard=3), "pipeline 3": mesh(pipeline=3)},
    2: {
        "shard 2": mesh(shard=2),
        "replicate 2": mesh(replicate=2),
        "context 2, ring": mesh(context=2, transport="ring", sharding="per_sequence"),
        "context 2, adaptive, recompute": mesh(context=2, sharding="adaptive", recompute="full"),
        "pipeline 2": mesh(pipeline=2),
        "pipeline 2, gpipe": mesh(pipeline=2, schedule="gpipe"),
        "pipeline 2, interleaved": mesh(pipeline=2, schedule="interleaved", chunks=2),
        "pipeline 2, zero bubble": mesh(pipeline=2, schedule="zero_bubble"),
        "tensor 2, recompute": mesh(tensor=2, recompute="selective"),
        "tied, tensor 2": mesh(tensor=2),
        "sequence over tensor 2, recompute": mesh(tensor=2, sequence=True, recompute="selective"),
        "tied, pipeline 2, zero bubble": mesh(pipeline=2, schedule="zero_bubble_v"),
        "biases and norms, tensor 2": mesh(tensor=2),
        "biases and norms, shard 2": mesh(shard=2),
        "biases and norms, sequence over tensor 2": mesh(tensor=2, sequence=True, recompute="full"),
    },
    1: {"one process": mesh(), "tied, recompute": mesh(recompute="full")},
}
# Three steps instead of twenty: they differ from another mesh only in how it is made.
BRIEF = (
    "replicate 2 x tensor 2",
    "context 4",
    "context 2 x shard 2, context outermost",
    "context 2 x replicate 2",
    "pipeline 4",
    "pipeline 2 x shard 2, pipeline outermost",
    "pipeline 2 x shard 2, zero bubble",
    "pipeline 2 x context 2",
    "pipeline 2 x tensor 2",
    "pipeline 2 x replicate 2",
    "tied, tensor 2",
    "tied, pipeline 2 x shard 2",
    "sequence over tensor 2 x shard 2",
    "sequence over tensor 2 x context 2, recompute",
    "tied, sequence over tensor 2 x pipeline 2",
    "tied, recompute",
    "biases and norms, pipeline 2 x tensor 2",
    "biases and norms, shard 2",
    "biases and norms, sequence over tensor 2",
)
ALL = [name for meshes in MESHES.values() for name in meshes]


def model_of(name: str) -> LlamaConfig:
    """Few layers where none lie on other processes."""
    has = "biases and norms" in name
    parts = {"tied": "tied" in name, "attention_bias": has, "head_norms": has}
    return MODEL.model_copy(update={**parts, "layers": 4 if "pipeline" in name else 2})


def iteration(seed: int, microbatches: int = 5) -> list[PackedTokens]:
    """Ragged documents, some of them empty or of one token; microbatches of different lengths."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for number in range(microbatches):
        lengths = [*torch.randint(0, 11, (3 + number % 2,), generator=generator).tolist(), 2 + number]
        offsets = torch.tensor([0, *lengths]).cumsum(0)
        made.append(PackedTokens(torch.randint(0, 64, (int(offsets[-1]),), generator=generator), offsets))
    return made


def wholes(engine: LanguageEngine, what: Callable[[Tensor], Tensor | None]) -> dict[str, Tensor]:
    """Of every weight that a process knows of, whole, in the order of the names: gathering is a collective."""
    found = {}
    for number, stage in engine.stages.items():
        for name, parameter in stage.named_parameters():
            tensor = what(parameter)
            assert isinstance(tensor, DTensor), name
            found[f"{number} {name}"] = tensor.full_tensor().detach().clone()
    return found


def counts(steps: int) -> list[int]:
    """Microbatches of each step: more than copies of the model, or fewer, and not as many for each."""
    return [(3, 1, 2, 1)[step % 4] for step in range(steps)]


def trained(config: ParallelConfig, model: LlamaConfig, training: LanguageConfig, counts: list[int]) -> dict[str, Any]:
    """What a process of a mesh has of a training."""
    engine = LanguageEngine(training, model, ProcessMesh(config))
    found: dict[str, Any] = {"evaluated": engine.evaluate(iteration(*HELD_OUT))}
    reports = []
    for step, count in enumerate(counts):
        loss, targets = engine.backward(iteration(step, count))
        if step == 0:
            found["gradients"] = wholes(engine, lambda weight: weight.grad)
        reports.append(engine.update(loss, targets))
    found["end"] = wholes(engine, lambda weight: weight.detach())
    found["losses"] = [report.loss for report in reports]
    found["norms"] = [report.gradient_norm for report in reports]
    found["traffic"] = {name: asdict(traffic) for name, traffic in engine.ledger.traffic.items()}
    return found


def run_all(rank: int, folder: str) -> dict[str, Any]:
    size = dist.get_world_size()
    found: dict[str, Any] = {}
    for name, config in MESHES[size].items():
        found[name] = trained(config, model_of(name), TRAINING, counts(3 if name in BRIEF else STEPS))
    if size <= 2:
        for precision in PRECISIONS:
            training = UNCLIPPED.model_copy(update={"precision": precision})
            found[f"exact {precision}"] = trained(mesh(shard=size), MODEL, training, [2] * STEPS)
    if size == 1:
        found["half"] = trained(mesh(), MODEL, TRAINING.model_copy(update={"precision": "bf16"}), counts(STEPS))
        dist.destroy_process_group()
        found["unlaunched"] = ProcessMesh(mesh()).exchange([3.0, 4.0]).tolist()
    if size in (2, 3):
        found["late"] = run_late(rank, size, Path(folder))
    if size == 4:
        found |= {name: run_poisoned(rank, *case) for name, case in POISONED.items()}
        found["refused"] = run_refused(rank)
    return found


# A mesh, the rank that has a gradient of which one element is none, and the element.
POISONED: dict[str, tuple[ParallelConfig, int, float]] = {
    "poisoned": (mesh(pipeline=2, shard=2), 2, math.nan),
    "poisoned copy": (mesh(tensor=2, replicate=2), 3, math.inf),
}


def run_poisoned(rank: int, config: ParallelConfig, where: int, element: float) -> dict[str, Any]:
    """A gradient that is not finite, on one process, between two good steps."""
    engine = LanguageEngine(TRAINING, TIED, ProcessMesh(config))

    def held() -> dict[str, Tensor]:
        moments = engine.optimizer.state
        return wholes(engine, lambda weight: weight.detach()) | {
            f"{name} {i}": local(tensor).clone()
            for i, state in enumerate(moments.values())
            for name, tensor in state.items()
        }

    first = engine.step(iteration(0, 3))
    before = held()
    loss, targets = engine.backward(iteration(1, 3))
    if rank == where:
        gradient = local(next(iter(engine.stages.values())).blocks[0].attention_norm.weight.grad)
        gradient[1] = element
    second = engine.update(loss, targets)
    after = held()
    third = engine.step(iteration(2, 3))
    return {
        "skipped": [report.is_skipped for report in (first, second, third)],
        "norms": [report.gradient_norm for report in (first, second, third)],
        "count": engine.skipped,
        "unchanged": before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before),
        "moments": sum(name.startswith("exp_avg") for name in before),
    }


def refused(make: Callable[[], object]) -> str:
    with pytest.raises(CordilleraError) as error:
        make()
    return str(error.value)


def run_refused(rank: int) -> dict[str, str]:
    engine = LanguageEngine(TRAINING, MODEL, ProcessMesh(mesh(replicate=2, context=2)))
    single = PackedTokens(torch.tensor([5, 7]), torch.tensor([0, 1, 2]))
    good = iteration(0, 1)[0]
    return {
        "world": refused(lambda: ProcessMesh(mesh(shard=3, tensor=2))),
        "model": refused(
            lambda: LanguageEngine(TRAINING, MODEL.model_copy(update=UNEVEN), ProcessMesh(mesh(tensor=4)))
        ),
        "different": refused(lambda: engine.step(iteration(int(rank == 3)))),
        "more": refused(lambda: engine.step(iteration(0, 3 + (rank > 1)))),
        "nothing": refused(lambda: engine.step([single])),
        "compile": refused(
            lambda: LanguageEngine(
                TRAINING.model_copy(update={"compile": True}),
                MODEL,
                ProcessMesh(mesh(pipeline=2, shard=2, schedule="zero_bubble")),
            )
        ),
        "offsets": refused(lambda: engine.step([good, single._replace(offsets=torch.tensor([0, 2, 1]))])),
        "token": refused(lambda: engine.step([single._replace(tokens=torch.tensor([5, 64])), good])),
        "labels": refused(lambda: engine.step([good._replace(labels=torch.tensor([-100])), good])),
        "rate": refused(lambda: engine.step([good], math.nan)),
        "unlike": refused(lambda: engine.step([good]) if rank else engine.evaluate([good])),
        "evaluated": refused(lambda: engine.evaluate([single])),
        "label": refused(lambda: engine.step([single._replace(labels=torch.tensor([-100, -1])), good])),
    }


def run_late(rank: int, size: int, folder: Path) -> dict[str, Any]:
    """A process that does not come to the gathering of weights, or to a step, and what becomes of the others."""
    engine = LanguageEngine(TRAINING, MODEL, ProcessMesh(mesh(shard=size).model_copy(update={"deadline_s": 1.0})))
    if rank == 1:  # it stays away until the others have given up
        until = time.monotonic() + 60
        while len(list(folder.glob("*.late"))) < size - 1 and time.monotonic() < until:
            time.sleep(0.02)
        return {}
    began, found = time.monotonic(), dict[str, Any]()
    if size == 3:
        found["step"] = refused(lambda: engine.step(iteration(0)))
    else:
        with pytest.raises(RuntimeError):
            engine.stages[0](*iteration(0)[0][:2], None, iteration(0)[0].tokens)
        found["gathering"] = time.monotonic() - began
    (folder / f"{rank}.late").touch()
    return found


@torch.no_grad()
def lost(model: Llama, microbatches: list[PackedTokens]) -> tuple[float, int]:
    """Sum of the losses in 64 bits, document by document, and targets."""
    model, total, targets = copy.deepcopy(model).double(), 0.0, 0
    for tokens, offsets, *_ in microbatches:
        for document in tokens.tensor_split(offsets[1:-1]):
            if len(document) > 1:
                logits = model(document[:-1], torch.tensor([0, len(document) - 1]))
                total += float(F.cross_entropy(logits, document[1:], reduction="sum"))
                targets += len(document) - 1
    return total, targets


def plainly_trained(
    model: LlamaConfig, training: LanguageConfig, packed: bool = True, steps: int = STEPS
) -> dict[str, Any]:
    """The same in one process, by torch's own loss, optimizer and clipping."""
    llama = Llama(model)
    llama.init_weights()
    matrices = [p for p in llama.parameters() if p.dim() > 1]
    norms = [p for p in llama.parameters() if p.dim() == 1]
    groups = [
        {"params": matrices, "weight_decay": training.weight_decay},
        {"params": norms, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=training.learning_rate, betas=training.betas, eps=training.eps)
    found: dict[str, Any] = {"losses": [], "norms": [], "evaluated": lost(llama, iteration(*HELD_OUT))}
    for step, count in enumerate(counts(steps)):
        total, targets = torch.zeros(()), 0
        for tokens, offsets, *_ in iteration(step, count):
            logits = llama(tokens, offsets)
            for first, last in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
                if last - first > 1:
                    own = logits[first:last] if packed else llama(tokens[first:last], torch.tensor([0, last - first]))
                    total = total + F.cross_entropy(own[:-1], tokens[first + 1 : last], reduction="sum")
                    targets += last - first - 1
        (total / targets).backward()
        if step == 0:
            found["gradients"] = {name: p.grad.clone() for name, p in llama.named_parameters()}
        found["losses"].append(total.item() / targets)
        limit = training.clip or float("inf")
        found["norms"].append(torch.nn.utils.clip_grad_norm_(llama.parameters(), limit).item())
        optimizer.step()
        optimizer.zero_grad()
    return found


@functools.cache
def plain(model: LlamaConfig, steps: int = STEPS) -> dict[str, Any]:
    return plainly_trained(model, TRAINING, steps=steps)


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[int, dict[str, Any]]]:
    """What each process found, by their number and its rank."""

    def of(size: int) -> dict[int, dict[str, Any]]:
        return found_by(size, tmp_path_factory.mktemp(f"meshes-{size}"), run_all, 280)

    with ThreadPoolExecutor(2) as pool:  # processes wait for one another more than they compute
        return dict(zip(MESHES, pool.map(of, MESHES), strict=True))


def of_mesh(executed: dict[int, dict[int, dict[str, Any]]], name: str) -> list[dict[str, Any]]:
    """What the processes of a mesh found."""
    size = next(size for size, meshes in MESHES.items() if name in meshes)
    return [one[name] for one in executed[size].values()]


def expected_traffic(config: ParallelConfig, norms: bool) -> set[str]:
    """Names of what a mesh sends."""
    found = {AGREED} if config.world > 1 else set()
    if config.shard * config.context > 1:
        found |= {GATHERED, SCATTERED}
    if config.replicate > 1:
        found.add(REDUCED)
    if config.context > 1:
        found |= {"plans", "keys and values", "their gradients"}
        if config.transport == "ring":
            found.add("keys and values again")
    if config.tensor > 1:
        cut = {tensor_parallel.GATHERED, tensor_parallel.SCATTERED, language_gradients.WHOLE}
        found |= cut if config.sequence else {tensor_parallel.SUMMED}
        if norms:
            found.add(language_gradients.WHOLE)
    if config.pipeline > 1:
        found.add(PASSED_ON)
    return found


def deviation(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def check_training(name: str, ranks: list[dict[str, Any]], steps: int) -> None:
    """Compare losses, norms and the first gradients of all processes of a mesh with those of one process."""
    expected = plain(model_of(name), steps)
    seen = set()
    for found in ranks:
        assert found["losses"] == pytest.approx(expected["losses"], abs=1e-5, rel=0)
        assert found["norms"][0] == pytest.approx(expected["norms"][0], rel=1e-6)
        assert found["norms"] == pytest.approx(expected["norms"], rel=1e-4)
        for key, tensor in found["gradients"].items():
            weight = key.split()[1]
            seen.add(weight)
            assert deviation(tensor, expected["gradients"][weight]) < 1e-5, key
    assert seen == set(expected["gradients"])


@needs_gloo
@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_a_mesh_trains_as_one_process_does(executed: dict[int, dict[int, dict[str, Any]]], name: str) -> None:
    check_training(name, of_mesh(executed, name), 3 if name in BRIEF else STEPS)


@needs_gloo
@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_a_mesh_evaluates_as_one_process_does(executed: dict[int, dict[int, dict[str, Any]]], name: str) -> None:
    total, targets = plain(model_of(name))["evaluated"]
    for found in of_mesh(executed, name):
        assert found["evaluated"] == of_mesh(executed, name)[0]["evaluated"]
        assert found["evaluated"][1] == targets
        assert found["evaluated"][0] / targets == pytest.approx(total / targets, abs=1e-6, rel=0)


@needs_gloo
@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_the_ledger_names_what_a_mesh_sends(executed: dict[int, dict[int, dict[str, Any]]], name: str) -> None:
    config = next(meshes[name] for meshes in MESHES.values() if name in meshes)
    for found in of_mesh(executed, name):
        # only the last stage has the head, and only some ranks both ends of a tied one
        assert found["traffic"].keys() - {EXCHANGED, language_gradients.TIED} == expected_traffic(
            config, "norms" in name
        )
        for traffic in found["traffic"].values():
            assert traffic["bytes"] > 0
            assert 0 < traffic["exposed_seconds"] <= traffic["seconds"] < 60
    sent = set().union(*(found["traffic"] for found in of_mesh(executed, name)))
    assert (EXCHANGED in sent) == (config.tensor > 1)
    assert (language_gradients.TIED in sent) == (name.startswith("tied") and config.stages == config.pipeline == 2)


@needs_gloo
@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_all_processes_of_a_mesh_agree(executed: dict[int, dict[int, dict[str, Any]]], name: str) -> None:
    first, *others = of_mesh(executed, name)
    for other in others:
        assert (other["losses"], other["norms"]) == (first["losses"], first["norms"])
        for key in set(first["end"]) & set(other["end"]):
            assert torch.equal(first["end"][key], other["end"][key])


@needs_gloo
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ALL if name.startswith("tied, pipeline")])
def test_copies_of_a_tied_head_stay_equal(executed: dict[int, dict[int, dict[str, Any]]], name: str) -> None:
    copies = [
        tensor
        for found in of_mesh(executed, name)
        for key, tensor in found["end"].items()
        if key.endswith(" embedding.weight")
    ]
    assert len(copies) > 1
    assert all(torch.equal(copy, copies[0]) for copy in copies)


@needs_gloo
@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS)
def test_two_shards_are_one_process_bit_for_bit(executed: dict[int, dict[int, dict[str, Any]]], precision: str) -> None:
    expected = executed[1][0][f"exact {precision}"]
    for process in executed[2].values():
        found = process[f"exact {precision}"]
        for what in ("gradients", "end"):
            assert found[what].keys() == expected[what].keys()
            for key, tensor in expected[what].items():
                assert torch.equal(found[what][key], tensor), (what, key)
        assert found["losses"] == expected["losses"]


@needs_gloo
@pytest.mark.slow
def test_a_packed_loss_is_that_of_its_documents_one_by_one(
    executed: dict[int, dict[int, dict[str, Any]]],
) -> None:
    found = executed[1][0]["one process"]
    expected = plainly_trained(model_of("one process"), TRAINING, packed=False)
    assert found["losses"] == pytest.approx(expected["losses"], abs=1e-5, rel=0)


@needs_gloo
@pytest.mark.slow
def test_half_precision_trains_nearly_as_single(executed: dict[int, dict[int, dict[str, Any]]]) -> None:
    found = executed[1][0]["half"]
    assert found["losses"] == pytest.approx(plain(MODEL)["losses"], abs=0.03)
    assert found["losses"] != pytest.approx(plain(MODEL)["losses"], abs=1e-6)
    assert {tensor.dtype for tensor in found["gradients"].values()} == {torch.float32}


@needs_gloo
@pytest.mark.slow
@pytest.mark.parametrize("name", POISONED)
def test_a_gradient_that_is_not_finite_leaves_weights_and_moments_on_all_processes(
    executed: dict[int, dict[int, dict[str, Any]]], name: str
) -> None:
    for found in executed[4].values():
        poisoned = found[name]
        assert poisoned["moments"] > 0
        assert poisoned["skipped"] == [False, True, False]
        assert poisoned["count"] == 1
        assert poisoned["unchanged"]
        assert [math.isfinite(norm) for norm in poisoned["norms"]] == [True, False, True]


@needs_gloo
@pytest.mark.slow
def test_what_does_not_fit_is_one_error_on_every_process(executed: dict[int, dict[int, dict[str, Any]]]) -> None:
    said = [found["refused"] for found in executed[4].values()]
    for name in ("world", "model", "different", "more", "nothing", "compile"):
        assert len({one[name] for one in said}) == 1
    assert "replicate 1 x shard 3 x context 1 x tensor 2 take 6 processes, there are 4" in said[0]["world"]
    assert "kv_heads (3) and tensor (4): neither divides the other" in said[0]["model"]
    assert "a compiled block's backward cannot be split, as zero_bubble does" in said[0]["compile"]
    assert "rank 3 was given others than rank 2" in said[0]["different"]
    assert "rank 2 was given others than rank 0" in said[0]["more"]
    assert "1 microbatches without a target" in said[0]["nothing"] == said[3]["evaluated"]
    assert "nan is no factor on a learning rate" in said[0]["rate"]
    assert "rank 1 was given others than rank 0" in said[0]["unlike"]


@needs_gloo
@pytest.mark.slow
def test_a_microbatch_that_is_none_stops_every_process(executed: dict[int, dict[int, dict[str, Any]]]) -> None:
    first, _, last, _ = (executed[4][rank]["refused"] for rank in range(4))  # ranks 0 and 1 are one copy of the model
    assert "offsets [0, 2, 1] do not rise from 0 to its 2 tokens" in last["offsets"]
    assert "token 64 is not in the vocabulary of 64" in first["token"]
    assert "1 labels for" in first["labels"]
    assert "label -1 is not in the vocabulary" in first["label"]
    assert "rank 2 was given a microbatch that is none" in first["offsets"]
    for name in ("token", "labels", "label"):
        assert "rank 0 was given a microbatch that is none" in last[name]


@needs_gloo
@pytest.mark.slow
def test_one_process_needs_no_launcher(executed: dict[int, dict[int, dict[str, Any]]]) -> None:
    assert executed[1][0]["unlaunched"] == [[3.0, 4.0]]


@needs_gloo
@pytest.mark.slow
def test_a_process_that_does_not_come_is_missed_in_time(executed: dict[int, dict[int, dict[str, Any]]]) -> None:
    assert 0.5 < executed[2][0]["late"]["gathering"] < 30
    for rank in (0, 2):
        assert "did not come within 1 s" in executed[3][rank]["late"]["step"]


def test_weights_of_another_shape_are_refused() -> None:
    stage = cut_model(MODEL, 2, [1])[1].to_empty(device="cpu")
    with pytest.raises(CheckpointError, match=r"norm.weight: has shape \[1\], not \[32\]"):
        stage.fill(lambda name, shape: torch.zeros(1))
    assert sorted(stage.layers) == ["2", "3"]


def test_everything_that_does_not_fit_a_model_is_named() -> None:
    with pytest.raises(PlanError) as error:
        check_fit(
            MODEL.model_copy(update={"heads": 3, "kv_heads": 3}),
            ParallelConfig(tensor=8, pipeline=5, schedule="interleaved", chunks=2),
        )
    for part in ("heads (3)", "kv_heads (3)", "layers (4) are fewer than the stages (10)"):
        assert part in str(error.value)
    assert "vocabulary" not in str(error.value)


@given(layers=st.integers(1, 200), data=st.data())
def test_layers_are_cut_evenly_and_in_order(layers: int, data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, layers))
    cut = cut_layers(layers, stages)
    assert [number for part in cut for number in part] == list(range(layers))
    sizes = [len(part) for part in cut]
    assert max(sizes) - min(sizes) <= 1
    assert min(sizes[0], sizes[-1]) == min(sizes)


@given(offsets=st.lists(st.integers(0, 5), min_size=1, max_size=6))
def test_no_label_crosses_a_document(offsets: list[int]) -> None:
    bounds = torch.tensor([0, *offsets]).cumsum(0)
    tokens = torch.arange(int(bounds[-1]))
    labels = next_tokens(tokens, bounds)
    expected = [
        token + 1 if token + 1 < last else IGNORED
        for first, last in pairwise(bounds.tolist())
        for token in range(first, last)
    ]
    assert labels.tolist() == expected
