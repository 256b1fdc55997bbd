"""Answers that a model gives while it is trained, with their log-probabilities."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import torch

from cordillera.data.tokenizers.tokenizer import Tokenizer
from cordillera.distributed.dtensors import local
from cordillera.models.language.adapters import merge_adapters
from cordillera.models.language.llama import Llama
from cordillera.models.language.stages import LlamaStage
from cordillera.serving.language.engine import TOGETHER, Engine
from cordillera.serving.language.sampler import Sampling


class SampledAnswer(NamedTuple):
    """Answer to a prompt.

    Attributes:
        tokens: Its tokens, including the one that ended it.
        log_probabilities: Log-probability of each token under the model, before any temperature.
        text: Its text, without special tokens.
        is_whole: Whether the model ended it.
    """

    tokens: list[int]
    log_probabilities: list[float]
    text: str
    is_whole: bool


def seed_of(*parts: int) -> int:
    """Return a seed of sampling that depends on all numbers."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:7], "big")


def copy_of(stage: LlamaStage) -> Llama:
    """Return a model with the present weights of a whole model's stage, adapters merged, in the stage's dtype."""
    with torch.device("meta"):
        model = Llama(stage.config)
    weights = {name: local(parameter).detach().clone() for name, parameter in stage.named_parameters()}
    model.load_state_dict(weights, assign=True)
    merge_adapters(model)
    return model.eval()


def sample_answers(
    model: Llama, tokenizer: Tokenizer, prompts: Sequence[Sequence[int]], most: int, samplings: Sequence[Sampling]
) -> list[SampledAnswer]:
    """Answer prompts, up to 16 at a time; an answer depends on its prompt and its sampling alone.

    Args:
        prompts: Token ids of each prompt.
        most: Largest number of tokens of an answer.
        samplings: Settings of each answer.

    Raises:
        DataError: If a prompt does not fit the context, or logits are not finite.
    """
    if not prompts:
        return []
    capacity = max(map(len, prompts)) + most
    engine = Engine(model, texts=min(len(prompts), TOGETHER), capacity=capacity, vocabulary=tokenizer.vocab_size)
    for prompt, sampling in zip(prompts, samplings, strict=True):
        engine.add(prompt, most, tokenizer.stop_ids, sampling, logprobs=1)
    tokens: list[list[int]] = [[] for _ in prompts]
    chances: list[list[float]] = [[] for _ in prompts]
    while engine.waiting or engine.running:
        for one in engine.step():
            if one.error is not None:
                raise one.error
            assert one.chance is not None
            tokens[one.sequence].append(one.token)
            chances[one.sequence].append(one.chance.logprob)
    return [
        SampledAnswer(own, chance, tokenizer.decode(own, skip_special=True), own[-1] in tokenizer.stop_ids)
        for own, chance in zip(tokens, chances, strict=True)
    ]
