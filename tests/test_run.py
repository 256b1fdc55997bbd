"""A run's folder survives crashes, full disks and second writers."""

import errno
import fcntl
import json
import math
import os
import random
import re
import resource
import subprocess
from pathlib import Path

import pytest
from pydantic import BaseModel

from cordillera import run as run_module
from cordillera.errors import RunError
from cordillera.run import (
    Run,
    check_new_folder,
    check_no_run,
    check_recipe,
    next_path,
    recipe_state,
    remove_folder,
    write_atomically,
)
from tests.fuzzing import flips


@pytest.fixture
def run(tmp_path):
    return Run.create(tmp_path / "r", "name = 'r'\n")


def test_metrics_come_back_in_order_and_undefined_numbers_are_null(run):
    run.log({"step": 1, "ne": 0.5})
    run.log({"step": 2, "ne": math.nan, "nested": [math.inf, {"a": -math.inf}]})
    assert run.metrics() == [{"step": 1, "ne": 0.5}, {"step": 2, "ne": None, "nested": [None, {"a": None}]}]


def test_a_last_line_cut_by_a_crash_is_left_out_but_damage_before_it_is_named(run):
    run.log({"step": 1})
    path = run.folder / "metrics.jsonl"
    path.write_text(path.read_text() + '{"step": 2, "lo')
    assert run.metrics() == [{"step": 1}]
    path.write_text('{"step"\n{"step": 2}\n')
    with pytest.raises(RunError, match="line 1"):
        run.metrics()


def test_rewinding_drops_records_after_the_step_only(run):
    for step in (1, 2, 3):
        run.log({"step": step})
    run.rewind_metrics(2)
    assert [record["step"] for record in run.metrics()] == [1, 2]


def test_resuming_removes_what_killed_writers_left(run):
    killed = subprocess.Popen(["true"])
    killed.wait()
    left, written = (run.folder / f".status.json.{pid}.tmp" for pid in (killed.pid, os.getppid()))
    left.write_text("{")
    written.write_text("{")
    with run.lock():
        pass
    assert not left.exists()
    assert written.exists()


def test_a_folder_that_exists_is_never_overwritten(run):
    before = (run.folder / "recipe.toml").read_text()
    with pytest.raises(RunError, match="--resume"):
        Run.create(run.folder, "name = 'other'\n")
    assert (run.folder / "recipe.toml").read_text() == before


def test_a_folder_without_recipe_is_not_a_run(tmp_path):
    with pytest.raises(RunError, match="not a run folder"):
        Run(tmp_path)


def test_a_folder_whose_name_is_no_number_is_no_checkpoint(run):
    for name in ("step-000000003", "step-000000020", "step-²", "step-000000004.tmp"):
        (run.checkpoints / name).mkdir()
    assert run.saved_steps() == [3, 20]


def test_a_second_writer_is_refused_with_the_first_ones_pid(run):
    with run.lock(), pytest.raises(RunError, match=str(os.getpid())), Run(run.folder).lock():
        pass
    with run.lock():  # free again
        pass


def test_a_writer_may_hold_its_run_again(run):
    with run.lock():
        with run.lock():
            pass
        with pytest.raises(RunError, match="another process"), Run(run.folder).lock():
            pass
    with Run(run.folder).lock():
        pass


class _Training(BaseModel):
    learning_rate: float = 0.1
    epochs: int = 1
    decay: str = "none"
    betas: tuple[float, float] = (0.9, 0.99)
    emulate: dict[str, str] | None = None
    log_every: int = 10


class _Recipe(BaseModel):
    name: str = "r"
    seed: int = 1
    training: _Training = _Training()


def test_a_changed_recipe_is_refused_with_the_old_and_the_new_values(tmp_path):
    saved = json.loads(json.dumps(recipe_state(_Recipe())))
    check_recipe(saved, _Recipe(), tmp_path)
    check_recipe(None, _Recipe(), tmp_path)
    changed = _Recipe(seed=2, training=_Training(learning_rate=1.0, betas=(0.9, 0.9), emulate={"format": "e4m3"}))
    with pytest.raises(RunError, match="recipe") as caught:
        check_recipe(saved, changed, tmp_path / "recipe.toml")
    text = str(caught.value)
    assert "seed: 1 -> 2" in text
    assert "training.learning_rate: 0.1 -> 1.0" in text
    assert "training.betas: [0.9, 0.99] -> [0.9, 0.9]" in text
    assert 'training.emulate.format: null -> "e4m3"' in text
    assert "epochs" not in text
    assert "recipe.toml" in text


def test_only_listed_keys_of_a_recipe_may_change(tmp_path):
    saved = recipe_state(_Recipe())
    check_recipe(saved, _Recipe(name="other", training=_Training(log_every=1, epochs=5)), tmp_path)
    decaying = recipe_state(_Recipe(training=_Training(decay="cosine")))
    with pytest.raises(RunError, match=r"training\.epochs: 1 -> 5"):
        check_recipe(decaying, _Recipe(training=_Training(decay="cosine", epochs=5)), tmp_path)


def test_a_key_that_is_newer_than_the_checkpoint_is_its_default(tmp_path):
    saved = recipe_state(_Recipe())
    del saved["training"]["learning_rate"]
    check_recipe(saved, _Recipe(), tmp_path)
    with pytest.raises(RunError, match=r"0\.1 -> 0\.2"):
        check_recipe(saved, _Recipe(training=_Training(learning_rate=0.2)), tmp_path)
    with pytest.raises(RunError, match="another kind or version"):
        check_recipe({"training": 3}, _Recipe(), tmp_path)


def test_json_files_and_records_show_any_flipped_byte_and_any_cut(run, fuzz_inputs):
    rng = random.Random(1)
    run.write_json("model.json", {"a": 1.5, "b": ["text", None], "c": {"d": True}})
    for step in range(8):
        run.log({"kind": "train", "step": step, "loss": 0.1 * step})
    run.write_status("finished", 8, 8)
    readers = {
        "model.json": lambda: run.read_json("model.json"),
        "environment.json": lambda: run.read_json("environment.json"),
        "status.json": run.status,
        "metrics.jsonl": run.metrics,
    }
    for name, read in readers.items():
        path = run.folder / name
        whole, expected = path.read_bytes(), read()
        for number in range(fuzz_inputs(50)):
            cut = number % 5 == 0
            path.write_bytes(whole[: rng.randrange(len(whole))] if cut else flips(whole, rng))
            with pytest.raises(RunError, match=re.escape(str(run.folder))):
                read()
        path.write_bytes(whole)
        assert read() == expected


def test_json_without_a_checksum_is_read(run):
    (run.folder / "model.json").write_text('{"a": 1}')
    assert run.read_json("model.json") == {"a": 1}
    (run.folder / "metrics.jsonl").write_text('{"step": 1}\n')
    assert run.metrics() == [{"step": 1}]


@pytest.mark.parametrize("text", ["[1]", "3", '{"a": NaN}', '{"a": 1e999}', "[" * 10_000, "", "\xff"])
def test_what_is_no_json_object_is_refused_by_name(run, text):
    for name in ("model.json", "status.json"):
        (run.folder / name).write_text(text, encoding="latin-1")
        with pytest.raises(RunError, match=re.escape(name)):
            run.read_json(name)
    (run.folder / "status.json").unlink()
    (run.folder / "metrics.jsonl").write_text(f'{text}\n{{"step": 2}}\n', encoding="latin-1")
    with pytest.raises(RunError, match="line 1"):
        run.metrics()


def test_a_full_disk_leaves_the_old_file_and_nothing_half_written(run, monkeypatch):
    run.write_json("model.json", {"a": 1})
    before = sorted(p.name for p in run.folder.iterdir())

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(run_module.os, "fsync", full)
    with pytest.raises(RunError, match="disk is full"):
        run.write_json("model.json", {"a": 2})
    assert run.read_json("model.json") == {"a": 1}
    assert sorted(p.name for p in run.folder.iterdir()) == before


def test_a_record_that_the_disk_took_a_part_of_is_taken_back(run):
    run.log({"step": 1})
    path = run.folder / "metrics.jsonl"
    before, limits = path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 10, limits[1]))
    try:
        with pytest.raises(RunError, match="larger than may be"):
            run.log({"step": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == before
    run.log({"step": 3})
    assert [record["step"] for record in run.metrics()] == [1, 3]


def test_a_finished_run_that_is_killed_while_it_is_rewound_can_be_resumed(run, monkeypatch):
    for step in (1, 2, 3):
        run.log({"step": step})
    run.write_status("finished", 3, 3)
    written = run_module.write_atomically

    def killed(path, text, **options):
        written(path, text, **options)
        raise KeyboardInterrupt

    for writes in (1, 2):
        calls = iter([written] * (writes - 1) + [killed])
        monkeypatch.setattr(run_module, "write_atomically", lambda *a, calls=calls, **k: next(calls)(*a, **k))
        with pytest.raises(KeyboardInterrupt):
            run.rewind_metrics(2)
        monkeypatch.undo()
        assert run.metrics()[:2] == [{"step": 1}, {"step": 2}]


def test_an_unwritable_place_is_named(tmp_path):
    if os.geteuid() == 0:
        pytest.skip("root may write anywhere")
    tmp_path.chmod(0o500)
    with pytest.raises(RunError, match="cannot be written"):
        write_atomically(tmp_path / "x", "text")


def test_the_next_path_is_the_first_free_one(tmp_path):
    assert next_path(tmp_path, "a").name == "a"
    (tmp_path / "a").mkdir()
    (tmp_path / "a-2").mkdir()
    assert next_path(tmp_path, "a").name == "a-3"
    (tmp_path / "a-3").symlink_to(tmp_path / "unmounted")
    assert next_path(tmp_path, "a").name == "a-4"


def test_a_folder_whose_process_was_killed_before_it_had_a_recipe_is_taken_again(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / ".recipe.toml.999999999.tmp").touch()
    run = Run.create(tmp_path / "a", "seed = 1\n")
    with pytest.raises(RunError, match="already exists"):
        Run.create(tmp_path / "a", "seed = 1\n")
    assert sorted(path.name for path in run.folder.iterdir()) == ["checkpoints", "environment.json", "recipe.toml"]


def test_a_run_that_failed_before_its_first_checkpoint_is_not_to_be_resumed(tmp_path):
    run = Run.create(tmp_path / "a", "seed = 1\n")
    run.write_status("failed", 0, 10)
    with pytest.raises(RunError, match="training failed, and it holds no checkpoint\n  -> delete it, name another"):
        Run.create(tmp_path / "a", "seed = 1\n")
    (run.checkpoints / "step-5").mkdir()
    with pytest.raises(RunError, match=r"go on with `cordillera train .* --resume`"):
        Run.create(tmp_path / "a", "seed = 1\n")


@pytest.mark.parametrize("name", ["file", "folder", "."])
def test_what_is_no_run_is_not_advised_to_be_resumed(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/other").touch()
    with pytest.raises(RunError, match="already exists") as refused:
        check_new_folder(Path(name))
    assert refused.value.remedy == "name another folder for the run"


def test_advice_to_resume_a_run_is_a_command_for_a_shell(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Run.create("my run", "seed = 1\n")
    again = "`cordillera train 'my run' --resume`"
    with pytest.raises(RunError) as refused:
        check_new_folder(Path("my run"))
    assert refused.value.remedy == f"name another folder for the run, or go on with {again}"
    with pytest.raises(RunError) as refused:
        check_no_run("my run", "train")
    assert refused.value.remedy == f"continue it with {again}"


def test_a_run_in_the_home_folder_is_made_and_found_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert Run.create("~/runs/a", "seed = 1\n").folder == tmp_path / "home/runs/a"
    assert Run(Path("~/runs/a")).recipe_file.is_file()
    with pytest.raises(RunError, match="already exists"):
        check_new_folder(Path("~/runs/a"))
    with pytest.raises(RunError, match="is a run folder"):
        check_no_run("~/runs/a", "train")
    assert not (tmp_path / "~").exists()


def test_of_a_link_to_a_folder_the_link_alone_is_deleted(tmp_path):
    (tmp_path / "v1").mkdir()
    (tmp_path / "v1/file").touch()
    (tmp_path / "newest").symlink_to("v1")
    remove_folder(tmp_path / "newest")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "v1"]


def test_what_a_killed_process_was_writing_goes_when_the_run_goes_on(run):
    (run.folder / ".metrics.jsonl.999999999.tmp").touch()
    mine = run.folder / f".metrics.jsonl.{os.getpid()}.tmp"
    mine.touch()
    with run.lock():
        assert sorted(run.folder.glob(".*.tmp")) == [mine]


def test_a_run_on_a_file_system_without_locks_is_written_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    run = Run.create(tmp_path / "run", "seed = 1\n")
    monkeypatch.setattr("fcntl.flock", refuse)
    with pytest.warns(UserWarning, match="no locks"), run.lock():
        run.log({"step": 1})
    assert run.metrics() == [{"step": 1}]


def test_a_killed_run_names_the_newest_checkpoint_on_disk_not_the_step_of_its_status(run):
    run.write_status(None, 0, 300)
    assert run.status().warning.endswith("training runs, or was killed; it has no checkpoint.")
    for name in ("step-000000100", "step-000000200", ".step-000000300.1.tmp", "step-x"):
        (run.checkpoints / name).mkdir()
    assert "its newest checkpoint is of step 200 of 300" in run.status().warning
    assert run.read_json("status.json").keys() == {"ended", "step", "steps", "why", "records"}


def test_the_writer_of_a_run_is_told_without_writing_and_a_reader_does_not_keep_training_from_beginning(
    run, monkeypatch
):
    assert run.writer() == ""
    assert not (run.folder / ".lock").exists()
    with run.lock():
        assert Run(run.folder).writer() == str(os.getpid())
    assert run.writer() == ""
    with open(run.folder / ".lock", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        monkeypatch.setattr(run_module.time, "sleep", lambda _: fcntl.flock(file, fcntl.LOCK_UN))
        with run.lock():
            assert run.writer() == str(os.getpid())
