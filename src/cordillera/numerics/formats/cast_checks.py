"""What this torch's casts to short formats do, found by doing them: it has changed between versions.

Since torch 2.12 a cast to ``float8_e4m3fn`` on a CPU makes 448 of everything larger, infinity included; until 2.11 it
made NaN. What is built here rests on the casts to bfloat16 and float16 only, and on these only after they were compared
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
    """How torch casts float32 on one kind of device.

    Attributes:
        device: The kind of device.
        torch: Torch's version.
        bf16_exact: A cast to bfloat16 rounds to nearest even, subnormal numbers, infinities and NaN included.
        fp16_exact: The same for float16.
        e4m3fn_overflow: What becomes of 1e9 in ``float8_e4m3fn``: ``nan``, or a number.
        e4m3fn_infinity: What becomes of infinity in it.
        e4m3fnuz_overflow: What becomes of 1e9 in ``float8_e4m3fnuz``.
        e5m2_overflow: What becomes of 1e9 in ``float8_e5m2``.
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
    """Find out how torch casts on a device; done once for each.

    Args:
        device: A type of device, ``cpu`` or ``cuda``.
    """
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
    """Check that torch's casts do what is known of them.

    Args:
        device: A type of device.

    Returns:
        What was found.

    Raises:
        NumericsError: a cast to bfloat16 or float16 is not exact, or one to eight bits does what no known version does.
    """
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
    """Bit patterns of float32 around everything that a cast may get wrong, enough of them to fill vector registers."""
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
