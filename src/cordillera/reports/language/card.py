"""Section of a language report: the model's shape, the mesh with every rank at its place, the data."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from cordillera.distributed.mesh import DIMENSIONS, ParallelConfig, ranks_of
from cordillera.reports.page import count, definitions, plain, scroll, whole
from cordillera.training.language.records import LanguageRecords

_SHOWN_RANKS = 16
_MOST_RANKS = 100_000  # ranks of the largest mesh whose first ranks are shown
_SHAPE = {
    "layers": "Layers",
    "hidden": "Width",
    "heads": "Heads of queries",
    "kv_heads": "Heads of keys and values",
    "head_dim": "Width of a head",
    "ffn": "Width of the feed-forward net",
    "vocabulary": "Vocabulary",
    "context": "Context, tokens",
    "tied": "Head is the embedding",
    "norm_eps": "Epsilon of norms",
    "rope_theta": "Base of rotary frequencies",
    "rope_scaling": "Their scaling",
}


def card(records: LanguageRecords) -> str:
    """Return the section of the model, its mesh and its data as HTML; empty if they are not recorded."""
    if not records.model:
        return ""
    model, mesh = records.model, records.mesh
    shape = [("Name", plain(model.get("name"))), ("Parameters", whole(records.parameters, ""))]
    shape.append(("Training FLOPs a token, attention aside", whole(records.size("flops_per_token"), "")))
    shape += [
        (_SHAPE.get(key, key), _value(value)) for key, value in (model.get("config") or {}).items() if key != "name"
    ]
    blocks = [("Shape", shape)]
    if mesh is not None:
        sizes = [f"{name} {getattr(mesh, name)}" for name in DIMENSIONS if getattr(mesh, name) > 1]
        parallel = [("Processes", f"{mesh.world:,}"), ("Mesh", " \u00d7 ".join(sizes) or "one process")]
        parallel.append(("Precision of blocks", plain(records.setting("training", "precision"))))
        emulate = records.setting("training", "emulate")
        if isinstance(emulate, dict):
            parallel += [(f"Emulated {key.replace('_', ' ')}", plain(value)) for key, value in emulate.items()]
        if mesh.pipeline > 1:
            schedule = "planned" if records.setting("parallel", "table") else mesh.schedule
            parallel += [("Schedule", schedule), ("Stages", f"{mesh.stages}")]
        if mesh.context > 1:
            parallel += [
                ("Sequences are cut", mesh.sharding.replace("_", " ")),
                ("Keys and values by", mesh.transport.replace("_", "-")),
            ]
        parallel.append(("Computed again in backward", mesh.recompute))
        blocks.append(("Parallelism", parallel))
    facts = {key: value for key, value in (model.get("data") or {}).items() if key != "warnings"}
    blocks.append(("Data", [(key.replace("_", " ").capitalize(), _told(value)) for key, value in facts.items()]))
    cards = [f"<h3>{name}</h3>{definitions(pairs)}" for name, pairs in blocks if any(text for _, text in pairs)]
    columns = "".join(f"<div>{column}</div>" for column in ("".join(cards[:1]), "".join(cards[1:])))
    ranks = _ranks(mesh) if mesh is not None else ""
    return f'<section><h2>The model</h2><div class="card">{columns}</div>{ranks}</section>'


def _ranks(mesh: ParallelConfig) -> str:
    """Return ranks as a table: copies of the model and stages in one direction, parts of a layer in the other."""
    if not 1 < mesh.world <= _MOST_RANKS:
        return ""
    ranks, names = ranks_of(mesh)
    down, across = ("replicate", "shard", "pipeline"), ("context", "tensor")
    grid = ranks.permute([names.index(name) for name in (*down, *across)]).flatten(3, 4).flatten(0, 2)
    if len(grid) > grid.shape[1]:
        grid, rows, columns = grid.T, _places(mesh, across), _places(mesh, down)
    else:
        rows, columns = _places(mesh, down), _places(mesh, across)
    heads = [name.replace(", ", "<br>") or "rank" for name in columns[:_SHOWN_RANKS]]
    head = "".join(f'<th scope="col">{name}</th>' for name in heads)
    lines = []
    for name, line in zip(rows[:_SHOWN_RANKS], grid[:, :_SHOWN_RANKS].tolist(), strict=False):
        cells = "".join(f"<td>{rank}</td>" for rank in line)
        lines.append(f'<tr><th scope="row">{name or "rank"}</th>{cells}</tr>')
    shown = min(len(rows), _SHOWN_RANKS) * min(len(columns), _SHOWN_RANKS)
    text = "" if shown == mesh.world else f'<p class="soft small">{shown:,} of {mesh.world:,} ranks.</p>'
    table = f'<table class="ranks"><thead><tr><td></td>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table>'
    return f"<h3>Ranks by their place in the mesh</h3>{scroll('Ranks', table)}{text}"


def _places(mesh: ParallelConfig, names: Sequence[str]) -> list[str]:
    """Return the names of the places along dimensions; dimensions of size 1 are left out."""
    sizes = [range(getattr(mesh, name)) for name in names]
    return [
        ", ".join(f"{name} {at}" for name, at, size in zip(names, place, sizes, strict=True) if len(size) > 1)
        for place in itertools.product(*sizes)
    ]


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
            parts.append(f"{_value(entry)} {name}" if entry else "")
        elif entry:
            text = _value(entry)
            parts.append(text if key in ("name", "path") else f"{name} {text[:12] if key == 'fingerprint' else text}")
    return ", ".join(filter(None, parts))
