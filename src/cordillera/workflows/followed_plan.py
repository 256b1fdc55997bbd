"""Training by a plan: the recipe of a language model takes mesh, microbatches and schedule from ``plan.json``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cordillera.distributed.job.environment import place_in_job
from cordillera.distributed.planned_mesh import PlannedParallelConfig, planned_mesh
from cordillera.errors import PlanError, RecipeError
from cordillera.kernels.threads import usable_cores
from cordillera.models.language.llama import LlamaConfig
from cordillera.planning.language.plan_file import WrittenPlan, read_written_plan
from cordillera.recipe import LanguageRecipe, RankingRecipe

_UNPLANNED = ("sharding", "transport", "deadline_s")  # keys of the mesh that no plan determines
_MOST_SHOWN = 60  # characters of a value in a message


def follow_plan(
    recipe: LanguageRecipe | RankingRecipe, file: Path | str, processes: int | None = None
) -> LanguageRecipe:
    """Return a recipe whose ``parallel`` section and microbatches are those of a plan.

    Args:
        recipe: Recipe as written. Keys that the plan determines may be missing, or have the plan's values.
        file: ``plan.json`` of the same model, with the same tokens in a step.
        processes: Number of processes to start on this machine. Default: the number of the plan's devices, if this
            machine has as many processors.

    Raises:
        PlanError: If the file cannot be followed, or is for another number of processes.
        RecipeError: If the recipe is that of a ranking model, or differs from the plan; the message lists every
            difference.
    """
    if not isinstance(recipe, LanguageRecipe):
        raise RecipeError(recipe.name, [("--plan", "ranking models are trained in one process, without a plan")])
    plan = read_written_plan(file)
    mesh = planned_mesh(plan)
    problems = [
        *_other_model(recipe.model, plan),
        *_other_steps(recipe, plan),
        *_stated_otherwise(recipe, plan, mesh),
    ]
    if problems:
        raise RecipeError(recipe.name, problems)
    _check_processes(plan, processes)
    bound = recipe.packing.bound
    if bound is None and plan.layout.microbatch > 1:
        bound = recipe.packing.most * plan.layout.microbatch
    taken = {name: getattr(mesh, name) for name in mesh.model_fields_set}
    return recipe.model_copy(
        update={
            "parallel": recipe.parallel.model_copy(update=taken),
            "packing": recipe.packing.model_copy(update={"microbatches": plan.microbatches, "bound": bound}),
        }
    )


def _other_model(model: LlamaConfig, plan: WrittenPlan) -> Iterator[tuple[str, str]]:
    """Iterate over the sizes of the model that differ from those of the planned one."""
    planned = plan.workload.model
    sizes = {
        "layers": (planned.layers, model.layers),
        "hidden": (planned.hidden, model.hidden),
        "heads": (planned.heads, model.heads),
        "kv_heads": (planned.kv_heads or planned.heads, model.kv_heads),
        "head_dim": (planned.head, model.head_width),
        "ffn": (planned.ffn or 4 * planned.hidden, model.ffn),
        "vocabulary": (planned.vocabulary, model.vocabulary),
        "tied": (planned.tied, model.tied),
        "gated": (planned.gated, True),
        "fused_attention": (planned.fused_attention, True),
        "experts": (planned.experts and planned.experts.count, None),
    }
    for name, (theirs, own) in sizes.items():
        if theirs != own:
            yield (
                f"model.{name}",
                f"{plan.file} says {_shown(theirs)}, the recipe's model has {_shown(own)}: plan again for this model",
            )


def _other_steps(recipe: LanguageRecipe, plan: WrittenPlan) -> Iterator[tuple[str, str]]:
    """Iterate over the keys of ``packing`` that differ from the planned steps."""
    packing, work = recipe.packing, plan.workload
    remedy = "set {}={}, or plan again"
    if packing.tokens != work.batch * work.sequence:
        yield (
            "packing.tokens",
            f"{plan.file} says batch {work.batch} x sequence {work.sequence} = {work.batch * work.sequence} tokens, "
            f"the recipe says {packing.tokens}: {remedy.format('packing.tokens', work.batch * work.sequence)}",
        )
    if packing.context != work.sequence:
        yield (
            "packing.context",
            f"{plan.file} says sequence {work.sequence}, the recipe says {packing.context}: "
            + remedy.format("packing.context", work.sequence),
        )
    if packing.microbatches not in (None, plan.microbatches):
        yield "packing.microbatches", _conflict(plan, "packing.microbatches", plan.microbatches, packing.microbatches)


def _stated_otherwise(
    recipe: LanguageRecipe, plan: WrittenPlan, mesh: PlannedParallelConfig
) -> Iterator[tuple[str, str]]:
    """Iterate over the keys of ``parallel`` that the recipe states and the plan determines otherwise."""
    for name in PlannedParallelConfig.model_fields:
        stated, planned = getattr(recipe.parallel, name), getattr(mesh, name)
        if name in _UNPLANNED or name not in recipe.parallel.model_fields_set or stated == planned:
            continue
        if name == "schedule":
            planned = plan.schedule.name
        yield f"parallel.{name}", _conflict(plan, f"parallel.{name}", planned, stated)


def _conflict(plan: WrittenPlan, key: str, planned: object, stated: object) -> str:
    name = key.rpartition(".")[2]
    return (
        f"{plan.file} says {name} {_shown(planned)}, the recipe says {_shown(stated)}: "
        f"remove {key} from the recipe or plan again"
    )


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else ", ".join(value) if isinstance(value, tuple) else json.dumps(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[: _MOST_SHOWN - 3]}..."


def _check_processes(plan: WrittenPlan, processes: int | None) -> None:
    """Check that there will be as many processes as the plan has devices."""
    place, devices = place_in_job(), plan.layout.devices
    started = processes if place is None else place.size
    if started == devices or (started is None and devices <= usable_cores()):
        return
    found = f"this launch has {started}" if started is not None else f"this machine has {usable_cores()} processors"
    remedy = f"torchrun --nproc-per-node {devices} -m -- cordillera train ... (--nnodes for several machines)"
    if place is None:
        remedy = f"--nproc {devices} starts them on this machine, torchrun on several"
    raise PlanError(
        f"the plan is for {devices} {'device' if devices == 1 else 'devices'}; {found}",
        where=plan.file,
        remedy=f"{remedy}; or plan again with --devices",
    )
