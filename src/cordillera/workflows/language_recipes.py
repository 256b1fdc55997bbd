"""Checks, completion and description of a language model's recipe before processes start."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from cordillera.data.language.chats.corpora import ChatCorpora
from cordillera.data.language.corpora import TextCorpora
from cordillera.distributed.mesh import ParallelConfig
from cordillera.distributed.planned_mesh import planned_mesh
from cordillera.errors import CheckpointError, PlanError, RecipeError
from cordillera.models.language.checkpoints import open_checkpoint
from cordillera.models.language.flops import flops_per_token
from cordillera.models.language.llama import parameter_count
from cordillera.models.language.parallelize import check_fit
from cordillera.numbers import counted
from cordillera.planning.language.plan_file import read_written_plan
from cordillera.recipe import ON_TOP, LanguageRecipe, PostTrainingRecipe, RankingRecipe
from cordillera.run import Run
from cordillera.serving.language.language_model import find_model
from cordillera.training.checkpoints import steps
from cordillera.training.language.engine import check_emulated, check_experts, check_optimizer
from cordillera.training.language.followed_plan import check_processes, differences
from cordillera.training.language.replicated import check_replicated
from cordillera.training.ranking.scoring import select_device
from cordillera.workflows.post_training.training import chats_line, check_post_training

_MOST_REPLICAS = 65  # the first member of a ring keeps 64 connections of others


def with_processes(recipe: LanguageRecipe, processes: int | None) -> LanguageRecipe:
    """Return a ``recipe`` for a number of ``processes``; ``parallel.shard`` is set to the remaining factor.

    Without a number, it is the product of the sizes.

    Raises:
        PlanError: If the other sizes do not divide the processes, or ``shard`` is set to another number.
    """
    parallel = recipe.parallel
    if processes is None or processes == parallel.world:
        return recipe
    others = parallel.world // parallel.shard
    sizes = f"replicate {parallel.replicate} x context {parallel.context} x tensor {parallel.tensor} x pipeline "
    sizes += f"{parallel.pipeline}"
    if processes % others:
        raise PlanError(
            f"{sizes} take a multiple of {others} processes, not {processes}",
            where="parallel",
            remedy=f"start {-(-processes // others) * others} processes, or make one of the sizes smaller",
        )
    if parallel.shard != 1:
        raise PlanError(
            f"{sizes} x shard {parallel.shard} take {parallel.world} processes, not {processes}",
            where="parallel",
            remedy=f"set parallel.shard={processes // others}, or start {parallel.world} processes",
        )
    return recipe.model_copy(update={"parallel": parallel.model_copy(update={"shard": processes // others})})


def follow_plan(
    recipe: LanguageRecipe | RankingRecipe, file: Path | str, processes: int | None = None
) -> LanguageRecipe:
    """Return a recipe with the mesh, schedule and microbatches of a plan, for :func:`train`.

    Args:
        recipe: Recipe as written. Keys that the plan determines may be missing, or have the plan's values.
        file: ``plan.json`` of the same model, with the same tokens in a step.
        processes: Number of processes to start on this machine. Default: the number of the plan's devices, if this
            machine has as many processors.

    Raises:
        PlanError: If the file cannot be followed, or is for another number of processes.
        RecipeError: If the recipe is that of a ranking model, or contradicts the plan; the message lists every
            difference.
    """
    if not isinstance(recipe, LanguageRecipe):
        raise RecipeError(
            recipe.name,
            [("--plan", "plans are for language models; give --nproc N to train this one in several processes")],
        )
    plan = read_written_plan(file)
    mesh = planned_mesh(plan)
    problems = differences(plan, mesh, recipe.model, recipe.packing, recipe.parallel)
    if problems:
        raise RecipeError(recipe.name, problems)
    check_processes(plan, processes)
    packing: dict[str, Any] = {"microbatches": plan.microbatches}
    if recipe.packing.bound is None and plan.layout.microbatch > 1:
        packing["bound"] = recipe.packing.most * plan.layout.microbatch
    return recipe.model_copy(
        update={
            "parallel": recipe.parallel.model_copy(update={key: getattr(mesh, key) for key in mesh.model_fields_set}),
            "packing": recipe.packing.model_copy(update=packing),
        }
    )


def _check_plain(recipe: LanguageRecipe) -> None:
    """Refuse parts of a model that only an objective of post-training teaches."""
    if recipe.model.scores:
        raise RecipeError(recipe.name, [("model.scores", "are learnt by objective.name = 'reward' alone")])
    if recipe.model.draft is not None:
        raise RecipeError(recipe.name, [("model.draft", "is learnt by objective.name = 'draft' alone")])


def check_trainable(recipe: LanguageRecipe, folder: Path | str | None) -> None:
    """Refuse an invalid recipe before any work; ``folder`` is the folder of a resumed run."""
    if ":" in recipe.device:
        remedy = "write device = 'cuda'; CUDA_VISIBLE_DEVICES chooses among GPUs"
        raise PlanError("each process of a language model takes the next GPU", where=recipe.device, remedy=remedy)
    check_fit(recipe.model, recipe.parallel)
    check_optimizer(recipe.training, recipe.parallel)
    check_emulated(recipe.training.emulate, recipe.parallel)
    check_experts(recipe.training, recipe.model, recipe.parallel)
    if isinstance(recipe, PostTrainingRecipe):
        check_post_training(recipe)
    else:
        _check_plain(recipe)
    if recipe.fault_tolerance.replicas > _MOST_REPLICAS:
        raise RecipeError(
            recipe.name, [("fault_tolerance.replicas", f"are too many for a ring: set {_MOST_REPLICAS} or fewer")]
        )
    if recipe.fault_tolerance.replicas > 1:
        if recipe.track is not None:
            raise PlanError("replicas are not followed by a tracker", where="track", remedy="set track = 'none'")
        check_replicated(
            recipe.training, recipe.model, isinstance(recipe, PostTrainingRecipe), select_device(recipe.device).type
        )
    # schedules are made for the microbatches of one copy
    count = recipe.packing.count(recipe.parallel.copies * recipe.parallel.pipeline)
    of_copy = -(-count // recipe.parallel.copies)
    schedule = recipe.parallel.make_schedule(of_copy)
    if schedule.microbatches != of_copy:
        raise PlanError(
            f"is a schedule of {schedule.microbatches} microbatches, each copy of the model has {of_copy}",
            where="parallel.table",
            remedy=f"set packing.microbatches={schedule.microbatches * recipe.parallel.copies}, or parallel.table=none",
        )
    if recipe.parallel.table is not None and schedule.splits_backward and recipe.training.compile:
        raise PlanError(
            "splits backwards, and a compiled block's backward cannot be split",
            where="parallel.table",
            remedy="do not compile, or parallel.table=none",
        )
    longest = {"packing.context": recipe.packing.context}
    if recipe.packing.method == "fixed":
        longest["packing.tokens"] = -(-recipe.packing.tokens // count)
    elif recipe.data.max_length is not None:
        longest["data.max_length"] = recipe.data.max_length
    most = recipe.model.context
    too_long = [
        (key, f"lets documents of {n} tokens in, the model's context is {most}")
        for key, n in longest.items()
        if n > most
    ]
    if too_long:
        raise RecipeError(recipe.name, too_long)
    if recipe.training.start is not None and (folder is None or not steps(Run(folder).checkpoints)):
        _check_start(recipe, recipe.training.start)


def _check_start(recipe: LanguageRecipe, start: str) -> None:
    """Refuse a checkpoint to start from that is of another model."""
    source = open_checkpoint(find_model(start))
    if source.config.scores and not recipe.model.scores:
        raise CheckpointError(
            "is a reward model, which gives scores and no text",
            where=f"training.start, {start}",
            remedy="start from the model that it began with",
        )
    kept = {name: getattr(recipe.model, name) for name in ("context", *ON_TOP)}
    if source.config.model_copy(update=kept) != recipe.model:
        own, other = recipe.model.model_dump(), source.config.model_dump()
        different = [f"{name} is {own[name]}, there {other[name]}" for name in own if own[name] != other[name]]
        raise CheckpointError(
            f"holds another model: {'; '.join(different)}",
            where=f"training.start, {start}",
            remedy="leave [model] with its name alone to take the sizes of the checkpoint",
        )


def text_line(recipe: LanguageRecipe, corpora: TextCorpora | ChatCorpora) -> str:
    """Return a line on the size of the text, and how often training goes through it."""
    wanted, replicas = recipe.training.steps, recipe.fault_tolerance.replicas
    per_step = recipe.packing.tokens * recipe.fault_tolerance.iterations(replicas)
    if isinstance(corpora, ChatCorpora):
        return chats_line(corpora)
    learnt = sum(source["tokens"] for source in corpora.facts["sources"])
    held = sum(part["tokens"] for part in corpora.facts["held_out"])
    passes = min(wanted * per_step / max(learnt, 1), recipe.data.epochs or math.inf)
    times = f"{passes:,.0f}" if passes >= 9.95 else f"{passes:.1f}"
    several = f"{'goes' if wanted == 1 else 'go'} through it {times} times"
    share = several if passes >= 1 else f"{'is' if wanted == 1 else 'are'} {100 * passes:.3g} % of it"
    taken = f"{counted(wanted, 'step')} of {per_step:,} tokens {share}"
    return f"{learnt:,} tokens to learn from, {held:,} held out\n      {taken}"


def describe(recipe: LanguageRecipe, corpora: TextCorpora | ChatCorpora) -> dict[str, Any]:
    """Return the content of a run's ``model.json``."""
    objective = {"objective": recipe.objective.name} if isinstance(recipe, PostTrainingRecipe) else {}
    return {
        "name": recipe.model.name,
        **objective,
        "config": recipe.model.model_dump(mode="json"),
        "parameters": parameter_count(recipe.model),
        "flops_per_token": flops_per_token(recipe.model),
        "mesh": recipe.parallel.model_dump(mode="json", exclude={"table"}),  # its schedule is in the recipe
        "world": recipe.parallel.world,
        "data": corpora.facts,
    }


def mesh_text(parallel: ParallelConfig) -> str:
    """Return a line on the processes and how the model is divided among them."""
    sizes = {name: getattr(parallel, name) for name in ("replicate", "shard", "context", "tensor", "pipeline")}
    cut = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
    return f"{parallel.world} processes, {cut}" if cut else "1 process"
