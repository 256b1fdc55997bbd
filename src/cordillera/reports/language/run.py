"""Report of a language run: a self-contained HTML page for screens (light and dark) and for paper."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Sequence
from html import escape
from pathlib import Path

from cordillera.numbers import compact
from cordillera.reports import page as report_page
from cordillera.reports.charts import padded, stacked_bar
from cordillera.reports.language.card import card
from cordillera.reports.language.headline import headline
from cordillera.reports.language.warnings import find_warnings
from cordillera.reports.page import (
    Pictures,
    definitions,
    duration,
    figure,
    framed,
    notes,
    page,
    plain,
    reproduction,
    scroll,
    whole,
)
from cordillera.reports.series import Axis, Series, draw
from cordillera.run import Run
from cordillera.training.language.records import LanguageRecords, Record, mean, total

_SHOWN_EVENTS = 12
_MOST_EVENTS = 200
_SHOWN_VALIDATIONS = 8


def write_language_report(run: Run) -> Path:
    """Write ``report.html`` into the folder of a language run.

    The report reads ``recipe.toml``, ``metrics.jsonl``, ``evaluation.json``, ``model.json`` and ``environment.json``;
    missing content is left out and named. The page has no scripts and loads nothing, and every string from a file is
    escaped.

    Args:
        run: The run.

    Returns:
        Path of the report.

    Raises:
        DataError: If one of the files does not have the expected content.
        RunError: If a line of ``metrics.jsonl`` is not JSON, or the report cannot be written.
    """
    return report_page.write(run, render(run))


def render(run: Run) -> str:
    """Return the report of a ``run`` as HTML text; see :func:`write_language_report`."""
    records, pictures = LanguageRecords.read(run), Pictures()
    sections = [
        notes([records.warning] if records.warning else []),
        headline(records),
        notes(find_warnings(records)),
        _learning(records, pictures),
        _balance(records, pictures),
        _speed(records, pictures),
        _memory(records, pictures),
        _events(records),
        card(records),
        _reproduction(records),
    ]
    description = records.recipe.get("description")
    lede = f"{_title(records)}. {description}" if isinstance(description, str) and description else _title(records)
    return page(records.name, lede, sections, "language_report.css")


def _title(records: LanguageRecords) -> str:
    size, world = records.parameters, records.size("world")
    name = str(records.model.get("name") or records.setting("model", "name") or "a language model")
    parts = [name if math.isnan(size) else f"{name} of {compact(size)} parameters"]
    if world >= 1:
        parts.append("on one process" if world == 1 else f"on {world:,.0f} processes")
    return " ".join([parts[0][:1].upper() + parts[0][1:], *parts[1:]])


def _section(heading: str, charts: Sequence[str], before: str = "", after: str = "") -> str:
    drawn = "".join(chart for chart in charts if chart)
    grid = f'<div class="charts">{drawn}</div>' if drawn else ""
    return f"<section><h2>{escape(heading)}</h2>{before}{grid}{after}</section>" if before or grid or after else ""


# Sections


def _learning(records: LanguageRecords, pictures: Pictures) -> str:
    train = records.train
    evaluations = [record for found in records.validations.values() for record in found]
    key = "tokens" if any(record["tokens"] > 0 for record in (*train, *evaluations)) else "step"
    label = "training tokens" if key == "tokens" else "step"
    x = Axis.of_progress(record[key] for record in (*train, *evaluations))
    loss = Series.of("training", "s0", train, key, "loss")
    held_out = [
        Series.of(split, style, found, key, "loss", "both")
        for (split, found), style in zip(records.validations.items(), ("s1", "s2", "s3"), strict=False)
    ]
    limits, is_cut = _frame(loss.places(x, Axis.LINEAR)[1], x)
    validated = [value for one in held_out for value in one.places(x, Axis.LINEAR)[1] if math.isfinite(value)]
    if validated:
        trained = limits if loss.is_drawable else ()
        limits = padded([*trained, *padded(validated)], 0.0)
    caption = "Training: mean over the tokens since the last record" + ("; some leave the frame." if is_cut else ".")
    resumed = _places_of(records, "resumed", key)[-20:]
    places = [(place, "resumed" if len(resumed) <= 3 else "") for place in resumed]
    charts = [
        draw(pictures, "Loss", [loss, *held_out], (label, "nats a token"), caption, x=x, y=Axis(limits), places=places),
        _norms(records, pictures, x, key, label),
    ]
    rates = Series.of("learning rate", "s0", train, key, "learning_rate")
    charts.append(draw(pictures, "Learning rate", [rates], (label, "learning rate"), "At each record.", x=x))
    return _section("Learning", [*charts, _validations(records)])


def _frame(losses: Sequence[float], x: Axis) -> tuple[tuple[float, float], bool]:
    """Return the limits of the axis of losses, and whether some losses leave it.

    On a logarithmic axis, the fall from the first losses fits; then only values above them leave the frame.
    """
    if not x.is_log:
        return framed(losses)
    known = [loss for loss in losses if math.isfinite(loss)]
    kept = [loss for loss in known if loss <= max(known[:3])]
    return padded(kept), len(kept) < len(known)


def _validations(records: LanguageRecords) -> str:
    """Return the newest evaluations as a table, with the best of each split marked."""
    found = [(split, record) for split, all_ in records.validations.items() for record in all_]
    if not found:
        return ""
    best = {
        split: min(losses)
        for split, all_ in records.validations.items()
        if (losses := [one["loss"] for one in all_ if math.isfinite(one["loss"])])
    }
    found.sort(key=lambda pair: pair[1]["step"] if math.isfinite(pair[1]["step"]) else -math.inf)
    rows = []
    for split, record in found[-_SHOWN_VALIDATIONS:]:
        tag = ' <span class="tag">lowest</span>' if record["loss"] == best.get(split) else ""
        cells = [
            compact(record["tokens"]),
            figure(record["loss"]),
            f"{record['perplexity']:,.4g}" if math.isfinite(record["perplexity"]) else "",
            figure(record["bits_per_byte"]) if math.isfinite(record["bits_per_byte"]) else "",
        ]
        name = f"{split}, step {whole(record['step'])}" if len(best) > 1 else whole(record["step"])
        rows.append(
            f'<tr><th scope="row">{escape(name)}{tag}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in cells)}</tr>'
        )
    heads = ("Step", "Tokens", "Loss", "Perplexity", "Bits a byte")
    head = "".join(f'<th scope="col">{one}</th>' for one in heads)
    table = f'<table class="validations"><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table>'
    shown = f"The newest {len(rows):,} of {len(found):,}" if len(rows) < len(found) else f"All {len(found):,}"
    text = f"{shown}. Perplexity is that of a token; bits a byte compare models of other vocabularies."
    return f"<figure><h3>Evaluations</h3>{scroll('Evaluations', table)}<figcaption>{escape(text)}</figcaption></figure>"


def _norms(records: LanguageRecords, pictures: Pictures, x: Axis, key: str, label: str) -> str:
    norms = Series.of("gradient norm", "s0", records.train, key, "gradient_norm")
    known = [value for value in norms.places(x, Axis.LINEAR, thinned=False)[1] if value > 0]
    clip = records.setting("training", "clip")
    is_clipped = isinstance(clip, int | float) and not isinstance(clip, bool) and 0 < clip < math.inf
    held = [*known, float(clip)] if is_clipped else known
    is_wide = bool(known) and max(held) > 30 * min(held)
    y = Axis.log(min(held) / 1.3, max(held) * 1.3) if is_wide else Axis.from_zero(held)
    caption = "Of all gradients together before clipping, at each record."
    if is_clipped and known:
        above = sum(1 for value in known if value > clip)
        caption += f" {100 * above / len(known):.0f} % of them were above the clip and scaled down to it."
    series = [norms]
    if at := _places_of(records, "skipped", key):
        series.append(Series("skipped steps", "s1", at, [y.top] * len(at), "dots"))
    level = (float(clip), "clip") if is_clipped else None
    return draw(pictures, "Gradient norm", series, (label, "norm"), caption, x=x, y=y, level=level)


def _places_of(records: LanguageRecords, kind: str, key: str) -> list[float]:
    """Return the positions of events of a kind on an axis of ``key``: each at the first record of its step or later."""
    steps = [event["step"] for event in records.of_kind(kind)]
    if key == "step":
        return steps
    known = sorted((one["step"], one["tokens"]) for one in records.train if math.isfinite(one["step"] + one["tokens"]))
    return [known[min(bisect_left(known, (step, -math.inf)), len(known) - 1)][1] for step in steps] if known else []


def _balance(records: LanguageRecords, pictures: Pictures) -> str:
    imbalance = Series.of("imbalance", "s0", records.train, "step", "imbalance")
    delay = Series.of("delay", "s0", records.train, "step", "delay")
    heaviest = mean(records.train, lambda record: record["imbalance"], "steps")
    waited = mean(records.train, lambda record: record["delay"], "steps")
    y = Axis(padded([1.0, *imbalance.places(Axis.LINEAR, Axis.LINEAR, thinned=False)[1]], 0.1))
    charts = [
        draw(
            pictures, "Imbalance", [imbalance], ("step", "heaviest microbatch over mean"),
            "Predicted work of the heaviest microbatch over the mean's" + _average(heaviest, 3),
            y=y, level=(1.0, "even"),
        ),
        draw(
            pictures, "Token delay", [delay], ("step", "iterations"),
            "Iterations that a token waited for its batch, for balance's sake" + _average(waited, 2),
        ),
    ]  # fmt: skip
    return _section("Balance of the data", charts)


def _average(value: float, digits: int) -> str:
    return f": {value:.{digits}f} on average." if math.isfinite(value) else "."


def _speed(records: LanguageRecords, pictures: Pictures) -> str:
    speed = Series.of("tokens a second", "s0", records.train, "step", "tokens_per_second")
    mfu = Series.of("MFU", "s0", records.train, "step", lambda record: 100 * record["mfu"])
    flops = Series.of("FLOP/s", "s0", records.train, "step", "flops_per_second")
    charts = [draw(pictures, "Tokens a second", [speed], ("step", "tokens / s"), "Of all processes together.")]
    if mfu.is_drawable:
        text = "Share of the devices' peak that useful arithmetic reached."
        charts.append(draw(pictures, "MFU", [mfu], ("step", "% of peak"), text))
    else:
        text = "Useful arithmetic of all processes together."
        charts.append(draw(pictures, "FLOP/s", [flops], ("step", "FLOP/s"), text))
    return _section("Speed", charts, after=_times(records))


def _times(records: LanguageRecords) -> str:
    train = [record for record in records.train if math.isfinite(record["seconds"])]
    stepping = total(train, "seconds")
    if not stepping > 0:
        return ""
    exposed, waiting = total(train, "exposed_seconds"), total(train, "data_seconds")
    known = [value for value in (exposed, waiting) if math.isfinite(value)]
    rest = max(0.0, stepping - sum(known))
    parts = [
        ("Computing", "s0", rest, "and all else in a step"),
        ("Exposed communication", "s1", exposed, "waiting for other ranks with nothing to compute"),
        ("Waiting for data", "s2", waiting, ""),
        ("Checkpoints", "s3", total(records.of_kind("checkpoint"), "seconds"), "while training stood still"),
        ("Validation", "s4", records.validating, ""),
    ]
    parts = [part for part in parts if math.isfinite(part[2])]
    whole = math.fsum(part[2] for part in parts)
    rows, told = [], []
    for name, style, seconds, meaning in parts:
        percent = f"{100 * seconds / whole:.1f} %"
        told.append(f"{name}: {percent}.")
        explained = f' <span class="range">{escape(meaning)}</span>' if meaning else ""
        rows.append(
            f'<tr><th scope="row"><span class="swatch {style}" aria-hidden="true"></span>{escape(name)}{explained}</th>'
            f"<td>{escape(duration(seconds))}</td><td>{percent}</td></tr>"
        )
    bar = stacked_bar("Where the time goes", " ".join(told), [(style, seconds) for _, style, seconds, _ in parts])
    told = ["Communication and waiting are of the slowest rank."]
    communication = total(train, "communication_seconds")
    if communication > 0 and math.isfinite(exposed):
        hidden = max(0.0, 1 - exposed / communication)
        told.append(
            f"Communication took {duration(communication)} in all, of which {100 * hidden:.0f} % was hidden behind "
            "computing."
        )
    if sum(known) > stepping:
        told.append("They overlap, so that the parts come to more than the time of all steps.")
    head = '<thead><tr><th scope="col">Part</th><th scope="col">Time</th><th scope="col">Share</th></tr></thead>'
    table = f'<table class="times">{head}<tbody>{"".join(rows)}</tbody></table>'
    text = f'<p class="soft small">{escape(" ".join(told))}</p>'
    return f"<h3>Where the time goes</h3>{bar}{scroll('Where the time goes', table)}{text}"


def _memory(records: LanguageRecords, pictures: Pictures) -> str:
    most = max((record["memory_bytes"] for record in records.train if record["memory_bytes"] < math.inf), default=0.0)
    unit, size = ("GiB", 2**30) if most >= 2**30 else ("MiB", 2**20)
    memory = Series.of("memory", "s0", records.train, "step", lambda record: record["memory_bytes"] / size)
    chart = draw(pictures, "Memory of the largest rank", [memory], ("step", unit), "The rank that held most.")
    if not chart:
        return ""
    known = [record for record in records.train if math.isfinite(record["memory_bytes"])]
    largest = max(known, key=lambda record: record["memory_bytes"])
    facts = [
        ("Most", f"{_bytes(largest['memory_bytes'])}, first at step {whole(largest['step'])}"),
        ("At the end", _bytes(known[-1]["memory_bytes"])),
    ]
    parameters, mesh = records.parameters, records.mesh
    if parameters > 0 and mesh is not None:
        # 4 bytes each for weight, gradient and the optimizer's two moments, repeated in replicas
        held = 16 * parameters * mesh.replicate / mesh.world
        facts.append(("Weights, gradients and moments", f"{_bytes(held)} a rank if shared evenly, in 32 bits"))
    return _section("Memory", [chart, f'<div class="facts">{definitions(facts)}</div>'])


def _events(records: LanguageRecords) -> str:
    rows = []
    for kind, group in itertools.groupby(records.events, key=lambda event: event[0]):
        found = [record for _, record in group]
        rows.append(_event(kind, found))
    if not rows:
        return ""
    head = '<thead><tr><th scope="col">What</th><th scope="col">Step</th><th scope="col">Details</th></tr></thead>'

    def table(part: Sequence[str]) -> str:
        return scroll("Events", f'<table class="events">{head}<tbody>{"".join(part)}</tbody></table>')

    text = table(rows[:_SHOWN_EVENTS])
    if rest := rows[_SHOWN_EVENTS:_MOST_EVENTS]:
        text += f"<details><summary>{len(rest):,} later events</summary>{table(rest)}</details>"
    if len(rows) > _MOST_EVENTS:
        text += f'<p class="soft small">{len(rows) - _MOST_EVENTS:,} more stand in metrics.jsonl.</p>'
    return f"<section><h2>Events</h2>{text}</section>"


def _event(kind: str, found: Sequence[Record]) -> str:
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
    return f'<tr><th scope="row">{name}</th><td>{escape(at)}</td><td>{escape("; ".join(details))}</td></tr>'


def _reproduction(records: LanguageRecords) -> str:
    world, environment = records.size("world"), records.environment
    command = "cordillera train recipe.toml" + (f" --nproc {world:.0f}" if world > 1 else "")
    facts = [
        ("Seed", plain(records.recipe.get("seed"))),
        *(
            (name, plain(environment.get(name.lower())))
            for name in ("Processor", "Cores", "Platform", "Python", "Libraries")
        ),
    ]
    about = f'<div class="facts">{definitions(facts)}</div>' if any(text for _, text in facts) else ""
    return reproduction(records.recipe_text, command, about)


def _bytes(size: float) -> str:
    for limit, unit in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= limit:
            return f"{size / limit:.3g} {unit}"
    return f"{size:.0f} bytes"
