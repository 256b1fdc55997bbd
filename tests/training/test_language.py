"""The engine in one process: rates, and what a step leaves as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cordillera.distributed.mesh import ParallelConfig, ProcessMesh
from cordillera.models.language.llama import LlamaConfig
from cordillera.training.language.engine import LanguageConfig, LanguageEngine, PackedTokens
from tests.distributed.processes import needs_gloo, run_processes

MODEL = LlamaConfig(layers=2, hidden=16, heads=2, kv_heads=1, ffn=24, vocabulary=32, context=64, tied=True)


def iteration(seed: int) -> list[PackedTokens]:
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.tensor([0, 5, 6, 6, 19])
    return [PackedTokens(torch.randint(0, 32, (19,), generator=generator), offsets) for _ in range(2)]


def weights(engine: LanguageEngine) -> list[Tensor]:
    return [parameter.full_tensor().detach().clone() for parameter in engine.stages[0].parameters()]  # type: ignore[attr-defined]


def trained(rates: list[float], **others: Any) -> list[Tensor]:
    """Weights after a step for each rate."""
    engine = LanguageEngine(LanguageConfig(**others), MODEL, ProcessMesh(ParallelConfig()))
    for number, rate in enumerate(rates):
        engine.step(iteration(number), rate)
    return weights(engine)


def run_rates(rank: int, folder: str) -> dict[str, Any]:
    return {
        "drawn": trained([]),
        "none": trained([0.0]),
        "halved": trained([0.5, 0.5], learning_rate=0.02),
        "half": trained([1.0, 1.0], learning_rate=0.01),
        "whole": trained([1.0, 1.0], learning_rate=0.02),
    }


@pytest.fixture(scope="module")
def rates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder: Path = tmp_path_factory.mktemp("rates")
    ended = run_processes(1, folder, run_rates, 60)
    assert ended.codes == [0], ended.said
    return ended.found[0]


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@needs_gloo
def test_a_rate_is_a_factor_on_the_learning_rate(rates: dict[str, Any]) -> None:
    assert equal(rates["halved"], rates["half"])
    assert not equal(rates["whole"], rates["half"])


@needs_gloo
def test_a_rate_of_zero_changes_no_weight(rates: dict[str, Any]) -> None:
    assert equal(rates["none"], rates["drawn"])
