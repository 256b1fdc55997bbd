"""What is kept of weights between steps: masters and halves lose nothing, the format alone loses small updates."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cordillera.errors import CheckpointError, NumericsError
from cordillera.numerics.emulation.emulation import EmulationConfig
from cordillera.numerics.emulation.weight_storage import WeightStorage, join, split
from cordillera.numerics.formats.formats import FORMATS
from cordillera.numerics.formats.rounding import Rounding, random_bits, round_to

Optimizer = Callable[[list[Tensor]], torch.optim.Optimizer]


def test_split_and_join_keep_every_bit() -> None:
    bits = random_bits(0, torch.arange(1 << 20)).to(torch.int32)
    ends = torch.tensor(
        [0, -(1 << 31), 0x7F800000, 0x7F800001, 0x7FC00000, -1, 0x0000FFFF, 0x00010000], dtype=torch.int32
    )
    x = torch.cat([bits, ends]).view(torch.float32)
    upper, lower = split(x)
    assert (upper.dtype, lower.dtype) == (torch.bfloat16, torch.int16)
    assert torch.equal(join(upper, lower).view(torch.int32), x.view(torch.int32))
    numbers = ~x.isnan()
    assert torch.equal(upper.float()[numbers], round_to(x, FORMATS["bf16"], Rounding.toward_zero)[numbers])


@settings(max_examples=50)
@given(st.integers(-(2**31), 2**31 - 1))
def test_split_and_join_keep_any_pattern(pattern: int) -> None:
    x = torch.tensor([[pattern]], dtype=torch.int32).view(torch.float32)
    assert int(join(*split(x)).view(torch.int32)) == pattern


def train(config: EmulationConfig | None, optimizer: Optimizer, steps: int = 60) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients that do not depend on the weights; returns weights in full precision and those computed with."""
    weights = [torch.randn(20, 8, generator=torch.Generator().manual_seed(i)) for i in range(2)]
    update = optimizer(weights)
    storage = None if config is None else WeightStorage(config, {str(i): weight for i, weight in enumerate(weights)})
    for step in range(steps):
        generator = torch.Generator().manual_seed(100 + step)
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=generator)
        if storage is not None:
            storage.before_update()
        update.step()
        if storage is not None:
            storage.after_update(step + 1)
    full = weights if storage is None else [storage.full(str(i)) for i in range(2)]
    return full, weights


OPTIMIZERS: dict[str, Optimizer] = {
    "sgd": lambda weights: torch.optim.SGD(weights, lr=1e-3),
    "momentum": lambda weights: torch.optim.SGD(weights, lr=1e-3, momentum=0.9),
    "adamw": lambda weights: torch.optim.AdamW(weights, lr=1e-3, weight_decay=0.1),
}


@pytest.mark.parametrize("policy", ["split", "master"])
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_halves_and_masters_train_as_float32_bit_for_bit(optimizer: str, policy: str) -> None:
    expected, _ = train(None, OPTIMIZERS[optimizer])
    full, computed_with = train(EmulationConfig(weights=policy), OPTIMIZERS[optimizer])
    rounding = Rounding.toward_zero if policy == "split" else Rounding.nearest_even
    for mine, theirs, used in zip(full, expected, computed_with, strict=True):
        assert torch.equal(mine.view(torch.int32), theirs.view(torch.int32))
        assert torch.equal(used, round_to(theirs, FORMATS["bf16"], rounding))


def test_updates_smaller_than_half_a_step_are_lost_without_a_master_unless_drawn() -> None:
    # half of bfloat16's step below 1 is 2**-9, about four times the update
    def after(rounding: str, weights: str = "none") -> Tensor:
        weight = torch.ones(1000, 1)
        config = EmulationConfig(weights=weights, weight_rounding=rounding)
        storage = WeightStorage(config, {"w": weight})
        for step in range(400):
            storage.before_update()
            weight -= 5e-4
            storage.after_update(step + 1)
        return weight

    assert torch.equal(after("nearest_even"), torch.ones(1000, 1))
    assert float(after("nearest_even", "master")[0]) == pytest.approx(0.8, abs=2.0**-8)
    assert float(after("stochastic").mean()) == pytest.approx(0.8, abs=4e-3)
    assert float(after("toward_zero")[0]) < 0.2  # an update of any size takes a whole step


@pytest.mark.parametrize("policy", ["master", "none", "split"])
@pytest.mark.parametrize("rounding", ["nearest_even", "stochastic"])
def test_updating_some_rows_is_updating_all_with_the_others_unchanged(policy: str, rounding: str) -> None:
    config = EmulationConfig(weights=policy, weight_rounding=rounding)
    whole, part = (torch.randn(50, 6, generator=torch.Generator().manual_seed(0)) for _ in range(2))
    storages = [WeightStorage(config, {"table": weight}) for weight in (whole, part)]
    for step in range(5):
        rows = torch.randperm(50, generator=torch.Generator().manual_seed(step))[:9]
        change = torch.randn(9, 6, generator=torch.Generator().manual_seed(step)) * 0.01
        for weight, storage, some in zip((whole, part), storages, (None, {"table": rows}), strict=True):
            storage.before_update(some)
            weight[rows] += change
            storage.after_update(step + 1, some)
    if policy == "master" and rounding == "stochastic":
        # every copy of the whole is drawn anew, that of a row only when it changes
        assert torch.equal(storages[0].full("table"), storages[1].full("table"))
    else:
        assert torch.equal(whole, part)
        assert torch.equal(storages[0].full("table"), storages[1].full("table"))


@pytest.mark.parametrize("policy", ["master", "none", "split"])
def test_what_is_kept_can_be_saved_and_taken_over(policy: str) -> None:
    config = EmulationConfig(weights=policy)
    first, second = torch.randn(4, 4), torch.randn(4, 4)
    saved = WeightStorage(config, {"w": first})
    other = WeightStorage(config, {"w": second})
    other.load_state_dict(saved.state_dict())
    second.copy_(first)
    assert torch.equal(other.full("w"), saved.full("w"))
    if policy != "none":
        with pytest.raises(CheckpointError, match="w: what is kept"):
            other.load_state_dict({})


def test_halves_of_other_formats_and_other_dtypes_are_refused() -> None:
    with pytest.raises(NumericsError, match="halves of float32 are bf16, not fp16"):
        WeightStorage(EmulationConfig(format="fp16", weights="split"), {})
    with pytest.raises(NumericsError, match=r"w: must be float32, is torch\.float64"):
        WeightStorage(EmulationConfig(), {"w": torch.ones(2, 2, dtype=torch.float64)})
