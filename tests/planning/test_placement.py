"""Placements of tables: each tiling is accepted and read as it was written, everything else is refused in words."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cordillera.errors import PlanError
from cordillera.planning.ranking.placement import COLUMN_MULTIPLE, Placement, TablePart
from tests.fuzzing import damaged, survives

Box = tuple[int, int, int, int]  # first row, rows, first column, columns


@st.composite
def tilings(draw: st.DrawFn) -> tuple[int, int, list[Box]]:
    """Rows and columns of a table and rectangles that cover it once, cut again and again from edge to edge."""
    rows, columns = draw(st.integers(1, 60)), draw(st.integers(1, 40))
    boxes: list[Box] = [(0, rows, 0, columns)]
    for _ in range(draw(st.integers(0, 8))):
        row, height, column, width = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        cuts = [("row", cut) for cut in range(1, height)]
        cuts += [("column", cut) for cut in range(COLUMN_MULTIPLE, width, COLUMN_MULTIPLE)]
        if not cuts:
            boxes.append((row, height, column, width))
            continue
        kind, cut = draw(st.sampled_from(cuts))
        if kind == "row":
            boxes += [(row, cut, column, width), (row + cut, height - cut, column, width)]
        else:
            boxes += [(row, height, column, cut), (row, height, column + cut, width - cut)]
    return rows, columns, draw(st.permutations(boxes))


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    """Valid placements of one to three tables, with parts on any ranks and in copies."""
    size = draw(st.sampled_from((1, 2, 3, 4, 6)))
    tables, parts = {}, []
    for number in range(draw(st.integers(1, 3))):
        rows, columns, boxes = draw(tilings())
        tables[f"t{number}"] = (rows, columns)
        for box in boxes:
            copies = draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0]))
            each = size // copies
            ranks = tuple(copy * each + draw(st.integers(0, each - 1)) for copy in range(copies))
            parts.append(TablePart(f"t{number}", *box, ranks, draw(st.sampled_from(("memory", "file")))))
    return Placement(size, tables, tuple(parts))


@given(placements())
def test_every_tiling_is_accepted_and_comes_back_as_it_was(placement: Placement) -> None:
    again = Placement.from_json(json.loads(placement.to_text()) | {"unknown": 1})
    assert again == placement
    assert sum(len(parts) for parts in again.parts_by_table.values()) == len(placement.parts)
    for rank in range(placement.size):
        assert {part for part in placement.parts if rank in part.ranks} == set(placement.parts_on(rank))
    for part in placement.parts:
        assert {part.rank_for(rank, placement.size) for rank in range(placement.size)} == set(part.ranks)


@given(placements(), st.data())
def test_a_gap_an_overlap_and_a_part_outside_are_refused(placement: Placement, data: st.DataObject) -> None:
    parts = list(placement.parts)
    place = data.draw(st.integers(0, len(parts) - 1))
    part = parts[place]
    rows, columns = placement.tables[part.table]
    changed = {
        "gap": [*parts[:place], *parts[place + 1 :]],
        "twice": [*parts, part],
        "outside": [*parts[:place], part._replace(rows=rows - part.first_row + 1), *parts[place + 1 :]],
        "right of it": [*parts[:place], part._replace(columns=columns - part.first_column + 1), *parts[place + 1 :]],
        "above it": [*parts[:place], part._replace(first_row=-1), *parts[place + 1 :]],
        "of nothing": [*parts[:place], part._replace(rows=0), *parts[place + 1 :]],
    }
    others = [
        one for one in parts if one.table == part.table and (one.rows, one.columns) == part[2:5:2] and one != part
    ]
    if others:  # the areas fit, but one rectangle is covered twice and another never
        changed["moved"] = [*parts[:place], others[0], *parts[place + 1 :]]
    for name, wrong in changed.items():
        with pytest.raises(PlanError, match=part.table) as caught:
            Placement(placement.size, placement.tables, tuple(wrong))
        assert caught.value.where == f"placement of table {part.table!r}", name


def test_parts_that_no_straight_cut_separates_are_accepted() -> None:
    wheel = [(0, 1, 0, 8), (0, 2, 8, 4), (2, 1, 4, 8), (1, 2, 0, 4), (1, 1, 4, 4)]
    parts = tuple(TablePart("t", *box, (0,)) for box in wheel)
    assert Placement(1, {"t": (3, 12)}, parts).way("t") == "in rows and columns"


WRONG: list[tuple[str, int, list[tuple[Any, ...]], str]] = [
    ("overlap", 2, [(0, 3, 0, 8, (0,)), (2, 2, 0, 8, (1,))], "do not cover 4 rows and 8 columns once"),
    (
        "overlap and gap",
        2,
        [(0, 3, 0, 8, (0,)), (2, 1, 0, 8, (1,))],
        "rows 2 to 2, columns 0 to 7 and rows 0 to 2, columns 0 to 7 overlap",
    ),
    ("no part", 2, [], "do not cover 4 rows and 8 columns once"),
    (
        "column",
        2,
        [(0, 4, 0, 6, (0,)), (0, 4, 6, 2, (1,))],
        "rows 0 to 3, columns 0 to 5 is not cut at a multiple of 4 columns",
    ),
    ("copies", 4, [(0, 4, 0, 8, (0, 1, 2))], "3 copies do not divide 4 ranks"),
    ("no copy", 4, [(0, 4, 0, 8, ())], "0 copies do not divide 4 ranks"),
    ("group", 4, [(0, 4, 0, 8, (0, 1))], "copy 1 is on rank 1, not on one of 2 to 3"),
    ("rank", 2, [(0, 4, 0, 8, (2,))], "copy 0 is on rank 2, not on one of 0 to 1"),
    ("negative rank", 2, [(0, 4, 0, 8, (-1,))], "copy 0 is on rank -1, not on one of 0 to 1"),
    ("tier", 2, [(0, 4, 0, 8, (0,), "tape")], "'tape' is no tier\n  -> one of memory, file"),
]


@pytest.mark.parametrize(("size", "boxes", "said"), [case[1:] for case in WRONG], ids=[case[0] for case in WRONG])
def test_what_is_no_placement_is_refused_in_words(size: int, boxes: list[tuple[Any, ...]], said: str) -> None:
    with pytest.raises(PlanError) as caught:
        Placement(size, {"t": (4, 8)}, tuple(TablePart("t", *box) for box in boxes))
    assert said in str(caught.value)


def test_unknown_tables_and_numbers_of_ranks_are_refused() -> None:
    with pytest.raises(PlanError, match="there is no table 'other'"):
        Placement(1, {"t": (4, 8)}, (TablePart("other", 0, 4, 0, 8, (0,)),))
    with pytest.raises(PlanError, match="0 ranks can hold no table\n  -> at least 1"):
        Placement(0, {}, ())
    assert Placement(2, {}, ()).parts_on(0) == ()


@pytest.mark.parametrize(
    ("boxes", "way"),
    [
        ([(0, 4, 0, 8, (1,))], "whole"),
        ([(0, 4, 0, 8, (0, 1, 2, 3))], "whole, on every rank"),
        ([(0, 4, 0, 8, (0, 2))], "whole, 2 copies"),
        ([(0, 1, 0, 8, (0,)), (1, 3, 0, 8, (1,))], "in rows"),
        ([(0, 4, 0, 4, (0,)), (0, 4, 4, 4, (3,))], "in columns"),
        ([(0, 2, 0, 4, (0,)), (0, 2, 4, 4, (3,)), (2, 2, 0, 8, (0, 3))], "in rows and columns, 2 copies"),
    ],
)
def test_the_way_of_a_table_is_said_in_words(boxes: list[tuple[Any, ...]], way: str) -> None:
    assert Placement(4, {"t": (4, 8)}, tuple(TablePart("t", *box) for box in boxes)).way("t") == way


SMALL = Placement(2, {"t": (4, 8)}, (TablePart("t", 0, 4, 0, 4, (0,)), TablePart("t", 0, 4, 4, 4, (0, 1))))


def test_every_changed_byte_and_every_lost_end_of_a_file_is_refused(tmp_path: Path) -> None:
    path, rng = tmp_path / "placement.json", random.Random(3)
    whole = SMALL.to_text().encode()
    path.write_bytes(whole)
    assert Placement.read(path) == SMALL
    flipped = [bytes([*whole[:at], whole[at] ^ rng.randrange(1, 256), *whole[at + 1 :]]) for at in range(len(whole))]
    for content in [*flipped, *(whole[:end] for end in range(len(whole)))]:
        path.write_bytes(content)
        with pytest.raises(PlanError, match=r"placement\.json"):
            Placement.read(path)


def _content(**changes: Any) -> dict[str, Any]:
    return SMALL.to_json() | changes


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ([], "is no placement of tables that this library reads"),
        (_content(schema="cordillera placement 2"), "is no placement of tables that this library reads"),
        ({"schema": SMALL.to_json()["schema"]}, "is malformed: 'tables'"),
        (_content(size=True), "True is not a whole number"),
        (_content(size=2.0), "2.0 is not a whole number"),
        (_content(size=1 << 70), "is not a whole number of 64 bits"),
        (_content(tables=[]), "is malformed"),
        (_content(tables={"t": [4]}), "is malformed"),
        (_content(parts=[{"table": "t"}]), "is malformed: 'first_row'"),
        (_content(parts=[None]), "is malformed"),
    ],
)
def test_malformed_content_is_refused_by_name(content: Any, said: str) -> None:
    with pytest.raises(PlanError) as caught:
        Placement.from_json(content, "p.json")
    assert str(caught.value).startswith("p.json: ")
    assert said in str(caught.value)


def test_files_written_by_hand_end_in_words(tmp_path: Path, fuzz_inputs: Callable[[int], int]) -> None:
    path, rng = tmp_path / "placement.json", random.Random(7)
    whole = json.dumps(SMALL.to_json()).encode()
    path.write_bytes(whole)
    assert Placement.read(path) == SMALL
    for _ in range(fuzz_inputs(200)):
        path.write_bytes(damaged(whole, rng, [b"null", b"-1", b"1e3", b"9" * 4000, b"[]", b"{}", b'"t"', b"true"]))
        survives(lambda: Placement.read(path), repr(path.read_bytes()[:2000]))
