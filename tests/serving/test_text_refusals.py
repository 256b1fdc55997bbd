"""What a server refuses: bad requests by the name of their parameter, bodies that are no JSON, too much, wrong keys."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from cordillera.serving.http.errors import error_body
from cordillera.serving.language.language_model import LanguageModel
from tests.serving.servers import SECONDS, listening, open_services

CHAT = [{"role": "user", "content": "the cat sat"}]
HARD = {"temperature": 0, "model": "small"}
TEXT: dict[str, Any] = {"model": "small", "prompt": "the cat"}
TALK: dict[str, Any] = {"model": "small", "messages": CHAT}
SCHEMA = {"type": "json_schema", "json_schema": {"schema": {"type": "nonsense"}}}


NUMBERS = ("top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
IMAGE = [{"type": "image_url", "image_url": {"url": "https://a.b/c.png"}}]


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("completions", {**TEXT, "wrong": 1}, "wrong"),
        ("completions", {**TEXT, "suffix": "end"}, "suffix"),
        ("completions", {**TEXT, "max_tokens": "many"}, "max_tokens"),
        ("completions", {**TEXT, "max_tokens": 0}, "max_tokens"),
        ("completions", {**TEXT, "temperature": -1}, "temperature"),
        ("completions", {**TEXT, "temperature": float("nan")}, "temperature"),
        *(("completions", {**TEXT, name: float("nan")}, name) for name in NUMBERS),
        ("completions", {**TEXT, "logit_bias": {"5": float("nan")}}, "logit_bias"),
        ("completions", {**TEXT, "top_p": 0}, "top_p"),
        ("completions", {**TEXT, "n": 129}, "n"),
        ("completions", {**TEXT, "n": 101}, "n"),
        ("completions", {**TEXT, "n": 0}, "n"),
        ("completions", {**TEXT, "prompt": ["a"] * 101}, "prompt"),
        ("completions", {**TEXT, "prompt": ["a"] * 5000}, "prompt"),
        ("completions", {**TEXT, "presence_penalty": 3}, "presence_penalty"),
        ("completions", {**TEXT, "logit_bias": {"-3": 1}}, "logit_bias.-3"),
        ("completions", {**TEXT, "logit_bias": {"5": "x"}}, "logit_bias.5"),
        ("completions", {**TEXT, "logit_bias": {"9999": 1}}, "logit_bias"),
        ("completions", {**TEXT, "logprobs": 21}, "logprobs"),
        ("completions", {**TEXT, "best_of": 7}, "best_of"),
        ("completions", {**TEXT, "echo": True, "logprobs": 1}, "echo"),
        ("completions", {**TEXT, "stop": 3}, "stop"),
        ("completions", {**TEXT, "stop": [""]}, "stop.0"),
        ("completions", {**TEXT, "stream": "yes"}, "stream"),
        ("completions", {**TEXT, "max_tokens": "5"}, "max_tokens"),
        ("completions", {**TEXT, "max_tokens": True}, "max_tokens"),
        ("completions", {**TEXT, "stop": ["a"] * 17}, "stop"),
        ("completions", {**TEXT, "prompt": ""}, "prompt"),
        ("completions", {**TEXT, "prompt": []}, "prompt"),
        ("completions", {**TEXT, "prompt": [[]]}, "prompt"),
        ("completions", {**TEXT, "prompt": ["a", ""]}, "prompt.1"),
        ("completions", {**TEXT, "prompt": {"a": 1}}, "prompt"),
        ("completions", {**TEXT, "prompt": [1, 100_000]}, "prompt"),
        ("completions", {**TEXT, "prompt": [[1], [-1]]}, "prompt.1"),
        ("completions", {**TEXT, "prompt": "a " * 500}, "prompt"),
        ("completions", {**TEXT, "prompt": "a\ud800"}, "prompt"),
        ("completions", {"prompt": "a"}, "model"),
        ("completions", {**TEXT, "response_format": {"type": "regex"}}, "response_format.pattern"),
        ("completions", {**TEXT, "response_format": {"type": "regex", "pattern": "("}}, "response_format"),
        ("completions", {**TEXT, "response_format": {"type": "regex", "pattern": "\ud800"}}, "response_format"),
        ("completions", {**TEXT, "response_format": {"type": "choice", "choices": []}}, "response_format"),
        ("completions", {**TEXT, "response_format": {"type": "choice", "choices": ["\ud800"]}}, "response_format"),
        ("completions", {**TEXT, "response_format": SCHEMA}, "response_format"),
        ("completions", {**TEXT, "response_format": {"type": "poem"}}, "response_format.type"),
        ("chat/completions", {**TALK, "messages": []}, "messages"),
        ("chat/completions", {**TALK, "messages": [{"role": "user", "content": "\ud800"}]}, "messages.0.content"),
        ("chat/completions", {**TALK, "messages": [{"role": "user", "content": 3}]}, "messages.0.content"),
        ("chat/completions", {**TALK, "messages": [{"role": "user", "content": IMAGE}]}, "messages.0.content.0.type"),
        ("chat/completions", {**TALK, "messages": [{"role": "user"}]}, "messages.0"),
        ("chat/completions", {**TALK, "messages": [{"role": "user", "content": None}]}, "messages.0"),
        ("chat/completions", {**TALK, "messages": [{"role": "king", "content": "a"}]}, "messages.0.role"),
        ("chat/completions", {**TALK, "messages": [{"role": "user", "content": "a " * 500}]}, "messages"),
        ("chat/completions", {**TALK, "top_logprobs": 3}, "top_logprobs"),
        ("chat/completions", {**TALK, "tool_choice": "required"}, "tool_choice"),
        ("chat/completions", {**TALK, "metadata": {"a": 1}}, "metadata.a"),
    ],
)
def test_a_bad_request_is_refused_by_the_name_of_its_parameter(
    plain: httpx.Client, path: str, body: dict[str, Any], param: str
) -> None:
    # Python's encoder writes lone surrogates and NaN, which httpx's does not.
    content = json.dumps(body)
    answer = plain.post(f"/v1/{path}", content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert len(error["message"]) > 10
    assert error["message"].count(", got ") <= 1
    assert "/" not in error["message"]  # no path of the server


def test_mistakes_in_the_tokenizer_of_a_model_name_no_files(
    plain: httpx.Client, model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = len(model.tokenizer.token_bytes) - 1
    monkeypatch.setitem(model.tokenizer.__dict__, "token_bytes", model.tokenizer.token_bytes[:-1])
    for prompt in ([last], [[1], [last]]):
        error = plain.post("/v1/completions", json={**TEXT, "prompt": prompt, "echo": True}).json()["error"]
        assert (error["param"], error["type"]) == ("prompt", "invalid_request_error")
        assert error["message"].startswith(f"prompt: token {last} is no id of the tokenizer")
        assert "/" not in error["message"]
    monkeypatch.setitem(model.tokenizer.__dict__, "stop_ids", ())
    monkeypatch.delitem(model.__dict__, "guides", raising=False)
    answer = plain.post("/v1/completions", json={**TEXT, "response_format": {"type": "json_object"}})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("tokenizer: has no token that ends a text")
    assert "/" not in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("content", "kind", "said"),
    [
        (b'{"model"', "application/json", "is not JSON"),
        (b"", "application/json", "not a JSON object"),
        (b"null", "application/json", "not a JSON object"),
        (b"[1]", "application/json", "not a JSON object"),
        (b'{"model": "\xff"}', "application/json", "parsing the body"),
        (b"[" * 500_000, "application/json", "parsing the body"),
        (b'{"a":' * 200_000, "application/json", "parsing the body"),
        (json.dumps(TEXT).encode(), "text/plain", "with the header content-type: application/json, not text/plain"),
        (b'{"model": "small", "prompt": "a", "\\ud800": 1}', "application/json", "unicode"),
    ],
)
def test_a_body_that_is_no_json_object_is_refused(plain: httpx.Client, content: bytes, kind: str, said: str) -> None:
    answer = plain.post("/v1/completions", content=content, headers={"Content-Type": kind})
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
    assert said in answer.json()["error"]["message"]


def test_a_body_that_is_too_large_is_refused_with_and_without_a_length(plain: httpx.Client) -> None:
    def parts() -> Iterator[bytes]:
        for _ in range(20):
            yield b" " * 100_000

    for content in (b" " * 2_000_000, parts()):
        answer = plain.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
        assert (answer.status_code, answer.json()["error"]["message"]) == (
            413,
            "the body has more than 1,048,576 bytes",
        )


@pytest.mark.parametrize(
    "body",
    [
        {**TEXT, "prompt": [1.5] * 200_000},
        {**TEXT, "prompt": [[1]] * 200_000},
        {**TEXT, "prompt": [["a"]] * 100_000},
        {**TALK, "messages": [{}] * 200_000},
        {**TEXT, **{f"a{n}": 1 for n in range(70_000)}},
        {**TEXT, "logit_bias": {f"a{n}": 1 for n in range(70_000)}},
        {**TALK, "metadata": {f"a{n}": 1 for n in range(70_000)}},
    ],
)
def test_many_mistakes_in_one_body_do_not_occupy_the_server(plain: httpx.Client, body: dict[str, Any]) -> None:
    content = json.dumps(body).encode()
    started = time.process_time()
    path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
    answer = plain.post(path, content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    assert len(answer.content) < 1000
    assert time.process_time() - started < 3  # with the server's; 13 s where each element's mistake is told


@pytest.mark.parametrize(
    "body",
    [
        {**TEXT, "prompt": "the cat " * 100_000},
        {**TALK, "messages": [{"role": "user", "content": "the cat " * 100_000}]},
        {**TALK, "messages": [{"role": "user", "content": ""}] * 20_000},
    ],
)
def test_what_cannot_fit_the_context_is_refused_before_it_is_tokenized(
    plain: httpx.Client, model: LanguageModel, monkeypatch: pytest.MonkeyPatch, body: dict[str, Any]
) -> None:
    for name in ("encode_plain", "chat_format"):
        monkeypatch.setitem(model.tokenizer.__dict__, name, None)
    answer = plain.post("/v1/completions" if "prompt" in body else "/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert "is too long for the context of 400 tokens" in answer.json()["error"]["message"]


def test_unknown_models_paths_and_methods(client: openai.OpenAI, plain: httpx.Client) -> None:
    assert [one.id for one in client.models.list()] == ["small"]
    assert client.models.retrieve("small").id == "small"
    for call in (
        lambda: client.models.retrieve("large/one"),
        lambda: client.completions.create(model="large", prompt="a"),
        lambda: client.chat.completions.create(model="large", messages=CHAT),  # type: ignore[arg-type]
    ):
        with pytest.raises(openai.NotFoundError, match="no model") as caught:
            call()
        assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    refused = plain.post("/v1/score", json={"rows": [{}], "model": "small"})
    assert refused.status_code == 404
    assert "the models here write text: /v1/completions" in refused.text
    assert plain.get("/v1/nothing").status_code == 404
    assert plain.get("/v1/completions").status_code == 405
    assert plain.post("/health").status_code == 405
    assert "error" in plain.get("/v1/completions").json()


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        *((status, "invalid_request_error") for status in (400, 405, 411, 413, 415, 422, 431)),
        *((401, "authentication_error"), (404, "not_found_error"), (429, "rate_limit_error")),
        *((500, "server_error"), (503, "service_unavailable")),
    ],
)
def test_the_kind_of_an_error_follows_from_its_status(status: int, kind: str) -> None:
    assert error_body(status, "wrong")["error"]["type"] == kind


def test_requests_need_the_key_where_there_is_one(folder: Path, model: LanguageModel) -> None:
    with listening(open_services(model), api_key="gehëim") as address:
        for key, works in (("gehëim", True), ("geheim", False), ("x", False), ("gehëim x", False)):
            bearer = {"Authorization": f"Bearer {key}".encode()}
            for path in ("/v1/models", "/metrics", "/openapi.json", "/v1/nothing"):
                status = httpx.get(address + path, headers=bearer, timeout=SECONDS).status_code
                assert status == (401 if not works else 404 if path == "/v1/nothing" else 200), (key, path)
        assert httpx.get(f"{address}/health", timeout=SECONDS).status_code == 200
        assert httpx.get(f"{address}//v1/models", timeout=SECONDS).status_code == 401
        refused = httpx.post(f"{address}/v1/completions", json=TEXT, timeout=SECONDS)
        assert (refused.status_code, refused.headers["WWW-Authenticate"]) == (401, "Bearer")
        with (
            openai.OpenAI(base_url=f"{address}/v1", api_key="wrong") as client,
            pytest.raises(openai.AuthenticationError, match="missing or wrong"),
        ):
            client.models.list()
