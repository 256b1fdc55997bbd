"""Places of ranks against counting by hand, plans against meshes, and what cannot be one."""

from __future__ import annotations

from itertools import permutations, product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from cordillera.distributed import mesh
from cordillera.distributed.context.attention import ContextParallelConfig
from cordillera.distributed.context.cache import ContextCacheConfig
from cordillera.distributed.job.launch import LaunchConfig
from cordillera.distributed.mesh import DIMENSIONS, ParallelConfig, ProcessMesh, ranks_of
from cordillera.distributed.transport.progress import TransportError
from cordillera.errors import PeerError, PlanError
from cordillera.planning.language.workload import Layout
from cordillera.planning.network.mesh import Mesh
from cordillera.topology import load
from cordillera.training.ranking.config import RankingParallelConfig

SIZES = st.integers(1, 3)


@given(
    sizes=st.fixed_dictionaries(dict.fromkeys(DIMENSIONS, SIZES)),
    order=st.sampled_from(list(permutations(("tensor", "context", "pipeline", "data")))),
)
def test_ranks_count_along_the_order(sizes: dict[str, int], order: tuple[Any, ...]) -> None:
    config = ParallelConfig(**sizes, order=order)
    ranks, names = ranks_of(config)
    inner = [part for name in order for part in (("shard", "replicate") if name == "data" else (name,))]
    assert sorted(ranks.flatten().tolist()) == list(range(config.world))
    for place in product(*(range(sizes[name]) for name in names)):
        at = dict(zip(names, place, strict=True))
        rank, stride = 0, 1
        for name in inner:
            rank += at[name] * stride
            stride *= sizes[name]
        assert int(ranks[place]) == rank
    for group in ranks.flatten(2, 3).movedim(2, -1).reshape(-1, sizes["shard"] * sizes["context"]).tolist():
        assert group == sorted(group)  # as torch makes it


@pytest.mark.parametrize(
    "order", [("tensor", "context", "data", "pipeline"), ("tensor", "context", "pipeline", "data")]
)
def test_ranks_are_where_the_planner_has_them(order: tuple[Any, ...]) -> None:
    layout = Layout(tensor=2, context=2, pipeline=2, data=4, shards=2)
    planned = Mesh.of(load("llama3-building"), layout, order)
    ranks, names = ranks_of(ParallelConfig(tensor=2, context=2, pipeline=2, replicate=2, shard=2, order=order))
    for name in ("tensor", "context", "pipeline"):
        along = ranks.movedim(names.index(name), 0)
        assert int(along[1].flatten()[0] - along[0].flatten()[0]) == planned.stride(name)
    data = ranks.movedim(names.index("shard"), 0)
    assert int(data[1].flatten()[0] - data[0].flatten()[0]) == planned.stride("data")


def plan(**layout: Any) -> dict[str, Any]:
    """What the planner writes of a layout."""
    sizes = {"tensor": 2, "context": 1, "pipeline": 4, "data": 6, "expert": 1, "shards": 3} | layout
    names = ["data", "pipeline", "context", "tensor"]
    return {"layout": sizes, "mesh": {"names": names, "sizes": [sizes[name] for name in names]}}


def test_a_plan_is_a_mesh() -> None:
    config = ParallelConfig.from_plan(plan(), schedule="interleaved", chunks=3)
    assert (config.tensor, config.context, config.pipeline, config.shard, config.replicate) == (2, 1, 4, 3, 2)
    assert config.order == ("tensor", "context", "pipeline", "data")
    assert (config.world, config.copies, config.stages) == (48, 6, 12)
    assert not config.sequence
    assert ParallelConfig.from_plan(plan(sequence_parallel=True)).sequence
    assert not ParallelConfig.from_plan(plan(sequence_parallel=True), sequence=False).sequence


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ({}, "holds no mesh"),
        (plan(expert=2), r"experts over 2 ranks cannot be taken from a plan(.|\n)*parallel.experts = 'exchange'"),
        (plan(shards=4), "4 shards do not divide 6 copies"),
        (plan(fp8="linear"), "multiplies matrices in FP8, training does not"),
        ({**plan(), "mesh": {"names": ["data"], "sizes": [1, 2]}}, "holds no mesh"),
    ],
)
def test_what_is_no_plan_is_refused(broken: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        ParallelConfig.from_plan(broken)


@pytest.mark.parametrize(
    "wrong",
    [
        {"sequence": True},
        {"shard": 0},
        {"order": ("tensor", "data")},
        {"order": ("tensor", "tensor", "pipeline", "data")},
        {"schedule": "1f1b", "chunks": 2},
        {"schedule": "zero_bubble_v", "chunks": 1},
        {"deadline_s": float("nan")},
        {"deadline_s": 1e15},
    ],
)
def test_a_mesh_that_is_none_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        ParallelConfig(**wrong)


@pytest.mark.parametrize(
    "kind", [ParallelConfig, RankingParallelConfig, LaunchConfig, ContextParallelConfig, ContextCacheConfig]
)
def test_a_deadline_is_as_long_as_systems_wait(kind: Any) -> None:
    assert kind(deadline_s=2e6).deadline_s == 2e6
    with pytest.raises(ValidationError, match="must be at most 2,000,000 seconds"):
        kind(deadline_s=1e15)


@pytest.mark.parametrize(
    "schedule",
    [
        "1f1b",
        "gpipe",
        "interleaved",
        "breadth_first",
        "zero_bubble",
        "zero_bubble_ahead",
        "zero_bubble_v",
        "dual_pipe_v",
    ],
)
def test_every_family_has_a_schedule_of_the_meshs_stages(schedule: Any) -> None:
    config = ParallelConfig(pipeline=4, schedule=schedule)
    made = config.make_schedule(16)
    made.check()
    assert (made.ranks, made.stages, made.microbatches) == (4, config.stages, 16)
    assert not config.reshards
    assert ParallelConfig(shard=4, schedule=schedule).stages == 1
    ParallelConfig(schedule=schedule).make_schedule(1).check()


def test_an_exchange_that_fails_gives_the_reason_of_the_transport(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise TransportError("rank 1 is at barrier")

    monkeypatch.setattr(mesh, "all_gather_single", fail)
    one = object.__new__(ProcessMesh)
    one.config, one.rank, one.device_type = ParallelConfig(shard=2), 0, "cpu"
    with pytest.raises(PeerError, match="rank 0: rank 1 is at barrier, while numbers were exchanged"):
        one.exchange([1.0])
