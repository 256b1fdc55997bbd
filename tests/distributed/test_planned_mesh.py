"""Meshes of written plans: families by their names, other schedules as tables, and what cannot be one."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import ValidationError

from cordillera.distributed import planned_mesh as module
from cordillera.distributed.mesh import Family, ParallelConfig
from cordillera.distributed.planned_mesh import MOST_TABLE, PlannedParallelConfig, planned_mesh
from cordillera.errors import PlanError
from cordillera.planning.language.plan_file import WrittenPlan, read_written_plan
from cordillera.planning.language.workload import PRODUCTION_ORDER, Layout, Workload
from cordillera.planning.pipeline.schedules import Schedule, interleaved, one_forward_one_backward
from tests.planning.test_plan_file import MODEL, write_plan

GROUPED = interleaved(2, 4, 2, group=4)


def test_a_plan_is_a_mesh(tmp_path: Path) -> None:
    layout = Layout(
        tensor=2, pipeline=2, data=2, shards=2, shard_weights=True, sequence_parallel=True, recompute="full"
    )
    mesh = planned_mesh(read_written_plan(write_plan(tmp_path / "plan.json", layout)))
    assert mesh.model_dump(exclude_unset=True) == {
        "replicate": 1, "shard": 2, "context": 1, "tensor": 2, "pipeline": 2, "sequence": True, "recompute": "full",
        "order": ("tensor", "context", "pipeline", "data"), "reshard_after_forward": True, "schedule": "1f1b",
        "chunks": 1,
    }  # fmt: skip
    whole = planned_mesh(read_written_plan(write_plan(tmp_path / "plan.json", Layout(data=4, shards=2))))
    assert (whole.replicate, whole.shard, whole.world, whole.reshards) == (2, 2, 4, False)
    assert "schedule" not in whole.model_fields_set


def written(schedule: Schedule, chunks: int) -> WrittenPlan:
    """A plan of this schedule; only the mesh is looked at."""
    workload = Workload(sequence=64, batch=schedule.microbatches, model=MODEL)
    layout = Layout(pipeline=schedule.ranks, chunks=chunks)
    return WrittenPlan("plan.json", workload, layout, PRODUCTION_ORDER, schedule)


@pytest.mark.parametrize("family", get_args(Family))
def test_a_schedule_of_a_family_gets_its_name(family: Any) -> None:
    made = ParallelConfig(pipeline=4, schedule=family).make_schedule(8)
    mesh = planned_mesh(written(made, made.stages // 4))
    assert (mesh.schedule, mesh.table) == (family, None)
    assert mesh.make_schedule(8) == made


def test_another_schedule_is_a_table_that_does_the_same(tmp_path: Path) -> None:
    layout = Layout(pipeline=2, chunks=2)
    mesh = planned_mesh(read_written_plan(write_plan(tmp_path / "plan.json", layout, GROUPED)))
    assert mesh.table == GROUPED.to_csv()
    assert mesh.stages == 4
    for count in (4, 16):  # the engine asks for another number first
        assert mesh.make_schedule(count).actions == GROUPED.actions
    assert mesh.make_schedule(4).rank_of == GROUPED.rank_of


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"table": "0F0,0B1\n"}, "schedule table: microbatch 0 of stage 0 has F"),
        ({"table": "hello"}, "'hello' is not an action"),
        ({"table": "0F999999999"}, "has none before it"),
        ({"table": GROUPED.to_csv()}, "not for pipeline 1 with 1; leave table out, or give --set parallel.table=none"),
        ({"table": GROUPED.to_csv(), "pipeline": 2}, "not for pipeline 2 with 2"),
        ({"table": "1F0,1B0\n0F0,0B0\n", "pipeline": 2}, "neither in a loop nor in a V"),
        ({"table": "0" * (MOST_TABLE + 1)}, "at most"),
    ],
)
def test_a_table_that_does_not_fit_is_refused(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        PlannedParallelConfig(**keys)


def test_a_plain_mesh_is_taken_as_it_is() -> None:
    mesh = PlannedParallelConfig.model_validate(ParallelConfig(context=2))
    assert mesh.model_dump(exclude_unset=True) == {"context": 2}


def test_a_schedule_that_no_recipe_can_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = written(one_forward_one_backward(2, 300, [1, 0]), 1)
    assert planned_mesh(schedule).table is not None
    monkeypatch.setattr(module, "MOST_TABLE", 2_000)
    with pytest.raises(PlanError, match="characters, a recipe holds"):
        planned_mesh(schedule)
