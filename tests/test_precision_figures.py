"""Figures of low precision in the documentation are those of the result files beside the benchmarks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
SYSTEMS = ROOT / "docs/systems"


def _results(name: str) -> Any:
    found = json.loads((ROOT / f"benchmarks/results/{name}.json").read_text(encoding="utf-8"))
    assert not found["quick"]
    return found


def _page(name: str) -> str:
    return (SYSTEMS / name).read_text(encoding="utf-8")


def _row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def _spread(times: dict[str, float]) -> tuple[str, str]:
    return f"{times['median']:.2f}", f"{times['low']:.2f} to {times['high']:.2f}"


def test_rows_in_few_bits_are_quoted_as_measured() -> None:
    page = _page("mixed-precision-embeddings.md")
    for one in _results("mixed_precision_embeddings-quality")["results"]:
        if one["contender"] != "fp32":
            low, high = (f"{100 * end:+.3f}" for end in one["interval"])
            hits = f"{one['hit_rate']:.0%}" if one["hit_rate"] else ""
            assert _row(one["case"], one["contender"], f"{100 * one['loss']:+.3f} %", f"{low} to {high}", hits) in page
    for one in _results("mixed_precision_embeddings-memory")["results"]:
        if "lru" not in one["rows"] and "no cache" not in one["rows"]:
            asked = f"{one['target_at_most']:.2f}" if one.get("target_at_most") else ""
            cells = (f"{one['share']:.3f}", f"{one['times_smaller']:.2f}", asked)
            assert _row(one["optimizer"].replace("_", " "), one["rows"], *cells) in page
    for one in _results("mixed_precision_embeddings-speed")["ratios"]:
        if "20,000" not in one["case"]:
            assert _row(one["case"], one["ours"], one["peer"], *_spread(one["times"])) in page


def test_plans_are_quoted_as_measured() -> None:
    page = " ".join(_page("loka.md").split())
    shapes = _results("loka-shapes")
    for one in shapes["rows"]:
        times = (f"{one['milliseconds'][name]:.3f}" for name in ("fp32", one["kernel"]))
        shape = " x ".join(map(str, one["shape"]))
        assert _row(shape, one["kernel"], *times, f"{one['times_fp32']:.2f}") in page
    assert f"{shapes['geometric_mean']:.2f} times fp32 in geometric mean" in page
    assert f"{shapes['over_best_uniform']:.2f} times the best kernel taken everywhere" in page
    model = _results("loka-model")
    for name, ratio in model["plan_over"].items():
        if name != "plan":
            assert _row(name, f"{model['milliseconds'][name]:.2f}", *_spread(ratio)) in page
    assert f"{100 * model['change']['mean']:+.4f} %" in page
    probe = _results("loka-probe")
    assert f"{probe['errors']['ours']:.1e}" in page
    assert f"{100 * probe['overhead_at_interval_100']:.1f} % of a step" in page


def test_quantised_models_are_quoted_as_measured() -> None:
    page = " ".join(_page("low-precision-inference.md").split())
    for name, one in _results("low-precision-inference-quantize")["rows"].items():
        change = one["change"]
        cells = (
            {"dlrm": "DLRM", "wukong": "Wukong"}[name], f"{100 * one['share']:.1f} %", f"{100 * change['mean']:+.4f} %",
            f"{100 * change['low']:+.4f} to {100 * change['high']:+.4f}", str(one["evaluations"]), str(one["sweep"]),
            *_spread(one["times_faster"]),
        )  # fmt: skip
        assert _row(*cells) in page


def test_drift_is_quoted_as_measured() -> None:
    if not (ROOT / "benchmarks/results/low-precision-inference-drift.json").is_file():
        pytest.skip("not measured yet: cordillera bench low-precision-inference --part drift")
    page = " ".join(_page("low-precision-inference.md").split())
    for one in _results("low-precision-inference-drift")["rows"].values():
        assert f"{one['false_alarms']} of {one['windows']:,}" in page
        for kind in one["drifts"].values():
            assert f"{kind['found']} of {kind['injected']}" in page


def test_layers_in_eight_bits_are_quoted_as_measured() -> None:
    page = " ".join(_page("fbgemm.md").split())
    linear = _results("fbgemm-linear")["values"]
    for one in linear["rows"]:
        cells = [f"{one['times'][name]['float32']['median']:.2f}" for name in ("static", "dynamic", "fused", "codes")]
        assert _row(" x ".join(map(str, one["shape"])), *cells) in page
    for name in ("static", "dynamic", "fused", "codes"):
        assert f"{linear['geometric_means'][name + '_over_float32']:.2f}" in page
    assert f"{linear['geometric_means']['fused_over_unfused']:.2f} times the unfused" in page
    assert f"{linear['elements_apart']} of {linear['elements']:,} codes" in page
    mlp = _results("fbgemm-mlp")["values"]
    assert f"{mlp['least_decibels']:.1f} dB" in page
    assert f"{mlp['geometric_mean']:.2f} times as fast" in page
    rows = _results("fbgemm-rows")["values"]
    assert f"{rows['largest_greedy_over_minmax_of_4_bits']:.3f} of" in page


def test_training_in_bfloat16_is_quoted_as_measured() -> None:
    page = _page("bfloat16.md")
    for one in _results("bfloat16-accuracy")["results"]:
        if one["variant"] != "float32":
            interval = " to ".join(f"{end:+.3f}" for end in one["interval_percent"])
            assert _row(one["data"], one["variant"], f"{one['mean_percent']:+.3f} %", interval) in page
    for one in _results("bfloat16-split")["results"]:
        assert f"{one['different']} of {one['numbers']:,} numbers after {one['steps']:,} steps" in page


def test_vulnerability_is_quoted_as_measured() -> None:
    page = " ".join(_page("pvf.md").split())
    for part in ("models", "formats"):
        for model in _results(f"pvf-{part}")["results"]:
            for one in model["components"]:
                pvf = one["pvf"]
                interval = f"{100 * pvf['low']:.3f} to {100 * pvf['high']:.3f} %"
                assert _row(model["model"], one["name"], f"{100 * pvf['value']:.3f} %", interval) in page
    for one in _results("pvf-speed")["results"]:
        assert f"{one['model']} {one['times_faster']['median']:.1f} times" in page
