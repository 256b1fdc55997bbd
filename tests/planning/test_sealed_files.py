"""What planning writes and reads again: a changed byte and a lost end are refused by name, or change nothing."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cordillera.cost import Calibration, Products
from cordillera.data.packing.work import DocumentWork
from cordillera.errors import CordilleraError
from cordillera.workflows import planning as commands
from tests.fuzzing import flips, survives

SMALL = """
batch = 8
sequence = 64
[model]
layers = 2
hidden = 32
heads = 4
vocabulary = 64
"""


def plan(folder: Path) -> Path:
    (folder / "small.toml").write_text(SMALL)
    done = commands.plan(folder / "small.toml", "a100-node", folder / "p", devices=2, only=["network"])
    return done.files["plan.json"]


def calibration(folder: Path) -> Path:
    header = "layers,hidden,heads,sequence,batch,microbatch,tensor,data,pipeline,milliseconds\n"
    rows = "".join(f"24,1024,16,1024,64,{mb},1,8,1,{900 + mb}\n" for mb in (1, 2, 4)) * 2
    (folder / "steps.csv").write_text(header + rows)
    return commands.calibrate(folder / "steps.csv", "a100-node", folder).file


def products(folder: Path) -> Path:
    Products({(8, 16, 32, n): 1e-3 / n for n in range(1, 20)}, "a test", "A100").write(folder / "products.csv")
    return folder / "products.csv"


def work(folder: Path) -> Path:
    DocumentWork(document=1.5, token=2.25, squared=0.125, error=0.01).save(folder / "work.json")
    return folder / "work.json"


FORMATS: list[tuple[Callable[[Path], Path], Callable[[Path], Any]]] = [
    (plan, commands.read_plan),
    (calibration, commands.read_calibration),
    (products, lambda path: vars(Products.read(path))),
    (work, DocumentWork.read),
]


@pytest.mark.parametrize(("write", "read"), FORMATS, ids=[write.__name__ for write, _ in FORMATS])
def test_damage_is_refused_by_name(
    tmp_path: Path, write: Callable[[Path], Path], read: Callable[[Path], Any], fuzz_inputs: Callable[[int], int]
) -> None:
    path, rng = write(tmp_path), random.Random(0)
    content = path.read_bytes()
    read(path)
    cuts = rng.sample(range(len(content)), 50)
    for damaged in [*(flips(content, rng) for _ in range(fuzz_inputs(200))), *(content[:cut] for cut in cuts)]:
        path.write_bytes(damaged)
        found = survives(lambda: read(path), repr(damaged[:2000]))
        assert isinstance(found, CordilleraError), damaged
        assert path.name in str(found)


def test_files_without_a_checksum_are_taken_as_written_by_hand_and_validated(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text('{"message_s": 0}')
    assert commands.read_calibration(tmp_path / "c.json") == Calibration(message_s=0)
    for text, message in [
        ('{"message_s": 0, "matrix": 2, "netwrk": 1}', "did you mean 'network'"),
        ('{"message_s": NaN}', "not a number"),
        ('{"matrix": 1e-300}', "matrix: must be at least"),
        ('{"matrix": true}', "matrix: must be a number"),
        ("[" * 100_000, "JSON"),
    ]:
        (tmp_path / "c.json").write_text(text)
        with pytest.raises(CordilleraError, match=message):
            commands.read_calibration(tmp_path / "c.json")
    written = commands.read_plan(plan(tmp_path))
    (tmp_path / "p/plan.json").write_text(json.dumps(written))
    with pytest.raises(CordilleraError, match="holds no checksum"):
        commands.read_plan(tmp_path / "p/plan.json")
