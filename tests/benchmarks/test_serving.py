"""``cordillera bench serving`` with few requests: it runs and writes what the docs quote."""

from __future__ import annotations

from pathlib import Path

import pytest

import serving
from tests.benchmarks.programs import part_of
from tests.benchmarks.test_speculation import SMOLLM2, needs_prompts

pytestmark = pytest.mark.slow

needs_weights = pytest.mark.skipif(
    not SMOLLM2.is_file(), reason="the weights are not here (cordillera data get smollm2)"
)


def test_scores_of_requests_are_timed_beside_single_ones(tmp_path: Path) -> None:
    found = part_of(serving, "scores", tmp_path)
    assert list(found["contenders"]) == ["single", "batched", "http", "http, unbatched"]
    assert all(one["requests"] > 0 for one in found["contenders"].values())


def test_microbatches_of_a_pipeline_give_the_texts_of_one_process(tmp_path: Path) -> None:
    found = part_of(serving, "pipeline", tmp_path)  # which compares them; times of a few tokens mean nothing
    assert found["times"].keys() == {"two", "two of half"}


@needs_weights
@needs_prompts
def test_distributions_in_fp8_are_compared(tmp_path: Path) -> None:
    found = part_of(serving, "fp8", tmp_path)
    assert all(0 < one["divergence"] < 1 for one in found["results"].values())
    assert found["planted"]["bounded"] < found["planted"]["unbounded"]
