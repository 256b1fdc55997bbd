"""``cordillera bench llama --part training`` with few rounds of a small model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, str(ROOT / "benchmarks/llama.py"), "--quick", "--part", "training"]

pytestmark = [pytest.mark.slow, pytest.mark.peer]


def run(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, "--results", str(folder)],
        capture_output=True, text=True, timeout=280, cwd=folder, check=False, env={**os.environ, **environment},
    )  # fmt: skip


def test_all_trainers_that_are_here_train_the_same_model(tmp_path: Path) -> None:
    for module in ("transformers", "accelerate"):
        pytest.importorskip(module)
    done = run(tmp_path)
    assert done.returncode == 0, done.stderr
    content = json.loads((tmp_path / "llama-training.json").read_text())
    assert content["quick"] is True
    whole, packed = content["results"]["quick"], content["results"]["quick, packed"]
    assert {"ours", "ours, loop", "transformers", "transformers, loop"} <= set(whole["tokens_per_s"])
    trainers = {"ours", "transformers, packed", "transformers, padded"}
    assert set(packed["tokens_per_s"]) == trainers | {f"{name}, loop" for name in trainers}
    assert whole["parameters"] == packed["parameters"] > 4e5
    assert whole["ratios"]["transformers"]["target"] == 1.0
    for case in (whole, packed):
        for key, is_loop in (("ratios", False), ("loops", True)):
            fastest = case[key]["transformers"]["fastest"]
            assert fastest in case["tokens_per_s"]
            assert fastest.endswith(", loop") is is_loop


def test_an_absent_peer_is_left_out_with_a_line(tmp_path: Path) -> None:
    done = run(tmp_path, CORDILLERA_TORCHTITAN=str(tmp_path / "nowhere"))
    assert done.returncode == 0, done.stderr
    assert "torchtitan" in done.stdout
    assert "is not there" in " ".join(done.stdout.split())
