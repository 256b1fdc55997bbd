"""Lower precision in trained ranking models: statistics of inputs, kernel plans, and checks of quality."""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from cordillera.errors import DependencyError, NumericsError, TrainingError
from cordillera.files import replacing
from cordillera.models.ranking.base import RankingModel
from cordillera.numerics.dispatch.dispatch import DispatchConfig, Profile, apply, forward_products, planned, profile
from cordillera.numerics.dispatch.plan import KernelChoice, PrecisionPlan
from cordillera.numerics.dispatch.probe import Probe, ProbeConfig, Probed
from cordillera.numerics.dispatch.row_statistics import RowStatistics
from cordillera.numerics.dispatch.training_products import profile_training, trained_layers
from cordillera.numerics.formats.cast_checks import self_test
from cordillera.numerics.inference.selection import BUDGET, Change, check_budget
from cordillera.numerics.sites import replaced, sites
from cordillera.run import Run, disk_errors
from cordillera.training.ranking.scoring import scorer, select_device
from cordillera.training.ranking.tasks.losses import weighted_loss
from cordillera.training.ranking.trainer import TRAINING_PROBE
from cordillera.workflows.processes import Say, silent
from cordillera.workflows.quantization import say_skipped
from cordillera.workflows.scores import check_weights, scored, some_batches
from cordillera.workflows.trained import recipe_of, restore_model, splits_of, with_threads

PROBE_FILE, PLAN_FILE = "probe.safetensors", "precision-plan.json"
GRADIENT_PROBE_FILE, TRAINING_PLAN_FILE = "gradient-probe.safetensors", "training-plan.json"


@dataclass(frozen=True)
class Probing:
    """Paths of the statistics of the layers' inputs and of the plan, and the plan.

    Attributes:
        profile: The plan with all kernels that were tried.
        change: Change of NE under the plan, on the split of the search.
        returned: Layers that returned to fp32 to keep the budget, in order.
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
    anew: bool = False,
    marginals: bool = False,
    say: Say = silent,
) -> Probing:
    """Gather statistics of the layers' inputs, and choose the fastest sufficiently accurate kernel for each layer.

    Kernels are judged on inputs drawn from the statistics. The whole plan is then scored on the validation split; while
    NE rises by more than the budget, the layer with the lowest signal-to-noise ratio returns to fp32.

    Args:
        config: Bounds, sizes and counts; None for the defaults.
        budget: Largest relative rise of NE.
        samples: Number of samples of the training split to probe, if training gathered nothing
            (``training.probe_every``).
        anew: Whether to probe samples even if training gathered statistics.
        marginals: Whether to draw inputs from a Gaussian copula with the quantiles of each feature, instead of a normal
            distribution. Training must have gathered them (``training.probe_marginals``), or samples are probed.

    Raises:
        DependencyError: If the run is of a device other than a CPU.
        NumericsError: If the budget is negative or not a number, or a score or a weight is not finite.
    """
    run = run if isinstance(run, Run) else Run(run)
    config = config or DispatchConfig()
    check_budget(budget)
    self_test()
    recipe = recipe_of(run)
    if select_device(recipe.device).type != "cpu":
        raise DependencyError("plans of ranking runs are for CPUs", where="device", remedy="set device = 'cpu'")
    with with_threads(recipe.threads):
        splits = splits_of(run, recipe)
        _, model = restore_model(run, splits.features, torch.device("cpu"))
        check_weights(model)
        inputs = None if anew else _gathered_by_training(run, model, marginals, say)
        gathered = None
        if inputs is None:
            score = scorer(model, torch.device("cpu"), "fp32")
            batches = some_batches(splits.train, recipe, samples)
            with Probe(model, ProbeConfig(interval=1, marginals=marginals)) as gathered:
                for batch in batches:
                    gathered.step()
                    score(batch)
            inputs = gathered.inputs
            say(f"probed {len(inputs)} layers on {sum(map(len, batches)):,} samples")
        products = forward_products(model, inputs)
        found = profile(products, config)
        say_skipped(found.skipped(), say)
        split = splits.validation if len(splits.validation) else splits.train
        size = max(config.rows)  # rows beyond those of the plan would be computed in fp32
        base = scored(model, split, batch_size=size)
        plan, returned = found.plan, list[str]()
        while True:
            with replaced(model, planned(model, plan)):
                change = base.beside(scored(model, split, batch_size=size))
            lowered = [choice for choice in plan.choices if choice.kernel != "fp32"]
            say(f"{len({c.site for c in lowered})} layers in lower precision: NE {100 * change.mean:+.4f} %")
            if change.mean <= budget or not lowered:
                break
            worst = min(lowered, key=_ratio).site
            returned.append(worst)
            plan = plan.with_reference(worst, "costs more NE than the budget")
        # Both at the end: an earlier interruption keeps the previous plan and statistics.
        if gathered is None:
            _copy(run.folder / TRAINING_PROBE, run.folder / PROBE_FILE)
        else:
            gathered.save(run.folder / PROBE_FILE)
        plan = dataclasses.replace(plan, statistics=_digest(run.folder / PROBE_FILE))
        plan.save(run.folder / PLAN_FILE)
        return Probing(run.folder / PROBE_FILE, run.folder / PLAN_FILE, Profile(plan, found.trials), change, returned)


def probe_training(
    run: Run | Path | str,
    config: DispatchConfig | None = None,
    *,
    samples: int = 16_384,
    say: Say = silent,
) -> tuple[Path, Profile]:
    """Choose the fastest sufficiently accurate kernels for all three products of a training step.

    Gradients are those of the run's loss at its weights; no update is made. Only the bounds of each product are
    checked: the effect of a plan on the quality of training can only be seen by training. Times include packing.

    Args:
        config: Bounds, sizes and counts; None for the defaults.
        samples: Number of samples of the training split to probe.

    Returns:
        Path of the written plan, and the plan with all kernels that were tried.

    Raises:
        DependencyError: If the run is of a device other than a CPU.
        NumericsError: If a weight is not finite.
        TrainingError: If the loss is not finite.
    """
    run = run if isinstance(run, Run) else Run(run)
    config = config or DispatchConfig()
    self_test()
    recipe = recipe_of(run)
    if select_device(recipe.device).type != "cpu":
        raise DependencyError("plans of ranking runs are for CPUs", where="device", remedy="set device = 'cpu'")
    with with_threads(recipe.threads):
        splits = splits_of(run, recipe)
        _, model = restore_model(run, splits.features, torch.device("cpu"))
        tasks = recipe.training.task_weights
        task_weights = None if tasks is None else torch.tensor([tasks.get(t, 1.0) for t in splits.features.tasks])
        check_weights(model)
        model.train()
        with Probe(model, ProbeConfig(interval=1, gradients=True)) as gathered:
            for batch in some_batches(splits.train, recipe, samples):
                assert batch.labels is not None
                gathered.step()
                loss, _ = weighted_loss(model(batch), batch.labels, batch.weights, task_weights)
                if not torch.isfinite(loss):
                    raise TrainingError(f"the loss is {float(loss)}", where=str(run.folder))
                loss.backward()
                model.zero_grad(set_to_none=True)
            gathered.save(run.folder / GRADIENT_PROBE_FILE)
        say(f"probed {len(gathered.inputs)} layers and their gradients: {run.folder / GRADIENT_PROBE_FILE}")
        found = profile_training(trained_layers(model, gathered.inputs, gathered.gradients), config)
        say_skipped(found.skipped(), say)
        found.plan = dataclasses.replace(found.plan, statistics=_digest(run.folder / GRADIENT_PROBE_FILE))
        found.plan.save(run.folder / TRAINING_PLAN_FILE)
        return run.folder / TRAINING_PLAN_FILE, found


def _gathered_by_training(run: Run, model: RankingModel, marginals: bool, say: Say) -> dict[str, RowStatistics] | None:
    path = run.folder / TRAINING_PROBE
    if not path.is_file():
        return None
    found = Probed(path)
    lacking = [name for name in sites(model) if name not in found.inputs or found.inputs[name].count < 2]
    if lacking:
        say(f"training has gathered nothing of {', '.join(lacking)}: probing anew")
        return None
    if marginals and all(statistics.marginals is None for statistics in found.inputs.values()):
        say("training has gathered no quantiles (training.probe_marginals): probing anew")
        return None
    rows = max(statistics.count for statistics in found.inputs.values())
    say(f"{len(found.inputs)} layers were probed in training, at {found.looks:,} steps, {rows:,} rows: {path}")
    return found.inputs


def _copy(source: Path, target: Path) -> None:
    with disk_errors(target), replacing(target) as beside:
        shutil.copyfile(source, beside)


def _ratio(choice: KernelChoice) -> float:
    return float(choice.expected["accuracy"]["sqnr_db"])


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def load_planned(run: Run, model: RankingModel) -> tuple[RankingModel, int]:
    """Apply the plan of a ``run`` to its ``model`` in place; return it and the most rows that the plan covers.

    Raises:
        NumericsError: If there is no plan, it is damaged, or it was made on another machine or for other weights.
    """
    path = run.folder / PLAN_FILE
    plan = PrecisionPlan.load(path)
    try:
        apply(model, plan)
    except NumericsError as error:
        raise NumericsError(error.what, where=str(path), remedy="`cordillera probe RUN` makes the plan anew") from error
    return model, max((choice.rows for choice in plan.choices), default=1)
