"""Conversion of text to token ids and back, for vocabularies from every kind of file.

All kinds of file hold a byte-pair encoding that is byte-level or falls back to bytes; without a file, bytes are tokens.
Every text can therefore be encoded, every token stands for bytes, and text that a person typed never becomes a special
token.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal

from cordillera.data.tokenizers.chat import ChatFormat, Control, Message, PromptPiece
from cordillera.errors import DataError

SpacePrefix = Literal["never", "first", "always"]
"""Places at which text gets a space in front: nowhere, at its beginning, or after special tokens too."""

WHITE_SPACE = "".join(map(chr, (*range(9, 14), 32, 0x85, 0xA0, 0x1680, *range(0x2000, 0x200B))))
WHITE_SPACE += "\u2028\u2029\u202f\u205f\u3000"
"""Characters with Unicode's property White_Space; ``str.isspace`` has four more."""


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """One vocabulary, as :func:`cordillera.data.tokenizers.load.load_tokenizer` returns it.

    Attributes:
        kind: Library that encodes: ``tiktoken``, ``tokenizers`` (also on the vocabulary of a ``gguf`` or
            ``sentencepiece`` file), or none for ``bytes``.
        path: Path of the file, or the name of a tokenizer without a file.
        encode_plain: Function from texts to ids without special tokens.
        token_bytes: Bytes of each id; None for ids without a token.
        special_tokens: Ids by name of special token.
        bos_id: Id of the begin-of-text token, or None.
        eos_id: Id of the end-of-text token, or None.
        stop_ids: Ids at which generation ends: end of text, of turn, of message.
        adds_bos: Whether the model expects texts to begin with ``bos_id``.
        chat_format: Format of chats; None for a model that does not chat.
        fingerprint: SHA-256 of everything that determines ids.
        prefix: Where text gets a space in front, so that its first word is written as any other: ``never``, ``first``
            (at its beginning), or ``always`` (after special tokens too). :meth:`decode` takes it away.
        encode_inside: ``encode_plain`` for texts that go on after others and get no space in front; None if equal.
        strips: Special tokens of chats that take the white space before or after them: whether before, whether after;
            by name.
    """

    kind: Literal["tiktoken", "tokenizers", "gguf", "sentencepiece", "bytes"]
    path: Path
    encode_plain: Callable[[Sequence[str]], list[list[int]]] = field(repr=False)
    token_bytes: Sequence[bytes | None] = field(repr=False)
    special_tokens: Mapping[str, int] = field(repr=False)
    bos_id: int | None
    eos_id: int | None
    stop_ids: tuple[int, ...]
    adds_bos: bool
    chat_format: ChatFormat | None = field(repr=False)
    fingerprint: str
    prefix: SpacePrefix = "never"
    encode_inside: Callable[[Sequence[str]], list[list[int]]] | None = field(default=None, repr=False)
    strips: Mapping[str, tuple[bool, bool]] = field(default_factory=dict, repr=False)

    @property
    def vocab_size(self) -> int:
        """One more than the highest id: the smallest number of rows of an embedding table."""
        return len(self.token_bytes)

    @property
    def document_end_id(self) -> int | None:
        """Id that ends a document in pretraining: end of text, which may differ from a chat model's ``eos_id``."""
        names = ("<|end_of_text|>", "<|endoftext|>", "</s>")
        return next((self.special_tokens[name] for name in names if name in self.special_tokens), self.eos_id)

    def encode(self, text: str, *, bos: bool = False, eos: bool = False) -> list[int]:
        """Tokenise a text; special tokens in it are text like any other.

        Args:
            text: Any Unicode text.
            bos: Whether to put ``bos_id`` first.
            eos: Whether to put ``eos_id`` last.

        Raises:
            DataError: the text holds a lone surrogate (half a character), or the vocabulary lacks a requested token.
        """
        return self.encode_batch([text], bos=bos, eos=eos)[0]

    def encode_batch(self, texts: Sequence[str], *, bos: bool = False, eos: bool = False) -> list[list[int]]:
        """Tokenise many texts, each as :meth:`encode` does with ``bos`` and ``eos``.

        Raises:
            DataError: a text holds a lone surrogate (half a character), or the vocabulary lacks a requested token.
        """
        for index, text in enumerate(texts):
            check_text(text, f"text {index}" if len(texts) > 1 else "text")
        before = [self._special(self.bos_id, "begin-of-text")] if bos else []
        after = [self._special(self.eos_id, "end-of-text")] if eos else []
        found = self.encode_plain(texts)
        return [before + ids + after for ids in found] if before or after else found

    def encode_chat(self, messages: Sequence[Message], *, answer: bool = True) -> list[int]:
        """Tokenise the ``messages`` of a chat in the model's format.

        Args:
            answer: Whether to open the assistant's next turn at the end, for the model to write.

        Raises:
            DataError: the tokenizer has no chat format, or the format does not accept the chat.
        """
        if self.chat_format is None:
            raise DataError(
                "this tokenizer brings no chat template",
                where=str(self.path),
                remedy="encode plain text, or use the files of a model that was trained for chats",
            )
        return self.encode_pieces(self.chat_format.pieces(messages, answer=answer))

    def encode_pieces(self, pieces: Iterable[PromptPiece], *, after: Sequence[PromptPiece] = ()) -> list[int]:
        """Tokenise control tokens and plain text, each string on its own.

        Args:
            pieces: Control tokens and strings. A string after another goes on with its text; one after a control token
                gets a space in front if :attr:`prefix` is ``always``.
            after: Pieces that stand before them, whose tokens are not returned.

        Raises:
            DataError: the vocabulary lacks a control token.
        """
        ids: list[int] = []
        whole = [*after, *pieces]
        begins, takes_space = True, False  # a text begins here; the previous token strips white space
        for place, piece in enumerate(whole):
            if isinstance(piece, Control):
                found = [self._special(self.special_tokens.get(piece.name), piece.name)]
                begins, takes_space = self.prefix == "always", self.strips.get(piece.name, (False, False))[1]
            else:
                following = whole[place + 1] if place + 1 < len(whole) else None
                if takes_space:
                    piece = piece.lstrip(WHITE_SPACE)
                if isinstance(following, Control) and self.strips.get(following.name, (False, False))[0]:
                    piece = piece.rstrip(WHITE_SPACE)
                if not piece:
                    continue
                found = [] if place < len(after) else self.encode(piece) if begins else self.continued(piece)
                begins = takes_space = False
            if place >= len(after):
                ids += found
        return ids

    def continued(self, text: str) -> list[int]:
        """Tokenise a ``text`` that continues other text, like :meth:`encode`, but without a leading space."""
        check_text(text, "text")
        return (self.encode_inside or self.encode_plain)([text])[0]

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        """Return the text of ids, special tokens included unless ``skip_special``; invalid UTF-8 becomes U+FFFD.

        A space at the beginning is left out if :attr:`prefix` puts one there. Where the ids go on after others, it is
        part of the text: use :meth:`decode_bytes`, or :class:`StreamDecoder`.

        Raises:
            DataError: the vocabulary lacks an id.
        """
        content = self.decode_bytes(ids, skip_special=skip_special)
        return self.without_space(content).decode("utf-8", errors="replace")

    def without_space(self, content: bytes) -> bytes:
        """Return the ``content`` that begins a text without the space that :attr:`prefix` puts there."""
        return content if self.prefix == "never" else content.removeprefix(b" ")

    def decode_bytes(self, ids: Iterable[int], *, skip_special: bool = False) -> bytes:
        """Return the bytes of ids, as :meth:`decode` does with ``skip_special``, with a space that begins them.

        Raises:
            DataError: the vocabulary lacks an id.
        """
        skipped = self._special_ids if skip_special else frozenset()
        parts = []
        for token in ids:
            content = self.token_bytes[token] if 0 <= token < len(self.token_bytes) else None
            if content is None:
                raise DataError(
                    f"there is no token {token}; ids go from 0 to {self.vocab_size - 1}", where=str(self.path)
                )
            if token not in skipped:
                parts.append(content)
        return b"".join(parts)

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        return frozenset(self.special_tokens.values())

    def _special(self, token: int | None, name: str) -> int:
        if token is None:
            raise DataError(f"the vocabulary has no {name} token", where=str(self.path))
        return token


class StreamDecoder:
    """Decoder of ids that come one by one; it holds back bytes that end inside a character.

    Args:
        tokenizer: Tokenizer of the ids.
        skip_special: Whether special tokens are left out.
        begins: Whether a text begins with the ids, such as an answer. If it goes on after others, a space is kept.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True, begins: bool = False) -> None:
        self.tokenizer, self.skip_special, self._begins = tokenizer, skip_special, begins
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """Return the text that one more token completes; may be empty."""
        content = self.tokenizer.decode_bytes([token], skip_special=self.skip_special)
        if self._begins and content:
            content, self._begins = self.tokenizer.without_space(content), False
        return self._utf8.decode(content)

    def finish(self) -> str:
        """Return the text still held back: U+FFFD for half a character, otherwise nothing."""
        return self._utf8.decode(b"", final=True)


def check_text(text: str, where: str) -> None:
    """Refuse a ``text`` that no tokenizer can encode; errors name it ``where``.

    Raises:
        DataError: the value is not text, or holds a lone surrogate (half a character). A byte of a command line that is
            not UTF-8 appears as one.
    """
    if not isinstance(text, str):
        raise DataError(f"only text can be tokenised, got {type(text).__name__}", where=where)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        byte = f"byte 0x{code - 0xDC00:02x} is not UTF-8" if 0xDC80 <= code <= 0xDCFF else "half a character"
        raise DataError(
            f"character {error.start} is a lone surrogate, {byte}",
            where=where,
            remedy="repair where the text comes from, or drop such characters",
        ) from None
