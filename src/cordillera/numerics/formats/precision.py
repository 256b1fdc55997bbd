"""Names of the precisions in which a model computes, as used in recipes."""

from __future__ import annotations

from functools import cache
from typing import Literal

import torch

Precision = Literal["bf16", "fp32"]
"""``bf16``: matrix products in bfloat16, over weights, sums and optimizer states in float32; ``fp32``: all in float32.
The dtype of a single tensor has torch's own name instead."""


def compute_dtype(precision: Precision) -> torch.dtype:
    """Return the dtype in which matrix products are computed."""
    return {"bf16": torch.bfloat16, "fp32": torch.float32}[precision]


@cache
def precision_of_machine() -> Precision:
    """Return ``bf16`` if a GPU or this processor multiplies matrices in bfloat16, else ``fp32``.

    Without AVX-512, torch's products of bfloat16 matrices on CPUs take several times as long as those of float32.
    """
    return "bf16" if torch.cuda.is_available() or torch.ops.mkldnn._is_mkldnn_bf16_supported() else "fp32"
