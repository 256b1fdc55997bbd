"""DHEN's layers are ensembles of different modules with one shortcut and one norm (Zhang et al. 2022)."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from cordillera.embeddings.tables import TablesConfig
from cordillera.errors import DataError
from cordillera.models.flops import count
from cordillera.models.ranking.dhen import DHEN, DHENConfig, DHENLayer
from cordillera.models.ranking.interactions import (
    Convolution,
    DotInteraction,
    EmbeddingAttention,
    EmbeddingCross,
    FactorizationMachineBlock,
    LinearCompression,
    RowsMLP,
)

from .conftest import MakeBatch, MakeFeatures

SGD = TablesConfig(name="sgd", learning_rate=1.0)
ALL = ("linear", "dot", "attention", "cross", "convolution", "mlp", "fm")
SMALL = DHENConfig(
    embedding_dim=4, layers=2, modules=ALL, embeddings=3, module_mlp=(8,), top_mlp=(7,), dense_mlp=(5,), rank=2
)


def small(**changes: object) -> DHENConfig:
    return DHENConfig(**{**SMALL.model_dump(), **changes})


@pytest.mark.parametrize("name", ALL)
def test_every_module_makes_the_same_number_of_embeddings(name: str) -> None:
    layer = DHENLayer(small(modules=(name,)), 6)
    assert layer.interactions[0](torch.randn(5, 6, 4)).shape == (5, 3, 4)


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("linear", [LinearCompression]),
        ("dot", [DotInteraction, RowsMLP]),
        ("attention", [EmbeddingAttention, LinearCompression]),
        ("cross", [EmbeddingCross]),
        ("convolution", [Convolution, LinearCompression]),
        ("mlp", [nn.Flatten, RowsMLP]),
        ("fm", [FactorizationMachineBlock]),
    ],
)
def test_a_module_is_the_interaction_of_its_name(name: str, kinds: list[type[nn.Module]]) -> None:
    (module,) = DHENLayer(small(modules=(name,)), 6).interactions
    assert [type(part) for part in (module if isinstance(module, nn.Sequential) else [module])] == kinds


@pytest.mark.parametrize("ensemble", ["concat", "sum", "weighted_sum"])
def test_layer_is_the_norm_of_the_ensemble_plus_the_shortcut(ensemble: str) -> None:
    layer = DHENLayer(small(ensemble=ensemble), 6)
    x = torch.randn(5, 6, 4)
    parts = [interaction(x) for interaction in layer.interactions]
    if layer.weights is not None:
        nn.init.normal_(layer.weights)
        parts = [layer.weights[i] * part for i, part in enumerate(parts)]
    joined = torch.cat(parts, 1) if ensemble == "concat" else sum(parts)
    expected = layer.norm(joined + torch.einsum("mn,bnd->bmd", layer.shortcut.weight, x))
    assert layer.outputs == expected.shape[1] == (21 if ensemble == "concat" else 3)
    torch.testing.assert_close(layer(x), expected)


def test_no_layers_leave_the_embeddings_as_they_are(make_features: MakeFeatures) -> None:
    model = DHEN(small(layers=0), make_features(dense=0), SGD)
    embeddings = torch.randn(5, 4, 4)
    torch.testing.assert_close(model.represent(torch.zeros(5, 0), embeddings), model.top(embeddings.flatten(1)))


def test_silent_modules_leave_the_norm_of_the_shortcut() -> None:
    layer = DHENLayer(small(ensemble="weighted_sum"), 3)
    nn.init.zeros_(layer.weights)
    x = torch.randn(5, 3, 4)
    assert isinstance(layer.shortcut, nn.Identity)
    torch.testing.assert_close(layer(x), nn.functional.layer_norm(x, (4,)))


def test_cross_has_no_shortcut_of_its_own() -> None:
    """A cross is of second order: without its bias it doubles four-fold."""
    cross = DHENLayer(small(modules=("cross",)), 6).interactions[0]
    x = torch.randn(5, 6, 4)
    torch.testing.assert_close(cross(2 * x), 4 * cross(x))


def _reordered(layer: DHENLayer, order: list[int]) -> DHENLayer:
    names = [SMALL.modules[i] for i in order]
    twin = DHENLayer(small(ensemble=layer.ensemble, modules=names), 6)
    for position, i in enumerate(order):
        twin.interactions[position].load_state_dict(layer.interactions[i].state_dict())
    twin.shortcut.load_state_dict(layer.shortcut.state_dict())
    return twin


def test_a_sum_does_not_depend_on_the_order_of_modules() -> None:
    layer, x = DHENLayer(small(ensemble="sum"), 6), torch.randn(5, 6, 4)
    torch.testing.assert_close(_reordered(layer, [3, 1, 6, 0, 5, 2, 4])(x), layer(x))


def test_a_concatenation_moves_with_the_order_of_modules() -> None:
    order = [3, 1, 6, 0, 5, 2, 4]
    layer, x = DHENLayer(SMALL, 6), torch.randn(5, 6, 4)
    nn.init.zeros_(layer.shortcut.weight)
    blocks = layer(x).unflatten(1, (7, 3))
    torch.testing.assert_close(_reordered(layer, order)(x), blocks[:, order].flatten(1, 2))


def test_linear_modules_without_norm_are_a_linear_stack() -> None:
    config = small(modules=("linear",))
    stack = nn.Sequential(DHENLayer(config, 6), DHENLayer(config, 3)).double()
    for layer in stack:
        layer.norm = nn.Identity()
    x, y = torch.randn(2, 5, 6, 4, dtype=torch.float64)
    torch.testing.assert_close(stack(2 * x - 3 * y), 2 * stack(x) - 3 * stack(y))


@pytest.mark.parametrize("ensemble", ["concat", "sum", "weighted_sum"])
def test_gradients_reach_every_module(make_features: MakeFeatures, make_batch: MakeBatch, ensemble: str) -> None:
    features = make_features()
    model = DHEN(small(ensemble=ensemble), features, SGD)
    model(make_batch(features, 32)).square().sum().backward()
    for layer in model.layers:
        for name, interaction in zip(SMALL.modules, layer.interactions, strict=True):
            assert any(p.grad is not None and bool(p.grad.any()) for p in interaction.parameters()), name


def test_the_same_name_twice_is_two_modules() -> None:
    layer = DHENLayer(small(modules=("linear", "linear")), 6)
    first, second = layer.interactions
    assert first.weight is not second.weight
    assert not torch.equal(first.weight, second.weight)


def test_dot_needs_two_embeddings(make_features: MakeFeatures) -> None:
    with pytest.raises(DataError, match="no pairs"):
        DHEN(small(modules=("dot",)), make_features(dense=0, sparse=1), SGD)


def test_flops_of_attention_and_linear_equal_the_closed_formula(
    make_features: MakeFeatures, make_batch: MakeBatch
) -> None:
    features = make_features(dense=0, sparse=5)
    model = DHEN(small(layers=1, modules=("attention", "linear"), attention_feed_forward=10), features, SGD)
    n, d, made = 5, 4, 3
    attention = n * d * 3 * d + 2 * n * n * d + n * d * d + 2 * n * d * 10 + made * n * d
    shortcut = 2 * made * n * d
    macs = attention + made * n * d + shortcut + 2 * made * d * 7 + 7
    assert count(model, make_batch(features)).forward_macs == macs
