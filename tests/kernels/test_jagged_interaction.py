"""Operators on ragged data against loops over samples in plain indices, their gradients, and refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cordillera.errors import DataError
from cordillera.jagged import offsets_from_lengths
from cordillera.kernels.jagged_interaction import (
    add_dense,
    differences,
    jagged_dense_product,
    jagged_product,
    jagged_softmax,
    multiply_pairs,
    padded_pairs,
    pair_products,
    pair_softmax,
    pairs_times_rows,
    prepend,
)

LENGTHS = [2, 0, 3, 1, 0]


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def operands(lengths: list[int]) -> dict[str, Tensor]:
    rows, longest = sum(lengths), max(lengths, default=0)
    return {
        "x": drawn(rows, 3), "y": drawn(rows, 3), "wide": drawn(rows, 2), "line": drawn(rows),
        "matrices": drawn(len(lengths), 3, 2), "padded": drawn(len(lengths), longest + 1, 3),
        "pairs": drawn(sum(n * n for n in lengths)), "mask": drawn(longest + 1, longest + 1),
        "first": drawn(len(lengths), 3),
    }  # fmt: skip


Operator = Callable[[dict[str, Tensor], Tensor], Tensor]
OPERATORS: dict[str, tuple[tuple[str, ...], Operator]] = {
    "jagged_dense_product": (("x", "matrices"), lambda a, o: jagged_dense_product(a["x"], o, a["matrices"])),
    "jagged_product": (("x", "wide"), lambda a, o: jagged_product(a["x"], a["wide"], o)),
    "pair_products": (("x", "y"), lambda a, o: pair_products(a["x"], a["y"], o)),
    "pairs_times_rows": (("pairs", "x"), lambda a, o: pairs_times_rows(a["pairs"], a["x"], o)),
    "transposed": (("pairs", "x"), lambda a, o: pairs_times_rows(a["pairs"], a["x"], o, transpose=True)),
    "jagged_softmax": (("x",), lambda a, o: jagged_softmax(a["x"], o)),
    "pair_softmax": (("pairs",), lambda a, o: pair_softmax(a["pairs"], o)),
    "pair_softmax, first": (("pairs",), lambda a, o: pair_softmax(a["pairs"], o, "first")),
    "add_dense": (("x", "padded"), lambda a, o: add_dense(a["x"], o, a["padded"])),
    "multiply_pairs": (("pairs", "mask"), lambda a, o: multiply_pairs(a["pairs"], o, a["mask"])),
    "padded_pairs": (("pairs",), lambda a, o: padded_pairs(a["pairs"], o, -7.0)),
    "prepend": (("x", "first"), lambda a, o: prepend(a["x"], o, a["first"])[0]),
    "differences": (("line",), lambda a, o: differences(a["line"], o)),
}


def by_loops(name: str, a: dict[str, Tensor], lengths: list[int]) -> list[float]:
    """The same, number by number."""
    found: list[Any] = []
    start = square = 0
    longest = max(lengths, default=0)
    for b, n in enumerate(lengths):
        x, y, wide, line = (a[key][start : start + n] for key in ("x", "y", "wide", "line"))
        pairs = [[a["pairs"][square + i * n + j] for j in range(n)] for i in range(n)]
        at, cells = range(n), [(i, j) for i in range(n) for j in range(n)]
        if name == "jagged_dense_product":
            found += [sum(x[i, d] * a["matrices"][b, d, f] for d in range(3)) for i in at for f in range(2)]
        elif name == "jagged_product":
            found += [sum([x[i, d] * wide[i, f] for i in at], torch.zeros(())) for d in range(3) for f in range(2)]
        elif name == "pair_products":
            found += [sum(x[i, d] * y[j, d] for d in range(3)) for i, j in cells]
        elif name == "pairs_times_rows":
            found += [sum(pairs[i][j] * x[j, d] for j in at) for i in at for d in range(3)]
        elif name == "transposed":
            found += [sum(pairs[j][i] * x[j, d] for j in at) for i in at for d in range(3)]
        elif name == "jagged_softmax":
            found += [x[i, d].exp() / sum(x[k, d].exp() for k in at) for i in at for d in range(3)]
        elif name == "pair_softmax":
            found += [pairs[i][j].exp() / sum(pairs[i][k].exp() for k in at) for i, j in cells]
        elif name == "pair_softmax, first":
            found += [pairs[i][j].exp() / sum(pairs[k][j].exp() for k in at) for i, j in cells]
        elif name == "add_dense":
            found += [x[i, d] + a["padded"][b, i, d] for i in at for d in range(3)]
        elif name == "multiply_pairs":
            found += [pairs[i][j] * a["mask"][i, j] for i, j in cells]
        elif name == "padded_pairs":
            found += [pairs[i][j] if max(i, j) < n else -7.0 for i in range(longest) for j in range(longest)]
        elif name == "prepend":
            found += [*a["first"][b], *x.flatten()]
        else:
            found += [line[i] - line[j] for i in range(n - 1) for j in range(1, n)]
        start, square = start + n, square + n * n
    return [float(one) for one in found]


@pytest.mark.parametrize("name", OPERATORS)
@settings(max_examples=12)
@given(lengths=st.lists(st.integers(0, 4), max_size=5), dtype=st.sampled_from([torch.int32, torch.int64]))
def test_operators_are_those_of_loops(name: str, lengths: list[int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    a, offsets = operands(lengths), offsets_from_lengths(torch.tensor(lengths, dtype=torch.int64)).to(dtype)
    found = OPERATORS[name][1](a, offsets)
    expected = torch.tensor(by_loops(name, a, lengths), dtype=torch.float64)
    torch.testing.assert_close(found.detach().flatten(), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", OPERATORS)
def test_gradients_are_those_of_differences(name: str) -> None:
    torch.manual_seed(0)
    names, operator = OPERATORS[name]
    a, offsets = operands(LENGTHS), offsets_from_lengths(torch.tensor(LENGTHS))
    assert torch.autograd.gradcheck(
        lambda *given: operator(a | dict(zip(names, given, strict=True)), offsets), [a[key] for key in names]
    )


def test_new_offsets_count_the_rows_put_before() -> None:
    offsets = offsets_from_lengths(torch.tensor(LENGTHS)).int()
    _, after = prepend(drawn(6, 3), offsets, drawn(5, 3))
    assert after.dtype == torch.int32
    assert after.diff().tolist() == [n + 1 for n in LENGTHS]


def test_what_does_not_fit_is_refused_by_name() -> None:
    a, offsets = operands(LENGTHS), offsets_from_lengths(torch.tensor(LENGTHS))
    wrong: dict[str, Callable[[], Any]] = {
        "offsets: must be int32": lambda: jagged_softmax(a["x"], offsets.float()),
        "offsets: must start at 0": lambda: jagged_softmax(a["x"], offsets.flip(0)),
        "x: has 6 rows, the offsets end at 5": lambda: jagged_softmax(a["x"], offsets.clamp(max=5)),
        "y: needs \\[5, D, F\\]": lambda: jagged_dense_product(a["x"], offsets, a["matrices"][:4]),
        "y: has 5 rows": lambda: jagged_product(a["x"], a["wide"][:5], offsets),
        "y: needs the shape of x": lambda: pair_products(a["x"], a["wide"], offsets),
        "pairs: needs 14 numbers": lambda: pairs_times_rows(a["pairs"][1:], a["x"], offsets),
        "along: must be 'last' or 'first'": lambda: pair_softmax(a["pairs"], offsets, "both"),  # type: ignore[arg-type]
        "y: of shape": lambda: add_dense(a["x"], offsets, a["padded"][:, :2]),
        "mask: needs at least": lambda: multiply_pairs(a["pairs"], offsets, a["mask"][:2]),
        "first: needs \\[5": lambda: prepend(a["x"], offsets, a["first"][:4]),
        "x: needs one dimension": lambda: differences(a["x"], offsets),
    }
    for message, call in wrong.items():
        with pytest.raises(DataError, match=message):
            call()
