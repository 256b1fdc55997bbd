"""Trained ranking models in fewer bits: ``cordillera bench low-precision-inference``.

Parts: ``quantize`` (size, change of NE with its interval, evaluations of the search and time of a batch, of a DLRM and
a Wukong) and ``drift`` (alarms without and with a table whose scale has changed). Each writes
``results/low-precision-inference-PART.json``.
"""

from __future__ import annotations

import enum
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from _results import RESULTS, make_console, write_part
from _timing import interleave, times_faster
from _trained_runs import MODELS, trained
from rich.console import Console
from rich.table import Table

from cordillera.data.datasets import prepare
from cordillera.data.loader import Loader
from cordillera.embeddings.row_formats import ROW_FORMATS
from cordillera.numerics.drift import Moments, alarms
from cordillera.recipe import load
from cordillera.run import Run
from cordillera.serving import quantized_model
from cordillera.training.trainer import scorer
from cordillera.workflows.quantization import quantize
from cordillera.workflows.ranking import load_model, model_of

BUDGET, MOST_SIZE, LEAST_SPEED, MOST_FALSE = 5e-4, 0.2, 2.0, 0.01
BATCH, WINDOW = 256, 1024
CPU = torch.device("cpu")


class Part(str, enum.Enum):
    """What can be measured."""

    quantize = "quantize"
    drift = "drift"


def _pair(run: Run) -> tuple[Any, Any, Any]:
    """Splits, the model in fp32 and the quantised one."""
    recipe = load(run.recipe_file)
    splits = prepare(recipe.data)
    _, exact = load_model(run, splits.features, CPU)
    small, _ = quantized_model.load(run.folder / quantized_model.FOLDER, model_of(recipe, splits.features))
    return splits, exact, small


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
    """Windows drawn from the training split at random are i.i.d.; then one table after another is rescaled."""
    found: dict[str, Any] = {}
    for name in MODELS:
        run = Run(folder / name) if (folder / name / "recipe.toml").is_file() else trained(console, name, folder, quick)
        if not (run.folder / quantized_model.FOLDER).is_dir():
            quantize(run, BUDGET)
        recipe = load(run.recipe_file)
        splits = prepare(recipe.data)
        model, before = quantized_model.load(run.folder / quantized_model.FOLDER, model_of(recipe, splits.features))
        windows, false = 10 if quick else 300, 0
        order = Loader(splits.test, WINDOW, shuffle="global", seed=7)
        batches = [batch for epoch in range(20) for batch in order.epoch(epoch) if len(batch) == WINDOW][:windows]
        for batch in batches:
            now = Moments(before.names)
            now.update(quantized_model.observe(model, batch)[1])
            false += bool(alarms(before, now))
        used = {feature.table for feature in splits.features.sparse}
        missed = []
        for table in sorted(used):
            rows, kind = model.tables.rows_of(table), model.tables.kinds[table]
            kept = rows.clone()
            _rescale(rows, kind, 4.0)
            now = Moments(before.names)
            now.update(quantized_model.observe(model, batches[0])[1])
            if not alarms(before, now):
                missed.append(table)
            rows.copy_(kept)
        found[name] = {"windows": len(batches), "false_alarms": false, "tables": len(used), "missed": missed}
        console.print(
            f"{name}: {false} alarms in {len(batches)} windows of {WINDOW} samples without a change; "
            f"with the scale of one table times 4, {len(used) - len(missed)} of {len(used)} tables raise one at once"
        )
    return {
        "evidence": "measured",
        "window": WINDOW,
        "rows": found,
        "reached": {
            name: one["false_alarms"] / one["windows"] < MOST_FALSE and not one["missed"] for name, one in found.items()
        },
    }


def _rescale(rows: torch.Tensor, kind: str, factor: float) -> None:
    """Multiply what rows stand for, in place: their scales and biases, or their numbers."""
    parameters = ROW_FORMATS[kind].row_parameters
    dtype = {"int8": torch.float32, "fp32": torch.float32}.get(kind, torch.float16)
    view = rows[:, -parameters:] if parameters else rows
    view.copy_((view.contiguous().view(dtype) * factor).view(torch.uint8))


PARTS = {Part.quantize: _quantize, Part.drift: _drift}


def main(
    part: Annotated[list[Part] | None, typer.Option("--part", help="What to measure; repeat it. Default: all.")] = None,
    quick: Annotated[bool, typer.Option(help="Few samples: shows that it works, its figures mean nothing.")] = False,
    results: Annotated[Path | None, typer.Option(help="Folder of the result files.")] = None,
) -> None:
    """Quantise trained models, score with them, and watch what they see."""
    console = make_console()
    folder = results or (RESULTS / "quick" if quick else RESULTS)
    with tempfile.TemporaryDirectory() as runs:
        for chosen in part or Part:
            measure = partial(PARTS[chosen], console, Path(runs), quick)
            write_part(console, folder, "low-precision-inference", chosen.value, quick, measure)


if __name__ == "__main__":
    typer.run(main)
