"""Timing, result files and fingerprints, on which every benchmark stands."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from _machine import fingerprint
from _results import FinishedPieces, train_to_the_end, write_json
from _timing import Spread, Timing, interleave, times_faster


@pytest.mark.slow
def test_every_round_runs_every_contender_and_begins_with_the_next() -> None:
    calls: list[str] = []
    timings = interleave({name: lambda name=name: calls.append(name) for name in "abc"}, rounds=3, calls=2, warmup=1)
    assert calls[:3] == ["a", "b", "c"]
    assert "".join(calls[3:]) == "aabbcc" + "bbccaa" + "ccaabb"
    assert [len(timings[name].seconds) for name in "abc"] == [3, 3, 3]


def test_a_ratio_is_of_paired_rounds() -> None:
    ours, peer = Timing("ours", [1.0, 10.0, 2.0]), Timing("peer", [2.0, 20.0, 4.0])
    assert times_faster(ours, peer) == Spread(2.0, 2.0, 2.0, 3)


def test_a_spread_is_median_and_quartiles() -> None:
    assert Spread.of([5.0, 1.0, 3.0, 2.0, 4.0]) == Spread(3.0, 2.0, 4.0, 5)
    assert Spread.of([7.0]) == Spread(7.0, 7.0, 7.0, 1)


def test_result_files_hold_no_nan(tmp_path: Path) -> None:
    path = write_json(tmp_path / "deep" / "file.json", {"a": math.nan, "b": [math.inf, 1.5], "c": {"d": "x"}})
    assert json.loads(path.read_text()) == {"a": None, "b": [None, 1.5], "c": {"d": "x"}}
    assert [entry.name for entry in path.parent.iterdir()] == ["file.json"]


def test_finished_pieces_survive_an_interruption_in_the_middle_of_a_line(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    first = FinishedPieces(path)
    first.add({"model": "x", "seed": 1}, {"ne": 0.5})
    with path.open("a") as log:
        log.write('{"key": {"model": "x", "se')
    second = FinishedPieces(path)
    assert len(second) == 1
    assert second.get({"seed": 1, "model": "x"}) == {"ne": 0.5}
    assert second.get({"seed": 2, "model": "x"}) is None
    second.add({"model": "x", "seed": 2}, {"ne": 0.4})
    third = FinishedPieces(path)
    assert [third.get({"model": "x", "seed": seed}) for seed in (1, 2)] == [{"ne": 0.5}, {"ne": 0.4}]
    third.clear()
    assert not path.exists()
    assert len(FinishedPieces(path)) == 0


def test_a_fingerprint_tells_machine_libraries_and_date() -> None:
    found = fingerprint()
    assert json.loads(json.dumps(found)) == found
    assert found["processor"]
    assert found["libraries"]["torch"]
    assert found["threads"] >= 1
    assert found["date"].endswith("+00:00")


@pytest.mark.parametrize("values", [[1.0, 2.0], [3.0, 1.0, 2.0]])
def test_quartiles_lie_around_the_median(values: list[float]) -> None:
    spread = Spread.of(values)
    assert min(values) <= spread.low <= spread.median <= spread.high <= max(values)


@pytest.mark.parametrize("ended", ["finished", "early", "interrupted"])
def test_a_training_cut_short_is_no_finished_piece(ended: str) -> None:
    report = SimpleNamespace(ended=ended)
    trainer: Any = SimpleNamespace(fit=lambda: report)
    if ended == "interrupted":
        with pytest.raises(KeyboardInterrupt):
            train_to_the_end(trainer)
    else:
        assert train_to_the_end(trainer) is report
