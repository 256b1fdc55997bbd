"""Linear layers with weights of four or eight bits in groups of 32 inputs, unpacked as they are read."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cordillera.errors import NumericsError
from cordillera.kernels.dense.packed_rows import PackedRows, packed_linear
from cordillera.kernels.dense.tiled_products import GROUP, takes
from cordillera.numerics.quantization.quantizers import check_finite


def pack_rows(weight: Tensor, bits: int) -> PackedRows:
    """Round a weight to codes with one scale per group of 32 inputs.

    Four bits divide the range of a group into 15 equal steps, as GGUF's Q4_1; eight bits are symmetric, as Q8_0. An
    error is at most half a step, plus the error of scales rounded to float16.

    Args:
        weight: Weight, ``[outputs, inner]``, whose shape :func:`~cordillera.kernels.dense.tiled_products.takes` allows.
        bits: 4 or 8.

    Raises:
        NumericsError: If the weight is not finite, too large for scales in float16, or has another shape.
    """
    outputs, inner = weight.shape
    if not takes(outputs, inner):
        raise NumericsError(f"{outputs} x {inner} is not made of 16 outputs by {GROUP} inputs", where="weight")
    check_finite(weight.detach(), "weight")
    groups = weight.detach().float().view(outputs, inner // GROUP, GROUP)
    if bits == 8:
        scale = (groups.abs().amax(-1) / 127).half()
        scales = scale[..., None]
    else:
        low, high = torch.aminmax(groups, dim=-1)
        least = low.half()
        scale = ((high - least.float()).clamp_(min=0) / 15).half()
        scales = torch.stack([scale, least], -1)
    if not scales.isfinite().all():
        raise NumericsError("has numbers beyond what scales in float16 reach", where="weight")
    divisor = torch.where(scale > 0, scale, 1).float()[..., None]
    if bits == 8:
        codes = (groups / divisor).round_().clamp_(-127, 127).to(torch.int8)
    else:
        codes = ((groups - least.float()[..., None]) / divisor).round_().clamp_(0, 15).to(torch.uint8)
        codes = codes[..., : GROUP // 2] | codes[..., GROUP // 2 :] << 4
    return PackedRows(codes.contiguous(), scales)


class PackedLinear(nn.Module):
    """Linear layer without bias whose weight is packed, for bfloat16 inputs on a CPU and without gradients.

    Its results are those of a bfloat16 layer with the unpacked weights, to the bit on x86 processors with AVX2.

    Args:
        packed: Weight.
    """

    codes: Tensor
    scales: Tensor

    def __init__(self, packed: PackedRows) -> None:
        super().__init__()
        self.out_features, self.in_features = packed.shape
        self.register_buffer("codes", packed.codes)
        self.register_buffer("scales", packed.scales)

    @property
    def packed(self) -> PackedRows:
        """The weight."""
        return PackedRows(self.codes, self.scales)

    def first(self, outputs: int) -> PackedLinear:
        """Return the layer of the first outputs, which shares the memory."""
        return PackedLinear(PackedRows(self.codes[:outputs], self.scales[:outputs]))

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() and x.requires_grad:
            raise NumericsError("packed weights have no gradients", where="PackedLinear")
        return packed_linear(x.detach(), self.packed)
