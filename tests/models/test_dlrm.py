"""DLRM is what Naumov et al. 2019 and TorchRec compute."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from cordillera.data.ranking.features import FeatureSpec, RankingBatch
from cordillera.embeddings.tables import TablesConfig
from cordillera.errors import DataError
from cordillera.models.ranking.dlrm import DLRM, DLRMConfig

from .conftest import MakeBatch, MakeFeatures

SMALL = DLRMConfig(embedding_dim=4, bottom_mlp=(8,), top_mlp=(10, 6))
SGD = TablesConfig(name="sgd", learning_rate=1.0)


def linears(module: nn.Module) -> list[nn.Linear]:
    return [layer for layer in module.modules() if isinstance(layer, nn.Linear)]


def reference(model: DLRM, dense: Tensor, embeddings: Tensor) -> Tensor:
    """The reference code's forward pass, sample by sample."""
    logits = []
    for numbers, rows in zip(dense, embeddings, strict=True):
        x = numbers
        for layer in linears(model.bottom):
            x = (layer.weight @ x + layer.bias).clamp(min=0)
        t = [x, *rows]
        z = [t[i].dot(t[j]) for i in range(len(t)) for j in range(i + model.config.include_diagonal)]
        r = torch.cat([x, torch.stack(z)])
        for layer in linears(model.top):
            r = (layer.weight @ r + layer.bias).clamp(min=0)
        (head,) = linears(model.heads)
        logits.append(head.weight @ r + head.bias)
    return torch.stack(logits)


@pytest.mark.parametrize("include_diagonal", [False, True])
def test_equals_the_reference_written_out(make_features: MakeFeatures, include_diagonal: bool) -> None:
    model = DLRM(SMALL.model_copy(update={"include_diagonal": include_diagonal}), make_features(), SGD).double()
    dense, embeddings = torch.randn(5, 3).double(), torch.randn(5, 4, 4).double()
    torch.testing.assert_close(model.score(dense, embeddings), reference(model, dense, embeddings))


def test_top_input_is_the_bottom_output_and_one_product_a_pair(make_features: MakeFeatures) -> None:
    model = DLRM(SMALL, make_features(sparse=6), SGD)
    assert linears(model.top)[0].in_features == 4 + 7 * 6 // 2


def test_bottom_output_is_rectified(make_features: MakeFeatures) -> None:
    model = DLRM(SMALL, make_features(), SGD)
    assert bool((model.bottom(torch.randn(100, 3)) >= 0).all())


def test_initialisation_is_the_reference_codes(make_features: MakeFeatures) -> None:
    config = DLRMConfig(embedding_dim=16, bottom_mlp=(400,), top_mlp=(500, 300))
    model = DLRM(config, make_features(rows=50), SGD)
    for layer in linears(model.top):
        expected = (2 / (layer.in_features + layer.out_features)) ** 0.5
        assert layer.weight.std().item() == pytest.approx(expected, rel=0.05)
        assert layer.bias.std().item() == pytest.approx(layer.out_features**-0.5, rel=0.2)
    for name, rows in model.features.tables.items():
        table = model.tables.table(name)
        assert float(table.abs().max()) <= rows**-0.5
        assert float(table.std()) == pytest.approx((rows * 3) ** -0.5, rel=0.1)


def test_without_dense_features_only_products_reach_the_top(make_features: MakeFeatures, make_batch: MakeBatch) -> None:
    features = make_features(dense=0)
    model = DLRM(SMALL, features, SGD)
    assert model.bottom is None
    assert linears(model.top)[0].in_features == 4 * 3 // 2
    assert model(make_batch(features)).shape == (7, 1)


def test_without_sparse_features_it_is_two_mlps(make_features: MakeFeatures, make_batch: MakeBatch) -> None:
    features = make_features(sparse=0)
    batch = make_batch(features)
    model = DLRM(SMALL, features, SGD)
    torch.testing.assert_close(model(batch), model.heads(model.top(model.bottom(batch.dense))))


def test_cat_puts_all_embeddings_side_by_side(make_features: MakeFeatures) -> None:
    model = DLRM(SMALL.model_copy(update={"interaction": "cat"}), make_features(), SGD)
    dense, embeddings = torch.randn(5, 3), torch.randn(5, 4, 4)
    joined = torch.cat([model.bottom(dense), embeddings.flatten(1)], dim=1)
    torch.testing.assert_close(model.score(dense, embeddings), model.heads(model.top(joined)))


def test_a_single_feature_has_nothing_to_interact_with(make_features: MakeFeatures) -> None:
    with pytest.raises(DataError, match="no pairs"):
        DLRM(SMALL, make_features(dense=0, sparse=1), SGD)


def test_a_bag_adds_up(make_features: MakeFeatures, make_batch: MakeBatch) -> None:
    """Empty bags give zeros, so a sample's list feature drops out of its interactions."""
    features = make_features(lists=1)
    batch = make_batch(features, 30)
    model = DLRM(SMALL, features, SGD)
    empty = batch.sparse["list0"].lengths == 0
    assert bool(empty.any())
    embeddings = model.tables(batch.sparse)
    assert bool((embeddings[empty, -1] == 0).all())


def _torchrec_twin(model: DLRM, features: FeatureSpec) -> nn.Module:
    """TorchRec's DLRM with our weights."""
    dlrm = pytest.importorskip(
        "torchrec.models.dlrm", exc_type=ImportError, reason="torchrec is not installed (make peers)"
    )
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

    d = model.config.embedding_dim
    collection = EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=f.table, embedding_dim=d, num_embeddings=features.tables[f.table], feature_names=[f.name]
            )
            for f in features.sparse
        ]
    )
    twin = dlrm.DLRM(collection, len(features.dense), [*model.config.bottom_mlp, d], [*model.config.top_mlp, 1])
    n = len(features.sparse) + 1
    # TorchRec keeps the upper triangle: its column for (i, j), i < j, is ours for (j, i)
    ours = {pair: d + position for position, pair in enumerate((i, j) for i in range(n) for j in range(i))}
    columns = [*range(d), *(ours[j, i] for i in range(n) for j in range(i + 1, n))]
    theirs = [*linears(twin.dense_arch), *linears(twin.over_arch)]
    mine = [*linears(model.bottom), *linears(model.top), *linears(model.heads)]
    with torch.no_grad():
        for their, my in zip(theirs, mine, strict=True):
            first_of_top = my is linears(model.top)[0]
            their.weight.copy_(my.weight[:, columns] if first_of_top else my.weight)
            their.bias.copy_(my.bias)
        for f in features.sparse:
            collection.embedding_bags[f.table].weight.copy_(model.tables.table(f.table))
    twin.columns = columns
    return twin


@pytest.mark.peer
@pytest.mark.parametrize(("sparse", "lists"), [(4, 0), (3, 2), (26, 0)])
@pytest.mark.filterwarnings("ignore")
def test_equals_torchrec_forward_and_gradients(
    make_features: MakeFeatures, make_batch: MakeBatch, sparse: int, lists: int
) -> None:
    features = make_features(dense=13, sparse=sparse, lists=lists, rows=20)
    batch = make_batch(features, 64)
    model = DLRM(DLRMConfig(embedding_dim=8, bottom_mlp=(32, 16), top_mlp=(24, 12)), features, SGD)
    twin = _torchrec_twin(model, features)
    logits, expected = model(batch), twin(batch.dense, batch.sparse.to_torchrec())
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-6 * max(1.0, float(expected.abs().max())))

    _loss(logits, batch).backward()
    _loss(expected, batch).backward()
    theirs = [*linears(twin.dense_arch), *linears(twin.over_arch)]
    mine = [*linears(model.bottom), *linears(model.top), *linears(model.heads)]
    for their, my in zip(theirs, mine, strict=True):
        gradient = my.weight.grad[:, twin.columns] if my is linears(model.top)[0] else my.weight.grad
        torch.testing.assert_close(gradient, their.weight.grad, rtol=0, atol=1e-6)
        torch.testing.assert_close(my.bias.grad, their.bias.grad, rtol=0, atol=1e-6)
    # plain SGD with learning rate 1 subtracts the gradient itself
    before = {f.table: model.tables.table(f.table).clone() for f in features.sparse}
    model.tables.update()
    for name, bag in twin.sparse_arch.embedding_bag_collection.embedding_bags.items():
        torch.testing.assert_close(before[name] - model.tables.table(name), bag.weight.grad, rtol=0, atol=1e-6)


def _loss(logits: Tensor, batch: RankingBatch) -> Tensor:
    return nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
