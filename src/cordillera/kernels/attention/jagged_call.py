"""Checked and normalised arguments of attention over ragged sequences, and the keys that a query sees.

A query sees at most three ranges of keys of its own sequence. Every mask of sequence recommenders is made of them:
causal, a window, a window with a few positions that all see (semi-local), a prefix of context that sees the whole
history, candidates at the end that do not see each other. Ranges take memory that is linear in the number of queries,
and let kernels skip keys that no query sees.

Source: masks as in HSTU (Zhai et al. 2024, arXiv 2402.17152) and, for semi-local attention, ULTRA-HSTU (2026,
arXiv 2602.16986); the ranges are ours.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from cordillera.errors import DataError

ScoreFunction = Literal[
    "softmax", "identity", "silu", "gelu", "fast_gelu", "relu", "relu2", "leaky_relu", "hardswish", "tanh"
]
SCORES: tuple[str, ...] = get_args(ScoreFunction)
RANGES = 3
"""Number of ranges of keys of a query: global positions, those near it, and a candidate itself."""


@dataclass(frozen=True)
class JaggedMask:
    """Keys that each query of a sequence sees. The default: all keys of the sequence.

    A sequence is its history followed by its candidates. A candidate is seen only by itself; to a candidate, ``causal``
    and ``window`` apply as if it stood right after the history.

    Attributes:
        causal: Whether a query sees no later key.
        window: Number of positions, its own included, that a query sees in each direction; None for all.
        global_positions: Number of first positions of a sequence that ``window`` does not hide.
        context: Number of first positions that see the whole history.
        candidates: Number of candidates at the end of each sequence, integers ``[B]``; None for none.
        newest_first: Whether sequences are stored from the newest position to the oldest: "first" and "last" above are
            of time, so that candidates lie at the beginning of what is stored, and context at its end.
    """

    causal: bool = False
    window: int | None = None
    global_positions: int = 0
    context: int = 0
    candidates: Tensor | None = None
    newest_first: bool = False

    @property
    def hides(self) -> bool:
        """Whether some query does not see a key of its sequence."""
        return self.causal or self.window is not None or self.candidates is not None

    def check(self) -> None:
        """Check the settings.

        Raises:
            DataError: If a number is out of range, or a setting has no effect.
        """
        if self.window is not None and self.window < 1:
            raise DataError(f"must be at least 1, got {self.window}", where="mask.window")
        for name in ("global_positions", "context"):
            if getattr(self, name) < 0:
                raise DataError(f"must not be negative, got {getattr(self, name)}", where=f"mask.{name}")
        if self.global_positions and self.window is None:
            raise DataError("has no effect without a window", where="mask.global_positions", remedy="set mask.window")
        if self.context and not self.causal and self.window is None:
            raise DataError("has no effect where all see the history", where="mask.context", remedy="set mask.causal")

    def key_ranges(self, offsets: Tensor, rows: int) -> Tensor:
        """Return the ranges of keys of each row: starts and exclusive ends, from 0 in its sequence.

        Args:
            offsets: Start of each sequence and the end of the last, ``int64 [B + 1]``.
            rows: Number of rows ``T``; those after the last sequence see nothing.

        Returns:
            ``int32 [T, 3, 2]``, ascending and disjoint; an empty range has equal ends.

        Raises:
            DataError: As :meth:`check`; or if there are not as many numbers of candidates as sequences, or one is
                negative or larger than its sequence, which is seen on the CPU only.
        """
        self.check()
        lengths = offsets.diff()
        history = lengths
        if self.candidates is not None:
            history = lengths - _checked(self.candidates, lengths).to(lengths)
        row = torch.arange(rows, device=offsets.device)
        sequence = torch.searchsorted(offsets[1:].contiguous(), row, right=True)
        # rows after the last sequence are those of one without a position
        length, history, start = (torch.cat([x, x.new_zeros(1)])[sequence] for x in (lengths, history, offsets[:-1]))
        stored = torch.where(length > 0, row - start, 0)
        position = length - 1 - stored if self.newest_first else stored
        is_candidate = position >= history
        at = torch.minimum(position, history)
        low, high = torch.zeros_like(at), history
        if self.causal:
            high = torch.minimum(at + 1, history)
        if self.window is not None:
            low = (at - self.window + 1).clamp(min=0)
            high = torch.minimum(at + self.window, high)
        if self.context:
            of_context = (position < self.context) & ~is_candidate
            low, high = torch.where(of_context, 0, low), torch.where(of_context, history, high)
        low = torch.minimum(low, high)
        everywhere = torch.minimum(low, torch.full_like(low, self.global_positions))
        own = torch.where(is_candidate, position, length).clamp(min=0)
        starts = torch.stack([torch.zeros_like(low), low, own], 1)
        ends = torch.stack([everywhere, high, torch.minimum(own + 1, length)], 1)
        if self.newest_first:
            starts, ends = (length[:, None] - ends).flip(1), (length[:, None] - starts).flip(1)
        return torch.stack([starts, ends], 2).clamp_(min=0).to(torch.int32)


def _checked(candidates: Tensor, lengths: Tensor) -> Tensor:
    if candidates.shape != lengths.shape or candidates.is_floating_point():
        raise DataError(
            f"needs {len(lengths)} integers, one a sequence, got {candidates.dtype} of shape {tuple(candidates.shape)}",
            where="mask.candidates",
        )
    if candidates.device.type == lengths.device.type == "cpu":
        wrong = ((candidates < 0) | (candidates > lengths)).nonzero()
        if len(wrong):
            first = int(wrong[0])
            raise DataError(
                f"sequence {first} of {int(lengths[first])} rows has {int(candidates[first])} candidates",
                where="mask.candidates",
            )
    return candidates


@dataclass(frozen=True, eq=False)
class JaggedCall:
    """Checked and normalised arguments of a call: sequences of queries, each with its sequence of keys.

    Attributes:
        q_starts: First query of each sequence of queries, ``int64 [Bq]``, on the device of the tensors, as all others.
        q_lengths: Number of queries of each, ``int64 [Bq]``.
        rows: First row of each in the output, ``int64 [Bq]``.
        of_keys: Sequence of keys that each reads, ``int64 [Bq]``.
        k_starts: First key of each sequence of keys, ``int64 [B]``.
        k_lengths: Number of keys of each, ``int64 [B]``.
        longest_q: Largest number of queries of a sequence.
        longest_k: Largest number of keys of a sequence.
        out_rows: Rows of the output.
        ranges: Ranges of keys that each row of the output sees, ``int32 [out_rows, 3, 2]``; None for all.
        factors: Factor of the shares of each row, ``float64 [out_rows]``; ``[1]`` with softmax.
        bias: ``[Bq, H, N, M]``; None for none.
        score: As given.
        is_broadcast: As given.
    """

    q_starts: Tensor
    q_lengths: Tensor
    rows: Tensor
    of_keys: Tensor
    k_starts: Tensor
    k_lengths: Tensor
    longest_q: int
    longest_k: int
    out_rows: int
    ranges: Tensor | None
    factors: Tensor
    bias: Tensor | None
    score: str
    is_broadcast: bool


def checked_call(
    q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, q_offsets: Tensor | None, kv_index: Tensor | None,
    broadcast: bool, mask: JaggedMask, score: str, divisor: float | Tensor, bias: Tensor | None, longest: int | None,
) -> JaggedCall:  # fmt: skip
    """Check a call of attention and bring it into one form.

    ``q``, ``k``, ``v``, ``offsets``, ``q_offsets``, ``kv_index``, ``broadcast``, ``mask``, ``score``, ``divisor``,
    ``bias`` and ``longest`` are those of :func:`~cordillera.kernels.attention.jagged.jagged_attention`.

    Raises:
        DataError: They do not fit together; the message names the argument.
    """
    _check_tensors(q, k, v)
    if score not in SCORES:
        raise DataError(f"{score!r} is not known", where="score", remedy=", ".join(SCORES))
    ends, longest_k = _offsets_of(offsets, len(k), "offsets", longest)
    if broadcast:
        if q_offsets is not None or kv_index is not None:
            raise DataError("has queries of its own", where="broadcast", remedy="leave out q_offsets and kv_index")
        numbers = torch.arange(len(ends) - 1)
        q_starts, q_lengths, rows = torch.zeros_like(numbers), torch.full_like(numbers, len(q)), numbers * len(q)
        longest_q, out_rows = len(q), len(numbers) * len(q)
    else:
        q_ends, longest_q = ends, longest_k
        if q_offsets is not None or len(q) != len(k):
            q_ends, longest_q = _offsets_of(offsets if q_offsets is None else q_offsets, len(q), "q_offsets", longest)
        q_starts = rows = q_ends[:-1]
        q_lengths, out_rows = q_ends.diff(), len(q)
    of_keys = _keys_read_by(kv_index, len(q_starts), len(ends) - 1)
    ranges = None
    if mask.hides:
        if broadcast or kv_index is not None or q_offsets is not None:
            raise DataError("hides keys, so queries and keys need the same offsets", where="mask")
        ranges = mask.key_ranges(ends.to(q.device), out_rows)
    else:
        mask.check()
    if bias is not None:
        bias = _bias_of(bias, q, len(q_starts), longest_q, longest_k)
    q_starts, q_lengths, rows, of_keys, k_starts, k_lengths = (
        x.to(q.device) for x in (q_starts, q_lengths, rows, of_keys, ends[:-1], ends.diff())
    )
    factors = _factors(divisor, out_rows, score).to(q.device)
    return JaggedCall(
        q_starts, q_lengths, rows, of_keys, k_starts, k_lengths, longest_q, longest_k, out_rows, ranges, factors, bias,
        score, broadcast,
    )  # fmt: skip


def _check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
    if q.dim() != 3 or k.dim() != 3 or k.shape != v.shape or k.shape[2] != q.shape[2] or not q.shape[2]:
        raise DataError(f"have the shapes {shapes}", where="q, k, v", remedy="q [T, H, D], k and v [T', G, D]")
    if not k.shape[1] or q.shape[1] % k.shape[1]:
        raise DataError(f"{k.shape[1]} heads of keys do not divide {q.shape[1]} of queries", where="k")
    if not (q.dtype == k.dtype == v.dtype and q.dtype.is_floating_point):
        raise DataError(
            f"have the dtypes {q.dtype}, {k.dtype}, {v.dtype}", where="q, k, v", remedy="one floating-point dtype"
        )
    if not q.device == k.device == v.device:
        raise DataError(f"are on {q.device}, {k.device}, {v.device}", where="q, k, v", remedy="one device")


def _offsets_of(offsets: Tensor, rows: int, where: str, longest: int | None) -> tuple[Tensor, int]:
    """Offsets in int64 and the longest length; values are looked at on the CPU alone."""
    if offsets.dim() != 1 or offsets.numel() < 1 or offsets.dtype not in (torch.int32, torch.int64):
        raise DataError(
            f"must be int32 or int64 of one dimension with at least one entry, got {offsets.dtype} of shape "
            f"{tuple(offsets.shape)}",
            where=where,
        )
    ends = offsets.long()
    if ends.device.type != "cpu":
        if longest is None:
            raise DataError(
                f"are on {ends.device}",
                where=where,
                remedy="give longest, or offsets on the CPU: finding it would wait",
            )
        return ends, longest
    lengths = ends.diff()
    if ends[0] != 0:
        raise DataError(f"must start at 0, got {int(ends[0])}", where=where)
    if len(lengths) and int(lengths.min()) < 0:
        raise DataError(f"must not decrease, but do after entry {int((lengths < 0).nonzero()[0])}", where=where)
    if ends[-1] > rows:
        raise DataError(f"end at {int(ends[-1])}, past the {rows} rows", where=where)
    return ends, int(lengths.max()) if len(lengths) else 0


def _keys_read_by(kv_index: Tensor | None, readers: int, sequences: int) -> Tensor:
    """Sequence of keys of each sequence of queries."""
    if kv_index is None:
        if readers != sequences:
            raise DataError(
                f"hold {readers} sequences, the keys {sequences}", where="q_offsets", remedy="give kv_index"
            )
        return torch.arange(readers)
    if kv_index.shape != (readers,) or kv_index.is_floating_point():
        raise DataError(
            f"needs {readers} integers, one for each sequence of queries, got {kv_index.dtype} of shape "
            f"{tuple(kv_index.shape)}",
            where="kv_index",
        )
    wrong = (kv_index < 0) | (kv_index >= sequences)
    if kv_index.device.type == "cpu" and wrong.any():
        first = int(wrong.nonzero()[0])
        raise DataError(f"entry {first} is {int(kv_index[first])}, of {sequences} sequences", where="kv_index")
    return kv_index.long()


def _bias_of(bias: Tensor, q: Tensor, readers: int, longest_q: int, longest_k: int) -> Tensor:
    fits = bias.dim() == 4 and bias.shape[0] in (1, readers) and bias.shape[1] in (1, q.shape[1])
    if not fits or bias.shape[2] < longest_q or bias.shape[3] < longest_k:
        raise DataError(
            f"of shape {tuple(bias.shape)} does not fit {readers} sequences, {q.shape[1]} heads, and lengths up to "
            f"{longest_q} and {longest_k}",
            where="bias",
        )
    if bias.dtype != q.dtype or bias.device != q.device:
        raise DataError(f"is {bias.dtype} on {bias.device}, the queries {q.dtype} on {q.device}", where="bias")
    return bias.expand(readers, q.shape[1], -1, -1)


def _factors(divisor: float | Tensor, rows: int, score: str) -> Tensor:
    if score == "softmax":
        if isinstance(divisor, Tensor) or divisor != 1:
            raise DataError("divides shares that sum to one", where="divisor", remedy="leave it out with softmax")
        return torch.ones(1)
    if not isinstance(divisor, Tensor):
        if not divisor or not math.isfinite(divisor):
            raise DataError(f"must be a number other than 0, got {divisor}", where="divisor")
        return torch.full((rows,), 1 / divisor, dtype=torch.float64)
    if divisor.shape != (rows,):
        raise DataError(f"needs {rows} numbers, one a query, got the shape {tuple(divisor.shape)}", where="divisor")
    return 1 / divisor.detach().double()
