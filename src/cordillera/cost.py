"""Cost of operations on a device: seconds from shapes, by a few constants of known provenance.

A constant is either a figure of a data sheet (:class:`cordillera.topology.Device`) or part of a :class:`Calibration`,
which says where its values come from and how large their error was.
"""

from __future__ import annotations

import csv
import hashlib
import io
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from cordillera.errors import PlanError
from cordillera.files import read_text, write
from cordillera.measurements import MOST_BYTES, Cells, Measurements
from cordillera.topology import Device, NotNegative, Numeric, Words

Share = Annotated[float, Numeric, Field(ge=1e-6, le=1, allow_inf_nan=False)]
Seconds = Annotated[float, Numeric, Field(ge=0, le=1e6, allow_inf_nan=False)]
ProductShape = tuple[int, int, int, int]  # rows, columns, inner, count

# Output tile of the large matrix kernels; a product's last wave of tiles is half empty on average.
_TILE_ROWS, _TILE_COLUMNS, _LOST_WAVES = 128, 256, 0.5
_OPTIMIZER_TRAFFIC = 40  # bytes per weight and step: Adam's moments, master weights, gradients, the norm, the cast
_CAST_TRAFFIC = 5  # bytes per number: read in 16 bits for the largest, read again, written in 8
_TURN_TRAFFIC = 2  # bytes per number: read in 8 bits and written in the other order
_NEAR = math.log(2)  # log of the product of all sides' ratios below which a measured product corrects the formula
_SHORT = 192  # width or inner length below which a kernel's loop is too short to hide loads behind arithmetic


class Calibration(BaseModel):
    """Constants that no data sheet gives.

    Attributes:
        matrix: Share of the matrix engine's peak in a very large product.
        memory: Share of the memory's bandwidth in kernels that stream.
        attention: Share of the peak in a fused attention kernel.
        port: Share of a device's own port (NVLink) in collectives.
        network: Share of the network cards in collectives and messages.
        collective_s: Fixed seconds of a collective: launch, ramp, and ranks that are late.
        message_s: Seconds that a device needs to issue each message of an all-to-all: an assumption, of the order of
            what a network card and its driver take for a work request.
        layer_s: Seconds of the host for each layer and microbatch, forward and backward; no layer is faster.
        one_ring: Whether a group with several devices of a host that are not neighbours is reduced in one ring, which
            enters and leaves the host through one device's share of the network cards; otherwise its devices divide
            that work.
        provenance: Measurements from which the constants come.
        error: Mean absolute relative error on these measurements; None if it is not known.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    matrix: Share = 0.81
    memory: Share = 0.85
    attention: Share = 0.50
    port: Share = 0.80
    network: Share = 0.70
    collective_s: Seconds = 134e-6
    message_s: Seconds = 1e-6
    layer_s: Seconds = 3.5e-3
    one_ring: bool = False
    provenance: Words = "not fitted"
    error: NotNegative | None = None

    @property
    def described(self) -> str:
        """Origin of the constants and their error, in words."""
        if self.error is None:
            return f"{self.provenance}; their error is not known"
        return f"{self.provenance}; predictions of these steps are {100 * self.error:.1f} % off on average"


_MEASURED = (
    "five constants fitted to 62 measured steps of GPT 18.4B and 39.1B on 256 and 512 A100 (published with vTrain), "
    "memory, port and network at their bounds; layer_s to its one-node runs; attention is an assumption"
)
SHIPPED = {
    # NCCL lets a ring enter and leave a host through the same card; devices far from it reach it through the processor,
    # which "would not be able to deliver full bandwidth" (NVIDIA's blog on NCCL 2.12, whose PXN goes over NVLink)
    "A100 SXM4 80GB": Calibration(one_ring=True, provenance=_MEASURED, error=0.059),
    "H100 SXM5 80GB": Calibration(
        matrix=0.65,
        provenance=f"as A100 ({_MEASURED}), but matrix, which was chosen in view of the throughput of Llama 3 405B "
        "(Grattafiori et al. 2024, table 4: its three rows are 2.4 % off on average), and one_ring, which was seen on "
        "A100 alone",
    ),
}


def alike(calibrations: Sequence[Calibration]) -> list[Calibration]:
    """Return the constants of communicating kinds of devices, with the slowest kind's constants for collectives.

    A prediction with them has no known error.
    """
    together: dict[str, Any] = {name: min(getattr(one, name) for one in calibrations) for name in ("port", "network")}
    together |= {name: max(getattr(one, name) for one in calibrations) for name in ("collective_s", "message_s")}
    together |= {"one_ring": any(one.one_ring for one in calibrations), "error": None}
    return [one.model_copy(update=together) for one in calibrations]


_SAME_CHIP = {
    **dict.fromkeys(("A100", "A800"), "A100 SXM4 80GB"),
    **dict.fromkeys(("H100", "H800", "H200", "GH200"), "H100 SXM5 80GB"),
}


def calibration_for(device: Device) -> Calibration:
    """Return the constants shipped for a device by its name.

    Other devices with one of these chips have its constants, all others those of H100, whose share of the peak is the
    lowest that is known; both without an error, and with a provenance that says so.
    """
    if device.name in SHIPPED:
        return SHIPPED[device.name]
    words = re.split(r"[\s_-]+", device.name.upper())
    name = next((_SAME_CHIP[word] for word in words if word in _SAME_CHIP), "")
    why = f"constants of {name}" if name else "constants of H100, the lowest that are known"
    found = SHIPPED[name or "H100 SXM5 80GB"]
    return found.model_copy(update={"provenance": f"not fitted on {device.name}: {why}", "error": None})


def whole(rows: float, columns: float, inner: float, count: float) -> ProductShape:
    """Return the shape of a product in whole numbers, as it can be measured; see :meth:`CostModel.product`.

    The ``rows``, ``columns`` and ``inner`` length may be fractional: tokens of an expert are a mean. The ``count`` of
    equal products is below 1 if a device has a part of one.
    """
    return max(1, round(rows)), max(1, round(columns)), max(1, round(inner)), max(1, round(count))


class Products:
    """Matrix products measured on a device, which the cost model uses and by which it corrects similar shapes.

    Args:
        seconds: Seconds of each ``(rows, columns, inner, count)``; see :meth:`CostModel.product`.
        source: Origin of the measurements, as text.
        device: Name of the device on which they were measured.
        dtype: Data type of the products: one of :attr:`DTYPES`.
    """

    COLUMNS = ("rows", "columns", "inner", "count", "seconds", "dtype", "device")
    DTYPES = ("bfloat16", "float16")  # the cost model prices products of 16-bit numbers

    def __init__(
        self, seconds: Mapping[ProductShape, float], source: str, device: str = "unknown", dtype: str = "bfloat16"
    ) -> None:
        if not seconds:
            raise PlanError("holds no products", where=source, remedy=f"columns are {', '.join(self.COLUMNS)}")
        self.seconds, self.source, self.device, self.dtype = dict(seconds), source, device, dtype

    def __str__(self) -> str:
        return f"{len(self.seconds):,} matrix products measured on {self.device} in {self.dtype} ({self.source})"

    @classmethod
    def read(cls, path: str | Path) -> Products:
        """Read a CSV file with the columns of :attr:`COLUMNS`, written by :meth:`write` or without a checksum by hand.

        Raises:
            PlanError: If the file does not match its checksum, or holds mistakes; the message names line and column of
                each.
        """
        text = read_text(path, error=PlanError, limit=MOST_BYTES)
        sealed = text.startswith("#")
        if sealed:
            seal, _, text = text.partition("\n")
            if seal.strip() != _seal(text):
                raise PlanError(
                    "does not fit its checksum: it was changed or damaged after it was written",
                    where=str(path),
                    remedy="measure again; if you changed it on purpose, delete its first line",
                )
        table = Measurements(path, text, {name: (name,) for name in cls.COLUMNS}, first_line=1 + sealed)
        found: dict[ProductShape, tuple[float, int]] = {}
        kind: tuple[str, str] | None = None
        for line, cells in table.rows():
            shape, seconds = cls._product(table, line, cells)
            dtype = table.choice(line, cells, "dtype", {name: name for name in cls.DTYPES})
            own = str(dtype), table.text(line, cells, "device")
            kind = kind or own
            if all(own) and dtype and all(kind) and own != kind:
                table.wrong(line, f"{own[0]} on {own[1]}, the rows before are {kind[0]} on {kind[1]}: a file for each")
            if shape is None or seconds is None:
                continue
            if shape in found:
                table.wrong(line, f"is the product of line {found[shape][1]} again: keep one")
            found[shape] = seconds, line
        table.check()
        dtype, device = kind or ("", "")
        return cls({shape: seconds for shape, (seconds, _) in found.items()}, table.source, device, dtype)

    @staticmethod
    def _product(table: Measurements, line: int, cells: Cells) -> tuple[ProductShape | None, float | None]:
        """Return shape and seconds of a row; record a wrong value as a mistake and return None for it."""
        rows, columns, inner, count = (table.count(line, cells, name) for name in Products.COLUMNS[:4])
        seconds = table.number(line, cells, "seconds", most=1e6)
        if rows is None or columns is None or inner is None or count is None:
            return None, seconds
        return (rows, columns, inner, count), seconds

    def write(self, path: str | Path) -> None:
        """Write the products as a CSV file, atomically; the first line is a checksum of the others.

        Raises:
            PlanError: If the file cannot be written.
        """
        text = io.StringIO()
        table = csv.writer(text, lineterminator="\n")
        table.writerow(self.COLUMNS)
        for shape, seconds in sorted(self.seconds.items()):
            table.writerow((*shape, f"{seconds:.4e}", self.dtype, self.device))
        write({Path(path): f"{_seal(text.getvalue())}\n{text.getvalue()}"})


def _seal(text: str) -> str:
    return f"# sha256 {hashlib.sha256(text.encode()).hexdigest()}"


class CostModel:
    """Seconds of the operations of a training step on one device.

    Args:
        device: Figures of the device's data sheet.
        calibration: Fitted constants that no data sheet gives.
        products: Products measured on the device; None to use the formula alone.
    """

    def __init__(self, device: Device, calibration: Calibration, products: Products | None = None) -> None:
        self.device, self.calibration, self.products = device, calibration, products
        self._flops = device.matrix_flops_per_s * calibration.matrix
        self._fp8_flops = (device.fp8_flops_per_s or 0.0) * calibration.matrix
        self._stream = device.memory_bytes_per_s * calibration.memory
        self._tiles = _LOST_WAVES * device.processors * _TILE_ROWS * _TILE_COLUMNS
        self._shapes: list[list[float]] = []
        self._ratios: list[float] = []
        for shape, seconds in products.seconds.items() if products is not None else ():
            self._shapes.append([math.log(side) for side in shape])
            self._ratios.append(seconds / self._formula(*shape))
        self._corrected: dict[tuple[float, ...], float] = {}

    def product(self, rows: float, columns: float, inner: float, count: float = 1.0, fp8: bool = False) -> float:
        """Return the seconds of ``count`` products ``[rows, inner] x [inner, columns]`` in one kernel, in 16 bits.

        The time of the kernel is the larger of arithmetic and memory traffic, or their sum if a side is too short for
        one to hide the other. A measured shape takes its measured time. A shape near a measured one (the ratios of
        their sides multiply to less than 2) is scaled by the ratio of measurement to formula of the nearest; others
        follow the formula. With ``fp8`` the factors have 8 bits, the result has 16, the kernel reaches the same share
        of the device's peak in FP8 (an assumption), and no measurement applies.

        Raises:
            PlanError: If the device has no FP8.
        """
        if fp8 and not self._fp8_flops:
            raise PlanError(
                "has no FP8", where=self.device.name, remedy="leave fp8 out, or state fp8_flops_per_s of the device"
            )
        seconds = self._formula(rows, columns, inner, count, fp8)
        return seconds * self._measured(rows, columns, inner, count) if self._shapes and not fp8 else seconds

    def _measured(self, *shape: float) -> float:
        """Return the ratio of measurement to formula of the nearest measured product; 1 if none is near."""
        ratio = self._corrected.get(shape)
        if ratio is None:
            sides = [math.log(side) for side in shape]
            away = [sum(abs(a - b) for a, b in zip(sides, one, strict=True)) for one in self._shapes]
            nearest = min(away)
            ratio = self._corrected[shape] = self._ratios[away.index(nearest)] if nearest < _NEAR else 1.0
        return ratio

    def _formula(self, rows: float, columns: float, inner: float, count: float, fp8: bool = False) -> float:
        flops = 2.0 * rows * columns * inner * count
        # part of a wave of tiles is lost: `lost / (rows * columns * count)` of all arithmetic
        arithmetic = flops * (1.0 + self._tiles / (rows * columns * count)) / (self._fp8_flops if fp8 else self._flops)
        each = 1.0 if fp8 else 2.0
        moved = (2.0 * rows * columns + each * (rows * inner + columns * inner)) * count / self._stream
        return arithmetic + moved if min(columns, inner) < _SHORT else max(arithmetic, moved)

    def linear(
        self, rows: float, outputs: float, inputs: float, count: float = 1.0, fp8: bool = False
    ) -> tuple[float, float, float]:
        """Return the seconds of the forward, the input gradient and the weight gradient of ``count`` linear layers.

        Each maps ``rows`` tokens of its own from a width of ``inputs`` to one of ``outputs``; all run in one kernel.
        With ``fp8`` inputs, weights and gradients of outputs are cast from 16 bits, each with a scale for the whole
        tensor that is found first, and transposed where a product needs the other order, as Hopper's kernels do.
        """
        products = (
            self.product(rows, outputs, inputs, count, fp8),
            self.product(rows, inputs, outputs, count, fp8),
            self.product(inputs, outputs, rows, count, fp8),
        )
        if not fp8:
            return products
        given, weights, gradients = (a * b * count for a, b in ((rows, inputs), (outputs, inputs), (rows, outputs)))
        casts = (
            _CAST_TRAFFIC * (given + weights),
            _CAST_TRAFFIC * gradients + _TURN_TRAFFIC * weights,
            _TURN_TRAFFIC * (given + gradients),
        )
        forward, of_input, of_weight = (a + self.stream(b) for a, b in zip(products, casts, strict=True))
        return forward, of_input, of_weight

    def stream(self, size: float) -> float:
        """Return the seconds to read or write ``size`` bytes of the device's memory."""
        return size / self._stream

    def optimizer(self, weights: float) -> float:
        """Return the seconds to update ``weights`` weights with Adam."""
        return self.stream(_OPTIMIZER_TRAFFIC * weights)

    def attention(self, flops: float) -> float:
        """Return the seconds of a fused attention kernel of ``flops`` FLOPs."""
        return flops / (self.device.matrix_flops_per_s * self.calibration.attention)
