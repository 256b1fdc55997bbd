"""Loading, generation and training of Llamas compared with transformers and torchtitan: ``cordillera bench llama``.

The part ``optimizers`` compares Muon with AdamW at equal tokens.
"""

from __future__ import annotations

import copy
import enum
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import typer
from _llama_optimizers import measure_optimizers
from _llama_packed import packed
from _llama_peer import transformers_llama
from _peers import PeerUnavailable
from _program import Program
from _tables import print_notes
from _timing import Spread, interleave, times_faster
from _training_speed import training
from rich.console import Console
from rich.table import Table

from cordillera.data.assets import stored_asset
from cordillera.errors import DataError
from cordillera.serving.language.generation import generate
from cordillera.serving.language.language_model import LanguageModel, load_language_model
from cordillera.serving.language.sampler import Sampling

PROMPT = "What is a mountain range?"
DTYPES = ("bfloat16", "float32")
NEW_TOKENS = 64
TARGET = {"bfloat16": 1.25, "float32": None}  # multiple of transformers' rate
TARGET_SECONDS, TARGET_MEMORY = 5.0, 1.3


class Part(str, enum.Enum):
    """Parts of the benchmark."""

    generation = "generation"
    loading = "loading"
    packed = "packed"
    training = "training"
    optimizers = "optimizers"


def _same(ours: list[int], theirs: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), len(ours))


def _contenders(
    ours: LanguageModel, peer: Any, tokens: int
) -> tuple[dict[str, Callable[[], list[int]]], Callable[[list[int]], float]]:
    """Return greedy generation by both, and a function that measures chosen tokens by transformers' logits."""
    (ids,) = ours.encode([PROMPT])
    prompt = torch.tensor([ids])

    def by_ours() -> list[int]:
        return [one.token for one in generate(ours.model, [ids], tokens, sampling=Sampling(temperature=0))]

    @torch.inference_mode()
    def by_peer() -> list[int]:
        found = peer.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=tokens,
            min_new_tokens=tokens, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        return found[0, len(ids) :].tolist()

    @torch.inference_mode()
    def regret(chosen: list[int]) -> float:
        logits = peer(torch.tensor([ids + chosen])).logits[0, len(ids) - 1 : -1].float()
        return float((logits.amax(-1) - logits.gather(1, torch.tensor(chosen)[:, None])[:, 0]).max())

    return {"ours": by_ours, "transformers": by_peer}, regret


def _generation(console: Console, quick: bool) -> dict[str, Any]:
    tokens, rounds = (8, 2) if quick else (NEW_TOKENS, 5)
    opened = LanguageModel("smollm2")
    theirs = transformers_llama(opened.path, opened.config)
    results: dict[str, Any] = {}
    for dtype in DTYPES:
        ours = load_language_model("smollm2", dtype=dtype, device="cpu")
        peer = copy.deepcopy(theirs).to(getattr(torch, dtype))
        contenders, regret = _contenders(ours, peer, tokens)
        paths = {name: run() for name, run in contenders.items()}
        timings = interleave(contenders, rounds=rounds, warmup=0)  # both have warmed up
        results[dtype] = {
            "times_transformers": times_faster(timings["ours"], timings["transformers"]).to_json(),
            "target": TARGET[dtype],
            "tokens_per_s": {
                name: Spread.of([tokens / seconds for seconds in one.seconds]).to_json()
                for name, one in timings.items()
            },
            "same_tokens": _same(paths["ours"], paths["transformers"]),
            "regret": {name: regret(path) for name, path in paths.items()},
        }
    if results["float32"]["same_tokens"] != tokens:
        raise RuntimeError(f"greedy tokens in float32 differ from transformers': {results['float32']}")
    table = Table(title=f"{tokens} greedy tokens, batch 1 (measured)", title_justify="left")
    for heading in ("dtype", "times transformers", "quartiles", "asked", "ours", "transformers", "same tokens"):
        table.add_column(heading)
    for dtype, one in results.items():
        times, rates = one["times_transformers"], one["tokens_per_s"]
        table.add_row(
            dtype, f"{times['median']:.2f}", f"{times['low']:.2f} to {times['high']:.2f}", str(one["target"] or ""),
            *(f"{rates[name]['median']:.1f} tokens/s" for name in rates), str(one["same_tokens"]),
        )  # fmt: skip
    console.print(table)
    notes = [
        "same tokens: from the first on, until rounding in another order tips the first near tie",
        "regret: how far the logit of a chosen token is below the best one at most, when transformers reads the text",
    ]
    print_notes(console, notes)
    return {"evidence": "measured", "prompt": PROMPT, "new_tokens": tokens, "results": results, "notes": notes}


# The file is read once before, so that it is cached. Seconds are those of a new process; peak memory excludes
# libraries and compiled kernels, which a measured process has loaded before.
_LOAD = """
import json, sys, time
def status(name):
    return int([line for line in open("/proc/self/status") if line.startswith(name)][0].split()[1]) * 1024
import torch, gguf
from cordillera.models.language.llama import PRESETS, Llama
from cordillera.serving.language.generation import for_decoding
from cordillera.serving.language.language_model import load_language_model
open(sys.argv[1], "rb").read()
if sys.argv[3] == "counted":
    small = PRESETS["smollm2-135m"].model_copy(update={"layers": 1, "vocabulary": 64})
    for_decoding(Llama(small).to(getattr(torch, sys.argv[2])))
before = status("VmRSS")
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")
began = time.perf_counter()
loaded = load_language_model("smollm2", dtype=sys.argv[2], device="cpu")
seconds = time.perf_counter() - began
size = sum(parameter.nbytes for parameter in loaded.model.parameters())
print(json.dumps({"seconds": seconds, "peak_bytes": status("VmHWM") - before, "model_bytes": size}))
"""


def _loaded(path: Path, dtype: str, mode: str) -> dict[str, Any]:
    command = [sys.executable, "-c", _LOAD, str(path), dtype, mode]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _loading(console: Console, quick: bool) -> dict[str, Any]:
    path = stored_asset("smollm2")
    results = {}
    for dtype in DTYPES:
        rounds = 1 if quick else 3
        counted = [_loaded(path, dtype, "counted") for _ in range(rounds)]
        timed = counted if quick else [_loaded(path, dtype, "timed") for _ in range(rounds)]
        size = counted[0]["model_bytes"]
        results[dtype] = {
            "seconds": Spread.of([one["seconds"] for one in timed]).to_json(),
            "target_seconds": TARGET_SECONDS,
            "model_bytes": size,
            "peak_over_size": Spread.of([one["peak_bytes"] / size for one in counted]).to_json(),
            "target_peak_over_size": TARGET_MEMORY,
        }
    table = Table(title="opening SmolLM2 with its tokenizer, in a new process (measured)", title_justify="left")
    for heading in ("dtype", "seconds", "asked", "peak memory over weights", "asked"):
        table.add_column(heading)
    for dtype, one in results.items():
        table.add_row(
            dtype, f"{one['seconds']['median']:.2f}", f"{TARGET_SECONDS:g}", f"{one['peak_over_size']['median']:.2f}",
            f"{TARGET_MEMORY:g}",
        )  # fmt: skip
    console.print(table)
    return {"evidence": "measured", "results": results, "file_bytes": os.path.getsize(path), "notes": []}


PARTS: dict[Part, Callable[..., dict[str, Any]]] = {
    Part.generation: _generation,
    Part.loading: _loading,
    Part.packed: packed,
    Part.training: training,
    Part.optimizers: measure_optimizers,
}
OF_SMOLLM2 = (Part.generation, Part.loading, Part.packed)


def _left_out(part: Part) -> None:
    """Raise the error that says where to get SmolLM2, if a part needs it and it is not here."""
    if part in OF_SMOLLM2:
        stored_asset("smollm2")


main = Program(
    "llama",
    PARTS,
    "Load SmolLM2-135M and generate text with it, and train small models, beside transformers and torchtitan.",
    part_help="What to measure; repeat it. Default: all but optimizers.",
    fresh=True,
    short=(Part.generation, Part.loading, Part.packed, Part.training),
    all_help="Also Muon beside AdamW, which takes under half an hour on two cores.",
    left_out=_left_out,
    excused=(DataError, PeerUnavailable),
).command()


if __name__ == "__main__":
    typer.run(main)
