"""The processes that train one ranking model: each computes a share of every batch, and all make the same updates.

Tables are cut over the processes (:mod:`cordillera.embeddings.sharded_tables`); dense parameters are equal on all of
them. A batch is the one that a single process would take, and its loss is divided by the weight of the whole batch, so
that gradients are summed over ranks and results are those of one process up to rounding.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from cordillera.data.ranking.balance import SampleBalance, divide, positions, sample_costs
from cordillera.data.ranking.features import RankingBatch
from cordillera.distributed.collectives import exchange_parts
from cordillera.distributed.dtensors import is_dtensor
from cordillera.distributed.job.job import stopped_by_signals
from cordillera.distributed.job.watchdog import Watchdog
from cordillera.distributed.ledger import Traffic
from cordillera.embeddings.file_tables import FileTables
from cordillera.embeddings.row_file import ROW_FILES
from cordillera.embeddings.sharded_tables import ShardedEmbeddingTables
from cordillera.errors import CordilleraError, TrainingError
from cordillera.jagged import slice_samples, take_samples
from cordillera.models.ranking.base import RankingModel
from cordillera.training import checkpoints
from cordillera.training.ranking.rank_checkpoints import TableCheckpoints, state_without_rows
from cordillera.training.ranking.scoring import ROWS
from cordillera.training.ranking.sharded_dense import clip_gradients

Score = Callable[[RankingBatch], Tensor]
_Result = TypeVar("_Result")

_AHEAD = 2  # batches whose ids are exchanged in advance: their numbers in one step, the ids in the next


class OneRank:
    """A training in a single process.

    Attributes:
        divides: Whether a batch is computed in parts whose losses and gradients are summed.
    """

    rank, size, divides = 0, 1, False

    def stopping(self, stop: threading.Event) -> contextlib.AbstractContextManager[Any]:
        """Return the region in which signals that ask this process to stop set the event."""
        return stopped_by_signals(stop)

    def computing(self, step: int, batch: RankingBatch, part: int = 0) -> contextlib.AbstractContextManager[Any]:
        """Return the region of the forward pass of a part of a batch, after ``step`` other batches."""
        return contextlib.nullcontext()

    def shares(self, batches: Iterable[RankingBatch]) -> Iterator[tuple[RankingBatch, Sequence[RankingBatch]]]:
        """Iterate over batches, each with the parts of it that this rank computes one after another."""
        return ((batch, (batch,)) for batch in batches)

    def keep(self, parameters: Iterable[Tensor]) -> None:
        """Take note of the gradients of a part, after its backward pass."""

    def sum_step(self, parameters: Iterable[Tensor], losses: Sequence[float], stop: threading.Event) -> float:
        """Sum gradients of ``parameters`` over parts and ranks, in place, and return the sum of ``losses``.

        A request to stop that has reached any rank until now is then seen by all.
        """
        return sum(losses)

    def add_up(self, tensor: Tensor) -> Tensor:
        """Sum ``tensor`` over the ranks, in place, in the midst of a backward pass, and return it."""
        return tensor

    def traffic(self) -> Traffic:
        """Return the bytes that this rank has sent since the last call, and the seconds for which it waited."""
        return Traffic()

    def clip(self, parameters: Iterable[Tensor], largest: float | None = None) -> float:
        """Return the norm of the gradients of ``parameters``; if it exceeds ``largest``, scale them down to that."""
        return clip_gradients(parameters, largest)

    def refresh(self, optimizer: torch.optim.Optimizer) -> None:
        """Fetch the dense weights and moments that only other ranks have updated."""

    def is_asked(self, stop: threading.Event) -> bool:
        """Return whether all ranks are to stop after the present step."""
        return stop.is_set()

    def scorer(self, score: Score) -> Score:
        """Return a function that scores a whole batch on all ranks together."""
        return score

    def state_of(self, model: RankingModel) -> dict[str, Tensor]:
        """Return the tensors of a model that :meth:`save` is given."""
        return model.state_dict()

    def save(
        self,
        folder: Path,
        model: RankingModel,
        tensors: dict[str, Tensor],
        state: dict[str, Any],
        refuse: Callable[[str], CordilleraError],
    ) -> None:
        """Write a checkpoint into ``folder``, the folder of all checkpoints; for other arguments and errors, see
        :meth:`TableCheckpoints.save <cordillera.training.ranking.rank_checkpoints.TableCheckpoints.save>`.
        """
        checkpoints.save(folder, tensors, state)

    def load(self, folder: Path, step: int | None = None) -> checkpoints.Checkpoint | None:
        """Read the checkpoint of a step in ``folder``, by default the newest, or None if there is none."""
        available = checkpoints.steps(folder)
        if step is None and not available:
            return None
        return checkpoints.load(checkpoints.folder_of(folder, available[-1] if step is None else step))

    def together(self, work: Callable[[], _Result]) -> _Result:
        """Run work that may fail on some ranks so that it fails on all, and return its result."""
        return work()


class FileRank(OneRank):
    """A training in a single process with tables in a file.

    The rows of the next batch are read while the present one is computed. A checkpoint holds a copy of the file, which
    is made a part at a time.

    Args:
        tables: Tables of the model.
    """

    def __init__(self, tables: FileTables) -> None:
        self.tables = tables
        self._following: RankingBatch | None = None

    def shares(self, batches: Iterable[RankingBatch]) -> Iterator[tuple[RankingBatch, Sequence[RankingBatch]]]:
        """Iterate over batches, with the next batch already read."""
        ahead = iter(batches)
        batch = next(ahead, None)
        while batch is not None:
            self._following = next(ahead, None)
            yield batch, (batch,)
            batch = self._following

    @contextlib.contextmanager
    def computing(self, step: int, batch: RankingBatch, part: int = 0) -> Iterator[None]:
        """Prefetch the rows of the next batch once the rows of ``batch`` have been looked up."""
        following = self._following
        if following is None:
            yield
            return
        hook = self.tables.register_forward_hook(lambda *_: self.tables.prefetch(following.sparse))
        try:
            yield
        finally:
            hook.remove()

    def save(
        self,
        folder: Path,
        model: RankingModel,
        tensors: dict[str, Tensor],
        state: dict[str, Any],
        refuse: Callable[[str], CordilleraError],
    ) -> None:
        """Write a checkpoint with a copy of the file."""

        def add_rows(target: Path) -> list[str]:
            self.tables.flush()
            if (found := self.tables.not_finite()) is not None:
                raise refuse(found)
            self.tables.save(target / ROWS)
            return [f"{ROWS}/{name}" for name in ROW_FILES]

        checkpoints.save(folder, tensors, state, add_rows)


class _DropoutOfBatch(TorchFunctionMode):
    """Draws dropout masks for all ``samples`` of a batch, and uses those of this rank's ``own`` samples.

    Each of the ``size`` ranks draws the same random numbers as a single process would.
    """

    def __init__(self, samples: int, own: Tensor, size: int) -> None:
        super().__init__()
        self.samples, self.own, self.size = samples, own, size

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
        per_sample = len(given) // len(self.own)
        noise = given.new_empty(self.samples, per_sample, *given.shape[1:]).bernoulli_(1 - p)
        return given * noise.index_select(0, self.own).view_as(given).div_(1 - p)


class ManyRanks(OneRank):
    """The ranks of a process group.

    Args:
        tables: Tables of this rank's model, and the ranks.
        watchdog: Watchdog of their job, which signals reach.
        balance: Division of the samples of a batch (:func:`~cordillera.data.ranking.balance.divide`).
        of_sample: Cost of a sample beside that of its ids, in ids, for ``variable``.
    """

    divides = True

    def __init__(
        self,
        tables: ShardedEmbeddingTables,
        watchdog: Watchdog,
        balance: SampleBalance = "none",
        of_sample: float = 1.0,
    ) -> None:
        links = tables.links
        self.tables = tables
        self.links, self.rank, self.size, self.watchdog = links, links.rank, links.size, watchdog
        self.balance, self.of_sample = balance, of_sample
        self._asked, self._told = False, Traffic()
        self._own = torch.empty(0, dtype=torch.int64)  # samples of the batch that is computed

    def stopping(self, stop: threading.Event) -> contextlib.AbstractContextManager[Any]:
        """Return an empty region; the job handles signals."""
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def computing(self, step: int, batch: RankingBatch, part: int = 0) -> Iterator[None]:
        """Draw dropout within the region as one process does, and go on with the tables' exchanges at its end."""
        self.watchdog.at(f"step {step + 1}")
        with _DropoutOfBatch(len(batch), self._own, self.size):
            yield
        self.tables.advance()

    def shares(self, batches: Iterable[RankingBatch]) -> Iterator[tuple[RankingBatch, Sequence[RankingBatch]]]:
        """Iterate over batches with this rank's parts; ids of the next ones are exchanged while one is computed."""
        ahead: deque[tuple[RankingBatch, Sequence[RankingBatch], Tensor]] = deque()
        self.tables.forget()
        for batch in chain(batches, [None] * _AHEAD):
            if batch is not None:
                samples = torch.from_numpy(self._divided(batch)[self.rank])
                own = self._parts_of(batch, samples)
                for part in own:
                    self.tables.prefetch(part.sparse)
                ahead.append((batch, own, samples))
            if ahead and (batch is None or len(ahead) > _AHEAD):
                whole, parts, self._own = ahead.popleft()
                yield whole, parts

    def _parts_of(self, batch: RankingBatch, samples: Tensor) -> Sequence[RankingBatch]:
        """Return a rank's samples of a batch, in parts that it computes one after another."""
        return (self._share(batch, samples),)

    def _divided(self, batch: RankingBatch) -> list[NDArray[np.int64]]:
        """Return the positions of each rank's samples of a batch."""
        costs = np.zeros(len(batch))
        if self.balance != "none" and batch.sparse.keys:
            costs = sample_costs(batch.sparse, self.of_sample)
        return divide(costs, self.size, self.balance)

    def _share(self, batch: RankingBatch, samples: Tensor) -> RankingBatch:
        """Return the samples of a batch at given positions."""
        first, end = (int(samples[0]), int(samples[-1]) + 1) if len(samples) else (0, 0)
        if end - first == len(samples):
            sparse = slice_samples(batch.sparse, first, end)
        else:
            sparse = take_samples(batch.sparse, samples.numpy())

        return batch.select(lambda tensor: tensor.index_select(0, samples), sparse)

    def sum_step(self, parameters: Iterable[Tensor], losses: Sequence[float], stop: threading.Event) -> float:
        """Sum gradients, and beside them the losses and requests to stop."""
        found = [parameter.grad for parameter in parameters if parameter.grad is not None]
        gradients = [gradient for gradient in found if not is_dtensor(gradient)]  # others are summed already
        numbers = torch.tensor([sum(losses), float(stop.is_set() or self.watchdog.should_stop)], dtype=torch.float64)
        self.links.all_reduce("loss", numbers)
        self._asked = bool(numbers[1] > 0)
        if gradients:
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
            self.links.all_reduce("dense gradients", flat)
            for gradient, part in zip(gradients, flat.split([one.numel() for one in gradients]), strict=True):
                gradient.copy_(part.view_as(gradient))
        return float(numbers[0])

    def add_up(self, tensor: Tensor) -> Tensor:
        """Sum ``tensor`` over the ranks, in place, and return it."""
        return self.links.all_reduce("balance", tensor.contiguous())

    def traffic(self) -> Traffic:
        """Return the bytes that this rank has sent since the last call, and the seconds for which it waited."""
        before, self._told = self._told, self.links.ledger.total()
        waited = self._told.exposed_seconds - before.exposed_seconds
        return Traffic(bytes=self._told.bytes - before.bytes, exposed_seconds=waited)

    def is_asked(self, stop: threading.Event) -> bool:
        """Return whether any rank was asked to stop before gradients of the present step were summed."""
        return self._asked

    def scorer(self, score: Score) -> Score:
        """Return a function that scores this rank's samples and gathers the scores of all."""

        def together(batch: RankingBatch) -> Tensor:
            divided = self._divided(batch)
            logits = score(self._share(batch, torch.from_numpy(divided[self.rank])))
            counts = [len(samples) for samples in divided]
            found = torch.cat(exchange_parts(self.links, "scores", [logits] * self.size, counts, 0).wait())
            return found if self.balance == "none" else found.index_select(0, torch.from_numpy(positions(divided)))

        return together

    def state_of(self, model: RankingModel) -> dict[str, Tensor]:
        """Return the tensors of a model without the rows of its tables."""
        return state_without_rows(model)

    def save(
        self,
        folder: Path,
        model: RankingModel,
        tensors: dict[str, Tensor],
        state: dict[str, Any],
        refuse: Callable[[str], CordilleraError],
    ) -> None:
        """Write a checkpoint, each rank its own parts of the tables."""
        TableCheckpoints(folder, self.links).save(model, tensors, state, refuse)

    def load(self, folder: Path, step: int | None = None) -> checkpoints.Checkpoint | None:
        """Read a checkpoint, which all ranks verify together."""
        return TableCheckpoints(folder, self.links).load(step)

    def together(self, work: Callable[[], _Result]) -> _Result:
        """Run work; an error of one rank is raised on all."""
        return TableCheckpoints(Path(), self.links).together(work)


def cut_samples(batch: RankingBatch, first: int, end: int) -> RankingBatch:
    """Return the samples from ``first`` up to ``end`` of a batch."""
    return batch.select(lambda tensor: tensor[first:end], slice_samples(batch.sparse, first, end))
