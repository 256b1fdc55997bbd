"""Drafters: their loss against dense computations in 64 bits, and training against serving."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from cordillera.distributed.vocabulary_loss import IGNORED
from cordillera.errors import CheckpointError
from cordillera.models.language.checkpoints.drafter_file import drafter_of, read_drafter, write_drafter
from cordillera.models.language.draft_model import DraftConfig
from cordillera.models.language.llama import Llama, LlamaConfig
from cordillera.models.language.rope import rope_table, rotate
from cordillera.models.language.stages import LlamaStage
from cordillera.serving.language import draft_models
from cordillera.serving.language.draft_models import ModelDrafts
from cordillera.training.language.drafting import DraftObjective, UnrolledAttention, soft_cross_entropy, unroll
from cordillera.training.language.objectives import DraftingConfig

VOCABULARY, LIKELY = 53, 40
KINDS = [("head", 1), ("head", 2), ("block", 2)]


def make(kind: Any = "head", layers: int = 1, dtype: torch.dtype = torch.float64, length: int = 4) -> Llama:
    config = LlamaConfig(
        layers=3,
        hidden=32,
        heads=4,
        kv_heads=2,
        ffn=48,
        vocabulary=VOCABULARY,
        context=64,
        tied=True,
        draft=DraftConfig(kind=kind, layers=layers, length=length, vocabulary=LIKELY),
    )
    model = Llama(config)
    model.init_weights(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(8)
    return model.to(dtype)


def features_of(model: Llama, tokens: Tensor, offsets: Tensor) -> Tensor:
    assert model.draft is not None
    taps: dict[int, Tensor] = dict.fromkeys(model.draft.taps, tokens)
    model.hidden(tokens, offsets, taps=taps)
    return torch.cat(list(taps.values()), 1)


def test_only_the_drafter_of_a_model_is_trained() -> None:
    model = make()
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {name for name, _ in model.named_parameters() if name.startswith("draft.")}


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_attention_of_unrolled_steps_is_that_over_a_whole_mask(steps: int) -> None:
    torch.manual_seed(steps)
    lengths = [5, 1, 7]
    offsets = torch.tensor([0, 5, 6, 13])
    total = sum(lengths)
    parts = [
        tuple(torch.randn(total, heads, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2))
        for _ in range(steps)
    ]
    attention = UnrolledAttention()
    found = torch.stack([attention(*part, offsets) for part in parts])
    wanted = []
    document = torch.arange(3).repeat_interleave(torch.tensor(lengths))
    place = torch.arange(total)
    for step in range(steps):
        q = parts[step][0]
        keys = torch.cat([parts[other][1] for other in range(step + 1)]).repeat_interleave(2, 1)
        values = torch.cat([parts[other][2] for other in range(step + 1)]).repeat_interleave(2, 1)
        scores = torch.einsum("qhd,khd->hqk", q, keys) / math.sqrt(8)
        seen = [(document[:, None] == document) & (place[:, None] >= place)]
        seen += [torch.eye(total, dtype=torch.bool)] * step
        shares = scores.masked_fill(~torch.cat(seen, 1), -torch.inf).softmax(-1)
        wanted.append(torch.einsum("hqk,khd->qhd", shares, values))
    torch.testing.assert_close(found, torch.stack(wanted), rtol=1e-10, atol=1e-10)
    weights = torch.randn_like(found)
    inputs = [one for part in parts for one in part]
    ours = torch.autograd.grad((found * weights).sum(), inputs, allow_unused=True)
    theirs = torch.autograd.grad((torch.stack(wanted) * weights).sum(), inputs, allow_unused=True)
    for own, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("rows", [1, 4, 100])
def test_cross_entropy_with_soft_targets_is_the_dense_one(rows: int) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(9, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(11, 6, dtype=torch.float64)
    targets = torch.randn(9, 11, dtype=torch.float64).softmax(1)
    targets[[2, 8]] = 0
    assert torch.autograd.gradcheck(lambda x: soft_cross_entropy(x, weight, targets, rows)[0], hidden)
    dense = -(targets * F.linear(hidden, weight).log_softmax(1)).sum()
    loss, likeliest = soft_cross_entropy(hidden, weight, targets, rows)
    torch.testing.assert_close(loss, dense)
    assert likeliest.tolist() == F.linear(hidden, weight).argmax(1).tolist()


class OneByOne:
    """A drafter that computes one row at a time, which sees all rows before it."""

    def __init__(self, model: Llama) -> None:
        assert model.draft is not None
        self.draft, self.config = model.draft, model.config
        self.keys: list[list[Tensor]] = [[] for _ in self.draft.layers]
        self.values: list[list[Tensor]] = [[] for _ in self.draft.layers]

    def __call__(self, embedded: Tensor, x: Tensor, position: int) -> Tensor:
        x = x + self.draft.join(torch.cat([self.draft.token_norm(embedded), self.draft.feature_norm(x)]))
        table = rope_table(self.config, torch.tensor([position]))
        for layer, keys, values in zip(self.draft.layers, self.keys, self.values, strict=True):
            normed, attention = layer.attention_norm(x), layer.attention
            q = rotate(attention.query(normed).view(1, 4, 8), table)[0]
            keys.append(rotate(attention.key(normed).view(1, 2, 8), table)[0])
            values.append(attention.value(normed).view(2, 8))
            k, v = (torch.stack(own).repeat_interleave(2, 1) for own in (keys, values))
            shares = (torch.einsum("hd,khd->hk", q, k) / math.sqrt(8)).softmax(1)
            x = x + attention.output(torch.einsum("hk,khd->hd", shares, v).flatten())
            x = x + layer.feed_forward(layer.feed_forward_norm(x))
        return x


@torch.no_grad()
def dense_loss(model: Llama, tokens: Tensor, offsets: Tensor, labels: Tensor, decay: float) -> float:
    """The loss of each anchor alone, its steps one after the other."""
    draft = model.draft
    assert draft is not None
    fused, hidden = draft.fused(features_of(model, tokens, offsets)), model.hidden(tokens, offsets)
    head, total = model.embedding.weight, 0.0
    for first, last in itertools.pairwise(offsets.tolist()):
        for anchor in range(first, last - 1):
            run = OneByOne(model)
            for place in range(first, anchor + 1):
                x = run(model.embedding(tokens[place + 1]), fused[place], place - first)
            for step in range(min(draft.config.length, last - 1 - anchor)):
                read = anchor + 1 + step
                if step:
                    embedded = model.embedding(tokens[read]) if draft.mask is None else draft.mask
                    x = run(embedded, x if draft.mask is None else fused[anchor], anchor - first + step)
                wanted = F.linear(hidden[read], head)
                if labels[read] != IGNORED and wanted.argmax() < LIKELY:
                    logs = F.linear(draft.norm(x), head[:LIKELY]).log_softmax(0)
                    total -= decay**step * float((wanted[:LIKELY].softmax(0) * logs).sum())
    return total


@pytest.mark.parametrize(("kind", "layers"), KINDS)
def test_the_loss_is_that_of_each_place_alone(kind: str, layers: int) -> None:
    model = make(kind, layers)
    torch.manual_seed(1)
    tokens, offsets = torch.randint(VOCABULARY, (14,)), torch.tensor([0, 6, 7, 14])
    labels = torch.cat([tokens[1:], tokens[:1]])
    labels[[0, 5, 6, 8, 13]] = IGNORED
    stage = LlamaStage(model)
    objective = DraftObjective(DraftingConfig(decay=0.7))
    stage.objective, stage.loss_rows = objective, 3
    loss = stage(tokens, offsets, None, labels)
    assert loss.item() == pytest.approx(dense_loss(model, tokens, offsets, labels, 0.7), rel=1e-9)
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters() if p.requires_grad)
    measured = objective.take()
    assert 0 <= measured["accuracy"] <= measured["accepted"] <= 4 * measured["units"]
    assert measured["units"] == 8  # anchors whose first draft has a label: one before each of the labels but the first
    assert not stage.tapped


def test_documents_do_not_leak_into_each_other() -> None:
    model = make()
    torch.manual_seed(2)
    tokens = torch.randint(VOCABULARY, (12,))
    labels = torch.cat([tokens[1:], tokens[:1]])
    labels[[4, 11]] = IGNORED

    def loss(own: Tensor, targets: Tensor, offsets: list[int]) -> float:
        stage = LlamaStage(model)
        stage.objective = DraftObjective(DraftingConfig())
        return stage(own, torch.tensor(offsets), None, targets).item()

    apart = loss(tokens[:5], labels[:5], [0, 5]) + loss(tokens[5:], labels[5:], [0, 7])
    assert loss(tokens, labels, [0, 5, 12]) == pytest.approx(apart, rel=1e-12)


@pytest.mark.parametrize(("kind", "layers"), KINDS)
@pytest.mark.parametrize("read", [1, 3, 9])
def test_what_is_drafted_in_serving_is_what_was_trained(
    monkeypatch: pytest.MonkeyPatch, kind: str, layers: int, read: int
) -> None:
    """Probabilities along the path that a drafter takes alone are those of the unrolled steps over that path."""
    monkeypatch.setattr(draft_models, "_EXPANDED", 1)
    monkeypatch.setattr(draft_models, "_LEAST", 0.0)
    monkeypatch.setattr(draft_models, "_WORTH", 0.0)
    model = make(kind, layers)
    assert model.draft is not None
    torch.manual_seed(3)
    tokens = torch.randint(VOCABULARY, (10,))
    features = features_of(model, tokens, torch.tensor([0, 10]))
    drafter = ModelDrafts(model.draft, model).start()
    drafter.add(tokens[:read].tolist())
    for first in range(0, 9, read):  # features come a few at a time, and what follows them
        drafter.see(first, features[first : min(first + read, 9)])
        drafter.add(tokens[first + read : min(first + 2 * read, 10)].tolist())
        drafter.propose(200, 4)
    assert len(drafter._tokens) == 10
    found = drafter._drafted
    path: tuple[int, ...] = ()
    while path in found:
        path = (*path, max(found[path], key=lambda token: found[path][token]))
    assert len(path) == 4
    whole = torch.cat([tokens, torch.tensor(path)])
    offsets = torch.tensor([0, len(whole)])
    steps = unroll(
        model.draft, model.config, model.embedding, whole, features_of(model, whole, offsets).index_fill(
            0, torch.arange(9, len(whole)), 0.0
        ), offsets,
    )  # fmt: skip
    for step, (x, places) in enumerate(steps):
        assert places[8] == 9 + step
        wanted = F.linear(model.draft.norm(x[8]), model.embedding.weight[:LIKELY]).float().softmax(0)
        own = found[path[:step]]
        torch.testing.assert_close(torch.tensor(list(own.values())), wanted[list(own)], rtol=1e-5, atol=1e-7)


def test_a_file_of_a_drafter_is_read_for_its_model_alone(tmp_path: Path) -> None:
    model = make(dtype=torch.float32)

    class Held:
        config, path = model.config, tmp_path

        def read(self, name: str, out: Tensor) -> None:
            out.copy_(dict(model.named_parameters())[name].detach())

    path = tmp_path / "drafter.safetensors"
    source: Any = Held()
    write_drafter(source, path, {"recipe": "none"})
    file = read_drafter(path)
    assert file.facts == {"recipe": "none"}
    drafter = drafter_of(file, model)
    assert model.draft is not None
    for name, weight in drafter.named_parameters():
        torch.testing.assert_close(weight, dict(model.draft.named_parameters())[name].bfloat16().float())
    half = Llama(model.config.model_copy(update={"draft": None})).bfloat16()
    half.load_state_dict({name: w for name, w in model.state_dict().items() if not name.startswith("draft.")})
    assert drafter_of(file, half).fuse.weight.dtype == torch.bfloat16
    with torch.no_grad():
        model.embedding.weight[3, 1] += 1
    with pytest.raises(CheckpointError, match="trained for another model"):
        drafter_of(file, model)
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="damaged"):
        read_drafter(path)
    with pytest.raises(CheckpointError, match="no such file"):
        read_drafter(tmp_path / "none.safetensors")
