"""``cordillera export``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_a_folder_is_replaced_only_if_it_is_an_export(cli, recipe: Path, tmp_path: Path) -> None:
    assert cli("train", recipe, "--run", "run", "-q", "--set", "training.max_steps=3").code == 0
    shown = cli("export", "run")
    assert shown.code == 0
    assert "export: run/export" in shown.out
    advice = shown.out.partition("in Python: ")[2].replace("\n", " ").replace("predict([...])", "schema")
    assert subprocess.run([sys.executable, "-c", advice], check=False, cwd=tmp_path).returncode == 0
    assert "in place of" not in shown.out
    assert "export: run/export, in place of an earlier one\n" in cli("export", "run").out
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "schema.json").write_text('{"fields": []}')  # of somebody else
    refused = cli("export", "run", "--out", "mine")
    assert refused.code == 2
    assert "exists and is no export" in refused.err
    assert (tmp_path / "mine" / "schema.json").read_text() == '{"fields": []}'
    assert cli("export", "run", "--out", "new/folder").code == 0
    assert not [path for path in tmp_path.rglob("*") if path.name.startswith((".export", ".folder"))]
    assert (tmp_path / "new" / "folder").stat().st_mode & 0o755 == 0o755
