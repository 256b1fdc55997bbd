"""How well NE by shared weights ranks architectures: a supernet of the table's space beside the table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from _rankitect_table import RECIPE, read_table
from rich.console import Console
from scipy.stats import kendalltau

from cordillera import recipe as recipes
from cordillera import workflows
from cordillera.data.ranking.datasets import prepare
from cordillera.data.ranking.loader import Loader
from cordillera.models.ranking.graphs.config import GraphConfig
from cordillera.models.ranking.graphs.supernet import Supernet
from cordillera.recipe import RankingRecipe
from cordillera.run import Run
from cordillera.training.ranking.architecture_search.space import SearchSpace, load_space
from cordillera.workflows.architectures.trials import SearchTrial, TrialConfig, try_candidate, with_overrides
from cordillera.workflows.trained import recipe_of, restore_model, splits_of

EPOCHS = 12
COMPARED, FINE_TUNED = 200, 100
STEPS = 40


def _supernet(folder: Path, quick: bool) -> tuple[Path, float]:
    """Train a supernet of the table's space on the table's data; return its run, and the seconds."""
    space = load_space("small").blocks
    assert space is not None
    content: dict[str, Any] = {
        **RECIPE,
        "model": {"name": "supernet", "embedding_dim": 16, "blocks": space.model_dump(mode="json")},
        "training": {**RECIPE["training"], "epochs": EPOCHS},
    }
    if quick:
        content["training"]["max_steps"] = 8
    recipe = recipes.validate(content)
    outcome = workflows.train(recipe, folder / "supernet")
    return folder / "supernet", outcome.report.seconds


def shared(console: Console, quick: bool, folder: Path) -> dict[str, Any]:
    """Compare NE by shared weights, as they are and fine-tuned, with the table's, by Kendall's rank correlation."""
    found = read_table()
    run, seconds = _supernet(folder, quick)
    recipe = recipes.validate(RECIPE)
    assert isinstance(recipe, RankingRecipe)
    splits, content = prepare(recipe.data), recipe.model_dump(mode="json", exclude_none=True)
    # fine-tuning continues at a lower rate, and does not warm up
    content["training"] |= {"learning_rate": RECIPE["training"]["learning_rate"] / 2}
    names = sorted(found.scores)
    chosen = [names[index] for index in np.random.default_rng(0).permutation(len(names))[: 6 if quick else COMPARED]]
    results = []
    for steps, count in ((0, len(chosen)), (STEPS, 3 if quick else FINE_TUNED)):
        config = TrialConfig(supernet=str(run), fine_tune=steps, sample=0)
        trials: list[SearchTrial] = []
        for name in chosen[:count]:
            trials.append(try_candidate(content, found.space.overrides(found.genomes[name]), splits, config))
        alone = [found.scores[name].ne for name in chosen[:count]]
        tau = float(kendalltau([one.ne for one in trials], alone)[0])
        per_trial = float(np.mean([one.seconds for one in trials]))
        console.print(f"  {steps} steps: rank correlation {tau:.3f} over {count} architectures, {per_trial:.2f} s each")
        results.append({"steps": steps, "architectures": count, "tau": tau, "seconds": per_trial,
                        "shared": [one.ne for one in trials], "alone": alone})  # fmt: skip
    return {
        "evidence": "measured",
        "epochs": EPOCHS,
        "supernet_seconds": seconds,
        "of_two_seeds": found.tau_of_seeds(),
        "equal": _equal(run, found.space, content, chosen),
        "results": results,
    }


def _equal(run: Path, space: SearchSpace, content: dict[str, Any], names: list[str]) -> dict[str, int]:
    """Count architectures that score to the bit as in the supernet once they are cut out of it."""
    found, of_run = read_table(), Run(run)
    splits = splits_of(of_run, recipe_of(of_run))
    _, net = restore_model(of_run, splits.features, torch.device("cpu"))
    assert isinstance(net, Supernet)
    net.eval()
    batch, equal = next(iter(Loader(splits.validation, 512).epoch())), 0
    for name in names:
        recipe = with_overrides(content, space.overrides(found.genomes[name]))
        assert isinstance(recipe.model, GraphConfig)
        net.choose(recipe.model)
        alone = workflows.model_of(recipe, splits.features).eval()
        tables = {f"tables.{key}": value for key, value in net.tables.state_dict().items()}
        alone.load_state_dict({**net.stand_alone(recipe.model), **tables})
        with torch.no_grad():
            equal += bool(torch.equal(alone(batch), net(batch)))
    return {"compared": len(names), "equal": equal}
