"""Chats, preferences or problems that post-training learns from, tokenised, with some held out."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from cordillera.data.language.chats.rows import (
    ChatDataConfig,
    ChatItem,
    ChatProblem,
    read_chats,
    read_preferences,
    read_problems,
    split_held_out,
)
from cordillera.data.language.chats.tokens import (
    TokenisedChat,
    chat_tokenizer,
    tokenise_chat,
    tokenise_preference,
    within_length,
)
from cordillera.data.tokenizers.load import load_tokenizer
from cordillera.data.tokenizers.tokenizer import Tokenizer
from cordillera.errors import DataError, at_key

ChatKind = Literal["chats", "preferences", "problems"]
Item = tuple[TokenisedChat, ...]


@dataclass(frozen=True)
class ChatCorpora:
    """Prepared chats.

    Attributes:
        training: Items that are learnt from: a chat, or a chosen and a rejected answer.
        held_out: Items that are evaluated on; may be empty.
        problems: Problems that are learnt from, in place of items.
        held_out_problems: Problems that are evaluated on.
        too_long: Number of items that were dropped because they are too long.
        tokenizer: Tokenizer of all items.
        facts: Facts that a run records about its data, fit for JSON.
    """

    training: list[Item]
    held_out: list[Item]
    problems: list[ChatProblem]
    held_out_problems: list[ChatProblem]
    too_long: int
    tokenizer: Tokenizer
    facts: dict[str, Any]


def prepare_chats(config: ChatDataConfig, kind: ChatKind) -> ChatCorpora:
    """Read the data of ``config`` as one ``kind``, tokenise it, and hold a part of it out.

    Raises:
        DataError: If the data is invalid, or nothing is left to learn from.
    """
    with at_key("data.tokenizer"):
        tokenizer = chat_tokenizer(load_tokenizer(config.tokenizer))
    if kind == "problems":
        learnt, held = split_held_out(read_problems(config.path), config.held_out)
        facts = _facts(config, tokenizer, _digest_problems(learnt), _digest_problems(held))
        return ChatCorpora([], [], learnt, held, 0, tokenizer, facts)
    if kind == "chats":
        parts = _tokenised(
            config, read_chats(config.path), lambda row: (tokenise_chat(tokenizer, row.messages, where=row.where),)
        )
    else:
        parts = _tokenised(config, read_preferences(config.path), lambda row: tokenise_preference(tokenizer, row))
    training, held_out, too_long = parts
    if not training:
        raise DataError(
            f"{_lengths(config, kind)}; at most {config.max_length:,} are allowed",
            where="data.max_length",
            remedy="raise data.max_length, and packing.context and packing.bound where they are smaller",
        )
    facts = _facts(config, tokenizer, _digest(training), _digest(held_out))
    return ChatCorpora(training, held_out, [], [], too_long, tokenizer, facts)


def _lengths(config: ChatDataConfig, kind: ChatKind) -> str:
    """Return what an error says of the items to learn from, all of which are too long."""
    items = prepare_chats(config.model_copy(update={"max_length": sys.maxsize}), kind).training
    what = "chats" if kind == "chats" else "pairs of answers"
    shortest = min(max(len(one.tokens) for one in item) for item in items)
    return f"all {len(items):,} {what} to learn from are too long: the shortest has {shortest:,} tokens"


def _tokenised(
    config: ChatDataConfig, rows: Sequence[ChatItem], tokenise: Callable[[ChatItem], Item]
) -> tuple[list[Item], list[Item], int]:
    """Return the items to learn from, those that are held out, and how many were too long."""
    parts: list[list[Item]] = []
    for part in split_held_out(rows, config.held_out):
        items = [tokenise(row) for row in part]
        kept = within_length(items, [row.where for row in part], config.max_length, config.long_chats) if items else []
        parts.append([items[number] for number in kept])
    return parts[0], parts[1], len(rows) - len(parts[0]) - len(parts[1])


def _facts(
    config: ChatDataConfig, tokenizer: Tokenizer, learnt: dict[str, Any], held: dict[str, Any]
) -> dict[str, Any]:
    return {
        "label": config.label,
        "tokenizer": {
            "name": config.tokenizer,
            "fingerprint": tokenizer.fingerprint,
            "vocab_size": tokenizer.vocab_size,
        },
        "sources": [{"path": config.label, **learnt}],
        "weights": None,
        "held_out": [held] if held["documents"] else [],
    }


def _digest(items: Sequence[Item]) -> dict[str, Any]:
    found = hashlib.sha256()
    for item in items:
        for one in item:
            found.update(np.int64(len(one.tokens)).tobytes() + one.tokens.tobytes() + one.kinds.tobytes())
    tokens = sum(len(one.tokens) for item in items for one in item)
    return {"fingerprint": found.hexdigest(), "documents": len(items), "tokens": tokens}


def _digest_problems(problems: Sequence[ChatProblem]) -> dict[str, Any]:
    found = hashlib.sha256()
    for one in problems:
        found.update(repr(([(turn.role, turn.content) for turn in one.prompt], one.answer)).encode())
    return {"fingerprint": found.hexdigest(), "documents": len(problems), "tokens": 0}
