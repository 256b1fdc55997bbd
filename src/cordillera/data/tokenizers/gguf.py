"""GGUF files: metadata, places of tensors, and vocabularies."""

from __future__ import annotations

import json
import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from cordillera.data.tokenizers.pairs.byte_pairs import BytePairs
from cordillera.data.tokenizers.pairs.sentencepiece import (
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    merges_of,
    plain_normalizer,
)
from cordillera.data.tokenizers.pairs.splitters import split_rule, takes_whole_words
from cordillera.errors import DataError

HEAD = struct.Struct("<4sIQQ")
# Formats of numbers, by the kind of a value (ggml, gguf.h).
_NUMBERS = dict(enumerate(("<B", "<b", "<H", "<h", "<I", "<i", "<f", "<?"))) | {10: "<Q", 11: "<q", 12: "<d"}
STRING, ARRAY = 8, 9
ALIGNMENT, _MOST_DIMENSIONS = 32, 4
# Limits of the header before the tensors; real files have half a million entries in 20 MB.
_MOST_BYTES, _MOST_TEXT, _MOST_ENTRIES = 1 << 28, 1 << 24, 1 << 22
# Values and bytes of a block, by kind of tensor (ggml, ggml-common.h); tensors of other kinds have at least one byte.
_BLOCKS = {0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34), 10: (256, 84)}
_BLOCKS |= {11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210), 15: (256, 292), 24: (1, 1), 25: (1, 2)}
_BLOCKS |= {26: (1, 4), 27: (1, 8), 28: (1, 8), 30: (1, 2)}


STOPS = "tokenizer.cordillera.stop_token_ids"
"""Ids that end a text and that other programs have no name for."""

RULES = "tokenizer.cordillera.rules"
"""JSON of the rules of ``tokenizer.json`` that other programs have no name for, and leave out: ``normalizer``,
``pre_tokenizer`` and ``strips`` (:class:`~cordillera.data.tokenizers.pairs.byte_pairs.BytePairs`)."""


class GGUFTensor(NamedTuple):
    """Location of a tensor in a GGUF file: first byte, number of its quantisation (ggml.h), shape as in torch."""

    shape: tuple[int, ...]
    kind: int
    begin: int


def gguf_metadata(path: Path, prefix: str | tuple[str, ...] = "") -> dict[str, Any]:
    """Return the metadata of a GGUF file; for arguments and errors, see :func:`gguf_header`."""
    return gguf_header(path, prefix)[0]


def gguf_header(path: Path, prefix: str | tuple[str, ...] = "") -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
    """Read the metadata whose keys begin with ``prefix`` (GGUF 2 or 3, little-endian), and all tensors' places by name.

    The ``gguf`` library makes an array of every entry of a list, which is slow for a vocabulary's tokens and merges.

    Raises:
        DataError: the file is damaged or truncated: a count, a length or a shape exceeds the file or the limits of such
            files, a name occurs twice, or tensors overlap.
    """
    try:
        with open(path, "rb") as file:
            head = file.read(HEAD.size)
    except (OSError, ValueError) as error:
        raise DataError(f"cannot be read ({getattr(error, 'strerror', None) or error})", where=str(path)) from error
    magic, version, tensors, count = HEAD.unpack(head) if len(head) == HEAD.size else (b"", 0, 0, 0)
    if magic != b"GGUF" or version not in (2, 3):
        remedy = "convert it anew: versions 2 and 3, little-endian, are supported"
        raise DataError("this is not a GGUF file that can be read", where=str(path), remedy=remedy)
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        reader = _Reader(content, HEAD.size)
        found: dict[str, Any] = {}
        names: set[str] = set()
        places: dict[str, GGUFTensor] = {}
        alignment: Any = ALIGNMENT
        try:
            for _ in range(count):
                name = reader.value(STRING)
                value = reader.value(reader.number("<I"))
                if name in names:
                    raise ValueError(f"{name!r} is there twice")
                names.add(name)
                if name == "general.alignment":
                    alignment = value
                if name.startswith(prefix):
                    found[name] = value
            if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
                raise ValueError(f"the alignment is {alignment!r}")
            for _ in range(tensors):
                name, tensor = reader.place()
                if name in places:
                    raise ValueError(f"two tensors are called {name!r}")
                places[name] = tensor
            begin = -(-reader.position // alignment) * alignment
            places = {name: one._replace(begin=begin + one.begin) for name, one in places.items()}
            _check_places(places, alignment, len(content))
        except (struct.error, ValueError, TypeError, KeyError, EOFError, RecursionError) as error:
            reason = f"there is no kind {error}" if isinstance(error, KeyError) else error
            raise DataError(
                f"the GGUF file is damaged or cut off ({reason}; byte {reader.position})",
                where=str(path),
                remedy="fetch it again",
            ) from error
    return found, places


def _check_places(places: Mapping[str, GGUFTensor], alignment: int, size: int) -> None:
    """Check that tensors are aligned, end within the file and do not overlap."""
    end, before = 0, ""
    for name, tensor in sorted(places.items(), key=lambda entry: entry[1].begin):
        block, width = _BLOCKS.get(tensor.kind, (math.prod(tensor.shape), 1))
        if tensor.begin % alignment:
            raise ValueError(f"tensor {name!r} is not aligned")
        if tensor.begin < end:
            raise ValueError(f"tensors {before!r} and {name!r} overlap")
        end, before = tensor.begin + math.prod(tensor.shape) // block * width, name
        if end > size:
            raise EOFError(f"tensor {name!r} reaches beyond the end")


class _Reader:
    """Reads typed values one after another, never beyond the end."""

    def __init__(self, content: mmap.mmap, position: int) -> None:
        self.content, self.position, self.entries = content, position, 0

    def number(self, code: str) -> Any:
        if self.position > _MOST_BYTES:
            raise ValueError(f"the metadata take more than {_MOST_BYTES:,} bytes")
        (value,) = struct.unpack_from(code, self.content, self.position)
        self.position += struct.calcsize(code)
        return value

    def value(self, kind: int) -> Any:
        if kind == STRING:
            size = self.number("<Q")
            begin, self.position = self.position, self.position + size
            if self.position > len(self.content):
                raise EOFError("a text reaches beyond the end")
            if size > _MOST_TEXT:
                raise ValueError(f"a text of {size:,} bytes")
            return self.content[begin : self.position].decode("utf-8")
        if kind == ARRAY:
            kind, size = self.number("<I"), self.number("<Q")
            if size > len(self.content) - self.position:  # every entry takes at least a byte
                raise EOFError("a list reaches beyond the end")
            self.entries += size
            if self.entries > _MOST_ENTRIES:
                raise ValueError(f"lists of {self.entries:,} entries")
            return [self.value(kind) for _ in range(size)]
        return self.number(_NUMBERS[kind])

    def place(self) -> tuple[str, GGUFTensor]:
        """Name of a tensor, and the tensor with its place relative to the end of the header."""
        name, dimensions = self.value(STRING), self.number("<I")
        if dimensions > _MOST_DIMENSIONS:
            raise ValueError(f"tensor {name!r} has {dimensions} dimensions")
        shape = tuple(self.number("<Q") for _ in range(dimensions))[::-1]
        if not math.prod(shape):
            raise ValueError(f"tensor {name!r} holds nothing")
        return name, GGUFTensor(shape, self.number("<I"), self.number("<Q"))


def filler(row: int) -> str:
    """Name of a ``row`` of the embedding that is no token, as llama.cpp's converters write it."""
    return f"[PAD{row}]"


_SINGLE: dict[str, type] = {f"ggml.{name}_token_id": int for name in ("bos", "eos", "eot", "eom")}
_SINGLE |= {"ggml.pre": str, "ggml.add_bos_token": bool, "ggml.add_space_prefix": bool, "chat_template": str}
_SINGLE |= {RULES.removeprefix("tokenizer."): str}
_KINDS: dict[str, type] = {"ggml.tokens": str, "ggml.merges": str, "ggml.scores": float, "ggml.token_type": int}
_KINDS |= {STOPS.removeprefix("tokenizer."): int} | _SINGLE
_SPELLINGS = {"gpt2": "ggml.merges", "llama": "ggml.scores"}
"""Lists by which tokens are merged, by the names of byte-level encodings and of those that fall back to bytes."""


def read_gguf_pairs(path: Path) -> BytePairs:
    """Read the tokenizer of a GGUF model, a byte-pair encoding that is byte-level or falls back to bytes."""
    fields = gguf_metadata(path, ("tokenizer.", "general.architecture"))
    kind = fields.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise DataError(
            f"its tokenizer is {kind!r}, not a byte-pair encoding ('gpt2' or 'llama')",
            where=str(path),
            remedy="use another file of the model, or its tokenizer.json",
        )
    _check_kinds(fields, _SPELLINGS[kind], path)
    tokens = fields["tokenizer.ggml.tokens"]
    types = fields.get("tokenizer.ggml.token_type") or [NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise DataError(f"there are {len(tokens)} tokens and {len(types)} kinds of token", where=str(path))
    ids = {name: fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "eot", "eom")}
    named = {name: token for name, token in ids.items() if token is not None}
    for name, token in named.items():
        if not 0 <= token < len(tokens):
            raise DataError(f"the {name} token is {token}; there are {len(tokens)} tokens", where=str(path))
    hidden = (UNKNOWN, CONTROL, UNUSED)
    fillers = {i for i, one in enumerate(types) if one in (UNUSED, UNKNOWN) and tokens[i] == filler(i)}
    unused = fillers - set(named.values())
    special = {
        tokens[i]: i for i, one in enumerate(types) if (one in hidden or i in named.values()) and i not in unused
    }
    words = [i for i, one in enumerate(types) if one == USER_DEFINED and tokens[i] not in special]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    pairs = BytePairs(
        path=path,
        vocabulary={name: i for i, name in enumerate(tokens) if i not in unused},
        merges=[],
        special=special,
        words={tokens[i]: {"id": i, "content": tokens[i], **flags} for i in words},
        normalizer=None,
        pre_tokenizer=None,
        ignore_merges=False,
        bos=tokens[named["bos"]] if "bos" in named else None,
        eos=tokens[named["eos"]] if "eos" in named else None,
        stops=[named[name] for name in ("eot", "eom") if name in named] + fields.get(STOPS, []),
        template=fields.get("tokenizer.chat_template"),
    )
    return replace(_with_rules(pairs, fields), **_own_rules(fields.get(RULES, "{}"), path))


def _check_kinds(fields: Mapping[str, Any], merged_by: str, path: Path) -> None:
    """Refuse metadata without a list that is needed, or with values of other kinds."""
    for name, of in _KINDS.items():
        value = fields.get(f"tokenizer.{name}")
        if value is None and name in ("ggml.tokens", merged_by):
            raise DataError(f"the metadata lack tokenizer.{name}", where=str(path))
        entries = value if isinstance(value, list) else [value]
        if value is not None and (
            isinstance(value, list) == (name in _SINGLE) or any(type(x) is not of for x in entries)
        ):
            raise DataError(f"the metadata hold another tokenizer.{name} than they should", where=str(path))


def _with_rules(pairs: BytePairs, fields: Mapping[str, Any]) -> BytePairs:
    """The pairs with merges, and the rules that the file names."""
    path = pairs.path
    if fields["tokenizer.ggml.model"] == "gpt2":
        splitter = fields.get("tokenizer.ggml.pre", "gpt-2")
        return replace(
            pairs,
            merges=[merge.split(" ", 1) for merge in fields["tokenizer.ggml.merges"]],
            pre_tokenizer=split_rule(splitter, path),
            ignore_merges=takes_whole_words(splitter),
            adds_bos=fields.get("tokenizer.ggml.add_bos_token", takes_whole_words(splitter)),
        )
    scores = fields["tokenizer.ggml.scores"]
    if len(scores) != len(fields["tokenizer.ggml.tokens"]):
        count = len(fields["tokenizer.ggml.tokens"])
        raise DataError(f"there are {count} tokens and {len(scores)} scores", where=str(path))
    strips = dict[str, tuple[bool, bool]]()
    if fields.get("general.architecture") == "phi3":  # follows its tokenizer.json and llama.cpp
        strips = {name: (False, True) for name in pairs.special if name not in ("<unk>", "<s>", "<|endoftext|>")}
    pairs = replace(pairs, has_pieces=True)
    return replace(
        pairs,
        merges=merges_of({name: scores[pairs.vocabulary[name]] for name in pairs.plain_pieces}, path),
        normalizer=plain_normalizer(fields.get("tokenizer.ggml.add_space_prefix", True)),
        adds_bos=fields.get("tokenizer.ggml.add_bos_token", True),
        strips=strips,
    )


def _own_rules(text: str, path: Path) -> dict[str, Any]:
    """Return the fields that override fields of the pairs."""
    try:
        found = json.loads(text)
        rules = {name: found[name] for name in ("normalizer", "pre_tokenizer") if name in found}
        if "strips" in found:
            rules["strips"] = {name: (bool(before), bool(after)) for name, (before, after) in found["strips"].items()}
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"the metadata hold a damaged {RULES} ({error})", where=str(path)) from None
    return rules
