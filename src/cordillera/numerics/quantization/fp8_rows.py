"""Products of rows in FP8 (e4m3), with a scale for each row of both operands.

Source: Grattafiori et al. 2024, section 6.2; FBGEMM's row-wise quantiser, whose ``scale_ub`` is the bound here.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cordillera.numerics.quantization.quantizers import check_finite

LARGEST = 448.0
"""Largest number of e4m3."""
BOUND = 1200.0
"""Largest magnitude of an activation that sets the scale of its row, as Llama 3 is served."""


def fp8_rows(x: Tensor, bound: float | None = None) -> tuple[Tensor, Tensor]:
    """Return rows in e4m3 and their scales; a row with NaN or infinity gets a scale of NaN, so that it stays NaN.

    Args:
        x: Rows, ``float32 [n, K]``.
        bound: Largest magnitude that sets a scale; larger numbers are cut to it, and the others of their row keep
            their digits. None for no bound.

    Returns:
        ``float8_e4m3fn [n, K]``, and ``float32 [n, 1]``.
    """
    largest = x.abs().amax(1, keepdim=True)
    finite = torch.isfinite(largest)
    most = largest if bound is None else largest.clamp(max=bound)
    scale = (most / LARGEST).clamp(min=torch.finfo(torch.float32).tiny)
    scaled = x / scale if bound is None else (x / scale).clamp_(-LARGEST, LARGEST)
    payload = torch.where(finite, scaled, 0.0).to(torch.float8_e4m3fn)
    return payload, torch.where(finite, scale, torch.nan)


class Fp8Linear(nn.Module):
    """Linear layer without bias in FP8, with scales of rows that are chosen for each input.

    GPUs of compute capability 8.9 and later multiply FP8 themselves; elsewhere the product is emulated, and slower than
    in bfloat16.

    Args:
        weight: Weight, ``[N, K]``, of which each row gets a scale.
        bound: Bound of the activations' scales, as in :func:`fp8_rows`.

    Raises:
        NumericsError: If the weight is not finite.
    """

    weight: Tensor
    scale: Tensor

    def __init__(self, weight: Tensor, bound: float | None = BOUND) -> None:
        super().__init__()
        check_finite(weight.detach(), "weight")
        payload, scale = fp8_rows(weight.detach().float())
        self.bound = bound
        self.register_buffer("weight", payload)
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x weight^T`` of rows ``[n, K]``, ``[n, N]`` in their dtype."""
        if not len(x):
            return x.new_zeros(0, len(self.weight))
        payload, scale = fp8_rows(x.float(), self.bound)
        out = torch.bfloat16 if x.dtype == torch.bfloat16 else torch.float32
        return torch._scaled_mm(payload, self.weight.T, scale, self.scale.T, out_dtype=out).to(x.dtype)


def multiplies_fp8(device: torch.device) -> bool:
    """Return whether a device multiplies FP8 itself, so that it is not emulated."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)
