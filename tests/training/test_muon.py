"""Muon: orthogonal updates of matrices, AdamW for the rest."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from cordillera.distributed.mesh import ParallelConfig
from cordillera.errors import PlanError
from cordillera.models.language.llama import Llama, LlamaConfig
from cordillera.training.language.engine import LanguageConfig, check_optimizer
from cordillera.training.optimizers import Muon, build_adamw, orthogonal


@pytest.mark.parametrize("shape", [(5, 5), (3, 40), (64, 16), (1, 7)])
def test_singular_values_of_an_update_are_about_one(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    matrix = torch.randn(shape, dtype=torch.float64) * 1e-3
    found = orthogonal(matrix)
    assert found.shape == shape
    values = torch.linalg.svdvals(found)
    assert 0.4 < float(values.min()) <= float(values.max()) < 1.4
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    nearest = left @ right
    cosine = float((found * nearest).sum() / found.norm() / nearest.norm())
    assert cosine > 0.97
    assert not orthogonal(torch.zeros(shape)).any()


def make(kind: str) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 6))


def step(model: nn.Module, optimizers: list[torch.optim.Optimizer], seed: int) -> None:
    torch.manual_seed(seed)
    loss = model(torch.randn(30, 12)).square().mean()
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def test_steps_are_those_of_torch() -> None:
    """Beside torch.optim.Muon, which iterates in bfloat16, and torch's AdamW for the biases."""
    settings = {"betas": (0.9, 0.95), "eps": 1e-8}
    ours, theirs = make("ours"), make("theirs")
    own = build_adamw(ours, learning_rate=0.01, weight_decay=0.1, muon=True, **settings)  # type: ignore[arg-type]
    assert isinstance(own, Muon)
    matrices = [weight for weight in theirs.parameters() if weight.dim() == 2]
    vectors = [weight for weight in theirs.parameters() if weight.dim() < 2]
    others = [
        torch.optim.Muon(matrices, lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(vectors, lr=0.01, weight_decay=0.0, **settings),  # type: ignore[arg-type]
    ]
    before = [weight.detach().clone() for weight in ours.parameters()]
    for turn in range(3):
        step(ours, [own], turn)
        step(theirs, others, turn)
    for start, mine, other in zip(before, ours.parameters(), theirs.parameters(), strict=True):
        moved = (other - start).detach().norm()
        assert float((mine - other).detach().norm() / moved) < 0.02


def test_embedding_and_head_are_left_to_adamw() -> None:
    torch.manual_seed(0)
    found = {}
    for muon in (False, True):
        model = Llama(LlamaConfig(layers=1, hidden=16, heads=2, kv_heads=2, ffn=24, vocabulary=32))
        model.init_weights()
        settings = {"learning_rate": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
        optimizer = build_adamw(model, muon=muon, **settings)  # type: ignore[arg-type]
        model(torch.arange(9), torch.tensor([0, 9])).square().sum().backward()
        optimizer.step()
        found[muon] = dict(model.named_parameters())
    differing = {name for name, one in found[True].items() if not torch.equal(one, found[False][name])}
    assert differing == {name for name, one in found[True].items() if name.startswith("layers") and one.dim() == 2}


def test_muon_is_refused_where_matrices_are_cut() -> None:
    check_optimizer(LanguageConfig(optimizer="muon"), ParallelConfig())
    with pytest.raises(PlanError, match="muon needs whole matrices, the mesh has 2 processes"):
        check_optimizer(LanguageConfig(optimizer="muon"), ParallelConfig(shard=2))
