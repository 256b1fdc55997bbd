"""Attention over ranks against dense attention in one place, bytes against formulas, ranks that disagree or die.

The processes are started once for all cases and write what they found to files; the tests read those.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from cordillera.distributed.context.attention import ContextParallelAttention, ContextParallelConfig
from cordillera.distributed.context.shard_plan import SHARDINGS, DocumentChunk, ShardPlan, contiguous, per_document
from cordillera.distributed.ledger import Ledger, Traffic
from cordillera.errors import PeerError, PlanError
from tests.distributed.processes import needs_gloo, run_processes

SIZES = (1, 2, 3, 4)
TRANSPORTS = ("all_gather", "ring")
HEADS, KV_HEADS, DIM = 4, 2, 8
HANGS_S = 3.0  # that others wait for a rank that hangs


@dataclass(frozen=True)
class Case:
    """A plan with the seed of its tensors."""

    name: str
    plan: ShardPlan
    seed: int

    def tensors(self) -> list[Tensor]:
        """q, k, v and the gradient of the output, of all tokens."""
        generator = torch.Generator().manual_seed(self.seed)
        total = sum(self.plan.lengths)
        return [
            torch.randn(total, n, DIM, generator=generator, dtype=torch.float64)
            for n in (HEADS, KV_HEADS, KV_HEADS, HEADS)
        ]


def scattered(lengths: list[int], ranks: int, seed: int) -> ShardPlan:
    """Chunks of any size on any rank, in any order, as no constructor makes them."""
    draw = random.Random(seed)
    held: list[list[DocumentChunk]] = [[] for _ in range(ranks)]
    for document, length in enumerate(lengths):
        bounds = sorted({0, length, *(draw.randrange(length + 1) for _ in range(5))})
        for start, stop in pairwise(bounds):
            held[draw.randrange(ranks)].append(DocumentChunk(document, start, stop))
    for chunks in held:
        draw.shuffle(chunks)
    return ShardPlan("scattered", tuple(lengths), tuple(map(tuple, held)))


def cases(size: int) -> list[Case]:
    mixes = [[1], [], [0, 3, 0], [64], [40, 1, 7, 0, 100, 2, 2]]
    draw = random.Random(size)
    mixes += [[draw.choice([0, 1, 3, 17, 90]) for _ in range(draw.randrange(1, 9))] for _ in range(2)]
    found = [
        Case(f"{mode} {mix}", make(mix, size), len(mix))
        for mix in mixes
        for mode, make in SHARDINGS.items()
        if mode != "adaptive"
    ]
    return found + [Case(f"scattered {mix}", scattered(mix, size, 7), 3) for mix in mixes]


def dense(case: Case) -> list[Tensor]:
    """Output and gradients, a document at a time, by softmax."""
    q, k, v, dout = case.tensors()
    leaves = [x.requires_grad_() for x in (q, k, v)]
    outs = [leaves[0][:0]]
    for first, last in zip(case.plan.offsets[:-1], case.plan.offsets[1:], strict=True):
        own = [x[first:last].repeat_interleave(HEADS // x.shape[1], 1) for x in leaves]
        scores = torch.einsum("qhd,khd->hqk", own[0], own[1]) / DIM**0.5
        future = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
        outs.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(future, -torch.inf).softmax(-1), own[2]))
    out = torch.cat(outs)
    grads = torch.autograd.grad(out, leaves, dout, allow_unused=True, materialize_grads=True)
    return [out.detach(), *grads]


def run_all(rank: int, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for size in SIZES:
        group = dist.new_group(list(range(size)))
        if rank >= size:
            continue
        for transport in TRANSPORTS:
            attention = ContextParallelAttention(ContextParallelConfig(transport=transport), group)
            for case in cases(size):
                attention.use(case.plan)
                attention.ledger.clear()
                q, k, v, dout = (attention.shard(x) for x in case.tensors())
                leaves = [x.requires_grad_() for x in (q, k, v)]
                out = attention(*leaves, torch.from_numpy(case.plan.offsets))
                out.backward(dout)
                found[f"{size} {transport} {case.name}"] = {
                    "tensors": [out.detach(), *(x.grad for x in leaves)],
                    "bytes": {name: one.bytes for name, one in attention.ledger.traffic.items()},
                    "messages": {name: one.messages for name, one in attention.ledger.traffic.items()},
                }
    found["half"] = run_in_half_precision(rank)
    found["refusals"] = run_into_refusals(rank)
    found["faults"] = run_into_faults(rank, lambda: torch.save(found, f"{folder}/{rank}.pt"))
    return found


def half_precision_case() -> Case:
    return Case("half", per_document([300, 20, 181], 4), 5)


def run_in_half_precision(rank: int) -> dict[str, Any]:
    found = {}
    for transport in TRANSPORTS:
        attention = ContextParallelAttention(ContextParallelConfig(transport=transport))
        case = half_precision_case()
        attention.use(case.plan)
        q, k, v, dout = (attention.shard(x).bfloat16() for x in case.tensors())
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = attention(*leaves)
        out.backward(dout)
        found[transport] = [out.detach(), *(x.grad for x in leaves)]
    return found


def run_into_refusals(rank: int) -> dict[str, str]:
    attention = ContextParallelAttention(ContextParallelConfig())
    plan = per_document([8, 9], 4)
    row = torch.zeros(plan.tokens[rank], 1, 8)

    def differ() -> None:
        attention.use(contiguous([17], 4) if rank == 2 else plan)

    def other_offsets() -> None:
        attention.use(plan)
        attention(row, row, row, torch.tensor([0, 9, 17]))

    def old_offsets() -> None:
        offsets = torch.from_numpy(plan.offsets)
        attention.use(plan)
        attention(row, row, row, offsets)
        attention.use(per_document([9, 8], 4))
        row_now = torch.zeros(attention.plan.tokens[rank], 1, 8)
        attention(row_now, row_now, row_now, offsets)

    wrong = {
        "no plan": lambda: attention(row, row, row),
        "size": lambda: attention.use(per_document([8], 3)),
        "differ": differ,
        "offsets": other_offsets,
        "old offsets": old_offsets,
        "tokens": lambda: attention(row[1:], row[1:], row[1:]),
        "shard": lambda: attention.shard(torch.zeros(3)),
    }
    said = {}
    for name, act in wrong.items():
        try:
            act()
        except PlanError as error:
            said[name] = str(error)
    return said


def run_into_faults(rank: int, leave: Callable[[], None]) -> dict[str, Any]:
    """Rank 3 hangs before the backward of a ring, until the others give up, then dies, after it left what it found."""
    found: dict[str, Any] = {}
    for name, deadline in (("hangs", HANGS_S), ("dies", 30.0)):
        config = ContextParallelConfig(transport="ring", deadline_s=30.0)
        attention = ContextParallelAttention(config, dist.new_group(list(range(4))))
        attention.use(per_document([64], 4))
        q, k, v, dout = (attention.shard(x) for x in Case("", attention.plan, 0).tensors())
        out = attention(q.requires_grad_(), k, v)
        attention._links.deadline_s = deadline  # from here on: a busy machine has time to come to it
        dist.barrier()
        start = time.perf_counter()
        try:
            if rank == 3 and name == "hangs":
                dist.barrier()  # which the others reach once they have given up
            elif rank == 3:
                leave()
                os.kill(os.getpid(), signal.SIGKILL)
            out.backward(dout)
        except PeerError as error:
            found[name] = {"peer": error.peer, "text": str(error), "seconds": time.perf_counter() - start}
        if rank < 3 and name == "hangs":
            dist.barrier()
    return found


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """What four processes found."""
    ended = run_processes(4, tmp_path_factory.mktemp("context"), run_all, 120)
    assert ended.codes == [0, 0, 0, -signal.SIGKILL], ended.said
    return ended.found


def together(plan: ShardPlan, parts: list[list[Tensor]]) -> list[Tensor]:
    """Ranks' tensors in document order."""
    restore = torch.from_numpy(plan.restore)
    return [torch.cat(list(tensors))[restore] for tensors in zip(*parts, strict=True)]


@needs_gloo
@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("size", SIZES)
def test_attention_over_ranks_is_dense_attention(
    executed: dict[int, dict[str, Any]], size: int, transport: str
) -> None:
    """Output and all gradients, for every way to shard and ranks without tokens."""
    without_tokens = 0
    for case in cases(size):
        parts = [executed[rank][f"{size} {transport} {case.name}"]["tensors"] for rank in range(size)]
        assert tuple(len(part[0]) for part in parts) == case.plan.tokens
        without_tokens += case.plan.tokens.count(0)
        for one, other in zip(together(case.plan, parts), dense(case), strict=True):
            torch.testing.assert_close(
                one, other, rtol=1e-10, atol=1e-10, msg=lambda said, case=case: f"{case.name}: {said}"
            )
    assert without_tokens


@needs_gloo
@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
def test_bytes_are_those_of_the_formulas(executed: dict[int, dict[str, Any]], size: int) -> None:
    """All-gather: the longest part to each other rank, and back. Ring: what a rank holds at each step, there and again,
    and the gradients once more, all the way home. Nothing is sent of no tokens."""
    row = 2 * KV_HEADS * DIM * 8
    for case in cases(size):
        tokens = case.plan.tokens
        for rank in range(size):
            gathered = executed[rank][f"{size} all_gather {case.name}"]
            longest = max(tokens) * row * (size - 1)
            expected = {"keys and values": longest, "their gradients": longest}
            assert gathered["bytes"] == (expected if longest else {})
            if size == 1:
                continue
            passed = executed[rank][f"{size} ring {case.name}"]
            held = [tokens[(rank - step) % size] for step in range(size)]
            names = ("keys and values", "keys and values again", "their gradients")
            assert passed["bytes"] == dict(
                zip(names, (sum(held[:-1]) * row, sum(held[:-1]) * row, sum(held) * row), strict=True)
            )
            some = [count > 0 for count in held]
            assert passed["messages"] == dict(zip(names, (sum(some[:-1]), sum(some[:-1]), sum(some)), strict=True))


@needs_gloo
@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_half_precision_is_as_exact_as_its_inputs(executed: dict[int, dict[str, Any]], transport: str) -> None:
    case = half_precision_case()
    parts = [executed[rank]["half"][transport] for rank in range(4)]
    step = torch.finfo(torch.bfloat16).eps
    for one, other in zip(together(case.plan, parts), dense(case), strict=True):
        assert one.dtype == torch.bfloat16
        assert float((one.double() - other).abs().max()) < 4 * step * float(other.abs().max())


@needs_gloo
@pytest.mark.slow
def test_what_does_not_fit_is_refused_on_every_rank(executed: dict[int, dict[str, Any]]) -> None:
    for rank in range(4):
        said = executed[rank]["refusals"]
        assert "use(plan)" in said["no plan"]
        assert "is for 3 ranks, the group has 4" in said["size"]
        assert f"rank {rank} and rank {0 if rank == 2 else 2} have different ones" in said["differ"]
        assert "are not the plan's" in said["offsets"]
        assert "are not the plan's" in said["old offsets"]
        assert f"tokens for rank {rank}" in said["tokens"]
        assert "3 tokens, the plan has 17" in said["shard"]


@needs_gloo
@pytest.mark.slow
def test_a_rank_that_hangs_or_dies_is_noticed_in_time(executed: dict[int, dict[str, Any]]) -> None:
    """By its neighbours, who name it, and by those who wait for them."""
    for rank in range(3):
        hung, died = (executed[rank]["faults"][name] for name in ("hangs", "dies"))
        assert hung["seconds"] < 20
        assert "did not exchange" in hung["text"] or "broke" in hung["text"]  # by a neighbour that gave up before
        assert "broke" in died["text"]
        assert died["seconds"] < 20
    first = executed[0]["faults"]["hangs"]
    assert first["peer"] == 3
    assert first["seconds"] > 0.9 * HANGS_S
    assert f"rank 3 did not exchange keys and values again within {HANGS_S:g} s" in first["text"]


def test_without_a_process_group_there_is_no_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    with pytest.raises(PlanError, match="init_process_group"):
        ContextParallelAttention(ContextParallelConfig())


def test_a_ledger_adds_up_by_name() -> None:
    ledger = Ledger()
    ledger.record("a", Traffic(1, 10, 2, 0.5, 0.25))
    ledger.record("b", Traffic(1, 1, 1, 1.0, 0.0))
    ledger.record("a", Traffic(1, 10, 2, 0.5, 0.25))
    assert ledger.traffic["a"] == Traffic(2, 20, 4, 1.0, 0.5)
    assert ledger.total() == Traffic(3, 21, 5, 2.0, 0.5)
    assert str(ledger).splitlines()[0] == "a: 2 calls, 4 messages, 20 bytes, 1.000 s of which 0.500 s exposed"
    ledger.clear()
    assert ledger.total() == Traffic()
