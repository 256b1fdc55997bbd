"""Attention pieces by dense matrices in float64: slow, on every device, and the reference of the other back ends."""

from __future__ import annotations

import torch
from torch import Tensor

from cordillera.kernels.attention.relation import Relation, dense_mask


def forward(q: Tensor, k: Tensor, v: Tensor, relation: Relation, scale: float) -> tuple[Tensor, Tensor]:
    """Compute outputs and log-sum-exps, in float32 or float64, as described in ``partial.partial_attention``."""
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = _scores(q, k, relation, scale)
    lse = scores.logsumexp(-1)  # [KV, H / KV, Tq], -inf without keys
    out = torch.einsum("ngqk,knd->qngd", _probabilities(scores, lse), v.double())
    return out.reshape(q.shape).to(wide), lse.permute(2, 0, 1).reshape(q.shape[:2]).to(wide)


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, relation: Relation, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute gradients in float32 or float64, as described in ``partial.attention_backward``."""
    wide = torch.promote_types(q.dtype, torch.float32)
    grouped = _grouped(q, k)
    heads = lse.double().reshape(grouped[:3]).permute(1, 2, 0)
    probabilities = _probabilities(_scores(q, k, relation, scale), heads)
    dout, out = dout.double(), out.double()
    by_group = dout.reshape(grouped)
    dv = torch.einsum("ngqk,qngd->knd", probabilities, by_group)
    delta = (dout * out).sum(-1).reshape(grouped[:3]).permute(1, 2, 0)
    dscores = probabilities * (torch.einsum("qngd,knd->ngqk", by_group, v.double()) - delta[..., None]) * scale
    dq = torch.einsum("ngqk,knd->qngd", dscores, k.double()).reshape(q.shape)
    dk = torch.einsum("ngqk,qngd->knd", dscores, q.double().reshape(grouped))
    return dq.to(wide), dk.to(wide), dv.to(wide)


def _grouped(q: Tensor, k: Tensor) -> tuple[int, int, int, int]:
    """Shape of queries, grouped by the heads of keys that they use."""
    return len(q), k.shape[1], q.shape[1] // k.shape[1], q.shape[2]


def _scores(q: Tensor, k: Tensor, relation: Relation, scale: float) -> Tensor:
    """``float64 [KV, H / KV, Tq, Tk]``, -inf where a query does not see a key."""
    grouped = q.double().reshape(_grouped(q, k))
    scores = torch.einsum("qngd,knd->ngqk", grouped, k.double()) * scale
    return scores.masked_fill(~dense_mask(relation, len(q), len(k), q.device), -torch.inf)


def _probabilities(scores: Tensor, lse: Tensor) -> Tensor:
    """Softmax, with zeros for a query without keys."""
    return (scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp()
