"""Emulation of matrix products in a short format: any format, any rounding, forward and backward.

Both operands of a product are rounded, the products are summed in float32, and the sum is rounded once (Kalamkar et al.
2019, arXiv 1905.12322, with bfloat16). This happens below automatic differentiation, where gradients of inputs and of
weights are products like any other, so models need no change and the backward pass is covered completely. Everything
else stays float32: sums, activations, norms, losses, optimizers.

Formats of eight bits and fewer have too small a range for that. Their operands get scales, computed from each tensor
when it is multiplied (Micikevicius et al. 2022, arXiv 2209.05433, section 3), and gradients get a format of their own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from cordillera.errors import NumericsError
from cordillera.numerics.emulation.scaling import LossScale, round_scaled, scale_of
from cordillera.numerics.formats.formats import FORMATS, Format
from cordillera.numerics.formats.mx import round_to_blocks
from cordillera.numerics.formats.rounding import Rounding, random_bits, round_to

FormatName = Literal["bf16", "fp16", "e4m3fn", "e4m3fnuz", "e5m2", "e3m2", "e2m3", "e2m1"]
RoundingName = Literal["nearest_even", "nearest_away", "toward_zero", "stochastic"]


class EmulationConfig(BaseModel):
    """Settings of training that emulates a short format: the recipe's ``[training.emulate]`` section.

    Attributes:
        format: Format to which both operands and the result of every matrix product are rounded, in forward and
            backward passes; sums inside a product are float32.
        gradient_format: Format for gradients that are operands or results in backward passes; unset for ``format``. FP8
            training uses ``e5m2`` beside ``e4m3fn``.
        scale: Elements that share a scale, computed from the operands of each product: ``none`` (no scales),
            ``tensor``, ``row`` (of the left operand; a column of the right one) or ``block`` (32 along the sum, powers
            of two: MX). With scales, results stay float32.
        power_of_two: Whether scales of ``tensor`` and ``row`` are rounded up to powers of two.
        weight_gradients: Precision of the products that compute gradients of weights: ``format`` to round them like all
            others, ``float32`` to leave them unrounded.
        loss_scale: Power of two by which gradients are multiplied before they are rounded and divided afterwards, which
            is equivalent to multiplying the loss. ``dynamic`` starts at 65536; when a gradient overflows, it is halved
            and the update skipped, and it is doubled after ``loss_scale_window`` steps. Unset for none.
        loss_scale_window: Number of steps without an overflow after which a ``dynamic`` loss scale is doubled.
        rounding: Rounding of operands and results.
        weights: Storage of matrices and embedding tables between steps; vectors (biases, norms) stay float32.
            ``master``: in float32, and each step computes with a copy in the format (with scales, products round the
            weights). ``none``: in the format itself (with scales, one for each row or block); an update is computed in
            float32 and rounded. ``split``: as upper and lower 16 bits of float32; steps compute with the upper half,
            updates with both (``bf16`` only).
        weight_rounding: Rounding of the copy (``master``) or of the update (``none``); unset for ``rounding``.
            ``split`` always truncates.
        flush_subnormals: Whether numbers below the format's smallest normal one become zero.
        seed: Seed of stochastic rounding.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: FormatName = "bf16"
    gradient_format: FormatName | None = None
    scale: Literal["none", "tensor", "row", "block"] = "none"
    power_of_two: bool = False
    weight_gradients: Literal["format", "float32"] = "format"
    loss_scale: float | Literal["dynamic"] | None = None
    loss_scale_window: int = Field(2000, ge=1)
    rounding: RoundingName = "nearest_even"
    weights: Literal["master", "none", "split"] = "master"
    weight_rounding: RoundingName | None = None
    flush_subnormals: bool = False
    seed: int = Field(0, ge=0)

    @model_validator(mode="after")
    def _fits_together(self) -> EmulationConfig:
        if self.power_of_two and self.scale not in ("tensor", "row"):
            raise ValueError("power_of_two is of scale = 'tensor' or 'row'; blocks have powers of two in any case")
        if self.flush_subnormals and self.scale == "block":
            raise ValueError("flush_subnormals is not defined for scale = 'block'")
        if self.loss_scale is not None and self.scale != "none":
            raise ValueError("gradients have scales already: unset loss_scale, or set scale = 'none'")
        if self.loss_scale not in (None, "dynamic"):
            try:
                LossScale(float(self.loss_scale))
            except NumericsError as error:
                raise ValueError(str(error)) from error
        return self

    @model_validator(mode="after")
    def _takes_effect(self) -> EmulationConfig:
        if self.loss_scale is not None and self.rounding == "toward_zero":
            raise ValueError("rounding toward zero hides overflows: unset loss_scale, or choose another rounding")
        if self.weight_rounding is not None and self.weights == "master" and self.scale != "none":
            raise ValueError("with scales, products round the weights of a master copy: set rounding")
        return self

    @property
    def target(self) -> Format:
        """Format of operands and results."""
        return FORMATS[self.format]

    @property
    def gradient_target(self) -> Format:
        """Format of gradients."""
        return FORMATS[self.gradient_format or self.format]

    @property
    def rounding_of_weights(self) -> Rounding:
        """Rounding of weights."""
        if self.weights == "split":
            return Rounding.toward_zero
        return Rounding(self.weight_rounding or self.rounding)

    def check(self, precision: str, compiles: bool) -> None:
        """Check that training can be emulated.

        Args:
            precision: Precision in which training computes.
            compiles: Whether training is compiled.

        Raises:
            ValueError: If the precision is not float32, training is compiled, or ``weights`` is ``split`` with a format
                other than bf16.
        """
        if precision != "fp32":
            raise ValueError("emulate rounds what float32 computes: set precision = 'fp32'")
        if compiles:
            raise ValueError("compiled code cannot be emulated: set compile = false")
        if self.weights == "split" and self.format != "bf16":
            raise ValueError("halves of float32 are bf16: set emulate.format = 'bf16', or emulate.weights = 'master'")

    def make_loss_scale(self) -> LossScale | None:
        """Return the initial loss scale, or None."""
        if self.loss_scale is None:
            return None
        return (
            LossScale(window=self.loss_scale_window)
            if self.loss_scale == "dynamic"
            else LossScale(self.loss_scale, None)
        )


_aten = torch.ops.aten
# Positions of a product's operands among the arguments; a summand is no operand.
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
# Operators that compute only the product, for those that also add to it.
_ALONE: dict[Any, Any] = {
    _aten.addmm: _aten.mm,
    _aten.addmm_: _aten.mm,
    _aten.baddbmm: _aten.bmm,
    _aten.baddbmm_: _aten.bmm,
    _aten.addbmm: _aten.bmm,
    _aten.addbmm_: _aten.bmm,
    _aten.addmv: _aten.mv,
    _aten.addmv_: _aten.mv,
}
# Composed of the operators above, but dispatched whole if no gradients are recorded.
_COMPOSED = {_aten.linear, _aten.matmul, _aten.einsum, _aten.tensordot, _aten.inner, _aten.chain_matmul}
_NOT_EMULATED = ("convolution", "scaled_dot_product", "attention_forward", "flash_attention", "lstm", "gru", "rnn")


_computes_gradients: ContextVar[bool] = ContextVar("computes_gradients", default=False)


@contextlib.contextmanager
def computing_gradients() -> Iterator[None]:
    """Mark a region of a forward pass whose products belong to the backward pass.

    Its results have yet to be multiplied by the incoming gradient, so they contain no loss scale.
    """
    token = _computes_gradients.set(True)
    try:
        yield
    finally:
        _computes_gradients.reset(token)


class EmulatedProducts(TorchDispatchMode):
    """Region in which float32 matrix products are computed as in a short format.

    The forward and backward pass of a step belong in one region. The roundings of a region depend on ``config.seed``,
    the step and their order, so that a repeated step gives the same bits.

    In a backward pass an operand is a gradient unless it was an operand of the forward pass, which is recognized by its
    memory. The product of such an operand with a gradient is a weight gradient if the operand had been multiplied with
    a weight, as a matrix with a matrix.

    Args:
        config: Formats, scales and rounding.
        step: Number of the step; used only by stochastic rounding.
        loss_scale: Power of two by which gradients are multiplied before they are rounded and divided afterwards.

    Attributes:
        overflowed: Whether a gradient became infinity or NaN, if ``config`` has a loss scale.

    Raises:
        NumericsError: If a product inside cannot be emulated: a convolution, fused attention, or a recurrent layer.
    """

    def __init__(self, config: EmulationConfig, step: int = 0, loss_scale: float = 1.0) -> None:
        super().__init__()
        self.config, self.step, self.loss_scale = config, step, loss_scale
        self.overflowed = False
        self._roundings = 0
        self._tells_gradients = (
            config.gradient_format is not None or config.loss_scale is not None or config.weight_gradients == "float32"
        )
        # weak references, which keep their addresses from being reused by other tensors
        self._seen: set[StorageWeakRef] = set()
        self._beside_weights: set[StorageWeakRef] = set()

    def round(self, x: Tensor, is_gradient: bool = False) -> Tensor:
        """Round a tensor like operands and results without scales.

        Args:
            x: float32 or float64 tensor.
            is_gradient: Whether to use the gradients' format and loss scale.
        """
        if not is_gradient:
            return round_to(x, self.config.target, **self._how(x))
        if self.config.loss_scale is None:
            return round_to(x, self.config.gradient_target, **self._how(x))
        factor = 1.0 if _computes_gradients.get() else self.loss_scale
        scaled = x * factor
        # no saturation, as the largest value would hide an overflow
        rounded = round_to(scaled, self.config.gradient_target, saturate=False, **self._how(x))
        self.overflowed = self.overflowed or not bool(rounded.isfinite().all())
        return rounded / factor

    def _how(self, x: Tensor) -> dict[str, Any]:
        return {
            "rounding": Rounding(self.config.rounding),
            "flush_subnormals": self.config.flush_subnormals,
            "random": self._random(x),
        }

    def _random(self, x: Tensor) -> Tensor | None:
        if self.config.rounding != "stochastic":
            return None
        self._roundings += 1
        places = torch.arange(x.numel(), device=x.device).view(x.shape)
        return random_bits(self.config.seed, self.step, self._roundings, places)

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
        left, right = (args[position] for position in operands)
        are_gradients, is_of_weight = self._kinds(left, right)
        if is_of_weight and self.config.weight_gradients == "float32":
            return func(*args, **kwargs)
        if self.config.scale != "none":
            return self._scaled(func, args, kwargs, operands, are_gradients)
        arguments = list(args)
        for position, is_gradient in zip(operands, are_gradients, strict=True):
            arguments[position] = self.round(args[position], is_gradient)
        result = func(*arguments, **kwargs)
        rounded = self.round(result, any(are_gradients))
        return result.copy_(rounded) if func._schema.is_mutable else rounded

    def _kinds(self, left: Tensor, right: Tensor) -> tuple[tuple[bool, bool], bool]:
        """Return which operands are gradients, and whether the product is the gradient of a weight."""
        if not self._tells_gradients:
            return (False, False), False
        stores = [StorageWeakRef(x.untyped_storage()) for x in (left, right)]
        # a forward recomputed within a backward records gradients; a backward does not
        is_forward = torch._C._current_graph_task_id() == -1 or torch.is_grad_enabled()
        if is_forward and not _computes_gradients.get():
            self._seen.update(stores)
            for one, other in ((0, right), (1, left)):
                if _is_weight(other):
                    self._beside_weights.add(stores[one])
            return (False, False), False
        gradients = (stores[0] not in self._seen, stores[1] not in self._seen)
        is_of_weight = left.dim() == right.dim() == 2 and gradients[0] != gradients[1]
        return gradients, is_of_weight and stores[gradients[0]] in self._beside_weights

    def _scaled(self, func: Any, args: Any, kwargs: Any, operands: tuple[int, int], are_gradients: Any) -> Any:
        """Scale, round, multiply, undo the scales, and then add the summand."""
        packet = func.overloadpacket
        left, right = (args[position] for position in operands)
        along = -1 if right.dim() == 1 else -2  # the sum is over a vector's elements or a matrix's rows
        left_codes, left_scale = self._coded(left, are_gradients[0], -1)
        right_codes, right_scale = self._coded(right, are_gradients[1], along)
        result = _ALONE.get(packet, packet)(left_codes, right_codes)
        for scale, dim in ((left_scale, -1), (right_scale, along)):
            if scale is not None:
                result = result * (scale if scale.dim() == result.dim() else scale.squeeze(dim))
        if packet in _ALONE:
            result = result.sum(0) if packet in (_aten.addbmm, _aten.addbmm_) else result
            result = result * kwargs.get("alpha", 1)
            if kwargs.get("beta", 1) != 0:  # by definition, a beta of 0 ignores the input, even NaN
                result = result + args[0] * kwargs.get("beta", 1)
        if "out" in kwargs:
            return kwargs["out"].resize_(result.shape).copy_(result)
        return args[0].copy_(result) if func._schema.is_mutable else result

    def _coded(self, x: Tensor, is_gradient: bool, dim: int) -> tuple[Tensor, Tensor | None]:
        """Return numbers of the format and the scale for products of them; None if the numbers are values already."""
        config = self.config
        format = config.gradient_target if is_gradient else config.target
        if config.scale == "block":
            random = self._random(x)
            along = x.movedim(dim, -1)
            moved = None if random is None else random.movedim(dim, -1).contiguous()
            values = round_to_blocks(along, format, Rounding(config.rounding), random=moved)
            return values.movedim(-1, dim), None
        scale = scale_of(x, format, dim if config.scale == "row" else None, power_of_two=config.power_of_two)
        return round_scaled(x, scale, format, **self._how(x)), scale


def _is_weight(x: Tensor) -> bool:
    return isinstance(x if x._base is None else x._base, nn.Parameter)
