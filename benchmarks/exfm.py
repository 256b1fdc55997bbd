"""Students of an external teacher: ``cordillera bench exfm`` or ``python benchmarks/exfm.py``.

Parts: ``bias`` (Adult and MovieLens-100K in time order, with a teacher whose logits are off by 0 and by 1), ``drift``
(a made stream whose truth turns, with a teacher that lags), ``transfer`` (how much of the teacher's gain students keep,
by what they are given), ``streams`` (augmentation of MovieLens' streams: calls of the teacher and rows a second) and
``speed`` (a step with a teacher beside one without). Each writes ``results/exfm-PART.json``.
"""

from __future__ import annotations

import enum
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import polars as pl
import typer
from _exfm_data import DELAY_S, TASK, WINDOW_S, Students, adult, drifting, movielens, movielens_frame, write_streams
from _exfm_speed import speed
from _program import Program
from _results import FinishedPieces
from _tables import print_notes, print_rows
from rich.console import Console
from scipy import stats

from cordillera import workflows
from cordillera.training.ranking.teachers.distillation import of_teacher

SEEDS, DRIFT_SEEDS = 5, 10
OFFSETS = (0.0, 1.0)
LAGS = (0.0, 0.1, 0.25)
WEIGHT = 3.0
AUXILIARY: dict[str, Any] = {"head": "auxiliary", "weight": WEIGHT}
ADAPTER = {**AUXILIARY, "adapter": True, "adapter_weight": WEIGHT}
METHODS: dict[str, dict[str, Any] | None] = {
    "no teacher": None,
    "serving heads": {"head": "serving", "weight": WEIGHT},
    "auxiliary heads": AUXILIARY,
    "auxiliary heads, adapter": ADAPTER,
}


class Part(str, enum.Enum):
    """Parts of the benchmark."""

    bias = "bias"
    drift = "drift"
    transfer = "transfer"
    streams = "streams"
    speed = "speed"


def _trained(
    console: Console,
    pieces: FinishedPieces,
    students: Students,
    teacher: dict[str, Any] | None,
    seed: int,
    quick: bool,
    path: Path | None = None,
) -> dict[str, float]:
    """Return metrics of the test split, of the whole stream before training on it, and of the teacher."""
    recipe = students.recipe(seed, teacher, quick=quick, path=path)
    key = {"recipe": recipe.model_dump(mode="json"), "data": _digest(path or students.path)}
    key["recipe"]["data"]["path"] = Path(key["recipe"]["data"]["path"]).name
    found = pieces.get(key)
    if found is None:
        with tempfile.TemporaryDirectory() as folder:
            outcome = workflows.train(recipe, Path(folder) / "run")
            assert isinstance(outcome, workflows.Outcome)
            assert outcome.evaluation is not None
            metrics, scores = outcome.evaluation.tasks[TASK].metrics, outcome.evaluation.teacher.get(TASK, {})
            found = {name: metrics[name] for name in ("ne", "auc", "calibration")}
            found |= {f"teacher_{name}": scores[name] for name in found if scores}
            if students.progressive:
                stream = outcome.run.read_json("progressive.json")
                found["progressive_ne"] = stream[TASK]["ne"]
                if teacher is not None:
                    found["teacher_progressive_ne"] = stream[of_teacher(TASK)]["ne"]
        pieces.add(key, found)
        said = ", ".join(f"{name} {value:.4f}" for name, value in found.items())
        console.print(f"  {(path or students.path).stem}, {teacher or 'no teacher'}, seed {seed}: {said}")
    return dict(found)


def _digest(path: Path) -> str:
    frame = pl.read_parquet(path, glob=False)
    return f"{len(frame)}-{int(frame.select(sorted(frame.columns)).hash_rows(0).sum()) % 2**32:08x}"


def _bias(console: Console, quick: bool, pieces: FinishedPieces) -> dict[str, Any]:
    results, rows = [], []
    for name, students in (("Adult", adult(quick)), ("MovieLens-100K", movielens(quick))):
        for offset in OFFSETS:
            path = students.with_offset(offset)
            for method, teacher in METHODS.items():
                found = [
                    _trained(console, pieces, students, teacher, seed, quick, path)
                    for seed in range(1, (1 if quick else SEEDS) + 1)
                ]
                values = {key: [one[key] for one in found] for key in ("ne", "auc", "calibration")}
                results.append({"data": name, "offset": offset, "method": method, **values})
                means = {key: statistics.fmean(of_seeds) for key, of_seeds in values.items()}
                rows.append([name, f"{offset:+g}", method, *(f"{mean:.4f}" for mean in means.values())])
            itself = _trained(console, pieces, students, AUXILIARY, 1, quick, path)
            values = {key: [itself[f"teacher_{key}"]] for key in ("ne", "auc", "calibration")}
            results.append({"data": name, "offset": offset, "method": "the teacher itself", **values})
            rows.append([name, f"{offset:+g}", "the teacher itself", *(f"{one[0]:.4f}" for one in values.values())])
    heads = ["data", "logits off by", "method", "test NE", "AUC", "calibration"]
    print_rows(console, "students of a teacher that is off", heads, rows, "measured")
    notes = [f"a weight of {WEIGHT:g} for all methods, {SEEDS} seeds; students see no sample that taught the teacher"]
    print_notes(console, notes)
    return {"evidence": "measured", "results": results, "notes": notes}


def _drift(console: Console, quick: bool, pieces: FinishedPieces) -> dict[str, Any]:
    results, rows = [], []
    for lag in LAGS:
        nes: dict[str, list[float]] = {}
        for method, teacher in METHODS.items():
            nes[method] = [
                _trained(console, pieces, drifting(seed, lag, quick), teacher, seed, quick)["progressive_ne"]
                for seed in range(1, (2 if quick else DRIFT_SEEDS) + 1)
            ]
        base = nes["auxiliary heads"]
        for method, values in nes.items():
            changes = [one - other for one, other in zip(values, base, strict=True)]
            entry: dict[str, Any] = {"lag": lag, "method": method, "ne": values, "changes": changes}
            if method != "auxiliary heads":
                entry["p"] = float(stats.ttest_1samp(changes, 0.0).pvalue)
            results.append(entry)
            change = "" if method == "auxiliary heads" else f"{statistics.fmean(changes):+.4f} (p {entry['p']:.1g})"
            rows.append([f"{lag:g}", method, f"{statistics.fmean(values):.4f}", change])
    heads = ["lag", "method", "NE before training on a sample", "beside auxiliary heads"]
    print_rows(console, "a truth that turns, and a teacher that knows it late", heads, rows, "measured")
    notes = [
        "lag: share of the stream; the truth makes half a turn, the teacher is exact but for its lag",
        f"{DRIFT_SEEDS} seeds; p: paired t-test over seeds",
    ]
    print_notes(console, notes)
    return {"evidence": "measured", "results": results, "notes": notes}


def _kinds(students: Students) -> dict[str, tuple[dict[str, Any], dict[str, Any] | None]]:
    """Return what students are given, by name: changes of their schema, and keys of ``[training.teacher]``."""
    past = {"dense": [{"name": "teacher_past", "transform": "standardise", "width": 32}]}
    own = {"dense": [one for one in students.schema["dense"] if one["name"].startswith("user_")]}
    return {
        "ids and times": ({"dense": []}, None),
        "... with auxiliary heads": ({"dense": []}, AUXILIARY),
        "... with auxiliary heads and adapter": ({"dense": []}, ADAPTER),
        "... with embeddings of past events": (past, None),
        "... with both": (past, ADAPTER),
        "... with four counts and means of one's own": (own, None),
        "all features": ({}, None),
        "... with auxiliary heads ": ({}, AUXILIARY),
        "... with auxiliary heads and adapter ": ({}, ADAPTER),
        "... with embeddings of past events ": ({"dense": [*students.schema["dense"], *past["dense"]]}, None),
        "... with both ": ({"dense": [*students.schema["dense"], *past["dense"]]}, ADAPTER),
    }


def _transfer(console: Console, quick: bool, pieces: FinishedPieces) -> dict[str, Any]:
    students, results, rows = movielens(quick), [], []
    base: list[float] = []
    for kind, (changes, teacher) in _kinds(students).items():
        own = Students(**{**students.__dict__, "schema": {**students.schema, **changes}})
        found = [_trained(console, pieces, own, teacher, seed, quick) for seed in range(1, (1 if quick else SEEDS) + 1)]
        nes = [one["progressive_ne"] for one in found]
        if not kind.startswith("..."):
            base = nes
        gains = [before - after for before, after in zip(base, nes, strict=True)]
        results.append({"kind": kind.strip(), "ne": nes, "test_ne": [one["ne"] for one in found], "gains": gains})
    teacher_itself = _trained(console, pieces, students, AUXILIARY, 1, quick)
    whole, on_test = teacher_itself["teacher_progressive_ne"], teacher_itself["teacher_ne"]
    for one in results:
        start = next(other for other in reversed(results[: results.index(one) + 1]) if other["kind"][:3] != "...")
        gain = statistics.fmean(start["ne"]) - whole
        one["transfer"] = statistics.fmean(one["gains"]) / gain
        shown = "" if one is start else f"{100 * one['transfer']:.0f} %"
        rows.append(
            [one["kind"], f"{statistics.fmean(one['ne']):.4f}", f"{statistics.fmean(one['test_ne']):.4f}", shown]
        )
    rows.append(["the teacher itself", f"{whole:.4f}", f"{on_test:.4f}", ""])
    heads = ["student", "NE before training on a sample", "test NE", "share of the teacher's gain"]
    print_rows(console, "MovieLens-100K, dramas", heads, rows, "measured")
    notes = [f"{SEEDS} seeds; the teacher's gain is that over the student without it, in NE of the whole stream"]
    print_notes(console, notes)
    return {
        "evidence": "measured",
        "results": results,
        "teacher": {"ne": whole, "test_ne": on_test},
        "notes": notes,
    }


def _streams(console: Console, quick: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:  # what is loaded and compiled once is not measured
        workflows.augment(write_streams(Path(folder), 5_000), finish=True)
    with tempfile.TemporaryDirectory() as folder:
        config = write_streams(Path(folder), 5_000 if quick else None)
        begun = time.perf_counter()
        progress = workflows.augment(config, finish=True).progress
        seconds = time.perf_counter() - begun
        parts = [pl.read_parquet(f"{folder}/augmented/{name}/*.parquet") for name in config.streams]
        written = pl.concat(parts).select("id", "teacher_version")
        unique = written.unique().drop_nulls()
        again = time.perf_counter()
        workflows.augment(config, finish=True)
        nothing = time.perf_counter() - again
    rows = [
        ["events read", f"{progress.counts['events']:,}"],
        ["of them in another stream as well, or twice", f"{progress.counts['duplicates']:,}"],
        ["examples written to all streams", f"{sum(progress.examples.values()):,}"],
        ["events that differ, with a version that scored them", f"{len(unique):,}"],
        ["calls of the teacher", f"{sum(progress.calls.values()):,}"],
        ["versions published", f"{len(progress.calls):,}"],
        ["events a second, with learning and scoring", f"{progress.counts['events'] / seconds:,.0f}"],
        ["seconds of a call that finds nothing new", f"{nothing:.2f}"],
    ]
    print_rows(console, "augmentation of three streams of MovieLens-100K", ["", ""], rows, "measured")
    notes = [
        f"labels come {DELAY_S} s late at most, their window is {WINDOW_S} s; {len(movielens_frame()[0]):,} ratings"
    ]
    return {
        "evidence": "measured",
        "counts": dict(progress.counts),
        "examples": dict(progress.examples),
        "unique": len(unique),
        "calls": sum(progress.calls.values()),
        "versions": len(progress.calls),
        "events_per_second": progress.counts["events"] / seconds,
        "notes": notes,
    }


main = Program(
    "exfm",
    {Part.bias: _bias, Part.drift: _drift, Part.transfer: _transfer, Part.streams: _streams, Part.speed: speed},
    "Train students of an external teacher that is off, lags, or gives embeddings of past events.",
    threads=2,
    fresh=True,
).command()


if __name__ == "__main__":
    typer.run(main)
