"""Baselines of variable-length packing with delay: arrival order, windows of fixed length, the exact optimum.

All give iterations like :class:`cordillera.data.packing.packer.Packer`, over a stream of document lengths in tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import ArrayLike

from cordillera.data.packing.packer import Iteration, Microbatch, PackedDocument, global_batches
from cordillera.data.packing.work import DocumentWork
from cordillera.errors import DataError
from cordillera.partition import NOWHERE, Bins, _checked, _sized, heaviest_first, longest_processing_time


def in_arrival_order(lengths: Iterable[int], microbatches: int, context: int, cut: bool = False) -> Iterator[Iteration]:
    """Fill sequences one after another.

    Args:
        lengths: Lengths of the stream's documents, in tokens.
        microbatches: Number of sequences in an iteration.
        context: Number of tokens of a sequence.
        cut: Whether a document that does not fit goes on in the next sequence, so that all are full. Its parts share
            its number and do not see each other: this computes less than packing whole documents does, and trains on
            shorter ones. Otherwise it begins the next sequence.

    Yields:
        Iterations, in order.

    Raises:
        DataError: A whole document is longer than the context.
    """
    sequences = _sequences(lengths, context, cut)
    for number in itertools.count():
        some = list(itertools.islice(sequences, microbatches))
        if not some:
            return
        some += [[]] * (microbatches - len(some))
        yield Iteration(number, tuple(Microbatch(PackedDocument(*part, number) for part in one) for one in some))


def _sequences(lengths: Iterable[int], context: int, cut: bool) -> Iterator[list[tuple[int, int]]]:
    """Number and length of the documents, or of their parts, in each sequence."""
    parts: list[tuple[int, int]] = []
    room = context
    for number, length in enumerate(lengths):
        left = length
        if left > room and not cut:
            if left > context:
                raise DataError(f"{left} tokens do not fit into {context}", where=f"document {number}")
            yield parts
            parts, room = [], context
        while left:
            taken = min(left, room)
            parts.append((number, taken))
            left, room = left - taken, room - taken
            if not room:
                yield parts
                parts, room = [], context
    if parts:
        yield parts


def fixed_length(
    lengths: Iterable[int], microbatches: int, context: int, window: int, workload: DocumentWork
) -> Iterator[Iteration]:
    """Pack whole documents into sequences of at most the context, the heaviest first, over windows of global batches.

    Documents that do not fit are packed with the next window; sequences of similar work share an iteration.

    Source: Fixed-4D of the WLB-LLM paper, section 3.2.

    Args:
        lengths: Lengths of the stream's documents, in tokens.
        microbatches: Number of sequences in an iteration.
        context: Largest number of tokens of a sequence.
        window: Number of global batches that are packed together; a longer window makes the order of documents less
            random.
        workload: Predicted work of a document.

    Yields:
        Iterations, in order.

    Raises:
        DataError: A document is longer than the context, or the window is below 1.
    """
    if window < 1:
        raise DataError(f"{window} batches are no window", where="window", remedy="at least 1")
    bins, number = window * microbatches, 0
    left: list[PackedDocument] = []
    batches = enumerate(_documents(lengths, microbatches, context))
    while True:
        new = [document for _, batch in itertools.islice(batches, window) for document in batch]
        if not new and not left:
            return
        documents = left + new
        sizes = [document.length for document in documents]
        if max(sizes) > context:
            raise DataError(f"{max(sizes)} tokens do not fit into {context}", where="lengths")
        work = list(map(workload, sizes))
        packed, left = _apart(documents, longest_processing_time(work, bins, sizes, context), bins)
        packed.sort(key=lambda sequence: -workload.of(sequence.lengths))
        for first in range(0, bins, microbatches):
            yield Iteration(number, tuple(packed[first : first + microbatches]))
            number += 1


def exactly(
    lengths: Iterable[int],
    microbatches: int,
    context: int,
    bound: int,
    workload: DocumentWork,
    seconds: float = 60.0,
    gap: float = 1e-3,
) -> Iterator[Iteration]:
    """Pack every global batch on its own so that the heaviest microbatch is as light as possible: nothing is delayed.

    Args:
        lengths: Lengths of the stream's documents, in tokens.
        microbatches: Number of microbatches in an iteration.
        context: Number of tokens of a global batch per microbatch.
        bound: Largest number of tokens of a microbatch.
        workload: Predicted work of a document.
        seconds: Longest time in seconds for each batch.
        gap: Largest relative excess of the heaviest microbatch over the proven bound.

    Yields:
        Iterations, in order.

    Raises:
        DataError: The documents of a batch do not fit, or the time was too short.
    """
    for number, documents in enumerate(_documents(lengths, microbatches, context)):
        sizes = [document.length for document in documents]
        places = exact(list(map(workload, sizes)), microbatches, sizes, bound, seconds, gap)
        yield Iteration(number, tuple(_apart(documents, places, microbatches)[0]))


def _documents(lengths: Iterable[int], microbatches: int, context: int) -> Iterator[list[PackedDocument]]:
    first = 0
    for number, batch in enumerate(global_batches(lengths, microbatches * context)):
        yield [PackedDocument(first + i, length, number) for i, length in enumerate(batch)]
        first += len(batch)


def _apart(
    documents: Sequence[PackedDocument], places: Bins, bins: int
) -> tuple[list[Microbatch], list[PackedDocument]]:
    """Documents of each bin, and those that are in none."""
    packed: list[list[PackedDocument]] = [[] for _ in range(bins)]
    left: list[PackedDocument] = []
    for document, place in zip(documents, places.tolist(), strict=True):
        (left if place == NOWHERE else packed[place]).append(document)
    return list(map(Microbatch, packed)), left


def exact(
    weights: ArrayLike,
    bins: int,
    sizes: ArrayLike | None = None,
    room: float | None = None,
    seconds: float = 60.0,
    gap: float = 0.0,
) -> Bins:
    """Find the partition with the lightest heaviest bin by HiGHS's branch and bound, for small cases.

    Four arguments are those of :func:`cordillera.partition.list_scheduling`.

    Args:
        seconds: Time limit in seconds.
        gap: Largest relative excess of the heaviest bin over the proven bound.

    Raises:
        DataError: If weights or sizes are invalid, there is less than one bin, items do not fit, or the time was too
            short.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import coo_array, hstack, kron, vstack

    work = _checked(weights, bins)
    needed, space = _sized(sizes, room, len(work))
    n, unit = len(work), work.max(initial=0.0)
    if not n:
        return np.empty(0, dtype=np.int64)
    # Variables: item i in bin j at i * bins + j, then the heaviest bin's weight, in units of the heaviest item.
    last = np.zeros(n * bins + 1)
    last[-1] = 1.0
    ones, identity = np.ones((1, bins)), coo_array(np.eye(bins))
    placed = hstack([kron(coo_array(np.eye(n)), ones), coo_array((n, 1))])
    scaled = coo_array((work / (unit or 1.0))[None])
    below = hstack([kron(scaled, identity), coo_array(-np.ones((bins, 1)))])
    rules = [LinearConstraint(placed.tocsr(), 1.0, 1.0), LinearConstraint(below.tocsr(), -np.inf, 0.0)]
    if sizes is not None:
        fits = hstack([kron(coo_array(needed[None] / (space or 1.0)), identity), coo_array((bins, 1))])
        rules.append(LinearConstraint(vstack([fits]).tocsr(), -np.inf, 1.0 if space else 0.0))
    lower, upper = np.zeros(n * bins + 1), np.ones(n * bins + 1)
    lower[-1], upper[-1] = max(1.0 if unit else 0.0, scaled.sum() / bins), np.inf
    for row, item in enumerate(heaviest_first(work)[:bins].tolist()):  # bins are equal: item k is in the first k
        upper[item * bins + row + 1 : (item + 1) * bins] = 0.0
    kind = np.ones(n * bins + 1)
    kind[-1] = 0
    options = {"time_limit": seconds, "mip_rel_gap": gap}
    found = milp(last, integrality=kind, bounds=Bounds(lower, upper), constraints=rules, options=options)
    if found.status:
        message = "items do not fit into the bins" if found.status == 2 else f"no proof within {seconds:g} s"
        raise DataError(message, where=f"{n} items in {bins} bins")
    return found.x[:-1].reshape(n, bins).argmax(axis=1).astype(np.int64)
