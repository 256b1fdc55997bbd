"""Figures in the documentation are those of the result files beside the benchmarks."""

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


def _results(part: str) -> Any:
    return json.loads((ROOT / f"benchmarks/results/ranking-{part}.json").read_text(encoding="utf-8"))


def _page(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def _table_row(page: str, *cells: str) -> str:
    found = [line for line in page.splitlines() if line.startswith("|") and all(cell in line for cell in cells)]
    assert len(found) == 1, (cells, found)
    return found[0]


@pytest.mark.parametrize("number", range(6))
def test_quality_is_quoted_as_measured(number: int) -> None:
    result = _results("quality")["results"][number]
    data = {"movielens-100k": "MovieLens-100K", "adult": "Adult"}[result["data"]]
    row = _table_row(_page("docs/systems/index.md"), f"| {data}", f"| {result['model']} |")
    for side in ("ours", "FuxiCTR"):
        for key in ("auc", "ne"):
            measured = result["sides"][side][key]
            assert f"{measured['mean']:.4f} ± {measured['sd']:.4f}" in row


@pytest.mark.parametrize("part", ["speed", "update"])
def test_ratios_are_quoted_as_measured(part: str) -> None:
    page = _page("docs/systems/index.md")
    for ratio in _results(part)["ratios"]:
        if "torch" in ratio["ours"] or (ratio["ours"], ratio["peer"]) == ("ours (fbgemm)", "FBGEMM module"):
            continue  # the reference, and FBGEMM against itself, are not quoted
        median = ratio["times"]["median"]
        assert f"{median:.2f} times" in page or f"{median:.1f} times" in page, ratio


def test_memory_and_loading_are_quoted_as_measured() -> None:
    page = " ".join(_page("docs/systems/index.md").split())
    assert f"is {_results('memory')['values']['ratio']:.2f} times weights" in page
    waiting = [entry["waiting"]["median"] for entry in _results("loading")["values"]["rows"]]
    assert f"waits {100 * min(waiting):.1f} to {100 * max(waiting):.1f} %" in page


@pytest.mark.parametrize("model", ["Wukong", "DLRM", "DCN-V2"])
def test_scaling_is_quoted_as_measured(model: str) -> None:
    series = _results("scaling")["series"][model]
    row = _table_row(_page("docs/systems/wukong.md"), f"| {model} |")
    for point in (series["points"][0], series["points"][-1]):
        assert f"{sum(point['ne']) / len(point['ne']):.4f}" in row
        assert f"{100 * point['gap_closed']:.1f} %" in row
    law = series["laws"]["NE above the best possible"]
    assert f"{law['exponent']:.3f} [{law['exponent_low']:.3f}, {law['exponent_high']:.3f}]" in row


@pytest.mark.parametrize("number", range(2))
def test_ensembles_are_quoted_as_measured(number: int) -> None:
    result = _results("dhen")["results"][number]
    page = _page("docs/systems/dhen.md")
    data = {"movielens-100k": "MovieLens-100K", "adult": "Adult"}[result["data"]]
    finalists = [(result["best_single"], 1), (result["best_pair"], 1), (result["best_pair"], 2)]
    for entry in result["ensembles"]:
        if (entry["modules"], entry["layers"]) in finalists:
            row = _table_row(page, f"| {data}", f"| {' + '.join(entry['modules'])} |", f"| {entry['layers']} |")
            for key in ("ne", "auc"):
                values = entry["test"][key]
                assert f"{statistics.fmean(values):.4f} ± {statistics.stdev(values):.4f}" in row
            finalists.remove((entry["modules"], entry["layers"]))
    assert not finalists
    for gain in (result["pair_gain_ne"], result["layer_gain_ne"]):
        low, high = gain["interval"]
        assert f"{gain['mean']:+.4f} [{low:+.4f}, {high:+.4f}]" in page


def test_the_planner_is_quoted_as_measured() -> None:
    page = _page("docs/systems/scaleacross.md")
    figures = json.loads((ROOT / "benchmarks/results/scaleacross-accuracy.json").read_text())["figures"]
    for name in ("ours", "Calculon", "one rate for all"):
        one, row = figures[name], _table_row(page, f"| {name} |")
        assert f"{one['error']:.2%}".replace("%", " %") in row
        assert f"{one['error_tensor_to_8']:.2%}".replace("%", " %") in row
        assert f"| {one['regret']:.3f} |" in row
    for value in figures["ours"]["tau_by_model"].values():
        assert f"{value:.3f}" in page
    for point in json.loads((ROOT / "benchmarks/results/scaleacross-grid.json").read_text())["points"]:
        assert _grid_row(point) in page
    speed = json.loads((ROOT / "benchmarks/results/scaleacross-speed.json").read_text())["values"]
    text = " ".join(page.split())
    assert f"takes {speed['joint_search']['seconds']:.0f} s on two cores" in text
    step = speed["step_of_131072"]
    assert f"131,072 devices {step['seconds']:.1f} s and {step['peak_bytes'] / 2**30:.2f} GiB" in text
    assert f"evaluated {speed['times_calculon']['median']:.0f} times as often" in text
    growth = [speed["growth"][f"exponent_{name}"] for name in ("devices", "ranks")]
    assert "devices to the {:.2f} and as the distinct ranks to the {:.2f}".format(*growth) in text


def test_schedules_by_rules_are_quoted_as_measured() -> None:
    text = " ".join(_page("docs/systems/scaleacross.md").split())
    summaries = json.loads((ROOT / "benchmarks/results/scaleacross-solver.json").read_text())["summaries"]
    small = summaries["all"]
    assert f"In {small['cases']} small cases" in text
    assert f"CP-SAT proved the optimum of {small['proven']}; schedules by rules equal {small['equal']} of these" in text
    assert f"at worst {small['worst_above_solver']:.2%} above".replace("%", " %") in text
    assert f"at most {small['slowest_seconds']:.1f} s each" in text
    assert small["worst_above_solver"] <= 0.03
    for latency in ("0", "0.25"):
        low = summaries[f"latency {latency}"]
        assert low["equal"] == low["proven"] == low["cases"]
    for name, words in (("one", "one stage a rank"), ("loop", "two stages a rank")):
        worst = summaries[f"8 ranks, 16 microbatches, {name}"]["worst_above_bound"]
        assert f"{worst:.2%} above CP-SAT's bound with {words}".replace("%", " %", 1) in text


def test_executed_schedules_are_quoted_as_measured() -> None:
    text = " ".join(_page("docs/systems/scaleacross.md").split())
    result = json.loads((ROOT / "benchmarks/results/scaleacross-executed.json").read_text())
    off = [row["ratio"] - 1 for row in result["rows"]]
    assert not result["quick"]
    assert {row["processes"] for row in result["rows"]} == {2, 4}
    assert all(abs(one) <= 0.10 for one in off)
    rounds = {row["executed"]["count"] for row in result["rows"]}
    assert len(rounds) == 1
    quoted = f"{100 * min(off):+.1f} to {100 * max(off):+.1f} % off simulated (medians of {rounds.pop()} steps"
    assert quoted in text


def _grid_row(point: dict[str, Any]) -> str:
    changes = point["changes"]
    change = f"1:{changes['region.oversubscription']:g}"
    change += f", {changes['region.distance_km']:,.0f} km" if changes["region.distance_km"] else ""
    change += ", lossy" if "region.loss_rate" in changes else ""
    cells = [
        point["workload"],
        f"{point['cluster']}, {point['devices']:,}",
        change,
        f"{point['production']['seconds']:.2f} s",
        f"{point['joint']['seconds']:.2f} s",
        f"{point['times_production']:.2f}",
        f"{point['times_best_single']:.2f}",
    ]
    return f"| {' | '.join(cells)} |"


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_language_model_is_quoted_as_measured(dtype: str) -> None:
    page = _page("docs/systems/llama.md")
    files = [json.loads((ROOT / f"benchmarks/results/llama-{part}.json").read_text()) for part in PARTS_OF_LLAMA]
    assert not any(file["quick"] for file in files)
    generated, opened = (file["results"][dtype] for file in files)
    times, rates = generated["times_transformers"], generated["tokens_per_s"]
    cells = [
        dtype,
        f"{times['median']:.2f}",
        f"{times['low']:.2f} to {times['high']:.2f}",
        str(generated["target"] or ""),
        *(f"{rates[name]['median']:.1f} tokens/s" for name in ("ours", "transformers")),
        str(generated["same_tokens"]),
    ]
    assert f"| {' | '.join(cells)} |" in page
    text = " ".join(page.split())
    assert f"threads: {files[0]['machine']['threads']}, beside transformers 5.23" in text
    if dtype == "bfloat16":
        assert f"is at most {max(generated['regret'].values()):.2f} below the best one in bfloat16" in text
    seconds, memory = opened["seconds"]["median"], opened["peak_over_size"]["median"]
    targets = opened["target_seconds"], opened["target_peak_over_size"]
    assert f"| {dtype} | {seconds:.1f} | {targets[0]:g} | {memory:.2f} | {targets[1]:g} |" in page
    if dtype == "float32":
        assert generated["same_tokens"] == files[0]["new_tokens"] == 64


PARTS_OF_LLAMA = ("generation", "loading")
PACKINGS = {
    "arrival order, documents cut": "arrival order, documents cut",
    "arrival order": "arrival order, whole documents",
    **{f"fixed length, window {window}": f"fixed length, greedy over {window}" for window in (1, 2, 4, 8)},
    "two queues, no variable length": "two queues, no variable length",
    "2 queues, 1.5 contexts": "two queues, up to 1.5 contexts",
    "2 queues, 2 contexts": "two queues, up to 2 contexts",
}


def test_packing_is_quoted_as_measured() -> None:
    page = _page("docs/systems/wlb.md")
    for name, row in json.loads((ROOT / "benchmarks/results/wlb-packing.json").read_text())["rows"].items():
        if name in PACKINGS:
            balance = f"{row['imbalance']:.3f} | {row['imbalance_p95']:.3f}"
            time = f"{row['delay']:.2f} | {1e3 * row['seconds']:.2f} ms"
            assert f"| {PACKINGS[name]} | {balance} | {time} |" in page
    gains = json.loads((ROOT / "benchmarks/results/wlb-pipeline.json").read_text())["gains"]["2 queues, 1.5 contexts"]
    for name, gain in gains.items():
        assert f"| {PACKINGS[name]} | {gain['packing']:.2f} | {gain['both']:.2f} |" in page
    assert f"For equal work it is {gains['arrival order, documents cut']['both_by_work']:.2f} times" in page


def test_sharded_weights_are_quoted_as_tracked() -> None:
    page = _page("docs/systems/fsdp.md")
    result = json.loads((ROOT / "benchmarks/results/fsdp-memory.json").read_text())
    assert not result["quick"]
    assert {row["world"] for row in result["rows"]} == {8, 64, 512}
    for row in result["rows"]:
        assert row["parameter_bytes"] == row["law_bytes"]
        assert row["collectives"] == row["collectives_by_formula"]
        sizes = [f"{row[f'{key}_bytes'] / 2**20:,.1f}" for key in ("parameter", "law", "published")]
        counts = f"{row['collectives']['all_gathers']} + {row['collectives']['reduce_scatters']}"
        assert f"| {' | '.join([row['model'], row['wrapping'], str(row['world']), *sizes, counts])} |" in page
    text = " ".join(page.split())
    assert f"in all {len(result['rows'])} cases" in text
    below = [1 - row["published_bytes"] / row["parameter_bytes"] for row in result["rows"] if row["model"] == "8B"]
    assert f"it is {100 * min(below):.1f} to {100 * max(below):.1f} % too low" in text
    assert all(row["published_bytes"] == row["law_bytes"] for row in result["rows"] if row["model"] != "8B")
    buffers = max(row["gather_buffer_bytes"] for row in result["rows"] if row["wrapping"] == "every block")
    assert f"up to {buffers / 2**20:,.1f} MiB with a unit a block" in text


def test_traffic_of_weights_is_quoted_as_measured() -> None:
    page = _page("docs/systems/fsdp.md")
    result = json.loads((ROOT / "benchmarks/results/fsdp-traffic.json").read_text())
    assert not result["quick"]
    size = result["weight_bytes"]
    for name, row in result["rows"].items():
        assert row["equal"]
        across = row["across_hosts_bytes"]
        shares = [sum(row["sent_bytes"][0].values()) / size, max(across) / size, sum(across) / size]
        assert f"| {name} | {' | '.join(f'{share:.3f}' for share in shares)} |" in page
    text, times = " ".join(page.split()), result["times_hybrid"]["fully sharded"]
    assert f"{size / 2**20:.1f} MiB of weights" in text
    busiest, everyone = (f"{100 / times[key]:.0f} %" for key in ("busiest", "all"))
    assert f"{busiest} of full sharding's bytes over the busiest rank's link, and {everyone} of them" in text


def test_conversations_over_ranks_are_quoted_as_measured() -> None:
    page = _page("docs/systems/context-parallel.md")
    runs = json.loads((ROOT / "benchmarks/results/context_parallel-sessions.json").read_text())["runs"]
    assert all(run["tokens_identical"] and run["bytes_as_formulas"] for run in runs)
    assert f"logits within {max(run['largest_logit_difference'] for run in runs):.1e}" in page
    for ranks in (2, 3, 4):
        by = {run["transport"]: run for run in runs if run["ranks"] == ranks}
        sent = " | ".join(f"{by[name]['attention_bytes'] / 1e6:.1f} MB" for name in ("pass_kv", "pass_q", "auto"))
        assert f"| {ranks} | {', '.join(map(str, by['auto']['kv_held']))} | {sent} |" in page


def test_training_is_quoted_as_measured() -> None:
    page = _page("docs/systems/llama.md")
    result = json.loads((ROOT / "benchmarks/results/llama-training.json").read_text())
    assert not result["quick"]
    for name, case in result["results"].items():
        for ratio in case["ratios"].values():
            times, peer = ratio["times"], ratio["fastest"]
            rates = [f"{case['tokens_per_s'][one]['median']:,.0f}" for one in ("ours", peer)]
            spread = f"{times['low']:.2f} to {times['high']:.2f}"
            asked = "" if ratio["target"] is None else ratio["target"]
            assert f"| {name} | {peer} | {times['median']:.2f} | {spread} | {asked} | {' | '.join(rates)} |" in page
            assert ratio["target"] is None or times["median"] >= ratio["target"]


def test_the_first_page_quotes_training_as_measured() -> None:
    page = _page("README.md")
    result = json.loads((ROOT / "benchmarks/results/llama-training.json").read_text())["results"]
    for peer, words in (("transformers", "times as many tokens a second"), ("torchtitan", "times")):
        times = [
            case["ratios"][peer]["times"]["median"]
            for case in result.values()
            if case["ratios"].get(peer, {}).get("target") is not None
        ]
        assert f"| {min(times):.2f} to {max(times):.2f} {words}" in page


def test_sharded_documents_are_quoted_as_measured() -> None:
    page = _page("docs/systems/context-parallel.md")
    result = json.loads((ROOT / "benchmarks/results/context_parallel-sharding.json").read_text())
    assert not result["quick"]
    for mix, found in result["mixes"].items():
        for name in ("per document, all_gather", "adaptive, all_gather", "per document, ring"):
            times, work = found["times_per_sequence"][name]["wall"], found["imbalance"][name]
            cells = f"{work:.2f} | {times['median']:.2f} | {times['low']:.2f} to {times['high']:.2f}"
            assert f"| {mix} | {name.replace('_', '-')} | {cells} |" in page


def test_executed_packing_is_quoted_as_measured() -> None:
    page = _page("docs/systems/wlb.md")
    result = json.loads((ROOT / "benchmarks/results/wlb-executed.json").read_text())
    assert not result["quick"]
    sharding = json.loads((ROOT / "benchmarks/results/context_parallel-sharding.json").read_text())["mixes"]
    skewed = next(found for found in sharding.values() if found["imbalance"]["per sequence, all_gather"] > 1.5)
    times = [skewed["times_per_sequence"][f"per document, {way}"]["wall"]["median"] for way in ("all_gather", "ring")]
    assert f"{min(times):.2f} to {max(times):.2f} times" in page
    for name, gain in result["gains"].items():
        times = gain["executed"]
        spread = f"{times['low']:.2f} to {times['high']:.2f}"
        assert f"| {PACKINGS[name]} | {times['median']:.2f} | {spread} | {gain['simulated']:.2f} |" in page


def test_emulated_pipelines_are_quoted_as_measured() -> None:
    page = _page("docs/systems/wlb.md")
    result = json.loads((ROOT / "benchmarks/results/wlb-emulated.json").read_text())
    assert not result["quick"]
    for name, gain in result["gains"].items():
        times = gain["executed"]
        spread = f"{times['low']:.2f} to {times['high']:.2f}"
        assert f"| {PACKINGS[name]} | {times['median']:.2f} | {spread} | {gain['simulated']:.2f} |" in page
