"""Texts that the ranks of a pipeline write together are those of one process; a rank that dies ends the others.

The processes are started once for all cases and write what they found to files; the tests read those.
"""

from __future__ import annotations

import os
import signal
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from cordillera.errors import DataError, PeerError, PlanError
from cordillera.models.language.llama import Llama, LlamaConfig
from cordillera.serving.language.generation import for_decoding, generate
from cordillera.serving.language.pipeline_decoding import PipelineDecoder
from cordillera.serving.language.sampler import Sampling
from tests.distributed.processes import needs_gloo, run_processes

SHAPE = LlamaConfig(layers=3, hidden=64, heads=2, kv_heads=1, ffn=96, vocabulary=29, context=300)
SAMPLINGS = {
    "greedy": Sampling(temperature=0),
    "drawn": Sampling(temperature=1.5, seed=7),
    "biased": Sampling(temperature=0, logit_bias={5: 40}, repetition_penalty=3, presence_penalty=1),
}
# Of processes and microbatches; ways to sample meet them in the order of draws alone, which uneven ones show.
DIVISIONS = {
    "greedy": ((1, 2), (2, 1), (2, 3), (3, 2), (3, 3)),
    "drawn": ((2, 3), (3, 2)),
    "biased": ((2, 3), (3, 2)),
}
# One prompt is longer than a part, one text ends at the context, and one microbatch has fewer texts than the others.
PROMPTS = [[n % 29 for n in range(length)] for length in (3, 280, 17, 1, 296)]
STOP, TOKENS = (11,), 8
CASES = (("greedy", "float64"), ("drawn", "float64"), ("biased", "bfloat16"))


def model_of(kind: str) -> Llama:
    model = Llama(SHAPE)
    model.init_weights(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(12)
    return model.double() if kind == "float64" else for_decoding(model.bfloat16())


def run_all(rank: int, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    groups = {size: dist.new_group(list(range(size))) for size in (1, 2, 3)}
    for name, kind in CASES:
        model = model_of(kind)
        for size, count in DIVISIONS[name]:
            if rank < size:
                texts = PipelineDecoder(model, count, groups[size]).generate(PROMPTS, TOKENS, STOP, SAMPLINGS[name])
                found[f"{name} {size} {count}"] = texts
    decoder = PipelineDecoder(model, 2, groups[3])
    found["none"] = decoder.generate([], TOKENS)
    with pytest.raises(DataError, match="prompt 2: holds no token"):
        decoder.generate([[1], []], TOKENS)
    with pytest.raises(PlanError, match="3 ranks for 2 layers"):
        PipelineDecoder(Llama(SHAPE.model_copy(update={"layers": 2})), 2, groups[3])
    dist.barrier()
    torch.save(found, f"{folder}/{rank}.pt")
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    try:
        PipelineDecoder(model, 2, groups[3], timeout=20).generate(PROMPTS, TOKENS)
    except PeerError as error:
        found["lost"] = (error.peer, time.monotonic() - began)
    return found


@cache
def _found() -> dict[int, dict[str, Any]]:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        return run_processes(3, Path(folder), run_all, deadline=240).found


def _alone(kind: str, name: str) -> list[list[int]]:
    texts: list[list[int]] = [[] for _ in PROMPTS]
    for one in generate(model_of(kind), PROMPTS, TOKENS, STOP, SAMPLINGS[name]):
        texts[one.sequence].append(one.token)
    return texts


@needs_gloo
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_texts_are_those_of_one_process(name: str, kind: str) -> None:
    expected = _alone(kind, name)
    assert len({len(text) for text in expected}) > 1  # they end with a stop, at the limit, or at the context
    for size, count in DIVISIONS[name]:
        for rank in range(size):
            assert _found()[rank][f"{name} {size} {count}"] == expected, (size, count, rank)


@needs_gloo
def test_no_prompt_gives_no_text() -> None:
    assert _found()[0]["none"] == []


@needs_gloo
def test_a_rank_that_dies_ends_the_others_in_time() -> None:
    for rank in (0, 2):
        peer, seconds = _found()[rank]["lost"]
        assert peer in (1, 2, None)
        assert seconds < 40


def test_without_a_process_group_there_is_no_pipeline() -> None:
    with pytest.raises(PlanError, match="there is no process group"):
        PipelineDecoder(Llama(SHAPE))
