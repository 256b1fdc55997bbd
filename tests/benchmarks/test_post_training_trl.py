"""Preferences beside TRL's trainer."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.peer, pytest.mark.slow]


@pytest.mark.parametrize("seed", [0, 1])
def test_losses_rewards_and_gradients_of_preferences_are_trl_s(seed: int) -> None:
    pytest.importorskip("trl", reason="trl is not installed")
    from _post_training_trl import compare

    found = compare(seed)
    assert found["loss"] < 1e-6
    assert max(found["rewards"], found["margins"]) < 3e-6  # of sums over tokens, in 32 bits there
    assert max(found["gradients"], found["gradients_with_nll"]) < 5e-6
    assert found["loss_with_nll"] < 1e-5
