"""Training steps of a language model in many processes, equal to those in one process.

An iteration is a list of packed microbatches, planned alike on every rank. Copies of the model take them in turn;
labels are shifted within documents before anything is cut; and the loss of every token is divided by the number of
targets of the whole iteration, so that no mean of means depends on the packing or the mesh (Grattafiori et al. 2024,
section 3.3.2: gradients are summed over microbatches and over ranks in 32 bits).
"""

from __future__ import annotations

import contextlib
import math
import time
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Literal, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor, nn

from cordillera.data.language.batches import PackedTokens
from cordillera.distributed.context.attention import ContextParallelAttention, ContextParallelConfig
from cordillera.distributed.context.shard_plan import SHARDINGS
from cordillera.distributed.dtensors import local
from cordillera.distributed.ledger import Ledger, Traffic
from cordillera.distributed.mesh import ParallelConfig, ProcessMesh
from cordillera.distributed.pipeline.runner import PipelineRunner
from cordillera.distributed.vocabulary_loss import IGNORED
from cordillera.errors import DataError, PlanError, TrainingError
from cordillera.models.language.llama import LlamaConfig
from cordillera.models.language.moe import ExpertTraining, Router
from cordillera.models.language.parallelize import (
    check_fit,
    free_weights,
    parallelize,
    reduce_after,
    reduce_now,
)
from cordillera.models.language.plain_attention import plain_attention
from cordillera.models.language.stages import LlamaStage, cut_model, part_of
from cordillera.numerics.emulation.emulation import EmulatedProducts, EmulationConfig
from cordillera.numerics.emulation.weight_storage import WeightStorage
from cordillera.numerics.formats.cast_checks import self_test
from cordillera.numerics.formats.precision import Precision
from cordillera.planning.pipeline.schedules import Action, Kind
from cordillera.training.language.gradients import StageGradients
from cordillera.training.language.objectives import AnswersObjective
from cordillera.training.optimizers import build_adamw

AGREED = "numbers that all ranks know"

BelowOne = Annotated[float, Field(ge=0, lt=1)]


class LanguageConfig(BaseModel):
    """Settings of the optimizer and of the computation.

    Attributes:
        optimizer: ``adamw``, or ``muon``, which orthogonalizes the updates of matrices but the embedding and the head,
            and leaves the rest to AdamW; ``muon`` trains in one process.
        learning_rate: Learning rate; Muon's updates are about as large as AdamW's at the same rate.
        betas: Decay rates of AdamW's two moments, at least 0 and below 1.
        eps: Term added to AdamW's denominator.
        weight_decay: Decoupled weight decay, not applied to norms.
        clip: Largest norm of all gradients together; larger gradients are scaled down to it. None for no limit.
        precision: Precision in which blocks compute, ``bf16`` or ``fp32``; weights, sums of gradients and moments are
            in 32 bits.
        loss_rows: Number of tokens whose logits exist at a time.
        compile: Whether ``torch.compile`` compiles the blocks, once for all numbers of tokens; needs a compiler for the
            device and a schedule that does not split backwards.
        emulate: Number format of hardware to emulate; needs ``precision = "fp32"`` and one process.
        experts: Balance of experts and what is kept of them, for a model that has experts.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    optimizer: Literal["adamw", "muon"] = "adamw"
    learning_rate: float = Field(3e-4, ge=0, allow_inf_nan=False)
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.95)
    eps: float = Field(1e-8, gt=0, allow_inf_nan=False)
    weight_decay: float = Field(0.1, ge=0, allow_inf_nan=False)
    clip: float | None = Field(1.0, gt=0, allow_inf_nan=False)
    precision: Precision = "fp32"
    loss_rows: int = Field(1024, ge=1)
    compile: bool = False
    emulate: EmulationConfig | None = None
    experts: ExpertTraining = ExpertTraining()

    @model_validator(mode="after")
    def _emulates_from_float32(self) -> LanguageConfig:
        if self.emulate is not None:
            self.emulate.check(self.precision, self.compile)
        return self


class StepReport(NamedTuple):
    """Result of a step, equal on every rank.

    Attributes:
        loss: Mean loss over the iteration's targets.
        gradient_norm: Norm of all gradients together, before clipping.
        is_skipped: Whether the weights were left unchanged, because a gradient or the loss was not finite.
        expert_imbalance: Tokens of the busiest expert of a layer in multiples of the mean, averaged over layers;
            None for a model without experts.
        measures: Sums of what the objective measured over the step's units, and the number of units.
    """

    loss: float
    gradient_norm: float
    targets: int
    is_skipped: bool
    expert_imbalance: float | None = None
    measures: Mapping[str, float] = MappingProxyType({})


def check_emulated(emulate: EmulationConfig | None, parallel: ParallelConfig) -> None:
    """Check that sums over processes do not break the emulation of a number format; ``emulate`` may be None.

    Raises:
        PlanError: If ``parallel`` has more than one process, or forwards are computed again.
    """
    if emulate is None:
        return
    where = "training.emulate"
    if parallel.world > 1:
        raise PlanError(
            f"a number format is emulated in one process, the mesh has {parallel.world}",
            where=where,
            remedy="leave [parallel] out, or train without emulation",
        )
    if parallel.recompute != "none":
        raise PlanError(
            "what a backward computes again would be rounded otherwise than at first",
            where=where,
            remedy="set parallel.recompute = 'none'",
        )


def check_optimizer(config: LanguageConfig, parallel: ParallelConfig) -> None:
    """Check that the optimizer of ``config`` goes with the processes of ``parallel``.

    Raises:
        PlanError: If it does not.
    """
    if config.optimizer == "muon" and parallel.world > 1:
        raise PlanError(
            f"muon needs whole matrices, the mesh has {parallel.world} processes",
            where="training.optimizer",
            remedy="adamw, or leave [parallel] out",
        )


def check_experts(config: LanguageConfig, model: LlamaConfig, parallel: ParallelConfig) -> None:
    """Check that experts of ``model``, if it has any, can be trained by ``config`` over the processes of ``parallel``.

    Raises:
        PlanError: If a setting does not go with experts; the message names it.
    """
    if model.experts is None:
        return
    wrong = {
        "training.emulate": (config.emulate is not None, "no number format is emulated in experts", "leave it out"),
        "parallel.schedule": (
            parallel.make_schedule(4 * parallel.stages).splits_backward,
            f"{parallel.schedule} splits backwards, those of experts are whole",
            "1f1b, gpipe, interleaved or breadth_first",
        ),
        "training.experts.balance_loss": (
            bool(config.experts.balance_loss) and parallel.context > 1,
            f"is over whole documents, and context is {parallel.context}",
            "set it to 0 and balance by training.experts.bias_rate",
        ),
    }
    for where, (is_wrong, what, remedy) in wrong.items():
        if is_wrong:
            raise PlanError(what, where=where, remedy=remedy)


def next_tokens(tokens: Tensor, offsets: Tensor) -> Tensor:
    """Return the successor of each of ``tokens [T]`` in its document, or :data:`IGNORED` for the last one.

    ``offsets [B + 1]`` are the starts of the documents, and ``T``; all are ``int64``.
    """
    labels = torch.full_like(tokens, IGNORED)
    labels[:-1] = tokens[1:]
    ends = offsets[1:][offsets[1:] > offsets[:-1]]  # an empty document has no last token
    labels[ends.to(labels.device) - 1] = IGNORED
    return labels


class LanguageEngine:
    """Weights and optimizer of a Llama in many processes, and the steps that change them.

    Every process of the mesh makes one and calls its methods with the same arguments; each raises a PeerError if
    another rank does not answer in time, after which the processes must be restarted. Weights are drawn from a seed; to
    load those of a checkpoint, call :meth:`LlamaStage.fill` of each of :attr:`stages`, then :meth:`take_weights`.

    Args:
        seed: Seed of the weights, which do not depend on the mesh.
        objective: Loss of post-training; None for the cross entropy of the next token.

    Attributes:
        stages: Stages that this process holds, by number.
        storage: Stored weights in addition to those of the computation, if a number format is emulated.
        loss_scale: Current loss scale, if gradients have one.
        ledger: Traffic of this rank since the engine was made: weights, sequences, matrices and stages.
        steps: Number of steps begun, of which ``skipped`` left the weights unchanged.

    Raises:
        PlanError: If the model's sizes do not allow the mesh, or blocks cannot be compiled.
    """

    Config = LanguageConfig

    def __init__(
        self,
        config: LanguageConfig,
        model: LlamaConfig,
        mesh: ProcessMesh,
        seed: int = 0,
        objective: AnswersObjective | None = None,
    ) -> None:
        parallel = mesh.config
        check_fit(model, parallel)
        check_optimizer(config, parallel)
        check_emulated(config.emulate, parallel)
        check_experts(config, model, parallel)
        self.config, self.model, self.mesh, self.objective = config, model, mesh, objective
        self._schedule = parallel.make_schedule(4 * parallel.stages)
        self._splits_backward = self._schedule.splits_backward
        if config.compile:
            self._check_compile()
        held = self._schedule.stages_of(mesh.place["pipeline"])
        self.stages = cut_model(model, parallel.stages, held)
        self.ledger = Ledger()
        for stage in self.stages.values():
            parallelize(stage, mesh, config.precision, self.ledger, config.compile)
            stage.loss_rows, stage.objective = config.loss_rows, objective
            stage.init_weights(seed)
            for layer in stage.experts.values():
                layer.keeps, layer.router.settings = config.experts.keeps, config.experts
        self.optimizer = build_adamw(
            nn.ModuleList(self.stages.values()),
            learning_rate=config.learning_rate,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
            muon=config.optimizer == "muon",
        )
        self.storage: WeightStorage | None = None
        self._overflowed = False
        if config.emulate is not None:
            self_test(mesh.device_type)
            named = {name: local(weight) for name, weight in self.stages[0].named_parameters() if weight.dim() >= 2}
            self.storage = WeightStorage(config.emulate, named)
        self.loss_scale = None if config.emulate is None else config.emulate.make_loss_scale()
        self._gradients = StageGradients(self.stages, mesh, self.ledger)
        self.steps = self.skipped = 0
        self._context = ContextParallelConfig(transport=parallel.transport, deadline_s=parallel.deadline_s)
        self._runners: dict[tuple[int, bool], PipelineRunner] = {}
        self._left: Counter[int] = Counter()  # remaining whole backwards of each stage in this step

    def step(self, microbatches: Sequence[PackedTokens], rate: float = 1.0) -> StepReport:
        """Train on one iteration; leave the weights unchanged if a gradient or the loss is not finite.

        Args:
            microbatches: Microbatches of the whole job, alike on every rank; copies of the model take them in turn.
            rate: Factor of the learning rate of this step, finite and at least 0.

        Raises:
            DataError: If a microbatch is invalid: its offsets do not fit its tokens, or a token is not in the
                vocabulary.
            PlanError: If ranks were given different microbatches, the schedule has no place for so few, or the rate is
                invalid.
            TrainingError: If there is nothing to predict, or another rank found an invalid microbatch.
        """
        _check_rate(rate)
        loss, targets = self.backward(microbatches)
        return self.update(loss, targets, rate)

    def backward(self, microbatches: Sequence[PackedTokens]) -> tuple[float, int]:
        """Accumulate the gradients of one iteration without changing weights; for errors, see :meth:`step`.

        Returns:
            This process's part of the loss, and the number of targets of the whole iteration.
        """
        own, targets = self._take(microbatches, "training")
        self.steps += 1
        self._left = Counter(dict.fromkeys(self.stages, len(own)))
        for router in self._routers().values():
            router.divisor = targets
            router.counts.zero_()
        with self._emulated(self.steps) as products:
            loss = self._run(own, targets)
        self._overflowed = products is not None and products.overflowed
        if self._splits_backward:
            for stage in self.stages.values():
                reduce_now(stage)
        self._gradients.complete()
        return loss, targets

    def evaluate(self, microbatches: Sequence[PackedTokens]) -> tuple[float, int]:
        """Compute the loss of the present weights on any microbatches of the job, without changing anything.

        Errors are those of :meth:`step`.

        Returns:
            The sum of the losses of all targets of the whole job, and the number of targets, equal on every rank.
        """
        own, targets = self._take(microbatches, "evaluation")
        with self._emulated(0):
            loss = self._run(own, None)
        for stage in self.stages.values():
            free_weights(stage)
        return float(self._exchange([loss]).sum()), targets

    @torch.no_grad()
    def log_probabilities(self, one: PackedTokens) -> Tensor:
        """Compute the log-probability of each label of a microbatch, ``[T]``, 0 where it is ignored; one process only.

        Raises:
            DataError: If the microbatch is invalid.
        """
        problem = self._problem(one)
        if problem is not None:
            raise DataError(problem, where="microbatch")
        found: list[Tensor] = []

        def keep(
            stage: LlamaStage, hidden: Tensor, offsets: Tensor, labels: Tensor, documents: Mapping[str, Tensor]
        ) -> Tensor:
            found.append(stage.log_probabilities(hidden, labels))
            return hidden.new_zeros(())

        stage = self.stages[0]
        stage.objective = keep
        try:
            (tokens,), (arguments,), _ = self._cut([_labelled(one)])
            with self._emulated(0):
                stage(tokens, *arguments)
        finally:
            stage.objective = self.objective
            free_weights(stage)
        return found[0]

    def update(self, loss: float, targets: int, rate: float = 1.0) -> StepReport:
        """Change the weights by the accumulated gradients, and clear the gradients.

        ``loss`` and ``targets`` are those of :meth:`backward`, ``rate`` is that of :meth:`step`.

        Raises:
            PlanError: If the rate is invalid.
        """
        _check_rate(rate)
        # every rank sums the same numbers in the same order, so that all make the same decision
        loss, square = self._exchange([loss, self._gradients.square()]).sum(0).tolist()
        norm = math.sqrt(square) if square >= 0 else math.nan
        is_skipped = not (math.isfinite(norm) and math.isfinite(loss)) or self._overflowed
        if self.loss_scale is not None:
            self.loss_scale.update(is_skipped)
        if is_skipped:
            self.skipped += 1
        else:
            if self.config.clip is not None and norm > self.config.clip:
                self._gradients.scale(self.config.clip / norm)
            for group in self.optimizer.param_groups:
                group["lr"] = rate * self.config.learning_rate
            if self.storage is not None:
                self.storage.before_update()
            self.optimizer.step()
            if self.storage is not None:
                self.storage.after_update(self.steps)
        self.optimizer.zero_grad()
        return StepReport(loss, norm, targets, is_skipped, self._balance(not is_skipped), self.take_measures())

    def gradients(self) -> list[Tensor]:
        """Return this rank's parts of the accumulated gradients, in the same order on the same rank of every replica.

        Changes of their values are changes of the gradients. Zeros are made where there is none.
        """
        return self._gradients.tensors()

    def discard(self) -> None:
        """Clear the accumulated gradients without changing weights."""
        self.optimizer.zero_grad()

    def take_measures(self) -> dict[str, float]:
        """Return and reset the sums of what the objective measured since the last call; empty without any."""
        return {} if self.objective is None else self.objective.take()

    def _routers(self) -> dict[int, Router]:
        """Routers of this process by the number of their block."""
        return {number: layer.router for stage in self.stages.values() for number, layer in stage.experts.items()}

    @torch.no_grad()
    def _balance(self, changes: bool) -> float | None:
        """Raise the biases of experts that had little to do, if ``changes``; return the imbalance of the step."""
        if self.model.experts is None:
            return None
        own, routers = torch.zeros(self.model.layers, self.model.experts.count), self._routers()
        for number, router in routers.items():
            own[number] = router.counts
        counts = self._exchange(own.flatten().tolist()).sum(0).view_as(own).cpu()
        mean = counts.mean(1, keepdim=True)
        for number, router in routers.items() if changes else ():
            shift = self.config.experts.bias_rate * (1 - counts[number] / mean[number]).float()
            local(router.bias).add_(part_of(shift.to(router.bias.device), router.bias))
        return float((counts.amax(1) / mean[:, 0]).mean())

    def take_weights(self) -> None:
        """Take the weights of the stages as those in full precision, after the stages were filled from outside."""
        if self.storage is not None:
            self.storage.after_update(0)

    def _emulated(self, step: int) -> contextlib.AbstractContextManager[EmulatedProducts | None]:
        if self.config.emulate is None:
            return contextlib.nullcontext()
        scale = 1.0 if self.loss_scale is None else self.loss_scale.value
        return EmulatedProducts(self.config.emulate, step, scale)

    def _check_compile(self) -> None:
        from cordillera.models.language.compiling import check_compiler

        check_compiler(self.mesh.device_type)
        if self._splits_backward:
            raise PlanError(
                f"a compiled block's backward cannot be split, as {self.mesh.config.schedule} does",
                where="compile",
                remedy="another schedule, such as 1f1b or interleaved, or do not compile",
            )

    def _take(self, microbatches: Sequence[PackedTokens], purpose: str) -> tuple[list[PackedTokens], int]:
        """Return this rank's microbatches, as many as on every rank, and the targets of the whole iteration."""
        copies = self.mesh.config.copies
        own = list(microbatches[self.mesh.copy :: copies])
        problem = next(filter(None, map(self._problem, own)), None)
        if problem is None:
            own = [_labelled(one) for one in own]
        targets = self._agree(own, len(microbatches), problem, purpose)
        return own + [_nothing()] * (-(-len(microbatches) // copies) - len(own)), targets

    def _run(self, own: Sequence[PackedTokens], targets: int | None) -> float:
        """Run forwards and backwards of the mean over the targets; without targets, forwards of the sum."""
        inputs, arguments, rows = self._cut(own)
        divisor = torch.tensor(float(targets or 1), device=self.mesh.device_type)
        runner = self._runner(len(own), targets is not None)
        losses = runner.step(inputs, [divisor] * len(own), arguments, rows).losses
        # ranks that share matrices have the same losses
        return 0.0 if losses is None or self.mesh.place["tensor"] else float(losses.double().sum())

    def _problem(self, one: PackedTokens) -> str | None:
        """Return a description of an error in a microbatch, or None."""
        tokens, offsets, labels = one[:3]
        bounds = offsets.tolist()
        if not bounds or bounds[0] != 0 or bounds[-1] != len(tokens) or bounds != sorted(bounds):
            return f"offsets {bounds} do not rise from 0 to its {len(tokens)} tokens"
        if labels is not None and len(labels) != len(tokens):
            return f"{len(labels)} labels for {len(tokens)} tokens"
        for name, given in (("token", tokens), ("label", None if labels is None else labels[labels != IGNORED])):
            if (
                given is not None
                and len(given)
                and not 0 <= int(given.min()) <= int(given.max()) < self.model.vocabulary
            ):
                wrong = given[(given < 0) | (given >= self.model.vocabulary)]
                return f"{name} {int(wrong[0])} is not in the vocabulary of {self.model.vocabulary}"
        return None

    def _agree(self, own: Sequence[PackedTokens], count: int, problem: str | None, purpose: str) -> int:
        """Compare this rank's microbatches and purpose with the other ranks'; return the targets of the iteration."""
        digest, targets = zlib.crc32(repr((purpose, self.steps, count)).encode()), 0
        for one in own if problem is None else ():
            assert one.labels is not None
            for tensor in (one.tokens, one.offsets, one.labels):
                digest = zlib.crc32(tensor.cpu().numpy().tobytes(), digest)
            targets += int((one.labels != IGNORED).sum()) if self.objective is None else self.objective.units(one)
        numbers = [self.mesh.copy, digest, targets, count, problem is not None]
        found = self._exchange(numbers).long().tolist()
        if problem is not None:
            raise DataError(problem, where="microbatch")
        first: dict[int, tuple[int, list[int]]] = {}
        for rank, (copy, *rest, is_wrong) in enumerate(found):
            if is_wrong:
                raise TrainingError(f"rank {rank} was given a microbatch that is none", remedy="see its own message")
            other, expected = first.setdefault(copy, (rank, rest))
            if rest != expected or rest[-1] != found[0][3]:
                raise PlanError(
                    f"rank {rank} was given others than rank {other if rest != expected else 0}",
                    where="microbatches",
                    remedy="give every rank the whole iteration, in the same order",
                )
        total = sum(rest[1] for _, rest in first.values())
        if not total:
            raise TrainingError(
                f"{count} microbatches without a target", where="microbatches", remedy="documents of 2 tokens or more"
            )
        return total

    def _cut(self, own: Sequence[PackedTokens]) -> tuple[list[Tensor], list[tuple[object, ...]], list[int]]:
        """Return this rank's tokens and other inputs of each microbatch, and the rows that its stages pass on."""
        parallel, device = self.mesh.config, self.mesh.device_type
        inputs: list[Tensor] = []
        arguments: list[tuple[object, ...]] = []
        for tokens, offsets, labels, documents in own:
            assert labels is not None
            if parallel.context == 1:
                inputs.append(tokens.to(device))
                core = None if self.config.emulate is None else plain_attention
                values = {name: value.to(device) for name, value in (documents or {}).items()}
                arguments.append((offsets, None, labels.to(device), core, values))
                continue
            # one for each microbatch: a pipeline has several in flight, and a backward may recompute its forward
            parts = ContextParallelAttention(self._context, self.mesh.context_group, self.ledger)
            parts.use(SHARDINGS[parallel.sharding](offsets.diff().tolist(), parallel.context), device)
            inputs.append(parts.shard(tokens.to(device)))
            arguments.append((offsets, parts.positions().to(device), parts.shard(labels.to(device)), parts))
        ranks = parallel.tensor if parallel.sequence else 1
        return inputs, arguments, [-(-len(tokens) // ranks) for tokens in inputs]

    def _runner(self, microbatches: int, trains: bool) -> PipelineRunner:
        if (microbatches, trains) not in self._runners:
            make = self.mesh.config.make_schedule if trains else self._schedule.forwards
            self._runners[microbatches, trains] = PipelineRunner(
                make(microbatches),
                self.stages,
                torch.div,  # divides the sum of a microbatch's losses by the targets of all
                self.mesh.pipeline_group,
                deadline_s=self.mesh.config.deadline_s,
                reduction="sum",
                before=self._prepare,
                ledger=self.ledger,
            )
        return self._runners[microbatches, trains]

    def _prepare(self, action: Action) -> None:
        """Keep gradients whole on each rank until the last backward of a stage, which reduces them once."""
        if action.kind is Kind.FORWARD:
            return
        if self._splits_backward:  # weights stay gathered for the second parts
            reduce_after(self.stages[action.stage], False, False)
            return
        self._left[action.stage] -= 1
        reduce_after(self.stages[action.stage], self._left[action.stage] == 0, self.mesh.config.reshards)

    def _exchange(self, numbers: Sequence[float]) -> Tensor:
        began = time.perf_counter()
        found = self.mesh.exchange(numbers)
        others, seconds = self.mesh.config.world - 1, time.perf_counter() - began
        if others:
            self.ledger.record(AGREED, Traffic(1, 8 * others * len(numbers), others, seconds, seconds))
        return found


def _check_rate(rate: float) -> None:
    if not (math.isfinite(rate) and rate >= 0):
        raise PlanError(f"{rate} is no factor on a learning rate", where="rate", remedy="a finite one, 0 or more")


def _labelled(one: PackedTokens) -> PackedTokens:
    return one if one.labels is not None else one._replace(labels=next_tokens(one.tokens, one.offsets))


def _nothing() -> PackedTokens:
    """Return one token without a target, for a copy of the model that has no microbatch."""
    zero = torch.zeros(1, dtype=torch.int64)
    return PackedTokens(zero, torch.tensor([0, 1]), zero + IGNORED)
