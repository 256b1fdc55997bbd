"""Measurement of matrix products on this machine's device, for the planner's cost model."""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from cordillera.cost import Products, ProductShape
from cordillera.errors import PlanError
from cordillera.run import describe_environment

_ENOUGH_S = 2.0  # total time after which no further rounds are run
_USABLE = 0.9  # share of the memory that is free at the beginning
_SAVE_S = 1.0  # shortest time between two writes of a table


def measure(
    shapes: Sequence[ProductShape], device: str = "cpu", dtype: torch.dtype = torch.bfloat16, rounds: int = 5
) -> Iterator[float]:
    """Measure the median time of some rounds for each product, after one round to warm up.

    Args:
        shapes: ``(rows, columns, inner, count)``: ``count`` products ``[rows, inner] x [inner, columns]`` in a kernel.
        device: ``cpu`` or ``cuda``.
        dtype: Dtype of all matrices.
        rounds: Number of rounds of each product; fewer where they take more than two seconds.

    Yields:
        Seconds, product after product.

    Raises:
        RuntimeError: The device is missing or its memory too small.
    """
    for shape in shapes:
        yield _median(shape, device, dtype, rounds)


def _median(shape: ProductShape, device: str, dtype: torch.dtype, rounds: int) -> float:
    rows, columns, inner, count = shape
    # random numbers, as zeros take less power and less time
    left = torch.randn(count, rows, inner, device=device, dtype=dtype)
    right = torch.randn(count, inner, columns, device=device, dtype=dtype)
    out = torch.empty(count, rows, columns, dtype=dtype, device=device)
    seconds: list[float] = []
    for i in range(1 + rounds):
        if device != "cpu":
            torch.cuda.synchronize()
        began = time.perf_counter()
        if count == 1:
            torch.mm(left[0], right[0], out=out[0])
        else:
            torch.bmm(left, right, out=out)
        if device != "cpu":
            torch.cuda.synchronize()
        if i:
            seconds.append(time.perf_counter() - began)
        if sum(seconds) > _ENOUGH_S:
            break
    return statistics.median(seconds)


@dataclass(frozen=True)
class Measured:
    """Outcome of :func:`measure_table`.

    Attributes:
        products: Products in the file; None if the measurement was interrupted before the first.
        new: Number of products that were measured now.
        too_large: Number of products that the device's memory does not hold.
        left: Number of products that remain to be measured after an interrupt.
    """

    products: Products | None
    new: int
    too_large: int
    left: int


def measure_table(
    shapes: Sequence[ProductShape],
    path: str | Path,
    device: str | None = None,
    on_product: Callable[[ProductShape, int, int], object] | None = None,
) -> Measured:
    """Measure products in bfloat16 and write them to a file that ``cordillera plan --products`` takes.

    Products that are in the file are not measured again, so an interrupted measurement can be continued. An interrupt
    (Ctrl-C) ends the measurement; results are written then and every second before.

    Args:
        shapes: Shapes of the products, as in :func:`measure`.
        path: Path of the CSV file; see :class:`cordillera.cost.Products`.
        device: ``cpu`` or ``cuda``; None for the GPU if there is one.
        on_product: Function called before each product with its shape, the number of products done and of all products.

    Raises:
        PlanError: The file holds measurements of another device or dtype, or cannot be read or written.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name() if device != "cpu" else str(describe_environment()["processor"])
    found: dict[ProductShape, float] = {}
    if Path(path).exists():
        before = Products.read(path)
        if (before.device, before.dtype) != (name, "bfloat16"):
            message = f"was measured on {before.device} in {before.dtype}, not on {name} in bfloat16"
            raise PlanError(message, where=str(path), remedy="measure into another file")
        found.update(before.seconds)
    room = _USABLE * _free_bytes(device)
    asked = [shape for shape in dict.fromkeys(shapes) if shape not in found]
    fitting = [shape for shape in asked if _bytes(shape) <= room]
    known, saved = len(found), time.monotonic()

    def save() -> Products | None:
        if not found:
            return None
        products = Products(found, str(path), name)
        if len(found) > known:
            products.write(path)
        return products

    with contextlib.suppress(KeyboardInterrupt):
        for shape in fitting:
            if on_product is not None:
                on_product(shape, len(found) - known, len(fitting))
            (found[shape],) = measure([shape], device)
            if time.monotonic() - saved > _SAVE_S:
                save()
                saved = time.monotonic()
    new = len(found) - known
    return Measured(save(), new, len(asked) - len(fitting), len(fitting) - new)


def _bytes(shape: ProductShape) -> int:
    """Bytes of both factors and the result, in 16 bits."""
    rows, columns, inner, count = shape
    return 2 * count * (rows * columns + rows * inner + columns * inner)


def _free_bytes(device: str) -> float:
    """Bytes of available memory; infinity if the system does not report them."""
    if device != "cpu":
        return float(torch.cuda.mem_get_info()[0])
    with contextlib.suppress(OSError, ValueError), open("/proc/meminfo", encoding="utf-8") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return 1024.0 * int(line.split()[1])
    return math.inf
