"""Comparison of language runs: their predictions, their cost, and the limits of the comparison."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from cordillera.errors import DataError
from cordillera.numbers import compact, known, whole
from cordillera.reports.ranking.comparison import ComparisonTable
from cordillera.run import Run
from cordillera.training.language.records import LanguageRecords, mean


@dataclass(frozen=True)
class LanguageRow:
    """One run; unknown numbers are NaN.

    Attributes:
        name: Name of the run's folder, or the folder if several have that name.
        loss: Loss of the final evaluation, or of the last one if there is no final one: in nats a token, or in the unit
            of the run's objective.
        is_broken: Whether the loss of that evaluation is not finite.
        difference: Difference of the loss to that of the first run; NaN if the two were evaluated on other tokens.
        tokens: Number of tokens that the model was trained on.
        tokens_per_second: Mean throughput of training, of all processes together.
        mfu: Mean share of the devices' peak FLOP/s that training used.
    """

    name: str
    loss: float
    is_broken: bool
    difference: float
    perplexity: float
    bits_per_byte: float
    tokens: float
    tokens_per_second: float
    mfu: float
    parameters: float
    processes: float


@dataclass(frozen=True, kw_only=True)
class LanguageComparison(ComparisonTable):
    """The result of :func:`compare_language`; ``rows`` are in the given order, differences are to the first."""

    rows: list[LanguageRow]

    def cells(self) -> tuple[list[str], list[list[str]]]:
        """Return the headings and texts of the table, with one line for each run."""
        headings = ["run", "loss", "diff", "perplexity", "bits/byte", "tokens", "tokens/s", "MFU"]
        headings += ["parameters", "processes"]
        lines = [
            [
                row.name,
                "NaN" if row.is_broken else known(row.loss, "{:.4f}"),
                known(round(row.difference, 4) + 0.0, "{:+.4f}"),
                known(row.perplexity, "{:,.4g}"),
                known(row.bits_per_byte, "{:.4f}"),
                compact(row.tokens) if math.isfinite(row.tokens) else "",
                compact(row.tokens_per_second) if math.isfinite(row.tokens_per_second) else "",
                known(100 * row.mfu, "{:.1f} %"),
                whole(row.parameters, ""),
                whole(row.processes, ""),
            ]
            for row in self.rows
        ]
        return headings, lines


def compare_language(runs: Sequence[Run]) -> LanguageComparison:
    """Compare language runs.

    Args:
        runs: At least one run; losses are compared with the first.

    Raises:
        DataError: If no run was given, one was given twice, a file of one does not have the expected content, or
            losses are in several units.
    """
    if not runs:
        raise DataError("no run was given", where="compare")
    seen: set[str] = set()
    for run in runs:
        folder = str(run.folder.resolve())
        if folder in seen:
            raise DataError("was given twice", where=str(run.folder), remedy="give each run once")
        seen.add(folder)
    entries = [LanguageRecords(run) for run in runs]
    names = [entry.name for entry in entries]
    for run, entry in zip(runs, entries, strict=True):
        if names.count(entry.name) > 1:
            entry.name = str(run.folder)
    first, notes, rows = entries[0], [], []
    for run, entry in zip(runs, entries, strict=True):
        if entry.unit_of_loss != first.unit_of_loss:
            raise DataError(
                f"its losses are {_in(entry.unit_of_loss)}, those of {first.name} are {_in(first.unit_of_loss)}",
                where=str(run.folder),
                remedy="compare runs whose losses are in one unit",
            )
        problem = _other_tokens(first, entry)
        if entry.warning:
            notes.append(f"{entry.name}: {entry.warning}")
        if entry.headline is not None and not math.isfinite(entry.headline[1]["loss"]):
            notes.append(f"{entry.name}: the loss of its evaluation is NaN or infinite; the model is of no use.")
        if entry.headline is None:
            notes.append(f"{entry.name} has not been evaluated.")
        elif problem:
            notes.append(f"{entry.name} has no difference: its evaluation is {problem} that of {first.name}.")
        rows.append(_row(first, entry, is_same=entry is not first and problem is None))
    if len(entries) > 1:
        notes.append(
            f"Losses are {_in(first.unit_of_loss)}; differences are to {first.name}, and a negative one is better. "
            "One run a row gives no interval: other seeds show what chance does."
        )
    return LanguageComparison(rows=rows, notes=notes)


def _in(unit: str) -> str:
    return unit if unit.startswith("of ") else f"in {unit}"


def _other_tokens(first: LanguageRecords, entry: LanguageRecords) -> str | None:
    """Return why the losses of two runs are not comparable; None if they are, or if one is missing."""
    if first.headline is None or entry.headline is None:
        return None
    (split, mine), (other, theirs) = entry.headline, first.headline
    if split != other:
        return f"of the split {split}, unlike"
    if mine["targets"] != theirs["targets"]:
        return "of other tokens than"
    vocabularies = [(one.model.get("config") or {}).get("vocabulary") for one in (first, entry)]
    return "over another vocabulary than" if vocabularies[0] != vocabularies[1] else None


def _row(first: LanguageRecords, entry: LanguageRecords, *, is_same: bool) -> LanguageRow:
    found = entry.headline[1] if entry.headline is not None else {}
    loss = found.get("loss", math.nan)
    return LanguageRow(
        name=entry.name,
        loss=loss,
        is_broken=bool(found) and not math.isfinite(loss),
        difference=loss - first.headline[1]["loss"] if is_same and first.headline is not None else math.nan,
        perplexity=found.get("perplexity", math.nan),
        bits_per_byte=found.get("bits_per_byte", math.nan),
        tokens=entry.reached("tokens"),
        tokens_per_second=mean(entry.train, "tokens_per_second", "seconds"),
        mfu=mean(entry.train, "mfu", "seconds"),
        parameters=entry.parameters,
        processes=entry.size("world"),
    )
