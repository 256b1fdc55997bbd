"""Products measured on a device in place of the formula's."""

from __future__ import annotations

import pytest

from cordillera import topology
from cordillera.cost import Calibration, CostModel, Products
from cordillera.errors import PlanError
from cordillera.planning import workloads
from cordillera.planning.language import explorer, operators
from cordillera.planning.language.job import PlannedJob
from cordillera.planning.language.own_layout import OwnLayout
from cordillera.planning.language.workload import Layout
from cordillera.planning.network.mesh import Mesh
from cordillera.workflows import planning as commands

NODE = topology.load("a100-node")
PLAIN = CostModel(NODE.device, Calibration())


def test_a_table_of_the_formula_changes_nothing() -> None:
    job = workloads.load("gpt-22b")
    listed = operators.shapes(job, NODE.device, 8)
    table = Products({shape: PLAIN.product(*shape) for shape in listed}, "the formula")
    layout = Layout(tensor=8, microbatch=4, sequence_parallel=True)
    steps = [
        PlannedJob(job, Mesh.of(NODE, layout), layout, cost).estimate().seconds
        for cost in (PLAIN, CostModel(NODE.device, Calibration(), table))
    ]
    assert steps[0] == pytest.approx(steps[1])


def test_the_list_holds_what_a_layer_and_the_head_need() -> None:
    job = workloads.load("llama3-8b")
    listed = set(operators.shapes(job, NODE.device, 8))
    hidden, ffn, tokens = job.model.hidden, job.model.ffn, job.sequence
    assert ffn is not None
    assert (tokens, 2 * ffn // 8, hidden, 1) in listed  # gate and up, forward, cut over eight
    assert (hidden, ffn, tokens, 1) in listed  # down, the weights' gradient, uncut
    assert (2 * tokens, job.model.vocabulary // 4, hidden, 1) in listed
    assert (tokens // 4, hidden, ffn, 1) in listed  # a quarter of a sequence


def test_the_share_is_that_of_the_time_of_the_products_that_were_measured() -> None:
    """Counted here by hand for a layer without recomputation and for one that computes its forward twice."""
    job = workloads.load("gpt-22b")
    listed = operators.shapes(job, NODE.device, 8)
    hidden, tokens = job.model.hidden, job.sequence
    up = PLAIN.linear(tokens, 4 * hidden // 8, hidden)
    for recompute, forwards in (("none", 1), ("full", 2)):
        layout = Layout(tensor=8, sequence_parallel=True, recompute=recompute)
        everything = Products({shape: PLAIN.product(*shape) for shape in listed}, "a test")
        assert operators.measured_share(job, layout, CostModel(NODE.device, Calibration(), everything)) == 1
        assert operators.measured_share(job, layout, PLAIN) == 0
        parts = []
        for shape in ((tokens, 4 * hidden // 8, hidden, 1), (tokens, hidden, 4 * hidden // 8, 1)):
            # a table of the formula's own time: the nearest rows then change nothing
            one = Products({shape: PLAIN.product(*shape)}, "a test")
            parts.append(operators.measured_share(job, layout, CostModel(NODE.device, Calibration(), one)))
        down = PLAIN.linear(tokens, hidden, 4 * hidden // 8)
        # up's forward and down's input gradient are one shape, as are down's forward and up's input gradient
        times = [forwards * up[0] + down[1], forwards * down[0] + up[1]]
        assert parts[0] / parts[1] == pytest.approx(times[0] / times[1])
        assert 0 < parts[1] < 1


def test_a_table_far_from_a_shape_leaves_it_to_the_formula() -> None:
    job = workloads.load("gpt-22b")
    table = Products({(16, 16, 16, 1): 1.0}, "a test")
    layout = Layout(tensor=8, sequence_parallel=True)
    steps = [
        PlannedJob(job, Mesh.of(NODE, layout), layout, cost).estimate().seconds
        for cost in (PLAIN, CostModel(NODE.device, Calibration(), table))
    ]
    assert steps[0] == steps[1]


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", ["gpt-22b", "llama3-8b", pytest.param("moe-400b", marks=pytest.mark.slow)])
def test_the_list_covers_every_layout_that_a_search_tries(name: str) -> None:
    job, cluster = workloads.load(name), topology.load("two-buildings")
    host = min(cluster.sizes[0])
    listed = operators.shapes(job, cluster.device, host)
    cost = CostModel(cluster.device, Calibration(), Products(dict.fromkeys(listed, 1.0), "a test"))
    seen = {}
    for layout in explorer.layouts(job, cluster, 64):
        if not layout.problems(job):
            seen[layout.tensor, layout.context, layout.microbatch, layout.recompute] = layout
    assert len(seen) > 8
    for layout in seen.values():
        assert operators.measured_share(job, layout, cost) == 1, layout


def test_a_smaller_host_needs_fewer_products() -> None:
    eight = set(commands.products_needed("gpt-22b", "a100-node"))
    assert eight == set(operators.shapes(workloads.load("gpt-22b"), NODE.device, 8))
    assert set(commands.products_needed("gpt-22b", "a100-node", ["host.members=4"])) < eight
    with pytest.raises(PlanError, match="not known for recommendation models"):
        commands.products_needed("dlrm-dcnv2", "a100-node")


def test_products_hold_for_a_device_that_differs_in_its_network_or_memory_alone() -> None:
    job = workloads.load("gpt-22b").model_copy(update={"batch": 8})
    slow = {shape: 10 * PLAIN.product(*shape) for shape in operators.shapes(job, NODE.device, 8)}
    search = explorer.Explorer(job, NODE, products=Products(slow, "a test"))
    own = OwnLayout("tensor=8", Layout(tensor=8, sequence_parallel=True))
    plan = search.evaluate(own)
    for key in ("memory_bytes", "nic_bytes_per_s"):
        assert search.again(plan, NODE.changed({f"device.{key}": "*=2"})).seconds == plan.seconds
    other = NODE.changed({"device.matrix_flops_per_s": "*=1.01"})
    without = explorer.Explorer(job, other).evaluate(own)
    assert search.again(plan, other).seconds == pytest.approx(without.seconds)
    assert without.seconds < plan.seconds / 2
