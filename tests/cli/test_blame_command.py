"""``cordillera blame``: what it prints, its exit status, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from _blame_incidents import JobShape, healthy, incident

from cordillera.distributed.tracing.flight_recorder import write_trace

TINY = JobShape(2, 2, 2)


def written(folder: Path, made: Any) -> Path:
    for trace in made.traces:
        write_trace(trace, folder)
    return folder


def test_a_culprit_is_named_and_the_exit_status_is_3(cli: Any, tmp_path: Path) -> None:
    made = incident(TINY, ("outside",), 1)
    (rank,) = made.culprits
    result = cli("blame", written(tmp_path / "traces", made))
    assert result.code == 3
    first, second = result.out.strip().split("\n\n")
    assert first.startswith(f"RANK_NOT_JOINED: rank {rank} has not joined ")
    assert "7 ranks wait for this" in first
    assert second == "7 of 8 ranks wait for others and are not to blame"


def test_a_healthy_job_ends_with_0(cli: Any, tmp_path: Path) -> None:
    result = cli("blame", written(tmp_path / "traces", healthy(TINY, 1)))
    assert (result.code, result.err) == (0, "")
    assert result.out.startswith("no rank is to blame: none of 8 ranks")


def test_json_holds_the_causes(cli: Any, tmp_path: Path) -> None:
    made = incident(TINY, ("mismatch",), 2)
    result = cli("blame", written(tmp_path / "traces", made), "--json")
    assert result.code == 3
    content = json.loads(result.out)
    assert content["causes"][0]["kind"] == "METADATA_MISMATCH"
    assert set(content["causes"][0]["ranks"]) == made.culprits
    assert content["ranks"] == 8


def test_after_says_when_a_wait_is_a_stall(cli: Any, tmp_path: Path) -> None:
    folder = written(tmp_path / "traces", incident(TINY, ("outside",), 1))
    assert cli("blame", folder, "--after", 1e6).code == 0
    refused = cli("blame", folder, "--after", "inf")
    assert (refused.code, refused.err) == (2, "error: --after: inf is not a time in seconds\n")


def test_a_folder_without_traces_is_refused(cli: Any, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    result = cli("blame", tmp_path / "empty")
    assert result.code == 2
    assert "holds no traces" in result.err
    (tmp_path / "empty" / "trace_0").write_bytes(b"\x80\x04cos\nsystem\n.")
    result = cli("blame", tmp_path / "empty")
    assert result.code == 2
    assert "wants os.system, and only plain data is read" in result.err


def test_the_ranks_are_drawn(cli: Any, tmp_path: Path) -> None:
    made = incident(TINY, ("swap",), 1)
    folder, plot = written(tmp_path / "traces", made), tmp_path / "blame.svg"
    printed, as_json = cli("blame", folder, "--plot", plot), cli("blame", folder, "--plot", plot, "--json")
    assert printed.code == as_json.code == 3
    assert f"plot: {plot}" in printed.out
    assert json.loads(as_json.out)["plot"] == str(plot)
    text = plot.read_text()
    assert all(words in text for words in ("to blame: rank", "wait for others"))
    result = cli("blame", folder, "--plot", tmp_path / "blame.txt")
    assert result.code == 2
    assert "cannot draw into blame.txt" in result.err
