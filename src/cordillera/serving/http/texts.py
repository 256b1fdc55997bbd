"""Routes that answer with text: ``/v1/completions`` and ``/v1/chat/completions``."""

from __future__ import annotations

import asyncio
import codecs
import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

from anyio import to_thread
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from cordillera.data.tokenizers.tokenizer import Tokenizer, check_text
from cordillera.errors import DataError
from cordillera.serving.http.bodies import ChatBody, CompletionBody, TextBody
from cordillera.serving.http.errors import CLIENT_LEFT, answer_to, error_answer, error_body, param_of, status_of, told
from cordillera.serving.language.engine import check_prompt
from cordillera.serving.language.guided import Form
from cordillera.serving.language.sampler import TokenChance
from cordillera.serving.language.text_service import TextDelta, TextRequest, TextService


def text_router(services: Mapping[str, TextService]) -> APIRouter:
    """Return the routes of models that write, by name."""
    router = APIRouter()

    @router.post("/v1/completions", response_model=None)
    async def complete(body: CompletionBody, request: Request) -> Response:
        """Continue prompts."""
        if (service := services.get(body.model)) is None:
            return _unknown(body.model, services)
        return await _answer(_Completion(body, service), request)

    @router.post("/v1/chat/completions", response_model=None)
    async def chat(body: ChatBody, request: Request) -> Response:
        """Answer a chat."""
        if (service := services.get(body.model)) is None:
            return _unknown(body.model, services)
        return await _answer(_Chat(body, service), request)

    return router


def _unknown(model: str, services: Mapping[str, object]) -> JSONResponse:
    known = ", ".join(services) or "none"
    return error_answer(404, f"no model {model!r} writes text here; there is {known}", "model", "model_not_found")


class _Exchange(ABC):
    """A request for text, and the shapes of its answers.

    Args:
        body: Body of the request.
        service: The model.
    """

    kind, chunk_kind, prefix = "", "", ""
    answers_chat = False

    def __init__(self, body: TextBody, service: TextService) -> None:
        self.body, self.service = body, service
        self.id, self.created = f"{self.prefix}-{uuid.uuid4().hex}", int(time.time())
        self.choices = body.n or 1
        self.prompt_tokens = self.new_tokens = 0
        self._queue: asyncio.Queue[tuple[int, TextDelta]] = asyncio.Queue()
        self._ends: list[Callable[[], None]] = []
        self._left = 0

    @property
    def tokenizer(self) -> Tokenizer:
        return self.service.model.tokenizer

    @abstractmethod
    def requests(self) -> list[TextRequest]:
        """Return the requests to the service, one per prompt."""

    @abstractmethod
    def choice(self, index: int, deltas: Sequence[TextDelta]) -> dict[str, Any]:
        """Return a choice of an answer that is whole."""

    @abstractmethod
    def piece(self, index: int, delta: TextDelta) -> dict[str, Any]:
        """Return a choice of an event of a stream."""

    def first(self, index: int) -> dict[str, Any] | None:
        """Return the content of the first event of a choice in a stream; None if no event precedes the text."""
        return None

    async def submit(self) -> None:
        """Ask the service."""
        loop = asyncio.get_running_loop()

        def listen(number: int, delta: TextDelta) -> None:
            loop.call_soon_threadsafe(self._queue.put_nowait, (number * self.choices + delta.choice, delta))

        def submit() -> None:
            requests = self.requests()
            self.prompt_tokens = sum(len(one.prompt) for one in requests)
            self._left = sum(one.choices for one in requests)
            for number, one in enumerate(requests):  # kept at once, as this may be cancelled meanwhile
                self._ends.append(self.service.submit(one, partial(listen, number)))

        await to_thread.run_sync(submit)

    async def deltas(self) -> AsyncIterator[tuple[int, TextDelta]]:
        """Yield the additions to choices until all choices have ended."""
        while self._left:
            index, delta = await self._queue.get()
            self._left -= delta.finish is not None
            self.new_tokens += len(delta.tokens)
            yield index, delta

    def end(self) -> None:
        """Cancel the unanswered requests."""
        for end in self._ends:
            end()

    async def answer(self) -> Response:
        """Return the whole answer; the first choice that fails is the answer's error."""
        found: dict[int, list[TextDelta]] = {}
        async for index, delta in self.deltas():
            if delta.error is not None:
                return answer_to(delta.error)
            found.setdefault(index, []).append(delta)
        choices = [self.choice(index, found[index]) for index in sorted(found)]
        return JSONResponse({**self._head(self.kind), "choices": choices, "usage": self.usage()})

    async def events(self) -> AsyncIterator[str]:
        """Yield the events of a stream."""
        options = self.body.stream_options
        tells_usage = options is not None and options.include_usage
        rest = {"usage": None} if tells_usage else {}
        head, begun = self._head(self.chunk_kind), set[int]()
        async for index, delta in self.deltas():
            if delta.error is not None:
                yield _event(error_body(status_of(delta.error), told(delta.error), param_of(delta.error)))
                break
            if index not in begun and (first := self.first(index)) is not None:
                yield _event({**head, "choices": [first], **rest})
            begun.add(index)
            if delta.text or delta.finish or delta.chances:
                yield _event({**head, "choices": [self.piece(index, delta)], **rest})
        else:
            if tells_usage:
                yield _event({**head, "choices": [], "usage": self.usage()})
        yield "data: [DONE]\n\n"

    def usage(self) -> dict[str, int]:
        """Return numbers of tokens."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.new_tokens,
            "total_tokens": self.prompt_tokens + self.new_tokens,
        }

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.body.model}

    def _check_length(self, texts: Sequence[str], where: str) -> None:
        """Refuse texts that cannot fit the context, before seconds are spent on their tokens."""
        context = self.service.model.config.context
        if len(texts) > context or sum(map(len, texts)) > context * self.service.longest_token:
            raise DataError(
                f"is too long for the context of {context} tokens",
                where=where,
                remedy="shorten it, or use a model with a longer context",
            )

    def _request(self, prompt: list[int], logprobs: int | None, where: str) -> TextRequest:
        body, most = self.body, self._most()
        check_prompt(self.service.model.config, prompt, most or 1, where)
        return TextRequest(
            prompt,
            most,
            body.sampling(),
            self.choices,
            body.stops,
            self._form,
            logprobs,
            ends=not body.ignore_eos,
            answers=self.answers_chat,
        )

    @cached_property
    def _form(self) -> Form | None:
        return self.body.form()

    def _most(self) -> int | None:
        return self.body.max_tokens


class _Completion(_Exchange):
    """A request to continue prompts."""

    kind = chunk_kind = "text_completion"
    prefix = "cmpl"

    def __init__(self, body: CompletionBody, service: TextService) -> None:
        super().__init__(body, service)
        self.completion = body
        self._prompts: list[str] = []
        self._offsets: dict[int, int] = {}
        self._decoders: dict[int, codecs.IncrementalDecoder] = {}

    def _most(self) -> int | None:
        return 16 if self.body.max_tokens is None else self.body.max_tokens  # OpenAI's default

    def requests(self) -> list[TextRequest]:
        body, tokenizer = self.completion, self.tokenizer
        if body.best_of not in (None, 1, self.choices):
            raise DataError("is not supported: all choices are returned", where="best_of", remedy="leave it out")
        if body.echo and body.logprobs is not None:
            raise DataError("has no log-probabilities of the prompt", where="echo", remedy="leave out one of both")
        if body.echo and self._unknown_id is not None:
            raise DataError(
                f"token {self._unknown_id} is no id of the tokenizer, so that its text cannot be returned",
                where="prompt",
                remedy="leave out echo, or use ids of the tokenizer",
            )
        prompts = body.prompts()
        if not prompts:
            raise DataError("is empty", where="prompt")
        if (count := len(prompts) * self.choices) > self.service.queue:
            raise DataError(
                f"asks for {count:,} texts, at most {self.service.queue:,} are accepted at a time",
                where="prompt" if len(prompts) > 1 else "n",
            )
        found = []
        for number, prompt in enumerate(prompts):
            where = "prompt" if len(prompts) == 1 else f"prompt.{number}"
            if isinstance(prompt, str):
                check_text(prompt, where)
                if not prompt:
                    raise DataError("is empty", where=where)
                self._check_length([prompt], where)
                prompt = tokenizer.encode(prompt, bos=tokenizer.adds_bos)
            found.append(self._request(prompt, body.logprobs, where))
            self._prompts.append(tokenizer.decode(prompt, skip_special=True) if body.echo else "")
        return found

    @property
    def _unknown_id(self) -> int | None:
        """First id of the prompts that the tokenizer does not have; None if it has all."""
        contents = self.tokenizer.token_bytes
        ids = (token for prompt in self.completion.prompts() if not isinstance(prompt, str) for token in prompt)
        return next((one for one in ids if not 0 <= one < len(contents) or contents[one] is None), None)

    def choice(self, index: int, deltas: Sequence[TextDelta]) -> dict[str, Any]:
        text = self._prompts[index // self.choices] + "".join(one.text for one in deltas)
        return {
            "index": index,
            "text": text,
            "logprobs": self._logprobs(index, deltas),
            "finish_reason": deltas[-1].finish,
        }

    def piece(self, index: int, delta: TextDelta) -> dict[str, Any]:
        text = delta.text
        if index not in self._offsets:  # the first event of the choice
            text = self._prompts[index // self.choices] + text
        return {
            "index": index,
            "text": text,
            "logprobs": self._logprobs(index, [delta]),
            "finish_reason": delta.finish,
        }

    def _logprobs(self, index: int, deltas: Sequence[TextDelta]) -> dict[str, Any] | None:
        self._offsets.setdefault(index, len(self._prompts[index // self.choices]))
        if self.completion.logprobs is None:
            return None
        ids = [token for delta in deltas for token in delta.tokens]
        chances = [chance for delta in deltas for chance in delta.chances]
        names, offsets = [self._name(token) for token in ids], []
        decoder = self._decoders.setdefault(index, codecs.getincrementaldecoder("utf-8")("replace"))
        for token in ids:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(decoder.decode(_content(self.tokenizer, token)))
        top = [{self._name(token): value for token, value in chance.top} for chance in chances]
        values = [chance.logprob for chance in chances]
        return {"tokens": names, "token_logprobs": values, "top_logprobs": top or None, "text_offset": offsets}

    def _name(self, token: int) -> str:
        """Return the text of a token, or its bytes spelled out where they are part of a character only."""
        content = _content(self.tokenizer, token)
        try:
            return content.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)


class _Chat(_Exchange):
    """A request to answer a chat."""

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"
    answers_chat = True

    def __init__(self, body: ChatBody, service: TextService) -> None:
        super().__init__(body, service)
        self.conversation = body

    def _most(self) -> int | None:
        body = self.conversation
        return body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens

    def requests(self) -> list[TextRequest]:
        body = self.conversation
        if body.top_logprobs is not None and not body.logprobs:
            raise DataError("needs logprobs: true", where="top_logprobs")
        messages = body.chat()
        for number, message in enumerate(messages):
            check_text(message.content, f"messages.{number}.content")
        self._check_length([message.content for message in messages], "messages")
        try:
            prompt = self.tokenizer.encode_chat(messages)
        except DataError as error:  # hide the location, which names files of the server
            raise DataError(error.what, where="messages", remedy=error.remedy) from error
        return [self._request(prompt, (body.top_logprobs or 0) if body.logprobs else None, "messages")]

    def choice(self, index: int, deltas: Sequence[TextDelta]) -> dict[str, Any]:
        text = "".join(one.text for one in deltas)
        return {
            "index": index,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": self._logprobs(deltas),
            "finish_reason": deltas[-1].finish,
        }

    def first(self, index: int) -> dict[str, Any] | None:
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def piece(self, index: int, delta: TextDelta) -> dict[str, Any]:
        return {
            "index": index,
            "delta": {"content": delta.text} if delta.text else {},
            "logprobs": self._logprobs([delta]),
            "finish_reason": delta.finish,
        }

    def _logprobs(self, deltas: Sequence[TextDelta]) -> dict[str, Any] | None:
        if not self.conversation.logprobs:
            return None
        pairs = [pair for delta in deltas for pair in zip(delta.tokens, delta.chances, strict=True)]
        return {"content": [self._token(token, chance) for token, chance in pairs], "refusal": None}

    def _token(self, token: int, chance: TokenChance) -> dict[str, Any]:
        top = [self._named(other, value) for other, value in chance.top]
        return {**self._named(token, chance.logprob), "top_logprobs": top}

    def _named(self, token: int, value: float) -> dict[str, Any]:
        content = _content(self.tokenizer, token)
        return {"token": content.decode("utf-8", "replace"), "logprob": value, "bytes": list(content)}


def _content(tokenizer: Tokenizer, token: int) -> bytes:
    """Return the bytes of a token; none of an id that the vocabulary leaves out."""
    try:
        return tokenizer.decode_bytes([token])
    except DataError:
        return b""


class _Events(StreamingResponse):
    """A stream of events; when it ends, for any reason, the unfinished texts are cancelled."""

    def __init__(self, exchange: _Exchange) -> None:
        super().__init__(exchange.events(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._exchange = exchange

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._exchange.end()


async def _answer(exchange: _Exchange, request: Request) -> Response:
    """Answer a request, or end it if the client goes."""
    try:
        await exchange.submit()
    except BaseException:
        exchange.end()
        raise
    if exchange.body.stream:
        return _Events(exchange)
    answer, gone = asyncio.ensure_future(exchange.answer()), asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
        return answer.result() if answer.done() else Response(status_code=CLIENT_LEFT)
    finally:
        for task in (answer, gone):
            task.cancel()
        exchange.end()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _event(content: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"  # ASCII, as some clients end lines at characters such as U+2028
