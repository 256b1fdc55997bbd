"""Products of a few rows against float64, and the layer that uses them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from cordillera.kernels.dense import few_rows
from cordillera.kernels.dense.few_rows import MOST_ROWS, FewRowsLinear, few_rows_linear
from tests.kernels.conftest import by


def _drawn(rows: int, inner: int, outputs: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, weight = (torch.randn(size, inner, generator=generator).bfloat16() for size in (rows, outputs))
    return x, weight


WAYS = ["amx", "tiles", "loops"]


@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=40)
@given(
    rows=st.integers(0, 9) | st.sampled_from([15, 16, 17, 31, 32, 33, 40]),
    inner=st.integers(1, 200) | st.sampled_from([32, 64, 160]),
    outputs=st.integers(0, 90) | st.sampled_from([16, 48]),
    seed=st.integers(0, 99),
)
def test_products_are_rounded_once(way: str, rows: int, inner: int, outputs: int, seed: int) -> None:
    x, weight = _drawn(rows, inner, outputs, seed)
    exact = x.double() @ weight.double().T
    with by(way, few_rows):
        error = (few_rows_linear(x, weight).double() - exact).abs()
    # half a unit of bfloat16, and what float32 sums may lose
    lost = (x.double().abs() @ weight.double().abs().T) * inner * 2**-24
    assert bool((error <= exact.abs() * 2**-8 + lost).all())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("rows", "inner", "outputs"),
    [(3, 577, 131), (7, 576, 131), (MOST_ROWS, 64, 131), (17, 96, 48), (MOST_ROWS, 64, 144)],
)
def test_results_do_not_depend_on_threads_on_neighbours_or_on_addresses(
    threads, way: str, rows: int, inner: int, outputs: int
) -> None:
    with by(way, few_rows):
        _check_bits(threads, rows, inner, outputs)


def _check_bits(threads, rows: int, inner: int, outputs: int) -> None:
    x, weight = _drawn(rows, inner, outputs)
    threads(1)
    alone = torch.cat([few_rows_linear(row[None], weight) for row in x])
    shifted = torch.empty(weight.numel() + 1, dtype=torch.bfloat16)[1:].view_as(weight).copy_(weight)
    for count in (1, 2):
        threads(count)
        assert torch.equal(few_rows_linear(x, weight), alone)
        assert torch.equal(few_rows_linear(x, shifted), alone)
        assert torch.get_num_threads() == count


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("inner", "outputs"), [(40, 8), (64, 16)])
def test_nan_and_infinity_are_passed_on(way: str, inner: int, outputs: int) -> None:
    x, weight = _drawn(2, inner, outputs)
    x[0, 3], weight[2, 5] = torch.nan, torch.inf
    with by(way, few_rows):
        found = few_rows_linear(x, weight)
    assert bool(found[0].isnan().all())
    assert bool(found[1, 2].isinf())
    assert bool(found[1, [0, 1, 3, 4, 5, 6, 7]].isfinite().all())


@pytest.mark.parametrize("rows", [1, MOST_ROWS, MOST_ROWS + 1])
def test_the_layer_equals_torchs_and_shares_its_weight(rows: int) -> None:
    x, weight = _drawn(rows, 64, 48)
    theirs = nn.Linear(64, 48, bias=False, dtype=torch.bfloat16)
    theirs.weight.data.copy_(weight)
    ours = FewRowsLinear(theirs.weight)
    assert ours.weight is theirs.weight
    with torch.inference_mode():
        torch.testing.assert_close(ours(x), theirs(x), rtol=2**-7, atol=1e-2)


def test_gradients_and_other_dtypes_are_left_to_torch() -> None:
    x, weight = _drawn(2, 16, 8)
    layer = FewRowsLinear(nn.Parameter(weight))
    layer(x).sum().backward()
    assert layer.weight.grad is not None
    x, weight = (x.float() * 8).round(), (weight.float() * 8).round()  # whole numbers add in any order
    wide = FewRowsLinear(nn.Parameter(weight))
    with torch.no_grad():
        assert torch.equal(wide(x), x @ weight.T)


@pytest.mark.parametrize("rows", [33, 40, 64])
def test_rows_that_fill_up_a_multiple_change_nothing(rows: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(size, generator=generator).bfloat16() for size in ((rows, 96), (48, 96)))
    x[1, 2] = torch.inf
    found = few_rows.many_rows_linear(x, weight)
    assert found.shape == (rows, 48)
    assert not found[1].isfinite().any()
    kept = [0, *range(2, rows)]
    expected = x[kept].double() @ weight.double().T
    torch.testing.assert_close(found[kept].double(), expected, rtol=2**-7, atol=2**-5)
