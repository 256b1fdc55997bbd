"""Codecs of tensors that are sent or stored: one contract, frames that describe themselves.

| codec | guarantee | payload |
| --- | --- | --- |
| `Raw` | lossless | the tensor's bytes |
| `Distinct` | lossless | rows that differ, in order of first occurrence, and which row is which |
| `Half` | rounded | float16 or bfloat16, to nearest |
| `IntegerRows` | rounded or unbiased | codes of 8 or 4 bits with one scale and one bias for each row |
| `Bounded` | bounded | codes `round(x / 2e)` of distinct rows, entropy coded, and exact outliers |

All of them write raw bytes where that is shorter, so a frame has at most 64 bytes more than its tensor. Any frame is
decoded by :func:`decode`, on every rank to the same tensor. Frames are made and read on the CPU.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from enum import Enum
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow
import torch
from torch import Tensor

from cordillera.distributed.codecs import frames
from cordillera.distributed.codecs.distinct_rows import distinct_rows
from cordillera.distributed.codecs.frames import MOST_DECODED_BYTES, Frame, read_varint, varint
from cordillera.distributed.codecs.quantizer import SLACK, Codes, dequantize, quantize
from cordillera.distributed.codecs.range_coder import decode_codes, decode_indices, encode_codes, encode_indices
from cordillera.errors import DataError, NumericsError
from cordillera.kernels.embeddings.cached_rows import FORMATS, NOT_FINITE, ROUNDINGS
from cordillera.kernels.embeddings.numba_rows import decode_block, encode_block
from cordillera.kernels.numba_support import pool, threads_for

RAW, FP16, BF16, INT8, INT4, DISTINCT, BOUNDED, BOUNDED_FAST = range(8)
_HALVES = {FP16: torch.float16, BF16: torch.bfloat16}
_INTEGERS = {INT8: 8, INT4: 4}
_HALF_PLACES = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
_WORDS = {4: np.uint32, 2: np.uint16}
_DAMAGED = "send the frame again; its payload is not what its header says"


class Guarantee(str, Enum):
    """Statement about the difference between a tensor and what its frame decodes to."""

    LOSSLESS = "lossless"
    """Every bit is kept."""
    BOUNDED = "bounded"
    """Every finite element is within ``bound * (1 + 2 ** -20)`` and one unit in its last place; all others are kept."""
    ROUNDED = "rounded"
    """Every element is rounded to the nearest number of its format."""
    UNBIASED = "unbiased"
    """Decoding is unbiased: its mean over frames of a tensor is the tensor."""


class _Compressed(NamedTuple):
    """Payload of a frame with its format and bound."""

    kind: int
    bound: float
    payload: bytes


class Codec(ABC):
    """A way to write tensors as frames.

    Attributes:
        name: Name of the codec, the same on all ranks.
        guarantee: Statement about the decoded tensor.
    """

    name: str
    guarantee: Guarantee

    def encode(self, tensor: Tensor) -> Tensor:
        """Write a tensor as a frame.

        Args:
            tensor: Rows, ``float32``, ``float16`` or ``bfloat16`` ``[..., D]`` of one to four dimensions, of any
                strides, on any device. All dimensions but the last count rows.

        Returns:
            Frame on the CPU, ``uint8 [bytes]``, at most 64 bytes longer than the tensor.

        Raises:
            NumericsError: If the type or the shape has no frame, or the codec cannot hold an element.
        """
        if tensor.dtype not in frames.DTYPES or not 1 <= tensor.dim() <= frames.MOST_DIMENSIONS:
            raise NumericsError(
                f"there are no frames of {tensor.dtype} {list(tensor.shape)}",
                where=f"codec {self.name!r}",
                remedy="give float32, float16 or bfloat16 of one to four dimensions",
            )
        rows = tensor.detach().cpu().contiguous().reshape(math.prod(tensor.shape[:-1]), tensor.shape[-1])
        found = self._compress(rows) if rows.numel() else _Compressed(RAW, 0.0, b"")
        if found.kind != RAW and len(found.payload) >= rows.numel() * rows.itemsize:
            found = _raw(rows)
        return frames.pack(Frame(found.kind, tensor.dtype, tuple(tensor.shape), found.bound, found.payload))

    def decode(self, frame: Tensor | bytes, *, most_bytes: int = MOST_DECODED_BYTES) -> Tensor:
        """Read a frame of any codec, as :func:`decode` does.

        Args:
            frame: Frame, ``uint8 [bytes]`` or bytes.
            most_bytes: Largest size of the decoded tensor in bytes.

        Returns:
            Tensor of the shape and type that was encoded, on the CPU.

        Raises:
            DataError: If the frame is damaged, or its tensor is larger than ``most_bytes``.
        """
        return decode(frame, most_bytes=most_bytes)

    @abstractmethod
    def _compress(self, rows: Tensor) -> _Compressed:
        """Return the payload of rows ``[N, D]`` with at least one element, contiguous, on the CPU."""


class Raw(Codec):
    """The tensor's own bytes."""

    name = "raw"
    guarantee = Guarantee.LOSSLESS

    def _compress(self, rows: Tensor) -> _Compressed:
        return _raw(rows)


class Distinct(Codec):
    """Rows that differ, once each, in order of first occurrence.

    The other rows cost the entropy of which earlier row they repeat; first occurrences cost nearly nothing.
    """

    name = "distinct"
    guarantee = Guarantee.LOSSLESS

    def _compress(self, rows: Tensor) -> _Compressed:
        words = _words(rows)
        first, inverse = distinct_rows(words)
        return _Compressed(DISTINCT, 0.0, _indices(first, inverse) + words[first].tobytes())


class Half(Codec):
    """Elements rounded to float16 or bfloat16, which also hold NaN and infinity.

    Args:
        dtype: ``torch.float16`` or ``torch.bfloat16``.

    Raises:
        NumericsError: From ``encode``, if a finite element is beyond the largest number of the format.
    """

    guarantee = Guarantee.ROUNDED

    def __init__(self, dtype: torch.dtype) -> None:
        self._kind = next((kind for kind, half in _HALVES.items() if half == dtype), None)
        if self._kind is None:
            raise NumericsError(f"{dtype} does not have 16 bits", where="Half", remedy="float16 or bfloat16")
        self._dtype, self.name = dtype, "fp16" if self._kind == FP16 else "bf16"

    def _compress(self, rows: Tensor) -> _Compressed:
        halves = rows.to(self._dtype)
        bad = halves.isinf() & ~rows.isinf()
        if bool(bad.any()):
            row, column = (int(at) for at in bad.nonzero()[0])
            what = f"row {row}, column {column} is {float(rows[row, column]):g}, beyond the largest {self.name} number"
            raise NumericsError(what, where=f"codec {self.name!r}", remedy="choose bf16, distinct or raw")
        assert self._kind is not None
        return _Compressed(self._kind, math.nan, _words(halves).tobytes())


class IntegerRows(Codec):
    """Rows in 8 or 4 bits with one scale and one bias each, in the layout of embedding tables.

    An element is off by at most half a step after rounding to nearest and by less than a step after stochastic
    rounding, where a step is the row's range over 255 or 15 (``cordillera.embeddings.row_formats`` states the bounds).

    Args:
        bits: 8 or 4.
        seed: Seed of stochastic rounding, which makes the codec unbiased; None rounds to nearest.

    Attributes:
        calls: Number of calls of ``encode`` so far. Each draws other random numbers, a function of seed and number.

    Raises:
        NumericsError: From ``encode``, if a row holds NaN, infinity or a range beyond the format.
    """

    def __init__(self, bits: Literal[8, 4], seed: int | None = None) -> None:
        self._kind = next((kind for kind, own in _INTEGERS.items() if own == bits), None)
        if self._kind is None:
            raise NumericsError(f"rows have 8 or 4 bits, not {bits}", where="IntegerRows")
        self.name = f"int{bits}"
        self.guarantee = Guarantee.ROUNDED if seed is None else Guarantee.UNBIASED
        self.calls = 0
        self._seed = seed

    def _compress(self, rows: Tensor) -> _Compressed:
        assert self._kind is not None
        values = _even(rows.float(), self._kind)
        target = torch.empty(values.shape[0], _integer_bytes(values.shape[1], self._kind), dtype=torch.uint8)
        rounding, seed = ("nearest", 0) if self._seed is None else ("stochastic", self._seed)
        threads = threads_for(values.numel())
        with pool(threads):
            bad, why = encode_block(
                FORMATS[self.name], ROUNDINGS[rounding], values.numpy(), target.numpy(), seed, 0, 0, self.calls, threads
            )
        self.calls += 1
        if bad >= 0:
            reason = "is not finite" if why == NOT_FINITE else f"is too large for {self.name}"
            what = f"row {int(bad)}: a number or the range {reason}"
            raise NumericsError(what, where=f"codec {self.name!r}", remedy="choose bounded, distinct or raw")
        return _Compressed(self._kind, math.nan, target.numpy().tobytes())


class Bounded(Codec):
    """Quantised rows within an absolute error, de-duplicated and entropy coded.

    Feng et al. 2024 (arXiv 2407.04272) quantise in the same way and code with vector-LZ or Huffman. Here repeated rows
    cost their index, and codes of distinct rows go to an adaptive range coder (best ratio) or to Zstandard at level 1
    (fast). NaN, infinities, negative zeros and numbers below the smallest normal float32 are kept exactly. Where the
    bound is zero or needs more than 65,536 codes, the frame is that of :class:`Distinct`.

    Args:
        bound: Largest error of an element: absolute, or a share of the tensor's range of finite elements.
        relative: Whether ``bound`` is a share of the range.
        fast: Whether to code with Zstandard.

    Raises:
        NumericsError: If ``bound`` is negative or not finite.
    """

    guarantee = Guarantee.BOUNDED

    def __init__(self, bound: float, *, relative: bool = True, fast: bool = False) -> None:
        if not 0 <= bound < math.inf:
            raise NumericsError(f"an error bound is at least 0 and finite, not {bound}", where="bound")
        self.bound, self.relative, self.fast = bound, relative, fast
        self.name = "bounded-fast" if fast else "bounded"

    def _compress(self, rows: Tensor) -> _Compressed:
        codes = quantize(rows.float().numpy(), self.bound, relative=self.relative)
        if codes is None:
            return Distinct()._compress(rows)
        if rows.dtype != torch.float32:
            codes = codes._replace(outliers=_outliers_of_halves(rows, codes))
        first, inverse = distinct_rows(codes.values)
        distinct = codes.values[first]
        if self.fast:
            centre, stream = 0, _zstandard(1).compress(distinct.tobytes(), asbytes=True)
        else:
            centre = int(np.rint(distinct.mean()))
            stream = encode_codes(distinct, centre).tobytes()
        signless = 2 * codes.lowest if codes.lowest >= 0 else -2 * codes.lowest - 1
        numbers = varint(signless) + varint(distinct.itemsize) + varint(centre)
        kind = BOUNDED_FAST if self.fast else BOUNDED
        parts = (_indices(first, inverse), numbers, _outliers(rows, codes.outliers), stream)
        return _Compressed(kind, codes.bound, b"".join(parts))


def decode(frame: Tensor | bytes, *, most_bytes: int = MOST_DECODED_BYTES) -> Tensor:
    """Read a frame of any codec.

    Args:
        frame: Frame, ``uint8 [bytes]`` or bytes.
        most_bytes: Largest size of the decoded tensor in bytes.

    Returns:
        Tensor of the shape and type that was encoded, on the CPU.

    Raises:
        DataError: If the frame is damaged, cut off or of another version, or its tensor is larger than ``most_bytes``.
    """
    found = frames.unpack(frame, most_bytes)
    if not found.raw_bytes:
        if found.payload:
            raise DataError("an empty tensor has a payload", where="frame", remedy=_DAMAGED)
        return torch.empty(found.shape, dtype=found.dtype)
    if found.kind in (RAW, *_HALVES):
        kind = _HALVES.get(found.kind, found.dtype)
        return (
            _tensor(_exactly(found.payload, found.rows * found.dim * kind.itemsize), kind)
            .to(found.dtype)
            .view(found.shape)
        )
    if found.kind in _INTEGERS:
        rows = _integer_rows(found)
    elif found.kind == DISTINCT:
        return _distinct(found)
    elif found.kind in (BOUNDED, BOUNDED_FAST):
        return _bounded(found)
    else:
        raise DataError(f"payload of unknown format {found.kind}", where="frame", remedy="run one version on all ranks")
    return rows.to(found.dtype).view(found.shape)


def _raw(rows: Tensor) -> _Compressed:
    return _Compressed(RAW, 0.0, _words(rows).tobytes())


def _words(rows: Tensor) -> Any:
    """Return the bits of a tensor as an array of unsigned integers."""
    return rows.view(torch.uint16 if rows.itemsize == 2 else torch.uint32).numpy()


def _tensor(content: bytes | bytearray, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=dtype)


def _exactly(content: bytes, size: int) -> bytes:
    """Return ``content``; raise an error if it is not ``size`` bytes long."""
    if len(content) != size:
        raise DataError(f"{len(content)} bytes of payload, not {size}", where="frame", remedy=_DAMAGED)
    return content


def _even(rows: Tensor, kind: int) -> Tensor:
    """Return rows padded to whole bytes by a copy of the last column, which does not change scale and bias."""
    return torch.cat([rows, rows[:, -1:]], dim=1) if kind == INT4 and rows.shape[1] % 2 else rows


def _integer_bytes(dim: int, kind: int) -> int:
    return dim + 8 if kind == INT8 else (dim + 1) // 2 + 4


def _integer_rows(frame: Frame) -> Tensor:
    size = _integer_bytes(frame.dim, frame.kind)
    payload = np.frombuffer(_exactly(frame.payload, frame.rows * size), np.uint8).reshape(frame.rows, size)
    width = frame.dim + frame.dim % 2 if frame.kind == INT4 else frame.dim
    target = np.empty((frame.rows, width), np.float32)
    threads = threads_for(target.size)
    with pool(threads):
        decode_block(FORMATS[f"int{_INTEGERS[frame.kind]}"], payload.copy(), target, threads)
    return torch.from_numpy(target[:, : frame.dim].copy())


def _indices(first: Any, inverse: Any) -> bytes:
    """Return which row is which: the number of distinct rows, and a stream unless all are."""
    if first.size == inverse.size:
        return varint(first.size)
    stream = encode_indices(inverse).tobytes()
    return varint(first.size) + varint(len(stream)) + stream


def _read_indices(frame: Frame) -> tuple[int, Any, int]:
    """Return the number of distinct rows, the distinct row of each row (None if all differ), and the place after."""
    count, at = read_varint(frame.payload, 0)
    if not 1 <= count <= frame.rows:
        raise DataError(f"{count} distinct rows of {frame.rows}", where="frame", remedy=_DAMAGED)
    if count == frame.rows:
        return count, None, at
    size, at = read_varint(frame.payload, at)
    inverse = np.empty(frame.rows, np.int64)
    stream = np.frombuffer(frame.payload[at : at + size], np.uint8)
    if stream.size != size or not decode_indices(stream, count, inverse):
        raise DataError("the indices of repeated rows are not valid", where="frame", remedy=_DAMAGED)
    return count, inverse, at + size


def _distinct(frame: Frame) -> Tensor:
    count, inverse, at = _read_indices(frame)
    content = _exactly(frame.payload[at:], count * frame.dim * frame.dtype.itemsize)
    words = np.frombuffer(content, _WORDS[frame.dtype.itemsize]).reshape(count, frame.dim)
    words = words.copy() if inverse is None else words[inverse]
    return torch.from_numpy(words).view(frame.dtype).view(frame.shape)


def _outliers_of_halves(rows: Tensor, codes: Codes) -> Any:
    """Return all outliers of float16 or bfloat16 rows, whose decoded elements are rounded once more."""
    decoded = torch.from_numpy(dequantize(codes.values, codes.lowest, codes.bound)).to(rows.dtype).double()
    exact = rows.double()
    most = codes.bound * (1.0 + SLACK) + exact.abs() * _HALF_PLACES[rows.dtype]
    bad = (~((decoded - exact).abs() <= most)).flatten().numpy()
    bad[codes.outliers] = True
    return np.flatnonzero(bad)


def _zstandard(level: int | None = None) -> Any:
    return pyarrow.Codec("zstd", compression_level=level)


def _outliers(rows: Tensor, positions: Any) -> bytes:
    """Return the number of outliers, the distances between their positions, and their bits."""
    if not positions.size:
        return varint(0)
    gaps = np.diff(positions, prepend=np.int64(0)).tolist()
    exact = _words(rows).reshape(-1)[positions].tobytes()
    return b"".join([varint(positions.size), *map(varint, gaps), exact])


def _read_outliers(frame: Frame, at: int) -> tuple[Tensor, Tensor, int]:
    """Return positions and values of the outliers at a place, and the place after them."""
    count, at = read_varint(frame.payload, at)
    if count > len(frame.payload) - at:
        raise DataError(f"{count} outliers in {len(frame.payload) - at} bytes", where="frame", remedy=_DAMAGED)
    positions, last = np.empty(count, np.int64), 0
    for i in range(count):
        gap, at = read_varint(frame.payload, at)
        last += gap
        if last >= frame.rows * frame.dim:
            raise DataError(f"outlier {i} lies outside of the tensor", where="frame", remedy=_DAMAGED)
        positions[i] = last
    end = at + count * frame.dtype.itemsize
    if end > len(frame.payload):
        raise DataError("the outliers are cut off", where="frame", remedy=_DAMAGED)
    exact = _tensor(frame.payload[at:end], frame.dtype) if count else torch.empty(0, dtype=frame.dtype)
    return torch.from_numpy(positions), exact, end


def _bounded(frame: Frame) -> Tensor:
    count, inverse, at = _read_indices(frame)
    signless, at = read_varint(frame.payload, at)
    width, at = read_varint(frame.payload, at)
    centre, at = read_varint(frame.payload, at)
    if width not in (1, 2) or signless > 2**31 or centre >= 2**16:
        raise DataError("the numbers of the quantiser are not valid", where="frame", remedy=_DAMAGED)
    positions, exact, at = _read_outliers(frame, at)
    codes = _read_codes(frame.payload[at:], np.empty((count, frame.dim), f"u{width}"), centre, frame.kind)
    lowest = signless // 2 if signless % 2 == 0 else -(signless // 2) - 1
    values = torch.from_numpy(dequantize(codes, lowest, frame.bound)).to(frame.dtype)
    if inverse is not None:
        values = values.index_select(0, torch.from_numpy(inverse))
    if exact.numel():
        values.view(-1)[positions] = exact
    return values.view(frame.shape)


def _read_codes(stream: bytes, codes: Any, centre: int, kind: int) -> Any:
    """Return codes of distinct rows, of the shape and type of ``codes``."""
    if kind == BOUNDED_FAST:
        try:
            content = _zstandard().decompress(stream, codes.nbytes, asbytes=True)
        except (OSError, ValueError) as error:
            raise DataError(f"Zstandard: {error}", where="frame", remedy=_DAMAGED) from None
        return np.frombuffer(_exactly(content, codes.nbytes), codes.dtype).reshape(codes.shape)
    if not decode_codes(np.frombuffer(stream, np.uint8), centre, codes):
        raise DataError("the stream of codes is not valid", where="frame", remedy=_DAMAGED)
    return codes
