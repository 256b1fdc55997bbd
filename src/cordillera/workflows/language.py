"""Training and evaluation of the recipe of a language model, as functions.

The calling process reads the recipe, checks all that can be checked, prepares text and folder, and starts the processes
that train. If a launcher (``torchrun``) has already started them, each of them prepares, and rank 0 alone writes.
"""

from __future__ import annotations

import hashlib
import json
import shlex
import time
import zlib
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from cordillera import recipe as recipes
from cordillera.data.language.batches import TextBatches
from cordillera.data.language.chats.corpora import ChatCorpora, prepare_chats
from cordillera.data.language.corpora import TextCorpora, prepare_corpora, text_identity
from cordillera.data.language.held_out import held_out_batches
from cordillera.data.packing.work import DocumentWork
from cordillera.distributed.fault_tolerance.coordinator import listen_at
from cordillera.distributed.fault_tolerance.launcher import (
    ReplicaLauncher,
    ReplicaService,
    job_identity,
    job_secret,
    replica_names,
)
from cordillera.distributed.fault_tolerance.messages import parse_address, reached_at
from cordillera.distributed.fault_tolerance.replica import ReplicaPlace
from cordillera.distributed.job.environment import place_in_job
from cordillera.distributed.job.job import Job, join_job
from cordillera.distributed.job.launch import LaunchConfig, launch
from cordillera.distributed.job.slurm import is_first_on_machine
from cordillera.distributed.mesh import ProcessMesh
from cordillera.distributed.planned_mesh import PlannedParallelConfig
from cordillera.errors import (
    CheckpointError,
    CordilleraError,
    DataError,
    DependencyError,
    Interrupted,
    PlanError,
    RecipeError,
    RunError,
)
from cordillera.models.language.checkpoints import open_checkpoint
from cordillera.models.language.checkpoints.first_sight import compare_with_first_sight
from cordillera.models.language.checkpoints.sharded import STATE, ShardedFolder
from cordillera.models.language.flops import peak_flops
from cordillera.numerics.formats.precision import compute_dtype
from cordillera.recipe import LanguageRecipe, PostTrainingRecipe
from cordillera.reports.language.replicas import write_replicas_page
from cordillera.reports.language.run import write_language_report
from cordillera.run import Run, check_new_folder, check_recipe, next_path, recipe_state, write_atomically
from cordillera.serving.language.language_model import find_model
from cordillera.training.checkpoints import folder_of, steps
from cordillera.training.language.checkpoints import ShardedCheckpoints, start_from
from cordillera.training.language.engine import LanguageEngine
from cordillera.training.language.replicated import ReplicatedTrainer
from cordillera.training.language.trainer import (
    LanguageEnd,
    LanguageEvaluation,
    LanguageProgress,
    LanguageReport,
    LanguageStepCallback,
    LanguageTrainer,
    read_evaluation,
    write_evaluation,
)
from cordillera.training.ranking.scoring import select_device
from cordillera.workflows.language_recipes import check_trainable, describe, mesh_text, text_line, with_processes
from cordillera.workflows.post_training.training import KINDS, add_reference, post_trainer, read_held_out_reference
from cordillera.workflows.processes import LOADED, Say, from_ranks, keep_threads, silent, threads_of, to_launcher

_BEGUN = "run"  # key in the launcher's store of the folder of the run that this job began


@dataclass
class LanguageOutcome:
    """Run and report of :func:`train`."""

    run: Run
    report: LanguageReport

    def __repr__(self) -> str:
        ended, step = self.report.ended, self.report.progress.step
        reached = "" if self.report.evaluation is None else f", {self.report.evaluation!r}"
        return f"<{type(self).__name__} in {self.run.folder}: {ended}, {step:,} steps{reached}>"


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
        raise PlanError(f"the launcher has started {size} processes, not {processes}", where="processes")
    recipe = with_processes(recipe, processes or size)
    check_trainable(recipe, folder if resume else None)
    device = select_device(recipe.device).type
    parallel = recipe.parallel
    if device == "cuda" and parallel.pipeline > 1:
        raise RecipeError(recipe.name, [("parallel.pipeline", "is for CPUs only: set it to 1, or device = 'cpu'")])
    if recipe.fault_tolerance.replicas > 1:
        if size is not None:
            raise PlanError(
                "starts its replicas itself, on one machine",
                where="fault_tolerance.replicas",
                remedy="give the command without a launcher",
            )
        run = _prepare(recipe, folder, resume, say)
        recipe = _with_threads(recipe, run, resume, say)
        report = _launch_replicas(recipe, run, device, on_step, say)
    elif size is not None:
        with join_job(device, parallel.deadline_s, backend=parallel.backend) as job:
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
        recipe = _with_threads(recipe, run, resume, say)
        if parallel.world > 1:
            report = _launch(recipe, run, resume, device, on_step, say)
        else:
            with join_job(device, parallel.deadline_s, backend=parallel.backend) as job:
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
        RunError: If there is no such split, nothing was held out, or ``tokens`` is given for problems.
        CheckpointError: If there is no checkpoint, or it is corrupt.
        Interrupted: If Ctrl-C or SIGTERM ended it; ``evaluation.json`` is then unchanged.
    """
    if split != "validation":
        raise RunError(f"must be validation for a language model, got {split!r}", where="split")
    has_problems = isinstance(recipe, PostTrainingRecipe) and recipe.objective.name == "grpo"
    if tokens is not None and has_problems:
        raise RunError("has no effect with grpo", where="tokens", remedy="leave it out")
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
            less = "" if has_problems else ", with --tokens N to evaluate on a part of it"
            remedy = f"give the same command again{less}"
            raise Interrupted(f"{error.what}; nothing was written", where=str(run.folder), remedy=remedy) from None
    write_evaluation(run, state["step"], state["tokens"], found)
    return found


def _prepare(recipe: LanguageRecipe, folder: Path | str | None, resume: bool, say: Say) -> Run:
    say(f"text: {recipe.data.label}")
    corpora = prepare(recipe)
    vocabulary = corpora.tokenizer.vocab_size
    if vocabulary > recipe.model.vocabulary:
        raise RecipeError(
            recipe.name,
            [("model.vocabulary", f"{recipe.model.vocabulary} is less than the {vocabulary} tokens of the tokenizer")],
        )
    say(f"      {text_line(recipe, corpora)}")
    if not isinstance(corpora, ChatCorpora):
        batches_of(recipe, corpora)  # refuses what does not fit before there are processes and a folder
    described = describe(recipe, corpora)
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
        run = Run.create(folder or next_path(Path("runs"), recipe.name), recipes.dump(recipe))
        run.write_json("model.json", described)
    if recipe.training.start is not None and not steps(run.checkpoints):
        compare_with_first_sight(open_checkpoint(find_model(recipe.training.start)).files, run.folder / "start.json")
    say(
        f"model: {described['parameters']:,} parameters"
        + (f", from {recipe.training.start}" if recipe.training.start else "")
    )
    replicas = recipe.fault_tolerance.replicas
    say(f"mesh:  {f'{replicas} replicas, each of ' if replicas > 1 else ''}{mesh_text(recipe.parallel)}")
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
    if is_first_on_machine():
        prepare(recipe)  # finds the result of rank 0 in a common cache
    job.watchdog.meet("text prepared")
    if job.size > 1:
        dist.broadcast_object_list(place)
    return Run(place[0]), place[1]


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
    config, arguments = _launch_config(recipe, run, device), (recipe, str(run.folder), resume)
    report: LanguageReport = launch(
        _launched, recipe.parallel.world, arguments, config=config, hear=from_ranks(on_step, say)
    )
    return report


def _launch_config(recipe: LanguageRecipe, run: Run, device: Any) -> LaunchConfig:
    return LaunchConfig(
        device_type=device,
        threads=recipe.threads,
        deadline_s=recipe.parallel.deadline_s,
        backend=recipe.parallel.backend,
        remedy=f"continue it with `cordillera train {run.folder} --resume`",
        loaded=LOADED,
    )


def _with_threads(recipe: LanguageRecipe, run: Run, resume: bool, say: Say) -> LanguageRecipe:
    """Return the recipe with a number of threads, which a resumed run keeps."""
    if recipe.threads is not None:
        return recipe
    count = recipe.fault_tolerance.replicas * recipe.parallel.world
    threads = threads_of(None, say, folder=run.folder if resume else None, processes=count)
    keep_threads(run, threads, count)
    return recipe.model_copy(update={"threads": threads})


def _launch_replicas(
    recipe: LanguageRecipe, run: Run, device: Any, on_step: LanguageStepCallback | None, say: Say
) -> LanguageReport:
    """Train by replicas that this process starts, and write how it ended."""
    tolerance, world = recipe.fault_tolerance, recipe.parallel.world
    config, arguments = _launch_config(recipe, run, device), (recipe, str(run.folder))
    launcher = ReplicaLauncher(
        _launched_replica,
        world,
        arguments,
        tolerance=tolerance,
        configuration=_configuration(recipe),
        folder=run.folder,
        config=config,
        hear=from_ranks(on_step, say),
    )
    begun, since = max(steps(run.checkpoints), default=0), time.perf_counter()
    with run.lock():
        run.rewind_metrics(begun)
        run.write_status(None, begun, recipe.training.steps)
        try:
            report: LanguageReport = launcher.run()
        except BaseException as error:
            why = error.what if isinstance(error, CordilleraError) else type(error).__name__
            run.write_status("failed", max(steps(run.checkpoints), default=0), recipe.training.steps, why)
            if isinstance(error, CordilleraError):
                _write_replicas_page(run, say)
            raise
        status = run.status()
        if status is None or status.ended is None:  # the replica that writes failed after the last step
            if report.evaluation is not None:
                write_evaluation(run, report.progress.step, report.progress.tokens, report.evaluation)
            run.write_status(report.ended, report.progress.step, recipe.training.steps)
        _write_replicas_page(run, say)
    report.seconds = time.perf_counter() - since  # time of the job, not of the last replica's process
    return report


def _configuration(recipe: LanguageRecipe) -> str:
    """Return a digest of all that must be equal on replicas."""
    text = json.dumps([recipe_state(recipe.model_copy(update={"threads": None})), version("cordillera")])
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def coordinate(
    recipe: LanguageRecipe,
    folder: Path | str | None = None,
    *,
    resume: bool = False,
    processes: int | None = None,
    listen: str = "127.0.0.1:0",
    say: Say = silent,
) -> LanguageOutcome:
    """Coordinate replicas that are started elsewhere, until they end; Ctrl-C or SIGTERM lets all stop after a step.

    Args:
        recipe: Recipe with ``fault_tolerance.replicas`` above 1.
        folder: Folder of the run, which every replica must reach. Default: one in ``runs``.
        resume: Whether the run goes on from its newest checkpoint.
        processes: Number of processes of each replica.
        listen: ``HOST:PORT`` to listen at; port 0 for one that is free.
        say: Function called with lines of text.

    Raises:
        PlanError: If the recipe has no replicas, or the address cannot be used.
        RunError: If the run is in use, or the folder of a new one is not empty.
        Interrupted: If it was stopped before the replicas had ended.
    """
    recipe = with_processes(recipe, processes)
    if recipe.fault_tolerance.replicas == 1:
        raise PlanError("is 1", where="fault_tolerance.replicas", remedy="give --replicas N")
    check_trainable(recipe, folder if resume else None)
    host, port = parse_address(listen, "listen")
    listen_at(host, port).close()  # fails before a folder is made
    if folder is not None and not resume:
        check_new_folder(Path(folder), "coordinate")
    run, since = _prepare(recipe, folder, resume, say), time.perf_counter()
    begun = max(steps(run.checkpoints), default=0)
    with run.lock():
        run.rewind_metrics(begun)
        run.write_status(None, begun, recipe.training.steps)
        service = ReplicaService(run.folder, recipe.fault_tolerance, _configuration(recipe), host=host, port=port)
        say(f"coordinator: {service.address}")
        command = ["cordillera", "train", str(run.folder), "--coordinator", reached_at(service.address), "--replica"]
        for name in replica_names(recipe.fault_tolerance.replicas):
            say(f"  -> {shlex.join([*command, name])}")
        service.serve(lambda: (status := run.status()) is not None and status.ended is not None)
        report = _ended(run, time.perf_counter() - since)
        if report is None:
            why = "the coordinator was stopped before the replicas had ended"
            run.write_status("failed", max(steps(run.checkpoints), default=0), recipe.training.steps, why)
        _write_replicas_page(run, say)
        if report is None:
            at = ("--listen", listen) if listen != "127.0.0.1:0" else ()
            again = shlex.join(["cordillera", "coordinate", str(run.folder), "--resume", *at])
            raise Interrupted(why, where=str(run.folder), remedy=f"go on with `{again}`")
        if report.ended != "interrupted":
            write_language_report(run)
    return LanguageOutcome(run, report)


def _ended(run: Run, seconds: float) -> LanguageReport | None:
    """Return how a job of ``seconds`` seconds ended, as its replicas recorded it; None without a record."""
    status = run.status()
    if status is None or status.ended is None:
        return None
    last = (run.metrics() or [{}])[-1]
    progress = LanguageProgress(status.step, last.get("tokens", 0), last.get("documents", 0))
    return LanguageReport(cast("LanguageEnd", status.ended), progress, seconds, read_evaluation(run, status.step))


def join(
    run: Run,
    name: str,
    coordinator: str,
    *,
    on_step: LanguageStepCallback | None = None,
    say: Say = silent,
) -> LanguageReport:
    """Train as one replica of a job that :func:`coordinate` began; Ctrl-C or SIGTERM ends this replica alone.

    Under a launcher (``torchrun``) each of its processes calls this; otherwise the processes are started here.

    Args:
        run: Run of the job.
        name: Name of the replica.
        coordinator: ``HOST:PORT`` of the coordinator.
        on_step: Function that draws progress.
        say: Function called with lines of text.

    Raises:
        PlanError: If there is no replica of this name, or it cannot take part.
        PeerError: If the coordinator does not answer.
    """
    recipe = recipes.load(run.recipe_file)
    if not isinstance(recipe, LanguageRecipe) or recipe.fault_tolerance.replicas == 1:
        raise PlanError("is no run of replicas", where=str(run.folder), remedy="begin it with `cordillera coordinate`")
    parse_address(coordinator, "coordinator")
    names = replica_names(recipe.fault_tolerance.replicas)
    if name not in names:
        raise PlanError(f"there is no replica {name}", where="replica", remedy=f"one of {', '.join(names)}")
    place = ReplicaPlace(name, coordinator, job_secret(run.folder), _configuration(recipe), leaves=True)
    device, parallel = select_device(recipe.device).type, recipe.parallel
    if place_in_job() is not None or parallel.world == 1:
        with join_job(device, parallel.deadline_s, backend=parallel.backend) as job:
            return _train(job, recipe, run, True, on_step, say, place)
    config = LaunchConfig(
        device_type=device,
        threads=recipe.threads,
        deadline_s=parallel.deadline_s,
        backend=parallel.backend,
        loaded=LOADED,
    )
    arguments = (place, recipe, str(run.folder))
    report: LanguageReport = launch(
        _launched_replica, parallel.world, arguments, config=config, hear=from_ranks(on_step, say)
    )
    return report


def _write_replicas_page(run: Run, say: Say) -> None:
    """Write the page of the replicas; how training ended does not depend on it."""
    try:
        say(f"replicas: {write_replicas_page(run)}")
    except CordilleraError as error:
        say(f"replicas.html was not written: {error}")


def _launched_replica(rank: int, place: ReplicaPlace, recipe: LanguageRecipe, folder: str) -> LanguageReport:
    """Train as one process of a replica."""
    on_step, say = to_launcher(rank)
    with join_job() as job:
        first = place.name == replica_names(recipe.fault_tolerance.replicas)[0]
        return _train(job, recipe, Run(folder), True, on_step, say if first else silent, place)


def _launched(rank: int, recipe: LanguageRecipe, folder: str, resume: bool) -> LanguageReport:
    """Train as one of several processes on this machine; rank 0 reports to the process that started it."""
    with join_job() as job:
        return _train(job, recipe, Run(folder), resume, *to_launcher(rank))


def _train(
    job: Job,
    recipe: LanguageRecipe,
    run: Run,
    resume: bool,
    on_step: LanguageStepCallback | None,
    say: Say,
    place: ReplicaPlace | None = None,
) -> LanguageReport:
    """Train in each process; the recipe's mesh has as many places as the job, or the replica, has processes."""
    if recipe.threads is not None:
        torch.set_num_threads(recipe.threads)
    trainer = _trainer(job, recipe, run, on_step, place)
    found = resume and trainer.resume()
    if resume and (found or place is None):
        say(f"resumed at step {trainer.progress.step}" if found else "no checkpoint yet: starting from the beginning")
    if recipe.training.start is not None and not found:
        start_from(trainer.engine, open_checkpoint(find_model(recipe.training.start)), recipe.seed)
    if isinstance(recipe, PostTrainingRecipe):
        add_reference(recipe, trainer, run, say)
    return trainer.fit()


def _trainer(
    job: Job,
    recipe: LanguageRecipe,
    run: Run,
    on_step: LanguageStepCallback | None = None,
    place: ReplicaPlace | None = None,
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
    common |= {"held_out": held_out.microbatches, "held_out_bytes": held_out.bytes}
    if place is not None:
        tolerance, local = recipe.fault_tolerance, None
        if tolerance.local_folder is not None:
            folder = Path(tolerance.local_folder, f"{run.folder.name}-{job_identity(run.folder)}", place.name)
            local = ShardedCheckpoints(folder, mesh, recipe.training.asynchronous)
        return ReplicatedTrainer(
            recipe.training, engine, batches, place=place, tolerance=tolerance, local=local, **common
        )
    return LanguageTrainer(recipe.training, engine, batches, **common)
