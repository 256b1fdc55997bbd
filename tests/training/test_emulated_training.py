"""Training in an emulated format through the public trainer: policies of weights, interruptions, bad settings."""

from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from cordillera.errors import NumericsError, RecipeError
from cordillera.numerics.formats.formats import FORMATS
from cordillera.numerics.formats.rounding import Rounding, round_to
from cordillera.recipe import dump, load
from cordillera.training import checkpoints
from cordillera.training.ranking.config import TrainingConfig
from cordillera.training.ranking.trainer import Trainer
from cordillera.workflows.ranking import _check_alone

from .conftest import MemoryLoader


def weights_of(trainer: Trainer) -> dict[str, Tensor]:
    assert trainer.storage is not None
    return trainer.storage.weights


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


@pytest.mark.parametrize("policy", ["master", "none", "split"])
def test_what_is_computed_with_is_of_the_format_and_vectors_are_not_touched(make_trainer, policy: str) -> None:
    trainer = make_trainer(emulate={"format": "bf16", "weights": policy}, batches=5)
    trainer.fit()
    weights = weights_of(trainer)
    assert "tables.weight" in weights
    assert all(torch.equal(weight, round_to(weight, FORMATS["bf16"])) for weight in weights.values())
    biases = [p for name, p in trainer.model.named_parameters() if name not in weights]
    assert not all(torch.equal(bias, round_to(bias.detach(), FORMATS["bf16"])) for bias in biases)


def test_halves_train_to_the_same_bits_as_a_float32_master(make_trainer) -> None:
    master = make_trainer("master", emulate={"weights": "master", "weight_rounding": "toward_zero"})
    master.fit()
    halves = make_trainer("split", emulate={"weights": "split"})
    halves.fit()
    for name, weight in weights_of(master).items():
        assert same_bits(weight, weights_of(halves)[name])
        assert same_bits(master.storage.full(name), halves.storage.full(name))
        assert not torch.equal(master.storage.full(name), weight)


@pytest.mark.cases(1)
@pytest.mark.parametrize("policy", ["master", "none", "split"])
def test_an_emulated_run_resumes_to_the_same_bits(make_trainer, policy: str) -> None:
    emulate = {"weights": policy, "rounding": "stochastic"}
    options = {"emulate": emulate, "batches": 5, "progressive": True, "progressive_window": 100}
    whole = make_trainer("whole", **options)
    whole.fit()
    first = make_trainer("parts", **options)
    first.on_step = lambda record, progress, total: first.stop() if progress.step == 7 else None
    assert first.fit().ended == "interrupted"
    second = make_trainer("parts", **options)
    assert second.resume()
    assert second.fit().ended == "finished"
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, second.model.state_dict()[name]), name
    for name in weights_of(whole):
        assert torch.equal(whole.storage.full(name), second.storage.full(name)), name


def test_a_checkpoint_of_another_policy_is_refused(make_trainer) -> None:
    first = make_trainer("parts", emulate={"weights": "none"}, batches=3, epochs=1)
    first.fit()
    second = make_trainer("parts", emulate={"weights": "split"}, batches=3, epochs=1)
    with pytest.raises(checkpoints.CheckpointError, match=r"must be torch.int16 .* found nothing"):
        second.resume()


def test_emulation_changes_the_result_and_little_of_it(make_trainer) -> None:
    plain = make_trainer("plain")
    emulated = make_trainer("emulated", emulate={"format": "bf16"})
    short = make_trainer("short", emulate={"format": "e2m1"})
    found = []
    for trainer in (plain, emulated, short):
        trainer.fit()
        records = [record for record in trainer.run.metrics() if record["kind"] == "evaluation"]
        found.append(records[-1]["tasks"]["click"]["ne"])
    assert 0 < abs(found[1] - found[0]) < 0.01 < abs(found[2] - found[0])


def test_settings_that_contradict_each_other_are_refused() -> None:
    for settings, message in (
        ({"precision": "bf16"}, "set precision = 'fp32'"),
        ({"precision": "fp32", "compile": True}, "cannot be emulated"),
    ):
        with pytest.raises(ValidationError, match=message):
            TrainingConfig(emulate={}, **settings)
    with pytest.raises(ValidationError, match="halves of float32 are bf16"):
        TrainingConfig(precision="fp32", emulate={"format": "fp16", "weights": "split"})


def test_a_recipe_says_what_is_emulated_and_reads_what_it_wrote(tmp_path) -> None:
    overrides = ["training.precision=fp32", "training.emulate.format=e5m2", "training.emulate.weights=none"]
    recipe = load("movielens-dlrm", overrides)
    emulate = recipe.training.emulate
    assert (emulate.format, emulate.weights, emulate.rounding_of_weights) == ("e5m2", "none", Rounding.nearest_even)
    path = tmp_path / "written.toml"
    path.write_text(dump(recipe, comments=True))
    assert load(path).training == recipe.training
    assert load("movielens-dlrm").training.emulate is None
    with pytest.raises(RecipeError, match=r"training\.emulate\.weights"):
        load("movielens-dlrm", [*overrides, "training.emulate.weights=nothing"])
    with pytest.raises(RecipeError, match="set precision = 'fp32'"):
        load("movielens-dlrm", ["training.precision=bf16", "training.emulate.format=bf16"])
    for name in ("hstu", "target-attention"):  # its kernels compute in float32, unseen by the emulation
        with pytest.raises(RecipeError, match="does not round attention over histories"):
            _check_alone(load("movielens-hstu", [f"model.name={name}", *overrides]), torch.device("cpu"))


def last_loss(trainer: Trainer) -> float:
    trainer.fit()
    return [record["loss"] for record in trainer.run.metrics() if record["kind"] == "train"][-1]


@pytest.mark.slow
def test_eight_bits_train_with_scales_and_not_without(make_trainer) -> None:
    loader = MemoryLoader(20, size=2048)
    kept = list(loader.epoch())
    loader.epoch = lambda epoch=0, start=0: (batch for batch in kept[start:])

    def train(name: str, **emulate: object) -> float:
        # of 2048 samples each has a gradient far below the smallest value of the format, 2**-9
        config = {"batches": 20, "epochs": 1, "log_every": 5, "learning_rate": 0.02}
        config |= {"loader": loader, "tables": {"learning_rate": 0.3}}
        return last_loss(make_trainer(name, emulate={"format": "e4m3fn", **emulate} if emulate else None, **config))

    exact, unscaled = train("exact"), train("unscaled", scale="none")
    learnt = unscaled - exact
    assert learnt > 0.05
    for name, emulate in {
        "tensor": {"scale": "tensor", "gradient_format": "e5m2", "power_of_two": True},
        "row": {"scale": "row", "gradient_format": "e5m2", "weight_gradients": "float32"},
        "block": {"scale": "block"},
        "no master": {"scale": "row", "weights": "none", "weight_rounding": "stochastic"},
        "loss scale": {"loss_scale": "dynamic", "gradient_format": "e5m2"},
    }.items():
        found = train(name, **emulate)
        assert found < unscaled - 0.8 * learnt, name


def test_a_loss_scale_skips_what_overflows_and_resumes_to_the_same_bits(make_trainer) -> None:
    emulate = {"format": "fp16", "loss_scale": "dynamic", "loss_scale_window": 3}
    options = {"emulate": emulate, "batches": 10, "model": "dlrm", "task_weights": {"click": 100.0}}
    whole = make_trainer("whole", **options)
    whole.fit()
    skipped = [record["step"] for record in whole.run.metrics() if record["kind"] == "skipped"]
    assert skipped
    assert len(skipped) < 15
    assert 1 < whole.loss_scale.value < 2.0**16
    first = make_trainer("parts", **options)
    first.on_step = lambda record, progress, total: first.stop() if progress.step == 7 else None
    assert first.fit().ended == "interrupted"
    second = make_trainer("parts", **options)
    assert second.resume()
    assert second.loss_scale.state_dict() == first.loss_scale.state_dict()
    assert second.fit().ended == "finished"
    assert second.loss_scale.state_dict() == whole.loss_scale.state_dict()
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, second.model.state_dict()[name]), name


def test_a_step_that_overflows_changes_nothing_and_a_fixed_loss_scale_ends_there(make_trainer) -> None:
    trainer = make_trainer("huge", emulate={"format": "fp16", "loss_scale": "dynamic"}, batches=1, epochs=1)
    trainer.loss_scale.value = 2.0**32
    before = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    trainer.fit()
    for name, tensor in trainer.model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert trainer.loss_scale.value == 2.0**31
    assert [record["loss_scale"] for record in trainer.run.metrics() if record["kind"] == "skipped"] == [2.0**32]
    with pytest.raises(NumericsError, match="not finite with a loss scale of"):
        make_trainer("fixed", emulate={"format": "fp16", "loss_scale": 2.0**32}, batches=1).fit()
