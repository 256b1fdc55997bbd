"""Trainers of post-training: the trained model, the data and the reference model of a recipe with an objective."""

from __future__ import annotations

import itertools
import math
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from cordillera.data.language.chats.batches import ChatBatches, ChatMicrobatches, held_out_chats
from cordillera.data.language.chats.corpora import ChatCorpora, ChatKind, Item
from cordillera.data.language.chats.tokens import ANSWER, END
from cordillera.distributed.mesh import ProcessMesh
from cordillera.errors import Interrupted, PlanError, RecipeError, RunError
from cordillera.files import replacing
from cordillera.models.language.checkpoints import open_checkpoint, read_model
from cordillera.recipe import PostTrainingRecipe
from cordillera.run import Run, disk_errors
from cordillera.serving.language.language_model import find_model
from cordillera.tensor_files import save_file
from cordillera.training.language.drafting import DraftObjective
from cordillera.training.language.engine import LanguageEngine
from cordillera.training.language.objectives import (
    AnswersObjective,
    DraftingConfig,
    GroupsConfig,
    GroupsObjective,
    ObjectiveConfig,
    PreferencesConfig,
    PreferencesObjective,
    RewardConfig,
    RewardObjective,
    document_sums,
)
from cordillera.training.language.trainer import LanguageTrainer
from cordillera.workflows.post_training.groups import GroupBatches, GroupTrainer
from cordillera.workflows.processes import Say

KINDS: Mapping[str, ChatKind] = {
    "sft": "chats",
    "reward": "preferences",
    "dpo": "preferences",
    "grpo": "problems",
    "draft": "chats",
}
"""Kind of data of each objective."""

_REFERENCE = "reference.safetensors"
_QUIET = 15.0  # seconds between progress messages of long work


def check_post_training(recipe: PostTrainingRecipe) -> None:
    """Check that a recipe's objective goes with its other settings.

    Raises:
        PlanError: If the objective is not trained over several processes.
        RecipeError: If two settings contradict each other.
    """
    name = recipe.objective.name
    if name != "sft" and recipe.parallel.world > 1:
        raise PlanError(
            f"{name} is trained in one process, the mesh has {recipe.parallel.world}",
            where="objective",
            remedy="leave [parallel] out; sft is trained on any mesh",
        )
    if recipe.model.adapter is not None and recipe.parallel.tensor > 1:
        raise PlanError("adapters are not split by matrices", where="parallel.tensor", remedy="set it to 1")
    wrong = []
    if name in ("dpo", "grpo", "draft") and recipe.training.start is None:
        wrong.append(("training.start", f"is missing: {name} needs a model that can already answer"))
    if (name == "draft") != (recipe.model.draft is not None):
        wrong.append(("model.draft", "describes the drafter of objective.name = 'draft', and goes with no other"))
    if recipe.model.scores and name != "reward":
        wrong.append(("model.scores", f"are learnt by objective.name = 'reward', not by {name}"))
    if recipe.packing.method == "fixed":
        wrong.append(("packing.method", "must not be fixed: chats are not divided"))
    if recipe.data.max_length > recipe.packing.context:
        wrong.append(("data.max_length", f"is above packing.context, {recipe.packing.context}"))
    if wrong:
        raise RecipeError(recipe.name, wrong)


def chats_line(corpora: ChatCorpora) -> str:
    """Return a line on the number of chats, pairs or problems."""
    if corpora.problems:
        return f"{len(corpora.problems):,} problems to learn from, {len(corpora.held_out_problems):,} held out"
    what = "chats" if len(corpora.training[0]) == 1 else "pairs of answers"
    tokens = sum(len(one.tokens) for item in corpora.training for one in item)
    dropped = f"; {corpora.too_long:,} too long" if corpora.too_long else ""
    learnt = f"{len(corpora.training):,} {what} of {tokens:,} tokens to learn from"
    return f"{learnt}, {len(corpora.held_out):,} held out{dropped}"


def make_objective(config: ObjectiveConfig, vocabulary: int | None = None) -> AnswersObjective:
    """Create the objective of a ``config``; samples are of the first ids of the ``vocabulary``, None for all."""
    if isinstance(config, PreferencesConfig):
        return PreferencesObjective(config)
    if isinstance(config, GroupsConfig):
        return GroupsObjective(config, vocabulary)
    if isinstance(config, DraftingConfig):
        return DraftObjective(config)
    return RewardObjective() if isinstance(config, RewardConfig) else AnswersObjective()


def post_trainer(
    recipe: PostTrainingRecipe, corpora: ChatCorpora, mesh: ProcessMesh, common: Mapping[str, Any]
) -> LanguageTrainer:
    """Create the trainer of a recipe; ``common`` holds the arguments that trainers of all recipes have."""
    objective = recipe.objective
    engine = LanguageEngine(
        recipe.training,
        recipe.model,
        mesh,
        recipe.seed,
        make_objective(objective, corpora.tokenizer.vocab_size),
    )
    if isinstance(objective, GroupsConfig):
        return _group_trainer(recipe, objective, engine, corpora, common)
    batches = ChatBatches(
        corpora.training,
        tokens=recipe.packing.tokens,
        microbatches=recipe.packing.count(recipe.parallel.copies * recipe.parallel.pipeline),
        most=_most(recipe),
        seed=recipe.seed,
        epochs=recipe.data.epochs,
        shuffle=recipe.data.shuffle,
        learns=_learns(recipe),
    )
    items = _first_tokens(corpora.held_out, recipe.training.evaluation_tokens)
    held = held_out_chats(items, most=_most(recipe), learns=_learns(recipe)) if items else None
    return LanguageTrainer(recipe.training, engine, batches, held_out=held, **common)


def _first_tokens(items: Sequence[Item], tokens: int | None) -> Sequence[Item]:
    """Return the first items up to the one that reaches ``tokens`` tokens in total; all for None."""
    if tokens is None:
        return items
    totals = itertools.accumulate(sum(len(one.tokens) for one in item) for item in items)
    return items[: sum(1 for total in totals if total < tokens) + 1]


def _most(recipe: PostTrainingRecipe) -> int:
    pair = 1 if KINDS[recipe.objective.name] == "chats" else 2
    return max(recipe.packing.most, pair * recipe.data.max_length)


def _learns(recipe: PostTrainingRecipe) -> frozenset[int]:
    objective = recipe.objective
    masks_ends = isinstance(objective, PreferencesConfig) and not objective.ends
    return frozenset({ANSWER} if masks_ends else {ANSWER, END})


def _group_trainer(
    recipe: PostTrainingRecipe,
    objective: GroupsConfig,
    engine: LanguageEngine,
    corpora: ChatCorpora,
    common: Mapping[str, Any],
) -> GroupTrainer:
    start = recipe.training.start
    assert start is not None
    batches = GroupBatches(
        objective,
        engine,
        corpora.problems,
        corpora.tokenizer,
        most=_most(recipe),
        seed=recipe.seed,
        reference=(lambda: read_model(open_checkpoint(find_model(start)))) if objective.kl else None,
    )
    return GroupTrainer(recipe.training, engine, batches, problems=corpora.held_out_problems, **common)


def add_reference(recipe: PostTrainingRecipe, trainer: LanguageTrainer, run: Run, say: Say) -> None:
    """Give the pairs of a preference training the log-probabilities of the model that it begins with.

    They are computed before the first step and stored in the run, from where a resumed run reads them.

    Raises:
        RunError: If a resumed run lacks them, or those of pairs that only its further steps learn from.
        Interrupted: If the trainer was asked to stop before they were computed.
    """
    if not isinstance(recipe.objective, PreferencesConfig):
        return
    batches, held = trainer.batches.batches, trainer.held_out
    assert isinstance(batches, ChatBatches)
    assert isinstance(held, ChatMicrobatches | None)
    path = run.folder / _REFERENCE
    if recipe.training.steps < trainer.progress.step:
        raise RunError(
            f"is at step {trainer.progress.step:,}, beyond training.steps, {recipe.training.steps:,}",
            where=str(run.folder),
            remedy="go on to more steps with --set training.steps=N",
        )
    used = _used(batches, recipe.training.steps - trainer.progress.step)
    if trainer.progress.step or path.exists():
        found = _read_reference(path)
        lacking = len(used) - int(found["training"][used].isfinite().all(1).sum())
        if lacking:
            raise RunError(
                f"has no log-probabilities of the reference for {lacking:,} pairs, which the first "
                f"{recipe.training.steps:,} steps learn from",
                where=str(path),
                remedy="go on to the number of steps that the run began with, or start a new run",
            )
    else:
        say("reference: log-probabilities of the model that training begins with")
        found = {"training": _reference(recipe, trainer, batches.items, used, run, say)}
        if held is not None:
            found["held_out"] = _reference(recipe, trainer, held.items, range(len(held.items)), run, say)
        with disk_errors(path), replacing(path) as beside:
            save_file(found, beside)
    batches.values["reference"] = found["training"]
    if held is not None:
        held.values["reference"] = found["held_out"]


def read_held_out_reference(recipe: PostTrainingRecipe, trainer: LanguageTrainer, run: Run) -> None:
    """Give held-out pairs, if there are any, the log-probabilities that :func:`add_reference` stored.

    Args:
        trainer: Trainer that evaluates and does not train.

    Raises:
        RunError: If they are missing, or those of some pairs are.
    """
    held, path = trainer.held_out, run.folder / _REFERENCE
    if not isinstance(recipe.objective, PreferencesConfig) or not isinstance(held, ChatMicrobatches):
        return
    found = _read_reference(path)["held_out"]
    if len(found) < len(held.items):
        raise RunError(
            f"has log-probabilities of the reference for {len(found):,} of {len(held.items):,} pairs to evaluate on",
            where=str(path),
            remedy="evaluate on no more tokens than training.evaluation_tokens",
        )
    held.values["reference"] = found


def _read_reference(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise RunError(
            "the log-probabilities of the reference cannot be read", where=str(path), remedy="start a new run"
        ) from error


def _used(batches: ChatBatches, steps: int) -> list[int]:
    """Return the numbers of the items that the next steps learn from."""
    state, found = batches.state_dict(), set[int]()
    for iteration in itertools.islice(batches, steps):
        for one in iteration.microbatches:
            found.update(one.documents["item"].tolist() if one.documents else ())
        if len(found - {-1}) == len(batches.items):
            break
    batches.load_state_dict(state)
    return sorted(found - {-1})


def _reference(
    recipe: PostTrainingRecipe,
    trainer: LanguageTrainer,
    items: Sequence[Item],
    used: Sequence[int],
    run: Run,
    say: Say,
) -> Tensor:
    """Return the sum of the log-probabilities of both answers of items, ``float32 [items, 2]``; NaN for unused ones."""
    found = torch.full((len(items), 2), math.nan)
    packed = held_out_chats([items[number] for number in used], most=_most(recipe), learns=_learns(recipe))
    told, done = time.monotonic(), 0
    for one in packed.neighbours(0, len(packed)):
        assert one.documents is not None
        sums = document_sums(trainer.engine.log_probabilities(one).cpu().float(), one.offsets)
        numbers = torch.tensor(used)[one.documents["item"][::2]]
        found[numbers] = sums.view(-1, 2)
        done += len(numbers)
        if done < len(used) and trainer.watchdog is not None and trainer.watchdog.should_stop:
            raise Interrupted(
                f"{done:,} of {len(used):,} pairs were read for the reference; nothing was written",
                where=str(run.folder),
                remedy=f"go on with `cordillera train {shlex.quote(str(run.folder))} --resume`",
            )
        if time.monotonic() > told + _QUIET:
            told = time.monotonic()
            say(f"reference: {done:,} of {len(used):,} pairs")
    return found
