"""Graphs of operations: what every operation computes, which graphs are refused, and what their names depend on."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from scipy.special import expit, ndtr
from torch import nn

from cordillera import recipe as recipes
from cordillera.data.ranking.features import FeatureSpec
from cordillera.embeddings.tables import TablesConfig
from cordillera.errors import DataError, RecipeError
from cordillera.models.flops import count
from cordillera.models.ranking import build
from cordillera.models.ranking.graphs.blocks import BlocksConfig, block_genes, graph_of
from cordillera.models.ranking.graphs.config import VECTOR_OPS, GraphConfig, NodeConfig, digest
from cordillera.models.ranking.graphs.graph import Graph
from cordillera.models.ranking.graphs.nodes import OPS

from .conftest import MakeBatch, MakeFeatures

SGD = TablesConfig(name="sgd", learning_rate=1.0)
D = 6
Weights = dict[str, np.ndarray]


def node(name: str, op: str, *inputs: str, **settings: Any) -> dict[str, Any]:
    size = {"width": 5} if op in VECTOR_OPS else {"rows": 3}
    if size.keys() & settings.keys() or {"width", "rows"} & settings.keys():
        size = {}
    return {"name": name, "op": op, "inputs": list(inputs), **size, **settings}


def config_of(*nodes: dict[str, Any], output: tuple[str, ...] = (), **changes: Any) -> GraphConfig:
    content = {"embedding_dim": D, "nodes": nodes, "output": output or (nodes[-1]["name"],), **changes}
    return GraphConfig.model_validate(content)


def model_of(config: GraphConfig, features: FeatureSpec) -> Graph:
    """A model whose parameters all have values of their own, norms and biases included."""
    model = build(config, features, SGD)
    assert isinstance(model, Graph)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    return model


# Operations, in plain sums; b sample, n m embedding, d e width, i o number of a vector, k rank


def _linear(w: Weights, name: str, x: np.ndarray) -> np.ndarray:
    return np.einsum("...i,oi->...o", x, w[f"{name}.weight"]) + w[f"{name}.bias"]


def _norm(w: Weights, name: str, x: np.ndarray) -> np.ndarray:
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * w[f"{name}.weight"] + w[f"{name}.bias"]


def _flat(values: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([value.reshape(len(value), -1) for value in values], 1)


def _padded(w: Weights, values: list[np.ndarray]) -> list[np.ndarray]:
    width = max(value.shape[1] for value in values)
    return [np.concatenate([value, np.zeros((len(value), width - value.shape[1]))], 1) for value in values]


def _mapped(w: Weights, x: np.ndarray) -> np.ndarray:
    return _linear(w, "map", x) if "map.weight" in w else x


def _mix(w: Weights, values: list[np.ndarray]) -> np.ndarray:
    return np.einsum("mn,bnd->bmd", w["combine.weight"], np.concatenate(values, 1))


def _gate(w: Weights, values: list[np.ndarray], settings: NodeConfig) -> np.ndarray:
    left, right = _padded(w, values)
    return _mapped(w, expit(_linear(w, "gate", left)) * right)


def _cross(w: Weights, values: list[np.ndarray], settings: NodeConfig) -> np.ndarray:
    x = _flat(values)
    return _linear(w, "map", x * _linear(w, "cross", x) + x)


def _dot(w: Weights, values: list[np.ndarray], settings: NodeConfig) -> np.ndarray:
    vectors = [value for value in values if value.ndim == 2]
    rows = list(_mix(w, [value for value in values if value.ndim == 3]).transpose(1, 0, 2))
    assert len(rows) == max(2, round((2 * (settings.width or 0)) ** 0.5))
    if vectors:
        rows.insert(0, _linear(w, "project", _flat(vectors)))
    products = [(rows[i] * rows[j]).sum(1) for i in range(len(rows)) for j in range(i)]
    return _linear(w, "map", np.stack(products, 1))


def _fm(w: Weights, values: list[np.ndarray], settings: NodeConfig) -> np.ndarray:
    rows = np.concatenate(values, 1).transpose(1, 0, 2)
    pairs = sum((one * other for one, other in itertools.combinations(rows, 2)), np.zeros_like(rows[0]))
    return _linear(w, "map", pairs)


def _embed(w: Weights, values: list[np.ndarray], settings: NodeConfig) -> np.ndarray:
    return _linear(w, "map", _flat(values)).reshape(len(values[0]), settings.rows or 0, D)


def _add(w: Weights, values: list[np.ndarray], settings: NodeConfig) -> np.ndarray:
    total = np.zeros((len(values[0]), settings.rows or 0, D))
    for index, value in enumerate(values):
        weight = w.get(f"maps.{index}.weight")
        assert (weight is None) == (value.shape[1] == settings.rows)
        total += value if weight is None else np.einsum("mn,bnd->bmd", weight, value)
    return total


def _fmb(w: Weights, values: list[np.ndarray], settings: NodeConfig) -> np.ndarray:
    x = np.concatenate(values, 1)
    products = np.einsum("bnd,bmd,mk->bnk", x, x, w["block.fm.y"]).reshape(len(x), -1)
    found = _linear(w, "block.mlp.mlp.layers.0", _norm(w, "block.norm", products))
    return found.reshape(len(x), settings.rows or 0, D)


def _attention(w: Weights, values: list[np.ndarray], settings: NodeConfig) -> np.ndarray:
    x = _mix(w, values)
    heads, size = settings.heads, D // settings.heads
    query, key, value = np.split(_linear(w, "attention.query_key_value", x), 3, axis=2)
    mixed = np.zeros_like(x)
    for b, head, n in itertools.product(range(len(x)), range(heads), range(x.shape[1])):
        own = slice(head * size, (head + 1) * size)
        weights = np.exp(key[b, :, own] @ query[b, n, own] / np.sqrt(size))
        mixed[b, n, own] = weights / weights.sum() @ value[b, :, own]
    x = _norm(w, "attention.norm_attention", x + _linear(w, "attention.output", mixed))
    hidden = np.maximum(_linear(w, "attention.feed_forward.layers.0", x), 0)
    return _norm(w, "attention.norm_feed_forward", x + _linear(w, "attention.feed_forward.layers.2", hidden))


def _embedding_cross(w: Weights, values: list[np.ndarray], settings: NodeConfig) -> np.ndarray:
    x = np.concatenate(values, 1)
    return np.einsum("bne,me,bnd->bmd", x, w["cross.weight"], x) + w["cross.bias"]


def _token_mixing(w: Weights, values: list[np.ndarray], settings: NodeConfig) -> np.ndarray:
    x = _mix(w, values)
    tokens, size = x.shape[1], D // x.shape[1]
    mixed = np.zeros_like(x)
    for to, source in itertools.product(range(tokens), range(tokens)):
        mixed[:, to, source * size : (source + 1) * size] = x[:, source, to * size : (to + 1) * size]
    x = _norm(w, "block.mixed_norm", mixed + x)
    after = np.zeros_like(x)
    for token in range(tokens):
        hidden = _linear(w, f"block.mlp.into.{token}", x[:, token])
        after[:, token] = _linear(w, f"block.mlp.out.{token}", hidden * ndtr(hidden))  # GELU
    return _norm(w, "block.norm", after + x)


PLAIN: dict[str, Callable[[Weights, list[np.ndarray], NodeConfig], np.ndarray]] = {
    "linear": lambda w, values, settings: _linear(w, "map", _flat(values)),
    "gate": _gate,
    "sum": lambda w, values, settings: _mapped(w, np.sum(_padded(w, values), 0)),
    "cross": _cross,
    "dot": _dot,
    "fm": _fm,
    "mix": lambda w, values, settings: _mix(w, values),
    "embed": _embed,
    "add": _add,
    "fmb": _fmb,
    "attention": _attention,
    "embedding_cross": _embedding_cross,
    "token_mixing": _token_mixing,
}


def plain(model: Graph, dense: np.ndarray, embeddings: np.ndarray) -> np.ndarray:
    """What the heads read, computed by the functions above; inputs without a number are taken to be absent."""
    config = model.config
    assert isinstance(config, GraphConfig)
    weights = {name: value.detach().double().numpy() for name, value in model.body.state_dict().items()}
    values = {name: one for name, one in (("dense", dense), ("embeddings", embeddings)) if one.shape[1]}
    waiting = list(config.nodes)
    while waiting:
        settings = waiting.pop(0)
        if any(name in [other.name for other in waiting] for name in settings.inputs):
            waiting.append(settings)
            continue
        own = {
            key.split(".", 2)[2]: one for key, one in weights.items() if key.split(".")[1] == f"node_{settings.name}"
        }
        inputs = [values[name] for name in settings.inputs if name in values]
        if not inputs:
            continue
        found = PLAIN[settings.op](own, inputs, settings)
        found = _norm(own, "norm", found) if settings.norm else found
        values[settings.name] = np.maximum(found, 0) if settings.activation == "relu" else found
    return _flat([values[name] for name in config.output if name in values])


def check(config: GraphConfig, features: FeatureSpec) -> None:
    model = model_of(config, features).double()
    draw = np.random.default_rng(3)
    dense = draw.standard_normal((5, len(features.dense)))
    embeddings = draw.standard_normal((5, len(features.sparse), D))
    found = model.represent(torch.from_numpy(dense), torch.from_numpy(embeddings)).detach().numpy()
    expected = plain(model, dense, embeddings)
    assert found.dtype == np.float64
    rough = any(one.op == "attention" for one in config.nodes)  # its softmax is of single precision
    tolerance = 1e-4 if rough else 1e-9
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)


SOURCES = (
    node("long", "linear", "dense", width=7),
    node("short", "linear", "embeddings", width=4),
    node("same", "linear", "embeddings", "dense", width=5),
    node("few", "mix", "embeddings", rows=2),
    node("other", "fmb", "embeddings", rows=3),
)
READS: dict[str, list[tuple[str, ...]]] = {
    "linear": [("dense",), ("embeddings",), ("embeddings", "dense", "long", "few")],
    "gate": [("long", "short"), ("short", "long"), ("same", "short"), ("dense", "same")],
    "sum": [("long",), ("same",), ("same", "short"), ("short", "long", "dense")],
    "cross": [("dense",), ("few",), ("few", "long", "embeddings")],
    "dot": [("embeddings",), ("few", "other"), ("long", "few", "dense", "embeddings")],
    "fm": [("few",), ("embeddings", "few")],
    "mix": [("embeddings",), ("few", "embeddings")],
    "embed": [("dense",), ("long", "short")],
    "add": [("other",), ("few",), ("other", "embeddings", "few")],
    "fmb": [("embeddings",), ("few", "other")],
    "attention": [("embeddings",), ("few", "other")],
    "embedding_cross": [("embeddings",), ("few", "other")],
    "token_mixing": [("embeddings",), ("few", "other")],
}
CASES = [(op, reads) for op, several in READS.items() for reads in several]


def with_sources(op: str, reads: tuple[str, ...], **settings: Any) -> GraphConfig:
    needed = [source for source in SOURCES if source["name"] in reads]
    return config_of(*needed, node("made", op, *reads, **settings))


def test_every_operation_is_tried() -> None:
    assert set(PLAIN) == set(READS) == set(OPS)


@pytest.mark.parametrize(("op", "reads"), CASES, ids=[f"{op}-{'-'.join(reads)}" for op, reads in CASES])
@pytest.mark.parametrize("norm", [False, True])
def test_an_operation_is_what_it_says(make_features: MakeFeatures, op: str, reads: tuple[str, ...], norm: bool) -> None:
    check(with_sources(op, reads, norm=norm), make_features())


@pytest.mark.parametrize("op", ["linear", "mix", "embed"])
@pytest.mark.parametrize("norm", [False, True])
def test_an_activation_comes_after_the_norm(make_features: MakeFeatures, op: str, norm: bool) -> None:
    check(with_sources(op, READS[op][0], norm=norm, activation="relu"), make_features())


@pytest.mark.parametrize("heads", [1, 2, 3, 6])
def test_attention_may_have_several_heads(make_features: MakeFeatures, heads: int) -> None:
    check(with_sources("attention", ("embeddings",), heads=heads), make_features())


@pytest.mark.parametrize(
    ("op", "size"), [("dot", 1), ("dot", 32), ("fmb", 1), ("token_mixing", 1), ("token_mixing", 6)]
)
def test_an_operation_may_have_any_size(make_features: MakeFeatures, op: str, size: int) -> None:
    sizes = {"width" if op in VECTOR_OPS else "rows": size}
    check(with_sources(op, ("embeddings",), **sizes), make_features())


def random_graph(seed: int) -> GraphConfig:
    """A graph of ten nodes at random, all read: those that no other reads are the output."""
    draw = random.Random(seed)
    nodes: list[dict[str, Any]] = []
    kinds = {"dense": True, "embeddings": False}
    for number in range(10):
        op = draw.choice(list(OPS))
        vectors, rows = ([name for name, kind in kinds.items() if kind == wanted] for wanted in (True, False))
        if op == "gate":
            reads = draw.sample(vectors, 2) if len(vectors) > 1 else ["dense", "dense"]
        elif op in ("linear", "cross"):
            reads = draw.sample([*kinds], draw.randint(1, min(3, len(kinds))))
        elif op == "dot":
            reads = [*draw.sample(rows, 1), *draw.sample(vectors, draw.randint(0, 1))]
        else:
            known = vectors if op in ("sum", "embed") else rows
            reads = draw.sample(known, draw.randint(1, min(3, len(known))))
        if len(set(reads)) < len(reads):
            continue
        size = {"width": draw.randint(1, 9)} if op in VECTOR_OPS else {"rows": draw.choice([1, 2, 3, 6])}
        nodes.append(node(f"n{number}", op, *reads, norm=draw.random() < 0.5, **size))
        kinds[f"n{number}"] = op in VECTOR_OPS
    read = {name for one in nodes for name in one["inputs"]}
    draw.shuffle(nodes)
    return config_of(*nodes, output=tuple(one["name"] for one in nodes if one["name"] not in read))


@pytest.mark.parametrize("seed", range(12))
def test_nodes_in_any_order_compute_the_graph(make_features: MakeFeatures, seed: int) -> None:
    check(random_graph(seed), make_features())


def test_a_graph_without_nodes_gives_the_inputs(make_features: MakeFeatures) -> None:
    config = config_of(output=("embeddings", "dense"), nodes=())
    check(config, make_features())
    assert not list(model_of(config, make_features()).body.parameters())


# Features of one kind

BOTH = (
    node("from_dense", "linear", "dense", width=4),
    node("from_rows", "linear", "embeddings", width=4),
    node("from_both", "linear", "dense", "embeddings", width=4),
    node("gated", "gate", "from_dense", "from_rows"),
    node("summed", "sum", "from_dense", "from_rows"),
    node("dots", "dot", "dense", "embeddings"),
    node("mixed", "mix", "embeddings"),
    node("embedded", "embed", "from_dense"),
    node("cross", "cross", "gated", "summed", "dots", "mixed", "embedded"),
)


def test_features_of_one_kind_are_enough(make_features: MakeFeatures, make_batch: MakeBatch) -> None:
    config = config_of(*BOTH, output=("from_both", "cross"))
    check(config, make_features())
    for dense, sparse, absent in (
        (3, 0, {"from_rows", "gated", "dots", "mixed"}),
        (0, 4, {"from_dense", "gated", "embedded"}),
    ):
        features = make_features(dense=dense, sparse=sparse)
        model = model_of(config, features)
        assert set(model.body.reads) == {one["name"] for one in BOTH} - absent
        logits = model(make_batch(features))
        assert logits.shape == (7, 1)
        logits.sum().backward()
        assert all(parameter.grad is not None for name, parameter in model.named_parameters() if "tables" not in name)
    kept = [one for one in BOTH if one["name"] not in ("dots", "gated", "cross")]
    last = node("cross", "cross", "summed", "mixed", "embedded")
    without_dot = config_of(*kept, last, output=("from_both", "cross"))
    for dense, sparse in ((3, 0), (0, 4), (3, 4)):
        check(without_dot, make_features(dense=dense, sparse=sparse))


@pytest.mark.parametrize(
    ("dense", "sparse", "kind", "read"), [(0, 4, "dense", "dense"), (3, 0, "categorical or list", "embeddings")]
)
def test_an_output_of_absent_features_is_refused(
    make_features: MakeFeatures, dense: int, sparse: int, kind: str, read: str
) -> None:
    config = config_of(node("a", "linear", read), node("b", "linear", "a"))
    with pytest.raises(DataError, match=rf"reads nothing: there are no {kind} features") as error:
        build(config, make_features(dense=dense, sparse=sparse), SGD)
    assert error.value.where == "model.output"


# Samples and sizes


@pytest.mark.parametrize("op", OPS)
def test_samples_do_not_mix(make_features: MakeFeatures, op: str) -> None:
    config = with_sources(op, READS[op][-1])
    model = model_of(config, make_features()).train()
    dense, embeddings = torch.randn(6, 3, requires_grad=True), torch.randn(6, 4, D, requires_grad=True)
    model.score(dense, embeddings)[2].sum().backward()
    others = [0, 1, 3, 4, 5]
    for inputs in (dense, embeddings):
        assert inputs.grad is None or not inputs.grad[others].any()
    order = torch.tensor([4, 2, 0, 5, 1, 3])
    together, mixed = model.score(dense, embeddings), model.score(dense[order], embeddings[order])
    torch.testing.assert_close(mixed, together[order], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("op", OPS)
def test_flops_and_parameters_grow_with_the_size(make_features: MakeFeatures, make_batch: MakeBatch, op: str) -> None:
    """Gates and sums of the size of what they read need no map to it; that size is left out."""
    features = make_features()
    key = "width" if op in VECTOR_OPS else "rows"
    counts = []
    for size in (1, 2, 3, 6) if op == "token_mixing" else (1, 2, 4, 5, 6, 8, 16, 33, 64):
        model = build(with_sources(op, READS[op][0], **{key: size}), features, SGD)
        counted = count(model, make_batch(features))
        counts.append((counted.forward_flops, counted.parameters))
    for column in zip(*counts, strict=True):
        assert list(column) == sorted(column)
    assert counts[0][0] < counts[-1][0]


def test_flops_are_those_of_all_products(make_features: MakeFeatures, make_batch: MakeBatch) -> None:
    """Projections count as well: of vectors and embeddings into ``dot``, and of its products out of it."""
    features = make_features()
    model = build(config_of(node("dots", "dot", "dense", "embeddings", width=8)), features, SGD)
    combinations, rows = 4, 5  # round(sqrt(2 * 8)), and the one of the vector
    macs = 3 * D + 4 * combinations * D + rows * rows * D + rows * (rows - 1) // 2 * 8 + 8
    assert count(model, make_batch(features)).forward_macs == macs


def test_flops_grow_with_the_widths_of_a_space(make_features: MakeFeatures, make_batch: MakeBatch) -> None:
    features = make_features()
    blocks = BlocksConfig(
        count=2, widths=(4, 8, 16), rows=(1, 2, 3, 6), embed=True, fm=True, norms=(True, False), dense_rows=(0, 1, 4)
    )
    genes, draw = block_genes(blocks), random.Random(1)
    for _ in range(4):
        values = {gene.name: draw.choice(gene.values) for gene in genes}
        for gene in (draw.choice([one for one in genes if one.is_ordered]) for _ in range(2)):
            counts = []
            for value in gene.values:
                nodes, output = graph_of(blocks, {**values, gene.name: value})
                model = build(GraphConfig(embedding_dim=D, nodes=nodes, output=output), features, SGD)
                counts.append(count(model, make_batch(features, 1)).forward_flops)
            assert counts == sorted(counts)


def test_dense_features_of_a_space_may_be_embeddings_and_norms_may_be_left_out() -> None:
    blocks = BlocksConfig(count=2, connections="chain", norms=(True, False), dense_rows=(0, 2), fm=True, embed=True)
    base = {gene.name: gene.values[0] for gene in block_genes(blocks)} | {"1.embeddings": "fmb", "2.vector": "dot"}
    nodes, _ = graph_of(blocks, {**base, "1.fm": True, "2.embed": True})
    assert all(node.norm for node in nodes)
    assert not any("dense_rows" in node.inputs for node in nodes)
    nodes, output = graph_of(blocks, {**base, "1.fm": True, "2.embed": True, "norm": False, "dense_rows": 2})
    assert not any(node.norm for node in nodes)
    by_name = {node.name: node for node in nodes}
    assert by_name["dense_rows"] == NodeConfig.model_validate(node("dense_rows", "embed", "dense", rows=2, norm=False))
    assert {name for name, one in by_name.items() if "dense_rows" in one.inputs} == {"b1_linear", "b1_fmb"}
    GraphConfig(embedding_dim=D, nodes=nodes, output=output)


def test_heads_of_a_space_may_read_all_blocks_and_the_inputs() -> None:
    blocks = BlocksConfig(
        count=3, vector=("linear", "none"), embeddings=("fmb", "none"), heads=("last", "all", "inputs")
    )
    base = {gene.name: gene.values[0] for gene in block_genes(blocks)} | {"3.vector": "none", "3.embeddings": "none"}
    last, every, inputs = (graph_of(blocks, {**base, "heads": heads})[1] for heads in blocks.heads)
    assert last == ("b2_linear", "b2_fmb")
    assert every == ("b1_linear", "b1_fmb", "b2_linear", "b2_fmb")
    assert inputs == (*every, "dense", "embeddings")
    nothing = {**base, **{f"{block}.{kind}": "none" for block in (1, 2) for kind in ("vector", "embeddings")}}
    for heads in blocks.heads:
        nodes, output = graph_of(blocks, {**nothing, "heads": heads})
        assert (nodes, output) == ((), ("dense", "embeddings"))
        GraphConfig(embedding_dim=D, nodes=nodes, output=output)


# Mistakes

A = node("a", "linear", "dense")
ROWS = node("rows", "mix", "embeddings")


@pytest.mark.parametrize(
    ("nodes", "changes", "message"),
    [
        ([node("a", "linear", "b"), node("b", "linear", "c"), node("c", "linear", "a")], {},
         "model: nodes read each other in a cycle: a -> "),
        ([node("a", "linear", "dense", "a")], {}, "model: nodes read each other in a cycle: a -> a"),
        ([A, node("b", "linear", "denze")], {}, "model: b: there is no node 'denze'; did you mean 'dense'?"),
        ([node("first", "linear", "dense"), node("b", "linear", "fist")], {}, "did you mean 'first'?"),
        ([A, node("b", "linear", "a", "zzz")], {}, "model: b: there is no node 'zzz'"),
        ([A], {"output": ["aa"]}, "model: output: there is no node 'aa'; did you mean 'a'?"),
        ([A], {"output": ["a", "a"]}, "model: output: reads 'a' twice"),
        ([node("a", "linear", "dense", "dense")], {}, "model: a: reads 'dense' twice"),
        ([A, A], {}, "model: two nodes are called 'a'"),
        ([node("dense", "linear", "embeddings")], {}, "model: 'dense' is the name of an input"),
        ([node("embeddings", "linear", "dense")], {}, "model: 'embeddings' is the name of an input"),
        ([node("A-b", "linear", "dense")], {}, "model.nodes[0].name: must be up to 64 small letters"),
        ([node("a.b", "linear", "dense")], {}, "model.nodes[0].name: must be up to 64 small letters"),
        ([node("a", "lineer", "dense", width=3)], {}, "model.nodes[0].op: must be 'linear', 'gate'"),
        ([node("a", "linear", "dense", width=0)], {}, "model.nodes[0].width: must be at least"),
        ([node("a", "mix", "embeddings", rows=-1)], {}, "model.nodes[0].rows: must be at least"),
        ([{"name": "a", "op": "linear", "inputs": ["dense"]}], {}, "model.nodes[0]: a: linear needs width"),
        ([{"name": "a", "op": "mix", "inputs": ["embeddings"]}], {}, "model.nodes[0]: a: mix needs rows"),
        ([node("a", "linear", "dense", width=3, rows=2)], {}, "a: linear has no rows; give width"),
        ([node("a", "mix", "embeddings", width=3, rows=2)], {}, "a: mix has no width; give rows"),
        ([node("a", "linear", width=3)], {}, "model.nodes[0].inputs: must have at least 1 entry"),
        ([A], {"output": []}, "model.output: must have at least 1 entry"),
        ([A, ROWS, node("b", "linear", "a")], {}, "model: nothing reads rows; name them in output or in the inputs"),
        ([A, node("b", "gate", "a")], {}, "b: gate reads two vectors"),
        ([A, node("b", "gate", "a", "dense", "a")], {}, "b: gate reads two vectors"),
        ([A, node("b", "dot", "a", "dense")], {}, "model: b: dot needs embeddings among its inputs"),
        ([node("a", "cross", "dense", activation="relu")], {}, "a: cross has no activation; linear, mix, embed have"),
        ([node("a", "mix", "embeddings", heads=2)], {}, "a: mix has no heads"),
        ([node("a", "attention", "embeddings", heads=4)], {}, "model: a: heads (4) must divide embedding_dim (6)"),
        ([node("a", "token_mixing", "embeddings", rows=4)], {}, "model: a: rows (4) must divide embedding_dim (6)"),
        ([node("a", "linear", "dense", widht=3)], {}, "model.nodes[0].widht: is not a key here; did you mean 'width'?"),
        ([{"op": "linear", "inputs": ["dense"], "width": 3}], {"output": ["dense"]}, "model.nodes[0].name: is missing"),
        *(([A, node("b", op, "a")], {}, f"model: b: {op} cannot read a, which is a vector; put embed between")
          for op in ("fm", "mix", "add", "fmb", "attention", "embedding_cross", "token_mixing")),
        *(([ROWS, node("b", op, "rows")], {}, f"model: b: {op} cannot read rows, which is embeddings; put linear")
          for op in ("sum", "embed")),
        ([node("b", "gate", "dense", "embeddings")], {}, "b: gate cannot read embeddings, which is embeddings"),
        ([node("b", "fm", "embeddings", "dense")], {}, "b: fm cannot read dense, which is a vector"),
    ],
)  # fmt: skip
def test_a_mistake_has_one_clear_message(nodes: list[dict[str, Any]], changes: dict[str, Any], message: str) -> None:
    name = nodes[-1].get("name", "")
    model = {"name": "graph", "embedding_dim": D, "nodes": nodes, "output": [name], **changes}
    with pytest.raises(RecipeError) as error:
        recipes.validate({"data": {"dataset": "synthetic"}, "model": model})
    ((where, why),) = error.value.problems
    assert message in f"{where}: {why}"


def test_settings_do_not_change() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        config_of(A).nodes[0].width = 3  # type: ignore[misc]


# Names


@pytest.mark.parametrize("seed", range(6))
def test_equal_graphs_in_another_order_have_one_digest(seed: int) -> None:
    config = random_graph(seed)
    for _ in range(5):
        nodes = list(config.nodes)
        random.Random(seed).shuffle(nodes)
        assert digest(config.model_copy(update={"nodes": tuple(nodes)})) == digest(config)


def test_other_graphs_have_other_digests() -> None:
    first = [node("a", "linear", "dense", "embeddings"), node("b", "linear", "a", width=6)]
    variants = [
        config_of(*first),
        config_of(*first, output=("b", "a")),
        config_of(*first, output=("a", "b")),
        config_of(*first, head_mlp=(3,)),
        config_of(*first, embedding_dim=8),
        config_of(*first, dropout=0.1),
        config_of(first[0], node("b", "linear", "a", width=7)),
        config_of(first[0], node("b", "linear", "a", width=6, norm=False)),
        config_of(first[0], node("b", "linear", "a", width=6, activation="relu")),
        config_of(first[0], node("b", "cross", "a", width=6)),
        config_of(first[0], node("c", "linear", "a", width=6)),
        config_of(node("a", "linear", "embeddings", "dense"), first[1]),
        config_of(first[1] | {"inputs": ["dense"]}),
        *(GraphConfig(embedding_dim=D, nodes=one.nodes, output=one.output) for one in map(random_graph, range(20))),
    ]
    assert len({digest(one) for one in variants}) == len(variants)
    assert digest(variants[0]) == digest(config_of(*first, output=("b",)))


def test_a_graph_s_weights_do_not_depend_on_the_order_of_its_nodes_in_the_state(make_features: MakeFeatures) -> None:
    config = random_graph(2)
    turned = config.model_copy(update={"nodes": config.nodes[::-1]})
    one, other = model_of(config, make_features()), model_of(turned, make_features())
    other.load_state_dict(one.state_dict())
    dense, embeddings = torch.randn(5, 3), torch.randn(5, 4, D)
    assert torch.equal(one.score(dense, embeddings), other.score(dense, embeddings))


@pytest.mark.parametrize(
    "name",
    ["keys", "values", "items", "forward", "type", "pop", "clear", "update", "training", "nodes", "output", "class",
     "none", "name", "inputs", "norm", "a" * 64, "n0_1"],
)  # fmt: skip
def test_a_node_may_have_any_name(make_features: MakeFeatures, make_batch: MakeBatch, name: str) -> None:
    features, batch = make_features(), make_batch(make_features())
    config = config_of(node(name, "linear", "dense", "embeddings"), node("last", "linear", name))
    check(config, features)
    model, twin = model_of(config, features), model_of(config, features)
    twin.load_state_dict(model.state_dict())
    assert torch.equal(model(batch), twin(batch))


# Recipes


def test_a_graph_travels_through_toml(tmp_path: Path) -> None:
    for number, config in enumerate([*map(random_graph, range(4)), config_of(*BOTH, output=("from_both", "cross")),
                                     config_of(nodes=(), output=("dense",)),
                                     with_sources("attention", ("few",), heads=3, activation="none")]):  # fmt: skip
        for plain_values in (config.model_dump(mode="json"), config.model_dump(mode="json", exclude_defaults=True)):
            content = {"data": {"dataset": "synthetic"}, "model": {**plain_values, "name": "graph"}}
            recipe = recipes.validate(content)
            for comments in (False, True):
                path = tmp_path / f"{number}.toml"
                path.write_text(recipes.dump(recipe, comments=comments), encoding="utf-8")
                assert recipes.load(path).model == config
                assert recipes.load(path, {"name": "run"}) == recipe
                assert digest(recipes.load(path).model) == digest(config)
    assert recipes.load(path, ["model.dropout=0.5"]).model.dropout == 0.5


@pytest.mark.parametrize("tasks", [("click",), ("click", "buy")])
def test_linear_terms_are_a_logistic_regression_beside_the_graph(
    make_features: MakeFeatures, make_batch: MakeBatch, tasks: tuple[str, ...]
) -> None:
    features = make_features(tasks=tasks)
    nodes = [node("deep", "linear", "dense", "embeddings", activation="relu")]
    with_terms, without = (build(config_of(*nodes, linear_terms=one), features, SGD) for one in (True, False))
    assert isinstance(with_terms, Graph)
    assert isinstance(without, Graph)
    batch = make_batch(features, 9)
    rows = with_terms.look_up(batch)
    assert rows.shape == (9, 4, D + len(tasks))
    assert not rows[..., D:].any()
    without.body.load_state_dict(with_terms.body.state_dict())
    without.heads.load_state_dict(with_terms.heads.state_dict())
    assert torch.equal(with_terms.score(batch.dense, rows), without.score(batch.dense, rows[..., :D]))
    nn.init.normal_(with_terms.weight)
    rows = torch.randn(9, 4, D + len(tasks), requires_grad=True)
    linear = batch.dense.double() @ with_terms.weight.double() + rows[..., D:].double().sum(1)
    logits = with_terms.score(batch.dense, rows)
    expected = without.score(batch.dense, rows[..., :D]).double() + linear
    assert torch.allclose(logits.double(), expected, rtol=1e-5, atol=1e-6)
    (gradient,) = torch.autograd.grad(logits[:, 0].sum(), rows)
    assert torch.equal(gradient[..., D], torch.ones(9, 4))  # the weights of the first task
    assert not gradient[..., D + 1 :].any()


def test_graphs_keep_their_names_without_linear_terms() -> None:
    nodes = [node("deep", "linear", "dense", "embeddings")]
    assert digest(config_of(*nodes)) == "fe20048f3aa5b4a8"
    assert digest(config_of(*nodes, linear_terms=True)) != digest(config_of(*nodes))
