"""``cordillera bench post-training`` with few steps: it runs and writes what the docs quote."""

from __future__ import annotations

from pathlib import Path

import post_training
import pytest

from tests.benchmarks.programs import part_of

pytestmark = pytest.mark.slow


def test_problems_that_are_solved_are_counted_before_and_after(tmp_path: Path) -> None:
    found = part_of(post_training, "groups", tmp_path)
    assert [one["step"] for one in found["grpo"]["evaluations"]] == [0, 2]
    assert all(0 <= one["solved"] <= 1 for one in found["grpo"]["evaluations"])
