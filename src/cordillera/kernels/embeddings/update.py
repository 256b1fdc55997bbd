"""The exact sparse update: one optimizer step per distinct row, fused from the gradient of the pooled output.

The gradient of a large embedding table is zero almost everywhere, so it is never made. The forward pass sums bags of
rows; the backward pass gives the gradients of these sums. For every row ``r`` that the batch looked up,

    G_r = sum over positions p with rows[p] = r of value_weights[p] * grad[bag of p]

in ascending order of ``p``, kept in float64; then the optimizer runs once with ``G_r``. A row that was looked up a
thousand times is updated once, and rows that were not looked up are neither read nor written. Because the order of the
sum is a property of the data, results do not depend on the number of threads.

Source: Mudigere et al. 2022 (arXiv 2104.05158), section 4.1; row-wise Adagrad as in Naumov et al. 2019
(arXiv 1906.00091), ``rwsadagrad``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor
from torch.nn import functional as F

from cordillera.errors import DependencyError, TrainingError

EmbeddingBackend = Literal["auto", "torch", "numba", "fbgemm", "triton"]


class SparseOptimizer(BaseModel):
    """Update rule of rows. ``G`` is a row's reduced gradient, ``t`` the number of updates so far, this one included.

    ``sgd``: ``w -= lr * G``.
    ``adagrad``: ``s += G**2; w -= lr * G / (sqrt(s) + eps)``, as ``torch.optim.Adagrad``.
    ``rowwise_adagrad``: one ``s`` per row, ``s += mean(G**2)``, otherwise as ``adagrad``.
    ``adam``: ``torch.optim.Adam`` on the rows that were looked up, and only on those: a row's moments do not decay
    while it is not looked up, and bias correction uses the global ``t`` (as in ``torch.optim.SparseAdam``, which
    however adds ``eps`` before the correction). A row that is first seen late, when the corrections are close to one,
    therefore begins with a step of ``(1 - beta1) / sqrt(1 - beta2)``, about three, learning rates.

    Attributes:
        name: Name of the rule.
        learning_rate: Step size, before schedules.
        eps: Value added to the denominator (not used by ``sgd``).
        beta1: Decay of Adam's first moment.
        beta2: Decay of Adam's second moment.
        initial_accumulator: Initial value of Adagrad's sums of squares.
        weight_decay: L2 regularisation, ``G += weight_decay * w`` before the rule, on the rows that were looked up and
            only on those, so that frequent rows decay more often than rare ones.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Literal["sgd", "adagrad", "rowwise_adagrad", "adam"] = "rowwise_adagrad"
    learning_rate: float = Field(0.01, ge=0, allow_inf_nan=False)
    eps: float = Field(1e-8, gt=0, allow_inf_nan=False)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.999, ge=0, lt=1)
    initial_accumulator: float = Field(0.0, ge=0, allow_inf_nan=False)
    weight_decay: float = Field(0.0, ge=0, allow_inf_nan=False)


_PLAIN = SparseOptimizer(name="sgd")
_MARKED = 32  # largest ratio of table rows to lookups at which marking is faster than sorting


@dataclass(frozen=True)
class Update:
    """Checked arguments of one call of :func:`sparse_update`, for back ends.

    Attributes:
        state: State by name, in the order of :func:`init_state`.
        grad: ``[B, F, D]``; ``F`` is 1 if two dimensions were given.
        step: Number of the update, from 1.
    """

    optimizer: SparseOptimizer
    weight: Tensor
    state: dict[str, Tensor]
    rows: Tensor
    offsets: Tensor | None
    grad: Tensor
    value_weights: Tensor | None
    learning_rate: float
    step: int

    @property
    def corrections(self) -> tuple[float, float]:
        """Adam's bias corrections ``1 - beta ** step`` (Kingma and Ba 2015, algorithm 1); ones for other rules."""
        if self.optimizer.name != "adam":
            return 1.0, 1.0
        return 1 - self.optimizer.beta1**self.step, 1 - self.optimizer.beta2**self.step


def init_state(optimizer: SparseOptimizer, weight: Tensor) -> dict[str, Tensor]:
    """Make the optimizer's state for a table.

    Args:
        optimizer: The rule.
        weight: ``float32`` or ``float64 [R, D]``; only its shape, dtype and device are read.

    Returns:
        Tensors by the names that ``torch.optim`` gives them: nothing for ``sgd``; ``sum`` of shape ``[R, D]`` for
        ``adagrad`` and ``[R]`` for ``rowwise_adagrad``; ``exp_avg`` and ``exp_avg_sq`` of shape ``[R, D]`` for
        ``adam``.
    """
    rows, dim = weight.shape

    def filled(*shape: int, value: float = 0.0) -> Tensor:
        state = torch.zeros(shape, dtype=weight.dtype, device=weight.device)
        return state.fill_(value) if value else state  # the system provides pages of zeros lazily, at no cost

    if optimizer.name == "adagrad":
        return {"sum": filled(rows, dim, value=optimizer.initial_accumulator)}
    if optimizer.name == "rowwise_adagrad":
        return {"sum": filled(rows, value=optimizer.initial_accumulator)}
    if optimizer.name == "adam":
        return {"exp_avg": filled(rows, dim), "exp_avg_sq": filled(rows, dim)}
    return {}


def sparse_update(
    optimizer: SparseOptimizer,
    weight: Tensor,
    state: dict[str, Tensor],
    rows: Tensor,
    offsets: Tensor | None,
    grad: Tensor,
    value_weights: Tensor | None = None,
    *,
    learning_rate: float,
    step: int,
    backend: EmbeddingBackend = "auto",
) -> None:
    """Update, in place, the rows that a batch looked up: exactly once each, with their whole gradient.

    NaN and infinity in ``grad`` go into the rows concerned, as they do in a dense optimizer.

    Args:
        optimizer: The rule; its ``learning_rate`` is not read.
        weight: Table, ``float32`` or ``float64 [R, D]``, contiguous.
        state: Result of :func:`init_state`.
        rows: ``int64 [T]`` in ``[0, R)``, not checked.
        offsets: ``int32`` or ``int64 [N + 1]``: bag ``n`` owns ``rows[offsets[n]:offsets[n + 1]]``. None if bag ``n``
            owns ``rows[n]`` alone.
        grad: Gradient of the bags' sums, any float dtype: ``[N, D]``, or ``[B, F, D]`` where bag ``f * B + b`` is
            ``grad[b, f]`` (feature-major bags, sample-major gradients; read in place).
        value_weights: Factor of each row in the forward pass, ``[T]``, or None for ones.
        learning_rate: Step size of this update.
        step: Number of updates of this table, this one included (from 1; read by ``adam``).
        backend: ``auto`` takes, on a GPU, ``triton``, else ``torch``; on a CPU ``numba``, else ``fbgemm``, else
            ``torch``: the first that is usable (:func:`available_backends`) and supports the optimizer and dtype. The
            choice depends on what is installed, never on timing.

    Raises:
        DependencyError: the requested back end is absent, or does not support the optimizer, dtype or device.
        TrainingError: shapes do not fit together.
    """
    if grad.dim() == 2:
        grad = grad.unsqueeze(1)
    _check_shapes(weight, rows, offsets, grad, value_weights)
    name = choose_backend(backend, optimizer, weight)
    if not rows.numel():
        return
    update = Update(optimizer, weight.detach(), state, rows, offsets, grad.detach(), value_weights, learning_rate, step)
    run = _update_torch if name == "torch" else import_module(f"cordillera.kernels.embeddings.{name}_backend").update
    with torch.no_grad():
        run(update)


def distinct_rows(rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the distinct ``rows``, ``int64 [U]``, ascending, and the position of each row among them, ``int64 [T]``.

    Args:
        rows: ``int64 [T]`` in ``[0, count)``.
        count: Number of rows that there are; few of them for each of ``rows`` are marked rather than sorted.
    """
    if count > _MARKED * rows.numel():
        distinct, inverse = torch.unique(rows, return_inverse=True)
        return distinct, inverse
    marks = torch.zeros(count, dtype=torch.bool, device=rows.device).index_fill_(0, rows, True)
    distinct = marks.nonzero()[:, 0]
    places = torch.empty(count, dtype=torch.int64, device=rows.device)
    places.index_copy_(0, distinct, torch.arange(distinct.numel(), device=rows.device))
    return distinct, places.index_select(0, rows)


def sum_by_row(
    rows: Tensor, offsets: Tensor | None, grad: Tensor, value_weights: Tensor | None, num_rows: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the distinct rows, ``int64 [U]``, ascending, and the sum of the gradients of each, ``[U, D]``; on CPUs.

    ``rows``, numbers below ``num_rows``, ``offsets``, ``grad`` and ``value_weights`` are those of
    :func:`sparse_update`; sums are made in float64, in ascending order of positions, and rounded to ``dtype``, float32
    or float64.
    """
    if grad.dim() == 2:
        grad = grad.unsqueeze(1)
    if not rows.numel():
        return torch.empty(0, dtype=torch.int64), grad.new_empty((0, grad.shape[2]), dtype=dtype)
    if _unavailable("numba") is None:
        backend = import_module("cordillera.kernels.embeddings.numba_backend")
        summed: tuple[Tensor, Tensor] = backend.sum_by_row(rows, offsets, grad, value_weights, num_rows, dtype)
        return summed
    distinct, inverse = distinct_rows(rows, num_rows)
    sums = torch.zeros(distinct.numel(), grad.shape[2], dtype=dtype)
    sparse_update(_PLAIN, sums, {}, inverse, offsets, grad, value_weights, learning_rate=-1.0, step=1)  # 0 - (-1) * sum
    return distinct, sums


def choose_backend(
    backend: EmbeddingBackend, optimizer: SparseOptimizer, weight: Tensor, device: str | None = None
) -> str:
    """Resolve ``backend`` for an optimizer and a table to ``torch``, ``numba``, ``fbgemm`` or ``triton``.

    Args:
        backend: Name of a back end, or ``auto``, as in :func:`sparse_update`.
        optimizer: The rule.
        weight: The table; only its dtype and device are read.
        device: Type of the device that the table will be moved to; None if it stays.

    Raises:
        DependencyError: the named back end cannot update this table by this rule.
    """
    device = device or weight.device.type
    if backend == "auto":
        candidates = ("triton",) if device == "cuda" else ("numba", "fbgemm")
        return next((name for name in candidates if _obstacle(name, optimizer, weight.dtype, device) is None), "torch")
    obstacle = _obstacle(backend, optimizer, weight.dtype, device)
    if obstacle is not None:
        raise DependencyError(
            obstacle, where=f"tables.backend = {backend!r}", remedy="use backend = 'auto', or see `cordillera doctor`"
        )
    return backend


def available_backends() -> dict[str, str | None]:
    """Return why each of ``torch``, ``numba``, ``fbgemm`` and ``triton`` cannot be used; None for those that can."""
    return {name: _unavailable(name) for name in ("torch", "numba", "fbgemm", "triton")}


@cache
def _unavailable(name: str) -> str | None:
    if name == "torch":
        return None
    try:
        reason: str | None = import_module(f"cordillera.kernels.embeddings.{name}_backend").unavailable()
    except ImportError as error:
        return f"{name} cannot be imported: {error}"
    return reason


def _obstacle(name: str, optimizer: SparseOptimizer, dtype: torch.dtype, device: str) -> str | None:
    """Why a back end cannot run this optimizer on this table, or None if it can."""
    if name == "fbgemm" and optimizer.weight_decay:
        return "FBGEMM's exact updates on CPUs know no weight decay"
    return _misfit(name, optimizer.name, dtype, device)


@cache
def _misfit(name: str, optimizer: str, dtype: torch.dtype, device: str) -> str | None:
    if dtype not in (torch.float32, torch.float64):
        return f"tables must be float32 or float64, got {dtype}"
    if name == "torch":
        return None
    reason = _unavailable(name)
    if reason is not None:
        return reason
    support: str | None = import_module(f"cordillera.kernels.embeddings.{name}_backend").unsupported(
        optimizer, dtype, device
    )
    return support


def _check_shapes(
    weight: Tensor, rows: Tensor, offsets: Tensor | None, grad: Tensor, value_weights: Tensor | None
) -> None:
    bags = rows.numel() if offsets is None else offsets.numel() - 1
    if grad.dim() != 3 or grad.shape[0] * grad.shape[1] != bags or grad.shape[2] != weight.shape[1]:
        raise TrainingError(
            f"{bags} bags of rows of width {weight.shape[1]} need a gradient of as many rows, got {tuple(grad.shape)}",
            where="sparse_update",
        )
    if not weight.is_contiguous():
        raise TrainingError("weight must be contiguous", where="sparse_update", remedy="pass the whole table")
    if value_weights is not None and value_weights.shape != rows.shape:
        raise TrainingError(
            f"{rows.numel()} values need as many weights, got {tuple(value_weights.shape)}", where="sparse_update"
        )


def _update_torch(update: Update) -> None:
    optimizer, weight, state, rows, offsets = update.optimizer, update.weight, update.state, update.rows, update.offsets
    grad, value_weights = update.grad, update.value_weights
    batch, features, dim = grad.shape
    order = torch.sort(rows, stable=True).indices  # stable: duplicates stay in ascending position
    distinct, counts = torch.unique_consecutive(rows[order], return_counts=True)
    if offsets is None:
        bags = order
    else:
        lengths = (offsets[1:] - offsets[:-1]).to(torch.int64)
        bags = torch.repeat_interleave(lengths, output_size=rows.numel())[order]
    sources = bags % batch * features + bags // batch  # the row of grad, seen as [B * F, D], that holds bag f * B + b
    starts = torch.zeros_like(counts)
    torch.cumsum(counts[:-1], 0, out=starts[1:])
    # a distinct row is a bag of gradient rows: gathered and summed in one pass; one thread sums a bag, in order
    reduced = F.embedding_bag(
        sources,
        grad.reshape(batch * features, dim).to(torch.float64),
        starts,
        mode="sum",
        per_sample_weights=None if value_weights is None else value_weights[order].to(torch.float64),
    )

    if optimizer.weight_decay:
        reduced = reduced.add_(weight[distinct].to(torch.float64), alpha=optimizer.weight_decay)

    def stored(name: str) -> Tensor:
        return state[name][distinct].to(torch.float64)

    def store(name: str, values: Tensor) -> None:
        state[name][distinct] = values.to(weight.dtype)

    if optimizer.name == "sgd":
        change = reduced
    elif optimizer.name == "adagrad":
        squares = stored("sum").addcmul_(reduced, reduced)
        store("sum", squares)
        change = reduced / squares.sqrt_().add_(optimizer.eps)
    elif optimizer.name == "rowwise_adagrad":
        squares = stored("sum").add_(reduced.square().mean(1))
        store("sum", squares)
        change = reduced / squares.sqrt_().add_(optimizer.eps).unsqueeze(1)
    else:
        first = stored("exp_avg").mul_(optimizer.beta1).add_(reduced, alpha=1 - optimizer.beta1)
        second = stored("exp_avg_sq").mul_(optimizer.beta2).addcmul_(reduced, reduced, value=1 - optimizer.beta2)
        store("exp_avg", first)
        store("exp_avg_sq", second)
        correction1, correction2 = update.corrections
        change = first.div_(correction1) / second.sqrt_().div_(math.sqrt(correction2)).add_(optimizer.eps)
    weight[distinct] = weight[distinct].to(torch.float64).sub_(change, alpha=update.learning_rate).to(weight.dtype)
