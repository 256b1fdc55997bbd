"""Algebra of a linear layer in eight bits: precomputed offsets, exact sums, one requantization.

With activations ``(a - a0) sa`` in uint8 and weights ``(b - b0[j]) sb[j]`` in int8, ``sum_k (a - a0)(b - b0)`` is

    sum_k a[i, k] b[j, k]  -  a0 column_offset[j]  -  row_offset[i] b0[j]

with ``column_offset[j] = sum_k b[j, k] - K b0[j]``, computed when weights are packed, and row offsets ``row_offset[i] =
sum_k a[i, k]``, not needed if all ``b0`` are zero. With this result r the output is ``clamp(round((r + bias / (sa sb))
(sa sb / sc)) + c0)``; ReLU raises the lower limit to ``c0`` (Khudia et al. 2021, FBGEMM; its
``OutputProcessing-inl.h``). This module is the reference, in whole numbers;
:mod:`cordillera.numerics.quantization.engines` has the fast kernels.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from cordillera.errors import NumericsError
from cordillera.numerics.formats.formats import INTEGERS
from cordillera.numerics.quantization.quantizers import (
    AffineParameters,
    Granularity,
    check_finite,
    check_parameters,
    quantize,
)

INT8, UINT8 = INTEGERS["int8"], INTEGERS["uint8"]
_MOST_INNER = (2**31 - 1) // (255 * 128)
"""Largest number of products whose sum fits int32 for all codes; engines sum in int32."""


@dataclass(frozen=True)
class LinearWeight:
    """Weight of a linear layer in eight bits, with everything that does not depend on the input.

    Attributes:
        codes: Codes, ``int8 [N, K]``.
        scale: Scale of each output, ``float32 [N]``.
        zero_point: Zero point of each output, ``int32 [N]``; None for zeros.
        column_offset: ``sum_k codes - K zero_point``, ``int64 [N]``.
        bias: Bias, ``float32 [N]``, or None.
    """

    codes: Tensor
    scale: Tensor
    zero_point: Tensor | None
    column_offset: Tensor
    bias: Tensor | None

    def dequantize(self) -> Tensor:
        """Return the weight that the codes represent, ``float32 [N, K]``."""
        codes = self.codes.float()
        if self.zero_point is not None:
            codes = codes - self.zero_point.float()[:, None]
        return codes * self.scale[:, None]

    def digest(self) -> bytes:
        """Return the SHA-256 of everything that results depend on."""
        content = hashlib.sha256()
        for part in (self.codes, self.scale, self.zero_point, self.bias):
            content.update(b"none" if part is None else f"{part.dtype}{list(part.shape)}".encode())
            if part is not None:
                content.update(part.contiguous().numpy().tobytes())
        return content.digest()


def make_weight(
    codes: Tensor, scale: Tensor, zero_point: Tensor | None, bias: Tensor | None, *, name: str = "weight"
) -> LinearWeight:
    """Complete a weight from codes ``int8 [N, K]``, and scales, zero points (None for zeros) and bias ``[N]``.

    Raises:
        NumericsError: If shapes or dtypes do not fit, scales are not positive and finite, the bias is not finite, or K
            is so large that sums may overflow int32.
    """
    outputs, inner = codes.shape if codes.dim() == 2 else (-1, -1)
    vectors = (scale, zero_point, bias)
    if codes.dtype != torch.int8 or any(part is not None and part.shape != (outputs,) for part in vectors):
        raise NumericsError("expected int8 codes [N, K], and N scales, zero points and biases", where=name)
    if inner > _MOST_INNER:
        raise NumericsError(f"sums of {inner} products may leave int32 (at most {_MOST_INNER})", where=name)
    check_parameters(scale, zero_point, INT8, where=f"{name}: scale")
    if bias is not None:
        check_finite(bias.float(), f"{name}: bias")  # checked in float32, as stored: a float64 bias may overflow
    offset = codes.sum(1, dtype=torch.int64)
    if zero_point is not None:
        offset = offset - inner * zero_point.long()
    return LinearWeight(
        codes.contiguous(), scale.float(), None if zero_point is None else zero_point.int(), offset,
        None if bias is None else bias.detach().float().clone(),
    )  # fmt: skip


def quantize_weight(
    weight: Tensor, bias: Tensor | None, *, symmetric: bool = True, per_channel: bool = True, name: str = "weight"
) -> LinearWeight:
    """Quantise the weight of a linear layer, with one scale for each output.

    Args:
        weight: Weight, ``float32``, ``float16`` or ``bfloat16 [N, K]``, of any strides.
        bias: Bias ``[N]``, or None; it stays in float32.
        symmetric: Whether all zero points are zero, so that no sums of rows are needed.
        per_channel: Whether each output has its own scale; one for all is a baseline.

    Raises:
        NumericsError: If weight or bias is not finite (the message names the element), or as in :func:`make_weight`.
    """
    if weight.dim() != 2:
        raise NumericsError(f"expected [N, K], not {list(weight.shape)}", where=name)
    granularity = Granularity.row if per_channel else Granularity.tensor
    quantized = quantize(weight, INT8, granularity, symmetric=symmetric, name=name)
    outputs = weight.shape[0]
    scale, zero_point = quantized.scale, quantized.zero_point
    return make_weight(
        quantized.payload,
        scale.flatten().expand(outputs) if weight.numel() else torch.ones(outputs),
        None if zero_point is None or not weight.numel() else zero_point.flatten().expand(outputs),
        bias,
        name=name,
    )


def integer_product(codes: Tensor, zero_point: int, weight: LinearWeight) -> Tensor:
    """Return the exact ``sum_k (a - a0)(b - b0)``, ``int64 [M, N]``, of activations with codes ``uint8 [M, K]``."""
    # float64 holds every sum exactly (make_weight bounds K), and torch multiplies it faster than int64.
    return apply_offsets((codes.double() @ weight.codes.double().t()).long(), codes, zero_point, weight)


def apply_offsets(sums: Tensor, codes: Tensor, zero_point: int, weight: LinearWeight) -> Tensor:
    """Remove the zero points from sums of products of codes, ``int64 [M, N]``, in place, and return the sums."""
    sums -= zero_point * weight.column_offset
    if weight.zero_point is not None:
        sums -= codes.sum(1, dtype=torch.int64)[:, None] * weight.zero_point.long()
    return sums


def requantize(
    product: Tensor, weight: LinearWeight, input_scale: float, output: AffineParameters, *, relu: bool = False
) -> Tensor:
    """Convert ``product [M, N]`` to codes ``uint8``: FBGEMM's ``ReQuantizeOutput`` in float32, with bias and ReLU.

    With ``relu``, negative results become the output's zero point.
    """
    unit = weight.scale * torch.tensor(input_scale, dtype=torch.float32)
    values = product.float()
    if weight.bias is not None:
        values += weight.bias / unit
    zero_point = 0 if output.zero_point is None else int(output.zero_point)
    codes = (values * (unit / output.scale.float().reshape(()))).round_() + zero_point
    return codes.clamp_(zero_point if relu else 0, 255).to(torch.uint8)


def dequantize_product(product: Tensor, weight: LinearWeight, input_scale: float, *, relu: bool = False) -> Tensor:
    """Convert sums to values ``float32 [M, N]``: FBGEMM's ``ReQuantizeForFloat``, a fused multiply-add of float32."""
    unit = weight.scale * torch.tensor(input_scale, dtype=torch.float32)
    values = product.float().double() * unit.double()  # exact in float64, so only one rounding remains
    if weight.bias is not None:
        values += weight.bias.double()
    return values.relu_().float() if relu else values.float()
