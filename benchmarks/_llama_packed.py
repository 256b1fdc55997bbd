"""Text generation with packed weights beside the same weights in bfloat16, and beside llama.cpp."""

from __future__ import annotations

import contextlib
import json
import math
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from pydoc_data import topics
from typing import Any

from _llama_cpp import LlamaCpp
from _tables import print_notes
from _timing import Spread, interleave, times_faster
from rich.console import Console
from rich.table import Table
from torch import nn

from cordillera.models.language.llama import Llama
from cordillera.numerics.quantization.packed_linear import PackedLinear
from cordillera.serving.language.generation import generate
from cordillera.serving.language.language_model import LanguageModel, load_language_model
from cordillera.serving.language.sampler import Sampling
from cordillera.workflows import convert
from cordillera.workflows.evaluation.language_files import evaluate_language_file

TEXTS = (1, 4, 16)
QUESTION = "Tell me about the number {}."
GREEDY = Sampling(temperature=0)
TARGETS = {"int8": 1.5, "int4": 2.0}  # multiples of bfloat16's rate, one text at a time
WINDOW, WINDOWS = 512, 24  # tokens of a text whose perplexity is measured, and number of texts


def _bytes(model: Llama) -> int:
    """Return the bytes of the matrices that a pass reads."""
    layers = [module for module in model.modules() if isinstance(module, (nn.Linear, PackedLinear))]
    return sum(tensor.nbytes for layer in layers for tensor in layer.state_dict().values())


def _texts(model: LanguageModel, count: int) -> list[str]:
    """Texts of :data:`WINDOW` tokens from the reference of Python, which Python's own library holds."""
    whole = "\n\n".join(topics.topics[name] for name in sorted(topics.topics))
    ids = model.tokenizer.encode(whole)
    starts = range(0, len(ids) - WINDOW, (len(ids) - WINDOW) // count)
    return [model.tokenizer.decode(ids[start : start + WINDOW]) for start in starts][:count]


def _perplexities(
    files: dict[str, tuple[str, str]], peers: dict[str, LlamaCpp], texts: list[str], plain: LanguageModel, folder: Path
) -> dict[str, float]:
    """Return perplexities by the name of a contender; ``files`` maps it to a model and a dtype."""
    sheet = folder / "texts.jsonl"
    sheet.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    found = {}
    for name, (model, dtype) in files.items():
        found[name] = evaluate_language_file(model, sheet, dtype=dtype).perplexity  # type: ignore[union-attr]
    ids = plain.tokenizer.encode_batch(texts)
    return found | {name: math.exp(peer.loss(ids)) for name, peer in peers.items()}


def packed(console: Console, quick: bool) -> dict[str, Any]:
    """Write the same greedy texts with weights in bfloat16, in codes of eight bits, and in those of the file."""
    with tempfile.TemporaryDirectory() as folder:
        return _packed(console, quick, Path(folder))


def _packed(console: Console, quick: bool, folder: Path) -> dict[str, Any]:
    tokens, rounds = (6, 2) if quick else (64, 7)
    whole, in_eight = folder / "whole", folder / "eight.gguf"
    convert("smollm2", whole)
    convert("smollm2", in_eight, quantize="q8_0")
    files = {"float32": ("smollm2", "float32"), "bfloat16": ("smollm2", "bfloat16"), "int8": (str(whole), "int8")}
    files["int4"] = ("smollm2", "int4")
    models = {
        name: load_language_model(model, dtype=dtype, device="cpu", drafter="none")
        for name, (model, dtype) in files.items()
        if name != "float32"
    }
    plain, peers = models["bfloat16"], dict[str, LlamaCpp]()
    with contextlib.suppress(ImportError):
        for name, path in (("llama.cpp, Q4_1", plain.path), ("llama.cpp, Q8_0", in_eight)):
            peers[name] = LlamaCpp(path, WINDOW, scores=True)
    results = []
    for count in TEXTS:
        prompts = plain.encode([QUESTION.format(n) for n in range(count)])

        def written(dtype: str, prompts: list[list[int]] = prompts) -> list[tuple[int, int]]:
            found = generate(models[dtype].model, prompts, tokens, sampling=GREEDY)
            return sorted((one.sequence, one.token) for one in found)

        runs: dict[str, Callable[[], Any]] = {dtype: partial(written, dtype) for dtype in models}
        if count == 1:
            runs |= {name: partial(peer.write, prompts[0], tokens) for name, peer in peers.items()}
        if runs["bfloat16"]() != runs["int4"]():
            raise RuntimeError("packed weights changed a text")
        timings = interleave(runs, rounds=rounds)
        rates = {
            name: Spread.of([count * tokens / seconds for seconds in timing.seconds]).to_json()
            for name, timing in timings.items()
        }
        ratios = {name: times_faster(timings[name], timings["bfloat16"]).to_json() for name in runs}
        results.append({"texts": count, "times_bfloat16": ratios, "tokens_per_s": rates})
    sizes = {name: _bytes(one.model) for name, one in models.items()}
    texts = _texts(plain, 2 if quick else WINDOWS)
    perplexity = _perplexities(files, peers, texts, plain, folder)
    _print(console, tokens, results, perplexity, len(texts))
    notes = [", ".join(f"{size / 2**20:.0f} MiB of weights a pass in {name}" for name, size in sizes.items())]
    print_notes(console, notes)
    return {
        "evidence": "measured", "new_tokens": tokens, "targets": TARGETS, "pass_bytes": sizes, "results": results,
        "perplexity": perplexity, "texts": len(texts), "tokens_a_text": WINDOW, "notes": notes,
    }  # fmt: skip


def _print(
    console: Console, tokens: int, results: list[dict[str, Any]], perplexity: dict[str, float], texts: int
) -> None:
    table = Table(title=f"{tokens} greedy tokens a text, prompts included (measured)", title_justify="left")
    for heading in ("texts at a time", "weights", "over bfloat16", "quartiles", "asked", "tokens/s"):
        table.add_column(heading)
    for one in results:
        for name, times in one["times_bfloat16"].items():
            asked = TARGETS.get(name) if one["texts"] == 1 else None
            table.add_row(
                str(one["texts"]), name, f"{times['median']:.2f}", f"{times['low']:.2f} to {times['high']:.2f}",
                str(asked or ""), f"{one['tokens_per_s'][name]['median']:.1f}",
            )  # fmt: skip
    console.print(table)
    table = Table(title=f"{texts} texts of {WINDOW} tokens (measured)", title_justify="left")
    for heading in ("weights", "perplexity"):
        table.add_column(heading)
    for name, value in perplexity.items():
        table.add_row(name, f"{value:.3f}")
    console.print(table)
