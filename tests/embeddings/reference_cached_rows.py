"""Rows in few bits and their cache, as defined: in plain Python and NumPy, a row at a time, without a kernel."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

_MASK = 2**64 - 1


def mix(z: int) -> int:
    """SplitMix64's finaliser on Python's integers."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def random_bits(seed: int, *keys: int) -> int:
    """32 random bits of a seed and keys."""
    state = mix((seed + 0x9E3779B97F4A7C15) & _MASK)
    for key in keys:
        state = mix(((state ^ key) + 0x9E3779B97F4A7C15) & _MASK)
    return state >> 32


def _half(value: float, direction: str) -> np.float16:
    """The float16 nearest to, or next below or above, a number."""
    half = np.float16(value)
    if direction == "down" and float(half) > value:
        return np.nextafter(half, np.float16(-np.inf))
    if direction == "up" and float(half) < value:
        return np.nextafter(half, np.float16(np.inf))
    return half


def encode(row: np.ndarray, kind: str, rounding: str, seed: int = 0, keys: tuple[int, int] = (0, 0), update: int = 0):
    """The bytes of one row ``float32 [D]``; ``keys`` are its table and its number in it."""
    dim, stochastic = row.size, rounding == "stochastic"
    u = np.array([random_bits(seed, *keys, d, update) >> 8 for d in range(dim)], np.float64) / 2**24
    if kind == "fp32":
        return row.astype("<f4").view(np.uint8)
    if kind == "fp16":
        if not stochastic:
            return row.astype(np.float16).view(np.uint8)
        below = np.array([_half(float(x), "down" if x >= 0 else "up") for x in row])  # towards zero
        beyond = np.array([_half(float(x), "up" if x >= 0 else "down") for x in row])
        gap = np.abs(beyond.astype(np.float64) - below)
        share = np.where(gap > 0, np.abs(row.astype(np.float64) - below) / np.where(gap > 0, gap, 1), 0)
        # -0.0 where a negative number is rounded to zero
        return np.copysign(np.where(share + u >= 1, beyond, below), row).astype(np.float16).view(np.uint8)
    low, high = row.min(), row.max()
    if kind == "int8":
        most, bias = 255, low
        scale = np.float32((high - low) / np.float32(255))
        guard = np.float32(1e-8) if not stochastic and high - low >= 2**-10 else np.float32(0)
        inverse = np.float32(255) / np.float32(high - low + guard) if high > low else np.float32(0)
        tail = np.concatenate([np.atleast_1d(scale).view(np.uint8), np.atleast_1d(bias).view(np.uint8)])
    else:
        most, half_bias = 15, _half(float(low), "down" if stochastic else "nearest")
        bias = np.float32(half_bias)
        span = np.float32(high - bias)
        half_scale = _half(float(span / np.float32(15)) if span else 1.0, "up" if stochastic else "nearest")
        half_scale = half_scale or np.float16(1)
        inverse = np.float32(1) / np.float32(half_scale)
        tail = np.concatenate([np.atleast_1d(half_scale).view(np.uint8), np.atleast_1d(half_bias).view(np.uint8)])
    steps = (row - bias) * inverse
    codes = np.floor(steps.astype(np.float64) + u) if stochastic else np.rint(steps)
    codes = np.clip(codes, 0, most).astype(np.uint8)
    return np.concatenate([codes if kind == "int8" else codes[::2] | codes[1::2] << 4, tail])


def decode(stored: np.ndarray, kind: str, dim: int) -> np.ndarray:
    """The row ``float32 [D]`` of some bytes."""
    if kind in ("fp32", "fp16"):
        return stored.copy().view(np.float32 if kind == "fp32" else np.float16).astype(np.float32)
    if kind == "int8":
        scale, bias = stored[dim:].copy().view(np.float32)
        return stored[:dim].astype(np.float32) * scale + bias
    scale, bias = stored[dim // 2 :].copy().view(np.float16).astype(np.float32)
    codes = np.stack([stored[: dim // 2] & 15, stored[: dim // 2] >> 4], 1).reshape(-1)
    return codes.astype(np.float32) * scale + bias


class Reference:
    """Tables with SGD or row-wise Adagrad, one row after another; the cache a dictionary a set."""

    ways = 32

    def __init__(self, rows: np.ndarray, table_sizes: list[int], kind: str, rounding: str, share: float, policy: str,
                 seed: int) -> None:  # fmt: skip
        self.kind, self.rounding, self.policy, self.seed = kind, rounding, policy, seed
        self.dim = rows.shape[1]
        self.keys = [(table, row) for table, size in enumerate(table_sizes) for row in range(size)]
        self.stored = [self.encode(r, row, 0) for r, row in enumerate(rows)]
        self.sets = math.ceil(math.ceil(share * len(rows)) / self.ways)
        self.lines: list[list[dict[str, Any] | None]] = [[None] * self.ways for _ in range(self.sets)]
        self.counts, self.squares, self.step = [0] * len(rows), [np.float32(0)] * len(rows), 0

    def encode(self, r: int, row: np.ndarray, update: int) -> np.ndarray:
        return encode(row, self.kind, self.rounding, self.seed, self.keys[r], update)

    def _set(self, r: int) -> list[dict[str, Any] | None]:
        return self.lines[((mix(r) >> 33) * self.sets) >> 31]

    def _line(self, r: int) -> dict[str, Any] | None:
        return next((line for line in self._set(r) if line and line["row"] == r), None) if self.sets else None

    def read(self, r: int) -> np.ndarray:
        """One row through the cache."""
        line = self._line(r)
        return line["values"] if line else decode(self.stored[r], self.kind, self.dim)

    def update(self, gradients: dict[int, np.ndarray], optimizer: str, rate: float) -> None:
        """One update; gradients ``float64 [D]`` by row, summed over the batch."""
        self.step += 1
        missing = []
        for r in sorted(gradients):
            line = self._line(r)
            if line:
                line["busy"], line["rank"] = True, self.step if self.policy == "lru" else line["rank"] + 1
            else:
                self.counts[r] = min(255, self.counts[r] + 1)
                missing.append(r)
        for r in missing if self.sets else ():
            self._admit(r)
        for r, gradient in gradients.items():
            before, line = self.read(r), self._line(r)
            if optimizer == "sgd":
                change = rate * gradient
            else:
                square = np.float64(self.squares[r]) + np.square(gradient).mean()
                self.squares[r] = np.float32(square)
                change = rate / (np.sqrt(square) + 1e-8) * gradient
            after = (before - change).astype(np.float32)
            if line:
                line["busy"] = False
            if np.array_equal(before.view(np.int32), after.view(np.int32)):
                continue
            if line:
                line["values"], line["dirty"] = after, True
            else:
                self.stored[r] = self.encode(r, after, self.step)

    def _admit(self, r: int) -> None:
        home = self._set(r)
        way = next((w for w, line in enumerate(home) if line is None), None)
        if way is None:
            free = [w for w, line in enumerate(home) if line and not line["busy"]]
            if not free:
                return
            way = min(free, key=lambda w: home[w]["rank"])  # type: ignore[index]
            old = home[way]
            assert old is not None
            if self.policy == "lfu":
                if self.counts[r] <= old["rank"]:
                    return
                self.counts[old["row"]] = min(255, old["rank"])
            if old["dirty"]:
                self.stored[old["row"]] = self.encode(old["row"], old["values"], self.step)
        values = decode(self.stored[r], self.kind, self.dim)
        rank = self.step if self.policy == "lru" else self.counts[r]
        home[way] = {"row": r, "values": values, "dirty": False, "busy": True, "rank": rank}
