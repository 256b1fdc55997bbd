"""What work costs on a device: seconds from shapes, by a few constants with their provenance.

A constant is either a figure of a data sheet (:class:`cordillera.topology.Device`) or part of a :class:`Calibration`,
which says where its values are from and how far off they were.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from cordillera.topology import Device

Share = Annotated[float, Field(gt=0, le=1)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]

# Output tile of the large matrix kernels; a product's last wave of tiles is half empty on average.
_TILE_ROWS, _TILE_COLUMNS, _LOST_WAVES = 128, 256, 0.5
_OPTIMIZER_TRAFFIC = 40  # bytes a weight and step: Adam's moments, master weights, gradients, the norm, the cast
_SHORT = 192  # below this width or inner length a kernel has no long loop in which loads hide behind arithmetic


class Calibration(BaseModel):
    """The constants that no data sheet gives.

    Attributes:
        matrix: Share of the matrix engine's peak in an endless product.
        memory: Share of the memory's bandwidth in kernels that stream.
        attention: Share of the peak in a fused attention kernel.
        port: Share of a device's own port (NVLink) in collectives.
        network: Share of the network cards in collectives and messages.
        collective_s: Seconds that each collective costs whatever its size: launch, ramp, ranks that are late.
        message_s: Seconds that a device needs to issue each message of an all-to-all; an assumption, of the order of
            what a network card and its driver take for a work request.
        layer_s: Seconds of the host for each layer and microbatch, forward and backward: no layer is faster.
        provenance: From which measurements these are.
        error: Mean absolute error on them, as a part; None where nothing was fitted.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    matrix: Share = 0.796
    memory: Share = 0.85
    attention: Share = 0.50
    port: Share = 0.80
    network: Share = 0.906
    collective_s: Seconds = 181e-6
    message_s: Seconds = 1e-6
    layer_s: Seconds = 3.5e-3
    provenance: str = "not fitted"
    error: float | None = None


_MEASURED = (
    "five constants fitted to 62 measured steps of GPT 18.4B and 39.1B on 256 and 512 A100 (published with vTrain), "
    "layer_s to its one-node runs; attention is an assumption"
)
SHIPPED = {
    "A100 SXM4 80GB": Calibration(provenance=_MEASURED),
    "H100 SXM5 80GB": Calibration(
        matrix=0.65,
        provenance=f"as A100 ({_MEASURED}), but matrix, which was chosen in view of the throughput of Llama 3 405B "
        "(Grattafiori et al. 2024, table 4)",
    ),
}


def calibration_for(device: Device) -> Calibration:
    """The constants that ship for a device; for one that is not known, A100's, and the provenance says so.

    Args:
        device: By its name.
    """
    known = SHIPPED.get(device.name)
    if known is not None:
        return known
    return Calibration(provenance=f"not fitted on {device.name}: constants of A100")


class CostModel:
    """Seconds of the operations of a training step on one device.

    Args:
        device: What the data sheet says.
        calibration: What it does not.

    Attributes:
        device: As given.
        calibration: As given.
    """

    def __init__(self, device: Device, calibration: Calibration) -> None:
        self.device, self.calibration = device, calibration
        self._flops = device.matrix_flops_per_s * calibration.matrix
        self._stream = device.memory_bytes_per_s * calibration.memory
        self._tiles = _LOST_WAVES * device.processors * _TILE_ROWS * _TILE_COLUMNS

    def product(self, rows: float, columns: float, inner: float, count: float = 1.0) -> float:
        """A matrix product ``[rows, inner] x [inner, columns]`` of 16-bit numbers, ``count`` times in one kernel.

        The larger of arithmetic and memory traffic; their sum where a side is too short for one to hide the other.

        Args:
            rows: Of the result.
            columns: Of the result.
            inner: Length of the sums.
            count: Equal products.

        Returns:
            Seconds.
        """
        flops = 2.0 * rows * columns * inner * count
        # part of a wave of tiles is lost: as much arithmetic as `lost / (rows * columns * count)` of all
        arithmetic = flops * (1.0 + self._tiles / (rows * columns * count)) / self._flops
        moved = 2.0 * (rows * columns + rows * inner + columns * inner) * count / self._stream
        return arithmetic + moved if min(columns, inner) < _SHORT else max(arithmetic, moved)

    def linear(self, rows: float, outputs: float, inputs: float) -> tuple[float, float, float]:
        """Seconds of a linear layer's forward, of its input's gradient and of its weights' gradient.

        Args:
            rows: Tokens.
            outputs: Width of the result.
            inputs: Width of the input.
        """
        return (
            self.product(rows, outputs, inputs),
            self.product(rows, inputs, outputs),
            self.product(inputs, outputs, rows),
        )

    def stream(self, size: float) -> float:
        """Seconds to read or write ``size`` bytes of the device's memory."""
        return size / self._stream

    def optimizer(self, weights: float) -> float:
        """Seconds to update so many weights with Adam."""
        return self.stream(_OPTIMIZER_TRAFFIC * weights)

    def attention(self, flops: float) -> float:
        """Seconds of a fused attention kernel of so many FLOPs."""
        return flops / (self.device.matrix_flops_per_s * self.calibration.attention)
