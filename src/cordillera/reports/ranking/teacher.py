"""What a ranking run learnt from a teacher: losses against its scores, and both on the same samples."""

from __future__ import annotations

import math
from typing import Any

from cordillera.numbers import fixed
from cordillera.reports.charts import Axis, Figure, Series, figure, padded
from cordillera.reports.page import part
from cordillera.reports.ranking.material import METRICS, Material
from cordillera.training.ranking.evaluation import number
from cordillera.training.ranking.teachers.distillation import of_teacher

_SHOWN = ("ne", "auc", "calibration")


def teacher(material: Material) -> dict[str, Any]:
    """Return the text, the table and the charts of a teacher; empty if the run had none."""
    config = part(material.recipe, "training", "teacher")
    if config.get("head", "none") == "none":
        return {}
    heads = {"auxiliary": "heads of their own, which are not served", "serving": "the heads that are served"}
    text = f"The teacher's scores were learnt by {heads.get(str(config.get('head')), 'its heads')}."
    rows, evaluation = list[list[str]](), material.evaluation
    for task, metrics in (evaluation.teacher if evaluation is not None else {}).items():
        student = part(material.metrics_by_task, task)
        count = int(number(metrics.get("examples")))
        for who, found, size in (
            ("student", student, f"{number(student.get('examples')):,.0f}"),
            ("teacher", metrics, f"{count:,}"),
        ):
            rows.append([f"{task}, {who}", *(fixed(number(found.get(name))) for name in _SHOWN), size])
    if rows:
        text += " The student's figures are of all samples, the teacher's of those that have its score."
    heads_of_table = ["", *(METRICS[name] for name in _SHOWN), "Samples"]
    records = [record for record in material.train if "teacher_loss" in record]
    charts: list[Figure | None] = []
    for title, key, caption in (
        ("Loss against the teacher", "teacher_loss", "With its factors; samples without a score count with 0."),
        ("Loss of the adapter", "adapter_loss", "Of corrected scores, against labels; others count with 0."),
    ):
        values = [number(record.get(key)) for record in records]
        if not any(math.isfinite(value) and value > 0 for value in values):
            continue
        line = Series("loss", "s1", [record["examples"] for record in records], values)
        labels = ("training examples", "loss (nats)")
        charts.append(figure(title, [line], labels, caption, y=Axis(padded(values, 0.12))))
    return {"text": text, "heads": heads_of_table, "rows": rows, "charts": charts}


def progressive(material: Material) -> list[Figure | None]:
    """Return the charts of predictions made before training on a sample, with those of a teacher beside them."""
    records = material.progressive
    tasks = list(records[-1]["tasks"]) if records else []
    charts = []
    for task in tasks:
        if any(task == of_teacher(other) for other in tasks):
            continue
        xs = [record["end"] for record in records]
        shown = {"student": task, "teacher": of_teacher(task)} if of_teacher(task) in tasks else {"NE": task}
        lines = []
        for place, (name, key) in enumerate(shown.items()):
            ys = [number(record["tasks"].get(key, {}).get("ne")) for record in records]
            lines.append(Series(name, f"s{place + 1}", xs, ys))
        charts.append(
            figure(
                task,
                lines,
                ("examples of the stream", "NE"),
                "NE of each window, predicted before training on it.",
                y=Axis(padded([value for line in lines for value in line.ys], 0.12)),
                levels=[(1.0, "base rate")],
            )
        )
    return charts
