"""Tables for scoring give what their decoded rows give, whatever the formats, bags and weights."""

from __future__ import annotations

from typing import Literal

import numba
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cordillera.data.ranking.features import FeatureSpec, SparseFeature
from cordillera.embeddings.quantized_tables import QuantizedTables, encoded
from cordillera.embeddings.tables import EmbeddingTables, TablesConfig
from cordillera.errors import DataError, NumericsError, TrainingError
from cordillera.jagged import JaggedBatch
from cordillera.kernels.embeddings import numba_mixed_rows

KINDS = ("fp32", "fp16", "int8", "int4", "int2")
DIM = 8


def features(pooling: Literal["sum", "mean"] = "sum") -> FeatureSpec:
    return FeatureSpec(
        dense=(),
        sparse=(
            SparseFeature("a", "one", pooling),
            SparseFeature("b", "two", pooling),
            SparseFeature("c", "one", "sum"),
        ),
        tables={"one": 11, "two": 5, "unused": 3},
        tasks=("click",),
    )


def trained(pooling: Literal["sum", "mean"] = "sum") -> EmbeddingTables:
    return EmbeddingTables(
        features(pooling), DIM, TablesConfig(backend="torch"), init=0.3, generator=torch.Generator().manual_seed(0)
    )


def batch(lengths: list[int], weighted: bool, seed: int) -> JaggedBatch:
    generator = torch.Generator().manual_seed(seed)
    size = len(lengths) // 3
    values = torch.cat(
        [
            torch.randint(rows, (sum(lengths[f * size : (f + 1) * size]),), generator=generator)
            for f, rows in enumerate((11, 5, 11))
        ]
    )
    weights = torch.rand(len(values), generator=generator) if weighted else None
    return JaggedBatch(("a", "b", "c"), values, torch.tensor([0, *lengths]).cumsum(0), weights)


@given(
    kinds=st.tuples(*[st.sampled_from(KINDS)] * 3),
    lengths=st.integers(1, 7).flatmap(lambda b: st.lists(st.integers(0, 4), min_size=3 * b, max_size=3 * b)),
    weighted=st.booleans(),
    pooling=st.sampled_from(["sum", "mean"]),
    seed=st.integers(0, 999),
)
@settings(max_examples=80)
def test_lookups_are_those_of_the_decoded_rows(
    kinds: tuple[str, ...], lengths: list[int], weighted: bool, pooling: Literal["sum", "mean"], seed: int
) -> None:
    source = trained(pooling)
    found = QuantizedTables.of(source, dict(zip(source.features.tables, kinds, strict=True)))
    for name in source.features.tables:
        source.table(name).copy_(found.table(name))
    given_batch = batch(lengths, weighted, seed)
    torch.testing.assert_close(found(given_batch), source(given_batch).detach(), rtol=1e-6, atol=1e-6)


def has_the_bits_of_float64(kind: str, dim: int, weighted: bool) -> bool:
    source = EmbeddingTables(features(), dim, TablesConfig(backend="torch"), init=0.3)
    found = QuantizedTables.of(source, dict.fromkeys(source.features.tables, kind))
    given_batch = batch([1, 0, 3, 1, 9, 1, 2, 0, 5], weighted, seed=dim)
    sums = found(given_batch)
    assert given_batch.offsets is not None
    at, exact = given_batch.offsets.tolist(), torch.zeros(3, 3, dim, dtype=torch.float64)
    for bag in range(9):
        feature, sample = divmod(bag, 3)
        rows = found.table(("one", "two", "one")[feature])[given_batch.values[at[bag] : at[bag + 1]]].double()
        for place, row in enumerate(rows, at[bag]):
            exact[sample, feature] += row if given_batch.weights is None else given_batch.weights[place].double() * row
    return torch.equal(sums, exact.float())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dim", [4, 8, 12, 16, 40])
@pytest.mark.parametrize("weighted", [False, True])
def test_sums_have_the_bits_of_float64_whatever_the_width(kind: str, dim: int, weighted: bool) -> None:
    """Eight numbers are added at a time, or one where the width does not suit."""
    assert has_the_bits_of_float64(kind, dim, weighted)


@pytest.mark.slow
def test_processors_that_cannot_convert_halves_give_the_same_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba_mixed_rows, "_HAS_HALVES", False)
    for one in (numba_mixed_rows._half_at, numba_mixed_rows._add_row, numba_mixed_rows._lookup):
        options = {"parallel": True} if one is numba_mixed_rows._lookup else {}
        monkeypatch.setattr(numba_mixed_rows, one.py_func.__name__, numba.njit(one.py_func, nogil=True, **options))
    assert all(has_the_bits_of_float64(kind, 16, weighted=True) for kind in KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_off_by_no_more_than_their_format(kind: str) -> None:
    source = trained()
    found = QuantizedTables.of(source, dict.fromkeys(source.features.tables, kind))
    for name in source.features.tables:
        exact = source.table(name)
        span = exact.amax(1, keepdim=True) - exact.amin(1, keepdim=True)
        allowed = {"fp32": 0.0, "fp16": 2**-11, "int8": 0.51 / 255, "int4": 1.0 / 15, "int2": 1.0 / 3}[kind]
        assert bool(((found.table(name) - exact).abs() <= allowed * span.clamp(min=1.0) + 1e-9).all())
    rows = {"fp32": 32, "fp16": 16, "int8": 16, "int4": 8, "int2": 6}[kind]
    assert found.memory_bytes()["rows"] == sum(-(-n * rows // 64) * 64 for n in (11, 5, 3))


def test_rows_of_two_bits_are_those_of_torchs_own_kernel() -> None:
    source = trained()
    found = QuantizedTables.of(source, dict.fromkeys(source.features.tables, "int2"))
    for name in source.features.tables:
        unpacked = torch.ops.quantized.embedding_bag_2bit_unpack(found.rows_of(name).contiguous())
        torch.testing.assert_close(found.table(name), unpacked, rtol=1e-6, atol=1e-7)


def test_greedy_rows_are_no_worse_than_those_of_least_and_largest() -> None:
    rows = torch.randn(200, 32, generator=torch.Generator().manual_seed(1))
    errors = []
    for method in ("minmax", "greedy"):
        tables = QuantizedTables(
            FeatureSpec((), (SparseFeature("a", "one"),), {"one": 200}, ("click",)), 32, {"one": "int4"}
        )
        tables.rows_of("one").copy_(encoded(rows, "int4", "one", method))
        errors.append(float(torch.linalg.norm(tables.table("one") - rows)))
    assert errors[1] < 0.95 * errors[0]


def test_a_state_dict_is_taken_and_given() -> None:
    source = trained()
    kinds = {"one": "int4", "two": "fp16", "unused": "int8"}
    found = QuantizedTables.of(source, kinds)
    other = QuantizedTables(features(), DIM, kinds)
    other.load_state_dict(found.state_dict())
    assert torch.equal(other.payload, found.payload)


def test_mistakes_are_refused() -> None:
    source = trained()
    kinds = dict.fromkeys(source.features.tables, "int8")
    with pytest.raises(NumericsError, match="table 'two'"):
        QuantizedTables(features(), DIM, {"one": "int8", "unused": "int8"})
    with pytest.raises(NumericsError, match="even width"):
        QuantizedTables(features(), 7, dict.fromkeys(kinds, "int4"))
    with pytest.raises(NumericsError, match="width that 4 divides"):
        QuantizedTables(features(), 6, dict.fromkeys(kinds, "int2"))
    with pytest.raises(NumericsError, match="width that 4 divides"):
        encoded(torch.ones(3, 6), "int2", "one")
    found = QuantizedTables.of(source, kinds)
    with pytest.raises(TrainingError, match="for scoring"):
        found.update()
    with pytest.raises(DataError, match="does not lie in table 'two'"):
        found(JaggedBatch(("a", "b", "c"), torch.tensor([0, 5, 0]), torch.arange(4)))
    with pytest.raises(DataError, match="no table 'three'"):
        found.table("three")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_is_refused_with_its_place(kind: str, bad: float) -> None:
    source = trained()
    source.table("two")[3, 6] = bad
    with pytest.raises(NumericsError, match=r"table 'two'.*row 3"):
        QuantizedTables.of(source, dict.fromkeys(source.features.tables, kind))


@pytest.mark.parametrize("kind", ["fp16", "int4", "int2"])
def test_numbers_beyond_fp16_are_refused(kind: str) -> None:
    source = trained()
    source.table("one")[4, 1] = 2e6
    with pytest.raises(NumericsError, match=r"table 'one'.*row 4"):
        QuantizedTables.of(source, dict.fromkeys(source.features.tables, kind))
