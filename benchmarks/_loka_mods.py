"""Effects of LoKA's Mods on the time of a layer's epilogue and on the quality of a Wukong."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _results import FinishedPieces
from _tables import print_notes, print_rows
from _timing import Spread, interleave, times_faster
from rich.console import Console
from torch import Tensor
from torch.nn import functional as F

from cordillera import recipe as recipes
from cordillera import workflows
from cordillera.kernels.dense.layers import block_norm
from cordillera.kernels.host_memory import keep_freed_memory
from cordillera.models.ranking.mods import MODS
from cordillera.recipe import RankingRecipe
from cordillera.reports.ranking.comparison import mean_interval

# Rows, outputs, inputs of a layer.
SHAPES = [(256, 512, 512), (1024, 512, 512), (1024, 1024, 1024), (4096, 1024, 512)]
COMPILED_SHAPES = SHAPES[1:3]  # each is compiled separately
LEAST_TIMES, WITHIN_PERCENT, SEEDS = 1.5, 0.05, 8
VARIANTS: dict[str, tuple[str, ...]] = {"as it was": (), **{mod: (mod,) for mod in MODS}, "all three": MODS}
# Rates fall to zero and the last weights count, because the choice of early stopping would be random.
SAME: dict[str, Any] = {"training.patience": None, "training.evaluate_every": None, "training.decay": "linear"}

Epilogue = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def _usual(y: Tensor, bias: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return F.silu(F.layer_norm(y + bias, scale.shape, scale, shift))


def _without_bias(y: Tensor, bias: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return F.silu(F.layer_norm(y, scale.shape, scale, shift))


def _modified(y: Tensor, bias: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return block_norm(y, hard_swish=True)


def _usual_layer(x: Tensor, weight: Tensor, bias: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return F.silu(F.layer_norm(F.linear(x, weight, bias), scale.shape, scale, shift))


def _modified_layer(x: Tensor, weight: Tensor, bias: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return block_norm(F.linear(x, weight), hard_swish=True)


# The usual form of each measurement, and its replacement. Adding a bias is a separate pass if the
# epilogue is measured alone; in a layer it is part of the product.
PAIRS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "epilogue: bias, LayerNorm, Swish": (_usual, _modified),
    "epilogue: LayerNorm, Swish": (_without_bias, _modified),
    "layer": (_usual_layer, _modified_layer),
}


def _call(function: Callable[..., Tensor], operands: list[list[Tensor]], train: bool) -> Callable[[], object]:
    turn = 0

    def run() -> None:
        nonlocal turn
        turn += 1
        own = operands[turn % len(operands)]
        if not train:
            with torch.no_grad():
                function(*own)
            return
        for tensor in own:
            tensor.grad = None
        out = function(*own)
        out.backward(torch.ones_like(out))

    return run


def _operands(name: str, rows: int, outputs: int, inputs: int) -> list[list[Tensor]]:
    """Return four sets, so that no call finds its own input in a cache that the next layer would have used."""
    generator = torch.Generator().manual_seed(rows + outputs + inputs)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).requires_grad_()

    vectors = [normal(outputs), torch.ones(outputs).requires_grad_(), torch.zeros(outputs).requires_grad_()]
    if name != "layer":
        return [[normal(rows, outputs), *vectors] for _ in range(4)]
    weight = (normal(outputs, inputs).detach() / math.sqrt(inputs)).requires_grad_()
    return [[normal(rows, inputs), weight, *vectors] for _ in range(4)]


def _compiled() -> str:
    """Return why torch.compile does not work here; empty if it does."""
    try:
        torch.compile(lambda x: x + 1, dynamic=False)(torch.zeros(4))
    except Exception as error:  # any error of an absent or broken compiler
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return ""


def times(console: Console, quick: bool) -> dict[str, Any]:
    """Measure epilogues and layers with and without Mods; ``quick`` uses one small size, few rounds and no compiler."""
    keep_freed_memory()
    refused = "not with --quick" if quick else _compiled()
    modes: Mapping[str, Callable[[Callable[..., Tensor]], Callable[..., Tensor]]] = {
        "eager": lambda function: function,
        **({} if refused else {"compiled": partial(torch.compile, dynamic=False)}),
    }
    results: list[dict[str, Any]] = []
    rows = []
    for mode, prepare in modes.items():
        for name, pair in PAIRS.items():
            for train in (False, True):
                for shape in SHAPES[:1] if quick else COMPILED_SHAPES if mode == "compiled" else SHAPES:
                    if mode == "compiled":
                        torch._dynamo.reset()  # compiled functions are cached by their code, which all sizes share
                    operands = _operands(name, *shape)
                    usual, modified = (_call(prepare(function), operands, train) for function in pair)
                    timings = interleave(
                        {"usual": usual, "modified": modified}, rounds=3 if quick else 25, calls=2 if quick else 10,
                        warmup=3, settle_s=0.0 if quick else 0.003,
                    )  # fmt: skip
                    ratio: Spread = times_faster(timings["modified"], timings["usual"])
                    results.append(
                        {
                            "what": name,
                            "mode": mode,
                            "pass": "forward and backward" if train else "forward",
                            "shape": shape,
                            "milliseconds": {key: 1e3 * one.spread.median for key, one in timings.items()},
                            "times_as_fast": ratio.to_json(),
                        }
                    )
                    one = results[-1]
                    rows.append(
                        [
                            name, mode, one["pass"], " x ".join(map(str, shape)),
                            *(f"{one['milliseconds'][key]:.3f}" for key in ("usual", "modified")),
                            f"{ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f})",
                        ]
                    )  # fmt: skip
    headings = ["what", "how", "pass", "rows x outputs x inputs", "usual, ms", "Mods, ms", "times as fast"]
    print_rows(console, "BlockNorm and hard Swish without bias", headings, rows, "measured")
    means = {
        f"{what}, {mode}, {kind}": statistics.geometric_mean(
            one["times_as_fast"]["median"]
            for one in results
            if (one["what"], one["mode"], one["pass"]) == (what, mode, kind)
        )
        for what in PAIRS
        for mode in modes
        for kind in ("forward", "forward and backward")
    }
    for key, value in means.items():
        console.print(f"{key}: {value:.2f} times as fast in geometric mean")
    return {
        "rows": results,
        "geometric_means": means,
        "not_compiled": refused,
        "least_times": LEAST_TIMES,
        "reached": {key: value >= LEAST_TIMES for key, value in means.items() if key.startswith("epilogue")},
    }


def _recipe(mods: tuple[str, ...], seed: int, quick: bool) -> RankingRecipe:
    few = {"training.max_steps": 2} if quick else {}
    found = recipes.load("movielens-wukong", {**SAME, **few, "model.mods": list(mods), "seed": seed})
    assert isinstance(found, RankingRecipe)
    return found


def quality(console: Console, runs: Path, quick: bool, pieces: FinishedPieces) -> dict[str, Any]:
    """Measure the test NE of Wukong on MovieLens-100K with and without Mods, paired by seed.

    A seed gives all variants the same data order and, where they have the same weights, the same initial ones.
    ``quick`` takes two steps with one seed, without Mods and with all.
    """
    seeds = range(1, (1 if quick else SEEDS) + 1)
    variants = {name: mods for name, mods in VARIANTS.items() if not quick or len(mods) != 1}
    found: dict[str, list[float]] = {name: [] for name in variants}
    for seed in seeds:  # all variants of a seed in sequence, so that an interruption leaves pairs
        for name, mods in variants.items():
            recipe = _recipe(mods, seed, quick)
            key = {"recipe": recipe.model_dump(mode="json")}
            piece = pieces.get(key)
            if piece is None:
                outcome = workflows.train(recipe, runs / f"mods-{seed}-{name.replace(' ', '-')}")
                if outcome.evaluation is None:
                    raise KeyboardInterrupt
                piece = {"ne": next(iter(outcome.evaluation.tasks.values())).metrics["ne"]}
                pieces.add(key, piece)
                console.print(f"  {name}, seed {seed}: test NE {piece['ne']:.5f}")
            found[name].append(piece["ne"])
    results, rows = {}, []
    for name, values in found.items():
        changes = [100 * (value / base - 1) for value, base in zip(values, found["as it was"], strict=True)]
        estimate = mean_interval(changes)
        neutral = estimate.count > 1 and max(abs(estimate.low), abs(estimate.high)) <= WITHIN_PERCENT
        results[name] = {
            "ne": values,
            "change_percent": changes,
            "mean_percent": estimate.value,
            "interval_percent": [estimate.low, estimate.high],
            "shown_within": neutral,
        }
        shown = "" if name == "as it was" else f"{estimate.value:+.3f} ({estimate.low:+.3f} to {estimate.high:+.3f})"
        rows.append([name, f"{statistics.fmean(values):.5f}", shown, "" if not shown else "yes" if neutral else "no"])
    headings = ["Mods", "test NE", "change, %, paired (95 %)", f"shown within {WITHIN_PERCENT} %"]
    print_rows(console, f"Wukong on MovieLens-100K, means over {len(seeds)} seeds", headings, rows, "measured")
    print_notes(console, ["rates are those of the unchanged model; its activation is ReLU, not Swish"])
    return {
        "seeds": list(seeds),
        "within_percent": WITHIN_PERCENT,
        "recipe": _recipe((), 1, quick).model_dump(mode="json"),
        "variants": results,
        "reached": {"loss neutral": results["all three"]["shown_within"]},
    }
