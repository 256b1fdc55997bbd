"""Kernels that compute a linear layer on this device, each in its own precision: what :mod:`.dispatch` chooses from.

A candidate packs a weight once and gives a function of the input. All three products of training are such a layer:
``y = x W^T`` forwards, ``g W`` is a layer whose weight is ``W^T``, and ``g^T x`` one whose input is ``g^T`` and whose
weight is ``x^T``. Quantisation is part of every candidate's time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from cordillera.errors import NumericsError

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
        pack: ``weight [N, K]``, ``bias [N]`` or None, and rows ``[R, K]`` on which ranges may be calibrated or None, to a
            kernel.
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


def _fp32(weight: Tensor, bias: Tensor | None, rows: Tensor | None) -> Kernel:
    weight = weight.detach().float().contiguous()
    return lambda x: F.linear(x, weight, bias)


def _bf16(weight: Tensor, bias: Tensor | None, rows: Tensor | None) -> Kernel:
    weight = weight.detach().to(torch.bfloat16).contiguous()

    def run(x: Tensor) -> Tensor:
        y = F.linear(x.to(torch.bfloat16), weight).float()
        return y if bias is None else y.add_(bias)

    return run


def fp8_rows(weight: Tensor, bias: Tensor | None, rows: Tensor | None = None) -> Kernel:
    """Both operands in e4m3 with a scale a row (torch's ``_scaled_mm``, row-wise).

    Args:
        weight: ``[N, K]``.
        bias: ``[N]`` or None.
        rows: Not needed.
    """
    packed, scale = _fp8_rows(weight.detach().float())

    def run(x: Tensor) -> Tensor:
        payload, of_rows = _fp8_rows(x)
        y = torch._scaled_mm(payload, packed.T, of_rows, scale.T, out_dtype=torch.float32)
        return y if bias is None else y.add_(bias)

    return run


def _fp8_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Payload and dequantisation scales ``[rows, 1]``; a row with NaN or infinity gets a scale of NaN: it stays lost."""
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
