"""Text to token ids and back, whatever file the vocabulary came in.

All three kinds of file hold the same thing, a byte-level byte-pair encoding; without a file, bytes are tokens. So every
text can be written, every token stands for bytes, and text that a person typed never becomes a special token.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal

from cordillera.data.tokenizers.chat import ChatFormat, Control, Message
from cordillera.errors import DataError


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """One vocabulary. Made by :func:`load_tokenizer`.

    Attributes:
        kind: Which library encodes: ``tiktoken``, ``tokenizers``, ``gguf`` (``tokenizers`` on a GGUF's vocabulary), or
            none for ``bytes``.
        path: The file, or the name where there is none.
        encode_plain: Texts to ids, no special tokens.
        token_bytes: Bytes of each id; None for ids without a token.
        special_tokens: Name to id.
        bos_id: Begin of a text, if there is such a token.
        eos_id: End of a text.
        stop_ids: Ids at which generation ends: end of text, of turn, of message.
        adds_bos: Whether the model expects texts to begin with ``bos_id``.
        chat_format: Format of chats; None for a model that does not chat.
        fingerprint: SHA-256 of all that decides about ids.
    """

    kind: Literal["tiktoken", "tokenizers", "gguf", "bytes"]
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

    @property
    def vocab_size(self) -> int:
        """One more than the highest id: the least rows of an embedding table."""
        return len(self.token_bytes)

    @property
    def document_end_id(self) -> int | None:
        """What ends a document in pretraining: the end-of-text token, which a chat model's ``eos_id`` need not be."""
        names = ("<|end_of_text|>", "<|endoftext|>", "</s>")
        return next((self.special_tokens[name] for name in names if name in self.special_tokens), self.eos_id)

    def encode(self, text: str, *, bos: bool = False, eos: bool = False) -> list[int]:
        """Tokenise a text; special tokens in it are text like any other.

        Args:
            text: Any Unicode text.
            bos: Whether ``bos_id`` comes first.
            eos: Whether ``eos_id`` comes last.

        Raises:
            DataError: a lone surrogate (half a character), or a token is asked for that the vocabulary lacks.
        """
        return self.encode_batch([text], bos=bos, eos=eos)[0]

    def encode_batch(self, texts: Sequence[str], *, bos: bool = False, eos: bool = False) -> list[list[int]]:
        """Tokenise many texts: the same as :meth:`encode` on each.

        Args:
            texts: Unicode texts.
            bos: Whether ``bos_id`` comes first in each.
            eos: Whether ``eos_id`` comes last in each.

        Raises:
            DataError: as :meth:`encode`.
        """
        for index, text in enumerate(texts):
            check_text(text, f"text {index}" if len(texts) > 1 else "text")
        before = [self._special(self.bos_id, "begin-of-text")] if bos else []
        after = [self._special(self.eos_id, "end-of-text")] if eos else []
        found = self.encode_plain(texts)
        return [before + ids + after for ids in found] if before or after else found

    def encode_chat(self, messages: Sequence[Message], *, answer: bool = True) -> list[int]:
        """Tokenise a chat in the model's format.

        Args:
            messages: The turns.
            answer: Whether the assistant's next turn is opened at the end, for the model to write.

        Raises:
            DataError: the tokenizer has no chat format, or it does not accept the chat.
        """
        if self.chat_format is None:
            raise DataError(
                "this tokenizer brings no chat template",
                where=str(self.path),
                remedy="encode plain text, or use the files of a model that was trained for chats",
            )
        ids: list[int] = []
        for piece in self.chat_format.pieces(messages, answer=answer):
            if isinstance(piece, Control):
                ids.append(self._special(self.special_tokens.get(piece.name), piece.name))
            else:
                ids += self.encode(piece)
        return ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        """Text of ids; bytes that are no UTF-8 become U+FFFD.

        Args:
            ids: Token ids.
            skip_special: Leave special tokens out instead of writing their names.

        Raises:
            DataError: an id that the vocabulary lacks.
        """
        return self.decode_bytes(ids, skip_special=skip_special).decode("utf-8", errors="replace")

    def decode_bytes(self, ids: Iterable[int], *, skip_special: bool = False) -> bytes:
        """Bytes of ids.

        Args:
            ids: Token ids.
            skip_special: Leave special tokens out instead of writing their names.

        Raises:
            DataError: an id that the vocabulary lacks.
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
    """Decodes ids one by one as a model writes them; holds back bytes that end inside a character.

    Args:
        tokenizer: Whose ids.
        skip_special: Leave special tokens out instead of writing their names.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True) -> None:
        self.tokenizer, self.skip_special = tokenizer, skip_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """The text that has become certain with one more token; may be empty."""
        return self._utf8.decode(self.tokenizer.decode_bytes([token], skip_special=self.skip_special))

    def finish(self) -> str:
        """What is still held back: U+FFFD for half a character, else nothing."""
        return self._utf8.decode(b"", final=True)


def check_text(text: str, where: str) -> None:
    """Refuse text that no tokenizer can encode.

    Args:
        text: Text to tokenise.
        where: Name of the text in errors.

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
