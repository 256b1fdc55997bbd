"""Architectures that NASRec published: its repository's ``configs`` (Apache-2.0), one a line in ``nasrec.jsonl``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from cordillera.embeddings.tables import TablesConfig
from cordillera.errors import DataError
from cordillera.models.ranking import build
from cordillera.models.ranking.graphs.nasrec import from_nasrec, is_nasrec
from cordillera.workflows.architectures.search import read_proposals

from .conftest import MakeBatch, MakeFeatures

TEXT = (Path(__file__).parent / "nasrec.jsonl").read_text()
PUBLISHED: list[dict[str, Any]] = [json.loads(line) for line in TEXT.splitlines()]
NAMES = {
    "autoctr": ("linear", "dot", "mix"),
    "xlarge": ("linear", "dot", "gate", "sum", "attention", "mix"),
}


@pytest.mark.parametrize("number", range(6))
def test_a_published_architecture_is_built_and_learns(
    make_features: MakeFeatures, make_batch: MakeBatch, number: int
) -> None:
    features = make_features(dense=5, sparse=8)
    model = build(from_nasrec(PUBLISHED[number]), features, TablesConfig())
    batch = make_batch(features)
    model(batch).sum().backward()
    learnt = [name for name, weight in model.named_parameters() if weight.grad is not None]
    assert len(learnt) == len([name for name, _ in model.named_parameters() if not name.startswith("tables")])
    assert all(torch.isfinite(weight.grad).all() for weight in model.parameters() if weight.grad is not None)


@pytest.mark.parametrize("number", range(6))
def test_the_graph_has_the_operations_and_sizes_that_are_published(number: int) -> None:
    content = PUBLISHED[number]
    nodes = {node.name: node for node in from_nasrec(content).nodes}
    last = len(content["micro"])
    for block, micro in enumerate(content["micro"], 1):
        for index in micro["active_nodes"]:
            op = NAMES[content["config"]][index]
            node = nodes.get(f"b{block}_{op}")
            if block == last:
                assert node is not None
            if node is not None:
                wanted = micro["dense_in_dims"] if node.gives_vector else micro["sparse_in_dims"]
                assert (node.op, node.width or node.rows) == (op, wanted)
                macro = content["macro"][block - 1]
                key = "sparse_idx" if op in ("mix", "attention") else "dense_idx"
                if op not in ("gate", "sum"):
                    blocks = {int(name[1 : name.index("_")]) if name[0] == "b" else 0 for name in node.inputs}
                    assert blocks == set(macro[key]) | (set(macro["sparse_idx"]) if op == "dot" else set())


def test_published_architectures_are_proposals_of_a_search() -> None:
    found = read_proposals(TEXT, "nasrec.jsonl")
    assert len(found) == 6
    assert all(one["model"]["name"] == "graph" for one in found)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"config": "huge"}, "config is one of autoctr"),
        ({"micro": []}, "is no architecture"),
        ({"macro": 3}, "is no architecture"),
        ({"micro": [{"active_nodes": [0]}] * 7}, "is no architecture"),
    ],
)
def test_a_damaged_architecture_is_one_clear_error(change: dict[str, Any], message: str) -> None:
    content = {**PUBLISHED[0], **change}
    assert is_nasrec(content)
    with pytest.raises(DataError, match=message):
        from_nasrec(content, "a.json")
