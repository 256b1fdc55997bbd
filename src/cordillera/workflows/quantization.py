"""Quantisation of trained ranking models: search for formats, write the model, and confirm its quality."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from cordillera.data.ranking.cache import Splits
from cordillera.data.ranking.features import RankingBatch
from cordillera.data.ranking.loader import Loader
from cordillera.embeddings.quantized_tables import QuantizedTables, encoded
from cordillera.errors import DependencyError, Interrupted, NumericsError
from cordillera.models.ranking.base import RankingModel
from cordillera.numerics.dispatch.accuracy import Accuracy
from cordillera.numerics.dispatch.candidates import CANDIDATES, chosen
from cordillera.numerics.dispatch.dispatch import (
    DispatchConfig,
    Trial,
    forward_products,
    median_seconds,
    skipped_layers,
    try_all,
)
from cordillera.numerics.dispatch.probe import Probe, ProbeConfig
from cordillera.numerics.dispatch.row_statistics import RowStatistics
from cordillera.numerics.dispatch.stored_linear import StoredLinear
from cordillera.numerics.formats.cast_checks import self_test
from cordillera.numerics.formats.precision import Precision
from cordillera.numerics.inference.selection import (
    BUDGET,
    Change,
    Part,
    Selection,
    check_budget,
    select,
    sweep_evaluations,
)
from cordillera.numerics.sites import Recorder, replaced, sites
from cordillera.recipe import RankingRecipe
from cordillera.reports.ranking.quantization import quantization_page
from cordillera.run import Run, write_atomically
from cordillera.serving.ranking import quantized_model
from cordillera.serving.ranking.observation import Observer
from cordillera.training.ranking.scoring import autocast, scorer, select_device
from cordillera.workflows.processes import Say, silent
from cordillera.workflows.scores import check_weights, scored, some_batches
from cordillera.workflows.trained import check_fixed_tables, model_of, recipe_of, restore_model, splits_of, with_threads

_ROW_KINDS = ("int4", "int8", "fp16")
_SMALLEST_ROW_KINDS = ("int2", *_ROW_KINDS)
_LAYER_KERNELS = ("int8 static", "int8 dynamic", "fp16 weights", "bf16")
_SMALLEST_KERNELS = ("int4 weights", *_LAYER_KERNELS)
_REST = "rest of the model"
_REPORT, _PAGE = "report.json", "report.html"
_LEAST_WEIGHTS = 1024  # weights of the smallest layer considered; smaller layers save nothing
_CALIBRATION_ROWS = 16_384
_BATCH = 256
_SLOWER = 1.02  # longest time relative to fp32; 3 % are promised, and timings vary


@dataclass(frozen=True)
class LayerReport:
    """Comparison of one layer with its fp32 version.

    Attributes:
        alone_db: Signal-to-noise ratio (dB) of its output on the same inputs; NaN for fp32.
        in_place_db: Signal-to-noise ratio (dB) of its output in the quantised model, whose inputs are quantised too.
    """

    name: str
    kernel: str
    alone_db: float
    in_place_db: float


@dataclass(frozen=True)
class Quantized:
    """Result of :func:`quantize`.

    Attributes:
        searched: Change of NE on the split of the search.
        confirmed: Change of NE on the test split, which the search does not use; None without one.
        ne: NE of the first task in fp32 and quantised, on the test split, or without one on the split of the search.
        bytes: Bytes of the fp32 model and of the quantised model.
        seconds: Median seconds of scoring a batch of 256 in fp32 and quantised, over interleaved rounds.
        sweep: Number of evaluations that a separate sweep over all options would have taken.
        tables: Bytes of each table in fp32 and quantised.
    """

    folder: Path
    selection: Selection
    searched: Change
    confirmed: Change | None
    ne: tuple[float, float]
    bytes: tuple[int, int]
    layers: list[LayerReport]
    seconds: tuple[float, float]
    sweep: int
    tables: dict[str, tuple[int, int]]
    page: Path


# One piece: search, model and confirmation follow one another, and each uses most of what those before it made.
def quantize(
    run: Run | Path | str,
    budget: float = BUDGET,
    *,
    folder: Path | None = None,
    smallest: bool = False,
    least_db: float = 20.0,
    say: Say = silent,
) -> Quantized:
    """Find the fewest bits of every table and layer under a budget of NE, and write the model.

    The search uses the validation split alone, ranges come from the training split, and the result is confirmed on the
    test split. Without a validation split, the last quarter of the training split replaces it.

    Args:
        budget: Largest relative change of NE, estimated on the split of the search.
        folder: Folder to write the model to; None for ``quantized`` in the run.
        smallest: Whether to minimise bytes alone, so that layers may become slower and tables may have rows of 2 bits;
            otherwise time counts as much as bytes.
        least_db: Signal-to-noise ratio in dB below which a kernel is not considered for a layer.

    Raises:
        NumericsError: If the budget is negative or not a number, or the weights are not finite.
        DependencyError: If the run is of a device other than a CPU.
        Interrupted: If Ctrl-C came after the model was written and before it was confirmed.
    """
    run = run if isinstance(run, Run) else Run(run)
    check_budget(budget)
    self_test()
    recipe = recipe_of(run)
    check_fixed_tables(recipe, "quantisation")
    if select_device(recipe.device).type != "cpu":
        raise DependencyError("quantised models score on CPUs", where="device", remedy="set device = 'cpu'")
    with with_threads(recipe.threads):
        splits = splits_of(run, recipe)
        _, model = restore_model(run, splits.features, torch.device("cpu"))
        model.eval()
        check_weights(model)
        seen = _probed(model, splits, recipe, say)
        trials = _try_layers(model, seen, least_db, smallest, say)
        parts = _parts(model, trials, seen, some_batches(splits.train, recipe, _BATCH)[0], smallest)
        search = splits.validation if len(splits.validation) else splits.train
        base = scored(model, search)
        if not len(splits.validation):
            base = base.tail(4)
        made: dict[tuple[str, str], torch.Tensor] = {}  # encoded tables, which many evaluations share

        def build(options: Mapping[str, str]) -> RankingModel:
            tables = {name.removeprefix("table "): o for name, o in options.items() if name.startswith("table ")}
            layers = {name.removeprefix("layer "): o for name, o in options.items() if name.startswith("layer ")}
            return quantized_model.quantize_model(model, tables, layers, seen.rows, made)

        def evaluate(options: Mapping[str, str]) -> Change:
            found = base.beside(scored(build(options), search, base.first, precision=_precision(options)))
            names = sorted(options)
            what = f"all {len(names)} parts" if len(names) == len(parts) else ", ".join(names[:3])
            more = f" and {len(names) - 3} more" if len(names) > 3 and len(names) != len(parts) else ""
            say(f"{what}{more}: NE {100 * found.mean:+.4f} % ({100 * found.low:+.4f} to {100 * found.high:+.4f})")
            return found

        selection = select(parts, evaluate, budget)
        options = {name: option for name, option in selection.options.items() if option != "fp32"}
        none = Change(0.0, 0.0, 0.0)
        searched = next((e.change for e in selection.evaluated if e.options == options), none)
        if not smallest and (kept := _no_slower(model, build, options, splits, say)) != options:
            options, searched = kept, evaluate(kept) if kept else none
            if searched.mean > budget:  # fewer parts may change more, as their errors no longer cancel
                options, searched = {}, none
            selection = selection.without(parts, options)
        quantized, precision = build(options), _precision(options)
        # Samples that the model was not trained on, like live ones; on others its scores are more confident.
        seen_now = Observer(quantized, splits.encoder).reference(some_batches(search, recipe, _CALIBRATION_ROWS))
        made_of = quantized_model.origin(run, use_best=recipe.training.patience is not None)
        sizes = quantized_model.size_bytes(model) - _optimizer_bytes(model), quantized_model.size_bytes(quantized)
        target = folder or run.folder / quantized_model.FOLDER
        facts: dict[str, Any] = {"budget": budget, "searched": searched._asdict(), "bytes": sizes}
        quantized_model.save(target, quantized, seen_now, made_of, facts, precision)
        for name in (_REPORT, _PAGE):
            (target / name).unlink(missing_ok=True)  # these files describe the old model
    with with_threads(recipe.threads), _unconfirmed(target):
        say(f"written: {target}")
        loaded, _ = quantized_model.load(target, model_of(recipe, splits.features), made_of)
        confirmed, ne = None, base.ne_beside(scored(loaded, search, base.first, precision=precision))
        if len(splits.test):
            exact, ours = scored(model, splits.test), scored(loaded, splits.test, precision=precision)
            confirmed, ne = exact.beside(ours), exact.ne_beside(ours)
        layers = _layer_by_layer(model, loaded, trials, splits, recipe, precision)
        seconds = _timed(model, loaded, splits, precision)
        assert isinstance(loaded.tables, QuantizedTables)
        tables = {
            name: (4 * model.tables.table(name).numel(), loaded.tables.rows_of(name).nbytes)
            for name in model.tables.features.tables
        }
        outcome = Quantized(
            target, selection, searched, confirmed, ne, sizes, layers, seconds, sweep_evaluations(parts), tables,
            target / _PAGE,
        )  # fmt: skip
        content = {"run": run.name, "budget": budget, "smallest": smallest, **_plain(outcome)}
        write_atomically(target / _REPORT, json.dumps(content, indent=1) + "\n")
        write_atomically(target / _PAGE, quantization_page(content))
        return outcome


@contextlib.contextmanager
def _unconfirmed(folder: Path) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted(
            "the model is written, but it was not confirmed on the test split and there is no report of it",
            where=str(folder), remedy="give the same command again",
        ) from None  # fmt: skip


@dataclass(frozen=True)
class _ProbedModel:
    statistics: Mapping[str, RowStatistics]
    rows: Mapping[str, torch.Tensor]


def _probed(model: RankingModel, splits: Splits, recipe: RankingRecipe, say: Say) -> _ProbedModel:
    batches = some_batches(splits.train, recipe, _CALIBRATION_ROWS)
    names = list(sites(model))
    say(f"calibrating {len(names)} layers on {sum(map(len, batches)):,} training samples")
    score = scorer(model, torch.device("cpu"), "fp32")
    if not names:
        return _ProbedModel({}, {})
    with Probe(model, ProbeConfig(interval=1)) as probe, Recorder(model, names, 4096) as recorder:
        for batch in batches:
            probe.step()
            score(batch)
    return _ProbedModel(probe.inputs, {name: torch.cat(rows) for name, rows in recorder.inputs.items()})


def _try_layers(
    model: RankingModel, seen: _ProbedModel, least_db: float, by_bytes: bool, say: Say
) -> dict[str, list[Trial]]:
    kernels = _SMALLEST_KERNELS if by_bytes else _LAYER_KERNELS
    config = DispatchConfig(
        sqnr_db=least_db, median_relative=1.0, rows=(_BATCH,), draws=2, judged_rows=_BATCH, kernels=kernels
    )
    large = {name for name, module in sites(model).items() if module.weight.numel() >= _LEAST_WEIGHTS}
    products = [p for p in forward_products(model, seen.statistics, calibration=seen.rows) if p.site in large]
    found = {}
    for product in products:
        found[product.site] = try_all(product, chosen(kernels), config)[_BATCH]
        say(f"layer {product.site}: {_fastest(found[product.site])} is the fastest of {len(kernels) + 1} kernels")
    if small := len(sites(model)) - len(found):
        say(f"layers of fewer than {_LEAST_WEIGHTS:,} weights stay in fp32: {small}")
    if found:
        say(f"a layer's kernel is chosen by {'the bytes of its weights' if by_bytes else 'time and bytes together'}")
    say_skipped(skipped_layers(found), say)
    return found


def say_skipped(skipped: Mapping[str, Mapping[str, int]], say: Say) -> None:
    """Print one line per kernel and reason why it cannot compute some layers; ``skipped`` holds their numbers."""
    for kernel, reasons in skipped.items():
        for reason, layers in reasons.items():
            say(f"{kernel} is skipped in {layers} layer{'s' * (layers != 1)}: {reason}")


def _fastest(trials: list[Trial]) -> str:
    return min((t for t in trials if not t.refused), key=lambda t: t.milliseconds).kernel


def _parts(
    model: RankingModel, trials: Mapping[str, list[Trial]], seen: _ProbedModel, batch: RankingBatch, smallest: bool
) -> list[Part]:
    """Return the choices: rows of tables by bytes, kernels of layers by bytes and time, the rest by time."""
    found: list[Part] = []
    tables = model.tables
    for name in tables.features.tables:
        whole = tables.table(name)
        options, costs = ["fp32"], [4.0 * whole.numel()]
        for kind in reversed(_SMALLEST_ROW_KINDS if smallest else _ROW_KINDS):
            with contextlib.suppress(NumericsError):  # a format that cannot hold the table is not offered
                size = float(encoded(whole, kind, name, "minmax").numel())
                if size < costs[0]:  # rows of few numbers may be no smaller than more accurate ones
                    options, costs = [kind, *options], [size, *costs]
        found.append(Part(f"table {name}", tuple(options), tuple(costs)))
    # All tables count as much as the time of all layers, unless bytes alone count: then time only breaks ties.
    times = sum(t.milliseconds for one in trials.values() for t in one if t.kernel == "fp32") or 1.0
    a_millisecond = (1e-6 if smallest else 1.0) * (sum(part.costs[-1] for part in found) or 1.0) / times
    linear = sites(model)
    for name, one in trials.items():
        stored = {t.kernel: CANDIDATES[t.kernel].store(linear[name].weight, None) for t in one if not t.refused}
        costs_of = {
            t.kernel: sum(tensor.nbytes for tensor in stored[t.kernel].values()) + a_millisecond * t.milliseconds
            for t in one
            if not t.refused
        }
        kept: dict[torch.dtype, str] = {}  # only the cheapest of kernels with equal weight types is tried
        for kernel in sorted(costs_of, key=costs_of.__getitem__):
            if costs_of[kernel] < costs_of["fp32"]:
                kept.setdefault(stored[kernel]["weight"].dtype, kernel)
        options = [*kept.values(), "fp32"]
        found.append(Part(f"layer {name}", tuple(options), tuple(costs_of[option] for option in options)))
    fp32, bf16 = (a_millisecond * 1e3 * seconds for seconds in _time_of_rest(model, trials, seen, batch))
    if bf16 < fp32:
        found.append(Part(_REST, ("bf16", "fp32"), (bf16, fp32)))
    return found


def _time_of_rest(
    model: RankingModel, trials: Mapping[str, list[Trial]], seen: _ProbedModel, batch: RankingBatch
) -> tuple[float, float]:
    """Return the seconds after the lookup with the fastest kernels of layers, the rest in fp32 and in bf16."""
    cpu, linear = torch.device("cpu"), sites(model)
    layers = {name: StoredLinear.of(linear[name], _fastest(one), seen.rows[name]) for name, one in trials.items()}
    with torch.inference_mode(), replaced(model, dict(layers)):
        embeddings = model.look_up(batch)

        def score(turn: int, precision: Precision) -> None:
            with autocast(cpu, precision):
                model.score(batch.dense, embeddings)

        taken = median_seconds({"fp32": partial(score, precision="fp32"), "bf16": partial(score, precision="bf16")}, 9)
    return taken["fp32"], taken["bf16"]


def _precision(options: Mapping[str, str]) -> Precision:
    """Return the precision of everything except tables and layers with a kernel of their own."""
    return "bf16" if options.get(_REST) == "bf16" else "fp32"


def _optimizer_bytes(model: RankingModel) -> int:
    """Return the bytes of the tables' optimizer, which is saved with a model but not served."""
    return model.tables.memory_bytes().get("optimizer", 0)


def _layer_by_layer(
    model: RankingModel,
    quantized: RankingModel,
    trials: Mapping[str, list[Trial]],
    splits: Splits,
    recipe: RankingRecipe,
    precision: Precision,
) -> list[LayerReport]:
    batch = some_batches(splits.train, recipe, _BATCH)[0]
    outputs: list[dict[str, torch.Tensor]] = []
    names = list(sites(model))
    for one in (model, quantized):
        found: dict[str, torch.Tensor] = {}
        hooks = [
            one.get_submodule(name).register_forward_hook(
                lambda _, given, out, name=name, found=found: found.setdefault(name, out.detach().float())
            )
            for name in names
        ]
        scorer(one, torch.device("cpu"), "fp32" if one is model else precision)(batch)
        for hook in hooks:
            hook.remove()
        outputs.append(found)
    rows = []
    for name in names:
        kernel = getattr(quantized.get_submodule(name), "kernel", "fp32")
        alone = next((t.accuracy.sqnr_db for t in trials.get(name, []) if t.kernel == kernel and t.accuracy), math.nan)
        in_place = math.nan
        if name in outputs[0]:
            relu = getattr(quantized.get_submodule(name), "relu", False)
            in_place = Accuracy.of(outputs[1][name], outputs[0][name].relu() if relu else outputs[0][name]).sqnr_db
        rows.append(LayerReport(name, kernel, math.nan if kernel == "fp32" else alone, in_place))
    return rows


def _no_slower(
    model: RankingModel,
    build: Callable[[Mapping[str, str]], RankingModel],
    options: dict[str, str],
    splits: Splits,
    say: Say,
) -> dict[str, str]:
    """Return the options without those that make the whole model slower than in fp32, the costliest first.

    Tables in equal formats are judged together, as are the layers of a kernel and the rest of the model.
    """

    def without(names: Sequence[str]) -> dict[str, str]:
        return {name: option for name, option in options.items() if name not in names}

    def ratio(kept: Mapping[str, str]) -> float:
        quantized, found = build(kept), math.inf
        for _ in range(2):  # repeated, as another process may have interfered
            fp32, ours = _timed(model, quantized, splits, _precision(kept), rounds=51)
            found = min(found, ours / fp32)
            if found <= _SLOWER:
                break
        return found

    now = ratio(options)
    if now <= _SLOWER:
        return options
    groups: dict[tuple[str, str], list[str]] = {}
    for name, option in options.items():
        groups.setdefault((name.split()[0], option), []).append(name)
    costs = {group: now - ratio(without(names)) for group, names in groups.items()}
    for group in sorted(groups, key=lambda group: -costs[group]):
        options = without(groups[group])
        what = f"{len(groups[group])} {group[0]}{'s' * (len(groups[group]) != 1)}" if group[0] != "rest" else _REST
        say(f"{what} in {group[1]} would make a batch {now:.2f} times as slow as fp32: fp32 stays")
        if not options or (now := ratio(options)) <= _SLOWER:
            break
    return options


def _timed(
    model: RankingModel, quantized: RankingModel, splits: Splits, precision: Precision, rounds: int = 15
) -> tuple[float, float]:
    batches = list(itertools.islice(Loader(splits.train, min(_BATCH, len(splits.train))).epoch(), 8))
    cpu = torch.device("cpu")

    def call(score: Callable[[RankingBatch], Any]) -> Callable[[int], Any]:
        return lambda turn: score(batches[turn % len(batches)])

    scores = {"fp32": call(scorer(model, cpu, "fp32")), "quantised": call(scorer(quantized, cpu, precision))}
    taken = median_seconds(scores, rounds)
    return taken["fp32"], taken["quantised"]


def _plain(outcome: Quantized) -> dict[str, Any]:
    def number(value: float) -> float | None:
        return value if math.isfinite(value) else None

    def change(one: Change | None) -> dict[str, float | None] | None:
        return None if one is None else {key: number(value) for key, value in one._asdict().items()}

    selection = outcome.selection
    return {
        "options": selection.options,
        "full_cost": selection.full_cost,
        "tables": {
            name: {
                "rows": selection.options.get(f"table {name}", "fp32"),
                "bytes": {"fp32": sizes[0], "quantized": sizes[1]},
            }
            for name, sizes in outcome.tables.items()
        },
        "evaluations": [
            {"options": e.options, "change": change(e.change), "cost": e.cost} for e in selection.evaluated
        ],
        "alone": {name: change(one) for name, one in selection.alone.items()},
        "sweep_evaluations": outcome.sweep,
        "searched": change(outcome.searched),
        "confirmed": change(outcome.confirmed),
        "ne": {"fp32": number(outcome.ne[0]), "quantized": number(outcome.ne[1])},
        "bytes": {"fp32": outcome.bytes[0], "quantized": outcome.bytes[1]},
        "layers": [
            {key: number(value) if isinstance(value, float) else value for key, value in asdict(layer).items()}
            for layer in outcome.layers
        ],
        "seconds": {"fp32": outcome.seconds[0], "quantized": outcome.seconds[1]},
    }
