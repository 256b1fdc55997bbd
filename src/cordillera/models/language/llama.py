"""Llama 3: a decoder of pre-normalised blocks.

Source: Grattafiori et al. 2024, section 3.2 and table 3; for what the paper leaves open, the released reference code.
The model has root-mean-square norms in 32 bits, rotary positions with base 500,000 (stretched from 3.1 on),
grouped-query attention, a gated feed-forward net (SwiGLU) and no biases. Attention never crosses documents. Mistral and
Phi-3 are the same function; Qwen2 adds biases to queries, keys and values (Yang et al. 2024), and Qwen3 norms of heads
(Yang et al. 2025, section 2).

Tokens of all documents lie in one row, ``tokens [T]``, and ``offsets [B + 1]`` say where documents begin. There is no
padding. ``T`` below is the number of tokens in the row.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Literal, Protocol

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from cordillera.kernels.attention.documents import document_attention
from cordillera.kernels.dense.decoder_rows import DecoderBlocks, PagedRows
from cordillera.kernels.dense.layers import silu
from cordillera.models.language.adapters import AdapterConfig, add_adapters
from cordillera.models.language.draft_model import DRAFT, DraftConfig, DraftModel
from cordillera.models.language.moe import ExpertLayer, ExpertsConfig
from cordillera.models.language.rope import RopeScaling, rope_table, rotate

ModelSize = Annotated[int, Field(ge=1, le=2**30)]
Core = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class CacheStep(Protocol):
    """One addition to a :class:`Cache`, with the position of each new token in its sequence, ``int64 [T]``."""

    positions: Tensor

    def core(self, layer: int) -> Core:
        """Return the function that replaces the attention core of the layer with number ``layer``."""

    def few_rows(self) -> PagedRows | None:
        """Return what :class:`~cordillera.kernels.dense.decoder_rows.DecoderBlocks` adds the tokens to; None if not."""

    def commit(self) -> None:
        """Make the addition permanent."""


class Cache(Protocol):
    """Keys and values of earlier tokens."""

    def extend(self, offsets: Tensor) -> CacheStep:
        """Prepare for new tokens whose documents begin at ``offsets``, ``int64 [B + 1]``."""


class LlamaConfig(BaseModel):
    """Shapes of a Llama; the defaults are those of the 8B model.

    Attributes:
        layers: Number of blocks, at most 1,024.
        hidden: Width of the residual stream.
        heads: Number of query heads.
        kv_heads: Number of key and value heads; divides ``heads``.
        head_dim: Width of a head; None for ``hidden / heads``.
        ffn: Width of the feed-forward net, or of each expert; :func:`ffn_width` computes the published ones.
        experts: Experts in place of feed-forward nets; None for none.
        adapter: Low-rank adapters, which alone are trained; None to train all weights.
        draft: Drafter of the model's next tokens, which alone is trained; None for none.
        attention_bias: Whether queries, keys and values have a bias, as in Qwen2.
        head_norms: Whether queries and keys are normalised head by head before they are rotated, as in Qwen3.
        scores: Whether one number a token, a score, takes the place of the logits of a head, as in a reward model.
        vocabulary: Number of tokens in the vocabulary.
        context: Longest sequence that the model was made for, in tokens.
        tied: Whether the output head shares the embedding's weights, as in Llama 3.2 and in small models.
        norm_eps: Constant added to the mean square in RMSNorm.
        rope_theta: Base of the rotary frequencies.
        rotary_dim: How many numbers of a head turn, its first ones, as in Phi-4-mini; None for all.
        rope_scaling: Scaling of the rotary frequencies; None for none, as in Llama 3.0.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Literal["llama"] = "llama"
    layers: int = Field(32, ge=1, le=1024)
    hidden: ModelSize = 4096
    heads: ModelSize = 32
    kv_heads: ModelSize = 8
    head_dim: ModelSize | None = None
    ffn: ModelSize = 14336
    experts: ExpertsConfig | None = None
    adapter: AdapterConfig | None = None
    draft: DraftConfig | None = None
    attention_bias: bool = False
    head_norms: bool = False
    scores: bool = False
    vocabulary: ModelSize = 128256
    context: ModelSize = 8192
    tied: bool = False
    norm_eps: float = Field(1e-5, gt=0, allow_inf_nan=False)
    rope_theta: float = Field(500_000.0, gt=1, allow_inf_nan=False)
    rotary_dim: ModelSize | None = None
    rope_scaling: RopeScaling | None = None

    @model_validator(mode="after")
    def _divides(self) -> LlamaConfig:
        if self.head_dim is None and self.hidden % self.heads:
            raise ValueError(f"heads ({self.heads}) must divide hidden ({self.hidden}), or head_dim must be given")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads ({self.kv_heads}) must divide heads ({self.heads})")
        if self.adapter is not None and self.experts is not None:
            raise ValueError("adapter: layers of experts have none; train all weights")
        if (draft := self.draft) is not None:
            if self.adapter is not None or self.scores:
                raise ValueError("draft: a drafter is trained for a model without adapters or scores")
            if draft.vocabulary > self.vocabulary:
                raise ValueError(f"draft.vocabulary ({draft.vocabulary}) is above the model's {self.vocabulary}")
            if max(draft.tapped(self.layers)) >= self.layers:
                raise ValueError(f"draft.taps: the model's layers are 0 to {self.layers - 1}")
        if self.head_width % 2:
            raise ValueError(f"the width of a head ({self.head_width}) must be even: rotary positions turn pairs")
        if self.rotary_width % 2 or self.rotary_width > self.head_width:
            raise ValueError(f"rotary_dim ({self.rotary_width}) must be even, and at most {self.head_width}")
        if (scaling := self.rope_scaling) is not None and 2 * len(scaling.short_factor) not in (0, self.rotary_width):
            many, pairs = len(scaling.short_factor), self.rotary_width // 2
            raise ValueError(f"rope_scaling has {many} factors for {pairs} pairs of numbers of a head")
        return self

    @property
    def head_width(self) -> int:
        """Width ``D`` of a head."""
        return self.head_dim or self.hidden // self.heads

    @property
    def rotary_width(self) -> int:
        """How many numbers ``R`` of a head turn."""
        return self.rotary_dim or self.head_width

    @property
    def active_ffn(self) -> int:
        """Width of all feed-forward nets that a token goes through."""
        return self.ffn if self.experts is None else self.experts.chosen * self.ffn + self.experts.shared


def ffn_width(hidden: int, multiplier: float | None = None, multiple_of: int = 256) -> int:
    """Return the published width of a feed-forward net: two thirds of ``4 hidden``, times a factor, rounded up.

    Args:
        multiplier: Factor ``ffn_dim_multiplier``: 1.3 for 8B and 70B, 1.2 for 405B; None for 1.
        multiple_of: Divisor of the width: 1024 for 8B, 4096 for 70B and 405B.
    """
    width = int(2 * 4 * hidden / 3)
    if multiplier is not None:
        width = int(multiplier * width)
    return multiple_of * math.ceil(width / multiple_of)


def parameter_count(config: LlamaConfig) -> int:
    """Return the number of parameters of a model with this ``config``; a tied head counts once."""
    width = config.head_width
    attention = 2 * config.hidden * width * (config.heads + config.kv_heads)
    attention += config.attention_bias * width * (config.heads + 2 * config.kv_heads) + config.head_norms * 2 * width
    block = attention + 3 * config.hidden * config.ffn + 2 * config.hidden
    if (experts := config.experts) is not None:
        block += 3 * config.hidden * (config.ffn * (experts.count - 1) + experts.shared)
        block += experts.count * (config.hidden + 1)  # the router and its bias
    embeddings = config.vocabulary * config.hidden * (1 if config.tied or config.scores else 2)
    own = config.layers * block + config.hidden * (2 if config.scores else 1)
    return embeddings + own + _adapter_count(config) + _draft_count(config)


def _draft_count(config: LlamaConfig) -> int:
    if config.draft is None:
        return 0
    width, draft = config.hidden, config.draft
    attention = 2 * width * config.head_width * (config.heads + config.kv_heads)
    block = attention + 3 * width * config.active_ffn + 2 * width
    taps = len(draft.tapped(config.layers))
    around = width * width * (taps + 2) + width * (taps + 3)
    return draft.layers * block + around + (width if draft.kind == "block" else 0)


def _adapter_count(config: LlamaConfig) -> int:
    if config.adapter is None:
        return 0
    heads, kv_heads = config.heads * config.head_width, config.kv_heads * config.head_width
    other = {"query": heads, "key": kv_heads, "value": kv_heads, "output": heads}  # widths other than hidden
    widths = [config.hidden + other.get(name, config.ffn) for name in config.adapter.layers]
    return config.layers * config.adapter.rank * sum(widths)


_70B = LlamaConfig(layers=80, hidden=8192, heads=64, ffn=28672)
_405B = LlamaConfig(layers=126, hidden=16384, heads=128, ffn=53248)
_LONG: dict[str, Any] = {"context": 131072, "rope_scaling": RopeScaling()}
_SMALL: dict[str, Any] = {"context": 131072, "rope_scaling": RopeScaling(factor=32.0), "tied": True, "ffn": 8192}

PRESETS: dict[str, LlamaConfig] = {
    "llama-debug": LlamaConfig(
        layers=4, hidden=128, heads=4, kv_heads=2, ffn=384, vocabulary=2048, context=2048, tied=True
    ),
    "llama-15m": LlamaConfig(
        layers=6, hidden=288, heads=6, kv_heads=6, ffn=768, vocabulary=32000, context=2048, tied=True
    ),
    "smollm2-135m": LlamaConfig(
        layers=30, hidden=576, heads=9, kv_heads=3, ffn=1536, vocabulary=49152, tied=True, rope_theta=100_000.0
    ),
    "llama3.2-1b": LlamaConfig(layers=16, hidden=2048, **_SMALL),
    "llama3.2-3b": LlamaConfig(layers=28, hidden=3072, heads=24, **_SMALL),
    "llama3-8b": LlamaConfig(),
    "llama3-70b": _70B,
    "llama3.1-8b": LlamaConfig(**_LONG),
    "llama3.1-70b": _70B.model_copy(update=_LONG),
    "llama3.1-405b": _405B.model_copy(update=_LONG),
}


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x^2) + eps)`` in 32 bits, cast back, then times a weight (Zhang and Sennrich 2019)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype) * self.weight


class AddedBias(nn.Module):
    """``x + weight``: the bias of a linear layer, apart from its matrix, which may be adapted, packed or cut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight


class Attention(nn.Module):
    """Grouped-query attention with rotary positions.

    Attributes:
        core: Function between queries, keys, values and the output projection: ``(q [T, H, D], k [T, G, D], v [T, G,
            D], offsets [B + 1]) -> [T, H, D]``. Context parallelism replaces it.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_width = config.head_width
        self.query = nn.Linear(config.hidden, config.heads * self.head_width, bias=False)
        self.key = nn.Linear(config.hidden, config.kv_heads * self.head_width, bias=False)
        self.value = nn.Linear(config.hidden, config.kv_heads * self.head_width, bias=False)
        self.output = nn.Linear(config.heads * self.head_width, config.hidden, bias=False)
        if config.attention_bias:
            self.query_bias, self.key_bias, self.value_bias = (
                AddedBias(layer.out_features) for layer in (self.query, self.key, self.value)
            )
        if config.head_norms:
            self.query_norm, self.key_norm = (RMSNorm(self.head_width, config.norm_eps) for _ in range(2))
        self.has_bias, self.has_norms = config.attention_bias, config.head_norms
        self.core: Core = document_attention

    def forward(self, x: Tensor, offsets: Tensor, table: tuple[Tensor, Tensor], core: Core | None = None) -> Tensor:
        # The number of heads is inferred, as each device of a shared layer holds only some of them.
        q, k, v = self.query(x), self.key(x), self.value(x)
        if self.has_bias:
            q, k, v = self.query_bias(q), self.key_bias(k), self.value_bias(v)
        q, k, v = (part.unflatten(-1, (-1, self.head_width)) for part in (q, k, v))  # [T, H, D], [T, G, D] twice
        if self.has_norms:
            q, k = self.query_norm(q), self.key_norm(k)
        out = (core or self.core)(rotate(q, table), rotate(k, table), v, offsets)  # [T, H, D]
        return self.output(out.flatten(1))


class FeedForward(nn.Module):
    """SwiGLU: ``down(silu(gate x) * up x)`` (Shazeer 2020)."""

    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, ffn, bias=False)
        self.up = nn.Linear(hidden, ffn, bias=False)
        self.down = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Attention followed by the feed-forward net, each applied to a norm of the residual stream and added to it."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden, config.norm_eps)
        self.attention = Attention(config)
        self.feed_forward_norm = RMSNorm(config.hidden, config.norm_eps)
        self.feed_forward: FeedForward | ExpertLayer
        if (experts := config.experts) is None:
            self.feed_forward = FeedForward(config.hidden, config.ffn)
        else:
            shared = FeedForward(config.hidden, experts.shared) if experts.shared else None
            self.feed_forward = ExpertLayer(config.hidden, config.ffn, experts, shared)

    def forward(
        self,
        x: Tensor,
        offsets: Tensor,
        table: tuple[Tensor, Tensor],
        core: Core | None = None,
        has_target: Tensor | None = None,
    ) -> Tensor:
        x = x + self.attention(self.attention_norm(x), offsets, table, core)
        normed = self.feed_forward_norm(x)
        if isinstance(self.feed_forward, FeedForward):
            return x + self.feed_forward(normed)
        return x + self.feed_forward(normed, offsets, has_target)


def few_rows_of(blocks: nn.ModuleList) -> DecoderBlocks | None:
    """Return what computes few bfloat16 rows of a cache by ``blocks`` on a CPU in one call; None for other blocks."""
    first = blocks[0]
    if not isinstance(first, Block) or not all(isinstance(block.feed_forward, FeedForward) for block in blocks):
        return None
    weight, eps = first.attention_norm.weight, first.attention_norm.eps
    return DecoderBlocks(blocks, eps) if weight.dtype == torch.bfloat16 and weight.device.type == "cpu" else None


def _make_embedding(config: LlamaConfig) -> nn.Embedding:
    """Create an embedding. On the meta device no values are drawn, as that would import torch's compiler."""
    weight = torch.empty(config.vocabulary, config.hidden)
    return nn.Embedding.from_pretrained(weight if weight.is_meta else weight.normal_(), freeze=False)


def make_drafter(config: LlamaConfig) -> DraftModel:
    """Create the drafter of a model of ``config``, whose field ``draft`` is set."""
    draft = config.draft
    assert draft is not None
    others = {"experts": None, "adapter": None, "attention_bias": False, "head_norms": False}
    plain = config.model_copy(update={**others, "ffn": config.active_ffn})
    block, norm = partial(Block, plain), partial(RMSNorm, config.hidden, config.norm_eps)
    return DraftModel(draft, config.hidden, draft.tapped(config.layers), block, norm)


class Llama(nn.Module):
    """Llama 3: embedding, blocks, norm, head.

    Weights have the default initialization of torch's layers until :meth:`init_weights` is called or a checkpoint is
    loaded. A model created under ``torch.device("meta")`` takes no memory until ``to_empty``; only its parameters need
    restoring then.

    Attributes:
        few: Kernel that computes few rows in one call, for decoding; None to compute them by layers.
    """

    Config = LlamaConfig

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = _make_embedding(config)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.hidden, config.norm_eps)
        has_head = not (config.tied or config.scores)
        self.head = nn.Linear(config.hidden, config.vocabulary, bias=False) if has_head else None
        if config.adapter is not None:
            for parameter in self.parameters():
                parameter.requires_grad_(False)
            for block in self.layers:
                add_adapters(block, config.adapter)
        self.draft: DraftModel | None = None
        if config.draft is not None:
            self.requires_grad_(False)
            self.draft = make_drafter(config)
        self.score = nn.Linear(config.hidden, 1, bias=False) if config.scores else None
        self.few: DecoderBlocks | None = None

    def forward(
        self, tokens: Tensor, offsets: Tensor, positions: Tensor | None = None, cache: Cache | None = None
    ) -> Tensor:
        """Compute logits of the token that follows each token.

        Args:
            tokens: Tokens, ``int64 [T]``, below ``config.vocabulary``.
            offsets: Offsets at which documents begin, followed by ``T``, ``int64 [B + 1]``; a document may be empty.
            positions: Position of each token in its document, ``int64 [T]``; None to count from 0 (with a cache, from
                the end of the cached sequence).
            cache: Cache of earlier tokens; document ``b`` continues the cached sequence ``b`` and is added to it.

        Returns:
            Logits ``[T, vocabulary]``, in the dtype of the weights.
        """
        return self.logits(self.hidden(tokens, offsets, positions, cache))

    def hidden(
        self,
        tokens: Tensor,
        offsets: Tensor,
        positions: Tensor | None = None,
        cache: Cache | None = None,
        taps: dict[int, Tensor] | None = None,
    ) -> Tensor:
        """Compute the input of the head, ``[T, hidden]``, for callers that need few logits or compute them in parts.

        ``tokens``, ``offsets``, ``positions`` and ``cache`` are those of :meth:`forward`.

        Args:
            taps: Dictionary whose keys are numbers of blocks; their outputs, ``[T, hidden]``, become its values.
        """
        step = None if cache is None else cache.extend(offsets)
        if positions is None:
            positions = document_positions(offsets, tokens.device) if step is None else step.positions
        table = rope_table(self.config, positions)
        x = self.go_through(range(self.config.layers), self.embedding(tokens), offsets, table, step, taps)
        if step is not None:
            step.commit()
        return self.norm(x)

    def go_through(
        self,
        layers: range,
        x: Tensor,
        offsets: Tensor,
        table: tuple[Tensor, Tensor],
        step: CacheStep | None = None,
        taps: dict[int, Tensor] | None = None,
    ) -> Tensor:
        """Compute blocks one after the other.

        Args:
            layers: Numbers of the blocks.
            x: Input of the first one, ``[T, hidden]``.
            offsets: Offsets at which documents begin, followed by ``T``, ``int64 [B + 1]``.
            table: Table of :func:`rope_table` of the tokens' positions.
            step: Addition to a cache whose layers are those of the blocks, in their order; None for none.
            taps: As for :meth:`hidden`.
        """
        cached = None if step is None or self.few is None else step.few_rows()
        if self.few is not None and cached is not None and self.few.takes(x, cached, layers):
            return self.few(x, table, cached, layers, taps)
        for place, number in enumerate(layers):
            x = self.layers[number](x, offsets, table, None if step is None else step.core(place))
            if taps is not None and number in taps:
                taps[number] = x
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute logits ``[n, vocabulary]`` from rows of :meth:`hidden`, ``[n, hidden]``; scores ``[n, 1]`` if any."""
        if self.score is not None:
            return self.score(hidden)
        return F.linear(hidden, self.embedding.weight) if self.head is None else self.head(hidden)

    @torch.no_grad()
    def init_weights(self, seed: int = 0) -> None:
        """Initialise all weights at random.

        The paper does not describe the initialization. Matrices are normal with standard deviation 0.02. Those that
        write into the residual stream have ``0.02 / sqrt(2 layers)`` (Radford et al. 2019, section 2.3), so that its
        variance does not grow with depth.

        Args:
            seed: Seed. The same seed gives the same weights on devices of one kind, whatever dtype they are cast to and
                however parameters are sharded.
        """
        from torch.distributed.tensor.experimental import implicit_replication

        for name, parameter in self.named_parameters():
            # Each device draws the whole weight and keeps its part, so that the values do not depend on the sharding.
            whole = torch.empty(parameter.shape, device=parameter.device)
            draw_weight(whole, name, self.config, seed)
            with implicit_replication():
                parameter.copy_(whole)


@torch.no_grad()
def draw_weight(weight: Tensor, name: str, config: LlamaConfig, seed: int = 0) -> None:
    """Draw one whole weight from ``seed``, as :meth:`Llama.init_weights` does, independently of all other weights.

    Args:
        weight: Weight of the model of ``config``, ``[out, in]`` or ``[width]``, which is filled.
        name: Name of the parameter in the model.
    """
    is_norm = name.endswith("norm.weight") or ".tap_norms." in name
    if is_norm or name.endswith(("router.bias", ".wide", "_bias.weight")):
        weight.fill_(float(is_norm))
        return
    residual = name.removesuffix(".weight").endswith(("attention.output", "feed_forward.down", "shared.down"))
    residual = residual and not name.startswith(DRAFT)  # a drafter's residual stream is short
    deviation = 0.02 / math.sqrt(2 * config.layers) if residual else 0.02
    # Each weight has its own stream, so that a device draws only the weights that it holds. Generators use 32 bits.
    generator = torch.Generator(weight.device).manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    weight.normal_(0.0, deviation, generator=generator)


def document_positions(offsets: Tensor, device: torch.device | str | None = None) -> Tensor:
    """Return positions that count from 0 in every document, ``int64 [T]``.

    Documents begin at ``offsets``, followed by ``T``, ``[B + 1]``. A ``device`` of None is that of ``offsets``.
    """
    starts = offsets[:-1].repeat_interleave(offsets[1:] - offsets[:-1])
    return (torch.arange(starts.numel(), device=offsets.device) - starts).to(device or offsets.device)
