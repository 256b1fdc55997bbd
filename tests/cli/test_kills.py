"""Trainings that are killed at random moments end with the weights, moments and records of one that never was.

One kill of each kind of training of :data:`USUAL` in a usual run; ``pytest --fuzz N`` makes N kills of every kind, half
of them on two processes. All begin in copies of one process that has loaded the libraries already, as that takes longer
than such a training.
"""

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from cordillera.recipe import dump
from cordillera.run import Run
from tests.cli.conftest import RECIPE as RANKING
from tests.cli.conftest import write_log
from tests.cli.test_language_commands import CLOCKS, write_text
from tests.distributed.processes import needs_gloo
from tests.training.post_training_runs import make_start, post_recipe

pytestmark = [
    needs_gloo,
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="only Linux tells a process's environment"),
]

SOURCE = Path(__file__).parents[2] / "src"
MARK = "CORDILLERA_TEST_OF_KILLS"  # in the environment of all that a training starts
CLOCKED = (*CLOCKS, "examples_per_second", "data_fraction", "compute_fraction", "exposed_fraction", "sent_bytes")

# Python's own words, from a process whose parent was killed while it was being started.
ORPHANS = re.compile(
    r"Traceback \(most recent call last\):\n(?:  File \"<string>\", line 1, in <module>\n[^\n]*, in spawn_main\n)?"
    r"(?:    [^\n]*\n|  File [^\n]*multiprocessing[^\n]*\n)*EOFError: (?:Ran out of input|unexpected EOF)\n"
)

LOADED = """
import json, os, sys
import scipy.stats, torch, torch._dynamo, torch.utils.flop_counter, torch.utils.tensorboard
import cordillera.cli.train, cordillera.kernels.embeddings.numba_backend, cordillera.workflows
import cordillera.training.ranking.metric_intervals
from cordillera.cli import main

print("ready", flush=True)
for line in sys.stdin:
    request = json.loads(line)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.environ.update(request["environment"])
            os.chdir(request["folder"])
            output = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1), os.dup2(output, 2), os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            sys.argv = ["cordillera", *request["arguments"]]
            main()
            code = 0
        except SystemExit as stop:
            code = int(stop.code or 0)
        finally:
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(code)
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""

TABLES = {
    "ranking": "",
    "file": '\n[tables]\nstorage = "file"\ncache = 0.05\n',
    "dynamic": "\n[tables.dynamic]\nmin_count = 2\nmax_age = 4\nevict_every = 3\n",
}

POST_TRAINING = {
    "sft": {"model": {"adapter": {"rank": 4}}},
    "reward": {},
    "dpo": {},
    "grpo": {"objective": {"kl": 0.1}},
    "draft": {},
}

USUAL = [("ranking", 1), ("file", 1), ("dynamic", 1), ("language", 1), ("sft", 1)]

LANGUAGE = """
seed = 3
device = "cpu"
threads = 1

[data]
path = "{path}"
tokenizer = "bytes"
held_out = 0.1

[packing]
tokens = 1024
context = 256

[model]
name = "llama"
layers = 2
hidden = 64
heads = 4
kv_heads = 2
ffn = 128
vocabulary = 264
context = 256

[training]
steps = 10
learning_rate = 1e-2
warmup_steps = 2
log_every = 3
evaluate_every = 6
checkpoint_every = 2

[parallel]
deadline_s = 30
"""


@pytest.fixture(scope="module")
def loaded():
    """A process that has loaded the libraries, and starts copies of itself."""
    process = subprocess.Popen(
        [sys.executable, "-c", LOADED],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"},
        text=True,
    )
    assert process.stdout.readline() == "ready\n"
    yield process
    process.stdin.close()
    process.wait(60)


def computed(processes):
    """Seconds that processes have computed; those that are gone are left out."""
    ticks = 0
    for process in processes:
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


class Trainings:
    """Starts trainings of one recipe, whole or killed after some time."""

    def __init__(self, loaded, folder, recipe, *more):
        self.loaded, self.folder, self.recipe, self.more = loaded, folder, recipe, more
        self.seconds = 0.0  # that the last one has computed

    def go(self, name, seconds=None, victim=0):
        """Train or resume; the exit status.

        When it has computed for some seconds, whatever else the machine does, the process or one that it started is
        killed.
        """
        run = self.folder / name
        first = [run, "--resume"] if (run / "recipe.toml").is_file() else [self.recipe, "--run", run, *self.more]
        arguments = ["train", *map(str, first), "--quiet"]
        log = self.folder / f"{name}.log"
        environment = {MARK: str(self.folder), "CORDILLERA_CACHE": str(self.folder / "cache")}
        request = {"arguments": arguments, "log": str(log), "environment": environment, "folder": str(self.folder)}
        print(json.dumps(request), file=self.loaded.stdin, flush=True)
        process = int(self.loaded.stdout.readline())
        self.seconds, chosen = 0.0, [process]
        while Path(f"/proc/{process}/stat").exists():
            self.seconds = max(self.seconds, computed(chosen))
            if seconds is not None and self.seconds >= seconds:
                time.sleep(random.uniform(0.0, 0.05))
                with contextlib.suppress(ProcessLookupError):
                    os.kill(chosen[victim % len(chosen)], signal.SIGKILL)
                break
            if self.more:
                chosen = [process, *self.started()]
            time.sleep(0.05 if self.more else 0.002)
        code = int(self.loaded.stdout.readline())
        until = time.monotonic() + 60
        while self.started():
            assert time.monotonic() < until, f"{self.started()} stay"
            time.sleep(0.02)
        said = log.read_text()
        assert "Traceback" not in (said if seconds is None else ORPHANS.sub("", said)), said
        if seconds is None:
            assert code == 0, said
        return code

    def started(self):
        """Processes that a training started, and that still run."""
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if f"{MARK}={self.folder}".encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
        return sorted(found)


def content(folder, is_language):
    """All that a run holds but what clocks said."""
    run = Run(folder)
    records = [{k: v for k, v in r.items() if k not in CLOCKED} for r in run.metrics() if r["kind"] != "resumed"]
    evaluation = {k: v for k, v in run.read_json("evaluation.json").items() if k not in CLOCKED}
    files = sorted(path for path in run.checkpoints.rglob("*") if path.is_file())
    names = [str(path.relative_to(folder)) for path in files]
    if is_language:
        held = {name: path.read_bytes() for name, path in zip(names, files, strict=True)}
    else:
        held = {
            f"{name}: {key}": (tensor.dtype.str, tensor.shape, tensor.tobytes())
            for name, path in zip(names, files, strict=True)
            if path.suffix == ".safetensors"
            for key, tensor in load_file(path).items()
        }
        held |= {name: path.read_bytes() for name, path in zip(names, files, strict=True) if path.name == "rows.bin"}
    return records, evaluation, names, held


def rubbish(folder):
    """What nobody would miss."""
    names = [path.relative_to(folder) for path in folder.rglob("*")]
    return [
        str(name) for name in names if any(part.startswith(".") and not part.endswith(".lock") for part in name.parts)
    ]


def write_recipe(folder, kind):
    path = folder / "recipe.toml"
    if kind in TABLES:
        text = RANKING.format(path=write_log(folder / "log.csv"))
        text = text.replace("epochs = 6", "epochs = 3\ncheckpoint_every = 4\nevaluate_every = 10")
        path.write_text(text + TABLES[kind])
    elif kind in POST_TRAINING:
        start = make_start(folder)
        changes = {"training": {"steps": 10, "log_every": 3, "evaluate_every": 6, "checkpoint_every": 2}}
        path.write_text(dump(post_recipe(folder, kind, start, **changes, **POST_TRAINING[kind])))
    else:
        write_text(folder / "text.jsonl")
        text = LANGUAGE.format(path=folder / "text.jsonl")
        if kind == "experts":
            text = text.replace("[training]", "[model.experts]\ncount = 4\n\n[training]") + 'experts = "exchange"\n'
        path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("kind", "processes"),
    [
        ("ranking", 1),
        ("file", 1),
        ("dynamic", 1),
        ("ranking", 2),
        ("language", 1),
        ("language", 2),
        ("experts", 1),
        ("experts", 2),
        ("sft", 1),
        ("reward", 1),
        ("dpo", 1),
        ("grpo", 1),
        ("draft", 1),
    ],
)
def test_a_training_that_is_killed_at_any_moment_goes_on_as_if_it_never_was(
    tmp_path, kind, processes, fuzz_inputs, loaded
):
    wanted = -(-fuzz_inputs(0) // 4) or 1
    if (kind, processes) not in USUAL and not fuzz_inputs(0):
        pytest.skip("its trainer is killed as another kind, or its processes load for long; give --fuzz N")
    rng = random.Random(os.environ.get("KILLS_SEED", "1"))
    more = ["--nproc", str(processes)] if processes > 1 else []
    trainings = Trainings(loaded, tmp_path, write_recipe(tmp_path, kind), *more)
    trainings.go("first")  # may compile, which those after it do not
    trainings.go("whole")
    is_language = kind not in TABLES
    seconds, expected = trainings.seconds, content(tmp_path / "whole", is_language)
    assert content(tmp_path / "first", is_language) == expected
    kills, runs = 0, 0
    while kills < wanted:
        name = f"run{runs}"
        for _ in range(min(3, wanted - kills)):
            kills += trainings.go(name, rng.uniform(0.0, 1.0) * seconds, rng.randrange(1 + processes)) != 0
        trainings.go(name)
        records, evaluation, names, held = content(tmp_path / name, is_language)
        for ours, theirs in zip(records, expected[0], strict=False):
            assert ours == theirs
        assert len(records) == len(expected[0])
        assert evaluation == expected[1]
        assert names == expected[2]
        assert [key for key in held if held[key] != expected[3].get(key)] == []
        assert held.keys() == expected[3].keys()
        assert rubbish(tmp_path) == []
        runs += 1
