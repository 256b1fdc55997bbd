"""A language model is trained, stopped, resumed, evaluated and asked, on one process and on several, by commands."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
import torch

from cordillera.models.language.checkpoints import load
from cordillera.run import Run
from cordillera.training import checkpoints
from tests.distributed.processes import free_port, needs_gloo

RECIPE = """
description = "a small Llama on made-up sentences"
seed = 3
device = "cpu"
threads = 1

[data]
path = "text.jsonl"
tokenizer = "bytes"
held_out = 0.1

[packing]
tokens = 256
context = 64

[model]
name = "llama"
layers = 2
hidden = 32
heads = 4
kv_heads = 2
ffn = 64
vocabulary = 272
context = 128
tied = true

[training]
steps = 12
learning_rate = 1e-2
warmup_steps = 2
log_every = 3
evaluate_every = 6
checkpoint_every = 4

[parallel]
deadline_s = 60
"""

CLOCKS = (
    "seconds",
    "tokens_per_second",
    "flops_per_second",
    "mfu",
    "memory_bytes",
    "communication_seconds",
    "exposed_seconds",
    "data_seconds",
)


def write_text(path: Path, documents: int = 200) -> None:
    """Sentences of very different lengths."""
    generator = random.Random(5)
    words = "the river runs from a high mountain to some far and quiet sea under stars".split()  # noqa: SIM905
    lines = (
        " ".join(generator.choice(words) for _ in range(1 + int(generator.paretovariate(0.8)) % 40))
        for _ in range(documents)
    )
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))


@pytest.fixture
def recipe(cli, tmp_path):
    write_text(tmp_path / "text.jsonl")
    (tmp_path / "small.toml").write_text(RECIPE)
    return tmp_path / "small.toml"


def facts(folder):
    """All that a run wrote down but what its clocks said."""
    records = [{k: v for k, v in r.items() if k not in CLOCKS} for r in Run(folder).metrics()]
    evaluation = Run(folder).read_json("evaluation.json")
    del evaluation["seconds"]
    return [record for record in records if record["kind"] != "resumed"], evaluation


def weights(folder):
    newest = sorted((folder / "checkpoints").glob("step-*"))[-1]
    return {name: tensor.clone() for name, tensor in load(newest)[1].state_dict().items()}


def losses(folder):
    return [record["loss"] for record in Run(folder).metrics() if record["kind"] in ("train", "evaluation")]


def test_train_evaluate_generate_report_and_compare_work_together(cli, recipe, tmp_path, monkeypatch):
    done = cli("train", recipe, "--run", "runs/a", "--quiet")
    assert done.code == 0, done.err
    folder = tmp_path / "runs/a"
    for name in ("recipe.toml", "environment.json", "metrics.jsonl", "model.json", "evaluation.json", "report.html"):
        assert (folder / name).is_file(), name
    assert list((folder / "tensorboard").iterdir())
    assert checkpoints.steps(folder / "checkpoints") == [8, 12]
    records = Run(folder).metrics()
    first, *_, last = [record for record in records if record["kind"] == "train"]
    assert last["loss"] < first["loss"] - 0.5
    assert last["step"] == 12
    assert last["imbalance"] >= 1
    assert last["tokens_per_second"] > 0
    assert last["memory_bytes"] > 1e6
    assert 0 < last["mfu"] < 1.5
    held_out = Run(folder).read_json("evaluation.json")
    assert f"{held_out['loss']:.4f}" in done.out
    assert held_out["perplexity"] == pytest.approx(2.718281828459045 ** held_out["loss"])

    evaluated = cli("evaluate", "runs/a")
    assert evaluated.code == 0, evaluated.err
    assert f"{held_out['loss']:.4f}" in evaluated.out
    assert json.loads(cli("evaluate", "runs/a", "--json").out)["targets"] == held_out["targets"]
    assert json.loads(cli("evaluate", "runs/a", "--json", "--tokens", 100).out)["targets"] < held_out["targets"] / 2
    assert "must be validation" in cli("evaluate", "runs/a", "--split", "test").err

    written = cli("generate", "runs/a", "the river", "-n", 12, "--raw", "--temperature", 0, "--dtype", "float32", "-q")
    assert written.code == 0, written.err
    newest = ("runs/a/checkpoints/step-000000012", "the river", "-n", 12, "--raw", "--temperature", 0)
    assert cli("generate", *newest, "--dtype", "float32", "-q").out == written.out
    monkeypatch.chdir(folder / "checkpoints/step-000000008")
    older = cli("generate", ".", "the river", "-n", 12, "--raw", "-q")
    assert older.code == 0, older.err
    monkeypatch.chdir(tmp_path)
    assert cli("predict", "runs/a", "text.jsonl").code == 2

    again = cli("train", "runs/a", "--resume")
    assert again.code == 0, again.err
    assert "nothing was left to train: finished before, after 12 steps" in again.out
    longer = cli("train", "runs/a", "--resume", "--set", "training.steps=20").err
    assert 'learning rates depend on it, as training.decay is "cosine")' in longer
    for change, said in (
        (
            "data.tokenizer=gpt2",
            "data.tokenizer, gpt2: there is no such file or folder\n  -> tokenizers with a name are:",
        ),
        ("data.path=none/*.txt", "data.path, none/*.txt: no file fits the pattern"),
    ):
        assert said in cli("train", recipe, "--run", "runs/none", "--set", change).err

    assert cli("train", recipe, "--run", "runs/b", "--seed", 4, "-q", "--set", "training.steps=2").code == 0
    compared = cli("compare", "runs/a", "runs/b")
    assert compared.code == 0, compared.err
    (folder / "report.html").unlink()
    assert cli("report", "runs/a").code == 0
    assert (folder / "report.html").is_file()


def test_training_goes_on_from_the_weights_of_another(cli, recipe, tmp_path):
    assert cli("train", recipe, "--run", "a", "-q", "--set", "training.steps=6").code == 0
    more = ("--set", "training.start='a'", "--set", "training.learning_rate=0.0", "--set", "training.steps=2")
    done = cli("train", recipe, "--run", "b", "-q", *more)
    assert done.code == 0, done.err
    for name, tensor in weights(tmp_path / "a").items():
        assert torch.equal(tensor, weights(tmp_path / "b")[name]), name
    wrong = cli("train", recipe, "--run", "c", "-q", "--set", "training.start='a'", "--set", "model.ffn=32")
    assert wrong.code == 2
    assert "ffn is 32, there 64" in wrong.err
    assert not (tmp_path / "c").exists()


@needs_gloo
@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="torchrun sends signals")
def test_a_run_goes_on_on_its_mesh_bit_for_bit_and_on_another(cli, recipe, tmp_path):
    assert cli("train", recipe, "--run", "whole", "-q").code == 0
    mesh = ("--set", "parallel.context=2")
    done = cli("train", recipe, "--run", "spread", "-q", "--nproc", 2, *mesh)
    assert done.code == 0, done.err
    assert losses(tmp_path / "spread") == pytest.approx(losses(tmp_path / "whole"), rel=1e-5)

    (tmp_path / "once.py").write_text(KILLED_ONCE)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    train = ["--max-restarts", "1", "--", "once.py", "train", recipe, "--run", "restarted", *mesh]
    process = spawn([*launcher, *train], tmp_path)
    said = process.communicate(timeout=240)[0]
    assert process.returncode == 0, said
    assert "processes were started anew (1): restarted goes on" in said
    assert "Traceback" not in said, said
    assert said.count("finished after 12 steps") == 1  # of all processes the first alone speaks
    resumed = [record["step"] for record in Run(tmp_path / "restarted").metrics() if record["kind"] == "resumed"]
    assert resumed == [4]
    assert facts(tmp_path / "restarted") == facts(tmp_path / "spread")
    expected = weights(tmp_path / "spread")
    for name, tensor in weights(tmp_path / "restarted").items():
        assert torch.equal(tensor, expected[name]), name

    shutil.copytree(tmp_path / "spread", tmp_path / "moved")
    shutil.rmtree(tmp_path / "moved/checkpoints/step-000000012")
    refused = cli("train", "moved", "--resume", "-q", "--set", "training.steps=20")
    assert "keeps its recipe" in refused.err
    again = cli("train", "moved", "--resume", "-q", "--set", "parallel.context=1", "--set", "parallel.shard=2")
    assert again.code == 0, again.err
    assert Run(tmp_path / "moved").read_json("model.json")["mesh"]["shard"] == 2
    assert losses(tmp_path / "moved") == pytest.approx(losses(tmp_path / "whole"), rel=1e-5)


KILLED_ONCE = """
import os, signal, time
from pathlib import Path

from cordillera.cli import main
from cordillera.training.language.trainer import LanguageTrainer

step = LanguageTrainer._step

def killed(trainer, iteration):
    is_first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    if is_first and os.environ["RANK"] == "1" and trainer.progress.step == 6:
        while not Path("restarted/checkpoints/step-000000004").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    step(trainer, iteration)

LanguageTrainer._step = killed
main()
"""


def start(recipe, folder, *more, variables=None):
    """A training in a process of its own, as a user's shell would start it."""
    command = [sys.executable, "-m", "cordillera", "train", recipe, "--run", folder, *more]
    return spawn(command, recipe.parent, variables)


MARK = "CORDILLERA_TEST_OF_COMMANDS"  # in the environment of all that a process starts


def spawn(command, folder, variables=None):
    source, mark = str(Path(__file__).parents[2] / "src"), uuid.uuid4().hex
    environment = dict(os.environ, PYTHONUNBUFFERED="1", OMP_NUM_THREADS="1", PYTHONPATH=source, **(variables or {}))
    environment[MARK] = mark
    process = subprocess.Popen(
        [str(part) for part in command],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
    )
    process.mark = mark
    return process


def wait_for_step(folder, process, at_least, deadline=240):
    until = time.monotonic() + deadline
    while time.monotonic() < until:
        if any(step >= at_least for step in checkpoints.steps(folder / "checkpoints")):
            return
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.02)
    process.kill()
    raise AssertionError("no checkpoint in time")


def started_by(process):
    """Running processes that a started one has started, or that these have, with their names."""
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            mark = f"{MARK}={process.mark}".encode() in (entry / "environ").read_bytes().split(b"\0")
            facts = dict(line.split(":\t", 1) for line in (entry / "status").read_text().splitlines() if ":\t" in line)
        except OSError:
            continue
        if mark and facts["State"][0] not in "ZX" and int(entry.name) != process.pid:
            found[int(entry.name)] = facts["Name"]
    return found


def ranks_of(process):
    """Processes of a training, by rank."""
    named = {number: re.fullmatch(r"cordillera (\d+)", name) for number, name in started_by(process).items()}
    return {int(name[1]): number for number, name in named.items() if name}


def gone(process, deadline=60):
    """All that a process started has ended."""
    until = time.monotonic() + deadline
    while left := started_by(process):
        assert time.monotonic() < until, left
        time.sleep(0.05)


@needs_gloo
@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="only Linux tells a process's environment")
def test_a_rank_that_dies_is_named_the_run_goes_on_and_ctrl_c_saves(recipe, tmp_path):
    folder = tmp_path / "endless"
    endless = ("--nproc", "2", "--set", "training.steps=100000", "--set", "parallel.deadline_s=20")
    process = start(recipe, folder, *endless)
    wait_for_step(folder, process, 4)
    os.kill(ranks_of(process)[1], signal.SIGKILL)
    said = process.communicate(timeout=120)[0]
    assert process.returncode == 2, said
    for word in ("rank 1", "SIGKILL", "--resume"):
        assert word in said, said
    assert "Traceback" not in said, said
    gone(process)
    status = Run(folder).status()
    assert status.ended == "failed"
    assert status.why.startswith("rank 1 was ended by SIGKILL")

    reached = checkpoints.steps(folder / "checkpoints")[-1]
    process = start(recipe, folder, "--resume")
    wait_for_step(folder, process, reached + 4)
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=120)[0]
    assert process.returncode == 130, said
    step = int(re.search(r"interrupted at step ([\d,]+); everything is saved", said)[1].replace(",", ""))
    assert checkpoints.steps(folder / "checkpoints")[-1] == step
    assert "--resume" in said


@needs_gloo
@pytest.mark.slow
def test_of_processes_that_a_launcher_started_the_first_alone_says_what_is_wrong(recipe, tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a/recipe.toml").write_text("")
    job = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [{**job, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
    processes = [start(recipe, tmp_path / "a", variables=rank) for rank in ranks]
    said = [process.communicate(timeout=240)[0] for process in processes]
    assert [process.returncode for process in processes] == [2, 2], said
    assert "already exists" in said[0]
    assert "error: rank 0" in said[1]
    assert "Traceback" not in said[0] + said[1]


def test_a_shard_that_is_damaged_is_named(cli, recipe, tmp_path):
    assert cli("train", recipe, "--run", "a", "-q", "--set", "training.steps=4").code == 0
    shard = max((tmp_path / "a/checkpoints/step-000000004").iterdir(), key=lambda path: path.stat().st_size)
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    failed = cli("train", "a", "--resume", "-q")
    assert failed.code == 2
    assert shard.name in failed.err
    assert "Traceback" not in failed.err


def test_a_corrupt_newest_checkpoint_is_set_aside_and_the_run_goes_on_from_the_one_before(cli, recipe, tmp_path):
    assert cli("train", recipe, "--run", "a", "-q").code == 0
    expected, found = weights(tmp_path / "a"), tmp_path / "a/checkpoints"
    assert checkpoints.steps(found) == [8, 12]
    shard = max((found / "step-000000012").iterdir(), key=lambda path: path.stat().st_size)
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    with pytest.warns(UserWarning, match=r"corrupt-step-000000012-1, and training goes on from step 8"):
        again = cli("train", "a", "--resume", "-q")
    assert again.code == 0, again.err
    assert "finished after 12 steps" in again.out  # and not that nothing was left to train
    assert [record["step"] for record in Run(tmp_path / "a").metrics() if record["kind"] == "resumed"] == [8]
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(tmp_path / "a").items())
    assert (found / "corrupt-step-000000012-1" / shard.name).read_bytes() == content


def test_a_run_of_two_processes_goes_on_in_one(cli, recipe, tmp_path):
    assert cli("train", recipe, "--run", "a", "-q", "--set", "training.steps=4").code == 0
    run = Run(tmp_path / "a")
    run.recipe_file.write_text(re.sub(r"shard = 1\b", "shard = 2", run.recipe_file.read_text()))
    assert "shard = 2" in run.recipe_file.read_text()
    refused = cli("train", "a", "--resume", "-q", "--nproc", 1, "--set", "parallel.shard=2")
    assert refused.code == 2
    assert "take 2 processes, not 1" in refused.err
    done = cli("train", "a", "--resume", "-q", "--nproc", 1)
    assert done.code == 0, done.err
    assert "shard = 1" in run.recipe_file.read_text()


@pytest.mark.slow
def test_training_ends_and_is_saved_when_its_hours_are_over(recipe, tmp_path):
    process = start(recipe, tmp_path / "a", "--hours", "0.02", "--set", "training.steps=100000")
    said = process.communicate(timeout=240)[0]
    assert process.returncode == 130, said
    step = int(re.search(r"interrupted at step ([\d,]+); everything is saved", said)[1].replace(",", ""))
    assert checkpoints.steps(tmp_path / "a/checkpoints")[-1] == step > 0


def test_steps_that_are_not_finite_are_skipped_counted_and_shown(cli, recipe, tmp_path):
    hot = ("--set", "training.learning_rate=1e30", "--set", "training.max_skipped=3")
    failed = cli("train", recipe, "--run", "hot", *hot)
    assert failed.code == 2
    assert "3 steps in a row" in failed.err
    skipped = [record for record in Run(tmp_path / "hot").metrics() if record["kind"] == "skipped"]
    assert len(skipped) == 3
    assert skipped[0]["loss"] is None or skipped[0]["gradient_norm"] is None
    wild = ("--set", "training.learning_rate=1000", "--set", "training.warmup_steps=20", "--set", "training.steps=4")
    done = cli("train", recipe, "--run", "wild", *wild)
    assert done.code == 0, done.err
    count = sum(record["kind"] == "skipped" for record in Run(tmp_path / "wild").metrics())
    assert (f"{count} of 4 steps were skipped" in done.out) == bool(count)
    assert "the learning rate rises for 20 steps, and there are 4" in done.out
    assert re.search(r"warning: \S+ nats a token is above a guess, 5\.\d+: see training.learning_rate", done.out)


MISTAKES = [
    (["model.heads=3"], "heads (3) must divide hidden"),
    (["parallel.tensor=3"], "tensor (3)"),
    (["parallel.pipeline=5"], "layers (2) are fewer than the stages (5)"),
    (["model.rope_scaling.rope_type='ntk'"], "model.rope_scaling.rope_type"),
    (["model.preset='llama-9b'"], "model.preset"),
    (["model.vocabulary=100"], "model.vocabulary"),
    (["data.path='nowhere.jsonl'"], "nowhere.jsonl"),
    (["data.tokenizer='nowhere'"], "nowhere"),
    (["data.long_documents='refuse'", "data.max_length=20"], "longer than 20 tokens"),
    (["packing.tokens=10000", "packing.microbatches=2"], "do not fit into 2 microbatches"),
    (["training.start='nowhere'"], "nowhere"),
    (["training.precision=float32"], "must be 'bf16' or 'fp32', got 'float32'"),
    (["training.stepz=3"], "did you mean 'steps'"),
    (["parallel.schedule='1f2b'"], "parallel.schedule"),
]


@pytest.mark.parametrize(("changes", "words"), MISTAKES, ids=[changes[0] for changes, _ in MISTAKES])
def test_a_mistake_is_answered_before_any_work(cli, recipe, tmp_path, changes, words):
    failed = cli("train", recipe, "--run", "a", *(part for change in changes for part in ("--set", change)))
    assert failed.code == 2
    assert words in failed.err
    assert "Traceback" not in failed.err
    assert not (tmp_path / "a").exists()


def test_processes_that_do_not_fit_the_mesh_are_refused(cli, recipe, tmp_path):
    failed = cli("train", recipe, "--run", "a", "--nproc", 3, "--set", "parallel.context=2")
    assert failed.code == 2
    assert "take a multiple of 2 processes, not 3" in failed.err
    failed = cli("train", recipe, "--run", "a", "--nproc", 4, "--set", "parallel.shard=2")
    assert "take 2 processes, not 4" in failed.err
    assert not (tmp_path / "a").exists()
