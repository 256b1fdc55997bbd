"""Summaries of histories that are filled up to one length, by operations that :func:`torch.export.export` takes.

The models of this library run attention over packed rows (:mod:`cordillera.models.ranking.sequence`). These modules
have the same weights and give the same summaries up to rounding, in time and memory that grow with the longest history
of a batch, for HSTU with its square.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from cordillera.models.ranking.sequence import HSTU, HistoryEncoder, HSTUBlock, TargetAttention


class PaddedHistory(nn.Module):
    """Base of the summaries; a subclass defines :meth:`_summary`.

    Args:
        encoder: Trained encoder, whose modules are used.
    """

    def __init__(self, encoder: HistoryEncoder) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, rows: Tensor, is_there: Tensor, candidates: Tensor) -> Tensor:
        """Compute summaries ``[B, d]`` of histories.

        Args:
            rows: Embeddings of the entries, ``[B, L, d]``, oldest first, followed by those of padding.
            is_there: Which of them are entries, ``bool [B, L]``.
            candidates: Embeddings of the candidates, ``[B, d]``.
        """
        lengths, vectors = is_there.sum(1), self.encoder.positions
        ages = lengths[:, None] - 1 - torch.arange(rows.shape[1], device=rows.device)
        x = rows + vectors(ages.clamp(0, vectors.num_embeddings - 1)).to(rows.dtype)
        return self._summary(x, is_there, lengths, candidates)

    def _summary(self, x: Tensor, is_there: Tensor, lengths: Tensor, candidates: Tensor) -> Tensor:
        raise NotImplementedError

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.encoder.heads, self.encoder.head_dim))


class PaddedTargetAttention(PaddedHistory):
    """Target attention; a sample without history has a share of zero of everything."""

    encoder: TargetAttention

    def _summary(self, x: Tensor, is_there: Tensor, lengths: Tensor, candidates: Tensor) -> Tensor:
        own = self.encoder
        q, k, v = (self._split(part) for part in (own.query(candidates), own.key(x), own.value(x)))
        scores = torch.einsum("bhd,blhd->bhl", q, k).float() * own.head_dim**-0.5
        seen = is_there[:, None]
        shares = scores.masked_fill(~seen, torch.finfo(scores.dtype).min).softmax(-1) * seen
        return own.out(torch.einsum("bhl,blhd->bhd", shares.to(v.dtype), v).flatten(1))


class PaddedHSTU(PaddedHistory):
    """HSTU's blocks over a history and its candidate, which is stored last and counts as the entry after the last."""

    encoder: HSTU

    def _summary(self, x: Tensor, is_there: Tensor, lengths: Tensor, candidates: Tensor) -> Tensor:
        x = torch.cat([x, candidates[:, None]], 1)  # [B, L + 1, d]
        places = torch.arange(is_there.shape[1], device=x.device).expand_as(is_there)
        places = torch.cat([places, lengths[:, None]], 1)
        before = places[:, :, None] - places[:, None, :]  # [B, query, key]
        sees = torch.cat([is_there, torch.ones_like(is_there[:, :1])], 1)[:, None] & (before >= 0)
        if self.encoder.window is not None:
            sees = sees & (before < self.encoder.window)
        for block in self.encoder.blocks:
            assert isinstance(block, HSTUBlock)
            u, v, q, k = functional.silu(block.into(block.norm_in(x))).chunk(4, -1)
            q, k, v = (self._split(part) for part in (q, k, v))
            scores = torch.einsum("bihd,bjhd->bhij", q, k).float() * block.head_dim**-0.5
            shares = functional.silu(scores) / block.divisor * sees[:, None]
            found = torch.einsum("bhij,bjhd->bihd", shares.to(v.dtype), v).flatten(2)
            x = x + block.out(block.norm_out(found) * u)
        return x[:, -1]


def padded(encoder: HistoryEncoder) -> PaddedHistory:
    """Return the module for padded histories that has the weights of an ``encoder``."""
    return (PaddedHSTU if isinstance(encoder, HSTU) else PaddedTargetAttention)(encoder)
