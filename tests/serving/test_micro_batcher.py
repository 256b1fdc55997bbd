"""No answer is lost, crossed or waited for in vain; the queue is bounded."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from concurrent.futures import CancelledError

import numpy as np
import pytest

from cordillera.errors import DataError
from cordillera.serving.ranking.micro_batcher import ClosedError, DeadlineError, MicroBatcher, OverloadError
from cordillera.serving.ranking.score_service import ScoreService

from .small_scorers import frame_of, rows, scorer


class Gate:
    """Computation that doubles numbers, waits while the gate is shut, and remembers its batches."""

    def __init__(self, shut: bool = False) -> None:
        self.open, self.batches, self.began = threading.Event(), list[list[int]](), threading.Semaphore(0)
        if not shut:
            self.open.set()

    def __call__(self, works: Sequence[int]) -> list[int]:
        self.batches.append(list(works))
        self.began.release()
        assert self.open.wait(10)
        if any(work < 0 for work in works):
            raise DataError("is negative", where="rows[0]")
        return [2 * work for work in works]


def test_requests_that_wait_share_the_next_batch() -> None:
    gate = Gate(shut=True)
    batcher = MicroBatcher(gate, max_rows=4)
    first = batcher.submit(1, 1)
    gate.began.acquire()  # the thread is busy
    others = [batcher.submit(work, 2) for work in (2, 3, 4)]
    large = batcher.submit(5, 9)
    assert batcher.queue_rows == 15
    gate.open.set()
    assert [one.result(5) for one in (first, *others, large)] == [2, 4, 6, 8, 10]
    assert gate.batches == [[1], [2, 3], [4], [5]]
    assert batcher.queue_rows == 0
    assert batcher.close(5)


def test_a_bad_request_does_not_spoil_its_neighbours() -> None:
    gate = Gate(shut=True)
    batcher = MicroBatcher(gate)
    first = batcher.submit(1, 1)
    gate.began.acquire()
    found = [batcher.submit(work, 1) for work in (2, -3, 4)]
    gate.open.set()
    assert first.result(5) == 2
    assert found[0].result(5) == 4
    with pytest.raises(DataError, match="is negative"):
        found[1].result(5)
    assert found[2].result(5) == 8
    assert gate.batches == [[1], [2, -3, 4], [2], [-3], [4]]
    with pytest.raises(DataError):
        batcher.submit(-1, 1).result(5)
    assert batcher.submit(7, 1).result(5) == 14
    batcher.close()


def test_the_queue_is_bounded_and_forgets_who_has_left() -> None:
    gate = Gate(shut=True)
    batcher = MicroBatcher(gate, max_queue_rows=10)
    first = batcher.submit(1, 1)
    gate.began.acquire()
    waiting = [batcher.submit(work, 2) for work in range(2, 7)]
    with pytest.raises(OverloadError, match="10 rows wait"):
        batcher.submit(7, 1)
    with pytest.raises(OverloadError):
        batcher.submit(7, 11)
    assert waiting[0].cancel()
    last = batcher.submit(8, 2)
    assert batcher.queue_rows == 10
    gate.open.set()
    assert first.result(5) == 2
    assert last.result(5) == 16
    with pytest.raises(CancelledError):
        waiting[0].result(5)
    assert all(2 not in batch for batch in gate.batches)
    batcher.close()


def test_a_request_is_dropped_after_its_deadline() -> None:
    gate = Gate(shut=True)
    batcher = MicroBatcher(gate)
    batcher.submit(1, 1)
    gate.began.acquire()
    late = batcher.submit(2, 1, deadline=time.monotonic() + 0.02)
    timely = batcher.submit(3, 1, deadline=time.monotonic() + 60)
    time.sleep(0.05)
    gate.open.set()
    assert timely.result(5) == 6
    with pytest.raises(DeadlineError, match="deadline"):
        late.result(5)
    assert gate.batches == [[1], [3]]
    batcher.close()


def test_close_computes_what_waits_and_refuses_the_rest() -> None:
    gate = Gate(shut=True)
    batcher = MicroBatcher(gate, max_rows=1)
    found = [batcher.submit(work, 1) for work in range(5)]
    gate.began.acquire()
    assert not batcher.close(0.02)  # the first is being computed; the others are told
    with pytest.raises(ClosedError):
        found[4].result(5)
    with pytest.raises(ClosedError):
        batcher.submit(1, 1)
    gate.open.set()
    assert found[0].result(5) == 0
    gate = Gate(shut=True)
    drained = MicroBatcher(gate)
    found = [drained.submit(work, 1) for work in range(5)]
    threading.Timer(0.05, gate.open.set).start()
    assert drained.close(5)
    assert [one.result(0) for one in found] == [0, 2, 4, 6, 8]


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_every_answer_is_that_of_its_own_rows(seed: int) -> None:
    """Many threads send rows of their own, some bad, and some lose interest or patience."""
    one = scorer("dlrm")
    samples = rows(400, seed=5)
    expected = one.score(frame_of(samples))
    service = ScoreService("small", one)
    wrong, counts = list[str](), {"answered": 0, "refused": 0, "left": 0, "late": 0}
    lock = threading.Lock()

    def client(number: int) -> None:
        generator = random.Random(100 * seed + number)
        for _ in range(15):
            positions = [generator.randrange(400) for _ in range(generator.choice([1, 1, 2, 7]))]
            mine = [dict(samples[position]) for position in positions]
            bad = generator.random() < 0.1
            if bad:
                mine[-1]["price"] = 1e200
                mine[-1]["age"] = 1e300  # read as a number, but beyond float32
            late = generator.random() < 0.1
            future = service.submit(service.read(mine), timeout=1e-6 if late else 30)
            if generator.random() < 0.1 and future.cancel():
                outcome = "left"
            else:
                try:
                    found = future.result(30).scores
                    outcome = "answered"
                    if bad or not np.array_equal(found, expected[positions]):
                        wrong.append(f"{number}: {positions}")
                except DeadlineError:
                    outcome = "late"
                    if not late:
                        wrong.append(f"{number} was late")
                except DataError as error:
                    outcome = "refused"
                    if not bad or error.where != f"rows[{len(mine) - 1}].age":
                        wrong.append(f"{number}: {error}")
            with lock:
                counts[outcome] += 1

    threads = [threading.Thread(target=client, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []
    assert sum(counts.values()) == 8 * 15
    assert min(counts["answered"], counts["refused"], counts["late"]) > 3, counts
    assert service.close(5)
