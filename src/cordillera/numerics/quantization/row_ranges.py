"""Eight-bit linear layer with a separate range for each input row.

One range for a whole batch would make the result of a row depend on the rows beside it. Here every row is quantised by
its own range, so that its result is the same in any batch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from cordillera.numerics.quantization.engines import TorchEngine, saturates
from cordillera.numerics.quantization.integer_linear import LinearWeight, make_weight

_LEAST_SCALE = torch.finfo(torch.float32).tiny


def linear_by_rows(weight: LinearWeight, *, relu: bool = False) -> Callable[[Tensor], Tensor]:
    """Return a function that computes ``x W^T + b`` in eight bits for ``x`` ``float32 [M, K]``.

    The codes of a row divide the range from its smallest to its largest value and zero into 255 equal steps, or into
    127 where products of eight-bit codes may saturate. Torch's engine multiplies the codes, which it takes as values of
    scale 1, and the sums are scaled row by row. Sums are exact below 2**24 and rounded to float32 above. Rows with NaN
    or infinity, or whose range overflows float32, are NaN.

    Args:
        weight: Weight without zero points.
        relu: Whether negative results become zero.
    """
    engine = TorchEngine(make_weight(weight.codes, torch.ones_like(weight.scale), None, None))
    offset, most = weight.column_offset.float(), 127.0 if saturates() else 255.0

    def run(x: Tensor) -> Tensor:
        if not len(x):
            return x.new_zeros(0, len(weight.codes))
        low, high = x.amin(1, keepdim=True).clamp_(max=0), x.amax(1, keepdim=True).clamp_(min=0)
        scale = ((high - low) / most).clamp_(min=_LEAST_SCALE)
        zero = (low / -scale).round_()
        codes = (x / scale).round_().add_(zero).clamp_(0, most)
        if bool((lost := ~scale.isfinite()).any()):
            codes.masked_fill_(lost, 0)
            scale = scale.masked_fill(lost, torch.nan)
        y = engine.from_float(codes, 1.0, 0, False).sub_(zero * offset).mul_(scale * weight.scale)
        if weight.bias is not None:
            y.add_(weight.bias)
        return y.relu_() if relu else y

    return run
