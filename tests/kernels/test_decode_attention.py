"""Attention of a few new tokens against dense attention in float64, and its independence of what is beside them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cordillera.kernels.attention.decoding import MOST_TOKENS, decode_attention, is_supported


def _ancestors(parents: list[int]) -> Tensor:
    seen = torch.eye(len(parents), dtype=torch.bool)
    for place, parent in enumerate(parents):
        if parent >= 0:
            seen[place] |= seen[parent]
    return seen


def _draw(shape: tuple[int, ...], seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _expected(q: Tensor, keys: Tensor, values: Tensor, seen: Tensor) -> Tensor:
    """One sequence: ``q [n, H, D]``, ``keys [G, m, D]``, ``seen [n, m]``; float64."""
    out = torch.empty(q.shape, dtype=torch.float64)
    for head in range(q.shape[1]):
        group = head * len(keys) // q.shape[1]
        scores = q[:, head].double() @ keys[group].double().T / math.sqrt(q.shape[2])
        out[:, head] = scores.masked_fill(~seen, -math.inf).softmax(-1) @ values[group].double()
    return out


def _paged(parts: tuple[Tensor, Tensor], page: int, seed: int) -> tuple[list[Tensor], Tensor]:
    """``[B, G, m, D]`` in pages of a length that divides ``m``, in an order that is drawn, and the pages of each."""
    batch, groups, length, width = parts[0].shape
    count = batch * length // page
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    tables = order.view(batch, length // page)
    found = []
    for part in parts:
        pages = part.new_empty(count, groups, page, width)
        pages[order] = part.unflatten(2, (-1, page)).transpose(1, 2).flatten(0, 1)
        found.append(pages)
    return found, tables


_TREES = st.integers(1, MOST_TOKENS).flatmap(lambda n: st.tuples(*(st.integers(-1, i - 1) for i in range(n))).map(list))


@settings(max_examples=60)
@given(
    trees=st.lists(_TREES, min_size=1, max_size=3),
    cached=st.lists(st.integers(0, 70), min_size=3, max_size=3),
    heads=st.sampled_from([(1, 1), (4, 2), (9, 3), (20, 1)]),
    width=st.sampled_from([32, 64]),
    page=st.sampled_from([16, 96]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 99),
)
def test_new_tokens_see_the_cache_and_their_ancestors(
    trees: list[list[int]],
    cached: list[int],
    heads: tuple[int, int],
    width: int,
    page: int,
    dtype: torch.dtype,
    seed: int,
) -> None:
    many, groups = heads
    tokens = sum(len(tree) for tree in trees)
    q = _draw((tokens, many, width), seed, dtype)
    k, v = (_draw((tokens, groups, width), seed + n, dtype) for n in (1, 2))
    keys, values = (torch.full((3, groups, 96, width), math.nan, dtype=dtype) for _ in range(2))
    sequences, seen, start = [], torch.zeros(tokens, max(len(tree) for tree in trees), dtype=torch.bool), 0
    for b, tree in enumerate(trees):
        held = cached[b]
        keys[b, :, :held], values[b, :, :held] = (_draw((groups, held, width), seed + n + b, dtype) for n in (5, 9))
        sequences.append((start, len(tree), held))
        seen[start : start + len(tree), : len(tree)] = _ancestors(tree)
        start += len(tree)
    assert is_supported(dtype, keys.device, width)
    paged, tables = _paged((keys, values), page, seed)
    found = decode_attention(q, k, v, *paged, torch.tensor(sequences), tables, seen)
    keys, values = (one[tables].transpose(1, 2).flatten(2, 3) for one in paged)  # of these sequences, in order
    for b, (start, new, held) in enumerate(sequences):
        rows = slice(start, start + new)
        assert torch.equal(keys[b, :, held : held + new], k[rows].transpose(0, 1))
        assert torch.equal(values[b, :, held : held + new], v[rows].transpose(0, 1))
        visible = torch.cat([torch.ones(new, held, dtype=torch.bool), seen[rows, :new]], 1)
        expected = _expected(q[rows], keys[b, :, : held + new], values[b, :, : held + new], visible)
        tolerance = 2e-6 if dtype == torch.float32 else 2**-8
        torch.testing.assert_close(found[rows].double(), expected, rtol=tolerance, atol=tolerance)
        assert bool(keys[b, :, held + new :].isnan().all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_gets_the_same_bits_alone_and_in_a_tree_with_infinite_siblings(dtype: torch.dtype, threads) -> None:
    """Node 5 follows 4, 1 and 0; they are also computed one after the other, without the rest of the tree."""
    parents, path = [-1, 0, 0, -1, 1, 4, 2, 3], [0, 1, 4, 5]
    width, held = 64, 37
    q = _draw((8, 9, width), 0, dtype)
    k, v = (_draw((8, 3, width), n, dtype) for n in (1, 2))
    cache = [_draw((1, 3, held, width), n, dtype) for n in (3, 4)]
    v[[2, 3, 6, 7]], k[[3, 7]] = math.inf, math.nan

    def fresh(page: int) -> tuple[list[Tensor], Tensor]:
        keys, values = (torch.cat([part, part.new_full((1, 3, 11, width), math.nan)], 2) for part in cache)
        return _paged((keys, values), page, page)

    (keys, values), tables = fresh(16)
    alone = []
    for place, node in enumerate(path):
        one, row, itself = torch.tensor([[0, 1, held + place]]), slice(node, node + 1), torch.ones(1, 1).bool()
        alone.append(decode_attention(q[row], k[row], v[row], keys, values, one, tables, itself))
    for count, page in ((1, 16), (2, 48)):
        threads(count)
        pages, tables = fresh(page)
        together = decode_attention(q, k, v, *pages, torch.tensor([[0, 8, held]]), tables, _ancestors(parents))
        assert torch.equal(together[path], torch.cat(alone))
        assert bool(together[[2, 3]].isnan().any())
        assert torch.get_num_threads() == count


def test_nan_in_what_is_seen_is_passed_on() -> None:
    q, k, v = (_draw((1, 2, 32), n, torch.float32) for n in range(3))
    for part in (q, k, v):
        broken = [one.clone() for one in (q, k, v)]
        broken[[q is part, k is part, v is part].index(True)][0, 1, 3] = math.nan
        keys, values = (torch.zeros(1, 2, 4, 32) for _ in range(2))
        one, table, seen = torch.tensor([[0, 1, 3]]), torch.tensor([[0]]), torch.ones(1, 1).bool()
        found = decode_attention(*broken, keys, values, one, table, seen)
        assert bool(found[0, 1].isnan().any())
        assert bool(found[0, 0].isfinite().all())


def test_huge_scores_stay_finite() -> None:
    q = torch.full((1, 1, 32), 1e4)
    k, v = torch.full((1, 1, 32), 1e4), _draw((1, 1, 32), 0, torch.float32)
    keys, values = torch.full((1, 1, 5, 32), -1e4), torch.ones(1, 1, 5, 32)
    one, table, seen = torch.tensor([[0, 1, 4]]), torch.tensor([[0]]), torch.ones(1, 1).bool()
    found = decode_attention(q, k, v, keys, values, one, table, seen)
    torch.testing.assert_close(found, v)


@pytest.mark.parametrize(
    ("dtype", "device", "width"), [("float64", "cpu", 32), ("bfloat16", "cpu", 40), ("bfloat16", "meta", 32)]
)
def test_what_the_kernel_is_not_made_for_is_known(dtype: str, device: str, width: int) -> None:
    assert not is_supported(getattr(torch, dtype), torch.device(device), width)
