"""Memory of other processes of the same host: one copy takes it from where it lies to where it belongs.

Linux lets a process read the memory of another one of the same user (``process_vm_readv``). No segment is shared, so
none can be left behind, and a tensor needs no registration: what lies in a rank's memory can be read as it is.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import sys
from collections.abc import Sequence
from typing import Any

_PR_SET_PTRACER = 0x59616D61
_MOST_SPANS = 512  # below the kernel's limit of 1,024
_MOST_BYTES = 1 << 30  # of one call, which returns early at 2 GiB


class _Span(ctypes.Structure):
    _fields_ = [("address", ctypes.c_void_p), ("length", ctypes.c_size_t)]


class PeerMemory:
    """Memory of another process.

    Args:
        process: Its number.
    """

    def __init__(self, process: int) -> None:
        self.process = process

    def read(self, address: int, length: int, into: int) -> None:
        """Copy bytes of the other process into this one.

        Args:
            address: Where they lie there.
            length: Number of bytes.
            into: Where they belong here.

        Raises:
            OSError: If the process is gone, may not be read, or has no such memory.
        """
        here, there = _Span(), _Span()
        while length:
            here.address, there.address = into, address
            here.length = there.length = min(length, _MOST_BYTES)
            count = _readv(self.process, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
            if count <= 0:
                error = ctypes.get_errno()
                raise OSError(error, os.strerror(error) if count < 0 else "no bytes came")
            address, into, length = address + count, into + count, length - count

    def read_all(self, there: Sequence[tuple[int, int]], here: Sequence[tuple[int, int]]) -> None:
        """Copy several spans of bytes; the spans of ``there`` and ``here`` are addresses and equal lengths.

        Raises:
            OSError: If the process is gone, may not be read, or has no such memory.
        """
        for first in range(0, len(there), _MOST_SPANS):
            sources, targets = there[first : first + _MOST_SPANS], here[first : first + _MOST_SPANS]
            total = sum(length for _, length in sources)
            if len(sources) == 1 or total > _MOST_BYTES:
                for (address, length), (into, _) in zip(sources, targets, strict=True):
                    self.read(address, length, into)
                continue
            count = _readv(self.process, _array(targets), len(targets), _array(sources), len(sources), 0)
            if count != total:
                error = ctypes.get_errno()
                raise OSError(error, os.strerror(error) if count < 0 else "fewer bytes came")


def _array(spans: Sequence[tuple[int, int]]) -> ctypes.Array[_Span]:
    return (_Span * len(spans))(*[_Span(*span) for span in spans])


class MemoryProof:
    """Random bytes in this process, by which another one shows that it reads the memory that it means.

    Numbers of processes are those of a namespace, and containers of one host may have equal ones.

    Attributes:
        content: The bytes.
    """

    def __init__(self) -> None:
        _admit_relatives()
        self.content = secrets.token_bytes(32)
        self._buffer = ctypes.create_string_buffer(self.content, len(self.content))

    @property
    def shown(self) -> list[Any]:
        """What another process needs for :func:`seen_by_proof`: process, address, and the bytes in hexadecimal."""
        return [os.getpid(), ctypes.addressof(self._buffer), self.content.hex()]


def seen_by_proof(shown: object) -> PeerMemory | None:
    """Return the memory of another process, or None if it cannot be read from here.

    Args:
        shown: :attr:`MemoryProof.shown` of the other process, which is not trusted.
    """
    match shown:
        case [int(process), int(address), str(text)] if 0 < process < 2**31 and 0 < len(text) <= 2048:
            pass
        case _:
            return None
    try:
        content = bytes.fromhex(text)
    except ValueError:
        return None
    if _readv is None:
        return None
    found = ctypes.create_string_buffer(len(content))
    memory = PeerMemory(process)
    try:
        memory.read(address, len(content), ctypes.addressof(found))
    except (OSError, OverflowError, ctypes.ArgumentError):
        return None
    return memory if found.raw == content else None


def _admit_relatives() -> None:
    """Let the parent of this process and its descendants read its memory, where the kernel asks for that (Yama).

    Ranks are children of one launcher; without this they may be refused each other's memory. On other systems this does
    nothing.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(os.getppid()), 0, 0, 0)


def _find_readv() -> Any:
    if sys.platform != "linux":
        return None
    function = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None)
    if function is not None:
        function.restype = ctypes.c_ssize_t
        function.argtypes = [
            ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong
        ]  # fmt: skip
    return function


_readv = _find_readv()
