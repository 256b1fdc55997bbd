"""Gloo processes that tests start."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from _processes import Ended, run_processes

__all__ = ["Ended", "needs_gloo", "run_processes"]

needs_gloo = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="torch was built without Gloo"
)
