"""Eight-bit linear layer with a separate range for each input row.

Ranges of a whole batch make the result of a row depend on the rows beside it. Here a row is quantised as
``linear_dynamic`` of torch would quantise it alone, and sums are whole numbers, so that results are exact functions of
single rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cordillera.numerics.formats.formats import INTEGERS
from cordillera.numerics.quantization.integer_linear import UINT8, LinearWeight
from cordillera.numerics.quantization.quantizers import choose_affine, encode_integers


def linear_by_rows(x: Tensor, weight: LinearWeight, *, relu: bool, seven_bits: bool) -> Tensor:
    """Compute ``x W^T + b`` for ``x`` ``float32 [M, K]``; rows with NaN or infinity are NaN.

    ``relu`` makes negative results zero; ``seven_bits`` takes half the range of the codes.
    """
    finite = torch.isfinite(x).all(1, keepdim=True)
    x = torch.where(finite, x, 0.0)
    low, high = torch.aminmax(x, dim=1, keepdim=True) if x.numel() else (x.new_zeros(len(x), 1),) * 2
    format = INTEGERS["uint7"] if seven_bits else UINT8
    chosen = choose_affine(low, high, format)
    assert chosen.zero_point is not None
    codes = encode_integers(x, chosen.scale.float(), chosen.zero_point, UINT8)
    sums = (codes.double() @ weight.codes.double().t()).long()  # float64 holds every sum exactly
    sums -= chosen.zero_point.long() * weight.column_offset
    if weight.zero_point is not None:
        sums -= codes.sum(1, dtype=torch.int64)[:, None] * weight.zero_point.long()
    values = sums.float().double() * (weight.scale * chosen.scale.float()).double()
    if weight.bias is not None:
        values += weight.bias.double()
    if relu:
        values = values.relu_()
    return values.float().masked_fill_(~finite, torch.nan)
