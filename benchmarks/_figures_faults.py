"""Figures of failures in the documentation."""

from __future__ import annotations

from typing import Any

from _figures import Figures, percent, results, table

_JOBS = {
    "published": "published times, recoveries one after the other",
    "published, begun anew": "published times, recoveries begun anew",
    "consensus of 9 s": "published times, an agreement of 9 s before each step",
    "stall of 1 s": "a stall of 1 s",
    "two at once": "a stall of 1 s, one failure in ten takes two replicas",
}
_POLICIES = {"published": ("restart", "replicas", "decoupled"), "published, begun anew": ("restart", "replicas")}


def _found() -> dict[str, Any]:
    return dict(results("fault_tolerance-simulated"))


def _rate(row: dict[str, Any]) -> str:
    return f"{percent(row['effective'], '.1f')} ({100 * row['low']:.1f} to {100 * row['high']:.1f})"


def policies() -> str:
    """Return effective time of twelve replicas, by the job's times and the policy."""
    rows = []
    for name, told in _JOBS.items():
        of = {row["policy"]: row for row in _found()["studies"][name] if row["replicas"] in (1, 12)}
        for policy in _POLICIES.get(name, ("replicas",)):
            rows.append([told, policy, _rate(of[policy]), percent(of[policy]["formula"], ".1f")])
    return table(["98,304 devices, 12 replicas", "policy", "effective", "formula"], rows)


def replicas() -> str:
    """Return effective time by the number of replicas."""
    rows = [row for row in _found()["studies"]["stall of 1 s"] if row["policy"] == "replicas"]
    return table(["replicas", "effective", "formula"],
                 [[str(row["replicas"]), _rate(row), percent(row["formula"], ".1f")] for row in rows])  # fmt: skip


def sizes() -> str:
    """Return effective time by the size of the cluster."""
    by_size: dict[int, dict[str, Any]] = {}
    for row in _found()["studies"]["sizes"]:
        by_size.setdefault(row["devices"], {})[row["policy"]] = row
    names = ("restart", "replicas", "decoupled")
    rows = [[f"{size:,}", *(percent(of[name]["effective"], ".1f") for name in names)] for size, of in by_size.items()]
    return table(["devices", *names], rows)


def checkpoints() -> str:
    """Return effective time with restarts from checkpoints, beside the closed form."""
    rows = [
        [
            f"{one['recovery_s'] / 60:.0f} min",
            f"{one['save_s']:.0f} s",
            f"{one['interval_s'] / 60:.1f} min",
            percent(one["effective"], ".1f"),
            percent(one["formula"], ".1f"),
        ]
        for one in _found()["checkpoints"]
    ]
    return table(["recovery", "a save", "interval", "simulated", "closed form"], rows)


FIGURES: Figures = {
    "faults-policies": policies,
    "faults-replicas": replicas,
    "faults-sizes": sizes,
    "faults-checkpoints": checkpoints,
    "faults-counts": lambda: f"{min(_found()['failures'])} to {max(_found()['failures'])}",
}
