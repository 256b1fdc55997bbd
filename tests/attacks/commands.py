"""Commands under limits, and the judgement of their ends."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.fuzzing import CONTROLS

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 90.0
"""Deadline of one command on the clock of an idle machine, many times what it takes."""

MEMORY = 3 << 30
"""Data that one command may map, in bytes, as `ulimit -d` counts; what it takes without an attack is below 1 GiB."""


@dataclass
class Outcome:
    """End of a command.

    Attributes:
        arguments: Arguments of the command.
        code: Exit status; negative for a signal.
        out: Standard output.
        err: Standard error.
        hung: Whether it was ended at its deadline.
        seconds: Time that it took on the clock.
        memory: Largest resident memory, in bytes.
        processor: Time of the processor that it took, in seconds.
    """

    arguments: Sequence[str]
    code: int
    out: str
    err: str
    hung: bool
    seconds: float
    memory: int
    processor: float = 0.0

    @property
    def text(self) -> str:
        """What was printed, for messages of tests."""
        said = "\n".join(part[-3000:] for part in (self.out, self.err) if part)
        return f"$ cordillera {' '.join(self.arguments)}\n(status {self.code}, {self.seconds:.1f} s)\n{said}"

    def defects(self) -> list[str]:
        """What no command may do, whatever it was given."""
        found = []
        if self.hung:
            found.append("hung")
        elif self.code < 0:
            found.append(f"was ended by signal {-self.code}")
        elif self.code not in (0, 1, 2, 3, 130):
            found.append(f"ended with status {self.code}")
        for mark in ("Traceback (most recent call last)", "Exception ignored", "Fatal Python error", "panicked at"):
            if mark in self.out + self.err:
                found.append(f"printed {mark!r}")
        if steering := CONTROLS & set(self.out + self.err) - {"\r"}:
            found.append(f"printed control characters {sorted(steering)!r}")
        if self.code == 2 and not self.said.strip():
            found.append("gave no reason")
        return found

    @property
    def said(self) -> str:
        """The sentences of its error, with lines joined that the width of the terminal has broken."""
        return re.sub(r"\s+", " ", self.err)


@dataclass
class Commands:
    """Commands of the library, each in a process of its own with a deadline and a limit of memory.

    Attributes:
        folder: Folder in which commands run that are not given another.
        environment: Environment of all commands.
    """

    folder: Path
    environment: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._server: subprocess.Popen[str] | None = None

    def __call__(
        self,
        *arguments: object,
        folder: Path | None = None,
        seconds: float = SECONDS,
        limits: Mapping[str, int] | None = None,
        environment: Mapping[str, str] | None = None,
        clock: float = 0.0,
    ) -> Outcome:
        """Run ``cordillera ARGUMENTS``.

        Args:
            arguments: Arguments of the command.
            folder: Folder to run in. Default: that of the commands.
            seconds: Deadline.
            limits: Resource limits: ``data`` and ``size`` of files in bytes, and number of open ``files``;
                ``own files`` is a limit that the process may raise.
            environment: Variables to set.
            clock: Seconds by which the wall clock jumps forwards and backwards; 0 leaves it alone.
        """
        words = [str(argument) for argument in arguments]
        request = {
            "arguments": words,
            "folder": str(folder or self.folder),
            "environment": {**self.environment, **(environment or {})},
            "limits": {"data": MEMORY, **(limits or {})},
            "seconds": seconds,
            "clock": clock,
        }
        try:
            answer = self._ask(request)
        except BaseException:  # such as the deadline of a test: the answer would be taken for that of the next command
            if self._server is not None:
                self._server.kill()
                self._server = None
            raise
        return Outcome(words, **answer)

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        if self._server is None:
            self._server = self._start()
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        answer = json.loads(self._server.stdout.readline())
        assert isinstance(answer, dict)
        return answer

    def _start(self) -> subprocess.Popen[str]:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "POLARS_MAX_THREADS": "1", "COLUMNS": "400"}
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
        server = subprocess.Popen(
            [sys.executable, "-m", "tests.attacks.server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=environment,
        )
        assert server.stdout is not None
        assert "ready" in server.stdout.readline()
        return server

    def close(self) -> None:
        """End the process that starts the commands."""
        if self._server is not None:
            assert self._server.stdin is not None
            self._server.stdin.close()
            self._server.wait(30)
