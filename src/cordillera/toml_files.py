"""Pydantic's mistakes in a file, in words for its author."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel

# Parts of pydantic's paths that are not in the file: branches of unions and validators.
_NOT_IN_FILE = re.compile(r"int$|tuple\[|constrained|function-")


_FEW = 12  # keys that an error lists


def explain(
    entries: Iterable[Mapping[str, Any]], keys: Callable[[Sequence[Any]], Sequence[str]], whole: str = "file"
) -> list[tuple[str, str]]:
    """Return mistakes as pairs of a dotted path and a sentence, one for each path.

    Args:
        entries: Entries of ``ValidationError.errors()``.
        keys: Function that returns the known keys at a place, for the hint at an unknown key.
        whole: Name for the place of mistakes without a place in the file.
    """
    problems: dict[str, str] = {}
    for entry in entries:
        unknown = entry["type"] == "extra_forbidden"  # the last part of the path is then a key of the file
        kept = entry["loc"][-1:] if unknown else ()
        location = [part for part in entry["loc"][: len(entry["loc"]) - len(kept)] if not _NOT_IN_FILE.match(str(part))]
        location += kept
        path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).lstrip(".")
        message = re.sub(r"^(Value error|Assertion failed), ", "", entry["msg"])
        if unknown:
            known = keys(location[:-1])
            close = nearest_key(str(location[-1]), known)
            few = f"; keys are {', '.join(known)}" if known and len(known) <= _FEW else ""
            hint = few if close is None else f"; did you mean {close!r}?"
            message = f"is not a key here{hint}"
        elif entry["type"] == "missing":
            message = "is missing"
        elif entry["type"] == "too_short" and any(name.startswith(f"{path}[") for name in problems):
            continue  # its entries were refused, not left out
        else:
            message = f"{message[0].lower()}{message[1:]}"
            if not isinstance(entry.get("input"), dict | list):
                given = repr(entry["input"])
                message += f", got {given if len(given) <= 100 else given[:97] + '...'}"
        problems.setdefault(path or whole, message)
    return list(problems.items())


def nearest_key(name: str, known: Sequence[str]) -> str | None:
    """Return the known key that a ``name`` stands for: a word, the initials or a misspelling of it; None if unclear."""
    short = name.lower().replace("_", "")
    words = [key for key in known if short in key.split("_")]
    initials = [key for key in known if "".join(part[:1] for part in key.split("_")) == short]
    for found in (words, initials):
        if len(found) == 1:
            return found[0]
    return next(iter(difflib.get_close_matches(name, known, n=1)), None)


def known_keys(model: type[BaseModel], path: Iterable[Any]) -> list[str]:
    """Return the keys that ``model`` allows at the place in a file to which ``path`` leads; none without a section."""
    here: type[BaseModel] | None = model
    for part in path:
        if isinstance(part, str):
            fields = _fields(here)
            here = next(models_of(fields[part].annotation), None) if part in fields else None
    return list(_fields(here))


def _fields(model: type[BaseModel] | None) -> dict[str, Any]:
    fields = model.model_fields.items() if model is not None else ()
    return {field.alias or name: field for name, field in fields}


def models_of(annotation: Any) -> Iterator[type[BaseModel]]:
    """Iterate over the classes in a field's annotation, including those within unions and lists."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from models_of(part)
