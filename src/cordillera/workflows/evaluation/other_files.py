"""Evaluation of a ranking run on samples that are not of its data: of other files, or in memory."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from torch import Tensor

from cordillera.data.ranking.encoding import Encoder
from cordillera.data.ranking.features import RankingBatch
from cordillera.data.ranking.frames import FrameLike, frame_of
from cordillera.data.ranking.logs.columns import MISSING, RowPlace
from cordillera.data.ranking.logs.own import as_read, form_of
from cordillera.data.ranking.rows import read_rows
from cordillera.data.ranking.unseen import InputCheck
from cordillera.errors import DataError
from cordillera.numbers import counted
from cordillera.run import Run
from cordillera.training.ranking.evaluation import Evaluation
from cordillera.training.ranking.evaluation import evaluate as evaluate_split
from cordillera.training.ranking.paired_change import ScoredSamples
from cordillera.training.ranking.scoring import scorer, select_device
from cordillera.workflows.trained import card_of, recipe_of, restore_model_with_checkpoint, with_threads


class _KeptScores:
    """A function that scores batches and keeps what it scored."""

    def __init__(self, score: Callable[[RankingBatch], Tensor], tasks: tuple[str, ...]) -> None:
        self.score, self.tasks = score, tasks
        self.parts: dict[str, list[np.ndarray]] = {"weights": [], "groups": []}
        self.parts |= {name: [np.empty((0, len(tasks)), np.float32)] for name in ("logits", "labels")}

    def __call__(self, batch: RankingBatch) -> Tensor:
        logits = self.score(batch)
        columns = {"logits": logits, "labels": batch.labels, "weights": batch.weights, "groups": batch.groups}
        for name, column in columns.items():
            if column is not None:
                self.parts[name].append(column.detach().cpu().numpy())
        return logits

    def samples(self) -> ScoredSamples:
        """Return what was scored, in the order of the batches."""
        found = {name: np.concatenate(parts) for name, parts in self.parts.items() if parts}
        return ScoredSamples(self.tasks, found["logits"], found["labels"], found.get("weights"), found.get("groups"))


def evaluate_file(
    run: Run | Path | str, file: Path | str | None = None, *, rows: FrameLike | None = None
) -> Evaluation:
    """Evaluate a ranking ``run`` on other samples, which have the features and labels of its data.

    Timestamps and scores of teachers are not needed; a row whose label is blank counts for its other tasks alone.
    Nothing is written. The split of the evaluation is called like the file, or ``rows``.

    Args:
        file: CSV, TSV or Parquet file, folder, pattern or address.
        rows: Samples in memory in place of a file, as :func:`cordillera.load_recipe` takes them.

    Raises:
        DataError: If samples cannot be read, lack a column, or hold a value that training would have refused.
        RunError: If it is not a run of a ranking model.
        TrainingError: If a logit is not finite.
    """
    return score_file(run, file, rows=rows)[0]


def score_file(
    run: Run | Path | str, file: Path | str | None = None, *, rows: FrameLike | None = None
) -> tuple[Evaluation, ScoredSamples]:
    """Evaluate a ``run`` on a ``file`` or ``rows`` as :func:`evaluate_file` does; return the scores too."""
    run = run if isinstance(run, Run) else Run(run)
    recipe, encoder = recipe_of(run), Encoder.load(run.folder / "encoder")
    card, device = card_of(run), select_device(recipe.device)
    tasks, schema = tuple(card["tasks"]), encoder.schema
    inputs = InputCheck(encoder, card["data"]["facts"])
    labels = [schema.labels.index(task) for task in tasks]
    # training alone needs times and a teacher, and all labels
    encoder.schema = schema.model_copy(update={"timestamp": None, "teacher": None, "missing_labels": True})
    blank = np.zeros(len(tasks), np.int64)
    source = "rows" if rows is not None else str(file)
    held, place = frame_of([] if rows is None else rows, encoder.schema.columns, schema.ids), RowPlace(source, 0)
    if rows is not None and not len(held):
        raise DataError("there are none", where="rows")
    form = form_of(recipe.data) | {"timestamp_format": None}

    def batches() -> Iterator[RankingBatch]:
        in_memory = [] if rows is None else [(as_read(held, place, schema, form), place)]
        for frame, at in in_memory or read_rows(str(file), recipe.data, schema):
            encoded = encoder.encode(frame, where=at)
            inputs.update(encoded)
            assert encoded.labels is not None
            known = encoded.labels[:, labels]
            encoded = replace(encoded, labels=known)
            np.add(blank, np.equal(known, MISSING).sum(0), out=blank)
            for start in range(0, len(encoded), recipe.data.evaluation_batch_size):
                end = min(start + recipe.data.evaluation_batch_size, len(encoded))
                yield encoded.take(np.arange(start, end)).batch()

    def segments(batch: RankingBatch) -> dict[str, list[str]]:
        return {name: [names[name][row] for row in batch.sparse[name].values.tolist()] for name in schema.segments}

    names = {name: encoder.names(name) for name in schema.segments}
    with with_threads(recipe.threads):
        features = replace(encoder.features, tasks=tasks)
        _, model, checkpoint = restore_model_with_checkpoint(run, features, device)
        score = scorer(model, device, recipe.training.precision, recipe.training.emulate)
        ranking_k, name = recipe.training.ranking_k, Path(source).name
        kept = _KeptScores(score, tasks)
        evaluation = evaluate_split(kept, batches(), tasks, split=name, segments=segments, ranking_k=ranking_k)
    inputs.warn(f"{run.folder} on {source}")
    for task, count in zip(tasks, blank.tolist(), strict=True):
        if count and not schema.missing_labels:
            warnings.warn(
                f"{source}: '{task}' is blank in {counted(count, 'row')}, left out of its metrics", stacklevel=2
            )
    evaluation = replace(evaluation, step=checkpoint.step, steps=checkpoint.state.get("total_steps"))
    return evaluation, kept.samples()
