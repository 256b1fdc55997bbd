"""Training loop of ranking models: batches in, updates out, resumable after any interruption.

One step is: batch, forward in the chosen precision, weighted loss, backward, clip, AdamW for dense parameters, and one
fused exact update for the tables. Everything that a step depends on (weights, moments, counters, random state, position
in the data) is in a checkpoint, and the order of the data is a function of seed and epoch, so that a resumed run takes
the same steps as an uninterrupted one.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from pydantic import BaseModel
from torch import Tensor

from cordillera.data.ranking.features import RankingBatch
from cordillera.data.ranking.loader import BatchSource
from cordillera.errors import TrainingError
from cordillera.kernels.host_memory import keep_freed_memory
from cordillera.models.ranking.base import RankingModel
from cordillera.numerics.dispatch.probe import Probe, ProbeConfig
from cordillera.numerics.emulation.emulation import EmulatedProducts
from cordillera.numerics.emulation.weight_storage import WeightStorage
from cordillera.numerics.formats.cast_checks import self_test
from cordillera.run import Run, check_recipe, disk_errors, recipe_state
from cordillera.training import checkpoints
from cordillera.training.optimizers import (
    build_adamw,
    dense_parameters,
    embedding_tables,
    load_moments,
    moments_of,
)
from cordillera.training.ranking.config import STOP_TITLES, LogWindow, Progress, TrainingConfig, TrainingOutcome
from cordillera.training.ranking.metrics import ProgressiveMetrics, RankingMetrics, of_task
from cordillera.training.ranking.ranks import OneRank
from cordillera.training.ranking.scoring import autocast, emulated, load_weights, scorer
from cordillera.training.ranking.sharded_dense import cut_like, whole
from cordillera.training.ranking.tasks.loss_balance import LossBalancer, heads_to_balance
from cordillera.training.ranking.tasks.losses import task_losses
from cordillera.training.ranking.teachers.distillation import Distiller, TeacherLosses, beside_teacher, of_teacher
from cordillera.training.recorder import RunRecorder

# prefixes of tensors that must be finite
_LEARNT = ("model.", "optimizer.", "storage.", "teacher.", "teacher_optimizer.")

TRAINING_PROBE = "training-probe.safetensors"
"""File in a run's folder with statistics of the inputs of linear layers during training."""


StepCallback = Callable[[dict[str, Any], Progress, int], None]


class Trainer:
    """Trains one model on one data set into one run folder.

    Args:
        config: Settings of training, a recipe's ``[training]`` section.
        model: Model to train; it is moved to ``device``. If a number format is emulated, its weights are rounded to
            that format.
        training: Batches to learn from: a loader of prepared data, or those of your own in
            :class:`~cordillera.data.ranking.loader.CheckedBatches`.
        validation: Batches of the validation split; None for no evaluation.
        run: Folder in which checkpoints, logs and evaluations are written.
        tasks: Names of the labels, in the order of the batches' columns.
        device: Device of the model.
        on_step: Function called after every step with the newest log record (empty at steps that log nothing), the
            progress and the total number of steps.
        recipe: Recipe of the model and its training, saved in checkpoints; a checkpoint of another recipe is not
            resumed. None to save no recipe.
        ranks: Processes that train together; each has a model with the same dense weights and its part of the tables.
    """

    def __init__(
        self,
        config: TrainingConfig,
        model: RankingModel,
        training: BatchSource,
        validation: BatchSource | None,
        run: Run,
        *,
        tasks: Sequence[str],
        device: torch.device,
        on_step: StepCallback | None = None,
        recipe: BaseModel | None = None,
        ranks: OneRank | None = None,
    ) -> None:
        self.config, self.run, self.device, self.tasks = config, run, device, tuple(tasks)
        self.recipe, self.ranks = recipe, ranks or OneRank()
        self.recorder = RunRecorder(run if self.ranks.rank == 0 else None)
        self.training, self.validation, self.on_step = training, validation, on_step
        if device.type == "cpu":
            keep_freed_memory()
        self.model = model.to(device)
        self.optimizer = build_adamw(
            model,
            learning_rate=config.learning_rate,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
        )
        self.tables = embedding_tables(model)
        self.dense = dense_parameters(model)
        self.storage: WeightStorage | None = None
        if config.emulate is not None:
            self_test(device.type)
            self.storage = WeightStorage(config.emulate, self._stored_weights())
        self.loss_scale = None if config.emulate is None else config.emulate.make_loss_scale()
        self.balancer = self._made_balancer()
        self.distiller = self._made_distiller()
        self.probe: Probe | None = None
        if config.probe_every:
            looks = ProbeConfig(interval=config.probe_every, marginals=config.probe_marginals)
            self.probe = Probe(model, looks)
        self.progress = Progress(metric=config.stop_on)
        self._window = LogWindow()
        epochs = config.epochs * len(training)
        self.total_steps = epochs if config.max_steps is None else min(epochs, config.max_steps)
        self.progressive = self._made_progressive()
        self._stop = threading.Event()
        unknown = sorted(set(config.task_weights or {}) - set(self.tasks))
        if unknown:
            raise TrainingError(
                f"names no task: {unknown}", where="training.task_weights", remedy=f"tasks are {list(self.tasks)}"
            )
        self._task_weights = (
            torch.tensor([config.task_weights.get(task, 1.0) for task in self.tasks], device=device)
            if config.task_weights
            else None
        )
        if config.compile:
            model.score = torch.compile(model.score)  # type: ignore[method-assign]

    def _made_balancer(self) -> LossBalancer | None:
        """Return the balancer of the tasks, between the model's representation and its heads."""
        if self.config.balance.mode == "none":
            return None
        heads = heads_to_balance(self.model.heads)
        balancer = LossBalancer(self.config.balance, self.tasks, self.ranks.add_up)
        heads.share = balancer.share
        return balancer

    def _made_distiller(self) -> Distiller | None:
        config = self.config
        if config.teacher.head == "none":
            return None
        adamw = {"lr": config.learning_rate, "betas": config.betas, "eps": config.eps}
        return Distiller(
            config.teacher, self.model.heads, len(self.tasks), adamw | {"weight_decay": config.weight_decay}
        )

    def _made_progressive(self) -> ProgressiveMetrics | None:
        if not self.config.progressive:
            return None
        shown = self.tasks if self.distiller is None else (*self.tasks, *map(of_teacher, self.tasks))
        return ProgressiveMetrics(shown, self.config.progressive_window, ranking_k=self.config.ranking_k)

    def _stored_weights(self) -> dict[str, Tensor]:
        """Return the weights for which number formats are chosen: matrices and tables, but no biases or norms."""
        matrices: dict[str, Tensor] = {name: weight for name, weight in self.dense.items() if weight.dim() >= 2}
        return matrices | {f"{name}.weight": tables.weight for name, tables in self.tables.items()}

    def _state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors = {f"model.{name}": whole(tensor) for name, tensor in self.ranks.state_of(self.model).items()}
        tensors |= {name: whole(one) for name, one in moments_of(self.optimizer, self.dense).items()}
        if self.storage is not None:
            tensors |= {f"storage.{name}": kept for name, kept in self.storage.state_dict().items()}
        if self.distiller is not None:
            tensors |= self.distiller.tensors()
        tensors |= checkpoints.random_state()
        state = {**self.progress.to_state(), "total_steps": self.total_steps, "window": self._window.to_state()}
        if self.recipe is not None:
            state["recipe"] = recipe_state(self.recipe)
        if self.loss_scale is not None:
            state["loss_scale"] = self.loss_scale.state_dict()
        if self.balancer is not None:
            state["balance"] = self.balancer.state_dict()
        if self.probe is not None:
            state["probe"], more = checkpoints.pack(self.probe.state_dict(), "probe")
            tensors |= more
        if self.progressive is not None:
            state["progressive"], more = checkpoints.pack(self.progressive.state_dict(), "progressive")
            tensors |= more
        return tensors, state

    def save(self) -> None:
        """Write a checkpoint of the present step; keep the newest and the best checkpoints, and delete others.

        Raises:
            TrainingError: If a weight or a moment is NaN or infinite; then nothing is written or deleted.
        """
        self.ranks.refresh(self.optimizer)
        tensors, state = self._state()
        learnt = {name: tensor for name, tensor in tensors.items() if name.startswith(_LEARNT)}
        if (found := checkpoints.not_finite(learnt)) is not None:
            raise self._not_saved(found)
        keep = {self.progress.step}
        if self.progress.best_step is not None:
            keep.add(self.progress.best_step)
        self.ranks.save(self.run.checkpoints, self.model, tensors, state, self._not_saved)

        def tidy() -> None:
            if self.ranks.rank == 0:
                checkpoints.prune(self.run.checkpoints, keep)
                self.recorder.tell(None, self._place())

        self.ranks.together(tidy)

    def _not_saved(self, found: str) -> TrainingError:
        return TrainingError(
            f"{found} after step {self.progress.step}; no checkpoint was written of it",
            where=str(self.run.folder),
            remedy=self._way_on(),
        )

    def _place(self) -> tuple[int, int]:
        return self.progress.step, self.total_steps

    def restore(self, checkpoint: checkpoints.Checkpoint, *, weights_only: bool = False) -> None:
        """Restore a checkpoint from :func:`cordillera.training.checkpoints.load`.

        With ``weights_only``, only the model's weights are restored, and not optimizer, counters and random state.

        Raises:
            CheckpointError: If the checkpoint is of another model.
        """
        self.ranks.together(lambda: load_weights(self.model, checkpoint))
        if weights_only:
            return
        load_moments(self.optimizer, self.dense, checkpoint.tensors, cut=cut_like)
        if self.storage is not None:
            prefix = "storage."
            self.storage.load_state_dict(
                {k[len(prefix) :]: v for k, v in checkpoint.tensors.items() if k.startswith(prefix)}
            )
        if self.distiller is not None:
            self.distiller.load_tensors(checkpoint.tensors)
        names = [name for name in self.progress.__dict__ if name in checkpoint.state]
        self.progress = Progress.from_state({name: checkpoint.state[name] for name in names})
        self._window = LogWindow(**checkpoint.state["window"])
        if self.loss_scale is not None and "loss_scale" in checkpoint.state:
            self.loss_scale.load_state_dict(checkpoint.state["loss_scale"])
        if self.balancer is not None and "balance" in checkpoint.state:
            self.balancer.load_state_dict(checkpoint.state["balance"])
        if self.probe is not None and "probe" in checkpoint.state:
            self.probe.load_state_dict(checkpoints.unpack(checkpoint.state["probe"], checkpoint.tensors))
        if self.progressive is not None and "progressive" in checkpoint.state:
            self.progressive.load_state_dict(checkpoints.unpack(checkpoint.state["progressive"], checkpoint.tensors))
        checkpoints.restore_random_state(checkpoint.tensors)

    def resume(self) -> bool:
        """Restore the newest checkpoint of the run; return False if there is none.

        Raises:
            CheckpointError: If the newest checkpoint is corrupt.
            RunError: If another process trains the run, or the recipe has changed since the checkpoint was written.
        """
        with self.run.lock() if self.recorder.run is not None else contextlib.nullcontext():
            newest = self.ranks.load(self.run.checkpoints)
            if newest is not None:
                if self.recipe is not None:
                    check_recipe(newest.state.get("recipe"), self.recipe, self.run.recipe_file)
                self.restore(newest)
            if self.recorder.run is not None:
                self.run.rewind_metrics(self.progress.step, without="probe")  # there is one such record, at the end
            return newest is not None

    def stop(self) -> None:
        """Ask the loop to save and return after the step in progress. Safe from signal handlers and threads."""
        self._stop.set()

    def fit(self) -> TrainingOutcome:
        """Train until all steps are done, patience runs out, or a signal arrives.

        Returns:
            The way training ended. Unless it was interrupted, the model then holds the final weights of the run: the
            best ones with ``patience``, the last ones without.

        Raises:
            TrainingError: If the loss is not finite.
            RunError: If the disk is full or the run is in use.
        """
        began = time.perf_counter()
        with self.recorder.recording(self._place), self.ranks.stopping(self._stop):
            self.model.train()
            ended = self._epochs()
            if ended == "interrupted":
                if self.progress.step not in checkpoints.steps(self.run.checkpoints):
                    self.save()
            elif self.config.patience is not None and self.progress.best_step not in (None, self.progress.step):
                best = self.ranks.load(self.run.checkpoints, self.progress.best_step)
                assert best is not None
                self.restore(best, weights_only=True)
            if self.progressive is not None and self.recorder.run is not None:
                self.run.write_json("progressive.json", self.progressive.compute())
            probing = self._write_probe(finished=ended != "interrupted")
            self.recorder.tell(ended, self._place())
        return TrainingOutcome(ended, self.progress, time.perf_counter() - began, probing)

    def _way_on(self) -> str:
        saved = checkpoints.steps(self.run.checkpoints)
        return (
            "lower training.learning_rate or tables.learning_rate, set training.gradient_clip, or use precision = "
            "'fp32', in a new run; "
            + (f"the checkpoint of step {saved[-1]} is intact" if saved else "there is no checkpoint yet")
        )

    def _write_probe(self, finished: bool) -> float:
        """Write the statistics of the probe once training is finished; return the seconds that gathering took."""
        if self.probe is None:
            return 0.0
        seconds = sum(statistics.seconds for statistics in self.probe.inputs.values())
        if finished:
            with disk_errors(self.run.folder / TRAINING_PROBE):
                self.probe.save(self.run.folder / TRAINING_PROBE)
        place = {"step": self.progress.step, "epoch": self.progress.epoch}
        self.recorder.log({"kind": "probe", **place, "looks": self.probe.looks, "seconds": seconds})
        return seconds

    def _epochs(self) -> Literal["finished", "early", "interrupted"]:
        config, progress = self.config, self.progress
        if config.patience is not None and progress.stale >= config.patience and progress.step < self.total_steps:
            return "early"
        self.ranks.traffic()  # resets the counters: traffic of a pause is not recorded
        while progress.step < self.total_steps:
            batches = self.training.epoch(progress.epoch, progress.batch)
            with contextlib.closing(batches):  # type: ignore[type-var]
                asked = time.perf_counter()
                for batch, own in self.ranks.shares(batches):
                    self._window.waiting += time.perf_counter() - asked
                    self._step(batch, own, self._window)
                    record = {}
                    if self._is_due(config.log_every):
                        record, self._window = self._log(self._window), LogWindow()
                    last = progress.step >= self.total_steps
                    end_of_epoch = progress.batch >= len(self.training)
                    if end_of_epoch:
                        progress.epoch, progress.batch = progress.epoch + 1, 0
                    every = config.evaluate_every
                    if last or (end_of_epoch if every is None else self._is_due(every)):
                        paused = time.perf_counter()
                        self._evaluate()
                        self.save()
                        self.ranks.traffic()
                        self._window.started += time.perf_counter() - paused
                        if config.patience is not None and progress.stale >= config.patience and not last:
                            return "early"
                    elif config.checkpoint_every is not None and self._is_due(config.checkpoint_every):
                        self.save()
                    if self.on_step is not None:
                        self.on_step(record, progress, self.total_steps)
                    if self.ranks.is_asked(self._stop) and not last:
                        return "interrupted"
                    if last or end_of_epoch:
                        break
                    asked = time.perf_counter()
                else:
                    raise TrainingError(
                        f"the loader ended after {progress.batch} of {len(self.training)} batches", where="data"
                    )
        return "finished"

    def _is_due(self, every: int) -> bool:
        return self.progress.step % every == 0

    def _step(self, batch: RankingBatch, own: Sequence[RankingBatch], window: LogWindow) -> None:
        progress, config = self.progress, self.config
        if batch.labels is None:
            raise TrainingError("the batch has no labels", where="training")
        if not len(batch):
            raise TrainingError("the batch has no samples", where="training")
        if batch.labels.shape != (len(batch), len(self.tasks)):
            raise TrainingError(
                f"labels of {list(self.tasks)} must be {[len(batch), len(self.tasks)]}, got {list(batch.labels.shape)}",
                where="training",
            )
        if self.progressive is not None:
            predictions = self._scorer()(batch), batch.labels
            if self.distiller is not None:
                predictions = beside_teacher(predictions[0], batch)
            for window_metrics in self.progressive.update(*predictions, batch.weights, batch.groups):
                self.recorder.log(
                    {"kind": "progressive", "step": progress.step + 1, "epoch": progress.epoch, **window_metrics}
                )
        factor = config.rate_factor(progress, self.total_steps)
        if self.probe is not None:
            self.probe.step()
        losses, taught, weight = [], torch.zeros(2, dtype=torch.float64), 0.0
        with emulated(config.emulate, progress.step, self.loss_scale) as products:
            for part, samples in enumerate(own):
                moved, against_teacher = samples.to(self.device, non_blocking=True), None
                with autocast(self.device, config.precision), self.ranks.computing(progress.step, batch, part):
                    if self.distiller is None:
                        logits = self.model(moved)
                    else:
                        logits, against_teacher = self._taught(self.distiller, moved, batch)
                of_tasks, weight = self._losses(logits, moved.labels, moved, batch)
                losses.append(self._differentiate(of_tasks, against_teacher))
                if against_teacher is not None:
                    taught += torch.stack([one.detach().double().sum().cpu() for one in against_teacher])
                self.ranks.keep(self.dense.values())
        value = self.ranks.sum_step(self._summed(), losses, self._stop)
        if self.distiller is not None:
            taught = self.ranks.add_up(taught)
        if not math.isfinite(value + float(taught.sum())):
            self._refuse(value + float(taught.sum()), batch)
        if self.probe is not None:
            self.probe.close()
        if self.loss_scale is None or products is None or not self._overflows(products, value):
            self._change_weights(factor, window)
        progress.step += 1
        progress.batch += 1
        progress.examples += len(batch)
        window.loss += value * weight
        window.teacher += float(taught[0]) * weight
        window.adapter += float(taught[1]) * weight
        window.weight += weight
        window.examples += len(batch)
        window.timed += len(batch)
        traffic = self.ranks.traffic()
        window.exposed += traffic.exposed_seconds
        window.sent += traffic.bytes

    def _summed(self) -> list[Tensor]:
        """Return the parameters whose gradients are summed over ranks."""
        return [*self.dense.values(), *(() if self.distiller is None else self.distiller.parameters())]

    def _taught(self, distiller: Distiller, own: RankingBatch, batch: RankingBatch) -> tuple[Tensor, TeacherLosses]:
        """Return the logits of the ``own`` samples of a batch, and the losses against the scores of the teacher."""
        representation = self.model.represent(own.dense, self.model.look_up(own))
        logits = self.model.heads(representation)
        mean = lambda scores, targets: self._losses(scores, targets, own, batch)[0]  # noqa: E731
        return logits, distiller.losses(representation, logits, own, mean)

    def _losses(
        self, logits: Tensor, targets: Tensor | None, own: RankingBatch, batch: RankingBatch
    ) -> tuple[Tensor, float]:
        """Return the parts of the tasks' losses that the ``own`` samples of a batch make, and its weight."""
        assert targets is not None
        if not self.ranks.divides:
            return task_losses(logits, targets, own.weights, self._task_weights)
        whole = float(len(batch) if batch.weights is None else batch.weights.sum())
        if not len(own):
            return logits.float().sum(0), whole
        losses, weight = task_losses(logits, targets, own.weights, self._task_weights)
        return losses * (weight / (whole or 1.0)), whole

    def _differentiate(self, losses: Tensor, taught: TeacherLosses | None) -> float:
        """Compute gradients of all losses; return the sum of the tasks', without those that the balancer leaves out."""
        loss = losses.sum()
        whole = loss if taught is None else loss + taught.student.sum() + taught.adapter.sum()
        if self.balancer is None:
            whole.backward()
            return float(loss.detach())
        self.balancer.expect(losses)
        whole.backward()
        left_out = self.balancer.newest.is_left_out
        if left_out.any():
            names = [task for task, is_out in zip(self.tasks, left_out, strict=True) if is_out]
            place = {"step": self.progress.step + 1, "epoch": self.progress.epoch}
            self.recorder.log({"kind": "left out", **place, "tasks": names})
            if left_out.all():
                return math.nan
            heads = heads_to_balance(self.model.heads)
            for task in left_out.nonzero()[0]:
                for parameter in heads.of_task(int(task)):
                    parameter.grad = None
        return float(losses.detach()[torch.from_numpy(~left_out).to(losses.device)].sum())

    def _overflows(self, products: EmulatedProducts, loss: float) -> bool:
        """Adapt the loss scale; return whether gradients were infinite with it, in which case they are dropped."""
        assert self.loss_scale is not None
        if products.overflowed:
            place = {"step": self.progress.step + 1, "epoch": self.progress.epoch}
            self.recorder.log({"kind": "skipped", **place, "loss": loss, "loss_scale": self.loss_scale.value})
            self.optimizer.zero_grad(set_to_none=True)
            for tables in self.tables.values():
                tables.discard()
        self.loss_scale.update(products.overflowed)
        return products.overflowed

    def _change_weights(self, factor: float, window: LogWindow) -> None:
        config = self.config
        if config.gradient_clip is not None:
            window.gradient_norm = self.ranks.clip(self.dense.values(), config.gradient_clip)
        elif (self.progress.step + 1) % config.log_every == 0:
            window.gradient_norm = self.ranks.clip(self.dense.values())
        for group in self.optimizer.param_groups:
            group["lr"] = config.learning_rate * factor
        self._update(factor)
        self.optimizer.zero_grad(set_to_none=True)
        if self.distiller is not None:
            self.distiller.update(config.learning_rate * factor, config.gradient_clip)

    def _update(self, factor: float) -> None:
        rows = None
        if self.storage is not None:
            rows = {f"{name}.weight": tables.pending_rows() for name, tables in self.tables.items()}
            self.storage.before_update(rows)
        self.optimizer.step()
        for tables in self.tables.values():
            tables.update(factor)
        if self.storage is not None:
            self.storage.after_update(self.progress.step + 1, rows)

    def _refuse(self, value: float, batch: RankingBatch) -> None:
        rows, because, remedy = "", "", self._way_on()
        if batch.rows is not None and len(batch.rows):
            rows = f", rows {int(batch.rows.min())} to {int(batch.rows.max())}"
        wrong = ~batch.dense.isfinite()
        if wrong.any():
            row, column = (int(place) for place in wrong.nonzero()[0])
            because = f", as dense value {column} of sample {row} of the batch is {float(batch.dense[row, column])}"
            remedy = "correct the data; CheckedBatches checks batches of your own"
        raise TrainingError(
            f"the loss became {value} at step {self.progress.step + 1} (epoch {self.progress.epoch + 1}{rows})"
            f"{because}; no update was made from it",
            where=str(self.run.folder),
            remedy=remedy,
        )

    def _log(self, window: LogWindow) -> dict[str, Any]:
        seconds = time.perf_counter() - window.started
        progress = self.progress
        record = {
            "kind": "train",
            "step": progress.step,
            "epoch": progress.epoch,
            "examples": progress.examples,
            "loss": window.loss / window.weight if window.weight else math.nan,
            "gradient_norm": window.gradient_norm,
            "learning_rate": self.optimizer.param_groups[0]["lr"] if self.optimizer.param_groups else math.nan,
            "examples_per_second": window.timed / seconds,
            "data_fraction": window.waiting / seconds,
            "seconds": seconds,
        }
        if self.ranks.size > 1:
            record |= {"exposed_fraction": window.exposed / seconds, "sent_bytes": window.sent}
        if self.balancer is not None:
            record["balance"] = self.balancer.record()
        if self.distiller is not None and window.weight:
            record |= {"teacher_loss": window.teacher / window.weight, "adapter_loss": window.adapter / window.weight}
        self.recorder.log(record)
        drawn = ("loss", "gradient_norm", "learning_rate", "examples_per_second")
        self.recorder.draw({f"train/{key}": float(record[key]) for key in drawn}, progress.step)
        return record

    def _scorer(self) -> Callable[[RankingBatch], Tensor]:
        return self.ranks.scorer(scorer(self.model, self.device, self.config.precision, self.config.emulate))

    def _evaluate(self) -> None:
        if self.validation is None:
            return
        progress, began = self.progress, time.perf_counter()
        metrics = {task: RankingMetrics(ranking_k=self.config.ranking_k) for task in self.tasks}
        score = self._scorer()
        for batch in self.validation.epoch():
            logits = score(batch)
            if batch.labels is None:
                raise TrainingError("the validation split has no labels", where="validation")
            for column, task in enumerate(self.tasks):
                metrics[task].update(*of_task(column, logits, batch.labels, batch.weights, batch.groups))
        results = {task: metric.compute() for task, metric in metrics.items()}
        record = {
            "kind": "evaluation",
            "split": "validation",
            "step": progress.step,
            "epoch": progress.epoch,
            "examples": progress.examples,
            "tasks": results,
            "seconds": time.perf_counter() - began,
        }
        self.recorder.log(record)
        for task, values in results.items():
            drawn = {f"validation/{task}/{key}": values[key] for key in ("ne", "auc", "calibration")}
            self.recorder.draw(drawn, progress.step)
        name = self.config.stop_on
        mean = sum(values.get(name, math.nan) for values in results.values()) / len(results)
        if math.isnan(mean) and (self.config.patience is not None or self.config.decay == "plateau"):
            reasons = {
                task: metrics[task].undefined()
                for task, values in results.items()
                if math.isnan(values.get(name, math.nan))
            }
            why = {reason.get(name, "no groups") for reason in reasons.values()}
            raise TrainingError(
                f"{STOP_TITLES[name]} is undefined for {list(reasons)}: {' and '.join(sorted(why))} in the validation "
                "split",
                where="validation",
                remedy="give the validation split more rows, as by data.fractions = [0.7, 0.2, 0.1] or data.split = "
                "'random', or another training.stop_on, or leave out training.patience and decay = 'plateau'",
            )
        progress.note(mean)
