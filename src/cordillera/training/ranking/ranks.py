"""The processes that train one ranking model: each computes a share of every batch, and all make the same updates.

Tables are cut over the processes (:mod:`cordillera.embeddings.sharded_tables`); dense parameters are equal on all of
them. A batch is the one that a single process would take, and its loss is divided by the weight of the whole batch, so
that gradients are summed over ranks and results are those of one process up to rounding.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from cordillera.data.ranking.features import RankingBatch
from cordillera.distributed.collectives import exchange_parts
from cordillera.distributed.job.job import stopped_by_signals
from cordillera.distributed.job.watchdog import Watchdog
from cordillera.embeddings.sharded_tables import ShardedEmbeddingTables
from cordillera.errors import CordilleraError, RunError, TrainingError
from cordillera.jagged import slice_samples

Score = Callable[[RankingBatch], Tensor]

_AHEAD = 2  # batches whose ids are exchanged in advance: their numbers in one step, the ids in the next


class OneRank:
    """A training in a single process."""

    rank, size = 0, 1

    def stopping(self, stop: threading.Event) -> contextlib.AbstractContextManager[Any]:
        """Return the region in which signals that ask this process to stop set the event."""
        return stopped_by_signals(stop)

    def computing(self, step: int, batch: RankingBatch) -> contextlib.AbstractContextManager[Any]:
        """Return the region of the forward pass of a batch, after ``step`` others."""
        return contextlib.nullcontext()

    def shares(self, batches: Iterable[RankingBatch]) -> Iterator[tuple[RankingBatch, RankingBatch]]:
        """Iterate over batches, each with this rank's samples of it."""
        return ((batch, batch) for batch in batches)

    def sum_step(self, parameters: Iterable[Tensor], loss: float, stop: threading.Event) -> float:
        """Sum gradients of ``parameters`` over ranks, in place, and return the sum of ``loss``.

        A request to stop that has reached any rank until now is then seen by all.
        """
        return loss

    def is_asked(self, stop: threading.Event) -> bool:
        """Return whether all ranks are to stop after the present step."""
        return stop.is_set()

    def scorer(self, score: Score) -> Score:
        """Return a function that scores a whole batch on all ranks together."""
        return score

    def first(self, work: Callable[[], Any]) -> None:
        """Run work on rank 0 while the others wait; an error is raised on all ranks."""
        work()


class _DropoutOfBatch(TorchFunctionMode):
    """Draws dropout for a whole batch and takes that of the samples from ``first`` up to ``end``.

    All ranks, of which there are ``size``, draw the same random numbers as a single process would.
    """

    def __init__(self, samples: int, first: int, end: int, size: int) -> None:
        super().__init__()
        self.samples, self.first, self.end, self.size = samples, first, end, size

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not functional.dropout:
            return func(*args, **(kwargs or {}))
        return self._dropout(*args, **(kwargs or {}))

    def _dropout(self, given: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or p == 0:
            return given
        if self.samples < self.size:  # a rank without samples cannot know how many numbers the others draw
            raise TrainingError(
                f"with dropout, no batch may have fewer samples than processes: {self.samples} for {self.size}",
                where="data.batch_size",
                remedy="choose another batch size, so that the last batch of an epoch is larger, or dropout = 0",
            )
        per_sample = len(given) // (self.end - self.first)
        noise = given.new_empty(self.samples * per_sample, *given.shape[1:]).bernoulli_(1 - p)
        return given * noise[self.first * per_sample : self.end * per_sample].div_(1 - p)


class ManyRanks(OneRank):
    """The ranks of a process group.

    Args:
        tables: Tables of this rank's model, and the ranks.
        watchdog: Watchdog of their job, which signals reach.
    """

    def __init__(self, tables: ShardedEmbeddingTables, watchdog: Watchdog) -> None:
        links = tables.links
        self.tables = tables
        self.links, self.rank, self.size, self.watchdog = links, links.rank, links.size, watchdog
        self._asked = False

    def stopping(self, stop: threading.Event) -> contextlib.AbstractContextManager[Any]:
        """Return an empty region; the job handles signals."""
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def computing(self, step: int, batch: RankingBatch) -> Iterator[None]:
        """Draw dropout within the region as one process does, and go on with the tables' exchanges at its end."""
        self.watchdog.at(f"step {step + 1}")
        with _DropoutOfBatch(len(batch), *self._bounds(len(batch)), self.size):
            yield
        self.tables.advance()

    def _bounds(self, samples: int) -> tuple[int, int]:
        return samples * self.rank // self.size, samples * (self.rank + 1) // self.size

    def shares(self, batches: Iterable[RankingBatch]) -> Iterator[tuple[RankingBatch, RankingBatch]]:
        """Iterate over batches with this rank's shares; ids of the next ones are exchanged while one is computed."""
        ahead: deque[tuple[RankingBatch, RankingBatch]] = deque()
        self.tables.forget()
        for batch in batches:
            own = self._share(batch)
            self.tables.prefetch(own.sparse)
            ahead.append((batch, own))
            if len(ahead) > _AHEAD:
                yield ahead.popleft()
        yield from ahead

    def _share(self, batch: RankingBatch) -> RankingBatch:
        """Return the samples of a batch between equal shares of its length."""
        first, end = self._bounds(len(batch))

        def cut(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor[first:end]

        return replace(
            batch,
            dense=batch.dense[first:end],
            sparse=slice_samples(batch.sparse, first, end),
            labels=cut(batch.labels),
            weights=cut(batch.weights),
            groups=cut(batch.groups),
            timestamps=cut(batch.timestamps),
            rows=cut(batch.rows),
        )

    def sum_step(self, parameters: Iterable[Tensor], loss: float, stop: threading.Event) -> float:
        """Sum gradients, and beside them the loss and requests to stop."""
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        numbers = torch.tensor([loss, float(stop.is_set() or self.watchdog.should_stop)], dtype=torch.float64)
        self.links.all_reduce("loss", numbers)
        self._asked = bool(numbers[1] > 0)
        if gradients:
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
            self.links.all_reduce("dense gradients", flat)
            for gradient, part in zip(gradients, flat.split([one.numel() for one in gradients]), strict=True):
                gradient.copy_(part.view_as(gradient))
        return float(numbers[0])

    def is_asked(self, stop: threading.Event) -> bool:
        """Return whether any rank was asked to stop before gradients of the present step were summed."""
        return self._asked

    def scorer(self, score: Score) -> Score:
        """Return a function that scores this rank's samples and gathers the scores of all."""

        def together(batch: RankingBatch) -> Tensor:
            logits = score(self._share(batch))
            samples = len(batch)
            counts = [samples * (rank + 1) // self.size - samples * rank // self.size for rank in range(self.size)]
            return torch.cat(exchange_parts(self.links, "scores", [logits] * self.size, counts, 0).wait())

        return together

    def first(self, work: Callable[[], Any]) -> None:
        """Run work on rank 0; the others get its error as text."""
        problem: CordilleraError | None = None
        if self.rank == 0:
            try:
                work()
            except CordilleraError as error:
                problem = error
        said = b"" if problem is None else json.dumps([problem.what, problem.where, problem.remedy]).encode()
        length = torch.tensor([len(said)])
        self.links.all_reduce("errors", length)
        if not int(length):
            return
        text = torch.zeros(int(length), dtype=torch.int64)
        text[: len(said)] = torch.tensor(list(said), dtype=torch.int64)
        self.links.all_reduce("errors", text, dist.ReduceOp.SUM)
        if problem is not None:
            raise problem
        what, where, remedy = json.loads(bytes(text.tolist()))
        raise RunError(what, where=where, remedy=remedy)
