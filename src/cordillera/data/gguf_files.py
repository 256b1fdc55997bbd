"""GGUF files: their metadata, and the vocabulary in it."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any

from cordillera.data.byte_pairs import LLAMA3_WORDS, BytePairs
from cordillera.data.tokenizer import Tokenizer
from cordillera.errors import DataError

# Rules of splitting by the names that GGUF gives them (llama.cpp, llama-vocab.cpp).
_DIGITS_ALONE = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
_AS_GPT2 = ("gpt-2", "gpt2", "phi-2", "olmo", "mpt", "jais")
_QWEN2_WORDS = LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")
_PATTERNS = {
    "llama-bpe": LLAMA3_WORDS,
    "llama3": LLAMA3_WORDS,
    "llama-v3": LLAMA3_WORDS,
    "qwen2": _QWEN2_WORDS,
    "deepseek-r1-qwen": _QWEN2_WORDS,
}
_HEAD = struct.Struct("<4sIQQ")
# Kinds of value and of token (ggml, gguf.h).
_NUMBERS = dict(enumerate(("<B", "<b", "<H", "<h", "<I", "<i", "<f", "<?"))) | {10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 2, 3, 4, 5


def gguf_metadata(path: Path, prefix: str | tuple[str, ...] = "") -> dict[str, Any]:
    """The metadata of a GGUF file (version 2 or 3, little-endian), without its tensors.

    The ``gguf`` library makes arrays of every entry of a list, and so is slow with a vocabulary's tokens and merges.

    Args:
        path: The file.
        prefix: Only keys that begin so, or with one of these.

    Raises:
        DataError: the file is damaged or cut off.
    """
    with open(path, "rb") as file:
        head = file.read(_HEAD.size)
    magic, version, _, count = _HEAD.unpack(head) if len(head) == _HEAD.size else (b"", 0, 0, 0)
    if magic != b"GGUF" or version not in (2, 3):
        remedy = "convert it anew: versions 2 and 3, little-endian, are supported"
        raise DataError("this is not a GGUF file that can be read", where=str(path), remedy=remedy)
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        reader = _Reader(content, _HEAD.size)
        found = {}
        try:
            for _ in range(count):
                name = reader.value(_STRING)
                value = reader.value(reader.number("<I"))
                if name.startswith(prefix):
                    found[name] = value
        except (struct.error, UnicodeDecodeError, KeyError, EOFError, RecursionError) as error:
            raise DataError(
                f"the GGUF file is damaged or cut off ({error!r}, byte {reader.position})",
                where=str(path),
                remedy="fetch it again",
            ) from error
    return found


class _Reader:
    """Reads typed values one after another; never beyond the end."""

    def __init__(self, content: mmap.mmap, position: int) -> None:
        self.content, self.position = content, position

    def number(self, code: str) -> Any:
        (value,) = struct.unpack_from(code, self.content, self.position)
        self.position += struct.calcsize(code)
        return value

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            size = self.number("<Q")
            begin, self.position = self.position, self.position + size
            if self.position > len(self.content):
                raise EOFError("a text reaches beyond the end")
            return self.content[begin : self.position].decode("utf-8")
        if kind == _ARRAY:
            kind, size = self.number("<I"), self.number("<Q")
            if size > len(self.content) - self.position:  # every entry takes a byte at least
                raise EOFError("a list reaches beyond the end")
            return [self.value(kind) for _ in range(size)]
        return self.number(_NUMBERS[kind])


def read_gguf_tokenizer(path: Path) -> Tokenizer:
    """The vocabulary of a GGUF model.

    Raises:
        DataError: the file is damaged, or its vocabulary is not a byte-level byte-pair encoding of a known kind.
    """
    fields = gguf_metadata(path, "tokenizer.")
    kind = fields.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise DataError(
            f"its tokenizer is {kind!r}, not a byte-level byte-pair encoding ('gpt2')",
            where=str(path),
            remedy="use another file of the model, or its tokenizer.json",
        )
    try:
        tokens, merges = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.merges"]
    except KeyError as error:
        raise DataError(f"the metadata lack {error.args[0]}", where=str(path)) from None
    types = fields.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if len(types) != len(tokens):
        raise DataError(f"there are {len(tokens)} tokens and {len(types)} kinds of token", where=str(path))
    ids = {name: fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "eot", "eom")}
    named = {name: token for name, token in ids.items() if token is not None}
    for name, token in named.items():
        if not 0 <= token < len(tokens):
            raise DataError(f"the {name} token is {token}; there are {len(tokens)} tokens", where=str(path))
    hidden = (_UNKNOWN, _CONTROL, _UNUSED)
    special = {tokens[i]: i for i, kind in enumerate(types) if kind in hidden or i in named.values()}
    words = [i for i, kind in enumerate(types) if kind == _USER_DEFINED and tokens[i] not in special]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    splitter = str(fields.get("tokenizer.ggml.pre", "gpt-2"))
    as_llama3 = _PATTERNS.get(splitter) == LLAMA3_WORDS
    pairs = BytePairs(
        path=path,
        vocabulary={name: i for i, name in enumerate(tokens)},
        merges=[merge.split(" ", 1) for merge in merges],
        special=special,
        words={tokens[i]: {"id": i, "content": tokens[i], **flags} for i in words},
        normalizer=None,
        pre_tokenizer=_splitter(splitter, path),
        ignore_merges=as_llama3,
    )
    return pairs.tokenizer(
        "gguf",
        bos=tokens[named["bos"]] if "bos" in named else None,
        eos=tokens[named["eos"]] if "eos" in named else None,
        stops=[named[name] for name in ("eot", "eom") if name in named],
        adds_bos=bool(fields.get("tokenizer.ggml.add_bos_token", as_llama3)),
        template=fields.get("tokenizer.chat_template"),
    )


def _splitter(name: str, path: Path) -> dict[str, Any]:
    """The pre-tokenizer, in the terms of ``tokenizer.json``, that a GGUF file names."""
    plain = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    if name in _AS_GPT2:
        return plain
    if name in _DIGITS_ALONE:
        return {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, plain]}
    if name in _PATTERNS:
        pattern = {"Regex": _PATTERNS[name]}
        split = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
        return {"type": "Sequence", "pretokenizers": [split, plain | {"use_regex": False}]}
    known = sorted({*_AS_GPT2, *_DIGITS_ALONE, *_PATTERNS})
    raise DataError(
        f"texts are split by the rule {name!r}, which is not known here",
        where=str(path),
        remedy=f"use the model's tokenizer.json; known are {', '.join(known)}",
    )
