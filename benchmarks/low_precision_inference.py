"""Trained ranking models in fewer bits: ``cordillera bench low-precision-inference``.

Parts: ``quantize`` (size, change of NE with its interval, evaluations of the search and time of a batch, of a DLRM and
a Wukong) and ``drift`` (alarms in windows without a change, and with a drifted feature). Each writes
``results/low-precision-inference-PART.json``.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import typer
from _program import Program
from _timing import interleave, times_faster
from _trained_runs import MODELS, trained
from rich.console import Console
from rich.table import Table

from cordillera.data.ranking.datasets import prepare
from cordillera.data.ranking.features import RankingBatch
from cordillera.data.ranking.loader import Loader
from cordillera.embeddings.row_formats import ROW_FORMATS
from cordillera.jagged import JaggedBatch
from cordillera.numerics.inference.drift import DriftCheck, DriftReference
from cordillera.recipe import load
from cordillera.run import Run
from cordillera.serving.ranking import quantized_model
from cordillera.serving.ranking.observation import Observer
from cordillera.training.ranking.scoring import scorer
from cordillera.workflows.quantization import quantize
from cordillera.workflows.trained import model_of, restore_model

BUDGET, MOST_SIZE, LEAST_SPEED, MOST_FALSE, LEAST_FOUND = 5e-4, 0.2, 2.0, 0.01, 0.99
BATCH, WINDOW, TRIALS = 256, 2048, 300
CPU = torch.device("cpu")


class Part(str, enum.Enum):
    """Parts of the benchmark."""

    quantize = "quantize"
    drift = "drift"


def _pair(run: Run) -> tuple[Any, Any, Any]:
    recipe = load(run.recipe_file)
    splits = prepare(recipe.data)
    _, exact = restore_model(run, splits.features, CPU)
    return splits, exact, _load(run, splits)[0]


def _load(run: Run, splits: Any) -> tuple[Any, DriftReference]:
    recipe = load(run.recipe_file)
    made_of = quantized_model.origin(run, use_best=recipe.training.patience is not None)
    return quantized_model.load(run.folder / quantized_model.FOLDER, model_of(recipe, splits.features), made_of)


def _speed(run: Run, quick: bool) -> dict[str, Any]:
    splits, exact, small = _pair(run)
    batches = [batch for batch, _ in zip(Loader(splits.test, BATCH).epoch(), range(16), strict=False)]
    turn = {"fp32": 0, "quantised": 0}

    def call(name: str, score: Callable[[Any], Any]) -> Any:
        turn[name] += 1
        return score(batches[turn[name] % len(batches)])

    contenders = {
        "fp32": partial(call, "fp32", scorer(exact, CPU, "fp32")),
        "quantised": partial(
            call, "quantised", scorer(small, CPU, quantized_model.precision_of(run.folder / quantized_model.FOLDER))
        ),
    }
    timings = interleave(contenders, rounds=3 if quick else 25, calls=8, warmup=4)
    ratio = times_faster(timings["quantised"], timings["fp32"])
    return {
        "times_faster": ratio.to_json(),
        "seconds": {name: timing.spread.to_json() for name, timing in timings.items()},
        "samples_per_second": {name: BATCH / timing.spread.median for name, timing in timings.items()},
    }


def _quantize(console: Console, folder: Path, quick: bool) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    table = Table(title="quantised models beside fp32", title_justify="left")
    for heading in (
        "",
        "size",
        "NE",
        "rise of NE, %",
        "95 % interval",
        "evaluations",
        "a sweep",
        f"batch of {BATCH}, times as fast",
    ):
        table.add_column(heading)
    for name in MODELS:
        run = trained(console, name, folder, quick)
        outcome = quantize(run, BUDGET, say=lambda text: console.print(f"  {text}", markup=False))
        assert outcome.confirmed is not None
        speed = _speed(run, quick)
        share = outcome.bytes[1] / outcome.bytes[0]
        change, evaluations = outcome.confirmed, len(outcome.selection.evaluated)
        rows[name] = {
            "bytes": outcome.bytes,
            "share": share,
            "ne": {"fp32": outcome.ne[0], "quantised": outcome.ne[1]},
            "change": change._asdict(),
            "searched": outcome.searched._asdict(),
            "options": outcome.selection.options,
            "evaluations": evaluations,
            "sweep": outcome.sweep,
            **speed,
            "reached": {
                "size": share <= MOST_SIZE,
                "ne": change.mean <= BUDGET,
                "ne_shown": change.high <= BUDGET,
                "evaluations": evaluations <= 2 * outcome.sweep,
                "speed": speed["times_faster"]["median"] >= LEAST_SPEED,
            },
        }
        times = speed["times_faster"]
        table.add_row(
            name, f"{share:.1%}", f"{outcome.ne[0]:.5f} to {outcome.ne[1]:.5f}", f"{100 * change.mean:+.4f}",
            f"{100 * change.low:+.4f} to {100 * change.high:+.4f}", str(evaluations), str(outcome.sweep),
            f"{times['median']:.2f} ({times['low']:.2f} to {times['high']:.2f})",
        )  # fmt: skip
    console.print(table)
    return {
        "evidence": "measured; searched on the validation split, rise of NE on the test split",
        "budget": BUDGET,
        "targets": {"size": MOST_SIZE, "speed": LEAST_SPEED},
        "batch": BATCH,
        "rows": rows,
    }


def _drift(console: Console, folder: Path, quick: bool) -> dict[str, Any]:
    """Count alarms on random (i.i.d.) windows of the test split, and with one drifting feature after another."""
    found: dict[str, Any] = {}
    folder = folder / "drift"
    for name in MODELS:
        run = trained(console, name, folder, quick, own_log=True)
        quantize(run, BUDGET)
        splits, _, model = _pair(run)
        reference = _load(run, splits)[1]
        observer = Observer(model, splits.encoder)

        def alarms(
            batch: RankingBatch, observer: Observer = observer, reference: DriftReference = reference
        ) -> set[str]:
            check = DriftCheck(reference)
            observer.update(check, batch)
            return {alarm.name for alarm in check.alarms()}

        order = Loader(splits.test, WINDOW, shuffle="global", seed=7)
        endless = (batch for epoch in itertools.count() for batch in order.epoch(epoch) if len(batch) == WINDOW)
        windows = 10 if quick else 1000
        false = sum(bool(alarms(batch)) for batch in itertools.islice(endless, windows))
        drifts: dict[str, dict[str, int]] = {}

        def count(kind: str, expected: str, batch: RankingBatch, drifts: dict[str, dict[str, int]] = drifts) -> None:
            one = drifts.setdefault(kind, {"injected": 0, "found": 0})
            one["injected"] += 1
            one["found"] += expected in alarms(batch)

        features, generator = model.features, torch.Generator().manual_seed(7)
        for _ in range(1 if quick else -(-TRIALS // max(1, len(features.dense)))):
            for column, feature in enumerate(features.dense):
                batch = next(endless)
                for kind, dense in _drifted(batch.dense, column, generator):
                    count(kind, f"feature {feature}", replace(batch, dense=dense))
        for _ in range(1 if quick else -(-TRIALS // len(features.sparse))):
            for column, one in enumerate(features.sparse):
                batch = next(endless)
                expected = f"blank or unseen ids of {one.name}"
                count("unseen", expected, replace(batch, sparse=_unseen(batch.sparse, column, generator)))
        for table in sorted({feature.table for feature in features.sparse}):
            rows, kind = model.tables.rows_of(table), model.tables.kinds[table]
            kept = rows.clone()
            _rescale(rows, kind, 4.0)
            expected = next(f"embedding of {feature.name}" for feature in features.sparse if feature.table == table)
            count("table", expected, next(endless))
            rows.copy_(kept)
        check = DriftCheck(reference)
        found[name] = {
            "windows": windows, "false_alarms": false, "numbers": len(reference.names), "shares": len(reference.shares),
            "checks": check.checks, "drifts": drifts,
        }  # fmt: skip
        console.print(f"{name}: {false} of {windows:,} windows of {WINDOW:,} samples raise an alarm without a change")
        for kind, one in drifts.items():
            console.print(f"{name}: {kind}: {one['found']} of {one['injected']} found in one window")
    return {
        "evidence": "measured",
        "window": WINDOW,
        "rows": found,
        "reached": {
            name: one["false_alarms"] < MOST_FALSE * one["windows"]
            and all(kind["found"] >= LEAST_FOUND * kind["injected"] for kind in one["drifts"].values())
            for name, one in found.items()
        },
    }


def _drifted(dense: torch.Tensor, column: int, generator: torch.Generator) -> Iterator[tuple[str, torch.Tensor]]:
    """Iterate over drifts of one dense feature by the least sizes that the documentation lists."""
    x = dense[:, column]
    hit = torch.rand(len(x), generator=generator) < 0.015
    half = (x.quantile(0.841) - x.quantile(0.159)) / 2
    for kind, drifted in (
        ("mean", x + 0.25 * half),
        ("scale", x.median() + 1.5 * (x - x.median())),
        ("scale down", x.median() + (x - x.median()) / 2),
        ("tail", torch.where(hit, 10 * dense.abs().max(), x)),
    ):
        changed = dense.clone()
        changed[:, column] = drifted
        yield kind, changed


def _unseen(sparse: JaggedBatch, column: int, generator: torch.Generator) -> JaggedBatch:
    """Replace five per cent of the ids of one feature by row 0."""
    samples = (len(sparse.offsets) - 1) // len(sparse.keys)
    first, last = int(sparse.offsets[column * samples]), int(sparse.offsets[(column + 1) * samples])
    values = sparse.values.clone()
    values[first:last][torch.rand(last - first, generator=generator) < 0.05] = 0
    return replace(sparse, values=values)


def _rescale(rows: torch.Tensor, kind: str, factor: float) -> None:
    """Multiply the values of rows in place: their scales and biases, or their numbers."""
    parameters = ROW_FORMATS[kind].row_parameters
    dtype = {"int8": torch.float32, "fp32": torch.float32}.get(kind, torch.float16)
    view = rows[:, -parameters:] if parameters else rows
    view.copy_((view.contiguous().view(dtype) * factor).view(torch.uint8))


PARTS = {Part.quantize: _quantize, Part.drift: _drift}


main = Program(
    "low-precision-inference",
    PARTS,
    "Quantise trained models, score with them, and watch what they see.",
    quick_help="Few samples: shows that it works, its figures mean nothing.",
).command()


if __name__ == "__main__":
    typer.run(main)
