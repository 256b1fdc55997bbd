"""Meshes whose pipeline runs a schedule that the planner made, and the mesh of a written plan."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, get_args

from pydantic import Field, ValidationError, model_validator

from cordillera.distributed.mesh import Family, ParallelConfig
from cordillera.errors import PlanError
from cordillera.planning.language.plan_file import WrittenPlan, read_schedule
from cordillera.planning.pipeline.schedules import Schedule

MOST_TABLE = 1 << 19
"""Largest number of characters of a schedule in a recipe, which is a file of at most 1 MiB."""


class PlannedParallelConfig(ParallelConfig):
    """Distribution of a job over processes, with a schedule of a known family or a planned one.

    Attributes:
        table: Actions of every pipeline rank, which replace those of ``schedule``: one line for each rank in
            the notation of ``torch.distributed.pipelining``, such as ``0F0,0F1,0B0,0B1``, for one number of
            microbatches. ``cordillera train --plan`` writes it. None for a schedule of the family.
    """

    table: str | None = Field(None, max_length=MOST_TABLE)

    @model_validator(mode="before")
    @classmethod
    def _takes_other_meshes(cls, value: Any) -> Any:
        if isinstance(value, ParallelConfig) and not isinstance(value, cls):
            return value.model_dump(exclude_unset=True)
        return value

    @model_validator(mode="after")
    def _table_fits(self) -> PlannedParallelConfig:
        if self.table is None:
            return self
        try:
            schedule = read_schedule(self.table, "table")
        except PlanError as error:
            raise ValueError(str(error).replace("\n  ->", ";")) from error
        if (schedule.ranks, schedule.stages) != (self.pipeline, self.stages):
            raise ValueError(
                f"table is for pipeline {schedule.ranks} with {schedule.stages} stages, not for pipeline "
                f"{self.pipeline} with {self.stages}; leave table out, or give --set parallel.table=none"
            )
        ranks = range(self.pipeline)
        loop = tuple(stage % self.pipeline for stage in range(self.stages))
        if schedule.rank_of not in (loop, (*ranks, *reversed(ranks))):
            raise ValueError("table places its stages on the ranks neither in a loop nor in a V")
        return self

    def make_schedule(self, microbatches: int) -> Schedule:
        """Return the pipeline's schedule; with a ``table`` it is the table's, whatever the number of microbatches.

        Args:
            microbatches: Number of microbatches of each copy of the model.

        Raises:
            PlanError: If the family has no schedule for so few microbatches.
        """
        if self.table is None:
            return super().make_schedule(microbatches)
        return read_schedule(self.table, "table")


def planned_mesh(plan: WrittenPlan) -> PlannedParallelConfig:
    """Return the mesh of a plan; only the attributes that the plan determines are set.

    Args:
        plan: Plan of a language model.

    Raises:
        PlanError: If the plan distributes something that is not supported here, or its schedule is too long for a
            recipe.
    """
    layout = plan.layout
    names = tuple(reversed(plan.order))
    raw = {"layout": asdict(layout), "mesh": {"names": names, "sizes": [getattr(layout, name) for name in names]}}
    others: dict[str, Any] = {"recompute": layout.recompute, "reshard_after_forward": layout.shard_weights}
    if layout.pipeline > 1:
        others |= _schedule_keys(plan.schedule, layout.chunks, plan.file)
    return PlannedParallelConfig.from_plan(raw, **others)  # type: ignore[return-value]


def _schedule_keys(schedule: Schedule, chunks: int, file: str) -> dict[str, Any]:
    """Return the family that makes exactly this schedule, or a table if there is none."""
    for family in get_args(Family):
        try:
            config = ParallelConfig(pipeline=schedule.ranks, schedule=family, chunks=chunks)
            made = config.make_schedule(schedule.microbatches)
        except (ValidationError, PlanError):  # the family has another number of chunks, or needs more microbatches
            continue
        if (made.rank_of, made.actions) == (schedule.rank_of, schedule.actions):
            return {"schedule": family, "chunks": chunks}
    table = schedule.to_csv()
    if len(table) > MOST_TABLE:
        raise PlanError(
            f"its schedule {schedule.name} takes {len(table):,} characters, a recipe holds {MOST_TABLE:,}",
            where=file,
            remedy="plan again with --only placement, whose schedules have a name",
        )
    return {"schedule": "interleaved", "chunks": chunks, "table": table}
