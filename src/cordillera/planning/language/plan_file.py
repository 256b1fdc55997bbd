"""``plan.json`` of a language model's job: the file that a search writes and ``cordillera train --plan`` reads."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field

from cordillera.errors import PlanError
from cordillera.files import read_sealed, sealed_json
from cordillera.planning.language.workload import Layout, Transformer, Workload
from cordillera.planning.pipeline.schedules import Schedule
from cordillera.topology import validate

SCHEMA = 1
"""Version of the content of ``plan.json``."""


@dataclass(frozen=True)
class WrittenPlan:
    """The best plan of a file, as far as training follows it.

    Attributes:
        file: Path of the file.
        workload: Workload that was planned.
        layout: Degrees of parallelism.
        order: Order of the dimensions on the devices, innermost first.
        schedule: Schedule of the pipeline.
    """

    file: str
    workload: Workload
    layout: Layout
    order: tuple[str, ...]
    schedule: Schedule

    @property
    def microbatches(self) -> int:
        """Number of microbatches of a step, over all copies of the model."""
        return self.schedule.microbatches * self.layout.data


class _MeshEntry(BaseModel):
    names: tuple[Literal["tensor", "context", "pipeline", "data"], ...]


class _ScheduleEntry(BaseModel):
    name: str
    csv: str


class _PlanEntry(BaseModel):
    layout: Layout
    mesh: _MeshEntry
    schedule: _ScheduleEntry


class _PlanContent(BaseModel):
    workload: Workload
    plans: list[_PlanEntry] = Field(min_length=1)


def is_llama(model: Transformer) -> bool:
    """Return whether a planned model has the blocks of a Llama: gated, dense, with fused attention."""
    return model.gated and model.fused_attention and model.experts is None


def plan_text(content: Mapping[str, Any]) -> str:
    """Return the text of ``plan.json``, with its version and a checksum.

    Args:
        content: Values of JSON, for a language or a recommendation model.
    """
    return sealed_json({"schema": SCHEMA, **content})


def read_plan(path: str | Path) -> dict[str, Any]:
    """Return the values of ``plan.json``; its ``plans`` are in order, with the best first.

    Args:
        path: Path of the file.

    Raises:
        PlanError: If the file does not exist, has another version, or does not match its checksum.
    """
    remedy = "name a plan.json of `cordillera plan`, or plan again"
    return read_sealed(path, error=PlanError, required=True, schema=SCHEMA, remedy=remedy)


def read_written_plan(path: str | Path) -> WrittenPlan:
    """Read and check the best plan of ``plan.json``.

    Args:
        path: Path of the file.

    Raises:
        PlanError: If the file cannot be read, is the plan of a recommendation model, or contradicts itself.
    """
    file, content = str(path), read_plan(path)
    if isinstance(content.get("workload"), dict) and "tables" in content["workload"]:
        raise PlanError(
            "is the plan of a recommendation model, which training does not follow",
            where=file,
            remedy="give the plan of a language model",
        )
    checked = validate(_PlanContent, content, file)
    workload, best = checked.workload, checked.plans[0]
    layout, schedule = best.layout, read_schedule(best.schedule.csv, best.schedule.name)
    problems = layout.problems(workload)
    for name, wanted in {
        "ranks": layout.pipeline,
        "stages": layout.stages,
        "microbatches": 0 if problems else layout.microbatches(workload),
    }.items():
        if not problems and getattr(schedule, name) != wanted:
            problems.append(f"the schedule has {getattr(schedule, name)} {name}, its layout {wanted}")
    if problems:
        raise PlanError("; ".join(problems), where=file, remedy="plan again")
    return WrittenPlan(file, workload, layout, tuple(reversed(best.mesh.names)), schedule)


def read_schedule(text: str, name: str) -> Schedule:
    """Read a schedule in the notation of :meth:`Schedule.to_csv`, in time bounded by the length of the text.

    Args:
        text: Text with one line for each rank.
        name: Name of the schedule.

    Raises:
        PlanError: If the text is not a schedule, or the schedule cannot be executed.
    """
    microbatches = [int(digits) for digits in re.findall(r"[FBIW]([0-9]{1,9})", text)]
    if max(microbatches, default=0) >= max(len(microbatches), 1):  # each needs an action of its own
        raise PlanError(f"microbatch {max(microbatches)} has none before it", where=f"schedule {name}")
    return Schedule.from_csv(text, name)
