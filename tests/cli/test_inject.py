"""``cordillera inject``: verdicts of the real flipped model, a report, and an interruption that keeps what is there."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from cordillera.data.ranking.datasets import prepare
from cordillera.data.ranking.features import RankingBatch
from cordillera.jagged import JaggedBatch
from cordillera.models.ranking.base import RankingModel
from cordillera.numerics.faults.fault_model import FaultModel, draw
from cordillera.recipe import load
from cordillera.training import checkpoints
from cordillera.workflows import model_of
from cordillera.workflows.injection import _rounds, components_of, replay_of
from tests.cli.test_kills import computed

FEW = ["--set", "training.epochs=1"]
DLRM = """
[model]
name = "dlrm"
embedding_dim = 4
bottom_mlp = [6]
top_mlp = [8, 6]
"""
MODELS = {
    "dlrm": DLRM,
    "wukong": None,
    "dcn": '[model]\nname = "dcn"\nembedding_dim = 4\ncross_layers = 2\nmlp = [8]\n',
    "fm": '[model]\nname = "fm"\nembedding_dim = 4\n',
    "lr": '[model]\nname = "lr"\n',
    "hstu": '[model]\nname = "hstu"\nembedding_dim = 4\nmlp = [8]\nsequences = ["seen"]\ncandidate = "user"\n',
}


def with_model(recipe, text):
    """The recipe with another model, and its lists in the table of users."""
    if text is not None:
        content = recipe.read_text()
        first, last = content.index("[model]"), content.index("[training]")
        data = content[:first].replace('{ name = "seen" }', '{ name = "seen", table = "user" }')
        recipe.write_text(data + text + "\n" + content[last:])
    return recipe


def bits_of(model: torch.nn.Module) -> list[bytes]:
    return [tensor.numpy().tobytes() for tensor in model.state_dict().values()]


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name == "hstu" else ()) for name in MODELS]
)
def test_replay_judges_ranking_models_as_real_flips_do(recipe, name, tmp_path, monkeypatch):
    """Lists that are pooled by their mean, several values of one row in a bag, and weights of values among them."""
    monkeypatch.setenv("CORDILLERA_CACHE", str(tmp_path / "cache"))
    resolved = load(with_model(recipe, MODELS[name]))
    splits = prepare(resolved.data)
    model: RankingModel = model_of(resolved, splits.features).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3).add_(0.02)  # untrained scores lie too close to each other
    batch: RankingBatch = splits.test.batch(np.arange(60))
    sparse = batch.sparse
    weighted = JaggedBatch(sparse.keys, sparse.values, sparse.offsets, torch.rand(sparse.values.numel()) + 0.5)
    for samples in (batch, RankingBatch(batch.dense, weighted)):
        replay, before, wrong = replay_of(model, samples, 0.4), bits_of(model), 0
        assert 1 / (1 + math.exp(-replay._decision.value)) == pytest.approx(0.4)
        for component in components_of(model):
            for hits in draw(component, FaultModel(), 1, range(2 if name == "wukong" else 5)):
                found, real = replay(hits.region, hits.bits), replay.flip_each(hits.region, hits.bits)
                assert found.silent.equal(real.silent), hits.region.name
                assert found.detected.equal(real.detected), hits.region.name
                wrong += int(real.silent.sum() + real.detected.sum())
        assert wrong
        assert bool(replay.one_by_one) == (name == "hstu")  # its attention takes no batch of faults
        assert bits_of(model) == before


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "cache"), [("int8", 0.0), ("int4", 0.3)])
def test_rows_in_few_bits_are_hit_where_they_are_stored(cli, recipe, tmp_path, rows, cache):
    assert cli("train", with_model(recipe, DLRM), "--run", "runs/a", "-q", *FEW, f"--set=tables.rows={rows}",
               f"--set=tables.cache={cache}").code == 0  # fmt: skip
    done = cli("inject", "runs/a", "-n", 200, "--samples", 30, "--json")
    assert done.code == 0, done.err
    content = json.loads(done.out)
    found = {one["name"]: one for one in content["components"]}
    assert list(found) == ["tables", "table scales", *(["table cache"] if cache else []), "bottom MLP", "top MLP"]
    layouts = {name: {entry["layout"] for entry in one["positions"]} for name, one in found.items()}
    assert layouts["tables"] == {{"int8": "uint8", "int4": "int4"}[rows]}
    assert layouts["table scales"] == {{"int8": "float32", "int4": "float16"}[rows]}
    assert set(content["judged_one_by_one"]) <= {"tables.payload", "tables.scales", "tables.cache.lines"}


@pytest.mark.slow
def test_inject_prints_writes_and_advises(cli, recipe, tmp_path):
    assert cli("train", with_model(recipe, DLRM), "--run", "runs/a", "-q", *FEW).code == 0
    done = cli("inject", "runs/a", "-n", 640, "--samples", 50)
    assert done.code == 0, done.err
    for text in ("tables", "bottom MLP", "top MLP", "injection.html", "A fault anywhere in these weights"):
        assert text in done.out
    folder = tmp_path / "runs/a"
    content = json.loads((folder / "injection.json").read_text())
    assert [one["name"] for one in content["components"]] == ["tables", "bottom MLP", "top MLP"]
    for one in content["components"]:
        assert one["injections"] == 640
        assert one["pvf"]["low"] <= one["pvf"]["value"] <= one["pvf"]["high"]
    assert content["samples"] == 50
    assert content["judged_one_by_one"] == {}
    page = (folder / "injection.html").read_text()
    assert page.count("<rect") == 3 * 32 + 6
    assert "What to protect" in page

    first = cli("inject", "runs/a", "-n", 640, "--samples", 50, "--json").out
    again = json.loads(first)
    assert again["report"] == "runs/a/injection.html"
    assert "seal" not in again
    other = json.loads(cli("inject", "runs/a", "-n", 640, "--samples", 50, "--json", "--seed", 1).out)
    assert again["components"] == content["components"]
    assert other["components"] != content["components"]

    options = ("-q", "--json", "--bits", 2, "--burst", "--component", "top mlp", "--half-width", 0.05, "--samples", 20)
    burst = json.loads(cli("inject", "runs/a", *options).out)
    assert burst["fault"] == {"name": "burst of 2 bits", "bits": 2, "burst": True}
    assert [one["name"] for one in burst["components"]] == ["top MLP"]
    pvf = burst["components"][0]["pvf"]
    assert (pvf["high"] - pvf["low"]) / 2 <= 0.05


MISTAKES = {
    "no run": (["nowhere"], "not a run folder"),
    "component": (["DONE", "--component", "middle"], "one of tables, bottom MLP, top MLP"),
    "too many bits": (["DONE", "--bits", 33], "--bits: a number of float32 has 32 bits, not 33"),
    "threshold": (["DONE", "--threshold", 1], "--threshold: must lie between 0 and 1"),
    "half width": (["DONE", "--half-width", 0], "above zero"),
}


@pytest.mark.parametrize(
    ("strata", "asked", "half_width", "rounds"),
    [([32], 320, None, 10), ([32], 321, None, 11), ([8, 32, 16], 64, None, 2), ([32], 1, None, 2), ([], 5, None, 5)],
)
def test_faults_are_dealt_out_over_bit_positions(strata, asked, half_width, rounds):
    found = {str(i): SimpleNamespace(strata=[None] * count) for i, count in enumerate(strata)}
    config = SimpleNamespace(injections=asked, half_width=half_width)
    assert _rounds(SimpleNamespace(found=found), config) == rounds


def test_mistakes_are_answered_with_what_would_be_right(cli, recipe, tmp_path):
    assert cli("train", with_model(recipe, DLRM), "--run", "DONE", "-q", *FEW).code == 0
    for name, (arguments, says) in MISTAKES.items():
        result = cli("inject", *arguments)
        assert result.code == 2, name
        assert says in result.err, name
    assert not (tmp_path / "DONE/injection.json").exists()
    _nan_in_the_bias_of_the_last_layer(tmp_path / "DONE")
    refused = cli("inject", "DONE")
    assert refused.code == 2
    assert "NaN or infinite on every input" in refused.err


def _nan_in_the_bias_of_the_last_layer(folder):
    place = checkpoints.folder_of(folder / "checkpoints", checkpoints.steps(folder / "checkpoints")[-1])
    checkpoint = checkpoints.load(place)
    name = next(key for key in checkpoint.tensors if key.endswith("heads.towers.0.layers.0.bias"))
    tensors = {**checkpoint.tensors, name: torch.full((1,), torch.nan)}
    checkpoints.save(place.parent, tensors, checkpoint.state)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="only Linux tells how long a process has computed")
def test_ctrl_c_keeps_what_was_found(cli, recipe, tmp_path):
    assert cli("train", with_model(recipe, DLRM), "--run", "runs/a", "-q", *FEW).code == 0
    command = [sys.executable, "-m", "cordillera", "inject", "runs/a", "-n", str(1 << 24), "--samples", "20"]
    environment = dict(os.environ, OMP_NUM_THREADS="1", PYTHONUNBUFFERED="1")
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    lines = iter(process.stdout.readline, "")
    assert any(line.startswith("model:") for line in lines)
    # from then on it injects, however long a busy machine takes to let it compute
    before, until = computed([process.pid]), time.monotonic() + 120
    while computed([process.pid]) < before + 1.5:
        assert process.poll() is None
        assert time.monotonic() < until
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 130, output
    assert "interrupted: this is what was found so far" in output
    content = json.loads((tmp_path / "runs/a/injection.json").read_text())
    assert content["interrupted"]
    counts = [one["injections"] for one in content["components"]]
    assert counts[0] == counts[1] == counts[2] == 32 * content["rounds"] < 1 << 24
    assert "were interrupted" in (tmp_path / "runs/a/injection.html").read_text()
