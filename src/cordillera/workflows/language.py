"""Training and evaluation of the recipe of a language model, as functions.

The calling process reads the recipe, checks all that can be checked, prepares text and folder, and starts the processes
that train. If a launcher (``torchrun``) has already started them, each of them prepares, and rank 0 alone writes.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from cordillera import recipe as recipes
from cordillera.data.language.batches import TextBatches
from cordillera.data.language.chats.corpora import ChatCorpora, prepare_chats
from cordillera.data.language.corpora import TextCorpora, prepare_corpora, text_identity
from cordillera.data.language.held_out import held_out_batches
from cordillera.data.packing.work import DocumentWork
from cordillera.distributed.job.environment import place_in_job
from cordillera.distributed.job.job import Job, join_job
from cordillera.distributed.job.launch import LaunchConfig, launch
from cordillera.distributed.mesh import ParallelConfig, ProcessMesh
from cordillera.distributed.planned_mesh import PlannedParallelConfig, planned_mesh
from cordillera.errors import CheckpointError, DataError, DependencyError, Interrupted, PlanError, RecipeError, RunError
from cordillera.models.language.adapters import ADAPTER_WEIGHTS
from cordillera.models.language.checkpoints import open_checkpoint, read_model
from cordillera.models.language.checkpoints.first_sight import compare_with_first_sight
from cordillera.models.language.checkpoints.sharded import STATE, ShardedFolder
from cordillera.models.language.checkpoints.source import Source, parameter_shapes
from cordillera.models.language.flops import flops_per_token, peak_flops
from cordillera.models.language.llama import draw_weight, parameter_count
from cordillera.models.language.parallelize import check_fit
from cordillera.numerics.formats.precision import compute_dtype
from cordillera.planning.language.plan_file import read_written_plan
from cordillera.recipe import ON_TOP, LanguageRecipe, PostTrainingRecipe, RankingRecipe
from cordillera.reports.language.run import write_language_report
from cordillera.run import Run, check_recipe, next_folder, recipe_state, write_atomically
from cordillera.serving.language.language_model import find_model
from cordillera.training.checkpoints import folder_of, steps
from cordillera.training.language.checkpoints import ShardedCheckpoints
from cordillera.training.language.engine import LanguageEngine, check_emulated, check_experts, check_optimizer
from cordillera.training.language.followed_plan import check_processes, differences
from cordillera.training.language.trainer import (
    LanguageEvaluation,
    LanguageReport,
    LanguageStepCallback,
    LanguageTrainer,
    write_evaluation,
)
from cordillera.training.ranking.scoring import select_device
from cordillera.workflows._say import Say, from_ranks, silent, to_launcher
from cordillera.workflows.post_training.training import (
    KINDS,
    add_reference,
    chats_line,
    check_post_training,
    post_trainer,
    read_held_out_reference,
)
from cordillera.workflows.threads import keep as keep_threads
from cordillera.workflows.threads import threads_of

_BEGUN = "run"  # key in the launcher's store of the folder of the run that this job began


@dataclass
class LanguageOutcome:
    """Run and report of :func:`train`."""

    run: Run
    report: LanguageReport


def with_processes(recipe: LanguageRecipe, processes: int | None) -> LanguageRecipe:
    """Return a ``recipe`` for a number of ``processes``; ``parallel.shard`` takes what the other sizes leave.

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
    """Return a recipe whose mesh, schedule and microbatches are those of a plan, for :func:`train`.

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
        raise RecipeError(recipe.name, [("--plan", "ranking models are trained in one process, without a plan")])
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


def train(
    recipe: LanguageRecipe,
    folder: Path | str | None = None,
    *,
    resume: bool = False,
    processes: int | None = None,
    on_step: LanguageStepCallback | None = None,
    say: Say = silent,
) -> LanguageOutcome:
    """Train a language model into a run folder, evaluate it on held-out text and write its report.

    ``recipe``, ``folder``, ``resume``, ``on_step``, ``say`` and errors are those of :func:`cordillera.workflows.train`;
    the last two are called on rank 0. A resumed recipe may have another ``parallel``.

    Args:
        processes: Number of processes on this machine, if no launcher has started any; see :func:`with_processes`.
            Default: the product of the sizes of ``recipe.parallel``.

    Raises:
        RunError: If a process died.
        CheckpointError: If ``training.start`` is not a checkpoint.
        TrainingError: If too many steps in a row were not finite.
    """
    place = place_in_job()
    size = None if place is None else place.size
    if size is not None and processes not in (None, size):
        raise PlanError(f"the launcher has started {size} processes, not {processes}", where="--nproc")
    recipe = with_processes(recipe, processes or size)
    _check(recipe, folder if resume else None)
    device = select_device(recipe.device).type
    parallel = recipe.parallel
    if size is not None:
        with join_job(device, parallel.deadline_s) as job:
            run, resume = _prepare_together(job, recipe, folder, resume, say)
            report = _train(job, recipe, run, resume, *((on_step, say) if job.rank == 0 else (None, silent)))
        if job.rank > 0:
            return LanguageOutcome(run, report)
    else:
        if device == "cuda" and torch.cuda.device_count() < parallel.world:
            raise DependencyError(
                f"{parallel.world} processes take {parallel.world} GPUs, there are {torch.cuda.device_count()}",
                where="parallel",
                remedy="start fewer processes, or set device=cpu",
            )
        run = _prepare(recipe, folder, resume, say)  # outside a job, so that Ctrl-C ends it at once
        if recipe.threads is None:
            threads = threads_of(None, say, folder=run.folder if resume else None, processes=parallel.world)
            keep_threads(run, threads, parallel.world)
            recipe = recipe.model_copy(update={"threads": threads})
        if parallel.world > 1:
            report = _launch(recipe, run, resume, device, on_step, say)
        else:
            with join_job(device, parallel.deadline_s) as job:
                report = _train(job, recipe, run, resume, on_step, say)
    if report.ended != "interrupted":
        write_language_report(run)
    return LanguageOutcome(run, report)


def evaluate(
    run: Run, recipe: LanguageRecipe, split: str = "validation", tokens: int | None = None
) -> LanguageEvaluation:
    """Evaluate the newest checkpoint of a ``run`` with this ``recipe``, trained on any mesh, in this process.

    ``split`` and ``tokens`` are those of :func:`cordillera.workflows.evaluate`.

    Raises:
        RunError: If there is no such split, or nothing was held out.
        CheckpointError: If there is no checkpoint, or it is corrupt.
        Interrupted: If Ctrl-C or SIGTERM ended it; ``evaluation.json`` is then unchanged.
    """
    if split != "validation":
        raise RunError(f"must be validation for a language model, got {split!r}", where="--split")
    alone = recipe.model_copy(update={"parallel": PlannedParallelConfig()})
    if tokens is not None:
        training = recipe.training.model_copy(update={"evaluation_tokens": tokens})
        alone = alone.model_copy(update={"training": training})
    device = select_device(recipe.device).type
    if not steps(run.checkpoints):
        raise CheckpointError("holds no checkpoint", where=str(run.checkpoints), remedy="train first")
    prepare(recipe)  # outside a job, so that Ctrl-C ends it at once
    with join_job(device, alone.parallel.deadline_s) as job:
        if recipe.threads is not None:
            torch.set_num_threads(recipe.threads)
        trainer = _trainer(job, alone, run)
        if not trainer.can_evaluate:
            raise RunError("nothing was held out", where="data.held_out", remedy="give data.validation, or hold out")
        state = trainer.checkpoints.restore(trainer.engine)
        assert state is not None
        if isinstance(recipe, PostTrainingRecipe):
            read_held_out_reference(recipe, trainer, run)
        try:
            found = trainer.evaluate()
        except Interrupted as error:
            remedy = "give the same command again, with --tokens N to evaluate on a part of it"
            raise Interrupted(f"{error.what}; nothing was written", where=str(run.folder), remedy=remedy) from None
    write_evaluation(run, state["step"], state["tokens"], found)
    return found


def _check_plain(recipe: LanguageRecipe) -> None:
    """Refuse parts of a model that only an objective of post-training teaches."""
    if recipe.model.scores:
        raise RecipeError(recipe.name, [("model.scores", "are learnt by objective.name = 'reward' alone")])
    if recipe.model.draft is not None:
        raise RecipeError(recipe.name, [("model.draft", "is learnt by objective.name = 'draft' alone")])


def _check(recipe: LanguageRecipe, folder: Path | str | None) -> None:
    """Refuse an invalid recipe before any work; ``folder`` is that of a resumed run."""
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
    if recipe.training.start is None or (folder is not None and steps(Run(folder).checkpoints)):
        return
    source = open_checkpoint(find_model(recipe.training.start))
    if source.config.scores and not recipe.model.scores:
        raise CheckpointError(
            "is a reward model, which gives scores and no text",
            where=f"training.start, {recipe.training.start}",
            remedy="start from the model that it began with",
        )
    kept = {name: getattr(recipe.model, name) for name in ("context", *ON_TOP)}
    if source.config.model_copy(update=kept) != recipe.model:
        own, other = recipe.model.model_dump(), source.config.model_dump()
        different = [f"{name} is {own[name]}, there {other[name]}" for name in own if own[name] != other[name]]
        raise CheckpointError(
            f"holds another model: {'; '.join(different)}",
            where=f"training.start, {recipe.training.start}",
            remedy="leave [model] with its name alone to take the sizes of the checkpoint",
        )


def _prepare(recipe: LanguageRecipe, folder: Path | str | None, resume: bool, say: Say) -> Run:
    say(f"text: {recipe.data.label}")
    corpora = prepare(recipe)
    vocabulary = corpora.tokenizer.vocab_size
    if vocabulary > recipe.model.vocabulary:
        raise RecipeError(
            recipe.name,
            [("model.vocabulary", f"{recipe.model.vocabulary} is less than the {vocabulary} tokens of the tokenizer")],
        )
    say(f"      {_text_line(recipe, corpora)}")
    if not isinstance(corpora, ChatCorpora):
        batches_of(recipe, corpora)  # refuses what does not fit before there are processes and a folder
    described = _describe(recipe, corpora)
    if resume:
        run = Run(folder or "")
        with run.lock():
            # a run may have ended before it recorded its text
            was = _text_of(run) if (run.folder / "model.json").is_file() else text_identity(corpora.facts)
            if was != text_identity(corpora.facts):
                raise RunError(
                    "the text has changed since the run began; a resumed run must see the same",
                    where=recipe.data.label,
                    remedy="restore the files, or start a new run",
                )
            _check_resumed(run, recipe)
            write_atomically(run.recipe_file, recipes.dump(recipe))
            run.write_json("model.json", described)
    else:
        run = Run.create(folder or next_folder(Path("runs"), recipe.name), recipes.dump(recipe))
        run.write_json("model.json", described)
    if recipe.training.start is not None and not steps(run.checkpoints):
        compare_with_first_sight(open_checkpoint(find_model(recipe.training.start)).files, run.folder / "start.json")
    say(
        f"model: {described['parameters']:,} parameters"
        + (f", from {recipe.training.start}" if recipe.training.start else "")
    )
    say(f"mesh:  {_mesh_text(recipe.parallel)}")
    if recipe.training.emulate is not None:
        say(f"emulated: products in {recipe.training.emulate.format}, which takes several times as long")
    return run


def prepare(recipe: LanguageRecipe) -> TextCorpora | ChatCorpora:
    """Read, tokenise and hold out the data of a ``recipe``.

    Raises:
        DataError: If the data is invalid, or nothing is left to learn from.
    """
    if isinstance(recipe, PostTrainingRecipe):
        return prepare_chats(recipe.data, KINDS[recipe.objective.name])
    return prepare_corpora(recipe.data)


def _text_line(recipe: LanguageRecipe, corpora: TextCorpora | ChatCorpora) -> str:
    """Return a line on the size of the text, and how often training goes through it."""
    wanted, per_step = recipe.training.steps, recipe.packing.tokens
    if isinstance(corpora, ChatCorpora):
        return chats_line(corpora)
    learnt = sum(source["tokens"] for source in corpora.facts["sources"])
    held = sum(part["tokens"] for part in corpora.facts["held_out"])
    passes = min(wanted * per_step / max(learnt, 1), recipe.data.epochs or math.inf)
    return (
        f"{learnt:,} tokens to learn from, {held:,} held out\n"
        f"      {wanted:,} steps of {per_step:,} tokens go through it {passes:.2g} times"
    )


def _text_of(run: Run) -> list[Any]:
    try:
        return text_identity(run.read_json("model.json")["data"])
    except (KeyError, TypeError) as error:
        where = str(run.folder / "model.json")
        raise RunError("does not say which text the run is of", where=where, remedy="restore the file") from error


def _check_resumed(run: Run, recipe: LanguageRecipe) -> None:
    """Check that the newest checkpoint, if there is one, was written with this recipe."""
    for step in steps(run.checkpoints)[-1:]:
        content = ShardedFolder(folder_of(run.checkpoints, step)).read_json(STATE)
        check_recipe(content["state"].get("recipe"), recipe, run.recipe_file)


def _prepare_together(
    job: Job, recipe: LanguageRecipe, folder: Path | str | None, resume: bool, say: Say
) -> tuple[Run, bool]:
    """Prepare in processes that a launcher started: rank 0 first, then one process per machine, then all continue.

    Preparing text may take longer than the time limit of a collective. Processes that the launcher restarted continue
    the run that their predecessors began: the second value says whether a run is continued.
    """
    place: list[Any] = ["", resume]
    if job.rank == 0:
        begun = job.store.read([_BEGUN])[0] if job.restarts and not resume else None
        if isinstance(begun, str):
            folder, resume = begun, True
            say(f"processes were started anew ({job.restarts}): {folder} goes on")
        run = _prepare(recipe, folder, resume, say)
        job.store.set(_BEGUN, str(run.folder))
        place = [str(run.folder), resume]
    job.watchdog.meet("run prepared")
    if os.environ.get("LOCAL_RANK") == "0":
        prepare(recipe)  # finds the result of rank 0 in a common cache
    job.watchdog.meet("text prepared")
    if job.size > 1:
        dist.broadcast_object_list(place)
    return Run(place[0]), place[1]


def _describe(recipe: LanguageRecipe, corpora: TextCorpora | ChatCorpora) -> dict[str, Any]:
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


def _mesh_text(parallel: ParallelConfig) -> str:
    sizes = {name: getattr(parallel, name) for name in ("replicate", "shard", "context", "tensor", "pipeline")}
    cut = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
    return f"{parallel.world} processes, {cut}" if cut else "1 process"


def batches_of(recipe: LanguageRecipe, corpora: TextCorpora) -> TextBatches:
    """Return the batches of the text ``corpora`` that a ``recipe`` trains on."""
    parallel, model = recipe.parallel, recipe.model
    return TextBatches(
        recipe.data,
        recipe.packing,
        corpora,
        work=DocumentWork.of_model(model.hidden, model.active_ffn, model.heads, model.kv_heads),
        microbatches=recipe.packing.count(parallel.copies * parallel.pipeline),
        seed=recipe.seed,
    )


def _launch(
    recipe: LanguageRecipe, run: Run, resume: bool, device: Any, on_step: LanguageStepCallback | None, say: Say
) -> LanguageReport:
    config = LaunchConfig(
        device_type=device,
        threads=recipe.threads,
        deadline_s=recipe.parallel.deadline_s,
        remedy=f"continue it with `cordillera train {run.folder} --resume`",
    )
    arguments = (recipe, str(run.folder), resume)
    report: LanguageReport = launch(
        _launched, recipe.parallel.world, arguments, config=config, hear=from_ranks(on_step, say)
    )
    return report


def _launched(rank: int, recipe: LanguageRecipe, folder: str, resume: bool) -> LanguageReport:
    """Train as one of several processes on this machine; rank 0 reports to the process that started it."""
    with join_job() as job:
        return _train(job, recipe, Run(folder), resume, *to_launcher(rank))


def _train(
    job: Job, recipe: LanguageRecipe, run: Run, resume: bool, on_step: LanguageStepCallback | None, say: Say
) -> LanguageReport:
    """Train in each process; the recipe's mesh has as many places as the job has processes."""
    if recipe.threads is not None:
        torch.set_num_threads(recipe.threads)
    trainer = _trainer(job, recipe, run, on_step)
    found = resume and trainer.resume()
    if resume:
        say(f"resumed at step {trainer.progress.step}" if found else "no checkpoint yet: starting from the beginning")
    if recipe.training.start is not None and not found:
        _start_from(trainer.engine, open_checkpoint(find_model(recipe.training.start)), recipe.seed)
    if isinstance(recipe, PostTrainingRecipe):
        add_reference(recipe, trainer, run, say)
    return trainer.fit()


def _trainer(
    job: Job, recipe: LanguageRecipe, run: Run, on_step: LanguageStepCallback | None = None
) -> LanguageTrainer:
    device = select_device(recipe.device).type
    corpora = prepare(recipe)
    mesh = ProcessMesh(recipe.parallel, device)
    digests = mesh.exchange([zlib.crc32(json.dumps(text_identity(corpora.facts)).encode())])[:, 0].tolist()
    for rank, digest in enumerate(digests):
        if digest != digests[0]:
            raise DataError(
                f"rank {rank} has found other text than rank 0",
                where=recipe.data.label,
                remedy="give all machines the same files",
            )
    peak = peak_flops(device, compute_dtype(recipe.training.precision))
    common: dict[str, Any] = {
        "checkpoints": ShardedCheckpoints(run.checkpoints, mesh, recipe.training.asynchronous),
        "run": run if job.rank == 0 else None,
        "peak": None if peak is None else peak.flops_per_s,
        "watchdog": job.watchdog,
        "on_step": on_step,
        "recipe": recipe_state(recipe),
    }
    if isinstance(recipe, PostTrainingRecipe):
        assert isinstance(corpora, ChatCorpora)
        return post_trainer(recipe, corpora, mesh, common | {"evaluates_first": recipe.training.start is not None})
    assert isinstance(corpora, TextCorpora)
    engine = LanguageEngine(recipe.training, recipe.model, mesh, recipe.seed)
    held_out = held_out_batches(corpora, recipe.packing, tokens=recipe.training.evaluation_tokens)
    batches = batches_of(recipe, corpora)
    return LanguageTrainer(
        recipe.training, engine, batches, held_out=held_out.microbatches, held_out_bytes=held_out.bytes, **common
    )


def _start_from(engine: LanguageEngine, source: Source, seed: int) -> None:
    """Load the weights of a checkpoint into an engine; each rank reads those of its stages, and draws new ones."""
    merged = None if source.config.adapter is None else dict(read_model(source).named_parameters())
    known = parameter_shapes(source.config)

    def read(name: str, shape: torch.Size) -> torch.Tensor:
        whole = torch.empty(shape)
        if name not in known or name.endswith(ADAPTER_WEIGHTS):
            draw_weight(whole, name, engine.model, seed)
        elif merged is not None:
            whole.copy_(merged[name].detach())
        else:
            source.read(name, whole)
            if not whole.isfinite().all():
                raise CheckpointError(
                    f"tensor {source.name_of(name)} holds NaN or infinity",
                    where=f"training.start, {source.path}",
                    remedy="the checkpoint is damaged: start from another",
                )
        return whole

    for stage in engine.stages.values():
        stage.fill(read)
    engine.take_weights()
