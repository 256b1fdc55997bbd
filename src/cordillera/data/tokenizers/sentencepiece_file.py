"""SentencePiece's file, ``tokenizer.model``, as Llama 2 and Mistral ship it: a message of protocol buffers."""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from cordillera.data.tokenizers.hugging_face import beside, chat_template, stop_ids
from cordillera.data.tokenizers.pairs.byte_pairs import BytePairs
from cordillera.data.tokenizers.pairs.rules import TOKENS
from cordillera.data.tokenizers.pairs.sentencepiece import (
    BYTE,
    BYTE_NAMES,
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    merges_of,
    plain_normalizer,
)
from cordillera.errors import DataError
from cordillera.files import JSON_BYTES

# Ways in which a value is written (protobuf.dev, "Encoding").
_VARINT, _EIGHT_BYTES, _SIZED, _FOUR_BYTES = 0, 1, 2, 5
# Numbers of fields (sentencepiece_model.proto).
_PIECE, _TRAINER, _NORMALIZER = 1, 2, 3
_TEXT, _SCORE, _KIND = 1, 2, 3
_MODEL, _SUFFIX, _BEGIN, _END = 3, 24, 46, 47
_TABLE, _PREFIX, _SQUEEZE, _ESCAPE = 2, 3, 4, 5
_MODELS = {1: "a unigram", 2: "a byte-pair", 3: "a word", 4: "a character"}
_FETCH = "fetch the model's files again"
_OTHER = "use the model's tokenizer.json"


class _ScoredPiece(NamedTuple):
    text: str
    score: float
    kind: int


def is_sentencepiece(head: bytes) -> bool:
    """Whether a file that begins with ``head`` is SentencePiece's: a message that begins with the text of a token."""
    if len(head) < 5 or head[0] != 10 or head[2] != 10 or head[1] > 127:
        return False
    return head[1] - head[3] - 2 in (0, 2, 5, 7)  # lengths of the optional fields, type and score


def read_sentencepiece_pairs(path: Path) -> BytePairs:
    """Read ``tokenizer.model`` and, beside it, configuration, further special tokens and chat template.

    Raises:
        DataError: the file is damaged, or is no byte-pair encoding that falls back to bytes and keeps all characters;
            or the ids of tokens beside it do not follow its own.
    """
    if path.stat().st_size > JSON_BYTES:
        raise DataError(f"is larger than {JSON_BYTES:,} bytes", where=str(path))
    content = path.read_bytes()
    try:
        pieces, trainer, normalizer = _model(content)
        has_prefix = _rules(trainer, normalizer, path)
        begin, end = (_text(trainer.get(field, name)) for field, name in ((_BEGIN, b"<s>"), (_END, b"</s>")))
    except (ValueError, IndexError, struct.error) as error:
        raise DataError(f"the file is damaged or cut off ({error})", where=str(path), remedy=_FETCH) from error
    ids = {piece.text: number for number, piece in enumerate(pieces)}
    _check(pieces, ids, path)
    special = {
        text: number
        for text, number in ids.items()
        if pieces[number].kind in (UNKNOWN, CONTROL) or (text in (begin, end) and pieces[number].kind == USER_DEFINED)
    }
    words = [text for text, number in ids.items() if pieces[number].kind == USER_DEFINED and text not in special]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    settings, generation = (beside(path, f"{name}_config.json") for name in ("tokenizer", "generation"))
    added = _added(path, settings, ids)
    special |= {text: token["id"] for text, token in added.items()}
    begin, end = (_chosen(settings.get(f"{key}_token"), added, own) for key, own in (("bos", begin), ("eos", end)))
    adds_bos = settings.get("add_bos_token", True)
    return BytePairs(
        path=path,
        vocabulary={text: number for text, number in ids.items() if pieces[number].kind in (NORMAL, BYTE)},
        merges=merges_of({piece.text: piece.score for piece in pieces if piece.kind == NORMAL}, path),
        special=special,
        words={text: {"id": ids[text], "content": text, **flags} for text in words},
        normalizer=plain_normalizer(has_prefix and not words),
        pre_tokenizer=None,
        ignore_merges=False,
        bos=begin if begin in special else None,
        eos=end if end in special else None,
        stops=stop_ids(generation.get("eos_token_id"), path),
        adds_bos=adds_bos is True and begin in special,
        template=chat_template(path, settings),
        has_pieces=True,
        has_prefix=has_prefix and bool(words),
        strips={
            text: sides
            for text, token in added.items()
            if any(sides := (bool(token.get("lstrip")), bool(token.get("rstrip"))))
        },
    )


def _added(path: Path, settings: dict[str, Any], ids: dict[str, int]) -> dict[str, dict[str, Any]]:
    """Tokens that a fine-tuning added, by text: those beside the file that are none of its pieces."""
    tokens = [{"content": text, "id": number} for text, number in beside(path, "added_tokens.json").items()]
    try:
        described = settings.get("added_tokens_decoder") or {}
        tokens += [{**token, "id": int(number)} for number, token in described.items()]
        found = {token["content"]: token for token in tokens if ids.get(token["content"]) != token["id"]}
        if not all(isinstance(text, str) and text and type(token["id"]) is int for text, token in found.items()):
            raise ValueError
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DataError(
            "added_tokens.json or added_tokens_decoder of tokenizer_config.json does not give tokens and their ids",
            where=str(path.parent),
            remedy=_FETCH,
        ) from error
    found = dict(sorted(found.items(), key=lambda one: one[1]["id"]))
    for number, (text, token) in enumerate(found.items(), len(ids)):
        if text in ids or token["id"] != number:
            raise DataError(
                f"the added token {text!r} has the id {token['id']}, "
                + (f"and the file's own {ids[text]}" if text in ids else f"and the next free one is {number}"),
                where=str(path),
                remedy=_OTHER,
            )
    return found


def _chosen(entry: Any, added: Collection[str], own: str) -> str:
    """The token that a configuration's ``entry`` names if it is one of those ``added``, or else the file's ``own``."""
    name = entry.get("content") if isinstance(entry, dict) else entry
    return name if isinstance(name, str) and name in added else own


def _rules(trainer: dict[int, Any], normalizer: dict[int, Any], path: Path) -> bool:
    """Whether texts get a space in front; errors for rules under which not every text is given back."""
    model = trainer.get(_MODEL, 1)
    problem = None
    if model != 2:
        problem = f"it is {_MODELS.get(model, 'an unknown')} model, not a byte-pair encoding"
    elif normalizer.get(_TABLE):
        problem = "it normalises texts by a table of its own"
    elif normalizer.get(_SQUEEZE, 1):
        problem = "it removes spaces"
    elif not normalizer.get(_ESCAPE, 1) or trainer.get(_SUFFIX, 0):
        problem = "it writes spaces in another way than as ▁ before a word"
    if problem is not None:
        raise DataError(problem, where=str(path), remedy="byte-pair encodings that keep texts as they are can be read")
    return bool(normalizer.get(_PREFIX, 1))


def _check(pieces: list[_ScoredPiece], ids: dict[str, int], path: Path) -> None:
    problem = None
    if len(ids) != len(pieces) or "" in ids:
        problem = "a token is there twice, or empty"
    for piece in pieces:
        if not NORMAL <= piece.kind <= BYTE or piece.kind == UNUSED:
            problem = f"token {piece.text!r} is of the kind {piece.kind}, which cannot be used here"
        elif (piece.kind == BYTE) != (piece.text in BYTE_NAMES):
            problem = f"token {piece.text!r} should be a byte's, or should not"
    if problem is not None:
        raise DataError(problem, where=str(path), remedy=_OTHER)


def _model(content: bytes) -> tuple[list[_ScoredPiece], dict[int, Any], dict[int, Any]]:
    """Tokens, and the fields of the trainer's and the normaliser's settings."""
    pieces: list[_ScoredPiece] = []
    settings: dict[int, dict[int, Any]] = {_TRAINER: {}, _NORMALIZER: {}}
    for number, value in _fields(content):
        if number == _PIECE:
            fields = dict(_fields(_sized(value)))
            score, kind = fields.get(_SCORE, b"\0" * 4), fields.get(_KIND, NORMAL)
            if not isinstance(kind, int):
                raise ValueError("the kind of a token is no number")
            pieces.append(_ScoredPiece(_text(fields.get(_TEXT, b"")), struct.unpack("<f", _sized(score))[0], kind))
            if len(pieces) > TOKENS:
                raise ValueError(f"more than {TOKENS:,} tokens")
        elif number in settings:
            settings[number] |= dict(_fields(_sized(value)))
    return pieces, settings[_TRAINER], settings[_NORMALIZER]


def _fields(content: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Numbers and values of a message's fields: whole numbers, or bytes."""
    place = 0
    while place < len(content):
        key, place = _varint(content, place)
        way = key & 7
        if way == _VARINT:
            number, place = _varint(content, place)
            yield key >> 3, number
            continue
        if way == _SIZED:
            size, place = _varint(content, place)
        elif way in (_FOUR_BYTES, _EIGHT_BYTES):
            size = 4 if way == _FOUR_BYTES else 8
        else:
            raise ValueError(f"a value of the unknown type {way}; byte {place}")
        if size > len(content) - place:
            raise ValueError(f"a value reaches beyond the end; byte {place}")
        yield key >> 3, content[place : place + size]
        place += size


def _varint(content: bytes, place: int) -> tuple[int, int]:
    """Whole number at a place, seven bits a byte, and the place after it."""
    number = 0
    for shift in range(0, 70, 7):
        byte = content[place + shift // 7]
        number |= (byte & 127) << shift
        if byte < 128:
            return number, place + shift // 7 + 1
    raise ValueError(f"a number of more than ten bytes; byte {place}")


def _sized(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise ValueError("a number in place of bytes")
    return value


def _text(value: int | bytes) -> str:
    return _sized(value).decode("utf-8")
