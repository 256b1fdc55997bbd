"""Byte-pair encodings in the spelling of SentencePiece (Kudo and Richardson 2018, arXiv 1808.06226).

Tokens are plain text in which ``▁`` stands for a space. What is no token is written in bytes, which are tokens with
names such as ``<0x0A>``. Where two neighbours together are a token they are merged, the highest score first and then
the first in the text. The same merges in the order of scores give the same tokens; tokens may have equal scores only if
they are all runs of one letter.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cordillera.data.tokenizers.tokenizer import SpacePrefix
from cordillera.errors import DataError

SPACE = "\u2581"
"""Character that represents a space."""

BYTE_NAMES = {f"<0x{byte:02X}>": byte for byte in range(256)}
"""Bytes by the names of their tokens."""

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""Kinds of token, of the same numbers in SentencePiece (sentencepiece_model.proto) and GGUF (llama.h)."""

LONGEST = 512
"""Largest number of characters of a token that is made by merges."""

CHARACTERS = 1 << 23
"""Largest number of characters of all tokens together."""

_REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}


def piece_bytes(name: str) -> bytes:
    """Return the bytes of the token ``name``."""
    byte = BYTE_NAMES.get(name)
    return name.replace(SPACE, " ").encode() if byte is None else bytes([byte])


def plain_normalizer(has_prefix: bool) -> dict[str, Any]:
    """Return the rules of ``tokenizer.json`` that write spaces as ``▁``, with one in front if ``has_prefix``."""
    return (
        {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": SPACE}, _REPLACE]}
        if has_prefix
        else _REPLACE
    )


def has_prefix_field(normalizer: Any, pre_tokenizer: Any) -> bool | None:
    """Return whether these rules put a space in front, if they do nothing besides writing spaces; None if they do."""
    if pre_tokenizer is not None:
        return None
    parts = normalizer.get("normalizers") if isinstance(normalizer, dict) else None
    if isinstance(parts, list) and len(parts) == 1:
        normalizer = parts[0]
    found = [one for one in (True, False) if normalizer == plain_normalizer(one)]
    return found[0] if found else None


def prefix_of(normalizer: Any, pre_tokenizer: Any) -> SpacePrefix:
    """Return where these rules, which were checked, put a space in front of text."""
    schemes = [rule.get("prepend_scheme", "always") for rule in _flat(pre_tokenizer) if rule["type"] == "Metaspace"]
    if any(rule["type"] == "Prepend" for rule in _flat(normalizer)) or "always" in schemes:
        return "always"
    return "first" if "first" in schemes else "never"


def without_prefix(rule: Any) -> Any:
    """Return a normalizer or pre-tokenizer that puts no space in front, and is ``rule`` otherwise."""
    if not isinstance(rule, dict):
        return rule
    if rule.get("type") == "Metaspace":
        return {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "never", "split": rule.get("split", True)}
    if rule.get("type") == "Prepend":
        return {"type": "Sequence", "normalizers": []}
    lists = {key: [without_prefix(one) for one in value] for key, value in rule.items() if isinstance(value, list)}
    return {**rule, **lists}


def merges_of(scores: Mapping[str, float], path: Path) -> list[tuple[str, str]]:
    """Return the merges, in order, that give the tokens of ``scores``.

    Args:
        scores: Scores by token, without special tokens and those of bytes.
        path: File that errors name.

    Raises:
        DataError: no order of merges gives these tokens, or they are too long.
    """
    problem = _unlike(scores)
    if problem is None and not all(map(math.isfinite, scores.values())):
        problem = "a score is not finite"
    if problem is not None:
        raise DataError(problem, where=str(path), remedy="use the model's tokenizer.json")
    splits = {piece: found for piece in scores if (found := _splits(piece, scores))}
    merges: list[tuple[str, str]] = []
    for _, equal in itertools.groupby(sorted(splits, key=lambda piece: -scores[piece]), scores.__getitem__):
        pieces = sorted(equal, key=len, reverse=True)
        if len(pieces) > 1 and {*pieces} != {piece for piece in splits if not piece.strip(pieces[0][0])}:
            raise DataError(
                f"tokens {pieces[0]!r} and {pieces[1]!r} have the same score, and either could be merged first",
                where=str(path),
                remedy="use the model's tokenizer.json",
            )
        # If all runs of a letter have one score, the first in the text is the longest.
        merges += [pair for piece in pieces for pair in splits[piece]]
    return merges


def scores_of(vocabulary: Collection[str], merges: Iterable[Sequence[str]]) -> dict[str, float] | None:
    """Return scores of a ``vocabulary``, without special tokens and bytes, that merge it as ``merges``; None for none.

    There are scores if everything is merged that together is a token, all ways to a token one after another.
    """
    if _unlike(vocabulary) is not None:
        return None
    groups: dict[str, set[tuple[str, str]]] = {}
    last = None
    for left, right in merges:
        piece = left + right
        if piece != last and piece in groups:
            return None
        groups.setdefault(piece, set()).add((left, right))
        last = piece
    known = set(vocabulary)
    if any(groups.get(piece, set()) != set(_splits(piece, known)) for piece in known):
        return None
    scores = {piece: -float(rank) for rank, piece in enumerate(groups)}
    return {piece: scores.get(piece, -float(len(groups))) for piece in vocabulary}


def check_bytes(vocabulary: Collection[str], path: Path) -> None:
    """Refuse a vocabulary that lacks tokens of bytes."""
    absent = sum(name not in vocabulary for name in BYTE_NAMES)
    if absent:
        raise DataError(
            f"{absent} of the 256 bytes are no tokens, so some text cannot be written",
            where=str(path),
            remedy="byte-level byte-pair encodings, and those that fall back to bytes, are supported",
        )


def with_space(encode: Callable[[Sequence[str]], list[list[int]]]) -> Callable[[Sequence[str]], list[list[int]]]:
    """Return ``encode`` for texts that get a space in front; an empty one stays empty."""
    return lambda texts: encode([f" {text}" if text else text for text in texts])


def _unlike(vocabulary: Collection[str]) -> str | None:
    """Reason why merges cannot give these tokens; None if they can."""
    longest = max(vocabulary, key=len, default="")
    if len(longest) > LONGEST:
        return f"token {longest[:40]!r}... has more than {LONGEST} characters"
    if sum(map(len, vocabulary)) > CHARACTERS:
        return f"its tokens have more than {CHARACTERS:,} characters"
    absent = {letter for piece in vocabulary for letter in piece}.difference(vocabulary)
    letter = min(absent, default=None)
    return None if letter is None else f"tokens hold {letter!r}, which is no token itself"


def _splits(piece: str, known: Collection[str]) -> list[tuple[str, str]]:
    """Pairs of tokens that together are ``piece``, those with a short left side first."""
    return [
        (piece[:size], piece[size:]) for size in range(1, len(piece)) if piece[:size] in known and piece[size:] in known
    ]


def _flat(rule: Any) -> list[Mapping[str, Any]]:
    """Rules of a section, with sequences flattened."""
    if not isinstance(rule, dict):
        return []
    parts = [one for value in rule.values() if isinstance(value, list) for one in value]
    return [rule, *(one for part in parts for one in _flat(part))] if rule.get("type") == "Sequence" else [rule]
