"""Alarms come where means have moved, and seldom where they have not."""

from __future__ import annotations

import math

import pytest
import torch

from cordillera.errors import NumericsError
from cordillera.numerics.drift import Moments, alarms

NAMES = [f"n{i}" for i in range(20)]


def drawn(samples: int, seed: int) -> torch.Tensor:
    """Skewed and heavy-tailed, as norms of embeddings are."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(samples, len(NAMES), generator=generator, dtype=torch.float64)
    return (0.5 * normal).exp() * torch.logspace(-3, 3, len(NAMES), dtype=torch.float64)


def moments(*batches: torch.Tensor) -> Moments:
    found = Moments(NAMES)
    for batch in batches:
        found.update(batch)
    return found


def test_moments_are_those_of_all_samples() -> None:
    rows = drawn(700, 0)
    found = Moments.from_json(moments(*rows.split(90)).to_json())
    torch.testing.assert_close(found.seen.mean, rows.mean(0), rtol=1e-12, atol=0)
    torch.testing.assert_close(found.seen.variance(), rows.var(0), rtol=1e-10, atol=0)


def test_samples_of_the_same_distribution_raise_no_alarm() -> None:
    before = moments(drawn(16_000, 1))
    false = sum(bool(alarms(before, moments(drawn(1000, seed)))) for seed in range(2, 302))
    assert false / 300 < 0.01


@pytest.mark.parametrize("number", range(0, 20, 5))
def test_a_number_four_times_as_large_raises_an_alarm_at_once(number: int) -> None:
    before, live = moments(drawn(16_000, 1)), drawn(64, 2)
    live[:, number] *= 4
    found = alarms(before, moments(live))
    assert found[0].name == f"n{number}"
    assert found[0].now / found[0].before == pytest.approx(4, rel=0.5)
    assert "standard errors" in str(found[0])


def test_samples_that_are_lost_are_counted_and_raise_an_alarm_where_they_are_more() -> None:
    live = drawn(1000, 3)
    live[::50, 4] = math.nan
    now = moments(live)
    assert (now.count, now.lost) == (980, 20)
    assert [one.name for one in alarms(moments(drawn(16_000, 1)), now)] == ["share of lost samples"]
    also = drawn(16_000, 1)
    also[::50, 4] = math.nan
    assert alarms(moments(also), now) == []


def test_what_never_varied_and_mistakes() -> None:
    constant, moved = torch.ones(100, len(NAMES)), torch.ones(100, len(NAMES))
    moved[:, 7] = 2
    assert alarms(moments(constant), moments(constant)) == []
    assert [one.name for one in alarms(moments(constant), moments(moved))] == ["n7"]
    with pytest.raises(NumericsError, match="0 samples"):
        alarms(moments(constant), Moments(NAMES))
    with pytest.raises(NumericsError, match="not those of calibration"):
        alarms(moments(constant), Moments(["other"]))
