"""Effects of bit flips on models: ``cordillera bench pvf`` or ``python benchmarks/pvf.py``.

Parts: ``models`` (PVF of the components of a DLRM, a LeNet and a transformer), ``formats`` (weights stored in bfloat16
and float32; int8 rows and their scales), ``speed`` (replay compared with flipping and running one fault after another).
Each writes ``results/pvf-PART.json``.
"""

from __future__ import annotations

import enum
import functools
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import typer
from _program import Program
from _pvf_models import (
    DensePart,
    Target,
    classifier,
    int8_tables,
    lenet_part,
    stored_as,
    trained_dlrm,
    trained_lenet,
    trained_transformer,
    transformer_part,
)
from _tables import print_notes, print_rows
from _timing import interleave, times_faster
from rich.console import Console

from cordillera.models.ranking.base import RankingModel
from cordillera.numerics.faults.fault_model import FaultModel, draw
from cordillera.numerics.faults.vulnerability import Campaign, Vulnerability
from cordillera.workflows.injection import components_of, replay_of

RECIPE = "adult-dlrm"
# Inputs that share a fault are correlated, so slow models get fewer inputs and as many faults.
SAMPLES = 128
IMAGES = 32
SEQUENCES = 12
AT_LEAST = 5.0


class Part(str, enum.Enum):
    """Parts of the benchmark."""

    models = "models"
    formats = "formats"
    speed = "speed"


@functools.cache
def _dlrm(quick: bool) -> tuple[RankingModel, Any, str]:
    return trained_dlrm(RECIPE, 10 if quick else 300, SAMPLES)


@functools.cache
def _targets(quick: bool) -> list[Target]:
    model, batch, quality = _dlrm(quick)
    lenet = classifier("LeNet", *trained_lenet(1 if quick else 30, IMAGES), lenet_part)
    transformer = classifier("transformer", *trained_transformer(10 if quick else 400, SEQUENCES), transformer_part)
    return [Target("DLRM", components_of(model), replay_of(model, batch), quality), lenet, transformer]


def _percent(value: float) -> str:
    return f"{100 * value:.4f} %"


def _row(model: str, found: Vulnerability) -> list[str]:
    rate = found.rate()
    silent = found.rate("silent").value / rate.value if rate.value else float("nan")
    cells = [f"{found.injections:,}", _percent(rate.value), f"{_percent(rate.low)} to {_percent(rate.high)}"]
    return [model, found.name, *cells, f"{silent:.0%}", f"{found.share_of_part('exponent'):.1%}"]


HEADINGS = ["model", "component", "faults", "PVF", "95 % interval", "silent", "exponent bits' share"]


def _models(console: Console, quick: bool) -> dict[str, Any]:
    rows, results, notes = [], [], []
    for target in _targets(quick):
        rounds = 8 if quick else 3072 if target.name == "DLRM" else 256
        campaign = Campaign(target.components, target.replay)
        widths = []
        for share in (16, 4, 1):
            campaign.run(max(2, rounds // share))
            widths.append({name: found.rate().half_width for name, found in campaign.found.items()})
        rows += [_row(target.name, found) for found in campaign.found.values()]
        results.append(
            {
                "model": target.name,
                "quality": target.quality,
                "inputs": target.replay.inputs,
                "judged": target.replay.judged,
                "judged_again_by_flipping": target.replay.repeated,
                "judged_one_by_one": target.replay.one_by_one,
                "half_widths": {"rounds": [max(2, rounds // share) for share in (16, 4, 1)], "values": widths},
                "components": [found.to_json() for found in campaign.found.values()],
            }
        )
        notes.append(f"{target.name}: {target.quality}; {target.replay.repeated:,} of {target.replay.judged:,} faults "
                     "judged again by the flipped model")  # fmt: skip
        if target.name == "DLRM":
            rates = {name: found.rate() for name, found in campaign.found.items()}
            order = [rates[name] for name in ("top MLP", "bottom MLP", "tables")]
            apart = all(first.low > second.high for first, second in itertools.pairwise(order))
            results[-1]["ordered_with_intervals_apart"] = apart
            notes.append(f"top MLP above bottom MLP above tables, intervals apart: {'yes' if apart else 'no'}")
            ratios = [a / b for a, b in zip(widths[0].values(), widths[2].values(), strict=True) if b]
            shrunk = ", ".join(f"{ratio:.1f}" for ratio in ratios)
            notes.append(f"intervals of a sixteenth of the faults are so many times as wide (4 expected): {shrunk}")
    print_rows(console, "PVF of single bits", HEADINGS, rows)
    print_notes(console, notes)
    return {"evidence": "measured", "recipe": RECIPE, "results": results, "notes": notes}


def _dense_part(name: str) -> str | None:
    child = name.split(".")[1]
    return None if child == "tables" else "bottom MLP" if child == "bottom" else "top MLP"


def _formats(console: Console, quick: bool) -> dict[str, Any]:
    model, batch, _ = _dlrm(quick)
    with torch.no_grad():
        embeddings = model.tables(batch.sparse)
    dense = DensePart(model)
    lenet, images, _ = trained_lenet(1 if quick else 30, IMAGES)
    targets = []
    for dtype, name in ((torch.float32, "fp32"), (torch.bfloat16, "bf16")):
        targets.append(stored_as(dtype, f"DLRM in {name}", dense, (batch.dense, embeddings), _dense_part))
        targets.append(stored_as(dtype, f"LeNet in {name}", lenet, (images,), lenet_part))
    targets.append(int8_tables(model, batch))
    rows, results = [], []
    for target in targets:
        campaign = Campaign(target.components, target.replay)
        campaign.run(4 if quick else 1024 if target.name == "int8 tables" else 96)
        rows += [_row(target.name, found) for found in campaign.found.values()]
        results.append({"model": target.name, "components": [found.to_json() for found in campaign.found.values()]})
    print_rows(console, "PVF of single bits by stored format", HEADINGS, rows)
    of = {found["name"]: found["pvf"] for found in results[-1]["components"]}
    notes = []
    if of["int8 payload"]["value"]:
        times = of["fp32 scales"]["value"] / of["int8 payload"]["value"]
        notes.append(f"a flipped bit of a scale is {times:,.0f} times as harmful as one of the int8 payload")
    print_notes(console, notes)
    return {"evidence": "measured", "recipe": RECIPE, "results": results, "notes": notes}


def _speed(console: Console, quick: bool) -> dict[str, Any]:
    rounds, repeats = (2, 3) if quick else (64, 5)
    rows, results = [], []
    for target in _targets(quick):
        hits = [one for part in target.components for one in draw(part, FaultModel(), 1, range(rounds))]

        def judge(how: Callable[..., Any], hits: list[Any] = hits) -> list[Any]:
            return [how(one.region, one.bits) for one in hits]

        pairs = list(zip(judge(target.replay), judge(target.replay.flip_each), strict=True))
        same = all(a.silent.equal(b.silent) and a.detected.equal(b.detected) for a, b in pairs)
        contenders = {"replay": partial(judge, target.replay), "one by one": partial(judge, target.replay.flip_each)}
        timings = interleave(contenders, rounds=repeats, warmup=0)
        times = times_faster(timings["replay"], timings["one by one"])
        faults = sum(len(one.bits) for one in hits)
        rate = faults / timings["replay"].spread.median
        results.append(
            {
                "model": target.name,
                "faults": faults,
                "inputs": target.replay.inputs,
                "verdicts_are_the_same": same,
                "times_faster": times.to_json(),
                "target_at_least": AT_LEAST,
                "faults_per_second": rate,
                "timings": {name: timing.to_json() for name, timing in timings.items()},
            }
        )
        verdict = "reached" if times.median >= AT_LEAST else "[bold red]missed[/]"
        rows.append(
            [
                target.name,
                f"{target.replay.inputs}",
                "the same" if same else "[bold red]differ[/]",
                f"{times.median:.1f}",
                f"{times.low:.1f} to {times.high:.1f}",
                f"{AT_LEAST:g} {verdict}",
                f"{rate:,.0f}",
            ]
        )
    headings = ["model", "inputs", "verdicts", "times as fast as one by one", "quartiles", "at least", "faults/s"]
    print_rows(console, "replay of single-bit faults, as many in each component", headings, rows)
    return {"evidence": "measured", "recipe": RECIPE, "results": results}


PARTS: dict[Part, Callable[[Console, bool], dict[str, Any]]] = {
    Part.models: _models,
    Part.formats: _formats,
    Part.speed: _speed,
}


main = Program(
    "pvf",
    PARTS,
    "Measure how vulnerable models are to flipped bits, by component, bit and format, and how fast that goes.",
    part_help="What to measure; repeat it for several. Default: all.",
    quick_help="Tiny sizes: shows that it works, its figures mean nothing.",
    threads=1,
).command()


if __name__ == "__main__":
    typer.run(main)
