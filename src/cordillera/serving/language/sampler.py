"""Sampling of the next token from logits."""

from __future__ import annotations

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
        seed: Seed; sequence ``i`` of a batch draws with ``seed + i``, independently of the other sequences.
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


def sample(logits: Tensor, sampling: Sampling, generator: torch.Generator | None = None) -> Tensor:
    """Draw a token, ``int64 [B]``, for each row of ``logits [B, vocabulary]``, as in :func:`probabilities`.

    The ``generator`` is on the device of the logits, and not used when ``sampling`` is greedy.

    Raises:
        DataError: If logits are NaN or ``inf``, or all tokens of a row are forbidden.
    """
    chances = probabilities(logits, sampling)
    if sampling.temperature == 0:
        return chances.argmax(-1)
    return torch.multinomial(chances, 1, generator=generator).squeeze(-1)
