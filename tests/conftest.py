"""Benchmarks are programs beside the package: their folder is put on the path while their tests run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
if str(BENCHMARKS) not in sys.path:
    sys.path.insert(0, str(BENCHMARKS))


@pytest.fixture(autouse=True)
def _no_process_group_is_left() -> Iterator[None]:
    """A test that made a default process group, as TorchRec's peer does, leaves none to the next."""
    yield
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
