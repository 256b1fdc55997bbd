"""Texts that come and go: each is what it would be alone, and its memory is given back."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cordillera.errors import DataError
from cordillera.kernels.dense.few_rows import MOST_ROWS
from cordillera.models.language.kv_cache import PAGE, KVCache
from cordillera.models.language.llama import Llama
from cordillera.serving.language.engine import Engine, Generated
from cordillera.serving.language.generation import generate
from cordillera.serving.language.sampler import Sampling
from cordillera.serving.language.speculation import NGramDrafter, Speculation
from tests.serving.test_speculation import CONTEXT, EXACT, GREEDY, HALF, VOCABULARY

DRAFTED = Speculation(NGramDrafter, [1.0] * MOST_ROWS)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    torch.set_num_threads(1)


def _alone(model: Llama, prompt: list[int], count: int, stop: list[int], sampling: Sampling) -> list[int]:
    return [one.token for one in generate(model, [prompt], count, stop, sampling)]


def _drain(engine: Engine) -> Iterator[Generated]:
    while engine.waiting or engine.running:
        yield from engine.step()


_REQUESTS = st.lists(
    st.tuples(
        st.integers(0, 6),  # steps before it comes
        st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=CONTEXT - 1),
        st.integers(1, 20),
        st.sampled_from([GREEDY, Sampling(temperature=1.0, seed=3), Sampling(temperature=2.0, top_p=1, seed=9)]),
        st.none() | st.integers(1, 9),  # steps after which it is cancelled
    ),
    min_size=1,
    max_size=8,
)


@pytest.mark.parametrize("model", [EXACT, HALF], ids=["float64", "bfloat16"])
@settings(max_examples=25, deadline=None)
@given(
    requests=_REQUESTS,
    texts=st.integers(1, 4),
    chunk=st.sampled_from([1, 30]),
    room=st.sampled_from([None, 120]),
    drafts=st.booleans(),
)
def test_every_text_is_what_it_is_alone(
    model: Llama,
    requests: list[tuple[int, list[int], int, Sampling, int | None]],
    texts: int,
    chunk: int,
    room: int | None,
    drafts: bool,
) -> None:
    engine = Engine(model, texts=texts, chunk=chunk, room=room, speculation=DRAFTED if drafts else None)
    numbers: dict[int, int] = {}
    found: dict[int, list[int]] = {}
    ends: dict[int, str] = {}
    cancelled = set()
    for step in range(200):
        for index, (begin, prompt, count, sampling, _) in enumerate(requests):
            if begin == step:
                numbers[engine.add(prompt, count, [7], sampling)] = index
        for one in engine.step():
            found.setdefault(one.sequence, []).append(one.token)
            assert one.sequence not in ends
            assert one.sequence not in cancelled
            if one.finish:
                ends[one.sequence] = one.finish
        assert engine.running <= texts
        for number, index in numbers.items():
            begin, after = requests[index][0], requests[index][4]
            if after is not None and step == begin + after:
                was = number not in ends
                assert engine.cancel(number) == was
                if was:
                    cancelled.add(number)
        if step > 6 and not (engine.waiting or engine.running):
            break
    assert engine.pages_in_use == 0
    assert engine.step() == []
    for number, index in numbers.items():
        _, prompt, count, sampling, _ = requests[index]
        alone = _alone(model, prompt, count, [7], sampling)
        if number in cancelled:
            assert found.get(number, []) == alone[: len(found.get(number, []))]
        else:
            assert found[number] == alone
            assert ends[number] == ("stop" if alone[-1] == 7 else "length")


def test_more_prompts_than_run_at_a_time_are_all_continued() -> None:
    prompts = [[n % VOCABULARY, 3] for n in range(40)]
    found: list[list[int]] = [[] for _ in prompts]
    for one in generate(HALF, prompts, 5, sampling=GREEDY, speculation=DRAFTED):
        found[one.sequence].append(one.token)
    assert found == [_alone(HALF, prompt, 5, [], GREEDY) for prompt in prompts]


def test_a_text_waits_until_there_is_room_and_one_that_never_fits_is_refused() -> None:
    engine = Engine(HALF, texts=3, room=3 * PAGE)
    engine.add([1] * 20, 10, sampling=GREEDY)  # 29 tokens in 2 pages
    engine.add([2] * 20, 10, sampling=GREEDY)
    engine.add([3], 5, sampling=GREEDY)
    engine.step()
    assert (engine.running, engine.waiting, engine.pages_in_use) == (1, 2, 2)
    with pytest.raises(DataError, match="request 0: needs 4 pages of keys and values, there are 3"):
        Engine(HALF, room=3 * PAGE, speculation=DRAFTED).add([1] * 30, 20)
    numbers = {one.sequence for one in _drain(engine)}
    assert numbers == {0, 1, 2}
    assert engine.pages_in_use == 0


def test_an_engine_goes_on_after_logits_that_are_no_numbers() -> None:
    model = Llama(EXACT.config).double()
    model.load_state_dict(EXACT.state_dict())
    engine = Engine(model, texts=2)
    engine.add([1, 2], 9, sampling=GREEDY)
    engine.step()
    kept = model.norm.weight.data.clone()
    model.norm.weight.data[0] = math.nan
    with pytest.raises(DataError, match="NaN or infinite"):
        engine.step()
    assert (engine.running, engine.pages_in_use) == (0, 0)
    model.norm.weight.data.copy_(kept)
    engine.add([1, 2], 9, sampling=GREEDY)
    assert [one.token for one in _drain(engine)] == _alone(EXACT, [1, 2], 9, [], GREEDY)


def test_what_was_written_before_a_pass_that_fails_is_not_lost() -> None:
    model = Llama(EXACT.config).double()
    model.load_state_dict(EXACT.state_dict())
    engine = Engine(model, texts=3)
    engine.add([1, 2], 1, sampling=GREEDY)
    engine.add([5, 28], 9, sampling=GREEDY)
    engine.add([3], 4, sampling=GREEDY)
    model.embedding.weight.data[28] = math.nan
    with pytest.raises(DataError, match="NaN or infinite"):
        engine.step()
    found: dict[int, list[int]] = {}
    for one in (*engine.step(), *_drain(engine)):
        found.setdefault(one.sequence, []).append(one.token)
    assert found == {0: _alone(EXACT, [1, 2], 1, [], GREEDY), 2: _alone(EXACT, [3], 4, [], GREEDY)}
    assert engine.pages_in_use == 0


@pytest.mark.parametrize("texts", [0, 33])
def test_a_number_of_texts_that_no_pass_takes_is_refused(texts: int) -> None:
    with pytest.raises(DataError, match=f"texts: {texts} is not from 1 to 32"):
        Engine(EXACT, texts=texts)


@pytest.mark.parametrize(
    ("prompt", "count", "said"),
    [([], 3, "request 0: holds no token"), ([1] * 9, 3, "request 0: has 9 tokens"), ([1], 0, "max_new_tokens: 0")],
)
def test_requests_that_cannot_be_continued_are_refused(prompt: list[int], count: int, said: str) -> None:
    engine = Engine(EXACT, capacity=9)
    with pytest.raises(DataError, match=said):
        engine.add(prompt, count)
    assert (engine.waiting, engine.running) == (0, 0)
    assert not engine.cancel(0)


def test_pages_are_taken_when_a_sequence_grows_and_given_back_when_it_is_cleared() -> None:
    cache = KVCache(HALF.config, 2, 40, torch.bfloat16, room=48)
    with torch.inference_mode():
        HALF.hidden(torch.arange(20), torch.tensor([0, 17, 20]), cache=cache)
        assert [len(table) for table in cache.tables] == [2, 1]
        assert cache.free_pages == 0
        before = [part.clone() for part in cache.read(1, 0)]
        with pytest.raises(DataError, match="1 more pages are needed, 0 are free"):
            HALF.hidden(torch.arange(16), torch.tensor([0, 0, 16]), cache=cache)
        assert cache.lengths == [17, 3]
        cache.clear(1)
        HALF.hidden(torch.arange(15), torch.tensor([0, 15, 15]), cache=cache)
        assert (cache.lengths, cache.free_pages) == ([32, 0], 1)
        for own, old in zip(cache.read(1, 0), before, strict=True):
            assert torch.equal(own[:, :17], old)
