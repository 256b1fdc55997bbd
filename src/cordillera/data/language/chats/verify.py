"""Verification of answers to problems."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_DIGITS = 1_000


def is_right(text: str, answer: str) -> bool:
    """Return whether a text gives the expected answer.

    If the expected answer is a number, the last number of the text must be equal to it; commas between digits do not
    count. Any other answer must be the whole text, apart from case, blanks around it and a full stop at the end.
    """
    expected = _number(answer.strip())
    if expected is None:
        return _plain(text) == _plain(answer)
    found = _NUMBER.findall(text[-_DIGITS:])
    return bool(found) and _number(found[-1]) == expected


def _number(text: str) -> Decimal | None:
    if not _NUMBER.fullmatch(text):
        return None
    try:
        return Decimal(text.replace(",", ""))
    except InvalidOperation:
        return None


def _plain(text: str) -> str:
    return text.strip().removesuffix(".").strip().casefold()
