"""Token-by-token generation for a batch of prompts of unequal length; each token is computed once."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Literal, NamedTuple

import torch
from torch import nn

from cordillera.errors import DataError
from cordillera.jagged import offsets_from_lengths
from cordillera.kernels.dense.few_rows import FewRowsLinear, few_rows_linear
from cordillera.models.language.kv_cache import KVCache
from cordillera.models.language.llama import Llama, LlamaConfig
from cordillera.serving.language.sampler import Sampling, sample


class Generated(NamedTuple):
    """One new token.

    Attributes:
        sequence: Number of the prompt that the token continues.
        token: Id of the token.
        finish: Reason why the sequence ends here: ``stop`` (a stop token) or ``length``; None while it continues.
    """

    sequence: int
    token: int
    finish: Literal["stop", "length"] | None


def generate(
    model: Llama,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    stop: Collection[int] = (),
    sampling: Sampling | None = None,
    tokens: int | None = None,
) -> Iterator[Generated]:
    """Continue prompts, all together, until a stop token, ``max_new_tokens`` or the end of the context.

    The result of a sequence does not depend on the other sequences (up to the last bits of products of other shapes).

    Args:
        prompts: Token ids, one list per prompt.
        max_new_tokens: Largest number of new tokens of each prompt.
        stop: Ids of tokens that end a sequence, such as end of text and end of turn.
        sampling: Settings of sampling; None for the defaults of :class:`~cordillera.serving.language.sampler.Sampling`.
        tokens: Number of drawable ids, which are 0 to ``tokens - 1``, for vocabularies larger than their tokenizer.
            None for all.

    Returns:
        Tokens as they are generated: in each step one for every unfinished sequence, in the order of prompts. Errors of
        the prompts are raised at the call, before the first token is requested.

    Raises:
        DataError: If a prompt is empty, as long as the context or longer, or holds an id that is not a token;
            ``max_new_tokens`` is below 1; or, during generation, the model's logits are not finite.
    """
    check_prompts(model.config, prompts, max_new_tokens)
    return _generate(model, prompts, max_new_tokens, frozenset(stop), sampling or Sampling(), tokens)


def for_decoding(model: Llama) -> Llama:
    """Replace the linear layers of a model by ones that are fast on few rows, in place, and return the model.

    Weights stay where they are. A tied head becomes a layer over the embedding's weights. Only bfloat16 models on a CPU
    are changed.
    """
    weight = model.embedding.weight
    if weight.dtype != torch.bfloat16 or weight.device.type != "cpu":
        return model
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is nn.Linear:
                setattr(module, name, FewRowsLinear(child.weight))
    if model.head is None:
        model.head = FewRowsLinear(weight)
    few_rows_linear(weight.new_zeros(1, 1), weight.new_zeros(1, 1))  # compile now, not at the first token
    return model


def check_prompts(config: LlamaConfig, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
    """Check that :func:`generate` can continue ``prompts`` by ``max_new_tokens`` with a model of ``config``.

    Raises:
        DataError: If a prompt is empty, too long or holds an id that is not a token, or ``max_new_tokens`` is below 1.
    """
    if max_new_tokens < 1:
        raise DataError(f"{max_new_tokens} is not a number of tokens", where="max_new_tokens", remedy="ask for some")
    for number, prompt in enumerate(prompts):
        where = f"prompt {number}"
        if not prompt:
            raise DataError("holds no token", where=where, remedy="begin it with the begin-of-text token")
        if len(prompt) >= config.context:
            raise DataError(
                f"has {len(prompt)} tokens; with at least one more it does not fit the context of {config.context}",
                where=where,
                remedy="shorten it, or use a model with a longer context",
            )
        for place, token in enumerate(prompt):
            if not 0 <= token < config.vocabulary:
                raise DataError(
                    f"token {place} is {token}, not an id from 0 to {config.vocabulary - 1}",
                    where=where,
                    remedy="use the tokenizer that belongs to the model",
                )


def _generate(
    model: Llama,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    stop: frozenset[int],
    sampling: Sampling,
    tokens: int | None,
) -> Iterator[Generated]:
    if not prompts:
        return
    weight = model.embedding.weight
    limits = [min(max_new_tokens, model.config.context - len(prompt)) for prompt in prompts]
    # The last token of a sequence is never read and needs no room.
    capacity = max(len(prompt) + limit for prompt, limit in zip(prompts, limits, strict=True)) - 1
    cache = KVCache(model.config, len(prompts), capacity, weight.dtype, weight.device)
    generators = [torch.Generator(weight.device).manual_seed(sampling.seed + i) for i in range(len(prompts))]
    rows = [list(prompt) for prompt in prompts]  # tokens not yet read; empty once a sequence has ended
    counts = [0] * len(prompts)
    while any(rows):
        for sequence, token in _step(model, cache, rows, generators, sampling, tokens):
            counts[sequence] += 1
            finish: Literal["stop", "length"] | None = "length" if counts[sequence] == limits[sequence] else None
            if token in stop:
                finish = "stop"
            rows[sequence] = [] if finish else [token]
            yield Generated(sequence, token, finish)


@torch.inference_mode()
def _step(
    model: Llama,
    cache: KVCache,
    rows: list[list[int]],
    generators: list[torch.Generator],
    sampling: Sampling,
    count: int | None,
) -> list[tuple[int, int]]:
    """Return the next token of each unfinished sequence, after the model has read the tokens in ``rows``."""
    device = model.embedding.weight.device
    going = [sequence for sequence, row in enumerate(rows) if row]
    tokens = torch.tensor([token for row in rows for token in row], device=device)
    offsets = offsets_from_lengths(torch.tensor([len(row) for row in rows]))
    hidden = model.hidden(tokens, offsets, cache=cache)
    logits = model.logits(
        hidden[(offsets[1:] - 1)[going].to(device)]
    )  # logits of the last token of each sequence: [going, vocabulary]
    logits = logits[:, :count]
    if sampling.temperature == 0:
        drawn = sample(logits, sampling)
    else:
        drawn = torch.cat([sample(logits[i : i + 1], sampling, generators[s]) for i, s in enumerate(going)])
    return list(zip(going, drawn.tolist(), strict=True))
