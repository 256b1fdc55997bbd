"""Errors of a process, transferred to the process that started it."""

from __future__ import annotations

import contextlib
import pickle
import traceback
from collections.abc import Sequence
from typing import NamedTuple

from cordillera.errors import CordilleraError, PeerError, RankError


class Failure(NamedTuple):
    """Error of a process: its text, and class, arguments and attributes pickled (None if they cannot be).

    ``is_consequence`` says that another process caused it, ``is_exit`` that it is no error, such as KeyboardInterrupt.
    """

    text: str
    packed: bytes | None
    traced: str
    is_consequence: bool
    is_exit: bool


class RankTraceback(Exception):
    """Cause of an error that a rank raised, with the text of its traceback."""


def pack(error: BaseException) -> Failure:
    """Convert an error for transfer to another process.

    The error is not pickled as a whole, as its class may take other arguments than those that it keeps.
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
    """Return the error of another process, of its original class if that is available, to be raised.

    A ``failure`` is unpickled, so it must come from :func:`pack` in a process that this one started. ``who`` names the
    process in the message (None: all processes); ``others`` describe other failures, one line each.
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
