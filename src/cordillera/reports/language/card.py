"""Facts of a language report: the model's shape, the mesh with every rank at its place, the data."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from cordillera.distributed.mesh import DIMENSIONS, ParallelConfig, ranks_of
from cordillera.numbers import whole
from cordillera.reports.page import count, plain
from cordillera.training.language.records import LanguageRecords

_SHOWN_RANKS = 16
_MOST_RANKS = 100_000  # ranks of the largest mesh whose first ranks are shown
_SHAPE = {
    "layers": "Layers",
    "hidden": "Width",
    "heads": "Query heads",
    "kv_heads": "Key-value heads",
    "head_dim": "Head width",
    "ffn": "Feed-forward width",
    "experts": "Experts",
    "attention_bias": "Biases of attention",
    "head_norms": "Norms of heads",
    "scores": "Gives a score",
    "vocabulary": "Vocabulary",
    "context": "Context, tokens",
    "tied": "Tied embeddings",
    "norm_eps": "Epsilon of norms",
    "rope_theta": "RoPE base (theta)",
    "rotary_dim": "Numbers of a head that turn",
    "rope_scaling": "RoPE scaling",
}


def card(records: LanguageRecords) -> dict[str, Any]:
    """Return columns of facts about the model, its mesh and its data, and the ranks; empty if they are not recorded."""
    if not records.model:
        return {}
    model, mesh = records.model, records.mesh
    shape = [("Name", plain(model.get("name"))), ("Parameters", whole(records.parameters, ""))]
    shape.append(("Training FLOPs a token, attention aside", whole(records.size("flops_per_token"), "")))
    shape += [
        (_SHAPE.get(key, key), _told(value)) for key, value in (model.get("config") or {}).items() if key != "name"
    ]
    facts = {key: value for key, value in (model.get("data") or {}).items() if key != "warnings"}
    data = [(key.replace("_", " ").capitalize(), _told(value)) for key, value in facts.items()]
    columns = [{"Shape": shape}, {"Parallelism": _parallelism(records, mesh) if mesh else [], "Data": data}]
    return {
        "columns": [
            {name: pairs for name, pairs in column.items() if any(text for _, text in pairs)} for column in columns
        ],
        "ranks": _ranks(mesh) if mesh is not None else {},
    }


def _parallelism(records: LanguageRecords, mesh: ParallelConfig) -> list[tuple[str, str]]:
    sizes = [f"{name} {getattr(mesh, name)}" for name in DIMENSIONS if getattr(mesh, name) > 1]
    found = [("Processes", f"{mesh.world:,}"), ("Mesh", " \u00d7 ".join(sizes) or "one process")]
    if (replicas := records.replicas) > 1:
        found = [("Replicas", f"{replicas:,}"), *((f"{name} of a replica", text) for name, text in found)]
    found.append(("Precision of blocks", plain(records.setting("training", "precision"))))
    emulate = records.setting("training", "emulate")
    if isinstance(emulate, dict):
        found += [(f"Emulated {key.replace('_', ' ')}", plain(value)) for key, value in emulate.items()]
    if mesh.pipeline > 1:
        schedule = "planned" if records.setting("parallel", "table") else mesh.schedule
        found += [("Schedule", schedule), ("Stages", f"{mesh.stages}")]
    if mesh.context > 1:
        found.append(("Sequences are cut", mesh.sharding.replace("_", " ")))
        found.append(("Keys and values by", mesh.transport.replace("_", "-")))
    if (records.model.get("config") or {}).get("experts"):
        found.append(("Experts move by", mesh.experts))
    return [*found, ("Activation recomputation", mesh.recompute)]


def _ranks(mesh: ParallelConfig) -> dict[str, Any]:
    """Return ranks as a table: copies of the model and stages in one direction, parts of a layer in the other."""
    if not 1 < mesh.world <= _MOST_RANKS:
        return {}
    ranks, names = ranks_of(mesh)
    down: tuple[str, ...] = ("replicate", "shard", "pipeline")
    across: tuple[str, ...] = ("context", "tensor")
    grid = ranks.permute([names.index(name) for name in (*down, *across)]).flatten(3, 4).flatten(0, 2)
    if len(grid) > grid.shape[1]:
        grid, down, across = grid.T, across, down
    rows, columns = _places(mesh, down)[:_SHOWN_RANKS], _places(mesh, across)[:_SHOWN_RANKS]
    lines = grid[: len(rows), : len(columns)].tolist()
    shown = len(rows) * len(columns)
    return {
        "heads": ["", *columns],
        "rows": [[name, *line] for name, line in zip(rows, lines, strict=True)],
        "text": "" if shown == mesh.world else f"{shown:,} of {mesh.world:,} ranks.",
    }


def _places(mesh: ParallelConfig, names: Sequence[str]) -> list[str]:
    """Return the names of the places along dimensions; dimensions of size 1 are left out."""
    sizes = [range(getattr(mesh, name)) for name in names]
    places = (
        ", ".join(f"{name} {at}" for name, at, size in zip(names, place, sizes, strict=True) if len(size) > 1)
        for place in itertools.product(*sizes)
    )
    return [name or "rank" for name in places]


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return count(int(value) if isinstance(value, float) and value.is_integer() else value)


def _told(value: object) -> str:
    """Return facts in words: counts before their nouns, without zero counts and paths."""
    if isinstance(value, list):
        return "; ".join(filter(None, map(_told, value)))
    if not isinstance(value, dict):
        return _value(value)
    parts = []
    for key, entry in value.items():
        name = str(key).replace("_", " ")
        if key == "folder":
            continue
        if isinstance(entry, dict | list):
            parts.append(f"{name}: {text}" if (text := _told(entry)) else "")
        elif isinstance(entry, int | float) and not isinstance(entry, bool):
            parts.append(f"{_value(entry)} {name[:-1] if entry == 1 and name.endswith('s') else name}" if entry else "")
        elif entry:
            text = _value(entry)
            parts.append(text if key in ("name", "path") else f"{name} {text[:12] if key == 'fingerprint' else text}")
    return ", ".join(filter(None, parts))
