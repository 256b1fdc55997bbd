"""Samples of a batch divided over ranks so that none waits long for another.

Lists differ in length between samples, and so does the work of a rank whose samples are chosen by position alone. Every
rank divides the whole batch in the same way, so nothing is exchanged for it.

Source: FreeScale (arXiv 2604.24073), sequence load balancing with fixed and with variable batch sizes, as third-party
notes describe it. With a fixed size, samples are dealt out in zig-zag from the most costly to the cheapest; with a
variable size, the notes cut the batch into runs of equal weight, where this library puts each sample on the rank with
the least work so far.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from cordillera.jagged import JaggedBatch
from cordillera.partition import heaviest_first, longest_processing_time

SampleBalance = Literal["none", "fixed", "variable"]
"""Division of a batch: by position; by cost, with equal numbers of samples; by cost alone."""


def sample_costs(sparse: JaggedBatch, of_sample: float = 0.0, of_square: float = 0.0) -> NDArray[np.float64]:
    """Return the cost of every sample of a batch, in units of the cost of one id.

    Args:
        sparse: Ids of ``B`` samples.
        of_sample: Cost of a sample without ids.
        of_square: Cost of the square of a list's length, for models with attention over lists.

    Returns:
        ``[B]``: ``of_sample``, plus the number of ids, plus ``of_square`` times the squares of the lists' lengths.
    """
    lengths = sparse.lengths.view(len(sparse.keys), -1).double().numpy()
    return of_sample + lengths.sum(0) + of_square * np.square(lengths).sum(0)


def divide(costs: NDArray[np.float64], ranks: int, balance: SampleBalance) -> list[NDArray[np.int64]]:
    """Divide the samples of a batch over ranks.

    Args:
        costs: ``[B]``, cost of every sample, at least 0.
        ranks: Number of ranks.
        balance: ``none`` (consecutive samples), ``fixed`` (numbers of samples differ by one at most) or ``variable``.

    Returns:
        Positions of each rank's samples, ascending. Equal costs give equal divisions. With positive costs and at least
        as many samples as ranks, every rank has a sample.

    Raises:
        DataError: If a cost is negative or not finite, or there is less than one rank.
    """
    samples = len(costs)
    if balance == "none":
        return [np.arange(samples * rank // ranks, samples * (rank + 1) // ranks) for rank in range(ranks)]
    if balance == "variable":
        places = longest_processing_time(costs, ranks)
    else:
        turns, place = np.divmod(np.arange(samples), ranks)
        places = np.empty(samples, dtype=np.int64)
        places[heaviest_first(costs)] = np.where(turns % 2, ranks - 1 - place, place)
    return [np.flatnonzero(places == rank) for rank in range(ranks)]


def positions(divided: list[NDArray[np.int64]]) -> NDArray[np.int64]:
    """Return the position of each sample of a batch in the concatenation of the ranks' samples from :func:`divide`."""
    return np.argsort(np.concatenate(divided), kind="stable")
