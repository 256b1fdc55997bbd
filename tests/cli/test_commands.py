"""Every command does what its help says, and every mistake is answered with the place and the remedy."""

import csv
import errno
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import polars as pl
import pytest

from cordillera import workflows
from cordillera.cli import chat
from cordillera.errors import RunError, Terminated
from cordillera.recipe import load
from cordillera.run import Run
from cordillera.topology import shipped
from cordillera.training import checkpoints

from .conftest import write_log


def test_scores_are_not_written_among_the_samples(cli, recipe, tmp_path):
    for day in (1, 2):
        (tmp_path / f"logs/dt={day}").mkdir(parents=True)
        write_log(tmp_path / f"logs/dt={day}/ads.csv", rows=200, seed=day)
    before = sorted((tmp_path / "logs").rglob("*"))
    changes = ("--set", "data.path=logs", "--set", "data.fractions=[0.6,0.2,0.2]", "--set", "data.unordered=sort")
    assert cli("train", recipe, "--run", "run", "-q", *changes, "--set", "training.epochs=1").code == 0
    named = {
        "logs/dt=1": "dt=1", str(tmp_path / "logs/dt=2/"): "dt=2", "logs/dt=2/ads.csv": "ads",
        "logs/dt=1/ads.csv": "ads-2", "logs/**": "logs", "logs/dt=1/a*.csv": "dt=1-2",
    }  # fmt: skip
    for path, name in named.items():
        done = cli("predict", "run", path)
        assert done.code == 0, done.err
        assert done.out.endswith(f"scores: run/predictions/{name}.csv\n")
    assert sorted((tmp_path / "logs").rglob("*")) == before
    assert cli("evaluate", "run").code == 0
    refused = cli("predict", "run", recipe)
    assert refused.code == 2
    assert "end in .csv, .tsv, .txt, .parquet or .pq" in refused.err.replace("\n", " ")


def test_train_evaluate_predict_report_and_compare_work_together(cli, recipe, tmp_path):
    done = cli("train", recipe, "--run", "runs/a", "--quiet")
    assert done.code == 0, done.err
    assert "report: runs/a/report.html" in done.out
    folder = tmp_path / "runs/a"
    for name in ("recipe.toml", "environment.json", "metrics.jsonl", "model.json", "evaluation.json", "report.html"):
        assert (folder / name).is_file(), name
    assert list((folder / "tensorboard").iterdir())
    ne = json.loads((folder / "evaluation.json").read_text())["tasks"]["click"]["metrics"]["ne"]
    assert ne < 1.0
    assert f"{ne:.4f}" in done.out

    evaluated = cli("evaluate", "runs/a")
    assert evaluated.code == 0, evaluated.err
    assert f"{ne:.4f}" in evaluated.out
    as_json = json.loads(cli("evaluate", "runs/a", "--split", "validation", "--json").out)
    assert as_json["split"] == "validation"

    write_log(tmp_path / "new.csv", rows=50, seed=3)
    predicted = cli("predict", "runs/a", "new.csv")
    assert predicted.code == 0, predicted.err
    with open(tmp_path / "runs/a/predictions/new.csv") as file:
        rows = list(csv.DictReader(file))
    assert [row["id"] for row in rows] == [f"r{n}" for n in range(50)]
    assert all(0 < float(row["score"]) < 1 for row in rows)
    assert cli("predict", "runs/a", "new.csv", "--out", "scores/new/all.parquet", "--batch-size", 7).code == 0
    table = pl.read_parquet(tmp_path / "scores/new/all.parquet")
    assert table["score"].to_list() == pytest.approx([float(row["score"]) for row in rows], abs=2e-3)

    assert cli("train", recipe, "--run", "runs/b", "--seed", 2, "-q").code == 0
    compared = cli("compare", "runs/a", "runs/b", "--json")
    assert compared.code == 0, compared.err
    json.loads(compared.out)
    assert "|" in cli("compare", "runs/a", "runs/b", "--markdown").out
    paged = cli("compare", "runs/a", "runs/b", "--out", "comparison.html")
    assert paged.out.splitlines()[-1] == "report: comparison.html"
    assert "Comparison of runs" in (tmp_path / "comparison.html").read_text()
    assert json.loads(cli("compare", "runs/a", "runs/b", "--json", "--out", "other.html").out)
    assert (tmp_path / "other.html").is_file()
    assert cli("compare", "runs/a", "runs/b", "--out", "new/comparison.html").code == 0
    assert (tmp_path / "new" / "comparison.html").is_file()
    refused = cli("compare", "runs/a", "runs/b", "--out", "other.html/comparison.html")
    assert refused.code == 2
    assert "other.html/comparison.html: cannot be written" in refused.err
    (folder / "report.html").unlink()
    assert cli("report", "runs/a").code == 0
    assert (folder / "report.html").is_file()


@pytest.mark.slow
def test_predictions_equal_those_of_the_evaluation(cli, recipe, tmp_path):
    """The file path and the cached path encode the same rows to the same scores."""
    assert cli("train", recipe, "--run", "runs/a", "-q", "--set", "training.precision=fp32").code == 0
    assert cli("predict", "runs/a", "log.csv", "--out", "all.csv").code == 0
    scores = pl.read_csv(tmp_path / "all.csv")["score"].to_numpy()
    labels = pl.read_csv(tmp_path / "log.csv")["click"].to_numpy()
    evaluation = json.loads(cli("evaluate", "runs/a", "--json").out)
    test = slice(900, 1000)
    calibration = scores[test].sum() / labels[test].sum()
    assert evaluation["tasks"]["click"]["metrics"]["calibration"] == pytest.approx(calibration, rel=1e-5)


def test_recipe_show_prints_a_recipe_that_trains_the_same(cli, recipe, tmp_path):
    shown = cli("recipe", "show", recipe, "--set", "training.epochs=1")
    assert shown.code == 0, shown.err
    assert "# " in shown.out
    (tmp_path / "shown.toml").write_text(shown.out)
    assert load("shown.toml") == load(recipe, ["training.epochs=1"])


def test_recipe_list_names_each_recipe_and_then_describes_it(cli):
    heading, *lines = cli("recipe", "list").out.splitlines()
    second = heading.index("what it trains")
    names = [line[:second].strip() for line in lines if not line.startswith(" ")]
    assert names == list(shipped("cordillera.recipes"))
    described = " ".join(line[second:].strip() for line in lines)
    assert described.split() == " ".join(shipped("cordillera.recipes").values()).split()


@pytest.mark.slow
def test_sweep_trains_every_size_once_and_fits_a_law(cli, recipe, tmp_path):
    sizes = [f"--size=model.top_mlp=[{n}] training.epochs=1" for n in (4, 32, 256)]
    swept = cli("sweep", recipe, *sizes)
    assert swept.code == 0, swept.err
    folder = tmp_path / "runs/small-sweep"
    assert (folder / "sweep.png").stat().st_size > 1000
    assert "runs/small-sweep/sweep.html" in swept.out
    assert "NE against FLOPs" in (folder / "sweep.html").read_text()
    law = json.loads((folder / "sweep.json").read_text())
    assert len(law["measurements"]) == 3
    again = cli("sweep", recipe, *sizes)
    assert again.out.count("done before") == 3
    assert cli("sweep", recipe, *sizes[:2]).code == 2
    other = cli("sweep", recipe, *sizes, "--set", "model.rank=3")
    assert other.code == 2
    assert "another recipe (model.rank: " in " ".join(other.err.split())


def test_data_lists_describes_and_fetches_nothing_unasked(cli):
    listed = cli("data", "list")
    assert listed.code == 0, listed.err
    for name in ("movielens-100k", "adult", "criteo", "avazu", "synthetic"):
        assert name in listed.out


@pytest.mark.parametrize(
    ("name", "file", "place", "terms"),
    [("criteo", "train.txt", "https://ailab.criteo.com", "non-commercial use"),
     ("avazu", "train.gz", "https://www.kaggle.com/c/avazu-ctr-prediction", "the competition's rules")],
)  # fmt: skip
def test_data_that_cannot_be_fetched_says_where_it_is_and_what_comes_next(cli, name, file, place, terms):
    for command in ("get", "describe"):
        refused = cli("data", command, name)
        assert refused.code == 2
        for words in (file, place, terms, f"cordillera data get {name} --path FILE", "data.path = 'FILE'"):
            assert words in refused.err


@pytest.mark.parametrize(
    ("option", "said"),
    [
        (["--seeds", "x"], "'--seeds': must be a whole number, got 'x'"),
        (["--seeds", 0], "'--seeds': must be at least 1, got '0'"),
        (["--judge", 500], "'--judge': must be at most 100, got '500'"),
        (["--hours", "x"], "'--hours': must be a number, got 'x'"),
        (["--trials"], "'--trials' requires an argument"),
    ],
)
def test_a_wrong_option_is_told_in_own_words(cli, option, said):
    refused = cli("search", "any", "--space", "any", *option)
    assert refused.code == 2
    assert said in refused.err
    assert "nput should" not in refused.err


def _start(recipe, folder, *more):
    """A training in a process of its own, as a user's shell would start it."""
    environment = dict(os.environ, PYTHONUNBUFFERED="1", OMP_NUM_THREADS="1")
    command = [sys.executable, "-m", "cordillera", "train", str(recipe), "--run", str(folder), *more]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def _wait_for_step(run_folder, process, at_least, deadline=120):
    until = time.monotonic() + deadline
    while time.monotonic() < until:
        found = checkpoints.steps(run_folder / "checkpoints")
        if found and found[-1] >= at_least:
            return
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.02)
    process.kill()
    raise AssertionError("no checkpoint in time")


CLOCKS = ("seconds", "examples_per_second", "data_fraction")


def _facts(folder):
    records = [{k: v for k, v in r.items() if k not in CLOCKS} for r in Run(folder).metrics()]
    evaluation = Run(folder).read_json("evaluation.json")
    del evaluation["seconds"], evaluation["examples_per_second"]
    return records, evaluation


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "precision"), [(signal.SIGKILL, "fp32"), (signal.SIGINT, "bf16"), (signal.SIGTERM, "bf16")]
)
def test_a_killed_run_resumes_to_the_same_bits(cli, recipe, tmp_path, number, precision):
    options = [
        "--set",
        f"training.precision={precision}",
        "--set",
        "training.epochs=100",
        "--set",
        "training.checkpoint_every=3",
    ]
    whole = cli("train", recipe, "--run", "runs/whole", "-q", *options, "--set", "threads=1")
    assert whole.code == 0, whole.err
    killed = tmp_path / "runs/killed"
    process = _start(recipe, killed, "--set", "threads=1", *options)
    _wait_for_step(killed, process, at_least=6)
    process.send_signal(number)
    output = process.communicate(timeout=60)[0]
    if number != signal.SIGKILL:
        assert process.returncode == 130, output
        assert "--resume" in output
    assert not (killed / "evaluation.json").exists()
    resumed = cli("train", killed, "--resume", "-q")
    assert resumed.code == 0, resumed.err
    a, b = (checkpoints.load(checkpoints.folder_of(p / "checkpoints", 800)) for p in (tmp_path / "runs/whole", killed))
    assert a.tensors.keys() == b.tensors.keys()
    for name, tensor in a.tensors.items():
        assert tensor.equal(b.tensors[name]), name
    assert _facts(tmp_path / "runs/whole") == _facts(killed)
    for name in ("whole", "killed"):
        assert cli("predict", f"runs/{name}", "log.csv", "--out", f"{name}.csv").code == 0
    assert (tmp_path / "whole.csv").read_bytes() == (tmp_path / "killed.csv").read_bytes()


def test_a_run_that_cannot_be_written_is_told_before_the_work(cli, copied, tmp_path):
    results = {"inject": "injection.json", "quantize": "quantized/report.json", "probe": "precision-plan.json"}
    results["towers"] = "towers.json"
    for command, name in results.items():
        (tmp_path / "runs/a" / name).mkdir(parents=True)
        refused = cli(command, "runs/a", *(("--towers", 2) if command == "towers" else ()))
        assert refused.code == 2
        assert f"{name}: cannot be written" in refused.err
        assert "work on a copy of the run" in refused.err
        assert not refused.out


def test_a_place_where_no_run_can_be_made_is_told_before_the_data_is_read(cli, recipe, tmp_path):
    (tmp_path / "file").touch()
    for words in (("train", recipe), ("coordinate", "llama-debug", "--replicas", 2)):
        refused = cli(*words, "--run", "file/a")
        assert refused.code == 2
        assert "file/a/recipe.toml: cannot be written: file is not a folder" in refused.err
    assert not (tmp_path / "cache").exists()


def test_a_folder_of_runs_that_is_on_no_disk_is_told(cli, recipe, tmp_path):
    (tmp_path / "runs").symlink_to(tmp_path / "unmounted")
    refused = cli("train", recipe, "-q")
    assert refused.code == 2
    assert "runs: cannot be written" in refused.err


def test_budgets_of_plans_for_training_are_refused(cli):
    assert "--budget: has no effect with --training" in cli("probe", "runs/a", "--training", "--budget", 1).err


def test_lines_tell_how_far_scoring_is_where_there_is_no_terminal(cli, copied, tmp_path, monkeypatch):
    for pause in ("_FIRST_S", "_LONGEST_S"):
        monkeypatch.setattr(f"cordillera.cli._terminal.{pause}", 0.01)
    score = workflows.predict

    def slowly(*given, on_rows, **options):
        return score(*given, on_rows=lambda rows: (on_rows(rows), time.sleep(2)), **options)

    monkeypatch.setattr(workflows, "predict", slowly)
    scored = cli("predict", "runs/a", "log.csv", "--out", "scores.csv")
    rows = len((tmp_path / "scores.csv").read_text().splitlines()) - 1
    assert (scored.code, scored.out) == (0, f"{rows:,} scores: scores.csv\n")
    assert f"scoring {rows:,} rows  0:00:0" in scored.err
    told = cli("predict", "runs/a", "log.csv", "--out", "scores.csv", "--json")
    assert json.loads(told.out) == {"rows": rows, "file": "scores.csv"}


def test_a_flipped_byte_in_the_checkpoint_is_refused_by_name(cli, copied, tmp_path):
    path = next((tmp_path / "runs/a/checkpoints").glob("step-*/tensors.safetensors"))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    for command in (["evaluate", "runs/a"], ["predict", "runs/a", "log.csv"], ["train", "runs/a", "--resume"]):
        refused = cli(*command)
        assert refused.code == 2, command
        assert "tensors.safetensors" in refused.err
        assert "corrupt" in refused.err
    assert not list(tmp_path.glob("*scores*"))


def _edit(tmp_path, change):
    """The log with its lines changed, and a recipe on it."""
    lines = (tmp_path / "log.csv").read_text().splitlines()
    (tmp_path / "bad.csv").write_text("\n".join(change(lines)) + "\n")
    text = (tmp_path / "small.toml").read_text().replace("log.csv", "bad.csv")
    (tmp_path / "bad.toml").write_text(text)
    return tmp_path / "bad.toml"


def _cell(line, column, value):
    """Puts a value into one cell; ``line`` counts as an editor does."""

    def change(lines):
        cells = lines[line - 1].split(",")
        cells[lines[0].split(",").index(column)] = value
        return [*lines[: line - 1], ",".join(cells), *lines[line:]]

    return change


BAD_LOGS = {
    "missing column": (lambda lines: [line.rsplit(",", 1)[0] for line in lines], r"bad\.csv.*click"),
    "label outside {0,1}": (_cell(7, "click", "2"), r"bad\.csv.*7.*click"),
    "label is not a number": (_cell(7, "click", "yes"), r"bad\.csv.*7.*click"),
    "label missing": (_cell(7, "click", ""), r"bad\.csv.*7.*click"),
    "infinite dense value": (_cell(9, "price", "inf"), r"bad\.csv.*9.*price"),
    "NaN dense value": (_cell(9, "price", "nan"), r"bad\.csv.*9.*price.*leave it blank"),
    "text in a dense column": (_cell(9, "price", "cheap"), r"bad\.csv.*9.*price"),
    "too many fields": (lambda lines: [*lines[:4], lines[4] + ",1", *lines[5:]], r"bad\.csv.*5"),
    "too few fields": (lambda lines: [*lines[:4], lines[4].rsplit(",", 1)[0], *lines[5:]], r"bad\.csv.*5"),
    "empty file": (lambda lines: [], r"bad\.csv"),
    "header only": (lambda lines: lines[:1], r"bad\.csv"),
    "one class only": (lambda lines: [lines[0], *(line[:-1] + "1" for line in lines[1:])], r"one class"),
    "timestamps out of order": (lambda lines: [lines[0], *reversed(lines[1:])], r"bad\.csv.*3.*time"),
}


@pytest.mark.parametrize("name", BAD_LOGS)
def test_a_bad_log_is_refused_with_its_place_and_nothing_is_left(cli, recipe, tmp_path, name):
    change, expected = BAD_LOGS[name]
    result = cli("train", _edit(tmp_path, change), "--run", "runs/bad", "-q", "--set", "training.epochs=1")
    assert result.code == 2
    assert re.search(expected, result.err, re.DOTALL), result.err
    assert "Traceback" not in result.err
    assert not (tmp_path / "runs").exists()
    left = [p for p in (tmp_path / "cache").rglob("*") if p.is_file()]
    assert not left, left


def test_a_feature_with_one_value_is_a_named_warning(cli, recipe, tmp_path):
    path = _edit(tmp_path, lambda lines: [line.replace("tablet", "phone").replace("desk", "phone") for line in lines])
    with pytest.warns(UserWarning, match="'device' has one value"):
        assert cli("train", path, "--run", "runs/one", "-q", "--set", "training.epochs=1").code == 0


IDENTITY = '[{ name = "user" }, { name = "device" }]'


@pytest.mark.parametrize(("value", "says"), [("-1", "-1"), ("30", "30"), ("x", "x")])
def test_ids_out_of_range_are_refused_with_their_place(cli, recipe, tmp_path, value, says):
    def change(lines):
        lines = [line.replace(",u", ",") for line in lines]
        return _cell(11, "user", value)([lines[0].replace(",ser", ",user"), *lines[1:]])

    path = _edit(tmp_path, change)
    text = path.read_text().replace(
        IDENTITY, '[{ name = "user", encoding = "identity", num_embeddings = 30 }, { name = "device" }]'
    )
    assert "identity" in text
    path.write_text(text)
    result = cli("train", path, "--run", "runs/bad", "-q")
    assert result.code == 2
    assert re.search(rf"bad\.csv.*11.*user.*{says}", result.err, re.DOTALL), result.err


MISTAKES = {
    "unknown recipe": (["train", "movielens-wukon"], "did you mean 'movielens-wukong'"),
    "unknown key": (["train", "small.toml", "--set", "model.layer=2"], "did you mean 'layers'"),
    "wrong type": (["train", "small.toml", "--set", "model.layers=two"], "model.layers"),
    "malformed override": (["train", "small.toml", "--set", "layers"], "section.key=value"),
    "no such run": (["evaluate", "runs/none"], "not a run folder"),
    "resume of nothing": (["train", "runs/none", "--resume"], "not a run folder"),
    "unknown device": (["train", "small.toml", "--set", "device=tpu"], "device"),
    "unknown split": (["evaluate", "DONE", "--split", "tset"], "must be train, validation or test"),
    "predict without file": (["predict", "DONE", "none.csv"], "none.csv"),
    "predict to another format": (["predict", "DONE", "log.csv", "--out", "x.json"], "must end in .csv or .parquet"),
    "predict over its input": (["predict", "DONE", "log.csv", "--out", "log.csv"], "would overwrite"),
    "existing run": (["train", "small.toml", "--run", "DONE"], "already exists"),
    "a run folder without --resume": (["train", "DONE"], "--resume"),
    "overrides of a resumed run": (["train", "DONE", "--resume", "--set", "seed=3"], "keeps its recipe"),
    "another recipe beside a resumed run": (
        ["train", "movielens-lr", "--run", "DONE", "--resume"],
        "is a run of another recipe than movielens-lr",
    ),
    "unknown data set": (["data", "describe", "movielens"], "movielens"),
    "unknown benchmark": (["bench", "nothing"], "nothing"),
}


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A finished run, made once."""
    folder = tmp_path_factory.mktemp("done")
    log = write_log(folder / "log.csv", rows=300)
    from cordillera import workflows

    from .conftest import RECIPE

    path = folder / "small.toml"
    path.write_text(RECIPE.format(path=log))
    cache = ["data.cache_dir=" + str(folder / "cache")]
    return workflows.train(load(path, [*cache, "training.epochs=1"]), folder / "run").run.folder


@pytest.fixture
def copied(done, tmp_path):
    """A copy of the finished run in ``runs/a``, beside its log."""
    shutil.copytree(done, tmp_path / "runs/a")
    shutil.copy(done.parent / "log.csv", tmp_path)


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_on_the_command_line_is_answered_in_plain_words(cli, recipe, done, name):
    arguments, says = MISTAKES[name]
    result = cli(*[str(done) if argument == "DONE" else argument for argument in arguments])
    assert result.code == 2, result.out + result.err
    assert says in result.out + result.err
    assert "Traceback" not in result.err


def test_a_file_to_predict_that_lacks_a_column_is_refused_and_nothing_is_written(cli, done, tmp_path):
    log = pl.read_csv(done.parent / "log.csv").drop("device")
    log.write_csv(tmp_path / "new.csv")
    result = cli("predict", done, "new.csv")
    assert result.code == 2
    assert "device" in result.err
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_file()) == ["new.csv"]


def test_a_bad_row_in_the_middle_of_a_file_to_predict_leaves_no_scores(cli, done, tmp_path):
    lines = (done.parent / "log.csv").read_text().splitlines()
    lines[100] = lines[100].replace(lines[100].split(",")[4] or ",,", "inf") if lines[100].split(",")[4] else lines[100]
    (tmp_path / "new.csv").write_text("\n".join(lines) + "\n")
    result = cli("predict", done, "new.csv")
    assert result.code == 2
    assert "price" in result.err
    assert "101" in result.err
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_file()) == ["new.csv"]


def test_a_reader_that_closes_the_pipe_and_ctrl_c_while_modules_load_end_the_command_well():
    read, write = os.pipe()
    os.close(read)
    code = "import sys; sys.argv = ['cordillera', 'recipe', 'list']\nfrom cordillera.__main__ import main; main()"
    closed = subprocess.run([sys.executable, "-c", code], stdout=write, stderr=subprocess.PIPE, timeout=60)
    assert (closed.returncode, closed.stderr) == (0, b"")
    os.close(write)
    code = "import builtins; load = builtins.__import__\n"
    code += "def stop(name, *rest):\n    if name == 'typer': raise KeyboardInterrupt\n    return load(name, *rest)\n"
    code += "builtins.__import__ = stop\nfrom cordillera.__main__ import main; main()"
    stopped = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60)
    assert (stopped.returncode, stopped.stdout, stopped.stderr) == (130, b"", b"")


def test_the_separator_of_an_error_s_advice_is_taken_as_a_shell_gives_it(cli, tmp_path):
    log, made = tmp_path / "log.csv", tmp_path / "made.toml"
    log.write_text("clicked\tshop\n" + "1\ta\n0\tb\n" * 20)
    refused = cli("recipe", "new", log, "--out", made, "--separator", ";")
    assert refused.code == 2
    assert r'add --separator "\t"' in refused.err
    written = cli("recipe", "new", log, "--out", made, "--separator", r"\t")
    assert written.code == 0
    assert "no column of times: training, validation and test are drawn at random" in written.out
    assert load(made).data.separator == "\t"


@pytest.mark.slow
def test_a_training_loads_nothing_that_shards_weights_and_goes_on_when_its_reader_left(recipe, tmp_path):
    read, write = os.pipe()
    os.close(read)
    words = ["cordillera", "train", str(recipe), "--run", str(tmp_path / "run"), "--set", "training.epochs=1"]
    code = f"import sys; sys.argv = {words}\nfrom cordillera.workflows import prediction, ranking, runs\n"
    code += "slow = {'torch.distributed.tensor', 'torch.distributed.fsdp', 'torch._dynamo', 'sympy'}\n"
    code += "assert not slow & set(sys.modules), slow & set(sys.modules)\n"
    code += "from cordillera.__main__ import main; main()"
    own = {**os.environ, "CORDILLERA_CACHE": str(tmp_path / "cache")}
    closed = subprocess.run([sys.executable, "-c", code], stdout=write, stderr=subprocess.PIPE, env=own, timeout=120)
    os.close(write)
    assert (closed.returncode, closed.stderr) == (0, b"")
    assert Run(tmp_path / "run").status().ended == "finished"
    assert (tmp_path / "run/report.html").is_file()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train", "run", "--replica", "r0", "--coordinator", "h:1", "--seed", 0], "--seed: has no effect"),
        (["train", "run", "--replica", "r0", "--coordinator", "h:1", "--resume"], "--resume: has no effect"),
        (["train", "x", "--run", "none", "--replica", "r0", "--coordinator", "h:1"], "--run: has no effect"),
        (["coordinate", "x", "--run", "none", "--resume"], "none: is not a run folder"),
        (["evaluate", "none", "--importance", "--file", "f.csv"], "--file: has no effect with --importance"),
        (["evaluate", "none", "--importance"], "none: is not a run folder"),
        (["compare", "none", "--json", "--markdown"], "--markdown: has no effect with --json"),
        (["sweep", "movielens-dlrm", "--size", "a='b", "--size", "c", "--size", "d"], "No closing quotation"),
        (
            ["data", "get", "synthetic", "--split", "train"],
            "--split: has no effect with a data set that is not written",
        ),
        (["data", "get", "synthetic", "--export", "out.txt"], "cannot write '.txt' files"),
        (["serve", "none", "--max-body", "inf"], "--max-body: must be a finite number, got inf"),
        (["serve", "none", "--drain", "nan"], "--drain"),
        (["recipe", "show", "llama-debug", "--set", "model.preset=['llama-debug']"], "model.preset: must be one of"),
        (["data", "get", "synthetic", "--export", "o.csv", "--split", "all"], "must be train, validation or test"),
        (["data", "get", "smollm2", "--split", "train"], "--split: has no effect with 'smollm2'"),
        (["data", "describe", "smollm2", "--path", "f"], "--path: has no effect with 'smollm2'"),
        (["chaos", "none", "--kill", "r0", "--seconds", 3], "--seconds: has no effect with --kill alone"),
        (["chaos", "none", "--plan", "f.toml", "--at-step", 0], "--at-step: has no effect with --plan"),
        (["search", "movielens-dlrm", "--space", "small", "--fine-tune", 5], "--fine-tune: has no effect"),
    ],
)
def test_options_that_would_be_ignored_are_refused_before_the_work(cli, tmp_path, words, said):
    refused = cli(*words)
    assert refused.code == 2
    assert said in " ".join(refused.err.split())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("words", [["search", "movielens-dlrm", "--space", "small", "--proposals", "-"]])
def test_standard_input_that_is_no_text_is_named(cli, monkeypatch, words):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9\n"), encoding="utf-8"))
    refused = cli(*words)
    assert refused.code == 2
    assert "standard input: byte 3 (0xe9) is not UTF-8" in refused.err


@pytest.mark.parametrize(("words", "said"), [([], "Large jobs"), (["data"], "describe"), (["delta"], "apply")])
def test_a_command_without_words_prints_its_help(cli, words, said):
    told = cli(*words)
    assert (told.code, told.out) == (2, "")
    assert said in told.err


@pytest.mark.parametrize("ended", [BrokenPipeError(errno.EPIPE, "Broken pipe"), EOFError("unexpected EOF")])
def test_the_end_of_another_process_is_neither_a_success_nor_an_abort(cli, monkeypatch, ended):
    def shipped(package):
        raise ended

    monkeypatch.setattr("cordillera.topology.shipped", shipped)
    refused = cli("recipe", "list")
    assert refused.code == 2
    assert "error: another process of this command has ended" in refused.err
    assert "ulimit -u" in refused.err


def test_a_fork_that_the_system_refuses_comes_with_advice(cli, monkeypatch):
    def shipped(package):
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr("cordillera.topology.shipped", shipped)
    refused = cli("recipe", "list")
    assert refused.code == 2
    assert "Resource temporarily unavailable\n  -> see whether the system allows more processes" in refused.err


def test_a_closed_standard_input_is_an_empty_one(cli, monkeypatch):
    monkeypatch.setattr("sys.stdin", None)
    refused = cli("generate", "smollm2", "-")
    sys.stdin.close()
    assert refused.code == 2
    assert "standard input: holds no prompt" in refused.err


def test_version_and_help_answer_without_loading_torch(tmp_path):
    code = "import sys; sys.argv = ['cordillera', '--help']\ntry:\n    from cordillera.cli import main; main()\n"
    code += "except SystemExit: pass\nassert 'torch' not in sys.modules, 'torch was imported'"
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert finished.returncode == 0, finished.stderr
    assert "movielens-wukong" in re.sub(r"\s+", " ", finished.stdout)


def test_a_model_that_is_too_good_and_a_best_that_is_not_kept_are_said(cli, recipe, tmp_path):
    lines = (tmp_path / "log.csv").read_text().splitlines()
    told = [lines[0] + ",seconds"] + [f"{line},{int(line.endswith(',1')) * 9}" for line in lines[1:]]
    (tmp_path / "log.csv").write_text("\n".join(told) + "\n")
    text = recipe.read_text().replace('{ name = "price" }', '{ name = "price" }, { name = "seconds" }')
    recipe.write_text(text)
    short = ("--set", "training.epochs=8", "--set", "training.learning_rate=0.05")
    result = cli("train", recipe, "--run", "told", *short)
    assert "click: such an AUC is rare; a feature may be known only after the label\n" in result.out
    assert "  -> see which tells most: cordillera evaluate told --importance\n" in result.out
    assert "NE above 1" not in result.out
    short += ("--set", 'data.schema.dense=[{name="price"}]')
    plain = cli("train", recipe, "--run", "plain", *short)
    assert "such an AUC" not in plain.out
    assert re.search(
        r"the last weights are kept; best NE 0\.\d{4} was at step [\d,]+ \(training\.patience\)", plain.out
    )
    kept = cli("train", recipe, "--run", "kept", *short, "--set", "training.patience=40")
    assert "the last weights" not in kept.out


def test_a_model_that_is_worse_than_the_base_rate_is_doubted(cli, recipe, tmp_path):
    result = cli("train", recipe, "--run", "wild", "--set", "training.epochs=2", "--set", "training.learning_rate=3")
    assert result.code == 0, result.err
    assert re.search(r"click: NE \d+\.\d{4}; NE above 1 is worse than always predicting the base rate\n", result.out)
    assert "too few steps, or too high a learning rate" in result.out


def test_data_describe_of_a_file_points_to_what_describes_files(cli, recipe, tmp_path):
    refused = cli("data", "describe", "log.csv")
    assert refused.code == 2
    assert "log.csv: is a file or folder, not a name of `cordillera data list`" in refused.err
    assert "`cordillera recipe new log.csv` prints what each of its columns is" in refused.err


@pytest.mark.parametrize("name", ["log.csv", "clicks.pq", "train.txt", "log.csv.zst", "LOG.TSV"])
def test_a_log_in_place_of_a_recipe_is_called_one(cli, tmp_path, name):
    write_log(tmp_path / f"my {name}", rows=2)
    result = cli("train", f"my {name}")
    assert result.code == 2
    assert f"is a log, not a recipe: `cordillera recipe new 'my {name}'` writes one" in result.err


@pytest.mark.parametrize(
    "words",
    [
        ("train", "movielens-lr"),
        ("sweep", "movielens-lr", "--size", "seed=1"),
        ("search", "movielens-dlrm", "--space", "small"),
        ("isoflop", "llama-debug", "--budget", "1e13"),
    ],
)
def test_a_folder_may_begin_with_a_tilde_that_a_shell_left(cli, tmp_path, monkeypatch, words):
    folders = []

    def stop(*given, folder=None, **options):
        folders.append(folder or given[1])
        raise RunError("that is enough")

    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(workflows, words[0], stop)
    refused = cli(*words, "--run=~/a")
    assert (refused.code, folders) == (2, [tmp_path / "home/a"]), refused.err
    assert not (tmp_path / "~").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signals_of_schedulers_end_any_command_as_ctrl_c_does(tmp_path, number):
    code = (
        "import os, signal, sys, time\nimport cordillera.cli\n"
        "cordillera.cli.main = lambda: (print('begun', flush=True), time.sleep(60))\n"
        "from cordillera.__main__ import main\nmain()"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "begun\n"
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (130, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_standard_output_that_takes_nothing_is_named():
    words = [sys.executable, "-m", "cordillera", "recipe", "list"]  # as where a log's disk is full
    with open("/dev/full", "w") as full:
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120)
    assert done.returncode == 2
    assert "error: standard output: the system says: No space left on device" in done.stderr
    assert "Traceback" not in done.stderr


def test_files_of_a_run_are_for_those_whom_the_umask_lets_read_them(cli, recipe, tmp_path):
    before = os.umask(0o002)
    try:
        assert cli("train", recipe, "--run", "runs/a", "-q", "--set", "training.epochs=1").code == 0
    finally:
        os.umask(before)
    modes = {path: path.stat().st_mode & 0o777 for path in (tmp_path / "runs/a").rglob("*") if path.is_file()}
    assert {path.name: oct(mode) for path, mode in modes.items() if mode != 0o664} == {}


def test_a_day_that_is_not_there_is_said_to_be_so(cli, copied):
    for command in (("predict", "runs/a", "dt=2026-03-04"), ("evaluate", "runs/a", "--file", "dt=2026-03-04")):
        found = cli(*command)
        assert found.code == 2
        assert "there is no such file or folder" in found.err


@pytest.mark.parametrize(
    "words", [("sweep", "movielens-lr", "--size", "seed=1"), ("isoflop", "llama-debug", "--budget", "1e13")]
)
def test_ctrl_c_between_the_trainings_of_a_study_says_how_to_go_on(cli, monkeypatch, words):
    def stop(*given, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(workflows, words[0], stop)
    stopped = cli(*words)
    assert stopped.code == 130
    assert stopped.err.endswith("interrupted: what is finished is saved\n  -> give the same command again to go on\n")


def test_sigterm_ends_a_chat_where_ctrl_c_ends_an_answer(capsys, monkeypatch):
    def pieces(stop):
        yield SimpleNamespace(text="half")
        raise stop

    assert chat._answer(pieces(KeyboardInterrupt())) == "half"
    with pytest.raises(Terminated):
        chat._answer(pieces(Terminated()))

    def ask(prompt):
        raise Terminated

    monkeypatch.setattr("builtins.input", ask)
    with pytest.raises(Terminated):
        chat._read(is_terminal=False)
