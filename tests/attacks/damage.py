"""Damage to one file, as disks, transfers, mistaken hands and enemies do it; the same in every run."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

Damage = Callable[[Path], None]

EDGE = 64
"""Bytes at the beginning and the end of a file in which flips count as in its header and its end."""

BEYOND = 4 << 30
"""Size to which a file without content is extended, in bytes: more than a command may take of memory."""


def _change(change: Callable[[bytearray], bytearray | bytes], path: Path) -> None:
    path.write_bytes(change(bytearray(path.read_bytes())))


def _flip(place: int, bit: int, content: bytearray) -> bytearray:
    content[place] ^= 1 << bit
    return content


def _cut(size: int, content: bytearray) -> bytearray:
    return content[:size]


def _zero(first: int, size: int, content: bytearray) -> bytearray:
    content[first : first + size] = bytes(len(content[first : first + size]))
    return content


def _append(more: bytes, content: bytearray) -> bytearray:
    return content + more


def _repeat(content: bytearray) -> bytearray:
    return content + content


def _swap(other: Path, path: Path) -> None:
    """Exchange the content of two files."""
    mine, theirs = path.read_bytes(), other.read_bytes()
    path.write_bytes(theirs)
    other.write_bytes(mine)


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "file").write_text("x")


def _loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def _dangle(path: Path) -> None:
    path.unlink()
    path.symlink_to("no-such-file")


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _extend(path: Path) -> None:
    """Make the file larger than memory; it takes no room on the disk."""
    with open(path, "r+b") as file:
        file.truncate(BEYOND)


def _remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def flips(size: int, rng: random.Random, count: int) -> Iterator[tuple[str, Damage]]:
    """One flipped bit in the header, in the end and at ``count`` random places of a file of ``size`` bytes."""
    first = [rng.randrange(min(size, EDGE)) for _ in range(2)]
    last = [size - 1 - rng.randrange(min(size, EDGE)) for _ in range(2)]
    for place in sorted({*first, *last, *(rng.randrange(size) for _ in range(count))}):
        bit = rng.randrange(8)
        yield f"bit {bit} of byte {place:,} flipped", partial(_change, partial(_flip, place, bit))


def damages(path: Path, others: list[Path], rng: random.Random, count: int) -> Iterator[tuple[str, Damage]]:
    """Iterate over the damages to a file, with names.

    Args:
        path: File to be damaged, which is not changed yet.
        others: Files that it may be exchanged with.
        rng: Source of randomness.
        count: Number of random flips, and of random truncations.
    """
    size = path.stat().st_size
    if size:
        yield from flips(size, rng, count)
        cuts = {
            0,
            1,
            7,
            8,
            size // 4,
            size // 2,
            size - size // 4,
            size - 1,
            *(rng.randrange(size) for _ in range(count)),
        }
        for length in sorted(cut for cut in cuts if 0 <= cut < size):
            yield f"cut to {length:,} of {size:,} bytes", partial(_change, partial(_cut, length))
        for _ in range(2):
            first = rng.randrange(size)
            yield f"16 bytes from {first:,} set to zero", partial(_change, partial(_zero, first, 16))
        yield "zeros only", partial(_change, partial(_zero, 0, size))
        yield "twice its content", partial(_change, _repeat)
    for name, more in (("a zero", b"\0"), ("a line break", b"\n"), ("100 random bytes", rng.randbytes(100))):
        yield f"{name} appended", partial(_change, partial(_append, more))
    for other in others:
        yield f"exchanged with {other.name}", partial(_swap, other)
    yield "a folder in its place", _folder
    yield "a link to itself", _loop
    yield "a link to nowhere", _dangle
    yield "a pipe that nobody writes to", _pipe
    yield "extended to 4 GiB", _extend
    yield "missing", _remove
