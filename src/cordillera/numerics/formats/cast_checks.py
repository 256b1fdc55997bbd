"""Checks of torch's casts to short formats, whose behaviour differs between versions.

Since torch 2.12 a cast to ``float8_e4m3fn`` on a CPU converts everything larger than 448, infinity included, to 448;
until 2.11 it returned NaN. Cordillera relies only on the casts to bfloat16 and float16, and only after comparing them
with integer arithmetic.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from cordillera.errors import NumericsError


@dataclass(frozen=True)
class CastFacts:
    """Behaviour of torch's casts from float32 on one type of device.

    Attributes:
        bf16_exact: Whether a cast to bfloat16 rounds to nearest even, including subnormal numbers, infinities and NaN.
        fp16_exact: Whether a cast to float16 does.
        e4m3fn_overflow: Result of 1e9 in ``float8_e4m3fn``, NaN or a number, as for the other formats.
        e4m3fn_infinity: Result of infinity in ``float8_e4m3fn``.
    """

    device: str
    torch: str
    bf16_exact: bool
    fp16_exact: bool
    e4m3fn_overflow: float
    e4m3fn_infinity: float
    e4m3fnuz_overflow: float
    e5m2_overflow: float


@lru_cache(maxsize=8)
def cast_facts(device: str = "cpu") -> CastFacts:
    """Determine how torch casts on a type of device, ``cpu`` or ``cuda``; computed once for each."""
    patterns = _patterns()
    singles = torch.tensor(patterns, dtype=torch.int64).to(torch.int32).view(torch.float32)

    def cast(value: float, dtype: torch.dtype) -> float:
        return float(torch.tensor([value], device=device).to(dtype).float().cpu())

    return CastFacts(
        device,
        torch.__version__,
        _same(singles.to(device).bfloat16().float(), [_bf16(bits) for bits in patterns]),
        _same(singles.to(device).half().float(), [_fp16(bits) for bits in patterns]),
        cast(1e9, torch.float8_e4m3fn),
        cast(math.inf, torch.float8_e4m3fn),
        cast(1e9, torch.float8_e4m3fnuz),
        cast(1e9, torch.float8_e5m2),
    )


def self_test(device: str = "cpu") -> CastFacts:
    """Return the behaviour of torch's casts; raise an error if it matches no known version."""
    facts = cast_facts(device)
    wrong = []
    if not facts.bf16_exact:
        wrong.append("float32 to bfloat16 does not round to nearest even")
    if not facts.fp16_exact:
        wrong.append("float32 to float16 does not round to nearest even")
    for name, largest in (("e4m3fn_overflow", 448.0), ("e4m3fn_infinity", 448.0), ("e4m3fnuz_overflow", 240.0)):
        found = getattr(facts, name)
        if not (math.isnan(found) or found == largest):
            wrong.append(f"{name} gives {found}, neither NaN nor {largest}")
    if facts.e5m2_overflow not in (math.inf, 57344.0):
        wrong.append(f"e5m2_overflow gives {facts.e5m2_overflow}, neither infinity nor 57344.0")
    if wrong:
        raise NumericsError(
            f"casts of torch {facts.torch} are not as they are known: {'; '.join(wrong)}",
            where=f"device {device!r}",
            remedy="use torch 2.11 to 2.13, and do not switch flush_denormal on",
        )
    return facts


def _patterns() -> list[int]:
    """Return bit patterns of float32 around all critical values of a cast, enough of them to fill vector registers."""
    rounds = (0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x0FFF, 0x1000, 0x1001, 0x3000)
    tops = [0x0000, 0x0001, 0x007F, 0x0080, 0x3300, 0x3380, 0x33C0, 0x387F, 0x3880, 0x3F80, 0x3F81, 0x477F, 0x4780]
    tops += [0x7F7F, 0x7F80, 0x7F81, 0x7FC0]
    return [sign | (top << 16) | low for top in tops for low in rounds for sign in (0, 1 << 31)]


def _bf16(bits: int) -> float:
    if bits & 0x7FFFFFFF > 0x7F800000:
        return math.nan
    return _single((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000)


def _fp16(bits: int) -> float:
    value = _single(bits)
    try:
        return float(struct.unpack("<e", struct.pack("<e", value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)


def _single(bits: int) -> float:
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])


def _same(found: Tensor, expected: list[float]) -> bool:
    values = [float(value) for value in found.double().cpu()]
    return all(
        (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))
        for a, b in zip(values, expected, strict=True)
    )
