"""The state of runs is told from what lies in their folders, and nothing in them is changed."""

import errno
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cordillera import run as run_module
from cordillera.errors import RunError
from cordillera.reports.runs_status import run_states, runs_in, saved_checkpoints
from cordillera.run import SEARCH_FILE, Run

TRAIN = {"kind": "train", "step": 5, "epoch": 0, "loss": 0.5}
EVALUATION = {"kind": "evaluation", "step": 4, "tasks": {"like": {"ne": 0.8}, "share": {"ne": 0.9}}}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run.create(tmp_path / "runs" / "r", '[model]\nname = "dcn"\n')


def test_a_state_has_a_word_for_every_way_in_which_training_ends(run: Run) -> None:
    def word() -> str:
        (found,) = run_states([run.folder])
        return found.state

    assert word() == "not begun"
    run.write_status(None, 0, 10)
    assert word() == "killed"
    for ended, said in (
        ("finished", "finished"),
        ("early", "stopped early"),
        ("exhausted", "text ended"),
        ("interrupted", "interrupted"),
        ("failed", "failed"),
    ):
        run.write_status(ended, 5, 10, "the loss became nan" * (ended == "failed"))
        assert word() == said
        with run.lock():
            assert word() == "running"
    (found,) = run_states([run.folder])
    assert (found.why, found.next) == ("the loss became nan", f"cordillera train {run.folder} --resume")
    run.write_status("finished", 10, 10)
    (found,) = run_states([run.folder])
    assert (found.step, found.steps, found.next) == (10, 10, f"cordillera report {run.folder}")
    (run.folder / SEARCH_FILE).write_text("{}")
    assert word() == "search: finished"


def test_without_locks_both_are_possible(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    run.write_status(None, 0, 10)
    (run.folder / ".lock").write_text("1")
    monkeypatch.setattr(run_module.fcntl, "flock", refuse)
    assert run_states([run.folder])[0].state == "running or killed"


def test_the_process_that_trains_is_named_from_outside(run: Run) -> None:
    run.write_status(None, 0, 10)
    code = (
        f"from cordillera.run import Run\nwith Run({str(run.folder)!r}).lock():\n    print('held', flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as held:
        assert held.stdout is not None
        held.stdout.readline()
        (found,) = run_states([run.folder])
        assert (found.state, found.process, found.next) == ("running", str(held.pid), "")
        held.kill()
    (found,) = run_states([run.folder])
    assert (found.state, found.process) == ("killed", None)


def test_a_running_or_killed_run_is_as_far_as_its_newest_record_or_checkpoint(run: Run) -> None:
    run.write_status(None, 2, 10)
    assert run_states([run.folder])[0].step == 2
    run.log(EVALUATION)
    run.log(TRAIN)
    (found,) = run_states([run.folder])
    assert (found.model, found.step, found.loss, found.ne) == ("dcn", 5, 0.5, pytest.approx(0.85))
    assert found.age is not None
    assert 0 <= found.age < 60
    for step in (6, 3):
        place = run.checkpoints / f"step-{step:09d}"
        place.mkdir()
        (place / "tensors.safetensors").write_bytes(bytes(1000 + step))
        os.utime(place, (1e9 + step, 1e9 + step))
    (run.checkpoints / ".step-000000007.1.tmp").mkdir()
    (found,) = run_states([run.folder])
    assert found.step == 6
    assert [tuple(one) for one in saved_checkpoints(run.folder)] == [(3, 1003, 1e9 + 3), (6, 1006, 1e9 + 6)]
    everything = [path for path in run.folder.rglob("*") if path.is_file()]
    assert found.bytes == sum(path.stat().st_size for path in everything)


def test_a_line_that_is_being_written_is_left_out_and_a_damaged_one_is_named(run: Run) -> None:
    path = run.folder / "metrics.jsonl"
    path.write_text('{"kind": "tr')
    assert run_states([run.folder])[0].loss is None
    path.unlink()
    run.log(TRAIN)
    whole = path.read_text()
    path.write_text(whole + '{"kind": "train", "step": 6, "lo')
    assert run_states([run.folder])[0].loss == 0.5
    path.write_text(whole.replace("0.5", "0.6"))
    (found,) = run_states([run.folder])
    assert (found.state, found.model) == ("damaged", "dcn")
    assert found.why.startswith("metrics.jsonl, near its end: does not fit its checksum")
    assert "restore the file" in found.next


def test_only_the_end_of_long_records_is_read(run: Run) -> None:
    run.log(EVALUATION)
    run.log({"kind": "probe", "looks": ["x" * 200_000]})  # longer than what is read at once
    run.log(TRAIN)
    assert run_states([run.folder])[0].ne == pytest.approx(0.85)
    path = run.folder / "metrics.jsonl"
    with open(path, "ab") as file:
        file.truncate(3 << 30)  # a hole of zeros, which takes no room
        file.seek(0, os.SEEK_END)
        file.write(b"\n")
    run.log(TRAIN | {"step": 9, "tokens": 100})
    began = time.process_time()
    (found,) = run_states([run.folder])
    assert (found.step, found.loss) == (9, 0.5)
    assert time.process_time() - began < 2


def test_runs_of_a_folder_are_listed_by_name_and_a_damaged_one_does_not_hide_the_others(run: Run) -> None:
    parent = run.folder.parent
    Run.create(parent / "a", "= 1")
    (parent / "no-run").mkdir()
    (parent / "file").write_text("")
    (Run.create(parent / "z", '[model]\nname = "lr"\n').folder / "status.json").write_text("{}")
    found = run_states(runs_in(parent))
    assert [(one.folder.name, one.model, one.state) for one in found] == [
        ("a", None, "damaged"),
        ("r", "dcn", "not begun"),
        ("z", "lr", "damaged"),
    ]
    assert found[0].why.startswith("recipe.toml: is not TOML")
    assert found[2].why == "status.json: does not say how far training came"
    with pytest.raises(RunError, match="cannot be read"):
        runs_in(parent / "file")
    with pytest.raises(RunError, match="cordillera status"):
        run_states([parent / "no-run"])


def test_nothing_heavy_is_imported() -> None:
    code = "import sys, cordillera.cli.status, cordillera.reports.runs_status\n"
    code += "print([name for name in ('torch', 'numba', 'polars', 'numpy') if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"
