"""Frames: a self-describing header, a payload, and a checksum over both.

A frame is magic (2 bytes), version (1), kind (1), dtype (1), number of dimensions (1), CRC-32 (4), error bound (4),
shape, length of the payload, payload. Numbers are little-endian; those of shape and length are of
variable size (7 bits a byte, the lowest first). The checksum covers every byte but its own.
"""

from __future__ import annotations

import math
import struct
import zlib
from typing import NamedTuple

import torch
from torch import Tensor

from cordillera.errors import DataError

MAGIC = b"\xc5f"
VERSION = 1
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MOST_DIMENSIONS = 4
MOST_DECODED_BYTES = 1 << 30
"""Default limit of a decoded tensor, which a forged header would otherwise choose."""

_FIXED = struct.Struct("<2sBBBBIf")
_CRC_AT = 6  # the checksum's first byte
_REMEDY = "send the frame again; what arrived is not what was encoded"


class Frame(NamedTuple):
    """Content of a frame.

    Attributes:
        kind: Number of the payload's format.
        dtype: Type of the tensor.
        shape: Shape of the tensor, of one to four dimensions.
        bound: Largest absolute error of an element; 0 if lossless, NaN if the format states none.
        payload: Bytes of the format.
    """

    kind: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    bound: float
    payload: bytes

    @property
    def rows(self) -> int:
        """Number of rows: the product of all dimensions but the last."""
        return math.prod(self.shape[:-1])

    @property
    def dim(self) -> int:
        """Number of elements of a row."""
        return self.shape[-1]

    @property
    def raw_bytes(self) -> int:
        """Number of bytes of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


def pack(frame: Frame) -> Tensor:
    """Write a frame.

    Args:
        frame: Content; its bound is rounded to float32.

    Returns:
        Bytes, ``uint8 [bytes]``.
    """
    numbers = b"".join(varint(size) for size in (*frame.shape, len(frame.payload)))
    fixed = (MAGIC, VERSION, frame.kind, DTYPES.index(frame.dtype), len(frame.shape))
    content = bytearray(_FIXED.pack(*fixed, 0, frame.bound) + numbers + frame.payload)
    struct.pack_into("<I", content, _CRC_AT, _checksum(content))
    return torch.frombuffer(content, dtype=torch.uint8)


def unpack(frame: Tensor | bytes | bytearray | memoryview, most_bytes: int = MOST_DECODED_BYTES) -> Frame:
    """Read a frame and verify its header and checksum; the payload is not decoded.

    Args:
        frame: Bytes of one frame; a tensor is ``uint8 [bytes]``.
        most_bytes: Largest size of the decoded tensor in bytes.

    Returns:
        Content of the frame.

    Raises:
        DataError: If the bytes are not one whole frame of this version, or the tensor would be larger than allowed.
    """
    content = _bytes_of(frame)
    if len(content) < _FIXED.size + 2:
        raise DataError(f"{len(content)} bytes are shorter than a frame's header", where="frame", remedy=_REMEDY)
    magic, version, kind, dtype, dimensions, checksum, bound = _FIXED.unpack_from(content)
    if magic != MAGIC:
        raise DataError(f"begins with {magic.hex()}, not {MAGIC.hex()}", where="frame", remedy="give an encoded frame")
    if version != VERSION:
        remedy = "run the same version of Cordillera on all ranks"
        raise DataError(f"has version {version}; this is version {VERSION}", where="frame", remedy=remedy)
    if checksum != _checksum(content):
        raise DataError(f"the checksum of its {len(content)} bytes differs", where="frame", remedy=_REMEDY)
    if dtype >= len(DTYPES) or not 1 <= dimensions <= MOST_DIMENSIONS:
        raise DataError(f"unknown dtype {dtype} or {dimensions} dimensions", where="frame", remedy=_REMEDY)
    at, sizes = _FIXED.size, []
    for _ in range(dimensions + 1):
        size, at = read_varint(content, at)
        sizes.append(size)
    if len(content) - at != sizes[-1]:
        raise DataError(f"{len(content) - at} bytes of payload, not {sizes[-1]}", where="frame", remedy=_REMEDY)
    found = Frame(kind, DTYPES[dtype], tuple(sizes[:-1]), bound, content[at:])
    # Rows of no elements have no bytes, but their number is a size too.
    if max(found.raw_bytes, *found.shape, found.rows) > most_bytes:
        what = f"a tensor of shape {list(found.shape)} is larger than {most_bytes:,} bytes"
        raise DataError(what, where="frame", remedy="raise most_bytes if the sender is trusted")
    return found


def varint(number: int) -> bytes:
    """Write a number as 7 bits a byte, the lowest first.

    Args:
        number: Integer of 0 or more.

    Returns:
        Bytes, of which all but the last have their highest bit set.
    """
    found = bytearray()
    while number > 127:
        found.append(number & 127 | 128)
        number >>= 7
    found.append(number)
    return bytes(found)


def read_varint(content: bytes, at: int) -> tuple[int, int]:
    """Read a number that :func:`varint` wrote.

    Args:
        content: Bytes that hold the number.
        at: Place of its first byte.

    Returns:
        The number, and the place after it.

    Raises:
        DataError: If the content ends before the number does, or the number has more than 63 bits.
    """
    number = 0
    for shift in range(0, 63, 7):
        if at >= len(content):
            break
        byte = content[at]
        at += 1
        number |= (byte & 127) << shift
        if byte < 128:
            return number, at
    raise DataError("a number is cut off or too large", where="frame", remedy=_REMEDY)


def _checksum(content: bytes | bytearray) -> int:
    view = memoryview(content)
    return zlib.crc32(view[_CRC_AT + 4 :], zlib.crc32(view[:_CRC_AT]))


def _bytes_of(frame: Tensor | bytes | bytearray | memoryview) -> bytes:
    if not isinstance(frame, Tensor):
        return bytes(frame)
    if frame.dtype != torch.uint8 or frame.dim() != 1:
        raise DataError(f"expected uint8 [bytes], not {frame.dtype} {list(frame.shape)}", where="frame")
    return frame.cpu().contiguous().numpy().tobytes()
