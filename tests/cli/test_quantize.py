"""A trained run in fewer bits: searched for, written, used, watched; and what is refused."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import random
import re
import shutil

import polars as pl
import pytest
import torch

from cordillera.data.ranking.datasets import prepare
from cordillera.data.ranking.features import FeatureSpec, SparseFeature
from cordillera.embeddings.tables import TablesConfig
from cordillera.errors import CheckpointError, NumericsError
from cordillera.models.ranking import build
from cordillera.models.ranking.dnn import DNNConfig
from cordillera.numerics.dispatch.dispatch import Trial
from cordillera.numerics.dispatch.stored_linear import StoredLinear
from cordillera.numerics.inference.selection import Change
from cordillera.numerics.sites import sites
from cordillera.recipe import load
from cordillera.run import Run
from cordillera.serving.ranking import quantized_model
from cordillera.training.ranking.scoring import scorer
from cordillera.workflows import quantization
from cordillera.workflows.quantization import quantize
from cordillera.workflows.trained import model_of, restore_model
from tests.fuzzing import flips, survives

from .conftest import RECIPE, write_log

SIZES = ["model.fmb_mlp=[64]", "model.top_mlp=[64]", "model.embedding_dim=8", "training.epochs=2"]


@pytest.fixture(scope="module", autouse=True)
def _times_do_not_matter():
    """What a test expects must not follow what else the machine does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantization, "_SLOWER", math.inf)
        yield


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A finished run whose layers are large enough to be looked at, quantised."""
    from cordillera import workflows

    folder = tmp_path_factory.mktemp("trained")
    log = write_log(folder / "log.csv", rows=2000)
    path = folder / "small.toml"
    path.write_text(RECIPE.format(path=log))
    recipe = load(path, [*SIZES, f"data.cache_dir={folder / 'cache'}"])
    run = workflows.train(recipe, folder / "run").run
    return run.folder, quantize(run, 1e-3, smallest=True)


DENSE = """
[data]
path = "{path}"
batch_size = 100

[data.schema]
dense = [{{ name = "price" }}, {{ name = "time" }}]
labels = ["click"]

[model]
name = "dnn"
mlp = [64, 64]
"""


def loaded_of(folder):
    """A run's quantised model and what it saw at calibration."""
    recipe = load(folder / "recipe.toml")
    model = model_of(recipe, prepare(recipe.data).features)
    return quantized_model.load(folder / "quantized", model, quantized_model.origin(Run(folder), use_best=False))


@pytest.fixture
def run_folder(trained, tmp_path):
    """A copy that a test may spoil."""
    return shutil.copytree(trained[0], tmp_path / "run")


def test_the_outcome_keeps_the_budget_and_is_smaller(trained):
    folder, outcome = trained
    assert outcome.searched.mean <= 1e-3
    assert outcome.bytes[1] < 0.5 * outcome.bytes[0]
    size = (folder / "quantized" / "model.safetensors").stat().st_size
    assert outcome.bytes[1] <= size <= outcome.bytes[1] + 4096
    assert len(outcome.selection.evaluated) <= 2 * outcome.sweep
    tables = {name.removeprefix("table "): o for name, o in outcome.selection.options.items() if "table " in name}
    record = quantized_model.read_record(folder / "quantized")
    assert record["tables"] == tables
    assert {layer.name: layer.kernel for layer in outcome.layers if layer.kernel != "fp32"} == record["layers"]
    assert any("int" in kernel for kernel in record["layers"].values())
    report = json.loads((folder / "quantized" / "report.json").read_text())
    assert report["options"] == outcome.selection.options
    for name, (before, now) in outcome.tables.items():
        assert report["tables"][name]["bytes"] == {"fp32": before, "quantized": now}
        assert now < before
    page = outcome.page.read_text(encoding="utf-8")
    assert outcome.page == folder / "quantized" / "report.html"
    for text in (*tables, *record["layers"], f"{outcome.bytes[1]:,} of {outcome.bytes[0]:,} bytes", "budget"):
        assert text in page
    assert page.count('class="whisker') >= len(outcome.selection.evaluated) + len(tables)


def test_the_reported_change_is_that_of_the_written_model(trained):
    folder, outcome = trained
    recipe = load(folder / "recipe.toml")
    splits = prepare(recipe.data)
    _, exact = restore_model(Run(folder), splits.features, torch.device("cpu"))
    loaded, _ = loaded_of(folder)
    batch = splits.test.batch(slice(0, len(splits.test)))
    losses = []
    for model in (exact, loaded):
        precision = "fp32" if model is exact else quantized_model.precision_of(folder / "quantized")
        logits = scorer(model, torch.device("cpu"), precision)(batch).double()
        losses.append(torch.nn.functional.binary_cross_entropy_with_logits(logits, batch.labels.double()))
    assert outcome.confirmed is not None
    assert float(losses[1] / losses[0]) - 1 == pytest.approx(outcome.confirmed.mean, abs=1e-9)
    assert outcome.ne[1] / outcome.ne[0] - 1 == pytest.approx(outcome.confirmed.mean, abs=1e-9)


@pytest.mark.slow
def test_rows_of_two_bits_are_offered_where_bytes_alone_count_and_taken_where_ne_allows(trained, tmp_path):
    folder = shutil.copytree(trained[0], tmp_path / "run")
    outcome = quantize(Run(folder), 10.0, smallest=True)
    assert {outcome.selection.options[f"table {name}"] for name in ("user", "device")} == {"int2"}
    loaded, _ = loaded_of(folder)
    assert set(loaded.tables.kinds.values()) == {"int2"}
    assert outcome.confirmed is not None
    faster = quantize(Run(folder), 10.0)
    assert "int2" not in faster.selection.options.values()


@pytest.mark.parametrize("width", [1, 2, 4, 64])
def test_formats_of_rows_are_tried_from_the_smallest_and_none_is_larger_than_fp32(width, monkeypatch):
    """Scales and biases cost as much as the numbers of narrow rows."""
    monkeypatch.setattr(quantization, "_time_of_rest", lambda *_: (1.0, 1.0))
    features = FeatureSpec((), (SparseFeature("user", "user"),), {"user": 50}, ("click",))
    model = build(DNNConfig(embedding_dim=width, mlp=(8, 6)), features, TablesConfig())
    (part,) = quantization._parts(model, {}, quantization._ProbedModel({}, {}), None, False)
    assert part.options[-1] == "fp32"
    assert list(part.costs) == sorted(part.costs)
    assert part.costs[-1] == 4 * 50 * width
    assert len(set(part.costs)) == len(part.costs)
    assert (
        part.options
        == {
            1: ("fp16", "fp32"),
            2: ("fp16", "fp32"),
            4: ("int4", "fp16", "fp32"),
            64: ("int4", "int8", "fp16", "fp32"),
        }[width]
    )


def test_a_model_of_dense_features_alone_is_quantised_and_watched(cli, tmp_path):
    write_log(tmp_path / "log.csv", rows=600)
    (tmp_path / "dense.toml").write_text(DENSE.format(path="log.csv"))
    assert cli("train", "dense.toml", "--run", "run", "--quiet").code == 0
    done = cli("quantize", "run", "--budget", "100", "--smallest")
    assert done.code == 0, done.err
    assert quantized_model.read_record(tmp_path / "run" / "quantized")["layers"]
    watched = cli("watch", "run", "log.csv")
    assert watched.code in (0, 1), watched.err
    assert "600 samples" in watched.out
    absent = cli("watch", "run", "memory://logs/day.csv")
    assert absent.code == 2
    assert "memory://logs/day.csv" in absent.err


def test_samples_whose_label_is_blank_are_left_out(cli, tmp_path):
    frame = pl.read_csv(write_log(tmp_path / "log.csv", rows=600))
    frame.with_columns(click=pl.when(pl.int_range(600) % 7 > 0).then("click")).write_csv(tmp_path / "log.csv")
    (tmp_path / "dense.toml").write_text(DENSE.format(path="log.csv"))
    missing = ("--set", "data.schema.missing_labels=true")
    assert cli("train", "dense.toml", "--run", "run", "--quiet", *missing).code == 0
    found = quantize(Run(tmp_path / "run"), 1.0, smallest=True)
    assert all(0.5 < ne < 2 for ne in found.ne)
    assert math.isfinite(found.searched.mean)


def test_the_commands_work_together(cli, run_folder, tmp_path):
    done = cli("quantize", run_folder, "--budget", "0.1")
    assert done.code == 0, done.err
    for word in ("precision of each part", "layers beside fp32", "NE, test split", "a sweep of all options"):
        assert word in done.out
    lines = done.out.partition("\nthe model")[2].splitlines()
    known = ["", "bytes", "NE", "a batch of 256", "NE, searched", "NE, test split", "evaluations"]
    rows = [re.split(r"\s{2,}", line.rstrip()) for line in lines[1:]]
    summary = {cells[0]: cells[1:4] for cells in rows if cells[0] in known and len(cells) > 1}
    assert list(summary) == known
    shown = {name: [float(re.sub("[^0-9.]", "", cell)) for cell in summary[name]] for name in list(summary)[1:4]}
    before, now, percent = shown["bytes"]
    assert percent == pytest.approx(100 * now / before, abs=0.051)
    before, now, ratio = shown["NE"]
    assert ratio == pytest.approx(now / before, abs=1e-5)
    slow, fast, ratio = shown["a batch of 256"]
    if "as slow" in summary["a batch of 256"][2]:
        slow, fast = fast, slow
    assert (slow - 0.005) / (fast + 0.005) - 0.005 <= ratio <= (slow + 0.005) / max(fast - 0.005, 1e-9) + 0.005
    write_log(tmp_path / "new.csv", rows=400, seed=5)
    scores = []
    for options in ([], ["--quantized"]):
        assert cli("predict", run_folder, "new.csv", "--out", "new-scores.csv", *options).code == 0
        with open(tmp_path / "new-scores.csv") as file:
            scores.append([float(row["score"]) for row in csv.DictReader(file)])
    assert scores[0] != scores[1]
    assert scores[1] == pytest.approx(scores[0], abs=0.02)
    watched = cli("watch", run_folder, "new.csv")
    assert watched.code == 0, watched.out + watched.err
    assert "no alarm" in watched.out


@pytest.mark.cases(1)
@pytest.mark.parametrize("smallest", [False, True])
def test_what_makes_a_batch_slower_than_in_fp32_stays_fp32_unless_bytes_alone_count(
    trained, monkeypatch, tmp_path, smallest
):
    monkeypatch.setattr(quantization, "_SLOWER", 1.02)

    def timed(model, quantized, *given, **options):
        slow = any(kind != "fp32" for kind in quantized.tables.kinds.values())
        return 1.0, 1.4 if slow else 0.9

    monkeypatch.setattr(quantization, "_timed", timed)
    said = []
    outcome = quantize(trained[0], 1e-3, folder=tmp_path / "q", smallest=smallest, say=said.append)
    chosen = outcome.selection.options
    tables = {option for name, option in chosen.items() if name.startswith("table ")}
    layers = {option for name, option in chosen.items() if name.startswith("layer ")}
    assert layers != {"fp32"}
    refused = [line for line in said if "would make a batch 1.40 times as slow as fp32: fp32 stays" in line]
    if smallest:
        assert "fp32" not in tables
        assert not refused
        assert outcome.seconds == (1.0, 1.4)
    else:
        assert tables == {"fp32"}
        assert refused
        assert outcome.seconds == (1.0, 0.9)
        record = quantized_model.read_record(tmp_path / "q")
        assert set(record["tables"].values()) == {"fp32"}
        assert outcome.searched.mean <= 1e-3
        assert outcome.selection.cost < outcome.selection.full_cost


@pytest.mark.parametrize("smallest", [False, True])
def test_of_kernels_with_equal_weights_the_fastest_is_offered_and_none_that_costs_more_than_fp32(
    trained, monkeypatch, smallest
):
    folder, _ = trained
    recipe = load(folder / "recipe.toml")
    model = model_of(recipe, prepare(recipe.data).features)
    name, layer = max(sites(model).items(), key=lambda item: item[1].weight.numel())
    times = {"fp32": 1.0, "int8 static": 0.9, "int8 dynamic": 0.5, "bf16": 1e9}
    trials = {name: [Trial(kernel, milliseconds=ms) for kernel, ms in times.items()]}
    monkeypatch.setattr(quantization, "_time_of_rest", lambda *given: (1.0, 1.0))
    (part,) = [one for one in quantization._parts(model, trials, None, None, smallest) if one.name == f"layer {name}"]
    assert part.options == ("int8 dynamic", "fp32")
    assert part.costs[1] - part.costs[0] > 2 * layer.weight.numel()  # int8 stores a quarter of the bytes


@pytest.mark.parametrize(
    ("budget", "verdict"), [("2", "; within the budget"), ("1", "not shown to be within"), ("0.5", "above the budget")]
)
def test_the_verdict_compares_the_interval_with_the_budget_in_per_cent(cli, trained, monkeypatch, budget, verdict):
    folder, outcome = trained
    outcome = dataclasses.replace(outcome, searched=Change(0.01, 0.008, 0.012), confirmed=None)
    monkeypatch.setattr("cordillera.workflows.quantization.quantize", lambda *given, **named: outcome)
    printed = cli("quantize", folder, "--budget", budget).out.replace("\u2502", " ")
    assert verdict in " ".join(printed.split())
    assert "serve the run as it is" not in printed
    kept = dataclasses.replace(outcome.selection, options=dict.fromkeys(outcome.selection.options, "fp32"))
    outcome = dataclasses.replace(outcome, selection=kept, layers=[])
    printed = cli("quantize", folder).out
    assert "nothing was worth quantising within the budget and the time of a batch: serve the run as it is" in printed
    assert "layers beside fp32" not in printed


def test_a_table_whose_scale_grew_raises_an_alarm(cli, run_folder, tmp_path):
    """As a table of another snapshot would: every row four times as large."""
    write_log(tmp_path / "new.csv", rows=400, seed=6)
    folder = run_folder / "quantized"
    model, seen = loaded_of(run_folder)
    kind = model.tables.kinds["user"]
    width, dtype = {"int2": (2, torch.float16), "int4": (2, torch.float16), "int8": (4, torch.float32)}[kind]
    rows = model.tables.rows_of("user")
    parameters = rows[:, -2 * width :].clone().view(dtype)
    rows[:, -2 * width :] = (4 * parameters).view(torch.uint8)
    quantized_model.save(folder, model, seen, quantized_model.origin(Run(run_folder), use_best=False), {})
    watched = cli("watch", run_folder, "new.csv")
    assert watched.code == 1
    assert "alarm" in watched.out
    assert "embedding of user" in watched.out
    assert "and quantise that run" in watched.out


def test_a_feature_that_moved_raises_an_alarm(cli, run_folder, tmp_path):
    log = write_log(tmp_path / "new.csv", rows=400, seed=7).read_text().splitlines()
    moved = [log[0]]
    for line in log[1:]:
        cells = line.split(",")
        cells[4] = cells[4] and str(5 * float(cells[4]))
        moved.append(",".join(cells))
    (tmp_path / "new.csv").write_text("\n".join(moved) + "\n")
    watched = cli("watch", run_folder, "new.csv")
    assert watched.code == 1
    assert "feature price" in watched.out
    assert "blanks of price" not in watched.out


def test_ids_that_were_never_seen_and_blanks_raise_an_alarm_by_name(cli, run_folder, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")  # or long names of other alarms break lines
    log = write_log(tmp_path / "new.csv", rows=1000, seed=8).read_text().splitlines()
    rows = [line.split(",") for line in log]
    for row in rows[1::4]:
        row[3], row[4] = "toaster", ""
    (tmp_path / "new.csv").write_text("\n".join(map(",".join, rows)) + "\n")
    watched = cli("watch", run_folder, "new.csv")
    assert watched.code == 1
    out = " ".join(watched.out.replace("│", " ").split())
    assert "blank or unseen ids of device share 0 0.25" in out
    assert "blanks of price share 0.0" in out


def test_a_run_without_a_quantised_model_is_watched_by_its_validation_split(cli, run_folder, tmp_path):
    shutil.rmtree(run_folder / "quantized")
    before = sorted(run_folder.rglob("*"))
    rows = [line.split(",") for line in write_log(tmp_path / "new.csv", rows=600, seed=8).read_text().splitlines()]
    same = cli("watch", run_folder, "new.csv", "--json")
    assert same.code == 0, same.out
    found = json.loads(same.out)
    assert (found["samples"], found["alarms"]) == (600, [])
    for row in rows[1:]:
        row[4] = row[4] and str(5 * float(row[4]))
        row[3] = "toaster"
    (tmp_path / "new.csv").write_text("\n".join(map(",".join, rows)) + "\n")
    moved = cli("watch", run_folder, "new.csv", "--json")
    assert moved.code == 1
    names = {alarm["name"] for alarm in json.loads(moved.out)["alarms"]}
    assert {"feature price", "blank or unseen ids of device"} <= names
    assert sorted(run_folder.rglob("*")) == before


def test_a_file_without_the_column_of_groups_is_said_to_be_so(cli, tmp_path):
    """Where no feature is of that column, so that the file may lack it."""
    from cordillera import workflows

    text = RECIPE.format(path=write_log(tmp_path / "log.csv", rows=600)).replace('{ name = "user" }, ', "")
    (tmp_path / "small.toml").write_text(text)
    run = workflows.train(load(tmp_path / "small.toml", ["training.epochs=1"]), tmp_path / "run").run
    quantize(run, 1.0)
    rows = [line.split(",") for line in write_log(tmp_path / "new.csv", rows=300, seed=9).read_text().splitlines()]
    (tmp_path / "new.csv").write_text("\n".join(",".join((*row[:2], *row[3:])) for row in rows) + "\n")
    watched = cli("watch", run.folder, "new.csv")
    assert "the file has no column 'user'" in watched.out


def test_mistakes_are_answered_with_what_to_do(cli, trained, tmp_path, run_folder):
    write_log(tmp_path / "new.csv", rows=10)
    shutil.rmtree(run_folder / "quantized")
    refused = cli("predict", run_folder, "new.csv", "--quantized")
    assert refused.code == 2
    assert "cordillera quantize RUN makes one" in refused.err
    assert cli("quantize", run_folder, "--budget", "-1").code == 2
    assert "is not a run folder" in cli("quantize", tmp_path).err


@pytest.mark.parametrize("name", ["model.safetensors", "quantized.json"])
@pytest.mark.parametrize("way", ["flip", "cut", "remove"])
def test_a_damaged_model_is_refused(cli, run_folder, tmp_path, name, way):
    path = run_folder / "quantized" / name
    content = bytearray(path.read_bytes())
    if way == "remove":
        path.unlink()
    else:
        if way == "flip":
            at = content.index(b'"seal"') + 14 if name.endswith("json") else len(content) // 2
            content[at] ^= 1
        else:
            del content[len(content) // 2 :]
        path.write_bytes(content)
    write_log(tmp_path / "new.csv", rows=10)
    refused = cli("predict", run_folder, "new.csv", "--quantized")
    assert refused.code == 2
    assert not (run_folder / "predictions").exists()
    assert "Traceback" not in refused.err


def test_weights_that_are_no_numbers_are_not_quantised(trained):
    folder, _ = trained
    recipe = load(folder / "recipe.toml")
    splits = prepare(recipe.data)
    _, model = restore_model(Run(folder), splits.features, torch.device("cpu"))
    model.tables.table("user")[3, 2] = float("nan")
    with pytest.raises(NumericsError, match=r"table 'user'.*row 3"):
        quantized_model.quantize_model(model, {"user": "int8"}, {}, {})
    model.tables.table("user")[3, 2] = 0.0
    layer = model.top.layers[0]
    layer.weight.data[1, 2] = float("inf")
    with pytest.raises(NumericsError, match=r"\(1, 2\) is inf"):
        quantized_model.quantize_model(model, {"user": "fp32", "device": "fp32"}, {"top.layers.0": "bf16"}, {})


def test_a_model_of_another_shape_is_refused(trained, run_folder):
    recipe = load(run_folder / "recipe.toml", ["model.top_mlp=[32]"])
    model = model_of(recipe, prepare(recipe.data).features)
    with pytest.raises(CheckpointError, match=r"'top.layers.0' of another size|does not fit the run's model"):
        quantized_model.load(run_folder / "quantized", model, quantized_model.origin(Run(run_folder), use_best=False))


def test_a_quantised_model_that_was_copied_into_another_run_is_refused(cli, trained, tmp_path):
    """Of the same shape: nothing but what it was made of tells."""
    from cordillera import workflows

    changes = ["seed=2", "training.epochs=1"]
    other = workflows.train(load(trained[0] / "recipe.toml", changes), tmp_path / "other").run.folder
    shutil.copytree(trained[0] / "quantized", other / "quantized")
    write_log(tmp_path / "new.csv", rows=10)
    for command in (["predict", other, "new.csv", "--quantized"], ["watch", other, "new.csv"]):
        refused = cli(*command)
        assert refused.code == 2
        assert "was made of another checkpoint than that of this run" in refused.err.replace("\n", " ")
    assert not (other / "predictions").exists()
    with pytest.raises(CheckpointError, match="another checkpoint"):
        loaded_of(other)
    recipe = load(trained[0] / "recipe.toml")
    model = model_of(recipe, prepare(recipe.data).features)
    with pytest.raises(CheckpointError, match="another checkpoint"):
        quantized_model.load(trained[0] / "quantized", model, {})


def test_a_byte_that_is_changed_and_a_file_that_is_cut_are_refused_by_name(run_folder, fuzz_inputs):
    rng = random.Random(0)
    for name in ("model.safetensors", "quantized.json"):
        path = run_folder / "quantized" / name
        content = path.read_bytes()
        for number in range(fuzz_inputs(30)):
            cut = number % 5 == 4
            path.write_bytes(content[: rng.randrange(len(content))] if cut else flips(content, rng))
            error = survives(lambda: loaded_of(run_folder), f"{name} {number}")
            assert isinstance(error, CheckpointError), f"{name} {number} was read"
            assert str(path) in str(error)
        path.write_bytes(content)
    loaded_of(run_folder)


def test_a_relu_that_follows_a_layer_becomes_part_of_it() -> None:
    features = FeatureSpec((), (SparseFeature("user", "user"),), {"user": 10}, ("click",))
    model = build(DNNConfig(embedding_dim=4, mlp=(8, 6)), features, TablesConfig())
    found = quantized_model.quantize_model(model, {}, dict.fromkeys(sites(model), "bf16"), {})
    layers = [layer for layer in found.modules() if isinstance(layer, StoredLinear)]
    relus = [layer for layer in model.modules() if isinstance(layer, torch.nn.ReLU)]
    assert [layer.relu for layer in layers] == [True, True, False]
    assert len(relus) == 2
    assert not [layer for layer in found.modules() if isinstance(layer, torch.nn.ReLU)]
