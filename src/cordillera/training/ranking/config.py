"""Settings of training a ranking model, and its progress."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, field_validator, model_validator

from cordillera.data.ranking.balance import SampleBalance
from cordillera.distributed.codecs.coders import CodecName
from cordillera.distributed.job.environment import JobBackend, checked_deadline
from cordillera.numerics.emulation.emulation import EmulationConfig
from cordillera.numerics.formats.precision import Precision, precision_of_machine
from cordillera.planning.ranking.placer import PlacementConfig
from cordillera.training.optimizers import schedule
from cordillera.training.ranking.metrics import RANKING_K
from cordillera.training.ranking.tasks.loss_balance import BalanceConfig
from cordillera.training.ranking.teachers.distillation import TeacherConfig

StopMetric = Literal["ne", "log_loss", "auc", "gauc", "ndcg", "recall", "mrr"]
"""Metrics by which training can select the best weights."""

STOP_TITLES: dict[str, str] = {
    "ne": "NE", "log_loss": "log loss", "auc": "AUC", "gauc": "GAUC", "ndcg": "NDCG", "recall": "recall", "mrr": "MRR",
}  # fmt: skip
"""Names of the stop metrics in text."""

PLATEAU_FACTOR = 0.1
"""Factor of the rates at each evaluation that is no better, with the decay ``plateau``."""

NEED_GROUPS = ("gauc", "ndcg", "recall", "mrr")
"""Stop metrics that need a group in the schema."""

DecayRate: TypeAlias = Annotated[float, Field(ge=0, lt=1)]


def is_lower_better(metric: str) -> bool:
    """Return whether lower values of a metric are better."""
    return metric in ("ne", "log_loss")


class TrainingConfig(BaseModel):
    """Settings of training.

    Attributes:
        epochs: Number of passes over the training split.
        max_steps: Largest number of steps, regardless of ``epochs``; null for no limit.
        precision: ``bf16`` computes matrix products in bfloat16 over float32 master weights (autocast); ``fp32``
            computes everything in float32. Default: ``bf16`` if a GPU or the processor multiplies in it, else ``fp32``.
        plan: File of ``cordillera probe RUN --training`` whose kernels train the linear layers; needs ``precision =
            "fp32"``. Evaluation and scoring are in float32.
        start: Run of the same model whose weights training begins with, and whose ids and transforms the data keeps
            (``data.encoder``). Ids that it does not know begin as in a new run. The state of the tables' optimizer is
            taken over if it is of the same kind. Default: training begins with new weights.
        learning_rate: Peak rate of AdamW for dense parameters; the rate of the tables is in ``[tables]``.
        betas: AdamW's decay rates, at least 0 and below 1.
        eps: Term added to AdamW's denominator.
        weight_decay: AdamW's decoupled weight decay, applied to matrices only.
        warmup_fraction: Share of all steps over which rates rise linearly from zero.
        decay: Decay of the rates after the warm-up: ``none``, ``linear``, ``cosine``, or ``plateau``, which multiplies
            them by 0.1 at each evaluation on the validation split without a better ``stop_on``.
        final_rate: Factor of the rates after the last step, with ``linear`` and ``cosine``; least one with ``plateau``.
        gradient_clip: Largest global norm of the dense gradients; null for no limit. Table gradients are not in the
            norm.
        task_weights: Weight of each task's loss, by task name; null for ones.
        patience: Number of evaluations on the validation split without a better ``stop_on`` after which training stops
            and returns to the best weights; null to never stop early and keep the last weights.
        stop_on: Metric of which ``patience``, ``plateau`` and the best weights are: ``ne`` or ``log_loss``, which are
            better where they are lower, or ``auc``, ``gauc``, ``ndcg``, ``recall`` or ``mrr``, where they are higher.
            Of several tasks, their mean counts. The last four need a group in the schema.
        evaluate_every: Steps between evaluations on the validation split; null for once an epoch.
        checkpoint_every: Steps between checkpoints, in addition to those at evaluations; null for none.
        log_every: Steps between records of the training loss.
        progressive: Whether to predict every batch before training on it and report the metrics of those predictions
            (for streams).
        progressive_window: Number of samples in a window of the progressive metrics.
        ranking_k: Number of samples of a group, by descending score, that count for NDCG, recall and MRR; read where
            the schema has a group.
        slices: Number of slices of every batch, which are computed one after another, each as a batch of its own, with
            weights that change once a step. Results then do not depend on the number of processes, to the bit, where
            that divides the number of slices. 1 computes each process's share of a batch at once.
        compile: Whether to compile the dense part with torch.compile; needs a C++ compiler on the CPU.
        probe_every: Steps between observations of the inputs of linear layers, for ``cordillera probe``; 0 for none.
            The statistics take 8 bytes for each pair of a layer's inputs, also in checkpoints.
        probe_marginals: Whether to also keep quantiles of each input, for layers of up to 2048 inputs, from which
            ``cordillera probe`` draws inputs with the observed tails and zeros.
        emulate: Number format of hardware to emulate; needs ``precision = "fp32"``.
        balance: How gradients of several tasks are balanced on the representation that they share.
        teacher: How the scores of a teacher are learnt.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    epochs: int = Field(1, ge=1, le=10**9)
    max_steps: int | None = Field(None, ge=1, le=10**12)
    precision: Precision = Field(default_factory=precision_of_machine)
    plan: str | None = None
    start: str | None = None
    learning_rate: float = Field(1e-3, gt=0)
    betas: tuple[DecayRate, DecayRate] = (0.9, 0.999)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    warmup_fraction: float = Field(0.0, ge=0, le=1)
    decay: Literal["none", "linear", "cosine", "plateau"] = "none"
    final_rate: float = Field(0.0, ge=0, le=1)
    gradient_clip: float | None = Field(None, gt=0, allow_inf_nan=False)
    task_weights: dict[str, FiniteFloat] | None = None
    patience: int | None = Field(None, ge=1, le=10**12)
    stop_on: StopMetric = "ne"
    evaluate_every: int | None = Field(None, ge=1, le=10**12)
    checkpoint_every: int | None = Field(None, ge=1, le=10**12)
    log_every: int = Field(20, ge=1, le=10**12)
    progressive: bool = False
    progressive_window: int = Field(10_000, ge=1, le=10**9)
    ranking_k: int = Field(RANKING_K, ge=1, le=10_000)
    slices: int = Field(1, ge=1, le=2**12)
    compile: bool = False
    probe_every: int = Field(0, ge=0)
    probe_marginals: bool = False
    emulate: EmulationConfig | None = None
    balance: BalanceConfig = BalanceConfig()
    teacher: TeacherConfig = TeacherConfig()

    def rate_factor(self, progress: Progress, steps: int) -> float:
        """Return the factor of all learning rates after ``progress`` in a training of ``steps``."""
        factor = schedule(
            progress.step,
            steps,
            warmup=round(self.warmup_fraction * steps),
            decay="none" if self.decay == "plateau" else self.decay,
            floor=self.final_rate,
        )
        return factor * max(self.final_rate, PLATEAU_FACTOR**progress.cuts) if self.decay == "plateau" else factor

    @model_validator(mode="after")
    def _emulates_from_float32(self) -> TrainingConfig:
        if self.probe_every and self.compile:
            raise ValueError("layers of compiled code cannot be listened to: set compile = false, or probe_every = 0")
        if self.emulate is not None:
            self.emulate.check(self.precision, self.compile)
        return self

    @model_validator(mode="after")
    def _marginals_are_of_probes(self) -> TrainingConfig:
        if self.probe_marginals and not self.probe_every:
            raise ValueError("probe_marginals has no effect: set probe_every")
        return self

    @model_validator(mode="after")
    def _gradients_meet_on_whole_batches(self) -> TrainingConfig:
        wanted = {"balance.mode": self.balance.mode, "teacher.head": self.teacher.head}
        others = {"slices": self.slices > 1, "compile": self.compile, "emulate": self.emulate}
        for setting, value in wanted.items():
            for key, is_set in others.items():
                if value != "none" and is_set:
                    raise ValueError(f"{setting} = '{value}' does not go with {key}")
        if self.balance.mode != "none" and self.teacher.head == "serving":
            raise ValueError("the tasks that are balanced are those of labels: set teacher.head = 'auxiliary'")
        return self

    @model_validator(mode="after")
    def _plans_are_for_float32(self) -> TrainingConfig:
        if self.plan is not None and (self.precision != "fp32" or self.compile or self.emulate is not None):
            raise ValueError("a plan is for float32: set precision = 'fp32', compile = false, and emulate nothing")
        return self


class RankingParallelConfig(PlacementConfig):
    """Division of a training among processes.

    Attributes:
        processes: Number of processes; ``--nproc`` sets it, and under a launcher the number that it started counts.
        placement: ``auto`` for the planner, which the keys before it direct, or a file with the placement of tables, as
            ``placement.json`` in a run's folder.
        exchange: ``plain``; ``prioritised``: rows and gradients that two neighbouring batches do not share travel
            behind computation (FreeScale), with equal results and more messages; or ``towers``: each of ``hosts`` holds
            the whole tables of one tower of ``[model.towers]`` and computes its module for all samples, so that only
            its outputs travel between hosts (DMT), with equal results.
        pool: What ranks that hold rows send: ``rows``, each that differs once; ``bags``, one sum for each bag; or
            ``auto``, for every table what takes fewer bytes in some batches of the training split (rows with
            prioritised exchange, which knows no sums). A placement's own list of pooled tables is replaced.
        codec: Form in which rows, or sums of bags, travel between processes in training: ``raw``; ``distinct``
            (lossless); ``fp16``, ``bf16``, ``int8``, ``int4``; ``bounded`` and ``bounded-fast``, within an error bound
            of 1, 3 or 5 % of the range of what is sent, by the table's number of rows. These but the first two change
            results. ``auto`` measures the first steps and chooses for each table what is fastest, ``raw`` or
            ``distinct``; it never changes results. ``auto-bounded`` chooses among ``bounded`` and ``bounded-fast`` as
            well.
        codec_file: File with the choice of a run that trained with ``auto`` or ``auto-bounded``, as ``codecs.json`` in
            its folder, to repeat it; null to measure.
        bound_scale: Factor of these error bounds.
        bound_steps: Number of steps over which error bounds fall from twice their values.
        balance: Samples of a process: ``none``, equal shares of every batch in order; ``fixed``, equally many, so that
            processes have about equally many ids; ``variable``, any number, so that processes have equal work by ids
            and dense part.
        dense: Where dense matrices are: ``replicated`` (whole on every process), ``full`` (in parts over all of them),
            or ``hybrid`` (in parts over the processes of a host, with equal copies on all hosts).
        hosts: Number of hosts, each with equally many consecutive ranks; for ``hybrid`` and ``towers``.
        backend: What carries what processes exchange: ``auto`` for gloo, or ``cordillera`` for Cordillera's own
            (:mod:`cordillera.distributed.transport`), which is faster for large tensors.
        deadline_s: Longest time of one wait for other processes, in seconds.
    """

    processes: int = Field(1, ge=1, le=2**20)
    placement: str = "auto"
    exchange: Literal["plain", "prioritised", "towers"] = "plain"
    pool: Literal["auto", "rows", "bags"] = "auto"
    codec: CodecName = "raw"
    codec_file: str | None = None
    bound_scale: float = Field(1.0, gt=0, le=100, allow_inf_nan=False)
    bound_steps: int = Field(0, ge=0, le=10**12)
    balance: SampleBalance = "none"
    dense: Literal["replicated", "full", "hybrid"] = "replicated"
    hosts: int = Field(1, ge=1, le=2**20)
    backend: JobBackend = "auto"
    deadline_s: float = Field(300.0, gt=0, allow_inf_nan=False)

    _is_deadline = field_validator("deadline_s")(checked_deadline)

    @model_validator(mode="after")
    def _a_choice_is_of_auto(self) -> RankingParallelConfig:
        if self.codec_file is not None and self.codec not in ("auto", "auto-bounded"):
            raise ValueError("codec_file is for codec = 'auto' or 'auto-bounded'")
        return self


@dataclass
class Progress:
    """Position of training, as stored in the checkpoint.

    Attributes:
        batch: Number of batches of the ``epoch`` in progress (from 0) already used.
        best: Best mean of ``metric`` over the tasks on the validation split so far, at ``best_step``; infinity before.
        stale: Number of evaluations since ``best``.
        cuts: Number of evaluations without improvement; each one is a cut of the rates with ``plateau``.
        metric: Value of ``training.stop_on``.
    """

    step: int = 0
    epoch: int = 0
    batch: int = 0
    examples: int = 0
    best: float = math.inf
    best_step: int | None = None
    stale: int = 0
    cuts: int = 0
    metric: StopMetric = "ne"

    @property
    def best_text(self) -> str:
        """Best value with the metric's name; empty before the first."""
        return "" if self.best_step is None else f"best {STOP_TITLES[self.metric]} {self.best:.4f}"

    def note(self, mean: float) -> None:
        """Compare a new mean of ``metric`` with the best one; means that are not finite are never better."""
        sign = 1 if is_lower_better(self.metric) else -1
        if math.isfinite(mean) and (self.best_step is None or sign * mean < sign * self.best):
            self.best, self.best_step, self.stale = mean, self.step, 0
        else:
            self.stale, self.cuts = self.stale + 1, self.cuts + 1

    def to_state(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {**self.__dict__, "best": None if math.isinf(self.best) else self.best}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Progress:
        """Restore the progress from :meth:`to_state`."""
        return cls(**{**state, "best": math.inf if state["best"] is None else state["best"]})


@dataclass
class LogWindow:
    """Sums since the last log record; they are saved in checkpoints, times are not.

    Attributes:
        loss: Sum of losses against labels, times weights.
        teacher: Sum of losses against a teacher's scores, with their factors, times weights.
        adapter: Sum of losses of an adapter of these scores, times weights.
        weight: Sum of sample weights.
        gradient_norm: Norm of the dense gradients of the newest step.
        examples: Number of samples.
        timed: Number of samples since ``started``.
        started: Time of the window's begin, in seconds.
        waiting: Seconds for which the step waited for data.
        exposed: Seconds for which it waited for other ranks.
        sent: Bytes that this rank has sent.
    """

    loss: float = 0.0
    teacher: float = 0.0
    adapter: float = 0.0
    weight: float = 0.0
    gradient_norm: float = 0.0
    examples: int = 0
    timed: int = 0
    started: float = field(default_factory=time.perf_counter)
    waiting: float = 0.0
    exposed: float = 0.0
    sent: int = 0

    def to_state(self) -> dict[str, float]:
        """Return the sums, as JSON values."""
        return {name: getattr(self, name) for name in ("loss", "teacher", "adapter", "weight", "examples")}


@dataclass
class TrainingOutcome:
    """How a training ended.

    Attributes:
        ended: ``finished`` (all steps done), ``early`` (patience ran out), ``interrupted`` (a signal; resumable).
        seconds: Wall time of this process's share.
        probing_seconds: Part of ``seconds`` spent on statistics of the inputs of layers.
    """

    ended: Literal["finished", "early", "interrupted"]
    progress: Progress
    seconds: float
    probing_seconds: float = 0.0
