"""The code behind a figure, and whether it has changed: ``cordillera bench --stale``.

Each result file keeps digests of the definitions that were at work: the functions that ran (see ``_recorder.py``), and
what they name, directly or indirectly: constants, functions that are compiled, and classes with their fields and base
classes. A figure is stale as soon as the checkout lacks one of them. Comments, docstrings, layout, imports (also those
that packages make when a name is first used), annotations of arguments, the values that a field may have, the words of
errors and guards do not count, nor do modules that only read recipes, place files, print or draw. A guard is an ``if``
that can do nothing but raise the error of a user's mistake, outside of loops, ``try`` and compiled functions, under a
condition that compares what is at hand: in a run that ended it did nothing else. A definition that was moved to
another module is unchanged.
"""

from __future__ import annotations

import ast
import copy
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from _recorder import Function, may_be_compiled
from _renames import RENAMED

BENCHMARKS = Path(__file__).resolve().parent
CHECKOUT = BENCHMARKS.parent

# Modules that compute nothing, by the beginning or the end of their names.
_TALKING = (
    "cordillera.__main__",
    "cordillera.cli",
    "cordillera.errors",
    "cordillera.files",
    "cordillera.mistakes",
    "cordillera.recipe",
)
_TALKING += ("cordillera.kernels.compiled_files", "cordillera.reports", "cordillera.run")
_TALKING += ("cordillera.data.fetch", "cordillera.data.files")  # files are placed by their checksums
_DRAWING = ("report", "chart", "charts", "card", "headline", "page", "export", "commands")
_MACHINERY = ("_machine", "_program", "_recorder", "_renames", "_results", "_sources", "_stale", "_tables")
_NAME = re.compile(r"'(\w+)'")
_MODULE = re.compile(r"\bcordillera(\.\w+)+")

Name = tuple[str, str]  # of a definition: its module, empty for the same one, and its name there


def counts(module: str) -> bool:
    """Return whether a module can change a figure."""
    parts = module.rsplit(".", 1)[-1].split("_")
    return module not in _MACHINERY and not module.startswith(_TALKING) and parts[-1] not in _DRAWING


def file_of(module: str) -> Path | None:
    """Return the file of a module of the benchmarks or of the package, or None if it belongs to neither."""
    base = CHECKOUT / "src" if module.split(".")[0] == "cordillera" else BENCHMARKS
    path = base.joinpath(*module.split("."))
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


def module_of(file: Path) -> str:
    """Return the module that a file of the benchmarks or of the package holds."""
    base = BENCHMARKS if file.is_relative_to(BENCHMARKS) else CHECKOUT / "src"
    names = file.relative_to(base).with_suffix("").parts
    return ".".join(names[:-1] if names[-1] == "__init__" else names)


@dataclass
class Definition:
    """A function, a method, a constant, a field, the head of a class, or the other statements of a module.

    Attributes:
        nodes: Its statements.
        is_function: Whether it is a function or method.
        is_plain: Whether it is a function that Python runs, so that the recorder sees it.
        is_entry: Whether it is an entry of a table or union, so that what it names is not at work by that alone.
    """

    nodes: list[ast.stmt]
    is_function: bool = False
    is_plain: bool = False
    is_entry: bool = False


class Module:
    """The definitions of a module by name, those of a class as ``Class.name``; other statements have the empty name."""

    def __init__(self, code: str) -> None:
        self.defined: dict[str, Definition] = {"": Definition([])}
        self.imported: dict[str, Name] = {}
        self._used: dict[str, set[Name]] = {}
        self._add(ast.parse(code).body, "")

    def _add(self, body: Iterable[ast.stmt], owner: str) -> None:
        prefix = f"{owner}." if owner else ""
        for node in body:
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                self.imported |= _imports(node)
            elif isinstance(node, Function):
                self._keep(prefix + node.name, node, Definition([], True, not may_be_compiled(node)))
            elif isinstance(node, ast.ClassDef):
                head = ast.ClassDef(node.name, node.bases, node.keywords, [], node.decorator_list)
                self._keep(prefix + node.name, head)
                self._add(node.body, prefix + node.name)
            elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    names = [one.id for one in ast.walk(target) if isinstance(one, ast.Name)]
                    for name in names[:1] if isinstance(target, (ast.Subscript, ast.Attribute)) else names:
                        for own, part in _entries(node):
                            self._keep(prefix + name + own, part, Definition([], is_entry=bool(own)))
            elif not (isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"):
                self._keep(owner, node)
                self._add(_inside(node), owner)
            else:
                self._add(node.body, owner)

    def _keep(self, name: str, node: ast.stmt, kind: Definition | None = None) -> None:
        self.defined.setdefault(name, kind or Definition([])).nodes.append(node)

    def beside(self, name: str) -> list[str]:
        """Return what is at work with a definition: of a method, its class; of a class, fields and compiled methods."""
        owner = name.rpartition(".")[0]
        inside = [one for one in self.defined if name and one.rpartition(".")[0] == name]
        return ["", owner, *(one for one in inside if not self.defined[one].is_plain)]

    def used_by(self, name: str) -> set[Name]:
        """Return the names that a definition uses, with their modules."""
        if name not in self._used:
            nodes = [node for root in self.defined[name].nodes for node in ast.walk(root)]
            imported = dict(self.imported)
            for node in nodes:
                if isinstance(node, (ast.Import, ast.ImportFrom)):
                    imported |= _imports(node)
            self._used[name] = {use for node in nodes for use in _uses(node, imported)}
        return self._used[name]


def _entries(node: ast.Assign | ast.AnnAssign | ast.AugAssign) -> Iterator[tuple[str, ast.stmt]]:
    """Yield a constant, of a table of functions or classes and of a union each entry alone, with what the name ends in.

    An entry that is added to such a constant does not change what the others do.
    """
    table, union = node.value, []
    for one in ast.walk(table) if table is not None else ():
        if isinstance(one, ast.BinOp) and isinstance(one.op, ast.BitOr):
            union += [side for side in (one.left, one.right) if not isinstance(side, ast.BinOp)]
    values = table.values if isinstance(table, ast.Dict) else []
    if isinstance(table, ast.Dict) and values and all(isinstance(one, (ast.Name, ast.Attribute)) for one in values):
        pairs = [(ast.unparse(key) if key else "", value) for key, value in zip(table.keys, values, strict=True)]
    elif len(union) > 1 and all(isinstance(side, (ast.Name, ast.Attribute)) for side in union):
        pairs = [(ast.unparse(side), side) for side in union]
    else:
        pairs = []
        yield "", node
    for name, value in pairs:
        yield "." + re.sub(r"\W", "_", name), ast.Expr(value)
    if pairs:
        yield "", ast.Pass()


def _inside(node: ast.AST) -> Iterator[ast.stmt]:
    """Yield the imports, functions and classes in a statement, such as those under a condition."""
    for one in ast.iter_child_nodes(node):
        if isinstance(one, (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield one
        else:
            yield from _inside(one)


def _imports(node: ast.Import | ast.ImportFrom) -> dict[str, Name]:
    """Map local names to modules and the names in them; empty for whole modules."""
    if isinstance(node, ast.Import):
        return {alias.asname or alias.name.split(".")[0]: (alias.name, "") for alias in node.names}
    found = {}
    for alias in node.names:
        whole = f"{node.module}.{alias.name}"
        is_module = not node.level and file_of(whole) is not None
        found[alias.asname or alias.name] = (whole, "") if is_module else (node.module or "", alias.name)
    return found


def _uses(node: ast.AST, imported: dict[str, Name]) -> Iterator[Name]:
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in imported:
        module, name = imported[node.value.id]
        yield module, name or node.attr
    elif isinstance(node, ast.Name):
        yield imported.get(node.id, ("", node.id))
    elif isinstance(node, ast.Constant) and re.fullmatch(r"_\w+\.py", str(node.value)):  # a script that is started
        yield str(node.value).removesuffix(".py"), "*"


@lru_cache(maxsize=2048)
def _parsed(code: str) -> Module:
    return Module(code)


def _module(name: str) -> Module | None:
    file = file_of(name)
    return None if file is None else _parsed(file.read_text(encoding="utf-8"))


def definitions_behind(ran: Iterable[Name]) -> dict[str, set[str]]:
    """Return the definitions at work where functions ran, by module.

    Args:
        ran: Modules and names of the functions; the name ``*`` stands for all of a module.
    """
    found: dict[str, set[str]] = {}
    waiting = [(module, name, True) for module, name in ran]
    while waiting:
        module, name, runs = waiting.pop()
        tree = _module(module) if counts(module) else None
        if tree is None or name in found.get(module, ()) or _is_late_import(module, name):
            continue
        if name == "*":
            waiting += [(module, one, True) for one in tree.defined]
        elif name in tree.imported:  # re-exported
            waiting.append((*tree.imported[name], runs))
        elif name in tree.defined and (runs or not tree.defined[name].is_plain):
            found.setdefault(module, set()).add(name)
            waiting += [(module, other, False) for other in tree.beside(name)]
            one, is_program = tree.defined[name], "." not in module and not module.startswith("_")
            for other, used in tree.used_by(name):
                # A compiler takes in all that it sees; other processes load the program without the recorder
                runs = one.is_function and (not one.is_plain or (is_program and not other))
                if not one.is_entry or _is_compiled(other or module, used):
                    waiting.append((other or module, used, runs))
    return found


def _is_late_import(module: str, name: str) -> bool:
    """Return whether a definition only says where a package imports a name from when it is first used."""
    file = file_of(module)
    return file is not None and file.name == "__init__.py" and name in ("_WHERE", "__all__", "__dir__", "__getattr__")


def _is_compiled(module: str, name: str) -> bool:
    """Return whether a name is that of a function that the recorder does not see."""
    tree = _module(module)
    if tree is not None and name in tree.imported:
        return _is_compiled(*tree.imported[name])
    return tree is not None and name in tree.defined and tree.defined[name].is_function > tree.defined[name].is_plain


# What a guard raises: not PlanError, with which a search leaves out a layout, nor errors that a server answers with.
_GUARDS = ("DataError", "RecipeError", "RunError", "TrainingError")
# Modules whose errors are results: a study leaves out a size, or a search a candidate, and goes on.
_JUDGED, _NOT_JUDGED = (
    ("cordillera.training.scaling", "cordillera.models.ranking"),
    "cordillera.models.ranking.interactions",
)
# What a guard's condition may hold: no call but these, and no subscript but that of a shape, so that it takes no time.
_CHEAP_CALLS = ("isinstance", "len")
_CHEAP = (ast.expr_context, ast.boolop, ast.operator, ast.unaryop, ast.cmpop, ast.BoolOp, ast.BinOp, ast.UnaryOp)
_CHEAP += (ast.Compare, ast.Name, ast.Attribute, ast.Constant, ast.Tuple)


def _has_guards(module: str) -> bool:
    """Return whether guards of a module do not count."""
    return module == _NOT_JUDGED or not module.startswith(_JUDGED)


def _is_guard(node: ast.If) -> bool:
    """Return whether a statement does nothing but raise the error of a user's mistake, under a cheap condition."""
    errors = [getattr(one.exc, "func", None) for one in node.body if isinstance(one, ast.Raise)]
    refuses = len(errors) == len(node.body) and all(getattr(one, "id", "") in _GUARDS for one in errors)
    return refuses and not node.orelse and all(map(_is_cheap, ast.walk(node.test)))


def _is_cheap(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in _CHEAP_CALLS and not node.keywords
    if isinstance(node, ast.Subscript):
        return isinstance(node.value, ast.Attribute) and node.value.attr == "shape"
    if isinstance(node, ast.Compare) and any(isinstance(one, (ast.In, ast.NotIn)) for one in node.ops):
        among = node.comparators[-1]  # of few: written out, or a constant
        return isinstance(among, ast.Tuple) or (isinstance(among, ast.Name) and among.id.isupper())
    return isinstance(node, _CHEAP) and not isinstance(node, ast.MatMult)


class _Computed(ast.NodeTransformer):
    """Leaves out docstrings, imports, annotations of arguments, what fields choose from, guards and what errors say."""

    raising = False

    def __init__(self, has_guards: bool) -> None:
        self.has_guards = has_guards

    def visit_If(self, node: ast.If) -> ast.AST | None:
        return None if self.has_guards and _is_guard(node) else self.generic_visit(node)

    def visit_For(self, node: ast.For | ast.While | ast.Try) -> ast.AST:
        before, self.has_guards = self.has_guards, False  # where it runs often, or its error may be caught
        found = self.generic_visit(node)
        self.has_guards = before
        return found

    visit_While = visit_Try = visit_For

    def visit_Import(self, node: ast.Import) -> None:
        return None

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        return None

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        return None if isinstance(node.value, ast.Constant) else self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> ast.arg:
        return ast.arg(node.arg)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        for one in ast.walk(node.annotation):
            if isinstance(one, ast.Subscript) and getattr(one.value, "id", "") == "Literal":
                one.slice = ast.Tuple([])
        return self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> ast.AST:
        self.raising = True
        self.generic_visit(node)
        self.raising = False
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        return ast.Constant("") if self.raising and isinstance(node.value, str) else node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        return ast.Constant("") if self.raising else self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        without = ast.FunctionDef(node.name, node.args, node.body, node.decorator_list)
        before, self.has_guards = self.has_guards, self.has_guards and not may_be_compiled(node)
        found = self.generic_visit(without)
        self.has_guards = before
        return found


def _text(value: Any) -> str:
    """Return a piece of code as text that is the same for all versions of Python; empty fields are left out."""
    if isinstance(value, list):
        return f"[{', '.join(map(_text, value))}]"
    if not isinstance(value, ast.AST):
        return ascii(value)
    if isinstance(value, ast.JoinedStr):  # some versions end formats with an empty string
        value = ast.JoinedStr([one for one in value.values if getattr(one, "value", None) != ""])
    fields = [f"{name}={_text(one)}" for name, one in ast.iter_fields(value) if one is not None and one != []]
    return f"{type(value).__name__}({', '.join(fields)})"


def _methods(module: str, name: str) -> set[str]:
    """Return the names of the methods of a class of this project, and of its bases."""
    tree = _module(module)
    if tree is not None and name in tree.imported:
        return _methods(*tree.imported[name])
    if tree is None or name not in tree.defined:
        return set()
    own = {one.rpartition(".")[2] for one in tree.defined if one.rpartition(".")[0] == name}
    return own.union(*(_methods(*base) for base in _bases(module, name)))


def _bases(module: str, name: str) -> Iterator[Name]:
    tree = _module(module)
    for node in tree.defined[name].nodes if tree is not None else ():
        for base in node.bases if isinstance(node, ast.ClassDef) else ():
            for other, used in _uses(base, tree.imported) if tree is not None else ():
                yield other or module, used


@cache
def _digest(module: str, name: str, code: str) -> str:
    """Return the digest of a definition; that of a class names the methods that it has instead of its bases."""
    tree = _parsed(code)
    computed = _Computed(_has_guards(module))
    dumps = [_text(one) for node in tree.defined[name].nodes for one in [computed.visit(copy.deepcopy(node))] if one]
    instead = set().union(*(_methods(*base) for base in _bases(module, name)))
    own = {one.rpartition(".")[2] for one in tree.defined if one.rpartition(".")[0] == name}
    text = _MODULE.sub("cordillera", "\n".join([RENAMED.get(name, name), *dumps, *sorted(own & instead)]))
    text = _NAME.sub(lambda one: f"'{RENAMED.get(one[1], one[1])}'", text)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def digests_of(definitions: Mapping[str, Iterable[str]]) -> dict[str, str]:
    """Return the digests of definitions, in one line for each module."""
    found = {}
    for module, names in sorted(definitions.items()):
        file = file_of(module)
        code = "" if file is None else file.read_text(encoding="utf-8")
        digests = {_digest(module, name, code) for name in names if _parsed(code).defined[name].nodes}
        found[module] = " ".join(sorted(digests))
    return found


def code_behind(record: Path) -> dict[str, str]:
    """Return the digests of the code that ran, from a file of the recorder."""
    ran: set[Name] = set()
    for line in record.read_text(encoding="utf-8").splitlines():
        path, name = line.split("\t")
        module = module_of(Path(path))
        tree = _module(module)
        ran.add((module, name if tree is not None and name in tree.defined else "*"))
    return digests_of(definitions_behind(ran))


@cache
def _digests_here() -> frozenset[str]:
    """Return the digests of all definitions of this checkout."""
    files = [*BENCHMARKS.glob("*.py"), *(CHECKOUT / "src").rglob("*.py")]
    modules = {name: _module(name) for name in map(module_of, files) if counts(name)}
    lines = digests_of({name: tree.defined for name, tree in modules.items() if tree is not None}).values()
    return frozenset(digest for line in lines for digest in line.split())


@dataclass(frozen=True)
class Age:
    """State of the code behind a result file.

    Attributes:
        file: The result file.
        measured: Day of the measurement.
        commit: Commit of the measurement, with ``+`` if files differed from it.
        changed: Number of definitions at work that have changed, by the modules in which they were.
        problem: Reason why the state is unknown, or empty.
        command: Command that measures it again.
    """

    file: Path
    measured: str
    commit: str
    changed: Mapping[str, int]
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
        code = {str(module): str(line).split() for module, line in content.get("code", {}).items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return Age(file, "", "", {}, f"is no result file ({error!r})", "")
    shown = commit[:9] + ("+" if machine.get("uncommitted_changes") else "")
    program = BENCHMARKS / f"{system.replace('-', '_')}.py"
    command, problem = f"cordillera bench {program.stem.replace('_', '-')}", ""
    if not program.is_file():
        command, problem = "", f"there is no benchmark {system}"
    elif machine.get("uncommitted_changes"):
        problem = "was measured with uncommitted changes"
    elif not code:
        problem = "what ran was not recorded"
    if command and "Program(" in program.read_text(encoding="utf-8"):
        command += f" --part {part}"
    changed = {module: len(set(line) - _digests_here()) for module, line in code.items()}
    return Age(file, measured, shown, {module: count for module, count in changed.items() if count}, problem, command)
