"""Report of a ranking run: a self-contained HTML page for the screen (light and dark) and for paper."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from cordillera.errors import DataError
from cordillera.numbers import compact
from cordillera.reports import page as report_page
from cordillera.reports.charts import Chart, nice_ticks, padded
from cordillera.reports.page import (
    banner,
    count,
    definitions,
    duration,
    figure,
    framed,
    notes,
    page,
    part,
    plain,
    reproduction,
    thin,
    tile,
)
from cordillera.reports.ranking.material import Material, interval_text, mean_ne
from cordillera.reports.ranking.scores import scores_section, segments_section
from cordillera.run import Run, read_object, read_recipe
from cordillera.training.ranking.evaluation import Evaluation, TaskEvaluation, number

_MEANINGS = {
    "ne": "1 is the constant base rate; lower is better",
    "auc": "0.5 is chance; higher is better",
    "calibration": "sum of predictions over sum of labels; 1 is unbiased",
}
_NAMES = {"ne": "NE", "auc": "AUC", "gauc": "GAUC", "log_loss": "Log loss", "calibration": "Calibration"}


def write_report(run: Run) -> Path:
    """Write ``report.html`` into a run's folder, and return its path.

    The report reads ``recipe.toml``, ``metrics.jsonl``, ``evaluation.json``, ``model.json`` and ``environment.json``;
    missing content is left out and named. The page has no scripts and loads nothing, and every string from a file is
    escaped.

    Raises:
        DataError: If one of the files cannot be read.
    """
    return report_page.write(run, render(run))


def render(run: Run) -> str:
    """Return the report of a run as HTML text; see :func:`write_report`."""
    material = _read(run)
    sections = [banner(run), _results(material), notes(material.warnings), _learning(material)]
    sections.append(_progressive(material))
    if material.evaluation is not None:
        sections += [scores_section(material, material.evaluation), segments_section(material.evaluation)]
    sections += [_throughput(material), _model_card(material), reproduction(material.recipe_text)]
    model = material.model.get("name", part(material.recipe, "model").get("name", "model"))
    data = part(material.recipe, "data").get("dataset") or "own data"
    description = material.recipe.get("description") or ""
    lede = f"{_title(str(model))} on {data}" + (f". {description}" if description else "")
    return page(material.name, lede, sections)


# Reading


def _read(run: Run) -> Material:
    recipe_text, recipe = read_recipe(run)
    warnings: list[str] = []
    records: dict[str, list[dict[str, Any]]] = {"train": [], "evaluation": [], "progressive": []}
    for line, record in enumerate(run.metrics(), 1):
        kind = record.get("kind")
        if kind == "train" or (kind in ("evaluation", "progressive") and record.get("tasks")):
            records[kind].append(_checked(record, f"{run.folder / 'metrics.jsonl'}, line {line}"))
    evaluation = None
    if (path := run.folder / "evaluation.json").exists():
        evaluation = Evaluation.from_object(read_object(path), str(path))
        age = evaluation.age(run.status(), keeps_best="patience" in part(recipe, "training"))
        warnings += [age] if age else []
    else:
        warnings.append(
            "The test split has not been evaluated; figures are of the validation split, without intervals."
        )
    if not (run.folder / "model.json").exists():
        warnings.append("The run has no model.json, so parameters and FLOPs are not known.")
    material = Material(
        name=run.folder.resolve().name,
        recipe_text=recipe_text,
        recipe=recipe,
        train=records["train"],
        evaluations=records["evaluation"],
        progressive=records["progressive"],
        evaluation=evaluation,
        model=read_object(run.folder / "model.json"),
        environment=read_object(run.folder / "environment.json"),
        status=run.status(),
        warnings=warnings,
    )
    warnings += _warnings(material)
    return material


_NUMBERS = ("epoch", "examples", "loss", "seconds", "examples_per_second", "data_fraction", "end")


def _checked(record: dict[str, Any], where: str) -> dict[str, Any]:
    try:
        step = record.get("step", 0)
        if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < 2**63:
            raise DataError(f"step {str(step)[:40]!r} is no count")
        found = {**record, "step": step} | {key: number(record[key]) for key in _NUMBERS if key in record}
        if "tasks" in record:
            found["tasks"] = {
                task: {name: number(value) for name, value in values.items()}
                for task, values in record["tasks"].items()
            }
        return found
    except (DataError, AttributeError) as error:
        what = error.what if isinstance(error, DataError) else "tasks are no objects"
        raise DataError(
            f"is not a record of training: {what}", where=where, remedy="restore the file or delete that line"
        ) from error


def _warnings(material: Material) -> list[str]:
    found = []
    broken = sum(1 for record in material.train if not math.isfinite(number(record.get("loss"))))
    if broken:
        found.append(f"{broken} of {len(material.train)} records of the training loss are not finite numbers.")
    if material.evaluation is not None:
        for task, result in material.evaluation.tasks.items():
            # Data without groups has no GAUC by design; that is not worth a warning.
            reasons = {name: why for name, why in result.undefined.items() if (name, why) != ("gauc", "no groups")}
            if reasons:
                listing = ", ".join(f"{_NAMES.get(name, name)} ({why})" for name, why in reasons.items())
                found.append(f"Undefined on the test split for task {task}: {listing}.")
    undefined = sum(1 for record in material.evaluations if not math.isfinite(mean_ne(record)))
    if undefined:
        found.append(f"NE was undefined or infinite in {undefined} of {len(material.evaluations)} validations.")
    best, patience = material.best, part(material.recipe, "training").get("patience")
    if best is not None and isinstance(patience, int) and patience:
        later = sum(1 for record in material.evaluations if record["step"] > best["step"])
        if later >= patience:
            found.append(
                f"Training stopped early: {later} validations after step {best['step']:,} brought no better NE. "
                "The figures are of the weights at that step."
            )
    elif best is not None and best is not material.evaluations[-1]:
        found.append(
            f"The last weights are not the best: validation NE was lowest at step {best['step']:,} "
            f"({mean_ne(best):.4f}, at the end {mean_ne(material.evaluations[-1]):.4f})."
        )
    waiting = _data_fraction(material.train)
    if waiting > 0.1:
        share = f"{100 * waiting:.0f} %"
        found.append(f"{share} of the training time went into waiting for data; more than 10 % is worth a look.")
    told = part(material.model, "data", "facts").get("warnings")
    return found + [text for text in (told if isinstance(told, list) else []) if isinstance(text, str)]


# Small pieces


def _title(text: str) -> str:
    return {"lr": "Logistic regression", "fm": "Factorisation machine", "dnn": "DNN", "dlrm": "DLRM", "dcn": "DCN-V2",
            "dhen": "DHEN", "wukong": "Wukong"}.get(text, text)  # fmt: skip


def _examples(record: Mapping[str, Any]) -> float:
    return number(record.get("examples", record.get("step")))


def _data_fraction(train: Sequence[Mapping[str, Any]]) -> float:
    seconds = [number(record.get("seconds")) for record in train]
    waiting = [number(record.get("data_fraction")) * span for record, span in zip(train, seconds, strict=True)]
    pairs = [(wait, span) for wait, span in zip(waiting, seconds, strict=True) if math.isfinite(wait)]
    total = sum(span for _, span in pairs)
    return sum(wait for wait, _ in pairs) / total if total > 0 else math.nan


# Sections


def _results(material: Material) -> str:
    level = 0.95
    if material.evaluation is not None:
        tasks = material.evaluation.tasks
        level, unit = material.evaluation.level, material.evaluation.unit
        basis = (
            f"{material.evaluation.examples:,} examples of the {material.evaluation.split} split. "
            f"Intervals: {100 * level:g} %, "
            + (
                "groups are taken as independent, samples of one group are not."
                if unit == "group"
                else "samples are taken as independent."
            )
        )
    elif material.best is not None:
        tasks = {
            task: TaskEvaluation({name: number(value) for name, value in metrics.items()})
            for task, metrics in material.best["tasks"].items()
        }
        basis = f"Validation split, best step {material.best['step']:,}."
    else:
        return "<section><h2>Results</h2><p>Nothing has been evaluated yet.</p></section>"
    if len(tasks) == 1:
        body = _tiles(next(iter(tasks.values())), next(iter(tasks)), level)
    else:
        body = _task_table(tasks)
    return f'<section aria-label="Results">{body}<p class="soft small">{escape(basis)}</p></section>'


def _tiles(result: TaskEvaluation, task: str, level: float) -> str:
    tiles = []
    for name in ("ne", "auc", "calibration"):
        pair = result.intervals.get(name)
        bounds = f"{100 * level:g} %: {interval_text(pair)}" if pair else "no interval"
        tiles.append(tile(_NAMES[name], figure(result.metrics.get(name, math.nan)), bounds, _MEANINGS[name]))
    more = [f"log loss {figure(result.metrics.get('log_loss', math.nan))}"]
    if not math.isnan(result.metrics.get("gauc", math.nan)):
        excluded = int(result.metrics.get("gauc_excluded_groups", 0))
        kept = int(result.metrics.get("gauc_groups", 0))
        pair = result.intervals.get("gauc")
        more.append(
            f"GAUC {figure(result.metrics['gauc'])}{f' ({interval_text(pair)})' if pair else ''} over {kept:,} groups, "
            f"{excluded:,} with one class left out"
        )
    rate = result.metrics.get("base_rate", math.nan)
    more.append(f"base rate {figure(rate)}")
    return f'<div class="tiles">{"".join(tiles)}</div><p>Task {escape(task)}: {escape("; ".join(more))}.</p>'


def _task_table(tasks: Mapping[str, TaskEvaluation]) -> str:
    rows = []
    for task, result in tasks.items():
        cells = []
        for name in ("ne", "auc", "calibration", "gauc", "log_loss"):
            if name == "gauc" and not _any_defined(tasks, "gauc"):
                continue
            bounds = interval_text(result.intervals.get(name))
            shown = f'<br><span class="range">{bounds}</span>' if bounds else ""
            cells.append(f"<td>{figure(result.metrics.get(name, math.nan))}{shown}</td>")
        rate = figure(result.metrics.get("base_rate", math.nan))
        rows.append(f'<tr><th scope="row">{escape(task)}</th>{"".join(cells)}<td>{rate}</td></tr>')
    names = [n for n in ("ne", "auc", "calibration", "gauc", "log_loss") if n != "gauc" or _any_defined(tasks, "gauc")]
    head = "".join(f'<th scope="col">{_NAMES[name]}</th>' for name in names)
    meaning = "NE: 1 is the constant base rate, lower is better. Calibration: predictions over labels, 1 is unbiased."
    return (
        f'<h2>Results</h2><p class="soft">{meaning}</p><div class="scroll" tabindex="0"><table>'
        f'<thead><tr><th scope="col">Task</th>{head}<th scope="col">Base rate</th></tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _any_defined(tasks: Mapping[str, TaskEvaluation], name: str) -> bool:
    return any(not math.isnan(result.metrics.get(name, math.nan)) for result in tasks.values())


def _learning(material: Material) -> str:
    charts = []
    end = max([_examples(record) for record in (*material.train, *material.evaluations)], default=math.nan)
    if not math.isfinite(end) or end <= 0:
        return ""
    span = (0.0, end)
    if material.train:
        xs, ys, size = thin(
            [_examples(record) for record in material.train], [number(record.get("loss")) for record in material.train]
        )
        (low, high), cut = framed(ys)
        finite = sorted(value for value in ys if math.isfinite(value))
        chart = Chart(
            "Training loss",
            f"Between {figure(finite[0])} and {figure(finite[-1])} over {compact(end)} examples."
            if finite
            else "No finite values.",
            span,
            (low, high),
            x_label="training examples",
            y_label="loss (nats)",
        )
        chart.line(xs, ys)
        caption = "Mean of the batches since the last record" if size == 1 else f"Mean of {size} records a point"
        charts.append(
            material.pictures.draw(
                "Training loss",
                chart,
                caption + ("; early values leave the frame." if cut else "."),
            )
        )
    best = material.best
    averaged = ", averaged over tasks" if len(material.tasks) > 1 else ""
    bayes = _bayes(material, "validation")
    for task in material.tasks:
        points = [
            (_examples(record), number(record["tasks"][task].get("ne")), record)
            for record in material.evaluations
            if task in record["tasks"]
        ]
        if not points:
            continue
        heading = "Validation NE" if len(material.tasks) == 1 else f"Validation NE: {task}"
        values = [ne for _, ne, _ in points]
        marked = next(((at, ne) for at, ne, record in points if record is best), None)
        text = f"At step {best['step']:,}: {figure(marked[1])}." if best and marked else "No step has a defined NE."
        range_ = padded([*values, bayes], 0.2)
        chart = Chart(heading, text, span, range_, x_label="training examples", y_label="NE")
        chart.rule(y=1.0, text="base rate")
        chart.rule(y=bayes, text="Bayes-optimal")
        chart.line([at for at, _, _ in points], values, "s1")
        chart.dots([at for at, _, _ in points], values, "s1", 2.5 if len(points) <= 60 else 1.2)
        if best and marked and math.isfinite(marked[1]):
            chart.mark(*marked, f"{'best mean: ' if averaged else 'best '}{marked[1]:.4f}")
        charts.append(material.pictures.draw(heading, chart, f"Ring: the step with the lowest NE{averaged}. {text}"))
    return f'<section><h2>Learning curves</h2><div class="charts">{"".join(charts)}</div></section>'


def _bayes(material: Material, split: str) -> float:
    """Return the NE of the true probabilities for synthetic data with one task; else NaN."""
    known = part(material.model, "data", "facts", "bayes_ne_by_split")
    return number(known.get(split)) if len(material.tasks) == 1 else math.nan


def _progressive(material: Material) -> str:
    if not material.progressive:
        return ""
    charts = []
    for task in material.progressive[-1]["tasks"]:
        xs = [number(record.get("end", record.get("step"))) for record in material.progressive]
        ys = [number(record["tasks"].get(task, {}).get("ne")) for record in material.progressive]
        chart = Chart(
            f"Progressive NE: {task}",
            f"{len(xs)} windows, the last at {figure(ys[-1])}.",
            (0.0, max([*(x for x in xs if math.isfinite(x)), 1.0])),
            padded(ys, 0.12),
            x_label="examples of the stream",
            y_label="NE",
        )
        chart.rule(y=1.0, text="base rate")
        chart.line(xs, ys, "s1")
        charts.append(material.pictures.draw(task, chart, "NE of each window, predicted before training on it."))
    return f'<section><h2>Predict, then train</h2><div class="charts">{"".join(charts)}</div></section>'


def _throughput(material: Material) -> str:
    records = [record for record in material.train if math.isfinite(number(record.get("examples_per_second")))]
    if not records:
        return ""
    xs, rates, _ = thin([_examples(r) for r in records], [number(r["examples_per_second"]) for r in records])
    end = max(xs)
    seconds = sum(number(record.get("seconds")) for record in records)
    validating = sum(number(record.get("seconds")) for record in material.evaluations)
    middle = sorted(number(record["examples_per_second"]) for record in records)[len(records) // 2]
    waiting = _data_fraction(records)
    speed = Chart(
        "Training throughput",
        f"Median {compact(middle)} examples per second.",
        (0.0, end),
        (0.0, 1.1 * max(rates)),
        x_label="training examples",
        y_label="examples per second",
        y_ticks=[(tick, compact(tick)) for tick in nice_ticks(0.0, 1.1 * max(rates))],
        height=230,
    )
    speed.line(xs, rates)
    charts = [
        material.pictures.draw(
            "Throughput",
            speed,
            f"Median {compact(middle)} examples per second, {len(records):,} records.",
        )
    ]
    if math.isfinite(waiting):
        _, shares, _ = thin([_examples(r) for r in records], [100 * number(r.get("data_fraction")) for r in records])
        top = max([10.5, *(1.15 * share for share in shares if math.isfinite(share))])
        loading = Chart(
            "Time spent waiting for data",
            f"{100 * waiting:.1f} % of the training time.",
            (0.0, end),
            (0.0, top),
            x_label="training examples",
            y_label="% of step time",
            height=230,
        )
        loading.rule(y=10.0, text="10 %")
        loading.line(xs, shares, "s1")
        charts.append(
            material.pictures.draw("Waiting for data", loading, f"{100 * waiting:.1f} % of the training time in all.")
        )
    times = [f"{duration(seconds)} of training"]
    if material.evaluations and math.isfinite(validating):
        times.append(f"{duration(validating)} of validation")
    if material.evaluation is not None and math.isfinite(material.evaluation.examples_per_second):
        times.append(
            f"the test split was scored at {compact(material.evaluation.examples_per_second)} examples a second"
        )
    text = escape("; ".join(times))
    return f'<section><h2>Throughput</h2><p>{text}.</p><div class="charts">{"".join(charts)}</div></section>'


def _model_card(material: Material) -> str:
    model, recipe = material.model, material.recipe
    data, training = part(recipe, "data"), part(recipe, "training")
    described, facts = part(model, "data"), part(model, "data", "facts")
    architecture = [("Model", _title(str(model.get("name", part(recipe, "model").get("name", "")))))]
    config = part(model, "config") or part(recipe, "model")
    for key, text in (("parameters", "Dense parameters"), ("embedding_parameters", "Embedding parameters")):
        architecture.append((text, count(model.get(key))))
    for key, text in (
        ("forward_macs", "Forward MACs an example"),
        ("forward_flops", "Forward FLOPs an example"),
        ("training_flops", "Training FLOPs an example"),
    ):
        architecture.append((text, count(model.get(key))))
    tables = part(model, "tables")
    if tables:
        rows = sum(value for value in tables.values() if isinstance(value, int))
        architecture.append(("Embedding tables", f"{len(tables)} with {rows:,} rows"))
    architecture += [(key, plain(value)) for key, value in config.items() if key != "name"]
    origin = [
        ("Data set", str(facts.get("name") or data.get("dataset") or plain(data.get("path")))),
        ("Source", plain(facts.get("source"))),
        ("Terms", plain(facts.get("terms") or facts.get("licence"))),
        ("Split", plain(facts.get("split") or data.get("split"))),
        ("Examples", plain(described.get("examples"))),
        ("Positive rate", _rates(facts.get("positives"))),
        ("Unseen ids in test", _unseen(facts.get("unseen"))),
        ("Bayes-optimal NE", plain(facts.get("bayes_ne"))),
        ("Fingerprint", plain(described.get("fingerprint"))),
        ("Tasks", plain(model.get("tasks"))),
        ("Dense features", plain(model.get("dense_features"))),
        ("Sparse features", plain(model.get("sparse_features"))),
    ]
    versions = material.environment.get("libraries")
    machine = [
        ("Seed", plain(recipe.get("seed"))),
        ("Precision", plain(training.get("precision"))),
        *((f"Emulated {key.replace('_', ' ')}", plain(value)) for key, value in part(training, "emulate").items()),
        ("Batch size", count(data.get("batch_size"))),
        (
            "Tables' optimizer",
            plain(part(recipe, "tables").get("optimizer") or part(recipe, "tables").get("name")),
        ),
        ("Steps", _steps(material)),
        ("Processor", plain(material.environment.get("processor"))),
        ("Cores", plain(material.environment.get("cores"))),
        ("Platform", plain(material.environment.get("platform"))),
        ("Python", plain(material.environment.get("python"))),
        ("Libraries", plain(versions)),
    ]
    return (
        f'<section><h2>Model card</h2><div class="card"><div><h3>Architecture</h3>{definitions(architecture)}</div>'
        f"<div><h3>Data</h3>{definitions(origin)}</div><div><h3>Training and machine</h3>{definitions(machine)}</div>"
        "</div></section>"
    )


def _steps(material: Material) -> str:
    """Return the number of steps taken, with the total if training is not complete."""
    done = max([record["step"] for record in (*material.train, *material.evaluations)], default=0)
    if material.status is None:
        return f"{done:,}" if done else ""
    done, steps = material.status.step, material.status.steps
    return f"{done:,}" if done == steps else f"{done:,} of {steps:,}"


def _unseen(unseen: Any) -> str:
    """Return the features with a noticeable share of test values outside the vocabulary."""
    test = unseen.get("test") if isinstance(unseen, dict) else None
    if not isinstance(test, dict):
        return ""
    shares = {name: share for name, share in test.items() if isinstance(share, float) and share >= 0.001}
    return ", ".join(f"{name} {100 * share:.1f}\u00a0%" for name, share in shares.items()) or "none"


def _rates(positives: Any) -> str:
    if not isinstance(positives, dict):
        return plain(positives)
    return "; ".join(
        f"{split} "
        + (
            ", ".join(
                f"{task} {rate:.4g}" if isinstance(rate, float) else f"{task} {rate}" for task, rate in rates.items()
            )
            if isinstance(rates, dict)
            else plain(rates)
        )
        for split, rates in positives.items()
    )
