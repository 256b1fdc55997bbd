"""RankMixer against its equations, written out token by token in float64."""

from __future__ import annotations

import math

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from cordillera.embeddings.tables import TablesConfig
from cordillera.models.flops import count
from cordillera.models.ranking import build
from cordillera.models.ranking.rankmixer import RankMixer, RankMixerConfig, mix_tokens

from .conftest import MakeBatch, MakeFeatures

SIZES = RankMixerConfig(embedding_dim=4, layers=2, tokens=3, width=6, expansion=2)


def test_a_mixed_token_holds_one_part_of_each_token() -> None:
    x = torch.arange(2 * 3 * 6).view(2, 3, 6)
    mixed = mix_tokens(x)
    for sample in range(2):
        for part in range(3):
            expected = [x[sample, token, 2 * part + place] for token in range(3) for place in range(2)]
            assert mixed[sample, part].tolist() == expected
    assert torch.equal(mix_tokens(mixed), x)  # once more puts all parts back


def norm(x: Tensor) -> Tensor:
    """Layer norm of one token with weights of one."""
    return (x - x.mean()) / ((x - x.mean()).square().mean() + 1e-5).sqrt()


def test_logits_are_those_of_the_equations(make_features: MakeFeatures, make_batch: MakeBatch) -> None:
    features = make_features(dense=3, sparse=2)  # 11 inputs: four of each token, the last one filled up
    batch = make_batch(features)
    torch.manual_seed(0)
    model = build(SIZES, features, TablesConfig(name="sgd", learning_rate=1.0)).double()
    assert isinstance(model, RankMixer)
    dense, embeddings = batch.dense.double(), torch.randn(len(batch), 2, 4, dtype=torch.float64)
    found = model.score(dense, embeddings)
    (head,) = [module for module in model.heads.modules() if isinstance(module, torch.nn.Linear)]
    for b in range(len(batch)):
        inputs = torch.cat([dense[b], embeddings[b].flatten(), torch.zeros(1).double()])
        tokens = [layer(inputs[4 * t : 4 * t + 4]) for t, layer in enumerate(model.embed.into)]
        for block in model.blocks:
            mixed = [torch.cat([token[2 * h : 2 * h + 2] for token in tokens]) for h in range(3)]
            tokens = [norm(m + token) for m, token in zip(mixed, tokens, strict=True)]
            after = []
            for t, token in enumerate(tokens):
                h = block.mlp.into[t](token)  # type: ignore[union-attr, index, operator]
                h = h * 0.5 * (1 + torch.erf(h / math.sqrt(2)))
                after.append(norm(block.mlp.out[t](h) + token))  # type: ignore[union-attr, index, operator]
            tokens = after
        torch.testing.assert_close(found[b], head(sum(tokens) / 3), rtol=1e-10, atol=1e-10)


def test_operations_are_those_of_the_paper(make_features: MakeFeatures, make_batch: MakeBatch) -> None:
    """4 k L T D^2 a sample for the nets of tokens, and the first projections and the head."""
    features = make_features(dense=3, sparse=2)
    counted = count(build(SIZES, features, TablesConfig()), make_batch(features))
    nets, inputs, head = 4 * 2 * 2 * 3 * 6**2, 2 * 3 * 4 * 6, 2 * 6
    assert counted.forward_flops == nets + inputs + head


def test_a_width_that_cannot_be_cut_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"tokens \(8\) must divide width \(60\)"):
        RankMixerConfig(width=60)
