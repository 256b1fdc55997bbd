"""Files from outside: their content, or one error that names the file and the place."""

from __future__ import annotations

import hashlib
import json
import os
import random
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from cordillera.errors import CheckpointError, DataError, PlanError, printable
from cordillera.files import (
    TOML_DEPTH,
    at_home,
    check_writable,
    parse_json,
    parse_sealed,
    parse_toml,
    read_json_object,
    read_sealed,
    read_text,
    sealed_json,
    write,
)
from tests.fuzzing import CONTROLS, damaged, flips, survives


def test_a_byte_order_mark_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(b'\xef\xbb\xbf{"a": 1}')
    assert read_json_object(tmp_path / "a.json") == {"a": 1}


def test_invalid_utf8_is_reported_by_line_and_column(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_bytes('a = 1\nb = "é'.encode() + b'\xff"\n')
    with pytest.raises(DataError, match=r"a\.toml, line 2, column 7: is not UTF-8 text \(byte 0xff\)"):
        read_text(tmp_path / "a.toml")


def test_the_error_is_of_the_class_asked_for(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        read_json_object(tmp_path / "absent", error=CheckpointError)
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


SEALED = {"name": "é\u2028", "numbers": [1, 2.5e-7, -0.0, 10**20, None], "inner": {"sha256": "0" * 64}, "on": True}


def older(content: dict[str, object]) -> str:
    """The form that caches and checkpoints on the disks of users have."""
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return json.dumps({"sha256": digest, "content": content}, indent=1)


@pytest.mark.parametrize(
    "text", [sealed_json(SEALED), sealed_json(SEALED, line=True), older(SEALED)], ids=["file", "line", "older"]
)
@pytest.mark.parametrize("required", [True, False], ids=["required", "optional"])
def test_any_flipped_byte_and_any_cut_of_sealed_json_is_refused(
    tmp_path: Path, text: str, required: bool, fuzz_inputs: Callable[[int], int]
) -> None:
    content, path, rng = text.encode(), tmp_path / "a.json", random.Random(0)
    line = text.count("\n") == 1

    def read() -> dict[str, object]:
        return parse_sealed(read_text(path), str(path), line=line, required=required)

    path.write_bytes(content)
    assert read() == SEALED
    injured = [content[:cut] for cut in rng.sample(range(len(content)), 50)] + [content[:-1]]
    injured += [flips(content, rng) for _ in range(fuzz_inputs(200))]
    # each bit of the keys
    places = [at + place for key in (b'"seal":', b'"sha256":', b'"content":') if (at := content.find(key)) >= 0
              for place in range(len(key))]  # fmt: skip
    injured += [content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1 :] for at in places for bit in range(8)]
    for one in injured:
        path.write_bytes(one)
        with pytest.raises(DataError, match=r"a\.json"):
            pytest.fail(f"{one!r} gives {read()}")


def test_json_without_a_checksum_is_read_where_none_is_required(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    digests = {"tensors": "0" * 64, "state.json": "1" * 64}  # checksums of a checkpoint that has none of its own
    path.write_text(json.dumps(digests))
    assert read_sealed(path) == digests
    with pytest.raises(CheckpointError, match="holds no checksum\n  -> train again"):
        read_sealed(path, required=True, error=CheckpointError, remedy="train again")
    path.write_text(sealed_json(digests).replace('"1', '"2'))
    with pytest.raises(DataError, match="if you changed it on purpose, delete its 'seal'"):
        read_sealed(path)
    assert sealed_json(json.loads(sealed_json(digests))) == sealed_json(digests)


def test_sealed_json_of_another_schema_is_called_so_whatever_its_checksum(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for text in (sealed_json({"schema": 2}), '{"schema": 2}', '{"schema": 2, "seal": ""}'):
        path.write_text(text)
        with pytest.raises(DataError, match="is of version 2, this library reads 3"):
            read_sealed(path, required=True, schema=3)


def test_sealed_json_that_is_nested_deeply_is_refused() -> None:
    for depth in (300, 1000, 3000, 100_000):
        text = '{"a": ' + "[" * depth + "]" * depth + ', "seal": ""}'
        assert isinstance(survives(lambda text=text: parse_sealed(text, "here"), f"depth {depth}"), DataError)


def test_printable_text_holds_no_controls() -> None:
    text = "a\x1b[31mred\x07\x9b\u202e\ud800\nend"
    assert printable(text) == r"a\x1b[31mred\x07\x9b\u202e\ud800\nend"
    assert not CONTROLS & set(printable(text, lines=True))
    assert printable("café 山 👍") == "café 山 👍"


def test_errors_show_names_from_outside_without_steering_the_terminal() -> None:
    error = DataError("no column '\x1b[2J'", where="bad\nname.csv", remedy="\x07")
    assert str(error) == "bad\\nname.csv: no column '\\x1b[2J'\n  -> \\x07"


def test_writing_leaves_other_files_of_a_folder_alone(tmp_path: Path) -> None:
    (tmp_path / "page.html.part").write_text("mine")
    write({tmp_path / "page.html": "new", tmp_path / "sub" / "plan.json": "{}"})
    assert (tmp_path / "page.html.part").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["page.html", "page.html.part", "plan.json", "sub"]


def test_a_file_that_cannot_be_written_is_named_and_changes_no_other(tmp_path: Path) -> None:
    (tmp_path / "first").write_text("old")
    (tmp_path / "folder").mkdir()
    with pytest.raises(PlanError, match="folder: cannot be written"):
        write({tmp_path / "folder": "new", tmp_path / "last": "new"})
    with pytest.raises(PlanError, match="second: cannot be written"):
        write({tmp_path / "first": "new", tmp_path / "sub" / ("y" * 300 + " second"): "new"})
    assert (tmp_path / "first").read_text() == "old"
    assert not list(tmp_path.glob(".*"))


def test_what_is_no_file_keeps_its_place(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/null"), Path("/dev/stdout")):
        with pytest.raises(PlanError, match="cannot be written: it is no ordinary file\n  -> name another place"):
            check_writable(path)
    with pytest.raises(PlanError, match="pipe: cannot be written: it is no ordinary file"):
        write({tmp_path / "first": "new", tmp_path / "pipe": "new"})
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]
    assert (tmp_path / "pipe").is_fifo()


def test_a_path_in_the_home_folder_is_one_wherever_a_shell_left_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert at_home("~/runs/a") == at_home(Path("~/runs/a")) == Path("/home/me/runs/a")
    for name in ("runs/~", "a~", ".", "~\0"):
        assert at_home(name) == Path(name)


@pytest.mark.parametrize(("lost", "works"), [(0, True), (4, True), (5, False)])
def test_a_folder_that_another_process_removes_meanwhile_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: int, works: bool
) -> None:
    make, tries = tempfile.TemporaryFile, list[Path]()

    def removed(dir: Path) -> object:
        tries.append(dir)
        if len(tries) <= lost:
            dir.rmdir()  # as the process does that made it
        return make(dir=dir)

    monkeypatch.setattr("cordillera.files.tempfile.TemporaryFile", removed)
    if works:
        check_writable(tmp_path / "new" / "plan.html")
    else:
        with pytest.raises(PlanError, match="cannot be written: No such file or directory"):
            check_writable(tmp_path / "new" / "plan.html")
    assert len(tries) == min(lost + 1, 5)
    assert not (tmp_path / "new").exists()
