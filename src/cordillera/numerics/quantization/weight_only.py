"""Linear layers with weights in float16, int8 or int4 and activations in floating point.

They suit layers that are bound by reading their weights, and those whose activations do not tolerate eight bits. NaN
and infinity propagate as in any product.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from cordillera.errors import NumericsError
from cordillera.numerics.quantization.engines import packing_engine
from cordillera.numerics.quantization.integer_linear import LinearWeight
from cordillera.numerics.quantization.quantizers import check_finite


class HalfWeights:
    """FBGEMM's product with float16 weights and float32 sums, at half the memory of float32 and without codes.

    A weight that is not finite or lies beyond float16, which FBGEMM would clamp, is an error.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        check_half(weight)
        self._bias = weight.new_zeros(len(weight)) if bias is None else bias
        with packing_engine():
            self._packed = torch.ops.quantized.linear_prepack_fp16(weight.detach().contiguous(), bias)

    def __call__(self, x: Tensor, relu: bool = False) -> Tensor:
        """Compute ``x W^T + b`` for ``x`` ``float32 [M, K]``; NaN and infinity propagate."""
        if x.shape[1]:
            y = torch.ops.quantized.linear_dynamic_fp16(x.contiguous(), self._packed)
        else:  # torch would return uninitialized memory
            y = self._bias.expand(len(x), -1).clone()
        return y.relu_() if relu else y


def check_half(weight: Tensor) -> None:
    """Raise an error if an element of a weight is not finite or lies beyond float16."""
    check_finite(weight, "weight")
    largest = torch.finfo(torch.float16).max
    beyond = weight.abs() > largest
    if bool(beyond.any()):
        index = tuple(int(i) for i in beyond.nonzero()[0])
        message = f"element {index} is {float(weight[index]):g}, beyond float16 ({largest:g})"
        raise NumericsError(message, where="weight", remedy="keep this layer in float32 or bfloat16")


class Int8Weights:
    """Weights of int8, symmetric, with floating-point activations; the codes are widened while they are read."""

    def __init__(self, weight: LinearWeight) -> None:
        if weight.zero_point is not None:
            raise NumericsError("weights alone are quantised symmetrically", where="weight")
        self.weight = weight

    def __call__(self, x: Tensor, relu: bool = False) -> Tensor:
        """Compute ``x W^T + b`` for ``x`` ``float32`` or ``bfloat16 [M, K]``; NaN and infinity propagate."""
        weight = self.weight
        if x.dtype == torch.bfloat16 and self.takes(weight.codes):
            y = torch._weight_int8pack_mm(x.contiguous(), weight.codes, weight.scale.bfloat16())
        else:  # torch's float32 kernel takes a hundred times as long as widening all codes
            y = (F.linear(x.float(), weight.codes.float()) * weight.scale).to(x.dtype)
        if weight.bias is not None:
            y += weight.bias
        return y.relu_() if relu else y

    @staticmethod
    def takes(weight: Tensor) -> bool:
        """Whether torch's kernel supports a weight ``[N, K]``; torch 2.13's reads out of bounds for other shapes."""
        return weight.shape[0] % 16 == 0 and weight.shape[1] % 32 == 0


class Int4Weights:
    """Weights of four bits in groups along a row, each with a scale and an offset, and floating-point activations.

    Args:
        codes: Codes from 0 to 15, ``uint8 [N, K]``.
        offsets: Scale and offset of each group, ``float32 [N, K / group, 2]``: a weight is ``(code - 8) * scale +
            offset``.
        bias: Bias, ``float32 [N]``, or None.
    """

    def __init__(self, codes: Tensor, offsets: Tensor, bias: Tensor | None) -> None:
        self.group, self.bias = codes.shape[1] // offsets.shape[1], bias
        self._offsets = offsets.transpose(0, 1).contiguous()
        self._codes = codes.to(torch.int32)
        self._packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(self._codes, 1)

    @classmethod
    def quantize(cls, weight: Tensor, *, group: int = 32) -> tuple[Tensor, Tensor]:
        """Return the codes and offsets of a weight, as the class takes them.

        Args:
            weight: Weight, ``float32 [N, K]``; torch's kernel needs N divisible by 16 and K by ``group``.
            group: Number of weights that share a scale: 32, 64, 128 or 256.
        """
        outputs, inner = weight.shape
        if not cls.takes(weight, group):
            message = f"{outputs} x {inner} in groups of {group}: needs 16 | N, group | K, groups of 32 to 256"
            raise NumericsError(message, where="weight", remedy="use int8 for this layer")
        check_finite(weight, "weight")
        blocks = weight.detach().float().view(outputs, inner // group, group)
        low, high = torch.aminmax(blocks, dim=2)
        scale = ((high.double() - low.double()) / 15).float()
        flat = torch.isinf(1.0 / scale)  # groups of one value, which is then the offset
        scale = scale.masked_fill(flat, 1.0)
        codes = ((blocks - low[..., None]) * (1.0 / scale[..., None])).round_().clamp_(0, 15)
        codes = codes.masked_fill(flat[..., None], 8)
        offset = torch.where(flat, low, low + 8 * scale)
        return codes.view(outputs, inner).to(torch.uint8), torch.stack([scale, offset], dim=2)

    @staticmethod
    def takes(weight: Tensor, group: int) -> bool:
        """Whether torch's kernel supports a weight ``[N, K]`` in groups of ``group``."""
        outputs, inner = weight.shape
        return group in (32, 64, 128, 256) and not inner % group and not outputs % 16 and bool(weight.numel())

    def dequantize(self) -> Tensor:
        """Return the weight that the codes represent, ``float32 [N, K]``."""
        outputs, inner = self._codes.shape
        codes = self._codes.float().view(outputs, -1, self.group) - 8
        scale, offset = self._offsets.transpose(0, 1).unbind(2)
        return (codes * scale[..., None] + offset[..., None]).view(outputs, inner)

    def __call__(self, x: Tensor, relu: bool = False) -> Tensor:
        """Compute ``x W^T + b`` for ``x`` ``float32`` or ``bfloat16 [M, K]``; NaN and infinity propagate."""
        offsets = self._offsets.to(x.dtype)
        y = torch.ops.aten._weight_int4pack_mm_for_cpu(x.contiguous(), self._packed, self.group, offsets)
        if self.bias is not None:
            y += self.bias
        return y.relu_() if relu else y
