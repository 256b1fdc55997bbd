"""Mixture-of-experts layers that compute on tokens in place, with a policy of what to keep for the backward pass.

Tokens are routed by index alone: no buffer of routed tokens is kept, no token is dropped, and no token is padded. On
CPUs, one expert after another gathers its tokens, computes, and adds to the output; on GPUs, PyTorch's grouped products
compute all experts at once (:mod:`cordillera.kernels.grouped_experts`). Nothing of the size of all routed tokens but
the tensors of the policy is kept.

Source: MoEBlaze (Zhang et al. 2026, arXiv 2601.05296), index structures (section 4.1) and algorithm 1; the gradient of
the gates without the experts' outputs as in SonicMoE (arXiv 2512.14080). The stable counting sort and the policies
other than ``ABY`` are ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from cordillera.errors import DataError
from cordillera.kernels.grouped_experts import check_grouped, grouped_backward, grouped_forward, sorted_index
from cordillera.kernels.host_memory import on_huge_pages
from cordillera.kernels.numba_experts import activated, add_rows, count_experts, differentiated, place_choices

SavingPolicy = Literal["ABY", "AB", "AB8", "X"]

POLICIES: tuple[SavingPolicy, ...] = ("ABY", "AB", "AB8", "X")
_ROWS = 2048  # rows of an expert that are computed at a time
_LARGEST_CODE = 127


class ExpertIndex(NamedTuple):
    """Routed tokens in the order of their experts.

    Attributes:
        slots: Choice at each position, ``token * k + choice``, ascending within an expert, ``int32 [n]``; choices that
            are masked out have no position, and stand last on a GPU, ``[L * k]``.
        positions: Position of each choice, ``int32 [L, k]``; -1 for a choice that is masked out.
        offsets: First position of each expert, and ``n``; ``int64 [E + 1]``.
    """

    slots: Tensor
    positions: Tensor
    offsets: Tensor


def expert_index(experts: Tensor, num_experts: int) -> ExpertIndex:
    """Bring routed tokens into the order of their experts, stably and without atomics.

    Args:
        experts: Expert of each choice, integers ``[L, k]``, those of a token all different; -1 masks a choice out.
        num_experts: Number of experts ``E``.

    Raises:
        DataError: If an expert is out of range or chosen twice by a token, or there are more than 2^31 - 1 choices. On
            a GPU, which is not waited for, an expert out of range fails there, and one that is chosen twice counts
            twice.
    """
    if experts.dim() != 2 or experts.is_floating_point():
        raise DataError(
            f"needs integers [tokens, k], got {experts.dtype} of shape {tuple(experts.shape)}", where="experts"
        )
    if experts.numel() >= 2**31:
        raise DataError(f"{experts.numel():,} choices are more than 2^31 - 1", where="experts")
    if _on_gpu(experts):
        torch._assert_async(((experts >= -1) & (experts < num_experts)).all())
        return ExpertIndex(*sorted_index(experts, num_experts))
    _check_experts(experts, num_experts)
    flat = experts.reshape(-1).long()
    slots = torch.empty(flat.numel(), dtype=torch.int32)
    positions = torch.empty(experts.shape, dtype=torch.int32)
    offsets = torch.zeros(num_experts + 1, dtype=torch.int64)
    count_experts(flat.numpy(), offsets.numpy())
    place_choices(flat.numpy(), offsets.numpy(), slots.numpy(), positions.view(-1).numpy())
    return ExpertIndex(slots[: int(offsets[-1])], positions, offsets)


def _on_gpu(x: Tensor) -> bool:
    return x.device.type != "cpu"


def _check_experts(experts: Tensor, num_experts: int) -> None:
    wrong = ((experts < -1) | (experts >= num_experts)).nonzero()
    if len(wrong):
        token, choice = wrong[0].tolist()
        raise DataError(
            f"token {token} is routed to expert {int(experts[token, choice])} of {num_experts}", where="experts"
        )
    ordered = experts.sort(1).values
    twice = ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).nonzero()
    if len(twice):
        token = int(twice[0, 0])
        raise DataError(f"token {token} chooses an expert twice: {experts[token].tolist()}", where="experts")


def expert_mlp(
    x: Tensor,
    experts: Tensor,
    gates: Tensor,
    w1: Tensor,
    w3: Tensor,
    w2: Tensor | None = None,
    *,
    policy: SavingPolicy = "AB",
) -> Tensor:
    """Compute ``sum_j gates[i, j] * mlp_e(x[i])`` with ``e = experts[i, j]``. Differentiable.

    The MLP of expert ``e`` is ``(silu(x w1[e]) * (x w2[e])) w3[e]``, without ``w2`` ``silu(x w1[e]) w3[e]``.

    Args:
        x: Tokens, ``[L, d]``.
        experts: Expert of each choice, integers ``[L, k]``; -1 masks a choice out, which then adds nothing.
        gates: Weight of each choice, ``[L, k]``.
        w1: ``[E, d, h]``.
        w3: ``[E, h, d]``.
        w2: ``[E, d, h]``, or None.
        policy: What is kept for the backward pass beside ``x``, the gates and the indices: ``"ABY"`` both products
            with ``x`` and the input of ``w3`` (the paper's), ``"AB"`` the products, ``"AB8"`` the products in 8 bits
            with a scale for each row, off by at most 1 / 254 of the largest in it, ``"X"`` nothing, so that they are
            computed again. Outputs do not depend on it; gradients do with ``"AB8"`` alone.

    Returns:
        ``[L, d]``, in the dtype of ``x``.

    Raises:
        DataError: If shapes or dtypes do not fit together; the message names the argument.
    """
    _check(x, experts, gates, w1, w3, w2, policy)
    slots, _, offsets = expert_index(experts, len(w1))
    out: Tensor = _forward(x, gates, slots, offsets, w1, w3, w2, policy)[0]
    return out


def _check(x: Tensor, experts: Tensor, gates: Tensor, w1: Tensor, w3: Tensor, w2: Tensor | None, policy: str) -> None:
    if policy not in POLICIES:
        raise DataError(f"{policy!r} is not known", where="policy", remedy=", ".join(POLICIES))
    if x.dim() != 2:
        raise DataError(f"needs [tokens, d], got {tuple(x.shape)}", where="x")
    if experts.dim() != 2 or len(experts) != len(x):
        raise DataError(f"needs [{len(x)}, k], got {tuple(experts.shape)}", where="experts")
    if gates.shape != experts.shape:
        raise DataError(f"needs the shape of experts, {tuple(experts.shape)}, got {tuple(gates.shape)}", where="gates")
    if w1.dim() != 3 or w1.shape[1] != x.shape[1]:
        raise DataError(f"needs [E, {x.shape[1]}, h], got {tuple(w1.shape)}", where="w1")
    wanted = (w1.shape[0], w1.shape[2], w1.shape[1])
    if w3.shape != wanted:
        raise DataError(f"needs {wanted}, got {tuple(w3.shape)}", where="w3")
    if w2 is not None and w2.shape != w1.shape:
        raise DataError(f"needs the shape of w1, {tuple(w1.shape)}, got {tuple(w2.shape)}", where="w2")
    if _on_gpu(x):
        check_grouped(x, w1)
    tensors = {"gates": gates, "w1": w1, "w3": w3} | ({} if w2 is None else {"w2": w2})
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or (name != "gates" and tensor.dtype != x.dtype):
            raise DataError(f"is {tensor.dtype}, the tokens are {x.dtype}", where=name)


@torch.library.custom_op("cordillera::expert_mlp", mutates_args=())
def _forward(
    x: Tensor, gates: Tensor, slots: Tensor, offsets: Tensor, w1: Tensor, w3: Tensor, w2: Tensor | None, policy: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the output ``[L, d]`` and the tensors that the policy keeps: products with ``x``, and the rest."""
    if _on_gpu(x):
        return _forward_grouped(x, gates, slots, offsets, w1, w3, w2, policy)
    kept = _room_for_kept(x, slots, w1, w2, policy)
    for tensor in kept:
        on_huge_pages(tensor)  # the largest blocks are mapped again in each step, page by page
    out = torch.zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32))
    weight_of = gates.reshape(-1)
    for expert, part in _parts(offsets):
        own = slots[part]
        tokens = own // gates.shape[1]
        rows, up = x.index_select(0, tokens), None if w2 is None else w2[expert]
        y = _hidden(rows, w1[expert], up, kept, part, policy)
        add_rows(out, tokens, y @ w3[expert], weight_of.index_select(0, own))
    return out.to(x.dtype, copy=True) if out.dtype != x.dtype else out, *kept


def _forward_grouped(
    x: Tensor, gates: Tensor, slots: Tensor, offsets: Tensor, w1: Tensor, w3: Tensor, w2: Tensor | None, policy: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    out, a, b, y = grouped_forward(x, gates, slots, offsets, w1, w3, w2)
    if policy in ("X", "AB8"):
        first, second, rest = _room_for_kept(x, slots, w1, w2, policy)
        if policy == "AB8":
            _keep_in_8_bits(a, b, first, second, rest)
        return out, first, second, rest
    nothing = (0, w1.shape[2])
    return out, a, x.new_empty(nothing) if b is None else b, y if policy == "ABY" else x.new_empty(nothing)


@_forward.register_fake
def _(
    x: Tensor, gates: Tensor, slots: Tensor, offsets: Tensor, w1: Tensor, w3: Tensor, w2: Tensor | None, policy: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return torch.empty_like(x), *_room_for_kept(x, slots, w1, w2, policy)


@torch.library.custom_op("cordillera::expert_mlp_backward", mutates_args=())
def _backward(
    dout: Tensor, x: Tensor, gates: Tensor, slots: Tensor, offsets: Tensor, w1: Tensor, w3: Tensor, w2: Tensor | None,
    first: Tensor, second: Tensor, rest: Tensor, policy: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute the gradients of ``x``, the gates, ``w1``, ``w3`` and ``w2`` (``[0]`` without it)."""
    if _on_gpu(x):
        return _backward_grouped(dout, x, gates, slots, offsets, w1, w3, w2, first, second, rest, policy)
    dx = torch.zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32))
    dgates, weight_of = torch.zeros(gates.numel(), dtype=gates.dtype), gates.reshape(-1)
    dw1, dw3 = torch.empty_like(w1), torch.empty_like(w3)
    dw2 = w1.new_empty(0) if w2 is None else torch.empty_like(w2)
    idle = (offsets.diff() == 0).nonzero()[:, 0]
    for weight in (dw1, dw3, dw2 if w2 is not None else dw1):
        weight[idle] = 0
    for expert, part in _parts(offsets):
        new = part.start == int(offsets[expert])
        own = slots[part]
        tokens, gate = own // gates.shape[1], weight_of.index_select(0, own)
        rows, incoming = x.index_select(0, tokens), dout.index_select(0, tokens)
        up = None if w2 is None else w2[expert]
        a, b = _kept(part, rows, w1[expert], up, first, second, rest, policy)
        y, da, db, sums = differentiated(a, b, incoming @ w3[expert].T, gate)
        dgates[own.long()] = sums.to(gates.dtype)
        _add_product(dw3[expert], rest[part] if policy == "ABY" else y, incoming.mul_(gate[:, None]), new)
        _add_product(dw1[expert], rows, da, new)
        drows = da @ w1[expert].T
        if up is not None:
            _add_product(dw2[expert], rows, db, new)
            drows.addmm_(db, up.T)
        add_rows(dx, tokens, drows)
    return dx.to(x.dtype), dgates.view(gates.shape), dw1, dw3, dw2


def _backward_grouped(
    dout: Tensor, x: Tensor, gates: Tensor, slots: Tensor, offsets: Tensor, w1: Tensor, w3: Tensor, w2: Tensor | None,
    first: Tensor, second: Tensor, rest: Tensor, policy: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    products = None if policy == "X" else _kept(slice(None), x, w1, w2, first, second, rest, policy)
    *found, dw2 = grouped_backward(dout, x, gates, slots, offsets, w1, w3, w2, products)
    dx, dgates, dw1, dw3 = found
    return dx, dgates, dw1, dw3, w1.new_empty(0) if dw2 is None else dw2


@_backward.register_fake
def _(
    dout: Tensor, x: Tensor, gates: Tensor, slots: Tensor, offsets: Tensor, w1: Tensor, w3: Tensor, w2: Tensor | None,
    first: Tensor, second: Tensor, rest: Tensor, policy: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    of_w2 = w1.new_empty(0) if w2 is None else torch.empty_like(w2)
    return torch.empty_like(x), torch.empty_like(gates), torch.empty_like(w1), torch.empty_like(w3), of_w2


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.policy = inputs
    ctx.save_for_backward(*tensors, *output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # else autograd fills zeros of the size of what is kept


def _gradients(ctx: Any, dout: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if dout is None:
        return (None,) * 8
    saved = ctx.saved_tensors  # once, as what a checkpoint computes again can be read once
    dx, dgates, dw1, dw3, dw2 = _backward(dout.contiguous(), *saved, ctx.policy)
    return dx, dgates, None, None, dw1, dw3, dw2 if saved[6] is not None else None, None


_forward.register_autograd(_gradients, setup_context=_setup)


def _add_product(out: Tensor, left: Tensor, right: Tensor, new: bool) -> None:
    """Add ``left^T right`` to ``out``, or overwrite ``out`` if it is ``new``."""
    if new:
        torch.mm(left.T, right, out=out)
    else:
        out.addmm_(left.T, right)


def _parts(offsets: Tensor) -> Iterator[tuple[int, slice]]:
    """Positions of each expert, some of them at a time."""
    for expert, (start, stop) in enumerate(pairwise(offsets.tolist())):
        for first in range(start, stop, _ROWS):
            yield expert, slice(first, min(first + _ROWS, stop))


def _hidden(
    rows: Tensor, w1: Tensor, w2: Tensor | None, kept: tuple[Tensor, Tensor, Tensor], part: slice, policy: str
) -> Tensor:
    """Compute the input of ``w3``; write the tensors that the policy keeps for the positions ``part`` to ``kept``."""
    first, second, rest = kept
    whole = policy in ("ABY", "AB")  # products go where they are kept
    a = torch.mm(rows, w1, out=first[part]) if whole else rows @ w1
    b = None if w2 is None else torch.mm(rows, w2, out=second[part]) if whole else rows @ w2
    y = activated(a, b)
    if policy == "ABY":
        rest[part] = y
    elif policy == "AB8":
        _keep_in_8_bits(a, b, first[part], second[part], rest[part])
    return y


def _keep_in_8_bits(a: Tensor, b: Tensor | None, first: Tensor, second: Tensor, scales: Tensor) -> None:
    """Write products in 8 bits, and the scales of their rows."""
    for number, (target, product) in enumerate(((first, a), (second, b))):
        if product is None:
            continue
        scale = product.abs().amax(1, keepdim=True).float() / _LARGEST_CODE
        scale = torch.where(scale == 0, 1.0, scale)
        target.copy_((product / scale).round_())
        scales[:, number : number + 1] = scale


def _room_for_kept(
    x: Tensor, slots: Tensor, w1: Tensor, w2: Tensor | None, policy: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Tensors for both products, and for the input of ``w3`` or the scales of rows in 8 bits."""
    n, width = slots.shape[0], w1.shape[2]
    dtype = torch.int8 if policy == "AB8" else x.dtype
    products = 0 if policy == "X" else n
    first = x.new_empty((products, width), dtype=dtype)
    second = x.new_empty((products if w2 is not None else 0, width), dtype=dtype)
    if policy == "AB8":
        return first, second, x.new_empty((n, 1 if w2 is None else 2), dtype=torch.float32)
    return first, second, x.new_empty((n if policy == "ABY" else 0, width))


def _kept(
    part: slice, rows: Tensor, w1: Tensor, w2: Tensor | None, first: Tensor, second: Tensor, rest: Tensor, policy: str
) -> tuple[Tensor, Tensor | None]:
    """Products of tokens with both weights: as kept, or computed again."""
    if policy == "X":
        return rows @ w1, None if w2 is None else rows @ w2
    if policy != "AB8":
        return first[part], None if w2 is None else second[part]
    a = (first[part] * rest[part, :1]).to(rows.dtype)
    return a, None if w2 is None else (second[part] * rest[part, 1:]).to(rows.dtype)
