"""AdamW and Muon at equal tokens: the part ``optimizers``.

Both get as many trials over learning rates, with a seed of their own, and then train with their best rate and other
seeds. Muon also trains on parts of the tokens, each with the whole schedule of its rate, which shows how many tokens it
takes to the loss of AdamW.
"""

from __future__ import annotations

import itertools
import math
import multiprocessing
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _machine import busy
from _results import FinishedPieces
from _tables import print_notes
from _timing import interleave, times_faster
from rich.console import Console
from rich.table import Table

from cordillera import recipe as recipes
from cordillera import workflows
from cordillera.data.language.batches import TextIteration
from cordillera.data.language.corpora import prepare_corpora
from cordillera.distributed.mesh import ParallelConfig, ProcessMesh
from cordillera.kernels.host_memory import keep_freed_memory
from cordillera.kernels.threads import usable_cores
from cordillera.models.language.llama import parameter_count
from cordillera.recipe import LanguageRecipe
from cordillera.reports.ranking.comparison import mean_interval
from cordillera.training.language.engine import LanguageEngine
from cordillera.workflows.language import batches_of

NAMES = {"adamw": "AdamW", "muon": "Muon"}
RATES = {"adamw": (7.5e-4, 1.5e-3, 3e-3, 6e-3), "muon": (6e-3, 1.2e-2, 2.4e-2, 4.8e-2)}
STEPS, TOKENS = 400, 2048
TRIAL, SEEDS = 1, (2, 3, 4)  # the seed of trials over rates, and those of the comparison
SHARES = (0.4, 0.6, 0.8)  # of the steps, on which Muon trains too
ROUNDS, CALLS = 9, 4  # of timed steps
QUIET = 0.5  # processes that ran in the minute before, up to which steps are timed beside nothing else


def _recipe(optimizer: str, rate: float, seed: int, steps: int, quick: bool) -> LanguageRecipe:
    changes = [
        f"seed={seed}", "threads=1", f"packing.tokens={TOKENS}", f"training.optimizer={optimizer}",
        f"training.learning_rate={rate}", f"training.steps={steps}", f"training.warmup_steps={steps // 10}",
        "training.precision=bf16", "training.evaluate_every=none", "training.checkpoint_every=none",
    ]  # fmt: skip
    if quick:
        changes += ["model.layers=1", "model.hidden=32", "packing.tokens=512", "packing.context=256"]
        changes += ["training.evaluation_tokens=512"]
    found = recipes.load("llama-debug", changes)
    assert isinstance(found, LanguageRecipe)
    return found


def trained(optimizer: str, rate: float, seed: int, steps: int, quick: bool) -> dict[str, float]:
    """Train a model and return its loss on held-out text, in nats a byte, and the number of tokens it has learnt from.

    Args:
        optimizer: Name of the optimizer in a recipe.
        rate: Its peak learning rate.
        seed: Seed of weights and of the order of the text.
        steps: Number of steps, over which the rate rises and falls.
        quick: Whether the model is tiny, which shows that it works.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = workflows.train(_recipe(optimizer, rate, seed, steps, quick), Path(folder, "run")).report
    if report.ended != "finished":
        raise KeyboardInterrupt
    return {"loss": report.evaluation.loss, "tokens": report.progress.tokens}


class _Trainings:
    """Trainings, one on each core, of which finished ones are kept."""

    def __init__(self, pool: ProcessPoolExecutor, pieces: FinishedPieces, quick: bool) -> None:
        self._pool, self._pieces, self._quick = pool, pieces, quick

    def __call__(self, wanted: Sequence[tuple[str, float, int, int]]) -> list[dict[str, Any]]:
        """Return the results of trainings: optimizer, rate, seed and number of steps of each."""
        quick = self._quick
        keys = [{"recipe": _recipe(*one, quick).model_dump_json()} for one in wanted]
        left = {
            self._pool.submit(trained, *one, quick): key
            for one, key in zip(wanted, keys, strict=True)
            if self._pieces.get(key) is None
        }
        for one in as_completed(left):
            self._pieces.add(left[one], one.result())
        names = ("optimizer", "rate", "seed", "steps")
        return [
            dict(zip(names, one, strict=True)) | self._pieces.get(key) for one, key in zip(wanted, keys, strict=True)
        ]


def share_needed(loss: float, shares: Sequence[float], losses: Sequence[float]) -> float | None:
    """Return the share of the tokens at which a loss is reached, by a line through its neighbours over log tokens.

    Args:
        loss: The loss to reach.
        shares: Shares of the tokens, rising.
        losses: Losses after them.

    Returns:
        The share; the first one if the loss is reached before it; None if it is not reached.
    """
    if losses[0] <= loss:
        return shares[0]
    for (share, above), (after, below) in itertools.pairwise(zip(shares, losses, strict=True)):
        if below <= loss:
            part = (above - loss) / (above - below)
            return math.exp(math.log(share) + part * (math.log(after) - math.log(share)))
    return None


def _steps(quick: bool) -> dict[str, Any]:
    """Time steps of both optimizers on the same batches, in turn."""
    keep_freed_memory()  # as the trainer does
    processes, steps = busy(), {}
    for optimizer, rates in RATES.items():
        recipe = _recipe(optimizer, rates[0], TRIAL, STEPS, quick)
        batches = itertools.cycle(list(itertools.islice(batches_of(recipe, prepare_corpora(recipe.data)), 4)))
        engine = LanguageEngine(recipe.training, recipe.model, ProcessMesh(ParallelConfig()), recipe.seed)
        steps[optimizer] = partial(_step, engine, batches)
    timings = interleave(steps, rounds=2 if quick else ROUNDS, calls=1 if quick else CALLS, warmup=4)
    return {
        "threads": torch.get_num_threads(),
        "quiet": processes is not None and processes <= QUIET,
        "seconds": {name: timing.spread.to_json() for name, timing in timings.items()},
        "muon_over_adamw": times_faster(timings["adamw"], timings["muon"]).to_json(),
    }


def _step(engine: LanguageEngine, batches: Iterator[TextIteration]) -> None:
    engine.step(next(batches).microbatches)


def measure_optimizers(console: Console, quick: bool, pieces: FinishedPieces) -> dict[str, Any]:
    """Train with both optimizers, and print losses, the tokens that Muon needs, and seconds a step."""
    timed = _steps(quick)
    steps, seeds = (10, SEEDS[:1]) if quick else (STEPS, SEEDS)
    with ProcessPoolExecutor(usable_cores(), multiprocessing.get_context("spawn")) as pool:
        train = _Trainings(pool, pieces, quick)
        trials = train([(name, rate, TRIAL, steps) for name, rates in RATES.items() for rate in rates])
        best = {name: min(_of(trials, name), key=lambda one: one["loss"])["rate"] for name in NAMES}
        lengths = {name: [steps] for name in NAMES}
        lengths["muon"] = [*(round(share * steps) for share in SHARES), steps]
        runs = train([(name, best[name], seed, n) for name in NAMES for n in lengths[name] for seed in seeds])
    losses = {name: [one["loss"] for one in _of(runs, name) if one["steps"] == steps] for name in NAMES}
    needed = []
    for seed, reached in zip(seeds, losses["adamw"], strict=True):
        muon = [one["loss"] for one in _of(runs, "muon") if one["seed"] == seed]
        needed.append(share_needed(reached, (*SHARES, 1.0), muon))
    change = mean_interval([muon - adamw for adamw, muon in zip(*losses.values(), strict=True)])
    found = {
        "evidence": "measured", "parameters": parameter_count(_recipe("adamw", 1e-3, TRIAL, steps, quick).model),
        "steps": steps, "tokens": statistics.fmean(one["tokens"] for one in runs if one["steps"] == steps),
        "tokens_a_step": TOKENS, "rates": best, "at_edge": {name: best[name] in _edges(name) for name in NAMES},
        "losses": {name: {"mean": statistics.fmean(x), "low": min(x), "high": max(x)} for name, x in losses.items()},
        "change": {"value": change.value, "low": change.low, "high": change.high},
        "tokens_needed": needed, "shares": [*SHARES, 1.0], "steps_timed": timed, "trials": trials, "runs": runs,
    }  # fmt: skip
    _show(console, found)
    return found


def _of(runs: list[dict[str, Any]], optimizer: str) -> list[dict[str, Any]]:
    return [one for one in runs if one["optimizer"] == optimizer]


def _edges(optimizer: str) -> tuple[float, float]:
    return RATES[optimizer][0], RATES[optimizer][-1]


def _show(console: Console, found: dict[str, Any]) -> None:
    timed = found["steps_timed"]
    title = f"loss on held-out text in nats a byte after {found['tokens']:,.0f} tokens (measured)"
    table = Table(title=title, title_justify="left")
    for heading in ("optimizer", "rate", *map(str, range(1, 1 + len(RATES["adamw"]))), "mean", "seeds", "ms a step"):
        table.add_column(heading, justify="left" if heading == "optimizer" else "right")
    for name, shown in NAMES.items():
        loss, seconds = found["losses"][name], timed["seconds"][name]["median"]
        trials = (f"{one['loss']:.4f}" for one in _of(found["trials"], name))
        spread = f"{loss['low']:.4f} to {loss['high']:.4f}"
        table.add_row(
            shown, f"{found['rates'][name]:g}", *trials, f"{loss['mean']:.4f}", spread, f"{1000 * seconds:.1f}"
        )
    console.print(table)
    needed = ", ".join("none" if one is None else f"{one:.2f}" for one in found["tokens_needed"])
    change, ratio = found["change"], timed["muon_over_adamw"]
    notes = [
        f"1 to {len(RATES['adamw'])}: trials, AdamW with rates {RATES['adamw']}, Muon with {RATES['muon']}",
        f"Muon beside AdamW: {change['value']:+.4f} ({change['low']:+.4f} to {change['high']:+.4f})",
        f"share of the tokens after which Muon has AdamW's last loss, by seed: {needed}; {SHARES[0]}: at most",
        f"a step of Muon takes {ratio['median']:.2f} times as long ({ratio['low']:.2f} to {ratio['high']:.2f}), "
        f"with {timed['threads']} threads" + ("" if timed["quiet"] else "; other processes were busy: do not quote it"),
        *(f"{NAMES[name]}: its best rate is the first or last that was tried" for name, is_at in
          found["at_edge"].items() if is_at),
    ]  # fmt: skip
    print_notes(console, notes)
