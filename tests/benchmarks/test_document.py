"""Figures in the documentation are written from result files, and a figure that differs is found."""

from __future__ import annotations

import json
from pathlib import Path

import _document
import _figures
import pytest
from _document import Picture, rewrite

FIGURES = {"share": lambda: "12 %", "rows": lambda: _figures.table(["", "ms"], [["a", "1.5"], ["b", ""]])}
PAGE = """# A page

The share is <!-- figure: share -->12 %<!-- /figure --> of all.

<!-- figures: rows -->

| | ms |
| --- | --- |
| a | 1.5 |
| b |  |

<!-- /figures -->

The end.
"""


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with one page and one picture."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text(PAGE)
    (tmp_path / "CONTRIBUTING.md").write_text("No figures.\n")

    def draw(path: Path) -> None:
        path.write_text("<svg/>\n")

    picture = Picture("docs/a.svg", "a", lambda: "0123", draw)
    for name, value in (("ROOT", tmp_path), ("FIGURES", FIGURES), ("PICTURES", (picture,))):
        monkeypatch.setattr(_document, name, value)
    return tmp_path


def test_a_page_that_shows_its_figures_stays_as_it_is() -> None:
    assert rewrite(PAGE, FIGURES) == (PAGE, [])


def test_a_changed_figure_is_found_with_its_line_and_rewritten() -> None:
    text, problems = rewrite(PAGE.replace("12 %", "11 %").replace("1.5", "1.4"), FIGURES)
    assert text == PAGE
    assert [(one.line, one.marker, one.differs) for one in problems] == [
        (3, "<!-- figure: share -->", True),
        (5, "<!-- figures: rows -->", True),
    ]
    assert problems[0].reason == "is '11 %', but the result file says '12 %'"
    assert "'| a | 1.4 |'" in problems[1].reason


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("Of <!-- figure: other -->1<!-- /figure -->.", "no figure of this name"),
        ("<!-- figure: share -->1<!-- /figure --> of all.", "begin a line"),
        ("- <!-- figure: share -->1<!-- /figure --> of all.", "begin a line"),
        ("Of <!-- figure: share -->1<!-- figure: rows -->2<!-- /figure -->.", "another marker"),
        ("Of <!-- figure: share -->1.", "not one of a pair"),
        ("Of 1<!-- /figure -->.", "not one of a pair"),
        ("<!-- figures: share -->1<!-- /figures -->", "stand alone"),
        ("Of <!-- figures: rows -->\n\n1\n\n<!-- /figures -->", "stand alone"),
        ("<!-- figures: rows -->\n\n1\n\n<!-- /figures --> more", "stand alone"),
    ],
)
def test_a_marker_that_cannot_be_filled_is_refused_and_left(text: str, reason: str) -> None:
    page = f"First.\n\n{text}\n"
    written, problems = rewrite(page, FIGURES)
    assert written == page
    assert [(one.line, one.differs) for one in problems] == [(3, False)]
    assert reason in problems[0].reason


def test_a_check_changes_nothing_and_rewriting_satisfies_it(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = root / "README.md"
    page.write_text(PAGE.replace("12 %", "11 %"))
    assert _document.main(["--check"]) == 1
    assert "README.md:3: <!-- figure: share -->" in capsys.readouterr().out
    assert "11 %" in page.read_text()
    assert not (root / "docs/a.svg").exists()
    assert _document.main([]) == 0
    assert page.read_text() == PAGE
    assert (root / "docs/a.svg").read_text() == "<svg/>\n<!-- figures: a 0123 -->\n"
    assert _document.main(["--check"]) == 0


def test_a_figure_that_no_page_shows_is_found(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "README.md").write_text("The share is <!-- figure: share -->12 %<!-- /figure -->.\n")
    assert _document.main([]) == 1
    assert "rows is a figure that no page shows" in capsys.readouterr().out


def test_figures_are_not_of_quick_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_figures, "RESULTS", tmp_path)
    (tmp_path / "a-quick.json").write_text(json.dumps({"quick": True}))
    with pytest.raises(ValueError, match="--quick"):
        _figures.results("a-quick")
