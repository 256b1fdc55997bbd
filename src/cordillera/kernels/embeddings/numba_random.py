"""Counter-based random numbers for kernels: a key gives the same bits in any thread and any order.

    mix(z):  z ^= z >> 30; z *= 0xBF58476D1CE4E5B9; z ^= z >> 27; z *= 0x94D049BB133111EB; z ^= z >> 31
    state = mix(seed + 0x9E3779B97F4A7C15); for each key: state = mix((state ^ key) + 0x9E3779B97F4A7C15)

modulo ``2**64``; the 32 random bits are ``state >> 32``. Numbers for tables have the keys (table, row, column, update),
so the number for a value depends neither on threads nor on the order of a batch nor on where a row is kept.

Source: the finaliser of SplitMix64 (Steele et al. 2014, "Fast splittable pseudorandom number generators").
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cordillera.kernels.compiling import compiled

_INCREMENT = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_30, _27, _31, _40 = np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(40)
_STEP = np.float32(2.0**-24)


@compiled()
def mix(z: Any) -> Any:
    """Mix a uint64 so that each of its bits depends on all."""
    z = (z ^ (z >> _30)) * _FIRST
    z = (z ^ (z >> _27)) * _SECOND
    return z ^ (z >> _31)


@compiled()
def seeded(seed: int) -> Any:
    """Return the state (uint64) of a seed."""
    return mix(np.uint64(seed) + _INCREMENT)


@compiled()
def absorb(state: Any, key: int) -> Any:
    """Return the state (uint64) after one more key, at least 0."""
    return mix((state ^ np.uint64(key)) + _INCREMENT)


@compiled()
def fraction(state: Any) -> Any:
    """Return the upper 24 of a state's 32 random bits as a float32 in [0, 1); 32 bits would sometimes round to 1."""
    return np.float32(np.int32(state >> _40)) * _STEP
