"""Figures of ranking models in the documentation."""

from __future__ import annotations

import hashlib
import json
import math
import statistics
from functools import partial
from pathlib import Path
from typing import Any

from _figures import Figures, judged, listed, percent, results, span, table

DATA = {"movielens-100k": "MovieLens-100K", "adult": "Adult (income)"}
BAG = "EmbeddingBag(sparse) + Adagrad"
ABOVE = "NE above the best possible"


def _deviation(values: dict[str, float]) -> str:
    return f"{values['mean']:.4f} ± {values['sd']:.4f}"


def quality() -> str:
    """Return AUC and NE of every model beside FuxiCTR's."""
    rows = []
    for one in results("ranking-quality")["results"]:
        sides = [_deviation(one["sides"][side][key]) for key in ("auc", "ne") for side in ("ours", "FuxiCTR")]
        rows.append([DATA[one["data"]], one["model"], *sides])
    return table(["data", "model", "AUC ours", "AUC FuxiCTR", "NE ours", "NE FuxiCTR"], rows)


def quality_margin() -> str:
    """Return the largest loss of AUC beside FuxiCTR, rounded up."""
    behind = -min(one["auc_difference"] for one in results("ranking-quality")["results"])
    if behind <= 0:
        return "ahead of the peer's in AUC"
    return f"within {math.ceil(1000 * behind) / 1000:.3f} AUC of the peer's, or ahead"


def _auc(data: str, model: str) -> dict[str, dict[str, float]]:
    found = next(one for one in results("ranking-quality")["results"] if (one["data"], one["model"]) == (data, model))
    return {side: values["auc"] for side, values in found["sides"].items()}


def auc_beside_fuxictr(model: str) -> str:
    """Return a model's AUC on both data sets against FuxiCTR's."""
    pairs = []
    for data, shown in (("movielens-100k", "MovieLens-100K"), ("adult", "Adult")):
        auc = _auc(data, model)
        pairs.append(f"{auc['ours']['mean']:.4f} against {auc['FuxiCTR']['mean']:.4f} on {shown}")
    return ", ".join(pairs)


def _ratio(part: str, case: str, ours: str, peer: str) -> dict[str, Any]:
    found: list[dict[str, Any]] = results(f"ranking-{part}")["ratios"]
    return next(one for one in found if (one["case"], one["ours"], one["peer"]) == (case, ours, peer))


def _times(part: str, case: str, ours: str, peer: str) -> float:
    return float(_ratio(part, case, ours, peer)["times"]["median"])


def step(model: str, rows: str, ours: str, peer: str) -> float:
    """Return how many times as fast a training step is as a peer's."""
    names = {"fp32": "ours fp32", "bf16": "ours bf16 (default)"}
    return _times("speed", f"{model}, {rows} rows", names[ours], peer)


def speed() -> str:
    """Return training steps beside FuxiCTR and TorchRec."""
    rows = []
    for label, beside, model, ours, peer in (
        ("DLRM, fp32", "FuxiCTR", "DLRM", "fp32", "FuxiCTR"),
        ("DLRM, bf16 (default with AVX-512)", "FuxiCTR", "DLRM", "bf16", "FuxiCTR"),
        ("Wukong, fp32", "FuxiCTR", "WuKong", "fp32", "FuxiCTR"),
        ("Wukong, bf16 (default with AVX-512)", "FuxiCTR", "WuKong", "bf16", "FuxiCTR"),
        ("DLRM, fp32", "TorchRec, fp32", "DLRM", "fp32", "TorchRec fp32"),
        ("DLRM, bf16", "TorchRec, bf16", "DLRM", "bf16", "TorchRec bf16"),
        ("DLRM, bf16 (default with AVX-512)", "TorchRec, fp32", "DLRM", "bf16", "TorchRec fp32"),
    ):
        found = [step(model, size, ours, peer) for size in ("100,000", "1,000,000")]
        rows.append([label, beside, *(f"{one:.{1 if one >= 10 else 2}f} times" for one in found)])
    headings = ["training step, batch 4,096, two threads", "beside", "100,000 rows a table", "1,000,000 rows a table"]
    return table(headings, rows)


def speed_target() -> str:
    """Return whether a DLRM in bf16 is as many times as fast as TorchRec's fp32 as was asked."""
    return judged([step("DLRM", size, "bf16", "TorchRec fp32") for size in ("100,000", "1,000,000")], 2.5)


def _updates(ours: str, peer: str, threads: int = 2) -> list[float]:
    cases = (f"{size} rows{', one thread' if threads == 1 else ''}" for size in ("100,000", "1,000,000"))
    return [_times("update", case, f"ours ({ours})", peer) for case in cases]


def update() -> str:
    """Return fused table updates beside torch's and FBGEMM's."""
    bag = "`EmbeddingBag(sparse=True)` and Adagrad"
    rows = [
        [label, beside, str(threads), *(f"{one:.2f} times" for one in _updates(ours, peer, threads))]
        for label, beside, ours, peer in (
            ("ours, Numba (default)", bag, "numba", BAG),
            ("ours, FBGEMM's kernels", bag, "fbgemm", BAG),
            ("ours, Numba (default)", "FBGEMM's own module, row-wise Adagrad", "numba", "FBGEMM module"),
        )
        for threads in (1, 2)
    ]
    headings = ["row-wise Adagrad of 26 tables", "beside", "threads", "100,000 rows", "1,000,000 rows"]
    return table(headings, rows)


def update_target() -> str:
    """Return whether FBGEMM's kernels reached their target."""
    target = _ratio("update", "100,000 rows", "ours (fbgemm)", BAG)["target"]
    reached = min(_updates("fbgemm", BAG)) >= target
    return f"{target:g} times with FBGEMM's kernels was {'reached' if reached else 'not reached'}"


def update_bounds() -> str:
    """Return whole numbers between which the gain of our kernels lies, with two threads and with one."""
    found = [_updates("numba", BAG, threads) for threads in (2, 1)]
    of_two, of_one = (f"between {math.floor(min(one))} and {math.ceil(max(one))}" for one in found)
    return f"{of_two} with two threads and {of_one} with one"


def waiting() -> str:
    """Return the share of a training step that waits for data."""
    return span((100 * one["waiting"]["median"] for one in results("ranking-loading")["values"]["rows"]), ".1f") + " %"


def _llama_times(peer: str) -> str:
    """Return how many times as fast training is as that of a peer, over the cases of two threads."""
    cases = {name: one for name, one in results("llama-training")["results"].items() if name.endswith(", 2 threads")}

    def of(key: str) -> str:
        ratios = [case[key].get(peer) for case in cases.values()]
        return span((one["times"]["median"] for one in ratios if one and one["target"] is not None), ".2f")

    # results of before loops were timed have none
    loops = f"; whole loops {of('loops')}" if all("loops" in case for case in cases.values()) else ""
    return f"{of('ratios')} times as many tokens a second{loops}"


def _aucs(data: str) -> str:
    """Return the AUC of each model on a data set beside FuxiCTR's, means of the seeds."""
    models = [one["model"] for one in results("ranking-quality")["results"] if one["data"] == data]
    pairs = {model: _auc(data, model) for model in models}
    return ", ".join(
        f"{model} {auc['ours']['mean']:.4f} ({auc['FuxiCTR']['mean']:.4f})" for model, auc in pairs.items()
    )


def first_page() -> str:
    """Return the figures of the first page."""
    large = {ours: step("DLRM", "1,000,000", ours, "FuxiCTR") for ours in ("fp32", "bf16")}
    wukong = {ours: step("WuKong", "100,000", ours, "FuxiCTR") for ours in ("fp32", "bf16")}
    torchrec = {ours: step("DLRM", "100,000", ours, f"TorchRec {ours}") for ours in ("fp32", "bf16")}
    updates, module = (
        [span(_updates("numba", peer, threads), ".1f") for threads in (1, 2)] for peer in (BAG, "FBGEMM module")
    )
    apart = "ours row-wise Adagrad, theirs Adam over whole tables; 2 threads"
    rows = [
        [
            "Training DLRM, 26 tables of 1,000,000 x 16",
            "FuxiCTR",
            f"{large['fp32']:.0f} times as fast in fp32, {large['bf16']:.0f} in bf16",
            apart,
        ],
        [
            "Training Wukong, 26 tables of 100,000 x 16",
            "FuxiCTR",
            f"{wukong['fp32']:.1f} times as fast in fp32, {wukong['bf16']:.1f} in bf16",
            apart,
        ],
        [
            "Training DLRM, 26 tables of 100,000 x 16",
            "TorchRec's fused path",
            f"{torchrec['fp32']:.2f} times as fast in fp32, {torchrec['bf16']:.2f} in bf16",
            "both row-wise Adagrad; 2 threads",
        ],
        [
            "Lookup and fused update of 26 tables",
            "`EmbeddingBag(sparse)` + Adagrad",
            f"{updates[0]} times as fast with 1 thread, {updates[1]} with 2",
            "ours row-wise Adagrad, theirs Adagrad",
        ],
        [
            "The same",
            "FBGEMM's module",
            f"{module[0]} times as fast with 1 thread, {module[1]} with 2",
            "both row-wise Adagrad",
        ],
        [
            "Training Llama, fp32 and bf16",
            "transformers' Trainer",
            _llama_times("transformers"),
            "both AdamW; 2 threads",
        ],
        [
            "The same, torchtitan's debug model",
            "torchtitan 0.3.0",
            _llama_times("torchtitan"),
            "both AdamW; 2 threads",
        ],
        *(
            [
                f"AUC on {shown}, ours (theirs), 5 seeds",
                "FuxiCTR",
                _aucs(data),
                "AdamW beside Adam, 8 trials of tuning each",
            ]
            for data, shown in (("movielens-100k", "MovieLens-100K"), ("adult", "Adult"))
        ),
    ]
    return table(["what", "beside", "measured", "optimizer and threads"], rows)


def _dhen() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = results("ranking-dhen")["results"]
    return found


def _ensemble(result: dict[str, Any], modules: list[str], layers: int) -> dict[str, Any]:
    found: list[dict[str, Any]] = result["ensembles"]
    return next(one for one in found if (one["modules"], one["layers"]) == (modules, layers))


def ensembles() -> str:
    """Return the ensembles that the validation split chose."""
    rows = []
    for one in _dhen():
        for modules, layers in ((one["best_single"], 1), (one["best_pair"], 1), (one["best_pair"], 2)):
            test = _ensemble(one, modules, layers)["test"]
            cells = [f"{statistics.fmean(test[key]):.4f} ± {statistics.stdev(test[key]):.4f}" for key in ("ne", "auc")]
            rows.append([DATA[one["data"]], " + ".join(modules), str(layers), *cells])
    return table(["data", "modules", "layers", "test NE", "test AUC"], rows)


def ensemble_gains() -> str:
    """Return the gains of the best pair and of its second layer."""
    rows = [
        [
            DATA[one["data"]],
            *(
                "{:+.4f} [{:+.4f}, {:+.4f}]".format(gain["mean"], *gain["interval"])
                for gain in (one["pair_gain_ne"], one["layer_gain_ne"])
            ),
        ]
        for one in _dhen()
    ]
    return table(["data", "the best pair over the best single module", "two layers over one"], rows)


def _effect(gain: dict[str, Any]) -> str:
    low, high = gain["interval"]
    return "lowers NE" if low > 0 else "raises NE" if high < 0 else "makes no measurable difference"


def ensemble_effects() -> str:
    """Return what the pair and the second layer do, by the intervals of their gains."""
    return "; ".join(
        f"on {DATA[one['data']]} the pair {_effect(one['pair_gain_ne'])}, the second layer "
        f"{_effect(one['layer_gain_ne'])}"
        for one in _dhen()
    )


def ensemble_pairs() -> str:
    """Return how many pairs with the best single module are ahead of it."""
    found = []
    for one in _dhen():
        (single,) = one["best_single"]
        alone = statistics.fmean(_ensemble(one, [single], 1)["test"]["ne"])
        pairs = [e for e in one["ensembles"] if single in e["modules"] and len(e["modules"]) == 2 and e["layers"] == 1]
        ahead = sum(statistics.fmean(pair["test"]["ne"]) < alone for pair in pairs)
        found.append(f"on {DATA[one['data']]} {ahead} of {len(pairs)} pairs with {single} are ahead of {single} alone")
    return ", ".join(found)


def ensembles_by_test() -> str:
    """Return the ensembles of one layer with the lowest test NE."""
    found = []
    for one in _dhen():
        best = min(
            (entry for entry in one["ensembles"] if entry["layers"] == 1),
            key=lambda entry: statistics.fmean(entry["test"]["ne"]),
        )
        found.append(
            f"`{' + '.join(best['modules'])}` ({statistics.fmean(best['test']['ne']):.4f}) on {DATA[one['data']]}"
        )
    return listed(found)


def _scaling() -> Any:
    return results("ranking-scaling")


def _million(flops: float) -> str:
    return f"{flops / 1e6:.{1 if flops >= 1e6 else 2}f}"


def scaling() -> str:
    """Return NE against FLOPs of every model."""
    rows = []
    for model, series in _scaling()["series"].items():
        ends = series["points"][0], series["points"][-1]
        law = series["laws"][ABOVE]
        rows.append(
            [
                model,
                " to ".join(_million(one["training_flops"]) for one in ends) + " million",
                " to ".join(f"{statistics.fmean(one['ne']):.4f}" for one in ends),
                " to ".join(percent(one["gap_closed"], ".1f") for one in ends),
                "none fitted"
                if law is None
                else f"{law['exponent']:.3f} [{law['exponent_low']:.3f}, {law['exponent_high']:.3f}]",
            ]
        )
    return table(
        [
            "model",
            "FLOPs an example, smallest to largest",
            "test NE",
            "gap to the best closed",
            "exponent of NE above the best, 95 % interval",
        ],
        rows,
    )


def scaling_effects() -> str:
    """Return for which models NE falls with compute, by the intervals of the exponents, and which gains most."""
    series = _scaling()["series"]
    laws = {model: one["laws"][ABOVE] for model, one in series.items()}
    falls = [model for model, law in laws.items() if law is not None and law["exponent_high"] < 0]
    others = [model for model in laws if model not in falls]
    most = max(series, key=lambda model: series[model]["points"][-1]["gap_closed"])
    text = f"NE above the best falls measurably with compute for {listed(falls) if falls else 'no model'}"
    if others:
        text += f", and not for {listed(others)}"
    closed = series[most]["points"][-1]["gap_closed"]
    return f"{text}; the largest {most} closes most of the gap ({percent(closed, '.1f')})"


def scaling_digest() -> str:
    """Return a digest of what the picture of the scaling laws shows."""
    found = _scaling()
    points = {model: [(p["training_flops"], p["ne"]) for p in one["points"]] for model, one in found["series"].items()}
    return hashlib.sha256(json.dumps([points, found["bayes_ne"], found["lr_ne"]]).encode()).hexdigest()[:16]


def draw_scaling(path: Path) -> None:
    """Draw NE against FLOPs, as ``cordillera bench ranking --part scaling`` does."""
    from cordillera.training.scaling.power_law import MeasuredRun, plot, study

    found = _scaling()
    runs = [
        MeasuredRun(model, point["training_flops"], value, seed)
        for model, one in found["series"].items()
        for point in one["points"]
        for seed, value in enumerate(point["ne"], 1)
    ]
    title = "One pass over the synthetic log, measured"
    plot(study(runs), [path], bayes=found["bayes_ne"], references={"LR": found["lr_ne"]}, title=title)


def dense_sharding() -> str:
    """Return steps, memory and bytes of full and hybrid sharding, with their formulas."""
    lines = []
    for way, row in results("fsdp-dhen")["rows"].items():
        mebi = [f"{row[key] / 2**20:.2f}" for key in ("held_by_formula", "whole_by_formula")]
        most = [f"{max(row[key]) / 2**20:.2f}" for key in ("held_bytes", "whole_bytes", "across_hosts_bytes")]
        across = f"{max(row['across_hosts_by_formula']) / 2**20:.2f}"
        milliseconds = f"{1e3 * statistics.median(row['seconds']['paced']):.0f}"
        lines.append([way, milliseconds, most[0], mebi[0], most[1], mebi[1], most[2], across])
    headings = ["weights", "ms a step", "MiB of a rank", "by formula", "MiB whole at once", "by formula"]
    return table([*headings, "MiB across hosts, busiest rank", "by formula"], lines)


def hybrid_speed(link: str) -> str:
    """Return how many times as fast a step of hybrid sharding is as one of full sharding."""
    low, middle, high = statistics.quantiles(results("fsdp-dhen")["times_as_fast"][link], n=4)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


FIGURES: Figures = {
    "first-page": first_page,
    "ranking-quality": quality,
    "ranking-margin": quality_margin,
    "ranking-speed": speed,
    "ranking-speed-target": speed_target,
    "ranking-update": update,
    "ranking-update-target": update_target,
    "ranking-update-bounds": update_bounds,
    "ranking-memory": lambda: f"{results('ranking-memory')['values']['ratio']:.2f}",
    "ranking-waiting": waiting,
    "dlrm-auc": partial(auc_beside_fuxictr, "DLRM"),
    "dcn-auc": partial(auc_beside_fuxictr, "DCN-V2"),
    "wukong-auc": partial(auc_beside_fuxictr, "Wukong"),
    "dlrm-fp32-step": lambda: f"{step('DLRM', '100,000', 'fp32', 'TorchRec fp32'):.2f}",
    "dlrm-bf16-step": lambda: f"{step('DLRM', '100,000', 'bf16', 'TorchRec bf16'):.2f}",
    "dhen-ensembles": ensembles,
    "dhen-gains": ensemble_gains,
    "dhen-effects": ensemble_effects,
    "dhen-pairs": ensemble_pairs,
    "dhen-by-test": ensembles_by_test,
    "dhen-sharding": dense_sharding,
    "dhen-hybrid": partial(hybrid_speed, "paced"),
    "dhen-hybrid-plain": partial(hybrid_speed, "as it is"),
    "scaling": scaling,
    "scaling-effects": scaling_effects,
    "scaling-rows": lambda: f"{_scaling()['conditions']['training_rows']:,}",
    "scaling-best-ne": lambda: f"{_scaling()['bayes_ne']:.4f}",
    "scaling-lr-ne": lambda: f"{_scaling()['lr_ne']:.4f}",
}
