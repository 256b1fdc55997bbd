"""Drawings of graphs: every edge is seen from its source to its target, and none passes behind a box."""

from __future__ import annotations

import random
import xml.etree.ElementTree as ET

import pytest

from cordillera.models.ranking.graphs.blocks import BlocksConfig, block_genes, graph_of
from cordillera.models.ranking.graphs.config import GraphConfig
from cordillera.reports.ranking.architectures import draw_graph

SPACE = BlocksConfig(
    count=4, vector=("linear", "gate", "cross", "dot", "none"), embeddings=("mix", "fmb", "none"), embed=True, fm=True,
    dense_rows=(0, 2), heads=("last", "all", "inputs"),
)  # fmt: skip


def graphs(count: int) -> list[GraphConfig]:
    draw, found = random.Random(0), list[GraphConfig]()
    genes = block_genes(SPACE)
    while len(found) < count:
        nodes, output = graph_of(SPACE, {gene.name: draw.choice(gene.values) for gene in genes})
        if nodes and output:
            found.append(GraphConfig(nodes=nodes, output=output))
    return found


@pytest.mark.parametrize("config", graphs(12), ids=range(12))
def test_no_edge_passes_behind_a_box(config: GraphConfig) -> None:
    drawn = ET.fromstring(draw_graph(config))
    boxes = [
        [float(one.get(key, "")) for key in ("x", "y", "width", "height")] for one in drawn.iter() if _is(one, "rect")
    ]
    lines = [[float(one.get(key, "")) for key in ("x1", "y1", "x2", "y2")] for one in drawn.iter() if _is(one, "line")]
    names = {name for node in config.nodes for name in (node.name, *node.inputs)} | {*config.output, "heads"}
    assert len(boxes) == len(names)
    for x1, y1, x2, y2 in lines:
        for place in range(101):
            x, y = x1 + (x2 - x1) * place / 100, y1 + (y2 - y1) * place / 100
            assert not any(a < x < a + width and b < y < b + height for a, b, width, height in boxes)
    edges = sum(len(node.inputs) for node in config.nodes) + len(config.output)
    ends = [(x2, y2) for _, _, x2, y2 in lines if any(abs(y2 - b) < 1e-6 and a < x2 < a + w for a, b, w, _ in boxes)]
    assert len(ends) == edges
    assert all(a >= 0 and a + width <= _width(drawn) for a, _, width, _ in boxes)


def _is(element: ET.Element, tag: str) -> bool:
    return element.tag.rpartition("}")[2] == tag


def _width(drawn: ET.Element) -> float:
    return float(drawn.get("viewBox", "").split()[2])
