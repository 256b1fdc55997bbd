"""Where a trained ranking model can be computed in lower precision: probed, profiled, planned, checked."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from cordillera.data.datasets import prepare
from cordillera.errors import DependencyError, NumericsError
from cordillera.models.ranking.base import RankingModel
from cordillera.numerics.dispatch import DispatchConfig, Profile, forward_products, planned, profile, weights_digest
from cordillera.numerics.precision_plan import Choice, PrecisionPlan
from cordillera.numerics.probe import Probe, ProbeConfig, Probed
from cordillera.numerics.selection import Change, check_budget
from cordillera.numerics.self_test import self_test
from cordillera.numerics.sites import replace, replaced
from cordillera.run import Run
from cordillera.training.trainer import scorer, select_device
from cordillera.workflows.quantization import BUDGET
from cordillera.workflows.ranking import load_model, recipe_of, with_threads
from cordillera.workflows.scores import check_weights, scored, some_batches

PROBE_FILE, PLAN_FILE = "probe.safetensors", "precision-plan.json"


def _silent(text: str) -> None:
    """Say nothing."""


@dataclass(frozen=True)
class Probing:
    """What :func:`probe` found.

    Attributes:
        statistics: The file of what layers saw.
        plan_file: The file of the plan.
        profile: The plan with all that was tried for it.
        change: Of NE on the split that was searched on, of the plan that was written.
        returned: Layers that went back to fp32 so that the budget is kept, in order.
    """

    statistics: Path
    plan_file: Path
    profile: Profile
    change: Change
    returned: list[str]


def probe(
    run: Run | Path | str,
    config: DispatchConfig | None = None,
    budget: float = BUDGET,
    *,
    samples: int = 16_384,
    say: Callable[[str], object] = _silent,
) -> Probing:
    """Gather what a model's layers see, and choose the fastest kernel for each that is accurate enough.

    A layer's kernels are judged on inputs drawn from its statistics. The whole plan is then scored on the validation
    split; while NE rises by more than the budget, the layer of the least signal-to-noise ratio goes back to fp32.

    Args:
        run: A trained ranking run.
        config: Bounds, sizes and counts.
        budget: Largest relative rise of NE.
        samples: Of the training split that are probed.
        say: Told of what is going on.

    Raises:
        DependencyError: the run is of a device other than a CPU.
        NumericsError: the budget is negative or no number, or a score or a weight is not finite.
    """
    run = run if isinstance(run, Run) else Run(run)
    config = config or DispatchConfig()
    check_budget(budget)
    self_test()
    recipe = recipe_of(run)
    if select_device(recipe.device).type != "cpu":
        raise DependencyError("plans of ranking runs are for CPUs", where="device", remedy="set device = 'cpu'")
    with with_threads(recipe.threads):
        splits = prepare(recipe.data)
        _, model = load_model(run, splits.features, torch.device("cpu"))
        check_weights(model)
        score = scorer(model, torch.device("cpu"), "fp32")
        batches = some_batches(splits.train, recipe, samples)
        with Probe(model, ProbeConfig(interval=1)) as gathered:
            for batch in batches:
                gathered.step()
                score(batch)
        say(f"probed {len(gathered.inputs)} layers on {sum(map(len, batches)):,} samples")
        products = forward_products(model, gathered.inputs)
        found = profile(products, config)
        rows = {product.site: product.calibration for product in products}
        split = splits.validation if len(splits.validation) else splits.train
        size = max(config.rows)  # more rows than the plan knows would be computed in fp32
        base = scored(model, split, splits, batch_size=size)
        plan, returned = dataclasses.replace(found.plan, weights=weights_digest(model)), list[str]()
        while True:
            with replaced(model, planned(model, plan, rows)):
                change = base.beside(scored(model, split, splits, batch_size=size))
            lowered = [choice for choice in plan.choices if choice.kernel != "fp32"]
            say(f"{len({c.site for c in lowered})} layers in lower precision: NE {100 * change.mean:+.4f} %")
            if change.mean <= budget or not lowered:
                break
            worst = min(lowered, key=_ratio).site
            returned.append(worst)
            plan = plan.with_reference(worst, "costs more NE than the budget")
        # Both at the end: whoever ends this earlier keeps the plan and the statistics that he had.
        gathered.save(run.folder / PROBE_FILE)
        plan = dataclasses.replace(plan, statistics=_digest(run.folder / PROBE_FILE))
        plan.save(run.folder / PLAN_FILE)
        return Probing(run.folder / PROBE_FILE, run.folder / PLAN_FILE, Profile(plan, found.trials), change, returned)


def _ratio(choice: Choice) -> float:
    return float(choice.expected["accuracy"]["sqnr_db"])


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def load_planned(run: Run, model: RankingModel, allow_stale: bool = False) -> tuple[RankingModel, int]:
    """A model with the kernels of its run's plan, and the most rows for which the plan has any.

    Args:
        run: Probed before.
        model: Of the run; changed in place.
        allow_stale: Take a plan that was made on another machine or with other libraries.

    Raises:
        NumericsError: there is no plan, it is damaged, or it was made elsewhere, for other weights or with other
            statistics than lie beside it.
    """
    plan = PrecisionPlan.load(run.folder / PLAN_FILE, allow_stale=allow_stale)
    if plan.weights != weights_digest(model):
        raise NumericsError(
            "was made for other weights", where=str(run.folder / PLAN_FILE), remedy="cordillera probe RUN makes it anew"
        )
    statistics = Probed(run.folder / PROBE_FILE).inputs
    if plan.statistics != _digest(run.folder / PROBE_FILE):
        raise NumericsError(
            "holds other statistics than the plan was made with", where=str(run.folder / PROBE_FILE),
            remedy="cordillera probe RUN makes both anew",
        )  # fmt: skip
    products = forward_products(model, statistics)
    for name, module in planned(model, plan, {p.site: p.calibration for p in products}).items():
        replace(model, name, module)
    return model, max((choice.rows for choice in plan.choices), default=1)
