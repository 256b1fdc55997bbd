"""Figures of low precision and of bit flips in the documentation."""

from __future__ import annotations

import statistics
from functools import partial
from typing import Any

from _figures import Figures, judged, listed, of_all, percent, processor, results, span, spread, table

MODELS = {"dlrm": "DLRM", "wukong": "Wukong"}


def _shape(row: dict[str, Any]) -> str:
    return " x ".join(map(str, row["shape"]))


# FBGEMM


def _linear() -> Any:
    return results("fbgemm-linear")["values"]


def linear() -> str:
    """Return layers in eight bits beside float32."""
    columns = ["static", "dynamic", "fused", "codes"]
    rows = [
        [_shape(one), *(f"{one['times'][name]['float32']['median']:.2f}" for name in columns)]
        for one in _linear()["rows"]
    ]
    return table(["rows x outputs x inputs", *columns], rows)


def linear_mean(name: str) -> str:
    """Return a geometric mean over the shapes."""
    return f"{_linear()['geometric_means'][name]:.2f}"


def linear_mean_of_size(*, large: bool) -> str:
    """Return the geometric mean of static layers whose float32 weights are larger than 2 MiB, or not."""
    found = [
        one["times"]["static"]["float32"]["median"]
        for one in _linear()["rows"]
        if (4 * one["shape"][1] * one["shape"][2] > 2 << 20) == large
    ]
    return f"{statistics.geometric_mean(found):.2f}"


def random_layers(name: str, key: str) -> str:
    """Return a figure of layers whose shapes were drawn."""
    return f"{_linear()['random'][key][name]:.2f}"


def greedy_rows() -> str:
    """Return for how many kinds of rows of 4 and 2 bits our greedy ranges have no larger error than torch's."""
    rows = [one for one in results("fbgemm-rows")["values"]["rows"] if one["greedy"] is not None]
    return of_all([one["greedy"] <= one["torch_greedy"] for one in rows], "kinds of rows")


# The BFLOAT16 study


def _changes() -> list[dict[str, Any]]:
    return [one for one in results("bfloat16-accuracy")["results"] if one["variant"] != "float32"]


def bfloat16_accuracy() -> str:
    """Return the change of NE by number format."""
    rows = [
        [
            one["data"].replace("synthetic teacher", "synthetic log"),
            one["variant"],
            f"{one['mean_percent']:+.3f} %",
            " to ".join(f"{end:+.3f}" for end in one["interval_percent"]),
        ]
        for one in _changes()
    ]
    return table(["data", "variant", "change of test NE", "95 % interval"], rows)


def bfloat16_parity() -> str:
    """Return the largest mean change of the variants that should equal float32."""
    parity = ("bfloat16, native (autocast)", "master, nearest even")
    return f"{max(abs(one['mean_percent']) for one in _changes() if one['variant'] in parity):.3f} %"


def bfloat16_excluded(rounding: str) -> str:
    """Return the data sets on which training without a master differs measurably from float32."""
    found = {
        one["data"]: one["interval_percent"][0] > 0 or one["interval_percent"][1] < 0
        for one in _changes()
        if one["variant"] == f"no master, {rounding}"
    }
    if all(found.values()):
        return "both data sets"
    return listed([data for data, differs in found.items() if differs]) if any(found.values()) else "neither"


def bfloat16_split() -> str:
    """Return how many numbers of split weights differ from those with a master."""
    found = " and ".join(
        f"{one['different']:,} of {one['numbers']:,} numbers after {one['steps']:,} steps ({one['data']})"
        for one in results("bfloat16-split")["results"]
    )
    return found.replace("synthetic teacher", "synthetic log")


# LoKA


def loka_shapes() -> str:
    """Return the kernel chosen for every shape."""
    rows = [
        [
            _shape(one),
            "outliers" if one["outlier"] else "",
            one["kernel"],
            *(f"{one['milliseconds'][name]:.3f}" for name in ("fp32", one["kernel"])),
            f"{one['times_fp32']:.2f}",
        ]
        for one in results("loka-shapes")["rows"][:8]
        + [one for one in results("loka-shapes")["rows"][8:] if one["outlier"]]
    ]
    return table(["rows x outputs x inputs", "inputs", "chosen", "fp32, ms", "chosen, ms", "times as fast"], rows)


def loka_model() -> str:
    """Return the plan of a model beside uniform choices."""
    model = results("loka-model")
    rows = [
        [name, f"{model['milliseconds'][name]:.2f}", *spread(ratio)]
        for name, ratio in model["plan_over"].items()
        if name != "plan"
    ]
    return table(["every layer by", "ms", "the plan is so many times as fast", "quartiles"], rows)


def loka_uniform() -> str:
    """Return how much faster the plan is than the best uniform kernel."""
    model = results("loka-model")
    return f"{model['plan_over'][model['best_uniform']]['median']:.2f}"


def loka_int8() -> str:
    """Return how many layers the plan computes in int8."""
    kernels = results("loka-model")["kernels"].values()
    return f"{sum(kernel.startswith('int8') for kernel in kernels)} of {len(kernels)} layers"


# Low-precision inference


def quantised() -> str:
    """Return quantised models beside float32's."""
    rows = []
    for name, one in results("low-precision-inference-quantize")["rows"].items():
        change = one["change"]
        rows.append(
            [
                MODELS[name],
                percent(one["share"], ".1f"),
                percent(change["mean"], "+.4f"),
                f"{100 * change['low']:+.4f} to {100 * change['high']:+.4f}",
                str(one["evaluations"]),
                str(one["sweep"]),
                *spread(one["times_faster"]),
            ]
        )
    headings = ["model", "size of fp32's", "rise of test NE", "95 % interval", "evaluations"]
    return table([*headings, "evaluations of a full sweep", "batch of 256, times as fast", "quartiles"], rows)


def quantised_reached(key: str) -> str:
    """Return which models reached a target."""
    found = {
        MODELS[name]: one["reached"][key] for name, one in results("low-precision-inference-quantize")["rows"].items()
    }
    return "both" if all(found.values()) else listed([name for name, yes in found.items() if yes] or ["neither"])


def drift() -> str:
    """Return found drifts and false alarms."""
    kinds = ("mean", "scale", "scale down", "tail", "unseen", "table")
    rows = [
        [
            MODELS[name],
            f"{one['false_alarms']} of {one['windows']:,}",
            *(f"{one['drifts'][kind]['found']} of {one['drifts'][kind]['injected']}" for kind in kinds),
        ]
        for name, one in results("low-precision-inference-drift")["rows"].items()
    ]
    headings = ["model", "false alarms in windows without a change", "mean", "scale 1.5 times", "scale half", "tail"]
    return table([*headings, "unseen ids", "a table's values 4 times"], rows)


def drifts_found() -> str:
    """Return how many of all drifts were found."""
    kinds = [
        kind for one in results("low-precision-inference-drift")["rows"].values() for kind in one["drifts"].values()
    ]
    return f"{sum(kind['found'] for kind in kinds):,} of {sum(kind['injected'] for kind in kinds):,}"


# Mixed-precision embeddings

SGD, ADAGRAD, FLAT = "made log, Zipf 1.05, SGD", "made log, Zipf 1.05, row-wise Adagrad", "made log, Zipf 0.7, SGD"


def trained_rows() -> str:
    """Return the rise of NE by the rows' format."""
    rows = [
        [
            one["case"].replace("made log", "synthetic log"),
            one["contender"],
            percent(one["loss"], "+.3f"),
            " to ".join(f"{100 * end:+.3f}" for end in one["interval"]),
            f"{one['hit_rate']:.0%}" if one["hit_rate"] else "",
        ]
        for one in results("mixed_precision_embeddings-quality")["results"]
        if one["contender"] != "fp32"
    ]
    return table(["rows trained on", "kept as", "rise of test NE", "95 % interval", "hits"], rows)


def _trained(case: str, contender: str) -> dict[str, Any]:
    found: list[dict[str, Any]] = results("mixed_precision_embeddings-quality")["results"]
    return next(one for one in found if (one["case"], one["contender"]) == (case, contender))


def rise(case: str, contender: str) -> str:
    """Return the rise of NE of one format."""
    return f"{100 * _trained(case, contender)['loss']:.3f} %"


def hits(case: str, contender: str) -> str:
    """Return the share of rows of an update that the cache held."""
    return f"{100 * _trained(case, contender)['hit_rate']:.0f} %"


def largest_change_of_int8() -> str:
    """Return the largest mean change of int8 rows with a cache of 5 % on the synthetic log."""
    return f"{max(100 * abs(_trained(case, 'int8 + 5% cache')['loss']) for case in (SGD, ADAGRAD, FLAT)):.3f} %"


def rises(contender: str) -> str:
    """Return the least and the largest rise of a format on the synthetic log."""
    return span((100 * _trained(case, contender)["loss"] for case in (SGD, ADAGRAD, FLAT)), ".2f") + " %"


def rows_memory() -> str:
    """Return memory of rows in few bits beside float32."""
    rows = [
        [
            one["optimizer"].replace("_", " "),
            one["rows"],
            f"{one['share']:.3f}",
            f"{one['times_smaller']:.2f}",
            f"{one['target_at_most']:.2f}" if one.get("target_at_most") else "",
        ]
        for one in results("mixed_precision_embeddings-memory")["results"]
        if "lru" not in one["rows"] and "no cache" not in one["rows"]
    ]
    return table(["optimizer", "kept as", "share of fp32's memory", "times smaller", "target"], rows)


def rows_speed() -> str:
    """Return the speed of rows in few bits beside float32."""
    rows = [
        [one["case"], one["ours"], one["peer"], *spread(one["times"])]
        for one in results("mixed_precision_embeddings-speed")["ratios"]
        if "20,000" not in one["case"]
    ]
    return table(["what", "rows", "beside", "times as fast", "quartiles"], rows)


# PVF


def vulnerability(part: str) -> str:
    """Return the vulnerability of components."""
    rows = []
    for model in results(f"pvf-{part}")["results"]:
        for one in model["components"]:
            pvf = one["pvf"]
            interval = f"{100 * pvf['low']:.3f} to {100 * pvf['high']:.3f} %"
            rows.append([model["model"], one["name"], percent(pvf["value"], ".3f"), interval])
    return table(["model", "component", "PVF", "95 % interval"], rows)


def vulnerability_order() -> str:
    """Return whether the DLRM shows the paper's order of components."""
    if results("pvf-models")["results"][0]["ordered_with_intervals_apart"]:
        return "the top MLP is most vulnerable and tables are least, with separate intervals, as the paper says"
    return "the paper's order (top MLP, bottom MLP, tables) is not shown with separate intervals"


def interval_widths() -> str:
    """Return how much wider the DLRM's intervals from a sixteenth of the faults are."""
    first, *_, last = results("pvf-models")["results"][0]["half_widths"]["values"]
    return span((first[name] / last[name] for name in first), ".1f")


def _stored(model: str) -> dict[str, float]:
    found = next(one for one in results("pvf-formats")["results"] if one["model"] == model)
    return {one["name"]: one["pvf"]["value"] for one in found["components"]}


def bfloat16_over_float32() -> str:
    """Return the vulnerability of bfloat16 relative to float32."""
    pairs = [(_stored(f"{model} in bf16"), _stored(f"{model} in fp32")) for model in ("DLRM", "LeNet")]
    return span((bf16[name] / fp32[name] for bf16, fp32 in pairs for name in bf16), ".1f")


def scale_over_code() -> str:
    """Return the vulnerability of a scale relative to a code."""
    found = _stored("int8 tables")
    return f"{found['fp32 scales'] / found['int8 payload']:.0f}"


def replay() -> str:
    """Return the speed of replay."""
    found = [f"{one['model']} {one['times_faster']['median']:.1f} times" for one in results("pvf-speed")["results"]]
    return ", ".join(found) + " as fast"


FIGURES: Figures = {
    "fbgemm-linear": linear,
    "fbgemm-static": partial(linear_mean, "static_over_float32"),
    "fbgemm-dynamic": partial(linear_mean, "dynamic_over_float32"),
    "fbgemm-large": partial(linear_mean_of_size, large=True),
    "fbgemm-small": partial(linear_mean_of_size, large=False),
    "fbgemm-random-static": partial(random_layers, "static", "geometric_means"),
    "fbgemm-random-dynamic": partial(random_layers, "dynamic", "geometric_means"),
    "fbgemm-random-least": lambda: f"{min(_linear()['random']['least'].values()):.2f}",
    "fbgemm-fused": partial(linear_mean, "fused_over_float32"),
    "fbgemm-target": lambda: judged(
        [_linear()["geometric_means"][f"{n}_over_float32"] for n in ("static", "fused")], 5.0
    ),
    "fbgemm-codes": partial(linear_mean, "codes_over_float32"),
    "fbgemm-unfused": partial(linear_mean, "fused_over_unfused"),
    "fbgemm-six-rows": lambda: f"{_linear()['least_static_over_float32_of_six_rows']:.2f}",
    "fbgemm-one-row": lambda: f"{_linear()['least_static_over_float32']:.2f}",
    "fbgemm-apart": lambda: f"{_linear()['elements_apart']:,} of {_linear()['elements']:,}",
    "fbgemm-mlp-decibels": lambda: f"{results('fbgemm-mlp')['values']['least_decibels']:.1f} dB",
    "fbgemm-mlp": lambda: f"{results('fbgemm-mlp')['values']['geometric_mean']:.2f}",
    "fbgemm-greedy": lambda: f"{results('fbgemm-rows')['values']['largest_greedy_over_minmax_of_4_bits']:.3f}",
    "fbgemm-greedy-torch": greedy_rows,
    "bfloat16-accuracy": bfloat16_accuracy,
    "bfloat16-parity": bfloat16_parity,
    "bfloat16-nearest": partial(bfloat16_excluded, "nearest even"),
    "bfloat16-stochastic": partial(bfloat16_excluded, "stochastic"),
    "bfloat16-toward-zero": partial(bfloat16_excluded, "toward zero"),
    "bfloat16-split": bfloat16_split,
    "loka-shapes": loka_shapes,
    "loka-mean": lambda: f"{results('loka-shapes')['geometric_mean']:.2f}",
    "loka-over-uniform": lambda: f"{results('loka-shapes')['over_best_uniform']:.3f}",
    "loka-uniform-target": lambda: judged([results("loka-shapes")["over_best_uniform"]], 1.0),
    "loka-mixed": lambda: f"{results('loka-shapes')['with_outliers']['over_best_uniform']:.2f}",
    "loka-mixed-kernel": lambda: str(results("loka-shapes")["with_outliers"]["best"]),
    "loka-model": loka_model,
    "loka-ne": lambda: percent(results("loka-model")["change"]["mean"], "+.4f"),
    "loka-uniform": loka_uniform,
    "loka-uniform-kernel": lambda: str(results("loka-model")["best_uniform"]),
    "loka-int8": loka_int8,
    "loka-error": lambda: f"{results('loka-probe')['errors']['ours']:.1e}",
    "loka-plain-error": lambda: (
        f"{float(format(results('loka-probe')['errors']['E[xx] - E[x]E[x], float32'], '.2g')):g}"
    ),
    "loka-probe": lambda: percent(float(results("loka-probe")["overhead_at_interval_100"]), ".2f"),
    "quantised": quantised,
    "quantised-processor": partial(processor, "low-precision-inference-quantize"),
    "fbgemm-processor": partial(processor, "fbgemm-linear"),
    "loka-processor": partial(processor, "loka-model"),
    "quantised-size": partial(quantised_reached, "size"),
    "quantised-ne": partial(quantised_reached, "ne_shown"),
    "quantised-speed": partial(quantised_reached, "speed"),
    "drift": drift,
    "drifts-found": drifts_found,
    "trained-rows": trained_rows,
    "trained-int8": largest_change_of_int8,
    "trained-int4": partial(rise, SGD, "int4 + 1% cache"),
    "trained-int4-adagrad": partial(rise, ADAGRAD, "int4 + 1% cache"),
    "trained-int4-flat": partial(rise, FLAT, "int4 + 1% cache"),
    "trained-hits-flat": partial(hits, FLAT, "int4 + 1% cache"),
    "trained-nearest": partial(rises, "int4 + 1% cache, nearest"),
    "trained-nearest-no-cache": partial(rises, "int4, no cache, nearest"),
    "trained-lru": partial(rise, SGD, "int4 + 1% cache, lru"),
    "trained-lru-hits": partial(hits, SGD, "int4 + 1% cache, lru"),
    "trained-lfu-hits": partial(hits, SGD, "int4 + 1% cache"),
    "rows-memory": rows_memory,
    "rows-speed": rows_speed,
    "pvf-models": partial(vulnerability, "models"),
    "pvf-order": vulnerability_order,
    "pvf-widths": interval_widths,
    "pvf-formats": partial(vulnerability, "formats"),
    "pvf-bfloat16": bfloat16_over_float32,
    "pvf-scale": scale_over_code,
    "pvf-replay": replay,
}
