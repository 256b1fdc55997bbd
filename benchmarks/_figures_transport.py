"""Figures of the backend ``cordillera`` and of blame in the documentation."""

from __future__ import annotations

from typing import Any

from _figures import Figures, percent, results, table


def _size(kibibytes: int) -> str:
    return f"{kibibytes // 1024} MiB" if kibibytes >= 1024 else f"{kibibytes} KiB"


def _rows(part: str) -> list[dict[str, Any]]:
    return list(results(f"ncclx-{part}")["rows"])


def _ratio(found: dict[str, float]) -> str:
    return f"{found['median']:.2f} ({found['low']:.2f} to {found['high']:.2f})"


def sums() -> str:
    """Return times of sums, beside Gloo."""
    rows = []
    for row in _rows("collectives"):
        asked = f"{row['target']:g}" if row["target"] else ""
        cells = [str(row["processes"]), _size(row["kibibytes"]), f"{row['gloo']['median'] * 1e3:.2f} ms"]
        rows.append([*cells, _ratio(row["memory against gloo"]), asked, _ratio(row["sockets against gloo"])])
    return table(["processes", "tensor", "Gloo", "memory, times as fast", "target", "sockets, times as fast"], rows)


def messages() -> str:
    """Return times of messages, beside Gloo and beside the way through sockets."""
    rows = []
    for row in _rows("messages"):
        asked = f"{row['target']:g}" if row["target"] else ""
        cells = [_size(row["kibibytes"]), f"{row['gloo']['median'] * 1e3:.2f} ms", _ratio(row["memory against gloo"])]
        rows.append([*cells, asked, _ratio(row["memory against sockets"])])
    return table(["message", "Gloo", "memory, times as fast", "target", "memory beside our sockets"], rows)


def trainings() -> str:
    """Return times of training steps, beside Gloo."""
    rows = []
    for row in _rows("training"):
        gloo, ours = row["auto"], row["cordillera"]
        waiting = f"{percent(gloo['exposed'], '.0f')}, {percent(ours['exposed'], '.0f')}"
        same = "to the bit" if row["same"] else "no"
        rows.append([row["training"], f"{gloo['step_s'] * 1e3:.1f} ms", _ratio(row["ratio"]), waiting, same])
    return table(["training", "a step on gloo", "ours is", "waiting for others: gloo, ours", "equal losses"], rows)


def exchanges() -> str:
    """Return times of rows that go to other ranks and back, by how their sizes are known."""
    rows = []
    for row in _rows("exchanges"):
        cells = [str(row["processes"]), f"{row['tokens']:,}", f"{row['dynamic']['median'] * 1e3:.2f} ms"]
        cells += [_ratio(row["against padded"]), f"{row['target']:g}" if row["target"] else ""]
        rows.append([*cells, _ratio(row["against sizes before"]), _ratio(row["against gloo, padded"])])
    others = ["sizes before", "padded on Gloo"]
    return table(["processes", "rows of a rank", "ours", "beside padded", "target", *others], rows)


def starts() -> str:
    """Return when the last rank knows all addresses, around a ring and with a star."""
    rows = []
    for row in results("ncclx-start")["rows"]:
        times = [f"{row[name]['seconds'] * 1e3:.1f} ms" for name in ("ring", "star")]
        sent = [f"{row[name]['busiest_bytes'] / 1e6:.2f} MB" for name in ("ring", "star")]
        rows.append([f"{row['ranks']:,}", *times, f"{row['ratio']:.2f}", *sent, f"{row['star']['connections']:,.0f}"])
    others = ["busiest rank sends: ring", "star", "connections of the star's root"]
    return table(["ranks", "ring", "star", "star / ring", *others], rows)


def _exponent(name: str) -> str:
    return f"{results('ncclx-start')['exponents'][name]:.2f}"


def held() -> str:
    """Return what twelve groups hold, by how many of them are used."""
    rows = []
    for backend, values in results("ncclx-start")["held"].items():
        memory, files = values["memory"], values["files"]
        rows.append([backend, *(f"{one / 1e6:.2f} MB" for one in memory), *(f"{one:,.0f}" for one in files)])
    return table(["backend", "none is used", "4 are used", "all are used", "open files: none", "4", "all"], rows)


def queues() -> str:
    """Return the longest queues of an emulated switch."""
    rows = []
    for row in results("ncclx-queues")["rows"]:
        waits = [f"{row[name]['queue'] / 2**20:,.0f} MiB" for name in ("whole", "fragments")]
        cells = [str(row["senders"]), f"{row['mebibytes']} MiB", f"{row['latency_s'] * 1e6:g} µs", *waits]
        rows.append([*cells, f"{row['shorter']:.1f}", percent(row["throughput"], ".1f")])
    return table(
        ["senders", "message", "latency", "queue, whole messages", "queue, fragments", "times shorter", "throughput"],
        rows,
    )


FAULTS = {
    "dead": "a process ended",
    "outside": "a rank computes for ever outside of collectives",
    "mismatch": "a rank calls an operation with another size, type or root",
    "swap": "a rank calls two operations in the other order",
    "link": "a link carries nothing more",
    "sender": "a sender stands still",
    "slow": "a slow rank",
    "slow-link": "a slow link",
    "two at a time": "two of these at a time",
}


def blamed() -> str:
    """Return how often exactly the culprits of simulated incidents are named, by kind of fault."""
    found, rows = results("ncclx-blame"), []
    for name, row in found["kinds"].items():
        peer = found["torch"].get(name)
        cells = [FAULTS[name], str(row["incidents"]), percent(row["exact"], ".0f")]
        shares = [percent(peer[key], ".0f") for key in ("named", "named_without_messages")] if peer else ["", ""]
        rows.append([*cells, *shares, f"{peer['ranks']:.0f}" if peer else ""])
    others = ["torch names them", "without messages", "ranks that torch names, of 64"]
    return table(["fault", "incidents", "exact", *others], rows)


def blame_times() -> str:
    """Return how long an analysis takes, by the number of ranks."""
    rows = []
    for ranks, one in results("ncclx-blame")["analysis"].items():
        spent = one["processor_seconds"]["median"]
        rows.append([f"{int(ranks):,}", f"{one['records']:,}", f"{spent:.2f} s", f"{one['read']:.1f} s"])
    return table(["ranks", "operations", "analysis, processor time", "reading the files"], rows)


FIGURES: Figures = {
    "blame-kinds": blamed,
    "blame-times": blame_times,
    "blame-in-time": lambda: "reached" if results("ncclx-blame")["reached"]["seconds"] else "missed",
    "blame-exact": lambda: percent(results("ncclx-blame")["exact"], ".1f"),
    "blame-healthy": lambda: (
        f"{results('ncclx-blame')['healthy']['blamed']} of {results('ncclx-blame')['healthy']['jobs']}"
    ),
    "transport-sums": sums,
    "transport-starts": starts,
    "transport-ring-exponent": lambda: _exponent("ring"),
    "transport-star-exponent": lambda: _exponent("star"),
    "transport-held": held,
    "transport-held-share": lambda: percent(results("ncclx-start")["share"], ".0f"),
    "transport-queues": queues,
    "transport-messages": messages,
    "transport-exchanges": exchanges,
    "transport-trainings": trainings,
}
