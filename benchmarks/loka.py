"""The fastest kernels that are accurate on the inputs of layers: ``cordillera bench loka``.

Parts: ``probe`` (statistics of a small deviation beside a large mean; cost of probing), ``shapes`` (kernels on the
shapes of recommendation models, compared with fp32 and with the best single kernel), ``model`` (a whole trained Wukong
by its plan) and ``mods`` (effects of BlockNorm, hard Swish and no biases on a layer's time and on test NE). Each writes
``results/loka-PART.json``.
"""

from __future__ import annotations

import enum
import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import typer
from _loka_mods import quality, times
from _program import Program
from _results import FinishedPieces
from _timing import Spread, interleave, times_faster
from _trained_runs import trained
from rich.console import Console
from rich.table import Table

from cordillera.data.ranking.datasets import prepare
from cordillera.data.ranking.loader import Loader
from cordillera.numerics.dispatch.candidates import CANDIDATES, chosen
from cordillera.numerics.dispatch.dispatch import DispatchConfig, Product, choose, planned, try_all
from cordillera.numerics.dispatch.probe import Probe, ProbeConfig
from cordillera.numerics.dispatch.row_statistics import RowStatistics
from cordillera.numerics.sites import replaced
from cordillera.recipe import load
from cordillera.training.ranking.scoring import scorer
from cordillera.workflows.probing import probe
from cordillera.workflows.trained import restore_model

# Rows, outputs and inputs of recommendation models, from single requests to large batches.
SHAPES = [
    (1, 1024, 256), (1, 4096, 1024), (6, 2048, 512), (20, 4096, 1024), (102, 1024, 512), (256, 1024, 1024),
    (1568, 1024, 512), (1024, 2048, 2048),
]  # fmt: skip
LEAST_TIMES, LEAST_OVER_UNIFORM, BUDGET, BATCH = 4.5, 1.0, 2e-4, 256
_OUTLIER = 3000.0  # times the other inputs: codes of one range for all then leave nothing of these
CPU = torch.device("cpu")


class Part(str, enum.Enum):
    """Parts of the benchmark."""

    probe = "probe"
    shapes = "shapes"
    model = "model"
    mods = "mods"


def _probe(console: Console, folder: Path, quick: bool) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    count, features = (2000, 16) if quick else (100_000, 256)
    rows = (100 + 0.01 * torch.randn(count, features, generator=generator, dtype=torch.float64)).float()
    exact = rows.double()
    exact = (exact - exact.mean(0)).T @ (exact - exact.mean(0)) / (count - 1)
    found = RowStatistics(features)
    began = time.perf_counter()
    for part in rows.split(1024):
        found.update(part)
    seconds = time.perf_counter() - began
    naive = rows.T @ rows / count - torch.outer(rows.mean(0), rows.mean(0))
    errors = {
        name: float(torch.linalg.norm(one.double() - exact) / torch.linalg.norm(exact))
        for name, one in (("ours", found.covariance()), ("E[xx] - E[x]E[x], float32", naive))
    }
    console.print(f"covariance of mean 100, deviation 0.01: relative error {errors} ({seconds:.2f} s)")
    torch.manual_seed(0)
    sizes = (64, 64) if quick else (1024, 1024, 1024, 512)
    layers: list[torch.nn.Module] = []
    for inputs, outputs in itertools.pairwise(sizes):
        layers += [torch.nn.Linear(inputs, outputs), torch.nn.ReLU()]
    model = torch.nn.Sequential(*layers)
    batch = torch.randn(64 if quick else 1024, sizes[0])
    probes = {"plain": None, "probed": Probe(model, ProbeConfig(interval=1))}

    def step(look: Probe | None) -> None:
        if look is not None:
            look.step()
        model(batch).square().mean().backward()
        if look is not None:
            look.close()

    steps = {name: partial(step, look) for name, look in probes.items()}
    timings = interleave(steps, rounds=3 if quick else 15)
    more = timings["probed"].spread.median / timings["plain"].spread.median - 1
    console.print(f"a probed step takes {1 + more:.2f} times as long: {more / 100:.2%} at an interval of 100")
    return {
        "evidence": "measured",
        "errors": errors,
        "rows": count,
        "features": features,
        "seconds": {name: timing.spread.to_json() for name, timing in timings.items()},
        "overhead_at_interval_100": more / 100,
        "reached": {"cancellation": errors["ours"] < 1e-3},
    }


def _trials(
    shape: tuple[int, int, int], names: Sequence[str], config: DispatchConfig, outlier: float
) -> dict[str, Any]:
    """Choose a kernel for a layer by some timings, and time all kernels again to judge the choice.

    With an ``outlier``, one input of a row is so many times as large as the others.
    """
    m, n, k = shape
    generator = torch.Generator().manual_seed(m + n + k)
    weight, bias = torch.randn(n, k, generator=generator) / k**0.5, torch.randn(n, generator=generator)

    def draw(count: int, generator: torch.Generator) -> torch.Tensor:
        x = torch.randn(count, k, generator=generator)
        if outlier:
            x[:, :1] *= outlier
        return x

    product = Product("layer", "forward", weight, bias, draw, calibration=draw(1024, generator))
    config = config.model_copy(update={"rows": (m,)})
    choice = choose(product, m, try_all(product, chosen(names), config)[m], config)
    fresh = try_all(product, chosen(names), config)[m]
    times = {t.kernel: t.milliseconds for t in fresh}
    return {
        "shape": [m, n, k],
        "outlier": outlier,
        "milliseconds": times,
        "refused": {t.kernel: t.refused for t in fresh if t.refused},
        "kernel": choice.kernel,
        "times_fp32": times["fp32"] / times[choice.kernel],
    }


def _beside_uniform(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, Any]:
    """Return geometric means over layers: of the choices, and of each kernel that is accurate enough everywhere."""

    def mean(values: list[float]) -> float:
        return math.exp(sum(map(math.log, values)) / len(values))

    dispatched = mean([row["times_fp32"] for row in rows])
    uniform = {
        name: mean([row["milliseconds"]["fp32"] / row["milliseconds"][name] for row in rows])
        for name in names
        if all(name not in row["refused"] and math.isfinite(row["milliseconds"][name]) for row in rows)
    }
    best = max(uniform, key=uniform.__getitem__)
    return {
        "geometric_mean": dispatched,
        "uniform": uniform,
        "best": best,
        "over_best_uniform": dispatched / uniform[best],
    }


def _shapes(console: Console, folder: Path, quick: bool) -> dict[str, Any]:
    config = DispatchConfig(rounds=1, draws=1, judged_rows=16) if quick else DispatchConfig(rounds=15, draws=2)
    names = [name for name, one in CANDIDATES.items() if not one.emulated]
    shapes = SHAPES[:2] if quick else SHAPES
    found: dict[str, dict[str, Any]] = {}
    rows: list[dict[str, Any]] = []
    for title, outliers in (("alike", ()), ("every other with outliers", range(1, len(shapes), 2))):
        table = Table(title=f"milliseconds of a layer, quantisation of its input included; inputs {title}")
        for heading in ("rows x outputs x inputs", *names, "chosen", "times fp32"):
            table.add_column(heading)
        mine = []
        for number, shape in enumerate(shapes):
            row = _trials(shape, names, config, _OUTLIER if number in outliers else 0.0)
            mine.append(row)
            times = [row["milliseconds"][name] for name in names]
            cells = ["" if math.isnan(one) else f"{one:.3f}" for one in times]
            table.add_row(" x ".join(map(str, shape)), *cells, row["kernel"], f"{row['times_fp32']:.2f}")
        console.print(table)
        found[title] = one = _beside_uniform(mine, names)
        rows += mine
        console.print(
            f"dispatched {one['geometric_mean']:.2f} times fp32 in geometric mean, {one['best']} everywhere "
            f"{one['uniform'][one['best']]:.2f}: {one['over_best_uniform']:.2f} times as fast"
        )
    alike, mixed = found.values()
    return {
        "evidence": "measured; choices are judged by other timings than those that they were made by",
        "rows": rows,
        **alike,
        "with_outliers": mixed,
        "targets": {"times_fp32": LEAST_TIMES, "over_uniform": LEAST_OVER_UNIFORM},
        "reached": {
            "times_fp32": alike["geometric_mean"] >= LEAST_TIMES,
            "over_uniform": alike["over_best_uniform"] >= LEAST_OVER_UNIFORM,
        },
    }


def _model(console: Console, folder: Path, quick: bool) -> dict[str, Any]:
    run = trained(console, "wukong", folder, quick)
    found = probe(run, DispatchConfig(rows=(BATCH,), rounds=3 if quick else 15), BUDGET, say=console.print)
    splits = prepare(load(run.recipe_file).data)
    _, model = restore_model(run, splits.features, CPU)
    plans = {"fp32": found.profile.plan.uniform("fp32"), "plan": found.profile.plan}
    usable = [name for name in found.profile.uniform_milliseconds() if name != "fp32"]
    plans.update({name: found.profile.plan.uniform(name) for name in usable})
    modules = {name: planned(model, plan) for name, plan in plans.items()}
    batches = [batch for batch, _ in zip(Loader(splits.test, BATCH).epoch(), range(16), strict=False)]
    score, turns = scorer(model, CPU, "fp32"), dict.fromkeys(plans, 0)

    def run_once(name: str) -> None:
        with replaced(model, modules[name]):
            for _ in range(8):
                turns[name] += 1
                score(batches[turns[name] % len(batches)])

    timings = interleave({name: partial(run_once, name) for name in plans}, rounds=3 if quick else 25, warmup=2)
    ratios: dict[str, Spread] = {name: times_faster(timings["plan"], timing) for name, timing in timings.items()}
    best = min(usable, key=lambda name: timings[name].spread.median, default="fp32")
    table = Table(title=f"a trained Wukong, batches of {BATCH}", title_justify="left")
    for heading in ("kernels", "ms", "the plan is so many times as fast"):
        table.add_column(heading)
    for name, timing in timings.items():
        r = ratios[name]
        table.add_row(name, f"{1e3 * timing.spread.median / 8:.3f}", f"{r.median:.2f} ({r.low:.2f} to {r.high:.2f})")
    console.print(table)
    return {
        "evidence": "measured; NE on the validation split",
        "change": found.change._asdict(),
        "budget": BUDGET,
        "returned": found.returned,
        "kernels": {choice.site: choice.kernel for choice in found.profile.plan.choices},
        "layers_geometric_mean": found.profile.geometric_mean(),
        "milliseconds": {name: 1e3 * timing.spread.median / 8 for name, timing in timings.items()},
        "plan_over": {name: ratio.to_json() for name, ratio in ratios.items()},
        "best_uniform": best,
        "reached": {
            "over_uniform": ratios[best].median >= LEAST_OVER_UNIFORM,
            "ne": found.change.mean <= BUDGET,
        },
    }


def _mods(console: Console, folder: Path, quick: bool, pieces: FinishedPieces) -> dict[str, Any]:
    of_times, of_quality = times(console, quick), quality(console, folder, quick, pieces)
    return {
        "evidence": "measured",
        "times": of_times,
        "quality": of_quality,
        "reached": {**of_times.pop("reached"), **of_quality.pop("reached")},
    }


PARTS: dict[Part, Callable[..., dict[str, Any]]] = {
    Part.probe: _probe,
    Part.shapes: _shapes,
    Part.model: _model,
    Part.mods: _mods,
}


main = Program(
    "loka",
    PARTS,
    "Probe, plan, and time the plan beside fp32 and uniform choices; what Mods do. An interrupted ``mods`` goes on.",
).command()


if __name__ == "__main__":
    typer.run(main)
