"""A run is probed, planned for and scored with its plan; plans that do not hold are refused."""

from __future__ import annotations

import csv
import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch

from cordillera.numerics.accuracy import Accuracy
from cordillera.numerics.precision_plan import PrecisionPlan, _digest
from cordillera.numerics.probe import Probed
from cordillera.recipe import load

from .conftest import RECIPE, write_log


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    from cordillera import workflows

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


def scores(cli, tmp_path, *arguments):
    done = cli("predict", *arguments)
    assert done.code == 0, done.err
    with open(tmp_path / "new-scores.csv") as file:
        return [float(row["score"]) for row in csv.DictReader(file)]


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
    from cordillera.numerics.dispatch import DispatchConfig
    from cordillera.workflows import probing

    run = shutil.copytree(trained, tmp_path / "run")
    monkeypatch.setattr("cordillera.numerics.dispatch._timed", lambda product, ones, *_: {
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
    [({"threads": 99}, "made with threads 99"), ({"libraries": {"torch": "1.0"}}, "made with libraries")],
)
def test_a_plan_of_another_machine_or_library_is_refused(cli, trained, tmp_path, change, message):
    run = shutil.copytree(trained, tmp_path / "run")
    write_log(tmp_path / "new.csv", rows=10)
    refused = cli("predict", run, "new.csv", "--plan")
    assert refused.code == 2
    assert "cordillera probe RUN writes" in refused.err
    assert cli("probe", run, "--rows", 16).code == 0
    path = run / "precision-plan.json"
    content = json.loads(path.read_text())
    content.pop("digest")
    content["machine"].update(change)
    path.write_text(json.dumps({**content, "digest": _digest(content)}))
    refused = cli("predict", run, "new.csv", "--plan")
    assert refused.code == 2
    assert message in refused.err
    assert not (tmp_path / "new-scores.csv").exists()


def test_a_plan_of_weights_that_were_trained_on_is_refused(cli, trained, tmp_path):
    run = shutil.copytree(trained, tmp_path / "run")
    write_log(tmp_path / "new.csv", rows=10)
    assert cli("probe", run, "--rows", 16).code == 0
    path = run / "precision-plan.json"
    dataclasses.replace(PrecisionPlan.load(path), weights="another").save(path)
    refused = cli("predict", run, "new.csv", "--plan")
    assert refused.code == 2
    assert "made for other weights" in refused.err
