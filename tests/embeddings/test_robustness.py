"""Bad days of rows in few bits: spoilt scales and rows, caches in states that no cache is in, extreme rows."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from cordillera.embeddings.cached_tables import CachedEmbeddingTables
from cordillera.embeddings.quantized_tables import QuantizedTables, encoded
from cordillera.embeddings.row_formats import ROW_FORMATS, decode_rows, encode_rows
from cordillera.embeddings.tables import TablesConfig
from cordillera.errors import CheckpointError, NumericsError
from cordillera.jagged import JaggedBatch

from .test_cached_tables import all_rows, assert_same_state, batch, cached, gradient, steps
from .test_quantized_tables import features as mixed_features
from .test_quantized_tables import trained

FP16 = ROW_FORMATS["fp16"]
HALVES = {"infinity": 0x7C00, "minus infinity": 0xFC00, "NaN": 0x7E00, "a signalling NaN": 0x7C01, "minus NaN": 0xFFFF}


def half(bits: int) -> Tensor:
    """Bits of a float16 as two bytes."""
    return torch.tensor([bits], dtype=torch.int32).to(torch.uint16).view(torch.uint8)


def test_every_pattern_of_float16_is_decoded_as_torch_does_infinity_and_nan_included() -> None:
    bits = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(torch.float16).view(1, -1)
    found = decode_rows(bits.view(torch.uint8), FP16, 2**16)
    torch.testing.assert_close(found, bits.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", HALVES)
@pytest.mark.parametrize("part", ["scale", "bias", "number"])
def test_a_float16_that_is_no_number_never_becomes_one_in_any_lookup(part: str, name: str) -> None:
    """A flipped bit of an exponent makes them; FBGEMM's rows of 4 bits and half precision hold two kinds of float16."""
    kind = "fp16" if part == "number" else "int4"
    place = {"number": slice(0, 2), "scale": slice(-4, -2), "bias": slice(-2, None)}[part]
    value = float(half(HALVES[name]).view(torch.float16))

    model, sparse = cached(rows=kind, cache=0.0), batch(3)
    row = int(sparse["user"].values[2])
    model.payload[150 + row, place] = half(HALVES[name])
    scorer = QuantizedTables.of(trained(), dict.fromkeys(("one", "two", "unused"), kind))
    scorer.rows_of("two")[1, place] = half(HALVES[name])
    ids = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1, 2])
    looked_up = scorer(JaggedBatch(("a", "b", "c"), ids, torch.arange(10)))
    with torch.no_grad():
        of_cache = model(sparse)
    decoded = decode_rows(model.payload, model.form, model.embedding_dim)
    for numbers in (decoded[150 + row], of_cache[2, 1], looked_up[1, 1]):
        spoilt = numbers[:1] if part == "number" else numbers
        assert not bool(spoilt.isfinite().any())
        if part != "scale" and math.isinf(value):
            assert bool((spoilt == value).all())
    others = decoded[torch.arange(210) != 150 + row]
    assert bool(others.isfinite().all())
    assert bool(looked_up[[0, 2]].isfinite().all())


@pytest.mark.parametrize(
    ("name", "place", "value", "message"),
    [
        ("tags", 3, 210, "holds row 210 of 210"),
        ("tags", 3, -2, "holds row -2 of 210"),
        ("tags", None, None, "two lines hold one row"),
        ("states", 0, 7, "in state 7"),
    ],
)
def test_a_state_that_no_cache_is_in_is_refused(name: str, place: int | None, value: int | None, message: str) -> None:
    """Kernels write where tags point to: a tag beyond the rows would reach other memory."""
    model = steps(cached(rows="int8", cache=0.3), range(3))
    state = {key: one.clone() for key, one in model.state_dict().items()}
    cached(rows="int8", cache=0.3).load_state_dict(state)
    held = (model.cache.tags >= 0).nonzero().flatten()
    spoilt = state[f"cache.{name}"]
    if place is None or value is None:
        spoilt[held[0]] = spoilt[held[1]]
    else:
        spoilt[place] = value
    with pytest.raises(CheckpointError, match=message):
        cached(rows="int8", cache=0.3).load_state_dict(state)


@pytest.mark.parametrize("optimizer", ["adagrad", "rowwise_adagrad", "adam"])
@pytest.mark.parametrize("share", [0.0, 1.0])
def test_an_optimizer_s_state_that_is_no_number_spoils_no_row(optimizer: str, share: float) -> None:
    model = steps(cached(optimizer=optimizer, rows="int8", cache=share), range(2))
    sparse = batch(7)
    row = 150 + int(sparse["user"].values[4])
    next(iter(model._state().values()))[row] = math.nan
    before = all_rows(model)
    output = model(sparse)
    output.backward(gradient(0, output.shape))
    with pytest.raises(NumericsError, match=f"row {row - 150} of table 'users'.*not finite.*left as it was"):
        model.update()
    after = all_rows(model)
    assert torch.equal(after[row], before[row])
    assert bool(after.isfinite().all())


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("kind", ROW_FORMATS)
def test_extreme_rows_stay_within_their_bounds(kind: str, rounding: str) -> None:
    form = ROW_FORMATS[kind]
    rows = torch.stack([
        torch.zeros(64), torch.full((64,), -0.0), torch.full((64,), 1e-40), torch.linspace(-1e-40, 1e-40, 64),
        torch.linspace(0, 1e-12, 64), torch.full((64,), 1000.25), torch.linspace(999.8, 1000.8, 64),
        torch.linspace(-60000, 60000, 64), torch.full((64,), -60000.0),
    ])  # fmt: skip
    found = decode_rows(encode_rows(rows, form, rounding=rounding), form, 64)  # type: ignore[arg-type]
    assert bool(found.isfinite().all())
    low, span = rows.amin(1, keepdim=True).abs(), rows.amax(1, keepdim=True) - rows.amin(1, keepdim=True)
    steps_off = 0.5 if rounding == "nearest" else 1.0
    bound = {
        "fp32": torch.zeros(9, 1),
        "fp16": rows.abs() * steps_off * 2.0**-10 + 2.0**-24,
        # a range below 1e-36 has no scale: such a row becomes its smallest number
        "int8": steps_off * (span / 255)
        + torch.where(span < 1e-36, span, 0)
        + 2.0**-23 * rows.abs()
        + 1e-8 * (span > 0),
        "int4": (0.5 + 15 / 2048) * (span / 15) + low / 2048 + 2.0**-23,
    }[kind]
    if kind == "int4" and rounding == "stochastic":
        bound = (span + low * 2.0**-10) / 15 * (1 + 2.0**-9) + 2.0**-20
    assert bool(((found - rows).abs() <= bound * (1 + 1e-6)).all())


def test_rows_beyond_float16_are_kept_in_eight_bits_and_refused_in_four_and_in_half_precision() -> None:
    rows = torch.tensor([[0.0, 1.0], [-2e5, 1e6]])
    eight = decode_rows(encode_rows(rows, ROW_FORMATS["int8"]), ROW_FORMATS["int8"], 2)
    torch.testing.assert_close(eight, rows, rtol=1e-6, atol=0.5)
    for kind in ("int4", "fp16"):
        with pytest.raises(NumericsError, match=r"row 1 of table 'rows'.*float16, 65504"):
            encode_rows(rows, ROW_FORMATS[kind])
        with pytest.raises(NumericsError, match="row 1"):
            encoded(rows, kind, "rows")


@pytest.mark.parametrize("kind", ROW_FORMATS)
def test_no_rows_and_no_columns(kind: str) -> None:
    form = ROW_FORMATS[kind]
    for shape in ((0, 4), (3, 0)):
        payload = encode_rows(torch.zeros(shape), form)
        assert payload.shape == (shape[0], form.row_bytes(shape[1]))
        assert decode_rows(payload, form, shape[1]).shape == shape


def test_a_run_with_a_cache_and_stochastic_rounding_goes_on_bit_for_bit_from_any_step() -> None:
    """Rows that are dirty, what was counted, and the place in the random numbers are all state."""
    options = {"optimizer": "adagrad", "rows": "int4", "cache": 0.15, "cache_policy": "lfu", "rounding": "stochastic"}
    whole = cached(**options)
    for stop in range(6):
        resumed = cached(seed=stop + 1, **options)
        resumed.load_state_dict(whole.state_dict())
        assert_same_state(resumed, whole)
        steps(resumed, range(stop, stop + 1))
        steps(whole, range(stop, stop + 1))
        assert_same_state(resumed, whole)
        assert isinstance(resumed, CachedEmbeddingTables)
    assert bool((whole.cache.states == 1).any())


def test_tables_for_scoring_refuse_rows_that_no_training_could_have_left() -> None:
    model = trained()
    for bad in (math.nan, math.inf):
        model.table("two")[3, 2] = bad
        for kind in ROW_FORMATS:
            with pytest.raises(NumericsError, match=r"table 'two'"):
                QuantizedTables.of(model, {"one": "fp32", "two": kind, "unused": "fp32"})
    assert TablesConfig().rows == "fp32"
    assert mixed_features().tables["two"] == 5
