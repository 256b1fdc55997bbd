"""Products for processors with narrower vectors than this one's: the tests of products, with fewer instructions."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cordillera.kernels.dense import bf16_tiles

_FEATURES = "+avx,+avx2,+bmi,+bmi2,+cx16,+f16c,+fma,+lzcnt,+mmx,+movbe,+popcnt,+sse,+sse2,+sse3,+sse4.1,+sse4.2,+ssse3"


@pytest.mark.slow
@pytest.mark.skipif(not bf16_tiles.multiplies_pairs(), reason="the tests of products have run with these instructions")
def test_products_without_instructions_for_bfloat16() -> None:
    folder = Path(__file__).parent
    files = [folder / f"test_{name}.py" for name in ("few_rows", "packed_rows", "decoder_rows")]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *map(str, files)]
    settings = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": _FEATURES}
    done = subprocess.run(command, env={**os.environ, **settings}, capture_output=True, text=True, timeout=280)
    assert not done.returncode, done.stdout + done.stderr
