"""Checks of a tokenizer's rules before they are passed to the ``tokenizers`` library.

The library accepts rules that end the process, take hours for a short text, or expand it to gigabytes: a table of a
wrong type, an expression that tries every way to divide a run of letters, a replacement of each letter by a long text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from cordillera.data.tokenizers.pairs.sentencepiece import SPACE
from cordillera.errors import DataError

TOKENS = 1 << 22
"""Largest number of tokens of a vocabulary, about sixteen times that of the largest known vocabularies."""

SPARE_IDS = 1 << 16
"""Number of ids that may be unused, plus three for each token."""

EXPRESSION = 4096
"""Largest number of characters of an expression."""

REPEATS = 3
"""Largest number of parts of variable length in an alternative, the power of a length by which time may grow."""

GROWTH = 64
"""Largest number of characters into which replacements may turn one character."""

_RULES, _DEPTH = 32, 4
_NORMALIZERS = frozenset(("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Strip", "StripAccents", "ByteLevel"))
_SPLITTERS = frozenset(("ByteLevel", "Digits", "Punctuation", "UnicodeScripts"))
_QUANTIFIER = re.compile(r"[*+?]|\{(\d*)(,?)(\d*)\}")
_CLASS_OR_LETTER = re.compile(r"\\(?:[pPxu]\{[^}]*\}|.)|\(\?(?:[a-z-]*[:)]|[=!>]|<[=!]|#[^)]*\))|.", re.DOTALL)


def check_ids(path: object, names: Iterable[tuple[str, Any]]) -> None:
    """Refuse ids that are not whole numbers or too large for a list of all tokens; ``names`` pairs tokens with ids."""
    count, highest, last = 0, -1, ""
    for name, token in names:
        if not isinstance(token, int) or isinstance(token, bool) or token < 0:
            raise DataError(f"token {name!r} has the id {str(token)[:40]!r}, not a whole number", where=str(path))
        count += 1
        if token > highest:
            highest, last = token, name
    if count > TOKENS:
        raise DataError(f"it holds {count:,} tokens; at most {TOKENS:,} are read", where=str(path))
    if highest >= 4 * count + SPARE_IDS:
        raise DataError(
            f"token {last!r} has the id {highest:,}, and there are {count:,} tokens: its table would be mostly empty",
            where=str(path),
            remedy="see whether the file is damaged",
        )


def check_rules(path: object, normalizer: Any, pre_tokenizer: Any, has_pieces: bool = False) -> None:
    """Refuse rules of ``tokenizer.json`` of unknown kinds, or that could take unbounded time or memory for a text.

    With ``has_pieces`` the rules are for tokens in the spelling of SentencePiece.
    """
    growth = 1
    for rule in _flat(normalizer, "normalizers", f"{path}, normalizer"):
        kind, where = str(rule.get("type")), f"{path}, normalizer"
        if kind == "Prepend":
            growth += len(_text(rule, "prepend", where))
            if has_pieces and rule["prepend"] not in (" ", SPACE):
                raise DataError(f"puts {rule['prepend'][:40]!r} before a text, not a space", where=where)
        elif kind == "Replace":
            growth *= _replacement(rule, where)
        elif kind not in _NORMALIZERS:
            raise _unknown(kind, where, {*_NORMALIZERS, "Prepend", "Replace"})
        if growth > GROWTH:
            raise DataError(f"could make more than {GROWTH} characters of one", where=where)
    for rule in _flat(pre_tokenizer, "pretokenizers", f"{path}, pre_tokenizer"):
        kind, where = str(rule.get("type")), f"{path}, pre_tokenizer"
        if kind == "Split":
            _pattern(rule, where)
        elif kind == "Metaspace" and has_pieces:
            _check_spaces(rule, where)
        elif kind not in _SPLITTERS:
            raise _unknown(kind, where, {*_SPLITTERS, "Split", *(["Metaspace"] if has_pieces else [])})


def _check_spaces(rule: Mapping[str, Any], where: str) -> None:
    if rule.get("replacement") != SPACE or rule.get("prepend_scheme", "always") not in ("always", "first", "never"):
        raise DataError(
            f"Metaspace writes {str(rule.get('replacement'))[:40]!r} for a space by the scheme "
            f"{str(rule.get('prepend_scheme'))[:40]!r}",
            where=where,
            remedy=f"known are {SPACE!r} and the schemes always, first and never",
        )


def _unknown(kind: str, where: str, known: Iterable[str]) -> DataError:
    return DataError(
        f"the rule {kind[:40]!r} is not supported: the text could not be given back",
        where=where,
        remedy=f"known are {', '.join(sorted(known))}",
    )


def _flat(rule: Any, key: str, where: str, depth: int = 0) -> list[Mapping[str, Any]]:
    """Rules of a section in order, with nested sequences flattened."""
    if rule is None and not depth:
        return []
    if not isinstance(rule, dict):
        raise DataError("a rule is not an object", where=where)
    if rule.get("type") != "Sequence":
        return [rule]
    parts = rule.get(key)
    if not isinstance(parts, list) or depth == _DEPTH or len(parts) > _RULES:
        raise DataError(f"a sequence needs up to {_RULES} rules under {key!r}, {_DEPTH} levels deep", where=where)
    found = [one for part in parts for one in _flat(part, key, where, depth + 1)]
    if len(found) > _RULES:
        raise DataError(f"holds more than {_RULES} rules", where=where)
    return found


def _text(rule: Mapping[str, Any], key: str, where: str) -> str:
    found = rule.get(key)
    if not isinstance(found, str):
        raise DataError(f"{key!r} is not text", where=where)
    return found


def _pattern(rule: Mapping[str, Any], where: str) -> tuple[str, bool]:
    """Pattern that a rule looks for, and whether it is a regular expression."""
    pattern = rule.get("pattern")
    if isinstance(pattern, dict) and len(pattern) == 1:
        ((kind, text),) = pattern.items()
        if kind in ("String", "Regex") and isinstance(text, str) and 0 < len(text) <= EXPRESSION:
            if kind == "Regex" and (problem := _problem(text)):
                raise DataError(
                    f"the expression {text[:80]!r} {problem}: its time could explode",
                    where=where,
                    remedy="use files whose expressions repeat plain letters and classes only",
                )
            return text, kind == "Regex"
    raise DataError(f"a pattern is not a String or Regex of 1 to {EXPRESSION:,} characters", where=where)


def _replacement(rule: Mapping[str, Any], where: str) -> int:
    text, expression = _pattern(rule, where)
    size = len(_text(rule, "content", where))
    return max(1, size + 1 if expression else -(-size // len(text)))


def _problem(expression: str) -> str | None:
    """Reason why an expression could take unbounded time; None if it repeats only letters, classes and their groups."""
    branching = [False]  # for every open group: whether it can match a text in several ways
    repeats = [0]  # for every open group: number of parts of any length in its current alternative
    within, item = 0, None  # depth within a class; whether the last item branches, None without an item
    place, quantified = 0, ""
    while place < len(expression):
        if not within and item is not None and (found := _QUANTIFIER.match(expression, place)):
            place = found.end()
            fixed = found[1] is not None and not found[2] and found[1] != ""
            if quantified:
                if quantified == "{" or found[0] not in ("?", "+"):
                    if found[0] == "?":
                        continue
                    return "repeats a repetition"
                continue
            if item and found[0] != "?":
                return "repeats what can match in several ways"
            quantified = found[0][0]
            branching[-1] |= not fixed
            repeats[-1] += not fixed and found[0] != "?"
            if repeats[-1] > REPEATS:
                return f"has more than {REPEATS} parts of any length one after another"
            continue
        letter = _CLASS_OR_LETTER.match(expression, place)
        assert letter is not None
        text = letter[0]
        place, quantified = letter.end(), ""
        if text[0] == "\\" and len(text) > 1 and not within and text[1] in "123456789kgG":
            return "refers to what it matched before"
        if text.startswith("(?") and within:
            place = letter.start() + 1
            continue
        if text == "[":
            within += 1
        elif text == "]" and within:
            within -= 1
        elif within:
            continue
        elif text.startswith("(") and not text.endswith(")"):
            if text == "(" and expression[place : place + 1] in ("?", "*"):
                return "has a group of an unknown kind"
            branching.append(False)
            repeats.append(0)
            item = None
            continue
        elif text == ")":
            if len(branching) == 1:
                return "closes a group that is not open"
            item = branching.pop()
            branching[-1] |= item
            repeats[-2:] = [repeats[-2] + repeats[-1]]
            continue
        elif text == "|":
            branching[-1], repeats[-1], item = True, 0, None
            continue
        item = False
    return None
