"""Checks of a tokenizer's rules before they are passed to the ``tokenizers`` library.

The library accepts rules that end the process, take hours for a short text, or expand it to gigabytes: a table of a
wrong type, an expression that tries every way to divide a run of letters, a replacement of each letter by a long text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from cordillera.data.tokenizers.pairs.sentencepiece import SPACE
from cordillera.errors import DataError

TOKENS = 1 << 22
"""Largest number of tokens of a vocabulary, about sixteen times the largest known one."""

SPARE_IDS = 1 << 16
"""Number of ids that may be unused, plus three for each token."""

EXPRESSION = 4096
"""Largest number of characters of an expression."""

LENGTH = 1000
"""Number of characters for which the ways are counted in which an expression can be tried."""

WAYS = 32 * LENGTH
"""Largest number of those ways, so that one part of any length may be tried again, and not one within another."""

GROWTH = 64
"""Largest number of characters into which replacements may turn one character."""

_RULES, _DEPTH = 32, 4
_NORMALIZERS = frozenset(("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Strip", "StripAccents", "ByteLevel"))
_SPLITTERS = frozenset(("ByteLevel", "Digits", "Punctuation", "UnicodeScripts"))
_KEEPS = frozenset(("(?=", "(?!", "(?<=", "(?<!", "(?>"))
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


@dataclass
class _Item:
    """A letter, a class or a group of an expression, at one place of a text of :data:`LENGTH` characters.

    Attributes:
        ways: Number of ways in which it can match.
        tried: Number of ways that may be tried until it matches or fails.
        all_tried: Number of ways that may be tried if all that comes after it fails.
        needed: Whether it can fail.
        branches: Whether it can match a text in several ways.
    """

    ways: int = 1
    tried: int = 1
    all_tried: int = 1
    needed: bool = True
    branches: bool = False


class _Group:
    """An open group of an expression.

    A part whose length varies is tried again, with another length, whenever a later part fails; after parts that
    cannot fail, it is not.

    Args:
        keeps: Whether it keeps its first match, as a look ahead does: what comes after it does not try another.
    """

    def __init__(self, keeps: bool = False) -> None:
        self.keeps = keeps
        self.item: _Item | None = None
        self._before = _Item()  # items before, in this alternative
        self._earlier = _Item(0, 0, 0)  # alternatives before

    def add(self, item: _Item) -> None:
        """Begin another item after that which was the last."""
        self._settle()
        self.item = item

    def repeat(self, quantifier: re.Match[str]) -> None:
        """Take the quantifier of the last item."""
        assert self.item is not None
        low, comma, high = quantifier.groups()
        if low is None:
            low, high = {"*": (0, ""), "+": (1, ""), "?": (0, 1)}[quantifier[0]]
        elif not comma:
            high = low
        most = LENGTH if high == "" else int(high) - int(low or 0)
        more = max(0, min(most, LENGTH))
        self.item.needed = int(low or 0) > 0
        self.item.ways += more
        self.item.all_tried += more
        self._earlier.branches |= most != 0

    def begin_alternative(self) -> None:
        """End an alternative, for another."""
        self._earlier, self._before = self._so_far(), _Item()
        self._earlier.branches = True

    def close(self) -> _Item:
        """Return the group as an item of that around it."""
        found = self._so_far()
        if self.keeps:  # each entry may scan the whole text
            found.ways, found.tried = 1, found.all_tried
        return found

    def _so_far(self) -> _Item:
        self._settle()
        one, other = self._earlier, self._before
        return _Item(
            one.ways + other.ways,
            one.tried + other.tried,
            one.all_tried + other.all_tried,
            branches=one.branches,
        )

    def _settle(self) -> None:
        """Count the last item among those before."""
        if (item := self.item) is None:
            return
        before, self.item = self._before, None
        again = max(before.all_tried, before.ways * item.tried) if item.needed else item.tried
        before.tried = max(before.tried, again)
        before.all_tried = max(before.all_tried, before.ways * item.all_tried)
        before.ways *= item.ways
        self._earlier.branches |= item.branches


def _problem(expression: str) -> str | None:
    """Reason why an expression could take unbounded time; None if it repeats only letters, classes and their groups."""
    groups = [_Group()]  # the open groups, and the whole expression
    within, place, quantified = 0, 0, ""  # depth within a class; first character of the item's quantifier
    while place < len(expression):
        if not within and groups[-1].item is not None and (found := _QUANTIFIER.match(expression, place)):
            place = found.end()
            if quantified:
                if quantified == "{" or found[0] not in ("?", "+"):
                    if found[0] == "?":
                        continue
                    return "repeats a repetition"
                continue
            if groups[-1].item.branches and found[0] != "?":
                return "repeats what can match in several ways"
            quantified = found[0][0]
            groups[-1].repeat(found)
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
            groups.append(_Group(keeps=text in _KEEPS))
            continue
        elif text == ")":
            if len(groups) == 1:
                return "closes a group that is not open"
            group = groups.pop()
            groups[-1].add(group.close())
            continue
        elif text == "|":
            groups[-1].begin_alternative()
            continue
        groups[-1].add(_Item())
    if len(groups) == 1 and groups[0].close().tried > WAYS:
        return f"could be tried in more than {WAYS:,} ways at each of {LENGTH:,} characters"
    return None
