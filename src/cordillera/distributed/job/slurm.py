"""Tasks of SLURM's ``srun`` as processes of one job: its variables as those that other launchers set.

Source: the manual of ``srun``, "output environment variables".
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, MutableMapping

from cordillera.errors import PlanError

_PORTS = range(20_000, 30_000)


def adopt_slurm(environment: MutableMapping[str, str] | None = None) -> None:
    """Set ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``MASTER_ADDR`` and ``MASTER_PORT`` in a task of ``srun``.

    What is set already stays. Nothing is set where another launcher has set ``RANK`` or ``WORLD_SIZE``, in a step of
    one task, or in the script of ``sbatch``, which is no task. The port follows from the numbers of job and step.

    Args:
        environment: Variables of this process. Default: ``os.environ``.

    Raises:
        PlanError: If a variable of SLURM is missing or is not a number.
    """
    given = os.environ if environment is None else environment
    if "RANK" in given or "WORLD_SIZE" in given or given.get("SLURM_STEP_NUM_TASKS", "1") == "1":
        return
    size, rank, local, job, step = (
        _number(given, f"SLURM_{name}") for name in ("STEP_NUM_TASKS", "PROCID", "LOCALID", "JOB_ID", "STEP_ID")
    )
    if given.get("CUDA_VISIBLE_DEVICES", "").strip() and "," not in given["CUDA_VISIBLE_DEVICES"]:
        local = 0  # the task sees no other GPU than its own
    found = {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(local),
        "MASTER_ADDR": _first_host(given.get("SLURM_STEP_NODELIST", "")),
        "MASTER_PORT": str(_PORTS[(31 * job + step) % len(_PORTS)]),
    }
    for name, value in found.items():
        given.setdefault(name, value)


def is_first_on_machine(environment: Mapping[str, str] | None = None) -> bool:
    """Return whether this process of a launcher is the first on its machine.

    ``LOCAL_RANK`` is 0 in each task of ``srun`` that sees its own GPU only; ``SLURM_LOCALID`` counts tasks.

    Args:
        environment: Variables of this process. Default: ``os.environ``.
    """
    given = os.environ if environment is None else environment
    pairs = (("SLURM_STEP_NUM_TASKS", "WORLD_SIZE"), ("SLURM_PROCID", "RANK"))
    is_task = all(name in given and given[name] == given.get(own) for name, own in pairs)
    return given.get("SLURM_LOCALID" if is_task else "LOCAL_RANK") == "0"


def _number(given: MutableMapping[str, str], name: str) -> int:
    text = given.get(name, "")
    if not (text.isascii() and text.isdecimal()):
        raise PlanError(
            f"{name} must be a number in a task of srun, got {text[:40]!r}",
            where="environment",
            remedy="set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or unset SLURM_STEP_NUM_TASKS for one process",
        )
    return int(text)


def _first_host(hosts: str) -> str:
    """Return the first of SLURM's list of hosts, such as ``node07`` of ``node[07-09,12],gpu1``."""
    first = re.match(r"(?:\[[^\]]*\]|[^,\[])*", hosts)
    host = re.sub(r"\[([^\]\-,]+)[^\]]*\]", r"\1", first.group() if first else "")
    if not host:
        raise PlanError(
            f"SLURM_STEP_NODELIST names no host: {hosts[:40]!r}", where="environment", remedy="set MASTER_ADDR"
        )
    return host
