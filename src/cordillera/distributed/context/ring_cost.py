"""Choice between passing keys and values or queries around the ring, by the cost of a turn.

New tokens attend to cached ones that lie on other ranks. Either every rank's keys and values pass all ranks
(``pass_kv``), or its queries do and partial outputs return (``pass_q``). ``pass_kv`` suits long prompts, whose messages
overlap with the computation; ``pass_q`` suits few new tokens with many cached ones, as its messages are small.

Source: Yang et al. 2024, Context Parallelism for Scalable Million-Token Inference (arXiv 2411.01783), section 3.5. The
cost model fitted to measured steps is not from the paper.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
import scipy
from pydantic import BaseModel, ConfigDict, Field

from cordillera.errors import PlanError

Transport = Literal["pass_kv", "pass_q"]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass(frozen=True)
class AttentionShape:
    """Query heads (``heads``) and key-value heads of one layer on one device, each ``head_dim`` wide.

    Attributes:
        element_bytes: Size of a number in queries, keys, values and outputs, in bytes.
        lse_bytes: Size of a log-sum-exp in bytes.
    """

    heads: int
    kv_heads: int
    head_dim: int
    element_bytes: int
    lse_bytes: int = 4

    @property
    def kv_row(self) -> int:
        """Number of bytes of a token's keys and values."""
        return 2 * self.kv_heads * self.head_dim * self.element_bytes

    @property
    def q_row(self) -> int:
        """Number of bytes of a token's queries."""
        return self.heads * self.head_dim * self.element_bytes

    @property
    def out_row(self) -> int:
        """Number of bytes of a token's partial output with its log-sum-exps."""
        return self.q_row + self.heads * self.lse_bytes

    def flops(self, new: Sequence[int], cached: Sequence[int]) -> float:
        """Return the operations of causal attention when sequences add ``new`` tokens to ``cached`` ones."""
        pairs = sum(t * p + t * (t + 1) / 2 for t, p in zip(new, cached, strict=True))
        return 4 * self.heads * self.head_dim * pairs


class RingCost(BaseModel):
    """Cost of a turn in one layer, in seconds: messages that overlap with attention cost nothing, others in full.

    The defaults assume nothing about the machine: nothing overlaps, and the transport with fewer bytes is cheaper.

    Attributes:
        flop_s: Seconds for each operation in attention.
        pass_s: Seconds for each message around the ring, independent of its size.
        pass_byte_s: Seconds for each byte of such a message.
        return_s: Seconds for each all-to-all of partial outputs, independent of its size.
        return_byte_s: Seconds for each byte that a rank sends in it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    flop_s: NonNegative = 0.0
    pass_s: NonNegative = 0.0
    pass_byte_s: NonNegative = 1.0
    return_s: NonNegative = 0.0
    return_byte_s: NonNegative = 1.0

    @classmethod
    def fitted(
        cls,
        attention: Sequence[tuple[float, float]],
        passes: Sequence[tuple[float, float]],
        returns: Sequence[tuple[float, float]],
    ) -> RingCost:
        """Fit the constants to measured steps, by non-negative least squares.

        Args:
            attention: Operations and seconds of steps of the ring.
            passes: Bytes and seconds of messages around the ring.
            returns: Bytes that a rank sends and seconds of all-to-alls.

        Raises:
            PlanError: If one of them has no measurement, or a value is not finite and above 0.
        """
        for name, points in (("attention", attention), ("passes", passes), ("returns", returns)):
            if not points or not all(math.isfinite(x) and x > 0 for point in points for x in point):
                raise PlanError(f"{list(points)} are not measurements", where=name, remedy="finite numbers above 0")
        rates = [seconds / flops for flops, seconds in attention]
        pass_s, pass_byte_s = _line(passes)
        return_s, return_byte_s = _line(returns)
        return cls(
            flop_s=float(np.mean(rates)),
            pass_s=pass_s,
            pass_byte_s=pass_byte_s,
            return_s=return_s,
            return_byte_s=return_byte_s,
        )

    def seconds(
        self, transport: Transport, shape: AttentionShape, new: Sequence[int], cached: Sequence[int], ranks: int
    ) -> float:
        """Return the seconds of a turn in one layer of a ``shape`` if a ``transport`` travels around the ring.

        Sequences add ``new`` tokens to their ``cached`` ones; those that add none send nothing. All ``ranks`` share the
        work evenly.
        """
        compute = self.flop_s * shape.flops(new, cached) / ranks**2  # one step on one rank
        tokens = sum(new)
        if transport == "pass_kv":
            rows = tokens + sum(p for t, p in zip(new, cached, strict=True) if t)
            message, home = rows * shape.kv_row / ranks, 0.0
        else:
            message = tokens * shape.q_row / ranks
            home = self.return_s + self.return_byte_s * (ranks - 1) * tokens * shape.out_row / ranks
        if ranks == 1:
            return compute
        return compute + (ranks - 1) * max(compute, self.pass_s + self.pass_byte_s * message) + home

    def choose(self, shape: AttentionShape, new: Sequence[int], cached: Sequence[int], ranks: int) -> Transport:
        """Return the cheaper transport, or ``pass_kv`` if both cost the same.

        Arguments are those of :meth:`seconds`: ``shape``, ``new``, ``cached`` and ``ranks``.
        """
        kv, q = (self.seconds(transport, shape, new, cached, ranks) for transport in ("pass_kv", "pass_q"))
        return "pass_kv" if kv <= q else "pass_q"


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Fit the seconds of an empty message and of each further byte."""
    sizes, seconds = np.array(points, np.float64).T
    largest = sizes.max()
    found, _ = scipy.optimize.nnls(np.stack([np.ones_like(sizes), sizes / largest], 1), seconds)
    return float(found[0]), float(found[1] / largest)
