"""Rotary positions: the angles by which pairs of a head's numbers turn, and their scalings for longer contexts.

Sources: Su et al. 2021 (RoFormer), section 3.2; Chen et al. 2023 (position interpolation) for ``linear``; Peng et al.
2023 (YaRN), sections 3.2 to 3.4; Ding et al. 2024 (LongRoPE), section 3, for ``longrope``; the reference code of Llama
3.1 for ``llama3``.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal, Protocol, TypeAlias

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

Divisor: TypeAlias = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class RopeScaling(BaseModel):
    """Scaling of the rotary frequencies, for contexts longer than those of early training.

    The number of turns of a frequency is counted over ``original_context`` tokens. Slow frequencies are divided by
    ``factor``, fast ones are kept, and those between are blended.

    Attributes:
        rope_type: Kind of scaling: ``llama3`` (Llama 3.1 and later) blends by the number of turns; ``yarn`` by the
            number of a frequency, and enlarges cosines and sines; ``linear`` divides all frequencies; ``longrope``
            (Phi-3.5, Phi-4-mini) divides each by a factor of its own, and enlarges cosines and sines.
        factor: Divisor of the slow frequencies; of ``longrope``, the longest context in units of the original one.
        low_freq_factor: Number of turns below which a frequency of ``llama3`` is slow.
        high_freq_factor: Number of turns above which a frequency of ``llama3`` is kept.
        beta_slow: Number of turns below which a frequency of ``yarn`` is slow.
        beta_fast: Number of turns above which a frequency of ``yarn`` is kept.
        short_factor: Divisors of the frequencies of ``longrope`` in models whose context is the original one.
        long_factor: Divisors of the frequencies of ``longrope`` in models with a longer context.
        attention_factor: Factor of cosines and sines; None for ``0.1 log(factor) + 1`` of ``yarn``, and
            ``sqrt(1 + log(factor) / log(original_context))`` of ``longrope``.
        original_context: Length of a sequence in early training, in tokens; not used by ``linear``.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    rope_type: Literal["llama3", "yarn", "linear", "longrope"] = "llama3"
    factor: float = Field(8.0, ge=1, allow_inf_nan=False)
    low_freq_factor: float = Field(1.0, gt=0, allow_inf_nan=False)
    high_freq_factor: float = Field(4.0, gt=0, allow_inf_nan=False)
    beta_slow: float = Field(1.0, gt=0, allow_inf_nan=False)
    beta_fast: float = Field(32.0, gt=0, allow_inf_nan=False)
    short_factor: tuple[Divisor, ...] = ()
    long_factor: tuple[Divisor, ...] = ()
    attention_factor: float | None = Field(None, gt=0, allow_inf_nan=False)
    original_context: Annotated[int, Field(ge=1, le=2**30)] = 8192

    @model_validator(mode="after")
    def _ordered(self) -> RopeScaling:
        for low, high in (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast")):
            if getattr(self, low) >= getattr(self, high):
                raise ValueError(f"{low} {getattr(self, low):g} must be below {high} {getattr(self, high):g}")
        if len(self.short_factor) != len(self.long_factor):
            raise ValueError(f"{len(self.short_factor)} of short_factor, and {len(self.long_factor)} of long_factor")
        if (self.rope_type == "longrope") != bool(self.short_factor):
            raise ValueError("short_factor and long_factor belong to longrope, which needs them")
        return self

    @property
    def amplitude(self) -> float:
        """Factor of cosines and sines."""
        if self.rope_type == "yarn":
            return self.attention_factor or yarn_amplitude(self.factor)
        if self.rope_type == "longrope":
            usual = math.sqrt(1 + math.log(self.factor) / math.log(max(2, self.original_context)))
            return self.attention_factor or usual
        return 1.0


def yarn_amplitude(factor: float) -> float:
    """Return YaRN's usual factor of cosines and sines for frequencies that are divided by ``factor``, at least 1."""
    return 0.1 * math.log(factor) + 1.0


class Rotary(Protocol):
    """What a model's configuration says about rotary positions."""

    @property
    def context(self) -> int:
        """Longest sequence that the model was made for, in tokens."""

    @property
    def rotary_width(self) -> int:
        """How many numbers ``R`` of a head turn, its first ones."""

    @property
    def rope_theta(self) -> float:
        """Base of the frequencies."""

    @property
    def rope_scaling(self) -> RopeScaling | None:
        """Their scaling; None for none."""


def rope_frequencies(config: Rotary, device: torch.device | str | None = None) -> Tensor:
    """Return the angles in radians, ``float32 [R / 2]``, by which pairs of a head's numbers turn in one position.

    ``config`` holds their base and scaling; ``device`` is that of the result.
    """
    width = config.rotary_width
    exponents = torch.arange(0, width, 2, dtype=torch.int64, device=device).float() / width
    scaling = config.rope_scaling
    if scaling is not None and scaling.rope_type == "longrope":
        divisors = scaling.long_factor if config.context > scaling.original_context else scaling.short_factor
        return 1.0 / (torch.tensor(divisors, device=device) * config.rope_theta**exponents)
    frequencies = 1.0 / config.rope_theta**exponents
    if scaling is None:
        return frequencies
    if scaling.rope_type == "linear":
        return frequencies / scaling.factor
    if scaling.rope_type == "yarn":
        kept = _kept_by_yarn(scaling, width, config.rope_theta).to(frequencies.device)
        return frequencies / scaling.factor * (1 - kept) + frequencies * kept
    wavelengths = 2 * math.pi / frequencies  # tokens of one turn
    turns = scaling.original_context / wavelengths
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blended = (1 - blend) * frequencies / scaling.factor + blend * frequencies
    slowed = torch.where(turns < scaling.low_freq_factor, frequencies / scaling.factor, blended)
    return torch.where(turns > scaling.high_freq_factor, frequencies, slowed)


def _kept_by_yarn(scaling: RopeScaling, width: int, theta: float) -> Tensor:
    """Return how much of each frequency YaRN keeps, from 0 to 1: a ramp between two whole numbers of frequencies."""

    def number(turns: float) -> float:
        """The number of the frequency that turns so often."""
        return width * math.log(scaling.original_context / (2 * math.pi * turns)) / (2 * math.log(theta))

    first, last = max(math.floor(number(scaling.beta_fast)), 0), min(math.ceil(number(scaling.beta_slow)), width - 1)
    span = last - first or 0.001  # a step where both are the same
    return 1 - ((torch.arange(width // 2).float() - first) / span).clamp(0, 1)


def rope_table(config: Rotary, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosines and sines ``float32 [T, R / 2]`` of the angles at ``positions``, ``int64 [T]``, by ``config``."""
    angles = positions.float()[:, None] * rope_frequencies(config, positions.device)
    factor = 1.0 if config.rope_scaling is None else config.rope_scaling.amplitude
    if factor == 1.0:
        return angles.cos(), angles.sin()
    return factor * angles.cos(), factor * angles.sin()


def rotate(x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate queries or keys ``x``, ``[T, heads, D]``, to their positions by a ``table`` of :func:`rope_table`.

    Number ``j`` of a head is paired with number ``j + R / 2``; those from ``R`` on stay. So does the dtype.
    """
    cos, sin = (part[:, None] for part in table)  # [T, 1, R / 2]; stays in 32 bits beside 16-bit heads
    half = cos.shape[-1]
    first, second = x[..., :half], x[..., half : 2 * half]
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
    return turned if 2 * half == x.shape[-1] else torch.cat([turned, x[..., 2 * half :]], dim=-1)
