"""The package stays one that a stranger finds their way in: run by ``make check``.

Imports have a contract of their own (``[tool.importlinter]`` in ``pyproject.toml``).
"""

from __future__ import annotations

import ast
import functools
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "cordillera"
MOST_MODULES, MOST_LINES, MOST_FUNCTION_LINES = 14, 600, 60


def _types(nodes: list[ast.AST]) -> Iterator[str]:
    """Classes, and names in capitals and small letters that a module gives to other types."""
    yield from (node.name for node in nodes if isinstance(node, ast.ClassDef))
    for node in nodes[0].body if isinstance(nodes[0], ast.Module) else ():
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in targets if isinstance(node, (ast.Assign, ast.AnnAssign)) else []:
            if isinstance(target, ast.Name) and target.id[:1].isupper() and not target.id.isupper():
                yield target.id


def _long_functions(nodes: list[ast.AST], lines: list[str]) -> Iterator[tuple[str, int]]:
    for node in nodes:
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        count = (node.end_lineno or node.lineno) - node.lineno + 1
        if ast.get_docstring(node) is not None:
            count -= (node.body[0].end_lineno or 0) - node.body[0].lineno + 1
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        above = lines[first - 2].strip() if first > 1 else ""
        if count > MOST_FUNCTION_LINES and not above.startswith("#"):
            yield f"{node.lineno} {node.name}", count


@functools.cache
def looked_through(package: Path) -> tuple[dict[str, list[str]], dict[str, int]]:
    """Type names with the files that define them, where these are several, and functions that are too long.

    The latter with their lines, docstring not counted: more than 60 that no comment directly above explains.

    Args:
        package: Folder of Python files.
    """
    types, long = defaultdict(list), {}
    for path in sorted(package.rglob("*.py")):
        file, text = path.relative_to(package).as_posix(), path.read_text(encoding="utf-8")
        nodes = list(ast.walk(ast.parse(text)))
        for name in _types(nodes):
            types[name].append(file)
        long |= {f"{file}:{name}": count for name, count in _long_functions(nodes, text.splitlines())}
    return {name: files for name, files in types.items() if len(files) > 1}, long


def test_a_type_name_has_one_meaning() -> None:
    assert looked_through(PACKAGE)[0] == {}


def test_a_second_meaning_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("class Step:\n    pass\n")
    (tmp_path / "b.py").write_text("from typing import NamedTuple\n\nLIMIT = 3\nStep = tuple[int, int]\n")
    assert looked_through(tmp_path)[0] == {"Step": ["a.py", "b.py"]}


@pytest.mark.parametrize("folder", sorted({path.parent for path in PACKAGE.rglob("*.py")}), ids=lambda path: path.name)
def test_a_folder_is_taken_in_at_a_glance(folder: Path) -> None:
    modules = [path for path in folder.glob("*.py") if path.name != "__init__.py"]
    assert len(modules) <= MOST_MODULES or folder.name == "cli", f"{len(modules)} modules in {folder}"


def test_a_file_is_read_in_one_sitting() -> None:
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in PACKAGE.rglob("*.py")}
    assert {str(path): count for path, count in lines.items() if count > MOST_LINES} == {}


def test_a_function_is_understood_at_once_or_says_why_it_is_one_piece() -> None:
    assert looked_through(PACKAGE)[1] == {}


def test_a_long_function_is_found(tmp_path: Path) -> None:
    body = "    pass\n" * 59
    (tmp_path / "a.py").write_text(
        f'def short():\n    """One."""\n{body}\n\n'
        f"# It is one table.\n@cache\ndef explained():\n    pass\n{body}\n\n"
        f"# Far above.\n\nclass One:\n    async def long(self):\n        pass\n{body.replace('    ', ' ' * 8)}"
    )
    assert looked_through(tmp_path)[1] == {"a.py:132 long": 61}
