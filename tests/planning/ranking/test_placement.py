"""A placement covers every table once, or says what is wrong with it; it survives a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cordillera.errors import PlanError
from cordillera.planning.ranking.placement import Placement, TablePart

TABLES = {"a": (10, 16), "b": (3, 6)}
PARTS = (
    TablePart("a", 0, 10, 0, 8, (0, 2)),
    TablePart("a", 0, 4, 8, 8, (1, 3)),
    TablePart("a", 4, 6, 8, 8, (0, 3), "file"),
    TablePart("b", 0, 3, 0, 6, (0, 1, 2, 3)),
)


def changed(at: int, **values: object) -> tuple[TablePart, ...]:
    return tuple(part._replace(**values) if i == at else part for i, part in enumerate(PARTS))  # type: ignore[arg-type]


def test_parts_are_found_by_table_and_by_rank() -> None:
    placement = Placement(4, TABLES, PARTS)
    assert placement.parts_by_table["a"] == (PARTS[0], PARTS[1], PARTS[2])
    assert placement.parts_on(3) == PARTS[1:]
    assert [PARTS[0].rank_for(rank, 4) for rank in range(4)] == [0, 0, 2, 2]
    assert placement.way("a") == "in rows and columns, 2 copies"
    assert placement.way("b") == "whole, on every rank"


def test_a_file_keeps_a_placement(tmp_path: Path) -> None:
    placement = Placement(4, TABLES, PARTS)
    path = tmp_path / "placement.json"
    path.write_text(placement.to_text())
    assert Placement.read(path) == placement
    path.write_text(placement.to_text().replace('"rows": 10', '"rows": 11', 1))
    with pytest.raises(PlanError):
        Placement.read(path)


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        (PARTS[:3], "'b'.*do not cover"),
        (changed(0, table="c"), "no table 'c'"),
        (changed(0, rows=11), "outside"),
        (changed(0, rows=0), "no part"),
        (changed(1, first_column=4, columns=12, rows=4), "do not cover"),
        (changed(1, first_row=6), "overlap"),
        (changed(1, first_column=9, columns=7), "multiple of 4"),
        (changed(1, tier="tape"), "no tier"),
        (changed(1, ranks=(1, 2, 3)), "3 copies"),
        (changed(1, ranks=(2, 3)), "copy 0 is on rank 2"),
        (changed(1, ranks=(1, 4)), "copy 1 is on rank 4"),
        (changed(1, ranks=()), "0 copies"),
    ],
)
def test_what_is_no_placement_is_refused(parts: tuple[TablePart, ...], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        Placement(4, TABLES, parts)


def test_content_that_is_none_is_refused() -> None:
    content = Placement(4, TABLES, PARTS).to_json()
    assert Placement.from_json(json.loads(json.dumps(content))) == Placement(4, TABLES, PARTS)
    several: tuple[object, ...] = (
        None,
        [],
        {},
        content | {"schema": "other"},
        content | {"size": 4.0},
        content | {"parts": [{}]},
    )
    for wrong in several:
        with pytest.raises(PlanError):
            Placement.from_json(wrong)
    with pytest.raises(PlanError, match="0 ranks"):
        Placement(0, {}, ())
