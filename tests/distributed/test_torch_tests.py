"""PyTorch's own tests of torch.distributed that need no GPU, on the backend: what passes on Gloo passes here."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cordillera.distributed.transport.process_group import BACKEND
from tests.conftest import BENCHMARKS, ROOT
from tests.distributed.processes import needs_gloo

DEADLINE_S = 560

EXPECTED = {"test_get_backend": "asks whether the backend is called gloo"}
"""Methods that fail, with the reason."""

REASONS = {
    r"CUDA|N(CCL|ccl)|\bnccl\b": "GPUs",
    r"Only MPI supports": "written for MPI, and run as such",
    r"world ?size": "another number of processes",
    r"github.com/pytorch|flak": "torch skips it everywhere",
    r"torchvision": "a package that is not here",
    r"Requires file://": "another way to begin",
}
"""Why torch skips methods, by what it says."""


def run(backend: str, written_for: str, processes: int, folder: Path, *begins: str) -> list[dict[str, Any]]:
    """What torch's tests said, by method."""
    results = folder / f"{backend}.json"
    command = ["-m", "tests.distributed.torch_tests", backend, written_for, str(processes), str(results), *begins]
    paths = [str(ROOT / "src"), str(ROOT), str(BENCHMARKS), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TEMP_DIR": str(folder)}
    with (folder / f"{backend}.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, *command], cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True
        )
        try:
            assert process.wait(DEADLINE_S) == 0, (folder / f"{backend}.log").read_text()[-4000:]
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and the ranks of a method that hangs
            process.wait()
    return [json.loads(line) for line in results.read_text().splitlines()]


@needs_gloo
@pytest.mark.slow
@pytest.mark.timeout(2 * DEADLINE_S)
@pytest.mark.parametrize(("written_for", "processes"), [("gloo", 2), ("gloo", 3), ("gloo", 4), ("mpi", 2), ("mpi", 3)])
def test_what_passes_on_gloo_passes_here(written_for: str, processes: int, tmp_path: Path) -> None:
    pytest.importorskip("expecttest", reason="torch's tests need it")
    begins, least = {"gloo": ((), 80), "mpi": (("test_all_to_all",), 8)}[written_for]
    found = run(BACKEND, written_for, processes, tmp_path, *begins)
    assert sum(one["outcome"] == "passed" for one in found) >= least
    skipped = {one["method"]: one["why"] for one in found if one["outcome"] == "skipped"}
    assert [why for why in skipped.values() if not any(re.search(pattern, why) for pattern in REASONS)] == []
    failed = {
        one["method"]: one["why"] for one in found if one["outcome"] == "failed" and one["method"] not in EXPECTED
    }
    if failed and written_for == "gloo":
        passed = {
            one["method"] for one in run("gloo", "gloo", processes, tmp_path, *failed) if one["outcome"] == "passed"
        }
        failed = {method: why for method, why in failed.items() if method in passed}
    assert not failed, "\n\n".join(f"{method}: {why}" for method, why in failed.items())
