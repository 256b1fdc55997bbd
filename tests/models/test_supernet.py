"""Supernets: an architecture cut out is the model itself, draws can be repeated, preferences learn what they should."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn
from torch.nn import functional

from cordillera.data.ranking.features import FeatureSpec
from cordillera.embeddings.tables import TablesConfig
from cordillera.errors import DataError
from cordillera.models.flops import count
from cordillera.models.ranking import build
from cordillera.models.ranking.graphs.blocks import BlocksConfig, block_genes
from cordillera.models.ranking.graphs.config import GraphConfig, digest
from cordillera.models.ranking.graphs.graph import Graph
from cordillera.models.ranking.graphs.supernet import Supernet, SupernetConfig
from cordillera.training.ranking.architecture_search.space import load_space

from .conftest import MakeBatch, MakeFeatures

SGD = TablesConfig(name="sgd", learning_rate=1.0)
D = 8
KINDS = [(3, 4), (0, 4), (3, 0)]

SMALL = load_space("small").blocks
assert SMALL is not None
REDUCED = BlocksConfig(
    count=2,
    vector=("linear", "gate", "cross", "dot", "fm", "none"),
    widths=(5, 3),
    embeddings=("none", "mix", "fmb", "attention", "embedding_cross", "token_mixing"),
    rows=(2, 4),
    embed=True,
    fm=True,
)
DEEP = BlocksConfig(
    count=3, vector=("linear", "dot", "none"), widths=(3, 6), embeddings=("none", "fmb"), rows=(2,), fm=True
)
LITTLE = REDUCED.model_copy(update={"vector": ("linear", "fm"), "embeddings": ("none", "mix")})
CHAIN = REDUCED.model_copy(update={"connections": "chain", "widths": (4, 6), "rows": (1, 2)})
WITHOUT_ROWS = BlocksConfig(
    count=3,
    vector=("linear", "gate", "cross"),
    widths=(5, 3),
    embeddings=("none", "mix", "fmb", "attention"),
    embed=True,
)
PLAIN = DEEP.model_copy(update={"norms": (True, False), "dense_rows": (0, 3, 2), "embed": True})
HEADS = PLAIN.model_copy(update={"norms": (True,), "heads": ("last", "inputs", "all")})
FIXED_HEADS = REDUCED.model_copy(update={"heads": ("all",)})
SPACES = {
    "small": SMALL, "reduced": REDUCED, "deep": DEEP, "chain": CHAIN, "without rows": WITHOUT_ROWS, "plain": PLAIN,
    "fixed heads": FIXED_HEADS, "heads": HEADS
}  # fmt: skip


def make(blocks: BlocksConfig, features: FeatureSpec, **changes: Any) -> Supernet:
    """A supernet whose weights all have values of their own."""
    net = build(SupernetConfig(embedding_dim=D, blocks=blocks, **changes), features, SGD)
    assert isinstance(net, Supernet)
    with torch.no_grad():
        for weight in net.shared.values():
            weight.normal_(std=0.3)
    return net


def alone(net: Supernet, config: GraphConfig) -> Graph:
    """The stand-alone model of an architecture with the supernet's weights."""
    model = build(config, net.features, SGD)
    assert isinstance(model, Graph)
    missing, unexpected = model.load_state_dict(net.stand_alone(config), strict=False)
    assert not unexpected
    assert all(name.startswith("tables.") for name in missing)
    return model


def inputs(features: FeatureSpec, size: int = 6) -> tuple[Tensor, Tensor]:
    return torch.randn(size, len(features.dense)), torch.randn(size, len(features.sparse), D)


def all_values(blocks: BlocksConfig) -> Iterator[dict[str, Any]]:
    genes = block_genes(blocks)
    for values in itertools.product(*(gene.values for gene in genes)):
        yield {gene.name: value for gene, value in zip(genes, values, strict=True)}


def some_values(blocks: BlocksConfig, number: int, seed: int = 0) -> Iterator[dict[str, Any]]:
    draw = random.Random(seed)
    for _ in range(number):
        yield {gene.name: draw.choice(gene.values) for gene in block_genes(blocks)}


def most_likely(net: Supernet) -> GraphConfig:
    """The architecture of the value of each decision that is preferred most."""
    assert net.preferences is not None
    pairs = zip(net.genes, net.preferences, strict=True)
    return net.config.graph({**net.fixed, **{gene.name: gene.values[int(one.argmax())] for gene, one in pairs}})


def fitting(blocks: BlocksConfig, sparse: int) -> BlocksConfig:
    """The space, without operations that leave a block empty if there are no embeddings."""
    if sparse:
        return blocks
    return blocks.model_copy(update={"vector": tuple(op for op in blocks.vector if op not in ("dot", "fm", "none"))})


# What is cut out


@pytest.mark.cases(2)
@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize(("dense", "sparse"), KINDS)
@pytest.mark.parametrize("head_mlp", [(), (5,)])
def test_an_architecture_cut_out_is_the_model_itself(
    make_features: MakeFeatures, space: str, dense: int, sparse: int, head_mlp: tuple[int, ...]
) -> None:
    features = make_features(dense=dense, sparse=sparse, tasks=("click", "buy"))
    blocks = fitting(SPACES[space], sparse)
    net = make(blocks, features, head_mlp=head_mlp).eval()
    for values in some_values(blocks, 12):
        config = net.config.graph(values)
        net.choose(config)
        given = inputs(features)
        ours, theirs = (tuple(one.clone().requires_grad_() for one in given) for _ in range(2))
        net.zero_grad()
        model, scores = alone(net, config), net.score(*ours)
        expected = model.score(*theirs)
        assert torch.equal(scores, expected)
        slopes = torch.randn_like(scores)
        scores.backward(slopes)
        expected.backward(slopes)
        for one, other in zip(ours, theirs, strict=True):
            assert (one.grad is None) == (other.grad is None)
            assert one.grad is None or torch.equal(one.grad, other.grad)
        check_gradients(net, config, model)


def check_gradients(net: Supernet, config: GraphConfig, model: Graph) -> None:
    """Gradients of shared weights are the model's, at the places that it has, and zero elsewhere.

    Places are found by cutting numbers out of weights that are counted up.
    """
    numbered = {}
    with torch.no_grad():
        for key, weight in net.shared.items():
            numbered[key] = weight.clone()
            weight.copy_(torch.arange(weight.numel(), dtype=torch.float32).view_as(weight))
        places = {name: value.long().flatten() for name, value in net.stand_alone(config).items()}
        for key, weight in net.shared.items():
            weight.copy_(numbered[key])
    gradients = dict(model.named_parameters())
    touched = set()
    for name, place in places.items():
        key = name.replace(".", "/")
        touched.add(key)
        assert len(place.unique()) == len(place)
        weight, gradient = net.shared[key], gradients[name].grad
        expected = torch.zeros(weight.numel())
        if gradient is not None:
            expected[place] = gradient.flatten()
        found = torch.zeros_like(weight) if weight.grad is None else weight.grad
        assert torch.equal(found.flatten(), expected), name
    for key, weight in net.shared.items():
        assert key in touched or weight.grad is None or not weight.grad.any(), key


def block_space(vector: str, embeddings: str, count: int = 2, **changes: Any) -> BlocksConfig:
    content = {"widths": (3,), "rows": (2,), "vector": vector.split(), "embeddings": embeddings.split(), **changes}
    return BlocksConfig.model_validate({"count": count, **content})


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    "blocks",
    [
        block_space("linear dot", "none mix", count=2, connections="chain", fm=True),
        SMALL.model_copy(update={"widths": (4, 6)}),
        block_space("linear none", "mix none", widths=(4, 2), rows=(3, 2)),
        block_space("none gate", "none fmb", embed=True, fm=True),
        block_space("fm none dot", "token_mixing", rows=(2, 4), fm=True),
        block_space("none", "mix attention", embed=True, fm=True),
        block_space("cross none", "none embedding_cross", embed=True),
        block_space("none cross", "none", count=3, embed=True),
        block_space("linear none", "none mix", count=3, connections="chain"),
        block_space("none", "fmb none", count=3, connections="chain", fm=True),
        block_space("linear", "mix", count=1),
        block_space("linear none", "none fmb", count=2, norms=(False, True), dense_rows=(2, 0, 1)),
        block_space("dot none", "mix", count=1, norms=(False,), dense_rows=(1, 2), fm=True),
    ],
    ids=lambda blocks: "-".join([*blocks.vector, "and", *blocks.embeddings]),
)
def test_every_architecture_of_a_space_is_there(make_features: MakeFeatures, blocks: BlocksConfig) -> None:
    features = make_features()
    net = make(blocks, features).eval()
    seen = set()
    for values in all_values(blocks):
        config = net.config.graph(values)
        if digest(config) in seen:
            continue
        seen.add(digest(config))
        weights = net.stand_alone(config)
        if len(seen) % 10 == 1:  # a few are computed
            model = alone(net, config)
            assert {name for name in model.state_dict() if not name.startswith("tables.")} == set(weights)
            net.choose(config)
            dense, embeddings = inputs(features)
            assert torch.equal(net.score(dense, embeddings), model.score(dense, embeddings))
    assert seen


def test_shared_weights_begin_as_those_of_a_model_do(make_features: MakeFeatures) -> None:
    features = make_features()
    net = build(SupernetConfig(embedding_dim=D, blocks=REDUCED), features, SGD)
    assert isinstance(net, Supernet)
    for key, weight in net.shared.items():
        if key.endswith("norm/weight"):
            assert bool((weight == 1).all())
        elif key.endswith("norm/bias"):
            assert not weight.any()
        else:
            assert bool(weight.isfinite().all())
            assert weight.numel() < 50 or weight.std() > 0
    config = net.config.graph(next(some_values(REDUCED, 1)))
    fresh = build(config, features, SGD)
    for name, parameter in fresh.named_parameters():
        if name.endswith("map.weight") and parameter.numel() > 200:
            spread = net.shared[name.replace(".", "/")].std() / parameter.std()
            assert 0.4 < spread.item() < 2.5


def test_what_an_architecture_gives_does_not_depend_on_those_before(make_features: MakeFeatures) -> None:
    """Modules of architectures are kept, and none of their state may be."""
    features = make_features()
    net = make(LITTLE, features).eval()
    configs = [net.config.graph(values) for values in some_values(LITTLE, 6)]
    dense, embeddings = inputs(features)
    scores: list[list[Tensor]] = []
    for order in (configs, configs[::-1], configs):
        found = {}
        for config in order:
            net.choose(config)
            found[digest(config)] = net.score(dense, embeddings).detach()
        scores.append([found[digest(config)] for config in configs])
    for one, two, three in zip(*scores, strict=True):
        assert torch.equal(one, two)
        assert torch.equal(one, three)
    with torch.no_grad():
        for weight in net.shared.values():
            weight.add_(0.1)
    net.choose(configs[0])
    assert not torch.equal(net.score(dense, embeddings), scores[0][0])
    assert torch.equal(net.score(dense, embeddings), alone(net, configs[0]).score(dense, embeddings))


def test_a_copy_of_the_weights_is_a_copy(make_features: MakeFeatures) -> None:
    net = make(SMALL, make_features())
    config = net.config.graph(next(some_values(SMALL, 1)))
    before = {key: weight.detach().clone() for key, weight in net.shared.items()}
    for value in net.stand_alone(config).values():
        value.fill_(3.0)
    for key, weight in net.shared.items():
        assert torch.equal(weight, before[key])


def test_an_architecture_of_another_space_is_refused(make_features: MakeFeatures) -> None:
    net = make(SMALL, make_features())
    other = BlocksConfig(count=2, vector=("gate",), widths=(4,), embeddings=("mix",), rows=(2,))
    wider = BlocksConfig(
        count=2, vector=("linear",), widths=(512,), embeddings=("mix",), rows=(8,), connections="chain"
    )
    for blocks in (other, wider):
        with pytest.raises((KeyError, RuntimeError)):  # what trials take for a candidate's own fault
            net.stand_alone(net.config.model_copy(update={"blocks": blocks}).graph(next(all_values(blocks))))


# Draws


def train(net: Supernet, features: FeatureSpec, steps: int, first: int = 0) -> list[Tensor]:
    """Scores of every step of a training by plain gradient descent; data depend on the step only."""
    net.train()
    found = []
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        dense = torch.randn(8, len(features.dense), generator=generator)
        embeddings = torch.randn(8, len(features.sparse), D, generator=generator)
        scores = net.score(dense, embeddings)
        net.zero_grad()
        scores.square().mean().backward()
        with torch.no_grad():
            for weight in net.parameters():
                if weight.grad is not None:
                    weight -= 0.05 * weight.grad
        found.append(scores.detach())
    return found


@pytest.mark.cases(1)
@pytest.mark.parametrize("draw", ["uniform", "learnt"])
def test_a_resumed_training_draws_as_the_one_in_one_piece(make_features: MakeFeatures, draw: str) -> None:
    features = make_features()
    torch.manual_seed(4)
    whole = make(LITTLE, features, draw=draw)
    scores = train(whole, features, 6)
    torch.manual_seed(4)
    first = make(LITTLE, features, draw=draw)
    begun = train(first, features, 3)
    torch.manual_seed(9)
    second = make(LITTLE, features, draw=draw)
    second.load_state_dict(first.state_dict())
    torch.rand(7)
    begun += train(second, features, 3, first=3)
    for one, other in zip(scores, begun, strict=True):
        assert torch.equal(one, other)
    for (name, one), other in zip(whole.state_dict().items(), second.state_dict().values(), strict=True):
        assert torch.equal(one, other), name


def drawn(net: Supernet, monkeypatch: pytest.MonkeyPatch, steps: int, size: int = 8) -> list[list[tuple[str, int]]]:
    """Architectures of every step, with the number of samples of each."""
    found: list[list[tuple[str, int]]] = []
    plain = net._score

    def spy(config: GraphConfig, dense: Tensor, *others: Any) -> Tensor:
        found[-1].append((digest(config), len(dense)))
        return plain(config, dense, *others)

    monkeypatch.setattr(net, "_score", spy)
    net.train()
    for _ in range(steps):
        found.append([])
        net.score(*inputs(net.features, size))
    return found


def test_draws_follow_the_seed_and_the_step_only(make_features: MakeFeatures, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        net = make(LITTLE, make_features())
        torch.manual_seed(random.randrange(100))
        paths.append(drawn(net, monkeypatch, 4))
    assert paths[0] == paths[1]
    assert paths[0] != paths[2]
    assert len({name for step in paths[0] for name, _ in step}) > 8  # another one each time
    torch.manual_seed(1)
    net = make(LITTLE, make_features())
    state = torch.random.get_rng_state()
    drawn(net, monkeypatch, 1)
    net.eval()
    steps = int(net.steps)
    net.score(*inputs(net.features))
    assert int(net.steps) == steps
    torch.random.set_rng_state(state)


@pytest.mark.cases(2)
@pytest.mark.parametrize(("paths", "size", "sizes"), [(1, 8, [8]), (3, 8, [3, 3, 2]), (4, 2, [1, 1]), (8, 1, [1])])
def test_a_batch_is_divided_among_paths(
    make_features: MakeFeatures, monkeypatch: pytest.MonkeyPatch, paths: int, size: int, sizes: list[int]
) -> None:
    for dense, sparse in ((3, 4), (0, 4)):
        net = make(LITTLE, make_features(dense=dense, sparse=sparse), paths=paths)
        (step,) = drawn(net, monkeypatch, 1, size)
        assert [number for _, number in step] == sizes


def test_every_sample_is_scored_by_its_path_in_order(
    make_features: MakeFeatures, monkeypatch: pytest.MonkeyPatch
) -> None:
    features = make_features()
    net = make(LITTLE, features, paths=3)
    used: list[GraphConfig] = []
    plain = net._score
    monkeypatch.setattr(net, "_score", lambda config, *others: used.append(config) or plain(config, *others))
    dense, embeddings = inputs(features, 7)
    scores = net.train().score(dense, embeddings)
    rows = [slice(0, 3), slice(3, 5), slice(5, 7)]
    expected = [alone(net, one).score(dense[part], embeddings[part]) for one, part in zip(used, rows, strict=True)]
    assert torch.equal(scores, torch.cat(expected))


def test_draws_are_uniform(make_features: MakeFeatures) -> None:
    net = make(SMALL, make_features())
    counts: dict[str, Counter[Any]] = {gene.name: Counter() for gene in net.genes}
    generator = np.random.default_rng(0)
    for _ in range(2_000):
        values, factors = net.draw(generator)
        assert not factors
        for name in counts:
            counts[name][values[name]] += 1
    for gene in net.genes:
        for value in gene.values:  # within 5 standard deviations
            share = 1 / len(gene.values)
            assert abs(counts[gene.name][value] / 2_000 - share) < 5 * (share * (1 - share) / 2_000) ** 0.5


# Learnt preferences


def with_preferences(blocks: BlocksConfig, features: FeatureSpec, **changes: Any) -> Supernet:
    net = make(blocks, features, draw="learnt", **changes)
    assert net.preferences is not None
    for one in net.preferences:
        nn.init.normal_(one)
    return net


def test_draws_follow_the_preferences(make_features: MakeFeatures) -> None:
    net = with_preferences(SMALL, make_features())
    assert net.preferences is not None
    counts: dict[str, Counter[Any]] = {gene.name: Counter() for gene in net.genes}
    generator = np.random.default_rng(0)
    for _ in range(500):
        values, factors = net.draw(generator)
        assert set(factors) == {gene.name for gene in net.genes}
        for name in counts:
            counts[name][values[name]] += 1
    for gene, one in zip(net.genes, net.preferences, strict=True):
        weights = one.detach().double().exp()
        for value, share in zip(gene.values, (weights / weights.sum()).tolist(), strict=True):
            assert abs(counts[gene.name][value] / 500 - share) < 5 * (share * (1 - share) / 500) ** 0.5


def test_factors_are_one_and_do_not_change_scores(make_features: MakeFeatures, monkeypatch: pytest.MonkeyPatch) -> None:
    features = make_features()
    net = with_preferences(LITTLE, features)
    generator = np.random.default_rng(0)
    for _ in range(50):
        assert all(factor.item() == 1 for factor in net.draw(generator)[1].values())
    used: list[GraphConfig] = []
    plain = net._score
    monkeypatch.setattr(net, "_score", lambda config, *others: used.append(config) or plain(config, *others))
    dense, embeddings = inputs(features, 8)
    scores = net.train().score(dense, embeddings)
    expected = [
        alone(net, one).score(dense[2 * i : 2 * i + 2], embeddings[2 * i : 2 * i + 2]) for i, one in enumerate(used)
    ]
    assert torch.equal(scores, torch.cat(expected))


def kinds_of(node: str) -> list[str]:
    """Decisions about a node of a block, by its name."""
    block, _, what = node[1:].partition("_")
    if what in ("left", "right", "sum"):
        return []
    if what in ("added_fm", "embed"):
        return [f"{block}.{what.removeprefix('added_')}"]
    if what in ("linear", "gate", "cross", "dot", "fm"):
        return [f"{block}.{key}" for key in ("vector", "width", "vector_reads")]
    return [f"{block}.{key}" for key in ("embeddings", "rows", "embeddings_read")]


@pytest.mark.cases(1)
@pytest.mark.parametrize("seed", range(6))
def test_gradients_of_preferences_are_those_of_soft_weights(make_features: MakeFeatures, seed: int) -> None:
    """Values of nodes are multiplied by ``1 + p - p0``; slopes by p are found by finite differences."""
    features = make_features()
    exact = REDUCED.model_copy(update={"embeddings": ("none", "mix", "fmb")})  # attention is of single precision
    net = with_preferences(exact, features, paths=1).double()
    assert net.preferences is not None
    net.seed.fill_(seed)
    dense, embeddings = (one.double() for one in inputs(features))
    net.train().score(dense, embeddings).square().sum().backward()
    values, _ = net.draw(np.random.default_rng([seed, 0]))
    config = net.config.graph(values)
    cut, weights = net._cut(config), net.weights_of(net._cut(config))

    def loss(factors: dict[str, float]) -> float:
        gates = {
            node.name: torch.tensor(np.prod([factors.get(key, 1.0) for key in kinds_of(node.name)]))
            for node in config.nodes
        }
        with torch.no_grad():
            scores = torch.func.functional_call(cut, weights, (dense, embeddings, gates))
        return float(scores.square().sum())

    for gene, preference in zip(net.genes, net.preferences, strict=True):
        step = 1e-5
        slope = (loss({gene.name: 1 + step}) - loss({gene.name: 1 - step})) / (2 * step)
        chances = functional.softmax(preference.detach(), 0)
        own = torch.zeros_like(chances)
        own[gene.values.index(values[gene.name])] = 1
        index = gene.values.index(values[gene.name])
        expected = slope * chances[index] * (own - chances)  # of the softmax
        found = torch.zeros_like(chances) if preference.grad is None else preference.grad
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6 * (1 + abs(slope)))


def test_preferences_learn_which_operation_is_better(make_features: MakeFeatures) -> None:
    """Labels are products of two embeddings, which a linear layer cannot give and ``fm`` can."""
    features = make_features(dense=0, sparse=2)
    blocks = BlocksConfig(count=1, vector=("linear", "fm"), widths=(8,), embeddings=("none",), rows=(1,))
    net = build(SupernetConfig(embedding_dim=D, blocks=blocks, draw="learnt", paths=2), features, SGD)
    assert isinstance(net, Supernet)
    optimiser = torch.optim.Adam(net.parameters(), lr=0.04)
    for _ in range(100):
        embeddings = torch.randn(64, 2, D)
        target = (embeddings[:, 0] * embeddings[:, 1]).sum(1, keepdim=True)
        scores = net.train().score(torch.zeros(64, 0), embeddings)
        optimiser.zero_grad()
        functional.mse_loss(scores, target).backward()
        optimiser.step()
    assert [node.op for node in most_likely(net).nodes] == ["fm"]


# FLOPs


@pytest.mark.slow
@pytest.mark.parametrize("space", ["small", pytest.param("chain", marks=pytest.mark.slow)])
def test_expected_flops_are_near_the_mean_of_those_counted(
    make_features: MakeFeatures, make_batch: MakeBatch, space: str
) -> None:
    features = make_features()
    net = with_preferences(SPACES[space], features, flops=1_000)
    batch, generator, counted = make_batch(features, 1), np.random.default_rng(0), []
    for _ in range(100):
        config = net.config.graph(net.draw(generator)[0])
        counted.append(count(build(config, features, SGD), batch).forward_flops)
    error = np.std(counted) / len(counted) ** 0.5
    assert net.expected_flops().item() == pytest.approx(np.mean(counted), rel=0.1, abs=5 * error)


def test_a_space_of_one_architecture_has_its_flops(make_features: MakeFeatures, make_batch: MakeBatch) -> None:
    features, blocks = make_features(), block_space("linear", "mix", count=1)
    net = make(blocks, features, draw="learnt", flops=1)
    assert not net.genes
    model = build(most_likely(net), features, SGD)
    assert net.expected_flops().item() == pytest.approx(count(model, make_batch(features, 1)).forward_flops)
    net.train().score(*inputs(features)).sum().backward()


@pytest.mark.slow
def test_too_many_flops_are_a_loss(make_features: MakeFeatures) -> None:
    features = make_features()
    dense, embeddings = inputs(features, 8)
    gradients = []
    for weight, flops in ((0.0, 100), (0.5, 100), (0.5, 10**9)):
        torch.manual_seed(1)
        net = with_preferences(SMALL, features, flops=flops, flops_weight=weight)
        assert net.preferences is not None
        scores = net.train().score(dense, embeddings)
        scores.sum().backward()
        gradients.append([torch.zeros_like(one) if one.grad is None else one.grad for one in net.preferences])
        if weight and flops == 100:
            loss = 0.5 * (net.expected_flops() / flops - 1)
            expected = torch.autograd.grad(loss, list(net.preferences), allow_unused=True)
            plain = scores
        elif weight:
            assert torch.equal(scores, plain)
    for none, some, many, slope in zip(gradients[0], gradients[1], gradients[2], expected, strict=True):
        torch.testing.assert_close(some - none, slope, rtol=1e-3, atol=1e-4 * float(slope.abs().max()))
        assert torch.equal(many, none)


# Settings


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mods": ("no-bias",)}, "mods: a supernet has none"),
        ({"flops": 100}, "flops: needs draw = 'learnt'"),
        ({"paths": 0}, "greater than or equal to 1"),
        ({"embedding_dim": 6, "blocks": {"rows": (2, 4)}}, r"blocks.rows \(4\) must divide embedding_dim \(6\)"),
        ({"blocks": {"vector": ()}}, "vector: name at least one"),
        ({"blocks": {"widths": (4, 4)}}, "widths: names a value twice"),
        ({"blocks": {"norms": ()}}, "norms: name at least one"),
        ({"blocks": {"dense_rows": (-1,)}}, "greater than or equal to 0"),
        ({"blocks": {"vector": ("none",), "embeddings": ("none",)}}, "vector and embeddings: both are none"),
        ({"blocks": {"vector": ("linaer",)}}, "Input should be 'linear'"),
        ({"blocks": {"count": 0}}, "greater than or equal to 1"),
    ],
)
def test_a_mistake_in_the_settings_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        SupernetConfig.model_validate(changes)


def test_a_space_that_needs_absent_features_is_refused(make_features: MakeFeatures) -> None:
    with pytest.raises(DataError, match="there are no categorical or list features"):
        build(SupernetConfig(embedding_dim=D, blocks=SMALL), make_features(sparse=0), SGD)


def test_a_batch_trains_it_like_any_model(make_features: MakeFeatures, make_batch: MakeBatch) -> None:
    features = make_features(lists=1, tasks=("click", "buy"))
    net, batch = make(SMALL, features), make_batch(features, 16)
    logits = net.train()(batch)
    assert logits.shape == (16, 2)
    functional.binary_cross_entropy_with_logits(logits, batch.labels).backward()
    before = net.tables.weight.detach().clone()
    net.tables.update()
    assert not torch.equal(net.tables.weight, before)
    twin = make(SMALL, features)
    twin.load_state_dict(net.state_dict())
    assert torch.equal(net.eval()(batch), twin.eval()(batch))
