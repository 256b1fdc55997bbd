"""Network settings: formulas at known points, and that more never means less."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cordillera.planning.network.settings import NetworkSettings, fullest, recovered, tuned

CLEAN = NetworkSettings(balance="spray", recovery="selective")


def test_a_window_limits_the_rate_by_the_round_trip() -> None:
    assert CLEAN.rate(1e12, 0.15e-3) == pytest.approx(83.9e9, rel=1e-3)
    assert CLEAN.rate(1e12, 10e-3) == pytest.approx(1.26e9, rel=2e-3)
    assert NetworkSettings(16, 128, balance="spray").rate(1e12, 10e-3) == pytest.approx(107.4e9, rel=1e-3)
    assert CLEAN.rate(5e9, 0.0) == 5e9


def test_losses_cost_go_back_n_the_window() -> None:
    window = 0.3e-3 * 50e9 / 4096  # 400 Gb/s, packets of 4 KiB
    assert recovered(1e-5, window, "go-back-n") == pytest.approx(0.9647, abs=1e-4)
    assert recovered(1e-4, window, "go-back-n") == pytest.approx(0.7319, abs=1e-4)
    assert recovered(1e-5, 20e-3 * 50e9 / 4096, "go-back-n") == pytest.approx(0.2906, abs=1e-4)
    assert recovered(1e-4, window, "selective") == 1 - 1e-4


def test_more_flows_fill_parallel_networks_more_evenly() -> None:
    assert fullest(1, 1) == 1.0
    assert 1.0 < fullest(16, 76) < fullest(1, 76) < 2.0
    assert fullest(4, 8) == fullest(4, 8)  # seeded


@given(
    rate=st.floats(1e9, 1e11),
    latency=st.floats(1e-6, 2e-2),
    loss=st.sampled_from([0.0, 1e-6, 1e-4]),
    planes=st.sampled_from([1, 4, 76]),
)
def test_tuned_settings_are_never_worse_than_a_librarys_own(
    rate: float, latency: float, loss: float, planes: int
) -> None:
    best = tuned(rate, latency, loss, planes)
    assert best.rate(rate, latency, loss, planes) >= NetworkSettings().rate(rate, latency, loss, planes) * (1 - 1e-12)
    assert best.rate(rate, latency, loss, planes) <= rate
    assert best.queued(rate, latency) <= 64e6
