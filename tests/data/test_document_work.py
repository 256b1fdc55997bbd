"""Work of documents: recovered from samples, counted from a model, kept in a file."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from cordillera.data.packing.work import DocumentWork, Sample
from cordillera.errors import DataError

MIXES = [[131072], [4096] * 32, [512] * 256, [65536, *[1024] * 64], [32768] * 4, [100] * 40]


@given(document=st.floats(1e-6, 1e-3), token=st.floats(1e-8, 1e-5), share=st.floats(0.1, 10))
@settings(max_examples=50)
def test_a_fit_recovers_the_constants(document: float, token: float, share: float) -> None:
    true = DocumentWork(document=document, token=token, squared=token * share / 40_000)
    samples = [Sample.of(lengths, true.of(lengths)) for lengths in MIXES]
    found = DocumentWork.fit(samples, "synthetic")
    assert found.unit == "seconds"
    assert "6 microbatches: synthetic" in found.provenance
    assert found.error == pytest.approx(0, abs=1e-6)
    for lengths in MIXES:
        assert found.of(lengths) == pytest.approx(true.of(lengths), rel=1e-6)
    for name in ("document", "token", "squared"):
        assert getattr(found, name) == pytest.approx(getattr(true, name), rel=1e-4)


def test_a_fit_of_noisy_times_says_how_far_off_it_is() -> None:
    true, noise = DocumentWork(document=1e-4, token=1e-6, squared=3e-11), np.random.default_rng(0)
    mixes = [*MIXES * 10]
    samples = [Sample.of(one, true.of(one) * noise.uniform(0.9, 1.1)) for one in mixes]
    found = DocumentWork.fit(samples, "synthetic")
    assert found.error is not None
    assert 0.03 < found.error < 0.07
    assert found.squared == pytest.approx(true.squared, rel=0.1)


@given(data=st.data())
@settings(max_examples=40)
def test_fitted_constants_are_never_negative(data: st.DataObject) -> None:
    seconds = data.draw(st.lists(st.floats(1e-3, 1e3), min_size=len(MIXES), max_size=len(MIXES)))
    samples = [Sample.of(one, s) for one, s in zip(MIXES, seconds, strict=True)]
    try:
        found = DocumentWork.fit(samples, "noise")
    except DataError:  # tokens cost nothing: tested below
        assume(False)
    assert found.token + found.squared > 0
    assert min(found.document, found.token, found.squared) >= 0


def test_times_that_follow_the_number_of_documents_alone_are_refused() -> None:
    with pytest.raises(DataError, match="tokens cost nothing"):
        DocumentWork.fit([Sample.of(one, float(len(one))) for one in MIXES], "launches")


def test_alike_samples_need_a_ridge() -> None:
    samples = [Sample.of([1000] * 8, 1.0)] * 4
    with pytest.raises(DataError, match="apart"):
        DocumentWork.fit(samples, "alike")
    found = DocumentWork.fit(samples, "alike", ridge=1e-6)
    assert found.of([1000] * 8) == pytest.approx(1.0, rel=1e-4)


@pytest.mark.parametrize(
    "bad",
    [
        Sample(1, 10, 100, math.nan), Sample(1, 10, 100, math.inf), Sample(1, 10, 100, 0.0), Sample(1, 10, 100, -1.0),
        Sample(0, 10, 100, 1.0), Sample(1, 0, 100, 1.0), Sample(1, 10, 0, 1.0),
    ],
)  # fmt: skip
def test_samples_that_were_never_measured_are_refused_by_number(bad: Sample) -> None:
    good = Sample.of([10, 20], 1.0)
    with pytest.raises(DataError, match="sample 2"):
        DocumentWork.fit([good, good, bad], "bad")
    with pytest.raises(DataError, match="2 samples for three"):
        DocumentWork.fit([good, good], "few")
    with pytest.raises(DataError, match="ridge"):
        DocumentWork.fit([good] * 3, "bad", ridge=math.nan)


def test_break_even_lengths_of_llamas() -> None:
    for widths, tokens in (((4096, 11008, 32, 32), 49_408), ((4096, 14336, 32, 8), 53_248)):
        found = DocumentWork.of_model(*widths)
        assert 1 / found.squared == pytest.approx(tokens)
        assert found(tokens) == pytest.approx(2 * tokens)
        assert found.unit == "tokens"
    with pytest.raises(DataError, match="heads"):
        DocumentWork.of_model(4096, 11008, 0, 0)


@pytest.mark.parametrize("tokens", [0, -1, math.nan])
def test_break_even_lengths_that_are_none_are_refused(tokens: float) -> None:
    with pytest.raises(DataError, match="no length"):
        DocumentWork.of_break_even(tokens)


@given(lengths=st.lists(st.integers(1, 10_000), max_size=20))
def test_work_of_a_microbatch_is_the_sum_over_documents(lengths: list[int]) -> None:
    one = DocumentWork(document=0.5, token=2.0, squared=0.25)
    assert one.of(lengths) == pytest.approx(sum(0.5 + 2.0 * d + 0.25 * d * d for d in lengths))


def test_a_file_gives_back_what_was_saved(tmp_path: Path) -> None:
    found = DocumentWork.fit([Sample.of(one, 1.0 + sum(one)) for one in MIXES], "some device")
    found.save(tmp_path / "work.json")
    assert DocumentWork.read(tmp_path / "work.json") == found
    assert [path.name for path in tmp_path.iterdir()] == ["work.json"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ('{"token": -1, "squared": 1}', "token"),
        ('{"token": NaN, "squared": 1}', "NaN is not a number"),
        ('{"token": 1}', "squared: is missing"),
        ('{"token": 1, "squared": 1, "sqared": 2}', "did you mean 'squared'"),
        ('{"token": 0, "squared": 0}', "cost nothing"),
    ],
)
def test_files_that_hold_no_model_are_refused_by_place(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "work.json"
    path.write_text(text)
    with pytest.raises(DataError, match=message) as caught:
        DocumentWork.read(path)
    assert str(path) in str(caught.value)
    with pytest.raises(DataError, match="does not exist"):
        DocumentWork.read(tmp_path / "absent.json")


def test_work_that_is_none_is_refused() -> None:
    with pytest.raises(ValidationError):
        DocumentWork.model_validate(json.loads('{"token": Infinity, "squared": 1}'))
