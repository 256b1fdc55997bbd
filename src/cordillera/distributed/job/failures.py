"""Errors of a process, carried to the one that started it."""

from __future__ import annotations

import contextlib
import pickle
import traceback
from collections.abc import Sequence
from typing import NamedTuple

from cordillera.distributed.job.heartbeats import RankError
from cordillera.distributed.pipeline.runner import PeerError
from cordillera.errors import CordilleraError


class Failure(NamedTuple):
    """What a process raised.

    Attributes:
        text: Class and message.
        packed: Class, arguments and attributes, pickled; None where they cannot be.
        traced: The traceback's text.
        is_consequence: Whether it was for another process's sake.
        is_exit: Whether it ended itself by other than an error.
    """

    text: str
    packed: bytes | None
    traced: str
    is_consequence: bool
    is_exit: bool


class RankTraceback(Exception):
    """The cause of an error that a rank raised: its traceback's text."""


def pack(error: BaseException) -> Failure:
    """An error as it leaves its process.

    Args:
        error: As raised. Its class may take other arguments than those that it keeps, so it is not pickled as a whole.
    """
    packed = None
    with contextlib.suppress(Exception):
        reduced = error.__reduce__()
        assert isinstance(reduced, tuple)
        packed = pickle.dumps((*reduced[:2], error.__dict__))
    return Failure(
        "".join(traceback.format_exception_only(type(error), error)).strip(),
        packed,
        "".join(traceback.format_exception(type(error), error, error.__traceback__)),
        isinstance(error, PeerError),
        not isinstance(error, Exception),
    )


def unpack(failure: Failure, who: str | None = None, others: Sequence[str] = ()) -> BaseException:
    """An error of another process, of its class where that is known here, to be raised.

    Args:
        failure: What :func:`pack` made; of a process that this one started, as it is unpickled.
        who: Named before its place; None for all processes.
        others: What else went wrong, a line each.
    """
    error: BaseException | None = None
    if failure.packed is not None and not failure.is_exit:
        with contextlib.suppress(Exception):
            kind, arguments, attributes = pickle.loads(failure.packed)
            error = kind.__new__(kind, *arguments)
            error.__dict__.update(attributes)
    if error is None:
        error = RankError(f"failed: {failure.text}")
    if isinstance(error, CordilleraError):
        where = ", ".join(part for part in (who, error.where) if part) or None
        CordilleraError.__init__(error, "\n".join((error.what, *others)), where=where, remedy=error.remedy)
    error.__cause__ = RankTraceback(f"in {who or 'every rank'}:\n{failure.traced}")
    return error
