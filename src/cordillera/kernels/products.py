"""Seconds of matrix products on this machine's device, for the planner's cost model."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence

import torch


def measure(
    shapes: Sequence[tuple[int, int, int, int]],
    device: str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    rounds: int = 5,
) -> Iterator[float]:
    """The median of some rounds for each product, after one to warm up.

    Args:
        shapes: ``(rows, columns, inner, count)``: ``count`` products ``[rows, inner] x [inner, columns]`` in a kernel.
        device: ``cpu`` or ``cuda``.
        dtype: Of all matrices.
        rounds: Of each product.

    Yields:
        Seconds, product after product.

    Raises:
        RuntimeError: If the device is not there or its memory too small.
    """
    for rows, columns, inner, count in shapes:
        left = torch.randn(count, rows, inner, device=device).to(dtype)  # zeros would take less power, and less time
        right = torch.randn(count, inner, columns, device=device).to(dtype)
        out = torch.empty(count, rows, columns, dtype=dtype, device=device)
        seconds = []
        for _ in range(1 + rounds):
            if device != "cpu":
                torch.cuda.synchronize()
            began = time.perf_counter()
            if count == 1:
                torch.mm(left[0], right[0], out=out[0])
            else:
                torch.bmm(left, right, out=out)
            if device != "cpu":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
        yield statistics.median(seconds[1:])
