"""The shell's completion: names of what ships for arguments, by the shell's own protocol."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from cordillera.cli._completion import completion_of


def completed(line: str) -> list[str]:
    """What bash is offered for the last word of a line."""
    words = line.split(" ")
    asked = {"COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1), "_CORDILLERA_COMPLETE": "complete_bash"}
    command = [sys.executable, "-c", "import sys; sys.argv = ['cordillera']; from cordillera.cli import main; main()"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, **asked})
    return done.stdout.split()


def test_a_shell_is_offered_names_that_ship() -> None:
    assert completed("cordillera train movielens-d") == [
        "movielens-dcn",
        "movielens-dhen",
        "movielens-dlrm",
        "movielens-dnn",
    ]
    assert completed("cordillera plan llama3-8b two-build") == ["two-buildings"]
    assert completed("cordillera train runs/fir") == []  # the shell completes files


@pytest.mark.parametrize(
    ("argument", "name"),
    [("cluster", "selene"), ("model", "smollm2"), ("recipe", "llama-debug"), ("workload", "gpt-22b")],
)
def test_each_name_completes_itself(argument: str, name: str) -> None:
    complete = completion_of(argument)
    assert complete is not None
    assert name in complete("")
    assert name in complete(name[:3])
    assert complete("no such name") == []


def test_run_folders_are_completed_as_files() -> None:
    assert completion_of("run") is None
