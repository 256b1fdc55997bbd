"""Tests of the default precision: what the machine multiplies quickly."""

from __future__ import annotations

import pytest
import torch

from cordillera import recipe as recipes
from cordillera.numerics.formats.precision import precision_of_machine
from cordillera.training.ranking import config as training


@pytest.mark.parametrize(("gpu", "cpu", "expected"), [(0, 0, "fp32"), (1, 0, "bf16"), (0, 1, "bf16"), (1, 1, "bf16")])
def test_bfloat16_is_the_default_where_it_is_multiplied(
    gpu: bool, cpu: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: cpu)
    assert precision_of_machine.__wrapped__() == expected


@pytest.mark.parametrize("found", ["bf16", "fp32"])
def test_a_written_recipe_holds_the_precision_that_was_found(found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    field = training.TrainingConfig.model_fields["precision"]
    assert field.default_factory is precision_of_machine
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: found == "bf16")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    precision_of_machine.cache_clear()
    try:
        loaded = recipes.load("movielens-dcn")
        assert f'precision = "{found}"' in recipes.dump(loaded)
        assert recipes.load("movielens-dcn", ["training.precision=bf16"]).training.precision == "bf16"
    finally:
        precision_of_machine.cache_clear()
