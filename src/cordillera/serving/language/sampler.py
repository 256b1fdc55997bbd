"""Sampling of the next token from logits, with random numbers that depend on the seed and the token's position only."""

from __future__ import annotations

import zlib

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from cordillera.errors import DataError
from cordillera.toml_files import explain


class Sampling(BaseModel):
    """Settings of sampling; the defaults are those of the Llama 3 reference code.

    Attributes:
        temperature: Divisor of the logits; 0 takes the most likely token (greedy).
        top_p: Total probability of the most likely tokens from which the token is drawn (Holtzman et al. 2020).
        seed: Seed; sequence ``i`` of a batch draws with ``seed + i``, independently of the other sequences. Random
            numbers depend on the seed and on the position of a token alone.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    temperature: float = Field(0.6, ge=0, allow_inf_nan=False)
    top_p: float = Field(0.9, gt=0, le=1)
    seed: int = Field(0, ge=0, lt=2**62)


def make_sampling(temperature: float, top_p: float, seed: int) -> Sampling:
    """Return a :class:`Sampling` from a user's ``temperature``, ``top_p`` and ``seed``.

    Raises:
        DataError: If a value is out of range.
    """
    try:
        return Sampling(temperature=temperature, top_p=top_p, seed=seed)
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
    top = logits.amax(-1, keepdim=True)  # NaN is passed on
    if not bool(top.isfinite().all()):
        raise DataError(
            "the model's logits are NaN or infinite",
            where="sampling",
            remedy="run the model in bfloat16 or float32; if that fails too, its weights are damaged",
        )
    if sampling.temperature == 0:
        return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    chances = torch.softmax((logits - top) / sampling.temperature, -1)
    if sampling.top_p == 1:
        return chances
    ordered, order = chances.sort(stable=True, dim=-1, descending=True)
    before = ordered.cumsum(-1) - ordered  # probability of all more likely tokens
    ordered = ordered.masked_fill(before >= sampling.top_p, 0.0)
    kept = torch.zeros_like(chances).scatter_(-1, order, ordered)
    return kept / kept.sum(-1, keepdim=True)


def draw_noise(seed: int, position: int, count: int, device: torch.device | str = "cpu") -> Tensor:
    """Return the random numbers that decide on the token at ``position``, exponential ``float32 [count]``.

    They depend on ``seed``, ``position`` and the kind of ``device`` alone, so that a text is the same in whatever
    steps and beside whichever texts it is written.
    """
    generator = torch.Generator(device).manual_seed(zlib.crc32(f"{seed} {position}".encode()))  # generators use 32 bits
    noise = torch.empty(count, device=device).exponential_(generator=generator)
    return noise.clamp_(min=torch.finfo(torch.float32).tiny)


def sample(logits: Tensor, sampling: Sampling, noise: Tensor | None = None) -> Tensor:
    """Draw a token, ``int64 [B]``, for each row of ``logits [B, vocabulary]``, as in :func:`probabilities`.

    Args:
        noise: Random numbers of :func:`draw_noise`, ``[B, vocabulary]``: the token with the largest ratio of
            probability to noise is drawn. None takes the most likely token, as greedy sampling does.

    Raises:
        DataError: If logits are NaN or ``inf``, or all tokens of a row are forbidden.
    """
    chances = probabilities(logits, sampling)
    return (chances if noise is None else chances / noise).argmax(-1)
