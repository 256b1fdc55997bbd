"""``cordillera bench jagged-attention`` with short sequences: all ways compute the same, and bytes are counted."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jagged_attention
import pytest
import torch
from _history_steps import CASES, Case, Steps, batches_of, recipe_of
from jagged_attention import Contender, Workload

from tests.benchmarks.programs import part_of


@pytest.mark.parametrize("kind", ["uniform", "short", "pareto", "full"])
def test_lengths_are_those_of_their_distribution(kind: str) -> None:
    lengths = Workload(kind, 4000, 1, 16, 64).lengths()
    assert 1 <= int(lengths.min()) <= int(lengths.max()) <= 64
    expected = {"uniform": 32.5, "short": 16.5, "full": 64.0}
    if kind in expected:
        assert float(lengths.float().mean()) == pytest.approx(expected[kind], rel=0.05)
    else:
        assert float((lengths < 8).float().mean()) == pytest.approx(1 - 2**-1.1, abs=0.03)


@pytest.mark.slow
def test_all_ways_compute_the_same_and_so_do_their_gradients() -> None:
    contender = Contender(Workload("uniform", 3, 2, 16, 20))
    ours = contender.both(Contender.ours)
    for way in (Contender.dense, Contender.padded):
        for mine, theirs in zip(ours, contender.both(way), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_bytes_that_are_kept_are_those_of_the_output(tmp_path: Path) -> None:
    content = part_of(jagged_attention, "memory", tmp_path)
    (row,) = content["rows"]
    tokens = int(Workload("uniform", 3, 1, 16, 40).lengths().sum())
    assert row["bytes"]["ours"]["kept"] == 4 * tokens * (16 + 1)
    assert row["bytes"]["dense"]["kept"] > row["bytes"]["padded"]["kept"] > row["bytes"]["ours"]["kept"]


@pytest.mark.slow
@pytest.mark.parametrize("part", ["speed", "window"])
def test_times_are_compared(part: str, tmp_path: Path) -> None:
    content = part_of(jagged_attention, part, tmp_path)
    for row in content["rows"]:
        for kind in ("forward", "both") if part == "speed" else (None,):
            found = (row[kind] if kind else row)["times_faster"]
            assert all(ratio["median"] > 0 for ratio in found.values())


@pytest.mark.slow
def test_models_that_read_histories_are_compared_with_those_that_sum_them(tmp_path: Path) -> None:
    content = part_of(jagged_attention, "quality", tmp_path)
    assert [row["model"] for row in content["rows"]] == ["hstu", "target-attention", "dnn", "dlrm"]
    assert set(content["rows"][0]["change"]) == {"dnn", "dlrm"}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES[:4], ids=lambda case: f"{case.model} {case.window} {case.longest}")
def test_padded_models_summarise_histories_as_ragged_ones_do(case: Case, tmp_path: Path) -> None:
    recipe = recipe_of(dataclasses.replace(case, longest=40), tmp_path, quick=True)
    features, (batch, _) = batches_of(recipe.data, 2)
    weights = torch.randn(len(batch), 2, recipe.model.embedding_dim)
    found = {}
    for peer in (None, *case.peers):
        model = Steps(recipe, features, peer).model
        summaries = model.look_up(batch)  # type: ignore[operator]
        parameters = list(model.histories.parameters())  # type: ignore[union-attr]
        found[peer] = summaries, *torch.autograd.grad((summaries * weights).sum(), parameters)
    for peer in case.peers:
        for ours, theirs in zip(found[None], found[peer], strict=True):
            torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_steps_of_padded_models_have_the_same_losses(tmp_path: Path) -> None:
    content = part_of(jagged_attention, "histories", tmp_path)
    assert [row["model"] for row in content["rows"]] == ["hstu", "target-attention"]
    for row in content["rows"]:
        assert 0 < row["fill_squared"] < row["fill"] < 1
        assert max(row["apart"].values()) < 1e-5
        assert all(seconds > 0 for name in row["seconds"] for seconds in row["seconds"][name]["seconds"].values())
