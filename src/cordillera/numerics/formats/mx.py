"""Blocks of numbers that share a power-of-two scale (OCP Microscaling Formats 1.0; Rouhani et al. 2023).

A value is ``element * scale``; the scale of a block is an ``e8m0`` number, so scaling is exact.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cordillera.errors import NumericsError
from cordillera.numerics.formats.formats import Format
from cordillera.numerics.formats.rounding import Rounding, round_to

BLOCK = 32
"""Number of elements that share a scale."""


@torch.no_grad()
def block_scales(x: Tensor, format: Format) -> Tensor:
    """Return the scale of every block of 32 consecutive elements of the last dimension.

    Args:
        x: float32 or float64 ``[..., n]``; the last block may be shorter.
        format: Format of the elements.

    Returns:
        Scales in ``x``'s dtype, ``[..., ceil(n / 32)]``, from 2**-127 to 2**127: ``2**(floor(log2(largest magnitude)) -
        exponent of the format's largest value)``, as in the specification, so that the largest element of a block may
        exceed the format by less than a factor of two. The smallest for a block of zeros, NaN for a block that holds
        NaN or infinity.
    """
    largest = _blocks(x).abs().amax(-1).double()
    exponent = torch.frexp(largest).exponent  # a logarithm would be inexact near powers of two
    exponent = exponent - math.frexp(format.max)[1]
    exponent = exponent.to(torch.int64).masked_fill(largest == 0, -127).clamp(-127, 127)
    scales = ((exponent + 1023) << 52).view(torch.float64)
    return scales.masked_fill(~largest.isfinite(), torch.nan).to(x.dtype)


@torch.no_grad()
def round_to_blocks(
    x: Tensor,
    format: Format,
    rounding: Rounding = Rounding.nearest_even,
    *,
    random: Tensor | None = None,
) -> Tensor:
    """Round float32 or float64 ``[..., n]`` to numbers that blocks can represent, clamped to the largest value.

    A block that holds NaN or infinity becomes NaN. A number near the end of float32's range becomes infinity if the
    nearest value of the format is beyond that range.

    Args:
        random: Random bits in ``x``'s shape for stochastic rounding
            (:func:`~cordillera.numerics.formats.rounding.round_to`).
    """
    scales = block_scales(x, format).double()
    elements = round_to(
        _scaled(x, scales), format, rounding, saturate=True, random=None if random is None else _blocks(random)
    )
    return _joined(elements * scales[..., None], x.shape).to(x.dtype)


def _scaled(x: Tensor, scales: Tensor) -> Tensor:
    return _blocks(x).double() / scales[..., None]


def _blocks(x: Tensor) -> Tensor:
    """Reshape ``[..., n]`` to ``[..., ceil(n / 32), 32]``, padded with zeros."""
    if x.dim() == 0:
        raise NumericsError("blocks lie along the last dimension, and a single number has none", where="x")
    count = -(-x.shape[-1] // BLOCK)
    padded = torch.nn.functional.pad(x, (0, count * BLOCK - x.shape[-1]))
    return padded.view(*x.shape[:-1], count, BLOCK)


def _joined(blocks: Tensor, shape: torch.Size) -> Tensor:
    return blocks.reshape(*shape[:-1], blocks.shape[-2] * BLOCK)[..., : shape[-1]].contiguous()
