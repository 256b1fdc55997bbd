"""Chats as tokens, each with its role: prompt, answer, or the end of an answer."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from cordillera.data.language.chats.rows import Preference
from cordillera.data.tokenizers.chat import ChatFormat, Control, Message, PlainChat, PromptPiece
from cordillera.data.tokenizers.tokenizer import Tokenizer
from cordillera.errors import DataError

PROMPT = 0
"""Kind of a token that the chat format writes, or that another than the assistant said."""

ANSWER = 1
"""Kind of a token that the assistant said."""

END = 2
"""Kind of the special token that ends the assistant's turn."""


class TokenisedChat(NamedTuple):
    """A chat as tokens.

    Attributes:
        tokens: ``int32 [T]``.
        kinds: :data:`PROMPT`, :data:`ANSWER` or :data:`END` of each token, ``int8 [T]``.
    """

    tokens: np.ndarray
    kinds: np.ndarray


def chat_tokenizer(tokenizer: Tokenizer) -> Tokenizer:
    """Return a tokenizer that has a chat format: the given one, or itself with :class:`PlainChat`; ids are the same.

    Raises:
        DataError: the vocabulary has no token that ends a text.
    """
    if tokenizer.chat_format is not None:
        return tokenizer
    names = {token: name for name, token in tokenizer.special_tokens.items()}
    end = tokenizer.eos_id
    if end is None:
        raise DataError("the vocabulary has no end-of-text token, which would end an answer", where=str(tokenizer.path))
    begin = tokenizer.bos_id if tokenizer.adds_bos else None
    return dataclasses.replace(tokenizer, chat_format=PlainChat(None if begin is None else names[begin], names[end]))


def tokenise_chat(
    tokenizer: Tokenizer, messages: Sequence[Message], *, first: int = 0, where: str = "chat"
) -> TokenisedChat:
    """Tokenise a chat as generation sees it.

    Before the assistant's turn ``k`` stand the tokens of ``encode_chat(messages[:k])``, then its content, tokenised on
    its own, and the token that ends it. Contents of earlier turns of the assistant stay tokenised on their own, as they
    were generated. Without a chat format, :func:`chat_tokenizer` gives one.

    Args:
        tokenizer: Tokenizer of the model.
        messages: The turns.
        first: Number of the first message that may be an answer; turns of the assistant before it are prompt.
        where: File and row, for errors.

    Raises:
        DataError: no turn to learn is the assistant's; or the chat format refuses the chat, changes earlier turns when
            later ones come, or ends an answer by no special token.
    """
    tokenizer = chat_tokenizer(tokenizer)
    assert tokenizer.chat_format is not None
    answers = [place for place in range(first, len(messages)) if messages[place].role == "assistant"]
    if not answers:
        raise DataError("the chat has no turn of the assistant", where=where, remedy="nothing could be learnt")
    chat, seen = _Rendered(tokenizer.chat_format, where), list[PromptPiece]()
    tokens, kinds = list[int](), list[int]()

    def add(ids: list[int], kind: int) -> None:
        tokens.extend(ids)
        kinds.extend([kind] * len(ids))

    for place in answers:
        opened = chat.pieces(messages[:place], answer=True)
        add(tokenizer.encode_pieces(chat.after(seen, opened), after=seen), PROMPT)
        answer, seen = chat.answer(_merged(opened), messages[: place + 1])
        add(tokenizer.encode_pieces([answer], after=opened), ANSWER)
        add(tokenizer.encode_pieces(seen[-1:]), END)
    add(tokenizer.encode_pieces(chat.after(seen, chat.pieces(messages, answer=False)), after=seen), PROMPT)
    return TokenisedChat(np.array(tokens, np.int32), np.array(kinds, np.int8))


def tokenise_preference(tokenizer: Tokenizer, preference: Preference) -> tuple[TokenisedChat, TokenisedChat]:
    """Tokenise the chosen and the rejected answer of ``preference`` after its prompt, which has no targets.

    For ``tokenizer`` and errors, see :func:`tokenise_chat`.
    """
    prompt, where = preference.prompt, preference.where
    chosen, rejected = (
        tokenise_chat(tokenizer, (*prompt, Message("assistant", answer)), first=len(prompt), where=where)
        for answer in (preference.chosen, preference.rejected)
    )
    return chosen, rejected


def within_length(
    items: Sequence[tuple[TokenisedChat, ...]],
    places: Sequence[str],
    max_length: int,
    long_chats: Literal["drop", "refuse"] = "drop",
) -> list[int]:
    """Return the numbers of the items whose chats all have at most ``max_length`` tokens.

    Args:
        items: Chats, or pairs of a chosen and a rejected one.
        places: File and row of each item.
        long_chats: Treatment of longer ones: ``drop`` or ``refuse``.

    Raises:
        DataError: An item is too long and ``long_chats`` is ``refuse``.
    """
    longest = [max(len(chat.tokens) for chat in item) for item in items]
    for length, where in zip(longest, places, strict=True):
        if length > max_length and long_chats == "refuse":
            raise DataError(
                f"the chat has {length} tokens, more than {max_length}",
                where=where,
                remedy='set data.long_chats to "drop", or raise data.max_length',
            )
    kept = [number for number, length in enumerate(longest) if length <= max_length]
    return kept


class _Rendered:
    """Chats in a format, compared with one another."""

    def __init__(self, chat_format: ChatFormat, where: str) -> None:
        self.chat_format, self.where = chat_format, where

    def pieces(self, messages: Sequence[Message], *, answer: bool) -> list[PromptPiece]:
        """Pieces of a chat; an error of the format names the chat."""
        try:
            return self.chat_format.pieces(messages, answer=answer)
        except DataError as error:
            raise DataError(error.what, where=self.where, remedy=error.remedy) from error

    def after(self, seen: list[PromptPiece], pieces: list[PromptPiece]) -> list[PromptPiece]:
        """Pieces that follow the merged ones of an earlier chat, which end in a control token."""
        if _merged(pieces)[: len(seen)] != seen:
            raise self._changed()
        controls = [place for place, piece in enumerate(pieces) if isinstance(piece, Control)]
        count = sum(isinstance(piece, Control) for piece in seen)
        return pieces[controls[count - 1] + 1 :] if count else pieces

    def answer(self, opened: list[PromptPiece], messages: Sequence[Message]) -> tuple[str, list[PromptPiece]]:
        """Text of the last of the messages as the format writes it, and all merged pieces through its end token."""
        whole = _merged(self.pieces(messages, answer=False))
        before = opened[-1] if opened and isinstance(opened[-1], str) else ""
        heads = opened[: len(opened) - bool(before)]
        place = len(heads)
        found = whole[place] if place < len(whole) else ""
        text = found if isinstance(found, str) else ""
        assert isinstance(before, str)
        if whole[:place] != heads or not text.startswith(before):
            raise self._changed()
        answer, end = text[len(before) :], place + bool(text)
        if answer.strip() != messages[-1].content.strip():
            raise DataError("the chat template writes an answer otherwise than it was given", where=self.where)
        if end == len(whole):
            raise DataError("the chat template ends an answer by no special token", where=self.where)
        return answer, whole[: end + 1]

    def _changed(self) -> DataError:
        return DataError(
            "the chat template writes earlier turns otherwise once an answer follows: what is learnt would not be what "
            "generation sees",
            where=self.where,
            remedy="use a template whose text of a chat begins with that of its first turns and the prompt to answer",
        )


def _merged(pieces: Sequence[PromptPiece]) -> list[PromptPiece]:
    """Pieces with neighbouring strings joined."""
    found: list[PromptPiece] = []
    for piece in pieces:
        if isinstance(piece, str) and found and isinstance(found[-1], str):
            found[-1] += piece
        elif piece != "":
            found.append(piece)
    return found
