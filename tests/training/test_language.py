"""The engine in one process: rates, and what a step leaves as it is."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cordillera.distributed.mesh import ParallelConfig, ProcessMesh
from cordillera.models.language.llama import LlamaConfig
from cordillera.training.language.engine import (
    IGNORED,
    LanguageConfig,
    LanguageEngine,
    PackedTokens,
    next_tokens,
)
from tests.distributed.processes import found_by, needs_gloo

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
    return found_by(1, folder, run_rates, 120)[0]


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@needs_gloo
def test_a_rate_is_a_factor_on_the_learning_rate(rates: dict[str, Any]) -> None:
    assert equal(rates["halved"], rates["half"])
    assert not equal(rates["whole"], rates["half"])


@needs_gloo
def test_a_rate_of_zero_changes_no_weight(rates: dict[str, Any]) -> None:
    assert equal(rates["none"], rates["drawn"])


@pytest.mark.parametrize("lengths", [[5], [1, 1, 1], [0, 3, 0, 0, 4, 1, 0], [2, 3]])
def test_labels_are_the_successors_within_documents(lengths: list[int]) -> None:
    tokens = list(range(10, 10 + sum(lengths)))
    labels, begin = [], 0
    for length in lengths:
        document = tokens[begin : begin + length]
        labels += [*document[1:], IGNORED] if document else []
        begin += length
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    assert next_tokens(torch.tensor(tokens), offsets).tolist() == labels


@pytest.mark.parametrize(
    ("tokens", "offsets", "labels", "problem"),
    [
        ([0, 31, 5], [0, 1, 3], None, None),
        ([0, 31, 5], [0, 1, 1, 3], [31, IGNORED, 0], None),
        ([], [0], None, None),
        ([0, 1], [], None, "do not rise from 0 to its 2 tokens"),
        ([0, 1], [1, 2], None, "do not rise from 0"),
        ([0, 1], [0, 1], None, "do not rise from 0 to its 2 tokens"),
        ([0, 1, 2], [0, 2, 1, 3], None, "do not rise"),
        ([0, 1], [0, 2], [1], "1 labels for 2 tokens"),
        ([3, 32, 0], [0, 3], None, "token 32 is not in the vocabulary of 32"),
        ([3, -1, 40], [0, 3], None, "token -1 is not"),
        ([3, 1, 0], [0, 3], [1, 32, 0], "label 32 is not"),
        ([3, 1, 0], [0, 3], [1, IGNORED, -1], "label -1 is not"),
        ([3, 1], [0, 2], [IGNORED, IGNORED], None),
    ],
)
def test_microbatches_that_cannot_be_trained_on_are_named(
    tokens: list[int], offsets: list[int], labels: list[int] | None, problem: str | None
) -> None:
    given = PackedTokens(
        torch.tensor(tokens, dtype=torch.int64),
        torch.tensor(offsets, dtype=torch.int64),
        None if labels is None else torch.tensor(labels),
    )
    found = LanguageEngine._problem(types.SimpleNamespace(model=MODEL), given)  # type: ignore[arg-type]
    assert found is None if problem is None else problem in str(found)
