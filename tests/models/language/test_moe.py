"""Experts in a Llama: against every expert computed densely, against transformers' Mixtral, and their balance."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from cordillera.errors import CheckpointError
from cordillera.models.language.checkpoints import load, save_consolidated, save_hugging_face
from cordillera.models.language.flops import flops_per_token
from cordillera.models.language.kv_cache import KVCache
from cordillera.models.language.llama import Llama, LlamaConfig, parameter_count
from cordillera.models.language.moe import ExpertLayer, ExpertsConfig, ExpertTraining
from cordillera.training.language.engine import next_tokens

SIZES = {"layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 24, "vocabulary": 50, "context": 64}


def make(seed: int = 0, shared: int = 0, scale: float = 1.0, **sizes: int) -> Llama:
    experts = ExpertsConfig(count=8, chosen=sizes.pop("chosen", 2), shared=shared, scale=scale)
    model = Llama(LlamaConfig.model_validate({**SIZES, **sizes, "experts": experts}))
    model.init_weights(seed)
    with torch.no_grad():
        for layer in layers(model):
            layer.router.weight.mul_(20)  # so that tokens differ in what they choose
    return model


def layers(model: Llama) -> list[ExpertLayer]:
    return [block.feed_forward for block in model.layers]  # type: ignore[union-attr, misc]


def text(seed: int = 0) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(0, 50, (37,), generator=draw), torch.tensor([0, 9, 9, 10, 37])


def every_expert(layer: ExpertLayer, x: Tensor) -> Tensor:
    """Compute all experts for all tokens, and weigh those that are not chosen by zero."""
    logits = F.linear(x, layer.router.weight)
    shares, chosen = logits.softmax(-1), (logits + layer.router.bias).topk(layer.router.config.chosen, -1).indices
    gates = torch.zeros_like(shares).scatter(1, chosen, shares.gather(1, chosen))
    gates = layer.router.config.scale * gates / gates.sum(-1, keepdim=True)
    hidden = F.silu(torch.einsum("td,edh->teh", x, layer.gate)) * torch.einsum("td,edh->teh", x, layer.up)
    out = torch.einsum("teh,ehd,te->td", hidden, layer.down, gates)
    return out if layer.shared is None else out + layer.shared(x)


@pytest.mark.parametrize("policy", ["ABY", "AB", "X"])
@pytest.mark.parametrize("shared", [0, 16])
def test_a_layer_is_the_weighted_sum_of_its_experts(policy: str, shared: int) -> None:
    layer = layers(make(shared=shared, scale=2.5))[0]
    layer.keeps = policy  # type: ignore[assignment]
    with torch.no_grad():
        layer.router.bias.copy_(torch.linspace(-1, 1, 8))
    x = torch.randn(33, 32, generator=torch.Generator().manual_seed(1)).requires_grad_()
    found, expected = layer(x, torch.tensor([0, 33])), every_expert(layer, x)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    weights = [x, *(weight for weight in layer.parameters() if weight.requires_grad)]
    incoming = torch.randn(33, 32, generator=torch.Generator().manual_seed(2))
    ours, theirs = (torch.autograd.grad(out, weights, incoming, retain_graph=True) for out in (found, expected))
    for own, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-5)


def test_sizes_are_counted() -> None:
    for shared in (0, 16):
        model = make(shared=shared)
        assert sum(weight.numel() for weight in model.parameters()) == parameter_count(model.config)
    dense = model.config.model_copy(update={"experts": None, "ffn": 2 * 24 + 16})
    assert flops_per_token(model.config) == flops_per_token(dense) + 6 * 2 * 32 * 8


def test_too_many_choices_are_refused() -> None:
    with pytest.raises(ValueError, match=r"chosen \(9\) must be at most count \(8\)"):
        ExpertsConfig(count=8, chosen=9)


def test_generation_one_by_one_is_that_of_the_whole_text() -> None:
    model, (tokens, _) = make(), text()
    with torch.no_grad():
        whole = model(tokens, torch.tensor([0, 37]))
        cache = KVCache(model.config, 1, 37)
        parts = [model(tokens[i : i + 1], torch.tensor([0, 1]), cache=cache) for i in range(37)]
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-4, atol=1e-5)


def losses(layer: ExpertLayer, settings: ExpertTraining, parts: list[tuple[Tensor, Tensor, Tensor]]) -> Tensor:
    """Gradient of the router's weights by its losses alone, over parts of a batch."""
    layer.router.settings, layer.router.divisor = settings, sum(int(part[2].sum()) for part in parts)
    layer.router.counts.zero_()
    layer.zero_grad()
    for x, offsets, has_target in parts:
        _, gates = layer.router(x, offsets, has_target)
        (gates.sum() * 0).backward()
    assert layer.router.weight.grad is not None
    return layer.router.weight.grad.clone()


def test_losses_are_the_formulas_whatever_is_packed_together() -> None:
    """Sums over documents of their means, and of squares, divided by the targets of the iteration."""
    layer = layers(make())[0]
    tokens, offsets = text()
    x = torch.randn(37, 32, generator=torch.Generator().manual_seed(3))
    has_target = next_tokens(tokens, offsets) >= 0
    settings = ExpertTraining(balance_loss=0.3, z_loss=0.2)
    whole = losses(layer, settings, [(x, offsets, has_target)])
    counts = layer.router.counts.clone()
    apart = [(x[a:b], torch.tensor([0, b - a]), has_target[a:b]) for a, b in itertools.pairwise(offsets) if b > a]
    torch.testing.assert_close(losses(layer, settings, apart), whole, rtol=1e-5, atol=1e-8)
    assert torch.equal(layer.router.counts, counts)

    weight = layer.router.weight.detach().double().requires_grad_()
    logits = x.double() @ weight.T
    total = 0.2 * logits[has_target].logsumexp(-1).square().sum()
    chosen, expected = F.linear(x, layer.router.weight).softmax(-1).topk(2).indices, torch.zeros(8)
    for start, stop in itertools.pairwise(offsets):
        own = [t for t in range(int(start), int(stop)) if has_target[t]]
        fractions = torch.bincount(chosen[own].flatten(), minlength=8) / max(2 * len(own), 1)
        expected += fractions * 2 * len(own)
        if own:
            total = total + 0.3 * len(own) * 8 * (fractions * logits.softmax(-1)[own].mean(0)).sum()
    (total / has_target.sum()).backward()
    torch.testing.assert_close(whole.double(), weight.grad, rtol=1e-4, atol=1e-7)
    assert counts.tolist() == expected.round().tolist()


def test_evaluation_counts_nothing() -> None:
    model, (tokens, offsets) = make(), text()
    with torch.no_grad():
        model(tokens, offsets)
    model(tokens, offsets).sum().backward()  # without targets
    assert not any(layer.router.counts.any() for layer in layers(model))


@pytest.mark.parametrize("tied", [False, True])
def test_mixtral_checkpoints_go_both_ways(tied: bool, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=50, hidden_size=32, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=8, num_experts_per_tok=2, tie_word_embeddings=tied, rms_norm_eps=1e-5,
        max_position_embeddings=64,
    )  # fmt: skip
    theirs = transformers.MixtralForCausalLM(config).float().eval()
    theirs.save_pretrained(tmp_path / "theirs")
    _, ours = load(tmp_path / "theirs")
    tokens, _ = text()
    with torch.no_grad():
        expected = theirs(tokens[None]).logits[0]
        torch.testing.assert_close(ours(tokens, torch.tensor([0, 37])), expected, rtol=1e-4, atol=1e-5)
        save_hugging_face(ours, tmp_path / "ours")
        again = transformers.MixtralForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float32).eval()
        for name, weight in theirs.state_dict().items():
            assert torch.equal(weight, again.state_dict()[name]), name
        torch.testing.assert_close(again(tokens[None]).logits[0], expected, rtol=0, atol=0)


def test_a_mixtral_whose_weights_add_up_to_two_computes_the_same(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model, (tokens, _) = make(scale=2.0), text()
    save_hugging_face(model, tmp_path / "a")
    theirs = transformers.MixtralForCausalLM.from_pretrained(tmp_path / "a", dtype=torch.float32).eval()
    _, ours = load(tmp_path / "a")
    with torch.no_grad():
        expected = model(tokens, torch.tensor([0, 37]))
        torch.testing.assert_close(theirs(tokens[None]).logits[0], expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(ours(tokens, torch.tensor([0, 37])), expected, rtol=1e-5, atol=1e-6)


def test_what_a_layout_cannot_hold_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="this layout has no shared expert; this model has one of width 16"):
        save_hugging_face(make(shared=16), tmp_path / "a")
    model = make()
    with torch.no_grad():
        layers(model)[1].router.bias[3] = 0.5
    with pytest.raises(CheckpointError, match=r"layers\.1\.feed_forward\.router\.bias \(of 1\) is not 0"):
        save_hugging_face(model, tmp_path / "b")
    with pytest.raises(CheckpointError, match="cannot hold experts"):
        save_consolidated(model, tmp_path / "c")
    assert not list(tmp_path.iterdir())


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    save_hugging_face(make(), tmp_path / "a")
    file = tmp_path / "a" / "model.safetensors"
    (tmp_path / "a" / "checksums.json").unlink()
    weights = load_file(file)
    del weights["model.layers.1.block_sparse_moe.experts.5.w3.weight"]
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(
        CheckpointError, match=r"tensor model\.layers\.1\.block_sparse_moe\.experts\.5\.w3\.weight is not"
    ):
        load(tmp_path / "a")
