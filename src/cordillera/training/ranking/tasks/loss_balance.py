"""Balancing of several tasks' gradients on the representation that they share.

Each task's head is differentiated once. At the representation, the gradients of all tasks are there at the same time:
they are divided by moving averages of their magnitudes, weighted, and added up, and the sum goes back through the rest
of the model once. A task whose loss is a thousand times as large as the others' then moves the shared part as much as
they do, and heads are trained as without balancing.

Source: MultiBalance (arXiv 2411.11871), abstract and introduction: gradients of the representation, moving averages of
their magnitudes, balancing as multi-objective optimisation. Weights, scale and bias correction are ours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from cordillera.errors import TrainingError
from cordillera.models.ranking.heads import Heads
from cordillera.training.ranking.tasks.simplex import min_norm_weights, preferred_weights


class BalanceConfig(BaseModel):
    """Balancing of tasks.

    Attributes:
        mode: ``none`` adds the tasks' gradients up; ``equal`` gives their normalised gradients equal weights, or those
            of ``preference``; ``min-norm`` chooses the weights with which the sum is shortest, which improves all tasks
            where one step can; ``preferred`` is between the two.
        preference: Weights of tasks by name, for ``equal`` and ``preferred``; tasks that are not named have 1.
        strength: How near weights are to the preference with ``preferred``: factor of their Kullback-Leibler
            divergence, where normalised gradients have a length of about 1.
        decay: Decay rate of the moving averages of magnitudes.
        scale: Size of the balanced gradient: ``mean``, that of all tasks' magnitudes, or the name of a task, whose
            magnitude then counts alone.
        share: Share of the balanced gradient; the rest is the plain sum.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    mode: Literal["none", "equal", "min-norm", "preferred"] = "none"
    preference: dict[str, float] | None = None
    strength: float = Field(1.0, gt=0)
    decay: float = Field(0.9, ge=0, lt=1)
    scale: str = "mean"
    share: float = Field(1.0, ge=0, le=1)

    @model_validator(mode="after")
    def _preferences_are_weights(self) -> BalanceConfig:
        if self.preference is not None:
            if self.mode not in ("equal", "preferred"):
                raise ValueError(f"preference has no effect with mode = '{self.mode}'")
            if wrong := sorted(name for name, weight in self.preference.items() if weight <= 0):
                raise ValueError(f"preference must be above 0; it is not for {wrong}")
        return self


class _BalanceSums:
    """Sums over steps since the last record, of tasks and of pairs of them."""

    def __init__(self, tasks: int) -> None:
        self.magnitudes, self.factors, self.steps, self.left_out = (np.zeros(tasks) for _ in range(4))
        self.cosines, self.both = np.zeros((tasks, tasks)), np.zeros((tasks, tasks))

    def to_state(self) -> dict[str, Any]:
        return {name: values.tolist() for name, values in self.__dict__.items()}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> _BalanceSums:
        found = cls(0)
        found.__dict__ |= {name: np.array(values, dtype=np.float64) for name, values in state.items()}
        return found


@dataclass
class GradientFactors:
    """What one step's gradients are multiplied with.

    Attributes:
        factors: Factor ``[tasks]`` of each task's gradient; 0 for one without a gradient, or left out.
        is_left_out: Which tasks had a loss or a gradient that is not finite.
    """

    factors: NDArray[np.float64]
    is_left_out: NDArray[np.bool_]


class LossBalancer:
    """Balancer of the tasks of one model.

    It stands between the representation and the heads (:attr:`Heads.share`) and works in the backward pass.

    Args:
        config: Settings; the mode is not ``none``.
        tasks: Names of the tasks, in the order of the logits.
        add_up: Function that adds ``float64 [tasks, tasks]`` up over the ranks that share a batch, in place.

    Attributes:
        newest: Record of the last backward pass.

    Raises:
        TrainingError: If the settings name an unknown task.
    """

    def __init__(
        self, config: BalanceConfig, tasks: Sequence[str], add_up: Callable[[Tensor], Tensor] = lambda given: given
    ) -> None:
        self.config, self.tasks, self._add_up = config, tuple(tasks), add_up
        count = len(self.tasks)
        unknown = sorted(set(config.preference or {}) - set(self.tasks))
        if unknown or (config.scale != "mean" and config.scale not in self.tasks):
            raise TrainingError(
                f"names no task: {unknown or config.scale}",
                where="training.balance",
                remedy=f"tasks are {list(self.tasks)}",
            )
        preference = np.array([(config.preference or {}).get(task, 1.0) for task in self.tasks])
        self._preference = preference / preference.sum()
        self._averages, self._updates = np.zeros(count), np.zeros(count, dtype=np.int64)
        self._is_finite = torch.ones(count, dtype=torch.bool)
        self._window = _BalanceSums(count)
        self.newest = GradientFactors(np.ones(count), np.zeros(count, dtype=np.bool_))

    def expect(self, losses: Tensor) -> None:
        """Take note of the losses ``[tasks]`` of the next backward pass, which leaves out those that are not finite."""
        self._is_finite = torch.isfinite(losses.detach()).cpu()

    def share(self, representation: Tensor) -> Sequence[Tensor]:
        """Return the representation ``[B, r]`` once for each task; :meth:`combine` joins their gradients."""
        found: tuple[Tensor, ...] = _JoinedGradients.apply(self, representation)
        return found

    def combine(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return the balanced sum of the tasks' gradients with respect to the representation, ``[B, r]`` each."""
        flat = torch.stack([gradient.reshape(-1) for gradient in gradients]).float()  # [tasks, B * r]
        products = (flat @ flat.T).double().cpu()
        products.diagonal()[~self._is_finite] = math.nan
        self.newest = self._balance(self._add_up(products).numpy())
        kept = np.flatnonzero(self.newest.factors)
        if not len(kept):
            return torch.zeros_like(gradients[0])
        factors = torch.from_numpy(self.newest.factors[kept]).to(flat)
        if len(kept) < len(flat):
            flat = flat[torch.from_numpy(kept).to(flat.device)]
        return (factors @ flat).view_as(gradients[0]).to(gradients[0].dtype)

    def _balance(self, products: NDArray[np.float64]) -> GradientFactors:
        """Update the averages of magnitudes with the products of a step, and return its factors."""
        squares = products.diagonal()
        is_finite = np.isfinite(squares)
        present = is_finite & (np.where(is_finite, squares, 0.0) > 0.0)
        balance = GradientFactors(np.zeros(len(squares)), ~is_finite)
        self._window.left_out += ~is_finite
        if not present.any():
            return balance
        config, at = self.config, np.flatnonzero(present)
        magnitudes = np.sqrt(squares[at])
        self._averages[at] = config.decay * self._averages[at] + (1 - config.decay) * magnitudes
        self._updates[at] += 1
        averages = self._averages[at] / (1 - config.decay ** self._updates[at])
        weights = self._weights(products[np.ix_(at, at)] / np.outer(averages, averages), at)
        scale = 0.0 if config.scale == "mean" else self.magnitude(config.scale)
        scale = scale or float(averages.mean())  # also before the first gradient of that task
        balanced = scale * (weights * len(at)) / averages
        balance.factors[at] = balanced if config.share == 1.0 else config.share * balanced + (1 - config.share)
        window, pairs = self._window, np.ix_(at, at)
        window.magnitudes[at] += averages
        window.factors[at] += balance.factors[at]
        window.steps[at] += 1
        window.cosines[pairs] += products[pairs] / np.outer(magnitudes, magnitudes)
        window.both[pairs] += 1
        return balance

    def _weights(self, products: NDArray[np.float64], at: NDArray[np.intp]) -> NDArray[np.float64]:
        """Return the weights of the tasks ``at`` some places from the products of their normalised gradients."""
        if len(at) == 1:
            return np.ones(1)
        if self.config.mode == "min-norm":
            return min_norm_weights(products)
        preference = self._preference[at] / self._preference[at].sum()
        if self.config.mode == "preferred":
            return preferred_weights(products, preference, self.config.strength)
        return preference

    def magnitude(self, task: str) -> float:
        """Return the average magnitude of a task's gradient; 0 before its first one."""
        place = self.tasks.index(task)
        if not self._updates[place]:
            return 0.0
        return float(self._averages[place] / (1 - self.config.decay ** self._updates[place]))

    def record(self) -> dict[str, Any]:
        """Return means over the steps since the last call: magnitudes, factors and cosines by task, and tasks left out.

        A task without any gradient in these steps is not in it.
        """
        window, self._window = self._window, _BalanceSums(len(self.tasks))
        seen = [(place, task) for place, task in enumerate(self.tasks) if window.steps[place]]
        pairs = [(one, two) for two in range(len(self.tasks)) for one in range(two) if window.both[one, two]]
        return {
            "magnitudes": {task: float(window.magnitudes[place] / window.steps[place]) for place, task in seen},
            "factors": {task: float(window.factors[place] / window.steps[place]) for place, task in seen},
            "cosines": {
                f"{self.tasks[one]}, {self.tasks[two]}": float(window.cosines[one, two] / window.both[one, two])
                for one, two in pairs
            },
            "left_out": {task: int(count) for task, count in zip(self.tasks, window.left_out, strict=True) if count},
        }

    def state_dict(self) -> dict[str, Any]:
        """Return all that later steps and records depend on, as JSON values."""
        return {
            "averages": self._averages.tolist(),
            "updates": self._updates.tolist(),
            "window": self._window.to_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from :meth:`state_dict`."""
        self._averages = np.array(state["averages"], dtype=np.float64)
        self._updates = np.array(state["updates"], dtype=np.int64)
        self._window = _BalanceSums.from_state(state["window"])


class _JoinedGradients(torch.autograd.Function):
    """The representation for each task forward, the balanced sum of gradients backward."""

    @staticmethod
    def forward(ctx: Any, balancer: LossBalancer, representation: Tensor) -> tuple[Tensor, ...]:
        ctx.balancer = balancer
        return tuple(representation.view_as(representation) for _ in balancer.tasks)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:
        return None, ctx.balancer.combine(gradients)


def heads_to_balance(heads: torch.nn.Module) -> Heads:
    """Return the heads of a model, if tasks share its representation.

    Raises:
        TrainingError: If they do not.
    """
    if not isinstance(heads, Heads):
        raise TrainingError(
            "its tasks share no representation whose gradients could be balanced",
            where="model.name",
            remedy="choose another model, or training.balance.mode = 'none'",
        )
    return heads
