"""Scores of an exported model, without the library: ``Scorer("FOLDER").predict([{"column": value, ...}, ...])``.

``cordillera export`` puts a copy of this file, called ``score.py``, beside ``schema.json`` and the programs.
``model.pt2`` and ``model-compiled.pt2`` need torch; ``model.onnx`` needs onnxruntime and NumPy.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

_MASK = 0xFFFFFFFFFFFFFFFF


class Scorer:
    """An exported model.

    Args:
        folder: Folder of the export.
        program: Name of the program in the folder: ``model.pt2``, ``model-compiled.pt2`` or ``model.onnx``.

    Attributes:
        schema: Content of ``schema.json``.
        tasks: Names of the columns of the scores.

    Raises:
        ImportError: If what the program needs is not installed.
        ValueError: If a file is damaged, or the program is of another export.
    """

    def __init__(self, folder: str | Path, program: str = "model.pt2") -> None:
        self.schema = _read_schema(Path(folder) / "schema.json")
        path, programs = Path(folder) / program, self.schema["programs"]
        for name in sorted({path.name, *(one for one in programs if one.startswith(path.name))}):
            if digest_of(path.with_name(name)) != programs.get(name):
                raise ValueError(f"{name} is damaged or of another export than schema.json: export the model again")
        self.tasks = self.schema["tasks"]
        self._score = (_onnx if program.endswith(".onnx") else _torch)(str(Path(folder) / program))
        self._rows, self._places = (
            {table: {value: row for row, value in enumerate(values, 1)} for table, values in self.schema[key].items()}
            for key in ("vocabularies", "ids")
        )

    def predict(self, rows: Sequence[Mapping[str, Any]]) -> list[list[float]]:
        """Return the probabilities of each row by task; ``None`` and empty text are blanks.

        Raises:
            ValueError: If there is no list of rows, a row lacks a column, a value is one that the model does not
                take, or a score is NaN.
        """
        if not isinstance(rows, Sequence):
            raise ValueError(f"rows must be a list of a dict for each row, got {type(rows).__name__}")
        if not rows:
            return []
        wanted = {one["name"] for kind in ("dense", "categorical", "lists") for one in self.schema[kind]}
        for place, row in enumerate(rows):
            if not isinstance(row, Mapping):
                raise ValueError(f"row {place} must be a dict, got {type(row).__name__}")
            if absent := wanted - row.keys():
                raise ValueError(f"row {place} has no {min(absent)!r}; give every column, None for a blank")
        dense = [[value for one in self.schema["dense"] for value in _numbers(row, one)] for row in rows]
        ids = [[self._row(row[one["name"]], one) for one in self.schema["categorical"]] for row in rows]
        lists = [self._padded(rows, one) for one in self.schema["lists"]]
        scores = self._score(dense, ids, lists)
        for place, found in enumerate(scores):
            if not all(map(math.isfinite, found)):
                raise ValueError(f"row {place}: the score is NaN; is a value far beyond those of training?")
        return scores

    def _row(self, value: Any, feature: Mapping[str, Any]) -> int:
        """Return the row of a table that stands for an id; of dynamic tables, ids without a row share the first."""
        row, places = self._encoded(value, feature), self._places.get(feature["table"])
        return row if places is None else places.get(row, 0)

    def _encoded(self, value: Any, feature: Mapping[str, Any]) -> int:
        """Return an id as the schema encodes it."""
        table = feature["table"]
        text = _text(value, table in self.schema["whole"], feature["name"])
        if feature["encoding"] == "vocabulary":
            return self._rows[table].get(text, 0) if text is not None else 0
        size = feature["rows"]
        if feature["encoding"] == "hash":
            return _hash(text, table) % (size - 1) + 1 if text is not None and size > 1 else 0
        if text is None or not text.lstrip("-").isdigit() or not 0 <= int(text) < size:
            raise ValueError(f"{feature['name']}: {value!r} is no id from 0 to {size - 1}")
        return int(text)

    def _padded(self, rows: Sequence[Mapping[str, Any]], feature: Mapping[str, Any]) -> list[list[int]]:
        """Return the rows of lists, filled up with -1 to one length."""
        found = []
        for row in rows:
            value = row[feature["name"]]
            entries = value.split(feature["separator"]) if isinstance(value, str) else value
            if entries is not None and not isinstance(entries, Iterable):
                raise ValueError(f"{feature['name']}: must be a list of ids, got {type(entries).__name__}")
            kept = [one for one in (() if entries is None else entries) if one is not None and one != ""]
            found.append([self._row(one, feature) for one in kept[-feature["max_length"] :]])
        longest = max(1, *map(len, found)) if found else 1
        return [one + [-1] * (longest - len(one)) for one in found]


def digest_of(path: Path) -> str:
    """Return the checksum of a file."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while part := file.read(1 << 20):
            digest.update(part)
    return digest.hexdigest()


def seal_of(schema: Mapping[str, Any]) -> str:
    """Return the checksum of a schema without its key ``seal``."""
    return hashlib.sha256(json.dumps({k: v for k, v in schema.items() if k != "seal"}).encode()).hexdigest()


def _read_schema(path: Path) -> dict[str, Any]:
    try:
        schema: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if schema["seal"] == seal_of(schema):
            return schema
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass  # treated like a wrong checksum
    raise ValueError(f"{path} is damaged: export the model again")


def _torch(path: str) -> Callable[..., list[list[float]]]:
    """Return the program of torch as a function of numbers, rows of tables, and rows of lists."""
    import torch

    is_compiled = path.endswith("-compiled.pt2")
    program: Any = torch._inductor.aoti_load_package(path) if is_compiled else torch.export.load(path).module()

    def score(dense: list[list[float]], ids: list[list[int]], lists: list[list[list[int]]]) -> list[list[float]]:
        found = program(
            torch.tensor(dense, dtype=torch.float64).reshape(len(dense), -1),
            torch.tensor(ids, dtype=torch.int64).reshape(len(ids), -1),
            [torch.tensor(one, dtype=torch.int64) for one in lists],
        )
        scores: list[list[float]] = found.tolist()
        return scores

    return score


def _onnx(path: str) -> Callable[..., list[list[float]]]:
    """Return the program of ONNX as a function of numbers, rows of tables, and rows of lists."""
    import numpy as np
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    wanted = {one.name for one in session.get_inputs()}

    def score(dense: list[list[float]], ids: list[list[int]], lists: list[list[list[int]]]) -> list[list[float]]:
        given: dict[str, Any] = {"dense": np.array(dense, np.float64).reshape(len(dense), -1)}
        given["ids"] = np.array(ids, np.int64).reshape(len(ids), -1)
        given |= {f"list_{place}": np.array(one, np.int64) for place, one in enumerate(lists)}
        (found,) = session.run(None, {name: value for name, value in given.items() if name in wanted})
        scores: list[list[float]] = found.tolist()
        return scores

    return score


def _numbers(row: Mapping[str, Any], feature: Mapping[str, Any]) -> list[float]:
    value, width = row[feature["name"]], feature["width"]
    is_single = width == 1 or not isinstance(value, Iterable)
    values = [value] * width if value is None or value == "" else [value] if is_single else list(value)
    if len(values) != width:
        raise ValueError(f"{feature['name']}: {len(values)} numbers, {width} are expected")
    found = []
    for one in values:
        number = math.nan if one is None or one == "" else _number(one, feature["name"])
        if math.isinf(number):
            raise ValueError(f"{feature['name']}: {one!r} is infinite")
        is_blank = one is None or one == ""
        if math.isnan(number) and not is_blank and feature["nan"] == "refuse":
            raise ValueError(f"{feature['name']}: NaN; None stands for a blank")
        if math.isnan(number) and feature["missing"] == "refuse":
            raise ValueError(f"{feature['name']}: is blank")
        found.append(number)
    return found


def _number(value: Any, name: str) -> float:
    """Return a number as a float; text and truth values are none."""
    if isinstance(value, (str, bytes, bool)) or not hasattr(value, "__float__"):
        kind = {str: "text", bool: "a truth value"}.get(type(value), type(value).__name__)
        raise ValueError(f"{name}: must be a number, got {kind}; write numbers without quotation marks")
    try:
        return float(value)
    except (OverflowError, TypeError):
        raise ValueError(f"{name}: must be a number that fits into 64 bits") from None


def _text(value: Any, whole: bool, name: str) -> str | None:
    """Return an id as the vocabulary writes it."""
    if value is None or value == "":
        return None
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        if not value.is_integer() or abs(value) > 2**53:
            raise ValueError(f"{name}: {value!r} is not an id")
        return str(int(value))
    text = str(value)
    head, point, tail = text.partition(".")
    digits = head.removeprefix("-")
    plain = (digits == "0" and head == digits) or (digits.isdecimal() and not digits.startswith("0"))
    return head if whole and point and tail and not tail.strip("0") and plain else text


def _hash(text: str, salt: str) -> int:
    """Return FNV-1a over the bytes of salt and text, then the finaliser of SplitMix64."""
    state = 0xCBF29CE484222325
    for byte in salt.encode() + text.encode():
        state = ((state ^ byte) * 0x100000001B3) & _MASK
    z = (state + 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
