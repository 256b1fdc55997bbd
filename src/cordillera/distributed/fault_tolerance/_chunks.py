"""How a tensor passes between the members of an all-reduce: frames with a checksum, shared memory, and a sum."""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import socket
import stat
import struct
import sys
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from cordillera.distributed.frame_socket import FrameSocket

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.int64)
"""Types of elements that can be summed."""

LINE = 64
"""Alignment of the parts, in bytes."""

OFFERED, SUMMED = 1, 2
"""Phases of a chunk: a member sends its contribution, then the sum of its part."""

_MAGIC = b"CAR1"
_HEADER = struct.Struct("<4sBBHQQIIQQQ")
_CHECK = struct.Struct("<I")
HEADER_BYTES = _HEADER.size + _CHECK.size
_LANES, _ROWS = 512, 16  # words of a row, rows of a block
_FACTOR, _ODD = 0x9E3779B97F4A7C15, np.uint64(0xC2B2AE3D27D4EB4F)
_NONCE_BYTES, _PAGE = 32, 4096
_BLOCK_BYTES = 512 << 10  # bytes added at a time, which fit in a core's cache


class BrokenLink(Exception):
    """A connection ended, or an unexpected frame arrived.

    Args:
        what: One sentence.
        missed: Members that sent nothing in time.
    """

    def __init__(self, what: str, missed: Sequence[str] = ()) -> None:
        super().__init__(what)
        self.missed = tuple(missed)


class FrameHeader(NamedTuple):
    """Header of a frame, which precedes the payload.

    Attributes:
        phase: :data:`OFFERED` or :data:`SUMMED`.
        kind: Number of the type of the elements.
        epoch: Epoch of the ring.
        step: Step of the training.
        bucket: Number of the tensor within the step.
        chunk: Number of the chunk within the tensor.
        length: Bytes that follow.
        size: Bytes of the whole tensor.
        checksum: Checksum of the bytes that follow.
    """

    phase: int
    kind: int
    epoch: int
    step: int
    bucket: int
    chunk: int
    length: int
    size: int
    checksum: int

    def encode(self) -> bytes:
        """Return the bytes of the header, which end with a checksum."""
        phase, kind, *numbers = self
        text = _HEADER.pack(_MAGIC, phase, kind, 0, *numbers)
        return text + _CHECK.pack(zlib.crc32(text))

    @classmethod
    def decode(cls, text: bytes | bytearray) -> FrameHeader:
        """Parse a header.

        Raises:
            ValueError: If ``text`` is not a valid header.
        """
        if zlib.crc32(text[: _HEADER.size]) != _CHECK.unpack_from(text, _HEADER.size)[0]:
            raise ValueError("sent a frame whose header is corrupt")
        magic, phase, kind, _, *numbers = _HEADER.unpack_from(text)
        if magic != _MAGIC:
            raise ValueError("sent a frame of another protocol")
        return cls(phase, kind, *numbers)


def checksum(data: np.ndarray[Any, np.dtype[np.uint8]]) -> int:
    """Return 32 bits that depend on each of the bytes, and on where among the blocks of 64 kilobytes it stands.

    The rows of a block, of four kilobytes, are added. Those of the blocks are multiplied by distinct powers of an odd
    number and added, in halves; a CRC ends this. It is three to five times as fast as a CRC of everything.
    """
    whole = data.size - data.size % (8 * _LANES * _ROWS)
    rows = np.add.reduce(data[:whole].view(np.uint64).reshape(-1, _ROWS, _LANES), axis=1)
    factor = _FACTOR
    while len(rows) > 1:
        half = len(rows) // 2
        folded = rows[:half] * np.uint64(factor)
        folded += rows[half : 2 * half]
        if len(rows) % 2:
            folded[0] += rows[-1] * _ODD
        rows, factor = folded, factor * factor % (1 << 64)
    return zlib.crc32(data[whole:].data, zlib.crc32(rows.data))


class FrameReader(Protocol):
    """Receiver of the frames of a :class:`MemberLink`."""

    def awaits(self, link: MemberLink) -> bool:
        """Return whether another frame is expected now."""
        ...

    def destination(self, link: MemberLink, header: FrameHeader) -> np.ndarray[Any, np.dtype[np.uint8]] | None:
        """Return where the payload belongs, of ``header.length`` bytes; None to drop the frame."""
        ...

    def arrived(self, link: MemberLink, header: FrameHeader) -> None:
        """Take a frame whose payload is in its place."""
        ...


class MemberLink(FrameSocket):
    """Connection to another member of the ring.

    Args:
        name: Name of the member.
        place: Its place among the members.
        connection: Connected socket.
    """

    def __init__(self, name: str, place: int, connection: socket.socket) -> None:
        super().__init__(connection)
        self.name, self.place = name, place
        self._head = bytearray(HEADER_BYTES)
        self._header: FrameHeader | None = None
        self._destination: np.ndarray[Any, np.dtype[np.uint8]] | None = None
        self._aim(memoryview(self._head))

    def ended(self) -> BrokenLink:
        """Return the error for a connection that has ended."""
        return self.blame("ended its connection")

    def blame(self, what: str) -> BrokenLink:
        """Return an error that names the member."""
        return BrokenLink(f"replica {self.name} {what}")

    def send(self, header: FrameHeader, payload: np.ndarray[Any, np.dtype[np.uint8]] | None = None) -> None:
        """Send a frame, or what of it fits now; ``payload`` must not change before it is sent."""
        self._outgoing.append(memoryview(header.encode()))
        if payload is not None and payload.size:
            self._outgoing.append(payload.data)
        self.flush()

    def receive(self, reader: FrameReader) -> None:
        """Give ``reader`` the frames that have come, until it awaits none.

        Raises:
            BrokenLink: If the connection has ended, or a frame is corrupt.
        """
        while reader.awaits(self) and self._fill():
            if self._header is None:
                try:
                    self._header = FrameHeader.decode(self._head)
                except ValueError as error:
                    raise self.blame(str(error)) from error
                self._destination = reader.destination(self, self._header)
                place = self._destination
                self._aim((np.empty(self._header.length, np.uint8) if place is None else place).data)
                if self._target:
                    continue
            header, place = self._header, self._destination
            self._header = self._destination = None
            self._aim(memoryview(self._head))
            if place is None:
                continue
            if checksum(place) != header.checksum:
                raise self.blame(f"sent a part of chunk {header.chunk} that is corrupt")
            reader.arrived(self, header)


class SharedSegment:
    """Memory that processes of one host can map; it has no name, and goes with the last process that maps it.

    Attributes:
        bytes: The memory, of dtype uint8.
        array: The same for numpy, which copies up to half as fast again.
        nonce: Random bytes at its start, by which a process shows that it sees the memory.
    """

    def __init__(self, file: int, size: int, nonce: bytes | None) -> None:
        populate = getattr(mmap, "MAP_POPULATE", 0)
        self.file, self.size = file, size
        mapped = mmap.mmap(file, _PAGE + size, flags=mmap.MAP_SHARED | populate)
        if nonce is not None:
            mapped[:_NONCE_BYTES] = nonce
        self.nonce = mapped[:_NONCE_BYTES]
        self.bytes = torch.frombuffer(mapped, dtype=torch.uint8, offset=_PAGE)
        self.array = self.bytes.numpy()

    @classmethod
    def create(cls, size: int) -> SharedSegment | None:
        """Return new memory of ``size`` bytes, or None where this is not possible."""
        if sys.platform != "linux":
            return None
        try:
            file = os.memfd_create("all-reduce", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError:
            return None
        try:
            os.ftruncate(file, _PAGE + size)
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            return cls(file, size, secrets.token_bytes(_NONCE_BYTES))
        except (OSError, ValueError):
            os.close(file)
            return None

    @property
    def place(self) -> list[int]:
        """Process and number of the file, by which another process finds it."""
        return [os.getpid(), self.file]

    @classmethod
    def attach(cls, place: object, size: int) -> SharedSegment | None:
        """Return the memory of another process, or None if it is not to be seen from here."""
        match place:
            case [int(process), int(file)]:
                path = f"/proc/{process}/fd/{file}"
            case _:
                return None
        try:
            opened = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        except (OSError, ValueError):
            return None
        try:
            status = os.fstat(opened)
            if not stat.S_ISREG(status.st_mode) or status.st_size != _PAGE + size:
                return None
            if not fcntl.fcntl(opened, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:  # it could shrink during a read
                return None
            attached = cls(opened, size, None)
            attached.file = -1
            return attached
        except (OSError, ValueError):
            return None
        finally:
            os.close(opened)

    def forget(self) -> None:
        """Close the file; no other process can open the memory after that."""
        if self.file >= 0:
            os.close(self.file)
            self.file = -1


@dataclass
class RingState:
    """State that the members of an epoch have agreed on and share.

    Attributes:
        epoch: Number of the epoch.
        names: Members, sorted.
        own: Place of this member.
        contributing: Places of the members whose tensors are added.
        chunk_bytes: Bytes of a chunk.
        window: Number of chunks on their way.
        links: Connections by place.
        segments: Memory of each member, by place; None if parts pass through sockets.
        received: Slots for parts that come through a socket, by place; uint8 [window * part_bytes].
        sent: Bytes of contributions and of sums on their way to each member.
        scratch: Sum of the first terms of a block; uint8.
    """

    epoch: int
    names: list[str]
    own: int
    contributing: list[int]
    chunk_bytes: int
    window: int
    links: dict[int, MemberLink] = field(default_factory=dict)
    segments: list[SharedSegment] | None = None
    received: dict[int, Tensor] = field(default_factory=dict)
    sent: dict[int, list[int]] = field(default_factory=dict)
    scratch: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.scratch = torch.empty(min(_BLOCK_BYTES, self.part_bytes), dtype=torch.uint8)

    @property
    def part_bytes(self) -> int:
        """Most bytes of a part."""
        return _part_bytes(self.chunk_bytes, len(self.names))

    def slot(self, chunk: int) -> int:
        """Return where the slot of a chunk's contribution begins in the memory of a member."""
        return chunk % self.window * self.chunk_bytes

    def sum_slot(self, chunk: int) -> int:
        """Return where the slot of a chunk's sum begins in the memory of a member."""
        return self.window * self.chunk_bytes + chunk % self.window * self.part_bytes


def _part_bytes(size: int, members: int) -> int:
    return -(-size // (members * LINE)) * LINE


def _add_in_order(terms: Sequence[Tensor], scratch: Tensor, out: Tensor) -> None:
    """Write the sum of terms, added from the first to the last, to ``out``, which may be any of them."""
    if len(terms) == 1:
        out.copy_(terms[0])
    elif out.dtype == torch.bfloat16:
        total = terms[0].to(torch.float32)
        for term in terms[1:]:
            total += term
        out.copy_(total)
    else:
        total = terms[0]
        for term in terms[1:-1]:
            total = torch.add(total, term, out=scratch)
        torch.add(total, terms[-1], out=out)


class SumInProgress:
    """A sum in progress: a reader of frames that knows which ones are to come.

    Args:
        ring: Ring of the epoch.
        tensor: Tensor of one dimension.
        step: Step of the training.
        bucket: Number of the tensor within the step.
    """

    def __init__(self, ring: RingState, tensor: Tensor, step: int, bucket: int) -> None:
        self._ring, self._step, self._bucket = ring, step, bucket
        self._kind = DTYPES.index(tensor.dtype)
        self._dtype = tensor.dtype
        self._bytes = tensor.detach().view(torch.uint8)
        self._array = self._bytes.numpy()
        self._size = self._bytes.numel()
        self._chunks = max(1, -(-self._size // ring.chunk_bytes))
        self._contributes = ring.own in ring.contributing
        self._given = self._added = 0  # chunks that this member has sent, and added
        self._offered = dict.fromkeys(ring.links, 0)  # chunks that each member has sent
        self._summed = dict.fromkeys(ring.links, 0)  # chunks whose sum each member has sent
        self.peak = 0

    @property
    def is_done(self) -> bool:
        """Whether the tensor holds the sum, and the others have been sent all that they need."""
        return self._added == self._chunks and not any(
            self.awaits(link) or link.has_outgoing for link in self._ring.links.values()
        )

    def advance(self) -> None:
        """Do what can be done without waiting."""
        while self._add() or self._give():
            pass

    def _part(self, chunk: int, place: int) -> tuple[int, int]:
        """Return where the part of a member begins and ends, in bytes of the tensor."""
        begin = chunk * self._ring.chunk_bytes
        size = min(self._ring.chunk_bytes, self._size - begin)
        part = _part_bytes(size, len(self._ring.names))
        return begin + min(place * part, size), begin + min((place + 1) * part, size)

    def _header(self, phase: int, chunk: int, payload: np.ndarray[Any, Any] | None) -> FrameHeader:
        length, code = (0, 0) if payload is None else (payload.size, checksum(payload))
        ring = self._ring
        return FrameHeader(phase, self._kind, ring.epoch, self._step, self._bucket, chunk, length, self._size, code)

    def _give(self) -> bool:
        """Give the others the next chunk, if the window is open."""
        ring, chunk = self._ring, self._given
        if chunk >= min(self._chunks, self._added + ring.window, *(n + ring.window for n in self._summed.values())):
            return False
        if self._contributes and ring.segments is not None:
            first, last = chunk * ring.chunk_bytes, min((chunk + 1) * ring.chunk_bytes, self._size)
            begin, end = self._part(chunk, ring.own)
            memory, slot = ring.segments[ring.own].array, ring.slot(chunk) - first
            for low, high in ((first, begin), (end, last)):
                memory[slot + low : slot + high] = self._array[low:high]
        self._given += 1
        for place, link in ring.links.items():
            begin, end = self._part(chunk, place)
            through_socket = self._contributes and ring.segments is None
            payload = self._array[begin:end] if through_socket else None
            if self._contributes:
                self._count(place, 0, end - begin)
            link.send(self._header(OFFERED, chunk, payload), payload)
        return True

    def _add(self) -> bool:
        """Add the own part of the next chunk, if all have given it."""
        ring, chunk = self._ring, self._added
        if chunk >= min(self._given, *self._offered.values()):
            return False
        begin, end = self._part(chunk, ring.own)
        for first in range(begin, end, _BLOCK_BYTES):
            last = min(first + _BLOCK_BYTES, end)
            terms = [self._term(place, chunk, first, last).view(self._dtype) for place in ring.contributing]
            part, scratch = self._bytes[first:last], ring.scratch[: last - first]
            _add_in_order(terms, scratch.view(self._dtype), part.view(self._dtype))
            if ring.segments is not None:
                slot = ring.sum_slot(chunk) - begin
                ring.segments[ring.own].array[slot + first : slot + last] = self._array[first:last]
        self._added += 1
        payload = self._array[begin:end] if ring.segments is None else None
        header = self._header(SUMMED, chunk, payload)
        for place, link in ring.links.items():
            self._count(place, 1, end - begin)
            link.send(header, payload)
        return True

    def _term(self, place: int, chunk: int, begin: int, end: int) -> Tensor:
        """Return a member's contribution to these bytes of the tensor, in this member's part of a chunk."""
        ring = self._ring
        if place == ring.own:
            return self._bytes[begin:end]
        if ring.segments is None:
            slot = chunk % ring.window * ring.part_bytes + begin - self._part(chunk, ring.own)[0]
            return ring.received[place][slot : slot + end - begin]
        slot = ring.slot(chunk) + begin - chunk * ring.chunk_bytes
        return ring.segments[place].bytes[slot : slot + end - begin]

    def _count(self, place: int, phase: int, size: int) -> None:
        sent = self._ring.sent[place]
        sent[phase] += size
        self.peak = max(self.peak, sum(sent))

    def awaits(self, link: MemberLink) -> bool:
        """Whether another frame of this sum is to come: the last one is the sum of the last chunk."""
        return self._summed[link.place] < self._chunks

    def missed(self) -> list[str]:
        """Return the members that hold this one up: others than those that only wait for one of them as well."""
        least = min(self._offered.values())
        held_up = [place for place, count in self._offered.items() if count == least <= self._added]
        awaited = [place for place, link in self._ring.links.items() if self.awaits(link)]
        return [self._ring.names[place] for place in held_up or awaited]

    def destination(self, link: MemberLink, header: FrameHeader) -> np.ndarray[Any, Any] | None:
        """Return where the payload of a frame belongs; None for one of an earlier epoch, which is dropped.

        Raises:
            BrokenLink: If another frame was to come.
        """
        ring, place, chunk = self._ring, link.place, header.chunk
        if header.length > ring.part_bytes:
            raise link.blame(f"sent a frame of {header.length} bytes, a part has {ring.part_bytes} at most")
        if header.epoch < ring.epoch:
            return None
        agreed = {
            "epoch": ring.epoch,
            "step": self._step,
            "bucket": self._bucket,
            "size": self._size,
            "kind": self._kind,
        }
        for name, value in agreed.items():
            if (came := getattr(header, name)) != value:
                raise link.blame(f"sent a frame of {name} {came} instead of {value}")
        if header.phase not in (OFFERED, SUMMED):
            raise link.blame(f"sent a frame of phase {header.phase}")
        given = header.phase == OFFERED
        due = self._offered[place] if given else self._summed[place]
        if chunk != due or chunk >= (min(self._chunks, self._added + ring.window) if given else self._given):
            raise link.blame(f"sent phase {header.phase} of chunk {chunk}, due was chunk {due}")
        begin, end = self._part(chunk, ring.own if given else place)
        carries = ring.segments is None and (not given or place in ring.contributing)
        if header.length != (end - begin if carries else 0):
            raise link.blame(f"sent {header.length} bytes of chunk {chunk} instead of {end - begin if carries else 0}")
        if not carries:
            return self._array[:0]
        if not given:
            return self._array[begin:end]
        slot = chunk % ring.window * ring.part_bytes
        return ring.received[place].numpy()[slot : slot + end - begin]

    def arrived(self, link: MemberLink, header: FrameHeader) -> None:
        """Take a frame whose payload is in its place."""
        ring, place, chunk = self._ring, link.place, header.chunk
        begin, end = self._part(chunk, place)
        if header.phase == OFFERED:  # the member has taken all sums up to one window before
            self._offered[place] += 1
            read = self._part(chunk - ring.window, ring.own) if chunk >= ring.window else (0, 0)
            ring.sent[place][1] = ring.sent[place][1] - read[1] + read[0] if chunk else 0
            return
        self._summed[place] += 1
        if self._contributes:
            ring.sent[place][0] -= end - begin
        if ring.segments is not None:
            slot = ring.sum_slot(chunk)
            self._array[begin:end] = ring.segments[place].array[slot : slot + end - begin]
