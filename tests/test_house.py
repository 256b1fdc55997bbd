"""The package stays one that a stranger finds their way in: run by ``make check`` as well.

Imports have a contract of their own (``[tool.importlinter]`` in ``pyproject.toml``).
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "cordillera"
MOST_MODULES, MOST_LINES = 14, 600


def _types(tree: ast.Module) -> Iterator[str]:
    """Classes, and names in capitals and small letters that a module gives to other types."""
    yield from (node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in targets if isinstance(node, (ast.Assign, ast.AnnAssign)) else []:
            if isinstance(target, ast.Name) and target.id[:1].isupper() and not target.id.isupper():
                yield target.id


def types_defined_twice(package: Path) -> dict[str, list[str]]:
    """Type names with the files that define them, where these are several.

    Args:
        package: Folder of Python files.
    """
    found = defaultdict(list)
    for path in sorted(package.rglob("*.py")):
        for name in _types(ast.parse(path.read_text(encoding="utf-8"))):
            found[name].append(path.relative_to(package).as_posix())
    return {name: files for name, files in found.items() if len(files) > 1}


def test_a_type_name_has_one_meaning() -> None:
    assert types_defined_twice(PACKAGE) == {}


def test_a_second_meaning_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("class Step:\n    pass\n")
    (tmp_path / "b.py").write_text("from typing import NamedTuple\n\nLIMIT = 3\nStep = tuple[int, int]\n")
    assert types_defined_twice(tmp_path) == {"Step": ["a.py", "b.py"]}


@pytest.mark.parametrize("folder", sorted({path.parent for path in PACKAGE.rglob("*.py")}), ids=lambda path: path.name)
def test_a_folder_is_taken_in_at_a_glance(folder: Path) -> None:
    modules = [path for path in folder.glob("*.py") if path.name != "__init__.py"]
    assert len(modules) <= MOST_MODULES or folder.name == "cli", f"{len(modules)} modules in {folder}"


def test_a_file_is_read_in_one_sitting() -> None:
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in PACKAGE.rglob("*.py")}
    assert {str(path): count for path, count in lines.items() if count > MOST_LINES} == {}
