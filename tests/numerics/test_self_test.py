"""The start-up test of casts: it knows this torch, and a torch that casts otherwise does not pass it."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from cordillera.errors import NumericsError
from cordillera.numerics.formats import cast_checks as module
from cordillera.numerics.formats.cast_checks import cast_facts, self_test
from cordillera.numerics.formats.formats import FORMATS
from cordillera.numerics.formats.rounding import Rounding, round_to


def test_this_torch_is_known() -> None:
    facts = self_test()
    assert facts.bf16_exact
    assert facts.fp16_exact
    assert facts.torch == torch.__version__
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if version >= (2, 12):
        assert (facts.e4m3fn_overflow, facts.e4m3fn_infinity) == (448.0, 448.0)
    else:
        assert math.isnan(facts.e4m3fn_overflow)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bf16_exact": False}, "bfloat16 does not round to nearest even"),
        ({"fp16_exact": False}, "float16 does not round to nearest even"),
        ({"e4m3fn_infinity": 3.0}, "e4m3fn_infinity gives 3.0, neither NaN nor 448.0"),
        ({"e5m2_overflow": math.nan}, "e5m2_overflow gives nan"),
    ],
)
def test_casts_that_no_known_torch_makes_are_refused(
    change: dict[str, float], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = dataclasses.replace(cast_facts(), **change)  # type: ignore[arg-type]
    monkeypatch.setattr(module, "cast_facts", lambda device: facts)
    with pytest.raises(NumericsError, match=message):
        self_test()


def test_a_cast_that_flushes_subnormal_numbers_is_noticed_and_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = dataclasses.replace(cast_facts(), bf16_exact=False, fp16_exact=False)
    x = torch.cat([torch.randn(1000), torch.randn(1000) * 1e-39, torch.randn(1000) * 1e-7])
    native = [round_to(x, FORMATS[name]) for name in ("bf16", "fp16")]
    monkeypatch.setattr("cordillera.numerics.formats.rounding.cast_facts", lambda device: wrong)
    for name, expected in zip(("bf16", "fp16"), native, strict=True):
        assert torch.equal(round_to(x, FORMATS[name], Rounding.nearest_even), expected)
