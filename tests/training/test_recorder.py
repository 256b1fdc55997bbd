"""A resumed training draws its charts on from where it resumes, and its status tells how it ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from cordillera.errors import TrainingError
from cordillera.run import Run
from cordillera.training.recorder import RunRecorder


def test_charts_of_a_resumed_training_have_every_step_once(tmp_path: Path) -> None:
    """Steps 4 and 5 were drawn, lost with the process and drawn again with other values."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = Run.create(tmp_path / "run", "name = 'test'\n")
    for done, drawn in ((0, range(1, 6)), (3, range(4, 8))):
        recorder = RunRecorder(run)
        with recorder.recording(lambda done=done: (done, 10)):
            for step in drawn:
                recorder.draw({"loss": done + step / 8}, step)
    charts = EventAccumulator(str(run.folder / "tensorboard")).Reload()
    points = {point.step: point.value for point in charts.Scalars("loss")}
    assert points == {step: (0 if step < 4 else 3) + step / 8 for step in range(1, 8)}
    assert len(charts.Scalars("loss")) == 7


def test_an_error_is_in_the_status_and_a_recorder_without_a_run_writes_nothing(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", "name = 'test'\n")
    with pytest.raises(TrainingError), RunRecorder(run).recording(lambda: (2, 10)):
        raise TrainingError("the loss became nan")
    status = run.status()
    assert status is not None
    assert (status.step, status.ended, status.why) == (2, "failed", "the loss became nan")
    silent = RunRecorder(None)
    with silent.recording(lambda: (0, 1)):
        silent.log({"kind": "train"})
        silent.draw({"loss": 1.0}, 1)
        silent.tell("finished", (1, 1))
