"""Whether keys and values or queries go around the ring: by what a turn costs, or by the rules of the paper.

New tokens attend to cached ones that lie on other ranks. Either every rank's keys and values pass all ranks
(``pass_kv``), or its queries do, and partial outputs come home (``pass_q``). Long prompts want the first, whose
messages hide behind the work; few new tokens beside much that is cached want the second, whose messages are small.

Source: Yang et al. 2024, Context Parallelism for Scalable Million-Token Inference (arXiv 2411.01783), section 3.5,
algorithms 1 and 5, and appendix D. The cost by measured steps is ours.
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
    """The heads of one layer on one device.

    Attributes:
        heads: Of queries.
        kv_heads: Of keys and values.
        head_dim: Width of a head.
        element_bytes: Of a number in queries, keys, values and outputs.
        lse_bytes: Of a log-sum-exp.
    """

    heads: int
    kv_heads: int
    head_dim: int
    element_bytes: int
    lse_bytes: int = 4

    @property
    def kv_row(self) -> int:
        """Bytes of a token's keys and values."""
        return 2 * self.kv_heads * self.head_dim * self.element_bytes

    @property
    def q_row(self) -> int:
        """Bytes of a token's queries."""
        return self.heads * self.head_dim * self.element_bytes

    @property
    def out_row(self) -> int:
        """Bytes of a token's partial output with its log-sum-exps."""
        return self.q_row + self.heads * self.lse_bytes

    def flops(self, new: Sequence[int], cached: Sequence[int]) -> float:
        """Of the attention of a turn, causal.

        Args:
            new: Tokens that each sequence adds.
            cached: Tokens that it has.
        """
        pairs = sum(t * p + t * (t + 1) / 2 for t, p in zip(new, cached, strict=True))
        return 4 * self.heads * self.head_dim * pairs


class RingCost(BaseModel):
    """Seconds of a turn in one layer: what hides behind attention costs nothing, the rest in full.

    The defaults know nothing of the machine: nothing hides, and the transport with fewer bytes is cheaper.

    Attributes:
        flop_s: Seconds of an operation in attention.
        pass_s: Seconds of each message around the ring, whatever its size.
        pass_byte_s: Seconds of a byte in it.
        return_s: Seconds of each all-to-all of partial outputs, whatever its size.
        return_byte_s: Seconds of a byte that a rank sends in it.
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
        """From measured steps, by least squares without negative constants.

        Args:
            attention: Operations and seconds of steps of the ring.
            passes: Bytes and seconds of messages around the ring.
            returns: Bytes that a rank sends and seconds of all-to-alls.

        Raises:
            PlanError: If there is no measurement of one of them, or one is not finite and above 0.
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
        """Of a turn in one layer.

        Args:
            transport: What goes around.
            shape: Of the layer.
            new: Tokens that each sequence adds.
            cached: Tokens that it has; of sequences that add none they stay at home.
            ranks: How many share it, evenly.
        """
        compute = self.flop_s * shape.flops(new, cached) / ranks**2  # of one step on one rank
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
        """The cheaper transport, ``pass_kv`` where both cost the same.

        Args:
            shape: As in :meth:`seconds`, like the others.
            new: Likewise.
            cached: Likewise.
            ranks: Likewise.
        """
        kv, q = (self.seconds(transport, shape, new, cached, ranks) for transport in ("pass_kv", "pass_q"))
        return "pass_kv" if kv <= q else "pass_q"


def algorithm_1(
    new: int, cached: int, *, shape: AttentionShape, ranks: int, flops_per_s: float, bytes_per_s: float
) -> Transport:
    """The paper's rule: keys and values where they hide behind attention (equation 2) or are the smaller message.

    Args:
        new: Tokens of the turn, 1 or more.
        cached: Tokens before it.
        shape: Of the layer on one device.
        ranks: Of context parallelism.
        flops_per_s: Of a device, in attention.
        bytes_per_s: Of a device, between ranks.

    Raises:
        PlanError: If there is no new token, or a rate is not above 0.
    """
    _check(new, cached, flops_per_s, bytes_per_s)
    smaller = 2 * shape.kv_heads / shape.heads
    hidden = new >= _hidden_from(shape, ranks, flops_per_s, bytes_per_s)
    return "pass_kv" if hidden or new / (new + cached) >= smaller else "pass_q"


def algorithm_5(
    new: int, cached: int, *, shape: AttentionShape, ranks: int, flops_per_s: float, bytes_per_s: float
) -> Transport:
    """:func:`algorithm_1` with the way home of partial outputs on the side of queries.

    Args:
        new: As in :func:`algorithm_1`, like all others.
        cached: Likewise.
        shape: Likewise.
        ranks: Likewise.
        flops_per_s: Likewise.
        bytes_per_s: Likewise.

    Raises:
        PlanError: As in :func:`algorithm_1`.
    """
    _check(new, cached, flops_per_s, bytes_per_s)
    way_home = 4 * new * bytes_per_s / (ranks * flops_per_s * shape.element_bytes)
    hidden = new >= _hidden_from(shape, ranks, flops_per_s, bytes_per_s)
    rest = 2 * shape.kv_heads / shape.heads - way_home
    return "pass_kv" if hidden or new / (new + cached) >= rest else "pass_q"


def empirical(new: int, cached: int, *, alpha: float = -1.059, beta: float = 1.145, gamma: float = 12.112) -> Transport:
    """Appendix D: keys and values where ``alpha ln T + beta ln(T / (T + P)) + gamma > 0``, or nothing is cached.

    The published constants hold for the lengths that they were fitted to: for turns in 128,000 tokens they always say
    queries, against the paper's own times.

    Args:
        new: Tokens ``T`` of the turn, 1 or more.
        cached: Tokens ``P`` before it.
        alpha: Of the logarithm of new tokens.
        beta: Of the logarithm of their share.
        gamma: Added.

    Raises:
        PlanError: If there is no new token.
    """
    _check(new, cached, 1.0, 1.0)
    score = alpha * math.log(new) + beta * math.log(new / (new + cached)) + gamma
    return "pass_kv" if score > 0 or not cached else "pass_q"


def _hidden_from(shape: AttentionShape, ranks: int, flops_per_s: float, bytes_per_s: float) -> float:
    """New tokens from which on a step's attention takes longer than its message of keys and values (equation 2)."""
    return ranks * flops_per_s * shape.kv_heads * shape.element_bytes / (2 * shape.heads * bytes_per_s)


def _check(new: int, cached: int, flops_per_s: float, bytes_per_s: float) -> None:
    if new < 1 or cached < 0:
        raise PlanError(f"{new} new tokens after {cached}", where="turn", remedy="one or more, after 0 or more")
    for name, rate in (("flops_per_s", flops_per_s), ("bytes_per_s", bytes_per_s)):
        if not (math.isfinite(rate) and rate > 0):
            raise PlanError(f"is {rate}", where=name, remedy="a finite number above 0")


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Seconds of nothing and of one more byte."""
    sizes, seconds = np.array(points, np.float64).T
    largest = sizes.max()
    found, _ = scipy.optimize.nnls(np.stack([np.ones_like(sizes), sizes / largest], 1), seconds)
    return float(found[0]), float(found[1] / largest)
