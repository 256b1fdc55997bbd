"""Random damage to files, and what must hold of whatever reads them: a result or one clear error, within limits."""

from __future__ import annotations

import contextlib
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType

from cordillera.errors import CordilleraError

SECONDS = 5.0
"""Longest time of one input, of the processor: neighbours do not count."""

WAITED = 60.0
"""Longest time of one input on the clock."""

MEMORY = 1 << 30
"""Memory that one input may take, in bytes, above what the process held before."""

CONTROLS = frozenset(chr(code) for code in (*range(32), *range(127, 160))) - {"\n", "\t"}


class TooSlowError(BaseException):
    """An input took longer than the limit."""


def flips(content: bytes, rng: random.Random, count: int = 1) -> bytes:
    """The content with so many bytes changed, each at another place."""
    changed = bytearray(content)
    for place in rng.sample(range(len(changed)), min(count, len(changed))):
        changed[place] ^= rng.randrange(1, 256)
    return bytes(changed)


def damaged(content: bytes, rng: random.Random, words: Sequence[bytes] = ()) -> bytes:
    """The content with one to four random injuries: flips, cuts, insertions, repeats, swaps, truncations.

    Args:
        content: A valid file.
        rng: Source of randomness.
        words: Pieces of the format's own syntax (quotes, brackets, huge numbers) that are inserted or replace others.
    """
    for _ in range(rng.randint(1, 4)):
        size = len(content)
        first, second = sorted((rng.randint(0, size), rng.randint(0, size)))
        second = min(second, first + rng.choice((1, 1, 2, 4, 16, 64)))
        kind = rng.randrange(7 if words else 5)
        if kind == 0 and size:
            content = flips(content, rng)
        elif kind == 1:
            content = content[:first] + content[second:]
        elif kind == 2:
            content = content[:first] + rng.randbytes(rng.randint(1, 4)) + content[first:]
        elif kind == 3:
            content = content[:second] + content[first:second] * rng.choice((1, 1, 2, 50)) + content[second:]
        elif kind == 4:
            content = content[:first] if rng.random() < 0.5 else content[first:]
        elif kind == 5:
            content = content[:first] + rng.choice(words) + content[first:]
        elif kind == 6:
            content = content[:first] + rng.choice(words) + content[second:]
    return content


def survives(act: Callable[[], object], what: str) -> object:
    """Do something with a damaged input: it works, or raises one :class:`CordilleraError` that can be printed.

    Args:
        act: What is done.
        what: Name of the input, for the failure's message.

    Returns:
        What ``act`` returned; the error, if it raised one.

    Raises:
        AssertionError: anything else was raised, it took over :data:`SECONDS`, or more than :data:`MEMORY`.
    """
    found: object
    before = _peak_memory(reset=True)
    begun = time.process_time()
    try:
        with _deadline():
            found = act()
    except CordilleraError as error:
        found = error
    except TooSlowError:
        raise AssertionError(f"{what}: took more than {2 * SECONDS} s of the processor, or {WAITED} s") from None
    except Exception as error:
        raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error
    seconds = time.process_time() - begun
    assert seconds < SECONDS, f"{what}: took {seconds:.1f} s of the processor"
    if isinstance(found, CordilleraError):
        assert not CONTROLS & set(str(found)), f"{what}: an error with control characters: {found!r}"
    taken = _peak_memory() - before
    assert taken < MEMORY, f"{what}: took {taken:,} bytes"
    return found


@contextlib.contextmanager
def _deadline() -> Iterator[None]:
    def ring(number: int, frame: FrameType | None) -> None:
        raise TooSlowError

    timers = ((signal.ITIMER_PROF, signal.SIGPROF, 2 * SECONDS), (signal.ITIMER_REAL, signal.SIGALRM, WAITED))
    earlier = [signal.signal(number, ring) for _, number, _ in timers]
    for timer, _, seconds in timers:
        signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        for timer, _, _ in timers:
            signal.setitimer(timer, 0)
        for (_, number, _), handler in zip(timers, earlier, strict=True):
            signal.signal(number, handler)


def _peak_memory(reset: bool = False) -> int:
    """Largest resident memory of this process since the last reset, in bytes; 0 where the system does not tell."""
    try:
        if reset:
            Path("/proc/self/clear_refs").write_text("5")
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0
