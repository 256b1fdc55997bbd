"""What work costs: products measured on a device in place of the formula's, and the files that hold them."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cordillera import topology
from cordillera.cost import SHIPPED, Calibration, CostModel, Products, calibration_for, whole
from cordillera.errors import PlanError

DEVICE = topology.load("a100-node").device
PLAIN = CostModel(DEVICE, Calibration())
HEADER = "rows,columns,inner,count,seconds,dtype,device\n"
ROW = "8,8,8,1,1e-3,bfloat16,A100\n"
SIDE = st.integers(1, 2**17)


def test_a_measured_shape_takes_what_was_measured_and_one_near_it_as_much_more() -> None:
    formula = PLAIN.product(4096, 8192, 8192)
    table = Products({(4096, 8192, 8192, 1): 2 * formula, (64, 64, 64, 8): 1e-3}, "a test")
    cost = CostModel(DEVICE, Calibration(), table)
    assert cost.product(4096, 8192, 8192) == pytest.approx(2 * formula)
    assert cost.product(64, 64, 64, 8) == pytest.approx(1e-3)
    assert cost.product(5000, 9000, 8000) == pytest.approx(2 * PLAIN.product(5000, 9000, 8000))
    assert cost.linear(4096, 8192, 8192)[0] == pytest.approx(2 * formula)


@given(st.tuples(SIDE, SIDE, SIDE, st.integers(1, 64)), st.floats(1e-7, 10), st.sampled_from((1, 3, 16)))
def test_a_product_is_corrected_by_its_neighbour_and_by_none_that_is_far(
    shape: tuple[int, int, int, int], seconds: float, times: int
) -> None:
    cost = CostModel(DEVICE, Calibration(), Products({shape: seconds}, "a test"))
    rows, columns, inner, count = shape
    found = cost.product(rows * times, columns, inner, count) / PLAIN.product(rows * times, columns, inner, count)
    assert found == pytest.approx(seconds / PLAIN.product(*shape) if times == 1 else 1.0)
    assert cost.product(*shape) == pytest.approx(seconds)


@given(st.dictionaries(st.tuples(SIDE, SIDE, SIDE, SIDE), st.floats(1e-9, 1e3), min_size=1, max_size=20))
def test_tables_are_read_as_they_are_written(seconds: dict[tuple[int, int, int, int], float]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "of/mine", "products.csv")
        Products(seconds, "a test", 'An "odd", device', "float16").write(path)
        found = Products.read(path)
        assert [one.name for one in path.parent.iterdir()] == [path.name]
    assert found.seconds == pytest.approx(seconds, rel=1e-4)
    assert (found.device, found.dtype, found.source) == ('An "odd", device', "float16", str(path))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "holds no measurements"),
        (HEADER, "holds no measurements"),
        ("rows,columns,inner,count\n1,2,3,4\n", "line 1, column seconds: is missing"),
        ("rows,columns,inner,count,seconds\n8,8,8,1,1e-3\n", "line 1, column dtype: is missing"),
        (HEADER + "8,8,8,1\n", "line 2: has 4 cells, the header has 7"),
        (HEADER + ROW + "\n8,8,8,one,1e-3,bfloat16,A100\n", "line 4, column count: 'one' is not a positive number"),
        (HEADER + ROW + "8,8.5,8,1,1e-3,bfloat16,A100\n", "line 3, column columns: 8.5 is not a whole number"),
        *(
            (HEADER + f"{bad},8,8,1,1e-3,bfloat16,A100\n", f"line 2, column rows: '{bad}' is not a positive number")
            for bad in ("0", "nan", "inf", "-8", "1_0", "٣")
        ),
        *(
            (HEADER + ROW + f"9,8,8,1,{bad},bfloat16,A100\n", f"line 3, column seconds: '{bad}' is not a positive")
            for bad in ("nan", "inf", "0", "-1e-3")
        ),
        (HEADER + "8,8,8,1,1e-300,bfloat16,A100\n", "line 2, column seconds: 1e-300 is not from 1e-12 to 1e+06"),
        (HEADER + "8,8,8,1,1e-3,float32,A100\n", "line 2, column dtype: 'float32' is none of bfloat16, float16"),
        (HEADER + "8,8,8,1,1e-3,,A100\n", "line 2, column dtype: '' is none of"),
        (HEADER + "8,8,8,1,1e-3,bfloat16, \n", "line 2, column device: '' is not a name"),
        (HEADER + '8,8,8,1,1e-3,bfloat16,"A100\n' + ROW, "line 2: is not a row of CSV"),
        (HEADER + ROW + "9,8,8,1,1e-3,float16,A100\n", "line 3: float16 on A100, the rows before are bfloat16 on A100"),
        (HEADER + ROW + "9,8,8,1,1e-3,bfloat16,H100\n", "bfloat16 on H100, the rows before are bfloat16 on A100"),
        (HEADER + ROW + "9,8,8,1,1e-3,bfloat16,A100\n" + ROW, "line 4: is the product of line 2 again"),
        ("\0\xff", "products.csv, line 1, column 2: is not UTF-8"),
    ],
)  # fmt: skip
def test_wrong_tables_are_refused_by_row(tmp_path: Path, text: str, says: str) -> None:
    content = text.encode("latin-1" if text.startswith("\0") else "utf-8")
    (tmp_path / "products.csv").write_bytes(content)
    with pytest.raises(PlanError) as caught:
        Products.read(tmp_path / "products.csv")
    assert says in str(caught.value)
    assert "products.csv" in str(caught.value)


def test_a_file_that_is_not_there_or_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"none\.csv: does not exist"):
        Products.read(tmp_path / "none.csv")
    (tmp_path / "file").write_text("")
    with pytest.raises(PlanError, match="cannot be written"):
        Products({(8, 8, 8, 1): 1e-3}, "a test").write(tmp_path / "file" / "products.csv")


def test_a_product_takes_its_arithmetic_with_half_a_wave_lost_or_its_traffic() -> None:
    calibration = Calibration(matrix=0.5, memory=0.25)
    cost = CostModel(DEVICE, calibration)
    rate, stream = DEVICE.matrix_flops_per_s / 2, DEVICE.memory_bytes_per_s / 4
    wave = DEVICE.processors * 128 * 256  # numbers that one wave of tiles computes
    # As many outputs as in 20 waves: half a wave is lost, and traffic is hidden.
    rows, columns, inner, count = 128 * DEVICE.processors, 256 * 10, 8192, 2
    arithmetic = 2 * rows * columns * inner * count * 20.5 / 20 / rate
    assert rows * columns * count == 20 * wave
    assert cost.product(rows, columns, inner, count) == pytest.approx(arithmetic)
    # Many small products: the weights of each are read once, and arithmetic is hidden.
    traffic = 2 * 5000 * (2 * 512 + 2 * 512 + 512 * 512) / stream
    assert cost.product(2, 512, 512, 5000) == pytest.approx(traffic)
    # A short side hides neither behind the other.
    for shape in ((4096, 191, 8192), (4096, 8192, 191)):
        flops, moved = 2 * shape[0] * 191 * 8192, 2 * (4096 * 191 + 4096 * 8192 + 191 * 8192)
        lost = 1 + wave / 2 / (shape[0] * shape[1])
        assert cost.product(*shape) == pytest.approx(flops * lost / rate + moved / stream)
    hidden = max(2 * 4096 * 192 * 8192 * (1 + wave / 2 / (4096 * 192)) / rate, 2 * (4096 * 8384 + 192 * 8192) / stream)
    assert cost.product(4096, 192, 8192) == pytest.approx(hidden)


def test_a_layer_costs_three_products_and_other_kernels_their_bytes_or_flops() -> None:
    shapes = {(10, 300, 2000, 1): 1.0, (10, 2000, 300, 1): 2.0, (2000, 300, 10, 1): 4.0}
    cost = CostModel(DEVICE, Calibration(memory=0.5, attention=0.25), Products(shapes, "a test"))
    assert cost.linear(10, 300, 2000) == pytest.approx((1.0, 2.0, 4.0))
    assert cost.stream(DEVICE.memory_bytes_per_s) == pytest.approx(2.0)
    assert cost.optimizer(1e9) == pytest.approx(cost.stream(40e9))
    assert cost.attention(DEVICE.matrix_flops_per_s) == pytest.approx(4.0)


def test_a_neighbour_is_the_nearest_within_a_factor_of_two_over_all_sides() -> None:
    near, far = (4096, 8192, 8192, 1), (8192, 8192, 8192, 1)
    seconds = {near: 2 * PLAIN.product(*near), far: 3 * PLAIN.product(*far)}
    cost = CostModel(DEVICE, Calibration(), Products(seconds, "a test"))

    def factor(*shape: float) -> float:
        return cost.product(*shape) / PLAIN.product(*shape)

    assert factor(5700, 8192, 8192) == pytest.approx(2)  # 5,793 lies in the middle
    assert factor(5900, 8192, 8192) == pytest.approx(3)
    assert factor(4096, 8192 * 1.3, 8192 / 1.5) == pytest.approx(2)  # 1.3 * 1.5 < 2
    assert factor(4096, 8192 * 1.4, 8192 / 1.5) == pytest.approx(1)
    assert factor(8192, 8192, 8192, 1.9) == pytest.approx(3)
    assert factor(8192, 8192, 8192, 2.1) == pytest.approx(1)


def test_constants_are_those_of_the_device_or_say_that_they_are_not() -> None:
    assert calibration_for(DEVICE) is SHIPPED[DEVICE.name]
    other = calibration_for(DEVICE.model_copy(update={"name": "mine"}))
    assert other.provenance == "not fitted on mine: constants of H100, the lowest that are known"
    assert (other.matrix, other.error) == (min(one.matrix for one in SHIPPED.values()), None)
    for name, same in (
        ("NVIDIA H100 80GB HBM3", "H100 SXM5 80GB"),
        ("h200", "H100 SXM5 80GB"),
        ("A800-SXM", "A100 SXM4 80GB"),
    ):
        found = calibration_for(DEVICE.model_copy(update={"name": name}))
        assert found.model_copy(update={"provenance": "", "error": 0}) == SHIPPED[same].model_copy(
            update={"provenance": "", "error": 0}
        )
        assert found.provenance == f"not fitted on {name}: constants of {same}"
        assert found.error is None
    assert whole(0.2, 7.6, 3.4, 0.5) == (1, 8, 3, 1)
