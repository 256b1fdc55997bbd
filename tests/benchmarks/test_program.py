"""The command line that benchmarks share gives parts what they take and writes one file for each."""

from __future__ import annotations

import enum
import json
from pathlib import Path
from typing import Any

import pytest
import typer
from _program import Program
from typer.testing import CliRunner


class Part(str, enum.Enum):
    """Parts of the benchmark."""

    plain = "plain"
    long = "long"
    missing = "missing"


def _plain(console: Any, quick: bool) -> dict[str, Any]:
    return {"figure": 1 if quick else 2}


def _long(console: Any, folder: Path, quick: bool, pieces: Any) -> dict[str, Any]:
    found = len(pieces)
    pieces.add({"piece": found}, found)
    return {"found": found, "folder": folder.is_dir()}


def _missing(console: Any, quick: bool) -> dict[str, Any]:
    raise LookupError("the peer is not installed")


PARTS = {Part.plain: _plain, Part.long: _long, Part.missing: _missing}


def _app(settings: dict[str, Any]) -> typer.Typer:
    app = typer.Typer(add_completion=False)
    app.command()(Program("some", PARTS, "Measure something.", **settings).command())
    return app


def _run(folder: Path, *words: str, **settings: Any) -> str:
    done = CliRunner().invoke(_app(settings), [*words, "--results", str(folder)], catch_exceptions=False, color=False)
    assert done.exit_code == 0, done.output
    return done.output


def _result(folder: Path, part: str) -> Any:
    return json.loads((folder / f"some-{part}.json").read_text())


def test_parts_are_measured_and_what_cannot_be_is_left_out(tmp_path: Path) -> None:
    output = _run(tmp_path, "--quick", excused=(LookupError,), prepare=lambda: {"condition": "kept"})
    assert "missing: left out, the peer is not installed" in output
    plain, long = _result(tmp_path, "plain"), _result(tmp_path, "long")
    assert (plain["figure"], plain["quick"], plain["condition"]) == (1, True, "kept")
    assert (long["found"], long["folder"]) == (0, True)
    assert not (tmp_path / "some-missing.json").exists()


def test_a_part_is_chosen_and_a_reason_leaves_it_out(tmp_path: Path) -> None:
    _run(tmp_path, "--quick", "--part", "plain")
    assert [path.name for path in tmp_path.iterdir()] == ["some-plain.json"]
    output = _run(tmp_path / "other", "--part", "plain", left_out=lambda part: f"{part.value} needs a file")
    assert "plain: left out, plain needs a file" in output
    assert not (tmp_path / "other").exists()


def test_finished_pieces_stay_until_they_are_forgotten(tmp_path: Path) -> None:
    words = ("--quick", "--part", "long")
    assert "continuing" not in _run(tmp_path, *words, fresh=True)
    assert "long: continuing from 1 finished pieces" in _run(tmp_path, *words, fresh=True)
    assert _result(tmp_path, "long")["found"] == 1
    _run(tmp_path, *words, "--fresh", fresh=True)
    assert _result(tmp_path, "long")["found"] == 0


def test_all_measures_more_than_the_default(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"short": (Part.plain,), "all_help": "Every part.", "excused": (LookupError,)}
    _run(tmp_path, "--quick", **settings)
    assert not (tmp_path / "some-long.json").exists()
    _run(tmp_path, "--quick", "--all", **settings)
    assert (tmp_path / "some-long.json").exists()


@pytest.mark.parametrize(("settings", "options"), [({}, set()), ({"threads": 2, "fresh": True}, {"threads", "fresh"})])
def test_only_options_that_a_benchmark_has_are_offered(settings: dict[str, Any], options: set[str]) -> None:
    command = typer.main.get_command(_app(settings))
    assert {one.name for one in command.params} == {"part", "quick", "results"} | options
