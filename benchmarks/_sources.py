"""The code behind a figure, and whether it has changed: ``cordillera bench --stale``.

A figure depends on the definitions (functions, classes, constants) that its part of a benchmark names, directly or
indirectly: in the benchmark, in helpers beside it and in the package, except modules that only read recipes, place
files, print or draw. Definitions are compared by name with those of the commit that the result file names, without
comments, docstrings, layout, imports and annotations of arguments. Only computing code counts, and a definition that
was moved to another module is unchanged.
"""

from __future__ import annotations

import ast
import hashlib
import io
import json
import re
import subprocess
import tarfile
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from _renames import RENAMED

BENCHMARKS = Path(__file__).resolve().parent
CHECKOUT = BENCHMARKS.parent

# Modules that compute nothing, by the beginning or the end of their names; their imports do not count either.
_TALKING = ("cordillera.cli", "cordillera.errors", "cordillera.files", "cordillera.toml_files", "cordillera.recipe")
_TALKING += ("cordillera.kernels.compiled_files", "cordillera.reports", "cordillera.run")
_TALKING += ("cordillera.data.fetch", "cordillera.data.files")  # files are placed by their checksums
_DRAWING = ("report", "chart", "charts", "card", "headline", "page", "export", "commands")
_NAME = re.compile(r"'(\w+)'")
_MODULE = re.compile(r"\bcordillera(\.\w+)+")
_MACHINERY = ("_machine", "_program", "_renames", "_results", "_sources", "_stale", "_tables")  # print and write


def counts(module: str) -> bool:
    """Return whether a module can change a figure."""
    parts = module.rsplit(".", 1)[-1].split("_")
    return module not in _MACHINERY and not module.startswith(_TALKING) and parts[-1] not in _DRAWING


def file_of(module: str) -> Path | None:
    """Return the file of a module of the benchmarks or of the package, or None if it belongs to neither."""
    base = CHECKOUT / "src" if module.split(".")[0] == "cordillera" else BENCHMARKS
    path = base.joinpath(*module.split("."))
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


class _Module:
    """The definitions of a module by name; other statements have the empty name."""

    def __init__(self, code: str) -> None:
        self.defined: dict[str, list[ast.AST]] = {"": []}
        self.imported: dict[str, tuple[str, str]] = {}
        self._used: dict[str, set[tuple[str, str]]] = {}
        for node in _plain(ast.parse(code)).body:
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                self.imported |= _imports(node)
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                self.defined.setdefault(node.name, []).append(node)
            elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    names = [one.id for one in ast.walk(target) if isinstance(one, ast.Name)]
                    for name in names[:1] if isinstance(target, (ast.Subscript, ast.Attribute)) else names:
                        self.defined.setdefault(name, []).append(node)
            elif not (isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"):
                self.defined[""].append(node)
                for one in ast.walk(node):
                    if isinstance(one, (ast.Import, ast.ImportFrom)):
                        self.imported |= _imports(one)

    def used_by(self, name: str) -> set[tuple[str, str]]:
        """Return what a definition uses, as :meth:`uses` does."""
        if name not in self._used:
            self._used[name] = self.uses(self.defined[name])
        return self._used[name]

    def uses(self, nodes: Iterable[ast.AST]) -> set[tuple[str, str]]:
        """Return the names, with their modules, that nodes use; the module is empty for names of this module."""
        found: set[tuple[str, str]] = set()
        imported, waiting = dict(self.imported), [*nodes]
        for node in waiting[:]:
            for one in ast.walk(node):
                if isinstance(one, (ast.Import, ast.ImportFrom)):
                    imported |= _imports(one)
        while waiting:
            node = waiting.pop()
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in imported:
                module, name = imported[node.value.id]
                found.add((module, name or node.attr))
            elif isinstance(node, ast.Name):
                found.add(imported.get(node.id, ("", node.id)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found |= _started(node.value)
            else:
                waiting.extend(ast.iter_child_nodes(node))
        return found


class _Computed(ast.NodeTransformer):
    def visit_Import(self, node: ast.Import) -> None:
        return None

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        return None


def _plain(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            words = [line for line in node.body if isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant)]
            node.body = [line for line in node.body if line not in words]
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            node.returns = None
        elif isinstance(node, ast.arg):
            node.annotation = None
    return tree


def _imports(node: ast.Import | ast.ImportFrom) -> dict[str, tuple[str, str]]:
    """Map local names to modules and the names in them; empty for whole modules."""
    if isinstance(node, ast.Import):
        return {alias.asname or alias.name.split(".")[0]: (alias.name, "") for alias in node.names}
    found = {}
    for alias in node.names:
        whole = f"{node.module}.{alias.name}"
        is_module = not node.level and file_of(whole) is not None
        found[alias.asname or alias.name] = (whole, "") if is_module else (node.module or "", alias.name)
    return found


def _started(text: str) -> set[tuple[str, str]]:
    """Return what programs in a string use, or files started by name."""
    if text.startswith("_") and text.endswith(".py"):
        return {(text.removesuffix(".py"), name) for name in ("main", "")}
    if "import " not in text:
        return set()
    try:
        module = _Module(text)
    except (SyntaxError, ValueError):
        return set()
    nodes = [node for nodes in module.defined.values() for node in nodes]
    return {use for use in module.uses(nodes) if use[0]} | set(module.imported.values())


@lru_cache(maxsize=1024)
def _module(code: str) -> _Module:
    return _Module(code)


def _code(module: str) -> str | None:
    file = file_of(module)
    return None if file is None else file.read_text(encoding="utf-8")


def _roots(program: _Module, part: str) -> set[tuple[str, str]]:
    """Return what a benchmark calls for one of its parts; everything if it has no table of parts."""
    for node in program.defined.get("PARTS", ()):
        table = getattr(node, "value", None)
        if isinstance(table, ast.Dict):
            for key, value in zip(table.keys, table.values, strict=True):
                if isinstance(key, ast.Attribute) and key.attr == part:
                    return program.uses([value])
    return {("", name) for name in program.defined}


def definitions_of(program: str, part: str) -> dict[str, set[str]]:
    """Return the names of the definitions that a part of a benchmark (a file without ``.py``) depends on, by module."""
    found: dict[str, set[str]] = {program: {""}}
    waiting = [(module or program, name) for module, name in _roots(_module(_code(program) or ""), part)]
    while waiting:
        module, name = waiting.pop()
        if name in found.get(module, ()) or (module != program and not counts(module)):
            continue
        code = _code(module)
        if code is None:
            continue
        tree = _module(code)
        if name in tree.imported:  # re-exported
            waiting.append(tree.imported[name])
        elif name in tree.defined:
            fresh = {name} if module in found else {name, ""}
            found.setdefault(module, set()).update(fresh)
            for one in fresh:
                waiting += [(other or module, used) for other, used in tree.used_by(one)]
    return found


def _git(*words: str) -> bytes | None:
    try:
        done = subprocess.run(["git", *words], cwd=CHECKOUT, capture_output=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


@cache
def _digests(code: str) -> dict[str, frozenset[tuple[str, str]]]:
    """Return the new name and the digest of each definition of a file, by name; nameless statements have one each."""
    found = {}
    for name, nodes in _Module(code).defined.items():
        dumps = [ast.dump(_Computed().visit(node)) for node in nodes]
        texts = [_MODULE.sub("cordillera", text) for text in (dumps if not name else ["".join(dumps)])]
        codes = [_NAME.sub(lambda one: f"'{RENAMED.get(one[1], one[1])}'", text) for text in texts]
        digests = (hashlib.sha256(text.encode()).hexdigest() for text in codes)
        found[name] = frozenset((RENAMED.get(name, name), digest) for digest in digests)
    return found


@lru_cache(maxsize=64)
def _defined_at(commit: str) -> frozenset[tuple[str, str]] | None:
    """Return the names and digests of all definitions at a commit; None if the commit is unknown."""
    packed = _git("archive", "--format=tar", commit, "--", "src", "benchmarks") if commit else None
    if packed is None:
        return None
    found: set[tuple[str, str]] = set()
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        for member in archive:
            file = archive.extractfile(member) if member.name.endswith(".py") else None
            if file is not None:
                found.update(*_digests(file.read().decode()).values())
    return frozenset(found)


@dataclass(frozen=True)
class Age:
    """State of the code behind a result file.

    Attributes:
        file: The result file.
        measured: Day of the measurement.
        commit: Commit of the measurement, with ``+`` if files differed from it.
        changed: Modules with changed definitions on which the figure depends.
        problem: Reason why the state is unknown, or empty.
        command: Command that measures it again.
    """

    file: Path
    measured: str
    commit: str
    changed: tuple[str, ...]
    problem: str
    command: str

    @property
    def stale(self) -> bool:
        """Whether it should be measured again."""
        return bool(self.changed or self.problem)


def age_of(file: Path) -> Age:
    """Compare the code behind a result file with that of this checkout."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        system, part = str(content["system"]), str(content["part"])
        machine: dict[str, Any] = content["machine"]
        measured, commit = str(machine["date"])[:10], str(machine.get("commit") or "")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return Age(file, "", "", (), f"is no result file ({error!r})", "")
    program = system.replace("-", "_")
    code = _code(program)
    shown = commit[:9] + ("+" if machine.get("uncommitted_changes") else "")
    if code is None:
        return Age(file, measured, shown, (), f"there is no benchmark {system}", "")
    command = f"cordillera bench {program.replace('_', '-')}" + (
        f" --part {part}" if "PARTS" in _module(code).defined else ""
    )
    before = _defined_at(commit)
    if before is None:
        return Age(file, measured, shown, (), f"commit {commit[:9] or 'none'} is not known here", command)
    if machine.get("uncommitted_changes"):
        return Age(file, measured, shown, (), "was measured with uncommitted changes", command)
    changed = [
        module
        for module, names in definitions_of(program, part).items()
        if not all(own <= before for name, own in _digests(_code(module) or "").items() if name in names)
    ]
    return Age(file, measured, shown, tuple(sorted(changed)), "", command)
