"""PyTorch's own tests of torch.distributed on a backend: a program, as they are configured by the environment.

    python -m tests.distributed.torch_tests BACKEND FOR PROCESSES RESULTS [NAME ...]

BACKEND runs what torch wrote FOR ``gloo`` or ``mpi``. The processes of each method are forked from one that has loaded
the tests. RESULTS gets a line of JSON for each method
whose name begins with one of NAME.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import tempfile
import time
import unittest
from datetime import timedelta
from pathlib import Path
from typing import Any

METHOD_S = 60
"""Longest time of a method."""


def prepare(written_for: str, processes: int) -> None:
    """Set what torch's tests read when they are loaded."""
    os.environ |= {
        "BACKEND": written_for,
        "WORLD_SIZE": str(processes),
        "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(METHOD_S),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    folder = os.environ.setdefault("TEMP_DIR", tempfile.mkdtemp())
    for name in ("barrier", "test_dir"):
        Path(folder, name).mkdir(parents=True, exist_ok=True)


def replace_gloo(backend: str) -> None:
    """Let tests that ask for Gloo or MPI have another backend."""
    import torch.distributed as dist

    def replaced(original: Any) -> Any:
        @functools.wraps(original)
        def call(*arguments: Any, **options: Any) -> Any:
            given = [backend if one in ("gloo", "mpi") else one for one in arguments]
            return original(*given, **{key: backend if one in ("gloo", "mpi") else one for key, one in options.items()})

        return call

    for name in ("init_process_group", "new_group"):
        setattr(dist, name, replaced(getattr(dist, name)))

    def monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """That of torch without the question whether the backend is Gloo."""
        if dist.distributed_c10d._rank_not_in_group(group):
            return
        limit = timedelta(seconds=timeout) if isinstance(timeout, float) else timeout
        (group or dist.group.WORLD).monitored_barrier(limit, wait_all_ranks=wait_all_ranks)

    dist.monitored_barrier = monitored_barrier


def tests_of_torch() -> type[unittest.TestCase]:
    """Return torch's tests as a class whose processes are forked."""
    import torch
    from torch.testing._internal.distributed.distributed_test import DistributedTest, TestDistBackend

    class TorchTests(TestDistBackend, DistributedTest._DistTestBase):  # type: ignore[misc]
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

    return TorchTests


def main(backend: str, written_for: str, processes: str, results: str, *begins: str) -> None:
    """Run methods of torch's tests whose names begin so, or all."""
    prepare(written_for, int(processes))
    if backend != "gloo":
        from cordillera.distributed.transport.process_group import register

        register()
        replace_gloo(backend)
    tests = tests_of_torch()
    # Under the name of Gloo, tests of groups of some ranks ask for eight processes, and two are too few.
    os.environ["BACKEND"] = "mpi" if int(processes) > 2 else "gloo"
    with Path(results).open("a") as file:
        for method in unittest.defaultTestLoader.getTestCaseNames(tests):
            if begins and not method.startswith(begins):
                continue
            begun, result = time.monotonic(), unittest.TestResult()
            tests(method).run(result)
            why = [text for _, text in [*result.failures, *result.errors]]
            skipped = [text for _, text in result.skipped]
            outcome = "failed" if why else "skipped" if skipped else "passed"
            line = {"method": method, "outcome": outcome, "why": "\n".join(why + skipped)}
            print(json.dumps({**line, "seconds": round(time.monotonic() - begun, 1)}), file=file, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
