"""Work that threads do ahead of the one who asks for it, with its results in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from cordillera.kernels.threads import quota, usable_cores

MOST_WORKERS = 8
"""Largest number of threads that read a log; each holds a block of text and its parsed rows."""

Given = TypeVar("Given")
Result = TypeVar("Result")


def reading_threads() -> int:
    """Return the number of threads that read a log: the processors that this process may use, at most 8."""
    share = quota()
    cores = usable_cores() if share is None else min(usable_cores(), max(1, int(share)))
    return min(cores, MOST_WORKERS)


def map_ahead(
    function: Callable[[Given], Result], items: Iterable[Given], *, threads: int, ahead: int | None = None
) -> Iterator[Result]:
    """Iterate over ``function`` of each item, in their order, computed by threads before it is asked for.

    Items are taken in the caller's thread, so ``items`` may be a generator. An error of an item, or of the iteration
    over ``items``, is raised after the results before it. If the iteration ends early, computations that run are waited
    for.

    Args:
        threads: Number of threads.
        ahead: Number of results that are computed before they are asked for. Default: one per thread.
    """
    waiting: deque[Future[Result]] = deque()
    with ThreadPoolExecutor(threads, "cordillera-ahead") as pool:
        try:
            source, failed = iter(items), None
            more = True
            while more or waiting:
                while more and len(waiting) <= (ahead or threads):
                    try:
                        waiting.append(pool.submit(function, next(source)))
                    except StopIteration:
                        more = False
                    except Exception as error:
                        more, failed = False, error
                if waiting:
                    yield waiting.popleft().result()
            if failed is not None:
                raise failed
        finally:
            for future in waiting:
                future.cancel()
