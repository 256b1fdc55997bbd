"""Gloo processes that tests start."""

from __future__ import annotations

from functools import partial

import _processes
import pytest
import torch.distributed as dist
from _processes import Ended

__all__ = ["Ended", "needs_gloo", "run_processes"]

needs_gloo = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="torch was built without Gloo"
)

# What most of them would load.
_LOADED = ("torch._dynamo", "pytest", "hypothesis", "cordillera.training.language.engine")
run_processes = partial(_processes.run_processes, preload=_LOADED)
