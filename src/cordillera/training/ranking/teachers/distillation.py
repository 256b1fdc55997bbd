"""Distillation of an external teacher's scores into a ranking model through auxiliary heads.

The teacher's scores stand beside the samples, and none is computed here. A student's serving heads learn from labels
alone. Auxiliary heads of the same form read the same representation and learn the teacher's scores, so that only the
representation gains from the teacher, and its bias stays in heads that are not served. A student adapter corrects the
scores of a teacher that lags behind the stream, from fresh labels, for a second set of auxiliary heads.

Source: ExFM (arXiv 2502.17494): auxiliary head with gradient scaling, label scaling and loss weight (equations 3 to 5),
student adapter (equations 6 and 7, algorithm 1), as a third-party implementation describes them. The adapter here
starts as the identity, and is updated in the same step as the student, which reads its output of before that update.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor, nn

from cordillera.data.ranking.features import RankingBatch
from cordillera.errors import CheckpointError, TrainingError
from cordillera.models.ranking.heads import Heads
from cordillera.models.ranking.interactions import MLP
from cordillera.training.optimizers import load_moments, moments_of

_MOMENTS = "teacher_optimizer."

Width = Annotated[int, Field(ge=1, le=2**12)]


class TeacherConfig(BaseModel):
    """Learning from the scores of a teacher, whose columns ``data.schema.teacher`` names.

    Attributes:
        head: Heads that learn the teacher's scores: ``none``; ``auxiliary``, heads of their own, which are not served;
            or ``serving``, those of the labels, which take over the teacher's bias.
        weight: Factor of the loss against the teacher's scores.
        label_scale: Factor of the teacher's probabilities before they are targets, limited to 1 afterwards.
        gradient_scale: Factor of the gradient that auxiliary heads give the representation, not of their own gradients.
        adapter: Whether an adapter corrects the teacher's scores from labels, for auxiliary heads of their own.
        adapter_mlp: Hidden widths of the adapter.
        adapter_weight: Factor of the loss against the adapter's scores.
        adapter_learning_rate: Rate of the adapter's AdamW, which no schedule changes.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    head: Literal["none", "auxiliary", "serving"] = "none"
    weight: float = Field(1.0, ge=0)
    label_scale: float = Field(1.0, gt=0)
    gradient_scale: float = Field(1.0, ge=0)
    adapter: bool = False
    adapter_mlp: tuple[Width, ...] = (16,)
    adapter_weight: float = Field(1.0, ge=0)
    adapter_learning_rate: float = Field(1e-2, gt=0)

    @model_validator(mode="after")
    def _settings_of_auxiliary_heads(self) -> TeacherConfig:
        if self.head != "auxiliary":
            for key in ("adapter", "gradient_scale"):
                if getattr(self, key) != type(self).model_fields[key].default:
                    raise ValueError(f"{key} is of auxiliary heads: set head = 'auxiliary'")
        return self

    @model_validator(mode="after")
    def _settings_of_what_is_learnt(self) -> TeacherConfig:
        unused: dict[str, str] = {}
        if self.head == "none":
            unused |= dict.fromkeys(("weight", "label_scale"), "has no effect without heads that learn: set head")
        if not self.adapter:
            of_adapter = ("adapter_mlp", "adapter_weight", "adapter_learning_rate")
            unused |= dict.fromkeys(of_adapter, "is of the adapter: set adapter = true")
        for key, said in unused.items():
            if getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(f"{key} {said}")
        return self


class TeacherLosses(NamedTuple):
    """Losses of one step from a teacher's scores.

    Attributes:
        student: Loss ``[tasks]`` of the student, with its factors.
        adapter: Loss ``[tasks]`` of the adapter against labels; zeros without an adapter.
    """

    student: Tensor
    adapter: Tensor


class _ScaledGradient(torch.autograd.Function):
    """The identity forward, a factor backward."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return given.view_as(given)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None


class StudentAdapter(nn.Module):
    """Correction of a teacher's logits: ``[B, tasks] -> [B, tasks]``, the identity before the first update.

    Args:
        hidden: Hidden widths.
    """

    def __init__(self, tasks: int, hidden: tuple[int, ...]) -> None:
        super().__init__()
        self.change = MLP(tasks, hidden, tasks)
        last = self.change.layers[-1]
        assert isinstance(last, nn.Linear)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)

    def forward(self, logits: Tensor) -> Tensor:
        return logits + self.change(logits).to(logits.dtype)


MeanLoss = Callable[[Tensor, Tensor], Tensor]
"""Function from logits and targets ``[B, tasks]``, NaN where one is missing, to mean losses ``[tasks]``."""


class Distiller(nn.Module):
    """Heads, adapter and optimizer that a student has in training only.

    Auxiliary heads begin as copies of the serving heads. Nothing here draws from torch's random state.

    Args:
        config: Settings; ``head`` is not ``none``.
        heads: Serving heads of the student.
        tasks: Number of tasks.
        adamw: Settings of AdamW for the auxiliary heads: ``lr``, ``betas``, ``eps``, ``weight_decay`` (of matrices).

    Raises:
        TrainingError: If the model has no heads on a representation.
    """

    def __init__(self, config: TeacherConfig, heads: nn.Module, tasks: int, adamw: dict[str, Any]) -> None:
        super().__init__()
        self.config = config
        self.copies = nn.ModuleDict()
        if config.head == "auxiliary":
            if not isinstance(heads, Heads):
                raise TrainingError(
                    "has no heads on a representation, which a teacher could improve",
                    where="model.name",
                    remedy="choose another model, or training.teacher.head = 'serving'",
                )
            for name in ("teacher", "adapter") if config.adapter else ("teacher",):
                own = copy.deepcopy(heads)
                own.share = None  # balancing is of the serving heads
                self.copies[name] = own
        self.adapter: StudentAdapter | None = None
        if config.adapter:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                self.adapter = StudentAdapter(tasks, config.adapter_mlp)
            self.adapter.to(next(heads.parameters()).device)
        self.optimizer = self._made_optimizer(adamw) if self.copies else None

    def _made_optimizer(self, adamw: dict[str, Any]) -> torch.optim.AdamW:
        weights = list(self.copies.parameters())
        groups: list[dict[str, Any]] = [
            {"params": [one for one in weights if one.dim() >= 2]},
            {"params": [one for one in weights if one.dim() < 2], "weight_decay": 0.0},
        ]
        if self.adapter is not None:
            own = {"lr": self.config.adapter_learning_rate, "weight_decay": 0.0}
            groups.append({"params": list(self.adapter.parameters()), **own})
        return torch.optim.AdamW(groups, **adamw, fused=True)

    def losses(self, representation: Tensor, logits: Tensor, samples: RankingBatch, mean: MeanLoss) -> TeacherLosses:
        """Compute the losses of a batch, or of a part of one.

        Args:
            representation: Input of the heads, ``[B, r]``.
            logits: Logits of the serving heads, ``[B, tasks]``.
            samples: The samples, with labels and the teacher's logits.
            mean: Function that computes the mean loss of logits against targets.

        Raises:
            TrainingError: If the samples have no scores of a teacher.
        """
        config, teacher = self.config, _scores_of(samples)
        assert samples.labels is not None
        targets = (config.label_scale * teacher.sigmoid()).clamp(max=1.0)  # NaN stays NaN
        none = torch.zeros(logits.shape[1], device=logits.device)
        if not self.copies:
            return TeacherLosses(config.weight * mean(logits, targets), none)
        shared = _ScaledGradient.apply(representation, config.gradient_scale)
        with _apart_from_dropout(shared.device):
            found = {name: heads(shared) for name, heads in self.copies.items()}
        student = config.weight * mean(found["teacher"], targets)
        if self.adapter is None:
            return TeacherLosses(student, none)
        is_missing = teacher.isnan()
        adapted = self.adapter(teacher.masked_fill(is_missing, 0.0))
        corrected = adapted.detach().sigmoid().masked_fill(is_missing, torch.nan)
        student = student + config.adapter_weight * mean(found["adapter"], corrected)
        return TeacherLosses(student, mean(adapted, samples.labels.masked_fill(is_missing, torch.nan)))

    def update(self, learning_rate: float, largest_norm: float | None) -> None:
        """Update heads and adapter, and clear their gradients.

        Args:
            learning_rate: Rate of the auxiliary heads.
            largest_norm: Largest norm of the gradients of the auxiliary heads together; None for no limit.
        """
        if self.optimizer is None:
            return
        if largest_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.copies.parameters(), largest_norm)
        for group in self.optimizer.param_groups[:2]:
            group["lr"] = learning_rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def tensors(self) -> dict[str, Tensor]:
        """Return all weights and moments, by names that begin with ``teacher.`` and ``teacher_optimizer.``."""
        found = {f"teacher.{name}": weight for name, weight in self.state_dict().items()}
        if self.optimizer is not None:
            found |= moments_of(self.optimizer, dict(self.named_parameters()), _MOMENTS)
        return found

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Go on from :meth:`tensors`; others among the tensors are ignored.

        Raises:
            CheckpointError: If one is missing or has another shape.
        """
        saved = {name.removeprefix("teacher."): one for name, one in tensors.items() if name.startswith("teacher.")}
        try:
            self.load_state_dict(saved)
        except RuntimeError as error:
            raise CheckpointError(
                f"holds other heads for a teacher: {str(error).splitlines()[-1].strip()}",
                where="training.teacher",
                remedy="use the recipe that stands in the run's folder",
            ) from error
        if self.optimizer is not None:
            load_moments(self.optimizer, dict(self.named_parameters()), tensors, _MOMENTS)


def _scores_of(samples: RankingBatch) -> Tensor:
    if samples.teacher is None:
        raise TrainingError(
            "the samples have no scores of a teacher",
            where="training.teacher",
            remedy="name their columns in data.schema.teacher, or set training.teacher.head = 'none'",
        )
    return samples.teacher


def of_teacher(task: str) -> str:
    """Return the name under which progressive metrics show a teacher's scores of a task."""
    return f"{task} (teacher)"


def beside_teacher(logits: Tensor, batch: RankingBatch) -> tuple[Tensor, Tensor]:
    """Return predictions and, as further tasks, scores of the teacher of a ``batch``, with labels: ``[B, 2 * tasks]``.

    The predictions are ``logits [B, tasks]``.

    Raises:
        TrainingError: If the samples have no scores of a teacher.
    """
    assert batch.labels is not None
    teacher = _scores_of(batch)
    is_missing = teacher.isnan()
    scores = torch.cat([logits, teacher.masked_fill(is_missing, 0.0)], dim=1)
    return scores, torch.cat([batch.labels, batch.labels.masked_fill(is_missing, torch.nan)], dim=1)


@contextlib.contextmanager
def _apart_from_dropout(device: torch.device) -> Iterator[None]:
    """Draw random numbers in the region without changing those that the student draws afterwards."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield
