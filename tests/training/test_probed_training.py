"""Layers are probed while a model trains: what a model computes alone, resumed to the same bits, and told."""

from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError

from cordillera.numerics.dispatch.probe import Probed
from cordillera.numerics.dispatch.row_statistics import RowStatistics
from cordillera.numerics.sites import Recorder, sites
from cordillera.training.ranking.config import TrainingConfig
from cordillera.training.ranking.trainer import TRAINING_PROBE, Trainer


def gathered(trainer: Trainer) -> Probed:
    return Probed(trainer.run.folder / TRAINING_PROBE)


def same(one: RowStatistics, other: RowStatistics) -> bool:
    tensors = [[state["mean"], *state["scatter"]] for state in (one.state_dict(), other.state_dict())]
    return one.count == other.count and all(torch.equal(a, b) for a, b in zip(*tensors, strict=True))


@pytest.mark.parametrize("emulate", [None, {"format": "e4m3fn", "scale": "row"}])
def test_statistics_are_those_of_the_steps_that_were_looked_at_and_of_no_evaluation(make_trainer, emulate) -> None:
    options = {"batches": 5, "epochs": 2, "evaluate_every": 1, "emulate": emulate}
    trainer = make_trainer("probed", probe_every=4, progressive=True, progressive_window=100, **options)
    expected = {name: RowStatistics(layer.in_features) for name, layer in sites(trainer.model).items()}
    take = trainer.probe.step

    def step() -> bool:
        looking = take()
        if looking:
            recorder = Recorder(trainer.model, list(expected))
            close = trainer.probe.close

            def closed() -> None:
                close()
                recorder.__exit__()
                for name, parts in recorder.inputs.items():
                    expected[name].update(torch.cat(parts))
                trainer.probe.close = close

            trainer.probe.close = closed
        return looking

    trainer.probe.step = step
    report = trainer.fit()
    found = gathered(trainer)
    assert found.looks == 3  # of steps 1, 5, 9 of ten
    assert found.inputs.keys() == expected.keys()
    assert all(same(found.inputs[name], expected[name]) for name in expected)
    assert all(one.count == 3 * 64 for one in found.inputs.values())
    (record,) = [record for record in trainer.run.metrics() if record["kind"] == "probe"]
    assert record["looks"] == 3
    assert 0 < record["seconds"] == report.probing_seconds < report.seconds


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_run_that_was_stopped_ends_with_the_statistics_of_one_that_was_not(make_trainer, precision: str) -> None:
    options = {"batches": 10, "epochs": 1, "probe_every": 3, "precision": precision, "probe_marginals": True}
    whole = make_trainer("whole", **options)
    whole.fit()
    first = make_trainer("parts", **options)
    first.on_step = lambda record, progress, total: first.stop() if progress.step == 4 else None
    assert first.fit().ended == "interrupted"
    assert not (first.run.folder / TRAINING_PROBE).exists()
    second = make_trainer("parts", **options)
    assert second.resume()
    second.fit()
    one, other = gathered(whole), gathered(second)
    assert one.looks == other.looks == 4
    assert all(same(one.inputs[name], other.inputs[name]) for name in one.inputs)
    for name, statistics in one.inputs.items():
        assert statistics.marginals.count == 4 * 64
        assert torch.equal(statistics.marginals.points(), other.inputs[name].marginals.points())
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, second.model.state_dict()[name]), name


def test_sums_are_not_computed_in_the_precision_around_them() -> None:
    rows = torch.randn(64, 8, generator=torch.Generator().manual_seed(0)) * 0.01 + 3
    plain, around = RowStatistics(8), RowStatistics(8)
    plain.update(rows)
    with torch.autocast("cpu", torch.bfloat16):
        around.update(rows)
    assert same(plain, around)


def test_without_it_nothing_is_gathered_and_compiled_layers_are_refused(make_trainer) -> None:
    trainer = make_trainer(batches=2, epochs=1)
    assert trainer.fit().probing_seconds == 0
    assert not (trainer.run.folder / TRAINING_PROBE).exists()
    with pytest.raises(ValidationError, match="set compile = false, or probe_every = 0"):
        TrainingConfig(probe_every=100, compile=True)
    with pytest.raises(ValidationError, match="probe_marginals has no effect: set probe_every"):
        TrainingConfig(probe_marginals=True)
