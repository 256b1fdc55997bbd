"""Mixture of experts against a dense masked sum in float64; indices, policies, what is kept, what is refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from _memory_meter import PeakBytes, SavedBytes
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cordillera.errors import DataError
from cordillera.kernels.grouped_experts import sorted_index
from cordillera.kernels.moe import POLICIES, expert_index, expert_mlp
from cordillera.kernels.numba_experts import activated, differentiated

EXACT = [policy for policy in POLICIES if policy != "AB8"]


def routed(tokens: int, experts: int, choices: int, seed: int = 0, masked: float = 0.0) -> Tensor:
    """Different experts of each token, some of them masked out."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.rand(tokens, experts, generator=generator).argsort(1)[:, :choices]
    return found.masked_fill(torch.rand(tokens, choices, generator=generator) < masked, -1)


def layer(
    tokens: int = 20, experts: int = 4, choices: int = 2, width: int = 6, hidden: int = 10, *,
    seed: int = 0, gated: bool = True, dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Tokens, gates, ``w1``, ``w3`` and ``w2``."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(tokens, width), (tokens, choices), (experts, width, hidden), (experts, hidden, width)]
    shapes += [(experts, width, hidden)] if gated else []
    made = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    made = [tensor.requires_grad_() for tensor in made]
    return made[0], made[1], made[2], made[3], made[4] if gated else None


def dense(x: Tensor, experts: Tensor, gates: Tensor, w1: Tensor, w3: Tensor, w2: Tensor | None) -> Tensor:
    """Every expert for every token, those that are not chosen weighted by 0."""
    weights = x.new_zeros(len(x), len(w1) + 1).scatter_add(1, experts.long() % (len(w1) + 1), gates)[:, :-1]
    hidden = torch.einsum("ld,edh->leh", x, w1)
    hidden = hidden / (1 + torch.exp(-hidden))
    if w2 is not None:
        hidden = hidden * torch.einsum("ld,edh->leh", x, w2)
    return torch.einsum("le,leh,ehd->ld", weights, hidden, w3)


def run(experts: Tensor, tensors, policy: str = "AB", gradient: Tensor | None = None):
    """Output, and gradients of tokens, gates and weights."""
    x, gates, w1, w3, w2 = tensors
    out = expert_mlp(x, experts, gates, w1, w3, w2, policy=policy)
    if gradient is None:
        gradient = torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device).view(out.shape)
    return out, *torch.autograd.grad(out, [t for t in tensors if t is not None], gradient)


@settings(max_examples=40)
@given(tokens=st.integers(0, 60), experts=st.integers(1, 9), data=st.data())
def test_indices_are_those_of_a_stable_sort(tokens: int, experts: int, data) -> None:
    choices = data.draw(st.integers(1, experts))
    chosen = routed(
        tokens, experts, choices, data.draw(st.integers(0, 99)), data.draw(st.sampled_from([0.0, 0.5, 1.0]))
    )
    slots, positions, offsets = expert_index(chosen, experts)
    flat, of_slot = chosen.flatten(), positions.flatten()
    assert offsets[0] == 0
    assert int(offsets[-1]) == len(slots) == int((flat >= 0).sum())
    assert offsets.diff().tolist() == [int((flat == expert).sum()) for expert in range(experts)]
    for expert in range(experts):
        own = slots[offsets[expert] : offsets[expert + 1]].long()
        assert bool((flat[own] == expert).all())
        assert bool((own.diff() > 0).all())
    assert torch.equal(of_slot[slots.long()].long(), torch.arange(len(slots)))
    assert torch.equal(of_slot < 0, flat < 0)


def test_the_worked_example_of_the_paper() -> None:
    """With the pair of its second token, which its print leaves out."""
    chosen = torch.tensor([[2, 3], [0, 1], [0, 3], [1, 2], [0, 3]])
    slots, positions, offsets = expert_index(chosen, 4)
    assert (slots // 2).tolist() == [1, 2, 4, 1, 3, 0, 3, 0, 2, 4]
    assert offsets.tolist() == [0, 3, 5, 7, 10]
    assert positions[0].tolist() == [5, 7]


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("policy", EXACT)
def test_layers_are_the_dense_masked_sum(policy: str, gated: bool) -> None:
    for chosen in (
        routed(20, 4, 2), routed(20, 4, 1), routed(20, 4, 4), routed(20, 4, 2, masked=0.4), torch.full((20, 1), 2),
        torch.full((20, 2), -1), routed(20, 4, 2)[:0],
    ):  # fmt: skip
        tensors = layer(len(chosen), choices=chosen.shape[1], gated=gated)
        found = run(chosen, tensors, policy)
        x, gates, w1, w3, w2 = tensors
        wanted = dense(x, chosen, gates, w1, w3, w2)
        gradient = torch.linspace(-1, 1, wanted.numel(), dtype=wanted.dtype).view(wanted.shape)
        grads = torch.autograd.grad(wanted, [t for t in tensors if t is not None], gradient)
        for one, other in zip(found, (wanted, *grads), strict=True):
            torch.testing.assert_close(one, other, atol=1e-10, rtol=1e-10)
    # masked choices have gates without a gradient, experts without tokens weights without one
    _, _, dgates, dw1, *_ = run(torch.full((20, 2), -1), layer(), policy)
    assert not dgates.any()
    assert not dw1.any()


@pytest.mark.cases(2)
@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 2e-6), (torch.bfloat16, 8e-3)])
@pytest.mark.parametrize("gated", [True, False])
def test_kernels_between_products_are_those_of_64_bits(dtype: torch.dtype, error: float, gated: bool) -> None:
    generator = torch.Generator().manual_seed(5)
    a, b, u = ((3 * torch.randn(2, 2500, 37, generator=generator)).sum(0).to(dtype) for _ in range(3))
    a[0, :6] = torch.tensor([0.0, -60.0, 60.0, -1e4, 1e4, -0.0])
    other = b if gated else None
    wide = [x.double() for x in (a, b, u)]
    expected = (
        activated(wide[0], wide[1] if gated else None),
        *differentiated(*wide[:1], wide[1] if gated else None, wide[2]),
    )
    found = {}
    for threads in (1, 2):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        found[threads] = (activated(a, other), *differentiated(a, other, u.clone()))
        torch.set_num_threads(before)
    assert all(torch.equal(one, two) for one, two in zip(found[1], found[2], strict=True))
    assert torch.equal(found[1][0], found[1][1])
    largest = ((found[1][0].double() - expected[0]).abs() / (expected[0].abs() + 1e-20)).max()
    assert float(largest) <= error
    for number, (one, exact) in enumerate(zip(found[1], expected, strict=True)):
        if number != 3 or gated:  # without b there is no gradient of it
            assert float((one.double() - exact).norm()) <= error * float(exact.norm())


def test_kernels_between_products_keep_what_is_not_finite() -> None:
    a = torch.tensor([[torch.nan, torch.inf, -torch.inf, 1.0, 1.0, 1.0]])
    b = torch.tensor([[1.0, 1.0, 1.0, torch.nan, torch.inf, 1.0]])
    assert activated(a, b).isfinite().tolist() == [[False] * 5 + [True]]
    y, da, db, sums = differentiated(a, b, torch.ones(1, 6))
    for found in (y, da):
        assert found.isfinite().tolist() == [[False] * 5 + [True]]
    assert db.isfinite().tolist() == [[False] * 3 + [True] * 3]
    assert not sums.isfinite().any()


def test_gradients_are_those_of_differences() -> None:
    chosen = routed(5, 3, 2, masked=0.2)
    x, gates, w1, w3, w2 = layer(5, 3, 2, 3, 4)
    for policy in EXACT:
        assert torch.autograd.gradcheck(
            lambda *t, policy=policy: expert_mlp(t[0], chosen, *t[1:], policy=policy), (x, gates, w1, w3, w2)
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_policies_differ_in_what_they_keep_alone(dtype: torch.dtype) -> None:
    chosen, tensors = routed(300, 8, 2), layer(300, 8, 2, 16, 32, dtype=dtype)
    wanted = run(chosen, tensors, "ABY")
    for policy in POLICIES:
        found = run(chosen, tensors, policy)
        assert torch.equal(found[0], wanted[0])
        for one, other in zip(found[1:], wanted[1:], strict=True):
            tolerance = 3e-2 if policy == "AB8" else 1e-6 if dtype == torch.float32 else 0.0
            assert float((one - other).norm()) <= tolerance * float(other.norm()), policy
    assert torch.equal(run(chosen, tensors, "X")[1], run(chosen, tensors, "X")[1])


def test_a_second_backward_is_equal_to_the_first() -> None:
    chosen, tensors = routed(50, 4, 2), layer(50, dtype=torch.float32)
    for policy in POLICIES:
        x, gates, w1, w3, w2 = tensors
        out = expert_mlp(x, chosen, gates, w1, w3, w2, policy=policy)
        first = torch.autograd.grad(out.sum(), tensors, retain_graph=True)
        second = torch.autograd.grad(out.sum(), tensors)
        assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_kept_is_what_the_formula_says(policy: str, gated: bool) -> None:
    tokens, experts, choices, width, hidden = 64, 4, 2, 8, 32
    chosen = routed(tokens, experts, choices)
    x, gates, w1, w3, w2 = layer(tokens, experts, choices, width, hidden, gated=gated, dtype=torch.float32)
    with SavedBytes(without=[w1, w3, *([w2] if w2 is not None else [])]) as saved:
        expert_mlp(x, chosen, gates, w1, w3, w2, policy=policy)
    n, products = tokens * choices, 2 if gated else 1
    of_row = {
        "ABY": 4 * hidden * (products + 1),
        "AB": 4 * hidden * products,
        "AB8": (hidden + 4) * products,
        "X": 0,
    }[policy]
    index = 4 * n + 8 * (experts + 1)
    assert saved.total == 4 * tokens * width + 4 * n + index + n * of_row


def test_a_backward_pass_makes_nothing_as_large_as_what_is_kept() -> None:
    chosen, tensors = routed(2000, 16, 4), layer(2000, 16, 4, 8, 64, dtype=torch.float32)
    with PeakBytes() as meter:
        run(chosen, tensors)
    assert meter.peak < 1.5 * chosen.numel() * 2 * 64 * 4


def test_tokens_may_be_permuted_and_experts_relabelled() -> None:
    chosen = routed(30, 5, 2)
    x, gates, w1, w3, w2 = layer(30, 5)
    out = expert_mlp(x, chosen, gates, w1, w3, w2)
    order, labels = torch.randperm(30), torch.randperm(5)
    moved = expert_mlp(x[order], chosen[order], gates[order], w1, w3, w2)
    torch.testing.assert_close(moved, out[order], atol=1e-12, rtol=1e-12)
    back = labels.argsort()
    relabelled = expert_mlp(x, labels[chosen], gates, w1[back], w3[back], w2[back])
    torch.testing.assert_close(relabelled, out, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(expert_mlp(x, chosen, 3 * gates, w1, w3, w2), 3 * out, atol=1e-12, rtol=1e-12)


def test_a_token_that_is_nan_spoils_itself_alone() -> None:
    chosen, tensors = routed(30, 4, 2), layer(30, dtype=torch.float32)
    x, gates, w1, w3, w2 = tensors
    before = expert_mlp(x, chosen, gates, w1, w3, w2)
    spoilt = x.detach().clone()
    spoilt[7] = torch.nan
    after = expert_mlp(spoilt, chosen, gates, w1, w3, w2)
    others = torch.arange(30) != 7
    assert torch.equal(after[others], before[others])
    assert bool(after[7].isnan().all())
    masked = expert_mlp(spoilt, chosen.masked_fill(~others[:, None], -1), gates, w1, w3, w2)
    assert not masked[7].any()


def test_experts_of_many_tokens_are_computed_in_pieces(monkeypatch) -> None:
    from cordillera.kernels import moe

    chosen, tensors = routed(100, 2, 1), layer(100, 2, 1)
    whole = run(chosen, tensors)
    monkeypatch.setattr(moe, "_ROWS", 7)
    for one, other in zip(run(chosen, tensors), whole, strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-12)


def test_operators_are_what_torch_expects() -> None:
    chosen = routed(12, 3, 2)
    x, gates, w1, w3, w2 = layer(12, 3, dtype=torch.float32)
    slots, _, offsets = expert_index(chosen, 3)
    torch.library.opcheck(
        torch.ops.cordillera.expert_mlp.default, (x, gates, slots, offsets, w1, w3, w2, "AB"),
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )  # fmt: skip


@pytest.fixture
def like_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute on this machine's CPU what GPUs compute."""
    monkeypatch.setattr("cordillera.kernels.moe._on_gpu", lambda x: True)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("routing", ["all", "masked", "one expert", "nothing"])
def test_grouped_products_compute_what_experts_one_after_another_do(
    routing: str, policy: str, gated: bool, request: pytest.FixtureRequest
) -> None:
    chosen, tensors = routed(60, 6, 2, seed=3), layer(60, 6, 2, 16, 32, gated=gated, dtype=torch.float32)
    if routing != "all":
        masks = {"masked": chosen % 3 == 1, "one expert": chosen != 4, "nothing": torch.ones(60, 2, dtype=torch.bool)}
        chosen = chosen.masked_fill(masks[routing], -1)
    expected = run(chosen, tensors, policy)
    request.getfixturevalue("like_a_gpu")
    found = run(chosen, tensors, policy)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=2e-2 if policy == "AB8" else 2e-5, rtol=2e-5)
    again = run(chosen, tensors, policy)
    assert all(torch.equal(one, other) for one, other in zip(found, again, strict=True))


@pytest.mark.parametrize("share", [0.0, 0.4])
def test_sorted_choices_are_in_the_order_that_counting_finds(share: float) -> None:
    chosen = routed(300, 7, 3)
    chosen = chosen.masked_fill(torch.rand(chosen.shape) < share, -1)
    slots, positions, offsets = sorted_index(chosen, 7)
    expected = expert_index(chosen, 7)
    n = int(offsets[-1])
    assert torch.equal(slots[:n], expected.slots)
    assert torch.equal(positions, expected.positions)
    assert torch.equal(offsets, expected.offsets)


@pytest.mark.usefixtures("like_a_gpu")
def test_grouped_products_keep_no_more_and_drop_undefined_rows() -> None:
    chosen = routed(64, 4, 2).masked_fill(torch.arange(64)[:, None] % 4 == 0, -1)
    x, gates, w1, w3, w2 = layer(64, 4, 2, 16, 32, dtype=torch.float32)
    assert w2 is not None
    with SavedBytes(without=[w1, w3, w2]) as saved:
        out = expert_mlp(x, chosen, gates, w1, w3, w2)
    assert saved.total == 4 * 64 * 16 + 4 * 128 + 4 * 128 + 8 * 5 + 128 * 2 * 4 * 32
    assert not out[::4].any()
    (of_gates,) = torch.autograd.grad(out.sum(), gates)
    assert not of_gates[::4].any()


@pytest.mark.usefixtures("like_a_gpu")
@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"dtype": torch.float64}, "x: is torch.float64, experts on a GPU need 32 or 16 bits"),
        ({"width": 6}, "x: has a width of 6, experts on a GPU need a multiple of 4"),
        ({"hidden": 12, "dtype": torch.bfloat16}, "w1: has a width of 12, experts on a GPU need a multiple of 8"),
    ],
)
def test_what_grouped_products_do_not_take_is_refused(change: dict[str, Any], named: str) -> None:
    x, gates, w1, w3, w2 = layer(**{"width": 16, "hidden": 32, "dtype": torch.float32, **change})
    with pytest.raises(DataError, match=re.escape(named)):
        expert_mlp(x, routed(20, 4, 2), gates, w1, w3, w2)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-4), (torch.bfloat16, 4e-2)])
def test_gpus_compute_what_cpus_do_without_being_waited_for(policy: str, dtype: torch.dtype, error: float) -> None:
    chosen, tensors = routed(500, 8, 2), layer(500, 8, 2, 64, 128, dtype=dtype)
    moved = [None if one is None else one.detach().cuda().requires_grad_() for one in tensors]
    there = chosen.cuda()
    expected = run(chosen, tensors, policy)
    torch.cuda.synchronize()
    if dtype == torch.bfloat16 and torch.cuda.get_device_capability() >= (9, 0):  # others loop over experts
        torch.cuda.set_sync_debug_mode("error")
    try:
        found = run(there, moved, policy)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    error = max(error, 1e-2) if policy == "AB8" else error  # a code may be the next, as products differ in the last bit
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.detach().cpu(), other, atol=error * float(other.detach().abs().max()), rtol=0)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"experts": torch.tensor([[0, 4], [1, 2]])}, "experts: token 0 is routed to expert 4 of 4"),
        ({"experts": torch.tensor([[0, 1], [-2, 2]])}, "experts: token 1 is routed to expert -2 of 4"),
        ({"experts": torch.tensor([[0, 1], [2, 2]])}, "experts: token 1 chooses an expert twice"),
        ({"experts": torch.tensor([[0.0, 1.0], [2.0, 3.0]])}, "experts: needs integers"),
        ({"experts": torch.tensor([[0, 1]])}, "experts: needs [2, k]"),
        ({"gates": torch.ones(2, 3)}, "gates: needs the shape of experts"),
        ({"x": torch.ones(2, 6, 1)}, "x: needs [tokens, d]"),
        ({"x": torch.ones(2, 7)}, "w1: needs [E, 7, h]"),
        ({"w3": torch.ones(4, 6, 10)}, "w3: needs (4, 10, 6)"),
        ({"w2": torch.ones(4, 6, 11)}, "w2: needs the shape of w1"),
        ({"w3": torch.ones(4, 10, 6).double()}, "w3: is torch.float64"),
        ({"policy": "ALL"}, "policy: 'ALL' is not known"),
        ({"experts": torch.zeros(2, 5, dtype=torch.int64), "gates": torch.ones(2, 5)}, "experts: token 0 chooses"),
    ],
)
def test_mistakes_name_the_argument(change: dict, named: str) -> None:
    x, gates, w1, w3, w2 = (t.detach() for t in layer(2, dtype=torch.float32))
    given = {"x": x, "experts": torch.tensor([[0, 1], [3, 2]]), "gates": gates, "w1": w1, "w3": w3, "w2": w2} | change
    with pytest.raises(DataError) as error:
        expert_mlp(**given)
    assert str(error.value).startswith(named)
