"""Text files as rows, against a reader of one line at a time: exactly the rows of the file, or one clear error."""

from __future__ import annotations

import csv
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from cordillera.data.ranking.logs import delimited
from cordillera.data.ranking.logs.delimited import DelimitedFile
from cordillera.errors import DataError
from tests.fuzzing import damaged, survives

WORDS = [
    b'"',
    b'""',
    b",",
    b"\t",
    b"\n",
    b"\r\n",
    b"\r",
    b"\0",
    b"\xff",
    b'","',
    b'"\n"',
    b"\n\n",
    b"nan",
    b"1e39",
    b"\xef\xbb\xbf",
]


def reference(content: bytes, separator: str, quoted: bool, names: list[str] | None) -> list[list[str]] | None:
    """Header and rows by Python's own reader, a line at a time; None if the file is not well formed."""
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError:
        return None
    text = text.removeprefix("\ufeff")
    lines = [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]
    if "\0" in text or any("\r" in line for line in lines):
        return None
    if names is None and not lines[0]:
        return None
    rows = [] if names is None else [names]
    for line in lines:
        if not line:
            continue
        try:
            [row] = csv.reader(
                [line],
                strict=True,
                delimiter=separator,
                quoting=csv.QUOTE_MINIMAL if quoted else csv.QUOTE_NONE,
                quotechar='"' if quoted else None,
            )
        except (csv.Error, ValueError):
            return None
        rows.append(row)
    if any(len(row) != len(rows[0]) for row in rows) or (len(rows[0]) == 1 and "" in lines):
        return None
    rows[0] = [name or f"unnamed_{place}" for place, name in enumerate(rows[0])]
    return rows if len(set(rows[0])) == len(rows[0]) else None


def read(path: Path, separator: str, quoted: bool, names: list[str] | None) -> list[list[str]]:
    file = DelimitedFile(path, separator, quoted=quoted, names=names)
    rows = [file.names]
    for frame, _ in file.frames():
        rows += [["" if value is None else value for value in row] for row in frame.rows()]
    return rows


def sample(rng: random.Random, separator: str, quoted: bool, rows: int = 12) -> bytes:
    words = ["a", "", "12", "0.5", "é", "x y", *(['b"c', f"p{separator}q", 'r"', '"'] if quoted else ['b"c', '"'])]
    ends = rng.choice(["\n", "\r\n"])
    lines = [separator.join(["id", "label", "last one"])]
    for _ in range(rows):
        fields = [rng.choice(words) for _ in range(3)]
        if quoted:
            style = rng.random()
            fields = [
                '"' + field.replace('"', '""') + '"' if style < 0.3 or separator in field or '"' in field else field
                for field in fields
            ]
        lines.append(separator.join(fields))
        if rng.random() < 0.05:
            lines.append("")
    return (ends.join(lines) + (ends if rng.random() < 0.8 else "")).encode()


@pytest.mark.cases(2)
@pytest.mark.parametrize("separator", [",", "\t"])
@pytest.mark.parametrize("quoted", [True, False])
def test_a_damaged_file_gives_exactly_its_rows_or_one_error(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fuzz_inputs: Callable[[int], int],
    separator: str,
    quoted: bool,
) -> None:
    rng = random.Random(f"{separator}{quoted}")
    path = tmp_path / "log.csv"
    refused = wrong = 0
    for number in range(fuzz_inputs(250)):
        block = rng.choice((64, 256, 1 << 20))
        monkeypatch.setattr(delimited, "BLOCK_BYTES", block)
        monkeypatch.setattr(delimited, "LINE_BYTES", block * rng.choice((1, 4)))
        content = sample(rng, separator, quoted)
        content = damaged(content, rng, WORDS) if rng.random() < 0.95 else content
        names = ["a", "b", "c"] if rng.random() < 0.2 else None
        path.write_bytes(content)
        expected = reference(content, separator, quoted, names)
        found = survives(lambda: read(path, separator, quoted, names), f"input {number}: {content!r}")  # noqa: B023
        if isinstance(found, DataError):
            refused += 1
            # A line longer than allowed, and a file without any line, are the only other reasons.
            wrong += expected is not None and "longer than" not in str(found) and "holds no rows" not in str(found)
            assert not wrong, (content, found)
        else:
            assert found == expected, content
    assert refused > number // 10


@pytest.mark.parametrize("separator", list("\\]^-[|;"))
def test_any_mark_divides_quoted_fields(tmp_path: Path, separator: str) -> None:
    path = tmp_path / "log.csv"
    path.write_text(f'"a"{separator}b\n"x{separator}y"{separator}1\n')
    assert read(path, separator, True, None) == [["a", "b"], [f"x{separator}y", "1"]]


@pytest.mark.parametrize("piece", [1, 2, 3, 5, 7, 1000])
def test_quotation_marks_are_followed_over_pieces(piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delimited, "_PIECE_BYTES", piece)
    path = tmp_path / "log.csv"
    path.write_text("a,b\n1,2\n")
    file = DelimitedFile(path, ",")
    for text, is_well in (
        ('"x,y",1\n', True),
        ('1,"x ""y"" z"\n', True),
        ('"",""\n', True),
        ('1,"x\n', False),
        ('1,x"y"\n', False),
        ('"x"y,1\n', False),
    ):
        content = np.frombuffer(text.encode(), dtype=np.uint8)
        assert file._well_quoted(content) is is_well, (text, piece)
