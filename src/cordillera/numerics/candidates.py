"""Kernels that compute a linear layer on this device, each in its own precision: what :mod:`.dispatch` chooses from.

A candidate packs a weight once and gives a function of the input. All three products of training are such a layer:
``y = x W^T`` forwards, ``g W`` is a layer whose weight is ``W^T``, and ``g^T x`` one whose input is ``g^T`` and whose
weight is ``x^T``. Quantisation is part of every candidate's time.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from cordillera.errors import NumericsError

_GROUP = 32  # inputs that share a scale in int4
_SMALLEST_SCALE = 6.1e-5  # about the least normal number of fp16, as FBGEMM's
_LARGEST_FP16 = 65504.0

Kernel = Callable[[Tensor], Tensor]
"""``float32 [M, K] -> float32 [M, N]``."""


class Shape(NamedTuple):
    """Of a product.

    Attributes:
        rows: ``M``, of the input.
        outputs: ``N``.
        inputs: ``K``.
    """

    rows: int
    outputs: int
    inputs: int

    def __str__(self) -> str:
        return f"{self.rows} x {self.outputs} x {self.inputs}"


class Candidate(NamedTuple):
    """One way to compute a linear layer.

    Attributes:
        name: What plans call it.
        pack: From ``weight [N, K]``, ``bias [N]`` or None, and rows ``[R, K]`` to calibrate ranges on or None.
        needs: What it cannot do without: ``(weight's device, K, N)`` to a reason why it cannot be used, or None.
        calibrated: Whether its ranges come from calibration rows: it then knows one layer's inputs and no gradient's.
        emulated: Whether its arithmetic is imitated here: its error counts, its time does not.
        bits: Of a stored weight.
    """

    name: str
    pack: Callable[[Tensor, Tensor | None, Tensor | None], Kernel]
    needs: Callable[[torch.device, int, int], str | None]
    calibrated: bool = False
    emulated: bool = False
    bits: float = 32.0

    def supports(self, shape: Shape, device: torch.device) -> str | None:
        """Why it cannot compute a product; None where it can.

        Args:
            shape: Of the product.
            device: Of the weight.
        """
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
    # torch 2.13 reads past the end of other weights in int8.
    if inputs % _GROUP or outputs % 16:
        return f"takes {_GROUP} inputs and 16 outputs at a time, not {inputs} and {outputs}"
    return _on_cpu(device, inputs, outputs)


def _fp32(weight: Tensor, bias: Tensor | None, rows: Tensor | None) -> Kernel:
    weight = weight.detach().float().contiguous()
    return lambda x: F.linear(x, weight, bias)


def _bf16(weight: Tensor, bias: Tensor | None, rows: Tensor | None) -> Kernel:
    weight = weight.detach().to(torch.bfloat16).contiguous()

    def run(x: Tensor) -> Tensor:
        y = F.linear(x.to(torch.bfloat16), weight).float()
        return y if bias is None else y.add_(bias)

    return run


def _fp16_weights(weight: Tensor, bias: Tensor | None, rows: Tensor | None) -> Kernel:
    largest = float(weight.detach().abs().max())
    if not largest <= _LARGEST_FP16:
        raise NumericsError(f"a weight of {largest:g} does not fit into fp16", where="fp16 weights")
    packed = torch.ops.quantized.linear_prepack_fp16(weight.detach().float().contiguous(), bias)
    return _with_lost_rows(lambda x: torch.ops.quantized.linear_dynamic_fp16(x, packed))


def _int8_weight(weight: Tensor) -> Tensor:
    """Symmetric, with a scale an output channel."""
    weight = weight.detach().float()
    scale = weight.abs().amax(1).double().clamp(min=_SMALLEST_SCALE * 127) / 127
    if not bool(torch.isfinite(scale).all()):
        channel = int((~torch.isfinite(scale)).nonzero()[0])
        raise NumericsError(f"output channel {channel} has a weight that is not finite", where="int8")
    with warnings.catch_warnings():
        # Only the tensors that torch's engines pack are made this way; it says that they are to go some day.
        warnings.simplefilter("ignore", UserWarning)
        return torch.quantize_per_channel(weight, scale, torch.zeros_like(scale, dtype=torch.int64), 0, torch.qint8)


def _prepacked(weight: Tensor, bias: Tensor | None, engine: str) -> Any:
    before = torch.backends.quantized.engine
    try:
        torch.backends.quantized.engine = engine
        return torch.ops.quantized.linear_prepack(_int8_weight(weight), bias)
    finally:
        torch.backends.quantized.engine = before


def _int8_dynamic(weight: Tensor, bias: Tensor | None, rows: Tensor | None, engine: str) -> Kernel:
    packed = _prepacked(weight, bias, engine)
    # Seven bits keep processors without VNNI from saturating 16-bit sums; elsewhere they would cost 6 dB for nothing.
    reduced = not torch.cpu._is_vnni_supported()
    return _with_lost_rows(lambda x: torch.ops.quantized.linear_dynamic(x, packed, reduced))


def _int8_static(weight: Tensor, bias: Tensor | None, rows: Tensor | None) -> Kernel:
    assert rows is not None
    packed = _prepacked(weight, bias, "x86")
    lowest, highest = min(0.0, float(rows.min())), max(0.0, float(rows.max()))
    scale = max((highest - lowest) / 255, _SMALLEST_SCALE)
    zero = min(255, max(0, round(-lowest / scale)))
    run = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32
    return _with_lost_rows(lambda x: run(x, scale, zero, packed))


def _int8_weights(weight: Tensor, bias: Tensor | None, rows: Tensor | None) -> Kernel:
    quantized = _int8_weight(weight)
    payload, scale = quantized.int_repr().contiguous(), quantized.q_per_channel_scales().to(torch.bfloat16)

    def run(x: Tensor) -> Tensor:
        y = torch._weight_int8pack_mm(x.to(torch.bfloat16), payload, scale).float()
        return y if bias is None else y.add_(bias)

    return run


def _int4_weights(weight: Tensor, bias: Tensor | None, rows: Tensor | None) -> Kernel:
    weight = weight.detach().float()
    n, k = weight.shape
    groups = weight.reshape(n, k // _GROUP, _GROUP)
    lowest, highest = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
    scale = ((highest - lowest) / 15).clamp(min=_SMALLEST_SCALE)
    # The kernel takes a value as (q - 8) * scale + zero.
    zero = lowest + 8 * scale
    payload = ((groups - lowest.unsqueeze(2)) / scale.unsqueeze(2)).round_().clamp_(0, 15).to(torch.int32).view(n, k)
    packed = torch._convert_weight_to_int4pack_for_cpu(payload, 1)
    of_groups = torch.stack([scale, zero], 2).transpose(0, 1).contiguous().to(torch.bfloat16)  # [K / group, N, 2]

    def run(x: Tensor) -> Tensor:
        y = torch._weight_int4pack_mm_for_cpu(x.to(torch.bfloat16), packed, _GROUP, of_groups).float()
        return y if bias is None else y.add_(bias)

    return run


def _with_lost_rows(run: Kernel) -> Kernel:
    """A kernel of finite numbers that gives NaN for rows with any that is not, and leaves the other rows untouched.

    Integers have no NaN: torch's kernels take one for the largest or the smallest of them.
    """

    def guarded(x: Tensor) -> Tensor:
        if math.isfinite(float(x.sum())):
            return run(x)
        lost = ~torch.isfinite(x).all(1, keepdim=True)  # none where finite values have too large a sum
        return run(torch.where(lost, 0.0, x)).masked_fill_(lost, math.nan)

    return guarded


def fp8_rows(weight: Tensor, bias: Tensor | None, rows: Tensor | None = None) -> Kernel:
    """Both operands in e4m3 with a scale a row (torch's ``_scaled_mm``, row-wise).

    Args:
        weight: ``[N, K]``.
        bias: ``[N]`` or None.
        rows: Not needed.
    """
    packed, scale = _fp8_rows(weight.detach().float())

    def run(x: Tensor) -> Tensor:
        if not len(x):
            return x.new_zeros(0, len(packed))
        payload, of_rows = _fp8_rows(x)
        y = torch._scaled_mm(payload, packed.T, of_rows, scale.T, out_dtype=torch.float32)
        return y if bias is None else y.add_(bias)

    return run


def _fp8_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Payload and scales ``[rows, 1]``; a row with NaN or infinity gets a scale of NaN, so that it stays lost."""
    largest = x.abs().amax(1, keepdim=True)
    scale = (largest / 448.0).clamp(min=torch.finfo(torch.float32).tiny)
    finite = torch.isfinite(largest)
    payload = torch.where(finite, x / scale, 0.0).to(torch.float8_e4m3fn)
    return payload, torch.where(finite, scale, torch.nan)


CANDIDATES: dict[str, Candidate] = {
    one.name: one
    for one in (
        Candidate("fp32", _fp32, _anywhere),
        Candidate("bf16", _bf16, _anywhere, bits=16),
        Candidate("fp16 weights", _fp16_weights, partial(_with_engine, "x86"), bits=16),
        *(
            Candidate(
                f"int8 dynamic {engine}", partial(_int8_dynamic, engine=engine), partial(_with_engine, engine), bits=8
            )
            for engine in ("x86", "onednn")
        ),
        Candidate("int8 static", _int8_static, partial(_with_engine, "x86"), calibrated=True, bits=8),
        Candidate("int8 weights", _int8_weights, _in_groups, bits=8),
        Candidate("int4 weights", _int4_weights, _in_groups, bits=5),
        Candidate("fp8 rows", fp8_rows, _on_cpu, emulated=True, bits=8),
    )
}
"""By name. ``fp32`` is the reference that every plan may fall back to."""


def candidate(name: str) -> Candidate:
    """By name.

    Args:
        name: As a plan has it.

    Raises:
        NumericsError: there is none of this name.
    """
    if name not in CANDIDATES:
        raise NumericsError(
            f"no kernel is called {name!r}", where="candidates", remedy=f"one of {', '.join(CANDIDATES)}"
        )
    return CANDIDATES[name]


def chosen(names: Sequence[str] | None = None) -> list[Candidate]:
    """Several, the reference always first.

    Args:
        names: Of candidates; None for all.
    """
    found = [candidate(name) for name in (CANDIDATES if names is None else names)]
    return [CANDIDATES["fp32"], *(one for one in found if one.name != "fp32")]
