"""What kernels in Triton share."""

from __future__ import annotations

import os


def is_interpreted() -> bool:
    """Whether Triton's interpreter runs kernels, on CPUs."""
    return os.environ.get("TRITON_INTERPRET") == "1"
