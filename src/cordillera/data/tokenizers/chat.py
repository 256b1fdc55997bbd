"""Chats as text and control tokens: the formats of Llama 3 and ChatML, and a model's own Jinja template.

A format does not write control tokens into text in which a tokenizer must find them again. It returns pieces: a
:class:`Control` is one special token, a string is plain text. Text that a person typed never becomes a control token.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, Protocol

from cordillera.errors import DataError

# Blocks with which Transformers marks the assistant's text; they do not change the text.
_MARKS = re.compile(r"{%([-+]?)\s*(end)?generation\s*([-+]?)%}")

TEMPLATE = 1 << 18
"""Largest number of characters of a template."""

Role = Literal["system", "user", "assistant", "tool"]
ROLES: tuple[Role, ...] = ("system", "user", "assistant", "tool")


@dataclass(frozen=True)
class Message:
    """One turn of a chat.

    Attributes:
        role: ``system``, ``user``, ``assistant`` or ``tool`` (the answer of a tool).
        content: Text of the turn, used unchanged.
        awaits_tool: Whether an assistant's turn ends to wait for a tool (Llama 3's end of message, not of turn).

    Raises:
        DataError: another role, content that is not text, or a turn of another role that awaits a tool.
    """

    role: Role
    content: str
    awaits_tool: bool = False

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise DataError(f"unknown role {self.role!r}", where="chat", remedy=f"choose one of {', '.join(ROLES)}")
        if not isinstance(self.content, str):
            raise DataError(f"content must be text, got {type(self.content).__name__}", where=f"chat, {self.role}")
        if self.awaits_tool and self.role != "assistant":
            raise DataError("only an assistant's turn can await a tool", where=f"chat, {self.role}")


@dataclass(frozen=True)
class Control:
    """Special token, by a name such as ``<|eot_id|>``."""

    name: str


PromptPiece = Control | str


class ChatFormat(Protocol):
    """Format in which a model expects chats."""

    def pieces(self, messages: Sequence[Message], *, answer: bool = True) -> list[PromptPiece]:
        """Return a chat as control tokens and plain text, in order; neighbouring strings are tokenised separately.

        Args:
            messages: The turns.
            answer: Whether to open the assistant's next turn at the end.
        """
        ...


class Llama3Chat(ChatFormat):
    """Llama 3's format (llama-models, ``llama3/chat_format.py``).

    Every turn is ``<|start_header_id|>role<|end_header_id|>``, two line ends, the content, and ``<|eot_id|>`` (or
    ``<|eom_id|>`` if it awaits a tool). The role of a tool's answer is ``ipython``.
    """

    def pieces(self, messages: Sequence[Message], *, answer: bool = True) -> list[PromptPiece]:
        found: list[PromptPiece] = [Control("<|begin_of_text|>")]
        for message in messages:
            found += [*self._header("ipython" if message.role == "tool" else message.role), message.content]
            found.append(Control("<|eom_id|>" if message.awaits_tool else "<|eot_id|>"))
        return found + (self._header("assistant") if answer else [])

    @staticmethod
    def _header(role: str) -> list[PromptPiece]:
        return [Control("<|start_header_id|>"), role, Control("<|end_header_id|>"), "\n\n"]


class ChatML(ChatFormat):
    """ChatML: ``<|im_start|>role``, a line end, the content, ``<|im_end|>`` and a line end.

    Args:
        system: System turn of chats that begin with none. Default: no such turn.
    """

    def __init__(self, system: str | None = None) -> None:
        self.system = system

    def pieces(self, messages: Sequence[Message], *, answer: bool = True) -> list[PromptPiece]:
        turns = list(messages)
        if self.system is not None and turns and turns[0].role != "system":
            turns.insert(0, Message("system", self.system))
        found: list[PromptPiece] = []
        between = ""
        for turn in turns:
            found += [*([between] if between else []), Control("<|im_start|>")]
            found += [f"{turn.role}\n{turn.content}", Control("<|im_end|>")]
            between = "\n"
        if answer:
            found += [*([between] if between else []), Control("<|im_start|>")]
            between = "assistant\n"
        return [*found, between] if between else found


class PlainChat(ChatFormat):
    """Format of vocabularies that have no tokens for chats: every turn is ``role: content`` and the token ``end``.

    Args:
        begin: Special token before the first turn, or None.
        end: Special token that ends every turn; a model generates up to it.
    """

    def __init__(self, begin: str | None, end: str) -> None:
        self.begin, self.end = begin, end

    def pieces(self, messages: Sequence[Message], *, answer: bool = True) -> list[PromptPiece]:
        found: list[PromptPiece] = [] if self.begin is None else [Control(self.begin)]
        for message in messages:
            found += [f"{message.role}: ", *([message.content] if message.content else []), Control(self.end)]
        return [*found, "assistant: "] if answer else found


class JinjaChat(ChatFormat):
    """A model's own template, rendered in Jinja's sandbox with the variables that Transformers gives it.

    A template mixes control tokens and content in one string. To separate them again, any content that looks like a
    special token, or could become part of one next to the template's text, is broken by a character that occurs nowhere
    in the chat; the string is then cut at the special tokens that are still whole, and the character is removed.
    Content without such text is rendered exactly as Transformers does, but for the date, so that a chat gives the same
    tokens on every day: ``strftime_now`` is not defined for templates that then use their own default date, and for
    others, such as Mistral Small's, it is that of 26 July 2024, the default of Llama 3's.

    The work of one rendering is bounded (:mod:`cordillera.data.tokenizers.chat_limits`).

    Args:
        template: Jinja source.

    Raises:
        DataError: the template is not valid Jinja, or is too long.
    """

    def __init__(
        self, template: str, special_tokens: Iterable[str], *, bos: str | None, eos: str | None, where: str
    ) -> None:
        from cordillera.data.tokenizers.chat_limits import BoundedEnvironment

        if len(template) > TEMPLATE:
            raise DataError(f"the chat template has more than {TEMPLATE:,} characters", where=where)
        self.source, self.bos, self.eos, self.where = template, bos, eos, where
        # A token of one character cannot be broken: it stays text, and templates cannot use it.
        self.names = sorted((name for name in special_tokens if len(name) > 1), key=len, reverse=True)
        self._heads = tuple({name[:size] for name in self.names for size in range(1, len(name))})
        self._tails = tuple({name[size:] for name in self.names for size in range(1, len(name))})
        self._find = re.compile("|".join(map(re.escape, self.names)) or r"(?!)")
        self._environment = BoundedEnvironment()
        self._environment.add_filter("tojson", _to_json)
        self._environment.globals["raise_exception"] = _refuse
        if "strftime_now(" in template and "strftime_now is defined" not in template:
            self._environment.globals["strftime_now"] = _fixed_date
        try:
            self._template = self._environment.compiled(_MARKS.sub(_condition, template))
        except Exception as error:  # Jinja's errors, and Python's errors for deep nesting
            raise DataError(f"the chat template is not valid ({_short(error)})", where=where) from error

    def pieces(self, messages: Sequence[Message], *, answer: bool = True) -> list[PromptPiece]:
        """Render the template and split the result; ``answer`` is the template's ``add_generation_prompt``.

        Raises:
            DataError: the template does not accept the ``messages``.
        """
        mark = _unused(self.source, *self.names, *(message.content for message in messages))
        turns = [{"role": message.role, "content": self._broken(message.content, mark)} for message in messages]
        try:
            self._environment.meter.begin("".join(message.content for message in messages))
            text = self._template.render(
                messages=turns,
                add_generation_prompt=answer,
                bos_token=self.bos or "",
                eos_token=self.eos or "",
                tools=None,
                documents=None,
            )
        except Exception as error:  # a template can raise any exception
            raise DataError(
                f"the model's chat template refused the chat ({_short(error)})", where=self.where
            ) from error
        return list(self._parts(text, mark))

    def _broken(self, content: str, mark: str) -> str:
        while self._find.search(content):
            content = self._find.sub(lambda found: found[0][0] + mark + found[0][1:], content)
        core = content.strip()
        if not core:
            return content
        begin = content.index(core)
        end = begin + len(core)
        inside = any(core in name for name in self.names)
        if inside or core.endswith(self._heads):
            content = content[:end] + mark + content[end:]
        if inside or core.startswith(self._tails):
            content = content[:begin] + mark + content[begin:]
        return content

    def _parts(self, text: str, mark: str) -> Iterator[PromptPiece]:
        begin = 0
        for found in self._find.finditer(text):
            if plain := text[begin : found.start()].replace(mark, ""):
                yield plain
            yield Control(found[0])
            begin = found.end()
        if plain := text[begin:].replace(mark, ""):
            yield plain


def _condition(mark: re.Match[str]) -> str:
    return f"{{%{mark[1]} {'endif' if mark[2] else 'if true'} {mark[3]}%}}"


def _short(error: Exception) -> str:
    said = str(error) or type(error).__name__
    return said if len(said) < 400 else f"{said[:400]} ..."


def _to_json(value: Any, indent: int | None = None) -> str:
    # Jinja's own filter escapes HTML, which models have not seen in training.
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _fixed_date(form: str) -> str:
    return datetime.date(2024, 7, 26).strftime(form)


def _refuse(message: str) -> NoReturn:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _unused(*texts: str) -> str:
    """Character that is in none of the texts: a noncharacter of Unicode, else one of private use."""
    for code in (*range(0xFDD0, 0xFDF0), *range(0xF0000, 0xFFFFE)):
        if not any(chr(code) in text for text in texts):
            return chr(code)
    raise DataError("the chat uses every private character of Unicode", where="chat")


def guess_format(special_tokens: Iterable[str]) -> ChatFormat | None:
    """Return the chat format whose special tokens a tokenizer without a template has, or None."""
    names = set(special_tokens)
    if {"<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"} <= names:
        return Llama3Chat()
    return ChatML() if {"<|im_start|>", "<|im_end|>"} <= names else None
