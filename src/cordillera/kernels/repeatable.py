"""Products of matrices whose rows have the same bits in any company.

MKL, which multiplies float32 matrices for torch on x86, chooses its code by sizes, addresses and threads, and with it
the order of a sum. In its strict mode of conditional numerical reproducibility a row of a product depends neither on
its address nor on the number of threads. If the number of rows is a multiple of :data:`BLOCK`, it does not depend on
that number either; one row, or 5, or 65, are computed by other code. On CPUs without AVX-512 that is so for any number
of rows from :data:`LEAST_ROWS`. The mode costs no measurable time.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextvars import ContextVar

BLOCK = 128
"""Products have a multiple of this number of rows, so that a row's bits do not depend on the other rows."""

LEAST_ROWS = 4
"""Least number of rows that MKL computes like many rows, on CPUs on which :func:`rows_repeat` holds."""

_MODE = "MKL_CBWR"
_IN_ORDER: ContextVar[bool] = ContextVar("in_order", default=False)


def repeat_products() -> None:
    """Set MKL to its strict reproducible mode, unless the environment sets the mode.

    MKL reads the setting at its first product, so this must be called before torch multiplies. Child processes inherit
    the setting.
    """
    os.environ.setdefault(_MODE, "AUTO,STRICT")


def products_repeat() -> bool:
    """Return whether rows of float32 products keep their bits at other addresses and beside other rows.

    The shapes are some for which MKL outside of its strict mode changes bits. It takes a millisecond.
    """
    import torch

    generator = torch.Generator().manual_seed(1)
    for inner, outputs in ((513, 7), (257, 5), (690, 2), (65, 33)):
        x, weight = (torch.randn(rows, inner, generator=generator) for rows in (3 * BLOCK, outputs))
        order = torch.randperm(len(x), generator=generator)
        whole = torch.nn.functional.linear(x, weight)
        if not torch.equal(torch.nn.functional.linear(x[order], weight), whole[order]):
            return False
        if not torch.equal(torch.nn.functional.linear(x[:BLOCK], weight), whole[:BLOCK]):
            return False
    return True


@contextlib.contextmanager
def in_order() -> Iterator[None]:
    """Context in which float32 attention and SiLU on CPUs compute in an order that depends on a token's own text alone.

    A token then has the same bits in any packing and any parts of its text, in training and in generation.
    """
    token = _IN_ORDER.set(True)
    try:
        yield
    finally:
        _IN_ORDER.reset(token)


def is_in_order() -> bool:
    """Return whether :func:`in_order` holds."""
    return _IN_ORDER.get()


def rows_repeat() -> bool:
    """Return whether rows of float32 products have the same bits among any number of them from :data:`LEAST_ROWS`."""
    import torch

    generator = torch.Generator().manual_seed(1)
    for inner, outputs in ((64, 96), (300, 40), (576, 192)):
        x, weight = (torch.randn(rows, inner, generator=generator) for rows in (4 * BLOCK, outputs))
        whole = torch.nn.functional.linear(x, weight)
        for rows in (LEAST_ROWS, LEAST_ROWS + 1, 33, 65, BLOCK + 1, 3 * BLOCK - 1):
            if not torch.equal(torch.nn.functional.linear(x[:rows], weight), whole[:rows]):
                return False
    return True
