"""``cordillera bench fault-tolerance --part stalls`` with few faults: survivors go on, and their log says when."""

from __future__ import annotations

from pathlib import Path

import _replica_stalls
import fault_tolerance
import pytest
from _peers import PeerUnavailable
from _replica_peers import Cells, check_torchft

from tests.benchmarks.programs import part_of
from tests.distributed.processes import needs_gloo


def step(at: float, number: int, participants: int) -> dict[str, object]:
    return {"kind": "step", "outcome": "committed", "at": at, "step": number, "participants": participants}


def test_a_step_with_the_victim_after_the_signal_is_not_the_end_of_a_stall(tmp_path: Path) -> None:
    watch = _replica_stalls.Watch(tmp_path)
    steps = [step(float(number), number, 2) for number in range(14)]  # one a second; the signal comes at 12.8
    alone = [step(16.0, 14, 1), step(16.5, 15, 1), step(18.5, 16, 1)]
    watch.events = {
        "r0": [*steps, *alone, *(step(19.0 + number, 17 + number, 2) for number in range(8))],
        "r1": [{"kind": "joined", "at": 18.0, "processes": [1, 2]}],
    }
    struck = {"kind": "kill", "rank": 0, "share": 0.8, "phase": "reduce", "at": 12.8, "victim": "r1", "survivor": "r0"}
    found = _replica_stalls.measured(watch, struck, is_restart=False)
    assert found["step_s"] == 1
    assert found["stall_s"] == pytest.approx(16.0 - 12.8 - 1)
    assert found["gap_s"] == pytest.approx(16.0 - 13.0 - 1)
    assert found["whole_s"] == pytest.approx(19.0 - 12.8)
    assert found["rejoin_steps"] == pytest.approx(18.5 - 16.5 - 1)


def test_a_restart_has_regained_what_was_lost_at_the_step_after_the_last(tmp_path: Path) -> None:
    watch = _replica_stalls.Watch(tmp_path)
    lost = [step(float(number), number, 2) for number in range(14)]
    again = [step(20.0 + number, 11 + number, 2) for number in range(9)]
    watch.events = {"r0": [*lost, {"kind": "joined", "at": 19.0, "processes": [1]}, *again]}
    struck = {"kind": "kill", "rank": 0, "share": 0.8, "phase": "reduce", "at": 12.8, "victim": "r0", "survivor": "r0"}
    found = _replica_stalls.measured(watch, struck, is_restart=True)
    assert (found["stall_s"], found["regained_s"]) == pytest.approx((20 - 12.8 - 1, 23 - 12.8 - 1))
    assert found["redone"] == 3


@needs_gloo
@pytest.mark.slow
def test_survivors_go_on_and_hold_the_weights_of_the_replacement(tmp_path: Path) -> None:
    content = part_of(fault_tolerance, "stalls", tmp_path)
    assert content["reached"]["equal weights"] is True
    rows = {row["kind"]: row for row in content["rows"]}
    assert set(rows) == {"kill", "freeze"}
    for row in rows.values():
        assert row["stall_s"]["worst"] < 5
        assert row["discarded"]["worst"] <= 1
        assert row["whole_s"]["median"] > row["joined_s"]["median"] > 0
    assert content["overhead"]["count"] == 2


@needs_gloo
@pytest.mark.peer
@pytest.mark.slow
def test_peers_go_on_too(tmp_path: Path) -> None:
    try:
        check_torchft()
    except PeerUnavailable as error:
        pytest.skip(str(error))
    fault = {"kind": "kill", "victim": 0, "rank": 1, "share": 0.5}
    for stack in ("torchft, tuned", "restart"):
        (found,) = _replica_stalls.apart("faulty_run", stack, [fault])["faults"]
        assert found["stall_s"] > 0, stack
    assert found["regained_s"] >= found["stall_s"]
    assert 0 <= found["redone"] <= 2 * _replica_stalls.CHECKPOINT_EVERY


def test_cells_are_shared_and_open_their_gate(tmp_path: Path) -> None:
    one, other = Cells(tmp_path), Cells(tmp_path)
    one.allow(3)
    other.wait(3)
    one.enter(2, "reduce")
    assert (other.phase(2), other.phase(1)) == ("reduce", "waiting")
    one.stop()
    other.wait(10)
    assert other.is_stopping
