"""The runs of an IsoFLOP study, and their training.

A budget is spent on models of several sizes, each trained on as many tokens as the budget pays for. The sizes lie on
both sides of the expected optimum, so that a parabola through their losses has its minimum between them.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from cordillera.errors import DataError, Interrupted, PlanError, RunError, TrainingError
from cordillera.models.language.llama import LlamaConfig, ffn_width, parameter_count
from cordillera.run import Run, disk_errors, write_atomically
from cordillera.training.scaling.isoflop import FEWEST_SIZES, amount, measure_language, power
from cordillera.training.scaling.isoflop_chart import plot
from cordillera.training.scaling.isoflop_laws import IsoFlopStudy, study

FlopsCounter = Callable[[LlamaConfig, Sequence[int]], float]
"""Function that returns the training FLOPs of documents of given lengths, including attention within them."""

_SHAPES = ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "tied")
# Least ratio of two budgets; the final costs of runs with closer budgets would not differ reliably.
_APART = 1.25
_WIDTH_OF_LAYER = 24
_HEAD = 8  # width of a head
_SPAN = 4.0  # ratio of the largest size to the optimum; less than that of plan_runs, which also counts attention


def ladder(
    base: LlamaConfig, smallest: float, largest: float, count: int, *, allow_gaps: bool = False
) -> list[LlamaConfig]:
    """Return models of one family, evenly spaced by the logarithm of their size.

    A model has about one layer for every 24 of its width, at least one for 48 and at most one for 12; every query head
    has its own keys and values. The size counts all parameters that multiply every token and some norms; an embedding
    counts only if it is also the head. Heads are 8 wide.

    Args:
        base: Vocabulary, context, tied head and rotary positions of all models.
        smallest: Size of the first model, in parameters.
        largest: Size of the last model, in parameters.
        count: Number of models.
        allow_gaps: Whether to leave out sizes that the family lacks. The smallest ones are far apart, because their
            head is most of them.

    Raises:
        PlanError: If the family has no ``count`` sizes between the two, and gaps are not allowed.
    """
    if not 0 < smallest < largest or count < 2:
        raise PlanError(f"{count} sizes from {smallest:g} to {largest:g} parameters are no ladder", where="ladder")
    family = _family(base, largest)
    step = math.log(largest / smallest) / (count - 1)
    rungs: list[LlamaConfig] = []
    for aim in (smallest * math.exp(step * rung) for rung in range(count)):

        def unfit(config: LlamaConfig, aim: float = aim) -> float:
            shape = abs(math.log(config.hidden / config.layers / _WIDTH_OF_LAYER))
            return abs(math.log(_size(config) / aim)) + 0.3 * shape

        near = [config for config in family if abs(math.log(_size(config) / aim)) < step / 2]
        if not near and allow_gaps:
            continue
        if not near:
            raise PlanError(
                f"a model of about {amount(aim)} parameters, in widths of whole heads of {_HEAD}, is not to be had",
                where="ladder",
                remedy="ask for fewer sizes or larger ones, or a smaller vocabulary: its head alone has "
                f"{base.vocabulary:,} parameters for each unit of width",
            )
        rungs.append(min(near, key=unfit))
    return rungs


def _size(config: LlamaConfig) -> int:
    return parameter_count(config) - (0 if config.tied else config.vocabulary * config.hidden)


def _family(base: LlamaConfig, largest: float) -> list[LlamaConfig]:
    """Return all shapes up to about twice the largest size."""
    family: list[LlamaConfig] = []
    smallest_of_width, heads = 0, 0
    while smallest_of_width <= 2 * largest:
        heads += 1
        hidden = heads * _HEAD
        fewest = max(1, math.ceil(hidden / (2 * _WIDTH_OF_LAYER)))
        most = max(1, 2 * hidden // _WIDTH_OF_LAYER)
        shape = {"hidden": hidden, "heads": heads, "kv_heads": heads, "head_dim": None}
        shape |= {"ffn": ffn_width(hidden, multiple_of=16)}
        of_width = [
            LlamaConfig.model_validate(base.model_dump() | shape | {"layers": n}) for n in range(fewest, most + 1)
        ]
        smallest_of_width = _size(of_width[0])
        family += of_width
    return family


def expected_tokens(budget: float, tokens_per_parameter: float = 20.0) -> float:
    """Return the expected optimum of tokens for a ``budget`` of FLOPs: ``D = r N`` and ``C = 6 N D``.

    ``tokens_per_parameter`` is ``r``; 20 is that of Hoffmann et al. 2022. Small vocabularies and small models need
    more; a first study shows how many.
    """
    return math.sqrt(budget * tokens_per_parameter / 6)


def sizes_for(
    base: LlamaConfig,
    budgets: Sequence[float],
    *,
    per_budget: int = 6,
    tokens_per_parameter: float = 20.0,
) -> list[LlamaConfig]:
    """Return a :func:`ladder` of sizes around the expected optimum of every budget; there may be gaps.

    Args:
        base: Vocabulary, context, tied head and rotary positions of all models.
        budgets: FLOPs of each budget.
        per_budget: Approximate number of sizes for each budget.
        tokens_per_parameter: Tokens per parameter at the optimum; see :func:`expected_tokens`.

    Raises:
        PlanError: If a budget is not positive.
    """
    optima = [budget / 6 / expected_tokens(budget, tokens_per_parameter) for budget in _ordered(budgets)]
    smallest, largest = optima[0] / _SPAN, optima[-1] * _SPAN
    count = 1 + math.ceil((per_budget - 1) * math.log(largest / smallest) / (2 * math.log(_SPAN)))
    return ladder(base, smallest, largest, count, allow_gaps=True)


def _ordered(budgets: Sequence[float]) -> list[float]:
    if not budgets or not all(math.isfinite(budget) and budget > 0 for budget in budgets):
        raise PlanError(f"budgets must be numbers of FLOPs above 0, got {list(budgets)}", where="budget")
    return sorted(budgets)


@dataclass(frozen=True)
class PlannedRun:
    """Run of a study in the folder ``name``, which spends ``budget`` FLOPs on ``tokens`` tokens.

    Attributes:
        warmup_steps: Number of the steps with rising rates.
        compute: FLOPs of the whole steps.
    """

    name: str
    budget: float
    model: LlamaConfig
    steps: int
    warmup_steps: int
    tokens: int
    compute: float

    @property
    def overrides(self) -> list[str]:
        """Changes of this run to the recipe."""
        values = {f"model.{key}": getattr(self.model, key) for key in _SHAPES}
        values |= {"training.steps": self.steps, "training.warmup_steps": self.warmup_steps}
        return [f"{key}={json.dumps(value)}" for key, value in values.items()]


def plan_runs(
    budgets: Sequence[float],
    sizes: Sequence[LlamaConfig],
    *,
    training_flops: FlopsCounter,
    lengths: Sequence[int],
    tokens_per_step: int,
    most_tokens: int | None = None,
    tokens_per_parameter: float = 20.0,
    span: float = 6.0,
    fewest_steps: int = 100,
    fewest_sizes: int = FEWEST_SIZES + 1,
    warmup: float = 0.05,
) -> list[PlannedRun]:
    """Choose sizes, tokens and steps for every budget; runs are in ascending order of budget and size.

    Args:
        budgets: FLOPs of each budget.
        sizes: Models to choose from, such as a :func:`ladder` or presets.
        training_flops: Function that counts FLOPs as the training loop does.
        lengths: Lengths in tokens of a sample of the documents, as they are trained on.
        tokens_per_step: Mean number of tokens of an update.
        most_tokens: Number of tokens of the text; None for no bound.
        tokens_per_parameter: Tokens per parameter at the expected optimum; see :func:`expected_tokens`.
        span: Largest ratio of tokens to those of the expected optimum, and of those to tokens.
        fewest_steps: Least number of steps of a run; runs with fewer say little about a size and are not planned.
        fewest_sizes: Least number of sizes of a budget; three determine a parabola, and further ones show its noise.
        warmup: Part of the steps with rising rates.

    Raises:
        PlanError: If budgets are not positive or too close, or a budget has too few sizes, or none on one side of the
            expected optimum.
    """
    ordered = _ordered(budgets)
    for low, high in itertools.pairwise(ordered):
        if high < _APART * low:
            raise PlanError(
                f"{power(low)} and {power(high)} FLOPs lie too close to be told apart",
                where="budget",
                remedy="choose budgets two to four times as large as one another",
            )
    total = sum(lengths)
    if total < 1 or tokens_per_step < 1:
        raise PlanError("there are no tokens to plan with", where="IsoFLOP plan")

    def rate_of(size: LlamaConfig) -> float:
        return training_flops(size, lengths) / total

    rates = sorted(((rate_of(size), size) for size in sizes), key=lambda pair: pair[0])
    planned = []
    for budget in ordered:
        optimum = expected_tokens(budget, tokens_per_parameter)
        runs = []
        refused: dict[_Cause, list[str]] = {"steps": [], "text": []}
        for rate, size in rates:
            steps = round(budget / rate / tokens_per_step)
            tokens = steps * tokens_per_step
            told = f"{parameter_count(size):,} parameters"
            if not optimum / span <= budget / rate <= optimum * span:
                continue
            if steps < fewest_steps:
                refused["steps"].append(f"{told} would train for {steps:,} steps, fewer than {fewest_steps:,}")
            elif most_tokens is not None and tokens > most_tokens:
                refused["text"].append(f"{told} would need {tokens:,} tokens of the text's {most_tokens:,}")
            else:
                name = f"{power(budget)}-{size.layers}x{size.hidden}"
                warmup_steps = round(warmup * steps)
                runs.append(PlannedRun(name, budget, size, steps, warmup_steps, tokens, tokens * rate))
        wanted = _Wanted(budget, optimum / span, optimum, optimum * span, fewest_sizes)
        if (what := _shortage(wanted, runs)) is not None:
            raise _refusal(what, wanted, runs, refused, _possible(sizes[0], wanted, rate_of))
        planned += runs
    return planned


_Cause = Literal["steps", "text"]


class _Wanted(NamedTuple):
    """Budget with the tokens that its sizes may take, the expected optimum between them, and the fewest sizes."""

    budget: float
    low: float
    optimum: float
    high: float
    sizes: int

    @property
    def where(self) -> str:
        return f"budget {power(self.budget)}"

    @property
    def told(self) -> str:
        most, least = (amount(self.budget / 6 / tokens) for tokens in (self.low, self.high))
        return (
            f"sizes that take {amount(self.low)} to {amount(self.high)} tokens, of about {least} to {most} parameters"
        )


def _possible(base: LlamaConfig, wanted: _Wanted, rate: Callable[[LlamaConfig], float]) -> int:
    """Return how many sizes a :func:`ladder` of many rungs has for a budget."""
    family = _family(base, 2 * wanted.budget / 6 / wanted.low)
    return sum(wanted.low <= wanted.budget / rate(one) <= wanted.high for one in family)


def _shortage(wanted: _Wanted, runs: Sequence[PlannedRun]) -> str | None:
    """Return a reason why the sizes of a budget do not suffice; None if they do."""
    names, tokens = [run.name for run in runs], [run.tokens for run in runs]
    if len(set(names)) < len(names):
        raise PlanError("two sizes have as many layers and the same width", where="sizes", remedy="leave one out")
    if len(runs) < wanted.sizes:
        return f"{len(runs)} of the sizes fit, fewer than {wanted.sizes}"
    if not min(tokens) < wanted.optimum < max(tokens):
        side = "below" if max(tokens) <= wanted.optimum else "above"
        return f"all sizes take tokens {side} the expected optimum of {amount(wanted.optimum)}"
    return None


def _refusal(
    what: str, wanted: _Wanted, runs: Sequence[PlannedRun], refused: Mapping[_Cause, Sequence[str]], possible: int
) -> PlanError:
    """Return the error for a budget without enough sizes, of a ladder with at most ``possible`` sizes."""
    for reasons in refused.values():
        what += "".join(f"; {reason}" for reason in reasons[:1])
        what += f", and {len(reasons) - 1:,} more would not do either" if len(reasons) > 1 else ""
    offered = len(runs) + sum(map(len, refused.values()))
    if possible < wanted.sizes:
        what += f"; {possible} {wanted.told} are to be had, as widths are whole heads of {_HEAD} and the head of the "
        what += "vocabulary is most of a small model"
        remedy = "take a larger budget" + (" and more text" if refused["text"] else "") + ", or a smaller vocabulary"
    elif refused["text"]:
        remedy = "give more text or raise data.epochs, or "
        remedy += "lower packing.tokens" if refused["steps"] else "take a smaller budget"
    elif refused["steps"] and offered >= wanted.sizes:
        remedy = "lower packing.tokens, or take a larger budget"
    else:
        remedy = f"raise sizes: {wanted.told} count"
    return PlanError(what, where=wanted.where, remedy=remedy)


@dataclass(frozen=True)
class IsoFlopOutcome:
    """Study, its folder (with the runs, ``isoflop.json`` and the plots), and the path of its drawing."""

    folder: Path
    study: IsoFlopStudy
    plot: Path


def train_plan(
    plan: Sequence[PlannedRun],
    folder: Path,
    train: Callable[[list[str], Path], Run],
    *,
    agrees: Callable[[list[str], Path], bool] = lambda overrides, folder: True,
    target: float | None = None,
    title: str | None = None,
    say: Callable[[str], object] = lambda text: None,
) -> IsoFlopOutcome:
    """Train the planned runs, fit and draw the laws, and write ``isoflop.json``.

    Finished runs are not trained again. A run whose training fails is left out and named.

    Args:
        plan: Runs from :func:`plan_runs`.
        folder: Folder of the study, which holds the folders of the runs.
        train: Function that trains the recipe with these overrides into this folder, or resumes the run that is there.
        agrees: Function that returns whether the run in this folder is of the recipe with these overrides; it is called
            for all runs before any is trained.
        target: FLOPs for which to predict the best split; None for none.
        title: Title above the drawing.
        say: Function called with one line of text for each run.

    Raises:
        RunError: If a folder holds a run of another plan.
        Interrupted: If training was interrupted.
        DataError: If the text of a run ended early, or nothing could be trained.
    """
    for planned in plan:
        place = folder / planned.name
        if (place / "recipe.toml").is_file() and not agrees(planned.overrides, place):
            raise _other_plan(place)
    total = sum(run.compute for run in plan)
    say(f"{len(plan)} runs, {power(total)} training FLOPs in all")
    runs, failed = [], {}
    for number, planned in enumerate(plan, 1):
        place = folder / planned.name
        head = f"[{number}/{len(plan)}] {planned.name}"
        if _is_done(place, planned):
            say(f"{head}: done before")
            run = Run(place)
        else:
            size = parameter_count(planned.model)
            say(f"{head}: {size:,} parameters, {planned.tokens:,} tokens in {planned.steps:,} steps")
            try:
                run = train(planned.overrides, place)
            except TrainingError as error:
                failed[planned.name] = error.what
                say(f"{head}: left out: {error.what}")
                continue
        _check_run(run, planned)
        runs.append(run)
    result = study(measure_language(runs), target=target, left_out=failed)
    drawing = folder / "isoflop.png"
    with disk_errors(drawing):
        plot(result, [drawing, folder / "isoflop.svg"], title=title)
    write_atomically(folder / "isoflop.json", result.to_json() + "\n")
    return IsoFlopOutcome(folder, result, drawing)


def _is_done(folder: Path, planned: PlannedRun) -> bool:
    """Return whether a run was evaluated after its last step; a stopped run may have been evaluated as well."""
    if not (folder / "evaluation.json").is_file():
        return False
    return bool(Run(folder).read_json("evaluation.json")["step"] >= planned.steps)


def _check_run(run: Run, planned: PlannedRun) -> None:
    if not (run.folder / "evaluation.json").is_file():
        raise Interrupted(
            "this run is not finished; everything is saved",
            where=str(run.folder),
            remedy="give the same command again to go on",
        )
    config = run.read_json("model.json")["config"]
    if any(config.get(key) != getattr(planned.model, key) for key in _SHAPES):
        raise _other_plan(run.folder)
    step = run.read_json("evaluation.json")["step"]
    if step != planned.steps:
        raise DataError(
            f"ended at step {step} of {planned.steps}",
            where=str(run.folder),
            remedy="give more text or smaller budgets; a run of another plan needs another --run folder",
        )


def _other_plan(folder: Path) -> RunError:
    return RunError(
        "holds a run of another recipe or plan", where=str(folder), remedy="choose another --run folder for this study"
    )
