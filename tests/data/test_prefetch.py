"""Reading ahead changes nothing but the time: same iterations, same states, errors where they belong."""

from __future__ import annotations

import gc
import json
import threading
import time
from typing import Any

import pytest

from cordillera.data.language.batches import BatchConfig, TextBatches, TextIteration
from cordillera.data.language.prefetch import PrefetchedBatches
from cordillera.errors import DataError
from tests.data.test_text_batches import batches, shown

BATCH = BatchConfig(tokens=80, context=40, thresholds=(30,))
MADE = [[5, 38, 17, 40, 2, 31, 9, 40, 12, 33, 7], [21, 3, 60, 8]]


def plain(**values: Any) -> TextBatches:
    return batches(MADE, BATCH, epochs=2, **values)


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "cordillera-prefetch"]


def ends_soon() -> bool:
    end = time.monotonic() + 5
    while threads() and time.monotonic() < end:
        time.sleep(0.01)
    return not threads()


class Spoilt(TextBatches):
    """Its third iteration cannot be read, or takes until an event."""

    until: threading.Event | None = None

    def __next__(self) -> TextIteration:
        one = super().__next__()
        if one.number == 2:
            if self.until is None:
                raise DataError("the disk has gone", where="shard-00001.tokens")
            assert self.until.wait(60)
        return one


def spoilt(until: threading.Event | None = None) -> Spoilt:
    made = plain()
    made.__class__ = Spoilt
    assert isinstance(made, Spoilt)
    made.until = until
    return made


@pytest.mark.parametrize("ahead", [1, 2, 50])
def test_iterations_and_states_are_those_without_reading_ahead(ahead: int) -> None:
    expected, with_states = plain(), []
    states = [expected.state_dict()]
    for one in expected:
        with_states.append(shown(one))
        states.append(expected.state_dict())
    assert len(with_states) > 5
    with PrefetchedBatches(plain(), ahead=ahead) as read:
        for number, state in enumerate(states):
            assert read.state_dict() == state
            if number == 3:
                time.sleep(0.05)  # it is further by now than what was taken
            one = next(read, None)
            assert (None if one is None else shown(one)) == (with_states[number] if number < len(with_states) else None)
        assert next(read, None) is None
    assert not threads()


@pytest.mark.parametrize("taken", [0, 1, 4])
def test_a_run_goes_on_after_what_was_taken(taken: int) -> None:
    whole = [shown(one) for one in plain()]
    with PrefetchedBatches(plain(), ahead=3) as first:
        found = [shown(next(first)) for _ in range(taken)]
        state = json.loads(json.dumps(first.state_dict()))
        found += [shown(next(first)) for _ in range(2)]
        with PrefetchedBatches(plain(), ahead=3) as second:
            second.load_state_dict(state)
            assert found[:taken] + [shown(one) for one in second] == whole
        first.load_state_dict(state)
        assert found[:taken] + [shown(one) for one in first] == whole
    with pytest.raises(DataError, match="damaged"):
        first.load_state_dict({**state, "taken": "much"})


def test_closing_puts_back_what_nobody_took() -> None:
    inner = plain()
    with PrefetchedBatches(inner, ahead=4) as read:
        taken = [shown(next(read)), shown(next(read))]
    assert taken + [shown(one) for one in inner] == [shown(one) for one in plain()]


def test_an_error_comes_where_it_belongs() -> None:
    with PrefetchedBatches(spoilt(), ahead=4) as read:
        assert [next(read).number, next(read).number] == [0, 1]
        for _ in range(2):
            with pytest.raises(DataError, match="the disk has gone"):
                next(read)
        assert read.state_dict()["number"] == 2
    assert not threads()


def test_only_the_own_microbatches_are_read() -> None:
    with PrefetchedBatches(plain(), part=slice(1, None, 2)) as read:
        assert [sorted(one.microbatches._read) for one in (next(read), next(read))] == [[1], [1]]


def test_nobody_waits_for_ever() -> None:
    until = threading.Event()
    read = PrefetchedBatches(spoilt(until), ahead=2)
    next(read), next(read)
    read.deadline_s = 0.1
    with pytest.raises(DataError, match=r"within 0\.1 s"):
        next(read)
    read.deadline_s = 60
    until.set()
    read.close()
    assert not threads()


def test_a_thread_ends_with_what_it_reads_for() -> None:
    read = PrefetchedBatches(batches(MADE, BATCH), ahead=1)
    next(read)
    assert threads()
    del read
    gc.collect()
    assert ends_soon()


def test_reading_nothing_ahead_is_refused() -> None:
    with pytest.raises(DataError, match="at least 1"):
        PrefetchedBatches(plain(), ahead=0)
