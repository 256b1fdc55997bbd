"""Report of a language run: a self-contained HTML page for screens (light and dark) and for paper."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cordillera.distributed.fault_tolerance.events import FOLDER
from cordillera.distributed.fault_tolerance.goodput import Goodput, ReplicaFault
from cordillera.errors import RunError
from cordillera.numbers import compact, duration, fixed, known, whole
from cordillera.reports import page
from cordillera.reports.charts import LINEAR, Axis, Figure, Series, figure, framed, padded, stacked_bar
from cordillera.reports.language.card import card
from cordillera.reports.language.headline import headline
from cordillera.reports.language.replicas import REPLICAS_PAGE, read_account
from cordillera.reports.language.warnings import find_warnings
from cordillera.run import Run
from cordillera.training.language.records import SHARES, LanguageRecords, Record, mean, total

_SHOWN_EVENTS = 12
_MOST_EVENTS = 200
_SHOWN_VALIDATIONS = 8


def write_language_report(run: Run) -> Path:
    """Write ``report.html`` into the folder of a language ``run``, and return its path.

    The report reads ``recipe.toml``, ``metrics.jsonl``, ``evaluation.json``, ``model.json`` and ``environment.json``;
    missing content is left out and named.

    Raises:
        DataError: If one of the files does not have the expected content.
        RunError: If a line of ``metrics.jsonl`` is not JSON, or the report cannot be written.
    """
    return page.write(run, render(run))


def render(run: Run) -> str:
    """Return the report of a ``run`` as HTML text; see :func:`write_language_report`."""
    records = LanguageRecords(run)
    replicas = _account(run, records)
    if replicas is not None:
        _leave_out_absence(records, replicas)
    title, description = _title(records), records.recipe.get("description")
    world = records.size("world")
    return page.fill(
        "language_run",
        name=records.name,
        lede=f"{title}. {description}" if isinstance(description, str) and description else title,
        records=records,
        headline=headline(records),
        warnings=find_warnings(records),
        learning=_learning(records),
        validations=_validations(records),
        balance=_balance(records),
        speed=_speed(records),
        times=_times(records),
        memory=_memory(records),
        events=_events(records, replicas),
        replicas=REPLICAS_PAGE if (run.folder / REPLICAS_PAGE).is_file() else None,
        card=card(records),
        command="cordillera train recipe.toml" + (f" --nproc {world:.0f}" if world > 1 else ""),
    )


def _account(run: Run, records: LanguageRecords) -> Goodput | None:
    """Return the account of the replicas; None for other runs, and if their events are damaged, as their page says."""
    if records.replicas == 1 or not (run.folder / FOLDER).is_dir():
        return None
    try:
        return read_account(run, records.replicas)
    except RunError:
        return None


def _leave_out_absence(records: LanguageRecords, found: Goodput) -> None:
    """Take from the times of checkpoints those in which the replica that saved stood still and was left out."""
    ends = {
        one.step: one
        for name, attempts in found.attempts.items()
        for one in attempts
        if one.is_useful and name == one.participants[0]
    }
    for record in records.of_kind("checkpoint"):
        if (one := ends.get(int(record["step"]) if math.isfinite(record["step"]) else -1)) is not None:
            until = one.at + record["seconds"]
            parts = (part for part in found.spans[one.replica] if part.part == "absent")
            gone = math.fsum(max(0.0, min(part.end, until) - max(part.start, one.at)) for part in parts)
            record["seconds"] = max(0.0, record["seconds"] - gone)


def _title(records: LanguageRecords) -> str:
    size, world = records.parameters, records.size("world")
    name = str(records.model.get("name") or records.setting("model", "name") or "a language model")
    parts = [name if math.isnan(size) else f"{name} of {compact(size)} parameters"]
    if world >= 1:
        processes = "one process" if world == 1 else f"{world:,.0f} processes"
        replicas = records.replicas
        parts.append(f"on {replicas:,} replicas, each of {processes}" if replicas > 1 else f"on {processes}")
    return " ".join([parts[0][:1].upper() + parts[0][1:], *parts[1:]])


def _learning(records: LanguageRecords) -> list[Figure | None]:
    train = records.train
    evaluations = [record for found in records.validations.values() for record in found]
    key = "tokens" if any(record["tokens"] > 0 for record in (*train, *evaluations)) else "step"
    label = "training tokens" if key == "tokens" else "step"
    places = [record[key] for record in (*train, *evaluations)]
    x = Axis.to(places) if 0 in places else Axis.of_progress(places)  # logarithms would not show the first evaluation
    loss = Series.of("training", "s0", train, key, "loss")
    held_out = [
        Series.of(split, style, found, key, "loss", "both")
        for (split, found), style in zip(records.validations.items(), ("s1", "s2", "s3"), strict=False)
        if not any(math.isfinite(one["solved"]) for one in found)  # shares, which have a chart of their own
    ]
    limits, is_cut = _frame(loss.places(x, LINEAR)[1], x)
    validated = [value for one in held_out for value in one.places(x, LINEAR)[1] if math.isfinite(value)]
    if validated:
        trained = limits if loss.is_drawable else ()
        ends = [*trained, *padded(validated)]
        limits = min(ends), max(ends)
    caption = "Training: mean over the tokens since the last record" + ("; some leave the frame." if is_cut else ".")
    resumed = _places_of(records, "resumed", key)[-20:]
    marks = [(place, "resumed" if len(resumed) <= 3 else "") for place in resumed]
    rates = Series.of("learning rate", "s0", train, key, "learning_rate")
    return [
        figure("Loss", [loss, *held_out], (label, records.unit_of_loss), caption, x=x, y=Axis(limits), places=marks),
        _shares(records, x, key, label),
        _norms(records, x, key, label),
        figure("Learning rate", [rates], (label, "learning rate"), "At each record.", x=x),
    ]


def _shares(records: LanguageRecords, x: Axis, key: str, label: str) -> Figure | None:
    """Return the shares of right answers of a run of post-training; None for other runs."""
    names = {"accuracy": "better answers preferred", "reward": "samples right", "solved": "problems solved"}
    if records.setting("objective", "name") == "draft":
        names["accuracy"] = "first drafts right"
    found = [Series.of(f"{names[name]}, training", "s0", records.train, key, name) for name in SHARES]
    for split, evaluations in records.validations.items():
        found += [Series.of(f"{names[name]}, {split}", "s1", evaluations, key, name, "both") for name in SHARES]
    drawn = [one for one in found if one.is_drawable]
    if not drawn:
        return None
    return figure(
        "Right answers", drawn, (label, "share"), "Of pairs, of answers or of drafts.", x=x, y=Axis((0.0, 1.0))
    )


def _frame(losses: Sequence[float], x: Axis) -> tuple[tuple[float, float], bool]:
    """Return the limits of the axis of losses, and whether some losses leave it.

    On a logarithmic axis, the fall from the first losses fits; then only values above them leave the frame.
    """
    if not x.is_log:
        return framed(losses)
    known = [loss for loss in losses if math.isfinite(loss)]
    kept = [loss for loss in known if loss <= max(known[:3])]
    return padded(kept), len(kept) < len(known)


def _validations(records: LanguageRecords) -> dict[str, Any]:
    """Return rows of the newest evaluations, each with whether its split's loss is the lowest."""
    found = [(split, record) for split, all_ in records.validations.items() for record in all_]
    if not found:
        return {}
    best = {
        split: min(losses)
        for split, all_ in records.validations.items()
        if (losses := [one["loss"] for one in all_ if math.isfinite(one["loss"])])
    }
    found.sort(key=lambda pair: pair[1]["step"] if math.isfinite(pair[1]["step"]) else -math.inf)
    rows = []
    for split, record in found[-_SHOWN_VALIDATIONS:]:
        name = f"{split}, step {whole(record['step'])}" if len(best) > 1 else whole(record["step"])
        bits = known(record["bits_per_byte"], "{:.4f}")
        cells = [compact(record["tokens"]), fixed(record["loss"]), known(record["perplexity"], "{:,.4g}"), bits]
        rows.append((name, record["loss"] == best.get(split), cells))
    shown = (
        f"The newest {len(rows):,} of {len(found):,}"
        if len(rows) < len(found)
        else f"All {len(found):,}"
        if len(found) > 1
        else "The only one"
    )
    return {"rows": rows, "shown": shown}


def _norms(records: LanguageRecords, x: Axis, key: str, label: str) -> Figure | None:
    norms = Series.of("gradient norm", "s0", records.train, key, "gradient_norm")
    above_zero = [value for value in norms.places(x, LINEAR, thinned=False)[1] if value > 0]
    clip = records.setting("training", "clip")
    is_clipped = isinstance(clip, int | float) and not isinstance(clip, bool) and 0 < clip < math.inf
    held = [*above_zero, float(clip)] if is_clipped else above_zero
    is_wide = bool(above_zero) and max(held) > 30 * min(held)
    y = Axis.log(min(held) / 1.3, max(held) * 1.3) if is_wide else Axis.from_zero(held)
    caption = "Of all gradients together before clipping, at each record."
    if is_clipped and above_zero:
        clipped = sum(1 for value in above_zero if value > clip)
        caption += f" {100 * clipped / len(above_zero):.0f} % of them were above the clip and scaled down to it."
    series = [norms]
    if at := _places_of(records, "skipped", key):
        series.append(Series("skipped steps", "s1", at, [y.top] * len(at), "dots"))
    levels = [(float(clip), "clip")] if is_clipped else []
    return figure("Gradient norm", series, (label, "norm"), caption, x=x, y=y, levels=levels)


def _places_of(records: LanguageRecords, kind: str, key: str) -> list[float]:
    """Return the positions of events of a kind on an axis of ``key``: each at the first record of its step or later."""
    steps = [event["step"] for event in records.of_kind(kind)]
    if key == "step":
        return steps
    pairs = sorted((one["step"], one["tokens"]) for one in records.train if math.isfinite(one["step"] + one["tokens"]))
    return [pairs[min(bisect_left(pairs, (step, -math.inf)), len(pairs) - 1)][1] for step in steps] if pairs else []


def _balance(records: LanguageRecords) -> list[Figure | None]:
    imbalance = Series.of("imbalance", "s0", records.train, "step", "imbalance")
    delay = Series.of("delay", "s0", records.train, "step", "delay")
    heaviest = mean(records.train, "imbalance", "steps")
    waited = mean(records.train, "delay", "steps")
    y = Axis(padded([1.0, *imbalance.places(LINEAR, LINEAR, thinned=False)[1]], 0.1))
    text = f"Predicted work of the heaviest microbatch over the mean's{known(heaviest, ': {:.3f} on average')}."
    labels, levels = ("step", "heaviest microbatch over mean"), [(1.0, "even")]
    late = f"Iterations that a token waited for its batch, for balance's sake{known(waited, ': {:.2f} on average')}."
    return [
        figure("Imbalance", [imbalance], labels, text, y=y, levels=levels),
        figure("Token delay", [delay], ("step", "iterations"), late),
    ]


def _speed(records: LanguageRecords) -> list[Figure | None]:
    speed = Series.of("tokens a second", "s0", records.train, "step", "tokens_per_second")
    mfu = Series.of("MFU", "s0", records.train, "step", lambda record: 100 * record["mfu"])
    flops = Series.of("FLOP/s", "s0", records.train, "step", "flops_per_second")
    peak = "Share of the devices' peak that useful arithmetic reached."
    return [
        figure("Tokens a second", [speed], ("step", "tokens / s"), "Of all processes together."),
        figure("MFU", [mfu], ("step", "% of peak"), peak)
        or figure("FLOP/s", [flops], ("step", "FLOP/s"), "Useful arithmetic of all processes together."),
    ]


def _times(records: LanguageRecords) -> dict[str, Any]:
    """Return the parts of the time as a bar, as rows of a table, and in sentences."""
    train = [record for record in records.train if math.isfinite(record["seconds"])]
    stepping = total(train, "seconds")
    if not stepping > 0:
        return {}
    exposed, waiting = total(train, "exposed_seconds"), total(train, "data_seconds")
    beside = [value for value in (exposed, waiting) if math.isfinite(value)]
    parts = [
        ("Computing", max(0.0, stepping - sum(beside)), "and all else in a step"),
        ("Exposed communication", exposed, "waiting for other ranks with nothing to compute"),
        ("Waiting for data", waiting, ""),
        ("Checkpoints", total(records.of_kind("checkpoint"), "seconds"), "while training stood still"),
        ("Validation", records.validating, ""),
    ]
    shown = [(f"f{number}", *part) for number, part in enumerate(parts) if math.isfinite(part[1])]
    everything = math.fsum(seconds for _, _, seconds, _ in shown)
    rows = [
        (style, name, meaning, duration(seconds), f"{100 * seconds / everything:.1f} %")
        for style, name, seconds, meaning in shown
    ]
    label = " ".join(["Where the time goes.", *(f"{name}: {share}." for _, name, _, _, share in rows)])
    told = ["Communication and waiting are of the slowest rank."]
    communication = total(train, "communication_seconds")
    if communication > 0 and math.isfinite(exposed):
        told.append(
            f"Communication took {duration(communication)} in all, of which "
            f"{100 * max(0.0, 1 - exposed / communication):.0f} % was hidden behind computing."
        )
    if sum(beside) > stepping:
        told.append("They overlap, so that the parts come to more than the time of all steps.")
    bar = stacked_bar(label, [(style, seconds) for style, _, seconds, _ in shown])
    return {"bar": bar, "rows": rows, "text": " ".join(told)}


def _memory(records: LanguageRecords) -> dict[str, Any]:
    most = max((record["memory_bytes"] for record in records.train if record["memory_bytes"] < math.inf), default=0.0)
    unit, size = ("GiB", 2**30) if most >= 2**30 else ("MiB", 2**20)
    memory = Series.of("memory", "s0", records.train, "step", lambda record: record["memory_bytes"] / size)
    chart = figure("Memory of the largest rank", [memory], ("step", unit), "The rank that held most.")
    if chart is None:
        return {}
    held = [record for record in records.train if math.isfinite(record["memory_bytes"])]
    largest = max(held, key=lambda record: record["memory_bytes"])
    facts = [
        ("Most", f"{_bytes(largest['memory_bytes'])}, first at step {whole(largest['step'])}"),
        ("At the end", _bytes(held[-1]["memory_bytes"])),
    ]
    parameters, mesh = records.parameters, records.mesh
    config = records.model.get("config") or {}
    is_whole = not (config.get("adapter") or config.get("draft"))  # frozen weights have no gradients and moments
    if parameters > 0 and mesh is not None and is_whole:
        # 4 bytes each for weight, gradient and the optimizer's two moments, repeated in replicas
        share = 16 * parameters * mesh.replicate / mesh.world
        facts.append(("Weights, gradients and moments", f"{_bytes(share)} a rank if shared evenly, in 32 bits"))
    return {"chart": chart, "facts": facts}


def _events(records: LanguageRecords, replicas: Goodput | None = None) -> dict[str, Any]:
    """Return rows of what happened: the first ones, later ones, and the number of those left out."""
    faults = [] if replicas is None else [(_step_before(replicas, one.at), one) for one in replicas.faults]
    events: list[tuple[str, Any]] = [*records.events]
    for step, fault in reversed(faults):
        place = next((at for at, (_, one) in enumerate(records.events) if one["step"] > step), len(records.events))
        events.insert(place, ("fault", (step, fault)))
    rows = []
    for kind, group in itertools.groupby(events, key=lambda event: event[0]):
        found = [one for _, one in group]
        rows += [_fault(*one) for one in found] if kind == "fault" else [_event(kind, found)]
    return page.folded(rows, _SHOWN_EVENTS, _MOST_EVENTS)


def _step_before(replicas: Goodput, at: float) -> int:
    """Return the last useful step that ended before a time; 0 if none did."""
    attempts = (one for found in replicas.attempts.values() for one in found)
    return max((one.step for one in attempts if one.is_useful and one.at <= at), default=0)


def _fault(step: int, fault: ReplicaFault) -> tuple[str, str, str]:
    return "Fault", f"{step:,}", f"{fault.replica}: {fault.what}"


def _event(kind: str, found: Sequence[Record]) -> tuple[str, str, str]:
    steps = [whole(record["step"]) for record in found]
    at = ", ".join(steps) if len(steps) <= 6 else f"{steps[0]} to {steps[-1]} ({len(steps):,} of them)"
    details = []
    if kind == "resumed":
        name = "Resumed"
        details += [f"on {whole(one['world'])} processes" for one in found if math.isfinite(one["world"])]
    elif kind == "skipped":
        name = "Skipped"
        for key, text in (("loss", "loss"), ("gradient_norm", "gradient norm")):
            broken = sum(1 for one in found if not math.isfinite(one[key]))
            if broken:
                details.append(f"{text} not finite" + (f" in {broken:,}" if broken < len(found) else ""))
    else:
        name = "Checkpoint" if len(found) == 1 else "Checkpoints"
        seconds, sizes = total(found, "seconds"), [one["bytes"] for one in found if math.isfinite(one["bytes"])]
        if math.isfinite(seconds):
            details.append(f"training stood still for {duration(seconds)}" + (" in all" if len(found) > 1 else ""))
        if sizes:
            details.append(_bytes(max(sizes)) + (" each at most" if len(found) > 1 else ""))
    return name, at, "; ".join(details)


def _bytes(size: float) -> str:
    for limit, unit in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= limit * 999.5 / 1024:  # four digits before the point would become a power of ten
            return f"{size / limit:.3g} {unit}"
    return f"{size:.0f} bytes"
