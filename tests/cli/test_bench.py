"""``cordillera bench``: what its own options refuse."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.test_launch import wait_for_ends


def test_stale_takes_no_system_and_a_system_is_needed_without_it(cli: Any) -> None:
    done = cli("bench", "--stale", "ranking")
    assert done.code == 2
    assert "--stale: takes no SYSTEM" in done.err
    done = cli("bench")
    assert done.code == 2
    assert "SYSTEM: is missing" in done.err
    assert "ranking" in done.err


def test_a_benchmark_that_is_misspelt_is_guessed(cli: Any) -> None:
    assert "there is no benchmark 'rankng'\n  -> did you mean ranking?" in cli("bench", "rankng").err
    assert "there is no benchmark 'xyz'\n  -> one of bfloat16," in cli("bench", "xyz").err


def test_a_folder_of_another_project_holds_none_of_ours(cli: Any, tmp_path: Path) -> None:
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "theirs.py").touch()
    assert "there is no benchmark 'theirs'" in cli("bench", "theirs").err


RECORDER = "import runpy, sys\nsys.argv[:] = sys.argv[1:]\nrunpy.run_path(sys.argv[0], run_name='__main__')\n"
SLOW = """
import os, signal, subprocess, sys, tempfile, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
folder = tempfile.mkdtemp()
open(f"{child.pid}.pid", "w")
print(folder, file=open("folder", "w"))
if len(sys.argv) > 1:
    os.kill(os.getppid(), int(sys.argv[1]))
    time.sleep(300)
sys.exit(3)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, None])
def test_nothing_of_a_benchmark_stays_behind(cli: Any, tmp_path: Path, number: signal.Signals | None) -> None:
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "_recorder.py").write_text(RECORDER)
    (tmp_path / "benchmarks" / "slow.py").write_text(SLOW)
    heard = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(one) for one in heard]
    done = cli("bench", "slow", *([int(number)] if number else []))
    assert [signal.getsignal(one) for one in heard] == before
    if number:
        assert done.code == 130
        assert done.err.startswith("interrupted: bench slow: only finished parts have result files\n  -> measure")
    else:
        assert done.code == 3
        assert not done.err
    assert not Path((tmp_path / "folder").read_text().strip()).exists()
    assert list(tmp_path.glob("*.pid"))
    wait_for_ends(tmp_path)
