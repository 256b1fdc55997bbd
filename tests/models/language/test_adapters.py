"""Adapters: a product of two thin matrices beside a frozen weight, and one weight once merged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from cordillera.errors import CheckpointError, CordilleraError
from cordillera.models.language.adapters import (
    ADAPTED,
    AdaptedLayer,
    AdaptedLinear,
    AdapterConfig,
    merge_adapters,
)
from cordillera.models.language.checkpoints import open_checkpoint, read_model, save_hugging_face
from cordillera.models.language.checkpoints.peft_adapter import save_peft
from cordillera.models.language.checkpoints.source import trained_names
from cordillera.models.language.llama import Llama, LlamaConfig, parameter_count
from cordillera.workflows.post_training.adapters import export_adapter
from tests.models.language.sharded_folders import write_step

SIZES = {"layers": 2, "hidden": 16, "heads": 4, "kv_heads": 2, "ffn": 24, "vocabulary": 32, "context": 64}
TOKENS, OFFSETS = torch.arange(20) % 32, torch.tensor([0, 7, 20])


def adapted(seed: int = 0, trained: bool = True, **settings: object) -> Llama:
    """A model with adapters that have learnt something, unless they are not ``trained``."""
    config = LlamaConfig(**SIZES, adapter=AdapterConfig(**settings))
    model = Llama(config)
    model.init_weights(seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                parameter.mul_(5)
            if name.endswith(".wide") and trained:
                parameter.normal_(0.0, 0.2, generator=generator)
    return model


def base(seed: int = 0, **others: object) -> Llama:
    model = Llama(LlamaConfig(**SIZES, **others))
    model.init_weights(seed)
    return model


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("rank", "alpha"), [(1, 1.0), (4, 16.0), (40, 3.0)])
def test_a_layer_is_its_weight_and_the_scaled_product(seed: int, rank: int, alpha: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    linear = nn.Linear(9, 13, bias=False, dtype=torch.float64)
    layer = AdaptedLinear(linear, AdapterConfig(rank=rank, alpha=alpha))
    with torch.no_grad():
        for parameter in (layer.narrow, layer.wide):
            parameter.normal_(generator=generator)
    x = torch.randn(5, 9, generator=generator, dtype=torch.float64)
    whole = linear.weight + alpha / rank * sum(
        torch.outer(layer.wide[:, place], layer.narrow[place]) for place in range(rank)
    )
    torch.testing.assert_close(layer(x), x @ whole.T, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
def test_a_merged_layer_computes_what_the_adapted_one_does(dtype: torch.dtype, close: float) -> None:
    linear = nn.Linear(32, 24, bias=False, dtype=dtype)
    layer = AdaptedLinear(linear, AdapterConfig(rank=3))
    with torch.no_grad():
        layer.narrow.normal_(0.0, 0.1)
        layer.wide.normal_(0.0, 0.1)
    x = torch.randn(7, 32, dtype=dtype)
    merged = layer.merged()
    assert merged.weight.dtype == dtype
    assert not merged.weight.is_meta
    torch.testing.assert_close(merged(x), layer(x), rtol=close, atol=close)


@pytest.mark.parametrize("layers", [ADAPTED, ("query", "down"), ("gate",)])
def test_a_merged_model_computes_what_the_adapted_one_does(layers: tuple[AdaptedLayer, ...]) -> None:
    model = adapted(layers=layers)
    before = model(TOKENS, OFFSETS)
    untouched = base()(TOKENS, OFFSETS)
    assert float((before - untouched).detach().abs().max()) > 0.01
    merge_adapters(model)
    assert not any(isinstance(module, AdaptedLinear) for module in model.modules())
    assert {name for name, _ in model.named_parameters()} == {name for name, _ in base().named_parameters()}
    torch.testing.assert_close(model(TOKENS, OFFSETS), before, rtol=1e-5, atol=1e-6)


def test_a_model_with_fresh_adapters_is_the_one_without_bit_for_bit() -> None:
    config = LlamaConfig(**SIZES, adapter=AdapterConfig())
    model = Llama(config)
    model.init_weights(3)
    assert torch.equal(model(TOKENS, OFFSETS), base(3)(TOKENS, OFFSETS))
    names = dict(model.named_parameters())
    assert all(names[name].any() for name in names if name.endswith(".narrow"))
    assert not any(names[name].any() for name in names if name.endswith(".wide"))
    merge_adapters(model)
    assert torch.equal(model(TOKENS, OFFSETS), base(3)(TOKENS, OFFSETS))


def test_half_precision_is_merged_in_single() -> None:
    linear = nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
    layer = AdaptedLinear(linear, AdapterConfig(rank=64, alpha=64))
    with torch.no_grad():
        layer.narrow.normal_()
        layer.wide.normal_()
    exact = layer.weight.double() + layer.wide.double() @ layer.narrow.double()
    torch.testing.assert_close(layer.merged().weight.double(), exact, rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("scores", [False, True])
@pytest.mark.parametrize("layers", [ADAPTED, ("key",), ("up", "output")])
def test_only_adapters_and_the_scores_are_trained(layers: tuple[AdaptedLayer, ...], scores: bool) -> None:
    config = LlamaConfig(**SIZES, scores=scores, adapter=AdapterConfig(layers=layers))
    expected = {
        f"layers.{number}.{'attention' if layer in ADAPTED[:4] else 'feed_forward'}.{layer}.{part}"
        for number in range(2)
        for layer in layers
        for part in ("narrow", "wide")
    }
    assert trained_names(config) == expected | ({"score.weight"} if scores else set())
    model = Llama(config)
    model.init_weights()
    model(TOKENS, OFFSETS).square().sum().backward()
    assert {name for name, one in model.named_parameters() if one.grad is not None} == trained_names(config)


@pytest.mark.parametrize("layers", [ADAPTED, ("query",), ("value", "output", "down"), ("gate", "up")])
@pytest.mark.parametrize(
    "others", [{}, {"tied": True}, {"scores": True}, {"scores": True, "tied": True}, {"head_dim": 6}]
)
@pytest.mark.parametrize("rank", [1, 8])
def test_the_number_of_parameters_is_that_of_the_model(
    layers: tuple[AdaptedLayer, ...], others: dict[str, object], rank: int
) -> None:
    for adapter in (None, AdapterConfig(rank=rank, layers=layers)):
        config = LlamaConfig(**SIZES, **others, adapter=adapter)
        assert parameter_count(config) == sum(parameter.numel() for parameter in Llama(config).parameters())


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"rank": 0}, "greater than or equal to 1"),
        ({"alpha": 0.0}, "greater than 0"),
        ({"alpha": float("inf")}, "finite"),
        ({"layers": ()}, "at least 1"),
        ({"layers": ("head",)}, "'query', 'key'"),
        ({"dropout": 0.1}, "not permitted"),
    ],
)
def test_settings_that_make_no_adapter_are_refused(settings: dict[str, object], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        AdapterConfig(**settings)


def test_layers_of_experts_have_no_adapters() -> None:
    with pytest.raises(ValidationError, match="adapter: layers of experts have none; train all weights"):
        LlamaConfig(**SIZES, experts={"count": 4}, adapter=AdapterConfig())


FAMILIES = {
    "llama": {"tied": True},
    "qwen2": {"attention_bias": True},
    "qwen3": {"head_norms": True},
}


def published_and_adapted(folder: Path, *, layers: tuple[AdaptedLayer, ...] = ADAPTED, **others: Any) -> Path:
    """Write a model for other programs, and a checkpoint of it with adapters that have learnt something."""
    whole = {**SIZES, **others}
    plain = Llama(LlamaConfig(**whole))
    plain.init_weights(1)
    save_hugging_face(plain, folder / "base")
    model = Llama(LlamaConfig(**whole, adapter=AdapterConfig(rank=3, alpha=5.0, layers=layers)))
    model.init_weights(2)
    model.load_state_dict(plain.state_dict(), strict=False)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".wide"):
                parameter.normal_(0.0, 0.2, generator=torch.Generator().manual_seed(len(name)))
    return write_step(folder / "step-000000007", model)


@pytest.mark.cases(3)
@pytest.mark.parametrize("layers", [ADAPTED, ("query", "value")], ids=len)
@pytest.mark.parametrize("family", FAMILIES)
def test_peft_computes_the_logits_of_exported_adapters(
    tmp_path: Path, family: str, layers: tuple[AdaptedLayer, ...]
) -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    source = open_checkpoint(published_and_adapted(tmp_path, layers=layers, **FAMILIES[family]))
    save_peft(source, tmp_path / "adapter", str(tmp_path / "base"))
    settings = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(tmp_path / "base")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    with torch.no_grad():
        before = base(TOKENS[None]).logits[0]
        found = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")(TOKENS[None]).logits[0]
        expected = read_model(source)(TOKENS, torch.tensor([0, len(TOKENS)]))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert (found - before).abs().max() > 0.01


def test_adapters_that_cannot_be_exported_are_refused(tmp_path: Path) -> None:
    step = published_and_adapted(tmp_path)
    plain = open_checkpoint(tmp_path / "base")
    with pytest.raises(CheckpointError, match="has no adapters"):
        save_peft(plain, tmp_path / "none", "base")
    with pytest.raises(CheckpointError, match="is not empty"):
        save_peft(open_checkpoint(step), tmp_path / "base", "base")
    with pytest.raises(CordilleraError, match="base: is not known"):
        export_adapter(step, tmp_path / "none")
    (tmp_path / "phi3").mkdir()
    phi3 = published_and_adapted(tmp_path / "phi3", rotary_dim=2)
    with pytest.raises(CheckpointError, match="in one matrix"):
        save_peft(open_checkpoint(phi3), tmp_path / "none", "base")
    (tmp_path / "fused").mkdir()
    (tmp_path / "fused" / "config.json").write_text('{"model_type": "phi3"}')
    for places in ((str(tmp_path / "fused"), None), ("published", str(tmp_path / "fused"))):  # of a Llama's positions
        with pytest.raises(CheckpointError, match="in one matrix"):
            save_peft(open_checkpoint(step), tmp_path / "none", places[0], start=places[1])
    damaged = Llama(LlamaConfig(**SIZES, adapter=AdapterConfig()))
    damaged.init_weights(0)
    with torch.no_grad():
        damaged.layers[0].attention.query.wide[0, 0] = float("nan")
    with pytest.raises(CheckpointError, match=r"layers\.0\.attention\.query\.wide holds NaN"):
        save_peft(open_checkpoint(write_step(tmp_path / "damaged", damaged)), tmp_path / "none", "base")
    reward = Llama(LlamaConfig(**SIZES, adapter=AdapterConfig(), scores=True))
    reward.init_weights(0)
    with pytest.raises(CheckpointError, match=r"(?s)is a reward model, whose score would be lost.*best-of --reward"):
        save_peft(open_checkpoint(write_step(tmp_path / "reward", reward)), tmp_path / "none", "base")
    assert not (tmp_path / "none").exists()
