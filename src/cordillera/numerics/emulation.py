"""Matrix products in a short format, on hardware that does not have it: any format, any rounding, forward and backward.

Both operands of a product are rounded, the products are summed in float32, and the sum is rounded once (Kalamkar et al.
2019, arXiv 1905.12322, with bfloat16). This is done below automatic differentiation, where gradients of inputs and of
weights are products like any other: a model does not know of it, and nothing of the backward pass is left out.
Everything else stays float32: sums, activations, norms, losses, optimizers.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from cordillera.errors import NumericsError
from cordillera.numerics.formats import FORMATS, Format, format_named
from cordillera.numerics.rounding import Rounding, random_bits, round_to

FormatName = Literal["bf16", "fp16", "e4m3fn", "e4m3fnuz", "e5m2", "e3m2", "e2m3", "e2m1"]
RoundingName = Literal["nearest_even", "nearest_away", "toward_zero", "stochastic"]


class EmulationConfig(BaseModel):
    """How training is emulated in a short format: the recipe's ``[training.emulate]`` section.

    Attributes:
        format: What both operands and the result of every matrix product are rounded to, in forward and backward
            passes; sums inside a product are float32.
        rounding: Of operands and results.
        weights: How matrices and embedding tables are kept between steps; vectors (biases, norms) stay float32.
            ``master``: in float32, and each step computes with a copy in the format. ``none``: in the format itself;
            an update is computed in float32 and rounded. ``split``: as upper and lower 16 bits of float32; steps
            compute with the upper half, updates with both (``bf16`` only).
        weight_rounding: Of the copy (``master``) or of the update (``none``); unset for that of ``rounding``. A
            ``split`` always cuts off.
        flush_subnormals: Make zeros of numbers below the format's smallest normal one.
        seed: Of stochastic rounding.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: FormatName = "bf16"
    rounding: RoundingName = "nearest_even"
    weights: Literal["master", "none", "split"] = "master"
    weight_rounding: RoundingName | None = None
    flush_subnormals: bool = False
    seed: int = Field(0, ge=0)

    @property
    def target(self) -> Format:
        """The format."""
        return FORMATS[self.format]

    @property
    def rounding_of_weights(self) -> Rounding:
        """How weights are rounded."""
        if self.weights == "split":
            return Rounding.toward_zero
        return Rounding(self.weight_rounding or self.rounding)


_aten = torch.ops.aten
# Where the operands of products stand among the arguments. What is added to a product is not one of them.
_OPERANDS: dict[Any, tuple[int, int]] = {
    _aten.mm: (0, 1),
    _aten.bmm: (0, 1),
    _aten.mv: (0, 1),
    _aten.dot: (0, 1),
    _aten.addmm: (1, 2),
    _aten.addmm_: (1, 2),
    _aten.baddbmm: (1, 2),
    _aten.baddbmm_: (1, 2),
    _aten.addbmm: (1, 2),
    _aten.addbmm_: (1, 2),
    _aten.addmv: (1, 2),
    _aten.addmv_: (1, 2),
}
# Made of the ones above, but seen whole where no gradients are recorded.
_COMPOSED = {_aten.linear, _aten.matmul, _aten.einsum, _aten.tensordot, _aten.inner, _aten.chain_matmul}
_NOT_EMULATED = ("convolution", "scaled_dot_product", "attention_forward", "flash_attention", "lstm", "gru", "rnn")


class EmulatedProducts(TorchDispatchMode):
    """A region in which matrix products of float32 are computed as a short format would.

    Forward and backward pass of a step belong into one region. The roundings of a region depend on ``config.seed``, the
    step and their order, so that a step that is repeated gives the same bits.

    Args:
        config: Format and rounding.
        step: Number of the step; only stochastic rounding looks at it.

    Raises:
        NumericsError: on a product inside that cannot be emulated: a convolution, fused attention, a recurrent layer.
    """

    def __init__(self, config: EmulationConfig, step: int = 0) -> None:
        super().__init__()
        self.config, self.step = config, step
        self._format = format_named(config.format)
        self._roundings = 0

    def round(self, x: Tensor) -> Tensor:
        """Round as operands and results are.

        Args:
            x: float32 or float64.
        """
        random = None
        rounding = Rounding(self.config.rounding)
        if rounding is Rounding.stochastic:
            self._roundings += 1
            places = torch.arange(x.numel(), device=x.device).view(x.shape)
            random = random_bits(self.config.seed, self.step, self._roundings, places)
        return round_to(x, self._format, rounding, flush_subnormals=self.config.flush_subnormals, random=random)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        packet = func.overloadpacket
        operands = _OPERANDS.get(packet)
        if operands is None:
            if packet in _COMPOSED:
                with self:
                    return func.decompose(*args, **kwargs)
            if any(part in packet.__name__ for part in _NOT_EMULATED):
                raise NumericsError(
                    f"products inside {packet.__name__} cannot be rounded from outside",
                    where="training.emulate",
                    remedy="use a model of linear layers and matrix products, or train without emulation",
                )
            return func(*args, **kwargs)
        if args[operands[0]].dtype not in (torch.float32, torch.float64):
            return func(*args, **kwargs)
        arguments = list(args)
        for position in operands:
            arguments[position] = self.round(args[position])
        result = func(*arguments, **kwargs)
        rounded = self.round(result)
        return result.copy_(rounded) if func._schema.is_mutable else rounded
