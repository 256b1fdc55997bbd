"""Generation over two processes with one microbatch and with two, for the part ``pipeline``."""

from __future__ import annotations

import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _processes import run_processes
from _tables import print_notes
from rich.console import Console

from cordillera.models.language.llama import PRESETS, Llama, LlamaConfig
from cordillera.serving.language.generation import for_decoding, generate
from cordillera.serving.language.language_model import LanguageModel
from cordillera.serving.language.pipeline_decoding import PipelineDecoder
from cordillera.serving.language.sampler import Sampling

TEXTS, TOKENS, ROUNDS, TARGET = 8, 48, 5, 1.6
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
    found: dict[str, Any] = {"seconds": {1: [], 2: []}}
    decoders = {count: PipelineDecoder(model, count) for count in (1, 2)}
    tokens, rounds = (4, 2) if quick else (TOKENS, ROUNDS)
    for turn in range(rounds + 1):
        for count in (1, 2) if turn % 2 else (2, 1):
            dist.barrier()
            first, whole = _timed(decoders[count], prompts, 1), _timed(decoders[count], prompts, tokens)
            if turn:
                found["seconds"][count].append(whole[0] - first[0])  # without reading the prompts
            found.setdefault("texts", whole[1])
            if whole[1] != found["texts"]:
                raise RuntimeError(f"{count} microbatches change a text")
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
    if alone != ended.found[0]["texts"]:
        raise RuntimeError("the texts of a pipeline differ from those of one process")
    seconds = {}
    for count in (1, 2):
        of_ranks = [ended.found[rank]["seconds"][count] for rank in (0, 1)]
        seconds[count] = [max(pair) for pair in zip(*of_ranks, strict=True)]
    ratios = [one / two for one, two in zip(seconds[1], seconds[2], strict=True)]
    ratio = statistics.median(ratios)
    count = sum(map(len, alone)) - len(alone)
    rates = {name: count / statistics.median(own) for name, own in seconds.items()}
    console.print(
        f"{len(prompts)} texts over two processes of one thread: {rates[2]:.1f} tokens/s with two microbatches beside "
        f"{rates[1]:.1f} with one: {ratio:.2f} ({TARGET} asked)"
    )
    notes = ["without reading prompts; texts are the same with one and two microbatches and in one process"]
    print_notes(console, notes)
    config: LlamaConfig = model.config
    return {
        "evidence": "measured",
        "texts": len(prompts),
        "new_tokens": TOKENS,
        "layers": config.layers,
        "times": ratio,
        "ratios": ratios,
        "target": TARGET,
        "tokens_per_s": {"one": rates[1], "two": rates[2]},
        "threads": torch.get_num_threads(),
        "notes": notes,
    }
