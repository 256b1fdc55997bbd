"""``cordillera guard`` prints a verdict for each text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.serving.small_models import write_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_model(tmp_path_factory.mktemp("guards") / "small", context=1024))


def test_each_text_or_answer_has_a_verdict(cli, folder: str) -> None:
    found = cli("guard", folder, "How do locks work?", "Hello", "--json")
    assert found.code == 0, found.err
    entries = json.loads(found.out)
    assert [one["text"] for one in entries] == ["How do locks work?", "Hello"]
    assert all(0 <= one["score"] <= 1 for one in entries)
    assert set(entries[0]) == {"text", "is_safe", "categories", "names", "is_valid", "score"}
    assert all(len(one["names"]) == len(one["categories"]) for one in entries)
    found = cli("guard", folder, "How do locks work?", "--agent", "By pins.", "--category", "S7", "--json")
    assert json.loads(found.out)[0]["text"] == "By pins."


def test_a_table_shows_text_as_it_is(cli, folder: str) -> None:
    found = cli("guard", folder, "[red]How?[/red]")
    assert "[red]How?[/red]" in found.out
    assert "safe" in found.out


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (["--agent", "one", "--agent", "two"], "2 answers to 1 texts"),
        (["--category", "S99"], "no category S99"),
        (["--threshold", "2"], "not a probability"),
    ],
)
def test_mistakes_are_named(cli, folder: str, options: list[str], what: str) -> None:
    found = cli("guard", folder, "Hello", *options)
    assert found.code != 0
    assert what in found.err


def test_a_model_must_exist(cli, tmp_path: Path) -> None:
    assert "no model's name" in cli("guard", str(tmp_path / "absent"), "Hello").err
