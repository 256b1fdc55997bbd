"""The ranking benchmark measures what it says: same function on both sides, same batches, sound tables."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from _peers import PeerUnavailable
from _ranking_batches import criteo_batches, criteo_features, zipf_ids
from _ranking_peers import (
    TorchRecDLRM,
    embedding_bag_update,
    fbgemm_update,
    fuxictr_batch,
    fuxictr_model,
    fuxictr_zoo,
)
from _ranking_quality import MODELS, settings_of
from _ranking_speed import (
    DLRM_SIZES,
    EMBEDDING_DIM,
    WUKONG_SIZES,
    OurTraining,
    _our_update,
    copy_dlrm_to_fuxictr,
    copy_dlrm_to_torchrec,
    copy_wukong_to_fuxictr,
)
from typer.testing import CliRunner

from cordillera.cli import bench
from cordillera.cli.app import app
from cordillera.data.ranking.features import FeatureSpec, RankingBatch, SparseFeature
from cordillera.errors import CordilleraError
from cordillera.jagged import JaggedBatch, JaggedTensor

FEATURES = criteo_features(50)


def test_batches_are_a_function_of_the_seed() -> None:
    first, second = (criteo_batches(FEATURES, 2, 8, seed=3) for _ in range(2))
    assert torch.equal(first[1].sparse.values, second[1].sparse.values)
    assert torch.equal(first[1].dense, second[1].dense)
    assert not torch.equal(first[0].sparse.values, first[1].sparse.values)
    first[0].sparse.validate()


def test_ids_follow_zipf_and_lie_in_their_table() -> None:
    ids = zipf_ids(1000, 200_000, torch.Generator().manual_seed(0))
    counts = ids.bincount(minlength=1000).sort(descending=True).values.double()
    assert int(ids.min()) >= 0
    assert int(ids.max()) < 1000
    assert counts[0] / counts[9] == pytest.approx(10**1.05, rel=0.1)


def test_both_sides_get_the_same_draws_of_settings() -> None:
    for trial in range(20):
        ours, theirs = settings_of(trial, "ours"), settings_of(trial, "FuxiCTR")
        assert ours["learning_rate"] == theirs["learning_rate"]
        assert ours["dropout"] == theirs["dropout"]
        assert 3e-4 <= ours["learning_rate"] <= 1e-2
    assert settings_of(0, "ours") != settings_of(1, "ours")


@pytest.mark.peer
@pytest.mark.parametrize("backend", ["torch", "numba"])
@pytest.mark.slow
def test_fbgemm_updates_as_ours_does(backend: str) -> None:
    pytest.importorskip("fbgemm_gpu")
    batch = criteo_batches(FEATURES, 1, 16)[0]
    gradient = torch.randn(16, 26, EMBEDDING_DIM)
    ours, weights = _our_update(FEATURES, backend)
    theirs, peer_weights = fbgemm_update(FEATURES, EMBEDDING_DIM, 0.01)
    for mine, peer in zip(weights, peer_weights, strict=True):
        peer.copy_(mine)
    for _ in range(3):
        torch.testing.assert_close(ours(batch.sparse, gradient), theirs(batch.sparse, gradient), rtol=0, atol=1e-6)


def test_embedding_bags_look_up_as_ours_does() -> None:
    batch = criteo_batches(FEATURES, 1, 16)[0]
    gradient = torch.zeros(16, 26, EMBEDDING_DIM)
    ours, weights = _our_update(FEATURES, "torch")
    theirs, peer_weights = embedding_bag_update(FEATURES, EMBEDDING_DIM, 0.01)
    for mine, peer in zip(weights, peer_weights, strict=True):
        peer.copy_(mine)
    assert torch.equal(ours(batch.sparse, gradient), theirs(batch.sparse, gradient))


@pytest.mark.peer
@pytest.mark.parametrize("name", ["DLRM", "WuKong"])
def test_fuxictr_scores_alike_with_our_weights(name: str) -> None:
    try:
        fuxictr_zoo()
    except PeerUnavailable as reason:
        pytest.skip(str(reason))
    batch = criteo_batches(FEATURES, 1, 32)[0]
    if name == "DLRM":
        ours = OurTraining(DLRM_SIZES, FEATURES)
        peer = fuxictr_model(
            name,
            FEATURES,
            learning_rate=1e-3,
            embedding_dim=EMBEDDING_DIM,
            bottom_mlp_units=list(DLRM_SIZES.bottom_mlp),
            top_mlp_units=list(DLRM_SIZES.top_mlp),
        )
        copy_dlrm_to_fuxictr(ours.model, peer)
    else:
        ours = OurTraining(WUKONG_SIZES, FEATURES)
        peer = fuxictr_model(
            name,
            FEATURES,
            learning_rate=1e-3,
            embedding_dim=EMBEDDING_DIM,
            num_wukong_layers=WUKONG_SIZES.layers,
            lcb_features=WUKONG_SIZES.lcb_embeddings,
            fmb_features=WUKONG_SIZES.fmb_embeddings,
            fmb_mlp_units=list(WUKONG_SIZES.fmb_mlp),
            fmp_rank_k=WUKONG_SIZES.rank,
            mlp_hidden_units=list(WUKONG_SIZES.top_mlp),
            mlp_batch_norm=False,
        )
        copy_wukong_to_fuxictr(ours.model, peer)
    with torch.no_grad():
        mine = ours.model(batch).sigmoid()
        theirs = peer(fuxictr_batch(batch, FEATURES))["y_pred"]
    assert float(mine.std()) > 1e-4
    torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5)


@pytest.mark.peer
@pytest.mark.slow
def test_torchrec_scores_alike_with_our_weights() -> None:
    pytest.importorskip("torchrec")
    batch = criteo_batches(FEATURES, 1, 32)[0]
    ours = OurTraining(DLRM_SIZES, FEATURES)
    peer = TorchRecDLRM(
        FEATURES,
        embedding_dim=EMBEDDING_DIM,
        bottom=[*DLRM_SIZES.bottom_mlp, EMBEDDING_DIM],
        top=[*DLRM_SIZES.top_mlp, 1],
        learning_rate=1e-3,
        table_learning_rate=0.01,
    )
    copy_dlrm_to_torchrec(ours.model, peer)
    with torch.no_grad():
        theirs = peer.forward(batch.dense, batch.sparse.to_torchrec())
        torch.testing.assert_close(ours.model(batch)[:, 0], theirs, rtol=0, atol=1e-5)


def test_lists_are_padded_and_shifted_for_fuxictr() -> None:
    features = FeatureSpec(
        dense=("x",),
        sparse=(
            SparseFeature("item", "item"),
            SparseFeature("seen", "item", pooling="mean", is_list=True),
            SparseFeature("hour", "hour"),
        ),
        tables={"item": 5, "hour": 24},
        tasks=("like",),
    )
    sparse = JaggedBatch.from_features(
        {
            "item": JaggedTensor.from_lists([[4], [0]]),
            "seen": JaggedTensor.from_lists([[0, 3], []]),
            "hour": JaggedTensor.from_lists([[23], [7]]),
        }
    )
    batch = RankingBatch(torch.tensor([[0.5], [1.5]]), sparse, torch.tensor([[1.0], [0.0]]))
    columns = fuxictr_batch(batch, features, list_lengths={"seen": 3})
    assert columns["item"].tolist() == [5, 1]
    assert columns["seen"].tolist() == [[1, 4, 0], [0, 0, 0]]
    assert columns["hour"].tolist() == [23, 7]
    assert columns["x"].tolist() == [[0.5], [1.5]]
    assert columns["like"].tolist() == [1.0, 0.0]


def test_sizes_of_both_sides_are_the_same() -> None:
    for ours, _, options in MODELS.values():
        widths = [value for value in options.values() if isinstance(value, list)]
        configured = [list(value) for value in ours.model_dump().values() if isinstance(value, tuple) and value]
        assert all(width in configured for width in widths)


def test_the_command_finds_benchmarks_of_the_checkout() -> None:
    assert "ranking" in bench.programs()
    assert not any(name.startswith("_") for name in bench.programs())


def test_an_unknown_benchmark_is_refused_with_what_there_is() -> None:
    result = CliRunner().invoke(app, ["bench", "nothing-like-it"])
    assert isinstance(result.exception, CordilleraError)
    assert "nothing-like-it" in str(result.exception)
    assert "ranking" in str(result.exception)


@pytest.mark.slow
def test_the_update_part_runs_and_writes_its_figures(tmp_path: Path) -> None:
    arguments = ["bench", "ranking", "--quick", "--part", "update", "--threads", "1", "--results", str(tmp_path)]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    content = json.loads((tmp_path / "ranking-update.json").read_text())
    assert content["evidence"] == "measured"
    assert content["quick"]
    assert content["machine"]["processor"]
    assert {ratio["peer"] for ratio in content["ratios"]} >= {"EmbeddingBag(sparse) + Adagrad"}
    assert all(ratio["times"]["median"] > 0 for ratio in content["ratios"])
