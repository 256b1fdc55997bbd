"""Every public name of the package says what it is; in documented modules, every function what its arguments are."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import cordillera

PACKAGE = Path(cordillera.__file__).parent
REFERENCE = Path(__file__).parents[1] / "docs" / "reference"

Function = ast.FunctionDef | ast.AsyncFunctionDef


def _public(name: str) -> bool:
    return not name.startswith("_")


def _decorators(node: Function) -> set[str]:
    return {ast.unparse(decorator).split("(")[0].split(".")[-1] for decorator in node.decorator_list}


def _definitions(tree: ast.Module) -> Iterator[tuple[str, ast.ClassDef | Function, bool]]:
    """Public functions, classes and methods: qualified name, node, and whether it is a method."""
    for node in tree.body:
        if isinstance(node, Function) and _public(node.name):
            yield node.name, node, False
        elif isinstance(node, ast.ClassDef) and _public(node.name):
            yield node.name, node, False
            for member in node.body:
                if isinstance(member, Function) and _public(member.name):
                    yield f"{node.name}.{member.name}", member, True


def _aliases(tree: ast.Module) -> dict[str, str]:
    """Names that a module gives to annotations, and what they stand for."""
    pairs = [(node.targets[0], node.value) for node in tree.body if isinstance(node, ast.Assign)]
    return {target.id: ast.unparse(value) for target, value in pairs if isinstance(target, ast.Name)}


def _explained_by_help(argument: ast.arg, aliases: dict[str, str]) -> bool:
    """Arguments of commands are explained by the help that a person reads."""
    text = ast.unparse(argument.annotation) if argument.annotation else ""
    text = aliases.get(text, text)
    return "help=" in text and ("typer.Option" in text or "typer.Argument" in text)


def _arguments(node: Function, method: bool, aliases: dict[str, str]) -> list[str]:
    positional = (*node.args.posonlyargs, *node.args.args)
    arguments = [argument.arg for argument in positional if not _explained_by_help(argument, aliases)]
    if method and "staticmethod" not in _decorators(node):
        arguments = arguments[1:]
    arguments += [argument.arg for argument in node.args.kwonlyargs]
    arguments += [argument.arg for argument in (node.args.vararg, node.args.kwarg) if argument]
    return [name for name in arguments if _public(name)]


class _Class(NamedTuple):
    documented: bool
    bases: list[str]
    methods: set[str]  # those with a docstring


def _classes(tree: ast.Module) -> Iterator[tuple[str, _Class]]:
    """Every class of a module by its bare name."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            bases = [ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases]
            methods = {one.name for one in node.body if isinstance(one, Function) and ast.get_docstring(one)}
            yield node.name, _Class(bool(ast.get_docstring(node)), bases, methods)


def _documented_above(name: str, classes: dict[str, _Class]) -> bool:
    """Whether a method needs no text of its own: a base class documents it, or it computes what its class describes."""
    owner, _, method = name.rpartition(".")
    if owner not in classes:
        return False
    if method == "forward" and classes[owner].documented:
        return True
    return any(
        (parent in classes and method in classes[parent].methods) or _documented_above(f"{parent}.{method}", classes)
        for parent in classes[owner].bases
    )


def _documented() -> set[Path]:
    """Files of the modules on the reference pages, and of the functions that the package itself exports."""
    named = {name for page in REFERENCE.glob("*.md") for name in re.findall(r"(?m)^::: ([\w.]+)", page.read_text())}
    named |= {module for module, _ in cordillera._WHERE.values()}
    found = {PACKAGE.parent.joinpath(*name.split(".")) for name in named}
    return {path for name in found for path in (name.with_suffix(".py"), name / "__init__.py") if path.is_file()}


def _problems(path: Path, tree: ast.Module, *, arguments_too: bool) -> Iterator[tuple[str, str]]:
    """Problems, each with the name of a method whose docstring a base class may have, or nothing."""
    where, aliases = path.relative_to(PACKAGE.parent), _aliases(tree)
    if not ast.get_docstring(tree) and any(True for _ in _definitions(tree)):
        yield f"{where}: the module has no docstring", ""
    for name, node, method in _definitions(tree):
        place = f"{where}:{node.lineno} {name}"
        text = ast.get_docstring(node)
        if not text:
            accessor = isinstance(node, Function) and bool({"overload", "setter"} & _decorators(node))
            if not accessor:
                yield f"{place}: no docstring", name
            continue
        if not isinstance(node, Function) or not arguments_too:
            continue
        arguments = _arguments(node, method, aliases)
        unmentioned = [argument for argument in arguments if not re.search(rf"\b{re.escape(argument)}\b", text)]
        if len(arguments) > 1 and unmentioned:
            yield f"{place}: the docstring does not mention {', '.join(unmentioned)}", ""


def test_every_public_name_is_documented() -> None:
    """One sentence a name; in documented modules, functions of two or more arguments mention each of them."""
    documented = _documented()
    assert len(documented) > 50
    classes: dict[str, _Class] = {}
    found: list[tuple[str, str]] = []
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))  # hundreds at once take most of the time
        classes |= _classes(tree)
        found += _problems(path, tree, arguments_too=path in documented)
    problems = [problem for problem, name in found if not _documented_above(name, classes)]
    assert not problems, f"{len(problems)} problems\n" + "\n".join(problems)
