"""Figures of language models, packing and sharding in the documentation."""

from __future__ import annotations

from functools import partial
from typing import Any

from _figures import Figures, is_measured, judged, listed, of_all, percent, processor, results, span, spread, table

DTYPES = ("bfloat16", "float32")
PACKINGS = {
    "arrival order, documents cut": "arrival order, documents cut",
    "arrival order": "arrival order, whole documents",
    **{f"fixed length, window {window}": f"fixed length, greedy over a window of {window}" for window in (1, 2, 4, 8)},
    "two queues, no variable length": "two queues, no variable length",
    "2 queues, 1.5 contexts": "two queues, up to 1.5 contexts",
    "2 queues, 2 contexts": "two queues, up to 2 contexts",
}
MEBI = 2**20


# Llama


def isoflop() -> str:
    """Return the optima of an IsoFLOP study."""
    study = results("isoflop-tiny")["study"]
    law, rows = study["laws"]["tokens"], []
    curves = [one for one in study["curves"] if one["optimum"] is not None]
    for curve, low, high in zip(curves, law["optima_low"], law["optima_high"], strict=True):
        best = curve["optimum"]
        interval = f"{low / 1e6:.2f}M to {high / 1e6:.2f}M"
        sizes = [f"{best['tokens'] / 1e6:.2f}M", interval, f"{best['parameters'] / 1e3:.1f} thousand"]
        rows.append([f"{curve['budget']:.0e}".replace("+", ""), str(len(curve["runs"])), *sizes, f"{best['loss']:.3f}"])
    headings = ["training FLOPs", "runs", "optimal tokens", "95 % interval", "optimal parameters", "loss, nats a byte"]
    return table(headings, rows)


def isoflop_runs() -> str:
    """Return the number of runs of the study and the range of their parameters."""
    runs = [run for curve in results("isoflop-tiny")["study"]["curves"] for run in curve["runs"]]
    sizes = [run["parameters"] / 1e3 for run in runs]
    return f"{len(runs)} runs of {min(sizes):.1f} to {max(sizes):.0f} thousand parameters"


def isoflop_law(quantity: str) -> str:
    """Return the exponent of an optimal quantity with its interval over runs."""
    law = results("isoflop-tiny")["study"]["laws"][quantity]
    low, high = law["exponent_interval_over_runs"]
    return f"`C^{law['exponent']:.3f}` ({low:.3f} to {high:.3f})"


def generation() -> str:
    """Return generation beside transformers."""
    rows = []
    for dtype in DTYPES:
        one = results("llama-generation")["results"][dtype]
        rates = [f"{one['tokens_per_s'][name]['median']:.1f} tokens/s" for name in ("ours", "transformers")]
        target = str(one["target"] or "")
        rows.append([dtype, *spread(one["times_transformers"]), target, *rates, str(one["same_tokens"])])
    return table(["weights", "times transformers", "quartiles", "target", "ours", "transformers", "same tokens"], rows)


def peer_version() -> str:
    """Return the version of transformers beside which text was generated."""
    version = results("llama-generation")["machine"]["libraries"]["transformers"]
    return "transformers " + ".".join(version.split(".")[:2])


def regret() -> str:
    """Return the largest distance of a written token's logit from the best one's."""
    return f"{max(results('llama-generation')['results']['bfloat16']['regret'].values()):.2f}"


def loading() -> str:
    """Return the time and the memory of opening a model."""
    rows = []
    for dtype in DTYPES:
        one = results("llama-loading")["results"][dtype]
        seconds, memory = f"{one['seconds']['median']:.1f}", f"{one['peak_over_size']['median']:.2f}"
        rows.append([dtype, seconds, f"{one['target_seconds']:g}", memory, f"{one['target_peak_over_size']:g}"])
    return table(["weights", "seconds", "target", "peak memory over weights", "target"], rows)


def training() -> str:
    """Return training beside transformers and torchtitan: our bare step, and our loop beside theirs."""
    rows = []
    for name, case in results("llama-training")["results"].items():
        for part, ours, key in (("step", "ours", "ratios"), ("loop", "ours, loop", "loops")):
            for ratio in case.get(key, {}).values():
                rates = [f"{case['tokens_per_s'][one]['median']:,.0f}" for one in (ours, ratio["fastest"])]
                target = "" if ratio["target"] is None else str(ratio["target"])
                case_name = name.replace(", 1 threads", ", 1 thread")
                beside = ratio["fastest"].removesuffix(", loop")
                rows.append([case_name, part, beside, *spread(ratio["times"]), target, *rates])
    shown = table(["case", "timed", "beside", "times as fast", "quartiles", "target", "ours", "peer"], rows)
    return shown


OPTIMIZERS = {"adamw": "AdamW", "muon": "Muon"}


def optimizers() -> str:
    """Return Muon beside AdamW at equal tokens; seconds only of a quiet machine."""
    if not is_measured("llama-optimizers"):
        return "Not measured yet; `cordillera bench llama --part optimizers` does it."
    found = results("llama-optimizers")
    rows = []
    for name, shown in OPTIMIZERS.items():
        loss, tried = found["losses"][name], [one for one in found["trials"] if one["optimizer"] == name]
        rate = f"{found['rates'][name]:g} (of {len(tried)}{', at the end' if found['at_edge'][name] else ''})"
        seeds = f"{loss['low']:.3f} to {loss['high']:.3f}"
        rows.append([shown, rate, f"{loss['mean']:.3f}", seeds])
    timed = found["steps_timed"]
    if timed["quiet"]:
        for name, row in zip(OPTIMIZERS, rows, strict=True):
            row.append(f"{1000 * timed['seconds'][name]['median']:.0f}")
    headings = ["optimizer", "best rate", "loss on held-out text, nats a byte", "of seeds", "ms a step"]
    return f"{table(headings[: len(rows[0])], rows)}\n\n{_of_optimizers(found)}"


def _of_optimizers(found: Any) -> str:
    """Return what is compared: sizes, the difference of losses, the tokens that Muon needs, and its steps."""
    change, timed, needed, shares = (found[key] for key in ("change", "steps_timed", "tokens_needed", "shares"))
    seeds, none = len(needed), sum(one is None for one in needed)
    reached = sorted(one for one in needed if one is not None)
    lines = [
        f"{found['parameters'] / 1e6:.2f} million weights, {found['tokens'] / 1e6:.2f} million tokens in "
        f"{found['steps']:,} steps, {seeds} seeds. Muon's loss differs by {change['value']:+.3f} (95 % interval over "
        f"seeds {change['low']:+.3f} to {change['high']:+.3f})."
    ]
    if reached:
        at_most = "at most " if reached[0] <= shares[0] else ""
        ends = f"{100 * reached[0]:.0f}" + (f" to {100 * reached[-1]:.0f}" if reached[-1] > reached[0] else "")
        lines.append(f"It has AdamW's loss after {at_most}{ends} % of the tokens.")
    if none:
        lines.append(f"With {none} of {seeds} seeds it does not reach AdamW's loss.")
    if timed["quiet"]:
        ratio = timed["muon_over_adamw"]
        lines.append(
            f"A step of it takes {ratio['median']:.2f} times as long ({ratio['low']:.2f} to {ratio['high']:.2f}) with "
            f"{timed['threads']} threads."
        )
    return " ".join(lines)


# Speculative decoding


def drafts() -> str:
    """Return rates with and without drafts, beside transformers."""
    rows = []
    for name, one in results("speculation-ngram")["results"].items():
        ratios = [one["wall"][key] for key in ("ngram_over_off", "off_over_transformers", "lookup_over_transformers")]
        passes = one["tokens_a_pass"]
        rows.append(
            [
                name,
                *(f"{ratio['mean']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})" for ratio in ratios[:1]),
                "" if one["target"] is None else f"{one['target']:g}",
                f"{one['processor']['ngram_over_off']['mean']:.2f}",
                *(f"{ratio['mean']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})" for ratio in ratios[1:]),
                f"{passes['ngram']:.2f}",
                f"{passes['prompt lookup']:.2f}",
                f"{one['tokens_per_s']['ngram']:.0f}",
            ]
        )
    return table(
        [
            "set",
            "drafts over off",
            "target",
            "in processor time",
            "off over transformers",
            "lookup over transformers",
            "tokens a pass",
            "tokens a pass, lookup",
            "tokens/s",
        ],
        rows,
    )


def packed_drafts() -> str:
    """Return rates with packed weights, over bfloat16 without drafts and over llama.cpp if it was there."""
    ratios = {
        "int4_over_off": "int4 over bfloat16",
        "int4_with_drafts_over_off": "int4 with drafts over bfloat16",
        "int4_over_llama_cpp": "int4 over llama.cpp",
        "int4_with_drafts_over_llama_cpp": "int4 with drafts over llama.cpp",
    }
    rates = {
        "off": "tokens/s, bfloat16",
        "int4": "tokens/s, int4",
        "int4 with drafts": "tokens/s, with drafts",
        "llama.cpp": "tokens/s, llama.cpp",
    }
    found = results("speculation-ngram")["results"]
    first = next(iter(found.values()))
    ratios = {key: title for key, title in ratios.items() if key in first["wall"]}
    rates = {key: title for key, title in rates.items() if key in first["tokens_per_s"]}
    rows = []
    for name, one in found.items():
        own = [one["wall"][key] for key in ratios]
        cells = [f"{ratio['mean']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})" for ratio in own]
        cells.append(f"{one['tokens_a_pass']['int4 with drafts']:.2f}")
        rows.append([name, *cells, *(f"{one['tokens_per_s'][key]:.0f}" for key in rates)])
    return table(["set", *ratios.values(), "tokens a pass", *rates.values()], rows)


def packed_weights() -> str:
    """Return generation with packed weights beside bfloat16, and llama.cpp with one text at a time."""
    found = results("llama-packed")
    rows = []
    for one in found["results"]:
        for name, times in one["times_bfloat16"].items():
            asked = found["targets"].get(name, "") if one["texts"] == 1 else ""
            rate = f"{one['tokens_per_s'][name]['median']:.1f} tokens/s"
            ratio = [rate] if name == "bfloat16" else [rate, *spread(times)]
            rows.append([str(one["texts"]), name, *ratio, *[""] * (3 - len(ratio)), str(asked)])
    return table(["texts at a time", "weights", "rate", "over bfloat16", "quartiles", "target"], rows)


def packed_perplexity() -> str:
    """Return the perplexity with each kind of weights."""
    found = results("llama-packed")["perplexity"]
    return table(["weights", "perplexity"], [[name, f"{value:.3f}"] for name, value in found.items()])


def packed_texts(key: str) -> str:
    """Return the number of texts, or of tokens of each, that perplexities are of."""
    return str(results("llama-packed")[key])


def packed_bytes(dtype: str) -> str:
    """Return the MiB of matrices that a pass reads."""
    return f"{results('llama-packed')['pass_bytes'][dtype] / MEBI:.0f}"


def trained() -> str:
    """Return rates with trained drafters over rates without drafts."""
    found = results("speculation-trained")
    sets = found["results"]
    rows = [
        [
            name,
            *(f"{one[name]['seconds']['mean']:.2f}" for one in sets.values()),
            f"{mean['over_off']:.2f}",
            f"{mean['processor']:.2f}",
            f"{mean['tokens_a_pass']:.2f}",
        ]
        for name, mean in found["means"].items()
    ]
    return table(["drafter", *sets, "mean", "in processor time", "tokens a pass"], rows)


def learnt() -> str:
    """Return what the trainings of drafters ended with."""
    rows = []
    for name, one in results("speculation-trained")["drafters"].items():
        draft, last = one["draft"], one["evaluation"]
        measures = last["measures"]
        rows.append(
            [name, draft["kind"], str(draft["layers"]), f"{last['step']:,}", f"{measures['accuracy']:.3f}",
             f"{measures['accepted']:.3f}"]
        )  # fmt: skip
    return table(["drafter", "kind", "layers", "steps", "accuracy of the first draft", "mean accepted length"], rows)


def batches() -> str:
    """Return rates of several texts at a time."""
    found = results("speculation-batches")["results"]
    names, drafts = list(found[0]["tokens_per_s"]), list(found[0]["over_off"])
    rows = []
    for row in found:
        cells = [str(row["texts"]), *(f"{row['tokens_per_s'][name]:.0f}" for name in names)]
        cells += [f"{row['over_off'][name]:.2f}" for name in drafts]
        rows.append([*cells, f"{row['over_transformers']['ngram']:.2f}"])
    headings = [f"{name}, tokens/s" for name in names] + [f"{name} over off" for name in drafts]
    return table(["texts at a time", *headings, "ngram over transformers, one by one"], rows)


def waits() -> str:
    """Return times to first tokens and between tokens of several texts at a time, in milliseconds."""
    rows = []
    for row in results("speculation-batches")["results"]:
        for name in row["firsts"]:
            cells = [f"{1e3 * row[key][name][end]:,.0f}" for key in ("firsts", "gaps") for end in ("p50", "p99")]
            rows.append([str(row["texts"]), name, *cells])
    headings = [f"{what}, {end} (ms)" for what in ("first token", "between tokens") for end in ("p50", "p99")]
    return table(["texts at a time", "written by", *headings], rows)


def beside_vllm() -> str:
    """Return rates in bfloat16 beside vLLM's."""
    ratios = {
        "off_over_vllm": "off over vLLM",
        "ngram_over_vllm_ngram": "drafts over vLLM's",
        "vllm_ngram_over_vllm": "vLLM's drafts over none",
    }
    rows = []
    for name, one in results("speculation-ngram")["results"].items():
        own = [one["wall"][key] for key in ratios]
        cells = [f"{ratio['mean']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})" for ratio in own]
        rates = [f"{one['tokens_per_s'][key]:.0f}" for key in ("vllm", "vllm ngram")]
        rows.append([name, *cells, f"{one['tokens_a_pass']['vllm ngram']:.2f}", *rates])
    return table(
        ["set", *ratios.values(), "vLLM's tokens a pass", "tokens/s, vLLM", "tokens/s, vLLM with drafts"], rows
    )


def _forms() -> dict[str, Any]:
    found: dict[str, Any] = results("speculation-guided")["runs"]
    return found


def cost(rows: int) -> str:
    """Return the time of a pass over some tokens in multiples of that over one."""
    seconds = results("speculation-ngram")["pass_seconds"]
    return f"{seconds[rows - 1] / seconds[0]:.2f}"


# WLB-LLM


def packing() -> str:
    """Return the balance of packings."""
    rows = [
        [
            PACKINGS[name],
            f"{one['imbalance']:.3f}",
            f"{one['imbalance_p95']:.3f}",
            f"{one['delay']:.2f}",
            f"{1e3 * one['seconds']:.2f} ms",
        ]
        for name, one in results("wlb-packing")["rows"].items()
        if name in PACKINGS
    ]
    return table(
        ["packing", "imbalance, mean", "imbalance, 95th percentile", "delay of a token, iterations", "planning"], rows
    )


def packing_reached(bound: str) -> str:
    """Return whether packing within a bound met its targets."""
    names = {"imbalance": "mean", "imbalance_p95": "95th percentile", "delay": "delay", "seconds": "time of a plan"}
    missed = [names[key] for key, reached in results("wlb-packing")["reached"][bound].items() if not reached]
    return f"missed ({listed(missed)})" if missed else "met"


def pipeline() -> str:
    """Return the simulated gain of packing."""
    rows = [
        [PACKINGS[name], f"{gain['packing']:.2f}", f"{gain['both']:.2f}"]
        for name, gain in results("wlb-pipeline")["gains"]["2 queues, 1.5 contexts"].items()
    ]
    return table(["beside", "packing alone", "and per-document sharding"], rows)


def _cut() -> dict[str, float]:
    found: dict[str, float] = results("wlb-pipeline")["gains"]["2 queues, 1.5 contexts"]["arrival order, documents cut"]
    return found


def left_out() -> str:
    """Return the share of work that cut documents leave out."""
    rows = results("wlb-pipeline")["rows"]
    return percent(1 - rows["arrival order, documents cut"]["work"] / rows["arrival order"]["work"], ".1f")


def executed_gains(part: str) -> str:
    """Return executed gains of packing beside simulated ones."""
    rows = [
        [PACKINGS[name], *spread(gain["executed"]), f"{gain['simulated']:.2f}"]
        for name, gain in results(f"wlb-{part}")["gains"].items()
    ]
    return table(["beside", "executed", "quartiles", "simulated"], rows)


def emulated_reached() -> str:
    """Return over which packings the emulated pipeline reached its target."""
    found = {PACKINGS[name]: gain["reached"] for name, gain in results("wlb-emulated")["gains"].items()}
    if all(found.values()):
        return "over every packing of the table"
    reached = [f"`{name}`" for name, yes in found.items() if yes]
    missed = [f"`{name}`" for name, yes in found.items() if not yes]
    return f"over {listed(reached) if reached else 'no packing'}, and not over {listed(missed)}"


def sharding_gain() -> str:
    """Return the gain of sharding a skewed mix by document."""
    mixes = results("context_parallel-sharding")["mixes"].values()
    skewed = next(found for found in mixes if found["imbalance"]["per sequence, all_gather"] > 1.5)
    ways = ("all_gather", "ring")
    return span((skewed["times_per_sequence"][f"per document, {way}"]["wall"]["median"] for way in ways), ".2f")


# Context parallelism


def _sessions() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = results("context_parallel-sessions")["runs"]
    return found


def sessions() -> str:
    """Return what conversations over ranks hold and send."""
    rows = []
    for ranks in (2, 3, 4):
        by = {run["transport"]: run for run in _sessions() if run["ranks"] == ranks}
        sent = [f"{by[name]['attention_bytes'] / 1e6:.1f} MB" for name in ("pass_kv", "pass_q", "auto")]
        rows.append([str(ranks), ", ".join(map(str, by["auto"]["kv_held"])), *sent])
    return table(["ranks", "keys and values held", "sent by pass-KV", "sent by pass-Q", "sent by the choice"], rows)


SHARDINGS = ("per document, all_gather", "adaptive, all_gather", "per document, ring")


def sharding() -> str:
    """Return ways to divide documents."""
    rows = []
    for mix, found in results("context_parallel-sharding")["mixes"].items():
        for name in SHARDINGS:
            work = f"{found['imbalance'][name]:.2f}"
            rows.append([mix, name.replace("_", "-"), work, *spread(found["times_per_sequence"][name]["wall"])])
    return table(["documents", "cut", "largest work over mean", "times as fast", "quartiles"], rows)


def baseline_work() -> str:
    """Return the largest work of a rank over the mean with rows divided by sequence."""
    first, *others = (found["imbalance"] for found in results("context_parallel-sharding")["mixes"].values())
    name = "per sequence, all_gather"
    return f"{first[name]:.2f} times the mean on the first mix of documents and {max(o[name] for o in others):.2f}"


def _least_gain(mixes: slice) -> float:
    found = list(results("context_parallel-sharding")["mixes"].values())[mixes]
    return float(min(one["times_per_sequence"][name]["wall"]["median"] for one in found for name in SHARDINGS))


# FSDP


def _memory() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = results("fsdp-memory")["rows"]
    return found


def sharded_memory() -> str:
    """Return tracked memory beside its laws."""
    rows = []
    for one in _memory():
        sizes = [f"{one[f'{key}_bytes'] / MEBI:,.1f}" for key in ("parameter", "law", "published")]
        counts = f"{one['collectives']['all_gathers']} + {one['collectives']['reduce_scatters']}"
        rows.append([one["model"], one["wrapping"], str(one["world"]), *sizes, counts])
    return table(["model", "units", "ranks", "tracked", "`sum / F + root + max`", "as published", "collectives"], rows)


def too_low() -> str:
    """Return how much too low the law as published is for the whole model."""
    below = [1 - one["published_bytes"] / one["parameter_bytes"] for one in _memory() if one["model"] == "8B"]
    return span((100 * one for one in below), ".1f") + " %"


def gather_buffers() -> str:
    """Return the largest buffers of collectives with a unit a block."""
    buffers = max(one["gather_buffer_bytes"] for one in _memory() if one["wrapping"] == "every block")
    return f"{buffers / MEBI:,.1f} MiB"


def traffic() -> str:
    """Return bytes sent relative to the size of the weights."""
    found = results("fsdp-traffic")
    size, rows = found["weight_bytes"], []
    for name, one in found["rows"].items():
        across = one["across_hosts_bytes"]
        shares = [sum(one["sent_bytes"][0].values()) / size, max(across) / size, sum(across) / size]
        rows.append([name, *(f"{share:.3f}" for share in shares)])
    return table(["weights", "sent by a rank", "across hosts, busiest rank", "all ranks"], rows)


def hybrid_share(key: str) -> str:
    """Return the share of full sharding's bytes that hybrid sharding sends."""
    return f"{100 / results('fsdp-traffic')['times_hybrid']['fully sharded'][key]:.0f} %"


FIGURES: Figures = {
    "llama-isoflop": isoflop,
    "llama-isoflop-runs": isoflop_runs,
    "llama-isoflop-tokens": partial(isoflop_law, "tokens"),
    "llama-isoflop-parameters": partial(isoflop_law, "parameters"),
    "llama-generation": generation,
    "llama-threads": lambda: str(results("llama-generation")["machine"]["threads"]),
    "llama-peer": peer_version,
    "llama-regret": regret,
    "llama-loading": loading,
    "llama-packed": packed_weights,
    "llama-perplexity": packed_perplexity,
    "llama-perplexity-texts": partial(packed_texts, "texts"),
    "llama-perplexity-tokens": partial(packed_texts, "tokens_a_text"),
    "llama-packed-bytes-8": partial(packed_bytes, "int8"),
    "llama-packed-bytes": partial(packed_bytes, "int4"),
    "llama-plain-bytes": partial(packed_bytes, "bfloat16"),
    "llama-training": training,
    "llama-optimizers": optimizers,
    "llama-packed-processor": partial(processor, "llama-packed"),
    "speculation-ngram": drafts,
    "speculation-packed": packed_drafts,
    "speculation-tokens": lambda: str(results("speculation-ngram")["new_tokens"]),
    "speculation-prompts": lambda: str(results("speculation-ngram")["results"]["sum"]["prompts"]),
    "speculation-others": lambda: str(results("speculation-ngram")["prompts_of_others"]),
    "speculation-batches": batches,
    "speculation-waits": waits,
    "speculation-vllm": beside_vllm,
    "speculation-trained": trained,
    "speculation-learnt": learnt,
    "speculation-trained-prompts": lambda: str(results("speculation-trained")["prompts"]),
    "guided-documents": lambda: f"{_forms()['guided']['valid']} of {results('speculation-guided')['documents']}",
    "guided-rate": lambda: f"{results('speculation-guided')['times_free']:.2f}",
    "guided-passes": lambda: f"{_forms()['guided']['tokens_a_pass']:.2f}",
    "guided-free-passes": lambda: f"{_forms()['free']['tokens_a_pass']:.2f}",
    "speculation-requests": lambda: str(results("speculation-batches")["requests"]),
    "speculation-cost-8": lambda: cost(8),
    "speculation-cost-16": lambda: cost(16),
    "wlb-packing": packing,
    "wlb-one-and-a-half": partial(packing_reached, "1.5 contexts"),
    "wlb-two": partial(packing_reached, "2 contexts"),
    "wlb-pipeline": pipeline,
    "wlb-cut": lambda: f"{_cut()['both']:.2f}",
    "wlb-cut-by-work": lambda: f"{_cut()['both_by_work']:.2f}",
    "wlb-left-out": left_out,
    "wlb-executed": partial(executed_gains, "executed"),
    "wlb-break-even": lambda: f"{results('wlb-executed')['break_even']:,.0f}",
    "wlb-executed-iterations": lambda: str(results("wlb-executed")["iterations"]),
    "wlb-sharding": sharding_gain,
    "wlb-emulated": partial(executed_gains, "emulated"),
    "wlb-emulated-iterations": lambda: str(results("wlb-emulated")["iterations"]),
    "wlb-emulated-reached": emulated_reached,
    "context-sessions": sessions,
    "context-tokens": lambda: of_all([run["tokens_identical"] for run in _sessions()], "runs"),
    "context-bytes": lambda: of_all([run["bytes_as_formulas"] for run in _sessions()], "runs"),
    "context-logits": lambda: f"{max(run['largest_logit_difference'] for run in _sessions()):.1e}",
    "context-baseline": baseline_work,
    "context-sharding": sharding,
    "context-skewed": lambda: f"{_least_gain(slice(0, 1)):.2f}",
    "context-skewed-target": lambda: judged([_least_gain(slice(0, 1))], 1.25),
    "context-others": lambda: f"{_least_gain(slice(1, None)):.2f}",
    "context-others-target": lambda: judged([_least_gain(slice(1, None))], 0.97),
    "fsdp-memory": sharded_memory,
    "fsdp-law": lambda: of_all([one["parameter_bytes"] == one["law_bytes"] for one in _memory()], "cases"),
    "fsdp-too-low": too_low,
    "fsdp-collectives": lambda: of_all(
        [one["collectives"] == one["collectives_by_formula"] for one in _memory()], "cases"
    ),
    "fsdp-buffers": gather_buffers,
    "fsdp-weights": lambda: f"{results('fsdp-traffic')['weight_bytes'] / MEBI:.1f} MiB",
    "fsdp-traffic": traffic,
    "fsdp-ledgers": lambda: of_all([one["equal"] for one in results("fsdp-traffic")["rows"].values()], "rows"),
    "fsdp-busiest": partial(hybrid_share, "busiest"),
    "fsdp-all-links": partial(hybrid_share, "all"),
}
