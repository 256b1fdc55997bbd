"""``cordillera bench freescale`` with small batches: both exchanges give the same weights, and shares are as asked."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import freescale
import pytest
import torch

from tests.benchmarks.programs import part_of
from tests.distributed.processes import needs_gloo


@pytest.mark.parametrize("share", [0.0, 0.05, 0.5, 1.0])
def test_batches_share_rows_with_the_one_before(share: float) -> None:
    batches = freescale.batches(share, 1, 5, 200)
    for before, after in pairwise(batches):
        assert after.values.unique().numel() == 200
        assert int(torch.isin(after.values, before.values).sum()) == round(200 * share)
        assert bool((after.values % 2 == 1).all())


@needs_gloo
@pytest.mark.slow
def test_exposed_time_is_compared(tmp_path: Path) -> None:
    content = part_of(freescale, "exposed", tmp_path)
    assert [row["collisions"] for row in content["rows"]] == [0.0, 1.0]
    assert all(row["equal"] for row in content["rows"])


@needs_gloo
@pytest.mark.slow
def test_balanced_steps_have_the_losses_of_others(tmp_path: Path) -> None:
    content = part_of(freescale, "balance", tmp_path)
    assert [row["balance"] for row in content["steps"]] == ["none", "fixed", "variable"]
    assert all(row["loss_difference"] < 1e-6 for row in content["steps"])
    assert all(fewer > 9 for row in content["counted"] for fewer in row["fewer"].values())
