"""Products measured on a device in place of the formula's."""

from __future__ import annotations

from pathlib import Path

import pytest

from cordillera import topology
from cordillera.cost import Calibration, CostModel, Products
from cordillera.errors import PlanError
from cordillera.planning import operators, workload
from cordillera.planning.estimate import Job
from cordillera.planning.mesh import Mesh
from cordillera.planning.workload import Layout

NODE = topology.load("a100-node")
PLAIN = CostModel(NODE.device, Calibration())


def test_a_measured_shape_takes_what_was_measured_and_one_near_it_as_much_more() -> None:
    formula = PLAIN.product(4096, 8192, 8192)
    table = Products({(4096, 8192, 8192, 1): 2 * formula, (64, 64, 64, 8): 1e-3}, "a test")
    cost = CostModel(NODE.device, Calibration(), table)
    assert cost.product(4096, 8192, 8192) == pytest.approx(2 * formula)
    assert cost.product(64, 64, 64, 8) == pytest.approx(1e-3)
    assert cost.product(5000, 9000, 8000) == pytest.approx(2 * PLAIN.product(5000, 9000, 8000))
    assert cost.linear(4096, 8192, 8192)[0] == pytest.approx(2 * formula)


def test_a_table_of_the_formula_changes_nothing() -> None:
    job = workload.load("gpt-22b")
    listed = operators.shapes(job, NODE.device, 8)
    table = Products({shape: PLAIN.product(*shape) for shape in listed}, "the formula")
    layout = Layout(tensor=8, microbatch=4, sequence_parallel=True)
    steps = [
        Job(job, Mesh.of(NODE, layout), layout, cost).estimate().seconds
        for cost in (PLAIN, CostModel(NODE.device, Calibration(), table))
    ]
    assert steps[0] == pytest.approx(steps[1])


def test_the_list_holds_what_a_layer_and_the_head_need() -> None:
    job = workload.load("llama3-8b")
    listed = set(operators.shapes(job, NODE.device, 8))
    hidden, ffn, tokens = job.model.hidden, job.model.ffn, job.sequence
    assert ffn is not None
    assert (tokens, 2 * ffn // 8, hidden, 1) in listed  # gate and up, forward, cut over eight
    assert (hidden, ffn, tokens, 1) in listed  # down, the weights' gradient, uncut
    assert (2 * tokens, job.model.vocabulary // 4, hidden, 1) in listed


def test_tables_are_read_as_they_are_written(tmp_path: Path) -> None:
    table = Products({(8, 16, 32, 1): 1.25e-4, (8, 16, 32, 4): 3e-4}, "a test")
    table.write(tmp_path / "products.csv")
    assert Products.read(tmp_path / "products.csv").seconds == table.seconds


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("rows,columns,inner,count,seconds\n", "holds no products"),
        ("rows,columns,inner,count\n1,2,3,4\n", "row 2: is no product"),
        ("rows,columns,inner,count,seconds\n8,8,8,1,nan\n", "row 2: sides are whole"),
        ("rows,columns,inner,count,seconds\n8,8,8,1,1e-3\n8,8.5,8,1,1e-3\n", "row 3: sides are whole"),
        ("rows,columns,inner,count,seconds\n0,8,8,1,1e-3\n", "row 2: sides are whole"),
        ("rows,columns,inner,count,seconds\n8,8,8,1,inf\n", "positive and finite"),
    ],
)
def test_wrong_tables_are_refused(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "products.csv").write_text(text)
    with pytest.raises(PlanError, match=says):
        Products.read(tmp_path / "products.csv")
    with pytest.raises(PlanError, match="cannot be read"):
        Products.read(tmp_path / "none.csv")


def test_products_are_measured_on_this_machine() -> None:
    torch = pytest.importorskip("torch")
    from cordillera.kernels.products import measure

    small, large = measure([(16, 16, 16, 2), (512, 512, 512, 1)], dtype=torch.float32)
    assert 0 < small < large
