"""Warnings about features that are far from those of training: unseen ids, blanks, numbers in another unit."""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any

import numpy as np

from cordillera.data.ranking.encoding import EncodedRows, Encoder
from cordillera.data.ranking.features import DenseFeature

MARGIN = 0.1
"""Largest excess over the share of unseen ids in the validation rows that raises no warning."""

DEVIATIONS = 5.0
"""Largest excess in standard deviations of a share of that many ids that raises no warning."""

LEAST_ROWS = 100
"""Least number of rows whose dense features are compared, and of rows in memory whose ids are."""

SHIFT = 1.0
"""Largest distance of a dense feature's mean from that of the training rows, in their standard deviations, that raises
no warning."""


class InputCheck:
    """Compares the inputs of chunks of rows with those that a model was trained on.

    Args:
        encoder: The model's encoder.
        facts: Facts of its training data.
    """

    def __init__(self, encoder: Encoder, facts: dict[str, Any]) -> None:
        self._encoder, self._facts = encoder, facts
        self._counts: dict[str, tuple[int, int]] = {}
        self._rows, self._sums, self._blanks = 0, np.zeros(len(encoder.schema.numbers)), Counter[str]()

    def update(self, rows: EncodedRows) -> None:
        """Take note of encoded rows."""
        for name, (count, total) in self._encoder.unseen(rows).items():
            before = self._counts.get(name, (0, 0))
            self._counts[name] = (before[0] + count, before[1] + total)
        self._rows += len(rows)
        self._sums += rows.dense.sum(0, dtype=np.float64)
        self._blanks.update(rows.blanks)

    def warn(self, where: str) -> None:
        """Warn, with ``where``, of features that are far from those of training.

        A share of unseen ids or blanks must exceed that of the validation rows (blanks: of all rows) by more than
        :data:`MARGIN`, and by more than :data:`DEVIATIONS` standard deviations. The mean of a dense feature with a
        transform must be more than :data:`SHIFT` from that of the training rows.
        """
        for name, (count, total) in self._counts.items():
            if total:
                _warn(name, count / total, total, self._facts, where)
        for feature, value in zip(self._encoder.schema.numbers, self._sums.tolist(), strict=True):
            if self._rows >= LEAST_ROWS:
                self._warn_of_number(feature, value, where)

    def _warn_of_number(self, feature: DenseFeature, total: float, where: str) -> None:
        name, blanks = feature.name, self._blanks[feature.name]
        share, known = blanks / self._rows, (self._facts.get("blanks") or {}).get(name, 1.0)
        base = max(known, 0.01)
        if share - known > max(MARGIN, DEVIATIONS * (base * (1 - base) / self._rows) ** 0.5):
            warnings.warn(
                f"{where}: '{name}' is blank in {100 * share:.0f} % of the rows, in training in {100 * known:.0f} %; "
                "check that the column is filled",
                stacklevel=3,
            )
        present = self._rows - blanks
        if feature.transform == "none" or not present:
            return
        mean = (total - blanks * self._encoder.dense_state[name]["fill"]) / present
        shift = (mean - 0.5) * 12**0.5 if feature.transform == "quantile" else mean
        if abs(shift) > max(SHIFT, DEVIATIONS / present**0.5):
            of = {"quantile": "mean quantile", "log": "mean logarithm", "standardise": "mean"}[feature.transform]
            warnings.warn(
                f"{where}: the {of} of '{name}' is {abs(shift):.1f} standard deviations "
                f"{'above' if shift > 0 else 'below'} that of the training rows; "
                "unless the rows themselves have changed, check its unit",
                stacklevel=3,
            )


def warn_of_split(facts: dict[str, Any], split: str) -> None:
    """Warn of features whose share of unseen ids in a split is far above their share in the validation rows."""
    for name, share in facts["unseen"][split].items():
        if share is not None:
            _warn(name, share, facts["rows"][split], facts, f"the {split} split")


def _warn(name: str, share: float, total: int, facts: dict[str, Any], where: str) -> None:
    unseen = facts.get("unseen") or {}
    known, of = (unseen.get("validation") or {}).get(name), "validation"
    if known is None:
        known, of = (unseen.get("train") or {}).get(name), "training"
    if known is None:
        return
    # A share of 0 would have a deviation of 0, so shares count as at least one id in a hundred.
    base = max(known, 0.01)
    if share - known > max(MARGIN, DEVIATIONS * (base * (1 - base) / total) ** 0.5):
        warnings.warn(
            f"{where}: {100 * share:.0f} % of the ids of '{name}' are blank or unknown to the model, "
            f"{100 * known:.0f} % of those of the {of} rows; unless these rows are later ones with new ids, check "
            "that ids are written as in training",
            stacklevel=4,
        )
