"""Towers inside DLRM, DCN-V2 and Wukong: what passes through them, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn

from cordillera.embeddings.tables import TablesConfig
from cordillera.errors import DataError
from cordillera.models.flops import count
from cordillera.models.ranking import MODELS, RankingModel, build
from cordillera.models.ranking.towers import CombinedTower, CrossedTower, TowerModules, TowersConfig, divided

from .conftest import MakeBatch, MakeFeatures

SMALL: dict[str, dict[str, Any]] = {
    "dlrm": {"embedding_dim": 8, "bottom_mlp": (6,), "top_mlp": (8,)},
    "dcn": {"embedding_dim": 8, "mlp": (8,), "cross_layers": 2},
    "wukong": {
        "embedding_dim": 8, "layers": 1, "fmb_embeddings": 3, "lcb_embeddings": 3, "rank": 2, "fmb_mlp": (8,),
        "top_mlp": (8,), "dense_mlp": (6,),
    },
}  # fmt: skip
GROUPS = (("id3", "id0", "id5"), ("id1",), ("id2", "id4"))
KINDS = [{"kind": "linear"}, {"kind": "linear", "dim": 4}, {"kind": "cross", "low_rank": 2, "cross_layers": 2}]
SGD = TablesConfig(name="sgd", learning_rate=0.1)


def make(name: str, features: Any, towers: dict[str, Any] | None) -> RankingModel:
    torch.manual_seed(3)
    return build(MODELS[name].Config(**SMALL[name], towers=towers), features, SGD)


@pytest.mark.parametrize("name", SMALL)
def test_identity_towers_are_the_model_without_towers_to_the_bit(
    make_features: MakeFeatures, make_batch: MakeBatch, name: str
) -> None:
    features = make_features(sparse=6)
    batch = make_batch(features, 64)
    models = [make(name, features, towers) for towers in (None, {"groups": GROUPS, "kind": "identity"})]
    for _ in range(3):
        for model in models:
            model.zero_grad()
            nn.functional.binary_cross_entropy_with_logits(model(batch), batch.labels).backward()
            model.tables.update()
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        parameter -= 0.1 * parameter.grad
    plain, towers = (model.state_dict() for model in models)
    assert list(plain) == list(towers)
    assert all(torch.equal(value, towers[key]) for key, value in plain.items())
    assert torch.equal(*(model(batch) for model in models))


@pytest.mark.parametrize("options", KINDS)
@pytest.mark.parametrize("name", SMALL)
def test_every_parameter_of_a_tower_learns(
    make_features: MakeFeatures, make_batch: MakeBatch, name: str, options: dict[str, Any]
) -> None:
    features = make_features(sparse=6)
    batch, model = make_batch(features, 64), make(name, features, {"groups": GROUPS, **options})
    nn.functional.binary_cross_entropy_with_logits(model(batch), batch.labels).backward()
    of_towers = {key: one.grad for key, one in model.named_parameters() if key.startswith("towers.")}
    assert of_towers
    assert all(grad is not None and bool(grad.abs().sum() > 0) for grad in of_towers.values())
    twin = make(name, features, {"groups": GROUPS, **options})
    for parameter in twin.parameters():
        nn.init.normal_(parameter)
    twin.load_state_dict(model.state_dict())
    assert torch.equal(model(batch), twin(batch))
    assert count(model, batch).parameters == sum(
        one.numel() for key, one in model.named_parameters() if not key.startswith("tables.")
    )


@pytest.mark.parametrize("options", KINDS)
def test_a_tower_sees_its_own_features_only(make_features: MakeFeatures, options: dict[str, Any]) -> None:
    features = make_features(sparse=6).sparse
    towers = TowerModules(TowersConfig(groups=GROUPS, compression=1.0, **options), features, 8)
    x = torch.randn(5, 6, 8, requires_grad=True)
    parts, first = towers(x), 0
    assert parts.shape == (5, towers.outputs, towers.dim)
    for group, members in zip(GROUPS, towers.places, strict=True):
        assert sorted(group) == [features[i].name for i in members]
        outputs = round(len(members) * 8 / towers.dim)
        (grad,) = torch.autograd.grad(parts[:, first : first + outputs].square().sum(), x, retain_graph=True)
        assert grad.abs().sum((0, 2)).nonzero().flatten().tolist() == members
        first += outputs
    assert first == towers.outputs
    together = towers(x)
    torch.testing.assert_close(torch.cat([towers(x[i : i + 1]) for i in range(5)]), together, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", SMALL)
def test_towers_that_pass_embeddings_on_change_no_score(
    make_features: MakeFeatures, make_batch: MakeBatch, name: str
) -> None:
    features = make_features(sparse=6)
    plain = make(name, features, None)
    through = make(name, features, {"count": 3, "kind": "cross", "compression": 1.0})
    for tower in through.towers.towers:  # type: ignore[union-attr]
        for parameter in tower.cross.parameters():
            nn.init.zeros_(parameter)
        nn.init.eye_(tower.project.weight)
        nn.init.zeros_(tower.project.bias)
    through.load_state_dict(plain.state_dict(), strict=False)
    batch = make_batch(features, 16)
    torch.testing.assert_close(through(batch), plain(batch), rtol=1e-6, atol=1e-6)


def test_modules_compute_what_they_say() -> None:
    x = torch.randn(4, 3, 5)
    combined = CombinedTower(3, 5, 5, 2)
    assert combined.flat is not None
    mixed = torch.einsum("of,bfd->bod", combined.combine.weight, x) @ combined.width.weight.T + combined.width.bias
    flat = (x.reshape(4, 15) @ combined.flat.weight.T + combined.flat.bias).reshape(4, 2, 2)
    torch.testing.assert_close(combined(x), torch.cat([mixed, flat], 1))
    crossed = CrossedTower(15, 2, 4, 1, None)
    layer, flattened = crossed.cross.crosses[0], x.reshape(4, 15)
    crosses: Tensor = flattened * (flattened @ layer.weight.T + layer.bias) + flattened
    expected = (crosses @ crossed.project.weight.T + crossed.project.bias).reshape(4, 2, 4)
    torch.testing.assert_close(crossed(x), expected)


@pytest.mark.parametrize(
    ("compression", "dim", "outputs"), [(1, None, 6), (2, None, 4), (4, None, 3), (2, 4, 6), (4, 2, 6)]
)
def test_outputs_follow_the_compression(
    make_features: MakeFeatures, compression: float, dim: int | None, outputs: int
) -> None:
    towers = TowerModules(
        TowersConfig(groups=GROUPS, compression=compression, dim=dim), make_features(sparse=6).sparse, 8
    )
    assert (towers.outputs, towers.dim) == (outputs, dim or 8)


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("kind", ["linear", "cross"])
@pytest.mark.slow
def test_towers_compile_and_run_in_bfloat16(
    make_features: MakeFeatures, make_batch: MakeBatch, name: str, kind: str
) -> None:
    torch._dynamo.reset()
    features = make_features(sparse=6)
    model, batch = make(name, features, {"groups": GROUPS, "kind": kind}), make_batch(features, 32)
    embeddings = model.tables(batch.sparse)
    expected = model.score(batch.dense, embeddings)
    compiled = torch.compile(model.score, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(batch.dense, embeddings), expected, rtol=1e-5, atol=1e-6)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model.score(batch.dense, embeddings)
    error = (logits.float() - expected).square().mean().sqrt()
    assert error.item() < 0.03 * max(expected.square().mean().sqrt().item(), 0.1)
    nn.functional.binary_cross_entropy_with_logits(logits.float(), batch.labels).backward()
    assert all(p.grad is None or p.grad.dtype == torch.float32 for p in model.parameters())


def test_neighbours_share_towers_as_equally_as_possible(make_features: MakeFeatures) -> None:
    features = make_features(sparse=7).sparse
    assert divided(TowersConfig(count=3), features) == [[0, 1, 2], [3, 4], [5, 6]]
    with pytest.raises(DataError, match="8 towers for 7"):
        divided(TowersConfig(count=8), features)


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        ((("id0",), ("id1", "x")), "'x' is not in the data"),
        ((("id0",),), "'id1' is in no tower"),
        ((("id0", "id1"), ("id0",)), "'id0' is in two places"),
        ((("id0", "id1"), ()), "a tower is empty"),
    ],
)
def test_groups_that_do_not_fit_are_refused(
    make_features: MakeFeatures, groups: tuple[tuple[str, ...], ...], words: str
) -> None:
    with pytest.raises(DataError, match=words):
        divided(TowersConfig(groups=groups), make_features(sparse=2).sparse)


@pytest.mark.parametrize("given", [{}, {"count": 2, "groups": (("a",),)}, {"file": "absent.json"}, {"count": 0}])
def test_settings_need_one_way_to_divide(given: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        TowersConfig(**given)
