"""Activations between cut matrices, whole on every rank or cut along tokens, against sums in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from cordillera.distributed.collectives import Collectives
from cordillera.distributed.ledger import Ledger
from cordillera.distributed.mesh import ParallelConfig, ProcessMesh
from cordillera.distributed.tensor_parallel import TensorRanks
from cordillera.models.language.llama import LlamaConfig
from cordillera.models.language.parallelize import parallelize
from cordillera.models.language.stages import cut_model
from tests.distributed.processes import found_by, needs_gloo

RANKS, WIDTH = 3, 5
MODEL = LlamaConfig(layers=6, hidden=24, heads=3, kv_heads=3, ffn=12, vocabulary=9, context=128)
LONG = 90  # tokens
MEMORY: dict[str, dict[str, Any]] = {
    "whole": {"recompute": "full"},
    "cut": {"recompute": "full", "sequence": True},
}
TOKENS = range(8)  # fewer than ranks, as many, more, and not divisible by them


def seeded(*seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(sum(100**i * number for i, number in enumerate(seed)))


def term(rank: int, tokens: int) -> Tensor:
    """What a rank's matrices give of all tokens."""
    return torch.randn(tokens, WIDTH, generator=seeded(rank, tokens), dtype=torch.float64)


def weighting(rank: int, tokens: int) -> Tensor:
    """The gradient that reaches what a rank's next matrices read."""
    return torch.randn(tokens, WIDTH, generator=seeded(rank, tokens, 1), dtype=torch.float64)


def work(rank: int, folder: str) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (RANKS,))
    found: dict[str, Any] = {}
    for cuts_sequence in (False, True):
        for tokens in TOKENS:
            ledger = Ledger()
            ranks = TensorRanks(mesh, Collectives(dist.group.WORLD, ledger, 30.0), cuts_sequence)
            given = term(rank, tokens).requires_grad_()
            between = ranks.leave(given)
            entered = ranks.enter(between, tokens)
            (gradient,) = torch.autograd.grad(entered, given, weighting(rank, tokens))
            sent = ledger.total().bytes
            half = ranks.enter(ranks.leave(term(rank, tokens).bfloat16()), tokens)
            found[f"{cuts_sequence} {tokens}"] = {
                "rows": len(between),
                "padding": float(between[max(0, tokens - rank * len(between)) :].abs().sum()),
                "entered": entered.detach(),
                "gradient": gradient,
                "bytes": sent,
                "half": half,
            }
    for name, options in MEMORY.items():
        found[name] = kept(ParallelConfig(tensor=RANKS, deadline_s=30, **options))
    return found


def kept(parallel: ParallelConfig) -> int:
    """Bytes of activations that a forward keeps for its backward."""
    stage = cut_model(MODEL, 1, [0])[0]
    parallelize(stage, ProcessMesh(parallel))
    stage.init_weights()
    bytes_of: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter) and tensor.dim() == 2 and tensor.shape[1] == MODEL.hidden:
            bytes_of[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    tokens = torch.arange(LONG) % MODEL.vocabulary
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        held = stage(tokens, torch.tensor([0, LONG]), None, tokens)
    assert held.isfinite()
    return sum(bytes_of.values())


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    return found_by(RANKS, tmp_path_factory.mktemp("tensor"), work, 120)


@needs_gloo
@pytest.mark.parametrize("cuts_sequence", [False, True])
@pytest.mark.parametrize("tokens", TOKENS)
def test_what_is_left_and_entered_again_is_the_sum(
    executed: dict[int, dict[str, Any]], cuts_sequence: bool, tokens: int
) -> None:
    total = sum((term(rank, tokens) for rank in range(RANKS)), torch.zeros(tokens, WIDTH, dtype=torch.float64))
    gradient = sum((weighting(rank, tokens) for rank in range(RANKS)), torch.zeros_like(total))
    for found in (executed[rank][f"{cuts_sequence} {tokens}"] for rank in range(RANKS)):
        torch.testing.assert_close(found["entered"], total)
        torch.testing.assert_close(found["gradient"], gradient)
        torch.testing.assert_close(found["half"], total.bfloat16(), rtol=0.02, atol=0.05)


@needs_gloo
@pytest.mark.parametrize("tokens", TOKENS)
def test_a_cut_sequence_is_cut_evenly_and_sends_as_much(executed: dict[int, dict[str, Any]], tokens: int) -> None:
    for rank in range(RANKS):
        whole, cut = (executed[rank][f"{cuts} {tokens}"] for cuts in (False, True))
        assert whole["rows"] == tokens
        assert cut["rows"] == -(-tokens // RANKS)
        assert cut["padding"] == 0.0
        # an all-reduce is a reduce-scatter and an all-gather: one of each, forwards and backwards
        assert cut["bytes"] == 4 * (RANKS - 1) * cut["rows"] * WIDTH * 8
        assert whole["bytes"] == 2 * (2 * (RANKS - 1) * tokens * WIDTH * 8 // RANKS)


@needs_gloo
def test_a_cut_sequence_keeps_a_part_of_each_block(executed: dict[int, dict[str, Any]]) -> None:
    of_tokens = MODEL.hidden * 4  # bytes of a row
    for found in executed.values():
        saved = found["whole"] - found["cut"]
        # what each block is given
        assert saved >= MODEL.layers * of_tokens * (LONG - LONG // RANKS)
