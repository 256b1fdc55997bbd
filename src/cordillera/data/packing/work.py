"""Predicted work of documents in a microbatch: a part per document, one per token, one per token squared.

The constants are fitted to measured microbatches, or follow from the sizes of the model alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import scipy  # loads its submodules on first use
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from cordillera.errors import DataError
from cordillera.files import read_sealed, sealed_json
from cordillera.mistakes import explain, known_keys
from cordillera.run import write_atomically

WorkCost = Annotated[float, Field(strict=True, ge=0, le=1e12, allow_inf_nan=False)]


class Sample(NamedTuple):
    """A measured microbatch: documents, sums of their lengths ``d`` and of ``d**2``, seconds forward and backward."""

    documents: int
    tokens: int
    squared: int
    seconds: float

    @classmethod
    def of(cls, lengths: Sequence[int], seconds: float) -> Sample:
        """Make a sample from the ``lengths`` of a microbatch's documents in tokens, and its ``seconds``."""
        return cls(len(lengths), sum(lengths), sum(d * d for d in lengths), seconds)


class DocumentWork(BaseModel):
    """Predicted work ``W(d) = document + token d + squared d**2`` of a document of ``d`` tokens (WLB-LLM, section 4.1).

    Attributes:
        document: Work per document, whatever its length: launches, masks.
        token: Work per token: matrix products, element-wise kernels, collectives. At least one of ``token`` and
            ``squared`` is above 0.
        squared: Work per token squared: attention under a document mask.
        unit: Unit of the three: ``seconds``, or ``tokens`` for the linear work of a token.
        provenance: Measurements or formula from which the constants come.
        error: Mean absolute error relative to the measurements; None if nothing was fitted.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    document: WorkCost = 0.0
    token: WorkCost
    squared: WorkCost
    unit: str = "tokens"
    provenance: str = "not fitted"
    error: WorkCost | None = None

    @model_validator(mode="after")
    def _costs_something(self) -> DocumentWork:
        if not (self.token or self.squared):
            raise ValueError("tokens cost nothing: token or squared must be above 0")
        return self

    @classmethod
    def of_break_even(cls, tokens: float, provenance: str = "an assumption") -> DocumentWork:
        """Make ``W(d) = d + d**2 / b``, in units of the linear work of a token.

        Args:
            tokens: Length ``b`` at which attention costs as much as everything else.
            provenance: Origin of ``b``.

        Raises:
            DataError: The length is not above 0.
        """
        if not tokens > 0:
            raise DataError(f"{tokens} is no length", where="break-even length", remedy="above 0 tokens")
        return cls(token=1.0, squared=1.0 / tokens, provenance=f"break-even length {tokens:g}: {provenance}")

    @classmethod
    def of_model(cls, hidden: int, ffn: int, heads: int, kv_heads: int) -> DocumentWork:
        """Count the operations of a layer of a Llama, for models that were not measured.

        Its widths are ``hidden`` and, gated, ``ffn``; it has ``heads`` query heads and ``kv_heads``. Attention kernels
        run further below the peak than matrix products do, so the true break-even length is shorter: fit it where a
        device is available.

        Raises:
            DataError: A size is below 1.
        """
        for name, value in {"hidden": hidden, "ffn": ffn, "heads": heads, "kv_heads": kv_heads}.items():
            if value < 1:
                raise DataError(f"{value} is too few", where=name, remedy="at least 1")
        # 2 D d**2 for causal attention against 2 (2 D**2 + 2 D**2 kv / heads + 3 D F) d for the products
        tokens = 2 * hidden + 2 * hidden * kv_heads / heads + 3 * ffn
        return cls.of_break_even(
            tokens, f"operations counted for widths {hidden} and {ffn}, {kv_heads} of {heads} heads"
        )

    @classmethod
    def fit(cls, samples: Sequence[Sample], provenance: str, ridge: float = 0.0) -> DocumentWork:
        """Fit constants that are not negative by least squares of relative errors.

        Args:
            samples: At least three microbatches, different enough to determine the constants.
            provenance: Model, device and date, for people.
            ridge: Weight of the squares of the constants, each in units of the mean time that its part could explain;
                above 0 it allows samples that are alike.

        Raises:
            DataError: Times are not positive and finite, samples do not determine the constants, or they say that
                tokens cost nothing.
        """
        if len(samples) < 3:
            raise DataError(f"{len(samples)} samples for three constants", where="samples", remedy="at least 3")
        for number, one in enumerate(samples):
            if not (one.documents >= 1 and one.tokens >= 1 and one.squared >= 1 and 0 < one.seconds < np.inf):
                raise DataError(f"{one} was never measured", where=f"sample {number}", remedy="all four are above 0")
        if not (ridge >= 0 and np.isfinite(ridge)):
            raise DataError(f"{ridge} is no weight", where="ridge", remedy="finite and at least 0")
        counts = np.array([one[:3] for one in samples], dtype=np.float64)
        parts = counts / np.array([one.seconds for one in samples])[:, None]
        unit = 1.0 / parts.mean(axis=0)
        scaled = parts * unit
        if not ridge and np.linalg.cond(scaled) > 1e8:
            raise DataError(
                "do not tell documents, tokens and squares apart", where="samples",
                remedy="measure microbatches of many short and of few long documents, or give a ridge",
            )  # fmt: skip
        rows = np.vstack([scaled, np.sqrt(ridge * len(samples)) * np.eye(3)])
        found = scipy.optimize.nnls(rows, np.concatenate([np.ones(len(samples)), np.zeros(3)]))[0]
        document, token, squared = (found * unit).tolist()
        if found[1:].sum() < 1e-9:
            raise DataError(
                "say that tokens cost nothing", where="samples", remedy="measure more and longer microbatches"
            )
        return cls(
            document=document,
            token=token,
            squared=squared,
            unit="seconds",
            provenance=f"fitted to {len(samples)} microbatches: {provenance}",
            error=float(np.abs(scaled @ found - 1.0).mean()),
        )

    def __call__(self, length: int) -> float:
        """Return ``W(d)`` of a document of ``length`` ``d`` in tokens."""
        return self.document + (self.token + self.squared * length) * length

    def of(self, lengths: Sequence[int]) -> float:
        """Return the work of a microbatch of documents with these ``lengths`` in tokens, a sum."""
        return sum(map(self, lengths), 0.0)

    def save(self, path: str | Path) -> None:
        """Write a JSON file for :meth:`read`."""
        write_atomically(Path(path), sealed_json(self.model_dump(mode="json")))

    @classmethod
    def read(cls, path: str | Path) -> DocumentWork:
        """Read a JSON file, written by :meth:`save` or without a checksum by hand.

        Raises:
            DataError: The file cannot be read, does not match its checksum, or holds wrong values; all are named.
        """
        content = read_sealed(path)
        try:
            return cls.model_validate(content)
        except ValidationError as error:
            problems = explain(error.errors(), lambda at: known_keys(cls, at))
            text = "; ".join(f"{key}: {message}" for key, message in problems)
            raise DataError(text, where=str(path)) from error
