"""Engines of fast int8 products: torch's FBGEMM and oneDNN kernels behind weights that are packed once.

An engine serves one weight. The whole pipeline, from float32 or uint8 to float32 or uint8, runs in one call of torch
(two if it must quantise first), so that no sum is written to memory before it has become an output.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from cordillera.errors import NumericsError
from cordillera.numerics.formats.formats import INTEGERS
from cordillera.numerics.quantization.integer_linear import (
    UINT8,
    LinearWeight,
    dequantize_product,
    integer_product,
    requantize,
)
from cordillera.numerics.quantization.quantizers import AffineParameters, choose_affine, encode_integers

ENGINES = ("x86", "fbgemm")
"""Torch's engines for x86, in order of preference."""


class Int8Engine(Protocol):
    """Multiplication of uint8 activations with an int8 weight."""

    def from_float(self, x: Tensor, scale: float, zero_point: int, relu: bool) -> Tensor:
        """Quantise a finite and contiguous ``x``, ``float32 [M, K]``, multiply, dequantize to ``float32 [M, N]``."""
        ...

    def dynamic(self, x: Tensor, relu: bool) -> Tensor:
        """Compute :meth:`from_float` with scale and zero point from the smallest and largest value of ``x``."""
        ...

    def from_codes(
        self, codes: Tensor, scale: float, zero_point: int, output_scale: float, output_zero_point: int, relu: bool
    ) -> Tensor:
        """Multiply codes of :meth:`codes` or of this method, and requantize to codes in the engine's own form.

        With ``relu``, negative results become ``output_zero_point``.
        """
        ...

    def codes(self, x: Tensor, scale: float, zero_point: int) -> Tensor:
        """Quantise a finite ``x``, ``float32 [M, K]``, to codes in the engine's own form."""
        ...

    def plain(self, codes: Tensor) -> Tensor:
        """Return the engine's codes as ``uint8``."""
        ...

    def values(self, codes: Tensor, scale: float, zero_point: int) -> Tensor:
        """Return the values of the engine's codes as ``float32``."""
        ...


class ReferenceEngine:
    """Whole numbers in torch, on any machine; the reference for the other engines."""

    def __init__(self, weight: LinearWeight, *, seven_bits: bool = False) -> None:
        self.weight, self.seven_bits = weight, seven_bits

    def codes(self, x: Tensor, scale: float, zero_point: int) -> Tensor:
        """Quantise as :meth:`Int8Engine.codes`."""
        return encode_integers(x, torch.tensor(scale), torch.tensor(zero_point), UINT8)

    def plain(self, codes: Tensor) -> Tensor:
        """Return ``codes`` unchanged."""
        return codes

    def values(self, codes: Tensor, scale: float, zero_point: int) -> Tensor:
        """Return ``(codes - zero_point) * scale``."""
        return (codes.float() - zero_point) * scale

    def from_float(self, x: Tensor, scale: float, zero_point: int, relu: bool) -> Tensor:
        """Compute :meth:`Int8Engine.from_float`."""
        product = integer_product(self.codes(x, scale, zero_point), zero_point, self.weight)
        return dequantize_product(product, self.weight, scale, relu=relu)

    def dynamic(self, x: Tensor, relu: bool) -> Tensor:
        """Compute :meth:`Int8Engine.dynamic`."""
        if not x.numel():
            return self.from_float(x, 1.0, 0, relu)
        scale, zero_point = dynamic_parameters(x, seven_bits=self.seven_bits)
        return self.from_float(x, scale, zero_point, relu)

    def from_codes(
        self, codes: Tensor, scale: float, zero_point: int, output_scale: float, output_zero_point: int, relu: bool
    ) -> Tensor:
        """Compute :meth:`Int8Engine.from_codes`."""
        output = AffineParameters(torch.tensor(output_scale), torch.tensor(output_zero_point))
        return requantize(integer_product(codes, zero_point, self.weight), self.weight, scale, output, relu=relu)


class TorchEngine:
    """Torch's fused kernels on x86: FBGEMM's, and oneDNN's if torch prefers them.

    Args:
        seven_bits: Whether to quantise dynamic activations to half the range, for machines whose int16 sums of pairs
            saturate.
        engines: Names of torch's engines, of which the first available one is used.
    """

    def __init__(self, weight: LinearWeight, *, seven_bits: bool = False, engines: Sequence[str] = ENGINES) -> None:
        self.weight, self.seven_bits = weight, seven_bits
        zero_point = torch.zeros_like(weight.scale) if weight.zero_point is None else weight.zero_point
        with packing_engine(engines), warnings.catch_warnings():
            # Torch calls these dtypes deprecated, but its kernels take no others.
            warnings.simplefilter("ignore", UserWarning)
            codes = torch._make_per_channel_quantized_tensor(weight.codes, weight.scale.double(), zero_point.long(), 0)
            self._packed = torch.ops.quantized.linear_prepack(codes, weight.bias)

    def codes(self, x: Tensor, scale: float, zero_point: int) -> Tensor:
        """Quantise to torch's ``quint8``, as :meth:`Int8Engine.codes`."""
        return torch.quantize_per_tensor(x, scale, zero_point, torch.quint8)

    def plain(self, codes: Tensor) -> Tensor:
        """Return the codes without the scale that torch stores with them."""
        return codes.int_repr()

    def values(self, codes: Tensor, scale: float, zero_point: int) -> Tensor:
        """Return the values of ``codes``, which hold their scale and zero point themselves."""
        return codes.dequantize()

    def from_float(self, x: Tensor, scale: float, zero_point: int, relu: bool) -> Tensor:
        """Compute :meth:`Int8Engine.from_float`."""
        ops = torch.ops.quantized
        if relu:
            return ops.linear_with_input_q_dq_qweight_dq_relu_output_fp32(x, scale, zero_point, self._packed)
        return ops.linear_with_input_q_dq_qweight_dq_output_fp32(x, scale, zero_point, self._packed)

    def dynamic(self, x: Tensor, relu: bool) -> Tensor:
        """Compute :meth:`Int8Engine.dynamic`."""
        ops = torch.ops.quantized
        return (ops.linear_relu_dynamic if relu else ops.linear_dynamic)(x, self._packed, self.seven_bits)

    def from_codes(
        self, codes: Tensor, scale: float, zero_point: int, output_scale: float, output_zero_point: int, relu: bool
    ) -> Tensor:
        """Compute :meth:`Int8Engine.from_codes`."""
        ops = torch.ops.quantized
        return (ops.linear_relu if relu else ops.linear)(codes, self._packed, output_scale, output_zero_point)


def saturates() -> bool:
    """Whether this machine's eight-bit products may saturate, so that activations should be limited to seven bits.

    Without VNNI instructions FBGEMM adds pairs of products in int16 (``vpmaddubsw``), which large codes overflow.
    """
    return not torch.cpu._is_vnni_supported()


def make_engine(
    weight: LinearWeight, backend: str = "auto", *, seven_bits: bool = False, static: bool = False
) -> Int8Engine:
    """Choose the engine for a weight.

    Args:
        backend: ``torch``, ``reference``, or ``auto``: torch's kernels if they exist, support the shape, and cannot
            saturate (:func:`saturates`); otherwise whole numbers in torch, which are exact and slower than float32.
        seven_bits: Whether to quantise dynamic activations to half the range.
        static: Whether the caller gives scale and zero point, so that codes may have eight bits.
    """
    if backend not in ("auto", "torch", "reference"):
        raise NumericsError(f"no backend {backend!r}", where="backend", remedy="auto, torch or reference")
    fits = bool(weight.codes.numel()) and bool(set(ENGINES) & set(torch.backends.quantized.supported_engines))
    exact = not saturates() or (seven_bits and not static)
    if backend == "torch" and not exact:
        raise NumericsError(
            "torch's products of eight-bit codes may saturate on this processor, which has no VNNI instructions",
            where="backend",
            remedy="take auto, or ranges of each batch with seven_bits",
        )
    if backend == "torch" or (backend == "auto" and fits and exact):
        return TorchEngine(weight, seven_bits=seven_bits)
    return ReferenceEngine(weight, seven_bits=seven_bits)


def dynamic_parameters(x: Tensor, *, seven_bits: bool = False) -> tuple[float, int]:
    """Return scale and zero point of a finite batch, not empty, as torch's ``linear_dynamic`` chooses them."""
    low, high = torch.aminmax(x)
    scale, zero_point = choose_affine(low, high, INTEGERS["uint7"] if seven_bits else UINT8)
    assert zero_point is not None
    return float(scale), int(zero_point)


@contextmanager
def packing_engine(engines: Sequence[str] = ENGINES) -> Iterator[None]:
    """Set torch's engine to the first available one of ``engines`` while weights are packed, as torch packs for it."""
    supported = [name for name in engines if name in torch.backends.quantized.supported_engines]
    if not supported:
        raise NumericsError(f"this build of torch has no engine {' or '.join(engines)}", remedy="backend='reference'")
    before = torch.backends.quantized.engine
    torch.backends.quantized.engine = supported[0]
    try:
        yield
    finally:
        torch.backends.quantized.engine = before


def all_finite(x: Tensor) -> bool:
    """Whether a tensor has neither NaN nor infinity; usually one pass, as a sum of finite values is mostly finite."""
    return math.isfinite(x.sum().item()) or bool(torch.isfinite(x).all())
