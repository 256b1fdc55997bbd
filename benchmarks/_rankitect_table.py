"""A table of all architectures of a small space with their NE, by which searchers are judged in milliseconds."""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from _results import RESULTS
from rich.console import Console

from cordillera import recipe as recipes
from cordillera import workflows
from cordillera.recipe import RankingRecipe
from cordillera.training.ranking.architecture_search.searchers import Score, make_searcher
from cordillera.training.ranking.architecture_search.space import Genome, SearchSpace, SpaceConfig, load_space
from cordillera.workflows.architectures.trials import TrialConfig

RECIPE: dict[str, Any] = {
    "name": "table",
    "seed": 1,
    "data": {
        "dataset": "synthetic",
        "batch_size": 1024,
        "synthetic": {"rows": 60_000, "dense": 6, "categorical": 12, "lists": 0, "largest_vocabulary": 100},
    },
    "model": {"name": "graph", "embedding_dim": 16},
    "tables": {"name": "adam", "learning_rate": 0.01},
    "training": {"precision": "fp32", "learning_rate": 0.004, "decay": "linear", "epochs": 2},
}
SEEDS = 2
REPEATS = 50
TOP = 0.01
SEARCHERS = ("random", "evolution", "predictor", "tpe", "nsga2")


def table(console: Console, folder: Path) -> dict[str, Any]:
    """Train every architecture of the shipped space ``small`` on a synthetic log; an interrupted one is continued."""
    recipe = recipes.validate(RECIPE)
    assert isinstance(recipe, RankingRecipe)
    path = folder / "recipe.toml"
    path.write_text(recipes.dump(recipe))
    config = workflows.SearchConfig(
        searcher="grid", goal="ne", trials=10**6, batch=64, trial=TrialConfig(sample=0, seeds=SEEDS)
    )
    outcome = workflows.search(
        path,
        "small",
        config,
        folder=RESULTS / "quick" / "rankitect-table",
        on_candidate=lambda one, _: console.print(f"  {one.number} {one.name} {one.trial.stage} {one.trial.ne:.4f}"),
    )
    space = load_space("small")
    by_name = {one.name: one for one in outcome.candidates}
    made, rows = SearchSpace(space, recipe.model.model_dump(mode="json", exclude_none=True)), []
    for genome in made.enumerate():
        found = by_name.pop(made.identify(genome), None)
        if found is not None:
            trial = found.trial
            ne = [round(one, 6) for one in trial.ne_of_seeds]
            rows.append([list(genome), found.name, ne, trial.flops, trial.parameters])
    best = min(outcome.candidates, key=lambda one: one.trial.ne)
    console.print(f"{len(rows)} architectures; the best has NE {best.trial.ne:.4f}")
    return {
        "evidence": "measured",
        "recipe": RECIPE,
        "space": space.model_dump(mode="json"),
        "genomes": made.size,
        "columns": ["genome", "name", "NE of seeds", "FLOPs", "parameters"],
        "rows": rows,
    }


class ArchitectureTable:
    """NE and FLOPs of all architectures of a space, read from the result file."""

    def __init__(self, content: dict[str, Any]) -> None:
        self.space = SearchSpace(SpaceConfig.model_validate(content["space"]), content["recipe"]["model"])
        self.scores = {
            name: Score(math.fsum(ne) / len(ne) if ne else math.inf, flops) for _, name, ne, flops, _ in content["rows"]
        }
        self.genomes: dict[str, Genome] = {name: tuple(genome) for genome, name, *_ in content["rows"]}
        ranked = sorted(self.scores, key=lambda name: self.scores[name].ne)
        self.top = set(ranked[: max(1, round(TOP * len(ranked)))])
        self.best = self.scores[ranked[0]].ne

    def until_top(self, searcher: str, seed: int) -> tuple[int, list[float]]:
        """Return after how many evaluations a searcher met the best percent, and its regret after each evaluation."""
        made = make_searcher(searcher, self.space, seed, "ne")
        met, least, regrets = 0, math.inf, []
        for number in range(1, len(self.scores) + 1):
            genome = made.ask()
            if genome is None:
                break
            name = self.space.identify(genome)
            score = self.scores[name]
            made.tell(genome, score)
            least = min(least, score.ne)
            regrets.append(least - self.best)
            if name in self.top:
                met = number
                break
        return met, regrets


@cache
def read_table() -> ArchitectureTable:
    """Read the committed table."""
    return ArchitectureTable(json.loads((RESULTS / "rankitect-table.json").read_text()))


def judged(console: Console, quick: bool) -> dict[str, Any]:
    """Let every searcher look for the best percent of the table, from several seeds."""
    found, results = read_table(), []
    for searcher in SEARCHERS:
        counts, at = [], {16: [], 32: [], 64: []}  # type: ignore[var-annotated]
        for seed in range(2 if quick else REPEATS):
            met, regrets = found.until_top(searcher, seed)
            counts.append(met)
            for number, values in at.items():
                values.append(regrets[min(number, len(regrets)) - 1])
        mean = float(np.mean(counts))
        results.append(
            {
                "searcher": searcher,
                "evaluations": counts,
                "mean": mean,
                "regret": {str(number): float(np.mean(values)) for number, values in at.items()},
            }
        )
        console.print(f"  {searcher}: the best percent after {mean:.1f} evaluations on average of {len(counts)}")
    return {"evidence": "measured", "architectures": len(found.scores), "top": len(found.top), "results": results}
