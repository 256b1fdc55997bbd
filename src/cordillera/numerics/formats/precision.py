"""The words by which recipes say in what precision a model computes."""

from __future__ import annotations

from typing import Literal

import torch

Precision = Literal["bf16", "fp32"]
"""``bf16``: matrix products in bfloat16, over weights, sums and optimizer states in float32; ``fp32``: all in float32.
What number a tensor holds is called by torch's own name of its dtype instead."""


def compute_dtype(precision: Precision) -> torch.dtype:
    """What matrix products are computed in.

    Args:
        precision: A word of a recipe.
    """
    return {"bf16": torch.bfloat16, "fp32": torch.float32}[precision]
