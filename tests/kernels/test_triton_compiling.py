"""Kernels in Triton compile for GPUs, which needs none; the interpreter alone accepts more than the compiler does."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", reason="triton is not installed")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("this is the interpreter's process", allow_module_level=True)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from cordillera.kernels import triton_experts  # noqa: E402
from cordillera.kernels.attention import triton_jagged  # noqa: E402
from cordillera.kernels.embeddings import triton_backend  # noqa: E402

HOPPER, SHARED = GPUTarget("cuda", 90, 32), 160 * 2**10  # bytes of shared memory that an A100 has too
INTEGERS = {"q_starts", "q_lengths", "rows", "of_keys", "k_starts", "k_lengths", "begins", "readers"}
OTHERS = {"ranges": "*i32", "scale": "fp32"}
SINGLE = {"ends", "along", "factors", "dq", "dk", "dv"}
WIDE = {"distinct", "starts", "order", "sources"}


def compiled(kernel: Any, constants: dict[str, Any], types: dict[str, str], warps: int, stages: int) -> str:
    """The kernel's machine code for a GPU, as text."""
    signature = {name: "constexpr" if name in constants else types[name] for name in kernel.arg_names}
    places = {(place,): constants[name] for place, name in enumerate(kernel.arg_names) if name in constants}
    source = ASTSource(fn=kernel, signature=signature, constexprs=places)
    done = triton.compile(source, target=HOPPER, options={"num_warps": warps, "num_stages": stages})
    assert done.metadata.shared <= SHARED
    return str(done.asm["ptx"])


def attention_types(kernel: Any, dtype: str) -> dict[str, str]:
    """Types of the arguments of a kernel of attention."""
    types = {}
    for name in kernel.arg_names:
        pointer = {**dict.fromkeys(INTEGERS, "*i64"), **dict.fromkeys(SINGLE, "*fp32"), **OTHERS}
        is_stride = name.endswith(("_row", "_head")) or name in ("heads", "group", "groups")
        is_stride = is_stride or name in ("bias_b", "bias_h", "bias_i", "bias_j")
        types[name] = pointer.get(name, "i32" if is_stride else f"*{dtype}")
    return types


def attention_cases() -> Iterator[tuple[str, torch.dtype, int, int, bool, bool]]:
    """Kernel, dtype, width, kind of score, whether ranges and a bias are given."""
    for kernel in ("forward", "queries", "keys"):
        yield kernel, torch.bfloat16, 64, 0, True, False
        yield kernel, torch.float32, 32, 3, True, True
        yield kernel, torch.float16, 128, 0, False, True
        yield kernel, torch.float32, 128, 0, False, False
        yield kernel, torch.bfloat16, 256, 0, True, False


@pytest.mark.cases(6)
@pytest.mark.parametrize(("name", "dtype", "width", "kind", "ranged", "biased"), list(attention_cases()))
def test_attention_compiles(name: str, dtype: torch.dtype, width: int, kind: int, ranged: bool, biased: bool) -> None:
    kernel = {
        "forward": triton_jagged._forward,
        "queries": triton_jagged._backward_queries,
        "keys": triton_jagged._backward_keys,
    }[name]
    rows, keys, warps, stages = triton_jagged._tiles(name, dtype, width)
    short = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype]
    constants = {
        "KIND": kind, "RANGED": ranged, "BIASED": biased, "D": width - 4, "WIDTH": width, "BM": rows, "BN": keys,
        "COUNT": 3 if ranged else 1, "PRECISION": "tf32x3" if dtype == torch.float32 else "ieee",
    }  # fmt: skip
    assert "mma" in compiled(kernel, constants, attention_types(kernel, short), warps, stages)


@pytest.mark.cases(4)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("rule", [0, 1, 2, 3])
def test_updates_compile(rule: int, weighted: bool) -> None:
    kernel = triton_backend._update
    constants = {
        "DIM": 48, "BLOCK": 64, "RULE": rule, "WEIGHTED": weighted, "DECAYS": weighted,
        "PIECES": triton_backend._PIECES,
    }  # fmt: skip
    types = {name: "*i64" if name in WIDE else "*fp64" if name == "numbers" else "*fp32" for name in kernel.arg_names}
    assert "st.global" in compiled(kernel, constants, types, 1, 1)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("gated", [True, False])
def test_experts_compile(dtype: str, gated: bool) -> None:
    types = dict.fromkeys(("a", "b", "u", "y", "da", "rows", "out"), f"*{dtype}")
    types |= {"gates": "*fp32", "slots": "*i32", "places": "*i32", "end": "*i64", "sums": "*fp32", "count": "i32"}
    for kernel, constants in (
        (triton_experts._activate, {"GATED": gated, "BLOCK": 1024}),
        (triton_experts._differentiate, {"H": 1100, "GATED": gated, "BLOCK": 1024}),
        (triton_experts._combine, {"D": 96, "CHOICES": 3, "GATED": gated, "BLOCK": 128}),
    ):
        assert "st.global" in compiled(kernel, constants, types, 4, 1)
