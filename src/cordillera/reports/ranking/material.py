"""What a report of a ranking run is made of."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cordillera.reports.page import (
    Pictures,
)
from cordillera.run import RunStatus
from cordillera.training.ranking.evaluation import Evaluation, number

SHOWN_SEGMENTS = 12


@dataclass(frozen=True)
class Material:
    """Content of the run's folder, read once; missing files are empty."""

    name: str
    recipe_text: str
    recipe: dict[str, Any]
    train: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    progressive: list[dict[str, Any]]
    evaluation: Evaluation | None
    model: dict[str, Any]
    environment: dict[str, Any]
    status: RunStatus | None
    warnings: list[str] = field(default_factory=list)
    pictures: Pictures = field(default_factory=Pictures)

    @property
    def tasks(self) -> list[str]:
        """Names of the tasks."""
        if self.evaluation is not None:
            return list(self.evaluation.tasks)
        return list(self.evaluations[-1]["tasks"]) if self.evaluations else []

    @property
    def best(self) -> dict[str, Any] | None:
        """The first validation record with the lowest mean NE."""
        scored = [(mean_ne(record), record) for record in self.evaluations]
        scored = [(ne, record) for ne, record in scored if math.isfinite(ne)]
        return min(scored, key=lambda pair: pair[0])[1] if scored else None


def interval_text(pair: Sequence[float] | None, digits: int = 4) -> str:
    """Return an interval as text; empty for None."""
    return f"{pair[0]:.{digits}f} to {pair[1]:.{digits}f}" if pair else ""


def mean_ne(record: Mapping[str, Any]) -> float:
    """Return the mean NE over the tasks of a validation record."""
    values = [number(task.get("ne")) for task in record["tasks"].values()]
    return sum(values) / len(values)
