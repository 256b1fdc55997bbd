"""Bodies of requests for text, by the names of OpenAI's interface."""

from __future__ import annotations

import json
import secrets
from dataclasses import replace
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from cordillera.data.tokenizers.chat import Message
from cordillera.errors import DataError
from cordillera.serving.language.guided import Form, choice_form, json_form, regex_form
from cordillera.serving.language.sampler import Sampling, make_sampling

MOST_LOGPROBS = 20
_STOPS = 16
_MOST_PROMPTS = 4096
_MOST_KEYS = 1024  # most entries of an object with free keys

Stop = Annotated[str, Field(min_length=1, max_length=1000)]
_T = TypeVar("_T")
# Validation of a list stops at its first error: a body of some megabytes could have millions of errors.
Many = Annotated[list[_T], Field(fail_fast=True)]


def _few_keys(values: object) -> object:
    if isinstance(values, dict) and len(values) > _MOST_KEYS:
        raise ValueError(f"has {len(values):,} entries, of at most {_MOST_KEYS:,}")
    return values


def _is_number(value: object) -> object:
    if isinstance(value, str | bool):
        raise ValueError("must be a number")
    return value


FewKeys = BeforeValidator(_few_keys)
Whole = Annotated[int, BeforeValidator(_is_number)]
Real = Annotated[float, BeforeValidator(_is_number)]
Switch = Annotated[bool, Field(strict=True)]


class StreamOptions(BaseModel):
    """Options of a stream.

    Attributes:
        include_usage: Whether the last event contains numbers of tokens.
    """

    include_usage: Switch = False


class JsonSchema(BaseModel):
    """A JSON schema with a name."""

    model_config = ConfigDict(populate_by_name=True)

    name: str = "document"
    content: dict[str, Any] = Field(alias="schema")
    strict: Switch | None = None
    description: str | None = None


class ResponseFormat(BaseModel):
    """Form of a text.

    Attributes:
        type: ``text``, ``json_object``, ``json_schema`` or, beyond OpenAI's, ``regex`` and ``choice``.
        json_schema: Schema of the document.
        pattern: Regular expression that the text matches.
        choices: Texts of which it is one.
    """

    type: Literal["text", "json_object", "json_schema", "regex", "choice"]
    json_schema: JsonSchema | None = None
    pattern: str | None = None
    choices: Many[str] | None = None

    def form(self) -> Form | None:
        """Return the form, None for any text.

        Raises:
            DataError: If what the type needs is not given, or is not valid.
        """
        if self.type == "text":
            return None
        try:
            return replace(self._form(), where="response_format")
        except ValueError as error:  # the library refuses, for example, half a character
            raise DataError(f"is not valid: {error}", where="response_format") from error
        except DataError as error:
            if error.where and error.where.startswith("response_format"):
                raise
            raise DataError(error.what, where="response_format", remedy=error.remedy) from error

    def _form(self) -> Form:
        if self.type == "json_object":
            return json_form()
        needs: dict[str, object] = {"json_schema": self.json_schema, "regex": self.pattern, "choice": self.choices}
        if needs[self.type] is None:
            key = {"json_schema": "json_schema", "regex": "pattern", "choice": "choices"}[self.type]
            raise DataError(f"is needed by the type {self.type}", where=f"response_format.{key}")
        if self.type == "json_schema" and self.json_schema is not None:
            return json_form(self.json_schema.content)
        if self.type == "regex" and self.pattern is not None:
            return regex_form(self.pattern)
        return choice_form(self.choices or [])


class TextBody(BaseModel):
    """What requests for text and for answers have in common.

    Attributes:
        ignore_eos: Whether a text goes on where the model ends it (as in vLLM).
    """

    model_config = ConfigDict(extra="forbid")

    model: str
    max_tokens: Whole | None = Field(None, ge=1)
    temperature: Real | None = Field(None, ge=0, le=100)
    top_p: Real | None = Field(None, gt=0, le=1)
    top_k: Whole | None = Field(None, ge=-1)
    min_p: Real | None = Field(None, ge=0, le=1)
    presence_penalty: Real | None = Field(None, ge=-2, le=2)
    frequency_penalty: Real | None = Field(None, ge=-2, le=2)
    repetition_penalty: Real | None = Field(None, gt=0, le=100)
    logit_bias: Annotated[
        dict[Annotated[int, Field(ge=0)], Annotated[float, Field(ge=-100, le=100)]] | None, FewKeys
    ] = None
    seed: Whole | None = Field(None, ge=-(2**63), lt=2**63)
    n: Whole | None = Field(None, ge=1, le=128)
    stop: Stop | Many[Stop] | None = None
    stream: Switch | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    ignore_eos: Switch = False
    user: str | None = None
    metadata: Annotated[dict[str, str] | None, FewKeys] = None
    store: Switch | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _few_parameters(cls, values: object) -> object:
        return _few_keys(values)

    @field_validator("stop")
    @classmethod
    def _few_stops(cls, stop: str | list[str] | None) -> str | list[str] | None:
        if isinstance(stop, list) and len(stop) > _STOPS:
            raise ValueError(f"at most {_STOPS} strings can end a text, got {len(stop)}")
        return stop

    @property
    def stops(self) -> tuple[str, ...]:
        """Strings before which a text ends."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def sampling(self) -> Sampling:
        """Return settings of sampling; OpenAI's defaults, and a random seed, where nothing is said."""
        return make_sampling(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(0, self.top_k or 0),
            min_p=self.min_p or 0.0,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
            logit_bias=self.logit_bias or {},
            seed=secrets.randbits(48) if self.seed is None else self.seed % 2**61,
        )

    def form(self) -> Form | None:
        """Return the form that texts keep to; None for any."""
        return None if self.response_format is None else self.response_format.form()


class CompletionBody(TextBody):
    """A request to continue prompts.

    Attributes:
        prompt: A text, several, or token ids of one or several.
        echo: Whether the text begins with the prompt.
        logprobs: Number of most likely tokens to return with log probabilities.
    """

    prompt: (
        str
        | Annotated[Many[str], Field(max_length=_MOST_PROMPTS)]
        | Many[int]
        | Annotated[Many[Many[int]], Field(max_length=_MOST_PROMPTS)]
    )
    echo: Switch | None = None
    logprobs: Whole | None = Field(None, ge=0, le=MOST_LOGPROBS)
    best_of: Whole | None = None
    suffix: None = None

    def prompts(self) -> list[str | list[int]]:
        """Return the prompts: texts, or lists of token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        ids = [one for one in self.prompt if isinstance(one, int)]
        return [ids] if ids else [one for one in self.prompt if not isinstance(one, int)]


class ContentPart(BaseModel):
    """A part of a message: text."""

    type: Literal["text"]
    text: str


class ToolFunction(BaseModel):
    """A function that is called, or could be."""

    model_config = ConfigDict(extra="allow")

    name: str


class ToolCall(BaseModel):
    """A call of a tool in an earlier message."""

    model_config = ConfigDict(extra="allow")

    function: ToolFunction


class ChatMessage(BaseModel):
    """A message of a chat."""

    model_config = ConfigDict(extra="ignore")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Many[ContentPart] | None = None
    tool_calls: Many[ToolCall] | None = None

    @model_validator(mode="after")
    def _says_something(self) -> ChatMessage:
        if self.content is None and (self.role != "assistant" or self.tool_calls is None):
            raise ValueError(f"a message of role {self.role!r} needs content")
        return self

    def message(self) -> Message:
        """Return the message as chat formats take it; calls of tools become lines of JSON."""
        content = self.content or ""
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        calls = [json.dumps(call.function.model_dump(), ensure_ascii=False) for call in self.tool_calls or ()]
        role = "system" if self.role == "developer" else self.role
        return Message(role, "\n".join([*([text] if text or not calls else []), *calls]))


class Tool(BaseModel):
    """A tool that the model may name in its answer."""

    type: Literal["function"] = "function"
    function: ToolFunction


class ChatBody(TextBody):
    """A request to answer a chat.

    Attributes:
        messages: The chat so far.
        max_completion_tokens: Same as ``max_tokens``.
        logprobs: Whether to return log probabilities.
        top_logprobs: Number of most likely tokens to return with log probabilities.
        tools: Tools, which are described to the model as text; its answer is text too.
    """

    messages: Many[ChatMessage] = Field(min_length=1)
    max_completion_tokens: Whole | None = Field(None, ge=1)
    logprobs: Switch | None = None
    top_logprobs: Whole | None = Field(None, ge=0, le=MOST_LOGPROBS)
    tools: Many[Tool] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: Switch | None = None

    def chat(self) -> list[Message]:
        """Return the messages, with the tools in the system turn."""
        found = [message.message() for message in self.messages]
        if not self.tools or self.tool_choice == "none":
            return found
        tools = "\n".join(json.dumps(tool.function.model_dump(), ensure_ascii=False) for tool in self.tools)
        said = (
            f"You can use these tools:\n{tools}\n"
            'To use one, answer with a JSON object such as {"name": "...", "arguments": {...}} and nothing else.'
        )
        if found[0].role == "system":
            return [Message("system", f"{found[0].content}\n\n{said}"), *found[1:]]
        return [Message("system", said), *found]
