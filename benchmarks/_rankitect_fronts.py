"""Fronts of NE and FLOPs: architectures that a search found, and those of engineers in several sizes."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _rankitect_table import RECIPE
from _results import RESULTS
from rich.console import Console

from cordillera import recipe as recipes
from cordillera import workflows
from cordillera.reports.ranking.comparison import mean_interval
from cordillera.training.ranking.architecture_search.searchers import SearchScore, front
from cordillera.workflows.architectures.search import SearchCandidate, SearchOutcome
from cordillera.workflows.architectures.trials import TrialConfig

SEEDS = 5
WIDTHS = ((32,), (128, 64), (256, 128))
DIMS = (2, 4, 8, 16)
MOST_FLOPS = 1_000_000
TRIALS = {"synthetic": 320, "movielens": 96}


def hypervolume(scores: Sequence[SearchScore], *, ne: float, flops: float) -> float:
    """Return the area that scores dominate, in units of NE times the natural logarithm of FLOPs.

    Args:
        scores: Scores; those that are worse than the reference in either do not count.
        ne: NE of the reference point, the worst that counts.
        flops: FLOPs of the reference point, the most that count; FLOPs below 1 count as 1.
    """
    inside = [score for score in scores if score.ne < ne and score.flops < flops]
    area, best = 0.0, ne
    for index in front(inside):
        score = inside[index]
        area += (best - score.ne) * (math.log(flops) - math.log(max(1, score.flops)))
        best = score.ne
    return area


def _recipe(data: str) -> dict[str, Any]:
    """Return the training that all architectures of a data set share, as plain values."""
    if data == "synthetic":
        return RECIPE
    shipped = recipes.load("movielens-dnn", ["training.precision=fp32", "tables.weight_decay=0.0", "tables.l2=1.0"])
    return shipped.model_dump(mode="json", exclude_none=True, exclude={"description"})


def _hand_made(dropout: float) -> list[dict[str, Any]]:
    """Return the models of engineers, each in several sizes."""
    found: list[dict[str, Any]] = [{"name": "lr"}]
    for dim in DIMS:
        found.append({"name": "fm", "embedding_dim": dim})
        for mlp, rows in zip(WIDTHS, (4, 8, 16), strict=True):
            deep = {"embedding_dim": dim, "dropout": dropout}
            found += [
                {"name": "dnn", **deep, "embedding_init": 0.01, "mlp": mlp, "dense_vectors": True},
                {"name": "dlrm", **deep, "embedding_init": 0.01, "bottom_mlp": [64], "top_mlp": mlp},
                {"name": "dcn", **deep, "embedding_init": 0.01, "mlp": mlp, "cross_layers": 2, "dense_vectors": True},
                {"name": "dhen", **deep, "embeddings": rows, "top_mlp": mlp},
                {"name": "wukong", **deep, "fmb_embeddings": rows, "lcb_embeddings": rows, "fmb_mlp": [128],
                 "top_mlp": mlp, "dense_mlp": [], "dense_embeddings": 8},
            ]  # fmt: skip
    return [{"model": model} for model in found]


def _described(one: SearchCandidate, outcome: SearchOutcome) -> dict[str, Any]:
    judged = outcome.judged[one.name]
    return {
        "name": one.name,
        "model": one.overrides["model"]["name"],
        "overrides": one.overrides,
        "flops": judged.flops,
        "parameters": judged.parameters,
        "chosen_by": one.trial.ne,
        "validation": list(judged.ne_of_seeds),
        "test": list(judged.test_ne_of_seeds),
    }


def _area(chosen: list[dict[str, Any]], seed: int | None, ne: float, flops: float) -> float:
    """Return the hypervolume of architectures on the test split, of one seed or of the mean."""
    scores = [
        SearchScore(statistics.fmean(one["test"]) if seed is None else one["test"][seed], one["flops"])
        for one in chosen
    ]
    return hypervolume(scores, ne=ne, flops=flops)


def compared(hand_made: list[dict[str, Any]], found: list[dict[str, Any]], ne: float, flops: float) -> dict[str, Any]:
    """Return hypervolumes beside those of the hand-made models, on the test split, with a reference point."""
    result: dict[str, Any] = {"ne": ne, "flops": flops}
    for name, chosen in (("found", found), ("both", [*hand_made, *found])):
        areas = {seed: (_area(chosen, seed, ne, flops), _area(hand_made, seed, ne, flops))
                 for seed in (None, *range(len(found[0]["test"])))}  # fmt: skip
        ratios = {seed: area / base if base else math.nan for seed, (area, base) in areas.items()}
        of_seeds = [ratio for seed, ratio in ratios.items() if seed is not None]
        interval = mean_interval(of_seeds)
        result[name] = {"ratio": ratios[None], "of_seeds": of_seeds, "low": interval.low, "high": interval.high}
    return result


def _measured(data: str, quick: bool, folder: Path, console: Console) -> dict[str, Any]:
    """Search on a data set, and judge what was found beside the hand-made models."""
    content, hand_made = _recipe(data), _hand_made(0.2 if data == "movielens" else 0.0)
    if quick:
        content, hand_made = {**content, "data": {**content["data"], "synthetic": {"rows": 4_000}}}, hand_made[:3]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "recipe.toml"
    recipe = recipes.validate(content)
    path.write_text(recipes.dump(recipe))
    config = workflows.SearchConfig(judge=2 if quick else SEEDS, trial=TrialConfig(most_flops=MOST_FLOPS, sample=0))

    def show(one: SearchCandidate, planned: int) -> None:
        trial = one.trial
        console.print(f"  {one.number + 1}/{planned} {one.name} {trial.stage} {trial.ne:.4f} {trial.flops:,}")

    sides: dict[str, SearchOutcome] = {}
    for side, trials in (("hand-made", 0), ("found", 8 if quick else TRIALS[data])):
        console.print(f"{data}: {side}")
        sides[side] = workflows.search(
            path,
            "blocks",
            config.model_copy(update={"trials": trials}),
            proposals=() if trials else hand_made,
            folder=folder / side,
            on_candidate=show,
            say=console.print,
        )
    fronts = {side: _front(outcome) for side, outcome in sides.items()}
    known, chosen = fronts["hand-made"], {side: [one for one in all_ if one["chosen"]] for side, all_ in fronts.items()}
    # the simplest model and the largest one bound what engineers offer
    lr = statistics.fmean(next(one["test"] for one in known if one["model"] == "lr"))
    most = max(one.trial.flops for one in sides["hand-made"].candidates if one.trial.is_finished)
    return {
        "data": data,
        "recipe": content,
        "hand_made": fronts["hand-made"],
        "found": fronts["found"],
        "hypervolume": [compared(chosen["hand-made"], chosen["found"], ne, most) for ne in (lr, 1.0)],
        "searches": {side: _record(outcome) for side, outcome in sides.items()},
    }


def _front(outcome: SearchOutcome) -> list[dict[str, Any]]:
    """Return the front of a search; ``chosen`` are those of the front by the validation split with new seeds too."""
    found = [_described(one, outcome) for one in outcome.front]
    scores = [SearchScore(statistics.fmean(one["validation"]), one["flops"]) for one in found]
    kept = set(front(scores))
    return [{**one, "chosen": index in kept} for index, one in enumerate(found)]


def _record(outcome: SearchOutcome) -> dict[str, Any]:
    trials = [one.trial for one in outcome.candidates]
    rows = [
        [one.name, one.trial.stage, round(one.trial.ne, 5) if one.trial.is_finished else None, one.trial.flops]
        for one in outcome.candidates
    ]
    return {
        "trials": len(trials),
        "thread_seconds": round(math.fsum(one.seconds for one in trials)),
        "thread_seconds_of_judging": round(math.fsum(one.seconds for one in outcome.judged.values())),
        "columns": ["name", "stage", "NE (validation)", "FLOPs"],
        "rows": rows,
    }


def fronts(console: Console, quick: bool, folder: Path) -> dict[str, Any]:
    """Compare the fronts of searches with those of hand-made models; an interrupted comparison is continued."""
    kept = folder if quick else RESULTS / "quick" / "rankitect-fronts"
    results = []
    for data in ("synthetic",) if quick else TRIALS:
        results.append(_measured(data, quick, kept / data, console))
        for one in results[-1]["hypervolume"]:
            ratios = f"{one['both']['ratio']:.3f} with found models, {one['found']['ratio']:.3f} of these alone"
            console.print(f"{data}: hypervolume up to NE {one['ne']:.4f}, beside hand-made models: {ratios}")
    return {"evidence": "measured", "seeds": SEEDS, "results": results}
