"""A service of text: each answer is what it is alone, is told to the end once, and gives back what it took."""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from cordillera.errors import DataError, OverloadError, UnavailableError
from cordillera.kernels.dense.few_rows import MOST_ROWS
from cordillera.serving.language.engine import Generated
from cordillera.serving.language.generation import StopStrings
from cordillera.serving.language.guided import Form, choice_form, json_form, regex_form
from cordillera.serving.language.language_model import LanguageModel
from cordillera.serving.language.sampler import Sampling
from cordillera.serving.language.speculation import NGramDrafter, Speculation
from cordillera.serving.language.text_metrics import TextMetrics
from cordillera.serving.language.text_service import TextDelta, TextRequest, TextService
from tests.serving.servers import SECONDS, Heard, alone, ask, eventually, first_stop, open_model
from tests.serving.small_models import write_model

pytestmark = pytest.mark.usefixtures("one_thread")

GREEDY = Sampling(temperature=0)
PROMPT = TextRequest([4, 70, 9], 12, GREEDY)
ENDLESS = TextRequest([4, 70, 9], None, GREEDY, ends=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "small", head_dim=32, tied=False)


@pytest.fixture(scope="module")
def model(folder: Path) -> LanguageModel:
    """A model that drafts wherever a text repeats itself."""
    opened = open_model(folder, dtype="bfloat16")
    opened.speculation = Speculation([NGramDrafter], [1.0] * MOST_ROWS)
    return opened


@pytest.fixture
def service(model: LanguageModel) -> Iterator[TextService]:
    """A service of four texts at a time, of which nothing is left at the end."""
    opened = TextService(model, texts=4, queue=40)
    yield opened
    opened.close()
    assert opened.accepted == 0
    assert opened._engine.pages_in_use == 0
    assert opened._jobs == {}


def _is_idle(service: TextService) -> bool:
    return service.accepted == 0 and service._engine.pages_in_use == 0 and not service._jobs


@settings(max_examples=300)
@given(
    text=st.text("abc", max_size=30),
    strings=st.lists(st.text("abc", max_size=5), max_size=4),
    cuts=st.lists(st.integers(0, 30), max_size=8),
)
def test_any_cutting_of_a_text_ends_before_the_first_stop_string(
    text: str, strings: list[str], cuts: list[int]
) -> None:
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in pairwise(places)]
    stops, given_out, read, found = StopStrings(strings), "", "", False
    for number, piece in enumerate(pieces):
        more, found = stops.push(piece, last=number == len(pieces) - 1)
        given_out, read = given_out + more, read + piece
        if found:
            break
        assert len(read) - len(given_out) < max(map(len, [*strings, "-"]))  # little is held back
    assert (given_out, found) == first_stop(text, strings)


FORMS: list[Form | None] = [None, None, None, choice_form(["the cat", "the mat"]), regex_form("[a-f]{3,30}")]


def _random_request(rng: random.Random) -> TextRequest:
    shared = [7 + n % 250 for n in range(40)][: rng.choice([0, 16, 33, 40])]  # prompts that begin alike
    return TextRequest(
        [*shared, *(rng.randrange(4, 300) for _ in range(rng.randrange(1, 9)))],
        rng.choice([1, 5, 20, None]),
        rng.choice([GREEDY, Sampling(temperature=1.0, seed=rng.randrange(5)), Sampling(presence_penalty=1.5, seed=3)]),
        rng.choice([1, 1, 3]),
        tuple(rng.sample(["t", "e", " the", "a", "6", "\ufffd\ufffd"], rng.choice([0, 0, 1, 3]))),
        rng.choice(FORMS),
        rng.choice([None, None, 2]),
        rng.random() < 0.8,
    )


def test_every_choice_is_what_it_is_alone_whatever_is_asked_meanwhile(model: LanguageModel) -> None:
    registry = CollectorRegistry()
    service = TextService(model, texts=5, queue=200, cache_bytes=0, name="m", metrics=TextMetrics(registry))
    heard: list[tuple[TextRequest, Heard, bool]] = []

    def client(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(3):
            request = _random_request(rng)
            own, is_cancelled = Heard(request.choices), rng.random() < 0.25
            end = service.submit(request, own)
            heard.append((request, own, is_cancelled))
            if is_cancelled:
                time.sleep(rng.random() * 0.05)
                end()
            elif rng.random() < 0.5:
                own.wait()

    with ThreadPoolExecutor(6) as clients:
        for done in [clients.submit(client, seed) for seed in range(6)]:
            done.result(SECONDS)
        for _, own, is_cancelled in heard:
            if not is_cancelled:
                own.wait()
    eventually(lambda: _is_idle(service), "something is left")
    service.close()
    assert len(heard) == 18
    assert service._engine.counts.shared_tokens > 0
    assert service._engine.counts.accepted > 0  # drafts were right
    finishes = {"stop": 0, "length": 0, "cancelled": 0}
    for request, own, is_cancelled in heard:
        for choice in range(request.choices):
            tokens, text, finish = alone(model, request, choice)
            if not own.finishes[choice]:
                assert is_cancelled
                finishes["cancelled"] += 1
                assert own.tokens(choice) == tokens[: len(own.tokens(choice))]
                assert text.startswith(own.text(choice))
                continue
            assert (own.tokens(choice), own.text(choice), own.finishes[choice]) == (tokens, text, [finish])
            finishes[finish] += 1
            chances = [chance for delta in own.deltas[choice] for chance in delta.chances]
            assert len(chances) == (0 if request.logprobs is None else len(tokens))
    assert all(finishes.values())
    for finish, count in finishes.items():
        assert registry.get_sample_value("cordillera_texts_total", {"model": "m", "finish": finish}) == count


def test_counters_equal_what_was_delivered(model: LanguageModel) -> None:
    registry = CollectorRegistry()
    service = TextService(model, texts=3, name="m", metrics=TextMetrics(registry))
    requests = [replace(PROMPT, prompt=[n, 70, 9], choices=1 + n % 2) for n in range(4, 10)]
    heard = [ask(service, request) for request in requests]
    service.close()
    delivered = [len(own.tokens(choice)) for own in heard for choice in own.deltas]

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"cordillera_{name}", {"model": "m", **labels})

    assert sum(delivered) > 0
    assert value("tokens_total") == sum(delivered)
    assert value("prompt_tokens_total") == sum(len(one.prompt) * one.choices for one in requests)
    assert value("time_to_first_token_seconds_count") == len(delivered)
    assert value("inter_token_latency_seconds_count") == sum(delivered) - len(delivered)
    assert value("e2e_request_latency_seconds_count") == len(delivered)
    assert (value("num_requests_running"), value("num_requests_waiting"), value("kv_cache_usage")) == (0, 0, 0)


def test_a_listener_that_fails_ends_its_requestalone(model: LanguageModel, service: TextService) -> None:
    calls = []

    def fail(delta: TextDelta) -> None:
        calls.append(delta)
        raise RuntimeError("gone")

    heard = Heard()
    service.submit(replace(ENDLESS, choices=3), fail)
    service.submit(ENDLESS, heard)
    assert heard.wait().tokens() == alone(model, ENDLESS)[0]
    eventually(lambda: _is_idle(service), "the request goes on")
    assert len(calls) == 1


class _Gate:
    """Holds an engine's steps until it is opened."""

    def __init__(self, service: TextService, patch: pytest.MonkeyPatch) -> None:
        self._open = threading.Event()
        step = service._engine.step

        def wait() -> list[Generated]:
            assert self._open.wait(SECONDS)
            return step()

        patch.setattr(service._engine, "step", wait)
        self.open = self._open.set


def test_more_requests_than_the_queue_holds_are_refused_and_room_comes_back(
    service: TextService, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = _Gate(service, monkeypatch)
    heard = [Heard(4) for _ in range(10)]
    for own in heard:
        service.submit(replace(PROMPT, choices=4), own)
    assert service.accepted == 40
    for choices in (1, 40):
        with pytest.raises(OverloadError, match="40 of 40 texts wait or are being written"):
            service.submit(replace(PROMPT, choices=choices), Heard())
    with pytest.raises(DataError, match="n: 41 is not from 1 to 40"):
        service.submit(replace(PROMPT, choices=41), Heard())
    gate.open()
    for own in heard:
        own.wait()
    assert _is_idle(service)
    ask(service, PROMPT)


def test_requests_from_many_threads_never_exceed_the_queue(model: LanguageModel) -> None:
    service = TextService(model, texts=2, queue=6)
    most, refused, heard = [0], [0], []
    barrier = threading.Barrier(8)

    def client() -> None:
        barrier.wait(SECONDS)
        for _ in range(6):
            own = Heard(2)
            try:
                service.submit(replace(PROMPT, choices=2), own)
            except OverloadError:
                refused[0] += 1
            else:
                heard.append(own)
            most[0] = max(most[0], service.accepted)

    threads = [threading.Thread(target=client) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    for own in heard:
        own.wait()
    assert _is_idle(service)
    service.close()
    assert most[0] <= 6
    assert len(heard) + refused[0] == 48
    assert refused[0] > 0


def test_a_request_that_takes_too_long_ends_with_an_error_and_gives_its_memory_back(
    service: TextService, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = service._engine.step
    monkeypatch.setattr(service._engine, "step", lambda: (time.sleep(0.2), step())[1])
    heard = Heard(6)
    service.submit(replace(ENDLESS, choices=6, seconds=2), heard)  # some of them wait
    heard.wait()
    assert set(map(tuple, heard.finishes.values())) == {("error",)}
    assert len(heard.tokens(0)) > 0
    for choice in heard.deltas:
        assert isinstance(heard.error(choice), UnavailableError)
        assert "was not answered within 2 seconds" in str(heard.error(choice))
    assert _is_idle(service)


def test_closing_finishes_what_was_accepted_and_refuses_what_comes_later(model: LanguageModel) -> None:
    service = TextService(model, texts=2)
    heard = [Heard() for _ in range(7)]
    for own in heard:
        service.submit(PROMPT, own)
    closing = threading.Thread(target=service.close)
    closing.start()
    eventually(lambda: not service.is_healthy, "it does not close")
    with pytest.raises(UnavailableError, match="is being stopped"):
        service.submit(PROMPT, Heard())
    closing.join(SECONDS)
    assert not closing.is_alive()
    expected = alone(model, PROMPT)
    for own in heard:
        assert (own.tokens(), own.text(), own.finishes[0]) == (*expected[:2], [expected[2]])
    assert not service._thread.is_alive()
    assert _is_idle(service)


def test_closing_with_too_little_time_tells_every_listener_once(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = TextService(model, texts=2)
    step = service._engine.step
    monkeypatch.setattr(service._engine, "step", lambda: (time.sleep(0.2), step())[1])
    heard = [Heard(2) for _ in range(5)]
    ends = [service.submit(replace(ENDLESS, choices=2), own) for own in heard]
    heard[0].wait_for_tokens()
    service.close(0.0)
    for own in heard:
        assert set(map(tuple, own.finishes.values())) == {("error",)}
        assert "the server was stopped" in str(own.error())
    for end in ends:
        end()
    assert _is_idle(service)
    service.close()


class _Broken(BaseException):
    pass


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("raised", [_Broken("broken"), RuntimeError("broken")])
def test_a_step_that_fails_tells_all_listeners_and_nothing_is_accepted_any_more(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch, raised: BaseException
) -> None:
    service = TextService(model, texts=2)
    heard = [Heard() for _ in range(5)]

    def fail() -> list[Generated]:
        raise raised

    with monkeypatch.context() as patch:
        gate = _Gate(service, patch)
        for own in heard:
            service.submit(ENDLESS, own)
        assert service.is_healthy
        patch.setattr(service._engine, "step", fail)
        gate.open()
        for own in heard:
            own.wait()
    assert [own.finishes[0] for own in heard] == [["error"]] * 5
    assert all(isinstance(own.error(), UnavailableError) and "broken" in str(own.error()) for own in heard)
    assert not service.is_healthy
    assert service.failure is raised
    with pytest.raises(UnavailableError, match="has failed: broken"):
        service.submit(PROMPT, Heard())
    service.close()
    assert service.accepted == 0


def test_choices_draw_with_seeds_of_their_own(model: LanguageModel, service: TextService) -> None:
    request = TextRequest([4, 70, 9], 12, Sampling(temperature=1.0, top_p=1.0, seed=11), choices=5)
    heard = ask(service, request)
    texts = [heard.tokens(choice) for choice in range(5)]
    assert texts == [alone(model, request, choice)[0] for choice in range(5)]
    assert len(set(map(tuple, texts))) > 1
    single = replace(request, choices=1, sampling=request.sampling.model_copy(update={"seed": 13}))
    assert ask(service, single).tokens() == texts[2]


def test_a_form_holds_for_every_choice_and_one_that_is_invalid_is_refused(
    model: LanguageModel, service: TextService
) -> None:
    heard = ask(service, replace(PROMPT, choices=4, form=choice_form(["cat", "mat"]), sampling=Sampling(seed=2)))
    assert {heard.text(choice) for choice in range(4)} <= {"cat", "mat"}
    for form in (regex_form("("), json_form({"type": "nonsense"})):
        with pytest.raises(DataError):
            service.submit(replace(PROMPT, form=form), Heard())
    assert service.accepted == 0


@pytest.mark.parametrize(
    ("prompt", "said"),
    [([], "prompt: holds no token"), ([1] * 96, "prompt: has 96 tokens"), ([-1], "token 0 is -1"), ([318], "is 318")],
)
def test_a_prompt_that_cannot_be_continued_is_refused_at_once(
    service: TextService, prompt: list[int], said: str
) -> None:
    with pytest.raises(DataError, match=said):
        service.submit(replace(PROMPT, prompt=prompt), Heard())
    assert service.accepted == 0


def test_a_text_whose_logits_are_no_numbers_failsalone(folder: Path) -> None:
    damaged = open_model(folder, dtype="bfloat16")
    damaged.model.embedding.weight.data[28] = math.nan
    service = TextService(damaged, texts=4)
    heard = [Heard() for _ in range(3)]
    prompts = [[4, 70], [4, 28], [9, 5]]
    for prompt, own in zip(prompts, heard, strict=True):
        service.submit(TextRequest(prompt, 5, GREEDY), own)
    for own in heard:
        own.wait()
    service.close()
    assert isinstance(heard[1].error(), DataError)
    assert "NaN or infinite" in str(heard[1].error())
    for prompt, own in zip(prompts, heard, strict=True):
        if prompt != [4, 28]:
            assert own.tokens() == alone(damaged, TextRequest(prompt, 5, GREEDY))[0]
    assert _is_idle(service)


def test_a_token_without_text_ends_its_choicealone(
    folder: Path, service: TextService, model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    holes = list(model.tokenizer.token_bytes)
    holes[200] = None
    monkeypatch.setitem(model.tokenizer.__dict__, "token_bytes", holes)
    biased = Sampling(temperature=0, logit_bias={200: 100.0})
    beside, heard = Heard(), Heard()
    service.submit(ENDLESS, beside)
    service.submit(replace(ENDLESS, sampling=biased), heard)
    assert "there is no token 200" in str(heard.wait().error())
    assert service.is_healthy
    beside.wait()


def test_a_bias_of_one_text_does_not_reach_others_of_the_same_prompt(folder: Path) -> None:
    exact = open_model(folder, dtype="float32")
    service = TextService(exact)
    expected = alone(exact, PROMPT)
    biased = ask(service, replace(PROMPT, sampling=Sampling(temperature=0, logit_bias={200: 100.0}), logprobs=1))
    assert set(biased.tokens()) == {200}
    assert all(chance.logprob < -1 for delta in biased.deltas[0] for chance in delta.chances)  # as the model holds it
    again = ask(service, PROMPT)
    service.close()
    assert service._engine.counts.shared_tokens > 0
    assert (again.tokens(), again.text()) == expected[:2]


def test_ending_a_request_more_than_once_or_after_its_end_changes_nothing(
    model: LanguageModel, service: TextService
) -> None:
    heard, other = Heard(), Heard()
    end = service.submit(PROMPT, heard)
    heard.wait()
    end()
    end()
    cancel = service.submit(ENDLESS, other)
    cancel()
    cancel()
    assert ask(service, PROMPT).tokens() == alone(model, PROMPT)[0]
    assert _is_idle(service)
    assert heard.finishes[0] == ["length"] or heard.finishes[0] == ["stop"]


def test_no_call_follows_the_end_of_a_request(service: TextService) -> None:
    calls: list[Callable[[], None]] = []
    after = []

    def listen(delta: TextDelta) -> None:
        if calls:
            after.append(delta)

    end = service.submit(ENDLESS, listen)
    end()
    ask(service, PROMPT)  # the ending has been taken note of
    calls.append(end)
    ask(service, PROMPT)
    assert after == []
