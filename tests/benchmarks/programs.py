"""Benchmarks, run in this process by the words of their command lines: a process of its own loads torch for seconds."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import typer
from typer.testing import CliRunner


def run(program: ModuleType, folder: Path, *words: str) -> str:
    """What a program prints that is run with few points; it must end well.

    Args:
        program: A benchmark.
        folder: Of its results.
        words: Further words of its command line.
    """
    command, threads = typer.Typer(), torch.get_num_threads()
    command.command()(program.main)
    try:
        with torch.random.fork_rng():
            done = CliRunner().invoke(
                command, ["--quick", "--results", str(folder), *words], catch_exceptions=False, color=False
            )
    finally:
        torch.set_num_threads(threads)
    assert done.exit_code == 0, done.output
    return done.output


def part_of(program: ModuleType, part: str, folder: Path) -> Any:
    """The result file of one part, run with few points.

    Args:
        program: A benchmark.
        part: What is measured.
        folder: Of its results.
    """
    run(program, folder, "--part", part)
    content = json.loads((folder / f"{program.__name__}-{part}.json").read_text())
    assert content["quick"] is True
    return content
