"""LoKA's Mods change what they name and nothing else, before training and never after it."""

from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from cordillera.embeddings.tables import TablesConfig
from cordillera.errors import NumericsError
from cordillera.models.ranking import ModelConfig, RankingModel, build
from cordillera.models.ranking.dcn import DCNConfig
from cordillera.models.ranking.dhen import DHENConfig
from cordillera.models.ranking.dlrm import DLRMConfig
from cordillera.models.ranking.dnn import DNNConfig
from cordillera.models.ranking.interactions import MLP
from cordillera.models.ranking.mods import (
    MODS,
    BlockNorm,
    StackedBlockNorm,
    apply_mods,
    bias_norms,
    prediction_layers,
)
from cordillera.models.ranking.wukong import WukongConfig

from .conftest import MakeBatch, MakeFeatures

TABLES = TablesConfig(name="sgd", learning_rate=0.1)
WUKONG = WukongConfig(
    embedding_dim=4, layers=2, fmb_embeddings=3, lcb_embeddings=2, rank=2, fmb_mlp=(8,), top_mlp=(7,), dense_mlp=(5,)
)
CONFIGS: dict[str, ModelConfig] = {
    "wukong": WUKONG,
    "as fuxictr": WUKONG.model_copy(update={"compatibility": "fuxictr"}),
    "dhen": DHENConfig(
        embedding_dim=4, layers=1, modules=("attention", "linear", "dot", "cross", "convolution", "mlp", "fm"),
        embeddings=3, module_mlp=(6,), attention_feed_forward=5, top_mlp=(6,), head_mlp=(4,),
    ),
    "dnn": DNNConfig(embedding_dim=4, mlp=(8, 6), norm="layer"),
    "dlrm": DLRMConfig(embedding_dim=4, bottom_mlp=(6,), top_mlp=(8, 6)),
    "dcn": DCNConfig(embedding_dim=4, mlp=(8,), norm="layer", low_rank=2),
}  # fmt: skip


def made(make_features: MakeFeatures, name: str, *mods: str, **changes: object) -> RankingModel:
    torch.manual_seed(5)
    config = CONFIGS[name].model_copy(update={"mods": mods, **changes})
    return build(config, make_features(tasks=("click", "buy")), TABLES)


def mods_of(name: str) -> list[str]:
    return [mod for mod in MODS if (name, mod) != ("dlrm", "block-norm")]  # DLRM has no norm


@pytest.mark.parametrize("name", CONFIGS)
def test_what_mods_leave_begins_with_the_same_numbers(make_features: MakeFeatures, name: str) -> None:
    plain, modded = made(make_features, name).state_dict(), made(make_features, name, *mods_of(name)).state_dict()
    own = {key for key in modded if not key.endswith("_extra_state")}
    assert own < set(plain)
    assert all(torch.equal(plain[key], modded[key]) for key in own)
    gone = [key for key in plain if key not in own and not key.endswith("_extra_state")]
    assert all(key.endswith("bias") or "norm" in key or plain[key].dim() == 1 for key in gone)


@pytest.mark.parametrize("name", CONFIGS)
def test_no_bias_is_left_but_the_prediction_layers(make_features: MakeFeatures, name: str) -> None:
    model = made(make_features, name, "no-bias")
    kept = {key for key, value in model.named_parameters() if key.endswith(".bias")}
    norms = {f"{key}.bias" for key, module in model.named_modules() if isinstance(module, nn.LayerNorm)}
    predicting = prediction_layers(model)
    assert len(predicting) == 2
    assert kept == norms | {f"{key}.bias" for key in predicting}
    assert all(model.get_submodule(key).out_features == 1 for key in predicting)


@pytest.mark.parametrize("name", CONFIGS)
def test_norms_and_activations_are_replaced(make_features: MakeFeatures, name: str) -> None:
    model = made(make_features, name, *mods_of(name), norm_block=6)
    modules = list(model.modules())
    assert not any(isinstance(module, nn.LayerNorm | nn.ReLU) for module in modules)
    before = list(made(make_features, name).modules())
    assert sum(isinstance(m, nn.Hardswish) for m in modules) == sum(isinstance(m, nn.ReLU) for m in before) > 0
    norms = [module for module in modules if isinstance(module, BlockNorm)]
    old = [module for module in before if isinstance(module, nn.LayerNorm)]
    assert [(norm.width, norm.eps) for norm in norms] == [(norm.normalized_shape[0], norm.eps) for norm in old]
    assert all(norm.block_size == 6 for norm in norms)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_changed_model_learns(make_features: MakeFeatures, make_batch: MakeBatch, name: str, precision: str) -> None:
    model = made(make_features, name, *mods_of(name))
    batch = make_batch(model.features, 32)
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        logits = model(batch)
    logits.float().square().mean().backward()
    assert logits.shape == (32, 2)
    for key, parameter in model.named_parameters():
        if not key.startswith("tables."):
            assert parameter.grad is not None, key
            assert parameter.grad.isfinite().all(), key


def test_a_layer_without_bias_computes_what_one_with_zeros_does(make_features: MakeFeatures) -> None:
    """The hidden layers' own kernel, with ReLU, and its gradients."""
    torch.manual_seed(0)
    mlp, x = MLP(6, (8, 5), 3), torch.randn(9, 6)
    for linear in mlp.layers[::2]:
        nn.init.zeros_(linear.bias)
    expected = mlp(x)
    expected.square().sum().backward()
    gradients = [linear.weight.grad.clone() for linear in mlp.layers[::2]]
    mlp.zero_grad()
    for linear in mlp.layers[::2]:
        linear.bias = None
    found = mlp(x)
    found.square().sum().backward()
    torch.testing.assert_close(found, expected)
    for linear, gradient in zip(mlp.layers[::2], gradients, strict=True):
        torch.testing.assert_close(linear.weight.grad, gradient)


def test_a_stacked_norm_is_a_norm_of_the_sum() -> None:
    torch.manual_seed(0)
    first, second, residual = torch.randn(5, 2, 12), torch.randn(5, 3, 12), torch.randn(5, 5, 12)
    found = StackedBlockNorm(12, 8)(first, second, residual)
    torch.testing.assert_close(found, BlockNorm(12, 8)(torch.cat([first, second], 1) + residual))


def test_norms_of_biases_are_told_for_those_that_would_go(make_features: MakeFeatures) -> None:
    model = made(make_features, "wukong")
    norms = bias_norms(model)
    assert set(norms) == set(apply_mods(made(make_features, "wukong"), ["no-bias"]).biases)
    assert norms["top.layers.0"] == pytest.approx(float(model.top.layers[0].bias.detach().double().norm()))
    assert bias_norms(made(make_features, "wukong", "no-bias")) == {}


def test_a_trained_or_loaded_model_is_refused(make_features: MakeFeatures, make_batch: MakeBatch) -> None:
    loaded = made(make_features, "wukong")
    loaded.load_state_dict({k: v + 1 if "bias" in k else v for k, v in loaded.state_dict().items()})
    trained = made(make_features, "wukong")
    optimizer = torch.optim.AdamW([p for n, p in trained.named_parameters() if "tables" not in n], fused=True)
    trained(make_batch(trained.features)).sum().backward()
    optimizer.step()
    for model in (loaded, trained, type(loaded)(WUKONG, loaded.features, TABLES)):
        before = {key: value.clone() for key, value in model.state_dict().items()}
        with pytest.raises(NumericsError, match=r"trained, loaded or not made by build"):
            apply_mods(model, ["no-bias"])
        assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    scored = made(make_features, "wukong")
    scored(make_batch(scored.features))
    assert apply_mods(scored, ["hard-swish"]).activations


def test_a_state_of_other_blocks_is_refused(make_features: MakeFeatures) -> None:
    state = made(make_features, "wukong", "block-norm", norm_block=3).state_dict()
    made(make_features, "wukong", "block-norm", norm_block=3).load_state_dict(state)
    with pytest.raises(RuntimeError, match="blocks of 3 features, not of 2"):
        made(make_features, "wukong", "block-norm", norm_block=2).load_state_dict(state)
    with pytest.raises(RuntimeError, match="_extra_state"):
        made(make_features, "wukong", "block-norm").load_state_dict(made(make_features, "wukong").state_dict())


def test_a_mod_that_is_unknown_or_has_nothing_to_do_is_refused(make_features: MakeFeatures) -> None:
    with pytest.raises(NumericsError, match=r"no mod is called 'no-biases'[\s\S]*one of no-bias, block-norm"):
        apply_mods(made(make_features, "wukong"), ["no-biases"])
    with pytest.raises(NumericsError, match="'block-norm' finds nothing to change"):
        made(make_features, "dlrm", "block-norm")
    with pytest.raises(ValidationError, match=r"mods\.0"):
        WukongConfig(mods=("no-biases",))
    with pytest.raises(NumericsError, match="blocks of 0"):
        BlockNorm(8, 0)


def test_a_layer_norms_neighbours_are_left(make_features: MakeFeatures) -> None:
    """One mod alone does only its own."""
    plain = made(make_features, "wukong")
    model = made(make_features, "wukong", "hard-swish")
    assert set(model.state_dict()) == set(plain.state_dict())
    assert sum(isinstance(m, nn.LayerNorm) for m in model.modules()) == 4
