"""``cordillera plan`` as people use it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

ROW = "{layers},1024,16,1024,64,{mb},{tp},{dp},1,{ms}\n"
HEADER = "layers,hidden,heads,sequence,batch,microbatch,tensor,data,pipeline,milliseconds\n"


def test_a_plan_is_printed_and_written(cli: Any) -> None:
    result = cli(
        "plan", "llama3-8b", "two-buildings", "--devices", 64, "--only", "scheduling", "--what-if", "rack.latency_s*=2"
    )
    assert result.code == 0, result.err
    for text in ("times the production-like plan", "with rack.latency_s*=2", "layouts estimated", "constants:"):
        assert text in result.out
    folder = Path("plans/llama3-8b-two-buildings")
    assert sorted(path.name for path in folder.iterdir()) == ["plan.html", "plan.json", "trace.json"]


def test_a_plan_of_a_recommendation_model_is_printed_and_written(cli: Any) -> None:
    result = cli(
        "plan", "dlrm-dcnv2", "two-buildings", "--devices", 16, "--only", "placement", "--what-if", "rack.latency_s*=2",
        "--set", "region.distance_km=10",
    )  # fmt: skip
    assert result.code == 0, result.err
    for text in (
        "tables over 16",
        "tables of the best plan: ",
        "times the production-like plan",
        "with rack.latency_s*=2",
        " layouts, ",
        "base",
    ):
        assert text in result.out
    folder = Path("plans/dlrm-dcnv2-two-buildings")
    assert sorted(path.name for path in folder.iterdir()) == ["plan.html", "plan.json", "trace.json"]


def test_what_ships_is_listed(cli: Any) -> None:
    out = cli("plan", "--list").out
    assert "llama3-405b" in out
    assert "llama4-region" in out
    assert "dlrm-12t" in out


def test_constants_are_fitted_and_used(cli: Any, tmp_path: Path) -> None:
    rows = [
        ROW.format(layers=24, mb=mb, tp=tp, dp=8 // tp, ms=900 + 50 * tp + 3 * mb)
        for mb in (1, 2, 4)
        for tp in (1, 2, 4)
    ]
    (tmp_path / "steps.csv").write_text(HEADER + "".join(rows))
    result = cli("plan", "a100-node", "--calibrate", "steps.csv", "--out", "mine")
    assert result.code == 0, result.err
    assert "9 measured steps" in result.out
    assert json.loads(Path("mine/calibration.json").read_text())["provenance"] == "steps.csv on a100-node"
    result = cli("plan", "gpt-22b", "a100-node", "--calibration", "mine/calibration.json", "--only", "network")
    assert result.code == 0, result.err
    assert "constants: steps.csv on a100-node" in result.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "needs a workload and a cluster"),
        (["gpt-22b"], "needs a workload and a cluster"),
        (["gpt-22", "a100-node"], "did you mean gpt-22b?"),
        (["gpt-22b", "a100-nod"], "did you mean a100-node?"),
        (["gpt-22b", "a100-node", "--only", "magic"], "'magic' is not searched"),
        (["gpt-22b", "a100-node", "--set", "region.x=1"], "there is no level 'region'"),
        (["gpt-22b", "a100-node", "--set", "host.latency_s=-1"], "latency_s: input should be greater than or equal"),
        (["gpt-22b", "a100-node", "--set", "host.bytes_per_s=0"], "bytes_per_s: input should be greater than 0"),
        (["gpt-22b", "a100-node", "--devices", "16"], "16 devices are asked for, the cluster has 8"),
        (["gpt-1t", "a100-node"], "no plan is possible"),
        (["dlrm-12t", "a100-node"], "GB do not fit"),
        (["dlrm-dcnv", "a100-node"], "did you mean dlrm-dcnv2?"),
        (["dlrm-dcnv2", "a100-node", "--devices", "16"], "16 devices are asked for, the cluster has 8"),
        (["gpt-22b", "a100-node", "--calibration", "absent.json"], "absent.json: cannot be read"),
        (["a100-node", "--calibrate", "absent.csv"], "absent.csv: cannot be read"),
        (["gpt-22b", "a100-node", "--calibrate", "absent.csv"], "needs the cluster alone"),
    ],
)  # fmt: skip
def test_mistakes_end_in_one_clear_message(cli: Any, capsys: Any, arguments: list[str], message: str) -> None:
    result = cli("plan", *arguments)
    assert result.code != 0
    assert message in result.err
    assert not Path("plans").exists()
