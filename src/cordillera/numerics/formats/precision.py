"""Names of the precisions in which a model computes, as used in recipes."""

from __future__ import annotations

from typing import Literal

import torch

Precision = Literal["bf16", "fp32"]
"""``bf16``: matrix products in bfloat16, over weights, sums and optimizer states in float32; ``fp32``: all in float32.
The dtype of a single tensor has torch's own name instead."""


def compute_dtype(precision: Precision) -> torch.dtype:
    """Return the dtype in which matrix products are computed."""
    return {"bf16": torch.bfloat16, "fp32": torch.float32}[precision]
