"""OpenAI's client, unchanged, against the server: answers, streams, errors, keys, and clients that go."""

from __future__ import annotations

import asyncio
import codecs
import dataclasses
import json
import random
import socket
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch

from cordillera.data.tokenizers.chat import Message
from cordillera.serving.http.app import create_app
from cordillera.serving.language.generation import generate
from cordillera.serving.language.language_model import LanguageModel
from cordillera.serving.language.sampler import Sampling
from cordillera.serving.language.text_service import TextRequest, TextService
from tests.serving.servers import SECONDS, alone, eventually, listening, open_model, open_services, wait_until_idle

pytestmark = pytest.mark.usefixtures("one_thread")

CHAT = [{"role": "user", "content": "the cat sat"}]
HARD = {"temperature": 0, "model": "small"}  # greedy
GREEDY = Sampling(temperature=0)
TEXT: dict[str, Any] = {"model": "small", "prompt": "the cat"}


def _chat_ids(model: LanguageModel, *messages: tuple[str, str]) -> list[int]:
    return model.tokenizer.encode_chat([Message(role, text) for role, text in messages])  # type: ignore[arg-type]


def _expected(model: LanguageModel, prompt: str | list[int], count: int | None = 16, **more: Any) -> str:
    ids = model.tokenizer.encode(prompt, bos=model.tokenizer.adds_bos) if isinstance(prompt, str) else prompt
    return alone(model, TextRequest(ids, count, **{"sampling": GREEDY, **more}))[1]


def test_a_chat_is_answered_as_the_model_alone_does(client: openai.OpenAI, model: LanguageModel) -> None:
    answer = client.chat.completions.create(messages=CHAT, max_tokens=12, **HARD)
    ids = _chat_ids(model, ("user", "the cat sat"))
    tokens, text, finish = alone(model, TextRequest(ids, 12, GREEDY))
    assert answer.choices[0].message.content == text
    assert (answer.choices[0].message.role, answer.choices[0].finish_reason) == ("assistant", finish)
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(ids), len(tokens))
    assert answer.usage.total_tokens == len(ids) + len(tokens)
    assert (answer.model, answer.object) == ("small", "chat.completion")


def test_a_chat_without_a_limit_goes_to_its_end_or_that_of_the_context(
    client: openai.OpenAI, model: LanguageModel
) -> None:
    words = "the mat " * 160
    ids = _chat_ids(model, ("user", words))
    assert 300 < len(ids) < 390
    ended = client.chat.completions.create(messages=[{"role": "user", "content": words}], **HARD)
    assert ended.choices[0].message.content == _expected(model, ids, None)
    answer = client.chat.completions.create(
        messages=[{"role": "user", "content": words}], extra_body={"ignore_eos": True}, **HARD
    )
    assert answer.usage is not None
    assert (answer.usage.total_tokens, answer.choices[0].finish_reason) == (model.config.context, "length")
    assert answer.choices[0].message.content == _expected(model, ids, None, ends=False)
    limited = client.chat.completions.create(messages=CHAT, max_completion_tokens=3, max_tokens=9, **HARD)
    assert limited.usage is not None
    assert limited.usage.completion_tokens <= 3


def test_completions_have_sixteen_tokens_where_nothing_else_is_said(client: openai.OpenAI) -> None:
    answer = client.completions.create(prompt="the cat", extra_body={"ignore_eos": True}, **HARD)
    assert answer.usage is not None
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (16, "length")


def test_several_prompts_as_texts_or_ids_are_answered_in_their_order(
    client: openai.OpenAI, model: LanguageModel
) -> None:
    prompts = ["the cat", "on the mat", "123 漢字"]
    ids = model.tokenizer.encode_batch(prompts, bos=model.tokenizer.adds_bos)
    expected = [_expected(model, prompt) for prompt in prompts]
    for given in (prompts, ids):
        answer = client.completions.create(prompt=given, **HARD)
        assert [(one.index, one.text) for one in answer.choices] == list(enumerate(expected))
    assert client.completions.create(prompt=ids[1], **HARD).choices[0].text == expected[1]
    doubled = client.completions.create(prompt=prompts, n=2, **HARD)
    assert [one.text for one in doubled.choices] == [text for text in expected for _ in range(2)]
    assert doubled.usage is not None
    assert doubled.usage.prompt_tokens == sum(map(len, ids))


def test_a_streamed_chat_is_the_whole_answer_in_pieces(client: openai.OpenAI, plain: httpx.Client) -> None:
    settings: dict[str, Any] = {"messages": CHAT, "max_tokens": 20, "n": 3, "seed": 5, "temperature": 1.0}
    whole = client.chat.completions.create(model="small", **settings)
    options = {"include_usage": True}
    chunks = list(client.chat.completions.create(model="small", stream=True, stream_options=options, **settings))
    for index in range(3):
        own = [chunk.choices[0] for chunk in chunks if chunk.choices and chunk.choices[0].index == index]
        assert own[0].delta.role == "assistant"
        assert all(one.delta.role is None for one in own[1:])
        assert "".join(one.delta.content or "" for one in own) == whole.choices[index].message.content
        assert [one.finish_reason for one in own[:-1]] == [None] * (len(own) - 1)
        assert own[-1].finish_reason == whole.choices[index].finish_reason
    assert (chunks[-1].choices, chunks[-1].usage) == ([], whole.usage)
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1
    body = {"model": "small", "stream": True, **settings}
    raw = plain.post("/v1/chat/completions", json=body)
    assert raw.headers["content-type"].startswith("text/event-stream")
    events = raw.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(event.startswith("data: {") for event in events[:-2])
    assert not any(json.loads(event[6:]).get("usage") for event in events[:-2])


def test_events_have_one_line_for_every_reader(plain: httpx.Client) -> None:
    text = "a\u2028b\u2029c\x85d\x1ce\r\nf 漢"
    body = {**TEXT, "stream": True, "max_tokens": 99, "response_format": {"type": "choice", "choices": [text]}}
    with plain.stream("POST", "/v1/completions", json=body) as answer:
        lines = [line for line in answer.iter_lines() if line]
    assert lines.pop() == "data: [DONE]"
    assert "".join(json.loads(line.removeprefix("data: "))["choices"][0]["text"] for line in lines) == text


@pytest.mark.parametrize("echo", [False, True])
def test_a_streamed_completion_is_the_whole_answer_in_pieces(client: openai.OpenAI, echo: bool) -> None:
    for seed in range(3):
        settings: dict[str, Any] = {"model": "small", "prompt": ["the 漢", "cat "], "seed": seed, "echo": echo}
        whole = client.completions.create(max_tokens=8, **settings)
        texts = ["", ""]
        for chunk in client.completions.create(max_tokens=8, stream=True, **settings):
            texts[chunk.choices[0].index] += chunk.choices[0].text
        assert texts == [one.text for one in whole.choices]
        if echo:
            assert [text[:4] for text in texts] == ["the ", "cat "]


def test_the_same_seed_gives_the_same_text_and_none_gives_others(client: openai.OpenAI) -> None:
    def texts(**more: Any) -> set[str]:
        settings: dict[str, Any] = {"model": "small", "prompt": "the", "temperature": 1.5, **more}
        return {client.completions.create(**settings).choices[0].text for _ in range(3)}

    assert len(texts(seed=7)) == 1
    assert len(texts(seed=-7)) == 1
    assert texts(seed=7) != texts(seed=8)
    assert len(texts()) > 1


def test_stop_strings_end_texts_across_tokens_and_events(client: openai.OpenAI, model: LanguageModel) -> None:
    whole = _expected(model, "the cat", 60, ends=False)
    for stop in (whole[3:6], [whole[9:12], "zzzz"], whole[5]):
        strings = [stop] if isinstance(stop, str) else stop
        ids = model.tokenizer.encode("the cat", bos=model.tokenizer.adds_bos)
        tokens, text, _ = alone(model, TextRequest(ids, 60, GREEDY, stop=tuple(strings), ends=False))
        more: dict[str, Any] = {"stop": stop, "max_tokens": 60, "extra_body": {"ignore_eos": True}, **HARD}
        answer = client.completions.create(prompt="the cat", **more)
        assert (answer.choices[0].text, answer.choices[0].finish_reason) == (text, "stop")
        assert answer.usage is not None
        assert answer.usage.completion_tokens == len(tokens)
        stream = client.completions.create(prompt="the cat", stream=True, **more)
        assert "".join(chunk.choices[0].text for chunk in stream) == text


def _spelled(content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)


def _log_probabilities(model: LanguageModel, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model.model(torch.tensor(tokens), torch.tensor([0, len(tokens)]))[-1].log_softmax(-1)


def test_log_probabilities_are_those_of_the_model_computed_at_once(folder: Path) -> None:
    exact = open_model(folder, dtype="float32")
    with (
        listening(open_services(exact)) as address,
        openai.OpenAI(base_url=f"{address}/v1", api_key="none", timeout=SECONDS) as client,
    ):
        bias = {"9": 3, "70": -100}  # which the reported numbers leave out
        more: dict[str, Any] = {"model": "small", "seed": 3, "max_tokens": 9, "extra_body": {"ignore_eos": True}}
        more |= {"logit_bias": bias, "presence_penalty": 0.5}
        chat = client.chat.completions.create(messages=CHAT, logprobs=True, top_logprobs=4, **more).choices[0]
        ids = _chat_ids(exact, ("user", "the cat sat"))
        sampling = Sampling(temperature=1, top_p=1, seed=3, logit_bias={9: 3, 70: -100}, presence_penalty=0.5)
        new = [one.token for one in generate(exact.model, [ids], 9, (), sampling, exact.tokenizer.vocab_size)]
        assert chat.logprobs is not None
        assert chat.logprobs.content is not None
        for place, told in enumerate(chat.logprobs.content):
            expected = _log_probabilities(exact, ids + new[:place])[: exact.tokenizer.vocab_size]
            top = expected.topk(4)
            assert bytes(told.bytes or []) == exact.tokenizer.decode_bytes([new[place]])
            assert told.logprob == pytest.approx(float(expected[new[place]]), abs=1e-4)
            assert [one.logprob for one in told.top_logprobs] == pytest.approx(top.values.tolist(), abs=1e-4)
            found = [bytes(one.bytes or []) for one in told.top_logprobs]
            assert found == [exact.tokenizer.decode_bytes([int(token)]) for token in top.indices]
        assert len(chat.logprobs.content) == 9

        text = client.completions.create(prompt=ids, logprobs=2, **more).choices[0]
        assert text.logprobs is not None
        assert text.logprobs.tokens == [_spelled(exact.tokenizer.decode_bytes([token])) for token in new]
        assert text.logprobs.token_logprobs == pytest.approx([one.logprob for one in chat.logprobs.content], abs=1e-4)
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        lengths = [len(decoder.decode(exact.tokenizer.decode_bytes([token]))) for token in new]
        assert text.logprobs.text_offset == [sum(lengths[:place]) for place in range(len(new))]
        assert all(len(top) == 2 for top in text.logprobs.top_logprobs or [])
        streamed = [
            chunk.choices[0] for chunk in client.completions.create(prompt=ids, logprobs=2, stream=True, **more)
        ]
        told_tokens = [token for one in streamed if one.logprobs for token in one.logprobs.tokens or []]
        offsets = [offset for one in streamed if one.logprobs for offset in one.logprobs.text_offset or []]
        assert (told_tokens, offsets) == (text.logprobs.tokens, text.logprobs.text_offset)


def test_settings_of_sampling_reach_the_engine(client: openai.OpenAI, model: LanguageModel) -> None:
    settings: dict[str, Any] = {"temperature": 1.3, "top_p": 0.8, "presence_penalty": 1.0, "frequency_penalty": -0.5}
    own = {"top_k": 40, "min_p": 0.01}
    sampling = Sampling(**settings, **own, seed=4, logit_bias={9: 2.5, 11: -3})
    answer = client.completions.create(
        model="small", prompt="the", seed=4, logit_bias={"9": 2.5, "11": -3}, extra_body=own, **settings
    )
    assert answer.choices[0].text == _expected(model, "the", sampling=sampling)
    forced = client.completions.create(prompt=[4], max_tokens=4, logit_bias={"200": 100}, **HARD)
    assert forced.choices[0].text == model.tokenizer.decode([200] * 4)


def test_answers_keep_to_their_form(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 5}, "old": {"type": "boolean"}},
        "required": ["name", "old"],
        "additionalProperties": False,
    }
    forms: list[tuple[dict[str, Any], Callable[[str], bool]]] = [
        ({"type": "json_object"}, lambda text: isinstance(json.loads(text), dict)),
        (
            {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}},
            lambda text: set(json.loads(text)) == {"name", "old"},
        ),
        ({"type": "regex", "pattern": "[ab]{3,5}"}, lambda text: set(text) <= {"a", "b"} and 3 <= len(text) <= 5),
        ({"type": "choice", "choices": ["yes", "no"]}, lambda text: text in ("yes", "no")),
        ({"type": "choice", "choices": ["yes", "no"], "pattern": "z"}, lambda text: text in ("yes", "no")),
    ]
    for form, holds in forms:
        # A bias for quotation marks and closing braces ends strings and objects of a model without sense.
        answer = client.chat.completions.create(
            messages=CHAT,
            response_format=form,
            seed=1,
            n=3,
            model="small",
            max_tokens=250,
            logit_bias={"38": 12, "129": 12},
        )
        for choice in answer.choices:
            if choice.finish_reason == "stop":
                assert holds(choice.message.content or ""), (form, choice.message.content)
        assert any(choice.finish_reason == "stop" for choice in answer.choices), form


def test_tools_and_their_answers_become_text_of_the_prompt(client: openai.OpenAI, model: LanguageModel) -> None:
    function = {"name": "sum", "parameters": {"type": "object"}}
    call = {"id": "1", "type": "function", "function": {"name": "sum", "arguments": "{}"}}
    messages: list[Any] = [
        {"role": "developer", "content": "sum"},
        {"role": "user", "content": [{"type": "text", "text": "1+"}, {"type": "text", "text": "2"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "3"},
    ]
    answer = client.chat.completions.create(
        messages=messages, tools=[{"type": "function", "function": function}], max_tokens=5, **HARD
    )
    said = (
        f"sum\n\nYou can use these tools:\n{json.dumps(function)}\n"
        'To use one, answer with a JSON object such as {"name": "...", "arguments": {...}} and nothing else.'
    )
    ids = _chat_ids(
        model, ("system", said), ("user", "1+2"), ("assistant", json.dumps(call["function"])), ("tool", "3")
    )
    assert answer.choices[0].message.content == _expected(model, ids, 5)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(ids)
    without = client.chat.completions.create(
        messages=messages[:2],
        tools=[{"type": "function", "function": function}],
        tool_choice="none",
        max_tokens=5,
        **HARD,
    )
    assert without.choices[0].message.content == _expected(
        model, _chat_ids(model, ("system", "sum"), ("user", "1+2")), 5
    )


def test_a_request_is_answered_within_milliseconds_on_a_connection_that_is_kept(plain: httpx.Client) -> None:
    plain.get("/health")

    def seconds() -> float:
        started = time.perf_counter()
        assert plain.get("/health").json() == {"status": "ok"}
        return time.perf_counter() - started

    # 0.04 s every time, where the kernel waits to send the answer's body
    assert min(statistics.median(seconds() for _ in range(9)) for _ in range(9)) < 0.03


def test_metrics_count_what_was_answered(client: openai.OpenAI, plain: httpx.Client, service: TextService) -> None:
    def value(name: str) -> float:
        line = next(one for one in plain.get("/metrics").text.splitlines() if one.startswith(f"cordillera_{name}{{"))
        return float(line.rpartition(" ")[2])

    before = value("tokens_total")
    answer = client.completions.create(prompt="the cat", **HARD)
    assert answer.usage is not None
    assert value("tokens_total") - before == answer.usage.completion_tokens
    wait_until_idle(service)
    assert value("num_requests_running") == value("kv_cache_usage") == 0


@pytest.fixture
def slow(service: TextService, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step takes 50 ms longer: a text of 300 tokens takes many seconds."""
    step = service._engine.step
    monkeypatch.setattr(service._engine, "step", lambda: (time.sleep(0.05), step())[1])


LONG: dict[str, Any] = {**TEXT, "max_tokens": 300, "ignore_eos": True, "temperature": 1.0, "n": 10}


@pytest.mark.usefixtures("slow")
def test_a_client_that_goes_in_the_middle_of_a_stream_ends_its_texts(plain: httpx.Client, service: TextService) -> None:
    with plain.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("data: {")
        assert service.accepted == 10
    made = service._engine.counts.tokens
    wait_until_idle(service)
    assert service._engine.counts.tokens - made < 1000  # of 3,000


@pytest.mark.usefixtures("slow")
def test_a_client_that_does_not_wait_for_a_whole_answer_ends_its_texts(
    plain: httpx.Client, service: TextService
) -> None:
    made = service._engine.counts.tokens
    with pytest.raises(httpx.ReadTimeout):
        plain.post("/v1/completions", json={**LONG, "prompt": ["a", "b"], "n": 5}, timeout=0.3)
    wait_until_idle(service)
    assert service._engine.counts.tokens - made < 2000


@pytest.mark.usefixtures("slow")
def test_an_error_of_one_choice_ends_the_others(
    client: openai.OpenAI, service: TextService, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = service.submit
    monkeypatch.setattr(service, "submit", lambda one, told: request(dataclasses.replace(one, seconds=0.2), told))
    with pytest.raises(openai.InternalServerError, match="was not answered within") as caught:
        client.completions.create(prompt="a", max_tokens=300, extra_body={"ignore_eos": True}, **HARD)
    assert caught.value.status_code == 503
    stream = client.completions.create(prompt="a", max_tokens=300, extra_body={"ignore_eos": True}, stream=True, **HARD)
    with pytest.raises(openai.APIError, match="was not answered within"):
        list(stream)


def test_more_than_the_queue_is_refused_with_the_advice_to_try_again(
    client: openai.OpenAI, plain: httpx.Client, slow: None
) -> None:
    with plain.stream("POST", "/v1/completions", json={**LONG, "n": 95, "stream": True}) as answer:
        lines = answer.iter_lines()  # which closes the connection where nothing refers to it
        assert next(lines).startswith("data: {")
        with pytest.raises(openai.RateLimitError, match="texts wait or are being written") as caught:
            client.completions.create(prompt=["a"] * 10, **HARD)
        assert caught.value.response.headers["Retry-After"] == "1"


def test_a_client_that_does_not_read_does_not_hinder_others(
    url: str, client: openai.OpenAI, model: LanguageModel, service: TextService
) -> None:
    body = json.dumps({**LONG, "n": 7, "logprobs": 20, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.sendall(head.encode() + b"\r\n\r\n" + body)
        eventually(lambda: service.accepted == 7, "it is not accepted")
        for _ in range(3):
            assert client.completions.create(prompt="the cat", **HARD).choices[0].text == _expected(model, "the cat")
        wait_until_idle(service)  # its texts are written although it does not read


def test_concurrent_clients_get_their_own_answers(url: str, model: LanguageModel, service: TextService) -> None:
    rng = random.Random(3)
    asked = [(f"the {rng.randrange(10_000)} cat", rng.randrange(100), rng.choice(["", "", "e"])) for _ in range(16)]
    cancelled = {number for number in range(16) if rng.random() < 0.3}

    async def one(client: openai.AsyncOpenAI, number: int) -> str | None:
        prompt, seed, stop = asked[number]
        settings: dict[str, Any] = {"model": "small", "prompt": prompt, "seed": seed, "max_tokens": 30}
        if stop:
            settings["stop"] = stop
        await asyncio.sleep(random.Random(number).random() * 0.3)
        if number % 2:
            text, stream = "", await client.completions.create(stream=True, **settings)
            async for chunk in stream:
                text += chunk.choices[0].text
                if number in cancelled and len(text) > 3:
                    await stream.close()
                    return None
            return text
        call = client.completions.create(**settings)
        if number in cancelled:
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(call, 0.001)
            return None
        return (await call).choices[0].text

    async def everything() -> list[str | None]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=SECONDS) as client:
            return await asyncio.gather(*(one(client, number) for number in range(16)))

    answers = asyncio.run(everything())
    assert sum(answer is not None for answer in answers) >= 8
    for (prompt, seed, stop), answer in zip(asked, answers, strict=True):
        if answer is not None:
            sampling = Sampling(temperature=1, top_p=1, seed=seed)
            assert answer == _expected(model, prompt, 30, sampling=sampling, stop=(stop,))


def test_answers_are_counted_by_path_and_status_and_told(model: LanguageModel) -> None:
    lines: list[str] = []
    services = open_services(model)
    with listening(services, on_answer=lines.append) as address, httpx.Client(base_url=address) as plain:
        assert plain.head("/health").status_code == 200
        assert plain.get("/v1/models/none").status_code == 404
        assert plain.get("/what/ever").status_code == 404
        packed = {"content-encoding": "gzip", "content-type": "application/json"}
        assert plain.post("/v1/completions", content=b"x", headers=packed).status_code == 415
        broken = plain.post("/v1/completions", content=b'{"a": ', headers={"content-type": "application/json"})
        assert (broken.status_code, "at character 6" in broken.text) == (400, True)
        text = plain.get("/metrics").text
    for path, status in (
        ("/health", 200),
        ("/v1/models/", 404),
        ("other", 404),
        ("/v1/completions", 415),
        ("/v1/completions", 400),
    ):
        assert f'cordillera_http_requests_total{{path="{path}",status="{status}"}} 1.0' in text, (path, status)
    assert [line.rsplit(" ", 2)[0] for line in lines[:2]] == [
        '127.0.0.1 "HEAD /health" 200',
        '127.0.0.1 "GET /v1/models/none" 404',
    ]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_client_that_goes_before_its_request_is_whole_has_made_no_mistake(model: LanguageModel, path: str) -> None:
    said: list[str] = []
    services = open_services(model)
    app = create_app(services, on_answer=said.append)
    received = iter([{"type": "http.request", "body": b'{"model"', "more_body": True}, {"type": "http.disconnect"}])
    sent: list[Any] = []

    async def receive() -> Any:
        return next(received)

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b""}
    scope |= {"http_version": "1.1", "scheme": "http", "server": ("test", 80), "client": ("test", 1), "root_path": ""}
    try:
        asyncio.run(app({**scope, "headers": headers}, receive, send))
    finally:
        services.close(SECONDS)
    assert [one["status"] for one in sent if "status" in one] == [499]
    assert f'"POST {path}" 499' in said[0]


def test_a_server_that_leaves_answers_on_connections_that_it_does_not_keep(model: LanguageModel) -> None:
    services = open_services(model)
    with listening(services) as address, httpx.Client(base_url=address) as plain:
        before = plain.get("/v1/models")
        assert "connection" not in before.headers
        services.leaving.set()
        after = plain.get("/v1/models")
        assert (after.json(), after.headers["connection"]) == (before.json(), "close")
        health = plain.get("/health")
        assert (health.status_code, health.json()) == (503, {"status": "unavailable"})


def test_a_server_whose_engine_has_failed_for_good_is_not_alive(model: LanguageModel) -> None:
    services = open_services(model)
    with listening(services) as address, httpx.Client(base_url=address) as plain:
        services.leaving.set()
        live = plain.get("/live")
        assert (live.status_code, live.json()) == (200, {"status": "ok"})
        services.texts["small"].failure = RuntimeError("broken")
        live = plain.get("/live")
        assert (live.status_code, live.json()) == (503, {"status": "failed"})
        assert plain.head("/live").status_code == 503
