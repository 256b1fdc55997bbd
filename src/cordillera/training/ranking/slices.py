"""Training in slices: the result does not depend on the number of processes, bit for bit.

Every batch is cut into a fixed number of consecutive slices, of which each of ``R`` processes computes equally many,
one after another, with weights that change once a step. A slice has the same shape, weights and random numbers on any
number of processes, and so the same gradient. Gradients are added slice after slice in float32, and losses in float64,
in one process as in many.

Of ``n`` dense weights and ``S`` slices, a rank sends ``(S / R + 1) * n * (R - 1) / R`` numbers a step: to each rank its
part of the gradients of all its slices, and then the sum of its own part. For ``S = R`` that is as much as a sum over
ranks by reduce-scatter and all-gather takes.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from cordillera.data.ranking.balance import SampleBalance
from cordillera.data.ranking.features import RankingBatch
from cordillera.distributed.collectives import Collectives, exchange_parts
from cordillera.distributed.job.watchdog import Watchdog
from cordillera.embeddings.prioritised_tables import FrozenWindowTables, PrioritisedEmbeddingTables
from cordillera.embeddings.sharded_tables import ShardedEmbeddingTables
from cordillera.embeddings.tables import EmbeddingTables
from cordillera.models.ranking.base import RankingModel
from cordillera.training.optimizers import embedding_tables
from cordillera.training.ranking.config import RankingParallelConfig, TrainingConfig
from cordillera.training.ranking.ranks import ManyRanks, OneRank, Score, cut_samples

TABLES = {"plain": FrozenWindowTables, "prioritised": PrioritisedEmbeddingTables}
"""Tables of a training in slices, by the exchange of their rows."""

_PARTS, _SUMS = 31, 32  # tags of messages; those of lookups are smaller


def why_not(training: TrainingConfig, parallel: RankingParallelConfig) -> list[tuple[str, str]]:
    """Return the reasons, by key, why ``training`` in slices cannot run under ``parallel``."""
    found = []
    if training.slices % parallel.processes:
        found.append(("training.slices", f"{parallel.processes} processes do not divide {training.slices} slices"))
    if parallel.dense != "replicated":
        found.append(("parallel.dense", "slices need whole dense weights: set 'replicated', or training.slices = 1"))
    if parallel.balance != "none":
        found.append(("parallel.balance", "slices are consecutive samples: set 'none', or training.slices = 1"))
    if parallel.exchange == "towers":
        found.append(("parallel.exchange", "towers are not computed in slices: set 'plain', or training.slices = 1"))
    if parallel.pool == "bags":
        found.append(("parallel.pool", "sums of bags depend on the placement: set 'rows', or training.slices = 1"))
    if parallel.codec not in ("raw", "distinct", "auto"):
        why = "depends on which rows travel: set 'raw', 'distinct' or 'auto', or training.slices = 1"
        found.append(("parallel.codec", f"{parallel.codec!r} {why}"))
    return found


class _Slices:
    """The slices of every batch, and the gradients of those that one rank computes.

    Args:
        count: Number of slices of a batch.
        rank: This rank.
        size: Number of ranks, which divides ``count``.
    """

    def __init__(self, count: int, rank: int, size: int) -> None:
        self.count, self.size = count, size
        self.own = range(count * rank // size, count * (rank + 1) // size)
        self._seeds: list[int] = []
        self._kept: list[Tensor] = []
        self._has_gradient: set[int] = set()

    def cut(self, batch: RankingBatch) -> list[RankingBatch]:
        """Return this rank's slices of a batch; some are empty if it has fewer samples than slices.

        Dense values are copied to aligned addresses, because products of matrices may depend on the alignment.
        """
        edges = [len(batch) * i // self.count for i in (*self.own, self.own.stop)]
        found = [cut_samples(batch, first, end) for first, end in pairwise(edges)]
        return [replace(part, dense=part.dense.clone()) for part in found]

    @contextlib.contextmanager
    def drawing(self, part: int) -> Iterator[None]:
        """Draw random numbers within the region from a sequence of this rank's slice ``part`` alone.

        The first slice of a batch draws the seeds of all slices, so that all ranks leave the generator alike.
        """
        if part == 0:
            self._seeds = torch.randint(1 << 62, (self.count,)).tolist()
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(self._seeds[self.own[part]])
            yield

    def keep(self, parameters: Sequence[Tensor]) -> None:
        """Move gradients of a slice out of ``parameters``; in one process, add them to those of previous slices."""
        pieces = []
        for i, parameter in enumerate(parameters):
            if parameter.grad is None:
                pieces.append(torch.zeros(parameter.numel()))
            else:
                pieces.append(parameter.grad.reshape(-1))
                self._has_gradient.add(i)
            parameter.grad = None
        flat = torch.cat([torch.empty(0), *pieces])
        if self.size == 1 and self._kept:
            self._kept[0] += flat
        else:
            self._kept.append(flat)

    def put_sum(self, parameters: Sequence[Tensor], links: Collectives | None = None) -> None:
        """Set the gradients of ``parameters`` to the sum over all slices, with other ranks' slices over ``links``."""
        kept, self._kept = self._kept, []
        given, self._has_gradient = self._has_gradient, set()
        total = kept[0] if links is None else self._sum_in_order(links, kept)
        parts = total.split([parameter.numel() for parameter in parameters])
        for i, (parameter, part) in enumerate(zip(parameters, parts, strict=True)):
            if i in given:
                parameter.grad = part.view_as(parameter)

    def _sum_in_order(self, links: Collectives, kept: Sequence[Tensor]) -> Tensor:
        """Return the sum of flat gradients over all ranks' slices, ``float32 [n]``, added in their order.

        Each rank adds a part of the numbers of all slices, and sends the sums to the others.
        """
        edges = [len(kept[0]) * rank // links.size for rank in range(links.size + 1)]
        widths = [end - first for first, end in pairwise(edges)]
        sent = [torch.cat([flat[first:end] for flat in kept]) for first, end in pairwise(edges)]
        width = widths[links.rank]
        counts = [len(kept) * width] * links.size
        arrived = exchange_parts(links, "dense gradients", sent, counts, _PARTS).wait()
        first, *others = torch.cat(arrived).view(self.count, width)
        total = first.clone()
        for other in others:
            total += other
        return torch.cat(exchange_parts(links, "dense gradients", [total] * links.size, widths, _SUMS).wait())


class SlicedRank(OneRank):
    """A training in slices in a single process, on a CPU.

    Args:
        tables: Tables of the model.
        slices: Number of slices of a batch.
    """

    divides = True

    def __init__(self, tables: Iterable[EmbeddingTables], slices: int) -> None:
        self.tables, self._slices = tuple(tables), _Slices(slices, 0, 1)

    def computing(self, step: int, batch: RankingBatch, part: int = 0) -> contextlib.AbstractContextManager[None]:
        """Return the region of the forward pass of slice ``part`` of ``batch``, after ``step`` other batches.

        Random numbers are drawn from the slice's own sequence.
        """
        return self._slices.drawing(part)

    def shares(self, batches: Iterable[RankingBatch]) -> Iterator[tuple[RankingBatch, Sequence[RankingBatch]]]:
        """Iterate over ``batches``, each with its slices."""
        return ((batch, self._slices.cut(batch)) for batch in batches)

    def keep(self, parameters: Iterable[Tensor]) -> None:
        """Add gradients of ``parameters`` to the previous slices' gradients; keep the sum of each row's gradients."""
        self._slices.keep(tuple(parameters))
        for tables in self.tables:
            tables.reduce_pending()

    def sum_step(self, parameters: Iterable[Tensor], losses: Sequence[float], stop: threading.Event) -> float:
        """Give ``parameters`` their gradients, and return the sum of ``losses``; ``stop`` is not read."""
        self._slices.put_sum(tuple(parameters))
        return sum(losses)

    def scorer(self, score: Score) -> Score:
        """Return a function that calls ``score`` for every slice of a batch."""
        return lambda batch: torch.cat([score(part) for part in self._slices.cut(batch)])


class SlicedRanks(ManyRanks):
    """The ranks of a process group that train in slices.

    Args:
        tables: Tables of this rank's model, and the ranks.
        watchdog: Watchdog of their job.
        slices: Number of slices of a batch, a multiple of the number of ranks.
    """

    def __init__(self, tables: ShardedEmbeddingTables, watchdog: Watchdog, slices: int) -> None:
        super().__init__(tables, watchdog)
        self._slices = _Slices(slices, self.rank, self.size)

    @contextlib.contextmanager
    def computing(self, step: int, batch: RankingBatch, part: int = 0) -> Iterator[None]:
        """Return the region of the forward pass of slice ``part`` of ``batch``, after ``step`` other batches.

        Random numbers are drawn from the slice's own sequence. At its end, the rows of the next slice are sent.
        """
        self.watchdog.at(f"step {step + 1}")
        with self._slices.drawing(part):
            yield
        self.tables.advance()
        if part + 1 < len(self._slices.own) and isinstance(self.tables, FrozenWindowTables):
            self.tables.fetch_ahead()

    def _parts_of(self, batch: RankingBatch, samples: Tensor) -> Sequence[RankingBatch]:
        return self._slices.cut(batch)

    def keep(self, parameters: Iterable[Tensor]) -> None:
        """Keep the gradients of ``parameters`` from one slice, and send the gradients of rows."""
        self._slices.keep(tuple(parameters))
        if isinstance(self.tables, FrozenWindowTables):
            self.tables.send_gradients()

    def sum_step(self, parameters: Iterable[Tensor], losses: Sequence[float], stop: threading.Event) -> float:
        """Sum gradients of ``parameters`` over all slices, and beside them ``losses`` and requests to ``stop``."""
        asked = float(stop.is_set() or self.watchdog.should_stop)
        numbers = self.links.all_gather("losses", torch.tensor([[*losses, asked]], dtype=torch.float64))
        self._asked = bool(numbers[:, -1].any())
        self._slices.put_sum(tuple(parameters), self.links)
        return sum(numbers[:, :-1].flatten().tolist())

    def scorer(self, score: Score) -> Score:
        """Return a function that calls ``score`` for this rank's slices of a batch and gathers the scores of all."""

        def together(batch: RankingBatch) -> Tensor:
            logits = torch.cat([score(part) for part in self._slices.cut(batch)])
            edges = [len(batch) * rank // self.size for rank in range(self.size + 1)]
            counts = [end - first for first, end in pairwise(edges)]
            return torch.cat(exchange_parts(self.links, "scores", [logits] * self.size, counts, 0).wait())

        return together


def alone(model: RankingModel, slices: int) -> OneRank:
    """Return the training of a ``model`` in one process, with batches cut into ``slices`` slices; 1 for none."""
    return OneRank() if slices == 1 else SlicedRank(embedding_tables(model).values(), slices)


def ranks_of(
    tables: ShardedEmbeddingTables,
    slices: int,
    watchdog: Watchdog,
    balance: SampleBalance = "none",
    of_sample: float = 1.0,
) -> ManyRanks:
    """Return the training of a model in several processes, with batches cut into ``slices`` slices; 1 for none.

    Other arguments, ``tables``, ``watchdog``, ``balance`` and ``of_sample``, are those of
    :class:`~cordillera.training.ranking.ranks.ManyRanks`.
    """
    return ManyRanks(tables, watchdog, balance, of_sample) if slices == 1 else SlicedRanks(tables, watchdog, slices)
