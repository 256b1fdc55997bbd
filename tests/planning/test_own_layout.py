"""A person's own layout, read from a line of text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cordillera import topology
from cordillera.cost import calibration_for
from cordillera.errors import PlanError
from cordillera.planning import workloads
from cordillera.planning.language.explorer import Explorer
from cordillera.planning.language.own_layout import read_layout
from cordillera.planning.language.workload import Layout

WORK = workloads.load("llama3-8b")


def test_what_is_left_out_follows_from_the_rest() -> None:
    own = read_layout("tensor=8, pipeline=2", 64, WORK)
    assert own.layout == Layout(tensor=8, pipeline=2, data=4, shards=4, sequence_parallel=True, overlap_gradients=True)
    assert (own.schedule, own.network, own.order) == (None, "library", ("tensor", "context", "pipeline", "data"))
    assert not read_layout("pipeline=2", 8, WORK).layout.sequence_parallel


def test_everything_can_be_stated() -> None:
    text = (
        "tensor=4,context=2,pipeline=2,data=4,shards=2,shard_weights=yes,chunks=2,microbatch=2,sequence_parallel=false,"
        "recompute=Full,overlap_gradients=0,schedule=breadth first,network=tuned,order=tensor/context/data/pipeline"
    )
    own = read_layout(text, 64, WORK)
    assert own.layout == Layout(
        tensor=4, context=2, pipeline=2, data=4, shards=2, shard_weights=True, chunks=2, microbatch=2, recompute="full"
    )
    assert (own.schedule, own.network) == ("breadth first", "tuned")
    assert own.order == ("tensor", "context", "data", "pipeline")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'' is not key=value"),
        ("tensor", "'tensor' is not key=value"),
        ("tensor=", "'tensor=' is not key=value"),
        ("tensor=8,,pipeline=2", "'' is not key=value"),
        ("tensr=8", "there is no 'tensr'.*\n.*did you mean tensor"),
        ("tensor=8,tensor=4", "states tensor twice"),
        ("tensor=eight", "tensor=eight is not a whole number"),
        ("tensor=-8", "tensor=-8 is not a whole number of 1 or more"),
        ("tensor=8.0", "tensor=8.0 is not a whole number"),
        ("tensor=nan", "tensor=nan is not a whole number"),
        ("tensor=0", "tensor=0 is not a whole number of 1 or more"),
        ("pipeline=99999999999", "is not a whole number below a billion"),
        ("tensor=" + "9" * 5000, "is not a whole number below a billion"),
        ("pipeline=3", "= 3 does not divide 64 devices"),
        ("recompute=some", "recompute=some is not one of none, selective, full"),
        ("shard_weights=maybe", "shard_weights=maybe is not true or false"),
        ("network=fast", "network=fast is not one of library, tuned"),
        ("order=tensor/data", "order=tensor/data is not an order of all of tensor/context/pipeline/data"),
        ("tensor=8,data=4", "takes 32 devices, 64 are in use"),
        ("tensor=8,data=3", "does not divide batch 2048"),
        ("pipeline=8,chunks=8", "64 stages are more than 32 layers"),
        ("tensor=64", "tensor 64 does not divide heads 32"),
        ("tensor=8,shard_weights=true,shard_gradients=true", "leave shard_gradients out"),
    ],
)
def test_a_line_that_is_wrong_is_refused_with_the_reason(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        read_layout(text, 64, WORK)


@given(text=st.text(max_size=60))
def test_no_line_ends_in_another_error(text: str) -> None:
    try:
        own = read_layout(text, 64, WORK)
    except PlanError:
        return
    assert own.layout.problems(WORK) == []


def test_a_schedule_that_the_layout_cannot_run_is_refused_with_those_it_can() -> None:
    explorer = Explorer(WORK, topology.load("two-buildings"), devices=64)
    with pytest.raises(PlanError, match=r"cannot run the schedule 'zbv'[\s\S]*it can run gpipe, 1f1b, zero bubble H1"):
        explorer.evaluate(read_layout("tensor=8,pipeline=4,schedule=zbv", 64, WORK))
    with pytest.raises(PlanError, match="none: chunks above 1 need a pipeline"):
        explorer.evaluate(read_layout("tensor=8,chunks=2", 64, WORK))
    plan = explorer.evaluate(read_layout("tensor=8,pipeline=4,chunks=2,schedule=zbv", 64, WORK))
    assert plan.schedule.name == "ZBV"


def test_a_layout_of_a_search_is_evaluated_to_the_same_step() -> None:
    explorer = Explorer(WORK, topology.load("two-buildings"), devices=64)
    base = explorer.production()
    stated = ",".join(f"{name}={value}" for name, value in vars(base.layout).items())
    again = explorer.evaluate(read_layout(f"{stated},schedule={base.schedule.name.split(',')[0]}", 64, WORK))
    assert again.to_json() == base.to_json()
    found = explorer.evaluate_all([read_layout("", 64, WORK) if False else read_layout("tensor=1", 64, WORK)])
    assert found.plans == []  # 16 bytes of 8 billion parameters
    assert found.dropped["needs more memory than a device has"] == 1
    assert explorer.evaluate_all([read_layout("tensor=8", 64, WORK)]).dropped == {}


def test_a_plan_has_the_error_of_its_constants_unless_nothing_like_it_was_measured() -> None:
    building = topology.load("llama3-building")
    constants = calibration_for(building.device).model_copy(update={"error": 0.1})
    explorer = Explorer(WORK, building, constants, devices=64)
    plain, narrow = (explorer.evaluate(read_layout(f"tensor=8{more}", 64, WORK)) for more in ("", ",fp8=ffn"))
    assert plain.error == explorer.cost.calibration.error == 0.1
    assert plain.error_s == pytest.approx(0.1 * plain.seconds)
    assert plain.to_json()["error"] == 0.1
    assert (narrow.error, narrow.error_s, narrow.to_json()["error"]) == (None, None, None)
    other = Explorer(WORK, building, devices=64).evaluate(read_layout("tensor=8", 64, WORK))
    assert other.error_s is None
