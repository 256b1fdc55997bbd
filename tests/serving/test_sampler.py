"""The sampler against the definition of temperature and top-p, token by token."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from cordillera.errors import DataError
from cordillera.serving.language.sampler import (
    Sampling,
    draw_noise,
    make_sampling,
    penalized,
    probabilities,
    sample,
)

_LOGITS = st.lists(st.floats(-20, 20) | st.just(-math.inf), min_size=2, max_size=12).filter(
    lambda row: max(row) > -math.inf
)


@settings(max_examples=100)
@given(row=_LOGITS, temperature=st.sampled_from([0.3, 0.6, 1.0, 2.0]), top_p=st.sampled_from([0.1, 0.5, 0.9, 1.0]))
def test_probabilities_are_the_fewest_most_likely_tokens_rescaled(
    row: list[float], temperature: float, top_p: float
) -> None:
    logits = torch.tensor([row], dtype=torch.float64)
    found = probabilities(logits, Sampling(temperature=temperature, top_p=top_p))[0]

    chances = [math.exp((x - max(row)) / temperature) for x in row]
    chances = [x / sum(chances) for x in chances]
    kept: list[int] = []
    for token in sorted(range(len(row)), key=lambda i: -chances[i]):
        if abs(sum(chances[i] for i in kept) - top_p) < 1e-5 and top_p < 1:
            return  # rounding decides
        if sum(chances[i] for i in kept) < top_p:
            kept.append(token)
    if len({round(chances[i], 6) for i in range(len(row))}) < len(row):
        kept = [i for i in range(len(row)) if found[i] > 0]  # equal ones: any of them may be the last
    total = sum(chances[i] for i in kept)
    expected = [chances[i] / total if i in kept else 0.0 for i in range(len(row))]
    torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-4, atol=1e-6)
    assert found.sum().item() == pytest.approx(1, abs=1e-5)


@pytest.mark.slow
@settings(max_examples=60)
@given(
    seed=st.integers(0, 10**6),
    scale=st.sampled_from([0.0, 0.5, 2.0, 6.0]),
    step=st.sampled_from([0.0, 0.125, 1.0]),
    top_p=st.sampled_from([1e-9, 0.1, 0.9, 0.999, 1.0]),
    top_k=st.sampled_from([0, 1, 40, 255, 256, 400, 10**6]),
    min_p=st.sampled_from([0.0, 0.05, 1.0]),
)
def test_large_vocabularies_give_what_sorting_all_of_them_gives(
    seed: int, scale: float, step: float, top_p: float, top_k: int, min_p: float
) -> None:
    """Equal probabilities too, of which the first tokens are kept."""
    logits = scale * torch.randn(3, 3000, generator=torch.Generator().manual_seed(seed))
    logits = (logits / step).round() * step if step else logits
    logits[1] = -torch.inf
    logits[1, 7] = 0.0
    sampling = Sampling(temperature=0.8, top_p=top_p, top_k=top_k, min_p=min_p)
    found = probabilities(logits, sampling)
    for row, own in zip(torch.softmax((logits - logits.amax(-1, keepdim=True)) / 0.8, -1), found, strict=True):
        order = sorted(range(3000), key=lambda token: (-float(row[token]), token))
        before = row[order].cumsum(0) - row[order]
        kept = [
            token
            for place, (token, earlier) in enumerate(zip(order, before.tolist(), strict=True))
            if place == 0 or (earlier < top_p and row[token] >= min_p * row[order[0]] and place < (top_k or 3000))
        ]
        if top_p == 1 and not top_k and not min_p:
            kept = order
        expected = torch.zeros(3000).index_copy(0, torch.tensor(kept), row[kept])
        assert torch.equal(own > 0, expected > 0)
        torch.testing.assert_close(own, expected / expected.sum(), rtol=1e-5, atol=0)


def test_greedy_takes_the_first_of_the_most_likely() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, -math.inf], [-5.0, -math.inf, -6.0, -7.0]])
    assert sample(logits, Sampling(temperature=0)).tolist() == [1, 0]
    assert probabilities(logits, Sampling(temperature=0)).tolist() == [[0, 1, 0, 0], [1, 0, 0, 0]]


def test_draws_follow_the_probabilities_and_the_seed() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, -9.0]]).expand(20_000, -1)
    sampling = Sampling(temperature=1.0, top_p=0.95)
    drawn, again = (sample(logits, sampling, torch.stack([draw_noise(3, n, 5) for n in range(20_000)])) for _ in "ab")
    assert torch.equal(drawn, again)
    expected = probabilities(logits[:1], sampling)[0]
    counts = drawn.bincount(minlength=5)
    assert counts[3:].tolist() == [0, 0]  # the first three have 0.969
    torch.testing.assert_close(counts / 20_000, expected, rtol=0, atol=4 * math.sqrt(0.25 / 20_000))


def test_a_cold_temperature_is_greedy_without_overflow() -> None:
    logits = torch.tensor([[1000.0, 999.0, -1000.0]])
    assert probabilities(logits, Sampling(temperature=1e-6, top_p=1)).tolist() == [[1, 0, 0]]


@pytest.mark.parametrize("bad", [[1.0, math.nan], [math.inf, 0.0], [-math.inf, -math.inf]])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_are_refused(bad: list[float], temperature: float) -> None:
    logits = torch.tensor([[0.0, 1.0], bad])
    with pytest.raises(DataError, match="NaN or infinite"):
        sample(logits, Sampling(temperature=temperature))


@pytest.mark.parametrize(
    "wrong", [{"temperature": -1}, {"temperature": math.nan}, {"top_p": 0}, {"top_k": -1}, {"top_j": 3}]
)
def test_impossible_settings_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValidationError):
        Sampling(**wrong)


@pytest.mark.parametrize("settings", [{"temperature": 1e-300}, {"temperature": 1.0, "top_p": 1e-300}])
def test_settings_that_are_too_small_for_float32_take_the_most_likely_token(settings: dict[str, float]) -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0], [-400.0, -500.0, -math.inf]])
    assert probabilities(logits, Sampling(**settings)).tolist() == [[0, 1, 0], [1, 0, 0]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_penalties_leave_the_models_logits_unchanged(dtype: torch.dtype) -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0]], dtype=dtype)
    changed = penalized(logits, Sampling(presence_penalty=1.0, logit_bias={0: 5.0}), [[1]])
    assert changed.tolist() == [[6, 2, 2]]
    assert logits.tolist() == [[1, 3, 2]]


def test_repetitions_are_made_less_likely_as_in_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(0))
    prompt, text = [3, 3, 7], [9, 1, 3]
    expected = transformers.RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([[*prompt, *text]]), logits.clone())
    assert torch.equal(penalized(logits, Sampling(repetition_penalty=1.3), [text], prompt), expected)


@pytest.mark.parametrize(
    "name", ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"]
)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_settings_are_finite_numbers(name: str, value: float) -> None:
    with pytest.raises(DataError) as raised:
        make_sampling(**{name: value})
    assert raised.value.where == name


def test_a_bias_is_a_number() -> None:
    assert make_sampling(logit_bias={3: 1.0}).logit_bias == {3: 1.0}
    with pytest.raises(DataError, match=r"logit_bias\[3\]: must be"):
        make_sampling(logit_bias={3: math.nan})
