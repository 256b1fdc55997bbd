"""Comparison of runs, with confidence intervals from repetitions with other seeds.

Runs whose recipes differ only in seed and name form one group, a row of the table. Groups are compared with the first
one by pairing runs of equal seed (same initial weights if shapes agree, same order of samples), because the common
noise cancels in the difference. One seed gives a difference without an interval over seeds; if the scores of the same
samples are known, every difference has an interval over these samples.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

import scipy
from rich.console import Group
from rich.padding import Padding
from rich.table import Table

from cordillera.errors import DataError
from cordillera.reports.page import part
from cordillera.reports.ranking.material import TOP_K_METRICS, Material, median_speed
from cordillera.run import Run
from cordillera.training.ranking.config import STOP_TITLES
from cordillera.training.ranking.evaluation import Evaluation, jsonable
from cordillera.training.ranking.paired_change import PairedDifference, SampleUnit, ScoredSamples, paired_differences

METRICS = ("ne", "auc", "log_loss", "calibration", "gauc", *TOP_K_METRICS)
_NAMED = ("run", "task")
_SIZES = ("parameters", "embedding_parameters", "training_flops")
_SAMPLED = {"relative_ne": (2, " %"), "auc": (4, ""), "calibration": (4, "")}  # digits and unit of their columns
_NOT_IDENTITY = ("seed", "name", "description", "device", "threads", "track")


@dataclass(frozen=True)
class SeedMean:
    """A mean over seeds.

    Attributes:
        value: The mean; NaN if a run does not define the metric.
        low: Lower bound of Student's interval of the mean; NaN with fewer than two seeds.
        high: Upper bound of the interval.
        count: Number of seeds.
    """

    value: float
    low: float = math.nan
    high: float = math.nan
    count: int = 0

    @property
    def excludes_zero(self) -> bool:
        """Whether there is an interval and zero is outside it."""
        return self.low > 0 or self.high < 0


@dataclass(frozen=True)
class Row:
    """Runs of one recipe with several seeds.

    Attributes:
        name: Folder name of the first run.
        model: Name of the model.
        runs: Folder names of the runs.
        seeds: Seeds, in the order of ``runs``.
        metrics: Means over seeds, by task and metric.
        differences: Differences to the first row, by task: ``relative_ne`` (percent, negative is better), ``auc``
            and the other metrics, over the seeds that both rows have. Empty in the first row.
        over_samples: Differences to the first row with intervals over the samples, by task: ``relative_ne`` (percent),
            ``auc``, ``log_loss`` and ``calibration``. Empty in the first row, and if the samples' scores are not known.
        parameters: Number of parameters outside the tables; None if unknown.
        embedding_parameters: Number of parameters in the tables.
        training_flops: FLOPs of training for each example.
        examples_per_second: Mean over seeds of the median training throughput; NaN if unknown.
        is_complete: Whether the training of all runs was completed.
    """

    name: str
    model: str
    runs: list[str]
    seeds: list[int]
    metrics: dict[str, dict[str, SeedMean]]
    differences: dict[str, dict[str, SeedMean]] = field(default_factory=dict)
    over_samples: dict[str, dict[str, PairedDifference]] = field(default_factory=dict)
    parameters: int | None = None
    embedding_parameters: int | None = None
    training_flops: int | None = None
    examples_per_second: float = math.nan
    is_complete: bool = True

    def ne_difference(self, task: str) -> PairedDifference | SeedMean | None:
        """Return the relative difference of NE in percent: with its interval over samples, if known, else over seeds.

        It is None in the first row, and if there is no interval.
        """
        over_seeds = self.differences.get(task, {}).get("relative_ne")
        over_seeds = None if over_seeds is None or math.isnan(over_seeds.low) else over_seeds
        return self.over_samples.get(task, {}).get("relative_ne", over_seeds)


@dataclass(frozen=True, kw_only=True)
class ComparisonTable(ABC):
    """Comparison of runs, as JSON and as a table; ``notes`` are caveats for readers of the differences."""

    notes: list[str]

    @abstractmethod
    def cells(self) -> tuple[list[str], list[list[str]]]:
        """Return the headings and texts of the table."""

    def to_json(self) -> str:
        """Return strict JSON; NaN becomes null."""
        return json.dumps(jsonable(asdict(self)), indent=1, allow_nan=False)

    def to_markdown(self) -> str:
        """Return a Markdown table, followed by the notes; names are left-aligned, numbers right-aligned."""
        headings, lines = self.cells()
        rule = ["---" if heading in _NAMED else "---:" for heading in headings]
        table = ["| " + " | ".join(_markdown(cell) for cell in line) + " |" for line in [headings, rule, *lines]]
        return "\n".join([*table, "", *(f"- {_markdown(note)}" for note in self.notes)]) + "\n"

    def to_table(self, width: int = 80) -> Group:
        """Return the table for a terminal of ``width`` characters, followed by the notes.

        Columns that do not fit stand in further tables below, which repeat the names; no cell is cut.
        """
        headings, lines = self.cells()
        cells = [[cell.replace(" [", "\n[") for cell in line] for line in lines]
        columns = [[heading.replace(" ", "\n"), *(line[i] for line in cells)] for i, heading in enumerate(headings)]
        widths = [max(len(part) for cell in column for part in cell.split("\n")) + 2 for column in columns]
        named = [i for i, heading in enumerate(headings) if heading in _NAMED]
        parts: list[list[int]] = []
        for i in range(len(headings)):
            if i in named:
                continue
            if not parts or sum(widths[j] for j in (*named, *parts[-1], i)) > width:
                parts.append([])
            parts[-1].append(i)
        tables = []
        for own in parts:
            table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
            for i in (*named, *own):
                table.add_column(
                    columns[i][0], justify="left" if i in named else "right", overflow="fold", vertical="top"
                )
            for line in cells:
                table.add_row(*(line[i] for i in (*named, *own)))
            tables.append(Padding(table, (0, 0, 1, 0), expand=False))
        return Group(*tables, "\n".join(self.notes))


@dataclass(frozen=True, kw_only=True)
class Comparison(ComparisonTable):
    """The result of :func:`compare`.

    Attributes:
        rows: Rows of the table; the others are compared with the first.
        tasks: Tasks that all runs have.
        level: Confidence level of the intervals.
        unit: What intervals over samples treat as independent: ``sample`` or ``group``; None if there are none.
    """

    rows: list[Row]
    tasks: list[str]
    level: float
    unit: SampleUnit | None = None

    def cells(self) -> tuple[list[str], list[list[str]]]:
        """Return the headings and texts of the table, with one line for each row and task."""
        several = len(self.tasks) > 1
        ranked = [
            name
            for name in TOP_K_METRICS
            if any(math.isfinite(row.metrics[task][name].value) for row in self.rows for task in self.tasks)
        ]
        headings = ["run", *(["task"] if several else []), "seeds", "NE", "AUC", "calibration"]
        sampled = [name for name in _SAMPLED if self.unit is not None]
        seeded = not sampled or any(
            one["relative_ne"].count > 1 for row in self.rows for one in row.differences.values()
        )
        headings += [*(STOP_TITLES[name] for name in ranked), *(["NE diff", "AUC diff"] if seeded else [])]
        headings += [f"{name} diff (samples)" for name in ("NE", "AUC", "calibration")[: len(sampled)]]
        headings += ["dense parameters", "training FLOPs", "examples/s"]
        lines = []
        for row in self.rows:
            for task in self.tasks:
                values, differences = row.metrics[task], row.differences.get(task, {})
                line = [
                    row.name if row.is_complete else f"{row.name} (not finished)",
                    *([task] if several else []),
                    str(len(row.seeds)),
                ]
                line += [_estimate(values[name], 4) for name in ("ne", "auc", "calibration", *ranked)]
                if seeded:
                    line += [
                        _estimate(differences.get("relative_ne"), 2, signed=True, unit=" %"),
                        _estimate(differences.get("auc"), 4, signed=True),
                    ]
                paired = row.over_samples.get(task, {})
                for name in sampled:
                    digits, of_value = _SAMPLED[name]
                    line.append(_estimate(paired.get(name), digits, signed=True, unit=of_value))
                line += ["" if size is None else f"{size:,}" for size in (row.parameters, row.training_flops)]
                line.append("" if math.isnan(row.examples_per_second) else f"{row.examples_per_second:,.0f}")
                lines.append(line)
        return headings, lines


def mean_interval(values: Sequence[float], level: float = 0.95) -> SeedMean:
    """Compute the mean of independent repetitions with Student's interval.

    Args:
        values: One value per repetition.
        level: Confidence level.

    Returns:
        The mean; without an interval if there are fewer than two values, NaN if a value is NaN.
    """
    count = len(values)
    if not count:
        return SeedMean(math.nan)
    mean = math.fsum(values) / count
    if count < 2 or not math.isfinite(mean):
        return SeedMean(mean, count=count)
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1))
    half = float(scipy.stats.t.ppf((1 + level) / 2, count - 1)) * deviation / math.sqrt(count)
    return SeedMean(mean, mean - half, mean + half, count)


def compare(
    runs: Sequence[Run],
    evaluations: Sequence[Evaluation] | None = None,
    *,
    samples: Sequence[ScoredSamples] | None = None,
    level: float = 0.95,
) -> Comparison:
    """Compare finished runs.

    Args:
        runs: At least one run; the others are compared with the group of the first.
        evaluations: Evaluation of each run on the same samples; None for those of their test splits.
        samples: These samples with the scores of each run, for intervals over samples; None if they are not known.
        level: Confidence level of the intervals.

    Raises:
        DataError: If no run was given, a run has no test evaluation, one seed of one recipe was given twice, the runs
            have no task in common, or their test splits differ.
    """
    if not runs:
        raise DataError("no run was given", where="compare")
    none = [None] * len(runs)
    entries = [_Entry(*one) for one in zip(runs, evaluations or none, samples or none, strict=True)]
    names = [entry.name for entry in entries]
    for entry in entries:
        if names.count(entry.name) > 1:
            entry.name = str(entry.folder)
    tasks = [task for task in entries[0].metrics if all(task in entry.metrics for entry in entries)]
    if not tasks:
        listing = "; ".join(", ".join(entry.metrics) for entry in entries)
        raise DataError(f"the runs share no task: {listing}", where="compare")
    _check_same_data(entries)
    groups: dict[str, list[_Entry]] = {}
    for entry in entries:
        # of equal recipes, those whose files have changed between them are no repetitions
        group = groups.setdefault(entry.identity if samples is None else f"{entry.identity} {entry.data}", [])
        twin = next((other for other in group if other.seed == entry.seed), None)
        if twin is not None and samples is not None and twin.folder != entry.folder:  # trained on other data since
            group, twin = groups.setdefault(f"{entry.folder}", []), None
        if twin is not None:
            raise DataError(
                f"has the same recipe and seed ({entry.seed}) as {twin.name}, so it is no repetition",
                where=entry.name,
                remedy="give each run once, and train repetitions with --seed",
            )
        group.append(entry)
    members = list(groups.values())
    notes = [f"Evaluated on {one.split}, {one.examples:,} samples." for one in (evaluations or ())[:1]]
    rows: list[Row] = []
    unit: SampleUnit | None = None
    for group in members:
        differences = {} if group is members[0] else _differences(members[0], group, tasks, level, notes)
        row = _row(group, tasks, differences, level)
        if group is not members[0] and samples is not None:
            over_samples, of_group = _over_samples(members[0], group, tasks, level)
            row, unit = replace(row, over_samples=over_samples), unit or of_group
        rows.append(row)
    result = Comparison(rows=rows, tasks=tasks, level=level, unit=unit, notes=notes)
    notes += _notes(result, members, entries)
    return result


def _notes(result: Comparison, members: Sequence[Sequence[_Entry]], entries: Sequence[_Entry]) -> Iterator[str]:
    """Yield the caveats of a comparison, after the verdicts on its rows."""
    percent, first = f"{100 * result.level:g} %", result.rows[0].name
    yield from verdicts(result)
    for group in members:
        if len(group) > 1:
            yield f"{group[0].name}: mean of {', '.join(one.name for one in group)}."
    for entry in entries:
        yield from (f"{entry.name}: {note}" for note in entry.notes)
    ranked = [one for entry in entries for one in entry.metrics.values() if math.isfinite(_get(one, "ndcg"))]
    if counts := {_get(one, "ranking_k") for one in ranked}:
        named = ", ".join(f"{count:g}" for count in sorted(counts))
        differ = "" if len(counts) == 1 else ", so these are not comparable"
        yield f"NDCG, recall and MRR: of the top {named} of each group by score{differ}."
    if result.unit is not None:
        of_groups = " (groups of them are drawn whole)" if result.unit == "group" else ""
        yield (
            f"diff (samples): differences to {first} with {percent} intervals over samples{of_groups}: how much "
            "they would vary with other samples of the same kind, not with other seeds of training."
        )
    if any(len(group) == 1 for group in members):
        if result.unit is None:
            on_file = "" if entries[0].samples is not None else ", or evaluate the runs on one file (--file FILE),"
            yield (
                "One seed gives no interval: train the same recipe with more seeds (--seed)"
                f"{on_file} before concluding."
            )
        else:
            yield "One seed gives no interval over seeds: train the same recipe with more seeds (--seed) for one."
    if result.unit is None or any(len(group) > 1 for group in members):
        yield (
            f"Brackets{'' if result.unit is None else ' elsewhere'}: {percent} intervals of the mean over seeds "
            f"(Student's t). Differences are to {first}, paired by seed."
        )
    yield "A negative NE difference is better."


def verdicts(result: Comparison) -> Iterator[str]:
    """Yield a sentence for each row and task with an interval over samples: whether it is better than the first."""
    first = result.rows[0].name
    for row in result.rows[1:]:
        for task, differences in row.over_samples.items():
            one = differences.get("relative_ne")
            if one is None:
                yield f"{row.name}: the NE of {task} has no interval over these samples, so nothing is concluded."
                continue
            shown = f"{_estimate(one, 2, signed=True, unit=' %')}, {100 * result.level:g} % interval over samples"
            if one.excludes_zero:
                better = "better" if one.value < 0 else "worse"
                yield f"{row.name} is {better} than {first} by the NE of {task}: {shown}."
            else:
                yield f"{row.name} is neither better nor worse than {first} by the NE of {task}: {shown} includes 0."


class _Entry(Material):
    """Content of a run that is compared."""

    def __init__(self, run: Run, evaluation: Evaluation | None, samples: ScoredSamples | None) -> None:
        super().__init__(run)
        self.samples, self.folder = samples, run.folder.resolve()
        if evaluation is not None:
            self.evaluation, self.age = evaluation, ""  # that of the folder is not compared
        if self.evaluation is None:
            raise DataError(
                "has no evaluation.json", where=str(run.folder), remedy="run `cordillera evaluate` on it first"
            )
        self.metrics = self.evaluation.metrics()
        self.seed = self.recipe.get("seed", 0)
        if not isinstance(self.seed, int):
            raise DataError(f"seed is no number: {str(self.seed)[:40]!r}", where=str(run.recipe_file))
        for size in _SIZES:
            if not isinstance(self.model.get(size), int | None):
                raise DataError(f"{size} is no number", where=str(run.folder / "model.json"), remedy="restore the file")
        same = {key: value for key, value in self.recipe.items() if key not in _NOT_IDENTITY}
        self.identity = json.dumps(same, sort_keys=True, default=str)
        self.data = part(self.model, "data").get("fingerprint")
        self.is_complete = self.status is None or self.status.is_complete
        self.examples_per_second = median_speed(self.train)
        self.notes = [text for text in (self.banner, self.age) if text]
        for task, undefined in self.undefined.items():
            self.notes += [f"{name} of {task} is undefined: {why}." for name, why in undefined.items()]


def _check_same_data(entries: Sequence[_Entry]) -> None:
    first, differ = entries[0], dict[str, str]()
    for entry in entries[1:]:
        for task in (one for one in first.metrics if one in entry.metrics):
            for count in ("examples", "positives", "weight"):
                mine, others = first.metrics[task].get(count), entry.metrics[task].get(count)
                if mine != others:
                    shown = " and ".join("none" if one is None else f"{one:,.10g}" for one in (others, mine))
                    differ.setdefault(entry.name, f"{count} of '{task}' are {shown}")
    if differ:
        also = "" if len(differ) == 1 else f" (and so were {', '.join([*differ][1:])})"
        if first.samples is not None:
            raise DataError(
                f"reads the samples otherwise than {first.name}: {next(iter(differ.values()))}{also}",
                where=next(iter(differ)),
                remedy=f"compare runs of the same labels and weights (data.schema): leave out {', '.join(differ)}",
            )
        raise DataError(
            f"was evaluated on other data than {first.name}: {next(iter(differ.values()))}{also}",
            where=next(iter(differ)),
            remedy="give --file FILE to evaluate all runs on the same samples, or compare runs over one data set and "
            f"split: leave out {', '.join(differ)}",
        )


def _by_seed(base: Sequence[_Entry], group: Sequence[_Entry]) -> list[tuple[_Entry, _Entry]]:
    """Return pairs of a run of ``base`` and one of ``group`` with the same seed."""
    known = {entry.seed: entry for entry in base}
    return [(known[entry.seed], entry) for entry in group if entry.seed in known]


def _over_samples(
    base: Sequence[_Entry], group: Sequence[_Entry], tasks: Sequence[str], level: float
) -> tuple[dict[str, dict[str, PairedDifference]], SampleUnit | None]:
    """Return differences with intervals over samples by task, and their unit; None if no task has any.

    They are of runs paired by seed, or of each with each.
    """
    pairs = _by_seed(base, group) or [(one, other) for one in base for other in group]
    scores = [(other.samples, one.samples) for one, other in pairs if one.samples is not None and other.samples]
    found = {task: paired_differences(scores, task, level) for task in tasks}
    return {task: one for task, (one, _) in found.items()}, next((unit for one, unit in found.values() if one), None)


def _differences(
    base: Sequence[_Entry], group: Sequence[_Entry], tasks: Sequence[str], level: float, notes: list[str]
) -> dict[str, dict[str, SeedMean]]:
    pairs = _by_seed(base, group)
    if not pairs:
        given = "so there is no difference over seeds: pairing needs equal seeds"
        notes.append(f"{group[0].name} and {base[0].name} share no seed, {given}.")
        return {}
    unpaired = len(base) + len(group) - 2 * len(pairs)
    if unpaired:
        notes.append(
            f"{group[0].name}: differences to {base[0].name} are over the seeds that both have "
            f"({', '.join(str(mine.seed) for _, mine in pairs)}), means over all seeds of each."
        )
    result = {}
    for task in tasks:
        found: dict[str, list[float]] = {"relative_ne": []}
        for first, second in pairs:
            mine, theirs = second.metrics[task], first.metrics[task]
            base_ne = _get(theirs, "ne")
            found["relative_ne"].append(100 * (_get(mine, "ne") / base_ne - 1) if base_ne else math.nan)
            for name in METRICS[1:]:
                found.setdefault(name, []).append(_get(mine, name) - _get(theirs, name))
        result[task] = {name: mean_interval(values, level) for name, values in found.items()}
    return result


def _get(metrics: Mapping[str, float], name: str) -> float:
    return metrics.get(name, math.nan)


def _row(
    group: Sequence[_Entry], tasks: Sequence[str], differences: dict[str, dict[str, SeedMean]], level: float
) -> Row:
    card = group[0].model
    return Row(
        is_complete=all(entry.is_complete for entry in group),
        name=group[0].name,
        model=group[0].model_name,
        runs=[entry.name for entry in group],
        seeds=[entry.seed for entry in group],
        metrics={
            task: {name: mean_interval([_get(entry.metrics[task], name) for entry in group], level) for name in METRICS}
            for task in tasks
        },
        differences=differences,
        parameters=card.get("parameters"),
        embedding_parameters=card.get("embedding_parameters"),
        training_flops=card.get("training_flops"),
        examples_per_second=math.fsum(entry.examples_per_second for entry in group) / len(group),
    )


def _estimate(
    estimate: SeedMean | PairedDifference | None, digits: int, *, signed: bool = False, unit: str = ""
) -> str:
    if estimate is None:
        return ""
    if math.isnan(estimate.value):
        return "undefined"
    sign = "+" if signed else ""
    value, low, high = (round(one, digits) + 0.0 for one in (estimate.value, estimate.low, estimate.high))  # no -0.0
    text = f"{value:{sign}.{digits}f}{unit}"
    return text if math.isnan(low) else f"{text} [{low:{sign}.{digits}f}, {high:{sign}.{digits}f}]"


def _markdown(text: str) -> str:
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ") if text != "---:" else text
