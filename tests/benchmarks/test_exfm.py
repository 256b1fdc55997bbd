"""``cordillera bench exfm`` with few steps: every part runs and writes what the docs quote."""

from __future__ import annotations

from pathlib import Path

import exfm
import pytest

from tests.benchmarks.programs import part_of

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exfm.adult.cache_clear()
    exfm.movielens.cache_clear()


def test_a_teacher_that_is_off_is_compared(tmp_path: Path) -> None:
    found = part_of(exfm, "bias", tmp_path)["results"]
    methods = {*exfm.METHODS, "the teacher itself"}
    assert len(found) == 2 * len(exfm.OFFSETS) * len(methods)
    for one in found:
        assert one["method"] in methods
        assert all(len(one[key]) == 1 for key in ("ne", "auc", "calibration"))
    same = [[one["ne"] for one in found if one["method"] == "no teacher" and one["data"] == name] for name in
            ("Adult", "MovieLens-100K")]  # fmt: skip
    assert all(values[0] == values[1] for values in same)


def test_a_teacher_that_lags_is_compared(tmp_path: Path) -> None:
    found = part_of(exfm, "drift", tmp_path)["results"]
    assert {(one["lag"], one["method"]) for one in found} == {(lag, name) for lag in exfm.LAGS for name in exfm.METHODS}
    assert all(len(one["changes"]) == 2 for one in found)
    assert all(one["changes"] == [0.0, 0.0] for one in found if one["method"] == "auxiliary heads")


def test_what_students_keep_is_compared(tmp_path: Path) -> None:
    found = part_of(exfm, "transfer", tmp_path)
    kinds = [one["kind"] for one in found["results"]]
    assert kinds[0] == "ids and times"
    assert "all features" in kinds
    assert found["teacher"]["ne"] > 0
    assert [one["transfer"] for one in found["results"] if not one["kind"].startswith("...")] == [0.0, 0.0]


def test_calls_of_the_teacher_are_counted(tmp_path: Path) -> None:
    found = part_of(exfm, "streams", tmp_path)
    assert found["calls"] == found["unique"] > 0
    assert found["versions"] > 1


def test_steps_with_a_teacher_are_timed(tmp_path: Path) -> None:
    found = part_of(exfm, "speed", tmp_path)["results"]
    assert {one["kind"] for one in found} == {
        "no teacher",
        "serving heads",
        "auxiliary heads",
        "auxiliary heads, adapter",
    }
    assert all(one["over plain"]["median"] > 0 for one in found)
