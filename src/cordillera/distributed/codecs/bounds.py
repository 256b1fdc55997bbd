"""Error bounds that adapt on two levels: to the table by its class, to the iteration by a decay.

Feng et al. 2024 ("Accelerating communication in deep learning recommendation model training with dual-level adaptive
lossy compression", arXiv 2407.04272) give each table one of three bounds, relative to the range of what is sent, and
begin training with a multiple of them: ``Bounded(kind.bound * decay.multiplier(iteration))`` sends a table's rows.

They class tables by how many rows of a trained model become equal when they are quantised. Rows at the beginning of
training are random and stay distinct in every table, so that this measure would make all bounds loose when it matters
most. The published classes follow the numbers of rows, which are known before.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from cordillera.errors import NumericsError

_STEPS = 10


class BoundClass(str, Enum):
    """Class of a table by how well its rows bear errors."""

    TIGHT = "tight"
    """Tables with many rows that errors make equal, so that the rows become indistinguishable."""
    BASE = "base"
    LOOSE = "loose"
    """Tables with few rows, which stay distinct."""

    @property
    def bound(self) -> float:
        """Largest error of an element as a share of the range, the paper's value."""
        return {"tight": 0.01, "base": 0.03, "loose": 0.05}[self.value]


def classes_by_cardinality(cardinalities: Sequence[int], *, tight: float = 0.3, loose: float = 0.3) -> list[BoundClass]:
    """Return classes of tables from their numbers of rows alone: the largest are tight, the smallest loose.

    The published classes follow this rule: on Criteo Terabyte, the 7 largest of 26 tables are tight and the 9 smallest
    loose; on Criteo Kaggle, the 8 largest are tight and 6 of the 8 smallest loose.

    Args:
        cardinalities: Number of rows of each table.
        tight: Share of the tables that are tight, rounded to whole tables.
        loose: Share of the tables that are loose, rounded to whole tables.

    Returns:
        One class per table. Of tables with equally many rows, earlier ones count as smaller.

    Raises:
        NumericsError: If a share is negative or both are more than all tables.
    """
    count = len(cardinalities)
    most_loose, most_tight = round(loose * count), round(tight * count)
    if min(tight, loose) < 0 or most_loose + most_tight > count:
        what = f"shares of {tight} tight and {loose} loose tables are not parts of {count}"
        raise NumericsError(what, where="tight, loose", remedy="give shares of at least 0 that add up to at most 1")
    found = [BoundClass.BASE] * count
    for rank, table in enumerate(sorted(range(count), key=lambda table: cardinalities[table])):
        if rank < most_loose:
            found[table] = BoundClass.LOOSE
        elif rank >= count - most_tight:
            found[table] = BoundClass.TIGHT
    return found


@dataclass(frozen=True)
class BoundDecay:
    """Multiple of a table's bound in the early stage of training, from ``start`` to 1.

    Attributes:
        iterations: Number of iterations of the early stage; the paper uses 65,536.
        start: Multiple at the first iteration, at least 1.
        shape: ``step`` (10 equal steps), ``linear``, ``log`` (falls fastest at first), or ``constant`` (``start`` until
            the early stage ends).

    Raises:
        NumericsError: If ``start`` is below 1, ``iterations`` negative, or there is no such shape.
    """

    iterations: int
    start: float = 2.0
    shape: Literal["step", "linear", "log", "constant"] = "step"

    def __post_init__(self) -> None:
        if not 1 <= self.start < math.inf or self.iterations < 0:
            what = f"start {self.start} over {self.iterations} iterations"
            raise NumericsError(what, where="BoundDecay", remedy="start from 1 or more, over 0 or more iterations")
        if self.shape not in ("step", "linear", "log", "constant"):
            raise NumericsError(f"no shape {self.shape!r}", where="shape", remedy="step, linear, log or constant")

    def multiplier(self, iteration: int) -> float:
        """Return the multiple of the bound at an iteration, which counts from 0; 1 after the early stage."""
        if iteration >= self.iterations:
            return 1.0
        x, c = iteration / self.iterations, self.start
        if self.shape == "step":
            fallen = (_STEPS * iteration // self.iterations) / _STEPS
        elif self.shape == "linear":
            fallen = x
        elif self.shape == "log":
            fallen = math.log(1 + x * (math.e - 1))
        else:
            fallen = 0.0
        return max(c * (1 - fallen * (1 - 1 / c)), 1.0)
