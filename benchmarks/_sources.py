"""Which code a figure comes from, and whether that code is still the same: ``cordillera bench --stale``.

A benchmark depends on its own program and on the modules that this imports, directly or through others: helpers beside
it and modules of the package, but not those that only read recipes, talk to people or draw. Code is compared without
comments, docstrings and layout, so that only what computes counts. Result files keep a digest of each of these modules;
those that were written before they did are held against the commit that they name.
"""

from __future__ import annotations

import ast
import hashlib
import json
import subprocess
from collections import deque
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).resolve().parent
CHECKOUT = BENCHMARKS.parent

# Modules that compute nothing, by the beginning or the end of their names; what they import does not count either.
_TALKING = ("cordillera.cli", "cordillera.errors", "cordillera.files", "cordillera.mistakes", "cordillera.recipe")
_TALKING += ("cordillera.run", "cordillera.workflows", "cordillera.training.comparison")
_DRAWING = ("report", "chart", "charts", "card", "headline", "page", "export", "commands")
_MACHINERY = ("_machine", "_results", "_sources", "_tables")  # which print and write


def counts(module: str) -> bool:
    """Whether a module can change a figure."""
    parts = module.rsplit(".", 1)[-1].split("_")
    return module not in _MACHINERY and not module.startswith(_TALKING) and parts[-1] not in _DRAWING


def file_of(module: str) -> Path | None:
    """The file of a module of the benchmarks or of the package, or None if it is of neither."""
    base = CHECKOUT / "src" if module.startswith("cordillera.") else BENCHMARKS
    path = base.joinpath(*module.split("."))
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


def _imported(tree: ast.AST) -> set[str]:
    """Modules that code imports, also in functions and in programs that it holds as text; not those for type checks."""
    found: set[str] = set()
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            whole = {alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            found.update(name if file_of(name) else node.module for name in whole.values())
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if node.value.startswith("_") and node.value.endswith(".py"):
                found.add(node.value.removesuffix(".py"))  # a program beside this one, started as a process
            elif "import " in node.value:
                try:
                    waiting.append(ast.parse(node.value))
                except (SyntaxError, ValueError):
                    continue
        elif isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            waiting.extend(node.orelse)
        else:
            waiting.extend(ast.iter_child_nodes(node))
    return found


def _without_words(tree: ast.AST) -> ast.AST:
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            node.body = [
                line for line in node.body if not (isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant))
            ]
    return tree


@lru_cache(maxsize=4096)
def digest(code: str) -> str:
    """Of what code does: comments, docstrings and layout do not count.

    Args:
        code: Of a module.
    """
    dumped = ast.dump(_without_words(ast.parse(code)), annotate_fields=False)
    return hashlib.sha256(dumped.encode()).hexdigest()[:12]


def modules_of(program: str) -> dict[str, int]:
    """Modules that a benchmark depends on, and through how many imports.

    Args:
        program: Name of its file, without ``.py``.
    """
    found, waiting = {program: 0}, deque([program])
    while waiting:
        module = waiting.popleft()
        file = file_of(module)
        assert file is not None
        for name in sorted(_imported(ast.parse(file.read_text(encoding="utf-8")))):
            if name not in found and name != "cordillera" and counts(name) and file_of(name):
                found[name] = found[module] + 1
                waiting.append(name)
    return found


def digests_of(program: str) -> dict[str, str]:
    """Digests of the modules that a benchmark depends on, for its result file.

    Args:
        program: Name of its file, without ``.py``.
    """
    return {name: digest(_code(name) or "") for name in sorted(modules_of(program))}


def _code(module: str) -> str | None:
    file = file_of(module)
    return None if file is None else file.read_text(encoding="utf-8")


def _git(*words: str) -> str | None:
    try:
        done = subprocess.run(["git", *words], cwd=CHECKOUT, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def _differing_files(commit: str) -> set[str] | None:
    """Paths of the package and the benchmarks that differ from a commit; None where it is not known here."""
    found = _git("diff", "--name-only", "--no-renames", commit, "--", "src", "benchmarks")
    return None if found is None else set(found.splitlines())


def _changed_since(commit: str, modules: dict[str, int]) -> list[str] | None:
    differing = _differing_files(commit)
    if differing is None:
        return None
    changed = []
    for module in modules:
        file = file_of(module)
        assert file is not None
        path = file.relative_to(CHECKOUT).as_posix()
        if path in differing:
            before = _git("show", f"{commit}:{path}")
            if before is None or digest(before) != digest(_code(module) or ""):
                changed.append(module)
    return changed


@dataclass(frozen=True)
class Age:
    """What is known about the code behind a result file.

    Attributes:
        file: The result file.
        measured: Day on which it was measured.
        commit: Commit at which it was measured, with ``+`` if files differed from it.
        changed: Modules whose code has changed since, those that the benchmark imports itself first.
        problem: Why that cannot be told, or empty.
        command: That measures it again.
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
    """Compare the code behind a result file with that of this checkout.

    Args:
        file: A result file.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        system, part = str(content["system"]), str(content["part"])
        machine: dict[str, Any] = content["machine"]
        recorded = {str(name): str(value) for name, value in content.get("sources", {}).items()}
        measured, commit = str(machine["date"])[:10], str(machine.get("commit") or "")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return Age(file, "", "", (), f"is no result file ({error!r})", "")
    program = system.replace("-", "_")
    code = _code(program)
    shown = commit[:9] + ("+" if machine.get("uncommitted_changes") else "")
    if code is None:
        return Age(file, measured, shown, (), f"there is no benchmark {system}", "")
    command = f"cordillera bench {program.replace('_', '-')}" + (f" --part {part}" if '"--part"' in code else "")
    modules = modules_of(program)
    if recorded:
        changed: list[str] | None = [
            name for name, value in recorded.items() if (now := _code(name)) is None or digest(now) != value
        ]
    else:
        changed = _changed_since(commit, modules) if commit else None
    problem = "" if changed is not None else f"commit {commit[:9] or 'none'} is not known here"
    ordered = sorted(changed or (), key=lambda name: (modules.get(name, 0), name))
    return Age(file, measured, shown, tuple(ordered), problem, command)


def main(folder: Path = BENCHMARKS / "results") -> int:
    """Print the result files whose code has changed since they were measured; 1 if there are any.

    Args:
        folder: Of result files.
    """
    from _results import make_console
    from rich.table import Table

    console = make_console()
    ages = [age_of(file) for file in sorted(folder.glob("*.json"))]
    stale = [age for age in ages if age.stale]
    table = Table(title="figures whose code has changed since they were measured", title_justify="left")
    for heading in ("result file", "measured", "commit", "what changed, nearest first", "measured again by"):
        table.add_column(heading)
    for age in stale:
        names = [name.removeprefix("cordillera.") for name in age.changed]
        what = age.problem or ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        table.add_row(age.file.name, age.measured, age.commit, what, age.command)
    if stale:
        console.print(table)
    console.print(f"{len(stale)} of {len(ages)} result files are stale", markup=False)
    return int(bool(stale))


if __name__ == "__main__":
    raise SystemExit(main())
