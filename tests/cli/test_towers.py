"""``cordillera towers``, and a run with towers: trained, resumed, evaluated, quantised and probed like any other."""

from __future__ import annotations

import signal

import pytest
import torch
from safetensors.torch import load_file

from cordillera import workflows
from cordillera.errors import PlanError
from cordillera.planning.ranking.towers import TowerPlan
from cordillera.recipe import load
from cordillera.training import checkpoints
from cordillera.workflows.planning import towers

from .conftest import write_log

ONE = ["--set", "training.epochs=1"]
SIZES = ["--set", "model.fmb_mlp=[32]", "--set", "model.top_mlp=[40]"]
SMALL = ["--set", "model.towers.compression=1.5", "--set", "model.towers.dim=2"]


@pytest.mark.slow
def test_a_run_with_learned_towers_does_all_that_a_run_does(cli, recipe, tmp_path):
    assert cli("train", recipe, "--run", "probe", *ONE).code == 0
    done = cli("towers", "probe", "--towers", 2, "--samples", 300)
    assert done.code == 0, done.err
    assert "coherent towers" in done.out
    assert "mean absolute cosine" in done.out
    first = (tmp_path / "probe/towers.json").read_text()
    assert cli("towers", "probe", "--towers", 2, "--samples", 300).code == 0
    assert (tmp_path / "probe/towers.json").read_text() == first
    plan = TowerPlan.read(tmp_path / "probe/towers.json")
    assert sorted(plan.features) == ["device", "seen", "user"]
    page = (tmp_path / "probe/towers.html").read_text()
    assert all(f"{name} · {tower}" in page for name, tower in zip(plan.features, plan.towers, strict=True))
    done = cli("train", recipe, "--run", "run", *ONE, *SIZES, "--set", "model.towers.file=probe/towers.json", *SMALL)
    assert done.code == 0, done.err
    (tmp_path / "probe/towers.json").unlink()  # the recipe of the run holds its groups
    assert load(tmp_path / "run").model.towers.groups == plan.groups()
    write_log(tmp_path / "new.csv", rows=50, seed=3)
    for command in (
        ["evaluate", "run"],
        ["predict", "run", "new.csv"],
        ["probe", "run", "--rows", 64],
        ["predict", "run", "new.csv", "--plan"],
        ["quantize", "run", "--budget", 5],
        ["predict", "run", "new.csv", "--quantized"],
        ["inject", "run", "--injections", 64, "--samples", 20],
        ["report", "run"],
        ["compare", "probe", "run"],
        ["towers", "run", "--towers", 3],
    ):
        done = cli(*command)
        assert done.code == 0, (command, done.err)
    text = (tmp_path / "run/recipe.toml").read_text()
    (tmp_path / "run/recipe.toml").write_text(text.replace("compression = 1.5", "compression = 2.5"))
    refused = cli("evaluate", "run")
    assert refused.code == 2
    assert "model.towers.compression: 1.5 -> 2.5" in refused.err


@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", ["linear", "cross"])
def test_a_stopped_run_resumes_bit_for_bit(recipe, tmp_path, kind):
    overrides = [
        "model.towers.count=2",
        f"model.towers.kind={kind}",
        "training.epochs=2",
        "training.checkpoint_every=3",
        "training.evaluate_every=100",
        f"data.cache_dir={tmp_path / 'cache'}",
    ]
    whole = load(recipe, overrides)
    run = workflows.train(whole, tmp_path / "whole").run
    newest = checkpoints.steps(run.checkpoints)[-1]
    stopped = tmp_path / "stopped"

    def stop(record, progress, total):
        if progress.step == 4:
            signal.raise_signal(signal.SIGINT)

    assert workflows.train(whole, stopped, on_step=stop).report.ended == "interrupted"
    assert workflows.train(whole, stopped, resume=True).report.ended == "finished"
    ours, theirs = (
        load_file(checkpoints.folder_of(folder / "checkpoints", newest) / "tensors.safetensors")
        for folder in (tmp_path / "whole", stopped)
    )
    assert any(name.startswith("model.towers.") for name in ours)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_mistakes_are_explained(cli, recipe, tmp_path):
    refused = cli("towers", "run", "--towers", 2, "--aim", "foo")
    assert refused.code == 2
    assert "'--aim': 'foo' is not one of 'coherent'" in refused.err
    refused = cli("train", recipe, "--set", "model.towers.count=4")
    assert refused.code == 2
    assert "4 towers for 3 embedded features" in refused.err
    refused = cli("train", recipe, "--set", "model.towers.kind=linear")
    assert "model.towers: needs one of count, groups and file" in refused.err
    refused = cli("train", recipe, "--set", "model.towers.file=absent.json")
    assert refused.code == 2
    assert "absent.json" in refused.err
    refused = cli("train", recipe, "--set", "model.towers.counts=2")
    assert "model.towers" in refused.err
    refused = cli("train", recipe, "--set", "model.towers.count=2", "--set", "model.towers.knd=linear")
    assert "did you mean 'kind'" in refused.err
    lines = recipe.read_text().split("[model]")
    linear = tmp_path / "lr.toml"
    linear.write_text(lines[0] + '[model]\nname = "lr"\n\n[training]' + lines[1].split("[training]")[1])
    assert cli("train", linear, "--run", "lr", *ONE).code == 0
    with pytest.raises(PlanError, match="no embeddings of features"):
        towers(tmp_path / "lr", 2)
