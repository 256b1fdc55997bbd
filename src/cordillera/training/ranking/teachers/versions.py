"""Teachers that score the events of a stream, and the versions that a teacher publishes as it learns."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from cordillera.data.files import folder_beside
from cordillera.data.ranking.encoding import Encoder
from cordillera.data.ranking.features import RankingBatch, Schema
from cordillera.data.ranking.stream.join import plain
from cordillera.embeddings.tables import TablesConfig
from cordillera.errors import DataError, TrainingError
from cordillera.kernels.repeatable import BLOCK
from cordillera.models.ranking import ModelConfig, build
from cordillera.models.ranking.base import RankingModel
from cordillera.numerics.formats.precision import Precision
from cordillera.numerics.quantization.rows import quantize_rows
from cordillera.training import checkpoints
from cordillera.training.optimizers import build_adamw, embedding_tables, load_moments, moments_of
from cordillera.training.ranking.scoring import autocast, load_weights
from cordillera.training.ranking.tasks.losses import weighted_loss

VERSION, LEARNT_UNTIL, EMBEDDING = "teacher_version", "teacher_learnt_until", "teacher_embedding"
"""Columns of augmented events: version, time of the newest label that it had learnt from, row of its embedding."""

SCORED_ROWS = 8192
"""Number of events that a teacher scores at a time."""


def score_column(task: str) -> str:
    """Return the column of augmented events with the teacher's logits of a task."""
    return f"teacher_{task}"


class LearningTeacherConfig(BaseModel):
    """Teacher that learns from the examples of all streams, each once, as they are completed.

    Attributes:
        model: Settings of the model; ``model.name`` chooses it.
        tables: Settings of its embedding tables.
        publish_every: Number of examples after which a version is published.
        lag_s: Seconds from the newest label of a version to its first score.
        batch_size: Number of examples in a batch.
        passes: Number of times that the examples between two versions are learnt.
        learning_rate: Rate of AdamW for dense parameters.
        weight_decay: AdamW's decoupled weight decay, applied to matrices only.
        precision: ``bf16`` or ``fp32``, as in ``training.precision``.
        seed: Seed of the weights and of dropout.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    model: ModelConfig
    tables: TablesConfig = TablesConfig()
    publish_every: int = Field(50_000, ge=1, le=10**9)
    lag_s: int = Field(0, ge=0, le=10**10)
    batch_size: int = Field(512, ge=1, le=2**20)
    passes: int = Field(1, ge=1, le=1000)
    learning_rate: float = Field(1e-3, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    precision: Precision = "fp32"
    seed: int = Field(1, ge=0, lt=2**63)

    @model_validator(mode="after")
    def _has_tables_in_memory(self) -> LearningTeacherConfig:
        if self.tables.storage == "file":
            raise ValueError("tables.storage = 'file' is for `cordillera train`: set 'memory'")
        return self


class StreamTeacher(Protocol):
    """What augmentation asks of a teacher."""

    def learn(self, examples: pl.DataFrame) -> None:
        """Take complete examples, in order of time."""
        ...

    def score(self, events: pl.DataFrame, times: NDArray[np.int64]) -> pl.DataFrame:
        """Return events with the teacher's columns; ``times`` are their timestamps in seconds."""
        ...

    def to_state(self) -> tuple[dict[str, pl.DataFrame], dict[str, Any]]:
        """Return the state from which the teacher resumes, besides its versions."""
        ...

    def load_state(self, frames: dict[str, pl.DataFrame], state: dict[str, Any]) -> None:
        """Resume from ``frames`` and ``state`` of :meth:`to_state`."""
        ...


@dataclass(frozen=True)
class ScoringModel:
    """A model that scores events with its encoder.

    Attributes:
        encoder: Encoder of the events.
        model: Model in evaluation mode.
        tasks: Names of the columns of its logits.
        precision: Precision of its products.
        embeds: Whether to give representations as well.
    """

    encoder: Encoder
    model: RankingModel
    tasks: tuple[str, ...]
    precision: Precision
    embeds: bool = False

    @torch.inference_mode()
    def columns(self, events: pl.DataFrame) -> list[pl.Series]:
        """Return the logits of events, ``float32``, and the rows of their embeddings if asked for.

        Raises:
            TrainingError: If a logit is not finite.
        """
        logits, rows = [], []
        for start in range(0, len(events), SCORED_ROWS):
            part = events.slice(start, SCORED_ROWS)
            encoded = self.encoder.encode(part, where="events of a stream", labels=False)
            # Pad to whole blocks, so that a row's result does not depend on the number of rows.
            batch = encoded.take_blocks(np.arange(len(part)), BLOCK).batch()
            with autocast(torch.device("cpu"), self.precision):
                shared = self.model.represent(batch.dense, self.model.look_up(batch))
                found = self.model.heads(shared).float()[: len(part)]
            if not found.isfinite().all():
                raise TrainingError("the teacher's score of an event is not finite", where="augmentation")
            logits.append(found)
            if self.embeds:
                rows.append(quantize_rows(shared.float()[: len(part)], 8).numpy())
        joined = torch.cat(logits).numpy() if logits else np.zeros((0, len(self.tasks)), np.float32)
        series = [pl.Series(score_column(task), joined[:, place]) for place, task in enumerate(self.tasks)]
        if self.embeds:
            packed = [row.tobytes() for part in rows for row in part]
            series.append(pl.Series(EMBEDDING, packed, dtype=pl.Binary))
        return series


def _without_scores(tasks: Sequence[str], count: int, embeds: bool) -> list[pl.Series]:
    columns = [pl.Series(score_column(task), [None] * count, dtype=pl.Float32) for task in tasks]
    return [*columns, pl.Series(EMBEDDING, [None] * count, dtype=pl.Binary)] if embeds else columns


class LearningTeacher:
    """A teacher whose versions are a function of the stream alone.

    A version is published at the time of its newest label plus the lag, and scores the events from that time on until
    the next version; events before the first version have no scores.

    Args:
        config: Settings.
        schema: Columns of events and examples.
        window_s: Seconds after an event in which its labels count.
        folder: Folder of the versions.
        embeds: Whether to give events their embeddings as well.

    Attributes:
        versions: Published versions: examples learnt from, ``learnt_until`` and ``published``, in seconds.
        calls: Number of events that each version has scored, by number.
    """

    def __init__(
        self, config: LearningTeacherConfig, schema: Schema, window_s: int, folder: Path, *, embeds: bool = False
    ) -> None:
        assert schema.timestamp is not None
        self.embeds = embeds
        for left in folder.glob(".step-*.tmp"):  # files of killed processes
            shutil.rmtree(left, ignore_errors=True)
        self.config, self.schema, self.window_s, self.folder = config, schema, window_s, folder
        self.versions: list[dict[str, int]] = []
        self.calls: dict[str, int] = {}
        self._waiting = pl.DataFrame()
        self._learner: _Learner | None = None
        self._scoring: dict[int, ScoringModel] = {}

    def learn(self, examples: pl.DataFrame) -> None:
        """Keep examples, and learn from them once there are enough for a version."""
        examples = plain(examples)
        examples = examples.drop([name for name in examples.columns if name.startswith("teacher_")])
        if len(examples):
            waiting = self._waiting
            self._waiting = pl.concat([waiting, examples], how="vertical_relaxed") if len(waiting) else examples
        while len(self._waiting) >= self.config.publish_every:
            self._publish(self._waiting.head(self.config.publish_every))
            self._waiting = self._waiting.slice(self.config.publish_every)

    def _publish(self, examples: pl.DataFrame) -> None:
        if self._learner is None:
            last = self.versions[-1]["examples"] if self.versions else None
            self._learner = _Learner.at(self.config, self.schema, self.folder, last, examples)
        self._learner.learn(examples)
        learnt = (self.versions[-1]["examples"] if self.versions else 0) + len(examples)
        self._learner.save(self.folder, learnt)
        until = int(examples[self.schema.timestamp or ""].cast(pl.Int64).max() or 0) + self.window_s  # type: ignore[arg-type]
        # its labels are all known one second after their window
        published = until + 1 + self.config.lag_s
        self.versions.append({"examples": learnt, "learnt_until": until, "published": published})

    def score(self, events: pl.DataFrame, times: NDArray[np.int64]) -> pl.DataFrame:
        """Return events with the scores of the version of their time; ``times`` are their timestamps in seconds."""
        published = [version["published"] for version in self.versions]
        number = np.searchsorted(np.array(published, dtype=np.int64), times, side="right")
        until = np.array([0, *(version["learnt_until"] for version in self.versions)])[number]
        parts = []
        for chosen in np.unique(number).tolist():
            part = events.filter(pl.Series(number == chosen))
            if chosen == 0:
                columns = _without_scores(self.schema.labels, len(part), self.embeds)
            else:
                columns = self._model(chosen).columns(part)
                self.calls[str(chosen)] = self.calls.get(str(chosen), 0) + len(part)
            parts.append(part.with_columns(columns))
        joined = pl.concat(parts) if parts else events.with_columns(_without_scores(self.schema.labels, 0, self.embeds))
        known = pl.Series(number > 0)
        return joined.with_columns(
            pl.Series(VERSION, number.astype(np.int32)).set(~known, None),
            pl.Series(LEARNT_UNTIL, until.astype(np.int64)).set(~known, None),
        )

    def _model(self, number: int) -> ScoringModel:
        if number not in self._scoring:
            for old in sorted(self._scoring)[:-1]:
                del self._scoring[old]
            version = self.versions[number - 1]
            learner = _Learner.at(self.config, self.schema, self.folder, version["examples"], None)
            self._scoring[number] = ScoringModel(
                learner.encoder, learner.model.eval(), self.schema.labels, self.config.precision, self.embeds
            )
        return self._scoring[number]

    def to_state(self) -> tuple[dict[str, pl.DataFrame], dict[str, Any]]:
        """Return the examples that were not learnt yet, and the list of versions."""
        return {"unlearnt": self._waiting}, {"versions": self.versions, "calls": self.calls}

    def load_state(self, frames: dict[str, pl.DataFrame], state: dict[str, Any]) -> None:
        """Go on from ``frames`` and ``state`` of :meth:`to_state`; versions published since are made again."""
        self._waiting, self.versions, self.calls = frames["unlearnt"], list(state["versions"]), dict(state["calls"])
        self._learner, self._scoring = None, {}


class _Learner:
    """Model of a learning teacher with its optimizer."""

    def __init__(self, config: LearningTeacherConfig, encoder: Encoder) -> None:
        self.config, self.encoder = config, encoder
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            self.model = build(config.model, encoder.features, config.tables)
            self.random = checkpoints.random_state()
        self.optimizer = build_adamw(
            self.model,
            learning_rate=config.learning_rate,
            betas=(0.9, 0.999),
            eps=1e-8,
            weight_decay=config.weight_decay,
        )

    @classmethod
    def at(
        cls,
        config: LearningTeacherConfig,
        schema: Schema,
        folder: Path,
        learnt: int | None,
        first: pl.DataFrame | None,
    ) -> _Learner:
        """Return the learner after ``learnt`` examples; None for a new one, whose encoder is fitted on ``first``."""
        if learnt is None:
            assert first is not None
            encoder = Encoder.fit(schema, [first])
            shutil.rmtree(folder / "encoder", ignore_errors=True)  # remains of an interrupted call
            with folder_beside(folder / "encoder") as beside:
                encoder.save(beside)
            return cls(config, encoder)
        learner = cls(config, Encoder.load(folder / "encoder"))
        checkpoint = checkpoints.load(checkpoints.folder_of(folder, learnt))
        load_weights(learner.model, checkpoint)
        load_moments(learner.optimizer, dict(learner.model.named_parameters()), checkpoint.tensors)
        learner.random = {name: one for name, one in checkpoint.tensors.items() if name in learner.random}
        return learner

    def learn(self, examples: pl.DataFrame) -> None:
        """Make one pass or several over the examples, in their order."""
        rows = self.encoder.encode(examples, where="examples of streams")
        with torch.random.fork_rng(devices=[]):
            checkpoints.restore_random_state(self.random)
            for _ in range(self.config.passes):
                for start in range(0, len(rows), self.config.batch_size):
                    self._step(rows.take(np.arange(start, min(start + self.config.batch_size, len(rows)))).batch())
            self.random = checkpoints.random_state()

    def _step(self, batch: RankingBatch) -> None:
        assert batch.labels is not None
        self.model.train()
        with autocast(torch.device("cpu"), self.config.precision):
            logits = self.model(batch)
        loss, _ = weighted_loss(logits, batch.labels, batch.weights, None)
        if not loss.isfinite():
            raise TrainingError(
                "the teacher's loss is not finite", where="teacher", remedy="lower teacher.learning_rate"
            )
        loss.backward()
        self.optimizer.step()
        for tables in embedding_tables(self.model).values():
            tables.update(1.0)
        self.optimizer.zero_grad(set_to_none=True)

    def save(self, folder: Path, learnt: int) -> None:
        tensors: dict[str, Tensor] = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        tensors |= moments_of(self.optimizer, dict(self.model.named_parameters()))
        checkpoints.save(folder, tensors | self.random, {"step": learnt})


class FixedTeacher:
    """A finished model that scores all events.

    Args:
        model: Model with its encoder.
        version: Its number.
        trained_until: Time of the newest sample that it was trained on, in seconds; None if that is unknown.
        name: Name for errors.
        window_s: Seconds after a sample in which its labels came, and which the model may thus know.

    Attributes:
        calls: Number of events scored, by version.
    """

    def __init__(
        self, model: ScoringModel, version: int, trained_until: int | None, name: str, window_s: int = 0
    ) -> None:
        self.model, self.version, self.trained_until, self.name = model, version, trained_until, name
        self.learnt_until = None if trained_until is None else trained_until + window_s
        self.calls: dict[str, int] = {}

    def learn(self, examples: pl.DataFrame) -> None:
        """Ignore the examples."""

    def score(self, events: pl.DataFrame, times: NDArray[np.int64]) -> pl.DataFrame:
        """Return events with the model's scores; ``times`` are their timestamps in seconds.

        Raises:
            DataError: If the model may have learnt from labels that are later than an event.
        """
        if self.learnt_until is not None and len(times) and times.min() < self.learnt_until:
            raise DataError(
                f"the teacher was trained on samples until {self.trained_until}, an event is of {times.min()}",
                where=self.name,
                remedy="score events with a teacher whose samples had all their labels (join.window_s) before them",
            )
        self.calls[str(self.version)] = self.calls.get(str(self.version), 0) + len(events)
        until = pl.lit(self.learnt_until, dtype=pl.Int64).alias(LEARNT_UNTIL)
        version = pl.lit(self.version, dtype=pl.Int32).alias(VERSION)
        return events.with_columns(self.model.columns(events)).with_columns(version, until)

    def to_state(self) -> tuple[dict[str, pl.DataFrame], dict[str, Any]]:
        """Return the number of calls."""
        return {}, {"calls": self.calls}

    def load_state(self, frames: dict[str, pl.DataFrame], state: dict[str, Any]) -> None:
        """Resume from ``frames`` and ``state`` of :meth:`to_state`."""
        self.calls = dict(state["calls"])
