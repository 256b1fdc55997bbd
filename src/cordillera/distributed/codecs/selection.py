"""Selection of a codec for a table and a link from recorded sizes and times.

A tensor of ``n`` bytes takes ``n / Bw`` seconds over a link as it is, and ``n / (CR Bw) + n / Tc + n / Td`` encoded,
where ``CR`` is the ratio of sizes and ``Tc`` and ``Td`` are the rates of encoding and decoding. The quotient is the
speedup ``S = 1 / (1 / CR + Bw (1 / Tc + 1 / Td))`` (Feng et al. 2024, arXiv 2407.04272).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from cordillera.errors import NumericsError

if TYPE_CHECKING:
    from cordillera.distributed.codecs.codecs import Codec

RAW = "raw"


class CodecRecord(NamedTuple):
    """Sums over encoded tensors of one table.

    Attributes:
        raw_bytes: Bytes of the tensors.
        frame_bytes: Bytes of their frames.
        encode_s: Seconds of encoding.
        decode_s: Seconds of decoding.
    """

    raw_bytes: float = 0.0
    frame_bytes: float = 0.0
    encode_s: float = 0.0
    decode_s: float = 0.0

    def plus(self, other: CodecRecord) -> CodecRecord:
        """Return the sums of both records, for example of two ranks."""
        return CodecRecord(*(own + more for own, more in zip(self, other, strict=True)))

    @property
    def ratio(self) -> float:
        """Bytes of the tensors over bytes of the frames."""
        return self.raw_bytes / self.frame_bytes

    def speedup(self, link_bytes_per_s: float) -> float:
        """Return how many times faster than raw bytes the encoded tensors are on a link, decoding included.

        Args:
            link_bytes_per_s: Bytes that the link carries in a second.

        Raises:
            NumericsError: If the record is empty or a number of it is negative or not finite, or the link has no rate.
        """
        if not 0 < link_bytes_per_s < float("inf"):
            raise NumericsError(f"a link of {link_bytes_per_s} bytes/s", where="link_bytes_per_s")
        if not all(0 <= number < float("inf") for number in self) or not self.raw_bytes or not self.frame_bytes:
            raise NumericsError(f"{self} is not a record of encoded tensors", where="record")
        seconds = self.encode_s + self.decode_s
        return self.raw_bytes / (self.frame_bytes + link_bytes_per_s * seconds)


def select(records: Mapping[str, CodecRecord], link_bytes_per_s: float, *, margin: float = 1.0) -> tuple[str, float]:
    """Select the codec of a table on a link: the one of the largest speedup, or raw bytes.

    The result depends on the arguments alone. Ranks that add up their records before, in the same order, select the
    same codec.

    Args:
        records: Records of the table by the name of the codec. Raw bytes take part without one, at a speedup of 1.
        link_bytes_per_s: Bytes that the link carries in a second.
        margin: Speedup that a codec must exceed.

    Returns:
        Name of the codec and its predicted speedup, 1 for raw. Ties prefer raw, then the first name.

    Raises:
        NumericsError: If a record or the link's rate is not valid.
    """
    best, speedup = RAW, 1.0
    for name in sorted(records.keys() - {RAW}):
        found = records[name].speedup(link_bytes_per_s)
        if found > max(speedup, margin):
            best, speedup = name, found
    return best, speedup


def record(codec: Codec, tensor: Tensor, clock: Callable[[], float] = time.perf_counter) -> CodecRecord:
    """Encode and decode a tensor once and return its record.

    The first call in a process also compiles kernels: encode a tensor of each type before.

    Args:
        codec: Codec to record.
        tensor: Rows as they are sent, ``[N, D]``, with at least one element.
        clock: Function that returns seconds.

    Raises:
        NumericsError: If the codec cannot encode the tensor.
    """
    began = clock()
    frame = codec.encode(tensor)
    encoded = clock()
    codec.decode(frame, most_bytes=tensor.numel() * tensor.itemsize)
    decoded = clock()
    return CodecRecord(tensor.numel() * tensor.itemsize, frame.numel(), encoded - began, decoded - encoded)
