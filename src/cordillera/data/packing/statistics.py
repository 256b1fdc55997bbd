"""Statistics of a packed stream, and the choice of thresholds that pack it best."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from cordillera.data.packing.packer import Iteration, Packer, PackingConfig
from cordillera.data.packing.work import DocumentWork
from cordillera.errors import DataError
from cordillera.partition import imbalance


@dataclass(frozen=True)
class PackingStatistics:
    """Balance of iterations, and its cost in randomness.

    Attributes:
        imbalance: Mean over the iterations of the heaviest microbatch's work over the mean microbatch's: the part of
            the pipeline's time that balance could save (WLB-LLM, section 7.4: ``max latency x PP / total latency``).
        imbalance_p95: 95th percentile of that ratio over the iterations.
        delay: Mean number of iterations between a token's arrival and its use, in either direction (a window may bring
            tokens forward).
        longest: Number of tokens of the longest microbatch, which the memory must hold.
    """

    iterations: int
    tokens: int
    imbalance: float
    imbalance_p95: float
    delay: float
    longest: int

    @classmethod
    def of(cls, iterations: Sequence[Iteration], workload: DocumentWork) -> PackingStatistics:
        """Compute the statistics of all ``iterations``, including a drain, whose documents waited longest.

        The imbalance is computed from the work that ``workload`` predicts.

        Raises:
            DataError: The iterations hold no documents.
        """
        moved = [(abs(one.number - d.arrival) * d.length, d.length) for one in iterations for d in one.documents]
        if not moved:
            raise DataError("hold no documents", where="iterations")
        degrees = [imbalance([workload.of(m.lengths) for m in one.microbatches]) for one in iterations]
        distance, tokens = map(sum, zip(*moved, strict=True))
        return cls(
            len(iterations),
            tokens,
            float(np.mean(degrees)),
            float(np.quantile(degrees, 0.95)),
            distance / tokens,
            max(m.tokens for one in iterations for m in one.microbatches),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the statistics as a dictionary."""
        return asdict(self)


def packed(batches: Iterable[Sequence[int]], config: PackingConfig, workload: DocumentWork) -> list[Iteration]:
    """Pack ``batches`` of lengths in tokens by ``config`` and ``workload``; return all iterations and the drain."""
    packer = Packer(config, workload)
    return [*map(packer.pack, batches), *packer.drain()]


def tune(
    batches: Sequence[Sequence[int]],
    config: PackingConfig,
    workload: DocumentWork,
    queues: int = 2,
    delay: float = 0.6,
    candidates: Sequence[int] | None = None,
) -> PackingConfig:
    """Replace the thresholds of ``config`` by ``queues`` thresholds that balance ``workload`` best within a mean delay.

    Args:
        batches: Global batches of the sample; its drain counts, so it should be a hundred batches or longer.
        delay: Largest mean number of iterations that tokens may wait.
        candidates: Candidates for thresholds, in tokens; None for ten, from a sixteenth of the bound to half of it.

    Raises:
        DataError: No thresholds keep the delay.
    """
    lengths = sorted({*candidates} if candidates is not None else _candidates(config.bound))
    best: tuple[float, PackingConfig] | None = None
    for thresholds in itertools.combinations(lengths, queues):
        trial = PackingConfig(microbatches=config.microbatches, bound=config.bound, thresholds=thresholds)
        found = PackingStatistics.of(packed(batches, trial, workload), workload)
        if found.delay <= delay and (best is None or found.imbalance < best[0]):
            best = found.imbalance, trial
    if best is None:
        raise DataError(
            f"no {queues} thresholds of {lengths} keep the mean delay below {delay:g} iterations",
            where="thresholds", remedy="allow more delay, fewer queues, or a longer bound",
        )  # fmt: skip
    return best[1]


def choose_thresholds(
    batches: Sequence[Sequence[int]], config: PackingConfig, workload: DocumentWork, queues: int = 2, delay: float = 0.6
) -> tuple[int, ...]:
    """Find at most ``queues`` thresholds for any text, with fewer or none where they do not help.

    Queues are for the few longest documents. If most tokens waited, iterations would differ widely in size. The sample
    ``batches``, ``config``, ``workload`` and ``delay`` are those of :func:`tune`.
    """
    lengths = np.sort(np.concatenate([np.array(batch, np.int64) for batch in batches]))
    candidates = [
        threshold
        for threshold in _candidates(config.bound, steps=6)
        if 2 * lengths[lengths.searchsorted(threshold) :].sum() <= lengths.sum()
    ]
    best: tuple[float, tuple[int, ...]] = (math.inf, ())
    for count in range(queues + 1):
        try:
            found = tune(batches, config, workload, count, delay, candidates)
        except DataError:  # all candidates delay tokens too much
            continue
        statistics = PackingStatistics.of(packed(batches, found, workload), workload)
        best = min(best, (statistics.imbalance, found.thresholds))
    return best[1]


def _candidates(bound: int, steps: int = 10) -> list[int]:
    """Lengths from a sixteenth of the bound to half of it, in steps of equal ratio."""
    return sorted({max(1, round(bound / 16 * 2 ** (3 * step / (steps - 1)))) for step in range(steps)})
