"""Recorder of the functions that a benchmark runs, in all its processes: ``python _recorder.py BENCHMARK ARGUMENTS``.

At the beginning of each function of the package and of the benchmarks one flag is read, which takes some 20 ns, and
the first call in a process writes a line, its file and its name, to the file that the variable
``CORDILLERA_RECORD`` names. Functions in functions belong to the outer one. Functions with decorators that may compile
them stay as they are; what calls them names them (see ``_sources.py``). Scripts that a benchmark starts by path are
written down as a whole, by the name ``*``.
"""

from __future__ import annotations

import ast
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

BENCHMARKS = Path(__file__).resolve().parent
VARIABLE = "CORDILLERA_RECORD"
_ROOTS = (str(BENCHMARKS) + os.sep, str(BENCHMARKS.parent / "src" / "cordillera") + os.sep)
_STARTUP = "import importlib.util as u, sys\ns = u.spec_from_file_location('_recorder', {path!r})\n"
_STARTUP += "m = sys.modules['_recorder'] = u.module_from_spec(s)\ns.loader.exec_module(m)\nm.follow()\n"

# Decorators of plain Python functions; any other may compile what it decorates
PLAIN = {"property", "cached_property", "setter", "staticmethod", "classmethod", "abstractmethod", "override", "wraps"}
PLAIN |= {"cache", "lru_cache", "contextmanager", "asynccontextmanager", "dataclass", "no_grad", "inference_mode"}
PLAIN |= {"model_validator", "field_validator", "field_serializer", "model_serializer", "once_differentiable"}

Function = ast.FunctionDef | ast.AsyncFunctionDef
_ran: list[list[bool]] = []  # of all modules
_early: list[str] = []  # lines of functions that ran at imports and before anything was recorded


def name_of(decorator: ast.expr) -> str:
    """Return the last name of a decorator."""
    plain = decorator.func if isinstance(decorator, ast.Call) else decorator
    return plain.attr if isinstance(plain, ast.Attribute) else getattr(plain, "id", "")


def may_be_compiled(function: Function) -> bool:
    """Return whether something other than Python may run the body of a function."""
    return not all(name_of(one) in PLAIN for one in function.decorator_list)


def functions_of(body: Iterable[ast.AST], owner: str = "") -> Iterator[tuple[str, Function]]:
    """Yield the functions and methods of a module with their names, but not those in functions."""
    for node in body:
        if isinstance(node, Function):
            yield owner + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from functions_of(node.body, f"{owner}{node.name}.")
        elif isinstance(node, (ast.stmt, ast.ExceptHandler)):
            yield from functions_of(ast.iter_child_nodes(node), owner)


def _write(path: str, name: str) -> None:
    record, text = os.environ.get(VARIABLE), f"{path}\t{name}\n"
    if not record or _Loader.depth:
        _early.append(text)
    if record:
        with open(record, "a", encoding="utf-8") as file:
            file.write(text)


def marks(path: str, names: str) -> tuple[list[bool], Callable[[int], None]]:
    """Return the flags of a module's functions, whose names are given, and what their first calls call."""
    every = names.split()
    ran = [False] * len(every)  # a list, as torch.compile knows lists
    _ran.append(ran)

    def note(index: int) -> None:
        ran[index] = True
        _write(path, every[index])

    return ran, note


def code_of(path: str, source: bytes) -> CodeType:
    """Compile a module whose functions write down their first calls."""
    tree = ast.parse(source, path)
    functions = [(name, one) for name, one in functions_of(tree.body) if not may_be_compiled(one)]
    for index, (_, function) in enumerate(functions):
        is_documented = ast.get_docstring(function, clean=False) is not None
        (mark,) = ast.parse(f"__ran__[{index}] or __note__({index})").body
        function.body.insert(int(is_documented), _at(mark, function.body[0].lineno))
    begin = next(
        (
            index
            for index, node in enumerate(tree.body)
            if not (isinstance(node, ast.ImportFrom) and node.module == "__future__")
            and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        ),
        len(tree.body),
    )
    names = " ".join(name for name, _ in functions)
    added = ast.parse(f"__ran__, __note__ = __import__('sys').modules['_recorder'].marks({path!r}, {names!r})")
    tree.body[begin:begin] = [_at(one, 1) for one in added.body]
    return compile(tree, path, "exec", dont_inherit=True)


def _at(node: ast.stmt, line: int) -> ast.stmt:
    for one in ast.walk(node):
        if hasattr(one, "lineno"):
            one.lineno = one.end_lineno = line
            one.col_offset = one.end_col_offset = 0
    return node


class _Loader(SourceFileLoader):
    depth = 0

    def exec_module(self, module: ModuleType) -> None:
        _Loader.depth += 1
        try:
            super().exec_module(module)
        finally:
            _Loader.depth -= 1

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        return code_of(path, self.get_data(path))


class _Finder(MetaPathFinder):
    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.origin is None or not spec.origin.startswith(_ROOTS) or name == "_recorder":
            return None
        spec.loader = _Loader(name, spec.origin)
        return spec


def follow() -> None:
    """Write down the functions that this process runs from now on, and a script that it was started with."""
    sys.meta_path.insert(0, _Finder())
    script = os.path.abspath(sys.orig_argv[1]) if len(sys.orig_argv) > 1 else ""
    if script.startswith(_ROOTS) and script != __file__:
        _write(script, "*")


@contextmanager
def recording(path: Path) -> Iterator[None]:
    """Write what runs in the body to a file, if this process was started by the recorder."""
    for ran in _ran:
        ran[:] = [False] * len(ran)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8") as file:
        file.writelines(_early)
    os.environ[VARIABLE] = str(path)
    try:
        yield
    finally:
        del os.environ[VARIABLE]


def main() -> None:
    """Run a benchmark as ``python BENCHMARK ARGUMENTS`` does."""
    sys.argv[:] = sys.argv[1:]
    path = os.path.abspath(sys.argv[0])
    sys.argv[0] = f"cordillera bench {Path(path).stem.replace('_', '-')}"  # what its help calls it
    sys.modules["_recorder"] = sys.modules["__main__"]
    program = sys.modules["__main__"] = ModuleType("__main__")
    program.__file__ = path
    follow()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "sitecustomize.py").write_text(_STARTUP.format(path=__file__))
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))
        exec(code_of(path, Path(path).read_bytes()), program.__dict__)


if __name__ == "__main__":
    main()
