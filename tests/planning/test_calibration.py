"""Predictions beside measured and published step times and memory."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from cordillera import topology
from cordillera.cost import Calibration, CostModel, calibration_for
from cordillera.errors import PlanError
from cordillera.planning import calibration, workloads
from cordillera.planning.language.job import PlannedJob
from cordillera.planning.language.layers import activation_bytes
from cordillera.planning.language.workload import Layout
from cordillera.planning.network.mesh import Mesh
from cordillera.planning.pipeline.schedules import interleaved
from cordillera.workflows import planning as commands

MEASURED = Path(__file__).parents[3] / "shared" / "data" / "megatron_multi_node_iteration_ms.csv"
needs_measurements = pytest.mark.skipif(not MEASURED.exists(), reason=f"{MEASURED.name} (vTrain, MIT) is not here")

# Korthikanti et al. 2022: layout, seconds with full recomputation and with sequence parallelism and selective
# recomputation, GiB of activations without either and with both, and shares of the first in percent:
# sequence parallelism, selective recomputation, both, full recomputation.
PUBLISHED = {
    "gpt-22b": ((8, 1, 1, 4), (1.42, 1.10), (59.25, 9.56), (66.84, 49.42, 16.18, 7.64)),
    "gpt-175b": ((8, 8, 3, 1), (18.13, 13.75), (66.84, 12.35), (62.04, 56.53, 18.49, 8.71)),
    "gpt-530b": ((8, 35, 3, 1), (49.05, 37.83), (114.0, 23.08), (58.31, 62.04, 20.27, 9.42)),
    "gpt-1t": ((8, 64, 1, 1), (94.42, 71.49), (131.25, 26.56), (58.31, 62.04, 20.27, 9.42)),
}


def korthikanti(name: str, **options: object) -> Layout:
    tensor, pipeline, chunks, microbatch = PUBLISHED[name][0]
    degrees = {"tensor": tensor, "pipeline": pipeline, "chunks": chunks, "microbatch": microbatch}
    return Layout(**degrees, **options)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def measured() -> list[calibration.MeasuredStep]:
    return calibration.read(MEASURED)


@pytest.fixture(scope="module")
def cluster() -> topology.Topology:
    return topology.load("a100-four-cards")


def predictions(rows: list[calibration.MeasuredStep], on: topology.Topology, by: Calibration) -> list[float]:
    cost = CostModel(on.device, by)
    return [calibration.predict(row, on, cost).seconds for row in rows]


@needs_measurements
def test_constants_fitted_on_two_models_predict_all_three(
    measured: list[calibration.MeasuredStep], cluster: topology.Topology
) -> None:
    fitted = calibration.fit([row for row in measured if row.model != "3.6"], cluster)
    assert len(calibration.BOUNDS) <= 8
    predicted = predictions(measured, cluster, fitted)
    everything = calibration.accuracy(measured, predicted)
    assert everything.rows == len(measured) >= 88
    assert everything.error <= 0.07
    assert min(everything.tau_by_model.values()) >= 0.60
    assert everything.tau_by_model["3.6"] >= 0.85
    assert everything.regret <= 1.05
    small = [(row, seconds) for row, seconds in zip(measured, predicted, strict=True) if row.layout.tensor <= 8]
    assert calibration.accuracy(*zip(*small, strict=True)).error <= 0.075
    # the constants in the library are these, rounded
    shipped = predictions(measured, cluster, calibration_for(cluster.device))
    assert statistics.fmean(abs(a / b - 1) for a, b in zip(shipped, predicted, strict=True)) < 0.01
    fitted_rows = [(row, a) for row, a in zip(measured, shipped, strict=True) if row.model != "3.6"]
    error = calibration.accuracy(*zip(*fitted_rows, strict=True)).error
    assert calibration_for(cluster.device).error == pytest.approx(error, abs=0.001)


@needs_measurements
def test_wrong_order_is_of_rows_that_were_measured_slow(
    measured: list[calibration.MeasuredStep], cluster: topology.Topology
) -> None:
    largest = [row for row in measured if row.model == "39.1"]
    pairs = list(zip(largest, predictions(largest, cluster, calibration_for(cluster.device)), strict=True))
    slow = [row for row, seconds in pairs if seconds < 0.9 * row.seconds]
    assert 0.2 < len(slow) / len(largest) < 0.3
    assert {row.layout.tensor for row in slow} == {2, 4}
    assert all(seconds < 1.1 * row.seconds for row, seconds in pairs)
    rest = [(row, seconds) for row, seconds in pairs if row not in slow]
    assert calibration.accuracy(*zip(*rest, strict=True)).tau > 0.8


@needs_measurements
def test_constants_of_small_models_predict_the_largest(
    measured: list[calibration.MeasuredStep], cluster: topology.Topology
) -> None:
    fitted = calibration.fit([row for row in measured if row.model != "39.1"], cluster)
    largest = [row for row in measured if row.model == "39.1"]
    found = calibration.accuracy(largest, predictions(largest, cluster, fitted))
    assert found.error <= 0.08
    assert found.regret <= 1.05


@needs_measurements
@pytest.mark.slow
@pytest.mark.parametrize("held", ["3.6", "18.4", "39.1"])
def test_one_ring_is_a_better_form_for_models_that_were_not_fitted(
    held: str, measured: list[calibration.MeasuredStep], cluster: topology.Topology
) -> None:
    others, rows = ([row for row in measured if (row.model == held) == is_held] for is_held in (False, True))
    errors = {}
    for form in (False, True):
        start = calibration_for(cluster.device).model_copy(update={"one_ring": form})
        fitted = calibration.fit(others, cluster, start)
        errors[form] = calibration.accuracy(rows, predictions(rows, cluster, fitted)).error
    assert errors[True] < errors[False] - 0.005


def test_devices_of_a_host_that_are_not_neighbours_reduce_in_one_ring(cluster: topology.Topology) -> None:
    job, size = workloads.load("gpt-22b"), 1e9

    def seconds(tensor: int, one_ring: bool) -> float:
        layout = Layout(tensor=tensor, data=128 // tensor)
        cost = CostModel(cluster.device, Calibration(one_ring=one_ring))
        return PlannedJob(job, Mesh.of(cluster, layout), layout, cost).all_reduce("data", size)

    card = cluster.device.nic_bytes_per_s * Calibration().network
    port = cluster.levels[0].bytes_per_s * Calibration().port
    # 16 hosts with two devices of a group in each: all of it through one of them, or a half through each
    assert seconds(4, True) == pytest.approx(2 * 31 / 32 * size / card, rel=0.01)
    assert seconds(4, False) == pytest.approx(size / port + 15 / 16 * size / card, rel=0.01)
    for neighbours in (1, 8):  # all devices of a host, or one of each
        assert seconds(neighbours, True) == seconds(neighbours, False)


def test_published_step_times_without_a_new_fit() -> None:
    cluster = topology.load("selene")
    cost, errors = CostModel(cluster.device, Calibration()), []
    for name, (_, times, _, _) in PUBLISHED.items():
        job = workloads.load(name)
        for options, seconds in zip(
            ({"recompute": "full"}, {"recompute": "selective", "sequence_parallel": True}), times, strict=True
        ):
            layout = korthikanti(name, **options)
            errors.append(abs(PlannedJob(job, Mesh.of(cluster, layout), layout, cost).estimate().seconds / seconds - 1))
    assert statistics.fmean(errors) <= 0.06
    assert max(errors) <= 0.08


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_activation_memory(name: str) -> None:
    job = workloads.load(name)

    def gibibytes(**options: object) -> float:
        layout = korthikanti(name, **options)
        schedule = interleaved(layout.pipeline, layout.microbatches(job), layout.chunks)
        layers = job.model.layers / layout.stages
        cluster = topology.load("selene")
        held = PlannedJob(job, Mesh.of(cluster, layout), layout, CostModel(cluster.device, Calibration()))
        assert held.live_chunks(0) == schedule.peak(0)  # the closed form is the schedule's own
        return schedule.peak(0) * layers * activation_bytes(job, layout) / 2**30

    none = gibibytes()
    both = gibibytes(sequence_parallel=True, recompute="selective")
    assert (none, both) == pytest.approx(PUBLISHED[name][2], rel=0.05)
    shares = [
        100 * found / none
        for found in (
            gibibytes(sequence_parallel=True),
            gibibytes(recompute="selective"),
            both,
            gibibytes(recompute="full"),
        )
    ]
    assert shares == pytest.approx(PUBLISHED[name][3], rel=0.03)


HEADER = "layers,hidden,heads,sequence,batch,microbatch,tensor,data,pipeline,milliseconds\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no measurements"),
        ("layers,hidden\n1,2\n", "line 1, column heads: is missing, or call it 'attention heads'"),
        (HEADER, "holds no measurements"),
        (HEADER + "2,64,4,128,8,1,1,8,1,nan\n", "line 2, column milliseconds: 'nan' is not a positive number"),
        (HEADER + "2,64,4,128,8,1,1,8,1,5\n\n2,64,4,128,8,1,1,8,1,-5\n", "line 4, column milliseconds"),
        (HEADER + "2,64,4,128,8,1,1,3,1,5\n", "line 2: data 3 x microbatch 1 does not divide batch 8"),
        (HEADER + "2,65,4,128,8,1,1,8,1,5\n", "line 2: heads .*do not divide hidden"),
        (HEADER + "2,64,4\n", "line 2: has 3 cells, the header has 10"),
        (HEADER + "2,64,4,128,8,1,1,8,1,5,9\n", "line 2: has 11 cells, the header has 10"),
        (HEADER + "24.7,64,4,128,8,1,1,8,1,5\n", "line 2, column layers: 24.7 is not a whole number"),
        (HEADER + "five,64,4,128,8,1,1,8,1,5\n", "line 2, column layers: 'five' is not a positive number"),
        (HEADER + ",64,4,128,8,1,1,8,1,5\n", "line 2, column layers: is empty"),
        (HEADER + "1e9,64,4,128,8,1,1,8,1,5\n", "line 2, column layers: must be at most 4096"),
        (HEADER + '"2,64,4,128,8,1,1,8,1,5\n', "line 2: is not a row of CSV"),
        ("layers," + HEADER + "2,2,64,4,128,8,1,1,8,1,5\n", "line 1, column layers: stands there 2 times"),
        ("# layers," + HEADER + "2,2,64,4,128,8,1,1,8,1,5\n", "line 1, column layers: stands there 2 times"),
        ("recompue," + HEADER + "none,2,64,4,128,8,1,1,8,1,5\n", "is not a column; did you mean 'recompute'"),
        ("recompute," + HEADER + "banana,2,64,4,128,8,1,1,8,1,5\n", "column recompute: 'banana' is none of none, sel"),
        ("sequence_parallel," + HEADER + "2,2,64,4,128,8,1,1,8,1,5\n", "column sequence_parallel: '2' is none of 0"),
        ("chunks," + HEADER + "x,2,64,4,128,8,1,1,8,1,5\n", "column chunks: 'x' is not a positive number"),
        ("model," + HEADER + "\x1b[2J,2,64,4,128,8,1,1,8,1,5\n", r"column model: '\\x1b\[2J' is not a name"),
    ],
)
def test_a_file_that_is_wrong_is_refused_by_place(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "m.csv"
    path.write_text(text)
    with pytest.raises(PlanError, match=message):
        calibration.read(path)


def test_every_mistake_of_a_file_is_named_at_once(tmp_path: Path) -> None:
    path = tmp_path / "m.csv"
    path.write_text("recompute," + HEADER + "banana,24.7,64,4,128,8,1,1,8,1,-5\n" + "full,2,64\n" + "x,y,z\n" * 30)
    with pytest.raises(PlanError) as caught:
        calibration.read(path)
    text = str(caught.value)
    assert "34 mistakes" in text
    for line in ("line 2, column recompute", "line 2, column layers", "line 2, column milliseconds", "line 3: has 3"):
        assert line in text
    assert "and 14 more" in text


def test_byte_order_marks_line_ends_blank_lines_and_spaces_do_not_matter(tmp_path: Path) -> None:
    path, row = tmp_path / "m.csv", "2,64,4,128,8,1,1,8,1,5"
    path.write_text(HEADER + row + "\n" + row)
    plain = calibration.read(path)
    assert [one.layout.recompute for one in plain] == ["full", "full"]
    for end in ("\r\n", "\r"):
        text = f"\ufeff{HEADER.upper()}\n , \n{row}\n\n{row.replace(',', ' , ')}\n\n".replace("\n", end)
        path.write_bytes(text.encode())
        assert calibration.read(path) == plain
    path.write_text(f"recompute,{HEADER}none,{row}\n,{row}\n")
    assert [one.layout.recompute for one in calibration.read(path)] == ["none", "full"]


@pytest.mark.parametrize("name", ["two-buildings", "selene"])
def test_constants_that_a_file_leaves_out_are_as_shipped_for_the_device(tmp_path: Path, name: str) -> None:
    file = tmp_path / "m.json"
    file.write_text('{"message_s": 2e-6}')
    (tmp_path / "all.json").write_text(Calibration(matrix=0.9, error=0.1).model_dump_json())
    planned = commands.plan("llama3-8b", name, tmp_path / "p", calibration=file, devices=8, layouts=["tensor=8"])
    found, shipped = planned.explorer.cost.calibration, calibration_for(topology.load(name).device)
    others = {"message_s", "provenance", "error"}
    assert found.model_dump(exclude=others) == shipped.model_dump(exclude=others)
    assert (found.message_s, found.error) == (2e-6, None)
    assert found.provenance == f"{shipped.provenance}; message_s by m.json"
    whole = commands._constants(tmp_path / "all.json", topology.load(name).device, name)
    assert whole == Calibration(matrix=0.9, error=0.1)


def test_too_few_measurements_are_refused(tmp_path: Path, cluster: topology.Topology) -> None:
    path = tmp_path / "m.csv"
    path.write_text(HEADER + "2,64,4,128,8,1,1,8,1,5\n")
    with pytest.raises(PlanError, match="1 measurements for 5 constants"):
        calibration.fit(calibration.read(path), cluster)
    with pytest.raises(PlanError, match="does not exist"):
        calibration.read(tmp_path / "absent.csv")
