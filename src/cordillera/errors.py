"""Errors for users: what was wrong, where, and what to do about it."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Sequence

# Control characters (C0, C1, DEL), marks that change the direction of text, and lone surrogates.
_NOT_PRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


_LONGEST_PLACE = 400  # longest place, in characters, that an error shows in full


def printable(text: object, *, lines: bool = False, quoted: bool = False) -> str:
    """Return text that is safe to print to a terminal, with control characters written as escapes.

    Args:
        text: Name, path or message from any source; other values are converted by ``str``.
        lines: Whether to keep line breaks and tabs.
        quoted: Whether to write escapes in the notation of JSON and TOML strings.
    """

    def escape(match: re.Match[str]) -> str:
        mark = match[0]
        if lines and mark in "\n\t":
            return mark
        return f"\\u{ord(mark):04x}" if quoted else mark.encode("unicode_escape").decode("ascii")

    return _NOT_PRINTABLE.sub(escape, str(text))


class CordilleraError(Exception):
    """Base of every error that Cordillera raises deliberately.

    Control characters are written as escapes (:func:`printable`), and a very long place loses its middle.

    Args:
        what: One sentence about what was wrong.
        where: Place of the mistake: a file with its row and column, an argument, or a path of the recipe.
        remedy: Advice on what to do about it.
    """

    def __init__(self, what: str, *, where: str | None = None, remedy: str | None = None) -> None:
        what, remedy = printable(what, lines=True), remedy and printable(remedy, lines=True)
        where = where and printable(where)
        if where and len(where) > _LONGEST_PLACE:
            where = f"{where[: _LONGEST_PLACE // 2]}...{where[-_LONGEST_PLACE // 4 :]}"
        self.what, self.where, self.remedy = what, where, remedy
        lines = [f"{where}: {what}" if where else what]
        if remedy:
            lines.append(f"  -> {remedy}")
        super().__init__("\n".join(lines))


class RecipeError(CordilleraError):
    """A recipe, another file of settings, or an override, is not valid.

    Args:
        source: Name or path of the recipe.
        problems: All mistakes, as pairs of a dotted path (``model.layers``) and what is wrong there.
        kind: Kind of the file.
    """

    def __init__(self, source: str, problems: Sequence[tuple[str, str]], kind: str = "recipe") -> None:
        self.problems = list(problems)
        count = "1 mistake" if len(self.problems) == 1 else f"{len(self.problems)} mistakes"
        listing = "\n".join(f"  {printable(path)}: {printable(message)}" for path, message in self.problems)
        super().__init__(f"{count} in the {kind}\n{listing}", where=source)


class DataError(CordilleraError):
    """A data file, a schema or a value in one is not acceptable."""


@contextlib.contextmanager
def at_key(key: str) -> Iterator[None]:
    """Name the ``key`` of a recipe before the place of a :class:`DataError` that its value causes.

    Raises:
        DataError: The error, with the key.
    """
    try:
        yield
    except DataError as error:
        where = f"{key}, {error.where}" if error.where else key
        raise DataError(error.what, where=where, remedy=error.remedy) from error


class CheckpointError(CordilleraError):
    """A checkpoint is missing, incomplete, corrupt, or belongs to something else."""


class DependencyError(CordilleraError):
    """A required library or device is absent or unsuitable."""


class TrainingError(CordilleraError):
    """Training cannot continue: the loss is not finite, the disk is full, or a limit was exceeded."""


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP ends a command: as Ctrl-C does, but also where Ctrl-C ends a part of it only."""


class Interrupted(CordilleraError):
    """Ctrl-C or SIGTERM ended the work early; the message says what is missing and how to continue."""


class RunError(CordilleraError):
    """A run folder is missing, incomplete or in use."""


class PlanError(CordilleraError):
    """A cluster, a workload, a schedule or a plan is not possible."""


class NumericsError(CordilleraError):
    """A format, a scale, a plan of precision or a value for it cannot be used."""


class OverloadError(CordilleraError):
    """A service has as many requests as it accepts; the same one can be made again later."""


class UnavailableError(CordilleraError):
    """A service cannot answer: it is being stopped, has failed, or did not answer in time."""


class PeerError(CordilleraError):
    """Another rank did not send or receive a message in time, or its connection broke.

    Args:
        what: One sentence that says what was awaited.
        peer: Awaited rank, as a rank of the group; None if it could be any.
        stage: Stage of a pipeline that produces the message; None if no message was awaited.
        microbatch: Microbatch of the message; None if no message was awaited.
        where: Rank that waited.
        remedy: Advice on what to do.
    """

    def __init__(
        self,
        what: str,
        *,
        peer: int | None,
        stage: int | None = None,
        microbatch: int | None = None,
        where: str | None = None,
        remedy: str | None = None,
    ) -> None:
        self.peer, self.stage, self.microbatch = peer, stage, microbatch
        super().__init__(what, where=where, remedy=remedy)


class RankError(PeerError):
    """A rank ended, stopped, hung or failed, so that the others cannot continue.

    Args:
        what: One sentence that names the rank.
        ranks: Ranks at fault; empty if unknown.
        where: Rank that reports the error.
        remedy: Advice on what to do.
    """

    def __init__(
        self, what: str, *, ranks: Iterable[int] = (), where: str | None = None, remedy: str | None = None
    ) -> None:
        self.ranks = tuple(ranks)
        super().__init__(what, peer=self.ranks[0] if len(self.ranks) == 1 else None, where=where, remedy=remedy)
