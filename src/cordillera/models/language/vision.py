"""A Llama that sees: an image encoder, and gated cross-attention layers between the blocks of a frozen language model.

Source: Grattafiori et al. 2024, section 7.1: a vision transformer turns every image into patches, and after every
fourth block the tokens of a text attend to the patches of its image, by grouped-query attention of the language model's
shapes. The released code passes what such a layer adds through gates, ``tanh`` of a number that is zero at first
(Alayrac et al. 2022, section 2.3), and norms queries and keys. The language model is not trained, so answers to text
alone stay what they were.

The paper's encoder was trained with captions beforehand, also gives features of layers in between, and has further
layers with gates; the one here is a small vision transformer (Dosovitskiy et al. 2021), trained with the adapter.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Collection, Sequence
from typing import Annotated

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.functional import scaled_dot_product_attention

from cordillera.errors import DataError
from cordillera.jagged import offsets_from_lengths
from cordillera.models.language.llama import FeedForward, Llama, LlamaConfig, RMSNorm, document_positions
from cordillera.models.language.rope import rope_table

NO_IMAGE = -1
"""Number of the image of a document that has none."""

_MEAN, _DEVIATION = 0.25, 0.25  # mean and deviation by which pixels are normalised

_Size = Annotated[int, Field(ge=1, le=2**20)]


class VisionConfig(BaseModel):
    """Shapes of an image encoder, and places of the cross-attention layers.

    Attributes:
        image: Height and width ``S`` of an image in pixels.
        patch: Height and width of a patch in pixels; divides ``image``.
        channels: Number of features of every pixel that patches are made of, computed by a convolution of three pixels
            by three; 0 makes patches of the pixels themselves.
        layers: Number of blocks of the encoder.
        hidden: Width ``E`` of a patch in the encoder.
        heads: Number of heads of the encoder; divides ``hidden``.
        ffn: Width of the encoder's feed-forward nets.
        every: Number of blocks of the language model between two cross-attention layers, the first of which comes after
            that many.
        norm_eps: Constant added to variances in the encoder's norms.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    image: _Size = 32
    patch: _Size = 4
    channels: int = Field(16, ge=0, le=2**20)
    layers: int = Field(2, ge=1, le=1024)
    hidden: _Size = 64
    heads: _Size = 4
    ffn: _Size = 256
    every: int = Field(4, ge=1, le=1024)
    norm_eps: float = Field(1e-5, gt=0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _divides(self) -> VisionConfig:
        if self.image % self.patch:
            raise ValueError(f"patch ({self.patch}) must divide image ({self.image})")
        if self.hidden % self.heads:
            raise ValueError(f"heads ({self.heads}) must divide hidden ({self.hidden})")
        return self

    @property
    def patches(self) -> int:
        """Number ``P`` of patches of an image."""
        return (self.image // self.patch) ** 2


class _EncoderBlock(nn.Module):
    """Attention of all patches of an image to each other, then a feed-forward net, each after a norm."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.head_width = config.hidden // config.heads
        self.attention_norm = nn.LayerNorm(config.hidden, config.norm_eps)
        self.qkv = nn.Linear(config.hidden, 3 * config.hidden)
        self.output = nn.Linear(config.hidden, config.hidden)
        self.feed_forward_norm = nn.LayerNorm(config.hidden, config.norm_eps)
        self.up = nn.Linear(config.hidden, config.ffn)
        self.down = nn.Linear(config.ffn, config.hidden)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.attention_norm(x)).unflatten(-1, (3, -1, self.head_width))  # [I, P, 3, heads, D]
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        x = x + self.output(scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.feed_forward_norm(x))))


class ImageEncoder(nn.Module):
    """Vision transformer (Dosovitskiy et al. 2021, section 3.1, without a class token): images to patches.

    Every square of pixels becomes a vector, to which the one of its position is added. With ``channels``, squares are
    those of a convolution's features, as in the paper's hybrid architecture.
    """

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.config = config
        self.features = nn.Conv2d(3, config.channels, 3, padding=1) if config.channels else None
        self.embedding = nn.Linear((config.channels or 3) * config.patch**2, config.hidden)
        self.positions = nn.Parameter(torch.zeros(config.patches, config.hidden))
        self.layers = nn.ModuleList(_EncoderBlock(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.hidden, config.norm_eps)

    def forward(self, images: Tensor) -> Tensor:
        """Compute the patches ``[I, P, E]`` of images ``[I, 3, S, S]``, from left to right, then from top to bottom."""
        side, patch = self.config.image // self.config.patch, self.config.patch
        pixels = (images - _MEAN) / _DEVIATION
        if self.features is not None:
            pixels = F.gelu(self.features(pixels))
        squares = pixels.unflatten(3, (side, patch)).unflatten(2, (side, patch))  # [I, C, rows, p, columns, p]
        x = self.embedding(squares.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)) + self.positions
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class GatedCrossAttention(nn.Module):
    """Attention of text to the patches of its image, then a feed-forward net, each through a gate.

    Args:
        config: Shapes of the language model, which are those of the attention and the feed-forward net.
        width: Width ``E`` of a patch.

    Attributes:
        attention_gate: Number whose ``tanh`` multiplies what attention adds, ``[1]``; zero at first.
        feed_forward_gate: The same of the feed-forward net.
    """

    def __init__(self, config: LlamaConfig, width: int) -> None:
        super().__init__()
        self.head_width = config.head_width
        self.attention_norm = RMSNorm(config.hidden, config.norm_eps)
        self.query = nn.Linear(config.hidden, config.heads * self.head_width, bias=False)
        self.key = nn.Linear(width, config.kv_heads * self.head_width, bias=False)
        self.value = nn.Linear(width, config.kv_heads * self.head_width, bias=False)
        self.query_norm = RMSNorm(self.head_width, config.norm_eps)
        self.key_norm = RMSNorm(self.head_width, config.norm_eps)
        self.output = nn.Linear(config.heads * self.head_width, config.hidden, bias=False)
        self.feed_forward_norm = RMSNorm(config.hidden, config.norm_eps)
        self.feed_forward = FeedForward(config.hidden, config.ffn)
        self.attention_gate = nn.Parameter(torch.zeros(1))
        self.feed_forward_gate = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor, patches: Tensor, counts: Sequence[int]) -> Tensor:
        """Compute the stream after the layer.

        Args:
            x: Tokens that have an image, ``[N, hidden]``, those of the first image before those of the second.
            patches: Patches of the images, ``[I, P, E]``.
            counts: Number of tokens of each image.

        Returns:
            Tokens ``[N, hidden]``. Each depends on the patches of its own image alone.
        """
        x = x + torch.tanh(self.attention_gate) * self._attend(self.attention_norm(x), patches, counts)
        return x + torch.tanh(self.feed_forward_gate) * self.feed_forward(self.feed_forward_norm(x))

    def _attend(self, x: Tensor, patches: Tensor, counts: Sequence[int]) -> Tensor:
        q = self.query_norm(self.query(x).unflatten(-1, (-1, self.head_width))).transpose(0, 1)  # [H, N, D]
        k = self.key_norm(self.key(patches).unflatten(-1, (-1, self.head_width))).transpose(1, 2)  # [I, G, P, D]
        v = self.value(patches).unflatten(-1, (-1, self.head_width)).transpose(1, 2)  # [I, G, P, D]
        parts = [
            scaled_dot_product_attention(text[None], keys[None], values[None], enable_gqa=True)[0]
            for text, keys, values in zip(q.split(list(counts), 1), k.unbind(), v.unbind(), strict=True)
            if text.shape[1]
        ]
        return self.output(torch.cat(parts, 1).transpose(0, 1).flatten(1))


class VisionLlama(nn.Module):
    """A language model with an image encoder and an adapter: layers of cross-attention between its blocks.

    Logits of a document without an image are those of the language model, to the bit, in the same row of tokens and
    without gradients. So are those of all documents until the adapter is trained.

    Args:
        model: Language model, whose weights no longer require gradients afterwards.
        config: Shapes of the encoder, and places of the layers.

    Attributes:
        encoder: The image encoder.
        adapters: Layers of cross-attention, from the first to the last.

    Raises:
        DataError: If the language model has fewer than ``config.every`` blocks.
    """

    Config = VisionConfig

    def __init__(self, model: Llama, config: VisionConfig) -> None:
        super().__init__()
        if model.config.layers < config.every:
            raise DataError(
                f"the language model has {model.config.layers} blocks, so that no layer comes after {config.every}",
                where="every",
                remedy=f"at most {model.config.layers}",
            )
        self.config = config
        self.model = model.requires_grad_(False)
        self.encoder = ImageEncoder(config)
        count = model.config.layers // config.every
        self.adapters = nn.ModuleList(GatedCrossAttention(model.config, config.hidden) for _ in range(count))
        for part in (self.encoder, self.adapters):
            part.to(model.embedding.weight.device, model.embedding.weight.dtype)

    def forward(self, tokens: Tensor, offsets: Tensor, images: Tensor, image_of: Tensor) -> Tensor:
        """Compute logits of the token that follows each token.

        Args:
            tokens: Tokens, ``int64 [T]``, below the vocabulary of the language model.
            offsets: Offsets at which documents begin, followed by ``T``, ``int64 [B + 1]``; a document may be empty.
            images: Images, ``float32 [I, 3, S, S]``; there may be none.
            image_of: Number of the image of each document, ``int64 [B]``; :data:`NO_IMAGE`, -1, for none.

        Returns:
            Logits ``[T, vocabulary]``, in the dtype of the weights.

        Raises:
            DataError: If images have another shape or dtype or are not finite, or if an image does not exist.
        """
        return self.model.logits(self.hidden(tokens, offsets, self.patches(images), image_of))

    def patches(self, images: Tensor) -> Tensor:
        """Compute the patches ``[I, P, E]`` of ``images``, ``float32 [I, 3, S, S]``.

        Raises:
            DataError: If images have another shape or dtype or are not finite.
        """
        size = self.config.image
        if images.dtype != torch.float32 or images.dim() != 4 or images.shape[1:] != (3, size, size):
            raise DataError(
                f"images must be float32 of shape [I, 3, {size}, {size}], got {images.dtype} of shape "
                f"{list(images.shape)}",
                where="images",
                remedy="scale red, green and blue to numbers from 0 to 1, and images to the size of the encoder",
            )
        if not bool(images.isfinite().all()):
            raise DataError("holds NaN or infinity", where="images", remedy="leave out the image")
        encoded: Tensor = self.encoder(images.to(self.encoder.positions.dtype))
        return encoded

    def hidden(self, tokens: Tensor, offsets: Tensor, patches: Tensor, image_of: Tensor) -> Tensor:
        """Compute the input of the head, ``[T, hidden]``, from ``patches [I, P, E]`` instead of images.

        ``tokens``, ``offsets`` and ``image_of`` are those of :meth:`forward`.

        Raises:
            DataError: If an image does not exist.
        """
        rows, counts = _tokens_of_images(offsets, image_of, len(patches))
        rows = rows.to(tokens.device)
        table = rope_table(self.model.config, document_positions(offsets, tokens.device))
        x = self.model.embedding(tokens)  # [T, hidden]
        for number, layer in enumerate(self.model.layers, 1):
            x = layer(x, offsets, table)
            adapter, between = divmod(number, self.config.every)
            if not between and len(rows):
                x = x.index_copy(0, rows, self.adapters[adapter - 1](x[rows], patches, counts))
        out: Tensor = self.model.norm(x)
        return out

    def seeing(self) -> dict[str, nn.Parameter]:
        """Return the parameters of the encoder and the adapter, which are trained, by name."""
        return {name: one for name, one in self.named_parameters() if not name.startswith("model.")}

    @torch.no_grad()
    def init_weights(self, seed: int = 0) -> None:
        """Initialise the weights of the encoder and the adapter at random, and the gates with zero.

        Matrices are normal with a variance of one over their inputs, so that a vector keeps its length, and positions
        have standard deviation 0.02. The language model is not changed.

        Args:
            seed: Seed. The same seed gives the same weights on devices of one kind.
        """
        for name, weight in self.seeing().items():
            if weight.dim() < 2:
                weight.fill_(float(name.endswith("norm.weight")))
                continue
            deviation = 0.02 if name.endswith("positions") else 1 / math.sqrt(weight[0].numel())
            generator = torch.Generator(weight.device).manual_seed(zlib.crc32(f"{seed} {name}".encode()))
            weight.normal_(0.0, deviation, generator=generator)


@torch.inference_mode()
def answer(
    model: VisionLlama,
    prompts: Sequence[Sequence[int]],
    images: Tensor,
    image_of: Tensor,
    max_new_tokens: int,
    stop: Collection[int] = (),
) -> list[list[int]]:
    """Continue prompts by the most likely tokens until a stop token, ``max_new_tokens`` or the end of the context.

    Images are encoded once. There is no cache: every token computes its whole text again, which suits short answers.

    Args:
        model: Language model with its adapter.
        prompts: Token ids, one list per prompt.
        images: Images, ``float32 [I, 3, S, S]``.
        image_of: Number of the image of each prompt, ``int64 [B]``; -1 for none.
        max_new_tokens: Largest number of new tokens of each prompt.
        stop: Ids of tokens that end an answer.

    Returns:
        New tokens of each prompt, without the stop token.

    Raises:
        DataError: If a prompt is empty, as long as the context or longer, or holds an id that is not a token; images
            have another shape or dtype or are not finite; an image does not exist; or logits are not finite.
    """
    _check_prompts(model.model.config, prompts)
    _check_numbers(image_of, len(prompts), len(images))
    patches = model.patches(images)
    texts = [list(prompt) for prompt in prompts]
    running = list(range(len(texts)))
    while running := [
        n for n in running if len(texts[n]) < min(len(prompts[n]) + max_new_tokens, model.model.config.context)
    ]:
        tokens = torch.tensor([token for n in running for token in texts[n]], device=images.device)
        offsets = offsets_from_lengths(torch.tensor([len(texts[n]) for n in running]))
        last = model.hidden(tokens, offsets, patches, image_of[running])[offsets[1:] - 1]
        logits = model.model.logits(last)
        if not bool(logits.isfinite().all()):
            raise DataError("the model's logits are not finite", where="answer", remedy="see whether its weights are")
        chosen = dict(zip(running, logits.argmax(-1).tolist(), strict=True))
        running = [n for n in running if chosen[n] not in stop]
        for n in running:
            texts[n].append(chosen[n])
    return [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]


def _tokens_of_images(offsets: Tensor, image_of: Tensor, images: int) -> tuple[Tensor, list[int]]:
    """Return the places of tokens that have an image, ordered by image, ``int64 [N]``, and how many each image has."""
    _check_numbers(image_of, offsets.numel() - 1, images)
    image = image_of.to(offsets.device).repeat_interleave(offsets[1:] - offsets[:-1])  # [T]
    seeing = image != NO_IMAGE
    rows = image.argsort(stable=True)[int((~seeing).sum()) :]
    return rows, torch.bincount(image[seeing], minlength=images).tolist()


def _check_numbers(image_of: Tensor, documents: int, images: int) -> None:
    if image_of.dtype != torch.int64 or image_of.shape != (documents,):
        raise DataError(
            f"image_of must be int64 of shape [{documents}], one number a document, got {image_of.dtype} of shape "
            f"{list(image_of.shape)}",
            where="image_of",
        )
    wrong = image_of[(image_of < NO_IMAGE) | (image_of >= images)]
    if wrong.numel():
        raise DataError(
            f"image {int(wrong[0])} does not exist: there are {images}", where="image_of", remedy="-1 is for no image"
        )


def _check_prompts(config: LlamaConfig, prompts: Sequence[Sequence[int]]) -> None:
    for number, prompt in enumerate(prompts, 1):
        where = f"prompt {number}"
        if not 1 <= len(prompt) < config.context:
            raise DataError(f"has {len(prompt)} tokens", where=where, remedy=f"1 to {config.context - 1} fit the model")
        wrong = next((token for token in prompt if not 0 <= token < config.vocabulary), None)
        if wrong is not None:
            raise DataError(f"{wrong} is no token of the model's {config.vocabulary}", where=where)
