"""NDCG, recall and reciprocal rank of the first ``k`` samples of every group, without a loop over groups.

The samples of a group are ranked by descending score. Those with one score are tied, and every metric is its expected
value if tied samples are ordered at random, each order being equally likely; it therefore does not depend on the order
of rows. Positives are relevant, others are not. A group of fewer than ``k`` samples is ranked whole.

Sources: NDCG by Järvelin and Kekäläinen 2002, with the discount ``1 / log2(1 + rank)``; its expected value by McSherry
and Najork 2008, section 3, which also gives that of the recall and of the reciprocal rank. scikit-learn's
``ndcg_score`` computes the same NDCG.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_Floats = NDArray[np.float64]
_Counts = NDArray[np.int64]

TOP_K = ("ndcg", "recall", "mrr")
"""Names of the metrics of :func:`rank_groups`."""


class RankedGroups(NamedTuple):
    """Metrics of the groups that have a positive, ``float64 [G]`` each, in the order of groups.

    Attributes:
        ndcg: Discounted gain of the first ``k`` samples, the sum of ``1 / log2(1 + rank)`` of the positives among
            them, divided by the largest possible one.
        recall: Share of the group's positives that is among its first ``k`` samples. With more than ``k`` positives, it
            is below 1 in any order.
        mrr: Reciprocal rank of the first positive, 0 if that is not among the first ``k`` samples.
        excluded: Number of groups without a positive, for which none of these is defined.
    """

    ndcg: _Floats
    recall: _Floats
    mrr: _Floats
    excluded: int


def rank_groups(groups: _Counts, scores: _Floats, positive: _Counts, negative: _Counts, k: int) -> RankedGroups:
    """Compute the metrics of every group; rows are sorted by ``groups``, then by ascending ``scores``.

    Args:
        groups: Group of each row, ``int64 [R]``.
        scores: Score of each row, ``float64 [R]``; rows may share group and score.
        positive: Number of positive samples of each row, ``int64 [R]``.
        negative: Number of other samples of each row, ``int64 [R]``. No row is without samples.
        k: Number of samples that count, at least 1.
    """
    if not groups.size:
        return RankedGroups(np.empty(0), np.empty(0), np.empty(0), 0)
    new_group = np.r_[True, groups[1:] != groups[:-1]]
    starts = np.flatnonzero(new_group | np.r_[True, scores[1:] != scores[:-1]])
    ones = np.add.reduceat(positive, starts)
    sizes = ones + np.add.reduceat(negative, starts)
    first = np.flatnonzero(new_group[starts])  # the tie of lowest score in each group
    ends = np.cumsum(sizes)
    last = np.r_[first[1:], starts.size] - 1
    above = np.repeat(ends[last], last - first + 1) - ends  # samples of the group with a greater score
    begin, end = np.minimum(above, k), np.minimum(above + sizes, k)
    gains = np.r_[0.0, np.cumsum(1 / np.log2(np.arange(2, k + 2)))]
    share = ones / sizes  # the probability that a place of the tie has a positive
    positives = np.add.reduceat(ones, first)
    found = positives > 0
    best = gains[np.minimum(positives[found], k)]
    ndcg = np.add.reduceat(share * (gains[end] - gains[begin]), first)[found] / best
    recall = np.add.reduceat(share * (end - begin), first)[found] / positives[found]
    top = np.maximum.reduceat(np.where(ones > 0, np.arange(starts.size), -1), first)[found]
    mrr = _reciprocal_ranks(above[top], sizes[top], ones[top], k)
    ndcg, recall, mrr = (np.minimum(one, 1.0) for one in (ndcg, recall, mrr))  # sums are rounded
    return RankedGroups(ndcg, recall, mrr, int((~found).sum()))


def _reciprocal_ranks(above: _Counts, sizes: _Counts, ones: _Counts, k: int) -> _Floats:
    """Return the expected reciprocal rank of the first of ``ones`` positives in ties of ``sizes``, below ``above``.

    The first positive is at place ``t`` of a tie of ``n`` samples with ``p`` positives with the probability
    ``C(n - t, p - 1) / C(n, p)``, which is ``p / n`` at place 1 and then changes by ``(n - t - p + 1) / (n - t)``.
    """
    found = np.zeros(above.size)
    left = np.flatnonzero(above < k)
    above, sizes, ones = above[left], sizes[left], ones[left]
    chance = ones / sizes
    for place in range(1, k + 1):
        found[left] += chance / (above + place)
        goes_on = (sizes - ones >= place) & (above + place < k)
        if not goes_on.any():
            break
        left, above, sizes, ones = left[goes_on], above[goes_on], sizes[goes_on], ones[goes_on]
        chance = chance[goes_on] * (sizes - ones - place + 1) / (sizes - place)
    return found
