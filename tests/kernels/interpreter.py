"""Runs tests of kernels in Triton's interpreter, which needs a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys


def check_in_interpreter(file: str) -> None:
    """Run the tests called ``test_triton...`` of a file in the interpreter: some pass, and none is left out."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", "-rs", file]
    done = subprocess.run(
        [*command, "-k", "test_triton"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
