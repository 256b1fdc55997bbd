"""``cordillera status`` lists runs and shows one of them."""

from pathlib import Path
from typing import Any

import pytest

from cordillera.reports.runs_status import run_states
from cordillera.run import Run


def make_run(folder: str, ended: str | None = None, why: str = "") -> Run:
    run = Run.create(folder, '[model]\nname = "dcn"\n')
    run.log({"kind": "train", "step": 1200, "loss": 0.4321})
    run.write_status(ended, 1200, 3000, why)
    return run


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """No table is printed row by row."""
    monkeypatch.setenv("COLUMNS", "200")


def test_all_runs_are_listed_and_nothing_is_written(cli: Any, tmp_path: Path) -> None:
    assert cli("status").out == "there are no runs in the folder runs; `cordillera train RECIPE` makes one\n"
    make_run("runs/good", "finished")
    make_run("runs/bad", "failed", "the disk is full")
    (make_run("runs/damaged").folder / "status.json").write_text("{")
    before = contents(tmp_path)
    done = cli("status")
    heading, *rows = done.out.splitlines()
    assert (done.code, heading.split()) == (
        0,
        ["run", "model", "state", "step", "of", "loss", "newest", "record", "size", "why"],
    )
    assert [row.split()[:3] for row in rows] == [
        ["runs/bad", "dcn", "failed"],
        ["runs/damaged", "dcn", "damaged"],
        ["runs/good", "dcn", "finished"],
    ]
    assert rows[0].split()[3:6] == ["1,200", "3,000", "0.4321"]
    assert rows[0].rstrip().endswith("the disk is full")
    assert "status.json: is not JSON" in rows[1]
    assert contents(tmp_path) == before
    assert cli("status", "runs").out.splitlines()[0] == heading


def test_runs_within_studies_are_pointed_to(cli: Any) -> None:
    for name in ("my sweep/size-1-seed-1", "my sweep/size-2-seed-1", "other/one"):
        make_run(f"runs/{name}", "finished")
    told = "there are no runs directly in the folder runs; `cordillera status 'runs/my sweep' runs/other` shows its"
    assert cli("status").out == f"{told} studies\n"


def test_one_run_is_shown_with_its_checkpoints_the_reason_of_its_failure_and_the_next_command(cli: Any) -> None:
    run = make_run("runs/a b", "failed", "the loss became nan")
    assert "no checkpoint yet" in cli("status", run.folder).out
    (run.checkpoints / "step-000001000").mkdir()
    (run.checkpoints / "step-000001000" / "state.json").write_bytes(bytes(2_500_000))
    out = cli("status", run.folder).out
    assert "\n1,000  2.5 MB  20" in out
    assert out.endswith("the loss became nan\n  -> cordillera train 'runs/a b' --resume\n")
    with run.lock():
        out = cli("status", run.folder).out
    assert "running" in out
    assert "after SIGTERM it saves a checkpoint and ends\n" in out
    assert "--resume" not in out


def test_what_is_no_run_is_refused(cli: Any, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name in ("empty", "nothing"):
        done = cli("status", name)
        assert (done.code, done.out) == (2, "")
        assert f"{name}: is not a run folder" in done.err


def test_a_training_that_ends_while_it_is_read_was_not_killed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run = make_run(str(tmp_path / "ends"))

    def writer(self: Run) -> str:
        run.write_status("finished", 3000, 3000)  # and then the lock is free
        return ""

    monkeypatch.setattr(Run, "writer", writer)
    assert run_states([run.folder])[0].state == "finished"


def test_a_folder_of_somebody_else_is_passed_over(cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run("runs/mine", "finished")
    make_run("runs/theirs", "finished")
    is_file = Path.is_file

    def refused(path: Path) -> bool:
        if "theirs" in str(path):
            raise PermissionError(13, "Permission denied")
        return is_file(path)

    monkeypatch.setattr(Path, "is_file", refused)
    done = cli("status")
    assert (done.code, [row.split()[0] for row in done.out.splitlines()[1:]]) == (0, ["runs/mine"])
