"""Scores of single rows that do not depend on the rows beside them.

A product of matrices computes a row with other code, and rounds it otherwise, for other numbers of rows. Rows are
therefore scored in whole blocks (:data:`~cordillera.kernels.repeatable.BLOCK`); the last one is filled with copies of
its last row. A row then has the same bits whether it is scored alone, among rows of other requests, or in a file.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray
from scipy.special import expit
from torch import nn

from cordillera.data.ranking.encoding import EncodedRows, Encoder
from cordillera.data.ranking.logs.columns import RowPlace
from cordillera.errors import NumericsError
from cordillera.jagged import JaggedTensor
from cordillera.kernels.repeatable import BLOCK
from cordillera.models.ranking.base import RankingModel
from cordillera.models.ranking.sequence import HSTUModel, SequenceModel, share_histories
from cordillera.numerics.emulation.emulation import EmulationConfig
from cordillera.numerics.formats.precision import Precision
from cordillera.training.ranking.scoring import scorer

DEVICE_BLOCK = 4096
"""Number of rows that are always scored together on a GPU, whose libraries choose code by every size."""

_SMOOTH = (nn.SiLU, nn.GELU, nn.Tanh, nn.Sigmoid)


class RowScorer:
    """Encoder and model of a run, which give a row the same score to the bit in any company.

    Calls must not overlap: the model is not thread-safe.

    Args:
        encoder: Fitted encoder of the run.
        model: Trained model on ``device``.
        tasks: Names of the model's tasks.
        precision: Precision of everything without one of its own.
        emulate: Emulation that the run was trained with, or None.
        fixed: Number of rows that are always scored together, for kernels chosen by the number of rows; None for any
            number of blocks.
    """

    def __init__(
        self,
        encoder: Encoder,
        model: RankingModel,
        tasks: tuple[str, ...],
        device: torch.device,
        precision: Precision,
        *,
        emulate: EmulationConfig | None = None,
        fixed: int | None = None,
    ) -> None:
        self.encoder, self.model, self.tasks, self.device = encoder, model, tasks, device
        self.fixed = DEVICE_BLOCK if fixed is None and device.type != "cpu" else fixed
        self._score = scorer(model, device, precision, emulate)
        # Vectors of a smooth function end where the part of a thread ends, and what is left is rounded otherwise.
        self._even_threads = isinstance(model, HSTUModel) or any(isinstance(one, _SMOOTH) for one in model.modules())
        self._histories: list[int] = []
        if isinstance(model, SequenceModel):
            lists = [feature.name for feature in encoder.features.sparse if feature.is_list]
            self._histories = [lists.index(name) for name in model.config.sequences]

    def score(self, frame: pl.DataFrame, where: str | RowPlace = "rows") -> NDArray[np.float64]:
        """Return probabilities ``[N, tasks]`` of the rows of a frame, whose errors name ``where``.

        Raises:
            DataError: If a column is missing, or a value is one that training would have refused.
            NumericsError: If a logit is NaN or infinite.
        """
        place = RowPlace(where) if isinstance(where, str) else where
        return probabilities(self.finite_logits(self.encoder.encode(frame, where=place, labels=False), place))

    def finite_logits(self, rows: EncodedRows, place: RowPlace, batch_size: int = 8192) -> NDArray[np.float64]:
        """Return :meth:`logits` of rows by ``batch_size``, all of them finite; ``place`` is that of the rows in errors.

        Raises:
            NumericsError: If a logit is NaN or infinite.
        """
        found = self.logits(rows, batch_size)
        wrong = np.argwhere(~np.isfinite(found))
        if len(wrong):
            row, column = wrong[0]
            name = "score" if len(self.tasks) == 1 else f"score_{self.tasks[column]}"
            raise NumericsError(
                f"the model's logit is {found[row, column]}",
                where=place.at(row, name),
                remedy="look for weights that are not finite, or for values far beyond those of training",
            )
        return found

    def logits(self, rows: EncodedRows, batch_size: int = 8192) -> NDArray[np.float64]:
        """Return the logits ``[N, tasks]`` of encoded rows, computed from at most ``batch_size`` rows at a time."""
        size = batch_size if self.fixed is None else max(1, self.fixed - bool(self._histories))
        found = [np.zeros((0, len(self.tasks)))]
        with self._threads():
            for begin in range(0, len(rows), size):
                part = np.arange(begin, min(begin + size, len(rows)))
                logits = self._score(self._in_blocks(rows, part).batch())
                found.append(logits[: len(part)].double().numpy())
        return np.concatenate(found)

    @contextlib.contextmanager
    def _threads(self) -> Iterator[None]:
        """Compute with a power of two of threads if the model needs it, so that parts of blocks are whole vectors."""
        before = torch.get_num_threads()
        count = 1 << (before.bit_length() - 1)
        if not self._even_threads or count == before:
            yield
            return
        torch.set_num_threads(count)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    def _in_blocks(self, rows: EncodedRows, part: NDArray[np.int64]) -> EncodedRows:
        """Take rows by their positions, followed by copies of the last one up to a whole number of blocks."""
        block = BLOCK if self.fixed is None else self.fixed
        found = rows.take_blocks(part, block, least=len(part) + bool(self._histories))
        return self._with_whole_histories(found, len(part)) if self._histories else found

    def _with_whole_histories(self, rows: EncodedRows, own: int) -> EncodedRows:
        """Give the rows after the first ``own`` histories with which all histories are a whole number of blocks.

        Models of histories multiply the entries of all of them at once, and those that neighbours share once.
        """
        lists = list(rows.lists)
        block = BLOCK
        for place in self._histories:
            values, offsets = lists[place]
            kept, added = values[: offsets[own]], len(rows) - own
            begins = torch.from_numpy(np.ascontiguousarray(offsets[: own + 1]))
            entries = len(share_histories(JaggedTensor(torch.from_numpy(kept), begins)).values)
            length = block - entries % block
            last = kept[offsets[own - 1] :]
            if len(last) == length and not last.any():
                length += block  # would equal the previous history, and be merged with it
            filled = np.concatenate([kept, np.zeros(length * added, dtype=np.int64)])
            ends = offsets[own] + length * np.arange(1, added + 1)
            lists[place] = filled, np.concatenate([offsets[: own + 1], ends])
        return EncodedRows(
            rows.features, rows.dense, rows.ids, tuple(lists), groups=rows.groups, timestamps=rows.timestamps
        )


def probabilities(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the probabilities of ``logits``, each computed by the same code whatever stands beside it."""
    found: NDArray[np.float64] = expit(logits)
    return found
