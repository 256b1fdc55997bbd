"""``model.mods`` of a recipe: trained, resumed, evaluated, quantised and probed like any other model."""

from __future__ import annotations

import signal

import pytest
import torch
from safetensors.torch import load_file

from cordillera import workflows
from cordillera.recipe import load
from cordillera.training import checkpoints

from .conftest import write_log

MODS = 'model.mods=["no-bias", "block-norm", "hard-swish"]'
SIZES = ["model.norm_block=3", "model.fmb_mlp=[32]", "model.top_mlp=[40]"]


@pytest.mark.slow
def test_a_run_with_mods_does_all_that_a_run_does(cli, recipe, tmp_path):
    sizes = [part for size in SIZES for part in ("--set", size)]
    done = cli("train", recipe, "--run", "run", "--set", MODS, *sizes, "--set", "training.epochs=1")
    assert done.code == 0, done.err
    newest = checkpoints.steps(tmp_path / "run/checkpoints")[-1]
    state = checkpoints.load(checkpoints.folder_of(tmp_path / "run/checkpoints", newest)).tensors
    names = [name for name in state if name.startswith("model.")]
    assert [name for name in names if name.endswith("bias")] == ["model.heads.towers.0.layers.0.bias"]
    assert not [name for name in names if "norm" in name and not name.endswith("_extra_state")]
    write_log(tmp_path / "new.csv", rows=50, seed=3)
    for command in (
        ["evaluate", "run"],
        ["predict", "run", "new.csv"],
        ["probe", "run", "--rows", 64],
        ["predict", "run", "new.csv", "--plan"],
        ["quantize", "run", "--budget", 5],
        ["predict", "run", "new.csv", "--quantized"],
    ):
        done = cli(*command)
        assert done.code == 0, (command, done.err)
    text = (tmp_path / "run/recipe.toml").read_text()
    (tmp_path / "run/recipe.toml").write_text(text.replace("norm_block = 3", "norm_block = 2"))
    refused = cli("evaluate", "run")
    assert refused.code == 2
    assert "model.norm_block: 3 -> 2" in refused.err


@pytest.mark.slow
def test_a_stopped_run_resumes_bit_for_bit(recipe, tmp_path):
    overrides = [MODS, *SIZES, "training.epochs=2", "training.checkpoint_every=3", "training.evaluate_every=100"]
    whole = load(recipe, [*overrides, f"data.cache_dir={tmp_path / 'cache'}"])
    run = workflows.train(whole, tmp_path / "whole").run
    steps = checkpoints.steps(run.checkpoints)
    stopped = tmp_path / "stopped"

    def stop(record, progress, total):
        if progress.step == 4:
            signal.raise_signal(signal.SIGINT)

    assert workflows.train(whole, stopped, on_step=stop).report.ended == "interrupted"
    assert workflows.train(whole, stopped, resume=True).report.ended == "finished"
    ours, theirs = (
        load_file(next(checkpoints.folder_of(folder, steps[-1]).glob("*.safetensors")))
        for folder in (stopped / "checkpoints", run.checkpoints)
    )
    assert set(ours) == set(theirs)
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


def test_mistakes_are_told_at_once(cli, recipe):
    refused = cli("train", recipe, "--set", 'model.mods=["no-biases"]')
    assert refused.code == 2
    assert "model.mods[0]: must be 'no-bias', 'block-norm' or 'hard-swish', got 'no-biases'" in refused.err
    dlrm = ['model={name="dlrm", embedding_dim=4, mods=["block-norm"]}']
    refused = cli("train", recipe, *[part for key in dlrm for part in ("--set", key)])
    assert refused.code == 2
    assert "'block-norm' finds nothing to change in this model" in refused.err
    assert "Traceback" not in refused.err
