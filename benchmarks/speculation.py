"""Generation with drafts beside generation without and beside transformers: ``cordillera bench speculation``."""

from __future__ import annotations

import contextlib
import enum
import itertools
import json
import math
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import typer
from _llama_cpp import LlamaCpp
from _llama_peer import transformers_llama
from _peers import PeerUnavailable
from _program import Program
from _results import FinishedPieces
from _speculation_guided import guided
from _tables import print_notes
from _vllm_peer import DRAFTS, Vllm
from rich.console import Console
from rich.table import Table

from cordillera.data.assets import stored_asset
from cordillera.errors import DataError
from cordillera.models.language.checkpoints.drafter_file import read_drafter
from cordillera.reports.ranking.comparison import mean_interval
from cordillera.serving.language.engine import Engine
from cordillera.serving.language.generation import generate
from cordillera.serving.language.language_model import (
    LanguageModel,
    find_drafters,
    load_language_model,
    make_speculation,
    shipped_drafters,
)
from cordillera.serving.language.sampler import Sampling
from cordillera.serving.language.speculation import Speculation, measure_costs

PROMPTS = Path(__file__).resolve().parents[2] / "shared" / "data" / "prompts"
SETS = {
    "humaneval": "code",
    "sum": "summaries",
    "qa": "questions",
    "gsm8k": "arithmetic",
    "alpaca": "instructions",
    "mt_bench": "chat",
}
EACH, NEW_TOKENS, LOOKUP = 40, 128, 5
ASKED = ("off", "ngram", "transformers")  # on all prompts; others on the first of each set
BESIDE = 10  # prompts of a set on which others are measured
TARGETS = {"humaneval": 1.3, "sum": 1.3, "mt_bench": 0.97}
ARRIVALS = 7  # seed of the times between requests
TOGETHER, REQUESTS, BATCH_TOKENS, BATCH_ROUNDS = (1, 2, 4, 8, 16), 16, 64, 2
TARGET_OFF = 1.25  # multiple of transformers' rate without drafts
GREEDY = Sampling(temperature=0)
OTHERS = ("transformers", "prompt lookup", "llama.cpp", "vllm", "vllm ngram")
PACKED = ("int4_over_off", "int4_with_drafts_over_off", "int4_over_llama_cpp", "int4_with_drafts_over_llama_cpp")
BESIDE_VLLM = ("off_over_vllm", "ngram_over_vllm_ngram", "vllm_ngram_over_vllm")
DRAFTERS = Path(__file__).resolve().parent / "drafters"  # files that are measured beside the shipped ones
TARGET_TRAINED, TARGET_PASS = 1.6, 2.0


class Part(str, enum.Enum):
    """Parts of the benchmark."""

    ngram = "ngram"
    trained = "trained"
    batches = "batches"
    guided = "guided"


class Peer:
    """transformers' greedy generation with the same weights, in the faster of their dtype and float32."""

    def __init__(self, ours: LanguageModel) -> None:
        # Without AVX-512, torch multiplies bfloat16 at a seventh of the speed of float32.
        self.dtype = ours.dtype if torch.ops.mkldnn._is_mkldnn_bf16_supported() else torch.float32
        self.model = transformers_llama(ours.path, ours.config).to(self.dtype)
        self.stop = sorted(ours.tokenizer.stop_ids)
        self.forwards = 0
        self.model.register_forward_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.forwards += 1

    @torch.inference_mode()
    def __call__(self, ids: list[int], tokens: int, lookup: int | None) -> tuple[list[int], int]:
        self.forwards, prompt = 0, torch.tensor([ids])
        drafts = {} if lookup is None else {"prompt_lookup_num_tokens": lookup}
        found = self.model.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=tokens,
            eos_token_id=self.stop, pad_token_id=0, **drafts,
        )  # fmt: skip
        return found[0, len(ids) :].tolist(), self.forwards


def _generated(
    ours: LanguageModel, ids: list[int], tokens: int, speculation: Speculation | None
) -> tuple[list[int], int]:
    """Return the new tokens of a prompt, and the number of passes."""
    stop, count = ours.tokenizer.stop_ids, ours.tokenizer.vocab_size
    found = list(generate(ours.model, [ids], tokens, stop, GREEDY, count, speculation))
    return [one.token for one in found], found[-1].forward + 1


def _contenders(
    console: Console, ours: LanguageModel, tokens: int
) -> dict[str, Callable[[list[int]], tuple[list[int], int]]]:
    """Functions from a prompt's ids to the new tokens and the number of passes."""
    packed = load_language_model("smollm2", device="cpu", dtype="int4")
    peer = Peer(ours)
    found: dict[str, Callable[[list[int]], tuple[list[int], int]]] = {
        "off": lambda ids: _generated(ours, ids, tokens, None),
        "ngram": lambda ids: _generated(ours, ids, tokens, ours.speculation),
        "int4": lambda ids: _generated(packed, ids, tokens, None),
        "int4 with drafts": lambda ids: _generated(packed, ids, tokens, packed.speculation),
        "transformers": lambda ids: peer(ids, tokens, None),
        "prompt lookup": lambda ids: peer(ids, tokens, LOOKUP),
    }
    with contextlib.suppress(ImportError):
        other = LlamaCpp(ours.path, 2048)

        def written(ids: list[int]) -> tuple[list[int], int]:
            new = other.write(ids, tokens, ours.tokenizer.stop_ids)
            return new, len(new)

        found["llama.cpp"] = written
    for name, vllm in _vllms(console, ours, 1).items():
        found[name] = partial(vllm, tokens=tokens)
    return found


def _vllms(console: Console, ours: LanguageModel, texts: int) -> dict[str, Vllm]:
    """vLLM without and with its drafts, by name; none, and the reason is printed, if it cannot run."""
    try:
        return {name: Vllm(ours, texts=texts, drafts=name != "vllm") for name in ("vllm", "vllm ngram")}
    except PeerUnavailable as error:
        console.print(f"vLLM: left out, {error}", markup=False)
        return {}


def _measured(contenders: dict[str, Callable[[list[int]], tuple[list[int], int]]], ids: list[int], turn: int) -> Any:
    """Let each continue a prompt, in an order that changes with the turn."""
    names, found, texts = list(contenders), {}, []
    for name in names[turn % len(names) :] + names[: turn % len(names)]:
        wall, processor = time.perf_counter(), time.process_time()
        tokens, forwards = contenders[name](ids)
        found[name] = {
            "seconds": time.perf_counter() - wall,
            "processor_seconds": None if name.startswith("vllm") else time.process_time() - processor,
            "tokens": len(tokens),
            "forwards": forwards,
        }
        if name not in OTHERS:
            texts.append(tokens)
    if any(text != texts[0] for text in texts):
        raise RuntimeError(f"drafts changed a text of {len(texts[0])} tokens")
    return found


def _ratio(pairs: list[tuple[float, float]]) -> dict[str, float]:
    """Geometric mean over prompts of the rate of the first over that of the second, with a 95 % interval."""
    found = mean_interval([math.log(a / b) for a, b in pairs])
    return {"mean": math.exp(found.value), "low": math.exp(found.low), "high": math.exp(found.high)}


def _tokens_per(rows: list[Any], one: str, key: str) -> float:
    """Tokens a pass or a second of one contender."""
    own = [row[one] for row in rows if one in row]
    return float(sum(row["tokens"] for row in own) / sum(row[key] for row in own))


def _summary(rows: list[Any], key: str) -> dict[str, Any]:
    """Compare over the prompts of a set on which both were measured; ``key`` is the clock."""

    def ratio(one: str, other: str) -> dict[str, float]:
        both = [row for row in rows if one in row and other in row]
        return _ratio([(row[one]["tokens"] / row[one][key], row[other]["tokens"] / row[other][key]) for row in both])

    found = {
        "off_over_transformers": ratio("off", "transformers"),
        "ngram_over_off": ratio("ngram", "off"),
        "lookup_over_transformers": ratio("prompt lookup", "transformers"),
        "ngram_over_lookup": ratio("ngram", "prompt lookup"),
        "int4_over_off": ratio("int4", "off"),
        "int4_with_drafts_over_off": ratio("int4 with drafts", "off"),
    }
    if "llama.cpp" in rows[0]:
        found["int4_over_llama_cpp"] = ratio("int4", "llama.cpp")
        found["int4_with_drafts_over_llama_cpp"] = ratio("int4 with drafts", "llama.cpp")
    if "vllm" in rows[0] and key == "seconds":
        found["off_over_vllm"] = ratio("off", "vllm")
        found["ngram_over_vllm_ngram"] = ratio("ngram", "vllm ngram")
        found["vllm_ngram_over_vllm"] = ratio("vllm ngram", "vllm")
    return found


def _print_ngram(console: Console, results: dict[str, Any], tokens: int) -> None:
    table = Table(title=f"greedy, up to {tokens} new tokens, one prompt at a time (measured)", title_justify="left")
    for heading in ("set", "off / transformers", "ngram / off", "asked", "tokens a pass", "lookup / transformers",
                    "its tokens a pass", "tokens/s"):  # fmt: skip
        table.add_column(heading)
    for name, one in results.items():
        off, drafted, lookup = (
            one["wall"][key] for key in ("off_over_transformers", "ngram_over_off", "lookup_over_transformers")
        )
        table.add_row(
            f"{name} ({SETS[name]})", f"{off['mean']:.2f}", f"{drafted['mean']:.2f}", str(one["target"] or ""),
            f"{one['tokens_a_pass']['ngram']:.2f}", f"{lookup['mean']:.2f}",
            f"{one['tokens_a_pass']['prompt lookup']:.2f}", f"{one['tokens_per_s']['ngram']:.1f}",
        )  # fmt: skip
    console.print(table)
    table = Table(title="weights in the codes of the file, over bfloat16 without drafts", title_justify="left")
    for heading in ("set", "int4", "with drafts", "int4 over llama.cpp", "with drafts", "tokens/s", "of llama.cpp"):
        table.add_column(heading)
    for name, one in results.items():
        shown = [f"{one['wall'][key]['mean']:.2f}" if key in one["wall"] else "" for key in PACKED]
        rates = [f"{one['tokens_per_s'].get(key, 0.0):.0f}" for key in ("int4 with drafts", "llama.cpp")]
        table.add_row(name, *shown, *rates)
    console.print(table)
    if all("off_over_vllm" in one["wall"] for one in results.values()):
        table = Table(title="beside vLLM, in bfloat16", title_justify="left")
        for heading in ("set", "off / vllm", "ngram / vllm's ngram", "vllm's ngram / vllm", "its tokens a pass"):
            table.add_column(heading)
        for name, one in results.items():
            ratios = [f"{one['wall'][key]['mean']:.2f}" for key in BESIDE_VLLM]
            table.add_row(name, *ratios, f"{one['tokens_a_pass']['vllm ngram']:.2f}")
        console.print(table)


def _ngram(console: Console, quick: bool, pieces: FinishedPieces) -> dict[str, Any]:
    each, tokens = (1, 8) if quick else (EACH, NEW_TOKENS)
    ours = load_language_model("smollm2", device="cpu", drafter="ngram")
    contenders = _contenders(console, ours, tokens)
    (warm,) = ours.encode(["Name a river."])
    for run in contenders.values():
        run(warm)
    assert ours.speculation is not None
    results: dict[str, Any] = {}
    for name in SETS:
        lines = (PROMPTS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()[:each]
        rows = []
        for number, line in enumerate(lines):
            (ids,) = ours.encode([json.loads(line)["turns"][0]])
            key = {"set": name, "prompt": number, "tokens": tokens}
            if (row := pieces.get(key)) is None:
                some = {one: run for one, run in contenders.items() if one in ASKED or number < BESIDE}
                row = {**_measured(some, ids, number), "prompt_tokens": len(ids)}
                pieces.add(key, row)
            rows.append(row)
        drafting = [one for one in ("ngram", "int4 with drafts", "prompt lookup", "vllm ngram") if one in contenders]
        passes = {one: _tokens_per(rows, one, "forwards") for one in drafting}
        rates = {one: _tokens_per(rows, one, "seconds") for one in contenders}
        results[name] = {
            "prompts": len(rows),
            "prompt_tokens": sum(row["prompt_tokens"] for row in rows) / len(rows),
            "wall": _summary(rows, "seconds"),
            "processor": _summary(rows, "processor_seconds"),
            "tokens_a_pass": passes,
            "tokens_per_s": rates,
            "target": TARGETS.get(name),
            "rows": rows,
        }
    notes = [
        "ratios: geometric means over prompts of tokens a second, with 95 % intervals; reading the prompt counts",
        "the texts with and without drafts are compared token by token, and are the same",
        f"without drafts, with n-grams and transformers on all prompts, others on the first {BESIDE} of each set",
        f"lookup: transformers' prompt_lookup_num_tokens = {LOOKUP}",
        "int4: the codes of the file, with the same texts; drafts by n-grams and the shipped head",
    ]
    if "vllm" in contenders:
        notes.append(f"vLLM's n-gram drafts: {DRAFTS}")
    _print_ngram(console, results, tokens)
    print_notes(console, notes)
    return {
        "evidence": "measured",
        "new_tokens": tokens,
        "prompts_of_others": min(each, BESIDE),
        "pass_seconds": ours.speculation.costs,
        "target_off": TARGET_OFF,
        "results": results,
        "notes": notes,
    }


def _trained(console: Console, quick: bool, pieces: FinishedPieces) -> dict[str, Any]:
    """Compare trained drafters, alone and with n-grams, with no drafts."""
    each, tokens = (1, 8) if quick else (EACH, NEW_TOKENS)
    ours = load_language_model("smollm2", device="cpu", drafter="none")
    costs = measure_costs(ours.model)
    files = {**shipped_drafters(), **{path.stem: path for path in sorted(DRAFTERS.glob("*.safetensors"))}}
    if not files:
        raise DataError("there is no trained drafter", where="drafters", remedy="export one into benchmarks/drafters")
    facts = {name: {"draft": (file := read_drafter(path)).draft.model_dump(mode="json"), **file.facts}
             for name, path in files.items()}  # fmt: skip
    speculations: dict[str, Speculation | None] = {"off": None}
    for name in ("ngram", *(f"{first}{path}" for path in files.values() for first in ("", "ngram+"))):
        short = name if name == "ngram" else name.replace(str(Path(name.removeprefix("ngram+")).parent) + "/", "")
        speculations[short.removesuffix(".safetensors")] = make_speculation(ours.model, find_drafters(name), costs)
    contenders = {name: (lambda ids, one=one: _generated(ours, ids, tokens, one)) for name, one in speculations.items()}
    (warm,) = ours.encode(["Name a river."])
    for run in contenders.values():
        run(warm)
    results: dict[str, Any] = {}
    for name in SETS:
        rows = []
        for number, line in enumerate((PROMPTS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()[:each]):
            (ids,) = ours.encode([json.loads(line)["turns"][0]])
            key = {"set": name, "prompt": number, "tokens": tokens, "contenders": list(contenders)}
            if (row := pieces.get(key)) is None:
                row = _measured(contenders, ids, number)
                pieces.add(key, row)
            rows.append(row)
        results[name] = {
            one: {
                **{
                    clock: _ratio([(row[one]["tokens"] / row[one][clock], row["off"]["tokens"] / row["off"][clock])
                                   for row in rows])
                    for clock in ("seconds", "processor_seconds")
                },
                "tokens_a_pass": sum(row[one]["tokens"] for row in rows) / sum(row[one]["forwards"] for row in rows),
            }
            for one in contenders
            if one != "off"
        }  # fmt: skip
    means = {
        one: {
            "over_off": math.prod(found[one]["seconds"]["mean"] for found in results.values()) ** (1 / len(results)),
            "processor": math.prod(found[one]["processor_seconds"]["mean"] for found in results.values())
            ** (1 / len(results)),
            "tokens_a_pass": statistics.mean(found[one]["tokens_a_pass"] for found in results.values()),
        }
        for one in contenders
        if one != "off"
    }
    table = Table(title=f"greedy, up to {tokens} new tokens, over no drafts (measured)", title_justify="left")
    for heading in ("drafter", *SETS, "mean", "tokens a pass"):
        table.add_column(heading)
    for one, mean in means.items():
        ratios = [f"{found[one]['seconds']['mean']:.2f}" for found in results.values()]
        table.add_row(one, *ratios, f"{mean['over_off']:.2f}", f"{mean['tokens_a_pass']:.2f}")
    console.print(table)
    notes = [
        "ratios: geometric means over prompts of tokens a second over those without drafts; all texts are the same",
        f"asked of the better trained drafter: {TARGET_TRAINED} in the mean of the sets at {TARGET_PASS} tokens a pass",
    ]
    print_notes(console, notes)
    return {
        "evidence": "measured",
        "prompts": each,
        "new_tokens": tokens,
        "pass_seconds": costs,
        "drafters": facts,
        "targets": {"over_off": TARGET_TRAINED, "tokens_a_pass": TARGET_PASS},
        "means": means,
        "results": results,
        "notes": notes,
    }


def _written(
    ours: LanguageModel, prompts: list[list[int]], texts: int, tokens: int, speculation: Speculation | None, mean: float
) -> dict[str, Any]:
    """Let an engine write texts, some at a time, whose requests arrive at random, ``mean`` seconds apart.

    Returns the texts, the seconds, those to the first token of each from its arrival, and those between tokens.
    """
    engine = Engine(
        ours.model,
        texts=texts,
        capacity=max(map(len, prompts)) + tokens,
        speculation=speculation,
        vocabulary=ours.tokenizer.vocab_size,
    )
    arrivals = _arrivals(mean, len(prompts))
    written: list[list[int]] = [[] for _ in prompts]
    last: dict[int, float] = {}
    gaps, firsts, asked, began = list[float](), list[float](), 0, time.perf_counter()
    while asked < len(prompts) or engine.waiting or engine.running:
        now = time.perf_counter() - began
        while asked < len(prompts) and arrivals[asked] <= now:
            engine.add(prompts[asked], tokens, ours.tokenizer.stop_ids, GREEDY)
            asked += 1
        if not (engine.waiting or engine.running):
            time.sleep(max(0.0, arrivals[asked] - now))
            continue
        new = engine.step()
        now = time.perf_counter() - began
        for one in new:
            written[one.sequence].append(one.token)
            if one.sequence in last:
                gaps.append(now - last[one.sequence])
            else:
                firsts.append(now - max(0.0, arrivals[one.sequence]))
            last[one.sequence] = now
    return {"texts": written, "seconds": time.perf_counter() - began, "gaps": gaps, "firsts": firsts}


def _arrivals(mean: float, count: int) -> list[float]:
    drawn = np.random.default_rng(ARRIVALS).exponential(mean, count).cumsum() - mean
    return [float(one) for one in drawn]


def _by_vllm(vllm: Vllm, prompts: list[list[int]], texts: int, tokens: int, mean: float) -> dict[str, Any]:
    """Let vLLM write the texts of the same requests."""
    arrivals = _arrivals(mean, len(prompts))
    found = vllm.write(prompts, tokens, arrivals, texts)
    return {
        "rate": sum(map(len, found["texts"])) / found["seconds"],
        "firsts": [own[0] - max(0.0, arrival) for own, arrival in zip(found["times"], arrivals, strict=True)],
        "gaps": [after - before for own in found["times"] for before, after in itertools.pairwise(own)],
    }


def _ends(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {"p50": ordered[len(ordered) // 2], "p99": ordered[len(ordered) * 99 // 100]}


def _batches(console: Console, quick: bool) -> dict[str, Any]:
    tokens, requests, rounds = (4, 3, 1) if quick else (BATCH_TOKENS, REQUESTS, BATCH_ROUNDS)
    ours = load_language_model("smollm2", device="cpu", drafter="ngram")
    assert ours.speculation is not None
    peer = Peer(ours)
    lines = [(PROMPTS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines() for name in SETS]
    chosen = [json.loads(lines[n % len(lines)][n // len(lines)])["turns"][0] for n in range(requests)]
    prompts = ours.encode(chosen)
    contenders: dict[str, Speculation | None] = {"off": None, "ngram": ours.speculation}
    for name in shipped_drafters():
        found = find_drafters(f"ngram+{name}")
        contenders[f"ngram+{name}"] = make_speculation(ours.model, found, ours.speculation.costs)
    runs: dict[tuple[int, str], list[dict[str, Any]]] = {(texts, on): [] for texts in TOGETHER for on in contenders}
    peers = _vllms(console, ours, max(TOGETHER))
    for vllm in peers.values():
        vllm.write(prompts, tokens, [0.0] * requests, max(TOGETHER))
    others: dict[tuple[int, str], list[dict[str, Any]]] = {(texts, name): [] for texts in TOGETHER for name in peers}
    for speculation in contenders.values():
        _written(ours, prompts[:2], 2, 4, speculation, 0.0)
    alone = _written(ours, prompts[:2], 1, tokens, None, 0.0)["seconds"] / min(2, len(prompts))
    peer(prompts[0], 4, None)
    expected: list[list[int]] = []
    sequential = []
    for turn in range(rounds):
        order = list(runs)
        for texts, on in order[:: 1 if turn % 2 else -1]:
            run = _written(ours, prompts, texts, tokens, contenders[on], alone / (4 * texts))
            written = run.pop("texts")
            expected = expected or written
            if written != expected:
                raise RuntimeError(f"{texts} texts at a time, drafts {on}: a text differs")
            runs[texts, on].append(run)
        for texts, name in others:
            others[texts, name].append(_by_vllm(peers[name], prompts, texts, tokens, alone / (4 * texts)))
        began = time.perf_counter()
        count = sum(len(peer(prompt, tokens, None)[0]) for prompt in prompts)
        sequential.append(count / (time.perf_counter() - began))
    total = sum(map(len, expected))
    results = []
    for texts in TOGETHER:
        rates = {on: [total / run["seconds"] for run in runs[texts, on]] for on in contenders}
        row: dict[str, Any] = {"texts": texts, "tokens_per_s": {on: statistics.median(rates[on]) for on in contenders}}
        row["over_off"] = {
            on: statistics.median(a / b for a, b in zip(rates[on], rates["off"], strict=True))
            for on in contenders
            if on != "off"
        }
        row["over_transformers"] = {
            on: statistics.median(a / b for a, b in zip(rates[on], sequential, strict=True)) for on in contenders
        }
        row["tokens_per_s"] |= {name: statistics.median(one["rate"] for one in others[texts, name]) for name in peers}
        both = {**{on: runs[texts, on] for on in contenders}, **{name: others[texts, name] for name in peers}}
        for key in ("gaps", "firsts"):
            row[key] = {name: _ends([one for run in found for one in run[key]]) for name, found in both.items()}
        results.append(row)
    table = Table(title=f"{requests} requests of up to {tokens} greedy tokens (measured)", title_justify="left")
    table.add_column("texts at a time")
    for on in contenders:
        table.add_column(f"{on}, tokens/s")
        table.add_column("over off" if on != "off" else "over sequential transformers")
    for name in peers:
        table.add_column(f"{name}, tokens/s")
    for row in results:
        cells = [str(row["texts"])]
        for on in contenders:
            ratio = row["over_off"][on] if on != "off" else row["over_transformers"][on]
            cells += [f"{row['tokens_per_s'][on]:.1f}", f"{ratio:.2f}"]
        table.add_row(*cells, *(f"{row['tokens_per_s'][name]:.1f}" for name in peers))
    console.print(table)
    notes = [
        "requests arrive at random, four times as fast as they can be written without drafts; every text is the same, "
        "token by token, in all runs"
    ]
    print_notes(console, notes)
    return {
        "evidence": "measured",
        "requests": requests,
        "new_tokens": tokens,
        "transformers_tokens_per_s": statistics.median(sequential),
        "results": results,
        "notes": notes,
    }


def _left_out(part: Part) -> str | None:
    stored_asset("smollm2")
    return (
        None
        if part is Part.guided or PROMPTS.is_dir()
        else f"there is no folder {PROMPTS} with the prompts of EAGLE's six sets"
    )


main = Program(
    "speculation",
    {Part.ngram: _ngram, Part.trained: _trained, Part.batches: _batches, Part.guided: guided},
    "Generate text with SmolLM2-135M with and without drafts, beside transformers.",
    fresh=True,
    left_out=_left_out,
    excused=(DataError,),
).command()


if __name__ == "__main__":
    typer.run(main)
