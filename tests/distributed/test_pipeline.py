"""Executed pipelines against one process and against the simulator; peers that hang or die.

The processes are started once for all schedules and write what they found to files; the tests read those.
"""

from __future__ import annotations

import math
import os
import random
import signal
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from _executed_schedules import (
    SleepingPipeline,
    families,
    recorded_timeline,
    simulated_seconds,
    timelines,
    without_marks,
)
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from cordillera.distributed.ledger import Ledger
from cordillera.distributed.pipeline.mail import Mail, MailMessage, Throttle, _messages
from cordillera.distributed.pipeline.runner import PipelineRunner, Recording
from cordillera.distributed.pipeline.split_backward import ForwardState, split_backward
from cordillera.distributed.transport.progress import TransportError
from cordillera.errors import CordilleraError, PeerError, PlanError
from cordillera.planning.pipeline.schedules import (
    Action,
    Kind,
    Schedule,
    gpipe,
    one_forward_one_backward,
)
from cordillera.planning.pipeline.simulator import StageSeconds, simulate
from tests.distributed.processes import found_by, needs_gloo, run_processes

# Stages on ranks, by the number of ranks; the members are ranks of the pool of four processes.
MEMBERS = {4: (0, 1, 2, 3), 2: (1, 3)}  # all first: those who wait for the pair have a deadline
MOST_STEPS = 8  # what else runs on the machine only adds to a step, so the shortest counts
MOST_ADDED = 0.2  # by the runner and by what else runs; `bench scaleacross --part executed` measures the runner alone


def scattered(ranks: int, stages: int, microbatches: int, seed: int) -> Schedule:
    """A valid schedule without any sense: stages anywhere, actions in any order that their needs allow."""
    draw = random.Random(seed)
    rank_of = [*range(ranks), *(draw.randrange(ranks) for _ in range(stages - ranks))]
    draw.shuffle(rank_of)
    whole = {(s, i): draw.random() < 0.5 for s in range(stages) for i in range(microbatches)}
    left = [
        Action(Kind(kind), *pair) for pair, together in whole.items() for kind in (("F", "B") if together else "FIW")
    ]
    held = Schedule(f"scattered {seed}", microbatches, tuple(rank_of), (tuple(left),))  # only to ask what is needed
    done: set[tuple[Kind, int, int]] = set()
    plans: list[list[Action]] = [[] for _ in range(ranks)]
    while left:
        action = draw.choice([action for action in left if all(need in done for need in held.needs(action))])
        left.remove(action)
        done.add(action[:3])
        plans[rank_of[action.stage]].append(action)
    return Schedule(held.name, microbatches, held.rank_of, tuple(map(tuple, plans)))


def all_of(ranks: int) -> list[Schedule]:
    """The families, and what a person would never write."""
    return [*families(ranks), *(scattered(ranks, 2 * ranks + 1, 4, seed) for seed in range(4))]


# ---------------------------------------------------------------------------------------------------- gradients


class Block(nn.Module):
    """A residual stage of two layers, which counts the microbatches whose activations are kept."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(4 + stage), nn.Linear(4 + stage, 9), nn.Linear(9, 5 + stage)
        for parameter in self.parameters():
            generator = torch.Generator().manual_seed(100 * stage + parameter.numel())
            parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        self.seen: Callable[[object], None] | None = None

    def forward(self, x: Tensor) -> Tensor:
        kept = _Kept()
        if self.seen is not None:
            self.seen(kept)

        def pack(tensor: Tensor) -> tuple[_Kept, Tensor]:
            return kept, tensor.detach()  # a saved output would hold its own node

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda pair: pair[1]):
            out = self.down(torch.tanh(self.up(self.norm(x))))
            return out + nn.functional.pad(x, (0, 1))


class _Kept:
    """Lives as long as a saved tensor of one forward."""


def squared(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).mean()


def data(schedule: Schedule, step: int) -> tuple[list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(step)

    def draw(width: int) -> list[Tensor]:
        shape = (schedule.microbatches, 3, width)
        return list(torch.randn(shape, generator=generator, dtype=torch.float64))

    return draw(4), draw(4 + schedule.stages)


def executed_gradients(schedule: Schedule, group: dist.ProcessGroup, rank: int) -> dict[str, Any]:
    """Two steps: gradients and losses, and how many forwards were held at the start of each."""
    stages = {stage: Block(stage) for stage in schedule.stages_of(rank)}
    live = [0]
    counts: list[int] = []

    def freed() -> None:
        live[0] -= 1

    def seen(kept: object) -> None:
        counts.append(live[0])
        live[0] += 1
        weakref.finalize(kept, freed)

    for block in stages.values():
        block.seen = seen
    runner = PipelineRunner(schedule, stages, squared, group, deadline_s=60)
    losses, input_gradients = [], []
    for step in range(2):
        inputs, targets = data(schedule, step)
        for one in inputs:
            one.requires_grad_(step == 1)
        done = runner.step(inputs, targets)
        if done.losses is not None:
            losses.append(done.losses)
        input_gradients = [one.grad for one in inputs if one.grad is not None]
    return {
        "gradients": {s: [p.grad for p in block.parameters()] for s, block in stages.items()},
        "losses": losses,
        "input_gradients": input_gradients,
        "counts": counts,
        "left": live[0],
    }


def expected_gradients(schedule: Schedule) -> dict[str, Any]:
    """One process: whole backwards of each microbatch, added up in the order in which the schedule has each stage's."""
    model = nn.Sequential(*(Block(stage) for stage in range(schedule.stages)))
    losses: list[Tensor] = []
    sums: dict[int, list[Tensor]] = {}
    given: list[Tensor] = []
    for step in range(2):
        inputs, targets = data(schedule, step)
        parts: list[list[list[Tensor]]] = []
        values: list[Tensor] = []
        for one, target in zip(inputs, targets, strict=True):
            loss = squared(model(one.requires_grad_()), target)
            values.append(loss.detach())
            flat = torch.autograd.grad(loss / schedule.microbatches, [one, *model.parameters()])
            if step == 1:
                given.append(flat[0])
            per_stage = iter(flat[1:])
            parts.append([[next(per_stage) for _ in block.parameters()] for block in model])
        losses.append(torch.stack(values))
        for stage in range(schedule.stages):
            for action in schedule.actions[schedule.rank_of[stage]]:
                if action.stage == stage and action.kind in (Kind.BACKWARD, Kind.WEIGHT):
                    found = parts[action.microbatch][stage]
                    sums[stage] = [a + b for a, b in zip(sums[stage], found, strict=True)] if stage in sums else found
    return {"gradients": sums, "losses": losses, "input_gradients": given}


def mean_gradients(schedule: Schedule) -> list[Tensor]:
    """One process, all microbatches as one batch, both steps."""
    model = nn.Sequential(*(Block(stage) for stage in range(schedule.stages)))
    for step in range(2):
        inputs, targets = data(schedule, step)
        squared(model(torch.cat(inputs)), torch.cat(targets)).backward()
    return [parameter.grad for parameter in model.parameters()]


class Scaled(Block):
    """A stage that takes something beside its input."""

    def forward(self, x: Tensor, factor: float) -> Tensor:
        return factor * super().forward(x)


def ragged(schedule: Schedule, step: int) -> tuple[list[int], list[Tensor], list[tuple[float]]]:
    """Microbatches of different lengths, some of them empty: rows, inputs, arguments."""
    rows = [(3, 0, 5, 1)[(i + step) % 4] for i in range(schedule.microbatches)]
    generator = torch.Generator().manual_seed(step)
    inputs = [torch.randn(n, 4, generator=generator, dtype=torch.float64) for n in rows]
    return rows, inputs, [(1.0 + i,) for i in range(schedule.microbatches)]


def summed(output: Tensor, target: Tensor) -> Tensor:
    return (output**2).sum() / target


def executed_ragged(schedule: Schedule, group: dist.ProcessGroup, rank: int) -> dict[str, Any]:
    stages = {stage: Scaled(stage) for stage in schedule.stages_of(rank)}
    taken: list[Action] = []
    runner = PipelineRunner(schedule, stages, summed, group, deadline_s=60, reduction="sum", before=taken.append)
    losses = []
    for step in range(2):
        rows, inputs, arguments = ragged(schedule, step)
        targets = [torch.tensor(float(i + 1)) for i in range(schedule.microbatches)]
        done = runner.step(inputs, targets, arguments, rows)
        losses += [] if done.losses is None else [done.losses]
    return {
        "gradients": {s: [p.grad for p in block.parameters()] for s, block in stages.items()},
        "losses": losses,
        "taken": taken == [*schedule.actions[rank]] * 2,
    }


def summed_gradients(schedule: Schedule) -> tuple[list[list[Tensor]], list[Tensor]]:
    """One process, both steps."""
    model = [Scaled(stage) for stage in range(schedule.stages)]
    losses = []
    for step in range(2):
        values = []
        for number, (x, (factor,)) in enumerate(zip(*ragged(schedule, step)[1:], strict=True)):
            for block in model:
                x = block(x, factor)
            values.append(summed(x, torch.tensor(float(number + 1))))
        torch.stack(values).sum().backward()
        losses.append(torch.stack(values).detach())
    return [[p.grad for p in block.parameters()] for block in model], losses


# ---------------------------------------------------------------------------------------------------- processes


def executed_times(schedule: Schedule, group: dist.ProcessGroup) -> list[dict[str, Tensor]]:
    """Steps until one is about as fast as simulated."""
    pipeline, found = SleepingPipeline(schedule, group), []
    for _ in range(MOST_STEPS):
        found.append(pipeline.step())
        end = found[-1]["ends"].max()
        dist.all_reduce(end, dist.ReduceOp.MAX, group)
        if float(end) < 1.08 * simulated_seconds(schedule):
            break
    return found


def refused(make: Callable[[], object]) -> str:
    try:
        make()
    except (PlanError, PeerError) as error:
        return str(error)
    return "nothing was refused"


def refusals(group: dist.ProcessGroup, others: Sequence[dist.ProcessGroup], rank: int) -> dict[str, str]:
    """What is said to a caller who gives something wrong; the others are groups that break by it."""
    good = gpipe(2, 3)
    stages = {rank: nn.Linear(2, 2)}
    blocked = Schedule(
        "blocked", 1, (0, 1), tuple(own[::-1] if r else own for r, own in enumerate(gpipe(2, 1).actions))
    )
    runner = PipelineRunner(good, stages, squared, group)
    some = [torch.zeros(1, 2)] * 2
    said = {
        "stage": refused(lambda: PipelineRunner(good, {}, squared, group)),
        "surplus": refused(lambda: PipelineRunner(good, {0: nn.Identity(), 1: nn.Identity()}, squared, group)),
        "ranks": refused(lambda: PipelineRunner(gpipe(3, 3), stages, squared, group)),
        "check": refused(lambda: PipelineRunner(blocked, stages, squared, group)),
        "deadline": refused(lambda: PipelineRunner(good, stages, squared, group, deadline_s=math.inf)),
        "microbatches": refused(lambda: runner.step(some, some)),
        "arguments": refused(lambda: runner.step(some + some[:1], some + some[:1], [()])),
    }
    batch = [torch.zeros(1, 2)] * (3 + rank)
    differs = PipelineRunner(gpipe(2, 3 + rank), stages, squared, others[0], deadline_s=10)
    said["schedule"] = refused(lambda: differs.step(batch, batch))
    said["again"] = refused(lambda: differs.step(batch, batch))
    batch = [torch.zeros(1, 2)] * 3
    counted = PipelineRunner(good, stages, squared, others[1], deadline_s=10)
    said["rows"] = refused(lambda: counted.step(batch, batch, rows=[1, 1, 1 + rank]))
    wrong, uneven = (
        PipelineRunner(good, {rank: nn.Linear(2, 2)}, squared, other, deadline_s=4) for other in others[2:]
    )
    with ThreadPoolExecutor(2) as pool:  # the rank that is not at fault waits for as long as it may, for both at once
        waits = {
            "wrong rows": pool.submit(refused, lambda: wrong.step(batch, batch, rows=[1, 1, 2])),
            "shape": pool.submit(refused, lambda: uneven.step([torch.zeros(1 + (i == 2), 2) for i in range(3)], batch)),
        }
        return said | {name: wait.result() for name, wait in waits.items()}


def run_all(rank: int, folder: str) -> dict[str, Any]:
    """Everything that four processes do, two of them or all."""
    groups = {size: dist.new_group(list(members)) for size, members in MEMBERS.items()}
    others = [dist.new_group(list(MEMBERS[2])) for _ in range(4)]
    found: dict[str, Any] = {}
    for size, members in MEMBERS.items():
        if rank not in members:
            continue
        group, own = groups[size], members.index(rank)
        for schedule in all_of(size):
            found[f"gradients {size} {schedule.name}"] = executed_gradients(schedule, group, own)
        for schedule in families(size):
            found[f"ragged {size} {schedule.name}"] = executed_ragged(schedule, group, own)
        for schedule in families(size):
            found[f"times {size} {schedule.name}"] = executed_times(schedule, group)
        if size == 2:
            found["refusals"] = refusals(group, others, own)
    dist.barrier()
    return found


class Fails(nn.Module):
    """A stage whose third forward does something that none should."""

    def __init__(self, act: Callable[[], None]) -> None:
        super().__init__()
        self.linear, self.act, self.forwards = nn.Linear(2, 2), act, 0

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        if self.forwards == 3:
            self.act()
        return self.linear(x)


def run_into_faults(rank: int, folder: str) -> dict[str, Any]:
    """Rank 1 of three hangs until the others have given up, in a group of its own, and then dies."""
    group = dist.new_group([0, 1, 2])
    acts = {"hangs": dist.barrier, "dies": lambda: os.kill(os.getpid(), signal.SIGKILL)}
    deadlines = {"hangs": 5.0, "dies": 30.0}
    found: dict[str, Any] = {}
    for name, act in acts.items():
        stage = Fails(act) if rank == 1 else nn.Linear(2, 2)
        runner = PipelineRunner(
            one_forward_one_backward(3, 6),
            {rank: stage},
            squared,
            group if name == "hangs" else None,
            deadline_s=deadlines[name],
        )
        batch = [torch.ones(1, 2)] * 6
        start = time.perf_counter()
        try:
            runner.step(batch, batch)
        except PeerError as error:
            facts = {"peer": error.peer, "stage": error.stage, "microbatch": error.microbatch, "text": str(error)}
            found[name] = {**facts, "seconds": time.perf_counter() - start, "deadline": deadlines[name]}
        if rank != 1 and name == "hangs":
            dist.barrier()
    return found


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """What four processes found."""
    return found_by(4, tmp_path_factory.mktemp("pipeline"), run_all, 300)


def of_ranks(executed: dict[int, dict[str, Any]], size: int, key: str) -> list[Any]:
    return [executed[member][key] for member in MEMBERS[size]]


@needs_gloo
@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("size", MEMBERS)
def test_gradients_are_those_of_one_process_bit_for_bit(executed: dict[int, dict[str, Any]], size: int) -> None:
    """Bitwise: those of whole backwards of single microbatches, added in the order of each stage's B and W.

    Within rounding: those of all microbatches as one batch.
    """
    for schedule in all_of(size):
        found = of_ranks(executed, size, f"gradients {size} {schedule.name}")
        expected = expected_gradients(schedule)
        gradients = {stage: grads for one in found for stage, grads in one["gradients"].items()}
        assert sorted(gradients) == list(range(schedule.stages))
        for stage, grads in gradients.items():
            for one, other in zip(grads, expected["gradients"][stage], strict=True):
                assert torch.equal(one, other), f"{schedule.name}, stage {stage}"
        flat = [one for stage in range(schedule.stages) for one in gradients[stage]]
        for one, other in zip(flat, mean_gradients(schedule), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
        for rank, one in enumerate(found):
            if rank == schedule.rank_of[-1]:
                assert all(torch.equal(a, b) for a, b in zip(one["losses"], expected["losses"], strict=True))
            else:
                assert one["losses"] == []
        first = found[schedule.rank_of[0]]["input_gradients"]
        assert all(torch.equal(a, b) for a, b in zip(first, expected["input_gradients"], strict=True)), schedule.name


@needs_gloo
@pytest.mark.slow
@pytest.mark.parametrize("size", MEMBERS)
def test_microbatches_may_differ_in_length_and_bring_arguments(executed: dict[int, dict[str, Any]], size: int) -> None:
    for schedule in families(size):
        gradients, losses = summed_gradients(schedule)
        found = of_ranks(executed, size, f"ragged {size} {schedule.name}")
        for rank, one in enumerate(found):
            assert one["taken"], (schedule.name, rank)
            for stage, own in one["gradients"].items():
                torch.testing.assert_close(own, gradients[stage], rtol=1e-12, atol=1e-12)
        last = found[schedule.rank_of[-1]]
        torch.testing.assert_close(last["losses"], losses, rtol=1e-12, atol=1e-12)


@needs_gloo
@pytest.mark.slow
@pytest.mark.parametrize("size", MEMBERS)
def test_activations_are_held_as_long_as_the_schedule_says(executed: dict[int, dict[str, Any]], size: int) -> None:
    for schedule in all_of(size):
        for rank, one in enumerate(of_ranks(executed, size, f"gradients {size} {schedule.name}")):
            held = [
                after - 1
                for action, after in zip(schedule.actions[rank], schedule.live(rank), strict=True)
                if action.kind is Kind.FORWARD
            ]
            assert one["counts"] == held * 2, f"{schedule.name}, rank {rank}"
            assert one["left"] == 0


@needs_gloo
@pytest.mark.slow
@pytest.mark.parametrize("size", MEMBERS)
def test_a_step_takes_as_long_as_simulated(executed: dict[int, dict[str, Any]], size: int) -> None:
    """Emulated: computation sleeps, and the ranks' middle is throttled."""
    rows = []
    for schedule in families(size):
        found = of_ranks(executed, size, f"times {size} {schedule.name}")
        steps = timelines(schedule, found)
        for step in steps:
            for starts, ends in zip(step.starts, step.ends, strict=True):
                assert (np.diff(np.stack([starts, ends], 1).ravel()) >= 0).all()
        rows.append((schedule.name, simulated_seconds(schedule), min(step.seconds for step in steps)))
    for name, simulated, measured in rows:
        ratio = measured / simulated
        print(f"{size} ranks  {name:24s} simulated {simulated:.3f} s  measured {measured:.3f} s  {ratio:.3f}")
    for name, simulated, measured in rows:
        assert 0.98 * simulated < measured < (1 + MOST_ADDED) * simulated, name
    for one, simulated, measured in rows:
        for other, longer, measured_longer in rows:
            if longer > (1 + MOST_ADDED) * simulated:
                assert measured_longer > measured, f"{other} against {one}"


@needs_gloo
@pytest.mark.slow
def test_what_does_not_fit_is_refused_by_name(executed: dict[int, dict[str, Any]]) -> None:
    first, last = of_ranks(executed, 2, "refusals")
    assert "stage 0 of rank 0 is missing" in first["stage"]
    assert "stage 1 of rank 1 is missing" in last["stage"]
    assert "stage 1 is not on rank 0" in first["surplus"]
    assert "wait for one another" in last["check"]
    assert "deadline_s" in last["deadline"]
    assert "inputs: 2 microbatches, the schedule has 3" in first["microbatches"]
    assert "targets: 2 microbatches, the schedule has 3" in last["microbatches"]
    assert "arguments: 1 microbatches, the schedule has 3" in first["arguments"]
    assert "stage 0: microbatch 2 gives [1, 2], its rows were to be 2" in first["wrong rows"]
    assert "stage 0: microbatch 2 gives [2, 2] of torch.float32, before it was [1, 2]" in first["shape"]
    assert "rank 0 did not give activations of stage 0, microbatch " in last["shape"]  # 2, or what 0 had not yet sent
    for rank, said in enumerate((first, last)):
        assert "is for 3 ranks, the group has 2" in said["ranks"]
        assert f"rank {1 - rank} has another" in said["schedule"]
        assert f"rank {1 - rank} has another, or other rows of microbatches" in said["rows"]
        assert "an earlier step failed" in said["again"]


@needs_gloo
@pytest.mark.slow
def test_a_peer_that_hangs_or_dies_is_named_in_time(tmp_path: Path) -> None:
    ended = run_processes(3, tmp_path, run_into_faults, 120)
    assert ended.codes == [0, -signal.SIGKILL, 0], ended.said
    for rank in (0, 2):
        for name in ("hangs", "dies"):
            found = ended.found[rank][name]
            assert found["peer"] == 1
            assert found["seconds"] < found["deadline"] + 15
            assert "rank 1" in found["text"]
            assert f"stage {found['stage']}, microbatch {found['microbatch']}" in found["text"]
    hung = {rank: ended.found[rank]["hangs"] for rank in (0, 2)}
    assert "did not give the gradient of stage 1, microbatch 1 within 5 s" in hung[0]["text"]
    assert "did not give activations of stage 1, microbatch 2 within 5 s" in hung[2]["text"]
    assert all("broke" in ended.found[rank]["dies"]["text"] for rank in (0, 2))
    assert ended.found[2]["dies"]["seconds"] < 20


# ---------------------------------------------------------------------------------------------------- in this process


@pytest.mark.parametrize("ranks", MEMBERS)
def test_messages_of_a_pair_are_in_the_order_that_the_simulator_has(ranks: int) -> None:
    for schedule in [*families(ranks), *map(partial(scattered, ranks, 3 * ranks, 5), range(20))]:
        schedule.check()
        expected: dict[tuple[int, int], list[tuple[str, int, int]]] = {}
        for message in simulate(without_marks(schedule), StageSeconds.equal(schedule.stages, 1, 2)).messages:
            kind, stage, microbatch = message.action[:3]
            letter = "F" if kind is Kind.FORWARD else "B"
            expected.setdefault((message.source, message.target), []).append((letter, stage, microbatch))
        assert {pair: [(m.kind.value, *m[1:]) for m in ms] for pair, ms in _messages(schedule).items()} == expected


class Tied(nn.Module):
    """One weight in two places, and one that is only scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.other, self.scale = nn.Linear(6, 6), nn.Linear(6, 6), nn.Parameter(torch.rand(6))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.linear(x)) * self.scale
        return self.linear(self.other(x)).tanh() + self.scale.exp()


class Pieces(nn.Module):
    """A node with several outputs, of which one is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.each = nn.Linear(6, 6), nn.Linear(2, 6)

    def forward(self, x: Tensor) -> Tensor:
        first, second, _ = self.linear(x).split(2, -1)
        return self.each(first * second)


class Blind(nn.Module):
    """A stage whose output does not depend on its input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(torch.ones_like(x))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.GRU(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)[0]


STAGES: dict[str, Callable[[], nn.Module]] = {
    "two layers": lambda: nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 6)),
    "transformer": lambda: nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0),
    "convolution": lambda: nn.Sequential(nn.Conv1d(5, 3, 3, padding=1), nn.BatchNorm1d(3), nn.GELU()),
    "recurrent": Recurrent,
    "tied": Tied,
    "pieces": Pieces,
    "blind": Blind,
    "identity": nn.Identity,
    "no weights": nn.Tanh,
    "frozen": lambda: nn.Sequential(nn.Linear(6, 6).requires_grad_(False), nn.Tanh(), nn.Linear(6, 6)),
}


def parts_of_a_backward(
    module: nn.Module, whole: bool, needs_input: bool = True
) -> tuple[list[Tensor | None], list[int]]:
    """Gradients of the input and the weights, and the floating-point operations of each part."""
    forward = ForwardState(torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64))
    forward.input.requires_grad_(needs_input)
    forward.output = module(forward.input)
    gradient = torch.randn(forward.output.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    module.zero_grad()
    flops = []
    with FlopCounterMode(display=False) as counter:
        if whole:
            given = forward.backward(gradient)
            flops.append(counter.get_total_flops())
        else:
            left, given = split_backward(forward, gradient)
            assert all(parameter.grad is None for parameter in module.parameters())
            flops.append(counter.get_total_flops())
            left.weights()
            flops.append(counter.get_total_flops() - flops[0])
    return [given, *(parameter.grad for parameter in module.parameters())], flops


@pytest.mark.parametrize("needs_input", [True, False])
@pytest.mark.parametrize("name", STAGES)
def test_a_backward_in_two_parts_is_the_whole_bit_for_bit(name: str, needs_input: bool) -> None:
    torch.manual_seed(0)
    module = STAGES[name]().double()
    expected, _ = parts_of_a_backward(module, True, needs_input)
    found, _ = parts_of_a_backward(module, False, needs_input)
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)


@pytest.mark.parametrize("name", ["two layers", "transformer", "frozen"])
def test_a_backward_in_two_parts_computes_nothing_twice(name: str) -> None:
    module = STAGES[name]().double()
    _, whole = parts_of_a_backward(module, True)
    _, parts = parts_of_a_backward(module, False)
    assert sum(parts) == sum(whole) > 0
    if name == "two layers":
        assert parts[0] == parts[1]


@pytest.mark.parametrize("wrong", [{"latency_s": -1.0}, {"latency_s": math.nan}, {"bytes_per_s": 0.0}])
def test_a_throttle_that_is_none_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(PlanError, match="throttle"):
        Throttle(**wrong)


def test_without_a_process_group_there_is_no_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)  # other tests of this process may have one
    with pytest.raises(CordilleraError, match="init_process_group"):
        PipelineRunner(gpipe(1, 1), {0: nn.Identity()}, squared)


def test_a_message_that_fails_gives_the_reason_of_the_transport() -> None:
    class Failing(dist.Work):
        def wait(self, *arguments: Any) -> bool:
            raise TransportError("rank 1 is at barrier")

    mail = Mail(gpipe(2, 1), 0, None, None, 9.0, Ledger())
    with pytest.raises(PeerError, match="rank 1 is at barrier, when rank 1 was to give the gradient of stage 1"):
        mail._wait(Failing(), 1, "give", MailMessage(Kind.BACKWARD, 1, 0))


def test_recordings_of_other_ranks_are_refused() -> None:
    one: Sequence[Recording] = [Recording(0, np.zeros(2), np.zeros(2))]
    with pytest.raises(PlanError, match="2 actions of rank 1"):
        recorded_timeline(gpipe(2, 1), one)
