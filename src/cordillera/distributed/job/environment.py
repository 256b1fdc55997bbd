"""Environment variables with which a launcher gives a process its rank, the number of processes and their store."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from typing import Literal, NamedTuple, TypeAlias

from cordillera.errors import PlanError

TOKEN = "CORDILLERA_JOB_TOKEN"
"""Environment variable with the secret that signs the values that the processes of a job exchange."""

JobBackend: TypeAlias = Literal["auto", "cordillera"]
"""Backend of torch.distributed that carries what processes exchange; ``auto`` is gloo on CPUs and NCCL on GPUs."""

_MOST = 1_000_000  # largest number of processes of a job
_MOST_DEADLINE_S = 2_000_000  # systems wait for at most 2^31 ms


class JobPlace(NamedTuple):
    """Place of this process in a job that a launcher started.

    Attributes:
        local_rank: Number of this process on its machine, from 0.
        restarts: Number of times that the launcher has restarted all processes.
        is_launchers: Whether the launcher holds the store; if not, rank 0 holds it.
    """

    rank: int
    size: int
    local_rank: int
    address: str
    port: int
    restarts: int
    is_launchers: bool


def place_in_job(environment: Mapping[str, str] | None = None) -> JobPlace | None:
    """Return the place that a launcher gave this process, or None if no launcher started it.

    A launcher sets both ``RANK`` and ``WORLD_SIZE``; one of them alone is ignored.

    Raises:
        PlanError: If a variable is missing, is not a number, or is out of range.
    """
    given = os.environ if environment is None else environment
    if "RANK" not in given or "WORLD_SIZE" not in given:
        return None
    absent = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not given.get(name, "").strip()]
    if absent:
        raise PlanError(
            f"RANK and WORLD_SIZE are set, {' and '.join(absent)} {'are' if len(absent) > 1 else 'is'} not",
            where="environment",
            remedy="the launcher must say where rank 0 is to be found; for one process, unset RANK",
        )
    size = _number(given, "WORLD_SIZE", 1, _MOST)
    return JobPlace(
        rank=_number(given, "RANK", 0, size - 1),
        size=size,
        local_rank=_number(given, "LOCAL_RANK", 0, _MOST, default="0"),
        address=given["MASTER_ADDR"].strip(),
        port=_number(given, "MASTER_PORT", 1, 65_535),
        restarts=_number(given, "TORCHELASTIC_RESTART_COUNT", 0, _MOST, default="0"),
        is_launchers=given.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def check_unlaunched() -> None:
    """Refuse a study, whose runs start processes of their own, in a process of a launcher.

    Raises:
        PlanError: If a launcher has started this process, or a variable of the launcher is invalid.
    """
    if place_in_job() is not None:
        raise PlanError(
            "a study starts its own processes; a launcher has started this one",
            remedy="run it on one machine, without the launcher; --set parallel.KEY gives each run its processes",
        )


def is_silent() -> bool:
    """Whether this process is a rank of a job other than 0, which prints nothing."""
    try:
        place = place_in_job()
    except PlanError:
        return False
    return place is not None and place.rank > 0


def job_key(scope: str, token: str | None = None) -> bytes:
    """Return the key that signs the values of a job, derived from its token; without a token, from public values.

    Values signed for one ``scope``, a job among those of one ``token`` (None: that of the environment), are not valid
    in another.
    """
    token = os.environ.get(TOKEN, "") if token is None else token
    return hashlib.sha256(f"{scope}\0{token}".encode("utf-8", "surrogateescape")).digest()


def _number(given: Mapping[str, str], name: str, least: int, most: int, *, default: str | None = None) -> int:
    text = given.get(name, default or "").strip()
    number = int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else None
    if number is None or not least <= number <= most:
        size = f" (WORLD_SIZE is {most + 1})" if name == "RANK" else ""
        raise PlanError(
            f"{name} must be a whole number from {least} to {most}{size}, got {text[:40]!r}",
            where="environment",
            remedy="see what started this process; for one process without a launcher, unset RANK and WORLD_SIZE",
        )
    return number


def checked_deadline(seconds: float) -> float:
    """Return the deadline of a configuration, in ``seconds``.

    Raises:
        ValueError: If systems do not wait that long.
    """
    if seconds > _MOST_DEADLINE_S:
        raise ValueError(f"must be at most {_MOST_DEADLINE_S:,} seconds")
    return seconds
