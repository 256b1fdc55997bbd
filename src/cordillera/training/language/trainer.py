"""Training loop of language models: packed iterations in, updates out, the same steps on every rank.

Everything that a step depends on (weights, moments, counters, position in the text, waiting documents) is in a
checkpoint, and none of it depends on the mesh. A run continues bit for bit on the mesh that it was stopped on, and up
to rounding on any other mesh that has places for no more microbatches than an iteration has. Only rank 0 writes the
run's records; figures of other ranks come with the exchange in which all ranks agree on when to stop.

Source: Grattafiori et al. 2024, section 3.4.1, for the schedule of rates.
"""

from __future__ import annotations

import contextlib
import math
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import torch
from pydantic import Field

from cordillera.data.language.batches import Batches, HeldOutMicrobatches, TextIteration
from cordillera.data.language.prefetch import IterationsAhead, LiveBatches, PrefetchedBatches
from cordillera.distributed.job.watchdog import Watchdog
from cordillera.errors import Interrupted, TrainingError
from cordillera.kernels.host_memory import keep_freed_memory
from cordillera.models.language.flops import training_flops
from cordillera.run import Run, read_object
from cordillera.training.language.checkpoints import ShardedCheckpoints
from cordillera.training.language.engine import LanguageConfig, LanguageEngine, StepReport
from cordillera.training.language.objectives import means
from cordillera.training.optimizers import schedule
from cordillera.training.recorder import RunRecorder

LanguageEnd = Literal["finished", "exhausted", "interrupted"]
"""How a training ends; see :class:`LanguageReport`."""

_DRAWN = ("loss", "gradient_norm", "learning_rate", "tokens_per_second", "imbalance")


class LanguageTrainingConfig(LanguageConfig):
    """Settings of the training of a language model.

    Attributes:
        start: Checkpoint whose weights training begins with: a model's name (``smollm2``), a folder, a GGUF file, or
            the folder of a run. Null draws them from the seed.
        steps: Number of updates of the whole run; fewer if the text ends.
        warmup_steps: Number of steps over which the rate rises linearly from zero.
        decay: Decay of the rate after the warm-up: ``none``, ``linear``, ``cosine``.
        final_rate: Factor of the rate after the last step, with ``linear`` and ``cosine``.
        log_every: Steps between records, beside the one at the end.
        evaluate_every: Steps between evaluations on held-out documents; null for one at the end.
        evaluation_tokens: Approximate number of tokens of held-out documents in an evaluation, the same ones every
            time; null for all.
        checkpoint_every: Steps between checkpoints, beside the one at the end; null for none.
        keep_checkpoints: Number of newest checkpoints to keep.
        asynchronous: Whether checkpoints are written while training goes on.
        max_skipped: Number of skipped steps in a row after which training ends with an error.
    """

    start: str | None = None
    steps: int = Field(1000, ge=1, le=10**12)
    warmup_steps: int = Field(0, ge=0, le=10**12)
    decay: Literal["none", "linear", "cosine"] = "cosine"
    final_rate: float = Field(0.1, ge=0, le=1)
    log_every: int = Field(10, ge=1)
    evaluate_every: int | None = Field(None, ge=1)
    evaluation_tokens: int | None = Field(None, ge=2)
    checkpoint_every: int | None = Field(None, ge=1)
    keep_checkpoints: int = Field(2, ge=1)
    asynchronous: bool = True
    max_skipped: int = Field(10, ge=1)


@dataclass
class LanguageProgress:
    """Position of training, as stored in the checkpoint; ``stale`` is the number of consecutive skipped steps."""

    step: int = 0
    tokens: int = 0
    documents: int = 0
    stale: int = 0


class LanguageEvaluation(NamedTuple):
    """Quality of the predictions of held-out documents.

    Attributes:
        loss: Mean negative log-likelihood, nats per token.
        bits_per_byte: Negative log-likelihood in bits per byte of text, which compares models with different
            vocabularies.
        measures: What an objective of post-training measures beside its loss, by name.
    """

    loss: float
    perplexity: float
    bits_per_byte: float
    targets: int
    seconds: float
    measures: Mapping[str, float] = MappingProxyType({})


@dataclass
class LanguageReport:
    """How a training ended.

    Attributes:
        ended: ``finished`` (all steps done), ``exhausted`` (the text ended), or ``interrupted`` (stopped on request;
            resumable).
        seconds: Wall time of this process's share.
        evaluation: Evaluation of the weights at the end; None if training was interrupted or nothing was held out.
    """

    ended: LanguageEnd
    progress: LanguageProgress
    seconds: float
    evaluation: LanguageEvaluation | None = None


@dataclass
class LanguageWindow:
    """Sums since the last record; sums over the text and the last step are saved in checkpoints, times are not."""

    loss: float = 0.0
    targets: int = 0
    imbalance: float = 0.0
    expert_imbalance: float = 0.0
    delay: float = 0.0
    measures: dict[str, float] = field(default_factory=dict)
    steps: int = 0
    gradient_norm: float | None = None
    learning_rate: float = 0.0
    timed_steps: int = 0
    timed_replicas: int = 0
    timed_tokens: int = 0
    timed_flops: float = 0.0
    waiting: float = 0.0
    communication: float = 0.0
    exposed: float = 0.0
    started: float = field(default_factory=time.perf_counter)

    def to_state(self) -> dict[str, Any]:
        """Return the content for a checkpoint."""
        names = (
            *("loss", "targets", "imbalance", "expert_imbalance", "delay", "steps", "gradient_norm", "learning_rate"),
            "measures",
        )
        return {name: getattr(self, name) for name in names}


LanguageStepCallback = Callable[[dict[str, Any], LanguageProgress, int], None]
"""Function called after every step with the newest record (empty without one), progress and total number of steps."""


class LanguageTrainer:
    """Trains one model on one stream of iterations; every process of the mesh makes the same calls.

    Args:
        run: Run that records are written to, on rank 0; None on other ranks.
        held_out: Microbatches of held-out text to evaluate on; None or an empty sequence for no evaluation.
        held_out_bytes: Size of the held-out text in UTF-8, in bytes.
        peak: Peak FLOP/s of one device in the blocks' precision; None if unknown.
        watchdog: Watchdog that follows the position of the loop and holds requests to stop. If one process is asked to
            stop, all stop after the step in progress. None for a loop without one.
        on_step: Function that draws progress, on rank 0.
        recipe: Recipe of the run as plain JSON values, saved with every checkpoint.
        reads_ahead: Whether iterations are prepared while others are computed; they must not depend on the weights.
        evaluates_first: Whether the weights that training begins with are evaluated too.
    """

    Config = LanguageTrainingConfig

    def __init__(
        self,
        config: LanguageTrainingConfig,
        engine: LanguageEngine,
        batches: Batches,
        checkpoints: ShardedCheckpoints,
        run: Run | None = None,
        *,
        held_out: HeldOutMicrobatches | None = None,
        held_out_bytes: int = 0,
        peak: float | None = None,
        watchdog: Watchdog | None = None,
        on_step: LanguageStepCallback | None = None,
        recipe: dict[str, Any] | None = None,
        reads_ahead: bool = True,
        evaluates_first: bool = False,
    ) -> None:
        self.config, self.engine, self.checkpoints, self.run = config, engine, checkpoints, run
        mesh = engine.mesh
        if mesh.device_type == "cpu":
            keep_freed_memory()
        own = slice(mesh.copy, None, mesh.config.copies)
        self.batches: PrefetchedBatches | LiveBatches | IterationsAhead = LiveBatches(batches)
        if reads_ahead:
            self.batches = PrefetchedBatches(batches, part=own, deadline_s=mesh.config.deadline_s)
        self.held_out, self.held_out_bytes, self.peak = held_out, held_out_bytes, peak
        self.watchdog, self.on_step, self.recipe, self.evaluates_first = watchdog, on_step, recipe, evaluates_first
        self.progress = LanguageProgress()
        self._window = LanguageWindow()
        self.recorder = RunRecorder(run)
        self._memory = float(peak_memory(mesh.device_type))
        self._evaluated: tuple[int, LanguageEvaluation] | None = None
        self._owes_evaluation = False  # whether an evaluation between steps was interrupted
        self._recorded: set[tuple[str, int]] = set()  # kind and step of records before resuming

    def resume(self) -> bool:
        """Restore the newest checkpoint; return False if there is none.

        Raises:
            CheckpointError: If the checkpoint is corrupt, or of another model.
            DataError: If it was written with other text.
            RunError: If the run is in use.
        """
        state = self.checkpoints.restore(self.engine)
        if state is not None:
            self.batches.load_state_dict(state["batches"])
            self.progress = LanguageProgress(**state["progress"])
            self._window = LanguageWindow(**state["window"])
            self._owes_evaluation = state.get("owes_evaluation", False)
        if self.run is not None:
            with self.run.lock():
                self.run.rewind_metrics(self.progress.step)
                self._recorded = {(str(one.get("kind")), one.get("step", 0)) for one in self.run.metrics()}
                if state is not None:
                    # The run was killed after the checkpoint was complete and before its record was written.
                    self._record("checkpoint", seconds=None, bytes=None)
                    world = self.engine.mesh.config.world
                    self.run.log({"kind": "resumed", "step": self.progress.step, "world": world})
        return state is not None

    def fit(self) -> LanguageReport:
        """Train until the last step, the end of the text, or a request to stop.

        Raises:
            TrainingError: If too many steps in a row were not finite.
            PeerError: If another rank does not answer in time.
            RunError: If the disk is full or the run is in use.
        """
        began = time.perf_counter()
        with self.recorder.recording(self._position), self.batches:
            ended, evaluation = self._train()
            self.recorder.tell(ended, self._position())
        return LanguageReport(ended, self.progress, time.perf_counter() - began, evaluation)

    def _train(self) -> tuple[LanguageEnd, LanguageEvaluation | None]:
        evaluation = None
        if self.evaluates_first and self.progress.step == 0 and self.can_evaluate:
            self._evaluate()
        ended = self._steps()
        if self.checkpoints.last != self.progress.step:
            self._save()
        if ended != "interrupted" and self.can_evaluate:
            evaluation = self._evaluate()
            ended = ended if evaluation is not None else "interrupted"
        self.checkpoints.wait()
        self._prune()
        if self.run is not None and evaluation is not None:
            write_evaluation(self.run, **self._place(), found=evaluation)
        return ended, evaluation

    def evaluate(self) -> LanguageEvaluation:
        """Evaluate the present weights on held-out documents; every rank calls it.

        Raises:
            TrainingError: If nothing is held out.
            Interrupted: If a rank was asked to stop.
        """
        if not self.held_out:
            raise TrainingError("nothing was held out", where="held_out")
        began = time.perf_counter()
        parallel = self.engine.mesh.config
        loss, targets = 0.0, 0
        together = parallel.copies * parallel.pipeline
        for first in range(0, len(self.held_out), together):
            self._at(f"evaluation after step {self.progress.step}")
            part, counted = self.engine.evaluate(self.held_out.neighbours(first, together))
            loss, targets = loss + part, targets + counted
            done = first + together
            if done < len(self.held_out) and self._is_asked():
                raise Interrupted(
                    f"{done:,} of {len(self.held_out):,} microbatches of held-out text were evaluated",
                    where=f"evaluation after step {self.progress.step}",
                )
        mean = loss / targets
        perplexity = math.exp(mean) if mean < 700 else math.inf
        bits = loss / math.log(2) / self.held_out_bytes if self.held_out_bytes else math.nan
        measures = means(self.engine.take_measures())
        if measures:  # losses of pairs are not those of tokens
            perplexity = math.nan
        return LanguageEvaluation(mean, perplexity, bits, targets, time.perf_counter() - began, measures)

    @property
    def can_evaluate(self) -> bool:
        """Whether something was held out."""
        return bool(self.held_out)

    def _steps(self) -> LanguageEnd:
        config, progress = self.config, self.progress
        self.engine.ledger.clear()
        if self._owes_evaluation and self._evaluate() is None:
            return "interrupted"
        self._window.started = time.perf_counter()
        while progress.step < config.steps:
            asked = time.perf_counter()
            iteration = next(self.batches, None)
            self._window.waiting += time.perf_counter() - asked
            if iteration is None:
                if self._window.steps:
                    self._log()
                    self._window = LanguageWindow()
                return "exhausted"
            self._step(iteration)
            is_asked = self._agree()
            record = {}
            is_last = progress.step >= config.steps
            if is_last or self._is_due(config.log_every):
                record, self._window = self._log(), LanguageWindow()
            paused = time.perf_counter()
            if self.can_evaluate and not is_last and self._is_due(config.evaluate_every):
                is_asked = self._evaluate() is None or is_asked
            if not is_last and not is_asked and self._is_due(config.checkpoint_every):
                self._save()
            self._window.started += time.perf_counter() - paused
            if self.on_step is not None:
                self.on_step(record, progress, config.steps)
            if is_asked and not is_last:
                return "interrupted"
        return "finished"

    def _step(self, iteration: TextIteration) -> None:
        config, progress = self.config, self.progress
        self._at(f"step {progress.step + 1}")
        rate = schedule(
            progress.step, config.steps, warmup=config.warmup_steps, decay=config.decay, floor=config.final_rate
        )
        report = self.engine.step(iteration.microbatches, rate)
        self._count([iteration], report, rate)

    def _count(self, iterations: Sequence[TextIteration], report: StepReport, rate: float, replicas: int = 1) -> None:
        """Add a step of some replicas on some iterations to the progress and to the sums of the next record."""
        config, progress, window = self.config, self.progress, self._window
        window.gradient_norm = report.gradient_norm if math.isfinite(report.gradient_norm) else None
        window.learning_rate = rate * config.learning_rate
        progress.step += 1
        for iteration in iterations:
            progress.tokens += iteration.tokens
            progress.documents += iteration.documents
            lengths = [length for one in iteration.lengths for length in one]
            window.timed_flops += training_flops(self.engine.model, lengths)
            window.timed_tokens += iteration.tokens
            window.imbalance += iteration.imbalance / len(iterations)
            window.delay += iteration.delay / len(iterations)
        window.steps += 1
        window.timed_steps += 1
        window.timed_replicas += replicas
        window.expert_imbalance += report.expert_imbalance or 0.0
        if not report.is_skipped:
            for name, value in report.measures.items():
                window.measures[name] = window.measures.get(name, 0.0) + value
            progress.stale = 0
            window.loss += report.loss * report.targets
            window.targets += report.targets
            return
        progress.stale += 1
        found = {"loss": report.loss, "gradient_norm": report.gradient_norm}
        if self.engine.loss_scale is not None:
            found["loss_scale"] = self.engine.loss_scale.value
        self.recorder.log({"kind": "skipped", **self._place(), **found})
        if progress.stale >= config.max_skipped:
            self.checkpoints.wait()
            kept = self.checkpoints.steps()[-1:]
            raise TrainingError(
                f"{progress.stale} steps in a row gave a loss or gradients that are not finite",
                where=f"step {progress.step}",
                remedy="start a new run with a lower training.learning_rate or more warmup_steps, or look at the text "
                + ("at hand" if kept else "at hand; no checkpoint was written")
                + "".join(f"; the checkpoint of step {step} is kept, and --resume goes on from it" for step in kept),
            )

    def _agree(self) -> bool:
        """Return whether any rank was asked to stop; take the maximum over ranks of communication times and memory."""
        traffic = self.engine.ledger.total()
        self.engine.ledger.clear()
        is_asked = self.watchdog is not None and self.watchdog.should_stop
        numbers = [float(is_asked), traffic.seconds, traffic.exposed_seconds, self._used()]
        stop, communication, exposed, self._memory = self.engine.mesh.exchange(numbers).amax(0).tolist()
        self._window.communication += communication
        self._window.exposed += exposed
        return stop > 0

    def _used(self) -> float:
        return float(peak_memory(self.engine.mesh.device_type))

    def _is_asked(self) -> bool:
        own = self.watchdog is not None and self.watchdog.should_stop
        return bool(self.engine.mesh.exchange([float(own)]).amax() > 0)

    def _at(self, where: str) -> None:
        if self.watchdog is not None:
            self.watchdog.at(where)

    def _is_due(self, every: int | None) -> bool:
        return every is not None and self.progress.step % every == 0

    def _place(self) -> dict[str, int]:
        return {"step": self.progress.step, "tokens": self.progress.tokens}

    def _log(self) -> dict[str, Any]:
        if self.run is None:
            return {}
        window, world = self._window, self.engine.mesh.config.world
        seconds = max(time.perf_counter() - window.started, 1e-9)
        speed = window.timed_flops / seconds
        devices = world * window.timed_replicas / max(1, window.timed_steps)
        content: dict[str, Any] = {
            "documents": self.progress.documents,
            "loss": window.loss / window.targets if window.targets else math.nan,
            "gradient_norm": window.gradient_norm,
            "learning_rate": window.learning_rate,
            "targets": window.targets,
            "skipped": self.engine.skipped,
            "seconds": seconds,
            "steps": window.steps,
            "tokens_per_second": window.timed_tokens / seconds,
            "flops_per_second": speed,
            "mfu": None if self.peak is None else speed / (self.peak * max(1.0, devices)),
            "imbalance": window.imbalance / window.steps,
            "delay": window.delay / window.steps,
            "expert_imbalance": window.expert_imbalance / window.steps if self.engine.model.experts else None,
            "memory_bytes": int(self._memory),
            "communication_seconds": window.communication,
            "exposed_seconds": window.exposed,
            "data_seconds": window.waiting,
            **means(window.measures),
        }
        record = self._record("train", **content)
        drawn = {f"train/{key}": record[key] for key in _DRAWN if record[key] is not None}
        self.recorder.draw(drawn, self.progress.step)
        return record

    def _position(self) -> tuple[int, int]:
        return self.progress.step, self.config.steps

    def _record(self, kind: str, **content: Any) -> dict[str, Any]:
        """Write a record of this step, unless a resumed run has it already."""
        record = {"kind": kind, **self._place(), **content}
        if (kind, self.progress.step) not in self._recorded:
            self.recorder.log(record)
        return record

    def _evaluate(self) -> LanguageEvaluation | None:
        """Evaluate and write a record; return None if a rank was asked to stop during the evaluation."""
        if self._evaluated is not None and self._evaluated[0] == self.progress.step:
            return self._evaluated[1]  # the text ended after a step at which it was due
        try:
            found = self.evaluate()
        except Interrupted:
            self._owes_evaluation = self.progress.step < self.config.steps
            return None
        self._owes_evaluation = False
        self._evaluated = (self.progress.step, found)
        self.engine.ledger.clear()  # records of training contain its own traffic only
        self._record("evaluation", split="validation", **found._asdict() | {"measures": dict(found.measures)})
        self.recorder.draw({"validation/loss": found.loss}, self.progress.step)
        return found

    def _state(self) -> dict[str, Any]:
        """Return the content of a checkpoint besides weights and moments."""
        return {
            **self._place(),
            "progress": asdict(self.progress),
            "window": self._window.to_state(),
            "batches": self.batches.state_dict(),
            "owes_evaluation": self._owes_evaluation,
            "recipe": self.recipe,
        }

    def _save(self) -> None:
        began = time.perf_counter()
        self.checkpoints.save(self.engine, self._state())
        self._prune()
        self._record("checkpoint", seconds=time.perf_counter() - began, bytes=self.checkpoints.bytes)
        self.recorder.tell(None, self._position())

    def _prune(self) -> None:
        """Remove all but the newest checkpoints; an unfinished one does not count.

        While steps are skipped, nothing is removed, because the weights of the newest checkpoints may give no finite
        loss.
        """
        if self.run is not None and not self.progress.stale:
            self.checkpoints.prune(set(self.checkpoints.steps()[-self.config.keep_checkpoints :]))


def write_evaluation(run: Run, step: int, tokens: int, found: LanguageEvaluation) -> None:
    """Write ``evaluation.json`` of a ``run``: ``found`` after ``step``, at which the weights had seen ``tokens``."""
    place = {"step": step, "tokens": tokens}
    run.write_json("evaluation.json", {"kind": "language", "split": "validation", **place, **found._asdict()})


def read_evaluation(run: Run, step: int) -> LanguageEvaluation | None:
    """Return what :func:`write_evaluation` wrote after a ``step`` into the folder of a ``run``; None if nothing."""
    content = read_object(run.folder / "evaluation.json")
    if content.get("step") != step:
        return None
    found: dict[str, Any] = {
        name: math.nan if content[name] is None else content[name] for name in LanguageEvaluation._fields
    }
    return LanguageEvaluation(**found)


def peak_memory(device_type: str) -> int:
    """Return the largest number of bytes that this process used: on the GPU for ``cuda``, on the host for ``cpu``."""
    if device_type == "cuda":
        return torch.cuda.max_memory_allocated()
    # getrusage also counts the memory of the parent process until it started this one
    with contextlib.suppress(OSError), open("/proc/self/status", encoding="ascii", errors="replace") as file:
        for line in file:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
