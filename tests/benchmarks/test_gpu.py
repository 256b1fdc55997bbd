"""``cordillera bench gpu``: refused without a GPU, and with few points every part runs."""

from __future__ import annotations

from pathlib import Path

import _machine
import gpu
import pytest
import torch

from tests.benchmarks.programs import part_of, run

PARTS = [part.value for part in gpu.Part]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("part", PARTS)
def test_without_a_gpu_nothing_is_measured(part: str, tmp_path: Path) -> None:
    said = run(gpu, tmp_path, "--part", part)
    assert said.strip() == f"{part}: left out, needs a CUDA device"
    assert not list(tmp_path.iterdir())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("part", PARTS)
def test_every_part_runs(part: str, tmp_path: Path) -> None:
    content = part_of(gpu, part, tmp_path)
    assert content["machine"]["gpu"]["name"] == torch.cuda.get_device_name()
    assert content["rows"] if part != "training" else content["language"]["tokens_per_s"]


def test_a_copy_without_git_names_the_commit_of_its_archive(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    archived = tmp_path / "commit.txt"
    monkeypatch.setattr(_machine, "_git", lambda *arguments: None)
    monkeypatch.setattr(_machine, "ARCHIVED", archived)
    for text, expected in (("$Format:%H$", (None, None)), ("0" * 40, ("0" * 40, False))):
        archived.write_text(text + "\n")
        found = _machine.fingerprint()
        assert (found["commit"], found["uncommitted_changes"]) == expected
