"""Prioritised and frozen-window exchange of embedding rows beside the synchronous one: ``cordillera bench freescale``.

Two processes train one table that is cut in rows. A share of the rows of each batch is in the batch before as well (the
collisions). Between lookups, both processes compute for a fixed time, as the dense part of a model would; messages
leave them at an emulated rate. With a frozen window, a step is computed in slices, whose computation takes as long
together. The part ``balance`` divides samples with lists of very different lengths over ranks.
"""

from __future__ import annotations

import enum
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import typer
from _emulated_links import EmulatedLinks
from _freescale_balance import measure_balance
from _processes import run_processes
from _program import Program
from _tables import print_notes, print_rows
from rich.console import Console
from rich.table import Table
from torch import Tensor

from cordillera.data.ranking.features import FeatureSpec, SparseFeature
from cordillera.distributed.ledger import Ledger
from cordillera.embeddings.prioritised_tables import FrozenWindowTables, PrioritisedEmbeddingTables
from cordillera.embeddings.sharded_tables import ShardedEmbeddingTables
from cordillera.embeddings.tables import TablesConfig
from cordillera.jagged import JaggedBatch, slice_samples
from cordillera.planning.ranking.placement import Placement, TablePart

RANKS, ROWS, DIM = 2, 400_000, 64
ROWS_OF_BATCH = 4096  # distinct rows of a rank's batch
BYTES_PER_S, LATENCY_S = 50e6, 1e-3
FORWARD_S, BACKWARD_S = 0.030, 0.060
SHARES = (0.0, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0)
STEPS, WARM_UP, ROUNDS = 12, 2, 5
SLICES = 4  # of a step with a frozen window
FALLEN, FIT = 5.0, 0.95  # asked: exposed time at 5 % collisions, and R squared of a line through all shares
WINDOW_FALLEN = 1.5  # asked of the frozen window at 50 % collisions
TABLES = {
    "synchronous": ShardedEmbeddingTables,
    "prioritised": PrioritisedEmbeddingTables,
    "window": FrozenWindowTables,
}


class Part(str, enum.Enum):
    """Parts of the benchmark."""

    exposed = "exposed"
    balance = "balance"


def batches(share: float, rank: int, steps: int, rows: int = ROWS_OF_BATCH) -> list[JaggedBatch]:
    """Return batches of distinct ids, of which a ``share`` is in the batch before as well."""
    draw = np.random.default_rng([7, rank])
    # ranks have halves of the ids, so that the share of rows is that of ids
    own = draw.permutation(ROWS // RANKS) * RANKS + rank
    kept, found, taken = round(share * rows), [], 0
    before: np.ndarray = np.empty(0, dtype=np.int64)
    for _ in range(steps):
        again = before[:kept]
        fresh = own[taken : taken + rows - len(again)]
        taken = (taken + len(fresh)) % (len(own) - rows)
        before = draw.permutation(np.concatenate([again, fresh]))
        found.append(JaggedBatch(("item",), torch.from_numpy(before), torch.arange(rows + 1), one_hot=True))
    return found


def _compute(seconds: float, work: Tensor) -> None:
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        work @ work


def _trained(tables: ShardedEmbeddingTables, steps: list[JaggedBatch], seconds: tuple[float, float]) -> dict[str, Any]:
    """Train on batches; return seconds of steps and exposed seconds of all exchanges, after a warm-up."""
    work, spent = torch.randn(128, 128), []
    window = tables if isinstance(tables, FrozenWindowTables) else None
    slices = SLICES if window else 1
    ledger = tables.links.ledger
    exposed = 0.0
    parts = [
        [slice_samples(batch, len(batch) * i // slices, len(batch) * (i + 1) // slices) for i in range(slices)]
        for batch in steps
    ]
    for part in (part for step in parts[:2] for part in step):
        tables.prefetch(part)
    for step, own in enumerate(parts):
        began = time.perf_counter()
        if step == WARM_UP:
            ledger.clear()
        for part in (part for ahead in parts[step + 2 : step + 3] for part in ahead):
            tables.prefetch(part)
        for number, part in enumerate(own):
            output = tables(part)
            _compute(seconds[0] / slices, work)
            tables.advance()
            if window and number + 1 < slices:
                window.fetch_ahead()
            loss = (output * output).sum()
            _compute(seconds[1] / slices, work)
            loss.backward()
            if window:
                window.send_gradients()
        tables.update()
        spent.append(time.perf_counter() - began)
        if step == len(steps) - 2:  # the last step has no next batch
            exposed = ledger.total().exposed_seconds
    return {
        "seconds": median(spent[WARM_UP:-1]),
        "exposed": exposed / (len(steps) - 1 - WARM_UP),
        "weight": tables.state_dict()["weight"].double().sum().item(),
        "collisions": getattr(tables, "collisions", (0, 0)),
    }


def _share(rank: int, folder: str, *, quick: bool) -> dict[str, Any]:
    """Train on one rank, for every share of collisions, all kinds of tables in turns."""
    links = EmulatedLinks(Ledger(), 60.0, bytes_per_s=BYTES_PER_S, latency_s=LATENCY_S)
    features = FeatureSpec((), (SparseFeature("item", "item"),), {"item": ROWS}, ("click",))
    half = ROWS // RANKS
    parts = tuple(TablePart("item", half * i, half, 0, DIM, (i,)) for i in range(RANKS))
    placement = Placement(RANKS, {"item": (ROWS, DIM)}, parts)
    shares = (0.0, 1.0) if quick else SHARES
    rows = 256 if quick else ROWS_OF_BATCH
    seconds = (0.002, 0.004) if quick else (FORWARD_S, BACKWARD_S)
    found: dict[str, Any] = {}
    for turn in range(1 if quick else ROUNDS):
        for share in shares:
            for name in sorted(TABLES, reverse=bool(turn % 2)):
                made = TABLES[name](
                    features, DIM, TablesConfig(), placement, links, generator=torch.Generator().manual_seed(0)
                )
                steps = batches(share, rank, (4 if quick else STEPS) + WARM_UP, rows)
                found[f"{name} {share} {turn}"] = _trained(made, steps, seconds)
    links.close()
    return found


def _line(shares: list[float], seconds: list[float]) -> float:
    """Return R squared of a line through points."""
    at, values = np.array(shares), np.array(seconds)
    rest = values - np.polyval(np.polyfit(at, values, 1), at)
    return float(1 - rest.var() / values.var()) if values.var() else 1.0


def _exposed(console: Console, quick: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        ended = run_processes(RANKS, Path(folder), partial(_share, quick=quick), 900)
    if ended.codes != [0] * RANKS:
        raise RuntimeError(ended.said)
    rows = []
    for share in sorted({float(key.split()[1]) for key in ended.found[0]}):
        row: dict[str, Any] = {"share": share}
        for name in TABLES:
            keys = [key for key in ended.found[0] if key.startswith(f"{name} {share} ")]
            # both ranks wait for each other: the slower one counts
            for what in ("seconds", "exposed"):
                row[f"{name}_{what}"] = median(max(found[key][what] for found in ended.found.values()) for key in keys)
        asked, collided = ended.found[0][f"prioritised {share} 0"]["collisions"]
        row["collisions"] = collided / asked if asked else 0.0
        row["equal"] = all(
            found[key]["weight"] == found[key.replace(key.split()[0], "synchronous")]["weight"]
            for found in ended.found.values()
            for key in found
            if key.split()[1] == str(share)
        )
        for name, fallen, faster in (("prioritised", "fallen", "faster"), ("window", "window_fallen", "window_faster")):
            row[fallen] = row["synchronous_exposed"] / row[f"{name}_exposed"]
            row[faster] = row["synchronous_seconds"] / row[f"{name}_seconds"]
        rows.append(row)
    fit = _line([row["collisions"] for row in rows], [row["prioritised_exposed"] for row in rows])
    table = Table(title="exchanges of a step that nothing hides (emulated links)", title_justify="left")
    for heading in (
        "collisions", "synchronous", "prioritised", "times less", "step, times faster",
        f"window of {SLICES}", "times less", "step, times faster", "equal",
    ):  # fmt: skip
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            f"{row['collisions']:.0%}", f"{1e3 * row['synchronous_exposed']:.1f} ms",
            f"{1e3 * row['prioritised_exposed']:.1f} ms", f"{row['fallen']:.2f}", f"{row['faster']:.2f}",
            f"{1e3 * row['window_exposed']:.1f} ms", f"{row['window_fallen']:.2f}", f"{row['window_faster']:.2f}",
            "yes" if row["equal"] else "NO",
        )  # fmt: skip
    console.print(table)
    console.print(f"exposed time over the share of collisions: R² of a line is {fit:.3f} ({FIT} asked)")
    return {
        "evidence": "emulated",
        "conditions": {
            "ranks": RANKS,
            "rows_of_batch": ROWS_OF_BATCH,
            "dim": DIM,
            "bytes_per_s": BYTES_PER_S,
            "latency_s": LATENCY_S,
            "computation_s": [FORWARD_S, BACKWARD_S],
            "slices": SLICES,
        },
        "rows": rows,
        "fit": fit,
        "asked": {"fallen": FALLEN, "fit": FIT, "window_fallen": WINDOW_FALLEN},
        "notes": [
            "the synchronous exchange has the ids of the next batch behind computation as well",
            "ids of a batch are distinct, so that its slices have no rows in common, which would be sent twice",
        ],
    }


def _balance(console: Console, quick: bool) -> dict[str, Any]:
    found = measure_balance(quick)
    asked, rows = found["asked"], []
    for row in found["counted"]:
        for balance, fewer in row["fewer"].items():
            shares = [f"{row['shares'][kind]:.2%}" for kind in ("none", balance)]
            planned = 1e3 * row["seconds"][balance]["median"]
            rows.append(
                [row["work"], balance, *shares, f"{fewer:.1f}" if fewer < 1000 else "over 1,000", f"{planned:.1f} ms"]
            )
    title = f"waiting for the slowest of many ranks, counted; {asked['fewer']:g} times less asked"
    print_rows(console, title, ["work", "balance", "without", "with", "times less", "planning"], rows, "counted")
    rows = []
    for row in found["steps"]:
        times = row["times_faster"]
        cells = [f"{1e3 * row['seconds']['seconds']['median']:.1f}", f"{times['median']:.3f}"]
        cells += [f"{times['low']:.3f} to {times['high']:.3f}", f"{row['planning']['median']:.2%}"]
        rows.append([row["balance"], *cells, f"{row['loss_difference']:.1e}"])
    title = f"steps of two processes with attention over histories; {asked['times_faster']:g} times asked"
    headings = ["balance", "ms", "times faster", "quartiles", "planning, of a step", "largest difference of losses"]
    print_rows(console, title, headings, rows)
    print_notes(console, found["notes"])
    return found


main = Program(
    "freescale",
    {Part.exposed: _exposed, Part.balance: _balance},
    "Compare prioritised and frozen-window with synchronous exchange over emulated links, and balance samples.",
    threads=1,
).command()


if __name__ == "__main__":
    typer.run(main)
