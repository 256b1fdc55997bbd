"""A server in the midst of many clients that go, dawdle or send what is no request."""

from __future__ import annotations

from pathlib import Path

import pytest
from _serving_soak import soak

from tests.serving.small_models import write_model


@pytest.mark.slow
def test_a_server_loses_and_crosses_no_answer_and_its_memory_stays(tmp_path: Path) -> None:
    model = write_model(tmp_path / "small", head_dim=32, tied=False, context=400)
    found = soak(30, 32, model)
    assert (found.crossed, found.lost, found.unexplained, found.problems) == (0, 0, 0, [])
    assert min(found.answered, found.cancelled, found.bad_refused) > 20
    assert (found.left, found.status) == (0, 0)
    _, middle, end = found.memory
    assert end < middle + 30
    assert found.health_p50 < 0.5
