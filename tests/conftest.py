"""Benchmarks are programs beside the package: their folder is put on the path while their tests run.

Tests may be shared out among processes (``make test`` takes two). What a test of one file makes, the others of the file
use, so files stay whole; and tests marked ``processes``, wherever they are, stay in one process and thus run one after
another, from the beginning on, as they take longest.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
if str(BENCHMARKS) not in sys.path:
    sys.path.insert(0, str(BENCHMARKS))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Say which tests run in one process; what takes long begins first, so that nobody waits long for the last."""
    if not hasattr(config, "workerinput"):  # all tests run in one process, in the order of their files
        return
    from tests.distributed.processes import needs_gloo

    begins: dict[str, int] = {}
    groups: list[str] = []
    for item in items:
        if item.get_closest_marker("processes") is not None or needs_gloo.mark in item.iter_markers():
            item.add_marker(pytest.mark.xdist_group("processes"))
            group, turn = "processes", 0
        else:
            group, turn = file_of(item.nodeid), 1 if item.get_closest_marker("slow") else 2
        begins[group] = min(turn, begins.get(group, turn))
        groups.append(group)
    items[:] = [items[i] for i in sorted(range(len(items)), key=lambda i: begins[groups[i]])]


def file_of(nodeid: str) -> str:
    """The path before the name of a test."""
    return nodeid.partition("::")[0]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Files that stay whole, beside the groups that tests name."""
    if config.getoption("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadGroupScheduling

    class Files(LoadGroupScheduling):
        def _split_scope(self, nodeid: str) -> str:
            scope: str = super()._split_scope(nodeid)
            return file_of(scope)

    return Files(config, log)


@pytest.fixture(autouse=True)
def _no_process_group_is_left() -> Iterator[None]:
    """A test that made a default process group, as TorchRec's peer does, leaves none to the next."""
    yield
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
