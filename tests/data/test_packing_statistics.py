"""Packing statistics are those of a count by hand; tuned thresholds keep the delay."""

from __future__ import annotations

import random

import pytest

from cordillera.data.packing.packer import Iteration, Microbatch, PackedDocument, PackingConfig, global_batches
from cordillera.data.packing.statistics import PackingStatistics, choose_thresholds, packed, tune
from cordillera.data.packing.work import DocumentWork
from cordillera.errors import DataError

WORK = DocumentWork.of_break_even(50)
CONTEXT = 100


def test_statistics_are_those_of_a_count() -> None:
    first = Iteration(
        0, (Microbatch([PackedDocument(0, 50, 0)]), Microbatch([PackedDocument(1, 25, 0), PackedDocument(2, 25, 1)]))
    )
    second = Iteration(1, (Microbatch([PackedDocument(3, 100, 0)]), Microbatch()))
    found = PackingStatistics.of([first, second], DocumentWork(token=1.0, squared=0.02))
    # Work is 100 against 75 in the first, 300 against nothing in the second.
    assert found.imbalance == pytest.approx((100 / 87.5 + 2.0) / 2)
    assert found.imbalance_p95 == pytest.approx(100 / 87.5 + 0.95 * (2.0 - 100 / 87.5))
    assert found.delay == pytest.approx((25 + 100) / 200)  # one used an iteration early, one late
    assert (found.iterations, found.tokens, found.longest) == (2, 200, 100)
    with pytest.raises(DataError, match="no documents"):
        PackingStatistics.of([], WORK)


def test_tuned_thresholds_balance_best_among_those_that_keep_the_delay() -> None:
    chance = random.Random(0)
    lengths = [chance.choice([5, 5, 5, 8, 8, 12, 60, 90]) for _ in range(600)]
    batches = list(global_batches(lengths, 4 * CONTEXT))
    config, candidates = PackingConfig(microbatches=4, bound=200), [10, 50, 70, 95]

    def of(thresholds: tuple[int, ...]) -> PackingStatistics:
        trial = PackingConfig(microbatches=4, bound=200, thresholds=thresholds)
        return PackingStatistics.of(packed(batches, trial, WORK), WORK)

    for delay in (0.5, 2.0):
        found = tune(batches, config, WORK, 1, delay, candidates)
        tried = [of((one,)) for one in candidates]
        assert of(found.thresholds).delay <= delay
        assert of(found.thresholds).imbalance == min(one.imbalance for one in tried if one.delay <= delay)
    assert tune(batches, config, WORK, 0).thresholds == ()
    with pytest.raises(DataError, match="allow more delay"):
        tune(batches, config, WORK, 1, 0.0, [50])


def test_thresholds_are_chosen_only_where_they_help() -> None:
    config = PackingConfig(microbatches=4, bound=150)
    assert choose_thresholds([[100] * 4] * 30, config, WORK) == ()  # all tokens would wait
    few_long = [[100 if (16 * batch + i) % 12 == 0 else 10 for i in range(16)] for batch in range(60)]
    (chosen,) = choose_thresholds(few_long, config, WORK, queues=1, delay=1.0)
    assert 10 < chosen <= 100
    for values in ({"queues": 0, "delay": 1.0}, {"queues": 1, "delay": 0.1}):
        assert choose_thresholds(few_long, config, WORK, **values) == ()
