"""Scales that bring numbers into the range of a short format: of a whole tensor, of its rows, or of a loss.

A scale is the factor that restores the values, so that the largest magnitude becomes the format's largest value. A loss
scale is the opposite, as usual: the factor by which gradients are multiplied (Micikevicius et al. 2018, arXiv
1710.03740, section 3.2).
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
    """Return the scale with which the largest finite magnitude becomes the format's largest value, in ``x``'s dtype.

    NaN and infinity do not count, so that they affect no other elements. The scale is 1 if all elements are zero, and
    at least 2**-126; numbers below the format's smallest value times the scale become zero.

    Args:
        dim: Dimension whose elements share a scale, of size 1 in the result; None for one scale for all.
        power_of_two: Whether to round scales up to powers of two, with which scaling is exact.
    """
    magnitude = torch.where(x.isfinite(), x.abs(), 0)
    if x.numel() == 0:
        largest = magnitude.sum(tuple(range(x.dim())) if dim is None else dim, keepdim=True)  # zeros
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
    """Return ``x / scale`` rounded to the format; quotients slightly above the largest value become that value.

    Infinity stays infinity, or becomes NaN if the format has none. ``random`` holds the bits for stochastic rounding,
    as in :func:`~cordillera.numerics.formats.rounding.round_to`.
    """
    return round_to(x / scale, format, rounding, saturate=True, flush_subnormals=flush_subnormals, random=random)


class LossScale:
    """Factor on gradients that prevents underflow: halved at an overflow, doubled after ``window`` steps without one.

    Args:
        value: Initial factor, a power of two; anything else is an error.
        window: Number of steps without an overflow after which the factor is doubled; None for a constant factor.
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
        """Update the factor after a step, which ``overflowed`` if a gradient was not finite and the update was skipped.

        An overflow is an error if the factor is constant or at its minimum.
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
        """Return the state as plain numbers."""
        return {"value": self.value, "steady": self.steady}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of :meth:`state_dict`."""
        self.value, self.steady = float(state["value"]), int(state["steady"])
