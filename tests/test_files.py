"""Files from outside: their content, or one error that names the file and the place."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from cordillera.errors import CheckpointError, DataError, printable
from cordillera.files import TOML_DEPTH, parse_json, parse_toml, read_json, read_json_object, read_text, read_toml
from tests.fuzzing import CONTROLS, damaged, survives


def test_a_byte_order_mark_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(b'\xef\xbb\xbf{"a": 1}')
    assert read_json(tmp_path / "a.json") == {"a": 1}


def test_invalid_utf8_is_reported_by_line_and_column(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_bytes('a = 1\nb = "é'.encode() + b'\xff"\n')
    with pytest.raises(DataError, match=r"a\.toml, line 2, column 7: is not UTF-8 text \(byte 0xff\)"):
        read_toml(tmp_path / "a.toml")


def test_the_error_is_of_the_class_asked_for(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        read_json(tmp_path / "absent", error=CheckpointError)
    (tmp_path / "list").write_text("[1]")
    with pytest.raises(CheckpointError, match="is not a JSON object"):
        read_json_object(tmp_path / "list", error=CheckpointError)


def test_pipes_folders_and_large_files_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="not an ordinary file"):
        read_text(tmp_path / "pipe")
    with pytest.raises(DataError, match="not an ordinary file"):
        read_text(tmp_path)
    (tmp_path / "large").write_text("12345")
    with pytest.raises(DataError, match="larger than 4 bytes"):
        read_text(tmp_path / "large", limit=4)


@pytest.mark.parametrize(
    "text", ["NaN", "[Infinity]", "-Infinity", "1e999", "1" * 5000, "[" * 100_000, "{", "", "\x00"]
)
def test_json_that_is_no_plain_value_is_refused(text: str) -> None:
    with pytest.raises(DataError, match="JSON"):
        parse_json(text, "here")


@pytest.mark.parametrize(
    "text",
    [
        ".".join("a" * 100_000) + " = 1",
        "a = " + "[" * 50_000,
        "a = 1" + "1" * 5000,
        "a = {" * 99,
        "[a." + "b." * 99 + "c]",
    ],
)
def test_toml_that_would_cost_much_is_refused(text: str) -> None:
    error = survives(lambda: parse_toml(text, "here"), text[:40])
    assert isinstance(error, DataError)


def test_dots_and_brackets_within_strings_and_comments_are_no_depth() -> None:
    dots = ".".join("a" * 99)
    text = f'a = "{dots} {"[" * 99}" # {dots}\nb = """\n{dots}"""\nc = \'{dots}\'\n' + ".".join(
        "a" * TOML_DEPTH
    ).replace("a", "d")
    assert parse_toml(f"{text} = 1", "here")["c"] == dots


def test_damaged_files_give_a_value_or_one_error() -> None:
    rng = random.Random(0)
    valid = b'name = "a"\n[model]\nlayers = [1, 2.5]\nwhen = 2020-01-01\n[[part]]\n"q.r".s = {t = true}\n'
    for number in range(2000):
        text = damaged(valid, rng, [b"[", b"{", b'"""', b".", b"9" * 5000, b"nan", b"\xff"]).decode("utf-8", "replace")
        survives(lambda text=text: parse_toml(text, "here"), f"input {number}")


def test_printable_text_holds_no_controls() -> None:
    text = "a\x1b[31mred\x07\x9b\u202e\ud800\nend"
    assert printable(text) == r"a\x1b[31mred\x07\x9b\u202e\ud800\nend"
    assert not CONTROLS & set(printable(text, lines=True))
    assert printable("café 山 👍") == "café 山 👍"


def test_errors_show_names_from_outside_without_steering_the_terminal() -> None:
    error = DataError("no column '\x1b[2J'", where="bad\nname.csv", remedy="\x07")
    assert str(error) == "bad\\nname.csv: no column '\\x1b[2J'\n  -> \\x07"
