"""``cordillera bench dmt --part exchange`` with few samples: exact on virtual ranks, and bytes as they are asked."""

from __future__ import annotations

from pathlib import Path

import dmt
import pytest

from tests.benchmarks.programs import part_of
from tests.distributed.processes import needs_gloo

pytestmark = pytest.mark.slow


@needs_gloo
def test_steps_over_hosts_are_compared(tmp_path: Path) -> None:
    content = part_of(dmt, "exchange", tmp_path)
    assert content["exact"]
    assert all(all(one.values()) for one in content["exact"].values())
    assert [one["model"] for one in content["models"]] == ["DLRM", "DCN-V2"]
    for one in content["models"]:
        flat, towers, fewer, compressed = one["rows"]
        assert flat["bytes_between"] == towers["bytes_between"] == 4 * fewer["bytes_between"] > 0
        assert compressed["bytes_between"] == fewer["bytes_between"]
        assert flat["messages_between"] == 2 * towers["messages_between"] == 4
