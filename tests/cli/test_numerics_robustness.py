"""Bad days of `probe`, `quantize`, `watch` and `inject`: interruptions, files of other runs, odd options."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from cordillera.data.ranking.datasets import prepare
from cordillera.errors import CheckpointError, NumericsError
from cordillera.recipe import load
from cordillera.run import Run
from cordillera.serving.ranking import quantized_model
from cordillera.serving.ranking.observation import Observer
from cordillera.workflows import probing, quantization
from cordillera.workflows.trained import model_of, restore_model

from .conftest import RECIPE, write_log

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, quantised and probed."""
    from cordillera import workflows

    folder = tmp_path_factory.mktemp("trained")
    write_log(folder / "log.csv", rows=600)
    path = folder / "small.toml"
    path.write_text(RECIPE.format(path=folder / "log.csv"))
    sizes = ["model.fmb_mlp=[32]", "model.top_mlp=[32]", "training.epochs=1", f"data.cache_dir={folder / 'cache'}"]
    run = workflows.train(load(path, sizes), folder / "run").run
    quantization.quantize(run, 1.0, smallest=True)
    probing.probe(run, probing.DispatchConfig(rows=(16,), kernels=("int8 static",), rounds=1), 1.0)
    return run.folder


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    return shutil.copytree(trained, tmp_path / "run")


def content_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


def stop(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def loaded(run: Path) -> Any:
    recipe = load(run / "recipe.toml")
    made_of = quantized_model.origin(Run(run), use_best=False)
    return quantized_model.load(run / "quantized", model_of(recipe, prepare(recipe.data).features), made_of)


@pytest.mark.parametrize("place", ["_parts", "select", "quantized_model.write_tensors"])
def test_ctrl_c_before_a_model_is_whole_leaves_the_earlier_one(cli, run, monkeypatch, place) -> None:
    before = content_of(run / "quantized")
    monkeypatch.setattr(f"cordillera.workflows.quantization.{place}", stop)
    ended = cli("quantize", run, "--budget", 100)
    assert ended.code == 130
    assert "no model was written; an earlier one is as it was" in ended.err
    after = content_of(run / "quantized")
    assert after.pop("model.safetensors") == before.pop("model.safetensors")
    assert after.pop("quantized.json") == before.pop("quantized.json")
    assert set(after) <= {"report.json", "report.html"}
    loaded(run)


def test_ctrl_c_after_a_model_is_written_says_that_it_is_not_confirmed(cli, run, monkeypatch) -> None:
    monkeypatch.setattr("cordillera.workflows.quantization._layer_by_layer", stop)
    ended = cli("quantize", run, "--budget", 100)
    assert ended.code == 130
    assert "the model is written, but it was not confirmed" in ended.err.replace("\n", " ")
    assert set(content_of(run / "quantized")) == {"model.safetensors", "quantized.json"}  # no report of another model
    loaded(run)


def test_a_model_whose_writer_was_killed_before_its_record_is_none(run, monkeypatch) -> None:
    model, seen = loaded(run)
    monkeypatch.setattr("cordillera.serving.ranking.quantized_model.write_atomically", stop)
    with pytest.raises(KeyboardInterrupt):
        quantized_model.save(run / "quantized", model, seen, {}, {})
    with pytest.raises(CheckpointError, match="holds no quantised model"):
        loaded(run)


@pytest.mark.parametrize("place", ["forward_products", "profile", "scored"])
def test_ctrl_c_in_a_probe_leaves_the_earlier_plan_with_its_statistics(cli, run, monkeypatch, place) -> None:
    before = content_of(run)
    monkeypatch.setattr(f"cordillera.workflows.probing.{place}", stop)
    ended = cli("probe", run, "--rows", 16)
    assert ended.code == 130
    assert "no plan was written; an earlier one is as it was" in ended.err
    assert content_of(run) == before


def test_a_plan_is_whole_without_the_statistics_that_it_was_made_with(cli, run, tmp_path) -> None:
    """Those of another run, in their place, would give other ranges without any other sign."""
    write_log(tmp_path / "new.csv", rows=20)
    assert cli("predict", run, "new.csv", "--plan").code == 0
    before = (run / "predictions/new.csv").read_bytes()
    (run / probing.PROBE_FILE).unlink()
    assert cli("predict", run, "new.csv", "--plan").code == 0
    assert (run / "predictions/new-2.csv").read_bytes() == before


def test_weights_that_are_no_numbers_are_said_to_be_before_anything_is_written(run, monkeypatch) -> None:
    def spoilt(*arguments: Any) -> Any:
        state, model = restore_model(*arguments)
        model.top.layers[0].bias.data[3] = float("nan")
        return state, model

    before = content_of(run)
    for module, work in ((quantization, quantization.quantize), (probing, probing.probe)):
        monkeypatch.setattr(module, "restore_model", spoilt)
        with pytest.raises(NumericsError, match=r"top\.layers\.0\.bias: element \(3,\) is nan"):
            work(run)  # type: ignore[operator]
    assert content_of(run) == before


def test_a_weight_beyond_fp16_skips_the_kernels_of_fp16_and_ends_nothing(run, monkeypatch) -> None:
    def large(*arguments: Any) -> Any:
        state, model = restore_model(*arguments)
        model.top.layers[0].weight.data[3, 2] = 1e5
        return state, model

    config = probing.DispatchConfig(rows=(16,), kernels=("fp16 weights", "bf16"), rounds=1)
    monkeypatch.setattr(quantization, "_LEAST_WEIGHTS", 1)
    monkeypatch.setattr(quantization, "_LAYER_KERNELS", ("fp16 weights",))
    for module, work in (
        (quantization, lambda say: quantization.quantize(run, 10.0, say=say)),
        (probing, lambda say: probing.probe(run, config, 10.0, say=say)),
    ):
        said: list[str] = []
        monkeypatch.setattr(module, "restore_model", large)
        work(said.append)
        assert any(line.startswith("fp16 weights is skipped in 1 layer: cannot take it: ") for line in said)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["quantize", "RUN", "--budget", "nan"], "--budget"),
        (["quantize", "RUN", "--budget", "inf"], "budget: is inf"),
        (["probe", "RUN", "--budget", "nan"], "--budget"),
        (["probe", "RUN", "--db", "nan"], "--db: must be a number of decibels, got nan"),
        (["probe", "RUN", "--rows", "0"], "must be at least 1"),
        (["watch", "RUN", "new.csv", "--false-alarms", "nan"], "--false-alarms"),
        (["watch", "RUN", "new.csv", "--false-alarms", "2"], "must be at most 0.5"),
        (["inject", "RUN", "--half-width", "nan"], "--half-width: must be above zero"),
        (["inject", "RUN", "--half-width", "inf"], "--half-width: must be above zero"),
        (["inject", "RUN", "--threshold", "nan"], "threshold: must lie between 0 and 1"),
        (["inject", "RUN", "--bits", "33"], "has 32 bits, not 33"),
        (["predict", "RUN", "new.csv", "--batch-size", "0"], "must be at least 1"),
    ],
)
def test_options_that_bound_nothing_are_refused_before_work_starts(cli, run, tmp_path, command, message) -> None:
    write_log(tmp_path / "new.csv", rows=5)
    before = content_of(run)
    refused = cli(*[run if word == "RUN" else word for word in command])
    assert refused.code == 2
    assert message in " ".join(refused.err.replace("│", " ").split())
    assert "Traceback" not in refused.err
    assert content_of(run) == before


def test_a_file_whose_samples_are_all_lost_is_said_to_be_so(cli, run, tmp_path, monkeypatch) -> None:
    write_log(tmp_path / "new.csv", rows=30)
    observe = Observer.observe

    def lost(*arguments: Any) -> Any:
        numbers, true = observe(*arguments)
        return numbers * float("nan"), true

    monkeypatch.setattr(Observer, "observe", lost)
    refused = cli("watch", run, "new.csv")
    assert refused.code == 2
    assert "(0), and 30 on which a number of the model is not finite" in " ".join(refused.err.split())
