"""Generation over two processes with one microbatch and with two, for the part ``pipeline``.

Two microbatches are as large as the one (the paper's equal local batch, with twice the texts), or half as large.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from _processes import run_processes
from _tables import print_notes
from rich.console import Console

from cordillera.models.language.llama import PRESETS, Llama, LlamaConfig
from cordillera.serving.language.generation import for_decoding, generate
from cordillera.serving.language.language_model import LanguageModel
from cordillera.serving.language.pipeline_decoding import PipelineDecoder
from cordillera.serving.language.sampler import Sampling

TEXTS, TOKENS, ROUNDS, TARGET = 16, 32, 4, 1.6
GREEDY = Sampling(temperature=0)


def _model(quick: bool) -> tuple[Llama, list[list[int]]]:
    if quick:
        model = Llama(PRESETS["llama-debug"])
        model.init_weights(0)
        return for_decoding(model.bfloat16().eval()), [[n, 1 + n] for n in range(TEXTS)]
    ours = LanguageModel("smollm2", device="cpu", drafter="none")
    prompts = [f"Write {n + 2} sentences about the Andes." for n in range(TEXTS)]
    return ours.model, ours.encode(prompts)


def _decode(quick: bool, rank: int, folder: str) -> dict[str, Any]:
    model, prompts = _model(quick)
    half = prompts[: len(prompts) // 2]
    cases = {"one": (1, half), "two of half": (2, half), "two": (2, prompts)}
    found: dict[str, Any] = {"seconds": {name: [] for name in cases}, "texts": {}}
    decoders = {count: PipelineDecoder(model, count) for count in (1, 2)}
    tokens, rounds = (4, 2) if quick else (TOKENS, ROUNDS)
    for turn in range(rounds + 1):
        for name in list(cases)[:: 1 if turn % 2 else -1]:
            count, given = cases[name]
            dist.barrier()
            first, whole = _timed(decoders[count], given, 1), _timed(decoders[count], given, tokens)
            if turn:
                found["seconds"][name].append(whole[0] - first[0])  # without reading the prompts
            found["texts"][name] = whole[1]
    return found


def _timed(decoder: PipelineDecoder, prompts: list[list[int]], tokens: int) -> tuple[float, list[list[int]]]:
    began = time.perf_counter()
    texts = decoder.generate(prompts, tokens, (), GREEDY)
    return time.perf_counter() - began, texts


def pipeline(console: Console, quick: bool) -> dict[str, Any]:
    """Measure how much faster two microbatches are than one, with the same texts as one process."""
    with tempfile.TemporaryDirectory() as folder:
        ended = run_processes(2, Path(folder), partial(_decode, quick), deadline=900)
    if len(ended.found) < 2:
        raise RuntimeError(f"processes ended with {ended.codes}: {ended.said}")
    model, prompts = _model(quick)
    alone: list[list[int]] = [[] for _ in prompts]
    for one in generate(model, prompts, 4 if quick else TOKENS, (), GREEDY):
        alone[one.sequence].append(one.token)
    for name, texts in ended.found[0]["texts"].items():
        if texts != alone[: len(texts)]:
            raise RuntimeError(f"{name}: the texts of a pipeline differ from those of one process")
    rates = {}
    for name, texts in ended.found[0]["texts"].items():
        seconds = [max(pair) for pair in zip(*(ended.found[rank]["seconds"][name] for rank in (0, 1)), strict=True)]
        rates[name] = [len(texts) * (len(texts[0]) - 1) / own for own in seconds]
    times = {
        name: statistics.median(a / b for a, b in zip(rates[name], rates["one"], strict=True))
        for name in ("two", "two of half")
    }
    console.print(
        f"{len(prompts) // 2} texts a microbatch over two processes of one thread: two microbatches write "
        f"{times['two']:.2f} times as many tokens a second as one ({TARGET} asked); cut in halves, "
        f"{times['two of half']:.2f} times"
    )
    notes = ["without reading prompts; all texts are those of one process"]
    print_notes(console, notes)
    config: LlamaConfig = model.config
    return {
        "evidence": "measured",
        "texts": len(prompts) // 2,
        "new_tokens": TOKENS,
        "layers": config.layers,
        "times": times,
        "target": TARGET,
        "tokens_per_s": {name: statistics.median(own) for name, own in rates.items()},
        "notes": notes,
    }
