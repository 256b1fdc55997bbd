"""Wukong is what Zhang et al. 2024 describe, and in its compatibility mode what FuxiCTR computes."""

from __future__ import annotations

import importlib.util
import os
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from cordillera.data.ranking.features import FeatureSpec, RankingBatch
from cordillera.embeddings.tables import TablesConfig
from cordillera.models.flops import count
from cordillera.models.ranking.wukong import Wukong, WukongConfig, WukongLayer

from .conftest import MakeBatch, MakeFeatures

SGD = TablesConfig(name="sgd", learning_rate=1.0)
SMALL = WukongConfig(
    embedding_dim=4, layers=2, fmb_embeddings=3, lcb_embeddings=2, rank=2, fmb_mlp=(8,), top_mlp=(7,), dense_mlp=(5,)
)


def small(**changes: object) -> WukongConfig:
    return WukongConfig(**{**SMALL.model_dump(), **changes})


def linears(module: nn.Module) -> list[nn.Linear]:
    return [layer for layer in module.modules() if isinstance(layer, nn.Linear)]


def randomise(module: nn.Module) -> None:
    """Give every parameter, norms and biases included, a value of its own."""
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)


def layer_norm(x: Tensor, norm: nn.LayerNorm) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight + norm.bias


def restated(model: Wukong, dense: Tensor, embeddings: Tensor) -> Tensor:
    """The forward pass in both modes as sums over indices; b sample, n m embedding, d width, k rank, h hidden."""
    as_fuxictr = model.config.compatibility == "fuxictr"
    if as_fuxictr:
        x = torch.cat([torch.einsum("bn,nd->bnd", dense, model.embed.vectors), embeddings], 1)
    else:
        h = dense
        *hidden, last = linears(model.embed)
        for linear in hidden:
            h = (torch.einsum("bi,hi->bh", h, linear.weight) + linear.bias).relu()
        h = torch.einsum("bi,hi->bh", h, last.weight) + last.bias
        x = torch.cat([h.reshape(len(dense), -1, embeddings.shape[2]), embeddings], 1)
    for layer in model.layers:
        products = torch.einsum("bnd,bmd->bnm", x, x)
        h = torch.einsum("bnm,mk->bnk", products, layer.fmb.fm.y).reshape(len(x), -1)
        h = layer_norm(h, layer.fmb.norm)
        *hidden, last = linears(layer.fmb.mlp)
        for linear in hidden:
            h = (torch.einsum("bi,hi->bh", h, linear.weight) + linear.bias).relu()
        h = torch.einsum("bi,hi->bh", h, last.weight) + last.bias
        if as_fuxictr:
            h = h.relu()
        fmb = h.reshape(len(x), -1, x.shape[2])
        lcb = torch.einsum("mn,bnd->bmd", layer.lcb.weight, x)
        residual = x
        if fmb.shape[1] + lcb.shape[1] != x.shape[1]:
            residual = torch.einsum("mn,bnd->bmd", layer.residual.weight, x)
            if as_fuxictr:
                residual = residual + layer.residual.bias[None, :, None]
        x = layer_norm(torch.cat([fmb, lcb], 1) + residual, layer.norm)
    h = x.reshape(len(x), -1)
    norms = [layer for layer in model.top.layers if isinstance(layer, nn.BatchNorm1d)]
    for i, linear in enumerate(linears(model.top)):
        h = torch.einsum("bi,hi->bh", h, linear.weight) + linear.bias
        if norms:
            h = (h - norms[i].running_mean) / (norms[i].running_var + 1e-5).sqrt() * norms[i].weight + norms[i].bias
        h = h.relu()
    (head,) = linears(model.heads)
    return torch.einsum("bi,hi->bh", h, head.weight) + head.bias


@pytest.mark.parametrize("compatibility", ["none", "fuxictr"])
@pytest.mark.parametrize("top_norm", ["none", "batch"])
def test_equals_its_plain_restatement(make_features: MakeFeatures, compatibility: str, top_norm: str) -> None:
    config = small(compatibility=compatibility, top_norm=top_norm, layers=3, fmb_mlp=(8, 6), top_mlp=(7, 5))
    model = Wukong(config, make_features(), SGD).double()
    randomise(model)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            nn.init.normal_(module.running_mean)
            nn.init.uniform_(module.running_var, 0.5, 2)
    model.eval()
    dense, embeddings = torch.randn(6, 3).double(), torch.randn(6, 4, 4).double()
    torch.testing.assert_close(model.score(dense, embeddings), restated(model, dense, embeddings))


def _fuxictr_twin(model: Wukong, features: FeatureSpec, folder: Path) -> nn.Module:
    """FuxiCTR's WuKong with our weights."""
    zoo = os.environ.get("CORDILLERA_FUXICTR_ZOO")
    if not zoo:
        pytest.skip("CORDILLERA_FUXICTR_ZOO does not name a clone of FuxiCTR's repository (make peers)")
    feature_module = pytest.importorskip(
        "fuxictr.features", exc_type=ImportError, reason="fuxictr is not installed (make peers)"
    )
    pytest.importorskip(
        "fuxictr.pytorch.models", exc_type=ImportError, reason="fuxictr cannot be imported (make peers)"
    )
    source = Path(zoo) / "model_zoo" / "WuKong" / "src" / "WuKong.py"
    spec = importlib.util.spec_from_file_location("fuxictr_model_zoo_wukong", source)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    feature_map = feature_module.FeatureMap("test", str(folder))
    feature_map.features = OrderedDict(
        [(name, {"type": "numeric", "source": ""}) for name in features.dense]
        + [
            (f.name, {"type": "categorical", "source": "", "vocab_size": features.tables[f.table]})
            for f in features.sparse
        ]
    )
    feature_map.labels = list(features.tasks)
    feature_map.num_fields = feature_map.get_num_fields()
    feature_map.set_column_index()
    config = model.config
    twin = module.WuKong(
        feature_map,
        embedding_dim=config.embedding_dim,
        num_wukong_layers=config.layers,
        lcb_features=config.lcb_embeddings,
        fmb_features=config.fmb_embeddings,
        fmb_mlp_units=list(config.fmb_mlp),
        fmp_rank_k=config.rank,
        mlp_hidden_units=list(config.top_mlp),
        mlp_batch_norm=config.top_norm == "batch",
        optimizer="adam",
        loss="binary_crossentropy",
        metrics=["AUC"],
        model_root=str(folder),
        verbose=0,
    )
    _copy(model, twin, features)
    return twin


def _copy(model: Wukong, twin: nn.Module, features: FeatureSpec) -> None:
    tables = twin.embedding_layer.embedding_layer.embedding_layers
    with torch.no_grad():
        for i, name in enumerate(features.dense):
            tables[name].weight.copy_(model.embed.vectors[i][:, None])
        for f in features.sparse:
            tables[f.name].weight.copy_(model.tables.table(f.table))
        for mine, theirs in zip(model.layers, twin.wukong_stack, strict=True):
            theirs.fmb.proj_Y.copy_(mine.fmb.fm.y)
            theirs.lcb.linear.weight.copy_(mine.lcb.weight)
            if not isinstance(mine.residual, nn.Identity):
                theirs.residual_proj.weight.copy_(mine.residual.weight)
                theirs.residual_proj.bias.copy_(mine.residual.bias)
    kinds = (nn.Linear, nn.LayerNorm, nn.BatchNorm1d)
    for mine, theirs in [
        *((a.fmb.norm, b.fmb.layer_norm) for a, b in zip(model.layers, twin.wukong_stack, strict=True)),
        *((a.fmb.mlp, b.fmb.mlp) for a, b in zip(model.layers, twin.wukong_stack, strict=True)),
        *((a.norm, b.layer_norm) for a, b in zip(model.layers, twin.wukong_stack, strict=True)),
        (nn.Sequential(model.top, model.heads), twin.fc),
    ]:
        pairs = zip(
            (m for m in mine.modules() if isinstance(m, kinds)),
            (m for m in theirs.modules() if isinstance(m, kinds)),
            strict=True,
        )
        for a, b in pairs:
            b.load_state_dict(a.state_dict())


@pytest.mark.peer
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("top_norm", ["none", "batch"])
def test_compatibility_mode_equals_fuxictr_by_weight_copy(
    make_features: MakeFeatures, make_batch: MakeBatch, tmp_path: Path, top_norm: str
) -> None:
    features = make_features(dense=5, sparse=9)
    batch = make_batch(features, 64)
    config = WukongConfig(
        embedding_dim=16, layers=3, fmb_embeddings=6, lcb_embeddings=5, rank=4, fmb_mlp=(32, 24), top_mlp=(20, 12),
        top_norm=top_norm, compatibility="fuxictr", embedding_init=0.3,
    )  # fmt: skip
    model = Wukong(config, features, SGD)
    twin = _fuxictr_twin(model, features, tmp_path)
    inputs = {name: batch.dense[:, i : i + 1] for i, name in enumerate(features.dense)}
    inputs |= {f.name: batch.sparse[f.name].values for f in features.sparse}

    for training in (True, False):  # the first pass also moves the running statistics of batch norm
        model.train(training)
        twin.train(training)
        torch.testing.assert_close(model(batch).sigmoid(), twin(inputs)["y_pred"], rtol=0, atol=1e-5)
    torch.testing.assert_close(model(batch), _logits_of(twin, inputs), rtol=0, atol=1e-5)

    _bce(model(batch), batch).backward()
    _bce(_logits_of(twin, inputs), batch).backward()
    torch.testing.assert_close(model.layers[0].fmb.fm.y.grad, twin.wukong_stack[0].fmb.proj_Y.grad, rtol=0, atol=1e-5)
    before = model.tables.table("id0").clone()
    model.tables.update()
    theirs = twin.embedding_layer.embedding_layer.embedding_layers["id0"].weight.grad
    torch.testing.assert_close(before - model.tables.table("id0"), theirs, rtol=0, atol=1e-5)


def _logits_of(twin: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    x = twin.wukong_stack(twin.embedding_layer(twin.get_inputs(inputs)))
    return twin.fc.mlp[:-1](x.flatten(1))  # all but the sigmoid


def _bce(logits: Tensor, batch: RankingBatch) -> Tensor:
    return nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)


def test_fuxictr_mode_starts_as_fuxictr_does(make_features: MakeFeatures) -> None:
    config = WukongConfig(compatibility="fuxictr", rank=64, fmb_mlp=(200,), top_mlp=(200,))
    model = Wukong(config, make_features(sparse=20), SGD)
    layer = model.layers[1]
    assert layer.fmb.fm.y.std().item() == pytest.approx(1, rel=0.1)
    for linear in (*linears(layer), *linears(model.top)):
        expected = (2 / (linear.in_features + linear.out_features)) ** 0.5
        assert linear.weight.std().item() == pytest.approx(expected, rel=0.1)
        assert not linear.bias.any()
    assert not model.layers[0].residual.bias.any()


def test_paper_mode_has_no_bias_on_maps_over_embeddings(make_features: MakeFeatures) -> None:
    model = Wukong(SMALL, make_features(sparse=7), SGD)
    assert model.layers[0].residual.bias is None
    assert model.layers[0].lcb.bias is None


def test_residual_is_a_map_only_where_the_count_changes(make_features: MakeFeatures) -> None:
    model = Wukong(SMALL, make_features(sparse=7), SGD)  # 8 embeddings, then 5
    assert not isinstance(model.layers[0].residual, nn.Identity)
    assert isinstance(model.layers[1].residual, nn.Identity)
    assert isinstance(Wukong(SMALL, make_features(sparse=4), SGD).layers[0].residual, nn.Identity)


@pytest.mark.parametrize("fm", ["optimised", "attentive", "basic"])
@pytest.mark.parametrize(("rows", "width", "rank"), [(1, 4, 2), (5, 1, 2), (3, 4, 9), (1, 1, 1)])
def test_extreme_shapes(fm: str, rows: int, width: int, rank: int) -> None:
    layer = WukongLayer(small(fm=fm, embedding_dim=width, rank=rank), rows)
    x = torch.randn(6, rows, width, requires_grad=True)
    out = layer(x)
    assert out.shape == (6, 5, width)
    out.square().sum().backward()
    assert bool(torch.isfinite(out).all())
    assert bool(torch.isfinite(x.grad).all())


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_equal_embeddings_give_no_nan(value: float) -> None:
    """All embeddings equal: X X^T has rank one (or zero) and norms see no variance."""
    layer = WukongLayer(SMALL, 6)
    x = torch.full((3, 6, 4), value, requires_grad=True)
    out = layer(x)
    out.square().sum().backward()
    assert bool(torch.isfinite(out).all())
    assert bool(torch.isfinite(x.grad).all())


def test_output_rows_are_normalised_before_the_affine_map() -> None:
    out = WukongLayer(small(embedding_dim=16), 6)(torch.randn(8, 6, 16))
    torch.testing.assert_close(out.mean(-1), torch.zeros(8, 5), rtol=0, atol=1e-5)
    torch.testing.assert_close(out.var(-1, correction=0), torch.ones(8, 5), rtol=0, atol=1e-3)


def _polynomial_degree(function: object, highest: int) -> int:
    """Degree of ``function(scale)`` by finite differences, which vanish beyond it."""
    values = torch.stack([function(float(scale)) for scale in range(-highest, highest + 1)])
    size, degree = values.abs().max(), 0
    for order in range(2 * highest + 1):
        if values.abs().max() > 1e-9 * size * 2**order:
            degree = order
        values = values.diff(dim=0)
    return degree


class StackedWithoutNorm(nn.Module):
    def forward(self, first: Tensor, second: Tensor, residual: Tensor) -> Tensor:
        return torch.cat([first, second], 1) + residual


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_layer_i_reaches_interactions_of_order_two_to_the_i(layers: int) -> None:
    """Without norms and with linear MLPs the output is a polynomial in a factor on all embeddings."""
    config = small(fmb_mlp=())
    stack = nn.Sequential(*(WukongLayer(config, 3 if i == 0 else 5) for i in range(layers))).double()
    randomise(stack)
    for layer in stack:
        layer.norm, layer.fmb.norm = StackedWithoutNorm(), nn.Identity()
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    with torch.no_grad():
        assert _polynomial_degree(lambda scale: stack(scale * x), 2**layers + 2) == 2**layers


def test_permuting_the_features_with_their_weights_changes_nothing() -> None:
    layer, order = WukongLayer(SMALL, 6).double(), torch.randperm(6)
    x = torch.randn(3, 6, 4, dtype=torch.float64)
    expected = layer(x)
    with torch.no_grad():
        layer.fmb.fm.y.copy_(layer.fmb.fm.y[order])
        layer.lcb.weight.copy_(layer.lcb.weight[:, order])
        layer.residual.weight.copy_(layer.residual.weight[:, order])
        first = linears(layer.fmb.mlp)[0]
        columns = torch.arange(12).view(6, 2)[order].flatten()  # embedding by embedding, k products each
        first.weight.copy_(first.weight[:, columns])
    torch.testing.assert_close(layer(x[:, order]), expected)


def test_every_block_can_be_switched_off_alone() -> None:
    x = torch.randn(3, 6, 4)
    layer = WukongLayer(SMALL, 6)
    fmb, lcb, residual = layer.fmb(x), layer.lcb(x), layer.residual(x)
    zero_fmb, zero_lcb = torch.zeros_like(fmb), torch.zeros_like(lcb)

    def expected(first: Tensor, second: Tensor, third: Tensor | float) -> Tensor:
        return nn.LayerNorm.forward(layer.norm, torch.cat([first, second], 1) + third)

    def switched_off(*names: str) -> Tensor:
        changed = WukongLayer(SMALL, 6)
        changed.load_state_dict(layer.state_dict())
        for name in names:
            for parameter in changed.get_parameter(name), *_bias_of(changed, name):
                nn.init.zeros_(parameter)
        return changed(x)

    torch.testing.assert_close(switched_off("fmb.mlp.mlp.layers.2.weight"), expected(zero_fmb, lcb, residual))
    torch.testing.assert_close(switched_off("lcb.weight"), expected(fmb, zero_lcb, residual))
    torch.testing.assert_close(switched_off("residual.weight"), expected(fmb, lcb, 0.0))
    torch.testing.assert_close(switched_off("lcb.weight", "residual.weight"), expected(fmb, zero_lcb, 0.0))


def _bias_of(module: nn.Module, weight: str) -> list[nn.Parameter]:
    parameters = dict(module.named_parameters())
    name = weight.removesuffix("weight") + "bias"
    return [parameters[name]] if name in parameters else []


def test_the_block_mlp_is_not_shared_between_embeddings() -> None:
    """Each output embedding has columns of its own for each product: nF * d outputs over n * k inputs."""
    layer = WukongLayer(SMALL, 6)
    first, last = linears(layer.fmb.mlp)
    assert (first.in_features, last.out_features) == (6 * 2, 3 * 4)


def test_default_embeddings_are_large_enough_for_a_living_first_layer(make_features: MakeFeatures) -> None:
    """Products must stand well above the layer norm's epsilon (1e-5)."""
    model = Wukong(WukongConfig(), make_features(dense=0, sparse=26, rows=100), SGD)
    embeddings = torch.stack([model.tables.table(name)[:50] for name in model.features.tables], 1)
    assert model.layers[0].fmb.fm(embeddings).var(1).mean().item() > 5e-5


def test_dense_inputs_become_as_many_embeddings_as_asked(make_features: MakeFeatures) -> None:
    model = Wukong(small(dense_embeddings=3), make_features(), SGD)
    assert model.layers[0].lcb.weight.shape == (2, 3 + 4)
    assert Wukong(SMALL, make_features(dense=0), SGD).layers[0].lcb.weight.shape == (2, 4)


def test_flops_and_parameters_equal_the_closed_formula(make_features: MakeFeatures, make_batch: MakeBatch) -> None:
    features = make_features(dense=3, sparse=8)
    config = small(layers=3, fmb_mlp=(8, 6), top_mlp=(7,))
    d, k, lcb, fmb, n, outputs = 4, 2, 2, 3, 9, 5
    macs = 3 * 5 + 5 * d  # dense MLP
    parameters = 3 * 5 + 5 + 5 * d + d
    for _ in range(3):
        macs += 2 * n * k * d + n * k * 8 + 8 * 6 + 6 * fmb * d + lcb * n * d + (n != outputs) * n * outputs * d
        parameters += n * k + 2 * n * k + (n * k * 8 + 8) + (8 * 6 + 6) + (6 + 1) * fmb * d
        parameters += lcb * n + (n != outputs) * n * outputs + 2 * d
        n = outputs
    macs += outputs * d * 7 + 7
    parameters += outputs * d * 7 + 7 + 7 + 1
    counted = count(Wukong(config, features, SGD), make_batch(features))
    assert counted.forward_macs == macs
    assert counted.forward_flops == 2 * macs
    assert counted.training_flops == 6 * macs
    assert counted.parameters == parameters
    assert counted.embedding_parameters == sum(features.tables.values()) * d
