"""A run is probed, planned for and scored with its plan; plans that do not hold are refused."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import shutil
import signal
from pathlib import Path

import pytest
import torch

from cordillera import workflows
from cordillera.cli import probe as probe_command
from cordillera.data.ranking.datasets import prepare
from cordillera.files import sealed_json
from cordillera.numerics.dispatch.accuracy import Accuracy
from cordillera.numerics.dispatch.dispatch import Profile
from cordillera.numerics.dispatch.plan import PASSES, KernelChoice, PrecisionPlan, machine
from cordillera.numerics.dispatch.probe import Probed
from cordillera.numerics.dispatch.training_linear import apply_for_training
from cordillera.numerics.sites import sites
from cordillera.recipe import load
from cordillera.run import Run
from cordillera.training import checkpoints
from cordillera.training.ranking.tasks.losses import weighted_loss
from cordillera.workflows.scores import some_batches
from cordillera.workflows.trained import restore_model

from .conftest import RECIPE, write_log


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    log = write_log(folder / "log.csv", rows=1000)
    path = folder / "small.toml"
    path.write_text(RECIPE.format(path=log))
    sizes = ["model.fmb_mlp=[64]", "model.top_mlp=[64]", "training.epochs=1", f"data.cache_dir={folder / 'cache'}"]
    return workflows.train(load(path, sizes), folder / "run").run.folder


def with_kernel(folder, kernel):
    """The plan's kernels are what happened to be fastest; tests that need one say which."""
    path = folder / "precision-plan.json"
    PrecisionPlan.load(path).uniform(kernel).save(path)


def test_a_kernel_without_any_error_has_its_row():
    """Inputs may all be zero: behind a layer whose units are dead."""
    exact = Accuracy(math.inf, 0.0, 0.0, 0.0, 0.0, 0, 8)
    expected = {"ms": 1.0, "times_fp32": 2.0, "accuracy": exact.to_json()}
    choice = KernelChoice("top", "forward", 16, 4, 8, "int8 dynamic", expected=expected)
    (row,) = probe_command._table(Profile(PrecisionPlan((choice,), {}, {}))).records
    assert row["sqnr_db"] == math.inf


def scores(cli, tmp_path, *arguments):
    done = cli("predict", *arguments, "--out", "new-scores.csv")
    assert done.code == 0, done.err
    with open(tmp_path / "new-scores.csv") as file:
        return [float(row["score"]) for row in csv.DictReader(file)]


@pytest.mark.slow
def test_a_run_is_probed_and_scored_by_its_plan(cli, trained, tmp_path):
    run = shutil.copytree(trained, tmp_path / "run")
    done = cli("probe", run, "--rows", 64, "--rows", 16)
    assert done.code == 0, done.err
    for word in ("probed", "the fastest kernel that is accurate enough", "in geometric mean", "--plan uses it"):
        assert word in done.out
    plan = PrecisionPlan.load(run / "precision-plan.json")
    assert {choice.rows for choice in plan.choices} == {16, 64}
    assert set(plan.sites) == set(Probed(run / "probe.safetensors").layers)
    write_log(tmp_path / "new.csv", rows=200, seed=3)
    exact = scores(cli, tmp_path, run, "new.csv")
    with_kernel(run, "int8 static")
    planned = scores(cli, tmp_path, run, "new.csv", "--plan")
    assert planned != exact
    assert Accuracy.of(torch.tensor(planned), torch.tensor(exact)).sqnr_db > 30


def test_a_training_step_is_planned_and_trained_by_its_plan(cli, trained, tmp_path, monkeypatch):
    """bf16 is made the fastest of all."""
    run = shutil.copytree(trained, tmp_path / "run")
    monkeypatch.setattr(
        "cordillera.numerics.dispatch.training_products.median_seconds",
        lambda calls, rounds: {name: 0.5 if name == "bf16" else 1.0 for name in calls},
    )
    done = cli("probe", run, "--rows", 1024, "--training")
    assert done.code == 0, done.err
    for word in ("and their gradients", "18 of 18 products in lower precision", "training-plan.json"):
        assert word in done.out
    plan = PrecisionPlan.load(run / "training-plan.json")
    layers = Probed(run / "gradient-probe.safetensors").layers
    assert sorted((c.site, c.of) for c in plan.choices) == sorted((site, of) for site in layers for of in PASSES)
    recipe = load(run)
    splits = prepare(recipe.data)
    (batch,) = some_batches(splits.train, recipe, 100)
    losses, gradients = [], []
    for kernels in (plan.uniform("fp32"), plan):
        _, model = restore_model(Run(run), splits.features, torch.device("cpu"))
        applied = apply_for_training(model.train(), kernels)
        loss, _ = weighted_loss(model(batch), batch.labels, None, None)
        loss.backward()
        losses.append(float(loss.detach()))
        gradients.append(model.get_submodule("top.layers.0").weight.grad)
        assert applied.unplanned == 0
    assert len(applied.planned) == len(layers)
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=0.02)
    assert Accuracy.of(gradients[1], gradients[0]).sqnr_db > 20


@pytest.mark.slow
def test_a_recipe_trains_by_a_plan_and_resumes_to_the_same_bits(cli, trained, tmp_path):
    recipe = load(trained)
    _, model = restore_model(Run(trained), prepare(recipe.data).features, torch.device("cpu"))
    shapes = {name: tuple(module.weight.shape) for name, module in sites(model).items() if name != "top.layers.0"}
    choices = tuple(KernelChoice(name, of, 128, *shape, "bf16") for name, shape in shapes.items() for of in PASSES)
    plan = PrecisionPlan(choices, machine(), {}, purpose="training")
    plan.save(tmp_path / "plan.json")
    changes = ["training.precision=fp32", f"training.plan={tmp_path / 'plan.json'}", "training.max_steps=6"]
    source = tmp_path / "mine.toml"
    source.write_text((trained / "recipe.toml").read_text())
    by_plan = load(source, changes)
    said = []
    whole = workflows.train(by_plan, tmp_path / "whole", say=said.append)
    assert any("1 in fp32, 1 of them unknown to the plan" in line for line in said)
    assert not any("had no kernel" in line for line in said)

    def stop(record, progress, total):
        if progress.step == 3:
            signal.raise_signal(signal.SIGINT)

    assert workflows.train(by_plan, tmp_path / "stopped", on_step=stop).report.ended == "interrupted"
    (tmp_path / "plan.json").unlink()
    again = workflows.train(by_plan, tmp_path / "stopped", resume=True)
    plain = workflows.train(load(source, ["training.precision=fp32", "training.max_steps=6"]), tmp_path / "plain")
    weights = [checkpoints.load(checkpoints.folder_of(one.run.checkpoints, 6)).tensors for one in (whole, again, plain)]
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())
    assert set(weights[0]) == set(weights[2])
    assert not torch.equal(
        weights[0]["model.layers.0.fmb.mlp.mlp.layers.0.weight"],
        weights[2]["model.layers.0.fmb.mlp.mlp.layers.0.weight"],
    )
    scored = workflows.evaluate(whole.run)
    assert scored.tasks["click"].metrics["ne"] == whole.evaluation.tasks["click"].metrics["ne"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["training.precision=fp32"], "there is no such plan"),
        (["training.precision=bf16"], "a plan is for float32"),
        (["training.precision=fp32", "data.batch_size=200"], "knows of 128 rows, batches have 200"),
        (["training.precision=fp32", "model.top_mlp=[32]"], r"top.layers.0 is (32, 16), the plan's (64, 16)"),
    ],
)
def test_mistakes_in_plans_of_training_are_told_before_a_run_is_made(cli, trained, tmp_path, changes, message):
    plan = PrecisionPlan(
        (KernelChoice("top.layers.0", "forward", 128, 64, 16, "bf16"),), machine(), {}, purpose="training"
    )
    if "no such" not in message:
        plan.save(tmp_path / "plan.json")
    options = [part for key in [*changes, "training.plan=plan.json"] for part in ("--set", key)]
    (tmp_path / "mine.toml").write_text((trained / "recipe.toml").read_text())
    refused = cli("train", "mine.toml", "--run", "new", *options)
    assert refused.code == 2
    assert message in refused.err
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
def test_statistics_of_training_are_used_until_new_ones_are_asked_for(cli, recipe, tmp_path):
    sizes = ("model.fmb_mlp=[64]", "model.top_mlp=[64]", "training.epochs=1", "training.probe_every=2")
    done = cli("train", recipe, "--run", "run", "-q", *(word for size in sizes for word in ("--set", size)))
    assert done.code == 0, done.err
    assert "probing its layers took" in done.out
    done = cli("probe", "run", "--rows", 16)
    assert done.code == 0, done.err
    assert "were probed in training" in " ".join(done.out.split())
    kept, used = (Path("run") / name for name in ("training-probe.safetensors", "probe.safetensors"))
    assert kept.read_bytes() == used.read_bytes()
    done = cli("probe", "run", "--rows", 16, "--anew")
    assert done.code == 0, done.err
    assert "were probed in training" not in " ".join(done.out.split())
    assert Probed(used).looks != Probed(kept).looks
    assert set(Probed(used).layers) == set(Probed(kept).layers)
    done = cli("probe", "run", "--rows", 16, "--marginals")
    assert done.code == 0, done.err
    assert "no quantiles" in done.out
    assert all(one.marginals is not None for one in Probed(used).inputs.values())


def test_layers_go_back_until_the_budget_is_kept(cli, trained, tmp_path, monkeypatch):
    """int8 alone is offered, as the fastest everywhere, and no rise at all is allowed."""
    from cordillera.numerics.dispatch.dispatch import DispatchConfig
    from cordillera.workflows import probing

    run = shutil.copytree(trained, tmp_path / "run")
    monkeypatch.setattr("cordillera.numerics.dispatch.dispatch._timed", lambda product, ones, *_: {
        one.name: 1.0 if one.name == "fp32" else 0.1 for one in ones
    })  # fmt: skip
    config = DispatchConfig(rows=(128,), kernels=("int8 dynamic",), sqnr_db=0.0, median_relative=10.0)
    loose = probing.probe(run, config, budget=1.0)
    assert not loose.returned
    assert all(choice.kernel == "int8 dynamic" for choice in loose.profile.plan.choices)
    strict = probing.probe(run, config, budget=0.0)
    assert strict.change.mean <= 0
    assert strict.profile.plan == PrecisionPlan.load(run / "precision-plan.json")
    kept = {choice.site for choice in strict.profile.plan.choices if choice.kernel == "fp32"}
    assert kept == set(strict.returned)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"threads": 99}, "made with threads 99"),
        ({"instructions": ["AVX2"]}, "made with instructions"),
        ({"libraries": {"torch": "1.0"}}, "made with libraries"),
    ],
)
def test_a_plan_of_another_machine_or_library_is_refused(cli, trained, tmp_path, change, message):
    run = shutil.copytree(trained, tmp_path / "run")
    write_log(tmp_path / "new.csv", rows=10)
    refused = cli("predict", run, "new.csv", "--plan")
    assert refused.code == 2
    assert "cordillera probe RUN writes" in refused.err
    path = run / "precision-plan.json"
    PrecisionPlan((KernelChoice("top.layers.0", "forward", 16, 64, 16, "fp32"),), machine(), {}).save(path)
    content = json.loads(path.read_text())
    content["machine"].update(change)
    path.write_text(sealed_json(content))
    refused = cli("predict", run, "new.csv", "--plan")
    assert refused.code == 2
    assert message in refused.err
    assert not (run / "predictions").exists()


@pytest.mark.slow
def test_a_plan_of_weights_that_were_trained_on_is_refused(cli, trained, tmp_path):
    run = shutil.copytree(trained, tmp_path / "run")
    write_log(tmp_path / "new.csv", rows=10)
    assert cli("probe", run, "--rows", 16).code == 0
    path = run / "precision-plan.json"
    dataclasses.replace(PrecisionPlan.load(path), weights="another").save(path)
    refused = cli("predict", run, "new.csv", "--plan")
    assert refused.code == 2
    assert "made for other weights" in refused.err
