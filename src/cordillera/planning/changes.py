"""Changes of a cluster, written as ``level.key=value``, ``level.key*=2`` or ``level.key/=2``."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping

from cordillera.errors import PlanError
from cordillera.topology import Topology, validate


def parse_change(text: str) -> tuple[str, float | str]:
    """Parse ``level.key=value``, ``level.key*=2`` or ``level.key/=2`` into a path and a value.

    Raises:
        PlanError: If the text has none of these forms.
    """
    path, sign, value = text.partition("=")
    operator = path[-1:] if path[-1:] in ("*", "/") else ""
    path = path.removesuffix(operator).strip()
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not sign or not re.fullmatch(r"\w+\.\w+", path) or not math.isfinite(number):
        raise PlanError(
            "is not a change",
            where=text or "change ''",
            remedy="write level.key=number or level.key*=number, numbers without units",
        )
    if operator == "/" and not number:
        raise PlanError("divides by 0", where=text or "change ''", remedy="write another number")
    return path, f"{operator}={number!r}" if operator else number


def edits(changes: Iterable[str]) -> dict[str, float | str | None]:
    """Return the changes by path; a new rate of a level's links takes the place of the rate that the level has.

    Raises:
        PlanError: If a text is not a change, or changes a key for the second time.
    """
    told: dict[str, float | str] = {}
    for text in changes:
        path, value = parse_change(text)
        if path in told:
            raise PlanError(f"changes {path} a second time", where=text or "change ''", remedy="one change of each key")
        told[path] = value
    found: dict[str, float | str | None] = {}
    for path, value in told.items():
        level, key = path.split(".")
        instead = {"bytes_per_s": ("oversubscription", 1.0), "oversubscription": ("bytes_per_s", None)}.get(key)
        if instead is not None and isinstance(value, float) and f"{level}.{instead[0]}" not in told:
            found[f"{level}.{instead[0]}"] = instead[1]
        found[path] = value
    return found


def with_changes(topology: Topology, by_path: Mapping[str, float | str | None]) -> Topology:
    """Return a cluster with other figures; a factor also changes what differs from the others of its level.

    That of a level's ``bytes_per_s`` changes the level's :attr:`~cordillera.topology.Topology.links` and, in the first
    level, the ports of :attr:`~cordillera.topology.Topology.groups`. All else, also a new number for a level's rate, is
    that of :meth:`~cordillera.topology.Topology.changed`.

    Args:
        topology: The cluster.
        by_path: Changes by dotted path, as :func:`edits` returns them.

    Raises:
        PlanError: If a path does not exist or a value is out of range.
    """
    after = topology.changed(by_path)
    factors = {
        path.partition(".")[0]: float(value[2:]) ** (1 if value[0] == "*" else -1)
        for path, value in by_path.items()
        if isinstance(value, str) and path.endswith(".bytes_per_s")
    }
    if not factors or not (topology.links or topology.groups):
        return after
    content, own = after.model_dump(), {(link.level, link.member) for link in topology.links}
    for link in content["links"]:
        if (link["level"], link["member"]) in own:
            link["bytes_per_s"] *= factors.get(link["level"], 1.0)
    for group in content["groups"]:
        if group["port_bytes_per_s"] is not None:
            group["port_bytes_per_s"] *= factors.get(topology.levels[0].name, 1.0)
    return validate(Topology, content, topology.name)
