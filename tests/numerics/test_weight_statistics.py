"""Followed weights give back the distribution from which they were drawn."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cordillera.errors import NumericsError
from cordillera.numerics.dispatch import weight_statistics
from cordillera.numerics.dispatch.weight_statistics import WeightStatistics

ROWS, COLUMNS = 24, 16


def covariance(size: int, seed: int) -> Tensor:
    mixing = torch.randn(size, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return mixing @ mixing.T / size + 0.1 * torch.eye(size, dtype=torch.float64)


def drawn(count: int, mean: Tensor) -> tuple[list[Tensor], Tensor]:
    left, right = covariance(ROWS, 1), covariance(COLUMNS, 2)
    noise = torch.randn(count, ROWS, COLUMNS, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    weights = mean + torch.linalg.cholesky(left) @ noise @ torch.linalg.cholesky(right).T
    return list(weights.float()), torch.kron(right, left)


@pytest.mark.parametrize("centred", [True, False])
def test_flip_flop_recovers_the_covariance(centred: bool) -> None:
    mean = torch.full((ROWS, COLUMNS), 3.0 if centred else 0.0)
    weights, exact = drawn(1500, mean)
    found = WeightStatistics(ROWS, COLUMNS, centred=centred)
    for weight in weights:
        assert found.update(weight)
    kept = torch.kron(found.of_columns, found.of_rows)
    assert torch.linalg.norm(kept - exact) / torch.linalg.norm(exact) < 0.12
    assert float(found.of_rows.diagonal().mean()) == pytest.approx(1.0)
    assert torch.equal(found.of_rows, found.of_rows.T)
    sampled = found.sample(4000, torch.Generator().manual_seed(4)).double()
    assert float((sampled.mean(0) - found.mean).abs().max()) < 0.15
    spread = (sampled - sampled.mean(0)).flatten(1)
    second = spread.T @ spread / len(spread)
    # Row-major order of a matrix makes kron(U, V) of kron(V, U).
    of_samples = torch.kron(found.of_rows, found.of_columns)
    assert torch.linalg.norm(second - of_samples) / torch.linalg.norm(of_samples) < 0.35


def test_a_stop_and_a_resumption_change_nothing() -> None:
    weights, _ = drawn(30, torch.zeros(ROWS, COLUMNS))
    whole, first = WeightStatistics(ROWS, COLUMNS), WeightStatistics(ROWS, COLUMNS)
    for weight in weights:
        whole.update(weight)
    for weight in weights[:11]:
        first.update(weight)
    second = WeightStatistics.from_state_dict(first.state_dict())
    for weight in weights[11:]:
        second.update(weight)
    for name in ("mean", "of_rows", "of_columns"):
        assert torch.equal(getattr(whole, name), getattr(second, name))


def test_a_weight_that_never_moves_is_drawn_as_it_is() -> None:
    weight = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0))
    found = WeightStatistics(ROWS, COLUMNS)
    for _ in range(3):
        found.update(weight)
    assert torch.isfinite(found.sample(3)).all()
    torch.testing.assert_close(found.mean, weight)


def test_large_sides_are_kept_as_diagonals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_statistics, "LARGEST", 16)
    weights, _ = drawn(600, torch.zeros(ROWS, COLUMNS))
    found = WeightStatistics(ROWS, COLUMNS, centred=False)
    for weight in weights:
        found.update(weight)
    assert found.of_rows.shape == (ROWS,)
    assert found.of_columns.shape == (COLUMNS, COLUMNS)
    exact = torch.stack(weights).double().square().mean((0, 2))
    kept = found.of_rows * found.of_columns.diagonal().mean()
    assert torch.linalg.norm(kept - exact) / torch.linalg.norm(exact) < 0.2
    draws = found.sample(400, torch.Generator().manual_seed(1)).double().square().mean((0, 2))
    assert torch.linalg.norm(draws - kept) / torch.linalg.norm(kept) < 0.1


def test_what_is_no_number_is_left_out_and_mistakes_are_refused() -> None:
    found = WeightStatistics(2, 3)
    with pytest.raises(NumericsError, match="more than one step"):
        found.sample(1)
    assert not found.update(torch.tensor([[1.0, float("nan"), 0.0], [0.0, 0.0, 0.0]]))
    assert (found.count, found.skipped) == (0, 1)
    with pytest.raises(NumericsError, match="not"):
        found.update(torch.zeros(3, 2))
    with pytest.raises(NumericsError, match="below 1"):
        WeightStatistics(2, 3, momentum=1.0)
    with pytest.raises(NumericsError, match="0 x 3"):
        WeightStatistics(0, 3)
