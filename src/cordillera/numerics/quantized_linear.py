"""Linear layers in eight bits as modules, and chains of them whose activations stay in uint8 from layer to layer.

NaN and infinity have no code. A layer either refuses them or takes the rows that hold them out, counts them, and gives
them back as NaN; the other rows are what they would be without.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cordillera.errors import NumericsError
from cordillera.numerics.formats import INTEGERS
from cordillera.numerics.integer_linear import UINT8, LinearWeight, make_weight, quantize_weight
from cordillera.numerics.linear_engines import all_finite, make_engine, saturates
from cordillera.numerics.quantizers import AffineParameters, check_finite, check_parameters
from cordillera.numerics.range_estimators import RunningHistogram, estimate


@dataclass(frozen=True)
class LinearConfig:
    """How linear layers are quantised.

    Attributes:
        symmetric: Weights without zero points, which saves the sums of rows.
        per_channel: One scale an output; False, one for all, is a baseline.
        nonfinite: What becomes of rows with NaN or infinity: ``propagate`` (NaN comes out, the rows are counted) or
            ``raise``.
        backend: ``torch`` (its fused kernels), ``reference`` (whole numbers, any machine), or ``auto``.
        seven_bits: Quantise activations to half the range; None where eight-bit products may saturate
            (:func:`~cordillera.numerics.linear_engines.saturates`), nowhere else, for it costs 6 dB.
        float_below: Products (rows times inputs times outputs) up to which a layer multiplies in float32 instead, since
            calls of a few microseconds have nothing to win. Layers of so few weights keep them in float32 as well.
        estimator: By which calibration chooses ranges, of
            :data:`~cordillera.numerics.range_estimators.ESTIMATORS`.
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
        """Whether activations keep to seven bits."""
        return saturates() if self.seven_bits is None else self.seven_bits


class QuantizedLinear(nn.Module):
    """A linear layer, with ReLU or without, in int8 weights and uint8 activations; inference only.

    Calls take ``float32 [..., K]`` (``float16`` and ``bfloat16`` are widened, and get their dtype back) and give
    ``[..., N]``. ``state_dict`` holds codes, scales and their SHA-256, which is checked when it is loaded.

    Args:
        weight: Of the layer, quantised.
        input: Scale and zero point of the input, one each; None lets every batch choose its own.
        relu: Whether negative results become zero.
        config: See :class:`LinearConfig`.
        float_weight: ``float32 [N, K]``, kept to multiply tiny batches by; None if there is none.

    Attributes:
        in_features: K.
        out_features: N.
        nonfinite_rows: Rows with NaN or infinity that were taken out so far.

    Raises:
        NumericsError: If scale or zero point are not possible.
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
        self.register_load_state_dict_post_hook(_verify_and_pack)

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
            linear: In ``float32``, ``float16`` or ``bfloat16``, on the CPU.
            input: As in the class; see :func:`~cordillera.numerics.range_estimators.estimate`.
            relu: Likewise.
            config: Likewise.
            name: What the weight is called in messages.

        Raises:
            NumericsError: If weight or bias holds NaN or infinity; the element is named.
        """
        config = config or LinearConfig()
        weight = quantize_weight(
            linear.weight, linear.bias, symmetric=config.symmetric, per_channel=config.per_channel, name=name
        )
        small = weight.codes.numel() <= config.float_below
        kept = linear.weight.detach().float().clone() if small else None
        return cls(weight, input, relu=relu, config=config, float_weight=kept)

    @property
    def weight(self) -> LinearWeight:
        """The quantised weight that the buffers hold."""
        return make_weight(self.codes, self.scale, self.zero_point, self.bias)

    def _digest(self) -> Tensor:
        content = bytearray(self.weight.digest())
        for part in (self.input_scale, self.input_zero_point, self.float_weight):
            content += b"none" if part is None else part.numpy().tobytes()
        return torch.frombuffer(bytearray(hashlib.sha256(content).digest()), dtype=torch.uint8)

    def pack(self) -> None:
        """Bring the codes into the engine's order; needed again only where someone changes the buffers in place."""
        self._input: tuple[float, int] | None = None
        if self.input_scale is not None and self.input_zero_point is not None:
            check_parameters(self.input_scale, self.input_zero_point, UINT8, where="input")
            self._input = (float(self.input_scale), int(self.input_zero_point))
        self._engine = make_engine(self.weight, self.config.backend, seven_bits=self.config.narrow)
        # What every call asks for is read here: attributes of modules are slow.
        self.out_features, self.in_features = self.codes.shape
        weights = self.codes.numel()
        self._float_rows = self.config.float_below // weights if self.float_weight is not None and weights else -1

    def verify(self) -> None:
        """Compare codes and scales with the SHA-256 that was made with them.

        Raises:
            NumericsError: If something changed.
        """
        if not torch.equal(self._digest(), self.digest):
            raise NumericsError(
                "codes or scales are not those that were packed: their SHA-256 differs",
                where=type(self).__name__,
                remedy="load or quantise the layer again, or use the layer in float32",
            )

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype != torch.float32:
            return self.forward(_widened(x)).to(x.dtype)
        if x.dim() != 2:
            rows = x.reshape(x.shape[:-1].numel(), x.shape[-1])
            return self.forward(rows).view(*x.shape[:-1], self.out_features)
        if x.shape[1] != self.in_features:
            raise NumericsError(f"{list(x.shape)} inputs for {self.in_features}", where="x")
        if x.shape[0] <= self._float_rows and self.float_weight is not None:
            # Nothing is quantised: NaN and infinity do what they do in any product.
            if self.config.nonfinite == "raise":
                check_finite(x, "x")
            y = F.linear(x, self.float_weight, self.bias)
            return y.relu_() if self.relu else y
        if not all_finite(x):
            return self._without_nonfinite(x)
        x = x.detach().contiguous()
        if self._input is None:
            return self._engine.dynamic(x, self.relu)
        return self._engine.from_float(x, *self._input, self.relu)

    def _without_nonfinite(self, x: Tensor) -> Tensor:
        x, bad = take_out_nonfinite(x, self.config)
        self.nonfinite_rows += int(bad.sum())
        y = (
            self._engine.dynamic(x, self.relu)
            if self._input is None
            else self._engine.from_float(x, *self._input, self.relu)
        )
        return y.masked_fill_(bad[:, None], torch.nan)

    def extra_repr(self) -> str:
        """What ``repr`` says of it."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"relu={self.relu}, activations={'dynamic' if self._input is None else 'static'}"
        )


class QuantizedMLP(nn.Module):
    """A chain of linear layers: the input is quantised once, and activations stay in uint8 until the end.

    Calls take ``float32 [..., K]`` and give ``float32 [..., N]``.

    Args:
        layers: With scales for their inputs; the output of each is the next one's input.
        output: Scale and zero point of the last output, which then is uint8 as well; None gives it in float32 at once.

    Attributes:
        nonfinite_rows: Rows with NaN or infinity that were taken out so far.

    Raises:
        NumericsError: If layers do not fit each other.
    """

    output_scale: Tensor | None
    output_zero_point: Tensor | None

    def __init__(self, layers: Iterable[QuantizedLinear], output: AffineParameters | None = None) -> None:
        super().__init__()
        layers = list(layers)
        self.layers = nn.ModuleList(layers)
        self.nonfinite_rows = 0
        self._chain: list[QuantizedLinear] = list(layers)
        chain = self._chain
        if not chain or any(layer._input is None for layer in chain):
            raise NumericsError("a chain needs layers whose inputs have scales", where="layers")
        for i, (layer, following) in enumerate(pairwise(chain)):
            if layer.out_features != following.in_features:
                message = f"{layer.out_features} outputs for {following.in_features} inputs"
                raise NumericsError(message, where=f"layers {i} and {i + 1}")
        if len({type(layer._engine) for layer in chain}) > 1:  # codes must be in one form
            for layer in chain:
                layer.config = replace(layer.config, backend="reference")
                layer.pack()
        if output is not None:
            check_parameters(output.scale, output.zero_point, UINT8, where="output")
        self.register_buffer("output_scale", None if output is None else output.scale.reshape(()).float())
        zero = None if output is None else 0 if output.zero_point is None else int(output.zero_point)
        self.register_buffer("output_zero_point", None if zero is None else torch.tensor(zero, dtype=torch.int32))
        self._read_scales()
        self.register_load_state_dict_post_hook(lambda module, keys: module._read_scales())

    def _read_scales(self) -> None:
        self._scales = [layer._input for layer in self._chain if layer._input is not None]
        self._output: tuple[float, int] | None = None
        if self.output_scale is not None and self.output_zero_point is not None:
            self._output = (float(self.output_scale), int(self.output_zero_point))

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype != torch.float32:
            return self.forward(_widened(x)).to(x.dtype)
        chain = self._chain
        rows = x.reshape(x.shape[:-1].numel(), x.shape[-1]) if x.dim() != 2 else x
        if rows.shape[1] != chain[0].in_features:
            raise NumericsError(f"{list(x.shape)} inputs for {chain[0].in_features}", where="x")
        bad = None
        if not all_finite(rows):
            rows, bad = take_out_nonfinite(rows, chain[0].config)
            self.nonfinite_rows += int(bad.sum())
        y = self._run(rows.detach().contiguous())
        if bad is not None:
            y = y.masked_fill(bad[:, None], torch.nan)
        return y if x.dim() == 2 else y.view(*x.shape[:-1], -1)

    def codes(self, x: Tensor) -> Tensor:
        """The last output as it is held, ``uint8 [M, N]``; for what goes on in eight bits.

        Args:
            x: ``float32 [M, K]``.

        Raises:
            NumericsError: If the last output has no scale, or ``x`` is not finite: codes cannot tell.
        """
        if self._output is None:
            raise NumericsError("the last output has no scale", where="output", remedy="give it one")
        check_finite(x, "x")
        return self._chain[-1]._engine.plain(self._codes(x.detach().contiguous(), [*self._scales, self._output]))

    def _codes(self, x: Tensor, scales: list[tuple[float, int]]) -> Tensor:
        """What the layers make of ``x``: the first scale is its own, each further one that of a layer's output."""
        codes = self._chain[0]._engine.codes(x, *scales[0])
        for layer, given, wanted in zip(self._chain, scales, scales[1:], strict=False):
            codes = layer._engine.from_codes(codes, *given, *wanted, layer.relu)
        return codes

    def _run(self, x: Tensor) -> Tensor:
        last = self._chain[-1]
        if self._output is not None:
            return last._engine.values(self._codes(x, [*self._scales, self._output]), *self._output)
        scale, zero_point = self._scales[-1]
        if len(self._chain) > 1:
            # Values of codes become the same codes again while they are packed.
            x = last._engine.values(self._codes(x, self._scales), scale, zero_point)
        return last._engine.from_float(x, scale, zero_point, last.relu)


def quantize_mlp(
    model: nn.Sequential,
    batches: Iterable[Tensor],
    *,
    config: LinearConfig | None = None,
    quantize_output: bool = False,
    name: str = "mlp",
) -> QuantizedMLP:
    """Calibrate a chain of linear layers and ReLUs on some batches, and quantise it.

    Args:
        model: Of ``Linear`` and ``ReLU``; ``Dropout`` and ``Identity`` are left out, as at inference.
        batches: ``float32 [B, K]``, like those that it will see.
        config: See :class:`LinearConfig`.
        quantize_output: Whether the last output is uint8 too.
        name: What the model is called in messages.

    Raises:
        NumericsError: If the model holds something else, there is no batch, or a weight or an activation is not finite.
    """
    config = config or LinearConfig()
    linears, relus = _chain(model, name)
    histograms = [RunningHistogram() for _ in range(len(linears) + 1)]
    with torch.no_grad():
        for batch in batches:
            y = batch.reshape(batch.shape[:-1].numel(), batch.shape[-1]).float()
            histograms[0].update(y, f"{name}: batch")
            for i, (linear, relu) in enumerate(zip(linears, relus, strict=True)):
                y = F.linear(y, linear.weight.float(), None if linear.bias is None else linear.bias.float())
                y = y.relu_() if relu else y
                histograms[i + 1].update(y, f"{name}: output of layer {i}")
    if not histograms[0].total and linears[0].in_features:
        raise NumericsError("there is nothing to calibrate with", where=f"{name}: batches")
    codes = INTEGERS["uint7"] if config.narrow else UINT8
    scales = [estimate(histogram, codes, config.estimator) for histogram in histograms]
    layers = [
        QuantizedLinear.from_linear(linear, scale, relu=relu, config=config, name=f"{name}: weight of layer {i}")
        for i, (linear, scale, relu) in enumerate(zip(linears, scales, relus, strict=False))
    ]
    return QuantizedMLP(layers, scales[-1] if quantize_output else None)


def _chain(model: nn.Sequential, name: str) -> tuple[list[nn.Linear], list[bool]]:
    """The linear layers, and whether ReLU follows."""
    linears: list[nn.Linear] = []
    relus: list[bool] = []
    for i, module in enumerate(model):
        if isinstance(module, nn.Linear):
            linears.append(module)
            relus.append(False)
        elif isinstance(module, nn.ReLU) and linears:
            relus[-1] = True
        elif not isinstance(module, (nn.Dropout, nn.Identity)):
            remedy = "quantise the chains of Linear and ReLU between such modules"
            raise NumericsError(f"module {i} is {type(module).__name__}", where=name, remedy=remedy)
    if not linears:
        raise NumericsError("it holds no linear layer", where=name)
    return linears, relus


def take_out_nonfinite(x: Tensor, config: LinearConfig) -> tuple[Tensor, Tensor]:
    """Zeros in place of rows with NaN or infinity, and which rows these are, ``bool [M]``.

    Args:
        x: ``float32 [M, K]``.
        config: Its ``nonfinite`` decides.

    Raises:
        NumericsError: If it says ``raise``.
    """
    if config.nonfinite == "raise":
        check_finite(x, "x")
    bad = ~torch.isfinite(x).all(1)
    return x.masked_fill(bad[:, None], 0.0), bad


def _widened(x: Tensor) -> Tensor:
    if x.dtype not in (torch.float16, torch.bfloat16):
        remedy = "cast float64 with .float() if its precision is not needed"
        raise NumericsError(f"expected float32, float16 or bfloat16, not {x.dtype}", where="x", remedy=remedy)
    return x.float()


def _verify_and_pack(module: QuantizedLinear, keys: Any) -> None:
    if not keys.missing_keys and not keys.unexpected_keys:
        module.verify()
        module.pack()
