"""Statistics of rows are those of two passes in float64, in any split, order and merge."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cordillera.errors import NumericsError
from cordillera.numerics.dispatch import row_statistics
from cordillera.numerics.dispatch.row_statistics import RowStatistics, Tier, square_root


def rows_of(count: int, features: int, mean: float = 0.0, spread: float = 1.0, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(features, features, generator=generator, dtype=torch.float64) / features**0.5
    drawn = torch.randn(count, features, generator=generator, dtype=torch.float64) @ mixing
    return (mean + spread * drawn).float()


def two_passes(rows: Tensor) -> tuple[Tensor, Tensor]:
    rows = rows.double()
    centred = rows - rows.mean(0)
    return rows.mean(0), centred.T @ centred / (len(rows) - 1)


def error(found: Tensor, exact: Tensor) -> float:
    return float(torch.linalg.norm(found - exact) / torch.linalg.norm(exact))


@given(
    cuts=st.lists(st.integers(0, 300), max_size=6),
    seed=st.integers(0, 2**16),
    ratio=st.sampled_from([0.0, 1.0, 1e3, 1e4]),
)
@settings(max_examples=60)
def test_batches_in_any_split_give_what_two_passes_give(cuts: list[int], seed: int, ratio: float) -> None:
    rows = rows_of(300, 7, mean=ratio, seed=seed)
    bounds = [0, *sorted(cuts), 300]
    found = RowStatistics(7)
    for start, end in itertools.pairwise(bounds):
        found.update(rows[start:end])
    mean, covariance = two_passes(rows)
    assert found.count == 300
    torch.testing.assert_close(found.mean, mean, rtol=1e-9, atol=1e-7)
    assert error(found.covariance(), covariance) < 1e-4


def test_a_small_deviation_beside_a_large_mean_survives() -> None:
    rows = rows_of(20_000, 16, mean=100.0, spread=0.01)
    mean, covariance = two_passes(rows)
    found = RowStatistics(16)
    for part in rows.split(1000):
        found.update(part)
    assert error(found.covariance(), covariance) < 1e-3
    assert error(found.mean, mean) < 1e-9
    naive = rows.T @ rows / len(rows) - torch.outer(rows.mean(0), rows.mean(0))
    assert error(naive.double(), covariance) > 1  # what float32 makes of E[xx] - E[x]E[x]


@given(seed=st.integers(0, 2**16), first=st.integers(0, 200), second=st.integers(0, 200))
@settings(max_examples=40)
def test_merging_is_associative_and_equals_the_whole(seed: int, first: int, second: int) -> None:
    rows = rows_of(200, 5, mean=3.0, seed=seed)
    a, b = sorted((first, second))
    parts = []
    for part in (rows[:a], rows[a:b], rows[b:]):
        one = RowStatistics(5)
        if len(part):
            one.update(part)
        parts.append(one)

    def copy(one: RowStatistics) -> RowStatistics:
        return RowStatistics.from_state_dict(one.state_dict())

    left, right, tail = copy(parts[0]), copy(parts[0]), copy(parts[1])
    left.merge(parts[1])
    left.merge(parts[2])
    tail.merge(parts[2])
    right.merge(tail)
    _, covariance = two_passes(rows)
    for found in (left, right):
        assert found.count == 200
        assert error(found.covariance(), covariance) < 1e-5
    torch.testing.assert_close(left.mean, right.mean, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("tier", list(Tier))
def test_tiers_agree_with_the_whole_where_they_keep_it(tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_statistics, "BLOCK", 8)
    rows = rows_of(500, 20, mean=2.0)
    found = RowStatistics(20, tier)
    for part in rows.split(70):
        found.update(part)
    _, covariance = two_passes(rows)
    torch.testing.assert_close(found.variance(), covariance.diagonal(), rtol=1e-5, atol=0)
    kept = found.covariance()
    torch.testing.assert_close(kept.diagonal(), covariance.diagonal(), rtol=1e-5, atol=0)
    if tier is Tier.blocks:
        for start in range(0, 20, 8):
            block = slice(start, start + 8)
            assert error(kept[block, block], covariance[block, block]) < 1e-5
    elif tier is Tier.diagonal:
        assert torch.equal(kept, torch.diag(found.variance()))
    else:  # a sketch of as many columns as there are features loses nothing
        assert error(kept, covariance) < 1e-4


def test_a_sketch_keeps_what_has_few_directions(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(3)
    factors = torch.randn(2000, 6, generator=generator) @ torch.randn(6, 120, generator=generator)
    rows = factors + 0.01 * torch.randn(2000, 120, generator=generator)
    monkeypatch.setattr(row_statistics, "SKETCH", 16)
    whole, one, other = (RowStatistics(120, Tier.sketch) for _ in range(3))
    whole.update(rows)
    one.update(rows[:900])
    other.update(rows[900:])
    one.merge(other)
    _, covariance = two_passes(rows)
    assert error(whole.covariance(), covariance) < 1e-2
    assert error(one.covariance(), whole.covariance()) < 1e-5
    assert whole.memory_bytes() < 8 * 120 * 120 / 4


def test_memory_is_bounded() -> None:
    assert Tier.of(2048) is Tier.full
    assert RowStatistics(16_384).memory_bytes() <= 8 * (512 * 16_384 + 16_384)
    assert RowStatistics(123_200).memory_bytes() < 8 * 70 * 123_200


@pytest.mark.parametrize("tier", list(Tier))
def test_drawn_rows_have_the_statistics_they_are_drawn_from(tier: Tier) -> None:
    rows = rows_of(3000, 12, mean=5.0)
    found = RowStatistics(12, tier)
    found.update(rows)
    drawn = found.sample(60_000, torch.Generator().manual_seed(1))
    assert drawn.dtype == torch.float32
    mean, covariance = two_passes(drawn)
    assert error(mean, found.mean) < 0.01
    assert error(covariance, found.covariance()) < 0.03
    assert torch.equal(drawn, found.sample(60_000, torch.Generator().manual_seed(1)))


def test_few_rows_are_drawn_with_their_unbiased_covariance() -> None:
    found = RowStatistics(2, Tier.full)
    found.update(rows_of(4, 2))
    _, covariance = two_passes(found.sample(60_000, torch.Generator().manual_seed(1)))
    assert error(covariance, found.covariance()) < 0.03


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_batch_with_a_value_that_is_no_number_is_left_out_and_counted(bad: float) -> None:
    rows = rows_of(50, 4)
    spoilt = rows.clone()
    spoilt[17, 2] = bad
    found, clean = RowStatistics(4), RowStatistics(4)
    clean.update(rows)
    assert found.update(rows)
    assert not found.update(spoilt)
    assert (found.count, found.skipped) == (50, 1)
    assert torch.equal(found.covariance(), clean.covariance())


def test_constant_features_and_few_rows_are_no_trouble() -> None:
    found = RowStatistics(3)
    with pytest.raises(NumericsError, match="of 0 rows"):
        found.sample(1)
    found.update(torch.full((1, 3), 7.0))
    with pytest.raises(NumericsError, match="at least two rows"):
        found.sample(1)
    found.update(torch.full((4, 3), 7.0))
    assert torch.equal(found.sample(5), torch.full((5, 3), 7.0))
    found.update(torch.empty(0, 3))
    assert found.count == 5
    with pytest.raises(NumericsError, match="2 features, not 3"):
        found.update(torch.zeros(4, 2))
    with pytest.raises(NumericsError, match="do not merge"):
        found.merge(RowStatistics(4))


def test_bfloat16_float64_and_strided_rows_are_taken() -> None:
    rows = rows_of(200, 6, mean=1.0)
    for given_rows in (rows.bfloat16(), rows.double(), rows.repeat(1, 2)[:, ::2], rows.T.contiguous().T):
        found = RowStatistics(6)
        found.update(given_rows)
        assert error(found.covariance(), two_passes(given_rows)[1]) < 1e-5


def test_a_singular_covariance_has_a_root() -> None:
    column = torch.arange(1.0, 6.0, dtype=torch.float64)
    covariance = torch.outer(column, column)
    root = square_root(covariance)
    assert error(root @ root.T, covariance) < 1e-6
    indefinite = torch.diag(torch.tensor([1.0, -1e-3], dtype=torch.float64))
    root = square_root(indefinite)
    torch.testing.assert_close(root @ root.T, torch.diag(torch.tensor([1.0, 0.0], dtype=torch.float64)))


@pytest.mark.parametrize("exponent", [39, 41, 120])
def test_large_rows_have_the_statistics_of_small_ones_scaled(exponent: int) -> None:
    rows = rows_of(9000, 4, mean=1.0)  # three chunks in one batch
    mean, covariance = two_passes(rows)
    found = RowStatistics(4)
    assert found.update(rows * 2.0**exponent)
    assert found.count == 9000
    assert error(found.mean * 2.0**-exponent, mean) < 1e-6
    assert error(found.covariance() * 2.0 ** (-2 * exponent), covariance) < 1e-4
    huge = RowStatistics(4)
    assert not huge.update(rows.double() * 2.0**460)
    assert (huge.count, huge.skipped) == (0, 1)
    assert huge.update((rows / rows.abs().max()).double() * 2.0**450)
    assert bool(torch.isfinite(huge.covariance()).all())


def test_damaged_states_are_refused() -> None:
    found = RowStatistics(3)
    found.update(rows_of(10, 3))
    state = found.state_dict()
    for name, value in (("mean", torch.zeros(4)), ("mean", torch.full((3,), torch.nan)), ("scatter", [torch.eye(2)])):
        with pytest.raises(NumericsError, match="finite"):
            RowStatistics.from_state_dict({**state, name: value})
    with pytest.raises(NumericsError, match="0 features"):
        RowStatistics(0)


def test_a_few_directions_are_drawn_with_their_covariances() -> None:
    column = torch.tensor([[1.0, -2.0, 0.0, 3.0]])
    rows = rows_of(4000, 1, seed=2) @ column
    for tier in (Tier.full, Tier.sketch):
        found = RowStatistics(4, tier)
        found.update(rows)
        drawn = found.sample(2000, torch.Generator().manual_seed(0))
        assert float(drawn[:, 2].abs().max()) < 5e-3
        torch.testing.assert_close(drawn[:, 1], -2 * drawn[:, 0], rtol=1e-2, atol=5e-3)
        torch.testing.assert_close(drawn[:, 3], 3 * drawn[:, 0], rtol=1e-2, atol=5e-3)
        assert float(drawn[:, 0].std() / rows[:, 0].std()) == pytest.approx(1, abs=0.06)
