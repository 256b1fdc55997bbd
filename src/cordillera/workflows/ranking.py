"""Training and evaluation of the recipe of a ranking model, as functions."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from cordillera import recipe as recipes
from cordillera.data.ranking.cache import ClickDataset, Splits, hold_same_rows
from cordillera.data.ranking.datasets import prepare
from cordillera.data.ranking.loader import Loader
from cordillera.data.ranking.unseen import warn_of_split
from cordillera.distributed.collectives import Collectives
from cordillera.distributed.job.environment import place_in_job
from cordillera.distributed.job.job import Job, join_job
from cordillera.distributed.job.launch import LaunchConfig, launch
from cordillera.distributed.ledger import Ledger
from cordillera.embeddings.cached_tables import require_cpu
from cordillera.embeddings.dynamic_tables import DynamicTables
from cordillera.embeddings.file_tables import FileTables
from cordillera.embeddings.pooled_exchange import choose_pooled
from cordillera.embeddings.prioritised_tables import PrioritisedEmbeddingTables
from cordillera.embeddings.sharded_tables import ShardedEmbeddingTables
from cordillera.embeddings.tables import EmbeddingTables, OutlinedTables
from cordillera.errors import DataError, NumericsError, PlanError, RecipeError, RunError
from cordillera.models import flops
from cordillera.models.ranking.base import RankingModel
from cordillera.numerics.dispatch.plan import PrecisionPlan
from cordillera.numerics.dispatch.training_linear import Applied, apply_for_training
from cordillera.planning.ranking.placement import Placement
from cordillera.planning.ranking.placer import place
from cordillera.planning.ranking.table_cost import TableProfile
from cordillera.recipe import RankingRecipe
from cordillera.reports.ranking.placement import PLACEMENT_FILE, REASONS_FILE
from cordillera.reports.ranking.run import write_report
from cordillera.run import Run, disk_errors, next_path, remove_folder, write_atomically
from cordillera.training import checkpoints
from cordillera.training.ranking import slices
from cordillera.training.ranking.codecs import coders_of, keep_given_choice
from cordillera.training.ranking.config import TrainingOutcome
from cordillera.training.ranking.evaluation import Evaluation
from cordillera.training.ranking.evaluation import evaluate as evaluate_split
from cordillera.training.ranking.ranks import FileRank, OneRank
from cordillera.training.ranking.scoring import ROWS, scorer, select_device
from cordillera.training.ranking.sharded_dense import shard_dense
from cordillera.training.ranking.towers.placing import check_tower_placement, place_towers, tower_problems, towers_of
from cordillera.training.ranking.towers.ranks import TowerRanks
from cordillera.training.ranking.towers.tables import TowerTables
from cordillera.training.ranking.trainer import StepCallback, Trainer
from cordillera.training.trackers import track_results
from cordillera.workflows.processes import LOADED, Say, from_ranks, keep_threads, silent, threads_of, to_launcher
from cordillera.workflows.trained import (
    card_of,
    in_file,
    loader_of,
    model_of,
    recipe_of,
    restore_model_with_checkpoint,
    splits_of,
    start_from,
    validation_of,
    with_threads,
)

_FLOPS_OF_A_VALUE = 48  # assumed: of the dense part, in the time in which one number of a row is looked up and updated
_SAMPLED_BATCHES = 8  # batches whose ids are counted for the placement of tables
_TABLES = {"plain": ShardedEmbeddingTables, "prioritised": PrioritisedEmbeddingTables, "towers": TowerTables}

USED_PLAN_FILE = "used-training-plan.json"
"""File in a run's folder with the plan of its training."""


@dataclass
class Outcome:
    """Run, report and test evaluation of :func:`train`, None if it was interrupted or there is no test split."""

    run: Run
    report: TrainingOutcome
    evaluation: Evaluation | None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} in {self.run.folder}: {self.report.ended}, {self.evaluation}>"


def _describe(recipe: RankingRecipe, model: RankingModel, splits: Splits) -> dict[str, Any]:
    sample = next(iter(Loader(splits.train, min(64, len(splits.train))).epoch()))
    return {
        "name": recipe.model.name,
        "config": recipe.model.model_dump(mode="json"),
        **asdict(flops.count(model, sample)),
        "tables": dict(splits.features.tables),
        "tasks": list(splits.features.tasks),
        "dense_features": list(splits.features.dense),
        "sparse_features": [feature.name for feature in splits.features.sparse],
        "data": {
            "fingerprint": splits.folder.name,
            "examples": {"train": len(splits.train), "validation": len(splits.validation), "test": len(splits.test)},
            "facts": splits.facts,
        },
    }


def train(
    recipe: RankingRecipe,
    folder: Path | str | None = None,
    *,
    resume: bool = False,
    processes: int | None = None,
    on_step: StepCallback | None = None,
    say: Say = silent,
) -> Outcome:
    """Train a ranking model into a run folder, evaluate it on the test split and write its report.

    ``recipe``, ``folder``, ``resume``, ``on_step``, ``say`` and errors are those of :func:`cordillera.workflows.train`.

    Args:
        processes: Number of processes on this machine, if no launcher has started any. Default:
            ``parallel.processes`` of the recipe.

    Raises:
        NumericsError: If the recipe's plan is not a plan of training for this machine and this model.
        RankError: If a process died.
        RunError: If a launcher has restarted this process, and there is no ``folder``.
    """
    _check_ids(recipe)
    launched = place_in_job()
    if launched is not None and processes not in (None, launched.size):
        raise PlanError(f"the launcher has started {launched.size} processes, not {processes}", where="processes")
    if launched is not None and launched.restarts and folder is None and not resume:
        raise RunError("is needed for restarts by a launcher", where="run", remedy="give --run FOLDER --resume")
    size = processes or (recipe.parallel.processes if launched is None else launched.size)
    recipe = recipe.model_copy(update={"parallel": recipe.parallel.model_copy(update={"processes": size})})
    if recipe.training.slices > 1:  # products of matrices depend on the number of threads of a process
        recipe = recipe.model_copy(update={"threads": recipe.threads or 1})
    if size > 1 or recipe.training.slices > 1:
        _check_together(recipe)
    outcome = (_train_alone if size == 1 else _train_together)(recipe, folder, resume, on_step, say)
    if outcome.evaluation is not None and (launched is None or launched.rank == 0):
        track_results(outcome.run, "test", outcome.evaluation.metrics(), outcome.report.progress.step)
    return outcome


def _train_alone(
    recipe: RankingRecipe, folder: Path | str | None, resume: bool, on_step: StepCallback | None, say: Say
) -> Outcome:
    """Train in this process."""
    device = select_device(recipe.device)
    _check_alone(recipe, device)
    with contextlib.ExitStack() as stack:
        if resume:
            run = Run(folder or "")
            stack.enter_context(run.lock())
            if recipe_of(run) != recipe:  # other processes, or changes that a resumed run may have
                write_atomically(run.recipe_file, recipes.dump(recipe))
        threads = recipe.threads
        if recipe.training.plan is None:  # a plan is valid for the number of threads that it was measured with
            threads = threads_of(recipe.threads, say, folder=folder if resume else None)
        stack.enter_context(with_threads(threads))
        say(f"data: {recipe.data.label}")
        splits = prepare(recipe.data)
        begins = not (resume and checkpoints.steps(run.checkpoints))
        in_folder = recipe.tables.storage == "file"  # a run whose tables are made in its folder begins with them
        if in_folder:
            run = run if resume else _create(recipe, folder, stack)
            if begins:
                remove_folder(run.folder / ROWS)  # rows without a checkpoint
        model = model_of(recipe, splits.features, in_file(recipe, run.folder / ROWS) if in_folder else None)
        if begins and recipe.training.start is not None:
            say(start_from(model, recipe))
        plan = None
        if recipe.training.plan is not None:
            # a run keeps the plan that it began with, because another one would give other bits
            source = Path(recipe.training.plan) if begins else run.folder / USED_PLAN_FILE
            plan, applied = _with_plan(model, source, recipe)
            say(
                f"plan: {len(applied.planned)} linear layers by kernels of {source}, {len(applied.left)} in fp32, "
                f"{len(applied.unknown)} of them unknown to the plan"
            )
        if not resume and not in_folder:
            run = _create(recipe, folder, stack)
        described = _begin(run, recipe, model, splits, plan) if begins else _check_same_data(run, recipe, splits)
        if recipe.threads is None and threads is not None:
            keep_threads(run, threads)
        say(
            f"model: {described['name']}, {described['parameters']:,} parameters + "
            f"{described['embedding_parameters']:,} in tables, {described['training_flops']:,} training FLOPs an "
            "example"
        )
        trainer = _trainer(recipe, model, splits, run, device, on_step)
        if resume:
            _resume(trainer, say)
        report = trainer.fit()
        if plan is not None and applied.unplanned:
            say(f"plan: {applied.unplanned:,} products had no kernel and were computed in fp32")
        if report.ended == "interrupted":
            return Outcome(run, report, None)
        evaluation = None
        if len(splits.test):
            evaluation = _evaluate(run, recipe, model, splits, "test", device, _place(recipe, trainer))
        _put_away(model.tables, run, say)
        write_report(run)
        return Outcome(run, report, evaluation)


def _resume(trainer: Trainer, say: Say) -> None:
    found = trainer.resume()
    say(f"resumed at step {trainer.progress.step}" if found else "no checkpoint yet: starting from the beginning")


def _put_away(tables: EmbeddingTables, run: Run, say: Say) -> None:
    """Describe dynamic tables or tables in a file after training; delete the file, which checkpoints hold copies of."""
    if isinstance(tables, DynamicTables):
        counts = zip(tables.features.tables, tables.ids.count_rows(), strict=True)
        say(f"tables: rows of {', '.join(f'{count - 1:,} ids of {name}' for name, count in counts)}")
        run.write_json("model.json", {**card_of(run), "embedding_parameters": tables.num_weights})
    elif isinstance(tables, FileTables):
        events, lines = tables.statistics, tables.memory_bytes()["lines"]
        say(
            f"tables: {lines / 1e6:,.1f} MB of {tables.memory_bytes()['file'] / 1e6:,.1f} MB in memory; "
            f"{events['reads']:,} rows read from the file, {events['writes']:,} written"
        )
        tables.close()
        remove_folder(run.folder / ROWS)


def _train_together(
    recipe: RankingRecipe, folder: Path | str | None, resume: bool, on_step: StepCallback | None, say: Say
) -> Outcome:
    """Train in several processes, which this one or a launcher starts; write the report in one."""
    size = recipe.parallel.processes
    if place_in_job() is None:
        run = _prepare(recipe, folder, resume, say)
        if recipe.threads is None:
            threads = threads_of(None, say, folder=run.folder if resume else None, processes=size)
            keep_threads(run, threads, size)
            recipe = recipe.model_copy(update={"threads": threads})
        outcome = _launch(recipe, run, resume, on_step, say)
    else:
        with join_job("cpu", recipe.parallel.deadline_s, backend=recipe.parallel.backend) as job:
            folders = [""]
            if job.rank == 0:
                folders = [str(_prepare(recipe, folder, resume, say).folder)]
            job.watchdog.meet("run prepared")
            dist.broadcast_object_list(folders)
            run = Run(folders[0])
            outcome = _train_rank(job, recipe, run, resume, *((on_step, say) if job.rank == 0 else (None, silent)))
        if job.rank > 0:
            return outcome
    if outcome.evaluation is not None:
        warn_of_split(prepare(recipe.data).facts, "test")
    if outcome.report.ended != "interrupted":
        write_report(run)
    return outcome


def _create(recipe: RankingRecipe, folder: Path | str | None, stack: contextlib.ExitStack) -> Run:
    """Make the folder of a run, and hold its lock in the region of the stack."""
    run = Run.create(folder or next_path(Path("runs"), recipe.name), recipes.dump(recipe))
    stack.enter_context(run.lock())
    return run


def _check_ids(recipe: RankingRecipe) -> None:
    """Refuse ids of 63 bits where no table can hold them, before the data is read."""
    schema, problems = recipe.data.schema_, []
    names = [] if schema is None else [one.name for one in (*schema.categorical, *schema.lists) if one.has_any_id]
    if names and recipe.tables.dynamic is None:
        why = f"{', '.join(names)}: ids of 63 bits need tables.dynamic; otherwise set num_embeddings"
        problems.append(("data.schema", why))
    elif names and getattr(recipe.model, "embedding_init", None) == "uniform_by_rows":
        why = f"'uniform_by_rows' needs num_embeddings of {', '.join(names)}; otherwise set a number, such as 0.05"
        problems.append(("model.embedding_init", why))
    if problems:
        raise RecipeError(recipe.name, problems)


def _check_alone(recipe: RankingRecipe, device: torch.device) -> None:
    """Refuse what tables of a kind cannot be trained with."""
    tables = recipe.tables
    require_cpu(tables, device)
    if recipe.training.emulate is not None and recipe.model.name in ("hstu", "target-attention"):
        raise RecipeError(recipe.name, [("training.emulate", "does not round attention over histories: leave it out")])
    if recipe.training.emulate is not None and (tables.are_encoded or tables.dynamic is not None):
        why = "rounds whole tables in memory: set tables.rows = 'fp32' and tables.cache = 0, without tables.dynamic"
        raise RecipeError(recipe.name, [("training.emulate", why)])


def _check_together(recipe: RankingRecipe) -> None:
    """Refuse settings that require training in one process without slices."""
    training, problems = recipe.training, []
    if recipe.tables.storage == "file":
        problems.append(("tables.storage", "'file' is for training in one process: set 'memory' and cache = 0"))
    elif recipe.tables.are_encoded:
        problems.append(("tables", "rows in few bits and caches are of one process: set rows = 'fp32', cache = 0"))
    keys = ("plan", "start", "emulate", "probe_every", "compile")
    alone = [f"tables.{key}" for key in ("dynamic", "l2") if getattr(recipe.tables, key)]
    alone += [f"training.{key}" for key in keys if getattr(training, key)]
    alone += ["model.name"] if recipe.model.name == "supernet" else []  # a supernet divides batches itself
    problems += [(key, "is for training in one process, without slices") for key in alone]
    if recipe.parallel.exchange == "prioritised" and recipe.parallel.copies > 1:
        problems.append(("parallel.copies", "prioritised exchange knows no copies: set 1, or exchange = 'plain'"))
    if recipe.parallel.exchange == "prioritised" and recipe.parallel.pool == "bags":
        why = "prioritised exchange delays rows, sums of bags cannot be divided: set 'rows', or exchange = 'plain'"
        problems.append(("parallel.pool", why))
    problems += tower_problems(recipe.parallel, getattr(recipe.model, "towers", None))
    if recipe.parallel.file_cache:
        problems.append(("parallel.file_cache", "parts in files are not trained over several processes: set 0"))
    if recipe.parallel.processes % recipe.parallel.hosts:
        problems.append(("parallel.hosts", f"does not divide {recipe.parallel.processes} processes"))
    for key in ("norm", "top_norm"):
        if getattr(recipe.model, key, None) == "batch":
            why = "'batch' is for training in one process, without slices: set 'layer' or 'none'"
            problems.append((f"model.{key}", why))
    if training.teacher.head == "auxiliary" and recipe.parallel.dense != "replicated":
        problems.append(("parallel.dense", "auxiliary heads of a teacher are whole: set 'replicated'"))
    if recipe.device != "cpu" and (recipe.device != "auto" or select_device("auto").type != "cpu"):
        problems.append(("device", "several processes, and slices, train on CPUs: set device = 'cpu'"))
    if training.slices > 1:
        problems += slices.why_not(training, recipe.parallel)
    if problems:
        raise RecipeError(recipe.name, problems)


def _prepare(recipe: RankingRecipe, folder: Path | str | None, resume: bool, say: Say) -> Run:
    """Prepare data and folder of a run in several processes, and place its tables."""
    say(f"data: {recipe.data.label}")
    splits = prepare(recipe.data)
    if recipe.parallel.balance == "variable" and not splits.features.sparse:
        raise RecipeError(recipe.name, [("parallel.balance", "the data has no ids, which cost time: set 'none'")])
    model = model_of(recipe, splits.features, OutlinedTables)
    kept = Path(folder or "") / PLACEMENT_FILE
    if resume and kept.is_file() and recipe_of(Run(folder or "")).parallel == recipe.parallel:
        placement, why = Placement.read(kept), ""
    else:
        placement, why = _placement(recipe, model, splits)
        placement = replace(placement, pooled=_pooled(recipe, placement, model, splits))
    if resume:
        run = Run(folder or "")
        begins = not checkpoints.steps(run.checkpoints)
    else:
        run, begins = Run.create(folder or next_path(Path("runs"), recipe.name), recipes.dump(recipe)), True
    with run.lock():
        described = _begin(run, recipe, model, splits, None) if begins else _check_same_data(run, recipe, splits)
        say(
            f"model: {described['name']}, {described['parameters']:,} parameters + "
            f"{described['embedding_parameters']:,} in tables, {described['training_flops']:,} training FLOPs an "
            "example"
        )
        write_atomically(run.folder / PLACEMENT_FILE, placement.to_text())
        keep_given_choice(recipe.parallel, placement, run)
        if why:
            write_atomically(run.folder / REASONS_FILE, why + "\n")
        write_atomically(run.recipe_file, recipes.dump(recipe))
    ways = Counter(placement.way(table) for table in placement.tables)
    if ways:
        summed = f", bags of {len(placement.pooled)} summed by their holders" if placement.pooled else ""
        cuts = ", ".join(f"{count} {way}" for way, count in ways.items())
        say(f"tables: over {placement.size} processes, {cuts}{summed}")
    return run


def _placement(recipe: RankingRecipe, model: RankingModel, splits: Splits) -> tuple[Placement, str]:
    """Return the placement of a run's tables, read or planned, with the reasons of a planned one."""
    given, tables = recipe.parallel, model.tables
    if given.placement != "auto":
        placement = Placement.read(given.placement)
        shapes = {name: (rows, tables.embedding_dim) for name, rows in tables.features.tables.items()}
        placement.check(shapes, given.processes, where=given.placement)
        if given.exchange == "towers":
            check_tower_placement(placement, towers_of(model), given.hosts, given.placement)
        if given.exchange == "prioritised" and any(len(part.ranks) > 1 for part in placement.parts):
            raise PlanError(
                "prioritised exchange knows no copies of parts",
                where=given.placement,
                remedy="give each part one rank, or set parallel.exchange = 'plain'",
            )
        return placement, ""
    if not tables.features.tables:
        return Placement(given.processes, {}, ()), ""
    if given.exchange == "prioritised":
        given = given.model_copy(update={"copied_rows": 0})
    batch = min(recipe.data.batch_size, len(splits.train))
    if recipe.training.slices > 1 and recipe.tables.name == "rowwise_adagrad":  # its state sums over columns
        given = given.model_copy(update={"cuts": tuple(cut for cut in given.cuts if cut == "rows")})
    profiles = _profiles(recipe, tables, splits)
    if given.exchange == "towers":
        planned = place_towers(profiles, towers_of(model), given.processes, given.hosts, given, batch=batch)
    else:
        planned = place(profiles, given.processes, given, batch=batch)
    return planned.placement, planned.explain()


def _pooled(recipe: RankingRecipe, placement: Placement, model: RankingModel, splits: Splits) -> tuple[str, ...]:
    """Return the tables whose bags are summed by the ranks that hold the rows."""
    given = recipe.parallel
    if given.pool == "rows" or given.exchange == "prioritised" or recipe.training.slices > 1 or not placement.tables:
        return ()
    if given.pool == "bags" or given.exchange == "towers":
        return tuple(placement.tables)
    batches = islice(loader_of(recipe, splits.train, training=True).epoch(), _SAMPLED_BATCHES)
    return choose_pooled(placement, model.tables.features, (batch.sparse for batch in batches))


def _profiles(recipe: RankingRecipe, tables: EmbeddingTables, splits: Splits) -> dict[str, TableProfile]:
    """Return the traffic of every table in some batches of the training split."""
    lookups, distinct, samples = Counter[str](), Counter[str](), 0
    batches = islice(loader_of(recipe, splits.train, training=True).epoch(), _SAMPLED_BATCHES)
    for batch in batches:
        samples += len(batch)
        ids: dict[str, list[torch.Tensor]] = {}
        for feature in tables.features.sparse:
            ids.setdefault(feature.table, []).append(batch.sparse[feature.name].values)
        for table, found in ids.items():
            rows = torch.cat(found)
            lookups[table] += len(rows)
            distinct[table] += len(rows.unique())
    return {
        table: TableProfile(
            rows,
            tables.embedding_dim,
            lookups=lookups[table] / max(1, samples),
            distinct=distinct[table] / lookups[table] if lookups[table] else 1.0,
            optimizer=recipe.tables.name,
        )
        for table, rows in tables.features.tables.items()
    }


def _train_rank(
    job: Job, recipe: RankingRecipe, run: Run, resume: bool, on_step: StepCallback | None, say: Say
) -> Outcome:
    """Train in each process, and evaluate the test split together."""
    if recipe.threads is not None:
        torch.set_num_threads(recipe.threads)
    splits = prepare(recipe.data)
    links = Collectives(None, Ledger(), recipe.parallel.deadline_s)
    placement, given = Placement.read(run.folder / PLACEMENT_FILE), recipe.parallel
    kind = _TABLES[given.exchange] if recipe.training.slices == 1 else slices.TABLES[given.exchange]
    model = model_of(recipe, splits.features, partial(kind, placement=placement, links=links))
    tables = model.tables
    assert isinstance(tables, ShardedEmbeddingTables)
    tables.coders = coders_of(given, placement, links, run, say)
    shard_dense(model, given.dense, job.size, given.hosts, given.deadline_s, links.ledger)
    of_sample = card_of(run)["training_flops"] / (_FLOPS_OF_A_VALUE * tables.embedding_dim)
    by_towers, in_slices = partial(TowerRanks, model, given.hosts), partial(slices.ranks_of, tables)
    many = by_towers if given.exchange == "towers" else partial(in_slices, recipe.training.slices)
    ranks = many(job.watchdog, given.balance, of_sample)
    trainer = _trainer(recipe, model, splits, run, torch.device("cpu"), on_step, ranks)
    if resume:
        _resume(trainer, say)
    report, evaluation = trainer.fit(), None
    if report.ended != "interrupted" and len(splits.test):
        evaluation = _evaluate(run, recipe, model, splits, "test", trainer.device, _place(recipe, trainer), ranks)
    return Outcome(run, report, evaluation)


def _place(recipe: RankingRecipe, trainer: Trainer) -> tuple[int, int]:
    """Return the number of training steps of the final weights, and the total number of steps."""
    best = trainer.progress.best_step if recipe.training.patience is not None else None
    return trainer.progress.step if best is None else best, trainer.total_steps


def _launch(recipe: RankingRecipe, run: Run, resume: bool, on_step: StepCallback | None, say: Say) -> Outcome:
    config = LaunchConfig(
        threads=recipe.threads,
        deadline_s=recipe.parallel.deadline_s,
        backend=recipe.parallel.backend,
        remedy=f"continue it with `cordillera train {run.folder} --resume`",
        loaded=LOADED,
    )
    arguments = (recipe, str(run.folder), resume)
    outcome: Outcome = launch(
        _launched, recipe.parallel.processes, arguments, config=config, hear=from_ranks(on_step, say)
    )
    return outcome


def _launched(rank: int, recipe: RankingRecipe, folder: str, resume: bool) -> Outcome:
    """Train as one of several processes on this machine; rank 0 reports to the process that started it."""
    with join_job() as job:
        return _train_rank(job, recipe, Run(folder), resume, *to_launcher(rank))


def _begin(
    run: Run, recipe: RankingRecipe, model: RankingModel, splits: Splits, plan: PrecisionPlan | None
) -> dict[str, Any]:
    """Write the files of a run that training starts with; return the content of ``model.json``."""
    if plan is not None:
        plan.save(run.folder / USED_PLAN_FILE)
    described = _describe(recipe, model, splits)
    with disk_errors(run.folder):
        (run.folder / "encoder").mkdir(exist_ok=True)
    splits.encoder.save(run.folder / "encoder")
    run.write_json("model.json", described)
    return described


def _check_same_data(run: Run, recipe: RankingRecipe, splits: Splits) -> dict[str, Any]:
    """Check that a resumed run sees the samples that it began with; return the content of ``model.json``."""
    described = card_of(run)
    before = splits.folder.with_name(described["data"]["fingerprint"])
    if before != splits.folder and not hold_same_rows(before, splits.folder):
        what = "has changed since the run began, or an earlier version read it otherwise; it must stay the same"
        raise DataError(what, where=recipe.data.label, remedy="restore the files, or start a new run")
    return described


def _trainer(
    recipe: RankingRecipe,
    model: RankingModel,
    splits: Splits,
    run: Run,
    device: torch.device,
    on_step: StepCallback | None,
    ranks: OneRank | None = None,
) -> Trainer:
    if isinstance(model.tables, FileTables):
        ranks = FileRank(model.tables)
    return Trainer(
        recipe.training,
        model,
        loader_of(recipe, splits.train, training=True),
        validation_of(recipe, splits),
        run,
        tasks=splits.features.tasks,
        device=device,
        on_step=on_step,
        recipe=recipe,
        ranks=ranks or slices.alone(model, recipe.training.slices),
    )


def _with_plan(model: RankingModel, file: Path, recipe: RankingRecipe) -> tuple[PrecisionPlan, Applied]:
    """Apply a plan of training to a model; return both."""
    plan = PrecisionPlan.load(file, select_device(recipe.device))
    most = max((choice.rows for choice in plan.choices), default=0)
    if most < (batch := recipe.data.batch_size):
        again = f"cordillera probe RUN --training --rows {batch}"
        raise NumericsError(f"knows of {most} rows, batches have {batch}", where=str(file), remedy=again)
    return plan, apply_for_training(model, plan)


def _evaluate(
    run: Run,
    recipe: RankingRecipe,
    model: RankingModel,
    splits: Splits,
    split: str,
    device: torch.device,
    place: tuple[int | None, int | None],
    ranks: OneRank | None = None,
) -> Evaluation:
    """Evaluate a model by all ``ranks``, of which rank 0 writes the result; ``place`` is its step and the last one."""
    dataset: ClickDataset = getattr(splits, split)
    ranks = ranks or slices.alone(model, recipe.training.slices)
    evaluation = evaluate_split(
        ranks.scorer(scorer(model, device, recipe.training.precision, recipe.training.emulate)),
        loader_of(recipe, dataset, training=False).epoch(),
        splits.features.tasks,
        split=split,
        segments={name: dataset.segments(name) for name in splits.encoder.schema.segments},
        ranking_k=recipe.training.ranking_k,
    )
    evaluation = replace(evaluation, step=place[0], steps=place[1])
    if ranks.size == 1:
        warn_of_split(splits.facts, split)
    if ranks.rank == 0:
        name = "evaluation.json" if split == "test" else f"evaluation-{split}.json"
        run.write_json(name, json.loads(evaluation.to_json()))
    return evaluation


def evaluate(run: Run | Path | str, split: str = "test") -> Evaluation:
    """Evaluate a ``run`` on one ``split``; see :func:`cordillera.workflows.evaluate`.

    Raises:
        RunError: If it is not a run, or the split is not one of the three.
        DataError: If the data has changed since the run was trained.
    """
    run = run if isinstance(run, Run) else Run(run)
    if split not in ("train", "validation", "test"):
        raise RunError(f"must be train, validation or test, got {split!r}", where="split")
    recipe = recipe_of(run)
    device = select_device(recipe.device)
    with with_threads(recipe.threads):
        splits = splits_of(run, recipe)
        _, model, checkpoint = restore_model_with_checkpoint(run, splits.features, device)
        place = (checkpoint.step, checkpoint.state.get("total_steps"))
        return _evaluate(run, recipe, model, splits, split, device, place)
