"""Header of a GGUF file, version 3: metadata and the places of tensors."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from cordillera.data.tokenizers.gguf import ALIGNMENT, ARRAY, HEAD, STRING

_UINT32, _INT32, _FLOAT32, _BOOL = 4, 5, 6, 7


class PlannedTensor(NamedTuple):
    """Tensor that will follow the header: name, shape as in torch, number of its kind (ggml.h), size in bytes."""

    name: str
    shape: tuple[int, ...]
    kind: int
    size: int

    @property
    def room(self) -> int:
        """Size with the zeros that follow, in bytes."""
        return -(-self.size // ALIGNMENT) * ALIGNMENT


def gguf_head(fields: Mapping[str, Any], tensors: Sequence[PlannedTensor]) -> bytes:
    """Return the bytes before the first tensor.

    Args:
        fields: Metadata: text, truth values, whole numbers from 0 to 2**32 - 1, floating-point numbers (stored in 32
            bits), and lists of text or of numbers.
        tensors: Tensors in their order; each takes its :attr:`PlannedTensor.room`.
    """
    parts = [HEAD.pack(b"GGUF", 3, len(tensors), len(fields))]
    for name, value in fields.items():
        parts += [_text(name), _typed(value)]
    begin = 0
    for tensor in tensors:
        sizes = tensor.shape[::-1]
        parts += [_text(tensor.name), struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)]
        parts.append(struct.pack("<IQ", tensor.kind, begin))
        begin += tensor.room
    head = b"".join(parts)
    return head + b"\0" * (-len(head) % ALIGNMENT)


def _text(value: str) -> bytes:
    content = value.encode()
    return struct.pack("<Q", len(content)) + content


def _typed(value: Any) -> bytes:
    """Kind of a value and the value."""
    if isinstance(value, bool):
        return struct.pack("<I?", _BOOL, value)
    if isinstance(value, int):
        return struct.pack("<II", _UINT32, value)
    if isinstance(value, float):
        return struct.pack("<If", _FLOAT32, value)
    if isinstance(value, str):
        return struct.pack("<I", STRING) + _text(value)
    if value and isinstance(value[0], int):
        return struct.pack(f"<IIQ{len(value)}i", ARRAY, _INT32, len(value), *value)
    if value and isinstance(value[0], float):
        return struct.pack(f"<IIQ{len(value)}f", ARRAY, _FLOAT32, len(value), *value)
    return struct.pack("<IIQ", ARRAY, STRING, len(value)) + b"".join(map(_text, value))
