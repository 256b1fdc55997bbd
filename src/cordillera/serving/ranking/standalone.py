"""Scores of an exported model, by torch alone: ``Scorer("FOLDER").predict([{"column": value, ...}, ...])``.

``cordillera export`` puts a copy of this file, called ``score.py``, beside ``model.pt2`` and ``schema.json``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

_MASK = 0xFFFFFFFFFFFFFFFF


class Scorer:
    """An exported model.

    Args:
        folder: Folder with ``model.pt2`` and ``schema.json``.

    Attributes:
        schema: Content of ``schema.json``.
        tasks: Names of the columns of the scores.
    """

    def __init__(self, folder: str | Path) -> None:
        self.schema = json.loads((Path(folder) / "schema.json").read_text(encoding="utf-8"))
        self.tasks = self.schema["tasks"]
        self.program = torch.export.load(str(Path(folder) / "model.pt2")).module()
        self._rows = {
            table: {value: row for row, value in enumerate(values, 1)}
            for table, values in self.schema["vocabularies"].items()
        }

    def predict(self, rows: Sequence[Mapping[str, Any]]) -> list[list[float]]:
        """Return the probabilities of each row by task; ``None`` and empty text are blanks.

        Raises:
            KeyError: If a row lacks a column.
            ValueError: If a value is one that the model does not take.
        """
        if not rows:
            return []
        dense = [[value for one in self.schema["dense"] for value in _numbers(row, one)] for row in rows]
        ids = [[self._row(row[one["name"]], one) for one in self.schema["categorical"]] for row in rows]
        lists = [self._padded(rows, one) for one in self.schema["lists"]]
        found = self.program(
            torch.tensor(dense, dtype=torch.float64).reshape(len(rows), -1),
            torch.tensor(ids, dtype=torch.int64).reshape(len(rows), -1),
            lists,
        )
        scores: list[list[float]] = found.tolist()
        return scores

    def _row(self, value: Any, feature: Mapping[str, Any]) -> int:
        """Return the row of a table that stands for an id."""
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

    def _padded(self, rows: Sequence[Mapping[str, Any]], feature: Mapping[str, Any]) -> torch.Tensor:
        """Return the rows of lists, filled up with -1 to one length."""
        found = []
        for row in rows:
            value = row[feature["name"]]
            entries = value.split(feature["separator"]) if isinstance(value, str) else value
            kept = [one for one in (() if entries is None else entries) if one is not None and one != ""]
            found.append([self._row(one, feature) for one in kept[-feature["max_length"] :]])
        longest = max(1, *map(len, found)) if found else 1
        return torch.tensor([one + [-1] * (longest - len(one)) for one in found], dtype=torch.int64)


def _numbers(row: Mapping[str, Any], feature: Mapping[str, Any]) -> list[float]:
    value, width = row[feature["name"]], feature["width"]
    values = [value] * width if value is None or value == "" else [value] if width == 1 else list(value)
    if len(values) != width:
        raise ValueError(f"{feature['name']}: {len(values)} numbers, {width} are expected")
    found = []
    for one in values:
        number = math.nan if one is None or one == "" else float(one)
        if math.isinf(number):
            raise ValueError(f"{feature['name']}: {one!r} is infinite")
        is_blank = one is None or one == ""
        if math.isnan(number) and not is_blank and feature["nan"] == "refuse":
            raise ValueError(f"{feature['name']}: NaN; None stands for a blank")
        if math.isnan(number) and feature["missing"] == "refuse":
            raise ValueError(f"{feature['name']}: is blank")
        found.append(number)
    return found


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
