"""Byte-pair encodings, run by the ``tokenizers`` library without its special tokens."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal

from cordillera.data.tokenizers.chat import JinjaChat, guess_format
from cordillera.data.tokenizers.pairs import sentencepiece
from cordillera.data.tokenizers.pairs.rules import check_ids, check_rules
from cordillera.data.tokenizers.tokenizer import SpacePrefix, Tokenizer
from cordillera.errors import DataError

LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Regular expression of the words into which Llama 3 divides text before it looks for tokens."""

BEGINS = ("<|begin_of_text|>", "<s>")
ENDS = ("<|end_of_text|>", "<|endoftext|>", "</s>")
TURN_ENDS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|eot|>")


def byte_letters() -> dict[str, int]:
    """Return the letters with which byte-level encodings write bytes (Radford et al. 2019, GPT-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


TextEncoder = Callable[[Sequence[str]], list[list[int]]]
"""Function from texts to ids."""


@dataclass(frozen=True, eq=False)
class BytePairs:
    """Content of a file about a byte-pair encoding.

    The special tokens are removed from the vocabulary, the merges and the list of added tokens, so that no text can
    become one, whatever the library does with its list. The library gets no unknown token either: some vocabularies
    (SmolLM2's) lack the bytes of a few rare characters, for which the library would write a control token; here they
    are written as U+FFFD.

    Attributes:
        vocabulary: Ids by token, in byte letters or, if ``has_pieces``, in the spelling of SentencePiece.
        words: Further entries that are found before anything else, as ``tokenizer.json`` lists added tokens; by name.
        ignore_merges: Whether a word that is a token is used without merges.
        bos: Special token that begins a text, or None.
        eos: Special token that ends a text, or None.
        stops: Ids at which generation ends besides ``eos`` and the usual ones.
        adds_bos: Whether the model expects texts to begin with ``bos``.
        template: Jinja source of the chat template, or None.
        has_pieces: Whether tokens are in the spelling of SentencePiece, and the rest of a text falls back to bytes.
        has_prefix: Whether a text gets a space in front that no rule puts there. A ``Prepend`` rule puts one after each
            of ``words`` too.
        strips: Special tokens that take the white space before or after them: whether before, whether after; by name.
    """

    path: Path
    vocabulary: Mapping[str, int]
    merges: Sequence[Sequence[str]]
    special: Mapping[str, int]
    words: Mapping[str, Mapping[str, Any]]
    normalizer: Any
    pre_tokenizer: Any
    ignore_merges: bool
    bos: str | None = None
    eos: str | None = None
    stops: Sequence[int] = ()
    adds_bos: bool = False
    template: str | None = None
    has_pieces: bool = False
    has_prefix: bool = False
    strips: Mapping[str, tuple[bool, bool]] = field(default_factory=dict)

    @cached_property
    def _ids(self) -> dict[str, int]:
        """Ids of all tokens that are not special; added words appear in the vocabulary only to keep their ids."""
        plain = {name: token for name, token in self.vocabulary.items() if name not in self.special}
        return plain | {name: word["id"] for name, word in self.words.items()}

    @cached_property
    def _source(self) -> str:
        """Content of a ``tokenizer.json``."""
        words = sorted(self.words.values(), key=lambda word: word["id"])
        model = {
            "type": "BPE",
            "ignore_merges": self.ignore_merges,
            "vocab": self._ids,
            "merges": self.plain_merges,
            **({"byte_fallback": True} if self.has_pieces else {}),
        }
        content = {
            "version": "1.0",
            "added_tokens": [{**word, "special": False} for word in words],
            "normalizer": self.normalizer,
            "pre_tokenizer": self.pre_tokenizer,
            "model": model,
        }
        return json.dumps(content, ensure_ascii=False)

    @property
    def plain_merges(self) -> list[Sequence[str]]:
        """Merges that neither use nor make a special token."""
        hidden = self.special.keys()
        return [
            pair for pair in self.merges if not (pair[0] in hidden or pair[1] in hidden or pair[0] + pair[1] in hidden)
        ]

    @property
    def unwritable(self) -> re.Pattern[str] | None:
        """Pattern of the characters whose bytes are not tokens; None if there are none.

        Raises:
            DataError: most text cannot be written in the vocabulary.
        """
        if self.has_pieces:
            sentencepiece.check_bytes(self._ids, self.path)
            return None
        absent = {byte for letter, byte in byte_letters().items() if letter not in self._ids}
        return _unwritable(absent, self.path)

    @property
    def plain_pieces(self) -> list[str]:
        """Tokens that are neither special nor words nor bytes."""
        hidden = {*self.special, *self.words, *sentencepiece.BYTE_NAMES}
        return [name for name in self.vocabulary if name not in hidden]

    def tokenizer(self, kind: Literal["tokenizers", "gguf", "sentencepiece"]) -> Tokenizer:
        """Make the tokenizer.

        Raises:
            DataError: the vocabulary is damaged, or most text cannot be written in it.
        """
        self._check()
        bos, eos, chat = self.bos, self.eos, None
        if self.template is None:  # a configuration without one is that of a base model, chat tokens or not
            is_base = kind in ("tokenizers", "sentencepiece") and self.path.with_name("tokenizer_config.json").exists()
            chat = None if is_base else guess_format(self.special)
        else:
            chat = JinjaChat(self.template, self.special, bos=bos, eos=eos, where=f"{self.path}, chat template")
        ends = [self.special.get(name) for name in (*ENDS, *TURN_ENDS)]
        bos_id, eos_id = (None if name is None else self.special[name] for name in (bos, eos))
        fingerprint = f"{json.dumps(dict(self.special))}{self._source}{'with prefix' if self.has_prefix else ''}"
        begin, inside = self._encoders()
        made = Tokenizer(
            kind=kind,
            path=self.path,
            encode_plain=begin,
            token_bytes=self._token_bytes(),
            special_tokens=dict(self.special),
            bos_id=bos_id,
            eos_id=eos_id,
            stop_ids=tuple(dict.fromkeys(stop for stop in (eos_id, *self.stops, *ends) if stop is not None)),
            adds_bos=self.adds_bos and bos is not None,
            chat_format=chat,
            fingerprint=hashlib.sha256(fingerprint.encode()).hexdigest(),
            prefix=self.prefix,
            encode_inside=inside,
            strips=self.strips,
        )
        probe = "a \ufffd\n 12"
        if made.decode(made.encode(probe)).removeprefix(" ") != probe:
            raise DataError("its ids do not give the text back", where=str(self.path))
        return made

    def _check(self) -> None:
        words = ((name, word.get("id")) for name, word in self.words.items())
        check_ids(self.path, itertools.chain(self.vocabulary.items(), self.special.items(), words))
        check_rules(self.path, self.normalizer, self.pre_tokenizer, self.has_pieces)
        for number, pair in enumerate(self.merges):
            if not isinstance(pair, list | tuple) or len(pair) != 2 or not all(isinstance(one, str) for one in pair):
                raise DataError(f"merge {number} is not a pair of tokens", where=str(self.path))

    @property
    def prefix(self) -> SpacePrefix:
        """Where texts get a space in front."""
        if not self.has_pieces or self.has_prefix:
            return "always" if self.has_prefix else "never"
        return sentencepiece.prefix_of(self.normalizer, self.pre_tokenizer)

    def _encoders(self) -> tuple[TextEncoder, TextEncoder | None]:
        """Encoders of texts from their beginning, and of what follows other text; None if there is no difference."""
        begin = self._encoder()
        if self.has_prefix:
            return sentencepiece.with_space(begin), begin
        if self.prefix == "never":
            return begin, None
        without = sentencepiece.without_prefix
        bare = replace(self, normalizer=without(self.normalizer), pre_tokenizer=without(self.pre_tokenizer))
        made = cache(bare._encoder)  # not everyone needs it
        return begin, lambda texts: made()(texts)

    def _encoder(self) -> TextEncoder:
        from tokenizers import Tokenizer as Library

        if len(set(self._ids.values()) | set(self.special.values())) != len(self._ids) + len(self.special):
            raise DataError("two tokens have one id", where=str(self.path))
        unwritable = self.unwritable
        try:
            library = Library.from_str(self._source)
        except BaseException as error:
            raise self._failed(error, "the tokenizer is damaged") from error

        def encode(texts: Sequence[str]) -> list[list[int]]:
            if unwritable is not None:
                texts = [unwritable.sub("\ufffd", text) for text in texts]
            try:
                return [found.ids for found in library.encode_batch_fast(list(texts), add_special_tokens=False)]
            except BaseException as error:
                raise self._failed(error, "its rules do not get through this text") from error

        return encode

    def _failed(self, error: BaseException, what: str) -> BaseException:
        """Convert an error of the library, which raises ``Exception`` or, on a panic, ``BaseException``."""
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            return error
        return DataError(f"{what} ({str(error)[:200]})", where=str(self.path), remedy="use another file of the model")

    def _token_bytes(self) -> list[bytes | None]:
        letters = byte_letters()

        def spelt(name: str) -> bytes:
            if name in self.special:
                return name.encode()
            if self.has_pieces:
                return sentencepiece.piece_bytes(name)
            return name.encode() if name in self.words else bytes(letters[letter] for letter in name)

        found: list[bytes | None] = [None] * (max(*self._ids.values(), *self.special.values(), 0) + 1)
        for name, token in (*self._ids.items(), *self.special.items()):
            try:
                found[token] = spelt(name)
            except KeyError:
                raise DataError(f"token {token}, {name!r}, is not in byte letters", where=str(self.path)) from None
            except UnicodeEncodeError:
                raise DataError(f"token {token}, {name!r}, holds half a character", where=str(self.path)) from None
        return found


def _unwritable(absent: set[int], path: Path) -> re.Pattern[str] | None:
    """Pattern of the characters whose bytes are not tokens; None if all are."""
    if absent & {*range(0x80, 0xC0), 0xEF}:  # continuation bytes, and the first byte of U+FFFD
        raise DataError(
            f"{len(absent)} of the 256 bytes are no tokens, so most text cannot be written",
            where=str(path),
            remedy="byte-level byte-pair encodings are supported",
        )
    ranges = [_begun_by(byte) for byte in sorted(absent - {0xC0, 0xC1} - {*range(0xF5, 0x100)})]
    letters = "".join(f"{re.escape(chr(low))}-{re.escape(chr(high))}" for low, high in ranges)
    return re.compile(f"[{letters}]") if ranges else None


def _begun_by(byte: int) -> tuple[int, int]:
    """First and last character whose UTF-8 begins with ``byte`` (RFC 3629, section 4)."""
    if byte < 0x80:
        return byte, byte
    if byte < 0xE0:
        first = (byte & 0x1F) << 6
        return first, first + 0x3F
    if byte < 0xF0:  # 0xE0 begins no character of two bytes, 0xED none of the surrogates
        first = (byte & 0x0F) << 12
        return max(first, 0x800), 0xD7FF if byte == 0xED else first + 0xFFF
    first = (byte & 7) << 18
    return max(first, 0x10000), min(first + 0x3FFFF, 0x10FFFF)
