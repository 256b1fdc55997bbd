"""Report of a ranking run: a self-contained HTML page for the screen (light and dark) and for paper."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from cordillera.numbers import compact, duration, fixed
from cordillera.reports import page
from cordillera.reports.charts import LINEAR, POINTS, Axis, Figure, Series, figure, framed, padded
from cordillera.reports.page import part
from cordillera.reports.ranking.balance import balance
from cordillera.reports.ranking.importance import importance
from cordillera.reports.ranking.material import (
    METRICS,
    TOP_K_METRICS,
    Material,
    interval_text,
    median_speed,
    share_of_time,
)
from cordillera.reports.ranking.placement import placed_tables
from cordillera.reports.ranking.scores import scores, segments
from cordillera.reports.ranking.teacher import progressive, teacher
from cordillera.run import Run
from cordillera.training.ranking.config import STOP_TITLES
from cordillera.training.ranking.evaluation import TaskEvaluation, number

_MEANINGS = {
    "ne": "normalised entropy: 1 is the constant base rate; lower is better",
    "auc": "0.5 is chance; higher is better",
    "calibration": "sum of predictions over sum of labels; 1 is unbiased",
}
_MODELS = {
    "lr": "Logistic regression", "fm": "Factorisation machine", "dnn": "DNN", "dlrm": "DLRM", "dcn": "DCN-V2",
    "dhen": "DHEN", "wukong": "Wukong", "rankmixer": "RankMixer", "target-attention": "Target attention",
    "hstu": "HSTU", "mmoe": "MMoE", "ple": "PLE", "graph": "Graph of operations",
    "supernet": "Supernet",
}  # fmt: skip


def write_report(run: Run) -> Path:
    """Write ``report.html`` from the files of a run's folder, and return its path; missing content is named.

    Raises:
        DataError: If one of the files cannot be read.
    """
    return page.write(run, render(run))


def render(run: Run) -> str:
    """Return the report of a run as HTML text; see :func:`write_report`."""
    material = Material(run)
    data = part(material.recipe, "data").get("dataset") or "own data"
    description = material.recipe.get("description") or ""
    return page.fill(
        "ranking_run",
        name=material.name,
        lede=f"{_model_name(material) or 'model'} on {data}" + (f". {description}" if description else ""),
        results=_results(material),
        learning=_learning(material),
        balance=balance(material),
        teacher=teacher(material),
        progressive=progressive(material),
        scores=scores(material.evaluation),
        segments=segments(material.evaluation),
        importance=importance(run, None if material.evaluation is None else material.evaluation.step),
        placed=placed_tables(run),
        throughput=_throughput(material),
        material=material,
        model_name=_model_name(material),
        config=part(material.model, "config") or part(material.recipe, "model"),
        facts=part(material.model, "data", "facts"),
        unseen=_unseen(part(material.model, "data", "facts").get("unseen")),
        steps=_steps(material),
    )


def _model_name(material: Material) -> str:
    return _MODELS.get(material.model_name, material.model_name)


# Results


def _results(material: Material) -> dict[str, Any]:
    """Return the figures of the test split, else of the best validation: tiles of one task, or a table of several."""
    evaluation, level = material.evaluation, 0.95
    if evaluation is not None:
        tasks, level = evaluation.tasks, evaluation.level
        independent = "groups are taken as independent, samples of one group are not."
        of = "" if evaluation.step in (None, evaluation.steps) else f", weights of step {evaluation.step:,}"
        basis = (
            f"{evaluation.examples:,} examples of the {evaluation.split} split{of}. Intervals: {100 * level:g} %, "
            + (independent if evaluation.unit == "group" else "samples are taken as independent.")
        )
    elif material.best is not None:
        tasks = {task: TaskEvaluation(metrics) for task, metrics in material.best["tasks"].items()}
        basis = f"Validation split, best step {material.best['step']:,}."
    else:
        return {}
    if len(tasks) == 1:
        ((task, result),) = tasks.items()
        return {
            "basis": basis,
            "tiles": [_tile(result, level, name) for name in _MEANINGS],
            "task": task,
            "more": _more(result),
        }
    ks = [_metric(result, "ranking_k") for result in tasks.values() if "ranking_k" in result.metrics]
    of_groups = {"gauc": METRICS["gauc"]}
    of_groups |= {name: f"{title}@{k:.0f}" for k in ks[:1] for name, title in TOP_K_METRICS.items()}
    names = {
        name: title
        for name, title in (METRICS | of_groups).items()
        if name not in of_groups or any(not math.isnan(_metric(result, name)) for result in tasks.values())
    }
    rows = {
        task: [(fixed(_metric(result, name)), interval_text(result.intervals.get(name))) for name in names]
        + [(fixed(_metric(result, "base_rate")), "")]
        for task, result in tasks.items()
    }
    return {"basis": basis, "heads": ["Task", *names.values(), "Base rate"], "rows": rows}


def _metric(result: TaskEvaluation, name: str) -> float:
    return result.metrics.get(name, math.nan)


def _tile(result: TaskEvaluation, level: float, name: str) -> tuple[str, str, str, str]:
    pair = result.intervals.get(name)
    bounds = f"{100 * level:g} %: {interval_text(pair)}" if pair else "no interval"
    return METRICS[name], fixed(_metric(result, name)), bounds, _MEANINGS[name]


def _more(result: TaskEvaluation) -> str:
    more = [f"log loss {fixed(_metric(result, 'log_loss'))}"]
    if not math.isnan(_metric(result, "gauc")):
        more.append(
            f"GAUC {_with_interval(result, 'gauc')} over {int(result.metrics.get('gauc_groups', 0)):,} groups, "
            f"{int(result.metrics.get('gauc_excluded_groups', 0)):,} with one class left out"
        )
    if not math.isnan(_metric(result, "ndcg")):
        listing = [f"{title} {_with_interval(result, name)}" for name, title in TOP_K_METRICS.items()]
        more.append(
            f"of the top {_metric(result, 'ranking_k'):,.0f} of each group by score {', '.join(listing)} over "
            f"{_metric(result, 'ranking_groups'):,.0f} groups, "
            f"{_metric(result, 'ranking_excluded_groups'):,.0f} without a positive left out"
        )
    return "; ".join([*more, f"base rate {fixed(_metric(result, 'base_rate'))}"])


def _with_interval(result: TaskEvaluation, name: str) -> str:
    pair = result.intervals.get(name)
    return fixed(_metric(result, name)) + (f" ({interval_text(pair)})" if pair else "")


# Charts


def _learning(material: Material) -> list[Figure | None]:
    end = max([record["examples"] for record in (*material.train, *material.evaluations)], default=math.nan)
    if not math.isfinite(end) or end <= 0:
        return []
    x, tasks = Axis((0.0, end)), material.tasks
    loss = Series.of("loss", "s0", material.train, "examples", "loss")
    limits, cut = framed(loss.places(x, LINEAR)[1])
    size = -(-len(loss.xs) // POINTS)
    caption = "Mean of the batches since the last record" if size <= 1 else f"Mean of {size} records a point"
    caption += "; some values leave the frame." if cut else "."
    charts = [figure("Training loss", [loss], ("training examples", "loss (nats)"), caption, x=x, y=Axis(limits))]
    shown = ["ne"] if material.stop_on == "ne" else ["ne", material.stop_on]
    charts += [_validation(material, task, name, x) for task in tasks for name in shown]
    return charts


def _validation(material: Material, task: str, name: str, x: Axis) -> Figure | None:
    """Draw a metric of a task on the validation split while training goes on; a ring marks the best step."""
    best, several, what = material.best, len(material.tasks) > 1, STOP_TITLES[name]
    title, extreme = material.best_words
    averaged = ", averaged over tasks" if several else ""
    # the NE of the true probabilities is known for synthetic data with one task
    known = part(material.model, "data", "facts", "bayes_ne_by_split") if name == "ne" and not several else {}
    bayes = number(known.get("validation"))
    records = [record for record in material.evaluations if task in record["tasks"]]
    values = [record["tasks"][task].get(name, math.nan) for record in records]
    drawn = Series(what, "s1", [record["examples"] for record in records], values, "both")
    marked = best["tasks"].get(task, {}).get(name, math.nan) if best else math.nan
    text = f"At step {best['step']:,}: {fixed(marked)}." if best else f"No step has a defined {title}."
    ring = (
        f"{'at the best mean: ' if several else 'best '}{marked:.4f}" if material.stop_on == name else f"{marked:.4f}"
    )
    ringed = f"Ring: the step with the {extreme} {title}{averaged}. " if len(drawn.points()) > 1 else ""
    return figure(
        f"Validation {what}: {task}" if several else f"Validation {what}",
        [drawn],
        ("training examples", what),
        ringed + text,
        x=x,
        y=Axis(padded([*values, bayes], 0.2)),
        levels=[(1.0, "base rate"), (bayes, "Bayes-optimal")] if name == "ne" else [],
        mark=(best["examples"], marked, ring) if best and math.isfinite(marked) else None,
    )


def _throughput(material: Material) -> dict[str, Any]:
    records = [record for record in material.train if math.isfinite(record["examples_per_second"])]
    if not records:
        return {}
    speed = Series.of("examples a second", "s0", records, "examples", "examples_per_second")
    without = "without the first record" if len(records) > 1 else "of one record"
    text = f"Median {compact(median_speed(records))} examples per second, {without}, which holds the start."
    labels = ("training examples", "examples per second")
    charts = [figure("Throughput", [speed], labels, text, height=230)]
    for title, key in (("Waiting for data", "data_fraction"), ("Waiting for other processes", "exposed_fraction")):
        waiting = share_of_time(records, key)
        if not math.isfinite(waiting):
            continue
        shares = Series("waiting", "s1", [one["examples"] for one in records], [100 * one[key] for one in records])
        top = max([10.5, *(1.15 * share for share in shares.ys if math.isfinite(share))])
        text = f"{100 * waiting:.1f} % of the training time in all."
        labels, levels = ("training examples", "% of step time"), [(10.0, "10 %")]
        charts.append(figure(title, [shares], labels, text, y=Axis((0.0, top)), levels=levels, height=230))
    seconds, validating = (sum(record["seconds"] for record in some) for some in (records, material.evaluations))
    times = [f"{duration(seconds)} of training"]
    sent = sum(record["sent_bytes"] for record in records if math.isfinite(record["sent_bytes"]))
    if sent:
        times.append(f"the first process sent {sent / 1e6:,.1f} MB to others")
    if material.evaluations and math.isfinite(validating):
        times.append(f"{duration(validating)} of validation")
    if material.evaluation is not None and math.isfinite(material.evaluation.examples_per_second):
        times.append(
            f"the test split was scored at {compact(material.evaluation.examples_per_second)} examples a second"
        )
    return {"text": "; ".join(times), "charts": charts}


# Model card


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
