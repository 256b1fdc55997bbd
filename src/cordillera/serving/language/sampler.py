"""Sampling of the next token from logits, with random numbers that depend on the seed and the token's position only."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from cordillera.errors import DataError
from cordillera.mistakes import explain


class Sampling(BaseModel):
    """Settings of sampling; the defaults are those of the Llama 3 reference code.

    Attributes:
        temperature: Divisor of the logits; 0 takes the most likely token (greedy).
        top_p: Total probability of the most likely tokens from which the token is drawn (Holtzman et al. 2020).
        top_k: Number of the most likely tokens from which the token is drawn; 0 for all.
        min_p: Least probability of a token, as a share of that of the most likely one.
        presence_penalty: Number that is subtracted from the logits of tokens that the text holds after its prompt.
        frequency_penalty: Number that is subtracted from them for each time that the text holds them.
        repetition_penalty: Number by which the logits of tokens are divided that the prompt or the text holds, or
            multiplied where they are negative (Keskar et al. 2019); 1 for none.
        logit_bias: Numbers that are added to the logits of tokens, by id.
        seed: Seed; sequence ``i`` of a batch draws with ``seed + i``, independently of the other sequences. Random
            numbers depend on the seed and on the position of a token alone.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    temperature: float = Field(0.6, ge=0, allow_inf_nan=False)
    top_p: float = Field(0.9, gt=0, le=1)
    top_k: int = Field(0, ge=0)
    min_p: float = Field(0.0, ge=0, le=1)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float = Field(1.0, gt=0, le=100)
    logit_bias: Mapping[Annotated[int, Field(ge=0)], Annotated[float, Field(ge=-100, le=100)]] = Field(
        default_factory=dict
    )
    seed: int = Field(0, ge=0, lt=2**62)


def make_sampling(**settings: object) -> Sampling:
    """Return a :class:`Sampling` of a user's ``settings``, by the names of its attributes.

    Raises:
        DataError: If a value is out of range.
    """
    try:
        return Sampling.model_validate(settings)
    except ValidationError as error:
        where, what = explain(error.errors(), lambda path: ())[0]
        raise DataError(what, where=where) from error


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """Return the probabilities ``float32 [..., vocabulary]``, summing to 1, with which ``sampling`` draws tokens.

    A ``-inf`` in ``logits [..., vocabulary]`` forbids a token. Greedy sampling gives all probability to the most likely
    token, the first of equal ones.

    Raises:
        DataError: If logits are NaN or ``inf``, or all tokens of a row are forbidden.
    """
    logits = logits.float()
    top, first = _most_likely(logits)
    if sampling.temperature == 0:
        return torch.zeros_like(logits).scatter_(-1, first, 1.0)
    temperature = max(sampling.temperature, torch.finfo(torch.float32).tiny)  # smaller ones would be 0 here
    chances = torch.softmax((logits - top) / temperature, -1)
    if sampling.top_p == 1 and not sampling.top_k and not sampling.min_p:
        return chances
    ordered, order = _likeliest(chances, sampling)
    ordered = ordered.masked_fill(_left_out(ordered, sampling), 0.0)
    kept = torch.zeros_like(chances).scatter_(-1, order, ordered)
    return kept / kept.sum(-1, keepdim=True)


def _most_likely(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest logits ``[..., 1]`` and their tokens, the first of equal ones.

    Raises:
        DataError: If logits are NaN or ``inf``, or all tokens of a row are forbidden.
    """
    top, first = logits.max(-1, keepdim=True)  # NaN is passed on
    if not bool(top.isfinite().all()):
        raise DataError(
            "the model's logits are NaN or infinite",
            where="sampling",
            remedy="run the model in bfloat16 or float32; if that fails too, its weights are damaged",
        )
    return top, first


_AT_FIRST = 256  # top tokens that are sorted first, as they usually suffice


def _likeliest(chances: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Return probabilities from the largest down and their tokens, at least all that can be drawn.

    Of equal ones the first comes first.
    """
    if chances.shape[-1] > 2 * _AT_FIRST:
        order = chances.topk(_AT_FIRST, -1).indices.sort(-1).values
        ordered, places = chances.gather(-1, order).sort(stable=True, dim=-1, descending=True)
        # all that can be drawn is there, and all that equals the least of it
        last = ordered.masked_fill(_left_out(ordered, sampling), 1.0).amin(-1)
        if bool((last > ordered[..., -1]).all()):
            return ordered, order.gather(-1, places)
    return chances.sort(stable=True, dim=-1, descending=True)


def _left_out(ordered: Tensor, sampling: Sampling) -> Tensor:
    """Return which of the largest probabilities, from the largest down, are not drawn from, ``bool``."""
    before = ordered.cumsum(-1) - ordered  # probability of all more likely tokens
    left_out = (before >= sampling.top_p) | (ordered < sampling.min_p * ordered[..., :1])
    if sampling.top_k:
        left_out[..., sampling.top_k :] = True
    left_out[..., 0] = False  # keep one token even if top_p rounds to 0
    return left_out


def penalized_rows(
    logits: Tensor, sampling: Sampling, texts: Sequence[Sequence[int]], prompts: Sequence[Sequence[int]]
) -> Tensor:
    """Apply :func:`penalized` to rows of different texts, each with the tokens of its own prompt.

    Args:
        logits: Logits ``[n, vocabulary]``.
        sampling: Settings, of which the bias and the penalties count.
        texts: Tokens that were generated before each row.
        prompts: Tokens of the prompt of each row.

    Raises:
        DataError: If the bias names an id that is not a token.
    """
    each = zip(logits.split(1), texts, prompts, strict=True)
    return torch.cat([penalized(row, sampling, [text], prompt) for row, text, prompt in each])


def penalized(logits: Tensor, sampling: Sampling, texts: Sequence[Sequence[int]], prompt: Sequence[int] = ()) -> Tensor:
    """Return logits ``[n, vocabulary]`` with the bias and the penalties of ``sampling``.

    Args:
        texts: Tokens that were generated before each row.
        prompt: Tokens of the prompt, for the penalty of repetitions.

    Raises:
        DataError: If the bias names an id that is not a token.
    """
    repeats = sampling.repetition_penalty != 1
    if not (sampling.logit_bias or sampling.presence_penalty or sampling.frequency_penalty or repeats):
        return logits
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)  # keeps the original
    if repeats:
        for row, text in zip(logits, texts, strict=True):
            seen = [one for one in {*prompt, *text} if one < len(row)]
            found = row[seen]
            row[seen] = torch.where(found > 0, found / sampling.repetition_penalty, found * sampling.repetition_penalty)
    if sampling.logit_bias:
        ids = list(sampling.logit_bias)
        if max(ids) >= logits.shape[1]:
            raise DataError(f"{max(ids)} is not an id from 0 to {logits.shape[1] - 1}", where="logit_bias")
        logits[:, ids] += logits.new_tensor(list(sampling.logit_bias.values()))
    if sampling.presence_penalty or sampling.frequency_penalty:
        for row, text in zip(logits, texts, strict=True):
            counts = Counter(text)
            found = row.new_tensor(list(counts.values()))
            row[list(counts)] -= sampling.presence_penalty + sampling.frequency_penalty * found
    return logits


class TokenChance(NamedTuple):
    """How likely the model held a token to be, before temperature, penalties and forms.

    Attributes:
        logprob: Natural logarithm of the probability.
        top: Ids of the most likely tokens, with theirs.
    """

    logprob: float
    top: list[tuple[int, float]]


def token_chances(logits: Tensor, tokens: Sequence[int], most: int) -> list[TokenChance]:
    """Return how likely ``tokens`` were by rows of ``logits [n, vocabulary]``, and the ``most`` likely ones there."""
    found = torch.log_softmax(logits if logits.dtype == torch.float64 else logits.float(), -1)
    values, ids = found.topk(min(most, found.shape[1]), -1)
    return [
        TokenChance(float(row[token]), list(zip(own_ids, own_values, strict=True)))
        for row, token, own_ids, own_values in zip(found, tokens, ids.tolist(), values.tolist(), strict=True)
    ]


def draw_noise(seed: int, position: int, count: int, device: torch.device | str = "cpu") -> Tensor:
    """Return the random numbers that decide on the token at ``position``, exponential ``float32 [count]``.

    They depend on ``seed``, ``position`` and the kind of ``device`` alone, so that a text is the same in whatever
    steps and beside whichever texts it is written. As they are made of numbers of 24 bits, a token is drawn with its
    probability up to about 1e-7.
    """
    generator = torch.Generator(device).manual_seed(zlib.crc32(f"{seed} {position}".encode()))  # generators use 32 bits
    uniform = torch.empty(count, device=device).uniform_(generator=generator).clamp_(min=2**-25)
    return uniform.log_().neg_().clamp_(min=2**-25)  # several times as fast as exponential_


def sample(logits: Tensor, sampling: Sampling, noise: Tensor | None = None) -> Tensor:
    """Draw a token, ``int64 [B]``, for each row of ``logits [B, vocabulary]``, as in :func:`probabilities`.

    Args:
        noise: Random numbers of :func:`draw_noise`, ``[B, vocabulary]``: the token with the largest ratio of
            probability to noise is drawn. None takes the most likely token, as greedy sampling does.

    Raises:
        DataError: If logits are NaN or ``inf``, or all tokens of a row are forbidden.
    """
    if noise is None or sampling.temperature == 0:
        return _most_likely(logits.float())[1].squeeze(-1)
    return (probabilities(logits, sampling) / noise).argmax(-1)
