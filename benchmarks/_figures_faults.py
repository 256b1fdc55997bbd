"""Figures of failures in the documentation."""

from __future__ import annotations

import statistics
from typing import Any

from _figures import Figures, judged, listed, of_all, percent, results, table

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


_KINDS = {
    "kill": "a rank is killed",
    "freeze": "a replica stands still",
    "freeze one": "a rank stands still",
}


def stalls() -> str:
    """Return what a failure costs the others, by the library and the kind of failure."""
    rows = []
    for row in results("fault_tolerance-stalls")["rows"]:
        cells = [row["stack"], _KINDS[row["kind"]], str(row["count"])]
        cells += [f"{row['stall_s'][part]:.2f} s" for part in ("median", "worst")]
        cells.append(f"{row['regained_s']['median']:.1f} s" if "regained_s" in row else "")
        cells.append(f"{row['whole_s']['median']:.1f} s" if "whole_s" in row else "")
        cells.append(percent(row["rejoin_steps"]["worst"], ".0f") if "rejoin_steps" in row else "")
        cells.append(f"{row['discarded']['worst']:.0f}" if "discarded" in row else "")
        rows.append(cells)
    headings = ("", "failure", "trials", "stall", "worst", "lost steps are regained", "whole again")
    return table([*headings, "longest step while it rejoins, more than a normal one by", "steps given up"], rows)


def overhead() -> str:
    """Return how long a step without failures takes, as a multiple of native hybrid sharding's."""
    one = results("fault_tolerance-stalls")["overhead"]
    return f"{one['median']:.3f} ({one['low']:.3f} to {one['high']:.3f}, quartiles of {one['count']} pairs)"


_FAULTS = {
    "kill": "killed",
    "stop": "stopped",
    "slow": "slowed",
    "cut": "cut off",
    "full-disk": "disk full",
    "kill-coordinator": "coordinator killed",
    "pause-coordinator": "coordinator stopped",
    "corrupt-checkpoint": "checkpoints damaged",
}


def survived() -> str:
    """Return what hundreds of random faults did to jobs of two replicas."""
    rows = []
    for one in results("fault_tolerance-survival")["results"]:
        cells = [str(one["seed"]), *(str(one["faults"].get(kind, 0)) for kind in _FAULTS), f"{one['steps']:,}"]
        cells += [percent(one["alone"], ".0f"), str(one["discarded"]), str(one["rollbacks"])]
        cells += [f"{one['longest_s']:.1f} s", str(len(one["unexplained"]))]
        rows.append([*cells, "equal to the bit" if one["equal"] else "other weights"])
    headings = ("steps", "by one replica", "attempts given up", "rollbacks", "longest without a step")
    return table(["seed", *_FAULTS.values(), *headings, "ended without a fault", "replayed"], rows)


def sums() -> str:
    """Return the speed of the all-reduce beside gloo's."""
    rows = []
    for row in results("fault_tolerance-all-reduce")["rows"]:
        cells = [str(row["processes"]), f"{row['mebibytes']} MiB", f"{1e3 * row['gloo']['median']:.1f} ms"]
        for name in ("memory", "sockets"):
            ratio = row[f"{name} against gloo"]
            wanted = row[f"{name} target"]
            cells += [f"{ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})"]
            cells += [f"{wanted:g}" if wanted else ""]
        rows.append(cells)
    return table(
        ["processes", "tensor", "Gloo", "memory, times as fast", "target", "sockets, times as fast", "target"], rows
    )


def sums_reached() -> str:
    """Return how many of the speeds asked of the all-reduce are reached."""
    rows, ways = results("fault_tolerance-all-reduce")["rows"], ("memory", "sockets")
    asked = [(row[f"{way} against gloo"]["median"], row[f"{way} target"]) for row in rows for way in ways]
    return of_all([speed >= least for speed, least in asked if least], "speeds with a target")


def aborts() -> str:
    """Return after how long all others have raised an error."""
    found = results("fault_tolerance-all-reduce")["ends"]
    worst = max(one["worst_s"] for one in found)
    times = [f"{1e3 * max(one[kind]['median'] for one in found):.1f} ms after {told}"
             for kind, told in (("abort", "an abort"), ("kill", "a kill"))]  # fmt: skip
    return f"{listed(times)} in the median, and {1e3 * worst:.0f} ms at most"


def pressed() -> str:
    """Return effective time of twelve replicas whose time is pressed."""
    found = results("fault_tolerance-emulated")
    rows = []
    for name, one in found["results"].items():
        low, high = found["targets"][name]
        asked = f"{low:.2f} to {high:.2f}" if high < 1 else f"{low:.2f} at least"
        rows.append([name, f"{one['effective']:.3f}", asked, str(one["failures"]), f"{1e3 * one['step_s']:.0f} ms"])
    return table(["a failure is met by", "effective", "target", "failures", "a step"], rows)


def _mean(runs: list[dict[str, Any]], found: dict[str, Any]) -> float:
    """Return the difference of the mean of final losses from that of the runs without absence."""
    ours, theirs = (
        statistics.fmean(one["losses"][-1] for one in part) for part in (runs, found["results"]["fault-free"])
    )
    return ours / theirs - 1


def converged() -> str:
    """Return final losses without one of the replicas, by the policy."""
    found = results("fault_tolerance-convergence")
    rows = []
    for name, runs in found["results"].items():
        differences = [one["difference"] for one in runs]
        rows.append([
            name, percent(runs[0]["absent"], ".0f"), f"{runs[0]['tokens']:,}",
            ", ".join(f"{one['losses'][-1]:.4f}" for one in runs),
            ", ".join(f"{100 * one:+.2f}" for one in differences) + " %" if name in found["targets"] else "",
            f"{100 * _mean(runs, found):+.2f} %" if name in found["targets"] else "",
            f"{100 * found['targets'][name]:.1f} %" if name in found["targets"] else "",
            f"{100 * max(one['excursion'] for one in runs):+.1f} %" if name in found["targets"] else "",
        ])  # fmt: skip
    headings = ("policy", "steps without one", "tokens", "final losses", "differences", "of the means", "target")
    return table([*headings, "largest on the way"], rows)


FIGURES: Figures = {
    "faults-policies": policies,
    "faults-replicas": replicas,
    "faults-sizes": sizes,
    "faults-checkpoints": checkpoints,
    "faults-stalls": stalls,
    "faults-overhead": overhead,
    "faults-kept": lambda: judged(
        [float(results("fault_tolerance-stalls")["reached"][name]) for name in ("kill", "freeze", "discarded")], 1
    ),
    "faults-rejoin": lambda: "reached" if results("fault_tolerance-stalls")["reached"]["rejoin"] else "missed",
    "faults-survived": survived,
    "faults-survived-each": lambda: str(results("fault_tolerance-survival")["faults"]),
    "faults-survived-every": lambda: f"{results('fault_tolerance-survival')['every_s']:g}",
    "faults-sums": sums,
    "faults-sums-reached": sums_reached,
    "faults-aborts": aborts,
    "faults-pressed": pressed,
    "faults-converged": converged,
    "faults-counts": lambda: f"{min(_found()['failures'])} to {max(_found()['failures'])}",
}
