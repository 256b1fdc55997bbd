"""Warnings about features with far more unseen ids than in the validation rows, as when ids are written differently."""

from __future__ import annotations

import warnings
from typing import Any

from cordillera.data.ranking.encoding import EncodedRows, Encoder

MARGIN = 0.1
"""Largest excess over the share of unseen ids in the validation rows that raises no warning."""

DEVIATIONS = 5.0
"""Largest excess in standard deviations of a share of that many ids that raises no warning."""


class UnseenCount:
    """Counts unseen ids over chunks of rows, to compare them with the ``facts`` of a model's training data."""

    def __init__(self, encoder: Encoder, facts: dict[str, Any]) -> None:
        self._encoder, self._facts = encoder, facts
        self._counts: dict[str, tuple[int, int]] = {}

    def update(self, rows: EncodedRows) -> None:
        """Count the ids of encoded rows."""
        for name, (count, total) in self._encoder.unseen(rows).items():
            before = self._counts.get(name, (0, 0))
            self._counts[name] = (before[0] + count, before[1] + total)

    def warn(self, where: str) -> None:
        """Warn, with ``where``, of features that exceed their share of unseen ids in the validation rows.

        The excess must be more than :data:`MARGIN`, and more than :data:`DEVIATIONS` standard deviations.
        """
        for name, (count, total) in self._counts.items():
            if total:
                _warn(name, count / total, total, self._facts, where)


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
