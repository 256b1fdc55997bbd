"""The command line, called in this process, on a small click log."""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from cordillera.cli import main

RECIPE = """
description = "a small log"
seed = 1

[data]
path = "{path}"
batch_size = 100
shuffle = "global"

[data.schema]
dense = [{{ name = "price" }}]
categorical = [{{ name = "user" }}, {{ name = "device" }}]
lists = [{{ name = "seen" }}]
labels = ["click"]
timestamp = "time"
group = "user"
ids = ["id"]
segments = ["device"]

[model]
name = "wukong"
embedding_dim = 4
layers = 1
fmb_embeddings = 2
lcb_embeddings = 2
rank = 2
fmb_mlp = [8]
top_mlp = [8]

[training]
epochs = 6
learning_rate = 5e-3
log_every = 5
"""


@dataclass
class Result:
    """What a command did."""

    code: int
    out: str
    err: str


@pytest.fixture
def cli(capsys, monkeypatch, tmp_path):
    """Runs ``cordillera ARGS`` in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CORDILLERA_CACHE", str(tmp_path / "cache"))

    def run(*args: object) -> Result:
        monkeypatch.setattr(sys, "argv", ["cordillera", *map(str, args)])
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return run


def write_log(path: Path, rows: int = 1000, seed: int = 0) -> Path:
    """A CSV of clicks that depend on the device, in time order."""
    generator = random.Random(seed)
    lines = ["id,time,user,device,price,seen,click"]
    for row in range(rows):
        device = generator.choice(["phone", "tablet", "desk"])
        chance = {"phone": 0.6, "tablet": 0.3, "desk": 0.1}[device]
        seen = "|".join(str(generator.randrange(20)) for _ in range(generator.randrange(4)))
        price = "" if row % 17 == 0 else f"{generator.random() * 100:.2f}"
        click = int(generator.random() < chance)
        lines.append(f"r{row},{1_700_000_000 + row},u{generator.randrange(30)},{device},{price},{seen},{click}")
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def recipe(tmp_path):
    """A recipe on a small log, by path."""
    log = write_log(tmp_path / "log.csv")
    path = tmp_path / "small.toml"
    path.write_text(RECIPE.format(path=log))
    return path
