"""What the build of the documentation writes into its pages shows neither escapes nor roles."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent
MARKS = [
    name
    for page in sorted(ROOT.glob("docs/**/*.md"))
    for name in re.findall(r"^<!-- keys: (\S+) -->$", page.read_text(), re.M)
]


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("documentation_hooks", ROOT / "docs" / "hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_bars_are_escaped_in_texts_and_not_in_code(hooks: ModuleType) -> None:
    assert hooks._cell("a | b: `log(1 + |x|)` or c|d") == r"a \| b: `log(1 + |x|)` or c\|d"


@pytest.mark.parametrize("name", MARKS)
def test_tables_of_keys_have_four_cells_a_row_and_no_roles(hooks: ModuleType, name: str) -> None:
    table = hooks.on_page_markdown(f"<!-- keys: {name} -->")
    for row in table.splitlines():
        outside = re.sub(r"`[^`]*`", "", row)
        assert len(re.findall(r"(?<!\\)\|", outside)) == 5, row
        assert "\\|" not in "".join(re.findall(r"`[^`]*`", row)), "a backslash in code is shown"
        assert not re.search(r":[a-z]+:`", row), row


def test_settings_of_other_libraries_are_keys_here(hooks: ModuleType) -> None:
    """Each dotted key in the last column of the page's tables, in the recipes of both kinds."""
    page = (ROOT / "docs/migrating.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| ") and line.count("|") > 2]
    sections = "data|model|packing|parallel|tables|training|fault_tolerance"
    named = {key for row in rows for key in re.findall(rf"`((?:{sections})\.[a-z_.]+)`", row.split(" | ")[-1])}
    known = {"model.preset"}  # which a recipe gives up for the sizes that it names
    for key in named:
        section, _, last = key.rpartition(".")
        of_model = ["model.dcn", "model.hstu"] if section == "model" else []
        places = [section, section.removeprefix("data."), f"language.{section}", *of_model]
        configs = [hooks._section(one) for one in places if _is_section(hooks, one)]
        known |= {key} if any(last in config.model_fields for config in configs) else set()
    assert len(named) > 60
    assert named - known == set()


def _is_section(hooks: ModuleType, name: str) -> bool:
    try:
        hooks._section(name)
    except (KeyError, AssertionError):
        return False
    return True


def test_roles_are_left_out_of_pages(hooks: ModuleType) -> None:
    html = "<p>see :func:<code>~a.b.plan</code> and :class:<code>Run</code>; data:<code>x</code></p>"
    assert hooks.on_page_content(html) == "<p>see <code>plan</code> and <code>Run</code>; data:<code>x</code></p>"
