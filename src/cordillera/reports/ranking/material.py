"""Content of a ranking run's folder for its report, with what a reader should be warned of."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from cordillera.errors import DataError
from cordillera.files import is_there
from cordillera.numbers import fixed
from cordillera.reports.page import part
from cordillera.run import Run, read_object, read_recipe
from cordillera.training.ranking.config import STOP_TITLES, is_lower_better
from cordillera.training.ranking.evaluation import Evaluation, number

METRICS = {"ne": "NE", "auc": "AUC", "calibration": "Calibration", "gauc": "GAUC", "log_loss": "Log loss"}
TOP_K_METRICS = {"ndcg": "NDCG", "recall": "Recall", "mrr": "MRR"}
_NAMES = METRICS | TOP_K_METRICS
_NUMBERS = ("epoch", "loss", "seconds", "examples_per_second", "data_fraction", "exposed_fraction", "sent_bytes")


class Material:
    """Content of the run's folder, read once; missing files are empty.

    Raises:
        DataError: If one of the files cannot be read.
    """

    def __init__(self, run: Run) -> None:
        self.name, self.status = run.folder.resolve().name, run.status()
        self.banner = "" if self.status is None else self.status.warning
        self.recipe_text, self.recipe = read_recipe(run)
        self.model, self.environment = (read_object(run.folder / f"{name}.json") for name in ("model", "environment"))
        self.train: list[dict[str, Any]] = []
        self.evaluations: list[dict[str, Any]] = []
        self.progressive: list[dict[str, Any]] = []
        records = {"train": self.train, "evaluation": self.evaluations, "progressive": self.progressive}
        for line, record in enumerate(run.metrics(), 1):
            kind = record.get("kind")
            if kind == "train" or (kind in ("evaluation", "progressive") and record.get("tasks")):
                records[kind].append(_checked(record, f"{run.folder / 'metrics.jsonl'}, line {line}"))
        path, self.evaluation = run.folder / "evaluation.json", None
        instead = "" if self.best is None else "; figures are of the validation split, without intervals"
        self.age = f"The test split has not been evaluated{instead}."
        if is_there(path):
            self.evaluation = Evaluation.from_object(read_object(path), str(path))
            self.age = self.evaluation.age(self.status, keeps_best="patience" in part(self.recipe, "training"))
        self.warnings = [self.age] if self.age else []
        if not is_there(run.folder / "model.json"):
            self.warnings.append("The run has no model.json, so parameters and FLOPs are not known.")
        self.warnings += _warnings(self)

    @property
    def model_name(self) -> str:
        """Name of the model; empty if unknown."""
        return str(self.model.get("name", part(self.recipe, "model").get("name", "")))

    @property
    def undefined(self) -> dict[str, dict[str, str]]:
        """Reasons for test metrics without a value, by task and metric; data without groups has no GAUC."""
        tasks = self.evaluation.tasks if self.evaluation is not None else {}
        return {
            task: {name: why for name, why in result.undefined.items() if (name, why) != ("gauc", "no groups")}
            for task, result in tasks.items()
        }

    @property
    def metrics_by_task(self) -> dict[str, dict[str, float]]:
        """Metrics of the evaluated split by task; empty without an evaluation."""
        return {} if self.evaluation is None else self.evaluation.metrics()

    @property
    def tasks(self) -> list[str]:
        """Names of the tasks."""
        if self.evaluation is not None:
            return list(self.evaluation.tasks)
        return list(self.evaluations[-1]["tasks"]) if self.evaluations else []

    @property
    def best(self) -> dict[str, Any] | None:
        """The first validation record with the best mean of the metric by which the run keeps its weights."""
        sign = 1 if is_lower_better(self.stop_on) else -1
        scored = [(sign * mean_over_tasks(record, self.stop_on), record) for record in self.evaluations]
        scored = [(value, record) for value, record in scored if math.isfinite(value)]
        return min(scored, key=lambda pair: pair[0])[1] if scored else None

    @property
    def stop_on(self) -> str:
        """Metric by which the run keeps its weights."""
        name = part(self.recipe, "training").get("stop_on")
        return name if isinstance(name, str) and name in STOP_TITLES else "ne"

    @property
    def best_words(self) -> tuple[str, str]:
        """That metric's name, and ``lowest`` or ``highest``, whichever is best."""
        return STOP_TITLES[self.stop_on], "lowest" if is_lower_better(self.stop_on) else "highest"


def interval_text(pair: Sequence[float] | None) -> str:
    """Return an interval as text; empty for None."""
    return f"{fixed(pair[0])} to {fixed(pair[1])}" if pair else ""


def mean_over_tasks(record: Mapping[str, Any], name: str = "ne") -> float:
    """Return the mean of a metric over the tasks of a validation record."""
    values = [task.get(name, math.nan) for task in record["tasks"].values()]
    return sum(values) / len(values)


def share_of_time(train: Sequence[Mapping[str, Any]], key: str = "data_fraction") -> float:
    """Return a share of the whole training time, by default that of waiting for data; NaN if it is not recorded."""
    pairs = [(record[key], record["seconds"]) for record in train]
    pairs = [(share, seconds) for share, seconds in pairs if math.isfinite(share * seconds)]
    total = sum(seconds for _, seconds in pairs)
    return sum(share * seconds for share, seconds in pairs) / total if total > 0 else math.nan


def median_speed(train: Sequence[Mapping[str, Any]]) -> float:
    """Return the median of examples a second of training records, but for the first, which holds the start."""
    rates = [rate for one in train if math.isfinite(rate := one["examples_per_second"])]
    return statistics.median(rates[1:] or rates) if rates else math.nan


def _checked(record: dict[str, Any], where: str) -> dict[str, Any]:
    try:
        step = record.get("step", 0)
        if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < 2**63:
            raise DataError(f"step {str(step)[:40]!r} is no count")
        found = {**record, "step": step} | {key: number(record.get(key)) for key in _NUMBERS}
        for key in ("examples", "end"):  # a record without them is placed at its step
            found[key] = number(record.get(key, step))
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
    broken = sum(1 for record in material.train if not math.isfinite(record["loss"]))
    if broken:
        found.append(f"{broken} of {len(material.train)} records of the training loss are not finite numbers.")
    for task, reasons in material.undefined.items():
        if reasons:
            listing = ", ".join(f"{_NAMES.get(name, name)} ({why})" for name, why in reasons.items())
            found.append(f"Undefined on the test split for task {task}: {listing}.")
    undefined = sum(1 for record in material.evaluations if not math.isfinite(mean_over_tasks(record)))
    if undefined:
        found.append(f"NE was undefined or infinite in {undefined} of {len(material.evaluations)} validations.")
    title, extreme = material.best_words
    best, patience = material.best, part(material.recipe, "training").get("patience")
    if best is not None and isinstance(patience, int) and patience:
        later = sum(1 for record in material.evaluations if record["step"] > best["step"])
        if later >= patience:
            is_early = material.status is None or material.status.ended == "early"
            early = "Training stopped early: " if is_early else ""
            found.append(
                f"{early}{later} validations after step {best['step']:,} brought no better {title}. "
                "The figures are of the weights at that step."
            )
    elif best is not None and best is not material.evaluations[-1]:
        found.append(
            f"The last weights are not the best: validation {title} was {extreme} at step {best['step']:,} "
            f"({mean_over_tasks(best, material.stop_on):.4f}, at the end "
            f"{mean_over_tasks(material.evaluations[-1], material.stop_on):.4f})."
        )
    waiting = share_of_time(material.train)
    if waiting > 0.1:
        share = f"{100 * waiting:.0f} %"
        found.append(f"{share} of the training time went into waiting for data; more than 10 % is worth a look.")
    told = part(material.model, "data", "facts").get("warnings")
    return found + [text for text in (told if isinstance(told, list) else []) if isinstance(text, str)]
