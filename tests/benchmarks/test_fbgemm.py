"""The benchmark of eight-bit layers and rows: contenders compute the same, and every part writes its figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from _quantized_linear import _Case, measure_linear, unfused_linear
from typer.testing import CliRunner

from cordillera.cli import bench
from cordillera.cli.app import app


def test_the_unfused_baseline_computes_the_same_codes() -> None:
    with torch.no_grad():
        case = _Case.make(7, 96, 64)
        assert case.static._input is not None
        unfused = unfused_linear(case.static.weight, *case.static._input, case.output)
        for x in case.inputs:
            apart = (unfused(x).int() - case.chain.codes(x).int()).abs()
            assert int(apart.max()) <= 1
            assert float((apart > 0).float().mean()) < 0.01
    assert case.apart()[0] == 0


def test_contenders_stand_for_the_same_layer() -> None:
    with torch.no_grad():
        case = _Case.make(5, 48, 160)
        exact = torch.cat([torch.relu(x @ case.weight.t() + case.bias) for x in case.inputs])
        for layer in (case.static, case.dynamic):
            found = torch.cat([layer(x) for x in case.inputs])
            assert float((found - exact).norm() / exact.norm()) < 0.03


@pytest.mark.slow
def test_geometric_means_are_of_the_rows() -> None:
    with torch.no_grad():
        values = measure_linear(2, quick=True)["values"]
    times = [row["times"]["fused"]["unfused"]["median"] for row in values["rows"]]
    assert values["geometric_means"]["fused_over_unfused"] == pytest.approx((times[0] * times[1]) ** 0.5)
    assert values["least_fused_over_unfused"] == min(times)
    assert values["elements_apart"] <= values["targets"]["apart"] * values["elements"]


@pytest.mark.slow
def test_every_part_is_run_by_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "fbgemm" in bench.programs()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    arguments = ["bench", "fbgemm", "--quick", "--threads", "1", "--results", str(tmp_path)]
    outcome = CliRunner().invoke(app, arguments)
    assert outcome.exit_code == 0, outcome.output
    found = {path.name: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert sorted(found) == [f"fbgemm-{part}.json" for part in ("accumulate16", "linear", "mlp", "rows")]
    assert found["fbgemm-accumulate16.json"]["evidence"] == "emulated"
    assert all(row["same_bytes_as_torch"] for row in found["fbgemm-rows.json"]["values"]["rows"])
    assert found["fbgemm-mlp.json"]["values"]["least_decibels"] >= 30
    assert all(content["quick"] for content in found.values())
