"""Products in FP8 with a scale for each row: rounding, the bound on scales, rows that are no numbers."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cordillera.errors import DataError, NumericsError
from cordillera.models.language.llama import PRESETS, Llama
from cordillera.models.language.moe import ExpertsConfig
from cordillera.numerics.formats.formats import FORMATS
from cordillera.numerics.formats.rounding import Rounding, round_to
from cordillera.numerics.quantization.fp8_rows import BOUND, LARGEST, Fp8Linear, fp8_rows
from cordillera.serving.language.generation import fp8_feed_forward


def _rows(seed: int, count: int, width: int, scale: float) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(count, width, generator=generator)


@settings(max_examples=40)
@given(
    seed=st.integers(0, 999),
    scale=st.sampled_from([1e-30, 1e-3, 1.0, 1e3, 1e30]),
    bound=st.sampled_from([None, 0.5, BOUND]),
)
def test_rows_are_rounded_as_the_format_says(seed: int, scale: float, bound: float | None) -> None:
    x = _rows(seed, 5, 32, scale)
    payload, scales = fp8_rows(x, bound)
    for row, own, of_row in zip(x, payload, scales, strict=True):
        largest = float(row.abs().max())
        wanted = min(largest, bound or math.inf) / LARGEST
        assert float(of_row) == pytest.approx(wanted, rel=1e-6)
        scaled = (row / of_row).clamp(-LARGEST, LARGEST)
        assert torch.equal(own.float(), round_to(scaled, FORMATS["e4m3fn"], Rounding.nearest_even))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_is_that_of_the_rounded_numbers(dtype: torch.dtype) -> None:
    x, weight = _rows(1, 7, 64, 1.0).to(dtype), _rows(2, 48, 64, 0.1)
    layer = Fp8Linear(weight)
    payload, scale = fp8_rows(x.float(), BOUND)
    expected = (payload.double() * scale.double()) @ (layer.weight.double() * layer.scale.double()).T
    found = layer(x)
    assert found.dtype == dtype
    error = (found.double() - expected).abs().max() / expected.abs().max()
    assert error < (1e-6 if dtype == torch.float32 else 2**-8)
    assert layer(x[:0]).shape == (0, 48)


def test_the_bound_keeps_the_digits_of_what_stands_beside_an_outlier() -> None:
    x = _rows(3, 4, 256, 0.02)
    x[:, 17] = 1e4
    weight = _rows(4, 32, 256, 0.1)
    weight[:, 17] = 0  # so that only the other numbers count
    exact = x @ weight.T
    errors = {bound: float((Fp8Linear(weight, bound)(x) - exact).norm() / exact.norm()) for bound in (None, BOUND)}
    assert errors[BOUND] < 0.2
    assert errors[None] > 3 * errors[BOUND]


def test_rows_that_are_no_numbers_stay_so_and_rows_of_zeros_are_zero() -> None:
    x, layer = _rows(5, 4, 32, 1.0), Fp8Linear(_rows(6, 16, 32, 1.0))
    x[0, 3], x[1, 0], x[2] = math.nan, -math.inf, 0.0
    found = layer(x)
    assert found[:2].isnan().all()
    assert torch.equal(found[2], torch.zeros(16))
    assert found[3].isfinite().all()
    with pytest.raises(NumericsError):
        Fp8Linear(torch.full((16, 32), math.nan))


def test_the_first_and_the_last_block_and_attention_stay_as_they_are() -> None:
    model = fp8_feed_forward(Llama(PRESETS["llama-debug"]))
    found = [name for name, module in model.named_modules() if isinstance(module, Fp8Linear)]
    assert found == [f"layers.{n}.feed_forward.{part}" for n in (1, 2) for part in ("gate", "up", "down")]
    shape = PRESETS["llama-debug"].model_copy(update={"experts": ExpertsConfig(count=4)})
    with pytest.raises(DataError, match="experts are not computed in FP8"):
        fp8_feed_forward(Llama(shape))
    with pytest.raises(DataError, match="is never used in the first and the last block"):
        fp8_feed_forward(Llama(PRESETS["llama-debug"].model_copy(update={"layers": 2})))
