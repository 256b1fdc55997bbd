"""Training of a language model by replicas; any replica may fail while the others continue.

Each replica holds the whole model on its own mesh. A step takes the next iterations of the text, one for each replica
that takes part. What a step was trained on follows from the state before it: a step that is given up takes nothing, and
every iteration is in one committed step. Gradients are weighted by the number of targets, so that a step is one on all
of its tokens.

Source: FT-HSDP (arXiv 2602.00277), abstract and introduction; the ledger and the end of a job are ours.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from cordillera.data.language.batches import TextIteration
from cordillera.data.language.prefetch import IterationsAhead
from cordillera.distributed.dtensors import local
from cordillera.distributed.fault_tolerance.coordination import Commit, FaultToleranceConfig, Membership, initial_commit
from cordillera.distributed.fault_tolerance.events import FOLDER, EventLog
from cordillera.distributed.fault_tolerance.replica import Replica, ReplicaPlace, digest_of
from cordillera.errors import CheckpointError, PlanError, TrainingError
from cordillera.models.language.llama import LlamaConfig
from cordillera.models.language.parallelize import free_weights
from cordillera.training.language.checkpoints import ShardedCheckpoints
from cordillera.training.language.engine import LanguageConfig
from cordillera.training.language.trainer import (
    LanguageEnd,
    LanguageEvaluation,
    LanguageProgress,
    LanguageTrainer,
    LanguageWindow,
    write_evaluation,
)
from cordillera.training.optimizers import schedule

_MOMENTS = ("step", "exp_avg", "exp_avg_sq")


class ReplicatedTrainer(LanguageTrainer):
    """Trainer of one replica; arguments that :class:`LanguageTrainer` does not have are keywords.

    Args:
        place: How the replica reaches its job.
        tolerance: Replicas, deadlines and what a step is trained on.
        local: Checkpoints of this replica alone, on a disk of its machine.
    """

    def __init__(
        self,
        *arguments: Any,
        place: ReplicaPlace,
        tolerance: FaultToleranceConfig,
        local: ShardedCheckpoints | None = None,
        **others: Any,
    ) -> None:
        super().__init__(*arguments, **others, reads_ahead=False)
        self.place, self.tolerance, self.local = place, tolerance, local
        self.ahead = self.batches = IterationsAhead(self.batches.batches)
        self.commit: Commit = initial_commit(place.configuration)
        self.ended: LanguageEnd | None = None
        self._own_run, self.run = self.run, None
        self.recorder.run = None
        folder = None if self._own_run is None else self._own_run.folder / FOLDER
        self._events = EventLog(None if folder is None else folder / f"{place.name}.jsonl")
        self._replica: Replica | None = None
        self._writes = self._leaves = False
        self._restored: int | None = None
        self._computed: tuple[tuple[Commit, list[int]], tuple[float, int]] | None = None
        self._flat = torch.empty(0)
        self._held = HeldState(self)  # before the first forward: gathered weights are separate tensors

    def resume(self) -> bool:
        """Restore the newest checkpoint that verifies, on the disk of this machine or in the run's folder.

        A damaged checkpoint is not fatal, as another replica may hold the state. Records of the run are not changed.
        """
        state, newest = None, self._durable()
        tiers = [self.checkpoints, *([self.local] if self.local is not None else [])]
        found = [(step, number) for number, tier in enumerate(tiers) for step in tier.steps()]
        for step, number in sorted(found, reverse=True):
            try:
                state = tiers[number].restore(self.engine, step)
                break
            except CheckpointError as error:
                self._events.write("damaged", step=step, why=str(error))
        if state is None:
            return False
        self._take_facts(state)
        first = self.commit.follow(0, [])
        self.commit = Commit(**state["commit"]) if "commit" in state else Commit(0, state["step"], first.lineage)
        self._restored = newest
        return True

    def _train(self) -> tuple[LanguageEnd, LanguageEvaluation | None]:
        self._warm_up()
        with Replica(
            self.place,
            self.tolerance,
            self.engine.mesh,
            self._held,
            self.commit,
            restored=self._restored,
            durable=self._durable,
            watchdog=self.watchdog,
        ) as replica:
            self._replica = replica
            processes = self.engine.mesh.exchange([float(os.getpid())]).flatten().int().tolist()
            self._events.write("joined", step=self.commit.step, epoch=self.commit.epoch, processes=processes)
            ended = self._steps()
            self._events.write("left", ended=ended, step=self.progress.step)
        self.checkpoints.wait()
        if self.local is not None and not self._leaves:  # the run's folder now holds the same state
            self.local.wait()
            self.local.prune(set())
            for folder in (self.local.folder, self.local.folder.parent):
                with contextlib.suppress(OSError):  # the folder also holds other replicas' files
                    folder.rmdir()
        evaluation = None
        if ended != "interrupted" and self.can_evaluate:
            evaluation = self._evaluate()
        if self.run is not None and not self._leaves:
            if evaluation is not None:
                write_evaluation(self.run, **self._place(), found=evaluation)
            self.recorder.tell(ended, self._position())
        return ended, evaluation

    def _steps(self) -> LanguageEnd:
        """Train until the end, which all replicas reach together, once the last checkpoint is complete."""
        assert self._replica is not None
        self.engine.ledger.clear()
        while True:
            began = time.perf_counter()
            membership = self._replica.begin()
            self._take_turn(membership)
            wanted = self.tolerance.iterations(len(membership.participants))
            iterations = self.ahead.look(wanted)
            if self.ended is None and self.progress.step >= self.config.steps:
                self.ended = "finished"
            if self.ended is None and not iterations:
                self.ended = "exhausted"
            if self.ended is None:
                self._attempt(membership, iterations, began)
            elif self._close(membership):
                return self.ended
            if self._leaves:
                return "interrupted"

    def _take_turn(self, membership: Membership) -> None:
        """Make the first participant the writer of records and checkpoints."""
        self._writes = membership.participants[0] == self.place.name
        self.run = self._own_run if self._writes else None
        self.recorder.run = self.run

    def _attempt(self, membership: Membership, iterations: Sequence[TextIteration], began: float) -> None:
        """Train one step, and commit or discard it."""
        assert self._replica is not None
        replica, head = self._replica, membership.head
        self._at(f"step {head.step + 1}")
        loss, targets = 0.0, 0
        if replica.contributes:
            place = membership.participants.index(self.place.name)
            computing = time.perf_counter()
            loss, targets = self._backward(head, iterations[place :: len(membership.participants)])
            replica.seconds["compute"] = time.perf_counter() - computing
        found = self._summed(membership, loss, targets)
        is_well, stop, leaves = self._vote(found is not None, 0.0 if found is None else float(found[2]))
        facts = {
            "epoch": membership.epoch,
            "step": head.step + 1,
            "parent": head.lineage,
            "lineage": membership.result.lineage,
            "participants": list(membership.participants),
            "members": list(membership.members),
            "first": iterations[0].number,
            "iterations": len(iterations),
        }
        if not is_well:
            replica.discard()
            self._tell("discarded", facts, began)
            return
        assert found is not None
        rate = self.tolerance.rate_factor(len(iterations)) * schedule(
            self.progress.step,
            self.config.steps,
            warmup=self.config.warmup_steps,
            decay=self.config.decay,
            floor=self.config.final_rate,
        )
        self._computed = None
        with replica.committing():
            report = self.engine.update(float(found[0]), int(found[1]), rate)
            self.engine.steps = self.progress.step + 1
            self.ahead.take(len(iterations))
            self._count(iterations, report, rate, len(membership.participants))
            if stop:
                self.ended = "interrupted"
        self._leaves = leaves > 0
        self._tell("committed", {**facts, "rate": rate, "targets": report.targets, "loss": report.loss}, began)
        self._after_commit()

    def _backward(self, head: Commit, own: Sequence[TextIteration]) -> tuple[float, int]:
        """Compute the gradients of this replica's part of a step, unless they are there since the step was given up.

        Returns:
            This rank's part of the mean loss, and the number of targets; 0 and 0 if the text ends before this part.
        """
        wanted = (head, [one.number for one in own])
        if self._computed is not None and self._computed[0] == wanted:
            return self._computed[1]
        self._forget()
        found = 0.0, 0
        if own:
            self.engine.steps = self.progress.step
            found = self.engine.backward([one for iteration in own for one in iteration.microbatches])
        self._computed = wanted, found
        return found

    def _forget(self) -> None:
        """Clear the gradients."""
        self.engine.discard()
        self._computed = None

    def _warm_up(self) -> None:
        """Compute one step and drop it, as the first one takes longer than others, which would wait for it."""
        self._backward(self.commit, self.ahead.look(1))
        self._forget()

    def _summed(self, membership: Membership, loss: float, targets: int) -> Tensor | None:
        """Average the gradients over the targets of all participants, in place.

        Returns:
            This rank's part of the mean loss, the number of targets, how many were asked to stop, and the sum of the
            digests of weights; None if the sum was given up.
        """
        assert self._replica is not None
        replica, count = self._replica, len(membership.participants)
        gradients = self.engine.gradients()
        every = self.tolerance.compare_every
        is_due = every is not None and self.progress.step % every == 0
        digest = digest_of(self._held.weights()) if is_due else 0
        is_asked = replica.is_last or (self._is_asked_here() and not self.place.leaves)
        totals = torch.tensor([loss * targets, targets, is_asked, digest], dtype=torch.float64)
        if not replica.add(totals):
            return None
        if int(totals[3]) != count * digest:
            raise TrainingError(
                f"replica {self.place.name} holds other weights than the others",
                where=f"step {self.progress.step}",
                remedy="a device computes wrongly, or memory is damaged: look for it, and go on with --resume",
            )
        # the gradient of one participant alone is not rounded
        weight, divisor = (float(targets), float(totals[1])) if count > 1 else (1.0, 1.0)
        sizes = [one.numel() for one in gradients]
        if self._flat.numel() != sum(sizes):
            self._flat = torch.empty(sum(sizes))
        for gradient, part in zip(gradients, self._flat.split(sizes), strict=True):
            torch.mul(gradient, weight, out=part.view_as(gradient))
        if not replica.add(self._flat):
            return None
        for gradient, summed in zip(gradients, self._flat.split(sizes), strict=True):
            torch.div(summed.view_as(gradient), divisor, out=gradient)
        totals[0] /= totals[1]
        return totals

    def _is_asked_here(self) -> bool:
        return self.watchdog is not None and self.watchdog.should_stop

    def _vote(self, is_well: bool, stop: float) -> tuple[bool, float, float]:
        """Return whether all ranks of this replica have their sums, and whether the job, or this replica, is to end."""
        assert self._replica is not None
        began = time.perf_counter()
        traffic = self.engine.ledger.total()
        self.engine.ledger.clear()
        leaves = float(self.place.leaves and self._is_asked_here())
        numbers = [float(not is_well), stop, leaves, traffic.seconds, traffic.exposed_seconds, self._used()]
        found = self.engine.mesh.exchange(numbers).amax(0).tolist()
        ill, stop, leaves, communication, exposed, self._memory = found
        self._window.communication += communication
        self._window.exposed += exposed
        self._replica.seconds["vote"] = self._replica.seconds.get("vote", 0.0) + time.perf_counter() - began
        return ill == 0, stop, leaves

    def _tell(self, outcome: str, facts: Mapping[str, Any], began: float) -> None:
        assert self._replica is not None
        seconds = {**self._replica.seconds, "all": time.perf_counter() - began}
        self._events.write("step", outcome=outcome, **facts, seconds=seconds)

    def _after_commit(self) -> None:
        """Write records, evaluate and save as they are due; all replicas evaluate, so that none waits for another."""
        config, record = self.config, {}
        is_last = self.progress.step >= config.steps or self.ended is not None
        if is_last or self._is_due(config.log_every):
            record, self._window = self._log(), LanguageWindow()
        paused = time.perf_counter()
        if self.can_evaluate and not is_last and self._is_due(config.evaluate_every):
            self._evaluate()
        if self._writes and not is_last and self._is_due(config.checkpoint_every):
            self._save()
        elif self.local is not None and not is_last and self._is_due(self.tolerance.local_every):
            self.local.save(self.engine, self._state())
            self.local.prune(set(self.local.steps()[-2:]))  # the newest may be damaged
        self._window.started += time.perf_counter() - paused
        if self.on_step is not None and self._writes:
            self.on_step(record, self.progress, config.steps)

    def _close(self, membership: Membership) -> bool:
        """Return whether the last checkpoint is complete; its writer may fail before, and another takes its turn."""
        assert self._replica is not None
        if self._writes:
            if self.checkpoints.last != self.progress.step:
                self._save()
            self.checkpoints.wait()
            self._prune()
        is_well = self._replica.add(torch.tensor([float(self._writes)]))
        if not self._replica.agree(is_well):
            self._replica.discard()
            return False
        return True

    def _state(self) -> dict[str, Any]:
        assert self._replica is not None
        return super()._state() | {"commit": asdict(self._replica.held)}

    def _durable(self) -> int:
        """Return the step of the newest checkpoint."""
        local = [] if self.local is None else self.local.steps()
        return max([*self.checkpoints.steps(), *local], default=0)

    def _facts(self) -> dict[str, Any]:
        return {
            "progress": asdict(self.progress),
            "window": self._window.to_state(),
            "batches": self.ahead.state_dict(),
            "skipped": self.engine.skipped,
            "ended": self.ended,
        }

    def _take_facts(self, facts: Mapping[str, Any]) -> None:
        self.ahead.load_state_dict(facts["batches"])
        self.progress = LanguageProgress(**facts["progress"])
        self._window = LanguageWindow(**facts["window"])
        self.engine.skipped = facts.get("skipped", self.engine.skipped)
        self.ended = facts.get("ended")


class HeldState:
    """State of one rank of a replica: weights, moments and the position of training."""

    def __init__(self, trainer: ReplicatedTrainer) -> None:
        self._trainer = trainer
        self._parameters = [
            (f"{number}.{name}", parameter)
            for number, stage in trainer.engine.stages.items()
            for name, parameter in stage.named_parameters()
        ]

    def weights(self) -> dict[str, Tensor]:
        """Return this rank's parts of the weights."""
        return {name: local(parameter.data) for name, parameter in self._parameters}

    def tensors(self) -> dict[str, Tensor]:
        """Return this rank's parts of the weights and moments."""
        found = self.weights()
        optimizer = self._trainer.engine.optimizer
        for name, parameter in self._parameters:
            for key in _MOMENTS if parameter in optimizer.state else ():  # frozen weights have none
                found[f"{name}.{key}"] = local(optimizer.state[parameter][key])
        return found

    def facts(self) -> dict[str, Any]:
        """Return the position of training."""
        return self._trainer._facts()

    @torch.no_grad()
    def install(self, tensors: Mapping[str, Tensor], facts: Any) -> None:
        """Take over the state of the same rank of another replica."""
        engine = self._trainer.engine
        for stage in engine.stages.values():
            free_weights(stage)
        for name, parameter in self._parameters:
            local(parameter.data).copy_(tensors[name])
            if f"{name}.step" not in tensors:
                engine.optimizer.state.pop(parameter, None)
                continue
            state = engine.optimizer.state[parameter]
            if not state:
                state["step"] = torch.zeros((), device=parameter.device)
                state |= {key: torch.zeros_like(parameter) for key in _MOMENTS[1:]}
            for key in _MOMENTS:
                local(state[key]).copy_(tensors[f"{name}.{key}"])
        self._trainer._forget()
        self._trainer._take_facts(facts)


def check_replicated(config: LanguageConfig, model: LlamaConfig, has_objective: bool, device: str) -> None:
    """Check that a model can be trained by replicas.

    Args:
        has_objective: Whether it is trained after its pre-training.
        device: Type of the devices.

    Raises:
        PlanError: If not; the message names what does not go with them.
    """
    wrong = {
        "training.emulate": (config.emulate is not None, "a number format is emulated in one process"),
        "model.experts": (model.experts is not None, "experts are balanced within one replica"),
        "training.optimizer": (config.optimizer != "adamw", "replicas hold the moments of adamw"),
        "objective": (has_objective, "objectives of post-training are trained without replicas"),
        "device": (device != "cpu", "gradients of replicas are added on CPUs"),
    }
    for where, (is_wrong, what) in wrong.items():
        if is_wrong:
            raise PlanError(
                what, where=where, remedy="train it with `cordillera train` and fault_tolerance.replicas = 1"
            )
