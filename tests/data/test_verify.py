"""Which texts give the right answer to a problem."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cordillera.data.language.chats.verify import is_right


@pytest.mark.parametrize(
    ("text", "answer", "right"),
    [
        ("7", "7", True),
        ("8", "7", False),
        ("It is 7.", "7", True),
        ("7 is the answer", "7", True),
        ("3 + 4 = 7", "7", True),
        ("7, or 8", "7", False),  # the last number counts
        ("8, or 7", "7", True),
        ("-7", "7", False),
        ("-7", "-7", True),
        ("It is -7.", "-7", True),
        ("7", "-7", False),
        ("1,234", "1234", True),
        ("1234", "1,234", True),
        ("1,234.50", "1234.5", True),
        ("12345", "1,234", False),
        ("7.0", "7", True),
        ("7.01", "7", False),
        ("007", "7", True),
        ("0", "-0", True),
        ("17", "7", False),
        ("77", "7", False),
        ("it costs 7, as said", "7", True),
        ("$7", "7", True),
        ("7%", "7", True),
        ("", "7", False),
        ("seven", "7", False),
        ("7", " 7\n", True),
        ("1" * 2000, "1" * 2000, False),  # only the end of a text is read
        ("Paris", "Paris", True),
        ("paris.", "Paris", True),
        (" Paris \n", "paris.", True),
        ("It is Paris", "Paris", False),
        ("Paris, France", "Paris", False),
        ("", "Paris", False),
        ("Paris..", "Paris", False),
        ("STRASSE", "straße", True),
        ("x = 7", "x = 7", True),
        ("x = 8", "x = 7", False),
        ("7", "seven", False),
        ("7 km", "7 km", True),
        ("7", "7 km", False),
        ("1/2", "1/2", True),
    ],
)
def test_an_answer_is_the_last_number_or_the_whole_text(text: str, answer: str, right: bool) -> None:
    assert is_right(text, answer) is right


@given(
    value=st.decimals(-(10**12), 10**12, allow_nan=False, allow_infinity=False, places=3),
    other=st.decimals(-(10**12), 10**12, allow_nan=False, allow_infinity=False, places=3),
    before=st.sampled_from(["", "It is ", "12 + 3.5 = ", "not 5 but "]),
    after=st.sampled_from(["", ".", " km.", "!\n"]),
)
@settings(max_examples=60)
def test_numbers_are_compared_by_their_value(value: Decimal, other: Decimal, before: str, after: str) -> None:
    assert is_right(f"{before}{value:,}{after}", f"{value:f}")
    assert is_right(f"{before}{value:f}{after}", f"{value.normalize():f}")
    assert is_right(f"{before}{other:f}{after}", f"{value:f}") == (value == other)


@given(text=st.text(max_size=40), answer=st.text(max_size=10))
@settings(max_examples=100)
def test_any_text_is_right_or_wrong(text: str, answer: str) -> None:
    assert is_right(text, answer) in (True, False)
    assert is_right(answer, answer)
