"""Floating-point operations that training a Llama truly takes, and the most that a device could do.

A multiply-add is two operations; a backward pass takes twice those of its forward; what is computed again to save
memory is not counted. Only matrix products count: lookups, norms, rotations and softmax do not. A token attends to
those before it in its document and to itself, so a document of ``d`` tokens has ``d (d + 1) / 2`` pairs, whatever it is
packed with: work on pairs that the mask hides is none.

Source: Chowdhery et al. 2022 (PaLM), appendix B, which counts all ``d**2`` pairs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from cordillera import topology
from cordillera.kernels.products import measure
from cordillera.models.language.llama import LlamaConfig

_MATRIX = 1024  # rows of the factors that a peak is measured with

# What drivers call the devices that shipped clusters are made of. An H200 is an H100 with more memory.
_CALLED = {
    "NVIDIA A100-SXM4-80GB": "A100 SXM4 80GB",
    "NVIDIA H100 80GB HBM3": "H100 SXM5 80GB",
    "NVIDIA H200": "H100 SXM5 80GB",
}


class Peak(NamedTuple):
    """The most that one device does.

    Attributes:
        flops_per_s: Operations a second in dense matrix products.
        source: Where the number is from: ``published``, or ``measured`` now on this machine.
    """

    flops_per_s: float
    source: str


def flops_per_token(config: LlamaConfig) -> int:
    """Of forward and backward, without attention's own: 6 for each parameter that multiplies every token.

    The embedding is looked up and does not count; the head does, tied or not.

    Args:
        config: The model's sizes.
    """
    attention = 2 * config.hidden * config.head_width * (config.heads + config.kv_heads)
    block = attention + 3 * config.hidden * config.ffn
    return 6 * (config.layers * block + config.vocabulary * config.hidden)


def training_flops(config: LlamaConfig, lengths: Iterable[int]) -> int:
    """Of forward and backward of documents, with attention under their mask.

    Each pair of a query and a key takes ``4 heads head_width`` forward (its score, its part of the sum) and twice that
    backward, in each layer.

    Args:
        config: The model's sizes.
        lengths: Of the documents, in tokens.
    """
    tokens = pairs = 0
    for length in lengths:
        tokens += length
        pairs += length * (length + 1) // 2
    return flops_per_token(config) * tokens + 12 * config.layers * config.heads * config.head_width * pairs


def peak_flops(device: str | torch.device = "cpu", dtype: torch.dtype = torch.bfloat16) -> Peak | None:
    """The most operations a second that one device does in matrix products.

    Of accelerators it is what their maker says, in 16 bits; of CPUs a product of two large matrices is timed with as
    many threads as this process has now, which is less where other processes compute meanwhile.

    Args:
        device: ``cpu`` or ``cuda``.
        dtype: Of the factors.

    Returns:
        None where it is not known: other accelerators, other dtypes.
    """
    device = torch.device(device)
    if device.type == "cpu":
        (seconds,) = measure([(_MATRIX, _MATRIX, _MATRIX, 1)], "cpu", dtype)
        return Peak(2 * _MATRIX**3 / seconds, "measured")
    return _published(torch.cuda.get_device_name(device), dtype) if device.type == "cuda" else None


def _published(name: str, dtype: torch.dtype) -> Peak | None:
    """Of an accelerator by its driver's name."""
    if dtype in (torch.bfloat16, torch.float16):
        for cluster in topology.shipped():
            known = topology.load(cluster).device
            if known.name == _CALLED.get(name):
                return Peak(known.matrix_flops_per_s, "published")
    return None
