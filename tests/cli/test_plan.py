"""``cordillera plan`` as people use it."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import threading
import time
import warnings
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

import cordillera
from cordillera import topology
from cordillera.errors import Interrupted, PlanError
from cordillera.workflows import planning

SMALL = """
batch = 8
sequence = 64
[model]
layers = 2
hidden = 32
heads = 4
vocabulary = 64
"""
ROW = "{layers},1024,16,1024,64,{mb},{tp},{dp},1,{ms}\n"
HEADER = "layers,hidden,heads,sequence,batch,microbatch,tensor,data,pipeline,milliseconds\n"


def test_a_plan_is_printed_and_written(cli: Any) -> None:
    result = cli(
        "plan", "llama3-8b", "two-buildings", "--devices", 64, "--only", "scheduling", "--what-if", "rack.latency_s*=2"
    )
    assert result.code == 0, result.err
    for text in (
        "times as fast as the production-like plan",
        "with rack.latency_s*=2",
        "layouts estimated",
        "constants:",
    ):
        assert text in result.out
    folder = Path("plans/llama3-8b-two-buildings")
    assert sorted(path.name for path in folder.iterdir()) == ["plan.html", "plan.json", "trace.json"]


def test_a_changed_cluster_is_told_by_its_changes_and_small_numbers_keep_digits(cli: Any) -> None:
    Path("tiny.toml").write_text(
        "sequence = 64\nbatch = 8\n[model]\nlayers = 2\nhidden = 64\nheads = 4\nkv_heads = 2\nffn = 128\n"
        "gated = true\nvocabulary = 264\ntied = true\nfused_attention = true\n"
    )
    changes = ("--set", "host.members=4", "--set", "host.latency_s=3e-6")
    result = cli("plan", "tiny.toml", "a100-node", *changes, "--only", "placement", "--out", "p")
    assert result.code == 0, result.err
    told = "a100-node with host.members=4, host.latency_s=3e-6"
    assert json.loads(Path("p/plan.json").read_text())["cluster"]["description"] == told
    page = Path("p/plan.html").read_text()
    assert f"{told}; 4 devices are used" in page
    assert "One host of eight" not in page
    best = next(line.split() for line in result.out.splitlines() if line.split()[:1] == ["1"])
    assert float(best[-1]) > 0
    assert float(best[-3]) > 0
    assert (best[-2], best[-4]) == ("%", "ms")


def test_a_plan_is_charged_what_failures_cost(cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for pause in ("_FIRST_S", "_LONGEST_S"):
        monkeypatch.setattr(f"cordillera.cli._terminal.{pause}", 0.01)
    planned = cli("plan", "llama3-8b", "selene", "--devices", 64, "--only", "placement", "--out", "p")
    assert planned.code == 0
    assert "searching placement  0:00:0" in planned.err  # where there is no terminal, lines tell what it does
    best = json.loads(Path("p/plan.json").read_text())["plans"][0]
    options = ("--between", 0.001, "--replicas", 4, "--days", 0.1, "--runs", 2)
    result = cli("simulate-faults", "--plan", "p/plan.json", *options)
    assert result.code == 0, result.err
    assert f"{best['seconds']:.4g} without" in result.out
    rows = json.loads(cli("simulate-faults", "--plan", "p/plan.json", *options, "--json").out)
    assert {row["devices"] for row in rows} == {64}
    assert {row["job"]["step_s"] for row in rows} == {best["seconds"]}
    worst = f"{best['seconds'] / rows[0]['effective']['value']:.4g}"
    assert worst in result.out
    refused = cli("simulate-faults", "--plan", "p/plan.json", "--devices", 12, "--replicas", 7)
    assert (refused.code, "12 devices cannot be divided into 7 replicas" in refused.err) == (2, True)
    Path("p/plan.json").write_text("{}")
    assert "plan again" in cli("simulate-faults", "--plan", "p/plan.json").err


@pytest.mark.parametrize(("workload", "unit"), [("dlrm-dcnv2", " samples"), ("gpt-22b", " tokens")])
def test_several_clusters_are_compared(cli: Any, workload: str, unit: str) -> None:
    clusters = ("a100-node", "selene")
    result = cli("plan", workload, *clusters, "--devices", 16, "--only", "placement", "--out", "p")
    assert result.code == 0, result.err
    assert f"{workload} on 2 clusters" in result.out
    assert result.out.count(f"{unit}/s") == 1
    assert "\na100-node: 16 devices are asked for, the cluster has 8\n  -> 8 at most\n" in result.out
    assert sorted(str(path) for path in Path("p").rglob("plan.*")) == ["p/selene/plan.html", "p/selene/plan.json"]
    alone = cli("plan", workload, "selene", "--devices", 16, "--only", "placement")
    assert alone.code == 0
    plans = [
        json.loads(Path(name, "plan.json").read_text())["plans"] for name in ("p/selene", f"plans/{workload}-selene")
    ]
    assert plans[0] == plans[1]


def test_numbers_of_devices_are_compared_with_days_and_cost(cli: Any) -> None:
    plan = ("plan", "gpt-22b", "selene", "--layout", "tensor=8", "--tokens", "3e11", "--price", 2)
    numbers = ("--devices", 8, "--devices", 16, "--devices", 8192, "--out", "p")
    found = json.loads(cli(*plan, *numbers, "--json").out)
    rows = found["clusters"]
    assert [row["devices"] for row in rows] == [8, 16, 8192]
    for row in rows[:2]:
        one = json.loads(cli(*plan, "--devices", row["devices"], "--out", "q", "--json").out)
        assert row["tokens_per_s"] == pytest.approx(one["tokens_per_s"])
        assert row["days"] == pytest.approx(3e11 / row["tokens_per_s"] / 86_400) == one["days"]
        assert row["device_hours"] == pytest.approx(24 * row["days"] * row["devices"]) == one["device_hours"]
        assert row["cost"] == pytest.approx(2 * row["device_hours"]) == one["cost"]
        assert row["scaling"] == pytest.approx(rows[0]["device_hours"] / row["device_hours"])
    assert rows[2]["seconds"] is None
    assert "8,192 devices" in found["problems"]["selene-8192"]["what"]
    assert found["budget"] == {"tokens": 3e11, "price": 2}
    page = Path("p/comparison.html").read_text()
    assert "perfect scaling" in page
    assert "8,192 devices" in page
    shown = cli(*plan, *numbers).out
    assert f"{rows[1]['device_hours']:,.0f}" in shown
    assert "comparison: p/comparison.html" in shown
    for wrong, why in (
        (("--tokens", 0), "--tokens: must be a number above 0, got 0"),
        (("--price", "nan"), "--price: must be a number above 0, got nan"),
        (("--devices", 8, "--devices", 8), "cluster 'selene': is named twice with 8 devices"),
    ):
        refused = cli("plan", "gpt-22b", "selene", *wrong)
        assert (refused.code, why in refused.err) == (2, True), refused.err
    refused = cli("plan", "dlrm-dcnv2", "selene", "--price", 2)
    assert (refused.code, "has no effect with a recommendation model" in refused.err) == (2, True)


def test_an_interrupted_comparison_keeps_what_was_planned_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = [("selene", devices) for devices in (16, 8, 4)]
    whole = planning.compare("gpt-22b", cases, tmp_path / "whole", layouts=["tensor=8"])
    assert [row.scaling is None for row in whole.rows] == [False, False, True]  # tensor=8 needs eight
    assert whole.rows[1].scaling == 1  # of those that fit, it has the fewest devices
    assert (whole.rows[0].days, whole.interrupted) == (None, False)  # without a budget
    search = planning.plan

    def interrupted(workload: Any, cluster: Any, folder: Any, *, devices: int, **options: Any) -> Any:
        if devices == 8:
            raise Interrupted("before a plan was found; nothing is written", where="plan")
        return search(workload, cluster, folder, devices=devices, **options)

    monkeypatch.setattr(planning, "plan", interrupted)
    part = planning.compare("gpt-22b", cases, tmp_path / "part", layouts=["tensor=8"])
    assert ([*part.plans], part.interrupted) == (["selene-16"], True)
    with pytest.raises(Interrupted):
        planning.compare("gpt-22b", cases[1:], tmp_path / "none", layouts=["tensor=8"])


def test_what_was_asked_for_is_said_of_each_of_several_clusters(cli: Any) -> None:
    layouts = ("--layout", "tensor=8", "--layout", "tensor=4,pipeline=2")
    own = ("--devices", 8, *layouts, "--what-if", "host.bytes_per_s*=2")
    alone = cli("plan", "gpt-22b", "selene", *own).out.splitlines()
    shown = cli("plan", "gpt-22b", "a100-node", "selene", *own, "--out", "p").out
    assert {line for line in alone if not line.startswith("report")} <= set(shown.splitlines())
    assert shown.count("with host.bytes_per_s*=2: ") == shown.count("workload: 22.06 billion parameters") == 2
    found = json.loads(cli("plan", "gpt-22b", "a100-node", "selene", *own, "--out", "p", "--json").out)
    assert [len(found["plans"][name]["what_if"]) for name in ("a100-node", "selene")] == [1, 1]
    assert [one["parameters"] for one in found["plans"].values()] == [pytest.approx(22.06e9, rel=1e-3)] * 2
    nothing = cli("plan", "gpt-22b", "a100-node", "selene", "--devices", 8, "--layout", "data=4,pipeline=2")
    assert nothing.code == 1
    assert nothing.out.count("layout 1 does not fit: 143.6 GB") == 2
    assert nothing.out.count("none that fits") == 2


def test_units_that_seem_to_be_others_are_named(cli: Any) -> None:
    own = ("--devices", 8, "--layout", "tensor=8", "--set", "device.matrix_flops_per_s=312")
    with pytest.warns(UserWarning, match=r"a100-node: device.matrix_flops_per_s is 312; its unit is FLOP/s"):
        cli("plan", "gpt-22b", "a100-node", *own)


def test_a_plan_of_a_recommendation_model_is_printed_and_written(cli: Any) -> None:
    result = cli(
        "plan", "dlrm-dcnv2", "two-buildings", "--devices", 16, "--only", "placement", "--what-if", "rack.latency_s*=2",
        "--set", "region.distance_km=10",
    )  # fmt: skip
    assert result.code == 0, result.err
    for text in (
        "tables over 16",
        "tables of the best plan: ",
        "times as fast as the production-like plan",
        "with rack.latency_s*=2",
        " layouts, ",
        "base",
    ):
        assert text in result.out
    folder = Path("plans/dlrm-dcnv2-two-buildings")
    assert sorted(path.name for path in folder.iterdir()) == ["plan.html", "plan.json", "trace.json"]


def test_a_plan_is_written_if_there_is_none_after_a_loss(cli: Any) -> None:
    changes = {"host.members": 2, "rack.members": 2, "pod.members": 1, "building.members": 1, "region.members": 1}
    changes["device.memory_bytes"] = 55e9
    sets = [word for key, value in changes.items() for word in ("--set", f"{key}={value}")]
    losses = ("--lose", "host", "--slow", 2, "--only", "network", "--out", "p")
    with pytest.warns(UserWarning, match="^with host lost: 2 devices are left, no plan is possible"):
        result = cli("plan", "llama3-8b", "two-buildings", *sets, *losses)
    assert result.code == 0, result.err
    content = json.loads(Path("p/plan.json").read_text())
    assert content["plans"]
    assert [case["what"] for case in content["what_if"]] == ["one device 2 times as slow"]


@pytest.mark.slow
def test_own_layouts_are_evaluated_side_by_side(cli: Any) -> None:
    own = (
        "--layout",
        "tensor=8,pipeline=16,chunks=8,shard_gradients=true",
        "--layout",
        "tensor=8,pipeline=16,chunks=8",
    )
    result = cli("plan", "llama3-405b", "llama3-building", "--devices", 8192, *own, "--jitter", 0.1, "--out", "p")
    assert result.code == 0, result.err
    for text in (
        "layout 2 does not fit: 79.5 GB on a device of pipeline rank 1, 75.2 GB are usable (activations ",
        "layout 1: ",
        "times as fast as the base",
        "base: TP8 PP16 DP64 ZeRO2-64 v8 mb1, published for 8,192 devices (Grattafiori et al. 2024",
        "layout 1 with latencies 10 % longer on average",
        "  does not fit\n",
        "Tensor-parallel collectives",
    ):
        assert text in result.out
    content = json.loads(Path("p/plan.json").read_text())
    assert [plan["layout"]["shard_gradients"] for plan in content["plans"]] == [True]
    printed = json.loads(
        cli("plan", "llama3-405b", "llama3-building", "--devices", 8192, *own, "--out", "q", "--json").out
    )
    assert [row["fits"] for row in printed["plans"]] == [True, False, True]
    assert printed["plans"][0]["seconds"] == content["plans"][0]["seconds"]
    assert printed["usable_memory_bytes"] == pytest.approx(75.2e9)


def test_a_loss_keeps_the_precision_that_an_own_layout_chose(cli: Any) -> None:
    Path("small.toml").write_text(SMALL)
    own = ("--layout", "tensor=2,fp8=linear", "--lose", "host")
    result = cli("plan", "small.toml", "two-buildings", "--devices", 4, "--set", "host.members=2", *own, "--out", "p")
    assert result.code == 0, result.err
    lost = next(line for line in result.out.splitlines() if line.startswith("with host lost"))
    assert "FP8-linear" in lost


def test_a_new_rate_of_links_takes_the_place_of_the_other(cli: Any) -> None:
    stated = planning._changed("two-buildings", ["region.bytes_per_s=1e9"])
    assert stated.member_bytes_per_s(4, 0) == 1e9
    Path("stated.toml").write_text(
        (resources.files("cordillera.clusters") / "llama3-building.toml")
        .read_text()
        .replace("oversubscription = 7.0", "bytes_per_s = 1e9")
    )
    level = topology.load("stated.toml").levels[-1].name
    narrow = planning._changed("stated.toml", [f"{level}.oversubscription=7"])
    assert narrow.capacities.tolist() == topology.load("llama3-building").capacities.tolist()
    both = planning._changed("stated.toml", [f"{level}.oversubscription=1", f"{level}.bytes_per_s=2e9"])
    assert both.member_bytes_per_s(len(both.levels) - 1, 0) == 2e9
    link = f'\n[[links]]\nlevel = "{level}"\nmember = 1\nbytes_per_s = 1e6\n'
    Path("linked.toml").write_text(Path("stated.toml").read_text() + link)
    wide = planning._changed("linked.toml", [f"{level}.bytes_per_s*=10"])
    assert [wide.member_bytes_per_s(len(wide.levels) - 1, member) for member in (0, 1)] == [1e10, 1e7]
    sets = ("--set", "region.bytes_per_s=1e9", "--set", "region.oversubscription=2")
    assert "two rates of one link; state one" in cli("plan", "llama3-8b", "two-buildings", *sets, "--out", "p").err


def test_devices_without_constants_and_units_that_seem_wrong_are_named(cli: Any) -> None:
    text = (resources.files("cordillera.clusters") / "two-buildings.toml").read_text()
    assert 'name = "H100 SXM5 80GB"' in text
    Path("near.toml").write_text(text.replace("H100 SXM5 80GB", "H100 SXM 80GB"))
    Path("small.toml").write_text(SMALL)
    plan = ("--devices", 4, "--layout", "tensor=4", "--out", "p")
    with pytest.warns(UserWarning, match="not fitted on H100 SXM 80GB: constants of H100 SXM5 80GB; --calibrate fits"):
        cli("plan", "small.toml", "near.toml", *plan)
    Path("other.toml").write_text(text.replace("H100 SXM5 80GB", "MI300X"))
    with pytest.warns(UserWarning, match="MI300X: constants of H100, the lowest that are known"):
        planning._shipped_for(topology.load("other.toml").device, "other.toml")
    for change, said in {
        "device.nic_bytes_per_s=400e9": r"is 4e\+11; its unit is bytes/s \(400 Gb/s are 5e\+10\)",
        "host.bytes_per_s=450": "is 450; its unit is bytes/s",
        "host.latency_s=8": r"is 8; its unit is s \(8 µs are 8e-6\)",
        "device.memory_bytes=80": r"is 80; its unit is bytes \(80 GB are 80e9\)",
    }.items():
        with pytest.warns(UserWarning, match=f"two-buildings: {change.partition('=')[0]} {said}"):
            planning.warn_of_units(planning._changed("two-buildings", [change]), "two-buildings")
    old = text.partition("[device]\n")[2].partition("\n\n")[0].replace("80e9", "80")
    Path("mixed.toml").write_text(
        f'{text}\n[[links]]\nlevel = "region"\nmember = 1\nbytes_per_s = 400\n[[groups]]\nlevel = "building"\n'
        f"domain = 1\nport_bytes_per_s = 300\n[groups.device]\n{old}\n"
    )
    with pytest.warns(UserWarning, match=r"mixed\.toml: ") as warned:
        planning.warn_of_units(topology.load("mixed.toml"), "mixed.toml")
    assert [str(one.message).partition(";")[0] for one in warned] == [
        "mixed.toml: groups[0].device.memory_bytes is 80",
        "mixed.toml: links[0].bytes_per_s is 400",
        "mixed.toml: groups[0].port_bytes_per_s is 300",
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cli("plan", "small.toml", "two-buildings", *plan).code == 0


def test_a_plan_is_no_calibration(cli: Any) -> None:
    Path("small.toml").write_text(SMALL)
    plan = ("plan", "small.toml", "two-buildings", "--devices", 4, "--layout", "tensor=4")
    assert cli(*plan, "--out", "p").code == 0
    refused = cli(*plan, "--calibration", "p/plan.json", "--out", "q")
    assert refused.code == 2
    assert "is a plan, not a calibration" in refused.err


def test_layouts_of_which_none_fits_write_nothing_and_say_what_takes_the_memory(cli: Any) -> None:
    result = cli("plan", "llama3-8b", "two-buildings", "--devices", 64, "--layout", "tensor=1", "--out", "p")
    assert result.code == 1, result.err
    assert "layout 1 does not fit" in result.out
    assert not Path("p").exists()


def test_error_bars_are_those_of_the_constants_and_fp8_has_none(cli: Any) -> None:
    Path("own.json").write_text(json.dumps({"error": 0.1, "provenance": "ours"}))
    command = ("plan", "llama3-8b", "two-buildings", "--devices", 16, "--layout", "tensor=8")
    narrow = (*command, "--layout", "tensor=8,fp8=none", "--fp8", "linear", "--calibration", "own.json")
    rows = json.loads(cli(*narrow, "--out", "p", "--json").out)["plans"]
    assert [row["error_s"] is None for row in rows] == [True, False, True]  # the base is in FP8, too
    assert rows[1]["error_s"] == pytest.approx(0.1 * rows[1]["seconds"])
    assert rows[0]["seconds"] < rows[1]["seconds"]
    out = cli(*narrow, "--out", "q").out
    assert "±" in out
    assert "is not known: no measured step was in FP8" in out
    assert "its error is not known" in Path("q/plan.html").read_text()
    assert "on average, by the constants' error" in cli(*command, "--calibration", "own.json", "--out", "r").out
    assert "the mean error of the constants" in Path("r/plan.html").read_text()
    shipped = cli(*command, "--out", "s").out  # three steps by which a constant was chosen say nothing of others
    assert "±" not in shipped
    assert "is not known" in shipped
    for refused, message in ((("llama3-8b", "selene"), "has no FP8"), (("dlrm-dcnv2", "selene"), "is not known for")):
        result = cli("plan", *refused, "--devices", 16, "--fp8", "ffn")
        assert result.code == 2
        assert message in result.err
    assert "none, ffn, linear" in cli("plan", "llama3-8b", "selene", "--fp8", "all").err


def test_what_links_lack_is_set_on_the_command_line_and_not_offered(cli: Any) -> None:
    lacking = ("--set", "rack.spraying=0", "--set", "rack.zero_copy=0")
    command = ("plan", "llama3-8b", "two-buildings", "--devices", 16, "--only", "network")
    result = cli(*command, *lacking, "--what-if", "rack.spraying=1", "--out", "p")
    assert result.code == 0, result.err
    assert "with rack.spraying=1: " in result.out
    content = json.loads(Path("p/plan.json").read_text())
    rack = next(level for level in content["cluster"]["levels"] if level["name"] == "rack")
    assert (rack["spraying"], rack["selective_repeat"], rack["zero_copy"]) == (False, True, False)
    for plan in content["plans"]:
        assert plan["network"]["rack"]["balance"] != "spray"
        assert not plan["network"]["rack"]["zero_copy"]
    for wrong in ("rack.spraying=2", "rack.spraying*=2"):
        refused = cli(*command, "--set", wrong)
        assert refused.code == 2
        assert "spraying" in refused.err


@pytest.mark.slow
def test_an_own_layout_stands_beside_a_search(cli: Any) -> None:
    layout = ("--layout", "tensor=8,pipeline=2", "--compare", "--only", "scheduling")
    result = cli("plan", "llama3-8b", "two-buildings", "--devices", 64, *layout, "--out", "p", "--json")
    assert result.code == 0, result.err
    rows = {row["place"]: row for row in json.loads(result.out)["plans"]}
    assert list(rows) == ["1", "searched", "base"]
    assert rows["searched"]["seconds"] <= rows["base"]["seconds"]
    assert "searched" in Path("p/plan.html").read_text()


@pytest.mark.slow
def test_smaller_searches_stand_beside_the_joint_one(cli: Any) -> None:
    words = ("plan", "llama3-8b", "two-buildings", "--devices", 64, "--only", "network", "--compare", "--out", "p")
    result = cli(*words, "--json")
    assert result.code == 0, result.err
    places = [row["place"] for row in json.loads(result.out)["plans"]]
    assert places[-4:] == ["placement alone", "scheduling alone", "network alone", "base"]


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


def test_products_are_measured_interrupted_continued_and_used(cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from cordillera.cost import Products
    from cordillera.kernels import products

    Path("small.toml").write_text(SMALL)
    measure, calls = products.measure, []

    def interrupted(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return measure(*arguments)

    monkeypatch.setattr(products, "measure", interrupted)
    command = ["plan", "small.toml", "a100-node", "--measure", "products.csv"]
    result = cli(*command)
    assert result.code == 130, result.err
    assert "3 matrix products measured on " in result.out
    assert "give the same command again to go on" in result.out
    assert len(Products.read("products.csv").seconds) == 3
    search = ["plan", "small.toml", "a100-node", "--only", "network", "--products", "products.csv", "--out"]
    assert cli(*search, "some").code == 0
    result = cli(*command)
    assert result.code == 0, result.err
    table = Products.read("products.csv")
    assert f"{len(table.seconds):,} matrix products measured on {table.device} in bfloat16" in result.out
    assert f"{len(table.seconds) - 3} of them now" in result.out
    assert not Path("plans").exists()
    result = cli(*search, "all")
    assert result.code == 0, result.err
    line = f"100.0 % of the time of matrix products rests on {table}"
    assert line in result.out
    assert line in Path("all/plan.html").read_text()
    some, everything = (json.loads(Path(f"{name}/plan.json").read_text())["products"] for name in ("some", "all"))
    assert everything["device"] == table.device
    assert everything["rows"] == len(table.seconds)
    assert everything["measured_share"]["best"] == everything["measured_share"]["production"] == 1
    assert some["rows"] == 3
    assert 0 <= some["measured_share"]["best"] < 1


def test_a_plan_without_measured_products_says_nothing_of_them(cli: Any) -> None:
    Path("small.toml").write_text(SMALL)
    result = cli("plan", "small.toml", "a100-node", "--only", "network", "--out", "p")
    assert result.code == 0, result.err
    assert "of the time of matrix products" not in result.out + Path("p/plan.html").read_text()
    assert json.loads(Path("p/plan.json").read_text())["products"] is None


def test_a_wrong_table_is_refused_with_its_row(cli: Any) -> None:
    Path("products.csv").write_text("rows,columns,inner,count,seconds,dtype,device\n8,8,8,1,0,bfloat16,A100\n")
    for option in ("--products", "--measure"):
        result = cli("plan", "gpt-22b", "a100-node", option, "products.csv")
        assert result.code == 2
        assert "products.csv: 1 mistake" in result.err
        assert "line 2, column seconds: '0' is not a positive number" in result.err
        assert result.err.count("error:") == 1
    assert not Path("plans").exists()


def test_a_bad_day_is_told_in_the_text_and_in_the_file(cli: Any) -> None:
    options = ["--slow", 1.2, "--jitter", 0.5, "--lose", "host:1", "--what-if", "host.bytes_per_s/=2", "--out", "p"]
    changes = ["--set", "rack.members=2", "--set", "pod.members=1", "--set", "building.members=1"]
    result = cli("plan", "llama3-8b", "two-buildings", "--only", "network", *options, *changes)
    assert result.code == 0, result.err
    content = json.loads(Path("p/plan.json").read_text())
    assert [case["what"] for case in content["what_if"]] == [
        "host.bytes_per_s/=2",
        "one device 1.2 times as slow",
        "latencies 50 % longer on average, each by chance",
        "host:1 lost",
    ]
    for case in content["what_if"]:
        assert f"with {case['what']}: {case['seconds']:.3f} s" in result.out
    lost = content["what_if"][-1]
    assert lost["figures"]["devices_gone"] == 8
    assert lost["figures"]["devices_left"] == 24
    assert "8 of 32 devices (25.00 %) are gone" in result.out


@pytest.mark.slow
def test_ctrl_c_prints_the_best_plan_so_far(tmp_path: Path) -> None:
    """Searches of some seconds are interrupted as soon as it says that layouts are estimated."""
    screen, stderr = pty.openpty()
    command = [sys.executable, "-m", "cordillera", "plan", "llama3-405b", "two-buildings"]
    command += ["--compare", "--lose", "building", "--out", "p"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=stderr, text=True) as process:
        try:
            os.close(stderr)
            shown, deadline = "", time.monotonic() + 120
            while "layouts estimated" not in shown:
                assert time.monotonic() < deadline, shown
                assert process.poll() is None, shown
                if select.select([screen], [], [], 0.2)[0]:
                    shown += os.read(screen, 4096).decode(errors="replace")
            process.send_signal(signal.SIGINT)
            begin = time.monotonic()
            drain = threading.Thread(target=_drain, args=(screen,), daemon=True)
            drain.start()
            out = process.communicate(timeout=120)[0]
        finally:
            process.kill()
    assert process.returncode == 130, shown
    assert "interrupted: this is the best until then" in out
    assert "base" in out
    assert "times as fast as the production-like plan" in out
    assert "lost" not in out  # no other search was begun
    content = json.loads((tmp_path / "p/plan.json").read_text())
    assert content["interrupted"]
    assert content["plans"][0]["seconds"] <= content["production"]["seconds"]
    assert "The search was interrupted" in (tmp_path / "p/plan.html").read_text()
    assert time.monotonic() - begin < 120


def _drain(screen: int) -> None:
    with contextlib.suppress(OSError):  # the other end was closed
        while os.read(screen, 4096):
            pass


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "needs a workload and a cluster"),
        (["gpt-22b"], "needs a workload and a cluster"),
        (["gpt-22", "a100-node"], "did you mean gpt-22b?"),
        (["gpt-22b", "a100-node", "selen"], "did you mean selene?"),
        (["gpt-22b", "a100-node", "./a100-node"], "cluster 'a100-node': is named twice"),
        (["gpt-22b", "a100-node", "other/a100-node"], "and give their files different names"),
        (["gpt-22b", "a100-node", "selene", "--devices", "100000"], "error: a100-node: 100,000 devices are asked for"),
        (["gpt-22b", "a100-node", "selene", "--measure", "p.csv"], "plan --measure: is for one cluster"),
        (["gpt-22b", "a100-nod"], "did you mean a100-node?"),
        (["gpt-22b", "a100-node", "--layout", "tensor"], "'tensor' is not key=value"),
        (["gpt-22b", "a100-node", "--layout", "tensor=3"], "tensor x context x pipeline = 3 does not divide 8 devices"),
        (["gpt-22b", "a100-node", "--layout", "tensor=8,data=2"], "takes 16 devices, 8 are in use"),
        (["dlrm-dcnv2", "a100-node", "--layout", "tensor=8"], "are not known for recommendation models"),
        (["a100-node", "--calibrate", "x.csv", "--layout", "tensor=8"], "--layout: has no effect with --calibrate"),
        (["gpt-22b", "a100-node", "--layout", "tensor=8", "--only", "network"], "no effect with --layout alone"),
        (["gpt-22b", "a100-node", "--only", "magic"], "'magic' is not searched"),
        (["gpt-22b", "a100-node", "--set", "region.x=1"], "there is no level 'region'"),
        (["gpt-22b", "a100-node", "--set", "host.latency_s=-1"], "host.latency_s: must be at least"),
        (["gpt-22b", "a100-node", "--set", "host.bytes_per_s=0"], "host.bytes_per_s: must be at least"),
        (["llama3-8b", "two-buildings", "--set", "region.planes_lost=1"], "region: 1 of 1 planes lost leaves no way"),
        (["llama3-8b", "llama4-region", "--set", "region.planes_lost=76"], "75 can be lost at most"),
        (["llama3-8b", "two-buildings", "--set", "region.loss_rate=1"], "region.loss_rate: must be"),
        (["llama3-8b", "two-buildings", "--set", "region.members=0"], "region.members: must be at least"),
        (["gpt-22b", "a100-node", "--devices", "16"], "8 at most"),
        (["llama3-8b", "two-buildings", "--devices", "24575"], "another number of devices: 24,576 would do"),
        (["gpt-1t", "a100-node"], "devices with 2,41"),
        (["gpt-175b", "selene", "--devices", "8"], "or more of them: 64 would do"),
        (["gpt-22b", "a100-node", "--slow", "0.9"], "--slow: 0.9 is not from 1 to 1,000,000"),
        (["gpt-22b", "a100-node", "--slow", "nan"], "--slow: nan is not from 1"),
        (["gpt-22b", "a100-node", "--jitter", "-1"], "--jitter: -1 is not from 0 to 1,000,000"),
        (["gpt-22b", "a100-node", "--jitter", "inf"], "--jitter: inf is not from 0"),
        (["gpt-22b", "a100-node", "--lose", "host"], "nothing is left without host 0"),
        (["gpt-22b", "a100-node", "--lose", "building:1"], "there is no level 'building'"),
        (["llama3-8b", "two-buildings", "--lose", "building:2"], "there is no building 2"),
        (["llama3-8b", "two-buildings", "--lose", "building:two"], "write level or level:number"),
        (["dlrm-12t", "a100-node"], "GB do not fit"),
        (["dlrm-dcnv", "a100-node"], "did you mean dlrm-dcnv2?"),
        (["dlrm-dcnv2", "a100-node", "--devices", "16"], "16 devices are asked for, the cluster has 8"),
        (["gpt-22b", "a100-node", "--calibration", "absent.json"], "absent.json: does not exist"),
        (["gpt-22b", "a100-node", "--products", "absent.csv"], "absent.csv: does not exist"),
        (["dlrm-dcnv2", "a100-node", "--measure", "p.csv"], "--measure: is not known for recommendation models"),
        (["gpt-22b", "--measure", "p.csv"], "needs a workload and a cluster"),
        (["a100-node", "--calibrate", "absent.csv"], "absent.csv: does not exist"),
        (["a100-node", "--calibrate", "."], ".: is not an ordinary file"),
        (["a100-node", "--calibrate", "x.csv", "--slow", "2"], "--slow: has no effect with --calibrate"),
        (["gpt-22b", "a100-node", "--measure", "p.csv", "--out", "x"], "--out: has no effect with --measure"),
        (["gpt-22b", "a100-node", "--measure", "."], ".: cannot be written: it is a folder"),
        (["", "a100-node"], "workload '': is neither a shipped workload nor a file"),
        (["gpt-22b", "."], ".: is neither a shipped cluster nor a file"),
        (["gpt-22b", "a100-node", "--only", ""], "'' is not searched"),
        (["gpt-22b", "a100-node", "--devices", "9" * 30], "8 at most"),
        (["gpt-22b", "a100-node", "--slow", "1e308"], "--slow: 1e+308 is not from 1"),
        (["gpt-22b", "a100-node", "--set", ""], "is not a change"),
        (["gpt-22b", "a100-node", "--set", "host.latency_s=nan"], "is not a change"),
        (["gpt-22b", "a100-node", "--set", "host.latency_s*=1e308", "--set", "host.latency_s=1"], "a second time"),
        (["gpt-22b", "a100-node", "--set", "host.latency_s=1e308"], "host.latency_s: must be at most"),
        (["gpt-22b", "a100-node", "--set", "host.members=1e8"], "host.members: must be at most"),
        (["gpt-22b", "a100-node", "--what-if", "host.latency_s/=0"], "host.latency_s/=0: divides by 0"),
        (["gpt-22b", "a100-node", "--what-if", "host.name*=2"], "is not one number"),
        (["gpt-22b", "a100-node", "--what-if", "host.members=4"], "leaves 4 devices for a plan on 8"),
        (["gpt-22b", "a100-node", "--what-if", "host.loss_rate=0.5"], "host.loss_rate: losses are modelled on levels"),
        (["llama3-8b", "two-buildings", "--set", "region.members=100000"], "at most 1,048,576 can be planned"),
        (["gpt-22b", "a100-node", "--lose", "host:" + "9" * 5000], "write level or level:number"),
        (["gpt-22b", "a100-node", "--calibrate", "absent.csv"], "needs the cluster alone"),
    ],
)  # fmt: skip
def test_mistakes_end_in_one_clear_message(cli: Any, capsys: Any, arguments: list[str], message: str) -> None:
    result = cli("plan", *arguments)
    assert result.code != 0
    assert message in result.err
    assert result.err.count("error:") == 1
    assert not Path("plans").exists()


@pytest.mark.parametrize("place", ["file", "file/x", "taken"])
def test_a_place_that_cannot_be_written_is_found_before_the_search(
    cli: Any, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    from cordillera.workflows import planning as commands

    monkeypatch.setattr(commands, "Explorer", None)  # a search would crash
    Path("file").touch()
    Path("taken/plan.html").mkdir(parents=True)
    for arguments in (["gpt-22b", "a100-node"], ["a100-node", "--calibrate", "absent.csv"]):
        if arguments[0] == "a100-node" and place == "taken":
            continue
        result = cli("plan", *arguments, "--out", place)
        assert result.code == 2
        assert "cannot be written: " in result.err
    assert sorted(str(path) for path in Path().rglob("*")) == ["file", "taken", "taken/plan.html"]


def test_a_folder_that_is_made_for_a_search_that_fails_does_not_stay(cli: Any) -> None:
    assert cli("plan", "gpt-1t", "a100-node", "--out", "a/b/c").code == 2
    assert not Path("a").exists()


def test_a_full_disk_leaves_the_earlier_plan_and_no_parts(cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("small.toml").write_text(SMALL)
    command = ["plan", "small.toml", "a100-node", "--only", "network", "--out", "p"]
    assert cli(*command).code == 0
    before = {path: path.read_bytes() for path in Path("p").iterdir()}
    real, calls = os.fsync, []

    def full(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) % 3 == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    result = cli(*command)
    assert result.code == 2
    assert "p/trace.json: cannot be written: No space left on device" in result.err
    assert {path: path.read_bytes() for path in Path("p").iterdir()} == before
    assert cli(*command[:-1], "new/folder").code == 2
    assert not Path("new").exists()


def test_ctrl_c_before_the_first_plan_says_that_nothing_is_written(cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from cordillera.planning.language.explorer import Explorer

    def interrupted(self: Explorer) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Explorer, "production", interrupted)
    result = cli("plan", "gpt-22b", "a100-node")
    assert result.code == 130
    assert "interrupted: plan: before a plan was found; nothing is written" in result.err
    assert not Path("plans").exists()


def test_ctrl_c_in_the_search_beside_own_layouts_keeps_what_is_known_of_them(
    cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cordillera.planning.language.explorer import Explorer

    def interrupted(self: Explorer, only: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Explorer, "explore", interrupted)
    for layout, said in (("tensor=8,pipeline=2", "TP8 PP2"), ("tensor=1", "layout 1 does not fit")):
        words = ("plan", "llama3-8b", "two-buildings", "--devices", 64, "--layout", layout, "--compare")
        result = cli(*words, "--out", "p")
        assert result.code == 130, result.err
        assert "interrupted: what had not been computed by then is missing" in result.out
        assert said in result.out


def test_a_search_that_finds_nothing_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cordillera.errors import PlanError
    from cordillera.planning.language.explorer import Explorer
    from cordillera.workflows.planning import plan

    search = Explorer.explore

    def nothing(self: Explorer, only: Any) -> Any:
        found = search(self, only)
        found.plans.clear()
        return found

    monkeypatch.setattr(Explorer, "explore", nothing)
    with pytest.raises(PlanError, match="no plan is possible"):
        plan("gpt-22b", "a100-node", tmp_path / "p", only=["network"])
    assert not list(tmp_path.iterdir())


def test_names_that_look_like_markup_are_printed_as_they_are(cli: Any, tmp_path: Path) -> None:
    Path("small.toml").write_text('name = "[/x]"\n' + SMALL)
    result = cli("plan", "small.toml", "a100-node", "--only", "network", "--out", "p")
    assert result.code == 0, result.err
    assert "[/x] on a100-node" in result.out
    rows = [ROW.format(layers=24, mb=mb, tp=tp, dp=8 // tp, ms=900 + tp + mb) for mb in (1, 2, 4) for tp in (1, 2)]
    Path("steps.csv").write_text("model," + HEADER + "".join(f"[/y],{row}" for row in rows))
    result = cli("plan", "a100-node", "--calibrate", "steps.csv", "--out", "mine")
    assert result.code == 0, result.err
    assert "[/y] TP" in result.out


def test_a_what_if_of_the_device_changes_the_step_and_says_where_it_no_longer_fits(cli: Any) -> None:
    Path("small.toml").write_text(SMALL)
    changes = ["--what-if", "device.matrix_flops_per_s/=1e6", "--what-if", "device.memory_bytes=1e3"]
    result = cli("plan", "small.toml", "a100-node", "--only", "network", *changes, "--out", "p")
    assert result.code == 0, result.err
    slower, smaller = json.loads(Path("p/plan.json").read_text())["what_if"]
    assert slower["seconds"] > 2 * smaller["seconds"]
    assert slower["note"] == ""
    assert re.search(r"with device.memory_bytes=1e3: .* but it needs .* GB on a device of 1e-06 GB", result.out)


def test_rate_and_days_of_a_training_are_told_and_wrong_searches_refused(cli: Any, tmp_path: Path) -> None:
    plan = ("plan", "llama3-8b", "two-buildings", "--devices", 8, "--layout", "tensor=8", "--out", "p")
    content = json.loads(cli(*plan, "--json").out)
    rate = content["tokens"] / content["plans"][0]["seconds"]
    assert content["tokens_per_s"] == pytest.approx(rate)
    said = cli(*plan).out
    assert f"{rate:,.0f} tokens/s; 1T tokens take {1e12 / rate / 86_400:,.1f} days without failures, " in said
    for wrong, why in (
        ({"only": ["placment"]}, r"only: 'placment' is not searched; did you mean 'placement'"),
        ({"only": "network2"}, r"only: 'network2' is not searched"),
        ({"devices": 0}, r"devices: must be at least 1, got 0"),
        ({"devices": -8}, r"devices: must be at least 1, got -8"),
    ):
        with pytest.raises(PlanError, match=why):
            cordillera.plan("llama3-8b", "two-buildings", tmp_path / "q", **wrong)


def test_steps_unlike_all_that_were_measured_have_no_error_bar(cli: Any) -> None:
    own = ("--layout", "tensor=8", "--layout", "tensor=4,shards=2,shard_weights=true")
    out = cli("plan", "llama3-8b", "selene", "--devices", 8, *own, "--out", "p", "--json").out
    assert [row["error_s"] is None for row in json.loads(out)["plans"]][:2] == [False, True]
