"""Memory of other processes of the same host: one copy takes it from where it lies to where it belongs.

Linux lets a process read the memory of another one of the same user (``process_vm_readv``). No segment is shared, so
none can be left behind, and a tensor needs no registration: what lies in a rank's memory can be read as it is.
"""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
import sys
from collections.abc import Sequence
from typing import Any

_PR_SET_PTRACER = 0x59616D61
_MOST_SPANS = 512  # below the kernel's limit of 1,024
_MOST_BYTES = 1 << 30  # bytes per call; the system call stops at 2 GiB
_PROOF_BYTES = 32


class _Span(ctypes.Structure):
    _fields_ = [("address", ctypes.c_void_p), ("length", ctypes.c_size_t)]


class PeerMemory:
    """Memory of another process, for one thread at a time.

    Args:
        process: Its number.
        address: Where its proof lies there.
        content: The proof (:class:`MemoryProof`), which is read after everything else.
    """

    def __init__(self, process: int, address: int, content: bytes) -> None:
        self.process = process
        self._content, self._found = content, ctypes.create_string_buffer(len(content))
        self._here, self._there = (_Span * 2)(), (_Span * 2)()
        self._proofs = (_Span(ctypes.addressof(self._found), len(content)), _Span(address, len(content)))

    def read(self, address: int, length: int, into: int) -> None:
        """Copy bytes of the other process into this one.

        Args:
            address: Where they lie there.
            length: Number of bytes.
            into: Where they belong here.

        Raises:
            OSError: If the process is gone, may not be read, has no such memory, or has withdrawn its proof: what was
                copied is then of no use.
        """
        here, there = self._here, self._there
        for begin in range(0, length, _MOST_BYTES):
            size = min(length - begin, _MOST_BYTES)
            here[0], there[0] = _Span(into + begin, size), _Span(address + begin, size)
            here[1], there[1] = self._proofs
            self._copy(here, there, size)

    def read_all(self, there: Sequence[tuple[int, int]], here: Sequence[tuple[int, int]]) -> None:
        """Copy several spans of bytes; the spans of ``there`` and ``here`` are addresses and equal lengths.

        Raises:
            OSError: As :meth:`read` does.
        """
        for first in range(0, len(there), _MOST_SPANS):
            sources, targets = there[first : first + _MOST_SPANS], here[first : first + _MOST_SPANS]
            total = sum(length for _, length in sources)
            if len(sources) == 1 or total > _MOST_BYTES:
                for (address, length), (into, _) in zip(sources, targets, strict=True):
                    self.read(address, length, into)
                continue
            self._copy(_array(targets, self._proofs[0]), _array(sources, self._proofs[1]), total)

    def check(self) -> None:
        """Read the proof.

        Raises:
            OSError: As :meth:`read` does.
        """
        self._copy(_array([], self._proofs[0]), _array([], self._proofs[1]), 0)

    def _copy(self, here: ctypes.Array[_Span], there: ctypes.Array[_Span], size: int) -> None:
        """Copy spans; the last one is the proof."""
        count = _readv(self.process, here, len(here), there, len(there), 0)
        if count != size + len(self._content):
            error = ctypes.get_errno() if count < 0 else errno.EFAULT
            raise OSError(error, os.strerror(error))
        if self._found.raw != self._content:
            raise OSError(errno.ECANCELED, "it has given up")


def _array(spans: Sequence[tuple[int, int]], proof: _Span) -> ctypes.Array[_Span]:
    return (_Span * (len(spans) + 1))(*[_Span(*span) for span in spans], proof)


class MemoryProof:
    """Random bytes in this process, by which another process verifies that it reads this process's memory.

    Process ids are unique only within a namespace, so containers of one host may share them. A reader also detects
    bytes that this process may have changed after it gave up, as the proof is withdrawn first.
    """

    def __init__(self) -> None:
        _admit_relatives()
        self._buffer = ctypes.create_string_buffer(secrets.token_bytes(_PROOF_BYTES), _PROOF_BYTES)
        self.shown: list[Any] = [os.getpid(), ctypes.addressof(self._buffer), self._buffer.raw.hex()]
        """What another process needs for :func:`seen_by_proof`: process, address, and the bytes in hexadecimal."""

    def withdraw(self) -> None:
        """Invalidate the proof, so that other processes discard later reads."""
        ctypes.memset(self._buffer, 0, _PROOF_BYTES)


def seen_by_proof(shown: object) -> PeerMemory | None:
    """Return the memory of another process, or None if it cannot be read from here.

    Args:
        shown: :attr:`MemoryProof.shown` of the other process, which is not trusted.
    """
    match shown:
        case [int(process), int(address), str(text)] if 0 < process < 2**31 and len(text) == 2 * _PROOF_BYTES:
            pass
        case _:
            return None
    if _readv is None:
        return None
    try:
        memory = PeerMemory(process, address, bytes.fromhex(text))
        memory.check()
    except (OSError, ValueError, OverflowError, TypeError):
        return None
    return memory


def _admit_relatives() -> None:
    """Allow the parent of this process and its descendants to read its memory, as Yama requires.

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
