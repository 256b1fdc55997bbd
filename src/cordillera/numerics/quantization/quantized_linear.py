"""Linear layer in eight bits as a module.

NaN and infinity have no code. A layer either raises an error for them, or sets the rows that contain them aside, counts
them, and returns them as NaN; the other rows are not affected.
"""

from __future__ import annotations

import hashlib
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cordillera.errors import NumericsError
from cordillera.numerics.quantization.engines import Int8Engine, all_finite, make_engine, saturates
from cordillera.numerics.quantization.fixed_dtypes import FixedDtypes
from cordillera.numerics.quantization.fused_linear import FusedLinear
from cordillera.numerics.quantization.integer_linear import UINT8, LinearWeight, make_weight, quantize_weight
from cordillera.numerics.quantization.quantizers import AffineParameters, check_finite, check_parameters

_FLOAT_BELOW_FUSED = 1 << 13
_FEW_INPUTS, _FEW_OUTPUTS = 32, 16  # sizes below which an eight-bit kernel is dominated by overhead
_MOST_FEW = 1 << 20  # weights up to which such a layer keeps float32


@dataclass(frozen=True)
class LinearConfig:
    """Settings for the quantisation of linear layers.

    Attributes:
        symmetric: Whether weights have no zero points, which saves the sums of rows.
        per_channel: Whether each output has its own scale; False, with one scale for all, is a baseline.
        nonfinite: Treatment of rows with NaN or infinity: ``propagate`` (the result is NaN, the rows are counted) or
            ``raise``.
        backend: ``torch`` (its fused kernels), ``reference`` (whole numbers, any machine), or ``auto``.
        seven_bits: Whether to quantise activations to half the range, which costs 6 dB; None to do so only if eight-bit
            products may saturate (:func:`~cordillera.numerics.quantization.engines.saturates`).
        float_below: Number of products (rows times inputs times outputs) up to which a layer multiplies in float32
            instead, as calls of a few microseconds have nothing to gain; at most 8192 if the whole layer is one kernel
            (:mod:`~cordillera.kernels.dense.vnni_linear`). Layers with at most this number of weights also
            keep them in float32. Layers of fewer than 32 inputs or 16 outputs multiply in float32 up to 2^20 weights,
            as eight bits are slower there; with 0, no layer does.
        estimator: Name of the method, from :data:`~cordillera.numerics.quantization.range_estimators.ESTIMATORS`, for
            callers that calibrate ranges of inputs; a layer takes ranges as they are.
    """

    symmetric: bool = True
    per_channel: bool = True
    nonfinite: str = "propagate"
    backend: str = "auto"
    seven_bits: bool | None = None
    float_below: int = 1 << 17
    estimator: str = "l2"

    def __post_init__(self) -> None:
        if self.nonfinite not in ("propagate", "raise"):
            raise NumericsError(f"{self.nonfinite!r} is no choice", where="nonfinite", remedy="propagate or raise")

    @property
    def narrow(self) -> bool:
        """Whether activations are limited to seven bits."""
        return saturates() if self.seven_bits is None else self.seven_bits


class QuantizedLinear(FixedDtypes):
    """Linear layer, optionally with ReLU, with int8 weights and uint8 activations; inference only.

    Inputs are ``float32 [..., K]`` and outputs ``[..., N]``; ``float16`` and ``bfloat16`` inputs are widened, and the
    output has their dtype. ``state_dict`` holds codes, scales and their SHA-256, which is checked when it is loaded.

    Args:
        weight: Quantised weight of the layer.
        input: Scale and zero point of the input, one each; None to choose them for every batch.
        relu: Whether negative results become zero.
        config: Settings; None for the defaults.
        float_weight: Weight, ``float32 [N, K]``, for multiplying tiny batches; None if there is none.

    Attributes:
        in_features: Number of inputs K.
        out_features: Number of outputs N.
        nonfinite_rows: Number of rows with NaN or infinity that were set aside so far.

    Raises:
        NumericsError: If the scale or the zero point is invalid.
    """

    codes: Tensor
    scale: Tensor
    zero_point: Tensor | None
    bias: Tensor | None
    float_weight: Tensor | None
    input_scale: Tensor | None
    input_zero_point: Tensor | None
    digest: Tensor

    def __init__(
        self,
        weight: LinearWeight,
        input: AffineParameters | None,
        *,
        relu: bool = False,
        config: LinearConfig | None = None,
        float_weight: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.config, self.relu = config or LinearConfig(), relu
        self.nonfinite_rows = 0
        for name in ("codes", "scale", "zero_point", "bias"):
            self.register_buffer(name, getattr(weight, name))
        self.register_buffer("float_weight", float_weight)
        self.register_buffer("input_scale", None if input is None else input.scale.reshape(()).float())
        zero = None if input is None else torch.zeros(()) if input.zero_point is None else input.zero_point.reshape(())
        self.register_buffer("input_zero_point", None if zero is None else zero.int())
        self.register_buffer("digest", torch.zeros(32, dtype=torch.uint8))
        self.digest.copy_(self._digest())
        self.pack()

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        input: AffineParameters | None = None,
        *,
        relu: bool = False,
        config: LinearConfig | None = None,
        name: str = "weight",
    ) -> QuantizedLinear:
        """Quantise a layer's weight and pack it.

        Args:
            linear: Layer in ``float32``, ``float16`` or ``bfloat16``, on the CPU.
            input: Scale and zero point of the input; see
                :func:`~cordillera.numerics.quantization.range_estimators.estimate`. None to choose them for every
                batch.
            relu: Whether negative results become zero.
            config: Settings; None for the defaults.
            name: Name of the weight for error messages.

        Raises:
            NumericsError: If weight or bias holds NaN or infinity; the message names the element.
        """
        config = config or LinearConfig()
        weight = quantize_weight(
            linear.weight, linear.bias, symmetric=config.symmetric, per_channel=config.per_channel, name=name
        )
        weights = weight.codes.numel()
        is_narrow = _is_narrow(linear.out_features, linear.in_features, config)
        small = weights <= config.float_below or (is_narrow and weights <= _MOST_FEW)
        kept = linear.weight.detach().float().clone() if small else None
        return cls(weight, input, relu=relu, config=config, float_weight=kept)

    @property
    def weight(self) -> LinearWeight:
        """Quantised weight that the buffers hold."""
        return make_weight(self.codes, self.scale, self.zero_point, self.bias)

    def _digest(self) -> Tensor:
        content = bytearray(self.weight.digest())
        for part in (self.input_scale, self.input_zero_point, self.float_weight):
            content += b"none" if part is None else part.numpy().tobytes()
        return torch.frombuffer(bytearray(hashlib.sha256(content).digest()), dtype=torch.uint8)

    def pack(self) -> None:
        """Pack the codes for the engine; needed again only after the buffers were changed in place."""
        self._input: tuple[float, int] | None = None
        if self.input_scale is not None and self.input_zero_point is not None:
            check_parameters(self.input_scale, self.input_zero_point, UINT8, where="input")
            self._input = (float(self.input_scale), int(self.input_zero_point))
        weight = self.weight
        self._made_engine: Int8Engine | None = None
        self._fused: FusedLinear | None = None
        wide = self._input is not None or not self.config.narrow
        if wide and self.config.backend == "auto" and FusedLinear.suits(weight):
            self._fused = FusedLinear(weight, self._input, relu=self.relu)
        # Values that every call needs are read here, as attributes of modules are slow.
        self.out_features, self.in_features = self.codes.shape
        weights = self.codes.numel()
        float_below = (
            min(self.config.float_below, _FLOAT_BELOW_FUSED) if self._fused is not None else self.config.float_below
        )
        self._float_rows = -1
        if self.float_weight is not None and weights:
            is_narrow = _is_narrow(self.out_features, self.in_features, self.config)
            self._float_rows = sys.maxsize if is_narrow else float_below // weights
        self._float: tuple[Any, Tensor | None] = self.float_weight, self.bias
        self._raises = self.config.nonfinite == "raise"

    @property
    def _engine(self) -> Int8Engine:
        """Engine for calls that no kernel of this library computes; packed at first use."""
        if self._made_engine is None:
            self._made_engine = make_engine(
                self.weight, self.config.backend, seven_bits=self.config.narrow, static=self._input is not None
            )
        return self._made_engine

    def verify(self) -> None:
        """Compare codes and scales with the SHA-256 computed at packing.

        Raises:
            NumericsError: If they differ.
        """
        if not torch.equal(self._digest(), self.digest):
            raise NumericsError(
                "codes or scales are not those that were packed: their SHA-256 differs",
                where=type(self).__name__,
                remedy="load or quantise the layer again, or use the layer in float32",
            )

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        missing, errors = len(missing_keys), len(error_msgs)
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        if len(error_msgs) > errors:
            return  # torch reports them
        lacks = missing_keys[missing:]
        if not lacks:
            self.verify()
            self.pack()
        elif any(prefix + name in state_dict for name in self._buffers):  # not reported by torch if strict is False
            raise NumericsError(f"the state lacks {', '.join(lacks)}", where=type(self).__name__)

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype != torch.float32:
            return self.forward(widened(x)).to(x.dtype)
        if x.dim() != 2:
            y = self.forward(x.reshape(x.shape[:-1].numel(), x.shape[-1]))
            return y.view(*x.shape[:-1], self.out_features)
        rows, inner = x.shape
        if inner != self.in_features:
            raise NumericsError(f"{list(x.shape)} inputs for {self.in_features}", where="x")
        if rows <= self._float_rows:
            # Nothing is quantised, so NaN and infinity propagate as in any product.
            if self._raises:
                check_finite(x, "x")
            y = F.linear(x, *self._float)
            return y.relu_() if self.relu else y
        if rows and self._fused is not None:
            fused = self._fused(plain(x))
            if fused is not None:
                return fused
        if all_finite(x):
            return self._multiply(plain(x))
        x, bad = take_out_nonfinite(x, self.config)
        self.nonfinite_rows += int(bad.sum())
        return self.forward(x).masked_fill_(bad[:, None], torch.nan)

    def _multiply(self, x: Tensor) -> Tensor:
        if self._input is None:
            return self._engine.dynamic(x, self.relu)
        return self._engine.from_float(x, *self._input, self.relu)

    def extra_repr(self) -> str:
        """Return the settings that ``repr`` shows."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"relu={self.relu}, activations={'dynamic' if self._input is None else 'static'}"
        )


def _is_narrow(outputs: int, inputs: int, config: LinearConfig) -> bool:
    """Whether a layer is faster in float32, however many rows there are."""
    return config.float_below > 0 and (inputs < _FEW_INPUTS or outputs < _FEW_OUTPUTS)


def take_out_nonfinite(x: Tensor, config: LinearConfig) -> tuple[Tensor, Tensor]:
    """Replace rows of ``x [M, K]`` with NaN or infinity by zeros, and return which they are, ``bool [M]``.

    Raises:
        NumericsError: If there is such a row and ``config.nonfinite`` is ``raise``.
    """
    if config.nonfinite == "raise":
        check_finite(x, "x")
    bad = ~torch.isfinite(x).all(1)
    return x.masked_fill(bad[:, None], 0.0), bad


def plain(x: Tensor) -> Tensor:
    """Return ``x`` detached and contiguous; ``x`` itself if it already is, as each torch call takes time."""
    return x.detach().contiguous() if x.requires_grad or not x.is_contiguous() else x


def widened(x: Tensor) -> Tensor:
    """Convert ``float16`` or ``bfloat16`` to float32, which is exact.

    Raises:
        NumericsError: If ``x`` has another dtype.
    """
    if x.dtype not in (torch.float16, torch.bfloat16):
        remedy = "cast float64 with .float() if its precision is not needed"
        raise NumericsError(f"expected float32, float16 or bfloat16, not {x.dtype}", where="x", remedy=remedy)
    return x.float()
