"""Ways in which kernels of dense layers compute, and numbers of threads."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
import torch

from cordillera.kernels.dense import bf16_amx, bf16_tiles


@contextlib.contextmanager
def by(way: str, *modules: ModuleType) -> Iterator[None]:
    """Let ``modules`` compute by AMX, by tiles of vectors, or without either (``loops``)."""
    if not {"amx": bf16_amx.available, "tiles": bf16_tiles.available, "loops": lambda: True}[way]():
        pytest.skip(f"this processor has no instructions for {way}")
    with pytest.MonkeyPatch.context() as patch:
        for module in modules:
            patch.setattr(module, "amx_available", lambda: way == "amx")
            patch.setattr(module, "available", lambda: way != "loops")
        yield


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
