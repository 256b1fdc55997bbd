"""Classes of pydantic that describe a file, in words for its author: mistakes, what keys mean, and what differs."""

from __future__ import annotations

import difflib
import inspect
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, get_args

from pydantic import AfterValidator, BaseModel

# Parts of pydantic's paths that are not in the file: branches of unions and validators.
_NOT_IN_FILE = re.compile(r"(int|str|float|bool|none)$|(tuple|list|dict|literal)\[|constrained|function-|nullable")


MISTAKES = 100
"""Largest number of mistakes of a file that an error explains."""

_MOST_MEANT = 3  # keys that a question names
_OTHERS = {
    "embedding_dim": "all features have the width model.embedding_dim",
    "share_embedding": "features that name the same table share it",
    "vocab_size": "did you mean 'num_embeddings'?",
}  # keys of a feature in other libraries
_FEW = 12  # keys that an error lists

_SECTION, _ARRAY, _WHOLE = "must be a section of keys", "must be an array", "must be a whole number"
_SENTENCES = {
    "bool_parsing": "must be true or false",
    "bool_type": "must be true or false",
    "dict_type": _SECTION,
    "finite_number": "must be a finite number",
    "float_parsing": "must be a number",
    "float_type": "must be a number",
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be at least {ge}",
    "int_from_float": _WHOLE,
    "int_parsing": _WHOLE,
    "int_parsing_size": "must be a whole number of fewer digits",
    "int_type": _WHOLE,
    "less_than": "must be below {lt}",
    "less_than_equal": "must be at most {le}",
    "list_type": _ARRAY,
    "literal_error": "must be {expected}",
    "mapping_type": _SECTION,
    "missing": "is missing",
    "model_attributes_type": _SECTION,
    "model_type": _SECTION,
    "string_too_long": "must have at most {max_length} characters",
    "string_too_short": "must have at least {min_length} characters",
    "string_type": "must be text",
    "string_unicode": "must be text of valid unicode characters",
    "too_long": "must have at most {max_length} entries",
    "too_short": "must have at least {min_length} entries",
    "tuple_type": _ARRAY,
    "union_tag_invalid": "must be one of {expected_tags}",
    "union_tag_not_found": "must say which of several it is by {discriminator}",
}
"""Messages by pydantic's error type, with placeholders for the context's values."""


def text_of(pattern: str, words: str) -> AfterValidator:
    """Return a validator that a whole text matches the expression ``pattern``; ``words`` describe the valid texts."""
    whole = re.compile(pattern)

    def check(text: str) -> str:
        if not whole.fullmatch(text):
            raise ValueError(f"must be {words}")
        return text

    return AfterValidator(check)


def explain(
    entries: Sequence[Mapping[str, Any]],
    keys: Callable[[Sequence[Any]], Sequence[str]],
    whole: str = "file",
    most: int = MISTAKES,
) -> list[tuple[str, str]]:
    """Return mistakes as pairs of a dotted path and a sentence, one for each path.

    Args:
        entries: Entries of ``ValidationError.errors()``.
        keys: Function that returns the known keys at a place, for the hint at an unknown key.
        whole: Name for the place of mistakes without a place in the file.
        most: Number of entries to explain; the last pair then counts the others.
    """
    if len(entries) > most:
        return [*explain(entries[:most], keys, whole, most), (whole, f"and {len(entries) - most:,} more mistakes")]
    problems: dict[str, list[str]] = {}
    given: dict[str, str] = {}
    for entry in entries:
        unknown = entry["type"] == "extra_forbidden"  # the last part of the path is then a key of the file
        kept = entry["loc"][-1:] if unknown else ()
        location = [part for part in entry["loc"][: len(entry["loc"]) - len(kept)] if not _NOT_IN_FILE.match(str(part))]
        location += kept
        path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).lstrip(".")
        if unknown:
            known = keys(location[:-1])
            few = f"; keys are {', '.join(known)}" if known and len(known) <= _FEW else ""
            name = str(location[-1])
            inside = [f"{key}.{name}" for key in known if len(location) == 1 and name in keys([key])]
            hint = _meant(inside) or _nearest_key(name, known) or few
            message = f"is not a key here{hint}"
        elif entry["type"] == "too_short" and any(name.startswith(f"{path}[") for name in problems):
            continue  # its entries were refused, not left out
        else:
            message = _sentence(entry)
            if entry["type"] != "missing":
                given.setdefault(path or whole, _given(entry))
        problems.setdefault(path or whole, []).append(message)
    return [
        (path, _joined(messages) + given.get(path, ""))
        for path, messages in problems.items()
        if not _is_outer(path, messages, problems)
    ]


def _sentence(entry: Mapping[str, Any]) -> str:
    """Return the message for an error entry of pydantic."""
    if entry["type"] in ("value_error", "assertion_error", "name"):
        message = re.sub(r"^(Value error|Assertion failed), ", "", entry["msg"])
        return f"{message[0].lower()}{message[1:]}"
    context = entry.get("ctx", {})
    numbers = {name: f"{value:g}" if isinstance(value, float) else value for name, value in context.items()}
    sentence = _SENTENCES.get(entry["type"], "is not valid here").format(**numbers)
    return re.sub(r"\b1 (entrie|character)s$", lambda match: f"1 {match[1].replace('ie', 'y')}", sentence)


def _joined(messages: Sequence[str]) -> str:
    """Merge the messages of a union's branches on one value; a violated limit is preferred to another type."""
    limits = [message for message in messages if re.match(r"must (be (at|above|below)|have) ", message)]
    first, *others = dict.fromkeys(limits[:1] or messages)
    if not all(message.startswith("must be ") for message in (first, *others)):
        return first
    return " or ".join([first, *(message.removeprefix("must be ") for message in others)])


def _given(entry: Mapping[str, Any]) -> str:
    """Return the value of an entry of pydantic's, for the end of its sentence; of an array or a section, the kind."""
    value = entry.get("input")
    if isinstance(value, Mapping | list | tuple):
        kind = "a section" if isinstance(value, Mapping) else "an array"
        return f", got {kind}" if entry["type"].endswith("_type") else ""
    text = repr(value)
    return f", got {text if len(text) <= 100 else text[:97] + '...'}"


def _is_outer(path: str, messages: Sequence[str], problems: Mapping[str, object]) -> bool:
    """Whether one branch of a union refuses the kind of a value in which another branch finds a mistake."""
    kinds = all(message in _SENTENCES.values() and message.startswith("must be ") for message in messages)
    return kinds and any(name.startswith((f"{path}[", f"{path}.")) for name in problems)


def meant(name: str, known: Iterable[str]) -> str:
    """Return the question whether the one of ``known`` names is meant that is spelt most like ``name``, if any is."""
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _nearest_key(name: str, known: Sequence[str]) -> str:
    """Like :func:`meant`, but also find a key that has ``name`` as one of its words or as its initials."""
    if name in _OTHERS and "num_embeddings" in known:
        return f"; {_OTHERS[name]}"
    short = name.lower().replace("_", "")
    words = [key for key in known if short in key.split("_")]
    initials = [key for key in known if "".join(part[:1] for part in key.split("_")) == short]
    return _meant(words) or _meant(initials) or meant(name, known)


def _meant(keys: Sequence[str]) -> str:
    """Return the question whether one of ``keys`` is meant, if there are some and not too many."""
    return f"; did you mean {' or '.join(map(repr, keys))}?" if 0 < len(keys) <= _MOST_MEANT else ""


def known_keys(model: type[BaseModel], path: Iterable[Any]) -> list[str]:
    """Return the keys that ``model`` allows at the place in a file to which ``path`` leads; none without a section."""
    here: type[BaseModel] | None = model
    for part in path:
        if isinstance(part, str):
            fields = _fields(here)
            here = next(models_of(fields[part].annotation), None) if part in fields else None
    return list(_fields(here))


def field_descriptions(config: type[BaseModel]) -> dict[str, str]:
    """Return the meaning of each field of a Config: its ``Field`` description, or its ``Attributes`` entry.

    Roles of docstrings (``:func:``) are left out.
    """
    found: dict[str, str] = {}
    for base in reversed(config.__mro__):
        text = inspect.cleandoc(base.__doc__ or "") if issubclass(base, BaseModel) and base is not BaseModel else ""
        _, _, block = text.partition("Attributes:\n")
        for match in re.finditer(r"^    (\w+): (.*(?:\n      +.*)*)", block, re.MULTILINE):
            meaning = re.sub(r"\s+", " ", match[2])
            found[match[1]] = re.sub(r":[a-z]+:`(?:~[\w.]*\.)?([^`]+)`", r"`\1`", meaning)
    found |= {name: field.description for name, field in config.model_fields.items() if field.description}
    return found


def _fields(model: type[BaseModel] | None) -> dict[str, Any]:
    fields = model.model_fields.items() if model is not None else ()
    return {field.alias or name: field for name, field in fields}


def models_of(annotation: Any) -> Iterator[type[BaseModel]]:
    """Iterate over the classes in a field's annotation, including those within unions and lists."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from models_of(part)


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return what differs from the nested mapping ``before`` to ``now``: each key, also in lists, with both values."""
    return list(_differences("", before, now))


def _differences(place: str, before: Any, now: Any) -> Iterator[str]:
    if before == now:
        return
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for key in {**before, **now}:
            inside = f"{place}.{key}" if place else str(key)
            yield from _differences(inside, before.get(key, _ABSENT), now.get(key, _ABSENT))
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now) and _are_nested(before, now):
        for number, (one, other) in enumerate(zip(before, now, strict=True)):
            yield from _differences(f"{place}[{number}]", one, other)
    else:
        yield f"{place}: {_short(before)} -> {_short(now)}"


def _are_nested(*lists: list[Any]) -> bool:
    return any(isinstance(one, dict | list) for items in lists for one in items)


_ABSENT = object()


def _short(value: Any) -> str:
    text = "absent" if value is _ABSENT else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def few(changes: Sequence[str]) -> str:
    """Return the first of ``changes`` in one line, and the number of others."""
    more = [f"and {len(changes) - 4} more"] if len(changes) > 4 else []
    return "; ".join([*changes[:4], *more])


def flat_values(content: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of ``content``, a nested mapping, by dotted key after a ``prefix``."""
    found: dict[str, Any] = {}
    for key, value in content.items():
        found |= (
            flat_values(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}": value}
        )
    return found
