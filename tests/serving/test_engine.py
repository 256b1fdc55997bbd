"""Texts that come and go: each is what it would be alone, and its memory is given back."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cordillera.errors import DataError
from cordillera.kernels.dense.few_rows import MOST_ROWS
from cordillera.models.language.kv_cache import PAGE, KVCache
from cordillera.models.language.llama import Llama
from cordillera.serving.language import engine as engine_module
from cordillera.serving.language import prefixes as prefixes_module
from cordillera.serving.language.engine import Engine, Generated
from cordillera.serving.language.generation import generate
from cordillera.serving.language.sampler import Sampling, draw_noise
from cordillera.serving.language.speculation import NGramDrafter, Speculation
from tests.serving.test_speculation import CONTEXT, EXACT, GREEDY, HALF, VOCABULARY

pytestmark = pytest.mark.usefixtures("one_thread")

DRAFTED = Speculation([NGramDrafter], [1.0] * MOST_ROWS)


@pytest.fixture(autouse=True, scope="module")
def _short_parts() -> Iterator[None]:
    """Prompts of these tests have up to three parts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module, "PART", PAGE)
        patch.setattr(prefixes_module, "PART", PAGE)
        yield


def _alone(model: Llama, prompt: list[int], count: int, stop: list[int], sampling: Sampling) -> list[int]:
    return [one.token for one in generate(model, [prompt], count, stop, sampling)]


def _drain(engine: Engine) -> Iterator[Generated]:
    while engine.waiting or engine.running:
        yield from engine.step()


_REQUESTS = st.lists(
    st.tuples(
        st.integers(0, 6),  # steps before it comes
        st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=CONTEXT - 1),
        st.integers(1, 12),
        st.sampled_from([GREEDY, Sampling(temperature=1.0, seed=3), Sampling(temperature=2.0, top_p=1, seed=9)]),
        st.none() | st.integers(1, 9),  # steps after which it is cancelled
    ),
    min_size=1,
    max_size=5,
)


@pytest.mark.parametrize("model", [EXACT, HALF], ids=["float64", "bfloat16"])
@settings(max_examples=25)
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
    with pytest.raises(DataError, match="request 0: needs 3 pages of keys and values, there are 2"):
        Engine(HALF, room=2 * PAGE, speculation=DRAFTED).add([1] * 30, 20)
    numbers = {one.sequence for one in _drain(engine)}
    assert numbers == {0, 1, 2}
    assert engine.pages_in_use == 0


def _damaged(token: int) -> Llama:
    """A model whose logits are no numbers after a token."""
    model = Llama(EXACT.config).double()
    model.load_state_dict(EXACT.state_dict())
    model.embedding.weight.data[token] = math.nan
    return model


def test_a_text_whose_logits_are_no_numbers_fails_alone() -> None:
    engine = Engine(_damaged(28), texts=3)
    for prompt, count in (([1, 2], 6), ([5, 28], 9), ([3], 4)):
        engine.add(prompt, count, sampling=GREEDY)
    found: dict[int, list[int]] = {}
    errors = {}
    for one in _drain(engine):
        if one.error is None:
            found.setdefault(one.sequence, []).append(one.token)
        else:
            errors[one.sequence] = (one.finish, str(one.error).splitlines()[0])
    assert errors == {1: ("error", "sampling: the model's logits are NaN or infinite")}
    assert found == {0: _alone(EXACT, [1, 2], 6, [], GREEDY), 2: _alone(EXACT, [3], 4, [], GREEDY)}
    assert engine.pages_in_use == 0
    with pytest.raises(DataError, match="NaN or infinite"):
        list(generate(_damaged(28), [[5, 28]], 9, sampling=GREEDY))


def test_each_text_of_a_pass_that_fails_ends_and_the_engine_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(EXACT, texts=2)
    engine.add([1, 2], 9, sampling=GREEDY)
    engine.add([5], 9, sampling=GREEDY)
    before = engine.step()

    def fail(*_: object) -> Tensor:
        raise MemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(engine.model, "logits", fail)
        after = engine.step()
    assert {one.sequence for one in before} <= {0, 1}
    assert [(one.sequence, one.token, one.finish, str(one.error)) for one in after] == [
        (0, -1, "error", "no memory"),
        (1, -1, "error", "no memory"),
    ]
    assert (engine.running, engine.pages_in_use) == (0, 0)
    engine.add([1, 2], 9, sampling=GREEDY)
    assert [one.token for one in _drain(engine)] == _alone(EXACT, [1, 2], 9, [], GREEDY)


def _tokens(engine: Engine) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for one in _drain(engine):
        found.setdefault(one.sequence, []).append(one.token)
    return found


def test_prompts_that_begin_alike_are_read_once_and_give_the_same_bits() -> None:
    shared, seeds = [n % VOCABULARY for n in range(33)], range(5)
    sampling = [Sampling(temperature=1.5, seed=seed) for seed in seeds]
    engine = Engine(HALF, texts=3)
    for own in sampling:  # the same prompt, of which nothing is read again
        engine.add(shared, 6, sampling=own)
    assert _tokens(engine) == {
        seed: _alone(HALF, shared, 6, [], own) for seed, own in zip(seeds, sampling, strict=True)
    }
    assert (engine.counts.prompt_tokens, engine.counts.shared_tokens) == (165, 132)
    other = [*shared[:32], 9]  # two whole parts are shared
    engine.add(other, 6, sampling=sampling[1])
    assert _tokens(engine) == {5: _alone(HALF, other, 6, [], sampling[1])}
    assert engine.counts.shared_tokens == 132 + 2 * PAGE
    assert engine.pages_in_use == 0


def test_a_text_that_is_set_aside_goes_on_with_the_same_bits() -> None:
    sampling = Sampling(temperature=1.0, seed=4)
    prompts = [[n, 5, n, 7] * 3 for n in range(4)]
    engine = Engine(HALF, texts=4, room=5 * PAGE, speculation=DRAFTED)
    for prompt in prompts:
        engine.add(prompt, 30, sampling=sampling)
    found = _tokens(engine)
    assert engine.counts.set_aside > 0
    assert found == {n: _alone(HALF, prompt, 30, [], sampling) for n, prompt in enumerate(prompts)}
    assert engine.pages_in_use == 0


@settings(max_examples=15)
@given(seed=st.integers(0, 1000), drafts=st.booleans())
def test_penalties_and_chances_do_not_depend_on_drafts_and_follow_their_definition(seed: int, drafts: bool) -> None:
    sampling = Sampling(
        temperature=1.0, top_p=1, seed=seed, presence_penalty=0.7, frequency_penalty=1.1, logit_bias={3: 2.0, 5: -100},
        repetition_penalty=1.7,
    )  # fmt: skip
    engine = Engine(EXACT, speculation=DRAFTED if drafts else None)
    engine.add([1, 2, 1, 2, 1, 2], 12, sampling=sampling, logprobs=3)
    tokens = [1, 2, 1, 2, 1, 2]
    for one in _drain(engine):
        with torch.no_grad():
            logits = EXACT(torch.tensor(tokens), torch.tensor([0, len(tokens)]))[-1]
        expected = logits.log_softmax(-1)
        assert one.chance is not None
        assert one.chance.logprob == pytest.approx(float(expected[one.token]), abs=1e-9)
        assert [token for token, _ in one.chance.top] == expected.topk(3).indices.tolist()
        for token in range(VOCABULARY):
            if token in tokens:
                logits[token] = logits[token] / 1.7 if logits[token] > 0 else logits[token] * 1.7
            count = tokens[6:].count(token)
            logits[token] -= 0.7 * (count > 0) + 1.1 * count
        logits[3] += 2
        logits[5] -= 100
        noise = draw_noise(seed, len(tokens), VOCABULARY)
        assert one.token == int((logits.softmax(-1) / noise).argmax())
        tokens.append(one.token)


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


def test_the_last_whole_prompts_keep_their_logits() -> None:
    cache = KVCache(HALF.config, 1, PAGE, torch.bfloat16)
    prefixes, logits = prefixes_module.Prefixes(cache), torch.zeros(1, VOCABULARY)
    most = prefixes_module._WHOLE_PROMPTS
    for number in range(1, most + 3):
        prefixes.add([number], [0], logits + number)
        kept = [one for one in range(1, number + 1) if prefixes.find([one]).logits is not None]
        assert kept == list(range(max(1, number - most + 1), number + 1))
        assert torch.equal(prefixes.find([number]).logits, logits + number)
