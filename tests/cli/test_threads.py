"""Threads of runs: chosen at the beginning, said, and kept when a run goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from cordillera import workflows
from cordillera.errors import RecipeError, RunError
from cordillera.kernels.threads import ThreadChoice
from cordillera.recipe import load
from cordillera.run import Run
from cordillera.workflows import processes

SMALL = ["data.dataset=synthetic", "data.synthetic.rows=600", "data.synthetic.largest_vocabulary=50"]
SMALL += ["data.batch_size=50", "training.epochs=2", "training.evaluate_every=1000", "training.precision=fp32"]


@pytest.fixture
def choose(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets what would be chosen now."""
    monkeypatch.setattr(processes, "usable_cores", lambda: 8)

    def set_choice(count: int, why: str = "") -> None:
        monkeypatch.setattr(processes, "choose_threads", lambda: ThreadChoice(count, why))

    return set_choice


def test_a_run_says_its_threads_and_keeps_them_when_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, choose: Any
) -> None:
    monkeypatch.setenv("CORDILLERA_CACHE", str(tmp_path / "cache"))
    recipe, said, counts = load("synthetic-lr", SMALL), list[str](), list[int]()
    before = torch.get_num_threads()

    def interrupt(record: Any, progress: Any, total: int) -> None:
        counts.append(torch.get_num_threads())
        if progress.step == 3:
            import os
            import signal

            os.kill(os.getpid(), signal.SIGINT)

    choose(1, "1 of 2: other processes keep 2.0 of 2 processors busy")
    outcome = workflows.train(recipe, tmp_path / "run", on_step=interrupt, say=said.append)
    assert outcome.report.ended == "interrupted"
    assert "threads: 1 of 2: other processes keep 2.0 of 2 processors busy" in said
    choose(2)
    workflows.train(recipe, tmp_path / "run", resume=True, on_step=lambda *_: counts.append(torch.get_num_threads()))
    assert set(counts) == {1}
    assert torch.get_num_threads() == before


def test_threads_are_shared_among_processes_and_chosen_anew_for_another_number(tmp_path: Path, choose: Any) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "recipe.toml").write_text("")
    run = Run(tmp_path / "run")
    choose(6)
    assert processes.threads_of(None, str, folder=run.folder, processes=2) == 3
    processes.keep_threads(run, 3, 2)
    choose(8)
    assert processes.threads_of(None, str, folder=run.folder, processes=2) == 3
    assert processes.threads_of(None, str, folder=run.folder, processes=4) == 2
    assert processes.threads_of(5, str, folder=run.folder, processes=2) == 5
    processes.keep_threads(run, 64, 1)  # of a larger machine
    assert processes.threads_of(None, str, folder=run.folder) == 8


@pytest.mark.parametrize("content", ["[]", "{", '{"threads": 0}', '{"threads": 1e9}', '{"threads": true}', "\xff"])
def test_a_damaged_record_of_threads_is_named(tmp_path: Path, choose: Any, content: str) -> None:
    choose(2)
    (tmp_path / processes.THREADS_FILE).write_bytes(content.encode("latin-1"))
    with pytest.raises(RunError, match=r"threads\.json"):
        processes.threads_of(None, str, folder=tmp_path)


@pytest.mark.parametrize("count", ["1e9", "1025", "0"])
def test_a_number_of_threads_beyond_all_machines_is_refused(count: str) -> None:
    with pytest.raises(RecipeError, match="threads"):
        load("synthetic-lr", [f"threads={count}"])
