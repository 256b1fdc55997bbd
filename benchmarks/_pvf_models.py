"""Models for bit flips: a DLRM, a small LeNet and a small transformer, with weights in several formats."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cordillera import workflows
from cordillera.data.ranking.datasets import prepare
from cordillera.data.ranking.features import RankingBatch
from cordillera.models.ranking.base import RankingModel
from cordillera.numerics.faults.bit_flips import BitLayout, Region, regions_of
from cordillera.numerics.faults.fault_model import Component
from cordillera.numerics.faults.replay import Decision, Replay, Threshold
from cordillera.recipe import load
from cordillera.run import Run
from cordillera.workflows.injection import TableFaults
from cordillera.workflows.trained import restore_model


@dataclass(frozen=True)
class Argmax(Decision):
    """Class with the largest output, ``[B, classes]``."""

    def decide(self, outputs: Tensor) -> Tensor:
        return outputs.argmax(-1, keepdim=True)

    def margin(self, outputs: Tensor) -> Tensor:
        best = outputs.topk(2).values if outputs.shape[-1] > 1 else F.pad(outputs, (0, 1), value=-torch.inf)
        return best[..., :1] - best[..., 1:2]


@dataclass(frozen=True)
class Target:
    """Model of a campaign.

    Attributes:
        name: Name of the model.
        components: Parts of the model.
        replay: Judge of faults in the parts.
        quality: Quality of the trained model, in words.
    """

    name: str
    components: list[Component]
    replay: Replay
    quality: str


def trained_dlrm(recipe: str, steps: int, samples: int) -> tuple[RankingModel, RankingBatch, str]:
    """Return a DLRM of a shipped recipe after at most ``steps`` steps, test samples, and its quality."""
    resolved = load(recipe, [f"training.max_steps={steps}"])
    with tempfile.TemporaryDirectory() as folder:
        outcome = workflows.train(resolved, Path(folder) / "run")
        splits = prepare(resolved.data)
        _, model = restore_model(Run(Path(folder) / "run"), splits.features, torch.device("cpu"))
    assert outcome.evaluation is not None
    nes = ", ".join(f"{task} {values['ne']:.4f}" for task, values in outcome.evaluation.metrics().items())
    rows = np.random.default_rng(0).choice(len(splits.test), min(samples, len(splits.test)), replace=False)
    return model, splits.test.batch(np.sort(rows)), f"test NE: {nes}"


class LeNet(nn.Sequential):
    """LeNet-5 for images of 8 x 8 pixels: two convolutions and three linear layers."""

    def __init__(self) -> None:
        super().__init__()
        pool, relu = nn.MaxPool2d(2), nn.ReLU()
        self.convolutions = nn.Sequential(
            nn.Conv2d(1, 6, 3, padding=1), relu, pool, nn.Conv2d(6, 16, 3, padding=1), relu, pool, nn.Flatten()
        )
        self.linear = nn.Sequential(nn.Linear(64, 120), relu, nn.Linear(120, 84), relu, nn.Linear(84, 10))


def trained_lenet(epochs: int, samples: int) -> tuple[nn.Module, Tensor, str]:
    """Return LeNet trained on scikit-learn's digits, images of its test split, and its accuracy on them."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.from_numpy(digits.images).float().unsqueeze(1) / 16
    labels = torch.from_numpy(digits.target)
    torch.manual_seed(0)
    order = torch.randperm(len(images))
    train, test = order[:1437], order[1437:]
    model = LeNet()
    _fit(model, lambda: [(images[part], labels[part]) for part in train[torch.randperm(1437)].split(64)], epochs)
    return model, images[test[:samples]], _accuracy(model, images[test], labels[test])


class Block(nn.Module):
    """Attention and a feed-forward network, with norms first."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.attention = nn.ModuleList([nn.Linear(width, 3 * width), nn.Linear(width, width)])
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.attention[0](self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).transpose(-4, -2)
        q, k, v = qkv.unbind(-3)  # [B, heads, T, width / heads]
        mixed = torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, -1) @ v
        x = x + self.attention[1](mixed.transpose(-3, -2).flatten(-2))
        return x + self.feed_forward(self.norms[1](x))


class Transformer(nn.Module):
    """Two blocks that read tokens and name the most frequent one."""

    def __init__(self, tokens: int = 10, length: int = 8, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        self.position = nn.Parameter(torch.randn(length, width) * 0.02)
        self.blocks = nn.Sequential(Block(width, 1), Block(width, 1))
        self.head = nn.Linear(width, tokens)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.embedding(tokens) + self.position).mean(-2))


def trained_transformer(steps: int, samples: int) -> tuple[nn.Module, Tensor, str]:
    """Return the trained transformer, unseen sequences, and its accuracy on them."""
    generator = torch.Generator().manual_seed(0)

    def draw(count: int) -> tuple[Tensor, Tensor]:
        label = torch.randint(0, 10, (count,), generator=generator)
        tokens = torch.randint(0, 10, (count, 8), generator=generator)
        repeated = torch.rand(count, 8, generator=generator).argsort(-1) < 4  # at least half of the positions
        return torch.where(repeated, label.unsqueeze(1), tokens), label

    torch.manual_seed(0)
    model = Transformer()
    _fit(model, lambda: [draw(128)], steps)
    tokens, labels = draw(1000)
    return model, tokens[:samples], _accuracy(model, tokens, labels)


def _fit(model: nn.Module, batches: Callable[[], Sequence[tuple[Tensor, Tensor]]], epochs: int) -> None:
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    for _ in range(epochs):
        for inputs, labels in batches():
            loss = F.cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    model.eval()


def _accuracy(model: nn.Module, inputs: Tensor, labels: Tensor) -> str:
    with torch.no_grad():
        return f"accuracy {float((model(inputs).argmax(-1) == labels).float().mean()):.1%}"


def _grouped(regions: Sequence[Region], group: Callable[[str], str]) -> list[Component]:
    groups: dict[str, list[Region]] = {}
    for region in regions:
        groups.setdefault(group(region.name), []).append(region)
    return [Component.of(name, members) for name, members in groups.items()]


def lenet_part(name: str) -> str:
    """Return the component of a parameter of :class:`LeNet` by its ``name``."""
    return "convolutions" if name.startswith("convolutions") else "linear layers"


def transformer_part(name: str) -> str:
    """Return the component of a parameter of :class:`Transformer` by its ``name``."""
    parts = ("attention", "feed_forward", "norms", "head")
    return next((part.replace("_", " ") for part in parts if part in name), "embeddings")


def classifier(name: str, model: nn.Module, inputs: Tensor, quality: str, group: Callable[[str], str]) -> Target:
    """Return a trained classifier whose weights are hit as they are; ``group`` maps parameters to components."""
    return Target(name, _grouped(regions_of(model), group), Replay(lambda: model(inputs), Argmax()), quality)


def stored_as(
    dtype: torch.dtype, name: str, model: nn.Module, inputs: tuple[Tensor, ...], group: Callable[[str], str | None]
) -> Target:
    """Return a model whose weights are stored in ``dtype`` and used in float32.

    Args:
        dtype: Data type of the stored weights.
        name: Name of the model.
        model: Trained model, not changed. One output is taken as a logit, several as classes.
        inputs: Inputs of the model.
        group: Function from a parameter's name to its component; None for one that stays in float32 and is not hit.
    """
    stored = {key: tensor.detach().to(dtype) for key, tensor in model.named_parameters() if group(key)}

    def forward() -> Tensor:
        return torch.func.functional_call(model, {key: tensor.float() for key, tensor in stored.items()}, inputs)

    with torch.no_grad():
        decision = Threshold() if forward().shape[-1] < 10 else Argmax()
    regions = [Region.of(key, tensor) for key, tensor in stored.items()]
    return Target(name, _grouped(regions, lambda key: group(key) or ""), Replay(forward, decision), "")


class DensePart(nn.Module):
    """The part of a ranking model after the embeddings."""

    def __init__(self, model: RankingModel) -> None:
        super().__init__()
        self.model = copy.deepcopy(model)

    def forward(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        return self.model.score(dense, embeddings)


def int8_tables(model: RankingModel, batch: RankingBatch) -> Target:
    """Return a ranking model whose table rows are bytes with a float32 scale and bias (FBGEMM's layout)."""
    weight = model.tables.weight.detach()
    low, high = weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    scale = ((high - low) / 255).clamp(min=1e-12)
    payload = ((weight - low) / scale).round().to(torch.uint8)
    rows = torch.cat([payload, scale.view(torch.uint8), low.contiguous().view(torch.uint8)], 1)
    width = weight.shape[1]

    def dequantise(stored: Tensor) -> Tensor:
        scale, bias = stored[:, width:].contiguous().view(torch.float32).unbind(1)
        return stored[:, :width].float() * scale.unsqueeze(1) + bias.unsqueeze(1)

    faults = TableFaults(model, batch, torch.empty(0), dequantise)

    def embeddings() -> Tensor:
        vectors = dequantise(rows[faults.row_of]) * faults.weights.unsqueeze(1)
        pooled = torch.zeros(len(batch) * len(model.features.sparse), width).index_add_(0, faults.bag_of, vectors)
        return pooled.unflatten(0, (-1, len(batch))).transpose(0, 1)

    faults.embeddings = embeddings()
    regions = {
        "int8 payload": Region.of("payload", rows, columns=slice(0, width)),
        "fp32 scales": Region.of("scale", rows, BitLayout.of(torch.float32), slice(width, width + 4)),
        "fp32 biases": Region.of("bias", rows, BitLayout.of(torch.float32), slice(width + 4, width + 8)),
    }
    replay = Replay(
        lambda: model.score(batch.dense, embeddings()),
        Threshold(),
        lookups={region.name: faults for region in regions.values()},
    )
    return Target("int8 tables", [Component.of(name, [region]) for name, region in regions.items()], replay, "")
