"""Kernels that compute a linear layer on this device, each in its own precision: the candidates of :mod:`.dispatch`.

A candidate packs a weight once and returns a function of the input. All three products of training have this form: ``y
= x W^T`` in the forward; ``g W`` is a layer whose weight is ``W^T``; ``g^T x`` is a layer whose input is ``g^T`` and
whose weight is ``x^T``. The time of every candidate includes quantisation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from cordillera.errors import NumericsError
from cordillera.numerics.quantization.fp8_rows import fp8_rows
from cordillera.numerics.quantization.integer_linear import UINT8, LinearWeight, make_weight, quantize_weight
from cordillera.numerics.quantization.quantized_linear import LinearConfig, QuantizedLinear
from cordillera.numerics.quantization.quantizers import check_finite, choose_affine
from cordillera.numerics.quantization.range_estimators import RunningHistogram, least_l2
from cordillera.numerics.quantization.row_ranges import linear_by_rows
from cordillera.numerics.quantization.rows import pack_codes, unpack_codes
from cordillera.numerics.quantization.weight_only import HalfWeights, Int4Weights, Int8Weights, check_half

_GROUP = 32  # number of inputs that share a scale in int4

Kernel = Callable[[Tensor], Tensor]
"""Function from inputs to outputs, ``float32 [M, K] -> float32 [M, N]``."""

StoredWeight = dict[str, Tensor]
"""Weight as a candidate stores it: ``weight``, and scales or ranges if it has any."""


class Shape(NamedTuple):
    """Shape of a product: ``M`` input rows, ``N`` output features, ``K`` input features."""

    rows: int
    outputs: int
    inputs: int

    def __str__(self) -> str:
        return f"{self.rows} x {self.outputs} x {self.inputs}"


class Candidate(NamedTuple):
    """One way to compute a linear layer.

    Attributes:
        name: Name of the candidate in plans.
        store: Function from ``weight [N, K]`` and calibration rows ``[R, K]`` (or None) to a stored weight.
        load: Function from a stored weight, ``bias [N]`` or None, and whether a ReLU follows, to a kernel.
        needs: Function from the weight's device, ``K`` and ``N`` to why the candidate cannot be used, or None.
        calibrated: Whether its ranges come from calibration rows, so that it suits one layer's inputs and no gradients.
        emulated: Whether its arithmetic is emulated here, so that its error is meaningful and its time is not.
    """

    name: str
    store: Callable[[Tensor, Tensor | None], StoredWeight]
    load: Callable[[StoredWeight, Tensor | None, bool], Kernel]
    needs: Callable[[torch.device, int, int], str | None]
    calibrated: bool = False
    emulated: bool = False

    def pack(self, weight: Tensor, bias: Tensor | None, rows: Tensor | None) -> Kernel:
        """Pack a weight into a kernel.

        Args:
            weight: Weight, ``[N, K]``.
            bias: Bias ``[N]``, or None.
            rows: Calibration rows ``[R, K]``, or None.

        Raises:
            NumericsError: If the weight is not finite, or does not fit the format.
        """
        return self.load(self.store(weight, rows if self.calibrated else None), bias, False)

    def supports(self, shape: Shape, device: torch.device) -> str | None:
        """Return why the candidate cannot compute a product of a ``shape`` on a ``device``; None if it can."""
        return self.needs(device, shape.inputs, shape.outputs)


def _anywhere(device: torch.device, inputs: int, outputs: int) -> str | None:
    return None


def _on_cpu(device: torch.device, inputs: int, outputs: int) -> str | None:
    if device.type != "cpu":
        return f"runs on CPUs, not on {device.type}"
    return None if inputs and outputs else "an empty weight"


def _with_engine(engine: str, device: torch.device, inputs: int, outputs: int) -> str | None:
    if engine not in torch.backends.quantized.supported_engines:
        return f"this torch has no engine {engine}"
    return _on_cpu(device, inputs, outputs)


def _in_groups(device: torch.device, inputs: int, outputs: int) -> str | None:
    if inputs % _GROUP or outputs % 16:
        return f"takes {_GROUP} inputs and 16 outputs at a time, not {inputs} and {outputs}"
    return _on_cpu(device, inputs, outputs)


def _plain(weight: Tensor, rows: Tensor | None, dtype: torch.dtype) -> StoredWeight:
    weight = weight.detach().float().contiguous()
    (check_half if dtype == torch.float16 else partial(check_finite, where="weight"))(weight)
    return {"weight": weight.to(dtype)}


def _load_fp32(stored: StoredWeight, bias: Tensor | None) -> Kernel:
    return lambda x: F.linear(x, stored["weight"], bias)


def _load_bf16(stored: StoredWeight, bias: Tensor | None) -> Kernel:
    def run(x: Tensor) -> Tensor:
        y = F.linear(x.to(torch.bfloat16), stored["weight"]).float()
        return y if bias is None else y.add_(bias)

    return run


def _load_fp16(stored: StoredWeight, bias: Tensor | None, relu: bool) -> Kernel:
    return partial(HalfWeights(stored["weight"].float(), bias), relu=relu)


def _int8(weight: Tensor, rows: Tensor | None) -> StoredWeight:
    """Quantise symmetrically with a scale for each output channel, and store a range if there are rows.

    The range is that of the least squared error over the rows' values. It is better than from the least to the largest
    value on other rows, too, unless tails are so long that other rows hold values several times as large.
    """
    quantized = quantize_weight(weight.detach(), None)
    stored = {"weight": quantized.codes, "scale": quantized.scale.contiguous()}
    if rows is not None:
        histogram = RunningHistogram()
        histogram.update(rows, "rows to calibrate on")
        ends = least_l2(histogram, 255) if rows.numel() else (0.0, 0.0)
        stored["range"] = torch.tensor(ends, dtype=torch.float32)
    return stored


def _int8_weight(stored: StoredWeight, bias: Tensor | None) -> LinearWeight:
    return make_weight(stored["weight"], stored["scale"], None, bias)


def _load_int8(stored: StoredWeight, bias: Tensor | None, relu: bool) -> Kernel:
    """Load FBGEMM's pipeline if a range was stored, and otherwise products with the range of every row."""
    weight = _int8_weight(stored, bias)
    if "range" not in stored:
        return linear_by_rows(weight, relu=relu)
    input = choose_affine(stored["range"][0], stored["range"][1], UINT8)
    return QuantizedLinear(weight, input, relu=relu, config=LinearConfig(float_below=0)).forward


def _load_int8_weights(stored: StoredWeight, bias: Tensor | None, relu: bool) -> Kernel:
    weights = Int8Weights(_int8_weight(stored, bias))
    return lambda x: weights(x.bfloat16(), relu).float()


def _int4(weight: Tensor, rows: Tensor | None) -> StoredWeight:
    codes, offsets = Int4Weights.quantize(weight.detach().float())
    return {"weight": pack_codes(codes, 4), "scale": offsets.to(torch.bfloat16)}


def _load_int4(stored: StoredWeight, bias: Tensor | None, relu: bool) -> Kernel:
    weights = Int4Weights(unpack_codes(stored["weight"], 4), stored["scale"].float(), bias)
    return lambda x: weights(x.bfloat16(), relu).float()


def _store_fp8(weight: Tensor, rows: Tensor | None) -> StoredWeight:
    check_finite(weight, "weight")
    payload, scale = fp8_rows(weight.detach().float())
    return {"weight": payload, "scale": scale}


def then_relu(
    load: Callable[[StoredWeight, Tensor | None], Kernel],
) -> Callable[[StoredWeight, Tensor | None, bool], Kernel]:
    """Return a loader of kernels that apply a ReLU afterwards if requested, from a loader of kernels without one."""

    def loader(stored: StoredWeight, bias: Tensor | None, relu: bool) -> Kernel:
        run = load(stored, bias)
        return (lambda x: run(x).relu_()) if relu else run

    return loader


def load_fp8(stored: StoredWeight, bias: Tensor | None) -> Kernel:
    """Load a kernel with both operands in e4m3 and a scale for each row (torch's row-wise ``_scaled_mm``).

    Args:
        stored: Stored weight: ``weight [N, K]`` in e4m3 and ``scale [N, 1]``.
        bias: Bias ``[N]``, or None.
    """

    def run(x: Tensor) -> Tensor:
        if not len(x):
            return x.new_zeros(0, len(stored["weight"]))
        payload, of_rows = fp8_rows(x)
        y = torch._scaled_mm(payload, stored["weight"].T, of_rows, stored["scale"].T, out_dtype=torch.float32)
        return y if bias is None else y.add_(bias)

    return run


CANDIDATES: dict[str, Candidate] = {
    one.name: one
    for one in (
        Candidate("fp32", partial(_plain, dtype=torch.float32), then_relu(_load_fp32), _anywhere),
        Candidate("bf16", partial(_plain, dtype=torch.bfloat16), then_relu(_load_bf16), _anywhere),
        Candidate("fp16 weights", partial(_plain, dtype=torch.float16), _load_fp16, partial(_with_engine, "x86")),
        Candidate("int8 dynamic", _int8, _load_int8, partial(_with_engine, "x86")),
        Candidate("int8 static", _int8, _load_int8, partial(_with_engine, "x86"), calibrated=True),
        Candidate("int8 weights", _int8, _load_int8_weights, _in_groups),
        Candidate("int4 weights", _int4, _load_int4, _in_groups),
        Candidate("fp8 rows", _store_fp8, then_relu(load_fp8), _on_cpu, emulated=True),
    )
}
"""Candidates by name. ``fp32`` is the reference that every plan may fall back to."""


def candidate(name: str) -> Candidate:
    """Return a candidate by its name in plans.

    Raises:
        NumericsError: If there is no candidate of this name.
    """
    if name not in CANDIDATES:
        raise NumericsError(
            f"no kernel is called {name!r}", where="candidates", remedy=f"one of {', '.join(CANDIDATES)}"
        )
    return CANDIDATES[name]


def chosen(names: Sequence[str] | None = None) -> list[Candidate]:
    """Return candidates by their names, or all without names, with the fp32 reference always first."""
    found = [candidate(name) for name in (CANDIDATES if names is None else names)]
    return [CANDIDATES["fp32"], *(one for one in found if one.name != "fp32")]
