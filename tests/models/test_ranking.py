"""What every ranking model promises, and the baselines' definitions."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor, nn

from cordillera.data.ranking.features import FeatureSpec
from cordillera.embeddings.tables import TablesConfig
from cordillera.errors import DataError
from cordillera.models.flops import count
from cordillera.models.ranking import MODELS, ModelConfig, RankingModel, build
from cordillera.models.ranking.dcn import DCN, DCNConfig
from cordillera.models.ranking.dnn import DNN, DNNConfig
from cordillera.models.ranking.fm import FM, FMConfig
from cordillera.models.ranking.heads import Heads
from cordillera.models.ranking.lr import LR, LRConfig

from .conftest import MakeBatch, MakeFeatures

SGD = TablesConfig(name="sgd", learning_rate=1.0)
SMALL: dict[str, dict[str, Any]] = {
    "lr": {},
    "fm": {"embedding_dim": 4},
    "dnn": {"embedding_dim": 4, "mlp": (8,)},
    "dlrm": {"embedding_dim": 4, "bottom_mlp": (8,), "top_mlp": (8,)},
    "dcn": {"embedding_dim": 4, "mlp": (8,), "cross_layers": 2},
    "dhen": {
        "embedding_dim": 4, "embeddings": 3, "module_mlp": (8,), "top_mlp": (8,), "dense_mlp": (6,),
        "modules": ("linear", "dot", "attention", "cross", "convolution", "mlp", "fm"),
    },
    "wukong": {
        "embedding_dim": 4, "fmb_embeddings": 3, "lcb_embeddings": 3, "rank": 2, "fmb_mlp": (8,), "top_mlp": (8,),
        "dense_mlp": (6,),
    },
    "rankmixer": {"embedding_dim": 4, "tokens": 3, "width": 6, "expansion": 2},
    "graph": {"embedding_dim": 4},
}  # fmt: skip
DEEP = sorted(set(SMALL) - {"lr", "fm"})


def make(name: str, features: FeatureSpec, **changes: Any) -> RankingModel:
    return build(MODELS[name].Config(**{**SMALL.get(name, {}), **changes}), features, SGD)


@pytest.mark.parametrize("name", SMALL)
def test_logits_are_a_column_a_task(make_features: MakeFeatures, make_batch: MakeBatch, name: str) -> None:
    features = make_features(lists=2, tasks=("click", "like", "buy"))
    batch = make_batch(features)
    model = make(name, features)
    logits = model(batch)
    assert logits.shape == (7, 3)
    torch.testing.assert_close(logits, model.score(batch.dense, model.tables(batch.sparse)))


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize(("dense", "sparse"), [(0, 4), (3, 0), (3, 1), (0, 2)])
def test_dense_or_sparse_features_may_be_absent(
    make_features: MakeFeatures, make_batch: MakeBatch, name: str, dense: int, sparse: int
) -> None:
    features = make_features(dense=dense, sparse=sparse)
    changes: dict[str, Any] = {"dense_embeddings": 2} if name == "dhen" else {}
    logits = make(name, features, **changes)(make_batch(features))
    assert logits.shape == (7, 1)
    logits.sum().backward()


@pytest.mark.parametrize("name", SMALL)
def test_a_model_without_features_or_tasks_is_refused(make_features: MakeFeatures, name: str) -> None:
    with pytest.raises(DataError, match="at least one feature"):
        make(name, make_features(dense=0, sparse=0))
    with pytest.raises(DataError, match="at least one task"):
        make(name, make_features(tasks=()))


@pytest.mark.parametrize("name", SMALL)
def test_samples_do_not_mix_and_their_order_does_not_matter(make_features: MakeFeatures, name: str) -> None:
    model = make(name, make_features())
    dense, embeddings = torch.randn(9, 3), torch.randn(9, 4, model.tables.embedding_dim)
    together, order = model.score(dense, embeddings), torch.randperm(9)
    torch.testing.assert_close(model.score(dense[order], embeddings[order]), together[order], rtol=1e-5, atol=1e-6)
    alone = torch.cat([model.score(dense[i : i + 1], embeddings[i : i + 1]) for i in range(9)])
    torch.testing.assert_close(alone, together, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", SMALL)
def test_weights_travel_through_a_state_dict(make_features: MakeFeatures, make_batch: MakeBatch, name: str) -> None:
    features = make_features(lists=1)
    batch, model, twin = make_batch(features), make(name, features), make(name, features)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    assert not torch.equal(model(batch), twin(batch))
    twin.load_state_dict(model.state_dict())
    assert torch.equal(model(batch), twin(batch))


@pytest.mark.parametrize("name", SMALL)
def test_the_global_random_state_decides_the_initialisation(make_features: MakeFeatures, name: str) -> None:
    states = []
    for _ in range(2):
        torch.manual_seed(5)
        states.append(make(name, make_features()).state_dict())
    for key, value in states[0].items():
        assert torch.equal(value, states[1][key]), key


@pytest.mark.parametrize("name", SMALL)
def test_every_parameter_gets_a_gradient(make_features: MakeFeatures, make_batch: MakeBatch, name: str) -> None:
    features = make_features(tasks=("click", "buy"))
    batch, model = make_batch(features, 64), make(name, features)
    nn.functional.binary_cross_entropy_with_logits(model(batch), batch.labels).backward()
    silent = [n for n, p in model.named_parameters() if not n.startswith("tables.") and p.grad is None]
    assert not silent
    before = model.tables.weight.detach().clone()
    model.tables.update()
    assert not torch.equal(model.tables.weight, before)


@pytest.mark.parametrize("name", SMALL)
def test_bfloat16_autocast_stays_near_float32(make_features: MakeFeatures, make_batch: MakeBatch, name: str) -> None:
    features = make_features()
    batch, model = make_batch(features, 128), make(name, features)
    expected = model(batch)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(batch)
    nn.functional.binary_cross_entropy_with_logits(logits.float(), batch.labels).backward()
    error = (logits - expected).square().mean().sqrt()
    assert error.item() < 0.02 * max(expected.square().mean().sqrt().item(), 0.1)
    assert all(p.grad is None or p.grad.dtype == torch.float32 for p in model.parameters())


@pytest.mark.cases(7)
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        *((name, {}) for name in [*SMALL, "mmoe", "ple"]),
        *((name, {"head_mlp": (64,)}) for name in [*DEEP, "mmoe", "ple"]),
        ("graph", {"linear_terms": True}),
    ],
)
def test_samples_are_told_apart_in_bfloat16(
    make_features: MakeFeatures, make_batch: MakeBatch, name: str, changes: dict[str, Any]
) -> None:
    """bfloat16 has 256 numbers between 1 and 2: logits rounded to it give most samples the score of another."""
    features = make_features(tasks=("click", "like"))
    batch, model = make_batch(features, 1000), make(name, features, **changes)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        logits = model(batch)
    assert logits.dtype == torch.float32
    for task in range(2):
        assert logits[:, task].unique().numel() > 950


@pytest.mark.parametrize(
    ("name", "bf16"),
    [
        *(pytest.param(name, False, marks=pytest.mark.slow) for name in SMALL),
        ("dlrm", True),
        pytest.param("wukong", True, marks=pytest.mark.slow),
    ],
)
def test_score_compiles_without_graph_breaks(make_features: MakeFeatures, name: str, bf16: bool) -> None:
    torch._dynamo.reset()
    model = make(name, make_features(tasks=("click", "buy")), **({"layers": 1} if name in ("dhen", "wukong") else {}))
    compiled = torch.compile(model.score, fullgraph=True, backend="aot_eager")
    dense, embeddings = torch.randn(9, 3), torch.randn(9, 4, model.tables.embedding_dim, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        logits, expected = compiled(dense, embeddings), model.score(dense, embeddings)
    tolerance = 1e-2 if bf16 else 1e-5
    torch.testing.assert_close(logits, expected, rtol=tolerance, atol=tolerance)
    (ours,) = torch.autograd.grad(logits.float().sum(), embeddings)
    (plain,) = torch.autograd.grad(expected.float().sum(), embeddings)
    torch.testing.assert_close(ours, plain, rtol=tolerance, atol=tolerance * plain.abs().max().item())


# Heads


@pytest.mark.parametrize("name", DEEP)
@pytest.mark.parametrize("head_mlp", [(), (5,)])
def test_score_is_the_heads_of_the_representation(
    make_features: MakeFeatures, name: str, head_mlp: tuple[int, ...]
) -> None:
    model = make(name, make_features(tasks=("click", "buy")), head_mlp=head_mlp)
    dense, embeddings = torch.randn(9, 3), torch.randn(9, 4, 4)
    representation = model.represent(dense, embeddings)
    assert representation.dim() == 2
    torch.testing.assert_close(model.score(dense, embeddings), model.heads(representation))
    assert isinstance(model.heads, Heads)
    assert model.heads.tasks == ("click", "buy")


def test_a_task_s_loss_does_not_touch_another_s_tower() -> None:
    heads = Heads(("click", "buy"), 6, (5,))
    representation = torch.randn(4, 6, requires_grad=True)
    heads(representation)[:, 0].sum().backward()
    assert all(p.grad is not None for p in heads.towers[0].parameters())
    assert all(p.grad is None or not p.grad.any() for p in heads.towers[1].parameters())
    assert bool(representation.grad.any())


@pytest.mark.parametrize("name", DEEP)
def test_one_task_more_leaves_the_trunk_as_it_is(make_features: MakeFeatures, name: str) -> None:
    sizes = []
    for tasks in (("click",), ("click", "buy")):
        model = make(name, make_features(tasks=tasks))
        sizes.append(sum(p.numel() for p in model.parameters()) - sum(p.numel() for p in model.heads.parameters()))
    assert sizes[0] == sizes[1]


# Baselines


def test_lr_adds_one_weight_an_id(make_features: MakeFeatures, make_batch: MakeBatch) -> None:
    features = make_features(sparse=3, tasks=("click", "buy"))
    batch, model = make_batch(features), LR(LRConfig(), features, SGD)
    nn.init.normal_(model.weight)
    nn.init.normal_(model.bias)
    expected = []
    for b in range(len(batch)):
        logit = model.bias + batch.dense[b] @ model.weight
        for f in features.sparse:
            logit = logit + model.tables.table(f.table)[batch.sparse[f.name].values[b]]
        expected.append(logit)
    torch.testing.assert_close(model(batch), torch.stack(expected))


def test_fm_is_linear_plus_every_pair(make_features: MakeFeatures) -> None:
    features = make_features(dense=2, sparse=3, tasks=("click", "buy"))
    model = FM(FMConfig(embedding_dim=4), features, SGD)
    for parameter in (model.factors, model.weight, model.bias):
        nn.init.normal_(parameter)
    dense, embeddings = torch.randn(5, 2), torch.randn(5, 3, 2 * 5)
    expected = torch.zeros(5, 2)
    for b in range(5):
        for task in range(2):
            factors = [dense[b, i] * model.factors[i, task] for i in range(2)]
            factors += [embeddings[b, f, 4 * task : 4 * task + 4] for f in range(3)]
            linear = model.bias[task] + dense[b] @ model.weight[:, task] + embeddings[b, :, 8 + task].sum()
            expected[b, task] = linear + sum(factors[i] @ factors[j] for i in range(5) for j in range(i))
    torch.testing.assert_close(model.score(dense, embeddings), expected)
    exact = model.double().score(dense.double(), embeddings.double())
    torch.testing.assert_close(exact.float(), expected)
    assert exact.dtype == torch.float64


def test_fm_begins_with_linear_weights_of_zero(make_features: MakeFeatures) -> None:
    model = FM(FMConfig(embedding_dim=4), make_features(tasks=("click", "buy")), SGD)
    assert bool(model.tables.weight[:, :8].any())
    assert not model.tables.weight[:, 8:].any()


def _mlp(x: Tensor, mlp: nn.Module) -> Tensor:
    for layer in mlp.modules():
        if isinstance(layer, nn.Linear):
            x = (x @ layer.weight.T + layer.bias).clamp(min=0)
    return x


def test_dnn_is_an_mlp_over_everything(make_features: MakeFeatures) -> None:
    model = DNN(DNNConfig(embedding_dim=4, mlp=(8, 6)), make_features(), SGD)
    dense, embeddings = torch.randn(5, 3), torch.randn(5, 4, 4)
    expected = _mlp(torch.cat([dense, embeddings.reshape(5, 16)], 1), model.mlp)
    torch.testing.assert_close(model.represent(dense, embeddings), expected)


@pytest.mark.parametrize("low_rank", [None, 3])
def test_dcn_runs_cross_and_mlp_beside_or_on_top_of_each_other(
    make_features: MakeFeatures, low_rank: int | None
) -> None:
    dense, embeddings = torch.randn(5, 3), torch.randn(5, 4, 4)
    x = torch.cat([embeddings.reshape(5, 16), dense], 1)
    for structure in ("parallel", "stacked"):
        config = DCNConfig(embedding_dim=4, mlp=(8, 6), structure=structure, low_rank=low_rank)
        model = DCN(config, make_features(), SGD)
        crossed = model.cross(x)
        if structure == "parallel":
            expected = torch.cat([crossed, _mlp(x, model.mlp)], 1)
        else:
            expected = _mlp(crossed, model.mlp)
        torch.testing.assert_close(model.represent(dense, embeddings), expected)


def test_dcn_may_read_dense_inputs_as_multiples_of_learned_vectors(make_features: MakeFeatures) -> None:
    dense, embeddings = torch.randn(5, 3), torch.randn(5, 4, 4)
    model = DCN(DCNConfig(embedding_dim=4, mlp=(8, 6), dense_vectors=True), make_features(), SGD)
    (vectors,) = (parameter for parameter in model.embed.parameters() if parameter.shape == (3, 4))
    multiples = torch.einsum("bj,jd->bjd", dense, vectors).reshape(5, 12)
    x = torch.cat([multiples, embeddings.reshape(5, 16)], 1)
    expected = torch.cat([model.cross(x), _mlp(x, model.mlp)], 1)
    torch.testing.assert_close(model.represent(dense, embeddings), expected)


# Cost


def test_dnn_flops_are_six_times_its_weights_to_train(make_features: MakeFeatures, make_batch: MakeBatch) -> None:
    """Zhang et al. 2024, table 3: an MLP 30-400-400-400-1 is printed as 1.99 MFLOP an example."""
    features = make_features(dense=0, sparse=3)
    counted = count(DNN(DNNConfig(embedding_dim=10, mlp=(400, 400, 400)), features, SGD), make_batch(features))
    assert counted.forward_macs == 332_400
    assert counted.training_flops == 6 * 332_400
    assert counted.parameters == 332_400 + 3 * 400 + 1


def test_dlrm_flops_equal_the_closed_formula(make_features: MakeFeatures, make_batch: MakeBatch) -> None:
    features = make_features(dense=3, sparse=4)
    macs = 3 * 8 + 8 * 4 + 5 * 5 * 4 + (4 + 10) * 8 + 8
    assert count(make("dlrm", features), make_batch(features)).forward_macs == macs


def test_fm_flops_are_its_sums_and_squares(make_features: MakeFeatures, make_batch: MakeBatch) -> None:
    features = make_features(dense=3, sparse=4)
    rows, d = 3 + 4, make("fm", features).config.embedding_dim
    sums, squares, linear = 2 * rows * d, rows * d + d, 2 * 3
    assert count(make("fm", features), make_batch(features)).forward_flops == sums + squares + 2 * d + linear


@pytest.mark.parametrize("name", SMALL)
def test_counting_is_per_example_and_leaves_no_trace(
    make_features: MakeFeatures, make_batch: MakeBatch, name: str
) -> None:
    features = make_features()
    model = make(name, features)
    model.heads.eval()
    small, large = make_batch(features, 1), make_batch(features, 64)
    state = torch.random.get_rng_state()
    assert count(model, small) == count(model, large)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert model.training
    assert not model.heads.training
    assert all(p.grad is None for p in model.parameters())
    assert model.tables.num_pending == 0


# Configs


ANY = TypeAdapter(ModelConfig)


@pytest.mark.parametrize("name", SMALL)
def test_a_config_is_chosen_by_its_name_and_survives_json(name: str) -> None:
    config = ANY.validate_python({"name": name, **SMALL[name]})
    assert type(config) is MODELS[name].Config
    assert ANY.validate_json(config.model_dump_json()) == config


@pytest.mark.parametrize(
    ("config", "path", "message"),
    [
        ({"name": "wokung"}, (), "'wokung' found using 'name' does not match any of the expected tags"),
        ({}, (), "Unable to extract tag"),
        ({"name": "wukong", "layer": 3}, ("wukong", "layer"), "Extra inputs are not permitted"),
        ({"name": "wukong", "layers": 0}, ("wukong", "layers"), "greater than or equal to 1"),
        ({"name": "wukong", "layers": "many"}, ("wukong", "layers"), "valid integer"),
        ({"name": "wukong", "fmb_mlp": [8, -1]}, ("wukong", "fmb_mlp", 1), "greater than or equal to 1"),
        ({"name": "wukong", "dropout": 1.0}, ("wukong", "dropout"), "less than 1"),
        ({"name": "wukong", "fm": "fast"}, ("wukong", "fm"), "'optimised', 'attentive' or 'basic'"),
        ({"name": "dlrm", "embedding_dim": 0}, ("dlrm", "embedding_dim"), "greater than or equal to 1"),
        ({"name": "dlrm", "top_mlp": []}, ("dlrm", "top_mlp"), "at least 1 item"),
        ({"name": "dlrm", "embedding_init": -1.0}, ("dlrm", "embedding_init"), "greater than 0"),
        ({"name": "dlrm", "embedding_init": math.inf}, ("dlrm", "embedding_init"), "must be a finite number"),
        ({"name": "lr", "embedding_init": math.inf}, ("lr", "embedding_init"), "must be a finite number"),
        ({"name": "supernet", "flops_weight": math.inf}, ("supernet", "flops_weight"), "must be a finite number"),
        ({"name": "dhen", "modules": []}, ("dhen", "modules"), "at least 1 item"),
        ({"name": "dhen", "modules": ["magic"]}, ("dhen", "modules", 0), "Input should be 'linear'"),
        ({"name": "dhen", "embedding_dim": 9}, ("dhen",), r"attention_heads \(2\) must divide embedding_dim \(9\)"),
        ({"name": "lr", "embedding_dim": 4}, ("lr", "embedding_dim"), "Extra inputs are not permitted"),
    ],
)
def test_a_mistake_in_a_config_is_named_with_its_path(
    config: dict[str, Any], path: tuple[str | int, ...], message: str
) -> None:
    with pytest.raises(ValidationError, match=message) as error:
        ANY.validate_python(config)
    assert error.value.errors()[0]["loc"][: len(path)] == path


@pytest.mark.parametrize("name", SMALL)
def test_a_config_does_not_change(name: str) -> None:
    config = MODELS[name].Config()
    with pytest.raises(ValidationError, match="frozen"):
        config.name = "lr"
