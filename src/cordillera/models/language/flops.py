"""Floating-point operations of training a Llama, and the peak rate of a device.

A multiply-add is two operations; a backward pass takes twice those of its forward; recomputation to save memory is not
counted. Only matrix products count: lookups, norms, rotations and softmax do not. A token attends to itself and to
those before it in its document, so a document of ``d`` tokens has ``d (d + 1) / 2`` pairs, however it is packed; masked
pairs do not count.

Source: Chowdhery et al. 2022 (PaLM), appendix B, which counts all ``d**2`` pairs.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import NamedTuple

import torch

from cordillera import topology
from cordillera.models.language.llama import LlamaConfig

_MATRIX = 1024  # rows of the factors with which a peak is measured
_PRODUCTS = 5  # products per measurement; the fastest counts

# Drivers' names of the devices of shipped clusters. An H200 is an H100 with more memory.
_CALLED = {
    "NVIDIA A100-SXM4-80GB": "A100 SXM4 80GB",
    "NVIDIA H100 80GB HBM3": "H100 SXM5 80GB",
    "NVIDIA H200": "H100 SXM5 80GB",
}


class Peak(NamedTuple):
    """Peak rate of one device, in operations per second of dense matrix products.

    Attributes:
        source: Origin of the number: ``published``, or ``measured`` on this machine.
    """

    flops_per_s: float
    source: str


def flops_per_token(config: LlamaConfig) -> int:
    """Return the operations of forward and backward for a token without attention's core: 6 for each such parameter.

    The embedding is a lookup and does not count; the head does, tied or not. Only the experts that a token uses count.
    """
    attention = 2 * config.hidden * config.head_width * (config.heads + config.kv_heads)
    router = 0 if config.experts is None else config.hidden * config.experts.count
    block = attention + 3 * config.hidden * config.active_ffn + router
    return 6 * (config.layers * block + config.vocabulary * config.hidden)


def training_flops(config: LlamaConfig, lengths: Iterable[int]) -> int:
    """Return the operations of forward and backward of documents of ``lengths`` in tokens, under their mask.

    Each pair of a query and a key takes ``4 heads head_width`` operations in the forward (its score, its part of the
    sum) and twice that in the backward, in each layer of ``config``.
    """
    tokens = pairs = 0
    for length in lengths:
        tokens += length
        pairs += length * (length + 1) // 2
    return flops_per_token(config) * tokens + 12 * config.layers * config.heads * config.head_width * pairs


def peak_flops(device: str | torch.device = "cpu", dtype: torch.dtype = torch.bfloat16) -> Peak | None:
    """Return the peak rate of a ``device`` in products of matrices of ``dtype``; None if unknown.

    For accelerators it is the manufacturer's number in 16 bits. For CPUs it is the rate of one thread, by its processor
    time in products of two large matrices, times the present number of threads: waiting for a processor that is busy
    with something else does not count.
    """
    device = torch.device(device)
    if device.type == "cpu":
        return Peak(torch.get_num_threads() * _rate_of_thread(dtype), "measured")
    return _published(torch.cuda.get_device_name(device), dtype) if device.type == "cuda" else None


def _rate_of_thread(dtype: torch.dtype) -> float:
    """Time products in this thread; return the operations per second of the fastest."""
    left, right = (torch.rand(_MATRIX, _MATRIX, generator=torch.Generator()).to(dtype) for _ in range(2))
    seconds, threads = [], torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for _ in range(_PRODUCTS):
            began = time.thread_time()
            torch.mm(left, right)
            seconds.append(time.thread_time() - began)
    finally:
        torch.set_num_threads(threads)
    return 2 * _MATRIX**3 / min(seconds)


def _published(name: str, dtype: torch.dtype) -> Peak | None:
    """Return the published peak of an accelerator, by its driver's name."""
    if dtype in (torch.bfloat16, torch.float16):
        for cluster in topology.shipped():
            known = topology.load(cluster).device
            if known.name == _CALLED.get(name):
                return Peak(known.matrix_flops_per_s, "published")
    return None
