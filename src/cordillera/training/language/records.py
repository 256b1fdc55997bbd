"""The files of a language run, read once and checked: records as numbers, other files as they are.

A missing or null number is NaN here, and one beyond 1e100 is infinite. A value that should be a number and is not is an
error that names file and line.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from cordillera.distributed.mesh import ParallelConfig
from cordillera.errors import DataError
from cordillera.mistakes import explain
from cordillera.run import Run, read_object, read_recipe

Record = dict[str, float]

_KEYS = {
    "train": (
        *("step", "tokens", "documents", "loss", "gradient_norm", "learning_rate", "targets", "skipped", "seconds"),
        *(
            "steps",
            "tokens_per_second",
            "flops_per_second",
            "mfu",
            "imbalance",
            "delay",
            "expert_imbalance",
            "memory_bytes",
        ),
        *("communication_seconds", "exposed_seconds", "data_seconds"),
    ),
    "evaluation": ("step", "tokens", "loss", "perplexity", "bits_per_byte", "targets", "seconds"),
    "checkpoint": ("step", "tokens", "seconds", "bytes"),
    "skipped": ("step", "tokens", "loss", "gradient_norm"),
    "resumed": ("step", "world"),
}
SHARES = ("accuracy", "reward", "solved")
"""Shares of right answers that objectives of post-training measure."""

_LOSSES = {"reward": "nats a pair", "dpo": "nats a pair", "grpo": "of the objective"}
_SIGNED = ("loss", "bits_per_byte")
_LARGEST = 1e100


class LanguageRecords:
    """Content of a language run's folder, read once; missing files are empty.

    Attributes:
        validations: Records of evaluations by split.
        events: Kinds and records of checkpoints, skipped steps and resumptions, in order.
        final: Evaluation of ``evaluation.json``; None without the file.
        mesh: Mesh of the job; None if ``model.json`` does not hold one.
        status: Progress of training; None for runs of earlier versions, which did not record it.

    Raises:
        DataError: If a file does not have the expected content.
        RunError: If a line of ``metrics.jsonl`` other than the last is not JSON or does not match its checksum.
    """

    def __init__(self, run: Run) -> None:
        self.name, self.status = run.name, run.status()
        self.recipe_text, self.recipe = read_recipe(run)
        self.model, self.mesh = _read_model(run.folder / "model.json")
        self.environment = read_object(run.folder / "environment.json")
        self.train: list[Record] = []
        self.validations: dict[str, list[Record]] = {}
        self.events: list[tuple[str, Record]] = []
        for line, content in enumerate(run.metrics(), 1):
            kind = content.get("kind")
            if not isinstance(kind, str) or kind not in _KEYS:
                continue
            keys = (*_KEYS[kind], *SHARES) if kind in ("train", "evaluation") else _KEYS[kind]
            record = _numbers(_flat(content), keys, f"{run.folder / 'metrics.jsonl'}, line {line}")
            if kind == "train":
                self.train.append(record)
            elif kind == "evaluation":
                self.validations.setdefault(str(content.get("split", "validation")), []).append(record)
            else:
                self.events.append((kind, record))
        path = run.folder / "evaluation.json"
        found = read_object(path)
        if found and found.get("kind") != "language":
            raise DataError("is not an evaluation of a language model", where=str(path))
        self.final = _numbers(_flat(found), (*_KEYS["evaluation"], *SHARES), str(path)) if found else None
        self.final_split = str(found.get("split", "validation"))

    @property
    def unit_of_loss(self) -> str:
        """Unit of the loss, for people."""
        return _LOSSES.get(str(self.model.get("objective")), "nats a token")

    def of_kind(self, kind: str) -> list[Record]:
        """Return the events of a ``kind``: ``checkpoint``, ``skipped`` or ``resumed``."""
        return [record for found, record in self.events if found == kind]

    def setting(self, section: str, key: str) -> Any:
        """Return the value of ``key`` in the recipe's ``section``; None if it is not set."""
        found = self.recipe.get(section)
        return found.get(key) if isinstance(found, dict) else None

    @property
    def replicas(self) -> int:
        """Number of replicas that the run is configured for."""
        found = self.setting("fault_tolerance", "replicas")
        return found if isinstance(found, int) and found > 1 else 1

    @property
    def headline(self) -> tuple[str, Record] | None:
        """The final evaluation of the run with its split, or else the last one on validation data."""
        if self.final is not None:
            return self.final_split, self.final
        for split in ("validation", *self.validations):
            if self.validations.get(split):
                return split, self.validations[split][-1]
        return None

    @property
    def skipped(self) -> float:
        """Number of steps that left the weights unchanged; NaN if nothing was recorded."""
        counted = self.last("skipped")
        listed = len(self.of_kind("skipped"))
        return max(listed, counted) if math.isfinite(counted) else float(listed) if listed else counted

    def reached(self, key: str) -> float:
        """Return the largest ``step`` or ``tokens`` of all records; NaN without records."""
        records = [*self.train, *(record for kind, record in self.events if kind != "resumed")]
        return max((record[key] for record in records if math.isfinite(record[key])), default=math.nan)

    @property
    def warning(self) -> str:
        """Warning for readers of the figures of an incomplete run; empty for a complete one."""
        if self.status is not None:
            return self.status.warning
        steps, wanted = self.reached("step"), self.setting("training", "steps")
        if self.final is not None or not isinstance(wanted, int) or not steps < wanted:
            return ""  # runs of earlier versions record no more than this
        return f"This run is not finished: its records end at step {steps:,.0f} of {wanted:,}."

    def last(self, key: str) -> float:
        """Return the newest finite number of ``key`` in the records of training; NaN if there is none."""
        return next((record[key] for record in reversed(self.train) if math.isfinite(record[key])), math.nan)

    def size(self, key: str) -> float:
        """Return a number of ``model.json`` by its ``key``; NaN if it is missing."""
        return _number(self.model.get(key), key, "model.json")

    @property
    def parameters(self) -> float:
        """Number of parameters of the model; NaN if unknown."""
        return self.size("parameters")

    @property
    def validating(self) -> float:
        """Seconds of all evaluations; NaN if unknown."""
        return total([record for found in self.validations.values() for record in found], "seconds")


def total(records: Sequence[Record], key: str) -> float:
    """Return the sum of the finite values of ``key`` over ``records``; NaN if there are none."""
    found = [record[key] for record in records if math.isfinite(record[key])]
    return math.fsum(found) if found else math.nan


def mean(records: Sequence[Record], key: str, weight: str) -> float:
    """Return the mean of ``key`` over records, weighted by the key ``weight``; NaN if both are never known."""
    pairs = [(record[key], record[weight]) for record in records]
    pairs = [(a, b) for a, b in pairs if math.isfinite(a) and math.isfinite(b) and b > 0]
    whole = math.fsum(b for _, b in pairs)
    return math.fsum(a * (b / whole) for a, b in pairs) if pairs else math.nan


def share(records: Sequence[Record], key: str) -> float:
    """Return the part of the time of ``records`` that the seconds of ``key`` take; NaN if not recorded."""
    known = [one for one in records if math.isfinite(one[key]) and 0 < one["seconds"] < math.inf]
    return total(known, key) / total(known, "seconds")


def _read_model(path: Path) -> tuple[dict[str, Any], ParallelConfig | None]:
    """Return ``model.json`` after checking the types of its parts, and the mesh that it names."""
    model = read_object(path)
    for key in ("config", "mesh", "data"):
        if not isinstance(model.get(key), dict | None):
            raise DataError(f"{key} is not an object", where=str(path), remedy="restore the file")
    for key in ("parameters", "flops_per_token", "world"):
        _number(model.get(key), key, str(path))
    try:
        return model, None if model.get("mesh") is None else ParallelConfig.model_validate(model["mesh"])
    except ValidationError as error:
        found = explain(error.errors(), lambda place: list(ParallelConfig.model_fields), "mesh")
        raise DataError("; ".join(f"{key}: {text}" for key, text in found), where=f"{path}, mesh") from error


def _flat(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a record with what an objective measured beside the other numbers."""
    measures = content.get("measures")
    return {**content, **measures} if isinstance(measures, dict) else content


def _numbers(content: Mapping[str, Any], keys: Sequence[str], where: str) -> Record:
    return {key: _number(content.get(key), key, where) for key in keys}


def _number(value: Any, key: str, where: str) -> float:
    if value is None:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise DataError(f"{key} is no number: {str(value)[:40]!r}", where=where, remedy="restore the file")
    if value < 0 and key not in _SIGNED:
        raise DataError(f"{key} is negative: {str(value)[:40]}", where=where, remedy="restore the file")
    if abs(value) > _LARGEST:
        return math.inf if value > 0 else -math.inf
    return float(value)
