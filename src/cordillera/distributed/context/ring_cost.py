"""Choice between passing keys and values or queries around the ring, by the cost of a turn or by the paper's rules.

New tokens attend to cached ones that lie on other ranks. Either every rank's keys and values pass all ranks
(``pass_kv``), or its queries do and partial outputs return (``pass_q``). ``pass_kv`` suits long prompts, whose messages
overlap with the computation; ``pass_q`` suits few new tokens with many cached ones, as its messages are small.

Source: Yang et al. 2024, Context Parallelism for Scalable Million-Token Inference (arXiv 2411.01783), section 3.5,
algorithms 1 and 5, and appendix D. The cost model fitted to measured steps is not from the paper.
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
    """Heads of one layer on one device.

    Attributes:
        heads: Number of query heads.
        kv_heads: Number of key-value heads.
        head_dim: Width of a head.
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
        """Return the number of operations of a turn's causal attention.

        Args:
            new: Number of tokens that each sequence adds.
            cached: Number of tokens that each sequence already has.
        """
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
        """Return the seconds of a turn in one layer.

        Args:
            transport: What travels around the ring.
            shape: Heads of the layer.
            new: Number of tokens that each sequence adds.
            cached: Number of tokens that each sequence already has; sequences that add none send nothing.
            ranks: Number of ranks, which share the work evenly.
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

        Args:
            shape: Heads of the layer.
            new: Number of tokens that each sequence adds.
            cached: Number of tokens that each sequence already has.
            ranks: Number of ranks, which share the work evenly.
        """
        kv, q = (self.seconds(transport, shape, new, cached, ranks) for transport in ("pass_kv", "pass_q"))
        return "pass_kv" if kv <= q else "pass_q"


def algorithm_1(
    new: int, cached: int, *, shape: AttentionShape, ranks: int, flops_per_s: float, bytes_per_s: float
) -> Transport:
    """Apply the paper's rule: ``pass_kv`` if it hides behind attention (equation 2) or has the smaller message.

    Args:
        new: Number of tokens of the turn, 1 or more.
        cached: Number of tokens before it.
        shape: Heads of the layer on one device.
        ranks: Number of ranks of context parallelism.
        flops_per_s: Operations per second of a device in attention.
        bytes_per_s: Bytes per second of a device between ranks.

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
    """Apply :func:`algorithm_1` with the return of partial outputs added to the cost of ``pass_q``.

    Args:
        new: Number of tokens of the turn, 1 or more.
        cached: Number of tokens before it.
        shape: Heads of the layer on one device.
        ranks: Number of ranks of context parallelism.
        flops_per_s: Operations per second of a device in attention.
        bytes_per_s: Bytes per second of a device between ranks.

    Raises:
        PlanError: If there is no new token, or a rate is not above 0.
    """
    _check(new, cached, flops_per_s, bytes_per_s)
    way_home = 4 * new * bytes_per_s / (ranks * flops_per_s * shape.element_bytes)
    hidden = new >= _hidden_from(shape, ranks, flops_per_s, bytes_per_s)
    rest = 2 * shape.kv_heads / shape.heads - way_home
    return "pass_kv" if hidden or new / (new + cached) >= rest else "pass_q"


def empirical(new: int, cached: int, *, alpha: float = -1.059, beta: float = 1.145, gamma: float = 12.112) -> Transport:
    """Apply appendix D: ``pass_kv`` if ``alpha ln T + beta ln(T / (T + P)) + gamma > 0``, or nothing is cached.

    The published constants hold only for the lengths that they were fitted to: for turns in 128,000 tokens they always
    choose queries, in contradiction to the paper's own times.

    Args:
        new: Number ``T`` of tokens of the turn, 1 or more.
        cached: Number ``P`` of tokens before it.
        alpha: Coefficient of the logarithm of new tokens.
        beta: Coefficient of the logarithm of their share.
        gamma: Constant term.

    Raises:
        PlanError: If there is no new token.
    """
    _check(new, cached, 1.0, 1.0)
    score = alpha * math.log(new) + beta * math.log(new / (new + cached)) + gamma
    return "pass_kv" if score > 0 or not cached else "pass_q"


def _hidden_from(shape: AttentionShape, ranks: int, flops_per_s: float, bytes_per_s: float) -> float:
    """Return the number of new tokens from which a step's attention takes longer than its message (equation 2)."""
    return ranks * flops_per_s * shape.kv_heads * shape.element_bytes / (2 * shape.heads * bytes_per_s)


def _check(new: int, cached: int, flops_per_s: float, bytes_per_s: float) -> None:
    if new < 1 or cached < 0:
        raise PlanError(f"{new} new tokens after {cached}", where="turn", remedy="one or more, after 0 or more")
    for name, rate in (("flops_per_s", flops_per_s), ("bytes_per_s", bytes_per_s)):
        if not (math.isfinite(rate) and rate > 0):
            raise PlanError(f"is {rate}", where=name, remedy="a finite number above 0")


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Fit the seconds of an empty message and of each further byte."""
    sizes, seconds = np.array(points, np.float64).T
    largest = sizes.max()
    found, _ = scipy.optimize.nnls(np.stack([np.ones_like(sizes), sizes / largest], 1), seconds)
    return float(found[0]), float(found[1] / largest)
