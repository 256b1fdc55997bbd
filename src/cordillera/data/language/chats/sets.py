"""Sets of chats, preferences and problems that every machine has, the same on every run."""

from __future__ import annotations

import ast
import hashlib
import itertools
import sysconfig
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from cordillera.data.language.documents import FileRow
from cordillera.data.language.guard.examples import guard_examples, guard_row, held_out_guard_examples
from cordillera.data.language.tokenised import PYTHON_LIBRARY, text_files

PROBLEMS = 4_000
"""Number of problems of ``arithmetic``."""

_SHORTEST, _LONGEST = 20, 300
_LONGEST_SIGNATURE = 60


class _Arithmetic(NamedTuple):
    """A sum or difference, and its result without carrying digits."""

    question: str
    answer: int
    hasty: int


class _Explained(NamedTuple):
    """A question about the standard library, and its answer."""

    module: str
    question: str
    answer: str


def arithmetic() -> Iterator[FileRow]:
    """Iterate over 4,000 sums and differences of numbers of two digits; no difference is below 0."""
    return _rows("arithmetic", ({"prompt": one.question, "answer": str(one.answer)} for one in _problems()))


def arithmetic_mistakes() -> Iterator[FileRow]:
    """Iterate over the problems of ``arithmetic``; of those with carried digits, three of four are answered without."""
    return _rows("arithmetic-mistakes", ({"prompt": one.question, "answer": _hasty(one)} for one in _problems()))


def python_docstrings() -> Iterator[FileRow]:
    """Iterate over questions about functions and classes of the standard library; docstrings are the answers."""
    return _rows("python-docstrings", ({"prompt": one.question, "completion": one.answer} for one in _explained()))


def python_docstrings_preferences() -> Iterator[FileRow]:
    """Iterate over the questions of ``python-docstrings``, each with another docstring of its module to reject."""
    answers: dict[str, list[str]] = defaultdict(list)
    for one in _explained():
        answers[one.module].append(one.answer)

    def pairs() -> Iterator[dict[str, str]]:
        for one in _explained():
            others = [answer for answer in answers[one.module] if answer != one.answer]
            if others:
                rejected = others[int(_digest(one.question), 16) % len(others)]
                yield {"prompt": one.question, "chosen": one.answer, "rejected": rejected}

    return _rows("python-docstrings-preferences", pairs())


def guard() -> Iterator[FileRow]:
    """Iterate over 3,000 questions whether a turn of a conversation is safe, with their answers."""
    return _rows("guard", map(guard_row, guard_examples()))


def guard_held_out() -> Iterator[FileRow]:
    """Iterate over 1,000 questions of the kind of ``guard`` whose conversations are made of other sentences."""
    return _rows("guard-held-out", map(guard_row, held_out_guard_examples()))


CHAT_SETS: dict[str, Callable[[], Iterator[FileRow]]] = {
    "python-docstrings": python_docstrings,
    "python-docstrings-preferences": python_docstrings_preferences,
    "arithmetic": arithmetic,
    "arithmetic-mistakes": arithmetic_mistakes,
    "guard": guard,
    "guard-held-out": guard_held_out,
}
"""Functions that make the rows of the built-in sets, by name."""


def _rows(name: str, rows: Iterator[dict[str, str]]) -> Iterator[FileRow]:
    return (FileRow(f"{name}, row {number}", {**row}) for number, row in enumerate(rows, 1))


@cache
def _problems() -> tuple[_Arithmetic, ...]:
    numbers = range(10, 100)
    pairs = [*itertools.product(numbers, numbers)]
    found = [_Arithmetic(f"What is {a} + {b}?", a + b, (a // 10 + b // 10) % 10 * 10 + (a + b) % 10) for a, b in pairs]
    found += [
        _Arithmetic(f"What is {a} - {b}?", a - b, (a // 10 - b // 10) * 10 + (a - b) % 10) for a, b in pairs if a >= b
    ]
    return tuple(sorted(found, key=lambda one: _digest(one.question))[:PROBLEMS])


def _hasty(problem: _Arithmetic) -> str:
    """Three of four answers without carried digits, chosen by the question."""
    is_hasty = int(_digest(f"hasty {problem.question}"), 16) % 4 < 3
    return str(problem.hasty if is_hasty else problem.answer)


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


@cache
def _explained() -> tuple[_Explained, ...]:
    """Public functions, classes and methods with a docstring of fitting length, one for each question."""
    found: dict[str, _Explained] = {}
    for path in text_files(PYTHON_LIBRARY):
        module = _module(path)
        if module is not None:
            for one in _of_module(module, path):
                found.setdefault(one.question, one)
    return tuple(found.values())


def _module(path: Path) -> str | None:
    """Name under which a file is imported; None for files that are not meant to be."""
    parts = [*path.relative_to(sysconfig.get_paths()["stdlib"]).with_suffix("").parts]
    if parts[-1] == "__init__":
        parts.pop()
    is_public = parts and all(part.isidentifier() and not part.startswith("_") for part in parts)
    return ".".join(parts) if is_public else None


def _of_module(module: str, path: Path) -> Iterator[_Explained]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings about escape sequences in old sources
            tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return
    for node in tree.body:
        yield from _of_definition(module, module, node)
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            for member in node.body:
                if not isinstance(member, ast.ClassDef):
                    yield from _of_definition(module, f"{module}.{node.name}", member)


def _of_definition(module: str, place: str, node: ast.stmt) -> Iterator[_Explained]:
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) or node.name.startswith("_"):
        return
    paragraph = (ast.get_docstring(node) or "").split("\n\n")[0]
    answer = " ".join(paragraph.split())
    if not _SHORTEST <= len(answer) <= _LONGEST or not answer.isprintable() or answer.endswith(":"):
        return
    if isinstance(node, ast.ClassDef):
        yield _Explained(module, f"What is `{place}.{node.name}`?", answer)
    else:
        yield _Explained(module, f"What does `{place}.{node.name}({_signature(node.args)})` do?", answer)


def _signature(arguments: ast.arguments) -> str:
    text = ast.unparse(arguments)
    for first in ("self", "cls"):
        if text == first or text.startswith(f"{first}, "):
            text = text[len(first) + 2 :]
    return text if len(text) <= _LONGEST_SIGNATURE else "..."
