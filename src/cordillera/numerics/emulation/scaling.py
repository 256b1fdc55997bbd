"""Scales that bring numbers into the range of a short format: of a whole tensor, of its rows, or of a loss.

A scale is the number to multiply by to get the values back, so that the largest magnitude becomes the format's largest
value. A loss scale is the other way round, as usual: what gradients are multiplied by (Micikevicius et al. 2018,
arXiv 1710.03740, section 3.2).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from cordillera.errors import NumericsError
from cordillera.numerics.formats.formats import Format
from cordillera.numerics.formats.rounding import Rounding, round_to

_LEAST_SCALE = 2.0**-126  # its reciprocal is finite
_LARGEST_LOSS_SCALE = 2.0**32
_LEAST_LOSS_SCALE = 2.0**-32


@torch.no_grad()
def scale_of(x: Tensor, format: Format, dim: int | None = None, *, power_of_two: bool = False) -> Tensor:
    """The scale with which the largest finite magnitude becomes the format's largest value.

    NaN and infinity do not count, so that they spoil what they stand in and nothing else.

    Args:
        x: float32 or float64.
        format: What is scaled for.
        dim: The dimension whose elements share a scale; None for one scale of all.
        power_of_two: Round scales up to powers of two, with which scaling is exact.

    Returns:
        ``x``'s dtype, with the size 1 in ``dim``, or in all dimensions: 1 where all is zero, and at least 2**-126:
        numbers below the format's smallest value times that become zero.
    """
    magnitude = torch.where(x.isfinite(), x.abs(), 0)
    if x.numel() == 0:
        largest = magnitude.sum(tuple(range(x.dim())) if dim is None else dim, keepdim=True)  # zeros of the shape
    else:
        largest = magnitude.amax(tuple(range(x.dim())) if dim is None else dim, keepdim=True)
    scale = largest / format.max
    if power_of_two:
        mantissa, exponent = torch.frexp(scale)
        scale = torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).int())
    return torch.where(largest == 0, 1.0, scale.clamp(min=_LEAST_SCALE))


@torch.no_grad()
def round_scaled(
    x: Tensor,
    scale: Tensor,
    format: Format,
    rounding: Rounding = Rounding.nearest_even,
    *,
    flush_subnormals: bool = False,
    random: Tensor | None = None,
) -> Tensor:
    """``x / scale``, rounded to the format. What is a little too large by the division becomes the largest value.

    Args:
        x: float32 or float64.
        scale: Positive, broadcasts to ``x``.
        format: The format.
        rounding: Which neighbour is taken (:func:`~cordillera.numerics.formats.rounding.round_to`).
        flush_subnormals: Make zeros of subnormal results.
        random: Random bits for stochastic rounding.

    Returns:
        ``x``'s dtype and shape; times ``scale`` they are the values. Infinity is infinity, or NaN in a format without.
    """
    return round_to(x / scale, format, rounding, saturate=True, flush_subnormals=flush_subnormals, random=random)


class LossScale:
    """The factor on gradients that keeps them out of the underflow of a format: halved at an overflow, doubled after
    ``window`` steps without one.

    Args:
        value: To begin with, a power of two.
        window: Steps without an overflow after which it is doubled; None never changes it.

    Attributes:
        value: The factor.
        steady: Steps since it last changed.

    Raises:
        NumericsError: The value is no power of two.
    """

    def __init__(self, value: float = 2.0**16, window: int | None = 2000) -> None:
        if value <= 0 or torch.frexp(torch.tensor(value, dtype=torch.float64))[0] != 0.5:
            raise NumericsError(
                f"must be a power of two, is {value}",
                where="loss_scale",
                remedy="such as 1024, so that scaling rounds nothing",
            )
        self.value, self.window, self.steady = value, window, 0

    def update(self, overflowed: bool) -> None:
        """Take notice of a step.

        Args:
            overflowed: Whether a gradient was not finite, so that no update was made.

        Raises:
            NumericsError: It overflowed and the scale does not change, or is as small as it gets.
        """
        if overflowed:
            if self.window is None or self.value <= _LEAST_LOSS_SCALE:
                raise NumericsError(
                    f"gradients are not finite with a loss scale of {self.value:g}; no update was made from them",
                    where="training.emulate.loss_scale",
                    remedy="use a smaller one, or 'dynamic'; lower the learning rate",
                )
            self.value, self.steady = self.value / 2, 0
            return
        self.steady += 1
        if self.window is not None and self.steady >= self.window:
            self.value, self.steady = min(self.value * 2, _LARGEST_LOSS_SCALE), 0

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers."""
        return {"value": self.value, "steady": self.steady}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Undo :meth:`state_dict`.

        Args:
            state: What it gave.
        """
        self.value, self.steady = float(state["value"]), int(state["steady"])
