"""Answers of a language model to requests of many threads: one thread runs the engine, listeners get the text.

A request has one or more choices, which are texts of the engine. Text is decoded as it comes; what could be the
beginning of a stop string is held back until that is decided.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from cordillera.data.tokenizers.tokenizer import StreamDecoder
from cordillera.errors import DataError, OverloadError, UnavailableError
from cordillera.serving.language.engine import TOGETHER, Engine, Finish, Generated, check_prompt
from cordillera.serving.language.generation import StopStrings
from cordillera.serving.language.guided import Form, Guide
from cordillera.serving.language.language_model import LanguageModel
from cordillera.serving.language.sampler import Sampling, TokenChance
from cordillera.serving.language.text_metrics import TextMetrics

CACHE_BYTES = 1 << 30
"""Memory for keys and values where nothing else is said."""


@dataclass(frozen=True)
class TextRequest:
    """Request to a language model.

    Attributes:
        prompt: Token ids.
        max_new_tokens: Largest number of new tokens of each choice; None for as many as the context has room for.
        sampling: Settings of sampling; choice ``i`` draws with ``seed + i``.
        choices: Number of texts that continue the prompt.
        stop: Texts before which a choice ends.
        form: Form that every choice keeps to; None for any.
        logprobs: Number of most likely tokens whose log probabilities each new token holds; None for none.
        ends: Whether a choice ends where the model ends it; else it goes on for ``max_new_tokens``.
        answers: Whether a choice is a text of its own, which answers a chat; else it continues that of the prompt.
        seconds: Time after which the request is ended, from its submission; None for that of the service.
    """

    prompt: list[int]
    max_new_tokens: int | None = None
    sampling: Sampling = field(default_factory=Sampling)
    choices: int = 1
    stop: tuple[str, ...] = ()
    form: Form | None = None
    logprobs: int | None = None
    ends: bool = True
    answers: bool = False
    seconds: float | None = None


@dataclass(frozen=True)
class TextDelta:
    """What one pass adds to a choice.

    Attributes:
        choice: Number of the choice.
        text: Text, possibly none.
        tokens: New tokens, the one that ended the choice included.
        chances: How likely these were, if the request asks for that.
        finish: Reason why the choice ends here; None while it continues.
        forwards: Number of passes that the choice took so far.
        error: Error that ended the choice, if it failed.
    """

    choice: int
    text: str
    tokens: list[int]
    chances: list[TokenChance]
    finish: Finish | None
    forwards: int
    error: Exception | None = None


Listener = Callable[[TextDelta], None]


@dataclass
class _Choice:
    number: int
    decoder: StreamDecoder
    stops: StopStrings


@dataclass
class _Job:
    """A request that was accepted, and its choices by the numbers of their texts in the engine."""

    request: TextRequest
    listener: Listener
    until: float
    began: float
    choices: dict[int, _Choice] = field(default_factory=dict)
    last: dict[int, float] = field(default_factory=dict)  # time of the newest token of each text


class TextService:
    """A language model that answers requests of any thread.

    Args:
        model: The model; its weights are read now.
        texts: Most texts that are written at a time, at most 32.
        queue: Most choices that are accepted at a time, those that wait included.
        cache_bytes: Memory for keys and values; at least that of one text of the model's whole context.
        seconds: Time after which a request is ended, unless it says less.
        name: Name of the model in errors and metrics; None for that of its file.
        metrics: Where texts and times are counted; None for nowhere.

    Attributes:
        longest_token: Number of bytes of the longest token.
        failure: Error that ended the service; None while it works.

    Raises:
        DataError: If ``texts`` is not from 1 to 32.
        CheckpointError: If weights are invalid.
    """

    def __init__(
        self,
        model: LanguageModel,
        *,
        texts: int = TOGETHER,
        queue: int = 256,
        cache_bytes: int = CACHE_BYTES,
        seconds: float = 600.0,
        name: str | None = None,
        metrics: TextMetrics | None = None,
    ) -> None:
        self.model, self.seconds, self.queue, self._metrics = model, seconds, queue, metrics
        self.name = name or model.path.name
        self.longest_token = max(len(content or b"") for content in model.tokenizer.token_bytes)
        with contextlib.suppress(DataError):  # tokenizers without an end token have no guides
            model.guides  # noqa: B018 -- built now, as this blocks all threads for a third of a second
        config = model.config
        of_token = 2 * config.layers * config.kv_heads * config.head_width * model.dtype.itemsize
        self._engine = Engine(
            model.model,
            texts=texts,
            room=max(config.context + 64, cache_bytes // of_token),
            speculation=model.speculation,
            vocabulary=model.tokenizer.vocab_size,
        )
        self._jobs: dict[int, _Job] = {}  # jobs by sequence of the engine
        self._inbox: list[Callable[[], None]] = []
        self._accepted = 0  # choices that are not ended
        self._changed = threading.Condition()
        self._is_closing = self._is_ended = False
        self.failure: BaseException | None = None
        if metrics is not None:
            metrics.watch(self.name, self._engine)
        self._thread = threading.Thread(target=self._run, name=f"text service {self.name}", daemon=True)
        self._thread.start()

    @property
    def is_healthy(self) -> bool:
        """Whether requests are accepted."""
        return self.failure is None and not self._is_closing

    @property
    def accepted(self) -> int:
        """Number of choices that wait or are being written."""
        return self._accepted

    def submit(self, request: TextRequest, listener: Listener) -> Callable[[], None]:
        """Accept a request; return a function that ends it.

        Args:
            request: The request.
            listener: Called with what each choice gets, by the thread of the service; it returns at once. The last call
                for each choice has a ``finish``. After the request was ended by the function, no call follows.

        Raises:
            DataError: If the request can never be answered, such as by a prompt that is longer than the context.
            OverloadError: If too many requests wait.
            UnavailableError: If the service is closing or has failed.
        """
        check_prompt(self.model.config, request.prompt, request.max_new_tokens or 1, "prompt")
        if not 1 <= request.choices <= self.queue:
            raise DataError(f"{request.choices} is not from 1 to {self.queue}", where="n")
        guides: list[Guide | None] = [None] * request.choices
        if request.form is not None:
            first = self.model.guides.start(request.form)
            guides = [first, *(first.copy() for _ in guides[1:])]
        now = time.monotonic()
        job = _Job(request, listener, now + min(request.seconds or self.seconds, self.seconds), now)
        with self._changed:
            self._check_open()
            if self._accepted + request.choices > self.queue:
                raise OverloadError(
                    f"{self._accepted} of {self.queue} texts wait or are being written",
                    where=self.name,
                    remedy="try again in a moment",
                )
            self._accepted += request.choices
            self._inbox.append(partial(self._add, job, guides))
            self._changed.notify_all()

        def end() -> None:
            with self._changed:
                self._inbox.append(partial(self._cancel, job))
                self._changed.notify_all()

        return end

    def close(self, seconds: float = 60.0) -> None:
        """Accept no more requests, and stop when all are answered; end those that are not within ``seconds``."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._accepted == 0 or self.failure is not None, seconds)
            self._is_ended = True
            self._changed.notify_all()
        self._thread.join()

    def _check_open(self) -> None:
        if self.failure is not None:
            raise UnavailableError(f"has failed: {self.failure}", where=self.name, remedy="start the server again")
        if self._is_closing:
            raise UnavailableError("is being stopped", where=self.name, remedy="ask another server")

    def _run(self) -> None:
        """Loop of the thread: take requests, run a step of the engine, and deliver its output."""
        try:
            while self._take():
                for one in self._engine.step():
                    self._deliver(one)
            self._end_all(UnavailableError("the server was stopped before this was answered"))
        except BaseException as error:
            self.failure = error
            self._end_all(UnavailableError(f"the engine has failed: {error}"))
            raise

    def _take(self) -> bool:
        """Wait for work, and take new requests; return whether the service continues."""
        with self._changed:
            while not (self._inbox or self._jobs or self._is_ended):
                self._changed.wait()
            if self._is_ended:
                return False
            inbox, self._inbox = self._inbox, []
        for act in inbox:
            act()
        now = time.monotonic()
        for job in {id(job): job for job in self._jobs.values() if job.until < now}.values():
            seconds = job.until - job.began
            self._fail(job, UnavailableError(f"was not answered within {seconds:g} seconds", where="request"))
        return True

    def _add(self, job: _Job, guides: list[Guide | None]) -> None:
        request, tokenizer = job.request, self.model.tokenizer
        most = request.max_new_tokens or self._engine.capacity
        stop = tokenizer.stop_ids if request.ends or request.form is not None else ()
        for number, guide in enumerate(guides):
            sampling = request.sampling.model_copy(update={"seed": request.sampling.seed + number})
            decoder = StreamDecoder(tokenizer, begins=request.answers and request.form is None)
            choice = _Choice(number, decoder, StopStrings(request.stop))
            try:
                text = self._engine.add(request.prompt, most, stop, sampling, guide, request.logprobs)
            except Exception as error:
                self._tell(job, choice, TextDelta(number, "", [], [], "error", 0, error))
                continue
            job.choices[text] = choice
            self._jobs[text] = job

    def _cancel(self, job: _Job) -> None:
        for text in job.choices:
            if self._jobs.pop(text, None) is not None:
                self._engine.cancel(text)
                self._release(job, "cancelled")

    def _fail(self, job: _Job, error: Exception) -> None:
        for text, choice in job.choices.items():
            if self._jobs.pop(text, None) is not None:
                self._engine.cancel(text)
                self._tell(job, choice, TextDelta(choice.number, "", [], [], "error", 0, error))

    def _end_all(self, error: Exception) -> None:
        with self._changed:
            self._is_closing = True
            inbox, self._inbox = self._inbox, []
        for act in inbox:
            act()
        for job in list(self._jobs.values()):
            self._fail(job, error)

    def _deliver(self, one: Generated) -> None:
        job = self._jobs.get(one.sequence)
        if job is None:  # the job ended during this step
            return
        choice = job.choices[one.sequence]
        try:
            delta = self._delta(choice, one)
        except DataError as error:  # the vocabulary has no such token
            delta = TextDelta(choice.number, "", [], [], "error", one.forward, error)
        if delta.finish and one.finish is None:
            self._engine.cancel(one.sequence)
        if delta.tokens and self._metrics is not None:
            now, last = time.monotonic(), job.last.get(one.sequence)
            first = now - job.began if last is None else None
            self._metrics.token(self.name, first=first, between=None if last is None else now - last)
            job.last[one.sequence] = now
        if delta.finish:
            del self._jobs[one.sequence]
        self._tell(job, choice, delta)

    @staticmethod
    def _delta(choice: _Choice, one: Generated) -> TextDelta:
        """Return the change that a token makes to a choice."""
        if one.error is not None:
            return TextDelta(choice.number, "", [], [], "error", one.forward, one.error)
        text = choice.decoder.push(one.token)
        if one.finish:
            text += choice.decoder.finish()
        text, found = choice.stops.push(text, last=one.finish is not None)
        chances = [] if one.chance is None else [one.chance]
        finish: Finish | None = "stop" if found else one.finish
        return TextDelta(choice.number, text, [one.token], chances, finish, one.forward + 1)

    def _tell(self, job: _Job, choice: _Choice, delta: TextDelta) -> None:
        if delta.finish:
            self._release(job, delta.finish)
        try:
            job.listener(delta)
        except Exception:  # the listener has disconnected
            self._cancel(job)

    def _release(self, job: _Job, ended: str) -> None:
        """Take note that a choice has ended."""
        if self._metrics is not None:
            self._metrics.ended(self.name, ended, time.monotonic() - job.began)
        with self._changed:
            self._accepted -= 1
            self._changed.notify_all()
