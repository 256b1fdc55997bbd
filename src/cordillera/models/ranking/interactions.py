"""Interaction modules of ranking models.

Most take the embeddings of a batch as ``[B, n, d]`` (``B`` samples, ``n`` embeddings, width ``d``) and return either
new embeddings ``[B, m, d]`` or a flat ``[B, outputs]``. Samples never mix, except through batch norm if it is
requested.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cordillera.errors import DataError
from cordillera.kernels.dense.layers import (
    batched_matmul,
    factorization_machine,
    for_batched_matmul,
    left_product,
    linear_relu,
    pairwise_dots,
    stacked_layer_norm,
)

Activation = Literal["none", "relu", "gelu", "silu", "tanh"]
Norm = Literal["none", "layer", "batch"]

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "none": nn.Identity,
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "tanh": nn.Tanh,
}


class StackedLayerNorm(nn.LayerNorm):
    """``LN(concat(first, second) + residual)`` in one pass: ``[B, n, d], [B, m, d], [B, n + m, d] -> [B, n+m, d]``."""

    def __init__(self, width: int) -> None:
        super().__init__(width)

    def forward(self, first: Tensor, second: Tensor, residual: Tensor) -> Tensor:  # type: ignore[override]
        return stacked_layer_norm(first, second, residual, self.weight, self.bias, self.eps)


class MLP(nn.Module):
    """Linear layers with activations: ``[..., inputs] -> [..., width of the last layer]``.

    A hidden layer applies linear, norm, activation and dropout, in this order. The optional output layer applies linear
    and ``output_activation``.

    Args:
        hidden: Widths of the hidden layers; may be empty.
        outputs: Width of the output layer; None for no output layer, so that the last hidden layer's activation is the
            output.
        activation: Activation of the hidden layers: one of :data:`ACTIVATIONS`.
        norm: Norm of the hidden layers: ``layer``, ``batch`` (which mixes samples in training) or ``none``.
        dropout: Probability of zeroing an activation of a hidden layer in training.
        output_activation: Activation of the output layer.

    Raises:
        DataError: there is no such activation or norm.
    """

    def __init__(
        self,
        inputs: int,
        hidden: Sequence[int],
        outputs: int | None = None,
        *,
        activation: Activation = "relu",
        norm: Norm = "none",
        dropout: float = 0.0,
        output_activation: Activation = "none",
    ) -> None:
        super().__init__()
        if norm not in ("layer", "batch", "none"):
            raise DataError(f"no norm {norm!r}", where="MLP", remedy="choose layer, batch or none")
        if activation not in ACTIVATIONS or output_activation not in ACTIVATIONS:
            raise DataError(
                f"no activation {activation!r} or {output_activation!r}",
                where="MLP",
                remedy=f"choose from {', '.join(ACTIVATIONS)}",
            )
        layers: list[nn.Module] = []
        width = inputs
        for size in hidden:
            layers.append(nn.Linear(width, size))
            if norm == "layer":
                layers.append(nn.LayerNorm(size))
            elif norm == "batch":
                layers.append(nn.BatchNorm1d(size))
            if activation != "none":
                layers.append(ACTIVATIONS[activation]())
            if dropout > 0:
                layers.append(nn.Dropout(dropout))
            width = size
        if outputs is not None:
            layers.append(nn.Linear(width, outputs))
            if output_activation != "none":
                layers.append(ACTIVATIONS[output_activation]())
            width = outputs
        self.outputs = width
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return in_turn([*self.layers], x)


def in_turn(layers: list[nn.Module], x: Tensor) -> Tensor:
    """Apply ``layers`` to ``x`` one after another, a linear layer and the ReLU behind it in one kernel."""
    layers = list(layers)
    while layers:
        layer = layers.pop(0)
        hooked = layer._forward_pre_hooks or layer._forward_hooks  # hooks run only if the layer is called
        if isinstance(layer, nn.Linear) and not hooked and layers and isinstance(layers[0], nn.ReLU):
            del layers[0]
            x = linear_relu(x, layer.weight, layer.bias)
        else:
            x = layer(x)
    return x


class RowsMLP(nn.Module):
    """:class:`MLP` with ``options`` whose output is reshaped to embeddings: ``[B, inputs] -> [B, rows, d]``."""

    def __init__(self, inputs: int, hidden: Sequence[int], rows: int, embedding_dim: int, **options: Any) -> None:
        super().__init__()
        self.rows, self.embedding_dim = rows, embedding_dim
        self.mlp = MLP(inputs, hidden, rows * embedding_dim, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x).unflatten(-1, (self.rows, self.embedding_dim))


class DotInteraction(nn.Module):
    """Dot products of all pairs of embeddings: ``[B, n, d] -> [B, n (n - 1) / 2]``.

    Entry order is row-major over the strict lower triangle of ``X X^T``: (1,0), (2,0), (2,1), (3,0), ... Source: Naumov
    et al. 2019, section 2.1.4, and its reference code.

    Args:
        rows: Number ``n`` of embeddings.
        include_diagonal: Whether to include ``x_i . x_i``, which gives ``n (n + 1) / 2`` entries: (0,0), (1,0), (1,1),
            (2,0), ...

    Raises:
        DataError: the input holds another number of embeddings.
    """

    pairs: Tensor
    column_of: Tensor

    def __init__(self, rows: int, include_diagonal: bool = False) -> None:
        super().__init__()
        self.include_diagonal = include_diagonal
        i, j = torch.tril_indices(rows, rows, 0 if include_diagonal else -1)
        self.outputs = i.numel()
        column_of = torch.zeros(rows, rows, dtype=torch.int64)
        column_of[i, j] = column_of[j, i] = torch.arange(self.outputs)
        self.register_buffer("pairs", i * rows + j, persistent=False)  # [pairs], into the flattened X X^T
        self.register_buffer("column_of", column_of.flatten(), persistent=False)  # [n * n], its inverse

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim != 3 or x.shape[1] ** 2 != self.column_of.shape[0]:
            raise DataError(
                f"expected [B, {math.isqrt(len(self.column_of))}, d], got {list(x.shape)}", where="DotInteraction"
            )
        if self.outputs == 0:
            return x.new_zeros(x.shape[0], 0)
        return pairwise_dots(x, self.pairs, self.column_of, self.include_diagonal)


class BiInteraction(nn.Module):
    """Sum of the products of all pairs of rows: ``[..., n, d] -> [..., d]``.

    Computed as half of (square of the sum minus sum of the squares), linear in ``n``. Its sum over ``d`` is the
    second-order term of a factorisation machine. Source: Rendle 2010, lemma 3.1; He and Chua 2017 (arXiv 1708.05027),
    section 3.1.
    """

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * (x.sum(-2).square() - x.square().sum(-2))

    def flops(self, x: Tensor) -> int:
        """Count the operations: sum, square and sum of ``x``; square, difference and half of the result."""
        return 3 * (x.numel() + x[..., 0, :].numel())


class BasicFM(nn.Module):
    """Matrix of all dot products ``X X^T``, flattened: ``[B, n, d] -> [B, n * n]``.

    Source: Zhang et al. 2024, section 3.4 (before its optimisation).

    Args:
        rows: Number ``n`` of embeddings.

    Raises:
        DataError: the input holds another number of embeddings.
    """

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.outputs = rows * rows

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim != 3 or x.shape[1] ** 2 != self.outputs:
            raise DataError(f"expected [B, {math.isqrt(self.outputs)}, d], got {list(x.shape)}", where="BasicFM")
        return batched_matmul(x, x.mT).flatten(1)


class OptimisedFM(nn.Module):
    """Dot products with ``k`` learned combinations, ``X (X^T Y)``, flattened: ``[B, n, d] -> [B, n * k]``.

    Computed from right to left it costs ``O(n k d)``, whereas ``(X X^T) Y`` costs ``O(n^2 (d + k))``. As ``X X^T`` has
    rank at most ``d``, little is lost even with a small ``k``. Source: Zhang et al. 2024, section 3.4.

    Args:
        rank: Number ``k`` of combinations; may exceed ``n``.
        attention_hidden: None for one learned ``Y [n, k]``. Otherwise ``Y`` is computed for each sample by an MLP with
            these hidden widths from ``k`` linear combinations of the embeddings (the paper's attentive variant; the
            paper does not give the shape of this MLP).
    """

    def __init__(
        self, rows: int, rank: int, attention_hidden: Sequence[int] | None = None, embedding_dim: int | None = None
    ) -> None:
        super().__init__()
        self.outputs = rows * rank
        self.attention: nn.Sequential | None = None
        if attention_hidden is None:
            self.y = nn.Parameter(torch.randn(rows, rank) / rows**0.5)
        else:
            if embedding_dim is None:
                raise ValueError("embedding_dim is needed with attention_hidden")
            self.attention = nn.Sequential(
                LinearCompression(rows, rank),  # [B, n, d] -> [B, k, d]
                nn.Flatten(),
                RowsMLP(rank * embedding_dim, attention_hidden, rows, rank),  # [B, n, k]
            )

    def forward(self, x: Tensor) -> Tensor:
        return self.with_combinations(x)[0]

    def with_combinations(self, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        """Return the result for ``x [B, n, d]`` and, cheaply, ``W x [B, m, d]`` for each of ``weights [m, n]``."""
        if self.attention is None:
            products, *combinations = factorization_machine(x, self.y, *weights)
        else:
            products = batched_matmul(x, batched_matmul(x.mT, self.attention(x)))  # [B, n, k]
            combinations = [left_product(weight, x) for weight in weights]
        return products.flatten(1), *combinations


class FactorizationMachineBlock(nn.Module):
    """New embeddings from pairwise products: ``reshape(MLP(LN(flatten(FM(X)))))``, ``[B, rows, d] -> [B, outputs, d]``.

    The MLP reads the whole flattened matrix, so each product has its own weights. Source: Zhang et al. 2024, section
    3.4.

    Args:
        fm: ``optimised`` (:class:`OptimisedFM`), ``attentive`` (its variant with a ``Y`` for each sample) or ``basic``.
        rank: Number ``k`` of combinations of the optimised forms.
        hidden: Widths of the hidden layers of the MLP, and of the MLP that computes an attentive ``Y``.
        output_activation: Activation after the MLP's last layer; the paper has none.
    """

    def __init__(
        self,
        rows: int,
        outputs: int,
        embedding_dim: int,
        *,
        fm: Literal["optimised", "attentive", "basic"] = "optimised",
        rank: int = 8,
        hidden: Sequence[int] = (),
        dropout: float = 0.0,
        output_activation: Activation = "none",
    ) -> None:
        super().__init__()
        self.fm: BasicFM | OptimisedFM
        if fm == "basic":
            self.fm = BasicFM(rows)
        else:
            self.fm = OptimisedFM(rows, rank, hidden if fm == "attentive" else None, embedding_dim)
        self.norm = nn.LayerNorm(self.fm.outputs)
        self.mlp = RowsMLP(
            self.fm.outputs, hidden, outputs, embedding_dim, dropout=dropout, output_activation=output_activation
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.with_combinations(x)[0]  # [B, n, d] -> [B, n * k] -> [B, m, d]

    def with_combinations(self, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        """Return the result for ``x [B, n, d]`` and, cheaply, ``W x [B, c, d]`` for each of ``weights [c, n]``."""
        if isinstance(self.fm, OptimisedFM):
            products, *combinations = self.fm.with_combinations(x, *weights)
        else:
            products, combinations = self.fm(x), [left_product(weight, x) for weight in weights]
        return self.mlp(self.norm(products)), *combinations


class LinearCompression(nn.Module):
    """Linear combinations ``W X`` of embeddings, ``[B, rows, d] -> [B, outputs, d]``; ``bias`` adds a number to each.

    Source: Zhang et al. 2024, section 3.5 (without bias); DHEN's Linear module and learned shortcut are the same map.
    """

    def __init__(self, rows: int, outputs: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, rows))
        self.bias = nn.Parameter(torch.zeros(outputs)) if bias else None
        nn.init.xavier_uniform_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        combined = left_product(self.weight, x)  # [B, m, d]
        return combined if self.bias is None else combined + self.bias.to(combined.dtype).unsqueeze(-1)


class EmbeddingAttention(nn.Module):
    """One transformer encoder layer over the embeddings: ``[B, n, d] -> [B, n, d]``.

    Self-attention and a two-layer feed-forward net with ReLU, each with a shortcut and layer norm after it (Vaswani et
    al. 2017, as ``torch.nn.TransformerEncoderLayer``). Source of its use here: Zhang et al. 2022 (DHEN).

    Args:
        dropout: Dropout probability after attention, and in and after the feed-forward net.
    """

    def __init__(self, embedding_dim: int, heads: int = 1, feed_forward: int = 64, dropout: float = 0.0) -> None:
        super().__init__()
        if embedding_dim % heads:
            raise ValueError(f"heads ({heads}) must divide embedding_dim ({embedding_dim})")
        self.heads = heads
        self.query_key_value = nn.Linear(embedding_dim, 3 * embedding_dim)
        self.output = nn.Linear(embedding_dim, embedding_dim)
        self.norm_attention = nn.LayerNorm(embedding_dim)
        self.feed_forward = MLP(embedding_dim, (feed_forward,), embedding_dim, dropout=dropout)
        self.norm_feed_forward = nn.LayerNorm(embedding_dim)
        self.dropout = nn.Dropout(dropout)
        nn.init.xavier_uniform_(self.query_key_value.weight)
        nn.init.zeros_(self.query_key_value.bias)
        nn.init.zeros_(self.output.bias)

    def forward(self, x: Tensor) -> Tensor:
        projected = self.query_key_value(x)  # [B, n, 3 d]
        split = for_batched_matmul(projected).unflatten(-1, (3, self.heads, -1))  # [B, n, 3, heads, d / heads]
        query, key, value = split.permute(2, 0, 3, 1, 4).flatten(1, 2)  # each [B * heads, n, d / heads]
        # Tens of embeddings have few scores, for which a plain softmax is faster than fused kernels for long inputs.
        scores = batched_matmul(query * (query.shape[-1] ** -0.5), key.mT)  # [B * heads, n, n]
        mixed = batched_matmul(scores.float().softmax(-1).to(value.dtype), value)  # [B * heads, n, d / heads]
        mixed = mixed.unflatten(0, (-1, self.heads)).transpose(1, 2).flatten(2)  # [B, n, d]
        mixed = self.output(mixed.to(projected.dtype))
        x = self.norm_attention(x + self.dropout(mixed))
        return self.norm_feed_forward(x + self.dropout(self.feed_forward(x)))


class CrossNetwork(nn.Module):
    """Explicit crosses of a flat input: ``x_{l+1} = x_0 * (W_l x_l + b_l) + x_l``, ``[B, width] -> [B, width]``.

    Source: Wang et al. 2021 (DCN-V2), equation 1; with ``low_rank`` equation 2 without mixture, ``W_l = U_l V_l^T``.
    """

    def __init__(self, width: int, layers: int, low_rank: int | None = None) -> None:
        super().__init__()
        self.crosses = nn.ModuleList()
        for _ in range(layers):
            if low_rank is None:
                cross: nn.Module = nn.Linear(width, width)
            else:
                cross = nn.Sequential(nn.Linear(width, low_rank, bias=False), nn.Linear(low_rank, width))
            for layer in cross.modules():
                if isinstance(layer, nn.Linear):
                    nn.init.xavier_normal_(layer.weight)
                    if layer.bias is not None:
                        nn.init.zeros_(layer.bias)
            self.crosses.append(cross)

    def forward(self, x: Tensor) -> Tensor:
        crossed = x
        for cross in self.crosses:
            crossed = torch.addcmul(crossed, x.to(crossed.dtype), cross(crossed).to(crossed.dtype))
        return crossed


class EmbeddingCross(nn.Module):
    """Cross term of DHEN's embeddings, without a shortcut of its own: ``[B, n, d] -> [B, outputs, d]``.

    The paper writes ``X X^T W + b`` with embeddings as columns, ``X [d, n]``, which has the required shape ``[d,
    outputs]`` for ``W [d, outputs]``. With embeddings as rows this is ``(X W)^T X + b``. Source: Zhang et al. 2022,
    section 3.2.
    """

    def __init__(self, outputs: int, embedding_dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, embedding_dim))
        self.bias: nn.Parameter | None = nn.Parameter(torch.zeros(outputs, embedding_dim))
        nn.init.xavier_uniform_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        projected = F.linear(x, self.weight)  # [B, n, m]
        crossed = batched_matmul(projected.mT, x)  # [B, m, d]
        return crossed if self.bias is None else crossed + self.bias


class Convolution(nn.Module):
    """Convolution over the plane of embeddings, padded with zeros: ``[B, n, d] -> [B, channels * n, d]``.

    Source: Zhang et al. 2022 (DHEN), section 3.2. ``kernel_size`` is the odd side of the square kernel.
    """

    def __init__(self, channels: int = 4, kernel_size: int = 3) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, channels, kernel_size, padding=kernel_size // 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.convolution(x.unsqueeze(1)).flatten(1, 2)  # [B, 1, n, d] -> [B, channels, n, d] -> [B, c * n, d]
