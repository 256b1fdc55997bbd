"""Chats, preferences and problems that a language model is tuned on: out of files, built-in sets and Hugging Face."""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from cordillera.data.language.chats.sets import CHAT_SETS
from cordillera.data.language.corpora import hash_limit
from cordillera.data.language.data_folders import data_files
from cordillera.data.language.documents import FileRow, read_rows
from cordillera.data.tokenizers.chat import ROLES, Message
from cordillera.data.tokenizers.tokenizer import check_text
from cordillera.errors import DataError, DependencyError

HUGGING_FACE = "datasets:"
"""Beginning of the name of a set of Hugging Face's ``datasets``."""

_ANSWERS = ("completion", "answer", "response")
_CHANGES = ("tool_calls", "function_call", "weight")
"""Keys of a message that would change the training targets."""


class ChatDataConfig(BaseModel):
    """Chats, preferences or problems that a language model is tuned on; the section ``[data]`` of its recipe.

    Attributes:
        path: File, folder or pattern of JSON lines, Parquet or Arrow, or several of them; or a built-in set
            (``python-docstrings``, ``python-docstrings-preferences``, ``arithmetic``, ``arithmetic-mistakes``,
            ``guard``, ``guard-held-out``); or ``datasets:NAME``, the split ``train`` of a set of Hugging Face.
        tokenizer: Name, file or folder of a tokenizer. Default: that of the checkpoint that training starts from.
        held_out: Share of the items that are evaluated on and not learnt from: those whose prompts have the lowest
            hashes, so the same ones in any order. At least one if there are two; 0 for none.
        max_length: Largest number of tokens of a chat.
        long_chats: Treatment of longer chats: ``drop`` or ``refuse``.
        shuffle: Whether every epoch has a random order of its own; otherwise the order of the rows.
        epochs: Number of passes over the items. Default: no end.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: str | tuple[str, ...]
    tokenizer: str = "bytes"
    held_out: float = Field(0.05, ge=0, lt=1)
    max_length: int = Field(1_024, ge=2)
    long_chats: Literal["drop", "refuse"] = "drop"
    shuffle: bool = True
    epochs: int | None = Field(None, ge=1)

    @property
    def label(self) -> str:
        """Name of the data for messages: its paths."""
        return self.path if isinstance(self.path, str) else ", ".join(self.path)


@dataclass(frozen=True)
class Chat:
    """Turns of a conversation; the assistant's turns are the training targets.

    Attributes:
        messages: The turns, at least one of them the assistant's.
        where: File and row, for errors.
    """

    messages: tuple[Message, ...]
    where: str

    @property
    def prompt(self) -> tuple[Message, ...]:
        """Turns before the assistant's first."""
        first = next(place for place, message in enumerate(self.messages) if message.role == "assistant")
        return self.messages[:first]


@dataclass(frozen=True)
class Preference:
    """A better and a worse answer to a prompt.

    Attributes:
        where: File and row, for errors.
    """

    prompt: tuple[Message, ...]
    chosen: str
    rejected: str
    where: str


@dataclass(frozen=True)
class ChatProblem:
    """A prompt whose answer can be compared with the right one.

    Attributes:
        where: File and row, for errors.
    """

    prompt: tuple[Message, ...]
    answer: str
    where: str


ChatItem = TypeVar("ChatItem", Chat, Preference, ChatProblem)


def read_chats(path: str | Sequence[str]) -> list[Chat]:
    """Read rows of ``messages``, or of a ``prompt`` and its ``completion``, ``answer`` or ``response``.

    Args:
        path: File, folder, pattern, built-in set or ``datasets:NAME``, or several of them.

    Raises:
        DataError: a file cannot be read, or a row is of another form; file and row are named.
        DependencyError: Hugging Face's ``datasets`` is not installed.
    """
    return [_chat(row) for row in _rows(path)]


def read_preferences(path: str | Sequence[str]) -> list[Preference]:
    """Read rows of ``prompt``, ``chosen`` and ``rejected``, each text or a list of messages.

    Lists of ``chosen`` and ``rejected`` hold the answer, or the prompt and the answer; then ``prompt`` may be absent.
    Rows that ``cordillera best-of`` wrote without a pair, since all answers were equal, are passed over.

    Args:
        path: File, folder, pattern, built-in set or ``datasets:NAME``, or several of them.

    Raises:
        DataError: a file cannot be read, a row is of another form, or both answers are equal; file and row are named.
        DependencyError: Hugging Face's ``datasets`` is not installed.
    """
    pairs = (row for row in _rows(path) if "rewards" not in row.values or "chosen" in row.values)
    return [_preference(row) for row in pairs]


def read_problems(path: str | Sequence[str]) -> list[ChatProblem]:
    """Read rows of ``prompt``, text or a list of messages, and ``answer``, text.

    Args:
        path: File, folder, pattern, built-in set or ``datasets:NAME``, or several of them.

    Raises:
        DataError: a file cannot be read, or a row is of another form; file and row are named.
        DependencyError: Hugging Face's ``datasets`` is not installed.
    """
    return [_problem(row) for row in _rows(path)]


def read_prompts(path: str | Sequence[str]) -> list[tuple[Message, ...]]:
    """Read rows of ``prompt``, or of ``messages`` whose last turn of the assistant is left out.

    Args:
        path: File, folder, pattern, built-in set or ``datasets:NAME``, or several of them.

    Raises:
        DataError: a file cannot be read, or a row is of another form; file and row are named.
        DependencyError: Hugging Face's ``datasets`` is not installed.
    """
    return [_prompt_of(row) for row in _rows(path)]


def split_held_out(items: Sequence[ChatItem], share: float) -> tuple[list[ChatItem], list[ChatItem]]:
    """Return the items that are learnt from and those that are held out, each in the given order.

    Args:
        items: Items that :func:`read_chats`, :func:`read_preferences` or :func:`read_problems` gave.
        share: Share of the items that are held out, by the hashes of their prompts.

    Raises:
        DataError: There is no item, or none is left to learn from.
    """
    if not items:
        raise DataError(
            "there are no chats, pairs of answers or problems",
            where="data.path",
            remedy="give files with rows; rows of cordillera best-of without a chosen answer are passed over",
        )
    hashes = np.array([_hash(item.prompt) for item in items], np.uint64)
    held = hashes < hash_limit([hashes], share) if items else np.zeros(0, bool)
    if held.all():
        raise DataError(
            f"no chat is left to learn from: all {len(held)} are held out",
            where="data.held_out",
            remedy="hold out fewer, or give more chats",
        )
    return (
        [item for item, is_held in zip(items, held, strict=True) if not is_held],
        [item for item, is_held in zip(items, held, strict=True) if is_held],
    )


def _hash(prompt: Sequence[Message]) -> int:
    text = json.dumps([[message.role, message.content] for message in prompt])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _rows(path: str | Sequence[str]) -> Iterator[FileRow]:
    for one in [path] if isinstance(path, str) else path:
        if one in CHAT_SETS:
            yield from CHAT_SETS[one]()
        elif one.startswith(HUGGING_FACE):
            yield from _hugging_face(one)
        else:
            if not Path(one).exists() and (close := difflib.get_close_matches(one, CHAT_SETS, 1)):
                remedy = f"did you mean the built-in set {close[0]}?"
                raise DataError("there is no such file or built-in set", where=one, remedy=remedy)
            yield from read_rows(data_files(one))


def _hugging_face(name: str) -> Iterator[FileRow]:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise DependencyError(
            "sets of Hugging Face need its library", where=name, remedy="pip install datasets"
        ) from error
    try:
        found = load_dataset(name.removeprefix(HUGGING_FACE), split="train")
    except Exception as error:  # errors of the library, the network or the data set
        raise DataError(f"the set cannot be read ({error})", where=name) from error
    for number, row in enumerate(found, 1):
        yield FileRow(f"{name}, row {number}", dict(row))


def _chat(row: FileRow) -> Chat:
    values, where = row.values, row.where
    if values.get("messages") is not None:
        messages = _messages(values["messages"], "messages", where)
        if all(message.role != "assistant" for message in messages):
            raise DataError(
                "the chat has no turn of the assistant", where=where, remedy="drop such rows: nothing could be learnt"
            )
        return Chat(messages, where)
    prompt = _prompt(row)
    name = next((name for name in _ANSWERS if values.get(name) is not None), None)
    if name is None:
        raise _absent(row, "messages, or prompt with completion, answer or response")
    return Chat((*prompt, Message("assistant", _answer(row, name, prompt))), where)


def _prompt_of(row: FileRow) -> tuple[Message, ...]:
    if row.values.get("messages") is None:
        return _prompt(row)
    messages = _messages(row.values["messages"], "messages", row.where)
    if messages[-1].role == "assistant":
        messages = messages[:-1]
    return _checked_prompt(messages, row.where)


def _preference(row: FileRow) -> Preference:
    for name in ("chosen", "rejected"):
        if row.values.get(name) is None:
            raise _absent(row, name)
    prompt = _common_prompt(row) if row.values.get("prompt") is None else _prompt(row)
    chosen, rejected = _answer(row, "chosen", prompt), _answer(row, "rejected", prompt)
    if chosen == rejected:
        raise DataError("chosen and rejected are equal", where=row.where, remedy="drop such rows")
    return Preference(prompt, chosen, rejected, row.where)


def _problem(row: FileRow) -> ChatProblem:
    prompt = _prompt(row)
    if row.values.get("answer") is None:
        raise _absent(row, "answer")
    return ChatProblem(prompt, _text(row.values["answer"], "answer", row.where), row.where)


def _common_prompt(row: FileRow) -> tuple[Message, ...]:
    """Turns before the last of ``chosen`` and of ``rejected``, which hold the prompt where it has no key of its own."""
    if not all(isinstance(row.values[name], list) for name in ("chosen", "rejected")):
        raise _absent(row, "prompt")
    chosen, rejected = (_messages(row.values[name], name, row.where)[:-1] for name in ("chosen", "rejected"))
    if chosen != rejected:
        raise DataError("chosen and rejected begin with different prompts", where=row.where)
    return _checked_prompt(chosen, row.where)


def _prompt(row: FileRow) -> tuple[Message, ...]:
    value = row.values.get("prompt")
    if value is None:
        raise _absent(row, "prompt")
    if isinstance(value, str):
        return (Message("user", _text(value, "prompt", row.where)),)
    return _checked_prompt(_messages(value, "prompt", row.where), row.where)


def _checked_prompt(prompt: tuple[Message, ...], where: str) -> tuple[Message, ...]:
    if not prompt:
        raise DataError("the prompt has no turn", where=where)
    if prompt[-1].role == "assistant":
        raise DataError("the prompt ends with a turn of the assistant", where=where, remedy="end it with the user's")
    return prompt


def _answer(row: FileRow, name: str, prompt: tuple[Message, ...]) -> str:
    """Return the answer under a key: a text, or the one assistant message that follows the prompt."""
    value = row.values[name]
    if not isinstance(value, list):
        return _text(value, name, row.where)
    messages = _messages(value, name, row.where)
    if messages[: len(prompt)] == prompt:
        messages = messages[len(prompt) :]
    if len(messages) != 1 or messages[0].role != "assistant":
        raise DataError(
            f"{name} is not one turn of the assistant, alone or after the prompt",
            where=row.where,
            remedy="put earlier turns into the prompt",
        )
    return messages[0].content


def _messages(value: Any, name: str, where: str) -> tuple[Message, ...]:
    if not isinstance(value, list) or not value:
        raise DataError(f"{name} must be a list of messages, not {_said(value)}", where=where)
    return tuple(_message(one, f"{name}[{place}]", where) for place, one in enumerate(value))


def _message(value: Any, name: str, where: str) -> Message:
    if not isinstance(value, dict):
        raise DataError(
            f"{name} must be a message, not {_said(value)}", where=where, remedy="an object of role and content"
        )
    role = value.get("role")
    if role not in ROLES:
        raise DataError(
            f"{name} has the unknown role {role!r}",
            where=where,
            remedy=f"{_role_for(role)}choose one of {', '.join(ROLES)}",
        )
    if unknown := [key for key in _CHANGES if value.get(key) not in (None, [], {})]:
        raise DataError(
            f"{name} has {' and '.join(unknown)}, which training does not take: drop such rows", where=where
        )
    content = value.get("content")
    if isinstance(content, list):
        content = _joined(content, name, where)
    if role == "system" and content == "":
        return Message("system", "")
    return Message(role, _text(content, f"the content of {name}", where))


def _joined(parts: list[Any], name: str, where: str) -> str:
    """Text of content that is a list of parts, as OpenAI's form allows."""
    if not parts:
        raise DataError(f"the content of {name} is an empty list", where=where)
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise DataError(f"the content of {name} has a part that is not text", where=where)
    return "".join(part["text"] for part in parts)


def _text(value: Any, name: str, where: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"{name} must be text, not {_said(value)}", where=where)
    check_text(value, f"{where}, {name}")
    if not value.strip():
        raise DataError(f"{name} is blank", where=where, remedy="drop such rows")
    return value


def _said(value: Any) -> str:
    names = {str: "text", list: "a list", dict: "an object", bool: "a truth value", int: "a number", float: "a number"}
    return "null" if value is None else "an empty list" if value == [] else names.get(type(value), type(value).__name__)


def _role_for(role: Any) -> str:
    """Advice for a role of another form."""
    meant = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant", "developer": "system"}
    return f"write {meant[role]} in its place; or " if isinstance(role, str) and role in meant else ""


def _absent(row: FileRow, name: str) -> DataError:
    remedy = None
    if "conversations" in row.values:  # format of ShareGPT
        remedy = 'write conversations as messages: [{"role": "user", "content": "..."}, {"role": "assistant", ...}]'
    elif {"instruction", "output"} <= set(row.values):  # format of Alpaca
        remedy = 'write them as {"prompt": instruction and input, "completion": output}'
    return DataError(
        f"there is no {name}; there are {sorted(map(str, row.values))[:8]}", where=row.where, remedy=remedy
    )
