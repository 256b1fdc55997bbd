"""Text services and applications of tests: a small model, and a server on a free port of this machine in a thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn
from prometheus_client import CollectorRegistry

from cordillera.data.tokenizers.tokenizer import StreamDecoder
from cordillera.serving.http.app import Services, create_app
from cordillera.serving.language.generation import generate
from cordillera.serving.language.language_model import LanguageModel
from cordillera.serving.language.text_metrics import TextMetrics
from cordillera.serving.language.text_service import TextDelta, TextRequest, TextService
from cordillera.workflows.serving.opening import ServerConfig
from cordillera.workflows.serving.server import bind

SECONDS = 60.0
"""Deadline of what takes far less, whatever else the machine does."""


def eventually(holds: Callable[[], bool], what: str, seconds: float = SECONDS) -> None:
    """Wait until something holds; fail after some time."""
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until, what
        time.sleep(0.005)


def open_model(folder: Path, **settings: Any) -> LanguageModel:
    """Return the model of a folder, without drafts unless they are asked for: measuring their cost takes seconds."""
    return LanguageModel(folder, device="cpu", **{"dtype": "float32", "drafter": "none", **settings})


def open_services(model: LanguageModel, name: str = "small", **settings: Any) -> Services:
    """Return the services of an application of one model."""
    registry = CollectorRegistry()
    service = TextService(model, name=name, metrics=TextMetrics(registry), **settings)
    return Services({name: service}, {}, registry)


@contextmanager
def listening(services: Services, **settings: Any) -> Iterator[str]:
    """Serve an application at the address that is returned; its services are closed in the end."""
    app = create_app(services, **settings)
    server = uvicorn.Server(
        uvicorn.Config(app, log_level="critical", ws="none", lifespan="off", timeout_graceful_shutdown=5)
    )
    with bind(ServerConfig(port=0)) as free:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [free]}, daemon=True)
        thread.start()
        try:
            eventually(lambda: server.started, "the server does not start")
            yield f"http://127.0.0.1:{free.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(SECONDS)
            services.close(1.0)
            assert not thread.is_alive()


class Heard:
    """A listener that keeps what it is told.

    Attributes:
        deltas: What each choice was told, by its number.
        finishes: Reasons for which choices ended, by number.
    """

    def __init__(self, choices: int = 1) -> None:
        self.deltas: dict[int, list[TextDelta]] = {number: [] for number in range(choices)}
        self.finishes: dict[int, list[str]] = {number: [] for number in range(choices)}
        self._changed = threading.Condition()

    def __call__(self, delta: TextDelta) -> None:
        with self._changed:
            self.deltas[delta.choice].append(delta)
            if delta.finish:
                self.finishes[delta.choice].append(delta.finish)
            self._changed.notify_all()

    def wait(self, seconds: float = SECONDS) -> Heard:
        """Wait until all choices have ended."""
        with self._changed:
            assert self._changed.wait_for(lambda: all(self.finishes.values()), seconds), self.finishes
        return self

    def wait_for_tokens(self, count: int = 1, seconds: float = SECONDS) -> None:
        """Wait until the first choice has some tokens."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.tokens(0)) >= count, seconds)

    def text(self, choice: int = 0) -> str:
        """Return the text of a choice."""
        return "".join(delta.text for delta in self.deltas[choice])

    def tokens(self, choice: int = 0) -> list[int]:
        """Return the tokens of a choice."""
        return [token for delta in self.deltas[choice] for token in delta.tokens]

    def error(self, choice: int = 0) -> Exception | None:
        """Return what ended a choice, if it failed."""
        return self.deltas[choice][-1].error


def ask(service: TextService, request: TextRequest) -> Heard:
    """Submit a request and wait for its end."""
    heard = Heard(request.choices)
    service.submit(request, heard)
    return heard.wait()


def first_stop(text: str, strings: list[str]) -> tuple[str, bool]:
    """The definition: read character by character; end before the longest string that is then complete."""
    for end in range(len(text) + 1):
        if found := [one for one in strings if one and text[:end].endswith(one)]:
            return text[: end - max(map(len, found))], True
    return text, False


def alone(model: LanguageModel, request: TextRequest, choice: int = 0) -> tuple[list[int], str, str]:
    """Tokens, text and finish of a choice that nothing else is beside, written without drafts."""
    tokenizer = model.tokenizer
    sampling = request.sampling.model_copy(update={"seed": request.sampling.seed + choice})
    stop = tokenizer.stop_ids if request.ends or request.form else ()
    guide = None if request.form is None else lambda: model.guides.start(request.form)
    count = request.max_new_tokens or model.config.context
    decoder, tokens, text = StreamDecoder(tokenizer), [], ""
    for one in generate(model.model, [request.prompt], count, stop, sampling, tokenizer.vocab_size, None, guide):
        tokens.append(one.token)
        text += decoder.push(one.token) + (decoder.finish() if one.finish else "")
        before, found = first_stop(text, list(request.stop))
        if found:
            return tokens, before, "stop"
        if one.finish:
            return tokens, text, one.finish
    raise AssertionError("the text does not end")


def wait_until_idle(service: TextService) -> None:
    """Wait until a service has given everything back."""
    eventually(
        lambda: service.accepted == 0 and service._engine.pages_in_use == 0 and not service._jobs,
        "the engine goes on with a text that nobody waits for",
    )
